//! Moves a domain's memory: checks whether the domain can be moved, starts the move, and takes over the domain that arrives.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::process::{Child, Command, Stdio};

use homenode_host::{Allow, Failure, Immovable, Outcome};
use homenode_kernel::now;
use homenode_undo::journal::{Entry, Run};
use homenode_undo::scope;
use homenode_units::{Bytes, CpuSet, NodeId, NodeSet, Ns, Pages, VmId};

use super::XenHost;
use crate::changed::{Home, Pins};
use crate::domain::Domain;
use crate::features::NO_MOVES;
use crate::hypervisor::Hypervisor;
use crate::levers::{self, ALL_OR_NONE};
use crate::moving::configuration::Kind;
use crate::moving::error::{MoveError, Unmovable};
use crate::moving::{self, Ended, JOB, Job, devices, files};
use crate::store::Asking;

/// How long the result of checking whether a domain can be moved stays valid. A check reads files and xenstore.
const FOUND_FOR: Ns = Ns::from_secs(60);
/// How often to report the progress of a move.
const SAY_EVERY: Ns = Ns::from_secs(10);
/// Memory that must stay free on a node besides the domain and Xen's own needs.
const MARGIN: Bytes = Bytes::from_mib(64);
/// Memory that Xen needs for a domain besides the domain's own: this much per vCPU, and a share of the domain's memory.
const FOR_VCPU: Bytes = Bytes::from_mib(1);
const SHARE_FOR_TABLES: u64 = 64;
/// Xenstore key that a guest must have set before it can be suspended.
const SUSPENDS: &str = "control/feature-suspend";

/// State of all moves.
#[derive(Debug, Default)]
pub(super) struct Moves {
    current: Option<Move>,
    /// Time until which each domain is not moved again.
    rests: BTreeMap<VmId, Ns>,
    found: BTreeMap<VmId, Found>,
}

/// Result of checking whether a domain can be moved.
#[derive(Debug)]
struct Found {
    domid: u32,
    at: Ns,
    /// Whether the domain would be paused during the move, or why it cannot be moved.
    is_still: Result<bool, Unmovable>,
}

/// A move in progress.
#[derive(Debug)]
struct Move {
    job: Job,
    /// The mover; `None` if another agent started it.
    mover: Option<Child>,
    said_at: Ns,
}

impl Moves {
    /// Returns the domain that is on its way.
    pub(super) fn on_its_way(&self) -> Option<VmId> {
        self.current.as_ref().map(|current| current.job.vm)
    }

    /// Returns true if another agent began to move this domain. It is left out of samples meanwhile.
    pub(super) fn is_anothers(&self, vm: VmId) -> bool {
        let anothers = self.current.as_ref().filter(|current| current.mover.is_none());
        anothers.is_some_and(|current| current.job.vm == vm)
    }
}

impl XenHost {
    /// Takes over a move that an earlier agent began.
    pub(super) fn take_over_moves(&mut self) {
        if self.journal.is_none() {
            return;
        }
        if let Some(said) = moving::recover(&self.hypervisor) {
            self.notices.add(said);
        }
        if let Some(job) = moving::under_way() {
            let name = &job.name;
            self.notices.add(format!(
                "an earlier agent began to move domain {name} to node {}; the domain is left alone until it has arrived",
                job.to
            ));
            self.moves.current = Some(Move {
                job,
                mover: None,
                said_at: now(),
            });
        }
    }

    /// Returns why a domain's memory cannot move now, if it cannot.
    pub(super) fn immovable(&self, domain: &Domain) -> Option<Immovable> {
        let vm = domain.run.vm;
        if self.moves.on_its_way() == Some(vm) {
            return Some(Immovable::Migrating);
        }
        if domain.listed.is_paused {
            return Some(Immovable::Paused);
        }
        let hypervisor = |reason: &str| {
            Some(Immovable::Hypervisor {
                reason: reason.into(),
            })
        };
        match self.moves.found.get(&vm).map(|found| &found.is_still) {
            None => hypervisor(NO_MOVES),
            Some(Err(why)) => hypervisor(&why.to_string()),
            Some(Ok(_)) if self.rests(vm) => {
                hypervisor("its last move began or ended less than `local_migration.interval` ago")
            }
            Some(Ok(_)) => None,
        }
    }

    fn rests(&self, vm: VmId) -> bool {
        self.moves.rests.get(&vm).is_some_and(|until| *until > now())
    }

