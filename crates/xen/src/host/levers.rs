//! What the agent can change on a domain: each change is journalled, done, and read back.

use homenode_host::{Act, CpuQuota, Failure, Lever, Limit, Outcome};
use homenode_kernel::now;
use homenode_units::{Bytes, CpuSet, MemoryPolicy, NodeSet, Ns, VmId};

use super::XenHost;
use super::moving::ALL_OR_NONE;
use crate::balloon::{self, Target};
use crate::changed::{self, Cap, Home, PLACING, Part, Pins, newest};
use crate::domain::cap_of;
use crate::error::CallError;
use crate::features::{NO_MOVES, NO_PARTS, NO_TOPOLOGY, NO_TRACKER};

/// Xenstore's unit of memory.
const KIB: u64 = 1024;

/// The error of an act.
pub fn failed(act: &Act, cause: &str) -> Failure {
    let what = match act.lever() {
        Lever::VcpuPlacement => "pinning vCPUs",
        Lever::Home => "setting the home",
        Lever::CpuQuota => "setting the cap",
        Lever::Memory => "setting the memory",
        _ => "changing something",
    };
    Failure::Host {
        what: what.to_owned(),
        cause: cause.to_owned(),
    }
}

/// Whether a domain can have this memory policy.
///
/// # Errors
/// Why not.
pub fn policy_is_possible(policy: MemoryPolicy) -> Result<(), Failure> {
    match policy == MemoryPolicy::default() {
        true => Ok(()),
        false => Err(Failure::MemoryPolicy {
            policy,
            why: NO_MOVES.to_owned(),
        }),
    }
}

impl XenHost {
    /// Carries out an act on a domain.
    pub(super) fn pull(&mut self, vm: VmId, act: &Act) -> Result<Outcome, Failure> {
        let failing = |cause: String| failed(act, &cause);
        let cannot = |why: &str| Err(failed(act, why));
        match act {
            Act::PinVcpus { vcpus, cpus } => self.pin(vm, vcpus, cpus).map_err(failing),
            Act::SetHome { nodes } => self.set_home(vm, nodes).map_err(failing),
            Act::Limit { limit, lease_ns } => {
                let (part, done) = match limit {
                    Limit::CpuQuota(quota) => (Part::Cap, self.set_cap(vm, *quota)),
                    Limit::Memory(memory) => (Part::Memory, self.set_memory(vm, *memory)),
                    _ => return cannot(NO_PARTS),
                };
                self.leased(vm, part, *lease_ns, done).map_err(failing)
            }
            Act::MovePages { from, to, pages_max } => self.move_pages(vm, (from, to), *pages_max),
            Act::MoveVirtualNode { .. } | Act::MoveFrames { .. } => Err(Failure::MemoryFixed {
                why: ALL_OR_NONE.to_owned(),
            }),
            Act::SetMemoryPolicy { policy } => policy_is_possible(*policy).map(|()| Outcome::Done),
            Act::Watch { .. } => Err(Failure::NoTracker {
                why: NO_TRACKER.to_owned(),
            }),
            Act::PublishTopology { .. } => Err(Failure::NoTopologyDevice {
                why: NO_TOPOLOGY.to_owned(),
            }),
            // Without such a lever nothing of the agent's is in force.
            Act::Lift { lever } if !is_there(*lever) => Ok(Outcome::Done),
            Act::Lift { lever } => {
                let part = match lever {
                    Lever::CpuQuota => Part::Cap,
                    Lever::Memory => Part::Memory,
                    _ => Part::Placing,
                };
                self.lift(vm, part).map(|()| Outcome::Done).map_err(failing)
            }
        }
    }

