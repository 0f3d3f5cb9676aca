//! The loop over one host, whichever it is, and how it is shown.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use homenode_control::{Config, Control, Epoch, Mode};
use homenode_host::{Bell, Host, HostError};
use homenode_units::Ns;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

use crate::bill_file::BillFile;
use crate::setting_queue::SettingQueue;

/// The longest simulated time before looking whether something is to be done.
const LOOK_EVERY: Ns = Ns::from_millis(100);

/// Something that the operator should know.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Notice<'a> {
    message: &'a str,
}

/// What a run was, said first: version, commit, host and every option, so that it can be repeated.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Start<'a> {
    version: &'static str,
    commit: &'static str,
    host: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    mode: Mode,
    /// Every setting in force, as in a configuration file.
    #[schemars(with = "serde_json::Map<String, serde_json::Value>")]
    config: &'a Config,
}

/// Where a run is shown.
pub trait Show {
    /// Says a line to people.
    fn line(&mut self, text: &str);
    /// Tells programs something, as an object named by its kind.
    fn object(&mut self, kind: &str, value: Value);
    /// Shows what an epoch saw and did.
    fn epoch(&mut self, epoch: &Epoch);
    /// Whether nobody reads any more: the run then ends, in good order.
    fn is_closed(&self) -> bool;
}

/// A loop over one host, and how it is shown.
pub struct Agent<'a> {
    /// State of the loop, shared with the server.
    pub control: Arc<Mutex<Control>>,
    /// Settings that operators ask for through the server.
    pub settings: SettingQueue,
    /// Where usage is written down.
    pub bill: BillFile,
    /// Where it is shown.
    pub output: &'a mut dyn Show,
    /// What was built: shown first, so that a run can be repeated.
    pub commit: &'static str,
    /// Rung where a setting waits, or when it shall stop.
    pub bell: Bell,
    /// Host time after which it stops.
    pub duration: Option<Ns>,
    /// Time between samples.
    pub period: Ns,
    /// Wall-clock time that each simulated second takes: the twin's runs are watched.
    pub pace: Pace,
}

/// How time passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// It does by itself; who waits is woken.
    Real,
    /// A simulated second takes as long as it is worked at.
    Fast,
    /// A simulated second takes a second.
    Watched,
}

impl Agent<'_> {
    /// Steps until stopped, out of time, or `done`. `notices` are what the host wants told beside its samples.
    pub fn run<H: Host>(
        &mut self,
        host: &mut H,
        mut notices: impl FnMut(&mut H) -> Vec<String>,
        done: impl Fn(&H) -> bool,
    ) {
        let mut started = None;
        let mut trouble: Option<HostError> = None;
        while !self.bell.is_stopping() && !self.output.is_closed() {
            match host.sample() {
                Err(error) => {
                    // Said once, not in every period that it lasts.
                    if trouble.as_ref() != Some(&error) {
                        self.output.line(&format!("{error}"));
                        let message = error.to_string();
                        self.output.object("trouble", json!(Notice { message: &message }));
                        trouble = Some(error);
                    }
                }
                Ok(sample) => {
                    if trouble.take().is_some() {
                        self.output.line("the host answers again");
                    }
                    let at = sample.at;
                    let lock = || {
                        self.control
                            .lock()
                            .unwrap_or_else(std::sync::PoisonError::into_inner)
                    };
                    let begun = lock().begin(host.machine(), sample);
                    let answer = begun.commit(host);
                    let epoch = lock().finish(host.machine(), begun, answer);
                    self.output.epoch(&epoch);
                    if let Some(trouble) = self.bill.settle(at, &self.control) {
                        self.notice(&trouble);
                    }
                    let since = at.saturating_sub(*started.get_or_insert(at));
                    if self.duration.is_some_and(|duration| since >= duration) || done(host) {
                        break;
                    }
                }
            }
            for notice in notices(host) {
                self.notice(&notice);
            }
            self.wait(host);
        }
        if let Some(trouble) = self.bill.close(&self.control) {
            self.notice(&trouble);
        }
    }

    fn notice(&mut self, text: &str) {
        self.output.line(text);
        self.output.object("notice", json!(Notice { message: text }));
    }

    fn wait<H: Host>(&self, host: &mut H) {
        let mut left = self.period;
        while left > Ns::ZERO && !self.bell.is_stopping() {
            self.settings.carry_out(host, &self.control);
            let part = match self.pace {
                Pace::Real => left,
                Pace::Fast | Pace::Watched => left.min(LOOK_EVERY),
            };
            let waited = host.wait(part);
            if self.pace == Pace::Watched {
                self.bell.wait(Duration::from_nanos(part.0));
            }
            left = left.saturating_sub(waited);
        }
    }

    /// Says what is about to run.
    pub fn announce(&mut self, host: String, seed: Option<u64>, mode: Mode) {
        let control = self
            .control
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let (version, commit) = (env!("CARGO_PKG_VERSION"), self.commit);
        let start = Start {
            version,
            commit,
            host,
            seed,
            mode,
            config: control.config(),
        };
        self.output.object("start", json!(start));
        let seed = seed.map(|seed| format!(", seed {seed}")).unwrap_or_default();
        let how = if mode == Mode::DryRun {
            ", dry run: nothing is touched"
        } else {
            ""
        };
        self.output.line(&format!(
            "homenode {version} ({commit}) on {}{seed}, policies {}, every {}{how}",
            start.host,
            start.config.policies.name(),
            self.period
        ));
    }
}
