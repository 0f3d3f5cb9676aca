use homenode_host::{Act, CpuQuota, Lever, Limit};
use homenode_undo::journal::Written;
use serde::{Deserialize, Serialize};

use super::*;
use crate::changed::Past;
use crate::fake::{Dom, FakeXen};
use crate::leftovers::undo_all;

const VM: VmId = VmId(7);

struct Bench {
    dir: tempfile::TempDir,
    xen: FakeXen,
}

impl Bench {
    /// Makes a host with one domain, whose number is 1.
    fn new() -> Bench {
        let bench = Bench {
            dir: tempfile::tempdir().unwrap(),
            xen: FakeXen::default(),
        };
        bench.xen.world().doms.insert(1, Dom::new("web", 7));
        bench
    }

    fn hypervisor(&self) -> Hypervisor {
        self.xen.open(self.dir.path())
    }

    fn agent_that(&self, acting: Acting) -> XenHost {
        let hypervisor = self.hypervisor();
        let machine = place::machine(&hypervisor, self.dir.path()).unwrap();
        let options = Options {
            root: self.dir.path().to_owned(),
            state_dir: self.dir.path().join("state"),
            acting,
            ..Options::new(machine)
        };
        XenHost::of(hypervisor, options).unwrap()
    }

    fn agent(&self) -> XenHost {
        self.agent_that(Acting::Live)
    }

    fn journal(&self) -> Journal {
        Journal::open(&self.dir.path().join("state")).unwrap()
    }

    /// Reads the journal of an agent that is still running.
    fn entries(&self) -> BTreeMap<VmId, Journalled> {
        peek(&self.dir.path().join("state"))
    }

    fn cap(&self, domid: u32) -> u16 {
        self.xen.world().doms[&domid].share.1
    }

    fn hard(&self, index: usize) -> u8 {
        self.xen.world().doms[&1].vcpus[index].hard
    }

    /// Ends the domain, and starts another run of it. `xl` gave the new run the same cap.
    fn runs_again(&self, domid: u32, dom: Dom) {
        let mut world = self.xen.world();
        world.doms.clear();
        world.doms.insert(domid, dom);
    }
}

fn cap_of(percent: f64) -> Act {
    Act::Limit {
        limit: Limit::CpuQuota(CpuQuota::of(percent / 200.0, Ns::from_millis(30))),
        lease_ns: Ns::from_secs(600),
    }
}

fn memory_of(mib: u64, lease_ns: Ns) -> Act {
    Act::Limit {
        limit: Limit::Memory(Bytes::from_mib(mib)),
        lease_ns,
    }
}

/// Returns a domain with this balloon target in MiB.
fn ballooned(mib: u64) -> Dom {
    Dom {
        target: Some(mib << 10),
        ..Dom::new("web", 7)
    }
}

fn pin(vcpus: &[u16], cpus: &str) -> Act {
    let (vcpus, cpus) = (vcpus.to_vec(), cpus.parse().unwrap());
    Act::PinVcpus { vcpus, cpus }
}

fn home(nodes: &str) -> Act {
    Act::SetHome {
        nodes: nodes.parse().unwrap(),
    }
}

fn does(host: &mut XenHost, act: Act) {
    does_all(host, vec![act]);
}

/// Commits several acts in one plan.
fn does_all(host: &mut XenHost, acts: Vec<Act>) {
    let sample = host.sample().unwrap();
    let mut plan = Plan::new(sample.version);
    for act in acts {
        plan.decide("test", act.on(VM), "to see it undone".into());
    }
    let outcomes = host.commit(&plan).unwrap().outcomes;
    let is_done = |outcome: &Outcome| matches!(outcome, Outcome::Done | Outcome::Renewed);
    assert!(outcomes.iter().all(is_done), "{outcomes:?}");
}

fn says(host: &mut XenHost, word: &str) -> usize {
    let notices = host.take_notices();
    notices.iter().filter(|text| text.contains(word)).count()
}

fn capped(name: &str, cap: u16) -> Dom {
    Dom {
        share: (256, cap),
        ..Dom::new(name, 7)
    }
}

