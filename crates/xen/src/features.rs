//! What stock Xen lets dom0 do, and what it does not, for each thing that the agent does on other hosts.

use std::path::Path;

use homenode_kernel::modelled_pmu;
use homenode_machine::Machine;

use crate::hypervisor::Hypervisor;
use crate::place;

/// Why waiting times are unknown.
pub(crate) const NO_WAITING: &str =
    "how long vCPUs wait for a CPU is not known, and they are taken not to wait";
/// Why nothing is counted.
pub(crate) const NO_COUNTERS: &str =
    "no hardware counters: dom0 cannot count for domains on stock Xen; LLC miss rates of VMs are unknown";
/// Worth knowing for an operator who has large domains, or who reads that console.
pub(crate) const DEBUG_KEY: &str = "where memory of domains lies is counted by Xen's debug key `u` and read from its console: once a minute, and \
                             when a domain is new";

/// Where counts come from on an emulated host.
pub(crate) const COUNTED_BY_MODEL: &str = "no hardware counters; LLC misses of domains are counted by the emulator's model of caches, not by hardware";

/// Why no page moves if the operator did not allow local migration.
pub(crate) const NO_MOVES: &str = "stock Xen moves no page of a domain that runs; migrating it to where it is moves all of it, and is off \
                            (`local_migration.allow`). Or give it its home when it is created (`homenode place --xl`)";
/// Why no guest gets a topology page.
pub(crate) const NO_TOPOLOGY: &str =
    "a domain has no device that tells it where it is; stock Xen gives PV domains no virtual nodes";
/// Why a VM's balloon is not touched.
pub(crate) const NO_RELEASES: &str = "Xen learns what a guest releases from the guest's balloon alone";
/// Why it is unknown which node uses a page.
pub(crate) const NO_PAGE_USES: &str =
    "stock Xen does not tell dom0 which pages a domain uses, or from which node";
/// Why a domain's working set is unknown.
pub(crate) const NO_TRACKER: &str = "stock Xen does not tell dom0 which memory a domain uses";
/// Why the agent sets no part of caches or memory bandwidth.
pub(crate) const NO_PARTS: &str =
    "Xen's own commands set parts of caches for sockets (`xl psr-cat-set`); the agent sets caps alone";

/// What was found; or, if it is missing, what is missing, what that costs, and the remedy.
type Found = Result<String, (String, &'static str, &'static str)>;

/// Features that stock Xen cannot have, by their names on other hosts: the reason, what that costs, and what to do instead.
const LACKS: [(&str, &str, &str, &str); 2] = [
    (
        "working sets",
        NO_PAGE_USES,
        "no working sets, and the agent's own policies take no memory",
        "none on stock Xen",
    ),
    (
        "topology pages",
        NO_TOPOLOGY,
        "guests do not know where they are",
        "none on stock Xen",
    ),
];

/// Returns where domains' counts come from.
fn counters(root: &Path) -> Found {
    match modelled_pmu::find(root) {
        Ok(Some(_)) => Ok(COUNTED_BY_MODEL.to_owned()),
        Ok(None) | Err(_) => Err((
            "dom0 cannot count for domains".to_owned(),
            "no miss rates: permits are booked and not enforced, and decisions go by CPU and memory alone",
            "none on stock Xen",
        )),
    }
}

fn is_installed(program: &str) -> bool {
    let places = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&places).any(|place| place.join(program).is_file())
}

/// Returns whether a domain's memory can be limited.
fn balloon() -> Found {
    match is_installed("xl") {
        true => Ok(
            "`xl mem-set` has a domain's balloon come to a limit; the agent's own policies set none"
                .to_owned(),
        ),
        false => Err((
            "there is no xl".to_owned(),
            "no limit on memory can be set",
            "install Xen's tools (Debian: `apt install xen-utils`)",
        )),
    }
}

/// Returns whether vCPUs' waiting times can be known.
fn waiting() -> Found {
    match is_installed("xentrace") {
        true => Ok("`run --trace-waiting` reads Xen's trace, unless another program does".to_owned()),
        false => Err((
            "there is no xentrace".to_owned(),
            "CPUs that are too few are seen by their load alone",
            "install Xen's tools (Debian: `apt install xen-utils`)",
        )),
    }
}

/// Returns the machine, if it can be read, and all features, whether present or not.
pub fn features(root: &Path) -> (Option<Machine>, Vec<(&'static str, Found)>) {
    let opened = Hypervisor::open(root);
    let machine = opened
        .as_ref()
        .ok()
        .and_then(|hypervisor| place::machine(hypervisor, root).ok());
    let nothing = "no domain is seen or managed";
    let mend = "correct the cause shown";
    let mut features = vec![(
        "Xen",
        match &opened {
            Ok(hypervisor) => match hypervisor.domains() {
                Ok(domains) => Ok(format!(
                    "{} domains beside dom0; pins and homes of all",
                    domains.len()
                )),
                Err(error) => Err((error.to_string(), nothing, mend)),
            },
            Err(error) => Err((error.to_string(), nothing, mend)),
        },
    )];
    if let Ok(hypervisor) = &opened {
        let pool = hypervisor.pool(0);
        let without = "no quota holds a domain";
        features.push((
            "caps",
            match pool {
                Ok(pool) if pool.has_caps() => Ok("the scheduler of pool 0 knows caps".to_owned()),
                Ok(_) => Err((
                    "the scheduler of pool 0 knows no caps".to_owned(),
                    without,
                    "boot Xen with sched=credit2, or sched=credit",
                )),
                Err(error) => Err((error.to_string(), without, mend)),
            },
        ));
        features.push((
            "page moves",
            match hypervisor.can_shadow() {
                Ok(can_shadow) => Ok(format!(
                    "all of a domain by migrating it to where it is, where `local_migration.allow` says so: PVH domains while they run{}",
                    if can_shadow { ", PV domains too" } else { "; PV domains stand still for it, as this Xen has no shadow paging" }
                )),
                Err(error) => Err((error.to_string(), "vCPUs are brought to memory, never memory to vCPUs", mend)),
            },
        ));
        features.push((
            "memory by node",
            Ok(
                "Xen's debug key `u` counts it on its console, once a minute and for each new domain"
                    .to_owned(),
            ),
        ));
    }
    features.push(("balloon", balloon()));
    features.push(("hardware counters", counters(root)));
    features.push(("waiting for CPUs", waiting()));
    let lacks =
        LACKS.map(|(feature, found, costs, remedy)| (feature, Err((found.to_owned(), costs, remedy))));
    features.extend(lacks);
    (machine, features)
}
