//! Files: built-in files parse and state their sources, and bad input is refused in a sentence.

use crate::common::{node, r910};
use homenode_twin::{EventAction, Scenario, Twin, TwinError, VmSpec, WorkloadError};
use homenode_units::{Bytes, CpuId, CpuSet, Ns};

/// Returns the names and texts of the TOML files in a folder of `data` and in its subfolders.
fn data(folder: &str) -> Vec<(String, String)> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data");
    let (mut folders, mut files) = (vec![root.join(folder)], Vec::new());
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
        {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ext| ext == "toml") {
                files.push((name, std::fs::read_to_string(path).unwrap()));
            }
        }
    }
    files.sort();
    files
}

#[test]
fn every_scenario_file_runs_on_its_machine() {
    for (name, text) in data("scenarios") {
        let scenario =
            Scenario::from_toml(&format!("{name}.toml"), &text).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(scenario.name, name);
        assert_eq!(Scenario::builtin(&name), Some(scenario.clone()));
        let machine = homenode_machine_files::preset(scenario.machine.as_deref().unwrap()).unwrap();
        let mut twin =
            Twin::new(machine, &scenario, scenario.seed).unwrap_or_else(|error| panic!("{name}: {error}"));
        twin.run_to_end(Ns::from_millis(50));
    }
}

fn refused(scenario: &Scenario) -> TwinError {
    Twin::new(r910(), scenario, 1).expect_err("must be refused")
}

fn one(spec: VmSpec) -> Scenario {
    Scenario::of("bad", vec![spec])
}

fn vm() -> VmSpec {
    VmSpec::new("a", 4, Bytes::from_gib(8), "soplex")
}

#[test]
fn a_vm_larger_than_the_host_is_refused() {
    let error = refused(&one(VmSpec::new("big", 64, Bytes::from_gib(8), "soplex")));
    assert_eq!(
        error.to_string(),
        "VM big has 64 vCPUs, but machine r910 has only 32 CPUs; give the VM at most 32"
    );
    let error = refused(&one(VmSpec::new("big", 4, Bytes::from_gib(65), "soplex")));
    assert_eq!(
        error.to_string(),
        "VM big has 65GiB of memory, but machine r910 has only 64GiB; give the VM less"
    );
}

#[test]
fn memory_too_small_for_the_programs_is_refused() {
    let error = refused(&one(VmSpec::new("a", 4, Bytes::from_gib(2), "mcf")));
    assert!(matches!(error, TwinError::FootprintBeyondVm { .. }), "{error}");
    let vms = (0..10)
        .map(|at| VmSpec::new(&format!("vm{at}"), 4, Bytes::from_gib(8), "mcf"))
        .collect();
    assert!(matches!(
        refused(&Scenario::of("many", vms)),
        TwinError::FootprintBeyondHost { .. }
    ));
}

#[test]
fn names_and_figures_that_make_no_sense_are_refused() {
    assert!(matches!(
        refused(&Scenario::of("none", Vec::new())),
        TwinError::NoVms { .. }
    ));
    assert!(matches!(
        refused(&Scenario::of("twice", vec![vm(), vm()])),
        TwinError::VmTwice { .. }
    ));
    assert!(matches!(
        refused(&one(VmSpec::new("a", 0, Bytes::from_gib(1), "idle"))),
        TwinError::Figure { .. }
    ));
    assert!(matches!(
        refused(&one(vm().doing(f64::NAN))),
        TwinError::Figure { .. }
    ));
    assert!(matches!(
        refused(&one(vm().on_cpus(CpuSet::one(CpuId(99))))),
        TwinError::Cpus { .. }
    ));
    assert!(matches!(
        refused(&one(vm().with_memory_on(node(9)))),
        TwinError::Nodes { .. }
    ));
    let error = refused(&one(vm().on_cpus((0..3).map(CpuId).collect()).pinned()));
    assert_eq!(
        error.to_string(),
        "VM a: pinning = \"one-to-one\" needs a CPU for each vCPU, but the VM has fewer CPUs than vCPUs; give it more in `cpus`, \
         or fewer vCPUs"
    );
    let error = refused(&one(VmSpec::new("a", 1, Bytes::from_gib(1), "soplx")));
    assert_eq!(
        error.to_string(),
        "VM a: no workload is named `soplx`, and file names end with `.toml`; did you mean `soplex`?"
    );
}

