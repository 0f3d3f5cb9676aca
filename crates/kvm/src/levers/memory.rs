//! Memory of VMs, by their balloons: set through libvirt, asked of the guest's driver.
//!
//! A balloon follows as fast as its guest likes, so reading back tells nothing at once: [`Balloon::current`] of later samples
//! does. libvirt does not say what was asked for last. A balloon that had come to the agent's target and is then elsewhere was
//! set by somebody else, or deflated by its guest (which a balloon with `autodeflate='on'` does when it is out of memory). What
//! is plugged in meanwhile makes both the agent's amount and the operator's grow.

use homenode_host::{Act, ActionError, Balloon, GuestMemory, Lever, Limit, Outcome, VmSample};
use homenode_kernel::now;
use homenode_undo::journal::{Entry, Written};
use homenode_units::{Bytes, Ns};
use serde::{Deserialize, Serialize};

use super::{After, Grip, Steps, failed};
use crate::hands::Hands;
use crate::manager::CallError;
use crate::vm::Vm;

/// Memory that the agent gave a VM in the place of the operator's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shrink {
    /// The agent's.
    pub ours: Bytes,
    /// What it had.
    pub before: Bytes,
}

impl Written for Shrink {
    const KEY: &'static str = "memory";
}

/// The guest is asked for memory statistics, and was before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatsPeriod {
    /// How often it was asked before, in seconds; 0 for never.
    pub before_s: u32,
}

impl Written for StatsPeriod {
    const KEY: &'static str = "stats-period";
}

/// How often guests are asked for figures, in seconds, where the operator does not have them asked.
const STATS_PERIOD_S: u32 = 2;
/// How often that is tried where it fails.
const QUESTION_RETRY: Ns = Ns::from_secs(10);

const SHRINK: &str = "setting the memory";
const GIVE_BACK: &str = "giving back the memory";
const QUESTION: &str = "setting the period of memory statistics";

/// A limit that is in force.
#[derive(Clone, Copy)]
struct Shrunk {
    shrink: Shrink,
    /// Whether the balloon has come to where it was asked to be.
    is_there: bool,
    /// All memory that the VM had then, DIMMs included, once it was looked at.
    memory_kib: Option<u64>,
}

/// When the guest's reports came. They are stamped by the wall clock, whose steps make old ones look fresh and fresh ones old;
/// that a stamp is another than at the last look tells that a report came in between, and the monotonic clock tells when that
/// was.
#[derive(Clone, Copy, Debug, Default)]
struct Heard {
    /// The last stamp, and when it was looked at last.
    last: Option<(u64, Ns)>,
    /// The look before the one that first saw that stamp. The report came after it.
    before: Option<Ns>,
}

impl Heard {
    /// How old a report of this stamp, which the look at this time found, is at most by now. `None` for the first one seen,
    /// which may have waited for any time.
    fn age(&mut self, stamp_s: u64, looked: Ns, now: Ns) -> Option<Ns> {
        if let Some((last_s, before)) = self.last.replace((stamp_s, looked))
            && last_s != stamp_s
        {
            self.before = Some(before);
        }
        self.before.map(|before| now.saturating_sub(before))
    }
}

struct OfVm {
    shrunk: Option<Shrunk>,
    heard: Heard,
    /// How often the guest was asked for statistics before an agent changed that.
    asked: Option<StatsPeriod>,
    /// When the guest is to be asked, where that failed.
    next_question: Option<Ns>,
}

pub(super) fn grip(entry: Option<&Entry>) -> Box<dyn Grip> {
    let shrunk = entry.and_then(Entry::get).map(|shrink| Shrunk {
        shrink,
        is_there: false,
        memory_kib: None,
    });
    let asked = entry.and_then(Entry::get);
    Box::new(OfVm {
        shrunk,
        heard: Heard::default(),
        asked,
        next_question: None,
    })
}

impl Grip for OfVm {
    fn lever(&self) -> Lever {
        Lever::Memory
    }

