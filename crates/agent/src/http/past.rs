//! Routes that read the history. At most a few blocking threads do so at a time.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use homenode_api::Request as Ask;
use homenode_api::answer::Overview;
use homenode_api::http::{
    DECISIONS, DecisionRow, Decisions, DecisionsQuery, HISTORY_MAX, HistoryPoint, HistoryQuery, NodeMemory,
    OverviewQuery, POINTS_MAX, Pictured, VmHistory, WallTime, WhyQuery,
};
use homenode_api::why::{Answer, WINDOW, WallSpan};
use homenode_api::{ApiError, EventRecord, meant, named};
use homenode_recorder::{Archive, EventRow, Kind, Pick, RecordError, Wanted};
use homenode_units::{Bytes, BytesPerSec, Ns, PAGE_BYTES, VmId};
use serde_json::Value;

use super::Site;
use super::problem::Failed;
use crate::handler::Answered;
use crate::past::Place;
use crate::why::AskError;

/// Number of points in an answer if the query has no step.
const POINTS: u64 = 300;
const HOUR_NS: i64 = 3_600_000_000_000;
/// How long one request may read the history, since others wait.
const READING_MAX: Duration = Duration::from_secs(5);
/// How long a recorded period counts as the host's state if no later period was recorded.
const GAP_MAX_NS: i64 = 15 * 60 * 1_000_000_000;
/// The shortest default step.
const STEP_SHORTEST: Ns = Ns::from_secs(1);

/// Opens the history, and runs `question` on it.
///
/// # Errors
/// If there is no history, the history cannot be read, or too many clients read it.
pub(super) async fn ask<T: Send + 'static>(
    site: Site,
    question: impl FnOnce(&Archive) -> Result<T, Failed> + Send + 'static,
) -> Result<T, Failed> {
    let path = site.history.clone().ok_or_else(Failed::no_history)?;
    let answer = site.on_a_thread(move || question(&Archive::open(&path)?));
    answer.await?
}

/// Returns the host as it is now, or as it was at a time.
pub(super) async fn overview(
    State(site): State<Site>,
    query: Result<Query<OverviewQuery>, QueryRejection>,
) -> Result<Json<Pictured>, Failed> {
    let Query(query) = query?;
    if let Some(at) = query.at {
        return ask(site, move |archive| pictured(archive, at)).await.map(Json);
    }
    let (handler, history) = (site.handler.clone(), site.history.clone());
    let answered = site.on_a_thread(move || {
        let recorded = history.and_then(|path| recorded(&Archive::open(&path).ok()?).ok()?);
        Ok::<_, Failed>((handler.answer(Ask::Overview)?, recorded))
    });
    let (Answered::Now(answer), recorded) = answered.await?? else {
        return Err(Failed::gone());
    };
    let overview = Overview::try_from(answer).map_err(|_| Failed::gone())?;
    Ok(Json(Pictured {
        time: WallTime(site.feed.clock().at(overview.status.at_ns)),
        recorded,
        overview,
    }))
}

/// Returns the times of the first and the last recorded period.
fn recorded(archive: &Archive) -> Result<Option<WallSpan>, RecordError> {
    let span = archive.span(Kind::Status)?;
    Ok(span.map(|(first, last)| WallSpan {
        from: WallTime(first),
        to: WallTime(last),
    }))
}

/// Returns the last period at or before `at`. It may be at most [`GAP_MAX_NS`] older, and `at` must be within the history.
fn pictured(archive: &Archive, at: WallTime) -> Result<Pictured, Failed> {
    let span = recorded(archive)?;
    let span = span.ok_or_else(|| Failed::nothing_known("nothing is recorded yet"))?;
    let not_there = |said: String| Failed::nothing_known(format!("nothing is recorded at {at}: {said}"));
    // Printed times are rounded down to milliseconds. Adding the most that rounding removes finds the period that was printed.
    let wall_ns = at.0.saturating_add(999_999);
    if wall_ns < span.from.0 || at > span.to {
        return Err(not_there(format!(
            "the history covers {} to {}",
            span.from, span.to
        )));
    }
    let place = Place::at(archive, wall_ns.min(span.to.0))?;
    let place = place.ok_or_else(|| not_there("the history cannot be read".to_owned()))?;
    let time = WallTime(place.wall_ns());
    if at.0.saturating_sub(time.0) > GAP_MAX_NS {
        return Err(not_there(format!(
            "the last recorded period before it is that of {time}"
        )));
    }
    let overview = place.overview().map_err(|error| {
        let detail = format!("the period of {time} was recorded by another version: {error}");
        Failed::nothing_known(detail)
    })?;
    Ok(Pictured {
        time,
        recorded: Some(span),
        overview,
    })
}

