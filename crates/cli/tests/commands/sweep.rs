//! `homenode sweep` as a user runs it. Also reads back the output of `experiment`, which uses the same writer.

use std::fs;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::{homenode, stderr, stdout, text};
use parquet::file::reader::{FileReader as _, SerializedFileReader};
use serde_json::Value;

fn sweep(folder: &Path, args: &[&str]) -> Output {
    let mut command = homenode();
    command
        .arg("sweep")
        .args(args)
        .current_dir(folder)
        .stdin(Stdio::null());
    command.output().unwrap()
}

fn read(path: &Path) -> Vec<Value> {
    let file = bytes::Bytes::from(fs::read(path).unwrap());
    let reader = SerializedFileReader::new(file).unwrap();
    let rows = reader.get_row_iter(None).unwrap();
    rows.map(|row| row.unwrap().to_json_value()).collect()
}

const SET: &str = "vm.fluid.permit=250k..2M/4";

#[test]
fn options_and_a_plan_say_the_same_and_tables_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let options = [
        "permits",
        "--set",
        SET,
        "--set",
        "duration=4s",
        "--set",
        "warm_up=0s",
        "--seeds",
        "1..3",
    ];
    let made = sweep(
        folder,
        &[&options[..], &["--jobs", "1", "--csv", "--parquet", "a.parquet"]].concat(),
    );
    let csv = text(&made);
    assert_eq!(stderr(&made), "", "silent in a pipe");
    assert_eq!(csv.lines().count(), 1 + 4 * 3, "{csv}");
    let rows = read(&folder.join("a.parquet"));
    assert_eq!(rows.len(), 12);
    assert_eq!(
        (&rows[0]["vm.fluid.permit"], &rows[0]["count"]),
        (&Value::from(250e3), &Value::from(3))
    );

    let plan = text(&sweep(folder, &[&options[..], &["--print-plan"]].concat()));
    fs::write(folder.join("plan.toml"), plan).unwrap();
    text(&sweep(
        folder,
        &["plan.toml", "--jobs", "3", "--parquet", "b.parquet"],
    ));
    assert!(fs::read(folder.join("a.parquet")).unwrap() == fs::read(folder.join("b.parquet")).unwrap());

    let runs = sweep(
        folder,
        &[
            "plan.toml",
            "--all-runs",
            "--metric",
            "waiting_s",
            "--metric",
            "decisions",
            "--csv",
        ],
    );
    assert_eq!(text(&runs).lines().count(), 1 + 4 * 3 * 4);
    let shown = text(&sweep(folder, &["plan.toml"]));
    assert!(
        shown.contains("ci95_low") && shown.contains("instructions_g_per_s"),
        "{shown}"
    );
}

#[test]
fn a_sweep_that_is_killed_is_said_to_lack_tasks_and_goes_on_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let options = ["permits", "--set", SET, "--seeds", "1..8", "--runs-per-task", "1"];
    text(&sweep(
        folder,
        &[&options[..], &["--parquet", "whole.parquet"]].concat(),
    ));
    let mut command = homenode();
    let args = [&options[..], &["--store", "s", "--shard", "1/1", "--jobs", "1"]].concat();
    command
        .arg("sweep")
        .args(args)
        .current_dir(folder)
        .stdin(Stdio::null());
    let mut child = command.spawn().unwrap();
    let tasks = || {
        let files = fs::read_dir(folder.join("s"))
            .into_iter()
            .flatten()
            .filter_map(Result::ok);
        files
            .filter(|file| file.file_name().to_string_lossy().ends_with(".json"))
            .count()
    };
    let begin = Instant::now();
    while tasks() < 2 {
        assert!(begin.elapsed() < Duration::from_secs(60), "no task is finished");
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let before = tasks();
    assert!(before < 32, "it was killed in the middle");
    let missing = sweep(folder, &["merge", "s"]);
    assert_eq!((missing.status.code(), stdout(&missing).as_str()), (Some(1), ""));
    let said = format!("{} of 32 tasks are missing: task {before} from ", 32 - before);
    assert!(stderr(&missing).contains(&said), "{}", stderr(&missing));
    text(&sweep(
        folder,
        &[&options[..], &["--store", "s", "--shard", "1/1"]].concat(),
    ));
    text(&sweep(folder, &["merge", "s", "--parquet", "merged.parquet"]));
    assert!(
        fs::read(folder.join("whole.parquet")).unwrap() == fs::read(folder.join("merged.parquet")).unwrap()
    );
}

