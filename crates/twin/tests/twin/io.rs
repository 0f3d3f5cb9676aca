//! Devices: programs run as fast as their devices feed them, and device transfers load the machine and add up.

use crate::common::{bound, r910, stream};
use homenode_machine::Machine;
use homenode_machine_files::preset;
use homenode_twin::workload::DeviceKind;
use homenode_twin::{EventAction, Hypervisor, Scenario, Twin, TwinReport, VmSpec, Workload};
use homenode_units::{Bytes, BytesPerSec, NodeId, Ns, Placing};

/// Returns the machine of \[Policies\], whose disk is on node 6.
fn amd48() -> Machine {
    preset("amd48").expect("amd48 comes with the machines")
}

const BANDWIDTH: f64 = 265e6;

/// Returns the machine with a disk of another bandwidth.
fn with_disk(bandwidth: u64) -> Machine {
    let mut machine = amd48();
    machine.devices[1].bandwidth = Some(BytesPerSec(bandwidth));
    machine
}

/// Returns the machine without any figures of its disk.
fn without_disk() -> Machine {
    let mut machine = amd48();
    machine.devices[1].bandwidth = None;
    machine
}

/// Returns a program whose data fits its private caches and that reads: 64 bytes per thousand instructions are 200 MB/s per
/// thread.
fn reader(bytes_per_kilo_instruction: f64, request: &str, barrier: &str) -> Workload {
    let threads = if barrier.is_empty() {
        "one-copy-per-vcpu"
    } else {
        "one-per-vcpu"
    };
    let text = format!(
        "name = \"reader\"\nabout = \"test\"\n[program]\nthreads = \"{threads}\"\ninstructions_g_per_thread = 4.0\n\
         cpi_core = 0.7\nllc_accesses_per_kilo_instruction = 0.01\nmisses_in_flight = 4.0\nhits_in_flight = 6.0\n\
         write_share = 0.0\n[program.miss_ratio]\nm_inf = 0.02\nc0 = \"3MiB\"\nk = 2.0\n{barrier}\n\
         [[program.io]]\ndevice = \"disk\"\nbytes_per_kilo_instruction = {bytes_per_kilo_instruction}\nrequest = \"{request}\"\n\
         [[program.regions]]\nkind = \"private\"\nsize = \"16MiB\"\naccess_share = 1.0\n"
    );
    Workload::from_toml("test.toml", &text).expect("a possible workload")
}

const BARRIER: &str = "[program.barrier]\ninterval_m_instructions = 5.0\nimbalance = 0.1\n";

/// Returns a VM of 2 vCPUs on node 0, with its memory there.
fn vm(machine: &Machine) -> VmSpec {
    bound(machine, "a", "reader", 0, 0, 0)
}

fn start(machine: &Machine, scenario: &Scenario) -> Twin {
    Twin::new(machine.clone(), scenario, 1).expect("the scenario fits")
}

fn one(machine: &Machine, reader: Workload) -> Scenario {
    Scenario::of("test", vec![vm(machine)]).with_workload(reader)
}

fn ended(machine: &Machine, scenario: &Scenario) -> TwinReport {
    let mut twin = start(machine, scenario);
    assert!(twin.run_to_end(Ns::from_secs(200)), "the program does not end");
    twin.report()
}

/// Returns the bytes per second that the VM reads once its program runs.
fn rate(machine: &Machine, mut scenario: Scenario) -> f64 {
    scenario.vms[0].work_share = 10.0;
    let mut twin = start(machine, &scenario);
    twin.run_to_end(Ns::from_secs(2));
    twin.mark();
    twin.run_to_end(Ns::from_secs(4));
    assert!(!twin.finished(), "the program is too short");
    twin.report().vms[0].io_bytes as f64 / 2.0
}

fn close(is: f64, expected: f64, tolerance: f64) {
    assert!(
        (is / expected - 1.0).abs() < tolerance,
        "{is} is not {expected} within {tolerance}"
    );
}

