//! Identifiers of NUMA nodes, logical CPUs, VMs and their vCPUs.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A NUMA node of the host, by the number that the kernel gives it. Numbers may have gaps (POWER hosts with GPU memory).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct NodeId(pub u16);

/// A logical CPU of the host (a hyperthread, if the host has them), by the number that the kernel gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct CpuId(pub u32);

/// A virtual machine, by its UUID, which stays the same when the VM, libvirt or the agent restarts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VmId(pub u128);

/// One vCPU of one VM; `index` counts from 0 within the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub struct VcpuId {
    /// The VM that the vCPU belongs to.
    pub vm: VmId,
    /// Position within the VM, from 0.
    pub index: u16,
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for CpuId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for VmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let v = self.0;
        let (a, b, c) = ((v >> 96) as u32, (v >> 80) as u16, (v >> 64) as u16);
        write!(
            f,
            "{a:08x}-{b:04x}-{c:04x}-{:04x}-{:012x}",
            (v >> 48) as u16,
            v & 0xffff_ffff_ffff
        )
    }
}

impl fmt::Debug for VmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl VmId {
    /// Reads a UUID, with or without hyphens. Returns `None` if the text is not 32 hexadecimal digits.
    pub fn parse(text: &str) -> Option<VmId> {
        let digits: String = text.chars().filter(|c| *c != '-').collect();
        (digits.len() == 32 && digits.bytes().all(|b| b.is_ascii_hexdigit()))
            .then(|| u128::from_str_radix(&digits, 16).ok().map(VmId))
            .flatten()
    }
}

impl Serialize for VmId {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for VmId {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        VmId::parse(&text).ok_or_else(|| serde::de::Error::custom(format!("`{text}` is not a UUID")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_reads_back_as_written() {
        let id = VmId(0x0123_4567_89ab_cdef_0011_2233_4455_6677);
        assert_eq!(id.to_string(), "01234567-89ab-cdef-0011-223344556677");
        assert_eq!(VmId::parse(&id.to_string()), Some(id));
        assert_eq!(VmId::parse("01234567-89ab"), None);
        assert_eq!(VmId::parse("+1234567-89ab-cdef-0011-223344556677"), None);
    }
}
