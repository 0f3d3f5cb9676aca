//! Decides which VM has its last-level cache to itself, when, and what of its misses is its own [Kyoto, section 3.2.3].
//!
//! # Problem
//! A VM's counters include misses that it would not have alone, because its neighbours evicted the lines. No VM should pay
//! for the pollution of others. So now and then a VM has its last-level cache to itself for a while, and its misses during
//! that time are its own.
//!
//! # Terms
//! - *Caches* of a VM: the CPUs that share a last-level cache with those on which its vCPUs ran.
//! - *Disturber* of a VM: another VM that ran on its caches and misses at least [`Config::few_per_ms`].
//! - *Window*: the time for which one VM has its caches to itself, measured in unhalted cycles of that VM.
//! - *Out*: the VMs that must run elsewhere now.
//! - *Part*: the share of the misses counted in a period that is charged to the VM.
//!
//! # Algorithm
//!
//! ```text
//!             one is due, no rule spares it       the disturbers are gone        the window is full
//!      idle ───────────────────────────────▶ emptying ──────────────▶ sampling ───────────────▶ idle
//!        ▲                                      │                        │        all are back
//!        └──────── it vanished, or too much time went by: all are back ──┘
//! ```
//!
//! 1. A VM with a permit is due when it has retired [`Config::instructions_between`] instructions since its last window. If
//!    several are due, the one with most instructions since then comes first.
//! 2. A VM is *not* isolated, and its counters count as its own, while it misses less than [`Config::few_per_ms`] (it is neither
//!    a disturber nor sensitive), and while it has no disturber.
//! 3. Otherwise its disturbers are out. Once they have left, [`Config::window_cycles`] of the VM are counted according to
//!    equation 3.1. Then all are back. Who comes meanwhile leaves too; if it may not, the window is given up. Each window
//!    that is given up doubles the pause before the VM's next one, up to an hour.
//! 4. After a window, the part is own misses over misses beside disturbers (an average), and at least own misses over misses
//!    now. So more misses in a phase of the VM count, and an end of the disturbance is noticed at once.
//!
//! # Properties (tests of the same name)
//! - `isolation_gives_a_vms_own_pollution`
//! - `a_vm_with_few_misses_is_not_isolated`
//! - `a_vm_among_quiet_neighbours_is_not_isolated`
//! - `who_comes_during_a_window_leaves_too`
//! - `a_window_that_never_fills_is_given_up`
//! - `phases_between_windows_count`
//! - `nobody_is_out_in_the_end_whatever_happens`
//!
//! # Departures from the source, and why
//! - The paper samples every 100 million instructions for about a billion cycles, so its windows overlap. Here one VM of a host
//!   is isolated at a time, and the others wait for their turn.
//! - The paper sends all other vCPUs away. A neighbour that misses little evicts little, so it stays.
//! - Rule 2 errs on the safe side, because a VM misses at least as much next to others as alone: a VM that misses much only
//!   because of its neighbours is isolated too (`kyoto.isolation-skippable` shows one).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use homenode_units::{CpuSet, Ewma, Ns, VmId, Weight};

use super::{Config, Obstacle};
use crate::permits::meter::Counted;

/// Weight of a period in the average of misses beside disturbers. Periods are noisy; it is not a setting.
const BESIDE_WEIGHT: f64 = 0.25;
/// A VM that was never isolated is not charged while it waits for its first window, for this long at most.
const FIRST_WAIT_MAX: Ns = Ns::from_secs(60);
/// Each window that is given up doubles the pause before the next, up to this time.
const PAUSE_MAX: Ns = Ns::from_secs(3600);

/// Hardware counters of a VM, cumulative.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Instructions retired.
    pub instructions: u64,
    /// Unhalted cycles.
    pub cycles: u64,
    /// LLC misses.
    pub llc_misses: u64,
}

impl Counts {
    /// Returns the counts since an earlier reading; `None` if counters ran backwards.
    fn since(self, before: Counts) -> Option<Counted> {
        Some(Counted {
            llc_misses: self.llc_misses.checked_sub(before.llc_misses)?,
            cycles: self.cycles.checked_sub(before.cycles)?,
            instructions: self.instructions.checked_sub(before.instructions)?,
            ..Counted::default()
        })
    }
}

/// A VM of the host at one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The VM.
    pub vm: VmId,
    /// The VM's counters; `None` if a vCPU's could not be read this time.
    pub counts: Option<Counts>,
    /// Whether the VM pays for its cache misses.
    pub has_permit: bool,
    /// CPUs that share a last-level cache with those on which its vCPUs ran; empty if none ran.
    pub caches: CpuSet,
}

