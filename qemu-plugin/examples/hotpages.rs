//! Baseline for the plugin's page observer: a plugin designed like QEMU's `contrib/plugins/hotpages.c`.
//!
//! On each access a callback looks up the access's address in the machine, and counts it in a hash map of pages, under a lock.
//! Built only for the testbed's case `page-log-speed`: `cargo build -p homenode-qemu-plugin --example hotpages`.

#![allow(unsafe_code)] // a C interface; each use says why it is sound
#![allow(missing_docs)]
#![allow(dead_code)] // of the declarations, which are the product's

#[path = "../src/qemu.rs"]
mod qemu;

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Mutex;

use qemu::{Id, Info, MemInfo, Tb};

#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static qemu_plugin_version: c_int = 1;

/// GLib's direct hash, but multiplied: Rust's hash map needs a hash whose upper bits differ.
#[derive(Default)]
struct Direct(u64);

impl Hasher for Direct {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {}

    fn write_u64(&mut self, page: u64) {
        self.0 = page.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

#[derive(Default)]
struct Page {
    reads: u64,
    writes: u64,
    read_by: u64,
    written_by: u64,
}

type Pages = HashMap<u64, Box<Page>, BuildHasherDefault<Direct>>;
static PAGES: Mutex<Option<Pages>> = Mutex::new(None);

/// # Safety
///
/// QEMU calls this function once, when it loads the plugin.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qemu_plugin_install(
    id: Id,
    _: *const Info,
    _: c_int,
    _: *const *const c_char,
) -> c_int {
    // SAFETY: the function has the type that the interface declares and lives as long as the process.
    unsafe { qemu::qemu_plugin_register_vcpu_tb_trans_cb(id, translated) };
    0
}

extern "C" fn translated(_: Id, tb: *mut Tb) {
    // SAFETY: the block and its instructions are alive during the call; the function as long as the process.
    unsafe {
        for at in 0..qemu::qemu_plugin_tb_n_insns(tb) {
            let insn = qemu::qemu_plugin_tb_get_insn(tb, at);
            qemu::qemu_plugin_register_vcpu_mem_cb(
                insn,
                access,
                qemu::NO_REGS,
                qemu::MEM_RW,
                std::ptr::null_mut(),
            );
        }
    }
}

extern "C" fn access(cpu: c_uint, info: MemInfo, address: u64, _: *mut c_void) {
    // SAFETY: called from the access's own callback, as QEMU requires.
    let (address, is_store) = unsafe {
        let found = qemu::qemu_plugin_get_hwaddr(info, address);
        if found.is_null() || qemu::qemu_plugin_hwaddr_is_io(found) {
            return;
        }
        (
            qemu::qemu_plugin_hwaddr_phys_addr(found),
            qemu::qemu_plugin_mem_is_store(info),
        )
    };
    let Ok(mut pages) = PAGES.lock() else {
        return;
    };
    let page = pages.get_or_insert_default().entry(address >> 12).or_default();
    if is_store {
        page.writes += 1;
        page.written_by |= 1 << (cpu % 64);
    } else {
        page.reads += 1;
        page.read_by |= 1 << (cpu % 64);
    }
}
