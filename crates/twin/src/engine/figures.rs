//! Costs on this host that do not change while it runs.

use homenode_machine::Hardware;

use crate::hardware::Fabric;
use crate::scenario::{Hypervisor, Scenario};

/// Costs that stay fixed while the host runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    pub clock_ghz: f64,
    pub line_bytes: f64,
    /// Factor applied to the time that threads wait for memory according to the machine's figures.
    pub memory_waits: f64,
    /// Cost of an interrupt to another CPU under this hypervisor.
    pub ipi_ns: f64,
    /// Extra cost for a woken vCPU on top of the interrupt; 0 on the bare machine.
    pub wake_ns: f64,
    /// Cost of passing a lock on: fetching a line from another node, the mean over all nodes.
    pub handoff_ns: f64,
}

impl Figures {
    /// Returns the figures of a scenario on a machine with this many nodes.
    pub(super) fn new(
        scenario: &Scenario,
        hardware: &Hardware,
        fabric: &Fabric,
        nodes: usize,
        line_bytes: f64,
    ) -> Figures {
        let pairs = (0..nodes).flat_map(|from| (0..nodes).map(move |to| (from, to)));
        let wake = hardware.wake.map_or(0.0, |wake| wake.exit_ns + wake.schedule_ns);
        let lines = pairs.map(|(from, to)| fabric.latency_between(from, to));
        Figures {
            clock_ghz: hardware.clock_hz as f64 / 1e9,
            line_bytes,
            memory_waits: scenario.disturbance.memory_waits,
            ipi_ns: match scenario.hypervisor {
                Hypervisor::Native => hardware.ipi.native_ns,
                Hypervisor::Kvm | Hypervisor::Xen => hardware.ipi.virtual_ns,
            },
            wake_ns: match scenario.hypervisor {
                Hypervisor::Native => 0.0,
                Hypervisor::Kvm | Hypervisor::Xen => wake,
            },
            handoff_ns: lines.sum::<f64>() / (nodes * nodes) as f64,
        }
    }
}
