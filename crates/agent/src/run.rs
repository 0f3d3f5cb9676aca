//! The loop over one host, real or simulated, and its output.

use std::convert::Infallible;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use homenode_control::{Around, Config, Control, Cycle, Mode, Phase};
use homenode_host::{Host, HostError, WakeSignal};
use homenode_units::Ns;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

use crate::feed::Feed;
use crate::history::History;
use crate::reload::Reload;
use crate::service::Service;
use crate::setting_queue::SettingQueue;
use crate::trace::Tracer;
use crate::usage_file::UsageFile;

/// With simulated time, the longest simulated time between two checks for work.
const LOOK_EVERY: Ns = Ns::from_millis(100);

/// A message for the operator.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Notice<'a> {
    message: &'a str,
}

impl<'a> Notice<'a> {
    /// Creates a notice of one sentence.
    pub fn new(message: &'a str) -> Notice<'a> {
        Notice { message }
    }
}

/// The address to which programs and browsers can connect.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Listening {
    url: String,
}

/// The first document of a run. It has version, commit, host and every setting, so that the run can be repeated.
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

/// Where a run's output goes. On a real host no method may wait for a reader: the guard treats a stalled loop as hung.
pub trait Show {
    /// Prints a line for people.
    fn line(&mut self, text: &str);
    /// Emits an object for programs. `kind` is its name.
    fn object(&mut self, kind: &str, value: Value);
    /// Shows what the agent saw and did in a cycle.
    fn cycle(&mut self, cycle: &Cycle);
    /// Returns true if the reader is gone; the run then ends in good order.
    fn is_closed(&self) -> bool;
}

/// The loop over one host, and everything around it.
pub struct Agent<'a> {
    /// State of the loop, shared with the server.
    pub control: Arc<Mutex<Control>>,
    /// Settings that operators send through the server.
    pub settings: SettingQueue,
    /// Reloads of the agent's own settings.
    pub reload: Reload,
    /// The service manager, if one started the agent.
    pub service: Service,
    /// The file that keeps the usage of permits.
    pub usage: UsageFile,
    /// The history of the run.
    pub history: History,
    /// What the loop publishes to readers, if there is a server.
    pub feed: Option<Feed>,
    /// The trace, if one is written.
    pub trace: Option<Tracer>,
    /// Where output goes.
    pub output: &'a mut dyn Show,
    /// Commit of the build, shown first so that the run can be repeated.
    pub commit: &'static str,
    /// Wakes the loop if a setting waits or the agent must stop.
    pub wake_signal: WakeSignal,
    /// Host time after which the run stops.
    pub duration: Option<Ns>,
    /// Time between samples.
    pub period: Ns,
    /// How simulated time relates to wall-clock time.
    pub pace: Pace,
}

/// How time passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Real time; the wake signal can end the loop's wait early.
    Real,
    /// Simulated time, as fast as it can be computed.
    Fast,
    /// Simulated time: a simulated second takes a wall-clock second.
    Watched,
}

impl Agent<'_> {
    /// Runs cycles until the agent is stopped, its time is over, or `done` returns true. `notices` returns the host's messages to
    /// the operator.
    pub fn run<H: Host>(
        &mut self,
        host: &mut H,
        notices: impl FnMut(&mut H) -> Vec<String>,
        done: impl Fn(&H) -> bool,
    ) {
        let control = Arc::clone(&self.control);
        let mut shown = Shown {
            agent: self,
            notices,
            done,
            started: None,
            trouble: None,
            phases: Vec::new(),
        };
        let Ok(()) = homenode_control::run(host, &control, &mut shown);
        self.service.stops();
        let of_trace = self.trace.take().map(Tracer::finish);
        for notice in of_trace.into_iter().flatten() {
            self.notice(&notice);
        }
        if let Some(trouble) = self.usage.close(&self.control) {
            self.notice(&trouble);
        }
    }

    /// Reloads settings if a reload was requested.
    fn reload(&mut self) {
        if !self.reload.is_wanted() {
            return;
        }
        self.service.reloads();
        let said = self.reload.carry_out(&self.control);
        self.service.has_reloaded();
        self.period = self
            .control
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .config()
            .period;
        self.notice(&said);
    }

    /// Sends the operator a notice.
    pub fn notice(&mut self, text: &str) {
        self.output.line(text);
        self.output.object("notice", json!(Notice::new(text)));
    }

    /// Announces the address of the HTTP server, if there is one.
    pub fn announce_address(&mut self, url: Option<String>) {
        let Some(url) = url else { return };
        self.output.line(&format!("listening at {url}"));
        self.output.object("listening", json!(Listening { url }));
    }

    /// Prints the first line and the first document of the run. A run that recommends also says what that means, since its
    /// operator may not have chosen it; `settings` is the file whose mode it reads by default.
    pub fn announce(&mut self, host: String, seed: Option<u64>, mode: Mode, settings: Option<&Path>) {
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
        let how = match mode {
            Mode::Observe => ", dry run: nothing is touched",
            Mode::Recommend => ", mode recommend",
            Mode::Act => "",
        };
        self.output.line(&format!(
            "homenode {version} ({commit}) on {}{seed}, policies {}, every {}{how}",
            start.host,
            start.config.policies.name(),
            self.period
        ));
        drop(control);
        if mode == Mode::Recommend {
            self.notice(&what_recommend_means(settings));
        }
    }
}

