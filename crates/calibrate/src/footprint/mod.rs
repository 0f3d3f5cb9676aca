//! Measures the footprint of a guest kernel: the memory that it takes for itself, which [PRL, section 4.4] calls epsilon.
//!
//! # Problem
//! In the paper, the working set is `M = wss * page size + epsilon`. An operator determines epsilon once per kernel binary,
//! by shrinking a VM's memory in steps of 5 percent until the VM crashes.
//!
//! # Algorithm
//! A guest with one static program boots with a given memory size. A trial *ran* if the program reports that it is done. The
//! first trial, with [`Options::start`], must run. Then the memory size of each trial is
//! - *as published*: less by a step (5 percent in the paper) than the last memory that ran, until a trial does not run; or
//! - *bisection*: the geometric mean of the least memory that ran and the most that did not, until they differ by at most a
//!   step. From 2 GiB, this takes a seventh as many trials. It assumes that a guest which runs with some memory also runs
//!   with more.
//!
//! The footprint is the least memory that ran. For a cross-check, the guest's own figure is taken at the first memory size:
//! that size less what is available to programs. It includes the kernel's tables for all of that memory, and excludes what
//! the kernel needs only for booting.
//!
//! # Left out
//! The paper's VM runs the Linux distribution of its workload. This measures only the kernel, an initramfs if given, and one
//! program.

mod guest;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use homenode_formats::cpio::Archive;
use homenode_units::{Bytes, Ns};
use schemars::JsonSchema;
use serde::Serialize;

use guest::Maker;
pub use guest::{Accelerator, MemInfo, Outcome, Trial};

/// The guest's program.
const INIT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/epsilon-init"));
/// Lower bound of the search: no kernel runs with less memory.
const LEAST: Bytes = Bytes(4 << 20);
/// Granularity of memory sizes.
const PIECE: u64 = 64 << 10;
/// Time limit of a trial: this multiple of the first trial's duration, but at least `LIMIT_MIN`.
const LIMIT_OF_FIRST: u32 = 5;
const LIMIT_MIN: Duration = Duration::from_secs(10);

/// Options of the search.
#[derive(Clone, Debug)]
pub struct Options {
    /// The kernel's image, in a boot loader's format.
    pub kernel: PathBuf,
    /// An initramfs that the guest also holds in memory; none of its programs run.
    pub initrd: Option<PathBuf>,
    /// Resolution of a bisection, or the step by which memory shrinks: a share of memory, from .01 to .5.
    pub step: f64,
    /// Memory of the first trial.
    pub start: Bytes,
    /// Search method.
    pub method: Method,
    /// Accelerators to try in this order until one works; not empty.
    pub accelerators: Vec<Accelerator>,
    /// Time limit for one guest.
    pub limit: Ns,
    /// QEMU to use instead of the one in `PATH`.
    pub qemu: Option<PathBuf>,
}

/// Search method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Bisects between the least memory that ran and the most that did not.
    Bisection,
    /// Shrinks by a step each time, until a guest does not run.
    AsPublished,
}

/// Why no footprint was found.
#[derive(Debug, thiserror::Error)]
pub enum FootprintError {
    /// Invalid input.
    #[error("{0}")]
    Given(String),
    /// The guest does not run with the initial memory.
    #[error(
        "the guest does not run with {memory} ({accelerator}): {outcome}. Is the kernel built for a serial console and an \
         initramfs? Give more memory with --start, or more time with --limit"
    )]
    DoesNotRun {
        /// The memory.
        memory: Bytes,
        /// The accelerator.
        accelerator: Accelerator,
        /// The outcome.
        outcome: Outcome,
    },
    /// The user cancelled.
    #[error("stopped; the guest was ended")]
    Stopped,
    /// The guest's program is built for x86-64 only.
    #[error("the guest's program is built for x86-64 only, but this host has another processor")]
    NoProgram,
    /// A system call failed.
    #[error("{what}: {cause}")]
    System {
        /// The attempted operation.
        what: String,
        /// The cause.
        cause: std::io::Error,
    },
}

impl FootprintError {
    fn given(path: &Path, why: impl std::fmt::Display) -> FootprintError {
        FootprintError::Given(format!("{}: {why}", path.display()))
    }

    fn system(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> FootprintError {
        let what = what.into();
        move |cause| FootprintError::System { what, cause }
    }
}

/// Result of the search.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Found {
    /// The kernel's image.
    pub kernel: String,
    /// The accelerator of the guests.
    pub accelerator: Accelerator,
    /// The search method.
    pub method: Method,
    /// The resolution: a share of memory.
    pub step: f64,
    /// The least memory with which the guest ran.
    pub footprint_bytes: Bytes,
    /// The most memory with which a guest did not run; absent if every trial ran.
    pub dead_bytes: Option<Bytes>,
    /// The memory in use as the guest itself reports it, at the first memory size.
    pub guest_says_bytes: Bytes,
    /// The trials of all guests, in order.
    pub trials: Vec<Trial>,
}

