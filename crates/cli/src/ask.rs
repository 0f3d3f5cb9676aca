//! What commands ask of a running agent.

use std::path::Path;

use anyhow::Context as _;
use homenode_api::answer::Vms;
use homenode_api::{Answer, ApiError, AskError, Request, ask};
use homenode_control::VmStatus;

/// Asks the agent.
///
/// # Errors
/// No agent, or its complaint.
pub fn ask_agent<A: TryFrom<Answer, Error = Answer>>(state: &Path, request: &Request) -> anyhow::Result<A> {
    ask(state, request)?.with_context(|| {
        format!(
            "no agent runs here (nothing at {}); start one with `homenode run`",
            state.display()
        )
    })
}

/// What the agent says of its VMs, or of one.
///
/// # Errors
/// No agent, or no such VM.
pub fn vms(state: &Path, name: Option<&str>) -> anyhow::Result<Vms> {
    let Vms { vms } = ask_agent(state, &Request::Vms)?;
    let Some(name) = name else {
        return Ok(Vms { vms });
    };
    let (found, others): (Vec<VmStatus>, Vec<VmStatus>) = vms.into_iter().partition(|vm| vm.name == name);
    if found.is_empty() {
        let error = ApiError::NoSuchVm {
            vm: name.to_owned(),
            running: others.into_iter().map(|vm| vm.name).collect(),
        };
        return Err(AskError::Agent(error).into());
    }
    Ok(Vms { vms: found })
}
