//! Counts of the host since it started.

use super::busiest::Busiest;

/// Counts of the host since it started.
#[derive(Clone, Debug)]
pub(crate) struct Totals {
    nodes: usize,
    /// Bytes that a node read from a node's memory, by `reader * nodes + memory`.
    pub read: Vec<f64>,
    /// Bytes that a node wrote to a node's memory, by `writer * nodes + memory`.
    pub written: Vec<f64>,
    pub busiest: Busiest,
}

impl Totals {
    pub fn new(nodes: usize, links: usize) -> Totals {
        Totals {
            nodes,
            read: vec![0.0; nodes * nodes],
            written: vec![0.0; nodes * nodes],
            busiest: Busiest::new(links),
        }
    }

    /// Notes bytes that a CPU or device of a node wrote to a node's memory.
    pub fn write(&mut self, writer: usize, memory: usize, bytes: f64) {
        self.written[writer * self.nodes + memory] += bytes;
    }

    /// Notes bytes that were copied from a node's memory to another's, by the latter.
    pub fn copy(&mut self, from: usize, to: usize, bytes: f64) {
        self.read[to * self.nodes + from] += bytes;
        self.write(to, to, bytes);
    }

    /// Returns the bytes moved by each node's controllers.
    pub fn controllers(&self) -> Vec<f64> {
        let mut controllers = vec![0.0; self.nodes];
        for (at, bytes) in self.read.iter().chain(&self.written).enumerate() {
            controllers[at % self.nodes] += bytes;
        }
        controllers
    }

    /// Returns the bytes that went from a node to a node.
    pub fn between(&self, from: usize, to: usize) -> f64 {
        self.read[to * self.nodes + from] + self.written[from * self.nodes + to]
    }
}
