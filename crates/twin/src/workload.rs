//! Workloads: the load that a program puts on a machine, as data.
//!
//! A profile describes one *solo* run: instructions, the core's own cycles per instruction, accesses to the LLC, the miss-ratio
//! curve, how many misses the program keeps in flight, what it writes, and which thread touches which memory. A profile never
//! says what happens when programs share a machine, because the simulator predicts that.
//!
//! # Terms
//!
//! - Miss ratio at a capacity of `c` bytes: `m(c) = m_inf + (1 - m_inf) * exp(-(c / c0)^k)`, or a table
//!   ([`MissRatioCurve`]).
//! - `cpi_core`: cycles per instruction with every LLC access free.
//! - `misses_in_flight`: mean number of outstanding misses to memory while there is at least one, hardware prefetch included.
//! - `hits_in_flight`: the same for LLC hits. It is larger, because an out-of-order core hides most of a hit.
//! - `stream_share`: share of missed lines that follow on another in memory. A stream's lines are not used again soon, so the
//!   share is at most that of the misses that no cache would save, `m_inf / m(c)`. A prefetcher keeps one more line of a stream
//!   in flight, so the share is also at most `misses_in_flight - 1`. The default is the smaller of both.
//!
//! # Left out
//!
//! Phases that change the curve (a phase here changes rates only), threads that use their own memory unevenly, the order
//! of reads and writes.

use homenode_machine::notation;
use homenode_machine_files::file::{FileError, Source, read_toml};
use homenode_units::{Bytes, Ns};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

mod curve;
mod fit;

pub use curve::MissRatioCurve;
pub use fit::FittedCurve;

/// A program, or none for an idle workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// Name by which scenarios refer to the workload.
    pub name: String,
    /// Description of the workload, for readers.
    pub about: String,
    /// Claims of `data/published/claims.toml` to whose listed inputs some figure here was calibrated. Results of these claims
    /// under this profile are not predictions. Solo behaviour needs no entry.
    #[serde(default)]
    pub calibrated_to: Vec<String>,
    /// The program that the threads run; absent for an idle workload.
    #[serde(default)]
    pub program: Option<Program>,
}

/// Behaviour of every thread of a program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Program {
    /// Number of threads.
    pub threads: Threads,
    /// Instructions of one thread from start to end, in thousand millions.
    pub instructions_g_per_thread: f64,
    /// Cycles per instruction with every LLC access free.
    pub cpi_core: f64,
    /// Accesses to the LLC (L2 misses, prefetches included) per thousand instructions.
    pub llc_accesses_per_kilo_instruction: f64,
    /// Share of these accesses that miss, by capacity.
    pub miss_ratio: MissRatioCurve,
    /// Mean number of memory accesses in flight.
    pub misses_in_flight: f64,
    /// Mean number of LLC hits in flight.
    pub hits_in_flight: f64,
    /// Share of missed lines that follow on another missed line in memory, as those of streams do, in [0, 1]. The other lines are
    /// scattered, and cost a memory controller more. If absent because it was not measured, it is the largest share that the rest
    /// of the profile allows ([`Program::streamed`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_share: Option<f64>,
    /// Share of missed lines that are written back later, in [0, 1].
    pub write_share: f64,
    /// How threads wait for each other; absent if they never do.
    #[serde(default)]
    pub barrier: Option<Barrier>,
    /// How threads rest between pieces of work; absent if they always have work.
    #[serde(default)]
    pub rest: Option<Rest>,
    /// Behaviour of a thread that waits at a barrier.
    #[serde(default)]
    pub waiting: Waiting,
    /// How many times a thread wakes another thread that sleeps, other than at barriers, per million instructions. Each wake-up
    /// costs an interrupt to another CPU.
    #[serde(default)]
    pub wakeups_per_m_instructions: f64,
    /// Pages that a thread returns to its kernel and allocates again, per million instructions.
    #[serde(default)]
    pub page_releases_per_m_instructions: f64,
    /// Memory that the program's runtime library hands out while the program runs; absent if threads allocate what they use once.
    #[serde(default)]
    pub runtime: Option<RuntimeProfile>,
    /// Address translation; absent if the TLB always holds what the program uses.
    #[serde(default)]
    pub translation: Option<Translation>,
    /// Data moved to and from devices.
    #[serde(default)]
    pub io: Vec<IoProfile>,
    /// Memory, by the threads that touch it.
    pub regions: Vec<RegionProfile>,
    /// Stretches of the run that differ from the run as a whole; empty if none is known.
    #[serde(default)]
    pub phases: Vec<PhaseProfile>,
}

