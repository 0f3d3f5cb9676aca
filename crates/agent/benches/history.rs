//! What recording costs: CPU time and disk space.
//!
//! Compares an hour that is recorded with the same hour unrecorded, for 32 VMs on four nodes of the simulator, with a period of
//! one second. All threads are included. Measured on two busy CPUs of an EPYC server; the goal was .10 percent of a CPU:
//!
//! | | |
//! |---|---|
//! | of a CPU | .06 percent |
//! | status | 206 bytes per VM and minute |
//! | samples | 709 bytes per VM and minute |

#![allow(clippy::print_stdout)] // figures

use std::path::Path;
use std::time::Duration;

use homenode_agent::run::Pace;
use homenode_agent::{Show, twin};
use homenode_control::{Config, Cycle, Mode};
use homenode_host::WakeSignal;
use homenode_recorder::{Archive, Kind};
use homenode_twin::{Scenario, Setup, VmSpec};
use homenode_units::{Bytes, Ns};
use serde_json::Value;

const VMS: u64 = 32;
const HOUR: Ns = Ns::from_secs(3600);
const PROGRAMS: [&str; 8] = [
    "idle", "povray", "soplex", "ep.B", "milc", "idle", "cg.B", "astar",
];

/// Discards all output.
struct Unseen;

impl Show for Unseen {
    fn line(&mut self, _: &str) {}
    fn object(&mut self, _: &str, _: Value) {}
    fn cycle(&mut self, _: &Cycle) {}
    fn is_closed(&self) -> bool {
        false
    }
}

/// Returns the CPU time of all threads for a simulated hour.
fn hour(history: Option<&Path>) -> Duration {
    let machine = homenode_machine_files::preset("r910").expect("a preset");
    let vm = |n: u64| {
        let program = PROGRAMS[n as usize % PROGRAMS.len()];
        VmSpec::new(&format!("vm{n}"), 1, Bytes::from_gib(1), program).doing(1e6)
    };
    let mut scenario = Scenario::of("recorded", (0..VMS).map(vm).collect());
    scenario.duration = HOUR;
    let run = twin::Run {
        state: None,
        history: history.map(Path::to_owned),
        listen: None,
        trace: None,
        mode: Mode::Act,
        pace: Pace::Fast,
        duration: Some(HOUR),
        commit: "bench",
        reload: homenode_agent::reload::Reload::never(&WakeSignal::default()),
    };
    let setup = Setup::new(machine, scenario, 1);
    let begin = cpu_time();
    twin::run(
        &run,
        &Config::default(),
        &setup,
        &mut Unseen,
        &WakeSignal::default(),
    )
    .expect("a run");
    cpu_time() - begin
}

fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn main() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("history.sqlite");
    // Alternating, so that the machine's other load affects both.
    let (mut with, mut without) = (Duration::ZERO, Duration::ZERO);
    let rounds = 3;
    for _ in 0..rounds {
        without += hour(None);
        let _ = std::fs::remove_file(&path);
        with += hour(Some(&path));
    }
    let share = with.saturating_sub(without).as_secs_f64() / f64::from(rounds) / HOUR.as_secs_f64();
    println!("recording takes {:.3} percent of a CPU", 100.0 * share);
    let archive = Archive::open(&path).expect("a history");
    for kind in Kind::ALL {
        let (bytes, periods) = archive.size(kind).expect("a history");
        let per = bytes.0 as f64 / (periods as f64 / 60.0) / VMS as f64;
        println!("{kind:?}: {per:.0} bytes per VM and minute");
    }
}