    /// Checks which domains can be moved, if the operator allows moves and the last check has expired.
    pub(super) fn look_who_moves(&mut self) {
        if self.options.local_migration.allow == Allow::Off || self.journal.is_none() {
            return;
        }
        let at = now();
        let domains = &self.domains;
        self.moves.rests.retain(|_, until| *until > at);
        self.moves.found.retain(|vm, found| {
            domains
                .get(vm)
                .is_some_and(|domain| domain.run.runtime_id == found.domid)
                && at.saturating_sub(found.at) < FOUND_FOR
        });
        for (vm, domain) in domains {
            if !self.moves.found.contains_key(vm) {
                let domid = domain.run.runtime_id;
                let is_still = is_still(
                    (&self.hypervisor, &mut self.store),
                    domain,
                    self.options.local_migration.allow,
                );
                self.moves.found.insert(*vm, Found { domid, at, is_still });
            }
        }
    }

    /// Begins to move a domain's memory. The result is reported when the domain has arrived.
    pub(crate) fn move_pages(
        &mut self,
        vm: VmId,
        (from, to): (&NodeSet, &NodeSet),
        pages_max: Pages,
    ) -> Result<Outcome, Failure> {
        let fixed = |why: String| Failure::MemoryFixed { why };
        let domain = self.domains.get(&vm).ok_or(Failure::VmGone)?;
        let [node] = to.iter().collect::<Vec<_>>()[..] else {
            return Err(fixed(format!("{ALL_OR_NONE}, not to nodes {to}")));
        };
        if let Some(why) = self.immovable(domain) {
            return Err(fixed(why.to_string()));
        }
        let known = self.page_counts.of(domain.run.runtime_id);
        let known = known.ok_or_else(|| fixed("the nodes that it is on are unknown".into()))?;
        let all: u64 = known.values().map(|pages| pages.0).sum();
        let there = known.get(node).map_or(0, |pages| pages.0);
        let leaving = known.iter().filter(|(at, _)| from.contains(*at));
        let leaving: u64 = leaving.map(|(_, pages)| pages.0).sum();
        if all == there {
            return Ok(nothing(0));
        }
        if leaving + there < all || pages_max.0 < leaving {
            return Err(fixed(format!(
                "{ALL_OR_NONE}: {leaving} of its {all} pages may leave their nodes, and at most {} may move",
                pages_max.0
            )));
        }
        self.fits(domain, node)?;
        // Check again now, because the last check may be old.
        let still = is_still(
            (&self.hypervisor, &mut self.store),
            domain,
            self.options.local_migration.allow,
        )
        .map_err(|why| fixed(why.to_string()))?;
        if self.moves.current.is_some() || !moving::is_free() {
            return Err(fixed(
                "another domain is being moved, and only one can move at a time".into(),
            ));
        }
        let job = self
            .job(domain, node, still)
            .map_err(|why| fixed(why.to_string()))?;
        self.begin_move(job).map_err(|cause| Failure::Host {
            what: "moving memory".into(),
            cause: cause.to_string(),
        })?;
        Ok(nothing(leaving))
    }

    /// Checks that a node has room for a second copy of the whole domain.
    fn fits(&self, domain: &Domain, node: NodeId) -> Result<(), Failure> {
        let memory = self.hypervisor.nodes().map(|nodes| nodes.memory);
        let free = memory.ok().and_then(|memory| *memory.get(usize::from(node.0))?);
        // At first the new domain also has the memory that the balloon holds back.
        let given = self
            .sample_of(domain)
            .balloon
            .map_or(Bytes::ZERO, |of| of.maximum);
        let own = Pages(domain.listed.pages).to_bytes().max(given).0;
        let besides = FOR_VCPU.0 * domain.vcpus.len() as u64 + own / SHARE_FOR_TABLES + MARGIN.0;
        match free {
            Some(free) if free.free >= own.saturating_add(besides) => Ok(()),
            _ => Err(Failure::NoMemory {
                nodes: NodeSet::one(node),
            }),
        }
    }

