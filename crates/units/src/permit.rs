//! A permit: the amount of a shared resource that a VM has booked, per scheduling slice.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::quantity::{BytesPerSec, Ns, parse};

const MISSES: [(&str, u64); 3] = [("k", 1_000), ("M", 1_000_000), ("G", 1_000_000_000)];
/// The smallest valid number of misses per slice: 2 MB/s. Nothing can run on less, and `250` is a slip for `250k`.
const MISSES_MIN: u64 = 1_000;
/// The largest valid number of misses per slice: 2 TB/s of memory traffic, which no host sustains.
const MISSES_MAX: u64 = 1_000_000_000;
const BANDWIDTH_MIN: BytesPerSec = BytesPerSec(1_000_000);
const BANDWIDTH_MAX: BytesPerSec = BytesPerSec(2_000_000_000_000);

/// The resource that a permit limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Resource {
    /// LLC pollution, in LLC misses.
    Pollution,
    /// Memory bandwidth, in bytes.
    Bandwidth,
}

/// A VM's booking. Either LLC misses per slice of 30 ms of wall-clock time, written `250k`, `1M` or `250000`, from `1k` to `1G`;
/// or memory bandwidth, written `500MB/s`, from `1MB/s` to `2TB/s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permit {
    resource: Resource,
    /// Misses per slice, or bytes per second.
    amount: u64,
}

/// Why a text or a number is not a permit, with a suggested correction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PermitError {
    /// The text is not a number with a known unit.
    Malformed {
        /// The input.
        text: String,
        /// A valid example.
        remedy: String,
    },
    /// The amount is below zero.
    Negative {
        /// The input.
        text: String,
    },
    /// The amount is too small for anything to run.
    TooSmall {
        /// The input.
        text: String,
        /// The least that can be booked.
        least: Permit,
    },
    /// The amount is more than any host sustains.
    TooLarge {
        /// The input.
        text: String,
        /// The most that can be booked.
        most: Permit,
    },
}

impl fmt::Display for PermitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PermitError::Malformed { text, remedy } => write!(f, "`{text}` is not a permit: {remedy}"),
            PermitError::Negative { text } => {
                write!(
                    f,
                    "`{text}` is not a permit: it is below zero; write for example `250k`"
                )
            }
            PermitError::TooSmall { text, least } => write!(
                f,
                "`{text}` is too small a permit: no VM can run with less than `{least}`{}",
                per_slice(*least)
            ),
            PermitError::TooLarge { text, most } => write!(
                f,
                "`{text}` is too large a permit: no host does more than `{most}`{}; set no permit to leave a VM unlimited",
                per_slice(*most)
            ),
        }
    }
}

fn per_slice(permit: Permit) -> &'static str {
    match permit.resource {
        Resource::Pollution => " (LLC misses per slice of 30 ms)",
        Resource::Bandwidth => "",
    }
}

impl std::error::Error for PermitError {}

impl Permit {
    /// The slice of wall-clock time that pollution permits refer to. The slice is as long as Xen's [Kyoto, section 3.1.2.5].
    pub const SLICE: Ns = Ns::from_millis(30);

    /// Returns a permit for LLC pollution, in misses per slice.
    pub fn pollution(misses_per_slice: u64) -> Result<Permit, PermitError> {
        let of = |amount| Permit {
            resource: Resource::Pollution,
            amount,
        };
        of(misses_per_slice).checked(of(MISSES_MIN), of(MISSES_MAX))
    }

    /// Returns a permit for memory bandwidth.
    pub fn bandwidth(rate: BytesPerSec) -> Result<Permit, PermitError> {
        let of = |rate: BytesPerSec| Permit {
            resource: Resource::Bandwidth,
            amount: rate.0,
        };
        of(rate).checked(of(BANDWIDTH_MIN), of(BANDWIDTH_MAX))
    }

    fn checked(self, least: Permit, most: Permit) -> Result<Permit, PermitError> {
        let text = || self.to_string();
        if self.amount < least.amount {
            Err(PermitError::TooSmall { text: text(), least })
        } else if self.amount > most.amount {
            Err(PermitError::TooLarge { text: text(), most })
        } else {
            Ok(self)
        }
    }

    /// Returns the resource that the permit limits.
    pub fn resource(self) -> Resource {
        self.resource
    }

    /// Returns the amount that the permit allows per slice, in LLC misses or bytes.
    pub fn units_per_slice(self) -> u64 {
        match self.resource {
            Resource::Pollution => self.amount,
            Resource::Bandwidth => {
                let bytes = u128::from(self.amount) * u128::from(Permit::SLICE.0) / 1_000_000_000;
                u64::try_from(bytes).expect("a checked bandwidth fits")
            }
        }
    }
}

impl FromStr for Permit {
    type Err = PermitError;

    fn from_str(text: &str) -> Result<Permit, PermitError> {
        let trimmed = text.trim();
        if trimmed.starts_with(['-', '−']) {
            return Err(PermitError::Negative {
                text: text.to_owned(),
            });
        }
        // Errors quote the input, not the parsed value.
        let named = |error| match error {
            PermitError::TooSmall { least, .. } => PermitError::TooSmall {
                text: text.to_owned(),
                least,
            },
            PermitError::TooLarge { most, .. } => PermitError::TooLarge {
                text: text.to_owned(),
                most,
            },
            other => other,
        };
        if let Ok(rate) = trimmed.parse::<BytesPerSec>() {
            return Permit::bandwidth(rate).map_err(named);
        }
        match misses(trimmed) {
            Some(misses) => Permit::pollution(misses).map_err(named),
            None => Err(PermitError::Malformed {
                text: text.to_owned(),
                remedy: remedy(trimmed),
            }),
        }
    }
}

