//! Divides what a modelled PMU counted for a VM among its vCPUs, in the form of a PMU's counters. This is the part that need not
//! know which VM has which frame. [`super`] says what the figures mean.

use std::collections::BTreeMap;

use homenode_formats::pmu_region::{Counts, Page};
use homenode_host::Counters;
use homenode_units::Ns;

use super::NotCounted;

/// Cycles for a reference to the LLC. This and the next two are round figures of servers with a few sockets.
pub const LLC_CYCLES: f64 = 40.0;
/// Cycles for a miss that local memory serves; see [`LLC_CYCLES`].
pub const MEMORY_CYCLES: f64 = 200.0;
/// Cycles for a miss that another node's memory serves; see [`LLC_CYCLES`].
pub const REMOTE_CYCLES: f64 = 300.0;
/// The clock to assume if the machine's clock is unknown.
const CLOCK_HZ: u64 = 1_000_000_000;

/// Whether the model counts, and how fast the modelled machine runs.
#[derive(Debug)]
pub struct Pulse {
    page: Page<'static>,
    clock_hz: u64,
    /// Instructions of all CPUs at the last reading, and their busy time then.
    instructions: Option<(u64, Ns)>,
    /// Instructions per nanosecond of CPU busy time between the last two readings.
    rate: f64,
    state: State,
}

/// Whether the model counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// There have not been two looks yet.
    Unknown,
    /// The model counts.
    Counting,
    /// No CPU has executed an instruction since the last reading.
    Silent,
}

impl Pulse {
    /// Starts in state [`State::Unknown`]. `clock_hz` is the machine's clock, if known.
    pub fn new(page: Page<'static>, clock_hz: Option<u64>) -> Pulse {
        Pulse {
            page,
            clock_hz: clock_hz.unwrap_or(CLOCK_HZ),
            instructions: None,
            rate: 0.0,
            state: State::Unknown,
        }
    }

    /// Looks at the counts. `busy` is the busy time of all CPUs. This asks the emulator to count, which takes most of its speed.
    pub fn beat(&mut self, busy: Ns) {
        self.page.want();
        let cpus = 0..self.page.layout().cpus;
        let instructions = cpus
            .filter_map(|cpu| self.page.instructions_of(cpu))
            .fold(0, u64::wrapping_add);
        self.state = match self.instructions.replace((instructions, busy)) {
            None => State::Unknown,
            Some((before, _)) if before == instructions => State::Silent,
            Some((before, busy_before)) => {
                let time = busy.saturating_sub(busy_before).0.max(1);
                self.rate = instructions.wrapping_sub(before) as f64 / time as f64;
                State::Counting
            }
        };
    }

    /// Returns the state at the last reading.
    pub fn state(&self) -> State {
        self.state
    }

    /// Returns how to convert time into instructions, for a VM with this share of its misses served by local memory.
    pub fn speed(&self, local: f64) -> Speed {
        Speed {
            clock_hz: self.clock_hz,
            rate: self.rate,
            local,
        }
    }
}

/// Converts time into instructions.
#[derive(Clone, Copy, Debug)]
pub struct Speed {
    clock_hz: u64,
    /// Instructions per nanosecond that the emulator executes.
    rate: f64,
    /// Share of misses that local memory serves.
    local: f64,
}

impl Speed {
    /// Returns the instructions of a VM that ran for `ran` nanoseconds in total, with these references and misses. The first
    /// figure is what the emulator executed, the second what the machine would have executed.
    fn instructions(self, ran: f64, references: u64, misses: u64) -> (f64, f64) {
        let miss = self.local * MEMORY_CYCLES + (1.0 - self.local) * REMOTE_CYCLES;
        let waited = references as f64 * LLC_CYCLES + misses as f64 * miss;
        let emulated = (self.rate * ran).max(1.0);
        (
            emulated,
            self.clock_hz as f64 / 1e9 * ran * emulated / (emulated + waited),
        )
    }

    fn cycles(self, ran: Ns) -> u64 {
        (u128::from(ran.0) * u128::from(self.clock_hz) / 1_000_000_000) as u64
    }
}

