//! The metrics for Prometheus, each declared once. A value that is not measured is absent.

use std::collections::BTreeMap;

use homenode_control::{Phase, VmStatus};
use homenode_host::{CountedBy, KernelSettings};
use homenode_units::{NodeSet, Ns};

use super::About;
use super::exposition::{Exemplar, Exposition, Family, Format, Kind};
use crate::feed::{DURATIONS_S, Feed, LastWritten, Seen, Sums};

const PAGE_BYTES: f64 = 4096.0;

macro_rules! families {
    ($($id:ident: $kind:ident $name:literal [$($label:literal),*] $help:literal;)*) => {
        $(const $id: Family = Family { name: $name, kind: Kind::$kind, labels: &[$($label),*], help: $help };)*
        /// All metrics.
        #[cfg(test)]
        const FAMILIES: &[Family] = &[$($id),*];
    };
}

families! {
    BUILD: Info "homenode_build_info" ["version", "revision"] "The running agent.";
    CYCLES: Counter "homenode_cycles_total" [] "Completed cycles.";
    FAILED: Counter "homenode_cycles_failed_total" [] "Cycles that failed because the host could not be read.";
    REFUSED: Counter "homenode_plans_refused_total" [] "Plans that the host refused as a whole.";
    DURATION: Histogram "homenode_cycle_duration_seconds" ["phase"] "How long each phase of a cycle took.";
    SEEN: Gauge "homenode_last_cycle_timestamp_seconds" [] "Time of the last cycle, by the clock of the run.";
    PERIOD: Gauge "homenode_period_seconds" [] "Time between cycles.";
    PAUSED: Gauge "homenode_paused_seconds" [] "How much longer the agent is paused; 0 if it is not paused.";
    KERNEL: Info "homenode_kernel_info" ["numa_balancing", "transparent_huge_pages", "ksm", "zone_reclaim"] "The kernel's own memory management; unknown settings are empty.";
    VMS: Gauge "homenode_vms" [] "VMs that run.";
    DROPPED: Gauge "homenode_series_dropped" [] "Series left out of this answer because it is full.";
    DECISIONS: Counter "homenode_decisions_total" ["policy", "action", "outcome"] "Decisions, by outcome.";
    FINDINGS: Counter "homenode_findings_total" ["policy"] "Findings on which the policy does not act, counted once per period while they last.";
    NODE_MEMORY: Gauge "homenode_node_memory_bytes" ["node"] "Memory of a node.";
    NODE_FREE: Gauge "homenode_node_memory_free_bytes" ["node"] "Memory of a node that is free or reclaimable.";
    NODE_OUTSIDE_VMS: Gauge "homenode_node_memory_outside_vms_bytes" ["node"] "Used memory of a node that is no VM's guest memory.";
    NODE_CPUS: Gauge "homenode_node_cpus" ["node"] "Usable CPUs of a node.";
    NODE_BUSY: Gauge "homenode_node_cpus_busy" ["node"] "CPUs of a node that were busy over the last period.";
    NODE_WAITING: Gauge "homenode_node_vcpus_waiting" ["node"] "vCPUs that waited for a CPU of a node over the last period.";
    NODE_TRAFFIC: Counter "homenode_node_memory_traffic_bytes_total" ["node"] "Bytes that the memory controllers of a node moved.";
    NODE_BANDWIDTH_MAX: Gauge "homenode_node_memory_bandwidth_max_bytes_per_second" ["node"] "Bandwidth that a node's memory can sustain.";
    NODE_ROOM_CPUS: Gauge "homenode_node_headroom_cpus" ["node"] "CPUs of a node that a new VM could get.";
    NODE_ROOM_MEMORY: Gauge "homenode_node_headroom_memory_bytes" ["node"] "Memory of a node that a new VM could get: free, and not reserved for others.";
    NODE_ROOM_BANDWIDTH: Gauge "homenode_node_headroom_memory_bandwidth_bytes_per_second" ["node"] "Bandwidth of a node's memory controllers that a new VM could get.";
    NODE_DRAINED: Gauge "homenode_node_drained" ["node"] "1 if a node is drained, otherwise 0.";
    LINK: Counter "homenode_link_bytes_total" ["from", "to"] "Bytes that a link carried from node to node.";
    LINK_BUSY: Gauge "homenode_link_busy_ratio" ["from", "to"] "Share of a link's sustainable bandwidth that was used over the last period.";
    VM: Info "homenode_vm_info" ["domain", "uuid", "home", "memory_policy"] "A VM; without a home it is unplaced.";
    VM_MEMORY: Gauge "homenode_vm_memory_bytes" ["domain", "node"] "Touched memory of a VM on a node.";
    VM_INSTRUCTIONS: Gauge "homenode_vm_instructions_per_second" ["domain", "counted_by"] "Instructions that a VM executed per second, over the last period.";
    VM_CPI: Gauge "homenode_vm_cycles_per_instruction" ["domain", "counted_by"] "Cycles of a VM per instruction, over the last period.";
    VM_SPEED: Gauge "homenode_vm_speed_ratio" ["domain", "counted_by"] "Speed of a VM over the last period (instructions per CPU-second that it wanted), divided by its usual speed.";
    VM_LOCAL: Gauge "homenode_vm_local_access_ratio" ["domain", "counted_by"] "Share of a VM's memory accesses that were local.";
    VM_MISSES: Gauge "homenode_vm_llc_miss_ratio" ["domain", "counted_by"] "LLC misses of a VM as a share of its LLC references.";
    VM_CPUS: Gauge "homenode_vm_cpus_used" ["domain"] "CPUs that a VM used over the last period.";
    VM_WAITING: Gauge "homenode_vm_vcpus_waiting" ["domain"] "vCPUs of a VM that waited for a CPU over the last period.";
    VM_TRAFFIC: Gauge "homenode_vm_memory_traffic_bytes_per_second" ["domain", "node", "counted_by"] "Memory traffic of a VM on a node's controllers over the last period, estimated from where its memory is.";
    VM_GAINED: Counter "homenode_vm_time_gained_seconds_total" ["domain"] "CPU time that a VM saved through changes of its home, as trials measured them.";
    VM_LOST: Counter "homenode_vm_time_lost_seconds_total" ["domain"] "CPU time that a VM lost through changes of its home, as trials measured them.";
    VM_PUNISHED: Counter "homenode_vm_permit_overdrawn_total" ["domain"] "How often a VM that booked a permit went OVER.";
    VM_LIMIT: Gauge "homenode_vm_memory_limit_bytes" ["domain"] "Memory that the agent leaves a VM, if that is less than all of it.";
    VM_HOMES: Counter "homenode_vm_home_changes_total" ["domain"] "Changes of a VM's home.";
    VM_VCPU_MOVES: Counter "homenode_vm_vcpu_node_changes_total" ["domain"] "How often a vCPU of a VM was on another node than a period before.";
    VM_MOVED: Counter "homenode_vm_pages_moved_bytes_total" ["domain", "from", "to", "policy"] "Memory of a VM that was moved between nodes.";
}

