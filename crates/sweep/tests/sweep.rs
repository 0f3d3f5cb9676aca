//! Tests sweeps on the simulated host: what affects the bytes of the results, and what is refused before anything runs.

use std::fs;
use std::path::Path;

use homenode_reproduce::jobs::Progress;
use homenode_sweep::{Plan, Program, Rows, Shard, Store, SweepError, Table, merge, run};
use parquet::file::reader::{FileReader as _, SerializedFileReader};

const PLAN: &str = r#"
scenario = "permits"
seeds = "1..3"
policies = ["default", "homenode"]
runs_per_task = 5
[set]
"vm.fluid.permit" = "250k..2M/2"
duration = "2s,3s"
warm_up = ["0s"]
"#;

fn plan(text: &str) -> Plan {
    Plan::parse("plan.toml", text).unwrap()
}

fn made(plan: &Plan, tasks: &[usize], jobs: usize, store: Option<&Store>) -> (Vec<Rows>, Progress) {
    let seen = Progress::silent();
    let rows = run(plan, tasks, jobs, store, &seen).unwrap();
    (rows, seen)
}

fn all(plan: &Plan) -> Vec<usize> {
    (0..plan.tasks()).collect()
}

fn bytes(plan: &Plan, rows: &[Rows]) -> (Vec<u8>, Vec<u8>, String) {
    let (means, runs) = (
        Table::means(plan, rows).unwrap(),
        Table::runs(plan, rows).unwrap(),
    );
    (means.parquet().unwrap(), runs.parquet().unwrap(), means.csv())
}

fn store(directory: &Path) -> Store {
    Store::open(directory, Program::running().unwrap()).unwrap()
}

#[test]
fn the_tables_bytes_do_not_depend_on_jobs_shards_stores_or_the_size_of_tasks() {
    let plan = plan(PLAN);
    assert_eq!((plan.runs(), plan.tasks()), (24, 5));
    let (rows, seen) = made(&plan, &all(&plan), 1, None);
    assert_eq!(seen.done().0, 24);
    let expected = bytes(&plan, &rows);
    let (rows, _) = made(&plan, &all(&plan), 4, None);
    assert_eq!(bytes(&plan, &rows), expected);

    let folder = tempfile::tempdir().unwrap();
    let stores = ["a", "b"].map(|name| store(&folder.path().join(name)));
    for (at, shard) in ["1/3", "2/3", "3/3"].into_iter().enumerate() {
        let tasks = shard.parse::<Shard>().unwrap().tasks(&plan);
        made(&plan, &tasks, 2, Some(&stores[at % 2]));
    }
    assert_eq!(bytes(&plan, &merge(&plan, &stores).unwrap()), expected);

    let other = Plan::parse("plan.toml", &PLAN.replace("per_task = 5", "per_task = 1")).unwrap();
    assert_eq!((other.digest(), other.tasks()), (plan.digest(), 24));
    let mut backwards = all(&other);
    backwards.reverse();
    let (rows, _) = made(&other, &backwards, 3, None);
    assert_eq!(bytes(&other, &rows), expected);
}

#[test]
fn a_store_of_a_sweep_that_was_killed_is_taken_up() {
    let plan = plan(PLAN);
    let folder = tempfile::tempdir().unwrap();
    let stores = [store(folder.path())];
    made(&plan, &[0, 3], 2, Some(&stores[0]));
    let Err(SweepError::Missing(missing)) = merge(&plan, &stores) else {
        panic!("tasks are missing")
    };
    assert_eq!((missing.count, missing.all, missing.first.len()), (3, 5, 3));
    let said = missing.to_string();
    assert!(
        said.contains("3 of 5 tasks are missing: task 1 from duration = 2s, vm.fluid.permit = 250000, warm_up = 0s, homenode, seed 3;"),
        "{said}"
    );
    let (rows, seen) = made(&plan, &all(&plan), 2, Some(&stores[0]));
    // 14 runs were missing: those of tasks 1, 2 and 4, of which the last is one run short.
    assert_eq!(seen.done().0, 14);
    let (fresh, _) = made(&plan, &all(&plan), 2, None);
    assert_eq!(rows, fresh);
    assert_eq!(merge(&plan, &stores).unwrap(), fresh);
}

