//! An emulated host for work by hand. `up` keeps a host running, which `sh` and `case` use.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

use super::emulated::{EmulatedHost, HostKind, Workshop};
use super::guard::Guard;
use super::{Lost, Options, Session, catch_signals, new_run_dir};
use crate::exchange::{Event, Events, Exchange, Job};

fn pointer(workspace: &Path) -> PathBuf {
    workspace.join("target/testbed/up")
}

/// Boots a host and keeps it until interrupted.
///
/// # Errors
/// When the host does not come up, or has died.
pub fn up(options: &Options, kind: HostKind) -> anyhow::Result<()> {
    let interrupt = catch_signals()?;
    let mut guard = Guard::start()?;
    let dir = new_run_dir(&options.workspace)?;
    let workshop = Workshop::prepare(options, &dir)?;
    let host = EmulatedHost::boot(&workshop, kind, &dir.join("boot-1"), &mut guard)?;
    let pointer = pointer(&options.workspace);
    fs::write(
        &pointer,
        format!("{}\n{}", std::process::id(), host.dir.display()),
    )
    .with_context(|| format!("cannot write {}", pointer.display()))?;
    let mut session = Session::new(host, Arc::clone(&interrupt));
    let outcome = match session.wait_ready()? {
        Ok(boot) => {
            println!(
                "up after {:.0} s, libvirt answered {:.0} s later: use the commands 'sh' and 'case'",
                boot.up_s, boot.libvirt_s
            );
            loop {
                match session.poll()? {
                    Ok(_) => {}
                    Err(lost) => break lost,
                }
            }
        }
        Err(lost) => lost,
    };
    let _ = fs::remove_file(&pointer);
    session.host.end(&mut guard)?;
    match outcome {
        Lost::Host(why) | Lost::Guest(why) => {
            bail!("the emulated host has died: {why} (log: {})", dir.display())
        }
        Lost::Interrupted => {
            ensure!(
                interrupt.load(Ordering::Relaxed),
                "the session was interrupted without a request"
            );
            fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))
        }
    }
}

/// Runs a shell command in the host that `up` keeps.
///
/// # Errors
/// When no host is up, or the command failed.
pub fn shell(options: &Options, command: &str) -> anyhow::Result<()> {
    follow(options, &Job::Shell(command.to_owned()))
}

/// Runs a case of this very program in the host that `up` keeps. The host may have booted with an older program.
///
/// # Errors
/// When no host is up, or the case failed.
pub fn case(options: &Options, name: &str) -> anyhow::Result<()> {
    let boot = running_boot(options)?;
    let bin = boot.join("bin");
    // A new name each time, because the emulated host may cache the file of an old name.
    let program = bin.join(format!("homenode-testbed-{}", std::process::id()));
    fs::copy(std::env::current_exe()?, &program)
        .with_context(|| format!("cannot copy to {}", program.display()))?;
    if let Some(homenode) = &options.homenode {
        let copy = program.with_extension("homenode");
        fs::copy(homenode, &copy).with_context(|| format!("cannot copy to {}", copy.display()))?;
    }
    let command = format!(
        "{} inside-case --clean {} {name}",
        program.display(),
        boot.join("exchange").display()
    );
    follow(options, &Job::Shell(command))
}

fn running_boot(options: &Options) -> anyhow::Result<PathBuf> {
    let text = fs::read_to_string(pointer(&options.workspace)).unwrap_or_default();
    // An `up` that was killed leaves its note behind.
    let running = text
        .split_once('\n')
        .filter(|(keeper, _)| Path::new("/proc").join(keeper).exists());
    let (_, boot) = running.context("no host is up: start one with 'up'")?;
    Ok(PathBuf::from(boot))
}

fn follow(options: &Options, job: &Job) -> anyhow::Result<()> {
    let exchange = Exchange::at(&running_boot(options)?.join("exchange"));
    let mut events = Events::of(&exchange);
    let number = exchange.next_job_number();
    exchange.submit(number, job)?;
    loop {
        for event in events.read()? {
            match event {
                Event::Note { job, text } if job == number => println!("{text}"),
                Event::End { job, error, .. } if job == number => match error {
                    None => return Ok(()),
                    Some(error) => bail!("{error}"),
                },
                _ => {}
            }
        }
        running_boot(options).context("the emulated host has ended")?;
        thread::sleep(Duration::from_millis(200));
    }
}
