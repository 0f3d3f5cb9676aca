//! Draws scenarios from a seed, so that policies are not tuned to a few known cases.
//!
//! # Problem
//! A policy that is good on fourteen known cases may be good only on those. We need cases that differ in everything that
//! matters to a decision, as many as we want, and unseen during development.
//!
//! # Terms
//! - *Training case*: one with a seed in [`TRAINING`]. Developers may look at it.
//! - *Held-out case*: one with a seed that [`held_out`] derives from the id of a commit.
//!
//! # Algorithm
//! Draw from the random stream of the seed, in this order:
//! 1. A machine: a preset with several nodes.
//! 2. A load, which is the total of vCPUs divided by the machine's CPUs ([`LOADS`]), with at most [`VMS_MAX`] VMs.
//! 3. Sizes: 4 vCPUs each; a mix of 2, 4, 6, 8 and 12; or one VM wider than a node (up to the CPUs of two nodes) and small
//!    ones.
//! 4. A mix: any workloads; two or three workloads, repeated; or memory-bound and other workloads in turn.
//! 5. Arrivals: all within seconds; staggered, and staying; staggered, and leaving when the program ends; or staggered, with
//!    some VMs that leave and return once.
//! 6. VMs until the load is reached. Each gets a workload whose memory fits, and a share of its work that takes 60 to 120 s
//!    when running alone ([`share_for`]).
//!
//! # Properties (tests of the same names)
//! - `the_same_seed_gives_the_same_text`
//! - `every_case_is_accepted_by_the_twin`
//! - `cases_differ_in_all_that_is_drawn`

use homenode_machine::{Hardware, Machine};
use homenode_machine_files::preset;
use homenode_twin::Scenario;
use homenode_twin::workload::{self, Program};
use homenode_units::{Bytes, Chance};
use serde::Serialize;

/// Seeds of cases that developers may look at.
pub const TRAINING: std::ops::RangeInclusive<u64> = 1..=40;
/// Total vCPUs divided by the machine's CPUs: from a few VMs to an overcommitted host.
pub const LOADS: [f64; 6] = [0.15, 0.35, 0.6, 0.85, 1.0, 1.4];
/// Maximum number of VMs in a case.
pub const VMS_MAX: usize = 20;
/// Seconds that a VM's program takes when running alone.
const SOLO_S: (f64, f64) = (60.0, 120.0);
/// Maximum share of the host's memory that all programs together touch.
const MEMORY_SHARE: f64 = 0.7;
/// A program counts as memory-bound if it has more LLC misses than this per thousand instructions in a quarter of the
/// machine's LLC.
const MEMORY_BOUND_MPKI: f64 = 5.0;

/// Sizes of the VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sizes {
    Four,
    Mixed,
    Wide,
}

/// The workloads to draw from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mix {
    Any,
    Few,
    Halves,
}

/// When VMs arrive and leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arrivals {
    Together,
    Staggered,
    Leaving,
    Returning,
}

impl Arrivals {
    fn words(self) -> &'static str {
        match self {
            Arrivals::Together => "together",
            Arrivals::Staggered => "one after the other",
            Arrivals::Leaving => "one after the other, leaving at the end of their programs",
            Arrivals::Returning => "one after the other, some leaving and coming back",
        }
    }
}

/// A VM of a case.
struct Drawn {
    workload: &'static str,
    vcpus: u16,
    memory: Bytes,
    work_share: f64,
}

/// Presets with several nodes among the hosts of the published experiments.
pub(crate) const PUBLISHED: [&str; 5] = ["amd48", "amd6344x8", "r420", "r910", "xeon26x2"];

/// Returns the machines that cases are drawn on: the hosts of the published experiments that have several nodes. Current
/// hosts are excluded, so that the board's figures stay comparable over the years.
pub fn machines() -> Vec<Machine> {
    PUBLISHED.iter().filter_map(|name| preset(name).ok()).collect()
}

