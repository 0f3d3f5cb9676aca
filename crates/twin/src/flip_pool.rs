//! A pool of pages that a VM's network and disk may exchange with the driver domain, so that its programs' pages stay in
//! place.
//!
//! # Problem
//! Page flipping hands a guest a page of the driver domain's node for each packet, and the guest frees it for any program to use.
//! After hours of I/O a good part of a VM's memory is remote, without its guest's knowledge [Flip, section III]. A pool that only
//! the driver uses limits how much can be remote, and keeps those pages away from programs (section IV-A). A pool that is too
//! small delays packets; one that is too large takes memory from programs.
//!
//! # Terms
//! *Used*: pages of the pool that are in flight. They are posted in the ring for packets to come, or hold data that the guest has
//! not yet copied out. *Size*: pages in the pool.
//!
//! # Algorithm
//! *Dynamic* (Algorithm 1): at each flip, if more than [`Config::grow_above_percent`] of the pool is used, add
//! [`Config::step_percent`] of its size; if less than [`Config::shrink_below_percent`] is used, remove as much. *Static*: the
//! size is constant: the largest that any program needed in a calibration, which `homenode calibrate --pool` does.
//!
//! # Properties
//! - `a_pool_that_is_used_as_it_should_is_left_alone`
//! - `a_pool_that_shrinks_keeps_what_is_used`
//! - `a_steady_use_is_settled_between_the_thresholds`
//! - `a_pool_keeps_within_its_bounds`
//! - `a_static_pool_stays_as_it_is`
//!
//! # Departures
//! - Thresholds and step are configurable: 90, 20 and 10 percent unless set. Settings are refused if a step can lead from beyond
//!   one threshold to beyond the other, because such a pool would never come to rest.
//! - A step is a whole number of pages, at least one, and a pool never grows beyond its caller's limit ("must be lower than
//!   the total memory of the VM").
//! - The source does not say which pages a shrinking pool releases. The implementation of a pool should release only pages on the
//!   VM's home nodes, because a program may get a released page. A pool of remote pages then keeps them.

use homenode_units::{Bytes, Pages};
use serde::{Deserialize, Serialize};

/// Whether a pool's size follows its use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Sizing {
    /// The size stays as calibrated.
    Static,
    /// The size grows and shrinks.
    #[default]
    Dynamic,
}

/// The operator's settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    /// Whether the size follows the use.
    pub sizing: Sizing,
    /// Size at the start, below the memory of the VM.
    #[serde(with = "homenode_units::text")]
    pub initial: Bytes,
    /// A pool grows if its used share is larger than this: percent, at most 100.
    pub grow_above_percent: u32,
    /// A pool shrinks if its used share is smaller than this: percent.
    pub shrink_below_percent: u32,
    /// Share of its size by which a pool grows or shrinks at a flip: percent, 1 to 50.
    pub step_percent: u32,
}

impl Default for Config {
    /// The values of \[Flip\]: Algorithm 1, and 500 MB as in section V-A.
    fn default() -> Config {
        Config {
            sizing: Sizing::Dynamic,
            initial: Bytes(500_000_000),
            grow_above_percent: 90,
            shrink_below_percent: 20,
            step_percent: 10,
        }
    }
}

/// An invalid pool configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub(crate) enum ConfigError {
    #[error("initial is {initial}; a pool needs at least one page, for example `initial = \"500MB\"`")]
    Empty { initial: Bytes },
    #[error("initial is {initial}, but the VM has {memory} in total; leave most of that to its programs")]
    BeyondVm { initial: Bytes, memory: Bytes },
    #[error("grow_above_percent is {percent}; it must be from 1 to 99")]
    GrowAbove { percent: u32 },
    #[error("step_percent is {percent}; it must be from 1 to 50")]
    Step { percent: u32 },
    #[error(
        "shrink_below_percent is {shrink} and grow_above_percent is {grow}: a step of {step} percent from beyond one of them goes \
         beyond the other, so the pool never settles; set shrink_below_percent to at most {most}"
    )]
    NoRest {
        shrink: u32,
        grow: u32,
        step: u32,
        most: u32,
    },
}

impl Config {
    /// Refuses an invalid configuration for a VM with this much memory.
    ///
    /// # Errors
    /// The problem, and a valid setting.
    pub(crate) fn check(&self, memory: Bytes) -> Result<(), ConfigError> {
        let (initial, step) = (self.initial, self.step_percent);
        let (shrink, grow) = (self.shrink_below_percent, self.grow_above_percent);
        if initial < Pages(1).to_bytes() {
            return Err(ConfigError::Empty { initial });
        }
        if initial >= memory {
            return Err(ConfigError::BeyondVm { initial, memory });
        }
        if !(1..=99).contains(&grow) {
            return Err(ConfigError::GrowAbove { percent: grow });
        }
        if !(1..=50).contains(&step) {
            return Err(ConfigError::Step { percent: step });
        }
        // A step from just above one threshold must keep the use on the right side of the other.
        let most = (100 * grow / (100 + step)).min(grow * (100 - step) / 100);
        if shrink > most {
            return Err(ConfigError::NoRest {
                shrink,
                grow,
                step,
                most,
            });
        }
        Ok(())
    }

