//! Random machines, VMs and plans: whatever an agent does, counts add up. (The engine checks pages, run queues,
//! caches and loads at the end of every epoch where debug assertions are on, as in tests.)

use homenode_host::{Action, Host, Plan, Refusal, Sample, VmSample};
use homenode_machine::{preset, preset_names};
use homenode_twin::{
    AfterProgram, Allocation, Hypervisor, MemoryPolicy, Scenario, Twin, TwinError, VmSpec, Vnuma,
};
use homenode_units::{Bytes, CpuSet, NodeSet, Ns, Pages};
use proptest::prelude::*;

const WORKLOADS: [&str; 6] = ["idle", "cg.B", "soplex", "povray", "ep.B", "milc"];

#[derive(Clone, Debug)]
struct Step {
    after_ms: u64,
    vm: usize,
    what: u8,
    pick: u64,
}

const HYPERVISORS: [Hypervisor; 3] = [Hypervisor::Kvm, Hypervisor::Xen, Hypervisor::Native];

/// What a VM is: workload, vCPUs, whether it leaves, when it arrives, and which kind of guest it has.
type Kind = (usize, u16, bool, u64, u8);

fn vm(hypervisor: Hypervisor, at: usize, (workload, vcpus, leaves, arrival_ms, guest): Kind) -> VmSpec {
    let mut spec = VmSpec::new(&format!("vm{at}"), vcpus, Bytes::from_gib(3), WORKLOADS[workload]);
    let native = hypervisor == Hypervisor::Native;
    match guest {
        0 => spec.memory_policy = MemoryPolicy::Round4k,
        1 if !native => spec.memory_policy = MemoryPolicy::Round1g,
        2..=4 => {
            spec.vnuma = if native { Vnuma::None } else { Vnuma::Static };
            spec.autonuma = guest == 3;
            spec.allocation = if guest == 4 {
                Allocation::Interleave
            } else {
                Allocation::FirstTouch
            };
        }
        _ => {}
    }
    spec.after = if leaves {
        AfterProgram::Leave
    } else {
        AfterProgram::Idle
    };
    // AutoNUMA begins after a second.
    let work_share = if spec.autonuma { 0.02 } else { 0.002 };
    spec.arriving(Ns::from_millis(arrival_ms)).doing(work_share)
}

/// Some, not all, members of a list, at least one.
fn some<T: Copy>(list: &[T], pick: u64) -> Vec<T> {
    let chosen: Vec<T> = list
        .iter()
        .enumerate()
        .filter(|(at, _)| pick >> (at % 64) & 1 == 1)
        .map(|(_, item)| *item)
        .collect();
    if chosen.is_empty() {
        vec![list[pick as usize % list.len()]]
    } else {
        chosen
    }
}

fn action(twin: &Twin, sample: &Sample, step: &Step) -> Option<Action> {
    let seen = sample.vms.get(step.vm % sample.vms.len().max(1))?;
    let memory: Vec<_> = twin.machine().memory_nodes().iter().collect();
    let cpus: Vec<_> = twin.machine().cpus.iter().map(|cpu| cpu.id).collect();
    let nodes: NodeSet = some(&memory, step.pick).into_iter().collect();
    Some(match step.what {
        0 => {
            let cpus: CpuSet = some(&cpus, step.pick).into_iter().collect();
            Action::PinVcpus {
                vm: seen.id,
                vcpus: seen.vcpus.iter().map(|v| v.index).collect(),
                cpus,
            }
        }
        1 => Action::SetHome { vm: seen.id, nodes },
        _ => Action::MovePages {
            vm: seen.id,
            to: nodes,
            pages_max: Pages(step.pick % 60_000),
        },
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn whatever_an_agent_does_counts_add_up(
        machine in 0usize..64,
        hypervisor in 0..HYPERVISORS.len(),
        vms in prop::collection::vec((0..WORKLOADS.len(), 1u16..4, any::<bool>(), 0u64..1500, 0u8..8), 1..5),
        steps in prop::collection::vec((1u64..900, 0usize..5, 0u8..3, any::<u64>()), 1..10),
        seed: u64,
    ) {
        let name = preset_names().nth(machine % preset_names().count()).expect("a preset");
        let vms = vms.into_iter().enumerate().map(|(at, vm_)| vm(HYPERVISORS[hypervisor], at, vm_)).collect();
        let mut scenario = Scenario::of("swarm", vms);
        scenario.hypervisor = HYPERVISORS[hypervisor];
        let mut twin = match Twin::new(preset(name).expect("listed"), &scenario, seed) {
            Ok(twin) => twin,
            // Five VMs may be too much for a small machine, nothing else may be wrong.
            Err(error) => {
                prop_assert!(matches!(error, TwinError::FootprintBeyondHost { .. }), "{}: {}", name, error);
                return Ok(());
            }
        };
        let mut before = twin.sample().expect("the twin always answers");
        for (after_ms, vm, what, pick) in steps {
            let step = Step { after_ms, vm, what, pick };
            twin.wait(Ns::from_millis(step.after_ms));
            let sample = twin.sample().expect("the twin always answers");
            prop_assert!(sample.version >= before.version && sample.at > before.at);
            for node in sample.nodes.values() {
                prop_assert!(node.memory_free_bytes <= node.memory_total_bytes);
            }
            let touched: u64 = sample.vms.iter().filter_map(VmSample::pages_touched).map(|pages| pages.0).sum();
            let used: u64 = sample.nodes.values().map(|n| n.memory_total_bytes.0 - n.memory_free_bytes.0).sum();
            prop_assert_eq!(touched * 4096, used);
            if let Some(action) = action(&twin, &sample, &step) {
                let mut plan = Plan::new(sample.version);
                plan.decide("swarm", action, "any".into());
                match twin.commit(&plan) {
                    Ok(receipt) => prop_assert_eq!(receipt.outcomes.len(), 1),
                    Err(refusal) => prop_assert!(matches!(refusal, Refusal::Stale { .. }), "{}", refusal),
                }
            }
            before = sample;
        }
        prop_assert!(twin.run_to_end(Ns::from_secs(60)), "a program never ends");
    }
}
