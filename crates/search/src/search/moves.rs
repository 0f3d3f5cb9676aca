//! The moves of the search: the places that a VM may have, and the changes that turn one schedule into another.

use homenode_machine::Machine;
use homenode_twin::Scenario;
use homenode_units::{Chance, NodeId, NodeSet, Ns};

use super::schedule::{Goal, Place, Schedule};

/// Ways of spreading memory.
const SPREADS: [&str; 3] = ["round-4k", "round-4k+carrefour", "first-touch+carrefour"];
/// Number of node sets tried for a VM that needs several nodes.
const SETS_MAX: usize = 6;

/// The places that are possible for each VM.
#[derive(Clone, Debug)]
pub(super) struct Choices {
    machine: Machine,
    nodes: Vec<NodeId>,
    /// Minimum number of nodes that each VM needs for its CPUs, in the scenario's order.
    nodes_min: Vec<usize>,
}

impl Choices {
    /// Returns the possible places for a scenario on a machine.
    pub(super) fn new(machine: &Machine, scenario: &Scenario) -> Choices {
        let nodes: Vec<NodeId> = machine.home_nodes().iter().collect();
        let cpus = machine.cpus_of(&machine.home_nodes()).len();
        let per_node = (cpus / nodes.len().max(1)).max(1);
        let least = |vcpus: u16| usize::from(vcpus).div_ceil(per_node).clamp(1, nodes.len().max(1));
        Choices {
            machine: machine.clone(),
            nodes_min: scenario.vms.iter().map(|vm| least(vm.vcpus)).collect(),
            nodes,
        }
    }

    /// Returns a schedule with one decision per VM. Schedules with a number below [`Choices::STARTS`] are systematic, the
    /// others random.
    pub(super) fn start(&self, number: usize, chance: &mut Chance) -> Schedule {
        let mut schedule = Schedule::default();
        let (mut next, count) = (0, self.nodes.len());
        for (vm, least) in self.nodes_min.iter().enumerate() {
            let goal = match number {
                // All VMs apart, round robin over the nodes; each gets as many nodes as it needs.
                0 => {
                    let homes = (0..*least).map(|offset| self.nodes[(next + offset) % count]);
                    let home = homes.collect();
                    next += least;
                    Goal::home(home)
                }
                // All VMs together on all nodes: one pool.
                1 => Goal::home(self.nodes.iter().copied().collect()),
                // Wide VMs are pooled on the first nodes, and small ones take the rest round robin.
                2 => {
                    let widest = self.nodes_min.iter().copied().max().unwrap_or(1);
                    let behind = count.saturating_sub(widest).max(1);
                    next += 1;
                    match *least {
                        1 => Goal::home(NodeSet::one(self.nodes[count - 1 - next % behind])),
                        _ => Goal::home(self.nodes[..widest].iter().copied().collect()),
                    }
                }
                // Only memory is spread: interleaved, moved by use, or both.
                3..=5 => self.spread(SPREADS[number - 3]),
                _ => self.goal(vm, chance),
            };
            schedule.decide(Ns::ZERO, vm, goal);
        }
        schedule
    }

    /// Number of systematic starts.
    pub(super) const STARTS: usize = 6;

    fn spread(&self, policy: &str) -> Goal {
        Goal {
            place: Place::Memory(self.nodes.iter().copied().collect()),
            memory: policy.parse().ok(),
        }
    }

    /// Draws a place for a VM.
    fn goal(&self, vm: usize, chance: &mut Chance) -> Goal {
        let (least, count) = (self.nodes_min[vm], self.nodes.len());
        let draw = chance.unit();
        if draw < 0.2 {
            return Goal::default();
        }
        if draw < 0.28 {
            let policy =
                ["round-4k", "round-4k+carrefour", "first-touch+carrefour"][chance.below(3) as usize];
            return self.spread(policy);
        }
        let size = match chance.unit() {
            draw if draw < 0.6 => least,
            draw if draw < 0.8 => least + 1,
            draw if draw < 0.9 => count.div_ceil(2),
            _ => count,
        };
        let home = self.connected(size.clamp(least, count), chance);
        let memory =
            (home.len() > 1 && chance.unit() < 0.2).then(|| SPREADS[chance.below(2) as usize].parse().ok());
        Goal {
            place: Place::Home(home),
            memory: memory.flatten(),
        }
    }

    /// Returns every place worth trying for one VM while the others stay: unplaced; each node, or random sets of as many
    /// nodes as it needs; a set with one node more; all nodes; memory spread; and the homes of other VMs that have several
    /// nodes.
    pub(super) fn all_for(&self, vm: usize, schedule: &Schedule, at: Ns, chance: &mut Chance) -> Vec<Goal> {
        let (least, count) = (self.nodes_min[vm], self.nodes.len());
        let mut goals = vec![Goal::default()];
        if least == 1 {
            goals.extend(self.nodes.iter().map(|node| Goal::home(NodeSet::one(*node))));
        } else {
            goals.extend((0..SETS_MAX).map(|_| Goal::home(self.connected(least, chance))));
        }
        if least < count {
            goals.push(Goal::home(self.connected(least + 1, chance)));
        }
        goals.push(Goal::home(self.nodes.iter().copied().collect()));
        goals.extend(SPREADS.map(|policy| self.spread(policy)));
        let others = (0..self.nodes_min.len()).filter(|other| *other != vm);
        let pools = others.map(|other| schedule.goal(other, at));
        goals.extend(pools.filter(|goal| matches!(&goal.place, Place::Home(home) if home.len() > 1)));
        goals.sort();
        goals.dedup();
        goals
    }

