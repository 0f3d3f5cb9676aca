//! Trackers that report which memory a VM uses, window after window. They share one interface, [`Track`].
//!
//! | tracker | needs | sees |
//! |---|---|---|
//! | [`Tracker::Invalidation`] | root | every page used, exactly; each costs the VM a fault per window |
//! | [`Tracker::AccessedBits`] | root, and a guest that QEMU emulates | every page used except what TLBs hold |
//! | [`Tracker::Damon`] | a kernel whose DAMON no other program uses | regions, by samples |
//!
//! The available trackers are determined afresh each time ([`choices`]), best first. An exact tracker comes before a cheap one,
//! since windows are long and watching happens only on request. `docs/WORKING_SET.md` says why other mechanisms are not here.

pub mod clear_refs;
pub mod damon;

use std::path::{Path, PathBuf};

use homenode_host::observation::{Tracker, TrackerChoice, Used};
use homenode_units::{Ns, Pages};

use crate::numa_maps::Range;
use crate::read::{self, ReadError};
use clear_refs::Clear;
use damon::Damon;

/// Entries of a second-level TLB, for trackers that miss what the TLB holds. All processors since Broadwell and Zen 2 have at
/// least 1536, and few have more than 2048.
const TLB_ENTRIES: u64 = 2048;
/// Base pages of a huge page, which one TLB entry may hold if the memory has huge pages.
const PAGES_PER_LARGE: u64 = 512;

/// Why a tracker cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrackerError {
    /// The process ended.
    #[error("the VM's QEMU has ended")]
    Gone,
    /// The tracker does not work for this VM, or not now.
    #[error("{0}")]
    Unfit(String),
    /// The kernel refused.
    #[error("{path}: {cause}")]
    Refused {
        /// The file.
        path: String,
        /// The system's error.
        cause: String,
    },
    /// A file is unreadable or malformed.
    #[error(transparent)]
    Read(#[from] ReadError),
}

impl TrackerError {
    fn refused(path: &Path, error: &std::io::Error) -> TrackerError {
        TrackerError::Refused {
            path: path.display().to_string(),
            cause: error.to_string(),
        }
    }
}

/// How a VM's vCPUs run, which decides which trackers work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runs {
    /// KVM runs them, using page tables of its own.
    Kvm,
    /// QEMU emulates them, so it uses guest memory like any other program.
    Emulated,
}

/// A VM to watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Process id of the VM's QEMU.
    pub pid: i32,
    /// Where the VM's memory is.
    pub ranges: Vec<Range>,
    /// Number of the VM's vCPUs.
    pub vcpus: u64,
    /// How the VM's vCPUs run.
    pub runs: Runs,
}

impl Target {
    /// Returns the size of the VM's memory.
    pub fn pages(&self) -> Pages {
        self.ranges.iter().map(Range::pages).sum()
    }
}

/// Returns the trackers that this host has for VMs whose vCPUs run in this way, best first.
pub fn choices(root: &Path, runs: Runs) -> Vec<TrackerChoice> {
    let clear = match runs {
        Runs::Kvm => Tracker::Invalidation,
        Runs::Emulated => Tracker::AccessedBits,
    };
    let no_clear = || {
        if !root.join("proc/self/clear_refs").exists() {
            return Some("the kernel has no /proc/PID/clear_refs (CONFIG_PROC_PAGE_MONITOR)".to_owned());
        }
        (!rustix::process::geteuid().is_root()).then(|| "this needs root: run the agent as root".to_owned())
    };
    let other = match runs {
        Runs::Kvm => "KVM keeps its own accessed bits, which clear_refs and smaps do not read",
        Runs::Emulated => {
            "there is nothing to invalidate: QEMU emulates the VM, so its accessed bits are those of QEMU's own pages"
        }
    };
    let out = [Tracker::Invalidation, Tracker::AccessedBits]
        .into_iter()
        .filter(|tracker| *tracker != clear);
    let of = |tracker, why_not| TrackerChoice { tracker, why_not };
    [
        of(clear, no_clear()),
        of(Tracker::Damon, Damon::new(root).why_not()),
    ]
    .into_iter()
    .chain(out.map(|tracker| of(tracker, Some(other.to_owned()))))
    .collect()
}

/// Result of a window.
#[derive(Clone, Debug, PartialEq)]
pub struct Tracked {
    /// Memory that was found used.
    pub found: Used,
    /// The most memory that may be used without being seen.
    pub blind: Pages,
    /// CPU time that other threads, such as the kernel's, spent on this tracker's behalf.
    pub cost_elsewhere: Ns,
}

/// A tracker that works on one VM.
pub trait Track: Send {
    /// Returns which tracker it is.
    fn tracker(&self) -> Tracker;

