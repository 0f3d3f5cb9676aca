//! Regenerates the documents of published claims, and keeps a log of every run of the claims.
//!
//! The log shows when a constant was changed to get closer to a claim. A constant changed after a run makes the claim's values
//! `chosen-after-a-run`, and the log shows what changed between two entries.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::cargo::{Build, build, metadata};
use crate::passed::{self, Record, Rerun};
use crate::tally::Tally;

/// Files that are generated and committed. The log and the bands are in the same folder.
const MADE: [&str; 4] = [
    "REPRODUCTION.md",
    "REPRODUCTION-DETAILS.md",
    "scoreboard-by-paper.svg",
    "scoreboard-by-attribution.svg",
];
/// Folder in which runs of the simulator are cached until the document is complete.
const KEPT: &str = "runs";
/// How long this step takes on two cores.
const TAKES: Duration = Duration::from_secs(11 * 60);
const LOG: &str = "data/reproduction/log.toml";
const LOG_HEAD: &str = "\
# Logged runs of the claims since their measure was mended on 2026-11-25, the last one below. `commit` is the code and data that ran; `changed` says what
# was changed since the run before, and where it comes from; `measure` (by hand) what was changed in how numbers are judged. `counted` are our numbers
# that counted in the headline then, `beside` all others that the claims state: those of the first three runs are from the pages that were committed with
# them, to three digits. Written by `cargo xtask reproduction --log \"what changed\"`.
";

/// Options of `reproduction`.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct ReproductionArgs {
    /// Write docs/ and add this run to the log; the text says what changed since the last run, and names the source
    #[arg(long, value_name = "WHAT CHANGED")]
    log: Option<String>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Log {
    #[serde(default)]
    run: Vec<Entry>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    date: String,
    commit: String,
    changed: String,
    /// How the judging of numbers changed; written by hand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    measure: Option<String>,
    #[serde(flatten)]
    numbers: Numbers,
    /// Our numbers that counted in the headline; `beside` has our other numbers for values that the claims state.
    #[serde(default)]
    counted: Values,
    #[serde(default)]
    beside: Values,
}

/// Our numbers, by claim and by the value's name.
type Values = BTreeMap<String, BTreeMap<String, f64>>;

/// Our results for the claims.
struct Made {
    numbers: Numbers,
    counted: Values,
    beside: Values,
}

/// The headline of `homenode reproduce all --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Numbers {
    values: u64,
    within_1_25x: u64,
    within_2x: u64,
    within_3x: u64,
    sign_right: u64,
    held: u64,
    /// Absent if more than half of the values differ from the claims in sign.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    median_abs_ln: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    median_ratio: Option<f64>,
}

