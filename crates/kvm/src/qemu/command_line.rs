//! A QEMU's options: its command line, and the files from which it read options (`-readconfig`, as Incus does).
//!
//! The process may have overwritten its own command line, so all of this is untrusted until parsed. It can only affect its own
//! VM.

use homenode_kernel::binding::Binding;
use homenode_units::{Bytes, NodeId, NodeSet};

use super::options::{self, QemuOption};
use crate::domain::{BalloonDevice, Cell, FreePages, HugePages, Locked, TOPOLOGY_DEVICE};

/// QEMU's default memory size.
const MEMORY_DEFAULT: Bytes = Bytes(128 << 20);
/// More vCPUs than any hypervisor offers.
const VCPUS_MAX: u32 = 4096;

/// Whether a program of this name is a QEMU that may run a VM.
pub(super) fn is_qemu(program: &str) -> bool {
    let name = program.rsplit('/').next().unwrap_or(program);
    name.starts_with("qemu-system-") || matches!(name, "qemu-kvm" | "kvm")
}

/// All options of one QEMU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CommandLine {
    options: Vec<QemuOption>,
}

/// The VM that the options describe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub name: Option<String>,
    pub uuid: Option<String>,
    pub memory: Bytes,
    /// vCPUs at start.
    pub vcpus: u16,
    pub ram_sizes: Vec<Bytes>,
    pub cells: Vec<Cell>,
    pub binding: Option<Binding>,
    pub huge_pages: Option<HugePages>,
    pub locked: Option<Locked>,
    pub encrypted: Option<String>,
    pub assigned_devices: Vec<String>,
    pub balloon: Option<BalloonDevice>,
    pub free_pages: FreePages,
    pub topology_socket: Option<String>,
    /// Sockets of the VM's monitors.
    pub monitors: Vec<String>,
    /// Whether the QEMU runs no machine, because it was started only to query its features.
    pub has_no_machine: bool,
}

/// The arrangement of a VM's vCPUs, and how many there may be.
struct Topology {
    vcpus: u32,
    vcpus_max: u32,
    /// vCPUs per socket, die, cluster, module and core.
    spans: [u32; 5],
}

