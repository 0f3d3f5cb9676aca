//! Estimates how many misses a core would have in flight. An emulator has no such core, so a rule decides.
//!
//! # Problem
//!
//! A profile needs the number of misses that wait at the same time. The emulator shows only the order of accesses, their
//! addresses, a count of instructions, and the contents of memory.
//!
//! # Approach
//!
//! The interval model (Karkhanis and Smith, ISCA 2004; Eyerman, Eeckhout, Karkhanis and Smith, TOCS 2009; both cited from
//! memory): misses in the same window of instructions overlap, unless the address of one comes from the data of another.
//!
//! 1. The core has a reorder buffer of a window's instructions, which retire in order. An access enters it once the
//!    access that many instructions before it is done. All accesses in the buffer are in flight together, unless 2 holds.
//! 2. An access waits for an earlier one whose data its address depends on. The plugin cannot see that. It treats an address as
//!    dependent if it is up to 4 KiB above a pointer in a line that missed: a word of 64 bits, or one of 32 bits, also times 8 as
//!    in Java's compressed pointers.
//! 3. A line that a stream prefetcher would have fetched (*foreseen*) starts when the prefetcher would have requested it. A
//!    machine file states its `prefetcher`: which steps within a page make a stream, and how far ahead it requests. Without it,
//!    Intel's L2 streamer: two steps of one or two lines, up to 20 lines (optimization manual, cited from memory). `amd48` has
//!    AMD's: one step of one line, two lines ahead. 32 pages are tracked.
//! 4. Only latencies take time; work between two misses takes none. The figure is misses over elapsed latencies.
//!
//! Misses to memory and hits in the LLC are two such models, and in each the other's accesses take no time. An LRU cache with one
//! core's share of the LLC decides which is which.
//!
//! # Limits
//!
//! Addresses computed from loaded indices count as independent, and so do pointers from lines that hit or were prefetched. A
//! pointer next to other data counts as a dependence. Stores count as loads, though they do not hold up retirement. Mispredicted
//! branches end a window in a real core, but not here, so the rule is too high for programs with unpredictable branches.
//! Prefetchers inside memory controllers, as AMD's, are left out.
//!
//! # Terms
//!
//! - *Window*: the instructions in the reorder buffer. They retire in order.
//! - *Latency*: the only unit of time. A core's work between two misses takes none.
//! - *Foreseen* access: the machine's stream prefetcher ([`Prefetcher`]) had already requested the line.
//! - `LEAST`, `RULE`, `MOST`: three clocks, kept at once. A miss that is not foreseen waits for the previous one (`LEAST`), for
//!   those whose data contain a pointer to it (`RULE`), or for none (`MOST`).
//!
//! # Properties (tests of the same names)
//!
//! - A pointer chase has one miss in flight by the rule.
//! - Independent misses fill the window.
//! - Several chases at once have as many in flight as there are chases.
//! - A stream is foreseen but for its first lines of a page.
//! - A stream has the line in use in flight, and those up to the farthest that the prefetcher requests.
//! - Bounds hold the rule between them, whatever is accessed.

use std::collections::VecDeque;

use homenode_formats::profile_log::Flights;
use homenode_tracking::filter::{Filter, Passed, Use};

/// Times under each of the three rules, in latencies.
type Clocks = [f64; 3];
const LEAST: usize = 0;
const RULE: usize = 1;
const MOST: usize = 2;

/// Index of the model for hits in the LLC; the other is for misses.
const HITS: usize = 0;
const MEMORY: usize = 1;

/// Reads the 64 bytes at an address of the program's memory; returns `None` if they cannot be read.
pub type Read = fn(u64) -> Option<[u64; 8]>;

/// Ways of the LLC that separates hits from misses.
const LLC_WAYS: usize = 16;
/// An address is taken to be derived from a pointer if it is up to this many bytes above the pointer's value.
const OBJECT_BYTES: u64 = 4096;

