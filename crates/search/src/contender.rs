//! The contenders of a comparison: sets of policies, external policy programs, and the kernel's own AutoNUMA.

use std::fmt;
use std::str::FromStr;

use anyhow::Context as _;
use homenode_control::{Config, Control, Cycle, Mode, PolicySet, UnknownPolicy};
use homenode_machine::Machine;
use homenode_reproduce::engine::{self, Run};
use homenode_twin::Scenario;
use homenode_units::{Candidates, CpuSet, Ns};

use crate::program::{EXEC, NoProgram, Program};
use homenode_twin::Setup;

/// A participant in a comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Contender {
    /// A set of policies.
    PolicySet(PolicySet),
    /// No agent. Whether the kernel moves pages and threads by itself (`kernel.numa_balancing`) follows this value, not the
    /// scenario.
    Balancing(bool),
    /// No agent. Each VM's vCPUs may run only on the CPUs of one L3, or of as many L3s as they need, and VMs are spread
    /// evenly over the L3s. This is the usual advice for manual placement.
    FixedPerL3,
    /// No agent, and each VM alone on the host. This is about the upper limit of any gain, because VMs do not disturb each
    /// other.
    Alone,
    /// An external program in place of the policies.
    Program(Program),
}

/// Names of the contenders without an agent.
const AUTONUMA: &str = "autonuma";
const NO_AUTONUMA: &str = "no-autonuma";
const FIXED_PER_L3: &str = "fixed-per-l3";
const ALONE: &str = "each-alone";

impl Contender {
    /// The kernel's scheduler without an agent: the baseline of all comparisons.
    pub const DEFAULT: Contender = Contender::PolicySet(PolicySet::Default);
    /// The product's policies.
    pub const OURS: Contender = Contender::PolicySet(PolicySet::Homenode);

    /// Returns all contenders except `default` and `memory`, which places no VM and leaves homes to the operator.
    pub fn all() -> Vec<Contender> {
        let mut all: Vec<Contender> = PolicySet::ALL
            .into_iter()
            .filter(|policies| !matches!(policies, PolicySet::Default | PolicySet::Memory))
            .map(Contender::PolicySet)
            .collect();
        all.insert(1, Contender::Balancing(true));
        all
    }

    /// Returns the contenders for a stock host. There `default` is an unconfigured kernel, which balances NUMA memory.
    pub fn on_stock() -> Vec<Contender> {
        let mut all = vec![
            Contender::Alone,
            Contender::Balancing(false),
            Contender::FixedPerL3,
        ];
        all.extend(
            Contender::all()
                .into_iter()
                .filter(|one| *one != Contender::Balancing(true)),
        );
        all
    }

    /// Returns the name used in tables and files.
    pub fn name(&self) -> &str {
        match self {
            Contender::PolicySet(policies) => policies.name(),
            Contender::Balancing(true) => AUTONUMA,
            Contender::Balancing(false) => NO_AUTONUMA,
            Contender::FixedPerL3 => FIXED_PER_L3,
            Contender::Alone => ALONE,
            Contender::Program(program) => program.name(),
        }
    }

    /// Returns this contender with a time limit for each answer, which applies only to external programs.
    #[must_use]
    pub fn within(self, answer_max: Ns) -> Contender {
        match self {
            Contender::Program(program) => Contender::Program(program.within(answer_max)),
            other => other,
        }
    }

