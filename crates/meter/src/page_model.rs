//! Models what a hypervisor would log about the pages that a guest uses: TLBs, walks and PML or PRL, applied to the accesses of
//! an emulated machine. Also keeps the exact set of used pages.
//!
//! # An access
//!
//! ```text
//!   page used last in its TLB set? ──yes──▶ done: nothing would change
//!        │ no
//!   translation known since the guest last changed one? ──no──▶ ask the emulator for the frame
//!        │
//!   mark the frame ──▶ TLBs ──hit──▶ done
//!                        │ miss, or first write
//!                       walk, flags and log (homenode_tracking::paging) ──full──▶ counts of the window
//! ```
//!
//! # Why that is exact
//!
//! - *The first step.* The page used last is the youngest of its set, so using it again does not change the LRU order, and the
//!   second level is not consulted. The step knows the kind of the last access: a write after a read continues to the second
//!   step. (`what_is_in_front_changes_nothing`)
//! - *The second step.* A processor may use a cached translation until the guest executes, on that processor, an instruction that
//!   drops it; a guest that relies on a changed table executes one. The caller sees these instructions, and calls
//!   [`Cpu::translations_changed`] or [`Cpu::space_changed`] before the next access. The emulator's own TLB obeys the same
//!   instructions, so it would have given the same answer.
//! - *Windows.* At its first access in a window, each vCPU forgets which frames it marked, so each frame is marked again.
//!
//! # What is modelled instead of observed
//!
//! - *The guest's page tables.* The emulator walks them internally, and does not report what it reads. Therefore trees of four
//!   levels with small pages are built here from the translations, in frames beyond the guest's. If the guest uses larger pages,
//!   a walk here reads one table too many, but the log is right: with nested tables of 4 KiB, which logging needs, a TLB caches
//!   larger guest pages in pieces of 4 KiB as well.
//! - *Address spaces.* The emulated CPU has no PCID, so a write to CR3 drops the lower half of addresses; the upper half is the
//!   kernel's, and global. The page that INVLPG names is not known, so its entry stays unless the page has moved.
//! - *The handler of full buffers* runs immediately, so only the frame that finds a buffer full is lost.
//! - *Instruction fetches* cause no walks. Their pages are marked if the caller reports them.
//! - *Accesses by devices* to memory are invisible, as on hardware.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use homenode_tracking::paging::{Buffer, Exit, Flags, Guest, Mode, Options, Step, Vcpu};
use homenode_tracking::tlb::{Access, Core, Found, PageSize, Space};

use homenode_formats::page_log::{Header, Kept, Logs, Marks, Row, Tables, Window};

/// The settings of a page model.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The core whose TLBs each vCPU gets.
    pub core: &'static Core,
    /// The events that are logged.
    pub mode: Mode,
    /// Options for the points that the paper leaves open for PRL.
    pub options: Options,
    /// Number of entries of a vCPU's buffer.
    pub entries: u16,
    /// Whether TLBs are flushed after each window.
    pub flush: bool,
    /// Whether a window contains all used frames, rather than only the logged ones.
    pub exact: bool,
    /// Number of guest frames.
    pub frames: u64,
}

/// Number of frames for modelled page tables. They can map 256 GiB of used addresses.
const TABLE_FRAMES: u64 = 1 << 17;
/// Mask of page numbers that four levels of tables can distinguish.
const PAGE_MASK: u64 = (1 << 36) - 1;
/// First page number of the upper half.
const UPPER: u64 = 1 << 35;
const PAGE_SHIFT: u32 = 12;
/// Number of translations that a vCPU remembers.
const KNOWN: usize = 8192;
/// A number that no page has.
const NOWHERE: u64 = u64::MAX;

/// Counts gathered in a window, mostly of entries taken out of buffers.
#[derive(Default)]
struct Gathered {
    counts: Vec<u32>,
    walks: u64,
    logged: u64,
    lost: u64,
    filled: u64,
    outside: u64,
}

/// The modelled guest, shared by its vCPUs.
pub struct Machine {
    config: Config,
    guest: Mutex<Guest>,
    /// Number of the current window. Its parity selects one of two sets of marks and counts.
    window: AtomicU32,
    marks: [Vec<AtomicU8>; 2],
    gathered: [Mutex<Gathered>; 2],
    /// For each vCPU, the latest window that it has noticed.
    noticed: Mutex<Vec<&'static AtomicU32>>,
}

