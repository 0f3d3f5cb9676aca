//! Times of a server's requests, alone and beside a thrasher on the same last-level cache.

use homenode_load::Kernel;

use super::{Bench, LINES, REPETITIONS, Why, percent_of, spans};
use crate::section::{Bearing, Figure, Section, Topic, With};

pub(super) const METHOD: &str = "A server, pinned to a CPU, answers requests that arrive by themselves at random moments, \
     at 40 percent of what it could serve alone. Each request reads lines from a table of half the last-level cache. A \
     request's time counts from its arrival. The server runs alone and beside a stream on another CPU of the same cache, in \
     turn.";

/// The share of the time that the server is busy alone.
const BUSY: f64 = 0.4;
/// Least and most time of a repetition's half, in milliseconds.
const MEASURE_MS: (u64, u64) = (500, 5000);

pub(super) fn measure(bench: &mut Bench<'_>) -> Result<Section, Why> {
    let ([server_cpu, other_cpu], llc, node) = bench.neighbours()?;
    let measure_ms = (bench.budget.as_millis() / (2 * REPETITIONS as u128 + 2)) as u64;
    let spans = spans(llc, measure_ms.clamp(MEASURE_MS.0, MEASURE_MS.1));
    (bench.told)("the server's speed", 0.0);
    let ns_per_line = {
        let mut alone = bench.worker(Kernel::Uniform(llc / 2), server_cpu, node)?;
        alone.run(spans)?;
        alone.ns_per_line()?
    };
    let server = Kernel::Requests {
        bytes: llc / 2,
        lines: LINES,
        interval_ns: ((ns_per_line * LINES as f64 / BUSY) as usize).max(1),
    };
    let mut server = bench.worker(server, server_cpu, node)?;
    let mut thrasher = bench.worker(Kernel::Stream(4 * llc), other_cpu, node)?;
    let mut times = [const { Vec::new() }; 4];
    for at in 0..REPETITIONS {
        for (is_beside, place) in [(false, 0), (true, 2)] {
            let what = if is_beside { "beside a thrasher" } else { "alone" };
            (bench.told)(
                what,
                (2 * at + usize::from(is_beside)) as f64 / (2 * REPETITIONS) as f64,
            );
            server.run(spans)?;
            if is_beside {
                thrasher.run(spans)?;
                thrasher.ran()?;
            }
            let [p50, p99] = server.ran()?.request_ns.unwrap_or([0, 0]);
            times[place].push(p50 as f64 / 1e3);
            times[place + 1].push(p99 as f64 / 1e3);
        }
    }
    let [p50, p99, p50_beside, p99_beside] = &times;
    let figures = vec![
        Figure::of("median, alone", "µs", p50),
        Figure::of("median, beside a thrasher", "µs", p50_beside),
        Figure::of("99th percentile, alone", "µs", p99),
        Figure::of("99th percentile, beside a thrasher", "µs", p99_beside),
        Figure::of(
            "median beside, of that alone",
            "percent",
            &percent_of(p50, p50_beside),
        ),
        Figure::of(
            "99th percentile beside, of that alone",
            "percent",
            &percent_of(p99, p99_beside),
        ),
    ];
    let late = &figures[5];
    let (median, low) = (late.median.unwrap_or(f64::NAN), late.low.unwrap_or(f64::NAN));
    let costs = low > 105.0;
    let has_caches = bench.machine.llcs.len() > 1;
    let says = match (costs, has_caches) {
        (true, true) => "The agent can keep them on different caches.",
        (true, false) => "All CPUs share one cache, so the agent could only limit the neighbour.",
        (false, _) => "That is no loss beyond what chance may make.",
    };
    let means = format!(
        "Beside a neighbour that fills the cache, the 99th percentile of request times is {median:.0} percent of that alone. \
         {says}"
    );
    let bearing = if costs && has_caches {
        Bearing::For
    } else {
        Bearing::Neither
    };
    Ok(Section::measured(
        Topic::Requests,
        With::Processes,
        METHOD,
        means,
        bearing,
        figures,
    ))
}
