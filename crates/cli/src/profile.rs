//! `homenode profile`: runs a program under emulation and writes its cache behaviour as a workload for the simulator.
//!
//! QEMU runs the program, and its plugin (`qemu-plugin/`) models the private caches and samples the accesses that miss them.
//! This module finds the emulator, watches the program and turns the plugin's log into a profile.

use std::ffi::OsString;
use std::fs;
use std::io::IsTerminal;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use homenode_agent::Show;
use homenode_calibrate::profile::{
    self, Begin, CurveAs, Emulator, Facts, Program, emulator, exit_status, notes,
};
use homenode_formats::profile_log::{Log, LogError};
use homenode_machine::Machine;
use homenode_reproduce::jobs::Progress;
use homenode_screens::printable::OneLine;
use homenode_twin::Workload;
use homenode_twin::workload::FittedCurve;
use rustix::process::{Pid, Signal, kill_process};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;

use crate::bad_input;
use crate::options::{OutFile, ShownArgs};
use crate::output::Output;
use crate::{signals, twin};

/// Options of `profile`.
#[derive(Debug, clap::Args)]
pub(crate) struct ProfileArgs {
    /// The machine whose private caches to model: a preset's name, or a machine file
    #[arg(long, value_name = "NAME|FILE", default_value = twin::TWIN_MACHINE)]
    pub machine: String,
    /// Share of cache lines to sample, such as `1%` or `0.01`; if the program uses few lines, all are sampled
    #[arg(long, value_name = "SHARE", default_value = "1%")]
    pub rate: Share,
    /// Size of the core's reorder buffer in instructions, which limits the accesses in flight; docs/PROFILE.md has some sizes
    #[arg(long, value_name = "COUNT", default_value = "128", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub window: u64,
    /// Start counting only when the program makes the unused system call 0x686f6d65
    #[arg(long)]
    pub announced: bool,
    /// File for the profile; default: the program's name with `.toml`, in this directory
    #[arg(long, visible_alias = "out", value_name = "FILE")]
    pub output: Option<OutFile>,
    /// Write the miss-ratio curve point by point, instead of the nearest curve that three numbers describe
    #[arg(long)]
    pub table: bool,
    /// File for the program's standard output; default: this command's standard output, or nowhere with --json
    #[arg(long, value_name = "FILE")]
    pub stdout: Option<OutFile>,
    #[command(flatten)]
    pub shown: ShownArgs,
    /// Profile everything that a whole machine does: COMMAND is the QEMU that emulates the machine
    #[arg(long)]
    pub system: bool,
    /// The emulator; default: `qemu-x86_64` (or this machine's architecture) in PATH
    #[arg(long, value_name = "FILE", conflicts_with = "system")]
    pub qemu: Option<PathBuf>,
    /// The emulator's plugin; default: next to this program, or in `../lib/homenode`
    #[arg(long, value_name = "FILE")]
    pub plugin: Option<PathBuf>,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// A share, written in percent or as a number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Share(f64);

impl std::str::FromStr for Share {
    type Err = anyhow::Error;
    fn from_str(text: &str) -> anyhow::Result<Share> {
        let (number, unit) = match text.strip_suffix('%') {
            Some(number) => (number, 100.0),
            None => (text, 1.0),
        };
        match number.trim().parse::<f64>().map(|number| number / unit) {
            Ok(share) if (1e-5..=1.0).contains(&share) => Ok(Share(share)),
            _ => bail!("a share must be from 0.001% to 100%"),
        }
    }
}

/// The result of `homenode profile`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Profiled<'a> {
    command: &'a str,
    machine: &'a str,
    /// The program's exit status; 128 plus the signal's number if a signal ended it.
    exit_status: u8,
    seconds: f64,
    file: String,
    workload: &'a Workload,
    #[schemars(with = "serde_json::Map<String, serde_json::Value>")]
    fit: &'a FittedCurve,
    #[schemars(with = "serde_json::Map<String, serde_json::Value>")]
    measured: &'a Log,
    notes: &'a [String],
}

/// Runs a program under emulation and writes its profile.
///
/// # Errors
/// Bad input; an emulator that is missing or cannot load the plugin; a program that ended before anything was written.
pub(crate) fn run(args: &ProfileArgs) -> anyhow::Result<ExitCode> {
    let machine = twin::machine(&args.machine)?;
    let facts = Facts::of(&machine).map_err(bad_input)?;
    let program = Program::find(&args.command[0]).map_err(bad_input)?;
    let file = output_file(args, &program)?;
    let emulator = if args.system {
        Emulator::given(program.path.clone())
    } else {
        program.runs_here().map_err(bad_input)?;
        Emulator::find(args.qemu.as_deref())
    };
    let emulator = emulator.and_then(Emulator::check).map_err(bad_input)?;
    let plugin = emulator::plugin(args.plugin.as_deref()).map_err(bad_input)?;

    let scratch = tempfile::tempdir().context("cannot create a directory for the plugin's log")?;
    let log = scratch.path().join("accesses.log");
    let begin = if args.announced {
        Begin::Announced
    } else {
        Begin::AtOnce
    };
    let arguments = facts.plugin_arguments(&log, args.rate.0, args.window, begin);
    let mut command = emulator.command(&plugin, &arguments);
    if !args.system {
        command.arg(&program.path);
    }
    command.args(&args.command[1..]);
    command.stdout(stdout(args)?);
    let started = Instant::now();
    let status = watch(&mut command, &program.name, args)
        .with_context(|| format!("{} cannot be started", emulator.path.display()))?;
    let seconds = started.elapsed().as_secs_f64();

    let log = match (Log::read(&log), status.signal()) {
        (Ok(log), _) => log,
        (Err(LogError::Io { .. }), Some(signal)) => {
            let name = &program.name;
            complain!("homenode: signal {signal} ended {name} before its profile could be written");
            return Ok(ExitCode::from(exit_status(status)));
        }
        (Err(error), _) => return Err(unwritten(error, status, &program.name)),
    };
    if log.instructions == 0 {
        return Err(anyhow!(
            "{} executed no instruction: there is nothing to profile",
            program.name
        ));
    }
    finish(args, &machine, &facts, &program, &file, status, seconds, &log)
}

