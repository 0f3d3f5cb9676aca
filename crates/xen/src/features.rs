//! What stock Xen lets dom0 do for each thing that the agent does elsewhere, and what it does not.

use std::path::Path;

use homenode_machine::Machine;

use crate::host::levers;
use crate::hypervisor::Hypervisor;
use crate::place;

/// What was found, or what is missing, what that costs, and the remedy.
type Found = Result<String, (String, &'static str, &'static str)>;

/// What cannot be on stock Xen, by what it is called elsewhere: why, what that costs, and what can be done instead.
const LACKS: [(&str, &str, &str, &str); 6] = [
    (
        "hardware counters",
        "dom0 cannot count for domains",
        "no miss rates: permits are not enforced, and decisions go by CPU and memory alone",
        "none on stock Xen",
    ),
    (
        "waiting for CPUs",
        "Xen tells each domain its own waiting, and dom0 none",
        "CPUs that are too few are seen by their load alone",
        "`xentrace -e 0x21000` traces it by hand",
    ),
    (
        "page moves",
        levers::NO_MOVES,
        "vCPUs are brought to memory, never memory to vCPUs",
        "`homenode place --xl` before a domain is created",
    ),
    (
        "balloon",
        "the agent does not set balloons of domains",
        "memory is not sized by working sets",
        "`xl mem-set`",
    ),
    (
        "working sets",
        levers::NO_PAGE_USES,
        "no working sets",
        "none on stock Xen",
    ),
    (
        "topology pages",
        levers::NO_TOPOLOGY,
        "guests do not know where they are",
        "none on stock Xen",
    ),
];

/// The machine, where it can be read, and all features, whether there or not.
pub fn features(root: &Path) -> (Option<Machine>, Vec<(&'static str, Found)>) {
    let opened = Hypervisor::open(root);
    let machine = opened
        .as_ref()
        .ok()
        .and_then(|hypervisor| place::machine(hypervisor, root).ok());
    let nothing = "no domain is seen or managed";
    let mend = "mend what is said there";
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
            "memory by node",
            Ok("Xen counts it on its console, once a minute and for each new domain".to_owned()),
        ));
    }
    let lacks =
        LACKS.map(|(feature, found, costs, remedy)| (feature, Err((found.to_owned(), costs, remedy))));
    features.extend(lacks);
    (machine, features)
}
