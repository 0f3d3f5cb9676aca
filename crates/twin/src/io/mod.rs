//! Devices: how long a program waits for its disk and network, and the load that their data causes on its way to memory.
//!
//! # Model
//!
//! - A thread requests `request` bytes from a device each time it has run the number of instructions that goes with them
//!   ([`crate::workload::IoProfile`]). It continues at once. At its next request it waits for this one if that is not done. So
//!   one request of each kind is in flight while the thread computes (reading ahead, or writing behind, by one). A program with a
//!   fast enough device runs at its solo speed, at which its profile's bytes were counted; any other runs at the device's speed.
//! - If the profile says so (`waits`), the thread waits for each request at once, so that it never computes meanwhile: a server
//!   whose client sends the next request when it has the answer to the last. The latency is then the time of the client and the
//!   network.
//! - A device serves first come, first served: `start = max(now, free)`, `free = start + bytes / bandwidth`,
//!   `done = free + latency`. A thread by itself gets `request / (request / bandwidth + latency)` at most. The machine has a
//!   latency for a native system, for a guest that drives the device itself (`passthrough`), and for a virtual device
//!   [Policies, section 2.2.2].
//! - DMA: a device's transfers cross the links from its node to the nodes of the VM's memory and load the controllers there. They
//!   are spread as the VM's pages were at the time of the request. An epoch sees the rate of the previous one, once that has
//!   changed by a twentieth of the device's bandwidth.
//! - On Xen the packets of a network pass one backend thread per VM in the driver domain, first come, first served, at
//!   [`flip::PACKET_CYCLES`] each, unless the guest drives the network itself. A request is done when the device has served it
//!   and the backend has passed its packets. A device whose latency is as long by passthrough as virtual is the driver
//!   domain's own: `passthrough` has no effect on it.
//! - Requests that a thread would make more frequently than about every 100 us go to the device together: the sum of their bytes,
//!   the same transfer time, and the latency of each, one after the other.
//!
//! If a machine has several devices of a kind, its first with `bandwidth` and `latency` serves. If it has none, the program runs
//! without that part of its I/O, and the report's notes say so.
//!
//! # Left out
//!
//! Directions (all data goes into memory), waiting for the last request of a program, page cache, DMA into caches, devices that
//! full links hold back, seeks and queues inside a device, the CPU time that requests cost the guest, the hypervisor and a driver
//! domain that the scenario does not have, and the segments into which a driver domain's block device divides requests. I/O that
//! passes a driver domain is in [`flip`]: there devices fill the driver domain's pages.

mod device;
pub(crate) mod flip;

pub(crate) use device::Device;
use flip::PACKET_CYCLES;

use homenode_machine::{Hardware, Machine};
use homenode_units::Ns;

use crate::scenario::{Hypervisor, VmSpec};
use crate::workload::{DeviceKind, IoProfile, Workload};

/// Requests that a thread would make at shorter intervals than this go to the device together.
const REQUEST_PERIOD_NS: f64 = 100_000.0;

/// A thread's requests to devices.
#[derive(Clone, Debug, Default)]
pub(crate) struct Requests {
    /// One request for each device that the thread's program uses.
    pub list: Vec<Request>,
    /// Instructions of the present stretch that come after the next request.
    pub behind: f64,
    /// Bytes requested so far.
    pub bytes: f64,
    /// Instructions before the next request or the end of the stretch.
    cut: f64,
}

/// A recurring request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// Position among the engine's devices.
    pub device: usize,
    pub bytes: f64,
    pub latency_ns: f64,
    /// Number of instructions between two requests.
    pub every: f64,
    /// Number of instructions before the next request.
    pub left: f64,
    /// Whether the thread waits for the request before it continues.
    pub waits: bool,
    /// Time that the packets of the request take the VM's backend, in nanoseconds.
    pub backend_ns: f64,
    /// Time at which the last request is done.
    pub done: Ns,
}

impl Requests {
    /// Cuts a stretch of instructions at the next request. Returns the part before it.
    pub(crate) fn cut(&mut self, instructions: f64) -> f64 {
        let next = self.list.iter().map(|request| request.left);
        self.cut = next.fold(instructions, f64::min);
        self.behind = instructions - self.cut;
        self.cut
    }

