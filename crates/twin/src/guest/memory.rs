//! A VM's memory as a population: for each region and heat class, the number of pages on each node.
//!
//! # Model
//!
//! A page appears on the node that guest and hypervisor choose at first touch ([`crate::hypervisor::memory`]). From then on it is
//! only part of a count. All pages of a class are alike: a thread's accesses to the class are spread over nodes as the pages are.
//! A move draws pages evenly, without replacement (hypergeometric), from all pages of the VM on the nodes to leave.
//!
//! A class has consecutive guest frames, in the order of touch; a program's frames are above 4 GiB if they fit there. If pages
//! are dealt out in turn, a class of one page is therefore on one node, and one of nine pages on eight nodes is uneven, as on a
//! real host.
//!
//! A VM whose memory was allocated at creation has a *free list*: pages that are on a node but that no region has touched.
//!
//! A balloon draws its pages in the same way from those that the guest can spare: all but its kernel's and, while a program runs,
//! all but that program's.
//!
//! A region that the program uses part by part ([`crate::workload::Window`]) is a region for each part, of which one has accesses
//! at a time.
//!
//! # Left out
//!
//! The identity of pages: a policy that picks single pages (Carrefour) picks a number of pages of a class. Memory that one thread
//! frees and another allocates; memory that one program leaves and the next allocates. A part comes into use at the end of the
//! epoch in which the program reaches it.

mod frames;
mod hands;
mod program;
mod scattered;
mod swap;

pub(crate) use scattered::Scattered;

use homenode_units::{Bytes, Chance, divide_proportionally};

use super::view::{By, Told, View};
use crate::hardware::fabric::Target;
use crate::hypervisor::turns::{Turns, WhenFull};
use crate::index::{IxVec, ThreadIx};
use crate::workload::{Program, Window};

/// The threads that use a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Users {
    /// The guest's kernel, which touches the region at boot and hardly uses it later.
    Kernel,
    One(ThreadIx),
    All,
    /// No thread: the thread that used the region now uses another thread's.
    Nobody,
}

/// What a guest needs memory for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needs {
    /// Only the guest's kernel.
    Kernel,
    /// The guest's kernel and its program.
    Program,
}

/// Pages that are used in the same way.
#[derive(Clone, Debug)]
struct Class {
    /// Guest frame of the class's first page.
    first_frame: u64,
    pages_planned: u64,
    access_share: f64,
    /// Pages in the guest's swap.
    swapped: u64,
    /// Number of pages on each node.
    on: Vec<u64>,
}

impl Class {
    /// Creates a class that takes the next guest frames.
    fn new(size: Bytes, access_share: f64, frames: &mut u64, nodes: usize) -> Class {
        let first_frame = *frames;
        *frames += size.to_pages().0;
        Class {
            first_frame,
            pages_planned: size.to_pages().0,
            access_share,
            swapped: 0,
            on: vec![0; nodes],
        }
    }

    fn touched(&self) -> u64 {
        self.on.iter().sum()
    }
}

#[derive(Clone, Debug)]
struct Region {
    users: Users,
    /// The thread that owns the region or did, if it was ever private.
    owner: Option<ThreadIx>,
    /// Share of a user's accesses that go to the region now.
    access_share: f64,
    /// The part of a profile's region that this is, if the program passes over that region part by part.
    part: Option<Part>,
    classes: Vec<Class>,
}

/// A part of a region that a program uses part by part.
#[derive(Clone, Copy, Debug)]
struct Part {
    window: Window,
    number: u16,
    /// Share of a user's accesses that go to the part while it is in use.
    access_share: f64,
}

impl Region {
    fn touched(&self) -> u64 {
        self.classes.iter().map(Class::touched).sum()
    }

    fn is_needed(&self, needs: Needs) -> bool {
        needs == Needs::Program || self.users == Users::Kernel
    }
}

/// How a class of pages is used, and where it is.
#[derive(Clone, Debug)]
pub(crate) struct ClassUse {
    pub first_frame: u64,
    users: Users,
    /// Share of a user's accesses that go to the class.
    pub share: f64,
    /// Number of pages on each node.
    pub on: Vec<u64>,
}

impl ClassUse {
    pub(crate) fn used_by(&self, thread: ThreadIx) -> bool {
        match self.users {
            Users::Kernel | Users::Nobody => false,
            Users::One(owner) => owner == thread,
            Users::All => true,
        }
    }

    pub(crate) fn pages(&self) -> u64 {
        self.on.iter().sum()
    }
}

