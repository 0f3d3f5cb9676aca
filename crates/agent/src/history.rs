//! What a run records in the history: each period's status and sample, and events.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use homenode_control::{Config, Control, Cycle, Mode, Turn};
use homenode_host::Sample;
use homenode_machine::Machine;
use homenode_recorder::{Begin, Figures, Kind, Limits, Period, Recorder, WhenFull, Written};
use homenode_undo::state_dir::STATE_DIR;
use homenode_units::Bytes;
use serde::Serialize;
use serde_json::{Value, json};

use crate::usage_file::Clock;
use crate::wall_clock::WallClock;

/// Path of the history on a real host. Unlike the state directory, the history survives a reboot.
pub const HISTORY: &str = "/var/lib/homenode/history.sqlite";

/// Returns the path of the history of an agent that has this state directory.
pub fn beside(state: &Path) -> PathBuf {
    if state == Path::new(STATE_DIR) {
        HISTORY.into()
    } else {
        state.join("history.sqlite")
    }
}

/// Records a run.
pub struct History {
    recorder: Option<Recorder>,
    /// `None` if nothing is kept.
    clock: Option<WallClock>,
    has_samples: bool,
    notices: Vec<String>,
}

impl History {
    /// Returns a history that keeps nothing.
    pub fn none() -> History {
        History {
            recorder: None,
            clock: None,
            has_samples: false,
            notices: Vec::new(),
        }
    }

    /// Begins to record a run. If the file cannot be written, the agent runs without a history, and a notice says so.
    pub fn begin(
        path: &Path,
        (config, mode): (&Config, Mode),
        clock: WallClock,
        (host, machine): (String, &Machine),
        commit: &str,
    ) -> History {
        let record = &config.record;
        let mut history = History {
            clock: Some(clock),
            has_samples: record.samples_hours > 0,
            ..History::none()
        };
        if record.days == 0 {
            return history;
        }
        let begin = Begin {
            wall_ns: clock.begun_ns(),
            version: format!("{} ({commit})", env!("CARGO_PKG_VERSION")),
            host,
            detail: json!({"machine": machine, "config": config, "mode": mode}),
        };
        let limits = Limits {
            status: record.status_age(),
            samples: record.samples_age(),
            samples_bytes: record.samples_max,
            bytes: record.max.max(Bytes::from_mib(1)),
        };
        let when_full = match clock.clock() {
            Clock::Wall => WhenFull::LeaveOut,
            Clock::Host => WhenFull::Wait,
        };
        match Recorder::begin(path, &begin, limits, when_full) {
            Ok(recorder) => history.recorder = Some(recorder),
            Err(error) => history.notices.push(format!("{error}; this run is not recorded")),
        }
        history
    }

    /// Returns true if the run is recorded.
    pub fn is_kept(&self) -> bool {
        self.recorder.is_some()
    }

    /// Records a cycle.
    pub(crate) fn keep(&mut self, cycle: Cycle, control: &Mutex<Control>) {
        let (Some(recorder), Some(clock)) = (&mut self.recorder, self.clock) else {
            return;
        };
        let at = cycle.status.at_ns;
        let wall_ns = clock.at(at);
        let sample = self.has_samples.then_some(()).and_then(|()| {
            let control = control.lock().unwrap_or_else(PoisonError::into_inner);
            Some((control.shared_sample()?, control.turn().clone()))
        });
        recorder.keep(at, move |documents| {
            documents.put(Kind::Status, Figures::Short, &cycle.status);
            if let Some((sample, turn)) = &sample {
                documents.put(Kind::Sample, Figures::Whole, &Recorded { sample, turn });
            }
            let events = cycle.events.iter().map(|event| (event.record(at), json!(event)));
            Period {
                at,
                wall_ns,
                events: events.collect(),
            }
        });
    }

    /// Returns the decisions that were written since the last call.
    pub(crate) fn take_written(&mut self) -> Vec<Written> {
        self.recorder
            .as_mut()
            .map(Recorder::take_written)
            .unwrap_or_default()
    }

    /// Returns new notices for the operator.
    pub(crate) fn take_notices(&mut self) -> Vec<String> {
        let of_recorder = self.recorder.as_mut().map(Recorder::take_notices);
        let mut notices = std::mem::take(&mut self.notices);
        notices.extend(of_recorder.unwrap_or_default());
        notices
    }
}

/// The key in a recorded sample that holds the rest of its cycle.
const TURN: &str = "turn";

/// A cycle in recorded form: the sample and other inputs it was decided from, and what it decided.
#[derive(Serialize)]
struct Recorded<'a> {
    #[serde(flatten)]
    sample: &'a Sample,
    /// Stored under the key [`TURN`].
    turn: &'a Turn,
}

/// Parses a recorded sample and the rest of its cycle. The rest is `None` if an older version wrote the sample.
///
/// # Errors
/// If the value is not a sample.
pub fn read_recorded(mut value: Value) -> serde_json::Result<(Sample, Option<Turn>)> {
    let turn = value.get_mut(TURN).map(Value::take);
    let turn = turn.map(serde_json::from_value).transpose()?;
    Ok((serde_json::from_value(value)?, turn))
}