#[test]
fn a_machine_without_timing_is_refused() {
    let mut machine = r910();
    machine.hardware = None;
    let error = Twin::new(machine, &one(vm()), 1).expect_err("must be refused");
    assert!(matches!(error, TwinError::NoHardware { .. }));
    let mut machine = r910();
    machine.cpus[3].llc = None;
    let error = Twin::new(machine, &one(vm()), 1).expect_err("must be refused");
    assert!(matches!(error, TwinError::MissingFigure { .. }), "{error}");
}

#[test]
fn a_misspelt_key_names_its_place_and_the_nearest_valid_one() {
    let text = "name = \"x\"\n[[vm]]\nname = \"a\"\nvcpu = 4\nmemory = \"8GiB\"\nworkload = \"idle\"\n";
    let error = Scenario::from_toml("x.toml", text)
        .expect_err("must be refused")
        .to_string();
    assert!(
        error.starts_with("x.toml:4:1: unknown key `vcpu`; did you mean `vcpus`?"),
        "{error}"
    );
}

#[test]
fn impossible_workload_figures_are_refused_at_their_place() {
    let good = include_str!("../../../../data/workloads/cpu2006/soplex.toml");
    let read = |text: &str| homenode_twin::Workload::from_toml("soplex.toml", text);
    assert!(read(good).is_ok());
    for (from, to, key) in [
        ("cpi_core = 0.33", "cpi_core = -1.0", "program.cpi_core"),
        ("cpi_core = 0.33", "cpi_core = nan", "program.cpi_core"),
        ("write_share = 0.25", "write_share = 1.5", "program.write_share"),
        ("access_share = 1.0", "access_share = 0.4", "program.regions"),
        ("page_share = 0.25", "page_share = 0.5", "program.regions.heat"),
    ] {
        let bad = good.replacen(from, to, 1);
        assert_ne!(bad, good, "{from}");
        let WorkloadError::File(error) = read(&bad).expect_err(to) else {
            panic!("{to}: no place")
        };
        assert_eq!(error.key, key, "{error}");
        let line = error.place.expect("a place").line as usize;
        let last = key.rsplit('.').next().unwrap();
        let said = bad.lines().nth(line - 1).unwrap();
        assert!(said.contains(last), "{error} is not about `{said}`");
    }
}

