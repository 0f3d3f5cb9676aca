//! Replays a recorded run, to find where other settings, or another version, would have decided differently.

use std::collections::BTreeMap;

use homenode_control::replay::{Compared, Replay, Settings};
use homenode_control::{Config, Decided, Mode, PolicySet, Turn};
use homenode_host::Sample;
use homenode_machine::Machine;
use homenode_recorder::{Archive, Frame, Kind, RecordError, Run};
use homenode_units::{NodeSet, Ns, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::history::read_recorded;

/// The run to replay, and the settings under which it is replayed.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// The run to replay; by default the last one that has samples.
    pub run: Option<i64>,
    /// The settings; by default those of the run.
    pub config: Option<Config>,
    /// Policies that override those of the settings.
    pub policies: Option<PolicySet>,
}

/// Why a run cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The history cannot be read.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// There is no such run, or it has no samples to replay.
    #[error("{0}")]
    Nothing(String),
}

/// Whether the recording or the replay made the decisions that the other one lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Only {
    /// The recording only.
    Recorded,
    /// The replay only.
    Replayed,
}

/// Decisions of one kind on one VM that only the recording or only the replay made.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Difference {
    /// Whether the recording or the replay made them.
    pub only: Only,
    /// The VM.
    pub vm: VmId,
    /// The VM's name.
    pub name: String,
    /// The policy that decided.
    pub policy: String,
    /// The first of these actions, in the form of a [`homenode_host::Action`].
    #[schemars(with = "serde_json::Map<String, Value>")]
    pub action: Value,
    /// The reason given.
    pub reason: String,
    /// Wall-clock time of the first one, in nanoseconds since 1970.
    pub wall_ns: i64,
    /// Wall-clock time of the last one.
    pub last_wall_ns: i64,
    /// Number of periods with such a decision.
    pub count: u64,
}

/// The result of a replay.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Report {
    /// Number of the run in the history.
    pub run: i64,
    /// The host on which the run was recorded.
    pub host: String,
    /// The version that recorded the run.
    pub version: String,
    /// Policies in the recording.
    pub policies_recorded: PolicySet,
    /// Policies in the replay.
    pub policies: PolicySet,
    /// Whether settings and policies are those of the recording.
    pub same_settings: bool,
    /// Wall-clock time of the first replayed period, in nanoseconds since 1970.
    pub wall_ns: i64,
    /// Wall-clock time of the last replayed period, in nanoseconds since 1970.
    pub last_wall_ns: i64,
    /// Number of replayed periods.
    pub periods_count: u64,
    /// Number of recorded decisions, including renewed leases.
    pub recorded_count: u64,
    /// Number of decisions in the replay.
    pub replayed_count: u64,
    /// Number of decisions that the recording and the replay made in the same period.
    pub same_count: u64,
    /// Number of these decisions whose reason in the replay differs from the recorded one.
    pub other_reason_count: u64,
    /// Whether all plans are identical.
    pub same: bool,
    /// Wall-clock time of the first period whose plans differ. Samples after it show the effect of the recorded decisions, not of
    /// those of the replay.
    pub first_difference_wall_ns: Option<i64>,
    /// Decisions that only the recording or only the replay made, earliest first.
    pub differences: Vec<Difference>,
    /// Why the replay is not exact, one sentence each; empty if it is exact.
    pub inexact: Vec<String>,
}

/// The fields that a replay reads of a run's recorded detail.
#[derive(Debug, Deserialize)]
pub struct Detail {
    /// The machine of the run.
    pub machine: Machine,
    /// The settings of the run.
    pub config: Config,
    /// The mode of the run.
    #[serde(default)]
    pub mode: Mode,
}

/// Most kinds of differences that are listed separately; further ones are only counted.
const DIFFERENCES_MAX: usize = 10_000;

