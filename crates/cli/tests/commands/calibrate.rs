//! `homenode calibrate` as a user runs it. The figures depend on the machine's load, so these tests check only that it ends with
//! plausible figures.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

fn homenode() -> Command {
    Command::new(env!("CARGO_BIN_EXE_homenode"))
}

fn json(output: &Output) -> Value {
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).expect("one JSON value")
}

/// Returns true if every number in the value is finite. JSON has `null` for other numbers.
fn finite(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Array(values) => values.iter().all(finite),
        Value::Object(fields) => fields.values().all(finite),
        _ => true,
    }
}

#[test]
fn a_quick_calibration_and_comparison_give_a_machine_that_the_other_commands_take() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("here.toml");
    let mut command = homenode();
    command
        .args(["calibrate", "--quick", "--seconds", "2", "--json", "--output"])
        .arg(&file);
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    if cpus > 1 {
        command.arg("--validate");
    }
    let result = json(&command.output().unwrap());
    let calibration = &result["calibration"];
    let median = |figure: &Value| figure["median"].as_f64().unwrap();
    let pair = &calibration["pairs"][0];
    for figure in [
        &calibration["clock_hz"],
        &calibration["l1_ns"],
        &calibration["llc_ns"],
        &pair["latency_ns"],
    ] {
        assert!(median(figure) > 0.0 && finite(figure), "{figure}");
        assert!(figure["min"].as_f64() <= figure["median"].as_f64(), "{figure}");
    }
    // Memory is about fifty times slower than L1, which no other load hides.
    assert!(
        median(&calibration["l1_ns"]) < median(&pair["latency_ns"]),
        "{calibration}"
    );
    assert!(median(&pair["read"][0]["bytes_per_s"]) > 0.0);
    if cpus > 1 {
        let validation = &result["validation"];
        assert!(
            finite(&validation["cases"]) && finite(&validation["error_mean"]),
            "{validation}"
        );
        let cases = validation["cases"].as_array().unwrap();
        let sides = cases.iter().flat_map(|case| case["sides"].as_array().unwrap());
        assert!(sides.clone().count() >= 4);
        for side in sides {
            let positive = |value: &Value| value.as_f64().is_some_and(|value| value > 0.0);
            assert!(
                positive(&side["slowdown"]["median"]) && positive(&side["predicted"]),
                "{side}"
            );
        }
    }
    let machine = json(
        &homenode()
            .arg("machine")
            .arg(&file)
            .arg("--json")
            .output()
            .unwrap(),
    );
    for key in ["name", "cpus", "llcs", "distances", "hardware"] {
        assert_eq!(machine[key], result["machine"][key]);
    }
    let twin = format!("twin:{}", file.display());
    let args = ["run", "--host", &twin, "--fast", "--duration", "1s", "--json"];
    let run = homenode().args(args).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_measured() {
    for (args, why) in [
        (&["--node", "999"][..], "CPUs and memory of node 999"),
        (
            &["--output", "/no/such/place/file.toml"],
            "the directory of this file does not exist",
        ),
        (&["--output", "/"], "this path is a directory"),
        (&["--seconds", "0"], "0 is not in"),
    ] {
        let begin = Instant::now();
        let output = homenode().arg("calibrate").args(args).output().unwrap();
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {complaint}");
        assert!(complaint.contains(why), "{args:?}: {complaint}");
        assert!(begin.elapsed() < Duration::from_secs(30));
    }
}

#[test]
fn a_pools_size_is_measured_before_its_scenario_runs() {
    let of = |args: &[&str]| homenode().args(args).output().unwrap();
    let measured = ["--program", "bigbench", "--seconds", "5"];
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("flip.toml");
    let scenario = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/scenarios/flip.toml");
    let text = std::fs::read_to_string(scenario).unwrap();
    let sized: Vec<&str> = text.lines().filter(|line| line.contains("initial = ")).collect();
    let [sized] = sized[..] else { panic!("{sized:?}") };
    let unsized_line = r#"driver_domain = { vm = "privvm", pool = { fixed = true } }"#;
    std::fs::write(&file, text.replace(sized, unsized_line)).unwrap();
    let file = file.to_str().unwrap();
    let refused = of(&["sim", file]);
    let complaint = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{complaint}");
    assert!(complaint.contains("`homenode calibrate --pool"), "{complaint}");
    let found = json(&of(
        &[&["calibrate", "--json", "--pool", file], &measured[..]].concat()
    ));
    assert_eq!(
        (&found["schema"], &found["vm"], &found["driver_domain"]),
        (&"pool/1".into(), &"flipped".into(), &"privvm".into())
    );
    let pages = found["programs"][0]["pages_max"].as_u64().unwrap();
    assert!(
        pages >= 256 && found["size_bytes"].as_u64() == Some(4096 * pages),
        "{found}"
    );
    let shown = of(&[&["calibrate", "--pool", "flip"], &measured[..]].concat());
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(
        shown.contains(&format!("initial = \"{}KiB\"", 4 * pages)),
        "{shown}"
    );
    for (args, why) in [
        (["flip", "--program", "stream"], "more --seconds"),
        (["flip", "--program", "bigbanch"], "bigbench"),
        (["tavo-mixed", "--program", "bigbench"], "no VM exchanges pages"),
        (["flip", "--output", "x.toml"], "cannot be used with"),
    ] {
        let output = of(&[&["calibrate", "--pool"], &args[..]].concat());
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {complaint}");
        assert!(complaint.contains(why), "{args:?}: {complaint}");
    }
}

#[test]
fn a_worker_ends_with_its_input_and_with_its_parent() {
    let first = "for cpu in $(taskset -pc $$ | sed 's/.*: //; s/[,-].*//'); do echo $cpu; done";
    let cpu = Command::new("sh").args(["-c", first]).output().unwrap();
    let cpu = String::from_utf8(cpu.stdout)
        .unwrap()
        .trim()
        .parse::<u32>()
        .unwrap_or(0)
        .to_string();
    let args = ["calibrate-kernel", "--kernel", "uniform:1048576", "--cpu", &cpu];
    let ended = homenode().args(args).stdin(Stdio::null()).output().unwrap();
    assert_eq!(ended.status.code(), Some(0));
    let said = String::from_utf8(ended.stdout).unwrap();
    assert!(
        said.starts_with("load> ready ") && said.lines().count() == 1,
        "{said}"
    );

    // The worker's parent is a shell, so that the parent can be killed while the worker's input stays open here.
    let script = "exec 3<&0; \"$0\" \"$@\" <&3 & echo $!; wait";
    let mut shell = Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_homenode")])
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(shell.stdout.take().unwrap()).lines();
    let pid: u32 = lines.next().unwrap().unwrap().parse().unwrap();
    let said = lines.next().unwrap().unwrap();
    assert!(said.starts_with("load> ready "), "{said}");
    shell.kill().unwrap();
    shell.wait().unwrap();
    let running = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        Path::new(&format!("/proc/{pid}")).exists() && !stat.contains(") Z ")
    };
    let begin = Instant::now();
    while running() && begin.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(!running(), "worker {pid} outlived its parent");
}
