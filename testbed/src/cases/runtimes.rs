//! An unmodified JVM, jemalloc and TCMalloc in a real guest whose vCPU moves. What they allocate after a move is on the node
//! that the page names. TCMalloc is also measured without our library, as it was before.

use anyhow::{Context as _, ensure};

use super::topology::{load, wait_for};
use crate::outside::plain::Outside;
use crate::outside::runtimes::{self, JAVA, JEMALLOC, LIBRARIES, TCMALLOC};
use crate::outside::topology_guest::{NODES, TestKernel, TopologyGuest};

/// The vCPU that the programs run on: the second vCPU of node 0, so that no node loses its last one.
const VCPU: usize = 4;
/// The nodes that the vCPU is moved to, in order. Each node is visited once, so that its memory is new to the program.
const VISITS: [u16; 4] = [0, 3, 2, 1];
/// Memory of a virtual node. It has room for the JVM's files, which are in the guest's memory.
const NODE_MIB: u32 = 320;
/// The JVM allocates 12 MiB, part of which may already be on the node.
const JVM_PAGES_LEAST: u64 = 2000;
/// The program allocates 2000 objects of 2.5 KiB on average, in ten ways in turn, which mostly reuse the same memory.
const ALLOCATOR_PAGES_LEAST: u64 = 500;
/// The objects that the program keeps to say where the kernel has them.
const KEPT: u64 = 2000;
/// Least share of these objects on the vCPU's node with our library, and largest share without, in percent. Without our library,
/// TCMalloc hands out again memory that was freed on other nodes.
const FOLLOWING_PERCENT: u64 = 95;
const STATIC_PERCENT: u64 = 50;

pub(super) fn follow(outside: &mut Outside<'_>) -> anyhow::Result<()> {
    let kernel = TestKernel::stock(outside)?;
    let files = runtimes::files(outside.dir)?;
    let mut guest = TopologyGuest::boot_with(outside, &kernel, files, NODE_MIB)?;
    let outcome = all(outside, &mut guest);
    guest.end(outside)?;
    outcome
}

fn all(outside: &mut Outside<'_>, guest: &mut TopologyGuest) -> anyhow::Result<()> {
    load(guest, "kbat")?;
    for (name, path) in [("jemalloc", JEMALLOC), ("tcmalloc", TCMALLOC)] {
        allocator(outside, guest, name, path).with_context(|| name.to_owned())?;
    }
    share_of_tcmalloc(outside, guest)?;

    back_to_node_0(guest)?;
    let preload = format!("{LIBRARIES}/libhomenode_hotspot.so:{LIBRARIES}/libhomenode_hotspot_numa.so");
    let options = "-Xint -XX:+UseNUMA -XX:-UsePerfData -Xms128m -Xmx128m -Xlog:disable -XX:+UseParallelGC -Xmn80m \
                   -XX:-UseAdaptiveNUMAChunkSizing -Xlog:gc+heap=debug";
    let mut program = Program::start(
        guest,
        &format!("LD_PRELOAD={preload} taskset 10 {JAVA} {options} -cp / Young"),
    )?;
    for node in VISITS {
        move_to(guest, node)?;
        let before = program.pages(guest)?;
        let said = program.order(guest, "")?;
        let after = program.pages(guest)?;
        ensure_came(node, &before, &after, JVM_PAGES_LEAST)
            .with_context(|| format!("the JVM does not follow; its output: {said}"))?;
        outside.note(format!("JVM on node {node}: {before:?} pages became {after:?}"));
    }
    program.end(guest)
}

/// Checks that every way to allocate follows the vCPU, and that new pages are on its node.
fn allocator(
    outside: &mut Outside<'_>,
    guest: &mut TopologyGuest,
    name: &str,
    path: &str,
) -> anyhow::Result<()> {
    back_to_node_0(guest)?;
    let library = format!("{LIBRARIES}/libhomenode_{name}.so");
    let mut program = Program::start(
        guest,
        &format!("LD_PRELOAD={library}:{path} taskset 10 allocates"),
    )?;
    for node in VISITS {
        move_to(guest, node)?;
        let before = program.pages(guest)?;
        let said = program.order(guest, "a")?;
        let after = program.pages(guest)?;
        let elsewhere: Vec<&str> = said
            .lines()
            .filter(|line| !line.ends_with(&format!(" {node}")))
            .collect();
        ensure!(
            !said.is_empty() && elsewhere.is_empty(),
            "expected all lines of the program to name node {node}, saw {elsewhere:?}"
        );
        ensure_came(node, &before, &after, ALLOCATOR_PAGES_LEAST)?;
        outside.note(format!(
            "{name} on node {node}: {before:?} pages became {after:?}"
        ));
    }
    program.end(guest)
}