    /// Runs a scenario to its end; see [`engine::run`]. `config` sets everything except which policies act.
    ///
    /// # Errors
    /// See [`engine::run`]; a program that cannot be started.
    pub fn run(
        &self,
        setup: &Setup,
        config: &Config,
        mut watch: impl FnMut(&Cycle, &Control) -> anyhow::Result<()>,
    ) -> anyhow::Result<Run> {
        let policies = match self {
            Contender::PolicySet(policies) => *policies,
            _ => PolicySet::Default,
        };
        let config = Config {
            policies,
            ..config.clone()
        };
        let control = || Control::new(config.clone(), Mode::Act);
        let setup_with = |scenario| Setup {
            scenario,
            ..setup.clone()
        };
        if !matches!(self, Contender::Alone) {
            let control = match self {
                Contender::Program(program) => control().with_planner(Box::new(program.start()?)),
                _ => control(),
            };
            let setup = setup_with(self.configured(setup));
            return engine::run(&setup, self.name(), control, watch);
        }
        let mut runs = (0..setup.scenario.vms.len()).map(|at| {
            let setup = setup_with(alone(&setup.scenario, at));
            engine::run(&setup, self.name(), control(), &mut watch)
        });
        let mut run = runs.next().context("a scenario has at least one VM")??;
        for (at, other) in (1..).zip(runs) {
            run.report.vms[at] = other?.report.vms.swap_remove(at);
        }
        Ok(run)
    }

    /// Returns the scenario, configured as by an operator who has no agent.
    fn configured(&self, setup: &Setup) -> Scenario {
        let scenario = setup.scenario.clone();
        match self {
            // Xen has no NUMA balancing to switch.
            Contender::Balancing(on) if scenario.balances().is_some() => scenario.with_numa_balancing(*on),
            Contender::FixedPerL3 => fixed_per_l3(scenario, &setup.machine),
            _ => scenario,
        }
    }
}

/// Returns the scenario with only one VM. The others stay in the list, because random draws depend on positions in it, but
/// they never arrive.
fn alone(scenario: &Scenario, at: usize) -> Scenario {
    let mut scenario = scenario.clone();
    let name = scenario.vms[at].name.clone();
    scenario.events.retain(|event| event.vm == name);
    let others = scenario.vms.iter_mut().filter(|vm| vm.name != name);
    for vm in others {
        vm.arrival = scenario.duration;
    }
    scenario
}

