//! Three ways to place domUs on a host that fills up: Xen's own toolstack, an operator who makes a pool of CPUs for each node
//! and deals domUs out to the pools, and ours. Each starts the same domUs in the same order, and the same figures are taken.
//! The comparison is noted, not judged.

use std::collections::BTreeMap;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use homenode_host::{Host as _, Sample};
use homenode_testbed_guest::Behaviour;
use homenode_undo::{Acting, Options};
use homenode_units::VmId;
use homenode_xen::XenHost;

use super::agent::stop;
use super::xen_agent::{advice, start};
use crate::inside::Inside;
use crate::inside::xen::domu::{Domu, DomuSpec, Kind, Toolstack};
use crate::inside::xen::{clean_up, xl};

/// The domUs in the order of their start: name, memory in MiB, and the share of a CPU that each wants, in percent. Together
/// they want more than the three CPUs that dom0 does not use, and some want memory and little else.
const STARTS: [(&str, u64, u32); 6] = [
    ("web0", 128, 90),
    ("store", 512, 20),
    ("web1", 128, 90),
    ("web2", 192, 60),
    ("cache", 384, 30),
    ("web3", 128, 40),
];
/// How long domUs run before they are watched, how long they are watched, and the time between samples.
const SETTLING: Duration = Duration::from_secs(15);
const WATCHED: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The program or person that places the domUs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Placer {
    Xl,
    Pools,
    Ours,
    OursAndAgent,
}

impl Placer {
    const ALL: [(Placer, &str); 4] = [
        (Placer::Xl, "xl's own placement"),
        (Placer::Pools, "cpupool-numa-split, dealt out in turn"),
        (Placer::Ours, "place --xl"),
        (Placer::OursAndAgent, "place --xl, and the agent (tavo)"),
    ];
}

fn spec(inside: &Inside, placer: Placer, at: usize) -> anyhow::Result<DomuSpec> {
    let (name, memory_mib, duty) = STARTS[at];
    let busy = Behaviour::busy(1)
        .with_duty(duty)
        .with_touch((memory_mib / 4) as u32);
    let mut spec = match placer {
        Placer::Xl | Placer::Pools => DomuSpec::anywhere(name, Kind::Pv),
        Placer::Ours | Placer::OursAndAgent => {
            DomuSpec::new(name, Kind::Pv, &advice(inside, &format!("{memory_mib}MiB"))?)
        }
    };
    spec.memory_mib = memory_mib;
    if placer == Placer::Pools {
        // Skips the pool of node 0, which has dom0.
        spec.pool = format!("Pool-node{}", 1 + at % 3);
    }
    Ok(spec.doing(busy))
}

/// How long vCPUs ran, in seconds, by domain and CPU.
type Ran = BTreeMap<VmId, BTreeMap<u32, f64>>;

/// Samples for some time on which CPUs vCPUs are, and how long they ran since the last sample.
fn watch(host: &mut XenHost) -> anyhow::Result<Ran> {
    let running = |sample: &Sample| -> BTreeMap<VmId, (f64, u32)> {
        let of = sample.vms.iter().filter_map(|vm| {
            let vcpu = vm.vcpus.first()?;
            Some((vm.id, (vcpu.running_ns.as_secs_f64(), vcpu.cpu?.0)))
        });
        of.collect()
    };
    let (mut ran, begin) = (Ran::new(), Instant::now());
    let mut before = running(&host.sample()?);
    while begin.elapsed() < WATCHED {
        thread::sleep(LOOK_EVERY);
        let now = running(&host.sample()?);
        for (vm, (ran_s, cpu)) in &now {
            if let Some((then_s, _)) = before.get(vm) {
                *ran.entry(*vm).or_default().entry(*cpu).or_default() += ran_s - then_s;
            }
        }
        before = now;
    }
    Ok(ran)
}

