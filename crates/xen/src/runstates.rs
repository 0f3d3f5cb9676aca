//! How long vCPUs ran, waited for a CPU and were kept off it, derived from the hypervisor's trace of each change.
//!
//! # Input
//! `xentrace -e 0x21000` writes a record for each change (`xen/include/public/trace.h`). The record's first word has the event in
//! its low 28 bits, above them the number of words that follow, and in bit 31 whether a 64-bit time stamp in cycles comes in
//! between. A change's event has the old state in bits 8 and 9 and the new state in bits 4 and 5. One word follows: the domain's
//! number in the upper half, the vCPU's in the lower. Words are little-endian.
//!
//! # Summing
//! 1. Records arrive CPU by CPU, each stamped by its own CPU. So a record waits until the newest one is [`LATE`] newer, and
//!    records are processed in order of time. The counters of all CPUs are assumed to agree, as Xen itself assumes.
//! 2. A change carries the state that its vCPU had since the previous change. If the previous change disagrees, records in
//!    between were lost or came too late. That time is then not counted, and the vCPU's sums are unknown until its next change.
//! 3. A vCPU's current state counts up to the time of the newest record that was processed.
//!
//! # Trust
//! The input is not trusted. Any bytes can be read, the kept data is bounded ([`PENDING_MAX`], [`VCPUS_MAX`]), and sums only
//! grow. Input that does not fit makes sums unknown, never wrong.

use std::collections::BTreeMap;

use homenode_units::Ns;

/// The trace's class of events: only runstate changes.
pub const CLASS: &str = "0x21000";
const CHANGE: u32 = 0x21001;
const STATES: u32 = 0x330;
const EVENT: u32 = 0x0fff_ffff;
const HAS_CYCLES: u32 = 1 << 31;
/// Number of the idle domain.
const IDLE: u16 = 0x7fff;
/// How long a record waits for older ones. `xentrace` reads the buffers of all CPUs every 100 ms, one after the other.
pub const LATE: Ns = Ns::from_millis(250);
/// The most records that wait.
pub const PENDING_MAX: usize = 1 << 20;
/// The most vCPUs that are tracked.
pub const VCPUS_MAX: usize = 1 << 16;

/// State of a vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// The vCPU runs.
    Running,
    /// The vCPU wants to run, and waits for a CPU.
    Runnable,
    /// The vCPU waits for an event, not for a CPU.
    Blocked,
    /// The vCPU may not run: it is paused, offline, or over its cap.
    Offline,
}

impl State {
    fn of(bits: u32) -> State {
        match bits & 3 {
            0 => State::Running,
            1 => State::Runnable,
            2 => State::Blocked,
            _ => State::Offline,
        }
    }
}

/// A change of a vCPU's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// Time of the change, by the CPU's counter.
    pub cycles: u64,
    /// Number of the vCPU's domain.
    pub domain: u16,
    /// The vCPU's number.
    pub vcpu: u16,
    /// State before the change.
    pub from: State,
    /// State after the change.
    pub to: State,
}

/// Parses a trace as it arrives, in parts that may end anywhere.
#[derive(Debug, Default)]
pub struct Records {
    /// The beginning of an incomplete record, fewer than 40 bytes.
    rest: Vec<u8>,
}

impl Records {
    /// Returns the changes in the next part. Skips other records.
    pub fn read(&mut self, part: &[u8]) -> Vec<Change> {
        let mut bytes = std::mem::take(&mut self.rest);
        bytes.extend_from_slice(part);
        let mut changes = Vec::new();
        let mut rest = bytes.as_slice();
        while let Some((change, after)) = record(rest) {
            changes.extend(change);
            rest = after;
        }
        self.rest = rest.to_vec();
        changes
    }

    /// Returns true if the last record is incomplete.
    pub fn is_within(&self) -> bool {
        !self.rest.is_empty()
    }
}

