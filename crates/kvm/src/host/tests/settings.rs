//! Operators' settings for their VMs.

use homenode_host::Mode;

use super::*;

#[test]
fn a_permit_lives_in_the_metadata_beside_what_the_operator_wrote() {
    let tree = host(&format!(
        "<metadata><h:vm xmlns:h='{}' home='1'/></metadata>",
        crate::domain::NAMESPACE
    ));
    let mut host = connect(&tree, Acting::Live);
    let before = host.sample().unwrap();
    let permit = Permit::pollution(250_000).unwrap();
    host.set(vm(), Setting::Permit(Some(permit))).unwrap();
    let booked = host.sample().unwrap();
    assert!(booked.version > before.version);
    let settings = &booked.vms[0].settings;
    assert_eq!(
        (settings.permit, settings.home.clone()),
        (Some(permit), Some(NodeSet::one(NodeId(1))))
    );
    host.set(vm(), Setting::Permit(None)).unwrap();
    let settings = host.sample().unwrap().vms[0].settings.clone();
    assert_eq!(settings, before.vms[0].settings);
    let unknown = host.set(VmId(1), Setting::Permit(Some(permit)));
    assert!(
        matches!(
            unknown,
            Err(ActionError {
                why: Failure::VmGone,
                ..
            })
        ),
        "{unknown:?}"
    );
    drop(host);
    let refused = |tree: &Tree, acting| {
        let mut host = connect(tree, acting);
        host.sample().unwrap();
        match host.set(vm(), Setting::Permit(Some(permit))) {
            Err(ActionError {
                why: Failure::Host { cause, .. },
                ..
            }) => cause,
            other => panic!("{other:?}"),
        }
    };
    assert!(refused(&tree, Acting::DryRun).contains("--dry-run"));
    let wrong = std::fs::read_to_string(tree.root().join("node.xml")).unwrap();
    tree.write("node.xml", &wrong.replace("home='1'", "hoem='1'"));
    assert!(refused(&tree, Acting::Live).contains("hoem"));
}

#[test]
fn a_mode_lives_in_the_metadata_and_one_that_makes_no_sense_leaves_the_vm_alone() {
    let tree = host("");
    let mut host = connect(&tree, Acting::Live);
    assert_eq!(host.sample().unwrap().vms[0].settings.mode, None);
    for mode in [Some(Mode::Recommend), Some(Mode::Observe), Some(Mode::Act), None] {
        host.set(vm(), Setting::Mode(mode)).unwrap();
        assert_eq!(host.sample().unwrap().vms[0].settings.mode, mode);
    }
    drop(host);
    let tree = self::host(&format!(
        "<metadata><h:vm xmlns:h='{}' mode='carefully'/></metadata>",
        crate::domain::NAMESPACE
    ));
    let mut host = connect(&tree, Acting::Live);
    let settings = host.sample().unwrap().vms[0].settings.clone();
    assert_eq!((settings.management, settings.mode), (Management::Ignored, None));
    let notices = host.take_notices().join("; ");
    assert!(notices.contains("`carefully` is not a mode"), "{notices}");
}

#[test]
fn a_kernels_footprint_in_the_metadata_is_in_samples_from_then_on() {
    let metadata = |footprint| {
        let namespace = crate::domain::NAMESPACE;
        let set = format!("<h:vm xmlns:h='{namespace}' kernel_footprint='{footprint}'/>");
        format!("<metadata>{set}</metadata>")
    };
    let tree = self::host(&metadata("83MiB"));
    let mut host = connect(&tree, Acting::Live);
    let footprint = |host: &mut KvmHost| host.sample().unwrap().vms[0].settings.kernel_footprint;
    assert_eq!(footprint(&mut host), Some(homenode_units::Bytes::from_mib(83)));
    // Another setting of the VM does not change the footprint.
    host.set(vm(), Setting::Mode(Some(Mode::Recommend))).unwrap();
    assert_eq!(footprint(&mut host), Some(homenode_units::Bytes::from_mib(83)));
    drop(host);
    let tree = self::host(&metadata("much"));
    let mut host = connect(&tree, Acting::Live);
    assert_eq!(footprint(&mut host), None);
    let notices = host.take_notices().join("; ");
    assert!(notices.contains("kernel_footprint"), "{notices}");
}

/// Settings in libvirt's metadata of the running VM, and of its next start.
fn stored(host: &mut KvmHost) -> [VmSettings; 2] {
    let libvirt = host.context.manager.libvirt();
    [0, virt::sys::VIR_DOMAIN_XML_INACTIVE]
        .map(|flags| libvirt.said(vm(), flags).unwrap().of_vm(None, vec![]))
}

/// Stores an operator's edit in the metadata.
fn edit(host: &mut KvmHost, written: &[(&str, &str)], flags: u32) {
    let written = written
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let said = homenode_vm_settings::OperatorSettings::of(written.collect()).unwrap();
    host.context.manager.libvirt().say(vm(), &said, flags).unwrap();
}

