//! Results of a scenario's runs, and their tables.

use homenode_control::{Config, Event};
use homenode_search::trial::{Simulation, Trial};
use homenode_twin::{EventResult, Setup, TwinReport, VmReport};
use pyo3::prelude::*;

use crate::errors::bad_input;
use crate::one::One;
use crate::over_time;
use crate::table::{Columns, Table};
use crate::values;

/// Rows of a table, each with the run that it belongs to.
type Rows<'a, T> = Vec<(&'a One, T)>;

fn rows<'a, T, I: IntoIterator<Item = T>>(runs: &[&'a One], of: impl Fn(&'a TwinReport) -> I) -> Rows<'a, T> {
    let of_run = |run: &&'a One| {
        let run = *run;
        of(&run.trial.report)
            .into_iter()
            .map(move |row| (run, row))
            .collect::<Vec<_>>()
    };
    runs.iter().flat_map(of_run).collect()
}

fn with_policy<T>(rows: &Rows<'_, T>) -> Columns {
    let policies = rows.iter().map(|(run, _)| run.trial.policy.clone());
    Columns::default().words("policy", "policies of the run", policies)
}

fn vms(runs: &[&One]) -> PyResult<Table> {
    let rows = rows(runs, |report| &report.vms);
    let vms = || rows.iter().map(|(_, vm)| *vm);
    let permit =
        |of: fn(&homenode_twin::PermitReport) -> f64| move |vm: &VmReport| vm.permit.as_ref().map(of);
    with_policy(&rows)
        .words("vm", "its name", vms().map(|vm| vm.name.clone()))
        .words("workload", "what runs in it", vms().map(|vm| vm.workload.clone()))
        .numbers("arrival_s", "when it was started last; none where it never was", vms().map(|vm| vm.arrival_s))
        .numbers("runtime_s", "how long its last program ran, from its first page touched to its end; none where it did not end", vms().map(|vm| vm.runtime_s))
        .numbers("whole_s", "time of all programs over all starts; none where one did not end", vms().map(VmReport::whole_s))
        .numbers("busy_s", "time in which its instructions were made", vms().map(VmReport::busy_s))
        .numbers("instructions_g", "instructions over all vCPUs, in thousand millions", vms().map(|vm| vm.instructions_g))
        .numbers("llc_miss_rate", "LLC misses over references, in [0, 1]", vms().map(|vm| vm.llc_miss_rate))
        .numbers("local_access_ratio", "share of memory accesses that went to the node of the vCPU, in [0, 1]", vms().map(|vm| vm.local_access_ratio))
        .numbers("imbalance", "standard deviation over mean of its accesses by node", vms().map(|vm| vm.imbalance))
        .words("memory_policy", "its memory policy at the end", vms().map(|vm| vm.memory_policy.to_string()))
        .counts("policy_changes", "how often it was given another", vms().map(|vm| u64::from(vm.policy_changes)))
        .counts("guest_pages_moved", "pages that its guest's kernel moved", vms().map(|vm| vm.guest_pages_moved))
        .numbers("guest_scan_s", "CPU time that looking for them took", vms().map(|vm| vm.guest_scan_s))
        .counts("host_pages_moved", "pages that the host moved for a policy", vms().map(|vm| vm.host_pages_moved))
        .counts("vcpus_drawn", "how often the host's AutoNUMA moved a vCPU to its memory", vms().map(|vm| vm.vcpus_drawn))
        .counts("hint_faults", "uses of marked pages, where the host's kernel balances memory", vms().map(|vm| vm.balancing.map_or(0, |balancing| balancing.faults)))
        .counts("node_changes", "how often its vCPUs changed nodes", vms().map(|vm| vm.node_changes))
        .numbers("waiting_s", "time that its vCPUs were runnable and did not run, summed over them", vms().map(|vm| vm.waiting_s))
        .counts("io_bytes", "bytes that it asked devices for", vms().map(|vm| vm.io_bytes))
        .words("permit", "what it booked, if it did", vms().map(|vm| vm.permit.map(|permit| permit.booked.to_string())))
        .numbers("permit_used_per_slice", "what it was debited per slice of 30 ms, on average: LLC misses, or bytes", vms().map(permit(|permit| permit.used_per_slice)))
        .counts("permit_punished_count", "how often it was punished", vms().map(|vm| vm.permit.map(|permit| permit.punished_count.into())))
        .numbers("permit_throttled_s", "time that it was kept from running for it", vms().map(permit(|permit| permit.throttled_s)))
        .counts("memory_given_bytes", "memory of its guest at the end, where some may be taken", vms().map(|vm| vm.memory.map(|memory| memory.given_bytes.0)))
        .counts("memory_held_bytes", "memory of the host's that it has then", vms().map(|vm| vm.memory.map(|memory| memory.held_bytes.0)))
        .counts("memory_faults", "pages that it read back from swap", vms().map(|vm| vm.memory.map(|memory| memory.faults)))
        .table()
}

