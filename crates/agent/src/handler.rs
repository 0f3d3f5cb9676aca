//! Answers requests, either at once from the loop's state, or after the loop has carried out a setting.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use homenode_api::answer::{
    FloorSet, Happened, ModeSet, Noted, Overview, PermitSet, PermitUsage, Permits, Placed, PolicyAdvice,
    PolicySet, Reserved, Suggestion, Vms, WorkingSets,
};
use homenode_api::http::VmSettings;
use homenode_api::{Answer, ApiError, EventRecord, Request, forecast, named};
use homenode_control::{Control, Line, Request as Ask, Status, VmStatus};
use homenode_host::{HugeMemory, Mode, Setting};
use homenode_machine::Machine;
use homenode_policy::advisor;
use homenode_policy::placement::Asked;
use homenode_units::{Bytes, MemoryPolicy, Ns, VmId};

use crate::answers::maintenance::{drain, maintenance, pause};
use crate::answers::recommendations::{judge, recommendations};
use crate::answers::report::report;
use crate::answers::reservations::{dropped, reservations};
use crate::answers::working_sets::{can_be_watched, working_sets};
use crate::answers::{Predictions, permits, placed};
use crate::drain_file::DrainFile;
use crate::setting_queue::{NotSet, SettingQueue};
use crate::wall_clock::WallClock;

/// The reason given if there is no advice on a VM's memory policy.
const NOT_WATCHED: &str =
    "it has not been watched yet: the agent has just started, or runs no memory policies";

/// Answers requests.
#[derive(Clone, Debug)]
pub struct Handler {
    /// The host's machine.
    pub machine: Arc<Machine>,
    /// State of the loop.
    pub control: Arc<Mutex<Control>>,
    /// The clock that times are reported in.
    pub clock: WallClock,
    /// The file of drained nodes.
    pub drains: DrainFile,
    /// Settings for the loop to carry out. It is closed once the loop has ended.
    pub settings: SettingQueue,
}

/// An answer that is valid now, or one that becomes valid when a setting has been carried out.
pub(crate) enum Answered {
    Now(Answer),
    Once(VmId, Setting, Answer),
}

/// Settings that an operator wants a VM to have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish {
    pub vm: VmId,
    /// The settings when the request came in.
    pub now: VmSettings,
    pub wanted: VmSettings,
    /// Whether to write all settings, whatever is in force (`If-Match: *`).
    pub is_whole: bool,
}

impl Handler {
    /// Returns a VM's settings, by its name or UUID.
    ///
    /// # Errors
    /// If no such VM runs.
    pub(crate) fn in_force(&self, id: &str) -> Result<(VmId, VmSettings), ApiError> {
        let control = self.looked()?;
        let status = control.status(&self.machine);
        let vm = named(&status.vms, id)?.id;
        let settings = control.settings(vm).ok_or_else(|| gone(id))?;
        Ok((vm, VmSettings::of(&settings)))
    }

    /// Returns the settings to write: only those that change, or all of them if the wish is whole.
    ///
    /// # Errors
    /// If the VM cannot have the memory policy.
    pub(crate) fn check(&self, wish: &Wish) -> Result<Vec<Setting>, ApiError> {
        let Wish {
            vm,
            now,
            wanted,
            is_whole,
        } = *wish;
        let control = self.looked()?;
        if let Some(policy) = wanted
            .memory_policy
            .filter(|_| wanted.memory_policy != now.memory_policy)
            && let Some(why) = control.objection(vm, policy)
        {
            let why = format!("the VM cannot have memory policy {policy}: {why}");
            return Err(ApiError::Refused { why });
        }
        let changed = [
            (is_whole || now.permit != wanted.permit).then_some(Setting::Permit(wanted.permit)),
            (is_whole || now.memory_policy != wanted.memory_policy)
                .then_some(Setting::MemoryPolicy(wanted.memory_policy)),
            (is_whole || now.memory_floor_bytes != wanted.memory_floor_bytes)
                .then_some(Setting::MemoryFloor(wanted.memory_floor_bytes)),
        ];
        Ok(changed.into_iter().flatten().collect())
    }