/// Returns all metrics in the given format.
pub(super) fn exposition(about: &About, feed: &Feed, format: Format) -> String {
    let (seen, _) = feed.seen();
    let sums = feed.sums();
    let mut out = Exposition::new(format);
    of_agent(&mut out, about, seen.as_deref(), (&sums, &feed.last_written()));
    if let Some(seen) = &seen {
        of_nodes(&mut out, seen);
        of_vms(&mut out, &seen.status.vms);
        let name_of: BTreeMap<_, _> = seen.status.vms.iter().map(|vm| (vm.id, &vm.name)).collect();
        // After a VM is renamed, its bytes are counted under the new name.
        let mut moved = BTreeMap::<_, f64>::new();
        for ((vm, name, from, to, policy), bytes) in &sums.moved {
            let domain = name_of.get(vm).map_or(name, |name| *name).clone();
            let from = from.as_ref().map(NodeSet::to_string).unwrap_or_default();
            let labels = [domain, from, to.to_string(), (*policy).to_owned()];
            *moved.entry(labels).or_default() += *bytes as f64;
        }
        out.family(&VM_MOVED, moved);
    }
    let dropped = out.dropped_count() as f64;
    out.always(&DROPPED, dropped);
    out.finish()
}

fn of_agent(
    out: &mut Exposition,
    about: &About,
    seen: Option<&Seen>,
    (sums, written): (&Sums, &LastWritten),
) {
    out.family(
        &BUILD,
        [([about.version.to_owned(), about.commit.to_owned()], 1.0)],
    );
    out.always(&CYCLES, sums.cycles as f64);
    out.always(&FAILED, sums.failed_looks as f64);
    out.always(&REFUSED, sums.refused_plans as f64);
    out.always(&PERIOD, about.period_now(seen).0 as f64 / 1e9);
    let paused = seen.and_then(|seen| seen.status.paused_for_ns);
    out.always(&PAUSED, paused.map_or(0.0, Ns::as_secs_f64));
    let phases = sums.phases.iter();
    let phases = phases.map(|(phase, took)| (name(*phase), &took.counts[..], took.sum.as_secs_f64()));
    out.histograms(&DURATION, &DURATIONS_S, phases);
    let decisions = sums.decisions.iter();
    let decisions = decisions.map(|((policy, action, outcome), count)| {
        let labels = [policy, action, outcome].map(|label| (*label).to_owned());
        let last = written.get(&labels.clone().into()).map(|last| Exemplar {
            label: "decision_id",
            id: last.id.to_string(),
            at_s: last.wall_ns as f64 / 1e9,
        });
        (labels, *count as f64, last)
    });
    out.family_with_exemplars(&DECISIONS, decisions);
    let findings = sums.findings.iter();
    out.family(
        &FINDINGS,
        findings.map(|(policy, count)| ([(*policy).to_owned()], *count as f64)),
    );
    if let Some(seen) = seen {
        out.always(&SEEN, seen.wall_ns as f64 / 1e9);
        out.family(&KERNEL, [(kernel(&seen.status.kernel), 1.0)]);
        out.always(&VMS, seen.status.vms.len() as f64);
    }
}

