//! Tables of a run over time: rates between two of the agent's samples, taken at intervals.

use homenode_host::VmSample;
use pyo3::prelude::*;

use crate::one::{Moment, One};
use crate::table::{Columns, Table};

/// Returns all moments of the given runs, each with the name of the run's policies.
fn moments<'a>(runs: &'a [&'a One]) -> impl Iterator<Item = (&'a str, &'a Moment)> + Clone {
    runs.iter().flat_map(|run| {
        let of = run.over_time.iter().flatten();
        of.map(|moment| (run.trial.policy.as_str(), moment))
    })
}

/// Returns a row for each VM of each moment.
pub(crate) fn vms(runs: &[&One]) -> PyResult<Table> {
    let rows: Vec<_> = moments(runs)
        .flat_map(|(policy, moment)| moment.vms.iter().map(move |vm| (policy, moment, vm)))
        .collect();
    let rows = || rows.iter().copied();
    let rates = || rows().map(|(_, moment, vm)| moment.rates.vm(vm.id));
    let status = || rows().map(|(_, moment, vm)| moment.status.vms.iter().find(|status| status.id == vm.id));
    let home = |status: Option<&homenode_control::VmStatus>| Some(status?.home.as_ref()?.to_string());
    let on_nodes = |vm: &VmSample| {
        Some(
            vm.pages
                .as_ref()?
                .values()
                .map(|pages| pages.to_bytes().0)
                .sum::<u64>(),
        )
    };
    Columns::default()
        .words(
            "policy",
            "policies of the run",
            rows().map(|(policy, ..)| policy.to_owned()),
        )
        .numbers(
            "at_s",
            "end of the stretch that rates are of, in simulated seconds",
            rows().map(|(_, at, _)| at.at.as_secs_f64()),
        )
        .words("vm", "its name", rows().map(|(.., vm)| vm.name.clone()))
        .words(
            "home",
            "home nodes, in list format; none if it is unplaced",
            status().map(home),
        )
        .numbers(
            "cpus_used",
            "CPUs' worth of time that it used",
            rates().map(|vm| Some(vm?.cpus_used)),
        )
        .numbers(
            "vcpus_waiting",
            "vCPUs that waited for a CPU, on average",
            rates().map(|vm| vm?.vcpus.iter().map(|vcpu| vcpu.waiting).sum::<Option<f64>>()),
        )
        .numbers(
            "instructions_per_s",
            "instructions of all its vCPUs",
            rates().map(|vm| vm?.instructions_per_s),
        )
        .numbers(
            "llc_miss_rate",
            "LLC misses over references, in [0, 1]",
            rates().map(|vm| vm?.llc_miss_rate),
        )
        .numbers(
            "llc_misses_per_s",
            "LLC misses",
            rates().map(|vm| vm?.llc_misses_per_s),
        )
        .numbers(
            "local_access_ratio",
            "share of memory accesses that were local, in [0, 1]",
            rates().map(|vm| vm?.local_access_ratio),
        )
        .counts(
            "memory_touched_bytes",
            "memory that it has on nodes, where known",
            rows().map(|(.., vm)| on_nodes(vm)),
        )
        .table()
}

/// Returns a row for each VM and node of each moment: where its memory is.
pub(crate) fn memory(runs: &[&One]) -> PyResult<Table> {
    let rows: Vec<_> = moments(runs)
        .flat_map(|(policy, moment)| moment.vms.iter().map(move |vm| (policy, moment, vm)))
        .flat_map(|(policy, moment, vm)| {
            let pages = vm.pages.iter().flat_map(homenode_units::NodeMap::iter);
            pages.map(move |(node, pages)| (policy, moment, vm, node, pages.to_bytes()))
        })
        .collect();
    let rows = || rows.iter().copied();
    Columns::default()
        .words(
            "policy",
            "policies of the run",
            rows().map(|(policy, ..)| policy.to_owned()),
        )
        .numbers(
            "at_s",
            "simulated seconds",
            rows().map(|(_, moment, ..)| moment.at.as_secs_f64()),
        )
        .words("vm", "its name", rows().map(|(_, _, vm, ..)| vm.name.clone()))
        .counts(
            "node",
            "the node's number",
            rows().map(|(.., node, _)| u64::from(node.0)),
        )
        .counts(
            "memory_bytes",
            "what it has there",
            rows().map(|(.., bytes)| bytes.0),
        )
        .table()
}

/// Returns a row for each node of each moment.
pub(crate) fn nodes(runs: &[&One]) -> PyResult<Table> {
    let rows: Vec<_> = moments(runs)
        .flat_map(|(policy, moment)| {
            moment
                .rates
                .nodes
                .iter()
                .map(move |(node, of)| (policy, moment, node, of))
        })
        .collect();
    let rows = || rows.iter().copied();
    let free = |(_, moment, node, _): (_, &Moment, _, _)| {
        let status = moment.status.nodes.iter().find(|status| status.node == node);
        status.map(|status| status.memory_free_bytes.0)
    };
    Columns::default()
        .words(
            "policy",
            "policies of the run",
            rows().map(|(policy, ..)| policy.to_owned()),
        )
        .numbers(
            "at_s",
            "end of the stretch that rates are of, in simulated seconds",
            rows().map(|(_, moment, ..)| moment.at.as_secs_f64()),
        )
        .counts(
            "node",
            "its number",
            rows().map(|(.., node, _)| u64::from(node.0)),
        )
        .numbers(
            "cpus_busy",
            "CPUs that were busy, on average",
            rows().map(|(.., of)| of.cpus_busy),
        )
        .numbers(
            "vcpus_waiting",
            "vCPUs that waited for one of its CPUs, on average",
            rows().map(|(.., of)| of.vcpus_waiting),
        )
        .numbers(
            "bandwidth_bytes_per_s",
            "data rate of its memory controllers, where counted",
            rows().map(|(.., of)| of.bandwidth.map(homenode_units::BytesPerSec::as_f64)),
        )
        .counts(
            "memory_free_bytes",
            "memory that is free at the end of the stretch",
            rows().map(free),
        )
        .table()
}

/// Returns a row for each direction of each link of each moment.
pub(crate) fn links(runs: &[&One]) -> PyResult<Table> {
    let rows: Vec<_> = moments(runs)
        .flat_map(|(policy, moment)| moment.rates.links.iter().map(move |link| (policy, moment, link)))
        .collect();
    let rows = || rows.iter().copied();
    Columns::default()
        .words(
            "policy",
            "policies of the run",
            rows().map(|(policy, ..)| policy.to_owned()),
        )
        .numbers(
            "at_s",
            "end of the stretch that rates are of, in simulated seconds",
            rows().map(|(_, moment, _)| moment.at.as_secs_f64()),
        )
        .counts(
            "from",
            "node it comes from",
            rows().map(|(.., link)| u64::from(link.from.0)),
        )
        .counts(
            "to",
            "node it goes to",
            rows().map(|(.., link)| u64::from(link.to.0)),
        )
        .numbers(
            "bandwidth_bytes_per_s",
            "data rate",
            rows().map(|(.., link)| link.bandwidth.as_f64()),
        )
        .table()
}
