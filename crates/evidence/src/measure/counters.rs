//! Which counters exist, and whether they count what a known program does.

use std::fs;
use std::path::Path;

use homenode_kernel::ibs::Device;
use homenode_kernel::numa_maps::{Range, Sharing, pages_per_node, sum};
use homenode_kernel::perf::{Perf, Selection};
use homenode_kernel::resctrl::Resctrl;
use homenode_kernel::uncore::{Uncore, discover};
use homenode_load::Kernel;
use homenode_load::kernels::{self, Places};
use homenode_load::sys::{self, Memory, Pages};
use homenode_units::{Bytes, CpuId, NodeId, PAGE_BYTES};

use super::{Bench, REPETITIONS, Why};
use crate::section::{Bearing, Figure, Section, Topic, With};

pub(super) const METHOD: &str = "Programs that do a known number of things are counted: a loop of two instructions, a chain \
     of additions of one cycle each, a chase whose reads miss the last-level cache, first writes to fresh pages, and memory \
     that is written on one node. The figure is what was counted in percent of what was done.";

/// Rounds of the loop of two instructions.
const ROUNDS: u64 = 20_000_000;
/// Pairs of additions.
const PAIRS: usize = 20_000_000;
/// Reads of the chase.
const READS: usize = 2_000_000;
/// Fresh pages.
const FRESH: usize = 8192;
/// How far off a counter may be, in percent, before it is said to be wrong.
const OFF_MAX: f64 = 10.0;
const KNOWN: &str = "what the program does";

pub(super) fn measure(bench: &mut Bench<'_>) -> Result<Section, Why> {
    let node = bench.machine.home_nodes().iter().next();
    let node = node.ok_or_else(|| Why::of("no node has both CPUs and memory that this process may use"))?;
    let cpu = bench.first_cpu(node)?;
    sys::pin_to(cpu)?;
    let measured = kernel_counts(bench, cpu, node).and_then(|mut figures| {
        let (hardware, absence) = hardware_counts(bench, node)?;
        figures.extend(hardware);
        Ok((figures, absence))
    });
    // If this fails, the thread only stays pinned.
    let _ = sys::pin(&bench.machine.cpu_set());
    let (figures, absence) = measured?;
    let wrong: Vec<&str> = figures
        .iter()
        .filter(|figure| figure.median.is_some_and(|found| (found - 100.0).abs() > OFF_MAX))
        .map(|figure| figure.what.as_str())
        .collect();
    let counts = match wrong.as_slice() {
        [] => format!(
            "All {} counters that were tried count within {OFF_MAX:.0} percent of what was done.",
            figures.len()
        ),
        wrong => format!("Off by more than {OFF_MAX:.0} percent: {}.", wrong.join(", ")),
    };
    let others = others(bench);
    let (hardware, bearing) = match absence {
        Some(why) => (
            format!(
                "Instructions and cache misses are not counted ({why}), so the agent cannot tell whether a VM runs faster or \
                 slower."
            ),
            Bearing::Against,
        ),
        None if wrong.is_empty() => ("The agent can rely on them.".to_owned(), Bearing::Neither),
        None => (
            "The agent's decisions rest on these counters.".to_owned(),
            Bearing::Against,
        ),
    };
    Ok(Section::measured(
        Topic::Counters,
        With::Processes,
        METHOD,
        format!("{counts} {hardware} {others}"),
        bearing,
        figures,
    ))
}

fn known(what: &str, percents: &[f64]) -> Figure {
    Figure::of(what, "percent", percents).predicted(100.0, KNOWN)
}

/// Counts that the kernel makes itself.
fn kernel_counts(bench: &mut Bench<'_>, cpu: CpuId, node: NodeId) -> Result<Vec<Figure>, Why> {
    let (mut faults, mut placed) = (Vec::new(), Vec::new());
    for at in 0..REPETITIONS {
        (bench.told)(
            "page faults and pages by node",
            at as f64 / (2 * REPETITIONS) as f64,
        );
        let mut memory = Memory::map(FRESH * PAGE_BYTES as usize, Pages::Base, None)?;
        let before = own_faults();
        for word in memory.words_mut().iter_mut().step_by(PAGE_BYTES as usize / 8) {
            *word = std::hint::black_box(1);
        }
        if let (Some(before), Some(after)) = (before, own_faults()) {
            faults.push(100.0 * (after - before) as f64 / FRESH as f64);
        }
    }
    let bytes = FRESH * PAGE_BYTES as usize;
    for _ in 0..REPETITIONS {
        let worker = bench.worker(Kernel::Pages(bytes, bytes), cpu, node)?;
        let start = worker.place().0 as u64;
        let range = Range {
            start,
            end: start + bytes as u64,
            sharing: Sharing::Private,
            page_bytes: Bytes(PAGE_BYTES),
        };
        let pages = pages_per_node(Path::new("/"), worker.pid(), &[range])
            .map_err(|error| Why::said("the kernel does not say where pages are")(&error))?;
        if let Some(pages) = pages {
            let there = sum(&pages).get(node).map_or(0, |pages| pages.0);
            placed.push(100.0 * there as f64 / FRESH as f64);
        }
    }
    let mut figures = vec![known("page faults, of first writes to pages", &faults)];
    if !placed.is_empty() {
        figures.push(known(
            "pages reported on the node, of pages written there",
            &placed,
        ));
    }
    Ok(figures)
}

