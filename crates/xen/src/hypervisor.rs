//! The hypervisor's interface in Rust: wraps each call of libxenctrl and xenstore once, and checks its result.

#![allow(unsafe_code)] // calls of a C library, each with buffers of the size that the library asks for

mod frames;
mod tracing;

use std::ffi::{CString, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::ptr::{NonNull, null_mut};

use homenode_units::{CpuId, CpuSet, NodeId, NodeSet, Ns, VmId};

use crate::error::{CallError, ResumeError, XenError};
use crate::library::{
    self, CREDIT, CREDIT2, Control, CpuPlace, DomainInfo, HARD, HostInfo, NodeMemory, SOFT, Share, Store,
    VcpuInfo,
};
use crate::runstates::State;
use crate::store::{Asking, Source};
use crate::xl::XlError;
use crate::{dom0, privcmd, store, xl};

/// More CPUs than any host has. A larger number is rejected.
const CPUS_MAX: usize = 16 << 10;
const NODES_MAX: usize = 1024;
const DOMAINS_MAX: usize = 64 << 10;
/// Most bytes of console output to read. The console ring is 16 KiB unless set otherwise at boot (`conring_size`).
const CONSOLE_BYTES: usize = 4 << 20;

/// Returns the kernel's id of this boot.
fn boot(root: &Path) -> Result<u64, XenError> {
    let failed = |cause: String| XenError::Unknown { cause };
    let path = root.join("proc/sys/kernel/random/boot_id");
    let text = std::fs::read_to_string(&path).map_err(|e| failed(format!("{}: {e}", path.display())))?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).take(16).collect();
    u64::from_str_radix(&digits, 16).map_err(|e| failed(format!("{}: {e}", path.display())))
}

/// A domain in the hypervisor's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Listed {
    /// The domain's number, which is valid for this run on this host.
    pub domid: u32,
    /// The domain's UUID.
    pub vm: VmId,
    /// The domain is being destroyed, and its settings end with it.
    pub is_dying: bool,
    /// The domain does not run: it has ended, or is suspended and may resume.
    pub is_shut_down: bool,
    /// The domain is suspended, and may resume.
    pub is_suspended: bool,
    /// The domain is HVM or PVH, not PV.
    pub is_hvm: bool,
    /// The domain is xenstore's own, which is not a VM.
    pub is_xenstore: bool,
    /// The domain is paused: by `xl pause`, or because it is about to be saved.
    pub is_paused: bool,
    /// The domain's memory, in pages of 4 KiB.
    pub pages: u64,
    /// Number of the domain's vCPUs, which are numbered from 0.
    pub vcpu_count: u16,
    /// The domain's pool of CPUs.
    pub pool: u32,
}

impl Listed {
    /// Returns true if the domain is a VM that runs or is paused.
    pub(crate) fn is_vm(&self) -> bool {
        !self.is_dying && !self.is_shut_down && !self.is_xenstore && self.vm != VmId(0)
    }
}

/// A vCPU's state in the hypervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Vcpu {
    /// Time for which the vCPU ran.
    pub running: Ns,
    /// The vCPU's state. `None` if the vCPU neither runs nor is blocked, since Xen does not tell whether it then waits for a CPU
    /// or may not run.
    pub state: Option<State>,
    /// CPU on which the vCPU last ran.
    pub cpu: CpuId,
    /// CPUs that the vCPU may run on.
    pub affinity: CpuSet,
}

/// A pool of CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pool {
    /// The pool's CPUs.
    pub cpus: CpuSet,
    /// The pool's scheduler.
    scheduler: u32,
}

impl Pool {
    /// Returns true if the pool's scheduler supports caps.
    pub(crate) fn has_caps(&self) -> bool {
        [CREDIT, CREDIT2].contains(&self.scheduler)
    }
}

/// Nodes, by number.
#[derive(Clone, Debug)]
pub(crate) struct Nodes {
    /// Memory of each node; `None` for a number without a node.
    pub memory: Vec<Option<NodeMemory>>,
    /// Distances between nodes, with a row for each node.
    pub distances: Vec<Vec<u32>>,
}

/// The function that sets the balloon target, in KiB, of the domain with this number.
struct SetMemory(Box<dyn Fn(u32, u64) -> Result<(), XlError> + Send>);

