//! Memory limits on the simulated host: which memory a balloon takes first, what that costs, and that the memory is returned.

use crate::common::{cores, r910, scenario};
use homenode_host::{Act, Action, Balloon, Host, Lever, Limit, Outcome, Plan};
use homenode_twin::{EventAction, Hypervisor, NextProgram, Scenario, Twin, VmSpec, Vnuma};
use homenode_units::{Bytes, Ns};

const LONG: Ns = Ns::from_secs(600);

/// Returns a VM of 4 GiB whose program uses 256 MiB per vCPU, all equally, for a while.
fn small() -> Scenario {
    let mut vm = VmSpec::new("a", 2, Bytes::from_gib(4), "cached");
    vm.work_share = 100.0;
    scenario(vec![vm])
}

fn limit(twin: &mut Twin, memory: Bytes, lease_ns: Ns) -> Outcome {
    let vm = twin.vm_id("a").unwrap();
    let limit = Limit::Memory(memory);
    commit(twin, Act::Limit { limit, lease_ns }.on(vm))
}

fn commit(twin: &mut Twin, action: Action) -> Outcome {
    let mut plan = Plan::new(twin.sample().unwrap().version);
    plan.decide("test", action, "a test".into());
    twin.commit(&plan).unwrap().outcomes.remove(0)
}

fn balloon(twin: &mut Twin) -> Balloon {
    twin.sample().unwrap().vms[0].balloon.unwrap()
}

fn held_mib(twin: &mut Twin) -> u64 {
    let sample = twin.sample().unwrap();
    sample.vms[0].pages_touched().unwrap().to_bytes().0 >> 20
}

/// Returns instructions per second, measured from now on over this time.
fn speed(twin: &mut Twin, over: Ns) -> f64 {
    let done = |twin: &Twin| twin.report().vms[0].instructions_g;
    let before = done(twin);
    twin.wait(over);
    (done(twin) - before) / over.as_secs_f64()
}

fn running(memory: &Scenario) -> Twin {
    let mut twin = Twin::new(r910(), memory, 1).unwrap();
    twin.wait(Ns::from_secs(4));
    twin
}

const SECOND: Ns = Ns::from_millis(300);

#[test]
fn memory_that_no_program_uses_is_taken_at_no_cost() {
    let mut twin = running(&small());
    let (before, held) = (speed(&mut twin, SECOND), held_mib(&mut twin));
    assert_eq!(limit(&mut twin, Bytes::from_gib(1), LONG), Outcome::Done);
    let seen = balloon(&mut twin);
    assert_eq!(
        (seen.current, seen.maximum, seen.limit),
        (Bytes::from_gib(1), Bytes::from_gib(4), Some(Bytes::from_gib(1)))
    );
    assert_eq!(held_mib(&mut twin), held, "nothing that it has touched");
    let after = speed(&mut twin, SECOND);
    assert!((after / before - 1.0).abs() < 0.01, "{before} became {after}");
    assert_eq!(seen.guest.unwrap().major_faults, Some(0));
}

#[test]
fn a_guest_with_too_little_swaps_is_slower_says_so_and_gets_its_pages_back() {
    let mut twin = running(&small());
    let (before, held) = (speed(&mut twin, SECOND), held_mib(&mut twin));
    let half = Bytes((held / 2) << 20);
    assert_eq!(limit(&mut twin, half, LONG), Outcome::Done);
    assert_eq!(held_mib(&mut twin), held / 2);
    let slow = speed(&mut twin, SECOND);
    assert!(slow < before / 10.0, "{before} became {slow}");
    let guest = balloon(&mut twin).guest.unwrap();
    assert!(
        guest.major_faults.unwrap() > 100 && guest.swapped_in.unwrap() > Bytes::ZERO,
        "{guest:?}"
    );
    assert_eq!(guest.usable, Some(Bytes::ZERO));
    let lever = Lever::Memory;
    let vm = twin.vm_id("a").unwrap();
    assert_eq!(commit(&mut twin, Act::Lift { lever }.on(vm)), Outcome::Done);
    assert_eq!(balloon(&mut twin).current, Bytes::from_gib(4));
    // Half of some 130,000 pages at 0.1 ms each, by two vCPUs, at a falling rate.
    twin.wait(Ns::from_secs(30));
    assert!(
        held_mib(&mut twin) >= held - 1,
        "{} of {held}",
        held_mib(&mut twin)
    );
    let again = speed(&mut twin, SECOND);
    assert!((again / before - 1.0).abs() < 0.05, "{before} became {again}");
}

#[test]
fn the_coldest_pages_go_first() {
    let text = "name = \"warm\"\nabout = \"test\"\n[program]\nthreads = \"single\"\ninstructions_g_per_thread = 400.0\n\
                cpi_core = 0.7\nllc_accesses_per_kilo_instruction = 0.01\nmisses_in_flight = 4.0\nhits_in_flight = 6.0\n\
                write_share = 0.3\n[program.miss_ratio]\nm_inf = 0.1\nc0 = \"3MiB\"\nk = 2.0\n\
                [[program.regions]]\nkind = \"private\"\nsize = \"1GiB\"\naccess_share = 1.0\n\
                heat = [{ page_share = 0.1, access_share = 0.999 }, { page_share = 0.9, access_share = 0.001 }]\n";
    let warm = homenode_twin::Workload::from_toml("warm.toml", text).unwrap();
    let vm = VmSpec::new("a", 1, Bytes::from_gib(4), "warm");
    let mut twin = running(&scenario(vec![vm]).with_workload(warm));
    let before = speed(&mut twin, SECOND);
    let held = held_mib(&mut twin);
    limit(&mut twin, Bytes((held - 400) << 20), LONG);
    // The coldest 400 of 922 MiB get a thousandth of the accesses. So an instruction of some 0.3 ns has 1e-5 * 1e-3 * 0.43
    // faults, of 0.1 ms each.
    let after = speed(&mut twin, SECOND);
    assert!(
        after < before * 0.9995 && after > before * 0.99,
        "{before} became {after}"
    );
}