/// Gives each VM, in the scenario's order, the L3 with the fewest booked vCPUs per CPU. A VM that is wider than an L3 also
/// gets further L3s, first of the same node and then of other nodes, until it has a CPU for each vCPU.
fn fixed_per_l3(mut scenario: Scenario, machine: &Machine) -> Scenario {
    let mut booked = vec![0.0; machine.llcs.len()];
    for vm in scenario.vms.iter_mut().filter(|vm| vm.cpus.is_none()) {
        let load = |at: &usize| booked[*at] / machine.llcs[*at].cpus.len() as f64;
        let mut order: Vec<usize> = (0..machine.llcs.len()).collect();
        order.sort_by(|a, b| load(a).total_cmp(&load(b)).then(a.cmp(b)));
        let node = |at: usize| {
            machine.llcs[at]
                .cpus
                .iter()
                .next()
                .and_then(|cpu| machine.node_of(cpu))
        };
        if let Some(first) = order.first().copied() {
            order.sort_by_key(|at| node(*at) != node(first));
        }
        let wanted = usize::from(vm.vcpus);
        let (mut cpus, mut taken) = (CpuSet::default(), Vec::new());
        for at in order {
            if cpus.len() >= wanted {
                break;
            }
            cpus = cpus.iter().chain(machine.llcs[at].cpus.iter()).collect();
            taken.push(at);
        }
        for at in &taken {
            booked[*at] += f64::from(vm.vcpus) / taken.len() as f64;
        }
        vm.cpus = Some(cpus);
    }
    scenario
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A text that names no contender.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoContender {
    /// The text begins like a program, but is not one.
    #[error(transparent)]
    Program(#[from] NoProgram),
    /// The text does not name a set of policies.
    #[error(transparent)]
    Policies(UnknownPolicy),
}

impl FromStr for Contender {
    type Err = NoContender;
    fn from_str(text: &str) -> Result<Contender, NoContender> {
        match text {
            AUTONUMA => return Ok(Contender::Balancing(true)),
            NO_AUTONUMA => return Ok(Contender::Balancing(false)),
            FIXED_PER_L3 => return Ok(Contender::FixedPerL3),
            ALONE => return Ok(Contender::Alone),
            _ => {}
        }
        if text.starts_with(EXEC) {
            return Ok(Contender::Program(text.parse()?));
        }
        text.parse().map(Contender::PolicySet).map_err(|_| {
            let others = [AUTONUMA, NO_AUTONUMA, FIXED_PER_L3, ALONE];
            let known = PolicySet::ALL.map(PolicySet::name).into_iter().chain(others);
            NoContender::Policies(UnknownPolicy::Set {
                name: text.to_owned(),
                valid: Candidates::of(text, known),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use homenode_machine_files::preset;
    use homenode_twin::VmSpec;
    use homenode_units::Bytes;

    use super::*;

    #[test]
    fn fixed_vms_are_shared_out_evenly_and_have_a_cpu_for_each_vcpu() {
        let machine = preset("epyc7763-nps4").unwrap();
        let vm = |at: usize| {
            VmSpec::new(
                &format!("vm{at}"),
                if at == 0 { 20 } else { 4 },
                Bytes::from_gib(2),
                "cg.B",
            )
        };
        let scenario = fixed_per_l3(Scenario::of("some", (0..15).map(vm).collect()), &machine);
        let llcs_of = |vm: &VmSpec| -> Vec<usize> {
            let cpus = vm.cpus.as_ref().expect("fixed");
            assert!(cpus.len() >= usize::from(vm.vcpus));
            let llcs = 0..machine.llcs.len();
            llcs.filter(|at| !cpus.intersection(&machine.llcs[*at].cpus).is_empty())
                .collect()
        };
        let wide = llcs_of(&scenario.vms[0]);
        let node = |at: usize| machine.node_of(machine.llcs[at].cpus.iter().next().unwrap());
        assert!(wide.len() == 2 && node(wide[0]) == node(wide[1]), "{wide:?}");
        let mut others: Vec<usize> = scenario.vms[1..].iter().flat_map(llcs_of).collect();
        others.sort_unstable();
        others.dedup();
        assert_eq!(others.len(), 14, "one L3 for each of them");
        assert!(others.iter().all(|at| !wide.contains(at)));
    }

    #[test]
    fn alone_a_vm_does_what_it_does_without_the_others() {
        let vm = |name: &str| VmSpec::new(name, 4, Bytes::from_gib(4), "milc");
        let run = |contender: &Contender, vms: &[&str]| {
            let mut scenario = Scenario::of("some", vms.iter().map(|name| vm(name)).collect());
            scenario.duration = Ns::from_secs(20);
            let setup = Setup::new(preset("r420").unwrap(), scenario, 3);
            contender
                .run(&setup, &Config::default(), |_, _| Ok(()))
                .expect("a run")
        };
        let (single, crowd) = (run(&Contender::DEFAULT, &["a"]), ["a", "b", "c", "d", "e", "f"]);
        let (alone, beside) = (run(&Contender::Alone, &crowd), run(&Contender::DEFAULT, &crowd));
        assert_eq!(alone.report.vms[0], single.report.vms[0]);
        let work = |run: &Run| -> f64 { run.report.vms.iter().map(|vm| vm.instructions_g).sum() };
        assert!(
            work(&alone) > 1.2 * work(&beside),
            "{} {}",
            work(&alone),
            work(&beside)
        );
        let least = single.report.vms[0].instructions_g;
        assert!(alone.report.vms.iter().all(|vm| vm.instructions_g > 0.8 * least));
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        let others = Contender::on_stock().into_iter().chain([Contender::DEFAULT]);
        for contender in Contender::all().into_iter().chain(others) {
            assert_eq!(contender.name().parse(), Ok(contender));
        }
        assert!(Contender::all().contains(&Contender::OURS));
        let program: Contender = "exec:python3  mine.py".parse().unwrap();
        assert_eq!(program.name(), "exec:python3 mine.py");
        assert!(
            "exec: "
                .parse::<Contender>()
                .unwrap_err()
                .to_string()
                .contains("does not name a program")
        );
        let error = "homenod".parse::<Contender>().unwrap_err().to_string();
        assert!(error.contains("did you mean `homenode`?"), "{error}");
        let error = "autonum".parse::<Contender>().unwrap_err().to_string();
        assert!(error.contains("autonuma"));
    }
}
