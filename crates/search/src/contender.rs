//! Who is compared: sets of policies, and the kernel's own AutoNUMA.

use std::fmt;
use std::str::FromStr;

use homenode_control::{Config, Event, PolicySet};
use homenode_twin::Twin;
use homenode_units::Candidates;

use crate::run::{Run, run};
use homenode_twin::Setup;

/// Somebody to be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contender {
    /// A set of policies.
    PolicySet(PolicySet),
    /// No agent: the host's kernel moves pages and threads by itself (numa_balancing).
    AutoNuma,
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
    pub fn name(self) -> &'static str {
        match self {
            Contender::PolicySet(policies) => policies.name(),
            Contender::AutoNuma => AUTONUMA,
        }
    }

    /// Runs a scenario to its end; see [`run`]. `config` says all but which policies act.
    ///
    /// # Errors
    /// See [`run`].
    pub fn run(
        self,
        setup: &Setup,
        config: &Config,
        look: impl FnMut(&Twin),
        told: impl FnMut(&Event),
    ) -> anyhow::Result<Run> {
        let with = |policies| Config {
            policies,
            ..config.clone()
        };
        match self {
            Contender::PolicySet(policies) => run(setup, with(policies), look, told),
            Contender::AutoNuma => {
                let setup = Setup {
                    scenario: setup.scenario.clone().with_autonuma(),
                    ..setup.clone()
                };
                let run = run(&setup, with(PolicySet::Default), look, told)?;
                Ok(Run {
                    policy: AUTONUMA,
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
        let error = "homenod".parse::<Contender>().unwrap_err();
        assert!(error.contains("did you mean `homenode`?"), "{error}");
        assert!("autonum".parse::<Contender>().unwrap_err().contains("autonuma"));
    }
}