/// Returns what mode `recommend` means, and how to let the agent act; `settings` is the file whose `mode` a run reads by default.
fn what_recommend_means(settings: Option<&Path>) -> String {
    let or_in_file = settings.map(|file| format!(", or `mode = \"act\"` in {},", file.display()));
    format!(
        "mode recommend: nothing is changed without approval; `homenode recommend` lists what waits, `homenode recommend apply ID` \
         approves it; `homenode run --mode act`{} lets the agent act",
        or_in_file.unwrap_or_default()
    )
}

/// A run with its output. If the host cannot be read, the run continues, and reports the error once.
struct Shown<'a, 'b, N, D> {
    agent: &'a mut Agent<'b>,
    notices: N,
    done: D,
    started: Option<Ns>,
    trouble: Option<HostError>,
    /// When each phase of this cycle began.
    phases: Vec<(Phase, Instant)>,
}

/// Returns the line for `systemctl status` that says what the agent does.
fn status_line(cycle: &Cycle) -> String {
    let status = &cycle.status;
    format!(
        "looks after {} VMs on {} nodes",
        status.vms.len(),
        status.nodes.len()
    )
}

impl<N, D> Shown<'_, '_, N, D> {
    /// Returns how long each phase of the cycle that just ended took.
    fn took(&mut self) -> Vec<(Phase, Duration)> {
        let mut end = Instant::now();
        let begun = self.phases.drain(..).rev();
        let took = begun.map(|(phase, at)| {
            (
                phase,
                std::mem::replace(&mut end, at).saturating_duration_since(at),
            )
        });
        took.collect()
    }
}

impl<H: Host, N: FnMut(&mut H) -> Vec<String>, D: Fn(&H) -> bool> Around<H> for Shown<'_, '_, N, D> {
    type Error = Infallible;

    fn before(&mut self, _: &mut H) -> Result<ControlFlow<()>, Infallible> {
        let over = self.agent.wake_signal.is_stopping() || self.agent.output.is_closed();
        Ok(if over {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        })
    }

    fn begins(&mut self, phase: Phase) {
        self.phases.push((phase, Instant::now()));
    }

    fn after(
        &mut self,
        host: &mut H,
        cycle: Result<Cycle, HostError>,
    ) -> Result<ControlFlow<()>, Infallible> {
        let took = self.took();
        self.agent.service.feed();
        if let (Some(feed), Err(error)) = (&self.agent.feed, &cycle) {
            feed.trouble(&error.to_string());
        }
        match cycle {
            // The error was reported when it first occurred, and is not repeated every period.
            Err(error) if self.trouble.as_ref() == Some(&error) => {}
            Err(error) => {
                let message = error.to_string();
                self.agent.service.says(&message);
                self.agent.output.line(&message);
                self.agent.output.object("trouble", json!(Notice::new(&message)));
                self.trouble = Some(error);
            }
            Ok(cycle) => {
                if self.trouble.take().is_some() {
                    self.agent.output.line("the host answers again");
                }
                self.agent.service.goes_well(&status_line(&cycle));
                if let Some(feed) = &self.agent.feed {
                    feed.publish(&cycle, &self.agent.control, &took);
                }
                self.agent.output.cycle(&cycle);
                if let Some(trace) = &mut self.agent.trace {
                    trace.keep(&cycle, &self.agent.control);
                }
                let at = cycle.status.at_ns;
                self.agent.history.keep(cycle, &self.agent.control);
                if let Some(trouble) = self.agent.usage.settle(at, &self.agent.control) {
                    self.agent.notice(&trouble);
                }
                let since = at.saturating_sub(*self.started.get_or_insert(at));
                if self.agent.duration.is_some_and(|duration| since >= duration) || (self.done)(host) {
                    return Ok(ControlFlow::Break(()));
                }
            }
        }
        let written = self.agent.history.take_written();
        if let Some(feed) = &self.agent.feed {
            feed.recorded(written);
        }
        let of_history = self.agent.history.take_notices();
        let of_feed = self.agent.feed.as_ref().map(Feed::take_notices);
        let of_feed = of_feed.into_iter().flatten();
        let of_trace = self.agent.trace.as_ref().map(Tracer::take_notices);
        let of_trace = of_trace.into_iter().flatten();
        let of_others = of_history.into_iter().chain(of_feed).chain(of_trace);
        for notice in (self.notices)(host).into_iter().chain(of_others) {
            self.agent.notice(&notice);
        }
        Ok(ControlFlow::Continue(()))
    }

    fn wait(&mut self, host: &mut H) {
        let mut left = self.agent.period;
        while left > Ns::ZERO && !self.agent.wake_signal.is_stopping() {
            self.agent.service.feed();
            self.agent.reload();
            let agent = &*self.agent;
            agent
                .settings
                .carry_out(host, &agent.control, agent.feed.as_ref());
            let part = match agent.pace {
                Pace::Real => left,
                Pace::Fast | Pace::Watched => left.min(LOOK_EVERY),
            };
            let waited = host.wait(part);
            if agent.pace == Pace::Watched {
                agent.wake_signal.wait(Duration::from_nanos(part.0));
            }
            left = left.saturating_sub(waited);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_recommends_says_how_to_see_approve_and_let_act() {
        let said = what_recommend_means(Some(Path::new("/etc/homenode/homenode.toml")));
        for part in [
            "mode recommend: nothing is changed",
            "`homenode recommend` lists",
            "`homenode recommend apply ID`",
            "`homenode run --mode act`, or `mode = \"act\"` in /etc/homenode/homenode.toml, lets",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
        assert!(what_recommend_means(None).ends_with("`homenode run --mode act` lets the agent act"));
    }
}
