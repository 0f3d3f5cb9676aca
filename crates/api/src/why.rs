//! The answer to why a VM was slow, with wall-clock times.

use homenode_units::Ns;
use homenode_why::Explanation;
use schemars::JsonSchema;
use serde::Serialize;

use crate::time::WallTime;

/// How long the window of a question may be.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// The shortest that can be distinguished from noise.
    pub least: Ns,
    /// The default.
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

/// A length that no window may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a stretch of {least} to {}h can be told, and not {length}", .most.0 / Ns::from_secs(3600).0)]
pub struct WindowError {
    length: Ns,
    least: Ns,
    most: Ns,
}

impl Window {
    /// Returns `length` if a window may be that long.
    ///
    /// # Errors
    /// Says how long it may be.
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
    /// The window that was asked about.
    pub asked: WallSpan,
    /// The part of it in which the VM was slow; all of it if it was not.
    pub slow: WallSpan,
    /// Start of the baseline it is compared with.
    pub compared_from: WallTime,
    /// The causes found.
    #[serde(flatten)]
    pub explanation: Explanation,
}
