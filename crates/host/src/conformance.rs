//! What every host must do, whatever it is made of: the twin runs these checks in its tests, the live host in the
//! testbed on a real kernel.
//!
//! Not verified here: that a policy's decisions are wise, and anything about timing but that a quota holds.

use homenode_units::{Bytes, NodeSet, Ns, Pages, Permit, Placing, VmId};

use crate::{
    Act, Action, Balloon, CpuQuota, Failure, Host, Impossible, Lever, Limit, Outcome, Percent, Plan, Refusal,
    Sample, Setting, Version, VmSample,
};

/// One check: a name, and a function that says what was expected and what was seen when it fails.
pub struct Check {
    /// Says the property.
    pub name: &'static str,
    /// Runs it against a host on which `vm` runs, with two or more vCPUs or one, memory touched, and nobody else acting.
    pub run: fn(&mut dyn Host, VmId) -> Result<(), String>,
}

/// Time that the checks let pass between samples.
const PERIOD: Ns = Ns::from_millis(500);

/// All checks, in the order to run them.
pub const CHECKS: &[Check] = &[
    Check {
        name: "a sample lists every CPU and node once, in order",
        run: lists_are_complete,
    },
    Check {
        name: "counters never run backwards",
        run: counters_are_monotone,
    },
    Check {
        name: "version is stable while nothing changes",
        run: version_is_stable,
    },
    Check {
        name: "a stale plan is refused and nothing is done",
        run: stale_is_refused,
    },
    Check {
        name: "an impossible plan is refused as a whole",
        run: impossible_is_refused,
    },
    Check {
        name: "a pinned vCPU is seen pinned, and the version grows",
        run: pin_is_seen,
    },
    Check {
        name: "pages move within the budget, and the sample agrees with the receipt",
        run: pages_move,
    },
    Check {
        name: "a home can be lifted, and the VM runs where it did before",
        run: home_is_lifted,
    },
    Check {
        name: "a quota holds every vCPU, is seen, can be renewed and lifted",
        run: quota_holds,
    },
    Check {
        name: "a limit ends with its lease",
        run: limit_ends_with_its_lease,
    },
    Check {
        name: "a quota below the floor, a limit without a lease and a limit of nobody are refused",
        run: impossible_limits_are_refused,
    },
    Check {
        name: "a watched VM's memory is seen once a window, and no more once the lease is over",
        run: memory_is_watched,
    },
    Check {
        name: "a limit on memory is seen, can be renewed and lifted, and ends with its lease",
        run: memory_is_limited,
    },
    Check {
        name: "a permit is kept with the VM until it is taken back",
        run: settings_are_kept,
    },
];

/// The quota that the checks set: a fifth of a CPU.
const QUOTA: CpuQuota = CpuQuota {
    run_ns: Ns::from_millis(6),
    period_ns: Ns::from_millis(30),
};

fn sample(host: &mut dyn Host) -> Result<Sample, String> {
    host.sample().map_err(|e| e.to_string())
}

fn expect(condition: bool, message: impl FnOnce() -> String) -> Result<(), String> {
    if condition { Ok(()) } else { Err(message()) }
}

fn lists_are_complete(host: &mut dyn Host, vm: VmId) -> Result<(), String> {
    let seen = sample(host)?;
    let cpus: Vec<_> = seen.cpus.iter().map(|c| c.id).collect();
    let expected: Vec<_> = host.machine().cpus.iter().map(|c| c.id).collect();
    expect(cpus == expected, || {
        format!("CPUs {expected:?} expected, {cpus:?} sampled")
    })?;
    let nodes = host.machine().node_set();
    expect(seen.nodes.node_set() == nodes, || {
        format!("nodes {nodes} expected, {} sampled", seen.nodes.node_set())
    })?;
    expect(seen.vms.windows(2).all(|w| w[0].id < w[1].id), || {
        "VMs are not in ascending order".into()
    })?;
    let vm = seen
        .vm(vm)
        .ok_or_else(|| format!("VM {vm} runs and is not in the sample"))?;
    expect(!vm.vcpus.is_empty(), || {
        format!("VM {} has no vCPU in the sample", vm.name)
    })?;
    let usable = host.machine().cpu_set();
    for vcpu in &vm.vcpus {
        expect(
            !vcpu.affinity.is_empty() && vcpu.affinity.is_subset(&usable),
            || {
                format!(
                    "affinity {} of vCPU {} is not among the host's CPUs {usable}",
                    vcpu.affinity, vcpu.index
                )
            },
        )?;
    }
    Ok(())
}

