//! Functions of libxenctrl and libxenstore, as declared in C, looked up when a host is connected.
//!
//! Both libraries are LGPL-2.1, and are loaded, not linked. The structures and the file name of libxenctrl belong to one version
//! of Xen, so a version that was never tried is not loaded.

#![allow(unsafe_code)] // a library is trusted to be what its name says, as the loader does at a program's start
#![allow(missing_docs)] // these are C's names, and C's documentation says what they do

use std::error::Error as _;
use std::ffi::{c_char, c_int, c_longlong, c_uint, c_ulong, c_void};

use libloading::os::unix::Library;

/// Versions, each with the file name of its libxenctrl.
const VERSIONS: [(&str, &str); 1] = [("4.17", "libxenctrl.so.4.17")];
/// libxenguest, which is used only with a libxenctrl of the same version.
const GUEST: [(&str, &str); 1] = [("4.17", "libxenguest.so.4.17")];
const STORE: [(&str, &str); 1] = [("4", "libxenstore.so.4")];

macro_rules! functions {
    ($library:ident from $files:ident { $( fn $name:ident($($argument:ty),*) $(-> $result:ty)?; )* }) => {
        /// The library's functions. The library stays loaded as long as the program runs.
        #[derive(Clone, Debug)]
        pub(crate) struct $library {
            $( pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?, )*
        }

        impl $library {
            /// Loads the first of the library's versions that exists.
            ///
            /// # Errors
            /// Returns the loader's message about the last version.
            pub(crate) fn load() -> Result<$library, LoadError> {
                let library = first_of(&$files)?;
                let found = $library {
                    $( $name: {
                        // SAFETY: the type is that of the header of this version, and the library is never unloaded.
                        let found = unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) };
                        *found.map_err(|error| reason(&error))?
                    }, )*
                };
                // Leave it loaded, because its functions are called from now on.
                let _ = library.into_raw();
                Ok(found)
            }

            /// Has no functions. A fake fills in the ones that a test calls.
            #[cfg(test)]
            #[allow(dead_code)]
            pub(crate) fn absent() -> $library {
                $library {
                    $( $name: {
                        unsafe extern "C" fn none($(_: $argument),*) $(-> $result)? {
                            unimplemented!(stringify!($name))
                        }
                        none
                    }, )*
                }
            }
        }
    };
}

/// A library that cannot be loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{cause}")]
pub struct LoadError {
    /// The loader's message.
    pub cause: String,
}

fn reason(error: &libloading::Error) -> LoadError {
    let cause = error.source();
    LoadError {
        cause: cause.map_or_else(|| error.to_string(), ToString::to_string),
    }
}

fn first_of(files: &[(&str, &str)]) -> Result<Library, LoadError> {
    let mut why = LoadError { cause: String::new() };
    for (_, file) in files {
        // SAFETY: Xen's libraries run no code when they are loaded but their constructors, which are made for that.
        match unsafe { Library::new(*file) } {
            Ok(library) => return Ok(library),
            Err(error) => why = reason(&error),
        }
    }
    Err(why)
}

functions! { Control from VERSIONS {
    fn xc_interface_open(*mut c_void, *mut c_void, c_uint) -> *mut c_void;
    fn xc_interface_close(*mut c_void) -> c_int;
    fn xc_get_max_cpus(*mut c_void) -> c_int;
    fn xc_get_max_nodes(*mut c_void) -> c_int;
    fn xc_get_cpumap_size(*mut c_void) -> c_int;
    fn xc_get_nodemap_size(*mut c_void) -> c_int;
    fn xc_cputopoinfo(*mut c_void, *mut c_uint, *mut CpuPlace) -> c_int;
    fn xc_numainfo(*mut c_void, *mut c_uint, *mut NodeMemory, *mut u32) -> c_int;
    fn xc_physinfo(*mut c_void, *mut HostInfo) -> c_int;
    fn xc_getcpuinfo(*mut c_void, c_int, *mut u64, *mut c_int) -> c_int;
    fn xc_domain_getinfolist(*mut c_void, u32, c_uint, *mut DomainInfo) -> c_int;
    fn xc_vcpu_getinfo(*mut c_void, u32, u32, *mut VcpuInfo) -> c_int;
    fn xc_vcpu_getaffinity(*mut c_void, u32, c_int, *mut u8, *mut u8, u32) -> c_int;
    fn xc_vcpu_setaffinity(*mut c_void, u32, c_int, *mut u8, *mut u8, u32) -> c_int;
    fn xc_domain_node_getaffinity(*mut c_void, u32, *mut u8) -> c_int;
    fn xc_domain_node_setaffinity(*mut c_void, u32, *mut u8) -> c_int;
    fn xc_cpupool_getinfo(*mut c_void, u32) -> *mut PoolInfo;
    fn xc_cpupool_infofree(*mut c_void, *mut PoolInfo);
    fn xc_sched_credit_domain_get(*mut c_void, u32, *mut Share) -> c_int;
    fn xc_sched_credit_domain_set(*mut c_void, u32, *mut Share) -> c_int;
    fn xc_sched_credit2_domain_get(*mut c_void, u32, *mut Share) -> c_int;
    fn xc_sched_credit2_domain_set(*mut c_void, u32, *mut Share) -> c_int;
    fn xc_tbuf_get_size(*mut c_void, *mut c_ulong) -> c_int;
    fn xc_tbuf_disable(*mut c_void) -> c_int;
    fn xc_maximum_ram_page(*mut c_void, *mut c_ulong) -> c_int;
    fn xc_get_pfn_type_batch(*mut c_void, u32, c_uint, *mut u64) -> c_int;
    fn xc_send_debug_keys(*mut c_void, *const c_char) -> c_int;
    fn xc_readconsolering(*mut c_void, *mut c_char, *mut c_uint, c_int, c_int, *mut u32) -> c_int;
}}

