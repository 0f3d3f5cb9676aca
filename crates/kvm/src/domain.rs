//! A libvirt domain: parses the parts of its live XML that Homenode needs.
//!
//! The operator's settings for Homenode are in the domain's metadata, so they survive restarts and move with the VM:
//!
//! ```text
//! virsh metadata NAME https://homenode.dev/xmlns/vm/1 --key homenode --live --config \
//!     --set "<vm manage='yes' mode='recommend' home='0-1' bandwidth='2GB/s' permit='250k' floor='2GiB'/>"
//! ```
//!
//! Every attribute is optional. A misspelt attribute or a malformed value makes the whole element invalid. The operator's intent
//! is then unknown, so the VM is only watched until the element is fixed.

use std::collections::BTreeMap;
use std::path::Path;

use homenode_host::{Management, Mode, VmSettings};
use homenode_kernel::binding::Binding;
use homenode_kernel::read;
use homenode_units::{Bytes, CpuId, CpuSet, NodeId, NodeSet, VmId};
use homenode_vm_settings::file::FileError;
use homenode_vm_settings::{OperatorSettings, SettingError};

use crate::mark::Mark;
use crate::xml::{self, Element, XmlError};

/// Namespace of the metadata element.
pub const NAMESPACE: &str = "https://homenode.dev/xmlns/vm/1";
/// More vCPUs than any hypervisor offers.
const VCPUS_MAX: u32 = 4096;

/// Why a domain's XML could not be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DomainError {
    /// The text is not XML.
    #[error("domain XML: {0}")]
    Xml(#[from] XmlError),
    /// An element or attribute that every domain has is missing or malformed.
    #[error("domain XML: {what} is missing or malformed (`{found}`)")]
    Malformed {
        /// The element or attribute.
        what: &'static str,
        /// The text found.
        found: String,
    },
}

fn malformed(what: &'static str, found: &str) -> DomainError {
    DomainError::Malformed {
        what,
        found: found.trim().chars().take(80).collect(),
    }
}

/// Why a VM's settings are not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoSettings {
    /// The settings in libvirt's metadata are wrong.
    #[error(transparent)]
    Metadata(#[from] SettingError),
    /// The VM's settings file is wrong.
    #[error(transparent)]
    File(#[from] FileError),
    /// Another process claims the VM's name or UUID too.
    #[error("{0}")]
    Disputed(String),
}

/// How libvirt binds a domain's memory (`<numatune><memory>`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaTune {
    /// `strict`, `preferred`, `interleave` or `restrictive`.
    pub mode: String,
    /// The nodes; `None` with `placement='auto'`.
    pub nodes: Option<NodeSet>,
}

