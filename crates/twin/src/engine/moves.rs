//! Page moves: what `move_pages` does on a live host.
//!
//! # Model
//!
//! One kernel thread moves page after page. Each page costs a fixed amount of kernel work, and a copy at the speed that one
//! core's misses in flight allow at the present latencies. Copies load controllers and links. Each page's shootdown takes every
//! running vCPU of the VM out of the guest for a moment. A huge page moves whole: one piece of work and one shootdown for 512
//! pages. Pages are drawn evenly from all pages on the nodes to leave, or from the classes that a policy names. Simulated time
//! passes until the pages have moved; then the call returns. If the VM has a driver domain, that domain's vCPU runs the kernel
//! thread's work ([Flip, section IV.B]: "handled by the privVM resources").
//!
//! # Left out
//!
//! The CPU time that the kernel thread takes from other tasks; busy pages (a page is never busy here); huge pages that are split.

use homenode_units::{Ns, PAGE_BYTES};

use super::{Engine, Mover, Moving};
use crate::hardware::fabric::Copying;
use crate::hypervisor::{PAGE_MOVE_NS, SHOOTDOWN_CYCLES};
use crate::index::VmIx;

/// Pages of one class to move, identified by the guest frame of one of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Alike {
    pub frame: u64,
    pub pages: u64,
    pub from: usize,
    pub to: usize,
}

impl Engine {
    /// Moves up to `pages` pages of a VM from some nodes to others while simulated time passes. Returns how many moved.
    pub(crate) fn move_pages(&mut self, vm: VmIx, from: &[usize], to: &[usize], pages: u64) -> u64 {
        let page_ns = self.page_move_ns(vm, from, to);
        self.let_move(vm, pages, page_ns, |engine, budget| {
            let memory = &mut engine.vms[vm].memory;
            memory.migrate(from, to, budget, &mut engine.memory.free, &mut engine.chance)
        })
    }

    /// Moves pages of some classes from node to node while simulated time passes. Returns how many moved.
    pub(crate) fn move_alike(&mut self, vm: VmIx, moves: &[Alike]) -> u64 {
        let pages: u64 = moves.iter().map(|alike| alike.pages).sum();
        let line_ns = |alike: &Alike| {
            let latency = |reader, memory| self.fabric.latency_between(reader, memory);
            alike.pages as f64 * (latency(alike.to, alike.from) + latency(alike.to, alike.to))
        };
        let line_ns = moves.iter().map(line_ns).sum::<f64>() / pages.max(1) as f64;
        let page_ns = self.page_ns(vm, line_ns);
        let mut rest = moves.to_vec();
        rest.reverse();
        let moved = self.let_move(vm, pages, page_ns, |engine, budget| {
            let (mut left, mut done) = (budget, Vec::new());
            while left > 0
                && let Some(mut alike) = rest.pop()
            {
                let now = alike.pages.min(left);
                let fits = now.min(engine.memory.free[alike.to]);
                let memory = &mut engine.vms[vm].memory;
                let moved = memory.move_alike(alike.frame, alike.from, alike.to, fits);
                if moved > 0 {
                    engine.memory.free[alike.to] -= moved;
                    done.push((alike.from, alike.to, moved));
                    left -= moved;
                }
                alike.pages -= now;
                // Retrying would not help: pages that are absent, or do not fit on the target node, would fail again.
                if moved == now && alike.pages > 0 {
                    rest.push(alike);
                }
            }
            done
        });
        if let Some(sampling) = &mut self.vms[vm].host.sampling {
            sampling.moved += moved;
        }
        moved
    }

