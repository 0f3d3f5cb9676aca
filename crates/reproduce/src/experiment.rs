//! The result of an experiment: a decision and, if it has a claim, a verdict.
//!
//! All runs of all experiments are made first; identical runs are made once. If the publication leaves a set-up open, the
//! experiment's text chooses one before any run, and the decision has a table of the results with other choices.

use std::collections::BTreeSet;

use crate::claims::{self, Claim, Kind};
use crate::figure::Figure;
use crate::run::Run;
use crate::verdict::{Judgement, Measured, Verdict};

/// The decision: result of an experiment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    /// Measured values, from which the verdict follows.
    pub measured: Measured,
    /// Paragraphs on the set-up and its reasons.
    pub set_up: Vec<String>,
    /// Tables of all results, and of the results with other choices.
    pub tables: Vec<Table>,
    /// The figures.
    pub figures: Vec<Figure>,
    /// Reasons why values miss; dropped if the claim holds.
    pub why: Vec<String>,
    /// Whether time was measured on the current machine, so that no two runs are equal.
    pub measured_here: bool,
}

/// A table of the document.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Table {
    /// The table's subject, in a sentence.
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
    /// The verdict, and the judgement of each value.
    pub judgement: Judgement,
    /// How much was put into the model, or would be.
    pub kind: Kind,
    /// Why the claim was not decided.
    pub reason: Option<String>,
}

impl Reproduced {
    /// Returns true if time was measured on the machine that ran the experiment, so that no two runs are equal.
    pub fn measured_here(&self) -> bool {
        self.decision
            .as_ref()
            .is_some_and(|decision| decision.measured_here)
    }
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

/// Returns `Calibrated` if a value was an input or a profile was calibrated to this claim, and otherwise `Predicted`.
pub(crate) fn kind(claim: &Claim, measured: &Measured, fitted: &BTreeSet<String>) -> Kind {
    if !measured.inputs.is_empty() || fitted.contains(&claim.id) {
        Kind::Calibrated
    } else {
        Kind::Predicted
    }
}

/// Returns the claims to which the profiles of these runs say they were calibrated.
pub(crate) fn fitted_to(runs: &[Run]) -> BTreeSet<String> {
    let scenarios = runs.iter().map(|run| &run.scenario);
    let workloads = scenarios.flat_map(|scenario| {
        let next = scenario
            .vms
            .iter()
            .flat_map(|vm| vm.then.iter().map(|next| &next.workload));
        let names = scenario.vms.iter().map(|vm| &vm.workload).chain(next);
        names.filter_map(|name| {
            let own = scenario.workloads.iter().find(|own| own.name == *name).cloned();
            own.or_else(|| homenode_twin::workload::builtin(name))
        })
    });
    workloads.flat_map(|workload| workload.calibrated_to).collect()
}

/// Returns true if a claim rests on profiles that were fitted to another claim of the same paper.
pub(crate) fn rests_on_own_paper(claim: &Claim, fitted: &BTreeSet<String>) -> bool {
    let others = fitted.iter().filter(|id| **id != claim.id);
    others
        .filter_map(|id| claims::named(id))
        .any(|other| other.source == claim.source)
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
        let claim = crate::claims::named("pml.wss-overhead").unwrap();
        let kind = |workload: &homenode_twin::Workload, measured: &Measured| {
            let kind = super::kind(&claim, measured, &fitted_to(&[run(workload)]));
            kind_of_all(&judge(&claim, measured, kind))
        };
        let mut measured = Measured::default();
        assert_eq!(kind(&workload, &measured), Kind::Predicted);
        workload.calibrated_to = vec!["policies.imbalance".into()];
        assert_eq!(kind(&workload, &measured), Kind::Predicted);
        workload.calibrated_to = vec!["pml.wss-overhead".into()];
        assert_eq!(kind(&workload, &measured), Kind::Calibrated);
        // The target is the claim itself, another claim of the same paper, or a claim of another paper.
        let own_paper = |to: &str| {
            workload.calibrated_to = vec![to.to_owned()];
            rests_on_own_paper(&claim, &fitted_to(&[run(&workload)]))
        };
        assert_eq!(
            ["pml.wss-overhead", "pml.live-migration", "policies.imbalance"].map(own_paper),
            [false, true, false]
        );
        let mut workload = homenode_twin::workload::builtin("cg.B").unwrap();
        workload.name = "own".into();
        workload.calibrated_to = vec!["pml.wss-overhead".into()];
        measured.inputs = ["hpl", "read", "sort", "write"].map(Into::into).to_vec();
        assert_eq!(kind(&workload, &measured), Kind::ByConstruction);
    }
}