/// Regenerates the documents without cached runs, and compares the committed documents and the log's last entry with them.
/// With `--log`, writes documents and log instead.
pub(crate) fn run(args: &ReproductionArgs, rerun: Rerun) -> anyhow::Result<Tally> {
    const NAME: &str = "reproduction";
    let mut record = Record::read()?;
    record.begin(NAME)?;
    if let Rerun::Changed { until } = rerun {
        println!("{NAME} tests {}", passed::paths_of(NAME));
        if let Some(date) = record.passed(NAME, NAME)? {
            println!("not run: passed on {date} with the files as they are now");
            return Ok(Tally::SKIPPED);
        }
        if Instant::now() + TAKES > until {
            println!("NOT RUN: no time is left; run `make reproduction` and commit the record");
            return Ok(Tally::SKIPPED);
        }
    }
    let begin = Instant::now();
    let metadata = metadata()?;
    let root: &Path = metadata.workspace_root.as_ref();
    // The commit is read before the run, because commits made during the run are not part of it.
    let commit = args.log.is_some().then(|| committed(root)).transpose()?;
    build(Build::BesideTests)?;
    let made = Path::new(&metadata.target_directory).join("reproduction");
    // Start without the cache of an earlier run.
    fs::remove_dir_all(made.join(KEPT)).ok();
    fs::create_dir_all(&made)?;
    let program = Path::new(&metadata.target_directory).join("debug/homenode");
    let Made {
        numbers,
        counted,
        beside,
    } = make(&program, &made, &root.join(LOG))?;
    let log = fs::read_to_string(root.join(LOG)).unwrap_or_default();
    let mut log: Log = toml::from_str(&log).with_context(|| format!("{LOG} cannot be read"))?;
    if let (Some(changed), Some(commit)) = (&args.log, commit) {
        ensure!(
            !changed.trim().is_empty(),
            "name the change since the last run: --log 'what changed, and its source'"
        );
        ensure!(
            committed(root)? == commit,
            "another commit was made during this run: run this again"
        );
        log.run.push(Entry {
            date: output(Command::new("date").arg("+%Y-%m-%d"))?,
            commit,
            changed: changed.clone(),
            measure: None,
            numbers: numbers.clone(),
            counted: counted.clone(),
            beside: beside.clone(),
        });
        fs::write(root.join(LOG), format!("{LOG_HEAD}\n{}", toml::to_string(&log)?))?;
        // The document includes the log's entry of this run, so the document is made a second time, from the cached runs of the
        // simulator.
        make(&program, &made, &root.join(LOG))?;
        for name in MADE {
            fs::copy(made.join(name), root.join("docs").join(name))?;
        }
        // The files just written are among the tested ones, so the record is read again with their new digest.
        record = Record::read()?;
        record.begin(NAME)?;
    }
    let last = log.run.last();
    let is_last = |last: &Entry| last.numbers == numbers && last.counted == counted && last.beside == beside;
    let mut same = are_committed(root, &made)?;
    if !last.is_some_and(is_last) {
        same = false;
        println!("the last run in {LOG} has other numbers than came out now: {numbers:?}");
    }
    if !same {
        println!(
            "see what changed, then write docs and log with `cargo xtask reproduction --log 'what changed, and where it comes from'`"
        );
    }
    if same {
        record.add(NAME, NAME, begin.elapsed().as_secs())?;
        record.write()?;
    }
    Ok(Tally::of(same))
}

/// Returns true if the committed documents and figures equal the files in this directory; prints those that differ.
fn are_committed(root: &Path, made: &Path) -> anyhow::Result<bool> {
    let mut same = true;
    for name in MADE {
        let committed = root.join("docs").join(name);
        let made = made.join(name);
        if fs::read(&made)? != fs::read(&committed).unwrap_or_default() {
            same = false;
            println!("{} is not what came out: {}", committed.display(), made.display());
        }
    }
    Ok(same)
}

/// Writes documents and figures into a directory. Runs at the lowest priority, so that other work on the machine goes first.
fn make(program: &Path, directory: &Path, log: &Path) -> anyhow::Result<Made> {
    let run = Command::new("nice")
        .args(["-n", "19"])
        .arg(program)
        .args(["reproduce", "all", "--json", "--cache"])
        .arg(directory.join(KEPT))
        .arg("--document")
        .arg(directory.join(MADE[0]))
        .arg("--log")
        .arg(log)
        .arg("--figures")
        .arg(directory)
        .output()
        .context("cannot start homenode")?;
    if !run.status.success() {
        bail!(
            "`homenode reproduce` failed: {}",
            String::from_utf8_lossy(&run.stderr)
        );
    }
    let claims: Value = serde_json::from_slice(&run.stdout)?;
    let all = claims["claims"]
        .as_array()
        .context("`homenode reproduce` lists no claims")?;
    let pending = all.iter().filter(|claim| claim["verdict"] == "pending");
    let pending: Vec<String> = pending
        .map(|claim| format!("{}: {}", claim["id"], claim["reason"]))
        .collect();
    ensure!(
        pending.is_empty(),
        "claims are not decided: {}",
        pending.join("; ")
    );
    let (counted, beside) = values(all);
    Ok(Made {
        numbers: serde_json::from_value(claims["scoreboard"].clone())?,
        counted,
        beside,
    })
}

