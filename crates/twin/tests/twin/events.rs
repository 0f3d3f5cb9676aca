//! Events of a scenario: each does what it says, failures are reported, and nothing else changes.

use crate::common::{bound, cores, node, r910, scenario};
use homenode_host::{Host, Sample};
use homenode_twin::{AfterProgram, EventAction, EventResult, Scenario, Twin, VmSpec};
use homenode_units::{Bytes, NodeId, Ns};

const GIB: u64 = 1 << 30;

fn twin(scenario: &Scenario) -> Twin {
    Twin::new(r910(), scenario, 1).expect("the scenario fits")
}

fn at(seconds: u64) -> Ns {
    Ns::from_secs(seconds)
}

/// Returns the memory that a VM has on each node, in whole MiB.
fn mib_on(sample: &Sample, vm: &str) -> Vec<u64> {
    let vm = sample
        .vms
        .iter()
        .find(|sample| sample.name == vm)
        .expect("the VM is there");
    let pages = vm.pages.as_ref().expect("the twin knows");
    pages.values().map(|pages| pages.to_bytes().0 >> 20).collect()
}

fn free(sample: &Sample) -> u64 {
    sample.nodes.values().map(|node| node.memory_free_bytes.0).sum()
}

/// Returns the result and the note of the only event.
fn outcome(twin: &Twin) -> (EventResult, String) {
    let events = twin.report().events;
    assert_eq!(events.len(), 1, "{events:?}");
    (events[0].result, events[0].note.clone().unwrap_or_default())
}

#[test]
fn a_stopped_vm_leaves_nothing_behind() {
    let machine = r910();
    let vms = vec![
        bound(&machine, "a", "stream", 0, 0, 0).doing(9.0),
        bound(&machine, "b", "inert", 1, 0, 1),
    ];
    let mut twin = twin(&scenario(vms).with_event(at(5), "a", EventAction::Stop));
    let empty = free(&twin.sample().unwrap());
    twin.wait(at(4));
    let before = twin.sample().unwrap();
    assert_eq!(
        (
            before.vms.len(),
            before.nodes[NodeId(0)].memory_free_bytes < before.nodes[NodeId(2)].memory_free_bytes
        ),
        (2, true)
    );
    twin.wait(at(2));
    let sample = twin.sample().unwrap();
    assert_eq!(sample.vms.len(), 1);
    let b: u64 = mib_on(&sample, "b").iter().sum();
    assert_eq!(free(&sample), empty - (b << 20));
    assert_eq!(outcome(&twin), (EventResult::Done, String::new()));
    // A VM that does not run does not delay the end.
    assert!(twin.run_to_end(at(100)));
    assert_eq!(twin.report().vms[0].runtime_s, None);
}

#[test]
fn a_vm_is_started_by_its_event_and_again_after_it_has_left() {
    let machine = r910();
    let mut spec = bound(&machine, "a", "inert", 0, 0, 0).doing(0.2);
    spec.after = AfterProgram::Leave;
    let scenario = scenario(vec![spec])
        .with_event(at(3), "a", EventAction::Start)
        .with_event(at(4), "a", EventAction::Start)
        .with_event(at(30), "a", EventAction::Start);
    let mut twin = twin(&scenario);
    twin.wait(at(2));
    assert!(
        twin.sample().unwrap().vms.is_empty(),
        "it does not arrive by itself"
    );
    assert!(!twin.finished());
    twin.wait(Ns::from_millis(1500));
    assert_eq!(twin.sample().unwrap().vms.len(), 1);
    twin.wait(at(20));
    assert!(twin.sample().unwrap().vms.is_empty(), "its program has ended");
    let first = twin.report();
    assert!(!twin.finished(), "it will be started again");
    assert!(twin.run_to_end(at(100)));
    let second = twin.report();
    let results: Vec<EventResult> = second.events.iter().map(|event| event.result).collect();
    assert_eq!(
        results,
        [EventResult::Done, EventResult::Skipped, EventResult::Done]
    );
    assert_eq!(second.vms[0].arrival_s, Some(30.0));
    let (a, b) = (first.vms[0].runtime_s.unwrap(), second.vms[0].runtime_s.unwrap());
    assert!(
        (a / b - 1.0).abs() < 0.02,
        "the same program took {a} s, then {b} s"
    );
}

