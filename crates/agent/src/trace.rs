//! Traces for Perfetto's viewer: of a run as it goes on, and of what the history has.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SendError, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

use homenode_control::{Control, Epoch, Status};
use homenode_host::Sample;
use homenode_machine::Machine;
use homenode_recorder::{Archive, EventRow, Frame, Frames, Kind, RecordError, Run, WhenFull};
use homenode_trace::{Happened, Lanes, Period};
use homenode_units::Ns;
use serde::Deserialize;

use crate::history::read_recorded;

/// Epochs that may wait for the disk.
const WAITING_MAX: usize = 64;
/// Events that are read of a history at once.
const EVENTS_AT_ONCE: u32 = 512;

/// Why a trace is not written.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file, or the disk.
    #[error("the trace {path} cannot be written: {cause}")]
    File {
        /// Which.
        path: String,
        /// What the system said.
        cause: String,
    },
    /// The history of which it is cannot be read.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// A trace in a file. After the first thing that cannot be written nothing is, and [`TraceFile::finish`] says why.
#[derive(Debug)]
pub struct TraceFile {
    path: PathBuf,
    /// `None` before the first run.
    lanes: Option<Lanes<BufWriter<File>>>,
    /// Until then.
    file: Option<File>,
    failed: Option<io::Error>,
}

impl TraceFile {
    /// Makes the file.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn create(path: &Path) -> Result<TraceFile, TraceError> {
        let file = File::create(path).map_err(|error| failed(path, &error))?;
        Ok(TraceFile {
            path: path.to_owned(),
            lanes: None,
            file: Some(file),
            failed: None,
        })
    }

    /// What follows is of this run.
    pub fn run(&mut self, name: &str, machine: &Machine) {
        let done = match (&mut self.lanes, self.file.take()) {
            (Some(lanes), _) => lanes.next_run(name, machine),
            (None, None) => Ok(()),
            (None, Some(file)) => {
                Lanes::new(BufWriter::new(file), name, machine).map(|lanes| self.lanes = Some(lanes))
            }
        };
        self.note(done);
    }

    /// The next epoch of the run.
    pub fn epoch(&mut self, epoch: &Epoch, sample: Option<&Sample>) {
        let happened: Vec<Happened> = epoch.events.iter().map(Happened::from).collect();
        self.period(Period {
            at: epoch.status.at_ns,
            status: &epoch.status,
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

    /// Ends the trace.
    ///
    /// # Errors
    /// What could not be written, now or before.
    pub fn finish(mut self) -> Result<(), TraceError> {
        let finished = self.lanes.take().map_or(Ok(()), Lanes::finish);
        let done = self.failed.map_or(finished, Err);
        done.map_err(|error| failed(&self.path, &error))
    }
}

fn failed(path: &Path, cause: &io::Error) -> TraceError {
    TraceError::File {
        path: path.display().to_string(),
        cause: cause.to_string(),
    }
}

/// Writes a trace of a run from a thread of its own: the loop does not wait for a disk.
#[derive(Debug)]
pub struct Tracer {
    when_full: WhenFull,
    /// `None` once nothing is written any more.
    epochs: Option<SyncSender<(Epoch, Option<Sample>)>>,
    /// Why nothing is, if so.
    ended: Receiver<String>,
    writer: Option<JoinHandle<()>>,
    missed_count: u64,
}

impl Tracer {
    /// Begins a trace of a run.
    ///
    /// # Errors
    /// When the file cannot be made, or no thread started.
    pub fn begin(
        path: &Path,
        name: &str,
        machine: &Machine,
        when_full: WhenFull,
    ) -> Result<Tracer, TraceError> {
        let mut file = TraceFile::create(path)?;
        file.run(name, machine);
        let (epochs, waiting) = sync_channel::<(Epoch, Option<Sample>)>(WAITING_MAX);
        let (end, ended) = channel();
        let write = move || {
            for (epoch, sample) in waiting {
                file.epoch(&epoch, sample.as_ref());
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
            epochs: Some(epochs),
            ended,
            writer: Some(writer.map_err(|error| failed(path, &error))?),
            missed_count: 0,
        })
    }

    /// Writes an epoch.
    pub(crate) fn keep(&mut self, epoch: &Epoch, control: &Mutex<Control>) {
        let Some(epochs) = &self.epochs else { return };
        let sample = control
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .sample()
            .cloned();
        let epoch = (epoch.clone(), sample);
        let kept = match self.when_full {
            WhenFull::LeaveOut => epochs.try_send(epoch),
            WhenFull::Wait => epochs
                .send(epoch)
                .map_err(|SendError(epoch)| TrySendError::Disconnected(epoch)),
        };
        match kept {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => self.missed_count += 1,
            // It could not be written any more, and a notice says so.
            Err(TrySendError::Disconnected(_)) => self.epochs = None,
        }
    }

    /// What the operator should know, once.
    pub(crate) fn take_notices(&self) -> Vec<String> {
        self.ended.try_iter().collect()
    }

    /// Ends the trace; what the operator should know.
    pub(crate) fn finish(mut self) -> Vec<String> {
        self.epochs = None;
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
        let missed = self.missed_count;
        let missed =
            (missed > 0).then(|| format!("{missed} periods are not in the trace: the disk was too slow"));
        self.ended.try_iter().chain(missed).collect()
    }
}

/// What of a history cannot be in a trace, or was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traced {
    /// Periods that are in the trace.
    pub periods_count: u64,
    /// Of those, periods of which no sample is there: they do not say where vCPUs were.
    pub without_sample_count: u64,
    /// Periods that a version wrote that this one cannot read; they are not in the trace.
    pub unreadable_count: u64,
}

/// Writes a trace of what the history has between two times, in nanoseconds since 1970. A run's times are those of the wall clock
/// at its first period, from where they go on as the host's own clock did.
///
/// # Errors
/// A history that cannot be read, a file that cannot be written.
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
    // Of a damaged history the whole parts are traced, and the damage is said.
    statuses.whole()?;
    Ok(())
}

/// Samples in step with statuses.
struct Samples<'a> {
    frames: Frames<'a>,
    next: Option<Frame>,
}

impl Samples<'_> {
    /// The sample of this time, if it is there. Times only grow.
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

/// Events in step with statuses.
struct Events<'a> {
    archive: &'a Archive,
    run: i64,
    /// The number of the last that was read.
    last: i64,
    ready: VecDeque<EventRow>,
}

impl Events<'_> {
    /// What happened up to this time, and not before what is traced of the run.
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
            let when = Ns(event.at_ns.unsigned_abs());
            if when > at {
                self.ready.push_front(event);
                return Ok(happened);
            }
            if when >= first {
                let text = match event.count {
                    1 => event.text,
                    count => format!("{} ({count} times)", event.text),
                };
                happened.push(Happened::read(&event.detail, &text));
            }
        }
    }
}
