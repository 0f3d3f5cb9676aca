//! Whether trackers see the memory that a program is known to use.

use std::path::Path;
use std::time::Duration;

use homenode_host::observation::{Tracker, Used};
use homenode_kernel::numa_maps::{Range, Sharing};
use homenode_kernel::trackers::{Runs, Target, TrackerError, choices, look};
use homenode_load::Kernel;
use homenode_load::worker::Spans;
use homenode_units::{Bytes, Ns, PAGE_BYTES};

use super::{Bench, REPETITIONS, Why};
use crate::section::{Bearing, Figure, Section, Topic, With};

pub(super) const METHOD: &str = "A program holds 256 MiB in base pages, all of which it has touched once, and writes to a known part \
     of them again and again. Marks of use are cleared; after a window, the pages found used are compared with those that it wrote \
     to. A process has accessed bits of its own, as a guest has that is emulated; the tracker of guests under KVM, and DAMON, are \
     tried with VMs only.";

const HELD: usize = 256 << 20;
/// Parts of the memory that are used, in MiB.
const USED_MIB: [usize; 3] = [16, 64, 128];

pub(super) fn measure(bench: &mut Bench<'_>) -> Result<Section, Why> {
    let root = Path::new("/");
    let why_not = choices(root, Runs::Emulated)
        .into_iter()
        .find(|choice| choice.tracker == Tracker::AccessedBits)
        .and_then(|choice| choice.why_not);
    if let Some(why_not) = why_not {
        return Err(Why::of(format!("accessed bits cannot be read: {why_not}")));
    }
    let node = bench.machine.home_nodes().iter().next();
    let node = node.ok_or_else(|| Why::of("no node has both CPUs and memory that this process may use"))?;
    let cpu = bench.first_cpu(node)?;
    let window = Duration::from_secs_f64(
        (bench.budget.as_secs_f64() / (USED_MIB.len() * REPETITIONS) as f64).clamp(0.3, 3.0),
    );
    let mut figures = Vec::new();
    let mut blind_percent: f64 = 0.0;
    for (at, mib) in USED_MIB.into_iter().enumerate() {
        let mut worker = bench.worker(Kernel::Pages(mib << 20, HELD), cpu, node)?;
        let (start, _) = worker.place();
        let target = Target {
            pid: worker.pid(),
            ranges: vec![Range {
                start: start as u64,
                end: (start + HELD) as u64,
                sharing: Sharing::Private,
                page_bytes: Bytes(PAGE_BYTES),
            }],
            vcpus: 1,
            runs: Runs::Emulated,
        };
        let known = ((mib << 20) as u64 / PAGE_BYTES) as f64;
        let mut found = Vec::new();
        for repetition in 0..REPETITIONS {
            let done = (at * REPETITIONS + repetition) as f64 / (USED_MIB.len() * REPETITIONS) as f64;
            (bench.told)(&format!("{mib} MiB in use"), done);
            let span = Ns(window.as_nanos() as u64);
            let mut tracker = look(root, Tracker::AccessedBits, &target, span).map_err(refused)?;
            worker.run(Spans {
                warm: 20,
                measure: window.as_millis() as u64 + 100,
                tail: 0,
            })?;
            std::thread::sleep(Duration::from_millis(20));
            tracker.begin().map_err(refused)?;
            std::thread::sleep(window);
            let seen = tracker.end().map_err(refused)?;
            worker.ran()?;
            if let Used::Amount { used, .. } = seen.found {
                found.push(100.0 * used.0 as f64 / known);
            }
            blind_percent = blind_percent.max(100.0 * seen.blind.0 as f64 / known);
        }
        figures.push(
            Figure::of(
                format!("found by accessed bits, of {mib} MiB in use"),
                "percent",
                &found,
            )
            .predicted(100.0, "what the program writes to"),
        );
    }
    let worst = figures
        .iter()
        .filter_map(|figure| figure.median)
        .map(|found| (found - 100.0).abs());
    let worst = worst.fold(0.0, f64::max);
    let bearing = if worst > 25.0 {
        Bearing::Against
    } else {
        Bearing::Neither
    };
    let means = format!(
        "Accessed bits find the memory that is in use within {worst:.1} percent. Up to {blind_percent:.0} percent could stay unseen in a TLB."
    );
    Ok(Section::measured(
        Topic::WorkingSet,
        With::Processes,
        METHOD,
        means,
        bearing,
        figures,
    ))
}

fn refused(error: TrackerError) -> Why {
    Why::said("the kernel refused to say which pages were used")(&error)
}
