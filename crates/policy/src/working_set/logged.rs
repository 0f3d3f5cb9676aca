//! The paper's algorithm on logs of guest frames, and repairs to it.
//!
//! # Algorithm [PRL, section 4.4]
//! At the end of every interval `mu`, `dist[i]` is the number of distinct frames that were logged at least tau times. It is
//! the working set once `dist[i] - dist[i - omega] = 0`, that is, once nothing new has become hot for omega observations.
//!
//! # Its errors, and the options that repair them
//! - *Exact equality.* With one stray page per interval the rule is never met. [`Config::tolerance`] allows a share of `dist`.
//! - *No ageing.* Hot pages stay hot, so the working set never shrinks. [`Ageing::Halve`] halves all counts after each
//!   interval; [`Ageing::Restart`] clears them whenever the rule is met.
//! - *Logs are TLB misses, not uses.* A page that is hot enough to stay in the TLB is logged once and never again, while a
//!   scan of cold pages is logged tau times in tau passes. [`HeatBy::Windows`] counts in how many of the last intervals a
//!   page was seen at all, and with [`Flush::EachWindow`] the tracker flushes the TLBs between intervals, so that a page in
//!   use is logged once in each.
//!
//! [`Config::published`] has the paper's figures and none of the repairs; [`Config::repaired`] has all of them. The tests
//! here and `homenode reproduce prl` compare them.
//!
//! # Properties (tests of the same name)
//! - `plain_prl_ends_when_nothing_new_was_hot_for_omega_intervals`
//! - `one_stray_page_keeps_plain_prl_from_ending_and_not_the_tolerant`
//! - `a_working_set_that_shrinks_is_seen_by_ageing_only`
//! - `pages_that_stay_in_the_tlb_are_hot_only_where_it_is_flushed`
//! - `dist_grows_with_the_log_and_falls_with_tau`
//! - `memory_that_is_unplugged_is_no_longer_hot`
//!
//! # Departures from the source
//! - The paper says both "at least tau times" and "more than tau times"; here it is at least.
//! - With ageing, `dist` falls as well as rises, so the rule applies to the absolute difference.

use std::collections::VecDeque;

use homenode_host::observation::{ObservationRef, Sees, Tracker, UsedRef};
use homenode_units::{Bytes, Ns, Pages};

use super::estimate::kind;
use super::heat::Heat;
use super::{Certainty, Curve, Estimate, Estimator, Sequence, Settled, Unfit};

/// What makes a page hot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeatBy {
    /// The page was logged at least this many times. Counts end at 255.
    Logs {
        /// Number of times, at least 1 (tau).
        tau: u8,
        /// How the counts age.
        ageing: Ageing,
    },
    /// The page was seen in at least `tau` of the last `of` intervals.
    Windows {
        /// Number of intervals in which it must be seen, at least 1.
        tau: u32,
        /// Number of last intervals that count, at most 8.
        of: u32,
    },
}

/// How counts age.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ageing {
    /// Not at all (the paper).
    Never,
    /// Counts are halved at the end of each interval.
    Halve,
    /// Counts are cleared when the stop rule is met.
    Restart,
}

/// When the tracker flushes the TLBs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// Never (the paper).
    Never,
    /// At the end of each interval, so that every used page is walked to at least once in each.
    EachWindow,
}

/// Settings of an estimator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// What makes a page hot.
    pub heat: HeatBy,
    /// Number of intervals over which nothing new may become hot (omega), at least 1.
    pub omega: u32,
    /// The observation interval (mu). Shorter observations are combined.
    pub mu: Ns,
    /// Share of the hot pages by which `dist` may change over omega intervals, at least 0.
    pub tolerance: f64,
    /// When the tracker flushes the TLBs.
    pub flush: Flush,
    /// The guest kernel's footprint (epsilon).
    pub epsilon: Bytes,
}

impl Config {
    /// The paper's algorithm with its figures (section 5): tau 50, mu 30 s, omega 120 s.
    pub const fn published() -> Config {
        Config {
            heat: HeatBy::Logs {
                tau: 50,
                ageing: Ageing::Never,
            },
            omega: 4,
            mu: Ns::from_secs(30),
            tolerance: 0.0,
            flush: Flush::Never,
            epsilon: Bytes::ZERO,
        }
    }

