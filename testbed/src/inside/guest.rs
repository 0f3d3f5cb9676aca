//! Guests: their descriptions, creation, state and end.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use homenode_kvm::domain::TOPOLOGY_DEVICE;
use homenode_testbed_guest::{Behaviour, MARKER_READY, MARKER_REPORT, Orders, Phase};
use homenode_undo::TOPOLOGY_SOCKET;
use virt::domain::Domain;

use super::console::{Console, count};
use super::libvirtd::{IMAGE_DIR, RUN_DIR};
use super::pages::{MoveOutcome, PAGE_BYTES, move_range};
use super::proc::{Process, RamMapping};

const READY_LIMIT: Duration = Duration::from_secs(120);

/// The nodes from which a guest's memory may come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Memory {
    /// Any node: there is no `<numatune>`.
    Default,
    /// `<numatune>` with this mode (`strict`, `preferred`, `restrictive`, `interleave`) and these nodes.
    Nodes {
        /// The mode.
        mode: &'static str,
        /// The node list, as libvirt writes it.
        nodeset: String,
    },
    /// One cell of equal size for each of these nodes. The cell's memory is bound to the node (`<memnode mode='strict'>`) and
    /// allocated at the start.
    BoundCells(Vec<u32>),
    /// Huge pages from the host's pool, on these nodes.
    HugePages {
        /// The node list, as libvirt writes it.
        nodeset: String,
    },
    /// `placement='auto'` with this mode: libvirt asks numad for the nodes.
    Auto {
        /// The mode.
        mode: &'static str,
    },
}

/// The CPUs on which a guest's vCPUs may run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cpus {
    /// Anywhere.
    Any,
    /// `<vcpu cpuset=…>`: all threads run on this list.
    Set(String),
    /// `<vcpupin>`: vCPU `i` runs on the `i`th list.
    Pinned(Vec<String>),
    /// `<vcpu placement='auto'>`: libvirt asks numad for the CPUs. This implies automatic strict memory.
    Auto,
}

/// Whether a guest has a balloon, and what the balloon does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Balloon {
    /// The guest has no balloon.
    Missing,
    /// The guest has a balloon, but no driver for it.
    Undriven,
    /// The guest has a balloon and its driver.
    Driven,
    /// The guest has a balloon that also reports released pages to the host.
    Reporting,
}

impl Balloon {
    /// Returns the part of the guest's kernel command line for the balloon.
    fn cmdline(self) -> &'static str {
        match self {
            Balloon::Undriven => " module_blacklist=virtio_balloon",
            Balloon::Missing | Balloon::Driven | Balloon::Reporting => "",
        }
    }

    /// Returns the attributes of `<memballoon>`.
    fn attributes(self) -> &'static str {
        match self {
            Balloon::Missing => "model='none'",
            Balloon::Undriven | Balloon::Driven => "model='virtio'",
            Balloon::Reporting => "model='virtio' freePageReporting='on'",
        }
    }
}

/// A guest to be created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestSpec {
    /// Name of the domain.
    pub name: String,
    /// Number of vCPUs, 1 or 2.
    pub vcpus: u32,
    /// Memory in MiB. Below 128 MiB the stock kernel does not boot reliably.
    pub memory_mib: u64,
    /// The CPUs on which the guest's vCPUs may run.
    pub cpus: Cpus,
    /// The nodes on which the guest's memory may be.
    pub memory: Memory,
    /// The host nodes for the memory of the guest's virtual nodes. Each virtual node has an equal part of memory and vCPUs. Empty
    /// if the guest sees one node. A guest with virtual nodes has a topology device, so an agent must listen when it starts.
    pub virtual_nodes: Vec<u32>,
    /// The guest's orders.
    pub orders: Orders,
    /// The guest's balloon.
    pub balloon: Balloon,
    /// Further XML inside `<domain>`, such as `<metadata>`.
    pub extra_xml: String,
    /// Further XML inside `<devices>`.
    pub devices_xml: String,
}