/// The figures for one placer.
struct Seen {
    /// Share of the vCPUs' run time that was local: time on a node counts by the part of the domain's memory that is on that
    /// node.
    local: f64,
    /// Loops per second of all guests, and the average share of the time for which a guest was kept from running.
    loops_per_s: f64,
    steal: f64,
    /// Largest share of the time for which a guest was kept from running.
    steal_max: f64,
}

fn measure(inside: &Inside, domus: &[Domu]) -> anyhow::Result<Seen> {
    let options = Options {
        acting: Acting::DryRun,
        state_dir: inside.dir().join("watching"),
        ..Options::new(XenHost::machine_here(Path::new("/"))?)
    };
    let mut host = XenHost::connect(options).map_err(|error| anyhow!(error))?;
    let names: BTreeMap<String, VmId> = host
        .sample()?
        .vms
        .into_iter()
        .map(|vm| (vm.name, vm.id))
        .collect();
    thread::sleep(SETTLING);
    let begins = domus
        .iter()
        .map(|domu| Ok((Instant::now(), domu.progress()?)))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let ran = watch(&mut host)?;
    let (mut all_s, mut local_s) = (0.0, 0.0);
    let (mut loops_per_s, mut steals) = (0.0, Vec::new());
    for (domu, (begin, (loops, steal))) in domus.iter().zip(begins) {
        let name = &domu.spec.name;
        let (loops_now, steal_now) = domu.progress()?;
        let took_s = begin.elapsed().as_secs_f64();
        let worked = (loops_now - loops) as f64 / took_s;
        let stolen = (steal_now - steal).as_secs_f64() / took_s;
        let pages = domu.pages_by_node()?;
        let sum = pages.iter().sum::<u64>().max(1) as f64;
        let of = ran.get(names.get(name).context("a sample lacks a domU")?);
        let of = of.with_context(|| format!("no sample shows {name} running"))?;
        for (cpu, ran_s) in of {
            all_s += ran_s;
            // Each node has one CPU, with the node's number.
            local_s += ran_s * pages[*cpu as usize] as f64 / sum;
        }
        let ran: Vec<String> = of
            .iter()
            .map(|(cpu, ran_s)| format!("{cpu}: {ran_s:.1} s"))
            .collect();
        inside.note(format!(
            "  {name}: pages {pages:?}, ran on CPU {}; {worked:.1} loops a second, steal {:.1} percent",
            ran.join(", "),
            100.0 * stolen
        ));
        loops_per_s += worked;
        steals.push(stolen);
    }
    ensure!(all_s > 0.0, "expected vCPUs to run");
    Ok(Seen {
        local: local_s / all_s,
        loops_per_s,
        steal: steals.iter().sum::<f64>() / steals.len() as f64,
        steal_max: steals.iter().copied().fold(0.0, f64::max),
    })
}

/// Compares three ways to place the same domUs on a host that fills up.
pub(super) fn compared(inside: &mut Inside) -> anyhow::Result<()> {
    for (placer, whose) in Placer::ALL {
        if placer == Placer::Pools {
            xl(&["cpupool-numa-split"])?;
        }
        let mut domus = Vec::new();
        for at in 0..STARTS.len() {
            domus.push(inside.create_domu(&spec(inside, placer, at)?, Toolstack::Xl)?);
        }
        let agent = match placer {
            Placer::OursAndAgent => Some(start(inside)?),
            _ => None,
        };
        let seen = measure(inside, &domus)?;
        inside.note(format!(
            "{whose}: {:.1} percent of memory local, {:.1} loops a second, steal {:.1} percent on average, {:.1} at most",
            100.0 * seen.local,
            seen.loops_per_s,
            100.0 * seen.steal,
            100.0 * seen.steal_max
        ));
        if let Some(agent) = agent {
            stop(agent)?;
        }
        for domu in &domus {
            inside.destroy_domu(domu)?;
        }
        // Returns the pools' CPUs to the first pool.
        clean_up()?;
    }
    Ok(())
}