/// One domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain {
    /// UUID.
    pub id: VmId,
    /// Name.
    pub name: String,
    /// libvirt's number for this run; `None` while the domain does not run.
    pub runtime_id: Option<u32>,
    /// All memory that the domain got at start, DIMMs included, in KiB (`<memory>`).
    pub memory_kib: u64,
    /// Memory that the domain may use now, after ballooning (`<currentMemory>`).
    pub memory_current_bytes: Bytes,
    /// vCPUs online at start.
    pub vcpus_current: u16,
    /// CPUs allowed to all vCPUs (`<vcpu cpuset>`).
    pub cpuset: Option<CpuSet>,
    /// Whether libvirt asked a tool (`numad`) for the domain's initial nodes (`<vcpu placement='auto'>`).
    pub placed_by_advice: bool,
    /// CPUs of single vCPUs (`<vcpupin>`).
    pub vcpu_pins: BTreeMap<u16, CpuSet>,
    /// CPUs of the emulator (`<emulatorpin>`).
    pub emulator_pin: Option<CpuSet>,
    /// CPUs of I/O threads (`<iothreadpin>`).
    pub iothread_pins: BTreeMap<u32, CpuSet>,
    /// Numbers of I/O threads.
    pub iothreads: Vec<u32>,
    /// Where all of the domain's memory may be (`<numatune><memory>`).
    pub numatune: Option<NumaTune>,
    /// Nodes that the domain's memory was bound to at start, merged over its cells and DIMMs.
    pub binding: Option<Binding>,
    /// Huge pages, if the domain's memory is in them (`<memoryBacking><hugepages>`).
    pub huge_pages: Option<HugePages>,
    /// Whether the domain's memory is locked (`<memoryBacking><locked/>`).
    pub locked: Option<Locked>,
    /// How the domain's memory is encrypted, if it is (`<launchSecurity type>`).
    pub encrypted: Option<String>,
    /// The domain's balloon, if it has one.
    pub balloon: Option<BalloonDevice>,
    /// Whether the guest reports free pages (`<memballoon freePageReporting='on'/>`), which QEMU then returns to the host.
    pub free_pages: FreePages,
    /// The guest's NUMA nodes by number; empty if the guest sees a single node.
    pub cells: Vec<Cell>,
    /// The socket that serves the guest's topology page, from the domain's `<shmem>` device named [`TOPOLOGY_DEVICE`].
    pub topology_socket: Option<String>,
    /// Sizes of the domain's memory objects: one object per guest NUMA cell and DIMM, or one for everything.
    pub ram_sizes: Vec<Bytes>,
    /// PCI addresses of devices assigned through VFIO.
    pub assigned_devices: Vec<String>,
    /// The operator's settings for the domain, or what is wrong with them.
    pub settings: Result<OperatorSettings, NoSettings>,
    /// The mark in which an agent recorded its changes.
    pub mark: Option<Mark>,
}

/// Huge pages that hold a domain's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HugePages {
    /// The page size, if the XML names one.
    pub page_bytes: Option<Bytes>,
}

/// A NUMA node of the guest (`<numa><cell>`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    /// vCPUs of this node.
    pub vcpus: Vec<u16>,
    /// The node's memory.
    pub memory_bytes: Bytes,
}

/// Name of the `<shmem>` device through which a guest reads which nodes it runs on.
pub const TOPOLOGY_DEVICE: &str = "homenode-topology";

/// A virtio balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BalloonDevice {
    /// Interval in seconds at which the guest is asked for memory statistics; 0 for never.
    pub stats_period_s: u32,
}

/// What happens to pages that the guest has freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreePages {
    /// The guest reports freed pages to QEMU.
    Reported,
    /// Freed pages stay allocated on the host.
    Kept,
}

/// Marks a domain whose memory is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Locked;

