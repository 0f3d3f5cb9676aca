//! Reads the files and parses their formats.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use homenode_units::{Bytes, BytesPerSec, CpuId, CpuSet, Id, IdSet, NodeId, NodeSet};

use super::types::{Told, ToldCache, ToldCpu, ToldDevice, ToldNode};
use super::{Extent, SysfsError};

/// Larger than any file read here. The longest is `status`, whose CPU masks take 2 KiB at 8192 CPUs.
const FILE_BYTES_MAX: u64 = 64 << 10;
const FILE_LIMIT: &str = "64 KiB";
/// Most entries of a directory. A `nodeN` directory links all of its memory blocks: 32768 of them at 4 TiB.
const DIR_ENTRIES_MAX: usize = 1 << 20;
const DIR_LIMIT: &str = "1048576 entries";
/// Most caches of one CPU.
const CACHES_MAX: u32 = 16;

const CPU_LIST: &str = "a list of CPUs such as `0-3,8`";
const NODE_LIST: &str = "a list of nodes such as `0-1`";
const CPU_DIR: &str = "sys/devices/system/cpu";
const NODE_DIR: &str = "sys/devices/system/node";
const PCI_DIR: &str = "sys/bus/pci/devices";
const GPU_DIR: &str = "proc/driver/nvidia/gpus";
/// Longest name of a host.
const NAME_MAX: usize = 64;

/// Reads everything below `root`, and on request also the part that this process may use.
pub(super) fn read(root: &Path, extent: Extent) -> Result<Told, SysfsError> {
    let cpu_dir = root.join(CPU_DIR);
    let cpus_online: CpuSet = list(&cpu_dir.join("online"), CPU_LIST)?.ok_or_else(|| {
        missing(
            &cpu_dir.join("online"),
            "a Linux /sys tree lists its online CPUs there",
        )
    })?;
    let cpus = cpus_online
        .iter()
        .map(|id| cpu(&cpu_dir, id))
        .collect::<Result<_, _>>()?;
    let status = root.join("proc/self/status");
    let status_text = match extent {
        Extent::WholeHost => None,
        Extent::ThisProcess => text(&status)?,
    };
    let status_line = |key| {
        status_text
            .as_deref()
            .and_then(|text| line_after(text, key))
            .map(|value| (&status, value))
    };
    let mut nodes = nodes(&root.join(NODE_DIR))?;
    if let Some(nodes) = &mut nodes {
        part(nodes, &cpu_dir);
    }
    Ok(Told {
        nodes_path: root.join(NODE_DIR),
        name: name(root)?,
        nodes,
        nodes_of_devices: nodes_of_devices(&root.join(GPU_DIR))?,
        nodes_possible: list(&root.join(NODE_DIR).join("possible"), NODE_LIST)?,
        memory: memory_total(&root.join("proc/meminfo"), "MemTotal:")?,
        cpus_present: list(&cpu_dir.join("present"), CPU_LIST)?,
        cpus_online,
        cpus_isolated: isolated(&cpu_dir.join("isolated"))?,
        cpus,
        devices: devices(&root.join(PCI_DIR))?,
        cpus_allowed: status_line("Cpus_allowed_list:")
            .map(|(path, list)| parse_list(path, list, CPU_LIST))
            .transpose()?,
        nodes_allowed: status_line("Mems_allowed_list:")
            .map(|(path, list)| parse_list(path, list, NODE_LIST))
            .transpose()?,
    })
}

/// Returns the CPUs that the kernel keeps free (`isolcpus=`, isolated cpuset partitions). Some kernels print a blank line if
/// there are none.
fn isolated(path: &Path) -> Result<CpuSet, SysfsError> {
    let listed = text(path)?.filter(|list| !list.trim().is_empty());
    let parsed = listed.map(|list| parse_list(path, &list, CPU_LIST));
    Ok(parsed.transpose()?.unwrap_or_default())
}

/// Returns the host's name. `sethostname(2)` accepts any bytes, so each character other than an ASCII letter, a digit or one of
/// `-_.()` becomes `-`.
fn name(root: &Path) -> Result<String, SysfsError> {
    let bytes = bytes(&root.join("proc/sys/kernel/hostname"))?.unwrap_or_default();
    let name = String::from_utf8_lossy(&bytes);
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.()".contains(c);
    let plain: String = name
        .trim()
        .chars()
        .map(|c| if is_plain(c) { c } else { '-' })
        .take(NAME_MAX)
        .collect();
    match plain.chars().any(|c| c.is_ascii_alphanumeric()) {
        true => Ok(plain),
        false => Ok("host".to_owned()),
    }
}

