//! The load sweep runs one program in one VM, in two VMs, and so on up to a full host. The module also runs single VMs. The sweep
//! shows most plainly what an agent gains and costs.
//!
//! # Terms
//! - *Work*: what the VMs do per unit of time. Relative to another run, it is the mean over VMs of the other run's time
//!   divided by this run's. Above 1 is more.

use anyhow::anyhow;
use homenode_machine::{Hardware, Machine};
use homenode_reproduce::engine::Run;
use homenode_twin::workload::{self, Program};
use homenode_twin::{Disturbance, Scenario, VmSpec};
use homenode_units::stats::mean;
use homenode_units::{Bytes, Ns};

use crate::contender::Contender;
use crate::generate::{memory_for, share_for};
use crate::grid::runs;
use crate::score::CaseScore;
use homenode_twin::Setup;

/// Default programs of the load sweep: two stream, two work within the LLC, one is in between and one computes.
pub const PROGRAMS: [&str; 6] = ["lbm", "stream", "soplex", "sphinx3", "sp.B", "povray"];
/// Numbers of VMs to try, as far as the host has enough CPUs.
pub const COUNTS: [usize; 9] = [1, 2, 3, 4, 6, 8, 10, 12, 13];
/// vCPUs per VM in the load sweep.
pub const VCPUS: u16 = 4;
/// Numbers of vCPUs tried for a single VM.
pub const LONE_VCPUS: [u16; 2] = [4, 8];
/// Default for the seconds that a program takes alone.
pub const SOLO_S: f64 = 60.0;
/// A run ends at the latest after this multiple of the time that the program takes alone.
const DURATION: f64 = 5.0;

/// A number of VMs running one program on a machine.
#[derive(Clone, Debug)]
pub struct Cell {
    /// The machine.
    pub machine: Machine,
    /// Name of the program.
    pub program: String,
    /// Number of VMs.
    pub vms: usize,
    /// vCPUs of each VM.
    pub vcpus: u16,
    /// Seconds that the program takes alone; a run lasts at most five times as long.
    pub solo_s: f64,
    /// The way in which the simulator's parameters are wrong.
    pub disturbance: Disturbance,
}

/// Result of a cell under a contender.
#[derive(Clone, Debug)]
pub struct Work {
    /// The contender.
    pub contender: Contender,
    /// Work relative to `default`, mean over VMs, then seeds.
    pub of_default: f64,
    /// The scores from which the work was computed.
    pub score: CaseScore,
}

/// Returns the load sweep of these programs on a machine, with as many VMs as its CPUs and memory allow.
pub fn sweep(machine: &Machine, programs: &[String], solo_s: f64) -> Vec<Cell> {
    let counts = COUNTS
        .into_iter()
        .filter(|count| count * usize::from(VCPUS) <= machine.cpus.len());
    let counts: Vec<usize> = counts.collect();
    let cell = |program: &String, vms| Cell {
        machine: machine.clone(),
        program: program.clone(),
        vms,
        vcpus: VCPUS,
        solo_s,
        disturbance: Disturbance::default(),
    };
    let of_program = |program| counts.iter().map(move |count| cell(program, *count));
    programs.iter().flat_map(of_program).filter(Cell::fits).collect()
}

/// Returns the cells of a single VM on a machine, for each size and program.
pub fn lone(machine: &Machine, programs: &[String], solo_s: f64) -> Vec<Cell> {
    let cell = |program: &String, vcpus| Cell {
        machine: machine.clone(),
        program: program.clone(),
        vms: 1,
        vcpus,
        solo_s,
        disturbance: Disturbance::default(),
    };
    let of_program = |program| LONE_VCPUS.map(|vcpus| cell(program, vcpus));
    programs.iter().flat_map(of_program).filter(Cell::fits).collect()
}

/// Why a cell has no scenario.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CellError {
    /// No program has this name.
    #[error("no workload with a program is named `{0}`; see data/workloads/README.md")]
    NoProgram(String),
    /// The machine has no timing figures.
    #[error("machine {0} has no timing figures; name a preset")]
    NoTimings(String),
}

impl Cell {
    fn program(&self) -> Option<Program> {
        workload::builtin(&self.program)?.program
    }

    /// Returns true if the machine has enough memory, or the program is unknown; an unknown program fails when run.
    fn fits(&self) -> bool {
        let host: Bytes = self.machine.nodes.values().map(|node| node.memory_bytes).sum();
        let memory = self.program().map(|program| memory_for(&program, self.vcpus));
        memory.is_none_or(|memory| memory.0.saturating_mul(self.vms as u64) <= host.0 / 10 * 9)
    }