fn counters_are_monotone(host: &mut dyn Host, vm: VmId) -> Result<(), String> {
    let before = sample(host)?;
    host.wait(PERIOD);
    let after = sample(host)?;
    expect(after.at > before.at, || {
        format!("time went from {} to {}", before.at, after.at)
    })?;
    for (a, b) in before.cpus.iter().zip(&after.cpus) {
        expect(a.busy_ns <= b.busy_ns, || {
            format!(
                "busy time of CPU {} fell from {} to {}",
                a.id, a.busy_ns, b.busy_ns
            )
        })?;
    }
    let (Some(a), Some(b)) = (before.vm(vm), after.vm(vm)) else {
        return Err(format!("VM {vm} was not in both samples"));
    };
    for (a, b) in a.vcpus.iter().zip(&b.vcpus) {
        let pairs = [
            ("running", a.running_ns, b.running_ns),
            ("waiting", a.waiting_ns, b.waiting_ns),
        ];
        for (what, old, new) in pairs {
            expect(old <= new, || {
                format!("{what} time of vCPU {} fell from {old} to {new}", a.index)
            })?;
        }
        expect(a.counters.is_some() == b.counters.is_some(), || {
            format!("counters of vCPU {} are there in one sample only", a.index)
        })?;
    }
    Ok(())
}

fn version_is_stable(host: &mut dyn Host, _vm: VmId) -> Result<(), String> {
    let before = sample(host)?.version;
    host.wait(PERIOD);
    let after = sample(host)?.version;
    expect(before == after, || {
        format!(
            "nothing changed, and the version went from {} to {}",
            before.0, after.0
        )
    })
}

fn pin_plan(
    version: Version,
    now: &Sample,
    host: &dyn Host,
    vm: VmId,
    node_index: usize,
) -> Result<Plan, String> {
    let seen = now
        .vm(vm)
        .ok_or_else(|| format!("VM {vm} is not in the sample"))?;
    let node = host
        .machine()
        .nodes
        .iter()
        .filter(|(_, n)| !n.cpus.is_empty())
        .map(|(id, _)| id)
        .nth(node_index);
    let cpus = host
        .machine()
        .cpus_of(&NodeSet::one(node.ok_or("the host has too few nodes with CPUs")?));
    let mut plan = Plan::new(version);
    let vcpus = vec![seen.vcpus[0].index];
    plan.decide(
        "conformance",
        Act::PinVcpus { vcpus, cpus }.on(vm),
        "conformance check".into(),
    );
    Ok(plan)
}

fn stale_is_refused(host: &mut dyn Host, vm: VmId) -> Result<(), String> {
    let before = sample(host)?;
    let stale = Version(before.version.0 + 1_000);
    let plan = pin_plan(stale, &before, host, vm, 1)?;
    match host.commit(&plan) {
        Err(Refusal::Stale { planned, .. }) if planned == stale => {}
        other => return Err(format!("a plan of version {} got {other:?}", stale.0)),
    }
    let after = sample(host)?;
    expect(affinities(&before, vm) == affinities(&after, vm), || {
        "a refused plan changed affinities".into()
    })
}

fn affinities(sample: &Sample, vm: VmId) -> Vec<String> {
    sample
        .vm(vm)
        .map(|vm| vm.vcpus.iter().map(|v| v.affinity.to_string()).collect())
        .unwrap_or_default()
}

fn impossible_is_refused(host: &mut dyn Host, vm: VmId) -> Result<(), String> {
    let before = sample(host)?;
    let mut unknown = pin_plan(before.version, &before, host, vm, 0)?;
    let to = host.machine().memory_nodes();
    let nobody = VmId(vm.0 ^ 1);
    unknown.decide(
        "conformance",
        Action::gather(host.machine(), nobody, to, Pages(1)),
        "a VM that does not exist".into(),
    );
    match host.commit(&unknown) {
        Err(Refusal::UnknownVm { vm }) if vm == nobody => {}
        other => return Err(format!("a plan for an unknown VM got {other:?}")),
    }
    let mut nowhere = pin_plan(before.version, &before, host, vm, 0)?;
    nowhere.decide(
        "conformance",
        Act::SetHome {
            nodes: NodeSet::new(),
        }
        .on(vm),
        "no node at all".into(),
    );
    match host.commit(&nowhere) {
        Err(Refusal::Vm {
            why: Impossible::Nodes { .. },
            ..
        }) => {}
        other => return Err(format!("a home without a node got {other:?}")),
    }
    let after = sample(host)?;
    expect(affinities(&before, vm) == affinities(&after, vm), || {
        "part of a refused plan was carried out".into()
    })
}