/// How many threads a program has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Threads {
    /// One thread per vCPU; they share the program's work as its profile says.
    OnePerVcpu,
    /// One copy of a single-threaded program on each vCPU.
    OneCopyPerVcpu,
    /// One thread in total; the other vCPUs idle.
    Single,
}

/// Threads that wait for the slowest of them at regular intervals.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Barrier {
    /// Instructions of one thread between two barriers, in millions.
    pub interval_m_instructions: f64,
    /// Relative standard deviation of a thread's work between two barriers.
    pub imbalance: f64,
}

/// Threads that have no work now and then, as those of a server between two requests. The duration of a rest does not depend on
/// how fast the work before it was done. Threads that meet at barriers rest together: the last to arrive at a barrier rests,
/// as one that reads input for all would, and then releases the others.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Rest {
    /// Instructions of one thread between two rests, in millions.
    pub interval_m_instructions: f64,
    /// Mean duration of a rest. Each rest is drawn from an exponential distribution.
    #[serde(with = "homenode_units::text")]
    #[schemars(with = "notation::Time")]
    pub mean: Ns,
}

/// Behaviour of a thread that waits for other threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Waiting {
    /// The thread gives up its vCPU, which must then be interrupted to release it.
    #[default]
    Sleep,
    /// The thread keeps its vCPU busy.
    Spin,
}

/// Memory that a program's runtime library (an allocator, a Java virtual machine) takes back and hands out again.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RuntimeProfile {
    /// Bytes that a thread allocates per thousand instructions; it frees as many.
    pub allocated_bytes_per_kilo_instruction: f64,
    /// Source of the freed memory that a thread gets from a library that does not know nodes.
    pub reuse: Reuse,
}

/// Source of the freed memory that a thread gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Reuse {
    /// Memory that the thread itself freed: each thread is a process, or has a cache that holds all that it frees.
    Thread,
    /// Memory that any thread freed: the program has one heap.
    Program,
}

/// How a program's accesses fall on pages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Translation {
    /// Loads and stores per thousand instructions.
    pub accesses_per_kilo_instruction: f64,
    /// Share of these accesses that miss the TLB, by its reach: entries times page size.
    pub miss_ratio: MissRatioCurve,
}

/// Data that a program moves to or from a kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct IoProfile {
    /// Kind of the device.
    pub device: DeviceKind,
    /// Bytes that a thread moves per thousand instructions.
    pub bytes_per_kilo_instruction: f64,
    /// Bytes of one request.
    #[serde(with = "homenode_units::text")]
    #[schemars(with = "notation::Size")]
    pub request: Bytes,
    /// Whether a thread waits for each request before it continues, as a server does whose client sends no request before it
    /// has the last answer. Otherwise it waits before its next request.
    #[serde(default)]
    pub waits: bool,
    /// Packets of one request on a network, in both directions; 0 if their number does not matter. On Xen the driver domain
    /// handles each of them, unless the guest drives the network itself.
    #[serde(default)]
    pub packets: u32,
}

/// Kinds of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceKind {
    /// A disk or its controller (PCI class 01).
    Disk,
    /// A network controller (PCI class 02).
    Network,
}

impl DeviceKind {
    /// Returns the kind's usual name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            DeviceKind::Disk => "disk",
            DeviceKind::Network => "network device",
        }
    }

    /// Returns the first digits of the kind's PCI class.
    pub(crate) fn class(self) -> &'static str {
        match self {
            DeviceKind::Disk => "01",
            DeviceKind::Network => "02",
        }
    }
}

/// A part of a program's memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RegionProfile {
    /// Which threads touch the region.
    pub kind: RegionKind,
    /// Size of the region: per thread for a private region, in total for the others.
    #[serde(with = "homenode_units::text")]
    #[schemars(with = "notation::Size")]
    pub size: Bytes,
    /// Share of a thread's accesses that go to this region. Over all regions the shares add up to 1.
    pub access_share: f64,
    /// Heat classes; absent if all pages are alike.
    #[serde(default)]
    pub heat: Vec<HeatClass>,
    /// How the program passes over the region; absent if it uses all of it all the time. A region with a window has no heat
    /// classes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<Window>,
}

