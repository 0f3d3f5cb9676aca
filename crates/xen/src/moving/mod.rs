//! Moves all memory of a domain to another node, using local migration: `xl` creates a second domain on the same host, and the
//! second domain's memory is allocated where its configuration says.
//!
//! ```text
//!   agent ── homenode move-domain ── xl migrate ── homenode move-stream ── xl migrate-receive       it runs meanwhile
//!   (own unit)                  └── xl save -p ── homenode move-stream ── xl restore -p             it is paused
//! ```
//!
//! The agent starts the mover in a unit of its own, so killing the agent does not kill the move, and checks when it has ended.
//! The new domain arrives with its operator's settings, because the agent's pins are not copied. The agent then sets its pins
//! again, or its guard restores what is left of the old domain. The job is in a file until it is completed ([`settle`]): by the
//! mover or, if that was killed, by the next agent, its guard or `homenode release`.

pub(crate) mod configuration;
pub(crate) mod devices;
pub(crate) mod error;
pub(crate) mod files;
mod relay;
mod stream;

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use homenode_units::{CpuSet, NodeId, Ns, VmId};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::hypervisor::{Hypervisor, Listed};
use crate::xl::{self, XlError};
use configuration::Configuration;
use error::JobError;
pub use error::{MoveError, StreamError};
pub use relay::relay;

/// Environment variable from which the processes of a move read their job.
pub(crate) const JOB: &str = "HOMENODE_MOVE";
/// Environment variable with the mover's program.
const SELF: &str = "HOMENODE_MOVER";
const DOMID: &str = "HOMENODE_DOMID";
/// `xl`'s suffix for the name of a domain that is arriving here.
pub(crate) const INCOMING: &str = "--incoming";
/// `xl`'s suffix for the name of a domain that has left.
pub(crate) const LEFT: &str = "--migratedaway";
/// How often to check whether the domain runs.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Time limit for a command of `xl` that copies nothing.
const COMMAND_MAX: Duration = Duration::from_secs(120);

/// Time limit for `xl save`, from its last byte until the domain is no longer suspended.
const RESUMED_MAX: Duration = Duration::from_secs(10);

/// The part of the pipeline after `xl migrate`: our relay, then the receiver. The domain runs until most of it is copied. The new
/// domain is paused until the old one is destroyed, because only then has dom0 finished the old one's writes.
const LIVE: &str = "\"$HOMENODE_MOVER\" move-stream | xl migrate-receive -p";
/// The pipeline for a domain that is paused from the first page on. At the end both domains are paused. The paths are in `/proc`
/// because some dom0s have no `/dev/stdout`.
const STILL: &str = "xl save -p \"$HOMENODE_DOMID\" /proc/self/fd/1 | \"$HOMENODE_MOVER\" move-stream | xl restore -p /proc/self/fd/0";

/// Note for a domain that was suspended: `xl` takes a suspended domain for ended, and no longer watches it.
const UNWATCHED: &str =
    "; it was suspended meanwhile, so xl may not restart it when it reboots (as after `xl save -c`)";

/// How long to try to get both domains' names from xenstored. Without the names neither domain may be touched.
const NAMES_MAX: Duration = Duration::from_secs(60);

/// A domain to be moved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Job {
    /// The domain's UUID.
    pub vm: VmId,
    /// The domain's number before the move.
    pub domid: u32,
    /// The domain's name.
    pub name: String,
    /// Node for the domain's memory.
    pub to: NodeId,
    /// Whether the domain is paused while it is copied.
    pub still: bool,
    /// CPUs that the domain's vCPUs may run on, as its operator set them.
    pub hard: BTreeMap<u16, CpuSet>,
    /// CPUs that the domain's vCPUs prefer.
    pub soft: BTreeMap<u16, CpuSet>,
    /// The nodes that the domain's configuration names.
    pub nodemap: Option<Value>,
    /// Time limit for the copy.
    pub time_max: Ns,
}

