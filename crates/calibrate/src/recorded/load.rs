//! Turns the counts of a VM into a program for the simulator, and corrects the program according to the simulator's own counts.

use homenode_machine::Hardware;
use homenode_twin::workload::MissRatioCurve;
use homenode_units::Bytes;
use homenode_units::stats::median;

use super::seen::{Counted, Life};

/// Maximum number of phases of a program.
const PHASES_MAX: usize = 12;
/// Adjacent pieces that differ by less than this form one phase; the difference is a natural logarithm.
const PHASE_APART: f64 = 0.2;
/// A thread that rests for less than this share of its time counts as never resting.
const REST_MIN: f64 = 0.02;
/// Duration of a rest plus the work before it, in nanoseconds.
const TURN_NS: f64 = 100e6;
/// Minimum working time of a program between two rests, in nanoseconds.
const WORK_NS_MIN: f64 = 200_000.0;
/// The core's own cycles are assumed to be at least this share of all cycles per instruction, and at least [`CPI_MIN`].
const CORE_SHARE_MIN: f64 = 0.2;
/// Minimum of the core's own cycles per instruction.
const CPI_MIN: f64 = 0.1;
/// Default for the power of the capacity with which the miss ratio falls; the agent's predictor starts with the same value.
const MISS_POWER: f64 = 1.0 / 3.0;
/// A VM counts as single-threaded if one vCPU has at least this share of its CPU time.
const SINGLE_SHARE_MIN: f64 = 0.95;
/// If fewer accesses than this share can be told apart, the owners of memory are unknown.
const APART_MIN: f64 = 0.1;
/// Share of a difference that is corrected in one round.
const PART: f64 = 0.6;

/// The program that is derived from a VM's counts.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// Whether one thread ran, instead of one per vCPU.
    pub is_single: bool,
    /// Instructions of each thread.
    pub instructions: f64,
    /// Cycles per instruction if LLC accesses took no time.
    pub cpi_core: f64,
    /// LLC accesses per thousand instructions.
    pub llc_accesses: f64,
    /// Share of LLC accesses that miss, by capacity.
    pub curve: MissRatioCurve,
    /// Number of LLC misses in flight.
    pub misses_in_flight: f64,
    /// Number of LLC hits in flight.
    pub hits_in_flight: f64,
    /// Share of misses that are written back.
    pub write_share: f64,
    /// Instructions of a thread between two rests, and the length of a rest in nanoseconds; absent if threads never rest.
    pub rest: Option<(f64, f64)>,
    /// Memory that the program uses.
    pub memory: Bytes,
    /// Share of the accesses, and of the memory, that is private to one thread.
    pub own_share: f64,
    /// Phases; empty if the program has only one.
    pub phases: Vec<Phase>,
    /// Assumptions about figures that were not counted, each a sentence about the VM.
    pub assumed: Vec<String>,
}

/// A phase of a program.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Phase {
    /// Share of the program's instructions.
    pub share: f64,
    /// LLC accesses per instruction, relative to the whole program.
    pub llc_accesses: f64,
    /// Rests, relative to the whole program.
    pub rest: f64,
}

/// Figures with which VMs are compared.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, schemars::JsonSchema)]
pub struct Figures {
    /// CPUs used on average while the VM was present.
    pub cpus_used: f64,
    /// LLC misses over references, if counted.
    pub llc_miss_rate: Option<f64>,
    /// Share of the VM's memory accesses that were local, if counted.
    pub local_access_ratio: Option<f64>,
    /// Memory traffic, computed from LLC misses, if counted.
    pub bandwidth_bytes_per_s: Option<f64>,
}

impl Figures {
    /// Computes the figures of counts over a number of seconds.
    pub fn of(counted: &Counted, seconds: f64) -> Figures {
        let ratio = |part: f64, whole: f64| (whole > 0.0).then(|| part / whole);
        Figures {
            cpus_used: counted.ran / seconds.max(1e-9),
            llc_miss_rate: ratio(counted.misses, counted.references),
            local_access_ratio: ratio(counted.local, counted.accesses),
            bandwidth_bytes_per_s: (counted.references > 0.0)
                .then(|| counted.misses * homenode_host::LINE_BYTES / seconds.max(1e-9)),
        }
    }
}

