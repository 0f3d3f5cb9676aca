//! Scenarios that come with the simulator, and one that is made to fit any machine.

use homenode_machine::Machine;
use homenode_units::{Bytes, Ns};

use super::{ArrivalOrder, Scenario, VmSpec};
use crate::workload::{self, Threads, Workload};

macro_rules! builtin {
    ($($name:literal),* $(,)?) => {
        /// Names and texts of the scenarios that come with the simulator, sorted by name.
        const BUILTIN: &[(&str, &str)] = &[
            $(($name, include_str!(concat!("../../../../data/scenarios/", $name, ".toml"))),)*
        ];
    };
}

builtin!(
    "balloon",
    "churn",
    "epyc-services",
    "flip",
    "memory-overcommit",
    "move-memory",
    "native48",
    "numa-policies",
    "overcommit",
    "permits",
    "phase-change",
    "tavo-mixed",
    "xen48",
);

impl Scenario {
    /// Names of the scenarios that come with the simulator.
    pub fn names() -> impl Iterator<Item = &'static str> {
        BUILTIN.iter().map(|(name, _)| *name)
    }

    /// Returns the built-in scenario with this name, if there is one.
    pub fn builtin(name: &str) -> Option<Scenario> {
        let text = Scenario::builtin_text(name)?;
        // A test reads every built-in scenario, so none fails here.
        Some(Scenario::from_toml(&format!("data/scenarios/{name}.toml"), text).expect("embedded scenario"))
    }

    /// Returns the text of the file of a built-in scenario.
    pub fn builtin_text(name: &str) -> Option<&'static str> {
        let (_, text) = BUILTIN.iter().find(|(known, _)| *known == name)?;
        Some(text)
    }

    /// Returns the default scenario: a mixed set of VMs on the quad-socket R910 of \[TAVO\].
    pub fn tavo_mixed() -> Scenario {
        Scenario::builtin("tavo-mixed").expect("it comes with the twin")
    }

    /// Returns a scenario of one VM that runs this workload and has enough memory for it. The VM has one vCPU for a program of
    /// one thread, else four.
    pub fn alone(workload: Workload) -> Scenario {
        let threads = workload.program.as_ref().map(|program| program.threads);
        let vcpus = if threads == Some(Threads::OnePerVcpu) {
            4
        } else {
            1
        };
        let footprint = workload
            .program
            .as_ref()
            .map_or(Bytes::ZERO, |program| program.footprint(vcpus));
        // Half a GiB is more than the guest's kernel needs.
        let gib = Bytes::from_gib(1).0;
        let memory = footprint.0.saturating_add(gib / 2).checked_next_multiple_of(gib);
        let memory = Bytes(memory.unwrap_or(u64::MAX));
        let vm = VmSpec::new("vm1", vcpus, memory, &workload.name);
        let mut scenario = Scenario::of(&workload.name, vec![vm]);
        scenario.about = format!("{}, alone.", workload.about);
        scenario.with_workload(workload)
    }

    /// Returns a mixed set of VMs sized for a machine. Each VM has half of a node's CPUs (at most 8) and half of its memory (at
    /// most 8 GiB). Together they have about seven eighths of the machine's CPUs. The programs take turns in the order below as
    /// far as their memory fits, and are shortened to about 60 seconds of a solo run.
    pub fn mixed_for(machine: &Machine, seed: u64) -> Scenario {
        const PROGRAMS: [&str; 8] = [
            "cg.B", "povray", "soplex", "sp.B", "ep.B", "milc", "lu.B", "sphinx3",
        ];
        const SOLO_S: f64 = 60.0;
        let cpus_least = machine
            .nodes
            .values()
            .map(|n| n.cpus.len())
            .filter(|n| *n > 0)
            .min()
            .unwrap_or(1);
        let memory_least = machine
            .nodes
            .values()
            .map(|n| n.memory_bytes)
            .filter(|m| *m > Bytes::ZERO)
            .min();
        let vcpus = (cpus_least / 2).clamp(1, 8) as u16;
        let half = Bytes::from_mib(memory_least.unwrap_or_default().0 / 2 / Bytes::from_mib(1).0);
        let memory = half.min(Bytes::from_gib(8));
        let count = (machine.cpus.len() * 7 / 8 / usize::from(vcpus)).max(1);
        let host: Bytes = machine.nodes.values().map(|n| n.memory_bytes).sum();
        let mut room = Bytes(host.0 / 10 * 8);
        let mut vms: Vec<VmSpec> = Vec::new();
        for name in PROGRAMS.iter().cycle().take(count.max(PROGRAMS.len()) * 2) {
            let workload = workload::builtin(name).expect("listed workloads come with the twin");
            let program = workload.program.as_ref().expect("listed workloads have programs");
            let footprint = program.footprint(vcpus) + crate::guest::boot_footprint(memory);
            if vms.len() == count || footprint > memory || footprint > room {
                continue;
            }
            room = room.saturating_sub(footprint);
            let solo_s = machine
                .hardware
                .as_ref()
                .map_or(SOLO_S, |hw| program.solo_seconds(machine, hw));
            let spec = VmSpec::new(&format!("vm{}-{name}", vms.len() + 1), vcpus, memory, name);
            vms.push(
                spec.arriving(Ns::from_millis(700 * vms.len() as u64))
                    .doing((SOLO_S / solo_s).min(4.0)),
            );
        }
        let mut scenario = Scenario::of(&format!("mixed-{}", machine.name), vms);
        scenario.about = "A mixed set of VMs sized for the machine.".to_owned();
        scenario.machine = Some(machine.name.clone());
        scenario.seed = seed;
        scenario.arrival_order = ArrivalOrder::BySeed;
        scenario.arrival_jitter = Ns::from_millis(500);
        scenario
    }
}
