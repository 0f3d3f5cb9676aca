//! What the kernel's automatic NUMA balancing costs a VM whose memory is all near, and one whose memory is all far.

use std::path::Path;

use homenode_kernel::task;
use homenode_load::Kernel;
use homenode_load::sys;
use homenode_load::worker::{Spans, Worker};
use homenode_units::{CpuId, CpuSet, NodeId, NodeSet};

use super::guests::{Guest, Guests, Memory, Running};
use super::{Bench, REPETITIONS, Why, moving, percent_of};
use crate::section::{Bearing, Figure, Section, Topic, With};

pub(super) const METHOD: &str = "The kernel does not balance memory that is bound to a node, so a VM with bound memory is \
     compared with the same VM without: time per line, in turn. The memory of both is on one node, and their vCPU runs there, \
     and then on the node that is farthest away, from where the kernel may bring the memory to it. Without KVM, programs take the \
     place of VMs. Every fault that the kernel makes costs at least what a fault on a page in memory costs, which is measured \
     in a process.";

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
    let (with, compared) = compared(bench)?;
    figures.extend(compared);
    let median = |at: usize| figures[at].median.unwrap_or(f64::NAN);
    let means = format!(
        "With balancing, a {} takes {:.1} percent of its time without if its memory is near, and {:.1} percent if its memory is \
         far when it begins. {most}",
        match with {
            With::Processes => "program",
            With::OwnVms | With::EmulatedVms | With::NamedVms => "VM",
        },
        median(1),
        median(2)
    );
    Ok(Section::measured(
        Topic::Balancing,
        with,
        METHOD,
        means,
        Bearing::Neither,
        figures,
    ))
}

/// The same load twice: with memory that is bound to a node, and with memory that the kernel may move.
struct Pair {
    bound: Worker,
    free: Worker,
    /// Nodes of the memory and of the CPU when that is far.
    nodes: [NodeId; 2],
    /// A CPU of each node.
    cpus: [CpuId; 2],
}

impl Pair {
    /// Starts a pair of programs.
    fn of_programs(bench: &Bench<'_>, nodes: [NodeId; 2], cpus: [CpuId; 2]) -> Result<Pair, Why> {
        let kernel = Kernel::Uniform(BYTES);
        Ok(Pair {
            bound: bench.worker(kernel, cpus[0], nodes[0])?,
            free: Worker::start((bench.spawn)(kernel, cpus[0], None))?,
            nodes,
            cpus,
        })
    }

    /// Starts a pair of VMs.
    fn of_vms(guests: &Guests, nodes: [NodeId; 2], cpus: [CpuId; 2]) -> Result<Pair, Why> {
        let home: CpuSet = [cpus[0]].into_iter().collect();
        let guest = |name, memory| Guest {
            name,
            uuid: None,
            load: Kernel::Uniform(BYTES),
            vcpus: 1,
            cpus: &home,
            memory,
        };
        let both = [
            guest("homenode-evidence-bound", Memory::Bound(NodeSet::one(nodes[0]))),
            guest("homenode-evidence-free", Memory::Anywhere),
        ];
        let Running { workers, .. } = guests.start_on_kvm(&both)?;
        let [bound, free] = <[Worker; 2]>::try_from(workers).map_err(|_| Why::of("a VM is missing"))?;
        Ok(Pair {
            bound,
            free,
            nodes,
            cpus,
        })
    }

    /// Has the memory of both on the first node, and runs them on a CPU of the node with this number (0 or 1), in
    /// turn. Returns the nanoseconds per line of each, the bound one first.
    fn run(&mut self, number: usize, spans: Spans) -> Result<[f64; 2], Why> {
        let cpu: CpuSet = [self.cpus[number]].into_iter().collect();
        let [home, far] = self.nodes;
        moving::migrate(self.free.pid(), far, home)?;
        let mut ns = [0.0; 2];
        for (worker, ns) in [&mut self.bound, &mut self.free].into_iter().zip(&mut ns) {
            pin_all(worker.pid(), &cpu)?;
            worker.run(spans)?;
            *ns = worker.ns_per_line()?;
        }
        Ok(ns)
    }
}

/// Pins all threads of a process that exist now.
fn pin_all(pid: i32, cpus: &CpuSet) -> Result<(), Why> {
    let threads = task::threads(Path::new("/"), pid)
        .map_err(|error| Why::said("the threads of a program cannot be listed")(&error))?;
    for thread in threads {
        // A thread that ended meanwhile needs no CPU.
        if let Err(error) = task::set_affinity(thread.tid, cpus)
            && error.raw_os_error() != Some(libc::ESRCH)
        {
            return Err(Why::said(
                "a program cannot be moved to another CPU; run this as root",
            )(&error));
        }
    }
    Ok(())
}

/// Compares memory that is bound and memory that is not, near and far.
fn compared(bench: &mut Bench<'_>) -> Result<(With, Vec<Figure>), Why> {
    let nodes = bench.far_pair()?;
    let cpus = [bench.first_cpu(nodes[0])?, bench.first_cpu(nodes[1])?];
    (bench.told)("two VMs boot", 0.1);
    let vms = Guests::find(&bench.program, bench.kernel.as_deref())
        .and_then(|guests| Pair::of_vms(&guests, nodes, cpus));
    let (with, mut pair) = match vms {
        Ok(pair) => (With::OwnVms, pair),
        // Programs say less, but emulated VMs nothing.
        Err(_) => (With::Processes, Pair::of_programs(bench, nodes, cpus)?),
    };
    let measure_ms = (bench.budget.as_millis() / (4 * REPETITIONS as u128)) as u64;
    let spans = Spans {
        warm: 50,
        measure: measure_ms.clamp(500, 5000),
        tail: 0,
    };
    let mut figures = Vec::new();
    for (number, what) in ["near memory, with balancing", "far memory, with balancing"]
        .into_iter()
        .enumerate()
    {
        let [mut bound_ns, mut free_ns] = [const { Vec::new() }; 2];
        for at in 0..REPETITIONS {
            (bench.told)(what, 0.2 + 0.4 * (number as f64 + at as f64 / REPETITIONS as f64));
            let [bound, free] = pair.run(number, spans)?;
            bound_ns.push(bound);
            free_ns.push(free);
        }
        let figure = Figure::of(
            format!("{what}, of the same bound"),
            "percent",
            &percent_of(&bound_ns, &free_ns),
        );
        figures.push(figure);
    }
    Ok((with, figures))
}
