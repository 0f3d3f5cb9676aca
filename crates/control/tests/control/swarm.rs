//! The swarm: random machines, VMs, agents and faults. Whatever happens, counts add up, figures are finite and not negative, and
//! the same seed gives the same bytes.
//!
//! If debug assertions are on, as in tests, the engine itself checks pages, time, bytes, caches, run queues and loads at the end
//! of every epoch; the swarm checks from outside. For a seed that fails, the command that repeats it is printed.
//!
//! `SWARM_SEED=7` runs one seed, `SWARM_SEEDS=1000` that many.

use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

use homenode_control::{Config, Control, Mode, PolicySet};
use homenode_host::{Act, Action, Host, Plan, Refusal, Sample, VmSample};
use homenode_machine::Machine;
use homenode_twin::{Scenario, Twin, TwinReport};
use homenode_units::{Chance, Ns, Pages};

const SEEDS: u64 = 48;
const WORKLOADS: [&str; 8] = [
    "idle", "cg.B", "soplex", "povray", "ep.B", "milc", "astar", "is.B",
];

struct Dice(Chance);

impl Dice {
    /// Returns a number from 0 to `limit` - 1.
    fn below(&mut self, limit: u64) -> u64 {
        self.0.bits() % limit
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len() as u64) as usize]
    }

    /// Returns some members of a list, at least one.
    fn some<T: Copy>(&mut self, list: &[T]) -> Vec<T> {
        let chosen: Vec<T> = list.iter().copied().filter(|_| self.one_in(2)).collect();
        if chosen.is_empty() {
            vec![self.of(list)]
        } else {
            chosen
        }
    }
}

/// Returns a machine of 1 to 6 nodes. Its links reach all nodes, and may differ between the two directions.
fn machine(dice: &mut Dice) -> String {
    let nodes = 1 + dice.below(6);
    let mut links = String::new();
    for to in 1..nodes {
        // A random tree, so every node is reached.
        let from = dice.below(to);
        let (there, back) = (2 + dice.below(12), 2 + dice.below(12));
        let _ = write!(
            links,
            "[[links]]\nbandwidth = \"{there}GB/s\"\ndirected = [[{from}, {to}]]\n\
             [[links]]\nbandwidth = \"{back}GB/s\"\ndirected = [[{to}, {from}]]\n"
        );
    }
    format!(
        "name = \"swarm\"\n[shape]\nsockets = {nodes}\ncores_per_node = {}\nthreads_per_core = {}\n\
         memory_per_node = \"{}GiB\"\nmemory_bandwidth_per_node = \"{}GB/s\"\n[llc]\nsize = \"{}MiB\"\nline_bytes = 64\n\
         {links}[hardware]\nclock = \"{}MHz\"\nllc_inclusive = {}\nmisses_in_flight_max = {}\nsmt_throughput = 1.25\n\
         tlb_entries_4k = {}\ntlb_entries_2m = 32\nl2 = \"{}KiB\"\nwalk = {{ native_refs = 1.0, nested_refs = 4.0 }}\n\
         ipi = {{ native_ns = 900, virtual_ns = 10900 }}\n\
         latency = {{ l1_cycles = 4, l2_cycles = 12, llc_cycles = 45, memory_ns = {} }}\n\
         memory_curve = {{ alpha = 0.34, beta = 0.015 }}\nlink = {{ hop_ns = {}, curve = {{ alpha = 1.3, beta = 0.08 }} }}\n",
        1 + dice.below(6),
        1 + dice.below(2),
        4 + dice.below(13),
        3 + dice.below(60),
        1 + dice.below(30),
        1200 + dice.below(2800),
        dice.one_in(2),
        4 + dice.below(12),
        64 << dice.below(5),
        128 << dice.below(4),
        60 + dice.below(120),
        20 + dice.below(100),
    )
}