#[test]
fn a_cap_that_the_next_run_has_is_lifted_and_its_operators_is_in_force() {
    let bench = Bench::new();
    bench.xen.world().doms.get_mut(&1).unwrap().share = (512, 80);
    let mut host = bench.agent();
    does(&mut host, cap_of(30.0));
    assert_eq!(bench.xen.world().doms[&1].share, (512, 30));
    bench.runs_again(2, capped("web", 30));
    let sample = host.sample().unwrap();
    assert_eq!(bench.cap(2), 80);
    // From the first reading on, the agent treats the restored cap as the operator's.
    let quota = sample.vms[0].settings.quota.unwrap();
    assert!((quota.share() - 0.4).abs() < 0.01, "{quota:?}");
    // A cap that the agent did not set stays.
    does(&mut host, cap_of(30.0));
    bench.runs_again(3, capped("web", 55));
    host.sample().unwrap();
    assert_eq!(bench.cap(3), 55);
    assert!(bench.entries().is_empty());
}

#[test]
fn a_saved_domain_comes_back_without_the_cap_that_it_was_saved_with() {
    let bench = Bench::new();
    let mut host = bench.agent();
    does(&mut host, cap_of(30.0));
    does(&mut host, pin(&[0], "2"));
    bench.xen.world().doms.clear();
    host.sample().unwrap();
    let entry = bench.entries()[&VM].clone();
    assert_eq!(entry.keys().collect::<Vec<_>>(), [Past::KEY]);
    assert_eq!(host.next_lease_end(), None);
    // No setting of the agent is in force. So neither the agent's end nor another agent with another state directory changes
    // anything.
    assert_eq!(host.restore(), Undone::default());
    drop(host);
    let mut host = bench.agent();
    // While the domain is being built, it has no cap yet.
    bench.runs_again(9, Dom::new("web", 7).paused());
    host.sample().unwrap();
    assert!(bench.entries().contains_key(&VM));
    bench.runs_again(9, capped("web", 30));
    host.sample().unwrap();
    assert_eq!(bench.cap(9), 0);
    assert!(bench.entries().is_empty());
}

#[test]
fn a_guard_and_release_lift_what_another_run_has() {
    let bench = Bench::new();
    let mut host = bench.agent();
    does(&mut host, cap_of(30.0));
    drop(host);
    bench.runs_again(2, capped("web", 30));
    let hypervisor = bench.hypervisor();
    bench.xen.world().failing = Some("set_share");
    let undone = undo_all(&hypervisor, &mut bench.journal());
    assert!(undone.failures[0].contains("domain web"), "{undone:?}");
    bench.xen.world().failing = None;
    let undone = undo_all(&hypervisor, &mut bench.journal());
    assert_eq!((undone.failures, bench.cap(2)), (vec![], 0));
    assert!(bench.entries().is_empty());
}

#[test]
fn a_migration_in_flight_is_followed_to_its_end() {
    let bench = Bench::new();
    let mut host = bench.agent();
    does(&mut host, cap_of(30.0));
    // The new domain gets its cap when it is built.
    bench
        .xen
        .world()
        .doms
        .insert(2, Dom::new("web--incoming", 7).paused());
    drop(host);
    let hypervisor = bench.hypervisor();
    assert_eq!(undo_all(&hypervisor, &mut bench.journal()).vms, [VM]);
    assert_eq!(bench.cap(1), 0);
    bench.runs_again(2, capped("web", 30));
    let mut host = bench.agent();
    host.sample().unwrap();
    assert_eq!(bench.cap(2), 0);
    assert!(bench.entries().is_empty());
}

