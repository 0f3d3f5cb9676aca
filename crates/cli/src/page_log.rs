//! `homenode wss --log`: working sets from a log that the emulator's plugin wrote of a guest's pages.
//!
//! Each estimator that can read the log makes an estimate of the program's pages and one of the kernel's, which together are the
//! working set [PRL, equation 1]. Where the log has all frames that were used, an estimate stands beside what was. A log
//! that is being written is followed: the same estimators are shown one window after the other.

use std::fmt;
use std::io::Write as _;
use std::path::Path;
use std::thread;
use std::time::Duration;

use homenode_formats::page_log::{Followed, Follower, Header, Log, Logs, Marks, PageLogError, Window};
use homenode_policy::working_set::logged::{Ageing, Config, Flush, HeatBy};
use homenode_policy::working_set::{
    Carrier, Certainty, Estimate, Estimator, Logged, Observation, Sampling, Seen, Settled, sampling,
};
use homenode_units::{Bytes, Chance, Ns, Pages};
use schemars::JsonSchema;
use serde::Serialize;

use homenode_api::document::document;

use crate::bad_input;
use crate::output::{print_json, table};

/// Options of `wss --log`.
#[derive(Debug, clap::Args)]
pub struct LogArgs {
    /// Only windows with this label
    #[arg(long, value_name = "LABEL", requires = "log")]
    pub label: Option<String>,
    /// After how many seconds frames are judged (mu); default: a window of the log
    #[arg(long, value_name = "SECONDS", requires = "log")]
    pub mu: Option<f64>,
    /// How often a frame is logged that PRL calls hot (tau)
    #[arg(long, value_name = "COUNT", default_value_t = 50, requires = "log", value_parser = clap::value_parser!(u8).range(1..))]
    pub tau: u8,
    /// Follow a log that is being written: what is known after each mu, until the log ends
    #[arg(long, requires = "log")]
    pub follow: bool,
}