/// A number of pages of one region that a thread has to touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Touch {
    pub region: usize,
    pub pages: u64,
}

/// Regions that each thread touches, in order.
pub(crate) type Touches = IxVec<ThreadIx, Vec<Touch>>;

/// The location of one VM's memory.
#[derive(Clone, Debug)]
pub(crate) struct VmMemory {
    nodes: usize,
    regions: Vec<Region>,
    /// Access weights by `thread * nodes + node`. Each thread's row adds up to 1 once any page is touched.
    weights: Vec<f64>,
    /// The nodes with a weight above 0.
    targets: IxVec<ThreadIx, Vec<Target>>,
    threads: usize,
    stale: bool,
    /// The guest's view of nodes.
    pub view: View,
    /// Turn of each node, if pages are dealt out according to their guest frame.
    pub turns: Option<Turns>,
    /// Where the host puts a page if its node is full.
    pub when_full: WhenFull,
    /// Number of pages on each node that the host has given the VM and no region has touched.
    pub free_list: Vec<u64>,
    /// Whether the VM was given pages before they were touched, at creation or through its balloon. Programs then take their
    /// pages from those.
    pub owns_frames: bool,
    /// Number of pages on each node that only the VM's I/O uses, if it has a pool of them.
    pub pool: Option<Vec<u64>>,
    /// Pages in the guest's swap, of all classes.
    swapped: u64,
    /// Number of pages exchanged since the weights were last computed.
    exchanged: u64,
    /// Home nodes, once set.
    pub home: Option<Vec<usize>>,
    /// Home node at which interleaving continues.
    pub next_home: usize,
    /// Share of the program's pages that were touched before.
    pub scattered: Scattered,
    /// Whether the program uses some region part by part.
    windowed: bool,
}

impl VmMemory {
    /// Creates the memory of a VM that has touched no page. Returns it, and what each thread will touch at boot and then in its
    /// program.
    pub(crate) fn new(
        nodes: usize,
        vcpus: usize,
        boot: Bytes,
        program: Option<&Program>,
        view: View,
    ) -> (VmMemory, Touches, Touches) {
        let kernel = Region {
            users: Users::Kernel,
            owner: None,
            access_share: 0.0,
            part: None,
            classes: vec![Class::new(boot, 1.0, &mut 0, nodes)],
        };
        let mut memory = VmMemory {
            nodes,
            regions: vec![kernel],
            weights: vec![0.0; vcpus * nodes],
            targets: IxVec::filled(Vec::new(), vcpus),
            threads: vcpus,
            stale: true,
            view,
            turns: None,
            when_full: WhenFull::default(),
            free_list: vec![0; nodes],
            owns_frames: false,
            pool: None,
            swapped: 0,
            exchanged: 0,
            home: None,
            next_home: 0,
            scattered: Scattered::default(),
            windowed: false,
        };
        // vCPU 0 boots the kernel. Every other vCPU touches its own per-CPU data.
        let boot_shares: Vec<u64> = (0..vcpus)
            .map(|at| if at == 0 { 15 + vcpus as u64 } else { 1 })
            .collect();
        let boot_pages = divide_proportionally(boot.to_pages().0, &boot_shares);
        let boots = boot_pages
            .into_iter()
            .map(|pages| vec![Touch { region: 0, pages }])
            .collect();
        let starts = match program {
            Some(program) => memory.add_program(program),
            None => IxVec::filled(Vec::new(), vcpus),
        };
        (memory, boots, starts)
    }

    /// Gives the program's pages the guest frames from `frame` on, if the VM has enough frames. Linux allocates memory above 4
    /// GiB first.
    pub(crate) fn lie_from(&mut self, frame: u64, frames: u64) {
        let kernel = self.regions[0]
            .classes
            .iter()
            .map(|class| class.pages_planned)
            .sum::<u64>();
        let needed = self.needed(Needs::Program) - kernel;
        if frame < kernel || frame + needed > frames {
            return;
        }
        let of_program = self
            .regions
            .iter_mut()
            .filter(|region| region.users != Users::Kernel);
        for class in of_program.flat_map(|region| &mut region.classes) {
            class.first_frame += frame - kernel;
        }
    }

    /// Returns the number of pages that the guest has touched and that are not in swap.
    pub(crate) fn touched(&self) -> u64 {
        self.regions.iter().map(Region::touched).sum()
    }

