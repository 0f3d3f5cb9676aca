//! Simulates threads, caches, controllers and links in time, access by access.
//!
//! # Model
//!
//! - A thread keeps a bounded number of misses in flight. It has that many *lanes*, each of which computes, uses a line, and
//!   after a miss waits for the line to arrive. Lanes share the thread's stream of lines. A lane computes for an exponentially
//!   distributed time with mean `ns_between` times the number of lanes; hence without misses the thread makes one access per
//!   `ns_between`.
//! - A miss goes to the controller of its page's node, and the data returns over each link of the route. Controllers and links
//!   serve lines in order of arrival, with a fixed service time. At each of them, a line takes the idle latency plus the time it
//!   waits.
//! - A share of missed lines is written back when the new line has arrived, asynchronously, over the links to the controller.
//!
//! Time is in whole picoseconds. Events at the same time are handled in the order in which they were created.
//!
//! # Left out
//!
//! Requests on links (only data is modelled, as in `homenode-twin`), DRAM banks and pages, directories.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::cache::{Cache, Outcome};
use crate::placement::Pages;
use crate::stream::Stream;
use homenode_units::Chance;

/// A memory controller or a directed link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Server {
    /// Latency of a line without queueing, nanoseconds.
    pub idle_ns: f64,
    /// Time to serve a line, nanoseconds: line size divided by bandwidth.
    pub service_ns: f64,
}

/// Controllers, links and the routes between them.
#[derive(Clone, Debug)]
pub struct Paths {
    /// The controllers, one per node.
    pub controllers: Vec<Server>,
    /// Directed links.
    pub links: Vec<Server>,
    /// Links that data takes from one node to another, at index `from * nodes + to`.
    pub routes: Vec<Vec<usize>>,
}

/// A thread.
#[derive(Clone, Debug)]
pub struct Thread {
    /// The node of the thread's CPU.
    pub node: usize,
    /// Index of the thread's cache; `None` if all its accesses miss.
    pub cache: Option<usize>,
    /// The stream of lines that the thread uses.
    pub stream: Stream,
    /// Nanoseconds of its own work between two accesses.
    pub ns_between: f64,
    /// Most misses that the thread can have in flight, at least 1.
    pub in_flight: usize,
    /// Share of missed lines that are written back.
    pub write_share: f64,
}

/// The results of a thread.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Done {
    /// Accesses.
    pub accesses: u64,
    /// Completed misses.
    pub misses: u64,
    /// Sum of the latencies of these misses, nanoseconds.
    pub latency_ns: f64,
    /// Misses by the node of the page.
    pub by_node: Vec<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A lane of a thread uses its next line.
    Use {
        lane: u32,
    },
    /// A line has reached the next stop on its way.
    Fetch {
        lane: u32,
        hop: u32,
    },
    WriteBack {
        node: u32,
        home: u32,
        hop: u32,
    },
}

/// A miss in flight.
#[derive(Clone, Copy, Debug, Default)]
struct Lane {
    thread: usize,
    home: usize,
    since_ps: u64,
}

#[derive(Clone, Copy, Debug)]
struct Queue {
    idle_ps: u64,
    service_ps: u64,
    free_ps: u64,
}

impl Queue {
    fn new(server: &Server) -> Queue {
        Queue {
            idle_ps: ps(server.idle_ns),
            service_ps: ps(server.service_ns),
            free_ps: 0,
        }
    }

    /// Serves a line that arrives now; returns the time at which it leaves.
    fn pass(&mut self, now_ps: u64) -> u64 {
        let start = now_ps.max(self.free_ps);
        self.free_ps = start + self.service_ps;
        start + self.idle_ps
    }
}

fn ps(ns: f64) -> u64 {
    (ns * 1000.0) as u64
}

/// The simulated machine.
#[derive(Clone, Debug)]
pub struct Simulator {
    controllers: Vec<Queue>,
    links: Vec<Queue>,
    routes: Vec<Vec<usize>>,
    caches: Vec<Cache>,
    pages: Pages,
    lines_per_page: u64,
    threads: Vec<Thread>,
    lanes: Vec<Lane>,
    done: Vec<Done>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    made: u64,
    now_ps: u64,
    chance: Chance,
}

impl Simulator {
    /// Creates a machine at time 0. Thread `i` is stream `i` of its cache.
    pub fn new(
        paths: &Paths,
        caches: Vec<Cache>,
        pages: Pages,
        lines_per_page: u64,
        threads: Vec<Thread>,
        seed: u64,
    ) -> Simulator {
        let lane = |thread: usize| Lane {
            thread,
            ..Lane::default()
        };
        let lanes: Vec<Lane> = threads
            .iter()
            .enumerate()
            .flat_map(|(at, thread)| std::iter::repeat_n(lane(at), thread.in_flight.max(1)))
            .collect();
        let done = Done {
            by_node: vec![0; paths.controllers.len()],
            ..Done::default()
        };
        let mut simulator = Simulator {
            controllers: paths.controllers.iter().map(Queue::new).collect(),
            links: paths.links.iter().map(Queue::new).collect(),
            routes: paths.routes.clone(),
            caches,
            pages,
            lines_per_page,
            done: vec![done; threads.len()],
            events: BinaryHeap::with_capacity(4 * lanes.len()),
            threads,
            lanes,
            made: 0,
            now_ps: 0,
            chance: Chance::new(seed),
        };
        for lane in 0..simulator.lanes.len() {
            simulator.compute(lane);
        }
        simulator
    }

    /// Returns a thread's results so far.
    pub fn done(&self, thread: usize) -> &Done {
        &self.done[thread]
    }

