//! `tavo.overhead`: what watching and deciding costs [TAVO, figure 8]. The one experiment that is measured, not simulated: it
//! takes the CPU time of this program on the machine that runs it.
//!
//! # Test, fixed before the experiment was run
//!
//! - Grows slightly with VMs: from 1 to 32 VMs by at most 1 percentage point.
//!
//! # Left out
//!
//! Reading hardware counters and asking libvirt, which need a host with VMs; `numa_maps` of a VM's process is longer than
//! that of this one.

use std::fs;

use homenode_control::{Config, Control, Mode};
use homenode_host::Host;
use homenode_twin::{Scenario, Twin, VmSpec};
use homenode_units::{Bytes, Ns};
use rustix::time::{ClockId, clock_gettime};

use super::table;
use crate::experiment::{Decision, Experiment};
use crate::figure::{Figure, PUBLISHED_SERIES, Shape as Drawing};
use crate::verdict::{Measured, Shape, show};

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    claim: "tavo.overhead",
    runs: Vec::new,
    decide: |_| decide(),
};

const MACHINE: &str = "r910";
const VMS: [usize; 6] = [1, 2, 4, 8, 16, 32];
const PERIODS: usize = 7;
const GROWTH_MOST_POINTS: f64 = 1.0;
const VCPUS: u16 = 4;

/// CPU time of this thread in seconds.
fn cpu_s() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let begin = cpu_s();
    let result = work();
    (result, cpu_s() - begin)
}

/// Reads from this kernel the files that a live host reads in each period: two for the host, one for each VM, three for each
/// vCPU. What cannot be read costs what it costs to find out.
fn read_kernel(vms: usize) -> usize {
    let read = |path: &str| fs::read(path).map_or(0, |text| text.len());
    let mut bytes = read("/proc/stat") + read("/proc/meminfo");
    for _ in 0..vms {
        bytes += read("/proc/self/numa_maps");
        for _ in 0..VCPUS {
            bytes += ["stat", "status", "schedstat"]
                .iter()
                .map(|file| read(&format!("/proc/thread-self/{file}")))
                .sum::<usize>();
        }
    }
    bytes
}

/// CPU time of one period with so many VMs: deciding, and reading. The median of some.
fn period(vms: usize) -> Result<(f64, f64), String> {
    let machine = homenode_machine_files::preset(MACHINE).map_err(|error| error.to_string())?;
    let specs = (0..vms).map(|at| VmSpec::new(&format!("vm{at}"), VCPUS, Bytes::from_gib(2), "povray"));
    let scenario = Scenario::of("overhead", specs.collect());
    let mut twin = Twin::new(machine.clone(), &scenario, 1).map_err(|error| error.to_string())?;
    let mut control = Control::new(Config::default(), Mode::Act);
    let (mut deciding, mut reading) = (Vec::new(), Vec::new());
    for _ in 0..PERIODS {
        twin.wait(Ns::from_secs(1));
        let sample = twin.sample().map_err(|error| error.to_string())?;
        let (begun, begin_s) = timed(|| control.begin(&machine, sample));
        let answer = begun.commit(&mut twin);
        let (_, finish_s) = timed(|| control.finish(&machine, begun, answer));
        let (bytes, read_s) = timed(|| read_kernel(vms));
        if bytes == 0 {
            return Err("this machine's /proc cannot be read".to_owned());
        }
        deciding.push(begin_s + finish_s);
        reading.push(read_s);
    }
    let median = |times: &mut Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[PERIODS / 2]
    };
    Ok((median(&mut deciding), median(&mut reading)))
}

fn decide() -> Result<Decision, String> {
    let costs: Vec<(f64, f64)> = VMS.iter().map(|vms| period(*vms)).collect::<Result<_, _>>()?;
    // Of a period of one second, in percent of one CPU.
    let percent: Vec<f64> = costs
        .iter()
        .map(|(deciding, reading)| 100.0 * (deciding + reading))
        .collect();
    let (first, last) = (percent[0], percent[VMS.len() - 1]);
    let rows = VMS
        .iter()
        .zip(&costs)
        .map(|(vms, (deciding, reading))| (vms.to_string(), vec![100.0 * deciding, 100.0 * reading]));
    let points = |values: &[f64]| {
        VMS.iter()
            .map(|vms| *vms as f64)
            .zip(values.iter().copied())
            .collect::<Vec<_>>()
    };
    let shape = Shape {
        name: "grows from 1 to 32 VMs by at most 1 percentage point".to_owned(),
        ours: format!("{} to {}", show(first), show(last)),
        holds: last - first <= GROWTH_MOST_POINTS,
    };
    Ok(Decision {
        measured: Measured {
            numbers: [("value".to_owned(), last)].into(),
            shapes: vec![shape],
            ..Measured::default()
        },
        set_up: vec![SET_UP.to_owned()],
        tables: vec![table(
            "Percent of one CPU.",
            &["VMs", "deciding", "reading"],
            rows,
        )],
        figures: vec![Figure {
            name: "tavo-overhead".to_owned(),
            title: "CPU use of watching and deciding once a second [TAVO, figure 8]".to_owned(),
            x_label: "VMs".to_owned(),
            y_label: "percent of one CPU".to_owned(),
            shape: Drawing::Lines(vec![
                ("ours, measured here".to_owned(), points(&percent)),
                (
                    format!("{PUBLISHED_SERIES}: 32 VMs"),
                    vec![(1.0, 0.3), (32.0, 0.3)],
                ),
            ]),
        }],
        why: vec![],
        measured_here: true,
    })
}

const SET_UP: &str = "Measured on the machine that runs it, in CPU time of one thread, so this document holds no number and no \
     verdict: `homenode reproduce tavo.overhead` does. The twin of r910 gives samples of 1 to 32 VMs of 4 vCPUs; timed is what Homenode's own code does with one each \
     second (rates, demand, placement, balance, repatriation, bookkeeping), and reading from this kernel as many files as a \
     live host reads for so many VMs. The paper does not state the base of its 0.3 percent; ours is percent of one CPU, the \
     larger of the two readings (of 32 CPUs it were a 32nd). What grows with VMs is reading, three small files for each vCPU and one for each VM. Reading hardware \
     counters and asking libvirt are left out. The \
     general tolerance of 5 points is wide for so small a number.";
