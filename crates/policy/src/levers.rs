//! Decides which policy owns a lever, as several policies may want to change the same vCPU or page.
//!
//! # Terms
//! *Lever*: what an action changes, per VM ([`Lever`]): where vCPUs may run, the home, the location of pages, how long vCPUs
//! may run per period.
//!
//! # Algorithm
//! Plans come in order of precedence. A decision is dropped if
//! 1. it is impossible (a host refuses a plan as a whole, and one VM must not cost all others their cycle), or the operator
//!    forbids it: the VM is opted out; its vCPUs are pinned by hand, and the action would move them; the action would put
//!    them outside the CPUs that the operator allows; something other than the agent set the VM's CPU quota; or the
//!    operator's own quota is at most the one that a policy wants;
//! 2. a plan of higher precedence has already decided on the same lever of the same VM, or on its home: the policy that
//!    re-homes a VM decides where its vCPUs and pages go in that cycle. The VM's quota does not depend on its home.
//!
//! A dropped decision becomes a finding with the reason, so the operator sees it.
//!
//! # Properties
//! - `of_two_policies_the_first_owns_the_lever`
//! - `nobody_moves_what_the_operator_pinned`
//! - `nobody_loosens_the_operators_quota`
//! - `the_merged_plan_keeps_order_and_findings`

use homenode_host::{Act, Decision, Finding, HandsOff, Lever, Limit, Plan, View};
use homenode_units::VmId;

use crate::permits::attribution;