/// The accesses of one core that miss its private caches.
#[derive(Debug)]
pub struct Overlap {
    read: Read,
    line_bytes: u64,
    llc: Filter,
    streams: Streams,
    models: [Model; 2],
}

impl Overlap {
    /// Creates a core without accesses, with a window of this many instructions, an LLC of this size and a prefetcher.
    pub fn new(window: u64, llc_bytes: u64, line_bytes: u64, prefetcher: Prefetcher, read: Read) -> Overlap {
        Overlap {
            read,
            line_bytes,
            llc: Filter::new((llc_bytes / line_bytes) as usize, LLC_WAYS),
            streams: Streams::new(4096 / line_bytes, prefetcher),
            models: [Model::new(window), Model::new(window)],
        }
    }

    /// Records that this instruction, by its number, requests the line at an address.
    pub fn access(&mut self, instruction: u64, address: u64, wanted: Use) {
        let line = address / self.line_bytes;
        for model in &mut self.models {
            model.reach(instruction);
        }
        let clocks = [self.models[HITS].clocks, self.models[MEMORY].clocks];
        let foreseen = self.streams.access(line, clocks);
        let class = match self.llc.access(line, wanted) {
            Passed::Held => HITS,
            Passed::Missed { .. } => MEMORY,
        };
        let (read, at) = (self.read, line * self.line_bytes);
        self.models[class].access(instruction, address, foreseen.map(|clocks| clocks[class]), || {
            read(at)
        });
    }

    /// Returns the hits in the LLC so far, and how they overlap.
    pub fn hits(&self) -> Flights {
        self.models[HITS].flights()
    }

    /// Returns the misses of the LLC so far, and how they overlap.
    pub fn misses(&self) -> Flights {
        self.models[MEMORY].flights()
    }

    /// Resets the counts, but keeps the contents of the LLC.
    pub fn restart(&mut self) {
        for model in &mut self.models {
            *model = Model::new(model.window);
        }
        self.streams = Streams::new(self.streams.lines, self.streams.prefetcher);
    }
}

/// A line in flight.
#[derive(Debug)]
struct Flight {
    instruction: u64,
    done: Clocks,
    /// The line's contents; `None` if no later access can depend on them.
    words: Option<[u64; 8]>,
}

impl Flight {
    /// Returns true if an address may be derived from a pointer in the line.
    fn leads_to(&self, address: u64) -> bool {
        let near = |pointer: u64| pointer != 0 && address.wrapping_sub(pointer) < OBJECT_BYTES;
        self.words.is_some_and(|words| {
            words.iter().any(|word| {
                let (low, high) = (*word & 0xffff_ffff, *word >> 32);
                near(*word) || near(low) || near(high) || near(low * 8) || near(high * 8)
            })
        })
    }
}

/// The window, for accesses of one kind.
#[derive(Debug)]
struct Model {
    window: u64,
    clocks: Clocks,
    /// When the last access that was not foreseen is done, on the clock `LEAST`.
    before: f64,
    flights: VecDeque<Flight>,
    accesses: u64,
    foreseen: u64,
}

impl Model {
    fn new(window: u64) -> Model {
        Model {
            window,
            clocks: [0.0; 3],
            before: 0.0,
            flights: VecDeque::new(),
            accesses: 0,
            foreseen: 0,
        }
    }

    /// Moves an instruction into the window. The core has waited for all accesses older than the window.
    fn reach(&mut self, instruction: u64) {
        while let Some(first) = self.flights.front()
            && first.instruction + self.window <= instruction
        {
            for (clock, done) in self.clocks.iter_mut().zip(first.done) {
                *clock = clock.max(done);
            }
            self.flights.pop_front();
        }
    }