#[test]
fn a_damaged_file_of_a_store_is_made_anew_and_it_is_said() {
    let plan = plan(PLAN);
    let folder = tempfile::tempdir().unwrap();
    let one = store(folder.path());
    let (rows, _) = made(&plan, &all(&plan), 2, Some(&one));
    let files: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|file| file.unwrap().path())
        .collect();
    assert_eq!(files.len(), 5);
    let whole = fs::read(&files[0]).unwrap();
    fs::write(&files[0], &whole[..whole.len() / 2]).unwrap();
    let rest: Result<Vec<Rows>, SweepError> = merge(&plan, &[store(folder.path())]);
    let said = rest.unwrap_err().to_string();
    assert!(
        said.contains("1 of 5") && said.contains("is not a finished run"),
        "{said}"
    );
    let (again, seen) = made(&plan, &all(&plan), 2, Some(&one));
    assert_eq!(again, rows);
    let notes = seen.notes();
    assert!(
        notes.len() == 1 && notes[0].contains("is not a finished run"),
        "{notes:?}"
    );
    assert!(seen.done().0 <= 5);
    assert_eq!(fs::read(&files[0]).unwrap(), whole);
}

#[test]
fn another_plans_tasks_are_not_taken() {
    let folder = tempfile::tempdir().unwrap();
    let one = store(folder.path());
    let first = plan(PLAN);
    made(&first, &all(&first), 2, Some(&one));
    let second = plan(&PLAN.replace("1..3", "2..4"));
    let (_, seen) = made(&second, &all(&second), 2, Some(&one));
    assert_eq!(seen.done().0, 24);
}

#[test]
fn a_program_as_policy_is_not_kept_in_a_store() {
    let folder = tempfile::tempdir().unwrap();
    let plan = plan("scenario = \"permits\"\npolicies = [\"exec:./mine\"]\n");
    let refused = run(&plan, &[0], 1, Some(&store(folder.path())), &Progress::silent()).unwrap_err();
    assert!(
        matches!(&refused, SweepError::Input(said) if said.contains("without a store")),
        "{refused}"
    );
    assert!(store(folder.path()).keep_plan(&plan).is_err());
}

#[test]
fn every_key_and_value_is_checked_before_anything_runs() {
    for (set, said) in [
        (
            "\"vm.fluit.permit\" = \"1k,2k\"",
            "no VM is named `fluit`; did you mean `fluid`?",
        ),
        (
            "\"vm.fluid.permti\" = \"1k\"",
            "unknown key `permti`; did you mean `permit`?",
        ),
        (
            "\"vm.fluid.permit\" = \"250k,1\"",
            "vm.fluid.permit = 1: data/scenarios/permits.toml: `1` is too small a permit",
        ),
        ("\"vm.fluid.vcpus\" = \"1..3/3,4\"", "is not a number of values"),
        ("\"vm.fluid.vcpus\" = \"1,900\"", "vm.fluid.vcpus = 900: "),
        ("\"vm.fluid\" = \"1\"", "continue the path after a dot"),
        ("\"vm.fluid.name.x\" = \"1\"", "`name` is string, not a table"),
        (
            "\"workload.lbn.about\" = \"x\"",
            "no workload is named `lbn`; did you mean `lbm`?",
        ),
        ("\"event.0.at\" = \"1s\"", "has 0 events"),
        (
            "\"config.periot\" = \"1s\"",
            "unknown key `periot`; did you mean `period`?",
        ),
        ("\"config.policies\" = \"tavo\"", "--policy"),
        ("\"seed\" = \"1\"", "--seeds"),
        ("\"a b\" = \"1\"", "is not a key"),
        ("machine = \"r911\"", "did you mean `r910`?"),
        ("machine = \"nowhere.toml\"", "there is no such file"),
        ("duration = []", "empty"),
        ("weight = \"1..100000\"", "unknown key `weight`"),
    ] {
        let text = format!("scenario = \"permits\"\n[set]\n{set}\n");
        match Plan::parse("plan.toml", &text) {
            Err(SweepError::Input(error)) => assert!(error.contains(said), "{set}: {error}"),
            other => panic!("{set}: {other:?}"),
        }
    }
    for (text, said) in [
        ("scenario = \"permit\"", "did you mean `permits`?"),
        ("seeds = 1", "the plan names no scenario"),
        ("scenario = \"permits\"\nseeds = \"3..1\"", "above their end"),
        ("scenario = \"permits\"\nseeds = -1", "0 or above"),
        (
            "scenario = \"permits\"\npolicies = [\"tavoo\"]",
            "did you mean `tavo`?",
        ),
        ("scenario = \"permits\"\npolicies = [\"tavo\", \"tavo\"]", "twice"),
        (
            "scenario = \"permits\"\nmetrics = [\"runtime\"]",
            "did you mean `runtime_s`?",
        ),
        ("scenario = \"permits\"\nruns_per_task = 0", "1 to 64"),
        (
            "scenario = \"permits\"\nseed = 1",
            "unknown key `seed`; did you mean `seeds`?",
        ),
        (
            "scenario = \"permits\"\nseeds = \"1..60000\"\n[set]\nduration = \"1s,2s\"",
            "at most 100000",
        ),
    ] {
        let error = Plan::parse("plan.toml", text).unwrap_err().to_string();
        assert!(error.contains(said), "{text}: {error}");
    }
    for shard in ["0/3", "4/3", "1", "a/b", "-1/2", "1/0"] {
        assert!(shard.parse::<Shard>().is_err(), "{shard}");
    }
}