/// Returns the error message for a scenario file with one change.
fn said(from: &str, to: &str) -> String {
    const GOOD: &str = "\
name = \"x\"
duration = \"100s\"
warm_up = \"10s\"

[[vm]]
name = \"a\"
vcpus = 4
memory = \"8GiB\"
workload = \"soplex\"

[[vm]]
name = \"b\"
vcpus = 4
memory = \"8GiB\"
workload = \"own\"

[[event]]
at = \"5s\"
vm = \"a\"
action = \"stop\"

[[event]]
at = \"6s\"
vm = \"b\"
action.phase = { cpi_factor = 2.0 }

[[workload]]
name = \"own\"
about = \"test\"
[workload.program]
threads = \"single\"
instructions_g_per_thread = 1.0
cpi_core = 1.0
llc_accesses_per_kilo_instruction = 1.0
misses_in_flight = 1.0
hits_in_flight = 1.0
write_share = 0.0
miss_ratio = { m_inf = 0.1, c0 = \"1MiB\", k = 1.0 }
[[workload.program.regions]]
kind = \"private\"
size = \"1MiB\"
access_share = 1.0
";
    let text = GOOD.replacen(from, to, 1);
    assert_eq!(text == GOOD, from.is_empty(), "{from}");
    match Scenario::from_toml("x.toml", &text).and_then(|scenario| Twin::new(r910(), &scenario, 1)) {
        Ok(_) => "fine".to_owned(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn every_complaint_about_a_scenario_names_file_line_column_and_key() {
    assert_eq!(said("", ""), "fine");
    let cases = [
        (
            "warm_up = \"10s\"",
            "warm_up = \"100s\"",
            "x.toml:3:1: scenario x: warm_up is 100s; it must be shorter than the run of 100s (key `warm_up`)",
        ),
        (
            "name = \"b\"",
            "name = \"a\"",
            "x.toml:12:1: scenario x: two VMs are named a; names must differ (key `vm.name`)",
        ),
        (
            "\"soplex\"",
            "\"soplx\"",
            "x.toml:9:1: VM a: no workload is named `soplx`, and file names end with `.toml`; did you mean `soplex`? (key `vm.workload`)",
        ),
        (
            "vcpus = 4",
            "vcpus = 0",
            "x.toml:7:1: VM a: vcpus is 0; a VM needs at least one (key `vm.vcpus`)",
        ),
        (
            "vcpus = 4",
            "vcpus = 64",
            "x.toml:7:1: VM a has 64 vCPUs, but machine r910 has only 32 CPUs; give the VM at most 32 (key `vm.vcpus`)",
        ),
        (
            "\"8GiB\"",
            "\"65GiB\"",
            "x.toml:8:1: VM a has 65GiB of memory, but machine r910 has only 64GiB; give the VM less (key `vm.memory`)",
        ),
        (
            "workload = \"soplex\"",
            "workload = \"soplex\"\nwork_share = -1.0",
            "x.toml:10:1: VM a: work_share is -1; it must be above 0 (key `vm.work_share`)",
        ),
        (
            "workload = \"soplex\"",
            "workload = \"soplex\"\ncpus = \"99\"",
            "x.toml:10:1: VM a: CPUs {99} must be one or more of the CPUs 0-31 of machine r910 (key `vm.cpus`)",
        ),
        (
            "workload = \"soplex\"",
            "workload = \"soplex\"\nmemory_nodes = \"0,9\"",
            "x.toml:10:1: VM a: nodes {0,9} must be one or more of the nodes 0-3, which have memory on machine r910 \
          (key `vm.memory_nodes`)",
        ),
        (
            "vm = \"a\"",
            "vm = \"c\"",
            "x.toml:19:1: event at 5s: no VM is named `c`; did you mean `a`? (key `event.vm`)",
        ),
        (
            "at = \"6s\"",
            "at = \"200s\"",
            "x.toml:23:1: scenario x: `at` of an event is 200s; the run ends at 100s (key `event.at`)",
        ),
        (
            "cpi_factor = 2.0",
            "cpi_factor = -2.0",
            "x.toml:25:18: VM b: cpi_factor is -2; it must be above 0 (key `event.action.phase.cpi_factor`)",
        ),
        (
            "cpi_factor = 2.0",
            "cpi_facto = 2.0",
            "x.toml:25:18: unknown key `cpi_facto`; did you mean `cpi_factor`? (in `event.action`)",
        ),
        (
            "action = \"stop\"",
            "action = \"stopp\"",
            "x.toml:20:10: unknown value `stopp`; did you mean `stop`? (key `event.action`)",
        ),
        (
            "action = \"stop\"",
            "action.migrate = { nodes = \"7\" }",
            "x.toml:20:20: VM a: nodes {7} must be one or more of the nodes 0-3, which have memory on machine r910 \
          (key `event.action.migrate.nodes`)",
        ),
        (
            "action = \"stop\"",
            "action.balloon = { memory = \"0B\" }",
            "x.toml:20:20: VM a: memory of a balloon is 0; it must be above 0 (key `event.action.balloon.memory`)",
        ),
        (
            "write_share = 0.0",
            "write_share = 0.0\nstream_share = 1.5",
            "x.toml:38:1: workload own: program.stream_share is 1.5; it must lie between 0 and 1 \
          (key `workload.program.stream_share`)",
        ),
        (
            "m_inf = 0.1",
            "m_inf = 1.1",
            "x.toml:38:16: workload own: program.miss_ratio.m_inf is 1.1; it must lie between 0 and 1 \
          (key `workload.program.miss_ratio.m_inf`)",
        ),
        (
            "miss_ratio = { m_inf = 0.1, c0 = \"1MiB\", k = 1.0 }",
            "miss_ratio = { table = [[\"1MiB\", 0.5], [\"1MiB\", 0.4]] }",
            "x.toml:38:41: workload own: program.miss_ratio.table[1][0] is 1048576; capacities must be above 0 and grow \
          from point to point (key `workload.program.miss_ratio.table`)",
        ),
        (
            "miss_ratio = { m_inf = 0.1, c0 = \"1MiB\", k = 1.0 }",
            "miss_ratio = { table = [[\"1MiB\", 0.5], [\"2MiB\", 0.6]] }",
            "x.toml:38:49: workload own: program.miss_ratio.table[1][1] is 0.6; a larger cache does not miss more: it must \
          not be above the ratio of the point before (key `workload.program.miss_ratio.table`)",
        ),
        (
            "miss_ratio = { m_inf = 0.1, c0 = \"1MiB\", k = 1.0 }",
            "miss_ratio = { table = [[\"1MiB\", 1.5], [\"2MiB\", 0.6]] }",
            "x.toml:38:34: workload own: program.miss_ratio.table[0][1] is 1.5; it must lie between 0 and 1 \
          (key `workload.program.miss_ratio.table`)",
        ),
        (
            "miss_ratio = { m_inf = 0.1, c0 = \"1MiB\", k = 1.0 }",
            "miss_ratio = { table = [[\"1MiB\", 0.5]] }",
            "x.toml:38:16: workload own: program.miss_ratio.table is 1; a table must have 2 to 1024 points \
          (key `workload.program.miss_ratio.table`)",
        ),
        (
            "miss_ratio = { m_inf = 0.1, c0 = \"1MiB\", k = 1.0 }",
            "miss_ratio = { m_inf = 0.1, k = 1.0 }",
            "x.toml:38:14: key `c0` is missing: a curve has `m_inf`, `c0` and `k`, or a `table` (key `workload.program.miss_ratio`)",
        ),
        (
            "miss_ratio = { m_inf = 0.1, c0",
            "miss_ratio = { table = [], m_inf = 0.1, c0",
            "x.toml:38:14: `table` is given together with `m_inf`, `c0` or `k`: a curve has one or the other (key `workload.program.miss_ratio`)",
        ),
        (
            "c0 = \"1MiB\"",
            "c1 = \"1MiB\"",
            "x.toml:38:29: unknown key `c1`; did you mean `c0`? (in `workload.program.miss_ratio`)",
        ),
        (
            "size = \"1MiB\"",
            "size = \"15000000TiB\"",
            "x.toml:41:1: workload own: program.regions[0].size is 16492674416640000000; it must be at most 1TiB \
          (key `workload.program.regions.size`)",
        ),
        (
            "access_share = 1.0",
            "access_share = 0.5",
            "x.toml:39:20: workload own: the `access_share` values of program.regions add up to 0.5; their sum must be 1 \
          (key `workload.program.regions`)",
        ),
    ];
    for (from, to, expected) in cases {
        assert_eq!(said(from, to), expected);
    }
}

#[test]
fn a_vm_that_an_event_starts_has_no_arrival_of_its_own() {
    let event = EventAction::Start;
    let scenario = |arrival| {
        Scenario::of("x", vec![vm().arriving(arrival)]).with_event(Ns::from_secs(3), "a", event.clone())
    };
    assert!(Twin::new(r910(), &scenario(Ns::ZERO), 1).is_ok());
    let error = refused(&scenario(Ns::from_secs(1)));
    assert!(matches!(error, TwinError::ArrivesTwice { .. }), "{error}");
}

#[test]
fn the_schemas_are_fresh() {
    for (name, text) in homenode_twin::schema::files() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../..")
            .join(name);
        let committed = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            committed == text,
            "{name} is not what the types say; run `cargo xtask schema` and commit it"
        );
    }
}

/// A reader of docs/FORMATS.md finds every key of every table, and every link leads somewhere.
#[test]
fn the_reference_of_formats_has_every_key_and_every_type() {
    let files = homenode_twin::schema::files();
    let (_, text) = files.iter().find(|(path, _)| path.ends_with(".md")).unwrap();
    let headings: Vec<String> = text
        .lines()
        .filter_map(|line| line.strip_prefix("### ").or(line.strip_prefix("## ")))
        .map(str::to_lowercase)
        .collect();
    for link in text
        .split("](#")
        .skip(1)
        .map(|rest| rest.split(')').next().unwrap())
    {
        assert!(
            headings.iter().any(|heading| heading == link),
            "nothing is called {link}"
        );
    }
    for (path, schema) in files.iter().filter(|(path, _)| path.ends_with(".json")) {
        let schema: serde_json::Value = serde_json::from_str(schema).unwrap();
        let defs = schema["$defs"].as_object().unwrap().values();
        for table in defs.chain([&schema]) {
            for key in table["properties"]
                .as_object()
                .into_iter()
                .flatten()
                .map(|(key, _)| key)
            {
                assert!(
                    text.contains(&format!("\n- `{key}` (")),
                    "{path}: {key} is missing"
                );
            }
        }
    }
}

/// Every key that a file may have is in its schema, and the built-in files have no other keys.
#[test]
fn the_files_that_come_with_the_twin_keep_to_their_schemas() {
    for (folder, schema) in ["machines", "scenarios", "workloads"]
        .iter()
        .zip(homenode_twin::schema::files())
    {
        let schema: serde_json::Value = serde_json::from_str(&schema.1).unwrap();
        for (name, text) in data(folder) {
            let value: serde_json::Value = toml::from_str(&text).unwrap();
            keeps_to(&schema, &schema, &value).unwrap_or_else(|why| panic!("{folder}/{name}.toml: {why}"));
        }
    }
}

/// Implements the part of JSON Schema that our schemas use, except patterns.
fn keeps_to(
    root: &serde_json::Value,
    schema: &serde_json::Value,
    value: &serde_json::Value,
) -> Result<(), Box<dyn std::error::Error>> {
    use serde_json::Value;
    if let Some(name) = schema["$ref"].as_str() {
        let inner = root.pointer(name.trim_start_matches('#')).expect("a definition");
        return keeps_to(root, inner, value);
    }
    for any in ["anyOf", "oneOf"] {
        if let Some(options) = schema[any].as_array() {
            let fits = options.iter().any(|option| keeps_to(root, option, value).is_ok());
            return fits
                .then_some(())
                .ok_or_else(|| format!("{value} is none of {options:?}").into());
        }
    }
    if schema.get("const").is_some_and(|only| only != value) {
        return Err(format!("{value} is not {}", schema["const"]).into());
    }
    let kinds = match &schema["type"] {
        Value::Array(kinds) => kinds.clone(),
        kind => vec![kind.clone()],
    };
    let fits = |kind: &Value| match (kind.as_str().unwrap_or_default(), value) {
        ("object", Value::Object(_)) | ("array", Value::Array(_)) | ("string", Value::String(_)) => true,
        ("boolean", Value::Bool(_)) | ("number", Value::Number(_)) => true,
        ("integer", Value::Number(number)) => number.is_i64() || number.is_u64(),
        _ => false,
    };
    if !kinds.iter().any(fits) {
        return Err(format!("{value} is no {}", schema["type"]).into());
    }
    for (key, inner) in value.as_object().into_iter().flatten() {
        let known = schema["properties"]
            .get(key)
            .ok_or_else(|| format!("`{key}` is not in the schema"))?;
        keeps_to(root, known, inner).map_err(|why| format!("{key}: {why}"))?;
    }
    for key in schema["required"].as_array().into_iter().flatten() {
        let key = key.as_str().expect("a key");
        value.get(key).ok_or_else(|| format!("`{key}` is missing"))?;
    }
    for (at, inner) in value.as_array().into_iter().flatten().enumerate() {
        let item = match &schema["prefixItems"] {
            Value::Array(items) => items.get(at).ok_or_else(|| format!("{value} is too long"))?,
            _ => &schema["items"],
        };
        keeps_to(root, item, inner)?;
    }
    Ok(())
}

#[test]
fn the_names_up_to_0_2_0_of_affinity_and_anti_affinity_are_read() {
    let read = |rules: &str| {
        let text = format!(
            "name = \"x\"\nmachine = \"r910\"\nduration = \"1s\"\n[[vm]]\nname = \"a\"\nvcpus = 1\nmemory = \"1GiB\"\n\
             workload = \"idle\"\n{rules}"
        );
        Scenario::from_toml("x.toml", &text).unwrap_or_else(|error| panic!("{error}"))
    };
    let now = read("anti_affinity = \"db\"\naffinity = \"app\"\n");
    assert_eq!(now.vms[0].anti_affinity.as_deref(), Some("db"));
    assert_eq!(now, read("apart = \"db\"\ntogether = \"app\"\n"));
}
