//! A VM's home.

use homenode_units::{CpuSet, NodeSet, Pages, VmId};

use super::vcpus::pin_plan;
use super::{
    Breach, Check, PERIOD, Verdict, affinities, commit_one, expect, lift_twice, no_node, refused, sample,
    sample_of,
};
use crate::{Act, Action, Failure, HomeInForce, Host, Impossible, Lever, Outcome, VmSample};

pub(super) static LIFTED: Check = Check {
    name: "a home can be lifted, and the VM runs where it did before",
    run: home_is_lifted,
};

pub(super) static TOLD: Check = Check {
    name: "the home in force is told, and no pin for a while is mistaken for it",
    run: home_is_told,
};

pub(super) static HOLDS: Check = Check {
    name: "a home holds no vCPU, moves no page, and keeps what was brought there",
    run: home_holds,
};

/// Checks that the host tells the home that is in force, and the part of it on which a plan kept the vCPUs, whatever pins follow.
fn home_is_told(host: &mut dyn Host, vm: VmId) -> Result<Verdict, Breach> {
    lift_twice(host, vm, Lever::Home)?;
    let told = |host: &mut dyn Host| Ok::<_, Breach>(sample_of(host, vm)?.home);
    let unplaced = told(host)?;
    if unplaced.is_untold() {
        return Ok(Verdict::Skipped(
            "the host does not tell which homes are in force".to_owned(),
        ));
    }
    expect(unplaced == HomeInForce::Unplaced, || {
        format!("its home was lifted, and the host still tells {unplaced:?}")
    })?;
    let before = sample(host)?;
    let mut plan = pin_plan(before.version, &before, host, vm, 0)?;
    let Act::PinVcpus { vcpus, cpus } = plan.decisions[0].action.act.clone() else {
        unreachable!()
    };
    let nodes: NodeSet = cpus
        .iter()
        .filter_map(|cpu| host.machine().node_of(cpu))
        .collect();
    let whole = host.machine().cpus_of(&nodes).intersection(&cpus);
    let part: CpuSet = whole.iter().take((whole.len() / 2).max(1)).collect();
    let pin = |cpus: &CpuSet| {
        let (vcpus, cpus) = (vcpus.clone(), cpus.clone());
        Act::PinVcpus { vcpus, cpus }
    };
    plan.decisions[0].action.act = pin(&part);
    let give = Act::SetHome { nodes: nodes.clone() };
    plan.decide("conformance", give.on(vm), "conformance check".into());
    let receipt = host.commit(&plan)?;
    expect(
        receipt.outcomes.iter().all(|outcome| *outcome == Outcome::Done),
        || format!("a home on CPUs {part} gave {:?}", receipt.outcomes),
    )?;
    let expect_told = |host: &mut dyn Host, wanted: HomeInForce| {
        let seen = told(host)?;
        expect(seen == wanted, || {
            format!("its home is {wanted:?}, and the host tells {seen:?}")
        })
    };
    let on_part = HomeInForce::on(host.machine(), &nodes, &part);
    expect_told(host, on_part.clone())?;
    let rest = whole.difference(&part);
    if !rest.is_empty() {
        let on_all = HomeInForce::on(host.machine(), &nodes, &host.machine().cpu_set());
        for (pinned, wanted) in [(&rest, on_part), (&whole, on_all)] {
            let outcome = commit_one(host, vm, pin(pinned))?;
            expect(outcome == Outcome::Done, || {
                format!("a pin to CPUs {pinned} gave {outcome:?}")
            })?;
            expect_told(host, wanted)?;
        }
    }
    lift_twice(host, vm, Lever::Home)?;
    expect_told(host, HomeInForce::Unplaced)?;
    Ok(Verdict::Passed)
}

