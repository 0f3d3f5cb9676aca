//! What libvirt's hook says just before a domain starts: `/etc/libvirt/hooks/qemu <guest> prepare begin -` with the
//! domain's XML on standard input. `numad -w` is called soon after with counts only; the hook is how those counts are
//! known to belong to this domain. A hook must not call libvirt (it would wait for itself) and must not fail (the
//! domain would not start).

use std::path::Path;

use homenode_host::Management;
use homenode_units::{Bytes, BytesPerSec, NodeSet, VmId};

use crate::domain::{Domain, DomainError};

/// A domain that is about to start, counted as libvirt counts it for `numad -w VCPUS:MIB`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Starting {
    /// UUID.
    pub id: VmId,
    /// Name.
    pub name: String,
    /// vCPUs online at start (`virDomainDefGetVcpus`).
    pub vcpus: u16,
    /// All its memory in MiB, rounded up (`virDomainDefGetMemoryTotal`).
    pub memory_mib: u64,
    /// Memory bandwidth that its metadata declares.
    pub bandwidth: Option<BytesPerSec>,
    /// Home that its metadata asks for.
    pub home: Option<NodeSet>,
    /// Whether the agent may act on it.
    pub management: Management,
    /// Nodes of the devices that it is given.
    pub device_nodes: NodeSet,
}

impl Starting {
    /// Reads the XML that a hook gets, and below `root` where its devices are. Broken metadata is as in [`crate::domain`]: the VM
    /// will only be watched.
    ///
    /// # Errors
    /// When it is not a domain.
    pub fn parse(xml: &str, root: &Path) -> Result<Starting, DomainError> {
        let domain = Domain::parse(xml)?;
        let settings = domain.settings(None, Vec::new());
        Ok(Starting {
            id: domain.id,
            device_nodes: domain.device_nodes(root),
            name: domain.name,
            vcpus: domain.vcpus_current,
            memory_mib: domain.memory_kib.div_ceil(1024),
            bandwidth: settings.bandwidth,
            home: settings.home,
            management: settings.management,
        })
    }

    /// Its memory.
    pub fn memory_bytes(&self) -> Bytes {
        Bytes::from_mib(self.memory_mib)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::tests::LIVE;
    use crate::fake::Tree;

    #[test]
    fn counts_are_those_that_libvirt_gives_numad() {
        let starting = Starting::parse(LIVE, Path::new("/")).unwrap();
        assert_eq!(
            (starting.vcpus, starting.memory_mib),
            (2, 3073),
            "current vCPUs; 3145729 KiB rounded up"
        );
        assert!(starting.device_nodes.is_empty());
        let tree = Tree::new(&[("sys/bus/pci/devices/0000:3b:10.1/numa_node", "1\n")]);
        let starting = Starting::parse(LIVE, tree.root()).unwrap();
        assert_eq!(starting.device_nodes.to_string(), "1");
        let small = LIVE
            .replace("3145729", "131073")
            .replace("<cell id='0' cpus='0-3' memory='2097152' unit='KiB'/>", "");
        assert_eq!(Starting::parse(&small, Path::new("/")).unwrap().memory_mib, 129);
        assert!(Starting::parse("", Path::new("/")).is_err());
    }
}
