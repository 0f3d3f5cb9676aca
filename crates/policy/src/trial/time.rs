//! CPU time that VMs gained and lost through changes of their homes, as trials measured it.
//!
//! # Terms
//! - *Time* of a VM: CPU time that it wanted, running or waiting ([`homenode_host::VmRates::cpus_wanted`]).
//! - *Ratio* of a VM: its speed now over its speed without the agent's changes of its home, which is the product of the measured
//!   ratios ([`super::Verdict::seen`]) of the trials that were kept and are still in force. It is 1 without any.
//!
//! # Algorithm
//! 1. In time `t` at ratio `r` a VM does what would have taken it `t r`. So it gains `t (r - 1)`, or loses `t (1 - r)`.
//! 2. A trial counts from its beginning: once it is judged, the VM's time since then is counted at the ratio that the trial
//!    measured. A change that is undone counts too, since the VM ran at that ratio while it lasted.
//! 3. The ratio returns to 1 when the VM leaves the nodes on which the trials were kept.
//!
//! What is not measured is not counted: a change without a trial, such as a home that an earlier agent or the operator assigned,
//! and a trial whose result is unsure because the VM's company changed. A ratio is measured once, and is assumed to last.

use std::collections::BTreeMap;

use homenode_units::{NodeSet, Ns, VmId};

/// CPU time that a VM gained and lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Time {
    /// Time in which the VM was faster than without the agent: what it saved.
    pub gained: Ns,
    /// Time in which the VM was slower: what it cost.
    pub lost: Ns,
}

/// The account of one VM. Times are in seconds, so that small parts of many cycles add up.
#[derive(Clone, Debug, Default)]
struct Account {
    /// Nodes on which trials were kept, and the ratio that they measured together.
    in_force: Option<(NodeSet, f64)>,
    /// Time since the trial began that is not judged yet.
    on_trial_s: f64,
    gained_s: f64,
    lost_s: f64,
    is_measured: bool,
}

/// The accounts of all VMs.
#[derive(Clone, Debug, Default)]
pub(super) struct Times {
    vms: BTreeMap<VmId, Account>,
}

impl Times {
    /// Forgets VMs that are gone.
    pub(super) fn retain(&mut self, is_here: impl Fn(VmId) -> bool) {
        self.vms.retain(|id, _| is_here(*id));
    }

    /// Begins a trial. An earlier one of the VM may have ended without a judgement, for example because its home was never set:
    /// its time does not belong to this one.
    pub(super) fn begin(&mut self, vm: VmId) {
        self.vms.entry(vm).or_default().on_trial_s = 0.0;
    }

    /// Counts a cycle in which a VM wanted this much CPU time, in seconds.
    pub(super) fn pass(&mut self, vm: VmId, wanted_s: f64, home: Option<&NodeSet>, is_on_trial: bool) {
        let account = self.vms.entry(vm).or_default();
        if is_on_trial {
            account.on_trial_s += wanted_s;
            return;
        }
        account.on_trial_s = 0.0;
        account.in_force.take_if(|(nodes, _)| home != Some(nodes));
        account.count(wanted_s, account.ratio());
    }

    /// Counts a trial that was judged. `seen` is the ratio that it measured; `kept_on` are the nodes of the new home, unless the
    /// change is undone.
    pub(super) fn judged(&mut self, vm: VmId, seen: f64, kept_on: Option<&NodeSet>) {
        let account = self.vms.entry(vm).or_default();
        account.is_measured = true;
        let ratio = account.ratio() * seen;
        let wanted_s = std::mem::take(&mut account.on_trial_s);
        account.count(wanted_s, ratio);
        if let Some(nodes) = kept_on {
            account.in_force = Some((nodes.clone(), ratio));
        }
    }

    /// Ends a trial whose result is unsure. If the change is kept, the earlier ratio stays in force.
    pub(super) fn unsure(&mut self, vm: VmId, kept_on: Option<&NodeSet>) {
        let Some(account) = self.vms.get_mut(&vm) else {
            return;
        };
        account.on_trial_s = 0.0;
        if let (Some(nodes), Some((on, _))) = (kept_on, &mut account.in_force) {
            on.clone_from(nodes);
        }
    }

    /// Returns what a VM gained and lost; `None` if none of its trials measured anything.
    pub(super) fn of(&self, vm: VmId) -> Option<Time> {
        let account = self.vms.get(&vm).filter(|account| account.is_measured)?;
        let time = |seconds: f64| Ns((seconds * 1e9) as u64);
        Some(Time {
            gained: time(account.gained_s),
            lost: time(account.lost_s),
        })
    }
}

impl Account {
    fn ratio(&self) -> f64 {
        self.in_force.as_ref().map_or(1.0, |(_, ratio)| *ratio)
    }

    fn count(&mut self, wanted_s: f64, ratio: f64) {
        let gained_s = wanted_s * (ratio - 1.0);
        self.gained_s += gained_s.max(0.0);
        self.lost_s += (-gained_s).max(0.0);
    }
}