    /// Distributes newly touched pages of a region over its classes: evenly, because threads touch parts of each class.
    pub(crate) fn by_class(&self, region: usize, pages: u64) -> Vec<u64> {
        let room: Vec<u64> = self.regions[region]
            .classes
            .iter()
            .map(|c| c.pages_planned - c.present())
            .collect();
        debug_assert!(
            pages <= room.iter().sum(),
            "more pages touched than the region has"
        );
        divide_proportionally(pages, &room)
    }

    /// Returns the guest frame of the next page of a class.
    pub(crate) fn next_frame(&self, region: usize, class: usize) -> u64 {
        let class = &self.regions[region].classes[class];
        class.first_frame + class.present()
    }

    /// Adds pages of a class that were touched for the first time and placed on a node.
    pub(crate) fn touch(&mut self, region: usize, class: usize, node: usize, pages: u64) {
        self.regions[region].classes[class].on[node] += pages;
        self.stale = true;
    }

    /// Returns the number of classes of the program's regions.
    pub(crate) fn classes(&self) -> usize {
        self.program_classes().count()
    }

    /// Returns the classes of the program, in order of guest frames, each with its region.
    fn program_classes(&self) -> impl Iterator<Item = (&Region, &Class)> {
        let of_program = self.regions.iter().filter(|region| region.users != Users::Kernel);
        of_program.flat_map(|region| region.classes.iter().map(move |class| (region, class)))
    }

    /// Returns every class of the program as [`ClassUse`], in order of guest frames.
    pub(crate) fn class_uses(&self) -> Vec<ClassUse> {
        let class_use = |(region, class): (&Region, &Class)| ClassUse {
            first_frame: class.first_frame,
            users: region.users,
            share: region.access_share * class.access_share,
            on: class.on.clone(),
        };
        self.program_classes().map(class_use).collect()
    }

    /// Moves pages of a class on behalf of a kernel. `class` is its position among the program's classes.
    pub(crate) fn move_class(&mut self, by: By, class: usize, from: usize, to: usize, pages: u64) {
        let of_program = self
            .regions
            .iter_mut()
            .filter(|region| region.users != Users::Kernel);
        let mut classes = of_program.flat_map(|region| &mut region.classes);
        let class = classes.nth(class).expect("numbered by class_uses");
        class.on[from] -= pages;
        class.on[to] += pages;
        match by {
            By::Guest if self.owns_frames => {
                self.free_list[from] += pages;
                self.free_list[to] -= pages;
            }
            By::Guest => self.view.moved(from, to, pages),
            By::Host => {}
        }
        self.stale = true;
    }

    /// Whether a kernel moves pages only among the guest's own frames, without taking any from the host.
    pub(crate) fn keeps_frames(&self, by: By) -> bool {
        by == By::Guest && self.owns_frames
    }

    /// Whether the guest knows the node of each of its frames.
    pub(crate) fn finds_frames(&self) -> bool {
        matches!(
            self.view,
            View::Truth
                | View::Virtual {
                    told: Told::Always,
                    ..
                }
        )
    }

    /// Whether a kernel may move pages by itself. It may not if pages are bound to nodes, or if it believes that each page is on
    /// the node that it requested.
    pub(crate) fn movable_by(&self, by: By) -> bool {
        match by {
            By::Guest if self.owns_frames => self.turns.is_none() && self.finds_frames(),
            By::Guest => self.turns.is_none() && (self.view != View::Truth || self.home.is_none()),
            By::Host => self.home.is_none(),
        }
    }

    /// Returns how many free pages a kernel finds on a node. `free` is the host's number of free pages there.
    pub(crate) fn room_for(&self, by: By, node: usize, free: u64) -> u64 {
        match by {
            By::Guest if self.owns_frames => self.free_list[node],
            By::Guest => free.min(self.view.room(node)),
            By::Host => free,
        }
    }

    /// Returns the number of pages on each node, over all regions, the free list and the pool.
    pub(crate) fn pages(&self) -> Vec<u64> {
        let mut sum = vec![0; self.nodes];
        self.count_pages(&mut sum);
        sum
    }

    /// Counts the pages on each node into `sum`.
    pub(crate) fn count_pages(&self, sum: &mut [u64]) {
        sum.copy_from_slice(&self.free_list);
        for (sum, pages) in sum.iter_mut().zip(self.pool.iter().flatten()) {
            *sum += pages;
        }
        for class in self.regions.iter().flat_map(|region| &region.classes) {
            for (sum, on) in sum.iter_mut().zip(&class.on) {
                *sum += on;
            }
        }
    }

