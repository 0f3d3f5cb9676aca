//! Cases modelled on operations: current hosts with VMs drawn from a public trace, on an unconfigured kernel.
//!
//! # Problem
//! Cases of [`crate::generate`] are busy from the first second to the last, as benchmarks are. VMs on an operator's host are
//! mostly idle, and have the sizes that customers order. A score on benchmarks does not show how an agent fares there.
//!
//! # Terms
//! - [`Hosts`]: current hosts, those of the published experiments, or a small host.
//! - [`Fullness`]: the number of vCPUs per CPU, which is a quarter, a half, one or two.
//! - *Host*: a machine with enough memory for all of its VMs, which may be more than its file says.
//! - *Class*: a pair of [`Hosts`] and [`Fullness`]. The cases of a list rotate over the classes, so that all are covered.
//!
//! # Algorithm
//! Draw from the random stream of the seed:
//! 1. A machine of the class.
//! 2. VMs until the vCPUs of the class are reached. Size, CPU use, kind and program come from the distributions below. A
//!    VM's threads rest between pieces of work, so that the VM, if it ran alone, would be busy for the drawn share of time.
//! 3. Memory, added evenly to the host's nodes if the VMs need more than `MEMORY_SHARE` of what the host has.
//! 4. Arrivals: most VMs arrive in the first minute. A few arrive and a few leave during the run, at the trace's rate.
//! 5. Changes: twice per run each VM becomes more or less busy.
//!
//! # Sources
//! *Trace*: Azure 2019, all VMs of a region [Cortez 2017, and the notebook of AzurePublicDataset V2, curves "Azure 2019";
//! read by eye, to 2 points].
//! - [`SIZES`]: cores and memory. Only their separate distributions are published. We join them by rank: the more cores, the
//!   more memory.
//! - [`CPU_SHARES`]: average use of CPUs over a VM's life.
//! - [`INTERACTIVE`]: 43 of 100 core hours; unknown workloads are counted as delay-insensitive.
//! - [`ARRIVALS_PER_VM_HOUR`]: 2.7 million VMs in 30 days, of which 226,000 are present at a time.
//!
//! *Estimates*, for lack of public data: how long a request takes alone (`REQUEST_S`), how long a piece of a batch job takes
//! alone (`PIECE_S`), how CPU use changes within a run (`SWINGS`; in the trace the 95th percentile of maxima is about seven
//! times the average), and which program a VM runs. Every program without barriers is equally likely; a VM that is always
//! busy may also run one with barriers.
//!
//! # Properties (tests of the same names)
//! - `the_same_seed_gives_the_same_text`
//! - `every_case_is_accepted_by_the_twin`
//! - `vms_are_distributed_as_in_the_trace`
//! - `a_host_is_as_full_as_its_class_says`

use homenode_machine::{Hardware, Machine};
use homenode_machine_files::{Comments, from_toml, preset, to_toml};
use homenode_twin::Scenario;
use homenode_twin::workload::Program;
use homenode_units::{Bytes, Chance, Ns};
use serde::Serialize;

use crate::generate::{self, PUBLISHED, memory_for, pick, programs};

