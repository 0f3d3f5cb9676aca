//! The host's memory, caches and cores, beside the preset that is most like it.

use homenode_calibrate::{Calibration, Options, Pair, calibrate, machine_file};
use homenode_machine::{LoadCurve, Machine};
use homenode_machine_files::{from_toml_file, sysfs};
use homenode_units::NodeId;

use super::nearest::nearest;
use super::{Bench, Why};
use crate::section::{Bearing, Figure, REPETITIONS_MIN, Section, Topic, With};

pub(super) const METHOD: &str = "The whole measurement of `homenode calibrate` is repeated; each repetition gives the \
     median of its readings. A chase of dependent reads gives latencies, streams give bandwidths. The preset is the \
     published machine with the most similar caches, clock and nodes; the twin computes with its figures.";

/// File in which the measured machine is kept, for other sections.
const FILE: &str = "machine.toml";
/// The least time for one repetition, in seconds.
const SECONDS_MIN: f64 = 8.0;

pub(super) fn measure(bench: &mut Bench<'_>) -> Result<Section, Why> {
    let seconds = bench.budget.as_secs_f64();
    let count = ((seconds / SECONDS_MIN) as usize).clamp(REPETITIONS_MIN, super::REPETITIONS);
    let mut runs = Vec::new();
    for at in 0..count {
        runs.push(calibrated(
            bench,
            seconds / count as f64,
            at as f64 / count as f64,
            1.0 / count as f64,
        )?);
    }
    let file = keep(bench, &runs[runs.len() / 2])?;
    let preset = nearest(&file);
    let figures = figures(&runs, preset.as_ref());
    let judged = figures
        .iter()
        .filter_map(|figure| figure.predicted.as_ref()?.is_within);
    let (within, judged) = judged.fold((0, 0), |(within, all), is_within| {
        (within + usize::from(is_within), all + 1)
    });
    let means = match &preset {
        Some(preset) => format!(
            "{} of {judged} figures of preset {}, the nearest that Homenode knows, lie within what was measured here. A \
             simulation of this host should use the measured figures.",
            within, preset.name
        ),
        None => "These figures describe this machine to the twin.".to_owned(),
    };
    let far = figures
        .iter()
        .find(|figure| figure.what.starts_with("latency of far memory"));
    let (means, bearing) = match far.and_then(|far| far.median) {
        Some(percent) => (
            format!("Far memory takes {percent:.0} percent of the time of near memory. {means}"),
            if far.and_then(|far| far.low) > Some(110.0) {
                Bearing::For
            } else {
                Bearing::Neither
            },
        ),
        None => (
            format!("There is one node, so memory is never far, and a home on a node gains nothing. {means}"),
            Bearing::Neither,
        ),
    };
    Ok(Section::measured(
        Topic::Machine,
        With::Processes,
        METHOD,
        means,
        bearing,
        figures,
    ))
}

/// Returns the machine with measured figures: those of an earlier section, or of a short measurement now.
pub(super) fn with_figures(bench: &mut Bench<'_>) -> Result<Machine, Why> {
    if let Ok(machine) = from_toml_file(bench.dir.join(FILE))
        && machine.cpu_set() == bench.machine.cpu_set()
    {
        return Ok(machine);
    }
    let run = calibrated(bench, SECONDS_MIN, 0.0, 0.0)?;
    keep(bench, &run)
}

/// Measures once. `from` and `part` are the shares of the section that are done and that this is.
fn calibrated(bench: &mut Bench<'_>, seconds: f64, from: f64, part: f64) -> Result<Calibration, Why> {
    let options = Options {
        node: None,
        budget: std::time::Duration::from_secs_f64(seconds),
        quick: seconds < 45.0,
    };
    // Not the bench's, because it may have changed since.
    let machine = sysfs::read_confined(std::path::Path::new("/"))
        .map_err(|error| Why::said("the host's topology cannot be read")(&error))?;
    let told = &mut *bench.told;
    let mut progress = |at: usize, of: usize, what: &str| {
        told(what, from + part * at.saturating_sub(1) as f64 / of.max(1) as f64);
    };
    calibrate(&machine, &options, &mut progress).map_err(|error| {
        Why::said("this process cannot measure memory; run it where CPUs and memory are free")(&error)
    })
}

fn keep(bench: &Bench<'_>, run: &Calibration) -> Result<Machine, Why> {
    let file = machine_file(run).map_err(|error| {
        Why::said("the measured figures describe no valid machine; measure again on a quieter host")(&error)
    })?;
    // Without the file, the next section measures again.
    let _ = std::fs::write(bench.dir.join(FILE), &file.text);
    Ok(file.machine)
}

