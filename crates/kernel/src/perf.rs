//! `perf_event_open(2)`: instructions, cycles, LLC references and LLC misses of each vCPU thread, as one group.
//!
//! A group is scheduled onto the PMU as a whole, so its four figures belong together. If the group shares the PMU with others,
//! the kernel runs it only part of the time. Each increase between two reads is then scaled by time enabled over time running *in
//! that interval* and added up, so that the figures never run backwards. Guest and host mode both count, because the host's work
//! for a vCPU pollutes the cache too.
//!
//! [`Selection`] chooses the events. A thread whose LLC no event is known to count has cycles and instructions only.
//!
//! On a host with cores of several types, a thread has a group for each, which runs while the thread is on such a core. Their
//! counts and times running add up; only the rest of the time enabled is scaled for.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use homenode_host::Counters;

use select::CoreType;
pub use select::Selection;

mod select;

const PERF_TYPE_HARDWARE: u32 = 0;
const FORMAT_TOTAL_TIME_ENABLED: u64 = 1 << 0;
const FORMAT_TOTAL_TIME_RUNNING: u64 = 1 << 1;
const FORMAT_GROUP: u64 = 1 << 3;
const FLAG_FD_CLOEXEC: libc::c_ulong = 1 << 3;
/// `disabled` in `perf_event_attr`: the event counts only once it is enabled.
const FLAG_DISABLED: u64 = 1;
/// A group that has been enabled for this long without ever running does not fit this PMU (the NMI watchdog holds a counter).
const NEVER_RAN_NS: u64 = 1_000_000_000;

/// The kernel's `perf_event_attr` up to `config2` (its second published size). Counting needs no more.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Attr {
    pub kind: u32,
    size: u32,
    pub config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    bp_type: u32,
    pub config1: u64,
    pub config2: u64,
}

const _: () = assert!(size_of::<Attr>() == 72);

impl Attr {
    /// Describes an event of a PMU that is counted.
    pub(crate) fn counting(kind: u32, config: u64) -> Attr {
        let read_format = FORMAT_TOTAL_TIME_ENABLED | FORMAT_TOTAL_TIME_RUNNING | FORMAT_GROUP;
        Attr {
            kind,
            size: size_of::<Attr>() as u32,
            config,
            read_format,
            ..Attr::default()
        }
    }

    /// Describes an event of a PMU that is sampled every `period` counts, once it is enabled. `sample_type` says what a sample
    /// contains.
    pub(crate) fn sampling(kind: u32, config: u64, period: u64, sample_type: u64) -> Attr {
        Attr {
            kind,
            size: size_of::<Attr>() as u32,
            config,
            sample_period: period,
            sample_type,
            flags: FLAG_DISABLED,
            ..Attr::default()
        }
    }
}

/// What an event counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// One thread, on any CPU.
    Thread(i32),
    /// One CPU, with any thread.
    Cpu(u32),
}

/// `perf_event_open(2)`, which `libc` does not wrap.
#[allow(unsafe_code)] // a system call without a wrapper
pub(crate) fn open(attr: &Attr, scope: Scope, leader: Option<&File>) -> std::io::Result<File> {
    let (pid, cpu) = match scope {
        Scope::Thread(tid) => (tid, -1),
        Scope::Cpu(cpu) => (-1, i32::try_from(cpu).map_err(std::io::Error::other)?),
    };
    let group = leader.map_or(-1, AsRawFd::as_raw_fd);
    #[cfg(any(test, feature = "testing"))]
    if crate::system::simulated().is_some() {
        return Err(std::io::Error::from_raw_os_error(libc::ENOSYS));
    }
    // If the size is wrong, the kernel writes the size field, so pass a copy.
    let mut copy = *attr;
    // SAFETY: `copy` is a perf_event_attr of the size that it names, and lives until the call returns; all else is by value.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw mut copy,
            pid,
            cpu,
            group,
            FLAG_FD_CLOEXEC,
        )
    };
    let fd = i32::try_from(fd).map_err(std::io::Error::other)?;
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the kernel just returned this descriptor, and nothing else holds it.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// One reading from the kernel: time enabled, time running, and one value per event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reading<const N: usize> {
    pub enabled_ns: u64,
    pub running_ns: u64,
    pub values: [u64; N],
}

impl<const N: usize> Reading<N> {
    /// Reads a group of N events; `None` if the kernel returns something unexpected.
    pub(crate) fn read(mut from: &File) -> std::io::Result<Option<Reading<N>>> {
        let mut bytes = [0u8; 8 * 16];
        let length = from.read(&mut bytes)?;
        Ok(Reading::parse(&bytes[..length]))
    }

    /// Adds the reading of another core type's group. A thread is on one core at a time, so their times running do not overlap.
    fn and(self, other: Reading<N>) -> Reading<N> {
        let mut values = self.values;
        values
            .iter_mut()
            .zip(other.values)
            .for_each(|(sum, value)| *sum += value);
        Reading {
            enabled_ns: self.enabled_ns.max(other.enabled_ns),
            running_ns: self.running_ns + other.running_ns,
            values,
        }
    }