impl GuestSpec {
    /// Describes an idle guest with one vCPU, 128 MiB, and no placement.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            vcpus: 1,
            memory_mib: 128,
            cpus: Cpus::Any,
            memory: Memory::Default,
            virtual_nodes: Vec::new(),
            orders: Orders::default(),
            balloon: Balloon::Driven,
            extra_xml: String::new(),
            devices_xml: String::new(),
        }
    }

    /// Sets the number of vCPUs.
    #[must_use]
    pub fn vcpus(self, vcpus: u32) -> Self {
        Self { vcpus, ..self }
    }

    /// Sets the guest's CPUs.
    #[must_use]
    pub fn cpus(self, cpus: Cpus) -> Self {
        Self { cpus, ..self }
    }

    /// Sets the guest's memory.
    #[must_use]
    pub fn memory(self, memory: Memory) -> Self {
        Self { memory, ..self }
    }

    /// Sets `<numatune>` of this mode on these nodes.
    #[must_use]
    pub fn nodes(self, mode: &'static str, nodeset: &str) -> Self {
        self.memory(Memory::Nodes {
            mode,
            nodeset: nodeset.to_owned(),
        })
    }

    /// Adds virtual nodes, with their memory on these host nodes.
    #[must_use]
    pub fn virtual_nodes(self, on: &[u32]) -> Self {
        Self {
            virtual_nodes: on.to_vec(),
            ..self
        }
    }

    /// Sets the guest's behaviour from the start.
    #[must_use]
    pub fn doing(mut self, behaviour: Behaviour) -> Self {
        self.orders.first = behaviour;
        self
    }

    /// Adds a behaviour that begins this many seconds after the guest is ready.
    #[must_use]
    pub fn then(mut self, at_s: u32, behaviour: Behaviour) -> Self {
        self.orders.phases.push(Phase { at_s, behaviour });
        self
    }

    fn socket(&self) -> PathBuf {
        PathBuf::from(format!("{RUN_DIR}/{}.sock", self.name))
    }

    /// The file with the guest's output.
    #[must_use]
    pub fn console_log(&self) -> PathBuf {
        PathBuf::from(format!("{RUN_DIR}/{}.log", self.name))
    }

    /// The guest's console.
    #[must_use]
    pub fn console(&self) -> Console {
        Console {
            guest: self.name.clone(),
            log: self.console_log(),
        }
    }

    /// Returns libvirt's XML of the domain.
    #[must_use]
    pub fn xml(&self) -> String {
        let mut xml = String::new();
        let vcpu = match &self.cpus {
            Cpus::Any | Cpus::Pinned(_) => String::new(),
            Cpus::Set(list) => format!(" cpuset='{list}'"),
            Cpus::Auto => " placement='auto'".to_owned(),
        };
        let _ = write!(
            xml,
            "<domain type='kvm'><name>{}</name>{}<memory unit='MiB'>{}</memory><vcpu{vcpu}>{}</vcpu>",
            self.name, self.extra_xml, self.memory_mib, self.vcpus
        );
        if let Cpus::Pinned(lists) = &self.cpus {
            xml.push_str("<cputune>");
            for (vcpu, list) in lists.iter().enumerate() {
                let _ = write!(xml, "<vcpupin vcpu='{vcpu}' cpuset='{list}'/>");
            }
            xml.push_str("</cputune>");
        }
        let mut tune = match &self.memory {
            Memory::Default => String::new(),
            Memory::BoundCells(nodes) => bound_cells(nodes),
            Memory::HugePages { nodeset } => format!("<memory mode='strict' nodeset='{nodeset}'/>"),
            Memory::Nodes { mode, nodeset } => format!("<memory mode='{mode}' nodeset='{nodeset}'/>"),
            Memory::Auto { mode } => format!("<memory mode='{mode}' placement='auto'/>"),
        };
        for (cell, node) in self.virtual_nodes.iter().enumerate() {
            let _ = write!(
                tune,
                "<memnode cellid='{cell}' mode='preferred' nodeset='{node}'/>"
            );
        }
        if !tune.is_empty() {
            let _ = write!(xml, "<numatune>{tune}</numatune>");
        }
        xml.push_str(match &self.memory {
            Memory::BoundCells(_) => "<memoryBacking><allocation mode='immediate'/></memoryBacking>",
            Memory::HugePages { .. } => "<memoryBacking><hugepages/></memoryBacking>",
            _ => "",
        });
        xml.push_str(&self.cpu());
        // The guest must never reset (panic=0, on_reboot): that runs into paths of emulated SVM that have crashed the emulated
        // host. Instead, a guest whose kernel fails hangs, and its console says why.
        let _ = write!(
            xml,
            "<os><type arch='x86_64' machine='pc'>hvm</type><kernel>{IMAGE_DIR}/vmlinux</kernel>\
             <initrd>{IMAGE_DIR}/initramfs</initrd><cmdline>console=ttyS0 quiet panic=0 {}{}</cmdline></os>\
             <features><acpi/></features>\
             <on_poweroff>destroy</on_poweroff><on_reboot>destroy</on_reboot><on_crash>destroy</on_crash>\
             <devices><emulator>/usr/bin/qemu-system-x86_64</emulator><controller type='usb' model='none'/>\
             <serial type='unix'><source mode='bind' path='{}'/><log file='{}' append='off'/><target port='0'/></serial>\
             <memballoon {}/>{}{}</devices></domain>",
            self.orders.to_cmdline(),
            self.balloon.cmdline(),
            self.socket().display(),
            self.console_log().display(),
            self.balloon.attributes(),
            self.topology_device(),
            self.devices_xml
        );
        xml
    }

    /// Returns the nodes and sockets that the guest sees. Each vCPU has a socket, as the guest's topology module needs it.
    fn cpu(&self) -> String {
        let cells = match &self.memory {
            Memory::BoundCells(nodes) => nodes.len() as u32,
            _ => self.virtual_nodes.len() as u32,
        };
        if cells == 0 {
            return String::new();
        }
        let (vcpus, mib) = (self.vcpus / cells, self.memory_mib / u64::from(cells));
        let mut xml = format!(
            "<cpu><topology sockets='{}' cores='1' threads='1'/><numa>",
            self.vcpus
        );
        for cell in 0..cells {
            let (first, last) = (cell * vcpus, (cell + 1) * vcpus - 1);
            let _ = write!(
                xml,
                "<cell id='{cell}' cpus='{first}-{last}' memory='{mib}' unit='MiB'/>"
            );
        }
        xml.push_str("</numa></cpu>");
        xml
    }

    fn topology_device(&self) -> String {
        if self.virtual_nodes.is_empty() {
            return String::new();
        }
        format!(
            "<shmem name='{TOPOLOGY_DEVICE}' role='master'><model type='ivshmem-doorbell'/>\
             <server path='{TOPOLOGY_SOCKET}'/><msi vectors='1' ioeventfd='off'/></shmem>"
        )
    }
}