    /// Returns the share of a thread's memory accesses that go to each node. The shares are equal if no page is touched yet.
    pub(crate) fn weights(&self, thread: ThreadIx) -> &[f64] {
        &self.weights[thread.0 * self.nodes..(thread.0 + 1) * self.nodes]
    }

    /// Returns the nodes that a thread's memory accesses go to.
    pub(crate) fn targets(&self, thread: ThreadIx) -> &[Target] {
        &self.targets[thread]
    }

    /// Returns the share of a thread's accesses that go to memory which all threads use.
    pub(crate) fn shared_share(&self, thread: ThreadIx) -> f64 {
        let mine = self
            .regions
            .iter()
            .filter(|r| r.users == Users::One(thread) || r.users == Users::All);
        let (all, shared) = mine.fold((0.0, 0.0), |(all, shared), region| {
            let also = if region.users == Users::All {
                region.access_share
            } else {
                0.0
            };
            (all + region.access_share, shared + also)
        });
        if all > 0.0 { shared / all } else { 0.0 }
    }

    /// Whether pages were touched or moved since the weights were last computed.
    pub(crate) fn stale(&self) -> bool {
        self.stale
    }

    /// Brings the weights up to date.
    pub(crate) fn refresh(&mut self) {
        self.weigh();
        if std::mem::take(&mut self.stale) {
            self.exchanged = 0;
        }
    }

    /// Brings the weights up to date within an epoch. They still count as stale at its end.
    pub(crate) fn weigh(&mut self) {
        if !self.stale {
            return;
        }
        let (nodes, even) = (self.nodes, 1.0 / self.nodes as f64);
        self.weights.fill(0.0);
        for region in &self.regions {
            let users = match region.users {
                Users::All => 0..self.threads,
                Users::One(thread) => thread.0..thread.0 + 1,
                Users::Kernel | Users::Nobody => continue,
            };
            for class in &region.classes {
                let touched = class.touched();
                if touched == 0 {
                    continue;
                }
                let per_page = region.access_share * class.access_share / touched as f64;
                for row in self.weights[users.start * nodes..users.end * nodes].chunks_mut(nodes) {
                    for (weight, on) in row.iter_mut().zip(&class.on) {
                        *weight += per_page * *on as f64;
                    }
                }
            }
        }
        for (row, targets) in self.weights.chunks_mut(nodes).zip(&mut self.targets) {
            let sum: f64 = row.iter().sum();
            row.iter_mut()
                .for_each(|weight| *weight = if sum > 0.0 { *weight / sum } else { even });
            targets.clear();
            targets.extend(Target::all(row));
        }
    }

    /// Moves up to `pages` pages from the nodes `leave` to the nodes `to`. The pages are drawn evenly from all pages on `leave`.
    /// `room` is the number of free pages of each node and is reduced as they are used. Returns (from, to, pages) for what moved.
    pub(crate) fn migrate(
        &mut self,
        leave: &[usize],
        to: &[usize],
        pages: u64,
        room: &mut [u64],
        chance: &mut Chance,
    ) -> Vec<(usize, usize, u64)> {
        let on: Vec<u64> = self.pages();
        let mut rest: u64 = leave.iter().map(|node| on[*node]).sum();
        let fits: u64 = to.iter().map(|node| room[*node]).sum();
        let mut draws = pages.min(rest).min(fits);
        let mut moved = Vec::new();
        let classes = self.regions.iter_mut().flat_map(|region| &mut region.classes);
        let apart = std::iter::once(&mut self.free_list).chain(&mut self.pool);
        for on in apart.chain(classes.map(|class| &mut class.on)) {
            for &from in leave {
                let here = on[from];
                if here == 0 || draws == 0 {
                    continue;
                }
                let drawn = chance.hypergeometric(rest, here, draws);
                rest -= here;
                draws -= drawn;
                for (node, part) in spread(drawn, to, &mut self.next_home, room) {
                    on[from] -= part;
                    on[node] += part;
                    moved.push((from, node, part));
                }
            }
        }
        self.stale |= !moved.is_empty();
        moved
    }

