//! What kind of machine this is, which decides what its figures can say.

use std::fs::File;
use std::io::Read as _;

use homenode_evidence::report::Hardware;

/// Most bytes of `/proc/cpuinfo` that are read: its first CPU's block has 2 KiB.
const CPUINFO_BYTES: u64 = 64 << 10;
/// What QEMU's emulation answers to CPUID's leaf of hypervisors.
const EMULATION: [u8; 12] = *b"TCGTCGTCGTCG";

/// Returns what this machine is, and its CPU's model if the kernel names one.
pub(super) fn hardware() -> (Hardware, Option<String>) {
    let mut bytes = Vec::new();
    // What cannot be read is unknown, and the report says so.
    let read = File::open("/proc/cpuinfo").and_then(|file| file.take(CPUINFO_BYTES).read_to_end(&mut bytes));
    match read {
        Ok(_) => hardware_of(&String::from_utf8_lossy(&bytes), hypervisor()),
        Err(_) => (Hardware::Unknown, None),
    }
}

/// Returns what a machine is by its first CPU in `/proc/cpuinfo` and its hypervisor's signature.
fn hardware_of(cpuinfo: &str, hypervisor: Option<[u8; 12]>) -> (Hardware, Option<String>) {
    let value = |key: &str| {
        let mut fields = cpuinfo.lines().take(64).filter_map(|line| line.split_once(':'));
        fields
            .find(|(name, _)| name.trim() == key)
            .map(|(_, value)| value.trim())
    };
    let is_guest = value("flags").map(|flags| flags.split(' ').any(|flag| flag == "hypervisor"));
    let hardware = match (is_guest, hypervisor) {
        (Some(true), Some(EMULATION)) => Hardware::Emulated,
        (Some(true), _) => Hardware::Guest,
        (Some(false), _) => Hardware::Silicon,
        (None, _) => Hardware::Unknown,
    };
    let model = value("model name").filter(|model| !model.is_empty());
    (hardware, model.map(str::to_owned))
}

/// Returns the signature of the hypervisor under which this program runs. It means nothing on a machine of its own.
#[cfg(target_arch = "x86_64")]
fn hypervisor() -> Option<[u8; 12]> {
    // SAFETY: all processors of x86-64 have the instruction, and it changes registers only.
    #[allow(unsafe_code, unused_unsafe, reason = "safe in newer compilers")]
    let leaf = unsafe { std::arch::x86_64::__cpuid(0x4000_0000) };
    let mut signature = [0; 12];
    for (part, word) in signature.chunks_exact_mut(4).zip([leaf.ebx, leaf.ecx, leaf.edx]) {
        part.copy_from_slice(&word.to_le_bytes());
    }
    Some(signature)
}

#[cfg(not(target_arch = "x86_64"))]
fn hypervisor() -> Option<[u8; 12]> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_and_an_emulated_machine_are_never_taken_for_silicon() {
        let cpuinfo =
            |flags: &str| format!("processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu {flags} lm\n");
        let kvm = Some(*b"KVMKVMKVM\0\0\0");
        for (flags, signature, hardware) in [
            ("hypervisor", kvm, Hardware::Guest),
            ("hypervisor", None, Hardware::Guest),
            ("hypervisor", Some(EMULATION), Hardware::Emulated),
            // Without a hypervisor the leaf holds whatever the highest leaf does.
            ("svm", Some([7; 12]), Hardware::Silicon),
        ] {
            let model = Some("AMD EPYC".to_owned());
            assert_eq!(hardware_of(&cpuinfo(flags), signature), (hardware, model));
        }
        let arm = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd\n";
        assert_eq!(hardware_of(arm, None), (Hardware::Unknown, None));
    }
}
