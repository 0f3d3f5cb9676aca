//! `homenode sim`: simulates a scenario and shows the results.

use std::path::PathBuf;

use homenode_agent::Show;
use homenode_agent::trace::TraceFile;
use homenode_control::{Config, Control, Cycle};
use homenode_reproduce::jobs::Progress;
use homenode_screens::printable::OneLine;
use homenode_search::contender::Contender;
use homenode_search::program::ANSWER_MAX;
use homenode_search::trial::{self, Simulation, Trial, run_all, sentences};
use homenode_twin::Setup;
use homenode_twin::{Disturbance, EPOCH_DEFAULT, EventReport, Scenario, TwinReport};
use homenode_units::{Ns, Pages};
use schemars::JsonSchema;
use serde::Serialize;

use crate::bad_input;
use crate::list::{self, Entry};
use crate::options::{OutFile, ShownArgs, TwinKernelArgs, time_within};
use crate::output::Output;
use crate::print::{millis, or_dash, percent, table};
use crate::settings;
use crate::trial::{about_input, side_by_side};
use crate::twin;

/// Options of `sim`.
#[derive(Debug, clap::Args)]
pub(crate) struct SimArgs {
    /// A scenario file, a workload file, or the name of a built-in scenario
    #[arg(value_name = "SCENARIO", required_unless_present = "list")]
    pub scenario: Option<String>,
    /// A seed other than the scenario's: same seed, same run
    #[arg(long)]
    pub seed: Option<u64>,
    /// A machine other than the scenario's: a preset's name, or a machine file
    #[arg(long, value_name = "NAME|FILE")]
    pub machine: Option<String>,
    /// Run the scenario under these policies (`default` means no policy) instead of its own; `exec:PROGRAM ARG...` is a program
    /// that reads views and answers with plans (docs/POLICIES.md). May be given several times
    #[arg(long = "policy", value_name = "POLICY")]
    pub policies: Vec<Contender>,
    /// Time limit for each answer of a policy that is a program
    #[arg(long, value_name = "DURATION", default_value_t = ANSWER_MAX)]
    pub answer_within: Ns,
    /// Show policies a host that differs from the simulated one in these ways, separated by commas: memory-waits, replacement,
    /// noise, no-bandwidth, no-llc-counters. A scenario's `[disturbance]` also sets the amounts
    #[arg(long, value_name = "NAMES")]
    pub disturb: Option<Disturbance>,
    #[command(flatten)]
    pub kernel: TwinKernelArgs,
    /// Resolution of the simulation, from 10us to 10ms
    #[arg(long, value_name = "DURATION", value_parser = epoch, default_value_t = EPOCH_DEFAULT)]
    pub epoch: Ns,
    /// Configuration file (TOML) for the policies; `--policy` selects the policies
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Write a trace for Perfetto's viewer (docs/HISTORY.md)
    #[arg(long, value_name = "FILE")]
    pub trace: Option<OutFile>,
    #[command(flatten)]
    pub shown: ShownArgs,
    /// List the built-in scenarios
    #[arg(long, conflicts_with = "scenario")]
    pub list: bool,
}

fn epoch(text: &str) -> anyhow::Result<Ns> {
    time_within(text, ("10us", "10ms"))
}

/// Runs a scenario under its policies, or lists the built-in scenarios.
///
/// # Errors
/// Bad input; a scenario that the machine cannot run.
pub(crate) fn sim(args: &SimArgs) -> anyhow::Result<()> {
    let mut output = Output::new(args.shown.json);
    let Some(what) = args.scenario.as_deref().filter(|_| !args.list) else {
        list(&mut output);
        return Ok(());
    };
    let scenario = twin::scenario(what)?;
    let disturbance = args.disturb.unwrap_or(scenario.disturbance);
    let scenario = args.kernel.of(scenario.disturbed(disturbance));
    let spec = Setup {
        machine: twin::machine_for(&scenario, what, args.machine.as_deref())?,
        seed: args.seed.unwrap_or(scenario.seed),
        epoch: args.epoch,
        scenario,
    };
    let config = match &args.config {
        Some(file) => settings::of_file(file, &spec.machine)?,
        None => Config::default(),
    };
    let contenders = contenders(args, &spec.scenario)?;
    let mut trace = args
        .trace
        .as_deref()
        .map(TraceFile::create)
        .transpose()
        .map_err(bad_input)?;
    let mut traced = None;
    let progress = Progress::new("");
    let watch = |contender: &Contender, cycle: &Cycle, control: &Control| {
        show_progress(&progress, &spec, (contender, &contenders), cycle.status.at_ns);
        let Some(trace) = &mut trace else { return };
        if traced.as_ref() != Some(contender) {
            traced = Some(contender.clone());
            trace.run(contender.name(), &spec.machine);
        }
        trace.cycle(cycle, control.sample());
    };
    let trials: anyhow::Result<Vec<Trial>> = run_all(&spec, &config, &contenders, watch).collect();
    let trials = trials.map_err(about_input)?;
    drop(progress);
    if let Some(trace) = trace {
        trace.finish()?;
    }
    show(&spec, &trials, &mut output);
    let built = (env!("CARGO_PKG_VERSION"), env!("HOMENODE_COMMIT"));
    let simulation = Simulation::of(&spec, &config, &trials, built);
    output.object("simulation", serde_json::json!(simulation));
    Ok(())
}

