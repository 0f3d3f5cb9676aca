//! The meter: measures a VM's pollution between two readings of its counters.

use homenode_host::{Counters, VcpuSample, VmSample};
use homenode_units::Ns;
use serde::{Deserialize, Serialize};

/// Measure of a VM's pollution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Indicator {
    /// Equation 3.1 multiplied by the time run.
    #[default]
    #[serde(rename = "equation-3.1")]
    Equation31,
    /// LLC misses as counted.
    RawMisses,
}

/// Which vCPUs are metered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Watched {
    /// The one that ran longest stands for all (the paper's rule: vCPUs of a VM behave alike).
    #[default]
    Representative,
    /// All vCPUs.
    All,
}

/// How pollution is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meter {
    /// The measure.
    pub indicator: Indicator,
    /// Which vCPUs are metered.
    pub watched: Watched,
    /// Frequency at which unhalted cycles count, in kHz.
    pub clock_khz: u64,
}

/// Least share of a vCPU's running time for which its counters must have counted. Below this, the kernel's scaled-up value is a
/// guess. It is not a setting: on a host samples are counted all the time, and only the simulator's readings may have a lower
/// share.
pub const COUNTED_SHARE_MIN: f64 = 0.5;
/// If a vCPU ran for less than this, the sample is too short to call its counters wrong. This is a limit of the counters, not
/// a setting.
const JUDGED_RUN_MIN: Ns = Ns::from_millis(1);
/// Widths at which counters of hardware and of drivers wrap.
const COUNTER_BITS: [u32; 3] = [32, 40, 48];

/// Counters of one vCPU at one moment, cumulative.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// The counters, if there are any.
    pub counters: Option<Counters>,
    /// Time for which the vCPU ran.
    pub running_ns: Ns,
    /// Time for which its counters were on the hardware; values are scaled up for the rest. This is all of the time that it
    /// ran, unless more events than counters share the hardware.
    pub counted_ns: Ns,
}

impl From<&VcpuSample> for Reading {
    fn from(vcpu: &VcpuSample) -> Reading {
        Reading {
            counters: vcpu.counters,
            running_ns: vcpu.running_ns,
            counted_ns: vcpu.running_ns,
        }
    }
}

/// Counts of one vCPU between two readings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// LLC misses.
    pub llc_misses: u64,
    /// Cycles not halted.
    pub cycles: u64,
    /// Instructions retired.
    pub instructions: u64,
    /// Time for which the vCPU ran.
    pub running_ns: Ns,
}

/// Why a vCPU's or VM's pollution is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "why", rename_all = "kebab-case")]
pub enum Unmetered {
    /// The host has no counters for it, or none that counts at the LLC.
    Missing,
    /// Counters ran backwards: the vCPU's thread was replaced, or its counters were reset.
    Backwards,
    /// Counters wrapped around at this width.
    Wrapped {
        /// Width in bits.
        bits: u32,
    },
    /// There are more events than hardware counters, so each counted for too small a share of the time.
    Multiplexed {
        /// Share of the running time for which the events were counted.
        counted_share: f64,
    },
    /// The vCPU ran, but nothing was counted: the PMU exists in name only, as in many virtual machines.
    AllZero,
    /// There are more misses than any core can cause in the time that the vCPU ran.
    Implausible {
        /// Misses.
        llc_misses: u64,
        /// Time for which the vCPU ran.
        running_ns: Ns,
    },
}

impl std::fmt::Display for Unmetered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Unmetered::Missing => write!(
                f,
                "the host does not count its LLC misses; run on hardware whose PMU the kernel may use, or pass the PMU through"
            ),
            Unmetered::Backwards => {
                write!(
                    f,
                    "its counters ran backwards; measuring resumes in the next period"
                )
            }
            Unmetered::Wrapped { bits } => {
                write!(
                    f,
                    "its counters wrapped around at {bits} bits; measuring resumes in the next period"
                )
            }
            Unmetered::Multiplexed { counted_share } => write!(
                f,
                "its counters were on the hardware for only {:.0} percent of the time it ran; stop other users of perf",
                counted_share * 100.0
            ),
            Unmetered::AllZero => write!(
                f,
                "it ran, but its counters did not change: this PMU counts nothing; choose another meter or enable the PMU"
            ),
            Unmetered::Implausible {
                llc_misses,
                running_ns,
            } => write!(
                f,
                "{llc_misses} LLC misses in {running_ns} are more than a core can cause; the period is ignored"
            ),
        }
    }
}

impl std::error::Error for Unmetered {}

