//! The agent's HTTP server, for a simulated host that was sampled a few times: it has two VMs, open recommendations, a
//! reservation and a history.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Request, StatusCode, header};
use axum::response::Response;
use futures_util::{FutureExt as _, StreamExt as _};
use homenode_agent::Handler;
use homenode_agent::feed::Feed;
use homenode_agent::history::History;
use homenode_agent::http::{About, Answers, Came, Site};
use homenode_agent::reload::Reload;
use homenode_agent::run::{Agent, Pace, Show};
use homenode_agent::service::Service;
use homenode_agent::setting_queue::SettingQueue;
use homenode_agent::usage_file::{Clock, UsageFile};
use homenode_agent::wall_clock::WallClock;
use homenode_control::{Config, Control, Cycle, Mode, PolicySet};
use homenode_host::{Host as _, WakeSignal};
use homenode_machine_files::preset;
use homenode_policy::placement::Shape;
use homenode_twin::{Scenario, Twin, VmSpec};
use homenode_units::{Bytes as Size, Ns};
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};

use crate::Tree;

/// The address that the agent is told it listens on.
const ADDRESS: &str = "127.0.0.1:9464";
/// Length of the simulation before the first request.
const LOOKED: Ns = Ns::from_secs(4);
/// Maximum size of an answer. The longest are the page and the description of the interface.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Maximum number of events that are read from a stream.
const EVENTS_MAX: usize = 64;
/// How long to wait for an answer before carrying out the settings that wait for the control loop.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// The server, and the simulated host that it describes.
pub struct Served {
    twin: Twin,
    control: Arc<Mutex<Control>>,
    settings: SettingQueue,
    feed: Feed,
    answers: Answers,
    runtime: Runtime,
    tree: Tree,
}

/// The part of an answer that was read.
#[derive(Debug)]
pub struct Answered {
    /// The status.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body; for a stream, only the events that were available at once.
    pub body: Vec<u8>,
}

/// An output that discards everything.
struct Dark;

impl Show for Dark {
    fn line(&mut self, _: &str) {}
    fn object(&mut self, _: &str, _: Value) {}
    fn cycle(&mut self, _: &Cycle) {}
    fn is_closed(&self) -> bool {
        false
    }
}

impl Served {
    /// Creates a server with a `web.yml`, or with a key if there is none, and with this history, or the simulated host's own.
    ///
    /// # Errors
    /// The agent's reason to refuse the `web.yml`.
    ///
    /// # Panics
    /// If the host cannot be simulated.
    pub fn new(web_yml: Option<&str>, history: Option<&Path>) -> anyhow::Result<Served> {
        let tree = Tree::new();
        let mut config = Config {
            policies: PolicySet::Tavo,
            ..Config::default()
        };
        if let Some(text) = web_yml {
            tree.write("web.yml", text.as_bytes());
            config.http.web_config = tree.root().join("web.yml").display().to_string();
        }
        let machine = preset("r420").expect("a preset");
        let vms = ["web", "db"].map(|name| VmSpec::new(name, 2, Size::from_gib(2), "povray"));
        let mut twin =
            Twin::new(machine, &Scenario::of("fuzz", vms.to_vec()), 1).expect("a possible scenario");
        let control = Arc::new(Mutex::new(Control::new(config.clone(), Mode::Recommend)));
        let wake_signal = WakeSignal::default();
        let (settings, clock) = (SettingQueue::new(&wake_signal), WallClock::start(Clock::Host));
        let reload = Reload::never(&wake_signal);
        let feed = Feed::new(clock);
        let path = tree.root().join("history.sqlite");
        let kept = History::begin(
            &path,
            (&config, Mode::Recommend),
            clock,
            ("a twin".to_owned(), twin.machine()),
            "fuzz",
        );
        Agent {
            control: Arc::clone(&control),
            settings: settings.clone(),
            reload: reload.clone(),
            service: Service::of_environment(),
            usage: UsageFile::open(None, Clock::Host).0,
            history: kept,
            feed: Some(feed.clone()),
            trace: None,
            output: &mut Dark,
            commit: "fuzz",
            wake_signal,
            duration: Some(LOOKED),
            period: config.period,
            pace: Pace::Fast,
        }
        .run(&mut twin, |_| Vec::new(), |_| false);
        let shape = Shape::new(1, Size::from_gib(1));
        let _ = lock(&control).reserve(twin.machine(), shape);
        let handler = Handler {
            machine: Arc::new(twin.machine().clone()),
            control: Arc::clone(&control),
            clock,
            settings: settings.clone(),
            drains: homenode_agent::drain_file::DrainFile::default(),
        };
        let about = About::new("a twin".to_owned(), &config, Mode::Recommend, "fuzz");
        let site = Site::new(
            feed.clone(),
            about,
            Some(history.unwrap_or(&path)),
            (handler, reload),
        );
        let bound = ADDRESS.parse().expect("an address");
        let answers = Answers::new(Some(bound), Some(tree.root()), &config.http, site)?;
        let runtime = Builder::new_current_thread()
            .enable_time()
            .max_blocking_threads(1)
            .build()?;
        Ok(Served {
            twin,
            control,
            settings,
            feed,
            answers,
            runtime,
            tree,
        })
    }

