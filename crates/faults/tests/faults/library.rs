//! libvirt's library as the agent calls it, answered by the model: the functions that `kvm::libvirt` uses, by their C interface.
//! Everything above that interface is the product's own code.

#![allow(unsafe_code)] // the C interface of libvirt
#![allow(non_snake_case)] // its names

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulong, c_ulonglong, c_void};
use std::rc::Rc;

use virt::sys;

use crate::vm::Role;
use crate::world::{State, World};

thread_local! {
    static WORLD: RefCell<Option<Rc<World>>> = const { RefCell::new(None) };
    static ERROR: RefCell<(CString, Option<sys::virError>)> = RefCell::new((CString::default(), None));
    /// The operation of the job that was asked for last.
    static OPERATION: RefCell<c_int> = const { RefCell::new(0) };
}

/// Answers calls on this thread from this model.
pub(crate) fn answer_from(world: Option<Rc<World>>) {
    WORLD.set(world);
}

/// The heartbeat of the agent on this thread.
pub(crate) fn beat() {
    let world = WORLD.with_borrow(Clone::clone);
    if let Some(world) = world {
        world.state().beat();
    }
}

/// A connection.
struct Connection {
    references: u32,
    life: u32,
}

/// A handle of a domain.
struct Handle {
    references: u32,
    life: u32,
    at: usize,
    runtime_id: i32,
}

/// The answer of a call that failed.
type Failed = String;

fn with<T>(answer: impl FnOnce(&mut State) -> T) -> T {
    let world = WORLD.with_borrow(|world| world.clone().expect("a model"));
    let mut state = world.state();
    answer(&mut state)
}

/// Ends a call: records its error.
fn end<T>(result: Result<T, Failed>, failed: T) -> T {
    match result {
        Ok(value) => value,
        Err(cause) => {
            with(|state| state.trace.hash(cause.as_bytes()));
            // SAFETY: an error of zeroes is one without pointers; all of its fields are numbers or pointers.
            let mut error: sys::virError = unsafe { std::mem::zeroed() };
            error.code = sys::VIR_ERR_OPERATION_FAILED.cast_signed();
            error.level = sys::VIR_ERR_ERROR;
            ERROR.with_borrow_mut(|last| {
                last.0 = CString::new(cause).expect("a text");
                error.message = last.0.as_ptr().cast_mut();
                last.1 = Some(error);
            });
            failed
        }
    }
}

/// Whether a connection of this life is alive.
fn alive(state: &mut State, life: u32) -> Result<(), Failed> {
    match state.is_away() || life != state.libvirt_life {
        true => Err("Cannot recv data: Connection reset by peer".to_owned()),
        false => Ok(()),
    }
}

/// Makes a call about a running domain.
fn about<T>(
    domain: sys::virDomainPtr,
    call: impl FnOnce(&mut State, usize) -> Result<T, Failed>,
) -> Result<T, Failed> {
    // SAFETY: the agent passes only handles that it got here and has not freed.
    let handle = unsafe { &*domain.cast::<Handle>() };
    let (life, at) = (handle.life, handle.at);
    with(|state| {
        alive(state, life)?;
        if std::mem::take(&mut state.refuses) {
            return Err("Timed out during operation: cannot acquire state change lock".to_owned());
        }
        match state.vms[at].run {
            Some(_) => call(state, at),
            None => Err("Requested operation is not valid: domain is not running".to_owned()),
        }
    })
}

/// Makes a call that changes a running domain.
fn change(domain: sys::virDomainPtr, call: impl FnOnce(&mut State, usize) -> Result<(), Failed>) -> c_int {
    let changed = about(domain, |state, at| {
        // libvirt refuses to change a domain that is leaving for another host (testbed's case `migrate`).
        if state.vms[at]
            .run
            .as_ref()
            .is_some_and(|run| run.leaves_in.is_some())
        {
            return Err(
                "Timed out during operation: cannot acquire state change lock (held by migration)".to_owned(),
            );
        }
        call(state, at)
    });
    end(changed.map(|()| 0), -1)
}

