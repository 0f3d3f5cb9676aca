//! What the agent costs a host in total: CPU time of sampling, deciding and recording, and memory.
//!
//!     cargo bench -p homenode-agent --bench cost                          32, 100, 300 and 1000 VMs, a minute each
//!     cargo bench -p homenode-agent --bench cost -- 32 --periods 600      32 VMs, ten minutes
//!
//! One process writes a fake host ([`host`]) into memory, and changes its files between two samples. A second process runs the
//! agent's own loop on it, as `homenode run --host qemu` does. The periods are real seconds, because what CPU caches lose within
//! a second is part of the cost. CPU time is what the kernel accounts to the second process: its loop's thread in parts, the
//! recorder's thread, and the total.
//!
//! Not included: the guard, which sleeps; requests to VMs' monitors, since no monitor runs here; reading hardware counters, which
//! the kernel refuses to open here, and carrying out plans, since [`fakes`] replaces both; and the extra time that the kernel
//! takes for real `/proc`, `/sys` and cgroup files compared with a tmpfs. Figures are in `docs/SPEED.md`.

#![allow(clippy::print_stdout)] // figures

mod fakes;
mod host;

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fakes::Fakes;
use homenode_agent::Show;
use homenode_agent::history::History;
use homenode_agent::reload::Reload;
use homenode_agent::run::{Agent, Pace};
use homenode_agent::service::Service;
use homenode_agent::setting_queue::SettingQueue;
use homenode_agent::usage_file::{Clock, UsageFile};
use homenode_agent::wall_clock::WallClock;
use homenode_control::{Config, Control, Cycle, Mode};
use homenode_host::{
    ActionError, Holds, Host, HostError, Plan, Receipt, Refusal, Sample, Setting, WakeSignal,
};
use homenode_kvm::{KvmHost, Vms};
use homenode_machine::Machine;
use homenode_undo::Options;
use homenode_undo::RealHost as _;
use homenode_units::{Ns, VmId};
use host::FakeHost;
use rustix::time::ClockId;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Periods before counting starts, in which the agent finds the VMs and creates its files.
const WARM: u64 = 5;
/// Periods between two readings of the agent's memory.
const MEMORY_EVERY: u64 = 10;

/// CPU time since counting began: the loop's thread in parts, and the total.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Spent {
    sampling: Duration,
    deciding: Duration,
    /// Time that the loop's thread spends to hand a cycle over to the recorder.
    handing_over: Duration,
    recorder: Duration,
    all: Duration,
    /// VMs in the last sample.
    vms: usize,
    decisions: u64,
    events: u64,
}

/// CPU time spent so far, and the CPU clock of the loop's thread at the last lap.
#[derive(Debug, Default)]
struct Meter {
    spent: Spent,
    since: Duration,
    /// CPU time of the process and of its recorder when counting began.
    before: (Duration, Duration),
    cycles: u64,
}

impl Meter {
    /// Returns the CPU time that the loop's thread has used since the last call.
    fn lap(&mut self) -> Duration {
        let now = cpu_time(ClockId::ThreadCPUTime);
        now.saturating_sub(std::mem::replace(&mut self.since, now))
    }

    /// Ends a period; returns true if the benchmark has counted `periods` periods.
    fn is_over(&mut self, periods: u64) -> bool {
        let lap = self.lap();
        self.spent.handing_over += lap;
        self.cycles += 1;
        let is_over = self.cycles == WARM + periods;
        // These clocks are read only at the beginning and the end, since reading them takes time itself.
        if self.cycles == WARM || is_over {
            let now = (cpu_time(ClockId::ProcessCPUTime), cpu_time_of("recorder"));
            self.spent.all = now.0 - self.before.0;
            self.spent.recorder = now.1 - self.before.1;
            if !is_over {
                (self.spent, self.before) = (Spent::default(), now);
            }
        }
        self.lap();
        is_over
    }
}

fn cpu_time(clock: ClockId) -> Duration {
    let time = rustix::time::clock_gettime(clock);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns the CPU time of this process's threads that are called `name`.
fn cpu_time_of(name: &str) -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").expect("threads");
    let of = |task: std::fs::DirEntry| {
        let comm = std::fs::read_to_string(task.path().join("comm")).ok()?;
        let ran = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        let ns = ran.split_whitespace().next()?.parse().ok()?;
        (comm.trim() == name).then_some(Duration::from_nanos(ns))
    };
    tasks.flatten().filter_map(of).sum()
}

