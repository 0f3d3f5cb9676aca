//! A VM alone, beside a VM that thrashes their last-level cache, and beside it while the agent holds that one to a permit.

use std::time::{Duration, Instant};

use homenode_load::Kernel;
use homenode_load::worker::Worker;
use homenode_units::{CpuSet, Permit};

use super::guests::{Guest, Guests, Memory};
use super::{Bench, REPETITIONS, Why, percent_of, spans};
use crate::section::{Bearing, Figure, Section, Topic, With};

pub(super) const METHOD: &str = "Two VMs of one vCPU, on two CPUs that share a last-level cache. The victim reads lines \
     drawn from half of it, the thrasher streams through four times as much. The victim runs alone and beside the thrasher \
     in turn; then, if an agent acts here and counts misses, beside it while the agent holds the thrasher to a permit of a \
     tenth of the misses that it could make. The figure is the victim's lines per second.";

const VICTIM: &str = "homenode-evidence-victim";
/// Name of the VM that gets a permit.
pub const THRASHER: &str = "homenode-evidence-thrasher";
/// UUID of that VM, under which the agent keeps the permit.
pub const THRASHER_UUID: &str = "b8b6f2a4-5d0c-4c0e-9d61-7a3f2e1c9b54";
/// Misses per slice of 30 ms that the thrasher may make: about 70 MB/s.
const PERMIT: u64 = 33_000;
/// How long the agent may take to see the VM.
const SEEN_WITHIN: Duration = Duration::from_secs(30);
/// How long the agent gets to meter the thrasher and to throttle it.
const SETTLES: Duration = Duration::from_secs(20);

/// An agent that holds VMs to permits.
pub trait Permits {
    /// Books a permit for a VM of this name. Returns false if the agent does not see the VM (yet), does not act on it, or cannot
    /// meter it.
    fn book(&mut self, vm: &str, permit: Permit) -> bool;

    /// Gives up the permit of a VM of this name. One that stays ends with the VM.
    fn give_up(&mut self, vm: &str);
}

pub(super) fn measure(bench: &mut Bench<'_>) -> Result<Section, Why> {
    let ([victim_cpu, thrasher_cpu], llc, _) = bench.neighbours()?;
    let guests = Guests::find(&bench.program, bench.kernel.as_deref())?;
    (bench.told)("both VMs boot", 0.0);
    let cpus = [victim_cpu, thrasher_cpu].map(|cpu| -> CpuSet { [cpu].into_iter().collect() });
    let guest = |name, uuid, load, cpus| Guest {
        name,
        uuid,
        load,
        vcpus: 1,
        cpus,
        memory: Memory::Anywhere,
    };
    let both = [
        guest(VICTIM, None, Kernel::Uniform(llc / 2), &cpus[0]),
        guest(THRASHER, Some(THRASHER_UUID), Kernel::Stream(4 * llc), &cpus[1]),
    ];
    let mut running = guests.start(&both)?;
    let [victim, thrasher] = running.workers.as_mut_slice() else {
        return Err(Why::of("a VM is missing"));
    };
    let measure_ms = (bench.budget.as_millis() as f64 * 0.5 / (3 * REPETITIONS) as f64) as u64;
    let spans = spans(llc, measure_ms.clamp(300, 3000));
    let mut speeds = [const { Vec::new() }; 3];
    let mut pair = |beside: bool, thrasher: &mut Worker| -> Result<f64, Why> {
        victim.run(spans)?;
        if beside {
            thrasher.run(spans)?;
            thrasher.ran()?;
        }
        Ok(victim.ran()?.lines_per_s() / 1e6)
    };
    for at in 0..REPETITIONS {
        (bench.told)(
            "the victim alone, and beside the thrasher",
            0.2 + 0.4 * at as f64 / REPETITIONS as f64,
        );
        speeds[0].push(pair(false, thrasher)?);
        speeds[1].push(pair(true, thrasher)?);
    }
    (bench.told)("the agent meters the thrasher", 0.6);
    if is_booked(bench) {
        std::thread::sleep(SETTLES.min(bench.budget / 4));
        for at in 0..REPETITIONS {
            (bench.told)(
                "the victim beside the thrasher, which has a permit",
                0.7 + 0.3 * at as f64 / REPETITIONS as f64,
            );
            speeds[2].push(pair(true, thrasher)?);
        }
        if let Some(agent) = &mut bench.agent {
            agent.give_up(THRASHER);
        }
    }
    Ok(section(&speeds, guests.with()))
}