#[test]
fn what_an_operator_pins_again_and_again_is_given_back() {
    let bench = Bench::new();
    let mut host = bench.agent();
    does(&mut host, pin(&[0, 1], "3"));
    let pins = |cpus: u8| bench.xen.world().doms.get_mut(&1).unwrap().vcpus[0].hard = cpus;
    pins(0b0001);
    host.sample().unwrap();
    assert_eq!(says(&mut host, "given CPUs 0 by another program"), 1);
    // The second time, the affinity was no longer the agent's.
    pins(0b0110);
    host.sample().unwrap();
    assert_eq!(says(&mut host, "given CPUs 1-2 by another program"), 1);
    does(&mut host, pin(&[0], "2"));
    assert_eq!(bench.hard(0), 0b0100);
    assert_eq!(host.restore().failures, Vec::<String>::new());
    assert_eq!((bench.hard(0), bench.hard(1)), (0b0110, 0b1111));
}

#[test]
fn what_the_agent_did_earlier_in_a_plan_is_nobody_elses() {
    for acts in [
        vec![pin(&[0], "3"), home("3"), pin(&[1], "3")],
        vec![home("3"), pin(&[0, 1], "3")],
    ] {
        let bench = Bench::new();
        let mut host = bench.agent();
        does_all(&mut host, acts);
        assert_eq!((bench.hard(0), bench.hard(1)), (0b1000, 0b1000));
        assert_eq!(says(&mut host, "another program"), 0);
        assert_eq!(host.restore().failures, Vec::<String>::new());
        assert_eq!((bench.hard(0), bench.hard(1)), (0b1111, 0b1111));
        assert_eq!(bench.xen.world().doms[&1].nodes, 0b1111);
    }
}

#[test]
fn a_vcpu_that_comes_online_later_has_back_what_it_had() {
    let bench = Bench::new();
    {
        let mut world = bench.xen.world();
        let vcpus = &mut world.doms.get_mut(&1).unwrap().vcpus;
        (vcpus[1].is_online, vcpus[1].hard) = (false, 0b0110);
    }
    let mut host = bench.agent();
    does(&mut host, pin(&[0], "3"));
    bench.xen.world().doms.get_mut(&1).unwrap().vcpus[1].is_online = true;
    does(&mut host, pin(&[1], "2"));
    assert_eq!(host.restore().failures, Vec::<String>::new());
    assert_eq!((bench.hard(0), bench.hard(1)), (0b1111, 0b0110));
}

#[test]
fn nodes_that_somebody_else_set_are_given_back() {
    let bench = Bench::new();
    let nodes = |bits: u8| bench.xen.world().doms.get_mut(&1).unwrap().nodes = bits;
    let mut host = bench.agent();
    does(&mut host, home("3"));
    does(&mut host, pin(&[0], "3"));
    nodes(0b0010);
    host.sample().unwrap();
    assert_eq!(says(&mut host, "to come from nodes 1"), 1);
    nodes(0b0011);
    does(&mut host, home("2"));
    assert_eq!(bench.xen.world().doms[&1].nodes, 0b0100);
    assert_eq!(host.restore().failures, Vec::<String>::new());
    assert_eq!(bench.xen.world().doms[&1].nodes, 0b0011);
}

/// A journal entry that no version of Homenode writes.
macro_rules! foreign {
    ($name:ident as $key:expr) => {
        #[derive(Serialize, Deserialize)]
        struct $name(String);
        impl Written for $name {
            const KEY: &'static str = $key;
        }
    };
}
foreign!(ForeignPins as Pins::KEY);
foreign!(ForeignCap as crate::changed::Cap::KEY);
foreign!(Unknown as "xen-of-later");

#[test]
fn what_cannot_be_read_is_a_failure_and_stays() {
    let keys = [ForeignPins::KEY, ForeignCap::KEY, Unknown::KEY];
    for (at, key) in keys.into_iter().enumerate() {
        let bench = Bench::new();
        let mut host = bench.agent();
        does(&mut host, home("3"));
        drop(host);
        let mut journal = bench.journal();
        let text = || "?".to_owned();
        match at {
            0 => journal.set(VM, &ForeignPins(text())),
            1 => journal.set(VM, &ForeignCap(text())),
            _ => journal.set(VM, &Unknown(text())),
        }
        .unwrap();
        for _ in 0..2 {
            let undone = undo_all(&bench.hypervisor(), &mut journal);
            assert!(undone.failures[0].contains(key), "{undone:?}");
            let kept = journal.entry(VM).unwrap();
            assert_eq!(kept.keys().collect::<Vec<_>>(), [key], "all else is undone");
        }
        assert_eq!(bench.xen.world().doms[&1].nodes, 0b1111);
        // An agent reports the entry too, and leaves it alone. The entry is removed when the domain ends.
        drop(journal);
        let mut host = bench.agent();
        host.sample().unwrap();
        assert!(host.restore().failures[0].contains(key));
        bench.xen.world().doms.clear();
        host.sample().unwrap();
        assert!(bench.entries().is_empty());
    }
}