fn figures(runs: &[Calibration], preset: Option<&Machine>) -> Vec<Figure> {
    let figure = |what: &str, unit: &str, of: &dyn Fn(&Calibration) -> Option<f64>, expected: Option<f64>| {
        let values: Vec<f64> = runs.iter().filter_map(of).collect();
        let figure = Figure::of(what, unit, &values);
        match (expected, preset) {
            (Some(expected), Some(preset)) => figure.predicted(expected, format!("preset {}", preset.name)),
            _ => figure,
        }
    };
    let hardware = preset.and_then(|preset| preset.hardware.as_ref());
    let cycles = |of: fn(&homenode_machine::Latency) -> f64| {
        hardware.map(|hardware| of(&hardware.latency) * 1e9 / hardware.clock_hz as f64)
    };
    let (near, far) = (memory_ns(preset, false), memory_ns(preset, true));
    let mut all = vec![
        figure("L1 hit", "ns", &|c| Some(c.l1_ns.median), cycles(|l| l.l1_cycles)),
        figure("L2 hit", "ns", &|c| Some(c.l2_ns.median), cycles(|l| l.l2_cycles)),
        figure(
            "LLC hit",
            "ns",
            &|c| Some(c.llc_ns.median),
            cycles(|l| l.llc_cycles),
        ),
    ];
    let pairs = runs.first().map(|run| run.pairs.as_slice()).unwrap_or_default();
    for (at, pair) in pairs.iter().enumerate() {
        let (memory, cpus) = (pair.memory_node, pair.cpu_node);
        let expected = if memory == cpus { near } else { far };
        let what = format!("latency of memory of node {memory} from node {cpus}");
        all.push(figure(
            &what,
            "ns",
            &|c| Some(c.pairs.get(at)?.latency_ns.median),
            expected,
        ));
    }
    for (at, pair) in pairs.iter().enumerate() {
        let (memory, cpus) = (pair.memory_node, pair.cpu_node);
        let what = format!("bandwidth of memory of node {memory} to node {cpus}");
        let gb = |c: &Calibration| Some(c.pairs.get(at)?.bandwidth()?.median / 1e9);
        all.push(figure(&what, "GB/s", &gb, bandwidth(preset, memory == cpus)));
    }
    if let Some([near, far]) = near_and_far(pairs) {
        let ratio = |c: &Calibration| {
            Some(100.0 * c.pairs.get(far)?.latency_ns.median / c.pairs.get(near)?.latency_ns.median)
        };
        let expected = memory_ns(preset, true).zip(memory_ns(preset, false));
        let expected = expected.map(|(far, near)| 100.0 * far / near);
        all.push(figure(
            "latency of far memory, of near memory's",
            "percent",
            &ratio,
            expected,
        ));
    }
    let loaded = |c: &Calibration| {
        let (first, last) = (c.loaded.first()?, c.loaded.last()?);
        Some(100.0 * last.latency_ns.median / first.latency_ns.median)
    };
    let load = runs.first().and_then(|run| Some(run.loaded.last()?.load));
    let expected = hardware
        .zip(load)
        .map(|(hardware, load)| 100.0 * slower(hardware.memory_curve, load));
    all.push(figure(
        "latency of memory while other CPUs load it, as a share of that of idle memory",
        "percent",
        &loaded,
        expected,
    ));
    let interrupt = |c: &Calibration| Some(c.interrupt_ns?.median);
    all.push(figure(
        "interrupt of another CPU",
        "ns",
        &interrupt,
        hardware.map(|hardware| hardware.ipi.native_ns),
    ));
    all.retain(|figure| !figure.values.is_empty());
    all
}

/// How much slower memory is at a load of its bandwidth, by the twin's formula.
fn slower(curve: LoadCurve, load: f64) -> f64 {
    let u = (load / 1.02).clamp(0.0, 0.985);
    1.0 + curve.alpha * u + curve.beta * u * u.sqrt() / (1.0 - u)
}

/// Positions of the home's own pair, and of the slowest pair with other memory.
fn near_and_far(pairs: &[Pair]) -> Option<[usize; 2]> {
    let near = pairs.iter().position(|pair| pair.cpu_node == pair.memory_node)?;
    let home = pairs[near].cpu_node;
    let others = pairs.iter().enumerate();
    let others = others.filter(|(_, pair)| pair.cpu_node == home && pair.memory_node != home);
    let far = others.max_by(|(_, a), (_, b)| a.latency_ns.median.total_cmp(&b.latency_ns.median));
    far.map(|(far, _)| [near, far])
}

/// A machine's latency of its own memory, or of that over its longest way.
fn memory_ns(preset: Option<&Machine>, is_far: bool) -> Option<f64> {
    let machine = preset?;
    let hardware = machine.hardware.as_ref()?;
    if !is_far {
        return Some(hardware.latency.memory_ns);
    }
    let homes = machine.home_nodes();
    let hops = |from: NodeId, to: NodeId| -> Option<f64> {
        let route = machine.route(from, to)?;
        let hop = |link: &usize| machine.links.get(*link).and_then(|link| link.hop_ns);
        Some(
            route
                .iter()
                .map(|link| hop(link).unwrap_or(hardware.link.hop_ns))
                .sum(),
        )
    };
    let ways = homes.iter().flat_map(|a| homes.iter().map(move |b| (a, b)));
    let longest = ways
        .filter(|(a, b)| a != b)
        .filter_map(|(a, b)| hops(a, b))
        .max_by(f64::total_cmp)?;
    Some(hardware.latency.memory_ns + longest)
}

fn bandwidth(preset: Option<&Machine>, is_near: bool) -> Option<f64> {
    let machine = preset?;
    let own = machine.nodes.iter().find_map(|(_, node)| node.memory_bandwidth);
    let link = machine.links.iter().find_map(|link| link.bandwidth);
    let bytes = if is_near { own } else { link.or(own).min(own) };
    bytes.map(|bytes| bytes.as_f64() / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preset_with_nodes_expects_far_memory_to_be_slower_and_narrower() {
        let machine = homenode_machine_files::preset("epyc7763-nps4").unwrap();
        let (near, far) = (memory_ns(Some(&machine), false), memory_ns(Some(&machine), true));
        assert!(
            far.unwrap() > near.unwrap() && near.unwrap() > 50.0,
            "{near:?} {far:?}"
        );
        assert!(bandwidth(Some(&machine), false) <= bandwidth(Some(&machine), true));
        assert_eq!(
            memory_ns(Some(&homenode_machine_files::preset("i7_pml").unwrap()), true),
            None
        );
        assert!(
            (slower(
                LoadCurve {
                    alpha: 0.3,
                    beta: 0.01
                },
                0.0
            ) - 1.0)
                .abs()
                < 1e-12
        );
    }
}