/// Cores and GiB of memory of the VMs up to this cumulative share.
pub const SIZES: [(f64, u16, u64); 9] = [
    (0.12, 2, 2),
    (0.29, 2, 4),
    (0.58, 2, 8),
    (0.61, 4, 8),
    (0.81, 4, 16),
    (0.90, 8, 32),
    (0.935, 8, 64),
    (0.96, 16, 64),
    (1.0, 16, 128),
];
/// Cumulative share of VMs, and the average CPU use that they do not exceed; linear in between.
pub const CPU_SHARES: [(f64, f64); 9] = [
    (0.0, 0.001),
    (0.20, 0.01),
    (0.43, 0.05),
    (0.57, 0.10),
    (0.75, 0.20),
    (0.90, 0.40),
    (0.96, 0.60),
    (0.98, 0.80),
    (1.0, 1.0),
];
/// Share of VMs that serve requests, for whose answers clients wait.
pub const INTERACTIVE: f64 = 0.43;
/// Arrivals per hour for each VM on the host; as many VMs leave.
pub const ARRIVALS_PER_VM_HOUR: f64 = 0.0166;
/// A VM with a higher CPU use than this gets no rests, because it computes all the time.
const ALWAYS_BUSY: f64 = 0.9;
/// The machine file of a small host.
pub const SMALL_HOST: &str = include_str!("operations/small-host.toml");
/// Prefixes of programs that are used only in experiments, and that no operator runs.
const MICRO: [&str; 4] = ["array.", "blockie", "disrupt.", "walk."];
/// Seconds that a request takes alone; drawn on a logarithmic scale.
const REQUEST_S: (f64, f64) = (0.01, 0.2);
/// Seconds that a piece of a batch job takes alone; drawn on a logarithmic scale.
const PIECE_S: (f64, f64) = (5.0, 60.0);
/// Factors by which rests change when a VM becomes more or less busy.
const SWINGS: [f64; 4] = [0.3, 0.6, 1.0, 2.0];
/// Duration of a run.
pub const DURATION: Ns = Ns::from_secs(1800);
/// Start of the measurement: before it, VMs boot and touch their memory.
const WARM_UP: Ns = Ns::from_secs(120);
/// Largest share of a host's memory that VMs get.
const MEMORY_SHARE: f64 = 0.9;
/// Unit in which memory is added to a node.
const MEMORY_STEP: Bytes = Bytes::from_gib(8);

/// The kind of hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Hosts {
    /// Current hosts: with many L3s, or with nodes that are parts of a socket.
    Today,
    /// Hosts of the published experiments.
    Old,
    /// Two nodes of four cores. A change of homes gains little there, and a wrong one costs time.
    Small,
}

/// Number of vCPUs per CPU of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fullness {
    /// A quarter of a vCPU per CPU.
    Light,
    /// Half a vCPU per CPU.
    Half,
    /// One vCPU per CPU.
    Full,
    /// Two vCPUs per CPU.
    Overcommitted,
}

impl Hosts {
    /// Returns the names of machines of this kind, each with several nodes or L3s. All are presets, except the small one.
    fn machines(self) -> &'static [&'static str] {
        match self {
            Hosts::Today => &[
                "epyc7763-nps1",
                "epyc7763-nps4",
                "epyc9654-nps4",
                "xeon8380",
                "xeon8480",
                "xeon8480-snc4",
                "altra-q80",
            ],
            Hosts::Old => &PUBLISHED,
            Hosts::Small => &["small"],
        }
    }

    /// Returns a machine of this kind by its name.
    fn machine(self, name: &str) -> Machine {
        let machine = match self {
            Hosts::Small => from_toml("small-host.toml", SMALL_HOST),
            Hosts::Today | Hosts::Old => preset(name),
        };
        machine.expect("a test reads all of them")
    }

    /// Returns the name used in tables.
    pub fn name(self) -> &'static str {
        match self {
            Hosts::Today => "today",
            Hosts::Old => "old",
            Hosts::Small => "small",
        }
    }
}

impl Fullness {
    /// All levels, from the emptiest to the fullest.
    pub const ALL: [Fullness; 4] = [
        Fullness::Light,
        Fullness::Half,
        Fullness::Full,
        Fullness::Overcommitted,
    ];

    /// Returns the number of vCPUs per CPU.
    pub fn vcpus_per_cpu(self) -> f64 {
        match self {
            Fullness::Light => 0.25,
            Fullness::Half => 0.5,
            Fullness::Full => 1.0,
            Fullness::Overcommitted => 2.0,
        }
    }

    /// Returns the name used in tables.
    pub fn name(self) -> &'static str {
        match self {
            Fullness::Light => "light",
            Fullness::Half => "half-full",
            Fullness::Full => "full",
            Fullness::Overcommitted => "overcommitted",
        }
    }
}

/// A kind of host and how full it is.
pub type Class = (Hosts, Fullness);

/// Returns the class of case number `at` in a list of cases on these hosts; `hosts` must not be empty.
pub fn class(at: usize, hosts: &[Hosts]) -> Class {
    let fullness = Fullness::ALL[at / hosts.len() % Fullness::ALL.len()];
    (hosts[at % hosts.len()], fullness)
}

