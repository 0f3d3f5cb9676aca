//! `homenode record`: the history, for people and for other programs.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Subcommand;
use homenode_agent::history::{HISTORY, beside};
use homenode_agent::trace;
use homenode_agent::wall_clock::now_ns;
use homenode_recorder::table::{self, COLUMNS, Parquet};
use homenode_recorder::{Archive, EventRow, Frame, Kind, RecordError, Wanted, prune};
use homenode_screens::printable;
use homenode_screens::wall::{Time, Wall};
use homenode_table::csv_cell;
use homenode_undo::state_dir::STATE_DIR;
use homenode_units::{Bytes, Ns};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

use crate::bad_input;
use crate::options::{OutFile, ShownArgs, Size};
use crate::print::{print, print_json};
use crate::twin_history::of_running_twin;

pub(crate) mod scenario;

use scenario::ScenarioArgs;

/// Options of `record`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct RecordArgs {
    #[command(subcommand)]
    pub command: Option<RecordCommand>,
    #[command(flatten)]
    history: HistoryArgs,
    #[command(flatten)]
    shown: ShownArgs,
}

/// Commands about the history.
#[derive(Debug, Subcommand)]
pub(crate) enum RecordCommand {
    /// Show runs of the agent, decisions and findings
    Show(ShowArgs),
    /// Export every period as CSV, Parquet, JSON or a trace
    Export(ExportArgs),
    /// Make a scenario from a recorded stretch of time, to simulate alternatives with `homenode sim`
    Scenario(ScenarioArgs),
    /// Delete old entries, or the oldest entries beyond a size
    Prune(PruneArgs),
}

/// Location of the history.
#[derive(Debug, clap::Args)]
pub(crate) struct HistoryArgs {
    /// The history's file [default: /var/lib/homenode/history.sqlite, or the file in the directory of --state; if there is none,
    /// that of a running simulation]
    #[arg(long, value_name = "FILE")]
    history: Option<PathBuf>,
    /// The directory of the agent that wrote the history
    #[arg(long, value_name = "DIR", conflicts_with = "history")]
    state: Option<PathBuf>,
}

/// A span of time.
#[derive(Debug, clap::Args)]
pub(crate) struct SpanArgs {
    /// Begin at this time: 03:12, '2026-11-23 03:12', or how long ago, such as 15m
    #[arg(long, value_name = "TIME")]
    from: Option<Time>,
    /// End at this time
    #[arg(long, value_name = "TIME")]
    to: Option<Time>,
}

impl SpanArgs {
    /// Returns the two times, in nanoseconds since 1970.
    ///
    /// # Errors
    /// A time that does not exist, or two in the wrong order.
    fn range(&self) -> anyhow::Result<(Option<i64>, Option<i64>)> {
        let now = now_ns();
        let of = |time: Option<Time>| time.map(|time| time.ns(now)).transpose();
        let (from, to) = (of(self.from)?, of(self.to)?);
        if let (Some(from), Some(to)) = (from, to)
            && from > to
        {
            return Err(bad_input(format!(
                "--from ({}) is after --to ({})",
                Wall(from),
                Wall(to)
            )));
        }
        Ok((from, to))
    }
}

/// Most events that `record show` shows unless another number is asked for.
const LAST: u32 = 100;

/// Options of `record show`.
#[derive(Debug, clap::Args)]
pub(crate) struct ShowArgs {
    /// Show only events of this VM
    vm: Option<String>,
    #[command(flatten)]
    span: SpanArgs,
    /// Show only decisions and findings of this policy
    #[arg(long)]
    policy: Option<String>,
    /// Show only events of this kind: decided, found, refused, appeared, vanished, changed-by-other and so on
    #[arg(long)]
    kind: Option<String>,
    /// Number of events to show, the latest ones; 0 for all
    #[arg(long, value_name = "N", default_value_t = LAST)]
    last: u32,
    #[command(flatten)]
    history: HistoryArgs,
    #[command(flatten)]
    shown: ShownArgs,
}

impl ShowArgs {
    fn wanted(&self) -> anyhow::Result<Wanted> {
        let (from, to) = self.span.range()?;
        Ok(Wanted {
            from_ns: from,
            to_ns: to,
            vm: self.vm.clone(),
            policy: self.policy.clone(),
            kind: self.kind.clone(),
            limit: (self.last > 0).then_some(self.last),
            ..Wanted::default()
        })
    }
}

