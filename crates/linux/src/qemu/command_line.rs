//! What a QEMU was told: its command line, and files that it read its options from (`-readconfig`, as Incus does).
//!
//! The process may have written over its own command line, so that all of this is hostile until parsed. What it says concerns its
//! own VM alone.

use std::collections::BTreeMap;

use homenode_units::{Bytes, CpuSet, NodeSet};
use serde_json::Value;

use crate::domain::{BalloonDevice, Cell, FreePages, HugePages, Locked, NumaTune, TOPOLOGY_DEVICE};

/// What QEMU gives a VM that is told nothing.
const MEMORY_DEFAULT: Bytes = Bytes(128 << 20);
/// More vCPUs than any hypervisor offers.
const VCPUS_MAX: u32 = 4096;

/// Whether this is the command line of a QEMU that may run a VM.
pub(super) fn is_qemu(program: &str) -> bool {
    let name = program.rsplit('/').next().unwrap_or(program);
    name.starts_with("qemu-system-") || matches!(name, "qemu-kvm" | "kvm")
}

/// One option with its parameters. What stands first without a name is under the empty one.
#[derive(Clone, Debug, PartialEq, Eq)]
struct QemuOption {
    name: String,
    parameters: BTreeMap<String, String>,
}

impl QemuOption {
    fn get(&self, key: &str) -> Option<&str> {
        self.parameters.get(key).map(String::as_str)
    }

    /// A parameter that may stand first without its name.
    fn implied(&self, key: &str) -> Option<&str> {
        self.get(key)
            .or_else(|| self.get("").filter(|text| !text.is_empty()))
    }

    fn is_on(&self, key: &str) -> bool {
        matches!(self.get(key), Some("on" | "yes" | "true"))
    }
}

/// All options of one QEMU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CommandLine {
    options: Vec<QemuOption>,
}

/// What is made of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub name: Option<String>,
    pub uuid: Option<String>,
    pub memory: Bytes,
    pub vcpus: u16,
    pub ram_sizes: Vec<Bytes>,
    pub cells: Vec<Cell>,
    pub numatune: Option<NumaTune>,
    pub huge_pages: Option<HugePages>,
    pub locked: Option<Locked>,
    pub encrypted: Option<String>,
    pub assigned_devices: Vec<String>,
    pub balloon: Option<BalloonDevice>,
    pub free_pages: FreePages,
    pub topology_socket: Option<String>,
    /// Sockets of its monitor.
    pub monitors: Vec<String>,
    /// Whether it runs no machine at all: a QEMU that is only asked what it can do.
    pub has_no_machine: bool,
}

