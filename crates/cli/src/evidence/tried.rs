//! On which VMs the agent is tried: those of this host, or VMs of this command on a host that has none.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use homenode_api::Request;
use homenode_api::answer::Overview;
use homenode_control::Mode;
use homenode_evidence::measure::Mix;
use homenode_evidence::{Report, Topic, Trial};
use homenode_machine::Machine;
use homenode_units::Ns;

use super::trial::{self, Planned};
use super::{EvidenceArgs, SECTIONS_SHARE};
use crate::ask::ask_agent;

/// How long the agent may take to see the VMs that this command has started.
const SEEN_WITHIN: Duration = Duration::from_secs(120);
/// How long VMs of this command work beyond the trial that was asked for: they boot before it, and spoilt blocks are repeated.
const LONGER: Duration = Duration::from_secs(8 * 3600);

/// Whether a run tries the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Crossover {
    /// It does not.
    No,
    /// It does if an agent acts here.
    IfPossible,
    /// The user asked for it.
    Asked,
}

/// On which VMs the agent is tried.
pub(super) enum Tried<'a> {
    /// On none.
    None,
    /// On those of this host.
    Here(Box<Planned<'a>>),
    /// On those that this command starts when the sections are measured.
    Own(OwnVms<'a>),
}

/// VMs of this command, to be started.
pub(super) struct OwnVms<'a> {
    args: &'a EvidenceArgs,
    machine: &'a Machine,
    crossover: Crossover,
    length: Option<Ns>,
}

impl<'a> Tried<'a> {
    /// Plans the crossover. If the user did not ask for it and it is not possible, says why.
    ///
    /// # Errors
    /// The user asked for it, and it is not possible.
    pub(super) fn of(
        args: &'a EvidenceArgs,
        machine: &'a Machine,
        topics: &[Topic],
        crossover: Crossover,
        report: &Report,
        directory: &Path,
    ) -> anyhow::Result<Tried<'a>> {
        if crossover == Crossover::No {
            return Ok(Tried::None);
        }
        let share = if topics.is_empty() { 0.0 } else { SECTIONS_SHARE };
        let minutes = args.minutes.map(|minutes| minutes as f64 * (1.0 - share));
        let length = minutes.map(|minutes| Ns((minutes * 60e9).round() as u64));
        if args.vms.is_empty() && has_no_vms(args.agent.dir()) {
            return Ok(Tried::Own(OwnVms {
                args,
                machine,
                crossover,
                length,
            }));
        }
        let planned = trial::plan(args, length, report.crossover.as_ref(), directory);
        let planned = if_asked(crossover, planned)?;
        Ok(planned.map_or(Tried::None, |planned| Tried::Here(Box::new(planned))))
    }

    /// Returns true if nothing is left to be tried.
    pub(super) fn is_complete(&self, report: &Report) -> bool {
        match self {
            Tried::None => true,
            Tried::Here(planned) => planned.is_complete(),
            Tried::Own(_) => report.crossover.as_ref().is_some_and(Trial::is_complete),
        }
    }

    /// Returns how many VMs of others the agent sees.
    pub(super) fn vms(&self) -> Option<usize> {
        match self {
            Tried::None => None,
            Tried::Here(planned) => Some(planned.vms),
            Tried::Own(_) => Some(0),
        }
    }

    /// Says what will happen, and how long it takes.
    pub(super) fn announce(&self) {
        match self {
            Tried::None => {}
            Tried::Here(planned) => planned.announce(),
            Tried::Own(own) => say!(
                "no VM runs here: {} VMs of this command work meanwhile, and end with it",
                Mix::count(own.machine)
            ),
        }
    }

    /// Runs the blocks that are left, and keeps each in the report.
    ///
    /// # Errors
    /// The agent does not answer; files cannot be written; VMs do not start although the user asked for a crossover.
    pub(super) fn run(&mut self, report: &mut Report, directory: &Path) -> anyhow::Result<()> {
        match self {
            Tried::None => Ok(()),
            Tried::Here(planned) => planned.run(report, directory),
            Tried::Own(own) => own.run(report, directory),
        }
    }
}

impl OwnVms<'_> {
    fn run(&self, report: &mut Report, directory: &Path) -> anyhow::Result<()> {
        let Some(mix) = if_asked(self.crossover, self.start())? else {
            return Ok(());
        };
        let planned = wait_seen(self.args.agent.dir(), mix.names())
            .and_then(|()| trial::plan(self.args, self.length, report.crossover.as_ref(), directory));
        let Some(mut planned) = if_asked(self.crossover, planned)? else {
            return Ok(());
        };
        if !self.args.agent.json() {
            planned.announce();
        }
        planned.run(report, directory)
    }

    fn start(&self) -> anyhow::Result<Mix> {
        let program = std::env::current_exe()
            .context("cannot find this program's own file, by which VMs' programs lie")?;
        let works = self
            .length
            .map_or(LONGER, |length| Duration::from_nanos(length.0) + LONGER);
        Ok(Mix::start(
            self.machine,
            &program,
            self.args.kernel.as_deref(),
            works,
        )?)
    }
}

/// Returns `None`, and says why on standard error, if something failed that the user did not ask for.
fn if_asked<T>(crossover: Crossover, made: anyhow::Result<T>) -> anyhow::Result<Option<T>> {
    match made {
        Ok(made) => Ok(Some(made)),
        Err(error) if crossover == Crossover::Asked => Err(error),
        Err(error) => {
            complain!("homenode: without a crossover, the agent on and off: {error:#}");
            Ok(None)
        }
    }
}

/// Returns true if an agent answers that sees no VM, or only VMs that an earlier run of this command started.
fn has_no_vms(state: &Path) -> bool {
    let now: anyhow::Result<Overview> = ask_agent(state, &Request::Overview);
    now.is_ok_and(|now| now.status.vms.iter().all(|vm| Mix::is_its(&vm.name)))
}

/// Waits until the agent acts on the VMs of these names and counts their instructions.
fn wait_seen(state: &Path, names: &[String]) -> anyhow::Result<()> {
    let begin = Instant::now();
    loop {
        let now: Overview = ask_agent(state, &Request::Overview)?;
        let is_seen = |name: &String| {
            let mut vms = now.status.vms.iter();
            vms.any(|vm| vm.name == *name && vm.mode == Mode::Act && vm.counted_by.is_some())
        };
        // After this time `trial::plan` says what is missing.
        if names.iter().all(is_seen) || begin.elapsed() >= SEEN_WITHIN {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}
