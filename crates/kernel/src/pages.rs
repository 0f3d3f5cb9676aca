//! `move_pages(2)`: asks which nodes another process's pages are on, and moves pages.
//!
//! # Approach
//! A [`Mover`] walks the ranges of a VM's RAM in windows of 2 MiB (or one huge page of hugetlbfs). In each window it asks where
//! the pages are, moves those outside the wanted nodes, and asks again: only pages that are on a wanted node then count as moved.
//! It stops when its budget is used up, after one full round, or after looking at [`LOOK_PAGES_MAX`] pages. The next call
//! continues where it stopped. Each system call has a fixed cost, since the kernel first empties all CPUs' lists of pages. So if
//! all pages go to one node and the budget has room, one call moves [`CALL_WINDOWS`] windows. After each call, that is after at
//! most 16 MiB (or one huge page) of copying, the caller is asked whether to continue.
//!
//! # Properties
//! - No more pages are moved than the budget allows, with one exception. If the budget is below one transparent huge page and
//!   there is nothing smaller to move, one such page is moved, because the kernel moves it whole. Kernels that combine base pages
//!   into smaller multiples (mTHP) may exceed the budget by less than one multiple.
//! - A window goes to one node: the wanted node that has the fewest pages. Over a whole VM this spreads pages evenly, and a huge
//!   page is never sent to two places.
//! - A page in use (`EBUSY`) is tried [`TRIES`] times, then left in place and reported as busy.
//!
//! # Pages that the kernel hides
//! Automatic NUMA balancing makes pages inaccessible to see which thread touches them next. For such a page, Linux 6.1 to 6.4
//! return `ENOENT` both when asked and when moving, so memory that the guest has stopped using could never come home (seen on
//! Debian's 6.1). If a window has pages that the kernel reports missing and `pagemap` reports present, one byte of each is read
//! before the move, which makes it accessible again.

use std::collections::{BTreeMap, BTreeSet};

use homenode_host::FrameMove;
use homenode_units::{NodeId, NodeMap, NodeSet, PAGE_BYTES, Pages};

use crate::numa_maps::{Range, Sharing};

/// Base pages in one window: one transparent huge page on every machine with 4 KiB base pages and KVM.
pub const WINDOW_PAGES: u64 = 512;
/// Number of windows that one call moves if all their pages go to one node.
pub const CALL_WINDOWS: u64 = 8;
/// Base pages that one call looks at, at most: 16 GiB.
pub const LOOK_PAGES_MAX: u64 = 4 << 20;
/// How many times a page in use is tried.
pub const TRIES: u32 = 3;

/// Why moving stopped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MoveError {
    /// The process ended.
    #[error("the process has ended")]
    Gone,
    /// The agent may not move another process's pages.
    #[error(
        "not permitted to move pages of another process; run as root or with CAP_SYS_NICE and CAP_SYS_PTRACE"
    )]
    NotPermitted,
    /// The process's cpuset does not allow the target.
    #[error("the VM's cpuset does not allow memory on node {node}")]
    NodeNotAllowed {
        /// The target node.
        node: NodeId,
    },
    /// No target node has free memory.
    #[error("nodes {nodes} have no free memory")]
    NoMemory {
        /// The target nodes.
        nodes: NodeSet,
    },
    /// One huge page is larger than the budget, so no huge page can ever move.
    #[error("one huge page has {needed}, but the budget for moving pages is {budget}")]
    BudgetBelowHugePage {
        /// Number of base pages in a huge page.
        needed: Pages,
        /// The budget.
        budget: Pages,
    },
    /// Another error of the kernel.
    #[error("move_pages failed: error {errno}")]
    Os {
        /// The error number.
        errno: i32,
    },
}

/// The system calls, as a trait, so that tests can fake a host with nodes.
pub trait Kernel {
    /// Writes the node of the page at each address into `status`, or a negative error number.
    ///
    /// # Errors
    /// Returns the error number if the call as a whole failed.
    fn query(&mut self, pid: i32, addresses: &[usize], status: &mut [i32]) -> Result<(), i32>;

