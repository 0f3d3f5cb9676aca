use homenode_units::{Bytes, CpuSet, MemoryPolicy, NodeId, NodeSet, Ns};

use super::*;
use crate::action::{Act, FrameMove, Lever, WINDOW_MAX};
use crate::balloon::Balloon;
use crate::limit::{CpuQuota, Limit, Percent};
use crate::refusal::Impossible;
use crate::sample::{VcpuSample, VmSample};
use crate::topology::{GuestTopology, VirtualNode};

const VM: VmId = VmId(1);
const LEASE: Ns = Ns::from_secs(1);

fn machine() -> Machine {
    homenode_machine_files::preset("r910").unwrap()
}

/// A VM of two vCPUs, two virtual nodes and a balloon.
fn now() -> Sample {
    let virtual_node = || VirtualNode {
        vcpus: vec![0],
        memory_bytes: Bytes::from_gib(1),
        pages: None,
    };
    let vcpu = |index| VcpuSample {
        index,
        ..VcpuSample::default()
    };
    Sample {
        version: Version(7),
        vms: vec![VmSample {
            vcpus: vec![vcpu(0), vcpu(1)],
            virtual_nodes: vec![virtual_node(), virtual_node()],
            balloon: Some(Balloon {
                current: Bytes::from_gib(2),
                maximum: Bytes::from_gib(2),
                limit: None,
                guest: None,
            }),
            ..VmSample::new(VM, "web")
        }],
        ..Sample::default()
    }
}

fn check(action: Action) -> Result<(), Refusal> {
    let mut plan = Plan::new(Version(7));
    plan.decide("test", action, "because".into());
    plan.check(&machine(), &now())
}

fn why_not(act: Act) -> Impossible {
    match check(act.on(VM)) {
        Err(Refusal::Vm { name, why }) => {
            assert_eq!(name, "web");
            why
        }
        other => panic!("{other:?}"),
    }
}

fn nodes(list: &str) -> NodeSet {
    list.parse().unwrap()
}

fn cpus(list: &str) -> CpuSet {
    list.parse().unwrap()
}

fn limit(limit: Limit) -> Act {
    Act::Limit {
        limit,
        lease_ns: LEASE,
    }
}

fn frame(from: u16, to: u16) -> Act {
    let moves = vec![FrameMove {
        frame: 0,
        pages: Pages(1),
        from: NodeId(from),
        to: NodeId(to),
    }];
    Act::MoveFrames { moves }
}

fn pages(from: &str, to: &str) -> Act {
    Act::MovePages {
        from: nodes(from),
        to: nodes(to),
        pages_max: Pages(1),
    }
}

fn topology(vcpus: &[Option<NodeId>], memory: &[Option<NodeId>]) -> Act {
    let topology = GuestTopology {
        vcpus: vcpus.to_vec(),
        memory: memory.to_vec(),
    };
    Act::PublishTopology { topology }
}

#[test]
fn a_plan_made_from_another_view_is_stale_whatever_it_asks() {
    for version in [6, 8] {
        let refusal = Plan::new(Version(version)).check(&machine(), &now());
        let (planned, current) = (Version(version), Version(7));
        assert_eq!(refusal, Err(Refusal::Stale { planned, current }));
    }
    assert_eq!(Plan::new(Version(7)).check(&machine(), &now()), Ok(()));
}

#[test]
fn a_plan_for_a_vm_that_does_not_run_is_refused() {
    let unknown = VmId(2);
    let act = Act::SetHome { nodes: nodes("0") };
    assert_eq!(check(act.on(unknown)), Err(Refusal::UnknownVm { vm: unknown }));
}

