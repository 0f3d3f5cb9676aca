//! How a profiled program ended.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use homenode_formats::profile_log::Log;

/// Returns the program's exit status, as a shell reports it.
pub fn exit_status(status: ExitStatus) -> u8 {
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

/// Returns what a reader of the profile should know.
pub fn notes(log: &Log, status: ExitStatus) -> Vec<String> {
    let mut notes = Vec::new();
    if log.forks > 0 || log.execs > 0 {
        notes.push(format!(
            "it started {} other processes and called exec {} times, none of which were followed; \
             profile the program that does the work instead",
            log.forks, log.execs
        ));
    }
    match (status.signal(), status.code()) {
        (Some(signal), _) => notes.push(format!(
            "signal {signal} ended it; the profile covers what it did before"
        )),
        (_, Some(code)) if code != 0 => notes.push(format!("it ended with status {code}")),
        _ => {}
    }
    notes
}