    /// Returns the size of a pool after a flip at which `used` of its `size` pages were in use; never above `most`.
    pub(crate) fn after_flip(&self, size: Pages, used: Pages, most: Pages) -> Pages {
        let step = Pages((size.0 * u64::from(self.step_percent) / 100).max(1));
        let used_of = |percent: u32| (100 * used.0).cmp(&(size.0 * u64::from(percent)));
        if self.sizing == Sizing::Static {
            size
        } else if used_of(self.grow_above_percent).is_gt() {
            (size + step).min(most.max(size))
        } else if used_of(self.shrink_below_percent).is_lt() {
            Pages(size.0.saturating_sub(step.0).max(used.0).max(1))
        } else {
            size
        }
    }

    /// Returns the size after `flips` flips, each of which found `used` pages in use.
    pub(crate) fn after_flips(&self, size: Pages, used: Pages, most: Pages, flips: u64) -> Pages {
        let mut size = size;
        for _ in 0..flips {
            let next = self.after_flip(size, used, most);
            if next == size {
                break;
            }
            size = next;
        }
        size
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MOST: Pages = Pages(1 << 22);

    fn configs() -> impl Strategy<Value = Config> {
        let any = (1u32..100, 0u32..100, 1u32..51).prop_map(|(grow, shrink, step)| Config {
            grow_above_percent: grow,
            shrink_below_percent: shrink,
            step_percent: step,
            ..Config::default()
        });
        any.prop_filter("can be", |config| config.check(Bytes::from_gib(16)).is_ok())
    }

    #[test]
    fn it_grows_and_shrinks_as_in_algorithm_1() {
        let config = Config::default();
        let after = |size, used| config.after_flip(Pages(size), Pages(used), MOST);
        assert_eq!(after(1000, 901), Pages(1100));
        assert_eq!(after(1000, 900), Pages(1000));
        assert_eq!(after(1000, 200), Pages(1000));
        assert_eq!(after(1000, 199), Pages(900));
        // The allocation shrinks as 1000, 900, 810, 729, 657. The 140 used pages are 19 percent of 729 and 21 percent of 657.
        assert_eq!(config.after_flips(Pages(1000), Pages(140), MOST, 50), Pages(657));
        assert_eq!(config.after_flips(Pages(1000), Pages(140), MOST, 2), Pages(810));
    }

    #[test]
    fn pools_that_cannot_be_are_refused() {
        let memory = Bytes::from_gib(1);
        let with = |change: fn(&mut Config)| {
            let mut config = Config::default();
            change(&mut config);
            config.check(memory)
        };
        assert_eq!(with(|_| {}), Ok(()));
        let refused = [
            with(|config| config.initial = Bytes(4095)),
            with(|config| config.initial = Bytes::from_gib(1)),
            with(|config| config.grow_above_percent = 100),
            with(|config| config.step_percent = 0),
            with(|config| config.shrink_below_percent = 95),
            with(|config| config.shrink_below_percent = 82),
        ];
        let words = [
            "at least one page",
            "the VM has 1GiB",
            "from 1 to 99",
            "1 to 50",
            "at most 81",
            "at most 81",
        ];
        for (refused, word) in refused.into_iter().zip(words) {
            let message = refused.unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        }
    }

    proptest! {
        #[test]
        fn a_pool_that_is_used_as_it_should_is_left_alone(config in configs(), size in 1u64..1 << 20, share in 0.0f64..1.0) {
            let (low, high) = (config.shrink_below_percent, config.grow_above_percent);
            let percent = f64::from(low) + share * f64::from(high - low);
            let used = (size as f64 * percent / 100.0) as u64;
            prop_assume!(100 * used >= size * u64::from(low));
            prop_assert_eq!(config.after_flip(Pages(size), Pages(used), MOST), Pages(size));
        }

        #[test]
        fn a_pool_that_shrinks_keeps_what_is_used(
            config in configs(), size in 1u64..1 << 20, used in 0u64..1 << 20, flips in 0u64..300,
        ) {
            let used = used.min(size);
            prop_assert!(config.after_flips(Pages(size), Pages(used), MOST, flips) >= Pages(used));
        }

        #[test]
        fn a_steady_use_is_settled_between_the_thresholds(config in configs(), size in 1u64..1 << 20, used in 1u64..1 << 18) {
            let settled = config.after_flips(Pages(size), Pages(used), Pages(1 << 40), 100_000);
            prop_assert_eq!(config.after_flip(settled, Pages(used), Pages(1 << 40)), settled);
            // In a small pool a step is rounded up to one page, and no size may put the use between the thresholds.
            if used > 1000 {
                let percent = 100.0 * used as f64 / settled.0 as f64;
                prop_assert!(percent <= f64::from(config.grow_above_percent), "{} of {:?}", used, settled);
                prop_assert!(percent >= f64::from(config.shrink_below_percent), "{} of {:?}", used, settled);
            }
        }

        #[test]
        fn a_pool_keeps_within_its_bounds(
            config in configs(), size in 1u64..1000, used in 0u64..10_000, most in 1000u64..2000, flips in 0u64..300,
        ) {
            let after = config.after_flips(Pages(size), Pages(used.min(most)), Pages(most), flips);
            prop_assert!(Pages(1) <= after && after <= Pages(most));
        }

        #[test]
        fn a_static_pool_stays_as_it_is(config in configs(), size in 1u64..1 << 20, used in 0u64..1 << 20) {
            let config = Config { sizing: Sizing::Static, ..config };
            prop_assert_eq!(config.after_flip(Pages(size), Pages(used), MOST), Pages(size));
        }
    }
}