/// Returns our numbers for the values that the papers' claims state: those that count in the headline, and the others.
fn values(claims: &[Value]) -> (Values, Values) {
    let (mut counted, mut beside) = (Values::new(), Values::new());
    let stated = claims.iter().filter(|claim| {
        claim["source"] != "own"
            && claim["measured_here"] == false
            && claim["published"]["value"] != Value::Null
    });
    for claim in stated {
        let id = claim["id"].as_str().unwrap_or_default();
        for part in claim["parts"].as_array().into_iter().flatten() {
            let (Some(name), Some(score)) = (part["name"].as_str(), part["score"].as_object()) else {
                continue;
            };
            // JSON has no infinity. It comes out if a program that is compared with ours did not end.
            let ours = score.get("ours").and_then(Value::as_f64).unwrap_or(f64::INFINITY);
            let counts = part["kind"] == "predicted" && part["trivial"] == false;
            let into = if counts { &mut counted } else { &mut beside };
            into.entry(id.to_owned())
                .or_default()
                .insert(name.to_owned(), ours);
        }
    }
    (counted, beside)
}

/// Returns the current commit, and checks that crates and data have no uncommitted changes.
fn committed(root: &Path) -> anyhow::Result<String> {
    let git = |args: &[&str]| output(Command::new("git").current_dir(root).args(args));
    let changed = git(&["status", "--porcelain", "--", "crates", "data", "Cargo.lock"])?;
    ensure!(
        changed.is_empty(),
        "commit first: the log names the commit that ran, and these differ from it:\n{changed}"
    );
    git(&["rev-parse", "--short=10", "HEAD"])
}

fn output(command: &mut Command) -> anyhow::Result<String> {
    let run = command.output()?;
    ensure!(
        run.status.success(),
        "{command:?} failed: {}",
        String::from_utf8_lossy(&run.stderr)
    );
    Ok(String::from_utf8_lossy(&run.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_reads_as_it_was_written() {
        let numbers = Numbers {
            values: 63,
            within_1_25x: 10,
            within_2x: 26,
            within_3x: 40,
            sign_right: 57,
            held: 9,
            median_abs_ln: None,
            median_ratio: Some(0.48),
        };
        let entry = Entry {
            date: "2026-11-25".into(),
            commit: "52acbe3000".into(),
            changed: "nothing \"yet\"".into(),
            measure: None,
            numbers: numbers.clone(),
            counted: [("tavo.npb".to_owned(), [("cg".to_owned(), 3.5)].into())].into(),
            beside: Values::new(),
        };
        let text = toml::to_string(&Log { run: vec![entry] }).unwrap();
        let log: Log = toml::from_str(&text).unwrap();
        assert_eq!(log.run[0].numbers, numbers);
        assert_eq!(log.run[0].counted["tavo.npb"]["cg"], 3.5);
        assert_eq!(log.run[0].changed, "nothing \"yet\"");
        assert!(toml::from_str::<Log>("").unwrap().run.is_empty());
    }

    #[test]
    fn numbers_of_the_headline_are_told_from_others() {
        let claims = serde_json::json!([
            { "id": "a.b", "source": "X", "measured_here": false, "published": { "value": 1.0 }, "parts": [
                { "name": "in", "kind": "predicted", "trivial": false, "score": { "ours": 2.0 } },
                { "name": "trivial", "kind": "predicted", "trivial": true, "score": { "ours": 3.0 } },
                { "name": "fitted", "kind": "calibrated", "trivial": false, "score": { "ours": 4.0 } },
                { "name": "test", "kind": "predicted", "trivial": false, "score": null },
            ] },
            { "id": "own.b", "source": "own", "measured_here": false, "published": { "value": 1.0 }, "parts": [
                { "name": "in", "kind": "predicted", "trivial": false, "score": { "ours": 2.0 } },
            ] },
        ]);
        let (counted, beside) = values(claims.as_array().unwrap());
        assert_eq!(
            counted,
            [("a.b".to_owned(), [("in".to_owned(), 2.0)].into())].into()
        );
        assert_eq!(beside["a.b"].keys().collect::<Vec<_>>(), ["fitted", "trivial"]);
    }

    #[test]
    fn the_committed_log_reads() {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../");
        let log: Log = toml::from_str(&fs::read_to_string(format!("{root}{LOG}")).unwrap()).unwrap();
        assert!(
            log.run
                .iter()
                .all(|entry| !entry.changed.is_empty() && entry.commit.len() == 10)
        );
    }
}
