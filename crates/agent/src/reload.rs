//! Reloads settings while the agent runs: on SIGHUP, or when an operator requests it over HTTP. The loop applies the new settings
//! between two cycles, since only the loop uses them. Invalid settings change nothing.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use homenode_api::http::Reloaded;
use homenode_control::{Config, Control};
use homenode_host::WakeSignal;
use serde_json::Value;

use crate::loop_queue::LoopQueue;
use crate::setting_queue::NotSet;

/// Reads the settings, or returns why they cannot be read.
type Read = dyn Fn() -> Result<Config, String> + Send + Sync;
/// A callback that gets the result of a reload.
type Told = Box<dyn FnOnce(Result<Reloaded, String>) + Send>;

/// A queue of reload requests. All clones share it.
#[derive(Clone)]
pub struct Reload {
    read: Arc<Read>,
    waiting: LoopQueue<Told>,
}

impl fmt::Debug for Reload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reload").finish_non_exhaustive()
    }
}

impl Reload {
    /// Creates a queue whose requests read the settings with `read`; `wake_signal` wakes the loop.
    pub fn new(
        wake_signal: &WakeSignal,
        read: impl Fn() -> Result<Config, String> + Send + Sync + 'static,
    ) -> Reload {
        Reload {
            read: Arc::new(read),
            waiting: LoopQueue::new(wake_signal),
        }
    }

    /// Creates a queue for a run whose settings are not in a file: reloading always fails.
    pub fn never(wake_signal: &WakeSignal) -> Reload {
        Reload::new(wake_signal, || {
            Err("this run was started without a settings file".to_owned())
        })
    }

    /// Requests a reload; the loop calls `told` with the result.
    pub fn ask(&self, told: impl FnOnce(Result<Reloaded, String>) + Send + 'static) {
        if let Err(told) = self.waiting.push(Box::new(told)) {
            told(Err(NotSet::Ended.to_string()));
        }
    }

    /// Refuses the requests that wait, and all that come later: the loop has ended, but the servers go on answering.
    pub fn close(&self) {
        for told in self.waiting.close() {
            told(Err(NotSet::Ended.to_string()));
        }
    }

    /// Returns whether a reload was requested.
    pub(crate) fn is_wanted(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Reloads once on behalf of all waiting requests; returns a notice for the operator.
    pub(crate) fn carry_out(&self, control: &Mutex<Control>) -> String {
        let waiting = self.waiting.take();
        let read = (self.read)();
        let done = read.map(|newer| {
            let mut control = control.lock().unwrap_or_else(PoisonError::into_inner);
            let before = control.config().clone();
            let kept = control.take_over(newer);
            Reloaded {
                changed: differing(&before, control.config()),
                at_next_start: kept.into_iter().map(str::to_owned).collect(),
            }
        });
        let said = match &done {
            Ok(reloaded) => reloaded.to_string(),
            Err(why) => format!("the settings stay as they are, because the new ones are invalid: {why}"),
        };
        waiting.into_iter().for_each(|told| told(done.clone()));
        said
    }
}

/// Returns the keys of settings that differ.
fn differing(one: &Config, other: &Config) -> Vec<String> {
    let mut keys = Vec::new();
    let all = |config: &Config| serde_json::to_value(config).unwrap_or_default();
    compare("", &all(one), &all(other), &mut keys);
    keys
}

fn compare(key: &str, one: &Value, other: &Value, keys: &mut Vec<String>) {
    match (one, other) {
        (Value::Object(one), Value::Object(other)) => {
            let names: std::collections::BTreeSet<&String> = one.keys().chain(other.keys()).collect();
            for name in names {
                let inner = match key {
                    "" => name.clone(),
                    outer => format!("{outer}.{name}"),
                };
                let value = |of: &serde_json::Map<String, Value>| of.get(name).cloned().unwrap_or_default();
                compare(&inner, &value(one), &value(other), keys);
            }
        }
        (one, other) if one != other => keys.push(key.to_owned()),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use homenode_control::{Mode, PolicySet};
    use homenode_units::Ns;

    use super::*;

    fn reloaded(newer: Config) -> (Reloaded, Config) {
        let control = Mutex::new(Control::new(Config::default(), Mode::Act));
        let reload = Reload::new(&WakeSignal::default(), move || Ok(newer.clone()));
        let (tell, told) = std::sync::mpsc::channel();
        reload.ask(move |done| tell.send(done).unwrap());
        assert!(reload.is_wanted());
        reload.carry_out(&control);
        assert!(!reload.is_wanted());
        (
            told.recv().unwrap().unwrap(),
            control.into_inner().unwrap().config().clone(),
        )
    }

    #[test]
    fn what_a_running_agent_can_change_is_in_force_and_the_rest_is_named() {
        let mut newer = Config {
            period: Ns::from_secs(2),
            policies: PolicySet::Tavo,
            ..Config::default()
        };
        newer.pace.slowdown_max = 0.5;
        newer.record.days = 3;
        let (done, now) = reloaded(newer);
        let window = "permits.attribution.window_most"; // at least a few periods
        assert_eq!(done.changed, ["pace.slowdown_max", "period", window]);
        assert_eq!(done.at_next_start, ["policies", "record"]);
        assert_eq!((now.period, now.pace.slowdown_max), (Ns::from_secs(2), 0.5));
        assert_eq!((now.policies, now.record.days), (PolicySet::Homenode, 30));
    }

    #[test]
    fn settings_that_cannot_be_read_change_nothing() {
        let control = Mutex::new(Control::new(Config::default(), Mode::Act));
        let reload = Reload::never(&WakeSignal::default());
        reload.ask(|done| assert!(done.is_err()));
        let said = reload.carry_out(&control);
        assert!(said.contains("stay as they are"), "{said}");
        assert_eq!(*control.lock().unwrap().config(), Config::default());
    }

    #[test]
    fn a_reload_after_the_end_of_the_loop_is_refused_at_once() {
        let reload = Reload::never(&WakeSignal::default());
        let (tell, told) = std::sync::mpsc::channel();
        for is_late in [false, true] {
            let tell = tell.clone();
            reload.ask(move |done| tell.send((is_late, done.unwrap_err())).unwrap());
            if !is_late {
                assert!(told.try_recv().is_err(), "it waits for the loop");
                reload.close();
            }
            assert_eq!(told.try_recv(), Ok((is_late, NotSet::Ended.to_string())));
        }
        assert!(!reload.is_wanted());
    }
}
