//! Records what the kernel's automatic balancing (`kernel.numa_balancing`) does with VMs on two nodes of two CPUs. The records
//! are data for the simulator's model, which `crates/twin/src/engine/autonuma/measured.rs` compares with them.
//!
//! To the host's kernel a VM is a process whose threads are its vCPUs. Each VM here has two vCPUs at work on separate memory:
//! one reads it line by line, the other writes a byte of each page. Balancing is off until a VM is in the state that the
//! set-up describes.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use homenode_testbed_guest::{Behaviour, Sweep};

use super::memory::Balancing;
use crate::inside::Inside;
use crate::inside::guest::{Cpus, Guest, GuestSpec};
use crate::outside::KEPT;

/// How long a set-up is watched, and the time between samples.
const TIME: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_secs(1);
/// CPUs per node, and all of the host's CPUs as a bit mask for libvirt.
const CPUS_PER_NODE: u32 = 2;
const ALL_CPUS: u8 = 0b1111;
/// Memory that each of a VM's vCPUs works on, and a VM's whole memory, in MiB.
const OWN_MIB: u32 = 64;
const VM_MIB: u64 = 256;
/// The counters read from `/proc/vmstat`.
const COUNTED: [&str; 6] = [
    "numa_pte_updates",
    "numa_huge_pte_updates",
    "numa_hint_faults",
    "numa_hint_faults_local",
    "numa_pages_migrated",
    "pgmigrate_fail",
];

/// The state of VMs when balancing begins.
struct SetUp {
    name: &'static str,
    /// Whether QEMU's memory for its guests is in transparent huge pages.
    huge: bool,
    vms: &'static [Vm],
}

/// A VM with two vCPUs.
struct Vm {
    /// The node of each vCPU at first; `None` if the kernel chooses.
    vcpus_on: Option<[u32; 2]>,
    /// The nodes that the VM's pages alternate between; empty if the pages stay where they were allocated.
    pages_on: &'static [u32],
    /// Whether the VM's vCPUs must stay on those nodes.
    pinned: bool,
    /// Whether the VM's memory is bound to node 0.
    bound: bool,
}

const LOCAL: Vm = Vm {
    vcpus_on: Some([0, 0]),
    pages_on: &[0],
    pinned: false,
    bound: false,
};
const REMOTE: Vm = Vm {
    pages_on: &[1],
    pinned: true,
    ..LOCAL
};
const ANYWHERE: Vm = Vm {
    vcpus_on: None,
    pages_on: &[],
    ..LOCAL
};

const ONE: [SetUp; 3] = [
    SetUp {
        name: "all local",
        huge: false,
        vms: &[LOCAL],
    },
    SetUp {
        name: "all remote, pinned",
        huge: false,
        vms: &[REMOTE],
    },
    SetUp {
        name: "spread over two nodes, pinned",
        huge: false,
        vms: &[Vm {
            vcpus_on: Some([0, 1]),
            pages_on: &[0, 1],
            ..REMOTE
        }],
    },
];
const TWO: [SetUp; 2] = [
    SetUp {
        name: "each on the other's memory",
        huge: false,
        vms: &[
            Vm {
                pages_on: &[1],
                ..LOCAL
            },
            Vm {
                vcpus_on: Some([1, 1]),
                ..LOCAL
            },
        ],
    },
    SetUp {
        name: "a full host",
        huge: false,
        vms: &[ANYWHERE, ANYWHERE],
    },
];
const MEMORY: [SetUp; 2] = [
    SetUp {
        name: "memory bound elsewhere",
        huge: false,
        vms: &[Vm {
            vcpus_on: Some([1, 1]),
            pages_on: &[],
            bound: true,
            ..REMOTE
        }],
    },
    SetUp {
        name: "all remote, pinned, in huge pages",
        huge: true,
        vms: &[REMOTE],
    },
];

/// The host's setting of transparent huge pages, reset to `never` when dropped. `khugepaged` must not run, as it has locked up
/// the emulated host; so huge pages form only when memory is first touched.
struct HugePages;

impl HugePages {
    const PATH: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

    fn on() -> anyhow::Result<HugePages> {
        fs::write(HugePages::PATH, "madvise").with_context(|| format!("cannot write {}", HugePages::PATH))?;
        Ok(HugePages)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = fs::write(HugePages::PATH, "never");
    }
}

/// Returns the first number after a key in one of the kernel's files.
fn number_of(path: &str, key: &str) -> anyhow::Result<u64> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    let mut fields = text.split_whitespace().skip_while(|field| *field != key).skip(1);
    let value = fields.find(|field| *field != ":");
    Ok(value.with_context(|| format!("{path} has no {key}"))?.parse()?)
}

/// Returns the kernel's counts, in the order of [`COUNTED`].
fn counts() -> anyhow::Result<Vec<u64>> {
    let counts = COUNTED.iter().map(|name| number_of("/proc/vmstat", name));
    counts.collect()
}

