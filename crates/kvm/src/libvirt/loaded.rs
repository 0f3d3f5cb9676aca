//! libvirt's library, loaded on first use: a simulation, `--version` and a host without libvirt need neither this library nor the
//! libraries that it needs.
//!
//! `virt` calls functions of libvirt by name. For each of these names, this module has a function that jumps to the library's
//! function through a table, which [`load`] fills. Since all names are found here, the linker leaves the library out. The
//! functions are hidden, so that libvirt's own libraries do not find them instead of the real ones.
//!
//! This works on x86-64 only; on other architectures the program is linked to libvirt.

#![allow(unsafe_code)] // a library is trusted to be what its name says, as the loader does at a program's start

use std::error::Error as _;
use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::Library;

use super::LibraryError;

/// File name by which the loader finds the library.
const LIBRARY: &str = "libvirt.so.0";

static IS_LOADED: Mutex<bool> = Mutex::new(false);

/// Fills the table with other functions, unless a library is loaded.
#[cfg(any(test, feature = "testing"))]
pub(super) fn simulate(functions: &[(&str, *mut c_void)]) {
    let mut is_loaded = IS_LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if !std::mem::replace(&mut *is_loaded, true) {
        for (name, function) in functions {
            let at = NAMES.iter().position(|known| known == name);
            slots()[at.expect("a function that the table has")].store(*function, Ordering::Release);
        }
    }
}

/// Loads the library, unless it is loaded.
///
/// # Errors
/// Why it cannot be loaded; the next call tries again.
pub(super) fn load() -> Result<(), LibraryError> {
    let mut is_loaded = IS_LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if !*is_loaded {
        find(LIBRARY)?;
        *is_loaded = true;
    }
    Ok(())
}

fn find(library: &str) -> Result<(), LibraryError> {
    // The loader's message is the error's source; the error itself only names the call.
    let missing = |error: libloading::Error| match error.source() {
        Some(cause) => LibraryError(cause.to_string()),
        None => LibraryError(error.to_string()),
    };
    // SAFETY: when libvirt's library is loaded, the only code of its own that runs is its constructors, which are made for that.
    let library = unsafe { Library::new(library) }.map_err(missing)?;
    // SAFETY: only the address is taken here; the functions that jump to it have the types in libvirt's headers.
    let find = |name: &&str| unsafe { library.get::<*mut c_void>(*name) }.map(|found| *found);
    let found: Result<Vec<*mut c_void>, _> = NAMES.iter().map(find).collect();
    for (slot, function) in slots().iter().zip(found.map_err(missing)?) {
        slot.store(function, Ordering::Release);
    }
    // The library stays loaded, since its functions are called from now on.
    let _ = library.into_raw();
    Ok(())
}

/// The table, which is next to the functions that jump through it.
fn slots() -> &'static [AtomicPtr<c_void>; NAMES.len()] {
    unsafe extern "C" {
        static homenode_libvirt_table: [AtomicPtr<c_void>; NAMES.len()];
    }
    // SAFETY: the assembly below defines the table, with a slot for each name, for as long as the program runs.
    unsafe { &homenode_libvirt_table }
}

/// Target of functions that were not looked up yet, which is a bug of ours.
extern "C" fn not_loaded() -> ! {
    unreachable!("libvirt is called before its library is loaded: call `load_libvirt` first")
}

macro_rules! functions {
    ($($name:ident)*) => {
        const NAMES: &[&str] = &[$(stringify!($name)),*];

        std::arch::global_asm!(
            ".pushsection .text.homenode_libvirt,\"ax\",@progbits",
            $(concat!(
                ".globl ", stringify!($name), "\n.hidden ", stringify!($name),
                "\n.type ", stringify!($name), ",@function\n", stringify!($name),
                ":\nendbr64\njmp qword ptr [rip + .Lhomenode_", stringify!($name), "]\n",
            ),)*
            ".popsection",
            ".pushsection .data.homenode_libvirt,\"aw\",@progbits",
            ".balign 8",
            ".globl homenode_libvirt_table",
            ".hidden homenode_libvirt_table",
            "homenode_libvirt_table:",
            $(concat!(".Lhomenode_", stringify!($name), ": .quad {not_loaded}"),)*
            ".popsection",
            not_loaded = sym not_loaded,
        );
    };
}

