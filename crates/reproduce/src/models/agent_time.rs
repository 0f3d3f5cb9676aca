//! Measures the cost of monitoring and deciding, as CPU time of this program on the current machine ([TAVO, figure 8]).
//!
//! Left out are hardware counters and queries to libvirt, which need a host with VMs. The `numa_maps` file of a VM's process
//! is longer than the one read here.

use std::fs;

use anyhow::{Result, ensure};
use homenode_control::{Config, Control, Mode};
use homenode_host::Host;
use homenode_twin::{Scenario, Twin, VmSpec};
use homenode_units::{Bytes, Ns};

use crate::design::array::{Array, Named};
use crate::models::{Values, cpu_s, named};
use homenode_units::stats::median;

const MACHINE: &str = "r910";
const PERIODS: usize = 7;
const VCPUS: u16 = 4;

/// Returns `deciding_s` and `reading_s`: CPU seconds per period, for the numbers of VMs on axis `vms`.
pub(super) fn agent(value: Values<'_>) -> Result<Named> {
    let vms = value("vms")?;
    let mut reading = Vec::new();
    let deciding = vms.map_numbers(|count| {
        let (deciding_s, reading_s) = period(count as usize)?;
        reading.push(reading_s);
        Ok(deciding_s)
    })?;
    let reading = Array::of_numbers(vms.axes.clone(), reading);
    Ok(named([("deciding_s", deciding), ("reading_s", reading)]))
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let begin = cpu_s();
    let result = work();
    (result, cpu_s() - begin)
}

/// Reads the kernel files that an agent on a real host reads in each period: two for the host, one for each VM, and three for
/// each vCPU. If a file cannot be read, only the failed attempt is measured.
fn read_kernel(vms: usize) -> usize {
    let read = |path: &str| fs::read(path).map_or(0, |text| text.len());
    let mut bytes = read("/proc/stat") + read("/proc/meminfo");
    for _ in 0..vms {
        bytes += read("/proc/self/numa_maps");
        for _ in 0..VCPUS {
            for file in ["stat", "status", "schedstat"] {
                bytes += read(&format!("/proc/thread-self/{file}"));
            }
        }
    }
    bytes
}

/// Returns the CPU time of deciding and of reading in one period with this number of VMs, as medians over several periods.
fn period(vms: usize) -> Result<(f64, f64)> {
    let machine = homenode_machine_files::preset(MACHINE)?;
    let specs = (0..vms).map(|at| VmSpec::new(&format!("vm{at}"), VCPUS, Bytes::from_gib(2), "povray"));
    let scenario = Scenario::of("overhead", specs.collect());
    let mut twin = Twin::new(machine.clone(), &scenario, 1)?;
    let mut control = Control::new(Config::default(), Mode::Act);
    let (mut deciding, mut reading) = (Vec::new(), Vec::new());
    for _ in 0..PERIODS {
        twin.wait(Ns::from_secs(1));
        let sample = twin.sample()?;
        let (begun, begin_s) = timed(|| control.begin(&machine, sample));
        let answer = begun.commit(&mut twin);
        let (_, finish_s) = timed(|| control.finish(&machine, begun, answer));
        let (bytes, read_s) = timed(|| read_kernel(vms));
        ensure!(bytes > 0, "this machine's /proc cannot be read");
        deciding.push(begin_s + finish_s);
        reading.push(read_s);
    }
    let middle = |times: Vec<f64>| median(times).unwrap_or(f64::NAN);
    Ok((middle(deciding), middle(reading)))
}