/// Returns the name of a case.
pub fn name((hosts, fullness): Class, seed: u64) -> String {
    format!("{}-{}-{seed}", hosts.name(), fullness.name())
}

/// A case as two files, to be written into the same folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// Name of the case, and of the scenario's file without its extension.
    pub name: String,
    /// The scenario.
    pub scenario: String,
    /// Name of the host's file without its extension; the scenario refers to it.
    pub host_name: String,
    /// The host.
    pub host: String,
}

impl Files {
    /// Parses both files into host and scenario.
    ///
    /// # Panics
    /// Never for the output of [`case`]: a test reads many cases.
    pub fn read(&self) -> (Machine, Scenario) {
        let file = |name: &str| format!("{name}.toml");
        let machine = from_toml(file(&self.host_name), &self.host).expect("drawn hosts are machines");
        let scenario =
            Scenario::from_toml(&file(&self.name), &self.scenario).expect("drawn cases are scenarios");
        (machine, scenario)
    }
}

/// Returns the case of a class and seed.
pub fn case(class: Class, seed: u64) -> Files {
    let (hosts, fullness) = class;
    let mut chance = Chance::labelled(seed, "operations", 0);
    let named: &&str = pick(&mut chance, hosts.machines());
    let machine = hosts.machine(named);
    let hardware = machine.hardware.clone().expect("these have figures");
    let programs = programs();
    let mut drawing = Drawing {
        machine: &machine,
        hardware: &hardware,
        programs: &programs,
        chance,
    };
    let wanted = machine.cpus.len() as f64 * fullness.vcpus_per_cpu();
    let name = name(class, seed);
    let host_name = format!("{name}-host");
    let (mut case, mut vcpus) = (Case::new(&name, &host_name), 0.0);
    while vcpus < wanted {
        let drawn = drawing.vm(case.vm.len());
        // Draws again if no program fits, or if the VM is wider than the wanted total of vCPUs.
        let Some(vm) = drawn.filter(|vm| f64::from(vm.vcpus) <= wanted) else {
            continue;
        };
        vcpus += f64::from(vm.vcpus);
        drawing.life(&vm, &mut case);
        case.vm.push(vm);
    }
    case.about = format!(
        "{} VMs with {vcpus} vCPUs on {} CPUs, as in operation",
        case.vm.len(),
        machine.cpus.len()
    );
    let text = toml::to_string(&case).expect("nothing of a case is beyond TOML");
    let sold = case.vm.iter().map(|vm| Bytes::from_gib(vm.memory_gib)).sum();
    Files {
        scenario: format!("# Drawn from seed {seed}: {}.\n{text}", case.about),
        host: to_toml(&with_room(machine.clone(), sold), &Comments::default()),
        name,
        host_name,
    }
}

/// Returns the machine with enough memory that the `sold` memory is at most [`MEMORY_SHARE`] of it. Missing memory is added
/// evenly to all nodes.
fn with_room(mut machine: Machine, sold: Bytes) -> Machine {
    let host: Bytes = machine.nodes.values().map(|node| node.memory_bytes).sum();
    let missing = (sold.as_f64() / MEMORY_SHARE - host.as_f64()).max(0.0);
    let steps = libm::ceil(missing / machine.nodes.len() as f64 / MEMORY_STEP.as_f64());
    for (_, node) in machine.nodes.iter_mut() {
        node.memory_bytes += Bytes(steps as u64 * MEMORY_STEP.0);
    }
    machine
}

/// State from which VMs are drawn.
struct Drawing<'a> {
    machine: &'a Machine,
    hardware: &'a Hardware,
    programs: &'a [(&'static str, Program)],
    chance: Chance,
}

