//! The claims on NUMA policies in the hypervisor of \[Policies\]: its four systems, and the runs of 29 programs that most of
//! its claims share; and our own claims on choosing among them.
//!
//! # The systems (sections 2, 5.2 to 5.5)
//!
//! | system | hypervisor | disk | locks | placing |
//! |---|---|---|---|---|
//! | Linux | none | native | as the program does | first-touch |
//! | LinuxNUMA | none | native | MCS for two programs | the best of four |
//! | Xen | Xen | through the driver domain | as the program does | round-1G |
//! | Xen+ | Xen | passthrough, but not under first-touch | MCS for two programs | round-1G |
//! | Xen+NUMA | Xen | the same | the same | the best of five |
//!
//! Passthrough is for programs that use the disk at all. Under first-touch a guest on Xen tells of released pages by queues
//! (section 4.2.4). The two programs are facesim and streamcluster; MCS locks spin (section 5.3.2). Nothing else of a scenario
//! differs.
//!
//! # Choices, made before the experiments were run
//!
//! - One VM of 48 vCPUs and 120 GiB on amd48, a GiB of each node being the privileged guest's; each vCPU or native thread is
//!   pinned to a CPU (sections 5.4.1 and 5.5). Pages of 4 KiB.
//! - What is compared is the time for an amount of work once programs have set up their memory: the inverse of
//!   instructions per second after [`WARM_UP`]. Programs of minutes, whose lengths the paper does not print, are nearly all
//!   of that. The 29 profiles divide their work over threads; rates are of all threads together.
//! - Best is least time, among the policies that the paper tried.

mod advisor;
mod consolidated;
mod controllers;
mod imbalance;
mod overheads;
mod releases;
mod usefulness;
mod virtualisation;

pub use advisor::{BOUNDED, NEAR_BEST, PHASES};
pub use consolidated::EXPERIMENT as CONSOLIDATED;
pub use imbalance::EXPERIMENT as IMBALANCE;
pub use overheads::{REMAINING, XEN, XEN_PLUS};
pub use releases::EXPERIMENT as RELEASES;
pub use usefulness::{ALL_USEFUL, BEST_TABLE, CLASS_RULE, SINGLE_VM};
pub use virtualisation::{FIRST_TOUCH_DISK, IPI};

use std::collections::BTreeMap;

use homenode_control::PolicySet;
use homenode_twin::workload::{self, DeviceKind};
use homenode_twin::{Hypervisor, ReleaseCalls, Scenario, VmSpec, Waiting};
use homenode_units::{Bytes, MemoryPolicy, Migration, Ns, Placing};

use crate::claims::{TABLE_1, TABLE_4};
use crate::run::Run;
use crate::work::Outcomes;

const MACHINE: &str = "amd48";
const VCPUS: u16 = 48;
const MEMORY: Bytes = Bytes::from_gib(120);
/// Programs set up their memory first …
const WARM_UP: Ns = Ns::from_secs(8);
/// … and Carrefour, where it is on, moves pages for some time; it is not always done then, as in runs of a minute.
const WARM_UP_CARREFOUR: Ns = Ns::from_secs(12);
/// Then this much is counted.
const COUNTED: Ns = Ns::from_secs(4);
/// Programs do so much of their work that none ends before.
const ENDLESS: f64 = 100.0;
/// Programs that load no link more than this hardly wait for memory.
const QUIET_PERCENT: f64 = 20.0;
/// Programs whose locks the paper replaced.
const MCS: [&str; 2] = ["facesim", "streamcluster"];

/// Policies that the paper tried on Linux (section 3.5.1).
const ON_LINUX: [MemoryPolicy; 4] = [
    Placing::FirstTouch.alone(),
    Placing::FirstTouch.with_carrefour(),
    Placing::Round4k.alone(),
    Placing::Round4k.with_carrefour(),
];
/// Policies that the paper tried on Xen+ (section 5.4.1), its own first.
const ON_XEN_PLUS: [MemoryPolicy; 5] = [
    Placing::Round1g.alone(),
    Placing::FirstTouch.alone(),
    Placing::FirstTouch.with_carrefour(),
    Placing::Round4k.alone(),
    Placing::Round4k.with_carrefour(),
];