impl Domain {
    /// Parses a domain's XML.
    ///
    /// # Errors
    /// When the text is not XML, or lacks a name, UUID, memory or vCPUs.
    pub fn parse(text: &str) -> Result<Domain, DomainError> {
        let root = xml::parse(text)?;
        if root.name != "domain" {
            return Err(malformed("<domain>", &root.name));
        }
        let text_of = |name: &'static str| root.child(name).map(|e| e.text.trim()).unwrap_or("");
        let name = text_of("name").to_owned();
        // libvirt refuses `/` in names, and we make paths of them.
        if name.is_empty() || name.contains('/') || name.contains('\0') {
            return Err(malformed("<name>", &name));
        }
        let id = VmId::parse(text_of("uuid")).ok_or_else(|| malformed("<uuid>", text_of("uuid")))?;
        let memory = root
            .child("memory")
            .and_then(size)
            .ok_or_else(|| malformed("<memory>", text_of("memory")))?;
        let current = root.child("currentMemory").and_then(size).unwrap_or(memory);
        let vcpu = root.child("vcpu").ok_or_else(|| malformed("<vcpu>", ""))?;
        let vcpus: u32 = vcpu
            .text
            .trim()
            .parse()
            .map_err(|_| malformed("<vcpu>", &vcpu.text))?;
        let current_vcpus = match vcpu.attribute("current") {
            Some(current) => current
                .parse()
                .map_err(|_| malformed("<vcpu current>", current))?,
            None => vcpus,
        };
        if vcpus > VCPUS_MAX || current_vcpus == 0 || current_vcpus > vcpus {
            return Err(malformed("<vcpu>", &format!("{current_vcpus} of {vcpus}")));
        }
        let cells = cells(&root, vcpus)?;
        let cputune = root.child("cputune");
        let backing = root.child("memoryBacking");
        Ok(Domain {
            id,
            runtime_id: root.attribute("id").and_then(|id| id.parse().ok()),
            memory_kib: memory.0.div_ceil(1024),
            memory_current_bytes: current,
            vcpus_current: current_vcpus as u16,
            cpuset: vcpu
                .attribute("cpuset")
                .map(|list| cpus(list, "<vcpu cpuset>"))
                .transpose()?,
            placed_by_advice: vcpu.attribute("placement") == Some("auto"),
            vcpu_pins: pins(cputune, "vcpupin", "vcpu")?,
            emulator_pin: match cputune.and_then(|c| c.child("emulatorpin")?.attribute("cpuset")) {
                Some(list) => Some(cpus(list, "<emulatorpin cpuset>")?),
                None => None,
            },
            iothread_pins: pins(cputune, "iothreadpin", "iothread")?,
            iothreads: iothreads(&root),
            numatune: numatune(&root)?,
            binding: binding(&root, cells.len())?,
            huge_pages: backing.and_then(|b| b.child("hugepages")).map(|h| HugePages {
                page_bytes: h
                    .child("page")
                    .and_then(|p| scaled(p.attribute("size")?, p.attribute("unit"))),
            }),
            locked: backing.and_then(|b| b.child("locked")).map(|_| Locked),
            encrypted: root
                .child("launchSecurity")
                .and_then(|security| security.attribute("type"))
                .map(str::to_owned),
            balloon: balloon(&root),
            free_pages: free_pages(&root),
            topology_socket: topology_socket(&root),
            ram_sizes: ram_sizes(&root, memory, &cells),
            cells,
            assigned_devices: assigned_devices(&root),
            settings: settings(&root).map_err(NoSettings::from),
            mark: Mark::of(&root),
            name,
        })
    }

    /// Returns the operator's settings for policies, with the vCPUs that the operator pinned. If the settings are invalid, the VM
    /// is only watched.
    pub fn settings(&self, cpus_allowed: Option<CpuSet>, pinned_vcpus: Vec<u16>) -> VmSettings {
        let said = self
            .settings
            .clone()
            .unwrap_or_else(|_| OperatorSettings::ignored());
        said.of_vm(cpus_allowed, pinned_vcpus)
    }

    /// Whether the agent may take memory from this VM: its operator set a floor and lets the agent act.
    pub fn may_be_shrunk(&self) -> bool {
        let said = self.settings.as_ref().ok();
        said.is_some_and(|said| {
            said.memory_floor.is_some()
                && said.management == Management::Managed
                && said.mode != Some(Mode::Observe)
        })
    }

    /// Returns the nodes of the devices assigned to the VM, according to sysfs. Skips devices without a node (-1).
    pub fn device_nodes(&self, root: &Path) -> NodeSet {
        let node = |address: &String| {
            let path = root.join("sys/bus/pci/devices").join(address).join("numa_node");
            let node: i64 = read::value_if_there(&path, "a node number or -1").ok()??;
            u16::try_from(node).ok().map(NodeId)
        };
        self.assigned_devices.iter().filter_map(node).collect()
    }
}

/// Returns what the balloon device does with free pages.
fn free_pages(root: &Element) -> FreePages {
    match memballoon(root).and_then(|balloon| balloon.attribute("freePageReporting")) {
        Some("on") => FreePages::Reported,
        _ => FreePages::Kept,
    }
}

