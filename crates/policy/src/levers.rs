//! One owner per lever (DESIGN, section 2): several policies want the same vCPU or page, and one place decides.
//!
//! # Terms
//! *Lever*: what an action changes, per VM ([`Lever`]): where vCPUs may run, where home is, where pages lie.
//!
//! # Algorithm
//! Plans come in order of precedence. Each decision is taken unless
//! 1. it is impossible (a host refuses a plan as a whole, and one VM must not cost all others their epoch), or the operator
//!    forbids it: the VM is opted out, or its vCPUs are pinned by hand and the action would move them, or it
//!    would put them outside the CPUs that the operator allows;
//! 2. a plan of higher precedence has already decided on the same lever of the same VM, or on its home: who re-homes a VM
//!    decides where its vCPUs and pages go in that epoch.
//!
//! What is dropped becomes a finding with the reason: nothing is lost silently.
//!
//! # Properties
//! - `of_two_policies_the_first_owns_the_lever`
//! - `nobody_moves_what_the_operator_pinned`
//! - `the_merged_plan_keeps_order_and_findings`

use homenode_host::{Action, Decision, Finding, Lever, Plan, View};
use homenode_units::VmId;

/// Merges plans made from one view, the first having precedence.
pub fn merge(view: &View<'_>, plans: Vec<Plan>) -> Plan {
    let mut merged = Plan::new(view.version);
    let mut owners: Vec<(VmId, Lever, &'static str)> = Vec::new();
    for plan in plans {
        debug_assert_eq!(
            plan.version, view.version,
            "plans of one epoch are made from one view"
        );
        merged.findings.extend(plan.findings);
        for decision in plan.decisions {
            match objection(view, &owners, &decision) {
                None => {
                    owners.push((decision.action.vm(), decision.action.lever(), decision.policy));
                    merged.decisions.push(decision);
                }
                Some(message) => {
                    let vm = Some(decision.action.vm());
                    merged.findings.push(Finding {
                        policy: decision.policy,
                        vm,
                        message,
                    });
                }
            }
        }
    }
    merged
}

fn objection(view: &View<'_>, owners: &[(VmId, Lever, &'static str)], decision: &Decision) -> Option<String> {
    let Decision { policy, action, .. } = decision;
    let (id, lever) = (action.vm(), action.lever());
    let Some(vm) = view.vms.iter().find(|vm| vm.sample.id == id) else {
        return Some(format!("VM {id} does not run"));
    };
    let name = &vm.sample.name;
    if !vm.managed() {
        return Some(format!("VM {name} is left alone: the operator opted it out"));
    }
    if let Action::PinVcpus { cpus, .. } = action {
        if cpus.is_empty() {
            return Some(format!(
                "vCPUs of VM {name} stay where they are: it may use no CPU there"
            ));
        }
        if let Some(why) = vm.hands_off {
            return Some(format!("vCPUs of VM {name} stay where they are: {why}"));
        }
        if let Some(allowed) = vm
            .sample
            .settings
            .cpus_allowed
            .as_ref()
            .filter(|allowed| !cpus.is_subset(allowed))
        {
            return Some(format!(
                "vCPUs of VM {name} stay where they are: the operator allows CPUs {allowed} only"
            ));
        }
    }
    let taken = owners.iter().find(|(vm, owned, owner)| {
        *vm == id && owner != policy && (*owned == lever || *owned == Lever::Home || lever == Lever::Home)
    });
    taken.map(|(_, owned, owner)| {
        let what = match owned {
            Lever::VcpuPlacement => "its vCPUs",
            Lever::Home => "its home",
            Lever::Pages => "its pages",
        };
        format!("VM {name}: {owner} decides on {what} in this epoch")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Scene, vm_id};
    use homenode_host::HandsOff;
    use homenode_units::{Bytes, CpuId, CpuSet, NodeId, NodeSet, Pages};

    fn pin(policy: &'static str, n: u128, cpu: u32) -> Decision {
        let action = Action::PinVcpus {
            vm: vm_id(n),
            vcpus: vec![0],
            cpus: CpuSet::one(CpuId(cpu)),
        };
        Decision {
            policy,
            action,
            reason: String::new(),
        }
    }

    fn of(view: &View<'_>, decisions: Vec<Decision>) -> Plan {
        Plan {
            version: view.version,
            decisions,
            findings: vec![],
        }
    }

    #[test]
    fn of_two_policies_the_first_owns_the_lever() {
        let mut scene = Scene::four_nodes(4);
        scene.add_vm(1, 2, Bytes::from_gib(1), 0).home(0);
        scene.with_view(|view| {
            let home = Action::SetHome {
                vm: vm_id(1),
                nodes: NodeSet::one(NodeId(1)),
            };
            let first = Decision {
                policy: "placement",
                action: home,
                reason: String::new(),
            };
            let pages = Action::MovePages {
                vm: vm_id(1),
                to: NodeSet::one(NodeId(0)),
                pages_max: Pages(1),
            };
            let third = Decision {
                policy: "repatriate",
                action: pages,
                reason: String::new(),
            };
            let merged = merge(
                view,
                vec![
                    of(view, vec![first.clone(), pin("placement", 1, 4)]),
                    of(view, vec![pin("balance", 1, 0)]),
                    of(view, vec![third]),
                ],
            );
            assert_eq!(merged.decisions, [first, pin("placement", 1, 4)]);
            assert_eq!(merged.findings.len(), 2);
            assert!(
                merged.findings[0]
                    .message
                    .contains("placement decides on its home"),
                "{:?}",
                merged.findings
            );
        });
    }

    #[test]
    fn nobody_moves_what_the_operator_pinned() {
        let mut scene = Scene::four_nodes(4);
        scene
            .add_vm(1, 2, Bytes::from_gib(1), 0)
            .hands_off(HandsOff::PinnedByHand);
        scene.add_vm(2, 2, Bytes::from_gib(1), 0).allowed("0-3");
        scene.with_view(|view| {
            let merged = merge(
                view,
                vec![of(
                    view,
                    vec![pin("balance", 1, 4), pin("balance", 2, 4), pin("balance", 2, 3)],
                )],
            );
            assert_eq!(merged.decisions, [pin("balance", 2, 3)]);
            assert_eq!(merged.findings.len(), 2);
        });
    }

    #[test]
    fn a_pin_to_no_cpu_costs_only_itself() {
        let mut scene = Scene::four_nodes(4);
        scene.add_vm(1, 2, Bytes::from_gib(1), 0);
        scene.add_vm(2, 2, Bytes::from_gib(1), 0);
        scene.with_view(|view| {
            let nowhere = Action::PinVcpus {
                vm: vm_id(1),
                vcpus: vec![0],
                cpus: CpuSet::new(),
            };
            let nowhere = Decision {
                policy: "balance",
                action: nowhere,
                reason: String::new(),
            };
            let merged = merge(view, vec![of(view, vec![nowhere, pin("balance", 2, 1)])]);
            assert_eq!(merged.decisions, [pin("balance", 2, 1)]);
        });
    }

    #[test]
    fn the_merged_plan_keeps_order_and_findings() {
        let mut scene = Scene::four_nodes(4);
        scene.add_vm(1, 2, Bytes::from_gib(1), 0);
        scene.add_vm(2, 2, Bytes::from_gib(1), 0);
        scene.with_view(|view| {
            let mut second = of(view, vec![pin("balance", 2, 1)]);
            second.find("balance", None, "kept".into());
            let merged = merge(view, vec![of(view, vec![pin("placement", 1, 0)]), second]);
            assert_eq!(merged.decisions, [pin("placement", 1, 0), pin("balance", 2, 1)]);
            assert_eq!(merged.findings[0].message, "kept");
        });
    }
}
