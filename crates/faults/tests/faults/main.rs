//! Runs the agent's own code against a model of a KVM host that lies and fails, by seed.
//!
//! ```text
//!   case (from a seed) ─▶ world: VMs, operators, tenants, failures, clock
//!                            ▲ files of a tree │ library: libvirt's C interface │ kernel::system: clock, waits, page moves
//!                            ▼
//!   control loop ─ kvm::KvmHost ─ kvm::libvirt ─ undo ─ kernel          (the product's code, unchanged)
//!                            │
//!                            ▼ oracles after every change, and after every end
//! ```

#![allow(clippy::print_stdout, clippy::print_stderr)] // it is a program

mod case;
mod library;
mod life;
mod operators;
mod oracles;
mod shrink;
mod trace;
mod vm;
mod world;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use case::Case;

/// What to run.
#[derive(Clone, Copy)]
struct Wanted {
    first: u64,
    last: u64,
    /// Whether to end at the first failure, without its story.
    ends_early: bool,
}

fn main() -> ExitCode {
    library::load();
    // A failing case is told by its story, and killing is unwinding: neither is a panic to print.
    std::panic::set_hook(Box::new(|_| {}));
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let by_default = Wanted {
        first: 0,
        last: 1000,
        ends_early: false,
    };
    match words.as_slice() {
        // `cargo test` may pass filters and flags, which are ignored because there is only one test.
        ["--list", ..] => ExitCode::SUCCESS,
        ["--seeds", seeds, rest @ ..] => match parsed(seeds) {
            Some((first, last)) => run_all(Wanted {
                first,
                last,
                ends_early: rest.contains(&"--first"),
            }),
            None => usage(),
        },
        ["--story", seed] => seed
            .parse()
            .map_or_else(|_| usage(), |seed| story(&Case::of(seed))),
        ["--case", file] => story(&kept(Path::new(file))),
        _ => match rerun_kept() {
            true => run_all(by_default),
            false => ExitCode::FAILURE,
        },
    }
}

/// Parses `FIRST..LAST`.
fn parsed(seeds: &str) -> Option<(u64, u64)> {
    let (first, last) = seeds.split_once("..")?;
    Some((first.parse().ok()?, last.parse().ok()?))
}

/// Reads a case that once failed.
fn kept(path: &Path) -> Case {
    let text = std::fs::read_to_string(path).expect("a case that can be read");
    toml::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Runs the cases that once failed. Returns whether all of them pass.
fn rerun_kept() -> bool {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/faults");
    let entries = std::fs::read_dir(&folder).expect("data/faults");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let mut cases: Vec<_> = paths
        .filter(|path| path.extension().is_some_and(|end| end == "toml"))
        .collect();
    cases.sort();
    let fails = |path: &&std::path::PathBuf| {
        let case = kept(path);
        let outcome = life::run(&case);
        outcome
            .violations
            .first()
            .inspect(|violation| println!("{}: {violation}", path.display()))
            .is_some()
    };
    let failed = cases.iter().filter(fails).count();
    println!("{} cases that once failed, {failed} fail again", cases.len());
    failed == 0 && !cases.is_empty()
}

/// Runs these seeds on all CPUs. Tells the story of the first failure of each kind.
fn run_all(wanted: Wanted) -> ExitCode {
    let Wanted {
        first,
        last,
        ends_early,
    } = wanted;
    let next = AtomicU64::new(first);
    let (faults, begun) = (AtomicU64::new(0), Instant::now());
    let failed: Mutex<BTreeMap<String, Vec<u64>>> = Mutex::default();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let is_over = || ends_early && !failed.lock().expect("a lock").is_empty();
    let seed_after = || next.fetch_add(1, Ordering::Relaxed);
    let one = |seed: u64| {
        let outcome = life::run(&Case::of(seed));
        faults.fetch_add(outcome.faults.into(), Ordering::Relaxed);
        let mut violation = outcome.violations.into_iter().next();
        // The same seed gives the same run, bit for bit: checked on some.
        if seed.is_multiple_of(AGAIN_EVERY)
            && life::run(&Case::of(seed)).trace.digest() != outcome.trace.digest()
        {
            violation.get_or_insert_with(|| "the same seed ran in two ways".to_owned());
        }
        if let Some(violation) = violation {
            let mut failed = failed.lock().expect("a lock");
            failed.entry(shrink::kind(&violation)).or_default().push(seed);
        }
    };
    std::thread::scope(|scope| {
        let work = || {
            let seeds = std::iter::repeat_with(seed_after).take_while(|seed| *seed < last && !is_over());
            seeds.for_each(one);
        };
        (0..threads).for_each(|_| drop(scope.spawn(work)));
    });
    let failed = failed.into_inner().expect("a lock");
    for (kind, seeds) in &failed {
        let seed = seeds.iter().min().expect("a seed");
        println!("{} seeds, the first is {seed}: {kind}", seeds.len());
        if !ends_early {
            shrink::tell(&Case::of(*seed));
        }
    }
    let (count, faults) = (next.into_inner().min(last) - first, faults.into_inner());
    let failures: usize = failed.values().map(Vec::len).sum();
    println!(
        "{count} seeds from {first}, {faults} faults, {failures} failed, {:.1} s",
        begun.elapsed().as_secs_f64()
    );
    match failed.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// Each seed that is a multiple of this runs twice.
const AGAIN_EVERY: u64 = 8;

/// Prints everything that happens in a case.
fn story(case: &Case) -> ExitCode {
    let mut trace = trace::Trace::default();
    trace.whole = Some(Vec::new());
    let outcome = life::run_with(case, trace);
    outcome
        .trace
        .whole
        .iter()
        .flatten()
        .for_each(|line| println!("{line}"));
    match outcome.violations.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

fn usage() -> ExitCode {
    eprintln!("faults [--seeds FIRST..LAST [--first] | --story SEED | --case FILE]");
    ExitCode::FAILURE
}
