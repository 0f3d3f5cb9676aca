//! A Xen host: its properties, and how its credit scheduler shares a CPU.

use std::fmt::Write as _;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use homenode_testbed_guest::Behaviour;
use homenode_xen::runstates::State;

use crate::inside::Inside;
use crate::inside::xen::domu::{Domu, DomuSpec, Kind, Toolstack};
use crate::inside::xen::runstates::{Stretches, trace};
use crate::inside::xen::{self, create_pool};
use crate::outside::KEPT;
use crate::outside::emulated::HostKind;

/// The CPU of domUs that are given no other: dom0 has CPU 0, and the memory of CPU 3's node is free.
const CPU: u32 = 3;
/// How long a set-up is traced, and how long it runs before that: credits settle within a few accountings of 30 ms.
const TRACED: Duration = Duration::from_secs(10);
const SETTLING: Duration = Duration::from_secs(2);
/// The weight that every domain has initially, and three times that weight.
const WEIGHT: u32 = 256;
const WEIGHT_MORE: u32 = 768;
/// Weights in the ratio of 1 to 2 to 5.
const WEIGHTS: [u32; 3] = [128, 256, 640];
const ALONE: &str = "alone";

/// Checks that the host has four nodes with the requested distances, and that domUs of both kinds, created by both toolstacks,
/// run where they were put.
pub(super) fn boots(inside: &mut Inside) -> anyhow::Result<()> {
    let nodes = xen::nodes()?;
    let asked: Vec<Vec<u32>> = HostKind::Xen.distance_matrix();
    let seen: Vec<Vec<u32>> = nodes.iter().map(|(_, distances)| distances.clone()).collect();
    ensure!(seen == asked, "expected distances {asked:?}, Xen says {seen:?}");
    let scheduler = xen::info("xen_scheduler")?;
    ensure!(
        scheduler == "credit",
        "expected the credit scheduler, saw {scheduler}"
    );
    let version = xen::info("xen_version")?;
    inside.note(format!("Xen {version}, nodes of {nodes:?}"));

    let busy = Behaviour::busy(1).with_duty(30).with_touch(20);
    let mut domus = Vec::new();
    for (name, kind, node, by) in [
        ("pv-libvirt", Kind::Pv, 3, Toolstack::Libvirt),
        ("pvh-libvirt", Kind::Pvh, 2, Toolstack::Libvirt),
        ("pv-xl", Kind::Pv, 1, Toolstack::Xl),
        ("pvh-xl", Kind::Pvh, 3, Toolstack::Xl),
    ] {
        let spec = DomuSpec::new(name, kind, &node.to_string()).doing(busy);
        let domu = inside.create_domu(&spec, by)?;
        expect_on(inside, &domu, node, node)?;
        let (loops, _) = domu.progress()?;
        domus.push((domu, node, loops));
    }
    for (domu, _, before) in &domus {
        let (loops, _) = domu.progress()?;
        let name = &domu.spec.name;
        ensure!(
            loops > *before,
            "expected {name} to compute, but its loop count stays at {loops}"
        );
    }
    // A pin does not move memory.
    let (domu, node, _) = &domus[0];
    let other = node - 1;
    domu.pin(0, &other.to_string())?;
    expect_on(inside, domu, other, *node)?;
    for (domu, _, _) in &domus {
        inside.destroy_domu(domu)?;
    }
    Ok(())
}

/// Checks that a domU's only vCPU is confined to this CPU, and all its pages are on this node.
fn expect_on(inside: &Inside, domu: &Domu, cpu: u32, node: u32) -> anyhow::Result<()> {
    let name = &domu.spec.name;
    let vcpus = domu.vcpus()?;
    ensure!(
        vcpus.len() == 1 && vcpus[0].hard == cpu.to_string(),
        "expected {name} on CPU {cpu}, saw {vcpus:?}"
    );
    let pages = domu.pages_by_node()?;
    let elsewhere: u64 = pages.iter().sum::<u64>() - pages[node as usize];
    inside.note(format!("{name}: CPU {cpu}, pages by node {pages:?}"));
    ensure!(
        elsewhere == 0 && pages[node as usize] >= domu.spec.memory_mib * 256,
        "expected all pages of {name} on node {node}, saw {pages:?}"
    );
    Ok(())
}

