//! Declares the part of QEMU's plugin interface that is used here, as no Debian package contains its header.
//!
//! All of it is identical in version 1 of the interface (QEMU 4.2 to 8.2) and in versions 2 to 4 (QEMU 9.0 to 10.0), except
//! `qemu_plugin_insn_data`, which in version 1 takes one argument and returns a pointer.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// The id of a loaded plugin.
pub(crate) type Id = u64;
/// Description of an access, which only QEMU's functions can decode.
pub(crate) type MemInfo = u32;

/// A translation block.
#[repr(C)]
pub(crate) struct Tb {
    _opaque: [u8; 0],
}

/// An instruction while its block is translated.
#[repr(C)]
pub(crate) struct Insn {
    _opaque: [u8; 0],
}

/// QEMU's description of itself: `qemu_info_t`.
#[repr(C)]
pub struct Info {
    /// The emulated architecture.
    pub target_name: *const c_char,
    /// Minimum version of the interface that this QEMU supports.
    pub version_min: c_int,
    /// The version of the interface that this QEMU has.
    pub version_cur: c_int,
    /// Whether QEMU emulates a machine, rather than running a program.
    pub system_emulation: bool,
    /// Number of vCPUs at the start; only for a machine.
    pub smp_vcpus: c_int,
    /// Maximum number of vCPUs; only for a machine.
    pub max_vcpus: c_int,
}

/// `QEMU_PLUGIN_CB_NO_REGS`: a callback does not access registers.
pub(crate) const NO_REGS: c_uint = 0;
/// `QEMU_PLUGIN_MEM_RW`. QEMU 7.2 confuses reads and writes for callbacks that request only one of them, so every callback
/// requests both.
pub(crate) const MEM_RW: c_uint = 3;

/// Called on an access, with the vCPU's number, a description, the address, and the data passed at registration.
pub(crate) type MemCallback = extern "C" fn(c_uint, MemInfo, u64, *mut c_void);
/// Called when a block or an instruction begins, with the vCPU's number and the data passed at registration.
pub(crate) type ExecCallback = extern "C" fn(c_uint, *mut c_void);

#[allow(missing_docs)] // QEMU's names, documented there
unsafe extern "C" {
    pub(crate) fn qemu_plugin_register_vcpu_init_cb(id: Id, callback: extern "C" fn(Id, c_uint));
    pub(crate) fn qemu_plugin_register_vcpu_tb_trans_cb(id: Id, callback: extern "C" fn(Id, *mut Tb));
    pub(crate) fn qemu_plugin_register_vcpu_tb_exec_cb(
        tb: *mut Tb,
        callback: ExecCallback,
        flags: c_uint,
        data: *mut c_void,
    );
    pub(crate) fn qemu_plugin_register_vcpu_mem_cb(
        insn: *mut Insn,
        callback: MemCallback,
        flags: c_uint,
        read_write: c_uint,
        data: *mut c_void,
    );
    pub(crate) fn qemu_plugin_register_vcpu_syscall_cb(
        id: Id,
        callback: extern "C" fn(Id, c_uint, i64, u64, u64, u64, u64, u64, u64, u64, u64),
    );
    pub(crate) fn qemu_plugin_register_atexit_cb(
        id: Id,
        callback: extern "C" fn(Id, *mut c_void),
        data: *mut c_void,
    );
    pub(crate) fn qemu_plugin_reset(id: Id, callback: extern "C" fn(Id));
    pub(crate) fn qemu_plugin_register_vcpu_insn_exec_cb(
        insn: *mut Insn,
        callback: ExecCallback,
        flags: c_uint,
        data: *mut c_void,
    );
    pub(crate) fn qemu_plugin_register_vcpu_resume_cb(id: Id, callback: extern "C" fn(Id, c_uint));
    pub(crate) fn qemu_plugin_insn_data(insn: *const Insn, room: *mut c_void, bytes: usize) -> *const c_void;
    pub(crate) fn qemu_plugin_insn_size(insn: *const Insn) -> usize;
    pub(crate) fn qemu_plugin_insn_vaddr(insn: *const Insn) -> u64;
    pub(crate) fn qemu_plugin_insn_haddr(insn: *const Insn) -> *mut c_void;
    pub(crate) fn qemu_plugin_tb_n_insns(tb: *const Tb) -> usize;
    pub(crate) fn qemu_plugin_tb_get_insn(tb: *const Tb, at: usize) -> *mut Insn;
    pub(crate) fn qemu_plugin_mem_is_store(info: MemInfo) -> bool;
    pub(crate) fn qemu_plugin_mem_size_shift(info: MemInfo) -> c_uint;
    pub(crate) fn qemu_plugin_get_hwaddr(info: MemInfo, address: u64) -> *mut c_void;
    pub(crate) fn qemu_plugin_hwaddr_is_io(address: *const c_void) -> bool;
    pub(crate) fn qemu_plugin_hwaddr_phys_addr(address: *const c_void) -> u64;
}

/// Returns the address of an access in the machine's memory; `None` for devices.
#[inline]
pub(crate) fn machine_address(info: MemInfo, address: u64) -> Option<u64> {
    // SAFETY: called from the access's own callback, as QEMU requires.
    unsafe {
        let found = qemu_plugin_get_hwaddr(info, address);
        let memory = !found.is_null() && !qemu_plugin_hwaddr_is_io(found);
        memory.then(|| qemu_plugin_hwaddr_phys_addr(found))
    }
}
