//! Adds what the fake host lacks: hardware counters, and a kernel that carries out actions. With them, policies have as much to
//! decide on as on a real host. Neither is part of what the benchmark measures.

use std::collections::BTreeMap;

use homenode_host::{Act, Counters, Lever, Outcome, Plan, Receipt, Sample, VcpuSample};
use homenode_units::{CpuSet, NodeId, NodeMap, Pages, VmId};

/// The affinities and page moves that earlier plans set, to be shown in later samples.
#[derive(Default)]
pub(crate) struct Fakes {
    affinities: BTreeMap<(VmId, u16), CpuSet>,
    /// The node to which a VM's pages were moved.
    pages: BTreeMap<VmId, NodeId>,
}

/// Returns a vCPU's counters. One VM in four has a program that often misses its cache.
fn counters(vm: VmId, vcpu: &VcpuSample) -> Counters {
    let cycles = vcpu.running_ns.0 * 2;
    let (per_cycle, per_reference) = match vm.0 % 4 {
        0 => (40, 2),
        1 => (60, 10),
        _ => (200, 20),
    };
    Counters {
        instructions: cycles / 3 * 2,
        cycles,
        llc_references: Some(cycles / per_cycle),
        llc_misses: Some(cycles / per_cycle / per_reference),
    }
}

impl Fakes {
    /// Adds counters, and the effects of earlier plans, to a sample of the fake host.
    pub(crate) fn add_to(&self, sample: &mut Sample) {
        for vm in &mut sample.vms {
            for vcpu in &mut vm.vcpus {
                vcpu.counters = Some(counters(vm.id, vcpu));
                if let Some(cpus) = self.affinities.get(&(vm.id, vcpu.index)) {
                    vcpu.affinity.clone_from(cpus);
                    let at = usize::from(vcpu.index) % cpus.len().max(1);
                    vcpu.cpu = vcpu
                        .cpu
                        .filter(|cpu| cpus.contains(*cpu))
                        .or_else(|| cpus.iter().nth(at));
                }
            }
            if let (Some(to), Some(pages)) = (self.pages.get(&vm.id), &mut vm.pages) {
                let all: Pages = pages.values().copied().sum();
                let mut moved = NodeMap::new();
                moved.insert(*to, all);
                *pages = moved;
            }
        }
    }

    /// Carries out a plan.
    pub(crate) fn carry_out(&mut self, plan: &Plan) -> Receipt {
        let outcome = |vm: VmId, act: &Act| match act {
            Act::PinVcpus { vcpus, cpus } => {
                let pinned = vcpus.iter().map(|vcpu| ((vm, *vcpu), cpus.clone()));
                self.affinities.extend(pinned);
                Outcome::Done
            }
            Act::Lift { lever: Lever::Home } => {
                self.affinities.retain(|(other, _), _| *other != vm);
                Outcome::Done
            }
            Act::MovePages { to, pages_max, .. } => {
                self.pages.extend(to.iter().next().map(|node| (vm, node)));
                let (left, busy) = (Pages::ZERO, Pages::ZERO);
                let moved = *pages_max;
                Outcome::Moved { moved, left, busy }
            }
            _ => Outcome::Done,
        };
        let acts = plan.decisions.iter().map(|decision| &decision.action);
        let mut outcome = outcome;
        Receipt {
            version: plan.version,
            outcomes: acts.map(|action| outcome(action.vm, &action.act)).collect(),
        }
    }
}
