//! How fast memory moves between nodes: the agent's page moves beside the kernel's own system call.

use std::path::Path;
use std::time::Instant;

use homenode_kernel::numa_maps::{Range, Sharing, pages_per_node, sum};
use homenode_kernel::pages::{Linux, Mover};
use homenode_load::Kernel;
use homenode_load::worker::Worker;
use homenode_units::{Bytes, NodeId, NodeMap, NodeSet, PAGE_BYTES, Pages};

use super::{Bench, REPETITIONS, Why};
use crate::section::{Bearing, Figure, Section, Topic, With};

pub(super) const METHOD: &str = "The memory of an idle program, in base pages and in huge pages, moves between the two \
     nodes that are farthest apart: with the agent's page moves, which stop after each 16 MiB if a budget ends, and back \
     with the kernel's call that moves a whole process. The pages that arrived are counted. Pages drift \
     away only where Xen's drivers exchange them with a guest; KVM's copy.";

/// Memory that moves.
const BYTES: usize = 256 << 20;

pub(super) fn measure(bench: &mut Bench<'_>) -> Result<Section, Why> {
    let [here, there] = bench.far_pair()?;
    let cpu = bench.first_cpu(here)?;
    let mut figures = Vec::new();
    let kinds = [
        ("base pages", Kernel::Pages(BYTES, BYTES)),
        ("huge pages", Kernel::Uniform(BYTES)),
    ];
    for (number, (kind, kernel)) in kinds.into_iter().enumerate() {
        let worker = Worker::start((bench.spawn)(kernel, cpu, None))?;
        let [mut ours, mut kernels, mut arrived] = [const { Vec::new() }; 3];
        for at in 0..REPETITIONS {
            (bench.told)(
                kind,
                (number * REPETITIONS + at) as f64 / (2 * REPETITIONS) as f64,
            );
            let begin = Instant::now();
            let moved = bring(&worker, here, there)?;
            ours.push(moved.to_bytes().0 as f64 / 1e9 / begin.elapsed().as_secs_f64());
            let now = on(&worker, there)?;
            arrived.push(100.0 * now.to_bytes().0 as f64 / BYTES as f64);
            let begin = Instant::now();
            migrate(worker.pid(), there, here)?;
            let took = begin.elapsed().as_secs_f64();
            let back = now.0.saturating_sub(on(&worker, there)?.0);
            kernels.push(Pages(back).to_bytes().0 as f64 / 1e9 / took);
        }
        figures.push(Figure::of(format!("the agent's moves, {kind}"), "GB/s", &ours));
        figures.push(Figure::of(format!("the kernel's call, {kind}"), "GB/s", &kernels));
        figures.push(
            Figure::of(format!("pages that arrived, {kind}"), "percent", &arrived)
                .predicted(100.0, "all of them"),
        );
    }
    let median = |at: usize| figures[at].median.unwrap_or(f64::NAN);
    let (ours, kernels, arrived) = (median(0), median(1), median(2));
    let bearing = match arrived < 90.0 || ours < 0.25 * kernels {
        true => Bearing::Against,
        false => Bearing::Neither,
    };
    let means = format!(
        "The agent moves base pages at {ours:.2} GB/s, the kernel's call at {kernels:.2} GB/s; {arrived:.0} percent arrive. \
         A VM of 16 GiB would be home in {:.0} seconds without a budget.",
        16.0 * 1.074 / ours
    );
    Ok(Section::measured(
        Topic::Moving,
        With::Processes,
        METHOD,
        means,
        bearing,
        figures,
    ))
}

pub(super) fn range(worker: &Worker) -> Range {
    let (start, bytes) = worker.place();
    Range {
        start: start as u64,
        end: (start + bytes) as u64,
        sharing: Sharing::Private,
        page_bytes: Bytes(PAGE_BYTES),
    }
}

/// Moves a worker's memory from one node to another with the agent's code, and returns how much moved.
pub(super) fn bring(worker: &Worker, from: NodeId, to: NodeId) -> Result<Pages, Why> {
    let range = range(worker);
    let all = range.pages();
    let mut mover = Mover::new(worker.pid(), vec![range]);
    let (leave, wanted) = (NodeSet::one(from), NodeSet::one(to));
    let moved = mover.advance(&mut Linux, &leave, &wanted, &NodeMap::new(), all, &mut || true);
    let moved = moved
        .map_err(|error| Why::said("pages of another process cannot be moved; run this as root")(&error))?;
    Ok(moved.moved)
}

fn on(worker: &Worker, node: NodeId) -> Result<Pages, Why> {
    let pages = pages_per_node(Path::new("/"), worker.pid(), &[range(worker)])
        .map_err(|error| Why::said("the kernel does not say where pages are")(&error))?;
    let pages = pages.ok_or_else(|| Why::of("this kernel does not say on which node pages are"))?;
    Ok(sum(&pages).get(node).copied().unwrap_or_default())
}

/// Moves all of a process's pages with the kernel's own call.
#[allow(unsafe_code)] // a system call without a wrapper
pub(super) fn migrate(pid: i32, from: NodeId, to: NodeId) -> Result<(), Why> {
    const WORDS: usize = 16;
    let mask = |node: NodeId| {
        let mut mask = [0 as libc::c_ulong; WORDS];
        let at = usize::from(node.0);
        if let Some(word) = mask.get_mut(at / 64) {
            *word |= 1 << (at % 64);
        }
        mask
    };
    let (old, new) = (mask(from), mask(to));
    // SAFETY: both masks have the stated number of bits and live until the call returns; all else is by value.
    let failed = unsafe {
        libc::syscall(
            libc::SYS_migrate_pages,
            pid,
            WORDS * 64,
            old.as_ptr(),
            new.as_ptr(),
        )
    };
    if failed < 0 {
        let error = std::io::Error::last_os_error();
        return Err(Why::said(
            "the kernel refused to move a process's memory; run this as root",
        )(&error));
    }
    Ok(())
}
