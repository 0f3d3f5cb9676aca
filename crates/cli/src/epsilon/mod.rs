//! `homenode epsilon`: how much memory a guest kernel takes for itself ([PRL, section 4.4], "epsilon computation").
//!
//! # Problem
//! The paper's working set is `M = wss * page size + epsilon`, with epsilon the footprint of the guest's kernel,
//! which an operator finds once per kernel binary: shrink a VM's memory by 5 percent until it crashes.
//!
//! # Algorithm
//! A guest with one static program boots with so much memory; *ran* is a trial whose program said so. The first, with
//! [`EpsilonArgs::start`], must run. Then
//! - *as published*: 95 percent of the last memory that ran, until a trial does not run;
//! - else: the geometric mean of the least memory that ran and the most that did not, until they differ by no more than a step.
//!   That takes a seventh of the trials from 2 GiB on, and supposes that a guest that runs with some memory runs with more.
//!
//! Epsilon is the least memory that ran. What the guest itself says is taken at the first memory: what it has less what programs
//! could get there, a cross-check which counts the kernel's tables for all of that memory, and not what only booting needs.
//!
//! # Left out
//! The paper's VM runs its workload's distribution; this has the kernel, an initramfs where one is given, and one program.

mod guest;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Context;
use homenode_linux::cpio::Archive;
use homenode_units::{Bytes, Ns};
use schemars::JsonSchema;
use serde::Serialize;

use crate::args::ShownArgs;
use crate::bad_input;
use crate::output::{print_json, progress, table};
use guest::{Accelerator, Maker, Outcome, Trial};

/// The guest's program.
const INIT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/epsilon-init"));
/// No kernel runs with less; the search begins above it.
const LEAST: Bytes = Bytes(4 << 20);
/// Memory comes in these pieces.
const PIECE: u64 = 64 << 10;
/// A trial takes at most so many times as long as the first, and at least this long.
const LIMIT_OF_FIRST: u32 = 5;
const LIMIT_MIN: Duration = Duration::from_secs(10);

/// Options of `epsilon`.
#[derive(Debug, clap::Args)]
pub struct EpsilonArgs {
    /// The kernel's image, as the guest's boot loader has it (`/boot/vmlinuz-…`)
    #[arg(long, value_name = "FILE")]
    pub kernel: PathBuf,
    /// An initramfs that the guest has in memory too; it is unpacked, and none of its programs run
    #[arg(long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,
    /// How closely to look, or by how much to shrink each time, such as `5%`
    #[arg(long, default_value = "5%")]
    pub step: Step,
    /// Memory to begin with
    #[arg(long, value_name = "SIZE", default_value = "2GiB")]
    pub start: Bytes,
    /// Shrink step by step, as the paper does, and do not bisect
    #[arg(long)]
    pub as_published: bool,
    /// `kvm`, `tcg`, or `auto`: KVM where a guest runs with it, else TCG
    #[arg(long, default_value = "auto")]
    pub accel: Accel,
    /// Longest time for one guest
    #[arg(long, value_name = "DURATION", default_value = "60s")]
    pub limit: Ns,
    /// Another QEMU than the one in `PATH`
    #[arg(long, value_name = "FILE")]
    pub qemu: Option<PathBuf>,
    #[command(flatten)]
    pub shown: ShownArgs,
}

/// A part of memory, from 1 to 50 percent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step(f64);

impl std::str::FromStr for Step {
    type Err = String;
    fn from_str(text: &str) -> Result<Step, String> {
        let number = text
            .strip_suffix('%')
            .and_then(|number| number.trim().parse::<f64>().ok());
        match number {
            Some(percent) if (1.0..=50.0).contains(&percent) => Ok(Step(percent / 100.0)),
            _ => Err(format!("`{text}` is not a step such as `5%`, from 1% to 50%")),
        }
    }
}

/// Which accelerator is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Accel {
    /// The best that works.
    Auto,
    /// The processor's.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