/// What is said of a log.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    log: About,
    /// What each estimator that can read the log says: when its stop rule was first met, or else in the end.
    estimates: Vec<Said>,
    /// What was used in all windows, if the log has that.
    truth: Option<Truth>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct About {
    file: String,
    core: String,
    logs: &'static str,
    vcpus: u32,
    memory_bytes: Bytes,
    windows: usize,
    seconds: f64,
    walks: u64,
    logged: u64,
    lost: u64,
    buffers_filled: u64,
    missing: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Said {
    estimator: &'static str,
    carrier: Carrier,
    settled: Settled,
    window_s: f64,
    /// The program's hot pages and the kernel's.
    size_bytes: Bytes,
    least_bytes: Bytes,
    most_bytes: Bytes,
    certainty: Certainty,
    /// The program's hot pages; none of a poll, which does not know whose they are.
    program_bytes: Option<Bytes>,
    /// The kernel's: epsilon.
    kernel_bytes: Option<Bytes>,
    warm_bytes: Bytes,
    /// Used in the same time.
    truth_bytes: Option<Bytes>,
    /// Of that, pages that a program read or wrote.
    truth_program_bytes: Option<Bytes>,
    blind_spot: &'static str,
}

#[derive(Clone, Copy, Debug, Default, Serialize, JsonSchema)]
struct Truth {
    /// Pages that a program read or wrote.
    program_data_bytes: Bytes,
    /// Of those, pages that it wrote.
    program_written_bytes: Bytes,
    /// Pages that it only executed.
    program_code_bytes: Bytes,
    /// Pages that only the kernel used.
    kernel_bytes: Bytes,
}

impl LogArgs {
    fn wants(&self, window: &Window) -> bool {
        self.label.as_ref().is_none_or(|label| window.label == *label)
    }

    /// Mu, which is as long as the first window where nothing else is said.
    fn mu(&self, first: &Window) -> anyhow::Result<Ns> {
        match self.mu {
            None => Ok(Ns(first.end_ns - first.begin_ns)),
            Some(seconds) if seconds > 0.0 && seconds < 1e6 => Ok(Ns((seconds * 1e9).max(1.0) as u64)),
            Some(seconds) => Err(bad_input(format!(
                "--mu is {seconds}; it must be above 0 and below a million seconds"
            ))),
        }
    }
}

/// What is no log is the user's mistake; what cannot be read need not be.
fn refused(error: PageLogError) -> anyhow::Error {
    match error {
        PageLogError::Io { .. } => anyhow::Error::new(error),
        error => bad_input(error),
    }
}

/// `homenode wss --log`.
///
/// # Errors
/// A file that is no log, or has no such windows.
pub fn run(path: &Path, args: &LogArgs, json: bool) -> anyhow::Result<()> {
    if args.follow {
        return follow(path, args, json);
    }
    let log = Log::read(path).map_err(refused)?;
    if let Some(missing) = &log.missing {
        eprintln!("homenode: {}: {missing}", path.display());
    }
    let given_up = log.header.kept.number;
    if given_up > 0 {
        eprintln!(
            "homenode: {}: {given_up} windows before these were given up",
            path.display()
        );
    }
    let windows: Vec<&Window> = log.windows.iter().filter(|window| args.wants(window)).collect();
    let Some(first) = windows.first() else {
        let mut labels: Vec<&str> = log.windows.iter().map(|window| window.label.as_str()).collect();
        labels.dedup();
        return Err(bad_input(format!(
            "{}: no window{}; there are windows labelled: {}",
            path.display(),
            args.label
                .as_ref()
                .map_or(String::new(), |label| format!(" is labelled {label}")),
            labels.join(", ")
        )));
    };
    let report = report(path, &log, &windows, args.mu(first)?, args.tau)?;
    if json {
        return print_json("log-estimates", &report);
    }
    crate::output::print(format_args!("{}", text(&report)));
    Ok(())
}

/// An estimator that is shown one window after the other, the program's pages and the kernel's apart.
struct Eye {
    name: &'static str,
    carrier: Carrier,
    program: Logged,
    kernel: Logged,
    frames: Vec<u64>,
}

/// The program's pages, and the kernel's.
struct Estimates {
    program: Estimate,
    kernel: Estimate,
}

impl Eye {
    /// Those that can read such a log.
    fn all(header: &Header, mu: Ns, tau: u8) -> Vec<Eye> {
        let heat = HeatBy::Logs {
            tau,
            ageing: Ageing::Never,
        };
        let plain = Config {
            heat,
            mu,
            ..Config::published()
        };
        let repaired = Config {
            mu,
            flush: if header.flush {
                Flush::EachWindow
            } else {
                Flush::Never
            },
            ..Config::repaired()
        };
        let pml = Config { mu, ..Config::pml() };
        let mut estimators = match header.logs {
            Logs::Walks => vec![
                ("prl", Carrier::Prl, plain),
                ("prl-repaired", Carrier::Prl, repaired),
            ],
            Logs::Writes => vec![("pml", Carrier::Pml, pml)],
            Logs::Nothing => vec![],
        };
        if header.exact {
            estimators.push(("exact", Carrier::Exact, repaired));
        }
        let eye = |(name, carrier, config): (_, _, Config)| Eye {
            name,
            carrier,
            program: Logged::new(config),
            kernel: Logged::new(config),
            frames: Vec::new(),
        };
        estimators.into_iter().map(eye).collect()
    }

    /// Takes in a window; after each mu there are estimates.
    fn observe(&mut self, header: &Header, window: &Window) -> anyhow::Result<Option<Estimates>> {
        let program = self.observe_part(header, window, true)?;
        let kernel = self.observe_part(header, window, false)?;
        Ok(program
            .zip(kernel)
            .map(|(program, kernel)| Estimates { program, kernel }))
    }

    fn observe_part(
        &mut self,
        header: &Header,
        window: &Window,
        of_program: bool,
    ) -> anyhow::Result<Option<Estimate>> {
        self.frames.clear();
        for row in window.rows.iter().filter(|row| row.marks.program() == of_program) {
            let count = match self.carrier {
                Carrier::Exact => u32::from(row.marks.used()),
                // Counts end at 255.
                _ => row.count.min(255),
            };
            self.frames.extend((0..count).map(|_| u64::from(row.frame)));
        }
        let estimator = if of_program {
            &mut self.program
        } else {
            &mut self.kernel
        };
        let seen = observation(header, window, self.carrier, Seen::Frames(&self.frames));
        Ok(estimator.observe(&seen)?)
    }

    fn said(&self, estimates: &Estimates, truth: Option<Truth>) -> Said {
        let Estimates { program, kernel } = estimates;
        Said {
            estimator: self.name,
            carrier: self.carrier,
            settled: program.settled,
            window_s: program.window.as_secs_f64(),
            size_bytes: program.hot + kernel.hot,
            least_bytes: program.least + kernel.hot,
            most_bytes: program.most + kernel.hot,
            certainty: program.certainty,
            program_bytes: Some(program.hot),
            kernel_bytes: Some(kernel.hot),
            warm_bytes: program.warm,
            truth_bytes: truth.map(|truth| truth.all()),
            truth_program_bytes: truth.map(|truth| truth.program_data_bytes),
            blind_spot: self.carrier.blind_spot(),
        }
    }
}

fn observation<'a>(header: &Header, window: &Window, carrier: Carrier, seen: Seen<'a>) -> Observation<'a> {
    let exact = carrier == Carrier::Exact;
    Observation {
        carrier,
        at: Ns(window.end_ns),
        interval: Ns(window.end_ns - window.begin_ns),
        memory: Pages(header.frames),
        frames: header.frames + header.table_frames,
        seen,
        lost: if exact { 0 } else { window.lost },
        blind: Pages(if carrier == Carrier::Prl { header.blind } else { 0 }),
    }
}