impl Counted {
    /// Returns the counts between two readings of one vCPU.
    pub fn between(prev: &Reading, cur: &Reading) -> Result<Counted, Unmetered> {
        let (Some(before), Some(now)) = (prev.counters, cur.counters) else {
            return Err(Unmetered::Missing);
        };
        let misses = before.llc_misses.zip(now.llc_misses);
        let (misses_before, misses_now) = misses.ok_or(Unmetered::Missing)?;
        let time = |before: Ns, now: Ns| now.0.checked_sub(before.0).map(Ns).ok_or(Unmetered::Backwards);
        let counted = Counted {
            llc_misses: grown(misses_before, misses_now)?,
            cycles: grown(before.cycles, now.cycles)?,
            instructions: grown(before.instructions, now.instructions)?,
            running_ns: time(prev.running_ns, cur.running_ns)?,
        };
        let ran = counted.running_ns;
        if ran < JUDGED_RUN_MIN {
            return Ok(counted);
        }
        let counted_ns = time(prev.counted_ns, cur.counted_ns)?;
        if counted_ns < ran && counted_ns.as_f64() < COUNTED_SHARE_MIN * ran.as_f64() {
            let counted_share = counted_ns.as_f64() / ran.as_f64();
            return Err(Unmetered::Multiplexed { counted_share });
        }
        if (counted.llc_misses, counted.cycles, counted.instructions) == (0, 0, 0) {
            return Err(Unmetered::AllZero);
        }
        // One miss per nanosecond is 64 GB/s from one core.
        if counted.llc_misses > ran.0 {
            return Err(Unmetered::Implausible {
                llc_misses: counted.llc_misses,
                running_ns: ran,
            });
        }
        Ok(counted)
    }

    /// Returns equation 3.1: LLC misses × frequency in kHz / unhalted cycles, that is misses per unhalted millisecond.
    /// Returns `None` without unhalted cycles.
    pub fn equation_3_1(&self, clock_khz: u64) -> Option<f64> {
        (self.cycles > 0).then(|| self.llc_misses as f64 * clock_khz as f64 / self.cycles as f64)
    }
}

fn grown(before: u64, now: u64) -> Result<u64, Unmetered> {
    now.checked_sub(before).ok_or_else(|| {
        let wraps = |bits: &u32| before >> bits == 0 && before >> (bits - 2) == 3 && now >> (bits - 2) == 0;
        match COUNTER_BITS.into_iter().find(wraps) {
            Some(bits) => Unmetered::Wrapped { bits },
            None => Unmetered::Backwards,
        }
    })
}

/// A VM's pollution in an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pollution {
    /// LLC misses that are charged to the VM.
    pub units: u64,
    /// Misses per millisecond of time run (equation 3.1, or counted misses over time run).
    pub per_running_ms: f64,
}

impl Pollution {
    /// Returns the part that is a VM's own; `part` is 0 to 1.
    #[must_use]
    pub fn part(self, part: f64) -> Pollution {
        Pollution {
            units: (self.units as f64 * part).round() as u64,
            per_running_ms: self.per_running_ms * part,
        }
    }
}

impl Meter {
    /// Returns a meter of equation 3.1 on one representative vCPU, as in the paper.
    pub fn new(clock_khz: u64) -> Meter {
        Meter {
            indicator: Indicator::default(),
            watched: Watched::default(),
            clock_khz,
        }
    }

    /// Returns the pollution of a VM between two samples. A vCPU that is in only one of them is ignored.
    pub fn vm(&self, prev: &VmSample, cur: &VmSample) -> Result<Pollution, Unmetered> {
        let pairs = cur
            .vcpus
            .iter()
            .filter_map(|vcpu| Some((prev.vcpu(vcpu.index)?, vcpu)));
        let readings = pairs.map(|(before, now)| (Reading::from(before), Reading::from(now)));
        self.pollution(readings)
    }

    /// Returns the pollution of a VM from two readings of each of its vCPUs. A VM that did not run did not pollute, whatever
    /// its counters report.
    pub fn pollution(
        &self,
        vcpus: impl IntoIterator<Item = (Reading, Reading)>,
    ) -> Result<Pollution, Unmetered> {
        let ran_in = |(prev, cur): &(Reading, Reading)| cur.running_ns.saturating_sub(prev.running_ns);
        let (mut ran_all, mut sum) = (Ns::ZERO, 0.0);
        let mut representative: Option<(Ns, (Reading, Reading))> = None;
        for pair in vcpus {
            let ran = ran_in(&pair);
            ran_all += ran;
            match self.watched {
                Watched::All if ran > Ns::ZERO => sum += self.units(&Counted::between(&pair.0, &pair.1)?),
                Watched::All => {}
                Watched::Representative => {
                    if ran > representative.map_or(Ns::ZERO, |(longest, _)| longest) {
                        representative = Some((ran, pair));
                    }
                }
            }
        }
        if let Some((ran, (prev, cur))) = representative {
            sum = self.units(&Counted::between(&prev, &cur)?) * (ran_all.as_f64() / ran.as_f64());
        }
        let per_running_ms = if ran_all == Ns::ZERO {
            0.0
        } else {
            sum / (ran_all.as_f64() / 1e6)
        };
        Ok(Pollution {
            units: (sum + 0.5) as u64,
            per_running_ms,
        })
    }