    /// Returns the pages that were used so far.
    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Resets the results, but keeps the state: accesses so far were warm-up.
    pub fn restart(&mut self) {
        for done in &mut self.done {
            let mut by_node = std::mem::take(&mut done.by_node);
            by_node.fill(0);
            *done = Done {
                by_node,
                ..Done::default()
            };
        }
    }

    /// Simulates this many nanoseconds.
    pub fn run_for(&mut self, ns: f64) {
        let end = self.now_ps + ps(ns);
        while let Some(Reverse((at, ..))) = self.events.peek().copied() {
            if at >= end {
                break;
            }
            let Some(Reverse((at, _, event))) = self.events.pop() else {
                break;
            };
            self.now_ps = at;
            self.handle(event);
        }
        self.now_ps = end;
    }

    fn at(&mut self, ps: u64, event: Event) {
        self.made += 1;
        self.events.push(Reverse((ps, self.made, event)));
    }

    /// Lets a lane compute, and then use its next line.
    fn compute(&mut self, lane: usize) {
        let thread = &self.threads[self.lanes[lane].thread];
        let mean = thread.ns_between * thread.in_flight.max(1) as f64;
        let after = ps(self.chance.exponential(mean));
        self.at(self.now_ps + after, Event::Use { lane: lane as u32 });
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Use { lane } => self.use_line(lane as usize),
            Event::Fetch { lane, hop } => self.fetch(lane as usize, hop),
            Event::WriteBack { node, home, hop } => self.write_back(node, home, hop),
        }
    }

    fn use_line(&mut self, lane: usize) {
        let at = self.lanes[lane].thread;
        let thread = &mut self.threads[at];
        let line = thread.stream.next_line();
        self.done[at].accesses += 1;
        let home = self.pages.home(line / self.lines_per_page, thread.node);
        let hit = thread
            .cache
            .is_some_and(|cache| self.caches[cache].access(at, line) == Outcome::Hit);
        if hit {
            self.compute(lane);
            return;
        }
        self.lanes[lane].home = home;
        self.lanes[lane].since_ps = self.now_ps;
        let out = self.controllers[home].pass(self.now_ps);
        self.at(
            out,
            Event::Fetch {
                lane: lane as u32,
                hop: 0,
            },
        );
    }

    /// Moves a lane's line on, after it has left the controller (hop 0) or a link.
    fn fetch(&mut self, lane: usize, hop: u32) {
        let Lane {
            thread: at,
            home,
            since_ps,
        } = self.lanes[lane];
        let node = self.threads[at].node;
        let route = &self.routes[home * self.controllers.len() + node];
        if let Some(link) = route.get(hop as usize) {
            let out = self.links[*link].pass(self.now_ps);
            let lane = lane as u32;
            self.at(out, Event::Fetch { lane, hop: hop + 1 });
            return;
        }
        let done = &mut self.done[at];
        done.misses += 1;
        done.by_node[home] += 1;
        done.latency_ns += (self.now_ps - since_ps) as f64 / 1000.0;
        if self.threads[at].write_share > 0.0 && self.chance.unit() < self.threads[at].write_share {
            self.write_back(node as u32, home as u32, 0);
        }
        self.compute(lane);
    }

    fn write_back(&mut self, node: u32, home: u32, hop: u32) {
        let route = &self.routes[node as usize * self.controllers.len() + home as usize];
        if let Some(link) = route.get(hop as usize) {
            let out = self.links[*link].pass(self.now_ps);
            let hop = hop + 1;
            self.at(out, Event::WriteBack { node, home, hop });
        } else {
            self.controllers[home as usize].pass(self.now_ps);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::Placement;
    use crate::stream::Pattern;

    fn run(in_flight: usize, threads: usize, ns_between: f64) -> Simulator {
        let paths = Paths {
            controllers: vec![Server {
                idle_ns: 100.0,
                service_ns: 5.0,
            }],
            links: vec![],
            routes: vec![vec![]],
        };
        let thread = |at: usize| Thread {
            node: 0,
            cache: None,
            stream: Stream::new(&Pattern::Sequential, (at as u64) << 45, 1),
            ns_between,
            in_flight,
            write_share: 0.0,
        };
        let threads = (0..threads).map(thread).collect();
        let mut simulator = Simulator::new(
            &paths,
            vec![],
            Pages::new(Placement::FirstTouch, 1),
            64,
            threads,
            1,
        );
        simulator.run_for(100_000.0);
        simulator.restart();
        simulator.run_for(1_000_000.0);
        simulator
    }

    #[test]
    fn one_miss_at_a_time_takes_work_plus_latency() {
        // A miss takes 20 ns of work and 100 ns of memory, so a millisecond has 1e6 / 120 = 8333 misses.
        let simulator = run(1, 1, 20.0);
        let misses = simulator.done(0).misses as f64;
        assert!((misses - 8333.0).abs() < 100.0, "{misses}");
    }

    #[test]
    fn in_a_full_system_littles_law_holds() {
        // Four threads keep ten misses in flight each, at a controller that serves a line in 5 ns. It serves 200,000 lines, and
        // each line waits for all others: 40 * 5 ns = latency + work of a lane.
        let simulator = run(10, 4, 0.1);
        let misses: u64 = (0..4).map(|thread| simulator.done(thread).misses).sum();
        let latency = (0..4)
            .map(|thread| simulator.done(thread).latency_ns)
            .sum::<f64>()
            / misses as f64;
        assert!((misses as f64 - 200_000.0).abs() < 200.0, "{misses}");
        assert!((latency + 1.0 - 200.0).abs() < 1.0, "{latency}");
    }
}
