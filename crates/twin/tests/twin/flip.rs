//! Driver domains: how page flipping, pools, copies and consecutive programs affect a VM's memory.

use crate::common::node;
use homenode_host::{Act, Decision, Host, Plan};
use homenode_machine::Machine;
use homenode_machine_files::preset;
use homenode_twin::{
    Backend, EventAction, Hypervisor, NextProgram, PoolSpec, Scenario, Transfer, Twin, TwinReport, VmReport,
    VmSpec, Workload,
};
use homenode_units::{Bytes, CpuId, CpuSet, Ns, PAGE_BYTES, Pages};

fn machine() -> Machine {
    preset("xeon26x2").expect("xeon26x2 comes with the machines")
}

/// Returns a program that uses 512 MiB and receives 40 MB/s on 4 vCPUs.
fn receiver() -> Workload {
    let text = "name = \"receiver\"\nabout = \"test\"\n[program]\nthreads = \"one-per-vcpu\"\ninstructions_g_per_thread = 50.0\n\
                cpi_core = 0.85\nllc_accesses_per_kilo_instruction = 0.01\nmisses_in_flight = 4.0\nhits_in_flight = 6.0\n\
                write_share = 0.0\n[program.miss_ratio]\nm_inf = 0.02\nc0 = \"3MiB\"\nk = 2.0\n[[program.io]]\ndevice = \"network\"\n\
                bytes_per_kilo_instruction = 5.0\nrequest = \"4KiB\"\n[[program.regions]]\nkind = \"private\"\nsize = \"128MiB\"\n\
                access_share = 1.0\n";
    Workload::from_toml("test.toml", text).expect("a possible workload")
}

/// Returns a driver domain of 4 GiB on node 1, and a VM of 4 vCPUs and 2 GiB on node 0 that uses it.
fn scenario(transfer: Transfer, pool: Option<PoolSpec>) -> Scenario {
    let cpus = |first: u32| (first..first + 4).map(CpuId).collect::<CpuSet>();
    let driver = VmSpec::new("privvm", 4, Bytes::from_gib(4), "idle")
        .on_cpus(cpus(13))
        .with_memory_on(node(1));
    let backend = Backend {
        vm: "privvm".into(),
        transfer,
        pool,
    };
    let vm = VmSpec::new("vm", 4, Bytes::from_gib(2), "receiver")
        .on_cpus(cpus(0))
        .with_memory_on(node(0))
        .behind(backend);
    let mut scenario = Scenario::of("test", vec![driver, vm]).with_workload(receiver());
    scenario.hypervisor = Hypervisor::Xen;
    scenario
}

fn twin(scenario: &Scenario) -> Twin {
    Twin::new(machine(), scenario, 1).expect("the scenario fits")
}

fn ended(scenario: &Scenario) -> TwinReport {
    let mut twin = twin(scenario);
    assert!(twin.run_to_end(Ns::from_secs(400)), "the program does not end");
    // The pages that passed last are settled within a second.
    let end = Ns(twin.now().0 + Ns::from_secs(2).0);
    twin.wait(Ns(end.0 - twin.now().0));
    twin.report()
}

fn vm(report: &TwinReport) -> &VmReport {
    &report.vms[1]
}

#[test]
fn flipping_moves_memory_as_two_urns_mix_and_copying_moves_none() {
    let flipped = ended(&scenario(Transfer::Flip, None));
    let flips = vm(&flipped).driver_domain.unwrap();
    // Every page that the program requested has passed, except perhaps a last page that is not full.
    assert!(flips.pages_flipped.abs_diff(vm(&flipped).io_bytes / PAGE_BYTES) <= 1);
    assert_eq!(flips.pages_copied, 0);
    // The urns: 2 GiB and 4 GiB, each less what its kernel has.
    let (guest, driver) = (2032.0 * 256.0 - 48.0 * 256.0, 4032.0 * 256.0);
    let mixed = driver / (guest + driver);
    let n = flips.pages_flipped as f64;
    let expected = guest * mixed * (1.0 - libm::exp(-n * (1.0 / guest + 1.0 / driver)));
    let away = flips.pages_away as f64;
    assert!((away / expected - 1.0).abs() < 0.03, "{away} for {expected}");

    let copied = ended(&scenario(Transfer::Copy, None));
    let copies = vm(&copied).driver_domain.unwrap();
    assert_eq!((copies.pages_flipped, copies.pages_away), (0, 0));
    assert!(copies.pages_copied.abs_diff(vm(&copied).io_bytes / PAGE_BYTES) <= 1);
    // Copies cross the link from the driver domain's node, 4096 bytes each. Otherwise only that node's idle kernel uses the link.
    let link = |report: &TwinReport| report.links.iter().find(|link| link.to.0 == 0).unwrap().bytes as f64;
    let bytes = (copies.pages_copied * PAGE_BYTES) as f64;
    assert!(link(&copied) >= bytes && link(&copied) < 1.02 * bytes);
}

