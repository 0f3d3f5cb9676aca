//! `/sys/kernel/mm/damon/admin`: DAMON, which samples one page of each of its regions.
//!
//! A host has only one DAMON, and writing `nr_kdamonds` destroys all existing contexts. So it is only configured if `nr_kdamonds`
//! is 0. What was made here is taken down in the order that the kernel allows: first off, then `nr_kdamonds` to 0. A context is
//! recognised as ours by its target: the QEMU process that the journal names.
//!
//! The sequence has pitfalls (as tried on 6.12). All `max` values of a pattern are 0 at first, which matches nothing.
//! `tried_regions` are numbered with holes. An update may return no region on a slow machine. When the target exits, the kdamond
//! stops, and writes return EINVAL.

use std::io::Write;
use std::path::{Path, PathBuf};

use homenode_host::observation::Region;
use homenode_units::{Ns, PAGE_BYTES, Pages};

use super::TrackerError;
use crate::numa_maps::Range;
use crate::read::{self, ReadError};

pub(crate) const KDAMONDS: &str = "sys/kernel/mm/damon/admin/kdamonds";
/// Looks per aggregation. A region is found used in 0 to this many of them.
pub const LOOKS: u32 = 20;
/// Fewest and most regions. The kernel merges and splits regions within these bounds.
const REGIONS: (&str, &str) = ("10", "1000");
/// Shortest useful sampling interval. At this rate sampling takes 1 percent of a CPU.
const SAMPLE_MIN: Ns = Ns::from_millis(5);

/// DAMON of the host below a root.
#[derive(Clone, Debug)]
pub struct Damon {
    base: PathBuf,
}

impl Damon {
    /// Returns the DAMON below this root, whether or not the kernel has one.
    pub fn new(root: &Path) -> Damon {
        Damon {
            base: root.join(KDAMONDS),
        }
    }

    /// Returns why DAMON cannot be used now; `None` if it can.
    pub fn why_not(&self) -> Option<String> {
        let count = match read::text_if_there(&self.base.join("nr_kdamonds"), read::SMALL_BYTES) {
            Ok(Some(text)) => text,
            Ok(None) => {
                return Some(
                    "the kernel has no DAMON (CONFIG_DAMON_SYSFS); Debian's 6.12 kernels have it".into(),
                );
            }
            Err(error) => return Some(error.to_string()),
        };
        (count.trim() != "0")
            .then(|| "DAMON is in use by another owner (nr_kdamonds is not 0), which is left alone".into())
    }

    /// Starts to watch these ranges of a process, with one aggregation per window.
    ///
    /// # Errors
    /// If DAMON is in use, or the kernel refuses. Nothing is left behind then.
    pub fn begin(&self, pid: i32, ranges: &[Range], window: Ns) -> Result<(), TrackerError> {
        if let Some(why) = self.why_not() {
            return Err(TrackerError::Unfit(why));
        }
        self.set("nr_kdamonds", "1")?;
        // From here on, DAMON is ours.
        let begun = self.configure(pid, ranges, window);
        if begun.is_err() {
            let _ = self.set("nr_kdamonds", "0");
        }
        begun
    }

    fn configure(&self, pid: i32, ranges: &[Range], window: Ns) -> Result<(), TrackerError> {
        self.set("0/contexts/nr_contexts", "1")?;
        let operations = self.base.join("0/contexts/0/avail_operations");
        let available = read::text(&operations, read::SMALL_BYTES)?;
        // With ranges that we set, DAMON does not look at QEMU's other memory.
        if !available.split_whitespace().any(|word| word == "fvaddr") {
            return Err(TrackerError::Unfit(
                "this kernel's DAMON cannot watch ranges of a process (no fvaddr: CONFIG_DAMON_VADDR)".into(),
            ));
        }
        let context = |file: &str| format!("0/contexts/0/{file}");
        self.set(&context("operations"), "fvaddr")?;
        let sample = Ns(window.0 / u64::from(LOOKS)).max(SAMPLE_MIN);
        let us = |ns: Ns| (ns.0 / 1000).to_string();
        let intervals = "monitoring_attrs/intervals";
        self.set(&context(&format!("{intervals}/sample_us")), &us(sample))?;
        self.set(
            &context(&format!("{intervals}/aggr_us")),
            &us(Ns(sample.0 * u64::from(LOOKS))),
        )?;
        self.set(
            &context(&format!("{intervals}/update_us")),
            &us(Ns(sample.0 * 10 * u64::from(LOOKS))),
        )?;
        self.set(&context("monitoring_attrs/nr_regions/max"), REGIONS.1)?;
        self.set(&context("monitoring_attrs/nr_regions/min"), REGIONS.0)?;
        self.set(&context("targets/nr_targets"), "1")?;
        self.set(&context("targets/0/pid_target"), &pid.to_string())?;
        self.set(
            &context("targets/0/regions/nr_regions"),
            &ranges.len().to_string(),
        )?;
        for (number, range) in ranges.iter().enumerate() {
            let region = context(&format!("targets/0/regions/{number}"));
            self.set(&format!("{region}/start"), &range.start.to_string())?;
            self.set(&format!("{region}/end"), &range.end.to_string())?;
        }
        // A single scheme, which only reports which regions there are.
        self.set(&context("schemes/nr_schemes"), "1")?;
        let scheme = |file: &str| context(&format!("schemes/0/{file}"));
        self.set(&scheme("action"), "stat")?;
        self.set(&scheme("access_pattern/sz/max"), &u64::MAX.to_string())?;
        for pattern in ["nr_accesses", "age"] {
            self.set(
                &scheme(&format!("access_pattern/{pattern}/max")),
                &u32::MAX.to_string(),
            )?;
        }
        self.set("0/state", "on")
    }

