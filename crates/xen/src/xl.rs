//! Short commands of `xl`. Each has a time limit, and if it fails, its output is reported.

use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;

/// How often to check whether a command has ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Most bytes of a command's output to read.
const SAID_MAX: u64 = 64 << 10;

/// Time limit for `xl mem-set`.
const SET_MAX: Duration = Duration::from_secs(8);

/// A command of `xl` that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("xl {arguments}: {why}")]
pub struct XlError {
    arguments: String,
    why: XlFailure,
}

#[cfg(test)]
impl XlError {
    /// Returns a failure of `xl mem-set` with this message, for tests.
    pub fn planned(said: &str) -> XlError {
        XlError {
            arguments: "mem-set".to_owned(),
            why: XlFailure::Said(said.to_owned()),
        }
    }
}

/// Why a command of `xl` failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum XlFailure {
    /// The operating system could not run the command.
    #[error("{0}")]
    System(String),
    /// The command exceeded its time limit, and was killed.
    #[error("the command did not end within {} s", .0.as_secs())]
    TooLong(Duration),
    /// The command failed with this output.
    #[error("{0}")]
    Said(String),
}

impl From<std::io::Error> for XlFailure {
    fn from(error: std::io::Error) -> XlFailure {
        XlFailure::System(error.to_string())
    }
}

/// Sets the balloon target, in KiB, of the domain with this number.
///
/// # Errors
/// As for [`run`].
pub(crate) fn set_memory(domid: u32, kib: u64) -> Result<(), XlError> {
    let (domid, kib) = (domid.to_string(), format!("{kib}k"));
    run(&["mem-set", &domid, &kib], SET_MAX)
}

/// Runs a short command of `xl`.
///
/// # Errors
/// If it failed, with its output, or if it did not end within `limit` and was killed.
pub(crate) fn run(arguments: &[&str], limit: Duration) -> Result<(), XlError> {
    let failed = |why: XlFailure| XlError {
        arguments: arguments.join(" "),
        why,
    };
    let io = |error: std::io::Error| failed(error.into());
    // Not a pipe, because a full pipe would block the command while we wait for it.
    let said = rustix::fs::memfd_create("xl", MemfdFlags::CLOEXEC).map_err(|error| io(error.into()))?;
    let mut said = File::from(said);
    let shared = || said.try_clone().map_err(io);
    let mut child = Command::new("xl")
        .args(arguments)
        .stdin(Stdio::null())
        .stdout::<File>(shared()?)
        .stderr::<File>(shared()?)
        .spawn()
        .map_err(io)?;
    match ended(&mut child, limit).map_err(failed)? {
        status if status.success() => Ok(()),
        _ => {
            let mut bytes = Vec::new();
            let read = said
                .rewind()
                .and_then(|()| said.take(SAID_MAX).read_to_end(&mut bytes));
            let text = read.map(|_| String::from_utf8_lossy(&bytes).into_owned());
            Err(failed(XlFailure::Said(reason(&text.unwrap_or_default()))))
        }
    }
}

fn ended(child: &mut Child, limit: Duration) -> Result<ExitStatus, XlFailure> {
    let begun = Instant::now();
    while begun.elapsed() < limit {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        std::thread::sleep(LOOK_EVERY);
    }
    let _ = child.kill();
    let _ = child.wait();
    Err(XlFailure::TooLong(limit))
}

/// Returns the parts of the output that tell why something failed: the last line from a program of ours, if one took part, and
/// the first line from `xl` that reports an error.
pub(crate) fn reason(text: &str) -> String {
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    // Our line says that the domain was not sent or received as a whole. The first error from `xl` may say why.
    let ours = lines().rfind(|line| line.starts_with("homenode"));
    let error = lines().find(|line| line.contains("error") || line.contains("ailed"));
    let told: Vec<&str> = match (ours, error) {
        (None, None) => lines().next_back().into_iter().collect(),
        (ours, error) => ours
            .into_iter()
            .chain(error.filter(|line| ours != Some(line)))
            .collect(),
    };
    match told.is_empty() {
        true => "xl gave no reason".into(),
        false => told.join("; ").chars().take(400).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_and_the_first_error_tell_the_reason() {
        let said = "libxl: error: one\nlibxl: error: two\nhomenode: late\nmore\n";
        assert_eq!(reason(said), "homenode: late; libxl: error: one");
        assert_eq!(reason("a\nb\n"), "b");
        assert_eq!(reason(" \n"), "xl gave no reason");
    }

    #[test]
    fn what_does_not_end_is_ended() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let error = ended(&mut child, Duration::from_millis(60)).unwrap_err();
        assert!(error.to_string().contains("did not end"), "{error}");
    }
}