/// The fake host as the agent sees it, with a meter.
struct Metered {
    host: KvmHost,
    fakes: Fakes,
    meter: Rc<RefCell<Meter>>,
}

impl Host for Metered {
    fn machine(&self) -> &Machine {
        self.host.machine()
    }

    fn wait(&mut self, period: Ns) -> Ns {
        self.host.wait(period)
    }

    fn sample(&mut self) -> Result<Sample, HostError> {
        self.meter.borrow_mut().lap();
        let mut sample = self.host.sample();
        let mut meter = self.meter.borrow_mut();
        let lap = meter.lap();
        meter.spent.sampling += lap;
        meter.spent.vms = sample.as_ref().map_or(0, |sample| sample.vms.len());
        sample.iter_mut().for_each(|sample| self.fakes.add_to(sample));
        meter.lap();
        sample
    }

    fn commit(&mut self, plan: &Plan) -> Result<Receipt, Refusal> {
        let mut meter = self.meter.borrow_mut();
        let lap = meter.lap();
        meter.spent.deciding += lap;
        meter.spent.decisions += plan.decisions.len() as u64;
        let receipt = self.fakes.carry_out(plan);
        meter.lap();
        Ok(receipt)
    }

    fn set_where(&mut self, vm: VmId, settings: &[Setting], holds: Holds<'_>) -> Result<bool, ActionError> {
        self.host.set_where(vm, settings, holds)
    }
}

/// Meters the time in which the loop decided, at the end of each cycle.
struct Told(Rc<RefCell<Meter>>);

impl Show for Told {
    fn line(&mut self, _: &str) {}

    fn object(&mut self, _: &str, _: Value) {}

    fn cycle(&mut self, cycle: &Cycle) {
        let mut meter = self.0.borrow_mut();
        let lap = meter.lap();
        meter.spent.deciding += lap;
        meter.spent.events += cycle.events.len() as u64;
        meter.lap();
    }

    fn is_closed(&self) -> bool {
        false
    }
}

/// Runs the agent on the host below `root` for `periods` periods.
fn run_agent(root: &Path, state: &Path, periods: u64, period: Ns) {
    let machine = machine();
    let wake_signal = WakeSignal::default();
    let options = Options {
        root: root.to_owned(),
        state_dir: state.to_owned(),
        topology_socket: state.join("topology.sock"),
        wake_signal: wake_signal.clone(),
        ..Options::new(machine.clone())
    };
    let host = KvmHost::connect(&Vms::Qemu, options).expect("a host");
    let config = Config {
        period,
        ..Config::default()
    };
    let (usage, lines) = UsageFile::open(Some(state), Clock::Wall);
    let control = Control::new(config.clone(), Mode::Act).with_usage(lines);
    let clock = WallClock::start(Clock::Wall);
    let named = ("a fake host".to_owned(), &machine);
    let history = History::begin(
        &state.join("history.sqlite"),
        (&config, Mode::Act),
        clock,
        named,
        "bench",
    );
    assert!(history.is_kept(), "a history");
    let meter = Rc::new(RefCell::new(Meter::default()));
    let mut told = Told(Rc::clone(&meter));
    let mut agent = Agent {
        control: Arc::new(Mutex::new(control)),
        settings: SettingQueue::new(&wake_signal),
        reload: Reload::never(&wake_signal),
        service: Service::of_environment(),
        usage,
        history,
        feed: None,
        trace: None,
        output: &mut told,
        commit: "bench",
        wake_signal,
        duration: None,
        period,
        pace: Pace::Real,
    };
    let is_shown = std::env::var_os("HOMENODE_NOTICES").is_some();
    let notices = |host: &mut Metered| {
        println!("over");
        let notices = host.host.take_notices();
        if is_shown {
            notices.iter().for_each(|notice| println!("notice {notice}"));
        }
        notices
    };
    let is_over = |host: &Metered| host.meter.borrow_mut().is_over(periods);
    let fakes = Fakes::default();
    let mut metered = Metered {
        host,
        fakes,
        meter: Rc::clone(&meter),
    };
    agent.run(&mut metered, notices, is_over);
    let spent = meter.borrow().spent;
    println!("{}", serde_json::to_string(&spent).expect("figures"));
}

