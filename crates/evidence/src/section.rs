//! Sections of a report: what was measured beside the crossover, or why it could not be.
//!
//! # Interval
//! The 95 percent interval is that of the *median*, from order statistics: with `n` repetitions that do not depend on each other,
//! the number of them below the true median is binomial with a half, so the `k`-th smallest and the `k`-th greatest value enclose
//! it with a known probability. The interval takes the greatest `k` whose probability is at least 95 percent. It assumes nothing
//! about distributions, which latencies would not respect. Fewer than [`REPETITIONS_MIN`] repetitions have no such interval, and
//! a prediction is not judged by them.

use std::fmt;

use homenode_units::stats::median;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Fewest repetitions with an interval: all of `n` values are on one side of the median with a chance of 2 / 2^n.
pub const REPETITIONS_MIN: usize = 6;
/// The chance that an interval does not hold the true median.
const OUTSIDE_MAX: f64 = 0.05;
/// Most values whose interval is computed exactly. For more, the binomial distribution is taken as normal.
const EXACT_MAX: usize = 1000;
/// Two-sided 95 percent point of the normal distribution.
const NORMAL_95: f64 = 1.96;

/// What a section is about, in the order of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Topic {
    /// Latencies, bandwidths and caches of the host.
    Machine,
    /// Whether hardware counters count what they should.
    Counters,
    /// What a neighbour on the same cache costs.
    Contention,
    /// Whether a permit protects a VM from its neighbour.
    Kyoto,
    /// What a home is worth against scattered vCPUs and memory.
    Placement,
    /// How fast memory moves.
    Moving,
    /// Whether trackers see the memory that a program uses.
    WorkingSet,
    /// What the kernel's NUMA balancing costs.
    Balancing,
    /// The drop-in for numad against numad.
    Numad,
    /// Times of requests, alone and beside a neighbour.
    Requests,
}

impl Topic {
    /// All topics, in the order of a report.
    pub const ALL: [Topic; 10] = [
        Topic::Machine,
        Topic::Counters,
        Topic::Contention,
        Topic::Kyoto,
        Topic::Placement,
        Topic::Moving,
        Topic::WorkingSet,
        Topic::Balancing,
        Topic::Numad,
        Topic::Requests,
    ];

    /// Returns the name of options and documents.
    pub fn name(self) -> &'static str {
        match self {
            Topic::Machine => "machine",
            Topic::Counters => "counters",
            Topic::Contention => "contention",
            Topic::Kyoto => "kyoto",
            Topic::Placement => "placement",
            Topic::Moving => "moving",
            Topic::WorkingSet => "working-set",
            Topic::Balancing => "balancing",
            Topic::Numad => "numad",
            Topic::Requests => "requests",
        }
    }

    /// Returns the question that the section answers.
    pub fn question(self) -> &'static str {
        match self {
            Topic::Machine => "How fast is memory, near and far?",
            Topic::Counters => "Do the hardware counters count correctly?",
            Topic::Contention => "What does a neighbour on the same cache cost?",
            Topic::Kyoto => "Does a limit on a neighbour's cache use protect a VM?",
            Topic::Placement => "Is a VM faster if its vCPUs and memory are on one node?",
            Topic::Moving => "How fast does memory move between nodes?",
            Topic::WorkingSet => "Does the agent see how much memory a VM uses?",
            Topic::Balancing => "What does the kernel's own NUMA balancing cost?",
            Topic::Numad => "How does the agent compare with numad?",
            Topic::Requests => "How much longer do requests take beside a neighbour?",
        }
    }
}

impl fmt::Display for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What ran while a section was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum With {
    /// VMs that the command started, under KVM.
    OwnVms,
    /// VMs that the command started, emulated: every step ran, but times and speeds mean nothing.
    EmulatedVms,
    /// The operator's VMs.
    NamedVms,
    /// Processes pinned to CPUs, without VMs.
    Processes,
}