/// Returns the workloads that have a program, with their names.
pub fn programs() -> Vec<(&'static str, Program)> {
    let program = |name| Some((name, workload::builtin(name)?.program?));
    workload::names().filter_map(program).collect()
}

/// Returns the memory of a VM for a program on this many vCPUs, in whole GiB: a quarter more than what the program and the
/// guest's kernel touch.
pub fn memory_for(program: &Program, vcpus: u16) -> Bytes {
    let gib = Bytes::from_gib(1).0;
    let touched = program.footprint(vcpus).0 + gib / 2;
    Bytes((touched + touched / 4).next_multiple_of(gib))
}

/// Returns the seconds that a whole program takes alone on an empty machine, where each vCPU gets all the LLC it can.
pub(crate) fn alone_s(program: &Program, vcpus: u16, machine: &Machine, hardware: &Hardware) -> f64 {
    let llcs = machine.llcs.iter().map(|llc| llc.size_bytes.as_f64());
    let largest = llcs.fold(0.0, f64::max);
    let (llcs, vcpus) = (machine.llcs.len() as f64, f64::from(vcpus.max(1)));
    program.seconds_within(largest * (llcs / vcpus).min(1.0), hardware)
}

/// Returns the share of a program's work that takes about `seconds` alone on an empty machine, where each vCPU gets all the
/// LLC it can.
pub fn share_for(program: &Program, vcpus: u16, machine: &Machine, hardware: &Hardware, seconds: f64) -> f64 {
    let whole = alone_s(program, vcpus, machine, hardware);
    // Rounded, so that the scenario's text holds the exact value.
    (seconds / whole * 1e4).round().max(1.0) / 1e4
}

/// Returns seeds of held-out cases, derived from a commit's id, so that the commit cannot have been tuned to them. All seeds
/// are above those of [`TRAINING`].
pub fn held_out(commit: &str, count: usize) -> Vec<u64> {
    (0..count)
        .map(|at| (1 << 40) + Chance::labelled(0, commit, at).below(1 << 40))
        .collect()
}

/// Returns the case of a seed, as the text of a scenario's file.
pub fn case(seed: u64) -> String {
    let mut chance = Chance::labelled(seed, "case", 0);
    let machines = machines();
    let machine = pick(&mut chance, &machines);
    let hardware = machine
        .hardware
        .as_ref()
        .expect("machines() gives those with figures");
    let load = *pick(&mut chance, &LOADS);
    let sizes = *pick(
        &mut chance,
        &[Sizes::Four, Sizes::Four, Sizes::Mixed, Sizes::Mixed, Sizes::Wide],
    );
    let mix = *pick(&mut chance, &[Mix::Any, Mix::Any, Mix::Few, Mix::Halves]);
    let arrivals = *pick(
        &mut chance,
        &[
            Arrivals::Together,
            Arrivals::Together,
            Arrivals::Staggered,
            Arrivals::Leaving,
            Arrivals::Returning,
        ],
    );
    let programs = drawn_from(&mut chance, machine, mix);
    let vms = draw_vms(&mut chance, machine, hardware, load, sizes, &programs);
    text(&mut chance, seed, machine, arrivals, &vms)
}

/// Returns the case of a seed as a scenario.
///
/// # Panics
/// Never for the output of [`case`]: a test reads many cases.
pub fn scenario(seed: u64) -> Scenario {
    Scenario::from_toml(&format!("{}.toml", name(seed)), &case(seed)).expect("generated cases are scenarios")
}

/// Returns the name of the case of a seed.
pub fn name(seed: u64) -> String {
    format!("case-{seed}")
}

pub(crate) fn pick<'a, T>(chance: &mut Chance, of: &'a [T]) -> &'a T {
    &of[chance.below(of.len() as u64) as usize]
}