/// What was done to each frame, in all windows together.
struct Used(Vec<u8>);

impl Used {
    fn new(header: &Header) -> Used {
        Used(vec![0; header.frames as usize])
    }

    fn add(&mut self, window: &Window) {
        for row in &window.rows {
            if let Some(marks) = self.0.get_mut(row.frame as usize) {
                *marks |= row.marks.0;
            }
        }
    }

    fn truth(&self) -> Truth {
        let count = |holds: &dyn Fn(u8) -> bool| {
            Pages(self.0.iter().filter(|marks| holds(**marks)).count() as u64).to_bytes()
        };
        let kernels = Marks::KERNEL_USED | Marks::KERNEL_WRITTEN | Marks::KERNEL_FETCHED;
        Truth {
            program_data_bytes: count(&|marks| marks & Marks::USED != 0),
            program_written_bytes: count(&|marks| marks & Marks::WRITTEN != 0),
            program_code_bytes: count(&|marks| marks & Marks::PROGRAM == Marks::FETCHED),
            kernel_bytes: count(&|marks| marks & Marks::PROGRAM == 0 && marks & kernels != 0),
        }
    }
}

/// How often somebody who follows looks whether there is more.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// What is known of a log after a mu.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Known {
    /// The last window's number.
    window: u64,
    /// Its end, since the log was begun.
    at_s: f64,
    /// Windows that were given up before they could be read.
    given_up: u64,
    estimates: Vec<Said>,
    /// What was used since the log is followed, if the log has that.
    truth: Option<Truth>,
}

/// `homenode wss --log --follow`.
fn follow(path: &Path, args: &LogArgs, json: bool) -> anyhow::Result<()> {
    let mut follower = Follower::open(path).map_err(refused)?;
    let mut watching = None;
    loop {
        let window = match follower.advance().map_err(refused)? {
            Followed::Window(window) => window,
            Followed::End => return Ok(()),
            Followed::Nothing => {
                thread::sleep(LOOK_EVERY);
                continue;
            }
        };
        let Some(header) = follower.header().filter(|_| args.wants(&window)) else {
            continue;
        };
        let (eyes, used) = match &mut watching {
            Some(watching) => watching,
            None => watching.insert((Eye::all(header, args.mu(&window)?, args.tau), Used::new(header))),
        };
        used.add(&window);
        let mut estimates = Vec::new();
        for eye in eyes {
            if let Some(of_mu) = eye.observe(header, &window)? {
                estimates.push(eye.said(&of_mu, header.exact.then(|| used.truth())));
            }
        }
        if estimates.is_empty() {
            continue;
        }
        let known = Known {
            window: window.number,
            at_s: Ns(window.end_ns).as_secs_f64(),
            given_up: follower.given_up(),
            estimates,
            truth: header.exact.then(|| used.truth()),
        };
        let line = if json {
            document("log-estimate", serde_json::to_value(&known)?).to_string()
        } else {
            known.to_string()
        };
        // Whoever reads may have had enough.
        if writeln!(std::io::stdout(), "{line}").is_err() {
            return Ok(());
        }
    }
}

impl fmt::Display for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} s:", self.at_s)?;
        for said in &self.estimates {
            let settled = if said.settled == Settled::Yes {
                ", settled"
            } else {
                ""
            };
            write!(f, " {} {} MiB{settled};", said.estimator, mib(said.size_bytes))?;
        }
        if let Some(truth) = &self.truth {
            write!(f, " used since {} MiB;", mib(truth.all()))?;
        }
        write!(f, " {} windows missed", self.given_up)
    }
}

/// A log's windows.
struct Reading<'a> {
    header: &'a Header,
    windows: &'a [&'a Window],
}

