//! How long an answer of the agent takes, without and with a thousand silent clients. Compare the two within one run.
//!
//! Then a running agent under siege: a thousand clients send requests byte by byte, and reconnect when they are dropped.
//! Meanwhile `numad`'s request must be answered within a second, and the loop's period may be at most a tenth too long. Measured
//! on two CPUs of a shared EPYC server, with 200 answers and 200 cycles each:
//!
//! | clients | answer, median | answer, longest | period, mean | period, longest |
//! |---|---|---|---|---|
//! | none | .22 ms | 8.4 ms | 102.6 ms | 131 ms |
//! | 1000 | .49 ms | 31 ms | 103.6 ms | 141 ms |
//!
//! The period is set to 100 ms; three other programs used the CPUs. The mean includes the time that the simulator's cycle takes.

#![allow(clippy::print_stdout)] // figures

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use criterion::{BatchSize, Criterion, criterion_group};
use homenode_agent::role::Readers;
use homenode_agent::run::Pace;
use homenode_agent::server::Server;
use homenode_agent::setting_queue::SettingQueue;
use homenode_agent::usage_file::Clock;
use homenode_agent::wall_clock::WallClock;
use homenode_agent::{Handler, Show, twin};
use homenode_api::answer::{Placed, Vms};
use homenode_api::{Request, ask, socket_path};
use homenode_control::{Config, Control, Cycle, Mode};
use homenode_host::{Host, WakeSignal};
use homenode_twin::{Scenario, Setup, Twin};
use homenode_units::{Bytes, Ns};
use serde_json::Value;

const SILENT: usize = 1000;

fn answers(c: &mut Criterion) {
    let dir = tempfile::tempdir().expect("a directory");
    let machine = homenode_machine_files::preset("r910").expect("a preset");
    let mut twin = Twin::new(machine.clone(), &Scenario::tavo_mixed(), 1).expect("a twin");
    let mut control = Control::new(Config::default(), Mode::Act);
    let sample = twin.sample().expect("a sample");
    control.begin(&machine, sample);
    let handler = Handler {
        machine: Arc::new(machine),
        control: Arc::new(Mutex::new(control)),
        clock: WallClock::start(Clock::Host),
        drains: homenode_agent::drain_file::DrainFile::default(),
        settings: SettingQueue::new(&WakeSignal::default()),
    };
    let _server = Server::open(dir.path(), Readers::default(), handler).expect("a server");
    let answered = |_| {
        let vms: Option<Vms> = ask(dir.path(), &Request::Vms).expect("an answer");
        vms.expect("an agent").vms.len()
    };
    c.bench_function("answer", |b| b.iter(|| answered(())));
    c.bench_function("answer beside 1000 silent clients", |b| {
        b.iter_batched(
            || silent(dir.path()),
            answered_beside(&answered),
            BatchSize::PerIteration,
        );
    });
}

fn answered_beside<'a>(
    answered: &'a impl Fn(()) -> usize,
) -> impl FnMut(Vec<UnixStream>) -> (usize, Vec<UnixStream>) + 'a {
    |silent| (answered(()), silent)
}

/// Connects clients that send nothing; retries refused connections.
fn silent(state: &Path) -> Vec<UnixStream> {
    let path = socket_path(state);
    let connect = |_| loop {
        if let Ok(stream) = UnixStream::connect(&path) {
            return stream;
        }
        std::thread::yield_now();
    };
    (0..SILENT).map(connect).collect()
}

/// The time at which each cycle was shown.
#[derive(Default)]
struct Cycles(Vec<Instant>);

impl Show for Cycles {
    fn line(&mut self, _: &str) {}
    fn object(&mut self, _: &str, _: Value) {}
    fn cycle(&mut self, _: &Cycle) {
        self.0.push(Instant::now());
    }
    fn is_closed(&self) -> bool {
        false
    }
}

/// Runs clients that each send one byte in turn, until `stop` is set.
fn drip(state: &Path, stop: &AtomicBool) {
    let mut all = silent(state);
    for stream in &all {
        stream.set_nonblocking(true).expect("a socket");
    }
    while !stop.load(Ordering::Relaxed) {
        for stream in &mut all {
            if stream.write(b"{").is_err()
                && let Ok(again) = UnixStream::connect(socket_path(state))
            {
                again.set_nonblocking(true).expect("a socket");
                *stream = again;
            }
        }
        // At this pace the clients together send a thousand bytes every 10 ms.
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Sends an agent `numad`'s request, alone or under siege; prints how long answers took, and the periods.
fn siege(clients: &str) {
    let dir = tempfile::tempdir().expect("a directory");
    let state = dir.path();
    let machine = homenode_machine_files::preset("r910").expect("a preset");
    let setup = Setup::new(machine, Scenario::tavo_mixed(), 1);
    let period = Ns::from_millis(100);
    let config = Config {
        period,
        ..Config::default()
    };
    let run = twin::Run {
        state: Some(state.to_owned()),
        history: None,
        listen: None,
        trace: None,
        mode: Mode::Act,
        pace: Pace::Watched,
        duration: None,
        commit: "bench",
        reload: homenode_agent::reload::Reload::never(&WakeSignal::default()),
    };
    let (wake_signal, stop, mut cycles) = (WakeSignal::default(), AtomicBool::new(false), Cycles::default());
    let mut answers: Vec<Duration> = std::thread::scope(|scope| {
        let agent = scope.spawn(|| twin::run(&run, &config, &setup, &mut cycles, &wake_signal));
        while !socket_path(state).exists() {
            std::thread::sleep(Duration::from_millis(10));
        }
        let dripping = (clients != "none").then(|| scope.spawn(|| drip(state, &stop)));
        let asked = (0..200).map(|_| {
            std::thread::sleep(Duration::from_millis(100));
            let question = Request::Place {
                vcpus: 4,
                memory_bytes: Bytes::from_gib(4),
                bandwidth_bytes_per_s: None,
                huge_page_bytes: None,
            };
            let asked = Instant::now();
            let answer: Option<Placed> = ask(state, &question).expect("an answer");
            assert!(answer.is_some());
            asked.elapsed()
        });
        let answers = asked.collect();
        stop.store(true, Ordering::Relaxed);
        wake_signal.stop();
        agent.join().expect("no panic").expect("a run");
        if let Some(dripping) = dripping {
            dripping.join().expect("no panic");
        }
        answers
    });
    answers.sort_unstable();
    let periods: Vec<Duration> = cycles.0.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let longest = periods.iter().max().expect("cycles");
    let mean = periods.iter().sum::<Duration>() / periods.len() as u32;
    println!(
        "siege by {clients}: answers in {:?}, longest {:?}; {} periods of {period}: {mean:?}, longest {longest:?}",
        answers[answers.len() / 2],
        answers[answers.len() - 1],
        periods.len(),
    );
}

criterion_group!(benches, answers);

fn main() {
    benches();
    Criterion::default().configure_from_args().final_summary();
    siege("none");
    siege("1000 that drip");
}
