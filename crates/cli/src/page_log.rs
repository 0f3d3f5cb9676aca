//! `homenode wss --log`: working sets from a log that the emulator's plugin wrote of a guest's pages.
//!
//! Each estimator that can read the log makes an estimate of the program's pages and one of the kernel's, which together are the
//! working set (seed 003, equation 1). Where the log has all frames that were used, an estimate stands beside what was.

use std::path::Path;

use homenode_meter::page_log::{Header, Log, Logs, Marks, PageLogError, Window};
use homenode_policy::working_set::logged::{Ageing, Config, Flush, HeatBy};
use homenode_policy::working_set::{
    Carrier, Certainty, Estimate, Estimator, Logged, Observation, Sampling, Seen, Settled, sampling,
};
use homenode_units::{Bytes, Ns, Pages};
use rand_core::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;
use serde::Serialize;

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
}

/// What is said of a log.
#[derive(Debug, Serialize)]
struct Report {
    log: About,
    /// What each estimator that can read the log says: when its stop rule was first met, or else in the end.
    estimates: Vec<Said>,
    /// What was used in all windows, if the log has that.
    truth: Option<Truth>,
}

#[derive(Debug, Serialize)]
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

#[derive(Debug, Serialize)]
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

#[derive(Clone, Copy, Debug, Default, Serialize)]
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

/// `homenode wss --log`.
///
/// # Errors
/// A file that is no log, or has no such windows.
pub fn run(path: &Path, args: &LogArgs, json: bool) -> anyhow::Result<()> {
    let log = Log::read(path).map_err(|error| match error {
        PageLogError::Io { .. } => anyhow::Error::new(error),
        error => bad_input(error),
    })?;
    if let Some(missing) = &log.missing {
        eprintln!("homenode: {}: {missing}", path.display());
    }
    let mu = match args.mu {
        None => None,
        Some(seconds) if seconds > 0.0 && seconds < 1e6 => Some(Ns((seconds * 1e9).max(1.0) as u64)),
        Some(seconds) => {
            return Err(bad_input(format!(
                "--mu is {seconds}; it must be above 0 and below a million seconds"
            )));
        }
    };
    let wanted = |window: &&Window| args.label.as_ref().is_none_or(|label| window.label == *label);
    let windows: Vec<&Window> = log.windows.iter().filter(wanted).collect();
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
    let mu = mu.unwrap_or(Ns(first.end_ns - first.begin_ns));
    let report = report(path, &log, &windows, mu, args.tau)?;
    if json {
        return print_json(&report);
    }
    print!("{}", text(&report));
    Ok(())
}

/// A log's windows as an estimator is shown them.
struct Reading<'a> {
    header: &'a Header,
    windows: &'a [&'a Window],
}

/// Whose frames an estimator is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whose {
    Program,
    Kernel,
}

