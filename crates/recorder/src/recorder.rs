//! Writing from a thread of its own: the loop hands over what there is to keep, and goes on.

use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;

use homenode_units::Ns;
use serde_json::json;

use crate::schema::RecordError;
use crate::store::{Begin, Event, Limits, Period, Store, Written};

/// Periods that may wait for the disk.
const WAITING_MAX: usize = 64;

/// Makes the period that is to be kept: on the recorder's thread, since turning figures into JSON takes a while.
type Make = Box<dyn FnOnce() -> Period + Send>;

/// What becomes of a period for which there is no room, since the disk is slower than the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenFull {
    /// It is left out, and that is written down later: a host does not wait.
    LeaveOut,
    /// The run waits: a simulated one may.
    Wait,
}

/// A run that is written down.
#[derive(Debug)]
pub struct Recorder {
    when_full: WhenFull,
    /// `None` once it is closed.
    periods: Option<SyncSender<Make>>,
    notices: Receiver<String>,
    written: Receiver<Vec<Written>>,
    writer: Option<JoinHandle<()>>,
    /// Periods that found no room since the last that did.
    missed_count: u64,
}

impl Recorder {
    /// Begins a run in the history at `path`, which is made where there is none.
    ///
    /// # Errors
    /// When it cannot be written, or belongs to another program or a newer version.
    pub fn begin(
        path: &Path,
        begin: &Begin,
        limits: Limits,
        when_full: WhenFull,
    ) -> Result<Recorder, RecordError> {
        let (store, opening) = Store::open(path, begin, limits)?;
        let (periods, waiting) = sync_channel::<Make>(WAITING_MAX);
        let (notice, notices) = channel();
        let (decided, written) = channel();
        for text in opening {
            let _ = notice.send(text);
        }
        let writer = std::thread::Builder::new().name("recorder".into());
        let told = Told { notice, decided };
        let writer = writer.spawn(move || write(store, &waiting, &told));
        Ok(Recorder {
            when_full,
            periods: Some(periods),
            notices,
            written,
            writer: Some(writer.map_err(|e| RecordError::new(path, e))?),
            missed_count: 0,
        })
    }

    /// Hands over a period.
    pub fn keep(&mut self, at: Ns, make: impl FnOnce() -> Period + Send + 'static) {
        let Some(periods) = &self.periods else { return };
        let missed = self.missed_count;
        let make: Make = Box::new(move || {
            let mut period = make();
            period.events.extend((missed > 0).then(|| left_out(missed, at)));
            period
        });
        let kept = match self.when_full {
            WhenFull::LeaveOut => periods.try_send(make).is_ok(),
            WhenFull::Wait => periods.send(make).is_ok(),
        };
        self.missed_count = if kept { 0 } else { missed + 1 };
    }

    /// What the operator should know, each once.
    pub fn take_notices(&mut self) -> Vec<String> {
        self.notices.try_iter().collect()
    }

    /// Decisions that were written down since this was last asked, the first first.
    pub fn take_written(&mut self) -> Vec<Written> {
        self.written.try_iter().flatten().collect()
    }

    /// Ends the run, once everything is written.
    pub fn close(&mut self) {
        self.periods = None;
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.close();
    }
}

fn left_out(count: u64, at: Ns) -> Event {
    Event {
        kind: "gap".into(),
        vm: None,
        name: None,
        policy: None,
        action: None,
        outcome: None,
        text: format!("{count} periods before this one were not recorded: the disk was too slow, or full"),
        detail: json!({"missed_count": count, "until_ns": at}),
    }
}

/// What the writing thread has to say. The run may be over and hear nothing of it.
struct Told {
    notice: Sender<String>,
    decided: Sender<Vec<Written>>,
}

impl Told {
    fn notice(&self, text: String) {
        let _ = self.notice.send(text);
    }
}

/// Writes until the run ends. What cannot be written is left out, and told where it can be again.
fn write(mut store: Store, waiting: &Receiver<Make>, told: &Told) {
    let (mut lost_count, mut said, mut unpruned) = (0, None, None);
    for make in waiting {
        let mut period = make();
        let at = period.at;
        period
            .events
            .extend((lost_count > 0).then(|| left_out(lost_count, at)));
        match store.append(period) {
            Ok(written) => {
                if said.take().is_some() {
                    told.notice("the history is written again".into());
                }
                lost_count = 0;
                if !written.is_empty() {
                    let _ = told.decided.send(written);
                }
                // The period is there, whatever becomes of older ones.
                let failed = store.prune().err().map(|error| error.to_string());
                if let Some(text) = failed.filter(|text| unpruned.as_ref() != Some(text)) {
                    told.notice(format!("{text}; what is too old or too much is still there"));
                    unpruned = Some(text);
                }
            }
            Err(error) => {
                lost_count += 1;
                let text = error.to_string();
                if said.as_ref() != Some(&text) {
                    told.notice(format!("{text}; what happens meanwhile is not recorded"));
                    said = Some(text);
                }
            }
        }
    }
    if let Err(error) = store.close() {
        told.notice(error.to_string());
    }
}