#[test]
fn a_xenstore_that_does_not_answer_costs_no_domain_its_name() {
    let bench = Bench::new();
    let mut host = bench.agent();
    assert_eq!(host.sample().unwrap().vms[0].name, "web");
    bench.xen.world().store_fails = Some(crate::error::StoreError::Silent);
    bench.xen.world().doms.insert(2, Dom::new("new", 8));
    for _ in 0..3 {
        let vms = host.sample().unwrap().vms;
        assert_eq!((vms[0].name.as_str(), vms.len()), ("web", 1));
    }
    assert_eq!(says(&mut host, "xenstored does not report the names"), 1);
    // The domain's levers work meanwhile.
    does(&mut host, pin(&[0], "3"));
    bench.xen.world().store_fails = None;
    assert_eq!(host.sample().unwrap().vms.len(), 2);
}

#[test]
fn of_two_domains_with_one_uuid_none_is_touched() {
    let bench = Bench::new();
    let mut host = bench.agent();
    does(&mut host, pin(&[0], "3"));
    bench.xen.world().doms.insert(2, Dom::new("copy", 7));
    bench.xen.world().doms.insert(3, Dom::new("other", 8));
    let vms = host.sample().unwrap().vms;
    assert_eq!((vms[0].name.as_str(), vms.len()), ("other", 1));
    assert_eq!(says(&mut host, "web, copy have the same UUID"), 1);
    // Changes to the first domain are still known, so they are undone.
    assert_eq!(host.restore().vms, [VM]);
    assert_eq!(bench.hard(0), 0b1111);
}

#[test]
fn a_dry_run_sees_what_is_the_agents_and_takes_nothing_over() {
    let bench = Bench::new();
    bench.xen.world().doms.get_mut(&1).unwrap().share = (256, 80);
    let mut host = bench.agent();
    does(&mut host, cap_of(30.0));
    does(&mut host, pin(&[0, 1], "3"));
    let seen = host.sample().unwrap().vms.remove(0).settings;
    let mut dry = bench.agent_that(Acting::DryRun);
    assert_eq!(dry.sample().unwrap().vms[0].settings, seen);
    assert_eq!(seen.cpus_allowed, None, "{seen:?}");
    does(
        &mut host,
        Act::Lift {
            lever: Lever::CpuQuota,
        },
    );
    assert_eq!(
        dry.sample().unwrap().vms[0].settings,
        host.sample().unwrap().vms[0].settings
    );
}

#[test]
fn a_cap_is_set_without_reading_the_weight() {
    let bench = Bench::new();
    let hypervisor = bench.hypervisor();
    let pool = hypervisor.pool(0).unwrap();
    bench.xen.world().doms.get_mut(&1).unwrap().share = (700, 0);
    // If the weight cannot be read, it cannot be written back over another program's setting.
    bench.xen.world().failing = Some("share");
    hypervisor.set_cap(1, &pool, 40).unwrap();
    assert_eq!(bench.xen.world().doms[&1].share, (700, 40));
}

/// Returns the path of a domain's settings file.
fn settings_at(bench: &Bench, name: &str) -> std::path::PathBuf {
    let dir = bench.dir.path().join("etc/homenode/vms");
    std::fs::create_dir_all(&dir).unwrap();
    dir.join(format!("{name}.toml"))
}

