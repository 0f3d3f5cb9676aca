//! Makes one hypercall that libxenctrl does not make. It lets a domain's node affinity follow its CPUs again, like that of a new
//! domain. Xen 4.17 does this if it is given an affinity to every node number that it supports; libxenctrl's sets end with the
//! host's last node.

#![allow(unsafe_code)] // a call of the hypervisor, with memory that it reads and writes

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::path::Path;

/// Linux's device for hypercalls.
const DEVICE: &str = "dev/xen/privcmd";
/// `IOCTL_PRIVCMD_HYPERCALL`: no direction, type `P`, number 0, of a [`Call`].
const HYPERCALL: libc::c_ulong = (size_of::<Call>() as libc::c_ulong) << 16 | (b'P' as libc::c_ulong) << 8;
/// `__HYPERVISOR_domctl`, `XEN_DOMCTL_INTERFACE_VERSION` of 4.17, `XEN_DOMCTL_{set,get}nodeaffinity`.
const DOMCTL: u64 = 36;
const VERSION: u32 = 0x15;
const SET: u32 = 68;
const GET: u32 = 69;
/// `MAX_NUMNODES` on x86.
const NODES: u32 = 64;
const PAGE: usize = 4096;
/// How many times to try. The kernel may be moving a page at that moment, and the hypervisor does not wait for it.
const TRIES: u32 = 5;

/// `privcmd_hypercall`.
#[repr(C)]
struct Call {
    op: u64,
    arguments: [u64; 5],
}

/// `xen_domctl` with an `xenctl_bitmap`, followed by the set that the bitmap points to.
#[repr(C)]
struct Order {
    command: u32,
    version: u32,
    domain: u16,
    pad: [u16; 3],
    set: u64,
    bits: u32,
    rest: [u32; 29],
    nodes: u64,
}

/// Returns a domain's nodes according to the hypervisor, one bit each. The result shows whether Xen's hypercalls are the ones
/// known here.
pub(crate) fn nodes(root: &Path, domid: u32) -> std::io::Result<u64> {
    call(root, domid, GET, 0)
}

/// Makes a domain's node affinity follow its CPUs.
pub(crate) fn follow(root: &Path, domid: u32) -> std::io::Result<()> {
    call(root, domid, SET, u64::MAX).map(drop)
}

fn call(root: &Path, domid: u32, command: u32, nodes: u64) -> std::io::Result<u64> {
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .open(root.join(DEVICE))?;
    let domain = u16::try_from(domid).map_err(std::io::Error::other)?;
    // SAFETY: our own page, locked, as the hypervisor does not wait for a page that is not there.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_LOCKED | libc::MAP_POPULATE;
        let page = libc::mmap(
            std::ptr::null_mut(),
            PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            -1,
            0,
        );
        if page == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        let order = page.cast::<Order>();
        order.write(Order {
            command,
            version: VERSION,
            domain,
            pad: [0; 3],
            set: (&raw mut (*order).nodes) as u64,
            bits: NODES,
            rest: [0; 29],
            nodes,
        });
        let mut done = ask(&device, order);
        for _ in 1..TRIES {
            match &done {
                Err(error) if error.raw_os_error() == Some(libc::EFAULT) => done = ask(&device, order),
                _ => break,
            }
        }
        let nodes = (&raw const (*order).nodes).read_volatile();
        libc::munmap(page, PAGE);
        done.map(|()| nodes)
    }
}

/// # Safety
/// The order must be in memory that stays while this runs.
unsafe fn ask(device: &File, order: *mut Order) -> std::io::Result<()> {
    let call = Call {
        op: DOMCTL,
        arguments: [order as u64, 0, 0, 0, 0],
    };
    // SAFETY: the kernel reads a `Call` there.
    match unsafe { libc::ioctl(device.as_raw_fd(), HYPERCALL, &raw const call) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_lie_as_c_has_them() {
        use std::mem::offset_of;
        // `xen_domctl` has 16 bytes and then a union of 128 bytes, which begins with the set's address.
        assert_eq!(
            (
                offset_of!(Order, set),
                offset_of!(Order, bits),
                offset_of!(Order, nodes)
            ),
            (16, 24, 144)
        );
        assert_eq!(HYPERCALL, 0x0030_5000);
    }
}
