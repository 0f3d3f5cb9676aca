//! Simulated hosts that differ from what an agent sees of them.

use homenode_host::{Host, Sample};
use homenode_machine::Replacement;
use homenode_twin::{Disturbance, Hypervisor, Scenario, Twin, TwinReport, VmSpec};
use homenode_units::{Bytes, CpuSet, NodeId, NodeSet, Ns, Placing};

const SECOND: Ns = Ns::from_secs(1);

fn pair() -> Scenario {
    let vm = |name: &str, workload: &str| VmSpec::new(name, 4, Bytes::from_gib(4), workload).doing(0.02);
    Scenario::of("pair", vec![vm("a", "lbm"), vm("b", "soplex")])
}

fn twin(scenario: &Scenario, seed: u64) -> Twin {
    let machine = homenode_machine_files::preset("r910").expect("a preset");
    Twin::new(machine, scenario, seed).expect("a scenario that can run")
}

/// Takes `count` samples, a second apart.
fn samples(twin: &mut Twin, count: usize) -> Vec<Sample> {
    let one = |_| {
        twin.wait(SECOND);
        twin.sample().expect("the twin answers")
    };
    (0..count).map(one).collect()
}

/// Returns a scenario's report at the end of a run in which the agent looked every second.
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

/// Returns all counters of a sample in a fixed order.
fn counters(sample: &Sample) -> Vec<u64> {
    let mut all = Vec::new();
    for vm in &sample.vms {
        for counters in vm.vcpus.iter().filter_map(|vcpu| vcpu.counters) {
            all.extend([
                counters.instructions,
                counters.cycles,
                counters.llc_references.unwrap(),
                counters.llc_misses.unwrap(),
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
fn where_the_host_balances_memory_the_kernel_moves_pages_of_every_vm() {
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
            .with_numa_balancing(true),
        );
        assert!(moved.iter().all(|pages| *pages > 0), "{hypervisor:?}: {moved:?}");
    }
}

/// A setting of the host's kernel is not an operator's choice for one VM: the agent sees it as a setting of the host, and no
/// policy for the VM.
#[test]
fn balancing_is_the_hosts_and_spares_bound_and_interleaved_memory() {
    let wide = |name: &str| VmSpec::new(name, 12, Bytes::from_gib(20), "cassandra");
    let bound = VmSpec {
        memory_nodes: Some("0-1".parse().unwrap()),
        ..wide("bound")
    };
    let spread = VmSpec {
        memory_policy: Placing::Round4k.alone(),
        ..wide("spread")
    };
    let scenario = Scenario::of("three", vec![wide("free"), bound, spread]).with_numa_balancing(true);
    let mut twin = twin(&scenario, 1);
    samples(&mut twin, 40);
    let moved = |name: &str| {
        twin.report()
            .vms
            .iter()
            .find(|vm| vm.name == name)
            .unwrap()
            .host_pages_moved
    };
    assert!(moved("free") > 0);
    assert_eq!((moved("bound"), moved("spread")), (0, 0));
    let sample = twin.sample().unwrap();
    assert!(sample.kernel.balances());
    assert_eq!(sample.vms[0].settings.memory_policy, None);
}

/// A fault covers 2 MiB there, so the kernel's scanning costs the VM next to nothing, and the same memory moves.
#[test]
fn huge_pages_are_marked_fault_and_move_as_one() {
    let wide = |name: &str| VmSpec::new(name, 12, Bytes::from_gib(20), "cassandra");
    let of = |huge_pages: f64| {
        let scenario = Scenario {
            huge_pages: Some(huge_pages),
            ..Scenario::of("two", vec![wide("a"), wide("b")]).with_numa_balancing(true)
        };
        let mut twin = twin(&scenario, 1);
        samples(&mut twin, 40);
        let vms = twin.report().vms;
        let done: f64 = vms.iter().map(|vm| vm.instructions_g).sum();
        let moved: u64 = vms.iter().map(|vm| vm.host_pages_moved).sum();
        (done, moved)
    };
    let ((small, small_moved), (huge, huge_moved)) = (of(0.0), of(1.0));
    assert!(huge > 1.005 * small, "{huge} beside {small}");
    assert!(
        huge_moved * 2 > small_moved && small_moved > 0,
        "{huge_moved} beside {small_moved}"
    );
}

#[test]
fn a_share_of_huge_pages_is_a_share_and_of_linux() {
    let vm = VmSpec::new("a", 2, Bytes::from_gib(1), "idle");
    let machine = homenode_machine_files::preset("r910").unwrap();
    let refused = |hypervisor, share| {
        let scenario = Scenario {
            hypervisor,
            huge_pages: Some(share),
            ..Scenario::of("one", vec![vm.clone()])
        };
        Twin::new(machine.clone(), &scenario, 1)
            .err()
            .map(|error| error.to_string())
    };
    for share in [1.5, -0.1, f64::NAN] {
        let said = refused(Hypervisor::Kvm, share).unwrap();
        assert!(said.contains("huge_pages") && said.contains("0 to 1"), "{said}");
    }
    assert_eq!(refused(Hypervisor::Kvm, 1.0), None);
    assert!(refused(Hypervisor::Xen, 0.5).unwrap().contains("only on Linux"));
}

#[test]
fn xen_has_no_balancing() {
    let vm = VmSpec::new("a", 2, Bytes::from_gib(1), "idle");
    let scenario = Scenario {
        hypervisor: Hypervisor::Xen,
        ..Scenario::of("xen", vec![vm])
    };
    let machine = homenode_machine_files::preset("r910").unwrap();
    let refused = Twin::new(machine.clone(), &scenario.clone().with_numa_balancing(true), 1).unwrap_err();
    assert!(
        refused.to_string().contains("numa_balancing")
            && refused.to_string().contains("Xen has no NUMA balancing"),
        "{refused}"
    );
    let mut twin = Twin::new(machine, &scenario.with_numa_balancing(false), 1).unwrap();
    assert_eq!(twin.sample().unwrap().kernel.numa_balancing, None);
}
