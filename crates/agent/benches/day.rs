//! How long `homenode why` takes, and how often its answer is right, over a recorded day.
//!
//! The benchmark records a day of the simulator at one-second periods, with 32 VMs. Twenty times, another VM slows the VM `web`
//! down for five minutes: alternately one that fills its cache, and one that competes for its CPUs. Then `why` is run for each
//! slowdown. The goal is 200 ms per answer.
//!
//! The day takes a few minutes to simulate. If `HOMENODE_DAY=FILE` is set, its history is kept there, and reused in later runs.

#![allow(clippy::print_stdout)] // figures

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use homenode_agent::run::Pace;
use homenode_agent::{Show, twin, why};
use homenode_control::{Config, Cycle, Mode, PolicySet};
use homenode_host::WakeSignal;
use homenode_recorder::{Archive, Kind};
use homenode_twin::{EventAction, Scenario, Setup, VmSpec};
use homenode_units::{Bytes, CpuId, CpuSet, NodeId, Ns};
use homenode_why::Culprit;
use serde_json::Value;

const DAY: Ns = Ns::from_secs(24 * 3600);
const MINUTE: Ns = Ns::from_secs(60);
/// Length of each slowdown, and of the window that `why` is asked about.
const WINDOW: Ns = Ns(5 * MINUTE.0);
const TIMES: u64 = 20;
/// The VMs that slow `web` down, alternating.
const CULPRITS: [&str; 2] = ["polluter", "hog"];
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

/// Returns when slowdown `turn` begins. The times are not round, so they do not coincide with minutes of the history.
fn begin(turn: u64) -> Ns {
    Ns((turn + 2) * 65 * MINUTE.0 + turn * 7_000_000_000)
}

fn scenario() -> Scenario {
    let cpus = |all: &[u32]| all.iter().map(|cpu| CpuId(*cpu)).collect::<CpuSet>();
    let pinned = |name: &str, program: &str, on: &[u32]| {
        let vm = VmSpec::new(name, on.len() as u16, Bytes::from_gib(2), program).doing(1e9);
        vm.on_cpus(cpus(on))
            .with_memory_on([NodeId(0)].into_iter().collect())
    };
    let mut vms = vec![
        pinned("web", "omnetpp", &[0, 1]),
        pinned("polluter", "lbm", &[2, 3]),
        pinned("hog", "povray", &[0, 1]),
    ];
    let on_others = |n: u64| {
        let program = PROGRAMS[n as usize % PROGRAMS.len()];
        VmSpec::new(&format!("vm{n}"), 1, Bytes::from_gib(1), program)
            .doing(1e9)
            .on_cpus((8..32).map(CpuId).collect())
    };
    vms.extend((0..29).map(on_others));
    let mut scenario = Scenario::of("day", vms);
    scenario.duration = DAY;
    for turn in 0..TIMES {
        let culprit = CULPRITS[turn as usize % CULPRITS.len()];
        scenario = scenario
            .with_event(begin(turn), culprit, EventAction::Start)
            .with_event(begin(turn) + WINDOW, culprit, EventAction::Stop);
    }
    scenario
}

fn record(path: &Path) {
    let run = twin::Run {
        state: None,
        history: Some(path.to_owned()),
        listen: None,
        trace: None,
        mode: Mode::Act,
        pace: Pace::Fast,
        duration: Some(DAY),
        commit: "bench",
        reload: homenode_agent::reload::Reload::never(&WakeSignal::default()),
    };
    let config = Config {
        policies: PolicySet::Default,
        ..Config::default()
    };
    let machine = homenode_machine_files::preset("r910").expect("a preset");
    let setup = Setup::new(machine, scenario(), 1);
    let since = Instant::now();
    twin::run(&run, &config, &setup, &mut Unseen, &WakeSignal::default()).expect("a run");
    println!(
        "a day was simulated and recorded in {} s",
        since.elapsed().as_secs()
    );
}

fn main() {
    let dir = tempfile::tempdir().expect("a directory");
    let kept = std::env::var_os("HOMENODE_DAY").map(PathBuf::from);
    let path = kept.unwrap_or_else(|| dir.path().join("history.sqlite"));
    if !path.exists() {
        record(&path);
    }
    let archive = Archive::open(&path).expect("a history");
    let (first, _) = archive.span(Kind::Sample).expect("a history").expect("samples");
    let mut took = Vec::new();
    let mut right = 0;
    for turn in 0..TIMES {
        let middle = begin(turn) + Ns(WINDOW.0 / 2);
        let at = first.saturating_add(middle.0.cast_signed());
        let since = Instant::now();
        // Each question opens its own archive, as the command does.
        let asked = Archive::open(&path).expect("a history");
        let answer = why::ask(&asked, "web", (Some(at), WINDOW), None).expect("an answer");
        took.push(since.elapsed());
        let cause = answer.explanation.causes.first();
        let culprit = CULPRITS[turn as usize % CULPRITS.len()];
        let is_right =
            cause.is_some_and(|cause| matches!(&cause.culprit, Culprit::Vm { name, .. } if name == culprit));
        right += u64::from(is_right);
        if !is_right {
            println!("{culprit} at {middle}: {cause:?}");
        }
    }
    took.sort_unstable();
    let shown = |took: Duration| format!("{:.1} ms", took.as_secs_f64() * 1e3);
    println!(
        "an answer takes {} in the median, {} at most; the right VM comes first in {right} of {TIMES}",
        shown(took[took.len() / 2]),
        shown(took[took.len() - 1]),
    );
}