fn machine() -> Machine {
    homenode_machine_files::preset("r910").expect("a preset")
}

/// Returns a process's memory in bytes: its proportional share now, and its peak resident size.
fn memory(pid: u32) -> Option<(u64, u64)> {
    let kib = |file: &str, key: &str| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/{file}")).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    Some((kib("smaps_rollup", "Pss:")? << 10, kib("status", "VmHWM:")? << 10))
}

/// Measures an agent on a host with `vms` VMs, and prints a row.
fn measure(vms: usize, periods: u64, period: Duration) {
    let on_tmpfs = tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .expect("a directory");
    let state = tempfile::tempdir().expect("a directory");
    let mut fake = FakeHost::write(on_tmpfs.path(), &machine(), vms);
    let mut agent = Command::new(std::env::current_exe().expect("this program"))
        .arg("agent")
        .args([on_tmpfs.path(), state.path()])
        .args([periods.to_string(), period.as_millis().to_string()])
        .stdout(Stdio::piped())
        .spawn()
        .expect("an agent");
    let lines = BufReader::new(agent.stdout.take().expect("its output")).lines();
    let (mut cycles, mut share, mut most, mut last) = (0, 0, 0, String::new());
    for line in lines {
        let line = line.expect("a line");
        if line == "over" {
            cycles += 1;
            fake.go_on();
            if cycles % MEMORY_EVERY == 0
                && let Some((now, high)) = memory(agent.id())
            {
                (share, most) = (share.max(now), most.max(high));
            }
        } else if let Some(notice) = line.strip_prefix("notice ") {
            println!("{notice}");
        } else {
            last = line;
        }
    }
    assert!(agent.wait().expect("its end").success(), "the agent failed");
    let spent: Spent = serde_json::from_str(&last).expect("figures");
    assert_eq!(spent.vms, vms, "the agent sees all VMs");
    print(vms, periods, period, &spent, (share, most));
}

fn print(vms: usize, periods: u64, period: Duration, spent: &Spent, (share, most): (u64, u64)) {
    let percent = |time: Duration| 100.0 * time.as_secs_f64() / (period.as_secs_f64() * periods as f64);
    let known = spent.sampling + spent.deciding + spent.handing_over + spent.recorder;
    let per_vm = spent.all.as_secs_f64() * 1e6 / periods as f64 / vms as f64;
    println!(
        "| {vms} | {:.3} | {:.3} | {:.3} | {:.3} + {:.3} | {:.3} | {per_vm:.1} | {:.1} | {:.1} | {:.1} | {:.1} |",
        percent(spent.all),
        percent(spent.sampling),
        percent(spent.deciding),
        percent(spent.handing_over),
        percent(spent.recorder),
        percent(spent.all.saturating_sub(known)),
        share as f64 / f64::from(1 << 20),
        most as f64 / f64::from(1 << 20),
        spent.decisions as f64 / periods as f64,
        spent.events as f64 / periods as f64,
    );
    let _ = std::io::stdout().flush();
}

fn main() {
    let words: Vec<String> = std::env::args()
        .skip(1)
        .filter(|word| word != "--bench")
        .collect();
    if let [mode, root, state, periods, period_ms] = words.as_slice()
        && mode == "agent"
    {
        let number = |text: &String| text.parse().expect("a number");
        return run_agent(
            Path::new(root),
            &PathBuf::from(state),
            number(periods),
            Ns::from_millis(number(period_ms)),
        );
    }
    let (mut sizes, mut periods, mut period) = (Vec::new(), 60, Duration::from_secs(1));
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        let mut number = || words.next().and_then(|word| word.parse().ok()).expect("a number");
        match word.as_str() {
            "--periods" => periods = number(),
            "--period-ms" => period = Duration::from_millis(number()),
            vms => sizes.push(
                vms.parse()
                    .expect("a number of VMs, --periods N or --period-ms N"),
            ),
        }
    }
    if sizes.is_empty() {
        sizes = vec![32, 100, 300, 1000];
    }
    println!("percent of a CPU over {periods} periods of {period:?}; microseconds of CPU; MiB");
    println!(
        "| VMs | all in | sampling | deciding | recording | else | per VM and period | memory (PSS) | most (RSS) | decisions | events |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for vms in sizes {
        measure(vms, periods, period);
    }
}