/// Returns the domain's balloon device, if guests can drive it.
fn memballoon(root: &Element) -> Option<&Element> {
    let balloon = root.path(&["devices", "memballoon"])?;
    let model = balloon.attribute("model")?;
    model.starts_with("virtio").then_some(balloon)
}

fn balloon(root: &Element) -> Option<BalloonDevice> {
    let balloon = memballoon(root)?;
    let period = balloon.child("stats").and_then(|stats| stats.attribute("period"));
    Some(BalloonDevice {
        stats_period_s: period.and_then(|seconds| seconds.parse().ok()).unwrap_or(0),
    })
}

/// Parses a size with its unit attribute; libvirt's default is KiB.
pub(crate) fn size(element: &Element) -> Option<Bytes> {
    scaled(element.text.trim(), element.attribute("unit"))
}

pub(crate) fn scaled(number: &str, unit: Option<&str>) -> Option<Bytes> {
    let factor: u64 = match unit.unwrap_or("KiB") {
        "b" | "bytes" => 1,
        "KB" => 1000,
        "k" | "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "M" | "MiB" => 1 << 20,
        "GB" => 1_000_000_000,
        "G" | "GiB" => 1 << 30,
        "TB" => 1_000_000_000_000,
        "T" | "TiB" => 1 << 40,
        _ => return None,
    };
    number.trim().parse::<u64>().ok()?.checked_mul(factor).map(Bytes)
}

/// Parses a CPU list in libvirt's format, which is the kernel's plus `^3` to exclude CPU 3.
fn cpus(list: &str, what: &'static str) -> Result<CpuSet, DomainError> {
    let (out, within): (Vec<_>, Vec<_>) = list
        .split(',')
        .map(str::trim)
        .partition(|part| part.starts_with('^'));
    let mut set: CpuSet = within.join(",").parse().map_err(|_| malformed(what, list))?;
    for part in out {
        set.remove(CpuId(part[1..].parse().map_err(|_| malformed(what, list))?));
    }
    Ok(set)
}

/// Parses `<vcpupin vcpu='0' cpuset='0-1'/>` and similar elements.
fn pins<N: std::str::FromStr + Ord>(
    cputune: Option<&Element>,
    name: &'static str,
    number: &str,
) -> Result<BTreeMap<N, CpuSet>, DomainError> {
    let mut pins = BTreeMap::new();
    for pin in cputune.into_iter().flat_map(|c| c.all(name)) {
        let index = pin.attribute(number).unwrap_or("");
        let index = index.parse().map_err(|_| malformed(name, index))?;
        pins.insert(index, cpus(pin.attribute("cpuset").unwrap_or(""), name)?);
    }
    Ok(pins)
}

/// Returns the numbers of the I/O threads: those in `<iothreadids>`, else counted from 1.
fn iothreads(root: &Element) -> Vec<u32> {
    let ids: Vec<u32> = root
        .child("iothreadids")
        .into_iter()
        .flat_map(|ids| ids.all("iothread"))
        .filter_map(|thread| thread.attribute("id")?.parse().ok())
        .collect();
    if !ids.is_empty() {
        return ids;
    }
    let count: u32 = root
        .child("iothreads")
        .and_then(|e| e.text.trim().parse().ok())
        .unwrap_or(0);
    (1..=count.min(1024)).collect()
}

fn numatune(root: &Element) -> Result<Option<NumaTune>, DomainError> {
    let Some(memory) = root.path(&["numatune", "memory"]) else {
        return Ok(None);
    };
    let list = memory.attribute("nodeset");
    Ok(Some(NumaTune {
        mode: mode(memory).to_owned(),
        nodes: list.map(|list| nodes(list, "<memory nodeset>")).transpose()?,
    }))
}

