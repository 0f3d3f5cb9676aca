//! VMs that libvirt does not manage. One QEMU is started like Proxmox starts it, in its own scope below `qemu.slice`, and one
//! as in a pod of KubeVirt, with its own mount and PID namespaces and unnamed threads.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use homenode_host::conformance::{CHECKS, Verdict};
use homenode_host::{Act, CpuQuota, Host as _, Limit, Outcome};
use homenode_kvm::{KvmHost, Vms};
use homenode_testbed_guest::{Behaviour, MARKER_READY};
use homenode_undo::Options;
use homenode_undo::RealHost as _;
use homenode_units::{Ns, VmId};

use super::agent::{SOON, start_acting, stop};
use crate::inside::Inside;
use crate::inside::acts::{commit, find};
use crate::inside::device::Device;
use crate::inside::guest::GuestSpec;
use crate::inside::libvirtd::{IMAGE_DIR, RUN_DIR};
use crate::inside::pages::move_range;
use crate::inside::proc::Process;
use crate::inside::process::Program;
use crate::inside::wait::{Look, wait_until};
use crate::outside::emulated::{DEVICE_NODE, NODES};

/// Directory of the operator's settings for VMs.
const SETTINGS: &str = "/etc/homenode/vms";
const CGROUPS: &str = "/sys/fs/cgroup";

/// Checks that need what an emulated host lacks, or what a VM without libvirt lacks.
const NOT_HERE: [&str; 3] = [
    "a part of caches or bandwidth is seen, can be renewed and lifted, and ends with its lease",
    "a virtual node's memory moves within the budget, and no other's with it",
    "what a guest is told is seen, with a new sequence each time, and stays until it is told otherwise",
];

/// A guest that this process started; it ends when dropped.
struct Guest {
    spec: GuestSpec,
    child: Child,
    process: Process,
    group: PathBuf,
}

/// How a guest is started.
#[derive(Clone, Copy, PartialEq, Eq)]
enum As {
    /// The guest has named threads, and a monitor that every process can reach.
    Proxmox,
    /// The guest has its own namespaces.
    Pod,
}

impl Guest {
    /// Starts a guest in its own cgroup, and waits until it is ready.
    fn start(inside: &Inside, spec: GuestSpec, how: As) -> anyhow::Result<Guest> {
        Guest::start_with(inside, spec, how, "")
    }

    /// Like [`start`], with further options for QEMU.
    fn start_with(inside: &Inside, spec: GuestSpec, how: As, options: &str) -> anyhow::Result<Guest> {
        let group = own_group(&spec.name)?;
        let monitor = match how {
            As::Proxmox => "/var/run/qemu-server".to_owned(),
            As::Pod => inside.dir().join("run").display().to_string(),
        };
        fs::create_dir_all(&monitor)?;
        fs::create_dir_all(RUN_DIR)?;
        let log = spec.console_log();
        let name = match how {
            As::Proxmox => format!("{},debug-threads=on", spec.name),
            As::Pod => spec.name.clone(),
        };
        // The command line that `qm showcmd` prints, without options that this guest does not need, and without `-id`, which
        // only Proxmox' QEMU has.
        let qemu = format!(
            "exec /usr/bin/qemu-system-x86_64 -name '{name}' -no-shutdown \
             -chardev 'socket,id=qmp,path={monitor}/{}.qmp,server=on,wait=off' -mon 'chardev=qmp,mode=control' \
             -smbios 'type=1,uuid={}' -smp '{},sockets=1,cores={},maxcpus={}' -nodefaults -display none -cpu host -m {} \
             -machine 'type=pc,accel=kvm' -device 'virtio-balloon-pci,id=balloon0,free-page-reporting=on' \
             -kernel {IMAGE_DIR}/vmlinux -initrd {IMAGE_DIR}/initramfs -append 'console=ttyS0 quiet panic=0 {}' -no-reboot \
             -chardev 'file,id=console,path={}' -serial chardev:console {options}",
            spec.name,
            uuid(&spec.name),
            spec.vcpus,
            spec.vcpus,
            spec.vcpus,
            spec.memory_mib,
            spec.orders.to_cmdline(),
            log.display()
        );
        let join = format!("echo $$ > {}/cgroup.procs && ", group.display());
        let script = match how {
            As::Proxmox => format!("{join}{qemu}"),
            As::Pod => format!(
                "{join}exec unshare --mount --pid --fork --kill-child --mount-proc sh -c \"mount -t tmpfs tmpfs {monitor} && {qemu}\""
            ),
        };
        let _ = fs::remove_file(&log);
        let mut child = Command::new("sh")
            .arg("-c")
            .arg(script)
            .stdin(Stdio::null())
            .spawn()?;
        let process = wait_until("its QEMU", SOON, || {
            if let Some(status) = child.try_wait()? {
                return Err(anyhow!("QEMU ended at once: {status}"));
            }
            Ok(qemu_of(&spec.name)?.map_or_else(|| Look::NotYet("none".to_owned()), Look::Done))
        })?;
        let mut guest = Guest {
            spec,
            child,
            process,
            group,
        };
        wait_until("the guest to be ready", Duration::from_secs(120), || {
            if let Some(status) = guest.child.try_wait()? {
                return Err(anyhow!("QEMU ended: {status}"));
            }
            let said = fs::read(guest.spec.console_log()).unwrap_or_default();
            let said = String::from_utf8_lossy(&said).into_owned();
            Ok(match said.contains(MARKER_READY) {
                true => Look::Done(()),
                false => Look::NotYet(said),
            })
        })?;
        inside.note(format!(
            "{} is ready, process {}",
            guest.spec.name, guest.process.0
        ));
        Ok(guest)
    }

