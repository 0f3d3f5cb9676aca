//! Tests that an unmodified jemalloc follows the topology page. No guest is needed: the page is in a file, in which the test
//! moves the "vCPUs".

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use crate::common::{Page, compile};
use homenode_guest::library;

const JEMALLOC: &str = "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2";
const WAYS: [&str; 10] = [
    "malloc",
    "calloc",
    "realloc",
    "aligned_alloc",
    "posix_memalign",
    "memalign",
    "valloc",
    "strdup",
    "new",
    "aligned_new",
];

/// A program that allocates in every possible way. `-fno-builtin` keeps the compiler from removing unused allocations.
fn allocates() -> Command {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    Command::new(PROGRAM.get_or_init(|| compile("jemalloc.c", "allocates", &["-fno-builtin"])))
}

fn preload(mut command: Command, page: &Path, libraries: &[&Path]) -> Command {
    let paths: Vec<_> = libraries.iter().map(|path| path.as_os_str()).collect();
    command
        .env("HOMENODE_TOPOLOGY", page)
        .env("LD_PRELOAD", paths.join(":".as_ref()));
    command
}

struct Allocating {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Allocating {
    fn start(page: &Page) -> Allocating {
        let mut child = preload(
            allocates(),
            &page.path(),
            &[&library("jemalloc"), Path::new(JEMALLOC)],
        )
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program starts");
        let input = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut allocating = Allocating { child, input, output };
        assert_eq!(allocating.until("ready"), [""; 0]);
        allocating
    }

    fn until(&mut self, word: &str) -> Vec<String> {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            let length = self.output.read_line(&mut line).expect("text");
            assert!(length > 0, "the program ended after {lines:?}");
            if line.trim_end() == word {
                return lines;
            }
            lines.push(line.trim_end().to_owned());
        }
    }

    fn order(&mut self, what: &str) -> Vec<String> {
        writeln!(self.input, "{what}").expect("the program reads");
        self.until("done")
    }

    fn bytes_in_use(&mut self) -> u64 {
        self.order("b").concat().parse().expect("a number")
    }
}

impl Drop for Allocating {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn all_on(node: u16) -> Vec<String> {
    WAYS.iter().map(|way| format!("{way} {node}")).collect()
}

#[test]
fn every_way_to_allocate_follows_the_vcpu() {
    let mut page = Page::new(0);
    let mut program = Allocating::start(&page);
    for node in [0, 3, 1, 2, 0] {
        page.put_vcpus_on(node);
        assert_eq!(program.order("a"), all_on(node));
        assert_eq!(program.order("t"), all_on(node), "in a thread that begins there");
    }
}

#[test]
fn what_is_freed_elsewhere_goes_home_and_is_not_handed_out_again() {
    let mut page = Page::new(0);
    let mut program = Allocating::start(&page);
    program.order("a");
    let before = program.bytes_in_use();
    program.order("k");
    assert!(program.bytes_in_use() > before + 2_000_000);
    page.put_vcpus_on(3);
    // The program finds itself on node 3, frees its objects of node 0, and allocates as many again.
    program.order("a");
    program.order("f");
    assert_eq!(program.order("a"), all_on(3));
    assert_eq!(program.order("t"), all_on(3));
    let left = program.bytes_in_use();
    assert!(
        left < before + 100_000,
        "{before} bytes in use before, {left} afterwards"
    );
}

#[test]
fn a_page_that_goes_bad_leaves_threads_where_they_were() {
    let mut page = Page::new(2);
    let mut program = Allocating::start(&page);
    (8..136).for_each(|word| page.scribble(word, 0x7777_7777_7777_7777));
    page.scribble(2, 1000);
    assert_eq!(program.order("a"), all_on(2));
    page.put_vcpus_on(1);
    assert_eq!(program.order("a"), all_on(1));
}

#[test]
fn a_program_that_cannot_follow_says_why_in_one_line_and_runs() {
    let page = Page::new(0);
    let (ours, jemalloc) = (library("jemalloc"), Path::new(JEMALLOC));
    for (page, libraries, expected) in [
        (
            Path::new("/nowhere/page"),
            vec![&*ours, jemalloc],
            "No such file or directory",
        ),
        (&page.path(), vec![&*ours], "jemalloc is not what comes next"),
        (
            &page.path(),
            vec![jemalloc, &*ours],
            "jemalloc is not what comes next",
        ),
    ] {
        let output = preload(Command::new("/bin/true"), page, &libraries)
            .output()
            .expect("it starts");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(
            text.starts_with("homenode: ") && text.contains(expected),
            "{text}"
        );
    }
}
