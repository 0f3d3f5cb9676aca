//! Writes traces for Perfetto's viewer: of a run while it is in progress, and of a recorded history.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SendError, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

use homenode_control::{Control, Cycle, Status};
use homenode_host::Sample;
use homenode_machine::Machine;
use homenode_recorder::{Archive, EventRow, Frame, Frames, Kind, RecordError, Run, WhenFull};
use homenode_trace::{Happened, Lanes, Period};
use homenode_units::Ns;
use serde::Deserialize;

use crate::history::read_recorded;

/// Most cycles that may wait for the disk.
const WAITING_MAX: usize = 64;
/// Events read from a history at a time.
const EVENTS_AT_ONCE: u32 = 512;

/// Why a trace cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be written.
    #[error("the trace {path} cannot be written: {cause}")]
    File {
        /// Path of the file.
        path: String,
        /// The system's error.
        cause: String,
    },
    /// The history cannot be read.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// A trace in a file. After the first write error nothing more is written, and [`TraceFile::finish`] returns that error.
#[derive(Debug)]
pub struct TraceFile {
    path: PathBuf,
    /// `None` before the first run.
    lanes: Option<Lanes<BufWriter<File>>>,
    /// `None` once the first run has begun.
    file: Option<File>,
    failed: Option<io::Error>,
}

impl TraceFile {
    /// Opens the file, and creates it if there is none. A former trace stays until the first run begins.
    ///
    /// # Errors
    /// If it cannot be opened or created.
    pub fn create(path: &Path) -> Result<TraceFile, TraceError> {
        let options = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        let file = options.map_err(|error| failed(path, &error))?;
        Ok(TraceFile {
            path: path.to_owned(),
            lanes: None,
            file: Some(file),
            failed: None,
        })
    }

    /// Begins a run. The cycles that follow belong to it.
    pub fn run(&mut self, name: &str, machine: &Machine) {
        let done = match (&mut self.lanes, self.file.take()) {
            (Some(lanes), _) => lanes.next_run(name, machine),
            (None, None) => Ok(()),
            (None, Some(file)) => emptied(&file)
                .and_then(|()| Lanes::new(BufWriter::new(file), name, machine))
                .map(|lanes| self.lanes = Some(lanes)),
        };
        self.note(done);
    }

    /// Writes the next cycle of the run.
    pub fn cycle(&mut self, cycle: &Cycle, sample: Option<&Sample>) {
        let happened: Vec<Happened> = cycle.events.iter().map(Happened::from).collect();
        self.period(Period {
            at: cycle.status.at_ns,
            status: &cycle.status,
            sample,
            happened: &happened,
        });
    }

    fn period(&mut self, period: Period<'_>) {
        if self.failed.is_some() {
            return;
        }
        let done = self.lanes.as_mut().map_or(Ok(()), |lanes| lanes.period(period));
        self.note(done);
    }

    fn note(&mut self, done: io::Result<()>) {
        if let Err(error) = done {
            self.failed.get_or_insert(error);
        }
    }

    /// Ends the trace. It is empty if no run began.
    ///
    /// # Errors
    /// The first write error.
    pub fn finish(mut self) -> Result<(), TraceError> {
        let finished = match (self.lanes.take(), self.file.take()) {
            (Some(lanes), _) => lanes.finish(),
            (None, Some(file)) => emptied(&file),
            (None, None) => Ok(()),
        };
        let done = self.failed.map_or(finished, Err);
        done.map_err(|error| failed(&self.path, &error))
    }
}

/// Removes the former content of a regular file; pipes and devices have none.
fn emptied(file: &File) -> io::Result<()> {
    match file.metadata()?.is_file() {
        true => file.set_len(0),
        false => Ok(()),
    }
}

fn failed(path: &Path, cause: &io::Error) -> TraceError {
    TraceError::File {
        path: path.display().to_string(),
        cause: cause.to_string(),
    }
}

/// Writes a trace of a run from a separate thread, so the loop does not wait for the disk.
#[derive(Debug)]
pub struct Tracer {
    when_full: WhenFull,
    /// `None` once nothing more can be written.
    cycles: Option<SyncSender<(Cycle, Option<Sample>)>>,
    /// Receives the error that ended the trace, if any.
    ended: Receiver<String>,
    writer: Option<JoinHandle<()>>,
    missed_count: u64,
}

impl Tracer {
    /// Begins a trace of a run.
    ///
    /// # Errors
    /// If the file cannot be created, or the thread cannot be started.
    pub fn begin(
        path: &Path,
        name: &str,
        machine: &Machine,
        when_full: WhenFull,
    ) -> Result<Tracer, TraceError> {
        Tracer::begin_in(TraceFile::create(path)?, name, machine, when_full)
    }

