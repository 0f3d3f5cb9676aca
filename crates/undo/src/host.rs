//! What every real host provides in addition to the contract of `homenode-host`, on any hypervisor: an orderly end in all cases.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use homenode_host::{
    Action, ActionError, Host, LocalMigration, Outcome, Plan, Receipt, Refusal, Sample, WakeSignal,
};
use homenode_machine::Machine;
use homenode_units::{CpuSet, NodeSet, VmId};

use crate::acting::{RightToAct, Undone};
use crate::heartbeat::Heartbeat;
use crate::state_dir::STATE_DIR;

/// Where an agent serves topology pages.
pub const TOPOLOGY_SOCKET: &str = "/run/homenode/topology.sock";

/// Whether the host carries out plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acting {
    /// The host carries out plans.
    Live,
    /// The host checks plans and answers [`Outcome::DryRun`]; it takes no lock and writes no journal.
    DryRun,
}

/// Options for watching and acting on a host.
#[derive(Clone, Debug)]
pub struct Options {
    /// What the host is.
    pub machine: Machine,
    /// CPUs that the operator reserves for the host: no thread of a VM is pinned to them.
    pub reserved_cpus: CpuSet,
    /// Root of `/proc`, `/sys` and `/run`: `/`, except in tests.
    pub root: PathBuf,
    /// Directory of the journal and the lock.
    pub state_dir: PathBuf,
    /// Socket from which the VMs' QEMU processes get their topology pages.
    pub topology_socket: PathBuf,
    /// Whether plans are carried out.
    pub acting: Acting,
    /// Ends waits and page moves early when there is something to do or a signal arrived.
    pub wake_signal: WakeSignal,
    /// Tells the guard that the agent is alive.
    pub heartbeat: Heartbeat,
    /// VMs that may be migrated within the same host. Used only on Xen; other hosts move pages without it.
    pub local_migration: LocalMigration,
    /// Whether to read the vCPUs' waiting times from Xen's trace, on a host that has one.
    pub trace_waiting: bool,
}

impl Options {
    /// Options of a live host with its usual paths.
    pub fn new(machine: Machine) -> Options {
        Options {
            machine,
            reserved_cpus: CpuSet::new(),
            root: PathBuf::from("/"),
            state_dir: PathBuf::from(STATE_DIR),
            topology_socket: PathBuf::from(TOPOLOGY_SOCKET),
            acting: Acting::Live,
            wake_signal: WakeSignal::default(),
            heartbeat: Heartbeat::default(),
            local_migration: LocalMigration::default(),
            trace_waiting: false,
        }
    }
}

/// What the journal of an earlier agent says about a VM that still runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CarriedOver {
    /// The VM.
    pub vm: VmId,
    /// The VM's home.
    pub home: Option<NodeSet>,
    /// CPUs to which the earlier agent last pinned each vCPU.
    pub pins: BTreeMap<u16, CpuSet>,
    /// The nodes to which the VM's pages were moving when that agent ended.
    pub moving: Option<NodeSet>,
}

/// What the agent needs from a real host in addition to the contract.
pub trait RealHost: Host {
    /// This agent's right to act on the host.
    fn right(&self) -> &RightToAct;

    /// This agent's right to act on the host.
    fn right_mut(&mut self) -> &mut RightToAct;

    /// Returns what the operator should know and no sample carries: missing counters, broken settings, changes by another
    /// program. Each notice is returned once.
    fn take_notices(&mut self) -> Vec<String>;

    /// Homes, pins and unfinished moves that an earlier agent left on VMs that still run.
    fn carried_over(&self) -> Vec<CarriedOver>;

    /// Restores every touched VM, as the guard would. Lists what could not be restored, which stays in the journal.
    fn restore(&mut self) -> Undone;

    /// Lifts all of the agent's limits: limits never outlast the agent, whatever else it leaves in force. Returns what could not
    /// be lifted, which stays in the journal.
    fn lift_limits(&mut self) -> Vec<String>;
}

/// What [`commit`] needs from a host.
pub trait Commit: Host {
    /// The last sample.
    fn last(&self) -> &Sample;

    /// Refuses a plan if another program changed one of its VMs since the last sample.
    ///
    /// # Errors
    /// [`Refusal::Stale`].
    fn refuse_changed(&mut self, plan: &Plan) -> Result<(), Refusal>;

    /// Whether this is a dry run.
    fn is_dry_run(&self) -> bool;

    /// Carries out one action.
    ///
    /// # Errors
    /// Why it was not carried out.
    fn act(&mut self, action: &Action) -> Result<Outcome, ActionError>;

    /// Updates the last sample on these VMs, with a new version if they changed.
    fn look_again(&mut self, touched: &BTreeSet<VmId>);

    /// The heartbeat to the agent's guard.
    fn heartbeat(&self) -> &Heartbeat;
}

/// Commits a plan: checks it, refuses it if its VMs changed since the sample, carries it out, and samples its VMs again.
///
/// # Errors
/// Why nothing of the plan was carried out.
pub fn commit(host: &mut impl Commit, plan: &Plan) -> Result<Receipt, Refusal> {
    plan.check(host.machine(), host.last())?;
    host.refuse_changed(plan)?;
    let mut outcomes = Vec::with_capacity(plan.decisions.len());
    for decision in &plan.decisions {
        host.heartbeat().beat();
        outcomes.push(match host.is_dry_run() {
            true => Outcome::DryRun,
            false => host.act(&decision.action).unwrap_or_else(Outcome::Failed),
        });
    }
    host.look_again(&plan.vms());
    Ok(Receipt {
        version: host.last().version,
        outcomes,
    })
}
