//! Controllers and links under load, and the nodes on which pages are placed.

use homenode_machine::{LoadCurve, Machine};
use homenode_machine_files::preset;
use homenode_tracking::placement::{Pages, Placement};
use homenode_tracking::simulator::{Paths, Server, Simulator, Thread};
use homenode_tracking::stream::{Pattern, Stream};
use homenode_twin::models::{Load, serve};
use homenode_twin::{Scenario, Twin, VmSpec, Workload};
use homenode_units::{Bytes, Ns};

const LINE_BYTES: f64 = 64.0;

/// Returns the reference's controllers, links and routes for a machine.
pub(crate) fn paths(machine: &Machine) -> Paths {
    let hw = machine.hardware.as_ref().expect("presets have figures");
    let server = |idle_ns: f64, rate: f64| Server {
        idle_ns,
        service_ns: LINE_BYTES / rate * 1e9,
    };
    let nodes: Vec<_> = machine.nodes.keys().collect();
    let between = nodes
        .iter()
        .flat_map(|from| nodes.iter().map(move |to| (*from, *to)));
    Paths {
        controllers: machine
            .nodes
            .values()
            .map(|node| {
                server(
                    hw.latency.memory_ns,
                    node.memory_bandwidth.expect("a preset states it").as_f64(),
                )
            })
            .collect(),
        links: machine
            .links
            .iter()
            .map(|link| {
                server(
                    hw.link.hop_ns,
                    link.bandwidth.expect("a preset states it").as_f64(),
                )
            })
            .collect(),
        routes: between
            .map(|(from, to)| machine.route(from, to).expect("connected"))
            .collect(),
    }
}

/// A group of equal threads whose memory is on one node.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub threads: usize,
    pub node: usize,
    pub memory: usize,
    pub ns_between: f64,
    pub in_flight: usize,
    pub write_share: f64,
}

/// Returns the service that a thread of each group gets: misses per nanosecond and their latency.
pub(crate) fn reference(machine: &Machine, groups: &[Group], micros: f64) -> Vec<(f64, f64)> {
    let nodes = machine.nodes.len();
    let mut pages = Pages::new(Placement::FirstTouch, nodes);
    let mut threads = Vec::new();
    for (at, group) in groups.iter().enumerate() {
        for _ in 0..group.threads {
            // All accesses miss. One page per thread is enough; a thread on the page's intended node touches it first.
            let first_line = (threads.len() as u64) << 20;
            pages.home(first_line / 64, group.memory);
            threads.push((at, first_line));
        }
    }
    let thread = |(at, first_line): &(usize, u64)| Thread {
        node: groups[*at].node,
        cache: None,
        stream: Stream::new(&Pattern::Cyclic { lines: 64 }, *first_line, 1),
        ns_between: groups[*at].ns_between,
        in_flight: groups[*at].in_flight,
        write_share: groups[*at].write_share,
    };
    let mut simulator = Simulator::new(
        &paths(machine),
        vec![],
        pages,
        64,
        threads.iter().map(thread).collect(),
        1,
    );
    simulator.run_for(micros * 250.0);
    simulator.restart();
    simulator.run_for(micros * 1000.0);
    let of_group = |at: usize| {
        let members = (0..threads.len()).filter(|thread| threads[*thread].0 == at);
        let (mut misses, mut latency) = (0.0, 0.0);
        for member in members {
            misses += simulator.done(member).misses as f64;
            latency += simulator.done(member).latency_ns;
        }
        (
            misses / (micros * 1000.0) / groups[at].threads as f64,
            latency / misses,
        )
    };
    (0..groups.len()).map(of_group).collect()
}

/// Returns the service that a thread of each group gets in the epoch model: misses per nanosecond and their latency.
pub(crate) fn model(machine: &Machine, groups: &[Group]) -> Vec<(f64, f64)> {
    let load = |group: &Group| {
        let mut weights = vec![0.0; machine.nodes.len()];
        weights[group.memory] = 1.0;
        Load {
            node: group.node,
            weights,
            ns_between: group.ns_between,
            in_flight: group.in_flight as f64,
            write_share: group.write_share,
        }
    };
    let loads: Vec<Load> = groups
        .iter()
        .flat_map(|group| std::iter::repeat_n(load(group), group.threads))
        .collect();
    let served = serve(machine, &loads).expect("presets have figures");
    let mut first = 0;
    groups
        .iter()
        .map(|group| {
            let one = served[first];
            first += group.threads;
            (one.misses_per_ns, one.latency_ns)
        })
        .collect()
}

