//! Which homes the loop knows: those that the host has in force, whatever samples lacked and whatever ended meanwhile.

use std::collections::BTreeSet;

use homenode_control::{Config, Control, Event, Mode, PolicySet};
use homenode_host::{
    Act, Action, ActionError, Holds, HomeInForce, Host, HostError, Lever, Plan, Receipt, Refusal, Sample,
    Setting,
};
use homenode_machine::Machine;
use homenode_twin::{Scenario, Twin, VmSpec};
use homenode_units::{Bytes, CpuSet, NodeId, NodeSet, Ns, VmId};

const PERIOD: Ns = Ns::from_secs(1);

/// The simulator, some of whose VMs are left out of samples, as a real host leaves out what it cannot read.
struct Gappy {
    twin: Twin,
    left_out: BTreeSet<VmId>,
}

impl Host for Gappy {
    fn machine(&self) -> &Machine {
        self.twin.machine()
    }

    fn wait(&mut self, period: Ns) -> Ns {
        self.twin.wait(period)
    }

    fn sample(&mut self) -> Result<Sample, HostError> {
        let mut sample = self.twin.sample()?;
        sample.vms.retain(|vm| !self.left_out.contains(&vm.id));
        Ok(sample)
    }

    fn commit(&mut self, plan: &Plan) -> Result<Receipt, Refusal> {
        self.twin.commit(plan)
    }

    fn set_where(&mut self, vm: VmId, settings: &[Setting], holds: Holds<'_>) -> Result<bool, ActionError> {
        self.twin.set_where(vm, settings, holds)
    }
}

fn host(preset: &str, names: &[&str]) -> Gappy {
    let machine = homenode_machine_files::preset(preset).expect("a preset");
    let vm = |name: &&str| VmSpec::new(name, 4, Bytes::from_gib(4), "povray").doing(1e6);
    let scenario = Scenario::of("homes", names.iter().map(vm).collect());
    Gappy {
        twin: Twin::new(machine, &scenario, 1).expect("the scenario fits"),
        left_out: BTreeSet::new(),
    }
}

fn acting(policies: PolicySet) -> Control {
    let config = Config {
        policies,
        ..Config::default()
    };
    Control::new(config, Mode::Act)
}

fn run(control: &mut Control, host: &mut Gappy, cycles: usize) -> Vec<Event> {
    let step = |_| {
        host.wait(PERIOD);
        control.step(host).expect("the twin answers").events
    };
    (0..cycles).flat_map(step).collect()
}

fn id(host: &Gappy, name: &str) -> VmId {
    host.twin.vm_id(name).expect("a VM of the scenario")
}

fn known(control: &Control, host: &Gappy, name: &str) -> Option<NodeSet> {
    let status = control.status(host.machine());
    let vm = status.vms.into_iter().find(|vm| vm.name == name);
    vm.and_then(|vm| vm.home)
}

fn in_force(host: &mut Gappy, name: &str) -> HomeInForce {
    let (vm, sample) = (id(host, name), host.twin.sample().expect("it answers"));
    sample.vm(vm).expect("it runs").home.clone()
}

fn homes_given(events: &[Event]) -> usize {
    let gives = |event: &&Event| match event {
        Event::Decided { decision, .. } => decision.action.act.lever() == Lever::Home,
        _ => false,
    };
    events.iter().filter(gives).count()
}

/// Carries out what no policy decided.
fn order(host: &mut Gappy, actions: &[Action]) {
    let mut plan = Plan::new(host.twin.sample().expect("it answers").version);
    for action in actions {
        plan.decide("test", action.clone(), "a test".to_owned());
    }
    host.twin.commit(&plan).expect("it is possible");
}