#[test]
fn of_settings_given_in_one_period_none_is_lost_and_nor_is_what_an_operator_edits_meanwhile() {
    let tree = host("");
    let mut host = connect(&tree, Acting::Live);
    host.sample().unwrap();
    let permit = Setting::Permit(Some(Permit::pollution(100_000).unwrap()));
    let floor = Setting::MemoryFloor(Some(homenode_units::Bytes::from_mib(64)));
    let mode = Setting::Mode(Some(Mode::Observe));
    host.set(vm(), mode).unwrap();
    host.set(vm(), permit).unwrap();
    host.set(vm(), floor).unwrap();
    let said = host.sample().unwrap().vms[0].settings.clone();
    assert!(
        [mode, permit, floor].iter().all(|setting| said.has(*setting)),
        "{said:?}"
    );
    assert_eq!(stored(&mut host)[0], stored(&mut host)[1]);
    // Before the next sample, an operator opts the VM out, and then the agent sets something else.
    edit(&mut host, &[("manage", "no")], virt::sys::VIR_DOMAIN_AFFECT_LIVE);
    host.set(vm(), floor).unwrap();
    let said = host.sample().unwrap().vms[0].settings.clone();
    assert!(
        said.management == Management::Ignored && said.has(floor) && !said.has(permit),
        "{said:?}"
    );
}

#[test]
fn what_an_operator_wrote_for_the_next_start_alone_stays() {
    let tree = host("");
    let mut host = connect(&tree, Acting::Live);
    host.sample().unwrap();
    edit(&mut host, &[("home", "1")], virt::sys::VIR_DOMAIN_AFFECT_CONFIG);
    host.set(vm(), Setting::Mode(Some(Mode::Observe))).unwrap();
    let [now, next] = stored(&mut host);
    assert_eq!((now.mode, now.home), (Some(Mode::Observe), None));
    assert_eq!(
        (next.mode, next.home),
        (Some(Mode::Observe), Some(NodeSet::one(NodeId(1))))
    );
}

#[test]
fn settings_that_are_not_any_more_what_they_were_read_as_are_not_overwritten() {
    let tree = host("");
    let mut host = connect(&tree, Acting::Live);
    host.sample().unwrap();
    let permit = Permit::pollution(100_000).unwrap();
    edit(&mut host, &[("permit", "7k")], virt::sys::VIR_DOMAIN_AFFECT_LIVE);
    let wanted = [Setting::Permit(Some(permit)), Setting::Mode(Some(Mode::Observe))];
    assert_eq!(
        host.set_where(vm(), &wanted, &|stored| stored.permit.is_none()),
        Ok(false)
    );
    let [now, _] = stored(&mut host);
    assert_eq!((now.permit, now.mode), (Some("7k".parse().unwrap()), None));
    assert_eq!(
        host.set_where(vm(), &wanted, &|stored| stored.permit.is_some()),
        Ok(true)
    );
    let [now, _] = stored(&mut host);
    assert_eq!((now.permit, now.mode), (Some(permit), Some(Mode::Observe)));
}

#[test]
fn of_any_settings_in_a_row_the_last_of_each_is_in_the_metadata() {
    use proptest::prelude::*;
    use proptest::test_runner::{Config, TestRunner};
    let tree = host(&format!(
        "<metadata><h:vm xmlns:h='{}' home='1'/></metadata>",
        crate::domain::NAMESPACE
    ));
    let mut host = connect(&tree, Acting::Live);
    host.sample().unwrap();
    let setting = prop_oneof![
        prop::option::of(prop::sample::select(Mode::ALL.to_vec())).prop_map(Setting::Mode),
        prop::option::of(1u64..900)
            .prop_map(|kilo| Setting::Permit(kilo.and_then(|kilo| Permit::pollution(kilo * 1000).ok()))),
        prop::option::of(1u64..900)
            .prop_map(|mib| Setting::MemoryFloor(mib.map(homenode_units::Bytes::from_mib))),
    ];
    let host = std::cell::RefCell::new(host);
    let mut runner = TestRunner::new(Config {
        failure_persistence: None,
        ..Config::with_cases(32)
    });
    let rows = prop::collection::vec((setting, any::<bool>()), 1..10);
    let done = runner.run(&rows, |row| {
        let mut host = host.borrow_mut();
        let [before, _] = stored(&mut host);
        let mut expected = before;
        for (setting, is_sampled) in row {
            host.set(vm(), setting).unwrap();
            expected.set(setting);
            if is_sampled {
                host.sample().unwrap();
            }
        }
        prop_assert_eq!(&stored(&mut host), &[expected.clone(), expected]);
        Ok(())
    });
    done.unwrap();
}