    fn scatter(&self) -> anyhow::Result<()> {
        let ram = self.process.guest_ram(self.spec.memory_mib << 20)?;
        move_range(self.process.0, ram.begin, ram.bytes, |page| {
            (page % u64::from(NODES)) as u32
        })
        .map(drop)
    }

    fn pages(&self) -> anyhow::Result<BTreeMap<u32, u64>> {
        let ram = self.process.guest_ram(self.spec.memory_mib << 20)?;
        Ok(self.process.mapping_nodes(ram)?.0)
    }

    fn quota(&self) -> anyhow::Result<String> {
        let path = self.group.join("cpu.max");
        Ok(fs::read_to_string(&path)
            .with_context(|| path.display().to_string())?
            .trim()
            .to_owned())
    }

    /// Returns the CPUs that each of the guest's threads may run on.
    fn affinities(&self) -> anyhow::Result<BTreeMap<u32, String>> {
        let allowed = |tid: &u32| {
            let status = fs::read_to_string(format!("/proc/{}/task/{tid}/status", self.process.0)).ok()?;
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
            Some((*tid, line.trim().to_owned()))
        };
        Ok(self.process.threads()?.keys().filter_map(allowed).collect())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = fs::write(self.group.join("cgroup.kill"), "1");
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a UUID that depends only on the name.
fn uuid(name: &str) -> String {
    let sum: u32 = name.bytes().map(u32::from).sum();
    format!("6695eb01-f6a4-8304-79aa-{sum:012x}")
}

/// Makes `qemu.slice/NAME.scope` as systemd does for a scope with a weight, without control over the CPUs that it may use.
fn own_group(name: &str) -> anyhow::Result<PathBuf> {
    let slice = Path::new(CGROUPS).join("qemu.slice");
    let group = slice.join(format!("{name}.scope"));
    fs::create_dir_all(&group)?;
    for parent in [Path::new(CGROUPS), &slice] {
        let path = parent.join("cgroup.subtree_control");
        fs::write(&path, "+cpu").with_context(|| path.display().to_string())?;
    }
    Ok(group)
}

/// Finds the QEMU of the guest of this name.
fn qemu_of(name: &str) -> anyhow::Result<Option<Process>> {
    let wanted = uuid(name);
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<u32>().ok())
        else {
            continue;
        };
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        if line.starts_with("/usr/bin/qemu-system-x86_64") && line.contains(&wanted) {
            return Ok(Some(Process(pid)));
        }
    }
    Ok(None)
}

