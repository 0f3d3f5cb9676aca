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
//!    equation 3.1. Then all are back.
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

/// Counters of a VM, cumulative.
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
    /// Its counters.
    pub counts: Counts,
    /// Whether it pays for its misses.
    pub has_permit: bool,
    /// CPUs that share a last-level cache with those on which its vCPUs ran; empty if none ran.
    pub caches: CpuSet,
}

/// Why a part of a VM's misses is charged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Basis {
    /// It has its caches to itself now: all misses are its own.
    Isolated,
    /// It misses little: all of it is charged.
    FewMisses,
    /// It has no disturbers: all misses are its own.
    QuietNeighbours,
    /// It had its caches to itself then.
    Window {
        /// When its last window ended.
        at: Ns,
    },
    /// It waits for its first window: nothing is charged.
    Awaited,
    /// It cannot be isolated: all misses are charged.
    Counted(Obstacle),
}

/// What a VM is charged for, of the misses counted in the last period.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Charge {
    /// The part that is charged, 0 to 1; `None` while it is unknown, so nothing is charged.
    pub part: Option<f64>,
    /// Why.
    pub basis: Basis,
}

/// A VM's own misses according to its last window.
#[derive(Clone, Copy, Debug)]
struct Own {
    /// Equation 3.1: LLC misses per unhalted millisecond.
    per_ms: f64,
    /// The same over misses beside disturbers, at most 1.
    share: f64,
    at: Ns,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    first_at: Ns,
    /// The VM's counters after its last window, or when it was first seen.
    since: Counts,
    last: Counts,
    /// Misses per unhalted millisecond in the last step; `None` if unknown.
    rate: Option<f64>,
    beside: Ewma,
    own: Option<Own>,
    obstacle: Option<Obstacle>,
    /// It is not isolated before this time, after a window was given up.
    not_before: Ns,
    charge: Option<Charge>,
}

#[derive(Clone, Debug)]
struct Window {
    vm: VmId,
    /// The VM's caches, which the others must leave.
    caches: CpuSet,
    out: BTreeSet<VmId>,
    asked: Ns,
    /// The VM's counters when its disturbers had left.
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

    /// Returns what a VM is charged for; `None` if it has no permit, or has just appeared.
    pub fn charge(&self, vm: VmId) -> Option<Charge> {
        self.known.get(&vm)?.charge
    }

    /// Ends the window without a result.
    pub fn give_up(&mut self) {
        self.window = None;
    }

    /// Looks at all VMs of the host. `obstacle` says why a VM cannot be isolated from these disturbers now.
    pub fn step(
        &mut self,
        now: Ns,
        host: &[Seen],
        obstacle: impl Fn(&Seen, &BTreeSet<VmId>, Turn) -> Option<Obstacle>,
    ) {
        let is_there = |vm: &VmId| host.binary_search_by_key(vm, |seen| seen.vm).is_ok();
        self.known.retain(|vm, _| is_there(vm));
        for seen in host {
            self.observe(now, seen);
        }
        let was_alone = match self.window.take() {
            Some(window) => self.proceed(now, host, window),
            None => None,
        };
        if self.window.is_none() && was_alone.is_none() {
            self.choose(now, host, obstacle);
        }
        for seen in host {
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
        let known = self.known.entry(seen.vm).or_insert(Known {
            first_at: now,
            since: seen.counts,
            last: seen.counts,
            rate: None,
            beside: Ewma::default(),
            own: None,
            obstacle: None,
            not_before: Ns::ZERO,
            charge: None,
        });
        if known.first_at == now {
            return;
        }
        match seen.counts.since(known.last) {
            // A VM that did not run missed nothing.
            Some(counted) => known.rate = Some(counted.equation_3_1(clock_khz).unwrap_or(0.0)),
            // If counters ran backwards, counting starts from here.
            None => (known.rate, known.since) = (None, seen.counts),
        }
        known.last = seen.counts;
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
            let is_much = rate.map_or(with_unknown == Unknown::Disturbs, |rate| {
                rate >= self.config.few_per_ms
            });
            other.vm != vm && is_much && other.caches.count_common(caches) > 0
        };
        host.iter().filter(disturbs).map(|other| other.vm)
    }

