//! Experiments: each decides one claim.
//!
//! An experiment is two functions: which runs it needs, and what it makes of their outcomes. Between the two all runs of all
//! experiments are made, the same run once. Set-ups that the publication leaves open are chosen in the experiment's text
//! before anything is run, and what other choices would have given is a table of its decision.

use std::collections::BTreeSet;

use crate::claims::{self, Claim, Kind};
use crate::figure::Figure;
use crate::run::Run;
use crate::verdict::{Judgement, Measured, Verdict};
use crate::work::Outcomes;

/// What decides a claim.
pub trait Decides: Sync {
    /// The claim that it decides.
    fn claim(&self) -> &str;
    /// What must be run.
    fn runs(&self) -> Vec<Run>;
    /// What comes of it.
    ///
    /// # Errors
    /// What is missing, in a sentence.
    fn decide(&self, outcomes: &Outcomes) -> Result<Decision, String>;
}

/// An experiment in code: what no file can say.
#[derive(Clone, Copy)]
pub struct Experiment {
    /// The claim that it decides.
    pub claim: &'static str,
    /// What must be run.
    pub runs: fn() -> Vec<Run>,
    /// What comes of it; in an error, what is missing.
    pub decide: fn(&Outcomes) -> Result<Decision, String>,
}

impl Decides for Experiment {
    fn claim(&self) -> &str {
        self.claim
    }

    fn runs(&self) -> Vec<Run> {
        (self.runs)()
    }

    fn decide(&self, outcomes: &Outcomes) -> Result<Decision, String> {
        (self.decide)(outcomes)
    }
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

/// What was not decided, and why.
pub(crate) fn undecided(claim: Claim, verdict: Verdict, reason: String) -> Reproduced {
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

/// Calibrated is what has an input among its own values, or ran a profile that says it was calibrated to this claim.
pub(crate) fn kind(claim: &Claim, measured: &Measured, fitted: &BTreeSet<String>) -> Kind {
    if !measured.inputs.is_empty() || fitted.contains(&claim.id) {
        Kind::Calibrated
    } else {
        Kind::Predicted
    }
}

/// The claims that profiles of these runs say they were calibrated to.
pub(crate) fn fitted_to(runs: &[Run]) -> BTreeSet<String> {
    let vms = runs.iter().flat_map(|run| {
        let named = run.scenario.vms.iter().map(|vm| vm.workload.as_str());
        let all = named.chain(
            run.scenario
                .vms
                .iter()
                .flat_map(|vm| vm.then.iter().map(|next| next.workload.as_str())),
        );
        all.map(move |name| (run, name))
    });
    let of = |(run, name): (&Run, &str)| {
        let own = run
            .scenario
            .workloads
            .iter()
            .find(|own| own.name == name)
            .cloned();
        let workload = own.or_else(|| homenode_twin::workload::builtin(name));
        workload.map_or(Vec::new(), |workload| workload.calibrated_to)
    };
    vms.flat_map(of).collect()
}

/// Whether a claim rests on profiles that were fitted to another one of the same paper.
pub(crate) fn rests_on_own_paper(claim: &Claim, fitted: &BTreeSet<String>) -> bool {
    let mut others = fitted
        .iter()
        .filter(|id| **id != claim.id)
        .filter_map(|id| claims::named(id));
    others.any(|other| other.source == claim.source)
}

/// The kind of a claim as a whole: that of most of its values, of as many the less worthy one. Where every value was an input,
/// the model cannot disagree.
pub(crate) fn kind_of_all(judgement: &Judgement) -> Kind {
    let kinds = || {
        judgement
            .parts
            .iter()
            .filter(|part| !part.input)
            .map(|part| part.kind)
    };
    let most = Kind::ALL
        .into_iter()
        .max_by_key(|kind| kinds().filter(|other| other == kind).count());
    most.filter(|_| kinds().next().is_some())
        .unwrap_or(Kind::ByConstruction)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::judge;

    #[test]
    fn a_result_is_calibrated_if_a_profile_of_its_runs_says_so() {
        use homenode_twin::{Scenario, VmSpec};
        let mut workload = homenode_twin::workload::builtin("cg.B").unwrap();
        workload.name = "own".into();
        let run = |workload: &homenode_twin::Workload| {
            let vm = VmSpec::new("a", 1, homenode_units::Bytes::from_gib(1), "own");
            let scenario = Scenario::of("one", vec![vm]).with_workload(workload.clone());
            Run::to_end("r910", scenario, homenode_control::PolicySet::Default, 1)
        };
        let claim = crate::claims::named("tavo.npb").unwrap();
        let kind = |workload: &homenode_twin::Workload, measured: &Measured| {
            let kind = super::kind(&claim, measured, &fitted_to(&[run(workload)]));
            kind_of_all(&judge(&claim, measured, kind))
        };
        let mut measured = Measured::default();
        assert_eq!(kind(&workload, &measured), Kind::Predicted);
        workload.calibrated_to = vec!["policies.imbalance".into()];
        assert_eq!(kind(&workload, &measured), Kind::Predicted);
        workload.calibrated_to = vec!["tavo.npb".into()];
        assert_eq!(kind(&workload, &measured), Kind::Calibrated);
        // Of the same paper, and so marked, or of another.
        let own_paper = |to: &str| {
            workload.calibrated_to = vec![to.to_owned()];
            rests_on_own_paper(&claim, &fitted_to(&[run(&workload)]))
        };
        assert_eq!(
            ["tavo.npb", "tavo.spec", "policies.imbalance"].map(own_paper),
            [false, true, false]
        );
        let mut workload = homenode_twin::workload::builtin("cg.B").unwrap();
        workload.name = "own".into();
        workload.calibrated_to = vec!["tavo.npb".into()];
        measured.inputs = vec!["ep".into(), "cg".into()];
        assert_eq!(kind(&workload, &measured), Kind::ByConstruction);
    }
}