    fn what(&self, act: &Act) -> &'static str {
        match act {
            Act::Lift { .. } => GIVE_BACK,
            _ => SHRINK,
        }
    }

    fn holds(&self, _hands: &Hands, _vm: &Vm, act: &Act) -> Result<bool, ActionError> {
        let limit = self.limit();
        Ok(matches!(act, Act::Limit { limit: wanted, .. } if limit == Some(*wanted)))
    }

    fn set(&mut self, hands: &mut Hands, vm: &mut Vm, act: &Act) -> Result<Outcome, ActionError> {
        let Act::Limit {
            limit: Limit::Memory(ours),
            ..
        } = *act
        else {
            return Ok(Outcome::Done);
        };
        let before = self.shrunk.map(|shrunk| shrunk.shrink.before);
        let before = before.unwrap_or(vm.domain.memory_current_bytes);
        let shrink = Shrink { ours, before };
        hands.set(vm, SHRINK, &shrink)?;
        self.shrunk = Some(Shrunk {
            shrink,
            is_there: false,
            memory_kib: Some(vm.domain.memory_kib),
        });
        let call = |e: CallError| failed(vm, SHRINK, e.cause());
        hands.manager.set_memory(vm.run.vm, ours).map_err(call)?;
        Ok(Outcome::Done)
    }

    fn lift(&mut self, hands: &mut Hands, vm: &mut Vm) -> Result<(), ActionError> {
        let Some(Shrunk { shrink, .. }) = self.shrunk else {
            return Ok(());
        };
        let call = |e: CallError| failed(vm, GIVE_BACK, e.cause());
        hands.manager.set_memory(vm.run.vm, shrink.before).map_err(call)?;
        self.shrunk = None;
        hands.clear::<Shrink>(vm);
        Ok(())
    }

    /// Asks the guest as often as the operator had it asked.
    fn leave(&mut self, hands: &mut Hands, vm: &mut Vm) -> Result<(), ActionError> {
        if let Some(StatsPeriod { before_s }) = self.asked {
            set_stats_period(hands, vm, before_s)?;
            self.asked = None;
            hands.clear::<StatsPeriod>(vm);
        }
        Ok(())
    }

    fn reconcile(&mut self, hands: &mut Hands, vm: &mut Vm, _is_first: bool) {
        let taken_in = self.take_in(hands, vm);
        let questioned = self.question(hands, vm);
        for error in taken_in.err().into_iter().chain(questioned.err()) {
            hands.notice(error.to_string());
        }
    }

    fn tell(&mut self, hands: &mut Hands, vm: &mut Vm, sample: &mut VmSample) {
        if vm.domain.balloon.is_none() {
            return;
        }
        let current = vm.domain.memory_current_bytes;
        let shrink = self.shrunk.map(|shrunk| shrunk.shrink);
        let is_asked = vm.domain.may_be_shrunk() || shrink.is_some();
        let said = match is_asked {
            true => hands.manager.guest_memory(vm.run.vm).unwrap_or_default(),
            false => None,
        };
        let guest = said.map(|(stamp_s, said)| {
            let now = now();
            // Who manages the VM may have asked some time ago.
            let looked = now.saturating_sub(said.age.unwrap_or_default());
            GuestMemory {
                age: self.heard.age(stamp_s, looked, now),
                ..said
            }
        });
        sample.balloon = Some(Balloon {
            current,
            maximum: shrink.map_or(current, |shrink| shrink.before),
            limit: shrink.map(|shrink| shrink.ours),
            guest,
        });
    }

    fn limit(&self) -> Option<Limit> {
        self.shrunk.map(|shrunk| Limit::Memory(shrunk.shrink.ours))
    }

    fn journalled(&self) -> Vec<&'static str> {
        let shrunk = self.shrunk.map(|_| Shrink::KEY);
        let asked = self.asked.map(|_| StatsPeriod::KEY);
        shrunk.into_iter().chain(asked).collect()
    }

    fn undo(&self, after: &mut After<'_>) -> Result<(), String> {
        let Some(vm) = after.vm()? else {
            return Ok(());
        };
        let mut steps = Steps::default();
        if let Some(Shrunk { shrink, .. }) = self.shrunk {
            match after.manager.memory_now(vm) {
                // Its operator gave it more meanwhile.
                Ok(now) if now > shrink.before => {}
                // As much as before may be a balloon that has not moved yet, and will.
                Ok(_) => steps.note("memory", after.manager.set_memory(vm, shrink.before)),
                Err(error) => steps.unknown("its memory", error.cause()),
            }
        }
        if let Some(StatsPeriod { before_s }) = self.asked {
            let set = after.manager.set_stats_period(vm, before_s);
            steps.note("memory statistics", set);
        }
        steps.done()
    }
}