    /// Moves pages of a VM in slices of time, until `pages` have moved or `some` finds no more. `some` moves at most a given
    /// number of pages and returns (from, to, pages). Returns how many pages moved.
    fn let_move(
        &mut self,
        vm: VmIx,
        pages: u64,
        page_ns: f64,
        mut some: impl FnMut(&mut Engine, u64) -> Vec<(usize, usize, u64)>,
    ) -> u64 {
        let stall = self.move_stall(vm, page_ns);
        let (mut moved, mut carry) = (0, 0.0);
        self.moving = Some(Moving {
            vm,
            by: Mover::Policy,
            stall,
            copying: Vec::new(),
        });
        while moved < pages && self.vms[vm].present() {
            let slice = self
                .epochs
                .length
                .as_f64()
                .min((pages - moved) as f64 * page_ns)
                .ceil()
                .max(1.0);
            carry += slice / page_ns;
            let budget = (carry as u64).min(pages - moved);
            carry -= budget as f64;
            let done = some(self, budget);
            let count: u64 = done.iter().map(|(_, _, pages)| pages).sum();
            self.count_copies(vm, &done, page_ns, slice);
            self.run_until(Ns(self.now.0 + slice as u64));
            moved += count;
            if count < budget {
                break;
            }
        }
        self.moving = None;
        self.epochs.dirty = true;
        self.vms[vm].counts.pages_moved += moved;
        moved
    }

    /// Returns the share of time that a VM's vCPUs lose while one of its pages moves every `page_ns`.
    pub(super) fn move_stall(&self, vm: VmIx, page_ns: f64) -> f64 {
        let shootdown_ns = SHOOTDOWN_CYCLES / self.figures.clock_ghz * self.vms[vm].host.per_page();
        (shootdown_ns / page_ns).min(0.9)
    }

    /// Returns the time that one page takes to move: the kernel's work, and copying its lines as fast as one core's misses allow.
    pub(super) fn page_move_ns(&self, vm: VmIx, from: &[usize], to: &[usize]) -> f64 {
        let pages = self.vms[vm].memory.pages();
        let reads: Vec<f64> = from
            .iter()
            .filter(|node| pages[**node] > 0)
            .flat_map(|from| to.iter().map(move |to| (*from, *to)))
            .map(|(from, to)| self.fabric.latency_between(to, from) + self.fabric.latency_between(to, to))
            .collect();
        self.page_ns(vm, reads.iter().sum::<f64>() / reads.len().max(1) as f64)
    }

    /// Returns the time that one page of a VM takes to move if reading and writing a line takes `line_ns`.
    fn page_ns(&self, vm: VmIx, line_ns: f64) -> f64 {
        PAGE_MOVE_NS * self.vms[vm].host.per_page() + self.copy_ns(line_ns)
    }

    /// Returns the time to copy the lines of a page, as fast as one core's misses allow.
    pub(super) fn copy_ns(&self, line_ns: f64) -> f64 {
        let lines = PAGE_BYTES as f64 / self.figures.line_bytes;
        lines * line_ns / f64::from(self.hardware.misses_in_flight_max)
    }

    /// Counts pages that were moved: (from, to, pages). They are already taken from the free pages of `to`.
    pub(super) fn count_moved(&mut self, moved: &[(usize, usize, u64)]) {
        for (from, _, pages) in moved {
            self.memory.free[*from] += pages;
        }
        self.note_copies(moved);
    }

    /// Counts pages that were copied: (from, to, pages).
    pub(super) fn note_copies(&mut self, moved: &[(usize, usize, u64)]) {
        for (from, to, pages) in moved {
            self.totals.copy(*from, *to, (pages * PAGE_BYTES) as f64);
        }
    }

    pub(super) fn count_copies(
        &mut self,
        vm: VmIx,
        done: &[(usize, usize, u64)],
        page_ns: f64,
        slice_ns: f64,
    ) {
        self.count_moved(done);
        let pages: u64 = done.iter().map(|(_, _, pages)| pages).sum();
        if let Some(channel) = &mut self.vms[vm].channel {
            channel.owe(pages as f64 * page_ns);
            self.set_settling(vm);
        }
        if let Some(moving) = self.moving.as_mut().filter(|moving| moving.vm == vm) {
            moving.copying = copying(done, slice_ns);
        }
    }
}

/// Returns the traffic of moves that take `ns` nanoseconds.
pub(super) fn copying(moved: &[(usize, usize, u64)], ns: f64) -> Vec<Copying> {
    let mut copying: Vec<Copying> = Vec::new();
    for (from, to, pages) in moved {
        let rate = (pages * PAGE_BYTES) as f64 / ns;
        match copying
            .iter_mut()
            .find(|copy| (copy.from, copy.to) == (*from, *to))
        {
            Some(copy) => copy.rate += rate,
            None => copying.push(Copying {
                from: *from,
                to: *to,
                rate,
                by_device: false,
            }),
        }
    }
    copying
}
