//! move_pages(2): finds the pages of another process, and moves them one by one.
#![allow(
    unsafe_code,
    reason = "move_pages has no safe wrapper in any crate that is used here"
)]

use std::collections::BTreeMap;
use std::ptr;
use std::time::Instant;

use anyhow::{Context as _, bail};

/// Linux' page size on x86.
pub const PAGE_BYTES: u64 = 4096;
const BATCH: usize = 1024;
const MPOL_MF_MOVE_ALL: libc::c_int = 1 << 2;

/// The outcome of moving pages.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct MoveOutcome {
    /// Number of pages on each node after the move.
    pub on_node: BTreeMap<u32, u64>,
    /// Number of pages that the kernel did not move, by its reason (`ENOENT`: no page there yet).
    pub refused: BTreeMap<String, u64>,
    /// The error of the call as a whole, if it failed.
    pub call_error: Option<String>,
    /// Time spent in the kernel.
    pub seconds: f64,
}

impl MoveOutcome {
    /// Returns the number of pages that exist.
    #[must_use]
    pub fn present(&self) -> u64 {
        self.on_node.values().sum()
    }

    /// Returns how many pages were handled per second.
    #[must_use]
    pub fn pages_per_second(&self) -> f64 {
        if self.seconds > 0.0 {
            self.present() as f64 / self.seconds
        } else {
            0.0
        }
    }
}

/// Moves the pages of a range of another process: page `i` goes to node `target(i)`.
///
/// Refused pages are part of the outcome. If the kernel refuses a whole call, that is part of the outcome, too, and ends the
/// move.
///
/// # Errors
/// When the process number is out of range.
pub fn move_range(
    pid: u32,
    begin: u64,
    bytes: u64,
    target: impl Fn(u64) -> u32,
) -> anyhow::Result<MoveOutcome> {
    let pid = libc::pid_t::try_from(pid).context("a process number is out of range")?;
    let mut outcome = MoveOutcome::default();
    let count = bytes / PAGE_BYTES;
    let mut next = 0;
    while next < count {
        let batch: Vec<u64> = (next..count).take(BATCH).collect();
        next += batch.len() as u64;
        let pages: Vec<*mut libc::c_void> = batch
            .iter()
            .map(|page| ptr::without_provenance_mut((begin + page * PAGE_BYTES) as usize))
            .collect();
        let mut nodes = Vec::with_capacity(batch.len());
        for page in &batch {
            nodes.push(libc::c_int::try_from(target(*page)).context("a node number is out of range")?);
        }
        let mut status = vec![libc::c_int::MIN; batch.len()];
        let started = Instant::now();
        // SAFETY: the three arrays have `batch.len()` elements each and outlive the call; the page addresses are
        // those of the other process and are not dereferenced here.
        let result = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                pid,
                batch.len() as libc::c_ulong,
                pages.as_ptr(),
                nodes.as_ptr(),
                status.as_mut_ptr(),
                MPOL_MF_MOVE_ALL,
            )
        };
        let call_error = std::io::Error::last_os_error();
        outcome.seconds += started.elapsed().as_secs_f64();
        if result < 0 {
            outcome.call_error = Some(name_of(call_error.raw_os_error().unwrap_or(0)));
            return Ok(outcome);
        }
        count_status(&status, &mut outcome);
    }
    Ok(outcome)
}

/// Moves all pages of another process from one node to another, with migrate_pages(2).
///
/// # Errors
/// The kernel's error.
pub fn migrate(pid: u32, from: u32, to: u32) -> anyhow::Result<()> {
    let pid = libc::pid_t::try_from(pid).context("a process number is out of range")?;
    let (from, to): (libc::c_ulong, libc::c_ulong) = (1 << from, 1 << to);
    let bits: libc::c_ulong = libc::c_ulong::from(libc::c_ulong::BITS);
    // SAFETY: the two masks have `bits` bits each and outlive the call.
    let result = unsafe { libc::syscall(libc::SYS_migrate_pages, pid, bits, &raw const from, &raw const to) };
    if result < 0 {
        bail!("migrate_pages failed: {}", std::io::Error::last_os_error());
    }
    Ok(())
}

fn count_status(status: &[libc::c_int], outcome: &mut MoveOutcome) {
    for value in status {
        match u32::try_from(*value) {
            Ok(node) => *outcome.on_node.entry(node).or_default() += 1,
            Err(_) if *value == libc::c_int::MIN => {
                *outcome.refused.entry("untouched".to_owned()).or_default() += 1;
            }
            Err(_) => *outcome.refused.entry(name_of(-*value)).or_default() += 1,
        }
    }
}

fn name_of(errno: i32) -> String {
    match errno {
        libc::EACCES => "EACCES".to_owned(),
        libc::EBUSY => "EBUSY".to_owned(),
        libc::EFAULT => "EFAULT".to_owned(),
        libc::EINVAL => "EINVAL".to_owned(),
        libc::ENODEV => "ENODEV".to_owned(),
        libc::ENOENT => "ENOENT".to_owned(),
        libc::ENOMEM => "ENOMEM".to_owned(),
        libc::EPERM => "EPERM".to_owned(),
        libc::ESRCH => "ESRCH".to_owned(),
        other => format!("errno {other}"),
    }
}

/// Fails unless at least this share of the pages is on `node`.
///
/// # Errors
/// When the share is smaller. The error says where the pages are.
pub fn expect_share(pages: &BTreeMap<u32, u64>, node: u32, percent: u64) -> anyhow::Result<()> {
    let total: u64 = pages.values().sum();
    let there = pages.get(&node).copied().unwrap_or(0);
    if total == 0 || there * 100 < total * percent {
        bail!("expected at least {percent} percent of the guest's pages on node {node}, saw {pages:?}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_values_are_counted_by_kind() {
        let mut outcome = MoveOutcome::default();
        count_status(&[0, 3, 3, -libc::ENOENT, -libc::EACCES], &mut outcome);
        assert_eq!(outcome.on_node, BTreeMap::from([(0, 1), (3, 2)]));
        assert_eq!(
            outcome.refused,
            BTreeMap::from([("EACCES".to_owned(), 1), ("ENOENT".to_owned(), 1)])
        );
        assert_eq!(outcome.present(), 3);
    }

    #[test]
    fn a_share_is_of_the_pages_that_are_there() {
        let pages = BTreeMap::from([(0, 5), (3, 95)]);
        assert!(expect_share(&pages, 3, 95).is_ok());
        assert!(expect_share(&pages, 3, 96).is_err());
        assert!(expect_share(&BTreeMap::new(), 0, 1).is_err());
    }
}
