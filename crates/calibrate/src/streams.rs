//! Threads that load memory at a chosen rate while something else is measured.
//!
//! Each thread is pinned to a CPU and has a buffer on the node. It processes the buffer in blocks and counts the bytes;
//! between blocks it spins according to its rate. Rates are computed from these counts, so a thread that loses its CPU
//! counts less, as it should.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use homenode_units::stats::mean;
use homenode_units::{CpuId, NodeId};

use crate::kernels;
use crate::sys::{self, Memory, Pages};

/// Words that a thread processes between two checks for orders: 64 KiB, a few microseconds.
const BLOCK_WORDS: usize = 8192;
/// Blocks between two readings of a thread's CPU time.
const BLOCKS_PER_LOOK: u32 = 16;
/// Full rate, in the unit of [`Streams::load`].
pub(crate) const FULL: u32 = 1000;

/// The kind of traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Traffic {
    /// Reads only.
    Read,
    /// The thread writes as much as it reads: every line is read, changed and written back.
    Update,
}

/// Orders for all threads, and the threads' counts.
#[derive(Debug, Default)]
struct Board {
    /// Threads with a number below this are active.
    active: AtomicUsize,
    /// Share of time for which active threads work, in thousandths.
    duty: AtomicU32,
    update: AtomicBool,
    end: AtomicBool,
    ready: AtomicUsize,
    bytes: Vec<AtomicU64>,
    /// Bytes, and the CPU time that they took; updated less often.
    counted: Vec<(AtomicU64, AtomicU64)>,
}

/// Running threads, stopped when dropped.
#[derive(Debug)]
pub(crate) struct Streams<'scope, 'board> {
    board: &'board Holder,
    threads: Vec<ScopedJoinHandle<'scope, io::Result<()>>>,
}

/// State shared by the threads; must outlive the scope that they run in.
#[derive(Debug)]
pub(crate) struct Holder(Board);

impl Holder {
    /// Creates the state for a number of threads.
    pub(crate) fn of(threads: usize) -> Holder {
        let bytes = (0..threads).map(|_| AtomicU64::new(0)).collect();
        let counted = (0..threads).map(|_| Default::default()).collect();
        Holder(Board {
            bytes,
            counted,
            ..Board::default()
        })
    }
}