    /// Returns the job for a move, with everything as the domain's operator set it.
    fn job(&self, domain: &Domain, to: NodeId, still: bool) -> Result<Job, Unmovable> {
        let (vm, domid) = (domain.run.vm, domain.run.runtime_id);
        let of = files::configuration(domid, vm)?;
        let entry = self.entry_of(&domain.run);
        let ours = entry.and_then(Entry::get::<Pins>).unwrap_or_default().0;
        let (mut hard, mut soft) = (BTreeMap::new(), BTreeMap::new());
        let nodes = self.hypervisor.node_affinity(domid)?;
        let machine = &self.options.machine;
        // `xl` makes vCPUs prefer the node that it put the memory on. Let this preference follow the memory.
        let followed = machine.cpus_of(&nodes);
        for (index, vcpu) in &domain.vcpus {
            let is_ours = ours.get(index).is_some_and(|ours| ours.contains(&vcpu.affinity));
            let before = entry
                .filter(|_| is_ours)
                .and_then(|entry| entry.before.vcpus.get(index));
            hard.insert(*index, before.unwrap_or(&vcpu.affinity).clone());
            let prefers = self.hypervisor.preference(domid, *index)?;
            let follows = !of.prefers_cpus() && prefers == followed;
            let new: CpuSet = if follows {
                machine.cpus_of(&NodeSet::one(to))
            } else {
                prefers
            };
            soft.insert(*index, new);
        }
        let settings = &self.options.local_migration;
        Ok(Job {
            vm,
            domid,
            name: domain.run.name.clone(),
            to,
            still,
            hard,
            soft,
            nodemap: of.nodemap().cloned(),
            time_max: if still {
                settings.pause_max
            } else {
                settings.time_max
            },
        })
    }

    /// Starts the mover.
    fn begin_move(&mut self, job: Job) -> Result<(), MoveError> {
        // `xl` copies and keeps limits, so the operator's limits must be in force.
        self.lift_limits_of(job.vm)?;
        let text = serde_json::to_string(&job).map_err(MoveError::system)?;
        let own = std::env::current_exe().map_err(MoveError::system)?;
        let args = ["move-domain".into()];
        let what = ("move", "Moves a Xen domain's memory for homenode");
        let apart = scope::apart(&self.options.root, what, &[(JOB, &text)], &own, &args);
        let (program, args) = match apart {
            Ok(apart) => apart,
            // In the agent's unit, the mover would end with the agent, and so would the process that watches the domain for `xl`.
            // `xl` also could not write its logs.
            Err(why) if self.options.root.join("run/systemd/system").is_dir() => {
                return Err(MoveError::NoUnit(why.to_string()));
            }
            Err(_) => (own, args.into()),
        };
        let mut command = Command::new(program);
        let command = command.args(args).env(JOB, text).stdin(Stdio::null());
        let mover = command
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(MoveError::system)?;
        let meanwhile = if job.still {
            "it is paused meanwhile"
        } else {
            "it runs meanwhile"
        };
        self.notices.add(format!(
            "domain {} is on its way to node {}; {meanwhile}",
            job.name, job.to
        ));
        self.moves
            .rests
            .insert(job.vm, now() + self.options.local_migration.interval);
        self.moves.current = Some(Move {
            job,
            mover: Some(mover),
            said_at: now(),
        });
        Ok(())
    }

    /// Checks whether the domain that is on its way has arrived. Returns true if it has; it is then another run of the VM.
    pub(super) fn look_who_arrives(&mut self) -> bool {
        let Some(current) = &mut self.moves.current else {
            return false;
        };
        let Some(mover) = &mut current.mover else {
            if moving::is_free() {
                let name = current.job.name.clone();
                self.notices.add(format!(
                    "the move of domain {name} that an earlier agent began has ended"
                ));
                self.moves.current = None;
            }
            return false;
        };
        if matches!(mover.try_wait(), Ok(None)) {
            if now().saturating_sub(current.said_at) >= SAY_EVERY {
                current.said_at = now();
                let (name, copied) = (&current.job.name, files::how_many_copied());
                self.notices.add(format!(
                    "domain {name} is on its way: {copied} pages copied so far"
                ));
            }
            return false;
        }
        let mut text = String::new();
        if let Some(said) = &mut mover.stdout {
            let _ = said.read_to_string(&mut text);
        }
        let job = current.job.clone();
        self.moves.current = None;
        let ended: Ended = serde_json::from_str(&text).unwrap_or_else(|_| Ended {
            why: Some(match moving::recover(&self.hypervisor) {
                Some(said) => said,
                None => "its mover ended without reporting a result".into(),
            }),
            ..Ended::default()
        });
        // The domain's memory must be counted again.
        self.page_counts.ask_again();
        self.moves
            .rests
            .insert(job.vm, now() + self.options.local_migration.interval);
        self.notices.add(told(&job, &ended));
        if let Some(domid) = ended.arrived {
            self.arrived(&job, domid);
        }
        ended.arrived.is_some()
    }

