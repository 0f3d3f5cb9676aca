//! Makes profiles of the memory kernels for the simulator, only from their solo behaviour.
//!
//! # Terms
//!
//! - A *line* is one access of a kernel; to the simulator it is `INSTRUCTIONS_PER_LINE` instructions.
//! - `uniform` over `w` bytes: an access misses L2 with probability `a = 1 - l2 / w`. It misses a cache that holds `c` of
//!   these bytes with probability `m(c) = 1 - c / w`.
//! - A mix keeps only as much of its uniform part in the cache as survives its own stream. With random replacement this is
//!   `o = c m / (1 + m)` with `m = 1 - o / w`, so `m(c) = (sqrt(x^2 + 4) - x) / 2` with `x = c / w`. Every other access
//!   belongs to the stream, and misses.
//!
//! # Approach
//!
//! The simulator's family of curves is fitted to both by least squares, over the capacities that this machine offers, and the
//! remaining error is reported. Five solo times yield the other parameters: for `uniform` the work per line (data in L1), hits in
//! flight (data in the LLC) and misses in flight (data far larger than the LLC); for `stream` work and misses in flight. No
//! measurement of kernels that run together is used.

use homenode_load::Kernel;
use homenode_machine::{Hardware, LoadCurve};
use homenode_twin::Workload;
use homenode_twin::workload::{FittedCurve, MissRatioCurve};
use homenode_units::Bytes;
use serde::Serialize;

use crate::sys::LINE_BYTES;

/// Instructions per line; only the product of this figure and the rates matters.
const INSTRUCTIONS_PER_LINE: f64 = 10.0;

/// Solo times per line, in nanoseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SoloTimes {
    /// `uniform` over half of L1.
    pub uniform_l1_ns: f64,
    /// `uniform` over [`SoloTimes::uniform_llc_bytes`], which fit into the LLC but not into L2.
    pub uniform_llc_ns: f64,
    /// Size of the buffer for [`SoloTimes::uniform_llc_ns`].
    pub uniform_llc_bytes: usize,
    /// `uniform` over [`SoloTimes::uniform_memory_bytes`], which do not fit into the LLC.
    pub uniform_memory_ns: f64,
    /// Size of the buffer for [`SoloTimes::uniform_memory_ns`].
    pub uniform_memory_bytes: usize,
    /// `stream` over half of L1.
    pub stream_l1_ns: f64,
    /// `stream` over more than the LLC.
    pub stream_memory_ns: f64,
}

/// Parameters of the kernels, derived from the solo times.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Parameters {
    /// Work per line of `uniform`, in nanoseconds.
    pub uniform_work_ns: f64,
    /// LLC hits in flight of `uniform`.
    pub uniform_hits_in_flight: f64,
    /// Misses in flight of `uniform`.
    pub uniform_misses_in_flight: f64,
    /// Work per line of `stream`, in nanoseconds.
    pub stream_work_ns: f64,
    /// Misses in flight of `stream`, prefetches included.
    pub stream_misses_in_flight: f64,
}

/// The machine's figures that a profile needs.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    /// Core clock in GHz.
    pub ghz: f64,
    /// Latency of an LLC hit.
    pub llc_ns: f64,
    /// Idle latency of memory.
    pub memory_ns: f64,
    /// Growth of the memory latency with load.
    pub curve: LoadCurve,
    /// Sustained bandwidth in bytes per nanosecond.
    pub bandwidth: f64,
    /// Bytes of L2.
    pub l2: f64,
    /// Bytes of the LLC.
    pub llc: f64,
}

impl Facts {
    /// Returns the facts of a machine with timing figures.
    pub fn of(hardware: &Hardware, bandwidth: f64, llc: f64) -> Facts {
        let ghz = hardware.clock_hz as f64 / 1e9;
        Facts {
            ghz,
            llc_ns: hardware.latency.llc_cycles / ghz,
            memory_ns: hardware.latency.memory_ns,
            curve: hardware.memory_curve,
            bandwidth,
            l2: hardware.l2_bytes.as_f64(),
            llc,
        }
    }

    /// Returns the latency of memory while one kernel misses this share of its lines, and each line takes `ns`.
    fn loaded_ns(&self, miss_share: f64, ns: f64) -> f64 {
        let load = miss_share * LINE_BYTES as f64 / ns / self.bandwidth;
        let u = (load / 1.02).clamp(0.0, 0.985);
        self.memory_ns * (1.0 + self.curve.alpha * u + self.curve.beta * u * u.sqrt() / (1.0 - u))
    }

    fn l2_miss_share(&self, bytes: f64) -> f64 {
        (1.0 - self.l2 / bytes).clamp(0.05, 1.0)
    }
}