    /// Builds the scenario: VMs that arrive within seconds, each with work that takes `solo_s` alone.
    ///
    /// # Errors
    /// An unknown program, or a machine without timing figures.
    pub fn scenario(&self) -> Result<Scenario, CellError> {
        let program = self.program();
        let program = program.ok_or_else(|| CellError::NoProgram(self.program.clone()))?;
        let hardware: Option<&Hardware> = self.machine.hardware.as_ref();
        let hardware = hardware.ok_or_else(|| CellError::NoTimings(self.machine.name.clone()))?;
        let share = share_for(&program, self.vcpus, &self.machine, hardware, self.solo_s);
        let vm = |at: usize| {
            let memory = memory_for(&program, self.vcpus);
            let name = format!("{}-{at}", self.program);
            let vm = VmSpec::new(&name, self.vcpus, memory, &self.program);
            vm.doing(share).arriving(Ns::from_millis(700 * at as u64))
        };
        let name = format!("{}-{}x{}", self.machine.name, self.vms, self.program);
        let mut scenario = Scenario::of(&name, (0..self.vms).map(vm).collect());
        scenario.duration = Ns::from_millis((self.solo_s * DURATION * 1e3) as u64);
        scenario.arrival_jitter = Ns::from_millis(500);
        scenario.disturbance = self.disturbance;
        Ok(scenario)
    }
}

/// Runs cells under contenders.
///
/// # Errors
/// A cell without a scenario; the first run that fails; a cell whose VMs do nothing under `default`.
pub fn run_all(
    cells: &[Cell],
    contenders: &[Contender],
    seeds: &[u64],
    jobs: usize,
) -> anyhow::Result<Vec<Vec<Work>>> {
    let setups = cells
        .iter()
        .map(|cell| Ok(Setup::new(cell.machine.clone(), cell.scenario()?, 1)));
    let setups: Vec<Setup> = setups.collect::<Result<_, CellError>>()?;
    let of_cell = |(setup, runs): (&Setup, Vec<Vec<Run>>)| {
        let works = contenders.iter().zip(&runs[1..]);
        works
            .map(|(contender, other)| work(setup, contender, &runs[0], other))
            .collect()
    };
    let runs = runs(&setups, seeds, contenders, jobs)?;
    setups.iter().zip(runs).map(of_cell).collect()
}

fn work(setup: &Setup, contender: &Contender, base: &[Run], other: &[Run]) -> anyhow::Result<Work> {
    let name = &setup.scenario.name;
    let score = CaseScore::of(name, base, other);
    let of_seed = |vms: &Vec<Option<f64>>| mean(vms.iter().flatten().map(|ratio| 1.0 / ratio));
    let of_default = mean(score.ratios.iter().filter_map(of_seed));
    Ok(Work {
        contender: contender.clone(),
        of_default: of_default
            .ok_or_else(|| anyhow!("no VM of {name} made progress under the policies `default`"))?,
        score,
    })
}

#[cfg(test)]
mod tests {
    use homenode_machine_files::preset;

    use super::*;

    #[test]
    fn a_sweep_goes_up_to_a_full_host() {
        let machine = preset("r910").unwrap();
        let counts: Vec<usize> = sweep(&machine, &["povray".to_owned()], SOLO_S)
            .iter()
            .map(|cell| cell.vms)
            .collect();
        assert_eq!(counts, [1, 2, 3, 4, 6, 8]);
        let alone = lone(&machine, &["povray".to_owned()], SOLO_S);
        assert_eq!(
            alone
                .iter()
                .map(|cell| (cell.vms, cell.vcpus))
                .collect::<Vec<_>>(),
            [(1, 4), (1, 8)]
        );
    }

    #[test]
    fn default_does_as_much_as_default_and_errors_name_their_object() {
        let cell = |program: &str| Cell {
            machine: preset("r420").unwrap(),
            program: program.to_owned(),
            vms: 2,
            vcpus: 4,
            solo_s: 3.0,
            disturbance: Disturbance::default(),
        };
        let outcome = |program| run_all(&[cell(program)], &[Contender::DEFAULT], &[1, 2], 2);
        let works = outcome("sp.B").unwrap().remove(0);
        assert_eq!(works[0].of_default, 1.0);
        assert_eq!(works[0].score.ratios.len(), 2);
        let error = outcome("povrey").unwrap_err().to_string();
        assert!(
            error.contains("no workload with a program is named `povrey`"),
            "{error}"
        );
    }
}
