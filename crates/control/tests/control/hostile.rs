//! A tenant that wants to harm its neighbours through the agent: it changes its behaviour so that the agent moves VMs,
//! reports nonsense about its memory, or pollutes in bursts between two samples.
//!
//! # What is compared
//!
//! A tenant that pollutes harms its neighbours even without an agent. So it is compared with an honest tenant of the same average
//! use: a steady one that, without an agent, causes as many LLC misses in the same time. A neighbour's *work* is its instructions
//! in that time, summed over seeds because a single move of a VM is a matter of luck. A neighbour's *loss* is the share of its
//! work next to the honest tenant that is missing next to the hostile one. A tenant that lies about its memory is compared with
//! one whose memory may not be taken, since any tenant may honestly choose that.
//!
//! # Not compared
//!
//! To the agent, a tenant that is hostile from its arrival on is a different VM from the honest one. It gets another arrangement,
//! or prevents the agent from finding one. So both tenants are honest until homes are in force ([`BEGINS`]).

#![allow(clippy::print_stdout)] // figures, with `--nocapture`

use homenode_control::{Config, Control, Mode, PolicySet};
use homenode_host::{
    ActionError, GuestMemory, Holds, Host, HostError, Plan, Receipt, Refusal, Sample, Setting,
};
use homenode_machine::Machine;
use homenode_twin::{EventAction, Scenario, Twin, TwinReport, VmSpec};
use homenode_units::{Bytes, Ns, VmId};

/// With two seeds, a single move changed a neighbour's work by up to three percent. With these seeds no loss is over half a
/// percent.
const SEEDS: std::ops::RangeInclusive<u64> = 1..=12;
/// Until this time all tenants are honest, and the agent finds its arrangement. Only the time after it counts.
const BEGINS: Ns = Ns::from_secs(60);
const ENDS: Ns = Ns::from_secs(300);
/// Largest loss allowed to a neighbour.
const LOSS_MAX: f64 = 0.01;
/// Coarser than the simulator's own epoch, since the tests take 240 runs of five minutes.
const EPOCH: Ns = Ns::from_millis(5);
const TENANT: &str = "tenant";

/// Behaviour of the tenant. `steady` is the share of its program's LLC accesses that it makes. A hostile tenant, from [`BEGINS`]
/// on, alternates between all of them and a twentieth; each phase lasts `alternates`.
#[derive(Clone, Copy, Debug)]
struct Tenant {
    steady: f64,
    alternates: Option<Ns>,
}

fn neighbours() -> [&'static str; 7] {
    ["cg.B", "soplex", "povray", "sphinx3", "lu.B", "mcf", "ep.B"]
}

fn scenario(tenant: Tenant) -> Scenario {
    let vm = |name: &str, program: &str| VmSpec::new(name, 4, Bytes::from_gib(7), program).doing(1e4);
    let neighbours = neighbours().into_iter().map(|program| vm(program, program));
    let mut scenario = Scenario::of("hostile", neighbours.chain([vm(TENANT, "milc")]).collect());
    scenario.duration = ENDS;
    let does = |llc_access_factor| EventAction::Phase {
        llc_access_factor,
        cpi_factor: 1.0,
        rest_factor: 1.0,
    };
    let scenario = scenario.with_event(Ns::from_millis(1), TENANT, does(tenant.steady));
    let Some(every) = tenant.alternates else {
        return scenario;
    };
    (0..(ENDS - BEGINS).0 / every.0).fold(scenario, |scenario, turn| {
        let share = [1.0, 0.05][(turn % 2) as usize];
        scenario.with_event(BEGINS + Ns(turn * every.0), TENANT, does(share))
    })
}

/// Changes the report of the tenant, which is this VM, in a sample.
type Lie = dyn Fn(&mut Sample, VmId);

/// A host on which a lie replaces what one guest reports about its memory.
struct Lying<'a> {
    twin: Twin,
    lie: &'a Lie,
}

impl Host for Lying<'_> {
    fn machine(&self) -> &Machine {
        self.twin.machine()
    }

    fn wait(&mut self, period: Ns) -> Ns {
        self.twin.wait(period)
    }

    fn sample(&mut self) -> Result<Sample, HostError> {
        let mut sample = self.twin.sample()?;
        if let Some(vm) = self.twin.vm_id(TENANT) {
            (self.lie)(&mut sample, vm);
        }
        Ok(sample)
    }

    fn commit(&mut self, plan: &Plan) -> Result<Receipt, Refusal> {
        self.twin.commit(plan)
    }

    fn set_where(&mut self, vm: VmId, settings: &[Setting], holds: Holds<'_>) -> Result<bool, ActionError> {
        self.twin.set_where(vm, settings, holds)
    }
}

fn run(machine: &str, scenario: &Scenario, policies: PolicySet, seed: u64, lie: &Lie) -> TwinReport {
    let machine = homenode_machine_files::preset(machine).expect("a preset");
    let twin = Twin::with_epoch(machine, scenario, seed, EPOCH).expect("the scenario fits");
    let mut host = Lying { twin, lie };
    let config = Config {
        policies,
        ..Config::default()
    };
    let mut control = Control::new(config.clone(), Mode::Act);
    while host.twin.now() < scenario.duration {
        if host.twin.now() == BEGINS {
            host.twin.mark();
        }
        control.step(&mut host).expect("a twin can be read");
        host.wait(config.period);
    }
    host.twin.report()
}

