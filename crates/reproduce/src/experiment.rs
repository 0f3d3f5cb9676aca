//! Experiments: each decides one claim.
//!
//! An experiment is two functions: which runs it needs, and what it makes of their outcomes. Between the two all runs of all
//! experiments are made, the same run once. Set-ups that the publication leaves open are chosen in the experiment's text
//! before anything is run, and what other choices would have given is a table of its decision.

use crate::claims::Claim;
use crate::experiments;
use crate::figure::Figure;
use crate::run::Run;
use crate::verdict::{Judgement, Kind, Measured, Verdict, judge};
use crate::work::Outcomes;

/// An experiment.
#[derive(Clone, Copy)]
pub struct Experiment {
    /// The claim that it decides.
    pub claim: &'static str,
    /// What must be run.
    pub runs: fn() -> Vec<Run>,
    /// What comes of it; in an error, what is missing.
    pub decide: fn(&Outcomes) -> Result<Decision, String>,
}

/// What an experiment found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    /// What was measured, for the verdict.
    pub measured: Measured,
    /// How it was set up, and why so: paragraphs.
    pub set_up: Vec<String>,
    /// Results in full, and what other choices would have given.
    pub tables: Vec<Table>,
    /// The figures.
    pub figures: Vec<Figure>,
    /// Why what misses does so; left out where the claim holds.
    pub why: Vec<String>,
    /// How much was put in, where neither inputs nor profiles show it; `None` where they do.
    pub kind: Option<Kind>,
    /// Whether time was measured on the machine that this runs on: then no two runs are the same.
    pub measured_here: bool,
}

/// A table of the document.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Table {
    /// What it shows, in a sentence.
    pub title: String,
    /// Column heads.
    pub header: Vec<String>,
    /// Cells.
    pub rows: Vec<Vec<String>>,
}

/// A claim and what came of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Reproduced {
    /// The claim.
    pub claim: Claim,
    /// What was found; `None` where there was no experiment.
    pub decision: Option<Decision>,
    /// The verdict and its parts.
    pub judgement: Judgement,
    /// How much was put in, or would be.
    pub kind: Kind,
    /// Why there is no decision.
    pub reason: Option<String>,
}

/// The experiment that decides a claim, if there is one.
pub fn of(claim: &Claim) -> Option<&'static Experiment> {
    experiments::ALL
        .iter()
        .find(|experiment| experiment.claim == claim.id)
}

/// Decides a claim.
pub fn decide(claim: Claim, outcomes: &Outcomes) -> Reproduced {
    let Some(experiment) = of(&claim) else {
        let outside = experiments::NOT_MODELLED.iter().find(|(id, _)| *id == claim.id);
        let verdict = outside.map_or(Verdict::Pending, |_| Verdict::NotModelled);
        let reason = outside.map_or("there is no experiment for it yet", |(_, why)| why);
        return undecided(claim, verdict, reason.to_owned());
    };
    match (experiment.decide)(outcomes) {
        Ok(mut decision) => {
            let judgement = judge(&claim, &decision.measured);
            if judgement.verdict == Verdict::Holds {
                decision.why.clear();
            }
            let shown = || kind(&claim, &decision.measured, &judgement, &(experiment.runs)());
            let kind = decision.kind.unwrap_or_else(shown);
            Reproduced {
                claim,
                decision: Some(decision),
                judgement,
                kind,
                reason: None,
            }
        }
        Err(missing) => undecided(claim, Verdict::Pending, missing),
    }
}

fn undecided(claim: Claim, verdict: Verdict, reason: String) -> Reproduced {
    let kind = if claim.inputs.is_empty() {
        Kind::Predicted
    } else {
        Kind::Calibrated
    };
    Reproduced {
        claim,
        decision: None,
        judgement: Judgement {
            verdict,
            parts: Vec::new(),
        },
        kind,
        reason: Some(reason),
    }
}

/// Calibrated is what has an input among its own values, or ran a profile that says it was calibrated to this claim. Where
/// every value was an input the model cannot disagree.
fn kind(claim: &Claim, measured: &Measured, judgement: &Judgement, runs: &[Run]) -> Kind {
    if !judgement.parts.is_empty() && judgement.parts.iter().all(|part| part.input) {
        return Kind::ByConstruction;
    }
    let calibrated = |run: &Run| {
        run.scenario.vms.iter().any(|vm| {
            let own = run
                .scenario
                .workloads
                .iter()
                .find(|own| own.name == vm.workload)
                .cloned();
            let workload = own.or_else(|| homenode_twin::workload::builtin(&vm.workload));
            workload.is_some_and(|workload| workload.calibrated_to.contains(&claim.id))
        })
    };
    if !measured.inputs.is_empty() || runs.iter().any(calibrated) {
        Kind::Calibrated
    } else {
        Kind::Predicted
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn claim(id: &str) -> Claim {
        crate::claims::all()
            .into_iter()
            .find(|claim| claim.id == id)
            .unwrap()
    }

    #[test]
    fn every_experiment_and_exclusion_names_one_claim() {
        let known: BTreeSet<String> = crate::claims::all().into_iter().map(|claim| claim.id).collect();
        let named: Vec<&str> = experiments::ALL
            .iter()
            .map(|experiment| experiment.claim)
            .chain(experiments::NOT_MODELLED.iter().map(|(id, _)| *id))
            .collect();
        assert!(named.iter().all(|id| known.contains(*id)), "{named:?}");
        assert_eq!(named.iter().collect::<BTreeSet<_>>().len(), named.len());
    }

    #[test]
    fn claims_without_an_experiment_say_so() {
        let new = Claim {
            id: "nobody.decides-it".into(),
            ..claim("xpv.internals")
        };
        let pending = decide(new, &Outcomes::default());
        assert_eq!(pending.judgement.verdict, Verdict::Pending);
        assert!(pending.reason.unwrap().contains("no experiment"));
        let outside = decide(claim("xpv.internals"), &Outcomes::default());
        assert_eq!(outside.judgement.verdict, Verdict::NotModelled);
    }

    #[test]
    fn a_result_is_calibrated_if_a_profile_of_its_runs_says_so() {
        use homenode_twin::{Scenario, VmSpec};
        let mut workload = homenode_twin::workload::builtin("cg.B").unwrap();
        workload.name = "own".into();
        let run = |workload: &homenode_twin::Workload| {
            let vm = VmSpec::new("a", 1, homenode_units::Bytes::from_gib(1), "own");
            let scenario = Scenario::of("one", vec![vm]).with_workload(workload.clone());
            Run::to_end("r910", scenario, homenode_control::Policies::Default, 1)
        };
        let claim = claim("tavo.npb");
        let kind = |workload: &homenode_twin::Workload, measured: &Measured| {
            super::kind(&claim, measured, &judge(&claim, measured), &[run(workload)])
        };
        let mut measured = Measured::default();
        assert_eq!(kind(&workload, &measured), Kind::Predicted);
        workload.calibrated_to = vec!["policies.imbalance".into()];
        assert_eq!(kind(&workload, &measured), Kind::Predicted);
        workload.calibrated_to = vec!["tavo.npb".into()];
        assert_eq!(kind(&workload, &measured), Kind::Calibrated);
        measured.inputs = vec!["ep".into(), "cg".into()];
        assert_eq!(kind(&workload, &measured), Kind::ByConstruction);
    }
}
