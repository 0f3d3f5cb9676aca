//! The guest's kernel module in real guests of a plain QEMU: CPUs move between virtual nodes as the page says, by both of the
//! module's methods.

use anyhow::{Context as _, ensure};

use crate::outside::plain::Outside;
use crate::outside::topology_guest::{NODES, TestKernel, TopologyGuest, VCPUS};

const SYSFS: &str = "/sys/class/misc/homenode-topology";
/// Number of moves for each method.
const MOVES: usize = 40;
const REPLUGS: usize = 9;

/// Returns the nodes of the vCPUs at boot, which are also those once the module is gone.
fn at_boot() -> Vec<u16> {
    (0..VCPUS).map(|cpu| (cpu % u32::from(NODES)) as u16).collect()
}

pub(super) fn module(outside: &mut Outside<'_>) -> anyhow::Result<()> {
    let kernel = TestKernel::stock(outside)?;
    module_of(outside, &kernel)
}

pub(super) fn module_of_fetched_kernel(outside: &mut Outside<'_>) -> anyhow::Result<()> {
    let kernel = TestKernel::fetched(outside)?;
    module_of(outside, &kernel)
}

fn module_of(outside: &mut Outside<'_>, kernel: &TestKernel) -> anyhow::Result<()> {
    let mut guest = TopologyGuest::boot(outside, kernel)?;
    let outcome = both_methods(outside, &mut guest);
    guest.end(outside)?;
    outcome
}

/// Loads the module with each method, moves CPUs, and measures how long that takes.
///
/// Each method ends with a new server, which takes the doorbell away. The first method gets another doorbell by migration; the
/// second goes on without, through a reboot.
fn both_methods(outside: &mut Outside<'_>, guest: &mut TopologyGuest) -> anyhow::Result<()> {
    outside.note(format!("kernel {}", guest.sh("uname -r")?));
    ensure_nodes(guest, &at_boot(), Loaded::No)?;
    refused_parameters(guest)?;
    for (method, first) in [("kbat", 0), ("hp", 1)] {
        load(guest, method)?;
        let (_, again) = guest.try_sh("insmod /homenode_topology.ko")?;
        ensure!(again != 0, "the module can be loaded twice");
        let median = random_moves(guest, first).with_context(|| format!("method {method}"))?;
        outside.note(format!(
            "{method}: {MOVES} moves; median time from update until applied: {median} us"
        ));
        came_while_offline(guest).with_context(|| format!("method {method}"))?;
        ensure!(
            guest.sh("probe write")? == "refused",
            "programs can write the page"
        );
        without_server(guest).with_context(|| format!("method {method}"))?;
        if method == "kbat" {
            migrated(outside, guest).with_context(|| format!("method {method}"))?;
        }
        guest.sh("rmmod homenode_topology")?;
        ensure_nodes(guest, &at_boot(), Loaded::No).with_context(|| format!("after unloading {method}"))?;
    }
    let mut replugs = Vec::new();
    for _ in 0..REPLUGS {
        replugs.push(guest.sh("probe replug 2")?.parse()?);
    }
    outside.note(format!(
        "a CPU offline and online: {} us (median)",
        median(&mut replugs)
    ));
    ensure_quiet(guest)?;
    rebooted(guest)
}

pub(super) fn load(guest: &mut TopologyGuest, method: &str) -> anyhow::Result<()> {
    guest.vcpus = at_boot();
    guest.publish()?;
    guest.sh(&format!("insmod /homenode_topology.ko method={method}"))?;
    ensure!(shown(guest, "method")? == method, "the method is not {method}");
    Ok(())
}

/// Returns a figure that the module shows.
fn shown(guest: &mut TopologyGuest, name: &str) -> anyhow::Result<String> {
    guest.sh(&format!("cat {SYSFS}/{name}"))
}

fn count(guest: &mut TopologyGuest, name: &str) -> anyhow::Result<u64> {
    Ok(shown(guest, name)?.parse()?)
}

/// Waits until a figure that the module shows has this value.
pub(super) fn wait_for(guest: &mut TopologyGuest, name: &str, value: u64) -> anyhow::Result<()> {
    let path = format!("{SYSFS}/{name}");
    let wait = format!(
        "i=0; while [ $(cat {path}) != {value} ] && [ $i -lt 600 ]; do i=$((i+1)); usleep 20000; done"
    );
    let now = guest.sh(&format!("{wait}; cat {path}"))?;
    if now == value.to_string() {
        return Ok(());
    }
    let why = shown(guest, "last_error")?;
    anyhow::bail!("{name} is {now} instead of {value}; last error: {why}")
}