#[test]
fn what_cannot_be_is_refused_with_status_2_and_nothing_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (args, said) in [
        (
            &["permits", "--set", "vm.fluit.permit=1k,2k", "--store", "s"][..],
            "did you mean `fluid`?",
        ),
        (
            &["permits", "--set", "vm.fluid.permit"],
            "write a key, `=` and values",
        ),
        (
            &["permits", "--set", "vm.fluid.permit=3M..50k/2"],
            "its beginning is above its end",
        ),
        (
            &["permits", "--seeds", "1..10", "--shard", "3/2", "--store", "s"],
            "`1/8` is the first of eight",
        ),
        (&["permits", "--shard", "1/2"], "--store"),
        (&["permits", "--slurm"], "--store"),
        (
            &["permits", "--parquet", "/nonexistent/x"],
            "the directory of this file does not exist",
        ),
        (&["permits", "--metric", "runtime"], "did you mean `runtime_s`?"),
        (&["permits", "--jobs", "0"], "1..=1024"),
        (&["merge", "nowhere"], "there is no such store"),
        (&["merge"], "STORE"),
        (&[], "FILE"),
    ] {
        let output = sweep(folder, args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stdout(&output));
        assert!(stderr(&output).contains(said), "{args:?}: {}", stderr(&output));
    }
    assert_eq!(fs::read_dir(folder).unwrap().count(), 0);
}

#[test]
fn the_script_for_slurm_is_a_shells_and_runs_a_part_where_slurm_says_which() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("it's a store");
    let store = store.to_str().unwrap();
    let options = [
        "permits",
        "--set",
        SET,
        "--store",
        store,
        "--slurm",
        "--shards",
        "2",
        "--jobs",
        "2",
        "--sbatch",
        "--partition=x",
    ];
    let script = text(&sweep(folder.path(), &options));
    assert!(
        script.contains("#SBATCH --array=1-2\n") && script.contains("#SBATCH --partition=x\n"),
        "{script}"
    );
    fs::write(folder.path().join("job.sh"), script).unwrap();
    for part in ["1", "2"] {
        let mut shell = std::process::Command::new("sh");
        shell
            .arg("job.sh")
            .current_dir(folder.path())
            .env("SLURM_ARRAY_TASK_ID", part);
        text(&shell.output().unwrap());
    }
    let merged = text(&sweep(folder.path(), &["merge", store, "--csv"]));
    assert_eq!(
        merged,
        text(&sweep(folder.path(), &["permits", "--set", SET, "--csv"]))
    );
}

#[test]
fn rows_of_an_experiment_read_back_as_its_csv_has_them() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("runs.parquet");
    let experiment = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/experiments/example.toml");
    let mut command = homenode();
    command
        .args(["experiment", experiment, "--fresh", "--csv", "--parquet"])
        .arg(&file);
    let csv = text(&command.output().unwrap());
    let rows = read(&file);
    let mut lines = csv.lines();
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    let names: Vec<String> = lines
        .next()
        .unwrap()
        .split(',')
        .map(|name| name.chars().map(plain).collect())
        .collect();
    assert!(!rows.is_empty() && names.len() > 3);
    assert_eq!(lines.clone().count(), rows.len());
    for (line, row) in lines.zip(&rows) {
        for (name, cell) in names.iter().zip(line.split(',')) {
            let same = match &row[name] {
                Value::Null => cell.is_empty(),
                Value::Number(number) => cell.parse::<f64>().ok() == number.as_f64(),
                Value::String(text) => cell == text,
                other => panic!("{other}"),
            };
            assert!(same, "{name}: {cell} is not {}", row[name]);
        }
    }
}

#[test]
fn json_has_the_rows_of_the_csv() {
    let folder = tempfile::tempdir().unwrap();
    let args = [
        "churn",
        "--set",
        "vm.long.vcpus=2,4",
        "--seeds",
        "1,2",
        "--policy",
        "default",
    ];
    let with = |more: &str| text(&sweep(folder.path(), &[&args[..], &[more]].concat()));
    let document: Value = serde_json::from_str(&with("--json")).unwrap();
    let csv = with("--csv");
    let mut lines = csv.lines();
    let columns: Vec<&str> = document["columns"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_str)
        .collect();
    assert_eq!(lines.next().unwrap(), columns.join(","));
    let rows = document["rows"].as_array().unwrap();
    assert_eq!(
        (rows.len(), document["schema"].as_str()),
        (lines.clone().count(), Some("sweep/1"))
    );
    for (row, line) in rows.iter().zip(lines) {
        let of_line: Vec<&str> = line.split(',').collect();
        let mean = columns.iter().position(|name| *name == "mean").unwrap();
        assert_eq!(row["mean"].as_f64(), of_line[mean].parse().ok(), "{line}");
        assert_eq!(row["vm.long.vcpus"].as_f64(), of_line[0].parse().ok(), "{line}");
        assert_eq!(row.as_object().unwrap().len(), columns.len());
    }
}
