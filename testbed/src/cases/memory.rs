//! Memory policies, and memory that drifts away from its guest, on a real kernel. Cases judge by `numa_maps`.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use homenode_kernel::numa_maps::{Range, Sharing};
use homenode_kernel::pages::{Linux, Mover};
use homenode_testbed_guest::Behaviour;
use homenode_units::{Bytes, NodeId, NodeMap, NodeSet, Pages};
use serde_json::Value;

use super::agent::{SOON, home_of_operator, start_agent, stop, wait_home, wait_memory};
use super::basics::in_mib;
use crate::inside::Inside;
use crate::inside::guest::{Balloon, Guest, GuestSpec, mib};
use crate::inside::pages::{PAGE_BYTES, migrate};
use crate::inside::wait::{Look, wait_until};

/// Memory that guests here touch and release, in MiB. Free-page reporting needs a little more free memory than that in the
/// guest.
const TOUCHED_MIB: u32 = 100;
/// Memory that the drifting guest touches: enough that the balloon, half of the guest, must take some of it.
const DRIFTING_MIB: u32 = 160;
/// The least of that memory that must come back on another node.
const DRIFTED_MIB: u64 = 50;
/// The least released memory that must return to the host, and the least of it that must be on the right node once touched
/// again. Blocks are reported only as a whole, and the guest's kernel takes some of them.
const COMES_BACK_MIB: u64 = 60;
/// Number of rounds in the record of how fast pages move back and forth.
const MOVE_ROUNDS: usize = 11;

/// A guest large enough for free-page reporting, at home on these nodes.
fn roomy(name: &str, home: &str) -> GuestSpec {
    let mut spec = GuestSpec::new(name).doing(Behaviour::idle().with_touch(TOUCHED_MIB));
    spec.memory_mib = 256;
    spec.balloon = Balloon::Reporting;
    spec.extra_xml = home_of_operator(home);
    spec
}

/// Runs `homenode memory-policy`; returns its JSON, or its error message.
pub(super) fn policy(inside: &Inside, arguments: &[&str]) -> anyhow::Result<Result<Value, String>> {
    Ok(inside.ask("memory-policy", arguments)?.map_err(|(_, said)| said))
}

/// Waits until the agent knows the guest and answers.
pub(super) fn wait_known(inside: &Inside, name: &str) -> anyhow::Result<()> {
    wait_until("the agent to know the guest", SOON, || {
        Ok(match policy(inside, &["show", name])? {
            Ok(_) => Look::Done(()),
            Err(why) => Look::NotYet(why),
        })
    })
}

pub(super) fn pages_on(guest: &Guest, node: u32) -> anyhow::Result<u64> {
    Ok(guest.pages_per_node()?.get(&node).copied().unwrap_or(0))
}

/// Waits until a guest holds at most this much.
pub(super) fn wait_shrunk(guest: &Guest, mib_max: u64) -> anyhow::Result<()> {
    let what = format!("{} to hold at most {mib_max} MiB", guest.spec.name);
    wait_until(&what, SOON, || {
        let pages = guest.pages_per_node()?;
        Ok(match mib(pages.values().sum()) <= mib_max {
            true => Look::Done(()),
            false => Look::NotYet(format!("{:?} MiB", in_mib(&pages))),
        })
    })
}

