//! Answers why a VM was slow, from the history.

use std::time::Instant;

use homenode_api::http::WallTime;
use homenode_api::why::{Answer, WallSpan};
use homenode_api::{ApiError, EventRecord, meant};
use homenode_host::Sample;
use homenode_machine::Machine;
use homenode_recorder::{Archive, EventRow, Frame, Kind, RecordError, Wanted};
use homenode_units::{Ns, VmId};
use homenode_why::{Happening, WhyError};
use serde::Deserialize;

use crate::history::read_recorded;

/// A change may be caused by a decision that was made up to this long before it, in nanoseconds.
const DECIDED_EARLIER: i64 = 5_000_000_000;
/// Most events that are read. If there are more, the last ones are read.
const EVENTS_MAX: u32 = 10_000;
/// Factor by which the distance between samples shrinks each time the VM turns out to be younger than that distance.
const CLOSER: u64 = 30;
/// A decision made up to this long after a window, in nanoseconds, may still concern it.
const DECIDED_LATER: i64 = 60_000_000_000;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// The history cannot be read.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The VM's name is unknown or ambiguous.
    #[error(transparent)]
    Vm(#[from] ApiError),
    /// The time is outside the history.
    #[error("samples are recorded from {} to {} only", .recorded.from, .recorded.to)]
    Outside {
        /// The span of the history.
        recorded: WallSpan,
    },
    /// The history has nothing about that time or VM.
    #[error("{0}")]
    Nothing(String),
    /// Too little is known to answer.
    #[error(transparent)]
    Why(#[from] WhyError),
}

/// The fields that are read of a run's recorded detail.
#[derive(Debug, Deserialize)]
struct Detail {
    machine: Machine,
}

/// Explains why a VM, given by name or id, was slow around a wall-clock time, by default in the last recorded window. If `until`
/// is given, reading stops with an error at that time, since other readers may wait.
///
/// # Errors
/// If nothing was recorded at that time, the VM did not run, or reading takes too long.
pub fn ask(
    archive: &Archive,
    vm: &str,
    (at, window): (Option<i64>, Ns),
    until: Option<Instant>,
) -> Result<Answer, AskError> {
    let (first, last) = archive.span(Kind::Sample)?.ok_or_else(|| {
        AskError::Nothing(
            "no samples are recorded yet; while samples_hours of [record] in the settings is 0, none are"
                .to_owned(),
        )
    })?;
    let long = i64::try_from(window.0).unwrap_or(i64::MAX / 16);
    let to = at.map_or(last, |at| at.saturating_add(long / 2).min(last));
    let from = to.saturating_sub(long);
    if to < first || at.is_some_and(|at| at > last.saturating_add(long)) {
        let (from, to) = (WallTime(first), WallTime(last));
        return Err(AskError::Outside {
            recorded: WallSpan { from, to },
        });
    }
    let begin = from.saturating_sub(long.saturating_mul(homenode_why::BASELINE.cast_signed()));
    let (_, apart) = homenode_why::wanted(Ns(0), window);
    let frames = sparse(archive, None, (begin, to), apart, until)?;
    // If the window contains parts of two runs, use the run that contains the time.
    let about = at.and_then(|at| frames.iter().rev().find(|frame| frame.wall_ns <= at));
    let Some(end) = about.or(frames.last()) else {
        return Err(AskError::Nothing("nothing was recorded at that time".to_owned()));
    };
    // Samples of another run are left out, since its host clock may have another origin.
    let (run, offset) = (end.run, end.wall_ns.saturating_sub(end.at.0.cast_signed()));
    let host = |wall: i64| Ns(wall.saturating_sub(offset).max(0).unsigned_abs());
    let wall = |at: Ns| WallTime(at.0.cast_signed().saturating_add(offset));
    let machine = machine_of(archive, run)?;
    let question = Question {
        vm,
        about: at.map(host),
        begin: host(begin),
        window: (host(from), host(to)),
        apart,
    };
    let read = |since: Ns, apart: Ns| -> Result<Vec<Sample>, AskError> {
        let frames = sparse(archive, Some(run), (wall(since).0, to), apart, until)?;
        Ok(samples_of(frames, run))
    };
    let Found { id, samples, start } = question.look(samples_of(frames, run), read)?;
    let (asked_from, end) = question.window;
    let (from, window) = (wall(start).0, (start, end));
    let happenings = happenings(archive, run, (from, to))?;
    let mut explanation = homenode_why::explain(&machine, &samples, id, window, &happenings)?;
    if start != asked_from && explanation.speed.usual.is_some() {
        let (all, part) = (explanation.history_ns, end.saturating_sub(start));
        explanation.notes.push(format!(
            "the history of the VM is {:.0} s long, so its last {:.0} s are compared with the time before",
            all.as_secs_f64(),
            part.as_secs_f64()
        ));
    }
    Ok(Answer {
        run,
        asked: WallSpan {
            from: WallTime(from),
            to: WallTime(to),
        },
        slow: WallSpan {
            from: wall(explanation.from_ns),
            to: wall(explanation.to_ns),
        },
        compared_from: wall(explanation.baseline_from_ns),
        explanation,
    })
}

/// A question about one run. Its times are those of the run's host clock.
#[derive(Clone, Copy, Debug)]
struct Question<'a> {
    /// The VM's name or id.
    vm: &'a str,
    /// The time that the client named; `None` if it named none.
    about: Option<Ns>,
    /// When the baseline of the window begins.
    begin: Ns,
    /// The window to explain.
    window: (Ns, Ns),
    /// The distance between samples that suffices for this window.
    apart: Ns,
}

