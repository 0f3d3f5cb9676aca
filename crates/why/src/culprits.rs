//! Finds the culprit of a cause: another user of the same resource whose demand grew, or the program that changed the VM itself.

use homenode_units::Ns;

use crate::facts::{Change, Facts, Of, OfOther, Step};
use crate::{Code, Culprit, DECIDED_BEFORE, Figure, Happening};

/// Growth of less than this share of the total use is insignificant.
const GROWN_MIN: f64 = 0.02;
/// A change may have caused a slowdown that began up to this many steps later, since steps are coarse.
const CHANGE_NEAR: u64 = 3;

/// A cause whose culprit is sought.
pub(crate) struct Look<'a> {
    pub facts: &'a Facts,
    pub base: &'a Step,
    pub slow: &'a Step,
    /// When the VM became slow.
    pub since: Ns,
    pub happenings: &'a [Happening],
}

impl Look<'_> {
    /// Returns the exact cause and its culprit. Throttling by a quota may turn out to be by a permit.
    pub(crate) fn blame(&self, code: Code) -> (Code, Culprit) {
        let culprit = match code {
            Code::Waiting => self.changed(Change::Pins).filter(|_| self.is_narrower()),
            Code::Quota => return self.quota(),
            Code::RemoteMemory => self
                .changed(Change::Pins)
                .or_else(|| self.changed(Change::Pages))
                .or(Some(Culprit::Unknown)),
            Code::PageMoves => self.changed(Change::Pages).or(Some(Culprit::Unknown)),
            Code::Balloon => self.changed(Change::Memory).or(Some(Culprit::Itself)),
            Code::Clock => Some(Culprit::Unknown),
            Code::OwnPhase | Code::Permit => Some(Culprit::Itself),
            Code::LlcPollution | Code::SmtSibling | Code::Controller | Code::Link => None,
        };
        (code, culprit.unwrap_or_else(|| self.most_grown(code)))
    }

    fn quota(&self) -> (Code, Culprit) {
        let by = self.changed(Change::Quota).unwrap_or(Culprit::Unknown);
        let is_permit = |Happening { record, .. }: &Happening| {
            record.was_carried_out()
                && record.vm == Some(self.facts.vm)
                && record.policy.as_deref() == Some("permits")
                && self.is_near(record.at)
        };
        let by_permit = self.happenings.iter().any(is_permit);
        if self.facts.has_permit && (by_permit || matches!(by, Culprit::Agent { .. })) {
            return (Code::Permit, Culprit::Itself);
        }
        (Code::Quota, by)
    }

    fn is_narrower(&self) -> bool {
        self.slow.get(Of::Allowed) < self.base.get(Of::Allowed) - 0.5
    }

    fn is_near(&self, at: Ns) -> bool {
        let step = self.step();
        at.0.saturating_add(CHANGE_NEAR.saturating_mul(step.0)) >= self.since.0 && at.0 <= self.slow.at.0
    }

    /// Returns the length of a step.
    fn step(&self) -> Ns {
        self.facts.steps.last().map_or(Ns(0), |step| step.lasted)
    }

    /// Returns the culprit that made a change of this kind when the VM became slow, or `None` if there was no such change.
    fn changed(&self, change: Change) -> Option<Culprit> {
        let when = self
            .facts
            .changes
            .iter()
            .filter(|(at, what)| *what == change && self.is_near(*at));
        let (at, _) = when.min_by_key(|(at, _)| *at)?;
        let acts: &[&str] = match change {
            Change::Pins => &["pin-vcpus", "set-home", "lift"],
            Change::Quota | Change::Memory => &["limit", "lift"],
            Change::Pages => &["move-pages", "move-virtual-node", "move-frames"],
        };
        let earliest = at.saturating_sub(Ns(DECIDED_BEFORE.0.saturating_add(self.step().0)));
        let decided = self.happenings.iter().find(|Happening { record, .. }| {
            let action = record.action.as_deref();
            record.was_carried_out()
                && record.vm == Some(self.facts.vm)
                && action.is_some_and(|action| acts.contains(&action))
                && (earliest..=*at).contains(&record.at)
        });
        Some(decided.map_or(Culprit::Somebody, |happening| Culprit::Agent {
            decision: happening.id,
        }))
    }

    /// Returns the user of the same resource whose demand grew most.
    fn most_grown(&self, code: Code) -> Culprit {
        let others = 0..self.facts.others.len();
        let most = others
            .map(|other| (other, self.growth(code, other)))
            .max_by(|a, b| a.1.total_cmp(&b.1));
        let outside = self.growth_outside(code);
        let own = self.growth_own(code);
        let least = GROWN_MIN * self.used(code);
        match most {
            Some((other, growth)) if growth > least && growth >= outside && growth >= own => {
                let (id, name) = &self.facts.others[other];
                Culprit::Vm {
                    id: *id,
                    name: name.clone(),
                }
            }
            _ if outside > least && outside >= own => Culprit::Host,
            _ if own > least => Culprit::Itself,
            _ => Culprit::Unknown,
        }
    }

    fn growth(&self, code: Code, other: usize) -> f64 {
        let grew = |of: OfOther| self.slow.of_other(other, of) - self.base.of_other(other, of);
        match code {
            Code::Waiting => grew(OfOther::Ran),
            Code::SmtSibling => grew(OfOther::Beside),
            // Growth in references counts, not growth in misses, since victims miss more, too.
            Code::LlcPollution => grew(OfOther::References) * self.slow.miss_ratio_of(other),
            _ => self
                .weights(code)
                .iter()
                .zip(
                    self.slow
                        .traffic_of(other)
                        .iter()
                        .zip(self.base.traffic_of(other)),
                )
                .map(|(weight, (now, before))| weight * (now - before))
                .sum(),
        }
    }

    fn growth_outside(&self, code: Code) -> f64 {
        let grew = |of: Of| self.slow.get(of) - self.base.get(of);
        match code {
            Code::Waiting => grew(Of::HostRan),
            Code::SmtSibling => grew(Of::HostBeside),
            Code::Controller => self
                .weights(code)
                .iter()
                .zip(self.slow.outside().iter().zip(self.base.outside()))
                .map(|(weight, (now, before))| weight * (now - before))
                .sum(),
            _ => 0.0,
        }
    }

    fn growth_own(&self, code: Code) -> f64 {
        match code {
            Code::Waiting => self.slow.get(Of::Wanted) - self.base.get(Of::Wanted),
            Code::Controller | Code::Link => self
                .weights(code)
                .iter()
                .zip(self.slow.own_traffic().iter().zip(self.base.own_traffic()))
                .map(|(weight, (now, before))| weight * (now - before))
                .sum(),
            _ => 0.0,
        }
    }

    /// Returns how much of the resource is used, in the unit in which growth is measured.
    fn used(&self, code: Code) -> f64 {
        match code {
            Code::Waiting | Code::SmtSibling => self.slow.get(Of::Wanted),
            Code::LlcPollution => self.slow.get(Of::Misses),
            _ => self.slow.own_traffic().iter().sum::<f64>() / 10.0,
        }
    }

    /// Returns the cost to the VM of a byte to each node, then over each link.
    fn weights(&self, code: Code) -> Vec<f64> {
        let (nodes, links) = (self.slow.node_use(), self.slow.link_use());
        let none = |of: &[f64]| vec![0.0; of.len()];
        // Only a resource that became busier makes its users wait more.
        let hotter = |now: &[f64], before: &[f64]| -> Vec<f64> {
            let grew = |(now, before): (&f64, &f64)| (now - before).max(0.0);
            now.iter().zip(before).map(grew).collect()
        };
        match code {
            Code::Controller => {
                let hotter = hotter(nodes, self.base.node_use());
                let own = hotter.iter().zip(self.slow.accesses()).map(|(a, b)| a * b);
                own.chain(none(links)).collect()
            }
            _ => {
                let own = &self.slow.own_traffic()[nodes.len()..];
                let all: f64 = own.iter().sum();
                let hotter = hotter(links, self.base.link_use());
                let of_links = hotter.iter().zip(own).map(|(a, b)| a * b / all.max(1.0));
                none(nodes).into_iter().chain(of_links).collect()
            }
        }
    }
}

