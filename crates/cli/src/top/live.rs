//! Pictures of the present: a separate thread asks the running agent, so that a slow agent does not delay keys.

use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use anyhow::Context as _;
use homenode_agent::wall_clock::now_ns;
use homenode_api::answer::Overview;
use homenode_api::{ApiError, AskError, Request};

use crate::ask::ask_agent;
use crate::top::view::Picture;

/// How often to ask an agent that has just started, before that is an error.
const TRIES: u32 = 50;
const BETWEEN_TRIES: Duration = Duration::from_millis(100);

/// Asks once.
///
/// # Errors
/// No agent, or the error that it returned.
pub fn ask_once(state: &Path) -> anyhow::Result<Picture> {
    let overview: Overview = ask_agent(state, &Request::Overview)?;
    Ok(Picture {
        wall_ns: now_ns(),
        overview,
    })
}

/// Asks, and repeats while the agent has not sampled its host yet.
///
/// # Errors
/// As [`ask_once`].
pub fn ask_patiently(state: &Path) -> anyhow::Result<Picture> {
    for _ in 0..TRIES {
        match ask_once(state) {
            Err(error) if is_not_yet(&error) => std::thread::sleep(BETWEEN_TRIES),
            asked => return asked,
        }
    }
    ask_once(state)
}

fn is_not_yet(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref(),
        Some(AskError::Agent(ApiError::NotYet { .. }))
    )
}

/// An agent that is asked repeatedly, until this is dropped.
pub struct Live {
    answers: Receiver<Result<Picture, String>>,
    /// Dropping it ends the thread.
    _stop: Sender<()>,
}

impl Live {
    /// Starts asking at this interval.
    ///
    /// # Errors
    /// If the thread cannot start.
    pub fn start(state: &Path, every: Duration) -> anyhow::Result<Live> {
        let state = state.to_owned();
        let (answer, answers) = mpsc::channel();
        let (stop, is_stopped) = mpsc::channel::<()>();
        let named = std::thread::Builder::new().name("asker".into());
        let asking = move || {
            loop {
                let asked = ask_once(&state).map_err(|error| format!("{error:#}"));
                let is_over = answer.send(asked).is_err();
                if is_over || is_stopped.recv_timeout(every) != Err(RecvTimeoutError::Timeout) {
                    break;
                }
            }
        };
        named
            .spawn(asking)
            .context("cannot start the thread that asks the agent")?;
        Ok(Live { answers, _stop: stop })
    }

    /// The newest answer since the last call, if there is one.
    pub fn newest(&self) -> Option<Result<Picture, String>> {
        self.answers.try_iter().last()
    }
}