/// Merges plans that were made from one view. Earlier plans have precedence.
pub fn merge(view: &View<'_>, plans: Vec<Plan>) -> Plan {
    let mut merged = Plan::new(view.version);
    let mut owners: Vec<(VmId, Lever, &'static str)> = Vec::new();
    for plan in plans {
        debug_assert_eq!(
            plan.version, view.version,
            "plans of one cycle are made from one view"
        );
        merged.findings.extend(plan.findings);
        for decision in plan.decisions {
            match objection(view, &owners, &decision) {
                None => {
                    owners.push((decision.action.vm, decision.action.act.lever(), decision.policy));
                    merged.decisions.push(decision);
                }
                Some(message) => {
                    let vm = Some(decision.action.vm);
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
    let (id, lever) = (action.vm, action.act.lever());
    let Some(vm) = view.vms.iter().find(|vm| vm.sample.id == id) else {
        return Some(format!("VM {id} does not run"));
    };
    let name = &vm.sample.name;
    if !vm.managed() {
        return Some(format!("VM {name} is left alone: the operator opted it out"));
    }
    if let Act::PinVcpus { cpus, .. } = &action.act {
        if cpus.is_empty() {
            return Some(format!(
                "vCPUs of VM {name} stay where they are: the VM may not use any CPU there"
            ));
        }
        if let Some(why) = vm.hands_off
            && !may_measure(why, policy)
        {
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
                "vCPUs of VM {name} stay where they are: the operator allows only CPUs {allowed}"
            ));
        }
    }
    if lever == Lever::CpuQuota
        && let Some(why) = vm.quota_hands_off
    {
        return Some(format!("the CPU quota of VM {name} stays as it is: {why}"));
    }
    if let Act::Limit {
        limit: Limit::CpuQuota(wanted),
        ..
    } = &action.act
        && let Some(theirs) = vm
            .sample
            .settings
            .quota
            .filter(|theirs| theirs.share() <= wanted.share())
    {
        return Some(format!(
            "the CPU quota of VM {name} stays as it is: the operator's quota, {theirs}, is no higher than {wanted}"
        ));
    }
    let taken = owners.iter().find(|(vm, owned, owner)| {
        *vm == id && owner != policy && (*owned == lever || depends_on_home(*owned, lever))
    });
    taken.map(|(_, owned, owner)| {
        format!(
            "VM {name}: decision not carried out because {owner} decides on {} in this cycle",
            owned.of_vm()
        )
    })
}

/// Whether a decision belongs to a measuring window, in which one VM has its cache to itself, or returns vCPUs that such a window
/// moved and the operator did not pin.
fn may_measure(why: HandsOff, policy: &str) -> bool {
    policy == attribution::POLICY && matches!(why, HandsOff::Isolating | HandsOff::PinnedByHand)
}

/// Whether one lever is the home and the other depends on it, so that a decision on one includes the other.
fn depends_on_home(a: Lever, b: Lever) -> bool {
    let follows = |lever| matches!(lever, Lever::VcpuPlacement | Lever::Pages);
    (a == Lever::Home && follows(b)) || (b == Lever::Home && follows(a))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Scene, vm_id};
    use homenode_host::Action;
    use homenode_host::CpuQuota;
    use homenode_units::{Bytes, CpuId, CpuSet, NodeId, NodeSet, Ns, Pages};

    fn pin(policy: &'static str, n: u128, cpu: u32) -> Decision {
        let action = Act::PinVcpus {
            vcpus: vec![0],
            cpus: CpuSet::one(CpuId(cpu)),
        }
        .on(vm_id(n));
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
            let home = Act::SetHome {
                nodes: NodeSet::one(NodeId(1)),
            }
            .on(vm_id(1));
            let first = Decision {
                policy: "placement",
                action: home,
                reason: String::new(),
            };
            let pages = Action::gather(view.machine, vm_id(1), NodeSet::one(NodeId(0)), Pages(1));
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

    fn hold(policy: &'static str, n: u128, share: f64) -> Decision {
        let action = Act::Limit {
            limit: Limit::CpuQuota(CpuQuota::of(share, Ns::from_millis(30))),
            lease_ns: Ns::from_secs(5),
        }
        .on(vm_id(n));
        Decision {
            policy,
            action,
            reason: String::new(),
        }
    }

    #[test]
    fn nobody_loosens_the_operators_quota() {
        let mut scene = Scene::four_nodes(4);
        scene
            .add_vm(1, 2, Bytes::from_gib(1), 0)
            .quota_hands_off(HandsOff::QuotaByHand);
        let theirs = CpuQuota::of(0.5, Ns::from_millis(100));
        scene.add_vm(2, 2, Bytes::from_gib(1), 0).settings().quota = Some(theirs);
        scene.with_view(|view| {
            let decisions = vec![
                hold("permits", 1, 0.1),
                hold("permits", 2, 0.6),
                hold("permits", 2, 0.4),
            ];
            let merged = merge(view, vec![of(view, decisions)]);
            assert_eq!(merged.decisions, [hold("permits", 2, 0.4)]);
            let findings: Vec<&str> = merged.findings.iter().map(|f| f.message.as_str()).collect();
            assert!(
                findings[0].contains("another program set its CPU quota"),
                "{findings:?}"
            );
            assert!(
                findings[1].contains("50ms of every 100ms, is no higher"),
                "{findings:?}"
            );
        });
    }

    #[test]
    fn who_re_homes_a_vm_does_not_decide_on_its_quota() {
        let mut scene = Scene::four_nodes(4);
        scene.add_vm(1, 2, Bytes::from_gib(1), 0);
        let home = Decision {
            policy: "placement",
            action: Act::SetHome {
                nodes: NodeSet::one(NodeId(1)),
            }
            .on(vm_id(1)),
            reason: String::new(),
        };
        scene.with_view(|view| {
            let plans = vec![
                of(view, vec![hold("permits", 1, 0.1)]),
                of(view, vec![home.clone()]),
            ];
            assert_eq!(merge(view, plans).decisions, [hold("permits", 1, 0.1), home]);
        });
    }

    #[test]
    fn a_pin_to_no_cpu_costs_only_itself() {
        let mut scene = Scene::four_nodes(4);
        scene.add_vm(1, 2, Bytes::from_gib(1), 0);
        scene.add_vm(2, 2, Bytes::from_gib(1), 0);
        scene.with_view(|view| {
            let nowhere = Act::PinVcpus {
                vcpus: vec![0],
                cpus: CpuSet::new(),
            }
            .on(vm_id(1));
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