#[test]
fn a_home_in_force_is_known_after_samples_that_lack_its_vm() {
    for missing_for in [1, 5] {
        let mut host = host("r910", &["a", "b"]);
        let mut control = acting(PolicySet::Tavo);
        run(&mut control, &mut host, 5);
        let home = known(&control, &host, "a");
        assert!(home.is_some(), "it has no home");
        host.left_out.insert(id(&host, "a"));
        run(&mut control, &mut host, missing_for);
        assert_eq!(known(&control, &host, "a"), None, "the loop does not see it");
        host.left_out.clear();
        let events = run(&mut control, &mut host, 1);
        assert_eq!(known(&control, &host, "a"), home);
        assert_eq!(homes_given(&events), 0, "it still has it: {events:#?}");
        // The loop owns the home: the home is lifted when the operator lets the agent only observe.
        let observed = Setting::Mode(Some(Mode::Observe));
        let vm = id(&host, "a");
        host.twin.set(vm, observed).expect("it runs");
        run(&mut control, &mut host, 2);
        assert_eq!(in_force(&mut host, "a"), HomeInForce::Unplaced);
        assert_eq!(known(&control, &host, "a"), None);
    }
}

#[test]
fn a_restarted_agent_knows_the_home_of_a_vm_that_its_first_samples_lack() {
    for is_adopted in [true, false] {
        let mut host = host("r910", &["a", "b"]);
        let mut control = acting(PolicySet::Tavo);
        run(&mut control, &mut host, 5);
        let home = known(&control, &host, "a");
        assert!(home.is_some(), "it has no home");
        let mut control = acting(PolicySet::Tavo);
        let vm = id(&host, "a");
        // A journal that was lost names no homes.
        if is_adopted {
            control.adopt(vm, home.clone());
        }
        host.left_out.insert(vm);
        run(&mut control, &mut host, 2);
        host.left_out.clear();
        let events = run(&mut control, &mut host, 1);
        assert_eq!(known(&control, &host, "a"), home);
        let given = events.iter().filter(|event| match event {
            Event::Decided { decision, .. } => decision.action.vm == vm,
            _ => false,
        });
        assert_eq!(given.count(), 0, "it has what it needs: {events:#?}");
    }
}

#[test]
fn a_home_that_ended_on_the_host_is_not_known_any_more() {
    let mut host = host("r910", &["a", "b"]);
    let mut control = acting(PolicySet::Tavo);
    run(&mut control, &mut host, 5);
    let vm = id(&host, "a");
    // The host itself lifts a home when a VM's bounds change, and a VM that is started again has none.
    let lever = Lever::Home;
    order(&mut host, &[Act::Lift { lever }.on(vm)]);
    let events = run(&mut control, &mut host, 1);
    assert!(homes_given(&events) > 0, "its policy decides again: {events:#?}");
    assert_eq!(
        known(&control, &host, "a").as_ref(),
        in_force(&mut host, "a").nodes()
    );
}

#[test]
fn a_restarted_agent_keeps_a_vm_on_the_caches_of_its_home() {
    let mut host = host("epyc7763-nps1", &["a"]);
    host.wait(PERIOD);
    let vm = id(&host, "a");
    let nodes = NodeSet::one(NodeId(0));
    let cache = host.machine().llcs[1].cpus.clone();
    let all = host.machine().cpus_of(&nodes);
    assert!(
        cache.is_subset(&all) && cache != all,
        "a node with several caches"
    );
    let pin = |cpus: &CpuSet| {
        let (vcpus, cpus) = ((0..4).collect(), cpus.clone());
        Act::PinVcpus { vcpus, cpus }.on(vm)
    };
    let give = Act::SetHome { nodes: nodes.clone() }.on(vm);
    order(&mut host, &[give, pin(&cache)]);
    let affinity = |host: &mut Gappy| {
        let sample = host.twin.sample().expect("it answers");
        sample.vm(vm).expect("it runs").vcpus[0].affinity.clone()
    };
    let restarted = |host: &mut Gappy| {
        let mut control = acting(PolicySet::Homenode);
        control.adopt(vm, Some(nodes.clone()));
        run(&mut control, host, 5);
        assert_eq!(known(&control, host, "a"), Some(nodes.clone()));
    };
    restarted(&mut host);
    assert_eq!(affinity(&mut host), cache);
    // An agent that died in the middle of a measurement left it on another cache of its home, from which it returns.
    let other = host.machine().llcs[0].cpus.clone();
    order(&mut host, &[pin(&other)]);
    restarted(&mut host);
    assert_eq!(affinity(&mut host), cache);
}
