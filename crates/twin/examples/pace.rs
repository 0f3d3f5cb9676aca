//! Measures the speed of the bench's cases, in CPU time of this process, and prints a digest of each outcome. Run it with two
//! builds in turn to compare their speed and to see whether their outcomes are equal byte for byte.
//!
//! `cargo run --release -p homenode-twin --example pace [PART OF A CASE'S NAME]`
//!
//! `cargo run --release -p homenode-twin --example pace outcomes` prints only digests: of the cases, and of the built-in
//! scenarios under three seeds and every hypervisor that each can have.
//!
//! `cargo run --release -p homenode-twin --example pace epochs` runs the cases with other epoch lengths, and reports how far the
//! VMs' progress then differs from their progress with the finest.

#![allow(clippy::print_stdout)] // an example talks to a person

#[path = "../benches/cases/mod.rs"]
mod cases;

use cases::Case;
use homenode_machine_files::preset;
use homenode_twin::{Hypervisor, Scenario, Twin};
use homenode_units::Ns;
use rustix::time::{ClockId, clock_gettime};

/// Simulated time before the measurement starts, and simulated time measured.
const WARM_UP: Ns = Ns::from_secs(10);
const MEASURED_S: u64 = 20;

fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Returns the FNV-1a hash of a report's JSON.
fn digest(twin: &Twin) -> u64 {
    let text = serde_json::to_string(&twin.report()).expect("a report is JSON");
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Measures a part of a run: returns simulated seconds per second of CPU time, and a digest.
fn pace(case: &Case, warm_up: Ns, until: Ns) -> (f64, u64) {
    let mut twin = case.twin();
    twin.run_to_end(warm_up);
    let (began, before) = (twin.now(), cpu_seconds());
    twin.run_to_end(until);
    let took = cpu_seconds() - before;
    (Ns(twin.now().0 - began.0).as_secs_f64() / took, digest(&twin))
}

fn paces(part: &str) {
    println!("| case | simulated seconds per second of CPU | digest |");
    println!("|---|---|---|");
    let until = Ns(WARM_UP.0 + Ns::from_secs(MEASURED_S).0);
    let steady = cases::all().into_iter().map(|case| (case, WARM_UP, until));
    let tavo = Case {
        name: "r910, tavo-mixed, whole",
        machine: "r910",
        scenario: Scenario::tavo_mixed(),
        every_epoch: false,
    };
    let whole = [
        (tavo, Ns::ZERO, Ns::from_secs(400)),
        (cases::flipping(), Ns::ZERO, cases::FLIPPING_LASTS),
    ];
    for (case, warm_up, until) in steady.chain(whole).filter(|(case, ..)| case.name.contains(part)) {
        let (pace, digest) = pace(&case, warm_up, until);
        println!("| {} | {pace:.1} | {digest:016x} |", case.name);
    }
}

fn outcomes() {
    for name in Scenario::names() {
        let mut scenario = Scenario::builtin(name).expect("it comes with the twin");
        let machine = preset(scenario.machine.as_deref().unwrap_or("r910")).expect("a preset");
        for hypervisor in [Hypervisor::Kvm, Hypervisor::Xen, Hypervisor::Native] {
            scenario.hypervisor = hypervisor;
            for seed in 1..=3 {
                let outcome = Twin::new(machine.clone(), &scenario, seed).map(|mut twin| {
                    twin.run_to_end(scenario.duration);
                    digest(&twin)
                });
                match outcome {
                    Ok(digest) => println!("{name} {hypervisor:?} {seed} {digest:016x}"),
                    Err(error) => println!("{name} {hypervisor:?} {seed} {error}"),
                }
            }
        }
    }
    for case in cases::all() {
        let mut twin = case.twin();
        twin.run_to_end(Ns::from_secs(20));
        println!("{} {:016x}", case.name, digest(&twin));
    }
}

/// Returns the billions of instructions that each VM runs, and simulated seconds per second of CPU time.
fn progress(case: &Case, epoch: Ns) -> (Vec<f64>, f64) {
    const LASTS: Ns = Ns::from_secs(30);
    let machine = preset(case.machine).expect("a preset");
    let mut twin = Twin::with_epoch(machine, &case.scenario, 1, epoch).expect("the scenario fits");
    let before = cpu_seconds();
    twin.run_to_end(LASTS);
    let pace = LASTS.as_secs_f64() / (cpu_seconds() - before);
    let vms = twin.report().vms;
    (vms.iter().map(|vm| vm.instructions_g).collect(), pace)
}

fn epochs() {
    println!(
        "| case | epoch, ms | simulated seconds per second of CPU | all VMs' progress | one VM's, root mean square |"
    );
    println!("|---|---|---|---|---|");
    for case in cases::all().iter().filter(|case| !case.every_epoch) {
        let (finest, _) = progress(case, Ns(250_000));
        for epoch_us in [500, 1000, 2000, 4000] {
            let (vms, pace) = progress(case, Ns(1000 * epoch_us));
            let off = |(now, finest): (&f64, &f64)| {
                let off = now / finest - 1.0;
                off * off
            };
            let square = vms.iter().zip(&finest).map(off).sum::<f64>() / vms.len() as f64;
            let all = vms.iter().sum::<f64>() / finest.iter().sum::<f64>() - 1.0;
            println!(
                "| {} | {} | {pace:.0} | {:+.2} % | {:.2} % |",
                case.name,
                epoch_us as f64 / 1000.0,
                100.0 * all,
                100.0 * square.sqrt()
            );
        }
    }
}

fn main() {
    let argument = std::env::args().nth(1).unwrap_or_default();
    match argument.as_str() {
        "outcomes" => outcomes(),
        "epochs" => epochs(),
        part => paces(part),
    }
}
