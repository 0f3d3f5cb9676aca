//! The best homes for a VM that fits nowhere: its memory has room there, and CPUs or bandwidth are overcommitted.
//!
//! # Algorithm
//! For each number of nodes take, of the bins with room for the VM's memory, the one that is short of the smallest share of what
//! the VM needs (CPUs in hyperthreads, and bandwidth, added up); equal ones in the order of [`super::place`]. The caller chooses
//! among these by predicted speeds, or takes the first with the least shortage.
//!
//! # Properties (tests of the same name)
//! - `a_vm_that_fits_nowhere_gets_the_least_crowded_home_with_room_for_its_memory`
//! - `a_vm_whose_memory_fits_nowhere_has_no_crowded_home`

use homenode_units::NodeSet;

use super::short::{self, Shortage};
use super::supply::{BANDWIDTH, Bin, CPU, MEMORY, Supply, Vector};
use super::{roomy, sort_bins};
use crate::demand::Demand;

/// A home that a VM would overcommit.
#[derive(Clone, Debug, PartialEq)]
pub struct Crowded {
    /// Home nodes.
    pub nodes: NodeSet,
    /// What these nodes are short of.
    pub shortages: Vec<Shortage>,
    /// What is missing, as shares of the need, added up.
    pub lack: f64,
}

/// Returns the least crowded home of each size, in ascending order of sizes; empty if no home has room for the VM's memory.
pub fn crowded(supply: &Supply, demand: &Demand, allowed: Option<&NodeSet>) -> Vec<Crowded> {
    let supply = supply.counting(demand).by_threads();
    let need = supply.normalise(demand);
    let may = |bin: &Bin| allowed.is_none_or(|allowed| supply.nodes_of(bin.mask).is_subset(allowed));
    let span = supply.near.spans().into_iter().max().unwrap_or_default();
    let mut bins = supply.single_bins();
    bins.retain(may);
    let mut found = Vec::new();
    while !bins.is_empty() {
        sort_bins(&supply, demand, &mut bins);
        let with_room = bins.iter().filter(|bin| roomy(bin, &need, &[MEMORY]));
        let best = with_room.min_by(|a, b| lack(&supply, a, &need).total_cmp(&lack(&supply, b, &need)));
        found.extend(best.map(|bin| {
            let nodes = supply.nodes_of(bin.mask);
            Crowded {
                shortages: short::of_home(&supply, demand, &nodes),
                lack: lack(&supply, bin, &need),
                nodes,
            }
        }));
        bins = supply.grow(&bins, span).into_iter().filter(may).collect();
    }
    found
}

fn lack(supply: &Supply, bin: &Bin, need: &Vector) -> f64 {
    let counted: &[usize] = if supply.bandwidth_known {
        &[CPU, BANDWIDTH]
    } else {
        &[CPU]
    };
    let of = |at: &usize| ((need[*at] - bin.left[*at]) / need[*at]).max(0.0);
    counted.iter().filter(|at| need[**at] > 0.0).map(of).sum()
}