fn honest_word(_: &mut Sample, _: VmId) {}

/// Returns the work of each neighbour, summed over seeds.
fn work(machine: &str, scenario: &Scenario, policies: PolicySet, lie: &Lie) -> Vec<f64> {
    let of_seed = |seed| {
        let report = run(machine, scenario, policies, seed, lie);
        let neighbours = report.vms.into_iter().filter(|vm| vm.name != TENANT);
        neighbours.map(|vm| vm.instructions_g).collect::<Vec<f64>>()
    };
    let all: Vec<Vec<f64>> = SEEDS.map(of_seed).collect();
    (0..all[0].len())
        .map(|at| all.iter().map(|run| run[at]).sum())
        .collect()
}

/// Returns the LLC misses of the tenant without an agent.
fn misses(tenant: Tenant) -> f64 {
    let report = run("r910", &scenario(tenant), PolicySet::Default, 1, &honest_word);
    let tenant = report.vms.last().expect("it is there");
    tenant
        .accesses_by_node
        .iter()
        .map(|(_, count)| *count as f64)
        .sum()
}

/// Returns a tenant that alternates at this interval, and that in its honest behaviour causes as many misses as in its hostile
/// behaviour.
fn alternating(every: Ns) -> Tenant {
    let (mut low, mut high) = (0.05, 1.0);
    let alternates = Some(every);
    // The steady behaviour before the alternation does not matter here, since only misses from [`BEGINS`] on count.
    let wanted = misses(Tenant {
        steady: low,
        alternates,
    });
    for _ in 0..6 {
        let steady = 0.5 * (low + high);
        let alternates = None;
        match misses(Tenant { steady, alternates }) < wanted {
            true => low = steady,
            false => high = steady,
        }
    }
    let steady = 0.5 * (low + high);
    Tenant { steady, alternates }
}

/// Checks the loss of each neighbour of a tenant that alternates at this interval.
fn check_losses(every: Ns) {
    let hostile = alternating(every);
    let honest = Tenant {
        alternates: None,
        ..hostile
    };
    let of = |tenant| work("r910", &scenario(tenant), PolicySet::Homenode, &honest_word);
    check(&format!("{hostile:?}"), &of(hostile), &of(honest));
}

fn check(what: &str, hostile: &[f64], honest: &[f64]) {
    let losses: Vec<f64> = hostile
        .iter()
        .zip(honest)
        .map(|(hostile, honest)| 1.0 - hostile / honest)
        .collect();
    println!("{what}: {losses:.4?}");
    assert!(
        !losses.is_empty() && losses.iter().all(|loss| *loss < LOSS_MAX),
        "{what}: {losses:?}"
    );
}

#[test]
fn a_tenant_that_alternates_to_provoke_moves_costs_its_neighbours_under_a_percent() {
    for seconds in [5, 20] {
        check_losses(Ns::from_secs(seconds));
    }
}

#[test]
fn a_tenant_that_pollutes_in_bursts_below_the_period_costs_its_neighbours_under_a_percent() {
    check_losses(Ns::from_millis(450));
}

/// Changes the tenant's report.
fn reports(sample: &mut Sample, vm: VmId, says: impl FnOnce(&mut GuestMemory)) {
    let vm = sample.vms.iter_mut().find(|sample| sample.id == vm);
    if let Some(guest) = vm.and_then(|vm| vm.balloon.as_mut()?.guest.as_mut()) {
        says(guest);
    }
}

/// Makes the guest report that it swaps all the time, and has no memory left.
fn is_pressed(at: Ns, guest: &mut GuestMemory) {
    guest.usable = Some(Bytes(0));
    guest.unused = Some(Bytes(0));
    guest.swapped_in = Some(Bytes(at.0));
    guest.major_faults = Some(at.0 / 1000);
}

#[test]
fn a_tenant_that_lies_of_its_memory_costs_its_neighbours_under_a_percent() {
    let mut scenario = Scenario::builtin("memory-overcommit").expect("it comes with the twin");
    scenario.vms[3].name = TENANT.to_owned();
    let mut keeping = scenario.clone();
    keeping.vms[3].memory_floor = None;
    let entitled = work("r420", &keeping, PolicySet::Homenode, &honest_word);
    let pressed = |sample: &mut Sample, vm| {
        let at = sample.at;
        reports(sample, vm, |guest| is_pressed(at, guest));
    };
    let in_turns = |sample: &mut Sample, vm| {
        let at = sample.at;
        reports(sample, vm, |guest| match (at.0 / Ns::from_secs(30).0) % 2 {
            0 => is_pressed(at, guest),
            _ => guest.usable = guest.total,
        });
    };
    let absurd = |sample: &mut Sample, vm| {
        reports(sample, vm, |guest| {
            let most = Some(Bytes(u64::MAX));
            (guest.total, guest.usable, guest.unused) = (most, most, most);
            (guest.swapped_in, guest.major_faults) = (most, Some(u64::MAX));
        });
    };
    let lies: [(&str, &Lie); 3] = [
        ("pressed", &pressed),
        ("in turns", &in_turns),
        ("absurd", &absurd),
    ];
    for (name, lie) in lies {
        let lied_to = work("r420", &scenario, PolicySet::Homenode, lie);
        check(name, &lied_to, &entitled);
    }
}
