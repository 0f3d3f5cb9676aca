//! Records in a thread of its own. The agent's loop hands over each period, and goes on.

use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;

use homenode_host::EventRecord;
use homenode_units::Ns;
use serde_json::{Value, json};

use crate::document::Documents;
use crate::schema::RecordError;
use crate::store::{Begin, Limits, Period, Store, Written};

/// Most periods that may wait to be written.
const WAITING_MAX: usize = 64;

/// Creates a period and writes its documents. The recorder's thread calls it, because turning figures into JSON takes a while.
type Make = Box<dyn FnOnce(&mut Documents) -> Period + Send>;

/// How the recorder treats a period if the queue is full because the disk is slower than the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenFull {
    /// The period is left out, and a later period records that. A real host does not wait.
    LeaveOut,
    /// The run waits. A simulated run can.
    Wait,
}

/// A run that is being recorded.
#[derive(Debug)]
pub struct Recorder {
    when_full: WhenFull,
    /// `None` once the recorder is closed.
    periods: Option<SyncSender<Make>>,
    notices: Receiver<String>,
    written: Receiver<Vec<Written>>,
    writer: Option<JoinHandle<()>>,
    /// Number of periods left out since the last recorded one.
    missed_count: u64,
}

impl Recorder {
    /// Begins a run in the history at `path`, which is created if missing.
    ///
    /// # Errors
    /// If the history cannot be written, or another program or a newer version wrote it.
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

    /// Hands over a period to be recorded.
    pub fn keep(&mut self, at: Ns, make: impl FnOnce(&mut Documents) -> Period + Send + 'static) {
        let Some(periods) = &self.periods else { return };
        let missed = self.missed_count;
        let make: Make = Box::new(move |documents: &mut Documents| {
            let mut period = make(documents);
            period.events.extend((missed > 0).then(|| left_out(missed, at)));
            period
        });
        let kept = match self.when_full {
            WhenFull::LeaveOut => periods.try_send(make).is_ok(),
            WhenFull::Wait => periods.send(make).is_ok(),
        };
        self.missed_count = if kept { 0 } else { missed + 1 };
    }

    /// Returns new notices for the operator.
    pub fn take_notices(&mut self) -> Vec<String> {
        self.notices.try_iter().collect()
    }

    /// Returns the decisions written since the last call, oldest first.
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

fn left_out(count: u64, at: Ns) -> (EventRecord, Value) {
    let record = EventRecord {
        at,
        kind: "gap".into(),
        vm: None,
        name: None,
        policy: None,
        action: None,
        outcome: None,
        text: format!("{count} periods before this one were not recorded: the disk was too slow, or full"),
    };
    (record, json!({"missed_count": count, "until_ns": at}))
}

/// Where the writing thread sends its messages. Messages that come after the run are lost.
struct Told {
    notice: Sender<String>,
    decided: Sender<Vec<Written>>,
}

impl Told {
    fn notice(&self, text: String) {
        let _ = self.notice.send(text);
    }
}

/// Writes until the run ends. A period that cannot be written is left out, and this is recorded once writing works again.
fn write(mut store: Store, waiting: &Receiver<Make>, told: &Told) {
    let (mut lost_count, mut said, mut unpruned) = (0, None, None);
    let mut documents = Documents::default();
    for make in waiting {
        documents.clear();
        let mut period = make(&mut documents);
        let at = period.at;
        period
            .events
            .extend((lost_count > 0).then(|| left_out(lost_count, at)));
        match store.append(&period, &documents) {
            Ok(written) => {
                if said.take().is_some() {
                    told.notice("recording to the history works again".into());
                }
                lost_count = 0;
                if !written.is_empty() {
                    let _ = told.decided.send(written);
                }
                // The period is already recorded, even if pruning fails.
                let failed = store.prune().err().map(|error| error.to_string());
                if let Some(text) = failed.filter(|text| unpruned.as_ref() != Some(text)) {
                    told.notice(format!(
                        "{text}; data beyond the limits on age and size could not be deleted"
                    ));
                    unpruned = Some(text);
                }
            }
            Err(error) => {
                lost_count += 1;
                let text = error.to_string();
                if said.as_ref() != Some(&text) {
                    told.notice(format!("{text}; until this is fixed, the run is not recorded"));
                    said = Some(text);
                }
            }
        }
    }
    if let Err(error) = store.close() {
        told.notice(error.to_string());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;
    use crate::columns::tests::value;
    use crate::document::Figures;
    use crate::{Archive, Kind};

    fn begin(path: &Path) -> Recorder {
        let begin = Begin {
            wall_ns: 0,
            version: "test".into(),
            host: "test".into(),
            detail: json!({}),
        };
        let limits = Limits {
            status: Ns(u64::MAX),
            samples: Ns(u64::MAX),
            samples_bytes: homenode_units::Bytes::from_gib(1),
            bytes: homenode_units::Bytes::from_gib(1),
        };
        Recorder::begin(path, &begin, limits, WhenFull::Wait).unwrap()
    }

    fn keep(recorder: &mut Recorder, second: u64, (status, sample): (Value, Option<Value>)) {
        let at = Ns::from_secs(second);
        recorder.keep(at, move |documents| {
            documents.put(Kind::Status, Figures::Whole, &status);
            if let Some(sample) = sample {
                documents.put(Kind::Sample, Figures::Whole, &sample);
            }
            Period {
                at,
                wall_ns: at.0.cast_signed(),
                events: Vec::new(),
            }
        });
    }

    /// Returns the recorded values, once there are `count` periods.
    fn back(path: &Path, kind: Kind, count: usize) -> Vec<Value> {
        loop {
            let archive = Archive::open(path).unwrap();
            let frames = archive.iter(None, kind, (i64::MIN, i64::MAX)).unwrap();
            let values: Vec<Value> = frames.map(|frame| frame.unwrap().value).collect();
            if values.len() >= count {
                return values;
            }
            std::thread::yield_now();
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn whatever_was_given_is_read_back_from_the_tail_from_a_block_and_from_what_a_killed_agent_left(
            given in prop::collection::vec((value(), prop::option::of(value())), 1..8),
            // The next block begins with the period that comes a minute later.
            later in 0..8usize,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("history.sqlite");
            let statuses: Vec<Value> = given.iter().map(|(status, _)| status.clone()).collect();
            let samples: Vec<Value> = given.iter().filter_map(|(_, sample)| sample.clone()).collect();
            let is_back = |path: &Path| {
                back(path, Kind::Status, statuses.len()) == statuses
                    && back(path, Kind::Sample, samples.len()) == samples
            };
            let mut recorder = begin(&path);
            for (n, period) in given.iter().enumerate() {
                let second = if n < later { n } else { n + 60 };
                keep(&mut recorder, second as u64, period.clone());
            }
            prop_assert!(is_back(&path));
            // Copies the files: the state on disk if the agent were killed now.
            let killed = dir.path().join("killed.sqlite");
            for end in ["", "-wal"] {
                std::fs::copy(format!("{}{end}", path.display()), format!("{}{end}", killed.display())).unwrap();
            }
            drop(begin(&killed));
            prop_assert!(is_back(&killed));
            drop(recorder);
            prop_assert!(is_back(&path));
        }
    }
}
