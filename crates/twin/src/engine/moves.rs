//! Page moves: what `move_pages` does on a live host.
//!
//! # Model
//!
//! One kernel thread moves page after page: a fixed amount of kernel work each, and a copy as fast as one core's misses
//! in flight allow at the present latencies. Copies load controllers and links. Each page's shootdown takes every
//! running vCPU of the VM out of the guest for a moment. Pages are drawn evenly from all that lie on the nodes to leave.
//! The call returns when the pages are there: simulated time passes.
//!
//! # Left out
//!
//! The CPU that the kernel thread needs, pages that somebody holds (none is ever busy), huge pages and their splitting.

use homenode_units::{Ns, PAGE_BYTES};

use super::{Engine, Mover, Moving};
use crate::hardware::fabric::Copying;
use crate::hypervisor::{PAGE_MOVE_NS, SHOOTDOWN_CYCLES};

impl Engine {
    /// Moves up to `pages` pages of a VM from nodes onto others, letting the time pass that it takes. Gives what moved.
    pub fn move_pages(&mut self, vm: usize, from: &[usize], to: &[usize], pages: u64) -> u64 {
        let page_ns = self.page_move_ns(vm, from, to);
        let stall = self.move_stall(page_ns);
        let (mut moved, mut carry) = (0, 0.0);
        self.moving = Some(Moving {
            vm,
            by: Mover::Policy,
            stall,
            copying: Vec::new(),
        });
        while moved < pages && self.vms[vm].present() {
            let slice = self
                .epoch
                .as_f64()
                .min((pages - moved) as f64 * page_ns)
                .ceil()
                .max(1.0);
            carry += slice / page_ns;
            let budget = (carry as u64).min(pages - moved);
            carry -= budget as f64;
            let done = self.vms[vm]
                .memory
                .migrate(from, to, budget, &mut self.memory.free, &mut self.chance);
            let count: u64 = done.iter().map(|(_, _, pages)| pages).sum();
            self.count_copies(vm, &done, slice);
            self.run_until(Ns(self.now.0 + slice as u64));
            if count < budget {
                moved += count;
                break;
            }
            moved += count;
        }
        self.moving = None;
        self.dirty = true;
        moved
    }

    /// Share of time that the vCPUs of a VM lose while a page moves every `page_ns`.
    pub(super) fn move_stall(&self, page_ns: f64) -> f64 {
        (SHOOTDOWN_CYCLES / self.clock_ghz / page_ns).min(0.9)
    }

    /// What one page costs to move: the kernel's work, and copying its lines as fast as one core's misses allow.
    pub(super) fn page_move_ns(&self, vm: usize, from: &[usize], to: &[usize]) -> f64 {
        let pages = self.vms[vm].memory.pages();
        let reads: Vec<f64> = from
            .iter()
            .filter(|node| pages[**node] > 0)
            .flat_map(|from| to.iter().map(move |to| (*from, *to)))
            .map(|(from, to)| self.fabric.latency_between(to, from) + self.fabric.latency_between(to, to))
            .collect();
        self.page_ns(reads.iter().sum::<f64>() / reads.len().max(1) as f64)
    }

    /// What one page costs to move where reading a line and writing it take this long.
    pub(super) fn page_ns(&self, line_ns: f64) -> f64 {
        let lines = PAGE_BYTES as f64 / self.line_bytes;
        PAGE_MOVE_NS + lines * line_ns / f64::from(self.hardware.misses_in_flight_max)
    }

    /// Notes pages that were moved: (from, to, pages), already taken from the free pages of `to`.
    pub(super) fn count_moved(&mut self, moved: &[(usize, usize, u64)]) {
        for (from, to, pages) in moved {
            let bytes = (pages * PAGE_BYTES) as f64;
            self.memory.free[*from] += pages;
            self.totals.copy(*from, *to, bytes);
        }
    }

    pub(super) fn count_copies(&mut self, vm: usize, done: &[(usize, usize, u64)], slice_ns: f64) {
        self.count_moved(done);
        if let Some(moving) = self.moving.as_mut().filter(|moving| moving.vm == vm) {
            moving.copying = copying(done, slice_ns);
        }
    }
}

/// The traffic of moves that take some time.
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
