//! Changes that other programs make to domains that the agent has touched. These changes become the state to restore. This module
//! also settles journal entries of domains whose run has ended.

use homenode_undo::journal::{Before, Journal, JournalError, Run, Written};
use homenode_units::{CpuSet, NodeSet, VmId};

use super::XenHost;
use crate::changed::{self, Home, Pins};
use crate::domain::Domain;
use crate::error::{CallError, LeverError};
use crate::levers::PLACING;

impl XenHost {
    /// Settles journal entries of ended runs.
    pub(super) fn settle_ended(&mut self) -> Result<(), CallError> {
        let Some(journal) = &mut self.journal else {
            return Ok(());
        };
        let runs: Vec<Run> = journal
            .entries()
            .values()
            .map(|entry| entry.run.clone())
            .collect();
        for run in runs {
            // The journal entry of a domain on its way is rewritten when the domain has arrived.
            if self.moves.on_its_way() == Some(run.vm) || changed::alive(&self.hypervisor, &run)?.is_some() {
                continue;
            }
            match changed::settle(&self.hypervisor, journal, run.vm) {
                Ok(()) => drop(self.levers.remove(&run.vm)),
                Err(cause) => self.notices.add(format!(
                    "the agent's changes to an earlier run of domain {} could not be undone: {cause}",
                    run.name
                )),
            }
        }
        Ok(())
    }

    /// Takes what other programs have set since the agent placed a domain as the operator's state, which is restored later.
    pub(crate) fn take_in_others(&mut self, vm: VmId) -> Result<(), LeverError> {
        let (Some(domain), Some(journal)) = (self.domains.get(&vm), &mut self.journal) else {
            return Ok(());
        };
        let Some(entry) = journal.entry(vm).filter(|entry| entry.run == domain.run) else {
            return Ok(());
        };
        if !entry.has(&PLACING) {
            return Ok(());
        }
        let (mut pins, mut before) = (
            changed::read::<Pins>(entry)?.unwrap_or_default(),
            entry.before.clone(),
        );
        let home = changed::read::<Home>(entry)?;
        let name = &domain.run.name;
        let mut said = Vec::new();
        for (index, vcpu) in &domain.vcpus {
            let ours = pins.0.get(index);
            let is_ours = ours.is_some_and(|ours| ours.contains(&vcpu.affinity));
            if is_ours || (ours.is_none() && before.vcpus.get(index) == Some(&vcpu.affinity)) {
                continue;
            }
            pins.0.remove(index);
            before.vcpus.insert(*index, vcpu.affinity.clone());
            let cpus = &vcpu.affinity;
            said.push(format!(
                "vCPU {index} of domain {name} was given CPUs {cpus} by another program; the agent leaves that as it is"
            ));
        }
        let nodes = self.hypervisor.node_affinity(domain.run.runtime_id)?;
        let is_at_home = home.as_ref().is_some_and(|home| home.0.contains(&nodes));
        if !is_at_home && before.nodes.as_ref() != Some(&nodes) {
            let follows = nodes == self.followed(domain)?;
            if home.is_some() {
                said.push(format!(
                    "another program set memory of domain {name} to come from nodes {nodes}; the agent leaves that as it is"
                ));
            }
            match follows {
                // The nodes changed because the agent's pins changed the CPUs, so restoring the CPUs restores the nodes.
                true if self.hypervisor.can_follow_cpus(domain.run.runtime_id) => before.nodes = None,
                true if home.is_none() => {}
                _ => before.nodes = Some(nodes),
            }
        }
        let is_home_lost = home.is_some() && !is_at_home;
        let journal = self.journal.as_mut().expect("it was there");
        write(journal, (vm, &domain.run), before, &pins, is_home_lost)?;
        for text in said {
            self.notices.add(text);
        }
        Ok(())
    }

    /// Returns the state of a domain to journal before the agent touches it. Nodes that only follow the domain's CPUs are left
    /// out, if that can be detected and undone.
    pub(crate) fn before(&self, domain: &Domain) -> Result<Before, CallError> {
        let domid = domain.run.runtime_id;
        let nodes = self.hypervisor.node_affinity(domid)?;
        let (all, preferred) = (self.nodes_of(domain, Preferred::No)?, self.followed(domain)?);
        // If vCPUs prefer only part of the CPUs that they may run on, the toolstack has chosen a place and set it in the
        // hypervisor.
        let follows = nodes == all && all == preferred && self.hypervisor.can_follow_cpus(domid);
        Ok(Before {
            // Include offline vCPUs, which may come online between two readings.
            vcpus: (0..domain.listed.vcpu_count)
                .filter_map(|index| Some((index, self.hypervisor.affinity(domid, index).ok()?)))
                .collect(),
            nodes: Some(nodes).filter(|_| !follows),
            ..Before::default()
        })
    }

    /// Returns the nodes that a domain's memory comes from if none are set.
    fn followed(&self, domain: &Domain) -> Result<NodeSet, CallError> {
        self.nodes_of(domain, Preferred::Yes)
    }

    /// Returns the nodes of the domain's CPUs, chosen as Xen does. Takes the CPUs that the vCPUs may run on, and of these, if
    /// preferences count, the CPUs that at least one vCPU prefers. If no CPU is preferred, keeps all of them.
    fn nodes_of(&self, domain: &Domain, preferred: Preferred) -> Result<NodeSet, CallError> {
        let (mut hard, mut soft) = (CpuSet::new(), CpuSet::new());
        for index in 0..domain.listed.vcpu_count {
            let (may, prefers) = self.hypervisor.affinities(domain.run.runtime_id, index)?;
            hard = hard.union(&may);
            soft = soft.union(&prefers);
        }
        let hard = hard.intersection(&domain.pool.cpus);
        let soft = soft.intersection(&hard);
        let cpus = match preferred == Preferred::Yes && !soft.is_empty() {
            true => soft,
            false => hard,
        };
        let of = self
            .options
            .machine
            .cpus
            .iter()
            .filter(|cpu| cpus.contains(cpu.id));
        Ok(of.map(|cpu| cpu.node).collect())
    }
}

/// Whether vCPUs' preferences count.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Preferred {
    Yes,
    No,
}

/// Journals which pins are still the agent's, and the state to restore. The state to restore comes first: after a crash in
/// between, the journal lists a pin that is no longer the agent's, and undoing leaves such a pin alone.
fn write(
    journal: &mut Journal,
    (vm, run): (VmId, &Run),
    before: Before,
    pins: &Pins,
    is_home_lost: bool,
) -> Result<(), JournalError> {
    let Some(entry) = journal.entry(vm) else {
        return Ok(());
    };
    let had: Option<Pins> = entry.get();
    if entry.before != before {
        journal.begin(run.clone(), before)?;
    }
    if had.is_some_and(|had| had != *pins) {
        match pins.0.is_empty() {
            true => journal.clear(vm, &[Pins::KEY]),
            false => journal.set(vm, pins)?,
        }
    }
    if is_home_lost {
        journal.clear(vm, &[Home::KEY]);
    }
    Ok(())
}
