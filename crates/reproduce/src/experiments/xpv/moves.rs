//! `xpv.balancer-moves-nodes`: how often the hypervisor's balancer moves vCPUs between nodes [XPV, section 4.1.2].
//!
//! # Choices, made before the experiment was run
//!
//! - Five minutes from the start of the three VMs, which arrive together; changes of all vCPUs count, divided by the minutes.

use homenode_units::{Bytes, NodeSet, Ns};

use super::{MACHINE, System, cpus_of, on_xen};
use crate::experiment::{Decision, Experiment};
use crate::experiments::table;
use crate::run::Run;
use crate::verdict::Measured;
use crate::work::Outcomes;

pub const EXPERIMENT: Experiment = Experiment {
    claim: "xpv.balancer-moves-nodes",
    runs: || SEEDS.map(run).to_vec(),
    decide,
};

const MINUTES: u64 = 5;
/// The claim is decided by the first; the others are in the table.
const SEEDS: [u64; 3] = [1, 2, 3];

fn run(seed: u64) -> Run {
    let vm = |name| {
        let (cpus, memory) = (cpus_of(2, 7), Bytes::from_gib(12));
        System::FirstTouch.vm(name, 15, memory, "jbb2005", cpus, NodeSet::new())
    };
    let scenario = on_xen("three VMs of JBB on 36 CPUs", ["a", "b", "c"].map(vm).to_vec());
    Run {
        seed,
        ..Run::between(MACHINE, scenario, Ns::ZERO, Ns::from_secs(60 * MINUTES))
    }
}

fn decide(outcomes: &Outcomes) -> Result<Decision, String> {
    let mut rows = Vec::new();
    for seed in SEEDS {
        let vms = &outcomes.of(&run(seed))?.vms;
        let changes: u64 = vms.iter().map(|vm| vm.node_changes).sum();
        rows.push((format!("seed {seed}"), vec![changes as f64 / MINUTES as f64]));
    }
    let mut measured = Measured::default();
    measured.numbers.insert("value".to_owned(), rows[0].1[0]);
    Ok(Decision {
        measured,
        set_up: vec![SET_UP.to_owned()],
        tables: vec![table(
            "Node changes per minute, of all vCPUs together.",
            &["run", "changes"],
            rows,
        )],
        why: vec![WHY.to_owned()],
        ..Decision::default()
    })
}

const SET_UP: &str = "Three VMs of 15 vCPUs and 12 GiB, all busy with JBB, on the 36 CPUs of nodes 2 to 7.";
const WHY: &str = "All changes here are of the first seconds. Xen's credit scheduler hands out credits for all CPUs of the host, here 48, of \
     which these VMs may use 36: their 45 vCPUs get more than they can burn, all stay UNDER, and a CPU that has one of them steals none. \
     On a machine file of those six nodes alone, as a pool of CPUs would be, credits are for 36 and the same VMs change nodes 8400 times \
     a minute. \
     Once something disturbs that (vCPUs that change places, as in `xpv.under-load-balancing`, do) the same VMs change nodes some 30 \
     times a minute each. The paper does not say how it keeps the privileged VM's nodes free, and its JBB has threads that sleep between \
     collections; the profile's do not, and a CPU that falls idle steals.";
