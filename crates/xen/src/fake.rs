//! A fake hypervisor for tests: four nodes with one CPU each, and domains. It stands behind those functions of libxenctrl that
//! are called. The testbed runs the same cases on a real hypervisor.

// The calls of this crate pass pointers to these functions as they do to C functions.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::error::StoreError;
use crate::hypervisor::Hypervisor;
use crate::library::{CREDIT, Control, CpuPlace, DomainInfo, NodeMemory, PAUSED, PoolInfo, Share, VcpuInfo};
use crate::store::Source;
use crate::xl::XlError;

const CPUS: usize = 4;

/// A vCPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vcpu {
    pub is_online: bool,
    /// CPUs that the domain may run on, one bit each.
    pub hard: u8,
    pub soft: u8,
}

/// A domain.
#[derive(Clone, Debug)]
pub(crate) struct Dom {
    pub name: String,
    pub uuid: u128,
    pub vcpus: Vec<Vcpu>,
    pub nodes: u8,
    pub share: (u16, u16),
    pub pages: u64,
    /// The target of the domain's balloon, in KiB. The guest follows at once.
    pub target: Option<u64>,
    pub flags: u32,
}

impl Dom {
    /// Returns a domain with two vCPUs that may run anywhere.
    pub(crate) fn new(name: &str, uuid: u128) -> Dom {
        let vcpu = Vcpu {
            is_online: true,
            hard: 0xf,
            soft: 0xff,
        };
        Dom {
            name: name.to_owned(),
            uuid,
            vcpus: vec![vcpu; 2],
            nodes: 0xf,
            share: (256, 0),
            pages: 32768,
            target: None,
            flags: 0,
        }
    }

    /// Makes the domain one that is being built.
    pub(crate) fn paused(mut self) -> Dom {
        self.flags = PAUSED;
        self
    }
}

/// The host.
#[derive(Debug, Default)]
pub(crate) struct World {
    pub doms: BTreeMap<u32, Dom>,
    pub console: String,
    /// Name of a call that must fail.
    pub failing: Option<&'static str>,
    pub keys_pressed: u32,
    /// Why xenstore does not answer; `None` if it does.
    pub store_fails: Option<StoreError>,
}

/// The fake hypervisor; see the module.
#[derive(Clone, Debug, Default)]
pub(crate) struct FakeXen(Arc<Mutex<World>>);

impl FakeXen {
    pub(crate) fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap()
    }

    /// Opens the fake hypervisor, as dom0 below `root` would.
    pub(crate) fn open(&self, root: &Path) -> Hypervisor {
        let boot = root.join("proc/sys/kernel/random/boot_id");
        std::fs::create_dir_all(boot.parent().unwrap()).unwrap();
        if !boot.exists() {
            std::fs::write(&boot, "00000000-0000-0001-0000-000000000000\n").unwrap();
        }
        let handle = Box::into_raw(Box::new(Arc::clone(&self.0)));
        let of_store = self.clone();
        let read = move |paths: &[String]| {
            let world = of_store.world();
            match &world.store_fails {
                Some(why) => Err(why.clone()),
                None => Ok(paths.iter().map(|path| value(&world, path)).collect()),
            }
        };
        let of_store = self.clone();
        let set = move |domid: u32, kib: u64| {
            let mut world = of_store.world();
            if world.failing == Some("set_memory") {
                return Err(XlError::planned("fails"));
            }
            let dom = world.doms.get_mut(&domid);
            let dom = dom.ok_or_else(|| XlError::planned("there is no such domain"))?;
            (dom.target, dom.pages) = (Some(kib), kib / 4);
            Ok(())
        };
        let handle = NonNull::new(handle).unwrap().cast();
        Hypervisor::of(root, control(), handle, (Source::new(read), set)).unwrap()
    }
}

fn value(world: &World, path: &str) -> Option<String> {
    let (domid, key) = path.strip_prefix("/local/domain/")?.split_once('/')?;
    let dom = world.doms.get(&domid.parse().ok()?)?;
    match key {
        "name" => Some(dom.name.clone()),
        "memory/target" => dom.target.map(|kib| kib.to_string()),
        "memory/static-max" => Some("131072".to_owned()),
        _ => None,
    }
}

fn world<'a>(handle: *mut c_void) -> MutexGuard<'a, World> {
    // SAFETY: the handle was made by `open`, and lives as long as the hypervisor that calls.
    unsafe { (*handle.cast::<Arc<Mutex<World>>>()).lock().unwrap() }
}

/// Changes a domain. Returns -1 if there is no such domain, or if this call must fail.
fn with(handle: *mut c_void, call: &str, domid: u32, act: impl FnOnce(&mut Dom)) -> c_int {
    let mut world = world(handle);
    if world.failing == Some(call) {
        return -1;
    }
    world.doms.get_mut(&domid).map_or(-1, |dom| {
        act(dom);
        0
    })
}

unsafe extern "C" fn close(handle: *mut c_void) -> c_int {
    drop(unsafe { Box::from_raw(handle.cast::<Arc<Mutex<World>>>()) });
    0
}

unsafe extern "C" fn most(_: *mut c_void) -> c_int {
    c_int::try_from(CPUS).unwrap()
}

unsafe extern "C" fn one(_: *mut c_void) -> c_int {
    1
}

unsafe extern "C" fn topology(_: *mut c_void, count: *mut c_uint, places: *mut CpuPlace) -> c_int {
    for cpu in 0..CPUS as u32 {
        unsafe {
            *places.add(cpu as usize) = CpuPlace {
                core: cpu,
                socket: cpu,
                node: cpu,
            };
        }
    }
    unsafe { *count = CPUS as c_uint };
    0
}

