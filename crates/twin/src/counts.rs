//! Counts of a host, and the report of what it did since a mark.

use homenode_machine::Machine;
use homenode_policy::permits::Account;
use homenode_units::{BytesPerSec, Ns, Pages, Permit};

use crate::engine::Engine;
use crate::guest::{Life, RequestTimes, Vm};
use crate::index::{CpuIx, IxVec, VmIx, first};
use crate::report::{
    BalancingReport, FlipReport, LinkReport, MemoryReport, NodeReport, PermitReport, ReleaseReport,
    RequestReport, StartReport, TwinReport, VmReport,
};

/// Counts of a host at one point in time; the difference of two of them is what happened in between.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counts {
    at: Ns,
    controllers: Vec<f64>,
    links: Vec<f64>,
    busy_ns: IxVec<CpuIx, u64>,
    /// Sum over time of the most loaded link's load, each load multiplied by the seconds that it was measured over.
    busiest: f64,
    busiest_seconds: f64,
    vms: Vec<VmCounts>,
}

#[derive(Clone, Debug, Default)]
struct VmCounts {
    instructions: f64,
    references: f64,
    misses: f64,
    local: f64,
    by_node: Vec<f64>,
    guest_pages_moved: u64,
    vcpus_drawn: u64,
    guest_scan_ns: f64,
    host_pages_moved: u64,
    node_changes: u64,
    waiting_ns: u64,
    io_bytes: f64,
    requests: RequestTimes,
    throttled_ns: u64,
    used_units: u64,
    punished_count: u32,
}

impl Counts {
    /// Returns what a host has counted since its start. The host must be settled.
    pub(crate) fn of(engine: &Engine) -> Counts {
        let now = engine.now;
        Counts {
            at: now,
            controllers: engine.totals.controllers(),
            links: engine.link_bytes(),
            busy_ns: engine
                .topology
                .cpus
                .places()
                .map(|cpu| engine.scheduler.queues.busy_ns(cpu, now))
                .collect(),
            busiest: engine.totals.busiest.sum,
            busiest_seconds: engine.totals.busiest.seconds,
            vms: engine.vms.places().map(|vm| VmCounts::of(engine, vm)).collect(),
        }
    }

    /// Returns what was counted since an earlier point. The default counts stand for the host's start.
    fn since(mut self, earlier: &Counts) -> Counts {
        self.at = Ns(self.at.0 - earlier.at.0);
        less(&mut self.controllers, &earlier.controllers);
        less(&mut self.links, &earlier.links);
        for (now, then) in self.busy_ns.iter_mut().zip(&earlier.busy_ns) {
            *now -= then;
        }
        self.busiest -= earlier.busiest;
        self.busiest_seconds -= earlier.busiest_seconds;
        for (now, then) in self.vms.iter_mut().zip(&earlier.vms) {
            now.instructions -= then.instructions;
            now.references -= then.references;
            now.misses -= then.misses;
            now.local -= then.local;
            less(&mut now.by_node, &then.by_node);
            now.guest_pages_moved -= then.guest_pages_moved;
            now.vcpus_drawn -= then.vcpus_drawn;
            now.guest_scan_ns -= then.guest_scan_ns;
            now.host_pages_moved -= then.host_pages_moved;
            now.node_changes -= then.node_changes;
            now.waiting_ns -= then.waiting_ns;
            now.io_bytes -= then.io_bytes;
            now.requests.less(&then.requests);
            now.throttled_ns -= then.throttled_ns;
            // A VM that was stopped and started again has a new account.
            now.used_units = now.used_units.saturating_sub(then.used_units);
            now.punished_count = now.punished_count.saturating_sub(then.punished_count);
        }
        self
    }
}