fn of_nodes(out: &mut Exposition, seen: &Seen) {
    let nodes = &seen.status.nodes;
    let mut each = |family, figure: fn(&homenode_control::NodeStatus) -> Option<f64>| {
        let series = nodes
            .iter()
            .filter_map(|node| Some(([node.node.to_string()], figure(node)?)));
        out.family(family, series);
    };
    each(&NODE_MEMORY, |node| Some(node.memory_bytes.0 as f64));
    each(&NODE_FREE, |node| Some(node.memory_free_bytes.0 as f64));
    each(&NODE_OUTSIDE_VMS, |node| {
        Some(node.memory_outside_vms_bytes?.0 as f64)
    });
    each(&NODE_CPUS, |node| Some(node.cpus as f64));
    each(&NODE_BUSY, |node| node.cpus_busy);
    each(&NODE_WAITING, |node| node.vcpus_waiting);
    each(&NODE_BANDWIDTH_MAX, |node| {
        Some(node.bandwidth_max_bytes_per_s?.0 as f64)
    });
    each(&NODE_ROOM_CPUS, |node| Some(node.headroom?.cpus));
    each(&NODE_ROOM_MEMORY, |node| {
        Some(node.headroom?.memory_bytes.0 as f64)
    });
    each(&NODE_ROOM_BANDWIDTH, |node| {
        Some(node.headroom?.bandwidth_bytes_per_s?.0 as f64)
    });
    each(&NODE_DRAINED, |node| Some(f64::from(u8::from(node.is_drained))));
    let traffic = seen.node_traffic.iter();
    out.family(
        &NODE_TRAFFIC,
        traffic.map(|(node, bytes)| ([node.to_string()], *bytes as f64)),
    );
    let links = seen.links.iter();
    out.family(
        &LINK,
        links.map(|link| ([link.from.to_string(), link.to.to_string()], link.bytes as f64)),
    );
    let links = seen.status.links.iter();
    out.family(
        &LINK_BUSY,
        links.filter_map(|link| Some(([link.from.to_string(), link.to.to_string()], link.busy?))),
    );
}