impl std::fmt::Debug for SetMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SetMemory")
    }
}

/// The hypervisor of this host. Only one thread may use it, since its C library allows one caller at a time.
#[derive(Debug)]
pub(crate) struct Hypervisor {
    control: Control,
    store: Source,
    memory: SetMemory,
    handle: NonNull<c_void>,
    root: PathBuf,
    /// Identifies this boot of the host.
    boot: u64,
    cpu_map_bytes: usize,
    node_map_bytes: usize,
    cpu_max: usize,
    node_max: usize,
    /// Position in the console's output up to which it was read.
    console_at: u32,
}

// SAFETY: the handle is used only by the value's owner, and by one thread at a time: nothing here is `Sync`.
unsafe impl Send for Hypervisor {}

impl Drop for Hypervisor {
    fn drop(&mut self) {
        // SAFETY: opened by `open`, and closed once.
        unsafe { (self.control.xc_interface_close)(self.handle.as_ptr()) };
    }
}

impl Hypervisor {
    /// Opens the hypervisor of this host.
    ///
    /// # Errors
    /// Each error is a sentence with its remedy.
    pub(crate) fn open(root: &Path) -> Result<Hypervisor, XenError> {
        dom0::check(root)?;
        let control = Control::load().map_err(XenError::NoLibrary)?;
        let store = Store::load().map_err(XenError::NoLibrary)?;
        // SAFETY: no loggers except the library's own, which write to standard error.
        let handle = unsafe { (control.xc_interface_open)(null_mut(), null_mut(), 0) };
        let handle = NonNull::new(handle).ok_or_else(|| XenError::NotPermitted {
            cause: std::io::Error::last_os_error().to_string(),
        })?;
        Hypervisor::of(root, control, handle, (Source::of(store), xl::set_memory))
    }

