//! Lists, for each function that the agent has on other hosts, what stock Xen lets dom0 do and what not.

use std::path::Path;

use homenode_kernel::modelled_pmu;
use homenode_machine::Machine;

use crate::hypervisor::Hypervisor;
use crate::place;

/// Why waiting times are unknown.
pub(crate) const NO_WAITING: &str = "how long vCPUs wait for a CPU is unknown, and taken as 0";
/// Why nothing is counted.
pub(crate) const NO_COUNTERS: &str =
    "no hardware counters: dom0 cannot count for domains on stock Xen; LLC miss rates of VMs are unknown";
/// A notice for an operator who has large domains, or who reads Xen's console.
pub(crate) const DEBUG_KEY: &str = "domains' memory by node is counted with Xen's debug key `u` and read from Xen's console, once a minute and \
                             when a domain is new";

/// Where counts come from on an emulated host.
pub(crate) const COUNTED_BY_MODEL: &str = "no hardware counters; LLC misses of domains are counted by the emulator's model of caches, not by hardware";

/// Why no page moves if the operator did not allow local migration.
pub(crate) const NO_MOVES: &str = "stock Xen cannot move single pages of a running domain; local migration, which moves all its memory, is off \
                            (`local_migration.allow`). Turn it on, or choose homes when domains are created (`homenode place --xl`)";
/// Why no guest gets a topology page.
pub(crate) const NO_TOPOLOGY: &str =
    "Xen domains have no topology device, and stock Xen gives PV domains no virtual nodes";
/// Why a VM's balloon is not touched.
pub(crate) const NO_RELEASES: &str = "Xen learns only from a guest's balloon which pages the guest frees";
/// Why it is unknown which node uses a page.
pub(crate) const NO_PAGE_USES: &str =
    "stock Xen does not tell dom0 which pages a domain uses, or from which node";
/// Why a domain's working set is unknown.
pub(crate) const NO_TRACKER: &str = "stock Xen does not tell dom0 which memory a domain uses";
/// Why the agent sets no part of caches or memory bandwidth.
pub(crate) const NO_PARTS: &str =
    "on Xen the agent only sets caps; use `xl psr-cat-set` to give domains parts of a socket's cache";

/// For a feature that is there, what was found; for a missing one, what is missing, what that costs, and the remedy.
type Found = Result<String, (String, &'static str, &'static str)>;

/// Features that stock Xen cannot have, by their names on other hosts: the reason, what that costs, and what to do instead.
const LACKS: [(&str, &str, &str, &str); 2] = [
    (
        "working sets",
        NO_PAGE_USES,
        "working sets are unknown, and the agent's own policies take no memory from VMs",
        "none on stock Xen",
    ),
    (
        "topology pages",
        NO_TOPOLOGY,
        "guests do not know on which nodes they run",
        "none on stock Xen",
    ),
];

/// Returns where domains' counts come from.
fn counters(root: &Path) -> Found {
    match modelled_pmu::find(root) {
        Ok(Some(_)) => Ok(COUNTED_BY_MODEL.to_owned()),
        Ok(None) | Err(_) => Err((
            "dom0 has no hardware counters for domains".to_owned(),
            "no miss rates: permits are booked but not enforced, and decisions use only CPU and memory",
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
        true => {
            Ok("limits on memory are set with `xl mem-set`; the agent's own policies set none".to_owned())
        }
        false => Err((
            "xl is not installed".to_owned(),
            "no limit on memory can be set",
            "install Xen's tools (Debian: `apt install xen-utils`)",
        )),
    }
}

/// Returns whether vCPUs' waiting times can be known.
fn waiting() -> Found {
    match is_installed("xentrace") {
        true => {
            Ok("`run --trace-waiting` reads Xen's trace, unless another program is reading it".to_owned())
        }
        false => Err((
            "xentrace is not installed".to_owned(),
            "a shortage of CPUs shows only in their load",
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
                    "{} domains besides dom0; pins and homes can be set on all",
                    domains.len()
                )),
                Err(error) => Err((error.to_string(), nothing, mend)),
            },
            Err(error) => Err((error.to_string(), nothing, mend)),
        },
    )];
    if let Ok(hypervisor) = &opened {
        let pool = hypervisor.pool(0);
        let without = "CPU quotas of domains cannot be enforced";
        features.push((
            "caps",
            match pool {
                Ok(pool) if pool.has_caps() => Ok("the scheduler of CPU pool 0 supports caps".to_owned()),
                Ok(_) => Err((
                    "the scheduler of CPU pool 0 does not support caps".to_owned(),
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
                    "all pages of a domain at once by local migration, if `local_migration.allow` permits it: PVH domains while they run{}",
                    if can_shadow { ", PV domains too" } else { "; PV domains are paused meanwhile, as this Xen has no shadow paging" }
                )),
                Err(error) => Err((error.to_string(), "vCPUs move to their memory, but memory never moves to vCPUs", mend)),
            },
        ));
        features.push((
            "memory by node",
            Ok(
                "counted with Xen's debug key `u` and read from Xen's console, once a minute and for each new domain"
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
