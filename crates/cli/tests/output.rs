//! What commands do where nobody reads, or nothing can be written.

mod common;

use std::fs::File;
use std::process::{Command, Stdio};

use common::{homenode, refused, run, stderr, text};

/// Commands that print and need nothing.
const PRINTING: [&[&str]; 7] = [
    &["machine", "--preset", "r910"],
    &["machine", "--preset", "r910", "--json"],
    &["sim", "--list"],
    &["sim", "balloon", "--policy", "default", "--json"],
    &["completions", "bash"],
    &["man"],
    &["man", "run"],
];

fn with_output(args: &[&str], to: impl Into<Stdio>) -> std::process::Output {
    let mut command: Command = homenode();
    let child = command
        .args(args)
        .stdin(Stdio::null())
        .stdout(to)
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program can be started");
    child.wait_with_output().expect("it ends")
}

#[test]
fn a_closed_pipe_ends_a_command_in_silence() {
    for args in PRINTING {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let ended = with_output(args, writer);
        assert!(
            ended.status.success() && ended.stderr.is_empty(),
            "{args:?}: {:?} {}",
            ended.status,
            stderr(&ended)
        );
    }
}

#[test]
fn a_full_disk_is_said_and_a_failure() {
    for args in PRINTING {
        let full = File::options()
            .write(true)
            .open("/dev/full")
            .expect("Linux has it");
        let ended = with_output(args, full);
        let said = stderr(&ended);
        assert_eq!(ended.status.code(), Some(1), "{args:?}: {said}");
        assert!(
            said.contains("cannot write to standard output: No space left on device")
                && said.lines().count() == 1,
            "{args:?}: {said}"
        );
    }
}

#[test]
fn every_page_that_the_manual_names_is_there() {
    let page = text(&run(&["man"]));
    let names: Vec<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("homenode\\-")?.strip_suffix("(1)"))
        .collect();
    assert!(names.len() > 15, "{names:?}");
    for name in names {
        let name = name.replace('\\', "");
        let page = text(&run(&["man", &name]));
        assert!(page.contains(".TH"), "{name}: {page}");
    }
    let (code, complaint) = refused(&run(&["man", "nope"]));
    assert!(
        code == 2 && complaint.contains("there are: run, sim"),
        "{complaint}"
    );
}