    /// Moves pages to a node. Each entry of `status` must be "busy" beforehand; the kernel overwrites it for each page that it
    /// reaches.
    ///
    /// # Errors
    /// Returns the error number if the call as a whole failed.
    fn relocate(
        &mut self,
        pid: i32,
        addresses: &[usize],
        node: NodeId,
        sharing: Sharing,
        status: &mut [i32],
    ) -> Result<(), i32>;

    /// Makes pages accessible that are present, but that [`Kernel::query`] did not find. Returns how many.
    fn reveal(&mut self, pid: i32, addresses: &[usize]) -> usize;
}

/// The real system calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct Linux;

const MPOL_MF_MOVE: i32 = 1 << 1;
const MPOL_MF_MOVE_ALL: i32 = 1 << 2;

/// Calls `move_pages(2)`, which neither `libc` nor `rustix` wraps.
#[allow(unsafe_code)] // a system call without a wrapper
fn move_pages(
    pid: i32,
    addresses: &[usize],
    nodes: Option<&[i32]>,
    status: &mut [i32],
    flags: i32,
) -> Result<(), i32> {
    assert!(addresses.len() == status.len() && nodes.is_none_or(|nodes| nodes.len() == addresses.len()));
    #[cfg(any(test, feature = "testing"))]
    if let Some(system) = crate::system::simulated() {
        let to = nodes.map(|nodes| NodeId(nodes[0].unsigned_abs() as u16));
        return system.pages(pid, addresses, to, status);
    }
    // SAFETY: the three arrays have `addresses.len()` elements of the types that move_pages(2) names (pointers, ints, ints)
    // and live until it returns. The addresses are in another process: the kernel only looks them up there.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            pid,
            addresses.len(),
            addresses.as_ptr(),
            nodes.map_or(std::ptr::null(), <[i32]>::as_ptr),
            status.as_mut_ptr(),
            flags,
        )
    };
    // A positive result is the number of pages that did not move; `status` tells which.
    if result >= 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }
}

impl Kernel for Linux {
    fn reveal(&mut self, pid: i32, addresses: &[usize]) -> usize {
        #[cfg(any(test, feature = "testing"))]
        if crate::system::simulated().is_some() {
            return 0;
        }
        let hidden = present(pid, addresses);
        touch(pid, &hidden);
        hidden.len()
    }

    fn query(&mut self, pid: i32, addresses: &[usize], status: &mut [i32]) -> Result<(), i32> {
        move_pages(pid, addresses, None, status, 0)
    }

    fn relocate(
        &mut self,
        pid: i32,
        addresses: &[usize],
        node: NodeId,
        sharing: Sharing,
        status: &mut [i32],
    ) -> Result<(), i32> {
        let nodes = vec![i32::from(node.0); addresses.len()];
        let all = |status: &mut [i32]| move_pages(pid, addresses, Some(&nodes), status, MPOL_MF_MOVE_ALL);
        match sharing {
            Sharing::Private => move_pages(pid, addresses, Some(&nodes), status, MPOL_MF_MOVE),
            // Pages that a vhost-user process also maps move only with MOVE_ALL, which needs CAP_SYS_NICE.
            Sharing::Shared => match all(status) {
                Err(libc::EPERM) => move_pages(pid, addresses, Some(&nodes), status, MPOL_MF_MOVE),
                other => other,
            },
        }
    }
}

/// Most addresses that `process_vm_readv` takes in one call (`UIO_MAXIOV`).
const READS_MAX: usize = 1024;