/// Returns the figures that show a cause.
pub(crate) fn figures(code: Code, base: &Step, slow: &Step) -> Vec<Figure> {
    let of = |what: &'static str, figure: &dyn Fn(&Step) -> f64| Figure {
        what,
        before: figure(base),
        during: figure(slow),
    };
    let percent_of_wanted = |of: Of| move |step: &Step| 100.0 * step.get(of) / step.get(Of::Wanted).max(1e-9);
    let per_kilo = |of: Of| move |step: &Step| 1000.0 * step.get(of) / step.get(Of::Instructions).max(1.0);
    let miss_ratio = |step: &Step| 100.0 * step.get(Of::Misses) / step.get(Of::References).max(1.0);
    let busiest = |shares: &[f64], weights: &[f64]| {
        let used = shares.iter().zip(weights).filter(|(_, weight)| **weight > 0.05);
        100.0 * used.map(|(share, _)| *share).fold(0.0, f64::max)
    };
    let cycles = |step: &Step| step.get(Of::Ran) * 1e9 / step.get(Of::Instructions).max(1.0);
    match code {
        Code::Waiting => vec![
            of(
                "time waiting for a CPU, percent of the CPU time that it wanted",
                &percent_of_wanted(Of::Waited),
            ),
            of("CPUs that it may run on", &|step| step.get(Of::Allowed)),
        ],
        Code::Quota | Code::Permit => vec![of(
            "time throttled, percent of the CPU time that it wanted",
            &percent_of_wanted(Of::Throttled),
        )],
        Code::RemoteMemory => vec![of("local accesses, percent", &|step| 100.0 * step.get(Of::Local))],
        Code::LlcPollution => vec![
            of("LLC misses, percent of references", &miss_ratio),
            of("LLC references per 1000 instructions", &per_kilo(Of::References)),
        ],
        Code::Controller => vec![of(
            "use of its busiest memory controller, percent of the bandwidth",
            &|step| busiest(step.node_use(), step.accesses()),
        )],
        Code::Link => vec![of("use of its busiest link, percent of the bandwidth", &|step| {
            let own = &step.own_traffic()[step.node_use().len()..];
            busiest(step.link_use(), own)
        })],
        Code::SmtSibling => vec![of("use of its sibling hyperthreads, percent", &|step| {
            100.0 * step.get(Of::Siblings)
        })],
        Code::PageMoves => vec![of("pages moved per second", &|step| step.get(Of::Moved))],
        Code::Balloon => vec![
            of("faults that needed a disk, per second", &|step| {
                step.get(Of::Faults)
            }),
            of("memory of the guest, MiB", &|step| {
                step.get(Of::Memory) / 1_048_576.0
            }),
        ],
        Code::Clock => vec![of("clock, GHz", &|step| {
            step.get(Of::Cycles) / step.get(Of::Ran).max(1e-9) / 1e9
        })],
        Code::OwnPhase => vec![
            of("nanoseconds per instruction", &cycles),
            of("LLC references per 1000 instructions", &per_kilo(Of::References)),
        ],
    }
}