/// Locks a mutex, poisoned or not: a panic cannot leave the data half updated.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Machine {
    /// Creates a machine without vCPUs.
    pub fn new(config: Config) -> Machine {
        let all = (config.frames + TABLE_FRAMES) as usize;
        let marks = || (0..config.frames).map(|_| AtomicU8::new(0)).collect();
        let gathered = || {
            let counts = vec![0; if config.mode == Mode::Off { 0 } else { all }];
            Mutex::new(Gathered {
                counts,
                ..Gathered::default()
            })
        };
        let guest = Guest::new(all as u64, TABLE_FRAMES, PageSize::Small, Flags::Kept);
        Machine {
            config,
            guest: Mutex::new(guest),
            window: AtomicU32::new(0),
            marks: [marks(), marks()],
            gathered: [gathered(), gathered()],
            noticed: Mutex::default(),
        }
    }

    /// Adds a vCPU, which is never removed. Returns `None` if table frames run out, after thousands of vCPUs.
    pub fn cpu(&self) -> Option<Cpu> {
        let (lower, upper) = {
            let tables = &mut lock(&self.guest).tables;
            (tables.space().ok()?, tables.space().ok()?)
        };
        let log = Buffer::new(self.config.mode, self.config.entries, self.config.options);
        let vcpu = Vcpu::new(self.config.core, log);
        let window = self.window.load(Ordering::Acquire);
        let noticed: &'static AtomicU32 = Box::leak(Box::new(AtomicU32::new(window)));
        lock(&self.noticed).push(noticed);
        Some(Cpu {
            last: vec![NOWHERE; vcpu.tlb().first_sets()],
            known: vec![Known::default(); KNOWN],
            generation: 1,
            window,
            noticed,
            vcpu,
            spaces: [lower, upper],
            outside: 0,
            handed: [0; 3],
        })
    }

    /// Returns a header for the machine's log.
    pub fn header(&self, vcpus: u32, fetches: bool, begun_unix_ns: u64, begun_ns: u64) -> Header {
        use homenode_tracking::paging::TablePages::{Each, Silent, Walked};
        let config = &self.config;
        let reach = Vcpu::new(config.core, Buffer::new(Mode::Off, 2, config.options))
            .tlb()
            .reach(PageSize::Small);
        Header {
            logs: match config.mode {
                Mode::Off => Logs::Nothing,
                Mode::Pml => Logs::Writes,
                Mode::Paml => Logs::Walks,
            },
            tables: match config.options.tables {
                Silent => Tables::Silent,
                Walked => Tables::Walked,
                Each => Tables::Each,
            },
            exact: config.exact,
            fetches,
            flush: config.flush,
            core: config.core.name.to_owned(),
            frames: config.frames,
            table_frames: TABLE_FRAMES,
            vcpus,
            blind: reach * u64::from(vcpus),
            begun_unix_ns,
            begun_ns,
            entries: config.entries.into(),
            kept: Kept::ALL,
        }
    }

    /// Marks that a frame was used.
    #[inline]
    fn mark(&self, window: u32, frame: u64, marks: u8) {
        let mark = &self.marks[window as usize & 1][frame as usize];
        if mark.load(Ordering::Relaxed) & marks != marks {
            mark.fetch_or(marks, Ordering::Relaxed);
        }
    }

    /// Marks a frame from which instructions were executed since the last call. The mark belongs to the window that
    /// [`Machine::take`] returns next.
    pub fn fetched(&self, frame: u64, marks: u8) {
        if frame < self.config.frames {
            self.mark(self.window.load(Ordering::Relaxed).wrapping_sub(1), frame, marks);
        }
    }

    /// Begins a new window. The caller takes the previous window once all active vCPUs have noticed the new one
    /// ([`Machine::is_settled`]). A vCPU that has not noticed it by then is idle, and keeps the contents of its buffer.
    pub fn turn(&self) {
        self.window.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns true if all vCPUs have noticed the new window.
    pub fn is_settled(&self) -> bool {
        let window = self.window.load(Ordering::Relaxed);
        lock(&self.noticed)
            .iter()
            .all(|noticed| noticed.load(Ordering::Acquire) == window)
    }

    /// Returns the contents of the previous window. The caller sets number, times and label.
    pub fn take(&self) -> Window {
        let at = self.window.load(Ordering::Relaxed).wrapping_sub(1) as usize & 1;
        let mut gathered = lock(&self.gathered[at]);
        let (now, next) = (&self.marks[at], &self.marks[1 - at]);
        let mut rows = Vec::new();
        let used = now
            .iter()
            .zip(next)
            .enumerate()
            .filter_map(|(frame, (mark, next))| {
                let marks = Marks(mark.swap(0, Ordering::Relaxed));
                if marks.0 & Marks::PROGRAM != 0 {
                    next.fetch_or(Marks::BEFORE, Ordering::Relaxed);
                }
                (marks.0 != 0).then_some((frame, marks))
            });
        if self.config.mode == Mode::Off {
            rows.extend(used.filter(|(_, marks)| marks.used()).map(|(frame, marks)| Row {
                frame: frame as u32,
                count: 0,
                marks,
            }));
        } else {
            let mut marks = vec![Marks(0); self.config.frames as usize];
            used.for_each(|(frame, of)| marks[frame] = of);
            for (frame, count) in gathered.counts.iter_mut().enumerate() {
                let count = std::mem::take(count);
                let marks = marks.get(frame).copied().unwrap_or_default();
                if count > 0 || (self.config.exact && marks.used()) {
                    rows.push(Row {
                        frame: frame as u32,
                        count: count.min(Row::COUNT_MAX),
                        marks,
                    });
                }
            }
        }
        Window {
            walks: std::mem::take(&mut gathered.walks),
            logged: std::mem::take(&mut gathered.logged),
            lost: std::mem::take(&mut gathered.lost),
            filled: std::mem::take(&mut gathered.filled),
            outside: std::mem::take(&mut gathered.outside),
            rows,
            ..Window::default()
        }
    }
}

