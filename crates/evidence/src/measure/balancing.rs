//! What the kernel's automatic NUMA balancing costs a program whose memory is all near, and one whose memory is all far.

use homenode_load::Kernel;
use homenode_load::sys;
use homenode_load::worker::{Spans, Worker};

use super::{Bench, REPETITIONS, Why, moving, percent_of};
use crate::section::{Bearing, Figure, Section, Topic, With};

pub(super) const METHOD: &str = "The kernel does not balance memory that is bound to a node, so a program with bound memory \
     is compared with the same program without: time per line, in turn. Its memory is all near, and then all far from its \
     CPU, from where the kernel may bring it home. Every fault that the kernel makes costs at least what a fault on a page \
     in memory costs, which is measured in a process.";

const BYTES: usize = 256 << 20;
/// Pages of one measurement of faults.
const FAULTS: usize = 16_384;
/// The kernel looks at 256 MiB each second at most, with its usual settings.
const SCANNED_PER_S: f64 = 65_536.0;

pub(super) fn measure(bench: &mut Bench<'_>) -> Result<Section, Why> {
    let mut faults = Vec::new();
    for at in 0..REPETITIONS {
        (bench.told)("page faults", 0.1 * at as f64 / REPETITIONS as f64);
        faults.push(sys::present_fault_ns(FAULTS)?);
    }
    let fault = Figure::of("page fault on a page in memory", "ns", &faults);
    let cost = fault.median.unwrap_or(f64::NAN);
    let most = format!(
        "A fault on a page in memory takes {cost:.0} ns, so balancing costs a program at most about {:.1} percent of a CPU \
         while the kernel looks at all of its memory at its usual pace.",
        cost * SCANNED_PER_S / 1e7
    );
    let setting = std::fs::read_to_string("/proc/sys/kernel/numa_balancing");
    let is_on = setting.is_ok_and(|text| text.trim() != "0");
    let has_nodes = bench.machine.home_nodes().len() > 1;
    if !is_on || !has_nodes {
        let why = match has_nodes {
            false => {
                "There is one node, where the kernel makes no such faults, so only the cost of a similar one was measured."
            }
            true => "The kernel's balancing is off here, so only the cost of a similar fault was measured.",
        };
        return Ok(Section::measured(
            Topic::Balancing,
            With::Processes,
            METHOD,
            format!("{why} {most}"),
            Bearing::Neither,
            vec![fault],
        ));
    }
    let mut figures = vec![fault];
    figures.extend(compared(bench)?);
    let median = |at: usize| figures[at].median.unwrap_or(f64::NAN);
    let means = format!(
        "A program takes {:.1} percent of its time without balancing if its memory is near, and {:.1} percent of that with \
         far memory if it begins far. {most}",
        median(1),
        median(2)
    );
    Ok(Section::measured(
        Topic::Balancing,
        With::Processes,
        METHOD,
        means,
        Bearing::Neither,
        figures,
    ))
}

/// Compares programs with and without bound memory, near and far.
fn compared(bench: &mut Bench<'_>) -> Result<Vec<Figure>, Why> {
    let [here, there] = bench.far_pair()?;
    let cpu = bench.first_cpu(here)?;
    let measure_ms = (bench.budget.as_millis() / (4 * REPETITIONS as u128)) as u64;
    let spans = Spans {
        warm: 50,
        measure: measure_ms.clamp(500, 5000),
        tail: 0,
    };
    let kernel = Kernel::Uniform(BYTES);
    let time = |worker: &mut Worker| -> Result<f64, Why> {
        worker.run(spans)?;
        Ok(worker.ns_per_line()?)
    };
    let mut figures = Vec::new();
    let cases = [
        (here, "near memory, with balancing"),
        (there, "far memory, with balancing"),
    ];
    for (number, (node, what)) in cases.into_iter().enumerate() {
        let [mut bound_ns, mut free_ns] = [const { Vec::new() }; 2];
        let mut bound = bench.worker(kernel, cpu, node)?;
        for at in 0..REPETITIONS {
            (bench.told)(
                what,
                0.1 + 0.45 * (number as f64 + at as f64 / REPETITIONS as f64),
            );
            bound_ns.push(time(&mut bound)?);
            // A new one each time, as its memory comes home.
            let mut free = Worker::start((bench.spawn)(kernel, cpu, None))?;
            if node != here {
                moving::bring(&free, here, node)?;
            }
            free_ns.push(time(&mut free)?);
        }
        let figure = Figure::of(
            format!("{what}, of the same bound"),
            "percent",
            &percent_of(&bound_ns, &free_ns),
        );
        figures.push(figure);
    }
    Ok(figures)
}
