//! The libvirt calls that the host makes. Sorts errors into the three kinds that callers distinguish.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel, sync_channel};
use std::time::Duration;

use homenode_host::{CpuQuota, GuestMemory, HostError, Immovable};
use homenode_kernel::cgroup::{CpuGroup, PERIOD_DEFAULT, QUOTA_MAX_US};
use homenode_kernel::now;
use homenode_kernel::read::{self, ReadError};
use homenode_kernel::task::{self, Process, Thread};
use homenode_undo::heartbeat::Heartbeat;
use homenode_undo::journal::Run;
use homenode_units::{Bytes, CpuSet, NodeSet, Ns, VmId};
use homenode_vm_settings::{Change, OperatorSettings};
use virt::connect::Connect;
use virt::domain::{
    Domain, DomainPausedReason, DomainRunningReason, DomainState, DomainStateReason, NUMAParameters,
    SchedBandwidth, SchedulerInfo,
};
use virt::enumutil::Enum;
use virt::sys;

use crate::connect::{ConnectError, host_of};
use crate::domain::{self, Domain as Description, NAMESPACE};
use crate::manager::{CallError, Manager};
use crate::mark;

use quota::{First, in_force};

#[cfg(test)]
mod fake;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod loaded;
mod quota;
#[cfg(test)]
pub(crate) use fake::FakeLibvirt;

/// libvirt's library is missing, or lacks a function.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("libvirt's library cannot be used ({0})")]
pub struct LibraryError(String);

/// Loads libvirt's library, which is not loaded at program start. For callers that use `virt` before any host is connected.
///
/// # Errors
/// Why it cannot be loaded.
pub fn load() -> Result<(), LibraryError> {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    loaded::load()?;
    Ok(())
}

/// Uses these functions instead of libvirt's library, by their names.
#[cfg(all(any(test, feature = "testing"), target_arch = "x86_64", target_os = "linux"))]
pub fn simulate(functions: &[(&str, *mut std::ffi::c_void)]) {
    loaded::simulate(functions);
}

/// How long a call may take. libvirt itself waits 30 s for a busy domain; an agent with many domains cannot wait that long.
const CALL_MAX: Duration = Duration::from_secs(8);
/// How long to pause all calls after libvirt did not answer.
const REST: Ns = Ns::from_secs(2);

/// A connection that reconnects after libvirt was away or did not answer. A separate thread makes the calls, since a call may
/// hang.
#[derive(Debug)]
pub(crate) struct Libvirt {
    uri: String,
    /// The thread that makes the calls. `None` before the first call, and after a call hung; the old thread ends when that call
    /// does.
    caller: Option<Sender<Call>>,
    /// When calls may be made again after libvirt itself did not answer.
    rests_until: Option<Ns>,
    /// Abandoned calls that libvirt may still carry out, by domain. Until such a call is over, no other call is made for its
    /// domain, since the late call could undo a newer one.
    under_way: BTreeMap<VmId, Receiver<()>>,
    heartbeat: Heartbeat,
    /// Flags of calls that change only a running domain.
    live: u32,
    connect: Option<Connect>,
    /// Domains of the last list.
    domains: BTreeMap<VmId, Known>,
    /// Root of the `/proc` in which processes are looked up.
    root: PathBuf,
    /// What a real libvirt does but the test driver does not, and late answers.
    #[cfg(test)]
    pub fake: FakeLibvirt,
}

type Call = Box<dyn FnOnce() + Send>;

/// A running domain.
#[derive(Debug)]
struct Known {
    domain: Domain,
    /// The domain's last XML, and the description parsed from it.
    described: Option<(String, Arc<Description>)>,
}

impl Libvirt {
    /// Connects to libvirt.
    pub(crate) fn open(uri: &str, root: &Path, heartbeat: Heartbeat) -> Result<Libvirt, ConnectError> {
        if let Some(host) = host_of(uri) {
            return Err(ConnectError::Remote {
                uri: uri.to_owned(),
                host: host.to_owned(),
            });
        }
        let mut libvirt = Libvirt::unconnected(uri, root, heartbeat);
        let connect = libvirt
            .connect()
            .map_err(|error| connect_error(uri, error.cause()))?;
        libvirt.connect = Some(connect);
        Ok(libvirt)
    }

