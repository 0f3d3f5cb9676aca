//! Why a VM was slow, as it is answered: by the wall clock.

use homenode_units::Ns;
use homenode_why::Explanation;
use schemars::JsonSchema;
use serde::Serialize;

use crate::time::WallTime;

/// How long a stretch may be that is asked about.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// The shortest that can be told from noise.
    pub least: Ns,
    /// Where it is not said.
    pub usual: Ns,
    /// The longest: samples of a day are kept.
    pub most: Ns,
}

/// See [`Window`].
pub const WINDOW: Window = Window {
    least: Ns::from_secs(10),
    usual: Ns::from_secs(300),
    most: Ns::from_secs(6 * 3600),
};

impl Window {
    /// A stretch of a length that may be asked about.
    ///
    /// # Errors
    /// With what may be asked about.
    pub fn checked(&self, length: Ns) -> Result<Ns, String> {
        if (self.least..=self.most).contains(&length) {
            return Ok(length);
        }
        let hours = self.most.0 / Ns::from_secs(3600).0;
        Err(format!(
            "a stretch of {} to {hours}h can be told, and not {length}",
            self.least
        ))
    }
}

/// A stretch of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct WallSpan {
    /// Since when.
    pub from: WallTime,
    /// Until when.
    pub to: WallTime,
}

/// The answer to `homenode why`.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Answer {
    /// Which run of the history.
    pub run: i64,
    /// Which stretch was asked about.
    pub asked: WallSpan,
    /// In which part of it the VM was slow; all of it, where it was not.
    pub slow: WallSpan,
    /// Since when that is compared.
    pub compared_from: WallTime,
    /// What came of it.
    #[serde(flatten)]
    pub explanation: Explanation,
}