#[test]
fn what_comes_for_a_vm_that_is_not_there_is_reported() {
    let spec = VmSpec::new("a", 1, Bytes::from_gib(1), "inert").arriving(at(5));
    let mut twin = twin(&scenario(vec![spec]).with_event(at(2), "a", EventAction::Stop));
    twin.wait(at(8));
    assert_eq!(
        outcome(&twin),
        (EventResult::Skipped, "the VM is not running".to_owned())
    );
    assert_eq!(twin.sample().unwrap().vms.len(), 1);
}

#[test]
fn a_balloon_takes_evenly_from_an_idle_guest_and_stops_at_what_it_needs() {
    let machine = r910();
    let balloon = |memory| EventAction::Balloon { memory };
    // The VM touches 1 GiB on nodes 0 and 1 in equal parts, ends, and idles.
    let spec = VmSpec::new("a", 4, Bytes::from_gib(4), "stream")
        .on_cpus(cores(&machine, 0, 0, 4))
        .with_memory_on("0-1".parse().unwrap())
        .doing(0.01);
    let touched = 4 * 256 + 64;
    let ends = Bytes::from_mib(400);
    let mut twin = twin(&scenario(vec![spec.clone()]).with_event(at(20), "a", balloon(ends)));
    twin.wait(at(19));
    assert!(twin.finished());
    let before = twin.sample().unwrap();
    assert_eq!(mib_on(&before, "a").iter().sum::<u64>(), touched);
    twin.wait(at(2));
    let after = twin.sample().unwrap();
    let on = mib_on(&after, "a");
    assert!(
        on[0] + on[1] >= 399 && on[0] + on[1] <= 400 && on[0].abs_diff(on[1]) < 12,
        "{on:?}"
    );
    assert_eq!(free(&after) - free(&before), (touched << 20) - ends.0);
    assert_eq!(
        (after.vms[0].memory_bytes, outcome(&twin).0),
        (ends, EventResult::Done)
    );

    // While the program runs, the guest can spare no memory.
    let running = scenario(vec![spec.doing(100.0)]).with_event(at(10), "a", balloon(ends));
    let mut twin = Twin::new(r910(), &running, 1).unwrap();
    twin.wait(at(11));
    let sample = twin.sample().unwrap();
    assert_eq!(mib_on(&sample, "a").iter().sum::<u64>(), touched);
    assert_eq!(sample.vms[0].memory_bytes, Bytes(touched << 20));
    let (result, note) = outcome(&twin);
    assert_eq!(result, EventResult::Partly);
    assert!(
        note.contains("asked for 400MiB") && note.contains("1.06GiB"),
        "{note}"
    );
}

#[test]
fn memory_moves_as_far_as_the_event_says_and_the_report_says_how_far() {
    let machine = r910();
    let migrate = |memory_max| EventAction::Migrate {
        nodes: node(2),
        memory_max,
    };
    let spec = bound(&machine, "a", "stream", 0, 0, 1).doing(9.0);
    let run = |memory_max| {
        let mut twin = twin(&scenario(vec![spec.clone()]).with_event(at(5), "a", migrate(memory_max)));
        twin.wait(at(5));
        twin.wait(Ns::from_millis(20));
        let early = mib_on(&twin.sample().unwrap(), "a");
        assert_eq!(outcome(&twin).0, EventResult::Running);
        assert!(early[2] > 0 && early[1] > early[2], "it takes time: {early:?}");
        twin.wait(at(5));
        (mib_on(&twin.sample().unwrap(), "a"), outcome(&twin))
    };
    let (on, (result, note)) = run(None);
    assert_eq!((on, result), (vec![0, 0, 576, 0], EventResult::Done));
    assert!(note.starts_with("moved 576MiB until 5"), "{note}");
    let (on, (result, note)) = run(Some(Bytes::from_mib(100)));
    assert_eq!((on, result), (vec![0, 476, 100, 0], EventResult::Done));
    assert!(note.contains("the requested maximum"), "{note}");
}