/// Returns `<numatune>` for cells that are each bound to one node.
fn bound_cells(nodes: &[u32]) -> String {
    let all: Vec<String> = nodes.iter().map(u32::to_string).collect();
    let mut tune = format!("<memory mode='strict' nodeset='{}'/>", all.join(","));
    for (cell, node) in nodes.iter().enumerate() {
        let _ = write!(tune, "<memnode cellid='{cell}' mode='strict' nodeset='{node}'/>");
    }
    tune
}

/// A running guest.
pub struct Guest {
    /// The guest's description.
    pub spec: GuestSpec,
    /// libvirt's handle of the domain. It becomes stale when libvirtd is restarted: see [`super::Inside::refresh`].
    pub domain: Domain,
    /// The guest's QEMU process.
    pub process: Process,
}

impl Guest {
    /// Returns the guest of a domain that has just been started.
    ///
    /// # Errors
    /// When the guest's QEMU process cannot be found.
    pub fn of(spec: &GuestSpec, domain: Domain) -> anyhow::Result<Self> {
        let path = format!("/run/libvirt/qemu/{}.pid", spec.name);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        let pid = text
            .trim()
            .parse()
            .with_context(|| format!("{path} has no number: {text:?}"))?;
        Ok(Self {
            spec: spec.clone(),
            domain,
            process: Process(pid),
        })
    }

    /// Waits until the guest's init has begun the ordered behaviour.
    ///
    /// # Errors
    /// When that does not happen in time, or the guest has ended.
    pub fn wait_ready(&self) -> anyhow::Result<()> {
        self.wait_console(MARKER_READY, READY_LIMIT).map(drop)
    }

    /// Returns everything that the guest has printed.
    #[must_use]
    pub fn console(&self) -> String {
        self.spec.console().text()
    }

    /// Waits for a line with this text, and returns the last such line.
    ///
    /// # Errors
    /// When no such line comes in time, or the guest has ended.
    pub fn wait_console(&self, text: &str, limit: Duration) -> anyhow::Result<String> {
        self.spec.console().wait(text, limit, || self.process.alive())
    }

    /// Sends a line to the guest's console. QEMU reads at its own pace, and loses what it has not read when the connection is
    /// closed: keep the connection open until the guest has answered.
    ///
    /// # Errors
    /// When the console cannot be reached.
    fn send(&self, line: &str) -> anyhow::Result<UnixStream> {
        let path = self.spec.socket();
        let mut stream = UnixStream::connect(&path)
            .with_context(|| format!("cannot reach the console {}", path.display()))?;
        stream
            .write_all(format!("{line}\n").as_bytes())
            .context("cannot write to the console")?;
        Ok(stream)
    }