/// The data that was read to answer a question.
#[derive(Debug)]
struct Found {
    id: VmId,
    samples: Vec<Sample>,
    /// When the explained window begins. If the VM is young, this is later than the requested window begins.
    start: Ns,
}

impl Question<'_> {
    /// Finds the VM, and the samples that explain its window. `samples` are those since [`Question::begin`], [`Question::apart`]
    /// from each other; `read` takes a time and a distance, and returns the samples from that time on.
    ///
    /// A VM that started recently needs samples close to each other, but the history may be much longer than the VM's life. So
    /// only the samples since the last one without the VM are read. If the VM is younger than the distance between samples,
    /// samples at shorter distances are read until they show when it appeared.
    fn look(
        &self,
        mut samples: Vec<Sample>,
        mut read: impl FnMut(Ns, Ns) -> Result<Vec<Sample>, AskError>,
    ) -> Result<Found, AskError> {
        let (from, to) = self.window;
        let (mut since, mut apart) = (self.begin, self.apart);
        let parts = [CLOSER, CLOSER * CLOSER];
        let mut distances = parts
            .map(|part| Ns(self.apart.0 / part))
            .into_iter()
            .chain([Ns(0)]);
        let mut seen: Option<(VmId, Ns)> = None;
        loop {
            let now = find(&samples, self.vm)?.and_then(|id| Some((id, first_of(&samples, id)?)));
            seen = match (seen, now) {
                // Samples at a shorter distance may leave out the one sample that shows the VM.
                (Some((id, at)), Some((same, later))) if id == same && at < later => seen,
                _ => now.or(seen),
            };
            let before = |at: &Ns| seen.is_none_or(|(_, first)| *at < first);
            since = samples
                .iter()
                .rev()
                .map(|sample| sample.at)
                .find(before)
                .unwrap_or(since);
            if seen.is_some_and(|(_, first)| to.saturating_sub(first) >= apart) {
                break;
            }
            let Some(closer) = distances.next() else { break };
            (samples, apart) = (read(since, closer)?, closer);
        }
        let (id, first) = seen.ok_or_else(|| not_there(self.vm))?;
        let start_of = |first| homenode_why::within(first, self.about, (from, to)).0;
        let mut start = start_of(first);
        if start != from || apart != self.apart {
            let (_, apart) = homenode_why::wanted(start, to);
            samples = read(since, apart)?;
            start = start_of(first_of(&samples, id).map_or(first, |at| at.min(first)));
        }
        Ok(Found { id, samples, start })
    }
}