/// Returns this thread's page faults that read nothing from a disk.
fn own_faults() -> Option<u64> {
    let stat = fs::read_to_string("/proc/thread-self/stat").ok()?;
    // After the name in parentheses: the state is the first field, minor faults are the eighth.
    stat.rsplit_once(')')?
        .1
        .split_ascii_whitespace()
        .nth(7)?
        .parse()
        .ok()
}

/// Counts that the PMU makes, and why there are none.
fn hardware_counts(bench: &mut Bench<'_>, node: NodeId) -> Result<(Vec<Figure>, Option<String>), Why> {
    let selection = Selection::discover(Path::new("/"))
        .map_err(|error| Why::said("the description of the PMU cannot be read")(&error))?;
    let mut perf = Perf::new(selection);
    let tid = rustix::thread::gettid().as_raw_nonzero().get();
    if perf.counters(tid).is_none() {
        return Ok((
            Vec::new(),
            Some(perf.absence().unwrap_or("it has no counters").to_owned()),
        ));
    }
    let llc = bench
        .machine
        .llcs
        .iter()
        .map(|llc| llc.size_bytes.0)
        .max()
        .unwrap_or(32 << 20);
    let bound = (bench.machine.memory_nodes().len() > 1).then_some(node);
    let mut memory = Memory::map(16 * llc as usize, Pages::Huge, bound)?;
    let lines = memory.words().len() / 8;
    let mut place = [kernels::lay_chase(memory.words_mut(), lines, Places::EachLine)];
    let [mut instructions, mut cycles, mut misses] = [const { Vec::new() }; 3];
    for at in 0..REPETITIONS {
        (bench.told)("hardware counters", 0.5 + at as f64 / (2 * REPETITIONS) as f64);
        let mut during = |work: &mut dyn FnMut()| {
            let before = perf.counters(tid)?;
            work();
            Some((before, perf.counters(tid)?))
        };
        let mut is_known = false;
        if let Some((before, after)) = during(&mut || is_known = sys::two_instructions(ROUNDS))
            && is_known
        {
            instructions
                .push(100.0 * (after.instructions - before.instructions) as f64 / (2 * ROUNDS) as f64);
        }
        if let Some((before, after)) = during(&mut || {
            std::hint::black_box(kernels::dependent_cycles(PAIRS));
        }) {
            cycles.push(100.0 * (after.cycles - before.cycles) as f64 / (2 * PAIRS) as f64);
        }
        if let Some((before, after)) = during(&mut || kernels::chase(memory.words(), &mut place, READS))
            && let (Some(before), Some(after)) = (before.llc_misses, after.llc_misses)
        {
            misses.push(100.0 * (after - before) as f64 / READS as f64);
        }
    }
    let mut figures = vec![
        known("instructions counted, of all that ran", &instructions),
        known("cycles counted, of those of a chain of additions", &cycles),
        known("misses counted, of reads that miss the last-level cache", &misses),
    ];
    figures.retain(|figure| !figure.values.is_empty());
    Ok((figures, None))
}

/// Says which other counters exist.
fn others(bench: &Bench<'_>) -> String {
    let root = Path::new("/");
    let controllers = discover(root, bench.machine).map_or(0, |layout| Uncore::open(layout).count());
    let has_samples = Device::find(root).is_ok();
    let has_resctrl = matches!(Resctrl::open(root, bench.machine), Ok(Some(_)));
    let mut there = Vec::new();
    if controllers > 0 {
        there.push(format!("{controllers} counters of memory controllers and links"));
    }
    if has_samples {
        there.push("samples of which node uses a page (IBS)".to_owned());
    }
    if has_resctrl {
        there.push("memory traffic by resctrl".to_owned());
    }
    match there.as_slice() {
        [] => "Memory controllers, links and the use of pages by nodes are not counted here.".to_owned(),
        there => format!("There are also {}.", there.join(", ")),
    }
}
