//! Workloads: what a program does to a machine, as data.
//!
//! A profile describes one *solo* run: instructions, the core's own cycles per instruction, accesses to the LLC, the
//! miss-ratio curve, how many misses the program keeps in flight, what it writes, and which thread touches which
//! memory. What happens when programs share a machine is never in a profile: that is what the twin predicts.
//!
//! # Terms
//!
//! - Miss ratio at a capacity of `c` bytes: `m(c) = m_inf + (1 - m_inf) * exp(-(c / c0)^k)`.
//! - `cpi_core`: cycles per instruction with every LLC access free.
//! - `misses_in_flight`: outstanding misses to memory on average while there is one, hardware prefetch included.
//! - `hits_in_flight`: the same for LLC hits; larger, since an out-of-order core hides most of a hit.
//!
//! # Left out
//!
//! Phases that change the curve (a phase here changes rates only), threads that use their own memory unevenly, the order
//! of reads and writes.

use homenode_machine::file::{FileError, read_toml};
use homenode_units::Bytes;
use serde::{Deserialize, Serialize};

/// A program, or the absence of one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// Name by which scenarios call it.
    pub name: String,
    /// What it is, for people.
    pub about: String,
    /// Claims of `data/published/claims.toml` whose listed inputs some figure here was calibrated to; their results
    /// under this profile are no predictions. Solo behaviour needs no entry.
    #[serde(default)]
    pub calibrated_to: Vec<String>,
    /// What its threads do; an idle workload has no program.
    #[serde(default)]
    pub program: Option<Program>,
}

/// What every thread of a program does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Program {
    /// How many threads it has.
    pub threads: Threads,
    /// Instructions of one thread from start to end, in thousand millions.
    pub instructions_g_per_thread: f64,
    /// Cycles per instruction with every LLC access free.
    pub cpi_core: f64,
    /// Accesses to the LLC (L2 misses, prefetches included) per thousand instructions.
    pub llc_accesses_per_kilo_instruction: f64,
    /// Share of them that miss, by capacity.
    pub miss_ratio: MissRatioCurve,
    /// Memory accesses in flight on average.
    pub misses_in_flight: f64,
    /// LLC hits in flight on average.
    pub hits_in_flight: f64,
    /// Share of missed lines that are written back later, in [0, 1].
    pub write_share: f64,
    /// How threads wait for each other; absent where they never do.
    #[serde(default)]
    pub barrier: Option<Barrier>,
    /// What a thread does while it waits at a barrier.
    #[serde(default)]
    pub waiting: Waiting,
    /// How often a thread wakes another that sleeps, barriers apart, per million instructions: each costs an interrupt
    /// to another CPU.
    #[serde(default)]
    pub wakeups_per_m_instructions: f64,
    /// Address translation; absent where the TLB always holds what the program uses.
    #[serde(default)]
    pub translation: Option<Translation>,
    /// Data moved to and from devices.
    #[serde(default)]
    pub io: Vec<IoProfile>,
    /// Memory, by who touches it.
    pub regions: Vec<RegionProfile>,
    /// Stretches of the run that differ from the whole; empty where none is known.
    #[serde(default)]
    pub phases: Vec<PhaseProfile>,
}

/// How many threads a program has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Threads {
    /// One per vCPU, sharing the program's work as its profile says.
    OnePerVcpu,
    /// One copy of a single-threaded program on each vCPU.
    OneCopyPerVcpu,
    /// One thread in all; other vCPUs idle.
    Single,
}

/// Parameters of `m(c) = m_inf + (1 - m_inf) * exp(-(c / c0)^k)`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MissRatioCurve {
    /// Miss ratio in a cache that holds all that is ever reused, in [0, 1].
    pub m_inf: f64,
    /// Capacity at which the reuse part has fallen to 1/e.
    #[serde(with = "homenode_units::text")]
    pub c0: Bytes,
    /// Steepness: below 1 a long tail, above 2 a cliff.
    pub k: f64,
}

/// Threads that wait for the slowest at regular intervals.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Barrier {
    /// Instructions of one thread between two barriers, in millions.
    pub interval_m_instructions: f64,
    /// Relative standard deviation of a thread's work between two barriers.
    pub imbalance: f64,
}

/// What a thread does while it waits for others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Waiting {
    /// It gives up its vCPU, and whoever releases it must interrupt that.
    #[default]
    Sleep,
    /// It keeps its vCPU busy.
    Spin,
}

/// How a program's accesses fall on pages.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Translation {
    /// Loads and stores per thousand instructions.
    pub accesses_per_kilo_instruction: f64,
    /// Share of them that miss the TLB, by its reach: entries times page size.
    pub miss_ratio: MissRatioCurve,
}

