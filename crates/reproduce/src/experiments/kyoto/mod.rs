//! The claims on pollution permits ([Kyoto, chapter 3], "Kyoto").
//!
//! # Choices, made before the experiments were run
//!
//! - Unless an experiment says otherwise: machine e5_1603v3 under Xen's credit scheduler; every VM has one vCPU that is
//!   pinned [Kyoto, section 3.1.2], alone on its CPU where nothing is said of it, and pages of 4 KiB; counters are read
//!   after [`WARM_UP`] and at [`UNTIL`].
//! - Performance is instructions per unhalted cycle (section 3.1.2.3), and a degradation what is lost of it, in percent of
//!   what the VM has alone.
//! - A VM's pollution is what it would miss alone (section 3.2.3: by replay), so that nobody pays for others.

pub mod contention;
pub mod enforcement;
pub mod indicator;
pub mod metering;
pub mod overhead;

use homenode_policy::permits::meter::Counted;
use homenode_twin::{Enforcer, Hypervisor, Scenario, VmSpec, workload};
use homenode_units::{Bytes, CpuId, CpuSet, Ns};

use crate::run::{Outcome, Run, VcpuCounts};

const MACHINE: &str = "e5_1603v3";
/// Before, VMs boot and caches fill.
const WARM_UP: Ns = Ns::from_secs(10);
const UNTIL: Ns = Ns::from_secs(30);
/// Programs do so much of their work that none ends before.
const ENDLESS: f64 = 100.0;
/// Clock of the machine, kHz.
const CLOCK_KHZ: u64 = 2_800_000;

/// A VM of one vCPU on one CPU, with the memory that its program needs and 100 MiB for its guest.
fn vm(name: &str, program: &str, cpu: u32) -> VmSpec {
    let footprint = workload::builtin(program).and_then(|workload| workload.program);
    let footprint = footprint.map_or(Bytes::ZERO, |program| program.footprint(1));
    let memory = Bytes(footprint.0.next_multiple_of(1 << 20)) + Bytes::from_mib(100);
    VmSpec::new(name, 1, memory, program)
        .doing(ENDLESS)
        .on_cpus(CpuSet::one(CpuId(cpu)))
}

fn scenario(name: &str, enforcer: Enforcer, vms: Vec<VmSpec>) -> Scenario {
    let mut scenario = Scenario::of(name, vms);
    scenario.hypervisor = match enforcer {
        Enforcer::None | Enforcer::Ks4xen => Hypervisor::Xen,
        Enforcer::Ks4linux | Enforcer::Ks4pisces => Hypervisor::Kvm,
    };
    scenario.enforcer = enforcer;
    scenario
}

fn run(scenario: Scenario) -> Run {
    Run::between(MACHINE, scenario, WARM_UP, UNTIL)
}

/// A program alone.
fn alone(program: &str) -> Run {
    run(scenario(
        &format!("{program} alone"),
        Enforcer::None,
        vec![vm("a", program, 0)],
    ))
}

/// Two programs in parallel.
fn beside(program: &str, other: &str) -> Run {
    let vms = vec![vm("a", program, 0), vm("b", other, 1)];
    run(scenario(
        &format!("{program} beside {other}"),
        Enforcer::None,
        vms,
    ))
}

/// What the first VM's vCPU counted after the warm-up.
fn first(outcome: &Outcome) -> Result<VcpuCounts, String> {
    let first = outcome.window.vcpus.first().copied();
    first
        .filter(|vcpu| vcpu.cycles > 0)
        .ok_or_else(|| "the first VM did not run".to_owned())
}

fn ipc(outcome: &Outcome) -> Result<f64, String> {
    first(outcome).map(|vcpu| vcpu.instructions as f64 / vcpu.cycles as f64)
}

/// What the first VM loses of its performance, in percent of what it has alone.
fn loss_percent(alone: &Outcome, with: &Outcome) -> Result<f64, String> {
    Ok(100.0 * (1.0 - ipc(with)? / ipc(alone)?))
}

/// Equation 3.1 of a vCPU.
fn equation_3_1(counts: &VcpuCounts, clock_khz: u64) -> f64 {
    let counted = Counted {
        llc_misses: counts.llc_misses,
        cycles: counts.cycles,
        ..Counted::default()
    };
    counted.equation_3_1(clock_khz).unwrap_or(f64::NAN)
}

/// The greatest; not a number if one is not.
fn greatest(values: impl IntoIterator<Item = f64>) -> f64 {
    let pick = |most: f64, value: f64| {
        if value.is_nan() || value > most {
            value
        } else {
            most
        }
    };
    values.into_iter().fold(f64::NEG_INFINITY, pick)
}
