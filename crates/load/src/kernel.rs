//! What a worker runs: a kind of access, and how much memory it touches.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use crate::sys::LINE_BYTES;

/// No host has more memory than this, and sums of sizes cannot overflow below it.
const BYTES_MAX: usize = 1 << 40;

/// The kernel of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kernel {
    /// Reads lines drawn uniformly from this many bytes.
    Uniform(usize),
    /// Reads all lines of this many bytes in order, repeatedly.
    Stream(usize),
    /// Reads as many lines of the first kind (first number) as of the second kind, in short turns.
    Mix(usize, usize),
    /// Follows one cycle through all lines of this many bytes: each access waits for the one before.
    Chase(usize),
    /// Serves requests.
    Requests {
        /// Memory from which a request reads lines drawn uniformly.
        bytes: usize,
        /// Lines that each request reads.
        lines: usize,
        /// Mean time between two arrivals.
        interval_ns: usize,
    },
    /// Writes one byte of each base page of the first number of bytes, repeatedly. Holds the second number of bytes, all of which
    /// it has touched once.
    Pages(usize, usize),
}

impl Kernel {
    /// Returns the number of bytes that the kernel touches.
    pub fn footprint(self) -> usize {
        match self {
            Kernel::Uniform(bytes)
            | Kernel::Stream(bytes)
            | Kernel::Chase(bytes)
            | Kernel::Requests { bytes, .. }
            | Kernel::Pages(_, bytes) => bytes,
            Kernel::Mix(uniform, stream) => uniform + stream,
        }
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kernel::Uniform(bytes) => write!(f, "uniform:{bytes}"),
            Kernel::Stream(bytes) => write!(f, "stream:{bytes}"),
            Kernel::Mix(uniform, stream) => write!(f, "mix:{uniform}:{stream}"),
            Kernel::Chase(bytes) => write!(f, "chase:{bytes}"),
            Kernel::Requests {
                bytes,
                lines,
                interval_ns,
            } => write!(f, "requests:{bytes}:{lines}:{interval_ns}"),
            Kernel::Pages(hot, all) => write!(f, "pages:{hot}:{all}"),
        }
    }
}

impl Serialize for Kernel {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

/// A text that is not a kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a kernel such as `uniform:1048576`, `stream:1048576`, `mix:1048576:1048576`, `chase:1048576`, \
     `requests:1048576:1000:50000` or `pages:1048576:2097152`"
)]
pub struct NoKernel(String);

impl FromStr for Kernel {
    type Err = NoKernel;

    fn from_str(text: &str) -> Result<Kernel, NoKernel> {
        let parts: Vec<&str> = text.split(':').collect();
        let number = |text: &str| text.parse::<usize>().ok().filter(|number| *number <= BYTES_MAX);
        let bytes = |text: &str| number(text).filter(|bytes| *bytes >= LINE_BYTES);
        let kernel = match parts.as_slice() {
            ["uniform", a] => bytes(a).map(Kernel::Uniform),
            ["stream", a] => bytes(a).map(Kernel::Stream),
            ["mix", a, b] => bytes(a).zip(bytes(b)).map(|(a, b)| Kernel::Mix(a, b)),
            ["chase", a] => bytes(a).map(Kernel::Chase),
            ["requests", a, b, c] => bytes(a).zip(number(b).zip(number(c))).and_then(of_requests),
            ["pages", a, b] => bytes(a)
                .zip(bytes(b))
                .filter(|(hot, all)| hot <= all)
                .map(|(hot, all)| Kernel::Pages(hot, all)),
            _ => None,
        };
        kernel.ok_or_else(|| NoKernel(text.to_owned()))
    }
}

fn of_requests((bytes, (lines, interval_ns)): (usize, (usize, usize))) -> Option<Kernel> {
    (lines > 0 && interval_ns > 0).then_some(Kernel::Requests {
        bytes,
        lines,
        interval_ns,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_read_as_they_are_written_and_nonsense_is_refused() {
        let requests = Kernel::Requests {
            bytes: 1 << 20,
            lines: 100,
            interval_ns: 20_000,
        };
        for kernel in [
            Kernel::Uniform(4096),
            Kernel::Stream(64),
            Kernel::Mix(1 << 20, 1 << 30),
            Kernel::Chase(1 << 20),
            requests,
            Kernel::Pages(4096, 4096),
        ] {
            assert_eq!(kernel.to_string().parse(), Ok(kernel));
        }
        for bad in [
            "",
            "uniform",
            "uniform:0",
            "uniform:-1",
            "stream:1:2",
            "mix:4096",
            "uniform:99999999999999999999",
            "pages:8192:4096",
            "requests:4096:0:1",
            "requests:4096:1:0",
        ] {
            assert!(bad.parse::<Kernel>().is_err(), "{bad}");
        }
    }
}