fn of_vms(out: &mut Exposition, vms: &[VmStatus]) {
    let about = vms.iter().map(|vm| {
        let home = vm.home.as_ref().map(NodeSet::to_string).unwrap_or_default();
        (
            [
                vm.name.clone(),
                vm.id.to_string(),
                home,
                vm.memory_policy.to_string(),
            ],
            1.0,
        )
    });
    out.family(&VM, about);
    let memory = vms.iter().flat_map(|vm| {
        let pages = vm.pages_by_node.iter().flatten();
        pages.map(|on| {
            (
                [vm.name.clone(), on.node.to_string()],
                on.pages.0 as f64 * PAGE_BYTES,
            )
        })
    });
    out.family(&VM_MEMORY, memory);
    let mut each = |family, figure: fn(&VmStatus) -> Option<f64>| {
        out.family(
            family,
            vms.iter().filter_map(|vm| Some(([vm.name.clone()], figure(vm)?))),
        );
    };
    each(&VM_CPUS, |vm| vm.cpus_used);
    each(&VM_WAITING, |vm| vm.vcpus_waiting);
    each(&VM_GAINED, |vm| vm.time_gained_ns.map(Ns::as_secs_f64));
    each(&VM_LOST, |vm| vm.time_lost_ns.map(Ns::as_secs_f64));
    each(&VM_PUNISHED, |vm| {
        vm.permit.permit.map(|_| f64::from(vm.permit.punished_count))
    });
    each(&VM_HOMES, |vm| Some(vm.migrations.home_changes_count as f64));
    each(&VM_VCPU_MOVES, |vm| Some(vm.migrations.vcpu_moves_count as f64));
    each(&VM_LIMIT, |vm| Some(vm.memory.limit_bytes?.0 as f64));
    let mut counted = |family, figure: fn(&VmStatus) -> Option<f64>| {
        let labels = |vm: &VmStatus| [vm.name.clone(), vm.counted_by.map_or("", counter).to_owned()];
        out.family(
            family,
            vms.iter().filter_map(|vm| Some((labels(vm), figure(vm)?))),
        );
    };
    counted(&VM_INSTRUCTIONS, |vm| vm.instructions_per_s);
    counted(&VM_CPI, |vm| vm.cycles_per_instruction);
    counted(&VM_SPEED, |vm| vm.speed_ratio);
    counted(&VM_LOCAL, |vm| vm.local_access_ratio);
    counted(&VM_MISSES, |vm| vm.llc_miss_rate);
    let traffic = vms.iter().flat_map(|vm| {
        let by = vm.counted_by.map_or("", counter);
        let on_nodes = vm.traffic_by_node.iter().flatten();
        on_nodes.map(move |on| {
            let labels = [vm.name.clone(), on.node.to_string(), by.to_owned()];
            (labels, on.bytes_per_s.as_f64())
        })
    });
    out.family(&VM_TRAFFIC, traffic);
}

fn counter(by: CountedBy) -> &'static str {
    match by {
        CountedBy::Hardware => "hardware",
        CountedBy::Model => "model",
    }
}

/// Returns the label values of [`KERNEL`].
fn kernel(settings: &KernelSettings) -> [String; 4] {
    let on = |is_on: Option<bool>| {
        is_on.map_or(String::new(), |is_on| if is_on { "on" } else { "off" }.to_owned())
    };
    [
        settings
            .numa_balancing
            .map_or(String::new(), |value| value.to_string()),
        settings
            .transparent_huge_pages
            .map_or(String::new(), |value| value.to_string()),
        on(settings.merges_pages),
        on(settings.reclaims_zones),
    ]
}

fn name(phase: Phase) -> &'static str {
    match phase {
        Phase::Sample => "sample",
        Phase::Plan => "plan",
        Phase::Act => "act",
        Phase::Remember => "remember",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_has_every_metric_with_its_labels_and_help() {
        let text = include_str!("../../../../docs/API.md");
        for Family {
            name,
            kind,
            labels,
            help,
        } in FAMILIES
        {
            let labels = labels
                .iter()
                .map(|label| format!("`{label}`"))
                .collect::<Vec<_>>()
                .join(", ");
            let row = format!("| `{name}` | {} | {labels} | {help} |", kind.name());
            assert!(text.contains(&row), "docs/API.md lacks this row:\n{row}");
        }
    }

    #[test]
    fn names_end_as_their_kind_asks_for() {
        for family in FAMILIES {
            assert_eq!(
                family.name.ends_with("_total"),
                family.kind == Kind::Counter,
                "{}",
                family.name
            );
            assert_eq!(
                family.name.ends_with("_info"),
                family.kind == Kind::Info,
                "{}",
                family.name
            );
            assert!(
                family.name.starts_with("homenode_") && family.help.ends_with('.'),
                "{}",
                family.name
            );
        }
    }
}
