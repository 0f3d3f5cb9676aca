//! Counts of the host since its start.

use super::busiest::Busiest;

/// Counts of the host since its start.
#[derive(Clone, Debug)]
pub(crate) struct Totals {
    nodes: usize,
    /// Bytes that one node read from another's memory, or from its own, at `reader * nodes + memory`.
    pub read: Vec<f64>,
    /// Bytes that one node wrote to another's memory, or to its own, at `writer * nodes + memory`.
    pub written: Vec<f64>,
    pub busiest: Busiest,
}

impl Totals {
    pub(crate) fn new(nodes: usize, links: usize) -> Totals {
        Totals {
            nodes,
            read: vec![0.0; nodes * nodes],
            written: vec![0.0; nodes * nodes],
            busiest: Busiest::new(links),
        }
    }

    /// Counts bytes that a CPU or device of node `writer` wrote to the memory of node `memory`.
    pub(crate) fn write(&mut self, writer: usize, memory: usize, bytes: f64) {
        self.written[writer * self.nodes + memory] += bytes;
    }

    /// Counts bytes that node `to` copied from the memory of node `from` to its own.
    pub(crate) fn copy(&mut self, from: usize, to: usize, bytes: f64) {
        self.read[to * self.nodes + from] += bytes;
        self.write(to, to, bytes);
    }

    /// Returns the bytes moved by each node's controllers.
    pub(crate) fn controllers(&self) -> Vec<f64> {
        let mut controllers = vec![0.0; self.nodes];
        for (at, bytes) in self.read.iter().chain(&self.written).enumerate() {
            controllers[at % self.nodes] += bytes;
        }
        controllers
    }

    /// Returns the bytes that went from one node to another.
    pub(crate) fn between(&self, from: usize, to: usize) -> f64 {
        self.read[to * self.nodes + from] + self.written[from * self.nodes + to]
    }
}