impl OfVm {
    /// Takes in what was plugged in since the memory was set, and what somebody else or the guest did to it.
    fn take_in(&mut self, hands: &mut Hands, vm: &Vm) -> Result<(), ActionError> {
        let Some(shrunk) = &mut self.shrunk else {
            return Ok(());
        };
        let (current, ours) = (vm.domain.memory_current_bytes, shrunk.shrink.ours);
        let now_kib = vm.domain.memory_kib;
        let then_kib = shrunk.memory_kib.replace(now_kib).unwrap_or(now_kib);
        if now_kib != then_kib {
            // QEMU leaves the balloon as large as it is: current memory and what was asked for move alike.
            let moved = |bytes: Bytes| {
                let grown = bytes + Bytes(now_kib.saturating_mul(1024));
                grown.saturating_sub(Bytes(then_kib.saturating_mul(1024)))
            };
            shrunk.shrink = Shrink {
                ours: moved(ours),
                before: moved(shrunk.shrink.before),
            };
            shrunk.is_there = false;
            hands.set(vm, SHRINK, &shrunk.shrink)
        } else if Balloon::is_near(current, ours) {
            shrunk.is_there = true;
            Ok(())
        } else if shrunk.is_there {
            let name = &vm.run.name;
            hands.notice(format!(
                "VM {name} now has {current}, the agent had set {ours}: somebody else changed it, or its guest took it back"
            ));
            self.shrunk = None;
            hands.clear::<Shrink>(vm);
            Ok(())
        } else {
            Ok(())
        }
    }

    /// Has the guest asked for figures; again where that failed.
    fn have_asked(&mut self, hands: &mut Hands, vm: &Vm) -> Result<(), ActionError> {
        self.next_question = Some(now() + QUESTION_RETRY);
        set_stats_period(hands, vm, STATS_PERIOD_S)?;
        self.next_question = None;
        Ok(())
    }

    /// Has the guest asked for figures while it may be shrunk, and not otherwise.
    fn question(&mut self, hands: &mut Hands, vm: &mut Vm) -> Result<(), ActionError> {
        let Some(device) = vm.domain.balloon.filter(|_| hands.journal.is_some()) else {
            return Ok(());
        };
        match (vm.domain.may_be_shrunk(), self.asked) {
            (true, None) if device.stats_period_s == 0 => {
                let asked = StatsPeriod {
                    before_s: device.stats_period_s,
                };
                self.asked = Some(asked);
                let begun = vm.begin(hands);
                begun.map_err(|e| failed(vm, QUESTION, &e.to_string()))?;
                hands.set(vm, QUESTION, &asked)?;
                self.have_asked(hands, vm)
            }
            (true, Some(_)) if self.next_question.is_some_and(|next| next <= now()) => {
                self.have_asked(hands, vm)
            }
            (false, Some(_)) => self.leave(hands, vm),
            _ => Ok(()),
        }
    }
}

fn set_stats_period(hands: &mut Hands, vm: &Vm, seconds: u32) -> Result<(), ActionError> {
    let call = |e: CallError| failed(vm, QUESTION, e.cause());
    hands.manager.set_stats_period(vm.run.vm, seconds).map_err(call)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: u64) -> Ns {
        Ns::from_secs(seconds)
    }

    #[test]
    fn a_report_that_nobody_saw_come_is_of_unknown_age() {
        let mut heard = Heard::default();
        for at in [1, 2, 100] {
            assert_eq!(heard.age(5_000, s(at), s(at)), None);
        }
        // Nor does one from the future count as new.
        assert_eq!(Heard::default().age(u64::MAX, s(1), s(1)), None);
    }

    #[test]
    fn reports_age_by_the_monotonic_clock_and_no_step_of_the_wall_clock_changes_that() {
        let mut heard = Heard::default();
        assert_eq!(heard.age(5_000, s(10), s(10)), None);
        assert_eq!(
            heard.age(5_002, s(12), s(12)),
            Some(s(2)),
            "came after the look before"
        );
        assert_eq!(heard.age(5_002, s(14), s(14)), Some(s(4)), "and no other since");
        // The wall clock is set back by an hour: the guest still speaks.
        assert_eq!(heard.age(1_400, s(16), s(16)), Some(s(2)));
        // It falls silent: no step makes that fresh.
        assert_eq!(heard.age(1_400, s(116), s(116)), Some(s(102)));
        // The clock is set forward, and it speaks again.
        assert_eq!(heard.age(90_000, s(118), s(118)), Some(s(2)));
    }

    #[test]
    fn a_report_ages_from_when_the_guest_was_asked_and_not_from_when_that_was_looked_up() {
        let mut heard = Heard::default();
        assert_eq!(heard.age(5_000, s(10), s(11)), None);
        assert_eq!(heard.age(5_002, s(12), s(14)), Some(s(4)), "it came after 10");
        assert_eq!(heard.age(5_002, s(12), s(15)), Some(s(5)));
    }
}