/// Returns the lists from which programs are drawn; VMs use the lists in rotation.
fn drawn_from(chance: &mut Chance, machine: &Machine, mix: Mix) -> Vec<Vec<(&'static str, Program)>> {
    let all = programs();
    match mix {
        Mix::Any => vec![all],
        Mix::Few => {
            let count = 2 + chance.below(2);
            vec![(0..count).map(|_| pick(chance, &all).clone()).collect()]
        }
        Mix::Halves => {
            let llcs = machine.llcs.iter().map(|llc| llc.size_bytes.as_f64());
            let quarter = llcs.fold(0.0, f64::max) / 4.0;
            let is_bound = |program: &Program| {
                program.llc_accesses_per_kilo_instruction * program.miss_ratio.at(quarter) > MEMORY_BOUND_MPKI
            };
            let (bound, other) = all.into_iter().partition(|(_, program)| is_bound(program));
            vec![bound, other]
        }
    }
}

fn draw_vms(
    chance: &mut Chance,
    machine: &Machine,
    hardware: &Hardware,
    load: f64,
    sizes: Sizes,
    programs: &[Vec<(&'static str, Program)>],
) -> Vec<Drawn> {
    let cpus = machine.cpus.len();
    let nodes = machine.home_nodes().len();
    let per_node = cpus / nodes;
    let host: Bytes = machine.nodes.values().map(|node| node.memory_bytes).sum();
    let mut room = host.as_f64() * MEMORY_SHARE;
    let wanted = ((cpus as f64 * load) as usize).max(4);
    let (mut vms, mut vcpus_sum): (Vec<Drawn>, usize) = (Vec::new(), 0);
    // Skips a VM that does not fit, and draws again, up to a limit.
    for _ in 0..400 {
        if vcpus_sum >= wanted || vms.len() == VMS_MAX {
            break;
        }
        let vcpus = match sizes {
            Sizes::Wide if vms.is_empty() => per_node + 1 + chance.below(per_node as u64) as usize,
            Sizes::Four => 4,
            Sizes::Wide => *pick(chance, &[2, 4]),
            Sizes::Mixed => *pick(chance, &[2, 2, 4, 4, 4, 6, 8, 12]),
        };
        let list = &programs[vms.len() % programs.len()];
        let (workload, program) = pick(chance, list);
        let vcpus = vcpus.min(cpus) as u16;
        let memory = memory_for(program, vcpus);
        let solo_s = SOLO_S.0 + chance.unit() * (SOLO_S.1 - SOLO_S.0);
        if memory.as_f64() > room {
            continue;
        }
        room -= memory.as_f64();
        vcpus_sum += usize::from(vcpus);
        vms.push(Drawn {
            workload,
            vcpus,
            memory,
            work_share: share_for(program, vcpus, machine, hardware, solo_s),
        });
    }
    vms
}

fn text(chance: &mut Chance, seed: u64, machine: &Machine, arrivals: Arrivals, vms: &[Drawn]) -> String {
    let vcpus: u32 = vms.iter().map(|vm| u32::from(vm.vcpus)).sum();
    let about = format!(
        "{} with {vcpus} vCPUs on {} CPUs, arriving {}",
        if vms.len() == 1 {
            "one VM".to_owned()
        } else {
            format!("{} VMs", vms.len())
        },
        machine.cpus.len(),
        arrivals.words()
    );
    let (name, step_ms) = (
        name(seed),
        if arrivals == Arrivals::Together {
            700
        } else {
            4000 + chance.below(8000)
        },
    );
    let mut case = Case {
        about: about.clone(),
        machine: machine.name.clone(),
        seed: 1,
        duration: "600s",
        arrival_order: "by-seed",
        arrival_jitter: "500ms",
        numa_balancing: false,
        vm: Vec::new(),
        event: Vec::new(),
        name,
    };
    for (at, vm) in vms.iter().enumerate() {
        let returns = arrivals == Arrivals::Returning && at % 3 == 1;
        let leaves = returns || arrivals == Arrivals::Leaving;
        let arrival_ms = at as u64 * step_ms;
        let name = format!("vm{at}-{}", vm.workload);
        // The second start is late enough that the program has mostly ended.
        let starts = [arrival_ms, arrival_ms + 200_000].map(|at_ms| Start {
            at: format!("{at_ms}ms"),
            vm: name.clone(),
            action: "start",
        });
        case.event.extend(starts.into_iter().filter(|_| returns));
        case.vm.push(Vm {
            vcpus: vm.vcpus,
            memory: vm.memory.to_string(),
            workload: vm.workload,
            work_share: vm.work_share,
            after: leaves.then_some("leave"),
            arrival: (!returns).then(|| format!("{arrival_ms}ms")),
            name,
        });
    }
    let text = toml::to_string(&case).expect("nothing of a case is beyond TOML");
    format!("# Drawn from seed {seed}: {about}.\n{text}")
}

/// The part of a scenario file that is drawn here; the format has more keys.
#[derive(Serialize)]
struct Case<'a> {
    name: String,
    about: String,
    machine: String,
    seed: u64,
    duration: &'a str,
    arrival_order: &'a str,
    arrival_jitter: &'a str,
    numa_balancing: bool,
    vm: Vec<Vm<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    event: Vec<Start<'a>>,
}

#[derive(Serialize)]
struct Vm<'a> {
    name: String,
    vcpus: u16,
    memory: String,
    workload: &'a str,
    work_share: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    after: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    arrival: Option<String>,
}