#[test]
fn memory_that_has_no_room_stays_and_is_reported() {
    let mut machine = r910();
    machine.nodes[NodeId(2)].memory_bytes = Bytes::from_mib(300);
    let machine = machine.checked().unwrap();
    let spec = bound(&machine, "a", "stream", 0, 0, 1).doing(9.0);
    let migrate = EventAction::Migrate {
        nodes: node(2),
        memory_max: None,
    };
    let mut twin = Twin::new(machine, &scenario(vec![spec]).with_event(at(5), "a", migrate), 1).unwrap();
    twin.wait(at(10));
    assert_eq!(mib_on(&twin.sample().unwrap(), "a"), [0, 276, 300, 0]);
    assert_eq!(outcome(&twin).0, EventResult::Partly);
}

#[test]
fn a_phase_holds_from_its_event_on() {
    let machine = r910();
    let rate = |factor: Option<(f64, f64)>| {
        let mut scenario = scenario(vec![bound(&machine, "a", "stream", 0, 0, 0).doing(99.0)]);
        if let Some((llc_access_factor, cpi_factor)) = factor {
            let action = EventAction::Phase {
                llc_access_factor,
                cpi_factor,
                rest_factor: 1.0,
            };
            scenario = scenario.with_event(at(5), "a", action);
        }
        let mut twin = twin(&scenario);
        let mut counts = Vec::new();
        for until in [5, 6, 8] {
            twin.wait(Ns(at(until).0 - twin.now().0));
            let counters = twin.sample().unwrap().vms[0].vcpus[0].counters.unwrap();
            counts.push((counters.instructions, counters.llc_references.unwrap()));
        }
        let of = |a: (u64, u64), b: (u64, u64)| ((b.0 - a.0) as f64, (b.1 - a.1) as f64 / (b.0 - a.0) as f64);
        (counts[0], of(counts[1], counts[2]))
    };
    let (before, (plain, density)) = rate(None);
    let (same, (quiet, none)) = rate(Some((0.0, 1.0)));
    assert_eq!(before, same, "nothing changes before");
    assert!(none == 0.0 && quiet > plain, "{none} accesses per instruction");
    let (_, (slow, same_density)) = rate(Some((1.0, 3.0)));
    assert!(slow < plain && (same_density / density - 1.0).abs() < 1e-6);
}

/// Returns servers of the same program on these CPUs, each of which rests 50 ms after a request of about 40 ms.
fn servers(cpus: [&str; 2], more: &str) -> Scenario {
    let vm = |(name, cpus): (&str, &str)| {
        format!(
            "[[vm]]\nname = \"{name}\"\nvcpus = 1\nmemory = \"1GiB\"\nworkload = \"povray\"\ncpus = \"{cpus}\"\n\
             rest = {{ interval_m_instructions = 100.0, mean = \"50ms\" }}\n"
        )
    };
    let vms: String = ["a", "b"].into_iter().zip(cpus).map(vm).collect();
    let text = format!("name = \"servers\"\nmachine = \"r910\"\nwarm_up = \"5s\"\n{vms}{more}");
    Scenario::from_toml("servers.toml", &text).unwrap()
}

