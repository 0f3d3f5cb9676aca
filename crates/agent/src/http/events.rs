//! The event stream. Each listener reads the feed's ring at its own pace and has no queue of its own. If the ring overtakes a
//! slow listener, the listener is told how many events it missed.

use std::convert::Infallible;
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::IntoResponse;
use axum::response::sse::{Event as Sse, KeepAlive};
use futures_util::stream;
use homenode_api::http::{Looked, Missed, Told, WallTime};
use serde_json::json;
use tokio::sync::watch;

use super::Site;
use super::problem::Failed;
use crate::feed::Message;

/// Interval of keep-alives on a silent stream, by which each end notices that the other is gone.
const ALIVE: Duration = Duration::from_secs(15);

/// A stream's position.
struct Listening {
    site: Site,
    news: watch::Receiver<u64>,
    /// Sequence number of the next message.
    next: u64,
    /// Whether the listener last saw an event of another run, or one that this run does not know.
    is_of_another_run: bool,
}

pub(super) async fn events(
    State(site): State<Site>,
    headers: HeaderMap,
) -> Result<impl IntoResponse, Failed> {
    let last = match headers.get("last-event-id").map(|id| id.to_str()) {
        None => None,
        Some(Ok(id)) => Some(id),
        Some(Err(_)) => return Err(Failed::bad_parameter("the header Last-Event-ID is not text")),
    };
    let news = site.feed.news();
    let (next, is_of_another_run) = match last.filter(|id| !id.is_empty()) {
        None => (site.feed.next(), false),
        Some(id) => match number_of(&site, id) {
            Some(last) => (last + 1, false),
            None => (0, true),
        },
    };
    let listening = Listening {
        site,
        news,
        next,
        is_of_another_run,
    };
    let stream = stream::unfold(listening, |mut at| async {
        let event = at.next().await?;
        Some((Ok::<Sse, Infallible>(event), at))
    });
    let sse = axum::response::Sse::new(stream);
    Ok(sse.keep_alive(KeepAlive::new().interval(ALIVE)))
}

/// Returns the sequence number in an event id, if this run has sent that event.
fn number_of(site: &Site, id: &str) -> Option<u64> {
    let (run, number) = id.split_once('-')?;
    let number = number.parse().ok()?;
    (run == site.run() && number < site.feed.next()).then_some(number)
}

impl Listening {
    /// Returns the next event, or `None` when the agent ends.
    async fn next(&mut self) -> Option<Sse> {
        loop {
            if std::mem::take(&mut self.is_of_another_run) {
                return Some(missed(None));
            }
            match self.site.feed.from(self.next) {
                Some(message) if message.number > self.next => {
                    let count = message.number - self.next;
                    self.next = message.number;
                    return Some(missed(Some(count)));
                }
                Some(message) => {
                    self.next = message.number + 1;
                    return Some(told(&message, &self.site.run()));
                }
                None => self.news.changed().await.ok()?,
            }
        }
    }
}

fn missed(missed_count: Option<u64>) -> Sse {
    let data = json!(Missed { missed_count });
    Sse::default().event("gap").data(data.to_string())
}

fn told(message: &Message, run: &str) -> Sse {
    let (wall_ns, at_ns) = message.seen_ns;
    let time = WallTime(wall_ns);
    let (kind, data) = match &message.event {
        None => {
            let cycle_count = message.cycle_count;
            let looked = Looked {
                time,
                at_ns,
                cycle_count,
            };
            ("cycle".to_owned(), json!(looked))
        }
        Some(event) => {
            let record = event.record(at_ns);
            let told = Told {
                time,
                at_ns,
                vm: record.vm,
                text: record.text,
                detail: json!(event),
            };
            (record.kind, json!(told))
        }
    };
    let id = format!("{run}-{}", message.number);
    Sse::default().id(id).event(kind).data(data.to_string())
}
