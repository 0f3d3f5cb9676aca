//! `homenode record scenario`: turns a stretch of a recorded run into a scenario for the simulator.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use homenode_agent::stretch::{Stretch, StretchError};
use homenode_calibrate::recorded::{About, Figures, Purpose, Recorded, RecordedError, Seen};
use homenode_control::{Config, PolicySet};
use homenode_machine::Machine;
use homenode_machine_files::{Comments, preset, preset_names, to_toml};
use homenode_recorder::{Archive, Kind};
use homenode_reproduce::jobs::Progress;
use homenode_screens::wall::Wall;
use homenode_search::contender::Contender;
use homenode_twin::{Scenario, Setup};
use homenode_units::Ns;
use schemars::JsonSchema;
use serde::Serialize;

use super::{HistoryArgs, SpanArgs, open};
use crate::options::{OutFile, ShownArgs};
use crate::print::{or_dash, percent, print_json, table};
use crate::{bad_input, trial, twin};

/// Options of `record scenario`.
#[derive(Debug, clap::Args)]
pub(crate) struct ScenarioArgs {
    #[command(flatten)]
    span: SpanArgs,
    /// File for the scenario
    #[arg(short, long, value_name = "FILE.toml")]
    output: OutFile,
    /// The machine: a preset, or a file from 'homenode calibrate' [default: the machine of the recording]
    #[arg(long, value_name = "MACHINE")]
    machine: Option<String>,
    /// How many times to correct the scenario after a simulated run; with 0 the scenario has the recorded counts
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = clap::value_parser!(u32).range(0..=100))]
    rounds: u32,
    #[command(flatten)]
    history: HistoryArgs,
    #[command(flatten)]
    shown: ShownArgs,
}

/// The document of `homenode record scenario`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct RecordScenario {
    /// The scenario's file.
    file: String,
    /// The machine's file next to the scenario's file, if the machine is not a preset.
    machine_file: Option<String>,
    /// The run in the history.
    run: i64,
    /// Start of the stretch, by the wall clock.
    from: String,
    /// End of the stretch, by the wall clock.
    to: String,
    /// Each VM, as recorded and as simulated.
    vms: Vec<ScenarioVm>,
    /// Assumptions about all VMs.
    assumed: Vec<String>,
}

/// A VM of the scenario.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ScenarioVm {
    /// The VM's name in the scenario.
    name: String,
    /// The name of the VM's workload.
    workload: String,
    /// Figures from the recording.
    recorded: Figures,
    /// The twin's figures when it simulates the scenario; absent if it was not simulated.
    simulated: Option<Figures>,
    /// Assumptions about this VM.
    assumed: Vec<String>,
}

/// Runs `homenode record scenario`.
///
/// # Errors
/// No history, no samples at that time, a machine that cannot be simulated.
pub(crate) fn scenario(args: &ScenarioArgs) -> anyhow::Result<()> {
    if args.output.extension().is_none_or(|end| end != "toml") {
        let file = args.output.display();
        return Err(bad_input(format!(
            "--output {file}: the file name must end with `.toml`; otherwise `homenode sim` takes it for a scenario's name"
        )));
    }
    let path = args.history.place();
    let archive = open(&path)?;
    let (from, to) = args.span.range()?;
    let said = |why: String| bad_input(format!("{}: {why}", path.display()));
    let span = (from.unwrap_or(i64::MIN), to.unwrap_or(i64::MAX));
    let mut seen = None;
    let stretch = Stretch::read(&archive, span, |machine, sample| {
        seen.get_or_insert_with(|| Seen::new(machine)).take(sample);
    });
    let stretch = match stretch {
        Err(StretchError::Empty) => return Err(said(what_is_kept(&archive)?)),
        Err(StretchError::Record(error)) => return Err(error.into()),
        stretch => stretch.map_err(|error| said(error.to_string()))?,
    };
    let seen = seen.unwrap_or_else(|| Seen::new(&stretch.machine));
    let machine = args
        .machine
        .as_deref()
        .map_or_else(|| Ok(stretch.machine.clone()), twin::machine)?;
    let mut recorded =
        Recorded::of(&machine, &seen).map_err(|error: RecordedError| said(error.to_string()))?;
    let (named, machine_file) = name_machine(&machine, &args.output)?;
    let machine_file = machine_file.map(|file| OutFile::further("--output", file));
    let machine_file = machine_file.transpose()?;
    let about = about(&stretch, named);
    let lead = recorded.lead;
    let progress = Progress::new("");
    let simulated = recorded.fit(&machine, &about, args.rounds, |scenario, round| {
        let done = f64::from(round) / f64::from(args.rounds);
        progress.at(
            &format!("simulating, round {} of {}", round + 1, args.rounds),
            done,
        );
        simulate(&machine, &stretch.config, scenario, lead)
    });
    drop(progress);
    let simulated = simulated.map_err(trial::about_input)?;
    let text = recorded.text(&about, Purpose::File);
    // Make sure the simulator can read what is written.
    Scenario::from_toml(&args.output.display().to_string(), &text).map_err(bad_input)?;
    if let Some(file) = &machine_file {
        write(file, &to_toml(&machine, &Comments::default()))?;
    }
    write(&args.output, &text)?;
    let vms = recorded
        .vms
        .iter()
        .zip(simulated)
        .map(|(vm, simulated)| ScenarioVm {
            name: vm.name.clone(),
            workload: vm.workload.clone(),
            recorded: vm.recorded(),
            simulated,
            assumed: vm.assumed().collect(),
        });
    let made = RecordScenario {
        file: args.output.display().to_string(),
        machine_file: machine_file.map(|file| file.display().to_string()),
        run: stretch.run,
        from: Wall(stretch.span.0).to_string(),
        to: Wall(stretch.span.1).to_string(),
        vms: vms.collect(),
        assumed: about.notes,
    };
    if args.shown.json {
        return print_json("record-scenario", &made);
    }
    show(&made, &recorded);
    Ok(())
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Describes the samples that the history has, for an error about a time without samples.
fn what_is_kept(archive: &Archive) -> anyhow::Result<String> {
    Ok(match archive.span(Kind::Sample)? {
        None => "the history has no samples: it keeps them only for `record.samples_hours`".to_owned(),
        Some((from, to)) => {
            let (from, to) = (Wall(from), Wall(to));
            format!("the history has no samples of that time; it has samples from {from} to {to}")
        }
    })
}

/// Returns the machine's name in the scenario, and the file to write if the machine is not a preset.
fn name_machine(machine: &Machine, output: &Path) -> anyhow::Result<(String, Option<PathBuf>)> {
    let is_preset = preset_names()
        .any(|name| *name == *machine.name && preset(name).is_ok_and(|preset| preset == *machine));
    if is_preset {
        return Ok((machine.name.clone(), None));
    }
    let file = output.with_extension("machine.toml");
    let name = file.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| {
        bad_input(format!(
            "{}: a scenario cannot refer to a file whose name is not valid UTF-8",
            output.display()
        ))
    })?;
    Ok((name.to_owned(), Some(file)))
}