impl CommandLine {
    /// Reads the words of a command line, the program's name aside. A word after an option belongs to it unless it begins
    /// with a dash.
    pub fn of<'a>(words: impl IntoIterator<Item = &'a str>) -> CommandLine {
        let mut options: Vec<QemuOption> = Vec::new();
        let mut is_open = false;
        for word in words {
            match word.strip_prefix('-').filter(|rest| !rest.is_empty()) {
                Some(name) => {
                    options.push(QemuOption {
                        name: name.strip_prefix('-').unwrap_or(name).to_owned(),
                        parameters: BTreeMap::new(),
                    });
                    is_open = true;
                }
                None if is_open => {
                    if let Some(option) = options.last_mut() {
                        option.parameters = parameters(word);
                    }
                    is_open = false;
                }
                None => {} // the image of a first disk
            }
        }
        CommandLine { options }
    }

    /// Files that it takes more options from.
    pub fn read_configs(&self) -> impl Iterator<Item = &str> {
        self.all("readconfig").filter_map(|option| option.get(""))
    }

    /// Takes in what such a file says: groups `[option "id"]` with lines `key = "value"`.
    pub fn take_in_config(&mut self, text: &str) {
        let mut option: Option<QemuOption> = None;
        for line in text.lines().map(str::trim) {
            if let Some(group) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                self.options.extend(option.take());
                let (name, id) = group.split_once(' ').unwrap_or((group, ""));
                let id = id.trim().trim_matches('"');
                let id = (!id.is_empty()).then(|| ("id".to_owned(), id.to_owned()));
                option = Some(QemuOption {
                    name: name.to_owned(),
                    parameters: id.into_iter().collect(),
                });
            } else if let Some((key, value)) = line.split_once('=').filter(|_| !line.starts_with('#'))
                && let Some(option) = &mut option
            {
                let value = value.trim().trim_matches('"');
                option.parameters.insert(key.trim().to_owned(), value.to_owned());
            }
        }
        self.options.extend(option);
    }

    fn all(&self, name: &str) -> impl Iterator<Item = &QemuOption> {
        self.options.iter().filter(move |option| option.name == name)
    }

    /// Objects whose type begins so.
    fn objects(&self, kind: &str) -> impl Iterator<Item = &QemuOption> {
        let is_such = move |option: &&QemuOption| {
            option
                .implied("qom-type")
                .is_some_and(|found| found.starts_with(kind))
        };
        self.all("object").filter(is_such)
    }

    /// Devices whose driver begins so.
    fn devices(&self, driver: &str) -> impl Iterator<Item = &QemuOption> {
        let is_such = move |option: &&QemuOption| {
            option
                .implied("driver")
                .is_some_and(|found| found.starts_with(driver))
        };
        self.all("device").filter(is_such)
    }

    /// What a host needs to know of it.
    pub fn told(&self) -> Told {
        let machine = || self.all("machine").chain(self.all("M"));
        let memory = self.memory();
        let vcpus = self.vcpus();
        let balloon = self.devices("virtio-balloon").next();
        let backends: Vec<&QemuOption> = self.objects("memory-backend-").collect();
        let size_of = |backend: &&QemuOption| backend.get("size").and_then(|size| bytes(size, 1));
        let cells = self.cells(&backends, vcpus);
        // Memory that is the machine's own, and not plugged into it.
        let is_main = |backend: &QemuOption| {
            let id = backend.get("id");
            let of_node = self.all("numa").any(|node| node.get("memdev") == id);
            id.is_some() && (of_node || machine().any(|machine| machine.get("memory-backend") == id))
        };
        let mut ram_sizes: Vec<Bytes> = backends.iter().filter_map(size_of).collect();
        if !backends.iter().any(|backend| is_main(backend)) {
            ram_sizes.insert(0, memory);
        }
        let in_huge_pages = |backend: &&QemuOption| {
            backend.is_on("hugetlb")
                || backend
                    .get("mem-path")
                    .is_some_and(|path| path.contains("hugepages"))
        };
        let secret = ["sev-", "tdx-"]
            .into_iter()
            .find_map(|kind| self.objects(kind).next());
        Told {
            name: self
                .all("name")
                .find_map(|name| name.implied("guest"))
                .map(str::to_owned),
            uuid: self.uuid().map(str::to_owned),
            memory: ram_sizes
                .iter()
                .fold(Bytes::ZERO, |sum, size| Bytes(sum.0.saturating_add(size.0)))
                .max(memory),
            vcpus,
            ram_sizes,
            cells,
            numatune: bound_to(&backends),
            huge_pages: backends
                .iter()
                .any(in_huge_pages)
                .then_some(HugePages { page_bytes: None }),
            locked: (self.all("overcommit").any(|option| option.is_on("mem-lock"))
                || self.all("realtime").any(|option| option.is_on("mlock")))
            .then_some(Locked),
            encrypted: secret
                .and_then(|object| object.implied("qom-type"))
                .map(str::to_owned),
            assigned_devices: self
                .devices("vfio-")
                .filter_map(|device| pci_address(device.get("host")?))
                .collect(),
            balloon: balloon.map(|_| BalloonDevice { stats_period_s: 0 }),
            free_pages: match balloon.is_some_and(|balloon| balloon.is_on("free-page-reporting")) {
                true => FreePages::Reported,
                false => FreePages::Kept,
            },
            topology_socket: self.topology_socket(),
            monitors: self.monitors(),
            has_no_machine: machine().any(|machine| machine.implied("type") == Some("none")),
        }
    }

    fn uuid(&self) -> Option<&str> {
        let given = self.all("uuid").find_map(|option| option.get(""));
        let system = |option: &&QemuOption| option.get("type") == Some("1");
        given.or_else(|| {
            self.all("smbios")
                .filter(system)
                .find_map(|option| option.get("uuid"))
        })
    }

    fn memory(&self) -> Bytes {
        let given = self
            .all("m")
            .chain(self.all("memory"))
            .filter_map(|option| option.implied("size"));
        given
            .filter_map(|size| bytes(size, 1 << 20))
            .last()
            .unwrap_or(MEMORY_DEFAULT)
    }

    fn vcpus(&self) -> u16 {
        let given = self.all("smp").chain(self.all("smp-opts")).last();
        let number = |key: &str| given.and_then(|option| option.get(key)?.parse::<u32>().ok());
        let cpus = given.and_then(|option| option.implied("cpus")?.parse::<u32>().ok());
        let product = ["sockets", "dies", "cores", "threads"]
            .into_iter()
            .filter_map(number)
            .fold(1u32, u32::saturating_mul);
        cpus.unwrap_or(product).clamp(1, VCPUS_MAX) as u16
    }

    /// Nodes as the guest sees them: `-numa node,cpus=0-1,memdev=ram0`, or `mem=` of old.
    fn cells(&self, backends: &[&QemuOption], vcpus: u16) -> Vec<Cell> {
        let nodes = self
            .all("numa")
            .filter(|option| option.implied("type") == Some("node"));
        nodes
            .map(|node| {
                let cpus: CpuSet = node
                    .get("cpus")
                    .and_then(|list| list.parse().ok())
                    .unwrap_or_default();
                let backend = backends
                    .iter()
                    .find(|backend| backend.get("id") == node.get("memdev"));
                let size = match backend.filter(|_| node.get("memdev").is_some()) {
                    Some(backend) => backend.get("size").and_then(|size| bytes(size, 1)),
                    None => node.get("mem").and_then(|size| bytes(size, 1 << 20)),
                };
                Cell {
                    vcpus: cpus
                        .iter()
                        .filter(|cpu| cpu.0 < u32::from(vcpus))
                        .map(|cpu| cpu.0 as u16)
                        .collect(),
                    memory_bytes: size.unwrap_or(Bytes::ZERO),
                }
            })
            .collect()
    }

    fn topology_socket(&self) -> Option<String> {
        let named = |device: &&QemuOption| device.get("id") == Some(TOPOLOGY_DEVICE);
        let device = self.devices("ivshmem-doorbell").find(named)?;
        let id = device.get("chardev")?;
        let chardev = self
            .all("chardev")
            .find(|chardev| chardev.get("id") == Some(id))?;
        chardev.get("path").map(str::to_owned)
    }

    fn monitors(&self) -> Vec<String> {
        let short = self.all("qmp").chain(self.all("qmp-pretty"));
        let short = short.filter_map(|option| option.get("")?.strip_prefix("unix:"));
        let is_control = |option: &&QemuOption| option.get("mode") == Some("control");
        let chardevs = self
            .all("mon")
            .filter(is_control)
            .filter_map(|option| option.implied("chardev"));
        let sockets = chardevs.filter_map(|id| {
            self.all("chardev")
                .find(|chardev| chardev.get("id") == Some(id))?
                .get("path")
        });
        short
            .chain(sockets)
            .filter(|path| path.starts_with('/'))
            .map(str::to_owned)
            .collect()
    }
}

