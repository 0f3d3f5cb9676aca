//! Runs the host contract's checks on a live libvirt host and one of its VMs. No other program may touch the VM meanwhile.
//!
//! ```text
//! conformance [URI] VM-NAME [STATE-DIR]
//! ```
//!
//! Prints one line per check; the exit status is 1 if any failed. Restores the VM at the end.

#![allow(clippy::print_stdout, clippy::print_stderr)] // a program for people and for the testbed

use std::process::ExitCode;

use homenode_host::Host;
use homenode_host::conformance::{CHECKS, Verdict};
use homenode_kvm::{KvmHost, Vms};
use homenode_undo::Options;
use homenode_undo::RealHost as _;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (vms, rest) = match args.split_first() {
        Some((first, rest)) if first == "qemu" => (Vms::Qemu, rest),
        Some((first, rest)) if first.contains("://") => (Vms::Libvirt(first.clone()), rest),
        _ => (Vms::of_libvirt(), args.as_slice()),
    };
    let Some(name) = rest.first() else {
        eprintln!("usage: conformance [URI|qemu] VM-NAME [STATE-DIR]");
        return ExitCode::from(2);
    };
    match run(&vms, name, rest.get(1)) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the checks. Returns how many failed.
fn run(vms: &Vms, name: &str, state: Option<&String>) -> Result<usize, Box<dyn std::error::Error>> {
    let mut options = Options::new(homenode_machine_files::sysfs::read(std::path::Path::new("/"))?);
    if let Some(state) = state {
        options.state_dir = state.into();
    }
    let mut host = KvmHost::connect(vms, options)?;
    let sample = host.sample()?;
    println!("{sample:#?}");
    let vm = sample
        .vms
        .iter()
        .find(|vm| vm.name == *name)
        .ok_or_else(|| format!("no VM {name} runs"))?
        .id;
    let mut failed = 0;
    for check in CHECKS {
        match (check.run)(&mut host, vm) {
            Ok(Verdict::Passed) => println!("pass  {}", check.name),
            Ok(Verdict::Skipped(why)) => println!("skip  {}: {why}", check.name),
            Err(why) => {
                failed += 1;
                println!("FAIL  {}: {why}", check.name);
            }
        }
    }
    for notice in host.take_notices().into_iter().chain(host.restore().failures) {
        println!("note  {notice}");
    }
    Ok(failed)
}
