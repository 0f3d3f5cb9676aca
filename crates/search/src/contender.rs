//! Who is compared: sets of policies, policies from outside, and the kernel's own AutoNUMA.

use std::fmt;
use std::str::FromStr;

use homenode_control::{Config, Control, Epoch, Event, PolicySet};
use homenode_twin::Twin;
use homenode_units::{Candidates, Ns};

use crate::program::{EXEC, Program};
use crate::run::{Run, run_planned, run_watched};
use homenode_twin::Setup;

/// Somebody to be compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Contender {
    /// A set of policies.
    PolicySet(PolicySet),
    /// No agent: the host's kernel moves pages and threads by itself (numa_balancing).
    AutoNuma,
    /// A program from outside in the place of policies.
    Program(Program),
}

/// Name of the kernel's AutoNUMA.
const AUTONUMA: &str = "autonuma";

impl Contender {
    /// Nobody: the kernel's scheduler alone, beside which all others are.
    pub const DEFAULT: Contender = Contender::PolicySet(PolicySet::Default);
    /// The product.
    pub const OURS: Contender = Contender::PolicySet(PolicySet::Homenode);

    /// All but `default`, and `memory`, which places nothing: homes are what operators chose.
    pub fn all() -> Vec<Contender> {
        let mut all: Vec<Contender> = PolicySet::ALL
            .into_iter()
            .filter(|policies| !matches!(policies, PolicySet::Default | PolicySet::Memory))
            .map(Contender::PolicySet)
            .collect();
        all.insert(1, Contender::AutoNuma);
        all
    }

    /// Name in tables and files.
    pub fn name(&self) -> &str {
        match self {
            Contender::PolicySet(policies) => policies.name(),
            Contender::AutoNuma => AUTONUMA,
            Contender::Program(program) => program.name(),
        }
    }

    /// The same; a program then has so long for each answer.
    #[must_use]
    pub fn within(self, answer_max: Ns) -> Contender {
        match self {
            Contender::Program(program) => Contender::Program(program.within(answer_max)),
            other => other,
        }
    }

    /// Runs a scenario to its end; see [`crate::run::run`]. `config` says all but which policies act.
    ///
    /// # Errors
    /// See [`crate::run::run`]; a program that cannot be started, or fails.
    pub fn run(
        &self,
        setup: &Setup,
        config: &Config,
        mut look: impl FnMut(&Twin),
        mut told: impl FnMut(&Event),
    ) -> anyhow::Result<Run> {
        let look = |twin: &Twin| {
            look(twin);
            Ok(())
        };
        self.run_watched(setup, config, look, |epoch, _| {
            epoch.events.iter().for_each(&mut told);
        })
    }

    /// The same, where an error of `look` ends the run; `watch` is called with each epoch, and with the loop after it.
    ///
    /// # Errors
    /// As [`Contender::run`], and those of `look`.
    pub fn run_watched(
        &self,
        setup: &Setup,
        config: &Config,
        look: impl FnMut(&Twin) -> anyhow::Result<()>,
        watch: impl FnMut(&Epoch, &Control),
    ) -> anyhow::Result<Run> {
        let with = |policies| Config {
            policies,
            ..config.clone()
        };
        match self {
            Contender::PolicySet(policies) => run_watched(setup, with(*policies), look, watch),
            Contender::Program(program) => {
                let planner = Box::new(program.start()?);
                run_planned(setup, with(PolicySet::Default), planner, look, watch)
            }
            Contender::AutoNuma => {
                let mut scenario = setup.scenario.clone();
                // Xen's kernel has none: nothing happens there.
                if scenario.balances().is_some() {
                    scenario = scenario.with_numa_balancing(true);
                }
                let setup = Setup {
                    scenario,
                    ..setup.clone()
                };
                let run = run_watched(&setup, with(PolicySet::Default), look, watch)?;
                Ok(Run {
                    policy: AUTONUMA.to_owned(),
                    ..run
                })
            }
        }
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Contender {
    type Err = String;
    fn from_str(text: &str) -> Result<Contender, String> {
        if text == AUTONUMA {
            return Ok(Contender::AutoNuma);
        }
        if text.starts_with(EXEC) {
            return text.parse().map(Contender::Program);
        }
        text.parse().map(Contender::PolicySet).map_err(|_: String| {
            let known = PolicySet::ALL.map(PolicySet::name).into_iter().chain([AUTONUMA]);
            format!("no policies are named `{text}`{}", Candidates::of(text, known))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for contender in Contender::all().into_iter().chain([Contender::DEFAULT]) {
            assert_eq!(contender.name().parse(), Ok(contender));
        }
        assert!(Contender::all().contains(&Contender::OURS));
        let program: Contender = "exec:python3  mine.py".parse().unwrap();
        assert_eq!(program.name(), "exec:python3 mine.py");
        assert!(
            "exec: "
                .parse::<Contender>()
                .unwrap_err()
                .contains("names no program")
        );
        let error = "homenod".parse::<Contender>().unwrap_err();
        assert!(error.contains("did you mean `homenode`?"), "{error}");
        assert!("autonum".parse::<Contender>().unwrap_err().contains("autonuma"));
    }
}