/// A program's passes over a region that it uses part by part, as a loop over one array after the other does.
///
/// The parts lie one after the other in guest memory. A part of a private region is that of all threads, each with its own share
/// of it, as the slabs of an array are.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Number of parts of equal size, of which one is in use at a time, from 2 to 64.
    pub parts: u16,
    /// How many times the run goes through all parts, above 0.
    pub passes: f64,
}

impl Window {
    /// Returns the part in use after this share of the run, from 0.
    pub(crate) fn part_at(self, progress: f64) -> u16 {
        // Rounding must not turn the end of the run into the begin of another pass.
        let turned = (progress.clamp(0.0, 1.0 - 1e-9)) * self.passes * f64::from(self.parts);
        (turned % f64::from(self.parts)) as u16
    }
}

/// Which threads touch a region first, and which use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RegionKind {
    /// Each thread has a region of its own.
    Private,
    /// Touched and used by all threads.
    Shared,
    /// Touched first by thread 0, used by all.
    InitialisedByOne,
}

/// Pages of a region that are used in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HeatClass {
    /// Share of the region's pages.
    pub page_share: f64,
    /// Share of the region's accesses.
    pub access_share: f64,
}

/// A stretch of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PhaseProfile {
    /// Share of the run's instructions. Over all phases the shares add up to 1.
    pub share: f64,
    /// Multiplies `llc_accesses_per_kilo_instruction` during the phase.
    pub llc_access_factor: f64,
    /// Multiplies `cpi_core` during the phase.
    pub cpi_factor: f64,
    /// Multiplies the mean rest during the phase, if threads rest.
    #[serde(default = "unchanged")]
    pub rest_factor: f64,
}

fn unchanged() -> f64 {
    1.0
}

/// An error in a workload that parses.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum WorkloadError {
    /// The file does not parse.
    #[error(transparent)]
    File(#[from] FileError),
    /// A figure is impossible.
    #[error("workload {workload}: {key} is {value}; {expected}")]
    Figure {
        /// The workload's name.
        workload: String,
        /// The figure's key in the file; entries of lists count from 0.
        key: String,
        /// The figure's value.
        value: f64,
        /// The values that would be possible.
        expected: &'static str,
    },
    /// Shares of a whole do not add up to 1.
    #[error("workload {workload}: the `{share}` values of {key} add up to {sum}; their sum must be 1")]
    Sum {
        /// The workload's name.
        workload: String,
        /// The list's key in the file.
        key: String,
        /// The key of the share in each of the list's entries.
        share: &'static str,
        /// The sum of the shares.
        sum: f64,
    },
}

impl WorkloadError {
    /// Returns the key in the file that the error concerns, unless the error itself states the place.
    pub(crate) fn key(&self) -> Option<&str> {
        match self {
            WorkloadError::File(_) => None,
            WorkloadError::Figure { key, .. } | WorkloadError::Sum { key, .. } => Some(key),
        }
    }
}

/// Largest size of a region. It keeps the sum over all vCPUs within the range of a number of bytes.
const REGION_MAX: Bytes = Bytes::from_gib(1024);

impl Workload {
    /// Reads a workload file and checks its figures.
    ///
    /// # Errors
    /// If a part does not parse or is impossible, with its place.
    pub fn from_toml(path: &str, text: &str) -> Result<Workload, WorkloadError> {
        let workload: Workload = read_toml(path, text)?;
        let placed = |error: WorkloadError| match error.key() {
            Some(key) => Source::new(path, text).complaint(key, error.to_string()).into(),
            None => error,
        };
        workload.check().map_err(placed)?;
        Ok(workload)
    }

    /// Checks that the workload's figures are possible.
    ///
    /// # Errors
    /// [`WorkloadError`] that names the first impossible figure.
    pub fn check(&self) -> Result<(), WorkloadError> {
        let Some(program) = &self.program else {
            return Ok(());
        };
        let workload = || self.name.clone();
        program.check().map_err(|wrong| match wrong {
            Wrong::Figure(key, value, expected) => WorkloadError::Figure {
                workload: workload(),
                key: format!("program.{key}"),
                value,
                expected,
            },
            Wrong::Sum(key, share, sum) => WorkloadError::Sum {
                workload: workload(),
                key: format!("program.{key}"),
                share,
                sum,
            },
        })
    }
}