#[test]
fn a_plan_says_the_same_as_its_file_and_needs_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let workload = fs::read_to_string("../../data/workloads/spec/lbm.toml");
    let workload = workload.or_else(|_| find("lbm.toml")).unwrap();
    fs::write(
        path("own.toml"),
        workload.replace("name = \"lbm\"", "name = \"mine\""),
    )
    .unwrap();
    let machine = fs::read_to_string("../../data/machines/r420.toml").unwrap();
    fs::write(path("host.toml"), &machine).unwrap();
    fs::write(path("agent.toml"), "period = \"2s\"\n").unwrap();
    let scenario = "name = \"s\"\nmachine = \"host.toml\"\nduration = \"2s\"\n[[vm]]\nname = \"a.b\"\nvcpus = 1\nmemory = \"1GiB\"\n\
                    workload = \"own.toml\"\n";
    fs::write(path("s.toml"), scenario).unwrap();
    let text = "scenario = \"s.toml\"\nconfig = \"agent.toml\"\n[set]\n\"vm.'a.b'.vcpus\" = \"1..2\"\n\
                \"vm.*.workload\" = \"own.toml,povray\"\n\"workload.mine.program.misses_in_flight\" = [2, 4]\n";
    fs::write(path("p.toml"), text).unwrap();
    let plan = Plan::open(&path("p.toml")).unwrap();
    let whole = plan.to_toml().unwrap();
    let digest = plan.digest().unwrap();
    let (rows, _) = made(&plan, &all(&plan), 2, None);
    folder.close().unwrap();
    let again = Plan::parse("elsewhere.toml", &whole).unwrap();
    assert_eq!(
        (again.digest().unwrap(), again.to_toml().unwrap()),
        (digest, whole)
    );
    assert_eq!(
        bytes(&plan, &rows),
        bytes(&again, &made(&again, &all(&again), 1, None).0)
    );
}

fn find(name: &str) -> std::io::Result<String> {
    for folder in fs::read_dir("../../data/workloads")? {
        let path = folder?.path().join(name);
        if path.is_file() {
            return fs::read_to_string(path);
        }
    }
    Err(std::io::ErrorKind::NotFound.into())
}

#[test]
fn the_table_reads_back_with_the_settings_as_numbers() {
    let text = PLAN.replace(
        "runs_per_task",
        "metrics = [\"permit_throttled_s\", \"decisions\", \"cpus_busy\"]\nruns_per_task",
    );
    let plan = plan(&text);
    let (rows, _) = made(&plan, &all(&plan), 2, None);
    let table = Table::means(&plan, &rows).unwrap();
    let file = bytes::Bytes::from(table.parquet().unwrap());
    let reader = SerializedFileReader::new(file).unwrap();
    let read: Vec<_> = reader
        .get_row_iter(None)
        .unwrap()
        .map(|row| row.unwrap().to_json_value())
        .collect();
    assert_eq!(read.len(), table.rows.len());
    for (read, row) in read.iter().zip(&table.rows) {
        for (column, value) in table.columns.iter().zip(row) {
            assert_eq!(&read[&column.name], value, "{}", column.name);
        }
    }
    // The permit throttles the VM, and a larger permit throttles it less.
    let mean = |permit: f64| {
        let is_it = |row: &&serde_json::Value| {
            row["vm.fluid.permit"] == permit
                && row["vm"] == "fluid"
                && row["duration"] == 3.0
                && row["policy"] == "default"
        };
        read.iter().find(is_it).unwrap()["mean"].as_f64().unwrap()
    };
    assert!(mean(250e3) > mean(2e6), "{} {}", mean(250e3), mean(2e6));
    let of_host = read.iter().filter(|row| row["metric"] == "decisions");
    assert!(
        of_host.clone().count() == 8
            && of_host
                .clone()
                .all(|row| row["vm"].is_null() && row["count"] == 3)
    );
    assert!(
        read.iter()
            .any(|row| row["metric"] == "cpus_busy" && row["node"] == 0)
    );
}

#[test]
fn rows_of_other_runs_make_no_table() {
    let plan = plan(PLAN);
    let (rows, _) = made(&plan, &[0, 1], 2, None);
    assert!(matches!(Table::means(&plan, &rows), Err(SweepError::Failed(_))));
    let twice: Vec<Rows> = rows.iter().chain(&rows).cloned().collect();
    assert!(Table::means(&plan, &twice).is_err());
    assert!(run(&plan, &[99], 1, None, &Progress::silent()).is_err());
}
