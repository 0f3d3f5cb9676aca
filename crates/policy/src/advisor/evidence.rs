//! What was measured of a VM, and what two measurements show.

use homenode_host::{VcpuRates, View, VmRates};
use homenode_units::{NodeId, NodeMap, NodeSet, Ns, Pages};

use super::Config;

/// On a host whose kernel balances, a VM gets a trial only if it rested for at most this share of its vCPUs' time, and other
/// VMs used at most this share of the CPU time that it used.
const NOISE_MAX: f64 = 0.1;
/// Weight of the queue in the latency of a controller, and the highest use of one that is assumed, as in [`crate::predict`].
const QUEUE: f64 = 0.12;
const BUSY_MAX: f64 = 0.95;

/// A measurement has at least this many cycles: fewer hardly show how they scatter.
const CYCLES_MIN: u32 = 5;

/// Mean and spread of a figure over cycles.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Series {
    count: u32,
    sum: f64,
    squares: f64,
}

impl Series {
    fn take(&mut self, value: f64) {
        self.count += 1;
        self.sum += value;
        self.squares += value * value;
    }

    fn mean(&self) -> f64 {
        self.sum / f64::from(self.count.max(1))
    }

    /// Returns the sample variance over the square of the mean; 0 for fewer than two values.
    fn relative_variance(&self) -> f64 {
        let (count, mean) = (f64::from(self.count), self.mean());
        if self.count < 2 || mean == 0.0 {
            return 0.0;
        }
        ((self.squares - count * mean * mean) / (count - 1.0)).max(0.0) / (mean * mean)
    }
}

/// What a comparison of two measurements shows of a VM's speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The VM's speed rose by at least the least gain.
    Faster,
    /// The VM's speed rose by less than the least gain, if at all.
    NoFaster,
    /// The VM's speed fell.
    Slower,
    /// The measurements scatter too much, or there are too few of them.
    Undecided,
}

/// How fast a VM was, and what it did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Speed {
    /// Instructions per second of CPU time that the VM wanted.
    speed: Series,
    /// LLC references per instruction.
    references: Series,
}

impl Speed {
    fn take(&mut self, speed: f64, references: Option<f64>) {
        self.speed.take(speed);
        if let Some(references) = references {
            self.references.take(references);
        }
    }

    /// Whether a VM that refers to its LLC that many times per instruction does what it did in this measurement.
    fn is_like(&self, references: f64, gain_min: f64) -> bool {
        let mean = self.references.mean();
        let tolerated = (2.0 * self.references.relative_variance().sqrt()).max(gain_min);
        self.references.count == 0 || (references - mean).abs() <= tolerated * mean
    }

    /// Compares a later measurement with this one.
    pub(super) fn verdict(&self, later: &Speed, gain_min: f64) -> Verdict {
        let least = self.speed.count.min(later.speed.count);
        if least < CYCLES_MIN
            || !(later.references.count == 0 || self.is_like(later.references.mean(), gain_min))
        {
            return Verdict::Undecided;
        }
        let ratio = later.speed.mean() / self.speed.mean();
        let variance = |speed: &Series| speed.relative_variance() / f64::from(speed.count);
        // At least Student's t for 95 percent: exact are 2.78, 2.26 and 2.04 for 4, 9 and 30 degrees of freedom.
        let quantile = 2.0 + 3.2 / f64::from(least - 1);
        let margin = quantile * ratio * (variance(&self.speed) + variance(&later.speed)).sqrt();
        match ratio - 1.0 {
            gain if gain >= gain_min && gain - margin > 0.0 => Verdict::Faster,
            gain if gain + margin < 0.0 => Verdict::Slower,
            gain if gain + margin < gain_min => Verdict::NoFaster,
            _ => Verdict::Undecided,
        }
    }
}

/// Changes of a VM's pages since the last cycle, as shares of all its pages.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Change {
    /// Pages that came, went, or are on another node.
    pub changed: f64,
    /// Pages that are on another node.
    pub moved: f64,
}

