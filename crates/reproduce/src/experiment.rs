//! Experiments: each decides one claim.
//!
//! An experiment is two functions: one lists the runs it needs, the other turns their outcomes into a decision. In between,
//! all runs of all experiments are made, identical ones once. Set-ups that the publication leaves open are chosen in the
//! experiment's text before any run, and its decision has a table of the results of other choices.

use std::collections::BTreeSet;

use crate::claims::{self, Claim, Kind};
use crate::figure::Figure;
use crate::run::Run;
use crate::verdict::{Judgement, Measured, Verdict};
use crate::work::Outcomes;

/// Decides a claim.
pub trait Decides: Sync {
    /// Returns the claim that it decides.
    fn claim(&self) -> &str;
    /// Returns the required runs.
    fn runs(&self) -> Vec<Run>;
    /// Turns outcomes into a decision.
    ///
    /// # Errors
    /// A message about what is missing.
    fn decide(&self, outcomes: &Outcomes) -> Result<Decision, String>;
}

/// An experiment in code, for cases that files cannot express.
#[derive(Clone, Copy)]
pub struct Experiment {
    /// The claim that it decides.
    pub claim: &'static str,
    /// Returns the required runs.
    pub runs: fn() -> Vec<Run>,
    /// Turns outcomes into a decision, or says what is missing.
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

/// Result of an experiment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    /// Measured values, for the verdict.
    pub measured: Measured,
    /// The set-up and its reasons: paragraphs.
    pub set_up: Vec<String>,
    /// Results in full, and those of other choices.
    pub tables: Vec<Table>,
    /// The figures.
    pub figures: Vec<Figure>,
    /// Reasons for values that miss; dropped if the claim holds.
    pub why: Vec<String>,
    /// Whether time was measured on the current machine: then no two runs are equal.
    pub measured_here: bool,
}

/// A table of the document.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Table {
    /// Its subject, in a sentence.
    pub title: String,
    /// Column heads.
    pub header: Vec<String>,
    /// Cells.
    pub rows: Vec<Vec<String>>,
}

/// A claim and its result.
#[derive(Clone, Debug, PartialEq)]
pub struct Reproduced {
    /// The claim.
    pub claim: Claim,
    /// The decision; `None` if there was no experiment.
    pub decision: Option<Decision>,
    /// The verdict and its parts.
    pub judgement: Judgement,
    /// How much was put in, or would be.
    pub kind: Kind,
    /// Why there is no decision.
    pub reason: Option<String>,
}

/// Returns an undecided claim, with the reason.
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

/// Returns `Calibrated` if there are inputs among the values, or a profile was calibrated to this claim.
pub(crate) fn kind(claim: &Claim, measured: &Measured, fitted: &BTreeSet<String>) -> Kind {
    if !measured.inputs.is_empty() || fitted.contains(&claim.id) {
        Kind::Calibrated
    } else {
        Kind::Predicted
    }
}

/// Returns the claims that profiles of these runs state as their calibration targets.
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

/// Whether a claim rests on profiles fitted to another claim of the same paper.
pub(crate) fn rests_on_own_paper(claim: &Claim, fitted: &BTreeSet<String>) -> bool {
    let mut others = fitted
        .iter()
        .filter(|id| **id != claim.id)
        .filter_map(|id| claims::named(id));
    others.any(|other| other.source == claim.source)
}

/// Returns the kind of a claim as a whole: the most common one of its values, and in a tie the less worthy one. If every
/// value was an input, the model cannot disagree.
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
        // A target in the same paper, if marked as one, or in another.
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
