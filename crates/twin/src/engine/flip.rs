//! Driver domains on the host: what the I/O of their VMs costs, and when pages change owners. The exchange of pages itself is in
//! [`crate::io::flip`].

use homenode_units::{Bytes, Ns, PAGE_BYTES};

use super::Engine;
use super::agenda::Timer;
use crate::guest::{Doing, boot_footprint};
use crate::hypervisor::SHOOTDOWN_CYCLES;
use crate::index::{ThreadIx, VmIx};
use crate::io::flip::{
    COPY_CYCLES, Channel, FLIP_CYCLES, GRANT_CYCLES, PageCost, Pool, RING_PAGES, SETTLE_PERIOD, rounds,
};
use crate::scenario::{Scenario, Transfer, TwinError, VmSpec};

/// Returns the channel that carries a VM's I/O to its driver domain, if it has one. The channel's pool may grow only while enough
/// memory is left for the VM's programs.
pub(super) fn channel(scenario: &Scenario, spec: &VmSpec) -> Result<Option<Channel>, TwinError> {
    let Some(backend) = &spec.driver_domain else {
        return Ok(None);
    };
    let driver = scenario.vms.iter().position(|vm| vm.name == backend.vm);
    let mut needed = Bytes::ZERO;
    for name in std::iter::once(&spec.workload).chain(spec.then.iter().map(|next| &next.workload)) {
        let program = scenario.workload_named(spec, name)?.program;
        let footprint = program.map_or(Bytes::ZERO, |program| program.footprint(spec.vcpus));
        needed = needed.max(footprint);
    }
    let pages = |bytes: Bytes| bytes.to_pages().0;
    let kept = pages(boot_footprint(spec.memory)) + pages(needed);
    let pool = backend.pool.as_ref().map(|pool| Pool {
        config: pool.config(),
        most: pages(spec.memory).saturating_sub(kept),
    });
    let driver = VmIx(driver.expect("checked with the scenario"));
    Ok(Some(Channel::new(driver, backend.transfer, pool)))
}

impl Engine {
    /// Returns the cost of passing one page between a VM and its driver domain.
    pub(super) fn page_cost(&self, vm: VmIx, driver: VmIx) -> PageCost {
        let node_of = |vm: VmIx| self.vms[vm].memory.home.as_ref().map_or(0, |home| home[0]);
        let (from, to) = (node_of(driver), node_of(vm));
        let cycles = |cycles: f64| cycles / self.figures.clock_ghz;
        let transfer = self.vms[vm].channel.as_ref().map(|channel| channel.transfer);
        if transfer == Some(Transfer::Flip) {
            return PageCost {
                guest_ns: cycles(GRANT_CYCLES + SHOOTDOWN_CYCLES),
                backend_ns: cycles(FLIP_CYCLES),
            };
        }
        let line_ns = self.fabric.latency_between(from, from) + self.fabric.latency_between(from, to);
        PageCost {
            guest_ns: cycles(GRANT_CYCLES),
            backend_ns: cycles(COPY_CYCLES) + self.copy_ns(line_ns),
        }
    }

    /// Sets the timer that settles the passed pages.
    pub(super) fn set_settling(&mut self, vm: VmIx) {
        let now = self.now;
        let Some(channel) = &mut self.vms[vm].channel else {
            return;
        };
        if !channel.timer_set && (channel.passed > 0 || channel.owed_ns > 0.0) {
            channel.timer_set = true;
            self.agenda.set(Ns(now.0 + SETTLE_PERIOD.0), Timer::Flips { vm });
        }
    }

    /// Exchanges the pages that passed since the last time, and makes the driver domain run the work that it owes.
    pub(super) fn settle_channel(&mut self, vm: VmIx) {
        let used = RING_PAGES + self.pages_under_way(vm);
        let size = self.vms[vm].memory.pool_pages();
        let Some(channel) = &mut self.vms[vm].channel else {
            return;
        };
        channel.timer_set = false;
        let driver = channel.driver;
        let copied = channel.copied;
        let mut flips = channel.split(size, used);
        let sized = channel.pool.as_ref().map(|pool| pool.sized(size, used, flips));
        let copied = channel.copied - copied;
        if !self.vms[vm].present() {
            flips = 0;
        }
        let [guest, backend] = self
            .vms
            .get_disjoint_mut([vm.0, driver.0])
            .expect("a VM is not its own driver domain");
        let (guest, backend) = (&mut guest.memory, &mut backend.memory);
        // A pool reaches its final size within tens of flips, long before the last flip, so it is resized first.
        if let Some(size) = sized {
            guest.size_pool(size, &mut self.chance);
        }
        for part in rounds(flips, guest.spare_pages(), backend.spare_pages()) {
            let (given, taken) = (
                guest.lift(part, &mut self.chance),
                backend.lift(part, &mut self.chance),
            );
            guest.lay(&given, taken.on.clone(), &mut self.chance);
            backend.lay(&taken, given.on, &mut self.chance);
        }
        self.count_copied(vm, driver, copied);
        self.run_backend(vm, driver);
        self.set_settling(vm);
    }

    /// Returns the number of pages in unfinished requests.
    fn pages_under_way(&self, vm: VmIx) -> u64 {
        let threads = self.vms[vm].threads.iter();
        let requests = threads.flat_map(|thread| &thread.requests.list);
        let under_way = requests.filter(|request| request.done > self.now);
        under_way
            .map(|request| libm::ceil(request.bytes / PAGE_BYTES as f64) as u64)
            .sum()
    }

    /// Counts bytes copied from the pages of one domain to those of the other.
    fn count_copied(&mut self, vm: VmIx, driver: VmIx, pages: u64) {
        let share = |on: Vec<u64>| {
            let all = on.iter().sum::<u64>().max(1) as f64;
            on.into_iter().map(move |pages| pages as f64 / all)
        };
        let bytes = (pages * PAGE_BYTES) as f64;
        for (from, of_driver) in share(self.vms[driver].memory.pages()).enumerate() {
            for (to, of_guest) in share(self.vms[vm].memory.pages()).enumerate() {
                self.totals.copy(from, to, bytes * of_driver * of_guest);
            }
        }
    }

    /// Makes the vCPU of a VM's backend thread run the work that the thread owes, once it has finished its current work.
    fn run_backend(&mut self, vm: VmIx, driver: VmIx) {
        let domain = &mut self.vms[driver];
        let thread = ThreadIx(vm.0 % domain.threads.len());
        if !domain.present() || domain.threads[thread].doing != Doing::Idle {
            return;
        }
        let task = domain.task(thread);
        domain.threads[thread].doing = Doing::Housekeeping;
        let owed = self.vms[vm]
            .channel
            .as_mut()
            .map_or(0.0, |channel| std::mem::take(&mut channel.owed_ns));
        self.vms[driver].threads[thread].left = owed;
        self.scheduler.wake(task, None, self.now);
        self.after_scheduling();
    }
}