/// Returns a machine with the load curves of the reference. They are fitted to one kind of thread, alone on a controller and then
/// on a link, at eight loads each, just as a real machine's curves are measured.
pub(crate) fn with_measured_curves(name: &str) -> Machine {
    let mut machine = preset(name).expect("a preset");
    let node_cap = machine
        .nodes
        .values()
        .next()
        .and_then(|node| node.memory_bandwidth);
    let node_cap = node_cap.expect("a preset states it").as_f64() / 1e9;
    let idle = machine
        .hardware
        .as_ref()
        .expect("presets have figures")
        .latency
        .memory_ns;
    let hop = machine
        .hardware
        .as_ref()
        .expect("presets have figures")
        .link
        .hop_ns;
    let alone = |machine: &Machine, node: usize, ns_between: f64| {
        let group = Group {
            threads: 6,
            node,
            memory: 0,
            ns_between,
            in_flight: 4,
            write_share: 0.0,
        };
        let (rate, latency) = reference(machine, &[group], 400.0)[0];
        (6.0 * rate * LINE_BYTES, latency)
    };
    let works = [400.0, 200.0, 120.0, 80.0, 50.0, 30.0, 20.0, 15.0];
    let controller = works.map(|work| {
        let (load, latency) = alone(&machine, 0, work);
        (load / node_cap, latency / idle)
    });
    let curve = fit(&controller);
    // Node 2 is one link away from node 0.
    let first = machine.node_set().iter().next().expect("nodes");
    let third = machine.node_set().iter().nth(2).expect("three nodes");
    let link = machine.route(first, third).expect("connected")[0];
    let link_cap = machine.links[link]
        .bandwidth
        .expect("a preset states it")
        .as_f64()
        / 1e9;
    let over_link = works.map(|work| {
        let (load, latency) = alone(&machine, 2, work);
        (
            load / link_cap,
            (latency - idle * growth(curve, load / node_cap)) / hop,
        )
    });
    let hardware = machine.hardware.as_mut().expect("checked above");
    hardware.memory_curve = curve;
    hardware.link.curve = fit(&over_link);
    machine
}

fn terms(load: f64) -> (f64, f64) {
    let u = (load / 1.02).min(0.985);
    (u, u * u.sqrt() / (1.0 - u))
}

fn growth(curve: LoadCurve, load: f64) -> f64 {
    let (linear, queue) = terms(load);
    1.0 + curve.alpha * linear + curve.beta * queue
}

/// Fits `g - 1` over both terms by least squares, with no coefficient below 0. Loads beyond 97 percent are limited by the
/// capacity, not by the curve.
fn fit(points: &[(f64, f64)]) -> LoadCurve {
    let (mut xx, mut xy, mut yy, mut xg, mut yg) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for (load, grown) in points.iter().filter(|(load, _)| *load < 0.97) {
        let ((x, y), g) = (terms(*load), grown - 1.0);
        xx += x * x;
        xy += x * y;
        yy += y * y;
        xg += x * g;
        yg += y * g;
    }
    let det = xx * yy - xy * xy;
    let (alpha, beta) = ((xg * yy - yg * xy) / det, (yg * xx - xg * xy) / det);
    if alpha < 0.0 {
        LoadCurve {
            alpha: 0.0,
            beta: yg / yy,
        }
    } else if beta < 0.0 {
        LoadCurve {
            alpha: xg / xx,
            beta: 0.0,
        }
    } else {
        LoadCurve { alpha, beta }
    }
}