/// Whether a result speaks for letting the agent act on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Bearing {
    /// There is something to gain here, or the agent gained it.
    For,
    /// It cost more than it gained, or what the agent relies on does not work here.
    Against,
    /// It says nothing about that.
    Neither,
}

/// One measurement of a report, or why it could not be made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Section {
    /// What it is about.
    pub topic: Topic,
    /// How it is measured, in whole sentences, without names of VMs, users, hosts or files.
    pub method: String,
    /// What came out.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// What came out of a section.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", tag = "outcome")]
pub enum Outcome {
    /// It was measured.
    Measured {
        /// What ran meanwhile.
        with: With,
        /// What it means for the operator, in a sentence or two, without names of VMs, users, hosts or files.
        means: String,
        /// Whether it speaks for the agent.
        bearing: Bearing,
        /// The figures, in the order in which they are shown. Those with the same unit are drawn on one scale.
        figures: Vec<Figure>,
    },
    /// It could not be measured here.
    NotPossible {
        /// The reason and the remedy if there is one, without names of VMs, users, hosts or files.
        why: String,
        /// What the system or a program said, word for word. It may name things, and is left out of what is shared.
        #[serde(default)]
        detail: Option<String>,
    },
}

impl Section {
    /// Makes a section that was measured.
    pub fn measured(
        topic: Topic,
        with: With,
        method: impl Into<String>,
        means: impl Into<String>,
        bearing: Bearing,
        figures: Vec<Figure>,
    ) -> Section {
        let (method, means) = (method.into(), means.into());
        let outcome = Outcome::Measured {
            with,
            means,
            bearing,
            figures,
        };
        Section {
            topic,
            method,
            outcome,
        }
    }

    /// Makes a section that could not be measured.
    pub fn not_possible(
        topic: Topic,
        method: impl Into<String>,
        why: impl Into<String>,
        detail: Option<String>,
    ) -> Section {
        let why = why.into();
        Section {
            topic,
            method: method.into(),
            outcome: Outcome::NotPossible { why, detail },
        }
    }
}

/// One figure: repetitions of the same measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Figure {
    /// What was measured, such as `victim beside a thrasher`, without names.
    pub what: String,
    /// The VM that it is of, if the operator named it.
    #[serde(default)]
    pub vm: Option<String>,
    /// Unit of all its numbers, such as `ns`, `percent`, `GB/s`.
    pub unit: String,
    /// The value of each repetition, in the order in which they were measured.
    pub values: Vec<f64>,
    /// Number of repetitions that gave no value.
    #[serde(default)]
    pub lost: usize,
    /// Median of the values; `None` without values.
    pub median: Option<f64>,
    /// Low end of the 95 percent interval of the median; `None` for too few repetitions.
    pub low: Option<f64>,
    /// High end of that interval.
    pub high: Option<f64>,
    /// What was expected.
    #[serde(default)]
    pub predicted: Option<Prediction>,
}

/// What a model or a description expects of a figure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Prediction {
    /// The value, in the figure's unit.
    pub value: f64,
    /// Who says so, such as `the twin of epyc7763-nps4` or `preset epyc7763-nps4`.
    pub by: String,
    /// Whether the measured interval contains it; `None` without an interval.
    pub is_within: Option<bool>,
}

impl Figure {
    /// Summarises repetitions. A value that is not finite counts as a repetition that gave none.
    pub fn of(what: impl Into<String>, unit: impl Into<String>, values: &[f64]) -> Figure {
        let kept: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
        let interval = interval(&kept);
        Figure {
            what: what.into(),
            vm: None,
            unit: unit.into(),
            lost: values.len() - kept.len(),
            median: median(kept.iter().copied()),
            low: interval.map(|(low, _)| low),
            high: interval.map(|(_, high)| high),
            values: kept,
            predicted: None,
        }
    }

    /// Says which VM of the operator's it is of.
    #[must_use]
    pub fn of_vm(mut self, vm: impl Into<String>) -> Figure {
        self.vm = Some(vm.into());
        self
    }