    /// Locks the loop's state, if the loop has sampled the host.
    fn looked(&self) -> Result<MutexGuard<'_, Control>, ApiError> {
        // A panic in the loop can only interrupt it between two statements of a policy, so the state still gives right answers.
        let control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        match control.has_looked() {
            true => Ok(control),
            // The client reacts to this error by sampling the host itself.
            false => Err(ApiError::NotYet {
                why: "the agent has not looked at the host yet".to_owned(),
            }),
        }
    }

    /// Answers a request.
    ///
    /// # Errors
    /// If no such VM runs, the request is invalid, or the agent cannot answer or carry it out.
    pub(crate) fn answer(&self, request: Request) -> Result<Answered, ApiError> {
        let machine = &self.machine;
        let mut control = self.looked()?;
        if self.settings.is_closed() && needs_the_loop(&request) {
            return Err(ApiError::refused(NotSet::Ended.to_string()));
        }
        Ok(Answered::Now(match request {
            Request::Announce(announcement) => {
                control.announce(announcement);
                Noted { noted: true }.into()
            }
            Request::Reserve(asked) => reserved(&mut control, machine, asked).into(),
            Request::Place {
                vcpus,
                memory_bytes,
                bandwidth_bytes_per_s: bandwidth,
                huge_page_bytes,
            } => {
                let all = |page_bytes| HugeMemory {
                    page_bytes,
                    memory_bytes,
                };
                let ask = Ask {
                    vcpus,
                    memory: memory_bytes,
                    bandwidth,
                    huge_pages: huge_page_bytes.map(all).into_iter().collect(),
                };
                place(&control, machine, &ask).into()
            }
            Request::Vms => {
                let vms = told(&control, machine).vms;
                Vms { vms }.into()
            }
            Request::Overview => overview(&control, machine).into(),
            Request::PermitSet { vm, permit } => {
                let id = named(&control.status(machine).vms, &vm)?.id;
                let unmetered = permit.and_then(|_| control.permit_unmetered(id));
                let waits = permit.and_then(|_| control.permit_waits(id));
                let note = control.permits_idle().or(unmetered).or(waits);
                let done = PermitSet { vm, permit, note }.into();
                return Ok(Answered::Once(id, Setting::Permit(permit), done));
            }
            Request::PolicySet { vm, policy } => return set_policy(&control, machine, vm, policy),
            Request::FloorSet { vm, floor_bytes } => return set_floor(&control, machine, vm, floor_bytes),
            Request::PolicyAdvise { vm } => advise(&control, machine, vm)?.into(),
            Request::Permits { vm } => {
                let status = control.status(machine);
                let vms = chosen(&status, vm.as_deref())?.into_iter();
                let vms = vms.map(permits::permit).collect();
                Permits { vms }.into()
            }
            Request::PermitSuggest { vm } => suggest(&control, machine, vm)?.into(),
            Request::WorkingSets {
                vm,
                window_ns,
                wait_ns,
            } => watch(&mut control, machine, vm.as_deref(), (window_ns, wait_ns))?.into(),
            Request::WhatIf { homes } => forecast(&control, machine, &homes)?.into(),
            Request::Report { since_ns } => report(&control, machine, since_ns)?.into(),
            Request::Maintenance => maintenance(&control, machine).into(),
            Request::Drain { nodes, is_on } => {
                drain(&mut control, machine, &self.drains, (&nodes, is_on))?.into()
            }
            Request::Pause { span_ns } => pause(&mut control, machine, span_ns).into(),
            Request::Recommendations => recommendations(&control, self.clock).into(),
            Request::RecommendationApply { id } => {
                judge(&mut control, self.clock, |control| control.approve(id))?.into()
            }
            Request::RecommendationReject { id } => {
                judge(&mut control, self.clock, |control| control.reject(id))?.into()
            }
            Request::ModeSet {
                vm,
                span_ns: Some(span),
                mode,
            } => observe_for(&mut control, machine, vm, mode, span)?.into(),
            Request::ModeSet {
                vm,
                mode,
                span_ns: None,
            } => return set_mode(&control, machine, vm, mode),
            Request::Reservations => {
                let now = control.sample().map_or(Ns::ZERO, |sample| sample.at);
                reservations(control.reservations(), self.clock, now).into()
            }
            Request::ReservationDrop { id } => dropped(&mut control, id)?.into(),
            Request::PermitUsage { vm } => permit_usage(&control, machine, vm.as_deref())?.into(),
        }))
    }
}