/// Returns the time of the first sample that has a VM.
fn first_of(samples: &[Sample], vm: VmId) -> Option<Ns> {
    let first = samples.iter().find(|sample| sample.vm(vm).is_some());
    first.map(|sample| sample.at)
}

/// Returns the decisions and other events of a run that may explain a window.
fn happenings(archive: &Archive, run: i64, (from, to): (i64, i64)) -> Result<Vec<Happening>, AskError> {
    let before = to.saturating_sub(from) / 6;
    let events = archive.events(&Wanted {
        from_ns: Some(from.saturating_sub(before).saturating_sub(DECIDED_EARLIER)),
        limit: Some(EVENTS_MAX),
        to_ns: Some(to.saturating_add(DECIDED_LATER)),
        ..Wanted::default()
    })?;
    // An event that says that a VM appeared or vanished explains nothing.
    let explains = |record: &EventRecord| {
        record.vm.is_some() && !matches!(record.kind.as_str(), "appeared" | "vanished")
    };
    let of_run = events
        .into_iter()
        .filter(|event| event.run == run && explains(&event.record));
    Ok(of_run
        .map(|EventRow { id, record, .. }| Happening { id, record })
        .collect())
}

fn not_there(vm: &str) -> AskError {
    AskError::Nothing(format!(
        "there was no VM {vm} at that time: `homenode record show` lists the VMs that appeared and vanished"
    ))
}

/// Returns the machine on which a run was recorded.
fn machine_of(archive: &Archive, run: i64) -> Result<Machine, AskError> {
    let detail = archive.runs()?.into_iter().find(|known| known.id == run);
    let detail = detail.and_then(|run| serde_json::from_value::<Detail>(run.detail).ok());
    let machine = detail.map(|detail| detail.machine);
    machine.ok_or_else(|| AskError::Nothing(format!("the history lacks the machine of run {run}")))
}

/// Returns the samples of one run, without those that cannot be read.
fn samples_of(frames: Vec<Frame>, run: i64) -> Vec<Sample> {
    let of_run = frames.into_iter().filter(|frame| frame.run == run);
    of_run
        .filter_map(|frame| Some(read_recorded(frame.value).ok()?.0))
        .collect()
}

/// Returns samples between two times, of one run or of all, at least `apart` from each other. Not all are needed, and deriving
/// figures from a sample takes longer than reading it.
fn sparse(
    archive: &Archive,
    run: Option<i64>,
    span: (i64, i64),
    apart: Ns,
    until: Option<Instant>,
) -> Result<Vec<Frame>, AskError> {
    let mut samples: Vec<Frame> = Vec::new();
    let mut frames = archive.iter(run, Kind::Sample, span)?.apart(apart);
    for frame in frames.by_ref() {
        samples.push(frame?);
        if until.is_some_and(|until| Instant::now() >= until) {
            return Err(AskError::Nothing(
                "reading so long a window takes too long here: ask for a shorter one, or use `homenode why`"
                    .to_owned(),
            ));
        }
    }
    match frames.whole() {
        // If the history is damaged, use what could be read.
        Ok(()) | Err(RecordError::Damaged { .. }) => Ok(samples),
        Err(error) => Err(error.into()),
    }
}