impl Drawing<'_> {
    /// Draws a VM; `None` if no program fits the drawn size.
    fn vm(&mut self, at: usize) -> Option<Vm> {
        let (vcpus, memory_gib) = size(self.chance.unit());
        let vcpus = vcpus.min(self.machine.cpus.len() as u16);
        let share = cpu_share(self.chance.unit());
        let is_interactive = self.chance.unit() < INTERACTIVE;
        let is_always_busy = share > ALWAYS_BUSY && !is_interactive;
        let memory = Bytes::from_gib(memory_gib);
        let fits = |(name, program): &&(&'static str, Program)| {
            let is_micro = MICRO.iter().any(|micro| name.starts_with(micro));
            let rests = program.barrier.is_none() || is_always_busy;
            rests && !is_micro && memory_for(program, vcpus) <= memory
        };
        let fitting: Vec<&(&'static str, Program)> = self.programs.iter().filter(fits).collect();
        if fitting.is_empty() {
            return None;
        }
        let (workload, program) = *pick(&mut self.chance, &fitting);
        let (from, to) = if is_interactive { REQUEST_S } else { PIECE_S };
        let piece_s = from * libm::pow(to / from, self.chance.unit());
        Some(Vm {
            name: format!("vm{at}-{workload}"),
            vcpus,
            memory_gib,
            memory: memory.to_string(),
            workload,
            work_share: self.endless(program, vcpus),
            arrival: self.arrival(),
            rest: (!is_always_busy).then(|| self.rest(program, vcpus, piece_s, share)),
        })
    }

    /// Draws an arrival: at the beginning, or for a few VMs during the run.
    fn arrival(&mut self) -> String {
        if self.comes_or_goes() {
            return self.within(60);
        }
        format!("{}ms", self.chance.below(30_000))
    }

    /// Draws whether a VM arrives during the run; also used for whether it leaves.
    fn comes_or_goes(&mut self) -> bool {
        self.chance.unit() < ARRIVALS_PER_VM_HOUR * DURATION.as_secs_f64() / 3600.0
    }

    /// Draws a time in the run, not before `from_s`.
    fn within(&mut self, from_s: u64) -> String {
        let left_ms = DURATION.0 / 1_000_000 - from_s * 1000;
        format!("{}ms", from_s * 1000 + self.chance.below(left_ms))
    }

    /// Returns the seconds of a whole program running alone.
    fn alone_s(&self, program: &Program, vcpus: u16) -> f64 {
        generate::alone_s(program, vcpus, self.machine, self.hardware)
    }

    /// Returns a multiple of the program's work that is too long to end within a run.
    fn endless(&self, program: &Program, vcpus: u16) -> f64 {
        libm::ceil(10.0 * DURATION.as_secs_f64() / self.alone_s(program, vcpus)).max(1.0)
    }

    /// Returns the rests between pieces of `piece_s` seconds with which the program, alone, is busy for this share of the
    /// time.
    fn rest(&self, program: &Program, vcpus: u16, piece_s: f64, share: f64) -> Rest {
        let instructions_m = program.instructions_g_per_thread * 1e3 / self.alone_s(program, vcpus) * piece_s;
        let share = share.min(ALWAYS_BUSY);
        let rest_s = piece_s * (1.0 - share) / share;
        Rest {
            interval_m_instructions: libm::ceil(instructions_m),
            mean: format!("{}ms", (rest_s * 1e3) as u64 + 1),
        }
    }

    /// Draws the events of a VM during the run.
    fn life(&mut self, vm: &Vm, case: &mut Case) {
        let event = |at: String, action: Action| Event {
            at,
            vm: vm.name.clone(),
            action,
        };
        if self.comes_or_goes() {
            case.event.push(event(self.within(120), Action::Stop));
        }
        if vm.rest.is_some() {
            for _ in 0..2 {
                let rest_factor = *pick(&mut self.chance, &SWINGS);
                case.event
                    .push(event(self.within(120), Action::Phase { rest_factor }));
            }
        }
    }
}

/// Returns cores and GiB of the VM at this quantile.
fn size(share: f64) -> (u16, u64) {
    let found = SIZES.iter().find(|(until, ..)| share < *until);
    let (_, vcpus, gib) = found.unwrap_or(&SIZES[SIZES.len() - 1]);
    (*vcpus, *gib)
}

/// Returns the average CPU use of the VM at this quantile, in (0, 1].
fn cpu_share(share: f64) -> f64 {
    let on_line = |line: &[(f64, f64)]| match line {
        [(from, low), (to, high)] if share < *to => Some(low + (high - low) * (share - from) / (to - from)),
        _ => None,
    };
    CPU_SHARES.windows(2).find_map(on_line).unwrap_or(1.0)
}

