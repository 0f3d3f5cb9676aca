//! Tests that programs learn of changes to the page: directly through `libhomenode_topology`, or through libnuma with a
//! preload.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use crate::common::{Page, compile};
use homenode_guest::library;

const LIBNUMA: &str = "/usr/lib/x86_64-linux-gnu/libnuma.so.1";

fn follows() -> Command {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| {
        let topology = library("topology");
        let directory = topology.parent().expect("a directory").display().to_string();
        let flags = [
            LIBNUMA,
            &topology.display().to_string(),
            "-Wl,-rpath",
            &format!("-Wl,{directory}"),
        ];
        compile("follows.c", "follows", &flags)
    });
    Command::new(program)
}

struct Asked {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Asked {
    fn start(page: &Path, preload: Option<&Path>) -> Asked {
        let mut command = follows();
        command.env("HOMENODE_TOPOLOGY", page);
        if let Some(preload) = preload {
            command.env("LD_PRELOAD", preload);
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let input = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        Asked { child, input, output }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        let length = self.output.read_line(&mut line).expect("text");
        assert!(length > 0, "the program ended");
        line.trim_end().to_owned()
    }

    fn ask(&mut self, what: &str) -> String {
        writeln!(self.input, "{what}").expect("the program reads");
        self.line()
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_library_says_what_the_page_says() {
    let mut page = Page::new(0);
    let mut program = Asked::start(&page.path(), None);
    for node in [0, 3, 2] {
        page.put_vcpus_on(node);
        let expected = format!(
            "256 vcpus 4 nodes, on {node}, vcpu 3 on {node}, 999 on -1, memory 2 on 2, 9 on -1, 1 to 2 20"
        );
        assert_eq!(program.ask("library"), expected);
    }
}

#[test]
fn who_waits_is_told_of_a_change_and_only_then() {
    let mut page = Page::new(0);
    let mut program = Asked::start(&page.path(), None);
    program.ask("library");
    assert_eq!(program.ask("nothing changed"), "0");
    assert_eq!(program.ask("wait"), "waiting");
    page.put_vcpus_on(1);
    assert_eq!(program.line(), "1");
}

#[test]
fn a_bad_version_is_counted_and_what_was_known_stays() {
    let mut page = Page::new(3);
    let mut program = Asked::start(&page.path(), None);
    let good = program.ask("library");
    (8..136).for_each(|word| page.scribble(word, 0x7777_7777_7777_7777));
    page.scribble(2, 1000);
    assert_eq!(program.ask("library"), good);
    assert_eq!(
        program.ask("refused"),
        "1: it has a vCPU on a host node that there is not"
    );
    page.scribble(2, 1001);
    assert_eq!(program.ask("library"), good);
    assert!(
        program
            .ask("refused")
            .starts_with("2: it is being written all the time")
    );
    // An impossible change of the number of vCPUs.
    page.put_vcpus_on(3);
    page.scribble(3, 5 | 4 << 32 | 4 << 48);
    page.scribble(2, 2000);
    assert_eq!(program.ask("library"), good);
    assert!(
        program
            .ask("refused")
            .starts_with("3: it has other numbers of vCPUs")
    );
    page.put_vcpus_on(1);
    assert_ne!(program.ask("library"), good);
}

#[test]
fn programs_that_ask_libnuma_follow() {
    let mut page = Page::new(0);
    let mut program = Asked::start(&page.path(), Some(&library("numa")));
    // Expected: the node of CPU 0, the node from getcpu(), and for each node whether CPU 0 is on it ("1") and whether a thread
    // can run there ("r").
    for (node, expected) in [(0, "0 0 1r 0 0 0"), (3, "3 3 0 0 0 1r"), (1, "1 1 0 1r 0 0")] {
        page.put_vcpus_on(node);
        assert_eq!(program.ask("libnuma"), expected);
    }
}

#[test]
fn without_a_page_libnuma_says_what_it_says() {
    let ours = library("numa");
    let mut plain = Asked::start(Path::new("/nowhere/page"), None);
    let mut preloaded = Asked::start(Path::new("/nowhere/page"), Some(&ours));
    assert!(
        plain
            .line()
            .contains("cannot use the topology page /nowhere/page: No such file")
    );
    preloaded.line();
    assert_eq!(preloaded.ask("libnuma"), plain.ask("libnuma"));
    preloaded.child.kill().expect("it runs");
    let said = BufReader::new(preloaded.child.stderr.take().expect("a pipe")).lines();
    // libnuma itself prints complaints about nodes that do not exist, too.
    let said: Vec<String> = said
        .map_while(Result::ok)
        .filter(|line| line.starts_with("homenode: "))
        .collect();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].ends_with("runs as without"), "{said:?}");
}
