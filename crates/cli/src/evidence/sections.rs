//! The sections of a run: which, for how long, and one after the other.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context as _;
use homenode_evidence::measure::{Bench, Permits, measure, minutes};
use homenode_evidence::{Outcome, Report, Topic};
use homenode_machine::Machine;
use homenode_reproduce::jobs::Progress;
use homenode_screens::printable::OneLine;
use homenode_units::Candidates;

use super::EvidenceArgs;
use super::files::keep;
use super::permits::OwnPermits;
use crate::calibrate::kernel_command;
use crate::print::table;

/// A part of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// A section.
    Section(Topic),
    /// The agent on and off.
    Crossover,
}

impl Part {
    const CROSSOVER: &'static str = "crossover";

    fn name(self) -> &'static str {
        match self {
            Part::Section(topic) => topic.name(),
            Part::Crossover => Part::CROSSOVER,
        }
    }

    /// Returns the names of all parts.
    pub(super) fn names() -> impl Iterator<Item = &'static str> {
        Topic::ALL.into_iter().map(Topic::name).chain([Part::CROSSOVER])
    }
}

/// A name that no part has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NoPart(Candidates);

impl fmt::Display for NoPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.0.names.join(", ");
        match self.0.near {
            true => write!(f, "did you mean `{}`? There are {all}", self.0.names[0]),
            false => write!(f, "there are {all}"),
        }
    }
}

impl std::error::Error for NoPart {}

impl FromStr for Part {
    type Err = NoPart;

    fn from_str(text: &str) -> Result<Part, NoPart> {
        let parts = Topic::ALL.into_iter().map(Part::Section).chain([Part::Crossover]);
        let found = parts.into_iter().find(|part| part.name() == text);
        found.ok_or_else(|| NoPart(Candidates::of(text, Part::names())))
    }
}

/// Prints the sections, what each answers, and its share of the time.
pub(super) fn list() {
    let rows = Topic::ALL.into_iter().map(|topic| {
        vec![
            topic.name().to_owned(),
            format!("{:.0} s", 60.0 * minutes(topic)),
            topic.question().to_owned(),
        ]
    });
    let crossover = vec![
        Part::CROSSOVER.to_owned(),
        "51 min".to_owned(),
        "Are VMs faster while the agent acts? (51 minutes or more)".to_owned(),
    ];
    say!(
        "{}",
        table(&["part", "takes", "answers"], rows.chain([crossover]))
    );
}

/// The sections of a run that are still to be measured.
pub(super) struct Sections {
    left: Vec<Topic>,
    /// The time of each topic for each minute of its usual time.
    scale: f64,
}

impl Sections {
    /// Plans these topics for `all` time. Those that are measured already are left out; one that was not possible is tried again.
    pub(super) fn of(topics: &[Topic], all: Duration, before: &Report) -> Sections {
        let usual: f64 = topics.iter().map(|topic| 60.0 * minutes(*topic)).sum();
        let is_measured = |topic: &Topic| {
            let section = before.section(*topic);
            section.is_some_and(|section| matches!(section.outcome, Outcome::Measured { .. }))
        };
        Sections {
            left: topics
                .iter()
                .copied()
                .filter(|topic| !is_measured(topic))
                .collect(),
            scale: all.as_secs_f64() / usual.max(1.0),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.left.is_empty()
    }

    /// Says what will happen, and how long it takes.
    pub(super) fn announce(&self) {
        let names: Vec<&str> = self.left.iter().map(|topic| topic.name()).collect();
        let all: f64 = self.left.iter().map(|topic| self.seconds(*topic)).sum();
        say!(
            "{} sections in about {:.0} minutes: {}. Programs of this command load CPUs and memory meanwhile; they end with \
             it, and no setting is changed",
            names.len(),
            (all / 60.0).ceil(),
            names.join(", ")
        );
    }

    fn seconds(&self, topic: Topic) -> f64 {
        60.0 * minutes(topic) * self.scale
    }

    /// Measures them, and keeps each in the report.
    ///
    /// # Errors
    /// Files cannot be written.
    pub(super) fn run(
        &self,
        args: &EvidenceArgs,
        machine: &Machine,
        report: &mut Report,
        directory: &Path,
    ) -> anyhow::Result<()> {
        let program =
            std::env::current_exe().context("cannot find this program's own file, which it runs")?;
        let spawn = kernel_command(&program);
        let mut permits = OwnPermits::of(args.agent.dir());
        let progress = Progress::new("");
        let all: f64 = self.left.iter().map(|topic| self.seconds(*topic)).sum();
        let mut gone = 0.0;
        for (at, topic) in self.left.iter().copied().enumerate() {
            let seconds = self.seconds(topic);
            let mut told = |what: &str, done: f64| {
                let text = format!("[{}/{}] {topic}: {}", at + 1, self.left.len(), OneLine(what));
                progress.at(&text, (gone + seconds * done) / all);
            };
            let section = measure(
                topic,
                &mut Bench {
                    machine,
                    spawn: &spawn,
                    program: program.clone(),
                    dir: directory.to_owned(),
                    budget: Duration::from_secs_f64(seconds),
                    kernel: args.kernel.clone(),
                    agent: permits.as_mut().map(|permits| permits as &mut dyn Permits),
                    told: &mut told,
                },
            );
            gone += seconds;
            *report = report.clone().with_section(section);
            keep(directory, report)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_evidence::report::HostFacts;
    use homenode_evidence::{Bearing, Section, With};

    #[test]
    fn a_name_is_a_part_or_the_nearest_one_is_said() {
        for name in Part::names() {
            assert_eq!(name.parse::<Part>().unwrap().name(), name);
        }
        let error = "contentoin".parse::<Part>().unwrap_err().to_string();
        assert!(error.contains("did you mean `contention`?"), "{error}");
    }

    #[test]
    fn what_is_measured_is_kept_and_what_was_not_possible_is_tried_again() {
        let done = Section::measured(
            Topic::Numad,
            With::Processes,
            "",
            "",
            Bearing::Neither,
            Vec::new(),
        );
        let failed = Section::not_possible(Topic::Moving, "", "one node", None);
        let report = Report::begun("1", "c", HostFacts::default())
            .with_section(done)
            .with_section(failed);
        let sections = Sections::of(&Topic::ALL, Duration::from_secs(600), &report);
        assert!(!sections.left.contains(&Topic::Numad) && sections.left.contains(&Topic::Moving));
        // Twenty minutes of usual time in ten: what is left takes half of its own.
        assert!((sections.seconds(Topic::Numad) - 30.0 * minutes(Topic::Numad)).abs() < 1e-6);
    }
}