/// A translation that a vCPU remembers.
#[derive(Clone, Copy, Debug)]
struct Known {
    page: u64,
    generation: u32,
    frame: u32,
    /// The window to which `marked` refers.
    window: u32,
    marked: u8,
}

impl Default for Known {
    fn default() -> Known {
        Known {
            page: NOWHERE,
            generation: 0,
            frame: 0,
            window: 0,
            marked: 0,
        }
    }
}

/// A vCPU. It belongs to the thread that runs it.
pub struct Cpu {
    /// For each set of the first-level TLB, the page used last times two, plus 1 if the last access was a write.
    last: Vec<u64>,
    known: Vec<Known>,
    generation: u32,
    window: u32,
    noticed: &'static AtomicU32,
    vcpu: Vcpu,
    /// The address spaces of the lower and the upper half.
    spaces: [Space; 2],
    outside: u64,
    /// Counts of walks, lost frames and filled buffers at the last hand-over.
    handed: [u64; 3],
}

impl Cpu {
    /// Records an access to a virtual address, on the thread that runs this vCPU. `frame` looks up the guest frame; it returns
    /// `None` for a device register.
    #[inline(always)]
    pub fn access(
        &mut self,
        machine: &Machine,
        address: u64,
        access: Access,
        frame: impl FnOnce() -> Option<u64>,
    ) {
        let page = address >> PAGE_SHIFT & PAGE_MASK;
        let write = u64::from(access == Access::Write);
        let last = self.last[page as usize & (self.last.len() - 1)];
        // After any access to a page, a read of it can stop here; a write only after a write.
        if last ^ (page << 1 | 1) <= 1 ^ write && self.window == machine.window.load(Ordering::Relaxed) {
            return;
        }
        self.access_slowly(machine, page, access, frame);
    }

