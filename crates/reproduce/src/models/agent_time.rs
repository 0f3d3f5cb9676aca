//! Measures the cost of monitoring and deciding, in CPU time of this program on the current machine ([TAVO, figure 8]).
//!
//! Left out: reading hardware counters and queries to libvirt, which need a host with VMs; `numa_maps` of a VM's process is
//! longer than that of this one.

use std::fs;

use homenode_control::{Config, Control, Mode};
use homenode_host::Host;
use homenode_twin::{Scenario, Twin, VmSpec};
use homenode_units::{Bytes, Ns};
use rustix::time::{ClockId, clock_gettime};

use crate::design::array::{Array, Cell, Named};
use crate::models::Values;

const MACHINE: &str = "r910";
const PERIODS: usize = 7;
const VCPUS: u16 = 4;

/// Returns `deciding_s` and `reading_s`: seconds of CPU time of a period with the VMs of axis `vms`.
pub fn agent(value: Values<'_>) -> Result<Named, String> {
    let vms = value("vms")?;
    let mut reading = Vec::new();
    let deciding = Array::build(vms.axes.clone(), |place| {
        let count = vms.at(place).number()?.unwrap_or(1.0);
        let (deciding_s, reading_s) = period(count as usize)?;
        reading.push(reading_s);
        Ok(Cell::Number(deciding_s))
    })?;
    let reading = Array::of_numbers(vms.axes.clone(), reading);
    Ok([
        ("deciding_s".to_owned(), deciding),
        ("reading_s".to_owned(), reading),
    ]
    .into())
}

/// Returns the CPU time of this thread in seconds.
fn cpu_s() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let begin = cpu_s();
    let result = work();
    (result, cpu_s() - begin)
}

/// Reads the kernel files that a live host reads in each period: two for the host, one for each VM, three for each vCPU.
/// Unreadable files cost only the failed attempt.
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

/// Returns the CPU time of one period with a number of VMs: deciding, and reading. The median of some.
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