    /// Moves up to `pages` pages from `from` to `to` on behalf of the host, all of the class that guest frame `frame` belongs to.
    /// Returns how many moved: 0 if no class of the guest's has that frame.
    pub(crate) fn move_alike(&mut self, frame: u64, from: usize, to: usize, pages: u64) -> u64 {
        let mut classes = self.regions.iter_mut().flat_map(|region| &mut region.classes);
        let class = classes
            .find(|class| (class.first_frame..class.first_frame + class.pages_planned).contains(&frame));
        let Some(class) = class else { return 0 };
        let moved = pages.min(class.on[from]);
        class.on[from] -= moved;
        class.on[to] += moved;
        self.stale |= moved > 0;
        moved
    }

    /// Returns how many pages the guest cannot spare, whether they are touched or not.
    pub(crate) fn needed(&self, needs: Needs) -> u64 {
        let needed = self.regions.iter().filter(|region| region.is_needed(needs));
        needed
            .flat_map(|region| &region.classes)
            .map(|class| class.pages_planned)
            .sum()
    }

    /// Releases up to `pages` pages: first free pages, except as many as the guest will need, then pages drawn evenly from all
    /// that the guest can spare. Returns the number of pages taken from each node.
    pub(crate) fn give_back(&mut self, pages: u64, needs: Needs, chance: &mut Chance) -> Vec<u64> {
        let needed = self.regions.iter().filter(|region| region.is_needed(needs));
        let present: u64 = needed
            .flat_map(|region| &region.classes)
            .map(Class::present)
            .sum();
        self.take_spare(pages, self.needed(needs) - present, needs, chance)
    }

    /// Releases pages like [`VmMemory::give_back`], but spares no free pages.
    pub(crate) fn give_back_all(&mut self, pages: u64, needs: Needs, chance: &mut Chance) -> Vec<u64> {
        self.take_spare(pages, 0, needs, chance)
    }

    fn take_spare(&mut self, pages: u64, kept: u64, needs: Needs, chance: &mut Chance) -> Vec<u64> {
        let mut taken = vec![0; self.nodes];
        let mut free: u64 = self.free_list.iter().sum();
        let mut draws = pages.min(free.saturating_sub(kept));
        let left = pages - draws;
        draw_evenly(&mut self.free_list, &mut free, &mut draws, &mut taken, chance);
        let mut spare: Vec<&mut Region> = self
            .regions
            .iter_mut()
            .filter(|region| !region.is_needed(needs))
            .collect();
        let mut rest: u64 = spare.iter().map(|region| region.touched()).sum();
        let mut draws = left.min(rest);
        for class in spare.iter_mut().flat_map(|region| &mut region.classes) {
            draw_evenly(&mut class.on, &mut rest, &mut draws, &mut taken, chance);
        }
        self.stale |= pages > 0;
        taken
    }

    /// Panics if a class has more pages than were planned for it.
    pub(crate) fn check(&self) {
        for class in self.regions.iter().flat_map(|region| &region.classes) {
            assert!(
                class.present() <= class.pages_planned,
                "a class has more pages than were planned: {class:?}"
            );
        }
    }
}

/// Takes a population's part of an even draw off its nodes. `draws` pages are still to be drawn from `rest` pages; both are
/// reduced by this population's part.
fn draw_evenly(on: &mut [u64], rest: &mut u64, draws: &mut u64, taken: &mut [u64], chance: &mut Chance) {
    for (on, taken) in on.iter_mut().zip(taken) {
        let drawn = chance.hypergeometric(*rest, *on, *draws);
        *rest -= *on;
        *draws -= drawn;
        *on -= drawn;
        *taken += drawn;
    }
}

/// Deals pages out evenly over nodes as far as each has room, and reduces the room. `next` remembers whose turn it is, because
/// otherwise all single pages would go to the first node. Deals fewer pages than requested only if all rooms are used up.
pub(crate) fn spread(pages: u64, nodes: &[usize], next: &mut usize, room: &mut [u64]) -> Vec<(usize, u64)> {
    let mut dealt = Vec::new();
    let mut left = pages.min(nodes.iter().map(|node| room[*node]).sum());
    while left > 0 {
        let turn: Vec<usize> = (0..nodes.len())
            .map(|at| nodes[(at + *next) % nodes.len()])
            .collect();
        *next = (*next + left as usize) % nodes.len();
        let open: Vec<u64> = turn.iter().map(|node| u64::from(room[*node] > 0)).collect();
        for (node, part) in turn.into_iter().zip(divide_proportionally(left, &open)) {
            let part = part.min(room[node]);
            if part > 0 {
                room[node] -= part;
                left -= part;
                dealt.push((node, part));
            }
        }
    }
    dealt
}

#[cfg(test)]
mod tests;
