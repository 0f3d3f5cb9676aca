//! The side on the developer's machine: boots emulated hosts, hands out cases, and judges.
//!
//! ```text
//!  cases of a group ──▶ boot ──▶ ready ──▶ job ──▶ end ──▶ pass | fail
//!                        ▲                  │
//!                        └── host died ◀────┘  the interrupted case runs again after a new boot, at most twice;
//!                                              each death is reported as an infrastructure failure
//! ```

pub mod by_hand;
pub mod emulated;
pub mod guard;
pub mod guest_image;
pub mod plain;
pub mod program_image;
pub mod qmp;
pub mod report;
pub mod runtimes;
pub mod topology_guest;
pub mod xen;

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use self::emulated::{EmulatedHost, HostKind, Workshop, copy_files};
use self::guard::Guard;
use self::plain::Outside;
use self::report::{BootReport, CaseReport, Report, Verdict};
use crate::cases::{Case, Group, Run as CaseRun};
use crate::exchange::{Event, Events, Job};

/// Time from the start of QEMU until libvirt answers: three times what a loaded two-core machine needs.
const READY_LIMIT: Duration = Duration::from_secs(300);
/// A host without a heartbeat for this long is dead. Emulated CPUs pause for tens of seconds when the machine is loaded.
const SILENCE_LIMIT: Duration = Duration::from_secs(90);
/// How much longer than a case's limit the outside waits for the inside to end the case.
const GRACE: Duration = Duration::from_secs(60);
/// How many times a case is run again because its host died.
const RETRIES: usize = 2;
/// How many boots of one group may fail before they are ready.
const BOOT_TRIES: usize = 3;
const POLL: Duration = Duration::from_millis(200);
/// Folder in a case's directory for files that are worth keeping after the case has passed.
pub const KEPT: &str = "kept";

/// Options from the command line.
#[derive(Debug, Clone)]
pub struct Options {
    /// Root of the workspace.
    pub workspace: PathBuf,
    /// The `homenode` binary under test, if it has been built.
    pub homenode: Option<PathBuf>,
    /// Whether lines that cases print are shown.
    pub verbose: bool,
    /// Whether hosts boot the newer kernel in all cases.
    pub newer: bool,
}

/// Set by Ctrl-C and SIGTERM.
pub type Interrupt = Arc<AtomicBool>;

/// Catches the signals that ask the testbed to end, so that the emulated host ends first.
///
/// # Errors
/// When a handler cannot be installed.
pub fn catch_signals() -> anyhow::Result<Interrupt> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [
        signal_hook::consts::SIGINT,
        signal_hook::consts::SIGTERM,
        signal_hook::consts::SIGHUP,
    ] {
        signal_hook::flag::register(signal, Arc::clone(&flag)).context("cannot catch signals")?;
    }
    Ok(flag)
}

/// Why waiting for the emulated host failed.
#[derive(Debug)]
enum Lost {
    /// The host is gone or silent: boot another one, and run the case again.
    Host(String),
    /// A guest vanished: run the case again.
    Guest(String),
    /// The user wants to stop.
    Interrupted,
}

/// A boot that accepts jobs.
pub struct Session {
    host: EmulatedHost,
    events: Events,
    next_job: u64,
    heartbeat: Option<u64>,
    beat_at: Instant,
    interrupt: Interrupt,
}

impl Session {
    fn new(host: EmulatedHost, interrupt: Interrupt) -> Self {
        let events = Events::of(&host.exchange);
        Self {
            host,
            events,
            next_job: 1,
            heartbeat: None,
            beat_at: Instant::now(),
            interrupt,
        }
    }

    /// Returns new events, or the reason why there will be none.
    fn poll(&mut self) -> anyhow::Result<Result<Vec<Event>, Lost>> {
        thread::sleep(POLL);
        let ended = self.host.ended()?;
        let events = self.events.read()?;
        // Events from before the host's end still count.
        if !events.is_empty() {
            return Ok(Ok(events));
        }
        if self.interrupt.load(Ordering::Relaxed) {
            return Ok(Err(Lost::Interrupted));
        }
        if let Some(why) = ended {
            return Ok(Err(Lost::Host(why)));
        }
        let heartbeat = self.host.exchange.last_beat();
        if heartbeat != self.heartbeat {
            self.heartbeat = heartbeat;
            self.beat_at = Instant::now();
        } else if heartbeat.is_some() && self.beat_at.elapsed() > SILENCE_LIMIT {
            let words = self
                .host
                .last_words()
                .unwrap_or_else(|| "the console shows no panic".to_owned());
            // A failure is ignored: a QEMU that itself hangs does not answer.
            let _ = self.host.describe_hang();
            return Ok(Err(Lost::Host(format!(
                "no heartbeat for {} s; {words}",
                SILENCE_LIMIT.as_secs()
            ))));
        }
        Ok(Ok(Vec::new()))
    }