fn spec(name: &str, busy: Behaviour) -> GuestSpec {
    GuestSpec::new(name).doing(busy)
}

fn ordinary() -> Behaviour {
    Behaviour::busy(1).with_duty(30).with_touch(40)
}

/// Moves the guest to another cgroup while the agent holds it to a quota. The old cgroup's quota is restored, and the new
/// cgroup is left alone.
fn moved_while_held(inside: &mut Inside, host: &mut KvmHost, vm: VmId, guest: &Guest) -> anyhow::Result<()> {
    let limit = Limit::CpuQuota(CpuQuota::of(0.3, Ns::from_millis(100)));
    let lease_ns = Ns::from_secs(60);
    let outcomes = commit(host, vm, Act::Limit { limit, lease_ns })?;
    ensure!(
        outcomes == [Outcome::Done],
        "expected the VM's quota to be set, saw {outcomes:?}"
    );
    let held = guest.quota()?;
    let other = own_group("elsewhere")?;
    fs::write(other.join("cgroup.procs"), guest.process.0.to_string())?;
    wait_until("its old cgroup to be restored", SOON, || {
        host.sample()?;
        let now = guest.quota()?;
        Ok(match now.starts_with("max ") {
            true => Look::Done(()),
            false => Look::NotYet(now),
        })
    })?;
    let there = fs::read_to_string(other.join("cpu.max"))?;
    ensure!(
        there.starts_with("max "),
        "the guest's new cgroup was changed: {there}"
    );
    let said = host.take_notices();
    ensure!(
        said.iter()
            .any(|notice| notice.contains("was moved out of its cgroup")),
        "expected a notice of the changed cgroup, saw {said:?}"
    );
    inside.note(format!("held to {held}, moved, and restored: {}", guest.quota()?));
    fs::write(guest.group.join("cgroup.procs"), guest.process.0.to_string())?;
    Ok(())
}

/// Runs every check of the host contract, on a guest started like Proxmox starts it.
pub(super) fn conforming(inside: &mut Inside) -> anyhow::Result<()> {
    let guest = Guest::start(inside, spec("proxmox", ordinary()), As::Proxmox)?;
    let before = guest.affinities()?;
    let machine = homenode_machine_files::sysfs::read(Path::new("/"))?;
    let options = Options {
        state_dir: inside.dir().join("state"),
        ..Options::new(machine)
    };
    let mut host = KvmHost::connect(&Vms::Qemu, options)?;
    let vm = find(&mut host, "proxmox")?.id;
    let mut skipped = Vec::new();
    for check in CHECKS {
        match (check.run)(&mut host, vm).map_err(|error| anyhow!("{}: {error}", check.name))? {
            Verdict::Passed => inside.note(check.name),
            Verdict::Skipped(why) => {
                inside.note(format!("skipped: {}: {why}", check.name));
                skipped.push(check.name);
            }
        }
    }
    moved_while_held(inside, &mut host, vm, &guest)?;
    let failures = host.restore().failures;
    ensure!(
        failures.is_empty(),
        "expected every VM restored, saw {failures:?}"
    );
    let after = guest.affinities()?;
    let same = before
        .iter()
        .all(|(tid, cpus)| after.get(tid).is_none_or(|now| now == cpus));
    ensure!(same, "expected the affinities {before:?}, saw {after:?}");
    ensure!(
        guest.quota()?.starts_with("max "),
        "a quota is left: {}",
        guest.quota()?
    );
    skipped.sort_unstable();
    ensure!(
        skipped == NOT_HERE,
        "expected these checks to be skipped: {NOT_HERE:?}, saw {skipped:?}"
    );
    Ok(())
}

fn start_agent(inside: &Inside) -> anyhow::Result<Program> {
    start_acting(inside, "qemu", &["--policies", "tavo"])
}

