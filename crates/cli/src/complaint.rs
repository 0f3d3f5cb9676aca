//! What went wrong: a sentence on standard error, or with `--json` a document there, on a line.

use std::process::ExitCode;

use homenode_api::document::document;
use homenode_api::{ApiError, AskError};
use schemars::JsonSchema;
use serde::Serialize;

use crate::{is_about_input, printable};

/// A failed command.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Complaint<'a> {
    kind: Kind,
    /// What went wrong, and what to do about it.
    message: String,
    /// What the command ends with: 2 where what it was given is wrong, else 1.
    exit_status: u8,
    /// What the agent said, where it was asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    agent: Option<&'a ApiError>,
}

/// Kinds of failures.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    /// The command line cannot be read.
    Usage,
    /// Something that was given is wrong.
    BadInput,
    /// The agent says no; `agent` says of what kind.
    Agent,
    /// Everything else.
    Failed,
}

impl<'a> Complaint<'a> {
    /// About a command line.
    pub fn usage(message: &str) -> Complaint<'static> {
        Complaint {
            kind: Kind::Usage,
            message: message.to_owned(),
            exit_status: 2,
            agent: None,
        }
    }

    /// About a command that failed.
    pub fn of(error: &'a anyhow::Error) -> Complaint<'a> {
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

    /// Prints it, for programs or for people; gives the command's exit status.
    pub fn print(&self, json: bool) -> ExitCode {
        match serde_json::to_value(self) {
            Ok(object) if json => eprintln!("{}", printable::json(&document("error", object).to_string())),
            _ => complain!("homenode: {}", self.message),
        }
        ExitCode::from(self.exit_status)
    }
}