#[test]
fn a_program_that_needs_more_than_its_device_gives_runs_at_the_devices_bandwidth() {
    let machine = amd48();
    // The program's 2 threads need 200 MB/s each; at times twice that, because barriers leave the device without a request now
    // and then.
    for (bytes, barrier) in [(64.0, ""), (128.0, BARRIER)] {
        let scenario = one(&machine, reader(bytes, "128KiB", barrier));
        close(rate(&machine, scenario), BANDWIDTH, 0.02);
    }
}

#[test]
fn a_device_that_feeds_a_program_costs_it_nothing() {
    // 2 threads at 125 MB/s; at 78 MB/s if barriers make their requests coincide again and again.
    for (bytes, request, barrier) in [
        (40.0, "128KiB", ""),
        (40.0, "1MiB", ""),
        (25.0, "128KiB", BARRIER),
    ] {
        let scenario = one(&amd48(), reader(bytes, request, barrier));
        let (fed, without) = (ended(&amd48(), &scenario), ended(&without_disk(), &scenario));
        let (fed, without) = (fed.vms[0].runtime_s.unwrap(), without.vms[0].runtime_s.unwrap());
        close(fed, without, 0.01);
    }
}

/// The thread requests 200 MB/s, 4 KiB at a time. Each request takes the time of its transfer and the latency.
#[test]
fn small_requests_of_one_thread_are_bounded_by_latency() {
    let machine = amd48();
    let mut last = f64::INFINITY;
    for (hypervisor, passthrough, latency_us) in [
        (Hypervisor::Native, false, 74.0),
        (Hypervisor::Kvm, true, 186.0),
        (Hypervisor::Kvm, false, 307.0),
        (Hypervisor::Xen, false, 307.0),
    ] {
        let mut scenario = one(&machine, reader(64.0, "4KiB", ""));
        scenario.hypervisor = hypervisor;
        scenario.vms[0].vcpus = 1;
        scenario.vms[0].passthrough = passthrough;
        if passthrough {
            scenario.vms[0].memory_policy = Placing::Round4k.alone();
        }
        let rate = rate(&machine, scenario);
        close(rate, 4096.0 / (latency_us / 1e6 + 4096.0 / BANDWIDTH), 0.02);
        assert!(
            rate <= 1.001 * last,
            "{hypervisor:?} is faster than what costs less"
        );
        last = rate;
    }
}

/// The thread requests 200 MB/s while it computes, 64 KiB at a time. Each request takes the time of the computing before it, its
/// transfer and the latency.
#[test]
fn a_thread_that_waits_for_each_request_computes_nothing_meanwhile() {
    let machine = amd48();
    let solo = 64.0 * 2.2e9 / 0.7 / 1000.0;
    for (hypervisor, latency_us) in [(Hypervisor::Native, 74.0), (Hypervisor::Kvm, 307.0)] {
        let rate_of = |waits: bool| {
            let mut waiting = reader(64.0, "64KiB", "");
            waiting.program.as_mut().unwrap().io[0].waits = waits;
            let mut scenario = one(&machine, waiting);
            scenario.hypervisor = hypervisor;
            scenario.vms[0].vcpus = 1;
            rate(&machine, scenario)
        };
        let (waits, overlaps) = (rate_of(true), rate_of(false));
        close(
            waits,
            65536.0 / (65536.0 / solo + 65536.0 / BANDWIDTH + latency_us / 1e6),
            0.02,
        );
        assert!(
            waits < 0.8 * overlaps,
            "{hypervisor:?}: {waits} against {overlaps}"
        );
    }
}

