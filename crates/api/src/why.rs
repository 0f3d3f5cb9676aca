//! The answer to why a VM was slow, with wall-clock times.

use homenode_units::Ns;
use homenode_why::Explanation;
use schemars::JsonSchema;
use serde::Serialize;

use crate::time::WallTime;

/// The lengths that the window of a question may have.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// The shortest window in which a change can be told from noise.
    pub least: Ns,
    /// The default.
    pub usual: Ns,
    /// The longest window: samples are kept for a day.
    pub most: Ns,
}

/// The lengths that a window may have.
pub const WINDOW: Window = Window {
    least: Ns::from_secs(10),
    usual: Ns::from_secs(300),
    most: Ns::from_secs(6 * 3600),
};

/// A length that no window may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be {least} to {}h, got {length}", .most.0 / Ns::from_secs(3600).0)]
pub struct WindowError {
    length: Ns,
    least: Ns,
    most: Ns,
}

impl Window {
    /// Returns `length` if a window may be that long.
    ///
    /// # Errors
    /// If not: says how long it may be.
    pub fn checked(&self, length: Ns) -> Result<Ns, WindowError> {
        if (self.least..=self.most).contains(&length) {
            return Ok(length);
        }
        let Window { least, most, .. } = *self;
        Err(WindowError { length, least, most })
    }
}

/// A span of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct WallSpan {
    /// Start.
    pub from: WallTime,
    /// End.
    pub to: WallTime,
}

/// The answer to `homenode why`.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Answer {
    /// The run of the history.
    pub run: i64,
    /// The window of the question; shorter than requested if the VM's history is too short for that.
    pub asked: WallSpan,
    /// The part of the window in which the VM was slow; all of it if the VM was not slow.
    pub slow: WallSpan,
    /// Start of the baseline with which the window is compared; that of the window if there is none.
    pub compared_from: WallTime,
    /// The explanation, with the causes found.
    #[serde(flatten)]
    pub explanation: Explanation,
}