/// Writes the profile and prints a summary.
#[allow(clippy::too_many_arguments)] // all that was found out
fn finish(
    args: &ProfileArgs,
    machine: &Machine,
    facts: &Facts,
    program: &Program,
    file: &Path,
    status: ExitStatus,
    seconds: f64,
    log: &Log,
) -> anyhow::Result<ExitCode> {
    let fit = profile::fit(log);
    let notes = notes(log, status);
    let words = args.command.iter().map(|word| word.to_string_lossy());
    let command = words.collect::<Vec<_>>().join(" ");
    let curve = if args.table {
        CurveAs::Table
    } else {
        CurveAs::Numbers
    };
    let text = profile::profile(log, (&fit, curve), facts, &program.name, &command, &notes);
    let shown = file.display().to_string();
    let workload = Workload::from_toml(&shown, &text).context("the resulting profile is not valid")?;
    fs::write(file, &text).with_context(|| format!("cannot write {shown}"))?;
    let exit_status = exit_status(status);
    let mut output = Output::new(args.shown.json);
    output.object(
        "profile",
        json!(Profiled {
            command: &command,
            machine: &machine.name,
            exit_status,
            seconds,
            file: shown.clone(),
            workload: &workload,
            fit: &fit,
            measured: log,
            notes: &notes,
        }),
    );
    if !args.shown.json {
        // Standard output belongs to the program.
        for sentence in profile::summary(log, &fit, facts, seconds) {
            complain!("homenode: {sentence}");
        }
        for note in &notes {
            complain!("homenode: note: {note}");
        }
        complain!(
            "homenode: written to {shown}; 'homenode sim {shown} --machine {}' runs it",
            args.machine
        );
    }
    Ok(ExitCode::from(exit_status))
}

/// Returns the profile's path. Without --output, an existing file is overwritten only if this command wrote it.
fn output_file(args: &ProfileArgs, program: &Program) -> anyhow::Result<OutFile> {
    let file = match &args.output {
        Some(file) => return Ok(file.clone()),
        None => PathBuf::from(format!("{}.toml", program.name)),
    };
    match fs::read(&file) {
        Ok(text) if !text.starts_with(profile::FIRST_WORDS.as_bytes()) => Err(bad_input(format!(
            "{} exists and was not written by this command; name another file with --output",
            file.display()
        ))),
        _ => {
            let shown = file.display().to_string();
            OutFile::at(file).map_err(|why| bad_input(format!("{shown}: {why} with --output")))
        }
    }
}

fn stdout(args: &ProfileArgs) -> anyhow::Result<Stdio> {
    match &args.stdout {
        Some(file) => {
            let created = fs::File::create(file);
            created
                .map(Stdio::from)
                .map_err(|error| bad_input(format!("--stdout {}: {error}", file.display())))
        }
        None if args.shown.json => Ok(Stdio::null()),
        None => Ok(Stdio::inherit()),
    }
}

/// Starts the program and waits for its end. Passes SIGTERM on to it, and SIGINT unless it is a terminal's Ctrl-C, which the
/// program gets, too; a second SIGINT kills the program.
fn watch(command: &mut Command, name: &str, args: &ProfileArgs) -> std::io::Result<ExitStatus> {
    let mut signals = SignalsInfo::<WithOrigin>::new(signals::heeded([SIGINT, SIGTERM]))?;
    let mut child = command.spawn()?;
    let (started, progress) = (Instant::now(), Progress::new(""));
    // Progress must not overwrite the program's output on a shared terminal.
    let alone = args.shown.json || args.stdout.is_some() || !std::io::stdout().is_terminal();
    let mut interrupts = 0;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        for origin in signals.pending() {
            match (origin.signal, interrupts) {
                (SIGTERM, _) => send(&child, Signal::TERM),
                (_, 0) => {
                    interrupts += 1;
                    // A terminal's signal comes from the kernel, which sends it to all processes in the foreground.
                    if origin.process.is_some() {
                        send(&child, Signal::INT);
                    }
                    progress.note(&format!(
                        "{} is asked to end, then its profile is written; a second SIGINT (Ctrl-C) kills it and skips the profile",
                        OneLine(name)
                    ));
                }
                _ => send(&child, Signal::KILL),
            }
        }
        if alone {
            let seconds = started.elapsed().as_secs();
            progress.show(&format!("{} under emulation: {seconds}s", OneLine(name)));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn send(child: &Child, signal: Signal) {
    // The program may have ended in the meantime.
    let _ = kill_process(Pid::from_child(child), signal);
}

/// Explains why there is no log, or why it cannot be read.
fn unwritten(error: LogError, status: ExitStatus, name: &str) -> anyhow::Error {
    match (&error, status.code()) {
        (LogError::Io { .. }, Some(code)) => anyhow!(
            "{name} ended with status {code} and the emulator's plugin wrote nothing: see the emulator's output above for the reason"
        ),
        _ => anyhow::Error::new(error),
    }
}