    fn units(&self, counted: &Counted) -> f64 {
        let raw = counted.llc_misses as f64;
        match self.indicator {
            Indicator::RawMisses => raw,
            Indicator::Equation31 => counted
                .equation_3_1(self.clock_khz)
                .map_or(raw, |per_ms| per_ms * counted.running_ns.as_f64() / 1e6),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GHZ_2_8: u64 = 2_800_000;

    fn reading(misses: u64, cycles: u64, ran_ms: u64) -> Reading {
        let running_ns = Ns::from_millis(ran_ms);
        Reading {
            counters: Some(Counters {
                instructions: cycles,
                cycles,
                llc_references: Some(misses),
                llc_misses: Some(misses),
            }),
            running_ns,
            counted_ns: running_ns,
        }
    }

    fn counted(prev: &Reading, cur: &Reading) -> Result<Counted, Unmetered> {
        Counted::between(prev, cur)
    }

    #[test]
    fn pollution_is_misses_per_unhalted_millisecond_times_time_run() {
        // 60000 misses in 56 M cycles, which take 20 ms at 2.8 GHz, are 3000 misses per unhalted ms.
        let start = reading(0, 0, 0);
        let cur = reading(60_000, 56_000_000, 20);
        let vcpu = counted(&start, &cur).unwrap();
        assert_eq!(vcpu.equation_3_1(GHZ_2_8), Some(3_000.0));
        let metered = Meter::new(GHZ_2_8).pollution([(start, cur)]).unwrap();
        assert_eq!((metered.units, metered.per_running_ms), (60_000, 3_000.0));
        // Half the CPU time halves the units of a slice, and leaves equation 3.1 unchanged.
        let half = Meter::new(GHZ_2_8).pollution([(start, reading(30_000, 28_000_000, 10))]);
        assert_eq!(
            half.unwrap(),
            Pollution {
                units: 30_000,
                per_running_ms: 3_000.0
            }
        );
    }

    #[test]
    fn one_vcpu_stands_for_all_or_all_are_counted() {
        let start = reading(0, 0, 0);
        let vcpus = [
            (start, reading(10_000, 28_000_000, 10)),
            (start, reading(90_000, 56_000_000, 20)),
        ];
        let mut meter = Meter::new(GHZ_2_8);
        // The second vCPU ran longest: 90000 misses in 20 ms, hence 135000 in the 30 ms of both.
        assert_eq!(meter.pollution(vcpus).unwrap().units, 135_000);
        meter.watched = Watched::All;
        assert_eq!(meter.pollution(vcpus).unwrap().units, 100_000);
    }

    #[test]
    fn the_indicators_differ_where_a_core_runs_slower_than_its_clock() {
        // At half the clock, 10 ms are 14 M cycles, so per unhalted millisecond at full clock the VM misses twice as often.
        let pair = [(reading(0, 0, 0), reading(10_000, 14_000_000, 10))];
        let mut meter = Meter::new(GHZ_2_8);
        assert_eq!(meter.pollution(pair).unwrap().units, 20_000);
        meter.indicator = Indicator::RawMisses;
        assert_eq!(meter.pollution(pair).unwrap().units, 10_000);
    }

    #[test]
    fn a_vm_that_did_not_run_polluted_nothing() {
        let parked = Reading {
            counters: None,
            ..reading(0, 0, 7)
        };
        let metered = Meter::new(GHZ_2_8).pollution([(parked, parked)]);
        assert_eq!(metered, Ok(Pollution::default()));
        assert_eq!(Meter::new(GHZ_2_8).pollution([]), Ok(Pollution::default()));
    }

    #[test]
    fn bad_counters_give_a_reason_and_no_figure() {
        let start = reading(1_000, 1_000_000, 10);
        let missing = Reading {
            counters: None,
            ..reading(0, 0, 20)
        };
        assert_eq!(counted(&start, &missing), Err(Unmetered::Missing));
        let mut no_llc = reading(2_000, 2_000_000, 20);
        if let Some(counters) = &mut no_llc.counters {
            counters.llc_misses = None;
        }
        assert_eq!(
            counted(&start, &no_llc),
            Err(Unmetered::Missing),
            "unknown is not zero"
        );
        assert_eq!(
            counted(&start, &reading(900, 2_000_000, 20)),
            Err(Unmetered::Backwards)
        );
        assert_eq!(
            counted(&start, &reading(1_000, 2_000_000, 9)),
            Err(Unmetered::Backwards)
        );
        let near_end = reading((1 << 48) - 5, 1_000_000, 10);
        assert_eq!(
            counted(&near_end, &reading(7, 2_000_000, 20)),
            Err(Unmetered::Wrapped { bits: 48 })
        );
        assert_eq!(
            counted(&start, &reading(1_000, 1_000_000, 20)),
            Err(Unmetered::AllZero)
        );
        let shared = Reading {
            counted_ns: Ns::from_millis(12),
            ..reading(2_000, 2_000_000, 20)
        };
        assert_eq!(
            counted(&start, &shared),
            Err(Unmetered::Multiplexed { counted_share: 0.2 })
        );
        let glitch = reading(1 << 40, 2_000_000, 20);
        assert!(matches!(
            counted(&start, &glitch),
            Err(Unmetered::Implausible { .. })
        ));
        // No misses while cycles pass is a valid figure: the VM did not pollute.
        assert_eq!(
            counted(&start, &reading(1_000, 2_000_000, 20))
                .unwrap()
                .llc_misses,
            0
        );
    }
}
