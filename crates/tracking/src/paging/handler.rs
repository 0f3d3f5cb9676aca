//! The handler of full PRL buffers, on a CPU of the privileged VM [PRL, sections 4.2 and 4.3].
//!
//! ```text
//!          interrupt                        interrupt arrives           all full buffers are copied
//!   idle ─────────────▶ on its way ─────────────────────────▶ at work ─────────────────────────────▶ idle
//!                                                                ▲ └─ a buffer filled meanwhile ─┘
//! ```
//!
//! One run copies every full buffer, whichever vCPU's interrupt began it, resets the indices in memory, and makes the processors
//! refresh theirs. Interrupts are masked meanwhile; before the run ends it checks for full buffers again, as NAPI does. The
//! caller supplies the time, in nanoseconds.

use super::Vcpu;

/// Costs of a run of the handler, nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// From a vCPU's interrupt to the handler's first instruction: delivery, and an exit of the privileged VM.
    pub begin_ns: f64,
    /// Copying and counting one entry.
    pub entry_ns: f64,
    /// Resetting and refreshing one index.
    pub refresh_ns: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Idle,
    Coming,
    /// The handler copies the buffers of marked vCPUs.
    Copying,
}

/// The handler of one VM's buffers.
#[derive(Clone, Debug)]
pub struct Handler {
    costs: Costs,
    state: State,
    /// Whether each vCPU's buffer is being copied.
    marked: Vec<bool>,
    /// When the current state ends.
    until_ns: f64,
    interrupts: u64,
    runs: u64,
    busy_ns: f64,
}

impl Handler {
    /// Creates an idle handler.
    pub fn new(costs: Costs) -> Handler {
        Handler {
            costs,
            state: State::Idle,
            marked: Vec::new(),
            until_ns: f64::INFINITY,
            interrupts: 0,
            runs: 0,
            busy_ns: 0.0,
        }
    }

    /// Returns the number of interrupts sent, the number of runs that they began, and the nanoseconds that the runs took on the
    /// privileged VM's CPU.
    pub fn counts(&self) -> (u64, u64, f64) {
        (self.interrupts, self.runs, self.busy_ns)
    }

    /// Records that a vCPU sends an interrupt. It is masked during a run, which also serves this interrupt.
    pub fn raise(&mut self, now_ns: f64) {
        self.interrupts += 1;
        if self.state == State::Idle {
            self.state = State::Coming;
            self.until_ns = now_ns + self.costs.begin_ns;
        }
    }

    /// Does all work that is due by now. Copied frames go into the VM's larger buffer, which all its vCPUs share.
    #[inline]
    pub fn advance(&mut self, now_ns: f64, vcpus: &mut [Vcpu], frames: &mut Vec<u64>) {
        while self.until_ns <= now_ns {
            self.next(vcpus, frames);
        }
    }

    fn next(&mut self, vcpus: &mut [Vcpu], frames: &mut Vec<u64>) {
        match self.state {
            State::Idle => self.until_ns = f64::INFINITY,
            State::Coming => {
                self.runs += 1;
                self.busy_ns += self.costs.begin_ns;
                self.copy(vcpus);
            }
            State::Copying => {
                let marked = vcpus.iter_mut().zip(&self.marked);
                for (vcpu, _) in marked.filter(|(_, marked)| **marked) {
                    frames.extend(vcpu.log.contents());
                    vcpu.log.reset();
                    vcpu.log.refresh();
                }
                self.copy(vcpus);
            }
        }
    }

    /// Begins to copy the buffers that are full now, or becomes idle if no buffer is full.
    fn copy(&mut self, vcpus: &[Vcpu]) {
        let mut takes_ns = 0.0;
        self.marked.clear();
        for vcpu in vcpus {
            self.marked.push(vcpu.log.is_full());
            if vcpu.log.is_full() {
                takes_ns += self.costs.entry_ns * vcpu.log.contents().count() as f64 + self.costs.refresh_ns;
            }
        }
        if !self.marked.contains(&true) {
            self.state = State::Idle;
            self.until_ns = f64::INFINITY;
        } else {
            self.state = State::Copying;
            self.until_ns += takes_ns;
            self.busy_ns += takes_ns;
        }
    }
}