    fn access_slowly(
        &mut self,
        machine: &Machine,
        page: u64,
        access: Access,
        frame: impl FnOnce() -> Option<u64>,
    ) {
        let window = machine.window.load(Ordering::Acquire);
        if self.window != window {
            self.enter(machine, window);
        }
        let upper = page >= UPPER;
        self.vcpu.switch(self.spaces[usize::from(upper)]);
        let at = page as usize % KNOWN;
        if self.known[at].page != page || self.known[at].generation != self.generation {
            let Some(frame) = frame() else {
                return;
            };
            if !self.learn(machine, page, frame) {
                return;
            }
        }
        let wanted = match (access, upper) {
            (Access::Read, false) => Marks::USED,
            (Access::Write, false) => Marks::USED | Marks::WRITTEN,
            (Access::Read, true) => Marks::KERNEL_USED,
            (Access::Write, true) => Marks::KERNEL_USED | Marks::KERNEL_WRITTEN,
        };
        let known = &mut self.known[at];
        if known.window != window {
            (known.window, known.marked) = (window, 0);
        }
        if known.marked & wanted != wanted {
            known.marked |= wanted;
            machine.mark(window, known.frame.into(), wanted);
        }
        if machine.config.mode != Mode::Off {
            match self.vcpu.look_up(page, access) {
                Found::First | Found::Second => {}
                missing => self.walk(machine, page, access, missing),
            }
        }
        let sets = self.last.len();
        self.last[page as usize & (sets - 1)] = page << 1 | u64::from(access == Access::Write);
    }

    /// Remembers a translation; returns false if the guest has no such frame.
    #[cold]
    fn learn(&mut self, machine: &Machine, page: u64, frame: u64) -> bool {
        if frame >= machine.config.frames {
            self.outside += 1;
            return false;
        }
        if machine.config.mode != Mode::Off {
            let tables = &mut lock(&machine.guest).tables;
            let space = self.spaces[usize::from(page >= UPPER)];
            let before = tables.look_up(space, page).map(|mapped| mapped.frame);
            if before != Some(frame) {
                if before.is_some() {
                    self.vcpu.drop_page(page);
                }
                if tables.map(space, page, frame, PageSize::Small).is_err() {
                    self.outside += 1;
                    return false;
                }
            }
        }
        self.known[page as usize % KNOWN] = Known {
            page,
            generation: self.generation,
            frame: frame as u32,
            window: self.window,
            marked: 0,
        };
        true
    }

    fn walk(&mut self, machine: &Machine, page: u64, access: Access, mut found: Found) {
        loop {
            let step = self.vcpu.walk(&mut lock(&machine.guest), page, access, found);
            match step {
                Step::Hit | Step::Walked => return,
                Step::Raised => return self.empty(machine),
                Step::Exit(Exit::LogFull) => self.empty(machine),
                // Every page is mapped before its walk, and rights are never removed, so this does not happen.
                Step::Exit(Exit::Unmapped | Exit::Violation { .. }) => return self.outside += 1,
            }
            found = self.vcpu.look_up(page, access);
        }
    }

    /// Acts as the handler of full buffers.
    fn empty(&mut self, machine: &Machine) {
        let mut gathered = lock(&machine.gathered[self.window as usize & 1]);
        for frame in self.vcpu.log.contents() {
            gathered.counts[frame as usize] += 1;
            gathered.logged += 1;
        }
        self.vcpu.log.reset();
        self.vcpu.log.refresh();
    }

    /// Ends this vCPU's part of its window, and enters another window.
    #[cold]
    fn enter(&mut self, machine: &Machine, window: u32) {
        self.hand_over(machine);
        if machine.config.flush {
            self.vcpu.flush();
        }
        self.window = window;
        self.last.fill(NOWHERE);
        self.noticed.store(window, Ordering::Release);
    }

    /// Hands over the last window. May be called on any thread once no vCPU runs any more.
    pub fn end(&mut self, machine: &Machine) {
        self.window = machine.window.load(Ordering::Acquire);
        self.hand_over(machine);
    }

    /// Hands over the counts of the current window; with PML also the contents of the buffer, as every exit does.
    fn hand_over(&mut self, machine: &Machine) {
        if machine.config.mode == Mode::Pml {
            self.empty(machine);
        }
        let mut gathered = lock(&machine.gathered[self.window as usize & 1]);
        let (walks, (_, lost, filled)) = (self.vcpu.counts().walks, self.vcpu.log.counts());
        let [walks_before, lost_before, filled_before] =
            std::mem::replace(&mut self.handed, [walks, lost, filled]);
        gathered.walks += walks - walks_before;
        gathered.lost += lost - lost_before;
        gathered.filled += filled - filled_before;
        gathered.outside += std::mem::take(&mut self.outside);
    }

