//! `homenode wss --log`: working sets from a log of a guest's pages, written by the emulator's plugin.

use std::io::Write as _;
use std::path::Path;
use std::thread;
use std::time::Duration;

use homenode_api::document::document;
use homenode_calibrate::page_log::{About, Known, Report, Watching, report};
use homenode_formats::page_log::{Followed, Follower, Log, PageLogError, Window};
use homenode_policy::working_set::{Certainty, Settled};
use homenode_units::{Bytes, Ns};

use crate::bad_input;
use crate::print::{print_json, table};

/// Options of `wss --log`.
#[derive(Debug, clap::Args)]
pub(crate) struct LogArgs {
    /// Use only windows with this label
    #[arg(long, value_name = "LABEL", requires = "log")]
    pub label: Option<String>,
    /// Observation interval (mu) in seconds, at whose end hot frames are counted; default: one window of the log
    #[arg(long, value_name = "SECONDS", requires = "log")]
    pub mu: Option<f64>,
    /// How many times a frame must be logged before the estimate counts it as hot (tau)
    #[arg(long, value_name = "COUNT", default_value_t = 50, requires = "log", value_parser = clap::value_parser!(u8).range(1..))]
    pub tau: u8,
    /// Follow a log that is being written: print the estimate after each interval mu, until the log ends
    #[arg(long, requires = "log")]
    pub follow: bool,
}

impl LogArgs {
    fn wants(&self, window: &Window) -> bool {
        self.label.as_ref().is_none_or(|label| window.label == *label)
    }

    /// Returns mu, which by default is the length of the first window.
    fn mu(&self, first: &Window) -> anyhow::Result<Ns> {
        match self.mu {
            None => Ok(Ns(first.end_ns - first.begin_ns)),
            Some(seconds) if seconds > 0.0 && seconds < 1e6 => Ok(Ns((seconds * 1e9).max(1.0) as u64)),
            Some(seconds) => Err(bad_input(format!(
                "--mu must be above 0 and below a million seconds, got {seconds}"
            ))),
        }
    }
}

/// Makes the error bad input, unless the file could not be read.
fn refused(error: PageLogError) -> anyhow::Error {
    match error {
        PageLogError::Io { .. } => anyhow::Error::new(error),
        error => bad_input(error),
    }
}

/// `homenode wss --log`.
///
/// # Errors
/// A file that is not a log, or that has no window with the label.
pub(crate) fn run(path: &Path, args: &LogArgs, json: bool) -> anyhow::Result<()> {
    if args.follow {
        return follow(path, args, json);
    }
    let log = Log::read(path).map_err(refused)?;
    if let Some(missing) = &log.missing {
        complain!("homenode: {}: {missing}", path.display());
    }
    let given_up = log.header.kept.number;
    if given_up > 0 {
        complain!(
            "homenode: {}: {given_up} earlier windows were discarded",
            path.display()
        );
    }
    let windows: Vec<&Window> = log.windows.iter().filter(|window| args.wants(window)).collect();
    let Some(first) = windows.first() else {
        let mut labels: Vec<&str> = log.windows.iter().map(|window| window.label.as_str()).collect();
        labels.dedup();
        return Err(bad_input(format!(
            "{}: no window{}; the log has windows labelled: {}",
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
    crate::print::print(format_args!("{}", text(&report)));
    Ok(())
}

/// Time between attempts to read more when following a log.
const LOOK_EVERY: Duration = Duration::from_millis(20);

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
        let watching = match &mut watching {
            Some(watching) => watching,
            None => watching.insert(Watching::begin(header, args.mu(&window)?, args.tau)),
        };
        let Some(known) = watching.look(header, &window, follower.given_up())? else {
            continue;
        };
        let line = if json {
            document("log-estimate", serde_json::to_value(&known)?).to_string()
        } else {
            in_a_line(&known)
        };
        // The reader of the output may be gone.
        if writeln!(std::io::stdout(), "{line}").is_err() {
            return Ok(());
        }
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
        "{windows} windows, {seconds:.1} s of a guest of {memory} MiB on core {core}; logged: {logs}, {logged} frames, {lost} lost\n"
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

/// Formats an estimate as one line.
fn in_a_line(known: &Known) -> String {
    let mut text = format!("{:.1} s:", known.at_s);
    for said in &known.estimates {
        let settled = if said.settled == Settled::Yes {
            ", settled"
        } else {
            ""
        };
        text += &format!(" {} {} MiB{settled};", said.estimator, mib(said.size_bytes));
    }
    if let Some(truth) = &known.truth {
        text += &format!(" used since {} MiB;", mib(truth.all()));
    }
    text + &format!(" {} windows missed", known.given_up)
}