impl Parameters {
    /// Solves the simulator's equation of a core for the parameters, given the solo times.
    pub fn of(solo: &SoloTimes, facts: &Facts) -> Parameters {
        // Noise can make the farther level seem faster. Then its latency was almost fully hidden, so much is in flight.
        let waited = |far: f64, near: f64| (far - near).max(0.02 * near);
        let reach = facts.l2_miss_share(solo.uniform_llc_bytes as f64);
        let hits = reach * facts.llc_ns / waited(solo.uniform_llc_ns, solo.uniform_l1_ns);
        let uniform_hits_in_flight = hits.max(0.1);
        let bytes = solo.uniform_memory_bytes as f64;
        let (reach, miss) = (facts.l2_miss_share(bytes), (1.0 - facts.llc / bytes).max(0.05));
        let hit_ns = reach * (1.0 - miss) * facts.llc_ns / uniform_hits_in_flight;
        let latency = facts.loaded_ns(reach * miss, solo.uniform_memory_ns);
        let misses = reach * miss * latency / waited(solo.uniform_memory_ns, solo.uniform_l1_ns + hit_ns);
        let latency = facts.loaded_ns(1.0, solo.stream_memory_ns);
        let streamed = latency / waited(solo.stream_memory_ns, solo.stream_l1_ns);
        Parameters {
            uniform_work_ns: solo.uniform_l1_ns,
            uniform_hits_in_flight,
            uniform_misses_in_flight: misses.max(0.1),
            stream_work_ns: solo.stream_l1_ns,
            stream_misses_in_flight: streamed.max(0.1),
        }
    }
}

/// Fits the simulator's family of curves to `wanted`, a function of capacity over `bytes`, in the range from 0 to `reach`.
pub fn fit(wanted: impl Fn(f64) -> f64, bytes: f64, reach: f64) -> FittedCurve {
    const POINTS: usize = 64;
    let at = |point: usize| reach * (point + 1) as f64 / POINTS as f64;
    let targets: Vec<(f64, f64)> = (0..POINTS)
        .map(|point| (at(point) * bytes, wanted(at(point))))
        .collect();
    FittedCurve::of(&targets, bytes)
}

/// Returns the profile of a kernel on a machine, and the quality of its curve. A server of requests counts as uniform draws
/// without pause, a chase as draws of which one is in flight, and writes to pages as a stream.
pub fn profile(kernel: Kernel, parameters: &Parameters, facts: &Facts) -> (Workload, FittedCurve) {
    let p = parameters;
    let (reach, work_ns, in_flight, fitted) = match kernel {
        Kernel::Uniform(bytes) | Kernel::Requests { bytes, .. } | Kernel::Chase(bytes) => {
            let in_flight = match kernel {
                Kernel::Chase(_) => 1.0,
                _ => p.uniform_misses_in_flight,
            };
            let bytes = bytes as f64;
            let fitted = fit(
                |share| (1.0 - share).max(0.0),
                bytes,
                (facts.llc / bytes).min(1.0),
            );
            (facts.l2_miss_share(bytes), p.uniform_work_ns, in_flight, fitted)
        }
        Kernel::Stream(bytes) | Kernel::Pages(bytes, _) => {
            let curve = MissRatioCurve::family(1.0, Bytes(bytes as u64), 1.0);
            let exact = FittedCurve {
                curve,
                error_mean: 0.0,
                error_max: 0.0,
            };
            (1.0, p.stream_work_ns, p.stream_misses_in_flight, exact)
        }
        Kernel::Mix(uniform, stream) => {
            let bytes = uniform as f64;
            let reach = facts.l2_miss_share(bytes);
            let of_uniform = |share: f64| ((share * share + 4.0).sqrt() - share) / 2.0;
            let wanted = |share: f64| (1.0 + reach * of_uniform(share)) / (1.0 + reach);
            let most = (facts.llc / bytes).min((uniform + stream) as f64 / bytes);
            let in_flight = 2.0 / (1.0 / p.stream_misses_in_flight + 1.0 / p.uniform_misses_in_flight);
            let work = (p.uniform_work_ns + p.stream_work_ns) / 2.0;
            ((1.0 + reach) / 2.0, work, in_flight, fit(wanted, bytes, most))
        }
    };
    let bytes = |bytes: u64| format!("{bytes}B");
    let value = serde_json::json!({
        "name": kernel.to_string(),
        "about": "A memory kernel of `homenode calibrate --validate`.",
        "program": {
            "threads": "single",
            // More work than any simulation can do.
            "instructions_g_per_thread": 1e6,
            "cpi_core": (work_ns * facts.ghz / INSTRUCTIONS_PER_LINE).max(1e-3),
            "llc_accesses_per_kilo_instruction": reach * 1000.0 / INSTRUCTIONS_PER_LINE,
            "miss_ratio": { "m_inf": fitted.curve.m_inf, "c0": bytes(fitted.curve.c0.0), "k": fitted.curve.k },
            "misses_in_flight": in_flight,
            "hits_in_flight": p.uniform_hits_in_flight,
            "write_share": 0.0,
            "regions": [{ "kind": "private", "size": bytes(kernel.footprint() as u64), "access_share": 1.0 }],
        },
    });
    let workload: Workload =
        serde_json::from_value(value).expect("the keys of a workload, with figures in range");
    (workload, fitted)
}