    /// Returns a hypervisor that `control` has opened.
    pub(crate) fn of(
        root: &Path,
        control: Control,
        handle: NonNull<c_void>,
        (store, memory): (Source, impl Fn(u32, u64) -> Result<(), XlError> + Send + 'static),
    ) -> Result<Hypervisor, XenError> {
        let size = |value: c_int, most: usize, call| match usize::try_from(value) {
            Ok(value) if (1..=most).contains(&value) => Ok(value),
            _ => Err(CallError::last(call)),
        };
        let at = handle.as_ptr();
        // SAFETY: the handle is open.
        let sizes = unsafe {
            [
                (control.xc_get_max_cpus)(at),
                (control.xc_get_max_nodes)(at),
                (control.xc_get_cpumap_size)(at),
                (control.xc_get_nodemap_size)(at),
            ]
        };
        let mut hypervisor = Hypervisor {
            control,
            store,
            memory: SetMemory(Box::new(memory)),
            handle,
            root: root.to_owned(),
            boot: boot(root)?,
            cpu_max: 0,
            node_max: 0,
            cpu_map_bytes: 0,
            node_map_bytes: 0,
            console_at: 0,
        };
        hypervisor.cpu_max = size(sizes[0], CPUS_MAX, "xc_get_max_cpus")?;
        hypervisor.node_max = size(sizes[1], NODES_MAX, "xc_get_max_nodes")?;
        hypervisor.cpu_map_bytes = size(sizes[2], CPUS_MAX, "xc_get_cpumap_size")?;
        hypervisor.node_map_bytes = size(sizes[3], NODES_MAX, "xc_get_nodemap_size")?;
        Ok(hypervisor)
    }

    /// Returns the number that identifies this boot of the host. With a domain's number and UUID, it identifies one run of the
    /// domain.
    pub(crate) fn boot(&self) -> u64 {
        self.boot
    }

    fn at(&self) -> *mut c_void {
        self.handle.as_ptr()
    }

    /// Returns the place of each CPU, by number; `None` for an offline CPU.
    pub(crate) fn cpus(&self) -> Result<Vec<Option<CpuPlace>>, CallError> {
        let mut places = vec![CpuPlace::default(); self.cpu_max];
        let mut count = places.len() as c_uint;
        // SAFETY: there is room for `count` places.
        let done = unsafe { (self.control.xc_cputopoinfo)(self.at(), &raw mut count, places.as_mut_ptr()) };
        if done != 0 {
            return Err(CallError::last("xc_cputopoinfo"));
        }
        places.truncate(count as usize);
        let is_there = |place: &CpuPlace| place.core != u32::MAX && (place.node as usize) < NODES_MAX;
        Ok(places
            .into_iter()
            .map(|place| Some(place).filter(is_there))
            .collect())
    }

    /// Returns the nodes' memory, and the distances between nodes.
    pub(crate) fn nodes(&self) -> Result<Nodes, CallError> {
        let mut memory = vec![NodeMemory::default(); self.node_max];
        let mut distances = vec![0u32; self.node_max * self.node_max];
        let mut count = memory.len() as c_uint;
        // SAFETY: there is room for `count` nodes, and for the square of that in distances.
        let done = unsafe {
            let (memory, distances) = (memory.as_mut_ptr(), distances.as_mut_ptr());
            (self.control.xc_numainfo)(self.at(), &raw mut count, memory, distances)
        };
        if done != 0 {
            return Err(CallError::last("xc_numainfo"));
        }
        let count = (count as usize).min(self.node_max);
        memory.truncate(count);
        distances.truncate(count * count);
        let is_there = |of: &NodeMemory| of.size != u64::from(u32::MAX) && of.size != u64::MAX;
        let memory = memory.into_iter().map(|of| Some(of).filter(is_there)).collect();
        Ok(Nodes {
            memory,
            distances: distances.chunks(count.max(1)).map(<[u32]>::to_vec).collect(),
        })
    }

    /// Returns the idle time of each CPU, by number.
    pub(crate) fn idle(&self) -> Result<Vec<Ns>, CallError> {
        let mut idle = vec![0u64; self.cpu_max];
        let mut count: c_int = 0;
        // SAFETY: there is room for as many as the call is told.
        let done = unsafe {
            let most = c_int::try_from(idle.len()).unwrap_or(c_int::MAX);
            (self.control.xc_getcpuinfo)(self.at(), most, idle.as_mut_ptr(), &raw mut count)
        };
        if done != 0 {
            return Err(CallError::last("xc_getcpuinfo"));
        }
        idle.truncate(usize::try_from(count).unwrap_or(0));
        Ok(idle.into_iter().map(Ns).collect())
    }

    /// Returns all domains except dom0, ascending by number.
    pub(crate) fn domains(&self) -> Result<Vec<Listed>, CallError> {
        let mut listed = Vec::new();
        let mut from = 1;
        while listed.len() < DOMAINS_MAX {
            let Some(found) = self.domain_from(from)? else {
                break;
            };
            from = found.domid + 1;
            listed.push(found);
        }
        Ok(listed)
    }

    /// Returns the domain with this number.
    pub(crate) fn domain(&self, domid: u32) -> Result<Option<Listed>, CallError> {
        Ok(self.domain_from(domid)?.filter(|found| found.domid == domid))
    }

    /// Returns the domain with the lowest number that is at least `from`.
    fn domain_from(&self, from: u32) -> Result<Option<Listed>, CallError> {
        let mut info = DomainInfo::default();
        // SAFETY: there is room for one domain.
        let count = unsafe { (self.control.xc_domain_getinfolist)(self.at(), from, 1, &raw mut info) };
        match count {
            0 => return Ok(None),
            1 => {}
            _ => return Err(CallError::last("xc_domain_getinfolist")),
        }
        let domid = u32::from(info.domain);
        if domid < from {
            return Ok(None);
        }
        Ok(Some(Listed {
            domid,
            vm: VmId(u128::from_be_bytes(info.handle)),
            is_dying: info.flags & library::DYING != 0,
            is_shut_down: info.flags & library::SHUTDOWN != 0,
            is_suspended: info.flags & library::SHUTDOWN != 0
                && info.flags >> library::REASON_SHIFT & library::REASON == library::SUSPENDED,
            is_hvm: info.flags & library::HVM != 0,
            is_xenstore: info.flags & library::XENSTORE != 0,
            is_paused: info.flags & library::PAUSED != 0,
            pages: info.tot_pages,
            vcpu_count: u16::try_from(info.max_vcpu_id.wrapping_add(1)).unwrap_or(0),
            pool: info.cpupool,
        }))
    }

    /// Returns a vCPU of a domain; `None` if it is offline, or the domain has ended.
    pub(crate) fn vcpu(&self, domid: u32, index: u16) -> Option<Vcpu> {
        let mut info = VcpuInfo::default();
        // SAFETY: there is room for one vCPU.
        let done = unsafe { (self.control.xc_vcpu_getinfo)(self.at(), domid, index.into(), &raw mut info) };
        if done != 0 || info.online == 0 {
            return None;
        }
        Some(Vcpu {
            running: Ns(info.cpu_time.unsigned_abs()),
            state: match (info.running, info.blocked) {
                (1.., _) => Some(State::Running),
                (0, 1..) => Some(State::Blocked),
                (0, 0) => None,
            },
            cpu: CpuId(info.cpu),
            affinity: self.affinities(domid, index).ok()?.0,
        })
    }

    /// Returns the CPUs that a vCPU may run on.
    pub(crate) fn affinity(&self, domid: u32, index: u16) -> Result<CpuSet, CallError> {
        self.affinities(domid, index).map(|(hard, _)| hard)
    }

    /// Returns the CPUs that a vCPU prefers.
    pub(crate) fn preference(&self, domid: u32, index: u16) -> Result<CpuSet, CallError> {
        self.affinities(domid, index).map(|(_, soft)| soft)
    }

    /// Returns the CPUs that a vCPU may run on, and the CPUs that it prefers. Works for an offline vCPU too.
    pub(crate) fn affinities(&self, domid: u32, index: u16) -> Result<(CpuSet, CpuSet), CallError> {
        let (mut hard, mut soft) = (self.cpu_map(), self.cpu_map());
        // SAFETY: both maps are as long as Xen's.
        let done = unsafe {
            let (hard, soft) = (hard.as_mut_ptr(), soft.as_mut_ptr());
            (self.control.xc_vcpu_getaffinity)(self.at(), domid, index.into(), hard, soft, HARD | SOFT)
        };
        let cpus = |map: &[u8]| bits(map).map(|at| CpuId(at as u32)).collect();
        match done {
            0 => Ok((cpus(&hard), cpus(&soft))),
            _ => Err(CallError::last("xc_vcpu_getaffinity")),
        }
    }

    /// Lets a vCPU run on these CPUs only. Its preference does not change.
    pub(crate) fn pin(&self, domid: u32, index: u16, cpus: &CpuSet) -> Result<(), CallError> {
        self.set_affinity(domid, index, cpus, HARD)
    }

    /// Makes a vCPU prefer these CPUs. Where it may run does not change.
    pub(crate) fn prefer(&self, domid: u32, index: u16, cpus: &CpuSet) -> Result<(), CallError> {
        self.set_affinity(domid, index, cpus, SOFT)
    }

    fn set_affinity(&self, domid: u32, index: u16, cpus: &CpuSet, which: u32) -> Result<(), CallError> {
        let mut hard = self.cpu_map();
        cpus.iter().for_each(|cpu| set(&mut hard, cpu.0 as usize));
        // Xen sets the affinity that `which` selects, and returns both resulting affinities in the maps.
        let mut soft = hard.clone();
        // SAFETY: both maps are as long as Xen's.
        let done = unsafe {
            let (hard, soft) = (hard.as_mut_ptr(), soft.as_mut_ptr());
            (self.control.xc_vcpu_setaffinity)(self.at(), domid, index.into(), hard, soft, which)
        };
        match done {
            0 => Ok(()),
            _ => Err(CallError::last("xc_vcpu_setaffinity")),
        }
    }

    /// Returns true if Xen can track a PV domain's writes. Only then can a PV domain be copied while it runs.
    pub(crate) fn can_shadow(&self) -> Result<bool, CallError> {
        let mut info = HostInfo::default();
        // SAFETY: there is room for one, and more.
        match unsafe { (self.control.xc_physinfo)(self.at(), &raw mut info) } {
            0 => Ok(info.capabilities & library::CAN_SHADOW != 0),
            _ => Err(CallError::last("xc_physinfo")),
        }
    }

    /// Returns the nodes that a domain's memory is taken from, if they have room.
    pub(crate) fn node_affinity(&self, domid: u32) -> Result<NodeSet, CallError> {
        let mut map = vec![0u8; self.node_map_bytes];
        // SAFETY: the map is as long as Xen's.
        let done = unsafe { (self.control.xc_domain_node_getaffinity)(self.at(), domid, map.as_mut_ptr()) };
        match done {
            0 => Ok(bits(&map).map(|at| NodeId(at as u16)).collect()),
            _ => Err(CallError::last("xc_domain_node_getaffinity")),
        }
    }

    /// Makes a domain's memory come from these nodes from now on.
    pub(crate) fn set_node_affinity(&self, domid: u32, nodes: &NodeSet) -> Result<(), CallError> {
        let mut map = vec![0; self.node_map_bytes];
        for node in nodes.iter() {
            set(&mut map, usize::from(node.0));
        }
        // SAFETY: the map is as long as Xen's.
        let done = unsafe { (self.control.xc_domain_node_setaffinity)(self.at(), domid, map.as_mut_ptr()) };
        match done {
            0 => Ok(()),
            _ => Err(CallError::last("xc_domain_node_setaffinity")),
        }
    }

    /// Returns true if [`Hypervisor::follow_cpus`] is possible: the hypercall that reads the nodes must agree with the library.
    pub(crate) fn can_follow_cpus(&self, domid: u32) -> bool {
        let known = self.node_affinity(domid).map(|nodes| {
            let bit = |node: NodeId| 1u64.checked_shl(node.0.into()).unwrap_or(0);
            nodes.iter().map(bit).fold(0, |all, bit| all | bit)
        });
        let told = privcmd::nodes(&self.root, domid);
        matches!((known, told), (Ok(known), Ok(told)) if known == told)
    }

    /// Makes a domain's memory come from the nodes of its CPUs from now on, wherever these are.
    pub(crate) fn follow_cpus(&self, domid: u32) -> Result<(), CallError> {
        privcmd::follow(&self.root, domid).map_err(|error| CallError {
            call: "XEN_DOMCTL_setnodeaffinity",
            cause: error.to_string(),
        })
    }

    /// Returns a pool of CPUs.
    pub(crate) fn pool(&self, number: u32) -> Result<Pool, CallError> {
        // SAFETY: the result is read here, and freed by its own function.
        unsafe {
            let Some(info) = NonNull::new((self.control.xc_cpupool_getinfo)(self.at(), number)) else {
                return Err(CallError::last("xc_cpupool_getinfo"));
            };
            let found = info.as_ref();
            let is_it = found.cpupool_id == number && !found.cpumap.is_null();
            let pool = is_it.then(|| {
                let map = std::slice::from_raw_parts(found.cpumap, self.cpu_map_bytes);
                Pool {
                    cpus: bits(map).map(|at| CpuId(at as u32)).collect(),
                    scheduler: found.sched_id,
                }
            });
            (self.control.xc_cpupool_infofree)(self.at(), info.as_ptr());
            pool.ok_or(CallError {
                call: "xc_cpupool_getinfo",
                cause: format!("there is no CPU pool {number}"),
            })
        }
    }

    /// Returns the weight and cap of a domain.
    fn share(&self, domid: u32, pool: &Pool) -> Result<Share, CallError> {
        let mut share = Share::default();
        let get = match pool.scheduler {
            CREDIT => self.control.xc_sched_credit_domain_get,
            CREDIT2 => self.control.xc_sched_credit2_domain_get,
            _ => return Err(no_caps()),
        };
        // SAFETY: there is room for one share.
        match unsafe { get(self.at(), domid, &raw mut share) } {
            0 => Ok(share),
            _ => Err(CallError::last("xc_sched_credit_domain_get")),
        }
    }

    /// Returns a domain's cap in percent of one CPU; 0 if it has none.
    pub(crate) fn cap(&self, domid: u32, pool: &Pool) -> Result<u16, CallError> {
        self.share(domid, pool).map(|share| share.cap)
    }

    /// Sets a domain's cap. Its weight does not change.
    pub(crate) fn set_cap(&self, domid: u32, pool: &Pool, cap: u16) -> Result<(), CallError> {
        // Both schedulers ignore a weight of 0, so this call does not overwrite a weight that another program set meanwhile.
        let mut share = Share { weight: 0, cap };
        let set = match pool.scheduler {
            CREDIT => self.control.xc_sched_credit_domain_set,
            CREDIT2 => self.control.xc_sched_credit2_domain_set,
            _ => return Err(no_caps()),
        };
        // SAFETY: it reads one share.
        match unsafe { set(self.at(), domid, &raw mut share) } {
            0 => Ok(()),
            _ => Err(CallError::last("xc_sched_credit_domain_set")),
        }
    }

    /// Sends a debug key to Xen, and returns the console output that results.
    pub(crate) fn say(&mut self, key: &str) -> Result<String, CallError> {
        let keys = CString::new(key).map_err(|_| CallError {
            call: "xc_send_debug_keys",
            cause: "no such key".into(),
        })?;
        // Skip earlier output.
        self.console()?;
        // SAFETY: a text that ends in zero.
        if unsafe { (self.control.xc_send_debug_keys)(self.at(), keys.as_ptr()) } != 0 {
            return Err(CallError::last("xc_send_debug_keys"));
        }
        self.console()
    }

    /// Returns the console output since the last read.
    fn console(&mut self) -> Result<String, CallError> {
        let mut room = vec![0u8; 64 << 10];
        let mut text = Vec::new();
        while text.len() < CONSOLE_BYTES {
            let mut count = room.len() as c_uint;
            let mut at = self.console_at;
            // SAFETY: there is room for as many bytes as the call is told.
            let done = unsafe {
                let (room, count, at) = (room.as_mut_ptr().cast(), &raw mut count, &raw mut at);
                (self.control.xc_readconsolering)(self.at(), room, count, 0, 1, at)
            };
            if done != 0 {
                return Err(CallError::last("xc_readconsolering"));
            }
            self.console_at = at;
            let count = (count as usize).min(room.len());
            if count == 0 {
                break;
            }
            text.extend_from_slice(&room[..count]);
        }
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// Sets a domain's balloon target, in KiB.
    ///
    /// # Errors
    /// Returns the toolstack's message.
    pub(crate) fn set_memory(&self, domid: u32, kib: u64) -> Result<(), XlError> {
        (self.memory.0)(domid, kib)
    }

    /// Resumes a domain that was suspended to be copied, as libxl does after a failed copy. The domain's kernel sees that the
    /// suspension was called off.
    ///
    /// # Errors
    /// Returns what failed.
    pub(crate) fn resume(&self, domid: u32) -> Result<(), ResumeError> {
        let library = library::Guest::load()?;
        // SAFETY: the handle is open, and of the same version of the library.
        if unsafe { (library.xc_domain_resume)(self.at(), domid, 1) } != 0 {
            return Err(CallError::last("xc_domain_resume").into());
        }
        Ok(store::resumed(&Store::load()?, domid)?)
    }

    /// Starts access to xenstore, which a separate thread reads.
    pub(crate) fn store(&self) -> Asking {
        Asking::start(self.store.clone())
    }

    fn cpu_map(&self) -> Vec<u8> {
        vec![0; self.cpu_map_bytes]
    }
}

fn no_caps() -> CallError {
    CallError {
        call: "xc_sched_credit_domain_get",
        cause:
            "the scheduler of its CPU pool does not support caps: boot Xen with sched=credit or sched=credit2"
                .into(),
    }
}

/// Returns the positions of the bits that are set, lowest first.
fn bits(map: &[u8]) -> impl Iterator<Item = usize> + '_ {
    let of = |(at, byte): (usize, &u8)| {
        let byte = *byte;
        (0..8)
            .filter(move |bit| byte >> bit & 1 == 1)
            .map(move |bit| at * 8 + bit)
    };
    map.iter().enumerate().flat_map(of)
}

/// Sets a bit, if the map is long enough.
fn set(map: &mut [u8], at: usize) {
    if let Some(byte) = map.get_mut(at / 8) {
        *byte |= 1 << (at % 8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn bits_come_out_as_they_went_in(ids in proptest::collection::btree_set(0usize..64, 0..20)) {
            let mut map = [0u8; 8];
            ids.iter().for_each(|at| set(&mut map, *at));
            set(&mut map, 64);
            proptest::prop_assert_eq!(bits(&map).collect::<Vec<_>>(), ids.into_iter().collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_system_that_is_no_dom0_is_told_so() {
        let error = Hypervisor::open(Path::new("/nowhere")).unwrap_err();
        assert!(error.to_string().contains("not dom0"), "{error}");
    }
}