    /// Steps 1 and 2: chooses the next VM to isolate.
    fn choose(
        &mut self,
        now: Ns,
        host: &[Seen],
        obstacle: impl Fn(&Seen, &BTreeSet<VmId>, Turn) -> Option<Obstacle>,
    ) {
        let waited = |seen: &Seen| {
            let known = self.known.get(&seen.vm)?;
            let waited = seen.counts.instructions.saturating_sub(known.since.instructions);
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

    /// Step 3: continues the window, or ends it. Returns its VM if that had its caches to itself since the last step.
    fn proceed(&mut self, now: Ns, host: &[Seen], mut window: Window) -> Option<VmId> {
        let at = host.binary_search_by_key(&window.vm, |seen| seen.vm).ok()?;
        let seen = host.get(at).filter(|seen| seen.has_permit)?;
        window.out.retain(|vm| self.known.contains_key(vm));
        let others = self.disturbers(host, (window.vm, &window.caches), Unknown::Disturbs);
        let others: Vec<VmId> = others.collect();
        // If a VM returns or arrives, the window is spoiled and starts again.
        let is_alone = others.is_empty() && seen.caches.is_subset(&window.caches);
        window.out.extend(others);
        let counted = window.begun.filter(|_| is_alone);
        let counted = counted.and_then(|begun| seen.counts.since(begun));
        let was_alone = counted.is_some().then_some(window.vm);
        if let Some(counted) = counted.filter(|counted| counted.cycles >= self.config.window_cycles) {
            self.settle(now, seen, counted.equation_3_1(self.clock_khz));
        } else if now.saturating_sub(window.asked) > self.config.window_most {
            self.settle(now, seen, None);
        } else {
            window.begun = is_alone.then(|| window.begun.unwrap_or(seen.counts));
            self.window = Some(window);
        }
        was_alone
    }

    fn settle(&mut self, now: Ns, seen: &Seen, per_ms: Option<f64>) {
        let Some(known) = self.known.get_mut(&seen.vm) else {
            return;
        };
        known.since = seen.counts;
        match per_ms {
            Some(per_ms) => {
                let beside = known.beside.value().unwrap_or(per_ms).max(per_ms);
                let share = if beside > 0.0 { per_ms / beside } else { 1.0 };
                known.own = Some(Own {
                    per_ms,
                    share,
                    at: now,
                });
                known.obstacle = None;
            }
            None => {
                let pause = self.config.window_most.as_f64() / self.config.away_share;
                known.not_before = Ns(now.0.saturating_add(pause as u64));
                known.obstacle = Some(Obstacle::GaveUp);
            }
        }
    }

    /// Step 4: returns what a VM is charged for. `alone` had its caches to itself since the last step.
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
    /// Its own misses are unknown.
    First,
    /// It had a window before.
    Again,
}

/// How a VM whose misses are not known yet counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unknown {
    IsQuiet,
    Disturbs,
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_units::CpuId;
    use proptest::prelude::*;

    const KHZ: u64 = 1_000_000;
    const STEP: Ns = Ns::from_millis(100);

    /// VMs of a host with two caches, which run at 1 GHz and one instruction per cycle. All have permits and belong on CPU 0.
    /// Each has its misses per millisecond, first alone, then next to others.
    struct Host {
        vms: Vec<(Seen, f64, f64)>,
        now: Ns,
    }

    fn cache(n: u32) -> CpuSet {
        CpuSet::one(CpuId(n))
    }

    impl Host {
        fn new(rates: &[(f64, f64)]) -> Host {
            let vm = |(at, (alone, beside)): (usize, &(f64, f64))| {
                let seen = Seen {
                    vm: VmId(at as u128),
                    counts: Counts::default(),
                    has_permit: true,
                    caches: cache(0),
                };
                (seen, *alone, *beside)
            };
            Host {
                vms: rates.iter().enumerate().map(vm).collect(),
                now: Ns::ZERO,
            }
        }

        fn here(&self) -> usize {
            let here = self.vms.iter().filter(|(seen, ..)| seen.caches == cache(0));
            here.count()
        }

        /// Runs a step of 100 ms; VMs that must be out then are out at once.
        fn step(&mut self, sampler: &mut Sampler) {
            self.now += STEP;
            let here = self.here();
            for (seen, alone, beside) in &mut self.vms {
                seen.counts.instructions += 100_000_000;
                seen.counts.cycles += 100_000_000;
                let is_beside = here > 1 && seen.caches == cache(0);
                seen.counts.llc_misses += (if is_beside { *beside } else { *alone } * 100.0) as u64;
            }
            self.look(sampler);
        }

        /// Lets the sampler look at the host as it is.
        fn look(&mut self, sampler: &mut Sampler) {
            let seen: Vec<Seen> = self.vms.iter().map(|(seen, ..)| seen.clone()).collect();
            sampler.step(self.now, &seen, |_, _, _| None);
            for (seen, ..) in &mut self.vms {
                seen.caches = cache(u32::from(sampler.is_out(seen.vm)));
            }
        }

        fn run(&mut self, sampler: &mut Sampler, steps: usize) -> usize {
            let mut most = 0;
            for _ in 0..steps {
                self.step(sampler);
                most = most.max(sampler.out().count());
            }
            most
        }
    }

    fn sampler() -> Sampler {
        let mut sampler = Sampler::default();
        sampler.set(Config::default(), KHZ);
        sampler
    }

    #[test]
    fn isolation_gives_a_vms_own_pollution() {
        // VM 0 misses 2000 per ms alone, and 10000 next to VM 1, which misses 50000.
        let (mut host, mut sampler) = (Host::new(&[(2_000.0, 10_000.0), (50_000.0, 50_000.0)]), sampler());
        host.run(&mut sampler, 2);
        let awaited = sampler.charge(VmId(0)).unwrap();
        assert_eq!((awaited.part, awaited.basis), (None, Basis::Awaited));
        host.run(&mut sampler, 60);
        while host.here() < 2 || sampler.isolates().is_some() {
            host.step(&mut sampler);
        }
        let own = sampler.known[&VmId(0)].own.unwrap();
        assert!((own.per_ms - 2_000.0).abs() < 1.0, "{own:?}");
        assert!((own.share - 0.2).abs() < 0.01, "{own:?}");
        assert!(sampler.known[&VmId(1)].own.unwrap().share > 0.99);
    }

    #[test]
    fn a_vm_with_few_misses_is_not_isolated() {
        let (mut host, mut sampler) = (Host::new(&[(900.0, 990.0), (900.0, 50_000.0)]), sampler());
        host.vms[1].0.has_permit = false;
        assert_eq!(host.run(&mut sampler, 20), 0);
        let charge = sampler.charge(VmId(0)).unwrap();
        assert_eq!((charge.basis, charge.part), (Basis::FewMisses, Some(1.0)));
        assert_eq!(sampler.charge(VmId(1)), None, "it has no permit");
    }

    #[test]
    fn a_vm_among_quiet_neighbours_is_not_isolated() {
        let rates = [(40_000.0, 40_400.0), (10.0, 900.0), (10.0, 900.0)];
        let quiet = Charge {
            part: Some(1.0),
            basis: Basis::QuietNeighbours,
        };
        let (mut host, mut sampler) = (Host::new(&rates), sampler());
        assert_eq!(host.run(&mut sampler, 20), 0);
        assert_eq!(sampler.charge(VmId(0)), Some(quiet));
        // A VM that has the cache to itself anyway is not isolated either.
        let (mut host, mut sampler) = (
            Host::new(&[(40_000.0, 0.0), (50_000.0, 50_000.0)]),
            self::sampler(),
        );
        host.vms[1].0.caches = cache(1);
        host.step(&mut sampler);
        host.vms[1].0.caches = cache(1);
        host.step(&mut sampler);
        assert_eq!(sampler.charge(VmId(0)), Some(quiet));
    }

    #[test]
    fn who_comes_during_a_window_leaves_too() {
        let (mut host, mut sampler) = (Host::new(&[(2_000.0, 9_000.0), (50_000.0, 50_000.0)]), sampler());
        let newcomer = Host::new(&[(0.0, 0.0), (0.0, 0.0), (7_000.0, 7_000.0)])
            .vms
            .remove(2);
        while sampler.isolates().is_none() {
            host.step(&mut sampler);
        }
        host.vms.push(newcomer);
        host.step(&mut sampler);
        assert_eq!(sampler.isolates().map(|(vm, _)| vm), Some(VmId(0)));
        assert!(sampler.is_out(VmId(2)));
    }

    #[test]
    fn a_window_that_never_fills_is_given_up() {
        let (mut host, mut sampler) = (Host::new(&[(2_000.0, 9_000.0), (50_000.0, 50_000.0)]), sampler());
        while sampler.isolates().is_none() {
            host.step(&mut sampler);
        }
        // From now on no VM runs. After five seconds all are back.
        for _ in 0..52 {
            host.now += STEP;
            host.look(&mut sampler);
        }
        assert_eq!(sampler.out().count(), 0);
        assert_eq!(sampler.known[&VmId(0)].obstacle, Some(Obstacle::GaveUp));
    }

    #[test]
    fn phases_between_windows_count() {
        let (mut host, mut sampler) = (Host::new(&[(2_000.0, 10_000.0), (50_000.0, 50_000.0)]), sampler());
        host.vms[1].0.has_permit = false;
        host.run(&mut sampler, 40);
        while host.here() < 2 || sampler.isolates().is_some() {
            host.step(&mut sampler);
        }
        // No further window, but three times the misses of its own: three times the charge.
        let mut charge_at = |rate: f64| {
            host.vms[0].2 = rate;
            host.now += STEP;
            let seen = &mut host.vms[0].0;
            (seen.counts.cycles, seen.counts.llc_misses) = (
                seen.counts.cycles + 100_000_000,
                seen.counts.llc_misses + (rate * 100.0) as u64,
            );
            // The disturber runs as before.
            let counts = &mut host.vms[1].0.counts;
            counts.cycles += 100_000_000;
            counts.llc_misses += 5_000_000;
            let seen: Vec<Seen> = host.vms.iter().map(|(seen, ..)| seen.clone()).collect();
            sampler.step(host.now, &seen, |_, _, _| Some(Obstacle::Resting));
            sampler.charge(VmId(0)).unwrap().part.unwrap() * rate
        };
        assert!((charge_at(30_000.0) - 6_000.0).abs() < 150.0);
        // A milder neighbour: what the VM misses by itself is charged at least.
        assert!((charge_at(2_500.0) - 2_000.0).abs() < 10.0);
        assert!((charge_at(1_500.0) - 1_500.0).abs() < 10.0);
    }

    proptest! {
        /// VMs come and go at random. In the end, no VM must be elsewhere.
        #[test]
        fn nobody_is_out_in_the_end_whatever_happens(gone in prop::collection::vec((0usize..200, 0u128..4), 0..6)) {
            let rates = [(2_000.0, 9_000.0), (50_000.0, 50_000.0), (3_000.0, 8_000.0), (100.0, 5_000.0)];
            let (mut host, mut sampler) = (Host::new(&rates), sampler());
            for step in 0..200 {
                host.step(&mut sampler);
                host.vms.retain(|(seen, ..)| !gone.contains(&(step, seen.vm.0)));
                // The VM with the cache is never out itself.
                prop_assert!(sampler.isolates().is_none_or(|(vm, _)| !sampler.is_out(vm)));
            }
            // All VMs stop, so an open window is abandoned.
            for _ in 0..60 {
                host.now += STEP;
                host.look(&mut sampler);
            }
            prop_assert_eq!(sampler.out().count(), 0);
        }
    }
}