/// Returns which of these pages are present according to `/proc/PID/pagemap`; empty if it cannot be read.
fn present(pid: i32, addresses: &[usize]) -> Vec<usize> {
    use std::os::unix::fs::FileExt as _;
    const PRESENT: u64 = 1 << 63;
    let page = PAGE_BYTES as usize;
    let Ok(pagemap) = std::fs::File::open(format!("/proc/{pid}/pagemap")) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for run in addresses.chunk_by(|a, b| a + page == *b) {
        let mut entries = vec![0; 8 * run.len()];
        let offset = (run[0] / page * 8) as u64;
        if pagemap.read_exact_at(&mut entries, offset).is_err() {
            return Vec::new();
        }
        let entries = entries
            .chunks_exact(8)
            .map(|entry| u64::from_le_bytes(entry.try_into().expect("eight bytes")));
        let is_present = |(&address, entry): (&usize, u64)| (entry & PRESENT != 0).then_some(address);
        found.extend(run.iter().zip(entries).filter_map(is_present));
    }
    found
}

/// Reads one byte at each of these addresses in another process, only to make the pages accessible.
#[allow(unsafe_code)] // a system call without a wrapper
fn touch(pid: i32, addresses: &[usize]) {
    for chunk in addresses.chunks(READS_MAX) {
        let mut bytes = vec![0_u8; chunk.len()];
        let local = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        let remote: Vec<libc::iovec> = chunk
            .iter()
            .map(|&address| libc::iovec {
                iov_base: address as *mut libc::c_void,
                iov_len: 1,
            })
            .collect();
        // SAFETY: `local` is `bytes`, which outlives the call and takes one byte for each element of `remote`; the addresses
        // in those are in another process, where the kernel only reads.
        unsafe { libc::process_vm_readv(pid, &raw const local, 1, remote.as_ptr(), remote.len() as u64, 0) };
    }
}

/// What one call of a [`Mover`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Base pages that were elsewhere before and are on the wanted nodes now.
    pub moved: Pages,
    /// Base pages that stayed because they were in use.
    pub busy: Pages,
    /// Base pages that the kernel will not move (pinned, not migratable, shared under KSM).
    pub refused: Pages,
}

/// Walks one VM's memory. Keep it while the VM runs, because it remembers its position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mover {
    pid: i32,
    ranges: Vec<Range>,
    /// Position of the range to continue in, and the address in it.
    cursor: (usize, u64),
}

/// Result of one window.
enum Window {
    /// The window has no pages to move.
    Clean,
    /// Moving pages was tried.
    Tried,
    /// The window must move as a whole, and what is left of the budget is too small.
    TooLarge,
}

struct Targets {
    /// Nodes that pages must leave.
    leave: NodeSet,
    wanted: NodeSet,
    /// For each wanted node: its number of base pages, and whether it ran out of memory.
    nodes: Vec<(NodeId, u64, bool)>,
}

impl Targets {
    /// Returns the wanted node that has the fewest pages and is not full.
    fn least(&self) -> Option<usize> {
        (0..self.nodes.len())
            .filter(|&at| !self.nodes[at].2)
            .min_by_key(|&at| self.nodes[at].1)
    }
}

impl Mover {
    /// Starts a walk over these ranges of a process, from their beginning.
    pub fn new(pid: i32, ranges: Vec<Range>) -> Mover {
        let start = ranges.first().map_or(0, |range| range.start);
        Mover {
            pid,
            ranges,
            cursor: (0, start),
        }
    }