/// Books the thrasher's permit, as soon as the agent has seen the VM. Returns false if no agent acts on it and counts its misses.
fn is_booked(bench: &mut Bench<'_>) -> bool {
    let (Some(agent), Ok(permit)) = (bench.agent.as_mut(), Permit::pollution(PERMIT)) else {
        return false;
    };
    let begin = Instant::now();
    loop {
        if agent.book(THRASHER, permit) {
            return true;
        }
        if begin.elapsed() >= SEEN_WITHIN {
            return false;
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

fn section(speeds: &[Vec<f64>; 3], with: With) -> Section {
    let [alone, beside, permitted] = speeds;
    let mut figures = vec![
        Figure::of("alone", "million lines/s", alone),
        Figure::of("beside the thrasher", "million lines/s", beside),
        Figure::of(
            "beside the thrasher, of alone",
            "percent",
            &percent_of(alone, beside),
        ),
    ];
    if !permitted.is_empty() {
        figures.push(Figure::of(
            "beside the thrasher with a permit",
            "million lines/s",
            permitted,
        ));
        figures.push(Figure::of(
            "with a permit, of alone",
            "percent",
            &percent_of(alone, permitted),
        ));
    }
    let median = |at: usize| figures.get(at).and_then(|figure| figure.median);
    let lost = median(2).unwrap_or(f64::NAN);
    let permit = match median(4) {
        Some(kept) => {
            format!("While the agent holds the thrasher to a permit, it keeps {kept:.0} percent.")
        }
        None => "The neighbour was not held to a permit, which limits its cache misses: that needs an agent \
             (`homenode run --mode act`), counted misses, and a cgroup of its own for the VM, as systemd makes it."
            .to_owned(),
    };
    let means = match with {
        With::EmulatedVms => {
            format!("The VMs were emulated: every step ran, and the speeds mean nothing. {permit}")
        }
        _ => format!(
            "Beside a thrasher, a VM that uses half of their cache keeps {lost:.0} percent of its speed. {permit}"
        ),
    };
    let ends = |at: usize| figures.get(at).and_then(|figure| figure.low.zip(figure.high));
    let bearing = match (with, ends(2), ends(4)) {
        (With::EmulatedVms, ..) => Bearing::Neither,
        (_, Some((_, beside)), Some((permitted, _))) if permitted > beside => Bearing::For,
        (_, Some((beside, _)), Some((_, permitted))) if permitted < beside => Bearing::Against,
        _ => Bearing::Neither,
    };
    Section::measured(Topic::Kyoto, with, METHOD, means, bearing, figures)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::section::Outcome;

    #[test]
    fn a_permit_speaks_for_the_agent_only_if_it_surely_protects() {
        let at = |speed: f64| (0..9).map(|n| speed + f64::from(n) / 100.0).collect::<Vec<f64>>();
        let of =
            |permitted: &[f64], with| match section(&[at(10.0), at(6.0), permitted.to_vec()], with).outcome {
                Outcome::Measured {
                    bearing,
                    means,
                    figures,
                    ..
                } => (bearing, means, figures.len()),
                Outcome::NotPossible { .. } => panic!("it was measured"),
            };
        assert_eq!(of(&at(9.0), With::OwnVms).0, Bearing::For);
        assert_eq!(of(&at(6.0), With::OwnVms).0, Bearing::Neither);
        assert_eq!(of(&at(4.0), With::OwnVms).0, Bearing::Against);
        assert_eq!(of(&at(9.0), With::EmulatedVms).0, Bearing::Neither);
        let (bearing, means, figures) = of(&[], With::OwnVms);
        assert!(
            bearing == Bearing::Neither && figures == 3 && means.contains("not held to a permit"),
            "{means}"
        );
    }
}
