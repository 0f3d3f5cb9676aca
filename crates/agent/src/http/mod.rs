//! HTTP interface for dashboards, schedulers and scripts: metrics at `/metrics`, JSON below `/v1`, and a page for people at
//! `/`.
//!
//! ```text
//!   loop ── publishes each cycle ──▶ Feed ◀── looks ── routes, metrics, events ◀── TCP (loopback), http.sock (peer credentials)
//!                                 Archive ◀── asks ── past, on threads that may wait for the disk
//! ```
//!
//! One thread runs the whole interface on its own asynchronous runtime; the loop only publishes, and does not know the clients.
//! The loop's own state is read only for `placements/evaluate`, `overview`, settings, maintenance, recommendations and
//! reservations, on a thread that may wait for it.

mod access;
mod approvals;
mod events;
mod exposition;
mod maintenance;
mod metrics;
mod origin;
mod page;
mod passwords;
mod past;
mod problem;
mod serve;
mod settings;
mod web;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::rejection::{JsonRejection, PathRejection};
use axum::extract::{DefaultBodyLimit, Path as InPath, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use homenode_api::Request as Ask;
use homenode_api::answer::{Placed, Vms};
use homenode_api::http::{Evaluate, Evaluated, HostStatus, Links, Nodes, WallTime, openapi};
use homenode_api::named;
use homenode_control::{Config, Mode, VmStatus};
use homenode_units::Ns;
use tokio::sync::Semaphore;

use crate::feed::{Feed, Seen};
use crate::handler::{Answered, Handler};
use crate::reload::Reload;
use access::Access;
use exposition::Format;
use problem::Failed;

pub use access::Came;
pub use serve::{Answers, HttpServer, check};

/// Most bytes of a request's body.
const BODY_MAX: usize = 64 << 10;
/// How long an answer may take to begin.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a request may wait for a blocking thread.
const PATIENCE_THREAD: Duration = Duration::from_secs(5);
/// Number of blocking threads.
const THREADS: usize = 2;
/// The loop is unhealthy if it last tried to sample the host longer ago than this, and than three periods.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Describes the run that answers requests.
#[derive(Clone, Debug)]
pub struct About {
    /// The program's version.
    pub version: &'static str,
    /// Commit of the build.
    pub commit: &'static str,
    /// The host that the agent runs on.
    pub host: String,
    /// Whether plans are carried out.
    pub mode: Mode,
    /// The active policies.
    pub policies: &'static str,
    /// Time between samples at the start of the run.
    pub period: Ns,
}

impl About {
    /// Describes a run of this program on `host` with these settings.
    pub fn new(host: String, config: &Config, mode: Mode, commit: &'static str) -> About {
        About {
            version: env!("CARGO_PKG_VERSION"),
            commit,
            host,
            mode,
            policies: config.policies.name(),
            period: config.period,
        }
    }

    /// Returns the period now in force, which a reload may have changed since the start.
    fn period_now(&self, seen: Option<&Seen>) -> Ns {
        seen.map_or(self.period, |seen| seen.period)
    }
}

/// Everything from which answers are made.
#[derive(Clone, Debug)]
pub struct Site {
    /// What the loop publishes.
    pub feed: Feed,
    /// Describes the run that answers requests.
    pub about: Arc<About>,
    /// Path of the history, if one is kept.
    pub history: Option<Arc<Path>>,
    /// Answers from the loop's own state, and queues settings for the loop.
    pub handler: Handler,
    /// Reloads of the agent's own settings.
    pub reload: Reload,
    threads: Arc<Semaphore>,
}

impl Site {
    /// Collects everything from which answers are made.
    pub fn new(
        feed: Feed,
        about: About,
        history: Option<&Path>,
        (handler, reload): (Handler, Reload),
    ) -> Site {
        Site {
            feed,
            about: Arc::new(about),
            history: history.map(Arc::from),
            handler,
            reload,
            threads: Arc::new(Semaphore::new(THREADS)),
        }
    }

    /// Returns an id of this run, for event ids.
    fn run(&self) -> String {
        format!("{:x}", self.feed.clock().begun_ns())
    }

    fn seen(&self) -> Result<Arc<Seen>, Failed> {
        let (seen, _) = self.feed.seen();
        seen.ok_or_else(|| Failed::not_now("the agent has not looked at the host yet"))
    }

    /// Runs `work` on a blocking thread.
    async fn on_a_thread<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Failed> {
        let threads = Arc::clone(&self.threads);
        let turn = tokio::time::timeout(PATIENCE_THREAD, threads.acquire_owned()).await;
        let Ok(Ok(turn)) = turn else {
            return Err(Failed::not_now(
                "too many requests at once: try again in a moment",
            ));
        };
        let done = tokio::task::spawn_blocking(move || {
            let done = work();
            drop(turn);
            done
        });
        done.await.map_err(|_| Failed::gone())
    }
}

/// Builds all routes; `access` decides who is let in.
fn router(site: Site, access: &Arc<Access>) -> Router {
    Router::new()
        .merge(approvals::reads())
        .merge(maintenance::reads())
        .route("/metrics", get(metrics))
        .route("/-/healthy", get(healthy))
        .route("/-/ready", get(ready))
        .route("/v1/status", get(status))
        .route("/v1/vms", get(vms))
        .route("/v1/vms/{id}", get(vm))
        .route("/v1/vms/{id}/why", get(past::why))
        .route("/v1/overview", get(past::overview))
        .route("/v1/vms/{id}/settings", get(settings::get))
        .route("/v1/nodes", get(nodes))
        .route("/v1/links", get(links))
        .route("/v1/decisions", get(past::decisions))
        .route("/v1/decisions/{id}", get(past::decision))
        .route("/v1/history", get(past::history))
        .route("/v1/events", get(events::events))
        .route("/v1/placements/evaluate", post(evaluate))
        .route("/v1/openapi.json", get(async || Json(openapi())))
        .merge(page::routes())
        .merge(changes())
        .fallback(async || Failed::no_such_path())
        .method_not_allowed_fallback(async || Failed::wrong_method())
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .layer(from_fn(in_time))
        .layer(from_fn_with_state(Arc::clone(access), access::known))
        .with_state(site)
}

/// Builds the routes that change something, for operators only.
fn changes() -> Router<Site> {
    Router::new()
        .route("/-/reload", post(settings::reload))
        .route("/v1/vms/{id}/settings", put(settings::put))
        .merge(approvals::changes())
        .merge(maintenance::changes())
        .route_layer(from_fn(access::operators_only))
}

async fn in_time(request: Request, next: Next) -> Response {
    let answered = tokio::time::timeout(PATIENCE, next.run(request)).await;
    answered.unwrap_or_else(|_| Failed::not_now("the request took too long").into_response())
}

async fn metrics(State(site): State<Site>, headers: HeaderMap) -> impl IntoResponse {
    let accept = headers.get_all(header::ACCEPT).iter();
    let accept: Vec<&str> = accept.filter_map(|value| value.to_str().ok()).collect();
    let format = Format::wanted(&accept.join(","));
    let text = metrics::exposition(&site.about, &site.feed, format);
    ([(header::CONTENT_TYPE, format.content_type())], text)
}

/// Reports liveness: whether the loop still takes samples.
async fn healthy(State(site): State<Site>) -> (StatusCode, String) {
    let (seen, _) = site.feed.seen();
    let period = Duration::from_nanos(site.about.period_now(seen.as_deref()).0);
    let silence = Instant::now().saturating_duration_since(site.feed.looked());
    if silence <= SILENCE_MAX.max(3 * period) {
        (StatusCode::OK, "healthy\n".into())
    } else {
        let said = format!(
            "the loop has not looked at the host for {} s\n",
            silence.as_secs()
        );
        (StatusCode::SERVICE_UNAVAILABLE, said)
    }
}

/// Reports readiness: whether the host can be read.
async fn ready(State(site): State<Site>) -> (StatusCode, String) {
    match site.feed.seen() {
        (Some(_), None) => (StatusCode::OK, "ready\n".into()),
        (_, Some(trouble)) => (StatusCode::SERVICE_UNAVAILABLE, format!("{trouble}\n")),
        (None, None) => {
            let said = "the agent has not looked at the host yet\n".into();
            (StatusCode::SERVICE_UNAVAILABLE, said)
        }
    }
}

async fn status(State(site): State<Site>) -> Result<Json<HostStatus>, Failed> {
    let seen = site.seen()?;
    let (_, trouble) = site.feed.seen();
    let about = &site.about;
    Ok(Json(HostStatus {
        time: WallTime(seen.wall_ns),
        started: WallTime(site.feed.clock().begun_ns()),
        version: about.version.to_owned(),
        commit: about.commit.to_owned(),
        host: about.host.clone(),
        mode: about.mode,
        policies: about.policies.to_owned(),
        period_ns: seen.period,
        cycle_count: seen.cycle_count,
        trouble: trouble.map(|trouble| trouble.to_string()),
        status: seen.status.clone(),
    }))
}

async fn vms(State(site): State<Site>) -> Result<Json<Vms>, Failed> {
    let vms = site.seen()?.status.vms.clone();
    Ok(Json(Vms { vms }))
}

async fn vm(
    State(site): State<Site>,
    id: Result<InPath<String>, PathRejection>,
) -> Result<Json<VmStatus>, Failed> {
    let InPath(id) = id?;
    let seen = site.seen()?;
    Ok(Json(named(&seen.status.vms, &id)?.clone()))
}

async fn nodes(State(site): State<Site>) -> Result<Json<Nodes>, Failed> {
    let nodes = site.seen()?.status.nodes.clone();
    Ok(Json(Nodes { nodes }))
}

async fn links(State(site): State<Site>) -> Result<Json<Links>, Failed> {
    let links = site.seen()?.status.links.clone();
    Ok(Json(Links { links }))
}

async fn evaluate(
    State(site): State<Site>,
    body: Result<Json<Evaluate>, JsonRejection>,
) -> Result<Json<Evaluated>, Failed> {
    let Json(wanted) = body?;
    let handler = site.handler.clone();
    let question = Ask::Place {
        vcpus: wanted.vcpus,
        memory_bytes: wanted.memory_bytes,
        bandwidth_bytes_per_s: wanted.bandwidth_bytes_per_s,
        huge_page_bytes: wanted.huge_page_bytes,
    };
    let answered = site.on_a_thread(move || handler.answer(question)).await??;
    match answered {
        Answered::Now(answer) => {
            let placed = Placed::try_from(answer).map_err(|_| Failed::gone())?;
            Ok(Json(Evaluated::of(placed)))
        }
        Answered::Once(..) => Err(Failed::gone()),
    }
}