impl VmCounts {
    fn of(engine: &Engine, number: VmIx) -> VmCounts {
        let vm = &engine.vms[number];
        let account = engine
            .permits
            .as_ref()
            .and_then(|permits| permits.account(number));
        let tasks = vm.tasks();
        let by_guest = vm.autonuma.as_ref().map(|autonuma| autonuma.counts);
        let by_guest = by_guest.unwrap_or_default();
        VmCounts {
            instructions: vm.threads.iter().map(|t| t.instructions).sum(),
            references: vm.threads.iter().map(|t| t.llc_references).sum(),
            misses: vm.threads.iter().map(|t| t.llc_misses).sum(),
            local: vm.counts.local,
            by_node: vm.counts.accesses.clone(),
            guest_pages_moved: by_guest.moved,
            vcpus_drawn: vm.counts.vcpus_drawn,
            guest_scan_ns: by_guest.scan_ns,
            host_pages_moved: vm.counts.pages_moved,
            node_changes: tasks
                .clone()
                .map(|task| engine.scheduler.queues.tasks[task].node_changes)
                .sum(),
            waiting_ns: tasks
                .clone()
                .map(|task| engine.scheduler.queues.tasks[task].waiting_ns(engine.now))
                .sum(),
            io_bytes: vm.threads.iter().map(|t| t.requests.bytes).sum(),
            requests: vm.counts.requests.clone(),
            throttled_ns: tasks
                .map(|task| engine.scheduler.queues.tasks[task].throttled_ns(engine.now))
                .sum(),
            used_units: account.map_or(0, Account::used_units),
            punished_count: account.map_or(0, Account::punished_count),
        }
    }
}

fn less(counts: &mut [f64], earlier: &[f64]) {
    for (now, then) in counts.iter_mut().zip(earlier) {
        *now -= then;
    }
}

/// Returns the imbalance of the counts over the nodes that have memory.
fn imbalance(machine: &Machine, counts: &[f64]) -> Option<f64> {
    let with_memory = machine.nodes.values().map(|node| node.memory_bytes.0 > 0);
    let counts: Vec<f64> = counts
        .iter()
        .zip(with_memory)
        .filter_map(|(count, has)| has.then_some(*count))
        .collect();
    homenode_host::imbalance(&counts)
}

/// Reports what a host did since a mark. The host must be settled.
pub(crate) fn report(
    machine: &Machine,
    scenario: &str,
    seed: u64,
    engine: &Engine,
    mark: &Counts,
) -> TwinReport {
    let counts = Counts::of(engine).since(mark);
    let seconds = counts.at.as_secs_f64().max(1e-9);
    let mut accesses = vec![0.0; machine.nodes.len()];
    for vm in &counts.vms {
        for (sum, count) in accesses.iter_mut().zip(&vm.by_node) {
            *sum += count;
        }
    }
    let nodes = machine.nodes.keys().enumerate().map(|(at, node)| {
        let busy = |cpu: &CpuIx| counts.busy_ns[*cpu] as f64 / 1e9;
        let report = NodeReport {
            bandwidth_bytes_per_s: BytesPerSec((counts.controllers[at] / seconds) as u64),
            cpus_busy: engine.topology.node_cpus[at].iter().map(busy).sum::<f64>() / seconds,
            accesses: accesses[at] as u64,
        };
        (node, report)
    });
    let links = engine.topology.links.iter().zip(&engine.topology.link_caps);
    let links = links.zip(&counts.links).map(|((link, cap), bytes)| LinkReport {
        from: link.from,
        to: link.to,
        bytes: *bytes as u64,
        load: cap.is_finite().then(|| bytes / (cap * 1e9 * seconds)),
    });
    let vms = engine.vms.iter().zip(&counts.vms);
    TwinReport {
        scenario: scenario.to_owned(),
        machine: machine.name.clone(),
        seed,
        epoch_ns: engine.epochs.length,
        at_ns: engine.now,
        measured_from_ns: mark.at,
        vms: first(engine.vms.len())
            .zip(vms)
            .map(|(at, (vm, counts))| VmReport {
                permit: report_permit(engine, at, counts, seconds),
                ..report_vm(machine, vm, counts, (mark.at, engine.now))
            })
            .collect(),
        nodes: nodes.collect(),
        links: links.collect(),
        imbalance: imbalance(machine, &accesses),
        interconnect_load: ratio(counts.busiest, counts.busiest_seconds),
        events: engine.script.log.clone(),
        notes: engine.notes.clone(),
    }
}

