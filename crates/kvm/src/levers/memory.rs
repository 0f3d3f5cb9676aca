//! Memory of VMs, through their balloons: requested through the VM's manager, carried out by the guest's driver.
//!
//! A balloon follows at its guest's own pace. Reading back at once would show nothing; [`Balloon::current`] in later samples
//! shows the effect. libvirt does not report the last requested size. So after a limit was lifted, the restored amount counts
//! until the balloon has it: a new limit would otherwise take the size on the way for the operator's. If a balloon reached the
//! agent's target and then left it, another program set it, or its guest deflated it (as a balloon with `autodeflate='on'` does
//! when the guest is out of memory). If memory is plugged in meanwhile, both the agent's amount and the operator's grow by it.

use homenode_host::{Act, ActionError, Balloon, GuestMemory, Lever, Limit, Outcome, VmSample};
use homenode_kernel::now;
use homenode_undo::journal::{Entry, Written};
use homenode_units::{Bytes, Ns};
use serde::{Deserialize, Serialize};

use super::{After, Kvm, LeverState, Steps, UndoError, failed};
use crate::context::HostContext;
use crate::manager::CallError;
use crate::vm::Vm;

/// The amount of memory that the agent set for a VM instead of the operator's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shrink {
    /// The agent's amount.
    pub ours: Bytes,
    /// The amount before.
    pub before: Bytes,
}

impl Written for Shrink {
    const KEY: &'static str = "memory";
}

/// Records that the agent made QEMU ask the guest for memory statistics, and the former period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StatsPeriod {
    /// The former period in seconds; 0 if the guest was never asked.
    pub before_s: u32,
}

impl Written for StatsPeriod {
    const KEY: &'static str = "stats-period";
}

/// Period in seconds at which guests are asked for statistics, unless the operator set one.
const STATS_PERIOD_S: u32 = 2;
/// How long to wait before retrying to set that period.
const QUESTION_RETRY: Ns = Ns::from_secs(10);

const SHRINK: &str = "setting the memory";
const GIVE_BACK: &str = "returning the memory";
const QUESTION: &str = "setting the period of memory statistics";

/// A limit that is in force.
#[derive(Clone, Copy)]
struct Shrunk {
    shrink: Shrink,
    /// Whether the balloon has reached its target.
    is_there: bool,
    /// All memory that the VM had at the last reading, DIMMs included.
    memory_kib: Option<u64>,
}

/// When the guest's reports arrived. Their stamps are wall-clock times, and a step of that clock makes old reports look fresh and
/// fresh ones old. So only the change of a stamp counts: it shows that a report arrived since the last reading, and the monotonic
/// clock tells when that look was.
#[derive(Clone, Copy, Debug, Default)]
struct Heard {
    /// The last stamp, and when it was last seen.
    last: Option<(u64, Ns)>,
    /// The last look before that stamp was first seen: the report arrived after it.
    before: Option<Ns>,
}

impl Heard {
    /// Upper bound of the age of a report with this stamp, seen at `looked`. `None` for the first report seen, which may be
    /// arbitrarily old.
    fn age(&mut self, stamp_s: u64, looked: Ns, now: Ns) -> Option<Ns> {
        if let Some((last_s, before)) = self.last.replace((stamp_s, looked))
            && last_s != stamp_s
        {
            self.before = Some(before);
        }
        self.before.map(|before| now.saturating_sub(before))
    }
}

/// Memory that the guest has not taken back yet since the limit was lifted.
#[derive(Clone, Copy)]
struct Returning {
    /// The amount that was restored.
    to: Bytes,
    /// All memory that the VM had then, DIMMs included.
    memory_kib: u64,
}

struct OfVm {
    shrunk: Option<Shrunk>,
    /// A new limit must not take the size on the way for the operator's.
    returning: Option<Returning>,
    heard: Heard,
    /// The period before an agent changed it; `None` if no agent did.
    asked: Option<StatsPeriod>,
    /// When to retry setting the period, if that failed.
    next_question: Option<Ns>,
}

pub(super) fn state(entry: Option<&Entry>) -> Box<dyn LeverState<Kvm>> {
    let shrunk = entry.and_then(Entry::get).map(|shrink| Shrunk {
        shrink,
        is_there: false,
        memory_kib: None,
    });
    let asked = entry.and_then(Entry::get);
    Box::new(OfVm {
        shrunk,
        returning: None,
        heard: Heard::default(),
        asked,
        next_question: None,
    })
}