#[test]
fn pages_of_vm_driver_domain_and_host_add_up_at_any_time() {
    // Debug assertions check this for nodes in every epoch. This test checks it for each VM while a balloon and a migration act,
    // too.
    let mut with_events = scenario(Transfer::Flip, Some(PoolSpec::default()));
    with_events.vms[1].then = vec![NextProgram::new("receiver").doing(0.1)];
    let event = |at_s, action| homenode_twin::EventSpec {
        at: Ns::from_secs(at_s),
        vm: "vm".into(),
        action,
    };
    with_events.events = vec![event(
        8,
        EventAction::Migrate {
            nodes: node(0),
            memory_max: None,
        },
    )];
    for scenario in [scenario(Transfer::Flip, None), with_events] {
        let mut twin = twin(&scenario);
        for _ in 0..30 {
            twin.wait(Ns::from_secs(1));
            for (seen, gib) in twin.sample().unwrap().vms.iter().zip([4, 2]) {
                let pages: u64 = seen
                    .pages
                    .as_ref()
                    .unwrap()
                    .iter()
                    .map(|(_, pages)| pages.0)
                    .sum();
                assert_eq!(Pages(pages).to_bytes(), Bytes::from_gib(gib), "{}", seen.name);
            }
        }
    }
}

#[test]
fn the_next_program_gets_what_flips_left_unless_there_is_a_pool() {
    let after = |pool| {
        let mut scenario = scenario(Transfer::Flip, pool);
        scenario.vms[1].then = vec![NextProgram::new("receiver").doing(0.1)];
        let report = ended(&scenario);
        let programs = vm(&report).programs.clone();
        assert_eq!(programs.len(), 2);
        assert_eq!(programs[0].pages_touched_away, 0);
        assert_eq!(programs[1].pages_touched, 4 * 128 * 256);
        assert!(programs[1].began_s >= programs[0].began_s + programs[0].runtime_s.unwrap());
        let share = programs[1].pages_touched_away as f64 / programs[1].pages_touched as f64;
        (share, vm(&report).driver_domain.unwrap())
    };
    let (share, flips) = after(None);
    let away = flips.pages_away as f64 / (2.0 * 256.0 * 1024.0);
    // The second program added a tenth as many flips.
    assert!(
        share > 0.1 && share < away && share > 0.8 * away,
        "{share} of {away}"
    );

    let pool = PoolSpec {
        initial: Some(Bytes::from_mib(100)),
        ..PoolSpec::default()
    };
    let (share, flips) = after(Some(pool));
    assert_eq!(share, 0.0);
    assert!(flips.pages_flipped > 0 && flips.pages_copied == 0);
    assert!(flips.pages_away > 0 && flips.pages_away <= flips.pool_pages);
    // The 256 pages in the ring are 20 percent of 1280 pages.
    assert!(flips.pool_pages < 3000, "{flips:?}");
}

#[test]
fn a_pool_that_may_not_grow_copies_what_it_has_no_page_for() {
    let pool = PoolSpec {
        fixed: true,
        initial: Some(Bytes(64 * PAGE_BYTES)),
        ..PoolSpec::default()
    };
    let report = ended(&scenario(Transfer::Flip, Some(pool)));
    let flips = vm(&report).driver_domain.unwrap();
    assert_eq!(flips.pool_pages, 64);
    assert!(flips.pages_away <= 64);
    let share = flips.pages_flipped as f64 / (flips.pages_flipped + flips.pages_copied) as f64;
    assert!(share > 0.15 && share <= 0.25, "{share}");
}