/// A system of the paper, its policy left open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum System {
    Linux,
    /// Linux whose locks were replaced as on Xen+.
    LinuxMcs,
    Xen,
    XenPlus,
}

impl System {
    /// The VM in which a program runs.
    fn vm(self, name: &str, vcpus: u16, memory: Bytes, program: &str, policy: MemoryPolicy) -> VmSpec {
        let mut vm = VmSpec::new(name, vcpus, memory, program).doing(ENDLESS).pinned();
        vm.memory_policy = policy;
        vm.passthrough =
            self == System::XenPlus && policy.placing != Placing::FirstTouch && uses_disk(program);
        if self.hypervisor() != Hypervisor::Native && policy.placing == Placing::FirstTouch {
            vm.release_calls = ReleaseCalls::Batched;
        }
        let replaced = matches!(self, System::LinuxMcs | System::XenPlus) && MCS.contains(&program);
        vm.waiting = replaced.then_some(Waiting::Spin);
        vm
    }

    fn hypervisor(self) -> Hypervisor {
        match self {
            System::Linux | System::LinuxMcs => Hypervisor::Native,
            System::Xen | System::XenPlus => Hypervisor::Xen,
        }
    }

    fn scenario(self, name: &str, vms: Vec<VmSpec>) -> Scenario {
        let mut scenario = Scenario::of(name, vms);
        scenario.hypervisor = self.hypervisor();
        scenario
    }

    /// A program alone on the whole machine.
    fn run(self, program: &str, policy: MemoryPolicy) -> Run {
        let vm = self.vm("whole", VCPUS, MEMORY, program, policy);
        between(self.scenario(&format!("{program} alone"), vec![vm]))
    }
}

/// Whether a program has anything to gain from a disk of its own.
fn uses_disk(program: &str) -> bool {
    let program = workload::builtin(program).and_then(|workload| workload.program);
    let io = program.map(|program| program.io).unwrap_or_default();
    io.iter().any(|io| io.device == DeviceKind::Disk)
}

/// A run of which the time after the set-up counts. Carrefour is the agent's, which has no other policies then.
fn between(scenario: Scenario) -> Run {
    let follows = |vm: &VmSpec| vm.memory_policy.migration == Migration::Carrefour;
    let (policies, warm_up) = if scenario.vms.iter().any(follows) {
        (PolicySet::Memory, WARM_UP_CARREFOUR)
    } else {
        (PolicySet::Default, WARM_UP)
    };
    let mut run = Run::between(MACHINE, scenario, warm_up, Ns(warm_up.0 + COUNTED.0));
    run.config.policies = policies;
    run
}

/// The 29 programs, in the paper's order, with their class of imbalance under first-touch (table 1).
fn programs() -> impl Iterator<Item = (&'static str, &'static str)> {
    rows(TABLE_1).map(|cells| (cells[0], cells[cells.len() - 1]))
}

/// The published best policies of each program: on Linux, and on Xen+ (table 4).
fn published_best() -> impl Iterator<Item = (&'static str, [MemoryPolicy; 2])> {
    let policy = |text: &str| text.replace('/', "+").parse().expect("table 4 names policies");
    rows(TABLE_4).map(move |cells| (cells[0], [policy(cells[1]), policy(cells[2])]))
}