/// Returns the VM that is called `text` or has it as id. If several had the name in turn, returns the last of them.
fn find(samples: &[Sample], text: &str) -> Result<Option<VmId>, ApiError> {
    for sample in samples.iter().rev() {
        match meant(&sample.vms, |vm| (vm.id, vm.name.as_str()), text) {
            Err(ApiError::NoSuchVm { .. }) => {}
            found => return found.map(|vm| Some(vm.id)),
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use homenode_host::VmSample;

    use super::*;

    /// End of the history in tests, in seconds. There is a sample for each second.
    const END: u64 = 200_000;

    /// Asks about the last six hours of `web`, which appeared `age_s` ago. Also returns the number of samples read.
    fn asked(vm: &str, age_s: u64) -> (Result<Found, AskError>, usize) {
        let (window, to) = (Ns::from_secs(6 * 3600), Ns::from_secs(END));
        let from = to.saturating_sub(window);
        let (begin, apart) = homenode_why::wanted(from, to);
        let question = Question {
            vm,
            about: None,
            begin,
            window: (from, to),
            apart,
        };
        let mut read_count = 0;
        let mut read = |since: Ns, apart: Ns| -> Result<Vec<Sample>, AskError> {
            let mut samples: Vec<Sample> = Vec::new();
            for second in since.0.div_ceil(1_000_000_000)..=END {
                let at = Ns::from_secs(second);
                let is_apart = |last: &Sample| at.saturating_sub(last.at) >= apart;
                if samples.last().is_none_or(is_apart) {
                    let is_there = second + age_s >= END;
                    let web = is_there.then(|| VmSample::new(VmId(1), "web".to_owned()));
                    samples.push(Sample {
                        at,
                        vms: web.into_iter().collect(),
                        ..Sample::default()
                    });
                }
            }
            read_count += samples.len();
            Ok(samples)
        };
        let samples = read(begin, apart).unwrap();
        let found = question.look(samples, &mut read);
        (found, read_count)
    }

    #[test]
    fn of_a_long_history_few_samples_are_read_for_a_young_vm() {
        for age_s in [0, 1, 5, 60, 700, 719, 720, 721, 1439, 1441, 7200, 20_000] {
            let (found, read_count) = asked("web", age_s);
            let found = found.unwrap();
            assert!(read_count <= 500, "{age_s} s: {read_count}");
            // A fifth of its life is explained, and all of it is read, from close samples.
            let explained = Ns::from_secs(END).saturating_sub(found.start);
            let part = Ns(Ns::from_secs(age_s).0 / 5);
            assert!(
                explained.0.abs_diff(part.0) <= 500_000_000 + part.0 / 50,
                "{age_s} s: {explained}"
            );
            let first = first_of(&found.samples, found.id).unwrap().as_secs_f64();
            let late = first - (END - age_s) as f64;
            assert!(
                (0.0..=1.0 + age_s as f64 / 100.0).contains(&late),
                "{age_s} s: {late}"
            );
        }
    }

    #[test]
    fn for_a_vm_that_is_old_or_unknown_no_more_is_read_than_for_the_window() {
        let (found, read_count) = asked("web", 90_000);
        let found = found.unwrap();
        assert_eq!(found.start, Ns::from_secs(END - 6 * 3600));
        assert_eq!((found.samples.len(), read_count), (151, 151));
        let (found, read_count) = asked("wbe", 90_000);
        assert!(
            matches!(found, Err(AskError::Nothing(_))) && read_count <= 250,
            "{read_count}"
        );
    }

    #[test]
    fn a_name_means_the_vm_that_had_it_last_and_of_two_at_once_neither() {
        let sample = |vms: &[(u128, &str)]| Sample {
            vms: vms
                .iter()
                .map(|(id, name)| VmSample::new(VmId(*id), (*name).to_owned()))
                .collect(),
            ..Sample::default()
        };
        let mut samples = vec![
            sample(&[(1, "web"), (2, "web")]),
            sample(&[(2, "web")]),
            sample(&[(3, "db")]),
        ];
        assert_eq!(find(&samples, "web"), Ok(Some(VmId(2))));
        assert_eq!(find(&samples, &VmId(1).to_string()), Ok(Some(VmId(1))));
        assert_eq!(find(&samples, "absent"), Ok(None));
        samples.truncate(1);
        let refused = find(&samples, "web").unwrap_err().to_string();
        assert!(
            [1, 2].iter().all(|id| refused.contains(&VmId(*id).to_string())),
            "{refused}"
        );
    }
}