#[test]
fn the_driver_domain_runs_what_its_vms_io_and_its_repatriation_take() {
    let scenario = scenario(Transfer::Flip, None);
    let mut twin = twin(&scenario);
    twin.run_to_end(Ns::from_secs(10));
    let running = |twin: &mut Twin| -> f64 {
        let sample = twin.sample().unwrap();
        let vcpus = sample.vms[0].vcpus.iter();
        vcpus.map(|vcpu| vcpu.running_ns.as_secs_f64()).sum()
    };
    let owed = |twin: &Twin| vm(&twin.report()).driver_domain.unwrap().backend_s;
    let (ran_before, owed_before) = (running(&mut twin), owed(&twin));
    let sample = twin.sample().unwrap();
    let id = sample.vms[1].id;
    let mut plan = Plan::new(sample.version);
    let action = Act::MovePages {
        from: node(1),
        to: node(0),
        pages_max: Pages(20_000),
    }
    .on(id);
    plan.decisions = vec![Decision {
        policy: "test",
        action,
        reason: "test".into(),
    }];
    twin.commit(&plan).unwrap();
    twin.wait(Ns::from_secs(3));
    let (ran, owed) = (running(&mut twin) - ran_before, owed(&twin) - owed_before);
    // The driver domain moves 20000 pages, at 3 us and a copy each, in addition to the I/O of this time.
    assert!(owed > 0.06, "{owed}");
    // The debt of the last second has not been run yet. The driver domain's own timers take a little time.
    assert!(ran > 0.9 * owed - 0.05 && ran < owed + 0.1, "{ran} for {owed}");
}

#[test]
fn the_same_seed_gives_the_same_flips() {
    let report =
        || serde_json::to_string(&ended(&scenario(Transfer::Flip, Some(PoolSpec::default())))).unwrap();
    assert_eq!(report(), report());
}

#[test]
fn driver_domains_that_cannot_be_are_refused_and_told_why() {
    let refused = |change: fn(&mut Scenario)| {
        let mut scenario = scenario(Transfer::Flip, Some(PoolSpec::default()));
        change(&mut scenario);
        Twin::new(machine(), &scenario, 1).unwrap_err().to_string()
    };
    let cases: [(String, &str); 13] = [
        (
            refused(|s| s.vms[1].memory_nodes = None),
            "`memory_nodes` to one node",
        ),
        (
            refused(|s| s.vms[0].memory_nodes = None),
            "`memory_nodes` to one node",
        ),
        (
            refused(|s| s.vms[0].workload = "stream".into()),
            "use workload \"idle\"",
        ),
        (refused(|s| s.vms[0].arrival = Ns(1)), "let it arrive first"),
        (
            refused(|s| s.hypervisor = Hypervisor::Native),
            "runs without a hypervisor",
        ),
        (
            refused(|s| s.vms[1].driver_domain.as_mut().unwrap().vm = "vm".into()),
            "no other VM is named `vm`",
        ),
        (
            refused(|s| s.vms[1].driver_domain.as_mut().unwrap().transfer = Transfer::Copy),
            "leave out the pool",
        ),
        (
            refused(|s| {
                let pool = s.vms[1].driver_domain.as_mut().unwrap().pool.as_mut().unwrap();
                pool.shrink_below_percent = 95;
            }),
            "at most 81",
        ),
        (
            refused(|s| {
                let pool = s.vms[1].driver_domain.as_mut().unwrap().pool.as_mut().unwrap();
                pool.initial = Some(Bytes::from_gib(2));
            }),
            "the VM has 2GiB",
        ),
        (
            refused(|s| {
                let pool = s.vms[1].driver_domain.as_mut().unwrap().pool.as_mut().unwrap();
                pool.fixed = true;
            }),
            "set `initial` to what `homenode calibrate --pool test` finds",
        ),
        (
            refused(|s| s.vms[1].kernel_footprint = Some(Bytes::from_gib(3))),
            "kernel_footprint is 3GiB",
        ),
        (
            refused(|s| s.vms[1].then = vec![NextProgram::new("strem")]),
            "did you mean `stream`?",
        ),
        (
            refused(|s| s.vms[1].then = vec![NextProgram::new("stream").doing(0.0)]),
            "must be above 0",
        ),
    ];
    for (message, words) in cases {
        assert!(message.contains(words), "{message}");
    }
}