    /// The paper's prototype for PML (section 3.4): every logged frame counts.
    pub const fn pml() -> Config {
        Config {
            heat: HeatBy::Logs {
                tau: 1,
                ageing: Ageing::Never,
            },
            ..Config::published()
        }
    }

    /// All repairs: a page is hot if it is seen in two of the last four intervals, 1 percent of pages may come and go, and
    /// the TLBs are flushed. This also suits trackers that report each page once per interval.
    pub const fn repaired() -> Config {
        Config {
            heat: HeatBy::Windows { tau: 2, of: 4 },
            tolerance: 0.01,
            flush: Flush::EachWindow,
            ..Config::published()
        }
    }

    fn check(&self) {
        assert!(self.omega > 0, "the stop rule looks back at least one interval");
        assert!(self.mu > Ns::ZERO, "an interval has a length");
        assert!(
            self.tolerance >= 0.0,
            "a tolerance is a share, not {}",
            self.tolerance
        );
        match self.heat {
            HeatBy::Logs { tau, .. } => assert!(tau > 0, "a hot page was logged at least once"),
            HeatBy::Windows { tau, of } => {
                assert!(
                    (1..=8).contains(&of) && (1..=of).contains(&tau),
                    "{tau} of {of} intervals"
                );
            }
        }
    }
}

/// Estimates from logs of frames.
#[derive(Clone, Debug)]
pub struct Logged {
    config: Config,
    sequence: Sequence,
    heat: Heat,
    /// Number of hot pages at the end of each of the last omega + 1 intervals, newest last.
    dist: VecDeque<u64>,
    /// Time since the end of the last interval.
    elapsed: Ns,
    /// Time that the counts cover.
    counted: Ns,
    outside: u64,
    lost: u64,
}

impl Logged {
    /// Returns an estimator without observations.
    ///
    /// # Panics
    /// Panics if a figure of the configuration is out of its range.
    pub fn new(config: Config) -> Logged {
        config.check();
        Logged {
            config,
            sequence: Sequence::default(),
            heat: Heat::default(),
            dist: VecDeque::with_capacity(config.omega as usize + 1),
            elapsed: Ns::ZERO,
            counted: Ns::ZERO,
            outside: 0,
            lost: 0,
        }
    }

    /// Returns the estimator's settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the number of hot pages at the end of each of the last intervals, newest last (the paper's `dist`). There are
    /// at most omega + 1 of them.
    pub fn dist(&self) -> impl Iterator<Item = u64> {
        self.dist.iter().copied()
    }

    /// Returns the frames that are hot according to the present counts, ascending. These are the ones to load first when a VM
    /// is restored.
    pub fn hot_frames(&self) -> impl Iterator<Item = u64> {
        let hot = self.heat.warm().filter(|(_, byte)| self.is_hot(*byte));
        hot.map(|(frame, _)| frame)
    }

    fn is_hot(&self, byte: u8) -> bool {
        match self.config.heat {
            HeatBy::Logs { tau, .. } => byte >= tau,
            HeatBy::Windows { tau, .. } => byte.count_ones() >= tau,
        }
    }

    /// Counts the frames of a log; returns the number of entries whose frame the VM does not have.
    fn count(&mut self, log: &[u64]) -> u64 {
        let frames = self.heat.frames();
        let mut outside = 0;
        match self.config.heat {
            HeatBy::Logs { .. } => {
                for frame in log {
                    if *frame < frames {
                        let count = self.heat.at(*frame);
                        *count = count.saturating_add(1);
                    } else {
                        outside += 1;
                    }
                }
            }
            HeatBy::Windows { .. } => {
                for frame in log {
                    if *frame < frames {
                        *self.heat.at(*frame) |= 1;
                    } else {
                        outside += 1;
                    }
                }
            }
        }
        outside
    }

