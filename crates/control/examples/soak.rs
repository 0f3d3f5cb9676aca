//! How long a cycle's decisions take, and whether the agent's memory grows, over days of the simulator's time:
//!
//! ```text
//! cargo run --release -p homenode-control --example soak [32x7d] [1000x1h]
//! ```
//!
//! Each host is full of different VMs that start, stop and change behaviour all the time, so policies always have something to
//! remember and to forget. The timed part is what the loop does besides acting: [`Control::begin`] and [`Control::finish`]. The
//! time is the thread's CPU time, which leaves out other work of this machine. Memory is the process's RAM, the simulator
//! included; the mean of the last tenth of the run is compared with the mean of the first tenth. For advice on permits, the agent
//! remembers ten minutes (8 KiB for each VM), which the [`WARM_UP`] fills. A counting allocator would report less, since it does
//! not see fragmentation, for which operators pay as well.
//!
//! Results on two CPUs of an EPYC server, shared with others:
//!
//! | run | decisions, median | p99 | longest | growth |
//! |---|---|---|---|---|
//! | 32 VMs, a week | .13 ms | .48 ms | 15.1 ms | 359 KiB of 22 MiB |
//! | 1000 VMs, an hour | 4.7 ms | 7.2 ms | 11.1 ms | 226 KiB of 37 MiB |

#![allow(clippy::print_stdout)] // what it is for

use std::process::ExitCode;
use std::time::Duration;

use homenode_control::{Config, Control, Hour, Mode};
use homenode_host::Host;
use homenode_twin::{EventAction, Scenario, Twin, VmSpec};
use homenode_units::{Bytes, Chance, Ns};

/// Limit of the time of a cycle's decisions. A hundredth of the cycles may take longer.
const DECISION_MAX: Duration = Duration::from_millis(100);
/// Time before the measurement of both time and memory begins.
const WARM_UP: Ns = Ns::from_secs(700);
/// Limit of memory growth.
const GROWTH_MAX: u64 = 1 << 20;
const PROGRAMS: [&str; 8] = [
    "idle", "povray", "soplex", "ep.B", "milc", "idle", "cg.B", "astar",
];
/// Time between two events of the simulator. It is longer if there would be more events than this maximum, since the simulator
/// keeps an account of each.
const EVENT_EVERY: Ns = Ns::from_secs(20);
const EVENTS_MAX: u64 = 2000;

fn scenario(vms: u64, duration: Ns) -> Scenario {
    let chance = &mut Chance::labelled(1, "soak", 0);
    let name = |n: u64| format!("vm{n}");
    // The VMs have more work than they can do in the time.
    let vm = |n: u64| {
        let program = PROGRAMS[n as usize % PROGRAMS.len()];
        VmSpec::new(&name(n), 1, Bytes::from_gib(1), program).doing(1e6)
    };
    let mut scenario = Scenario::of("soak", (0..vms).map(vm).collect());
    scenario.duration = duration;
    let mut stopped = None;
    let every = EVENT_EVERY.max(Ns(duration.0 / EVENTS_MAX));
    for turn in 1..duration.0 / every.0 {
        let at = Ns(turn * every.0);
        // A stopped VM starts again at the next turn, so the number of VMs varies by at most one.
        let vm = stopped.take();
        let (vm, action) = match (vm, chance.bits() % 2) {
            (Some(vm), _) => (vm, EventAction::Start),
            (None, 0) => (chance.bits() % vms, EventAction::Stop),
            (None, _) => {
                let llc_access_factor = [0.1, 1.0][(chance.bits() % 2) as usize];
                let cpi_factor = 1.0;
                let phase = EventAction::Phase {
                    llc_access_factor,
                    cpi_factor,
                    rest_factor: 1.0,
                };
                (chance.bits() % vms, phase)
            }
        };
        stopped = (action == EventAction::Stop).then_some(vm);
        scenario = scenario.with_event(at, &name(vm), action);
    }
    scenario
}