/// Options of `record export`.
#[derive(Debug, clap::Args)]
pub(crate) struct ExportArgs {
    /// With --csv or --parquet: export only this VM
    vm: Option<String>,
    #[command(flatten)]
    span: SpanArgs,
    #[command(flatten)]
    form: FormArgs,
    #[command(flatten)]
    history: HistoryArgs,
}

impl ExportArgs {
    /// Returns true if the result is a file, and not standard output.
    pub(crate) fn is_to_file(&self) -> bool {
        self.form.parquet.is_some() || self.form.trace.is_some()
    }
}

/// The output format.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
pub(crate) struct FormArgs {
    /// Print CSV, with a row for each VM and period
    #[arg(long)]
    csv: bool,
    /// Write the same rows, typed, to a Parquet file, which pandas, polars, DuckDB and others read
    #[arg(long, value_name = "FILE")]
    parquet: Option<OutFile>,
    /// Print a JSON object for each period, one per line: everything known about the host
    #[arg(long)]
    json: bool,
    /// Print a JSON object for each period, one per line: the samples as the host reported them
    #[arg(long)]
    samples: bool,
    /// Write a trace for Perfetto's viewer to this file: VMs, vCPUs, nodes, links, decisions and their effects
    #[arg(long, value_name = "FILE")]
    trace: Option<OutFile>,
}

/// Options of `record prune`.
#[derive(Debug, clap::Args)]
pub(crate) struct PruneArgs {
    #[command(flatten)]
    what: PrunedArgs,
    #[command(flatten)]
    history: HistoryArgs,
}

/// The entries to delete.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = true)]
pub(crate) struct PrunedArgs {
    /// Delete everything older than this many days
    #[arg(long, value_name = "DAYS")]
    older: Option<u32>,
    /// Delete the oldest entries until this much is left, such as 500MiB
    #[arg(long, value_name = "SIZE")]
    most: Option<Size>,
}

/// Runs `homenode record`.
///
/// # Errors
/// No history, or one that cannot be read.
pub(crate) fn run(args: &RecordArgs) -> anyhow::Result<()> {
    match &args.command {
        None => {
            let wanted = Wanted {
                limit: Some(LAST),
                ..Wanted::default()
            };
            show(&wanted, &args.history, &args.shown)
        }
        Some(RecordCommand::Show(args)) => show(&args.wanted()?, &args.history, &args.shown),
        Some(RecordCommand::Export(args)) => export(args),
        Some(RecordCommand::Scenario(args)) => scenario::scenario(args),
        Some(RecordCommand::Prune(args)) => prune_now(args),
    }
}

impl HistoryArgs {
    /// Path of the history.
    pub(crate) fn place(&self) -> PathBuf {
        match (&self.history, &self.state) {
            (Some(file), _) => file.clone(),
            (None, Some(state)) => beside(state),
            (None, None) => usual_place(),
        }
    }
}

/// Returns the path of this host's history or, if the host has none, of the history of a simulated host that runs.
fn usual_place() -> PathBuf {
    let of_host = PathBuf::from(HISTORY);
    match of_running_twin() {
        // A history that this user may not look for counts as one that exists.
        Some(of_twin) if !of_host.try_exists().unwrap_or(true) => of_twin,
        _ => of_host,
    }
}

/// Returns the path of the history of the agent with this state directory; with the usual directory, as [`usual_place`].
pub(crate) fn place_beside(state: &Path) -> PathBuf {
    if state == Path::new(STATE_DIR) {
        usual_place()
    } else {
        beside(state)
    }
}

/// Opens a history for reading.
///
/// # Errors
/// As [`Archive::open`]; a history that does not exist is bad input.
pub(crate) fn open(path: &Path) -> anyhow::Result<Archive> {
    // For a file without read permission, SQLite reports only that it cannot be opened. Opening a pipe would wait for a writer;
    // it is refused below.
    let opened = match std::fs::metadata(path) {
        Ok(found) if found.is_file() => std::fs::File::open(path).err(),
        found => found.err(),
    };
    if opened.is_some_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied) {
        return Err(bad_input(format!(
            "only root and the agent's user may read the history {}: run this as root; members of `[http] group` can ask the \
             agent over its http.sock (/v1/vms/NAME/why, /v1/history)",
            path.display()
        )));
    }
    Archive::open(path).map_err(|error| match error {
        RecordError::Missing { .. } | RecordError::Foreign { .. } => bad_input(error.to_string()),
        other => other.into(),
    })
}