// What `virt` 0.5 and this crate use of libvirt 6.0 and later. If a name is missing here, the program is linked to libvirt, and
// `the_program_starts_without_libvirts_library` fails.
functions! {
    virConnectBaselineCPU virConnectClose virConnectCompareCPU virConnectDomainXMLFromNative virConnectDomainXMLToNative
    virConnectFindStoragePoolSources virConnectGetAllDomainStats virConnectGetCPUModelNames virConnectGetCapabilities
    virConnectGetDomainCapabilities virConnectGetHostname virConnectGetLibVersion virConnectGetMaxVcpus
    virConnectGetSysinfo virConnectGetType virConnectGetURI virConnectGetVersion virConnectIsAlive virConnectIsEncrypted
    virConnectIsSecure virConnectListAllDomains virConnectListAllInterfaces virConnectListAllNWFilters
    virConnectListAllNetworks virConnectListAllNodeDevices virConnectListAllSecrets virConnectListAllStoragePools
    virConnectListDefinedDomains virConnectListDefinedInterfaces virConnectListDefinedNetworks
    virConnectListDefinedStoragePools virConnectListDomains virConnectListInterfaces virConnectListNWFilters
    virConnectListNetworks virConnectListSecrets virConnectListStoragePools virConnectNumOfDefinedDomains
    virConnectNumOfDefinedInterfaces virConnectNumOfDefinedNetworks virConnectNumOfDefinedStoragePools
    virConnectNumOfDomains virConnectNumOfInterfaces virConnectNumOfNWFilters virConnectNumOfNetworks
    virConnectNumOfSecrets virConnectNumOfStoragePools virConnectOpen virConnectOpenAuth virConnectOpenReadOnly
    virConnectRef virConnectSetKeepAlive virDomainAttachDevice virDomainAttachDeviceFlags virDomainBlockResize
    virDomainBlockStats virDomainCoreDump virDomainCoreDumpWithFormat virDomainCreate virDomainCreateWithFlags
    virDomainCreateXML virDomainDefineXML virDomainDefineXMLFlags virDomainDestroy virDomainDestroyFlags
    virDomainDetachDevice virDomainDetachDeviceFlags virDomainFree virDomainGetAutostart virDomainGetBlockInfo
    virDomainGetCPUStats virDomainGetConnect virDomainGetHostname virDomainGetID virDomainGetInfo virDomainGetJobInfo
    virDomainGetJobStats virDomainGetMaxMemory virDomainGetMaxVcpus virDomainGetMemoryParameters virDomainGetMetadata
    virDomainGetName virDomainGetNumaParameters virDomainGetOSType virDomainGetSchedulerParameters
    virDomainGetSchedulerParametersFlags virDomainGetSchedulerType virDomainGetState virDomainGetTime virDomainGetUUID
    virDomainGetUUIDString virDomainGetVcpusFlags virDomainGetXMLDesc virDomainHasManagedSaveImage
    virDomainInterfaceAddresses virDomainInterfaceStats virDomainIsActive virDomainIsPersistent virDomainIsUpdated
    virDomainListAllSnapshots virDomainLookupByID virDomainLookupByName virDomainLookupByUUID virDomainLookupByUUIDString
    virDomainManagedSave virDomainManagedSaveRemove virDomainMemoryStats virDomainMigrate virDomainMigrate2
    virDomainMigrate3 virDomainMigrateGetCompressionCache virDomainMigrateGetMaxSpeed virDomainMigrateSetCompressionCache
    virDomainMigrateSetMaxDowntime virDomainMigrateSetMaxSpeed virDomainMigrateToURI virDomainMigrateToURI2
    virDomainMigrateToURI3 virDomainOpenChannel virDomainOpenConsole virDomainOpenGraphics virDomainOpenGraphicsFD
    virDomainPMWakeup virDomainPinEmulator virDomainPinIOThread virDomainPinVcpu virDomainPinVcpuFlags virDomainReboot
    virDomainRef virDomainRename virDomainReset virDomainRestore virDomainRestoreFlags virDomainResume
    virDomainRevertToSnapshot virDomainSaveImageDefineXML virDomainSaveImageGetXMLDesc virDomainScreenshot
    virDomainSendKey virDomainSetAutostart virDomainSetBlockThreshold virDomainSetLifecycleAction virDomainSetMaxMemory
    virDomainSetMemory virDomainSetMemoryFlags virDomainSetMemoryParameters virDomainSetMemoryStatsPeriod
    virDomainSetMetadata virDomainSetNumaParameters virDomainSetSchedulerParameters virDomainSetSchedulerParametersFlags
    virDomainSetTime virDomainSetUserPassword virDomainSetVcpus virDomainSetVcpusFlags virDomainShutdown
    virDomainShutdownFlags virDomainSnapshotCreateXML virDomainSnapshotCurrent virDomainSnapshotDelete
    virDomainSnapshotFree virDomainSnapshotGetConnect virDomainSnapshotGetDomain virDomainSnapshotGetName
    virDomainSnapshotGetParent virDomainSnapshotGetXMLDesc virDomainSnapshotHasMetadata virDomainSnapshotIsCurrent
    virDomainSnapshotListAllChildren virDomainSnapshotLookupByName virDomainSnapshotNum virDomainSnapshotNumChildren
    virDomainSnapshotRef virDomainSuspend virDomainUndefine virDomainUndefineFlags virDomainUpdateDeviceFlags
    virEventRegisterDefaultImpl virEventRemoveHandle virEventRemoveTimeout virEventRunDefaultImpl virEventUpdateHandle
    virEventUpdateTimeout virGetLastError virGetVersion virInterfaceCreate virInterfaceDefineXML virInterfaceDestroy
    virInterfaceFree virInterfaceGetConnect virInterfaceGetMACString virInterfaceGetName virInterfaceGetXMLDesc
    virInterfaceIsActive virInterfaceLookupByMACString virInterfaceLookupByName virInterfaceRef virInterfaceUndefine
    virNWFilterDefineXML virNWFilterFree virNWFilterGetName virNWFilterGetUUID virNWFilterGetUUIDString
    virNWFilterGetXMLDesc virNWFilterLookupByName virNWFilterLookupByUUID virNWFilterLookupByUUIDString virNWFilterRef
    virNWFilterUndefine virNetworkCreate virNetworkCreateXML virNetworkDefineXML virNetworkDestroy virNetworkFree
    virNetworkGetAutostart virNetworkGetBridgeName virNetworkGetConnect virNetworkGetName virNetworkGetUUID
    virNetworkGetUUIDString virNetworkGetXMLDesc virNetworkIsActive virNetworkIsPersistent virNetworkLookupByName
    virNetworkLookupByUUID virNetworkLookupByUUIDString virNetworkRef virNetworkSetAutostart virNetworkUndefine
    virNetworkUpdate virNodeDeviceCreateXML virNodeDeviceDestroy virNodeDeviceDetachFlags virNodeDeviceDettach
    virNodeDeviceFree virNodeDeviceGetName virNodeDeviceGetParent virNodeDeviceGetXMLDesc virNodeDeviceListCaps
    virNodeDeviceLookupByName virNodeDeviceLookupSCSIHostByWWN virNodeDeviceNumOfCaps virNodeDeviceReAttach
    virNodeDeviceRef virNodeDeviceReset virNodeGetCellsFreeMemory virNodeGetFreeMemory virNodeGetFreePages virNodeGetInfo
    virNodeNumOfDevices virSecretDefineXML virSecretFree virSecretGetConnect virSecretGetUUID virSecretGetUUIDString
    virSecretGetUsageID virSecretGetUsageType virSecretGetValue virSecretGetXMLDesc virSecretLookupByUUID
    virSecretLookupByUUIDString virSecretLookupByUsage virSecretRef virSecretSetValue virSecretUndefine virSetErrorFunc
    virStoragePoolBuild virStoragePoolCreate virStoragePoolCreateXML virStoragePoolDefineXML virStoragePoolDelete
    virStoragePoolDestroy virStoragePoolFree virStoragePoolGetAutostart virStoragePoolGetConnect virStoragePoolGetInfo
    virStoragePoolGetName virStoragePoolGetUUID virStoragePoolGetUUIDString virStoragePoolGetXMLDesc
    virStoragePoolIsActive virStoragePoolIsPersistent virStoragePoolListAllVolumes virStoragePoolListVolumes
    virStoragePoolLookupByName virStoragePoolLookupByTargetPath virStoragePoolLookupByUUID
    virStoragePoolLookupByUUIDString virStoragePoolLookupByVolume virStoragePoolNumOfVolumes virStoragePoolRef
    virStoragePoolRefresh virStoragePoolSetAutostart virStoragePoolUndefine virStorageVolCreateXML
    virStorageVolCreateXMLFrom virStorageVolDelete virStorageVolDownload virStorageVolFree virStorageVolGetConnect
    virStorageVolGetInfo virStorageVolGetInfoFlags virStorageVolGetKey virStorageVolGetName virStorageVolGetPath
    virStorageVolGetXMLDesc virStorageVolLookupByKey virStorageVolLookupByName virStorageVolLookupByPath virStorageVolRef
    virStorageVolResize virStorageVolUpload virStorageVolWipe virStorageVolWipePattern virStreamAbort
    virStreamEventRemoveCallback virStreamEventUpdateCallback virStreamFinish virStreamFree virStreamNew virStreamRecv
    virStreamRef virStreamSend virTypedParamsFree virTypedParamsGetInt
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_or_is_another_is_said_to_be() {
        let error = find("libdoes-not-exist.so.0").unwrap_err().to_string();
        assert!(error.contains("libdoes-not-exist.so.0"), "{error}");
        let error = find("libc.so.6").unwrap_err().to_string();
        assert!(error.contains(NAMES[0]), "{error}");
    }

    #[test]
    fn all_functions_are_found_and_each_goes_to_its_own() {
        load().unwrap();
        load().unwrap();
        let all: std::collections::BTreeSet<*mut c_void> =
            slots().iter().map(|slot| slot.load(Ordering::Acquire)).collect();
        assert_eq!(all.len(), NAMES.len());
        let mut version = 0;
        // SAFETY: the version lives during the call, and the function accepts null for the other arguments.
        let status =
            unsafe { virt::sys::virGetVersion(&mut version, std::ptr::null(), std::ptr::null_mut()) };
        assert!(status == 0 && version >= 6_000_000, "{version}");
    }
}
