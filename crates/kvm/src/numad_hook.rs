//! Parses the input that libvirt's hook gets just before a domain starts: `/etc/libvirt/hooks/qemu <guest> prepare begin -`, with
//! the domain's XML on standard input. Soon after, libvirt calls `numad -w` with only a number of vCPUs and an amount of memory;
//! the hook shows which domain these belong to. A hook must not call libvirt (it would wait for itself) and must not fail (the
//! domain would not start).

use std::collections::BTreeMap;
use std::path::Path;

use homenode_host::{HugeMemory, Management};
use homenode_kernel::meminfo;
use homenode_units::{Bytes, BytesPerSec, NodeSet, PAGE_BYTES, VmId};

use crate::domain::{Domain, DomainError, scaled, size};
use crate::xml::{self, Element};

/// A domain that is about to start, with the counts that libvirt passes in `numad -w VCPUS:MIB`.
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
    /// Memory bandwidth that the domain's metadata declares.
    pub bandwidth: Option<BytesPerSec>,
    /// Home that the domain's metadata asks for.
    pub home: Option<NodeSet>,
    /// Whether the agent may change the VM.
    pub management: Management,
    /// Nodes of the devices assigned to the domain.
    pub device_nodes: NodeSet,
    /// Memory in huge pages, by page size; the rest is in ordinary pages.
    pub huge_pages: Vec<HugeMemory>,
}

impl Starting {
    /// Parses the XML that a hook gets; the devices are looked up below `root`. Broken metadata is handled as in
    /// [`crate::domain`]: the VM will only be watched.
    ///
    /// # Errors
    /// When the XML is not a domain.
    pub fn parse(xml: &str, root: &Path) -> Result<Starting, DomainError> {
        let domain = Domain::parse(xml)?;
        let settings = domain.settings(None, Vec::new());
        Ok(Starting {
            id: domain.id,
            device_nodes: domain.device_nodes(root),
            huge_pages: huge_pages(xml, &domain, root),
            name: domain.name,
            vcpus: domain.vcpus_current,
            memory_mib: domain.memory_kib.div_ceil(1024),
            bandwidth: settings.bandwidth,
            home: settings.home,
            management: settings.management,
        })
    }

    /// The domain's memory.
    pub fn memory_bytes(&self) -> Bytes {
        Bytes::from_mib(self.memory_mib)
    }
}

/// Returns a domain's memory in huge pages (`<memoryBacking><hugepages>`), by page size. Follows libvirt:
///
/// - A `<page>` applies to the guest nodes in its `nodeset`; without one, to all nodes that no other `<page>` names.
/// - Without any `<page>`, all memory is in huge pages of the kernel's default size.
/// - A DIMM counts as memory of its target node, unless its `<source>` has its own page size.
/// - Memory of an unknown page size (a host without huge pages) is left out: the domain will not start.
fn huge_pages(xml: &str, domain: &Domain, root: &Path) -> Vec<HugeMemory> {
    let Some(parsed) = xml::parse(xml).ok() else {
        return Vec::new();
    };
    let Some(backing) = parsed.path(&["memoryBacking", "hugepages"]) else {
        return Vec::new();
    };
    let pages: Vec<Backing> = backing.all("page").filter_map(Backing::of).collect();
    let of_node = |node: u16| match backing.child("page") {
        None => meminfo::default_huge_page(root).ok().flatten(),
        Some(_) => {
            let named = pages.iter().find(|page| page.is_named(node));
            let of = named.or_else(|| pages.iter().find(|page| page.guest_nodes.is_none()));
            of.map(|page| page.page_bytes)
        }
    };
    let mut parts: Vec<(Option<Bytes>, Bytes)> = Vec::new();
    let devices = parsed.child("devices").into_iter();
    let mut dimms = Bytes::ZERO;
    for dimm in devices.flat_map(|devices| devices.all("memory")) {
        let is_ram = matches!(dimm.attribute("model"), Some("dimm" | "virtio-mem"));
        let Some(bytes) = dimm.path(&["target", "size"]).and_then(size).filter(|_| is_ram) else {
            continue;
        };
        let node = dimm
            .path(&["target", "node"])
            .and_then(|node| node.text.trim().parse().ok());
        let own = dimm.path(&["source", "pagesize"]).and_then(size);
        parts.push((own.or_else(|| of_node(node.unwrap_or(0))), bytes));
        dimms = Bytes(dimms.0.saturating_add(bytes.0));
    }
    if domain.cells.is_empty() {
        let all = Bytes(domain.memory_kib.saturating_mul(1024));
        parts.push((of_node(0), all.saturating_sub(dimms)));
    }
    let cells = (0..).zip(&domain.cells);
    parts.extend(cells.map(|(node, cell)| (of_node(node), cell.memory_bytes)));
    let mut by_size: BTreeMap<Bytes, u64> = BTreeMap::new();
    for (page, bytes) in parts {
        if let Some(page) = page.filter(|page| page.0 > PAGE_BYTES) {
            // A memory object consists of whole pages.
            let whole = bytes.0.div_ceil(page.0).saturating_mul(page.0);
            let sum = by_size.entry(page).or_default();
            *sum = sum.saturating_add(whole);
        }
    }
    let part = |(page_bytes, bytes)| HugeMemory {
        page_bytes,
        memory_bytes: Bytes(bytes),
    };
    by_size
        .into_iter()
        .filter(|(_, bytes)| *bytes > 0)
        .map(part)
        .collect()
}

