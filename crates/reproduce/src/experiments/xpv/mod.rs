//! The claims on live topology (XPV; [XPV, chapter 4]), but for `xpv.flipping-drift`, which is beside those on flipping.
//!
//! # The systems (sections 4.4.1 and 4.4.4)
//!
//! | system | guest knows of nodes | runtime library knows | hypervisor places | guest's AutoNUMA |
//! |---|---|---|---|---|
//! | XPV | live | live | where the guest wants | on |
//! | OS only XPV | live | what was true at the start | where the guest wants | on |
//! | vNUMA | what was true at boot | the same | where the guest wants | on |
//! | vNUMA, no SRL | what was true at boot | nothing | where the guest wants | on |
//! | Interleaved | nothing | nothing | round-1G over the VM's nodes | - |
//! | FT | nothing | nothing | first-touch | - |
//! | ANB | nothing | nothing | first-touch, and the hypervisor's AutoNUMA | - |
//! | No policy | nothing | nothing | round-4K over the VM's nodes | - |
//!
//! The paper's guests are Linux 4.14, which balances by itself where it sees several nodes. Nothing else differs.
//!
//! # Choices, made before the experiments were run
//!
//! - Machine amd6344x8 under Xen's credit scheduler; node 0, or nodes 0 and 1 where the paper says two, are the privileged VM's:
//!   no other VM may use their CPUs. Pages of 4 KiB.
//! - What is compared is how fast programs go once they have set up their memory: instructions per second of a VM's program after
//!   a warm-up. Programs do so much of their work that none ends before.
//! - How much a program allocates while it runs is in its profile as an estimate, made before anything here was run.

mod abuse;
mod ballooning;
mod blackbox;
mod fights;
mod load;
mod moves;
mod stale;

pub use abuse::EXPERIMENT as ABUSE;
pub use ballooning::EXPERIMENT as BALLOONING;
pub use blackbox::EXPERIMENT as BLACKBOX;
pub use fights::EXPERIMENT as FIGHTS;
pub use load::EXPERIMENT as LOAD;
pub use moves::EXPERIMENT as MOVES;
pub use stale::EXPERIMENT as STALE;

use homenode_twin::{Hypervisor, RuntimeNodes, Scenario, VmSpec, Vnuma};
use homenode_units::{Bytes, CpuId, CpuSet, NodeSet, Placing};

use crate::run::Run;
use crate::work::Outcomes;

const MACHINE: &str = "amd6344x8";
/// CPUs of a node.
const CORES: u32 = 6;
/// Programs do so much of their work that none ends before.
const ENDLESS: f64 = 1000.0;

/// What a VM and its hypervisor do about nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum System {
    Xpv,
    OsOnly,
    Vnuma,
    VnumaNoSrl,
    Interleaved,
    FirstTouch,
    Anb,
    NoPolicy,
}

impl System {
    fn name(self) -> &'static str {
        match self {
            System::Xpv => "XPV",
            System::OsOnly => "OS only XPV",
            System::Vnuma => "vNUMA",
            System::VnumaNoSrl => "vNUMA, no SRL",
            System::Interleaved => "Interleaved",
            System::FirstTouch => "FT",
            System::Anb => "ANB",
            System::NoPolicy => "No policy",
        }
    }

    /// A VM whose vCPUs may use these CPUs and whose memory is on these nodes, as far as the hypervisor decides that.
    fn vm(
        self,
        name: &str,
        vcpus: u16,
        memory: Bytes,
        program: &str,
        cpus: CpuSet,
        nodes: NodeSet,
    ) -> VmSpec {
        let mut vm = VmSpec::new(name, vcpus, memory, program)
            .doing(ENDLESS)
            .on_cpus(cpus);
        (vm.vnuma, vm.runtime_nodes) = match self {
            System::Xpv => (Vnuma::Live, RuntimeNodes::Live),
            System::OsOnly => (Vnuma::Live, RuntimeNodes::Static),
            System::Vnuma => (Vnuma::Static, RuntimeNodes::Static),
            System::VnumaNoSrl => (Vnuma::Static, RuntimeNodes::None),
            System::Interleaved | System::FirstTouch | System::Anb | System::NoPolicy => {
                (Vnuma::None, RuntimeNodes::None)
            }
        };
        vm.autonuma = vm.vnuma != Vnuma::None;
        vm.memory_policy = match self {
            System::Interleaved => Placing::Round1g.alone(),
            System::NoPolicy => Placing::Round4k.alone(),
            System::Anb => Placing::FirstTouch.with_autonuma(),
            _ => Placing::FirstTouch.alone(),
        };
        let spreads = matches!(self, System::Interleaved | System::NoPolicy);
        vm.memory_nodes = spreads.then_some(nodes);
        vm
    }
}

/// CPUs of nodes from one to another, both included.
fn cpus_of(first: u32, last: u32) -> CpuSet {
    (first * CORES..(last + 1) * CORES).map(CpuId).collect()
}

fn on_xen(name: &str, vms: Vec<VmSpec>) -> Scenario {
    let mut scenario = Scenario::of(name, vms);
    scenario.hypervisor = Hypervisor::Xen;
    scenario
}

/// Thousand million instructions per second of all of a run's VMs.
fn speed(outcomes: &Outcomes, run: &Run) -> Result<f64, String> {
    let window = &outcomes.of(run)?.window;
    let instructions: u64 = window.vcpus.iter().map(|vcpu| vcpu.instructions).sum();
    if instructions == 0 {
        return Err(format!("{} ran no instruction", run.scenario.name));
    }
    Ok(instructions as f64 / window.seconds / 1e9)
}

/// Share of accesses to the vCPU's own node, percent, mean over VMs.
fn local_percent(outcomes: &Outcomes, run: &Run) -> Result<f64, String> {
    let vms = &outcomes.of(run)?.vms;
    let sum: f64 = vms.iter().filter_map(|vm| vm.local_access_ratio).sum();
    Ok(100.0 * sum / vms.len() as f64)
}

/// Percent by which a speed is above another.
fn above_percent(speed: f64, other: f64) -> f64 {
    100.0 * (speed / other - 1.0)
}