    /// Returns the ranges that it walks.
    pub fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    /// Moves at most `budget` of the pages on `leave` to `to`, evenly. `now` has the number of pages that each node has. Stops
    /// early if `go_on` returns false.
    ///
    /// # Errors
    /// Only if no page moved in this call. Otherwise an error ends the call, which reports the pages moved so far; the next call
    /// meets the error again. The process's end is always an error.
    pub fn advance(
        &mut self,
        kernel: &mut dyn Kernel,
        leave: &NodeSet,
        to: &NodeSet,
        now: &NodeMap<Pages>,
        budget: Pages,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Progress, MoveError> {
        let nodes = to
            .iter()
            .map(|node| (node, now.get(node).map_or(0, |pages| pages.0), false))
            .collect();
        let mut targets = Targets {
            leave: leave.clone(),
            wanted: to.clone(),
            nodes,
        };
        let mut progress = Progress::default();
        let total: u64 = self.ranges.iter().map(|range| range.pages().0).sum();
        let mut looked = 0;
        let mut too_large = None;
        while looked < total.min(LOOK_PAGES_MAX) && progress.moved < budget && go_on() {
            let rest = budget - progress.moved;
            let windows = match targets.nodes.len() {
                1 => (rest.0 / WINDOW_PAGES).clamp(1, CALL_WINDOWS),
                _ => 1,
            };
            let Some((range, start, end)) = self.step(windows) else {
                break;
            };
            looked += (end - start) / PAGE_BYTES;
            let step = range.page_bytes.0.max(PAGE_BYTES) as usize;
            let addresses: Vec<usize> = (start..end).step_by(step).map(|a| a as usize).collect();
            match self.window(kernel, &range, &addresses, &mut targets, rest, &mut progress) {
                Ok(Window::Clean | Window::Tried) => {}
                Ok(Window::TooLarge) => {
                    too_large.get_or_insert(Pages((end - start) / PAGE_BYTES));
                    if progress.moved > Pages::ZERO {
                        self.cursor = self.back_to(start);
                        break;
                    }
                }
                Err(MoveError::Gone) => return Err(MoveError::Gone),
                Err(_) if progress.moved > Pages::ZERO => break,
                Err(error) => return Err(error),
            }
        }
        match too_large {
            Some(needed) if progress == Progress::default() => {
                Err(MoveError::BudgetBelowHugePage { needed, budget })
            }
            _ => Ok(progress),
        }
    }

    /// Returns the range of the next windows, and their first and last address, clipped to that range. Wraps around at the end.
    /// Returns a single window if huge pages are larger than a window.
    fn step(&mut self, windows: u64) -> Option<(Range, u64, u64)> {
        let (mut at, mut start) = self.cursor;
        let current = self.ranges.get(at).filter(|range| start < range.end);
        if current.is_none() {
            at = if at + 1 < self.ranges.len() { at + 1 } else { 0 };
            start = self.ranges.get(at)?.start;
        }
        let range = self.ranges[at].clone();
        let window = range.page_bytes.0.max(WINDOW_PAGES * PAGE_BYTES);
        let windows = if window > WINDOW_PAGES * PAGE_BYTES {
            1
        } else {
            windows
        };
        let end = (start / window + windows).saturating_mul(window).min(range.end);
        self.cursor = (at, end);
        Some((range, start, end))
    }

    fn back_to(&self, start: u64) -> (usize, u64) {
        let at = self
            .ranges
            .iter()
            .position(|range| (range.start..range.end).contains(&start));
        (at.unwrap_or(0), start)
    }

    fn window(
        &self,
        kernel: &mut dyn Kernel,
        range: &Range,
        addresses: &[usize],
        targets: &mut Targets,
        rest: Pages,
        progress: &mut Progress,
    ) -> Result<Window, MoveError> {
        let pages_each = range.page_bytes.0.max(PAGE_BYTES) / PAGE_BYTES;
        let (leave, wanted) = (targets.leave.clone(), targets.wanted.clone());
        let leaves = |status: i32| u16::try_from(status).is_ok_and(|node| leave.contains(NodeId(node)));
        let outside =
            |status: &[i32]| -> Vec<usize> { (0..status.len()).filter(|&i| leaves(status[i])).collect() };
        let mut status = self.ask(kernel, addresses)?;
        let unknown = |(&address, &status): (&usize, &i32)| (status == -libc::ENOENT).then_some(address);
        let unknown: Vec<usize> = addresses.iter().zip(&status).filter_map(unknown).collect();
        if !unknown.is_empty() && kernel.reveal(self.pid, &unknown) > 0 {
            status = self.ask(kernel, addresses)?;
        }
        let mut left = outside(&status);
        if left.is_empty() {
            return Ok(Window::Clean);
        }
        let is_whole =
            left.len() as u64 == WINDOW_PAGES && left.iter().all(|&i| status[i] == status[left[0]]);
        let Some(allowed) = allowed(rest, pages_each, is_whole, *progress) else {
            return Ok(Window::TooLarge);
        };
        let before = left.len();
        let mut said = Vec::new();
        for _ in 0..TRIES {
            let batch = left
                .len()
                .min(allowed.saturating_sub(before.saturating_sub(left.len())));
            if batch == 0 {
                break;
            }
            let target = targets.least().ok_or_else(|| MoveError::NoMemory {
                nodes: wanted.clone(),
            })?;
            said = self.send(kernel, range, addresses, &left[..batch], targets.nodes[target].0)?;
            let count = left.len();
            left = outside(&self.ask(kernel, addresses)?);
            let gained = count.saturating_sub(left.len()) as u64 * pages_each;
            targets.nodes[target].1 += gained;
            progress.moved += Pages(gained);
            if said.contains(&-libc::ENOMEM) {
                targets.nodes[target].2 = true;
            } else if !said
                .iter()
                .any(|status| matches!(-status, libc::EBUSY | libc::EAGAIN))
            {
                break;
            }
        }
        let count = |errors: &[i32]| said.iter().filter(|status| errors.contains(&-**status)).count();
        let busy = count(&[libc::EBUSY, libc::EAGAIN]).min(left.len());
        let refused = count(&[libc::EACCES, libc::EFAULT, libc::EINVAL, libc::EIO]).min(left.len() - busy);
        progress.busy += Pages(busy as u64 * pages_each);
        progress.refused += Pages(refused as u64 * pages_each);
        Ok(Window::Tried)
    }

    /// Moves single pages. Each is named by its place in the VM's RAM, counted in base pages over [`Mover::ranges`]. A page that
    /// is not on the node that the move names, or is in no range, is skipped: it has moved since, or was never there. Pages with
    /// the same source and destination move together, up to a window's number.
    ///
    /// # Errors
    /// Only if no page moved; otherwise an error ends the call, which reports the pages moved so far.
    pub fn move_frames(
        &self,
        kernel: &mut dyn Kernel,
        moves: &[FrameMove],
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Progress, MoveError> {
        let mut progress = Progress::default();
        let mut trouble = None;
        'ways: for ((from, to, at), addresses) in self.ways(moves) {
            let range = &self.ranges[at];
            let pages_each = range.page_bytes.0.max(PAGE_BYTES) / PAGE_BYTES;
            let addresses: Vec<usize> = addresses.into_iter().collect();
            for batch in addresses.chunks((WINDOW_PAGES / pages_each).max(1) as usize) {
                if !go_on() {
                    return Ok(progress);
                }
                let mut targets = Targets {
                    leave: NodeSet::one(from),
                    wanted: NodeSet::one(to),
                    nodes: vec![(to, 0, false)],
                };
                let rest = Pages(batch.len() as u64 * pages_each);
                match self.window(kernel, range, batch, &mut targets, rest, &mut progress) {
                    Ok(_) => {}
                    Err(MoveError::Gone) => return Err(MoveError::Gone),
                    // An obstacle for these pages, such as a full node, may not exist for others.
                    Err(error) => {
                        trouble = Some(error);
                        continue 'ways;
                    }
                }
            }
        }
        match trouble {
            Some(error) if progress.moved == Pages::ZERO => Err(error),
            _ => Ok(progress),
        }
    }

    /// Returns the addresses to move, by source node, destination node and range. Each page appears once. A huge page appears by
    /// its start, since any part stands for the whole.
    fn ways(&self, moves: &[FrameMove]) -> BTreeMap<(NodeId, NodeId, usize), BTreeSet<usize>> {
        let mut ways: BTreeMap<_, BTreeSet<usize>> = BTreeMap::new();
        for each in moves {
            let mut frames = each.frame..each.frame.saturating_add(each.pages.0);
            while !frames.is_empty() {
                let Some((at, start)) = self.place_of(frames.start) else {
                    break;
                };
                let range = &self.ranges[at];
                let count = ((range.end - start) / PAGE_BYTES).min(frames.end - frames.start);
                frames.start += count;
                let step = range.page_bytes.0.max(PAGE_BYTES);
                let end = start + count * PAGE_BYTES;
                let start = start - (start - range.start) % step;
                let addresses = (start..end).step_by(step as usize).map(|a| a as usize);
                ways.entry((each.from, each.to, at))
                    .or_default()
                    .extend(addresses);
            }
        }
        ways
    }

    /// Returns the position of the range that a page of the VM's RAM is in, and the page's address.
    fn place_of(&self, frame: u64) -> Option<(usize, u64)> {
        let mut first = 0;
        for (at, range) in self.ranges.iter().enumerate() {
            let next = first + range.pages().0;
            if frame < next {
                return Some((at, range.start + (frame - first) * PAGE_BYTES));
            }
            first = next;
        }
        None
    }

    fn ask(&self, kernel: &mut dyn Kernel, addresses: &[usize]) -> Result<Vec<i32>, MoveError> {
        let mut status = vec![-libc::ENOENT; addresses.len()];
        kernel
            .query(self.pid, addresses, &mut status)
            .map_err(|errno| error_of(errno, None))?;
        Ok(status)
    }

    /// Sends the pages at these positions to a node, and returns the kernel's result for each.
    fn send(
        &self,
        kernel: &mut dyn Kernel,
        range: &Range,
        addresses: &[usize],
        which: &[usize],
        node: NodeId,
    ) -> Result<Vec<i32>, MoveError> {
        let chosen: Vec<usize> = which.iter().map(|&i| addresses[i]).collect();
        // If the kernel stops half-way, it leaves the other results untouched. "Busy" makes those pages worth another try.
        let mut status = vec![-libc::EBUSY; chosen.len()];
        match kernel.relocate(self.pid, &chosen, node, range.sharing, &mut status) {
            Ok(()) => Ok(status),
            Err(libc::ENOMEM) => Ok(vec![-libc::ENOMEM; chosen.len()]),
            Err(libc::ENOENT) => Ok(vec![-libc::ENOENT; chosen.len()]), // older kernels: nothing had to move
            Err(errno) => Err(error_of(errno, Some(node))),
        }
    }
}

/// Returns how many pages of a window may be sent within the rest of a budget; `None` if the window must wait for a larger one. A
/// transparent huge page moves whole, whichever part of it is named, so a window that looks like one must fit.
fn allowed(rest: Pages, pages_each: u64, is_whole: bool, progress: Progress) -> Option<usize> {
    let needed = if is_whole { WINDOW_PAGES } else { 1 }.max(pages_each);
    if needed <= rest.0 {
        Some((rest.0 / pages_each) as usize)
    } else {
        // Sending one base page tells whether the window is really a huge page. Larger pages cannot be tried in part.
        (pages_each == 1 && progress.moved == Pages::ZERO).then_some(1)
    }
}

fn error_of(errno: i32, node: Option<NodeId>) -> MoveError {
    match (errno, node) {
        // A process that has released its memory but still has its process id returns EINVAL.
        (libc::ESRCH, _) | (libc::EINVAL, None) => MoveError::Gone,
        (libc::EPERM, _) => MoveError::NotPermitted,
        (libc::EACCES | libc::ENODEV, Some(node)) => MoveError::NodeNotAllowed { node },
        _ => MoveError::Os { errno },
    }
}

#[cfg(test)]
mod tests;