/// Returns nanoseconds per line at this rate of instructions.
pub fn ns_per_line(instructions_per_s: f64) -> f64 {
    INSTRUCTIONS_PER_LINE * 1e9 / instructions_per_s
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn facts() -> Facts {
        let curve = LoadCurve {
            alpha: 0.3,
            beta: 0.01,
        };
        Facts {
            ghz: 2.0,
            llc_ns: 25.0,
            memory_ns: 100.0,
            curve,
            bandwidth: 20.0,
            l2: 1e6,
            llc: 32e6,
        }
    }

    #[test]
    fn the_family_comes_within_a_few_points_of_a_uniform_curve() {
        let whole = fit(|share| 1.0 - share, 1e8, 1.0);
        assert!(whole.error_mean < 0.04 && whole.error_max < 0.12, "{whole:?}");
        // If only half of the bytes fit, the bend at the end of the curve does not matter.
        let half = fit(|share| 1.0 - share, 1e8, 0.5);
        assert!(half.error_max < 0.02, "{half:?}");
    }

    #[test]
    fn a_curve_of_the_family_is_found() {
        let curve = MissRatioCurve::family(0.3, Bytes(40_000_000), 1.5);
        let fitted = fit(|share| curve.at(share * 1e8), 1e8, 2.0);
        assert!(fitted.error_max < 0.02, "{fitted:?}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))] // fits take a tenth of a second
        #[test]
        fn parameters_behind_solo_times_are_recovered(work in 0.5..5.0f64, hits in 1.0..8.0f64, misses in 1.0..8.0f64) {
            let facts = facts();
            let reach = |bytes: f64| 1.0 - facts.l2 / bytes;
            let (inside, outside) = (8_000_000, 256_000_000);
            let miss = 1.0 - facts.llc / outside as f64;
            let far = |ns: f64| work + reach(outside as f64)
                * ((1.0 - miss) * facts.llc_ns / hits + miss * facts.loaded_ns(reach(outside as f64) * miss, ns) / misses) ;
            let stream = |ns: f64| 1.0 + facts.loaded_ns(1.0, ns) / 12.0;
            let settled = |of: &dyn Fn(f64) -> f64| (0..200).fold(50.0, |ns, _| 0.5 * (ns + of(ns)));
            let solo = SoloTimes {
                uniform_l1_ns: work,
                uniform_llc_ns: work + reach(inside as f64) * facts.llc_ns / hits,
                uniform_llc_bytes: inside,
                uniform_memory_ns: settled(&far),
                uniform_memory_bytes: outside,
                stream_l1_ns: 1.0,
                stream_memory_ns: settled(&stream),
            };
            let found = Parameters::of(&solo, &facts);
            prop_assert!((found.uniform_hits_in_flight / hits - 1.0).abs() < 1e-6, "{found:?}");
            prop_assert!((found.uniform_misses_in_flight / misses - 1.0).abs() < 1e-3, "{found:?}");
            prop_assert!((found.stream_misses_in_flight / 12.0 - 1.0).abs() < 1e-3, "{found:?}");
        }

        #[test]
        fn every_kernel_gives_a_workload_that_the_twin_takes(
            mib in 1usize..4000, times in prop::collection::vec(0.1..500.0f64, 5..6),
        ) {
            let solo = SoloTimes {
                uniform_l1_ns: times[0], uniform_llc_ns: times[1], uniform_llc_bytes: 8 << 20,
                uniform_memory_ns: times[2], uniform_memory_bytes: 256 << 20, stream_l1_ns: times[3], stream_memory_ns: times[4],
            };
            let parameters = Parameters::of(&solo, &facts());
            let bytes = mib << 20;
            for kernel in [Kernel::Uniform(bytes), Kernel::Stream(bytes), Kernel::Mix(bytes, bytes)] {
                let (workload, _) = profile(kernel, &parameters, &facts());
                prop_assert!(workload.check().is_ok(), "{workload:?}");
            }
        }
    }
}