pub(super) async fn decisions(
    State(site): State<Site>,
    query: Result<Query<DecisionsQuery>, QueryRejection>,
) -> Result<Json<Decisions>, Failed> {
    let Query(query) = query?;
    let limit = query.limit.unwrap_or(DECISIONS.0);
    if !(1..=DECISIONS.1).contains(&limit) {
        return Err(Failed::bad_parameter(format!(
            "limit must be 1 to {}",
            DECISIONS.1
        )));
    }
    let before_id = query.cursor.as_deref().map(str::parse::<i64>).transpose();
    let before_id = before_id
        .map_err(|_| Failed::bad_parameter("cursor must be the value of `next` of an earlier page"))?;
    let wanted = Wanted {
        from_ns: query.from.map(|time| time.0),
        to_ns: query.to.map(|time| time.0),
        vm: query.vm,
        policy: query.policy,
        kind: Some(EventRecord::DECIDED.into()),
        id: None,
        before_id,
        // One extra row shows whether there are more.
        limit: Some(limit + 1),
    };
    let mut rows = ask(site, move |archive| Ok(archive.events(&wanted)?)).await?;
    rows.reverse();
    let has_more = rows.len() > limit as usize;
    rows.truncate(limit as usize);
    let next = rows.last().filter(|_| has_more).map(|row| row.id.to_string());
    let decisions = rows.into_iter().map(row).collect();
    Ok(Json(Decisions { decisions, next }))
}

pub(super) async fn decision(
    State(site): State<Site>,
    id: Result<Path<i64>, PathRejection>,
) -> Result<Json<DecisionRow>, Failed> {
    let Path(id) = id?;
    let wanted = Wanted {
        kind: Some(EventRecord::DECIDED.into()),
        id: Some(id),
        ..Wanted::default()
    };
    let found = ask(site, move |archive| Ok(archive.events(&wanted)?)).await?;
    let found = found.into_iter().next().map(row);
    found.map(Json).ok_or_else(|| Failed::no_such_decision(id))
}

pub(super) async fn why(
    State(site): State<Site>,
    id: Result<Path<String>, PathRejection>,
    query: Result<Query<WhyQuery>, QueryRejection>,
) -> Result<Json<Answer>, Failed> {
    let (Path(id), Query(query)) = (id?, query?);
    let window = query.window.as_deref().map(str::parse::<Ns>).transpose();
    let window = window.map_err(|e| Failed::bad_parameter(format!("window: {e}")))?;
    let window = WINDOW.checked(window.unwrap_or(WINDOW.usual));
    let window = window.map_err(|e| Failed::bad_parameter(format!("window: {e}")))?;
    let at = query.at.map(|time| time.0);
    let until = Instant::now() + READING_MAX;
    let answer = ask(site, move |archive| {
        crate::why::ask(archive, &id, (at, window), Some(until)).map_err(|error| match error {
            AskError::Record(error) => error.into(),
            AskError::Vm(error) => error.into(),
            AskError::Outside { .. } | AskError::Nothing(_) | AskError::Why(_) => {
                Failed::nothing_known(error.to_string())
            }
        })
    });
    Ok(Json(answer.await?))
}

fn row(row: EventRow) -> DecisionRow {
    let record = row.record;
    DecisionRow {
        id: row.id,
        time: WallTime(row.wall_ns),
        vm: record.vm.map(|vm| vm.to_string()),
        name: record.name,
        policy: record.policy,
        action: record.action,
        outcome: record.outcome,
        text: record.text,
        detail: row.detail,
    }
}

/// A span of time, divided into steps.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stretch {
    from_ns: i64,
    to_ns: i64,
    step_ns: i64,
}