/// Returns the nodes that the domain's memory is bound to. A cell's memory follows the cell's `<memnode>`. A DIMM follows its own
/// `<nodemask>` in its cell's mode, or else its cell's `<memnode>`. Memory without either follows `<memory>`.
fn binding(root: &Element, cells: usize) -> Result<Option<Binding>, DomainError> {
    let whole = numatune(root)?;
    let whole_mode = whole.as_ref().map_or("strict", |tune| &tune.mode);
    let of_all = whole
        .as_ref()
        .and_then(|tune| Binding::of(&tune.mode, tune.nodes.as_ref()?));
    let mut of_cells: BTreeMap<usize, (&str, Option<Binding>)> = BTreeMap::new();
    let tune = root.child("numatune");
    for memnode in tune.into_iter().flat_map(|tune| tune.all("memnode")) {
        let id = memnode.attribute("cellid").unwrap_or("");
        let id = id.parse().map_err(|_| malformed("<memnode cellid>", id))?;
        let list = memnode.attribute("nodeset").unwrap_or("");
        let binding = Binding::of(mode(memnode), &nodes(list, "<memnode nodeset>")?);
        of_cells.insert(id, (mode(memnode), binding));
    }
    let of_cell = |id: usize| of_cells.get(&id).map_or(&of_all, |(_, binding)| binding);
    // Counts as one cell if the guest sees none.
    let mut all = (0..cells.max(1)).fold(None, |all, id| Binding::join(all, of_cell(id).as_ref()));
    let devices = root.child("devices").into_iter().flat_map(|d| d.all("memory"));
    for device in devices.filter(|device| is_ram(device)) {
        let cell = device.path(&["target", "node"]);
        let cell: usize = cell.and_then(|cell| cell.text.trim().parse().ok()).unwrap_or(0);
        all = match device.path(&["source", "nodemask"]) {
            Some(mask) => {
                let mode = of_cells.get(&cell).map_or(whole_mode, |(mode, _)| mode);
                let own = Binding::of(mode, &nodes(mask.text.trim(), "<nodemask>")?);
                Binding::join(all, own.as_ref())
            }
            None => Binding::join(all, of_cell(cell).as_ref()),
        };
    }
    Ok(all)
}

/// Mode of `<memory>` or `<memnode>`; libvirt's default is `strict`.
fn mode(element: &Element) -> &str {
    element.attribute("mode").unwrap_or("strict")
}

/// Parses a list of nodes in libvirt's format.
fn nodes(list: &str, what: &'static str) -> Result<NodeSet, DomainError> {
    let set = cpus(list, what)?;
    Ok(set.iter().map(|cpu| NodeId(cpu.0 as u16)).collect())
}

/// Cells by number: libvirt lists them in order, and numbers them in that order if the XML does not.
fn cells(root: &Element, vcpus: u32) -> Result<Vec<Cell>, DomainError> {
    let numa = root.path(&["cpu", "numa"]);
    let mut cells: Vec<(usize, Cell)> = Vec::new();
    for (at, cell) in numa.into_iter().flat_map(|numa| numa.all("cell")).enumerate() {
        let id = cell.attribute("id").map_or(Ok(at), str::parse);
        let id = id.map_err(|_| malformed("<cell id>", cell.attribute("id").unwrap_or("")))?;
        let listed = cell
            .attribute("cpus")
            .map(|list| cpus(list, "<cell cpus>"))
            .transpose()?;
        let size = cell
            .attribute("memory")
            .and_then(|size| scaled(size, cell.attribute("unit")));
        let vcpus = listed.iter().flat_map(CpuSet::iter).filter(|cpu| cpu.0 < vcpus);
        let cell = Cell {
            vcpus: vcpus.map(|cpu| cpu.0 as u16).collect(),
            memory_bytes: size.unwrap_or(Bytes::ZERO),
        };
        cells.push((id, cell));
    }
    cells.sort_by_key(|(id, _)| *id);
    match cells.iter().enumerate().find(|(at, (id, _))| at != id) {
        Some((_, (id, _))) => Err(malformed("<cell id>", &id.to_string())),
        None => Ok(cells.into_iter().map(|(_, cell)| cell).collect()),
    }
}