/// Assigns each shared CPU to one node. Under `numa=fake=` every node of a socket lists all of the socket's CPUs, and only
/// `cpuN/nodeM` tells which node a CPU belongs to.
fn part(nodes: &mut [ToldNode], cpu_dir: &Path) {
    let mut seen = CpuSet::new();
    let mut shared = CpuSet::new();
    for node in nodes.iter() {
        shared = shared.union(&seen.intersection(&node.cpus));
        seen = seen.union(&node.cpus);
    }
    for cpu in shared.iter() {
        let links = |node: &ToldNode| cpu_dir.join(format!("cpu{cpu}/node{}", node.id)).is_dir();
        let owns: Vec<bool> = nodes
            .iter()
            .map(|node| node.cpus.contains(cpu) && links(node))
            .collect();
        if owns.iter().filter(|owns| **owns).count() == 1 {
            let others = nodes.iter_mut().zip(owns).filter(|(_, owns)| !owns);
            others.for_each(|(node, _)| node.cpus.remove(cpu));
        }
    }
}

/// Returns the nodes whose memory belongs to a device. A GPU reports this node if its driver lends the kernel its memory.
fn nodes_of_devices(dir: &Path) -> Result<NodeSet, SysfsError> {
    if !dir.is_dir() {
        return Ok(NodeSet::new());
    }
    let mut nodes = NodeSet::new();
    for gpu in entries(dir)? {
        let status = text(&dir.join(gpu).join("numa_status"))?.unwrap_or_default();
        // A device whose memory is not lent to the kernel prints `-1`.
        let node = line_after(&status, "Node:").and_then(|node| node.parse().ok());
        node.map(NodeId).into_iter().for_each(|node| nodes.insert(node));
    }
    Ok(nodes)
}

fn nodes(dir: &Path) -> Result<Option<Vec<ToldNode>>, SysfsError> {
    if !dir.is_dir() {
        return Ok(None);
    }
    let ids: NodeSet = match list(&dir.join("online"), NODE_LIST)? {
        Some(ids) => ids,
        None => entries(dir)?
            .iter()
            .filter_map(|name| name.strip_prefix("node")?.parse().ok().map(NodeId))
            .collect(),
    };
    // In a container the directory may exist, but without its contents.
    if ids.is_empty() {
        return Ok(None);
    }
    ids.iter()
        .map(|id| node(dir, id))
        .collect::<Result<Vec<_>, _>>()
        .map(Some)
}

fn node(dir: &Path, id: NodeId) -> Result<ToldNode, SysfsError> {
    let path = dir.join(format!("node{id}"));
    let file = |name: &str| path.join(name);
    let cpus = list(&file("cpulist"), CPU_LIST)?
        .ok_or_else(|| missing(&file("cpulist"), "it lists the node's CPUs"))?;
    let memory = memory_total(&file("meminfo"), &format!("Node {id} MemTotal:"))?
        .ok_or_else(|| missing(&file("meminfo"), "it states the node's memory"))?;
    // Directory `access0` describes access from the nearest initiators, so its figures describe the memory itself.
    let megabytes: Option<u64> = number(&file("access0/initiators/read_bandwidth"), "a bandwidth in MB/s")?;
    let bytes = |mb: u64| {
        mb.checked_mul(1_000_000).map(BytesPerSec).ok_or_else(|| {
            malformed(
                &file("access0/initiators/read_bandwidth"),
                &mb.to_string(),
                "a bandwidth in MB/s",
            )
        })
    };
    let memory_bandwidth = megabytes.filter(|mb| *mb > 0).map(bytes).transpose()?;
    let latency: Option<u32> = number(&file("access0/initiators/read_latency"), "a latency in ns")?;
    Ok(ToldNode {
        id,
        cpus,
        memory,
        distances: distances(&file("distance"))?,
        memory_bandwidth,
        memory_ns: latency.filter(|ns| *ns > 0).map(f64::from),
        path,
    })
}

fn distances(path: &Path) -> Result<Option<Vec<u32>>, SysfsError> {
    let Some(text) = text(path)? else { return Ok(None) };
    let expected = "a row of distances such as `10 20`";
    let row: Result<Vec<u32>, _> = text.split_ascii_whitespace().map(str::parse).collect();
    match row {
        Ok(row) if !row.is_empty() => Ok(Some(row)),
        _ => Err(malformed(path, &text, expected)),
    }
}

fn cpu(dir: &Path, id: CpuId) -> Result<ToldCpu, SysfsError> {
    let path = dir.join(format!("cpu{id}"));
    if !path.is_dir() {
        return Err(missing(&path, "the kernel counts the CPU as online"));
    }
    // Both files have the same contents; kernels before 5.3 have only the one with the older name.
    let siblings = match list(&path.join("topology/core_cpus_list"), CPU_LIST)? {
        Some(siblings) => Some(siblings),
        None => list(&path.join("topology/thread_siblings_list"), CPU_LIST)?,
    };
    // If the firmware does not report the package, some kernels print -1, or -1 as an unsigned number.
    let package: Option<i64> = number(
        &path.join("topology/physical_package_id"),
        "a package number, or -1",
    )?;
    let package = package
        .and_then(|id| u32::try_from(id).ok())
        .filter(|id| *id != u32::MAX && *id != u32::from(u16::MAX));
    Ok(ToldCpu {
        id,
        siblings,
        package,
        llc: last_level_cache(&path.join("cache"), id)?,
        path,
    })
}

