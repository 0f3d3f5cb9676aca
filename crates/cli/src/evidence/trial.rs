//! The agent on and off: a randomised crossover on the VMs of this host.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use homenode_agent::wall_clock::now_ns;
use homenode_api::answer::{self, Overview};
use homenode_api::{ApiError, AskError, Request};
use homenode_control::{Mode, VmStatus};
use homenode_evidence::crossover::{Acting, Crossover, Look, Subject, run_block};
use homenode_evidence::{Report, Trial};
use homenode_reproduce::jobs::Progress;
use homenode_units::Ns;

use super::EvidenceArgs;
use super::files::{REPORT, keep};
use crate::ask::ask_agent;
use crate::bad_input;
use crate::print::span;

/// The usual length of a trial.
const HOUR: Ns = Ns::from_secs(3600);
/// Most blocks that may be spoilt before the trial ends.
const SPOILT_MAX: u32 = 8;
const REMEDY: &str = "start the agent with `homenode run --mode act`, or choose other VMs with --vms";
/// How long to wait before the agent is asked for its next sample.
const ASK_EVERY: Duration = Duration::from_millis(100);
/// How often the agent is asked in vain before the trial ends: it may be restarting.
const SILENT_MAX: u32 = 300;
/// How often the agent is asked without a newer sample before the trial ends: for ten minutes.
const OLD_MAX: u32 = 6000;

/// A trial that can begin or go on.
pub(super) struct Planned<'a> {
    agent: Agent<'a>,
    trial: Trial,
    /// Number of VMs that the agent sees.
    pub vms: usize,
}

/// Plans a trial, or the rest of the one in the report. `length` is how long it may take, if that was said.
///
/// # Errors
/// No agent; VMs on which it does not act; too little time.
pub(super) fn plan<'a>(
    args: &'a EvidenceArgs,
    length: Option<Ns>,
    before: Option<&Trial>,
    directory: &Path,
) -> anyhow::Result<Planned<'a>> {
    let state = args.agent.dir();
    let now: Overview = ask_agent(state, &Request::Overview)?;
    let is_continued = before.is_some_and(|before| !before.is_complete());
    let agent = Agent {
        state,
        vms: chosen(&now, &args.vms, is_continued)?,
        seen: now.status.at_ns,
    };
    let trial = match before {
        Some(before) => continued(args, &agent, before, directory)?,
        None => begun(args, length, &agent)?,
    };
    Ok(Planned {
        agent,
        trial,
        vms: now.status.vms.len(),
    })
}

impl Planned<'_> {
    /// Returns true if all blocks were measured.
    pub(super) fn is_complete(&self) -> bool {
        self.trial.is_complete()
    }

    /// Says what will happen, and how long it takes.
    pub(super) fn announce(&self) {
        let plan = &self.trial.plan;
        let left = plan.blocks.len() - self.trial.blocks.len();
        say!(
            "{} VMs, {left} blocks of {}, {} in all: in half of them the agent only observes, with no limit and no home in force",
            self.agent.vms.len(),
            span(plan.block_ns),
            span(Ns(plan.block_ns.0 * left as u64)),
        );
    }

    /// Runs the blocks that are left, and keeps each in the report.
    ///
    /// # Errors
    /// The agent does not answer; files cannot be written.
    pub(super) fn run(&mut self, report: &mut Report, directory: &Path) -> anyhow::Result<()> {
        let measured = measure(&mut self.agent, &mut self.trial, report, directory);
        // Whatever happened; leases end by themselves, too.
        let released = self.agent.set(Acting::Acts, Ns::ZERO);
        measured.and(released)
    }
}

