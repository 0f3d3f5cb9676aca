//! How long vCPUs ran, waited for a CPU and slept, from the hypervisor's trace of each change.
//!
//! `homenode_xen::runstates` documents the trace and reads it. All CPUs of an emulated host count cycles alike.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use homenode_xen::runstates::{CLASS, Change, Records, State};

use super::super::libvirtd::run;
use super::info;

/// How long each vCPU stayed in each state, in seconds, by domain and vCPU. A stretch is the time between two changes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Stretches {
    /// Whole stretches, of which the trace has begin and end.
    by_vcpu: BTreeMap<(u32, u32), BTreeMap<State, Vec<f64>>>,
    /// Incomplete stretches: from the trace's first record to a vCPU's first change, and from its last change to the last
    /// record.
    edges: BTreeMap<(u32, u32), BTreeMap<State, f64>>,
}

impl Stretches {
    /// Returns the whole stretches of a vCPU in a state, in seconds, in order.
    #[must_use]
    pub fn of(&self, domain: u32, vcpu: u32, state: State) -> &[f64] {
        let states = self.by_vcpu.get(&(domain, vcpu));
        states
            .and_then(|states| states.get(&state))
            .map_or(&[], Vec::as_slice)
    }

    /// Returns the total time of a vCPU in a state, including incomplete stretches.
    #[must_use]
    pub fn total_s(&self, domain: u32, vcpu: u32, state: State) -> f64 {
        let edges = self.edges.get(&(domain, vcpu));
        let edge = edges.and_then(|edges| edges.get(&state)).copied();
        self.of(domain, vcpu, state)
            .iter()
            .fold(edge.unwrap_or_default(), |sum, stretch| sum + stretch)
    }

    /// Returns the time for which a vCPU's state is known.
    #[must_use]
    pub fn known_s(&self, domain: u32, vcpu: u32) -> f64 {
        let states = [State::Running, State::Runnable, State::Blocked, State::Offline];
        states
            .map(|state| self.total_s(domain, vcpu, state))
            .iter()
            .fold(0.0, |sum, time| sum + time)
    }
}

/// Traces all changes for some seconds. The trace is kept in `dir`.
///
/// # Errors
/// When the trace cannot be made or read.
pub fn trace(dir: &Path, name: &str, time: Duration) -> anyhow::Result<Stretches> {
    let mhz: f64 = info("cpu_mhz")?
        .parse()
        .context("xl info: cpu_mhz is not a number")?;
    // Written to dom0's own memory, as the shared directory is slow.
    let path = format!("/run/{name}.trace");
    run(
        "xentrace",
        &["-D", "-e", CLASS, "-T", &time.as_secs().to_string(), &path],
    )?;
    let bytes = fs::read(&path).with_context(|| format!("cannot read {path}"))?;
    fs::write(dir.join(format!("{name}.trace")), &bytes)?;
    fs::remove_file(&path)?;
    stretches(changes(&bytes)?, mhz * 1e6)
}

/// Returns the changes in a trace, in its order.
fn changes(bytes: &[u8]) -> anyhow::Result<Vec<Change>> {
    let mut records = Records::default();
    let changes = records.read(bytes);
    ensure!(!records.is_within(), "the trace ends within a record");
    Ok(changes)
}

/// Builds stretches from pairs of changes that fit together; between other pairs, records were lost.
fn stretches(mut changes: Vec<Change>, cycles_per_s: f64) -> anyhow::Result<Stretches> {
    ensure!(!changes.is_empty(), "the trace has no change of the vCPU's state");
    changes.sort_by_key(|change| change.cycles);
    let (begin, end) = (changes[0].cycles, changes[changes.len() - 1].cycles);
    let seconds = |from: u64, to: u64| (to - from) as f64 / cycles_per_s;
    let mut last: BTreeMap<(u32, u32), Change> = BTreeMap::new();
    let mut stretches = Stretches::default();
    for change in changes {
        let vcpu = (u32::from(change.domain), u32::from(change.vcpu));
        let Some(before) = last.insert(vcpu, change) else {
            let edges = stretches.edges.entry(vcpu).or_default();
            *edges.entry(change.from).or_default() += seconds(begin, change.cycles);
            continue;
        };
        if before.to == change.from {
            let states = stretches.by_vcpu.entry(vcpu).or_default();
            states
                .entry(change.from)
                .or_default()
                .push(seconds(before.cycles, change.cycles));
        }
    }
    for (vcpu, change) in last {
        let edges = stretches.edges.entry(vcpu).or_default();
        *edges.entry(change.to).or_default() += seconds(change.cycles, end);
    }
    Ok(stretches)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a record of a change of vCPU 1 of domain 2.
    fn record(cycles: u64, from: u32, to: u32) -> Vec<u8> {
        // The record's head says that it has a time stamp and one more word.
        let head = 1 << 31 | 1 << 28 | 0x21001 | from << 8 | to << 4;
        let words = [head, cycles as u32, (cycles >> 32) as u32, 2 << 16 | 1];
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn stretches_between_changes_are_timed() -> anyhow::Result<()> {
        // The first record says which CPU the later ones are from. It is the tracing tool's own, without a time stamp.
        let mut bytes: Vec<u8> = [2 << 28 | 0x1f003_u32, 3, 0]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        let base = 5 << 32;
        // The vCPU waits for a second, runs for two, and is parked. Then records are missing; then it waits for half a second.
        for (at, from, to) in [(30, 0, 3), (0, 2, 1), (10, 1, 0), (60, 0, 1), (65, 1, 0)] {
            bytes.extend(record(base + at, from, to));
        }
        let found = stretches(changes(&bytes)?, 10.0)?;
        assert_eq!(found.of(2, 1, State::Runnable), [1.0, 0.5]);
        assert_eq!(found.of(2, 1, State::Running), [2.0]);
        assert!(found.of(2, 1, State::Offline).is_empty());
        assert!((found.known_s(2, 1) - 3.5).abs() < 1e-9);
        assert!((found.total_s(2, 0, State::Running)).abs() < 1e-9);
        // Another vCPU runs from the trace's begin to its middle, and is parked to its end.
        let mut other = record(base + 40, 0, 3);
        other[12] = 0;
        bytes.extend(other);
        let found = stretches(changes(&bytes)?, 10.0)?;
        assert!((found.total_s(2, 0, State::Running) - 4.0).abs() < 1e-9);
        assert!((found.known_s(2, 0) - 6.5).abs() < 1e-9);
        assert!(found.of(2, 0, State::Running).is_empty());
        Ok(())
    }

    #[test]
    fn half_a_record_is_an_error() {
        let bytes = record(1, 0, 1);
        assert!(changes(&bytes[..12]).is_err());
        assert!(stretches(Vec::new(), 1.0).is_err());
    }
}