    /// Puts an expected value beside it, if it is finite.
    #[must_use]
    pub fn predicted(mut self, value: f64, by: impl Into<String>) -> Figure {
        let is_within = self
            .low
            .zip(self.high)
            .map(|(low, high)| (low..=high).contains(&value));
        self.predicted = value.is_finite().then(|| Prediction {
            value,
            by: by.into(),
            is_within,
        });
        self
    }
}

/// Returns the 95 percent interval of the values' median; `None` for too few values.
fn interval(values: &[f64]) -> Option<(f64, f64)> {
    let mut ascending = values.to_vec();
    ascending.sort_by(f64::total_cmp);
    let count = ascending.len();
    if count > EXACT_MAX {
        let cut = (count as f64 / 2.0 - (count as f64).sqrt() * NORMAL_95 / 2.0).floor() as usize;
        return Some((ascending[cut], ascending[count - 1 - cut]));
    }
    let (mut outside, mut ways) = (0.0, (0.5_f64).powi(i32::try_from(count).ok()?));
    let mut cut = None;
    for at in 0..count / 2 {
        // The chance that at most `at` values are below the median, or at most `at` above it.
        outside += 2.0 * ways;
        if outside > OUTSIDE_MAX {
            break;
        }
        cut = Some(at);
        ways *= (count - at) as f64 / (at + 1) as f64;
    }
    let cut = cut?;
    Some((*ascending.get(cut)?, *ascending.get(count - 1 - cut)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_units::Chance;

    #[test]
    fn an_interval_holds_the_true_median_as_often_as_it_says() {
        assert_eq!(Figure::of("few", "ns", &[1.0; REPETITIONS_MIN - 1]).low, None);
        assert_eq!(Figure::of("none", "ns", &[]).median, None);
        // Tables of the sign test give these ranks.
        for (count, rank) in [
            (6, 1),
            (8, 1),
            (9, 2),
            (10, 2),
            (20, 6),
            (30, 10),
            (1000, 469),
            (1002, 470),
        ] {
            let values: Vec<f64> = (1..=count).rev().map(f64::from).collect();
            let figure = Figure::of("ranks", "ns", &values);
            assert_eq!(figure.low, Some(f64::from(rank)), "{count}");
            assert_eq!(figure.high, Some(f64::from(count + 1 - rank)), "{count}");
        }
        let mut chance = Chance::labelled(1, "interval", 0);
        let draws = 2000;
        let held = (0..draws).filter(|_| {
            // A skewed distribution, with median 1/4.
            let values: Vec<f64> = (0..9).map(|_| chance.unit().powi(2)).collect();
            let figure = Figure::of("skewed", "ns", &values);
            (figure.low.unwrap()..=figure.high.unwrap()).contains(&0.25)
        });
        let share = held.count() as f64 / f64::from(draws);
        assert!((0.945..0.975).contains(&share), "{share}");
    }

    #[test]
    fn a_prediction_is_judged_by_the_interval_and_by_nothing_else() {
        let values = [10.0, 11.0, 12.0, 13.0, 14.0, 15.0, f64::NAN];
        let figure = Figure::of("latency", "ns", &values);
        assert_eq!((figure.values.len(), figure.lost), (6, 1));
        for (expected, is_within) in [(9.9, false), (10.0, true), (15.0, true), (15.1, false)] {
            let judged = figure.clone().predicted(expected, "the twin").predicted.unwrap();
            assert_eq!(judged.is_within, Some(is_within));
        }
        assert_eq!(figure.clone().predicted(f64::NAN, "the twin").predicted, None);
        let few = Figure::of("latency", "ns", &values[..5]).predicted(12.0, "the twin");
        assert_eq!(few.predicted.unwrap().is_within, None);
    }

    #[test]
    fn a_topic_has_the_name_that_documents_have() {
        for (at, topic) in Topic::ALL.into_iter().enumerate() {
            assert_eq!(serde_json::to_value(topic).unwrap(), topic.name());
            assert_eq!(topic as usize, at);
        }
    }
}