/// What was found.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Found {
    kernel: String,
    accelerator: Accelerator,
    method: &'static str,
    step: f64,
    /// The least memory with which the guest ran.
    epsilon_bytes: Bytes,
    /// The most with which it did not; absent where every trial ran.
    dead_bytes: Option<Bytes>,
    /// What the guest says that it uses, at the first memory.
    guest_says_bytes: Bytes,
    trials: Vec<Trial>,
}

/// `homenode epsilon`.
///
/// # Errors
/// No QEMU, no kernel, or a guest that does not run with the memory to begin with.
pub fn run(args: &EpsilonArgs) -> anyhow::Result<()> {
    anyhow::ensure!(
        !INIT.is_empty(),
        "the guest's program is built for x86-64 only, and this is another processor"
    );
    if args.start <= LEAST {
        return Err(bad_input(format!(
            "--start {}: it must be more than {LEAST}",
            args.start
        )));
    }
    let qemu = guest::find_qemu(args.qemu.as_deref()).map_err(bad_input)?;
    let kernel = boot_image(&args.kernel)?;
    let folder = tempfile::tempdir().context("cannot make a folder for the guest's initramfs")?;
    let initramfs = folder.path().join("initramfs");
    fs::write(&initramfs, archive(args.initrd.as_deref())?)
        .with_context(|| format!("cannot write {}", initramfs.display()))?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let mut search = Search {
        maker: Maker {
            qemu,
            kernel,
            initramfs,
            accelerator: Accelerator::Tcg,
            stop,
        },
        limit: Duration::from_nanos(args.limit.0),
        trials: Vec::new(),
    };
    let start = whole(args.start);
    let guest_says_bytes = search.begin(start, args.accel)?;
    let (epsilon_bytes, dead_bytes) = if args.as_published {
        search.shrink(start, args.step.0)?
    } else {
        search.bisect(start, args.step.0)?
    };
    progress("");
    show(
        &Found {
            kernel: args.kernel.display().to_string(),
            accelerator: search.maker.accelerator,
            method: if args.as_published {
                "as-published"
            } else {
                "bisection"
            },
            step: args.step.0,
            epsilon_bytes,
            dead_bytes,
            guest_says_bytes,
            trials: search.trials,
        },
        args.shown.json,
    )
}

fn show(found: &Found, json: bool) -> anyhow::Result<()> {
    if json {
        return print_json("footprint", found);
    }
    let rows = found.trials.iter().map(|trial| {
        vec![
            trial.memory_bytes.to_string(),
            format!("{:.1}s", trial.took.as_secs_f64()),
            trial.outcome.to_string(),
        ]
    });
    say!("{}\n", table(&["memory", "took", ""], rows));
    let dead = found
        .dead_bytes
        .map_or_else(String::new, |dead| format!(", not with {dead}"));
    say!(
        "{} runs with {}{dead}: its footprint, epsilon ({}, {} trials, {:.0} percent)",
        found.kernel,
        found.epsilon_bytes,
        found.accelerator,
        found.trials.len(),
        found.step * 100.0
    );
    say!(
        "with {} it says itself that it uses {}",
        found.trials[0].memory_bytes,
        found.guest_says_bytes
    );
    Ok(())
}

/// The kernel's image, if it is one.
fn boot_image(path: &Path) -> anyhow::Result<PathBuf> {
    let image = fs::read(path).map_err(|error| bad_input(format!("--kernel {}: {error}", path.display())))?;
    // Boot protocol: "HdrS" in the header of a bzImage; or an ELF image with a PVH entry, which QEMU checks.
    let is_kernel = image.get(0x202..0x206) == Some(b"HdrS") || image.starts_with(b"\x7fELF");
    if !is_kernel {
        let why =
            "it is no x86 kernel image; give the file that a boot loader starts, such as /boot/vmlinuz-*";
        return Err(bad_input(format!("--kernel {}: {why}", path.display())));
    }
    Ok(path.to_owned())
}