impl Change {
    /// Returns the changes between two counts of a VM's pages by node.
    pub(super) fn between(before: &NodeMap<Pages>, now: &NodeMap<Pages>) -> Change {
        let on = |pages: &NodeMap<Pages>, node: NodeId| pages.get(node).map_or(0.0, |pages| pages.as_f64());
        let all: f64 = now.values().map(|pages| pages.as_f64()).sum();
        let (mut more, mut less) = (0.0, 0.0);
        for node in now.node_set().iter() {
            let change = on(now, node) - on(before, node);
            more += change.max(0.0);
            less += (-change).max(0.0);
        }
        let all = all.max(1.0);
        Change {
            changed: more.max(less) / all,
            moved: more.min(less) / all,
        }
    }
}

/// What was observed in a watch.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Seen {
    /// Time of the cycles that count.
    pub time: Ns,
    cycles: u32,
    pub speed: Speed,
    local: f64,
    link_busy: f64,
    /// Share of its vCPUs' time in which the VM rested.
    rests: f64,
    /// CPUs that the VM used, and CPUs that other VMs used, each summed over cycles.
    used: f64,
    used_by_others: f64,
    /// Accesses to each home node, in the order of the nodes.
    on: Vec<u64>,
    /// Use of each home node's controllers, in the order of the nodes; `None` if it is unknown.
    controllers: Option<Vec<f64>>,
}

impl Seen {
    /// Records a cycle, unless the VM does not do what it did in the measurement `like`. Returns whether all inputs were known.
    pub(super) fn take(
        &mut self,
        view: &View<'_>,
        rates: &VmRates,
        home: &NodeSet,
        like: Option<(&Speed, f64)>,
    ) -> bool {
        let (Some(instructions), Some(on)) = (rates.instructions_per_s, rates.accesses_on.as_ref()) else {
            return false;
        };
        let references = rates.llc_references_per_s.filter(|_| instructions > 0.0);
        let references = references.map(|references| references / instructions);
        if let (Some((before, gain_min)), Some(references)) = (like, references)
            && !before.is_like(references, gain_min)
        {
            return true;
        }
        self.time = Ns(self.time.0 + view.rates.map_or(0, |rates| rates.period_ns.0));
        self.cycles += 1;
        if let Some(speed) = rates.speed() {
            self.speed.take(speed, references);
        }
        self.local += rates.local_access_ratio.unwrap_or(1.0);
        self.link_busy += busiest_link(view) * share_of_remote(view, rates);
        let rests = |vcpu: &VcpuRates| 1.0 - vcpu.running - vcpu.waiting.unwrap_or(0.0) - vcpu.throttled;
        self.rests += rates.vcpus.iter().map(rests).sum::<f64>() / rates.vcpus.len().max(1) as f64;
        let of_all = view
            .vms
            .iter()
            .filter_map(|vm| vm.rates)
            .map(|rates| rates.cpus_used);
        self.used += rates.cpus_used;
        self.used_by_others += of_all.sum::<f64>() - rates.cpus_used;
        self.on.resize(home.len(), 0);
        for (sum, node) in self.on.iter_mut().zip(home.iter()) {
            *sum += on.get(node).copied().unwrap_or(0);
        }
        if self.cycles == 1 {
            self.controllers = Some(vec![0.0; home.len()]);
        }
        let used: Option<()> = self.controllers.as_mut().and_then(|controllers| {
            for (sum, node) in controllers.iter_mut().zip(home.iter()) {
                *sum += controller_use(view, node)?;
            }
            Some(())
        });
        if used.is_none() {
            self.controllers = None;
        }
        true
    }

    /// Whether this is a measurement of at least `time`.
    pub(super) fn is_enough(&self, time: Ns) -> bool {
        self.time >= time && self.cycles >= CYCLES_MIN
    }

    fn mean(&self, sum: f64) -> f64 {
        sum / f64::from(self.cycles.max(1))
    }

    /// Returns the share of the VM's accesses that are local.
    pub(super) fn local(&self) -> f64 {
        self.mean(self.local)
    }

    /// Returns the part of its capacity that the busiest link uses for the VM.
    pub(super) fn link_busy(&self) -> f64 {
        self.mean(self.link_busy)
    }

    /// Returns the use of the controllers of the home node that answers most of the VM's accesses; `None` if it is unknown.
    pub(super) fn controller_busy(&self) -> Option<f64> {
        let controllers = self.controllers.as_ref()?;
        let (_, busy) = self.on.iter().zip(controllers).max_by_key(|(on, _)| **on)?;
        Some(self.mean(*busy))
    }