#[test]
fn a_request_takes_from_when_there_is_work_to_its_end() {
    let requests = |scenario: &Scenario, until| {
        let mut twin = twin(scenario);
        twin.run_to_end(at(until));
        twin.report().vms[0].requests.expect("it served some")
    };
    let alone = requests(&servers(["0", "1"], ""), 25);
    assert!(
        alone.p50_ms <= 1.06 * alone.mean_ms && alone.p99_ms < 1.2 * alone.mean_ms,
        "{alone:?}"
    );
    // The seconds of work and rest that were counted.
    let counted_s = alone.count as f64 * (alone.mean_ms + 50.0) / 1e3;
    assert!((counted_s / 20.0 - 1.0).abs() < 0.1, "{counted_s} s");
    // A server that shares a CPU has to wait for it.
    let shared = requests(&servers(["0", "0"], ""), 25);
    assert!(
        shared.mean_ms > 1.2 * alone.mean_ms && shared.p99_ms > 1.5 * alone.p99_ms,
        "{shared:?}"
    );
    // A server that becomes busier serves more requests, each as fast as before.
    let event = "[[event]]\nat = \"5s\"\nvm = \"a\"\naction = { phase = { rest_factor = 0.1 } }\n";
    let busy = requests(&servers(["0", "1"], event), 25);
    assert!(busy.count as f64 > 1.5 * alone.count as f64, "{busy:?} {alone:?}");
    assert!(
        (busy.mean_ms / alone.mean_ms - 1.0).abs() < 0.02,
        "{busy:?} {alone:?}"
    );
}

#[test]
fn programs_that_meet_at_barriers_rest_together() {
    let runtime = |rest: &str| {
        let text = format!(
            "name = \"one\"\nmachine = \"r910\"\n[[vm]]\nname = \"a\"\nvcpus = 2\nmemory = \"2GiB\"\nworkload = \"cg.B\"\n\
             work_share = 0.1\n{rest}"
        );
        let mut twin = twin(&Scenario::from_toml("one.toml", &text).unwrap());
        assert!(twin.run_to_end(at(600)), "it does not end");
        let vm = &twin.report().vms[0];
        (vm.runtime_s.unwrap(), vm.instructions_g)
    };
    let (without, instructions_g) = runtime("");
    let (with, same) = runtime("rest = { interval_m_instructions = 100.0, mean = \"50ms\" }\n");
    assert!(
        (same / instructions_g - 1.0).abs() < 1e-3,
        "{same} {instructions_g}"
    );
    // A rest of both threads after 100 M instructions of each. Were rests of the two apart, one would wait for the other's.
    let expected = instructions_g / 2.0 * 10.0 * 0.05;
    let rested = with - without;
    assert!(
        (rested / expected - 1.0).abs() < 0.25,
        "{rested} s of rests, {expected} s expected"
    );
}

/// Rests of one program leave nothing behind for the next. If rests are due more often than barriers come, they last as long in
/// total.
#[test]
fn rests_at_barriers_are_those_of_the_program_alone() {
    let ended = |rest: &str, then: &str| {
        let text = format!(
            "name = \"one\"\nmachine = \"r910\"\n[[vm]]\nname = \"a\"\nvcpus = 2\nmemory = \"2GiB\"\nworkload = \"cg.B\"\n\
             work_share = 0.05\n{rest}{then}"
        );
        let mut twin = twin(&Scenario::from_toml("one.toml", &text).unwrap());
        assert!(twin.run_to_end(at(600)), "it does not end");
        twin.report().vms.swap_remove(0)
    };
    let rest = "rest = { interval_m_instructions = 70.0, mean = \"20ms\" }\n";
    let twice = ended(rest, "then = [{ workload = \"cg.B\", work_share = 0.05 }]\n");
    let once = ended(rest, "");
    let (twice_g, once_g) = (twice.instructions_g, once.instructions_g);
    assert!((twice_g / once_g - 2.0).abs() < 0.01, "{twice_g} {once_g}");
    // The interval between rests is a fifth of that between barriers, so several rests are due at each barrier.
    let without = ended("", "").runtime_s.unwrap();
    let often = ended("rest = { interval_m_instructions = 0.2, mean = \"40us\" }\n", "")
        .runtime_s
        .unwrap();
    let rarely = ended("rest = { interval_m_instructions = 20.0, mean = \"4ms\" }\n", "")
        .runtime_s
        .unwrap();
    assert!(
        ((often - without) / (rarely - without) - 1.0).abs() < 0.25,
        "{often} {rarely} {without}"
    );
}