fn misses(text: &str) -> Option<u64> {
    text.parse()
        .ok()
        .or_else(|| parse(text, &MISSES, "a permit").ok())
}

/// Returns a hint that tells how to write what was probably meant.
fn remedy(text: &str) -> String {
    if let Some(per_second) = text.strip_suffix("/s").and_then(misses) {
        let slices_per_second = 1_000_000_000.0 / Permit::SLICE.as_f64();
        let misses = (per_second as f64 / slices_per_second).round() as u64;
        return format!(
            "LLC misses are booked per slice of 30 ms, not per second; write `{}`",
            written(misses)
        );
    }
    let lower = text.to_ascii_lowercase();
    let suffixed = lower
        .strip_suffix('k')
        .map(|n| format!("{n}k"))
        .or_else(|| lower.strip_suffix('m').map(|n| format!("{n}M")));
    if let Some(fixed) = suffixed.filter(|fixed| misses(fixed).is_some()) {
        return format!("write `{fixed}`");
    }
    match text.parse::<crate::Bytes>() {
        Ok(_) => {
            let size = text.replace(' ', "");
            format!("memory bandwidth is booked per second; write `{size}/s`")
        }
        Err(_) => "write LLC misses per slice of 30 ms as `250k`, `1M` or `250000`, or memory bandwidth as `500MB/s`"
            .to_owned(),
    }
}

/// Writes misses with the largest unit that shows them exactly, with at most one decimal.
fn written(misses: u64) -> String {
    let fits = |(unit, factor): &(&str, u64)| {
        let tenth = factor / 10;
        (misses >= *factor && misses.is_multiple_of(tenth)).then(|| match misses / tenth % 10 {
            0 => format!("{}{unit}", misses / factor),
            tenths => format!("{}.{tenths}{unit}", misses / factor),
        })
    };
    MISSES
        .iter()
        .rev()
        .find_map(fits)
        .unwrap_or_else(|| misses.to_string())
}

impl fmt::Display for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.resource {
            Resource::Pollution => f.pad(&written(self.amount)),
            // Writes the rate exactly, so that the output reads back as the same permit.
            Resource::Bandwidth => {
                let units = [
                    ("GB/s", 1_000_000_000),
                    ("MB/s", 1_000_000),
                    ("kB/s", 1_000),
                    ("B/s", 1),
                ];
                let exact = units
                    .iter()
                    .find(|(_, factor)| self.amount.is_multiple_of(*factor));
                let (unit, factor) = exact.expect("one divides everything");
                f.pad(&format!("{}{unit}", self.amount / factor))
            }
        }
    }
}

impl Serialize for Permit {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Permit {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn misses_of(text: &str) -> u64 {
        let permit: Permit = text.parse().unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(permit.resource(), Resource::Pollution);
        permit.units_per_slice()
    }

    fn refused(text: &str) -> String {
        text.parse::<Permit>().expect_err(text).to_string()
    }

    #[test]
    fn permits_read_as_people_write_them() {
        assert_eq!(misses_of("250k"), 250_000);
        assert_eq!(misses_of(" 1M "), 1_000_000);
        assert_eq!(misses_of("1.5M"), 1_500_000);
        assert_eq!(misses_of("250000"), 250_000);
        let bandwidth: Permit = "500MB/s".parse().unwrap();
        assert_eq!(bandwidth.resource(), Resource::Bandwidth);
        assert_eq!(bandwidth.units_per_slice(), 15_000_000, "500 MB/s for 30 ms");
    }

    #[test]
    fn what_is_written_reads_back() {
        for text in [
            "1k", "250k", "1.5M", "1G", "123456", "500MB/s", "1500kB/s", "2000GB/s",
        ] {
            let permit: Permit = text.parse().unwrap();
            assert_eq!(permit.to_string(), text);
        }
    }

    #[test]
    fn zero_negative_and_absurd_permits_are_refused() {
        assert_eq!(
            refused("0"),
            "`0` is too small a permit: no VM can run with less than `1k` (LLC misses per slice of 30 ms)"
        );
        assert!(refused("250").contains("`1k`"));
        assert!(refused("0MB/s").contains("`1MB/s`"));
        assert!(refused("-250k").contains("below zero"));
        assert!(refused("2G").contains("leave a VM unlimited"));
        assert!(refused("18446744073709551615").contains("too large"));
        assert!(refused("99999TB/s").contains("`2000GB/s`"));
    }

    #[test]
    fn another_unit_is_refused_with_the_remedy() {
        assert_eq!(
            refused("250k/s"),
            "`250k/s` is not a permit: LLC misses are booked per slice of 30 ms, not per second; write `7.5k`"
        );
        assert_eq!(
            refused("250 MB"),
            "`250 MB` is not a permit: memory bandwidth is booked per second; write `250MB/s`"
        );
        assert!(refused("250K").contains("write `250k`"));
        assert!(refused("3m").contains("write `3M`"));
        for bad in [
            "",
            "k",
            "many",
            "1e6",
            "0x10",
            "250k misses",
            "99999999999999999999999",
            "1.2.3k",
            "250%",
        ] {
            assert!(refused(bad).contains("write LLC misses per slice"), "{bad}");
        }
    }
}