impl Reading<'_> {
    /// What was used in windows that end no later than this.
    fn truth(&self, until: Ns) -> Truth {
        let mut used = Used::new(self.header);
        let within = self.windows.iter().filter(|window| window.end_ns <= until.0);
        within.for_each(|window| used.add(window));
        used.truth()
    }

    /// ESX's poll: every mu, 100 frames drawn anew.
    fn poll(&self, mu: Ns) -> anyhow::Result<Option<Estimate>> {
        let mut estimator = Sampling::new(sampling::Averages::Three, Bytes::ZERO);
        let mut chance = Chance::new(1);
        let (mut last, mut begun) = (None, 0);
        for (at, window) in self.windows.iter().enumerate() {
            let since = self.windows[begun].begin_ns;
            if window.end_ns - since < mu.0 {
                continue;
            }
            let used = |frame: u32| {
                self.windows[begun..=at].iter().any(|window| {
                    let row = window.rows.binary_search_by_key(&frame, |row| row.frame);
                    row.is_ok_and(|row| window.rows[row].marks.used())
                })
            };
            let drawn = 100;
            let found = (0..drawn)
                .filter(|_| used((chance.bits() % self.header.frames) as u32))
                .count();
            let seen = Seen::Sample {
                used: found as u32,
                drawn,
                complete: true,
            };
            let seen = Observation {
                interval: Ns(window.end_ns - since),
                ..observation(self.header, window, Carrier::Sampling, seen)
            };
            last = estimator.observe(&seen)?;
            begun = at + 1;
        }
        Ok(last)
    }
}

/// The estimate with which the estimator's loop ends for the first time with something hot, or else its last.
fn chosen(estimates: &[Estimates]) -> Option<&Estimates> {
    let settled = |of: &&Estimates| of.program.settled == Settled::Yes && of.program.hot > Bytes::ZERO;
    estimates.iter().find(settled).or(estimates.last())
}

fn report(file: &Path, log: &Log, windows: &[&Window], mu: Ns, tau: u8) -> anyhow::Result<Report> {
    let header = &log.header;
    let reading = Reading { header, windows };
    let mut estimates = Vec::new();
    for mut eye in Eye::all(header, mu, tau) {
        let mut all = Vec::new();
        for window in windows {
            all.extend(eye.observe(header, window)?);
        }
        if let Some(estimate) = chosen(&all) {
            let truth = header.exact.then(|| reading.truth(estimate.program.at));
            estimates.push(eye.said(estimate, truth));
        }
    }
    if header.exact
        && let Some(poll) = reading.poll(mu)?
    {
        let truth = reading.truth(poll.at);
        estimates.push(Said {
            estimator: "poll",
            carrier: poll.carrier,
            settled: poll.settled,
            window_s: poll.window.as_secs_f64(),
            size_bytes: poll.size,
            least_bytes: poll.least,
            most_bytes: poll.most,
            certainty: poll.certainty,
            program_bytes: None,
            kernel_bytes: None,
            warm_bytes: poll.warm,
            truth_bytes: Some(truth.all()),
            truth_program_bytes: Some(truth.program_data_bytes),
            blind_spot: poll.carrier.blind_spot(),
        });
    }
    let sum = |figure: fn(&Window) -> u64| windows.iter().map(|window| figure(window)).sum();
    let length: u64 = sum(|window| window.end_ns - window.begin_ns);
    Ok(Report {
        log: About {
            file: file.display().to_string(),
            core: header.core.clone(),
            logs: match header.logs {
                Logs::Nothing => "nothing",
                Logs::Writes => "writes",
                Logs::Walks => "walks",
            },
            vcpus: header.vcpus,
            memory_bytes: Pages(header.frames).to_bytes(),
            windows: windows.len(),
            seconds: Ns(length).as_secs_f64(),
            walks: sum(|window| window.walks),
            logged: sum(|window| window.logged),
            lost: sum(|window| window.lost),
            buffers_filled: sum(|window| window.filled),
            missing: log.missing.map(|missing| missing.to_string()),
        },
        estimates,
        truth: header.exact.then(|| reading.truth(Ns(u64::MAX))),
    })
}

impl Truth {
    fn all(&self) -> Bytes {
        self.program_data_bytes + self.program_code_bytes + self.kernel_bytes
    }
}

fn mib(bytes: Bytes) -> String {
    format!("{:.1}", bytes.as_f64() / (1 << 20) as f64)
}

