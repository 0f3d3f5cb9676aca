//! Runs working-set estimators on a log of a guest's pages.
//!
//! Each estimator that can read the log estimates the program's pages and the kernel's pages; their sum is the working set
//! [PRL, equation 1]. If the log has all used frames, each estimate comes with the true figure. A log that is still being
//! written is followed: the same estimators process one window after the other ([`Watching`]).

use std::path::Path;

use homenode_formats::page_log::{Header, Log, Logs, Marks, Window};
use homenode_policy::working_set::logged::{Ageing, Config, Flush, HeatBy};
use homenode_policy::working_set::{
    Certainty, Estimate, Estimator, Logged, ObservationRef, Sampling, Settled, Tracker, Unfit, UsedRef,
    sampling,
};
use homenode_units::{Bytes, Chance, Ns, Pages};
use schemars::JsonSchema;
use serde::Serialize;

/// Report about a log.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The log.
    pub log: About,
    /// For each applicable estimator, the estimate with which it first settled, or else its last one.
    pub estimates: Vec<Said>,
    /// The pages used in all windows, if the log records all used frames.
    pub truth: Option<Truth>,
}

/// Description of a log.
#[derive(Debug, Serialize, JsonSchema)]
pub struct About {
    /// The log's path.
    pub file: String,
    /// The modelled processor core.
    pub core: String,
    /// The frames that are logged: `nothing`, `writes`, `walks`.
    pub logs: &'static str,
    /// vCPUs of the guest.
    pub vcpus: u32,
    /// Memory of the guest.
    pub memory_bytes: Bytes,
    /// Number of windows read.
    pub windows: usize,
    /// Total duration of the windows, in seconds.
    pub seconds: f64,
    /// Number of page walks in the windows.
    pub walks: u64,
    /// Number of frames logged.
    pub logged: u64,
    /// Number of logged frames that were lost.
    pub lost: u64,
    /// Number of times that a buffer was filled.
    pub buffers_filled: u64,
    /// The part that is missing from the file, if any.
    pub missing: Option<String>,
}

/// Result of an estimator.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Said {
    /// The estimator's name.
    pub estimator: &'static str,
    /// The tracker that collected the estimator's data.
    pub tracker: Tracker,
    /// Whether the estimate is settled: more windows would hardly change it.
    pub settled: Settled,
    /// Duration that the estimate covers, in seconds.
    pub window_s: f64,
    /// Hot pages of the program and the kernel.
    pub size_bytes: Bytes,
    /// The lower end of the interval.
    pub least_bytes: Bytes,
    /// The upper end.
    pub most_bytes: Bytes,
    /// Meaning of the two ends.
    pub certainty: Certainty,
    /// Hot pages of the program; absent for a poll, which cannot tell program and kernel apart.
    pub program_bytes: Option<Bytes>,
    /// Hot pages of the kernel: epsilon.
    pub kernel_bytes: Option<Bytes>,
    /// Pages used in some windows.
    pub warm_bytes: Bytes,
    /// Pages really used in the time that the estimate covers.
    pub truth_bytes: Option<Bytes>,
    /// Those of the really used pages that a program read or wrote.
    pub truth_program_bytes: Option<Bytes>,
    /// The uses that the estimator does not see.
    pub blind_spot: &'static str,
}

/// The pages really used.
#[derive(Clone, Copy, Debug, Default, Serialize, JsonSchema)]
pub struct Truth {
    /// Pages that a program read or wrote.
    pub program_data_bytes: Bytes,
    /// Pages that a program wrote.
    pub program_written_bytes: Bytes,
    /// Pages that a program only executed.
    pub program_code_bytes: Bytes,
    /// Pages that only the kernel used.
    pub kernel_bytes: Bytes,
}

/// Estimates at the end of an interval mu.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Known {
    /// Number of the last window.
    pub window: u64,
    /// End of that window, in seconds since the beginning of the log.
    pub at_s: f64,
    /// Windows dropped before they could be read.
    pub given_up: u64,
    /// Result of each estimator that has an estimate.
    pub estimates: Vec<Said>,
    /// Pages used since following began, if the log records all used frames.
    pub truth: Option<Truth>,
}

/// An estimator that processes windows, with separate states for the program's pages and the kernel's.
struct Eye {
    name: &'static str,
    tracker: Tracker,
    program: Logged,
    kernel: Logged,
    frames: Vec<u64>,
    /// The guest's memory.
    memory: Bytes,
}

/// Estimates of the program's pages and of the kernel's.
struct Estimates {
    program: Estimate,
    kernel: Estimate,
}