/// Two vCPUs ask for 201 MB/s each, 64 KiB in 1000 packets at a time. amd48's network belongs to the driver domain.
#[test]
fn packets_pass_the_backend_of_their_vm_one_after_the_other() {
    let machine = amd48();
    let rate_of = |hypervisor, passthrough: bool| {
        let mut talking = reader(64.0, "64KiB", "");
        let io = &mut talking.program.as_mut().unwrap().io[0];
        (io.device, io.packets) = (DeviceKind::Network, 1000);
        let mut scenario = one(&machine, talking);
        scenario.hypervisor = hypervisor;
        scenario.vms[0].passthrough = passthrough;
        if passthrough {
            scenario.vms[0].memory_policy = Placing::Round4k.alone();
        }
        rate(&machine, scenario)
    };
    close(
        rate_of(Hypervisor::Native, false),
        2.0 * 64.0 * 2.2e9 / 0.7 / 1000.0,
        0.02,
    );
    // The backend takes 2055 cycles for a packet, at 2.2 GHz.
    let bound = 65536.0 / (1000.0 * 2055.0 / 2.2e9);
    close(rate_of(Hypervisor::Xen, false), bound, 0.02);
    close(rate_of(Hypervisor::Xen, true), bound, 0.02);
}

#[test]
fn a_latency_that_a_machine_does_not_state_is_the_native_one() {
    let mut machine = amd48();
    machine.devices[1].latency_virtual_ns = None;
    let mut scenario = one(&machine, reader(64.0, "4KiB", ""));
    scenario.vms[0].vcpus = 1;
    close(
        rate(&machine, scenario),
        4096.0 / (74e-6 + 4096.0 / BANDWIDTH),
        0.02,
    );
}

/// A disk of 4 GB/s on node 6 is read into memory of node 0.
#[test]
fn data_from_a_remote_device_loads_links_and_speeds_nobody_up() {
    let machine = with_disk(4_000_000_000);
    let mut slower = 0;
    for memory_node in [0, 3, 6] {
        let other = bound(&machine, "b", "stream", 0, 2, memory_node);
        let scenario = one(&machine, reader(480.0, "1MiB", "")).with_workload(stream());
        let mut scenario = Scenario {
            vms: vec![other, scenario.vms[0].clone()],
            ..scenario
        };
        // The second VM reads for as long as the first one runs.
        scenario.vms[1].work_share = 20.0;
        let alone = without_disk();
        let run = |machine: &Machine| {
            let mut twin = start(machine, &scenario);
            while twin.report().vms[0].runtime_s.is_none() {
                twin.run_to_end(Ns(twin.now().0 + 500_000_000));
            }
            let report = twin.report();
            let bytes = report.links.iter().map(|link| link.bytes).sum::<u64>();
            (
                report.vms[0].runtime_s.unwrap(),
                bytes as f64 / report.at_ns.as_f64(),
            )
        };
        let ((with, loaded), (without, idle)) = (run(&machine), run(&alone));
        assert!(
            with > 0.999 * without,
            "memory on {memory_node}: {with} s with, {without} s without"
        );
        assert!(
            loaded > idle,
            "memory on {memory_node}: links carry {loaded}, {idle} without"
        );
        slower += usize::from(with > 1.005 * without);
    }
    assert!(slower > 0, "no VM feels 3 GB/s");
}

#[test]
fn every_byte_asked_for_is_moved_once() {
    let machine = amd48();
    let hops = machine.route(NodeId(6), NodeId(0)).expect("there is one").len() as f64;
    // The total of 10 KiB is no multiple of any other figure here. Requests of 4 KiB go to the device several at a time.
    for (request, bytes, barrier) in [
        ("10KiB", 10240.0, BARRIER),
        ("4KiB", 4096.0, ""),
        ("1MiB", 1048576.0, ""),
    ] {
        let mut twin = start(&machine, &one(&machine, reader(64.0, request, barrier)));
        assert!(twin.run_to_end(Ns::from_secs(100)));
        let report = twin.report();
        let asked = report.vms[0].io_bytes as f64;
        let profiled = report.vms[0].instructions_g * 1e9 * 64.0 / 1e3;
        // One request of each thread; small requests of 100 us go together.
        let slack = 2.0 * f64::max(bytes, 200e6 * 100e-6 + bytes);
        assert!(
            (asked - profiled).abs() <= slack,
            "{request}: {asked} of {profiled} bytes"
        );
        let carried: f64 = report.links.iter().map(|link| link.bytes as f64).sum();
        let moved = carried / hops;
        assert!(
            moved <= asked + 8.0 && moved >= asked - slack,
            "{request}: {moved} of {asked} bytes moved"
        );
    }
}