fn topology_socket(root: &Element) -> Option<String> {
    let mut devices = root
        .child("devices")
        .into_iter()
        .flat_map(|devices| devices.all("shmem"));
    let device = devices.find(|device| device.attribute("name") == Some(TOPOLOGY_DEVICE))?;
    Some(device.child("server")?.attribute("path")?.to_owned())
}

fn ram_sizes(root: &Element, memory: Bytes, cells: &[Cell]) -> Vec<Bytes> {
    let devices = root.child("devices").into_iter().flat_map(|d| d.all("memory"));
    let dimms: Vec<Bytes> = devices
        .filter(|device| is_ram(device))
        .filter_map(|device| size(device.path(&["target", "size"])?))
        .collect();
    let with_memory = cells.iter().map(|cell| cell.memory_bytes);
    let mut sizes: Vec<Bytes> = with_memory.filter(|bytes| *bytes > Bytes::ZERO).collect();
    if sizes.is_empty() {
        sizes.push(dimms.iter().fold(memory, |rest, dimm| rest.saturating_sub(*dimm)));
    }
    sizes.extend(dimms);
    sizes
}

/// Whether a memory device is RAM. An NVDIMM is not: it is a file of the guest's. virtio-mem is mapped at its full size.
fn is_ram(device: &Element) -> bool {
    matches!(device.attribute("model"), Some("dimm" | "virtio-mem"))
}

/// Returns the PCI addresses of `<hostdev type='pci'>`: KVM assigns PCI devices only through VFIO.
fn assigned_devices(root: &Element) -> Vec<String> {
    let hex = |element: &Element, name: &str| {
        let text = element.attribute(name)?;
        u32::from_str_radix(text.strip_prefix("0x").unwrap_or(text), 16).ok()
    };
    let address = |device: &Element| {
        let at = device.path(&["source", "address"])?;
        let (domain, bus) = (hex(at, "domain").unwrap_or(0), hex(at, "bus")?);
        Some(format!(
            "{domain:04x}:{bus:02x}:{:02x}.{:x}",
            hex(at, "slot")?,
            hex(at, "function")?
        ))
    };
    let devices = root.child("devices");
    let hostdevs = devices
        .into_iter()
        .flat_map(|d| d.all("hostdev"))
        .filter(|d| d.attribute("type") == Some("pci"));
    // `<interface type='hostdev'>` is a network device assigned in the same way.
    let interfaces = devices
        .into_iter()
        .flat_map(|d| d.all("interface"))
        .filter(|d| d.attribute("type") == Some("hostdev"));
    hostdevs.chain(interfaces).filter_map(address).collect()
}

/// Returns the metadata element for these settings; `None` if no setting is set.
pub fn element(settings: &OperatorSettings) -> Option<String> {
    let written =
        |(name, value): &(String, String)| format!(" {name}='{}'", quick_xml::escape::escape(value));
    let attributes: String = settings.written().iter().map(written).collect();
    (!attributes.is_empty()).then(|| format!("<vm{attributes}/>"))
}

fn settings(root: &Element) -> Result<OperatorSettings, SettingError> {
    let elements = root
        .child("metadata")
        .into_iter()
        .flat_map(|metadata| &metadata.children);
    let mut ours = elements.filter(|e| e.name == "vm" && e.namespace.as_deref() == Some(NAMESPACE));
    let is_setting = |(name, _): &&(String, String)| name != "xmlns" && !name.starts_with("xmlns:");
    let attributes = ours
        .next()
        .map(|element| element.attributes.iter().filter(is_setting));
    OperatorSettings::of(attributes.into_iter().flatten().cloned().collect())
}

#[cfg(test)]
pub(crate) mod tests;