/// The user's initramfs, if any, with the guest's program behind it: kernels unpack one archive after the other.
fn archive(initrd: Option<&Path>) -> anyhow::Result<Vec<u8>> {
    let mut bytes = match initrd {
        Some(path) => {
            fs::read(path).map_err(|error| bad_input(format!("--initrd {}: {error}", path.display())))?
        }
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

/// The trials so far, and how the next is made.
struct Search {
    maker: Maker,
    limit: Duration,
    trials: Vec<Trial>,
}

impl Search {
    fn try_with(&mut self, memory: Bytes) -> anyhow::Result<Outcome> {
        progress(&format!("trial {}: {memory} …", self.trials.len() + 1));
        let trial = self.maker.run(memory, self.limit)?;
        let outcome = trial.outcome.clone();
        self.trials.push(trial);
        Ok(outcome)
    }

    /// The first trial, which chooses the accelerator: what the guest says that it uses.
    fn begin(&mut self, start: Bytes, accel: Accel) -> anyhow::Result<Bytes> {
        let has_kvm = fs::File::options()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .is_ok();
        let order = match accel {
            Accel::Auto if has_kvm => vec![Accelerator::Kvm, Accelerator::Tcg],
            Accel::Auto | Accel::Tcg => vec![Accelerator::Tcg],
            Accel::Kvm => vec![Accelerator::Kvm],
        };
        let mut last = None;
        for accelerator in order {
            self.maker.accelerator = accelerator;
            match self.try_with(start)? {
                Outcome::Ran(memory) => {
                    // What did not run with another accelerator says nothing of memory.
                    self.trials.drain(..self.trials.len() - 1);
                    let took = Duration::from_nanos(self.trials[0].took.0);
                    self.limit = self.limit.min((took * LIMIT_OF_FIRST).max(LIMIT_MIN));
                    return Ok(start.saturating_sub(memory.available_bytes));
                }
                other => last = Some((accelerator, other)),
            }
        }
        progress("");
        let (accelerator, outcome) = last.context("there is always an accelerator to try")?;
        anyhow::bail!(
            "the guest does not run with {start} ({accelerator}): {outcome}. Is the kernel built for a serial console and an \
             initramfs? Give more with --start, or more time with --limit"
        )
    }

    /// The least memory that ran and the most that did not, if any, by shrinking a step at a time.
    fn shrink(&mut self, start: Bytes, step: f64) -> anyhow::Result<(Bytes, Option<Bytes>)> {
        let mut ran = start;
        loop {
            let next = whole(Bytes((ran.as_f64() * (1.0 - step)) as u64));
            if next <= LEAST {
                return Ok((ran, None));
            }
            match self.try_with(next)? {
                Outcome::Ran(_) => ran = next,
                _ => return Ok((ran, Some(next))),
            }
        }
    }

    /// The same by bisection.
    fn bisect(&mut self, start: Bytes, step: f64) -> anyhow::Result<(Bytes, Option<Bytes>)> {
        let (mut dead, mut ran, mut has_died) = (LEAST, start, false);
        while dead.as_f64() < ran.as_f64() * (1.0 - step) && ran.0 - dead.0 > PIECE {
            let middle = whole(Bytes((dead.as_f64() * ran.as_f64()).sqrt() as u64));
            let middle = middle.max(dead + Bytes(PIECE)).min(Bytes(ran.0 - PIECE));
            if middle <= dead {
                break;
            }
            match self.try_with(middle)? {
                Outcome::Ran(_) => ran = middle,
                _ => (dead, has_died) = (middle, true),
            }
        }
        Ok((ran, has_died.then_some(dead)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_a_part_in_percent() {
        assert_eq!("5%".parse(), Ok(Step(0.05)));
        for bad in ["5", "0%", "51%", "x%", "%", "-5%"] {
            assert!(bad.parse::<Step>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_guests_program_is_static_and_comes_behind_the_users_archive() {
        assert!(INIT.starts_with(b"\x7fELF") && INIT.len() < 64 << 10);
        // No program interpreter: nothing else is in the guest.
        assert!(!INIT.windows(3).any(|window| window == b"ld-"));
        let folder = tempfile::tempdir().unwrap();
        let theirs = folder.path().join("theirs");
        fs::write(&theirs, b"12345").unwrap();
        let all = archive(Some(&theirs)).unwrap();
        assert_eq!((&all[..5], &all[8..14]), (&b"12345"[..], &b"070701"[..]));
    }
}