#[derive(Serialize)]
struct Start<'a> {
    at: String,
    vm: String,
    action: &'a str,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use homenode_twin::Twin;

    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_text() {
        assert_eq!(case(7), case(7));
        assert_ne!(case(7), case(8));
    }

    #[test]
    fn every_case_is_accepted_by_the_twin() {
        let seeds = TRAINING.chain(held_out("0123456789abcdef", 40));
        for seed in seeds {
            let scenario = scenario(seed);
            assert_eq!(scenario.name, name(seed));
            let machine = preset(scenario.machine.as_deref().unwrap()).unwrap();
            if let Err(error) = Twin::new(machine, &scenario, 1) {
                panic!("seed {seed}: {error}\n{}", case(seed));
            }
        }
    }

    #[test]
    fn cases_differ_in_all_that_is_drawn() {
        let all: Vec<Scenario> = TRAINING.map(scenario).collect();
        let machines: BTreeSet<_> = all.iter().map(|case| case.machine.clone()).collect();
        assert_eq!(machines.len(), super::machines().len());
        let vms = || all.iter().flat_map(|case| &case.vms);
        let sizes: BTreeSet<u16> = vms().map(|vm| vm.vcpus).collect();
        assert!(
            [2, 4, 6, 8, 12].iter().all(|size| sizes.contains(size)),
            "{sizes:?}"
        );
        let workloads: BTreeSet<_> = vms().map(|vm| &vm.workload).collect();
        assert!(workloads.len() > 60, "{}", workloads.len());
        assert!(all.iter().any(|case| !case.events.is_empty()));
        assert!(all.iter().any(|case| case.vms.len() < 4));
        let is_overcommitted = |case: &Scenario| {
            let vcpus: usize = case.vms.iter().map(|vm| usize::from(vm.vcpus)).sum();
            vcpus > preset(case.machine.as_deref().unwrap()).unwrap().cpus.len()
        };
        assert!(all.iter().any(is_overcommitted));
    }

    #[test]
    fn held_out_seeds_follow_the_commit_and_are_no_training_seeds() {
        let seeds = held_out("abc", 10);
        assert_eq!(seeds, held_out("abc", 10));
        assert_eq!(seeds[..5], held_out("abc", 5));
        assert!(seeds.iter().all(|seed| !TRAINING.contains(seed)));
        assert!(held_out("abd", 10).iter().all(|seed| !seeds.contains(seed)));
    }
}