    /// Draws a connected set of `size` nodes: each is adjacent to another one, if the machine allows.
    fn connected(&self, size: usize, chance: &mut Chance) -> NodeSet {
        let mut home = NodeSet::one(self.nodes[chance.below(self.nodes.len() as u64) as usize]);
        while home.len() < size {
            let others: Vec<NodeId> = self
                .nodes
                .iter()
                .copied()
                .filter(|node| !home.contains(*node))
                .collect();
            let near = |node: &NodeId| home.iter().any(|other| self.machine.adjacent(other, *node));
            let near: Vec<NodeId> = others.iter().copied().filter(near).collect();
            let among = if near.is_empty() { &others } else { &near };
            home.insert(among[chance.below(among.len() as u64) as usize]);
        }
        home
    }

    /// Returns a schedule that differs from this one from a time on.
    pub(super) fn change(&self, schedule: &Schedule, at: Ns, chance: &mut Chance) -> Schedule {
        let mut changed = schedule.clone();
        let count = self.nodes_min.len() as u64;
        let vm = chance.below(count) as usize;
        let other = chance.below(count) as usize;
        let (goal, others) = (schedule.goal(vm, at), schedule.goal(other, at));
        match chance.unit() {
            // Move the VM elsewhere.
            draw if draw < 0.5 => changed.decide(at, vm, self.goal(vm, chance)),
            // Swap places.
            draw if draw < 0.65 && vm != other => {
                changed.decide(at, vm, others);
                changed.decide(at, other, goal);
            }
            // Move the VM to the other VM's place.
            draw if draw < 0.73 && vm != other => changed.decide(at, vm, others),
            // Pool both VMs.
            draw if draw < 0.83 && vm != other => {
                if let (Place::Home(one), Place::Home(two)) = (&goal.place, &others.place) {
                    let pool: NodeSet = one.iter().chain(two.iter()).collect();
                    changed.decide(at, vm, Goal::home(pool.clone()));
                    changed.decide(at, other, Goal::home(pool));
                } else {
                    changed.decide(at, vm, self.goal(vm, chance));
                }
            }
            // Add or remove a node.
            draw if draw < 0.93 => match &goal.place {
                Place::Home(home) if home.len() < self.nodes.len() => {
                    let mut home = home.clone();
                    let node = self.nodes[chance.below(self.nodes.len() as u64) as usize];
                    if home.contains(node) && home.len() > 1 {
                        home.remove(node);
                    } else {
                        home.insert(node);
                    }
                    changed.decide(
                        at,
                        vm,
                        Goal {
                            place: Place::Home(home),
                            ..goal
                        },
                    );
                }
                _ => changed.decide(at, vm, self.goal(vm, chance)),
            },
            // Draw all VMs again, or leave all unplaced.
            draw => {
                for vm in 0..self.nodes_min.len() {
                    let goal = if draw < 0.96 {
                        Goal::default()
                    } else {
                        self.goal(vm, chance)
                    };
                    changed.decide(at, vm, goal);
                }
            }
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use homenode_machine_files::preset;
    use homenode_twin::VmSpec;
    use homenode_units::Bytes;

    use super::*;

    #[test]
    fn wide_vms_get_nodes_enough_and_every_kind_of_place_is_tried() {
        let machine = preset("amd48").unwrap();
        let vm = |name: &str, vcpus| VmSpec::new(name, vcpus, Bytes::from_gib(2), "cg.B");
        let scenario = Scenario::of("two", vec![vm("wide", 14), vm("small", 4)]);
        let choices = Choices::new(&machine, &scenario);
        let mut chance = Chance::labelled(1, "test", 0);
        let (mut kinds, mut schedule) = ([0; 4], Schedule::default());
        for number in 0..300 {
            let start = choices.start(number % 10, &mut chance);
            schedule = choices.change(&schedule, Ns::from_secs(number as u64), &mut chance);
            for goal in [0, 1].map(|vm| start.goal(vm, Ns::ZERO)) {
                let kind = match &goal.place {
                    Place::Home(home) if home.len() > 1 => 0,
                    Place::Home(_) => 1,
                    Place::Memory(_) => 2,
                    Place::Unplaced => 3,
                };
                kinds[kind] += 1;
            }
            if let Place::Home(home) = &start.goal(0, Ns::ZERO).place {
                assert!(home.len() >= 3, "{home}");
            }
        }
        assert!(kinds.iter().all(|kind| *kind > 5), "{kinds:?}");
        assert!(schedule.changes().len() > 2);
    }
}