/// A `<page>` of `<hugepages>`.
struct Backing {
    page_bytes: Bytes,
    /// The guest nodes that the page applies to, if it names any.
    guest_nodes: Option<NodeSet>,
}

impl Backing {
    fn of(page: &Element) -> Option<Backing> {
        let page_bytes = scaled(page.attribute("size")?, page.attribute("unit"))?;
        Some(Backing {
            page_bytes,
            guest_nodes: page
                .attribute("nodeset")
                .map(|nodes| nodes.parse().unwrap_or_default()),
        })
    }

    fn is_named(&self, node: u16) -> bool {
        self.guest_nodes
            .as_ref()
            .is_some_and(|nodes| nodes.iter().any(|of| of.0 == node))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::tests::LIVE;
    use homenode_kernel::fake::Tree;

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

    #[test]
    fn memory_in_huge_pages_is_told_by_size() {
        let tree = Tree::new(&[("proc/meminfo", "Hugepagesize:       2048 kB\n")]);
        let cells = "<cpu><numa><cell id='0' cpus='0' memory='1048576' unit='KiB'/>\
                     <cell id='1' cpus='1' memory='1048577' unit='KiB'/></numa></cpu>";
        let told = |backing: &str, rest: &str| {
            let xml = format!(
                "<domain type='kvm'><name>a</name><uuid>11111111-1111-4111-8111-111111111111</uuid>\
                 <memory unit='KiB'>2097153</memory><vcpu>2</vcpu>\
                 <memoryBacking>{backing}</memoryBacking>{rest}</domain>"
            );
            let starting = Starting::parse(&xml, tree.root()).unwrap();
            let part = |part: &HugeMemory| (part.page_bytes.0 >> 10, part.memory_bytes.0 >> 10);
            starting.huge_pages.iter().map(part).collect::<Vec<_>>()
        };
        assert_eq!(told("<locked/>", cells), []);
        // 2,097,153 KiB are 1,025 pages of 2 MiB; in two cells they are 512 and 513 pages.
        assert_eq!(told("<hugepages/>", ""), [(2048, 1025 * 2048)]);
        assert_eq!(told("<hugepages/>", cells), [(2048, 1025 * 2048)]);
        assert_eq!(
            told("<hugepages><page size='1' unit='G'/></hugepages>", ""),
            [(1 << 20, 3 << 20)]
        );
        // Node 0 is in pages of 1 GiB, and node 1 in ordinary pages.
        let first = "<page size='1048576' unit='KiB' nodeset='0'/>";
        assert_eq!(
            told(&format!("<hugepages>{first}</hugepages>"), cells),
            [(1 << 20, 1 << 20)]
        );
        // A `<page>` without a nodeset applies to the other nodes, in either order of elements. Its default unit is KiB.
        let other = "<page size='2048'/>";
        for pages in [format!("{first}{other}"), format!("{other}{first}")] {
            let told = told(&format!("<hugepages>{pages}</hugepages>"), cells);
            assert_eq!(told, [(2048, 513 * 2048), (1 << 20, 1 << 20)]);
        }
        // Pages of the ordinary size count as ordinary pages, and an invalid size counts as no page.
        assert_eq!(
            told("<hugepages><page size='4' unit='KiB'/></hugepages>", cells),
            []
        );
        assert_eq!(told("<hugepages><page size='x'/></hugepages>", cells), []);
        // 1 GiB of the memory is a DIMM that names its own pages.
        let dimm = "<devices><memory model='dimm'><source><pagesize unit='MiB'>1024</pagesize></source>\
                    <target><size unit='GiB'>1</size><node>0</node></target></memory></devices>";
        assert_eq!(
            told("<hugepages/>", dimm),
            [(2048, 513 * 2048), (1 << 20, 1 << 20)]
        );
        // Without huge pages in the kernel there is no default size.
        let bare = Tree::new(&[]);
        let xml = LIVE.replace("<page size='2048' unit='KiB'/>", "");
        assert_eq!(Starting::parse(&xml, bare.root()).unwrap().huge_pages, []);
    }
}