/// Data that a program moves to or from a kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IoProfile {
    /// Which kind.
    pub device: DeviceKind,
    /// Bytes that a thread moves per thousand instructions.
    pub bytes_per_kilo_instruction: f64,
    /// Bytes of one request.
    #[serde(with = "homenode_units::text")]
    pub request: Bytes,
}

/// Kinds of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceKind {
    /// A disk or its controller (PCI class 01).
    Disk,
    /// A network controller (PCI class 02).
    Network,
}

/// A part of a program's memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegionProfile {
    /// Who touches it.
    pub kind: RegionKind,
    /// Its size: per thread for a private region, in all for the others.
    #[serde(with = "homenode_units::text")]
    pub size: Bytes,
    /// Share of a thread's accesses that go here; over all regions they add up to 1.
    pub access_share: f64,
    /// Heat classes; absent where all pages are alike.
    #[serde(default)]
    pub heat: Vec<HeatClass>,
}

/// Who touches a region first, and who uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RegionKind {
    /// Each thread has its own.
    Private,
    /// Touched and used by all threads.
    Shared,
    /// Touched first by thread 0, used by all.
    InitialisedByOne,
}

/// Pages of a region that are used alike.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeatClass {
    /// Share of the region's pages.
    pub page_share: f64,
    /// Share of the region's accesses.
    pub access_share: f64,
}

/// A stretch of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PhaseProfile {
    /// Share of the run's instructions; over all phases they add up to 1.
    pub share: f64,
    /// Multiplies `llc_accesses_per_kilo_instruction` during the phase.
    pub llc_access_factor: f64,
    /// Multiplies `cpi_core` during the phase.
    pub cpi_factor: f64,
}

/// What is wrong with a workload that reads well.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum WorkloadError {
    /// The file does not read.
    #[error(transparent)]
    File(#[from] FileError),
    /// A figure is impossible.
    #[error("workload {workload}: {what} is {value}; {expected}")]
    Figure {
        /// Which workload.
        workload: String,
        /// Which figure.
        what: String,
        /// What it says.
        value: f64,
        /// What would be possible.
        expected: &'static str,
    },
}

impl MissRatioCurve {
    /// Miss ratio with a capacity in bytes.
    pub fn at(&self, bytes: f64) -> f64 {
        if bytes <= 0.0 {
            return 1.0;
        }
        let relative = bytes / self.c0.as_f64();
        let exponent = if self.k == 1.0 {
            relative
        } else {
            libm::pow(relative, self.k)
        };
        self.m_inf + (1.0 - self.m_inf) * libm::exp(-exponent)
    }
}

impl Workload {
    /// Reads a workload file and checks its figures.
    ///
    /// # Errors
    /// See [`WorkloadError`].
    pub fn from_toml(path: &str, text: &str) -> Result<Workload, WorkloadError> {
        read_toml::<Workload>(path, text)?.checked()
    }

    /// Gives the workload back if its figures are possible.
    ///
    /// # Errors
    /// [`WorkloadError::Figure`], naming the first that is not.
    pub fn checked(self) -> Result<Workload, WorkloadError> {
        if let Some(program) = &self.program {
            program
                .check()
                .map_err(|(what, value, expected)| WorkloadError::Figure {
                    workload: self.name.clone(),
                    what,
                    value,
                    expected,
                })?;
        }
        Ok(self)
    }
}