fn refused_parameters(guest: &mut TopologyGuest) -> anyhow::Result<()> {
    let (_, status) = guest.try_sh("insmod /homenode_topology.ko method=magic")?;
    ensure!(status != 0, "an unknown method is accepted");
    let said = guest.sh("dmesg | tail -n 3")?;
    ensure!(
        said.contains("method=magic: auto, kbat or hp"),
        "the kernel's log has no reason: {said}"
    );
    Ok(())
}

/// Whether the module is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loaded {
    Yes,
    No,
}

/// Checks that all sources agree on each CPU's node: vDSO, system call, sysfs, the page, and the node of newly allocated
/// pages.
fn ensure_nodes(guest: &mut TopologyGuest, expected: &[u16], loaded: Loaded) -> anyhow::Result<()> {
    let text = guest.sh("probe nodes")?;
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("cpu ")).collect();
    let page = |node: u16| match loaded {
        Loaded::Yes => node.to_string(),
        Loaded::No => "-1".to_owned(),
    };
    let right: Vec<String> = expected
        .iter()
        .enumerate()
        .map(|(cpu, node)| {
            let on_page = page(*node);
            format!(
                "cpu {cpu} vdso {node} syscall {node} list {node} link {node} page {on_page} pages N{node}=64"
            )
        })
        .collect();
    ensure!(lines == right, "expected {right:#?}\nfound {lines:#?}");
    Ok(())
}

/// Makes random moves of one vCPU each; returns the median time to apply one, in microseconds.
fn random_moves(guest: &mut TopologyGuest, first: u32) -> anyhow::Result<u64> {
    // The sequence need not be random, but must be the same in each run.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut below = |end: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % end
    };
    let mut applied = Vec::new();
    for number in 0..MOVES {
        let vcpu = (u64::from(first) + below(u64::from(VCPUS - first))) as usize;
        let away = 1 + below(u64::from(NODES) - 1) as u16;
        guest.vcpus[vcpu] = (guest.vcpus[vcpu] + away) % NODES;
        let version = guest.publish()?;
        wait_for(guest, "version", version)?;
        let expected = guest.vcpus.clone();
        ensure_nodes(guest, &expected, Loaded::Yes)
            .with_context(|| format!("move {number}, of vCPU {vcpu}"))?;
        applied.push(count(guest, "apply_us_last")?);
    }
    ensure!(
        count(guest, "moves")? == MOVES as u64,
        "the module did not count every move"
    );
    ensure!(
        count(guest, "failed_moves")? == 0,
        "moves failed: {}",
        shown(guest, "last_error")?
    );
    ensure_quiet(guest)?;
    Ok(median(&mut applied))
}

/// Checks that a CPU that was offline when its vCPU moved is on its new node when it comes back.
fn came_while_offline(guest: &mut TopologyGuest) -> anyhow::Result<()> {
    guest.sh("echo 0 > /sys/devices/system/cpu/cpu2/online")?;
    guest.vcpus[2] = (guest.vcpus[2] + 1) % NODES;
    let version = guest.publish()?;
    wait_for(guest, "version", version)?;
    guest.sh("echo 1 > /sys/devices/system/cpu/cpu2/online")?;
    let expected = guest.vcpus.clone();
    ensure_nodes(guest, &expected, Loaded::Yes)
        .context("the node of a CPU that was offline when its vCPU moved is wrong")?;
    ensure_quiet(guest)
}

/// Returns how many times the page interrupted the guest.
fn interrupts(guest: &mut TopologyGuest) -> anyhow::Result<u64> {
    let line = guest.sh("grep homenode_topology /proc/interrupts")?;
    let counts = line.split_whitespace().skip(1).take(VCPUS as usize);
    Ok(counts.map(str::parse::<u64>).sum::<Result<_, _>>()?)
}

/// Moves a vCPU, and waits until the guest has followed.
fn follows(guest: &mut TopologyGuest, vcpu: usize) -> anyhow::Result<()> {
    guest.vcpus[vcpu] = (guest.vcpus[vcpu] + 1) % NODES;
    let version = guest.publish()?;
    wait_for(guest, "version", version)?;
    let expected = guest.vcpus.clone();
    ensure_nodes(guest, &expected, Loaded::Yes)
}

/// The agent dies, root in the guest overwrites parts of the page, and a new agent starts. Checks that the guest follows the new
/// agent.
fn without_server(guest: &mut TopologyGuest) -> anyhow::Result<()> {
    guest.stop_server();
    hostile_pages(guest)?;
    guest.start_server()?;
    follows(guest, 3).context("the guest does not follow the page of a new server after bad pages")?;
    ensure_quiet(guest)
}