impl Eye {
    /// Returns the estimators that can read a log with this header.
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
                ("prl", Tracker::Prl, plain),
                ("prl-repaired", Tracker::Prl, repaired),
            ],
            Logs::Writes => vec![("pml", Tracker::Pml, pml)],
            Logs::Nothing => vec![],
        };
        if header.exact {
            estimators.push(("exact", Tracker::Exact, repaired));
        }
        let eye = |(name, tracker, config): (_, _, Config)| Eye {
            name,
            tracker,
            program: Logged::new(config),
            kernel: Logged::new(config),
            frames: Vec::new(),
            memory: Pages(header.frames + header.table_frames).to_bytes(),
        };
        estimators.into_iter().map(eye).collect()
    }

    /// Processes a window; returns estimates at the end of each interval mu.
    fn observe(&mut self, header: &Header, window: &Window) -> Result<Option<Estimates>, Unfit> {
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
    ) -> Result<Option<Estimate>, Unfit> {
        self.frames.clear();
        for row in window.rows.iter().filter(|row| row.marks.program() == of_program) {
            let count = match self.tracker {
                Tracker::Exact => u32::from(row.marks.used()),
                // Counts saturate at 255.
                _ => row.count.min(255),
            };
            self.frames.extend((0..count).map(|_| u64::from(row.frame)));
        }
        let estimator = if of_program {
            &mut self.program
        } else {
            &mut self.kernel
        };
        let seen = observation(header, window, self.tracker, UsedRef::Frames(&self.frames));
        estimator.observe(&seen)
    }

    fn said(&self, estimates: &Estimates, truth: Option<Truth>) -> Said {
        let Estimates { program, kernel } = estimates;
        Said {
            estimator: self.name,
            tracker: self.tracker,
            settled: program.settled,
            window_s: program.window.as_secs_f64(),
            size_bytes: (program.hot + kernel.hot).min(self.memory),
            least_bytes: (program.least + kernel.hot).min(self.memory),
            most_bytes: (program.most + kernel.hot).min(self.memory),
            certainty: program.certainty,
            program_bytes: Some(program.hot),
            kernel_bytes: Some(kernel.hot),
            warm_bytes: program.warm,
            truth_bytes: truth.map(|truth| truth.all()),
            truth_program_bytes: truth.map(|truth| truth.program_data_bytes),
            blind_spot: self.tracker.blind_spot(),
        }
    }
}

fn observation<'a>(
    header: &Header,
    window: &Window,
    tracker: Tracker,
    seen: UsedRef<'a>,
) -> ObservationRef<'a> {
    let exact = tracker == Tracker::Exact;
    ObservationRef {
        tracker,
        at: Ns(window.end_ns),
        interval: Ns(window.end_ns - window.begin_ns),
        memory: Pages(header.frames),
        frames: header.frames + header.table_frames,
        seen,
        lost: if exact { 0 } else { window.lost },
        blind: Pages(if tracker == Tracker::Prl { header.blind } else { 0 }),
    }
}

/// Estimators that take in the windows of a log one by one.
pub struct Watching {
    eyes: Vec<Eye>,
    used: Used,
}

impl Watching {
    /// Starts the estimators that can read a log with this header; see [`report`] for `mu` and `tau`.
    pub fn begin(header: &Header, mu: Ns, tau: u8) -> Watching {
        Watching {
            eyes: Eye::all(header, mu, tau),
            used: Used::new(header),
        }
    }

    /// Processes a window; returns estimates at the end of each interval mu. `given_up` is the number of windows missed so
    /// far.
    ///
    /// # Errors
    /// A window that is not the next one.
    pub fn look(&mut self, header: &Header, window: &Window, given_up: u64) -> Result<Option<Known>, Unfit> {
        self.used.add(window);
        let mut found = Vec::new();
        for (at, eye) in self.eyes.iter_mut().enumerate() {
            found.extend(eye.observe(header, window)?.map(|of_mu| (at, of_mu)));
        }
        if found.is_empty() {
            return Ok(None);
        }
        // Counting all frames is expensive, so it is done only when there are estimates.
        let truth = header.exact.then(|| self.used.truth());
        let said = found.iter().map(|(at, of_mu)| self.eyes[*at].said(of_mu, truth));
        Ok(Some(Known {
            window: window.number,
            at_s: Ns(window.end_ns).as_secs_f64(),
            given_up,
            estimates: said.collect(),
            truth,
        }))
    }
}

/// Marks of each frame's uses, combined over all windows.
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

/// The windows of a log that are read.
struct Reading<'a> {
    header: &'a Header,
    windows: &'a [&'a Window],
}

impl Reading<'_> {
    /// Returns the pages used in the windows that end at or before `until`.
    fn truth(&self, until: Ns) -> Truth {
        let mut used = Used::new(self.header);
        let within = self.windows.iter().filter(|window| window.end_ns <= until.0);
        within.for_each(|window| used.add(window));
        used.truth()
    }

    /// Polls like ESX: draws 100 new frames in every interval mu. Returns the last estimate.
    fn poll(&self, mu: Ns) -> Result<Option<Estimate>, Unfit> {
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
            let seen = UsedRef::Sample {
                used: found as u32,
                drawn,
                complete: true,
            };
            let seen = ObservationRef {
                interval: Ns(window.end_ns - since),
                ..observation(self.header, window, Tracker::Sampling, seen)
            };
            last = estimator.observe(&seen)?;
            begun = at + 1;
        }
        Ok(last)
    }
}

/// Returns the first settled estimate that has hot pages, or else the last estimate.
fn chosen(estimates: &[Estimates]) -> Option<&Estimates> {
    let settled = |of: &&Estimates| of.program.settled == Settled::Yes && of.program.hot > Bytes::ZERO;
    estimates.iter().find(settled).or(estimates.last())
}

/// Runs all estimators on these windows of a log. `mu` is the interval after which frames are judged; `tau` is the number of
/// log entries that make a frame hot in PRL.
///
/// # Errors
/// Windows that are not in order.
pub fn report(file: &Path, log: &Log, windows: &[&Window], mu: Ns, tau: u8) -> Result<Report, Unfit> {
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
            tracker: poll.tracker,
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
            blind_spot: poll.tracker.blind_spot(),
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
    /// Returns the total of all pages.
    pub fn all(&self) -> Bytes {
        self.program_data_bytes + self.program_code_bytes + self.kernel_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_formats::page_log::{Kept, Row, Tables};

    /// A log with ten windows of one second each. A program uses frames 0 to 99, which are logged 20 times in each window, and
    /// 110 to 119, which are never logged. The kernel uses frames 100 to 109, which are logged 30 times.
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
        // The threshold of 50 is reached in the third second, and the loop ends four later.
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
        assert_eq!(report.estimates[1].estimator, "prl-repaired");
    }
}