impl LeverState<Kvm> for OfVm {
    fn lever(&self) -> Lever {
        Lever::Memory
    }

    fn what(&self, act: &Act) -> &'static str {
        match act {
            Act::Lift { .. } => GIVE_BACK,
            _ => SHRINK,
        }
    }

    fn holds(&self, _context: &HostContext, _vm: &Vm, act: &Act) -> Result<bool, ActionError> {
        let limit = self.limit();
        Ok(matches!(act, Act::Limit { limit: wanted, .. } if limit == Some(*wanted)))
    }

    fn set(&mut self, context: &mut HostContext, vm: &mut Vm, act: &Act) -> Result<Outcome, ActionError> {
        let Act::Limit {
            limit: Limit::Memory(ours),
            ..
        } = *act
        else {
            return Ok(Outcome::Done);
        };
        let before = self.shrunk.map(|shrunk| shrunk.shrink.before);
        let before = before.unwrap_or(self.without_limit(vm));
        let shrink = Shrink { ours, before };
        context.set(vm, SHRINK, &shrink)?;
        self.shrunk = Some(Shrunk {
            shrink,
            is_there: false,
            memory_kib: Some(vm.domain.memory_kib),
        });
        let call = |e: CallError| failed(vm, SHRINK, e.cause());
        context.manager.set_memory(vm.run.vm, ours).map_err(call)?;
        Ok(Outcome::Done)
    }

    fn lift(&mut self, context: &mut HostContext, vm: &mut Vm) -> Result<(), ActionError> {
        let Some(Shrunk { shrink, .. }) = self.shrunk else {
            return Ok(());
        };
        let call = |e: CallError| failed(vm, GIVE_BACK, e.cause());
        context
            .manager
            .set_memory(vm.run.vm, shrink.before)
            .map_err(call)?;
        self.shrunk = None;
        self.returning = Some(Returning {
            to: shrink.before,
            memory_kib: vm.domain.memory_kib,
        });
        context.clear::<Shrink>(vm);
        Ok(())
    }

    /// Restores the operator's period of statistics.
    fn leave(&mut self, context: &mut HostContext, vm: &mut Vm) -> Result<(), ActionError> {
        if let Some(StatsPeriod { before_s }) = self.asked {
            set_stats_period(context, vm, before_s)?;
            self.asked = None;
            context.clear::<StatsPeriod>(vm);
        }
        Ok(())
    }

    fn reconcile(&mut self, context: &mut HostContext, vm: &mut Vm, _is_first: bool) {
        self.follow_return(vm);
        let taken_in = self.take_in(context, vm);
        let questioned = self.question(context, vm);
        for error in taken_in.err().into_iter().chain(questioned.err()) {
            context.notice(error.to_string());
        }
    }

    fn tell(&mut self, context: &mut HostContext, vm: &mut Vm, sample: &mut VmSample) {
        if vm.domain.balloon.is_none() {
            return;
        }
        let current = vm.domain.memory_current_bytes;
        let shrink = self.shrunk.map(|shrunk| shrunk.shrink);
        let is_asked = vm.domain.may_be_shrunk() || shrink.is_some();
        let said = match is_asked {
            true => context.manager.guest_memory(vm.run.vm).unwrap_or_default(),
            false => None,
        };
        let guest = said.map(|(stamp_s, said)| {
            let now = now();
            // The manager may have asked the guest some time ago.
            let looked = now.saturating_sub(said.age.unwrap_or_default());
            GuestMemory {
                age: self.heard.age(stamp_s, looked, now),
                ..said
            }
        });
        sample.balloon = Some(Balloon {
            current,
            maximum: shrink.map_or(self.without_limit(vm), |shrink| shrink.before),
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

    fn undo(&self, after: &mut After<'_>) -> Result<(), UndoError> {
        let Some(vm) = after.vm()? else {
            return Ok(());
        };
        let mut steps = Steps::default();
        if let Some(Shrunk { shrink, .. }) = self.shrunk {
            match after.manager.memory_now(vm) {
                // The operator gave the VM more memory since.
                Ok(now) if now > shrink.before => {}
                // Set it even if the amount is the one from before: the balloon may still be about to move.
                Ok(_) => steps.note("memory", after.manager.set_memory(vm, shrink.before)),
                Err(error) => steps.unknown("its memory", error.cause().to_owned()),
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
    /// The VM's memory without a limit of the agent's: its current size, or the one to which its balloon is returning.
    fn without_limit(&self, vm: &Vm) -> Bytes {
        let to = self.returning.map_or(Bytes::ZERO, |returning| returning.to);
        to.max(vm.domain.memory_current_bytes)
    }

    /// Notes whether the balloon has returned, and memory that was plugged meanwhile.
    fn follow_return(&mut self, vm: &Vm) {
        let (current, now_kib) = (vm.domain.memory_current_bytes, vm.domain.memory_kib);
        self.returning = self.returning.and_then(|Returning { to, memory_kib }| {
            let grown = to + Bytes(now_kib.saturating_mul(1024));
            let to = grown.saturating_sub(Bytes(memory_kib.saturating_mul(1024)));
            let is_there = current >= to || Balloon::is_near(current, to);
            (!is_there).then_some(Returning {
                to,
                memory_kib: now_kib,
            })
        });
    }

    /// Takes account of memory plugged in since the limit was set, and of changes by another program or the guest.
    fn take_in(&mut self, context: &mut HostContext, vm: &Vm) -> Result<(), ActionError> {
        let Some(shrunk) = &mut self.shrunk else {
            return Ok(());
        };
        let (current, ours) = (vm.domain.memory_current_bytes, shrunk.shrink.ours);
        let now_kib = vm.domain.memory_kib;
        let then_kib = shrunk.memory_kib.replace(now_kib).unwrap_or(now_kib);
        if now_kib != then_kib {
            // QEMU leaves the balloon's size unchanged: current and requested memory grow by the same amount.
            let moved = |bytes: Bytes| {
                let grown = bytes + Bytes(now_kib.saturating_mul(1024));
                grown.saturating_sub(Bytes(then_kib.saturating_mul(1024)))
            };
            shrunk.shrink = Shrink {
                ours: moved(ours),
                before: moved(shrunk.shrink.before),
            };
            shrunk.is_there = false;
            context.set(vm, SHRINK, &shrunk.shrink)
        } else if Balloon::is_near(current, ours) {
            shrunk.is_there = true;
            Ok(())
        } else if shrunk.is_there {
            let name = &vm.run.name;
            context.notice(format!(
                "VM {name} now has {current} of memory; the agent had set {ours}: another program changed it, or its guest took it back"
            ));
            self.shrunk = None;
            context.clear::<Shrink>(vm);
            Ok(())
        } else {
            Ok(())
        }
    }

    /// Sets the period at which QEMU asks the guest for statistics; retries later if that failed.
    fn have_asked(&mut self, context: &mut HostContext, vm: &Vm) -> Result<(), ActionError> {
        self.next_question = Some(now() + QUESTION_RETRY);
        set_stats_period(context, vm, STATS_PERIOD_S)?;
        self.next_question = None;
        Ok(())
    }

    /// Makes QEMU ask the guest for statistics while the VM may be shrunk, and only then.
    fn question(&mut self, context: &mut HostContext, vm: &mut Vm) -> Result<(), ActionError> {
        let Some(device) = vm.domain.balloon.filter(|_| context.journal.is_some()) else {
            return Ok(());
        };
        match (vm.domain.may_be_shrunk(), self.asked) {
            (true, None) if device.stats_period_s == 0 => {
                let asked = StatsPeriod {
                    before_s: device.stats_period_s,
                };
                self.asked = Some(asked);
                let begun = vm.begin(context);
                begun.map_err(|e| failed(vm, QUESTION, &e.to_string()))?;
                context.set(vm, QUESTION, &asked)?;
                self.have_asked(context, vm)
            }
            (true, Some(_)) if self.next_question.is_some_and(|next| next <= now()) => {
                self.have_asked(context, vm)
            }
            (false, Some(_)) => self.leave(context, vm),
            _ => Ok(()),
        }
    }
}

fn set_stats_period(context: &mut HostContext, vm: &Vm, seconds: u32) -> Result<(), ActionError> {
    let call = |e: CallError| failed(vm, QUESTION, e.cause());
    context.manager.set_stats_period(vm.run.vm, seconds).map_err(call)
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
        // A stamp from the future does not count as a new report either.
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
        // The wall clock is set back by an hour, and the guest keeps reporting.
        assert_eq!(heard.age(1_400, s(16), s(16)), Some(s(2)));
        // The guest falls silent: no step of the clock makes its last report look fresh.
        assert_eq!(heard.age(1_400, s(116), s(116)), Some(s(102)));
        // The clock is set forward, and the guest reports again.
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