/// Parses the first record. Returns the change, if it is one, and the bytes that follow; `None` if the record is incomplete.
fn record(bytes: &[u8]) -> Option<(Option<Change>, &[u8])> {
    let (head, rest) = bytes.split_first_chunk::<4>()?;
    let head = u32::from_le_bytes(*head);
    let (cycles, rest) = match head & HAS_CYCLES {
        0 => (None, rest),
        _ => rest
            .split_first_chunk::<8>()
            .map(|(cycles, rest)| (Some(u64::from_le_bytes(*cycles)), rest))?,
    };
    let words = (head >> 28 & 7) as usize;
    let (extra, rest) = rest.split_at_checked(4 * words)?;
    let event = head & EVENT;
    let who = extra.first_chunk::<4>().map(|who| u32::from_le_bytes(*who));
    let change = cycles
        .zip(who)
        .filter(|_| event & !STATES == CHANGE)
        .map(|(cycles, who)| Change {
            cycles,
            domain: (who >> 16) as u16,
            vcpu: who as u16,
            from: State::of(event >> 8),
            to: State::of(event >> 4),
        });
    Some((change, rest))
}

/// Known times of a vCPU since the trace began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Spent {
    /// Time for which the vCPU wanted to run, and waited.
    pub runnable: Ns,
    /// Time for which the vCPU was kept off its CPU by its cap, or paused.
    pub offline: Ns,
}

/// Sums of a vCPU, in cycles.
#[derive(Debug, Clone, Copy)]
struct Vcpu {
    /// The vCPU's current state; `None` after records were lost.
    state: Option<State>,
    since: u64,
    runnable: u64,
    offline: u64,
    /// Whether the vCPU's last change did not fit the previous one.
    is_broken: bool,
}

impl Vcpu {
    /// Returns the vCPU's sums at a later time, if its state does not change until then.
    fn until(mut self, at: u64) -> Vcpu {
        let time = at.saturating_sub(self.since);
        match self.state {
            Some(State::Runnable) => self.runnable = self.runnable.saturating_add(time),
            Some(State::Offline) => self.offline = self.offline.saturating_add(time),
            Some(State::Running | State::Blocked) | None => {}
        }
        self.since = self.since.max(at);
        self
    }
}

/// Sums of all vCPUs.
#[derive(Debug)]
pub struct Runstates {
    cycles_per_s: f64,
    late: u64,
    /// Waiting changes, by time. Changes with the same time are in order of arrival.
    pending: BTreeMap<u64, Vec<Change>>,
    count: usize,
    newest: u64,
    /// Time up to which everything was processed.
    taken: u64,
    vcpus: BTreeMap<(u16, u16), Vcpu>,
}

impl Runstates {
    /// Starts without sums. `cycles_per_s` is the frequency of the CPUs' counters.
    pub fn new(cycles_per_s: f64) -> Runstates {
        Runstates {
            cycles_per_s,
            late: (LATE.as_secs_f64() * cycles_per_s) as u64,
            pending: BTreeMap::new(),
            count: 0,
            newest: 0,
            taken: 0,
            vcpus: BTreeMap::new(),
        }
    }

    /// Adds changes. Too many at once are treated like lost records.
    pub fn add(&mut self, changes: &[Change]) {
        for change in changes {
            // A time stamp from another counter would hold up all later changes, or process them at once.
            let is_far =
                self.newest > 0 && change.cycles.abs_diff(self.newest) > self.late.saturating_mul(1 << 12);
            if is_far || self.count >= PENDING_MAX {
                self.forget();
            }
            self.newest = self.newest.max(change.cycles);
            self.pending.entry(change.cycles).or_default().push(*change);
            self.count += 1;
        }
        self.take(self.newest.saturating_sub(self.late));
    }

    /// Handles lost records: the state of each vCPU is unknown until two changes agree.
    pub fn forget(&mut self) {
        self.pending.clear();
        for vcpu in self.vcpus.values_mut() {
            // Sums so far are kept, although the states are unknown.
            *vcpu = vcpu.until(self.taken);
            (vcpu.state, vcpu.since, vcpu.is_broken) = (None, 0, true);
        }
        (self.count, self.newest, self.taken) = (0, 0, 0);
    }

    /// Forgets vCPUs of ended domains.
    pub fn keep_only(&mut self, domains: impl Fn(u16) -> bool) {
        self.vcpus.retain(|(domain, _), _| domains(*domain));
    }

    fn take(&mut self, until: u64) {
        let later = self.pending.split_off(&until.saturating_add(1));
        let due = std::mem::replace(&mut self.pending, later);
        for change in due.into_values().flatten() {
            self.count -= 1;
            if change.domain != IDLE {
                self.change(&change);
            }
        }
        self.taken = self.taken.max(until);
    }