/// What each vCPU of a VM was assigned so far.
#[derive(Debug, Default)]
pub struct Dealt {
    /// The VM's counts up to which everything is assigned.
    pub(super) since: Option<Counts>,
    vcpus: BTreeMap<u16, Share>,
}

/// What one vCPU was assigned.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    ran: Ns,
    counts: Counts,
    instructions: u64,
}

impl Dealt {
    /// Leaves out whatever is counted before the next reading.
    pub fn interrupt(&mut self) {
        self.since = None;
    }

    /// Divides the growth of a VM's counts among the vCPUs that ran meanwhile. `ran` has the total time that each vCPU has run.
    /// If no vCPU ran, the growth is kept for the next call.
    ///
    /// # Errors
    /// If counts ran backwards.
    pub fn deal(
        &mut self,
        counts: Counts,
        ran: &BTreeMap<u16, Ns>,
        speed: Speed,
    ) -> Result<BTreeMap<u16, Counters>, NotCounted> {
        let since = *self.since.get_or_insert(counts);
        let (references, misses) = grown(since, counts)
            .ok_or(NotCounted::Backwards)
            .inspect_err(|_| self.since = None)?;
        self.vcpus.retain(|index, _| ran.contains_key(index));
        let time = |index: &u16, now: Ns| {
            self.vcpus
                .get(index)
                .map_or(Ns::ZERO, |share| now.saturating_sub(share.ran))
        };
        let ran_now: Vec<(u16, Ns, Ns)> = ran
            .iter()
            .map(|(index, now)| (*index, *now, time(index, *now)))
            .collect();
        let total: u128 = ran_now.iter().map(|(.., time)| u128::from(time.0)).sum();
        if total > 0 {
            self.since = Some(counts);
        }
        let (emulated, made) = speed.instructions(total as f64, references, misses);
        let scaled = |count: u64| (count as f64 * made / emulated).round() as u64;
        let counted = [made as u64, scaled(references), scaled(misses)];
        let mut before: u128 = 0;
        for (index, now, time) in ran_now {
            let share = self.vcpus.entry(index).or_default();
            share.ran = now;
            let after = before + u128::from(time.0);
            // Each part is a difference of cumulative shares, so that the parts add up exactly.
            let part = |count: u64| {
                let upto = |time: u128| (u128::from(count) * time).checked_div(total).unwrap_or(0);
                (upto(after) - upto(before)) as u64
            };
            let [instructions, references, misses] = counted.map(part);
            share.instructions = share.instructions.wrapping_add(instructions);
            share.counts.references = share.counts.references.wrapping_add(references);
            share.counts.misses = share.counts.misses.wrapping_add(misses);
            before = after;
        }
        Ok(self.counters(speed))
    }

    fn counters(&self, speed: Speed) -> BTreeMap<u16, Counters> {
        let counters = self.vcpus.iter().map(|(index, share)| {
            let counters = Counters {
                instructions: share.instructions,
                cycles: speed.cycles(share.ran),
                llc_references: Some(share.counts.references),
                llc_misses: Some(share.counts.misses),
            };
            (*index, counters)
        });
        counters.collect()
    }
}

/// Returns the new references and misses; `None` if either ran backwards.
pub fn grown(since: Counts, now: Counts) -> Option<(u64, u64)> {
    let grown = |before: u64, now: u64| {
        let grown = now.wrapping_sub(before);
        (grown < 1 << 63).then_some(grown)
    };
    Some((
        grown(since.references, now.references)?,
        grown(since.misses, now.misses)?,
    ))
}

/// Returns what all CPUs counted for memory with this tag.
pub fn of_tag(page: Page<'_>, tag: u8) -> Counts {
    let counts = (0..page.layout().cpus).filter_map(|cpu| page.counts(cpu, tag));
    counts.fold(Counts::default(), |sum, counts| Counts {
        references: sum.references.wrapping_add(counts.references),
        misses: sum.misses.wrapping_add(counts.misses),
    })
}