    /// Returns the number of hot pages and of warm pages.
    fn split(&self, histogram: &[u64; 256]) -> (Pages, Pages) {
        let (mut hot, mut warm) = (0, 0);
        for (byte, count) in histogram.iter().enumerate().skip(1) {
            *(if self.is_hot(byte as u8) {
                &mut hot
            } else {
                &mut warm
            }) += count;
        }
        (Pages(hot), Pages(warm))
    }

    /// Returns whether the stop rule is met.
    fn settled(&self) -> Settled {
        let (Some(last), Some(first)) = (self.dist.back(), self.dist.front()) else {
            return Settled::No;
        };
        let allowed = self.config.tolerance * *last as f64;
        if self.dist.len() > self.config.omega as usize && last.abs_diff(*first) as f64 <= allowed {
            Settled::Yes
        } else {
            Settled::No
        }
    }

    fn close(&mut self, seen: &ObservationRef<'_>) -> Estimate {
        let config = self.config;
        let histogram = self.heat.histogram();
        let (hot, warm) = self.split(&histogram);
        if self.dist.len() > config.omega as usize {
            self.dist.pop_front();
        }
        self.dist.push_back(hot.0);
        let settled = self.settled();
        let (window, curve) = match config.heat {
            HeatBy::Logs { .. } => {
                let often = matches!(seen.tracker, Tracker::Prl | Tracker::Exact);
                let seconds = self.counted.as_secs_f64();
                let curve = often.then(|| Curve::of_counts(&histogram, config.epsilon, seconds));
                (self.counted, curve)
            }
            HeatBy::Windows { of, .. } => (
                self.counted.min(Ns(self.elapsed.0.saturating_mul(u64::from(of)))),
                None,
            ),
        };
        let size = hot.to_bytes() + config.epsilon;
        let unseen = match seen.tracker.sees() {
            Sees::All => size + (warm + seen.blind.min(seen.memory)).to_bytes(),
            Sees::Writes => (size + warm.to_bytes()).max(seen.memory.to_bytes()),
        };
        let estimate = Estimate {
            tracker: seen.tracker,
            at: seen.at,
            window,
            size,
            least: size,
            most: unseen,
            certainty: Certainty::Bounds,
            hot: hot.to_bytes(),
            warm: warm.to_bytes(),
            kernel: config.epsilon,
            settled,
            curve,
            outside: std::mem::take(&mut self.outside),
            lost: std::mem::take(&mut self.lost),
        };
        self.age(settled);
        estimate.within(seen.memory, seen.memory)
    }

    /// Ages the heat at the end of an interval.
    fn age(&mut self, settled: Settled) {
        match self.config.heat {
            HeatBy::Logs {
                ageing: Ageing::Never,
                ..
            } => {}
            HeatBy::Logs {
                ageing: Ageing::Halve,
                ..
            } => {
                self.heat.each(|count| count / 2);
                self.counted = Ns(self.counted.0 / 2);
            }
            HeatBy::Logs {
                ageing: Ageing::Restart,
                ..
            } => {
                if settled == Settled::Yes {
                    self.heat.each(|_| 0);
                    self.dist.clear();
                    self.counted = Ns::ZERO;
                }
            }
            HeatBy::Windows { of, .. } => {
                // The interval that just ended moves up by a bit, and the oldest one is dropped.
                let kept = (u32::from(u8::MAX) >> (8 - of)) as u8;
                self.heat.each(|windows| (windows << 1) & kept);
            }
        }
        self.elapsed = Ns::ZERO;
    }

    #[cfg(test)]
    fn heat_bytes(&self) -> usize {
        self.heat.bytes()
    }
}