/// Waits until all of a guest's threads run only on this node's CPU, and its memory is on the node.
fn wait_home(inside: &Inside, guest: &Guest, node: u32) -> anyhow::Result<()> {
    let begun = Instant::now();
    wait_until(
        &format!("{} to be at home on node {node}", guest.spec.name),
        Duration::from_secs(240),
        || {
            let pages = guest.pages()?;
            let (there, all): (u64, u64) = (pages.get(&node).copied().unwrap_or(0), pages.values().sum());
            let threads = guest.affinities()?;
            let pinned = threads.values().filter(|cpus| **cpus == node.to_string()).count();
            Ok(match there * 100 >= all * 98 && pinned == threads.len() {
                true => Look::Done(()),
                false => Look::NotYet(format!("{pages:?}, threads on {threads:?}")),
            })
        },
    )?;
    inside.note(format!(
        "{} at home after {:.1} s",
        guest.spec.name,
        begun.elapsed().as_secs_f64()
    ));
    Ok(())
}

/// Makes the settings directory empty, as an earlier case may have left files.
fn no_settings() -> anyhow::Result<()> {
    let _ = fs::remove_dir_all(SETTINGS);
    Ok(fs::create_dir_all(SETTINGS)?)
}

/// Operators choose homes for two guests, in files. Checks that both guests come home, with their threads and scattered memory,
/// and that everything is restored when the agent is killed.
pub(super) fn homes(inside: &mut Inside) -> anyhow::Result<()> {
    no_settings()?;
    let guests = [
        Guest::start(inside, spec("proxmox", ordinary()), As::Proxmox)?,
        Guest::start(inside, spec("pod", ordinary()), As::Pod)?,
    ];
    let homes = [2, 1];
    let result = (|| {
        for (guest, home) in guests.iter().zip(homes) {
            fs::write(
                format!("{SETTINGS}/{}.toml", guest.spec.name),
                format!("home = {home}\n"),
            )?;
            guest.scatter()?;
        }
        let before: Vec<_> = guests.iter().map(Guest::affinities).collect::<Result<_, _>>()?;
        let mut agent = start_agent(inside)?;
        for (guest, home) in guests.iter().zip(homes) {
            wait_home(inside, guest, home)?;
        }
        agent.kill()?;
        wait_until("the guard to restore them", Duration::from_secs(240), || {
            let now: Vec<_> = guests.iter().map(Guest::affinities).collect::<Result<_, _>>()?;
            let is_as_before = |(was, is): (&BTreeMap<u32, String>, &BTreeMap<u32, String>)| {
                was.iter()
                    .all(|(tid, cpus)| is.get(tid).is_none_or(|now| now == cpus))
            };
            Ok(match before.iter().zip(&now).all(is_as_before) {
                true => Look::Done(()),
                false => Look::NotYet(format!("{now:?}, it was {before:?}")),
            })
        })?;
        // Starts another agent, with a misspelt settings file for one guest: the agent watches that guest but does not touch
        // it.
        fs::write(format!("{SETTINGS}/pod.toml"), "hoem = 1\n")?;
        let agent = start_agent(inside)?;
        wait_home(inside, &guests[0], 2)?;
        let left = guests[1].affinities()?;
        ensure!(
            left.values().all(|cpus| cpus == "0-3"),
            "expected the misspelt guest untouched, saw {left:?}"
        );
        stop(agent)
    })();
    let _ = fs::remove_dir_all(SETTINGS);
    result
}

/// Size of a huge page.
const HUGE_BYTES: u64 = 2 << 20;

/// Reserves huge pages on a node, just enough for a guest.
fn reserve_huge_pages(node: u32, memory_mib: u64) -> anyhow::Result<()> {
    let path = format!("/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages");
    let count = (memory_mib << 20) / HUGE_BYTES;
    fs::write(&path, count.to_string()).with_context(|| path.clone())?;
    let got = fs::read_to_string(&path)?;
    ensure!(
        got.trim() == count.to_string(),
        "node {node} has {} huge pages of {count}",
        got.trim()
    );
    Ok(())
}

