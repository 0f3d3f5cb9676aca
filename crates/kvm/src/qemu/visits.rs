//! Schedules when to ask which monitor. Each is asked independently, without waiting for any other.
//!
//! ```text
//!   due ─▶ opening ─▶ queued ─▶ greeted ─▶ commands, then questions ─▶ closed; due again in 2 s
//!              │         │          │
//!              └─────────┴──────────┴─ nothing in time ─▶ the next monitor of the VM, or none: rests 5 s, 10 s, … 320 s
//! ```
//!
//! A connection that QEMU has not accepted yet is kept, because it already has a place in QEMU's queue of clients. Closing it and
//! connecting again would fill that queue, so that the VM's owner could not connect either. While it is kept, no other connection
//! to that monitor is made.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use homenode_units::{Ns, VmId};
use serde_json::Value;

use super::monitor::{Command, Conversation, MonitorError, Stage, broken};
use super::questions::{Heard, Topic, Wants, questions};

/// How often to ask a monitor that answers.
const ASK_EVERY: Ns = Ns::from_secs(2);
/// How often to ask such a monitor which threads run vCPUs.
const VCPUS_EVERY: Ns = Ns::from_secs(5);
/// Time limit for a monitor to greet, and again to answer all questions.
pub(super) const VISIT_MAX: Ns = Ns(500_000_000);
/// First and longest pause after a visit in which no monitor of the VM could be used; the pause doubles each time.
const REST_FIRST: Ns = Ns::from_secs(5);
const REST_MAX: Ns = Ns::from_secs(320);
/// Failed greetings in a row before the operator is notified: a monitor is busy only briefly with its owner's questions.
const BUSY_SAID: u32 = 3;
/// Most monitors of one VM that are asked.
pub(super) const MONITORS_MAX: usize = 4;
/// Most connections at the same time, each of which is an open file. A third is for visits, the rest for connections kept in
/// queues.
pub(super) const CONNECTIONS_MAX: usize = 192;

/// A VM to ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub name: String,
    pub pid: i32,
    /// Sockets of the VM's monitors, without repetitions.
    pub monitors: Vec<String>,
    /// Whether to ask the VM regularly, and not only when there are commands.
    pub is_asked: bool,
}

/// Commands for which a caller waits.
#[derive(Debug)]
pub(super) struct Job {
    pub commands: Vec<Command>,
    /// When the caller stops waiting.
    pub until: Ns,
    pub reply: SyncSender<Result<Vec<Value>, MonitorError>>,
}

impl Job {
    /// Sends the result to the caller, which may have stopped waiting.
    fn end(self, result: Result<Vec<Value>, MonitorError>) {
        let _ = self.reply.try_send(result);
    }
}

/// A socket to open and connect to; its file system may make this hang.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Opening {
    pub ticket: u64,
    pub vm: VmId,
    pub pid: i32,
    pub path: String,
}

/// What a VM's monitors have reported about it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Said {
    /// The process that runs the VM.
    pub pid: i32,
    /// The monitors' last answers.
    pub heard: Heard,
    /// Why the last visit failed, and when the next may begin; `None` if it succeeded.
    pub trouble: Option<(MonitorError, Ns)>,
    /// Number of completed visits.
    pub visits_count: u64,
}

/// A monitor of a VM.
#[derive(Debug)]
struct Monitor {
    path: String,
    /// A connection that waits in the monitor's queue of clients.
    queued: Option<Conversation>,
}

/// A visit in progress.
#[derive(Debug)]
struct Visit {
    /// Index of the current monitor, and how many monitors this visit has tried.
    at: usize,
    tried_count: usize,
    step: Step,
    deadline: Ns,
    /// Whether to ask the regular questions.
    asks: bool,
    /// Why the first monitor tried could not be used.
    error: Option<MonitorError>,
}

#[derive(Debug)]
enum Step {
    Opening(u64),
    Talking(Conversation, Script),
}

/// What a monitor is answering.
#[derive(Debug)]
enum Script {
    Nothing,
    Questions(Vec<Topic>),
    Job(Job),
}