fn pin_is_seen(host: &mut dyn Host, vm: VmId) -> Result<(), String> {
    for node_index in [1, 0] {
        let before = sample(host)?;
        let plan = pin_plan(before.version, &before, host, vm, node_index)?;
        let receipt = host.commit(&plan).map_err(|e| e.to_string())?;
        expect(receipt.outcomes == [Outcome::Done], || {
            format!("pinning gave {:?}", receipt.outcomes)
        })?;
        host.wait(PERIOD);
        let after = sample(host)?;
        expect(after.version > before.version, || {
            "a pin left the version as it was".into()
        })?;
        let Act::PinVcpus { vcpus, cpus, .. } = &plan.decisions[0].action.act else {
            unreachable!()
        };
        let seen = after
            .vm(vm)
            .and_then(|vm| vm.vcpu(vcpus[0]))
            .ok_or("the pinned vCPU is gone")?;
        expect(seen.affinity == *cpus, || {
            format!("pinned to {cpus}, seen on {}", seen.affinity)
        })?;
    }
    Ok(())
}

fn pages_move(host: &mut dyn Host, vm: VmId) -> Result<(), String> {
    let before = sample(host)?;
    let seen = before
        .vm(vm)
        .ok_or_else(|| format!("VM {vm} is not in the sample"))?;
    let Some(pages) = seen.pages.clone() else {
        return Ok(()); // a host that cannot say where pages lie promises nothing here
    };
    let fullest = pages
        .iter()
        .max_by_key(|(_, p)| **p)
        .map(|(node, _)| node)
        .ok_or("the VM has no pages")?;
    let target = host
        .machine()
        .memory_nodes()
        .iter()
        .find(|n| *n != fullest)
        .ok_or("the host has one node only")?;
    let to = NodeSet::one(target);
    let outside = seen.pages_outside(&to).unwrap_or_default();
    let budget = Pages((outside.0 / 4).max(1));
    let mut plan = Plan::new(before.version);
    plan.decide(
        "conformance",
        Action::gather(host.machine(), vm, to, budget),
        "conformance check".into(),
    );
    let receipt = host.commit(&plan).map_err(|e| e.to_string())?;
    let [Outcome::Moved { moved, .. }] = receipt.outcomes.as_slice() else {
        return Err(format!("moving pages gave {:?}", receipt.outcomes));
    };
    expect(*moved > Pages::ZERO && *moved <= budget, || {
        format!("{moved} moved under a budget of {budget}")
    })?;
    let after = sample(host)?;
    let pages_on = |s: &Sample| {
        s.vm(vm)
            .and_then(|v| v.pages.as_ref()?.get(target).copied())
            .unwrap_or_default()
    };
    let gained = pages_on(&after).0 as f64 - pages_on(&before).0 as f64;
    // A running guest may touch new pages meanwhile: a tenth of the budget either way.
    let tolerance = 0.1 * budget.as_f64() + 64.0;
    expect((gained - moved.as_f64()).abs() <= tolerance, || {
        format!("the receipt says {moved} moved to node {target}, the sample says {gained}")
    })
}

