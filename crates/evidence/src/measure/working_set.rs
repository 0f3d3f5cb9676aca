//! Whether trackers see the memory that a program is known to use.

use std::path::Path;
use std::time::Duration;

use homenode_host::observation::{Tracker, Used};
use homenode_kernel::numa_maps::{Range, Sharing, guest_ram};
use homenode_kernel::trackers::{Runs, Target, TrackerError, choices, look};
use homenode_load::Kernel;
use homenode_load::worker::{Spans, Worker};
use homenode_units::{Bytes, CpuId, CpuSet, Ns, PAGE_BYTES};

use super::guests::{Guest, Guests, Memory};
use super::{Bench, REPETITIONS, Why};
use crate::section::{Bearing, Figure, Section, Topic, With};

pub(super) const METHOD: &str = "A program holds 256 MiB in base pages, all of which it has touched once, and writes to a \
     known part of them again and again. Marks of use are cleared; after a window, the pages found used are compared with \
     those that it wrote to. A process has accessed bits of its own, as a guest has that is emulated. With KVM, a VM of this \
     command does the same under the tracker of guests, which invalidates what KVM has mapped. DAMON is not tried.";

const HELD: usize = 256 << 20;
/// Parts of the memory that are used, in MiB.
const USED_MIB: [usize; 3] = [16, 64, 128];
/// Part of a VM's memory that is used, in MiB. The guest's kernel uses some more.
const VM_USED_MIB: usize = 128;
/// How far off a tracker may be, in percent, before it speaks against relying on it.
const OFF_MAX: f64 = 25.0;
const KNOWN: &str = "what the program writes to";

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
        let done = 0.8 * at as f64 / USED_MIB.len() as f64;
        (bench.told)(&format!("{mib} MiB in use by a process"), done);
        let worker = bench.worker(Kernel::Pages(mib << 20, HELD), cpu, node)?;
        let seen = of_process(worker, window, mib)?;
        blind_percent = blind_percent.max(seen.blind_percent);
        let what = format!("found by accessed bits, of {mib} MiB in use");
        figures.push(Figure::of(what, "percent", &seen.found).predicted(100.0, KNOWN));
    }
    (bench.told)("memory in use by a VM", 0.8);
    let of_vm = match of_vm(bench, cpu, window) {
        Ok(figure) => {
            let found = figure.median.unwrap_or(f64::NAN);
            figures.push(figure);
            format!("Of a VM's memory in use, invalidation finds {found:.0} percent.")
        }
        Err(Why { why, .. }) => format!("No VM was tried: {why}."),
    };
    let off = figures
        .iter()
        .filter_map(|figure| Some((figure.median? - 100.0).abs()));
    let worst = off.fold(0.0, f64::max);
    let bearing = match worst > OFF_MAX {
        true => Bearing::Against,
        false => Bearing::Neither,
    };
    let means = format!(
        "Trackers find the memory that is in use within {worst:.1} percent. Of a process's, up to {blind_percent:.0} percent \
         could stay unseen while a TLB holds their translations. {of_vm}"
    );
    let with = With::Processes;
    Ok(Section::measured(
        Topic::WorkingSet,
        with,
        METHOD,
        means,
        bearing,
        figures,
    ))
}

/// Tracks a process, by the accessed bits of its own page tables.
fn of_process(mut worker: Worker, window: Duration, mib: usize) -> Result<Seen, Why> {
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
    tracked(&mut worker, &target, Tracker::AccessedBits, window, mib)
}

/// What a tracker found.
struct Seen {
    /// Each window's pages found used, in percent of the pages that the program writes to.
    found: Vec<f64>,
    /// The most that could be used without being seen, in percent.
    blind_percent: f64,
}

/// Tracks a program that writes to this much memory, window after window.
fn tracked(
    worker: &mut Worker,
    target: &Target,
    tracker: Tracker,
    window: Duration,
    mib: usize,
) -> Result<Seen, Why> {
    let known = ((mib << 20) as u64 / PAGE_BYTES) as f64;
    let mut seen = Seen {
        found: Vec::new(),
        blind_percent: 0.0,
    };
    for _ in 0..REPETITIONS {
        let span = Ns(window.as_nanos() as u64);
        let mut tracker = look(Path::new("/"), tracker, target, span).map_err(|error| refused(&error))?;
        worker.run(Spans {
            warm: 20,
            measure: window.as_millis() as u64 + 200,
            tail: 0,
        })?;
        std::thread::sleep(Duration::from_millis(50));
        tracker.begin().map_err(|error| refused(&error))?;
        std::thread::sleep(window);
        let now = tracker.end().map_err(|error| refused(&error))?;
        worker.ran()?;
        if let Used::Amount { used, .. } = now.found {
            seen.found.push(100.0 * used.0 as f64 / known);
        }
        seen.blind_percent = seen.blind_percent.max(100.0 * now.blind.0 as f64 / known);
    }
    Ok(seen)
}

/// Tracks a VM under KVM, whose page tables are its own.
fn of_vm(bench: &Bench<'_>, cpu: CpuId, window: Duration) -> Result<Figure, Why> {
    let guests = Guests::find(&bench.program, bench.kernel.as_deref())?;
    let cpus: CpuSet = [cpu].into_iter().collect();
    let guest = Guest {
        name: "homenode-evidence-tracked",
        uuid: None,
        load: Kernel::Pages(VM_USED_MIB << 20, HELD),
        vcpus: 1,
        cpus: &cpus,
        memory: Memory::Anywhere,
    };
    let mut running = guests.start_on_kvm(std::slice::from_ref(&guest))?;
    let worker = running
        .workers
        .first_mut()
        .ok_or_else(|| Why::of("no VM started"))?;
    let ranges = guest_ram(Path::new("/"), worker.pid(), &[guest.bytes()]);
    let ranges = ranges.map_err(|error| Why::said("the VM's memory cannot be found")(&error))?;
    let target = Target {
        pid: worker.pid(),
        ranges: ranges.ok_or_else(|| Why::of("the VM's memory cannot be found"))?,
        vcpus: 1,
        runs: Runs::Kvm,
    };
    let seen = tracked(worker, &target, Tracker::Invalidation, window, VM_USED_MIB)?;
    let what = format!("found by invalidation, of {VM_USED_MIB} MiB in use in a VM");
    Ok(Figure::of(what, "percent", &seen.found).predicted(100.0, KNOWN))
}

fn refused(error: &TrackerError) -> Why {
    Why::said("the kernel refused to say which pages were used")(error)
}