#[derive(Debug)]
struct Visited {
    target: Target,
    wants: Wants,
    monitors: Vec<Monitor>,
    /// The monitor that answered last.
    first: usize,
    visit: Option<Visit>,
    jobs: VecDeque<Job>,
    /// When the regular questions are due.
    next: Option<Ns>,
    next_vcpus: Ns,
    failures_count: u32,
    /// The attempt to open a socket that hangs, if one does.
    hanging: Option<u64>,
    said: Said,
}

/// Results of visits, for the caller to carry out.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub to_open: VecDeque<Opening>,
    pub said: Vec<(VmId, Arc<Said>)>,
    pub notices: Vec<String>,
    last_ticket: u64,
    /// How many more connections may be kept in queues.
    queues_left: usize,
}

/// All VMs whose monitors are asked.
#[derive(Debug)]
pub(super) struct Visits {
    vms: BTreeMap<VmId, Visited>,
    pub outcome: Outcome,
    /// Most VMs that are visited at the same time, and most connections that are kept in queues.
    under_way_max: usize,
    queued_max: usize,
}

/// Which connection of a VM: the visit's, or one queued at a monitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    Visit,
    Queued(usize),
}

impl Visits {
    /// Creates the schedule without VMs, for at most this many connections.
    pub(super) fn new(connections_max: usize) -> Visits {
        let under_way_max = connections_max.div_ceil(3);
        Visits {
            vms: BTreeMap::new(),
            outcome: Outcome::default(),
            under_way_max,
            queued_max: connections_max - under_way_max,
        }
    }

    /// Starts asking a VM's monitors.
    pub(super) fn watch(&mut self, vm: VmId, target: Target, at: Ns) {
        let monitor = |path: &String| Monitor {
            path: path.clone(),
            queued: None,
        };
        let visited = Visited {
            monitors: target.monitors.iter().take(MONITORS_MAX).map(monitor).collect(),
            next: target.is_asked.then_some(at),
            said: Said {
                pid: target.pid,
                ..Said::default()
            },
            target,
            wants: Wants::default(),
            first: 0,
            visit: None,
            jobs: VecDeque::new(),
            next_vcpus: Ns::ZERO,
            failures_count: 0,
            hanging: None,
        };
        self.vms.insert(vm, visited);
    }

    pub(super) fn forget(&mut self, vm: VmId) {
        self.vms.remove(&vm);
    }

    /// Sets what to ask a VM's monitor besides whether the VM runs.
    pub(super) fn want(&mut self, vm: VmId, wants: Wants) {
        if let Some(visited) = self.vms.get_mut(&vm) {
            visited.wants = wants;
        }
    }

    /// Asks a VM's monitor now, unless the VM rests.
    pub(super) fn ask_soon(&mut self, vm: VmId, at: Ns) {
        if let Some(visited) = self.vms.get_mut(&vm)
            && visited
                .said
                .trouble
                .as_ref()
                .is_none_or(|(_, until)| *until <= at)
        {
            match &mut visited.next {
                Some(next) => *next = at,
                None => visited.begin(vm, at, &mut self.outcome),
            }
        }
    }

    /// Adds commands, which are carried out before any questions.
    pub(super) fn command(&mut self, vm: VmId, job: Job, at: Ns) {
        let Some(visited) = self.vms.get_mut(&vm) else {
            return job.end(Err(MonitorError::NoTime("the VM's QEMU has ended")));
        };
        visited.jobs.push_back(job);
        visited.begin(vm, at, &mut self.outcome);
    }

    /// Takes the result of opening a socket.
    pub(super) fn opened(
        &mut self,
        (vm, ticket): (VmId, u64),
        result: Result<UnixStream, MonitorError>,
        at: Ns,
    ) {
        if let Some(visited) = self.vms.get_mut(&vm) {
            visited.opened(ticket, result, (vm, at), &mut self.outcome);
        }
    }

    /// Notes that opening a socket hangs.
    pub(super) fn hangs(&mut self, (vm, ticket): (VmId, u64), at: Ns) {
        let Some(visited) = self.vms.get_mut(&vm) else {
            return;
        };
        let is_current = |visit: &Visit| matches!(visit.step, Step::Opening(its) if its == ticket);
        if let Some(visit) = visited.visit.as_ref().filter(|visit| is_current(visit)) {
            let error = broken(&visited.monitors[visit.at].path, &HANGS);
            visited.hanging = Some(ticket);
            visited.go_elsewhere(error, (vm, at), &mut self.outcome);
        }
    }

