//! How the threads of a VM's program go through its work: stretches and rests, barriers, phases.

use homenode_units::Ns;

use super::{Course, Next, Stage, Vm};
use crate::guest::thread::{Doing, Thread};
use crate::index::ThreadIx;
use crate::workload::{PhaseProfile, Waiting};

/// How many rests that are due at once are drawn one by one; more last as long on average.
const RESTS_DRAWN: f64 = 16.0;

impl Vm {
    /// Returns how long a thread rests now.
    pub(super) fn rest(&mut self, thread: ThreadIx) -> Ns {
        let Some(rest) = self.course.program.as_ref().and_then(|program| program.rest) else {
            return Ns::ZERO;
        };
        let factor = self
            .course
            .phase_at(self.course.progress(&self.threads[thread]))
            .map_or(1.0, |phase| phase.rest_factor);
        match rest.mean.as_f64() * factor * self.course.factors.rest {
            mean if mean > 0.0 => Ns(self.chance.exponential(mean) as u64),
            _ => Ns::ZERO,
        }
    }

    /// Runs a thread without barriers until its next rest, the end of the phase, or the end of the program.
    pub(super) fn stretch(&mut self, thread: ThreadIx) {
        let progress = self.course.progress(&self.threads[thread]);
        let share = self.course.phase_end(progress) - progress;
        let total = self.course.instructions();
        let rest = self.course.program.as_ref().and_then(|program| program.rest);
        let interval = rest.map_or(f64::INFINITY, |rest| rest.interval_m_instructions * 1e6);
        let thread = &mut self.threads[thread];
        let next = (share * total)
            .min(interval)
            .max(1.0)
            .min(thread.instructions_left);
        thread.instructions_left -= next;
        thread.compute(next);
    }

    pub(super) fn arrive(&mut self, thread: ThreadIx, now: Ns) -> Next {
        self.course.at_barrier += 1;
        let threads = self.program_threads();
        if self.course.at_barrier < threads {
            let waiting = self
                .course
                .program
                .as_ref()
                .map_or(Waiting::Sleep, |program| program.waiting);
            (self.threads[thread].doing, self.threads[thread].left) = match waiting {
                Waiting::Sleep => (Doing::AtBarrier, 0.0),
                Waiting::Spin => (Doing::Spinning, f64::INFINITY),
            };
            return Next::Sleep;
        }
        if let Some(rest) = self.rest_at_barrier(thread) {
            return rest;
        }
        self.course.at_barrier = 0;
        if self.course.intervals_left == 0 {
            self.threads
                .iter_mut()
                .for_each(|thread| thread.doing = Doing::Idle);
            return self.end(now);
        }
        self.course.intervals_left -= 1;
        let mean = self.course.instructions() / self.course.intervals as f64;
        self.course.since_rest += mean;
        let imbalance = self
            .course
            .program
            .as_ref()
            .and_then(|p| p.barrier)
            .map_or(0.0, |barrier| barrier.imbalance);
        for thread in self.threads.iter_mut().take(threads) {
            // The work deviates from the mean by three standard deviations at most, so every interval has work.
            let deviation = if imbalance > 0.0 {
                self.chance.normal().clamp(-3.0, 3.0)
            } else {
                0.0
            };
            thread.instructions_left = 0.0;
            thread.compute((mean * (1.0 + imbalance * deviation)).max(0.05 * mean));
        }
        Next::Release
    }

    /// Lets the last thread at a barrier rest before it releases the others, if rests are due. All that are due since the last
    /// time are one rest.
    fn rest_at_barrier(&mut self, thread: ThreadIx) -> Option<Next> {
        let interval = self.course.program.as_ref()?.rest?.interval_m_instructions * 1e6;
        let due = libm::floor(self.course.since_rest / interval);
        if due < 1.0 || self.course.intervals_left == 0 {
            return None;
        }
        self.course.since_rest -= due * interval;
        let drawn = due.min(RESTS_DRAWN);
        let rests: f64 = (0..drawn as u32).map(|_| self.rest(thread).as_f64()).sum();
        let lasts = Ns((rests * due / drawn) as u64);
        if lasts == Ns::ZERO {
            return None;
        }
        self.course.at_barrier -= 1;
        self.threads[thread].doing = Doing::Resting;
        Some(Next::Rest(lasts))
    }

    /// Lets the program use the parts of its memory that it uses now.
    pub(crate) fn advance(&mut self) {
        if self.stage == Stage::Program && self.memory.is_windowed() {
            let (course, threads) = (&self.course, &self.threads);
            self.memory.advance(|thread| course.reached(&threads[thread]));
        }
    }

    /// Returns the factors on a thread's LLC accesses and cycles at present: those of its program's phase times those of events.
    pub(crate) fn phase(&self, thread: ThreadIx) -> (f64, f64) {
        // Most programs have no phases. They need not compute their progress.
        let phases = self.course.program.as_ref().map(|program| &program.phases);
        let (accesses, cycles) = match phases {
            Some(phases) if !phases.is_empty() => self.profile_phase(thread),
            _ => (1.0, 1.0),
        };
        (
            accesses * self.course.factors.llc_accesses,
            cycles * self.course.factors.cycles,
        )
    }

    fn profile_phase(&self, thread: ThreadIx) -> (f64, f64) {
        let reached = self.course.reached(&self.threads[thread]);
        self.course
            .phase_at(reached)
            .map_or((1.0, 1.0), |phase| (phase.llc_access_factor, phase.cpi_factor))
    }
}

impl Course {
    /// Returns the total number of instructions that each thread of the program runs.
    fn instructions(&self) -> f64 {
        self.program.as_ref().map_or(0.0, |program| {
            program.instructions_g_per_thread * 1e9 * self.work_share
        })
    }

    /// Returns the share of the program that a thread has completed at the end of its running stretch.
    fn progress(&self, thread: &Thread) -> f64 {
        if self.intervals > 0 {
            let left = self.intervals_left.saturating_add(1).min(self.intervals);
            return 1.0 - left as f64 / self.intervals as f64;
        }
        1.0 - (thread.instructions_left / self.instructions()).min(1.0)
    }

    /// Returns the share of the program that a thread has completed now. The running stretch is already subtracted from the
    /// instructions left.
    fn reached(&self, thread: &Thread) -> f64 {
        let running = if self.intervals > 0 {
            0.0
        } else {
            (thread.left + thread.requests.behind) / self.instructions()
        };
        (self.progress(thread) - running).max(0.0)
    }

    fn phase_end(&self, progress: f64) -> f64 {
        let mut end = 0.0;
        for phase in self.program.iter().flat_map(|program| &program.phases) {
            end += phase.share;
            if progress < end - 1e-9 {
                return end;
            }
        }
        1.0
    }

    /// Returns the phase that the program is in after this share of its work; `None` if it has no phases.
    fn phase_at(&self, progress: f64) -> Option<&PhaseProfile> {
        let phases = &self.program.as_ref()?.phases;
        let mut end = 0.0;
        let reached = phases.iter().find(|phase| {
            end += phase.share;
            progress < end - 1e-9
        });
        reached.or(phases.last())
    }
}
