//! Own misses are counted on the simulated host, by the same code as on a real host: VMs leave a cache for seconds, and return.

use homenode_control::{Config, Control, Cycle, Event, Mode};
use homenode_host::{
    ActionError, Decision, Failure, Holds, Host, HostError, Lever, Outcome, Plan, Receipt, Refusal, Sample,
    Setting,
};
use homenode_machine::Machine;
use homenode_policy::permits::attribution::{self, Charged};
use homenode_twin::{EventAction, Scenario, Twin, VmSpec};
use homenode_units::{Bytes, Chance, CpuSet, NodeId, NodeSet, Ns, VmId};

const VICTIM: &str = "victim";
const PERIOD: Ns = Ns::from_secs(1);

/// Alone, gcc causes about 16 thousand misses per slice on such a machine. Beside lbm it causes several times as many.
const PERMIT: &str = "60k";

fn vm(name: &str, program: &str) -> VmSpec {
    VmSpec::new(name, 1, Bytes::from_mib(1200), program)
        .doing(1e4)
        .with_memory_on(NodeSet::one(NodeId(0)))
}

/// A victim beside two polluters, at home on the same one of two sockets.
fn crowd() -> Vec<VmSpec> {
    let victim = vm(VICTIM, "gcc").with_permit(PERMIT.parse().expect("a permit"));
    vec![victim, vm("polluter0", "lbm"), vm("polluter1", "lbm")]
}

fn twin(scenario: &Scenario, seed: u64) -> Twin {
    let machine = homenode_machine_files::preset("r420").expect("a preset");
    Twin::new(machine, scenario, seed).expect("the scenario fits")
}

fn config(charged: Charged) -> Config {
    let mut config = Config::default();
    config.permits.attribution.charged = charged;
    config
}

fn run<H: Host>(control: &mut Control, host: &mut H, cycles: usize) -> Vec<Cycle> {
    let step = |_| {
        host.wait(PERIOD);
        control.step(host).expect("the twin answers")
    };
    (0..cycles).map(step).collect()
}

fn of<'a>(sample: &'a Sample, name: &str) -> &'a homenode_host::VmSample {
    sample.vms.iter().find(|vm| vm.name == name).expect("it runs")
}

fn affinity(twin: &mut Twin, name: &str) -> CpuSet {
    of(&twin.sample().expect("it answers"), name).vcpus[0]
        .affinity
        .clone()
}

/// Returns the share of the time in which the victim ran, and the share in which the first polluter was away, over five minutes
/// after half a minute.
fn shares(charged: Charged) -> (f64, f64) {
    let mut twin = twin(&Scenario::of("attribution", crowd()), 1);
    let mut control = Control::new(config(charged), Mode::Act);
    run(&mut control, &mut twin, 30);
    let ran = |twin: &mut Twin| of(&twin.sample().expect("it answers"), VICTIM).vcpus[0].running_ns;
    let before = ran(&mut twin);
    let home = affinity(&mut twin, "polluter0");
    let mut away = 0;
    for _ in 0..300 {
        run(&mut control, &mut twin, 1);
        away += u32::from(affinity(&mut twin, "polluter0") != home);
    }
    let share = (ran(&mut twin) - before).as_f64() / (300.0 * PERIOD.as_f64());
    (share, f64::from(away) / 300.0)
}

#[test]
fn a_victim_keeps_its_permits_full_cpu_and_without_attribution_is_throttled() {
    let (own, away) = shares(Charged::Own);
    let (counted, never) = shares(Charged::Counted);
    assert!(own > 0.99, "{own}");
    assert!(counted < 0.8, "{counted}");
    // A window of three periods may begin just before the five minutes end.
    let most = attribution::Config::default().away_share + 3.0 / 300.0;
    assert!((0.0..=most).contains(&away), "{away}");
    assert!(away > 0.0 && never == 0.0, "{away} {never}");
}

#[test]
fn a_thrasher_still_pays_for_its_own_misses() {
    let mut vms = crowd();
    vms[1] = vm("polluter0", "lbm").with_permit("250k".parse().expect("a permit"));
    let mut twin = twin(&Scenario::of("attribution", vms), 1);
    let mut control = Control::new(config(Charged::Own), Mode::Act);
    run(&mut control, &mut twin, 60);
    let status = control.status(twin.machine());
    let permit = |name: &str| {
        &status
            .vms
            .iter()
            .find(|vm| vm.name == name)
            .expect("it runs")
            .permit
    };
    assert!(permit("polluter0").quota.is_some(), "{:?}", permit("polluter0"));
    assert!(permit(VICTIM).quota.is_none(), "{:?}", permit(VICTIM));
    let charged = permit(VICTIM).charged.clone().expect("it has a permit");
    assert!(charged.contains("percent of its misses"), "{charged}");
}

/// A simulated host that fails some of the acts on vCPUs and homes.
struct Faulty {
    twin: Twin,
    chance: Chance,
    /// One act in this number fails; none if 0.
    fails_in: u64,
}

impl Host for Faulty {
    fn machine(&self) -> &Machine {
        self.twin.machine()
    }

    fn wait(&mut self, period: Ns) -> Ns {
        self.twin.wait(period)
    }

    fn sample(&mut self) -> Result<Sample, HostError> {
        self.twin.sample()
    }