    /// Advances a connection that is ready to be read or written.
    pub(super) fn ready(&mut self, vm: VmId, which: Which, at: Ns) {
        let Some(visited) = self.vms.get_mut(&vm) else {
            return;
        };
        match which {
            Which::Visit => visited.go_on((vm, at), &mut self.outcome),
            Which::Queued(monitor) => visited.come_up(monitor, (vm, at), &mut self.outcome),
        }
    }

    /// Ends what took too long, and begins what is due.
    pub(super) fn tick(&mut self, at: Ns) {
        let queued = |visited: &Visited| visited.monitors.iter().filter(|m| m.queued.is_some()).count();
        let queued_count = self.vms.values().map(queued).sum();
        self.outcome.queues_left = self.queued_max.saturating_sub(queued_count);
        for (vm, visited) in &mut self.vms {
            visited.end_overdue((*vm, at), &mut self.outcome);
        }
        let under_way_count = self.vms.values().filter(|vm| vm.visit.is_some()).count();
        let due = self.vms.iter().filter(|(_, visited)| visited.visit.is_none());
        let due = due.filter_map(|(vm, visited)| Some((visited.next.filter(|next| *next <= at)?, *vm)));
        // The VM that has waited longest is first.
        let due: BTreeSet<(Ns, VmId)> = due.collect();
        for (_, vm) in due
            .into_iter()
            .take(self.under_way_max.saturating_sub(under_way_count))
        {
            if let Some(visited) = self.vms.get_mut(&vm) {
                visited.begin(vm, at, &mut self.outcome);
            }
        }
    }

    /// Returns when something must be ended or begun, unless something else happens before.
    pub(super) fn next_event(&self) -> Option<Ns> {
        let is_full = self.vms.values().filter(|vm| vm.visit.is_some()).count() >= self.under_way_max;
        let of_vm = |visited: &Visited| {
            let jobs = visited.jobs.iter().map(|job| job.until).min();
            let own = match &visited.visit {
                Some(visit) => Some(visit.deadline),
                None => visited.next.filter(|_| !is_full),
            };
            jobs.into_iter().chain(own).min()
        };
        self.vms.values().filter_map(of_vm).min()
    }

    /// Connections that may become ready.
    pub(super) fn connections(&self) -> impl Iterator<Item = (VmId, Which, &Conversation)> {
        self.vms.iter().flat_map(|(vm, visited)| {
            let visit = visited.visit.as_ref().and_then(|visit| match &visit.step {
                Step::Talking(conversation, _) => Some((*vm, Which::Visit, conversation)),
                Step::Opening(_) => None,
            });
            let queued = visited.monitors.iter().enumerate();
            let queued =
                queued.filter_map(|(at, monitor)| Some((*vm, Which::Queued(at), monitor.queued.as_ref()?)));
            visit.into_iter().chain(queued)
        })
    }
}

const HANGS: &str =
    "opening it takes longer than a quarter of a second: the file system that it is on does not answer";
const LATE: &str = "the VM's monitor did not answer in time";

impl Visited {
    /// Begins a visit, unless one is under way.
    fn begin(&mut self, vm: VmId, at: Ns, outcome: &mut Outcome) {
        if self.visit.is_none() {
            self.visit = Some(Visit {
                at: self.first,
                tried_count: 0,
                step: Step::Opening(0),
                deadline: Ns(u64::MAX),
                asks: self.next.is_some_and(|next| next <= at),
                error: None,
            });
            self.try_next((vm, at), outcome);
        }
    }

    /// Tries the next monitor of the VM after an error at the current one.
    fn go_elsewhere(&mut self, error: MonitorError, of: (VmId, Ns), outcome: &mut Outcome) {
        if let Some(visit) = &mut self.visit {
            visit.error.get_or_insert(error);
        }
        self.try_next(of, outcome);
    }