#[test]
fn each_act_that_is_possible_passes() {
    let one = Some(NodeId(0));
    let pin = Act::PinVcpus {
        vcpus: vec![0, 1],
        cpus: cpus("0-3"),
    };
    let virtual_node = Act::MoveVirtualNode {
        virtual_node: 1,
        to: NodeId(3),
        pages_max: Pages(1),
    };
    let watch = Act::Watch {
        window_ns: WINDOW_MAX,
        lease_ns: LEASE,
    };
    let policy = MemoryPolicy::default();
    let lift = |lever| Act::Lift { lever };
    let possible = [
        pin,
        Act::SetHome { nodes: nodes("0-3") },
        pages("0", "1"),
        pages("", "1"),
        virtual_node,
        frame(0, 1),
        Act::SetMemoryPolicy { policy },
        limit(Limit::CpuQuota(CpuQuota::of(0.5, Ns::from_millis(30)))),
        limit(Limit::CacheWays(Percent(1))),
        limit(Limit::MemoryBandwidth(Percent(100))),
        limit(Limit::Memory(Bytes::from_gib(1))),
        watch,
        topology(&[one, None], &[one, None]),
        lift(Lever::Home),
        lift(Lever::CpuQuota),
    ];
    for act in possible {
        assert_eq!(check(act.clone().on(VM)), Ok(()), "{act:?}");
    }
}

#[test]
fn what_is_impossible_is_refused_with_the_vm_and_why() {
    let pin = |vcpus: &[u16], list| Act::PinVcpus {
        vcpus: vcpus.to_vec(),
        cpus: cpus(list),
    };
    assert_eq!(why_not(pin(&[0, 2], "0")), Impossible::UnknownVcpu { index: 2 });
    assert!(matches!(why_not(pin(&[0], "")), Impossible::Cpus { .. }));
    assert!(matches!(why_not(pin(&[0], "0,9999")), Impossible::Cpus { .. }));
    for list in ["", "0,4"] {
        let act = Act::SetHome { nodes: nodes(list) };
        assert!(matches!(why_not(act), Impossible::Nodes { .. }), "{list}");
    }
    assert!(matches!(why_not(pages("0", "9")), Impossible::Nodes { .. }));
    assert!(matches!(why_not(pages("0,1", "1")), Impossible::SameNodes { .. }));
    assert!(matches!(why_not(frame(1, 1)), Impossible::SameNodes { .. }));
    assert!(matches!(why_not(frame(9, 1)), Impossible::Nodes { .. }));
    let virtual_node = Act::MoveVirtualNode {
        virtual_node: 2,
        to: NodeId(0),
        pages_max: Pages(1),
    };
    let unknown = Impossible::UnknownVirtualNode {
        virtual_node: 2,
        count: 2,
    };
    assert_eq!(why_not(virtual_node), unknown);
    let one = Some(NodeId(0));
    for (vcpus, memory) in [
        (vec![], vec![one, None]),
        (vec![one], vec![one]),
        (vec![one], vec![None, None]),
        (vec![Some(NodeId(9))], vec![one, one]),
    ] {
        let act = topology(&vcpus, &memory);
        assert!(
            matches!(why_not(act), Impossible::Topology { .. }),
            "{vcpus:?} {memory:?}"
        );
    }
    for percent in [0, 101] {
        let act = limit(Limit::CacheWays(Percent(percent)));
        assert_eq!(why_not(act), Impossible::Part { percent });
    }
    for memory in [Bytes::ZERO, Bytes::from_gib(3)] {
        let act = limit(Limit::Memory(memory));
        assert!(matches!(why_not(act), Impossible::Memory { .. }), "{memory}");
    }
    let unleased = Act::Limit {
        limit: Limit::CacheWays(Percent(50)),
        lease_ns: Ns::ZERO,
    };
    assert_eq!(why_not(unleased), Impossible::NoLease);
    for window_ns in [Ns::ZERO, Ns(WINDOW_MAX.0 + 1)] {
        let act = Act::Watch {
            window_ns,
            lease_ns: LEASE,
        };
        assert_eq!(why_not(act), Impossible::Window { window_ns });
    }
    for lever in [
        Lever::Pages,
        Lever::VcpuPlacement,
        Lever::MemoryPolicy,
        Lever::Topology,
    ] {
        assert_eq!(why_not(Act::Lift { lever }), Impossible::NoLimit { lever });
    }
}
