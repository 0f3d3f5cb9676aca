//! What operators choose for their VMs.

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
    let nobody = host.set(VmId(1), Setting::Permit(Some(permit)));
    assert!(
        matches!(
            nobody,
            Err(ActionError {
                why: Failure::VmGone,
                ..
            })
        ),
        "{nobody:?}"
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
    assert!(notices.contains("`carefully` is no mode"), "{notices}");
}