fn accesses(runs: &[&One]) -> PyResult<Table> {
    let rows = rows(runs, |report| {
        report.vms.iter().flat_map(|vm| {
            let nodes = vm.accesses_by_node.iter();
            nodes.map(move |(node, accesses)| (vm, node, *accesses))
        })
    });
    let cells = || rows.iter().map(|(_, row)| *row);
    with_policy(&rows)
        .words("vm", "its name", cells().map(|(vm, ..)| vm.name.clone()))
        .counts(
            "node",
            "node whose memory answered",
            cells().map(|(_, node, _)| u64::from(node.0)),
        )
        .counts(
            "accesses",
            "memory accesses",
            cells().map(|(.., accesses)| accesses),
        )
        .table()
}

fn nodes(runs: &[&One]) -> PyResult<Table> {
    let rows = rows(runs, |report| report.nodes.iter());
    let nodes = || rows.iter().map(|(_, row)| *row);
    with_policy(&rows)
        .counts("node", "its number", nodes().map(|(node, _)| u64::from(node.0)))
        .numbers(
            "bandwidth_bytes_per_s",
            "mean data rate of its memory controllers",
            nodes().map(|(_, of)| of.bandwidth_bytes_per_s.as_f64()),
        )
        .numbers(
            "cpus_busy",
            "CPUs that were busy, on average",
            nodes().map(|(_, of)| of.cpus_busy),
        )
        .counts(
            "accesses",
            "memory accesses that its memory answered",
            nodes().map(|(_, of)| of.accesses),
        )
        .table()
}

fn links(runs: &[&One]) -> PyResult<Table> {
    let rows = rows(runs, |report| &report.links);
    let links = || rows.iter().map(|(_, link)| *link);
    with_policy(&rows)
        .counts(
            "from",
            "node it comes from",
            links().map(|link| u64::from(link.from.0)),
        )
        .counts("to", "node it goes to", links().map(|link| u64::from(link.to.0)))
        .counts("bytes", "bytes that it carried", links().map(|link| link.bytes))
        .numbers(
            "load",
            "mean load, in [0, 1]; none where its bandwidth is unknown",
            links().map(|link| link.load),
        )
        .table()
}

fn events(runs: &[&One]) -> PyResult<Table> {
    let result = |result: EventResult| match result {
        EventResult::Done => "done",
        EventResult::Running => "running",
        EventResult::Partly => "partly",
        EventResult::Skipped => "skipped",
    };
    let rows = rows(runs, |report| &report.events);
    let events = || rows.iter().map(|(_, event)| *event);
    with_policy(&rows)
        .numbers("at_s", "when it came", events().map(|event| event.at_s))
        .words("vm", "whose it was", events().map(|event| event.vm.clone()))
        .words(
            "event",
            "what it was, as in the scenario",
            events().map(|event| event.event.to_owned()),
        )
        .words(
            "result",
            "done, running, partly or skipped",
            events().map(|event| result(event.result).to_owned()),
        )
        .words(
            "note",
            "what there is to say of it",
            events().map(|event| event.note.clone()),
        )
        .table()
}

fn starts(runs: &[&One]) -> PyResult<Table> {
    let rows = rows(runs, |report| {
        let of_vm = |vm: &'_ VmReport| -> Vec<(String, u64, f64, f64, u64, Option<f64>)> {
            let starts = vm.starts.iter().enumerate();
            let programs = starts.flat_map(|(at, start)| {
                let programs = start.runtimes_s.iter().enumerate();
                programs.map(move |(program, runtime)| {
                    (at as u64, start.arrival_s, start.busy_s, program as u64, *runtime)
                })
            });
            programs
                .map(|(at, arrival, busy, program, runtime)| {
                    (vm.name.clone(), at, arrival, busy, program, runtime)
                })
                .collect()
        };
        report.vms.iter().flat_map(of_vm).collect::<Vec<_>>()
    });
    let cells = || rows.iter().map(|(_, row)| row);
    with_policy(&rows)
        .words("vm", "its name", cells().map(|row| row.0.clone()))
        .counts("start", "which start, from 0", cells().map(|row| row.1))
        .numbers("arrival_s", "when it was", cells().map(|row| row.2))
        .numbers(
            "busy_s",
            "from then, or the end of the warm-up, to the end of its programs, its stop or the run's end",
            cells().map(|row| row.3),
        )
        .counts(
            "program",
            "which of its programs, from 0",
            cells().map(|row| row.4),
        )
        .numbers(
            "runtime_s",
            "how long it ran; none where it did not end",
            cells().map(|row| row.5),
        )
        .table()
}