    fn change(&mut self, change: &Change) {
        let key = (change.domain, change.vcpu);
        let Some(vcpu) = self.vcpus.get_mut(&key) else {
            if self.vcpus.len() < VCPUS_MAX {
                self.vcpus.insert(key, Vcpu::new(change.to, change.cycles));
            }
            return;
        };
        // The vCPU's sums so far are kept.
        let taken = self.taken;
        let fits = vcpu.state == Some(change.from) && vcpu.since.max(taken) <= change.cycles;
        *vcpu = match fits {
            true => Vcpu {
                state: Some(change.to),
                is_broken: false,
                ..vcpu.until(change.cycles)
            },
            false => Vcpu {
                state: Some(change.to),
                since: vcpu.since.max(taken).max(change.cycles),
                is_broken: true,
                ..vcpu.until(taken)
            },
        };
    }

    /// Sets a vCPU's state if no change has shown it, because a vCPU that does not change has no records.
    pub fn begin(&mut self, domain: u16, vcpu: u16, state: State) {
        let taken = self.taken;
        if taken > 0 && self.vcpus.len() < VCPUS_MAX {
            self.vcpus
                .entry((domain, vcpu))
                .or_insert_with(|| Vcpu::new(state, taken));
        }
    }

    /// Returns a vCPU's times so far; `None` if they are unknown.
    pub fn spent(&self, domain: u16, vcpu: u16) -> Option<Spent> {
        let known = self.vcpus.get(&(domain, vcpu)).filter(|known| !known.is_broken)?;
        let known = known.until(self.taken);
        let time = |cycles: u64| Ns((cycles as f64 / self.cycles_per_s * 1e9) as u64);
        Some(Spent {
            runnable: time(known.runnable),
            offline: time(known.offline),
        })
    }
}