/// Result of a move.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ended {
    /// The domain's new number, if it has arrived.
    pub arrived: Option<u32>,
    /// Why it has not arrived, or what could not be restored.
    pub why: Option<String>,
    /// How long the whole move took.
    pub took: Ns,
    /// For how long the domain did not run, to within a few hundredths of a second.
    pub paused: Ns,
    /// Pages copied. A page that changed meanwhile counts each time it was copied.
    pub copied: u64,
}

impl Job {
    /// Returns the job that this process was started for.
    ///
    /// # Errors
    /// If the agent did not start this process.
    pub(crate) fn of_environment() -> Result<Job, JobError> {
        let text = std::env::var(JOB).map_err(|_| JobError::NotStarted)?;
        serde_json::from_str(&text).map_err(|error| JobError::Unreadable {
            variable: JOB,
            cause: error.to_string(),
        })
    }

    /// Returns the new domain's name while there are two domains.
    pub(crate) fn incoming(&self) -> String {
        format!("{}{INCOMING}", self.name)
    }

    /// Checks that a configuration is that of the job's domain.
    fn fits(&self, of: &Configuration) -> Result<(), StreamError> {
        if of.vm() != Some(self.vm) || of.name() != Some(&self.name) {
            return Err(StreamError::AnotherDomain);
        }
        of.movable()?;
        Ok(())
    }
}

/// Returns the job that is under way, if there is one.
pub(crate) fn under_way() -> Option<Job> {
    match files::lock(files::MOVING) {
        Ok(None) => files::job(),
        _ => None,
    }
}

/// Returns true if no process is moving a domain.
pub(crate) fn is_free() -> bool {
    matches!(files::lock(files::MOVING), Ok(Some(_)))
}

/// Completes the job of a mover that was killed. Returns a message if there was one.
pub(crate) fn recover(hypervisor: &Hypervisor) -> Option<String> {
    let job = files::job()?;
    let locks = [files::MOVING, files::COPYING].map(|name| files::lock(name).ok().flatten());
    if locks.iter().any(Option::is_none) {
        return None;
    }
    let said = match settle(hypervisor, &job) {
        Ok(domid) => format!("domain {} has been moved; its new ID is {domid}", job.name),
        Err(why) if why.is_nothing() => format!("domain {} was not moved and keeps running", job.name),
        Err(why) => format!("domain {} could not be fully restored: {why}", job.name),
    };
    files::end();
    Some(format!("a move was cut off in the middle: {said}"))
}

/// Runs the mover: carries out its job, and prints the result on standard output.
///
/// # Errors
/// If it could not begin.
pub fn carry_out() -> Result<(), MoveError> {
    let job = Job::of_environment()?;
    // Keep signals to the agent's group or terminal away from the mover.
    let _ = rustix::process::setsid();
    let lock = files::lock(files::MOVING)?.ok_or(MoveError::Busy)?;
    let hypervisor = Hypervisor::open(std::path::Path::new("/"))?;
    files::begin(&job)?;
    let ended = carried_out(&hypervisor, &job);
    files::end();
    drop(lock);
    let text = serde_json::to_string(&ended).map_err(MoveError::system)?;
    // The agent may be gone.
    use std::io::Write as _;
    let _ = writeln!(std::io::stdout(), "{text}");
    Ok(())
}

fn carried_out(hypervisor: &Hypervisor, job: &Job) -> Ended {
    let mut watch = Watch::new();
    let copied = copy(hypervisor, job, &mut watch);
    let settled = match &copied {
        Ok(()) if job.still => hand_over(hypervisor, job).and_then(|()| settle(hypervisor, job)),
        _ => settle(hypervisor, job),
    };
    watch.look(hypervisor, job);
    let (arrived, mut why) = match (settled, copied) {
        (Ok(domid), copied) => (Some(domid), copied.err().map(|why| why.to_string())),
        (Err(why), Ok(())) => (None, Some(why.to_string())),
        (Err(also), Err(why)) if also.is_nothing() => (None, Some(why.to_string())),
        (Err(also), Err(why)) => (None, Some(format!("{why}; {also}"))),
    };
    let stays =
        arrived.is_none() && matches!(hypervisor.domain(job.domid), Ok(Some(old)) if old.vm == job.vm);
    if let Some(why) = why.as_mut().filter(|_| stays && watch.paused > Duration::ZERO) {
        *why += UNWATCHED;
    }
    Ended {
        arrived,
        why,
        took: nanoseconds(watch.begun.elapsed()),
        paused: nanoseconds(watch.paused),
        copied: files::how_many_copied(),
    }
}

