//! Max-min fair sharing: the last resort to limit throughput.
//!
//! # Algorithm
//!
//! Progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2). All flows grow together. When a resource is full, the
//! flows through it keep what they have. A flow that has its whole demand stops. The other flows continue to grow.
//!
//! # Properties
//!
//! No resource carries more than its capacity; no flow gets more than its demand; a flow gets less than its demand
//! only if one of its resources is full and none there has more than it.

/// A demand on several resources at once.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Demand {
    /// Requested bytes per nanosecond.
    pub rate: f64,
    /// Resources that the demand uses, and the bytes of each that one byte of demand takes.
    pub uses: Vec<(usize, f64)>,
}

/// Returns the share of its demand that each flow gets, in [0, 1].
pub(crate) fn max_min(demands: &[Demand], capacities: &[f64]) -> Vec<f64> {
    let mut granted = vec![0.0_f64; demands.len()];
    let mut growing: Vec<usize> = (0..demands.len()).filter(|at| demands[*at].rate > 0.0).collect();
    let mut room = capacities.to_vec();
    while !growing.is_empty() {
        let mut weight = vec![0.0; capacities.len()];
        for (resource, factor) in growing.iter().flat_map(|at| &demands[*at].uses) {
            weight[*resource] += factor;
        }
        let fills = (0..room.len())
            .filter(|r| weight[*r] > 0.0)
            .map(|r| room[r].max(0.0) / weight[r]);
        let wants = growing.iter().map(|at| demands[*at].rate - granted[*at]);
        let step = fills.chain(wants).fold(f64::INFINITY, f64::min);
        for at in &growing {
            granted[*at] += step;
            for (resource, factor) in &demands[*at].uses {
                room[*resource] -= step * factor;
            }
        }
        let before = growing.len();
        growing.retain(|at| {
            let demand = &demands[*at];
            let satisfied = granted[*at] >= demand.rate * (1.0 - 1e-9);
            let stuck = demand.uses.iter().any(|(r, _)| room[*r] <= capacities[*r] * 1e-9);
            !satisfied && !stuck
        });
        assert!(
            growing.len() < before,
            "progressive filling must fill a resource or satisfy a flow in every step"
        );
    }
    let share = |(demand, granted): (&Demand, f64)| {
        if demand.rate > 0.0 {
            (granted / demand.rate).min(1.0)
        } else {
            1.0
        }
    };
    demands.iter().zip(granted).map(share).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn small_flows_are_satisfied_and_large_ones_share_the_rest() {
        // A capacity of 10 for demands of 1, 6 and 8: the first is satisfied, the others get 4.5 each.
        let flow = |rate| Demand {
            rate,
            uses: vec![(0, 1.0)],
        };
        let shares = max_min(&[flow(1.0), flow(6.0), flow(8.0)], &[10.0]);
        assert!((shares[0] - 1.0).abs() < 1e-9);
        assert!((shares[1] * 6.0 - 4.5).abs() < 1e-6 && (shares[2] * 8.0 - 4.5).abs() < 1e-6);
    }

    #[test]
    fn a_flow_stopped_elsewhere_leaves_its_room_to_others() {
        // Resource 0 has a capacity of 2, resource 1 of 10. Flow a needs both and gets 2 of 5; flow b gets the remaining 8 of
        // resource 1.
        let a = Demand {
            rate: 5.0,
            uses: vec![(0, 1.0), (1, 1.0)],
        };
        let b = Demand {
            rate: 9.0,
            uses: vec![(1, 1.0)],
        };
        let shares = max_min(&[a, b], &[2.0, 10.0]);
        assert!((shares[0] * 5.0 - 2.0).abs() < 1e-6 && (shares[1] * 9.0 - 8.0).abs() < 1e-6);
    }

    proptest! {
        #[test]
        fn no_resource_overflows(
            flows in prop::collection::vec((0.0..20.0f64, prop::collection::vec((0usize..4, 0.1..2.0f64), 1..4)), 1..12),
            caps in prop::collection::vec(0.5..20.0f64, 4..5),
        ) {
            let demands: Vec<Demand> = flows.into_iter().map(|(rate, uses)| Demand { rate, uses }).collect();
            let shares = max_min(&demands, &caps);
            let mut used = [0.0; 4];
            for (demand, share) in demands.iter().zip(&shares) {
                prop_assert!((0.0..=1.0).contains(share));
                for (resource, factor) in &demand.uses {
                    used[*resource] += demand.rate * share * factor;
                }
            }
            for (used, cap) in used.iter().zip(&caps) {
                prop_assert!(*used <= cap * (1.0 + 1e-6));
            }
        }
    }
}