/// Fills in a query's defaults, and limits its span and number of steps to those of one answer. The answer states the span.
fn stretch(query: &HistoryQuery, now_ns: i64) -> Result<Stretch, Failed> {
    let to_ns = query.to.map_or(now_ns, |to| to.0);
    let from_ns = query.from.map_or(to_ns.saturating_sub(HOUR_NS), |from| from.0);
    let to_ns = to_ns
        .min(from_ns.saturating_add_unsigned(HISTORY_MAX.0))
        .max(from_ns);
    let length = to_ns.abs_diff(from_ns);
    let step: Option<Ns> = query
        .step
        .as_deref()
        .map(str::parse)
        .transpose()
        .map_err(|e| Failed::bad_parameter(format!("step: {e}")))?;
    let step = step.map_or((length / POINTS).max(STEP_SHORTEST.0), |step| step.0);
    let step = step.max(length / POINTS_MAX + 1);
    Ok(Stretch {
        from_ns,
        to_ns,
        step_ns: i64::try_from(step).unwrap_or(i64::MAX),
    })
}

pub(super) async fn history(
    State(site): State<Site>,
    query: Result<Query<HistoryQuery>, QueryRejection>,
) -> Result<Json<VmHistory>, Failed> {
    let Query(query) = query?;
    let (seen, _) = site.feed.seen();
    let now_ns = seen
        .as_ref()
        .map_or_else(|| site.feed.clock().begun_ns(), |seen| seen.wall_ns);
    let stretch = stretch(&query, now_ns)?;
    let name = query.vm.clone();
    let read = move |archive: &Archive| points(archive, &name, stretch, Instant::now() + READING_MAX);
    let (points, to_ns) = ask(site, read).await?;
    if points.is_empty() {
        let running = seen.as_ref().map(|seen| seen.status.vms.as_slice());
        named(running.unwrap_or_default(), &query.vm)?;
    }
    Ok(Json(VmHistory {
        vm: query.vm,
        from: WallTime(stretch.from_ns),
        to: WallTime(to_ns),
        step_ns: Ns(stretch.step_ns.unsigned_abs()),
        points,
    }))
}

/// Sums over the periods of a step.
#[derive(Default)]
struct Sum {
    periods: u64,
    /// The sum of each figure, and the number of periods that have it.
    figures: [(f64, u64); FIGURES.len()],
    last: Value,
}

/// Keys of a VM's status that are averaged.
const FIGURES: [&str; 9] = [
    "cpus_used",
    "vcpus_waiting",
    "instructions_per_s",
    "cycles_per_instruction",
    "instructions_per_cpu_s",
    "speed_ratio",
    "llc_miss_rate",
    "local_access_ratio",
    "bandwidth_bytes_per_s",
];

/// Keys of a VM's status whose last value in a step is used.
const LAST: [&str; 4] = ["id", "name", "pages_by_node", "home"];