/// Returns the free memory of a node in MiB. The kernel moves nothing to a node that is nearly full, and then scans less
/// often.
fn free_mib(node: u32) -> anyhow::Result<u64> {
    let path = format!("/sys/devices/system/node/node{node}/meminfo");
    Ok(number_of(&path, "MemFree:")? >> 10)
}

/// Returns how many times the kernel has scanned a guest's memory.
fn passes(guest: &Guest) -> anyhow::Result<u64> {
    number_of(&format!("/proc/{}/sched", guest.process.0), "mm->numa_scan_seq")
}

/// Returns how much of a guest's memory is in transparent huge pages, in MiB.
fn in_huge_pages(guest: &Guest) -> anyhow::Result<u64> {
    let path = format!("/proc/{}/smaps_rollup", guest.process.0);
    Ok(number_of(&path, "AnonHugePages:")? >> 10)
}

/// The counts of a VM while it was watched.
struct Watched {
    passes_before: u64,
    /// For each pass, the seconds from the start until it was seen to have ended.
    ended: Vec<f64>,
    on: BTreeMap<u32, u32>,
    node_changes: u32,
    /// Number of samples in which both vCPUs were on one node.
    together: u32,
    looks: u32,
    ran_ns: u64,
    pages_before: BTreeMap<u32, u64>,
    huge_mib: u64,
}

impl Watched {
    fn begin(guest: &Guest) -> anyhow::Result<Watched> {
        Ok(Watched {
            passes_before: passes(guest)?,
            ended: Vec::new(),
            on: nodes(guest)?,
            node_changes: 0,
            together: 0,
            looks: 0,
            ran_ns: ran_ns(guest)?,
            pages_before: guest.pages_per_node()?,
            huge_mib: in_huge_pages(guest)?,
        })
    }

    fn look(&mut self, guest: &Guest, at: f64) -> anyhow::Result<()> {
        let seen = passes(guest)? - self.passes_before;
        self.ended.resize(seen as usize, at);
        let on = nodes(guest)?;
        let changed = on
            .iter()
            .filter(|(vcpu, node)| self.on.get(vcpu) != Some(node))
            .count();
        self.node_changes += changed as u32;
        let mut places: Vec<&u32> = on.values().collect();
        places.dedup();
        self.together += u32::from(places.len() == 1);
        self.looks += 1;
        self.on = on;
        Ok(())
    }
}

/// Returns the node on which each vCPU ran last.
fn nodes(guest: &Guest) -> anyhow::Result<BTreeMap<u32, u32>> {
    let cpus = guest.process.vcpu_last_cpu()?;
    Ok(cpus
        .into_iter()
        .map(|(vcpu, cpu)| (vcpu, cpu / CPUS_PER_NODE))
        .collect())
}

fn ran_ns(guest: &Guest) -> anyhow::Result<u64> {
    let times = guest.process.vcpu_schedstat()?;
    Ok(times.values().map(|(run, _)| run).sum())
}

/// Returns how many times each guest has walked its memory.
fn walked(guests: &[Guest]) -> anyhow::Result<Vec<u64>> {
    let passes = guests.iter().map(|guest| Ok(guest.progress()?.1));
    passes.collect()
}

fn spec(number: usize, vm: &Vm) -> GuestSpec {
    let doing = Behaviour {
        touch_mib: OWN_MIB,
        sweep: Sweep::ReadWrite,
        passes: u32::MAX,
        walk_kib: OWN_MIB << 10,
        ..Behaviour::idle()
    };
    let cpus = |node: u32| format!("{}-{}", node * CPUS_PER_NODE, (node + 1) * CPUS_PER_NODE - 1);
    let mut spec = GuestSpec::new(&format!("vm{number}")).vcpus(2).doing(doing);
    spec.memory_mib = VM_MIB;
    if let Some(nodes) = vm.vcpus_on {
        spec = spec.cpus(Cpus::Pinned(nodes.map(cpus).to_vec()));
    }
    if vm.bound {
        spec = spec.nodes("strict", "0");
    }
    spec
}