/// Returns true if a request changes something that takes effect only in a later cycle. A VM's start, and what is known of a
/// working set, are answered even when there is no later cycle.
fn needs_the_loop(request: &Request) -> bool {
    let is_answered = matches!(
        request,
        Request::Announce(_) | Request::Reserve(_) | Request::WorkingSets { .. }
    );
    !is_answered && !request.only_reads()
}

fn place(control: &Control, machine: &Machine, ask: &Ask) -> Placed {
    placed(control, machine, ask, Predictions::Known)
}

/// Returns the working sets of all VMs. If a VM is named, starts to watch it, and returns only its working set.
fn watch(
    control: &mut Control,
    machine: &Machine,
    vm: Option<&str>,
    (window, wait): (Option<Ns>, Ns),
) -> Result<WorkingSets, ApiError> {
    let status = control.status(machine);
    let chosen = chosen(&status, vm)?;
    for found in chosen.iter().filter(|_| vm.is_some()) {
        can_be_watched(control, found)?;
        control.want_working_set(found.id, window, wait);
    }
    Ok(working_sets(control, status.at_ns, &chosen))
}

fn reserved(control: &mut Control, machine: &Machine, asked: Asked) -> Reserved {
    let reserved = control.reserve(machine, asked);
    Reserved {
        nodes: reserved.nodes,
        name: reserved.name,
        unplaceable: reserved.unplaceable.map(|why| why.to_string()),
    }
}

/// Returns the host's status. If the agent serves no topology to guests, adds the reason to each VM.
fn told(control: &Control, machine: &Machine) -> Status {
    let mut status = control.status(machine);
    for vm in &mut status.vms {
        vm.topology.why_not = vm.topology.why_not.take().or_else(|| control.topology_idle());
    }
    status
}

fn overview(control: &Control, machine: &Machine) -> Overview {
    let status = told(control, machine);
    let happened = |record: &EventRecord| {
        let age_ns = status.at_ns.saturating_sub(record.at);
        Happened::of(record.clone(), age_ns, 1)
    };
    let events = control.recent().map(happened).collect();
    Overview { status, events }
}

/// Returns the VM with this name, or all VMs if no name is given.
fn chosen<'a>(status: &'a Status, name: Option<&str>) -> Result<Vec<&'a VmStatus>, ApiError> {
    match name {
        Some(name) => Ok(vec![named(&status.vms, name)?]),
        None => Ok(status.vms.iter().collect()),
    }
}

fn set_policy(
    control: &Control,
    machine: &Machine,
    vm: String,
    policy: Option<MemoryPolicy>,
) -> Result<Answered, ApiError> {
    let id = named(&control.status(machine).vms, &vm)?.id;
    if let Some((policy, why)) = policy.and_then(|p| Some((p, control.objection(id, p)?))) {
        let why = format!("VM {vm} cannot have memory policy {policy}: {why}");
        return Err(ApiError::Refused { why });
    }
    let waits = || policy.and_then(|_| control.memory_policy_waits(id));
    let idle = control.memory_policies_idle().or_else(waits);
    let cautions = policy.map(|policy| control.cautions(id, policy));
    let notes: Vec<String> = idle.into_iter().chain(cautions.unwrap_or_default()).collect();
    let done = PolicySet { vm, policy, notes }.into();
    Ok(Answered::Once(id, Setting::MemoryPolicy(policy), done))
}