    /// Switches the guest to another behaviour, and waits until that is in force.
    ///
    /// # Errors
    /// When the guest does not answer in time.
    pub fn switch_to(&self, behaviour: Behaviour) -> anyhow::Result<()> {
        let order = behaviour.to_string();
        let expected = format!("PHASE {order}");
        let silent = || {
            self.spec
                .console()
                .unexplained("stands still without a word of its kernel", &order)
        };
        let mut heard = String::new();
        // Now and then an emulated serial line repeats a letter. The guest then gets the order again.
        for _ in 0..3 {
            // If the guest's kernel did not even echo the command, the guest has vanished.
            let answer = self.command(&order, "PHASE ");
            heard = answer.map_err(|error| silent().map_or(error, Into::into))?;
            if heard == expected {
                return Ok(());
            }
        }
        bail!("the guest answered {heard} three times to the order {order}")
    }

    /// Sends a command, and waits for its answer: a new line with this text.
    ///
    /// # Errors
    /// When it does not answer in time.
    pub fn command(&self, command: &str, answer: &str) -> anyhow::Result<String> {
        let lives = || self.process.alive();
        self.spec
            .console()
            .answer(command, answer, |line| self.send(line), lives)
    }

    /// Returns the loops computed and the passes over memory so far.
    ///
    /// # Errors
    /// When the guest does not answer in time.
    pub fn progress(&self) -> anyhow::Result<(u64, u64)> {
        let line = self.command("report", MARKER_REPORT)?;
        Ok((count(&line, "loops=")?, count(&line, "passes=")?))
    }

    /// Returns the mapping of the guest's RAM in QEMU.
    ///
    /// # Errors
    /// When the mapping cannot be identified.
    pub fn ram(&self) -> anyhow::Result<RamMapping> {
        self.process.guest_ram(self.spec.memory_mib << 20)
    }

    /// Lets all vCPUs of the guest run on these CPUs, one bit each, as its operator would.
    ///
    /// # Errors
    /// When libvirt refuses.
    pub fn run_on(&self, cpus: u8) -> anyhow::Result<()> {
        for vcpu in 0..self.spec.vcpus {
            let pinned = self.domain.pin_vcpu(vcpu, &[cpus]);
            pinned.map_err(|error| anyhow!("{}", error.message()))?;
        }
        Ok(())
    }

    /// Returns how many pages of the guest's RAM are on each node.
    ///
    /// # Errors
    /// When QEMU has gone.
    pub fn pages_per_node(&self) -> anyhow::Result<BTreeMap<u32, u64>> {
        Ok(self.process.mapping_nodes(self.ram()?)?.0)
    }

    /// Returns the kernel's memory policy for the guest's RAM, as numa_maps writes it.
    ///
    /// # Errors
    /// When QEMU has gone.
    pub fn memory_policy(&self) -> anyhow::Result<String> {
        Ok(self.process.mapping_nodes(self.ram()?)?.1)
    }

    /// Spreads the guest's pages evenly over these nodes, page by page.
    ///
    /// # Errors
    /// When the guest's RAM cannot be found.
    pub fn scatter(&self, nodes: &[u32]) -> anyhow::Result<MoveOutcome> {
        let ram = self.ram()?;
        move_range(self.process.0, ram.begin, ram.bytes, |page| {
            nodes[(page % nodes.len() as u64) as usize]
        })
    }

    /// Moves all of the guest's pages to one node.
    ///
    /// # Errors
    /// When the guest's RAM cannot be found.
    pub fn move_to(&self, node: u32) -> anyhow::Result<MoveOutcome> {
        self.scatter(&[node])
    }
}

/// Converts a number of pages to MiB.
#[must_use]
pub fn mib(pages: u64) -> u64 {
    (pages * PAGE_BYTES) >> 20
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xml_says_what_was_asked() {
        let spec = GuestSpec::new("g")
            .vcpus(2)
            .cpus(Cpus::Auto)
            .memory(Memory::Auto { mode: "strict" });
        let xml = spec.doing(Behaviour::busy(2)).xml();
        assert!(xml.contains("<vcpu placement='auto'>2</vcpu>"), "{xml}");
        assert!(xml.contains("<memory mode='strict' placement='auto'/>"), "{xml}");
        assert!(
            xml.contains(
                "homenode.do=busy=2,duty=100,pin=1,touch=0,on=any,every=0,hot=0,stride=1,sweep=off,passes=0,\
                 walk=0,think=0,burst=0,disk=0</cmdline>"
            ),
            "{xml}"
        );
    }

    #[test]
    fn pins_are_per_vcpu() {
        let xml = GuestSpec::new("g")
            .cpus(Cpus::Pinned(vec!["0".to_owned(), "1-2".to_owned()]))
            .xml();
        assert!(xml.contains("<vcpupin vcpu='1' cpuset='1-2'/>"), "{xml}");
    }
}