    fn parse(bytes: &[u8]) -> Option<Reading<N>> {
        let mut words = bytes
            .chunks_exact(8)
            .map(|w| u64::from_ne_bytes(w.try_into().expect("eight bytes")));
        if bytes.len() != 8 * (3 + N) || words.next()? != N as u64 {
            return None;
        }
        let (enabled_ns, running_ns) = (words.next()?, words.next()?);
        let mut values = [0; N];
        for value in &mut values {
            *value = words.next()?;
        }
        Some(Reading {
            enabled_ns,
            running_ns,
            values,
        })
    }
}

/// Adds up the counts between reads, scaled to the time for which the events were enabled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Accumulator<const N: usize> {
    last: Reading<N>,
    sums: [f64; N],
}

impl<const N: usize> Accumulator<N> {
    /// Starts with nothing counted.
    pub(crate) fn new() -> Self {
        Accumulator {
            last: Reading {
                enabled_ns: 0,
                running_ns: 0,
                values: [0; N],
            },
            sums: [0.0; N],
        }
    }

    /// Adds a reading and returns the sums; `None` if the events never ran although they were enabled long enough.
    pub(crate) fn update(&mut self, now: Reading<N>) -> Option<[u64; N]> {
        let enabled = now.enabled_ns.saturating_sub(self.last.enabled_ns);
        let running = now.running_ns.saturating_sub(self.last.running_ns);
        if running > 0 {
            let scale = (enabled as f64 / running as f64).max(1.0);
            for (at, sum) in self.sums.iter_mut().enumerate() {
                *sum += now.values[at].saturating_sub(self.last.values[at]) as f64 * scale;
            }
            self.last = now;
        }
        (now.running_ns > 0 || now.enabled_ns < NEVER_RAN_NS).then(|| self.sums.map(|sum| sum as u64))
    }
}

/// The counts of a thread so far.
#[derive(Clone, Copy, Debug)]
enum Sums {
    /// Cycles, instructions, LLC references, LLC misses.
    WithLlc(Accumulator<4>),
    /// Cycles, instructions.
    Work(Accumulator<2>),
}

/// Counters of one thread.
#[derive(Debug)]
struct Group {
    /// The group of each core type. The leader comes first; the others only need to stay open.
    files: Vec<Vec<File>>,
    sums: Sums,
}

impl Group {
    fn open(tid: i32, types: &[CoreType]) -> std::io::Result<Group> {
        let of_type = |of: &CoreType| {
            let mut files: Vec<File> = Vec::with_capacity(4);
            for attr in of.work.iter().chain(of.llc.iter().flatten()) {
                files.push(open(attr, Scope::Thread(tid), files.first())?);
            }
            Ok(files)
        };
        let files = types.iter().map(of_type).collect::<std::io::Result<_>>()?;
        let sums = match types.iter().all(|of| of.llc.is_some()) {
            true => Sums::WithLlc(Accumulator::new()),
            false => Sums::Work(Accumulator::new()),
        };
        Ok(Group { files, sums })
    }

    fn read(&mut self) -> Option<Counters> {
        let files = &self.files;
        match &mut self.sums {
            Sums::WithLlc(sums) => {
                let [cycles, instructions, references, misses] = sums.update(of_all(files)?)?;
                Some(Counters {
                    instructions,
                    cycles,
                    llc_references: Some(references),
                    llc_misses: Some(misses),
                })
            }
            Sums::Work(sums) => {
                let [cycles, instructions] = sums.update(of_all(files)?)?;
                Some(Counters {
                    instructions,
                    cycles,
                    llc_references: None,
                    llc_misses: None,
                })
            }
        }
    }
}

/// Reads the groups of all core types as one.
fn of_all<const N: usize>(groups: &[Vec<File>]) -> Option<Reading<N>> {
    let mut readings = groups.iter().map(|files| Reading::read(files.first()?).ok()?);
    let first = readings.next()??;
    readings.try_fold(first, |sum, reading| Some(sum.and(reading?)))
}

/// Hardware counters of vCPU threads. Descriptors are opened when a thread's counters are first requested, and closed by
/// [`Perf::keep_only`].
#[derive(Debug)]
pub struct Perf {
    selection: Selection,
    /// Groups of the requested threads; `None` for a thread that had already ended.
    groups: BTreeMap<i32, Option<Group>>,
    absence: Option<String>,
}

impl Perf {
    /// Starts with nothing open.
    pub fn new(selection: Selection) -> Perf {
        Perf {
            selection,
            groups: BTreeMap::new(),
            absence: None,
        }
    }