    /// Connects only with the first call, for work that can be done without libvirt.
    pub(crate) fn unconnected(uri: &str, root: &Path, heartbeat: Heartbeat) -> Libvirt {
        // libvirt's test driver, which our tests use, accepts no flag there.
        let live = if uri.starts_with("test:") {
            sys::VIR_DOMAIN_AFFECT_CURRENT
        } else {
            sys::VIR_DOMAIN_AFFECT_LIVE
        };
        Libvirt {
            uri: uri.to_owned(),
            caller: None,
            rests_until: None,
            under_way: BTreeMap::new(),
            heartbeat,
            live,
            connect: None,
            domains: BTreeMap::new(),
            root: root.to_owned(),
            #[cfg(test)]
            fake: FakeLibvirt::default(),
        }
    }

    fn connect(&mut self) -> Result<Connect, CallError> {
        let uri = self.uri.clone();
        let connected = self.limited(move || {
            load().map_err(|e| CallError::Lost(e.to_string()))?;
            virt::error::clear_error_callback(); // else libvirt writes to standard error
            Connect::open(Some(&uri)).map_err(|e| CallError::Lost(e.message().to_owned()))
        });
        connected.map_err(|_| CallError::Lost(self.rest()))?
    }

    /// Pauses all calls because libvirt itself does not answer: otherwise each call would wait for its timeout.
    fn rest(&mut self) -> String {
        self.connect = None;
        self.rests_until = Some(now() + REST);
        SILENT.to_owned()
    }

    /// Returns an error while calls are paused.
    fn not_resting(&self) -> Result<(), CallError> {
        match self.rests_until.is_some_and(|until| now() < until) {
            true => Err(CallError::Lost(SILENT.to_owned())),
            false => Ok(()),
        }
    }

    /// Makes a call, and waits for it up to [`CALL_MAX`]. If the call is abandoned, the returned receiver tells when it is over.
    fn limited<T: Send + 'static>(
        &mut self,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Receiver<()>> {
        self.heartbeat.beat();
        let (over, is_over) = sync_channel(1);
        let (done, answer) = sync_channel(1);
        let call: Call = Box::new(move || {
            let _ = done.send(call());
            drop(over);
        });
        #[cfg(any(test, feature = "testing"))]
        if let Some(system) = homenode_kernel::system::simulated() {
            let is_answered = system.call(call);
            self.heartbeat.beat();
            let answered = is_answered.then(|| answer.try_recv().ok()).flatten();
            return answered.ok_or(is_over);
        }
        let caller = self.caller.take().unwrap_or_else(caller);
        // The thread lives until its sender is dropped, or until a call panics.
        let sent = caller.send(call).map_err(|_| RecvTimeoutError::Disconnected);
        let answered = sent.and_then(|()| answer.recv_timeout(CALL_MAX));
        self.heartbeat.beat();
        match answered {
            Ok(answer) => {
                self.caller = Some(caller);
                Ok(answer)
            }
            Err(_) => Err(is_over),
        }
    }