    /// Waits for the next aggregation to end, and returns its regions. They are in guest frames, counted over the ranges one
    /// after the other.
    ///
    /// # Errors
    /// If the target is gone, or another program took DAMON over.
    pub fn regions(&self, ranges: &[Range]) -> Result<Vec<Region>, TrackerError> {
        self.set("0/state", "update_schemes_tried_regions")?;
        let dir = self.base.join("0/contexts/0/schemes/0/tried_regions");
        let mut regions = Vec::new();
        let entries = std::fs::read_dir(&dir).map_err(|error| TrackerError::refused(&dir, &error))?;
        for entry in entries.flatten() {
            let path = entry.path();
            if !path.is_dir() {
                continue; // total_bytes
            }
            let number = |file: &str| -> Result<Option<u64>, ReadError> {
                let path = path.join(file);
                let Some(text) = read::text_if_there(&path, read::SMALL_BYTES)? else {
                    return Ok(None);
                };
                let number = text
                    .trim()
                    .parse()
                    .map_err(|_| ReadError::malformed(&path, "a number", &text));
                number.map(Some)
            };
            let (Some(start), Some(end), Some(found)) =
                (number("start")?, number("end")?, number("nr_accesses")?)
            else {
                continue;
            };
            let mut before = 0;
            for range in ranges {
                let (from, to) = (start.max(range.start), end.min(range.end));
                if from < to {
                    regions.push(Region {
                        first: before + (from - range.start) / PAGE_BYTES,
                        pages: Pages((to - from).div_ceil(PAGE_BYTES)),
                        found: (found as u32).min(LOOKS),
                    });
                }
                before += range.pages().0;
            }
        }
        regions.sort_by_key(|region| region.first);
        Ok(regions)
    }

    /// Returns the process id of the kernel thread, from which its CPU time can be read.
    pub fn kdamond(&self) -> Option<i32> {
        let text = read::text_if_there(&self.base.join("0/pid"), read::SMALL_BYTES).ok()??;
        text.trim().parse().ok().filter(|pid| *pid > 0)
    }

    /// Takes down the context that watches this process. Does nothing if it watches another process.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn end(&self, pid: i32) -> Result<(), TrackerError> {
        if self.text("0/contexts/0/targets/0/pid_target")? != pid.to_string() {
            return Ok(());
        }
        // The kernel refuses this if the target ended first, and its thread with it.
        let _ = self.set("0/state", "off");
        self.set("nr_kdamonds", "0")
    }

    /// Like [`Damon::end`], for use after an agent that ended while it watched or was about to. Also takes down a stopped context
    /// without a target, which such an agent left half set up.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn end_left(&self, pid: i32) -> Result<(), TrackerError> {
        let has_target = !matches!(self.text("0/contexts/0/targets/0/pid_target")?.as_str(), "" | "0");
        if !has_target && self.text("nr_kdamonds")? == "1" && self.text("0/state")? != "on" {
            return self.set("nr_kdamonds", "0");
        }
        self.end(pid)
    }

    fn text(&self, file: &str) -> Result<String, ReadError> {
        let text = read::text_if_there(&self.base.join(file), read::SMALL_BYTES)?;
        Ok(text.unwrap_or_default().trim().to_owned())
    }

    fn set(&self, file: &str, value: &str) -> Result<(), TrackerError> {
        let path = self.base.join(file);
        #[cfg(any(test, feature = "testing"))]
        crate::fault::at(crate::fault::Point::Write);
        let written = std::fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .and_then(|mut file| file.write_all(value.as_bytes()));
        written.map_err(|error| TrackerError::refused(&path, &error))
    }
}