    fn access(
        &mut self,
        instruction: u64,
        address: u64,
        foreseen: Option<Clocks>,
        words: impl FnOnce() -> Option<[u64; 8]>,
    ) {
        self.accesses += 1;
        let mut starts = self.clocks;
        match foreseen {
            Some(issued) => {
                self.foreseen += 1;
                starts = issued;
            }
            None => {
                starts[LEAST] = starts[LEAST].max(self.before);
                for flight in self.flights.iter().filter(|flight| flight.leads_to(address)) {
                    starts[RULE] = starts[RULE].max(flight.done[RULE]);
                }
            }
        }
        let done = starts.map(|start| start + 1.0);
        if foreseen.is_none() {
            self.before = done[LEAST];
        }
        self.flights.push_back(Flight {
            instruction,
            done,
            words: if foreseen.is_none() { words() } else { None },
        });
    }

    fn flights(&self) -> Flights {
        let mut ends = self.clocks;
        for flight in &self.flights {
            for (end, done) in ends.iter_mut().zip(flight.done) {
                *end = end.max(done);
            }
        }
        Flights {
            accesses: self.accesses,
            foreseen: self.foreseen,
            latencies_least: ends[LEAST],
            latencies_rule: ends[RULE],
            latencies_most: ends[MOST],
        }
    }
}

/// Number of pages that the prefetcher tracks.
const PAGES: usize = 32;

/// The behaviour of a stream prefetcher: a machine file's `prefetcher`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefetcher {
    /// Steps in one direction that make a stream.
    pub steps: u32,
    /// Largest step of a stream, lines.
    pub step_lines: u64,
    /// Distance to the nearest line that an access of a stream requests, lines.
    pub nearest: i64,
    /// Distance to the farthest, lines.
    pub farthest: i64,
}

impl Prefetcher {
    /// Intel's L2 streamer (optimization manual, cited from memory), for machines that do not state theirs.
    pub const L2_STREAMER: Prefetcher = Prefetcher {
        steps: 2,
        step_lines: 2,
        nearest: 1,
        farthest: 20,
    };
}

/// The state of the stream prefetcher.
#[derive(Debug)]
struct Streams {
    prefetcher: Prefetcher,
    /// Lines per page.
    lines: u64,
    pages: Vec<Page>,
    now: u64,
}

/// A page in which there may be a stream.
#[derive(Debug)]
struct Page {
    number: u64,
    used: u64,
    last: i64,
    direction: i64,
    steps: u32,
    /// For each line, the times at which the prefetcher requested it, one set per model; `None` if it did not.
    asked: Vec<Option<[Clocks; 2]>>,
    /// Whether the prefetcher requested any line of the page.
    streamed: bool,
}

impl Streams {
    fn new(lines: u64, prefetcher: Prefetcher) -> Streams {
        Streams {
            prefetcher,
            lines,
            pages: Vec::new(),
            now: 0,
        }
    }

    /// Records a request for a line. If the prefetcher had requested it, returns when.
    fn access(&mut self, line: u64, clocks: [Clocks; 2]) -> Option<[Clocks; 2]> {
        let (number, at) = (line / self.lines, (line % self.lines).cast_signed());
        let prefetcher = self.prefetcher;
        self.now += 1;
        let page = self.page(number, at);
        let step = at - page.last;
        let foreseen = page.asked[at as usize].take();
        if step == 0 {
            return foreseen;
        }
        let near = step.unsigned_abs() <= prefetcher.step_lines;
        let same = step.signum() == page.direction;
        page.steps = match (near, same) {
            (true, true) => page.steps + 1,
            (true, false) => 1,
            (false, _) => 0,
        };
        (page.direction, page.last) = (step.signum(), at);
        if page.steps >= prefetcher.steps {
            page.streamed = true;
            for ahead in prefetcher.nearest..=prefetcher.farthest {
                let Some(asked) = usize::try_from(at + ahead * page.direction)
                    .ok()
                    .and_then(|next| page.asked.get_mut(next))
                else {
                    break;
                };
                asked.get_or_insert(clocks);
            }
        }
        foreseen
    }

