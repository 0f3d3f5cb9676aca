//! The log that the plugin writes when a program has ended; `homenode profile` reads it.
//!
//! One JSON object, whose first key is the version. The file is written under another name and then renamed, so a log is either
//! complete or absent. The reader trusts nothing: the file may have another version, be truncated, or have another format.

use std::fs;
use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// A program's behaviour.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Log {
    /// Version of this format: [`Log::VERSION`].
    pub version: u32,
    /// Size of the modelled private cache, bytes.
    pub private_bytes: u64,
    /// Size of a line, bytes.
    pub line_bytes: u64,
    /// Share of lines that were sampled when the program ended, in (0, 1].
    pub rate: f64,
    /// Number of vCPUs (in user mode: threads) that executed something.
    pub vcpus: u64,
    /// Instructions.
    pub instructions: u64,
    /// Loads.
    pub reads: u64,
    /// Stores.
    pub writes: u64,
    /// Lines requested from the LLC.
    pub llc_accesses: u64,
    /// Written lines that the private caches evicted.
    pub written_back: u64,
    /// Size of all used lines, in bytes, estimated from the sample.
    pub footprint_bytes: u64,
    /// Processes that the program forked; they were not followed.
    pub forks: u64,
    /// Number of times the program called exec; the new program was not followed.
    pub execs: u64,
    /// Size of the assumed reorder buffer, in instructions, for the overlap rule.
    pub window: u64,
    /// Size of the LLC that separates hits from misses for the overlap rule, bytes.
    pub llc_bytes: u64,
    /// Hits in that LLC, and how they overlap.
    pub hits: Flights,
    /// Misses of that LLC, and how they overlap.
    pub misses: Flights,
    /// Pages of 4 KiB, with their heat, sharing and writes.
    pub pages: Pages,
    /// Share of `llc_accesses` that misses, for an LLC of each of [`Log::capacities`] that only this program uses.
    pub curve: Vec<Point>,
    /// Share of loads and stores that misses, for a TLB of each of [`Log::reaches`].
    pub translation: Vec<Point>,
}

/// Accesses of one kind, and the time until all are done, in units of one access's latency (rule: `docs/PROFILE.md`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Flights {
    /// Number of accesses.
    pub accesses: u64,
    /// Accesses whose line a stream prefetcher had already requested.
    pub foreseen: u64,
    /// Time if each access that was not prefetched waits for the previous one.
    pub latencies_least: f64,
    /// Time if each access waits for those whose data contain a pointer to it.
    pub latencies_rule: f64,
    /// Time if no access waits for another.
    pub latencies_most: f64,
}

impl Flights {
    /// Returns the percentage of accesses whose line a prefetcher had already requested.
    pub fn foreseen_percent(&self) -> f64 {
        100.0 * self.foreseen as f64 / self.accesses.max(1) as f64
    }

    /// Returns the average number in flight if each access waits for the previous one: the lower bound.
    pub fn least(&self) -> f64 {
        self.over(self.latencies_least)
    }

    /// Returns the average number in flight by the rule.
    pub fn rule(&self) -> f64 {
        self.over(self.latencies_rule)
    }

    /// Returns the average number in flight if no access waits for another: the upper bound.
    pub fn most(&self) -> f64 {
        self.over(self.latencies_most)
    }

    fn over(&self, latencies: f64) -> f64 {
        if latencies > 0.0 {
            self.accesses as f64 / latencies
        } else {
            1.0
        }
    }

    /// Adds up the accesses of two cores, and the times of both.
    #[must_use]
    pub fn and(&self, other: &Flights) -> Flights {
        Flights {
            accesses: self.accesses + other.accesses,
            foreseen: self.foreseen + other.foreseen,
            latencies_least: self.latencies_least + other.latencies_least,
            latencies_rule: self.latencies_rule + other.latencies_rule,
            latencies_most: self.latencies_most + other.latencies_most,
        }
    }
}

/// Statistics of pages of 4 KiB. Accesses here are those that reach the LLC.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pages {
    /// Number of pages used.
    pub used: u64,
    /// Shares of accesses that go to the hottest pages, for each of [`Pages::PARTS`].
    pub heat: Vec<f64>,
    /// Share of pages that more than one vCPU used.
    pub shared: f64,
    /// Share of accesses that go to these shared pages.
    pub shared_accesses: f64,
    /// Share of the pages used in the second half of the run that were not written in that half.
    pub only_read: f64,
}

