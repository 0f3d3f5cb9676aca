//! Decisions for VMs over time, and their text form.

use std::fmt;
use std::str::FromStr;

use homenode_twin::Scenario;
use homenode_units::{MemoryPolicy, MemoryPolicyError, NodeSet, Ns, ParseQuantityError, ParseSetError};

/// Where a VM should run.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// Unplaced: the kernel chooses.
    #[default]
    Unplaced,
    /// vCPUs and memory are on these nodes.
    Home(NodeSet),
    /// Memory is on these nodes; the kernel chooses where vCPUs run.
    Memory(NodeSet),
}

/// The goal for a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Goal {
    /// Where the VM should run.
    pub place: Place,
    /// Memory policy; the host's default if absent.
    pub memory: Option<MemoryPolicy>,
}

impl Goal {
    /// Returns the goal of vCPUs and memory on these nodes.
    pub fn home(nodes: NodeSet) -> Goal {
        Goal {
            place: Place::Home(nodes),
            memory: None,
        }
    }
}

/// A decision for a VM at a time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Change {
    /// The decision takes effect at the agent's first sample at or after this time that contains the VM.
    pub at: Ns,
    /// Position of the VM in the scenario.
    pub vm: usize,
    /// The goal.
    pub goal: Goal,
}

/// All decisions of a run, sorted by time, then VM. A VM without a decision is unplaced.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Schedule {
    changes: Vec<Change>,
}

/// A text that is not a decision.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{text}` is not a decision about a VM of scenario {scenario}: {why}; write `12s NAME: unplaced`, or `0ns NAME: home 0-1, round-4k`"
)]
pub struct ScheduleError {
    text: String,
    scenario: String,
    why: LineError,
}

/// The mistake in a line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum LineError {
    #[error("the text has no time")]
    NoTime,
    #[error("the text has no `: `")]
    NoColon,
    #[error(transparent)]
    Time(#[from] ParseQuantityError),
    #[error("there is no VM `{0}`")]
    NoVm(String),
    #[error(transparent)]
    Goal(#[from] GoalError),
}

/// A text that is not a goal.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GoalError {
    /// A place without nodes.
    #[error("the text names no node")]
    NoNode,
    /// The nodes cannot be parsed.
    #[error(transparent)]
    Nodes(#[from] ParseSetError),
    /// The place is not `unplaced`, a home or memory.
    #[error("`{0}` is not a place")]
    NoPlace(String),
    /// The memory policy cannot be parsed.
    #[error(transparent)]
    Memory(#[from] MemoryPolicyError),
}

impl Schedule {
    /// Returns the decisions, sorted by time, then VM.
    pub fn changes(&self) -> &[Change] {
        &self.changes
    }

    /// Returns true if everything is decided at the beginning.
    pub fn is_static(&self) -> bool {
        self.changes.iter().all(|change| change.at == Ns::ZERO)
    }

    /// Returns the goal for a VM at a time.
    pub fn goal(&self, vm: usize, now: Ns) -> Goal {
        let mut latest_first = self.changes.iter().rev();
        let in_force = latest_first.find(|change| change.vm == vm && change.at <= now);
        in_force.map(|change| change.goal.clone()).unwrap_or_default()
    }

    /// Sets the goal of a VM from a time on, and drops later decisions about the VM.
    pub fn decide(&mut self, at: Ns, vm: usize, goal: Goal) {
        self.changes.retain(|change| change.vm != vm || change.at < at);
        if self.goal(vm, at) != goal {
            let after = |change: &Change| (change.at, change.vm) < (at, vm);
            let place = self.changes.partition_point(after);
            self.changes.insert(place, Change { at, vm, goal });
        }
    }

    /// Returns one line for each decision.
    pub fn lines(&self, scenario: &Scenario) -> Vec<String> {
        let line = |change: &Change| {
            let name = scenario.vms.get(change.vm).map_or("?", |vm| &vm.name);
            format!("{} {name}: {}", change.at, change.goal)
        };
        self.changes.iter().map(line).collect()
    }

    /// Parses the lines of [`Schedule::lines`].
    ///
    /// # Errors
    /// The first line that is not a decision, and why.
    pub fn read(lines: &[String], scenario: &Scenario) -> Result<Schedule, ScheduleError> {
        let mut schedule = Schedule::default();
        for line in lines {
            let (at, vm, goal) = read_line(line, scenario).map_err(|why| ScheduleError {
                text: line.clone(),
                scenario: scenario.name.clone(),
                why,
            })?;
            schedule.decide(at, vm, goal);
        }
        Ok(schedule)
    }
}

fn read_line(line: &str, scenario: &Scenario) -> Result<(Ns, usize, Goal), LineError> {
    let (at, rest) = line.split_once(' ').ok_or(LineError::NoTime)?;
    let (name, goal) = rest.rsplit_once(": ").ok_or(LineError::NoColon)?;
    let at: Ns = at.parse()?;
    let known = scenario.vms.iter().position(|vm| vm.name == name);
    let vm = known.ok_or_else(|| LineError::NoVm(name.to_owned()))?;
    Ok((at, vm, goal.parse()?))
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Place::Unplaced => f.write_str("unplaced")?,
            Place::Home(nodes) => write!(f, "home {nodes}")?,
            Place::Memory(nodes) => write!(f, "memory {nodes}")?,
        }
        self.memory.map_or(Ok(()), |policy| write!(f, ", {policy}"))
    }
}

