//! Requests that commands send to a running agent.

use std::path::Path;

use anyhow::Context as _;
use homenode_api::answer::Vms;
use homenode_api::{Answer, AskError, Request, ask, named};

/// Sends a request to the agent and returns its answer.
///
/// # Errors
/// No agent, or the error that it returned.
pub(crate) fn ask_agent<A: TryFrom<Answer, Error = Answer>>(
    state: &Path,
    request: &Request,
) -> anyhow::Result<A> {
    ask(state, request)?.with_context(|| {
        format!(
            "no agent runs here (nothing at {}); start one with `homenode run`",
            state.display()
        )
    })
}

/// Returns the agent's view of all its VMs, or of one.
///
/// # Errors
/// No agent, or no such VM.
pub(crate) fn vms(state: &Path, name: Option<&str>) -> anyhow::Result<Vms> {
    let Vms { vms } = ask_agent(state, &Request::Vms)?;
    let Some(name) = name else {
        return Ok(Vms { vms });
    };
    let found = named(&vms, name).map_err(AskError::Agent)?.clone();
    Ok(Vms { vms: vec![found] })
}
