//! Measures cores: clock, hyperthreads, interrupts.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use homenode_units::CpuId;

use crate::{kernels, sys};

/// Returns core cycles per second and, if there is a time stamp, its ticks per second, measured over about `window`.
///
/// The chain's dependent additions take one cycle each on every core that this code runs on. An interrupt makes the clock
/// seem too slow, so the fastest of several short chains counts.
pub(super) fn clock(window: Duration) -> (f64, Option<f64>) {
    const PAIRS: usize = 1 << 16;
    let (begin, stamp) = (Instant::now(), sys::time_stamp());
    let mut fastest = f64::INFINITY;
    while begin.elapsed() < window {
        let from = sys::cpu_time();
        black_box(kernels::dependent_cycles(black_box(PAIRS)));
        fastest = fastest.min((sys::cpu_time() - from).as_secs_f64());
    }
    let ticks = stamp
        .zip(sys::time_stamp())
        .map(|(from, to)| to.saturating_sub(from) as f64);
    (
        2.0 * PAIRS as f64 / fastest,
        ticks.map(|ticks| ticks / begin.elapsed().as_secs_f64()),
    )
}

/// Returns the throughput of two CPUs together over the mean throughput of each alone; it is 2 if they share nothing.
pub(super) fn together(one: CpuId, other: CpuId, window: Duration) -> f64 {
    let rate = |cpus: &[CpuId]| -> f64 {
        let go = AtomicBool::new(false);
        let worker = |cpu: CpuId| {
            // A CPU that went offline makes the result show no speed-up.
            let _ = sys::pin_to(cpu);
            while !go.load(Ordering::Acquire) {
                std::hint::spin_loop();
            }
            let (begin, from, mut rounds) = (Instant::now(), sys::cpu_time(), 0_u64);
            while begin.elapsed() < window {
                black_box(kernels::independent_work(black_box(4096)));
                rounds += 1;
            }
            rounds as f64 / (sys::cpu_time() - from).as_secs_f64()
        };
        thread::scope(|scope| {
            let workers: Vec<_> = cpus.iter().map(|cpu| scope.spawn(|| worker(*cpu))).collect();
            go.store(true, Ordering::Release);
            workers
                .into_iter()
                .map(|worker| worker.join().unwrap_or(0.0))
                .sum()
        })
    };
    let alone = (rate(&[one]) + rate(&[other])) / 2.0;
    rate(&[one, other]) / alone
}

/// Returns the nanoseconds to interrupt another CPU and receive its answer; NaN if the kernel cannot do so.
///
/// `membarrier` interrupts each CPU that runs a thread of this process, and waits for all answers. Here one thread spins on
/// the other CPU, so there is one interrupt and one answer.
pub(super) fn interrupt(other: CpuId, window: Duration) -> f64 {
    if !sys::register_interrupts() {
        return f64::NAN;
    }
    let (end, ready) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            let _ = sys::pin_to(other);
            while !end.load(Ordering::Relaxed) {
                ready.store(1, Ordering::Release);
                std::hint::spin_loop();
            }
        });
        while ready.load(Ordering::Acquire) == 0 {
            thread::yield_now();
        }
        let (begin, from, mut count) = (Instant::now(), sys::cpu_time(), 0_u32);
        let mut worked = true;
        while worked && begin.elapsed() < window {
            worked = (0..16).all(|_| sys::interrupt_others());
            count += 16;
        }
        let ns = (sys::cpu_time() - from).as_secs_f64() * 1e9 / f64::from(count.max(1));
        end.store(true, Ordering::Relaxed);
        if worked { ns } else { f64::NAN }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_one_that_a_core_can_have() {
        let (hz, _) = clock(Duration::from_millis(20));
        assert!((5e7..2e10).contains(&hz), "{hz}");
    }
}
