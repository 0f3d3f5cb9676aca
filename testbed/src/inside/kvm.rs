//! Keeps KVM in use for as long as the emulated host runs.
#![allow(
    unsafe_code,
    reason = "KVM's requests have no safe wrapper in any crate that is used here"
)]

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd as _, OwnedFd};

use anyhow::{Context as _, ensure};

/// `_IO(KVMIO, 0x01)`.
const KVM_CREATE_VM: libc::c_ulong = 0xae01;
/// `_IO(KVMIO, 0x60)`.
const KVM_CREATE_IRQCHIP: libc::c_ulong = 0xae60;
/// `_IO(KVMIO, 0x41)`.
const KVM_CREATE_VCPU: libc::c_ulong = 0xae41;

/// A VM with one vCPU that never runs. KVM stays in use until this value is dropped.
#[derive(Debug)]
pub struct HeldVm {
    _vm: OwnedFd,
    _vcpu: OwnedFd,
}

/// Creates a VM with one vCPU that never runs.
///
/// The kernel rewrites its own code whenever the count behind a static branch leaves or reaches zero. While it does, a
/// breakpoint is in that place, and QEMU's emulated CPUs sometimes go on executing it afterwards, which kills the host. KVM
/// flips two such branches. One is in the scheduler, and is flipped when the first VM comes and the last one goes. One is in
/// every guest's path while any local APIC is not enabled yet, which is so during each guest's boot. A VM that stays, with a
/// vCPU whose APIC is never enabled, keeps both counts above zero.
///
/// # Errors
/// When `/dev/kvm` cannot be opened or refuses.
pub fn hold_vm() -> anyhow::Result<HeldVm> {
    let kvm = File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .context("cannot open /dev/kvm")?;
    let vm = create(&kvm, KVM_CREATE_VM, "a VM")?;
    // SAFETY: KVM_CREATE_IRQCHIP takes no argument.
    let made = unsafe { libc::ioctl(vm.as_raw_fd(), KVM_CREATE_IRQCHIP, 0) };
    ensure!(
        made >= 0,
        "cannot create interrupt controllers: {}",
        std::io::Error::last_os_error()
    );
    let vcpu = create(&vm, KVM_CREATE_VCPU, "a vCPU")?;
    Ok(HeldVm { _vm: vm, _vcpu: vcpu })
}

/// Makes one of KVM's `CREATE` requests with argument 0, which means the default machine type, or the first vCPU.
fn create(on: &impl AsRawFd, request: libc::c_ulong, what: &str) -> anyhow::Result<OwnedFd> {
    // SAFETY: both requests take a number by value and return a new descriptor or -1.
    let made = unsafe { libc::ioctl(on.as_raw_fd(), request, 0) };
    ensure!(
        made >= 0,
        "cannot create {what}: {}",
        std::io::Error::last_os_error()
    );
    // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(made) })
}