/// Finds a kernel's footprint. `told` receives the number of the current guest, the maximum number, and the guest's memory.
/// If `stop` is set, the search and the guest end.
///
/// # Errors
/// No QEMU, no kernel, a guest that does not run with the initial memory, cancellation by the user.
pub fn footprint(
    options: &Options,
    stop: Arc<AtomicBool>,
    told: &mut dyn FnMut(usize, usize, &str),
) -> Result<Found, FootprintError> {
    if INIT.is_empty() {
        return Err(FootprintError::NoProgram);
    }
    if options.start <= LEAST {
        let why = format!("--start is {}; it must be more than {LEAST}", options.start);
        return Err(FootprintError::Given(why));
    }
    let qemu = guest::find_qemu(options.qemu.as_deref())?;
    let kernel = boot_image(&options.kernel)?;
    let folder = tempfile::tempdir().map_err(FootprintError::system(
        "cannot make a folder for the guest's initramfs",
    ))?;
    let initramfs = folder.path().join("initramfs");
    fs::write(&initramfs, archive(options.initrd.as_deref())?).map_err(FootprintError::system(format!(
        "cannot write {}",
        initramfs.display()
    )))?;
    let mut search = Search {
        told,
        maker: Maker {
            qemu,
            kernel,
            initramfs,
            accelerator: Accelerator::Tcg,
            stop,
        },
        limit: Duration::from_nanos(options.limit.0),
        trials: Vec::new(),
    };
    let start = whole(options.start);
    let more = match options.method {
        Method::AsPublished => shrinks(start, options.step),
        Method::Bisection => bisections(LEAST, start, options.step),
    };
    let guest_says_bytes = search.begin(start, &options.accelerators, more)?;
    let (footprint_bytes, dead_bytes) = match options.method {
        Method::AsPublished => search.shrink(start, options.step)?,
        Method::Bisection => search.bisect(start, options.step)?,
    };
    Ok(Found {
        kernel: options.kernel.display().to_string(),
        accelerator: search.maker.accelerator,
        method: options.method,
        step: options.step,
        footprint_bytes,
        dead_bytes,
        guest_says_bytes,
        trials: search.trials,
    })
}

/// Checks the format of the kernel's image, and returns its path.
fn boot_image(path: &Path) -> Result<PathBuf, FootprintError> {
    let image = fs::read(path).map_err(|error| FootprintError::given(path, error))?;
    // A bzImage has "HdrS" in its header (boot protocol). The alternative is an ELF image with a PVH entry, which QEMU
    // checks.
    let is_kernel = image.get(0x202..0x206) == Some(b"HdrS") || image.starts_with(b"\x7fELF");
    if !is_kernel {
        let why =
            "it is not an x86 kernel image; give the file that a boot loader starts, such as /boot/vmlinuz-*";
        return Err(FootprintError::given(path, why));
    }
    Ok(path.to_owned())
}

/// Returns the user's initramfs, if any, followed by the guest's program: kernels unpack concatenated archives.
fn archive(initrd: Option<&Path>) -> Result<Vec<u8>, FootprintError> {
    let mut bytes = match initrd {
        Some(path) => fs::read(path).map_err(|error| FootprintError::given(path, error))?,
        None => Vec::new(),
    };
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    let mut own = Archive::default();
    own.file("homenode-epsilon", 0o755, INIT);
    bytes.extend(own.finish());
    Ok(bytes)
}

fn whole(bytes: Bytes) -> Bytes {
    Bytes(bytes.0 / PIECE * PIECE)
}

/// The trials so far, and the settings of the next.
struct Search<'a> {
    told: &'a mut dyn FnMut(usize, usize, &str),
    maker: Maker,
    limit: Duration,
    trials: Vec<Trial>,
}