/// Tests two memory policies. With round-4K, migration spreads the pages over four home nodes. With first-touch, memory that the
/// guest releases and then touches from another node is allocated on that node.
pub(super) fn policies(inside: &mut Inside) -> anyhow::Result<()> {
    let guest = inside.create(&roomy("laid-out", "0-3"))?;
    guest.move_to(0)?;
    let agent = start_agent(inside)?;
    wait_known(inside, "laid-out")?;

    for (wanted, part) in [
        ("round-4k+carrefour", "which node uses a page"),
        ("round-1g", "round-4k"),
        ("first-touch+autonuma", "numa_balancing"),
    ] {
        let answer = policy(inside, &["set", "laid-out", wanted])?;
        ensure!(
            answer.as_ref().is_err_and(|why| why.contains(part)),
            "expected {wanted} refused because of {part}, saw {answer:?}"
        );
    }
    policy(inside, &["set", "laid-out", "round-4k"])?.map_err(|why| anyhow!(why))?;
    wait_until("an even part of the memory on each node", SOON, || {
        let pages = guest.pages_per_node()?;
        let even = pages.values().sum::<u64>() / 4;
        let is_even = (0..4).all(|node| pages.get(&node).is_some_and(|on| on.abs_diff(even) * 10 <= even));
        Ok(match is_even {
            true => Look::Done(()),
            false => Look::NotYet(format!("{:?} MiB", in_mib(&pages))),
        })
    })?;
    let shown = policy(inside, &["show", "laid-out"])?.map_err(|why| anyhow!(why))?;
    ensure!(
        shown["vms"][0]["memory_policy"] == "round-4k"
            && shown["vms"][0]["memory_policy_chosen"] == "round-4k",
        "expected round-4k in force, saw {shown}"
    );
    inside.note(format!("round-4k: {:?} MiB", in_mib(&guest.pages_per_node()?)));

    policy(inside, &["set", "laid-out", "first-touch"])?.map_err(|why| anyhow!(why))?;
    wait_until("first-touch to be in force", SOON, || {
        let shown = policy(inside, &["show", "laid-out"])?.map_err(|why| anyhow!(why))?;
        Ok(match shown["vms"][0]["memory_policy"] == "first-touch" {
            true => Look::Done(()),
            false => Look::NotYet(shown.to_string()),
        })
    })?;
    let full = mib(guest.pages_per_node()?.values().sum());
    guest.switch_to(Behaviour::idle())?;
    wait_shrunk(&guest, full - COMES_BACK_MIB)?;
    inside.note(format!("released: {:?} MiB", in_mib(&guest.pages_per_node()?)));
    guest.process.run_vcpus_on(2)?;
    let before = pages_on(&guest, 2)?;
    guest.switch_to(Behaviour::idle().with_touch(TOUCHED_MIB))?;
    let landed = mib(pages_on(&guest, 2)?.saturating_sub(before));
    inside.note(format!(
        "touched again from node 2: {landed} MiB more there, {:?} MiB",
        in_mib(&guest.pages_per_node()?)
    ));
    ensure!(
        landed >= COMES_BACK_MIB,
        "expected at least {COMES_BACK_MIB} MiB on node 2, saw {landed}"
    );
    stop(agent)
}

/// Creates a guest at home on node 1 whose memory is mostly on node 3. A balloon took the memory, which came back while the
/// vCPU ran on node 3.
pub(super) fn drifted(inside: &Inside) -> anyhow::Result<Guest> {
    let mut spec = roomy("drifted", "1");
    spec.balloon = Balloon::Driven;
    spec.orders.first.touch_mib = DRIFTING_MIB;
    let guest = inside.create(&spec)?;
    guest.move_to(1)?;
    let target = |mib: u64| {
        let done = guest.domain.set_memory(mib << 10);
        done.map_err(|error| anyhow!("cannot set the guest's balloon: {}", error.message()))
    };
    guest.switch_to(Behaviour::idle())?;
    target(128)?;
    wait_shrunk(&guest, 160)?;
    inside.note(format!("balloon up: {:?} MiB", in_mib(&guest.pages_per_node()?)));
    guest.process.run_vcpus_on(3)?;
    target(256)?;
    // The balloon may return memory a little later.
    std::thread::sleep(Duration::from_secs(3));
    let again = Behaviour::busy(1).with_duty(30).with_touch(DRIFTING_MIB);
    guest.switch_to(again.with_every(2000))?;
    let pages = guest.pages_per_node()?;
    inside.note(format!("balloon down: {:?} MiB", in_mib(&pages)));
    ensure!(
        pages.get(&3).is_some_and(|on| mib(*on) >= DRIFTED_MIB),
        "expected {DRIFTED_MIB} MiB to have drifted to node 3, saw {:?} MiB",
        in_mib(&pages)
    );
    guest.process.run_vcpus_anywhere()?;
    Ok(guest)
}

/// Budgets in pages, to record how exactly the mover keeps them.
const BUDGETS: [u64; 3] = [2_000, 10_000, 20_000];