#[test]
fn figures_count_from_the_end_of_the_warm_up() {
    let machine = r910();
    let mut warm = scenario(vec![bound(&machine, "a", "stream", 0, 0, 0).doing(99.0)]);
    warm.duration = at(20);
    let cold = twin(&warm);
    warm.warm_up = at(10);
    let run = |mut twin: Twin| {
        twin.run_to_end(at(20));
        twin.report().nodes[NodeId(0)]
    };
    let (cold, warm) = (run(cold), run(twin(&warm)));
    // Booting and touching are left out, so only the program is counted, and it is busier.
    assert!(warm.cpus_busy > cold.cpus_busy, "{cold:?} {warm:?}");
    assert!(
        warm.bandwidth_bytes_per_s > cold.bandwidth_bytes_per_s,
        "{cold:?} {warm:?}"
    );
}

#[test]
fn events_come_alike_however_often_somebody_looks() {
    let machine = r910();
    let vms = vec![
        bound(&machine, "a", "stream", 0, 0, 1).doing(9.0),
        bound(&machine, "b", "cached", 1, 0, 2),
    ];
    let migrate = EventAction::Migrate {
        nodes: node(0),
        memory_max: None,
    };
    let scenario = scenario(vms)
        .with_event(at(4), "a", migrate)
        .with_event(at(5), "b", EventAction::Stop)
        .with_event(
            at(6),
            "a",
            EventAction::Balloon {
                memory: Bytes(3 * GIB),
            },
        );
    let run = |step: u64| {
        let mut twin = twin(&scenario);
        while twin.now() < at(9) {
            twin.wait(Ns::from_millis(step));
            twin.sample().unwrap();
        }
        (
            serde_json::to_string(&twin.sample().unwrap()).unwrap(),
            twin.report().events,
        )
    };
    assert_eq!(run(100), run(4500));
}

#[test]
fn threads_that_gather_use_the_memory_of_one_of_them_and_nothing_moves() {
    let machine = r910();
    let both: homenode_units::CpuSet = [0, 1]
        .into_iter()
        .flat_map(|node| cores(&machine, node, 0, 1).iter().collect::<Vec<_>>())
        .collect();
    let vm = VmSpec::new("a", 2, Bytes(4 * GIB), "stream")
        .doing(99.0)
        .on_cpus(both)
        .pinned();
    let gather = |thread| EventAction::Gather { thread };
    let scenario = scenario(vec![vm])
        .with_event(at(5), "a", gather(1))
        .with_event(at(7), "a", gather(0));
    let mut twin = twin(&scenario);
    let mut seen = Vec::new();
    for until in [4, 6, 8] {
        twin.wait(Ns(at(until).0 - twin.now().0));
        twin.mark();
        let before = mib_on(&twin.sample().unwrap(), "a");
        twin.wait(Ns::from_millis(500));
        let accesses = twin.report().vms[0].accesses_by_node.clone();
        let all: f64 = accesses.values().map(|count| *count as f64).sum();
        seen.push([0, 1].map(|node| {
            accesses
                .get(NodeId(node))
                .map_or(0.0, |count| *count as f64 / all)
        }));
        assert_eq!(mib_on(&twin.sample().unwrap(), "a"), before);
    }
    assert!(
        seen[0].iter().all(|share| (share - 0.5).abs() < 0.1),
        "each its own: {seen:?}"
    );
    assert!(seen[1][1] > 0.99 && seen[2][0] > 0.99, "{seen:?}");
    let mut unnamed = scenario.clone();
    unnamed.events[0].action = gather(2);
    let error = Twin::new(r910(), &unnamed, 1).map(drop).unwrap_err().to_string();
    assert!(error.contains("thread to gather at is 2"), "{error}");
}
