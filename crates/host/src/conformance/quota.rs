//! Limits on CPU time, and limits that every host refuses.

use homenode_units::{Ns, VmId};

use super::{Breach, Check, LEASE, PERIOD, commit_one, expect, lift_twice, passed, sample};
use crate::{Act, CpuQuota, Host, Impossible, Lever, Limit, Outcome, Plan, Refusal, Sample};

pub(super) static HELD: Check = Check {
    name: "a quota holds every vCPU, is seen, can be renewed and lifted",
    run: |host, vm| quota_holds(host, vm).map(passed),
};

pub(super) static LEASED: Check = Check {
    name: "a limit ends with its lease",
    run: |host, vm| limit_ends_with_its_lease(host, vm).map(passed),
};

pub(super) static IMPOSSIBLE: Check = Check {
    name: "a quota below the floor, a limit without a lease, a limit of an unknown VM and lifting where nothing is held are refused",
    run: |host, vm| impossible_limits_are_refused(host, vm).map(passed),
};

/// The quota that the checks set: a fifth of a CPU for each vCPU.
const QUOTA: CpuQuota = CpuQuota {
    run_ns: Ns::from_millis(6),
    period_ns: Ns::from_millis(30),
};

fn limit_to(quota: CpuQuota, lease_ns: Ns) -> Act {
    let limit = Limit::CpuQuota(quota);
    Act::Limit { limit, lease_ns }
}

fn quotas(sample: &Sample, vm: VmId) -> Vec<Option<CpuQuota>> {
    let vcpus = sample.vm(vm).map(|vm| vm.vcpus.as_slice()).unwrap_or_default();
    vcpus.iter().map(|vcpu| vcpu.quota).collect()
}

fn quota_holds(host: &mut dyn Host, vm: VmId) -> Result<(), Breach> {
    let before = sample(host)?;
    let outcome = commit_one(host, vm, limit_to(QUOTA, LEASE))?;
    expect(outcome == Outcome::Done, || {
        format!("expected the limit to be done, saw {outcome:?}")
    })?;
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
    // Kernels hand out time in slices, and a vCPU may use the rest of a slice in the next period.
    let allowed = 1.1 * QUOTA.share() * elapsed + 2.0 * QUOTA.period_ns.as_f64();
    let (Some(a), Some(b)) = (from.vm(vm), to.vm(vm)) else {
        return Err(format!("VM {vm} was not in both samples").into());
    };
    for (a, b) in a.vcpus.iter().zip(&b.vcpus) {
        let ran = b.running_ns.saturating_sub(a.running_ns);
        expect(ran.as_f64() <= allowed, || {
            format!("vCPU {} ran {ran} of {elapsed} ns, held to {QUOTA}", a.index)
        })?;
    }
    let outcome = commit_one(host, vm, limit_to(QUOTA, LEASE))?;
    expect(outcome == Outcome::Renewed, || {
        format!("expected the renewed limit to be done, saw {outcome:?}")
    })?;
    lift_twice(host, vm, Lever::CpuQuota)?;
    let after = sample(host)?;
    expect(quotas(&after, vm) == quotas(&before, vm), || {
        format!("lifted, but quotas are {:?}", quotas(&after, vm))
    })
}

fn limit_ends_with_its_lease(host: &mut dyn Host, vm: VmId) -> Result<(), Breach> {
    let before = sample(host)?;
    let outcome = commit_one(host, vm, limit_to(QUOTA, Ns(PERIOD.0 / 2)))?;
    expect(outcome == Outcome::Done, || {
        format!("expected the limit to be done, saw {outcome:?}")
    })?;
    host.wait(PERIOD);
    let after = sample(host)?;
    expect(quotas(&after, vm) == quotas(&before, vm), || {
        format!("the lease is over, but quotas are {:?}", quotas(&after, vm))
    })
}

fn impossible_limits_are_refused(host: &mut dyn Host, vm: VmId) -> Result<(), Breach> {
    let before = sample(host)?;
    let too_little = CpuQuota {
        run_ns: Ns(CpuQuota::MIN.0 - 1),
        ..QUOTA
    };
    let too_long = CpuQuota {
        period_ns: Ns(CpuQuota::PERIOD_MAX.0 + 1),
        ..QUOTA
    };
    let watch = |window_ns, lease_ns| Act::Watch { window_ns, lease_ns };
    let lift = |lever| Act::Lift { lever };
    let nobody = VmId(vm.0 ^ 1);
    for (vm_of, act, expected) in [
        (vm, limit_to(too_little, LEASE), "quota"),
        (vm, limit_to(too_long, LEASE), "quota"),
        (vm, limit_to(QUOTA, Ns::ZERO), "no-lease"),
        (nobody, limit_to(QUOTA, LEASE), "unknown-vm"),
        (vm, lift(Lever::VcpuPlacement), "no-limit"),
        (vm, lift(Lever::Pages), "no-limit"),
        (vm, lift(Lever::MemoryPolicy), "no-limit"),
        (vm, lift(Lever::Topology), "no-limit"),
        (vm, watch(Ns::ZERO, LEASE), "window"),
        (vm, watch(PERIOD, Ns::ZERO), "no-lease"),
    ] {
        let mut plan = Plan::new(before.version);
        plan.decide("conformance", limit_to(QUOTA, LEASE).on(vm), "possible".into());
        plan.decide("conformance", act.clone().on(vm_of), "impossible".into());
        let answer = host.commit(&plan);
        let got = match &answer {
            Err(Refusal::UnknownVm { .. }) => "unknown-vm",
            Err(Refusal::Vm { why, .. }) => match why {
                Impossible::Quota { .. } => "quota",
                Impossible::NoLease => "no-lease",
                Impossible::NoLimit { .. } => "no-limit",
                Impossible::Window { .. } => "window",
                _ => "something else",
            },
            _ => "something else",
        };
        expect(got == expected, || {
            format!("expected {expected:?} for {act:?}, saw {answer:?}")
        })?;
    }
    let after = sample(host)?;
    expect(quotas(&after, vm) == quotas(&before, vm), || {
        "part of a refused plan was carried out".into()
    })
}