    /// Waits until libvirt answers inside.
    fn wait_ready(&mut self) -> anyhow::Result<Result<BootReport, Lost>> {
        let mut report = BootReport::default();
        while self.host.age() < READY_LIMIT {
            let events = match self.poll()? {
                Ok(events) => events,
                Err(lost) => return Ok(Err(lost)),
            };
            for event in events {
                match event {
                    Event::Up { kernel, .. } => {
                        report.kernel = kernel;
                        report.up_s = self.host.age().as_secs_f64();
                    }
                    Event::Ready { seconds } => {
                        report.libvirt_s = seconds;
                        return Ok(Ok(report));
                    }
                    Event::Unusable { reason } => return Ok(Err(Lost::Host(reason))),
                    _ => {}
                }
            }
        }
        Ok(Err(Lost::Host(format!(
            "not ready after {} s",
            READY_LIMIT.as_secs()
        ))))
    }

    /// Runs one case to its end.
    fn run_case(&mut self, case: &Case, verbose: bool) -> anyhow::Result<Result<CaseReport, Lost>> {
        let job = self.next_job;
        self.next_job += 1;
        self.host.exchange.submit(job, &Job::Case(case.name.to_owned()))?;
        let begin = Instant::now();
        let mut report = CaseReport::of(case);
        while begin.elapsed() < case.limit + GRACE {
            let events = match self.poll()? {
                Ok(events) => events,
                Err(lost) => return Ok(Err(lost)),
            };
            for event in events {
                match event {
                    Event::Note { job: of, text } if of == job => {
                        if verbose {
                            println!("      {text}");
                        }
                        report.notes.push(text);
                    }
                    Event::End {
                        job: of,
                        error: Some(why),
                        infrastructure: true,
                        ..
                    } if of == job => {
                        return Ok(Err(Lost::Guest(why)));
                    }
                    Event::End { job: of, error, .. } if of == job => {
                        report.seconds = begin.elapsed().as_secs_f64();
                        report.verdict = if error.is_none() {
                            Verdict::Pass
                        } else {
                            Verdict::Fail
                        };
                        report.error = error;
                        return Ok(Ok(report));
                    }
                    _ => {}
                }
            }
        }
        Ok(Err(Lost::Host(format!(
            "the case did not end {} s after its limit",
            GRACE.as_secs()
        ))))
    }
}

/// A run of the testbed.
struct Run {
    options: Options,
    interrupt: Interrupt,
    guard: Guard,
    workshop: Workshop,
    dir: PathBuf,
    boots: usize,
    report: Report,
}