/// Returns groups that share controllers and links, with the names of the cases.
pub(crate) fn cases() -> Vec<(&'static str, Vec<Group>)> {
    let group = |threads, node, memory, ns_between, in_flight| Group {
        threads,
        node,
        memory,
        ns_between,
        in_flight,
        write_share: 0.0,
    };
    let writing = |mut group: Group| {
        group.write_share = 0.5;
        group
    };
    vec![
        (
            "light and heavy threads on one controller",
            vec![group(3, 0, 0, 100.0, 1), group(3, 0, 0, 5.0, 6)],
        ),
        (
            "a full controller, different demands",
            vec![
                group(2, 0, 0, 1.0, 8),
                group(2, 0, 0, 1.0, 4),
                group(2, 0, 0, 60.0, 2),
            ],
        ),
        (
            "a full controller, writers among readers",
            vec![writing(group(3, 0, 0, 2.0, 8)), group(3, 0, 0, 2.0, 8)],
        ),
        (
            "one controller serves four nodes",
            vec![
                group(6, 0, 0, 5.0, 4),
                group(6, 1, 0, 5.0, 4),
                group(6, 2, 0, 5.0, 4),
                group(6, 4, 0, 5.0, 4),
            ],
        ),
        (
            "a half-loaded link beside local threads",
            vec![group(4, 2, 0, 100.0, 4), group(4, 0, 0, 20.0, 4)],
        ),
        (
            "a full link beside local threads",
            vec![group(6, 2, 0, 2.0, 8), group(4, 0, 0, 20.0, 4)],
        ),
        (
            "one and two hops through one link",
            vec![
                group(4, 2, 0, 10.0, 4),
                group(4, 3, 0, 10.0, 4),
                group(2, 0, 0, 10.0, 4),
            ],
        ),
    ]
}

/// Returns accesses by node of 48 threads on amd48, in the reference and in the simulator. A share of the accesses goes to memory
/// that thread 0 touched first, a share to memory that all threads touched, and the rest to the threads' own memory.
pub(crate) fn accesses_by_node(by_one: f64, shared: f64) -> [Vec<f64>; 2] {
    [reference_by_node(by_one, shared), twin_by_node(by_one, shared)]
}

fn reference_by_node(by_one: f64, shared: f64) -> Vec<f64> {
    const THREADS: u64 = 48;
    const REGION_PAGES: u64 = 4096;
    let first = |region: u64| region << 30;
    let node_of = |thread: u64| (thread / 6) as usize;
    let mut pages = Pages::new(Placement::FirstTouch, 8);
    // Thread 0 touches region 0; all threads touch a part each of region 1; thread i touches region 2 + i.
    for page in 0..REGION_PAGES {
        pages.home(first(0) + page, 0);
        pages.home(first(1) + page, node_of(page * THREADS / REGION_PAGES));
    }
    let mut counts = vec![0.0; 8];
    let pattern = Pattern::Uniform { lines: REGION_PAGES };
    let mut picks = Stream::new(&Pattern::Uniform { lines: 1 << 20 }, 0, 3);
    for thread in 0..THREADS {
        let mut streams = [0, 1, 2 + thread].map(|region| Stream::new(&pattern, first(region), thread));
        for _ in 0..20_000 {
            let drawn = picks.next_line() as f64 / f64::from(1 << 20);
            let region = if drawn < by_one {
                0
            } else if drawn < by_one + shared {
                1
            } else {
                2
            };
            let home = pages.home(streams[region].next_line(), node_of(thread));
            counts[home] += 1.0;
        }
    }
    counts
}

fn twin_by_node(by_one: f64, shared: f64) -> Vec<f64> {
    let machine = preset("amd48").expect("a preset");
    let region = |kind: &str, mib: u32, share: f64| {
        if share == 0.0 {
            return String::new();
        }
        format!("[[program.regions]]\nkind = \"{kind}\"\nsize = \"{mib}MiB\"\naccess_share = {share:?}\n")
    };
    // There are too few misses for latency to slow any thread, so only placement is compared.
    let text = format!(
        "name = \"spread\"\nabout = \"test\"\n[program]\nthreads = \"one-per-vcpu\"\ninstructions_g_per_thread = 4.0\n\
         cpi_core = 1.0\nllc_accesses_per_kilo_instruction = 0.1\nmisses_in_flight = 4.0\nhits_in_flight = 4.0\n\
         write_share = 0.0\n[program.miss_ratio]\nm_inf = 1.0\nc0 = \"1MiB\"\nk = 1.0\n{}{}{}",
        region("initialised-by-one", 64, by_one),
        region("shared", 96, shared),
        region("private", 4, 1.0 - by_one - shared),
    );
    let workload = Workload::from_toml("test.toml", &text).expect("a possible workload");
    let vms = vec![VmSpec::new("vm", 48, Bytes::from_gib(8), "spread")];
    let scenario = Scenario::of("test", vms).with_workload(workload);
    let mut twin = Twin::new(machine, &scenario, 1).expect("the scenario fits");
    twin.run_to_end(Ns::from_secs(30));
    let report = twin.report();
    report.vms[0]
        .accesses_by_node
        .values()
        .map(|accesses| *accesses as f64)
        .collect()
}