fn show_progress(progress: &Progress, spec: &Setup, (contender, all): (&Contender, &[Contender]), now: Ns) {
    let (scenario, most) = (OneLine(&spec.scenario.name), spec.scenario.duration);
    let text = format!(
        "{scenario} under {}: {now} of at most {most}",
        OneLine(contender.name())
    );
    // The runs before this one count in full, even if their programs ended early.
    let ended = all.iter().position(|one| std::ptr::eq(one, contender));
    let runs = ended.unwrap_or_default() as f64 + now.as_secs_f64() / most.as_secs_f64();
    progress.at(&text, runs / all.len() as f64);
}

/// The policies on the command line, else those that the scenario names.
fn contenders(args: &SimArgs, scenario: &Scenario) -> anyhow::Result<Vec<Contender>> {
    if !args.policies.is_empty() {
        let asked = args.policies.iter().cloned();
        return Ok(asked
            .map(|contender| contender.within(args.answer_within))
            .collect());
    }
    trial::contenders(scenario).map_err(bad_input)
}

/// The built-in scenarios.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Scenarios {
    scenarios: Vec<Entry>,
}

fn list(output: &mut Output) {
    let entries = list::scenarios();
    for entry in &entries {
        output.line(&format!("{:<18} {}", entry.name, entry.about));
    }
    let scenarios = Scenarios { scenarios: entries };
    output.object("scenarios", serde_json::json!(scenarios));
}

fn show(spec: &Setup, trials: &[Trial], output: &mut Output) {
    output.line(&format!(
        "{} on {}, seed {}, epoch {}, warm-up {}, at most {}",
        spec.scenario.name,
        spec.machine.name,
        spec.seed,
        spec.epoch,
        spec.scenario.warm_up,
        spec.scenario.duration
    ));
    if !spec.scenario.disturbance.is_none() {
        output.line(&format!("disturbed: {}", spec.scenario.disturbance));
    }
    if let Some(is_on) = spec.scenario.numa_balancing {
        output.line(&format!(
            "NUMA balancing of the host's kernel: {}",
            if is_on { "on" } else { "off" }
        ));
    }
    for trial in trials {
        let report = &trial.report;
        output.text(format_args!(
            "\nUnder {}: {} decisions, ended at {:.1}s\n\n{}\n\n{}",
            trial.policy,
            trial.decisions,
            report.at_ns.as_secs_f64(),
            vms(report),
            nodes(report)
        ));
        let more = [
            requests(report),
            permits(report),
            memory(report),
            programs(report),
            driver_domains(report),
        ];
        for table in more.into_iter().flatten() {
            output.text(format_args!("\n{table}"));
        }
        if !report.events.is_empty() {
            output.line("");
        }
        for event in &report.events {
            output.line(&said(event));
        }
        for note in &report.notes {
            output.line(&format!("note: {note}"));
        }
    }
    if trials.len() > 1 {
        output.text(format_args!("\nSide by side:\n\n{}\n", side_by_side(trials)));
        for sentence in sentences(trials) {
            output.line(&sentence);
        }
    }
}

fn said(event: &EventReport) -> String {
    let result = format!("{:?}", event.result).to_lowercase();
    let note = event
        .note
        .as_ref()
        .map(|note| format!(" ({note})"))
        .unwrap_or_default();
    format!(
        "[{:8.1}s] {} {}: {result}{note}",
        event.at_s, event.event, event.vm
    )
}

