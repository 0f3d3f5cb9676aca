//! Twins that are not what an agent is told of them.

use homenode_host::{Host, Sample};
use homenode_machine::Replacement;
use homenode_twin::{Disturbance, Hypervisor, Scenario, Twin, TwinReport, VmSpec};
use homenode_units::{Bytes, CpuSet, NodeId, NodeSet, Ns};

const SECOND: Ns = Ns::from_secs(1);

fn pair() -> Scenario {
    let vm = |name: &str, workload: &str| VmSpec::new(name, 4, Bytes::from_gib(4), workload).doing(0.02);
    Scenario::of("pair", vec![vm("a", "lbm"), vm("b", "soplex")])
}

fn twin(scenario: &Scenario, seed: u64) -> Twin {
    let machine = homenode_machine_files::preset("r910").expect("a preset");
    Twin::new(machine, scenario, seed).expect("a scenario that can run")
}

/// So many samples, a second apart.
fn samples(twin: &mut Twin, count: usize) -> Vec<Sample> {
    let one = |_| {
        twin.wait(SECOND);
        twin.sample().expect("the twin answers")
    };
    (0..count).map(one).collect()
}

/// Its report at the end, having been looked at every second.
fn report(scenario: &Scenario) -> TwinReport {
    let mut twin = twin(scenario, 1);
    while !twin.finished() {
        samples(&mut twin, 1);
    }
    twin.report()
}

fn runtimes(scenario: &Scenario) -> Vec<f64> {
    report(scenario)
        .vms
        .iter()
        .map(|vm| vm.runtime_s.expect("it ended"))
        .collect()
}

fn usual(names: &str) -> Disturbance {
    names.parse().expect("names that there are")
}

#[test]
fn what_an_agent_is_told_changes_nothing_that_happens() {
    let text = |scenario| serde_json::to_string(&report(&scenario)).expect("a report");
    let undisturbed = text(pair());
    for name in ["noise", "no-bandwidth", "no-llc-counters", "noise,no-bandwidth"] {
        assert_eq!(text(pair().disturbed(usual(name))), undisturbed, "{name}");
    }
}

#[test]
fn waits_twice_as_long_lengthen_programs_that_miss_and_no_others() {
    let alone = |workload: &str| {
        let vm = VmSpec::new("a", 1, Bytes::from_gib(4), workload).doing(0.02);
        let run = |disturbance| runtimes(&Scenario::of("one", vec![vm.clone()]).disturbed(disturbance))[0];
        run(usual("memory-waits")) / run(Disturbance::default())
    };
    let (misses, computes) = (alone("lbm"), alone("povray"));
    assert!((1.2..2.0).contains(&misses), "lbm takes {misses} times as long");
    assert!(
        (0.999..1.02).contains(&computes),
        "povray takes {computes} times as long"
    );
}

#[test]
fn another_replacement_policy_changes_runtimes_and_nobody_is_told() {
    let crowd = || {
        let cpus: CpuSet = twin(&pair(), 1).machine().cpus_of(&NodeSet::one(NodeId(0)));
        let vm = |name: &str, workload: &str| {
            let vm = VmSpec::new(name, 4, Bytes::from_gib(4), workload);
            vm.doing(0.02).on_cpus(cpus.clone())
        };
        Scenario::of("crowd", vec![vm("a", "sphinx3"), vm("b", "soplex")])
    };
    let disturbed = crowd().disturbed(usual("replacement"));
    assert_eq!(disturbed.disturbance.replacement, Some(Replacement::Random));
    assert_eq!(twin(&disturbed, 1).machine(), twin(&crowd(), 1).machine());
    let (as_told, real) = (runtimes(&crowd()), runtimes(&disturbed));
    let apart = as_told
        .iter()
        .zip(&real)
        .any(|(told, real)| (real / told - 1.0).abs() > 0.001);
    assert!(apart, "{as_told:?} and {real:?}");
}

/// Every counter of a sample, in one order.
fn counters(sample: &Sample) -> Vec<u64> {
    let mut all = Vec::new();
    for vm in &sample.vms {
        for counters in vm.vcpus.iter().filter_map(|vcpu| vcpu.counters) {
            all.extend([
                counters.instructions,
                counters.cycles,
                counters.llc_references,
                counters.llc_misses,
            ]);
        }
        if let Some(accesses) = &vm.accesses {
            all.extend([accesses.local, accesses.remote]);
            all.extend(accesses.on.values());
        }
    }
    all
}