fn about(stretch: &Stretch, machine: String) -> About {
    let (from, to) = (Wall(stretch.span.0), Wall(stretch.span.1));
    let then = stretch.config.policies;
    let mut policies = vec![then.name().to_owned()];
    policies.extend((then != PolicySet::Default).then(|| PolicySet::Default.name().to_owned()));
    let mut notes = vec![
        "programs end when they have done the work that was counted: sooner if they run faster".to_owned(),
        "I/O, barriers and address translation are not simulated: core cycles include their cost".to_owned(),
        "guests map their memory in pages of 4 KiB, and all vCPUs have the same weight".to_owned(),
        "the host's processes outside VMs are the twin's, not the recorded ones".to_owned(),
    ];
    notes.extend(stretch.notes.iter().cloned());
    About {
        title: format!("{}, {from} to {to}", stretch.host),
        source: format!("run {} on {}, {from} to {to}", stretch.run, stretch.host),
        machine,
        policies,
        notes,
    }
}

/// Simulates the scenario under the recorded settings, and returns the samples seen after the lead-in.
fn simulate(machine: &Machine, config: &Config, scenario: Scenario, lead: Ns) -> anyhow::Result<Seen> {
    let mut seen = Seen::new(machine);
    let seed = scenario.seed;
    let setup = Setup::new(machine.clone(), scenario, seed);
    Contender::PolicySet(config.policies).run(&setup, config, |_, control| {
        if let Some(sample) = control.sample().filter(|sample| sample.at >= lead) {
            seen.take(sample.clone());
        }
        Ok(())
    })?;
    Ok(seen)
}

fn show(made: &RecordScenario, recorded: &Recorded) {
    say!(
        "{}: run {} from {} to {}, {} VMs",
        made.file,
        made.run,
        made.from,
        made.to,
        made.vms.len()
    );
    if let Some(file) = &made.machine_file {
        say!("{file}: its machine");
    }
    let two = |of: &dyn Fn(&Figures) -> String, vm: &ScenarioVm| {
        let simulated = vm.simulated.as_ref().map_or("-".to_owned(), of);
        format!("{} / {simulated}", of(&vm.recorded))
    };
    let rows = made.vms.iter().map(|vm| {
        vec![
            vm.name.clone(),
            two(&|figures| format!("{:.2}", figures.cpus_used), vm),
            two(&|figures| or_dash(figures.llc_miss_rate, percent), vm),
            two(&|figures| or_dash(figures.local_access_ratio, percent), vm),
            two(
                &|figures| {
                    or_dash(figures.bandwidth_bytes_per_s, |bytes| {
                        format!("{:.2}GB/s", bytes / 1e9)
                    })
                },
                vm,
            ),
        ]
    });
    let header = [
        "VM (recorded / simulated)",
        "CPUs",
        "LLC miss",
        "local",
        "traffic",
    ];
    say!("{}", table(&header, rows));
    for note in &made.assumed {
        say!("assumed: {note}");
    }
    for (note, vms) in recorded.assumed() {
        say!("assumed of {}: {note}", vms.join(", "));
    }
    say!("simulate it: homenode sim {}", made.file);
}