/// The document of `homenode record show`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct RecordShow {
    /// The history's file.
    history: String,
    /// When the first recorded period was, by the wall clock.
    from: Option<String>,
    /// Time of the last recorded period, by the wall clock.
    to: Option<String>,
    /// Space that the periods take.
    status_bytes: Bytes,
    /// Space that the samples take.
    samples_bytes: Bytes,
    /// Runs of the agent.
    runs: Vec<RecordRun>,
    /// The events.
    events: Vec<RecordEvent>,
}

/// A run of the agent.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct RecordRun {
    /// The run's number in this history.
    run: i64,
    /// When the run began.
    begun: String,
    /// Version and commit.
    version: String,
    /// The host that the run was on.
    host: String,
}

/// An event.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct RecordEvent {
    /// The event's number.
    id: i64,
    /// Number of the run that the event belongs to.
    run: i64,
    /// When the event happened, by the wall clock.
    at: String,
    /// When the event last occurred, by the wall clock.
    last: String,
    /// How many times the event occurred in a row.
    count: i64,
    /// Kind: `decided`, `found`, `refused`, `appeared` and so on.
    kind: String,
    /// The VM's name.
    vm: Option<String>,
    /// The policy that decided or found it.
    policy: Option<String>,
    /// The action that was decided.
    action: Option<String>,
    /// The decision's outcome.
    outcome: Option<String>,
    /// The event in words.
    text: String,
    /// The event as in `homenode run --json`.
    #[schemars(with = "serde_json::Map<String, serde_json::Value>")]
    detail: Value,
}

impl From<EventRow> for RecordEvent {
    fn from(row: EventRow) -> RecordEvent {
        let record = row.record;
        RecordEvent {
            id: row.id,
            run: row.run,
            at: Wall(row.wall_ns).to_string(),
            last: Wall(row.last_wall_ns).to_string(),
            count: row.count,
            kind: record.kind,
            vm: record.name.or(record.vm.map(|vm| vm.to_string())),
            policy: record.policy,
            action: record.action,
            outcome: record.outcome,
            text: record.text,
            detail: row.detail,
        }
    }
}

fn show(wanted: &Wanted, history: &HistoryArgs, shown_args: &ShownArgs) -> anyhow::Result<()> {
    let path = history.place();
    let archive = open(&path)?;
    let span = archive.span(Kind::Status)?;
    let run = |run: homenode_recorder::Run| RecordRun {
        run: run.id,
        begun: Wall(run.wall_ns).to_string(),
        version: run.version,
        host: run.host,
    };
    let shown = RecordShow {
        history: path.display().to_string(),
        from: span.map(|(from, _)| Wall(from).to_string()),
        to: span.map(|(_, to)| Wall(to).to_string()),
        status_bytes: archive.size(Kind::Status)?.0,
        samples_bytes: archive.size(Kind::Sample)?.0,
        runs: archive.runs()?.into_iter().map(run).collect(),
        events: archive
            .events(wanted)?
            .into_iter()
            .map(RecordEvent::from)
            .collect(),
    };
    if shown_args.json {
        return print_json("record", &shown);
    }
    let times = match (&shown.from, &shown.to) {
        (Some(from), Some(to)) => format!("from {from} to {to}"),
        _ => "nothing yet".to_owned(),
    };
    let runs = match shown.runs.len() {
        1 => "1 run".to_owned(),
        count => format!("{count} runs"),
    };
    let (status, samples) = (shown.status_bytes, shown.samples_bytes);
    say!(
        "{}: {times}, {runs}, {status} of status, {samples} of samples",
        shown.history
    );
    for event in &shown.events {
        let again = match event.count {
            1 => String::new(),
            count => format!(" ({count} times until {})", event.last),
        };
        say!("{}  {:>6}  {}{again}", event.at, event.id, event.text);
    }
    if shown.events.is_empty() {
        say!("no event matches; leave out VM, --policy, --kind, --from and --to to see all events");
    }
    Ok(())
}

