//! Parts of the hardware model without engine, scheduler and guests, for validation.

use homenode_machine::Machine;

pub use crate::hardware::llc::{CLASSES, Llc, Sharer};

use crate::TwinError;
use crate::hardware::core::CoreCost;
use crate::hardware::fabric::Target;
use crate::hardware::{Fabric, Topology};

/// A thread that misses its caches: its load on controllers and links.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// Position of the thread's node among the machine's nodes.
    pub node: usize,
    /// Share of the thread's misses that goes to each node.
    pub weights: Vec<f64>,
    /// Nanoseconds of the thread's own work between two misses.
    pub ns_between: f64,
    /// Misses in flight.
    pub in_flight: f64,
    /// Share of missed lines that are written back.
    pub write_share: f64,
}

/// The service that a thread gets from controllers and links.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Served {
    /// Misses per nanosecond.
    pub misses_per_ns: f64,
    /// Latency of a miss.
    pub latency_ns: f64,
}

/// Returns the service that threads running side by side get in the steady state.
///
/// # Errors
/// If the machine has no timing figures.
pub fn serve(machine: &Machine, loads: &[Load]) -> Result<Vec<Served>, TwinError> {
    let (topology, hardware) = Topology::new(machine)?;
    let line_bytes = f64::from(machine.llcs.first().map_or(64, |llc| llc.line_bytes));
    let clock_ghz = hardware.clock_hz as f64 / 1e9;
    let mut fabric = Fabric::new(&topology, &hardware, line_bytes);
    let costs: Vec<CoreCost> = loads
        .iter()
        .map(|load| CoreCost {
            busy_cycles: load.ns_between * clock_ghz,
            accesses: 1.0,
            misses: 1.0,
            scattered: 0.0,
            waits: 1.0 / load.in_flight,
        })
        .collect();
    let targets: Vec<Vec<Target>> = loads
        .iter()
        .map(|load| Target::all(&load.weights).collect())
        .collect();
    // The solver starts from the last solution, as it does in every epoch.
    for _ in 0..20 {
        fabric.clear();
        for ((load, cost), targets) in loads.iter().zip(&costs).zip(&targets) {
            fabric.add(load.node, cost, load.write_share, targets);
        }
        fabric.solve(&[]);
    }
    let served = |(flow, (load, cost)): (usize, (&Load, &CoreCost))| {
        let latency_ns = fabric.latency_ns(load.node, &targets[flow]);
        Served {
            misses_per_ns: fabric.granted(flow) / cost.ns_per_instruction(clock_ghz, latency_ns),
            latency_ns,
        }
    };
    Ok(loads.iter().zip(&costs).enumerate().map(served).collect())
}