#[test]
fn a_vm_that_stops_while_it_waits_can_start_again() {
    let machine = with_disk(1_000_000);
    let mut scenario = one(&machine, reader(64.0, "1MiB", ""));
    scenario.vms[0].work_share = 0.01;
    let at = |ms| Ns::from_millis(ms);
    let scenario = scenario
        .with_event(at(500), "a", EventAction::Start)
        .with_event(at(3000), "a", EventAction::Stop)
        .with_event(at(3100), "a", EventAction::Start);
    let mut twin = start(&machine, &scenario);
    twin.run_to_end(at(2900));
    let before = twin.report().vms[0].io_bytes;
    assert!(before > 0 && !twin.finished());
    assert!(twin.run_to_end(Ns::from_secs(60)), "it waits for ever");
    let after = twin.report().vms[0].io_bytes;
    assert!(
        after > before,
        "{after} bytes after a second life, {before} before"
    );
}

#[test]
fn a_machine_without_the_device_runs_the_program_without_its_io_and_says_so() {
    let machine = r910();
    let report = ended(&machine, &one(&machine, reader(64.0, "128KiB", "")));
    assert_eq!(report.vms[0].io_bytes, 0);
    assert_eq!(
        report.notes,
        [
            "machine r910 has no disk with `bandwidth` and `latency`, so reader runs there without I/O; \
          add them to a [[devices]] entry of class 0x01 in the machine's file"
        ]
    );
    assert!(
        ended(&amd48(), &one(&amd48(), reader(1.0, "128KiB", "")))
            .notes
            .is_empty()
    );
}

#[test]
fn the_same_run_gives_the_same_bytes() {
    let machine = amd48();
    for barrier in ["", BARRIER] {
        let scenario = one(&machine, reader(64.0, "4KiB", barrier));
        let text = || serde_json::to_string(&ended(&machine, &scenario)).unwrap();
        assert_eq!(text(), text());
    }
}

/// Returns thousand millions of instructions, and bytes of the disk, per second of a program on all of a bare machine. Its 48
/// threads compute while the disk works, and the disk is just fast enough.
fn on_all_of(machine: &Machine, name: &str) -> (f64, f64) {
    let mut spec = VmSpec::new("a", 48, Bytes::from_gib(64), name);
    spec.work_share = 10.0;
    let mut scenario = Scenario::of("test", vec![spec]);
    scenario.hypervisor = Hypervisor::Native;
    let mut twin = start(machine, &scenario);
    twin.run_to_end(Ns::from_secs(10));
    twin.mark();
    twin.run_to_end(Ns::from_secs(12));
    let vm = &twin.report().vms[0];
    (vm.instructions_g / 2.0, vm.io_bytes as f64 / 2.0)
}

#[test]
fn the_disk_of_seed_004_feeds_its_programs() {
    for (name, published) in [("mongodb", 184e6), ("dc.B", 175e6)] {
        let ((with, bytes), (without, _)) = (on_all_of(&amd48(), name), on_all_of(&without_disk(), name));
        close(with, without, 0.01);
        // Two seconds include a few requests of every thread more or less.
        close(bytes, published, 0.05);
    }
}

/// X-Stream's threads wait for the disk, whose rate in table 2 of seed 004 is therefore the program's.
#[test]
fn the_disk_of_seed_004_is_what_x_stream_waits_for() {
    let ((with, bytes), (without, _)) = (on_all_of(&amd48(), "sssp"), on_all_of(&without_disk(), "sssp"));
    close(bytes, 261e6, 0.05);
    assert!(
        with < 0.7 * without,
        "{with} G/s with the disk, {without} without"
    );
}
