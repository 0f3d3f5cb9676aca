//! Decides when the simulator may replace a host that cannot be managed: only for a user who tries the program at a terminal and
//! sees that it is a simulated host.

use std::ffi::OsString;
use std::io::IsTerminal as _;

/// How this process was started.
#[derive(Clone, Copy, Debug)]
struct Here {
    is_root: bool,
    is_service: bool,
    /// Standard input and output are both terminals.
    at_terminal: bool,
}

/// Returns true if this process is a systemd service.
pub(crate) fn is_a_service() -> bool {
    is_service(|name| std::env::var_os(name), std::process::id())
}

/// Fails if an unrequested simulation could be mistaken for a real run; `why` says why there is no real run.
///
/// # Errors
/// As a service, as root, or without a terminal: the error says what is missing, and how to get it.
pub(crate) fn only_where_a_user_looks(why: &str) -> anyhow::Result<()> {
    let here = Here {
        is_root: rustix::process::geteuid().is_root(),
        is_service: is_a_service(),
        at_terminal: std::io::stdin().is_terminal() && std::io::stdout().is_terminal(),
    };
    match here.refusal() {
        None => Ok(()),
        Some(how) => anyhow::bail!(
            "there is nothing to manage here: {why}. {how}, homenode simulates a host only on request, with `--host twin`"
        ),
    }
}

impl Here {
    fn refusal(self) -> Option<&'static str> {
        match self {
            Here { is_service: true, .. } => Some("As a service"),
            Here { is_root: true, .. } => Some("As root"),
            Here {
                at_terminal: false, ..
            } => Some("Without a terminal"),
            _ => None,
        }
    }
}

/// Returns true if systemd started this process. A terminal's unit passes its variables on to its children, but only the process
/// that systemd started finds its own number in `SYSTEMD_EXEC_PID`.
fn is_service(variable: impl Fn(&str) -> Option<OsString>, process: u32) -> bool {
    let started = variable("SYSTEMD_EXEC_PID");
    let is_other = started.is_some_and(|started| started != *process.to_string());
    variable("NOTIFY_SOCKET").is_some() || (variable("INVOCATION_ID").is_some() && !is_other)
}

#[cfg(test)]
mod tests {
    use super::*;

    const USER: Here = Here {
        is_root: false,
        is_service: false,
        at_terminal: true,
    };

    #[test]
    fn the_twin_stands_in_for_a_user_at_a_terminal_alone() {
        assert_eq!(USER.refusal(), None);
        let others = [
            Here {
                is_root: true,
                ..USER
            },
            Here {
                is_service: true,
                ..USER
            },
            Here {
                at_terminal: false,
                ..USER
            },
        ];
        assert!(others.iter().all(|here| here.refusal().is_some()));
    }

    #[test]
    fn a_process_that_systemd_started_is_a_service_and_one_in_a_terminal_of_systemds_is_not() {
        let with = |set: &'static [(&'static str, &'static str)]| {
            move |name: &str| {
                set.iter()
                    .find(|(key, _)| *key == name)
                    .map(|(_, value)| OsString::from(value))
            }
        };
        assert!(!is_service(with(&[]), 7));
        assert!(is_service(with(&[("NOTIFY_SOCKET", "/run/x")]), 7));
        assert!(is_service(with(&[("INVOCATION_ID", "1")]), 7));
        assert!(is_service(
            with(&[("INVOCATION_ID", "1"), ("SYSTEMD_EXEC_PID", "7")]),
            7
        ));
        assert!(!is_service(
            with(&[("INVOCATION_ID", "1"), ("SYSTEMD_EXEC_PID", "6")]),
            7
        ));
    }
}
