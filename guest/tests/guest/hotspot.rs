//! Tests that an unmodified JVM follows the topology page. No guest is needed: the page is in a file, in which the test moves
//! the "vCPUs".

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

use crate::common::{NODES, Page, compile};
use homenode_guest::library;

const JVM: &str = "/usr/lib/jvm/java-17-openjdk-amd64";
const LARGE_ENOUGH: [&str; 6] = [
    "-Xint",
    "-XX:+UseNUMA",
    "-XX:-UsePerfData",
    "-Xms128m",
    "-Xmx128m",
    "-Xlog:disable",
];

fn preload(libraries: &[PathBuf]) -> OsString {
    let paths: Vec<_> = libraries.iter().map(|path| path.as_os_str()).collect();
    paths.join(":".as_ref())
}

fn both() -> [PathBuf; 2] {
    [library("hotspot"), library("hotspot_numa")]
}

fn java(home: &Path, page: &Path, libraries: &[PathBuf]) -> Command {
    let mut command = Command::new(home.join("bin/java"));
    command
        .env("HOMENODE_TOPOLOGY", page)
        .env("LD_PRELOAD", preload(libraries))
        .args(LARGE_ENOUGH);
    command
}

/// Options for ParallelGC with equal parts of eden, which it logs after each collection.
const PARALLEL_GC: [&str; 4] = [
    "-XX:+UseParallelGC",
    "-Xmn80m",
    "-XX:-UseAdaptiveNUMAChunkSizing",
    "-Xlog:gc+heap=debug",
];

/// A JVM that allocates young objects on request.
struct Young {
    child: Child,
    input: ChildStdin,
    output: BufReader<std::process::ChildStdout>,
}

impl Young {
    fn start(page: &Page, options: &[&str]) -> Young {
        let mut command = java(Path::new(JVM), &page.path(), &both());
        let mut child = command
            .args(options)
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/Young.java"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a JVM: scripts/setup.sh installs it");
        let input = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut young = Young { child, input, output };
        young.until("ready");
        young
    }

    /// Returns the lines that the JVM prints before a line that is this word.
    fn until(&mut self, word: &str) -> Vec<String> {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            let length = self.output.read_line(&mut line).expect("text");
            assert!(length > 0, "the JVM ended after\n{}", lines.concat());
            if line.trim_end() == word {
                return lines;
            }
            lines.push(line);
        }
    }

    /// Lets the JVM allocate 12 MiB; returns its log up to the end of the collection that follows.
    fn allocate(&mut self) -> Vec<String> {
        self.input.write_all(b"\n").expect("the JVM reads");
        self.until("done")
    }
}