impl CommandLine {
    /// Reads the words of a command line, without the program's name.
    pub(super) fn of<'a>(words: impl IntoIterator<Item = &'a str>) -> CommandLine {
        let options = options::of_words(words);
        CommandLine { options }
    }

    /// Replaces each `-readconfig` with the options in its file.
    ///
    /// # Errors
    /// The errors of `read`, which gets a file's path.
    pub(super) fn read_files<E>(&mut self, mut read: impl FnMut(&str) -> Result<String, E>) -> Result<(), E> {
        // A process can name any number of files, so the number is limited.
        const FILES_MAX: usize = 8;
        let mut file_count = 0;
        for option in std::mem::take(&mut self.options) {
            match option.name == "readconfig" {
                true if file_count < FILES_MAX => {
                    file_count += 1;
                    self.options.extend(options::of_file(&read(&option.word)?));
                }
                true => {}
                false => self.options.push(option),
            }
        }
        Ok(())
    }

    /// Whether the process changes its root (`-chroot`) after it has opened the files in its options.
    pub(super) fn changes_root(&self) -> bool {
        self.all("chroot").next().is_some() || self.last("run-with", "chroot").is_some()
    }

    /// Whether the process leaves its initial directory.
    pub(super) fn leaves_directory(&self) -> bool {
        self.changes_root() || self.all("daemonize").next().is_some()
    }

    /// Path of the file to which the process writes its process id.
    pub(super) fn pid_file(&self) -> Option<&str> {
        self.all("pidfile").last().map(|option| option.word.as_str())
    }

    fn all(&self, name: &str) -> impl Iterator<Item = &QemuOption> {
        self.options.iter().filter(move |option| option.name == name)
    }

    /// Returns the value of a key in an option that QEMU merges from all its occurrences; the last value counts.
    fn last(&self, name: &str, key: &str) -> Option<&str> {
        self.all(name).filter_map(|option| option.get(key)).last()
    }

    /// Objects whose type has this prefix.
    fn objects(&self, kind: &str) -> impl Iterator<Item = &QemuOption> {
        let is_such = move |option: &&QemuOption| {
            option
                .get("qom-type")
                .is_some_and(|found| found.starts_with(kind))
        };
        self.all("object").filter(is_such)
    }

    /// Devices whose driver has this prefix.
    fn devices(&self, driver: &str) -> impl Iterator<Item = &QemuOption> {
        let is_such = move |option: &&QemuOption| {
            option
                .get("driver")
                .is_some_and(|found| found.starts_with(driver))
        };
        self.all("device").filter(is_such)
    }

    /// What a host needs to know about the VM.
    pub(super) fn told(mut self) -> Told {
        options::set(&mut self.options);
        let balloon = self.devices("virtio-balloon").last();
        let backends = self.objects("memory-backend-");
        let backends: Vec<&QemuOption> = backends.filter(|backend| self.is_ram(backend)).collect();
        let (memory, ram_sizes) = self.memory(&backends);
        let topology = self.topology();
        Told {
            name: self.last("name", "guest").map(str::to_owned),
            uuid: self.uuid().map(str::to_owned),
            memory,
            vcpus: self.vcpus(&topology),
            ram_sizes,
            cells: self.cells(&backends, &topology),
            binding: binding(&backends),
            huge_pages: self
                .is_in_huge_pages(&backends)
                .then_some(HugePages { page_bytes: None }),
            locked: self.is_locked().then_some(Locked),
            encrypted: self.encrypted(),
            assigned_devices: self.devices("vfio-").filter_map(assigned_address).collect(),
            balloon: balloon.map(|_| BalloonDevice { stats_period_s: 0 }),
            free_pages: match balloon.is_some_and(|balloon| self.reports_free_pages(balloon)) {
                true => FreePages::Reported,
                false => FreePages::Kept,
            },
            topology_socket: self.topology_socket(),
            monitors: self.monitors(),
            has_no_machine: self.last("machine", "type") == Some("none"),
        }
    }

    /// Returns the UUID that is given last.
    fn uuid(&self) -> Option<&str> {
        let mut latest = self.options.iter().rev();
        latest.find_map(|option| match option.name.as_str() {
            "uuid" => Some(option.word.as_str()),
            "smbios" if option.number("type") == Some(1) => option.get("uuid"),
            _ => None,
        })
    }

    /// Whether a memory object is the guest's RAM, rather than shared memory, a file of its own, or SGX memory.
    fn is_ram(&self, backend: &QemuOption) -> bool {
        let others = ["ivshmem-", "nvdimm", "virtio-pmem"];
        let mut other_devices = others.into_iter().flat_map(|driver| self.devices(driver));
        backend.get("qom-type") != Some("memory-backend-epc")
            && !other_devices.any(|device| device.get("memdev") == backend.get("id"))
    }

    /// Returns all of the VM's memory, and the size of each memory object: the machine's own and those plugged in.
    fn memory(&self, backends: &[&QemuOption]) -> (Bytes, Vec<Bytes>) {
        let of_machine = || options::size(self.last("machine", "memory.size")?).filter(|size| size.0 > 0);
        let given = self.last("memory", "size").and_then(options::memory_size);
        let given = given.or_else(of_machine);
        let main = self.last("machine", "memory-backend");
        let is_main = |backend: &&QemuOption| {
            let id = backend.get("id");
            id.is_some() && (id == main || self.all("numa").any(|node| node.get("memdev") == id))
        };
        let mut sizes: Vec<Bytes> = backends
            .iter()
            .filter_map(|backend| backend.size("size"))
            .collect();
        if !backends.iter().any(is_main) {
            sizes.insert(0, given.unwrap_or(MEMORY_DEFAULT));
        }
        let sum = sizes.iter().fold(0u64, |sum, size| sum.saturating_add(size.0));
        let whole = Bytes(sum).max(given.unwrap_or_default());
        (
            if whole > Bytes::ZERO {
                whole
            } else {
                MEMORY_DEFAULT
            },
            sizes,
        )
    }

    fn is_in_huge_pages(&self, backends: &[&QemuOption]) -> bool {
        let is_such = |path: &str| path.contains("huge");
        let of_backend =
            |backend: &&QemuOption| backend.is_on("hugetlb") || backend.get("mem-path").is_some_and(is_such);
        backends.iter().any(of_backend)
            || self
                .all("mem-path")
                .last()
                .is_some_and(|option| is_such(&option.word))
    }

    /// Whether the VM's memory is pinned, by an option or by a host device that has no PCI address.
    fn is_locked(&self) -> bool {
        let is_asked =
            |value: Option<&str>| value.is_some_and(|value| options::is_on(value) || value == "on-fault");
        is_asked(self.last("overcommit", "mem-lock"))
            || is_asked(self.last("realtime", "mlock"))
            || self
                .devices("vfio-")
                .any(|device| assigned_address(device).is_none())
            || self.devices("vhost-vdpa").next().is_some()
            || self
                .all("netdev")
                .any(|netdev| netdev.get("type") == Some("vhost-vdpa"))
    }

    /// Returns what hides the VM's memory from the host, if anything does.
    fn encrypted(&self) -> Option<String> {
        let kinds = ["sev-", "tdx-", "s390-pv-", "pef-", "arm-rme-"];
        let object = kinds.into_iter().find_map(|kind| self.objects(kind).next());
        let kind = object.and_then(|object| object.get("qom-type"));
        let named = || self.last("machine", "confidential-guest-support");
        kind.or_else(named).map(str::to_owned)
    }

    fn reports_free_pages(&self, balloon: &QemuOption) -> bool {
        const KEY: &str = "free-page-reporting";
        let driver = balloon.get("driver").unwrap_or_default();
        let everywhere = || self.last("global", &format!("{driver}.{KEY}"));
        balloon.get(KEY).or_else(everywhere).is_some_and(options::is_on)
    }

    /// Returns a number from `-smp` or from `-machine smp.key=`.
    fn smp(&self, key: &str) -> Option<u32> {
        let of_machine = || self.last("machine", &format!("smp.{key}"));
        let said = self.last("smp-opts", key).or_else(of_machine);
        said.and_then(options::number).filter(|number| *number > 0)
    }

    fn topology(&self) -> Topology {
        let part = |key| self.smp(key).map_or(1, |number| number.min(VCPUS_MAX));
        let product = |all: &[u32]| all.iter().copied().fold(1u32, u32::saturating_mul);
        let outer = ["drawers", "books"].map(part);
        let inner = ["dies", "clusters", "modules"].map(part);
        let (sockets, threads) = (part("sockets"), part("threads"));
        let (cpus, most) = (self.smp("cpus"), self.smp("maxcpus"));
        let all_but_cores = product(&[product(&outer), sockets, product(&inner), threads]);
        let cores = match (self.smp("cores"), most.or(cpus)) {
            (Some(cores), _) => cores.min(VCPUS_MAX),
            // The cores make up the rest, as of QEMU 6.2.
            (None, Some(most)) => (most / all_but_cores).max(1),
            (None, None) => 1,
        };
        let product = all_but_cores.saturating_mul(cores);
        let vcpus_max = most.or(cpus).unwrap_or(product).max(product);
        let core = threads;
        let module = core.saturating_mul(cores);
        let cluster = module.saturating_mul(inner[2]);
        let die = cluster.saturating_mul(inner[1]);
        let socket = die.saturating_mul(inner[0]);
        Topology {
            vcpus: cpus.or(most).unwrap_or(product).clamp(1, VCPUS_MAX),
            vcpus_max: vcpus_max.clamp(1, VCPUS_MAX),
            spans: [socket, die, cluster, module, core],
        }
    }

    /// Returns the number of vCPUs at start: those of `-smp`, and those added as separate devices, as Proxmox does.
    fn vcpus(&self, topology: &Topology) -> u16 {
        let is_vcpu = |device: &&QemuOption| {
            let driver = device.get("driver").unwrap_or_default();
            driver.ends_with("-cpu") || driver.ends_with("-spapr-cpu-core")
        };
        let added = self.all("device").filter(is_vcpu).count();
        let added = u32::try_from(added).unwrap_or(VCPUS_MAX);
        topology.vcpus.saturating_add(added).min(topology.vcpus_max) as u16
    }

    /// Returns the guest's nodes by number: `-numa node,cpus=0-1,memdev=ram0`, or the old `mem=`. Their vCPUs include those that
    /// may be plugged in later.
    fn cells(&self, backends: &[&QemuOption], topology: &Topology) -> Vec<Cell> {
        let nodes = self
            .all("numa")
            .filter(|option| option.get("type") == Some("node"));
        let numbered = nodes
            .enumerate()
            .map(|(at, node)| (node.number("nodeid").unwrap_or(at as u32), node));
        let mut nodes: Vec<(u32, &QemuOption)> = numbered.collect();
        nodes.sort_by_key(|(number, _)| *number);
        let homes = self.homes_of_vcpus(&nodes, topology);
        let size = |node: &QemuOption| match node.get("memdev") {
            Some(id) => backends
                .iter()
                .find(|backend| backend.get("id") == Some(id))?
                .size("size"),
            None => options::memory_size(node.get("mem")?),
        };
        let cell = |&(number, node): &(u32, &QemuOption)| Cell {
            vcpus: (0u16..)
                .zip(&homes)
                .filter(|(_, home)| **home == Some(number))
                .map(|(vcpu, _)| vcpu)
                .collect(),
            memory_bytes: size(node).unwrap_or_default(),
        };
        nodes.iter().map(cell).collect()
    }

    /// Returns the guest node of each vCPU. If the options give none, vCPUs go by socket; a vCPU that the options leave out is in
    /// the first node.
    fn homes_of_vcpus(&self, nodes: &[(u32, &QemuOption)], topology: &Topology) -> Vec<Option<u32>> {
        let count = topology.vcpus_max as usize;
        let mut homes = vec![None; count];
        for (number, node) in nodes {
            for vcpu in node.numbers("cpus") {
                if let Some(home) = homes.get_mut(vcpu as usize) {
                    *home = Some(*number);
                }
            }
        }
        for option in self
            .all("numa")
            .filter(|option| option.get("type") == Some("cpu"))
        {
            let of_option = (0u32..).zip(&mut homes);
            for (_, home) in of_option.filter(|(vcpu, _)| topology.has(option, *vcpu)) {
                *home = option.number("node-id");
            }
        }
        let are_told = homes.iter().any(Option::is_some);
        let socket = topology.spans[0].max(1) as usize;
        for (vcpu, home) in homes.iter_mut().enumerate().filter(|(_, home)| home.is_none()) {
            let at = if are_told { 0 } else { vcpu / socket };
            *home = nodes.get(at % nodes.len().max(1)).map(|(number, _)| *number);
        }
        homes
    }

    fn topology_socket(&self) -> Option<String> {
        let named = |device: &&QemuOption| device.get("id") == Some(TOPOLOGY_DEVICE);
        let device = self.devices("ivshmem-doorbell").find(named)?;
        let path = self.chardev(device.get("chardev")?)?.get("path")?;
        Some(path.to_owned())
    }

    fn chardev(&self, id: &str) -> Option<&QemuOption> {
        self.all("chardev").find(|chardev| chardev.get("id") == Some(id))
    }

    /// Returns the sockets on which the VM's monitors listen. A monitor that connects to another program is left out.
    fn monitors(&self) -> Vec<String> {
        let mut paths = Vec::new();
        let listens = |option: &QemuOption| {
            let is_client = option.get("reconnect").or(option.get("reconnect-ms")).is_some();
            let path = option.get("path").filter(|path| path.starts_with('/'));
            path.filter(|_| option.is_on("server") && !is_client && !option.is_on("abstract"))
                .map(str::to_owned)
        };
        let of_chardev = |id: &str| {
            let chardev = self.chardev(id)?;
            listens(chardev).filter(|_| chardev.get("backend") == Some("socket"))
        };
        for option in &self.options {
            paths.extend(match option.name.as_str() {
                "qmp" | "qmp-pretty" => match option.word.split_once(':') {
                    Some(("unix", rest)) => listens(&QemuOption::of_socket(rest)),
                    Some(("chardev", id)) => of_chardev(id),
                    _ => None,
                },
                "mon" if option.get("mode") == Some("control") => option.get("chardev").and_then(of_chardev),
                _ => None,
            });
        }
        paths
    }
}