    /// Returns why a trial would show nothing on a host whose kernel balances; `None` if it would show something.
    pub(super) fn noise(&self) -> Option<String> {
        let rests = self.mean(self.rests);
        let others = self.used_by_others / self.used;
        match () {
            () if rests > NOISE_MAX => Some(format!("it rests {:.0} percent of the time", 100.0 * rests)),
            () if others > NOISE_MAX => Some(format!("other VMs use {others:.1} times its CPU time")),
            () => None,
        }
    }

    /// Returns the imbalance in percent; `None` if there were too few accesses.
    pub(super) fn imbalance(&self, config: &Config) -> Option<f64> {
        let sum: u64 = self.on.iter().sum();
        if sum < config.accesses_min {
            return None;
        }
        let on: Vec<f64> = self.on.iter().map(|on| *on as f64).collect();
        Some(100.0 * homenode_host::imbalance(&on)?)
    }
}

/// Returns the part of its bandwidth that a node's controllers use; `None` if it is unknown.
pub(super) fn controller_use(view: &View<'_>, node: NodeId) -> Option<f64> {
    let used = view.rates?.nodes.get(node)?.bandwidth?;
    let most = view.machine.nodes.get(node)?.memory_bandwidth?;
    Some(used.as_f64() / most.as_f64())
}

/// Returns the share of its capacity that the busiest link uses; 0 if unknown.
fn busiest_link(view: &View<'_>) -> f64 {
    let links = view.machine.links.iter();
    let used = links.filter_map(|link| view.rates?.link_use(view.machine, link.from, link.to));
    used.fold(0.0, f64::max)
}

/// Returns a VM's share of the accesses of all VMs that pass a link; 1 if there are none.
fn share_of_remote(view: &View<'_>, rates: &VmRates) -> f64 {
    let remote = |rates: &VmRates| {
        let all: u64 = rates.accesses_on.iter().flat_map(NodeMap::values).sum();
        all as f64 * (1.0 - rates.local_access_ratio.unwrap_or(1.0))
    };
    let all: f64 = view.vms.iter().filter_map(|vm| vm.rates).map(remote).sum();
    if all > 0.0 { remote(rates) / all } else { 1.0 }
}

/// Returns how many times as long a VM's accesses take as they would if its memory were spread evenly over its home nodes, by the
/// use of controllers only; 1 if that is unknown.
pub(super) fn relief_if_spread(seen: &Seen) -> f64 {
    let Some(controllers) = &seen.controllers else {
        return 1.0;
    };
    let load = |busy: f64| {
        let busy = busy.min(BUSY_MAX);
        1.0 + QUEUE * busy / (1.0 - busy)
    };
    let all: u64 = seen.on.iter().sum();
    let met = seen.on.iter().zip(controllers);
    let now: f64 = met.map(|(on, busy)| *on as f64 * load(seen.mean(*busy))).sum();
    let even = seen.mean(controllers.iter().sum::<f64>()) / controllers.len().max(1) as f64;
    now / (all.max(1) as f64 * load(even))
}

/// Returns how many times as far from their users a VM's accesses are if its memory is spread evenly over these nodes, by the
/// machine's distances; `local` is the share that is local now.
pub(super) fn farther_if_spread(view: &View<'_>, home: &NodeSet, local: f64) -> f64 {
    let (mut sum, mut pairs) = (0.0, 0.0);
    for from in home.iter() {
        for to in home.iter().filter(|to| *to != from) {
            sum += f64::from(view.machine.distance(from, to).unwrap_or(10)) / 10.0;
            pairs += 1.0;
        }
    }
    let far = sum / f64::max(pairs, 1.0);
    let distance = |local: f64| local + (1.0 - local) * far;
    distance(1.0 / home.len() as f64) / distance(local)
}

#[cfg(test)]
mod tests {
    use crate::predict;

    #[test]
    fn the_law_of_controllers_is_that_of_predictions() {
        // The constants are repeated here instead of shared with the predictor: `scripts/drawn-programs.py` draws other programs
        // to judge the advisor whenever the advisor's code changes, and sharing the constants would change no decision.
        assert_eq!(
            (super::QUEUE, super::BUSY_MAX),
            (predict::QUEUE, predict::BUSY_MAX)
        );
    }
}