/// Replays a recorded run.
///
/// # Errors
/// If the history cannot be read, or has no samples of the wanted run.
pub fn replay(archive: &Archive, wanted: &Wanted) -> Result<Report, ReplayError> {
    let run = choose(archive, wanted.run)?;
    let unreadable = |e| {
        ReplayError::Nothing(format!(
            "machine and settings of run {} cannot be read: {e}",
            run.id
        ))
    };
    let detail = Detail::deserialize(&run.detail).map_err(unreadable)?;
    let mut config = wanted.config.clone().unwrap_or_else(|| detail.config.clone());
    if let Some(other) = &wanted.config {
        let on_machine = other.check_on(&detail.machine);
        on_machine.map_err(|bad| ReplayError::Nothing(bad.to_string()))?;
    }
    config.policies = wanted.policies.unwrap_or(config.policies);
    // The samples determine the period, and a replay records nothing.
    config.period = detail.config.period;
    config.record = detail.config.record.clone();
    let settings = match wanted.config {
        None => Settings::OfThen,
        Some(_) => Settings::Others,
    };
    let mut repeated = Repeated {
        replay: Replay::new(detail.machine, (config.clone(), settings), detail.mode),
        report: Report {
            run: run.id,
            host: run.host.clone(),
            version: run.version.clone(),
            policies_recorded: detail.config.policies,
            policies: config.policies,
            same_settings: config == detail.config,
            wall_ns: 0,
            last_wall_ns: 0,
            periods_count: 0,
            recorded_count: 0,
            replayed_count: 0,
            same_count: 0,
            other_reason_count: 0,
            same: true,
            first_difference_wall_ns: None,
            differences: Vec::new(),
            inexact: Vec::new(),
        },
        differences: BTreeMap::new(),
        flaws: Flaws::default(),
        archive,
    };
    let all = (i64::MIN, i64::MAX);
    let read = archive.frames_of(Some(run.id), Kind::Sample, all, |frame| {
        repeated.take(frame);
        true
    });
    match read {
        Err(RecordError::Damaged { what, .. }) => repeated.flaws.damaged = Some(what),
        read => read?,
    }
    repeated.report(&run)
}

/// Returns the run with this number, or the last one with samples.
fn choose(archive: &Archive, wanted: Option<i64>) -> Result<Run, ReplayError> {
    let mut runs = archive.runs()?;
    let none = |why: String| ReplayError::Nothing(why);
    if let Some(wanted) = wanted {
        let known: Vec<String> = runs.iter().map(|run| run.id.to_string()).collect();
        let found = runs.into_iter().find(|run| run.id == wanted);
        return found.ok_or_else(|| {
            none(format!(
                "the history has no run {wanted}; it has {}",
                known.join(", ")
            ))
        });
    }
    while let Some(run) = runs.pop() {
        let mut has_samples = false;
        let all = (i64::MIN, i64::MAX);
        let read = archive.frames_of(Some(run.id), Kind::Sample, all, |_| {
            has_samples = true;
            false
        });
        if has_samples {
            return Ok(run);
        }
        read?;
    }
    Err(none(
        "the history has no samples, which a replay needs: they are kept for `record.samples_hours`".into(),
    ))
}

/// Differences with the same key are counted as one.
type Key = (Only, VmId, String, String);

/// What is missing from a recording.
#[derive(Debug, Default)]
struct Flaws {
    /// If the recording lacks the beginning: the number of the first recorded cycle, and whether the homes at that time are
    /// known.
    begun_late: Option<(u64, bool)>,
    gaps_count: u64,
    missing_count: u64,
    first_gap_wall_ns: Option<i64>,
    inputs_missing_count: u64,
    without_turn_count: u64,
    unreadable_count: u64,
    damaged: Option<String>,
    differences_left_out_count: u64,
}

struct Repeated<'a> {
    replay: Replay,
    report: Report,
    differences: BTreeMap<Key, Difference>,
    flaws: Flaws,
    archive: &'a Archive,
}