impl<'scope, 'board: 'scope> Streams<'scope, 'board> {
    /// Starts a thread on each CPU, with a buffer of `bytes_each` bytes; returns when all buffers are filled.
    ///
    /// # Errors
    /// Unavailable CPUs or memory.
    pub(crate) fn start(
        scope: &'scope thread::Scope<'scope, '_>,
        board: &'board Holder,
        cpus: &[CpuId],
        node: Option<NodeId>,
        bytes_each: usize,
    ) -> io::Result<Streams<'scope, 'board>> {
        let spawn = |(at, cpu): (usize, &CpuId)| {
            let cpu = *cpu;
            scope.spawn(move || stream(&board.0, at, cpu, node, bytes_each))
        };
        let streams = Streams {
            board,
            threads: cpus.iter().enumerate().map(spawn).collect(),
        };
        while board.0.ready.load(Ordering::Acquire) < cpus.len() {
            if streams.threads.iter().any(ScopedJoinHandle::is_finished) {
                return Err(streams.failure());
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(streams)
    }

    fn failure(mut self) -> io::Error {
        self.board.0.end.store(true, Ordering::Release);
        let results = std::mem::take(&mut self.threads)
            .into_iter()
            .map(ScopedJoinHandle::join);
        let error = results.filter_map(|result| result.ok()?.err()).next();
        error.unwrap_or_else(|| io::Error::other("a thread that loads memory ended without an error"))
    }

    /// Makes the first `active` threads work for `duty` thousandths of the time, and the others rest.
    pub(crate) fn load(&self, active: usize, traffic: Traffic, duty: u32) {
        let board = &self.board.0;
        board.update.store(traffic == Traffic::Update, Ordering::Relaxed);
        board.duty.store(duty.clamp(1, FULL), Ordering::Relaxed);
        board
            .active
            .store(if duty == 0 { 0 } else { active }, Ordering::Release);
    }

    /// Runs a closure. Returns the bytes per second that all threads moved during the run, and the closure's result.
    pub(crate) fn rate_during<T>(&self, run: impl FnOnce() -> T) -> (f64, T) {
        let bytes = || {
            self.board
                .0
                .bytes
                .iter()
                .map(|bytes| bytes.load(Ordering::Relaxed))
                .sum::<u64>()
        };
        let (from, before) = (Instant::now(), bytes());
        let result = run();
        let moved = bytes() - before;
        (moved as f64 / from.elapsed().as_secs_f64(), result)
    }

    /// Returns the bytes that the first `active` threads, at full rate, move per second of their CPU time. Threads that got
    /// no CPU time in this window are assumed to be like the others. If no thread got any, it waits up to a hundred times as
    /// long.
    pub(crate) fn rate_of_cpu_time(&self, active: usize, window: Duration) -> f64 {
        let look = || -> Vec<(u64, u64)> {
            let counted = self.board.0.counted.iter();
            counted
                .map(|(bytes, ns)| (bytes.load(Ordering::Relaxed), ns.load(Ordering::Relaxed)))
                .collect()
        };
        let before = look();
        for _ in 0..100 {
            thread::sleep(window);
            let after = look();
            let moved = before
                .iter()
                .zip(after)
                .filter(|((_, ns), (_, ns_now))| ns_now > ns);
            let rates = moved.map(|((bytes, ns), (bytes_now, ns_now))| {
                (bytes_now - bytes) as f64 * 1e9 / (ns_now - ns) as f64
            });
            if let Some(rate) = mean(rates) {
                return rate * active as f64;
            }
        }
        0.0
    }
}

impl Drop for Streams<'_, '_> {
    fn drop(&mut self) {
        self.board.0.end.store(true, Ordering::Release);
    }
}

fn stream(board: &Board, at: usize, cpu: CpuId, node: Option<NodeId>, bytes: usize) -> io::Result<()> {
    sys::pin_to(cpu)?;
    let mut memory = Memory::map(bytes, Pages::Huge, node)?;
    memory.words_mut().fill(1);
    board.ready.fetch_add(1, Ordering::AcqRel);
    let blocks = memory.words().len() / BLOCK_WORDS;
    let mut block = 0;
    let (mut looked, mut uncounted, mut blocks_left) = (sys::cpu_time(), 0, BLOCKS_PER_LOOK);
    while !board.end.load(Ordering::Acquire) {
        if board.active.load(Ordering::Acquire) <= at {
            thread::sleep(Duration::from_micros(200));
            (looked, uncounted, blocks_left) = (sys::cpu_time(), 0, BLOCKS_PER_LOOK);
            continue;
        }
        let (from, words) = (Instant::now(), block * BLOCK_WORDS..(block + 1) * BLOCK_WORDS);
        let bytes = if board.update.load(Ordering::Relaxed) {
            kernels::update(&mut memory.words_mut()[words]);
            16 * BLOCK_WORDS
        } else {
            kernels::read(&memory.words()[words]);
            8 * BLOCK_WORDS
        };
        board.bytes[at].fetch_add(bytes as u64, Ordering::Relaxed);
        block = (block + 1) % blocks;
        (uncounted, blocks_left) = (uncounted + bytes as u64, blocks_left - 1);
        if blocks_left == 0 {
            let now = sys::cpu_time();
            board.counted[at].0.fetch_add(uncounted, Ordering::Relaxed);
            board.counted[at]
                .1
                .fetch_add((now - looked).as_nanos() as u64, Ordering::Relaxed);
            (looked, uncounted, blocks_left) = (now, 0, BLOCKS_PER_LOOK);
        }
        let duty = board.duty.load(Ordering::Relaxed);
        let rest = from.elapsed().mul_f64(f64::from(FULL) / f64::from(duty) - 1.0);
        let until = Instant::now() + rest.min(Duration::from_millis(5));
        while duty < FULL && Instant::now() < until {
            std::hint::spin_loop();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first_cpu() -> CpuId {
        let mask = rustix::thread::sched_getaffinity(None).unwrap();
        CpuId((0..1024).find(|cpu| mask.is_set(*cpu as usize)).unwrap())
    }

    #[test]
    fn streams_count_while_they_work_and_only_then() {
        let holder = Holder::of(1);
        thread::scope(|scope| {
            let streams = Streams::start(scope, &holder, &[first_cpu()], None, 1 << 20).unwrap();
            let wait = || thread::sleep(Duration::from_millis(30));
            assert_eq!(streams.rate_during(wait).0, 0.0);
            streams.load(1, Traffic::Read, FULL);
            // However busy the machine is, one block is read within ten seconds.
            let counted = |_: &u32| streams.rate_during(wait).0 > 0.0;
            assert!((0..300).any(|round| counted(&round)));
        });
        let bytes = holder.0.bytes[0].load(Ordering::Relaxed);
        assert!(
            bytes > 0 && bytes.is_multiple_of(8 * BLOCK_WORDS as u64),
            "whole blocks: {bytes}"
        );
    }

    #[test]
    fn a_cpu_that_is_not_there_is_an_error_and_leaves_no_thread() {
        let holder = Holder::of(1);
        thread::scope(|scope| {
            assert!(Streams::start(scope, &holder, &[CpuId(1000)], None, 1 << 20).is_err());
        });
    }
}