    /// Makes a call about a domain. A domain that does not answer delays no other.
    fn ask<T: Send + 'static>(
        &mut self,
        vm: VmId,
        call: impl FnOnce(&Domain) -> Result<T, virt::error::Error> + Send + 'static,
    ) -> Result<T, CallError> {
        if let Some(earlier) = self.under_way.get(&vm) {
            if earlier.try_recv() == Err(TryRecvError::Empty) {
                return Err(CallError::Refused(BUSY.to_owned()));
            }
            self.under_way.remove(&vm);
        }
        self.not_resting()?;
        let asked = self.domain(vm)?;
        #[cfg(test)]
        let call = match self.fake.before(&asked, call)? {
            fake::Call::Now(call) => call,
            fake::Call::Later(is_over) => {
                self.under_way.insert(vm, is_over);
                return Err(CallError::Refused(BUSY.to_owned()));
            }
        };
        match self.limited(move || call(&asked)) {
            #[cfg(test)]
            Ok(_) if homenode_kernel::fault::at(homenode_kernel::fault::Point::Answer).is_some() => {
                Err(CallError::Lost(SILENT.to_owned()))
            }
            Ok(answer) => answer.map_err(|e| self.sort(&e)),
            Err(is_over) => {
                self.under_way.insert(vm, is_over);
                // This call shows whether only this domain does not answer, or libvirt itself.
                let connect = self.connect.clone();
                let version = self.limited(move || connect.map(|connect| connect.lib_version()));
                Err(match version {
                    Ok(Some(Ok(_))) => CallError::Refused(BUSY.to_owned()),
                    _ => CallError::Lost(self.rest()),
                })
            }
        }
    }

    /// Returns the domain with this UUID; lists the domains if it is not known yet.
    pub(crate) fn domain(&mut self, vm: VmId) -> Result<Domain, CallError> {
        if !self.domains.contains_key(&vm) {
            self.list()?;
        }
        let known = self.domains.get(&vm).map(|known| known.domain.clone());
        known.ok_or_else(|| CallError::Refused("libvirt does not list it".to_owned()))
    }

    /// A domain's live XML.
    pub(crate) fn xml(&mut self, vm: VmId) -> Result<String, CallError> {
        let xml = self.ask(vm, |domain| domain.xml_desc(0));
        #[cfg(test)]
        let xml = xml.map(|xml| self.fake.lag(vm, xml));
        xml
    }

    fn set_element(
        &mut self,
        vm: VmId,
        element: Option<&str>,
        (prefix, namespace): (&'static str, &'static str),
        flags: u32,
    ) -> Result<(), CallError> {
        let kind = sys::VIR_DOMAIN_METADATA_ELEMENT.cast_signed();
        let element = element.map(str::to_owned);
        self.ask(vm, move |domain| {
            domain.set_metadata(kind, element.as_deref(), Some(prefix), Some(namespace), flags)
        })
    }

    /// Returns the operator's settings: of the running domain, or with the inactive flag, of its next start.
    pub(crate) fn said(&mut self, vm: VmId, flags: u32) -> Result<OperatorSettings, CallError> {
        let of = match flags & sys::VIR_DOMAIN_XML_INACTIVE {
            0 => "metadata",
            _ => "metadata for the next start (virsh dumpxml --inactive)",
        };
        let xml = self.ask(vm, move |domain| domain.xml_desc(flags))?;
        let described = Description::parse(&xml).map_err(|e| CallError::Unclear(e.to_string()))?;
        let wrong = |why| {
            CallError::Refused(format!(
                "its homenode settings in libvirt's {of} are wrong: {why}"
            ))
        };
        described.settings.map_err(wrong)
    }

    /// Stores the operator's settings in the configuration that `flags` name.
    pub(crate) fn say(&mut self, vm: VmId, said: &OperatorSettings, flags: u32) -> Result<(), CallError> {
        let element = domain::element(said);
        self.set_element(vm, element.as_deref(), ("homenode", NAMESPACE), flags)
    }

    /// Sets a quota in two calls, after a quota that may be in force now.
    fn set_quota(&mut self, vm: VmId, now: Option<CpuQuota>, next: CpuQuota) -> Result<(), CallError> {
        let run_us = i64::try_from(next.run_ns.0 / 1000).unwrap_or(QUOTA_MAX_US);
        let (time, period) = ((None, Some(run_us)), (Some(next.period_ns.0 / 1000), None));
        let calls = match First::of(now, next) {
            First::Time => [time, period],
            First::Period => [period, time],
        };
        for (period, time) in calls {
            self.set_vcpu_bandwidth(vm, period, time)?;
        }
        Ok(())
    }

    fn set_vcpu_bandwidth(
        &mut self,
        vm: VmId,
        period: Option<u64>,
        quota: Option<i64>,
    ) -> Result<(), CallError> {
        #[cfg(test)]
        if let Some(set) = self.fake.bandwidth(period, quota) {
            return self.ask(vm, move |_| {
                set();
                Ok(())
            });
        }
        let info = SchedulerInfo {
            vcpu_bw: SchedBandwidth { period, quota },
            ..SchedulerInfo::default()
        };
        let live = self.live;
        self.ask(vm, move |domain| {
            domain.set_scheduler_parameters_flags(&info, live).map(drop)
        })
    }

    /// Sorts an error: libvirt refused, or libvirt is gone. Drops a dead connection.
    fn sort(&mut self, error: &virt::error::Error) -> CallError {
        let cause = error.message().to_owned();
        let is_alive = self
            .connect
            .as_ref()
            .is_some_and(|connect| connect.is_alive() == Ok(true));
        if is_alive {
            CallError::Refused(cause)
        } else {
            self.connect = None;
            CallError::Lost(cause)
        }
    }
}