impl Repeated<'_> {
    fn take(&mut self, frame: Frame) {
        let (run, wall_ns) = (frame.run, frame.wall_ns);
        let (sample, turn) = match read_recorded(frame.value) {
            Ok((sample, Some(turn))) => (sample, turn),
            Ok((_, None)) => {
                self.flaws.without_turn_count += 1;
                return;
            }
            Err(_) => {
                self.flaws.unreadable_count += 1;
                return;
            }
        };
        let report = &mut self.report;
        if report.periods_count == 0 {
            report.wall_ns = wall_ns;
            if turn.number > 0 {
                let homes = homes_before(self.archive, run, frame.at);
                self.flaws.begun_late = Some((turn.number, homes.is_some()));
                self.replay
                    .begin_in_the_middle(turn.number, homes.unwrap_or_default());
            }
        }
        report.periods_count += 1;
        report.last_wall_ns = wall_ns;
        self.compare(wall_ns, sample, turn);
    }

    fn compare(&mut self, wall_ns: i64, sample: Sample, turn: Turn) {
        let named = |vm: VmId| sample.vm(vm).map_or_else(|| vm.to_string(), |vm| vm.name.clone());
        let names: BTreeMap<VmId, String> = sample.vms.iter().map(|vm| (vm.id, named(vm.id))).collect();
        let compared = self.replay.step(sample, turn);
        let (report, flaws) = (&mut self.report, &mut self.flaws);
        if compared.missing_count > 0 {
            flaws.gaps_count += 1;
            flaws.missing_count += compared.missing_count;
            flaws.first_gap_wall_ns.get_or_insert(wall_ns);
        }
        flaws.inputs_missing_count += compared.inputs_missing_count;
        if !compared.is_same() {
            report.same = false;
            report.first_difference_wall_ns.get_or_insert(wall_ns);
        }
        let Compared {
            same,
            then_only,
            now_only,
            other_reason_count,
            ..
        } = compared;
        let [same, then, now] = [same.len(), then_only.len(), now_only.len()].map(|count| count as u64);
        report.same_count += same;
        report.recorded_count += same + then;
        report.replayed_count += same + now;
        report.other_reason_count += other_reason_count as u64;
        let then = then_only.into_iter().map(|decided| (Only::Recorded, decided));
        let now = now_only.into_iter().map(|decided| (Only::Replayed, decided));
        for (only, decided) in then.chain(now) {
            let vm = decided.action.vm;
            let name = names.get(&vm).cloned().unwrap_or_else(|| vm.to_string());
            self.differs(only, decided, name, wall_ns);
        }
    }

    fn differs(&mut self, only: Only, decided: Decided, name: String, wall_ns: i64) {
        let Decided {
            policy,
            action,
            reason,
        } = decided;
        let key = (
            only,
            action.vm,
            policy.clone(),
            homenode_control::replay::kind_of(&action),
        );
        if let Some(known) = self.differences.get_mut(&key) {
            known.count += 1;
            known.last_wall_ns = wall_ns;
            return;
        }
        if self.differences.len() >= DIFFERENCES_MAX {
            self.flaws.differences_left_out_count += 1;
            return;
        }
        let difference = Difference {
            only,
            vm: action.vm,
            name,
            policy,
            action: serde_json::json!(action),
            reason,
            wall_ns,
            last_wall_ns: wall_ns,
            count: 1,
        };
        self.differences.insert(key, difference);
    }

    fn report(self, run: &Run) -> Result<Report, ReplayError> {
        let mut report = self.report;
        if report.periods_count == 0 {
            let why = match self.flaws.without_turn_count {
                0 => "it has no samples left: they are kept for `record.samples_hours`",
                _ => "the version that recorded it did not keep the outcomes of decisions",
            };
            return Err(ReplayError::Nothing(format!(
                "run {} cannot be replayed: {why}",
                run.id
            )));
        }
        report.differences = self.differences.into_values().collect();
        report.differences.sort_by_key(|difference| difference.wall_ns);
        report.inexact = self.flaws.told();
        Ok(report)
    }
}

impl Flaws {
    fn told(&self) -> Vec<String> {
        let mut told = Vec::new();
        if let Some((number, homes)) = self.begun_late {
            let homes = match homes {
                true => "homes of that time are used",
                false => "homes of that time are not known",
            };
            told.push(format!(
                "the first {number} periods of the run are missing: {homes}; what policies had learnt is not known"
            ));
        }
        if self.gaps_count > 0 {
            let (gaps, missing) = (self.gaps_count, self.missing_count);
            told.push(format!(
                "{missing} periods are missing in {gaps} places: what was decided and learnt in them is not known"
            ));
        }
        let mut count = |count: u64, what: &str| {
            if count > 0 {
                told.push(format!("{count} {what}"));
            }
        };
        count(self.unreadable_count, "samples cannot be read, and are left out");
        count(
            self.without_turn_count,
            "samples are of a version that did not keep the outcomes of decisions, and are left out",
        );
        count(
            self.inputs_missing_count,
            "requests and announcements to the agent were not recorded, because there were too many",
        );
        count(self.differences_left_out_count, "more differences are not listed");
        told.extend(self.damaged.clone());
        told
    }
}

/// Returns the homes in the last status before this time, or `None` if there is no such status.
fn homes_before(archive: &Archive, run: i64, at: Ns) -> Option<Vec<(VmId, NodeSet)>> {
    let mut before: Option<Value> = None;
    let all = (i64::MIN, i64::MAX);
    let read = archive.frames_of(Some(run), Kind::Status, all, |frame| {
        let is_before = frame.at < at;
        if is_before {
            before = Some(frame.value);
        }
        is_before
    });
    // After a read error, use what was read so far.
    drop(read);
    let before = before?;
    let home = |vm: &Value| {
        let id = VmId::deserialize(&vm["id"]).ok()?;
        Some((id, NodeSet::deserialize(&vm["home"]).ok()?))
    };
    Some(before["vms"].as_array()?.iter().filter_map(home).collect())
}

#[cfg(test)]
mod tests;
