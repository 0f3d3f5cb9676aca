//! Watches on the memory of VMs: a thread per watched VM, which looks once a window, as a scan takes long and must be on time.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use homenode_host::observed::{Carrier, Found, Observed};
use homenode_host::{ActionError, Failure, Outcome};
use homenode_units::{Ns, Pages};
use rustix::time::{ClockId, clock_gettime};

use super::act::host_error;
use super::vm::Vm;
use super::{LibvirtHost, now};
use crate::carriers::damon::Damon;
use crate::carriers::{self, CarrierError, Look, Runs, Sight, Target};
use crate::journal::Watched;
use crate::task;

/// What watching is called in errors.
pub(super) const WATCH: &str = "watching its memory";

/// A watch in force. It ends when dropped.
pub(super) struct Watching {
    pub until: Ns,
    window: Ns,
    carrier: Carrier,
    target: Target,
    latest: Arc<Mutex<Latest>>,
    /// Dropped to end the thread.
    go_on: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread has to tell.
#[derive(Debug, Default)]
struct Latest {
    seen: Option<(Ns, Ns, Sight, Ns)>,
    /// Why it has ended by itself.
    failed: Option<CarrierError>,
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
    fn begin(look: Box<dyn Look>, target: Target, window: Ns, until: Ns) -> Watching {
        let latest = Arc::new(Mutex::new(Latest::default()));
        let (go_on, stop) = channel();
        let carrier = look.carrier();
        let there = Arc::clone(&latest);
        let thread = std::thread::spawn(move || {
            if let Err(error) = watch(look, window, &stop, &there) {
                there.lock().unwrap_or_else(PoisonError::into_inner).failed = Some(error);
            }
        });
        Watching {
            until,
            window,
            carrier,
            target,
            latest,
            go_on: Some(go_on),
            thread: Some(thread),
        }
    }

    fn failed(&self) -> Option<CarrierError> {
        self.latest
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .failed
            .clone()
    }

    /// What the last complete window showed of a VM that has so much memory now.
    fn observed(&self, memory: Pages) -> Option<Observed> {
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, interval, sight, cost) = latest.seen.as_ref()?;
        let used = match &sight.found {
            Found::Amount { used, .. } => *used,
            _ => Pages::ZERO,
        };
        // What was used and then given back within the window counts as the VM's.
        let memory = memory.max(used);
        Some(Observed {
            carrier: self.carrier,
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

/// Looks once a window until nobody wants it any more.
fn watch(
    mut look: Box<dyn Look>,
    window: Ns,
    stop: &Receiver<()>,
    latest: &Mutex<Latest>,
) -> Result<(), CarrierError> {
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

impl LibvirtHost {
    /// Watches a VM's memory until the lease is over.
    pub(super) fn watch_memory(
        &mut self,
        vm: &mut Vm,
        window: Ns,
        lease: Ns,
    ) -> Result<Outcome, ActionError> {
        let until = Ns(now().0.saturating_add(lease.0));
        let target = self.target(vm)?;
        if let Some(watching) = &mut vm.watching
            && watching.failed().is_none()
            && (watching.window, &watching.target) == (window, &target)
        {
            watching.until = until;
            return Ok(Outcome::Renewed);
        }
        self.unwatch(vm)?;
        let mut reasons = Vec::new();
        for choice in carriers::choices(&self.root, target.runs) {
            let why = match choice.why_not {
                Some(why) => why,
                None => match self.look(vm, choice.carrier, &target, window)? {
                    Ok(look) => {
                        vm.watching = Some(Watching::begin(look, target, window, until));
                        return Ok(Outcome::Done);
                    }
                    Err(error) => error.to_string(),
                },
            };
            reasons.push(format!("{}: {why}", choice.carrier.name()));
        }
        let why = reasons.join("; ");
        Err(Failure::NoCarrier { why }.on(&vm.run.name))
    }

    /// Puts a carrier to work; one that could outlive the agent is written down before.
    fn look(
        &mut self,
        vm: &Vm,
        carrier: Carrier,
        target: &Target,
        window: Ns,
    ) -> Result<Result<Box<dyn Look>, CarrierError>, ActionError> {
        let outlives = carrier == Carrier::Damon;
        if outlives {
            self.journal_set(vm, WATCH, &Watched {})?;
        }
        let look = carriers::look(&self.root, carrier, target, window);
        if outlives && look.is_err() {
            self.journal_clear::<Watched>(vm, WATCH)?;
        }
        Ok(look)
    }

    /// Who is to be watched.
    fn target(&self, vm: &Vm) -> Result<Target, ActionError> {
        let ranges = vm.memory.mover().map(|mover| mover.ranges().to_vec());
        let ranges = ranges.ok_or_else(|| host_error(vm, WATCH, "where its memory lies is not known"))?;
        let is_emulated = vm
            .vcpu_tids()
            .any(|tid| task::is_emulated(&self.root, vm.run.pid, tid));
        Ok(Target {
            pid: vm.run.pid,
            ranges,
            vcpus: vm.vcpu_tids().count() as u64,
            runs: if is_emulated { Runs::Emulated } else { Runs::Kvm },
        })
    }

    /// Ends a watch, if there is one, also one that an agent before this left.
    pub(super) fn unwatch(&mut self, vm: &mut Vm) -> Result<Outcome, ActionError> {
        vm.watching = None;
        if self.journalled::<Watched>(vm).is_some() {
            let ended = Damon::new(&self.root).end(vm.run.pid);
            ended.map_err(|e| host_error(vm, WATCH, &e.to_string()))?;
            self.journal_clear::<Watched>(vm, WATCH)?;
        }
        Ok(Outcome::Done)
    }

    /// What was seen of a VM in its last complete window.
    pub(super) fn observed(&mut self, vm: &mut Vm) -> Option<Observed> {
        let failed = vm.watching.as_ref()?.failed();
        if let Some(error) = failed {
            let ended = self.unwatch(vm).err();
            if error != CarrierError::Gone {
                let name = &vm.run.name;
                self.notice(format!(
                    "the memory of VM {name} is not watched any more: {error}"
                ));
            }
            if let Some(error) = ended {
                self.notice(error.to_string());
            }
            return None;
        }
        vm.watching
            .as_ref()?
            .observed(vm.domain.memory_current_bytes.to_pages())
    }
}
