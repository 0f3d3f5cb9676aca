//! A simulated kernel, for tests of the agent against a model of a host. It answers what no directory tree can: the clock, waits,
//! and the system calls about other processes. Files stay files, in a tree that the model keeps up to date.
//!
//! The system is set per thread. Threads without one, and builds without the feature `testing`, use the real kernel.

use std::cell::RefCell;
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use homenode_units::{CpuSet, NodeId, Ns};

/// A simulated kernel.
pub trait System {
    /// The monotonic clock.
    fn now(&self) -> Ns;

    /// Lets this much time pass.
    fn wait(&self, time: Duration);

    /// Called before a file or directory is read. An error is what the read returns.
    ///
    /// # Errors
    /// The error of the read.
    fn read(&self, path: &Path) -> io::Result<()>;

    /// Called before a kernel file is written.
    ///
    /// # Errors
    /// The error of the write.
    fn write(&self, path: &Path, text: &str) -> io::Result<()>;

    /// Makes a call to libvirt now, later or never. Returns whether the caller gets its answer in time.
    fn call(&self, call: Box<dyn FnOnce() + Send>) -> bool;

    /// `move_pages(2)`: as [`Kernel::query`](crate::pages::Kernel::query) without a node, else as
    /// [`Kernel::relocate`](crate::pages::Kernel::relocate).
    ///
    /// # Errors
    /// The error number if the call as a whole failed.
    fn pages(&self, pid: i32, addresses: &[usize], to: Option<NodeId>, status: &mut [i32])
    -> Result<(), i32>;

    /// `sched_setaffinity(2)`.
    ///
    /// # Errors
    /// The system's error.
    fn set_affinity(&self, tid: i32, cpus: &CpuSet) -> io::Result<()>;
}

thread_local! {
    static SYSTEM: RefCell<Option<Rc<dyn System>>> = const { RefCell::new(None) };
}

/// Simulates the kernel on this thread from now on; `None` ends that.
pub fn simulate(system: Option<Rc<dyn System>>) {
    SYSTEM.set(system);
}

/// The simulated kernel of this thread.
pub fn simulated() -> Option<Rc<dyn System>> {
    SYSTEM.with_borrow(Clone::clone)
}
