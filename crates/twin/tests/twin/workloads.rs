//! Workload files: complete, with sources, possible, and faithful to the tables that are their inputs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use homenode_machine_files::preset;
use homenode_twin::workload::{RegionKind, RegionProfile, Threads, builtin, names};
use homenode_twin::{Hypervisor, Program, Scenario, Twin, VmSpec};
use homenode_units::{Bytes, MemoryPolicy, Ns, Placing};

/// The programs in the seeds' tables, figures and texts, by their names in the simulator.
const OF_SEEDS: &str = "
    astar bzip2 gcc hmmer lbm mcf milc omnetpp povray soplex sphinx3 xalancbmk
    bt.B cg.B ep.B ft.B is.B lu.B mg.B sp.B
    milc.mpi lammps.mpi pop2.mpi lu.mpi
    swim mgrid331 applu331 bt331 fma3d
    blackscholes bodytrack canneal dedup facesim ferret fluidanimate freqmine raytrace streamcluster swaptions vips x264
    jbb2005 bigbench linkbench webserving bigdatabench.read bigdatabench.write bigdatabench.sort
    hpl stream blockie idle
    walk.c1 walk.c2 walk.c3 disrupt.c1 disrupt.c2 disrupt.c3
    array.w0 array.w50 array.w80 array.w100 array.rwrw array.rrww array.wwrr
";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn files() -> BTreeMap<String, String> {
    fn list(folder: &Path, files: &mut BTreeMap<String, String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                list(&path, files);
            } else if path.extension().is_some_and(|ext| ext == "toml") {
                let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
                let other = files.insert(name, fs::read_to_string(&path).unwrap());
                assert_eq!(other, None, "{} is there twice", path.display());
            }
        }
    }
    let mut all = BTreeMap::new();
    list(&root().join("data/workloads"), &mut all);
    all
}

fn program(name: &str) -> Program {
    builtin(name)
        .unwrap_or_else(|| panic!("no workload {name}"))
        .program
        .unwrap()
}

/// Returns the rows of a published table by program, each cell by its column.
fn table(file: &str) -> BTreeMap<String, BTreeMap<String, String>> {
    let text = fs::read_to_string(root().join("data/published").join(file)).unwrap();
    let mut lines = text.lines().filter(|line| !line.starts_with('#'));
    let columns: Vec<&str> = lines.next().unwrap().split(',').collect();
    let row = |line: &str| {
        let cells = line.split(',').map(str::to_owned);
        columns.iter().map(|c| (*c).to_owned()).zip(cells).collect()
    };
    let rows = lines.map(|line| (line.split(',').next().unwrap().to_owned(), row(line)));
    rows.collect()
}

fn figure(row: &BTreeMap<String, String>, column: &str) -> f64 {
    row[column].parse().unwrap()
}

#[test]
fn every_workload_file_comes_with_the_twin_under_its_own_name() {
    assert!(files().keys().map(String::as_str).eq(names()));
    for name in names() {
        assert_eq!(builtin(name).unwrap().name, name);
    }
}

#[test]
fn every_program_of_the_seeds_has_a_workload() {
    let of_table = table("numa-policies-table1.csv");
    for name in OF_SEEDS
        .split_whitespace()
        .chain(of_table.keys().map(String::as_str))
    {
        assert!(builtin(name).is_some(), "{name} is missing");
    }
}