/// Runs the VMs of a set-up under the kernel's balancing, and adds the counts to a table.
fn watch(inside: &Inside, set_up: &SetUp, table: &mut String) -> anyhow::Result<()> {
    let huge = set_up.huge.then(HugePages::on).transpose()?;
    let specs: Vec<GuestSpec> = set_up
        .vms
        .iter()
        .enumerate()
        .map(|(number, vm)| spec(number, vm))
        .collect();
    let guests = inside.create_at_once(&specs)?;
    for (guest, vm) in guests.iter().zip(set_up.vms) {
        guest.wait_ready()?;
        if !vm.pages_on.is_empty() {
            guest.scatter(vm.pages_on)?;
        }
        if !vm.pinned {
            guest.run_on(ALL_CPUS)?;
        }
    }
    drop(huge);
    let mut watched: Vec<Watched> = guests.iter().map(Watched::begin).collect::<Result<_, _>>()?;
    let walked_before = walked(&guests)?;
    let free = [free_mib(0)?, free_mib(1)?];
    let (before, begin) = (counts()?, Instant::now());
    let balancing = Balancing::on()?;
    while begin.elapsed() < TIME {
        std::thread::sleep(LOOK);
        for (guest, watched) in guests.iter().zip(&mut watched) {
            watched.look(guest, begin.elapsed().as_secs_f64())?;
        }
    }
    let (after, seconds) = (counts()?, begin.elapsed().as_secs_f64());
    drop(balancing);
    for ((guest, before), after) in guests.iter().zip(walked_before).zip(walked(&guests)?) {
        // An emulated guest sometimes hangs, and its figures are then worthless.
        ensure!(
            after > before,
            "guest {} does not walk its memory",
            guest.spec.name
        );
    }
    let _ = writeln!(
        table,
        "\n[[setup]]\nname = \"{}\"\nseconds = {seconds:.1}\nfree_mib_before = {free:?}",
        set_up.name
    );
    for ((name, before), after) in COUNTED.iter().zip(before).zip(after) {
        let _ = writeln!(table, "{} = {}", name.trim_start_matches("numa_"), after - before);
    }
    for ((guest, vm), watched) in guests.iter().zip(set_up.vms).zip(&watched) {
        let on = |pages: &BTreeMap<u32, u64>| [0, 1].map(|node: u32| pages.get(&node).copied().unwrap_or(0));
        let ran_s = (ran_ns(guest)? - watched.ran_ns) as f64 / 1e9;
        let ended: Vec<String> = watched.ended.iter().map(|at| format!("{at:.0}")).collect();
        let vcpus_on = vm
            .vcpus_on
            .map_or(String::new(), |nodes| format!("vcpus_on = {nodes:?}\n"));
        let _ = writeln!(
            table,
            "[[setup.vm]]\n{vcpus_on}pages_on = {:?}\npinned = {}\nbound = {}\nran_s = {ran_s:.1}\n\
             passes_ended_s = [{}]\nhuge_mib = {}\npages_before = {:?}\npages_after = {:?}\n\
             vcpu_node_changes = {}\nlooks = {}\nlooks_together = {}",
            vm.pages_on,
            vm.pinned,
            vm.bound,
            ended.join(", "),
            watched.huge_mib,
            on(&watched.pages_before),
            on(&guest.pages_per_node()?),
            watched.node_changes,
            watched.looks,
            watched.together,
        );
    }
    inside.note(table.rsplit("[[setup]]").next().unwrap_or_default().to_owned());
    for guest in &guests {
        inside.destroy(guest)?;
    }
    Ok(())
}

/// Records set-ups with one VM.
pub(super) fn one(inside: &mut Inside) -> anyhow::Result<()> {
    measure(inside, "one", &ONE)
}

/// Records set-ups with two VMs.
pub(super) fn two(inside: &mut Inside) -> anyhow::Result<()> {
    measure(inside, "two", &TWO)
}

/// Records set-ups with one VM whose memory is bound, or in transparent huge pages.
pub(super) fn memory(inside: &mut Inside) -> anyhow::Result<()> {
    measure(inside, "memory", &MEMORY)
}

/// Runs set-ups, and saves the table of their counts.
fn measure(inside: &Inside, name: &str, set_ups: &[SetUp]) -> anyhow::Result<()> {
    let release =
        fs::read_to_string("/proc/sys/kernel/osrelease").context("cannot read the kernel's release")?;
    let release = release.trim();
    let version = release.split('.').take(2).collect::<Vec<_>>().join(".");
    let mut table = format!(
        "# What the kernel's own balancing (kernel.numa_balancing) did with VMs of two vCPUs, each at work on {OWN_MIB} MiB of its own,\n\
         # on two nodes of two CPUs: data. Counts are the kernel's (/proc/vmstat), of all VMs of a set-up; pages are of 4 KiB.\n\
         # docs/MEMORY.md shows it beside the twin. Made by the testbed; differs a little from run to run:\n\
         #   make testbed CASE=balancing, then the set-ups of target/testbed/balancing-{version}-*.toml into balancing-{version}.toml\n\
         version = 1\nkernel = \"{release}\"\nown_mib = {OWN_MIB}\nvm_mib = {VM_MIB}\n"
    );
    for set_up in set_ups {
        watch(inside, set_up, &mut table).with_context(|| format!("set-up '{}'", set_up.name))?;
    }
    let kept = inside.dir().join(KEPT);
    fs::create_dir_all(&kept).with_context(|| format!("cannot create {}", kept.display()))?;
    let file = format!("balancing-{version}-{name}.toml");
    fs::write(kept.join(&file), table).with_context(|| format!("cannot write {file}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_in_each_kind_of_file() -> anyhow::Result<()> {
        for (path, key) in [
            ("/proc/vmstat", "pgfault"),
            ("/proc/self/smaps_rollup", "Rss:"),
            ("/proc/self/sched", "se.load.weight"),
        ] {
            ensure!(number_of(path, key)? > 0, "{key} of {path} is 0");
        }
        let missing = number_of("/proc/vmstat", "no_such_count");
        ensure!(missing.is_err_and(|error| error.to_string().contains("no_such_count")));
        Ok(())
    }
}