fn last_level_cache(dir: &Path, cpu: CpuId) -> Result<Option<ToldCache>, SysfsError> {
    let mut last: Option<ToldCache> = None;
    for index in 0..CACHES_MAX {
        let path = dir.join(format!("index{index}"));
        let Some(level) = number::<u32>(&path.join("level"), "a cache level, 1 to 4")? else {
            continue;
        };
        let kind = text(&path.join("type"))?;
        let kind = kind.as_deref().map(str::trim);
        if let Some(other) = kind.filter(|kind| !["Data", "Instruction", "Unified"].contains(kind)) {
            return Err(malformed(
                &path.join("type"),
                other,
                "`Data`, `Instruction` or `Unified`",
            ));
        }
        if kind == Some("Instruction") || last.as_ref().is_some_and(|cache| cache.level >= level) {
            continue;
        }
        last = Some(ToldCache {
            level,
            size: cache_size(&path.join("size"))?,
            // The kernel prints 0 either if the associativity is unknown or if the cache is fully associative.
            ways: number(&path.join("ways_of_associativity"), "a number of ways")?.filter(|ways| *ways > 0),
            line_bytes: number(&path.join("coherency_line_size"), "a line size in bytes")?,
            // A list that lacks the CPU itself is useless; a cache that a hypervisor hides has such a list.
            shared: shared_by(&path)?.filter(|cpus| cpus.contains(cpu)),
        });
    }
    Ok(last)
}

/// Returns the CPUs that share a cache. POWER kernels before 5.4 print them only as a mask.
fn shared_by(dir: &Path) -> Result<Option<CpuSet>, SysfsError> {
    if let Some(listed) = list(&dir.join("shared_cpu_list"), CPU_LIST)? {
        return Ok(Some(listed));
    }
    let path = dir.join("shared_cpu_map");
    let Some(text) = text(&path)? else { return Ok(None) };
    let word = |word: &str| u32::from_str_radix(word, 16).ok().filter(|_| word.len() <= 8);
    let words: Option<Vec<u32>> = text.trim().rsplit(',').map(word).collect();
    let words = words.ok_or_else(|| malformed(&path, &text, "a mask of CPUs such as `00000000,0000000f`"))?;
    let bits = words.iter().zip((0u32..).step_by(32)).flat_map(|(word, first)| {
        let is_set = move |bit: &u32| word >> bit & 1 == 1;
        (0..32).filter(is_set).map(move |bit| CpuId(first + bit))
    });
    Ok(Some(bits.collect()))
}

fn cache_size(path: &Path) -> Result<Option<Bytes>, SysfsError> {
    let Some(text) = text(path)? else { return Ok(None) };
    let kib = text
        .trim()
        .strip_suffix('K')
        .and_then(|digits| digits.parse::<u64>().ok());
    let bytes = kib.and_then(|kib| kib.checked_mul(1024));
    bytes
        .map(|bytes| Some(Bytes(bytes)))
        .ok_or_else(|| malformed(path, &text, "a size such as `8192K`"))
}

fn devices(dir: &Path) -> Result<Vec<ToldDevice>, SysfsError> {
    if !dir.is_dir() {
        return Ok(Vec::new());
    }
    let mut devices = Vec::new();
    for address in entries(dir)? {
        let path = dir.join(&address);
        let node: Option<i64> = number(&path.join("numa_node"), "a node number, or -1")?;
        // A device that was unplugged in the meantime no longer has a class.
        let (Some(node), Some(class)) = (node, text(&path.join("class"))?) else {
            continue;
        };
        let class = class.trim().to_owned();
        if !class
            .strip_prefix("0x")
            .is_some_and(|hex| (1..=8).contains(&hex.len()) && hex.bytes().all(|b| b.is_ascii_hexdigit()))
        {
            return Err(malformed(
                &path.join("class"),
                &class,
                "a class such as `0x020000`",
            ));
        }
        match node {
            -1 => {}
            0..=65_535 => devices.push(ToldDevice {
                address,
                class,
                node: node as u32,
            }),
            _ => {
                return Err(malformed(
                    &path.join("numa_node"),
                    &node.to_string(),
                    "a node number, or -1",
                ));
            }
        }
    }
    Ok(devices)
}

