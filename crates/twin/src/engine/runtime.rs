//! Runtime libraries [XPV, section 4.3.3]: how an allocator or a Java virtual machine handles a program's memory while it
//! runs.
//!
//! # Model
//!
//! A program frees and allocates memory as its profile says ([`crate::workload::RuntimeProfile`]). The library keeps freed memory
//! and hands it out again, so the kernel's first touch decides only once where a page is. Two kinds of library differ:
//! - A library that knows nodes hands a thread memory on the node of the thread's vCPU. The library knows that node from its
//!   kernel: as of the start of the program, or as of now. If the memory was freed on another node, the thread gets fresh memory
//!   from the kernel instead: a first touch.
//! - Any other library hands out the memory that was freed last: by the same thread or, if the program's threads share a heap, by
//!   any of them. In the second case threads' pages change places: a page that first touch put near one thread ends up near
//!   another. In the first case every page stays where it was first touched, even after the thread has moved to another node, by
//!   its vCPU or by its guest's scheduler (`engine/threads.rs`). TCMalloc without nodes, the library of [XPV]'s milc, is of the
//!   first kind for a rank of MPI, which is a process with one thread: its thread cache, its central lists and its page heap hand
//!   out what that process freed (gperftools, `docs/tcmalloc.html`), and it returns memory to the system only slowly. The
//!   library that knows nodes hands a moved thread near memory, and so brings its memory after it.
//!
//! Every 100 ms, the pages that a thread has allocated since the last time are drawn evenly from its own.
//!
//! # Left out
//!
//! Memory that several threads use (an old generation, which such libraries spread over nodes anyway). The time between freeing
//! and allocating, and therefore also when a collector looks at the topology; the paper's does so at the end of each collection,
//! several times a second. The time that a library makes threads wait.

use homenode_units::{Chance, Ns, PAGE_BYTES};

use super::Engine;
use super::agenda::Timer;
use crate::guest::runtime::Runtime;
use crate::guest::view::By;
use crate::guest::{Stage, TOUCH_NS};
use crate::hypervisor::Run;
use crate::hypervisor::memory::Toucher;
use crate::index::{IxVec, ThreadIx, VmIx};
use crate::scenario::RuntimeNodes;
use crate::workload::Reuse;

/// Interval at which allocated memory is placed.
const PERIOD: Ns = Ns::from_millis(100);

impl Engine {
    /// Starts placing what a VM's program allocates, when the program starts.
    pub(super) fn start_runtime(&mut self, vm: VmIx) {
        let threads = self.vms[vm].threads.places();
        let began_on = threads
            .map(|thread| self.node_seen(vm, By::Guest, thread))
            .collect();
        let owner = &self.vms[vm];
        let profile = owner.course.program.as_ref().and_then(|program| program.runtime);
        let runtime = profile.map(|profile| Runtime {
            reuse: profile.reuse,
            pages_per_instruction: profile.allocated_bytes_per_kilo_instruction / 1000.0 / PAGE_BYTES as f64,
            began_on,
            done: owner.threads.iter().map(|thread| thread.instructions).collect(),
            chance: Chance::labelled(self.seed, "runtime", vm.0),
        });
        let (starts, life) = (owner.runtime.is_none() && runtime.is_some(), owner.life);
        self.vms[vm].runtime = runtime;
        if starts {
            self.agenda
                .set(Ns(self.now.0 + PERIOD.0), Timer::Runtime { vm, life });
        }
    }

    /// Places what a VM's program allocated in the last period.
    pub(super) fn place_allocated(&mut self, vm: VmIx, life: u32) {
        if self.vms[vm].life != life {
            return;
        }
        let Some(mut runtime) = self.vms[vm]
            .runtime
            .take()
            .filter(|_| self.vms[vm].stage == Stage::Program)
        else {
            return;
        };
        self.settle_vm(vm);
        self.agenda
            .set(Ns(self.now.0 + PERIOD.0), Timer::Runtime { vm, life });
        let allocated: IxVec<ThreadIx, u64> = (self.vms[vm].threads.iter().zip(&mut runtime.done))
            .map(|(thread, done)| {
                let pages = ((thread.instructions - *done) * runtime.pages_per_instruction) as u64;
                *done += pages as f64 / runtime.pages_per_instruction;
                pages
            })
            .collect();
        match (self.vms[vm].runtime_nodes, runtime.reuse) {
            // The thread gets its own pages again. They stay on their nodes, wherever the thread is now.
            (RuntimeNodes::None, Reuse::Thread) => {}
            (RuntimeNodes::None, Reuse::Program) => {
                self.vms[vm].memory.mix(&allocated, &mut runtime.chance);
                self.epochs.solve_soon(self.now);
            }
            // The guest's kernel believes that its frames are on the nodes that it requested.
            _ if self.vms[vm].memory.owns_frames && !self.vms[vm].memory.finds_frames() => {}
            (knows, _) => {
                for (thread, &pages) in allocated.placed() {
                    let node = match knows {
                        RuntimeNodes::Live => self.node_seen(vm, By::Guest, thread),
                        RuntimeNodes::Static | RuntimeNodes::None => runtime.began_on[thread],
                    };
                    self.hand_out(vm, thread, node, pages, &mut runtime.chance);
                }
            }
        }
        self.vms[vm].runtime = Some(runtime);
    }

    /// Hands a thread `pages` pages on a node, in exchange for as many of its own.
    fn hand_out(&mut self, vm: VmIx, thread: ThreadIx, node: usize, pages: u64, chance: &mut Chance) {
        let taken = self.vms[vm].memory.invalidate(thread, node, pages, chance);
        for (region, from, pages) in taken {
            let owner = &mut self.vms[vm];
            owner.threads[thread].owed_ns += pages as f64 * TOUCH_NS;
            let freed = match owner.memory.owns_frames {
                true => &mut owner.memory.free_list,
                false => &mut self.memory.free,
            };
            freed[from] += pages;
            self.placed.fill(0);
            self.place(vm, region, Toucher { vcpu: thread, node }, pages);
        }
        let task = &self.scheduler.queues.tasks[self.vms[vm].task(thread)];
        if task.run == Run::Running {
            self.set_speed(task.cpu);
        }
    }
}