/// Moves the guest to another QEMU while the module is loaded. The new server has written its page before the guest arrives.
fn migrated(outside: &mut Outside<'_>, guest: &mut TopologyGuest) -> anyhow::Result<()> {
    let before = interrupts(guest)?;
    let mut vcpus = guest.vcpus.clone();
    vcpus[1] = (vcpus[1] + 1) % NODES;
    let version = guest.migrate(outside, vcpus)?;
    wait_for(guest, "version", version)
        .context("the guest does not follow the new host's page after a migration")?;
    let expected = guest.vcpus.clone();
    ensure_nodes(guest, &expected, Loaded::Yes).context("after migration")?;
    follows(guest, 1).context("after migration")?;
    let after = interrupts(guest)?;
    ensure!(
        after > before,
        "no interrupt from the new server: {before} before, {after} after"
    );
    ensure_quiet(guest)
}

/// After a reboot, loads the module again, which follows without a doorbell.
fn rebooted(guest: &mut TopologyGuest) -> anyhow::Result<()> {
    guest.reboot()?;
    ensure_nodes(guest, &at_boot(), Loaded::No).context("after a reboot")?;
    load(guest, "kbat").context("after a reboot")?;
    follows(guest, 2).context("after a reboot")
}

/// A hostile page: its name, the overwritten words, and the module's reason to refuse it.
type Hostile = (&'static str, Vec<(usize, u64)>, &'static str);

/// Tries pages that an attacker with access could write. Checks that the module refuses and counts each, and that no CPU moves.
fn hostile_pages(guest: &mut TopologyGuest) -> anyhow::Result<()> {
    const SEQUENCE: usize = 2;
    const COUNTS: usize = 3;
    const VCPU_PNODE: usize = 8;
    const VNODE_PNODE: usize = 264;
    let counts = |vcpus: u64, vnodes: u64, nodes: u64| vcpus | vnodes << 32 | nodes << 48;
    let noise = |at: usize| (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let pages: [Hostile; 7] = [
        ("another magic", vec![(0, 7)], "magic number"),
        ("another layout", vec![(1, 6272 << 32 | 2)], "layout version"),
        (
            "many vCPUs",
            vec![(COUNTS, counts(1 << 20, 4, 4))],
            "more than 1024",
        ),
        (
            "many nodes",
            vec![(COUNTS, counts(5, 4, 65)), (VCPU_PNODE, 0)],
            "host node",
        ),
        (
            "a node far out",
            vec![(VCPU_PNODE, 0x7777_7777_7777_7777)],
            "a vCPU on a host node",
        ),
        (
            "a virtual node too many",
            vec![(COUNTS, counts(5, 5, 4)), (VNODE_PNODE, 0x00_0302_0100)],
            "virtual node 4, which this guest has not",
        ),
        (
            "noise",
            (0..784).map(|at| (at, noise(at))).collect(),
            "magic number",
        ),
    ];
    let expected = guest.vcpus.clone();
    let mut refused = count(guest, "refused")?;
    for (number, (name, words, reason)) in pages.into_iter().enumerate() {
        let version = 1_000_000 + 2 * number as u64;
        // The version is written last. It is even: the page is complete.
        let words = words.into_iter().filter(|(at, _)| *at != SEQUENCE);
        guest.scribble(words.chain([(SEQUENCE, version)]))?;
        refused += 1;
        wait_for(guest, "refused", refused).context(name)?;
        let why = shown(guest, "last_error")?;
        ensure!(
            why.contains(reason),
            "{name} is refused for another reason: {why}"
        );
        ensure_nodes(guest, &expected, Loaded::Yes).context(name)?;
    }
    // The version is odd, as a writer that died would leave it.
    let torn = count(guest, "torn")?;
    guest.scribble([(SEQUENCE, 2_000_001)].into_iter())?;
    wait_for(guest, "torn", torn + 1)?;
    ensure_nodes(guest, &expected, Loaded::Yes).context("the guest used a page in the middle of a write")
}

/// Checks that the kernel has not logged a serious complaint.
fn ensure_quiet(guest: &mut TopologyGuest) -> anyhow::Result<()> {
    let complaints = "WARNING|BUG|borken|lockup|Oops|Call Trace|rcu.*stall";
    let (found, _) = guest.try_sh(&format!("dmesg | grep -E '{complaints}'"))?;
    ensure!(found.is_empty(), "the kernel complains: {found}");
    Ok(())
}

fn median(values: &mut [u64]) -> u64 {
    values.sort_unstable();
    values[values.len() / 2]
}