/// Records how fast the same pages of a guest move, several times: by migrate_pages(2) to one node, and back in the agent's
/// way. Then records moves within budgets.
pub(super) fn move_speed(inside: &mut Inside) -> anyhow::Result<()> {
    let mut spec = roomy("moved", "0-3");
    spec.orders.first.touch_mib = DRIFTING_MIB;
    let guest = inside.create(&spec)?;
    guest.move_to(0)?;
    let ram = guest.ram()?;
    let range = Range {
        start: ram.begin,
        end: ram.begin + ram.bytes,
        sharing: Sharing::Private,
        page_bytes: Bytes(PAGE_BYTES),
    };
    let mut mover = Mover::new(i32::try_from(guest.process.0)?, vec![range]);
    let (zero, one) = (NodeSet::one(NodeId(0)), NodeSet::one(NodeId(1)));
    let mut rates = [Vec::new(), Vec::new()];
    // The first round also moves QEMU's own memory, which then stays on node 1, so the round does not count.
    for round in 0..=MOVE_ROUNDS {
        let before = pages_on(&guest, 0)?;
        let begin = Instant::now();
        migrate(guest.process.0, 0, 1)?;
        let took = begin.elapsed();
        let after = pages_on(&guest, 0)?;
        let whole = (before - after) as f64 / took.as_secs_f64();
        let held = NodeMap::new();
        let begin = Instant::now();
        let progress = mover.advance(&mut Linux, &one, &zero, &held, Pages(u64::MAX), &mut || true)?;
        let ours = progress.moved.0 as f64 / begin.elapsed().as_secs_f64();
        inside.note(format!(
            "round {round}: migrate_pages {} pages at {whole:.0} per second, we {} at {ours:.0}",
            before - after,
            progress.moved.0
        ));
        if round > 0 {
            rates[0].push(whole);
            rates[1].push(ours);
        }
    }
    let [whole, ours] = rates.map(|mut rates| {
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    });
    inside.note(format!(
        "median: migrate_pages {whole:.0} pages per second, we {ours:.0}: {:.0} percent",
        ours * 100.0 / whole
    ));
    for budget in BUDGETS {
        let before = pages_on(&guest, 1)?;
        let held = NodeMap::new();
        let progress = mover.advance(&mut Linux, &zero, &one, &held, Pages(budget), &mut || true)?;
        inside.note(format!(
            "of a budget of {budget} pages {} were moved, as numa_maps has it {}",
            progress.moved.0,
            pages_on(&guest, 1)? - before
        ));
    }
    Ok(())
}

/// How long the kernel's balancing alone manages a guest, before and after the agent.
const BALANCED: Duration = Duration::from_secs(15);

/// Keeps the kernel's automatic NUMA balancing on until dropped.
pub(super) struct Balancing;

impl Balancing {
    const PATH: &str = "/proc/sys/kernel/numa_balancing";

    pub(super) fn on() -> anyhow::Result<Balancing> {
        fs::write(Balancing::PATH, "1").with_context(|| format!("cannot write {}", Balancing::PATH))?;
        Ok(Balancing)
    }
}

impl Drop for Balancing {
    fn drop(&mut self) {
        let _ = fs::write(Balancing::PATH, "0");
    }
}

/// Checks that memory that drifted away through a balloon comes home under the kernel's balancing, which does not move it away
/// again.
pub(super) fn drift(inside: &mut Inside) -> anyhow::Result<()> {
    let guest = drifted(inside)?;
    let _balancing = Balancing::on()?;
    std::thread::sleep(BALANCED);
    inside.note(format!(
        "{BALANCED:?} of the kernel's balancing alone: {:?} MiB",
        in_mib(&guest.pages_per_node()?)
    ));
    let agent = start_agent(inside)?;
    let home = wait_home(inside, &guest, SOON)?;
    ensure!(home == 1, "expected the operator's home, node 1, saw node {home}");
    wait_memory(inside, &guest, home, SOON)?;
    std::thread::sleep(BALANCED);
    let affinity = guest.process.vcpu_affinity()?;
    ensure!(
        affinity.values().all(|cpus| cpus == &[home]),
        "expected the guest's vCPU still on node {home}, saw {affinity:?}"
    );
    wait_memory(inside, &guest, home, Duration::from_secs(60))?;
    stop(agent)
}
