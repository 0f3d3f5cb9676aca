//! Answers about recommendations that wait for the operator.

use homenode_api::ApiError;
use homenode_api::answer::{Recommendation, Recommendations};
use homenode_control::{Control, NotThat};
use homenode_units::Ns;

use crate::wall_clock::WallClock;

/// Lists all recommendations that the loop remembers, open or not.
pub(crate) fn recommendations(control: &Control, clock: WallClock) -> Recommendations {
    let (now, all) = (now(control), control.recommendations());
    Recommendations {
        recommendations: all.into_iter().map(|one| told(one, clock, now)).collect(),
    }
}

/// Approves or rejects a recommendation.
///
/// # Errors
/// If there is no recommendation with this number, or it is not open.
pub(crate) fn judge(
    control: &mut Control,
    clock: WallClock,
    judge: impl FnOnce(&mut Control) -> Result<homenode_control::Recommendation, NotThat>,
) -> Result<Recommendation, ApiError> {
    let now = now(control);
    let judged = judge(control).map_err(|why| match why {
        NotThat::Unknown { id, open } => ApiError::NoSuchId {
            what: "open recommendation".into(),
            id,
            known: open,
        },
        NotThat::Replaced { .. } | NotThat::Over { .. } => ApiError::Conflict { why: why.to_string() },
    })?;
    Ok(told(&judged, clock, now))
}

fn now(control: &Control) -> Ns {
    control.sample().map_or(Ns::ZERO, |sample| sample.at)
}

fn told(one: &homenode_control::Recommendation, clock: WallClock, now: Ns) -> Recommendation {
    let action = &one.decision.action;
    Recommendation {
        id: one.id,
        time: clock.of(one.made_at, now),
        vm: one.name.clone(),
        vm_id: action.vm,
        policy: one.decision.policy.to_owned(),
        action: action.act.clone(),
        text: one.text.clone(),
        reason: one.decision.reason.clone(),
        gain: one.gain,
        together: one.together.clone(),
        expires: clock.of(one.expires_at, now),
        state: one.state,
    }
}