#[test]
fn every_figure_of_a_workload_states_its_source() {
    let claims = fs::read_to_string(root().join("data/published/claims.toml")).unwrap();
    for (name, text) in files() {
        let calibrated_to = builtin(&name).unwrap().calibrated_to;
        for (at, line) in text.lines().enumerate() {
            let Some((key, rest)) = line.split_once('=') else {
                continue;
            };
            let key = key.trim();
            let words = ["name", "about", "calibrated_to", "threads", "kind", "device"];
            if line.starts_with('#') || words.contains(&key) {
                continue;
            }
            let place = format!("{name}.toml:{}: `{key}`", at + 1);
            let comment = rest.split_once('#').map_or("", |(_, comment)| comment.trim());
            let kinds = ["source: ", "computed: ", "measured: ", "estimate", "calibrated: "];
            assert!(
                kinds.iter().any(|kind| comment.starts_with(kind)),
                "{place} states no source"
            );
            if let Some(claim) = comment.strip_prefix("calibrated: ") {
                let claim = claim.split_whitespace().next().unwrap_or_default().to_owned();
                assert!(
                    calibrated_to.contains(&claim),
                    "{place}: {claim} is not in calibrated_to"
                );
            }
        }
        for claim in calibrated_to {
            assert!(
                claims.contains(&format!("id = \"{claim}\"")),
                "{name}: no claim {claim}"
            );
            assert!(
                text.contains(&format!("# calibrated: {claim}")),
                "{name}: nothing is calibrated to {claim}"
            );
        }
    }
}

#[test]
fn every_workload_runs_alone_to_its_end() {
    let machine = preset("amd48").unwrap();
    let hardware = machine.hardware.clone().unwrap();
    for name in names() {
        let Some(program) = builtin(name).unwrap().program else {
            continue;
        };
        let vcpus = if program.threads == Threads::OnePerVcpu {
            4
        } else {
            1
        };
        // A fifth of a second at the program's solo speed, after boot and first touch.
        let share = 0.2 / program.solo_seconds(&machine, &hardware);
        let spec = VmSpec::new("alone", vcpus, Bytes::from_gib(48), name).doing(share);
        let scenario = Scenario::of("alone", vec![spec]);
        let mut twin = Twin::with_epoch(machine.clone(), &scenario, 1, Ns::from_millis(5))
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(twin.run_to_end(Ns::from_secs(120)), "{name} does not end");
        let runtime = twin.report().vms[0].runtime_s.unwrap();
        assert!(runtime.is_finite() && runtime > 0.1, "{name} ends in {runtime} s");
    }
}

fn shares<'a>(program: &'a Program, kind: RegionKind) -> impl Iterator<Item = &'a RegionProfile> + 'a {
    program.regions.iter().filter(move |region| region.kind == kind)
}

/// On 8 nodes, a share `s` on one node with the rest spread evenly has a relative standard deviation of `s * sqrt(7)`.
#[test]
fn first_touch_imbalance_is_the_published_one() {
    for (name, row) in table("numa-policies-table1.csv") {
        let program = program(&name);
        let by_one: f64 = shares(&program, RegionKind::InitialisedByOne)
            .map(|region| region.access_share)
            .sum();
        let (ours, published) = (
            100.0 * by_one * 7f64.sqrt(),
            figure(&row, "imbalance_first_touch_pct"),
        );
        assert!(
            (ours - published).abs() < 0.5,
            "{name}: {ours:.1} percent, published {published}"
        );
    }
}

/// Pages dealt in turn over 8 nodes: a region of `8 q + r` pages has a relative standard deviation of
/// `sqrt(r (8 - r)) / (8 q + r)`. Profiles reach the published figure only as far as few pages can get that many LLC accesses.
#[test]
fn round_4k_imbalance_is_at_most_the_published_one() {
    for (name, row) in table("numa-policies-table1.csv") {
        let program = program(&name);
        let ours: f64 = program
            .regions
            .iter()
            .map(|region| {
                let pages = region.size.to_pages().0;
                let rest = pages % 8;
                100.0 * region.access_share * ((rest * (8 - rest)) as f64).sqrt() / pages as f64
            })
            .fold(0.0, f64::max);
        let published = figure(&row, "imbalance_round_4k_pct");
        assert!(
            ours <= published + 5.1,
            "{name}: {ours:.1} percent, published {published}"
        );
    }
}