fn vm(dice: &mut Dice, at: u64, hypervisor: &str, machine: &Machine) -> String {
    let vcpus = 1 + dice.below(4.min(machine.cpus.len() as u64));
    let mut text = format!(
        "[[vm]]\nname = \"vm{at}\"\nvcpus = {vcpus}\nmemory = \"3GiB\"\nworkload = \"{}\"\narrival = \"{}ms\"\nweight = {}\n\
         page_size = \"{}\"\nafter = \"{}\"\nwork_share = 0.00{}\n",
        dice.of(&WORKLOADS),
        dice.below(1500),
        dice.of(&[64, 256, 1000]),
        dice.of(&["4KiB", "2MiB"]),
        dice.of(&["idle", "leave"]),
        1 + dice.below(9),
    );
    if dice.one_in(4) {
        let _ = writeln!(text, "cap_percent = {}", 20 + dice.below(100 * vcpus));
    }
    text += match (dice.below(6), hypervisor) {
        (0, _) => "memory_policy = \"round-4k\"\n",
        (1, "kvm" | "xen") => "memory_policy = \"round-1g\"\n",
        (2, "native") => "autonuma = true\n",
        (2, _) => "vnuma = \"static\"\nautonuma = true\n",
        (3, "kvm" | "xen") => "vnuma = \"static\"\nallocation = \"interleave\"\n",
        _ => "",
    };
    if dice.one_in(5) {
        let ids: Vec<_> = machine.cpus.iter().map(|cpu| cpu.id).collect();
        let some: homenode_units::CpuSet = dice.some(&ids).into_iter().collect();
        let _ = writeln!(text, "cpus = \"{some}\"");
    }
    text
}

/// Returns a fault or a change that happens while VMs run.
fn event(dice: &mut Dice, vms: u64, machine: &Machine) -> String {
    let nodes: Vec<_> = machine.nodes.keys().collect();
    let to: homenode_units::NodeSet = dice.some(&nodes).into_iter().collect();
    let (at, vm) = (1500 + dice.below(4000), dice.below(vms));
    let entry = |at: u64, action: &str| format!("[[event]]\nat = \"{at}ms\"\nvm = \"vm{vm}\"\n{action}\n");
    match dice.below(5) {
        0 => entry(at, "action = \"stop\""),
        1 => {
            let memory = 200 + dice.below(2800);
            entry(at, &format!("action.balloon = {{ memory = \"{memory}MiB\" }}"))
        }
        2 => entry(at, &format!("action.migrate = {{ nodes = \"{to}\" }}")),
        3 => {
            let (accesses, cpi) = (dice.below(3), dice.below(9));
            entry(
                at,
                &format!("action.phase = {{ llc_access_factor = {accesses}.5, cpi_factor = 1.{cpi} }}"),
            )
        }
        // A VM crashes and is started again.
        _ => entry(at, "action = \"stop\"") + &entry(at + 1 + dice.below(1500), "action = \"start\""),
    }
}

fn scenario(dice: &mut Dice, machine: &Machine) -> String {
    let hypervisor = dice.of(&["kvm", "xen", "native"]);
    let vms = 1 + dice.below(5);
    let mut text = format!("name = \"swarm\"\nhypervisor = \"{hypervisor}\"\narrival_jitter = \"200ms\"\n");
    for at in 0..vms {
        text += &vm(dice, at, hypervisor, machine);
    }
    for _ in 0..dice.below(4) {
        text += &event(dice, vms, machine);
    }
    text
}

/// The agent that acts on the host.
enum Agent {
    /// The real agent, with its policies.
    Control(Box<Control>),
    /// A random agent that does anything the contract allows.
    Anything(Dice),
}

fn anything(dice: &mut Dice, twin: &Twin, sample: &Sample) -> Option<Action> {
    let seen = sample.vms.get(dice.below(8) as usize)?;
    let memory: Vec<_> = twin.machine().memory_nodes().iter().collect();
    let cpus: Vec<_> = twin.machine().cpus.iter().map(|cpu| cpu.id).collect();
    let to = dice.some(&memory).into_iter().collect();
    Some(match dice.below(3) {
        0 => Act::PinVcpus {
            vcpus: seen.vcpus.iter().map(|vcpu| vcpu.index).collect(),
            cpus: dice.some(&cpus).into_iter().collect(),
        }
        .on(seen.id),
        1 => Act::SetHome { nodes: to }.on(seen.id),
        _ => Action::gather(twin.machine(), seen.id, to, Pages(dice.below(60_000))),
    })
}

fn look(sample: &Sample, before: &Sample) {
    assert!(sample.version >= before.version && sample.at > before.at);
    for node in sample.nodes.values() {
        assert!(node.memory_free_bytes <= node.memory_total_bytes);
    }
    let touched: u64 = sample
        .vms
        .iter()
        .filter_map(VmSample::pages_touched)
        .map(|p| p.0)
        .sum();
    let used = |node: &homenode_host::NodeSample| node.memory_total_bytes.0 - node.memory_free_bytes.0;
    assert_eq!(touched * 4096, sample.nodes.values().map(used).sum::<u64>());
}

