//! Reports of failed commands: a sentence on standard error, or with `--json` a one-line document there.

use std::process::ExitCode;

use homenode_api::document::document;
use homenode_api::{ApiError, AskError};
use homenode_screens::printable;
use schemars::JsonSchema;
use serde::Serialize;

use crate::is_about_input;

/// The report of a failed command.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Complaint<'a> {
    kind: Kind,
    /// The failure, and what to do about it.
    message: String,
    /// The command's exit status: 2 if its input is wrong, else 1.
    exit_status: u8,
    /// The agent's error, if the command asked the agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    agent: Option<&'a ApiError>,
}

/// Kinds of failures.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    /// The command line cannot be parsed.
    Usage,
    /// Some of the input is wrong.
    BadInput,
    /// The agent refused; `agent` has the kind of error.
    Agent,
    /// Every other failure.
    Failed,
}

impl<'a> Complaint<'a> {
    /// Reports a command line that cannot be parsed.
    pub(crate) fn usage(message: &str) -> Complaint<'static> {
        Complaint {
            kind: Kind::Usage,
            message: message.to_owned(),
            exit_status: 2,
            agent: None,
        }
    }

    /// Reports a command that failed.
    pub(crate) fn of(error: &'a anyhow::Error) -> Complaint<'a> {
        let agent = error.chain().find_map(|cause| match cause.downcast_ref() {
            Some(AskError::Agent(said)) => Some(said),
            _ => None,
        });
        let is_input = is_about_input(error);
        let kind = match agent {
            Some(_) => Kind::Agent,
            None if is_input => Kind::BadInput,
            None => Kind::Failed,
        };
        Complaint {
            kind,
            message: format!("{error:#}"),
            exit_status: if is_input { 2 } else { 1 },
            agent,
        }
    }

    /// Prints the report, for programs or for people, and returns the command's exit status.
    pub(crate) fn print(&self, json: bool) -> ExitCode {
        match serde_json::to_value(self) {
            Ok(object) if json => eprintln!("{}", printable::json(&document("error", object).to_string())),
            _ => complain!("homenode: {}", self.message),
        }
        ExitCode::from(self.exit_status)
    }
}