/// Returns the processor time that this thread has used.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns the process's memory in RAM.
fn resident() -> Bytes {
    let text = std::fs::read_to_string("/proc/self/statm").expect("Linux has it");
    let pages = text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    Bytes(pages.expect("a number of pages") * 4096)
}

/// Runs one host; returns true if time and memory kept within their limits.
fn run(vms: u64, duration: Ns) -> bool {
    let mut machine = homenode_machine_files::preset("amd48").expect("a preset");
    for (_, node) in machine.nodes.iter_mut() {
        // Gives the host memory for all VMs.
        node.memory_bytes = Bytes::from_gib(256);
    }
    let scenario = scenario(vms, WARM_UP + duration);
    let mut twin = Twin::new(machine.clone(), &scenario, 1).expect("the scenario fits");
    let config = Config::default();
    let mut control = Control::new(config.clone(), Mode::Act);
    let cycle = |control: &mut Control, twin: &mut Twin| {
        let sample = twin.sample().expect("a twin can be read");
        let begin = cpu_time();
        let begun = control.begin(&machine, sample);
        let deciding = cpu_time() - begin;
        let answer = begun.commit(twin);
        let begin = cpu_time();
        drop(control.finish(&machine, begun, answer));
        let took = deciding + cpu_time() - begin;
        control.settle_usage(Hour::at(twin.now()));
        twin.wait(config.period);
        took
    };
    for _ in 0..WARM_UP.0 / config.period.0 {
        cycle(&mut control, &mut twin);
    }
    let cycles = duration.0 / config.period.0 / 10 * 10;
    // Written now, so that its pages are resident and do not look like growth.
    let mut took = vec![(Duration::MAX, u64::MAX); cycles as usize];
    let mut memory = [0; 10];
    for at in 0..cycles {
        took[at as usize] = (cycle(&mut control, &mut twin), at);
        let tenth = (at * 10 / cycles) as usize;
        memory[tenth] += resident().0 / (cycles / 10);
        if (at + 1) % (cycles / 10) == 0 {
            println!(
                "# {vms} VMs, {} of {cycles} cycles: {} KiB",
                at + 1,
                memory[tenth] >> 10
            );
        }
    }
    took.sort_unstable();
    let at = |share: f64| milliseconds(took[((took.len() - 1) as f64 * share) as usize].0);
    let slow = took.iter().rev().take(5);
    let slow: Vec<String> = slow
        .map(|(took, cycle)| format!("{} at {cycle} s", milliseconds(*took)))
        .collect();
    let growth = memory[9].saturating_sub(memory[0]);
    println!(
        "{vms} VMs, {cycles} cycles: decisions take {} in the median, {} at p99, at most {}; memory grows by {} KiB",
        at(0.5),
        at(0.99),
        slow.join(", "),
        growth >> 10,
    );
    took[took.len() * 99 / 100].0 <= DECISION_MAX && growth <= GROWTH_MAX
}

fn milliseconds(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}

/// Parses a run such as `32x7d`.
fn parsed(text: &str) -> Option<(u64, Ns)> {
    let (vms, time) = text.split_once('x')?;
    let (count, unit) = time.split_at(time.len().checked_sub(1)?);
    let seconds = match unit {
        "d" => 86_400,
        "h" => 3600,
        "s" => 1,
        _ => return None,
    };
    Some((
        vms.parse().ok()?,
        Ns::from_secs(count.parse::<u64>().ok()? * seconds),
    ))
}

fn main() -> ExitCode {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let usual = ["32x7d".to_owned(), "1000x1h".to_owned()];
    let wanted = if given.is_empty() { &usual[..] } else { &given };
    let mut kept = true;
    for text in wanted {
        let Some((vms, duration)) = parsed(text) else {
            println!("`{text}` is no number of VMs and time, such as 32x7d or 1000x1h");
            return ExitCode::FAILURE;
        };
        kept &= run(vms, duration);
    }
    if kept {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