/// Confines all threads of a process to these CPUs.
fn taskset(cpus: &str, pid: u32) -> anyhow::Result<()> {
    let mut command = Command::new("taskset");
    let status = command
        .args(["--all-tasks", "--cpu-list", "--pid", cpus])
        .arg(pid.to_string())
        .stdout(Stdio::null())
        .status()?;
    ensure!(status.success(), "taskset {cpus} {pid}: {status}");
    Ok(())
}

/// Waits until the agent has confined a guest to a node, and has said why the guest's memory, all of it on node 0, stays
/// there.
fn wait_left(agent: &Program, guest: &Guest, node: u32, why: &str) -> anyhow::Result<()> {
    let name = &guest.spec.name;
    let what = format!("{name} to run on node {node}, and a word on its memory");
    wait_until(&what, SOON, || {
        let threads = guest.affinities()?;
        let pinned = threads.values().filter(|cpus| **cpus == node.to_string()).count();
        let said = agent
            .lines()
            .into_iter()
            .filter(|line| line.contains(name.as_str()));
        let said: Vec<String> = said.collect();
        let is_said = said.iter().any(|line| line.contains(why));
        Ok(match is_said && pinned == threads.len() {
            true => Look::Done(()),
            false => Look::NotYet(format!("threads on {threads:?}, said: {said:?}")),
        })
    })?;
    let pages = guest.pages()?;
    ensure!(
        pages.keys().eq([&0]),
        "expected the memory of {name} on node 0, saw {pages:?}"
    );
    Ok(())
}

/// Checks that locked memory, memory that a device pins through VFIO, and huge pages of a pool stay where they are, and that the
/// agent says why, while the vCPUs go home. Huge pages come home once the operator lets them move and reserves some on the home
/// node.
pub(super) fn unmovable(inside: &mut Inside) -> anyhow::Result<()> {
    let device = Device::take()?;
    let memory_mib = spec("", ordinary()).memory_mib;
    reserve_huge_pages(0, memory_mib)?;
    let huge = format!(
        "-object 'memory-backend-memfd,id=ram-node0,size={memory_mib}M,hugetlb=on,hugetlbsize=2M,prealloc=on' \
         -numa 'node,nodeid=0,cpus=0,memdev=ram-node0'"
    );
    let kinds = [
        ("locked", "-overcommit mem-lock=on".to_owned(), 1, "is locked"),
        (
            "given",
            format!("-device 'vfio-pci,host={}'", device.address),
            DEVICE_NODE,
            "a device assigned through VFIO pins all of its memory",
        ),
        (
            "huge",
            huge,
            3,
            "of its nodes' pools, which other programs may rely on",
        ),
    ];
    no_settings()?;
    let mut guests = Vec::new();
    let result = (|| {
        for (name, options, home, _) in &kinds {
            // QEMU inherits these CPUs, so all of its memory comes from node 0.
            taskset("0", std::process::id())?;
            let guest = Guest::start_with(inside, spec(name, ordinary()), As::Proxmox, options);
            taskset("0-3", std::process::id())?;
            let guest = guest?;
            taskset("0-3", guest.process.0)?;
            guests.push(guest);
            fs::write(format!("{SETTINGS}/{name}.toml"), format!("home = {home}\n"))?;
        }
        let agent = start_agent(inside)?;
        for (guest, (name, _, home, why)) in guests.iter().zip(&kinds) {
            wait_left(&agent, guest, *home, why)?;
            inside.note(format!("{name} stays: {why}"));
        }
        fs::write(
            format!("{SETTINGS}/huge.toml"),
            "home = 3\nhugepages = \"move\"\n",
        )?;
        wait_left(&agent, &guests[2], 3, "too few are free elsewhere")?;
        reserve_huge_pages(3, memory_mib)?;
        wait_home(inside, &guests[2], 3)?;
        stop(agent)
    })();
    let _ = fs::remove_dir_all(SETTINGS);
    drop(guests);
    // Returns the reserved huge pages to the host, for later cases.
    [0, 3]
        .into_iter()
        .try_for_each(|node| reserve_huge_pages(node, 0))?;
    result
}