/// The part of a scenario file that is drawn here; the format has more keys.
#[derive(Serialize)]
struct Case {
    name: String,
    about: String,
    machine: String,
    seed: u64,
    numa_balancing: bool,
    duration: String,
    warm_up: String,
    arrival_jitter: &'static str,
    vm: Vec<Vm>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    event: Vec<Event>,
}

impl Case {
    fn new(name: &str, host: &str) -> Case {
        Case {
            name: name.to_owned(),
            about: String::new(),
            machine: format!("{host}.toml"),
            seed: 1,
            numa_balancing: true,
            duration: DURATION.to_string(),
            warm_up: WARM_UP.to_string(),
            arrival_jitter: "20s",
            vm: Vec::new(),
            event: Vec::new(),
        }
    }
}

#[derive(Serialize)]
struct Vm {
    name: String,
    vcpus: u16,
    #[serde(skip)]
    memory_gib: u64,
    memory: String,
    workload: &'static str,
    work_share: f64,
    arrival: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    rest: Option<Rest>,
}

#[derive(Serialize)]
struct Rest {
    interval_m_instructions: f64,
    mean: String,
}

#[derive(Serialize)]
struct Event {
    at: String,
    vm: String,
    action: Action,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
enum Action {
    Stop,
    Phase { rest_factor: f64 },
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;
    use homenode_twin::Twin;

    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_text() {
        let class = |at| class(at, Hosts::value_variants());
        assert_eq!(case(class(0), 7), case(class(0), 7));
        assert_ne!(case(class(0), 7), case(class(0), 8));
        assert_ne!(case(class(0), 7), case(class(3), 7));
    }

    #[test]
    fn every_case_is_accepted_by_the_twin() {
        for (at, seed) in (1..=24).enumerate() {
            let case = case(class(at, Hosts::value_variants()), seed);
            let (machine, scenario) = case.read();
            if let Err(error) = Twin::new(machine, &scenario, 1) {
                panic!("seed {seed}: {error}\n{}", case.scenario);
            }
        }
    }

    #[test]
    fn a_host_is_as_full_as_its_class_says() {
        for (at, seed) in (1..=24).enumerate() {
            let class = class(at, Hosts::value_variants());
            let (machine, scenario) = case(class, seed).read();
            let vcpus: f64 = scenario.vms.iter().map(|vm| f64::from(vm.vcpus)).sum();
            let wanted = machine.cpus.len() as f64 * class.1.vcpus_per_cpu();
            assert!((wanted..wanted + 16.0).contains(&vcpus), "{vcpus} of {wanted}");
            let memory = |of: &mut dyn Iterator<Item = Bytes>| of.sum::<Bytes>().as_f64();
            let host = memory(&mut machine.nodes.values().map(|node| node.memory_bytes));
            let sold = memory(&mut scenario.vms.iter().map(|vm| vm.memory));
            assert!(sold <= host * MEMORY_SHARE, "{sold} of {host}");
            let file = class.0.machine(&machine.name);
            assert!(host >= memory(&mut file.nodes.values().map(|node| node.memory_bytes)));
        }
    }

    #[test]
    fn vms_are_distributed_as_in_the_trace() {
        let mut chance = Chance::labelled(1, "test", 0);
        let drawn: Vec<(u16, f64)> = (0..10_000)
            .map(|_| (size(chance.unit()).0, cpu_share(chance.unit())))
            .collect();
        let share = |is: &dyn Fn(&(u16, f64)) -> bool| drawn.iter().filter(|vm| is(vm)).count() as f64 / 1e4;
        assert!((share(&|vm| vm.0 == 2) - 0.58).abs() < 0.02);
        assert!((share(&|vm| vm.0 >= 16) - 0.065).abs() < 0.01);
        assert!((share(&|vm| vm.1 < 0.1) - 0.57).abs() < 0.02);
        assert!((share(&|vm| vm.1 < 0.4) - 0.90).abs() < 0.02);
        assert!(drawn.iter().all(|vm| vm.1 > 0.0 && vm.1 <= 1.0));
    }
}