impl Pages {
    /// Shares of all pages, hottest first, for which `heat` has the share of accesses.
    pub const PARTS: [f64; 9] = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9];

    /// Returns the share of accesses that go to this part of the pages; `None` if it is not one of [`Pages::PARTS`].
    pub fn of_hottest(&self, part: f64) -> Option<f64> {
        let at = Pages::PARTS.iter().position(|known| *known == part)?;
        self.heat.get(at).copied()
    }
}

/// A point of a miss-ratio curve.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// Capacity.
    pub bytes: u64,
    /// Miss ratio at this capacity, in [0, 1].
    pub miss_ratio: f64,
}

/// Why a file cannot be read as a log.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The file cannot be read or written.
    #[error("{path}: {error}")]
    Io {
        /// Path of the file.
        path: String,
        /// The system's error.
        error: std::io::Error,
    },
    /// The file is larger than any log.
    #[error("{0}: not a log of the plugin: larger than {LOG_BYTES_MAX} bytes")]
    TooLarge(String),
    /// The file has another format.
    #[error("{path}: not a log of the plugin, or cut off: {error}")]
    Format {
        /// Path of the file.
        path: String,
        /// The parse error.
        error: serde_json::Error,
    },
    /// A plugin of another version wrote the file.
    #[error("{path}: the plugin wrote log version {version}, but this program reads {expected}; reinstall both", expected = Log::VERSION)]
    Version {
        /// Path of the file.
        path: String,
        /// The file's version.
        version: u64,
    },
    /// A figure is out of range.
    #[error("{path}: {key} is {value}, {expected}")]
    Figure {
        /// Path of the file.
        path: String,
        /// Name of the figure.
        key: &'static str,
        /// The figure's value.
        value: f64,
        /// The range that is valid.
        expected: &'static str,
    },
}

/// Largest size of a log, bytes.
const LOG_BYTES_MAX: u64 = 1 << 20;

impl Log {
    /// Version of the format.
    pub const VERSION: u32 = 2;

    /// Returns the capacities of the curve: eight per octave from 16 KiB to 256 MiB.
    pub fn capacities() -> impl Iterator<Item = u64> {
        (14..28)
            .flat_map(|octave| (8..16).map(move |eighth| eighth << (octave - 3)))
            .chain([1 << 28])
    }

    /// Returns the reaches of a TLB: two per octave, from 256 KiB (the plugin's own TLB, 64 pages of 4 KiB) to 1 GiB.
    pub fn reaches() -> impl Iterator<Item = u64> {
        (18..30)
            .flat_map(|octave| [1 << octave, 3 << (octave - 1)])
            .chain([1 << 30])
    }

    /// Writes the log atomically.
    ///
    /// # Errors
    /// [`LogError::Io`].
    pub fn write(&self, path: &Path) -> Result<(), LogError> {
        let failed = |error: std::io::Error| LogError::Io {
            path: path.display().to_string(),
            error,
        };
        let text = serde_json::to_string(self).expect("a log can be written as JSON");
        let unfinished = path.with_extension("unfinished");
        fs::write(&unfinished, text).map_err(failed)?;
        fs::rename(&unfinished, path).map_err(failed)
    }

    /// Reads a log and checks all values.
    ///
    /// # Errors
    /// [`LogError`]; also for a truncated log.
    pub fn read(path: &Path) -> Result<Log, LogError> {
        let name = path.display().to_string();
        let mut text = String::new();
        let read = fs::File::open(path)
            .and_then(|file| file.take(LOG_BYTES_MAX + 1).read_to_string(&mut text))
            .map_err(|error| LogError::Io {
                path: name.clone(),
                error,
            })?;
        if read as u64 > LOG_BYTES_MAX {
            return Err(LogError::TooLarge(name));
        }
        Log::parse(&name, &text)
    }

    /// Parses a log; `path` is for error messages.
    ///
    /// # Errors
    /// [`LogError`]; also for a truncated log.
    pub fn parse(path: &str, text: &str) -> Result<Log, LogError> {
        /// The part that logs of all versions share.
        #[derive(Deserialize)]
        struct Any {
            version: u64,
        }
        let format = |error| LogError::Format {
            path: path.to_owned(),
            error,
        };
        let Any { version } = serde_json::from_str(text).map_err(format)?;
        if version != u64::from(Log::VERSION) {
            return Err(LogError::Version {
                path: path.to_owned(),
                version,
            });
        }
        let log: Log = serde_json::from_str(text).map_err(format)?;
        log.check().map_err(|(key, value, expected)| LogError::Figure {
            path: path.to_owned(),
            key,
            value,
            expected,
        })?;
        Ok(log)
    }