fn decisions(runs: &[&One]) -> PyResult<Table> {
    let rows: Vec<_> = runs
        .iter()
        .flat_map(|run| run.said.iter().map(move |(at, event)| (*run, (*at, event))))
        .filter_map(|(run, (at, event))| match event {
            Event::Decided {
                name,
                decision,
                result,
            } => Some((run, (at, name, decision, result))),
            _ => None,
        })
        .collect();
    let cells = || rows.iter().map(|(_, row)| *row);
    let json = |value: &dyn Fn() -> serde_json::Result<String>| value().unwrap_or_default();
    with_policy(&rows)
        .numbers("at_s", "when it was decided", cells().map(|row| row.0))
        .words(
            "by",
            "which policy decided",
            cells().map(|(_, _, decision, _)| decision.policy.to_owned()),
        )
        .words("vm", "the VM acted on", cells().map(|(_, name, ..)| name.clone()))
        .words(
            "action",
            "what to do, as JSON",
            cells().map(|(_, _, decision, _)| json(&|| serde_json::to_string(&decision.action.act))),
        )
        .words(
            "reason",
            "why",
            cells().map(|(_, _, decision, _)| decision.reason.clone()),
        )
        .words(
            "result",
            "its outcome, as JSON",
            cells().map(|(.., result)| json(&|| serde_json::to_string(result))),
        )
        .table()
}

fn said(runs: &[&One]) -> PyResult<Table> {
    let rows: Vec<_> = runs
        .iter()
        .flat_map(|run| run.said.iter().map(move |said| (*run, said)))
        .collect();
    let cells = || rows.iter().map(|(_, said)| *said);
    with_policy(&rows)
        .numbers("at_s", "when", cells().map(|said| said.0))
        .words(
            "text",
            "what the agent said: decisions, findings, refusals, VMs that came and went",
            cells().map(|said| said.1.to_string()),
        )
        .table()
}

fn summary(runs: &[&One]) -> PyResult<Table> {
    let trials = || runs.iter().map(|run| &run.trial);
    Columns::default()
        .words(
            "policy",
            "policies of the run",
            trials().map(|trial| trial.policy.clone()),
        )
        .numbers(
            "at_s",
            "when it ended",
            trials().map(|trial| trial.report.at_ns.as_secs_f64()),
        )
        .counts(
            "decisions",
            "decisions that were carried out",
            trials().map(|trial| trial.decisions as u64),
        )
        .numbers(
            "relative_runtime_mean",
            "mean over VMs whose programs ended of runtime over that of the first run",
            trials().map(|trial| trial.relative_runtime_mean),
        )
        .counts(
            "ended_count",
            "number of these VMs",
            trials().map(|trial| trial.ended_count as u64),
        )
        .numbers(
            "relative_instructions_mean",
            "mean over the others of instructions per second over those of the first run",
            trials().map(|trial| trial.relative_instructions_mean),
        )
        .counts(
            "not_ended_count",
            "number of these VMs",
            trials().map(|trial| trial.not_ended_count as u64),
        )
        .numbers(
            "imbalance",
            "standard deviation over mean of all accesses by node",
            trials().map(|trial| trial.report.imbalance),
        )
        .numbers(
            "interconnect_load",
            "mean over seconds of the load of the most loaded link, in [0, 1]",
            trials().map(|trial| trial.report.interconnect_load),
        )
        .table()
}

/// Returns the table with this name for the given runs.
fn table(name: &str, runs: &[&One]) -> PyResult<Table> {
    if name.ends_with("_over_time") && runs.iter().any(|run| run.over_time.is_none()) {
        return Err(bad_input(format!(
            "{name} was not asked for: give `simulate` a time, such as every=\"1s\""
        )));
    }
    match name {
        "vms" => vms(runs),
        "accesses" => accesses(runs),
        "nodes" => nodes(runs),
        "links" => links(runs),
        "events" => events(runs),
        "starts" => starts(runs),
        "decisions" => decisions(runs),
        "said" => said(runs),
        "vms_over_time" => over_time::vms(runs),
        "memory_over_time" => over_time::memory(runs),
        "nodes_over_time" => over_time::nodes(runs),
        "links_over_time" => over_time::links(runs),
        _ => summary(runs),
    }
}

/// Results of a scenario under one or several sets of policies.
#[pyclass(frozen, module = "homenode._native")]
#[derive(Debug)]
pub struct Simulated {
    pub setup: Setup,
    pub config: Config,
    pub runs: Vec<One>,
}

impl Simulated {
    /// Returns the run at this position, or all runs.
    fn chosen(&self, at: Option<usize>) -> Vec<&One> {
        self.runs
            .iter()
            .enumerate()
            .filter(|(own, _)| at.is_none_or(|at| at == *own))
            .map(|(_, run)| run)
            .collect()
    }
}

#[pymethods]
impl Simulated {
    /// Names of the runs' policies, in order.
    fn policies(&self) -> Vec<&str> {
        self.runs.iter().map(|run| run.trial.policy.as_str()).collect()
    }

    /// A table of the run at this position, or of all.
    #[pyo3(signature = (name, at=None))]
    fn table(&self, name: &str, at: Option<usize>) -> PyResult<Table> {
        table(name, &self.chosen(at))
    }

    /// The runs as a dictionary, as printed by `homenode sim --json`.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let trials: Vec<&Trial> = self.runs.iter().map(|run| &run.trial).collect();
        let built = (env!("CARGO_PKG_VERSION"), homenode_sweep::COMMIT);
        values::document(
            py,
            "simulation",
            &Simulation::of(&self.setup, &self.config, trials, built),
        )
    }
}