    fn commit(&mut self, plan: &Plan) -> Result<Receipt, Refusal> {
        if self.fails_in > 0 && self.chance.bits().is_multiple_of(3 * self.fails_in) {
            let current = self.twin.sample().expect("it answers").version;
            return Err(Refusal::Stale {
                planned: plan.version,
                current,
            });
        }
        let mut outcomes = Vec::new();
        let mut version = plan.version;
        for decision in &plan.decisions {
            let lever = decision.action.act.lever();
            let may_fail = matches!(lever, Lever::VcpuPlacement | Lever::Home) && self.fails_in > 0;
            if may_fail && self.chance.bits().is_multiple_of(self.fails_in) {
                outcomes.push(Outcome::Failed(Failure::VmGone.on("one")));
                continue;
            }
            let mut one = Plan::new(version);
            one.decisions.push(decision.clone());
            let receipt = self.twin.commit(&one)?;
            version = receipt.version;
            outcomes.extend(receipt.outcomes);
        }
        Ok(Receipt { version, outcomes })
    }

    fn set_where(&mut self, vm: VmId, settings: &[Setting], holds: Holds<'_>) -> Result<bool, ActionError> {
        self.twin.set_where(vm, settings, holds)
    }
}

/// Returns the decisions of cycles about vCPUs, by this stage.
fn decided(cycles: &[Cycle]) -> Vec<&Decision> {
    let events = cycles.iter().flat_map(|cycle| &cycle.events);
    let decisions = events.filter_map(|event| match event {
        Event::Decided { decision, .. } => Some(decision),
        _ => None,
    });
    decisions
        .filter(|decision| decision.policy == attribution::POLICY)
        .collect()
}

#[test]
fn everybody_returns_whatever_happens() {
    let mut windows = 0;
    for seed in 1..=6 {
        let mut vms = crowd();
        // If the VM has no home, the kernel runs it anywhere.
        let mut stray = vm("stray", "lbm");
        stray.memory_nodes = None;
        vms.extend([stray, vm("leaves", "lbm")]);
        vms[1] = vm("polluter0", "lbm").with_permit("10M".parse().expect("a permit"));
        let at = Ns::from_secs(20 + 3 * seed);
        let scenario = Scenario::of("faults", vms).with_event(at, "leaves", EventAction::Stop);
        let mut host = Faulty {
            twin: twin(&scenario, seed),
            chance: Chance::new(seed),
            fails_in: 0,
        };
        let mut config = config(Charged::Own);
        config.permits.attribution.away_share = 0.12;
        let mut control = Control::new(config.clone(), Mode::Act);
        let all = host.twin.machine().cpu_set();
        let mut cycles = run(&mut control, &mut host, 3);
        // Homes are in force. From now on one act in four fails, and one plan in twelve is refused.
        host.fails_in = 4;
        cycles.extend(run(&mut control, &mut host, 60));
        if seed % 2 == 0 {
            let drained = NodeSet::one(NodeId(1));
            control
                .drain(&host.twin.machine().clone(), drained)
                .expect("a node is left");
        }
        cycles.extend(run(&mut control, &mut host, 60));
        windows += decided(&cycles).len();
        host.fails_in = 0;
        config.permits.attribution.charged = Charged::Counted;
        control.take_over(config);
        run(&mut control, &mut host, 5);
        let home = host.twin.machine().cpus_of(&NodeSet::one(NodeId(0)));
        for name in [VICTIM, "polluter0", "polluter1"] {
            assert_eq!(affinity(&mut host.twin, name), home, "{name} of seed {seed}");
        }
        let homes = control.status(host.twin.machine());
        let stray = homes.vms.iter().find(|vm| vm.name == "stray").expect("it runs");
        if stray.home.is_none() {
            assert_eq!(affinity(&mut host.twin, "stray"), all, "seed {seed}");
        }
    }
    assert!(windows > 20, "{windows} acts in all");
}

#[test]
fn a_restarted_agent_brings_everybody_back() {
    let mut twin = twin(&Scenario::of("attribution", crowd()), 1);
    let mut control = Control::new(config(Charged::Own), Mode::Act);
    let home = twin.machine().cpus_of(&NodeSet::one(NodeId(0)));
    let is_away = |twin: &mut Twin| affinity(twin, "polluter0").intersection(&home).is_empty();
    let waited = (0..60).find(|_| {
        run(&mut control, &mut twin, 1);
        is_away(&mut twin)
    });
    assert!(waited.is_some(), "no window");
    // The agent ends, and the next one takes over its homes.
    let homes = control.status(twin.machine()).vms;
    let mut control = Control::new(config(Charged::Counted), Mode::Act);
    for vm in homes {
        control.adopt(vm.id, vm.home);
    }
    run(&mut control, &mut twin, 2);
    for name in [VICTIM, "polluter0", "polluter1"] {
        assert_eq!(affinity(&mut twin, name), home, "{name}");
    }
}

#[test]
fn a_dry_run_and_a_pause_send_nobody_away() {
    let scenario = Scenario::of("attribution", crowd());
    for mode in [Mode::Observe, Mode::Recommend] {
        let mut twin = twin(&scenario, 1);
        let mut control = Control::new(config(Charged::Own), mode);
        run(&mut control, &mut twin, 2);
        let before = affinity(&mut twin, "polluter0");
        run(&mut control, &mut twin, 60);
        assert_eq!(affinity(&mut twin, "polluter0"), before, "{mode}");
    }
    let mut twin = twin(&scenario, 1);
    let mut control = Control::new(config(Charged::Own), Mode::Act);
    run(&mut control, &mut twin, 2);
    let before = affinity(&mut twin, "polluter0");
    control.pause(Ns::from_secs(600));
    let cycles = run(&mut control, &mut twin, 30);
    assert!(decided(&cycles).is_empty(), "no window begins");
    assert_eq!(affinity(&mut twin, "polluter0"), before);
}