/// Plans a new trial.
fn begun(args: &EvidenceArgs, length: Option<Ns>, agent: &Agent<'_>) -> anyhow::Result<Trial> {
    let vms = agent.vms.len();
    let seed = args.seed.unwrap_or_else(|| now_ns().unsigned_abs());
    let of = |length| Crossover::of(length, vms, seed);
    let plan = match length {
        Some(length) => of(length),
        None => of(HOUR).or_else(|short| short.least.map_or(Err(short), of)),
    };
    let plan =
        plan.map_err(|short| bad_input(format!("{short}; give --minutes, or fewer VMs with --vms")))?;
    Ok(Trial::begun(agent.names(), plan))
}

/// Checks that a trial that was interrupted can be continued by this command.
fn continued(args: &EvidenceArgs, agent: &Agent<'_>, old: &Trial, directory: &Path) -> anyhow::Result<Trial> {
    let is_same = old.about == agent.names() && args.seed.is_none_or(|seed| seed == old.plan.seed);
    if !is_same {
        return Err(bad_input(format!(
            "{} is of a run with other VMs ({}) or another seed; choose another -o",
            directory.join(REPORT).display(),
            old.about
                .iter()
                .map(String::as_str)
                .collect::<Vec<_>>()
                .join(", ")
        )));
    }
    if old.is_complete() {
        return Ok(old.clone());
    }
    let mut blocks = old.blocks.clone();
    blocks.truncate(old.plan.next(blocks.len()));
    Ok(old.clone().with_blocks(blocks))
}

/// Runs the blocks that are left, and keeps each.
fn measure(
    agent: &mut Agent<'_>,
    trial: &mut Trial,
    report: &mut Report,
    directory: &Path,
) -> anyhow::Result<()> {
    let progress = Progress::new("");
    let mut spoilt = 0;
    while !trial.is_complete() {
        let (at, all) = (trial.blocks.len(), trial.plan.blocks.len());
        let acting = trial.plan.blocks[at];
        progress.at(
            &format!("[{}/{all}] the agent {}", at + 1, doing(acting)),
            at as f64 / all as f64,
        );
        let block = run_block(agent, &trial.plan, acting)?;
        let mut blocks = trial.blocks.clone();
        match block {
            Some(block) => blocks.push(block),
            None => {
                spoilt += 1;
                anyhow::ensure!(
                    spoilt < SPOILT_MAX,
                    "{SPOILT_MAX} blocks were spoilt, as the agent was restarted or paused, or modes were set meanwhile"
                );
                progress.note("a block was spoilt: the agent was restarted or paused, or modes were set; its pair runs again");
                blocks.truncate(trial.plan.next(at));
            }
        }
        *trial = trial.clone().with_blocks(blocks);
        *report = report.clone().with_crossover(trial.clone());
        keep(directory, report)?;
    }
    Ok(())
}

fn doing(acting: Acting) -> &'static str {
    match acting {
        Acting::Acts => "acts",
        Acting::Observes => "observes",
    }
}

/// Returns the VMs that the run is about, by UUID, with the names that the report has.
/// A lease on a VM is an earlier run's if that one is continued, and an operator's if not.
fn chosen(
    now: &Overview,
    patterns: &[String],
    is_continued: bool,
) -> anyhow::Result<BTreeMap<String, String>> {
    let all = &now.status.vms;
    let wanted = globs(patterns)?;
    let acts = |vm: &VmStatus| match vm.observed_for_ns {
        Some(_) => is_continued,
        None => vm.mode == Mode::Act && vm.left_alone.is_none(),
    };
    let is_wanted = |vm: &&VmStatus| match patterns.is_empty() {
        true => acts(vm),
        false => wanted.is_match(&vm.name),
    };
    let found: Vec<&VmStatus> = all.iter().filter(is_wanted).collect();
    if found.is_empty() {
        let names: Vec<&str> = all.iter().map(|vm| vm.name.as_str()).collect();
        let there = match names[..] {
            [] => return Err(bad_input("no VM runs here")),
            _ => names.join(", "),
        };
        return Err(bad_input(match patterns {
            [] => format!("the agent acts on none of the VMs here ({there}); {REMEDY}"),
            _ => format!("no VM matches {}; there are: {there}", patterns.join(", ")),
        }));
    }
    if let Some(vm) = found.iter().find(|vm| !acts(vm)) {
        let why = match (vm.observed_for_ns, &vm.left_alone) {
            (Some(left), _) => format!("it is to be only observed for another {}", span(left)),
            (None, Some(why)) => why.clone(),
            (None, None) => format!("the agent's mode for it is {}", vm.mode),
        };
        return Err(bad_input(format!(
            "VM `{}` would be the same in all blocks: {why}; {REMEDY}",
            vm.name
        )));
    }
    if found.iter().all(|vm| vm.counted_by.is_none()) {
        return Err(bad_input(
            "instructions are not counted on this host, so speeds are unknown; `homenode doctor` says why",
        ));
    }
    let is_alone = |vm: &VmStatus| all.iter().filter(|other| other.name == vm.name).count() == 1;
    let named = |vm: &&VmStatus| match is_alone(vm) {
        true => (vm.id.to_string(), vm.name.clone()),
        false => (vm.id.to_string(), format!("{} ({})", vm.name, vm.id)),
    };
    Ok(found.iter().map(named).collect())
}

