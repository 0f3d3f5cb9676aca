//! Finds the experiment for a claim, and decides the claim.

use crate::claims::Claim;
use crate::design::Design;
use crate::experiment::{Decision, Reproduced, fitted_to, kind, kind_of_all, rests_on_own_paper, undecided};
use crate::experiments;
use crate::verdict::{Verdict, judge, unknown_name, unmeasured};
use crate::work::Outcomes;

/// Returns the experiment that decides a claim, if there is one.
pub(crate) fn of(claim: &Claim) -> Option<&'static Design> {
    experiments::all().find(|experiment| experiment.claim() == claim.id)
}

/// Decides a claim from the outcomes of its experiment's runs.
pub(crate) fn decide(claim: Claim, outcomes: &Outcomes) -> Reproduced {
    let Some(experiment) = of(&claim) else {
        let outside = experiments::NOT_MODELLED.iter().find(|(id, _)| *id == claim.id);
        let verdict = outside.map_or(Verdict::Pending, |_| Verdict::NotModelled);
        let reason = outside.map_or("there is no experiment for it yet", |(_, why)| why);
        return undecided(claim, verdict, reason.to_owned());
    };
    match experiment.decide(outcomes) {
        Ok(decision) => judged(claim, experiment, decision),
        Err(missing) => undecided(claim, Verdict::Pending, missing.to_string()),
    }
}

/// Judges a claim, given its experiment's decision.
pub(crate) fn judged(claim: Claim, experiment: &Design, mut decision: Decision) -> Reproduced {
    if let Some(name) = unmeasured(&claim, &decision.measured) {
        let said = format!("its experiment does not measure `{name}`");
        return undecided(claim, Verdict::Pending, said);
    }
    let fitted = fitted_to(&experiment.runs());
    let kind = kind(&claim, &decision.measured, &fitted);
    let mut judgement = judge(&claim, &decision.measured, kind);
    let same_paper = rests_on_own_paper(&claim, &fitted);
    for part in &mut judgement.parts {
        part.same_paper = same_paper && !part.input;
    }
    if let Some(name) = unknown_name(&claim, &judgement) {
        let said =
            format!("the claims file has an entry for `{name}`, but its experiment checks no such claim");
        return undecided(claim, Verdict::Pending, said);
    }
    if judgement.verdict == Verdict::Holds {
        decision.why.clear();
    }
    let kind = kind_of_all(&judgement);
    Reproduced {
        claim,
        decision: Some(decision),
        judgement,
        kind,
        reason: None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::claims::named;

    #[test]
    fn every_experiment_and_exclusion_names_one_claim() {
        let known: BTreeSet<String> = crate::claims::all().into_iter().map(|claim| claim.id).collect();
        let named: Vec<&str> = experiments::all()
            .map(Design::claim)
            .chain(experiments::NOT_MODELLED.iter().map(|(id, _)| *id))
            .collect();
        assert!(named.iter().all(|id| known.contains(*id)), "{named:?}");
        assert_eq!(named.iter().collect::<BTreeSet<_>>().len(), named.len());
    }

    #[test]
    fn claims_without_an_experiment_say_so() {
        let new = Claim {
            id: "undecided.claim".into(),
            ..named("xpv.internals").unwrap()
        };
        let pending = decide(new, &Outcomes::default());
        assert_eq!(pending.judgement.verdict, Verdict::Pending);
        assert!(pending.reason.unwrap().contains("no experiment"));
        let outside = decide(named("xpv.internals").unwrap(), &Outcomes::default());
        assert_eq!(outside.judgement.verdict, Verdict::NotModelled);
    }
}