fn set_floor(
    control: &Control,
    machine: &Machine,
    vm: String,
    floor_bytes: Option<Bytes>,
) -> Result<Answered, ApiError> {
    let status = control.status(machine);
    let found = named(&status.vms, &vm)?;
    let note = match (floor_bytes, found.memory.maximum_bytes) {
        (None, _) => None,
        (Some(_), None) => Some("the VM has no balloon, so nothing can be taken from it".to_owned()),
        (Some(floor), Some(most)) if floor >= most => {
            Some("the floor is all of its memory, so nothing is taken from it".to_owned())
        }
        (Some(_), Some(_)) => {
            let waits = || control.memory_floor_waits(found.id);
            control.memory_floors_idle().or_else(waits)
        }
    };
    let done = FloorSet {
        vm,
        floor_bytes,
        note,
    }
    .into();
    Ok(Answered::Once(found.id, Setting::MemoryFloor(floor_bytes), done))
}

fn set_mode(
    control: &Control,
    machine: &Machine,
    vm: String,
    mode: Option<Mode>,
) -> Result<Answered, ApiError> {
    let id = named(&control.status(machine).vms, &vm)?.id;
    let run = control.mode();
    let is_less = mode.is_some_and(|mode| mode > run);
    let note = is_less
        .then(|| format!("this agent runs in mode {run}, so it goes no further than that with any VM"));
    let span_ns = None;
    let done = ModeSet {
        vm,
        mode,
        span_ns,
        note,
    }
    .into();
    Ok(Answered::Once(id, Setting::Mode(mode), done))
}

/// Sets a VM's mode to `observe` for a while. This is the most careful mode, so it needs no approval, and it ends by itself even
/// if the client vanishes.
fn observe_for(
    control: &mut Control,
    machine: &Machine,
    vm: String,
    mode: Option<Mode>,
    span: Ns,
) -> Result<ModeSet, ApiError> {
    if mode != Some(Mode::Observe) {
        return Err(ApiError::BadInput {
            why: "for a while a VM can only have the mode `observe`; leave the time out to set another"
                .to_owned(),
        });
    }
    let id = named(&control.status(machine).vms, &vm)?.id;
    control.observe_for(id, span);
    Ok(ModeSet {
        vm,
        mode,
        span_ns: Some(span),
        note: None,
    })
}

/// The error for a VM that has just ended.
fn gone(vm: &str) -> ApiError {
    ApiError::NoSuchVm {
        vm: vm.to_owned(),
        running: Vec::new(),
    }
}

fn advise(control: &Control, machine: &Machine, vm: String) -> Result<PolicyAdvice, ApiError> {
    let status = control.status(machine);
    let found = named(&status.vms, &vm)?;
    let advice = control.memory_advice(found.id).cloned();
    Ok(PolicyAdvice {
        vm,
        memory_policy: found.memory_policy,
        advice: advice.unwrap_or_else(|| advisor::Advice::none(NOT_WATCHED)),
    })
}

fn suggest(control: &Control, machine: &Machine, vm: String) -> Result<Suggestion, ApiError> {
    let status = control.status(machine);
    let id = named(&status.vms, &vm)?.id;
    let advice = control.suggest(machine, id);
    let advice = advice.ok_or_else(|| gone(&vm))?;
    Ok(permits::suggestion(vm, &advice, control.config().period))
}

fn permit_usage(control: &Control, machine: &Machine, vm: Option<&str>) -> Result<PermitUsage, ApiError> {
    let of = |line: &Line| vm.is_none_or(|name| line.name == name || VmId::parse(name) == Some(line.vm));
    let lines: Vec<Line> = control.hourly_usage().lines().filter(of).collect();
    if let Some(name) = vm {
        match named(&control.status(machine).vms, name) {
            // The VM has ended, but had used some of its budget of cache misses.
            Err(ApiError::NoSuchVm { .. }) if !lines.is_empty() => {}
            running => {
                running?;
            }
        }
    }
    Ok(PermitUsage { lines })
}