#[test]
fn a_limit_ends_with_its_lease_and_when_its_operator_says_otherwise() {
    let mut twin = running(&small());
    limit(&mut twin, Bytes::from_gib(1), Ns::from_millis(100));
    twin.wait(Ns::from_millis(150));
    let seen = balloon(&mut twin);
    assert_eq!((seen.current, seen.limit), (Bytes::from_gib(4), None));
    let outcome = limit(&mut twin, Bytes::from_gib(1), LONG);
    assert_eq!(outcome, Outcome::Done);
    assert_eq!(limit(&mut twin, Bytes::from_gib(1), LONG), Outcome::Renewed);
}

#[test]
fn a_program_that_touches_more_than_its_guest_has_swaps_from_the_start() {
    let mut twin = Twin::new(r910(), &small(), 1).unwrap();
    twin.wait(Ns::from_millis(100));
    limit(&mut twin, Bytes(300 << 20), LONG);
    twin.wait(Ns::from_secs(4));
    let seen = balloon(&mut twin);
    assert!(held_mib(&mut twin) <= 300, "{seen:?}");
    assert!(
        seen.guest.unwrap().swapped_out.unwrap() > Bytes(100 << 20),
        "{seen:?}"
    );
}

/// Returns a VM under Xen with two vCPUs on node 0. Its balloon has reduced a guest of 4 GiB to 1 GiB and then returned 1 GiB;
/// the VM begins its next program after that.
fn after_a_balloon(vnuma: Vnuma, allow: fn(&mut VmSpec)) -> Twin {
    let mut vm = VmSpec::new("a", 2, Bytes::from_gib(4), "inert")
        .doing(0.5)
        .on_cpus(cores(&r910(), 0, 0, 2));
    vm.vnuma = vnuma;
    vm.then = vec![NextProgram::new("stream").doing(100.0)];
    allow(&mut vm);
    let sized = |gib| EventAction::Balloon {
        memory: Bytes::from_gib(gib),
    };
    let mut scenario = scenario(vec![vm])
        .with_event(Ns::from_millis(500), "a", sized(1))
        .with_event(Ns::from_millis(600), "a", sized(2));
    scenario.hypervisor = Hypervisor::Xen;
    let mut twin = Twin::new(r910(), &scenario, 1).unwrap();
    twin.wait(Ns::from_secs(4));
    assert_eq!(
        twin.report().vms[0].programs[0].runtime_s.map(|s| s < 3.0),
        Some(true)
    );
    twin.mark();
    twin
}

/// Returns the share of accesses that are local, measured from now on over this time.
fn local(twin: &mut Twin, over: Ns) -> f64 {
    twin.mark();
    twin.wait(over);
    twin.report().vms[0].local_access_ratio.unwrap()
}

#[test]
fn what_xen_gives_back_lies_on_any_node_and_only_a_guest_that_is_told_finds_what_is_near() {
    let unchanged = |_: &mut VmSpec| {};
    // The returned GiB is on four nodes, and half of it is in use. All that was touched before the balloon acted was near.
    let held = |twin: &mut Twin| {
        let sample = twin.sample().unwrap();
        let pages = sample.vms[0].pages.clone().unwrap();
        pages.values().map(|pages| pages.0 >> 8).collect::<Vec<_>>()
    };
    let mut told = after_a_balloon(Vnuma::Live, unchanged);
    let held = held(&mut told);
    assert!(held[1..].iter().all(|mib| *mib >= 255), "{held:?}");
    let near = local(&mut told, SECOND);
    for vnuma in [Vnuma::None, Vnuma::Static] {
        let any = local(&mut after_a_balloon(vnuma, unchanged), SECOND);
        assert!(any < 0.3 && near > 0.4, "{vnuma:?}: {any} against {near}");
    }
}

#[test]
fn a_guest_that_is_told_moves_pages_among_its_own_frames_alone() {
    let balances: fn(&mut VmSpec) = |vm| vm.autonuma = true;
    let mut told = after_a_balloon(Vnuma::Live, balances);
    let held = held_mib(&mut told);
    told.wait(Ns::from_secs(20));
    assert_eq!(held_mib(&mut told), held);
    let near = local(&mut told, SECOND);
    let mut not_told = after_a_balloon(Vnuma::Static, balances);
    let before = local(&mut not_told, SECOND);
    not_told.wait(Ns::from_secs(20));
    let after = local(&mut not_told, SECOND);
    assert!(
        (after - before).abs() < 0.01,
        "it takes each page for where it asked for it"
    );
    assert!(near > after + 0.1, "{near} against {after}");
}
