//! What happened: a hash of everything, by which runs are compared, and the story of what matters.

/// The trace of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trace {
    pub(crate) cycle: u32,
    hash: u64,
    story: Vec<String>,
    /// Everything that is hashed, if it is to be shown.
    pub(crate) whole: Option<Vec<String>>,
}

impl Trace {
    /// Adds bytes that only count for the comparison of runs (FNV-1a).
    pub(crate) fn hash(&mut self, bytes: &[u8]) {
        if let Some(whole) = &mut self.whole {
            whole.push(String::from_utf8_lossy(bytes).into_owned());
        }
        for byte in bytes {
            self.hash = (self.hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    /// Adds a line of the story.
    pub(crate) fn add(&mut self, line: impl Into<String>) {
        let line = line.into();
        self.hash(line.as_bytes());
        self.story.push(format!("{:>3} s  {line}", self.cycle));
    }

    pub(crate) fn digest(&self) -> u64 {
        self.hash
    }

    pub(crate) fn story(&self) -> &[String] {
        &self.story
    }
}