    /// Journals a domain's state before it is touched: for the first time, or again if nothing of the agent's is in force;
    /// and what others have set since.
    fn begin(&mut self, vm: VmId) -> Result<(), String> {
        let (Some(domain), Some(journal)) = (self.domains.get(&vm), &mut self.journal) else {
            return Ok(());
        };
        if journal.entry(vm).is_some_and(|entry| entry.run != domain.run) {
            changed::settle(&self.hypervisor, journal, vm)?;
            if journal.entry(vm).is_some() {
                return Err("it is being built, and may be given a cap that an earlier run of it had".into());
            }
        }
        if journal.entry(vm).is_some_and(|entry| entry.has(&PLACING)) {
            self.look_at_pins(vm)?;
            return self.take_in_others(vm);
        }
        let (run, before) = (domain.run.clone(), self.before(domain)?);
        let Some(journal) = &mut self.journal else {
            return Ok(());
        };
        if journal.entry(vm).is_some_and(|entry| entry.before == before) {
            return Ok(());
        }
        journal.begin(run, before).map_err(|error| error.to_string())
    }

    pub(super) fn pin(&mut self, vm: VmId, vcpus: &[u16], cpus: &CpuSet) -> Result<Outcome, String> {
        self.begin(vm)?;
        let mut pins: Pins = self.written(vm)?.unwrap_or_default();
        for index in vcpus {
            newest(pins.0.entry(*index).or_default(), cpus.clone());
        }
        self.write(vm, &pins)?;
        let domid = self.domid(vm);
        for &index in vcpus {
            self.hypervisor
                .pin(domid, index, cpus)
                .map_err(|error| error.to_string())?;
            let seen = self
                .hypervisor
                .affinity(domid, index)
                .map_err(|error| error.to_string())?;
            if seen != *cpus {
                return Err(format!("vCPU {index} may run on CPUs {seen}, not on {cpus}"));
            }
            pins.0.insert(index, vec![cpus.clone()]);
        }
        // The state in force is known now: earlier sets are not the agent's any more.
        self.write(vm, &pins)?;
        Ok(Outcome::Done)
    }

    pub(super) fn set_home(&mut self, vm: VmId, nodes: &NodeSet) -> Result<Outcome, String> {
        self.begin(vm)?;
        let mut home: Home = self.written(vm)?.unwrap_or_default();
        newest(&mut home.0, nodes.clone());
        self.write(vm, &home)?;
        let domid = self.domid(vm);
        let set = self.hypervisor.set_node_affinity(domid, nodes);
        set.map_err(|error| error.to_string())?;
        let seen = self
            .hypervisor
            .node_affinity(domid)
            .map_err(|error| error.to_string())?;
        match seen == *nodes {
            true => self.write(vm, &Home(vec![nodes.clone()])).map(|()| Outcome::Done),
            false => Err(format!(
                "its memory is to come from nodes {seen}, not from {nodes}"
            )),
        }
    }

    fn set_cap(&mut self, vm: VmId, quota: CpuQuota) -> Result<Outcome, String> {
        let say = |error: CallError| error.to_string();
        // First of all: its cap may be one that an earlier run of it left.
        self.begin(vm)?;
        let Some(domain) = self.domains.get(&vm) else {
            return Err("it has ended".into());
        };
        let (domid, pool) = (domain.run.runtime_id, domain.pool.clone());
        let written: Option<Cap> = self.written(vm)?;
        let now = self.hypervisor.cap(domid, &pool).map_err(say)?;
        let before = match &written {
            Some(cap) if cap.ours.contains(&now) => cap.before,
            // Another program's: that is the one to restore.
            _ => now,
        };
        // An operator's cap lower than the request stays in force.
        let wanted = match (cap_of(quota, domain.vcpus.len()), before) {
            (0, before) | (before, 0) => before,
            (ours, before) => ours.min(before),
        };
        let is_ours = written.as_ref().is_some_and(|cap| cap.ours.contains(&now));
        if now == wanted && is_ours {
            return Ok(Outcome::Renewed);
        }
        let mut cap = written.unwrap_or(Cap {
            before,
            ours: Vec::new(),
        });
        cap.before = before;
        newest(&mut cap.ours, wanted);
        self.write(vm, &cap)?;
        self.hypervisor.set_cap(domid, &pool, wanted).map_err(say)?;
        match self.hypervisor.cap(domid, &pool).map_err(say)? {
            seen if seen == wanted => {
                let ours = vec![wanted];
                self.write(vm, &Cap { before, ours }).map(|()| Outcome::Done)
            }
            seen => Err(format!("its cap is {seen} percent, not {wanted}")),
        }
    }