    /// Returns the key that makes a client an operator; it is empty if users have passwords.
    pub fn key(&self) -> String {
        self.tree.text("http.key").trim().to_owned()
    }

    /// Returns everything that a request can change.
    pub fn state(&self) -> impl PartialEq + std::fmt::Debug + use<> {
        let control = lock(&self.control);
        let vms = control
            .sample()
            .map(|sample| sample.vms.iter().map(|vm| vm.id).collect::<Vec<_>>());
        let settings = vms.into_iter().flatten().map(|vm| control.settings(vm));
        let reservations = control.reservations().into_iter().cloned().collect::<Vec<_>>();
        let recommendations = control.recommendations().into_iter().cloned().collect::<Vec<_>>();
        (settings.collect::<Vec<_>>(), reservations, recommendations)
    }

    /// Answers a request, and meanwhile carries out settings in place of the control loop.
    ///
    /// # Panics
    /// If the answer is longer than `ANSWER_BYTES_MAX`.
    pub fn answer(&mut self, came: Came, request: Request<Body>) -> Answered {
        let Served {
            twin,
            control,
            settings,
            feed,
            answers,
            runtime,
            ..
        } = self;
        runtime.block_on(async {
            let mut answer = Box::pin(answers.answer(came, request));
            let answer = loop {
                match tokio::time::timeout(LOOK_EVERY, &mut answer).await {
                    Ok(Ok(answer)) => break answer,
                    Err(_) => settings.carry_out(twin, control, Some(feed)),
                }
            };
            read(answer).await
        })
    }
}

async fn read(answer: Response) -> Answered {
    let (head, body) = answer.into_parts();
    let kind = head.headers.get(header::CONTENT_TYPE);
    let is_stream = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
    let mut parts = body.into_data_stream();
    let mut body = Vec::new();
    let mut add = |part: Bytes| {
        body.extend(part);
        assert!(body.len() <= ANSWER_BYTES_MAX, "an answer is too long");
    };
    if is_stream {
        for _ in 0..EVENTS_MAX {
            // Further events would come with the next cycle, but no cycle runs here.
            let Some(Some(part)) = parts.next().now_or_never() else {
                break;
            };
            add(part.expect("events are made without fail"));
        }
    } else {
        while let Some(part) = parts.next().await {
            add(part.expect("answers are made whole"));
        }
    }
    Answered {
        status: head.status,
        headers: head.headers,
        body,
    }
}

impl Answered {
    /// Checks what must be true of any answer.
    ///
    /// # Panics
    /// If a check fails.
    pub fn is_one(&self, has_body: bool, is_for_probes: bool) {
        let Answered {
            status,
            headers,
            body,
        } = self;
        let kind = headers
            .get(header::CONTENT_TYPE)
            .map(header::HeaderValue::as_bytes);
        if has_body && kind == Some(b"application/json") {
            assert!(serde_json::from_slice::<Value>(body).is_ok(), "{status}: no JSON");
        }
        if status.is_success() || is_for_probes && *status == StatusCode::SERVICE_UNAVAILABLE {
            return;
        }
        assert!(
            status.is_client_error() || *status == StatusCode::SERVICE_UNAVAILABLE,
            "{status}: {}",
            String::from_utf8_lossy(body)
        );
        assert_eq!(kind, Some(&b"application/problem+json"[..]), "{status}");
        if has_body {
            let problem: Value = serde_json::from_slice(body).expect("a problem is JSON");
            assert_eq!(problem["status"], status.as_u16());
            assert!(
                ["type", "title", "detail"]
                    .iter()
                    .all(|key| problem[key].is_string()),
                "{problem}"
            );
        }
    }
}

fn lock(control: &Mutex<Control>) -> MutexGuard<'_, Control> {
    control.lock().unwrap_or_else(PoisonError::into_inner)
}