/// Why a part of a VM's misses is charged to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Basis {
    /// The VM has its caches to itself now: all misses are its own.
    Isolated,
    /// The VM misses little: all misses are charged.
    FewMisses,
    /// No other VM disturbs this one: all misses are its own.
    QuietNeighbours,
    /// The VM had its caches to itself in an earlier window.
    Window {
        /// When the VM's last window ended.
        at: Ns,
    },
    /// The VM waits for its first window: nothing is charged.
    Awaited,
    /// The VM cannot have its caches to itself: all misses are charged.
    Counted(Obstacle),
}

/// What a VM is charged for, of the misses counted in the last period.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Charge {
    /// The part that is charged, 0 to 1; `None` while it is unknown, so nothing is charged.
    pub part: Option<f64>,
    /// Why that part is charged.
    pub basis: Basis,
}

/// A VM's own misses according to its last window.
#[derive(Clone, Copy, Debug)]
struct Own {
    /// Equation 3.1: LLC misses per unhalted millisecond.
    per_ms: f64,
    /// The VM's own misses over its misses beside disturbing VMs, at most 1.
    share: f64,
    at: Ns,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    first_at: Ns,
    /// The VM's counters after its last window, or when it was first seen.
    since: Counts,
    last: Counts,
    /// When the VM's counters were last read.
    read_at: Ns,
    /// Misses per unhalted millisecond when they were last read; `None` if unknown.
    rate: Option<f64>,
    beside: Ewma,
    own: Option<Own>,
    obstacle: Option<Obstacle>,
    /// The VM does not get its caches to itself before this time, after a window was given up.
    not_before: Ns,
    /// Number of windows that were given up one after another.
    gave_up_count: u32,
    charge: Option<Charge>,
}

#[derive(Clone, Debug)]
struct Window {
    vm: VmId,
    /// The VM's caches, which the others must leave.
    caches: CpuSet,
    out: BTreeSet<VmId>,
    asked: Ns,
    /// The VM's counters when the disturbing VMs had left.
    begun: Option<Counts>,
}

/// Watches the VMs of a host, and isolates them in turn.
#[derive(Clone, Debug, Default)]
pub struct Sampler {
    config: Config,
    clock_khz: u64,
    known: BTreeMap<VmId, Known>,
    window: Option<Window>,
}

impl Sampler {
    /// Uses these settings from now on. Unhalted cycles count at this frequency.
    pub fn set(&mut self, config: Config, clock_khz: u64) {
        (self.config, self.clock_khz) = (config, clock_khz);
    }

    /// Returns the VM that is isolated, and the CPUs of its caches, while there is a window.
    pub fn isolates(&self) -> Option<(VmId, &CpuSet)> {
        self.window.as_ref().map(|window| (window.vm, &window.caches))
    }

