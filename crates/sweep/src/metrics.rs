//! The results that are recorded for a run. Every figure that a table may have is declared here, once.

use homenode_reproduce::engine::Run;
use homenode_twin::{NodeReport, VmReport};
use homenode_units::Candidates;
use serde::{Deserialize, Serialize};

/// The object to which a figure belongs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Of {
    /// A VM, by name.
    Vm(String),
    /// A node.
    Node(u32),
    /// The host.
    Host,
}

/// A figure: its name, which ends in its unit, and its meaning.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// The metric's name.
    pub name: &'static str,
    /// The metric's meaning.
    pub about: &'static str,
    from: From,
}

#[derive(Clone, Copy, Debug)]
enum From {
    Vm(fn(&VmReport) -> Option<f64>),
    Node(fn(&NodeReport) -> f64),
    Host(fn(&Run) -> Option<f64>),
}

const fn vm(name: &'static str, about: &'static str, from: fn(&VmReport) -> Option<f64>) -> Metric {
    let from = From::Vm(from);
    Metric { name, about, from }
}

const fn node(name: &'static str, about: &'static str, from: fn(&NodeReport) -> f64) -> Metric {
    let from = From::Node(from);
    Metric { name, about, from }
}

const fn host(name: &'static str, about: &'static str, from: fn(&Run) -> Option<f64>) -> Metric {
    let from = From::Host(from);
    Metric { name, about, from }
}

/// All metrics. The first two are the default metrics for comparing VMs.
const METRICS: [Metric; 21] = [
    vm(
        "runtime_s",
        "how long its last program ran; missing where it did not end",
        |vm| vm.runtime_s,
    ),
    vm(
        "instructions_g_per_s",
        "thousand millions of instructions per second that it had work",
        VmReport::speed,
    ),
    vm("instructions_g", "instructions, in thousand millions", |vm| {
        Some(vm.instructions_g)
    }),
    vm("busy_s", "time that it had work", |vm| Some(vm.busy_s())),
    vm(
        "waiting_s",
        "time that its vCPUs were runnable and did not run, summed",
        |vm| Some(vm.waiting_s),
    ),
    vm("llc_miss_rate", "LLC misses over references, in [0, 1]", |vm| {
        vm.llc_miss_rate
    }),
    vm(
        "local_access_ratio",
        "share of accesses to the vCPU's own node, in [0, 1]",
        |vm| vm.local_access_ratio,
    ),
    vm(
        "imbalance",
        "of its accesses by node: standard deviation over mean",
        |vm| vm.imbalance,
    ),
    vm("node_changes", "how often its vCPUs changed nodes", |vm| {
        Some(vm.node_changes as f64)
    }),
    vm(
        "host_pages_moved",
        "pages that the host moved for a policy",
        |vm| Some(vm.host_pages_moved as f64),
    ),
    vm("guest_pages_moved", "pages that its guest's kernel moved", |vm| {
        Some(vm.guest_pages_moved as f64)
    }),
    vm("io_bytes", "bytes that it asked devices for", |vm| {
        Some(vm.io_bytes as f64)
    }),
    vm(
        "permit_used_per_slice",
        "what its permit was debited per slice: misses, or bytes",
        |vm| vm.permit.map(|permit| permit.used_per_slice),
    ),
    vm(
        "permit_punished_count",
        "how often it went OVER its permit",
        |vm| vm.permit.map(|permit| f64::from(permit.punished_count)),
    ),
    vm(
        "permit_throttled_s",
        "time that its permit kept its vCPUs from running, summed",
        |vm| vm.permit.map(|permit| permit.throttled_s),
    ),
    node("cpus_busy", "a node's CPUs that were busy, on average", |node| {
        node.cpus_busy
    }),
    node(
        "bandwidth_bytes_per_s",
        "data rate of a node's memory controllers",
        |node| node.bandwidth_bytes_per_s.as_f64(),
    ),
    node("accesses", "memory accesses that a node answered", |node| {
        node.accesses as f64
    }),
    host("host_imbalance", "of the accesses of all VMs by node", |run| {
        run.report.imbalance
    }),
    host(
        "interconnect_load",
        "load of the busiest link, mean over seconds, in [0, 1]",
        |run| run.report.interconnect_load,
    ),
    host("decisions", "decisions that were carried out", |run| {
        Some(run.decisions as f64)
    }),
];

/// Returns all metrics.
pub fn metrics() -> &'static [Metric] {
    &METRICS
}

/// The figures of a VM, node or host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Figures {
    /// The object to which the figures belong.
    pub of: Of,
    /// The figures, in the order of the metrics of this kind of object.
    pub figures: Vec<Option<f64>>,
}

/// A name that is not a metric.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no metric is named `{name}`{valid}")]
pub struct UnknownMetric {
    name: String,
    valid: Candidates,
}

impl Metric {
    /// Returns the metric of this name.
    ///
    /// # Errors
    /// An unknown name, with the closest match.
    pub fn named(name: &str) -> Result<&'static Metric, UnknownMetric> {
        let found = METRICS.iter().find(|metric| metric.name == name);
        found.ok_or_else(|| UnknownMetric {
            name: name.to_owned(),
            valid: Candidates::of(name, METRICS.iter().map(|metric| metric.name)),
        })
    }

    /// Returns true if objects of this kind have this metric.
    pub(crate) fn fits(&self, of: &Of) -> bool {
        matches!(
            (of, self.from),
            (Of::Vm(_), From::Vm(_)) | (Of::Node(_), From::Node(_)) | (Of::Host, From::Host(_))
        )
    }

    /// Returns the figure: `None` if the object does not have this metric, `Some(None)` if it was not measured.
    pub(crate) fn find(&self, of: &Figures) -> Option<Option<f64>> {
        let same = |other: &Metric| std::mem::discriminant(&other.from) == std::mem::discriminant(&self.from);
        let kind = || METRICS.iter().filter(|other| same(other));
        let at = kind().position(|other| other.name == self.name)?;
        self.fits(&of.of).then(|| of.figures.get(at).copied().flatten())
    }
}

/// Returns all figures of a run that are recorded.
pub(crate) fn kept(run: &Run) -> Vec<Figures> {
    let finite = |figure: Option<f64>| figure.filter(|figure| figure.is_finite());
    let all = |of: Of, figure: &dyn Fn(From) -> Option<Option<f64>>| Figures {
        of,
        figures: METRICS
            .iter()
            .filter_map(|metric| figure(metric.from))
            .map(finite)
            .collect(),
    };
    let vms = run.report.vms.iter().map(|vm| {
        all(Of::Vm(vm.name.clone()), &|from| match from {
            From::Vm(figure) => Some(figure(vm)),
            _ => None,
        })
    });
    let nodes = run.report.nodes.iter().map(|(id, node)| {
        all(Of::Node(id.0.into()), &|from| match from {
            From::Node(figure) => Some(Some(figure(node))),
            _ => None,
        })
    });
    let host = all(Of::Host, &|from| match from {
        From::Host(figure) => Some(figure(run)),
        _ => None,
    });
    vms.chain(nodes).chain([host]).collect()
}
