//! Files: what comes with the twin reads and states its sources, and bad input is refused in a sentence.

mod common;

use common::{node, r910};
use homenode_twin::{Scenario, Twin, TwinError, VmSpec, WorkloadError};
use homenode_units::{Bytes, CpuId, CpuSet, Ns};

fn data(folder: &str) -> Vec<(String, String)> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../data")
        .join(folder);
    let mut files: Vec<(String, String)> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ext| ext == "toml"))
        .map(|path| {
            (
                path.file_stem().unwrap().to_str().unwrap().to_owned(),
                std::fs::read_to_string(path).unwrap(),
            )
        })
        .collect();
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
        let machine = homenode_machine::preset(scenario.machine.as_deref().unwrap()).unwrap();
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
        "VM big has 64 vCPUs, and machine r910 only 32 CPUs; give it at most 32"
    );
    let error = refused(&one(VmSpec::new("big", 4, Bytes::from_gib(65), "soplex")));
    assert_eq!(
        error.to_string(),
        "VM big has 65GiB of memory, and machine r910 only 64GiB; give it less"
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
    let error = refused(&one(VmSpec::new("a", 1, Bytes::from_gib(1), "soplx")));
    assert_eq!(
        error.to_string(),
        "VM a: unknown workload `soplx`; did you mean `soplex`?"
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
fn impossible_workload_figures_are_refused() {
    let good = include_str!("../../../data/workloads/cpu2006/soplex.toml");
    let read = |text: &str| homenode_twin::Workload::from_toml("soplex.toml", text);
    assert!(read(good).is_ok());
    for (from, to) in [
        ("cpi_core = 0.33", "cpi_core = -1.0"),
        ("cpi_core = 0.33", "cpi_core = nan"),
        ("write_share = 0.25", "write_share = 1.5"),
        ("access_share = 1.0", "access_share = 0.4"),
        ("page_share = 0.25", "page_share = 0.5"),
    ] {
        let bad = good.replacen(from, to, 1);
        assert_ne!(bad, good, "{from}");
        let error = read(&bad).expect_err(to);
        assert!(matches!(error, WorkloadError::Figure { .. }), "{error}");
    }
}