fn vms(report: &TwinReport) -> String {
    let seconds = |s: f64| format!("{s:.1}s");
    let rows = report.vms.iter().map(|vm| {
        vec![
            vm.name.clone(),
            vm.workload.clone(),
            or_dash(vm.arrival_s, seconds),
            or_dash(vm.runtime_s, seconds),
            or_dash(vm.llc_miss_rate, percent),
            or_dash(vm.local_access_ratio, percent),
            vm.node_changes.to_string(),
            seconds(vm.waiting_s),
        ]
    });
    let header = [
        "VM",
        "workload",
        "started",
        "runtime",
        "LLC miss",
        "local",
        "node changes",
        "waiting",
    ];
    table(&header, rows).to_string()
}

/// VMs that serve requests, if there are any.
fn requests(report: &TwinReport) -> Option<String> {
    let serving = report.vms.iter().filter_map(|vm| Some((vm, vm.requests?)));
    let rows: Vec<_> = serving
        .map(|(vm, requests)| {
            vec![
                vm.name.clone(),
                requests.count.to_string(),
                millis(requests.mean_ms),
                millis(requests.p50_ms),
                millis(requests.p99_ms),
            ]
        })
        .collect();
    some(&["VM", "requests", "mean", "p50", "p99"], rows)
}

/// VMs with a permit, if there are any.
fn permits(report: &TwinReport) -> Option<String> {
    let booked = report.vms.iter().filter_map(|vm| Some((vm, vm.permit?)));
    let rows: Vec<_> = booked
        .map(|(vm, permit)| {
            vec![
                vm.name.clone(),
                permit.booked.to_string(),
                permit.booked.units_per_slice().to_string(),
                format!("{:.0}", permit.used_per_slice),
                permit.punished_count.to_string(),
                format!("{:.1}s", permit.throttled_s),
            ]
        })
        .collect();
    let header = [
        "VM",
        "permit",
        "booked per slice",
        "used",
        "punished",
        "kept from running",
    ];
    some(&header, rows)
}

/// Memory of VMs that have a floor, if there are any.
fn memory(report: &TwinReport) -> Option<String> {
    let some_may_be_taken = report.vms.iter().filter_map(|vm| Some((vm, vm.memory?)));
    let rows: Vec<_> = some_may_be_taken
        .map(|(vm, memory)| {
            vec![
                vm.name.clone(),
                memory.given_bytes.to_string(),
                memory.held_bytes.to_string(),
                memory.faults.to_string(),
            ]
        })
        .collect();
    let header = ["VM", "memory at the end", "of the host's", "faults on swap"];
    some(&header, rows)
}

/// Programs of VMs that run several, if there are any.
fn programs(report: &TwinReport) -> Option<String> {
    let seconds = |s: f64| format!("{s:.1}s");
    let all = report
        .vms
        .iter()
        .flat_map(|vm| vm.programs.iter().map(move |program| (vm, program)));
    let rows: Vec<_> = all
        .map(|(vm, program)| {
            vec![
                vm.name.clone(),
                program.workload.clone(),
                seconds(program.began_s),
                or_dash(program.runtime_s, seconds),
                Pages(program.pages_touched).to_bytes().to_string(),
                Pages(program.pages_touched_away).to_bytes().to_string(),
            ]
        })
        .collect();
    let header = [
        "VM",
        "program",
        "began",
        "runtime",
        "memory taken",
        "away from home",
    ];
    some(&header, rows)
}

/// VMs with a driver domain, if there are any.
fn driver_domains(report: &TwinReport) -> Option<String> {
    let with = report.vms.iter().filter_map(|vm| Some((vm, vm.driver_domain?)));
    let rows: Vec<_> = with
        .map(|(vm, domain)| {
            vec![
                vm.name.clone(),
                domain.pages_flipped.to_string(),
                domain.pages_copied.to_string(),
                Pages(domain.pages_away).to_bytes().to_string(),
                Pages(domain.pool_pages).to_bytes().to_string(),
                format!("{:.1}s", domain.backend_s),
            ]
        })
        .collect();
    let header = [
        "VM",
        "pages flipped",
        "pages copied",
        "away from home",
        "pool",
        "driver domain's CPU",
    ];
    some(&header, rows)
}

/// Returns a table, or `None` if it has no rows.
fn some(header: &[&str], rows: Vec<Vec<String>>) -> Option<String> {
    (!rows.is_empty()).then(|| table(header, rows).to_string())
}

fn nodes(report: &TwinReport) -> String {
    let rows = report.nodes.iter().map(|(node, on)| {
        vec![
            node.to_string(),
            format!("{:.1}", on.cpus_busy),
            format!("{:.2}GB/s", on.bandwidth_bytes_per_s.as_f64() / 1e9),
        ]
    });
    table(&["node", "CPUs busy", "bandwidth"], rows).to_string()
}
