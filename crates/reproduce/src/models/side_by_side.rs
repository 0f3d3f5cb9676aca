//! Measures what programs cost each other, access by access ([`homenode_tracking::simulator`]). There are a cache with the
//! machine's ways and policy, the controller's queue, and a stream of accesses for each program. The stream has the pace of
//! the program's profile, and is drawn from the profile's miss-ratio curve; only that of blockie is uniform, which its
//! profile approximates. The occupancy model is not used, because it assumes that the program with the most misses takes the
//! most space.
//!
//! Cache and curves are scaled to a sixteenth, so that caches fill soon; ways are unchanged. The experiment must have a grid
//! `alone` with a run of each program by itself.

use anyhow::{Context as _, Result};
use homenode_machine::Machine;
use homenode_machine_files::preset;
use homenode_tracking::cache::{Cache, Shape as CacheShape};
use homenode_tracking::placement::{Pages, Placement};
use homenode_tracking::simulator::{Done, Paths, Server, Simulator, Thread};
use homenode_tracking::stream::{Pattern, Stream};

use crate::design::array::{Array, Cell, Named};
use crate::design::functions::{hardware, profile};
use crate::models::{Values, named};
use homenode_units::stats::mean;

const MACHINE: &str = "e5_1603v3";
/// Clock of the machine, kHz.
const CLOCK_KHZ: f64 = 2_800_000.0;
/// Divisor of sizes.
const SCALE: f64 = 16.0;
/// Simulated time before accesses are counted, and while they are counted.
const WARM_NS: f64 = 3e6;
const COUNTED_NS: f64 = 6e6;

/// Returns `harm`, along axis `program`: what each program costs the others on average, in percent of their pace.
pub(super) fn harm(value: Values<'_>) -> Result<Named> {
    let machine = preset(MACHINE)?;
    let programs = value("program")?;
    let names = programs.axes[0].labels.iter();
    let streaming: Vec<Streaming> = names
        .map(|name| Streaming::new(name, &machine, value))
        .collect::<Result<_>>()?;
    let harms = Array::of_numbers(programs.axes.clone(), harms(&machine, &streaming)?);
    Ok(named([("harm", harms)]))
}

/// Returns `beside_three`, along axis `pair`: how many percent more misses a program has next to three others. The values
/// `victim` and `neighbour` name the programs.
pub(super) fn beside_three(value: Values<'_>) -> Result<Named> {
    let machine = preset(MACHINE)?;
    let (victims, others) = (value("victim")?, value("neighbour")?);
    let more = victims.zip(&others, |victim, other| {
        let own = Streaming::new(&victim.shown(), &machine, value)?;
        let other = Streaming::new(&other.shown(), &machine, value)?;
        let alone = &side_by_side(&machine, &[&own])?[0];
        let beside = &side_by_side(&machine, &[&own, &other, &other, &other])?[0];
        Ok(Cell::Number(
            100.0 * (beside.misses as f64 / alone.misses as f64 - 1.0),
        ))
    })?;
    Ok(named([("beside_three", more)]))
}

/// A program in the form that the simulator runs.
struct Streaming {
    pattern: Pattern,
    ns_between: f64,
    in_flight: usize,
    write_share: f64,
}

impl Streaming {
    /// Creates a program. Its pace is that of its run alone on the simulated host, less its waits for memory, which the simulator
    /// adds.
    fn new(name: &str, machine: &Machine, value: Values<'_>) -> Result<Streaming> {
        let program = profile(name)?;
        let hardware = hardware(machine)?;
        let counted = |what: &str| -> Result<f64> {
            let count = value(&format!("alone.{what}[program='{name}']"))?
                .only()?
                .number()?;
            count.with_context(|| format!("{name} was not run alone"))
        };
        let in_flight = program
            .misses_in_flight
            .min(f64::from(hardware.misses_in_flight_max));
        let lanes = (in_flight.round() as usize).max(1);
        let references = counted("llc_references")?;
        let ns = counted("cycles")? * 1e6 / CLOCK_KHZ / references;
        let waited = counted("llc_misses")? / references * hardware.latency.memory_ns / in_flight;
        let curve = &program.miss_ratio;
        let llc_lines = lines(machine);
        let pattern = if name == "blockie" {
            let footprint = program.footprint(1).as_f64() / 64.0;
            Pattern::Uniform {
                lines: (footprint / SCALE) as u64,
            }
        } else {
            Pattern::StackDistance {
                m_inf: curve.m_inf,
                c0_lines: curve.c0.as_f64() / 64.0 / SCALE,
                k: curve.k,
                lines_max: 4 * llc_lines,
            }
        };
        Ok(Streaming {
            pattern,
            ns_between: (ns - waited).max(0.1),
            in_flight: lanes,
            write_share: program.write_share,
        })
    }
}

/// Returns the number of lines of the simulated cache.
fn lines(machine: &Machine) -> usize {
    (machine.llcs[0].size_bytes.as_f64() / 64.0 / SCALE) as usize
}

/// Runs programs next to each other. Returns what each does while accesses are counted.
fn side_by_side(machine: &Machine, programs: &[&Streaming]) -> Result<Vec<Done>> {
    let hardware = hardware(machine)?;
    let bandwidth = machine
        .nodes
        .values()
        .next()
        .and_then(|node| node.memory_bandwidth);
    let bandwidth = bandwidth.context("the machine file does not state the bandwidth of memory")?;
    let llc = &machine.llcs[0];
    let ways = llc
        .ways
        .context("the machine file does not state the ways of the cache")? as usize;
    let shape = CacheShape::of_lines(lines(machine), ways, llc.replacement.unwrap_or_default());
    let paths = Paths {
        controllers: vec![Server {
            idle_ns: hardware.latency.memory_ns,
            service_ns: 64e9 / bandwidth.as_f64(),
        }],
        links: Vec::new(),
        routes: vec![Vec::new()],
    };
    let threads = programs.iter().enumerate().map(|(at, program)| Thread {
        node: 0,
        cache: Some(0),
        stream: Stream::new(&program.pattern, (at as u64) << 48, 1 + at as u64),
        ns_between: program.ns_between,
        in_flight: program.in_flight,
        write_share: program.write_share,
    });
    let cache = Cache::new(shape, programs.len(), 1);
    let pages = Pages::new(Placement::FirstTouch, 1);
    let mut simulator = Simulator::new(&paths, vec![cache], pages, 64, threads.collect(), 1);
    simulator.run_for(WARM_NS);
    simulator.restart();
    simulator.run_for(COUNTED_NS);
    Ok((0..programs.len()).map(|at| simulator.done(at).clone()).collect())
}

/// Returns what each program costs the others on average, percent of their pace.
fn harms(machine: &Machine, programs: &[Streaming]) -> Result<Vec<f64>> {
    let alone: Vec<f64> = programs
        .iter()
        .map(|program| Ok(side_by_side(machine, &[program])?[0].accesses as f64))
        .collect::<Result<_>>()?;
    let lost = |alone: f64, beside: &Done| 100.0 * (1.0 - beside.accesses as f64 / alone);
    let mut costs = vec![Vec::new(); programs.len()];
    for a in 0..programs.len() {
        for b in 0..a {
            let beside = side_by_side(machine, &[&programs[a], &programs[b]])?;
            costs[b].push(lost(alone[a], &beside[0]));
            costs[a].push(lost(alone[b], &beside[1]));
        }
    }
    Ok(costs
        .into_iter()
        .map(|costs| mean(costs).unwrap_or(f64::NAN))
        .collect())
}
