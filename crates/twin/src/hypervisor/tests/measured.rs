//! Compares the credit scheduler with the real credit1. `data/measured/xen-credit.toml` has the trace of a real Xen. The same
//! set-ups run here; `docs/XEN.md` has the table of both.

use std::fmt::Write as _;

use serde::Deserialize;

use super::*;
use crate::documented::hold_table;

/// Environment variable that, if set, makes the test write the table into the document.
const WRITE: &str = "HOMENODE_WRITE_XEN";

/// Largest error allowed in the simulator's shares (of the traced time) and in its median turns (of their length). The real host
/// is emulated, and stands still for tens of milliseconds now and then.
const SHARE_OFF_MAX: f64 = 0.03;
const TURN_OFF_MAX: f64 = 0.25;
/// Number of turns that a median needs. A vCPU that is hardly ever interrupted has only a few long turns.
const TURNS_MIN: usize = 20;

#[derive(Deserialize)]
struct Measured {
    version: u32,
    xen: String,
    traced_s: u64,
    setup: Vec<Setup>,
}

#[derive(Deserialize)]
struct Setup {
    name: String,
    pool_cpus: usize,
    vcpu: Vec<Share>,
}

/// Times of a vCPU as shares of the whole time. Turns are in milliseconds.
#[derive(Clone, Debug, Deserialize)]
struct Share {
    weight: u32,
    cap_percent: u32,
    running: f64,
    runnable: f64,
    offline: f64,
    steal: f64,
    turns: usize,
    turn_ms_median: f64,
    turn_ms_max: f64,
}

/// Returns nodes of one CPU each.
fn lone_cpus(nodes: usize) -> Topology {
    let mut topology = topology(nodes, 1);
    let place = |cpu: CpuIx| CpuPlace {
        node: cpu.0,
        llc: cpu.0,
        core: cpu.0,
        siblings: Vec::new(),
    };
    topology.cpus = first(nodes).map(place).collect();
    for cpus in [
        &mut topology.node_cpus,
        &mut topology.core_cpus,
        &mut topology.llc_cpus,
    ] {
        *cpus = (0..nodes).map(|cpu| vec![CpuIx(cpu)]).collect();
    }
    topology
}

/// Runs busy vCPUs with the set-up's weights and caps, all on the last CPU of a pool. Looks at them every millisecond, for as
/// long as the real ones were traced.
fn twin(setup: &Setup, traced_s: u64) -> Vec<Share> {
    let mut driver = Driver::new(Hypervisor::Xen, &lone_cpus(setup.pool_cpus), 1);
    let tasks: Vec<TaskIx> = setup
        .vcpu
        .iter()
        .flat_map(|vcpu| {
            let cap = (vcpu.cap_percent > 0).then_some(vcpu.cap_percent);
            driver.vm(vcpu.weight, cap, &hogs_on(1, &[setup.pool_cpus - 1]))
        })
        .collect();
    driver.run_for(3000);
    let total_ms = traced_s * 1000;
    let mut counts = vec![[0_u64; 3]; tasks.len()];
    let mut turns: Vec<Vec<u64>> = vec![Vec::new(); tasks.len()];
    let mut ran = vec![false; tasks.len()];
    for _ in 0..total_ms {
        driver.run_for(1);
        for (at, task) in tasks.iter().enumerate() {
            let run = driver.scheduler.queues.tasks[*task].run;
            let runs = run == Run::Running;
            if runs && !std::mem::replace(&mut ran[at], runs) {
                turns[at].push(0);
            }
            ran[at] = runs;
            match run {
                Run::Running => {
                    counts[at][0] += 1;
                    if let Some(turn) = turns[at].last_mut() {
                        *turn += 1;
                    }
                }
                Run::Waiting => counts[at][1] += 1,
                Run::Throttled => counts[at][2] += 1,
                Run::Sleeping => panic!("a busy vCPU sleeps"),
            }
        }
    }
    let shares = counts.iter().zip(turns).zip(&setup.vcpu);
    shares
        .map(|((counts, mut turns), vcpu)| {
            let share = |at: usize| counts[at] as f64 / total_ms as f64;
            turns.sort_unstable();
            Share {
                running: share(0),
                runnable: share(1),
                offline: share(2),
                steal: share(1) + share(2),
                turns: turns.len(),
                turn_ms_median: turns[turns.len() / 2] as f64,
                turn_ms_max: turns[turns.len() - 1] as f64,
                ..vcpu.clone()
            }
        })
        .collect()
}

fn rows(setup: &Setup, twin: &[Share]) -> String {
    let mut text = String::new();
    for (real, twin) in setup.vcpu.iter().zip(twin) {
        let both = |real: f64, twin: f64| format!("{:.1} : {:.1}", 100.0 * real, 100.0 * twin);
        let cap = match real.cap_percent {
            0 => "none".to_owned(),
            cap => cap.to_string(),
        };
        let _ = writeln!(
            text,
            "| {} | {} | {cap} | {} | {:+.1} | {} | {} | {} | {:.0} : {:.0} | {:.0} : {:.0} |",
            setup.name,
            real.weight,
            both(real.running, twin.running),
            100.0 * (twin.running - real.running),
            both(real.runnable, twin.runnable),
            both(real.offline, twin.offline),
            both(real.steal, twin.steal),
            real.turn_ms_median,
            twin.turn_ms_median,
            real.turn_ms_max,
            twin.turn_ms_max,
        );
    }
    text
}

#[test]
fn the_twin_shares_a_cpu_as_credit1_does() {
    let text = include_str!("../../../../../data/measured/xen-credit.toml");
    let measured: Measured = toml::from_str(text).expect("the measured set-ups");
    assert_eq!(measured.version, 1);
    let mut table = format!(
        "Xen {}, {} s each; real : twin, in percent of the time, turns in milliseconds.\n\n\
         | set-up | weight | cap | runs | error, points | waits | kept off | steal, as the guest counts it | median turn | longest |\n\
         |---|---|---|---|---|---|---|---|---|---|\n",
        measured.xen, measured.traced_s
    );
    // Timers of an emulated host are late, which makes its slices longer than 30 ms. Its accountings are late too, so a cap
    // allows that much less per second.
    let late = measured.setup[0].vcpu[0].turn_ms_median / 30.0 - 1.0;
    assert!((0.0..0.15).contains(&late), "{late} is not how late timers are");
    let mut off = Vec::new();
    for setup in &measured.setup {
        let twin = twin(setup, measured.traced_s);
        table += &rows(setup, &twin);
        for (real, twin) in setup.vcpu.iter().zip(&twin) {
            let mut check = |what: &str, real: f64, twin: f64, max: f64| {
                if (real - twin).abs() > max {
                    off.push(format!("{}: {what}: real {real}, twin {twin}", setup.name));
                }
            };
            let max = SHARE_OFF_MAX + late * f64::from(real.cap_percent) / 100.0;
            check("runs", real.running, twin.running, max);
            check("waits", real.runnable, twin.runnable, max);
            check("kept off", real.offline, twin.offline, max);
            check("steal", real.steal, twin.steal, max);
            if real.turns >= TURNS_MIN {
                let max = TURN_OFF_MAX * real.turn_ms_median;
                check("turn", real.turn_ms_median, twin.turn_ms_median, max);
            }
        }
    }
    hold_table("XEN.md", "credit1", WRITE, &table);
    assert!(off.is_empty(), "{}", off.join("\n"));
}