fn cpus_of(map: *const u8, length: c_int) -> homenode_units::CpuSet {
    // SAFETY: the caller passes a map of this length, which lives during the call.
    let bytes = unsafe { std::slice::from_raw_parts(map, length as usize) };
    let has = |cpu: &usize| bytes[cpu / 8] & (1 << (cpu % 8)) != 0;
    (0..8 * bytes.len())
        .filter(has)
        .map(|cpu| homenode_units::CpuId(cpu as u32))
        .collect()
}

fn text_of<'a>(text: *const c_char) -> Option<&'a str> {
    // SAFETY: the caller passes null or a text that ends with a zero and lives during the call.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_str().expect("UTF-8"))
}

extern "C" fn virSetErrorFunc(_: *mut c_void, _: *mut c_void) {}

extern "C" fn virGetLastError() -> sys::virErrorPtr {
    ERROR.with_borrow_mut(|last| {
        last.1
            .as_mut()
            .map_or(std::ptr::null_mut(), |error| &raw mut *error)
    })
}

extern "C" fn virConnectOpen(_: *const c_char) -> *mut c_void {
    let opened = with(|state| {
        let life = state.libvirt_life;
        alive(state, life).map(|()| life)
    });
    let opened = opened.map(|life| Box::into_raw(Box::new(Connection { references: 1, life })).cast());
    end(opened, std::ptr::null_mut())
}

extern "C" fn virConnectRef(connection: *mut Connection) -> c_int {
    // SAFETY: as in `about`.
    unsafe { (*connection).references += 1 };
    0
}

extern "C" fn virConnectClose(connection: *mut Connection) -> c_int {
    // SAFETY: as in `about`; the last reference is dropped once.
    unsafe {
        (*connection).references -= 1;
        if (*connection).references == 0 {
            drop(Box::from_raw(connection));
        }
    }
    0
}

extern "C" fn virConnectIsAlive(connection: *mut Connection) -> c_int {
    // SAFETY: as in `about`.
    let life = unsafe { (*connection).life };
    with(|state| alive(state, life).is_ok().into())
}

extern "C" fn virConnectGetLibVersion(connection: *mut Connection, version: *mut c_ulong) -> c_int {
    // SAFETY: as in `about`; the caller passes room for the version.
    let life = unsafe {
        *version = 9_000_000;
        (*connection).life
    };
    end(with(|state| alive(state, life).map(|()| 0)), -1)
}

extern "C" fn virConnectListAllDomains(
    connection: *mut Connection,
    into: *mut *mut sys::virDomainPtr,
    _: c_uint,
) -> c_int {
    // SAFETY: as in `about`.
    let life = unsafe { (*connection).life };
    let listed = with(|state| {
        alive(state, life)?;
        if std::mem::take(&mut state.refuses) {
            return Err("internal error: client socket is closed".to_owned());
        }
        let runs = |at: usize| state.vms[at].run.as_ref().map(|run| (at, run.runtime_id));
        Ok((0..state.vms.len()).filter_map(runs).collect::<Vec<_>>())
    });
    let listed = listed.map(|listed| {
        // SAFETY: the array has room for all handles; the caller frees it with `free`.
        unsafe {
            let array = libc::malloc(8 * listed.len().max(1)).cast::<sys::virDomainPtr>();
            for (number, (at, runtime_id)) in listed.iter().enumerate() {
                let handle = Handle {
                    references: 1,
                    life,
                    at: *at,
                    runtime_id: *runtime_id,
                };
                *array.add(number) = Box::into_raw(Box::new(handle)).cast();
            }
            *into = array;
        }
        c_int::try_from(listed.len()).expect("few domains")
    });
    end(listed, -1)
}

extern "C" fn virDomainRef(domain: *mut Handle) -> c_int {
    // SAFETY: as in `about`.
    unsafe { (*domain).references += 1 };
    0
}

extern "C" fn virDomainFree(domain: *mut Handle) -> c_int {
    // SAFETY: as in `about`; the last reference is dropped once.
    unsafe {
        (*domain).references -= 1;
        if (*domain).references == 0 {
            drop(Box::from_raw(domain));
        }
    }
    0
}