fn rows(table: &'static str) -> impl Iterator<Item = Vec<&'static str>> {
    let lines = table.lines().filter(|line| !line.starts_with('#')).skip(1);
    lines.map(|line| line.split(',').collect())
}

/// Every program under policies of a system.
fn runs(system: System, policies: &[MemoryPolicy]) -> Vec<Run> {
    programs()
        .flat_map(|(program, _)| policies.iter().map(move |policy| system.run(program, *policy)))
        .collect()
}

/// Seconds that the threads take for 10^12 instructions in all of a VM's program.
fn time_of(outcomes: &Outcomes, run: &Run, vm: usize) -> Result<f64, String> {
    let window = &outcomes.of(run)?.window;
    let before: usize = run.scenario.vms[..vm]
        .iter()
        .map(|vm| usize::from(vm.vcpus))
        .sum();
    let own = &window.vcpus[before..before + usize::from(run.scenario.vms[vm].vcpus)];
    let instructions: u64 = own.iter().map(|vcpu| vcpu.instructions).sum();
    if instructions == 0 {
        return Err(format!(
            "{} ran no instruction in {}",
            run.scenario.vms[vm].workload, run.scenario.name
        ));
    }
    Ok(window.seconds * 1e12 / instructions as f64)
}

/// What a program took under each policy of a system.
#[derive(Clone, Debug)]
struct Times(BTreeMap<MemoryPolicy, f64>);

impl Times {
    fn of(
        outcomes: &Outcomes,
        system: System,
        program: &str,
        policies: &[MemoryPolicy],
    ) -> Result<Times, String> {
        let time =
            |policy: &MemoryPolicy| Ok((*policy, time_of(outcomes, &system.run(program, *policy), 0)?));
        policies
            .iter()
            .map(time)
            .collect::<Result<_, String>>()
            .map(Times)
    }

    /// Of a policy that was tried.
    fn under(&self, policy: MemoryPolicy) -> f64 {
        self.0[&policy]
    }

    /// The policy with the least time, and that.
    fn best(&self) -> (MemoryPolicy, f64) {
        let first = |a: &(&MemoryPolicy, &f64), b: &(&MemoryPolicy, &f64)| a.1.total_cmp(b.1);
        let (policy, time) = self.0.iter().min_by(first).expect("some policy was tried");
        (*policy, *time)
    }

    /// The policy with the least time but for this one.
    fn best_but(&self, left_out: MemoryPolicy) -> MemoryPolicy {
        let mut others = self.clone();
        others.0.remove(&left_out);
        others.best().0
    }

    fn worst(&self) -> f64 {
        self.0.values().copied().fold(0.0, f64::max)
    }
}

/// What every program took on a system: in the paper's order.
fn all_times(
    outcomes: &Outcomes,
    system: System,
    policies: &[MemoryPolicy],
) -> Result<Vec<(&'static str, Times)>, String> {
    let of = |(program, _)| Ok((program, Times::of(outcomes, system, program, policies)?));
    programs().map(of).collect()
}

/// Whether a program loads no link over [`QUIET_PERCENT`] under either static policy (table 1).
fn quiet(program: &str) -> bool {
    let own = rows(TABLE_1).find(|cells| cells[0] == program);
    let loads = own.iter().flat_map(|cells| &cells[3..5]);
    loads
        .filter_map(|load| load.parse().ok())
        .all(|load: f64| load <= QUIET_PERCENT)
}

/// How many are above so many percent.
fn above(percents: &[f64], percent: f64) -> f64 {
    percents.iter().filter(|own| **own > percent).count() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_tables_name_the_same_29_programs_and_their_policies() {
        let (ours, best): (Vec<_>, Vec<_>) = (programs().collect(), published_best().collect());
        assert_eq!(ours.len(), 29);
        assert!(ours.iter().zip(&best).all(|(own, best)| own.0 == best.0));
        let (low, moderate) = (|of: &&(_, _)| of.1 == "low", |of: &&(_, _)| of.1 == "moderate");
        assert_eq!(ours.iter().filter(low).count(), 11);
        assert_eq!(ours.iter().filter(moderate).count(), 5);
        assert!(
            best.iter()
                .all(|(_, [linux, xen])| ON_LINUX.contains(linux) && ON_XEN_PLUS.contains(xen))
        );
    }

    #[test]
    fn the_systems_differ_in_what_the_seed_says() {
        let vm = |system: System, program: &str, placing: Placing| {
            system.vm("a", 48, MEMORY, program, placing.alone())
        };
        for (program, passthrough, waiting) in [("facesim", false, Some(Waiting::Spin)), ("dc.B", true, None)]
        {
            let plus = vm(System::XenPlus, program, Placing::Round1g);
            assert_eq!((plus.passthrough, plus.waiting), (passthrough, waiting));
            let mut xen = vm(System::Xen, program, Placing::Round1g);
            assert_ne!(xen, plus);
            (xen.passthrough, xen.waiting) = (plus.passthrough, plus.waiting);
            assert_eq!(xen, plus);
        }
        assert!(!vm(System::XenPlus, "dc.B", Placing::FirstTouch).passthrough);
    }
}