impl Manager for Libvirt {
    fn list(&mut self) -> Result<Vec<VmId>, CallError> {
        self.not_resting()?;
        let connect = match self.connect.take() {
            Some(connect) => connect,
            None => self.connect()?,
        };
        self.connect = Some(connect.clone());
        let listed = self.limited(move || connect.list_all_domains(sys::VIR_CONNECT_LIST_DOMAINS_ACTIVE));
        let listed = match listed {
            Ok(listed) => listed.map_err(|e| self.sort(&e))?,
            Err(_) => return Err(CallError::Lost(self.rest())),
        };
        let mut before = std::mem::take(&mut self.domains);
        for domain in listed {
            // A domain that has just ended may have no UUID.
            let uuid = domain.uuid_string().ok().and_then(|uuid| VmId::parse(&uuid));
            if let Some(vm) = uuid {
                let described = before.remove(&vm).and_then(|known| known.described);
                self.domains.insert(vm, Known { domain, described });
            }
        }
        Ok(self.domains.keys().copied().collect())
    }

    fn describe(&mut self, vm: VmId) -> Result<Arc<Description>, CallError> {
        let xml = self.xml(vm)?;
        let described = self.domains.get(&vm).and_then(|known| known.described.as_ref());
        if let Some((_, same)) = described.filter(|(before, _)| *before == xml) {
            return Ok(Arc::clone(same));
        }
        let read = Description::parse(&xml).map_err(|e| CallError::Unclear(e.to_string()))?;
        let read = Arc::new(read);
        if let Some(known) = self.domains.get_mut(&vm) {
            known.described = Some((xml, Arc::clone(&read)));
        }
        Ok(read)
    }

    /// Finds the process by libvirt's pid file, or else by its command line.
    fn process(&mut self, domain: &Description) -> Result<Option<Process>, ReadError> {
        let (root, uuid) = (&self.root, domain.id.to_string());
        let file = homenode_units::file_name(&domain.name, ".pid").ok();
        let path = file.map(|file| root.join("run/libvirt/qemu").join(file));
        let written = path.map(|path| read::value_if_there(&path, "a process id"));
        match written.transpose()?.flatten() {
            Some(pid) if task::is_qemu_of(root, pid, &uuid) => task::process(root, pid),
            _ => task::find_qemu(root, &uuid),
        }
    }

    fn threads(&mut self, run: &Run) -> Result<Vec<Thread>, ReadError> {
        task::threads(&self.root, run.pid)
    }

    fn pins(&mut self, domain: &Description, _threads: &[Thread]) -> BTreeMap<u16, CpuSet> {
        domain.vcpu_pins.clone()
    }

    fn knows(&mut self, run: &Run) -> Result<bool, CallError> {
        self.list()?;
        let known = self.domains.get(&run.vm);
        Ok(known.is_some_and(|known| known.domain.id() == Some(run.runtime_id)))
    }

