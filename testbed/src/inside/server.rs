//! The inside's main loop: prepares the host, then runs the outside's jobs, one at a time.
//!
//! Each case is a process of its own, so one that panics, hangs or leaves things behind does not affect the others. At its
//! time limit a case is killed with everything it started, and its guests are destroyed.

use std::fs;
use std::io::{BufRead as _, BufReader, Read};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process_group};

use super::{kvm, libvirtd, xen};
use crate::cases;
use crate::exchange::{CAPABILITIES_DIR, Event, Exchange, Job};

const POLL: Duration = Duration::from_millis(200);
const BEAT: Duration = Duration::from_secs(2);
/// Time limit for commands entered by hand.
const SHELL_LIMIT: Duration = Duration::from_secs(1800);

/// Exit status of a case whose guest vanished.
pub const EXIT_GUEST_VANISHED: u8 = 75;

/// How a job's process failed.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
struct JobFailed {
    text: String,
    infrastructure: bool,
}

/// Serves jobs until told to finish.
///
/// # Errors
/// When the exchange directory does not work.
pub fn serve(root: &Path) -> anyhow::Result<()> {
    let exchange = Exchange::at(root);
    let uptime = fs::read_to_string("/proc/uptime").unwrap_or_default();
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")
        .unwrap_or_default()
        .trim()
        .to_owned();
    let uptime_s = uptime
        .split_whitespace()
        .next()
        .and_then(|text| text.parse().ok())
        .unwrap_or(0.0);
    exchange.report(&Event::Up { kernel, uptime_s })?;
    beat(&exchange);

    let begin = Instant::now();
    // The VM is held until the end: see `kvm::hold_vm`.
    let _vm = match prepare() {
        Ok(vm) => vm,
        Err(error) => {
            let reason = format!("{error:#}");
            return exchange.report(&Event::Unusable { reason });
        }
    };
    exchange.report(&Event::Ready {
        seconds: begin.elapsed().as_secs_f64(),
    })?;
    for number in 1.. {
        let job = loop {
            match exchange.job(number)? {
                Some(job) => break job,
                None => thread::sleep(POLL),
            }
        };
        if job == Job::Finish {
            break;
        }
        exchange.report(&Event::Begin { job: number })?;
        let begin = Instant::now();
        let error = run(&exchange, number, &job).err();
        let infrastructure = error
            .as_ref()
            .and_then(|error| error.downcast_ref())
            .is_some_and(|failed: &JobFailed| failed.infrastructure);
        let error = error.map(|error| format!("{error:#}"));
        let seconds = begin.elapsed().as_secs_f64();
        exchange.report(&Event::End {
            job: number,
            seconds,
            error,
            infrastructure,
        })?;
        let kept = exchange.root().join(CAPABILITIES_DIR);
        if !kept.exists() {
            // A failure is ignored, because the files only save time in later boots.
            let _ = libvirtd::save_capabilities(&kept);
        }
    }
    Ok(())
}

/// Prepares the host. The returned VM keeps KVM in use while it lives; a dom0 has none.
fn prepare() -> anyhow::Result<Option<kvm::HeldVm>> {
    let program =
        std::env::current_exe().context("cannot find this program's own file, which cases run from")?;
    let bin = program
        .parent()
        .context("the path of this program has no directory")?;
    if xen::is_dom0() {
        xen::prepare(bin)?;
        libvirtd::start()?;
        return Ok(None);
    }
    libvirtd::prepare(bin)?;
    libvirtd::restore_capabilities(&bin.join(CAPABILITIES_DIR))?;
    let vm = kvm::hold_vm()?;
    libvirtd::start()?;
    Ok(Some(vm))
}

/// Writes a heartbeat every two seconds from a separate thread.
fn beat(exchange: &Exchange) {
    let exchange = exchange.clone();
    let count = Arc::new(AtomicU64::new(0));
    thread::spawn(move || {
        loop {
            // An error needs no report, as the outside notices a missing heartbeat.
            let _ = exchange.beat(count.fetch_add(1, Ordering::Relaxed));
            thread::sleep(BEAT);
        }
    });
}