/// Checks that a VM without its home has its earlier affinities again. Earlier checks pinned the VM, so it is unpinned first.
fn home_is_lifted(host: &mut dyn Host, vm: VmId) -> Result<Verdict, Breach> {
    lift_twice(host, vm, Lever::Home)?;
    let unplaced = sample(host)?;
    for node_index in [1, 0] {
        let mut plan = pin_plan(unplaced.version, &unplaced, host, vm, node_index)?;
        let Act::PinVcpus { cpus, .. } = &plan.decisions[0].action.act else {
            unreachable!()
        };
        let nodes = cpus
            .iter()
            .filter_map(|cpu| host.machine().node_of(cpu))
            .collect();
        plan.version = sample(host)?.version;
        plan.decide(
            "conformance",
            Act::SetHome { nodes }.on(vm),
            "conformance check".into(),
        );
        let receipt = host.commit(&plan)?;
        expect(
            receipt.outcomes.iter().all(|outcome| *outcome == Outcome::Done),
            || format!("pins and a home gave {:?}", receipt.outcomes),
        )?;
        let homed = sample(host)?;
        expect(affinities(&homed, vm) != affinities(&unplaced, vm), || {
            "the VM was never pinned: is the host too small?".into()
        })?;
        lift_twice(host, vm, Lever::Home)?;
        let after = sample(host)?;
        expect(affinities(&after, vm) == affinities(&unplaced, vm), || {
            let seen = affinities(&after, vm);
            format!(
                "its home was lifted, but its vCPUs run on {seen:?} instead of {:?}",
                affinities(&unplaced, vm)
            )
        })?;
        expect(after.version > homed.version, || {
            "lifting a home left the version as it was".into()
        })?;
        let (was, is) = (homed.vm(vm), after.vm(vm));
        expect(
            was.and_then(VmSample::pages_touched) <= is.and_then(VmSample::pages_touched),
            || "pages were lost with the home".into(),
        )?;
    }
    Ok(Verdict::Passed)
}

fn home_holds(host: &mut dyn Host, vm: VmId) -> Result<Verdict, Breach> {
    for nodes in [NodeSet::new(), NodeSet::one(no_node(host))] {
        refused(host, vm, Act::SetHome { nodes }, |why| {
            matches!(why, Impossible::Nodes { .. })
        })?;
    }
    let unplaced = sample(host)?;
    let homes: Vec<_> = host.machine().memory_nodes().iter().take(2).collect();
    let mut skipped = None;
    for home in homes {
        let nodes = NodeSet::one(home);
        let outside = |host: &mut dyn Host| Ok::<_, Breach>(sample_of(host, vm)?.pages_outside(&nodes));
        let before = outside(host)?;
        let act = Act::SetHome { nodes: nodes.clone() };
        let outcome = commit_one(host, vm, act)?;
        expect(outcome == Outcome::Done, || format!("a home gave {outcome:?}"))?;
        let homed = sample(host)?;
        expect(affinities(&homed, vm) == affinities(&unplaced, vm), || {
            format!("a home moved vCPUs to {:?}", affinities(&homed, vm))
        })?;
        let (Some(before), Some(after)) = (before, outside(host)?) else {
            skipped = Some("the host does not know where the VM's pages are".to_owned());
            continue;
        };
        // Setting a home may itself move a few pages home: a hundredth of those elsewhere, plus 1024.
        expect(after.0 + before.0 / 100 + 1024 >= before.0, || {
            format!("setting only a home left {after} outside it, of {before} before")
        })?;
        let bring = Action::gather(host.machine(), vm, nodes.clone(), Pages(u64::MAX)).act;
        match commit_one(host, vm, bring)? {
            Outcome::Moved { .. } => {}
            Outcome::Failed(error) if matches!(error.why, Failure::MemoryFixed { .. }) => {
                skipped = Some(error.to_string());
                continue;
            }
            other => return Err(format!("bringing its memory home gave {other:?}").into()),
        }
        let brought = outside(host)?.unwrap_or_default();
        host.wait(PERIOD);
        host.wait(PERIOD);
        let kept = outside(host)?.unwrap_or_default();
        expect(kept.0 <= brought.0 + before.0 / 100 + 64, || {
            format!("home is {home}: {brought} were elsewhere, and {kept} a second later")
        })?;
    }
    lift_twice(host, vm, Lever::Home)?;
    Ok(skipped.map_or(Verdict::Passed, Verdict::Skipped))
}
