//! VMs of this command that do different work all the time, for a trial of the agent on a host that has no VMs yet.

use std::path::Path;
use std::time::Duration;

use homenode_load::Kernel;
use homenode_load::worker::Spans;
use homenode_machine::Machine;
use homenode_units::CpuSet;

use super::guests::{Guest, Guests, Memory, Running};
use super::{LINES, Why};

/// Names of the VMs begin with this; then follow what they do and a number.
const NAME: &str = "homenode-evidence-";
/// The memory of a VM is chosen by the last-level cache, but as if that were at most this large, so that the mix fits into
/// every host.
const CACHE_MAX: usize = 64 << 20;
/// vCPUs of a VM.
const VCPUS: std::ops::RangeInclusive<usize> = 1..=4;
/// Most nodes that get a set of VMs.
const NODES_MAX: usize = 4;
/// A server's mean time between requests: about half of what it could serve.
const INTERVAL_NS: usize = 100_000;

/// VMs that work. They end when this is dropped, and when this process ends.
pub struct Mix {
    _running: Running,
    names: Vec<String>,
}

impl Mix {
    /// Starts four VMs for each node: one that streams, one that follows pointers, one whose data fit into the cache, and a
    /// server of requests. Their vCPUs number half of the CPUs or fewer, and they run wherever the kernel or the agent puts
    /// them. They work for this long.
    ///
    /// # Errors
    /// Without KVM; QEMU or a kernel is missing; a VM does not start.
    pub fn start(
        machine: &Machine,
        program: &Path,
        kernel: Option<&Path>,
        works: Duration,
    ) -> Result<Mix, Why> {
        let guests = Guests::find(program, kernel)?;
        let cpus: CpuSet = machine.cpus.iter().map(|cpu| cpu.id).collect();
        let names = names(machine);
        let uuids: Vec<String> = (0..names.len()).map(uuid).collect();
        let loads = loads(cache_bytes(machine));
        let all: Vec<Guest<'_>> = names
            .iter()
            .zip(&uuids)
            .zip(loads.iter().cycle())
            .map(|((name, uuid), (_, load))| Guest {
                name,
                uuid: Some(uuid),
                load: *load,
                vcpus: vcpus(machine),
                cpus: &cpus,
                memory: Memory::Anywhere,
            })
            .collect();
        let mut running = guests.start_on_kvm(&all)?;
        let spans = Spans {
            warm: 0,
            measure: u64::try_from(works.as_millis()).unwrap_or(u64::MAX),
            tail: 0,
        };
        for worker in &mut running.workers {
            worker.run(spans)?;
        }
        Ok(Mix {
            _running: running,
            names,
        })
    }

    /// Returns the VMs' names.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns how many VMs it has on this host.
    pub fn count(machine: &Machine) -> usize {
        names(machine).len()
    }

    /// Returns true for the name of a VM of this command.
    pub fn is_its(name: &str) -> bool {
        name.starts_with(NAME)
    }
}

fn loads(cache: usize) -> [(&'static str, Kernel); 4] {
    [
        ("stream", Kernel::Stream(4 * cache)),
        ("chase", Kernel::Chase(2 * cache)),
        ("resident", Kernel::Uniform(cache / 4)),
        (
            "server",
            Kernel::Requests {
                bytes: cache / 2,
                lines: LINES,
                interval_ns: INTERVAL_NS,
            },
        ),
    ]
}

fn cache_bytes(machine: &Machine) -> usize {
    let largest = machine.llcs.iter().map(|llc| llc.size_bytes.0).max();
    let largest = largest.and_then(|bytes| usize::try_from(bytes).ok());
    largest.unwrap_or(CACHE_MAX).clamp(1 << 20, CACHE_MAX)
}

fn names(machine: &Machine) -> Vec<String> {
    let sets = machine.home_nodes().len().clamp(1, NODES_MAX);
    let kinds = loads(cache_bytes(machine));
    (0..sets)
        .flat_map(|set| kinds.map(|(kind, _)| format!("{NAME}{kind}-{set}")))
        .collect()
}

/// Returns the vCPUs of each VM: all together have half as many as there are CPUs.
fn vcpus(machine: &Machine) -> usize {
    let each = machine.cpus.len() / (2 * names(machine).len());
    each.clamp(*VCPUS.start(), *VCPUS.end())
}

/// Returns a VM's UUID, by which the agent knows it.
fn uuid(at: usize) -> String {
    format!("5f0c8a52-91c7-4f0e-8f3b-6d1a40b7{at:04x}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_machine_files::preset;

    #[test]
    fn a_mix_uses_at_most_half_of_the_cpus_and_little_memory() {
        for name in ["r910", "amd48", "epyc7763-nps4", "xeon26x2"] {
            let machine = preset(name).unwrap();
            let names = names(&machine);
            assert!(2 * names.len() * vcpus(&machine) <= machine.cpus.len(), "{name}");
            let bytes: usize = loads(cache_bytes(&machine))
                .iter()
                .map(|(_, load)| load.footprint() * vcpus(&machine))
                .sum();
            assert!(bytes < 2 << 30, "{name}: {bytes}");
            let mut unique = names.clone();
            unique.sort();
            unique.dedup();
            assert_eq!(unique.len(), Mix::count(&machine));
            assert!(names.iter().all(|name| Mix::is_its(name)));
        }
    }
}