impl Drop for Young {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns how full each node's part of eden was before the first collection in the log, in percent.
fn eden_parts(log: &[String]) -> Vec<u32> {
    let part = |line: &String| {
        let (_, rest) = line.split_once("lgrp ")?;
        let (_, used) = rest.split_once("K, ")?;
        used.split('%').next()?.parse().ok()
    };
    log.iter().filter_map(part).take(usize::from(NODES)).collect()
}

/// Returns the number of regions that G1 has requested from each node since its start.
fn regions_asked(log: &[String]) -> Vec<u32> {
    let line = log
        .iter()
        .rev()
        .find(|line| line.contains("Placement match ratio"))
        .expect("G1 tells");
    let (_, nodes) = line.split_once('(').expect("by node");
    let asked = |node: &str| {
        node.trim_end()
            .trim_end_matches(')')
            .rsplit('/')
            .next()?
            .parse()
            .ok()
    };
    nodes.split(", ").filter_map(asked).collect()
}

fn largest(values: &[u32]) -> u16 {
    let most = values.iter().max().expect("one for each node");
    values
        .iter()
        .position(|value| value == most)
        .expect("it is there") as u16
}

#[test]
fn parallel_gc_allocates_young_objects_where_its_vcpu_is() {
    let mut page = Page::new(0);
    let mut jvm = Young::start(&page, &PARALLEL_GC);
    for node in [0, 3, 2, 1, 0] {
        page.put_vcpus_on(node);
        let parts = eden_parts(&jvm.allocate());
        assert_eq!(
            parts.len(),
            usize::from(NODES),
            "the JVM sees the nodes of the page"
        );
        // The young objects take 12 MiB, four fifths of a part.
        assert!(parts[usize::from(node)] > 50, "on node {node}: {parts:?}");
        assert_eq!(
            parts.iter().filter(|part| **part > 20).count(),
            1,
            "on node {node}: {parts:?}"
        );
    }
}

#[test]
fn g1_asks_for_regions_where_its_vcpu_is() {
    let mut page = Page::new(0);
    let options = [
        "-XX:+UseG1GC",
        "-XX:G1HeapRegionSize=1m",
        "-Xmn24m",
        "-XX:+ExplicitGCInvokesConcurrent",
        "-Xlog:gc+heap+numa=info",
    ];
    let mut jvm = Young::start(&page, &options);
    let mut before = regions_asked(&jvm.allocate());
    for node in [3, 2, 1, 0] {
        page.put_vcpus_on(node);
        let after = regions_asked(&jvm.allocate());
        let asked: Vec<u32> = after
            .iter()
            .zip(&before)
            .map(|(after, before)| after - before)
            .collect();
        assert_eq!(largest(&asked), node, "asked for {asked:?}");
        assert!(asked[usize::from(node)] >= 8, "asked for {asked:?}");
        before = after;
    }
}

#[test]
fn a_page_that_goes_bad_leaves_the_jvm_where_it_was() {
    let mut page = Page::new(3);
    let mut jvm = Young::start(&page, &PARALLEL_GC);
    // These words put all vCPUs on host node 0x77, which does not exist; the next one is a new version.
    (8..136).for_each(|word| page.scribble(word, 0x7777_7777_7777_7777));
    page.scribble(2, 1000);
    assert_eq!(largest(&eden_parts(&jvm.allocate())), 3);
    page.put_vcpus_on(1);
    assert_eq!(largest(&eden_parts(&jvm.allocate())), 1);
}

/// Returns our messages on the standard error of a JVM that only shows its version. The JVM must succeed.
fn complaints(command: &mut Command) -> Vec<String> {
    let output = command
        .args(["-XX:+UseParallelGC", "-version"])
        .output()
        .expect("a JVM: scripts/setup.sh installs it");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
    assert!(text.contains("OpenJDK"), "{text}");
    text.lines()
        .filter(|line| line.starts_with("homenode:"))
        .map(str::to_owned)
        .collect()
}

#[test]
fn a_jvm_that_cannot_follow_says_why_in_one_line_and_runs() {
    let page = Page::new(0);
    let other = compile("other_sched_getcpu.c", "libother_sched_getcpu.so", &["-shared"]);
    let [hotspot, numa] = both();
    let home = Path::new(JVM);
    let short = tempfile::NamedTempFile::new().expect("a file");
    for (page, libraries, expected) in [
        (
            Path::new("/nowhere/page"),
            vec![hotspot.clone(), numa.clone()],
            "No such file or directory",
        ),
        (
            short.path(),
            vec![hotspot.clone(), numa.clone()],
            "shorter than a topology page",
        ),
        (
            &page.path(),
            vec![hotspot.clone()],
            "libhomenode_hotspot_numa.so is not preloaded",
        ),
        (
            &page.path(),
            vec![numa.clone()],
            "libhomenode_hotspot.so is not preloaded",
        ),
        (
            &page.path(),
            vec![other, hotspot, numa],
            "put libhomenode_hotspot.so first",
        ),
    ] {
        let said = complaints(&mut java(home, page, &libraries));
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(
            said[0].contains(expected) && said[0].contains("runs as without"),
            "{said:?}"
        );
    }
}

/// Creates a copy of the installed JVM whose release file claims another version.
fn jvm_that_claims(version: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    let (from, to) = (Path::new(JVM), directory.path());
    std::fs::create_dir_all(to.join("lib/server")).expect("a directory");
    std::fs::create_dir(to.join("bin")).expect("a directory");
    for entry in std::fs::read_dir(from.join("lib"))
        .expect("the JVM's libraries")
        .flatten()
    {
        if entry.file_name() != "server" {
            let link = to.join("lib").join(entry.file_name());
            std::os::unix::fs::symlink(entry.path(), link).expect("a link");
        }
    }
    for file in ["bin/java", "lib/server/libjvm.so"] {
        std::fs::copy(from.join(file), to.join(file)).expect("a copy");
    }
    // The launcher searches for its own library before it follows links.
    let _ = std::os::unix::fs::symlink(from.join("conf"), to.join("conf"));
    std::fs::write(to.join("release"), format!("JAVA_VERSION=\"{version}\"\n")).expect("a file");
    directory
}

#[test]
fn a_jvm_that_was_not_tested_is_left_alone_unless_its_owner_insists() {
    let page = Page::new(0);
    let home = jvm_that_claims("21.0.4");
    let said = complaints(&mut java(home.path(), &page.path(), &both()));
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains("version 21, tested is 17"), "{said:?}");
    let insisted = complaints(java(home.path(), &page.path(), &both()).env("HOMENODE_UNTESTED_JVM", "1"));
    assert!(!insisted.concat().contains("not tested"), "{insisted:?}");
}