impl Search<'_> {
    /// Runs one more trial; at most `more` follow it.
    fn try_with(&mut self, memory: Bytes, more: usize) -> Result<Outcome, FootprintError> {
        let at = self.trials.len() + 1;
        (self.told)(at, at + more, &format!("a guest with {memory}"));
        let trial = self.maker.run(memory, self.limit)?;
        let outcome = trial.outcome.clone();
        self.trials.push(trial);
        Ok(outcome)
    }

    /// Runs the first trial, which chooses the accelerator. Returns the memory in use as the guest itself reports it.
    fn begin(
        &mut self,
        start: Bytes,
        accelerators: &[Accelerator],
        more: usize,
    ) -> Result<Bytes, FootprintError> {
        let mut last = None;
        for accelerator in accelerators.iter().copied() {
            self.maker.accelerator = accelerator;
            match self.try_with(start, more)? {
                Outcome::Ran(memory) => {
                    // A failure with another accelerator does not count as a trial of this memory size.
                    self.trials.drain(..self.trials.len() - 1);
                    let took = Duration::from_nanos(self.trials[0].took.0);
                    self.limit = self.limit.min((took * LIMIT_OF_FIRST).max(LIMIT_MIN));
                    return Ok(start.saturating_sub(memory.available_bytes));
                }
                other => last = Some((accelerator, other)),
            }
        }
        let (accelerator, outcome) = last.unwrap_or((Accelerator::Tcg, Outcome::Hang { last: None }));
        Err(FootprintError::DoesNotRun {
            memory: start,
            accelerator,
            outcome,
        })
    }

    /// Shrinks by one step at a time. Returns the least memory that ran, and the most that did not, if any.
    fn shrink(&mut self, start: Bytes, step: f64) -> Result<(Bytes, Option<Bytes>), FootprintError> {
        let mut ran = start;
        loop {
            let next = whole(Bytes((ran.as_f64() * (1.0 - step)) as u64));
            if next <= LEAST {
                return Ok((ran, None));
            }
            match self.try_with(next, shrinks(next, step))? {
                Outcome::Ran(_) => ran = next,
                _ => return Ok((ran, Some(next))),
            }
        }
    }

    /// Bisects between the least memory that ran and the most that did not. Returns both, as `shrink` does.
    fn bisect(&mut self, start: Bytes, step: f64) -> Result<(Bytes, Option<Bytes>), FootprintError> {
        let (mut dead, mut ran, mut has_died) = (LEAST, start, false);
        while let Some(middle) = middle(dead, ran, step) {
            let more = bisections(dead, ran, step).saturating_sub(1);
            match self.try_with(middle, more)? {
                Outcome::Ran(_) => ran = middle,
                _ => (dead, has_died) = (middle, true),
            }
        }
        Ok((ran, has_died.then_some(dead)))
    }
}

/// Returns the next memory size of the bisection; `None` if both ends are close enough.
fn middle(dead: Bytes, ran: Bytes, step: f64) -> Option<Bytes> {
    if dead.as_f64() >= ran.as_f64() * (1.0 - step) || ran.0 - dead.0 <= PIECE {
        return None;
    }
    let middle = whole(Bytes((dead.as_f64() * ran.as_f64()).sqrt() as u64));
    let middle = middle.max(dead + Bytes(PIECE)).min(Bytes(ran.0 - PIECE));
    (middle > dead).then_some(middle)
}

/// Returns the maximum number of trials in a bisection; each trial halves the logarithm of the ratio of the two ends.
fn bisections(dead: Bytes, ran: Bytes, step: f64) -> usize {
    let halves = ((ran.as_f64() / dead.as_f64()).ln() / -(1.0 - step).ln()).log2();
    halves.ceil().max(0.0) as usize
}

/// Returns the maximum number of trials from here on if memory shrinks by one step at a time.
fn shrinks(from: Bytes, step: f64) -> usize {
    let all = (from.as_f64() / LEAST.as_f64()).ln() / -(1.0 - step).ln();
    all.ceil().max(0.0) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_trials_are_made_as_were_told_at_most() {
        for step in [0.01, 0.05, 0.2, 0.5] {
            for footprint in (5..2000).step_by(37).map(Bytes::from_mib) {
                let (mut dead, mut ran, mut made) = (LEAST, Bytes::from_gib(2), 0);
                let told = bisections(dead, ran, step);
                while let Some(middle) = middle(dead, ran, step) {
                    // Rounding to whole units may cost one trial.
                    assert!(
                        made + bisections(dead, ran, step) <= told + 1,
                        "{footprint} by {step}"
                    );
                    match middle >= footprint {
                        true => ran = middle,
                        false => dead = middle,
                    }
                    made += 1;
                }
                assert!(made <= told + 1, "{footprint} by {step}: {made} of {told}");
            }
        }
        assert_eq!(shrinks(LEAST, 0.05), 0);
        assert_eq!(shrinks(Bytes(2 * LEAST.0), 0.5), 1);
    }

    #[test]
    fn the_guests_program_is_static_and_comes_behind_the_users_archive() {
        assert!(INIT.starts_with(b"\x7fELF") && INIT.len() < 64 << 10);
        // The program must not name an interpreter, because the guest has no other file.
        assert!(!INIT.windows(3).any(|window| window == b"ld-"));
        let folder = tempfile::tempdir().unwrap();
        let theirs = folder.path().join("theirs");
        fs::write(&theirs, b"12345").unwrap();
        let all = archive(Some(&theirs)).unwrap();
        assert_eq!((&all[..5], &all[8..14]), (&b"12345"[..], &b"070701"[..]));
    }
}