/// Returns the value of a line such as `Node 0 MemTotal:  255844 kB`.
fn memory_total(path: &Path, key: &str) -> Result<Option<Bytes>, SysfsError> {
    let Some(text) = text(path)? else { return Ok(None) };
    let value = line_after(&text, key);
    let kib = value.and_then(|value| value.strip_suffix("kB")?.trim().parse::<u64>().ok());
    let expected = format!("a text with the line `{key} 1024 kB`");
    kib.and_then(|kib| kib.checked_mul(1024))
        .map(|bytes| Some(Bytes(bytes)))
        .ok_or_else(|| malformed(path, value.unwrap_or(&text), &expected))
}

/// Returns the rest of the line that begins with `key`.
fn line_after<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines()
        .find_map(|line| line.strip_prefix(key))
        .map(str::trim)
}

fn number<T: std::str::FromStr>(path: &Path, expected: &str) -> Result<Option<T>, SysfsError> {
    let Some(text) = text(path)? else { return Ok(None) };
    text.trim()
        .parse()
        .map(Some)
        .map_err(|_| malformed(path, &text, expected))
}

fn list<T: Id>(path: &Path, expected: &str) -> Result<Option<IdSet<T>>, SysfsError> {
    let Some(text) = text(path)? else { return Ok(None) };
    parse_list(path, &text, expected).map(Some)
}

fn parse_list<T: Id>(path: &Path, text: &str, expected: &str) -> Result<IdSet<T>, SysfsError> {
    text.parse().map_err(|_| malformed(path, text, expected))
}

/// Returns the text of a file; `None` if the file does not exist. Some kernels end a list with a NUL, which is trimmed like white
/// space.
fn text(path: &Path) -> Result<Option<String>, SysfsError> {
    let Some(mut bytes) = bytes(path)? else {
        return Ok(None);
    };
    bytes
        .iter_mut()
        .filter(|byte| **byte == 0)
        .for_each(|byte| *byte = b' ');
    String::from_utf8(bytes)
        .map(Some)
        .map_err(|error| malformed(path, &String::from_utf8_lossy(error.as_bytes()), "text"))
}

/// Returns the contents of a file; `None` if the file does not exist.
fn bytes(path: &Path) -> Result<Option<Vec<u8>>, SysfsError> {
    let unreadable = |error: io::Error| SysfsError::Unreadable {
        path: path.to_owned(),
        kind: error.kind(),
    };
    let absent = |error: &io::Error| {
        matches!(
            error.kind(),
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
        )
    };
    match fs::metadata(path) {
        Err(error) if absent(&error) => return Ok(None),
        Err(error) => return Err(unreadable(error)),
        // Opening a pipe would block until its other end is opened.
        Ok(metadata) if !metadata.is_file() => {
            return Err(malformed(path, "a directory or a pipe", "a file"));
        }
        Ok(_) => {}
    }
    let file = match File::open(path) {
        Err(error) if absent(&error) => return Ok(None),
        file => file.map_err(unreadable)?,
    };
    let mut bytes = Vec::new();
    match file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes) {
        // The kernel returns this error if the file's object has just disappeared, such as a CPU that went offline.
        Err(error) if error.raw_os_error() == Some(NO_SUCH_DEVICE) => return Ok(None),
        read => read.map_err(unreadable)?,
    };
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(SysfsError::TooLarge {
            path: path.to_owned(),
            limit: FILE_LIMIT,
        });
    }
    Ok(Some(bytes))
}

/// `ENODEV`.
const NO_SUCH_DEVICE: i32 = 19;

/// Returns the names in a directory. They are sorted, so that nothing depends on the kernel's order.
fn entries(dir: &Path) -> Result<Vec<String>, SysfsError> {
    let unreadable = |error: io::Error| SysfsError::Unreadable {
        path: dir.to_owned(),
        kind: error.kind(),
    };
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(unreadable)? {
        names.push(
            entry
                .map_err(unreadable)?
                .file_name()
                .to_string_lossy()
                .into_owned(),
        );
        if names.len() > DIR_ENTRIES_MAX {
            return Err(SysfsError::TooLarge {
                path: dir.to_owned(),
                limit: DIR_LIMIT,
            });
        }
    }
    names.sort();
    Ok(names)
}

fn missing(path: &Path, expected: &'static str) -> SysfsError {
    SysfsError::Missing {
        path: path.to_owned(),
        expected,
    }
}

/// Returns an error that quotes the beginning of the contents, on one line.
pub(super) fn malformed(path: &Path, found: &str, expected: &str) -> SysfsError {
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    let mut short: String = found.trim().chars().map(plain).take(60).collect();
    if found.trim().chars().count() > 60 {
        short.push('…');
    }
    SysfsError::Malformed {
        path: PathBuf::from(path),
        found: short,
        expected: expected.to_owned(),
    }
}