/// Returns the curve with this miss ratio at a capacity, and a slope there of [`MISS_POWER`] as far as the family allows.
pub(crate) fn curve_through(held: f64, miss_ratio: f64) -> MissRatioCurve {
    let m = miss_ratio.clamp(0.0, 0.9999);
    // With k = 1 and x = c / c0 the slope is (1 - m) x / (e^x - 1): it falls with x.
    let wanted = MISS_POWER * m / (1.0 - m);
    let (mut low, mut high) = (1.0_f64 / 3.0, 40.0_f64);
    for _ in 0..60 {
        let x = (low + high) / 2.0;
        match x / (x.exp() - 1.0) > wanted {
            true => low = x,
            false => high = x,
        }
    }
    let e = (-low).exp();
    let m_inf = (1.0 - (1.0 - m) / (1.0 - e)).clamp(0.0, 1.0);
    MissRatioCurve::family(m_inf, Bytes(((held / low) as u64).max(1)), 1.0)
}

/// Returns the capacity at which a curve has a miss ratio; `None` if there is none.
fn capacity_at(curve: &MissRatioCurve, miss_ratio: f64) -> Option<f64> {
    let left = (miss_ratio - curve.m_inf) / (1.0 - curve.m_inf);
    (left > 0.0 && left < 1.0).then(|| curve.c0.as_f64() * (-left.ln()).powf(1.0 / curve.k))
}

impl Load {
    /// Derives a program from counts. `write_share` is the share of misses that are written back on the whole host, if
    /// counted. `lead` is the number of seconds that the program runs before the stretch, if the VM was already running.
    pub fn of(hardware: &Hardware, life: &Life, write_share: Option<f64>, lead: f64) -> Load {
        let whole = life.whole();
        let mut assumed = Vec::new();
        let most = life.by_vcpu.values().copied().fold(0.0, f64::max);
        let is_single = life.vcpus == 1 || (whole.ran > 0.0 && most >= SINGLE_SHARE_MIN * whole.ran);
        let threads = if is_single {
            1.0
        } else {
            f64::from(life.vcpus.max(1))
        };
        if !is_single {
            assumed.push(
                "each vCPU does the same work: the recording does not say which vCPU did what".to_owned(),
            );
        }
        let clock_ghz = hardware.clock_hz as f64 / 1e9;
        // Uses only pieces in which the program computes or rests, without the guest's boot and first touches.
        let typical = typical(&life.pieces);
        let (cpi, instructions) = match typical.instructions > 0.0 {
            true => (
                typical.counted_ran * 1e9 * clock_ghz / typical.instructions,
                whole.instructions,
            ),
            false => {
                assumed.push(
                    "it runs one instruction per cycle and does not access the LLC: its instructions were not counted"
                        .to_owned(),
                );
                (1.0, whole.ran * 1e9 * clock_ghz)
            }
        };
        let llc_accesses = match typical.instructions > 0.0 {
            true => (1000.0 * typical.references / typical.instructions).min(1000.0),
            false => 0.0,
        };
        let miss_ratio = if whole.references > 0.0 {
            whole.misses / whole.references
        } else {
            0.5
        };
        let held = if whole.references > 0.0 {
            whole.held / whole.references
        } else {
            1e6
        };
        if whole.references > 0.0 {
            assumed.push(
                "its miss rate falls with the cube root of its share of the cache: only one share was seen"
                    .to_owned(),
            );
        }
        let mut load = Load {
            is_single,
            instructions: instructions / threads,
            cpi_core: cpi,
            llc_accesses,
            curve: curve_through(held.max(1.0), miss_ratio),
            misses_in_flight: 4.0,
            hits_in_flight: 6.0,
            write_share: write_share.unwrap_or_else(|| {
                assumed.push(
                    "a third of the lines that it misses are written back later: this was not counted"
                        .to_owned(),
                );
                1.0 / 3.0
            }),
            rest: None,
            memory: program_memory(life, &mut assumed),
            own_share: own_share(&whole, is_single, &mut assumed),
            phases: Vec::new(),
            assumed,
        };
        load.fit_core(hardware, cpi, miss_ratio, &whole);
        load.fit_rests(life, threads, cpi / clock_ghz);
        load.lead(&life.pieces, threads, lead);
        load
    }