    fn try_next(&mut self, (vm, at): (VmId, Ns), outcome: &mut Outcome) {
        let Some(visit) = &mut self.visit else { return };
        while visit.tried_count < self.monitors.len() {
            visit.at = (self.first + visit.tried_count) % self.monitors.len();
            visit.tried_count += 1;
            let monitor = &self.monitors[visit.at];
            if let Some(queued) = &monitor.queued {
                visit.error.get_or_insert(queued.overdue());
            } else if self.hanging.is_some() {
                visit.error.get_or_insert(broken(&monitor.path, &HANGS));
            } else {
                outcome.last_ticket += 1;
                visit.step = Step::Opening(outcome.last_ticket);
                visit.deadline = Ns(u64::MAX);
                outcome.to_open.push_back(Opening {
                    ticket: outcome.last_ticket,
                    vm,
                    pid: self.target.pid,
                    path: monitor.path.clone(),
                });
                return;
            }
        }
        let error = visit.error.take();
        self.fail(
            error.unwrap_or(MonitorError::NoTime("it has no monitor")),
            (vm, at),
            outcome,
        );
    }

    fn opened(
        &mut self,
        ticket: u64,
        result: Result<UnixStream, MonitorError>,
        of: (VmId, Ns),
        outcome: &mut Outcome,
    ) {
        if self.hanging == Some(ticket) {
            self.hanging = None;
            return;
        }
        let is_current = |visit: &&mut Visit| matches!(visit.step, Step::Opening(its) if its == ticket);
        let Some(visit) = self.visit.as_mut().filter(is_current) else {
            return;
        };
        match result {
            Ok(stream) => {
                let conversation = Conversation::new(&self.monitors[visit.at].path, stream);
                visit.step = Step::Talking(conversation, Script::Nothing);
                visit.deadline = of.1 + VISIT_MAX;
                self.go_on(of, outcome);
            }
            Err(error) => self.go_elsewhere(error, of, outcome),
        }
    }

    /// Advances the visit's conversation as far as possible.
    fn go_on(&mut self, of: (VmId, Ns), outcome: &mut Outcome) {
        loop {
            let Some(visit) = &mut self.visit else { return };
            let Step::Talking(conversation, _) = &mut visit.step else {
                return;
            };
            let was_greeted = !matches!(conversation.stage(), Stage::Queued | Stage::Greeting);
            match conversation.go_on() {
                Ok(Stage::Ready) => {}
                Ok(Stage::Asked) if !was_greeted => {
                    visit.deadline = of.1 + VISIT_MAX;
                    return;
                }
                Ok(_) => return,
                Err(error) => {
                    self.break_off(&error);
                    return self.go_elsewhere(error, of, outcome);
                }
            }
            if !self.next_script(of.1) {
                return self.succeed(of, outcome);
            }
        }
    }

    /// Stores the answers, and sends the next commands or questions. Returns false if there are none.
    fn next_script(&mut self, at: Ns) -> bool {
        let Some(visit) = &mut self.visit else {
            return false;
        };
        let Step::Talking(conversation, script) = &mut visit.step else {
            return false;
        };
        let answers = conversation.take_answers();
        match std::mem::replace(script, Script::Nothing) {
            Script::Nothing => {}
            Script::Questions(topics) => {
                let asked_vcpus = topics.contains(&Topic::Vcpus);
                self.said.heard.take_in(at, &topics, answers);
                self.next_vcpus = if asked_vcpus {
                    at + VCPUS_EVERY
                } else {
                    self.next_vcpus
                };
            }
            Script::Job(job) => job.end(answers.into_iter().collect()),
        }
        while let Some(job) = self.jobs.pop_front() {
            if job.until <= at {
                job.end(Err(MonitorError::NoTime(LATE)));
                continue;
            }
            visit.deadline = job.until;
            conversation.ask(job.commands.clone());
            *script = Script::Job(job);
            return true;
        }
        if !std::mem::take(&mut visit.asks) {
            return false;
        }
        let wants = Wants {
            vcpus: self.wants.vcpus && at >= self.next_vcpus,
            ..self.wants
        };
        let (topics, commands) = questions(wants, &self.said.heard).into_iter().unzip();
        visit.deadline = at + VISIT_MAX;
        conversation.ask(commands);
        *script = Script::Questions(topics);
        true
    }

