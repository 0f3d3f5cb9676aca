//! What a run leaves in the history: each period's status and sample, and what happened.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use homenode_control::{Config, Control, Epoch, Event, Mode, Turn};
use homenode_host::Sample;
use homenode_linux::state_dir::STATE_DIR;
use homenode_machine::Machine;
use homenode_recorder::{Begin, Limits, Period, Recorder, WhenFull, Written};
use homenode_units::Bytes;
use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter, Serializer};
use serde_json::{Value, json};

use crate::bill_file::Clock;
use crate::wall_clock::WallClock;

/// Where the history of a host's agent lies: it survives a reboot, which the state directory does not.
pub const HISTORY: &str = "/var/lib/homenode/history.sqlite";
/// Digits of figures that are kept of a status: what it was made from is kept whole.
const DIGITS: u32 = 3;

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
    pub(crate) fn keep(&mut self, epoch: Epoch, control: &Mutex<Control>) {
        let (Some(recorder), Some(clock)) = (&mut self.recorder, self.clock) else {
            return;
        };
        let at = epoch.status.at_ns;
        let wall_ns = clock.at(at);
        let sample = self.has_samples.then_some(()).and_then(|()| {
            let control = control.lock().unwrap_or_else(PoisonError::into_inner);
            Some((control.shared_sample()?, control.turn().clone()))
        });
        recorder.keep(at, move || Period {
            at,
            wall_ns,
            status: rounded(&epoch.status),
            sample: sample.map(|(sample, turn)| recorded(&sample, &turn)),
            events: epoch.events.iter().map(row).collect(),
        });
    }

    /// Decisions that can be found in it since this was last asked.
    pub(crate) fn take_written(&mut self) -> Vec<Written> {
        self.recorder
            .as_mut()
            .map(Recorder::take_written)
            .unwrap_or_default()
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
#[derive(Serialize)]
struct Recorded<'a> {
    #[serde(flatten)]
    sample: &'a Sample,
    /// Under [`TURN`].
    turn: &'a Turn,
}

fn recorded(sample: &Sample, turn: &Turn) -> Vec<u8> {
    // Their keys are texts and their figures numbers: nothing in them cannot be written.
    serde_json::to_vec(&Recorded { sample, turn }).unwrap_or_default()
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

/// What is kept of a status, as JSON: figures with as many digits as tell anything, counts exact.
fn rounded(status: &impl Serialize) -> Vec<u8> {
    let mut text = Vec::new();
    let mut writer = Serializer::with_formatter(&mut text, Rounded::default());
    // As above.
    match status.serialize(&mut writer) {
        Ok(()) => text,
        Err(_) => Vec::new(),
    }
}

/// Writes JSON with short figures.
#[derive(Default)]
struct Rounded {
    is_key: bool,
    /// Whether the value that comes is a rate: a figure, though it is written without a point. What a controller can sustain is
    /// no measurement.
    is_rate: bool,
}

impl Formatter for Rounded {
    fn write_f64<W: Write + ?Sized>(&mut self, to: &mut W, value: f64) -> io::Result<()> {
        CompactFormatter.write_f64(to, short_figure(value))
    }

    fn write_u64<W: Write + ?Sized>(&mut self, to: &mut W, value: u64) -> io::Result<()> {
        let value = if self.is_rate { short(value) } else { value };
        CompactFormatter.write_u64(to, value)
    }

    fn begin_array<W: Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        self.is_rate = false;
        CompactFormatter.begin_array(to)
    }

    fn begin_object_key<W: Write + ?Sized>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        self.is_key = true;
        CompactFormatter.begin_object_key(to, first)
    }

    fn end_object_key<W: Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        self.is_key = false;
        CompactFormatter.end_object_key(to)
    }

    fn write_string_fragment<W: Write + ?Sized>(&mut self, to: &mut W, fragment: &str) -> io::Result<()> {
        if self.is_key {
            self.is_rate = fragment.ends_with("_per_s") && !fragment.contains("_max_");
        }
        CompactFormatter.write_string_fragment(to, fragment)
    }
}

/// A whole number with as many digits as tell anything.
fn short(number: u64) -> u64 {
    let digits = number.checked_ilog10().map_or(1, |places| places + 1);
    let unit = 10_u64.pow(digits.saturating_sub(DIGITS));
    number / unit * unit
}

/// A figure with as many digits as tell anything.
fn short_figure(full: f64) -> f64 {
    /// Powers of ten that are exact, so that what is divided by them is the nearest figure to its decimals.
    const EXACT_MAX: i32 = 22;
    const EXACT_MIN: i32 = -EXACT_MAX;
    let magnitude = full.abs().log10().floor() as i32;
    let places = (DIGITS.cast_signed() - 1).saturating_sub(magnitude);
    match places {
        0..=EXACT_MAX => (full * 10_f64.powi(places)).round() / 10_f64.powi(places),
        EXACT_MIN..0 => (full / 10_f64.powi(-places)).round() * 10_f64.powi(-places),
        // Far smaller or larger than any figure of a host; 0 has no magnitude.
        _ => full,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(value: &Value) -> Value {
        serde_json::from_slice(&rounded(value)).unwrap()
    }

    #[test]
    fn figures_keep_three_digits_and_counts_all_of_them() {
        let value = json!({"a": [0.123_456, 123_456.7, 1.234e-9, 0.0, -9.996], "n": 123_456_789_012_u64, "t": "0.123456"});
        let short =
            json!({"a": [0.123, 123_000.0, 1.23e-9, 0.0, -10.0], "n": 123_456_789_012_u64, "t": "0.123456"});
        assert_eq!(kept(&value), short);
        let rates =
            json!({"bandwidth_bytes_per_s": 1_234_567, "bytes_per_s": 12, "a_max_bytes_per_s": 1_234_567});
        let short =
            json!({"bandwidth_bytes_per_s": 1_230_000, "bytes_per_s": 12, "a_max_bytes_per_s": 1_234_567});
        assert_eq!(kept(&rates), short);
    }
}