/// Makes `xl` create a second domain. `Ok` if the new domain is complete.
fn copy(hypervisor: &Hypervisor, job: &Job, watch: &mut Watch) -> Result<(), MoveError> {
    let mover = std::env::current_exe().map_err(MoveError::system)?;
    let said = files::for_what_is_said()?;
    let domid = job.domid.to_string();
    let (program, arguments): (_, &[&str]) = match job.still {
        true => ("sh", &["-c", STILL]),
        false => ("xl", &["migrate", "-s", "", &domid, LIVE]),
    };
    let shared = said.try_clone().map_err(MoveError::system)?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env(SELF, mover)
        .env(DOMID, &domid)
        .stdin(Stdio::null())
        .stdout(shared)
        .stderr(said);
    let mut child = command
        .spawn()
        .map_err(|error| MoveError::NotStarted(error.to_string()))?;
    loop {
        watch.look(hypervisor, job);
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(_)) => return Err(MoveError::Said(files::what_was_said())),
            Ok(None) => std::thread::sleep(LOOK_EVERY),
            Err(error) => return Err(MoveError::system(error)),
        }
    }
}

fn nanoseconds(time: Duration) -> Ns {
    Ns(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

/// Measures for how long a domain does not run.
struct Watch {
    begun: Instant,
    still_since: Option<Instant>,
    paused: Duration,
}

impl Watch {
    fn new() -> Watch {
        Watch {
            begun: Instant::now(),
            still_since: None,
            paused: Duration::ZERO,
        }
    }

    fn look(&mut self, hypervisor: &Hypervisor, job: &Job) {
        let runs = |of: &Listed| of.vm == job.vm && of.is_vm() && !of.is_paused;
        // While the old domain runs, only its state counts.
        let old = hypervisor.domain(job.domid).ok().flatten();
        let is_running =
            old.is_some_and(|old| runs(&old)) || hypervisor.domains().is_ok_and(|all| all.iter().any(runs));
        match (is_running, self.still_since) {
            (false, None) => self.still_since = Some(Instant::now()),
            (true, Some(since)) => {
                self.paused += since.elapsed();
                self.still_since = None;
            }
            _ => {}
        }
    }
}

/// Returns the old and the new domain, if they exist.
fn both<'a>(all: &'a [Listed], job: &Job) -> (Option<&'a Listed>, Option<&'a Listed>) {
    let of_it = || all.iter().filter(|of| of.vm == job.vm && !of.is_dying);
    let is_old = |of: &&Listed| of.domid == job.domid;
    (of_it().find(is_old), of_it().find(|of| !is_old(of)))
}

/// Gives the domain's name to the new copy of a paused domain, which is complete now.
fn hand_over(hypervisor: &Hypervisor, job: &Job) -> Result<(), MoveError> {
    let all = hypervisor.domains()?;
    let (_, new) = both(&all, job);
    let new = new.ok_or(MoveError::NewEnded)?;
    xl(&["rename", &job.domid.to_string(), &format!("{}{LEFT}", job.name)])?;
    Ok(xl(&["rename", &new.domid.to_string(), &job.name])?)
}

/// Leaves only one of the two domains, however far the move got: the one that has the domain's name, with its operator's
/// settings. Until the new domain gets the name it has not run, and the old one is complete. After that the old one must not run
/// again. Returns the new domain's number.
///
/// # Errors
/// If the domain is where it was, or has ended. The error also says what could not be restored.
pub(crate) fn settle(hypervisor: &Hypervisor, job: &Job) -> Result<u32, MoveError> {
    let all = hypervisor.domains()?;
    let (old, new) = both(&all, job);
    let named = |of: Option<&Listed>| of.map_or(Ok(None), |of| name(hypervisor, of.domid));
    let (old_is, new_is) = (named(old)?, named(new)?);
    match (old, new) {
        (Some(old), Some(new)) if new_is.as_ref() == Some(&job.name) => {
            destroy(old.domid)?;
            stay(hypervisor, job, new)
        }
        (Some(old), new) => {
            let mut failed: Vec<MoveError> = Vec::new();
            // A new domain without a name was still being built.
            if let Some(new) = new.filter(|_| new_is.is_none_or(|name| name.ends_with(INCOMING))) {
                failed.extend(destroy(new.domid).err().map(MoveError::from));
            }
            let number = old.domid.to_string();
            if old_is.is_some_and(|name| name.ends_with(LEFT)) {
                failed.extend(xl(&["rename", &number, &job.name]).err().map(MoveError::from));
            }
            // `xl` resumes the old domain itself, unless `xl` was killed too.
            if old.is_suspended && !goes_on(hypervisor, job.domid, RESUMED_MAX) {
                let resumed = hypervisor.resume(job.domid);
                failed.extend(resumed.err().map(MoveError::Suspended));
            }
            let is_paused = hypervisor
                .domain(job.domid)
                .ok()
                .flatten()
                .is_some_and(|of| of.is_paused);
            if job.still && is_paused {
                failed.extend(xl(&["unpause", &number]).err().map(MoveError::from));
            }
            Err(MoveError::Stays(failed))
        }
        (None, Some(new)) => {
            if new_is.is_some_and(|name| name != job.name) {
                xl(&["rename", &new.domid.to_string(), &job.name])?;
            }
            stay(hypervisor, job, new)
        }
        (None, None) => Err(MoveError::Ended),
    }
}

/// Keeps the new domain and lets it run.
fn stay(hypervisor: &Hypervisor, job: &Job, new: &Listed) -> Result<u32, MoveError> {
    let failed = as_it_was(hypervisor, job, new.domid);
    if new.is_paused {
        xl(&["unpause", &new.domid.to_string()])?;
    }
    failed.map(|()| new.domid)
}

/// Returns a domain's name; `None` if it has none yet.
fn name(hypervisor: &Hypervisor, domid: u32) -> Result<Option<String>, MoveError> {
    let (mut store, begun) = (hypervisor.store(), Instant::now());
    loop {
        match store.read(vec![format!("/local/domain/{domid}/name")]) {
            Ok(mut names) => return Ok(names.pop().flatten()),
            Err(why) if begun.elapsed() > NAMES_MAX => {
                return Err(MoveError::Unnamed(why));
            }
            Err(_) => std::thread::sleep(LOOK_EVERY),
        }
    }
}

/// Waits until a domain is no longer suspended. Returns false if it is still suspended after that time.
fn goes_on(hypervisor: &Hypervisor, domid: u32, limit: Duration) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < limit {
        if !matches!(hypervisor.domain(domid), Ok(Some(of)) if of.is_suspended) {
            return true;
        }
        std::thread::sleep(LOOK_EVERY);
    }
    false
}

/// Gives the new domain the operator's settings of the old one.
fn as_it_was(hypervisor: &Hypervisor, job: &Job, domid: u32) -> Result<(), MoveError> {
    for (index, cpus) in &job.hard {
        hypervisor.pin(domid, *index, cpus)?;
    }
    for (index, cpus) in &job.soft {
        hypervisor.prefer(domid, *index, cpus)?;
    }
    Ok(files::change(domid, job.vm, |of| {
        of.set_nodemap(job.nodemap.clone());
    })?)
}

fn destroy(domid: u32) -> Result<(), XlError> {
    xl(&["destroy", &domid.to_string()])
}

/// Runs a command of `xl` that copies nothing.
fn xl(arguments: &[&str]) -> Result<(), XlError> {
    xl::run(arguments, COMMAND_MAX)
}