    /// Notes that the part that was cut off last has been run.
    pub(crate) fn pass(&mut self) {
        for request in &mut self.list {
            request.left -= self.cut;
        }
        self.cut = 0.0;
    }

    /// Begins a program with these requests.
    pub(crate) fn restart(&mut self, list: Vec<Request>) {
        self.list = list;
        self.behind = 0.0;
        self.cut = 0.0;
    }

    /// Returns a request that has to be made now.
    pub(crate) fn due(&mut self) -> Option<&mut Request> {
        self.list.iter_mut().find(|request| request.left < 1.0)
    }
}

/// The devices that a scenario's programs use, collected while VMs are built.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    machine: &'a Machine,
    pub devices: Vec<Device>,
    /// Sentences about what the machine lacks.
    pub notes: Vec<String>,
    /// Kinds of the devices.
    kinds: Vec<DeviceKind>,
}

impl<'a> Plan<'a> {
    pub(crate) fn new(machine: &'a Machine) -> Plan<'a> {
        Plan {
            machine,
            devices: Vec::new(),
            notes: Vec::new(),
            kinds: Vec::new(),
        }
    }

    /// Returns the requests of a program's threads.
    pub(crate) fn requests(
        &mut self,
        spec: &VmSpec,
        hypervisor: Hypervisor,
        workload: &Workload,
        hardware: &Hardware,
    ) -> Vec<Request> {
        let Some(program) = &workload.program else {
            return Vec::new();
        };
        let cycle_ns = 1e9 / hardware.clock_hz as f64;
        let mut requests = Vec::new();
        for io in &program.io {
            let Some(request) = self.request(spec, hypervisor, io, program.cpi_core, cycle_ns) else {
                let (kind, machine) = (io.device, &self.machine.name);
                let note = format!(
                    "machine {machine} has no {} with `bandwidth` and `latency`, so {} runs there without I/O; \
                     add them to a [[devices]] entry of class 0x{} in the machine's file",
                    kind.name(),
                    workload.name,
                    kind.class()
                );
                if !self.notes.contains(&note) {
                    self.notes.push(note);
                }
                continue;
            };
            requests.push(request);
        }
        requests
    }

    fn request(
        &mut self,
        spec: &VmSpec,
        hypervisor: Hypervisor,
        io: &IoProfile,
        cpi: f64,
        cycle_ns: f64,
    ) -> Option<Request> {
        let of_kind = |class: &str| class.trim_start_matches("0x").starts_with(io.device.class());
        let mut devices = self
            .machine
            .devices
            .iter()
            .filter(|device| of_kind(&device.class));
        let (device, bandwidth, native) =
            devices.find_map(|device| Some((device, device.bandwidth?, device.latency_ns?)))?;
        let latency = match hypervisor {
            Hypervisor::Native => native,
            Hypervisor::Kvm | Hypervisor::Xen if spec.passthrough => {
                device.latency_passthrough_ns.unwrap_or(native)
            }
            Hypervisor::Kvm | Hypervisor::Xen => device.latency_virtual_ns.unwrap_or(native),
        };
        let own = spec.passthrough && Some(latency) != device.latency_virtual_ns;
        // A channel to a driver domain of the scenario has costs of its own.
        let backend = hypervisor == Hypervisor::Xen && !own && spec.driver_domain.is_none();
        let packets = if backend { f64::from(io.packets) } else { 0.0 };
        let known = self.kinds.iter().position(|kind| *kind == io.device);
        let at = known.unwrap_or_else(|| {
            let node = self.machine.nodes.position(device.node);
            let node = node.expect("a checked machine has the node of each device");
            let nodes = self.machine.nodes.len();
            self.devices.push(Device::new(node, bandwidth, nodes));
            self.kinds.push(io.device);
            self.kinds.len() - 1
        });
        let one = 1000.0 * io.request.as_f64() / io.bytes_per_kilo_instruction;
        let together = (REQUEST_PERIOD_NS / (one * cpi * cycle_ns))
            .max(1.0 / one)
            .ceil()
            .max(1.0);
        Some(Request {
            device: at,
            bytes: together * io.request.as_f64(),
            latency_ns: together * latency.as_f64(),
            every: together * one,
            left: together * one,
            waits: io.waits,
            backend_ns: together * packets * PACKET_CYCLES * cycle_ns,
            done: Ns::ZERO,
        })
    }
}