fn globs(patterns: &[String]) -> anyhow::Result<GlobSet> {
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        set.add(GlobBuilder::new(pattern).build().map_err(bad_input)?);
    }
    set.build().map_err(bad_input)
}

/// A running agent, and the VMs of a run.
struct Agent<'a> {
    state: &'a Path,
    /// Names by UUID.
    vms: BTreeMap<String, String>,
    /// The host's clock at the last look.
    seen: Ns,
}

impl Agent<'_> {
    fn names(&self) -> BTreeSet<String> {
        self.vms.values().cloned().collect()
    }

    /// Asks until there is an answer, as the agent may be restarting.
    fn overview(&self) -> anyhow::Result<Overview> {
        let mut silent = 0;
        loop {
            match ask_agent(self.state, &Request::Overview) {
                Ok(now) => return Ok(now),
                Err(error) if silent >= SILENT_MAX => return Err(error),
                Err(_) => silent += 1,
            }
            sleep(ASK_EVERY);
        }
    }
}

impl Subject for Agent<'_> {
    type Error = anyhow::Error;

    fn set(&mut self, acting: Acting, span: Ns) -> anyhow::Result<()> {
        let span_ns = Some(if acting == Acting::Acts { Ns::ZERO } else { span });
        let mut gone = Vec::new();
        for vm in self.vms.keys() {
            let request = Request::ModeSet {
                vm: vm.clone(),
                mode: Some(Mode::Observe),
                span_ns,
            };
            let set: anyhow::Result<answer::ModeSet> = ask_agent(self.state, &request);
            match set {
                Ok(_) => {}
                Err(error) if is_gone(&error) => gone.push(vm.clone()),
                Err(error) => return Err(error),
            }
        }
        for vm in gone {
            let name = self.vms.remove(&vm).unwrap_or_default();
            complain!("homenode: VM {name} has ended; what was measured of it counts");
        }
        anyhow::ensure!(!self.vms.is_empty(), "all VMs of this run have ended");
        Ok(())
    }

    fn look(&mut self) -> anyhow::Result<Look> {
        let mut now = self.overview()?;
        let mut old = 0;
        while now.status.at_ns == self.seen {
            anyhow::ensure!(
                old < OLD_MAX,
                "the agent has not sampled the host for ten minutes"
            );
            old += 1;
            sleep(ASK_EVERY);
            now = self.overview()?;
        }
        // A restarted host's clock begins again.
        let passed = now.status.at_ns.saturating_sub(self.seen);
        self.seen = now.status.at_ns;
        let named = |vm: &VmStatus| self.vms.get(&vm.id.to_string()).cloned();
        Ok(Look::of(passed, &now.status, named))
    }
}

fn is_gone(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref(),
        Some(AskError::Agent(ApiError::NoSuchVm { .. }))
    )
}
