//! A controller or a link, and how its latency responds to load. [`super::fabric`] gives the reasons.

use homenode_machine::LoadCurve;

/// Smallest relative change of a resource's traffic that leads to a response. The latency changes by no more than the traffic,
/// because `u g(u)` grows faster than `g(u)`. Traffic below a fifth of the curve's capacity is compared as if it were that fifth.
const TRAFFIC_CHANGE_MIN: f64 = 3e-4;
/// Share of the capacity at which a curve ends, because it is the last measured point.
const FULL: f64 = 0.985;
/// Most steps of Newton's method.
const STEPS_MAX: usize = 6;
/// Relative change of a share at which the method has converged.
const SHARE_CHANGE_MAX: f64 = 1e-4;
/// Number of resources solved in parallel.
const LANES: usize = 8;

/// A controller or a link.
#[derive(Clone, Debug)]
pub(super) struct Resource {
    pub idle_ns: f64,
    pub now_ns: f64,
    curve: LoadCurve,
    pub capacity: f64,
    /// 1 / (idle latency times the curve's capacity); 0 if no load can fill the resource.
    per_load: f64,
    /// Load times latency at the last step, in units of that product, and the corresponding share of the curve's capacity.
    traffic: f64,
    u: f64,
}

impl Resource {
    pub(super) fn new(idle_ns: f64, curve: LoadCurve, capacity: f64) -> Resource {
        Resource {
            idle_ns,
            now_ns: idle_ns,
            curve,
            capacity,
            per_load: if capacity > 0.0 {
                1.0 / (1.02 * capacity * idle_ns)
            } else {
                0.0
            },
            traffic: 0.0,
            u: 0.0,
        }
    }

    /// Takes in a load. Returns true if the latency should respond to it, which it never does if nothing fills the resource.
    #[inline(always)]
    fn is_moved_by(&mut self, load: f64) -> bool {
        // Solves for u in u g(u) = traffic, where traffic is in units of the idle latency times the curve's capacity.
        let traffic = load * self.now_ns * self.per_load;
        let is_moved = (traffic - self.traffic).abs() >= TRAFFIC_CHANGE_MIN * self.traffic.max(0.2);
        self.traffic = if is_moved { traffic } else { self.traffic };
        is_moved
    }

    /// Sets the latency to that for a share of the curve's capacity. Returns the latency's relative change.
    #[inline(always)]
    fn move_to(&mut self, u: f64, load: f64) -> f64 {
        let LoadCurve { alpha, beta } = self.curve;
        self.u = u;
        // Beyond its end the curve no longer holds the load back. Then the lowest latency that keeps the load within capacity
        // applies.
        let next = (self.idle_ns * (1.0 + alpha * u + beta * u * u.sqrt() / (1.0 - u)))
            .max(self.now_ns * load / self.capacity);
        let change = (next - self.now_ns).abs() / self.now_ns;
        self.now_ns = next;
        change
    }
}

/// Moves each resource to the latency at which its load would be consistent if it responded as `1 / latency`. Returns the largest
/// relative change. `moved` is scratch, as long as `resources`.
///
/// Newton's method is one long chain of divisions and roots, and a core can run several such chains at once. Within a step no
/// resource depends on the responses of others, so several are solved in parallel, each as if it were the only one.
#[inline(always)]
pub(super) fn answer(resources: &mut [Resource], loads: &[f64], moved: &mut [usize]) -> f64 {
    // Without a branch, which a processor could not predict: each position is written, and kept if the resource is moved.
    let mut count = 0;
    for (at, (resource, load)) in resources.iter_mut().zip(loads).enumerate() {
        moved[count] = at;
        count += usize::from(resource.is_moved_by(*load));
    }
    let mut change = 0.0_f64;
    for moved in moved[..count].chunks(LANES) {
        let shares = shares(resources, moved);
        for (at, u) in moved.iter().zip(shares) {
            change = change.max(resources[*at].move_to(u, loads[*at]));
        }
    }
    change
}

/// Solves `u g(u) = traffic` for some resources, each starting from its present share.
#[inline(always)]
fn shares(resources: &[Resource], moved: &[usize]) -> [f64; LANES] {
    let (mut u, mut traffic) = ([0.0; LANES], [0.0; LANES]);
    let (mut alpha, mut beta) = ([0.0; LANES], [0.0; LANES]);
    // All bits are set once a lane's share is found. Lanes without a resource have nothing to solve. Masks, because a processor
    // compares several lanes at once into masks.
    let mut found = [u64::MAX; LANES];
    for (lane, at) in moved.iter().enumerate() {
        let resource = &resources[*at];
        (u[lane], traffic[lane]) = (resource.u, resource.traffic);
        (alpha[lane], beta[lane]) = (resource.curve.alpha, resource.curve.beta);
        found[lane] = 0;
    }
    for _ in 0..STEPS_MAX {
        let next: [f64; LANES] =
            std::array::from_fn(|lane| step(u[lane], traffic[lane], alpha[lane], beta[lane]));
        let mut all = u64::MAX;
        for lane in 0..LANES {
            let is_found = (next[lane] - u[lane]).abs() < SHARE_CHANGE_MAX * next[lane];
            let (kept, new) = (
                u[lane].to_bits() & found[lane],
                next[lane].to_bits() & !found[lane],
            );
            u[lane] = f64::from_bits(kept | new);
            found[lane] |= u64::from(is_found).wrapping_neg();
            all &= found[lane];
        }
        if all == u64::MAX {
            break;
        }
    }
    u
}

/// Takes one step of Newton's method.
#[inline(always)]
fn step(u: f64, traffic: f64, alpha: f64, beta: f64) -> f64 {
    let rest = 1.0 / (1.0 - u);
    let tail = beta * u * u.sqrt() * rest;
    let slope = 1.0 + 2.0 * alpha * u + tail * (2.5 - 1.5 * u) * rest;
    (u - (u * (1.0 + alpha * u + tail) - traffic) / slope).clamp(0.0, FULL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn resources_side_by_side_answer_as_each_would_alone(
            loads in prop::collection::vec((0.0..20.0f64, 0.0..20.0f64), 1..40),
        ) {
            let curve = |at: usize| match at % 3 {
                0 => LoadCurve { alpha: 1.27, beta: 0.08 },
                _ => LoadCurve { alpha: 0.34, beta: 0.015 },
            };
            // Every fifth resource has no capacity, which means that no load fills it.
            let capacity = |at: usize| if at % 5 == 4 { 0.0 } else { 8.0 + at as f64 / 4.0 };
            let new = |at: usize| Resource::new(50.0 + at as f64, curve(at), capacity(at));
            let mut together: Vec<Resource> = (0..loads.len()).map(new).collect();
            let mut alone = together.clone();
            for step in 0..4 {
                let now: Vec<f64> = loads.iter().map(|(first, then)| if step < 2 { *first } else { *then }).collect();
                let change = answer(&mut together, &now, &mut vec![0; loads.len()]);
                let changes = alone.iter_mut().zip(&now).map(|(one, load)| {
                    answer(std::slice::from_mut(one), &[*load], &mut [0])
                });
                prop_assert_eq!(change.to_bits(), changes.fold(0.0, f64::max).to_bits());
                for (one, other) in alone.iter().zip(&together) {
                    prop_assert_eq!(one.now_ns.to_bits(), other.now_ns.to_bits());
                }
            }
        }
    }
}
