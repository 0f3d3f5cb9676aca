//! How much is recorded on disk. The loop's caller writes it; the loop itself does no I/O.

use homenode_units::{Bytes, Ns};
use serde::{Deserialize, Serialize};

/// How much the history keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Days that status, decisions and findings are kept; 0 to keep no history.
    pub days: u32,
    /// Hours that the host's samples are kept in full; 0 for none.
    pub samples_hours: u32,
    /// Disk space for samples.
    #[serde(with = "homenode_units::text")]
    pub samples_max: Bytes,
    /// Disk space for everything together.
    #[serde(with = "homenode_units::text")]
    pub max: Bytes,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            days: 30,
            samples_hours: 24,
            samples_max: Bytes::from_gib(1),
            max: Bytes::from_gib(2),
        }
    }
}

/// Least and most disk space that may be set.
const ROOM: std::ops::RangeInclusive<Bytes> = Bytes::from_mib(1)..=Bytes::from_gib(1 << 20);

homenode_units::settings! {
    Config {
        days: 0..=36_500,
        samples_hours: 0..=876_000,
        samples_max: ROOM,
        max: ROOM,
    }
}

impl Config {
    /// Returns how long status and events are kept.
    pub fn status_age(&self) -> Ns {
        Ns::from_secs(u64::from(self.days) * 24 * 3600)
    }

    /// Returns how long samples are kept.
    pub fn samples_age(&self) -> Ns {
        Ns::from_secs(u64::from(self.samples_hours) * 3600)
    }
}