/// How the only vCPU of a domU spent its time in a set-up.
struct Share {
    weight: u32,
    cap_percent: u32,
    /// Share of the traced time in each state.
    running: f64,
    runnable: f64,
    offline: f64,
    /// Steal as the guest itself counts it, over a slightly longer time.
    steal: f64,
    /// Number of the vCPU's turns on the CPU, and their median and longest duration in milliseconds.
    turns: usize,
    turn_ms_median: f64,
    turn_ms_max: f64,
}

/// Records how the credit scheduler shares one CPU, using the hypervisor's own trace: weights and caps, in pools of four CPUs
/// and of one CPU.
pub(super) fn credit(inside: &mut Inside) -> anyhow::Result<()> {
    let mut table = format!(
        "# How Xen's credit scheduler shares a CPU between busy vCPUs, by its own trace: data. `running`, `runnable` (it waits) and\n\
         # `offline` (its cap keeps it off) are shares of the time, `steal` is what its guest's kernel counts of the latter two.\n\
         # docs/XEN.md shows it beside the twin. Made by the testbed's case xen-credit; differs a little from run to run:\n\
         #   make xen CASE=xen-credit && cp target/testbed/xen-credit.toml data/measured/\n\
         version = 1\nxen = \"{}\"\ntraced_s = {}\n",
        xen::info("xen_version")?,
        TRACED.as_secs()
    );
    let mut domus = Vec::new();
    for name in ["first", "second"] {
        let spec = DomuSpec::new(name, Kind::Pv, &CPU.to_string()).doing(Behaviour::busy(1));
        domus.push(inside.create_domu(&spec, Toolstack::Xl)?);
    }
    let fair = measure(
        inside,
        &mut table,
        "two alike",
        4,
        &domus,
        &[(WEIGHT, 0), (WEIGHT, 0)],
    )?;
    expect("two alike: the first's share", fair[0].running, 0.45..0.55)?;
    expect(
        "two alike: its median turn in ms",
        fair[0].turn_ms_median,
        25.0..40.0,
    )?;
    for share in &fair {
        let counted = share.runnable + share.offline;
        expect(
            "steal less what the trace says",
            share.steal - counted,
            -0.05..0.05,
        )?;
    }

    let weights = [(WEIGHT, 0), (WEIGHT_MORE, 0)];
    let wide = measure(inside, &mut table, "weights in a pool of 4", 4, &domus, &weights)?;
    expect(
        "weights in a pool of 4: the heavier's share",
        wide[1].running,
        0.45..0.57,
    )?;

    for domu in &domus {
        domu.pin(0, "all")?;
    }
    create_pool(ALONE, CPU)?;
    for domu in &domus {
        domu.move_to_pool(ALONE)?;
    }
    let narrow = measure(inside, &mut table, "weights in a pool of 1", 1, &domus, &weights)?;
    expect(
        "weights in a pool of 1: the heavier's share",
        narrow[1].running,
        0.68..0.80,
    )?;

    let spec = DomuSpec::new("third", Kind::Pv, "2").doing(Behaviour::busy(1));
    let third = inside.create_domu(&spec, Toolstack::Xl)?;
    third.pin(0, "all")?;
    third.move_to_pool(ALONE)?;
    domus.push(third);
    let weights = WEIGHTS.map(|weight| (weight, 0));
    let three = measure(
        inside,
        &mut table,
        "three weights in a pool of 1",
        1,
        &domus,
        &weights,
    )?;
    expect(
        "three weights in a pool of 1: the heaviest's share",
        three[2].running,
        0.55..0.68,
    )?;

    for domu in domus.drain(1..) {
        inside.destroy_domu(&domu)?;
    }
    domus[0].move_to_pool("Pool-0")?;
    xen::remove_pool(ALONE)?;
    domus[0].pin(0, &CPU.to_string())?;
    for (cap, range) in [(30, 0.22..0.33), (60, 0.50..0.63), (100, 0.85..1.01)] {
        let name = format!("cap {cap}");
        let shares = measure(inside, &mut table, &name, 4, &domus, &[(WEIGHT, cap)])?;
        expect(&format!("{name}: its share"), shares[0].running, range)?;
    }
    let kept = inside.dir().join(KEPT);
    fs::create_dir_all(&kept).with_context(|| format!("cannot create {}", kept.display()))?;
    fs::write(kept.join("xen-credit.toml"), table).context("cannot write xen-credit.toml")
}