    /// Tells that the guest executes an instruction after which translations may change: INVLPG, a write to CR0 or CR4 …
    pub fn translations_changed(&mut self) {
        self.last.fill(NOWHERE);
        self.generation = self.generation.wrapping_add(1);
        if self.generation == 0 {
            // After a wrap-around, translations from 2^32 changes ago must not become valid again.
            self.known.fill(Known::default());
            self.generation = 1;
        }
    }

    /// Tells that the guest writes CR3, which switches to another address space. Entries of the TLBs have no tags for address
    /// spaces.
    pub fn space_changed(&mut self) {
        self.translations_changed();
        self.vcpu.switch(self.spaces[0]);
        self.vcpu.drop_space();
    }

    /// Tells that the guest also drops global translations.
    pub fn all_changed(&mut self) {
        self.space_changed();
        self.vcpu.switch(self.spaces[1]);
        self.vcpu.drop_space();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_tracking::tlb::core;
    use proptest::prelude::*;

    const FRAMES: u64 = 4096;

    fn config(name: &str, mode: Mode) -> Config {
        Config {
            core: core(name).expect("a core of the list"),
            mode,
            options: Options::PUBLISHED,
            entries: 8,
            flush: false,
            exact: true,
            frames: FRAMES,
        }
    }

    /// Something that the guest does.
    #[derive(Clone, Debug)]
    enum Act {
        Access {
            page: u64,
            upper: bool,
            write: bool,
        },
        /// The guest moves a page, and invalidates its translation.
        Move {
            page: u64,
            frame: u64,
        },
        Space,
        Window,
    }

    fn acts() -> impl Strategy<Value = Vec<Act>> {
        let access = (0_u64..160, any::<bool>(), any::<bool>());
        let act = prop_oneof![
            200 => access.prop_map(|(page, upper, write)| Act::Access { page, upper, write }),
            // Repeated use of a few pages takes the fast path.
            200 => (0_u64..6, any::<bool>()).prop_map(|(page, write)| Act::Access { page, upper: false, write }),
            2 => (0_u64..160, 0..FRAMES).prop_map(|(page, frame)| Act::Move { page, frame }),
            1 => Just(Act::Space),
            1 => Just(Act::Window),
        ];
        prop::collection::vec(act, 1..1500)
    }

    /// Runs the model alone, with a lookup for each access. Returns counts and marks of each window.
    fn plainly(config: Config, acts: &[Act]) -> Vec<Vec<Row>> {
        let all = config.frames + TABLE_FRAMES;
        let mut guest = Guest::new(all, TABLE_FRAMES, PageSize::Small, Flags::Kept);
        let spaces = [(); 2].map(|()| guest.tables.space().expect("frames"));
        let mut vcpu = Vcpu::new(
            config.core,
            Buffer::new(config.mode, config.entries, config.options),
        );
        let mut place: Vec<u64> = (0..160).map(|page| page * 17 % FRAMES).collect();
        let (mut counts, mut marks) = (vec![0_u32; all as usize], vec![0_u8; all as usize]);
        let (mut windows, mut before) = (Vec::new(), vec![0_u8; all as usize]);
        let empty = |vcpu: &mut Vcpu, counts: &mut Vec<u32>| {
            vcpu.log.contents().for_each(|frame| counts[frame as usize] += 1);
            vcpu.log.reset();
            vcpu.log.refresh();
        };
        // The page that INVLPG names is not known, so a moved page is dropped at its next use.
        let mut stale = std::collections::BTreeSet::new();
        let close = |counts: &mut Vec<u32>, marks: &mut Vec<u8>, before: &mut Vec<u8>| {
            let rows = (0..all as usize).filter_map(|frame| {
                let marks = marks[frame] | before[frame];
                let row = Row {
                    frame: frame as u32,
                    count: counts[frame],
                    marks: Marks(marks),
                };
                (row.count > 0 || row.marks.used()).then_some(row)
            });
            let rows = rows.collect();
            for frame in 0..all as usize {
                before[frame] = if marks[frame] & Marks::PROGRAM != 0 {
                    Marks::BEFORE
                } else {
                    0
                };
            }
            counts.fill(0);
            marks.fill(0);
            rows
        };
        for act in acts.iter().chain([&Act::Window]) {
            match *act {
                Act::Access { page, upper, write } => {
                    let (number, half) = (page + if upper { UPPER } else { 0 }, usize::from(upper));
                    vcpu.switch(spaces[half]);
                    let frame = place[page as usize];
                    let known = guest
                        .tables
                        .look_up(spaces[half], number)
                        .map(|mapped| mapped.frame);
                    if known != Some(frame) {
                        if stale.remove(&(page, upper)) {
                            vcpu.drop_page(number);
                        }
                        guest
                            .tables
                            .map(spaces[half], number, frame, PageSize::Small)
                            .expect("frames");
                    }
                    let mark = (1 + 2 * u8::from(write)) << if upper { 3 } else { 0 };
                    marks[frame as usize] |= mark;
                    let access = if write { Access::Write } else { Access::Read };
                    loop {
                        match vcpu.access(&mut guest, number, access) {
                            Step::Hit | Step::Walked => break,
                            Step::Raised => {
                                empty(&mut vcpu, &mut counts);
                                break;
                            }
                            Step::Exit(_) => empty(&mut vcpu, &mut counts),
                        }
                    }
                }
                Act::Move { page, frame } => {
                    place[page as usize] = frame;
                    stale.extend([(page, false), (page, true)]);
                }
                Act::Space => {
                    vcpu.switch(spaces[0]);
                    vcpu.drop_space();
                }
                Act::Window => {
                    if config.mode == Mode::Pml {
                        empty(&mut vcpu, &mut counts);
                    }
                    windows.push(close(&mut counts, &mut marks, &mut before));
                }
            }
        }
        windows
    }

    fn through(config: Config, acts: &[Act]) -> Vec<Vec<Row>> {
        let machine = Machine::new(config);
        let mut cpu = machine.cpu().expect("a vCPU");
        let mut place: Vec<u64> = (0..160).map(|page| page * 17 % FRAMES).collect();
        let mut windows = Vec::new();
        for act in acts.iter().chain([&Act::Window]) {
            match *act {
                Act::Access { page, upper, write } => {
                    let address = page << PAGE_SHIFT | if upper { u64::MAX << 47 } else { 0 };
                    let access = if write { Access::Write } else { Access::Read };
                    cpu.access(&machine, address, access, || Some(place[page as usize]));
                }
                Act::Move { page, frame } => {
                    place[page as usize] = frame;
                    cpu.translations_changed();
                }
                Act::Space => cpu.space_changed(),
                Act::Window => {
                    machine.turn();
                    let window = machine.window.load(Ordering::Relaxed);
                    cpu.enter(&machine, window);
                    assert!(machine.is_settled());
                    windows.push(machine.take().rows);
                }
            }
        }
        windows
    }

    proptest! {
        #[test]
        fn what_is_in_front_changes_nothing(acts in acts(), zen: bool, writes: bool) {
            let mode = if writes { Mode::Pml } else { Mode::Paml };
            let config = config(if zen { "zen4" } else { "i7_pml" }, mode);
            prop_assert_eq!(through(config, &acts), plainly(config, &acts));
        }

        #[test]
        fn each_frame_used_in_a_window_is_marked_in_it_and_no_other(acts in acts()) {
            let config = config("i7_pml", Mode::Off);
            let marked = |windows: Vec<Vec<Row>>| -> Vec<Vec<(u32, Marks)>> {
                let used = |row: &Row| row.marks.used().then_some((row.frame, row.marks));
                windows.iter().map(|rows| rows.iter().filter_map(used).collect()).collect()
            };
            prop_assert_eq!(marked(through(config, &acts)), marked(plainly(config, &acts)));
        }
    }

    #[test]
    fn frames_beyond_the_guest_are_counted_and_not_modelled() {
        let machine = Machine::new(config("i7_pml", Mode::Paml));
        let mut cpu = machine.cpu().expect("a vCPU");
        cpu.access(&machine, 0, Access::Read, || Some(FRAMES));
        cpu.access(&machine, 0, Access::Read, || None);
        cpu.end(&machine);
        machine.turn();
        let window = machine.take();
        assert_eq!((window.outside, window.walks, window.rows), (1, 0, vec![]));
    }
}
