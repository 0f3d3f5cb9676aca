//! Busy time of CPUs, derived from Xen's idle times. Xen's clock and dom0's are different clocks. If one of them jumps, or a CPU
//! was offline, that time is left out of the sum, and later sums are unaffected.

use std::collections::BTreeMap;

use homenode_units::{CpuId, Ns};

/// Sums of busy time; see the module.
#[derive(Debug, Default)]
pub(crate) struct Busy {
    /// Time of the last reading, and each CPU's idle time then, by number.
    last: Option<(Ns, Vec<Ns>)>,
    busy: BTreeMap<CpuId, Ns>,
}

impl Busy {
    /// Adds the idle times that the CPUs had at this time.
    pub(crate) fn take_in(&mut self, at: Ns, idle: Vec<Ns>) {
        if let Some((before, was_idle)) = &self.last {
            let passed = at.saturating_sub(*before);
            for (number, (is, was)) in idle.iter().zip(was_idle).enumerate() {
                // An offline CPU reports 0. A CPU that has returned reports less than before, or far more.
                let is_online = *is != Ns::ZERO && *was != Ns::ZERO && is >= was;
                let busy = self.busy.entry(CpuId(number as u32)).or_default();
                if is_online {
                    *busy += passed.saturating_sub(*is - *was);
                }
            }
        }
        self.last = Some((at, idle));
    }

    /// Returns the busy time of all CPUs together since the first reading.
    pub(crate) fn of_all(&self) -> Ns {
        self.busy.values().copied().sum()
    }

    /// Returns a CPU's busy time since the first reading.
    pub(crate) fn of(&self, cpu: CpuId) -> Ns {
        self.busy.get(&cpu).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Ns {
        Ns::from_millis(ms)
    }

    #[test]
    fn what_is_not_idle_is_busy_whatever_the_clocks_do() {
        let mut busy = Busy::default();
        let (one, two) = (CpuId(0), CpuId(1));
        busy.take_in(ms(1000), vec![ms(5000), ms(9000)]);
        busy.take_in(ms(2000), vec![ms(5250), ms(10_000)]);
        assert_eq!((busy.of(one), busy.of(two)), (ms(750), Ns::ZERO));
        // Xen's clock jumps ahead by an hour. That must not hide the busy time of the next hour.
        busy.take_in(ms(3000), vec![ms(3_605_250), ms(3_610_000)]);
        busy.take_in(ms(4000), vec![ms(3_605_250), ms(3_610_600)]);
        assert_eq!((busy.of(one), busy.of(two)), (ms(1750), ms(400)));
    }

    #[test]
    fn a_cpu_that_was_offline_goes_on_from_what_it_was() {
        let mut busy = Busy::default();
        let cpu = CpuId(0);
        for (at, idle) in [(1, 500), (2, 600), (3, 0), (4, 0), (5, 700), (6, 800)] {
            busy.take_in(ms(at * 1000), vec![ms(idle)]);
        }
        // The CPU was online at both ends of two of the intervals.
        assert_eq!(busy.of(cpu), ms(1800));
    }
}