    /// Changes the running and, if the domain is defined, the next configuration, each based on its own current settings.
    fn change_settings(&mut self, vm: VmId, change: &Change<'_>) -> Result<bool, CallError> {
        let before = self.said(vm, 0)?;
        if !change.holds(&before) {
            return Ok(false);
        }
        let after = change.made_on(&before);
        let mut live = match after == before {
            true => 0,
            false => sys::VIR_DOMAIN_AFFECT_LIVE,
        };
        if self.ask(vm, Domain::is_persistent)? {
            let before_next = self.said(vm, sys::VIR_DOMAIN_XML_INACTIVE)?;
            let next = change.made_on(&before_next);
            if next == after && next != before_next {
                live |= sys::VIR_DOMAIN_AFFECT_CONFIG;
            } else if next != before_next {
                self.say(vm, &next, sys::VIR_DOMAIN_AFFECT_CONFIG)?;
                let set = match live {
                    0 => Ok(()),
                    live => self.say(vm, &after, live),
                };
                if set.is_err() {
                    // The failure is reported. The next start should keep its settings, which libvirt may refuse too.
                    let _ = self.say(vm, &before_next, sys::VIR_DOMAIN_AFFECT_CONFIG);
                }
                return set.map(|()| true);
            }
        }
        match live {
            0 => Ok(true),
            live => self.say(vm, &after, live).map(|()| true),
        }
    }

    #[cfg(test)]
    fn libvirt(&mut self) -> &mut Libvirt {
        self
    }

    fn unreachable(&self, cause: &str) -> HostError {
        HostError::Unreachable {
            service: format!("libvirt at {}", self.uri),
            cause: cause.to_owned(),
        }
    }

    fn standstill(&mut self, vm: VmId) -> Result<Option<Immovable>, CallError> {
        // An error means that there is no job, except on a migration's destination: libvirt has no job statistics there, but the
        // domain's state shows the migration. An ended domain is noticed elsewhere.
        match self.ask(vm, job_operation) {
            Ok(sys::VIR_DOMAIN_JOB_OPERATION_MIGRATION_OUT) => return Ok(Some(Immovable::Migrating)),
            Err(CallError::Lost(cause)) => return Err(CallError::Lost(cause)),
            Ok(_) | Err(CallError::Refused(_) | CallError::Unclear(_)) => {}
        }
        let (state, reason) = self.ask(vm, Domain::state)?;
        Ok(match (state, reason) {
            (
                _,
                Enum::Known(DomainStateReason::Paused(Enum::Known(
                    DomainPausedReason::Migration
                    | DomainPausedReason::PostCopy
                    | DomainPausedReason::PostCopyFailed,
                )))
                | Enum::Known(DomainStateReason::Running(Enum::Known(
                    DomainRunningReason::PostCopy | DomainRunningReason::PostCopyFailed,
                ))),
            ) => Some(Immovable::Migrating),
            (Enum::Known(DomainState::Paused | DomainState::PMSuspended | DomainState::Crashed), _) => {
                Some(Immovable::Paused)
            }
            _ => None,
        })
    }

    fn is_gone(&mut self, vm: VmId) -> bool {
        self.ask(vm, Domain::is_active) == Ok(false)
    }

    fn pin_vcpu(&mut self, vm: VmId, index: u16, cpus: &CpuSet) -> Result<(), CallError> {
        let (map, live) = (cpu_map(cpus), self.live);
        #[cfg(test)]
        let obey = self.fake.pin(1 + i32::from(index), cpus)?;
        self.ask(vm, move |domain| {
            #[cfg(test)]
            obey();
            domain.pin_vcpu_flags(u32::from(index), &map, live)
        })
    }

    fn pin_emulator(&mut self, vm: VmId, cpus: &CpuSet) -> Result<(), CallError> {
        let (map, live) = (cpu_map(cpus), self.live);
        #[cfg(test)]
        let obey = self.fake.pin(0, cpus)?;
        self.ask(vm, move |domain| {
            #[cfg(test)]
            obey();
            domain.pin_emulator(&map, live)
        })
    }

    fn pin_iothread(&mut self, vm: VmId, id: u32, cpus: &CpuSet) -> Result<(), CallError> {
        let (map, live) = (cpu_map(cpus), self.live);
        self.ask(vm, move |domain| pin_iothread(domain, id, &map, live))
    }