    /// Handles the arrival of a domain, which is now another run: sets on it what the agent had set on the previous run.
    fn arrived(&mut self, job: &Job, domid: u32) {
        let Some(known) = self.domains.remove(&job.vm) else {
            return;
        };
        let ran = known.vcpus.iter().map(|(index, vcpu)| (*index, vcpu.running));
        let before = self.ran_before.entry(job.vm).or_default();
        *before = ran
            .map(|(index, ran)| (index, ran + before.get(&index).copied().unwrap_or_default()))
            .collect();
        let Ok(Some(listed)) = self.hypervisor.domain(domid) else {
            return;
        };
        let run = Run {
            runtime_id: domid,
            ..known.run.clone()
        };
        let of = (self.options.root.as_path(), run.clone(), listed);
        let Ok(domain) = Domain::look(&self.hypervisor, of, known.pool, known.namesakes) else {
            return;
        };
        let indices: Vec<u16> = domain.vcpus.iter().map(|(index, _)| *index).collect();
        self.domains.insert(job.vm, domain);
        let entry = self.journal.as_ref().and_then(|journal| journal.entry(job.vm));
        let Some(entry) = entry.filter(|entry| entry.run == known.run).cloned() else {
            return;
        };
        // The first of these calls journals the new run's state in place of the old one's.
        let mut set = Ok(());
        for (index, ours) in entry.get::<Pins>().unwrap_or_default().0 {
            if let Some(cpus) = ours.first().filter(|_| indices.contains(&index)) {
                set = set.and(levers::pin(self, job.vm, &[index], cpus).map(drop));
            }
        }
        if let Some(home) = entry.get::<Home>().and_then(|home| home.0.first().cloned()) {
            set = set.and(levers::set_home(self, job.vm, &home).map(drop));
        }
        if let Err(why) = set {
            let name = &job.name;
            self.notices.add(format!(
                "domain {name} has arrived, but the agent could not apply its settings to it again: {why}"
            ));
        }
    }
}

fn nothing(left: u64) -> Outcome {
    Outcome::Moved {
        moved: Pages::ZERO,
        left: Pages(left),
        busy: Pages::ZERO,
    }
}

/// Returns the result of a move as a sentence for the operator.
fn told(job: &Job, ended: &Ended) -> String {
    let (name, node) = (&job.name, job.to);
    let but = ended
        .why
        .as_ref()
        .map(|why| format!("; {why}"))
        .unwrap_or_default();
    match ended.arrived {
        Some(domid) => format!(
            "domain {name} has arrived on node {node} with the new ID {domid}: {} pages copied in {}, paused for {}{but}",
            ended.copied, ended.took, ended.paused
        ),
        None => format!(
            "moving domain {name} to node {node} failed after {}{but}",
            ended.took
        ),
    }
}

/// Returns true if the domain must be paused while it is moved.
///
/// # Errors
/// Returns why it cannot be moved, as the end of a sentence.
fn is_still(
    (hypervisor, store): (&Hypervisor, &mut Asking),
    domain: &Domain,
    allow: Allow,
) -> Result<bool, Unmovable> {
    let (vm, domid, name) = (domain.run.vm, domain.run.runtime_id, &domain.run.name);
    if allow == Allow::Off {
        return Err(Unmovable::NotAllowed(NO_MOVES));
    }
    let notes = files::others_notes(domid, vm)?;
    if let Some(whose) = notes.first() {
        return Err(Unmovable::Notes(whose.clone()));
    }
    if domain.listed.pool != 0 {
        return Err(Unmovable::Pool);
    }
    let of = files::configuration(domid, vm)?;
    let kind = of.movable()?;
    // `xl rename` would take such a name for an option.
    if name.starts_with('-') {
        return Err(Unmovable::Name);
    }
    devices::attached(store, domid, &devices::found)?;
    let path = format!("/local/domain/{domid}");
    let told = store.read(vec![format!("{path}/backend/"), format!("{path}/{SUSPENDS}")]);
    let told = told.map_err(Unmovable::UsersUnknown)?;
    let told = |at: usize| told.get(at).cloned().flatten().unwrap_or_default();
    if !told(0).is_empty() {
        return Err(Unmovable::Serves);
    }
    if told(1) != "1" {
        return Err(Unmovable::NotSuspendable);
    }
    // For a PVH domain, Xen tracks writes with the hardware's page tables, so the domain can run meanwhile.
    if kind == Kind::Pvh {
        return Ok(false);
    }
    let runs_on = hypervisor.can_shadow()?;
    match (runs_on, allow) {
        (true, _) => Ok(false),
        (false, Allow::Paused) => Ok(true),
        (false, _) => Err(Unmovable::NoShadow),
    }
}
