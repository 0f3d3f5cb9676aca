//! `homenode kernel-footprint`: how much memory a guest kernel takes for itself.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::bail;
use homenode_calibrate::footprint::{Accelerator, FootprintError, Method, Options, footprint};
use homenode_units::Ns;

use crate::bad_input;
use crate::options::{ShownArgs, Size};
use crate::print::{print_json, table};
use crate::progress::by_step;

/// Options of `kernel-footprint`.
#[derive(Debug, clap::Args)]
pub(crate) struct FootprintArgs {
    /// The kernel image that a boot loader starts (`/boot/vmlinuz-…`)
    #[arg(long, value_name = "FILE")]
    pub kernel: PathBuf,
    /// An initramfs that the guest also unpacks into its memory; none of its programs run
    #[arg(long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,
    /// Precision of the result, such as `5%`; with --as-published, how much to shrink memory at each step
    #[arg(long, default_value = "5%")]
    pub step: Step,
    /// Memory of the first guest, such as `2GiB`; a bare number is MiB
    #[arg(long, value_name = "SIZE", default_value = "2GiB")]
    pub start: Size,
    /// Shrink memory step by step, as in the paper, instead of bisecting
    #[arg(long)]
    pub as_published: bool,
    /// Accelerator of QEMU
    #[arg(long, default_value = "auto")]
    pub accel: Accel,
    /// Time limit for each guest
    #[arg(long, value_name = "DURATION", default_value = "60s")]
    pub limit: Ns,
    /// QEMU to use instead of the one in `PATH`
    #[arg(long, value_name = "FILE")]
    pub qemu: Option<PathBuf>,
    #[command(flatten)]
    pub shown: ShownArgs,
}

/// A part of memory, from 1 to 50 percent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Step(f64);

impl std::str::FromStr for Step {
    type Err = anyhow::Error;
    fn from_str(text: &str) -> anyhow::Result<Step> {
        let number = text
            .strip_suffix('%')
            .and_then(|number| number.trim().parse::<f64>().ok());
        match number {
            Some(percent) if (1.0..=50.0).contains(&percent) => Ok(Step(percent / 100.0)),
            _ => bail!("`{text}` is not a step such as `5%`, from 1% to 50%"),
        }
    }
}

/// The requested accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Accel {
    /// KVM if a guest runs with it, else TCG.
    Auto,
    /// The processor's virtualization.
    Kvm,
    /// QEMU's translation of instructions.
    Tcg,
}

/// `homenode kernel-footprint`.
///
/// # Errors
/// No QEMU, no kernel, or a guest that does not run even with the initial memory.
pub(crate) fn run(args: &FootprintArgs) -> anyhow::Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let options = Options {
        kernel: args.kernel.clone(),
        initrd: args.initrd.clone(),
        step: args.step.0,
        start: args.start.0,
        method: match args.as_published {
            true => Method::AsPublished,
            false => Method::Bisection,
        },
        accelerators: accelerators(args.accel),
        limit: args.limit,
        qemu: args.qemu.clone(),
    };
    let found = footprint(&options, stop, &mut by_step());
    let found = found.map_err(|error| match error {
        FootprintError::Given(_) => bad_input(error),
        other => other.into(),
    })?;
    if args.shown.json {
        return print_json("footprint", &found);
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
        .map_or_else(String::new, |dead| format!(", but not with {dead}"));
    say!(
        "{} runs with {}{dead}; that is its footprint ({}, {} trials, step {:.0} percent)",
        found.kernel,
        found.footprint_bytes,
        found.accelerator,
        found.trials.len(),
        found.step * 100.0
    );
    say!(
        "with {}, the guest itself reports using {}",
        found.trials[0].memory_bytes,
        found.guest_says_bytes
    );
    Ok(())
}

/// Accelerators in the order in which they are tried.
fn accelerators(asked: Accel) -> Vec<Accelerator> {
    let has_kvm = || File::options().read(true).write(true).open("/dev/kvm").is_ok();
    match asked {
        Accel::Auto if has_kvm() => vec![Accelerator::Kvm, Accelerator::Tcg],
        Accel::Auto | Accel::Tcg => vec![Accelerator::Tcg],
        Accel::Kvm => vec![Accelerator::Kvm],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_a_part_in_percent() {
        assert_eq!("5%".parse::<Step>().unwrap(), Step(0.05));
        for bad in ["5", "0%", "51%", "x%", "%", "-5%"] {
            assert!(bad.parse::<Step>().is_err(), "{bad}");
        }
    }
}