impl Topology {
    /// Whether a vCPU matches `-numa cpu,socket-id=…,core-id=…`.
    fn has(&self, option: &QemuOption, vcpu: u32) -> bool {
        let keys = ["socket-id", "die-id", "cluster-id", "module-id", "core-id"];
        let mut within = u32::MAX;
        for (key, span) in keys.into_iter().zip(self.spans) {
            let at = vcpu % within / span.max(1);
            within = span.max(1);
            if option.number(key).is_some_and(|wanted| wanted != at) {
                return false;
            }
        }
        option
            .number("thread-id")
            .is_none_or(|wanted| wanted == vcpu % within)
    }
}

/// Returns the nodes to which the VM's memory was bound at start, joined over its backends.
fn binding(backends: &[&QemuOption]) -> Option<Binding> {
    backends.iter().fold(None, |all, backend| {
        let policy = backend.get("policy").unwrap_or("default");
        let numbers = backend.numbers("host-nodes").into_iter();
        let nodes = numbers.filter_map(|node| u16::try_from(node).ok().map(NodeId));
        let own = Binding::of(policy, &nodes.collect::<NodeSet>());
        Binding::join(all, own.as_ref())
    })
}

/// The PCI address of a host device that is assigned to the guest.
fn assigned_address(device: &QemuOption) -> Option<String> {
    let of_path = || device.get("sysfsdev")?.rsplit('/').next();
    pci_address(device.get("host").or_else(of_path)?)
}