    /// Returns how long before the window's end to call [`Track::end`], which itself waits for the end.
    fn early(&self) -> Ns {
        Ns::ZERO
    }

    /// Begins a window.
    ///
    /// # Errors
    /// If the VM is gone or the kernel refuses.
    fn begin(&mut self) -> Result<(), TrackerError>;

    /// Ends a window.
    ///
    /// # Errors
    /// If the VM is gone or the kernel refuses.
    fn end(&mut self) -> Result<Tracked, TrackerError>;
}

/// Starts a tracker.
///
/// # Errors
/// If the tracker does not work for this VM.
pub fn look(
    root: &Path,
    tracker: Tracker,
    target: &Target,
    window: Ns,
) -> Result<Box<dyn Track>, TrackerError> {
    let (root, target) = (root.to_owned(), target.clone());
    match tracker {
        Tracker::Invalidation | Tracker::AccessedBits => match clear_refs::unfit(&target.ranges) {
            Some(why) => Err(TrackerError::Unfit(why)),
            None => Ok(Box::new(Cleared {
                root,
                tracker,
                target,
            })),
        },
        Tracker::Damon => Ok(Box::new(Sampled::begin(&root, target, window)?)),
        other => Err(TrackerError::Unfit(format!(
            "the agent cannot use {} here",
            other.name()
        ))),
    }
}

/// A tracker that clears marks and reads them later.
struct Cleared {
    root: PathBuf,
    tracker: Tracker,
    target: Target,
}

impl Track for Cleared {
    fn tracker(&self) -> Tracker {
        self.tracker
    }

    fn begin(&mut self) -> Result<(), TrackerError> {
        if self.tracker == Tracker::Invalidation {
            // Clear the mappings first and the marks second, because KVM marks the pages that it drops as used.
            clear_refs::clear(&self.root, self.target.pid, Clear::Mappings)?;
        }
        clear_refs::clear(&self.root, self.target.pid, Clear::References)
    }

    fn end(&mut self) -> Result<Tracked, TrackerError> {
        let Target {
            pid, ranges, vcpus, ..
        } = &self.target;
        let seen = clear_refs::referenced(&self.root, *pid, ranges)?.ok_or(TrackerError::Gone)?;
        let entry_pages = if seen.coarse > Pages::ZERO {
            PAGES_PER_LARGE
        } else {
            1
        };
        let blind = match self.tracker {
            Tracker::AccessedBits => Pages(TLB_ENTRIES * entry_pages * vcpus),
            _ => Pages::ZERO,
        };
        Ok(Tracked {
            found: Used::Amount {
                used: seen.used,
                coarse: seen.coarse,
            },
            blind,
            cost_elsewhere: Ns::ZERO,
        })
    }
}

/// A tracker that uses DAMON, and takes it down on drop.
struct Sampled {
    root: PathBuf,
    damon: Damon,
    target: Target,
    window: Ns,
    spent: Ns,
}

impl Sampled {
    fn begin(root: &Path, target: Target, window: Ns) -> Result<Sampled, TrackerError> {
        let damon = Damon::new(root);
        damon.begin(target.pid, &target.ranges, window)?;
        Ok(Sampled {
            root: root.to_owned(),
            damon,
            target,
            window,
            spent: Ns::ZERO,
        })
    }

    /// Returns the CPU time of DAMON's kernel thread.
    fn spent(&self) -> Option<Ns> {
        let path = self
            .root
            .join(format!("proc/{}/schedstat", self.damon.kdamond()?));
        let text = read::text_if_there(&path, read::SMALL_BYTES).ok()??;
        Some(Ns(text.split_whitespace().next()?.parse().ok()?))
    }
}

impl Track for Sampled {
    fn tracker(&self) -> Tracker {
        Tracker::Damon
    }

    fn early(&self) -> Ns {
        Ns(2 * self.window.0 / u64::from(damon::LOOKS))
    }

    fn begin(&mut self) -> Result<(), TrackerError> {
        Ok(())
    }

    fn end(&mut self) -> Result<Tracked, TrackerError> {
        let regions = self.damon.regions(&self.target.ranges)?;
        if regions.is_empty() {
            return Err(TrackerError::Unfit("DAMON reported no regions".into()));
        }
        let spent = self.spent().unwrap_or(self.spent);
        let cost_elsewhere = spent.saturating_sub(std::mem::replace(&mut self.spent, spent));
        Ok(Tracked {
            found: Used::Regions {
                regions,
                looks: damon::LOOKS,
            },
            blind: Pages::ZERO,
            cost_elsewhere,
        })
    }
}

impl Drop for Sampled {
    fn drop(&mut self) {
        // If this fails, the agent's guard takes down what remains.
        let _ = self.damon.end(self.target.pid);
    }
}