extern "C" fn virDomainGetUUIDString(domain: *mut Handle, into: *mut c_char) -> c_int {
    // SAFETY: as in `about`.
    let at = unsafe { (*domain).at };
    let id = CString::new(with(|state| state.vms[at].id.to_string())).expect("a UUID");
    // SAFETY: the caller has room for a UUID and its zero.
    unsafe { std::ptr::copy_nonoverlapping(id.as_ptr(), into, id.as_bytes_with_nul().len()) };
    0
}

extern "C" fn virDomainGetID(domain: *mut Handle) -> c_uint {
    // SAFETY: as in `about`.
    unsafe { (*domain).runtime_id.cast_unsigned() }
}

extern "C" fn virDomainGetXMLDesc(domain: sys::virDomainPtr, flags: c_uint) -> *mut c_char {
    let xml = about(domain, |state, at| {
        let time = state.time;
        if flags & sys::VIR_DOMAIN_XML_INACTIVE != 0 {
            return Ok(state.vms[at].xml_inactive());
        }
        let run = state.vms[at].run.as_mut().expect("a running VM");
        run.sizes.push_back((time, run.current_kib));
        run.sizes.retain(|(shown, _)| shown.0 + 10_000_000_000 > time.0);
        let is_stale = run.stale.filter(|(until, _)| time < *until);
        let old =
            is_stale.and_then(|(_, span)| run.sizes.iter().rev().find(|(shown, _)| *shown + span <= time));
        let shown = old.map_or(run.current_kib, |(_, kib)| *kib);
        if shown != run.current_kib {
            state.failed(&format!("libvirt shows an old size of {}", state.vms[at].name));
        }
        Ok(state.vms[at].xml(shown))
    });
    let xml = xml.map(|xml| {
        let xml = CString::new(xml).expect("a text");
        // SAFETY: the copy is the caller's to free.
        unsafe { libc::strdup(xml.as_ptr()) }
    });
    end(xml, std::ptr::null_mut())
}

extern "C" fn virDomainIsActive(domain: sys::virDomainPtr) -> c_int {
    // SAFETY: as in `about`.
    let (life, at) = unsafe { ((*domain.cast::<Handle>()).life, (*domain.cast::<Handle>()).at) };
    let active = with(|state| alive(state, life).map(|()| state.vms[at].run.is_some().into()));
    end(active, -1)
}

extern "C" fn virDomainIsPersistent(domain: sys::virDomainPtr) -> c_int {
    end(about(domain, |_, _| Ok(1)), -1)
}

extern "C" fn virDomainGetState(
    domain: sys::virDomainPtr,
    state: *mut c_int,
    reason: *mut c_int,
    _: c_uint,
) -> c_int {
    let is_paused = about(domain, |state, at| {
        Ok(state.vms[at].run.as_ref().expect("a running VM").is_paused)
    });
    let told = is_paused.map(|is_paused| {
        let what = if is_paused {
            sys::VIR_DOMAIN_PAUSED
        } else {
            sys::VIR_DOMAIN_RUNNING
        };
        // SAFETY: the caller passes room for both numbers. Reason 1 is the user's, for both states.
        unsafe { (*state, *reason) = (what.cast_signed(), 1) };
        0
    });
    end(told, -1)
}

extern "C" fn virDomainGetJobStats(
    domain: sys::virDomainPtr,
    kind: *mut c_int,
    params: *mut sys::virTypedParameterPtr,
    count: *mut c_int,
    _: c_uint,
) -> c_int {
    let leaves = about(domain, |state, at| {
        Ok(state.vms[at]
            .run
            .as_ref()
            .expect("a running VM")
            .leaves_in
            .is_some())
    });
    let told = leaves.map(|leaves| {
        let job = if leaves {
            sys::VIR_DOMAIN_JOB_UNBOUNDED
        } else {
            sys::VIR_DOMAIN_JOB_NONE
        };
        OPERATION.set(if leaves {
            sys::VIR_DOMAIN_JOB_OPERATION_MIGRATION_OUT.cast_signed()
        } else {
            0
        });
        // SAFETY: the caller passes room for all three.
        unsafe { (*kind, *params, *count) = (job.cast_signed(), std::ptr::null_mut(), 0) };
        0
    });
    end(told, -1)
}