/// Boots the hosts that these cases need, runs the cases, and reports.
///
/// # Errors
/// When the testbed itself cannot work: a requirement is not installed, or a file cannot be written.
pub fn run(cases: &[&'static Case], options: Options) -> anyhow::Result<Report> {
    let interrupt = catch_signals()?;
    let guard = Guard::start()?;
    let dir = new_run_dir(&options.workspace)?;
    let workshop = Workshop::prepare(&options, &dir)?;
    let mut run = Run {
        options,
        interrupt,
        guard,
        workshop,
        dir,
        boots: 0,
        report: Report::default(),
    };
    let mut groups: BTreeMap<Group, VecDeque<&'static Case>> = BTreeMap::new();
    for case in cases {
        groups.entry(case.group).or_default().push_back(case);
    }
    for (group, pending) in groups {
        match group.host_kind() {
            Some(kind) => run.group(group, kind, pending)?,
            None => run.plain_group(&pending)?,
        }
    }
    run.finish()
}

impl Run {
    /// Runs all cases of a group, over as many boots as they need.
    fn group(
        &mut self,
        group: Group,
        kind: HostKind,
        mut pending: VecDeque<&'static Case>,
    ) -> anyhow::Result<()> {
        let mut deaths: BTreeMap<&'static str, Vec<String>> = BTreeMap::new();
        let mut failed_boots = Vec::new();
        while !pending.is_empty() && !self.interrupt.load(Ordering::Relaxed) {
            let Some(mut session) = self.boot(group, kind, &mut failed_boots)? else {
                if failed_boots.len() >= BOOT_TRIES {
                    break;
                }
                continue;
            };
            while let Some(case) = pending.front().copied() {
                if self.options.verbose {
                    println!("run   {}", case.name);
                }
                match session.run_case(case, self.options.verbose)? {
                    Ok(mut report) => {
                        pending.pop_front();
                        report.infrastructure = deaths.remove(case.name).unwrap_or_default();
                        let dir = session.host.exchange.case_dir(case.name);
                        match report.verdict {
                            Verdict::Pass => copy_files(&dir.join(KEPT), &self.workshop.dir)?,
                            Verdict::Fail | Verdict::Infrastructure => report.log = Some(dir),
                        }
                        self.record(report);
                    }
                    Err(lost) => {
                        let host_lives = matches!(lost, Lost::Guest(_));
                        let (Lost::Guest(why) | Lost::Host(why)) = lost else {
                            break;
                        };
                        println!(
                            "infrastructure  {}: {why} (log: {})",
                            case.name,
                            session.host.dir.display()
                        );
                        self.report.infrastructure_failures += 1;
                        let known = deaths.entry(case.name).or_default();
                        known.push(why);
                        if known.len() > RETRIES {
                            pending.pop_front();
                            let infrastructure = deaths.remove(case.name).unwrap_or_default();
                            self.record(CaseReport::lost(case, infrastructure, &session.host.dir));
                        }
                        if !host_lives {
                            break;
                        }
                    }
                }
            }
            session.host.end(&mut self.guard)?;
        }
        for case in pending {
            let reasons = if self.interrupt.load(Ordering::Relaxed) {
                vec!["interrupted".to_owned()]
            } else {
                failed_boots.clone()
            };
            self.record(CaseReport::lost(case, reasons, &self.dir));
        }
        Ok(())
    }

    /// Runs cases that need no emulated host. Each boots the plain guests that it wants.
    fn plain_group(&mut self, cases: &VecDeque<&'static Case>) -> anyhow::Result<()> {
        for case in cases {
            let CaseRun::Outside(run) = case.run else {
                bail!("{} needs an emulated host", case.name);
            };
            let dir = self.dir.join(case.name);
            fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
            let begin = Instant::now();
            let mut outside = Outside {
                workshop: &self.workshop,
                dir: &dir,
                notes: Vec::new(),
                guard: &mut self.guard,
                interrupt: &self.interrupt,
                until: begin + case.limit,
            };
            let outcome = run(&mut outside);
            let mut report = CaseReport::of(case);
            report.notes = outside.notes;
            report.seconds = begin.elapsed().as_secs_f64();
            report.verdict = match outcome {
                Ok(()) => Verdict::Pass,
                Err(_) => Verdict::Fail,
            };
            if let Err(error) = outcome {
                report.error = Some(format!("{error:#}"));
                report.log = Some(dir);
            }
            if self.options.verbose {
                report.notes.iter().for_each(|note| println!("      {note}"));
            }
            self.record(report);
        }
        Ok(())
    }

    /// Boots a host until it accepts jobs; if that fails, adds the reason to `failed`.
    fn boot(
        &mut self,
        group: Group,
        kind: HostKind,
        failed: &mut Vec<String>,
    ) -> anyhow::Result<Option<Session>> {
        self.boots += 1;
        let dir = self.dir.join(format!("boot-{}-{}", self.boots, group.name()));
        let host = EmulatedHost::boot(&self.workshop, kind, &dir, &mut self.guard)?;
        let mut session = Session::new(host, Arc::clone(&self.interrupt));
        match session.wait_ready()? {
            Ok(mut boot) => {
                println!(
                    "boot  {}: up after {:.0} s, libvirt answered {:.0} s later",
                    group.name(),
                    boot.up_s,
                    boot.libvirt_s
                );
                group.name().clone_into(&mut boot.group);
                self.report.boots.push(boot);
                Ok(Some(session))
            }
            Err(lost) => {
                session.host.end(&mut self.guard)?;
                if let Lost::Host(why) | Lost::Guest(why) = lost {
                    println!(
                        "infrastructure  boot of {}: {why} (log: {})",
                        group.name(),
                        dir.display()
                    );
                    self.report.infrastructure_failures += 1;
                    failed.push(why);
                }
                Ok(None)
            }
        }
    }

    fn record(&mut self, report: CaseReport) {
        println!("{report}");
        self.report.cases.push(report);
    }

    /// Finishes the report. Keeps the logs only after failures.
    fn finish(self) -> anyhow::Result<Report> {
        let copied = [
            "initramfs",
            "program",
            "homenode",
            emulated::GUEST_LOAD,
            "libhomenode_plugin.so",
        ];
        for name in copied {
            let _ = fs::remove_file(self.dir.join(name));
        }
        if self.report.all_passed() && self.report.infrastructure_failures == 0 {
            fs::remove_dir_all(&self.dir).with_context(|| format!("cannot remove {}", self.dir.display()))?;
        } else {
            println!("logs  {}", self.dir.display());
        }
        if self.interrupt.load(Ordering::Relaxed) {
            println!("interrupted: the cases that did not run are counted as failed");
        }
        Ok(self.report)
    }
}

/// Creates a new directory for the files of a run.
fn new_run_dir(workspace: &Path) -> anyhow::Result<PathBuf> {
    let logs = workspace.join("target/testbed/logs");
    for number in 1..100_000 {
        let dir = logs.join(format!("run-{number:04}"));
        if dir.exists() {
            continue;
        }
        fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        return Ok(dir);
    }
    bail!("{} is full: remove old runs", logs.display())
}