impl FromStr for Goal {
    type Err = GoalError;
    fn from_str(text: &str) -> Result<Goal, GoalError> {
        let (place, memory) = match text.split_once(", ") {
            Some((place, memory)) => (place, Some(memory)),
            None => (text, None),
        };
        let nodes = |text: &str| match text.parse::<NodeSet>() {
            Ok(nodes) if nodes.is_empty() => Err(GoalError::NoNode),
            nodes => Ok(nodes?),
        };
        let place = match place.split_once(' ') {
            // Up to 0.2.0 the name of `unplaced` was `free`.
            None if ["unplaced", "free"].contains(&place) => Place::Unplaced,
            Some(("home", list)) => Place::Home(nodes(list)?),
            Some(("memory", list)) => Place::Memory(nodes(list)?),
            _ => return Err(GoalError::NoPlace(place.to_owned())),
        };
        let memory = memory.map(str::parse).transpose()?;
        Ok(Goal { place, memory })
    }
}

#[cfg(test)]
mod tests {
    use homenode_twin::VmSpec;
    use homenode_units::{Bytes, NodeId};

    use super::*;

    fn scenario() -> Scenario {
        let vm = |name: &str| VmSpec::new(name, 4, Bytes::from_gib(2), "cg.B");
        Scenario::of("two", vec![vm("a"), vm("b: c d")])
    }

    fn home(node: u16) -> Goal {
        Goal::home(NodeSet::one(NodeId(node)))
    }

    #[test]
    fn a_goal_holds_until_the_next() {
        let mut schedule = Schedule::default();
        let at = Ns::from_secs;
        schedule.decide(at(5), 1, home(1));
        schedule.decide(at(0), 0, home(0));
        schedule.decide(at(9), 1, Goal::default());
        assert_eq!(schedule.goal(1, at(4)), Goal::default());
        assert_eq!(schedule.goal(1, at(5)), home(1));
        assert_eq!(schedule.goal(1, at(9)), Goal::default());
        assert_eq!(schedule.goal(0, at(100)), home(0));
        // An earlier decision replaces later ones.
        schedule.decide(at(2), 1, home(2));
        assert_eq!(schedule.goal(1, at(9)), home(2));
        // A decision that equals the goal in force adds nothing.
        schedule.decide(at(3), 1, home(2));
        assert_eq!(schedule.changes().len(), 2);
    }

    #[test]
    fn what_is_written_is_read() {
        let mut schedule = Schedule::default();
        schedule.decide(Ns(0), 0, home(0));
        schedule.decide(Ns(12_345_678_901), 1, home(1));
        let spread = Goal {
            place: Place::Memory("0-2,5".parse().unwrap()),
            memory: Some("round-4k+carrefour".parse().unwrap()),
        };
        schedule.decide(Ns::from_secs(7), 1, spread);
        schedule.decide(Ns::from_secs(90), 0, Goal::default());
        let lines = schedule.lines(&scenario());
        assert_eq!(
            Schedule::read(&lines, &scenario()).unwrap(),
            schedule,
            "{lines:?}"
        );
        let read = |text: &str| Schedule::read(&[text.to_owned()], &scenario()).unwrap();
        assert_eq!(read("1s a: free"), read("1s a: unplaced"));
    }

    #[test]
    fn a_bad_line_says_why() {
        for (line, why) in [
            ("nonsense", "the text has no time"),
            ("1s a unplaced", "the text has no `: `"),
            ("1s x: unplaced", "there is no VM `x`"),
            ("1s a: home", "`home` is not a place"),
            ("1s a: home 0-", "0-"),
            ("1s a: home 0, anywhere", "memory policy"),
            ("soon a: unplaced", "soon"),
        ] {
            let error = Schedule::read(&[line.to_owned()], &scenario())
                .unwrap_err()
                .to_string();
            assert!(error.contains(why), "{line}: {error}");
        }
    }
}