    /// Divides cycles between the core and its waits.
    fn fit_core(&mut self, hardware: &Hardware, cpi: f64, miss_ratio: f64, whole: &Counted) {
        let clock_ghz = hardware.clock_hz as f64 / 1e9;
        let accesses = self.llc_accesses / 1000.0;
        let remote = if whole.accesses > 0.0 {
            1.0 - whole.local / whole.accesses
        } else {
            0.0
        };
        let latency = (hardware.latency.memory_ns + remote * hardware.link.hop_ns) * clock_ghz;
        let hits = accesses * (1.0 - miss_ratio) * hardware.latency.llc_cycles;
        let misses = accesses * miss_ratio * latency;
        let core_min = f64::max(CPI_MIN, CORE_SHARE_MIN * cpi);
        let rest = |load: &Load| cpi - hits / load.hits_in_flight - misses / load.misses_in_flight;
        if rest(self) < core_min && hits + misses > 0.0 {
            // More accesses than usual must have been in flight, so hits and misses are scaled up equally.
            let usual = hits / self.hits_in_flight + misses / self.misses_in_flight;
            let more = usual / (cpi - core_min).max(0.05 * cpi);
            self.hits_in_flight *= more;
            self.misses_in_flight =
                (self.misses_in_flight * more).min(f64::from(hardware.misses_in_flight_max));
        }
        self.cpi_core = rest(self).max(core_min.min(cpi));
        if accesses > 0.0 {
            let usual = "as many of its LLC accesses are in flight as usual, or as explain its cycles: this was not counted";
            self.assumed.push(usual.to_owned());
        }
    }

    fn fit_rests(&mut self, life: &Life, threads: f64, ns_per_instruction: f64) {
        let per_work = |counted: &Counted| {
            let idle = threads * counted.seconds - counted.ran - counted.waited;
            (idle / counted.ran.max(1e-6 * counted.seconds)).max(0.0)
        };
        let phases = phases(&life.pieces);
        let whole = typical(&life.pieces);
        let rest = per_work(&whole);
        let most = phases.iter().map(per_work).fold(rest, f64::max);
        if most > REST_MIN {
            let base = rest.max(REST_MIN);
            let work_ns = (TURN_NS / (1.0 + base)).max(WORK_NS_MIN);
            self.rest = Some((work_ns / ns_per_instruction, work_ns * base));
            self.assumed
                .push("after each piece of work it rests for the same time, whatever its speed".to_owned());
        }
        if phases.len() < 2 {
            return;
        }
        let base = rest.max(REST_MIN);
        let work = |counted: &Counted| {
            if whole.instructions > 0.0 {
                counted.instructions
            } else {
                counted.ran
            }
        };
        let all: f64 = phases.iter().map(work).sum();
        let accesses = |counted: &Counted| counted.references / counted.instructions.max(1.0);
        let usual = accesses(&whole);
        self.phases = phases
            .iter()
            .filter(|phase| work(phase) > 0.0)
            .map(|phase| Phase {
                share: work(phase) / all,
                llc_accesses: if usual > 0.0 && phase.instructions > 0.0 {
                    accesses(phase) / usual
                } else {
                    1.0
                },
                rest: (per_work(phase) / base).min(1e6),
            })
            .collect();
    }

    /// Extends the first phase to cover the time before the stretch.
    fn lead(&mut self, pieces: &[Counted], threads: f64, lead: f64) {
        let Some(first) = phases(pieces).first().copied() else {
            return;
        };
        let rate =
            self.instructions * threads / pieces.iter().map(|piece| piece.seconds).sum::<f64>().max(1e-9);
        let rate = if first.instructions > 0.0 {
            first.instructions / first.seconds.max(1e-9)
        } else {
            rate
        };
        let more = rate * lead / threads;
        let before = self.instructions;
        self.instructions += more;
        for (at, phase) in self.phases.iter_mut().enumerate() {
            phase.share =
                (phase.share * before + if at == 0 { more } else { 0.0 }) / self.instructions.max(1.0);
        }
    }

    /// Corrects the program by a part of the difference between the recorded counts and the simulator's. Only a part, because all
    /// VMs are corrected at once and affect each other.
    pub fn correct(&mut self, hardware: &Hardware, vcpus: u16, wanted: &Counted, came: &Counted) {
        self.correct_cache(wanted, came);
        let local = |counted: &Counted| (counted.accesses > 0.0).then(|| counted.local / counted.accesses);
        if let (Some(wanted), Some(came), false) = (local(wanted), local(came), self.is_single) {
            self.own_share = (self.own_share + PART * (wanted - came)).clamp(0.0, 1.0);
        }
        if wanted.instructions > 0.0 && came.instructions > 0.0 {
            self.correct_core(hardware, wanted, came);
        }
        // Seconds of rest per second of work.
        let threads = if self.is_single { 1.0 } else { f64::from(vcpus) };
        let rests = |counted: &Counted| {
            let idle = threads * counted.seconds - counted.ran - counted.waited;
            idle.max(1e-3 * counted.seconds) / counted.ran.max(1e-6 * counted.seconds)
        };
        if let Some((_, rest)) = &mut self.rest {
            *rest *= (rests(wanted) / rests(came)).clamp(0.2, 5.0);
        }
    }