impl Estimator for Logged {
    fn observe(&mut self, seen: &ObservationRef<'_>) -> Result<Option<Estimate>, Unfit> {
        let UsedRef::Frames(log) = seen.seen else {
            return Err(Unfit::Kind {
                reads: "frames",
                tracker: seen.tracker,
                given: kind(&seen.seen),
            });
        };
        self.sequence.next(seen)?;
        self.heat.resize(seen.frames);
        self.outside += self.count(log);
        self.lost = self.lost.saturating_add(seen.lost);
        self.elapsed = Ns(self.elapsed.0.saturating_add(seen.interval.0));
        self.counted += seen.interval;
        Ok((self.elapsed >= self.config.mu).then(|| self.close(seen)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::observation;
    use super::*;
    use proptest::prelude::*;

    const SECOND: Ns = Ns::from_secs(1);

    fn plain(tau: u8) -> Config {
        Config {
            heat: HeatBy::Logs {
                tau,
                ageing: Ageing::Never,
            },
            mu: SECOND,
            ..Config::published()
        }
    }

    /// Returns the estimates, with one log per second.
    fn run(config: Config, logs: &[Vec<u64>]) -> Vec<Estimate> {
        let mut estimator = Logged::new(config);
        let estimate = |(at, log): (usize, &Vec<u64>)| {
            let seen = observation(Tracker::Prl, at as u64 + 1, UsedRef::Frames(log));
            estimator.observe(&seen).unwrap().unwrap()
        };
        logs.iter().enumerate().map(estimate).collect()
    }

    fn pages(estimates: &[Estimate]) -> Vec<u64> {
        estimates
            .iter()
            .map(|estimate| estimate.hot.to_pages().0)
            .collect()
    }

    fn first_settled(estimates: &[Estimate]) -> Option<usize> {
        estimates
            .iter()
            .position(|estimate| estimate.settled == Settled::Yes)
    }

    #[test]
    fn plain_prl_ends_when_nothing_new_was_hot_for_omega_intervals() {
        // Ten frames are logged twice a second each. tau 5 is reached in the third interval, so dist is 0 0 10 10 10 10 10.
        // The seventh interval is the first whose dist equals the one four before.
        let log: Vec<u64> = (0..10).chain(0..10).collect();
        let estimates = run(plain(5), &vec![log; 8]);
        assert_eq!(pages(&estimates), [0, 0, 10, 10, 10, 10, 10, 10]);
        assert_eq!(first_settled(&estimates), Some(6));
        let last = &estimates[6];
        assert_eq!(
            (last.size, last.window, last.lost),
            (Pages(10).to_bytes(), Ns::from_secs(7), 0)
        );
        // This is the cost of five pages less: each was logged 14 times in 7 s.
        assert_eq!(last.cost_of_taking(Pages(5).to_bytes()), Some(10.0));
    }

    #[test]
    fn one_stray_page_keeps_plain_prl_from_ending_and_not_the_tolerant() {
        // The program has 90 hot frames, and each second another frame is logged, only once.
        let logs: Vec<Vec<u64>> = (0..10)
            .map(|second| (0..90).chain([90 + second]).collect())
            .collect();
        assert_eq!(first_settled(&run(plain(1), &logs)), None);
        let tolerant = Config {
            tolerance: 0.05,
            ..plain(1)
        };
        assert_eq!(first_settled(&run(tolerant, &logs)), Some(4));
    }

    #[test]
    fn a_working_set_that_shrinks_is_seen_by_ageing_only() {
        let logs: Vec<Vec<u64>> = (0..20)
            .map(|second| {
                let frames = if second < 8 { 80 } else { 20 };
                (0..frames).flat_map(|frame| [frame; 4]).collect()
            })
            .collect();
        let with = |ageing| {
            let heat = HeatBy::Logs { tau: 3, ageing };
            *pages(&run(Config { heat, ..plain(3) }, &logs)).last().unwrap()
        };
        assert_eq!(with(Ageing::Never), 80);
        assert_eq!(with(Ageing::Halve), 20);
        assert_eq!(with(Ageing::Restart), 20);
        let repaired = Config {
            mu: SECOND,
            ..Config::repaired()
        };
        let repaired = run(repaired, &logs);
        // Frames 20 to 79 were last seen in the eighth interval, so until the tenth they were seen in two of the last four.
        assert_eq!(pages(&repaired)[8..12], [80, 80, 20, 20]);
        assert_eq!(repaired[19].window, Ns::from_secs(4));
    }

    #[test]
    fn pages_that_stay_in_the_tlb_are_hot_only_where_it_is_flushed() {
        // Frames 0 to 9 are always in use. Without flushes they are walked to once; with flushes, once a second. A scan of
        // the other 90 runs every eighth second.
        let log = |flush: Flush, second: u64| -> Vec<u64> {
            let resident = 0..if second == 0 || flush == Flush::EachWindow {
                10
            } else {
                0
            };
            let scan = 10..if second.is_multiple_of(8) { 100 } else { 10 };
            resident.chain(scan).collect()
        };
        let logs = |flush| (0..40).map(|second| log(flush, second)).collect::<Vec<_>>();
        // With tau 5, the frames of the scan are hot, as it ran five times, but the resident frames are not, as they were
        // logged once.
        assert_eq!(pages(&run(plain(5), &logs(Flush::Never))).last(), Some(&90));
        let repaired = Config {
            mu: SECOND,
            ..Config::repaired()
        };
        assert_eq!(pages(&run(repaired, &logs(Flush::EachWindow))).last(), Some(&10));
    }

    #[test]
    fn what_the_tlbs_hold_and_what_is_only_read_widen_the_interval() {
        let frames: Vec<u64> = (0..30).collect();
        let of = |tracker| {
            let seen = ObservationRef {
                blind: Pages(7),
                lost: 3,
                ..observation(tracker, 1, UsedRef::Frames(&frames))
            };
            Logged::new(plain(1)).observe(&seen).unwrap().unwrap()
        };
        let prl = of(Tracker::Prl);
        assert_eq!(
            (prl.least, prl.most, prl.lost),
            (Pages(30).to_bytes(), Pages(37).to_bytes(), 3)
        );
        assert_eq!(of(Tracker::Pml).most, Pages(100).to_bytes());
        assert_eq!(of(Tracker::Pml).curve, None);
    }

    #[test]
    fn short_observations_are_put_together() {
        let mut estimator = Logged::new(Config {
            mu: Ns::from_secs(3),
            ..plain(1)
        });
        let mut due = |second| {
            let seen = observation(Tracker::Prl, second, UsedRef::Frames(&[1]));
            estimator.observe(&seen).unwrap().is_some()
        };
        assert_eq!(
            [due(1), due(2), due(3), due(4), due(5), due(6)],
            [false, false, true, false, false, true]
        );
    }

    #[test]
    fn memory_that_is_unplugged_is_no_longer_hot() {
        let frames: Vec<u64> = (0..100).collect();
        let mut estimator = Logged::new(plain(1));
        let whole = observation(Tracker::Prl, 1, UsedRef::Frames(&frames));
        estimator.observe(&whole).unwrap();
        let half = ObservationRef {
            memory: Pages(50),
            frames: 50,
            ..observation(Tracker::Prl, 2, UsedRef::Frames(&frames))
        };
        let estimate = estimator.observe(&half).unwrap().unwrap();
        assert_eq!((estimate.hot, estimate.outside), (Pages(50).to_bytes(), 50));
    }

    proptest! {
        #[test]
        fn dist_grows_with_the_log_and_falls_with_tau(
            logs in prop::collection::vec(prop::collection::vec(0_u64..100, 0..300), 1..8), tau in 1_u8..9,
        ) {
            let dist = pages(&run(plain(tau), &logs));
            prop_assert!(dist.is_sorted());
            let stricter = pages(&run(plain(tau + 1), &logs));
            prop_assert!(dist.iter().zip(&stricter).all(|(more, less)| more >= less));
            // The expected frames are counted directly.
            let hot = (0..100).filter(|frame| logs.iter().flatten().filter(|log| *log == frame).count() >= usize::from(tau));
            prop_assert_eq!(*dist.last().unwrap(), hot.count() as u64);
        }

        #[test]
        fn a_page_seen_costs_at_most_16_bytes(frames in prop::collection::btree_set(0_u64..100, 1..100)) {
            let frames: Vec<u64> = frames.into_iter().collect();
            let mut estimator = Logged::new(plain(1));
            estimator.observe(&observation(Tracker::Prl, 1, UsedRef::Frames(&frames))).unwrap();
            prop_assert!(estimator.heat_bytes() <= 16 * frames.len());
        }
    }
}