fn text(report: &Report) -> String {
    let About {
        core,
        logs,
        windows,
        seconds,
        logged,
        lost,
        ..
    } = &report.log;
    let memory = mib(report.log.memory_bytes);
    let mut text = format!(
        "{windows} windows, {seconds:.1} s of a guest of {memory} MiB on core {core}; {logs} are logged: {logged} frames, {lost} lost\n"
    );
    let rows = report.estimates.iter().map(|said| {
        let part = |bytes: Option<Bytes>| bytes.map_or("-".to_owned(), mib);
        let certainty = match said.certainty {
            Certainty::Bounds => "bounds",
            Certainty::Percent95 => "95 %",
            Certainty::Spread => "spread",
        };
        vec![
            said.estimator.to_owned(),
            mib(said.size_bytes),
            mib(said.least_bytes),
            mib(said.most_bytes),
            certainty.to_owned(),
            part(said.program_bytes),
            part(said.kernel_bytes),
            mib(said.warm_bytes),
            part(said.truth_bytes),
            format!("{:.1}", said.window_s),
            if said.settled == Settled::Yes { "yes" } else { "no" }.to_owned(),
        ]
    });
    let header = [
        "estimator",
        "MiB",
        "from",
        "to",
        "certainty",
        "program",
        "kernel",
        "warm",
        "used",
        "over s",
        "settled",
    ];
    text += &format!("{}\n", table(&header, rows));
    if let Some(truth) = &report.truth {
        text += &format!(
            "used in all windows: the program's data {} MiB (written {}), its code {}, the kernel's {}\n",
            mib(truth.program_data_bytes),
            mib(truth.program_written_bytes),
            mib(truth.program_code_bytes),
            mib(truth.kernel_bytes)
        );
    }
    for said in &report.estimates {
        text += &format!("blind spot of {}: {}\n", said.estimator, said.blind_spot);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_formats::page_log::{Kept, Row, Tables};

    /// A log of ten windows of a second: frames 0 to 99 are a program's and logged 20 times in each, 100 to 109 the kernel's
    /// and logged 30 times, 110 to 119 are used by the program and never logged.
    fn log(exact: bool) -> Log {
        let header = Header {
            logs: Logs::Walks,
            tables: Tables::Silent,
            exact,
            fetches: false,
            flush: false,
            core: "i7_pml".to_owned(),
            frames: 1000,
            table_frames: 10,
            vcpus: 1,
            blind: 50,
            begun_unix_ns: 0,
            begun_ns: 0,
            entries: 512,
            kept: Kept::ALL,
        };
        let row = |frame| {
            let (count, marks) = match frame {
                0..100 => (20, Marks::USED | Marks::WRITTEN),
                100..110 => (30, Marks::KERNEL_USED),
                _ => (0, Marks::USED),
            };
            let marks = Marks(marks);
            Row { frame, count, marks }
        };
        let window = |number| Window {
            number,
            begin_ns: number * 1_000_000_000,
            end_ns: (number + 1) * 1_000_000_000,
            rows: (0..if exact { 120 } else { 110 }).map(row).collect(),
            ..Window::default()
        };
        Log {
            header,
            windows: (0..10).map(window).collect(),
            missing: None,
        }
    }

    fn of(log: &Log) -> Report {
        let windows: Vec<&Window> = log.windows.iter().collect();
        report(Path::new("x"), log, &windows, Ns::from_secs(1), 50).expect("windows in order")
    }

    fn pages(bytes: Bytes) -> u64 {
        bytes.to_pages().0
    }

    #[test]
    fn an_estimate_is_the_programs_hot_pages_and_the_kernels_apart() {
        let report = of(&log(true));
        let names: Vec<&str> = report.estimates.iter().map(|said| said.estimator).collect();
        assert_eq!(names, ["prl", "prl-repaired", "exact", "poll"]);
        let prl = &report.estimates[0];
        // 50 times are reached in the third second, and the loop ends four later.
        assert_eq!((prl.settled, prl.window_s), (Settled::Yes, 7.0));
        assert_eq!(prl.program_bytes.map(pages), Some(100));
        assert_eq!(prl.kernel_bytes.map(pages), Some(10));
        assert_eq!(
            [prl.size_bytes, prl.least_bytes, prl.most_bytes].map(pages),
            [110, 110, 160]
        );
        assert_eq!(prl.truth_bytes.map(pages), Some(120));
        assert_eq!(prl.truth_program_bytes.map(pages), Some(110));
        assert_eq!(report.estimates[2].program_bytes.map(pages), Some(110));
        let truth = report.truth.expect("it is exact");
        let parts = [
            truth.program_data_bytes,
            truth.program_written_bytes,
            truth.program_code_bytes,
            truth.kernel_bytes,
        ];
        assert_eq!(parts.map(pages), [110, 100, 0, 10]);
    }

    #[test]
    fn a_log_without_what_was_used_is_not_compared_with_it() {
        let report = of(&log(false));
        assert!(report.truth.is_none() && report.estimates.iter().all(|said| said.truth_bytes.is_none()));
        assert_eq!(report.estimates.len(), 2);
        assert!(text(&report).contains("prl-repaired"));
    }
}
