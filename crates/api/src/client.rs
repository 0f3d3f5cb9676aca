//! A client of an agent's socket.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::{Answer, ApiError, REPLY_BYTES_MAX, Reply, Request};

/// How long the agent may take to answer a request from its state.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long to wait for a change that the agent's loop carries out: longer than the agent itself waits for its loop.
const PATIENCE_DONE: Duration = Duration::from_secs(40);

/// Number of bytes read at a time.
const PART_BYTES: usize = 256 << 10;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// The agent refused the request.
    #[error(transparent)]
    Agent(#[from] ApiError),
    /// The agent's socket cannot be used.
    #[error("cannot ask the agent at {path}{remedy}: {cause}")]
    Unreachable {
        /// Path of the socket.
        path: String,
        /// The remedy, if one is known.
        remedy: &'static str,
        /// The system's error.
        cause: std::io::Error,
    },
    /// The reply is not an answer to the request.
    #[error("the agent at {path} gave no valid answer: {cause}")]
    NoAnswer {
        /// Path of the socket.
        path: String,
        /// The mistake in the reply.
        cause: String,
    },
}

/// Returns the socket's path below the state directory.
pub fn socket_path(state: &Path) -> PathBuf {
    state.join("agent.sock")
}

/// Returns the remedy for a socket that cannot be used, as the part of a sentence after the path; empty if none is known.
pub fn remedy(cause: &std::io::Error) -> &'static str {
    match cause.kind() {
        ErrorKind::PermissionDenied => "; run as root, or choose another --state",
        _ => "",
    }
}

/// Sends a request to the running agent. Returns `None` if no agent runs.
pub fn ask<A: TryFrom<Answer, Error = Answer>>(
    state: &Path,
    request: &Request,
) -> Result<Option<A>, AskError> {
    let path = socket_path(state);
    let unreachable = |cause: std::io::Error| AskError::Unreachable {
        path: path.display().to_string(),
        remedy: match cause.kind() {
            ErrorKind::PermissionDenied => {
                "; run as root, or as a member of the group that the agent's `[http] group` names"
            }
            _ => "",
        },
        cause,
    };
    let no_answer = |cause: String| AskError::NoAnswer {
        path: path.display().to_string(),
        cause,
    };
    let mut stream = match UnixStream::connect(&path) {
        Ok(stream) => stream,
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => return Ok(None),
        Err(e) => return Err(unreachable(e)),
    };
    let patience = match request.is_for_the_loop() {
        true => PATIENCE_DONE,
        false => PATIENCE,
    };
    stream.set_read_timeout(Some(patience)).map_err(unreachable)?;
    let text = serde_json::to_string(request).map_err(|e| no_answer(e.to_string()))?;
    stream
        .write_all(format!("{text}\n").as_bytes())
        .map_err(unreachable)?;
    let mut line = String::new();
    let read = BufReader::with_capacity(PART_BYTES, stream.take(REPLY_BYTES_MAX)).read_line(&mut line);
    let count = read.map_err(|e| no_answer(e.to_string()))? as u64;
    if count == REPLY_BYTES_MAX && !line.ends_with('\n') {
        return Err(no_answer(format!(
            "the answer is longer than {} MiB",
            REPLY_BYTES_MAX >> 20
        )));
    }
    let reply = serde_json::from_str(&line).map_err(|e| no_answer(e.to_string()))?;
    match reply {
        Reply::Error(error) => Err(error.into()),
        Reply::Answer(answer) => match A::try_from(answer) {
            Ok(answer) => Ok(Some(answer)),
            Err(_) => Err(no_answer("it answers a different request".to_owned())),
        },
    }
}