/// An error in a program: a figure that is impossible, or shares that do not add up.
enum Wrong {
    Figure(String, f64, &'static str),
    Sum(String, &'static str, f64),
}

fn above_0(key: impl Into<String>, value: f64) -> Result<(), Wrong> {
    // Written so that NaN fails as well.
    if value > 0.0 && value.is_finite() {
        return Ok(());
    }
    Err(Wrong::Figure(key.into(), value, "it must be above 0"))
}

fn a_share(key: impl Into<String>, value: f64) -> Result<(), Wrong> {
    if (0.0..=1.0).contains(&value) {
        return Ok(());
    }
    Err(Wrong::Figure(key.into(), value, "it must lie between 0 and 1"))
}

impl Window {
    fn check(self, key: &str, has_heat: bool) -> Result<(), Wrong> {
        let parts = f64::from(self.parts);
        if has_heat {
            let expected = "a region cannot have both a window and heat: remove one of them";
            return Err(Wrong::Figure(key.to_owned(), parts, expected));
        }
        if !(2..=64).contains(&self.parts) {
            let expected = "it must lie between 2 and 64";
            return Err(Wrong::Figure(format!("{key}.parts"), parts, expected));
        }
        if !(self.passes > 0.0 && self.passes <= 1e6) {
            let expected = "it must be above 0 and at most 1000000";
            return Err(Wrong::Figure(format!("{key}.passes"), self.passes, expected));
        }
        Ok(())
    }
}

impl Program {
    fn check(&self) -> Result<(), Wrong> {
        above_0("instructions_g_per_thread", self.instructions_g_per_thread)?;
        above_0("cpi_core", self.cpi_core)?;
        above_0("misses_in_flight", self.misses_in_flight)?;
        above_0("hits_in_flight", self.hits_in_flight)?;
        a_share("write_share", self.write_share)?;
        self.stream_share
            .map_or(Ok(()), |share| a_share("stream_share", share))?;
        self.miss_ratio.check("miss_ratio")?;
        let accesses = self.llc_accesses_per_kilo_instruction;
        if !(0.0..=1000.0).contains(&accesses) {
            let key = "llc_accesses_per_kilo_instruction".to_owned();
            return Err(Wrong::Figure(key, accesses, "it must lie between 0 and 1000"));
        }
        let wakeups = self.wakeups_per_m_instructions;
        if !(0.0..=1e5).contains(&wakeups) {
            let key = "wakeups_per_m_instructions".to_owned();
            return Err(Wrong::Figure(key, wakeups, "it must lie between 0 and 100000"));
        }
        let releases = self.page_releases_per_m_instructions;
        if !(0.0..=1e4).contains(&releases) {
            let key = "page_releases_per_m_instructions".to_owned();
            return Err(Wrong::Figure(key, releases, "it must lie between 0 and 10000"));
        }
        if let Some(runtime) = &self.runtime {
            let allocated = runtime.allocated_bytes_per_kilo_instruction;
            above_0("runtime.allocated_bytes_per_kilo_instruction", allocated)?;
        }
        if let Some(translation) = &self.translation {
            let accesses = translation.accesses_per_kilo_instruction;
            above_0("translation.accesses_per_kilo_instruction", accesses)?;
            translation.miss_ratio.check("translation.miss_ratio")?;
        }
        for (at, io) in self.io.iter().enumerate() {
            let bytes = io.bytes_per_kilo_instruction;
            above_0(format!("io[{at}].bytes_per_kilo_instruction"), bytes)?;
            above_0(format!("io[{at}].request"), io.request.as_f64())?;
            let packets = f64::from(io.packets);
            if packets > 0.0 && io.device != DeviceKind::Network {
                let expected = "only requests to a network have packets";
                return Err(Wrong::Figure(format!("io[{at}].packets"), packets, expected));
            }
        }
        if let Some(barrier) = self.barrier {
            above_0("barrier.interval_m_instructions", barrier.interval_m_instructions)?;
            if !(0.0..=0.5).contains(&barrier.imbalance) {
                let key = "barrier.imbalance".to_owned();
                return Err(Wrong::Figure(
                    key,
                    barrier.imbalance,
                    "it must lie between 0 and 0.5",
                ));
            }
        }
        if let Some(rest) = self.rest {
            above_0("rest.interval_m_instructions", rest.interval_m_instructions)?;
        }
        self.check_regions()?;
        self.check_phases()
    }

    fn check_regions(&self) -> Result<(), Wrong> {
        let accesses = self.regions.iter().map(|region| region.access_share);
        adds_up("regions", "access_share", accesses)?;
        for (at, region) in self.regions.iter().enumerate() {
            above_0(format!("regions[{at}].size"), region.size.as_f64())?;
            if region.size > REGION_MAX {
                let key = format!("regions[{at}].size");
                return Err(Wrong::Figure(
                    key,
                    region.size.as_f64(),
                    "it must be at most 1TiB",
                ));
            }
            if !region.heat.is_empty() {
                let (key, heat) = (format!("regions[{at}].heat"), region.heat.iter());
                adds_up(&key, "page_share", heat.clone().map(|class| class.page_share))?;
                adds_up(&key, "access_share", heat.map(|class| class.access_share))?;
            }
            if let Some(window) = region.window {
                let key = format!("regions[{at}].window");
                window.check(&key, !region.heat.is_empty())?;
                let pieces = self.barrier.map_or(f64::INFINITY, |barrier| {
                    self.instructions_g_per_thread * 1e3 / barrier.interval_m_instructions
                });
                if f64::from(window.parts) * window.passes > pieces.max(1.0) {
                    let expected = "between two barriers a program uses one part at most";
                    return Err(Wrong::Figure(format!("{key}.passes"), window.passes, expected));
                }
            }
        }
        Ok(())
    }

    fn check_phases(&self) -> Result<(), Wrong> {
        if !self.phases.is_empty() {
            adds_up("phases", "share", self.phases.iter().map(|phase| phase.share))?;
        }
        for (at, phase) in self.phases.iter().enumerate() {
            above_0(format!("phases[{at}].share"), phase.share)?;
            above_0(format!("phases[{at}].cpi_factor"), phase.cpi_factor)?;
            let factor = phase.llc_access_factor;
            if !(factor >= 0.0 && factor.is_finite()) {
                let key = format!("phases[{at}].llc_access_factor");
                return Err(Wrong::Figure(key, factor, "it must not be below 0"));
            }
            let factor = phase.rest_factor;
            if !(0.0..=1e6).contains(&factor) {
                let key = format!("phases[{at}].rest_factor");
                return Err(Wrong::Figure(key, factor, "it must lie between 0 and 1000000"));
            }
        }
        Ok(())
    }

    /// Returns the share of missed lines that belong to streams if `miss_ratio` of the program's LLC accesses miss. It is the
    /// profile's share, or if absent the largest that the rest of the profile allows (see the module).
    pub fn streamed(&self, miss_ratio: f64) -> f64 {
        self.stream_share.unwrap_or_else(|| {
            let floor = self.miss_ratio.floor();
            let never_reused = if miss_ratio > floor {
                floor / miss_ratio
            } else {
                1.0
            };
            never_reused.min((self.misses_in_flight - 1.0).max(0.0))
        })
    }

    /// Returns the memory that the program touches on `vcpus` vCPUs.
    pub fn footprint(&self, vcpus: u16) -> Bytes {
        let copies = if self.threads == Threads::Single {
            1
        } else {
            u64::from(vcpus)
        };
        let size = |region: &RegionProfile| match region.kind {
            RegionKind::Private => Bytes(region.size.0 * copies),
            RegionKind::Shared | RegionKind::InitialisedByOne => region.size,
        };
        self.regions.iter().map(size).sum()
    }
}

/// Checks that the shares in the entries of a list are between 0 and 1 and add up to 1.
fn adds_up(list: &str, share: &'static str, shares: impl Iterator<Item = f64>) -> Result<(), Wrong> {
    let mut sum = 0.0;
    for (at, value) in shares.enumerate() {
        a_share(format!("{list}[{at}].{share}"), value)?;
        sum += value;
    }
    if (sum - 1.0).abs() > 1e-6 {
        return Err(Wrong::Sum(list.to_owned(), share, sum));
    }
    Ok(())
}

/// Names, paths and texts of the workloads that come with the simulator, sorted by name (`build.rs` lists them).
const BUILTIN: &[(&str, &str, &str)] = &include!(concat!(env!("OUT_DIR"), "/workloads.rs"));

/// Returns the names of the workloads that come with the simulator.
pub fn names() -> impl Iterator<Item = &'static str> {
    BUILTIN.iter().map(|(name, ..)| *name)
}

/// Returns the built-in workload with this name, if there is one.
pub fn builtin(name: &str) -> Option<Workload> {
    let at = BUILTIN.binary_search_by_key(&name, |(known, ..)| known).ok()?;
    let (_, path, text) = BUILTIN[at];
    // A test reads every built-in workload, so none fails here.
    Some(Workload::from_toml(path, text).expect("embedded workload"))
}