extern "C" fn virTypedParamsGetInt(_: *mut c_void, _: c_int, _: *const c_char, into: *mut c_int) -> c_int {
    // SAFETY: the caller passes room for the number.
    unsafe { *into = OPERATION.with_borrow(|operation| *operation) };
    1
}

extern "C" fn virTypedParamsFree(_: *mut c_void, _: c_int) {}

extern "C" fn virDomainPinVcpuFlags(
    domain: sys::virDomainPtr,
    vcpu: c_uint,
    map: *const u8,
    length: c_int,
    _: c_uint,
) -> c_int {
    let cpus = cpus_of(map, length);
    change(domain, |state, at| {
        state.agent_pins(at, Role::Vcpu(vcpu as u16), &cpus)
    })
}

extern "C" fn virDomainPinEmulator(
    domain: sys::virDomainPtr,
    map: *const u8,
    length: c_int,
    _: c_uint,
) -> c_int {
    let cpus = cpus_of(map, length);
    change(domain, |state, at| state.agent_pins(at, Role::Emulator, &cpus))
}

extern "C" fn virDomainPinIOThread(
    domain: sys::virDomainPtr,
    id: c_uint,
    map: *const u8,
    length: c_int,
    _: c_uint,
) -> c_int {
    let cpus = cpus_of(map, length);
    change(domain, |state, at| {
        state.agent_pins(at, Role::IoThread(id), &cpus)
    })
}

/// A typed parameter: its name, and its value as a number or text.
fn parameter<'a>(params: *const sys::virTypedParameter, at: c_int) -> (&'a str, i64, &'a str) {
    // SAFETY: the caller passes an array of this length, with names that end with a zero, and the type says which value is set.
    unsafe {
        let one = &*params.add(at as usize);
        let name = CStr::from_ptr(one.field.as_ptr()).to_str().expect("a name");
        match one.type_.cast_unsigned() {
            sys::VIR_TYPED_PARAM_STRING => (name, 0, text_of(one.value.s).unwrap_or_default()),
            _ => (name, one.value.l, ""),
        }
    }
}

extern "C" fn virDomainSetSchedulerParametersFlags(
    domain: sys::virDomainPtr,
    params: *const sys::virTypedParameter,
    count: c_int,
    _: c_uint,
) -> c_int {
    change(domain, |state, at| {
        for number in 0..count {
            match parameter(params, number) {
                ("vcpu_period", us, _) => state.agent_sets_quota(at, Some(us.cast_unsigned()), None)?,
                ("vcpu_quota", us, _) => state.agent_sets_quota(at, None, Some(us))?,
                (other, ..) => return Err(format!("invalid argument: parameter {other}")),
            }
        }
        Ok(())
    })
}

extern "C" fn virDomainSetNumaParameters(
    domain: sys::virDomainPtr,
    params: *const sys::virTypedParameter,
    count: c_int,
    _: c_uint,
) -> c_int {
    change(domain, |state, at| {
        let nodes = (0..count).find_map(|number| match parameter(params, number) {
            ("numa_nodeset", _, nodes) => nodes.parse().ok(),
            _ => None,
        });
        let nodes = nodes.ok_or("invalid argument: no nodeset")?;
        state.agent_sets_nodes(at, &nodes)
    })
}

extern "C" fn virDomainSetMemoryFlags(domain: sys::virDomainPtr, kib: c_ulong, _: c_uint) -> c_int {
    change(domain, |state, at| {
        state.agent_sets_memory(at, kib);
        Ok(())
    })
}

extern "C" fn virDomainSetMemoryStatsPeriod(domain: sys::virDomainPtr, seconds: c_int, _: c_uint) -> c_int {
    change(domain, |state, at| {
        let name = state.vms[at].name.clone();
        state
            .trace
            .add(format!("agent has {name} asked every {seconds} s"));
        state.vms[at].run.as_mut().expect("a running VM").stats_period = seconds;
        Ok(())
    })
}

