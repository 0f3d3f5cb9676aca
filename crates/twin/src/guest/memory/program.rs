//! The regions of a program: what its threads will touch, and which of them it uses as it runs.

use homenode_units::{Bytes, divide_proportionally};

use super::{Class, Part, Region, Touch, Touches, Users, VmMemory};
use crate::index::{IxVec, ThreadIx, first};
use crate::workload::{Program, RegionKind, RegionProfile, Threads};

impl VmMemory {
    /// Adds a program, which replaces an ended one. Returns what each thread will touch in it.
    pub(crate) fn add_program(&mut self, program: &Program) -> Touches {
        let kernel = self.regions.iter().flat_map(|region| &region.classes);
        let mut frames = kernel.map(|class| class.pages_planned).sum();
        let mut starts = IxVec::filled(Vec::new(), self.threads);
        self.windowed = program.regions.iter().any(|profile| profile.window.is_some());
        for profile in &program.regions {
            let users: Vec<Users> = match (profile.kind, program.threads) {
                (RegionKind::Private, Threads::Single) => vec![Users::One(ThreadIx(0))],
                (RegionKind::Private, _) => first(self.threads).map(Users::One).collect(),
                _ => vec![Users::All],
            };
            for number in 0..profile.window.map_or(1, |window| window.parts) {
                for user in &users {
                    let (classes, part) = profile.lay_out(number, &mut frames, self.nodes);
                    let region = Region {
                        users: *user,
                        owner: match user {
                            Users::One(thread) => Some(*thread),
                            _ => None,
                        },
                        access_share: if number == 0 { profile.access_share } else { 0.0 },
                        part,
                        classes,
                    };
                    self.add_region(region, profile.kind, program.threads, &mut starts);
                }
            }
        }
        starts
    }

    /// Adds a region of a program, and what each thread will touch in it.
    fn add_region(&mut self, region: Region, kind: RegionKind, threads: Threads, starts: &mut Touches) {
        let pages: u64 = region.classes.iter().map(|class| class.pages_planned).sum();
        let at = self.regions.len();
        match (region.users, kind) {
            (Users::One(thread), _) => starts[thread].push(Touch { region: at, pages }),
            (_, RegionKind::InitialisedByOne) => {
                starts[ThreadIx(0)].insert(0, Touch { region: at, pages });
            }
            _ => {
                let shares = vec![
                    1;
                    if threads == Threads::Single {
                        1
                    } else {
                        self.threads
                    }
                ];
                for (thread, pages) in first(self.threads).zip(divide_proportionally(pages, &shares)) {
                    starts[thread].push(Touch { region: at, pages });
                }
            }
        }
        self.regions.push(region);
    }

    /// Lets the program use those parts of its regions that it uses after `progress` of its run, by thread. A region of all
    /// threads follows thread 0.
    pub(crate) fn advance(&mut self, progress: impl Fn(ThreadIx) -> f64) {
        for region in &mut self.regions {
            let Some(part) = region.part else { continue };
            let in_use = part.window.part_at(progress(region.owner.unwrap_or(ThreadIx(0)))) == part.number;
            let share = if in_use { part.access_share } else { 0.0 };
            self.stale |= region.access_share != share;
            region.access_share = share;
        }
    }

    /// Whether the program uses some region part by part, so that [`VmMemory::advance`] has to be called as it runs.
    pub(crate) fn is_windowed(&self) -> bool {
        self.windowed
    }
}

impl RegionProfile {
    /// Creates the classes of a part of the region for one user, on the next guest frames. The whole is part 0.
    fn lay_out(&self, number: u16, frames: &mut u64, nodes: usize) -> (Vec<Class>, Option<Part>) {
        let mut class = |size, access_share| Class::new(size, access_share, frames, nodes);
        let share = |share: f64| Bytes((self.size.as_f64() * share) as u64);
        if let Some(window) = self.window {
            let part = Part {
                window,
                number,
                access_share: self.access_share,
            };
            return (vec![class(share(1.0 / f64::from(window.parts)), 1.0)], Some(part));
        }
        if self.heat.is_empty() {
            return (vec![class(self.size, 1.0)], None);
        }
        let classes = self
            .heat
            .iter()
            .map(|h| class(share(h.page_share), h.access_share));
        (classes.collect(), None)
    }
}