    fn correct_cache(&mut self, wanted: &Counted, came: &Counted) {
        let rate =
            |counted: &Counted| (counted.references > 0.0).then(|| counted.misses / counted.references);
        let (Some(miss), Some(missed)) = (rate(wanted), rate(came)) else {
            return;
        };
        let at = capacity_at(&self.curve, missed).unwrap_or(self.curve.c0.as_f64());
        self.curve = curve_through(at.clamp(1.0, 1e12), missed + PART * (miss - missed));
        let each = |counted: &Counted| counted.references / counted.instructions.max(1.0);
        if each(came) > 0.0 && wanted.instructions > 0.0 {
            self.llc_accesses = (self.llc_accesses * each(wanted) / each(came)).clamp(0.0, 1000.0);
        }
    }

    /// Corrects cycles per instruction: first the core's own, and if that is not enough, the accesses in flight.
    fn correct_core(&mut self, hardware: &Hardware, wanted: &Counted, came: &Counted) {
        let clock_ghz = hardware.clock_hz as f64 / 1e9;
        let cpi = |counted: &Counted| counted.counted_ran * 1e9 * clock_ghz / counted.instructions;
        let goal = cpi(came) + PART * (cpi(wanted) - cpi(came));
        let waits = (cpi(came) - self.cpi_core).max(1e-6);
        let core_min = f64::max(CPI_MIN, CORE_SHARE_MIN * cpi(wanted)).min(goal);
        self.cpi_core = (self.cpi_core + goal - cpi(came)).max(core_min);
        let more = (waits / (goal - self.cpi_core).max(0.2 * waits)).clamp(0.5, 2.0);
        self.hits_in_flight *= more;
        self.misses_in_flight = (self.misses_in_flight * more).min(f64::from(hardware.misses_in_flight_max));
    }
}

/// Sums up the pieces in which the program computed or rested. Leaves out pieces with at most half of the median instruction
/// rate per CPU time, such as a guest's boot.
fn typical(pieces: &[Counted]) -> Counted {
    let rate = |piece: &Counted| piece.instructions / piece.counted_ran.max(1e-9);
    let computed = pieces.iter().filter(|piece| piece.instructions > 0.0);
    let middle = median(computed.map(rate)).unwrap_or(0.0);
    let mut whole = Counted::default();
    for piece in pieces.iter().filter(|piece| piece.seconds > 0.0) {
        if middle == 0.0 || rate(piece) > 0.5 * middle || piece.instructions == 0.0 && piece.ran < 0.1 {
            whole.add(piece);
        }
    }
    whole
}

/// Merges adjacent pieces that are similar.
fn phases(pieces: &[Counted]) -> Vec<Counted> {
    let mut phases: Vec<Counted> = pieces
        .iter()
        .copied()
        .filter(|piece| piece.seconds > 0.0)
        .collect();
    let apart = |a: &Counted, b: &Counted| {
        let used = |piece: &Counted| (piece.ran + piece.waited) / piece.seconds + 0.05;
        let asked = |piece: &Counted| 1000.0 * piece.references / piece.instructions.max(1.0) + 1.0;
        (used(a) / used(b)).ln().abs() + (asked(a) / asked(b)).ln().abs()
    };
    while phases.len() > 1 {
        let pairs = phases.windows(2).map(|two| apart(&two[0], &two[1])).enumerate();
        let Some((at, distance)) = pairs.min_by(|a, b| a.1.total_cmp(&b.1)) else {
            break;
        };
        if distance > PHASE_APART && phases.len() <= PHASES_MAX {
            break;
        }
        let next = phases.remove(at + 1);
        phases[at].add(&next);
    }
    phases
}

/// Returns the amount of the guest's memory that the program uses.
fn program_memory(life: &Life, assumed: &mut Vec<String>) -> Bytes {
    let kernel = homenode_twin::boot_footprint(life.memory);
    let room = life.memory.saturating_sub(kernel);
    let touched = life.touched.unwrap_or_else(|| {
        assumed.push("half of its memory is used: the nodes of its memory were not known".to_owned());
        Bytes(life.memory.0 / 2)
    });
    let used = touched.saturating_sub(kernel).min(room);
    Bytes((used.0 / 4096 * 4096).max(4096))
}

/// Returns the share of accesses that a thread makes to its own memory.
fn own_share(whole: &Counted, is_single: bool, assumed: &mut Vec<String>) -> f64 {
    if is_single {
        return 1.0;
    }
    if whole.accesses - whole.met < APART_MIN * whole.accesses || whole.accesses == 0.0 {
        assumed.push(
            "half of its accesses are to memory of one thread's own: the counts do not tell".to_owned(),
        );
        return 0.5;
    }
    ((whole.local - whole.met) / (whole.accesses - whole.met)).clamp(0.0, 1.0)
}