    /// Returns the page with this number. If it is new, it may replace the least recently used one.
    fn page(&mut self, number: u64, at: i64) -> &mut Page {
        let found = self.pages.iter().position(|page| page.number == number);
        let found = found.unwrap_or_else(|| {
            let place = if self.pages.len() < PAGES {
                self.pages.push(Page {
                    number,
                    used: 0,
                    last: at,
                    direction: 0,
                    steps: 0,
                    asked: vec![None; self.lines as usize],
                    streamed: false,
                });
                self.pages.len() - 1
            } else {
                let used = |(_, page): &(usize, &Page)| page.used;
                let all = self.pages.iter().enumerate();
                all.min_by_key(used).map_or(0, |(place, _)| place)
            };
            let page = &mut self.pages[place];
            // Most pages never had a stream, so there is nothing to clear.
            if page.streamed {
                page.asked.fill(None);
            }
            (page.number, page.last, page.direction, page.steps) = (number, at, 0, 0);
            page.streamed = false;
            place
        });
        self.pages[found].used = self.now;
        &mut self.pages[found]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WINDOW: u64 = 128;
    /// Number of instructions from one access to the next.
    const EVERY: u64 = 4;

    /// Hashes a number (splitmix64).
    fn mix(of: u64) -> u64 {
        let a = of.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let a = (a ^ a >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let a = (a ^ a >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        a ^ a >> 31
    }

    /// Returns the address of the element that the element at this address points to: anywhere in 16 TiB.
    fn next(address: u64) -> u64 {
        (0x10_0000_0000 + mix(address) % (1 << 44)) & !63
    }

    /// Reads memory in which each line contains a pointer to the next element of a chase, after other data.
    fn of_pointers(address: u64) -> Option<[u64; 8]> {
        Some([7, mix(address) | 1 << 63, next(address), 0, 0, 0, 0, 0])
    }

    /// Reads memory that has no pointers.
    fn of_numbers(address: u64) -> Option<[u64; 8]> {
        Some([1.5_f64.to_bits() ^ address; 8])
    }

    fn after(read: Read, addresses: impl IntoIterator<Item = u64>) -> Overlap {
        let mut overlap = Overlap::new(WINDOW, 64 << 10, 64, Prefetcher::L2_STREAMER, read);
        for (at, address) in addresses.into_iter().enumerate() {
            overlap.access(at as u64 * EVERY, address, Use::Read);
        }
        overlap
    }

    fn chase(from: u64) -> impl Iterator<Item = u64> {
        std::iter::successors(Some(next(from)), |address| Some(next(*address)))
    }

    #[test]
    fn a_pointer_chase_has_one_miss_in_flight_by_the_rule() {
        let found = after(of_pointers, chase(1).take(10_000)).misses();
        assert_eq!(found.accesses, 10_000);
        assert!((found.least() - 1.0).abs() < 0.01, "{found:?}");
        assert!((found.rule() - 1.0).abs() < 0.01, "{found:?}");
        // If the data were ignored, the misses would look independent.
        assert!(found.most() > 31.0, "{found:?}");
    }

    #[test]
    fn fields_of_an_element_are_reached_through_its_pointer() {
        // Each element has two lines, 200 bytes apart. Both wait for the previous element, but not for each other.
        let fields = chase(1).take(5_000).flat_map(|element| [element, element + 200]);
        let found = after(of_pointers, fields).misses();
        assert!((found.rule() - 2.0).abs() < 0.01, "{found:?}");
    }

    #[test]
    fn independent_misses_fill_the_window() {
        let found = after(of_numbers, (0..10_000).map(next)).misses();
        let window = (WINDOW / EVERY) as f64;
        assert!((found.rule() - window).abs() < 0.3, "{found:?}");
        assert_eq!(found.rule(), found.most());
        assert!((found.least() - 1.0).abs() < 0.01, "{found:?}");
        // Misses more than a window apart do not overlap.
        let mut overlap = Overlap::new(WINDOW, 64 << 10, 64, Prefetcher::L2_STREAMER, of_numbers);
        (0..1000).for_each(|at| overlap.access(at * WINDOW, next(at), Use::Read));
        assert_eq!(overlap.misses().most(), 1.0);
    }

    #[test]
    fn several_chases_at_once_have_as_many_in_flight_as_there_are_chases() {
        for chases in [2, 5] {
            let mut heads: Vec<_> = (0..chases).map(chase).collect();
            let turns = (0..20_000).map(|at| heads[at % chases as usize].next().unwrap());
            let found = after(of_pointers, turns).misses();
            assert!((found.rule() - chases as f64).abs() < 0.05, "{chases}: {found:?}");
        }
    }

    #[test]
    fn a_stream_is_foreseen_but_for_its_first_lines_of_a_page() {
        // The lines are more than a window apart, so without a prefetcher they would not overlap.
        let mut overlap = Overlap::new(WINDOW, 64 << 10, 64, Prefetcher::L2_STREAMER, of_numbers);
        (0..64_000).for_each(|line| overlap.access(line * 200, line * 64, Use::Read));
        let found = overlap.misses();
        assert_eq!(found.foreseen, 64_000 / 64 * 61);
        assert!((8.0..=20.0).contains(&found.rule()), "{found:?}");
        // The prefetcher also recognizes streams that run backwards, but not random lines.
        let backwards = after(of_numbers, (0..6_400).rev().map(|line| line * 64)).misses();
        assert_eq!(backwards.foreseen, 100 * 61);
        assert_eq!(after(of_numbers, (0..10_000).map(next)).misses().foreseen, 0);
    }

    #[test]
    fn a_stream_has_the_line_in_use_in_flight_and_those_up_to_the_farthest() {
        // A stream within one page, more than a window apart; a few lines at its start are not foreseen.
        for ahead in [2, 3, 8] {
            let prefetcher = Prefetcher {
                steps: 1,
                step_lines: 1,
                nearest: ahead,
                farthest: ahead,
            };
            let mut overlap = Overlap::new(WINDOW, 64 << 10, 1, prefetcher, of_numbers);
            (0..4096).for_each(|line| overlap.access(line * 200, line, Use::Read));
            let found = overlap.misses();
            assert_eq!(found.foreseen, 4096 - 1 - ahead.unsigned_abs());
            assert!(
                (found.rule() / (ahead + 1) as f64 - 1.0).abs() < 0.03,
                "{ahead}: {found:?}"
            );
            // Lines with a gap between each two are no stream for the prefetcher.
            let mut overlap = Overlap::new(WINDOW, 64 << 10, 1, prefetcher, of_numbers);
            (0..2048).for_each(|line| overlap.access(line * 200, 2 * line, Use::Read));
            assert_eq!((overlap.misses().foreseen, overlap.misses().rule()), (0, 1.0));
        }
    }

    #[test]
    fn what_an_llc_holds_is_a_hit() {
        // Passes repeatedly over 512 lines, in an order that no prefetcher recognizes, with an LLC of 1024 lines.
        let found = after(of_numbers, (0..51_200).map(|at| (at % 512 * 193 % 512) * 64));
        assert_eq!(found.hits().accesses + found.misses().accesses, 51_200);
        assert_eq!(found.misses().accesses, 512);
    }

    proptest! {
        #[test]
        fn bounds_hold_the_rule_between_them(
            accesses in prop::collection::vec((1u64..60, 0u64..4000), 1..400),
            pointers in any::<bool>(),
        ) {
            let read = if pointers { |address| Some([(address * 7) % 256_000; 8]) } else { of_numbers };
            let mut overlap = Overlap::new(WINDOW, 16 << 10, 64, Prefetcher::L2_STREAMER, read);
            let mut instruction = 0;
            for (further, line) in &accesses {
                instruction += further;
                overlap.access(instruction, line * 64, Use::Read);
            }
            let (hits, misses) = (overlap.hits(), overlap.misses());
            prop_assert_eq!(hits.accesses + misses.accesses, accesses.len() as u64);
            for found in [hits, misses] {
                prop_assert!(found.latencies_least >= found.latencies_rule, "{:?}", found);
                prop_assert!(found.latencies_rule >= found.latencies_most, "{:?}", found);
                prop_assert!(found.foreseen <= found.accesses);
            }
        }
    }
}