    /// Returns the VMs that must run elsewhere.
    pub fn out(&self) -> impl Iterator<Item = VmId> + '_ {
        self.window.iter().flat_map(|window| window.out.iter().copied())
    }

    /// Returns true if a VM must run elsewhere.
    pub fn is_out(&self, vm: VmId) -> bool {
        self.window
            .as_ref()
            .is_some_and(|window| window.out.contains(&vm))
    }

    /// Returns the VMs of which the sampler knows something.
    pub fn known(&self) -> impl Iterator<Item = VmId> + '_ {
        self.known.keys().copied()
    }

    /// Forgets the VMs that have gone.
    pub fn forget(&mut self, has_gone: impl Fn(VmId) -> bool) {
        self.known.retain(|vm, _| !has_gone(*vm));
    }

    /// Returns what a VM is charged for; `None` if it has no permit, or has just appeared.
    pub fn charge(&self, vm: VmId) -> Option<Charge> {
        self.known.get(&vm)?.charge
    }

    /// Ends the window without a result.
    pub fn give_up(&mut self) {
        self.window = None;
    }

    /// Looks at all VMs of the host. `obstacle` says why a VM cannot be isolated from these disturbers now. Of a VM that is
    /// missing, all is kept until [`Sampler::forget`].
    pub fn step(
        &mut self,
        now: Ns,
        host: &[Seen],
        obstacle: impl Fn(&Seen, &BTreeSet<VmId>, Turn) -> Option<Obstacle>,
    ) {
        for seen in host {
            self.observe(now, seen);
        }
        let was_alone = match self.window.take() {
            Some(window) => self.proceed(now, host, window, &obstacle),
            None => None,
        };
        if self.window.is_none() && was_alone.is_none() {
            self.choose(now, host, obstacle);
        }
        // Without a reading, what was charged last still holds.
        for seen in host
            .iter()
            .filter(|seen| seen.counts.is_some() || !seen.has_permit)
        {
            let charge = seen
                .has_permit
                .then(|| self.charged(now, host, seen, was_alone))
                .flatten();
            if let Some(known) = self.known.get_mut(&seen.vm) {
                known.charge = charge;
            }
        }
    }

    fn observe(&mut self, now: Ns, seen: &Seen) {
        let clock_khz = self.clock_khz;
        let Some(counts) = seen.counts else {
            let known = self.known.get_mut(&seen.vm);
            if let Some(known) = known.filter(|of| now.saturating_sub(of.read_at) > FIRST_WAIT_MAX) {
                known.rate = None;
            }
            return;
        };
        let known = self.known.entry(seen.vm).or_insert(Known {
            first_at: now,
            since: counts,
            last: counts,
            read_at: now,
            rate: None,
            beside: Ewma::default(),
            own: None,
            obstacle: None,
            not_before: Ns::ZERO,
            gave_up_count: 0,
            charge: None,
        });
        if known.first_at == now {
            return;
        }
        match counts.since(known.last) {
            // A VM that did not run missed nothing.
            Some(counted) => known.rate = Some(counted.equation_3_1(clock_khz).unwrap_or(0.0)),
            // If counters ran backwards, counting starts from here.
            None => (known.rate, known.since) = (None, counts),
        }
        (known.last, known.read_at) = (counts, now);
    }

    fn rate(&self, vm: VmId) -> Option<f64> {
        self.known.get(&vm)?.rate
    }

    /// Returns the disturbers of a VM on these caches. VMs that are not known yet count if `with_unknown`.
    fn disturbers<'a>(
        &'a self,
        host: &'a [Seen],
        (vm, caches): (VmId, &'a CpuSet),
        with_unknown: Unknown,
    ) -> impl Iterator<Item = VmId> + 'a {
        let disturbs = move |other: &&Seen| {
            let rate = self.rate(other.vm);
            let may_disturb = with_unknown == Unknown::Disturbs && other.counts.is_some();
            let is_much = rate.map_or(may_disturb, |rate| rate >= self.config.few_per_ms);
            other.vm != vm && is_much && other.caches.count_common(caches) > 0
        };
        host.iter().filter(disturbs).map(|other| other.vm)
    }

    /// Steps 1 and 2 of the algorithm: chooses the next VM to isolate.
    fn choose(
        &mut self,
        now: Ns,
        host: &[Seen],
        obstacle: impl Fn(&Seen, &BTreeSet<VmId>, Turn) -> Option<Obstacle>,
    ) {
        let waited = |seen: &Seen| {
            let known = self.known.get(&seen.vm)?;
            let waited = seen.counts?.instructions.saturating_sub(known.since.instructions);
            let is_due = known.own.is_none() || waited >= self.config.instructions_between;
            let is_much = known.rate.is_some_and(|rate| rate >= self.config.few_per_ms);
            (seen.has_permit && is_due && is_much && now >= known.not_before).then_some(waited)
        };
        let mut due: Vec<(u64, &Seen)> = host
            .iter()
            .filter_map(|seen| Some((waited(seen)?, seen)))
            .collect();
        due.sort_by_key(|(waited, seen)| (Reverse(*waited), seen.vm));
        for (_, seen) in due {
            let others = self.disturbers(host, (seen.vm, &seen.caches), Unknown::IsQuiet);
            let out: BTreeSet<VmId> = others.collect();
            if out.is_empty() {
                continue;
            }
            let Some(known) = self.known.get_mut(&seen.vm) else {
                continue;
            };
            let turn = if known.own.is_none() {
                Turn::First
            } else {
                Turn::Again
            };
            let found = obstacle(seen, &out, turn);
            known.obstacle = found;
            if found.is_none() {
                self.window = Some(Window {
                    vm: seen.vm,
                    caches: seen.caches.clone(),
                    out,
                    asked: now,
                    begun: None,
                });
                return;
            }
        }
    }

    /// Step 3 of the algorithm: continues the window, or ends it. Returns its VM if that VM had its caches to itself since the
    /// last step.
    fn proceed(
        &mut self,
        now: Ns,
        host: &[Seen],
        mut window: Window,
        obstacle: impl Fn(&Seen, &BTreeSet<VmId>, Turn) -> Option<Obstacle>,
    ) -> Option<VmId> {
        let at = host.binary_search_by_key(&window.vm, |seen| seen.vm).ok()?;
        let seen = host.get(at).filter(|seen| seen.has_permit)?;
        window.out.retain(|vm| self.known.contains_key(vm));
        let others = self.disturbers(host, (window.vm, &window.caches), Unknown::Disturbs);
        let others: BTreeSet<VmId> = others.collect();
        let joining = &others - &window.out;
        if !joining.is_empty() {
            let caches = window.caches.clone();
            let seen = Seen {
                caches,
                ..seen.clone()
            };
            if let Some(found) = obstacle(&seen, &joining, Turn::Joining) {
                self.settle(now, &seen, Err(found));
                return None;
            }
        }
        // If a VM returns or arrives, the window is spoiled and starts again.
        let is_alone = others.is_empty() && seen.caches.is_subset(&window.caches);
        window.out.extend(others);
        let counted = window.begun.filter(|_| is_alone);
        let counted = counted.and_then(|begun| seen.counts?.since(begun));
        let was_alone = counted.is_some().then_some(window.vm);
        if let Some(counted) = counted.filter(|counted| counted.cycles >= self.config.window_cycles) {
            let per_ms = counted.equation_3_1(self.clock_khz);
            self.settle(now, seen, per_ms.ok_or(Obstacle::GaveUp));
        } else if now.saturating_sub(window.asked) > self.config.window_most {
            self.settle(now, seen, Err(Obstacle::GaveUp));
        } else {
            window.begun = window.begun.or(seen.counts).filter(|_| is_alone);
            self.window = Some(window);
        }
        was_alone
    }

    /// Ends a window with the VM's own misses per unhalted millisecond, or with the reason why they are not known.
    fn settle(&mut self, now: Ns, seen: &Seen, per_ms: Result<f64, Obstacle>) {
        let Some(known) = self.known.get_mut(&seen.vm) else {
            return;
        };
        known.since = seen.counts.unwrap_or(known.last);
        match per_ms {
            Ok(per_ms) => {
                let beside = known.beside.value().unwrap_or(per_ms).max(per_ms);
                let share = if beside > 0.0 { per_ms / beside } else { 1.0 };
                known.own = Some(Own {
                    per_ms,
                    share,
                    at: now,
                });
                (known.obstacle, known.gave_up_count) = (None, 0);
            }
            Err(why) => {
                let first = self.config.window_most.as_f64() / self.config.away_share;
                let doubled = first * f64::from(1_u32 << known.gave_up_count.min(16));
                let pause = doubled.min(PAUSE_MAX.as_f64()).max(first);
                known.not_before = Ns(now.0.saturating_add(pause as u64));
                known.gave_up_count = known.gave_up_count.saturating_add(1);
                known.obstacle = Some(why);
            }
        }
    }

    /// Step 4 of the algorithm: returns what a VM is charged for. `alone` is the VM that had its caches to itself since the last
    /// step.
    fn charged(&mut self, now: Ns, host: &[Seen], seen: &Seen, alone: Option<VmId>) -> Option<Charge> {
        let rate = self.rate(seen.vm)?;
        let all = |basis| {
            let part = Some(1.0);
            Some(Charge { part, basis })
        };
        if rate < self.config.few_per_ms {
            return all(Basis::FewMisses);
        }
        if alone == Some(seen.vm) {
            return all(Basis::Isolated);
        }
        // Until its window has begun, a VM still misses what its disturbers evicted.
        let is_emptying = self.isolates().is_some_and(|(vm, _)| vm == seen.vm);
        let has_disturbers = self
            .disturbers(host, (seen.vm, &seen.caches), Unknown::IsQuiet)
            .next()
            .is_some();
        if !has_disturbers && !is_emptying {
            return all(Basis::QuietNeighbours);
        }
        let known = self.known.get_mut(&seen.vm)?;
        if has_disturbers {
            known.beside.update(rate, Weight(BESIDE_WEIGHT));
        }
        if let Some(own) = known.own {
            return Some(Charge {
                part: Some(own.share.max(own.per_ms / rate).min(1.0)),
                basis: Basis::Window { at: own.at },
            });
        }
        match known.obstacle {
            Some(obstacle) if !obstacle.passes() => all(Basis::Counted(obstacle)),
            Some(obstacle) if now.saturating_sub(known.first_at) > FIRST_WAIT_MAX => {
                all(Basis::Counted(obstacle))
            }
            _ => Some(Charge {
                part: None,
                basis: Basis::Awaited,
            }),
        }
    }
}

/// Whether a VM was isolated before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The VM's own misses are unknown.
    First,
    /// The VM had a window before.
    Again,
    /// The VM has a window now, and other VMs have come.
    Joining,
}

/// How a VM whose misses are not known yet counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unknown {
    IsQuiet,
    Disturbs,
}

#[cfg(test)]
mod tests;