    /// Handles a queued connection that its monitor has closed or accepted.
    fn come_up(&mut self, monitor: usize, of: (VmId, Ns), outcome: &mut Outcome) {
        let Some(mut conversation) = self.monitors[monitor].queued.take() else {
            return;
        };
        match conversation.go_on() {
            Ok(Stage::Queued) => self.monitors[monitor].queued = Some(conversation),
            // If another monitor of the VM is being asked, that is enough, and this connection is closed.
            Ok(_) if self.visit.is_none() => {
                self.visit = Some(Visit {
                    at: monitor,
                    tried_count: self.monitors.len(),
                    step: Step::Talking(conversation, Script::Nothing),
                    deadline: of.1 + VISIT_MAX,
                    asks: self.target.is_asked,
                    error: None,
                });
                self.go_on(of, outcome);
            }
            Ok(_) | Err(_) => {}
        }
    }

    fn end_overdue(&mut self, of: (VmId, Ns), outcome: &mut Outcome) {
        let at = of.1;
        self.jobs.retain(|job| {
            let is_late = job.until <= at;
            if is_late {
                let _ = job.reply.try_send(Err(MonitorError::NoTime(LATE)));
            }
            !is_late
        });
        let Some(visit) = self.visit.as_mut().filter(|visit| visit.deadline <= at) else {
            return;
        };
        let Step::Talking(conversation, _) = &visit.step else {
            return;
        };
        let error = conversation.overdue();
        let stage = conversation.stage();
        self.break_off(&error);
        if stage == Stage::Queued && outcome.queues_left > 0 {
            outcome.queues_left -= 1;
            self.keep_in_queue();
        }
        self.go_elsewhere(error, of, outcome);
    }

    /// Ends the current script without an answer.
    fn break_off(&mut self, error: &MonitorError) {
        if let Some(visit) = &mut self.visit
            && let Step::Talking(_, script) = &mut visit.step
            && let Script::Job(job) = std::mem::replace(script, Script::Nothing)
        {
            job.end(Err(error.clone()));
        }
    }

    fn keep_in_queue(&mut self) {
        if let Some(visit) = &mut self.visit
            && let Step::Talking(conversation, _) = std::mem::replace(&mut visit.step, Step::Opening(0))
        {
            self.monitors[visit.at].queued = Some(conversation);
        }
    }

    fn succeed(&mut self, (vm, at): (VmId, Ns), outcome: &mut Outcome) {
        if let Some(visit) = self.visit.take() {
            self.first = visit.at;
        }
        self.monitors.iter_mut().for_each(|monitor| monitor.queued = None);
        self.failures_count = 0;
        self.said.trouble = None;
        self.next = self.target.is_asked.then_some(at + ASK_EVERY);
        if let Some(refusal) = &self.said.heard.refusal {
            let name = &self.target.name;
            outcome
                .notices
                .push(format!("VM {name}'s state could not be read: {refusal}"));
        }
        self.tell(vm, outcome);
    }

    fn fail(&mut self, error: MonitorError, (vm, at): (VmId, Ns), outcome: &mut Outcome) {
        self.visit = None;
        self.failures_count = self.failures_count.saturating_add(1);
        let doublings = (self.failures_count - 1).min(16);
        let rest = match error {
            // The monitor will not become this VM's, and the process that listens on it should notice the agent as little as
            // possible.
            MonitorError::Foreign { .. } => REST_MAX,
            _ => Ns(REST_FIRST.0 << doublings).min(REST_MAX),
        };
        let until = at + rest;
        for job in std::mem::take(&mut self.jobs) {
            job.end(Err(error.clone()));
        }
        let is_busy = matches!(error, MonitorError::Busy { .. });
        if self.failures_count == if is_busy { BUSY_SAID } else { 1 } {
            outcome.notices.push(format!(
                "VM {}: {error}. Whether it is paused and the state of its balloon are unknown; the agent keeps asking, \
                 less and less often, until it answers",
                self.target.name
            ));
        }
        self.next = self.target.is_asked.then_some(until);
        self.said.trouble = Some((error, until));
        self.tell(vm, outcome);
    }

    fn tell(&mut self, vm: VmId, outcome: &mut Outcome) {
        self.said.visits_count += 1;
        outcome.said.push((vm, Arc::new(self.said.clone())));
    }
}

#[cfg(test)]
mod tests;