#[test]
fn noise_is_a_tenth_and_counters_never_run_backwards() {
    let seen = |scenario| -> Vec<Vec<u64>> {
        samples(&mut twin(&scenario, 1), 60)
            .iter()
            .map(counters)
            .collect()
    };
    let (real, told) = (seen(pair()), seen(pair().disturbed(usual("noise"))));
    let mut errors = Vec::new();
    for (real, told) in real.windows(2).zip(told.windows(2)) {
        for at in 0..real[0].len() {
            assert!(told[1][at] >= told[0][at], "counter {at} runs backwards");
            let since = real[1][at] - real[0][at];
            if since > 1000 {
                errors.push((told[1][at] - told[0][at]) as f64 / since as f64 - 1.0);
            }
        }
    }
    let count = errors.len() as f64;
    assert!(count > 500.0, "{count} increments");
    let mean = errors.iter().sum::<f64>() / count;
    let deviation = (errors.iter().map(|error| error * error).sum::<f64>() / count).sqrt();
    assert!(mean.abs() < 0.02, "mean {mean}");
    assert!((0.08..0.12).contains(&deviation), "deviation {deviation}");
}

#[test]
fn noise_comes_from_the_seed() {
    let seen = |seed| samples(&mut twin(&pair().disturbed(usual("noise")), seed), 5);
    assert_eq!(seen(1), seen(1));
    assert_ne!(counters(&seen(1)[4]), counters(&seen(2)[4]));
}

#[test]
fn what_is_hidden_is_absent() {
    let mut twin = twin(&pair().disturbed(usual("no-bandwidth, no-llc-counters")), 1);
    let machine = twin.machine();
    assert!(machine.nodes.values().all(|node| node.memory_bandwidth.is_none()));
    assert!(machine.links.iter().all(|link| link.bandwidth.is_none()));
    let sample = samples(&mut twin, 2).remove(1);
    assert_eq!(sample.vms.len(), 2);
    for vm in &sample.vms {
        assert!(vm.accesses.is_none() && vm.vcpus.iter().all(|vcpu| vcpu.counters.is_none()));
        assert!(vm.vcpus.iter().any(|vcpu| vcpu.running_ns > Ns::ZERO));
    }
}

#[test]
fn a_file_states_a_disturbance_with_figures() {
    let file = |table: &str| {
        let text = format!(
            "name = \"x\"\n[disturbance]\n{table}\n[[vm]]\nname = \"a\"\nvcpus = 1\nmemory = \"1GiB\"\nworkload = \"povray\"\n"
        );
        Scenario::from_toml("x.toml", &text)
    };
    let read = file("memory_waits = 1.5\nreplacement = \"lru\"\nnoise = 0.2").expect("a scenario");
    let expected = Disturbance {
        memory_waits: 1.5,
        replacement: Some(Replacement::Lru),
        noise: 0.2,
        ..Disturbance::default()
    };
    assert_eq!(read.disturbance, expected);
    for (table, part) in [
        ("memory_waits = 20.0", "it is 20; it must lie between 0.1 and 10"),
        ("noise = 0.6", "it is 0.6; it must lie between 0 and 0.5"),
        ("noise = nan", "it is NaN"),
        ("nois = 0.1", "unknown key `nois`"),
        ("replacement = \"none\"", "unknown value `none`"),
    ] {
        let error = file(table).expect_err(table).to_string();
        assert!(error.contains(part), "{error}");
    }
    let unknown = "nois"
        .parse::<Disturbance>()
        .expect_err("no such name")
        .to_string();
    assert!(unknown.contains("no disturbance is named `nois`"), "{unknown}");
}

#[test]
fn with_autonuma_the_kernel_moves_pages_of_every_vm() {
    let wide = |name: &str, workload: &str| VmSpec::new(name, 12, Bytes::from_gib(20), workload);
    let scenario = Scenario::of("two", vec![wide("a", "jbb2005"), wide("b", "cassandra")]);
    let moved = |scenario: Scenario| -> Vec<u64> {
        let mut twin = twin(&scenario, 1);
        samples(&mut twin, 40);
        let vms = twin.report().vms;
        vms.iter()
            .map(|vm| vm.host_pages_moved + vm.guest_pages_moved)
            .collect()
    };
    assert_eq!(moved(scenario.clone()), [0, 0]);
    for hypervisor in [Hypervisor::Kvm, Hypervisor::Native] {
        let moved = moved(
            Scenario {
                hypervisor,
                ..scenario.clone()
            }
            .with_autonuma(),
        );
        assert!(moved.iter().all(|pages| *pages > 0), "{hypervisor:?}: {moved:?}");
    }
}