/// Measures the share of TCMalloc's objects that are on the vCPU's node after it has moved, with our library and without.
fn share_of_tcmalloc(outside: &mut Outside<'_>, guest: &mut TopologyGuest) -> anyhow::Result<()> {
    let ours = format!("{LIBRARIES}/libhomenode_tcmalloc.so:");
    let mut percent = [0; 2];
    for (percent, ours) in percent.iter_mut().zip(["", ours.as_str()]) {
        back_to_node_0(guest)?;
        let mut program = Program::start(
            guest,
            &format!("LD_PRELOAD={ours}{TCMALLOC} taskset 10 allocates"),
        )?;
        let mut here = 0;
        // On its first node TCMalloc takes its memory, which is not counted.
        for (visit, node) in VISITS.into_iter().enumerate() {
            move_to(guest, node)?;
            program.order(guest, "k")?;
            let on = program.order(guest, "n")?;
            program.order(guest, "f")?;
            let on: Vec<u64> = on.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
            ensure!(on.iter().sum::<u64>() == KEPT, "objects by node: {on:?}");
            if visit > 0 {
                here += on[usize::from(node)];
            }
        }
        *percent = 100 * here / (KEPT * (VISITS.len() as u64 - 1));
        program.end(guest)?;
    }
    let [without, with] = percent;
    outside.note(format!(
        "TCMalloc's objects on the node of their vCPU after it moved: {without} percent without our library, {with} with it"
    ));
    ensure!(
        without <= STATIC_PERCENT && with >= FOLLOWING_PERCENT,
        "expected at most {STATIC_PERCENT} percent without our library and at least {FOLLOWING_PERCENT} with it, \
         saw {without} and {with}"
    );
    Ok(())
}

fn back_to_node_0(guest: &mut TopologyGuest) -> anyhow::Result<()> {
    move_to(guest, 0)
}

/// Moves the vCPU, and waits until the guest's kernel has followed.
fn move_to(guest: &mut TopologyGuest, node: u16) -> anyhow::Result<()> {
    guest.vcpus[VCPU] = node;
    let version = guest.publish()?;
    wait_for(guest, "version", version)
}

/// Checks that at least this many of a program's new pages are on this node, and more than half of all its new pages.
fn ensure_came(node: u16, before: &[u64], after: &[u64], least: u64) -> anyhow::Result<()> {
    let new: Vec<u64> = after
        .iter()
        .zip(before)
        .map(|(a, b)| a.saturating_sub(*b))
        .collect();
    let here = new[usize::from(node)];
    let all: u64 = new.iter().sum();
    ensure!(
        here >= least && 2 * here > all,
        "expected at least {least} new pages on node {node}, and over half; saw by node {new:?}"
    );
    Ok(())
}

/// A program in the guest that prints "ready", and then "done" after each order.
struct Program {
    orders: usize,
}

impl Program {
    fn start(guest: &mut TopologyGuest, command: &str) -> anyhow::Result<Program> {
        guest.sh("rm -f /in /out; mkfifo /in")?;
        guest.sh(&format!("{command} </in >/out 2>&1 & program=$!; exec 3>/in"))?;
        let program = Program { orders: 0 };
        wait_for_line(guest, "ready", 1)?;
        Ok(program)
    }

    /// Sends an order, and returns the program's output.
    fn order(&mut self, guest: &mut TopologyGuest, order: &str) -> anyhow::Result<String> {
        let before: usize = guest.sh("wc -l </out")?.trim().parse()?;
        guest.sh(&format!("echo '{order}' >&3"))?;
        self.orders += 1;
        wait_for_line(guest, "done", self.orders)?;
        guest.sh(&format!(
            "tail -n +{} /out | grep -v '^done$' || true",
            before + 1
        ))
    }

    /// Returns the program's pages by node, as the guest's kernel reports them.
    fn pages(&self, guest: &mut TopologyGuest) -> anyhow::Result<Vec<u64>> {
        let maps = guest.sh("cat /proc/$program/numa_maps")?;
        let mut pages = vec![0; usize::from(NODES)];
        for word in maps.split_whitespace() {
            let Some((node, count)) = word.strip_prefix('N').and_then(|word| word.split_once('=')) else {
                continue;
            };
            if let (Ok(node), Ok(count)) = (node.parse::<usize>(), count.parse::<u64>()) {
                *pages
                    .get_mut(node)
                    .context("the guest reports pages on a node that it does not have")? += count;
            }
        }
        Ok(pages)
    }

    fn end(self, guest: &mut TopologyGuest) -> anyhow::Result<()> {
        guest.sh("exec 3>&-; wait $program")?;
        Ok(())
    }
}

/// Waits until a program has printed a line this many times.
fn wait_for_line(guest: &mut TopologyGuest, line: &str, times: usize) -> anyhow::Result<()> {
    let enough = format!("[ $(grep -c '^{line}$' /out) -ge {times} ]");
    let wait = format!("i=0; until {enough} || [ $i -ge 100 ]; do i=$((i+1)); sleep 1; done");
    let (said, status) = guest.try_sh(&format!("{wait}; {enough} || tail -n 20 /out; {enough}"))?;
    ensure!(status == 0, "the program did not print `{line}`: {said}");
    Ok(())
}
