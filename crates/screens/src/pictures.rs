//! Pictures of hosts. Each host's are asked for in a thread, so that a slow agent delays neither keys nor other hosts.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use homenode_api::answer::Overview;

/// The state of a host at one time.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    /// Time of the picture, in nanoseconds since 1970.
    pub wall_ns: i64,
    /// The state of the host, and the events up to that time.
    pub overview: Overview,
}

/// A picture, or the reason why there is none.
pub type Asked = Result<Picture, String>;

/// A host, with the last answer of its agent.
#[derive(Clone, Debug)]
pub struct Host {
    /// The host's name.
    pub name: String,
    /// The last picture that arrived.
    pub picture: Option<Picture>,
    /// Why the agent does not answer now; `None` if it does.
    pub trouble: Option<String>,
}

impl Host {
    /// Creates a host that has not been asked yet.
    pub fn new(name: &str) -> Host {
        Host {
            name: name.to_owned(),
            picture: None,
            trouble: None,
        }
    }

    /// Records an answer. If it has no picture, the last picture stays.
    pub fn heard(&mut self, answer: Asked) {
        match answer {
            Ok(picture) => (self.picture, self.trouble) = (Some(picture), None),
            Err(trouble) => self.trouble = Some(trouble),
        }
    }
}

/// Agents that are asked repeatedly until this value is dropped.
pub(crate) struct Live {
    answers: Receiver<(usize, Asked)>,
    /// Dropping these ends the threads.
    _stops: Vec<Sender<()>>,
}

impl Live {
    /// Starts a thread for each agent, which asks it at this interval.
    ///
    /// # Errors
    /// If a thread cannot start.
    pub(crate) fn start(
        askers: impl IntoIterator<Item = impl Fn() -> Asked + Send + 'static>,
        every: Duration,
    ) -> anyhow::Result<Live> {
        let (answer, answers) = mpsc::channel();
        let mut stops = Vec::new();
        for (number, ask) in askers.into_iter().enumerate() {
            let (stop, is_stopped) = mpsc::channel::<()>();
            stops.push(stop);
            let answer = answer.clone();
            let asking = move || {
                loop {
                    let begun = Instant::now();
                    if answer.send((number, ask())).is_err() {
                        break;
                    }
                    let left = every.saturating_sub(begun.elapsed());
                    if is_stopped.recv_timeout(left) != Err(RecvTimeoutError::Timeout) {
                        break;
                    }
                }
            };
            std::thread::Builder::new()
                .name("asker".into())
                .spawn(asking)
                .context("cannot start the thread that asks an agent")?;
        }
        Ok(Live {
            answers,
            _stops: stops,
        })
    }

    /// Returns the answers that arrived since the last call, each with its agent's number.
    pub(crate) fn new_answers(&self) -> impl Iterator<Item = (usize, Asked)> + '_ {
        self.answers.try_iter()
    }
}
