//! The agent on a real host: crash safety around the same loop.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context;
use homenode_control::{Config, Control, Mode};
use homenode_linux::guard::{self, Guard};
use homenode_linux::journal::Journal;
use homenode_linux::{Acting, ConnectError, LibvirtHost, Options};
use serde::Serialize;

use crate::agent::{Agent, Pace, Stop};
use crate::args::{GuardArgs, ReleaseArgs, RunArgs};
use crate::bad_input;
use crate::books::{Books, Clock};
use crate::desk::{Clerk, Desk};
use crate::orders::Orders;
use crate::output::Output;

/// How long a restarted agent has to take over before the guard restores what the dead one had set.
const GRACE: &str = "10s";

/// What a run on a real host was, said last.
#[derive(Debug, Serialize)]
struct Summary {
    policies: Vec<LivePolicy>,
    agent_cpu_s: f64,
    kept: bool,
}

#[derive(Debug, Serialize)]
struct LivePolicy {
    policy: &'static str,
    vms: Vec<homenode_control::VmStatus>,
}

/// Runs the agent on a libvirt host.
///
/// # Errors
/// No libvirt, no permission, one node only, another agent.
pub fn run(
    args: &RunArgs,
    config: &Config,
    uri: Option<&str>,
    mut output: Output,
    stop: &Stop,
) -> anyhow::Result<()> {
    let uri = uri.unwrap_or(LibvirtHost::DEFAULT_URI);
    let machine = homenode_machine::sysfs::read(Path::new("/"))?;
    anyhow::ensure!(
        machine.memory_nodes().len() > 1,
        "this host has one NUMA node, so there is nothing to place or move; try `homenode run --host twin`"
    );
    let state = args
        .state
        .clone()
        .unwrap_or_else(|| homenode_linux::journal::STATE_DIR.into());
    let mode = if args.dry_run { Mode::DryRun } else { Mode::Act };
    let options = Options {
        state_dir: state.clone(),
        acting: if args.dry_run {
            Acting::DryRun
        } else {
            Acting::Live
        },
        stop: Arc::clone(stop),
        ..Options::new(machine.clone())
    };
    let mut host = LibvirtHost::connect(uri, options).map_err(connect_error)?;
    let policies = config.policies;
    let books_dir = (!args.dry_run).then_some(state.as_path());
    let (books, bill) = Books::open(books_dir, Clock::Wall);
    let mut control = Control::new(config.clone(), mode).with_bill(bill);
    for vm in host.carried_over() {
        control.adopt(vm.vm, vm.home);
    }
    let control = Arc::new(Mutex::new(control));
    let guard = if args.dry_run {
        None
    } else {
        Some(start_guard(&state, uri)?)
    };
    let orders = Orders::default();
    let desk = if args.dry_run {
        None
    } else {
        let clerk = Clerk {
            machine: Arc::new(machine.clone()),
            control: Arc::clone(&control),
            orders: orders.clone(),
        };
        Some(Desk::open(&state, clerk)?)
    };
    let mut agent = Agent {
        control: Arc::clone(&control),
        orders,
        books,
        output: &mut output,
        stop,
        duration: args.duration,
        period: config.period,
        pace: Pace::Own,
    };
    agent.announce(format!("{} at {uri}", machine.name), None, mode);
    agent.run(&mut host, LibvirtHost::take_notices, |_| false);
    drop(desk);
    let failures = if args.keep {
        host.lift_limits()
    } else {
        host.restore()
    };
    // What could not be given back is left to the guard, which tries again once the agent is gone.
    match guard {
        Some(guard) if failures.is_empty() => guard.goodbye(),
        guard => drop(guard),
    }
    for failure in &failures {
        output.line(failure);
    }
    let control = control.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let summary = Summary {
        policies: vec![LivePolicy {
            policy: policies.name(),
            vms: control.status(&machine).vms,
        }],
        agent_cpu_s: cpu_time().as_secs_f64(),
        kept: args.keep,
    };
    output.object("summary", &summary);
    let left = if args.keep {
        "homes and pins are left as they are"
    } else {
        "homes and pins are given back"
    };
    output.line(&format!(
        "stopped after {:.2} s of CPU time; {left}",
        summary.agent_cpu_s
    ));
    anyhow::ensure!(
        failures.is_empty(),
        "not everything could be given back; the guard goes on trying, and so does `homenode release`"
    );
    Ok(())
}

/// Processor time that this process has used.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn start_guard(state: &Path, uri: &str) -> anyhow::Result<Guard> {
    let exe = std::env::current_exe().context("cannot find the program's own file, which the guard runs")?;
    let state = state.display().to_string();
    let arguments = ["guard", "--uri", uri, "--state", &state, "--grace", GRACE].map(str::to_owned);
    Ok(guard::spawn(&exe, &arguments)?)
}

/// `homenode guard`: waits for the agent's end.
///
/// # Errors
/// When the journal cannot be read.
pub fn guard(args: &GuardArgs) -> anyhow::Result<()> {
    let (pipe, mut ready) = (std::io::stdin().lock(), std::io::stdout());
    let undo = |journal: &mut Journal, vm| homenode_linux::undo(&args.uri, Path::new("/"), journal, vm);
    guard::run(
        pipe,
        &mut ready,
        &args.state,
        Duration::from_nanos(args.grace.0),
        undo,
    )?;
    Ok(())
}

/// `homenode release`: restores what the journal lists.
///
/// # Errors
/// When an agent runs, or something cannot be restored.
pub fn release(args: &ReleaseArgs) -> anyhow::Result<()> {
    let machine = homenode_machine::sysfs::read(Path::new("/"))?;
    let options = Options {
        state_dir: args.state.clone(),
        ..Options::new(machine)
    };
    let mut host = LibvirtHost::connect(&args.uri, options).map_err(connect_error)?;
    let count = host.carried_over().len();
    let failures = host.restore();
    anyhow::ensure!(failures.is_empty(), "{}", failures.join("\n"));
    say!("{count} VMs are as they were before homenode touched them");
    Ok(())
}

/// Connection errors that the user's input caused, apart from the world's.
fn connect_error(error: ConnectError) -> anyhow::Error {
    match error {
        ConnectError::BadUri { .. } => bad_input(error),
        other => other.into(),
    }
}