fn export(args: &ExportArgs) -> anyhow::Result<()> {
    let archive = open(&args.history.place())?;
    let (from, to) = args.span.range()?;
    let span = (from.unwrap_or(i64::MIN), to.unwrap_or(i64::MAX));
    if let Some(path) = &args.form.trace {
        return export_trace(&archive, span, path);
    }
    if let Some(path) = &args.form.parquet {
        return export_parquet(&archive, span, args.vm.as_deref(), path);
    }
    if args.form.csv {
        print(format_args!("{}\n", COLUMNS.map(|column| column.name).join(",")));
        archive.frames(Kind::Status, span, |frame| {
            csv(&frame, args.vm.as_deref());
            true
        })?;
        return Ok(());
    }
    let (kind, key) = match args.form.samples {
        true => (Kind::Sample, "sample"),
        false => (Kind::Status, "status"),
    };
    archive.frames(kind, span, |frame| {
        let Frame {
            run,
            at,
            wall_ns,
            value,
        } = frame;
        let line =
            json!({"at": Wall(wall_ns).to_string(), "wall_ns": wall_ns, "at_ns": at, "run": run, key: value});
        print(format_args!("{}\n", printable::json(&line.to_string())));
        true
    })?;
    Ok(())
}

fn export_trace(archive: &Archive, span: (i64, i64), path: &Path) -> anyhow::Result<()> {
    let traced = trace::export(archive, span, path)?;
    let (periods, without, unreadable) = (
        traced.periods_count,
        traced.without_sample_count,
        traced.unreadable_count,
    );
    say!("{}: {periods} periods", path.display());
    if without > 0 {
        say!("{without} of them no longer have samples: where vCPUs ran in these periods is unknown");
    }
    if unreadable > 0 {
        say!("left out {unreadable} periods that another version wrote and this one cannot read");
    }
    Ok(())
}

fn export_parquet(archive: &Archive, span: (i64, i64), vm: Option<&str>, path: &Path) -> anyhow::Result<()> {
    let failed = || format!("cannot write {}", path.display());
    let mut frames = archive.iter(None, Kind::Status, span)?;
    // Creating the file replaces a former one, so it comes after the history was found readable.
    let mut parquet = Parquet::create(path)?;
    for frame in frames.by_ref() {
        parquet.frame(&frame?, vm).with_context(failed)?;
    }
    parquet.finish().with_context(failed)?;
    frames.whole()?;
    Ok(())
}

/// Prints a row for each VM of a period.
fn csv(frame: &Frame, vm: Option<&str>) {
    for status in table::vms(frame, vm) {
        let cell = |column: table::Column| match column.from {
            table::From::Time => Wall(frame.wall_ns).to_string(),
            table::From::WallNs => frame.wall_ns.to_string(),
            table::From::Run => frame.run.to_string(),
            table::From::AtNs => frame.at.0.to_string(),
            table::From::Status(pointer) => csv_cell(status.pointer(pointer).unwrap_or(&Value::Null)),
        };
        print(format_args!("{}\n", COLUMNS.map(cell).join(",")));
    }
}

fn prune_now(args: &PruneArgs) -> anyhow::Result<()> {
    let path = args.history.place();
    let before = open(&path)?.span(Kind::Status)?;
    let size = |path: &Path| std::fs::metadata(path).map_or(Bytes::ZERO, |file| Bytes(file.len()));
    let was = size(&path);
    let PrunedArgs { older, most } = &args.what;
    let age = older.map(|days| Ns::from_secs(u64::from(days) * 24 * 3600));
    prune(&path, age, most.map(|size| size.0))
        .with_context(|| format!("cannot delete entries of {}", path.display()))?;
    let after = open(&path)?.span(Kind::Status)?;
    let since = |span: Option<(i64, i64)>| {
        span.map_or("empty".to_owned(), |(from, _)| format!("since {}", Wall(from)))
    };
    say!(
        "{}: {was} before, {}; {} now, {}",
        path.display(),
        since(before),
        size(&path),
        since(after)
    );
    Ok(())
}