/// Nodes that its memory was bound to when it started.
fn bound_to(backends: &[&QemuOption]) -> Option<NumaTune> {
    let bound = backends
        .iter()
        .filter(|backend| backend.get("policy") == Some("bind"));
    let nodes: Vec<NodeSet> = bound
        .filter_map(|backend| backend.get("host-nodes")?.parse().ok())
        .collect();
    let all = nodes.into_iter().reduce(|a, b| a.union(&b))?;
    Some(NumaTune {
        mode: "strict".to_owned(),
        nodes: Some(all),
    })
}

/// Parameters as QEMU reads them: `a,b=c`, in which `,,` is a comma of a value, or one object of JSON.
fn parameters(word: &str) -> BTreeMap<String, String> {
    if word.starts_with('{')
        && let Ok(Value::Object(object)) = serde_json::from_str(word)
    {
        let text = |value: Value| match value {
            Value::String(text) => Some(text),
            Value::Bool(is_on) => Some(if is_on { "on" } else { "off" }.to_owned()),
            Value::Number(number) => Some(number.to_string()),
            Value::Array(numbers) => {
                let numbers: Vec<String> = numbers.iter().map(Value::to_string).collect();
                Some(numbers.join(","))
            }
            Value::Null | Value::Object(_) => None,
        };
        return object
            .into_iter()
            .filter_map(|(key, value)| Some((key, text(value)?)))
            .collect();
    }
    let mut parameters = BTreeMap::new();
    for (at, part) in word.replace(",,", "\0").split(',').enumerate() {
        let part = part.replace('\0', ",");
        match part.split_once('=') {
            Some((key, value)) => parameters.insert(key.to_owned(), value.to_owned()),
            None if at == 0 => parameters.insert(String::new(), part),
            None => parameters.insert(part, "on".to_owned()),
        };
    }
    parameters
}