    fn check(&self) -> Result<(), Complaint> {
        let counts = [
            ("instructions", self.instructions),
            ("reads", self.reads),
            ("writes", self.writes),
            ("llc_accesses", self.llc_accesses),
            ("written_back", self.written_back),
            ("footprint_bytes", self.footprint_bytes),
        ];
        for (key, value) in counts {
            within(key, value as f64, 0.0, 1e18, "more than any program reaches")?;
        }
        within(
            "line_bytes",
            self.line_bytes as f64,
            16.0,
            4096.0,
            "it must lie between 16 and 4096",
        )?;
        within("rate", self.rate, 1e-9, 1.0, "it must be above 0 and at most 1")?;
        let most = 2 * (self.reads + self.writes);
        let expected = "it must be at most twice the loads and stores";
        within(
            "llc_accesses",
            self.llc_accesses as f64,
            0.0,
            most as f64,
            expected,
        )?;
        let expected = "but private caches cannot give up more lines than they get";
        within(
            "written_back",
            self.written_back as f64,
            0.0,
            self.llc_accesses as f64,
            expected,
        )?;
        for flights in [&self.hits, &self.misses] {
            flights.check()?;
        }
        self.pages.check()?;
        falling(&self.curve, Log::capacities(), (113, "it must be 113"))?;
        falling(&self.translation, Log::reaches(), (25, "it must be 25"))
    }
}

/// Name of a figure, its value, and its valid range.
type Complaint = (&'static str, f64, &'static str);

fn within(
    key: &'static str,
    value: f64,
    least: f64,
    most: f64,
    expected: &'static str,
) -> Result<(), Complaint> {
    // A NaN cannot come from JSON, and a number too large for its type does not parse.
    if (least..=most).contains(&value) {
        Ok(())
    } else {
        Err((key, value, expected))
    }
}

impl Flights {
    fn check(&self) -> Result<(), Complaint> {
        let accesses = self.accesses as f64;
        let (least, rule) = (self.latencies_least, self.latencies_rule);
        within(
            "accesses in flight",
            accesses,
            0.0,
            1e18,
            "more than any program reaches",
        )?;
        let expected = "more than there are accesses";
        within("foreseen", self.foreseen as f64, 0.0, accesses, expected)?;
        let expected = "more than one latency for each access";
        within("latencies_least", least, 0.0, accesses * (1.0 + 1e-9), expected)?;
        let expected = "it must lie between 0 and the latencies of accesses that wait for more";
        within("latencies_rule", rule, 0.0, least, expected)?;
        within("latencies_most", self.latencies_most, 0.0, rule, expected)
    }
}

impl Pages {
    fn check(&self) -> Result<(), Complaint> {
        within(
            "pages",
            self.used as f64,
            0.0,
            1e18,
            "more than any program reaches",
        )?;
        let parts = Pages::PARTS.len() as f64;
        within(
            "the number of shares in heat",
            self.heat.len() as f64,
            parts,
            parts,
            "it must be 9",
        )?;
        let mut below = 0.0;
        for share in &self.heat {
            let expected = "it must lie between the share of fewer pages and 1";
            within("a share in heat", *share, below, 1.0 + 1e-9, expected)?;
            below = *share;
        }
        let shares = [
            ("shared", self.shared),
            ("shared_accesses", self.shared_accesses),
            ("only_read", self.only_read),
        ];
        shares
            .into_iter()
            .try_for_each(|(key, share)| within(key, share, 0.0, 1.0, "it must lie between 0 and 1"))
    }
}