    /// Sets its balloon's target, at most to what its operator gave it.
    fn set_memory(&mut self, vm: VmId, memory: Bytes) -> Result<Outcome, String> {
        self.begin(vm)?;
        let domid = self.domid(vm);
        let asked = |host: &mut Self| {
            let target = balloon::target_of(&mut host.store, domid)?;
            target.ok_or_else(|| "it has no balloon".to_owned())
        };
        let now = asked(self)?;
        let written: Option<Target> = self.written(vm)?;
        let ours = written.filter(|target| target.ours.contains(&now));
        let wanted = |before: u64| (memory.0 / KIB).min(before);
        // A target that is not the agent's is its operator's, and is restored later.
        let mut target = match ours {
            Some(ours) if wanted(ours.before) == now => return Ok(Outcome::Renewed),
            Some(ours) => ours,
            None => Target {
                before: now,
                ours: Vec::new(),
            },
        };
        let (before, wanted) = (target.before, wanted(target.before));
        newest(&mut target.ours, wanted);
        self.write(vm, &target)?;
        self.hypervisor.set_memory(domid, wanted)?;
        let seen = asked(self)?;
        if let Some(domain) = self.domains.get_mut(&vm) {
            domain.target = Some(seen);
        }
        if seen != wanted {
            return Err(format!("it is to come to {seen} KiB, not to {wanted}"));
        }
        let ours = vec![wanted];
        self.write(vm, &Target { before, ours }).map(|()| Outcome::Done)
    }

    /// Begins the lease of a limit. If it could not be set, either the domain is unchanged or the lease's end tries again.
    fn leased(
        &mut self,
        vm: VmId,
        part: Part,
        lease: Ns,
        done: Result<Outcome, String>,
    ) -> Result<Outcome, String> {
        self.leases
            .insert((vm, part), Ns(now().0.saturating_add(lease.0)));
        if done.is_err() {
            let _ = self.lift(vm, part);
        }
        done
    }

    pub(super) fn lift(&mut self, vm: VmId, part: Part) -> Result<(), String> {
        if let Some(journal) = &mut self.journal {
            changed::undo(&self.hypervisor, journal, vm, &[part])?;
        }
        self.leases.remove(&(vm, part));
        if part == Part::Memory
            && let Some(domain) = self.domains.get_mut(&vm)
            && domain.target.is_some()
            && let Ok(target) = balloon::target_of(&mut self.store, domain.run.runtime_id)
        {
            domain.target = target;
        }
        Ok(())
    }

    fn domid(&self, vm: VmId) -> u32 {
        // No domain has this number: a call on it fails.
        self.domains
            .get(&vm)
            .map_or(u32::MAX, |domain| domain.run.runtime_id)
    }

    /// Reads where its vCPUs may run, just before a change: the agent may have pinned them since the last look.
    fn look_at_pins(&mut self, vm: VmId) -> Result<(), String> {
        let Some(domain) = self.domains.get_mut(&vm) else {
            return Ok(());
        };
        for (index, vcpu) in &mut domain.vcpus {
            let now = self.hypervisor.affinity(domain.run.runtime_id, *index);
            vcpu.affinity = now.map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Reads a journal entry of this run of a domain.
    fn written<T: homenode_undo::journal::Written>(&self, vm: VmId) -> Result<Option<T>, String> {
        let run = self.domains.get(&vm).map(|domain| &domain.run);
        let entry = run.and_then(|run| self.entry_of(run));
        entry.map_or(Ok(None), changed::read)
    }

    fn write<T: homenode_undo::journal::Written>(&mut self, vm: VmId, entry: &T) -> Result<(), String> {
        match &mut self.journal {
            Some(journal) => journal.set(vm, entry).map_err(|error| error.to_string()),
            None => Ok(()),
        }
    }
}

/// Whether a lever is one that Xen has.
const fn is_there(lever: Lever) -> bool {
    matches!(
        lever,
        Lever::VcpuPlacement | Lever::Home | Lever::CpuQuota | Lever::Memory
    )
}