/// Sets each domU's weight and cap, traces the domUs, and adds the results to the table.
fn measure(
    inside: &Inside,
    table: &mut String,
    setup: &str,
    pool_cpus: u32,
    domus: &[Domu],
    weights_caps: &[(u32, u32)],
) -> anyhow::Result<Vec<Share>> {
    for (domu, (weight, cap)) in domus.iter().zip(weights_caps) {
        domu.set_credit(*weight, *cap)?;
    }
    thread::sleep(SETTLING);
    let mut begins = Vec::new();
    for domu in domus {
        let (_, steal) = domu.progress()?;
        begins.push((Instant::now(), steal));
    }
    let stretches = trace(inside.dir(), &setup.replace(' ', "-"), TRACED)?;
    let mut shares = Vec::new();
    for ((domu, begin), (weight, cap_percent)) in domus.iter().zip(begins).zip(weights_caps) {
        let (_, steal) = domu.progress()?;
        let steal = (steal - begin.1).as_secs_f64() / begin.0.elapsed().as_secs_f64();
        shares.push(share(&stretches, domu, (*weight, *cap_percent), steal)?);
    }
    let _ = write!(
        table,
        "\n[[setup]]\nname = \"{setup}\"\npool_cpus = {pool_cpus}\n"
    );
    for share in &shares {
        inside.note(format!(
            "{setup}: weight {} cap {}: runs {:.1} %, waits {:.1} %, kept off {:.1} %, steal {:.1} %, {} turns of {:.1} ms \
             (median), {:.1} at most",
            share.weight,
            share.cap_percent,
            100.0 * share.running,
            100.0 * share.runnable,
            100.0 * share.offline,
            100.0 * share.steal,
            share.turns,
            share.turn_ms_median,
            share.turn_ms_max
        ));
        let _ = write!(
            table,
            "[[setup.vcpu]]\nweight = {}\ncap_percent = {}\nrunning = {:.4}\nrunnable = {:.4}\noffline = {:.4}\nsteal = {:.4}\n\
             turns = {}\nturn_ms_median = {:.2}\nturn_ms_max = {:.2}\n",
            share.weight,
            share.cap_percent,
            share.running,
            share.runnable,
            share.offline,
            share.steal,
            share.turns,
            share.turn_ms_median,
            share.turn_ms_max
        );
    }
    Ok(shares)
}

fn share(
    stretches: &Stretches,
    domu: &Domu,
    (weight, cap_percent): (u32, u32),
    steal: f64,
) -> anyhow::Result<Share> {
    let known_s = stretches.known_s(domu.id, 0);
    // The trace has no change of a busy vCPU that never gave way, so that vCPU ran all the time.
    let is_steady = known_s == 0.0;
    let ran = |state: State| match is_steady {
        true => f64::from(u8::from(state == State::Running)),
        false => stretches.total_s(domu.id, 0, state) / known_s,
    };
    let mut turns = stretches.of(domu.id, 0, State::Running).to_vec();
    turns.sort_by(f64::total_cmp);
    let name = &domu.spec.name;
    ensure!(
        is_steady || known_s > TRACED.as_secs_f64() / 2.0,
        "the trace covers only {known_s:.2} s of {name}'s {} s",
        TRACED.as_secs()
    );
    Ok(Share {
        weight,
        cap_percent,
        running: ran(State::Running),
        runnable: ran(State::Runnable),
        offline: ran(State::Offline),
        steal,
        turns: turns.len(),
        turn_ms_median: 1000.0 * turns.get(turns.len() / 2).copied().unwrap_or_default(),
        turn_ms_max: 1000.0 * turns.last().copied().unwrap_or_default(),
    })
}

fn expect(what: &str, seen: f64, range: std::ops::Range<f64>) -> anyhow::Result<()> {
    ensure!(
        range.contains(&seen),
        "expected {what} within {range:?}, saw {seen:.3}"
    );
    Ok(())
}
