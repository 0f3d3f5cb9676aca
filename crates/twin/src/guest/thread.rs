//! State and counts of the guest thread that runs on one vCPU.

use homenode_units::Ns;

use super::memory::Touch;
use crate::io::Requests;

/// What a vCPU is doing or waiting for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Doing {
    /// Nothing: the vCPU is halted until a timer of its kernel fires.
    Idle,
    /// Handling a timer of the vCPU's kernel; `left` counts nanoseconds.
    Housekeeping,
    /// Touching memory for the first time; `left` counts pages.
    Touching { touch: Touch, ns_per_page: f64 },
    /// Running the thread's program; `left` counts instructions.
    Computing,
    /// Halted until a device has served the thread's last request.
    WaitingForIo,
    /// Halted until the thread's program has work again.
    Resting,
    /// Halted until the other threads arrive at the barrier.
    AtBarrier,
    /// Busy until the other threads arrive at the barrier.
    Spinning,
}

/// The guest thread on one vCPU.
#[derive(Clone, Debug)]
pub(crate) struct Thread {
    pub doing: Doing,
    /// Amount of the present work that is left, in that work's unit.
    pub left: f64,
    /// Nanoseconds that the thread owes before it continues: for interrupts that it sent, and pages that its kernel moved.
    pub owed_ns: f64,
    /// Fraction of a page that is touched so far.
    pub page_carry: f64,
    /// Regions still to touch after the present one, in reverse order.
    pub touches: Vec<Touch>,
    /// Instructions of the thread's program that follow the present stretch.
    pub instructions_left: f64,
    /// The thread's requests to devices.
    pub requests: Requests,
    /// When the program's last rest was over, or when the program began; `None` while the thread serves no request.
    pub began: Option<Ns>,
    /// Whether a housekeeping timer is set.
    pub timer_set: bool,
    /// Share of the thread's accesses that go to memory which all threads use.
    pub shared_share: f64,
    pub instructions: f64,
    pub cycles: f64,
    pub llc_references: f64,
    pub llc_misses: f64,
}

impl Thread {
    pub(crate) fn new(shared_share: f64) -> Thread {
        Thread {
            doing: Doing::Idle,
            left: 0.0,
            owed_ns: 0.0,
            page_carry: 0.0,
            touches: Vec::new(),
            instructions_left: 0.0,
            requests: Requests::default(),
            began: None,
            timer_set: false,
            shared_share,
            instructions: 0.0,
            cycles: 0.0,
            llc_references: 0.0,
            llc_misses: 0.0,
        }
    }

    /// Carries over the counts of an earlier life of the thread's VM. A timer that is set will still fire.
    pub(crate) fn counts_on(&mut self, earlier: &Thread) {
        self.timer_set = earlier.timer_set;
        self.instructions = earlier.instructions;
        self.cycles = earlier.cycles;
        self.llc_references = earlier.llc_references;
        self.llc_misses = earlier.llc_misses;
        self.requests.bytes = earlier.requests.bytes;
    }

    /// Begins to run instructions of the thread's program, up to the next request.
    pub(crate) fn compute(&mut self, instructions: f64) {
        self.doing = Doing::Computing;
        self.left = self.requests.cut(instructions);
    }

    /// Whether the vCPU has something to run.
    pub(crate) fn runnable(&self) -> bool {
        !matches!(
            self.doing,
            Doing::Idle | Doing::AtBarrier | Doing::WaitingForIo | Doing::Resting
        )
    }

    /// Continues with the next region to touch. Returns true if there was one.
    pub(crate) fn next_touch(&mut self, ns_per_page: f64) -> bool {
        while let Some(touch) = self.touches.pop() {
            if touch.pages > 0 {
                self.doing = Doing::Touching { touch, ns_per_page };
                self.left = touch.pages as f64;
                self.page_carry = 0.0;
                return true;
            }
        }
        false
    }

    /// Returns how many whole pages `progress` more pages of touching complete. At the end of a touch `left` is 0 and every page
    /// has been handed out.
    pub(crate) fn pages_completed(&mut self, progress: f64) -> u64 {
        let Doing::Touching { touch, .. } = &mut self.doing else {
            return 0;
        };
        self.page_carry += progress;
        // The touch's own count is the number of pages left to hand out, so rounding never loses or invents a page.
        let whole = (self.page_carry as u64).min(touch.pages);
        self.page_carry -= whole as f64;
        touch.pages -= whole;
        whole
    }
}