extern "C" fn virDomainMemoryStats(
    domain: sys::virDomainPtr,
    into: *mut sys::virDomainMemoryStatStruct,
    most: c_uint,
    _: c_uint,
) -> c_int {
    let stats = about(domain, |state, at| {
        let run = state.vms[at].run.as_ref().expect("a running VM");
        let said = |kib: u64| kib * run.lie / 100;
        let all = [
            (sys::VIR_DOMAIN_MEMORY_STAT_AVAILABLE, run.current_kib),
            (sys::VIR_DOMAIN_MEMORY_STAT_USABLE, said(run.current_kib / 2)),
            (sys::VIR_DOMAIN_MEMORY_STAT_UNUSED, said(run.current_kib / 3)),
            (sys::VIR_DOMAIN_MEMORY_STAT_SWAP_IN, 0),
            (sys::VIR_DOMAIN_MEMORY_STAT_SWAP_OUT, 0),
            (sys::VIR_DOMAIN_MEMORY_STAT_LAST_UPDATE, run.stamp_s),
        ];
        Ok(all)
    });
    let told = stats.map(|stats| {
        let stats = &stats[..stats.len().min(most as usize)];
        for (number, (tag, value)) in stats.iter().enumerate() {
            // SAFETY: the caller has room for `most` statistics.
            unsafe {
                (*into.add(number)).tag = tag.cast_signed();
                (*into.add(number)).val = *value as c_ulonglong;
            }
        }
        c_int::try_from(stats.len()).expect("few statistics")
    });
    end(told, -1)
}

extern "C" fn virDomainSetMetadata(
    domain: sys::virDomainPtr,
    _: c_int,
    element: *const c_char,
    key: *const c_char,
    uri: *const c_char,
    flags: c_uint,
) -> c_int {
    let (element, key, uri) = (
        text_of(element),
        text_of(key).unwrap_or_default(),
        text_of(uri).unwrap_or_default(),
    );
    change(domain, |state, at| {
        let name = state.vms[at].name.clone();
        if key != "homenode-mark" {
            return Err(format!(
                "the agent set metadata {key} of {name}, which no case asks for"
            ));
        }
        if flags & sys::VIR_DOMAIN_AFFECT_CONFIG != 0 {
            state.violate(format!("the agent marked the definition of {name}"));
        }
        // libvirt puts the element and those in it into the namespace (`marks::*` in `kvm::host::tests`).
        let own = element.map(|element| {
            let (start, rest) = element.split_once(' ').expect("an element with attributes");
            let rest = rest.replace("</", &format!("</{key}:"));
            format!(
                "<{key}:{} xmlns:{key}='{uri}' {rest}",
                start.trim_start_matches('<')
            )
        });
        state.trace.add(format!(
            "agent {} {name}",
            if own.is_some() { "marks" } else { "unmarks" }
        ));
        state.vms[at].run.as_mut().expect("a running VM").mark = own;
        Ok(())
    })
}

macro_rules! functions {
    ($($name:ident)*) => {
        [$((stringify!($name), $name as *const () as *mut c_void)),*]
    };
}

/// Answers all calls of this process to libvirt.
pub(crate) fn load() {
    homenode_kvm::simulate_libvirt(&functions! {
        virSetErrorFunc virGetLastError virConnectOpen virConnectRef virConnectClose virConnectIsAlive
        virConnectGetLibVersion virConnectListAllDomains virDomainRef virDomainFree virDomainGetUUIDString virDomainGetID
        virDomainGetXMLDesc virDomainIsActive virDomainIsPersistent virDomainGetState virDomainGetJobStats
        virTypedParamsGetInt virTypedParamsFree virDomainPinVcpuFlags virDomainPinEmulator virDomainPinIOThread
        virDomainSetSchedulerParametersFlags virDomainSetNumaParameters virDomainSetMemoryFlags
        virDomainSetMemoryStatsPeriod virDomainMemoryStats virDomainSetMetadata
    });
}