#[test]
fn a_domain_whose_name_leads_elsewhere_has_the_file_of_its_uuid() {
    let bench = Bench::new();
    std::fs::write(settings_at(&bench, "../evil"), "manage = 'no'").unwrap();
    bench.xen.world().doms.insert(1, Dom::new("../evil", 7));
    let mut host = bench.agent();
    let settings = host.sample().unwrap().vms.remove(0).settings;
    assert_eq!(settings.management, homenode_host::Management::Managed);
    std::fs::write(settings_at(&bench, &VmId(7).to_string()), "manage = 'no'").unwrap();
    let settings = host.sample().unwrap().vms.remove(0).settings;
    assert_eq!(settings.management, homenode_host::Management::Ignored);
}

#[test]
fn of_settings_given_in_one_period_none_is_lost_and_nor_is_what_an_operator_writes_meanwhile() {
    let bench = Bench::new();
    let mut host = bench.agent();
    host.sample().unwrap();
    let mode = Setting::Mode(Some(homenode_host::Mode::Observe));
    let floor = Setting::MemoryFloor(Some(Bytes::from_mib(64)));
    let permit = Setting::Permit(Some("100k".parse().unwrap()));
    host.set(VmId(7), mode).unwrap();
    host.set(VmId(7), floor).unwrap();
    let path = settings_at(&bench, "web");
    let written = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, format!("{written}home = '1' # mine\n")).unwrap();
    assert_eq!(
        host.set_where(VmId(7), &[permit], &|stored| stored.mode.is_none()),
        Ok(false)
    );
    assert_eq!(
        host.set_where(VmId(7), &[permit], &|stored| stored.mode.is_some()),
        Ok(true)
    );
    let said = host.sample().unwrap().vms.remove(0).settings;
    assert!(
        [mode, floor, permit].iter().all(|setting| said.has(*setting)),
        "{said:?}"
    );
    assert!(said.home.is_some());
    assert!(std::fs::read_to_string(&path).unwrap().contains("# mine"));
}

#[test]
fn a_file_of_a_name_that_two_domains_have_applies_to_neither() {
    let bench = Bench::new();
    let name = bench.xen.world().doms[&1].name.clone();
    std::fs::write(settings_at(&bench, &name), "home = '1'").unwrap();
    let mut host = bench.agent();
    assert!(host.sample().unwrap().vms[0].settings.home.is_some());
    bench.xen.world().doms.insert(2, Dom::new(&name, 8));
    let vms = host.sample().unwrap().vms;
    assert_eq!(vms.len(), 2);
    for vm in &vms {
        assert_eq!(vm.settings.management, homenode_host::Management::Ignored);
        assert!(vm.settings.home.is_none());
    }
    assert!(says(&mut host, &VmId(7).to_string()) > 0);
    let refused = host.set(VmId(7), Setting::Mode(None)).unwrap_err().to_string();
    assert!(
        refused.contains(&VmId(7).to_string()) && refused.contains(&VmId(8).to_string()),
        "{refused}"
    );
    std::fs::remove_file(settings_at(&bench, &name)).unwrap();
    host.set(VmId(8), Setting::Mode(Some(homenode_host::Mode::Observe)))
        .unwrap();
    let modes: Vec<_> = host
        .sample()
        .unwrap()
        .vms
        .iter()
        .map(|vm| vm.settings.mode)
        .collect();
    assert_eq!(modes, [None, Some(homenode_host::Mode::Observe)]);
}

#[test]
fn memory_is_asked_for_and_said_to_be() {
    let bench = Bench::new();
    bench.xen.world().console = "(XEN) Domain 1 (total: 32768):\n(XEN)     Node 2: 32768\n".into();
    let mut host = bench.agent();
    host.sample().unwrap();
    host.sample().unwrap();
    assert_eq!(bench.xen.world().keys_pressed, 1);
    assert_eq!(says(&mut host, "debug key `u`"), 1);
}

#[test]
fn recordings_say_whose_balloons_they_are_and_of_virtios_nothing() {
    let written = |sample: &Sample| serde_json::to_string(sample).unwrap();
    let mut sample = Bench::new().agent().sample().unwrap();
    let again: Sample = serde_json::from_str(&written(&sample)).unwrap();
    assert_eq!(again.balloons, Balloons::Xen);
    sample.balloons = Balloons::Virtio;
    assert!(!written(&sample).contains("balloons"));
    let again: Sample = serde_json::from_str(&written(&sample)).unwrap();
    assert_eq!(again.balloons, Balloons::Virtio);
}

