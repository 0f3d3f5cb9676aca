//! A VM at home on one node, beside the same VM scattered over two, and with far memory.

use homenode_load::Kernel;
use homenode_units::{CpuId, CpuSet, NodeId, NodeSet};

use super::guests::{Guest, Guests, Memory};
use super::{Bench, REPETITIONS, Why, percent_of, spans};
use crate::section::{Bearing, Figure, Section, Topic, With};

pub(super) const METHOD: &str = "Three VMs of the same program run in turn: at home, with vCPUs and memory on one node; \
     scattered, with half of the vCPUs on each of the two nodes that are farthest apart and pages on both in turn; and far, \
     with vCPUs on one node and memory on the other. The program reads lines drawn from twice the last-level cache, on each \
     vCPU; the figure is lines per second.";

/// Most vCPUs of a VM.
const VCPUS_MAX: usize = 4;

pub(super) fn measure(bench: &mut Bench<'_>) -> Result<Section, Why> {
    let [here, there] = bench.far_pair()?;
    let (of_here, of_there) = (cpus(bench, here), cpus(bench, there));
    let vcpus = of_here.len().min(of_there.len() * 2).min(VCPUS_MAX);
    let llc = bench
        .machine
        .llcs
        .iter()
        .map(|llc| llc.size_bytes.0)
        .max()
        .unwrap_or(32 << 20) as usize;
    let guests = Guests::find(&bench.program, bench.kernel.as_deref())?;
    let load = Kernel::Uniform((2 * llc / vcpus).clamp(4 << 20, 128 << 20));
    let home: CpuSet = of_here.iter().copied().take(vcpus).collect();
    let both = of_here
        .iter()
        .take(vcpus.div_ceil(2))
        .chain(of_there.iter().take(vcpus / 2));
    let both: CpuSet = both.copied().collect();
    let nodes: NodeSet = [here, there].into_iter().collect();
    let places = [
        ("at home", &home, Memory::Bound(NodeSet::one(here))),
        ("scattered", &both, Memory::Interleaved(nodes)),
        ("far", &home, Memory::Bound(NodeSet::one(there))),
    ];
    (bench.told)("VMs boot", 0.0);
    let names = places
        .each_ref()
        .map(|(what, ..)| format!("homenode-evidence-{}", what.replace(' ', "-")));
    let all = places.iter().zip(&names).map(|((_, cpus, memory), name)| Guest {
        name,
        uuid: None,
        load,
        vcpus,
        cpus,
        memory: memory.clone(),
    });
    let mut running = guests.start(&all.collect::<Vec<_>>())?;
    let measure_ms = (bench.budget.as_millis() as f64 * 0.6 / (3 * REPETITIONS) as f64) as u64;
    let spans = spans(llc, measure_ms.clamp(300, 3000));
    let mut speeds = [const { Vec::new() }; 3];
    for at in 0..REPETITIONS {
        for ((worker, speeds), (what, ..)) in running.workers.iter_mut().zip(&mut speeds).zip(&places) {
            (bench.told)(
                &format!("a VM {what}"),
                0.3 + 0.7 * at as f64 / REPETITIONS as f64,
            );
            worker.run(spans)?;
            speeds.push(worker.ran()?.lines_per_s() / 1e6);
        }
    }
    drop(running);
    Ok(section(&speeds, guests.with()))
}

fn section(speeds: &[Vec<f64>; 3], with: With) -> Section {
    let [home, scattered, far] = speeds;
    let figures = vec![
        Figure::of("at home", "million lines/s", home),
        Figure::of("scattered", "million lines/s", scattered),
        Figure::of("far", "million lines/s", far),
        Figure::of("at home, of scattered", "percent", &percent_of(scattered, home)),
        Figure::of("at home, of far", "percent", &percent_of(far, home)),
    ];
    let than = |at: usize| {
        let gain = figures[at].median.unwrap_or(f64::NAN) - 100.0;
        format!(
            "{:.0} percent {}",
            gain.abs(),
            if gain < 0.0 { "slower" } else { "faster" }
        )
    };
    let means = match with {
        With::EmulatedVms => "The VMs were emulated: every step ran, and the speeds mean nothing.".to_owned(),
        _ => format!(
            "A VM at home is {} than scattered, and {} than with far memory.",
            than(3),
            than(4)
        ),
    };
    let bearing = match (with, figures[3].low, figures[3].high) {
        (With::EmulatedVms, ..) => Bearing::Neither,
        (_, Some(low), _) if low > 103.0 => Bearing::For,
        (_, _, Some(high)) if high < 97.0 => Bearing::Against,
        _ => Bearing::Neither,
    };
    Section::measured(Topic::Placement, with, METHOD, means, bearing, figures)
}

fn cpus(bench: &Bench<'_>, node: NodeId) -> Vec<CpuId> {
    let node = bench.machine.nodes.get(node);
    node.map_or_else(Vec::new, |node| node.cpus.iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_home_speaks_for_the_agent_only_if_it_surely_pays_and_never_when_emulated() {
        let at = |speed: f64| (0..9).map(|n| speed + f64::from(n) / 100.0).collect::<Vec<f64>>();
        let bearing = |home: f64, with| {
            let section = section(&[at(home), at(10.0), at(5.0)], with);
            match section.outcome {
                crate::section::Outcome::Measured { bearing, .. } => bearing,
                crate::section::Outcome::NotPossible { .. } => panic!("it was measured"),
            }
        };
        assert_eq!(bearing(12.0, With::OwnVms), Bearing::For);
        assert_eq!(bearing(10.0, With::OwnVms), Bearing::Neither);
        assert_eq!(bearing(8.0, With::OwnVms), Bearing::Against);
        assert_eq!(bearing(12.0, With::EmulatedVms), Bearing::Neither);
    }
}