fn run(exchange: &Exchange, number: u64, job: &Job) -> anyhow::Result<()> {
    match job {
        Job::Finish => Ok(()),
        Job::Shell(text) => {
            let mut command = Command::new("bash");
            command.args(["-c", text]);
            follow(exchange, number, command, SHELL_LIMIT)
        }
        Job::Case(name) => {
            let case = cases::find(name).with_context(|| format!("no case is called '{name}'"))?;
            let mut command = Command::new(
                std::env::current_exe()
                    .context("cannot find this program's own file, which cases run from")?,
            );
            command.arg("inside-case").arg(exchange.root()).arg(name);
            let outcome = follow(exchange, number, command, case.limit);
            if outcome.is_err() {
                // A failure is ignored, because the case's own error is the one to report.
                let _ = keep_logs(&exchange.case_dir(name));
            }
            let cleaned =
                libvirtd::clean_up().context("the case left the host in a state that cannot be cleaned up");
            outcome.and(cleaned)
        }
    }
}

/// Runs a command until it ends or exceeds its limit. Its output becomes notes. If it fails, the last lines of its standard
/// error become the reason.
fn follow(exchange: &Exchange, job: u64, mut command: Command, limit: Duration) -> anyhow::Result<()> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .context("cannot start the job's process")?;
    let notes = child.stdout.take().map(|output| {
        let exchange = exchange.clone();
        thread::spawn(move || {
            for text in BufReader::new(output).lines().map_while(Result::ok) {
                let _ = exchange.report(&Event::Note { job, text });
            }
        })
    });
    let errors = child.stderr.take().map(|mut output| {
        thread::spawn(move || {
            let mut text = Vec::new();
            let _ = output.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        })
    });
    let outcome = wait(&mut child, limit);
    end_group(&child);
    if let Some(notes) = notes {
        let _ = notes.join();
    }
    let said = errors.and_then(|thread| thread.join().ok()).unwrap_or_default();
    let said = said.trim();
    match outcome? {
        None => anyhow::bail!(
            "the case did not end within its limit of {} s; its last output: {said}",
            limit.as_secs()
        ),
        Some(status) if status.success() => Ok(()),
        Some(status) => {
            let text = if said.is_empty() {
                format!("ended with {status} and said nothing")
            } else {
                said.to_owned()
            };
            let infrastructure = status.code() == Some(i32::from(EXIT_GUEST_VANISHED));
            Err(JobFailed { text, infrastructure }.into())
        }
    }
}

fn wait(child: &mut Child, limit: Duration) -> anyhow::Result<Option<std::process::ExitStatus>> {
    let begin = Instant::now();
    while begin.elapsed() < limit {
        if let Some(status) = child.try_wait().context("cannot wait for the job's process")? {
            return Ok(Some(status));
        }
        thread::sleep(POLL);
    }
    Ok(None)
}

/// Kills what is left of the job's process group, which also closes the pipes.
fn end_group(child: &Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL);
    }
}

/// Copies files that help to understand a failure to a place where the outside can read them.
fn keep_logs(dir: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(dir)?;
    for from in [libvirtd::RUN_DIR, "/var/log/libvirt/qemu"] {
        for entry in fs::read_dir(from).into_iter().flatten().flatten() {
            if entry
                .path()
                .extension()
                .is_some_and(|extension| extension == "log")
            {
                let name = format!(
                    "{}-{}",
                    from.rsplit('/').next().unwrap_or(""),
                    entry.file_name().to_string_lossy()
                );
                fs::copy(entry.path(), dir.join(name))?;
            }
        }
    }
    if xen::is_dom0() {
        xen::keep_logs(dir)?;
    }
    fs::write(dir.join("dmesg"), libvirtd::run("dmesg", &[])?)?;
    Ok(())
}