/// Earlier checks pinned the VM: it is free first.
fn home_is_lifted(host: &mut dyn Host, vm: VmId) -> Result<(), String> {
    let lever = Lever::Home;
    let lift = |host: &mut dyn Host| {
        let outcome = commit_one(host, Act::Lift { lever }.on(vm))?;
        expect(outcome == Outcome::Done, || {
            format!("lifting a home gave {outcome:?}")
        })
    };
    lift(host)?;
    let free = sample(host)?;
    for node_index in [1, 0] {
        let mut plan = pin_plan(free.version, &free, host, vm, node_index)?;
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
        let receipt = host.commit(&plan).map_err(|e| e.to_string())?;
        expect(
            receipt.outcomes.iter().all(|outcome| *outcome == Outcome::Done),
            || format!("pins and a home gave {:?}", receipt.outcomes),
        )?;
        let homed = sample(host)?;
        expect(affinities(&homed, vm) != affinities(&free, vm), || {
            "the VM was never pinned: is the host too small?".into()
        })?;
        // Lifting twice is as good as once.
        lift(host)?;
        lift(host)?;
        let after = sample(host)?;
        expect(affinities(&after, vm) == affinities(&free, vm), || {
            let seen = affinities(&after, vm);
            format!(
                "its home was lifted, and its vCPUs run on {seen:?}, before on {:?}",
                affinities(&free, vm)
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
    Ok(())
}

fn limit_to(vm: VmId, quota: CpuQuota, lease_ns: Ns) -> Action {
    Act::Limit {
        limit: Limit::CpuQuota(quota),
        lease_ns,
    }
    .on(vm)
}

fn commit_one(host: &mut dyn Host, action: Action) -> Result<Outcome, String> {
    let mut plan = Plan::new(sample(host)?.version);
    plan.decide("conformance", action, "conformance check".into());
    let receipt = host.commit(&plan).map_err(|e| e.to_string())?;
    receipt
        .outcomes
        .into_iter()
        .next()
        .ok_or_else(|| "no outcome".into())
}

fn quotas(sample: &Sample, vm: VmId) -> Vec<Option<CpuQuota>> {
    let vcpus = sample.vm(vm).map(|vm| vm.vcpus.as_slice()).unwrap_or_default();
    vcpus.iter().map(|vcpu| vcpu.quota).collect()
}

fn quota_holds(host: &mut dyn Host, vm: VmId) -> Result<(), String> {
    let before = sample(host)?;
    let lease = Ns::from_secs(600);
    let outcome = commit_one(host, limit_to(vm, QUOTA, lease))?;
    expect(outcome == Outcome::Done, || format!("limiting gave {outcome:?}"))?;
    let from = sample(host)?;
    expect(from.version > before.version, || {
        "a quota left the version as it was".into()
    })?;
    expect(quotas(&from, vm).iter().all(|seen| *seen == Some(QUOTA)), || {
        format!("held to {QUOTA}, seen are {:?}", quotas(&from, vm))
    })?;
    host.wait(Ns(4 * PERIOD.0));
    let to = sample(host)?;
    let elapsed = to.at.saturating_sub(from.at).as_f64();
    // Kernels deal out time in slices, and what is left of one may be used in the next period.
    let allowed = 1.1 * QUOTA.share() * elapsed + 2.0 * QUOTA.period_ns.as_f64();
    let (Some(a), Some(b)) = (from.vm(vm), to.vm(vm)) else {
        return Err(format!("VM {vm} was not in both samples"));
    };
    for (a, b) in a.vcpus.iter().zip(&b.vcpus) {
        let ran = b.running_ns.saturating_sub(a.running_ns);
        expect(ran.as_f64() <= allowed, || {
            format!("vCPU {} ran {ran} of {elapsed} ns, held to {QUOTA}", a.index)
        })?;
    }
    let outcome = commit_one(host, limit_to(vm, QUOTA, lease))?;
    expect(outcome == Outcome::Renewed, || {
        format!("renewing gave {outcome:?}")
    })?;
    for _ in 0..2 {
        let lever = Lever::CpuQuota;
        let outcome = commit_one(host, Act::Lift { lever }.on(vm))?;
        expect(outcome == Outcome::Done, || format!("lifting gave {outcome:?}"))?;
    }
    let after = sample(host)?;
    expect(quotas(&after, vm) == quotas(&before, vm), || {
        format!("lifted, and quotas are {:?}", quotas(&after, vm))
    })
}

fn memory_is_limited(host: &mut dyn Host, vm: VmId) -> Result<(), String> {
    let balloon = |host: &mut dyn Host| Ok::<_, String>(sample(host)?.vm(vm).and_then(|vm| vm.balloon));
    let before = sample(host)?.version;
    let Some(first) = balloon(host)? else {
        return Ok(()); // a VM without a balloon keeps its memory
    };
    let limit = |memory: Bytes, lease_ns| {
        Act::Limit {
            limit: Limit::Memory(memory),
            lease_ns,
        }
        .on(vm)
    };
    let less = Bytes(first.maximum.0 / 10 * 9).to_pages().to_bytes();
    let lease = Ns::from_secs(600);
    let outcome = commit_one(host, limit(less, lease))?;
    expect(outcome == Outcome::Done, || {
        format!("limiting memory gave {outcome:?}")
    })?;
    let held = sample(host)?;
    expect(held.version > before, || {
        "less memory left the version as it was".into()
    })?;
    let is_held = |seen: Option<Balloon>| {
        seen.is_some_and(|seen| (seen.limit, seen.maximum) == (Some(less), first.maximum))
    };
    let seen = balloon(host)?;
    expect(is_held(seen), || {
        format!("held to {less} of {}, seen is {seen:?}", first.maximum)
    })?;
    let outcome = commit_one(host, limit(less, lease))?;
    expect(outcome == Outcome::Renewed, || {
        format!("renewing gave {outcome:?}")
    })?;
    let is_free = |seen: Option<Balloon>| {
        seen.is_some_and(|seen| {
            seen.limit.is_none() && seen.maximum.0.abs_diff(first.maximum.0) <= first.maximum.0 / 5
        })
    };
    for _ in 0..2 {
        let lever = Lever::Memory;
        let outcome = commit_one(host, Act::Lift { lever }.on(vm))?;
        expect(outcome == Outcome::Done, || format!("lifting gave {outcome:?}"))?;
    }
    let seen = balloon(host)?;
    expect(is_free(seen), || format!("lifted, and seen is {seen:?}"))?;
    let outcome = commit_one(host, limit(less, Ns(PERIOD.0 / 2)))?;
    expect(outcome == Outcome::Done, || {
        format!("limiting memory gave {outcome:?}")
    })?;
    host.wait(PERIOD);
    let seen = balloon(host)?;
    expect(is_free(seen), || {
        format!("the lease is over, and seen is {seen:?}")
    })?;
    let mut plan = Plan::new(sample(host)?.version);
    plan.decide(
        "conformance",
        limit(first.maximum + first.maximum, lease),
        "too much".into(),
    );
    match host.commit(&plan) {
        Err(Refusal::Vm {
            why: Impossible::Memory { .. },
            ..
        }) => Ok(()),
        other => Err(format!("more memory than it has got {other:?}")),
    }
}

fn limit_ends_with_its_lease(host: &mut dyn Host, vm: VmId) -> Result<(), String> {
    let before = sample(host)?;
    let outcome = commit_one(host, limit_to(vm, QUOTA, Ns(PERIOD.0 / 2)))?;
    expect(outcome == Outcome::Done, || format!("limiting gave {outcome:?}"))?;
    host.wait(PERIOD);
    let after = sample(host)?;
    expect(quotas(&after, vm) == quotas(&before, vm), || {
        format!("the lease is over, and quotas are {:?}", quotas(&after, vm))
    })
}

fn impossible_limits_are_refused(host: &mut dyn Host, vm: VmId) -> Result<(), String> {
    let before = sample(host)?;
    let too_little = CpuQuota {
        run_ns: Ns(CpuQuota::MIN.0 - 1),
        ..QUOTA
    };
    let too_long = CpuQuota {
        period_ns: Ns(CpuQuota::PERIOD_MAX.0 + 1),
        ..QUOTA
    };
    let lease = Ns::from_secs(1);
    let nobody = VmId(vm.0 ^ 1);
    let nothing = Act::Limit {
        limit: Limit::CacheWays(Percent(0)),
        lease_ns: lease,
    }
    .on(vm);
    let pages = Act::Lift { lever: Lever::Pages }.on(vm);
    let watch = |window_ns, lease_ns| Act::Watch { window_ns, lease_ns }.on(vm);
    for (action, expected) in [
        (limit_to(vm, too_little, lease), "quota"),
        (limit_to(vm, too_long, lease), "quota"),
        (limit_to(vm, QUOTA, Ns::ZERO), "no-lease"),
        (nothing, "part"),
        (limit_to(nobody, QUOTA, lease), "unknown-vm"),
        (pages, "no-limit"),
        (watch(Ns::ZERO, lease), "window"),
        (watch(PERIOD, Ns::ZERO), "no-lease"),
    ] {
        let mut plan = Plan::new(before.version);
        plan.decide("conformance", limit_to(vm, QUOTA, lease), "possible".into());
        plan.decide("conformance", action.clone(), "impossible".into());
        let answer = host.commit(&plan);
        let got = match &answer {
            Err(Refusal::Vm {
                why: Impossible::Quota { .. },
                ..
            }) => "quota",
            Err(Refusal::Vm {
                why: Impossible::NoLease,
                ..
            }) => "no-lease",
            Err(Refusal::UnknownVm { .. }) => "unknown-vm",
            Err(Refusal::Vm {
                why: Impossible::NoLimit { .. },
                ..
            }) => "no-limit",
            Err(Refusal::Vm {
                why: Impossible::Part { .. },
                ..
            }) => "part",
            Err(Refusal::Vm {
                why: Impossible::Window { .. },
                ..
            }) => "window",
            _ => "something else",
        };
        expect(got == expected, || format!("{action:?} got {answer:?}"))?;
    }
    let after = sample(host)?;
    expect(quotas(&after, vm) == quotas(&before, vm), || {
        "part of a refused plan was carried out".into()
    })
}

fn memory_is_watched(host: &mut dyn Host, vm: VmId) -> Result<(), String> {
    let window_ns = PERIOD;
    let watch = |lease_ns| Act::Watch { window_ns, lease_ns }.on(vm);
    let lease = Ns::from_secs(600);
    let has_carrier = sample(host)?
        .carriers
        .iter()
        .any(|choice| choice.why_not.is_none());
    let outcome = commit_one(host, watch(lease))?;
    if !has_carrier {
        let is_told =
            matches!(&outcome, Outcome::Failed(error) if matches!(error.why, Failure::NoCarrier { .. }));
        return expect(is_told, || {
            format!("there is no carrier, and watching gave {outcome:?}")
        });
    }
    expect(outcome == Outcome::Done, || format!("watching gave {outcome:?}"))?;
    expect(commit_one(host, watch(lease))? == Outcome::Renewed, || {
        "watching on was not a renewal".into()
    })?;
    let mut ends = Vec::new();
    for _ in 0..4 {
        host.wait(PERIOD);
        let now = sample(host)?;
        let watched = now.vm(vm).ok_or("the VM is gone")?;
        let Some(observed) = &watched.observed else {
            continue;
        };
        let seen = observed.as_observation();
        // Hosts are late now and then, and never early.
        expect(seen.interval >= window_ns, || {
            format!("a window of {window_ns} lasted {}", seen.interval)
        })?;
        expect(seen.memory > Pages::ZERO && seen.memory.0 <= seen.frames, || {
            format!("{} of {} frames", seen.memory, seen.frames)
        })?;
        if ends.last() != Some(&seen.at) {
            ends.push(seen.at);
        }
    }
    expect(
        ends.len() >= 2 && ends.windows(2).all(|pair| pair[0] < pair[1]),
        || format!("in four windows' time, windows ended at {ends:?}"),
    )?;
    // What renews the lease may shorten it, as with limits.
    commit_one(host, watch(Ns(PERIOD.0 / 2)))?;
    host.wait(PERIOD);
    expect(
        sample(host)?.vm(vm).is_some_and(|vm| vm.observed.is_none()),
        || "the lease is over, and what was seen is still told".into(),
    )?;
    commit_one(host, watch(lease))?;
    let lever = Lever::Watching;
    for _ in 0..2 {
        let outcome = commit_one(host, Act::Lift { lever }.on(vm))?;
        expect(outcome == Outcome::Done, || format!("lifting gave {outcome:?}"))?;
    }
    expect(
        sample(host)?.vm(vm).is_some_and(|vm| vm.observed.is_none()),
        || "nobody watches, and something is told".into(),
    )
}

fn settings_are_kept(host: &mut dyn Host, vm: VmId) -> Result<(), String> {
    let kept = |host: &mut dyn Host| {
        let sample = sample(host)?;
        let settings = sample.vm(vm).map(|vm| vm.settings.clone());
        settings.ok_or_else(|| format!("VM {vm} is not in the sample"))
    };
    let first = sample(host)?.version;
    let permit = Permit::pollution(250_000).map_err(|e| e.to_string())?;
    let policy = Placing::FirstTouch.alone();
    for setting in [
        Setting::Permit(Some(permit)),
        Setting::MemoryPolicy(Some(policy)),
        Setting::MemoryFloor(Some(Bytes::from_gib(1))),
        Setting::MemoryFloor(None),
        Setting::Permit(None),
        Setting::MemoryPolicy(None),
    ] {
        let mut wanted = kept(host)?;
        wanted.set(setting);
        host.set(vm, setting).map_err(|e| e.to_string())?;
        let seen = kept(host)?;
        expect(seen == wanted, || format!("set {setting:?}, seen is {seen:?}"))?;
    }
    expect(sample(host)?.version > first, || {
        "settings left the version as it was".into()
    })?;
    match host.set(VmId(vm.0 ^ 1), Setting::Permit(Some(permit))) {
        Err(error) if error.why == Failure::VmGone => Ok(()),
        other => Err(format!("a permit for nobody got {other:?}")),
    }
}