#[test]
fn memory_is_limited_renewed_and_given_back_with_its_lease() {
    let bench = Bench::new();
    let target = || bench.xen.world().doms[&1].target.unwrap() >> 10;
    let mut host = bench.agent();
    let sample = host.sample().unwrap();
    assert!(sample.vms[0].balloon.is_none(), "it has no target");
    assert_eq!(sample.balloons, Balloons::Xen);
    bench.runs_again(1, ballooned(100));
    does(&mut host, memory_of(80, Ns::from_secs(600)));
    let seen = host.sample().unwrap().vms[0].balloon.unwrap();
    let bytes = Bytes::from_mib;
    assert_eq!((target(), seen.limit), (80, Some(bytes(80))));
    assert_eq!((seen.current, seen.maximum), (bytes(80), bytes(100)));
    // A target that the operator sets meanwhile becomes the maximum, and is what is restored.
    bench.xen.world().doms.get_mut(&1).unwrap().target = Some(70 << 10);
    assert_eq!(host.sample().unwrap().vms[0].balloon.unwrap().maximum, bytes(70));
    does(&mut host, memory_of(60, Ns::from_millis(1)));
    does(&mut host, cap_of(30.0));
    std::thread::sleep(std::time::Duration::from_millis(2));
    host.sample().unwrap();
    assert_eq!((target(), bench.cap(1)), (70, 30), "the cap's lease goes on");
    assert_eq!(host.restore(), undone(&[VM]));
    assert_eq!((target(), bench.cap(1)), (70, 0));
}

fn undone(vms: &[VmId]) -> Undone {
    Undone {
        vms: vms.to_vec(),
        failures: Vec::new(),
    }
}

#[test]
fn the_next_run_of_a_domain_has_its_operators_memory() {
    let bench = Bench::new();
    bench.runs_again(1, ballooned(100));
    let mut host = bench.agent();
    does(&mut host, memory_of(80, Ns::from_secs(600)));
    does(&mut host, cap_of(30.0));
    // `xl` saved the domain with both limits. Then the agent ended, and the domain is restored.
    bench.xen.world().doms.clear();
    host.sample().unwrap();
    assert_eq!(bench.entries()[&VM].keys().collect::<Vec<_>>(), [Past::KEY]);
    drop(host);
    let dom = Dom {
        share: (256, 30),
        ..ballooned(80)
    };
    bench.runs_again(2, dom);
    bench.xen.world().failing = Some("set_memory");
    let mut journal = bench.journal();
    let failed = undo_all(&bench.hypervisor(), &mut journal).failures;
    assert!(failed[0].contains("mem-set"), "{failed:?}");
    assert_eq!(
        bench.cap(2),
        0,
        "one that fails keeps no other from being restored"
    );
    bench.xen.world().failing = None;
    assert_eq!(undo_all(&bench.hypervisor(), &mut journal), undone(&[]));
    assert_eq!(bench.xen.world().doms[&2].target, Some(100 << 10));
    drop(journal);
    assert!(bench.entries().is_empty());
}

#[test]
fn memory_is_not_given_back_while_xenstored_is_silent_and_stays_written_down() {
    let bench = Bench::new();
    bench.runs_again(1, ballooned(100));
    let mut host = bench.agent();
    does(&mut host, memory_of(80, Ns::from_secs(600)));
    does(&mut host, pin(&[0], "3"));
    bench.xen.world().store_fails = Some(crate::error::StoreError::Silent);
    let failed = host.restore().failures;
    assert!(failed[0].contains("does not answer"), "{failed:?}");
    assert_eq!(bench.hard(0), 0b1111);
    bench.xen.world().store_fails = None;
    assert_eq!(host.restore(), undone(&[VM]));
    assert_eq!(bench.xen.world().doms[&1].target, Some(100 << 10));
}