/// Runs one seed. Returns its report as JSON, or `None` if the scenario does not fit the machine.
fn run(seed: u64) -> Option<String> {
    let mut dice = Dice(Chance::new(seed));
    let machine =
        homenode_machine_files::from_toml("machine.toml", &machine(&mut dice)).expect("a possible machine");
    let text = scenario(&mut dice, &machine);
    let scenario = Scenario::from_toml("swarm.toml", &text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let mut agent = match dice.below(4) {
        3 => Agent::Anything(Dice(Chance::new(!seed))),
        which => {
            let policies = [PolicySet::Default, PolicySet::FfPin, PolicySet::Homenode][which as usize];
            let config = Config {
                policies,
                ..Config::default()
            };
            Agent::Control(Box::new(Control::new(config, Mode::Act)))
        }
    };
    let mut twin = match Twin::new(machine, &scenario, seed) {
        Ok(twin) => twin,
        // The VMs may be too large for a small machine; no other error is allowed.
        Err(error) => {
            assert!(error.to_string().contains("the VMs need"), "{error}\n{text}");
            return None;
        }
    };
    let mut before = twin.sample().expect("the twin always answers");
    for _ in 0..8 {
        match &mut agent {
            Agent::Control(control) => {
                twin.wait(Ns::from_secs(1));
                control.step(&mut twin).expect("the twin always answers");
            }
            Agent::Anything(dice) => {
                twin.wait(Ns::from_millis(1 + dice.below(900)));
                let sample = twin.sample().expect("the twin always answers");
                if let Some(action) = anything(dice, &twin, &sample) {
                    let mut plan = Plan::new(sample.version);
                    plan.decide("swarm", action, "any".into());
                    match twin.commit(&plan) {
                        Ok(receipt) => assert_eq!(receipt.outcomes.len(), 1),
                        Err(refusal) => assert!(matches!(refusal, Refusal::Stale { .. }), "{refusal}"),
                    }
                }
                twin.wait(Ns(1));
            }
        }
        let sample = twin.sample().expect("the twin always answers");
        look(&sample, &before);
        before = sample;
    }
    assert!(
        twin.run_to_end(Ns::from_secs(600)),
        "a program never ends\n{text}"
    );
    let report = twin.report();
    figures(&report);
    Some(serde_json::to_string(&report).expect("a report is JSON"))
}

/// Checks that figures are not NaN, infinite or negative.
fn figures(report: &TwinReport) {
    let figure = |what: &str, value: f64| assert!(value.is_finite() && value >= 0.0, "{what} is {value}");
    for vm in &report.vms {
        let of =
            |what: &str, value: Option<f64>| figure(&format!("{what} of {}", vm.name), value.unwrap_or(0.0));
        of("arrival", vm.arrival_s);
        of("runtime", vm.runtime_s);
        of("LLC miss rate", vm.llc_miss_rate);
        of("local access ratio", vm.local_access_ratio);
        of("waiting", Some(vm.waiting_s));
        assert!(vm.llc_miss_rate.is_none_or(|rate| rate <= 1.0 + 1e-9), "{vm:?}");
    }
    for node in report.nodes.values() {
        figure("busy CPUs of a node", node.cpus_busy);
    }
}

#[test]
fn whatever_happens_counts_add_up_and_the_same_seed_gives_the_same_bytes() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let seeds = match number("SWARM_SEED") {
        Some(one) => one..one + 1,
        None => 0..number("SWARM_SEEDS").unwrap_or(SEEDS),
    };
    let (mut ran, mut failed) = (0, Vec::new());
    for seed in seeds.clone() {
        match catch_unwind(AssertUnwindSafe(|| (run(seed), run(seed)))) {
            Ok((one, two)) if one == two => ran += u64::from(one.is_some()),
            Ok(_) => failed.push((seed, "two runs differ")),
            Err(_) => failed.push((seed, "see above")),
        }
    }
    let commands: Vec<String> = failed
        .iter()
        .map(|(seed, what)| {
            format!("{what}: SWARM_SEED={seed} cargo test -p homenode-control --test control swarm")
        })
        .collect();
    assert!(failed.is_empty(), "seeds failed\n{}", commands.join("\n"));
    assert!(
        ran * 2 >= seeds.end - seeds.start,
        "only {ran} scenarios fitted their machines"
    );
}