/// Checks that a curve has exactly these capacities, and that its miss ratios do not rise.
fn falling(
    curve: &[Point],
    capacities: impl Iterator<Item = u64>,
    (count, expected): (usize, &'static str),
) -> Result<(), Complaint> {
    if curve.len() != count {
        return Err(("the number of a curve's points", curve.len() as f64, expected));
    }
    let mut above = 1.0;
    for (point, bytes) in curve.iter().zip(capacities) {
        let (bytes, expected) = (bytes as f64, "not the capacity expected at that point");
        within(
            "a capacity of the curve",
            point.bytes as f64,
            bytes,
            bytes,
            expected,
        )?;
        let expected = "it must lie between 0 and the miss ratio at the capacity before";
        within(
            "a miss ratio of the curve",
            point.miss_ratio,
            0.0,
            above,
            expected,
        )?;
        above = point.miss_ratio;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn log() -> Log {
        let point = |(at, bytes)| Point {
            bytes,
            miss_ratio: (128 - at) as f64 / 128.0,
        };
        Log {
            version: Log::VERSION,
            private_bytes: 1 << 18,
            line_bytes: 64,
            rate: 0.125,
            vcpus: 1,
            instructions: 1000,
            reads: 300,
            writes: 100,
            llc_accesses: 40,
            written_back: 10,
            footprint_bytes: 1 << 20,
            forks: 0,
            execs: 0,
            window: 128,
            llc_bytes: 1 << 20,
            hits: Flights::default(),
            misses: Flights {
                accesses: 40,
                foreseen: 10,
                latencies_least: 30.0,
                latencies_rule: 20.5,
                latencies_most: 10.0,
            },
            pages: Pages {
                used: 4,
                heat: vec![0.5; 9],
                ..Pages::default()
            },
            curve: Log::capacities().enumerate().map(point).collect(),
            translation: Log::reaches().enumerate().map(point).collect(),
        }
    }

    fn complaint(text: &str) -> String {
        Log::parse("x.log", text)
            .expect_err("it must not read")
            .to_string()
    }

    #[test]
    fn capacities_are_those_that_are_promised() {
        let all: Vec<u64> = Log::capacities().collect();
        assert_eq!(
            (all.len(), all[0], all[1], all[112]),
            (113, 16 << 10, 18 << 10, 256 << 20)
        );
        assert!(all.is_sorted());
        let all: Vec<u64> = Log::reaches().collect();
        assert_eq!(
            (all.len(), all[0], all[1], all[24]),
            (25, 256 << 10, 384 << 10, 1 << 30)
        );
        assert!(all.is_sorted());
    }

    #[test]
    fn flights_are_accesses_over_latencies() {
        let found = log().misses;
        assert_eq!((found.least(), found.most()), (40.0 / 30.0, 4.0));
        assert_eq!(Flights::default().rule(), 1.0);
        assert_eq!(found.and(&found).rule(), found.rule());
    }

    #[test]
    fn a_log_reads_as_it_was_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("x.log");
        log().write(&path).expect("written");
        assert_eq!(Log::read(&path).expect("read"), log());
    }

    #[test]
    fn what_cannot_be_is_refused_with_what_is_wrong() {
        let text = serde_json::to_string(&log()).expect("text");
        let with = |from: &str, to: &str| {
            assert!(text.contains(from), "{from}");
            complaint(&text.replacen(from, to, 1))
        };
        assert!(with("\"version\":2", "\"version\":9").contains("log version 9, but this program reads 2"));
        assert!(with("\"foreseen\":10", "\"foreseen\":41").contains("foreseen is 41"));
        assert!(with("\"latencies_most\":10", "\"latencies_most\":21").contains("latencies_most is 21"));
        assert!(with("\"heat\":[0.5", "\"heat\":[0.6").contains("a share in heat is 0.5"));
        assert!(with("\"shared\":0.0", "\"shared\":1.5").contains("shared is 1.5"));
        assert!(with("\"rate\":0.125", "\"rate\":-1").contains("rate is -1, it must be above 0"));
        assert!(with("\"rate\":0.125", "\"rate\":NaN").contains("not a log of the plugin"));
        assert!(with("\"reads\":300", "\"reads\":-3").contains("not a log of the plugin"));
        assert!(with("\"reads\":300", "\"reads\":3,\"more\":1").contains("unknown field `more`"));
        assert!(
            with("\"reads\":300", "\"reads\":18446744073709551615").contains("more than any program reaches")
        );
        assert!(with("\"llc_accesses\":40", "\"llc_accesses\":4000").contains("llc_accesses is 4000"));
        assert!(with("\"bytes\":18432", "\"bytes\":1").contains("a capacity of the curve is 1"));
        let mut rising = log();
        rising.curve[50].miss_ratio = 1.0;
        let rising = serde_json::to_string(&rising).expect("text");
        assert!(complaint(&rising).contains("a miss ratio of the curve is 1"));
        assert!(complaint("").contains("cut off"));
    }

    proptest! {
        #[test]
        fn a_log_that_is_cut_off_is_refused(at in 0usize..4000) {
            let text = serde_json::to_string(&log()).expect("text");
            prop_assume!(at < text.len());
            prop_assert!(Log::parse("x.log", &text[..at]).is_err());
        }

        #[test]
        fn any_text_is_refused_without_harm(text in ".*") {
            prop_assert!(Log::parse("x.log", &text).is_err());
        }
    }
}