fn report_permit(engine: &Engine, vm: VmIx, counts: &VmCounts, seconds: f64) -> Option<PermitReport> {
    let permits = engine.permits.as_ref()?;
    let (booked, account) = (permits.permit(vm)?, permits.account(vm)?);
    Some(PermitReport {
        booked,
        used_per_slice: counts.used_units as f64 * Permit::SLICE.as_secs_f64() / seconds,
        punished_count: counts.punished_count,
        balance_units: account.balance_units(),
        throttled_s: counts.throttled_ns as f64 / 1e9,
    })
}

fn ratio(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole)
}

fn report_start(life: &Life, (mark, now): (Ns, Ns)) -> StartReport {
    let ran_s: Option<f64> = life.runtimes_s.iter().copied().sum();
    let arrival_s = life.arrived.as_secs_f64();
    let end_s = life.left.unwrap_or(now).as_secs_f64();
    let until_s = ran_s.map_or(end_s, |ran_s| (arrival_s + ran_s).min(end_s));
    StartReport {
        arrival_s,
        runtimes_s: life.runtimes_s.clone(),
        busy_s: (until_s - arrival_s.max(mark.as_secs_f64())).max(0.0),
    }
}

fn report_requests(times: &RequestTimes) -> Option<RequestReport> {
    Some(RequestReport {
        count: times.count(),
        mean_ms: times.mean_ns()? / 1e6,
        p50_ms: times.quantile_ns(0.5)? / 1e6,
        p99_ms: times.quantile_ns(0.99)? / 1e6,
    })
}

/// Reports on one VM; `since` holds the time of the mark and the present time.
fn report_vm(machine: &Machine, vm: &Vm, counts: &VmCounts, since: (Ns, Ns)) -> VmReport {
    let by_node = machine.nodes.keys().zip(&counts.by_node);
    VmReport {
        name: vm.name.clone(),
        workload: vm.course.workload.clone(),
        arrival_s: vm.arrived.map(Ns::as_secs_f64),
        runtime_s: vm.course.runtime_s(),
        starts: vm.lives().map(|life| report_start(&life, since)).collect(),
        memory_policy: vm.memory_policy,
        policy_changes: vm.counts.policy_changes,
        programs: if vm.course.is_only() {
            Vec::new()
        } else {
            vm.programs().collect()
        },
        driver_domain: vm.channel.as_ref().map(|channel| FlipReport {
            pages_flipped: channel.flipped,
            pages_copied: channel.copied,
            backend_s: channel.backend_ns / 1e9,
            pages_away: vm.memory.pages_away(),
            pool_pages: vm.memory.pool_pages(),
            pages_used_max: channel.used_max,
        }),
        instructions_g: counts.instructions / 1e9,
        llc_miss_rate: ratio(counts.misses, counts.references),
        local_access_ratio: ratio(counts.local, counts.by_node.iter().sum()),
        accesses_by_node: by_node.map(|(node, count)| (node, *count as u64)).collect(),
        imbalance: imbalance(machine, &counts.by_node),
        guest_pages_moved: counts.guest_pages_moved,
        vcpus_drawn: counts.vcpus_drawn,
        guest_scan_s: counts.guest_scan_ns / 1e9,
        host_pages_moved: counts.host_pages_moved,
        balancing: vm.host.autonuma.as_ref().map(|autonuma| BalancingReport {
            passes: autonuma.counts.passes,
            pages_marked: autonuma.counts.marked as u64,
            faults: autonuma.counts.faults as u64,
            faults_local: autonuma.counts.local as u64,
            pages_moved: autonuma.counts.moved,
            scan_s: autonuma.counts.scan_ns / 1e9,
        }),
        releases: vm.releases.as_ref().map(|releases| ReleaseReport {
            released: releases.counts.released,
            invalidated: releases.counts.invalidated,
            sending_s: releases.counts.sending_ns / 1e9,
            invalidating_s: releases.counts.invalidating_ns / 1e9,
        }),
        node_changes: counts.node_changes,
        waiting_s: counts.waiting_ns as f64 / 1e9,
        io_bytes: counts.io_bytes as u64,
        requests: report_requests(&counts.requests),
        permit: None,
        memory: vm.limits.floor.map(|_| MemoryReport {
            given_bytes: vm.memory_bytes,
            held_bytes: Pages(vm.memory.pages().iter().sum()).to_bytes(),
            faults: vm.swap.faults as u64,
        }),
    }
}