    /// Returns a thread's counters since its first request; `None` without a PMU, or if the thread has ended.
    pub fn counters(&mut self, tid: i32) -> Option<Counters> {
        if self.absence.is_some() {
            return None;
        }
        let group = match self.groups.entry(tid) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(vacant) => match Group::open(tid, &self.selection.types) {
                Ok(group) => vacant.insert(Some(group)),
                Err(error) => {
                    self.absence = absence(&error);
                    match self.absence {
                        // The cause may be too many open files: close ours, since others need theirs.
                        Some(_) => self.groups.clear(),
                        None => drop(vacant.insert(None)),
                    }
                    return None;
                }
            },
        };
        group.as_mut()?.read()
    }

    /// Closes the counters of all threads that are not in `tids`.
    pub fn keep_only(&mut self, tids: &BTreeSet<i32>) {
        self.groups.retain(|tid, _| tids.contains(tid));
    }

    /// Returns why this host has no hardware counters; `None` if it has them.
    pub fn absence(&self) -> Option<&str> {
        self.absence.as_deref()
    }

    /// Returns what is unusual about the counters, if they are in use.
    pub fn note(&self) -> Option<&str> {
        let is_used = self.absence.is_none() && self.groups.values().any(Option::is_some);
        self.selection.note.as_deref().filter(|_| is_used)
    }
}

/// Returns what an error of `perf_event_open` means for this host; `None` if the error concerns one thread only.
pub(crate) fn absence(error: &std::io::Error) -> Option<String> {
    let why = match error.raw_os_error() {
        Some(libc::ESRCH) => return None,
        Some(libc::ENOENT | libc::EOPNOTSUPP | libc::ENODEV | libc::EINVAL) => {
            "this host has no usable PMU".to_owned()
        }
        Some(libc::ENOSYS) => "this kernel has no perf events".to_owned(),
        Some(libc::EACCES | libc::EPERM) => {
            "not permitted; run as root, or with CAP_PERFMON, or set kernel.perf_event_paranoid to 0"
                .to_owned()
        }
        Some(libc::EMFILE | libc::ENFILE) => {
            "too many open files; raise the limit (LimitNOFILE in the service)".to_owned()
        }
        _ => error.to_string(),
    };
    Some(why)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|w| w.to_ne_bytes()).collect()
    }

    #[test]
    fn a_group_reads_and_anything_else_is_refused() {
        let reading = Reading::<2>::parse(&bytes(&[2, 100, 50, 7, 8])).unwrap();
        assert_eq!(
            reading,
            Reading {
                enabled_ns: 100,
                running_ns: 50,
                values: [7, 8]
            }
        );
        for bad in [
            &[2, 100, 50, 7][..],
            &[3, 100, 50, 7, 8],
            &[],
            &[2, 1, 1, 7, 8, 9],
        ] {
            assert_eq!(Reading::<2>::parse(&bytes(bad)), None, "{bad:?}");
        }
    }

    #[test]
    fn a_group_that_ran_half_the_time_counts_double_and_never_backwards() {
        let mut sums = Accumulator::<1>::new();
        let at = |enabled_ns, running_ns, value| Reading {
            enabled_ns,
            running_ns,
            values: [value],
        };
        assert_eq!(sums.update(at(0, 0, 0)), Some([0]));
        assert_eq!(sums.update(at(100, 50, 10)), Some([20]));
        assert_eq!(
            sums.update(at(200, 150, 20)),
            Some([30]),
            "this interval it ran all the time"
        );
        assert_eq!(
            sums.update(at(300, 150, 20)),
            Some([30]),
            "it did not run: nothing is made up"
        );
        assert_eq!(
            sums.update(at(400, 200, 30)),
            Some([70]),
            "two intervals enabled, 50 of 200 running"
        );
    }

    #[test]
    fn groups_of_two_core_types_add_up_without_scaling_each_other() {
        let on = |running_ns, value| Reading {
            enabled_ns: 100,
            running_ns,
            values: [value],
        };
        let mut sums = Accumulator::<1>::new();
        assert_eq!(
            sums.update(on(60, 600).and(on(40, 100))),
            Some([700]),
            "it was on one type for 60 ns and on the other for 40"
        );
        let mut shared = Accumulator::<1>::new();
        assert_eq!(
            shared.update(on(30, 300).and(on(20, 50))),
            Some([700]),
            "others had the PMUs for half of the time"
        );
    }

    #[test]
    fn a_group_that_never_runs_is_absent() {
        let mut sums = Accumulator::<1>::new();
        assert_eq!(
            sums.update(Reading {
                enabled_ns: 10,
                running_ns: 0,
                values: [0]
            }),
            Some([0])
        );
        assert_eq!(
            sums.update(Reading {
                enabled_ns: NEVER_RAN_NS,
                running_ns: 0,
                values: [0]
            }),
            None
        );
    }

    #[test]
    fn absence_is_said_and_a_thread_that_ended_is_not_absence() {
        assert_eq!(absence(&std::io::Error::from_raw_os_error(libc::ESRCH)), None);
        let denied = absence(&std::io::Error::from_raw_os_error(libc::EACCES)).unwrap();
        assert!(denied.contains("CAP_PERFMON"), "{denied}");
    }

    #[test]
    fn this_thread_counts_or_the_reason_is_known() {
        let mut perf = Perf::new(Selection::discover(std::path::Path::new("/")).unwrap());
        let tid = rustix::thread::gettid().as_raw_nonzero().get();
        match perf.counters(tid) {
            Some(first) => assert!(perf.counters(tid).is_none_or(|c| c.cycles >= first.cycles)),
            None => assert!(perf.absence().is_some()),
        }
        perf.keep_only(&BTreeSet::new());
        assert!(perf.groups.is_empty());
    }
}