unsafe extern "C" fn numa(
    _: *mut c_void,
    count: *mut c_uint,
    memory: *mut NodeMemory,
    distances: *mut u32,
) -> c_int {
    for at in 0..CPUS * CPUS {
        unsafe { *distances.add(at) = if at % (CPUS + 1) == 0 { 10 } else { 20 } };
    }
    for node in 0..CPUS {
        let (size, free) = (1 << 30, 1 << 29);
        unsafe { *memory.add(node) = NodeMemory { size, free } };
    }
    unsafe { *count = CPUS as c_uint };
    0
}

unsafe extern "C" fn idle(_: *mut c_void, most: c_int, idle: *mut u64, count: *mut c_int) -> c_int {
    for cpu in 0..most as usize {
        unsafe { *idle.add(cpu) = 1 };
    }
    unsafe { *count = most };
    0
}

unsafe extern "C" fn list(handle: *mut c_void, from: u32, _: c_uint, info: *mut DomainInfo) -> c_int {
    let world = world(handle);
    let Some((domid, dom)) = world.doms.range(from..).next() else {
        return 0;
    };
    unsafe {
        (*info).domain = *domid as u16;
        (*info).flags = dom.flags;
        (*info).tot_pages = dom.pages;
        (*info).max_vcpu_id = dom.vcpus.len() as u32 - 1;
        (*info).handle = dom.uuid.to_be_bytes();
    }
    1
}

unsafe extern "C" fn vcpu(handle: *mut c_void, domid: u32, index: u32, info: *mut VcpuInfo) -> c_int {
    with(handle, "vcpu", domid, |dom| unsafe {
        (*info).online = dom.vcpus[index as usize].is_online.into();
    })
}

unsafe extern "C" fn affinity(
    handle: *mut c_void,
    domid: u32,
    index: c_int,
    hard: *mut u8,
    soft: *mut u8,
    _: u32,
) -> c_int {
    with(handle, "affinity", domid, |dom| unsafe {
        *hard = dom.vcpus[index as usize].hard;
        *soft = dom.vcpus[index as usize].soft;
    })
}

unsafe extern "C" fn pin(
    handle: *mut c_void,
    domid: u32,
    index: c_int,
    hard: *mut u8,
    _: *mut u8,
    _: u32,
) -> c_int {
    with(handle, "pin", domid, |dom| {
        dom.vcpus[index as usize].hard = unsafe { *hard };
    })
}

unsafe extern "C" fn nodes(handle: *mut c_void, domid: u32, map: *mut u8) -> c_int {
    with(handle, "nodes", domid, |dom| unsafe { *map = dom.nodes })
}

unsafe extern "C" fn set_nodes(handle: *mut c_void, domid: u32, map: *mut u8) -> c_int {
    with(handle, "set_nodes", domid, |dom| dom.nodes = unsafe { *map })
}

unsafe extern "C" fn pool(_: *mut c_void, cpupool_id: u32) -> *mut PoolInfo {
    Box::into_raw(Box::new(PoolInfo {
        cpupool_id,
        sched_id: CREDIT,
        n_dom: 0,
        cpumap: Box::into_raw(Box::new(0xf)),
    }))
}

unsafe extern "C" fn free_pool(_: *mut c_void, info: *mut PoolInfo) {
    unsafe {
        let info = Box::from_raw(info);
        drop(Box::from_raw(info.cpumap));
    }
}

unsafe extern "C" fn share(handle: *mut c_void, domid: u32, share: *mut Share) -> c_int {
    with(handle, "share", domid, |dom| unsafe {
        ((*share).weight, (*share).cap) = dom.share;
    })
}

/// Sets a domain's weight and cap. As in both real schedulers, a weight of 0 keeps the current weight.
unsafe extern "C" fn set_share(handle: *mut c_void, domid: u32, share: *mut Share) -> c_int {
    let share = unsafe { *share };
    with(handle, "set_share", domid, |dom| {
        let weight = if share.weight == 0 {
            dom.share.0
        } else {
            share.weight
        };
        dom.share = (weight, share.cap);
    })
}

unsafe extern "C" fn keys(handle: *mut c_void, _: *const c_char) -> c_int {
    world(handle).keys_pressed += 1;
    0
}

unsafe extern "C" fn console(
    handle: *mut c_void,
    room: *mut c_char,
    count: *mut c_uint,
    _: c_int,
    _: c_int,
    at: *mut u32,
) -> c_int {
    let world = world(handle);
    unsafe {
        let new = &world.console.as_bytes()[(*at as usize).min(world.console.len())..];
        let length = new.len().min(*count as usize);
        std::ptr::copy_nonoverlapping(new.as_ptr(), room.cast(), length);
        *count = length as c_uint;
        *at += length as u32;
    }
    0
}

fn control() -> Control {
    Control {
        xc_interface_close: close,
        xc_get_max_cpus: most,
        xc_get_max_nodes: most,
        xc_get_cpumap_size: one,
        xc_get_nodemap_size: one,
        xc_cputopoinfo: topology,
        xc_numainfo: numa,
        xc_getcpuinfo: idle,
        xc_domain_getinfolist: list,
        xc_vcpu_getinfo: vcpu,
        xc_vcpu_getaffinity: affinity,
        xc_vcpu_setaffinity: pin,
        xc_domain_node_getaffinity: nodes,
        xc_domain_node_setaffinity: set_nodes,
        xc_cpupool_getinfo: pool,
        xc_cpupool_infofree: free_pool,
        xc_sched_credit_domain_get: share,
        xc_sched_credit_domain_set: set_share,
        xc_send_debug_keys: keys,
        xc_readconsolering: console,
        ..Control::absent()
    }
}