    fn set_memory_nodes(&mut self, vm: VmId, nodes: &NodeSet) -> Result<(), CallError> {
        #[cfg(test)]
        if self.fake.threads.is_some() {
            return self.ask(vm, |_| Ok(()));
        }
        let params = NUMAParameters {
            node_set: Some(nodes.to_string()),
            mode: None,
        };
        let live = self.live;
        self.ask(vm, move |domain| domain.set_numa_parameters(params, live))
    }

    fn set_mark(&mut self, vm: VmId, element: Option<&str>) -> Result<(), CallError> {
        let flags = sys::VIR_DOMAIN_AFFECT_LIVE;
        self.set_element(vm, element, (mark::PREFIX, mark::NAMESPACE), flags)
    }

    fn check_groups(&self, _vm: VmId, groups: &[CpuGroup]) -> Result<(), CallError> {
        match groups.iter().find(|group| !group.is_of_vcpu()) {
            None => Ok(()),
            Some(other) => Err(CallError::Refused(format!(
                "its vCPUs are in the cgroup {}, not in those that libvirt made for them: another program moved them",
                other.path().display()
            ))),
        }
    }

    fn hold(&mut self, vm: VmId, quota: CpuQuota, groups: &[CpuGroup]) -> Result<(), CallError> {
        self.set_quota(vm, in_force(groups), quota)
    }

    fn lift(&mut self, vm: VmId, before: Option<CpuQuota>, held: &[CpuGroup]) -> Result<(), CallError> {
        if let Some(before) = before {
            return self.set_quota(vm, in_force(held), before);
        }
        self.set_vcpu_bandwidth(vm, Some(PERIOD_DEFAULT.0 / 1000), None)?;
        // Older libvirt writes -1 to cgroup v2, and the kernel refuses that. For `QUOTA_MAX_US`, libvirt writes `max`.
        match self.set_vcpu_bandwidth(vm, None, Some(-1)) {
            Err(CallError::Refused(_)) => self.set_vcpu_bandwidth(vm, None, Some(QUOTA_MAX_US)),
            other => other,
        }
    }

    fn set_memory(&mut self, vm: VmId, memory: Bytes) -> Result<(), CallError> {
        let live = self.live;
        self.ask(vm, move |domain| {
            domain.set_memory_flags(memory.0 / 1024, live).map(drop)
        })
    }

    fn set_stats_period(&mut self, vm: VmId, seconds: u32) -> Result<(), CallError> {
        let seconds = i32::try_from(seconds).unwrap_or(i32::MAX);
        let live = self.live;
        self.ask(vm, move |domain| {
            domain.set_memory_stats_period(seconds, live).map(drop)
        })
    }

    fn guest_memory(&mut self, vm: VmId) -> Result<Option<(u64, GuestMemory)>, CallError> {
        let stats = self.ask(vm, |domain| domain.memory_stats(0))?;
        let value = |tag| stats.iter().find(|stat| stat.tag == tag).map(|stat| stat.val);
        let kib = |tag| value(tag).map(|kib| Bytes(kib.saturating_mul(1024)));
        let spoke = value(sys::VIR_DOMAIN_MEMORY_STAT_LAST_UPDATE).filter(|seconds| *seconds > 0);
        let said = GuestMemory {
            age: None,
            total: kib(sys::VIR_DOMAIN_MEMORY_STAT_AVAILABLE),
            usable: kib(sys::VIR_DOMAIN_MEMORY_STAT_USABLE),
            unused: kib(sys::VIR_DOMAIN_MEMORY_STAT_UNUSED),
            swapped_in: kib(sys::VIR_DOMAIN_MEMORY_STAT_SWAP_IN),
            swapped_out: kib(sys::VIR_DOMAIN_MEMORY_STAT_SWAP_OUT),
            major_faults: value(sys::VIR_DOMAIN_MEMORY_STAT_MAJOR_FAULT),
        };
        Ok(spoke.map(|stamp_s| (stamp_s, said)))
    }
}