/// A size with QEMU's suffix; without one it is in units of `unit`.
fn bytes(text: &str, unit: u64) -> Option<Bytes> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor = match text[digits.len()..].to_ascii_uppercase().trim_end_matches("IB") {
        "" => unit,
        "B" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        "T" => 1 << 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(factor).map(Bytes)
}

/// `0000:3b:10.1`, with or without its domain.
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
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// What command lines are made of, and anything.
    const WORD: &str = "(-(m|smp|object|device|numa|name|machine|mon|chardev|qmp|smbios)|(size|cpus|qom-type|memdev|id|host|host-nodes|policy|type|path|chardev|mode)=[a-z0-9:./-]{0,12}(,(size|cpus|id|mem|memdev|node|path)=[a-z0-9GMK-]{0,9}){0,3}|memory-backend-ram,id=a,size=[0-9]{1,22}[KMGTP]?|\\PC{0,24})";

    /// As Proxmox 8 starts one (`qm showcmd 100`), shortened where nothing is read.
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
        assert_eq!(told.numatune.unwrap().nodes.unwrap().to_string(), "0-1");
        assert_eq!(told.free_pages, FreePages::Reported);
        assert_eq!(told.assigned_devices, ["0000:3b:00.0"]);
        assert_eq!(
            told.monitors,
            ["/var/run/qemu-server/100.qmp", "/var/run/qmeventd.sock"]
        );
        assert_eq!(
            (told.locked, told.encrypted, told.has_no_machine),
            (None, None, false)
        );
    }

    /// As Incus 6 starts one: nearly all of it is in a file.
    #[test]
    fn what_stands_in_a_file_of_options_counts_too() {
        let line = "-S -name v1 -uuid 6695eb01-f6a4-8304-79aa-97f2502e193f -daemonize -cpu host -readconfig /run/incus/v1/qemu.conf";
        let mut line = CommandLine::of(line.split(' '));
        assert_eq!(
            line.read_configs().collect::<Vec<_>>(),
            ["/run/incus/v1/qemu.conf"]
        );
        line.take_in_config(
            "# Machine\n[machine]\ntype = \"q35\"\n\n[memory]\nsize = \"1024M\"\n[smp-opts]\ncpus = \"3\"\n\
             [object \"mem0\"]\nqom-type = \"memory-backend-memfd\"\nsize = \"1024M\"\nshare = \"on\"\n\
             [numa]\ntype = \"node\"\nnodeid = \"0\"\nmemdev = \"mem0\"\n\
             [chardev \"monitor\"]\nbackend = \"socket\"\npath = \"/run/incus/v1/qemu.monitor\"\n\
             [mon]\nchardev = \"monitor\"\nmode = \"control\"\n[device \"qemu_balloon\"]\ndriver = \"virtio-balloon-pci\"\n",
        );
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
        /// A process writes over its own command line as it likes.
        #[test]
        fn any_words_and_any_file_are_read(words in vec(WORD, 0..20), lines in vec("(\\[\\PC{0,12}\\]|\\PC{0,20}=\\PC{0,20}|\\PC{0,30})", 0..20)) {
            let mut line = CommandLine::of(words.iter().map(String::as_str));
            line.take_in_config(&lines.join("\n"));
            let told = line.told();
            prop_assert!(told.vcpus >= 1 && told.memory > Bytes::ZERO);
            prop_assert!(told.monitors.iter().all(|path| path.starts_with('/')));
        }
    }
}
