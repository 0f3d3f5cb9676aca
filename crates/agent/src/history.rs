//! What a run leaves in the history: each period's status and sample, and what happened.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use homenode_control::{Config, Control, Epoch, Event, Mode, Turn};
use homenode_host::Sample;
use homenode_linux::state_dir::STATE_DIR;
use homenode_machine::Machine;
use homenode_recorder::{Begin, Limits, Period, Recorder, WhenFull};
use homenode_units::Bytes;
use serde_json::{Number, Value, json};

use crate::bill_file::Clock;
use crate::wall_clock::WallClock;

/// Where the history of a host's agent lies: it survives a reboot, which the state directory does not.
pub const HISTORY: &str = "/var/lib/homenode/history.sqlite";
/// Digits of figures that are kept of a status: what it was made from is kept whole.
const DIGITS: usize = 3;

/// Where an agent with this state directory keeps its history.
pub fn beside(state: &Path) -> PathBuf {
    if state == Path::new(STATE_DIR) {
        HISTORY.into()
    } else {
        state.join("history.sqlite")
    }
}

/// Keeps what happens.
pub struct History {
    recorder: Option<Recorder>,
    /// `None` where nothing is kept.
    clock: Option<WallClock>,
    has_samples: bool,
    notices: Vec<String>,
}

impl History {
    /// None is kept.
    pub fn none() -> History {
        History {
            recorder: None,
            clock: None,
            has_samples: false,
            notices: Vec::new(),
        }
    }

    /// Begins a run on this host and machine. Where the file cannot be written there is no history, and a notice says why: an
    /// agent does not stand still for that.
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

    /// Whether anything is.
    pub fn is_kept(&self) -> bool {
        self.recorder.is_some()
    }

    /// Keeps an epoch.
    pub(crate) fn keep(&mut self, epoch: &Epoch, control: &Mutex<Control>) {
        let (Some(recorder), Some(clock)) = (&mut self.recorder, self.clock) else {
            return;
        };
        let at = epoch.status.at_ns;
        let wall_ns = clock.at(at);
        let sample = self.has_samples.then_some(()).and_then(|()| {
            let control = control.lock().unwrap_or_else(PoisonError::into_inner);
            let sample = control.sample().cloned()?;
            Some((sample, control.turn().clone()))
        });
        let (status, events) = (epoch.status.clone(), epoch.events.clone());
        recorder.keep(at, move || Period {
            at,
            wall_ns,
            status: rounded(json!(status)),
            sample: sample.map(|(sample, turn)| recorded(&sample, &turn)),
            events: events.iter().map(row).collect(),
        });
    }

    /// What the operator should know, each once.
    pub(crate) fn take_notices(&mut self) -> Vec<String> {
        let of_recorder = self.recorder.as_mut().map(Recorder::take_notices);
        let mut notices = std::mem::take(&mut self.notices);
        notices.extend(of_recorder.unwrap_or_default());
        notices
    }
}

/// The key beside those of a sample under which the rest of its epoch is.
const TURN: &str = "turn";

/// What an epoch was made from and decided, as it is kept.
fn recorded(sample: &Sample, turn: &Turn) -> Value {
    let mut value = json!(sample);
    value[TURN] = json!(turn);
    value
}

/// A sample as it was kept, and the rest of its epoch; `None` in what a version wrote that did not keep it.
///
/// # Errors
/// What is no sample.
pub fn read_recorded(mut value: Value) -> serde_json::Result<(Sample, Option<Turn>)> {
    let turn = value.get_mut(TURN).map(Value::take);
    let turn = turn.map(serde_json::from_value).transpose()?;
    Ok((serde_json::from_value(value)?, turn))
}

/// An event as a row.
fn row(event: &Event) -> homenode_recorder::Event {
    let detail = json!(event);
    let text = |value: &Value| value.as_str().map(str::to_owned);
    homenode_recorder::Event {
        kind: text(&detail["event"]).unwrap_or_default(),
        vm: text(&detail["vm"]),
        name: text(&detail["name"]),
        policy: text(&detail["policy"]),
        action: text(&detail["action"]),
        outcome: text(&detail["result"]["outcome"]),
        text: event.to_string(),
        detail,
    }
}

/// The same with as many digits as tell anything; counts stay exact.
fn rounded(mut value: Value) -> Value {
    round(&mut value);
    value
}

/// A whole number with as many digits as tell anything.
fn short(number: u64) -> u64 {
    let digits = number.checked_ilog10().map_or(1, |places| places as usize + 1);
    let unit = 10_u64.pow(u32::try_from(digits.saturating_sub(DIGITS)).unwrap_or(0));
    number / unit * unit
}

fn round(value: &mut Value) {
    match value {
        Value::Number(number) => {
            let Some(full) = number.as_f64().filter(|_| number.is_f64()) else {
                return;
            };
            let short = format!("{full:.*e}", DIGITS - 1)
                .parse()
                .ok()
                .and_then(Number::from_f64);
            if let Some(short) = short {
                *number = short;
            }
        }
        Value::Array(values) => values.iter_mut().for_each(round),
        Value::Object(fields) => {
            for (key, value) in fields {
                // Rates are figures, though they are written without a point; what a controller can sustain is no measurement.
                let rate = value
                    .as_u64()
                    .filter(|_| key.ends_with("_per_s") && !key.contains("_max_"));
                match rate {
                    Some(rate) => *value = short(rate).into(),
                    None => round(value),
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_keep_three_digits_and_counts_all_of_them() {
        let value =
            json!({"a": [0.123_456, 123_456.7, 1e-9, 0.0], "n": 123_456_789_012_u64, "t": "0.123456"});
        let short = json!({"a": [0.123, 123_000.0, 1e-9, 0.0], "n": 123_456_789_012_u64, "t": "0.123456"});
        assert_eq!(rounded(value), short);
        let rates =
            json!({"bandwidth_bytes_per_s": 1_234_567, "bytes_per_s": 12, "a_max_bytes_per_s": 1_234_567});
        let short =
            json!({"bandwidth_bytes_per_s": 1_230_000, "bytes_per_s": 12, "a_max_bytes_per_s": 1_234_567});
        assert_eq!(rounded(rates), short);
    }
}