#[cfg(test)]
mod tests {

    use homenode_units::Bytes;

    use super::*;
    use crate::fake::{Tree, damon_files, mount_damon};
    use crate::numa_maps::Sharing;

    fn range() -> Range {
        Range {
            start: 0x1_0000,
            end: 0x2_0000,
            sharing: Sharing::Private,
            page_bytes: Bytes(PAGE_BYTES),
        }
    }

    #[test]
    fn it_is_set_up_read_and_taken_down() {
        let tree = Tree::new(&[]);
        assert!(
            Damon::new(tree.root())
                .why_not()
                .is_some_and(|why| why.contains("no DAMON"))
        );
        mount_damon(&tree, "0\n");
        let damon = Damon::new(tree.root());
        assert_eq!(damon.why_not(), None);
        damon.begin(4711, &[range()], Ns::from_secs(10)).unwrap();
        let read = |file: &str| std::fs::read_to_string(tree.root().join(KDAMONDS).join(file)).unwrap();
        let intervals = "0/contexts/0/monitoring_attrs/intervals";
        assert_eq!(
            ["sample_us", "aggr_us"].map(|file| read(&format!("{intervals}/{file}"))),
            ["500000", "10000000"]
        );
        assert_eq!(read("0/contexts/0/targets/0/regions/0/end"), "131072");
        assert_eq!((read("0/state"), damon.kdamond()), ("on".to_owned(), Some(77)));
        let region = |first, pages, found| Region {
            first,
            pages: Pages(pages),
            found,
        };
        let regions = damon.regions(&[range()]).unwrap();
        assert_eq!(regions, [region(0, 4, 20), region(4, 12, 3)]);
        damon.end(4712).unwrap();
        assert!(read("nr_kdamonds").starts_with('1'), "it watches another process");
        damon.end(4711).unwrap();
        assert!(read("nr_kdamonds").starts_with('0'));
        assert!(read("0/state").starts_with("off"));
    }

    #[test]
    fn another_owners_is_left_strictly_alone() {
        let tree = Tree::new(&[]);
        mount_damon(&tree, "1\n");
        let before = damon_files(&tree);
        let damon = Damon::new(tree.root());
        let refused = damon.begin(4711, &[range()], Ns::from_secs(10));
        assert!(matches!(refused, Err(TrackerError::Unfit(why)) if why.contains("another owner")));
        damon.end(4711).unwrap();
        assert_eq!(damon_files(&tree), before);
    }

    #[test]
    fn what_fails_half_way_leaves_nothing() {
        let tree = Tree::new(&[]);
        mount_damon(&tree, "0\n");
        tree.write(&format!("{KDAMONDS}/0/contexts/0/avail_operations"), "paddr\n");
        let damon = Damon::new(tree.root());
        let refused = damon.begin(4711, &[range()], Ns::from_secs(10));
        assert!(matches!(refused, Err(TrackerError::Unfit(why)) if why.contains("CONFIG_DAMON_VADDR")));
        assert_eq!(damon.why_not(), None);
    }

    #[test]
    fn what_an_agent_left_half_set_up_is_taken_down_and_what_others_run_is_not() {
        use crate::fault;
        let ranges = [range()];
        let mut points = 0;
        loop {
            let tree = Tree::new(&[]);
            mount_damon(&tree, "0\n");
            let damon = Damon::new(tree.root());
            let mut passed = 0;
            fault::plan(move |_| {
                if passed == points {
                    std::panic::resume_unwind(Box::new(()));
                }
                passed += 1;
                None
            });
            let begun = std::panic::catch_unwind(|| damon.begin(42, &ranges, Ns::from_millis(100)));
            fault::end();
            damon.end_left(42).unwrap();
            let nr = tree.root().join(KDAMONDS).join("nr_kdamonds");
            assert_eq!(
                std::fs::read_to_string(nr).unwrap().trim(),
                "0",
                "killed at {points}"
            );
            if begun.is_ok() {
                break;
            }
            points += 1;
        }
        assert!(points > 15, "{points} points");
        let tree = Tree::new(&[]);
        mount_damon(&tree, "1\n");
        tree.write(&format!("{KDAMONDS}/0/contexts/0/targets/0/pid_target"), "43\n");
        let theirs = damon_files(&tree);
        Damon::new(tree.root()).end_left(42).unwrap();
        assert!(damon_files(&tree) == theirs);
    }
}