impl Vcpu {
    fn new(state: State, since: u64) -> Vcpu {
        Vcpu {
            state: Some(state),
            since,
            runnable: 0,
            offline: 0,
            is_broken: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Frequency of a thousand cycles per second: one cycle is a millisecond.
    const CYCLES_PER_S: f64 = 1000.0;

    fn change(cycles: u64, from: State, to: State) -> Change {
        Change {
            cycles,
            domain: 2,
            vcpu: 1,
            from,
            to,
        }
    }

    /// Writes a change as a record in Xen's format.
    fn written(change: &Change) -> Vec<u8> {
        let (from, to) = (change.from as u32, change.to as u32);
        let head = HAS_CYCLES | 1 << 28 | CHANGE | from << 8 | to << 4;
        let who = u32::from(change.domain) << 16 | u32::from(change.vcpu);
        let words = [head, change.cycles as u32, (change.cycles >> 32) as u32, who];
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn spent(runstates: &Runstates) -> Option<(u64, u64)> {
        let spent = runstates.spent(2, 1)?;
        Some((spent.runnable.0 / 1_000_000, spent.offline.0 / 1_000_000))
    }

    #[test]
    fn changes_are_read_wherever_the_parts_end() {
        // A record that the tracing tool itself writes, without a time: it says which CPU the next records are from.
        let mut bytes: Vec<u8> = [2 << 28 | 0x1f003_u32, 3, 0]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        let base = 5 << 32;
        let changes = [
            change(base, State::Blocked, State::Runnable),
            change(base + 10, State::Runnable, State::Running),
            change(base + 30, State::Running, State::Offline),
        ];
        changes.iter().for_each(|change| bytes.extend(written(change)));
        for part in [1, 3, 7, 16, 1000] {
            let mut records = Records::default();
            let read: Vec<Change> = bytes.chunks(part).flat_map(|part| records.read(part)).collect();
            assert_eq!(read, changes, "in parts of {part}");
            assert!(!records.is_within());
            records.read(&bytes[..14]);
            assert!(records.is_within());
        }
    }

    #[test]
    fn waiting_and_being_kept_off_are_summed_in_order_of_time() {
        let mut runstates = Runstates::new(CYCLES_PER_S);
        // Records of two CPUs, those of one CPU after those of the other.
        runstates.add(&[
            change(10_000, State::Blocked, State::Runnable),
            change(10_130, State::Running, State::Offline),
            change(10_030, State::Runnable, State::Running),
        ]);
        assert_eq!(spent(&runstates), None, "they wait for older ones");
        runstates.add(&[change(10_200, State::Offline, State::Runnable)]);
        // From 10 to 10.03 s the vCPU waited, from 10.13 to 10.2 s it was kept off, and since then it waits.
        runstates.add(&[change(10_700, State::Runnable, State::Running)]);
        assert_eq!(spent(&runstates), Some((30 + 250, 70)));
        runstates.add(&[change(11_000, State::Running, State::Blocked)]);
        assert_eq!(spent(&runstates), Some((30 + 500, 70)));
    }

    #[test]
    fn one_that_does_the_same_all_the_time_is_known_once_it_is_said() {
        let mut runstates = Runstates::new(CYCLES_PER_S);
        runstates.begin(2, 1, State::Runnable);
        assert_eq!(spent(&runstates), None, "nothing was traced yet");
        let other = |cycles| Change {
            domain: 3,
            ..change(cycles, State::Running, State::Blocked)
        };
        runstates.add(&[other(1000)]);
        runstates.begin(2, 1, State::Runnable);
        assert_eq!(spent(&runstates), Some((0, 0)));
        runstates.add(&[other(1500)]);
        assert_eq!(spent(&runstates), Some((500, 0)));
    }

    #[test]
    fn what_was_lost_is_nobodys_and_ends_knowledge_until_the_next_change() {
        let mut runstates = Runstates::new(CYCLES_PER_S);
        runstates.add(&[
            change(1000, State::Running, State::Runnable),
            change(1100, State::Runnable, State::Running),
            // This change does not fit the previous one, because the vCPU was not runnable.
            change(1900, State::Runnable, State::Running),
            change(3000, State::Running, State::Runnable),
        ]);
        assert_eq!(spent(&runstates), None);
        runstates.add(&[change(3500, State::Runnable, State::Blocked)]);
        assert_eq!(spent(&runstates), Some((100 + 250, 0)));
        runstates.forget();
        assert_eq!(spent(&runstates), None);
        runstates.add(&[
            change(9000, State::Running, State::Runnable),
            change(9010, State::Runnable, State::Running),
            change(9500, State::Running, State::Blocked),
        ]);
        assert_eq!(spent(&runstates), Some((100 + 250 + 10, 0)));
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut runstates = Runstates::new(CYCLES_PER_S);
        let flood: Vec<Change> = (0..PENDING_MAX + 10)
            .map(|_| change(5, State::Running, State::Runnable))
            .collect();
        runstates.add(&flood);
        assert!(runstates.count <= PENDING_MAX);
        let many: Vec<Change> = (0..=u32::from(u16::MAX) + 100)
            .map(|who| Change {
                domain: (who >> 8) as u16,
                vcpu: who as u16,
                ..change(10, State::Running, State::Runnable)
            })
            .collect();
        runstates.add(&many);
        runstates.add(&[change(1000, State::Running, State::Runnable)]);
        assert!(runstates.vcpus.len() <= VCPUS_MAX);
        runstates.keep_only(|domain| domain == 2);
        assert!(runstates.vcpus.keys().all(|(domain, _)| *domain == 2));
    }

    fn any_change() -> impl Strategy<Value = Change> {
        let cycles = prop_oneof![0u64..5000, any::<u64>()];
        (cycles, 0u16..3, 0u16..2, any::<u32>(), any::<u32>()).prop_map(|(cycles, domain, vcpu, from, to)| {
            Change {
                cycles,
                domain,
                vcpu,
                from: State::of(from),
                to: State::of(to),
            }
        })
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_alike_in_any_parts(bytes in prop::collection::vec(any::<u8>(), 0..300), part in 1usize..50) {
            let whole = Records::default().read(&bytes);
            let mut records = Records::default();
            let parts: Vec<Change> = bytes.chunks(part).flat_map(|part| records.read(part)).collect();
            prop_assert_eq!(whole, parts);
            prop_assert!(records.rest.len() < 40);
        }

        #[test]
        fn sums_never_shrink_while_they_are_known(
            parts in prop::collection::vec(prop::collection::vec(any_change(), 0..6), 0..30)
        ) {
            let mut runstates = Runstates::new(CYCLES_PER_S);
            let mut before: Option<Spent> = None;
            for part in parts {
                runstates.add(&part);
                let now = runstates.spent(2, 1);
                if let (Some(before), Some(now)) = (before, now) {
                    prop_assert!(before.runnable <= now.runnable && before.offline <= now.offline);
                }
                before = now.or(before);
            }
        }
    }
}