/// Cause reported when a call got no answer.
const SILENT: &str =
    "libvirt does not answer (a call had no answer in 8 s); the agent will ask again in a moment";
const BUSY: &str = "libvirt does not answer for this VM (a call had no answer in 8 s); the agent will ask again once that call ends";

/// Starts a thread that makes calls one after the other until the agent drops its end.
fn caller() -> Sender<Call> {
    let (calls, received) = channel::<Call>();
    // If no thread can be started, the receiver is dropped, and calls get no answer.
    let named = std::thread::Builder::new().name("libvirt".into());
    let _ = named.spawn(move || received.into_iter().for_each(|call| call()));
    calls
}

/// `virDomainPinIOThread`, which the `virt` crate lacks.
#[allow(unsafe_code)] // a libvirt call without a wrapper
fn pin_iothread(domain: &Domain, id: u32, map: &[u8], live: u32) -> Result<(), virt::error::Error> {
    let length = i32::try_from(map.len()).expect("a map of at most 8 KiB");
    // SAFETY: the domain outlives the call, and libvirt reads `length` bytes of the map and keeps none of it. The parameter is
    // mutable only because the C interface is old.
    let result =
        unsafe { sys::virDomainPinIOThread(domain.as_ptr(), id, map.as_ptr().cast_mut(), length, live) };
    if result == 0 {
        Ok(())
    } else {
        Err(virt::error::Error::last_error())
    }
}

/// Returns the type of libvirt's current job on a domain, 0 if there is none. The `virt` crate's own call builds a vector from
/// the null pointer that libvirt returns for an idle domain.
#[allow(unsafe_code)] // a libvirt call whose wrapper is unsound
fn job_operation(domain: &Domain) -> Result<sys::virDomainJobOperation, virt::error::Error> {
    let (mut kind, mut count, mut parameters) = (0, 0, std::ptr::null_mut());
    // SAFETY: the domain outlives the call; libvirt writes all three variables and allocates what `parameters` points to.
    let result = unsafe {
        sys::virDomainGetJobStats(
            domain.as_ptr(),
            &raw mut kind,
            &raw mut parameters,
            &raw mut count,
            0,
        )
    };
    if result != 0 {
        return Err(virt::error::Error::last_error());
    }
    let mut operation = 0;
    // SAFETY: libvirt has just returned these parameters, perhaps null with a count of 0. They are read once, then freed with
    // libvirt's own function.
    unsafe {
        let name = sys::VIR_DOMAIN_JOB_OPERATION.as_ptr();
        sys::virTypedParamsGetInt(parameters, count, name, &raw mut operation);
        sys::virTypedParamsFree(parameters, count);
    }
    // libvirt can also return the statistics of a finished job, but not with these flags.
    let is_running = kind.cast_unsigned() != sys::VIR_DOMAIN_JOB_NONE;
    Ok(if is_running { operation.cast_unsigned() } else { 0 })
}

/// A CPU set in libvirt's format: one bit per CPU, lowest first.
fn cpu_map(cpus: &CpuSet) -> Vec<u8> {
    let mut map = Vec::new();
    for cpu in cpus.iter() {
        let byte = cpu.0 as usize / 8;
        if map.len() <= byte {
            map.resize(byte + 1, 0u8);
        }
        map[byte] |= 1 << (cpu.0 % 8);
    }
    map
}

fn connect_error(uri: &str, cause: &str) -> ConnectError {
    let lower = cause.to_lowercase();
    let (uri, cause) = (uri.to_owned(), cause.to_owned());
    if [
        "permission denied",
        "authentication",
        "access denied",
        "not authorized",
    ]
    .iter()
    .any(|w| lower.contains(w))
    {
        ConnectError::NotPermitted { uri, cause }
    } else if [
        "no connection driver",
        "unable to parse uri",
        "malformed",
        "unknown driver",
    ]
    .iter()
    .any(|w| lower.contains(w))
    {
        ConnectError::BadUri { uri, cause }
    } else {
        ConnectError::NoLibvirt { uri, cause }
    }
}

#[cfg(test)]
mod tests;