type Wrong = (String, f64, &'static str);

impl Program {
    fn check(&self) -> Result<(), Wrong> {
        let positive = [
            ("instructions_g_per_thread", self.instructions_g_per_thread),
            ("cpi_core", self.cpi_core),
            ("misses_in_flight", self.misses_in_flight),
            ("hits_in_flight", self.hits_in_flight),
            ("miss_ratio.c0", self.miss_ratio.c0.as_f64()),
            ("miss_ratio.k", self.miss_ratio.k),
        ];
        for (what, value) in positive {
            // Written so that NaN fails as well.
            if !(value > 0.0 && value.is_finite()) {
                return Err((what.into(), value, "it must be above 0"));
            }
        }
        let shares = [
            ("write_share", self.write_share),
            ("miss_ratio.m_inf", self.miss_ratio.m_inf),
        ];
        for (what, value) in shares {
            if !(0.0..=1.0).contains(&value) {
                return Err((what.into(), value, "it must lie between 0 and 1"));
            }
        }
        if let Some(translation) = &self.translation {
            let m_inf = translation.miss_ratio.m_inf;
            if !(0.0..=1.0).contains(&m_inf) {
                let what = "translation.miss_ratio.m_inf".into();
                return Err((what, m_inf, "it must lie between 0 and 1"));
            }
            let positive = [
                (
                    "translation.accesses_per_kilo_instruction",
                    translation.accesses_per_kilo_instruction,
                ),
                ("translation.miss_ratio.c0", translation.miss_ratio.c0.as_f64()),
                ("translation.miss_ratio.k", translation.miss_ratio.k),
            ];
            for (what, value) in positive {
                if !(value > 0.0 && value.is_finite()) {
                    return Err((what.into(), value, "it must be above 0"));
                }
            }
        }
        let wakeups = self.wakeups_per_m_instructions;
        if !(0.0..=1e5).contains(&wakeups) {
            let what = "wakeups_per_m_instructions".into();
            return Err((what, wakeups, "it must lie between 0 and 100000"));
        }
        for (at, io) in self.io.iter().enumerate() {
            let bytes = io.bytes_per_kilo_instruction;
            if !(bytes > 0.0 && bytes.is_finite()) {
                let what = format!("bytes_per_kilo_instruction of io {at}");
                return Err((what, bytes, "it must be above 0"));
            }
            if io.request == Bytes::ZERO {
                return Err((format!("request of io {at}"), 0.0, "it must be above 0"));
            }
        }
        let accesses = self.llc_accesses_per_kilo_instruction;
        if !(0.0..=1000.0).contains(&accesses) {
            return Err((
                "llc_accesses_per_kilo_instruction".into(),
                accesses,
                "it must lie between 0 and 1000",
            ));
        }
        if let Some(barrier) = self.barrier {
            if !(barrier.interval_m_instructions > 0.0 && barrier.interval_m_instructions.is_finite()) {
                let value = barrier.interval_m_instructions;
                return Err((
                    "barrier.interval_m_instructions".into(),
                    value,
                    "it must be above 0",
                ));
            }
            if !(0.0..=0.5).contains(&barrier.imbalance) {
                return Err((
                    "barrier.imbalance".into(),
                    barrier.imbalance,
                    "it must lie between 0 and 0.5",
                ));
            }
        }
        self.check_shares()
    }

    fn check_shares(&self) -> Result<(), Wrong> {
        adds_up(
            "access_share of regions",
            self.regions.iter().map(|region| region.access_share),
        )?;
        for (at, region) in self.regions.iter().enumerate() {
            if region.size == Bytes::ZERO {
                return Err((format!("size of region {at}"), 0.0, "it must be above 0"));
            }
            if !region.heat.is_empty() {
                adds_up(
                    &format!("heat.page_share of region {at}"),
                    region.heat.iter().map(|h| h.page_share),
                )?;
                adds_up(
                    &format!("heat.access_share of region {at}"),
                    region.heat.iter().map(|h| h.access_share),
                )?;
            }
        }
        if !self.phases.is_empty() {
            adds_up("share of phases", self.phases.iter().map(|phase| phase.share))?;
            for (at, phase) in self.phases.iter().enumerate() {
                for (what, value) in [("share", phase.share), ("cpi_factor", phase.cpi_factor)] {
                    if !(value > 0.0 && value.is_finite()) {
                        return Err((format!("{what} of phase {at}"), value, "it must be above 0"));
                    }
                }
                if !(phase.llc_access_factor >= 0.0 && phase.llc_access_factor.is_finite()) {
                    let value = phase.llc_access_factor;
                    return Err((
                        format!("llc_access_factor of phase {at}"),
                        value,
                        "it must not be below 0",
                    ));
                }
            }
        }
        Ok(())
    }

    /// Memory that the program touches on `vcpus` vCPUs.
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

fn adds_up(what: &str, shares: impl Iterator<Item = f64>) -> Result<(), Wrong> {
    let mut sum = 0.0;
    for share in shares {
        if !(0.0..=1.0).contains(&share) {
            return Err((what.to_owned(), share, "each must lie between 0 and 1"));
        }
        sum += share;
    }
    if (sum - 1.0).abs() > 1e-6 {
        return Err((format!("sum of {what}"), sum, "it must be 1"));
    }
    Ok(())
}

/// Names, paths and texts of the workloads that come with the twin, by name (`build.rs` lists them).
const BUILTIN: &[(&str, &str, &str)] = &include!(concat!(env!("OUT_DIR"), "/workloads.rs"));

/// Names of the workloads that come with the twin.
pub fn names() -> impl Iterator<Item = &'static str> {
    BUILTIN.iter().map(|(name, ..)| *name)
}

/// The workload with this name that comes with the twin, if there is one.
pub fn builtin(name: &str) -> Option<Workload> {
    let at = BUILTIN.binary_search_by_key(&name, |(known, ..)| known).ok()?;
    let (_, path, text) = BUILTIN[at];
    // A test reads every one of them.
    Some(Workload::from_toml(path, text).expect("embedded workload"))
}