/// Reads the points. Also returns the time up to which they were read, which is earlier than wanted if reading took too long.
fn points(
    archive: &Archive,
    name: &str,
    stretch: Stretch,
    until: Instant,
) -> Result<(Vec<HistoryPoint>, i64), Failed> {
    let mut to_ns = stretch.to_ns;
    let mut steps: BTreeMap<i64, Sum> = BTreeMap::new();
    let keys = FIGURES.iter().chain(&LAST).map(|key| (*key, Pick::All));
    let of_vm: Vec<(&str, Pick<'_>)> = keys.collect();
    let of_vm = Pick::Keys(&of_vm);
    let of_host = [("vms", Pick::Called(name, &of_vm))];
    let within = (stretch.from_ns, stretch.to_ns);
    let mut frames = archive
        .iter(None, Kind::Status, within)?
        .only(Pick::Keys(&of_host));
    let mut is_in_time = true;
    for frame in frames.by_ref() {
        let mut frame = frame?;
        let vms: Vec<&mut Value> = match frame.value.get_mut("vms") {
            Some(Value::Array(vms)) => vms.iter_mut().collect(),
            Some(Value::Object(vms)) => vms.values_mut().collect(),
            _ => Vec::new(),
        };
        let id = |vm: &Value| vm["id"].as_str().and_then(VmId::parse);
        let called =
            |vm: &&mut Value| id(vm).map(|id| (id, vm["name"].as_str().unwrap_or_default().to_owned()));
        let known: Vec<(VmId, String)> = vms.iter().filter_map(called).collect();
        let chosen = match meant(&known, |(id, called)| (*id, called.as_str()), name) {
            Ok((chosen, _)) => Some(*chosen),
            Err(ApiError::NoSuchVm { .. }) => None,
            Err(ambiguous) => return Err(ambiguous.into()),
        };
        if let Some(vm) = vms.into_iter().find(|vm| chosen.is_some() && id(vm) == chosen) {
            let step = frame.wall_ns.saturating_sub(stretch.from_ns) / stretch.step_ns;
            let sum = steps.entry(step).or_default();
            sum.periods += 1;
            for ((total, count), key) in sum.figures.iter_mut().zip(FIGURES) {
                if let Some(figure) = vm[key].as_f64() {
                    *total += figure;
                    *count += 1;
                }
            }
            sum.last = vm.take();
        }
        if Instant::now() >= until {
            (to_ns, is_in_time) = (frame.wall_ns, false);
            break;
        }
    }
    let read = if is_in_time { frames.whole() } else { Ok(()) };
    match read {
        // If the history is damaged, use what could be read.
        Ok(()) | Err(RecordError::Damaged { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    let points = steps.iter();
    let points = points.map(|(step, sum)| point(stretch.from_ns + step * stretch.step_ns, sum));
    Ok((points.collect(), to_ns))
}

fn point(begin_ns: i64, sum: &Sum) -> HistoryPoint {
    let mean = |(total, count): (f64, u64)| (count > 0).then(|| total / count as f64);
    let [
        cpus_used,
        vcpus_waiting,
        instructions_per_s,
        cycles_per_instruction,
        instructions_per_cpu_s,
        speed_ratio,
        llc_miss_rate,
        local_access_ratio,
        bandwidth,
    ] = sum.figures.map(mean);
    let pages = sum.last["pages_by_node"].as_array();
    let memory = |on: &Value| {
        Some(NodeMemory {
            node: on["node"].as_u64()?,
            memory_bytes: on["pages"]
                .as_u64()
                .map(|pages| Bytes(pages.saturating_mul(PAGE_BYTES)))
                .unwrap_or(Bytes(0)),
        })
    };
    HistoryPoint {
        time: WallTime(begin_ns),
        periods_count: sum.periods,
        cpus_used,
        vcpus_waiting,
        instructions_per_s,
        cycles_per_instruction,
        instructions_per_cpu_s,
        speed_ratio,
        llc_miss_rate,
        local_access_ratio,
        bandwidth_bytes_per_s: bandwidth.map(|bytes| BytesPerSec(bytes as u64)),
        memory_by_node: pages.map(|pages| pages.iter().filter_map(memory).collect()),
        home: serde_json::from_value(sum.last["home"].clone()).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(from: Option<i64>, to: Option<i64>, step: Option<&str>) -> (i64, i64, i64) {
        let query = HistoryQuery {
            vm: "web".into(),
            from: from.map(WallTime),
            to: to.map(WallTime),
            step: step.map(str::to_owned),
        };
        let stretch = stretch(&query, 10 * HOUR_NS).unwrap();
        (stretch.from_ns, stretch.to_ns, stretch.step_ns)
    }

    #[test]
    fn a_stretch_is_the_last_hour_unless_it_is_said_and_a_day_at_most() {
        assert_eq!(of(None, None, None), (9 * HOUR_NS, 10 * HOUR_NS, HOUR_NS / 300));
        assert_eq!(of(Some(0), None, Some("1h")), (0, 10 * HOUR_NS, HOUR_NS));
        assert_eq!(
            of(Some(i64::MIN), Some(i64::MAX), None).1,
            i64::MIN + 24 * HOUR_NS
        );
        // A span that ends before it begins is empty.
        let (from, to, step) = of(Some(HOUR_NS), Some(0), None);
        assert_eq!((from, to), (HOUR_NS, HOUR_NS));
        assert!(step > 0);
    }

    #[test]
    fn there_are_no_more_steps_than_an_answer_may_have() {
        let (from, to, step) = of(Some(0), Some(HOUR_NS), Some("1ms"));
        assert!(((to - from) / step).unsigned_abs() < POINTS_MAX);
    }
}
