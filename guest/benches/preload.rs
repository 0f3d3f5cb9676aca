//! Measures what following the topology costs in allocation benchmarks: objects per second of processor time, with the preload
//! and without.
//!
//! Runs with and without it alternate, since the machine's speed drifts. The results are the ratio of the best runs, and the
//! ratios of adjacent runs. For the JVM, the baseline is a stock guest with as many virtual nodes: dividing eden by nodes is a
//! cost of UseNUMA, not of following. Part of a name selects benchmarks: `cargo bench -p homenode-guest -- jemalloc`.

#![allow(clippy::print_stdout, reason = "printing is what this program is for")]

#[path = "../tests/guest/common.rs"]
mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Page, compile};
use homenode_guest::library;

const PAIRS: usize = 11;
const ALLOCATORS: [(&str, &str); 2] = [
    ("jemalloc", "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2"),
    ("tcmalloc", "/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4"),
];
const JAVA: &str = "/usr/lib/jvm/java-17-openjdk-amd64/bin/java";

/// Returns the rate that a program reports with these libraries preloaded.
fn objects_per_second(command: &mut Command, page: &Page, libraries: &[PathBuf]) -> f64 {
    let paths: Vec<_> = libraries.iter().map(|path| path.as_os_str()).collect();
    let output = command
        .env("HOMENODE_TOPOLOGY", page.path())
        .env("LD_PRELOAD", paths.join(":".as_ref()))
        .output()
        .expect("the benchmark starts: scripts/setup.sh installs what it needs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    text.trim().parse().expect("a number")
}

fn compare(name: &str, mut command: impl FnMut() -> Command, without: &[PathBuf], with: &[PathBuf]) {
    // Options come from `cargo bench` itself, so only other arguments select benchmarks.
    let mut wanted = std::env::args()
        .skip(1)
        .filter(|argument| !argument.starts_with('-'));
    if wanted.next().is_some_and(|part| !name.contains(&part)) {
        return;
    }
    let mut page = Page::new(0);
    page.put_each_vcpu_on_its_node();
    let mut pairs: Vec<(f64, f64)> = (0..PAIRS)
        .map(|_| {
            let without = objects_per_second(&mut command(), &page, without);
            (objects_per_second(&mut command(), &page, with) / without, without)
        })
        .collect();
    pairs.sort_by(|a, b| a.0.total_cmp(&b.0));
    let percent = |ratio: f64| 100.0 * (ratio - 1.0);
    // The best runs are compared, as they had the machine to themselves.
    let best = |value: &dyn Fn(&(f64, f64)) -> f64| pairs.iter().map(value).fold(0.0, f64::max);
    let (with, without) = (best(&|pair| pair.0 * pair.1), best(&|pair| pair.1));
    println!(
        "{name}: {without:.2} million objects/s without; with {:+.1} percent (best of {PAIRS}), {:+.1} (median; quartiles {:+.1} to {:+.1})",
        percent(with / without),
        percent(pairs[PAIRS / 2].0),
        percent(pairs[PAIRS / 4].0),
        percent(pairs[3 * PAIRS / 4].0)
    );
}

fn main() {
    let benches = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches");
    let allocate = compile("../benches/allocate.c", "allocate", &["-fno-builtin"]);
    for (name, path) in ALLOCATORS {
        let allocator = PathBuf::from(path);
        compare(
            name,
            || Command::new(&allocate),
            std::slice::from_ref(&allocator),
            &[library(name), allocator.clone()],
        );
    }
    let topology = library("topology").display().to_string();
    let link = format!(
        "-Wl,-rpath,{}",
        library("topology").parent().expect("a directory").display()
    );
    let nodes = compile(
        "../benches/static_nodes.c",
        "libstatic_nodes.so",
        &["-shared", &topology, &link],
    );
    for collector in ["ParallelGC", "G1GC"] {
        let java = || {
            let mut command = Command::new(JAVA);
            command.args(["-XX:+UseNUMA", "-Xms512m", "-Xmx512m", "-Xmn256m"]);
            command
                .arg(format!("-XX:+Use{collector}"))
                .arg(benches.join("Allocate.java"));
            command
        };
        compare(
            &format!("HotSpot, {collector}"),
            java,
            &[nodes.clone(), library("hotspot_numa")],
            &[library("hotspot"), library("hotspot_numa")],
        );
    }
}
