//! Watches the memory of VMs. Each watched VM has its own thread, which looks once per window: a scan takes long and must be on
//! time.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use homenode_host::observation::{Observation, Tracker, Used};
use homenode_host::{Act, ActionError, Failure, Lever, Outcome, VmSample};
use homenode_kernel::trackers::damon::Damon;
use homenode_kernel::trackers::{self, Runs, Target, Track, Tracked, TrackerError};
use homenode_kernel::{now, task};
use homenode_undo::journal::{Entry, Written};
use homenode_units::{Ns, Pages};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::{After, Kvm, LeverState, UndoError, failed};
use crate::context::HostContext;
use crate::vm::Vm;

/// Records that DAMON watches the VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Watched {}

impl Written for Watched {
    const KEY: &'static str = "watching";
}

const WATCH: &str = "watching the memory";

/// A watch in force. It ends when dropped.
struct Watching {
    window: Ns,
    tracker: Tracker,
    target: Target,
    latest: Arc<Mutex<Latest>>,
    /// Dropping it ends the thread.
    go_on: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The thread's results.
#[derive(Debug, Default)]
struct Latest {
    seen: Option<(Ns, Ns, Tracked, Ns)>,
    /// Why the thread ended early.
    failed: Option<TrackerError>,
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.go_on = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Watching {
    fn begin(look: Box<dyn Track>, target: Target, window: Ns) -> Watching {
        let latest = Arc::new(Mutex::new(Latest::default()));
        let (go_on, stop) = channel();
        let tracker = look.tracker();
        let there = Arc::clone(&latest);
        let fail = |there: &Mutex<Latest>, error| {
            there.lock().unwrap_or_else(PoisonError::into_inner).failed = Some(error);
        };
        let named = std::thread::Builder::new().name("watching".into());
        let thread = named.spawn(move || {
            if let Err(error) = watch(look, window, &stop, &there) {
                fail(&there, error);
            }
        });
        if let Err(error) = &thread {
            fail(
                &latest,
                TrackerError::Unfit(format!("cannot start a thread for watching: {error}")),
            );
        }
        Watching {
            window,
            tracker,
            target,
            latest,
            go_on: Some(go_on),
            thread: thread.ok(),
        }
    }

    fn failed(&self) -> Option<TrackerError> {
        self.latest
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .failed
            .clone()
    }

    /// Returns what the last complete window showed of a VM that now has this much memory.
    fn observed(&self, memory: Pages) -> Option<Observation> {
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, interval, sight, cost) = latest.seen.as_ref()?;
        let used = match &sight.found {
            Used::Amount { used, .. } => *used,
            _ => Pages::ZERO,
        };
        // Memory that was used and then returned within the window counts as the VM's.
        let memory = memory.max(used);
        Some(Observation {
            tracker: self.tracker,
            at: *at,
            interval: *interval,
            memory,
            frames: self.target.pages().max(memory).0,
            found: sight.found.clone(),
            lost: 0,
            blind: sight.blind,
            cost: *cost + sight.cost_elsewhere,
        })
    }
}

/// Looks once a window until it is told to stop.
fn watch(
    mut look: Box<dyn Track>,
    window: Ns,
    stop: &Receiver<()>,
    latest: &Mutex<Latest>,
) -> Result<(), TrackerError> {
    let wait = |until: Ns| {
        let rest = Duration::from_nanos(until.saturating_sub(now()).0);
        stop.recv_timeout(rest) == Err(RecvTimeoutError::Timeout)
    };
    loop {
        let (began, spent) = (now(), cpu_time());
        let ends = began + window;
        look.begin()?;
        if !wait(ends.saturating_sub(look.early())) {
            return Ok(());
        }
        let sight = look.end()?;
        if !wait(ends) {
            return Ok(());
        }
        let at = now();
        let seen = (at, at - began, sight, cpu_time().saturating_sub(spent));
        latest.lock().unwrap_or_else(PoisonError::into_inner).seen = Some(seen);
    }
}

/// CPU time of the calling thread.
fn cpu_time() -> Ns {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Ns(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

struct OfVm {
    /// Whether DAMON is watching the memory; DAMON outlives both agent and VM.
    has_damon: bool,
    watching: Option<Watching>,
}

pub(super) fn state(entry: Option<&Entry>) -> Box<dyn LeverState<Kvm>> {
    Box::new(OfVm {
        has_damon: entry.and_then(Entry::get::<Watched>).is_some(),
        watching: None,
    })
}

impl LeverState<Kvm> for OfVm {
    fn lever(&self) -> Lever {
        Lever::Watching
    }

    fn what(&self, _act: &Act) -> &'static str {
        WATCH
    }

    fn holds(&self, context: &HostContext, vm: &Vm, act: &Act) -> Result<bool, ActionError> {
        let (Act::Watch { window_ns, .. }, Some(watching)) = (act, &self.watching) else {
            return Ok(false);
        };
        let same = watching.window == *window_ns && watching.target == target(context, vm)?;
        Ok(same && watching.failed().is_none())
    }

    fn set(&mut self, context: &mut HostContext, vm: &mut Vm, act: &Act) -> Result<Outcome, ActionError> {
        let Act::Watch { window_ns, .. } = *act else {
            return Ok(Outcome::Done);
        };
        let target = target(context, vm)?;
        self.lift(context, vm)?;
        let mut reasons = Vec::new();
        for choice in trackers::choices(&context.root, target.runs) {
            let why = match choice.why_not {
                Some(why) => why,
                None => match self.look(context, vm, choice.tracker, &target, window_ns)? {
                    Ok(look) => {
                        self.watching = Some(Watching::begin(look, target, window_ns));
                        return Ok(Outcome::Done);
                    }
                    Err(error) => error.to_string(),
                },
            };
            reasons.push(format!("{}: {why}", choice.tracker.name()));
        }
        let why = reasons.join("; ");
        Err(Failure::NoTracker { why }.on(&vm.run.name))
    }

    /// Ends a watch, including one that an earlier agent left.
    fn lift(&mut self, context: &mut HostContext, vm: &mut Vm) -> Result<(), ActionError> {
        self.watching = None;
        if self.has_damon {
            let ended = Damon::new(&context.root).end(vm.run.pid);
            ended.map_err(|e| failed(vm, WATCH, &e.to_string()))?;
            self.has_damon = false;
            context.clear::<Watched>(vm);
        }
        Ok(())
    }

    fn tell(&mut self, context: &mut HostContext, vm: &mut Vm, sample: &mut VmSample) {
        if let Some(error) = self.watching.as_ref().and_then(Watching::failed) {
            let ended = self.lift(context, vm).err();
            if error != TrackerError::Gone {
                let name = &vm.run.name;
                context.notice(format!("the memory of VM {name} is no longer watched: {error}"));
            }
            if let Some(error) = ended {
                context.notice(error.to_string());
            }
        }
        let memory = vm.domain.memory_current_bytes.to_pages();
        sample.observed = self
            .watching
            .as_ref()
            .and_then(|watching| watching.observed(memory));
    }

    fn journalled(&self) -> Vec<&'static str> {
        self.has_damon.then_some(Watched::KEY).into_iter().collect()
    }

    fn undo(&self, after: &mut After<'_>) -> Result<(), UndoError> {
        Ok(Damon::new(after.root).end_left(after.run.pid)?)
    }
}

impl OfVm {
    /// Starts a tracker. A tracker that could outlive the agent is journalled first.
    fn look(
        &mut self,
        context: &mut HostContext,
        vm: &Vm,
        tracker: Tracker,
        target: &Target,
        window: Ns,
    ) -> Result<Result<Box<dyn Track>, TrackerError>, ActionError> {
        let outlives = tracker == Tracker::Damon;
        if outlives {
            context.set(vm, WATCH, &Watched {})?;
            self.has_damon = true;
        }
        let look = trackers::look(&context.root, tracker, target, window);
        if outlives && look.is_err() {
            self.has_damon = false;
            context.clear::<Watched>(vm);
        }
        Ok(look)
    }
}

/// The VM's process and memory to watch.
fn target(context: &HostContext, vm: &Vm) -> Result<Target, ActionError> {
    let ranges = vm.memory.mover().map(|mover| mover.ranges().to_vec());
    let ranges = ranges.ok_or_else(|| failed(vm, WATCH, "cannot tell where its memory is"))?;
    let is_emulated = vm
        .vcpu_tids()
        .any(|tid| task::is_emulated(&context.root, vm.run.pid, tid));
    Ok(Target {
        pid: vm.run.pid,
        ranges,
        vcpus: vm.vcpu_tids().count() as u64,
        runs: if is_emulated { Runs::Emulated } else { Runs::Kvm },
    })
}