impl Reading<'_> {
    /// Estimates by one estimator: of the frames that were logged, or for `Exact` of those that were used.
    fn estimates(&self, carrier: Carrier, config: Config, whose: Whose) -> anyhow::Result<Vec<Estimate>> {
        let mut estimator = Logged::new(config);
        let mut estimates = Vec::new();
        let mut frames = Vec::new();
        for (at, window) in self.windows.iter().enumerate() {
            frames.clear();
            for row in &window.rows {
                if row.marks.program() != (whose == Whose::Program) {
                    continue;
                }
                let count = match carrier {
                    Carrier::Exact => u32::from(row.marks.used()),
                    // Counts end at 255.
                    _ => row.count.min(255),
                };
                frames.extend((0..count).map(|_| u64::from(row.frame)));
            }
            let seen = Seen::Frames(&frames);
            let estimate = estimator.observe(&self.observation(carrier, at, seen))?;
            estimates.extend(estimate);
        }
        Ok(estimates)
    }

    fn observation<'b>(&self, carrier: Carrier, at: usize, seen: Seen<'b>) -> Observation<'b> {
        let window = self.windows[at];
        let exact = carrier == Carrier::Exact;
        Observation {
            carrier,
            at: Ns(window.end_ns),
            interval: Ns(window.end_ns - window.begin_ns),
            memory: Pages(self.header.frames),
            frames: self.header.frames + self.header.table_frames,
            seen,
            lost: if exact { 0 } else { window.lost },
            blind: Pages(if carrier == Carrier::Prl {
                self.header.blind
            } else {
                0
            }),
        }
    }

    /// What was used in windows that end no later than this.
    fn truth(&self, until: Ns, window: Ns) -> Truth {
        let mut marks = vec![0_u8; self.header.frames as usize];
        let since = until.saturating_sub(window);
        let within = |of: &&&Window| of.begin_ns >= since.0 && of.end_ns <= until.0;
        for row in self.windows.iter().filter(within).flat_map(|window| &window.rows) {
            if let Some(mark) = marks.get_mut(row.frame as usize) {
                *mark |= row.marks.0;
            }
        }
        let count = |holds: &dyn Fn(u8) -> bool| {
            Pages(marks.iter().filter(|marks| holds(**marks)).count() as u64).to_bytes()
        };
        let kernels = Marks::KERNEL_USED | Marks::KERNEL_WRITTEN | Marks::KERNEL_FETCHED;
        Truth {
            program_data_bytes: count(&|marks| marks & Marks::USED != 0),
            program_written_bytes: count(&|marks| marks & Marks::WRITTEN != 0),
            program_code_bytes: count(&|marks| marks & Marks::PROGRAM == Marks::FETCHED),
            kernel_bytes: count(&|marks| marks & Marks::PROGRAM == 0 && marks & kernels != 0),
        }
    }

    /// ESX's poll: every mu, 100 frames drawn anew.
    fn poll(&self, mu: Ns) -> anyhow::Result<Option<Estimate>> {
        let mut estimator = Sampling::new(sampling::Averages::Three, Bytes::ZERO);
        let mut chance = Pcg64Mcg::seed_from_u64(1);
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
                .filter(|_| used((chance.next_u64() % self.header.frames) as u32))
                .count();
            let seen = Seen::Sample {
                used: found as u32,
                drawn,
                complete: true,
            };
            let seen = Observation {
                interval: Ns(window.end_ns - since),
                ..self.observation(Carrier::Sampling, at, seen)
            };
            last = estimator.observe(&seen)?;
            begun = at + 1;
        }
        Ok(last)
    }
}

/// The estimate with which the estimator's loop ends for the first time with something hot, or else its last.
fn chosen(estimates: &[Estimate]) -> Option<usize> {
    let settled = |estimate: &Estimate| estimate.settled == Settled::Yes && estimate.hot > Bytes::ZERO;
    let first = estimates.iter().position(settled);
    first.or(estimates.len().checked_sub(1))
}

fn report(file: &Path, log: &Log, windows: &[&Window], mu: Ns, tau: u8) -> anyhow::Result<Report> {
    let header = &log.header;
    let reading = Reading { header, windows };
    let heat = HeatBy::Logs {
        tau,
        ageing: Ageing::Never,
    };
    let plain = Config {
        heat,
        mu,
        ..Config::seed()
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
    let mut estimates = Vec::new();
    for (estimator, carrier, config) in estimators {
        let of_program = reading.estimates(carrier, config, Whose::Program)?;
        let of_kernel = reading.estimates(carrier, config, Whose::Kernel)?;
        let Some(at) = chosen(&of_program) else {
            continue;
        };
        let (program, kernel) = (&of_program[at], of_kernel[at].hot);
        let truth = header.exact.then(|| reading.truth(program.at, Ns(u64::MAX)));
        estimates.push(Said {
            estimator,
            carrier,
            settled: program.settled,
            window_s: program.window.as_secs_f64(),
            size_bytes: program.hot + kernel,
            least_bytes: program.least + kernel,
            most_bytes: program.most + kernel,
            certainty: program.certainty,
            program_bytes: Some(program.hot),
            kernel_bytes: Some(kernel),
            warm_bytes: program.warm,
            truth_bytes: truth.map(|truth| truth.all()),
            truth_program_bytes: truth.map(|truth| truth.program_data_bytes),
            blind_spot: carrier.blind_spot(),
        });
    }
    if header.exact
        && let Some(poll) = reading.poll(mu)?
    {
        let truth = reading.truth(poll.at, Ns(u64::MAX));
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
        truth: header.exact.then(|| reading.truth(Ns(u64::MAX), Ns(u64::MAX))),
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
    use homenode_meter::page_log::{Row, Tables};

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