    /// Begins a trace of a run in this file, and so replaces a former trace.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(crate) fn begin_in(
        mut file: TraceFile,
        name: &str,
        machine: &Machine,
        when_full: WhenFull,
    ) -> Result<Tracer, TraceError> {
        let path = file.path.clone();
        file.run(name, machine);
        let (cycles, waiting) = sync_channel::<(Cycle, Option<Sample>)>(WAITING_MAX);
        let (end, ended) = channel();
        let write = move || {
            for (cycle, sample) in waiting {
                file.cycle(&cycle, sample.as_ref());
                if file.failed.is_some() {
                    break;
                }
            }
            if let Err(error) = file.finish() {
                let _ = end.send(format!("{error}; the rest of the run is not traced"));
            }
        };
        let writer = std::thread::Builder::new().name("tracer".into()).spawn(write);
        Ok(Tracer {
            when_full,
            cycles: Some(cycles),
            ended,
            writer: Some(writer.map_err(|error| failed(&path, &error))?),
            missed_count: 0,
        })
    }

    /// Queues a cycle to be written.
    pub(crate) fn keep(&mut self, cycle: &Cycle, control: &Mutex<Control>) {
        let Some(cycles) = &self.cycles else { return };
        let sample = control
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .sample()
            .cloned();
        let cycle = (cycle.clone(), sample);
        let kept = match self.when_full {
            WhenFull::LeaveOut => cycles.try_send(cycle),
            WhenFull::Wait => cycles
                .send(cycle)
                .map_err(|SendError(cycle)| TrySendError::Disconnected(cycle)),
        };
        match kept {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => self.missed_count += 1,
            // Writing has failed; a notice says so.
            Err(TrySendError::Disconnected(_)) => self.cycles = None,
        }
    }

    /// Returns new notices for the operator.
    pub(crate) fn take_notices(&self) -> Vec<String> {
        self.ended.try_iter().collect()
    }

    /// Ends the trace; returns notices for the operator.
    pub(crate) fn finish(mut self) -> Vec<String> {
        self.cycles = None;
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
        let missed = self.missed_count;
        let missed =
            (missed > 0).then(|| format!("{missed} periods are not in the trace: the disk was too slow"));
        self.ended.try_iter().chain(missed).collect()
    }
}

/// How much of a history a trace contains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traced {
    /// Periods in the trace.
    pub periods_count: u64,
    /// Periods in the trace that have no sample, and so do not show where vCPUs ran.
    pub without_sample_count: u64,
    /// Periods left out because another version wrote them in a form that this version cannot read.
    pub unreadable_count: u64,
}

/// Writes a trace of the history between two times, in nanoseconds since 1970. In the trace, each run starts at the wall-clock
/// time of its first period, and then follows the host's own clock.
pub fn export(archive: &Archive, span: (i64, i64), path: &Path) -> Result<Traced, TraceError> {
    let mut file = TraceFile::create(path)?;
    let mut traced = Traced::default();
    for run in archive.runs()? {
        export_run(archive, &run, span, &mut file, &mut traced)?;
    }
    file.finish()?;
    Ok(traced)
}

fn export_run(
    archive: &Archive,
    run: &Run,
    span: (i64, i64),
    file: &mut TraceFile,
    traced: &mut Traced,
) -> Result<(), TraceError> {
    let Ok(machine) = Machine::deserialize(&run.detail["machine"]) else {
        return Ok(());
    };
    let mut samples = Samples {
        frames: archive.iter(Some(run.id), Kind::Sample, span)?,
        next: None,
    };
    let mut events = Events {
        archive,
        run: run.id,
        last: 0,
        ready: VecDeque::new(),
    };
    let mut begun: Option<(i64, Ns)> = None;
    let mut statuses = archive.iter(Some(run.id), Kind::Status, span)?;
    for frame in statuses.by_ref() {
        let frame = frame?;
        let Ok(status) = Status::deserialize(&frame.value) else {
            traced.unreadable_count += 1;
            continue;
        };
        let (wall_ns, at) = *begun.get_or_insert_with(|| {
            file.run(&format!("run {}: {}", run.id, run.host), &machine);
            (frame.wall_ns, frame.at)
        });
        let sample = samples.at(frame.at)?;
        traced.periods_count += 1;
        traced.without_sample_count += u64::from(sample.is_none());
        let since = frame.at.saturating_sub(at);
        let happened = events.until(frame.at, at)?;
        file.period(Period {
            at: Ns(wall_ns.max(0).unsigned_abs().saturating_add(since.0)),
            status: &status,
            sample: sample.as_ref(),
            happened: &happened,
        });
    }
    // A damaged history is traced up to the damage, which is then reported.
    statuses.whole()?;
    Ok(())
}

/// Reads a run's samples in step with its statuses.
struct Samples<'a> {
    frames: Frames<'a>,
    next: Option<Frame>,
}

impl Samples<'_> {
    /// Returns the sample at this time, or `None` if there is none. From call to call, `at` must not decrease.
    fn at(&mut self, at: Ns) -> Result<Option<Sample>, RecordError> {
        loop {
            let frame = match self.next.take() {
                Some(frame) => frame,
                None => match self.frames.next() {
                    Some(frame) => frame?,
                    None => return Ok(None),
                },
            };
            if frame.at > at {
                self.next = Some(frame);
                return Ok(None);
            }
            if frame.at == at {
                return Ok(read_recorded(frame.value).ok().map(|(sample, _)| sample));
            }
        }
    }
}

/// Reads a run's events in step with its statuses.
struct Events<'a> {
    archive: &'a Archive,
    run: i64,
    /// Id of the last event read.
    last: i64,
    ready: VecDeque<EventRow>,
}

impl Events<'_> {
    /// Returns further events up to `at`. Skips those before `first`, the first traced period.
    fn until(&mut self, at: Ns, first: Ns) -> Result<Vec<Happened>, RecordError> {
        let mut happened = Vec::new();
        loop {
            if self.ready.is_empty() {
                let more = self.archive.events_after(self.run, self.last, EVENTS_AT_ONCE)?;
                let Some(last) = more.last() else {
                    return Ok(happened);
                };
                self.last = last.id;
                self.ready.extend(more);
            }
            let Some(event) = self.ready.pop_front() else {
                return Ok(happened);
            };
            let when = event.record.at;
            if when > at {
                self.ready.push_front(event);
                return Ok(happened);
            }
            if when >= first {
                let text = match event.count {
                    1 => event.record.text,
                    count => format!("{} ({count} times)", event.record.text),
                };
                happened.push(Happened::read(&event.detail, &text));
            }
        }
    }
}
