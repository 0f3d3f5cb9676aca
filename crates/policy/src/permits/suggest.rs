//! Suggests permits from a VM's behaviour or its size.

use homenode_machine::Machine;
use homenode_units::{BadSetting, Bytes, Permit, PermitError};
use serde::{Deserialize, Serialize};

use crate::bounds::SOME_SHARE;

/// The operator's settings. An agent records one mean slice for each of its periods.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Share of a VM's slices that should stay within the suggested permit, in (0, 1].
    pub percentile: f64,
    /// Least number of slices for a suggestion to be made, 1 to 86,400.
    pub slices_min: u32,
    /// Most slices that are remembered per VM, at least `slices_min` and up to 86,400.
    pub slices_max: u32,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            percentile: 0.95,
            slices_min: 100,
            slices_max: 600,
        }
    }
}

homenode_units::settings! {
    Config { percentile: SOME_SHARE, slices_min: 1..=86_400, slices_max: 1..=86_400 } ordered
}

fn ordered(config: &Config) -> Result<(), BadSetting> {
    let least = ("slices_min", config.slices_min);
    BadSetting::unless_ordered(least, ("slices_max", config.slices_max))
}

/// A permit that a VM would have kept in most slices, and how it was derived.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Suggestion {
    /// The permit to book.
    pub permit: Permit,
    /// Share of slices that must stay within the permit, in (0, 1].
    pub percentile: f64,
    /// Number of slices examined.
    pub slices_count: usize,
    /// Number of slices that exceeded the permit nevertheless.
    pub beyond_count: usize,
}

/// Why there is no suggestion.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NoSuggestion {
    /// Too few slices were recorded.
    #[error(
        "only {slices_count} slices of 30 ms were recorded, and {slices_min} are needed; ask again later"
    )]
    TooShort {
        /// Number of slices examined.
        slices_count: usize,
        /// The least number of slices required.
        slices_min: u32,
    },
    /// The figure cannot be a permit.
    #[error(transparent)]
    Permit(#[from] PermitError),
}

/// Returns the permit that a VM with this pollution per slice would have kept in the given share of its slices (nearest
/// rank), rounded up to two figures, and at least `1k`.
///
/// # Errors
/// Fails if there are too few slices.
pub fn from_behaviour(misses_per_slice: &[u64], config: &Config) -> Result<Suggestion, NoSuggestion> {
    let slices_count = misses_per_slice.len();
    let Config {
        percentile,
        slices_min,
        ..
    } = *config;
    if slices_count < slices_min as usize {
        return Err(NoSuggestion::TooShort {
            slices_count,
            slices_min,
        });
    }
    let mut sorted = misses_per_slice.to_vec();
    sorted.sort_unstable();
    let rank = (percentile.clamp(0.0, 1.0) * slices_count as f64).ceil() as usize;
    let misses = two_figures_up(sorted[rank.clamp(1, slices_count) - 1]);
    Ok(Suggestion {
        permit: Permit::pollution(misses.max(1_000))?,
        percentile,
        slices_count,
        beyond_count: misses_per_slice.iter().filter(|slice| **slice > misses).count(),
    })
}

/// Returns the permit of an instance type: the host's pollution, in proportion to the memory assigned to the instance
/// ([Kyoto, section 3.4]). Returns `None` if the host's LLCs or memory are unknown, or if the result cannot be a permit.
pub fn from_memory(memory: Bytes, machine: &Machine) -> Option<Permit> {
    let host: u64 = machine.nodes.values().map(|node| node.memory_bytes.0).sum();
    if host == 0 {
        return None;
    }
    let share = u128::from(host_pollution_per_slice(machine)) * u128::from(memory.0) / u128::from(host);
    Permit::pollution(two_figures_up(u64::try_from(share).ok()?)).ok()
}

/// Returns the pollution per slice that a host may sell: as many misses as its LLCs have lines, so that all VMs together
/// replace each line once per slice.
pub fn host_pollution_per_slice(machine: &Machine) -> u64 {
    let lines = machine
        .llcs
        .iter()
        .map(|llc| llc.size_bytes.0 / u64::from(llc.line_bytes.max(1)));
    lines.sum()
}

fn two_figures_up(misses: u64) -> u64 {
    let mut scale = 1;
    while misses / scale >= 100 {
        scale *= 10;
    }
    misses.div_ceil(scale) * scale
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(percentile: f64) -> Config {
        Config {
            percentile,
            ..Config::default()
        }
    }

    #[test]
    fn a_suggestion_is_kept_in_the_stated_share_of_slices() {
        // Of 1000, 2000 … 200000 misses, the 190th of 200 is 190000.
        let slices: Vec<u64> = (1..=200).map(|n| n * 1_000).collect();
        let found = from_behaviour(&slices, &Config::default()).unwrap();
        assert_eq!(found.permit.to_string(), "190k");
        assert_eq!((found.slices_count, found.beyond_count), (200, 10));
        let half = from_behaviour(&slices, &at(0.5)).unwrap();
        assert_eq!((half.permit.to_string(), half.beyond_count), ("100k".into(), 100));
    }

    #[test]
    fn a_suggestion_is_rounded_up_and_never_below_what_can_be_booked() {
        let found = |misses: u64| {
            from_behaviour(&[misses; 100], &at(1.0))
                .unwrap()
                .permit
                .to_string()
        };
        assert_eq!(found(123_456), "130k");
        assert_eq!(found(0), "1k");
    }

    #[test]
    fn too_little_behaviour_suggests_nothing() {
        assert_eq!(
            from_behaviour(&[1_000; 99], &Config::default()),
            Err(NoSuggestion::TooShort {
                slices_count: 99,
                slices_min: 100
            })
        );
        let soon = Config {
            slices_min: 99,
            ..Config::default()
        };
        assert!(from_behaviour(&[1_000; 99], &soon).is_ok());
    }

    #[test]
    fn instances_share_the_hosts_pollution_by_memory() {
        // 10 MiB of LLC have 163840 lines. A VM with a quarter of the host's 8096 MiB of memory books a quarter of them.
        let machine = homenode_machine_files::preset("e5_1603v3").unwrap();
        assert_eq!(host_pollution_per_slice(&machine), 163_840);
        let permit = from_memory(Bytes::from_mib(2_024), &machine).unwrap();
        assert_eq!(permit.to_string(), "41k");
        assert_eq!(from_memory(Bytes::ZERO, &machine), None);
    }
}