functions! { Guest from GUEST {
    fn xc_domain_resume(*mut c_void, u32, c_int) -> c_int;
}}

functions! { Store from STORE {
    fn xs_open(c_ulong) -> *mut c_void;
    fn xs_close(*mut c_void);
    fn xs_read(*mut c_void, u32, *const c_char, *mut c_uint) -> *mut c_char;
    fn xs_resume_domain(*mut c_void, c_uint) -> bool;
    fn xs_directory(*mut c_void, u32, *const c_char, *mut c_uint) -> *mut *mut c_char;
}}

/// `xen_sysctl_cputopo`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CpuPlace {
    pub core: u32,
    pub socket: u32,
    pub node: u32,
}

/// `xen_sysctl_meminfo`, bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NodeMemory {
    pub size: u64,
    pub free: u64,
}

/// `xen_sysctl_physinfo`, with room at its end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HostInfo {
    before: [u32; 6],
    pub cpu_khz: u32,
    pub capabilities: u32,
    room: [u64; 24],
}

/// `xen_domctl_getdomaininfo`, with room at its end for what other versions of the same library add.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DomainInfo {
    pub domain: u16,
    pad: u16,
    pub flags: u32,
    pub tot_pages: u64,
    pub max_pages: u64,
    pub outstanding_pages: u64,
    pub shr_pages: u64,
    pub paged_pages: u64,
    pub shared_info_frame: u64,
    pub cpu_time: u64,
    pub nr_online_vcpus: u32,
    pub max_vcpu_id: u32,
    pub ssidref: u32,
    pub handle: [u8; 16],
    pub cpupool: u32,
    room: [u64; 16],
}

/// `xen_domctl_getvcpuinfo`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct VcpuInfo {
    pub vcpu: u32,
    pub online: u8,
    pub blocked: u8,
    pub running: u8,
    pub cpu_time: c_longlong,
    pub cpu: u32,
}

/// `xen_domctl_sched_credit`, and `…_credit2`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Share {
    pub weight: u16,
    pub cap: u16,
}

/// `xc_cpupoolinfo_t`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct PoolInfo {
    pub cpupool_id: u32,
    pub sched_id: u32,
    pub n_dom: u32,
    pub cpumap: *mut u8,
}

/// `XEN_VCPUAFFINITY_HARD`.
pub(crate) const HARD: u32 = 1;
/// `XEN_VCPUAFFINITY_SOFT`.
pub(crate) const SOFT: u32 = 2;
/// `XEN_SYSCTL_PHYSCAP_shadow`.
pub(crate) const CAN_SHADOW: u32 = 1 << 4;
/// `XEN_SCHEDULER_CREDIT`.
pub(crate) const CREDIT: u32 = 5;
/// `XEN_SCHEDULER_CREDIT2`.
pub(crate) const CREDIT2: u32 = 6;
/// `XEN_DOMINF_dying`.
pub(crate) const DYING: u32 = 1 << 0;
/// `XEN_DOMINF_hvm_guest`: PVH, or HVM.
pub(crate) const HVM: u32 = 1 << 1;
/// `XEN_DOMINF_shutdown`.
pub(crate) const SHUTDOWN: u32 = 1 << 2;
/// `XEN_DOMINF_shutdownshift`, `XEN_DOMINF_shutdownmask`: why the domain was shut down.
pub(crate) const REASON_SHIFT: u32 = 16;
pub(crate) const REASON: u32 = 0xff;
/// `SHUTDOWN_suspend`.
pub(crate) const SUSPENDED: u32 = 2;
/// `XEN_DOMINF_xs_domain`.
pub(crate) const XENSTORE: u32 = 1 << 7;
/// `XEN_DOMINF_paused`.
pub(crate) const PAUSED: u32 = 1 << 3;

/// Returns the versions of Xen whose libxenctrl is loaded.
pub(crate) fn versions() -> String {
    VERSIONS.map(|(version, _)| version).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_lie_as_c_has_them() {
        use std::mem::{offset_of, size_of};
        // Offsets as gcc 12 lays out the declarations in Xen 4.17's headers on x86-64.
        assert_eq!(offset_of!(HostInfo, capabilities), 28);
        assert_eq!(offset_of!(DomainInfo, flags), 4);
        assert_eq!(offset_of!(DomainInfo, cpu_time), 56);
        assert_eq!(offset_of!(DomainInfo, max_vcpu_id), 68);
        assert_eq!(offset_of!(DomainInfo, handle), 76);
        assert_eq!(offset_of!(DomainInfo, cpupool), 92);
        assert_eq!(
            (
                offset_of!(VcpuInfo, cpu_time),
                offset_of!(VcpuInfo, cpu),
                size_of::<VcpuInfo>()
            ),
            (8, 16, 24)
        );
        assert_eq!((offset_of!(PoolInfo, cpumap), size_of::<Share>()), (16, 4));
        assert_eq!(offset_of!(HostInfo, cpu_khz), 24);
    }

    #[test]
    fn a_library_that_is_not_there_or_is_another_is_said_to_be() {
        let error = first_of(&[("1", "libdoes-not-exist.so.1")]).unwrap_err();
        assert!(error.to_string().contains("libdoes-not-exist.so.1"), "{error}");
    }
}