/// Parses a PCI address such as `0000:3b:10.1`, with or without its domain.
fn pci_address(host: &str) -> Option<String> {
    let is_plain = host
        .bytes()
        .all(|b| b.is_ascii_hexdigit() || b == b':' || b == b'.');
    let whole = match host.matches(':').count() {
        1 => format!("0000:{host}"),
        2 => host.to_owned(),
        _ => return None,
    };
    (is_plain && whole.len() == 12).then_some(whole)
}

#[cfg(test)]
mod as_qemu;

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// Words of real command lines, and arbitrary text.
    const WORD: &str = "(-(m|smp|object|device|numa|name|machine|mon|chardev|qmp|smbios)|(size|cpus|qom-type|memdev|id|host|host-nodes|policy|type|path|chardev|mode)=[a-z0-9:./-]{0,12}(,(size|cpus|id|mem|memdev|node|path)=[a-z0-9GMK-]{0,9}){0,3}|memory-backend-ram,id=a,size=[0-9]{1,22}[KMGTP]?|\\PC{0,24})";

    /// A command line of Proxmox 8 (`qm showcmd 100`), shortened where nothing is parsed.
    const PROXMOX: &str = "-id 100 -name web,debug-threads=on -no-shutdown \
        -chardev socket,id=qmp,path=/var/run/qemu-server/100.qmp,server=on,wait=off -mon chardev=qmp,mode=control \
        -chardev socket,id=qmp-event,path=/var/run/qmeventd.sock,reconnect=5 -mon chardev=qmp-event,mode=control \
        -pidfile /var/run/qemu-server/100.pid -daemonize -smbios type=1,uuid=6695eb01-f6a4-8304-79aa-97f2502e193f \
        -smp 4,sockets=2,cores=2,maxcpus=4 -nodefaults -cpu host,+kvm_pv_eoi -m 2048 \
        -object iothread,id=iothread-virtioscsi0 \
        -object memory-backend-ram,id=ram-node0,size=1024M,host-nodes=0-1,policy=bind -numa node,nodeid=0,cpus=0-1,memdev=ram-node0 \
        -object memory-backend-ram,id=ram-node1,size=1024M -numa node,nodeid=1,cpus=2-3,memdev=ram-node1 \
        -device virtio-balloon-pci,id=balloon0,bus=pci.0,addr=0x3,free-page-reporting=on \
        -device vfio-pci,host=3b:00.0,id=hostpci0";

    fn told(line: &str) -> Told {
        CommandLine::of(line.split_ascii_whitespace()).told()
    }

    fn cpus(cell: &Cell) -> &[u16] {
        &cell.vcpus
    }

    #[test]
    fn what_proxmox_starts_is_known() {
        let told = told(PROXMOX);
        assert_eq!(told.name.as_deref(), Some("web"));
        assert_eq!(told.uuid.as_deref(), Some("6695eb01-f6a4-8304-79aa-97f2502e193f"));
        assert_eq!((told.memory, told.vcpus), (Bytes(2048 << 20), 4));
        assert_eq!(told.ram_sizes, [Bytes(1024 << 20); 2]);
        assert_eq!(told.cells.iter().map(cpus).collect::<Vec<_>>(), [[0, 1], [2, 3]]);
        assert_eq!(told.binding, Binding::of("bind", &"0-1".parse().unwrap()));
        assert_eq!(told.free_pages, FreePages::Reported);
        assert_eq!(told.assigned_devices, ["0000:3b:00.0"]);
        assert_eq!(
            told.monitors,
            ["/var/run/qemu-server/100.qmp"],
            "the other is a client's"
        );
        assert_eq!(
            (told.locked, told.encrypted, told.has_no_machine),
            (None, None, false)
        );
    }

    #[test]
    fn memory_is_bound_backend_by_backend() {
        let is = |line: &str, nodes: &str, common: &str| {
            let binding = told(line)
                .binding
                .map(|of| (of.nodes.to_string(), of.common.to_string()));
            assert_eq!(binding, Some((nodes.to_owned(), common.to_owned())), "{line}");
        };
        let cells = "-object memory-backend-ram,id=ram-node0,size=120M,host-nodes=0,policy=bind -numa node,nodeid=0,cpus=0,memdev=ram-node0 \
            -object memory-backend-ram,id=ram-node1,size=120M,host-nodes=1,policy=bind -numa node,nodeid=1,cpus=1,memdev=ram-node1";
        is(cells, "0-1", "");
        is(
            "-object {\"qom-type\":\"memory-backend-memfd\",\"id\":\"a\",\"hugetlb\":true,\"size\":67108864,\"host-nodes\":[0],\"policy\":\"bind\"} \
             -object {\"qom-type\":\"memory-backend-file\",\"id\":\"b\",\"mem-path\":\"/dev/hugepages\",\"size\":67108864,\"host-nodes\":[1,2],\"policy\":\"bind\"}",
            "0-2",
            "",
        );
        is(
            "-object memory-backend-ram,id=a,size=1G,host-nodes=2-3,policy=bind",
            "2-3",
            "2-3",
        );
        is(
            "-object memory-backend-ram,id=a,size=1G,host-nodes=0-1,policy=interleave",
            "0-1",
            "",
        );
        is(
            "-object memory-backend-ram,id=a,size=1G -object memory-backend-ram,id=dimm,size=1G,host-nodes=1,policy=bind",
            "1",
            "1",
        );
        for free in ["preferred", "default"] {
            let line = format!("-object memory-backend-ram,id=a,size=1G,host-nodes=1,policy={free}");
            assert_eq!(told(&line).binding, None, "{free}");
        }
        assert_eq!(told("-m 1G -numa node,mem=512 -numa node,mem=512").binding, None);
        let mut line = CommandLine::of(["-readconfig", "/run/v1.conf"]);
        let text = "[object \"mem0\"]\nqom-type = \"memory-backend-memfd\"\nsize = \"64M\"\npolicy = \"bind\"\nhost-nodes.0 = \"1\"\nhost-nodes.1 = \"3\"\n";
        assert_eq!(line.read_files(|_| Ok::<_, ()>(text.to_owned())), Ok(()));
        assert_eq!(line.told().binding, Binding::of("bind", &"1,3".parse().unwrap()));
    }

    /// As in Incus 6: nearly all options are in a file.
    #[test]
    fn what_stands_in_a_file_of_options_counts_too() {
        let line = "-S -name v1 -uuid 6695eb01-f6a4-8304-79aa-97f2502e193f -daemonize -cpu host -readconfig /run/incus/v1/qemu.conf";
        let mut line = CommandLine::of(line.split(' '));
        let text = "# Machine\n[machine]\ntype = \"q35\"\n\n[memory]\nsize = \"1024M\"\n[smp-opts]\ncpus = \"3\"\n\
             [object \"mem0\"]\nqom-type = \"memory-backend-memfd\"\nsize = \"1024M\"\nshare = \"on\"\n\
             [numa]\ntype = \"node\"\nnodeid = \"0\"\nmemdev = \"mem0\"\n\
             [chardev \"monitor\"]\nbackend = \"socket\"\npath = \"/run/incus/v1/qemu.monitor\"\nserver = \"on\"\n\
             [mon]\nchardev = \"monitor\"\nmode = \"control\"\n[device \"qemu_balloon\"]\ndriver = \"virtio-balloon-pci\"\n";
        let read = line.read_files(|path| {
            (path == "/run/incus/v1/qemu.conf")
                .then(|| text.to_owned())
                .ok_or(())
        });
        assert_eq!(read, Ok(()));
        let told = line.told();
        assert_eq!((told.memory, told.vcpus), (Bytes(1 << 30), 3));
        assert_eq!(told.ram_sizes, [Bytes(1 << 30)]);
        assert_eq!(told.monitors, ["/run/incus/v1/qemu.monitor"]);
        assert!(told.balloon.is_some());
    }

    #[test]
    fn memory_is_what_the_machine_has_and_what_is_plugged_into_it() {
        let sizes = |line: &str| {
            told(line)
                .ram_sizes
                .iter()
                .map(|size| size.0 >> 20)
                .collect::<Vec<_>>()
        };
        assert_eq!(sizes(""), [128]);
        assert_eq!(sizes("-m 1G -smp 2"), [1024]);
        assert_eq!(
            sizes("-m size=512,slots=2,maxmem=4G -object memory-backend-ram,id=d0,size=256M"),
            [512, 256]
        );
        let json = r#"-m 64 -object {"qom-type":"memory-backend-memfd","id":"m","size":67108864} -machine q35,memory-backend=m"#;
        assert_eq!(sizes(json), [64]);
        assert_eq!(sizes("-m 99999999999999999999T"), [128], "no such size");
        assert_eq!(sizes("-m 0.5G"), [512]);
        assert_eq!(sizes("-m maxmem=8G -m 1.25G,slots=2"), [1280]);
        assert_eq!(sizes("-machine q35,memory.size=96M"), [96]);
        assert_eq!(
            sizes("-machine memory-backend=m -object memory-backend-ram,id=m,size=0.0625G"),
            [64]
        );
        // Memory that a device shares or a file holds is not RAM.
        for device in [
            "ivshmem-plain,memdev=s",
            "nvdimm,id=n,memdev=s",
            "virtio-pmem-pci,memdev=s",
        ] {
            let line = format!(
                "-m 1G -object memory-backend-file,id=s,share=on,mem-path=/dev/shm/s,size=32M -device {device}"
            );
            assert_eq!(sizes(&line), [1024], "{device}");
        }
        let told = told("-object memory-backend-ram,id=m,size=64M -machine memory-backend=m");
        assert_eq!(told.memory, Bytes(64 << 20), "nothing else is said");
    }

    #[test]
    fn memory_that_cannot_move_is_seen() {
        assert_eq!(told("-overcommit mem-lock=on").locked, Some(Locked));
        assert_eq!(told("-realtime mlock=on").locked, Some(Locked));
        assert_eq!(
            told("-object sev-snp-guest,id=s0").encrypted.as_deref(),
            Some("sev-snp-guest")
        );
        let tdx = r#"-object {"qom-type":"tdx-guest","id":"tdx0"}"#;
        assert_eq!(told(tdx).encrypted.as_deref(), Some("tdx-guest"));
        assert!(told("-M none -S -qmp unix:/x,server").has_no_machine);
        for line in [
            "-overcommit mem-lock=on-fault",
            "-device vfio-pci,sysfsdev=/sys/bus/mdev/devices/6695eb01-f6a4-8304-79aa-97f2502e193f",
            "-netdev vhost-vdpa,id=n,vhostdev=/dev/vhost-vdpa-0",
        ] {
            assert_eq!(told(line).locked, Some(Locked), "{line}");
        }
        let device = told("-device vfio-pci,sysfsdev=/sys/bus/pci/devices/0000:3b:00.1");
        assert_eq!(
            (device.assigned_devices, device.locked),
            (vec!["0000:3b:00.1".to_owned()], None)
        );
        assert!(
            told("-mem-path /dev/hugepages -mem-prealloc")
                .huge_pages
                .is_some()
        );
    }

    #[test]
    fn a_comma_in_a_value_is_doubled_and_nothing_makes_it_panic() {
        assert_eq!(
            told("-name guest=a,,b,debug-threads=on").name.as_deref(),
            Some("a,b")
        );
        for line in [
            "-",
            "--",
            "-name",
            "-m -m -m",
            "-smp ,,,=",
            "-object {",
            "-numa node,cpus=9-1",
            "-device vfio-pci,host=::::",
        ] {
            let _ = told(line);
        }
        assert_eq!(told("-device vfio-pci,host=../../etc").assigned_devices, [""; 0]);
    }

    proptest! {
        /// A process can overwrite its own command line with anything.
        #[test]
        fn any_words_and_any_file_are_read(words in vec(WORD, 0..20), lines in vec("(\\[\\PC{0,12}\\]|\\PC{0,20}=\\PC{0,20}|\\PC{0,30})", 0..20)) {
            let mut line = CommandLine::of(words.iter().map(String::as_str));
            line.options.extend(options::of_file(&lines.join("\n")));
            let told = line.told();
            prop_assert!(told.vcpus >= 1 && told.memory > Bytes::ZERO);
            prop_assert!(told.monitors.iter().all(|path| path.starts_with('/')));
        }
    }
}
