//! I/O on the host: when threads make requests, wait and continue, and what devices transfer. The devices are in [`crate::io`].

use homenode_units::Ns;

use super::Engine;
use super::agenda::Timer;
use crate::guest::vm::Next;
use crate::guest::{Doing, Vm};
use crate::index::{ThreadIx, VmIx};
use crate::io::flip::PageCost;

impl Engine {
    /// Makes the request that a thread has come to, if any. The thread waits until its last request is done, or until this one
    /// is, if its profile says so. Returns what the thread does next within its stretch of work, or `None` if the stretch has
    /// ended.
    pub(super) fn request(&mut self, vm: VmIx, thread: ThreadIx) -> Option<Next> {
        // A quick way out: this is called whenever any work ends, and most threads use no device.
        let state = &self.vms[vm].threads[thread];
        if state.doing != Doing::Computing || state.requests.list.is_empty() {
            return None;
        }
        let driver = self.vms[vm].channel.as_ref().map(|channel| channel.driver);
        let cost = driver.map_or_else(PageCost::default, |driver| self.page_cost(vm, driver));
        // Devices fill the pages of the domain that drives them.
        self.vms[driver.unwrap_or(vm)]
            .memory
            .count_pages(&mut self.placed);
        let Vm {
            threads,
            channel,
            life,
            ..
        } = &mut self.vms[vm];
        let state = &mut threads[thread];
        state.requests.pass();
        while let Some(request) = state.requests.due() {
            if request.done > self.now {
                let (done, life) = (request.done, *life);
                state.doing = Doing::WaitingForIo;
                self.agenda.set(done, Timer::Served { vm, thread, life });
                return Some(Next::Sleep);
            }
            let device = &mut self.devices[request.device];
            request.done = device.serve(request.bytes, request.latency_ns, self.now, &self.placed);
            if request.backend_ns > 0.0 {
                let free = &mut self.backends_free_ns[vm];
                *free = free.max(self.now.as_f64()) + request.backend_ns;
                request.done = request.done.max(Ns(libm::ceil(*free) as u64));
            }
            if let Some(channel) = channel {
                let (done, guest_ns) = channel.pass(request.bytes, request.done, cost);
                request.done = done;
                state.owed_ns += guest_ns;
            }
            request.left += request.every;
            let (bytes, done, waits) = (request.bytes, request.done, request.waits);
            state.requests.bytes += bytes;
            if waits {
                state.doing = Doing::WaitingForIo;
                let life = *life;
                self.agenda.set(done, Timer::Served { vm, thread, life });
                self.set_settling(vm);
                return Some(Next::Sleep);
            }
        }
        let behind = state.requests.behind;
        let next = (behind > 0.0).then(|| {
            state.compute(behind);
            Next::Run
        });
        self.set_settling(vm);
        next
    }

    /// Lets a thread rest for this long.
    pub(super) fn rest(&mut self, vm: VmIx, thread: ThreadIx, lasts: Ns) {
        let life = self.vms[vm].life;
        let until = Ns(self.now.0.saturating_add(lasts.0));
        self.agenda.set(until, Timer::Served { vm, thread, life });
    }

    /// Notes that a device has served a request, or that a rest is over. The waiting thread continues once it gets a CPU.
    pub(super) fn served(&mut self, vm: VmIx, thread: ThreadIx, life: u32) {
        let owner = &mut self.vms[vm];
        if owner.life != life
            || !owner.present()
            || !matches!(owner.threads[thread].doing, Doing::WaitingForIo | Doing::Resting)
        {
            return;
        }
        // A device's service time was measured in a guest, so it includes the wake-up; a rest does not.
        let rested = owner.threads[thread].doing == Doing::Resting;
        owner.threads[thread].doing = Doing::Computing;
        if rested {
            owner.threads[thread].began = Some(self.now);
            self.wake(vm, thread, None);
            return;
        }
        let task = owner.task(thread);
        self.scheduler.wake(task, None, self.now);
        self.after_scheduling();
    }

    /// Counts what devices have transferred in the last `ns` nanoseconds. Returns true if that affects others.
    pub(super) fn transfer(&mut self, ns: f64) -> bool {
        let mut changed = false;
        for device in &mut self.devices {
            let from = device.node;
            changed |= device.transfer(self.now, ns.max(1.0), |to, bytes| {
                self.totals.write(from, to, bytes);
            });
        }
        changed
    }
}
