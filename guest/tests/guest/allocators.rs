//! Tests that unmodified jemalloc and TCMalloc follow the topology page. No guest is needed: the page is in a file, in which
//! the test moves the "vCPUs".

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use crate::common::{Page, compile};
use homenode_guest::library;

/// An allocator, and the library of ours that is preloaded before it.
#[derive(Clone, Copy)]
struct Allocator {
    /// The allocator's name in messages.
    name: &'static str,
    ours: &'static str,
    path: &'static str,
}

const JEMALLOC: Allocator = Allocator {
    name: "jemalloc",
    ours: "jemalloc",
    path: "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2",
};
const TCMALLOC: Allocator = Allocator {
    name: "TCMalloc",
    ours: "tcmalloc",
    path: "/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4",
};
const TCMALLOC_MINIMAL: Allocator = Allocator {
    path: "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4",
    ..TCMALLOC
};
const ALL: [Allocator; 3] = [JEMALLOC, TCMALLOC, TCMALLOC_MINIMAL];

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
    Command::new(PROGRAM.get_or_init(|| compile("allocates.c", "allocates", &["-fno-builtin"])))
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
    fn start(page: &Page, allocator: Allocator) -> Allocating {
        let mut child = preload(
            allocates(),
            &page.path(),
            &[&library(allocator.ours), Path::new(allocator.path)],
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

    fn number(&mut self, what: &str) -> u64 {
        self.order(what).concat().parse().expect("a number")
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
    for allocator in ALL {
        let mut page = Page::new(0);
        let mut program = Allocating::start(&page, allocator);
        for node in [0, 3, 1, 2, 0] {
            page.put_vcpus_on(node);
            assert_eq!(program.order("a"), all_on(node), "{}", allocator.path);
            assert_eq!(program.order("t"), all_on(node), "in a thread that begins there");
        }
    }
}

#[test]
fn what_is_freed_elsewhere_goes_home_and_is_not_handed_out_again() {
    for allocator in ALL {
        let mut page = Page::new(0);
        let mut program = Allocating::start(&page, allocator);
        program.order("a");
        let before = program.number("b");
        program.order("k");
        page.put_vcpus_on(3);
        // The program finds itself on node 3, frees its objects of node 0, and allocates as many again.
        program.order("a");
        let kept = program.number("b");
        program.order("f");
        assert_eq!(program.order("a"), all_on(3));
        assert_eq!(program.order("t"), all_on(3));
        let left = program.number("b");
        if allocator.ours == "jemalloc" {
            assert!(kept > before + 2_000_000);
            assert!(
                left < before + 100_000,
                "{before} bytes in use before, {left} afterwards"
            );
        }
        // Back home, the program gets what it freed from afar.
        page.put_vcpus_on(0);
        assert_eq!(program.order("a"), all_on(0));
    }
}

#[test]
fn a_thread_that_leaves_a_node_returns_free_memory_there() {
    for allocator in [TCMALLOC, TCMALLOC_MINIMAL] {
        let mut page = Page::new(0);
        let mut program = Allocating::start(&page, allocator);
        program.order("k");
        program.order("f");
        let before = program.number("r");
        // Each node's memory is new to the program, which then leaves it.
        for node in 1..4 {
            page.put_vcpus_on(node);
            program.order("k");
            program.order("f");
        }
        let after = program.number("r");
        // Three times 5.8 MB if nothing were returned; what TCMalloc's central lists keep stays.
        assert!(
            after < before + 10_000_000,
            "{before} bytes resident on one node, {after} after three moves"
        );
    }
}

#[test]
fn a_page_that_goes_bad_leaves_threads_where_they_were() {
    for allocator in ALL {
        let mut page = Page::new(2);
        let mut program = Allocating::start(&page, allocator);
        (8..136).for_each(|word| page.scribble(word, 0x7777_7777_7777_7777));
        page.scribble(2, 1000);
        assert_eq!(program.order("a"), all_on(2));
        page.put_vcpus_on(1);
        assert_eq!(program.order("a"), all_on(1));
    }
}

/// Returns our messages on the standard error of a program that must succeed.
fn complaints(page: &Path, libraries: &[&Path], environment: &[(&str, &str)]) -> Vec<String> {
    let output = preload(Command::new("/bin/true"), page, libraries)
        .envs(environment.iter().copied())
        .output()
        .expect("it starts");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
    let ours = text.lines().filter(|line| line.starts_with("homenode: "));
    ours.map(str::to_owned).collect()
}

#[test]
fn a_program_that_cannot_follow_says_why_in_one_line_and_runs() {
    let page = Page::new(0);
    for allocator in ALL {
        let (ours, theirs) = (library(allocator.ours), Path::new(allocator.path));
        let not_next = format!("{} is not what comes next", allocator.name);
        for (page, libraries, expected) in [
            (
                Path::new("/nowhere/page"),
                vec![&*ours, theirs],
                "No such file or directory",
            ),
            (&page.path(), vec![&*ours], &*not_next),
            (&page.path(), vec![theirs, &*ours], &*not_next),
        ] {
            let said = complaints(page, &libraries, &[]);
            assert!(said.len() == 1 && said[0].contains(expected), "{said:?}");
        }
    }
}

#[test]
fn a_tcmalloc_whose_tools_need_all_objects_is_left_alone() {
    let page = Page::new(0);
    let ours = library(TCMALLOC.ours);
    let profiled = tempfile::tempdir().expect("a directory");
    let profile = profiled.path().join("heap").display().to_string();
    let sibling = |name: &str| PathBuf::from(TCMALLOC.path.replace("libtcmalloc", name));
    for (theirs, environment, expected) in [
        (
            sibling("libtcmalloc"),
            vec![("HEAPPROFILE", &*profile)],
            "HEAPPROFILE or HEAPCHECK is set",
        ),
        (
            sibling("libtcmalloc_and_profiler"),
            vec![],
            "this TCMalloc has a profiler in it",
        ),
        (
            sibling("libtcmalloc_minimal_debug"),
            vec![],
            "this TCMalloc is for debugging",
        ),
    ] {
        let said = complaints(&page.path(), &[&ours, &theirs], &environment);
        let ours: Vec<_> = said
            .iter()
            .filter(|line| line.contains("runs as without"))
            .collect();
        assert!(ours.len() == 1 && ours[0].contains(expected), "{said:?}");
    }
}