/// Seven pages that all threads use are in all private caches, so few accesses to them reach the LLC.
#[test]
fn no_profile_sends_over_15_percent_of_its_llc_accesses_to_seven_pages() {
    for name in names() {
        let Some(program) = builtin(name).unwrap().program else {
            continue;
        };
        let common = program
            .regions
            .iter()
            .filter(|region| region.kind != RegionKind::Private);
        let few = common.filter(|region| region.size.to_pages().0 <= 7);
        let share: f64 = few.map(|region| region.access_share).sum();
        assert!(share <= 0.15, "{name}: {share}");
    }
}

#[test]
fn footprints_are_the_published_ones() {
    for (name, row) in table("numa-policies-table2.csv") {
        let ours = program(&name).footprint(48).as_f64() / Bytes::from_mib(1).as_f64();
        let published = figure(&row, "footprint_mb");
        assert!(
            (ours - published).abs() < (0.01 * published).max(3.0),
            "{name}: {ours:.0} MB, published {published}"
        );
    }
}

#[test]
fn only_programs_with_published_inputs_are_calibrated() {
    let inputs = table("numa-policies-table1.csv");
    for name in names() {
        let calibrated = !builtin(name).unwrap().calibrated_to.is_empty();
        assert_eq!(calibrated, inputs.contains_key(name), "{name}");
    }
}

/// Returns the load of the most loaded link with this program on all of amd48, without a hypervisor, in percent.
fn busiest_link(name: &str, policy: MemoryPolicy) -> f64 {
    // Each thread stays on its CPU, as the script has it: one that rests could find its CPU taken.
    let mut spec = VmSpec::new("alone", 48, Bytes::from_gib(64), name).pinned();
    spec.memory_policy = policy;
    spec.work_share = 10.0; // some are over sooner than they are measured
    let mut scenario = Scenario::of("alone", vec![spec]);
    scenario.hypervisor = Hypervisor::Native;
    let mut twin = Twin::with_epoch(preset("amd48").unwrap(), &scenario, 1, Ns::from_millis(5)).unwrap();
    twin.run_to_end(Ns::from_secs(5));
    twin.mark();
    // Many rests, which are drawn by chance.
    twin.run_to_end(Ns::from_secs(if program(name).rest.is_some() { 25 } else { 7 }));
    assert!(!twin.finished(), "{name} is too short");
    100.0 * twin.report().interconnect_load.unwrap()
}

/// The script that fits the profiles of \[Policies\] repeats the simulator's equations. It writes the load that it found into
/// each file's comment: "... percent, here 42 / 16, at ...".
#[test]
fn links_are_loaded_as_the_script_says() {
    let files = files();
    for name in [
        "cg.C",
        "facesim",
        "ft.C",
        "kmeans",
        "lu.C",
        "memcached",
        "mg.D",
        "sp.C",
    ] {
        let said = files[name]
            .lines()
            .find(|line| line.contains("Most loaded link"))
            .unwrap();
        let said = said.split_once("here ").unwrap().1.split_once(',').unwrap().0;
        let policies = [Placing::FirstTouch.alone(), Placing::Round4k.alone()];
        for (said, policy) in said.split(" / ").zip(policies) {
            let (said, twin): (f64, f64) = (said.parse().unwrap(), busiest_link(name, policy));
            assert!(
                (said - twin).abs() < 5.0,
                "{name}, {policy:?}: {said} percent in its file, {twin:.1} in the twin; run scripts/numa-workloads.py"
            );
        }
    }
}

#[test]
fn the_readme_lists_every_workload() {
    let readme = fs::read_to_string(root().join("data/workloads/README.md")).unwrap();
    let listed: Vec<&str> = readme
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` |"))
        .map(|(name, _)| name)
        .filter(|name| !name.contains(':')) // words for sources, above
        .collect();
    for name in names() {
        assert_eq!(
            listed.iter().filter(|listed| **listed == name).count(),
            1,
            "{name}"
        );
    }
    for name in listed {
        assert!(
            builtin(name).is_some(),
            "README.md lists {name}, which is not there"
        );
    }
}
