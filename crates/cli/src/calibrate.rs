//! `homenode calibrate`: measures this host, writes it as a machine file, and checks the simulator against it. With `--pool`,
//! measures the pool of pages for I/O of a simulated host's VM.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use homenode_calibrate::pool::{self, PoolError, pool};
use homenode_calibrate::validate::{self, ValidateError, Validation};
use homenode_calibrate::{
    CalibrateError, Calibration, MachineFile, Options, Spread, calibrate, machine_file,
};
use homenode_load::{Kernel, worker};
use homenode_machine::Machine;
use homenode_machine_files::sysfs;
use homenode_units::{Bytes, CpuId, NodeId, Ns, Pages};
use schemars::JsonSchema;
use serde::Serialize;

use crate::bad_input;
use crate::options::{OutFile, ShownArgs};
use crate::print::{or_dash, percent, print_json, table};
use crate::progress::by_step;
use crate::twin;

/// Options of `calibrate`.
#[derive(Debug, clap::Args)]
pub(crate) struct CalibrateArgs {
    /// Write the machine file here; `homenode machine FILE` and `--host twin:FILE` read it
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<OutFile>,
    /// Measure only this node, and assume that all other nodes are equal
    #[arg(long, value_name = "N")]
    pub node: Option<u16>,
    /// Get a first impression in about ten seconds, with smaller buffers and fewer repetitions
    #[arg(long)]
    pub quick: bool,
    /// Approximate time to measure, in seconds; default: 60, or 8 with --quick
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub seconds: Option<u64>,
    /// Afterwards run two processes that share the last-level cache, and compare how much they slow each other down with the
    /// simulator's prediction
    #[arg(long)]
    pub validate: bool,
    /// Measure, on a simulated host instead of this one, how large a static pool of pages for I/O must be: for the scenario's
    /// first VM that exchanges pages with a driver domain. Runs the VM's programs and the built-in ones, each for at most
    /// --seconds of simulated time
    #[arg(long, value_name = "SCENARIO", conflicts_with_all = ["output", "node", "quick", "validate"])]
    pub pool: Option<String>,
    /// With --pool, run this program only; may be repeated
    #[arg(long = "program", value_name = "WORKLOAD", requires = "pool")]
    pub programs: Vec<String>,
    #[command(flatten)]
    pub shown: ShownArgs,
}

/// Options of the worker processes of `calibrate --validate`.
#[derive(Debug, clap::Args)]
pub(crate) struct KernelArgs {
    /// Access pattern, such as `uniform:BYTES` or `mix:BYTES:BYTES`
    #[arg(long)]
    pub kernel: Kernel,
    /// CPU to run on
    #[arg(long)]
    pub cpu: u32,
    /// Node to allocate memory on, if there is a choice
    #[arg(long)]
    pub node: Option<u16>,
}

/// The result of a calibration, for programs.
#[derive(Serialize, JsonSchema)]
pub(crate) struct Calibrated<'a> {
    #[schemars(with = "serde_json::Map<String, serde_json::Value>")]
    calibration: &'a Calibration,
    machine: &'a Machine,
    /// The path of the machine file, if one was written.
    file: Option<String>,
    /// The comparison of the twin with this host, if requested.
    #[schemars(with = "Option<serde_json::Map<String, serde_json::Value>>")]
    validation: Option<&'a Validation>,
}

/// `homenode calibrate`.
///
/// # Errors
/// A node that cannot be measured, a file that cannot be written, a host without two CPUs for the comparison.
pub(crate) fn run(args: &CalibrateArgs) -> anyhow::Result<()> {
    if let Some(scenario) = &args.pool {
        return pool_of(scenario, args);
    }
    // Only the CPUs that this process may use, because the measuring threads run on them.
    let machine = sysfs::read_confined(Path::new("/"))?;
    let seconds = args.seconds.unwrap_or(if args.quick { 8 } else { 60 });
    let options = Options {
        node: args.node.map(NodeId),
        budget: Duration::from_secs(seconds),
        quick: args.quick,
    };
    eprintln!(
        "Measuring {} for about {seconds} s; other programs that run meanwhile affect the figures.",
        machine.name
    );
    let measured = calibrate(&machine, &options, &mut by_step());
    let calibration = measured.map_err(|error| match error {
        CalibrateError::Node { .. } => bad_input(error),
        other => other.into(),
    })?;
    let file = machine_file(&calibration)
        .context("the measured figures do not describe a valid machine: measure again on a quieter host")?;
    if let Some(path) = &args.output {
        std::fs::write(path, &file.text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let validation = args
        .validate
        .then(|| hold_against(&file, args.quick))
        .transpose()?;
    if args.shown.json {
        let calibrated = Calibrated {
            calibration: &calibration,
            machine: &file.machine,
            file: args.output.as_ref().map(|path| path.display().to_string()),
            validation: validation.as_ref(),
        };
        print_json("calibration", &calibrated)?;
    } else {
        crate::print::print(format_args!("{}", figures(&calibration, &file)));
        if let Some(validation) = &validation {
            crate::print::print(format_args!("{}", comparison(validation)));
        }
        match &args.output {
            Some(path) => say!(
                "\nWritten to {}: try `homenode run --host twin:{0} --fast`.",
                path.display()
            ),
            None => say!("\nThe result was not saved; --output FILE saves it as a machine file."),
        }
    }
    Ok(())
}

/// `homenode calibrate --pool`.
fn pool_of(what: &str, args: &CalibrateArgs) -> anyhow::Result<()> {
    let scenario = twin::scenario(what)?;
    let machine = twin::machine_for(&scenario, what, None)?;
    let options = pool::Options {
        programs: args.programs.clone(),
        limit: Ns::from_secs(args.seconds.unwrap_or(60)),
        seed: scenario.seed,
    };
    let found = pool(&machine, &scenario, &options, &mut by_step());
    let found = found.map_err(|error: PoolError| bad_input(error))?;
    if args.shown.json {
        return print_json("pool", &found);
    }
    let rows = found.programs.iter().map(|need| {
        vec![
            need.program.clone(),
            need.pages_max.to_string(),
            Pages(need.pages_max).to_bytes().to_string(),
            need.pages_passed.to_string(),
        ]
    });
    let header = ["program", "pages at once", "", "pages passed"];
    say!("{}\n", table(&header, rows));
    if !found.left_out.is_empty() {
        let (vm, programs) = (&found.vm, found.left_out.join(", "));
        say!("VM {vm} has too little memory for {programs}.\n");
    }
    let (size, exactly) = (found.size_bytes, found.size_bytes.0 / 1024);
    say!(
        "A pool of {size} holds what each of them needs. In the scenario:\n\n    driver_domain = {{ vm = \"{}\", \
         pool = {{ fixed = true, initial = \"{exactly}KiB\" }} }}",
        found.driver_domain
    );
    Ok(())
}

/// Returns the command that starts a worker: this program again.
pub(crate) fn kernel_command(program: &Path) -> impl Fn(Kernel, CpuId, Option<NodeId>) -> Command + use<'_> {
    move |kernel: Kernel, cpu: CpuId, node: Option<NodeId>| {
        let mut command = Command::new(program);
        command.args([
            "calibrate-kernel",
            "--kernel",
            &kernel.to_string(),
            "--cpu",
            &cpu.to_string(),
        ]);
        if let Some(node) = node {
            command.args(["--node", &node.to_string()]);
        }
        command
    }
}

fn hold_against(file: &MachineFile, quick: bool) -> anyhow::Result<Validation> {
    let program =
        std::env::current_exe().context("cannot find this program's own file, which the comparison runs")?;
    let spawn = kernel_command(&program);
    eprintln!("Comparing two processes with the twin.");
    let result = validate::validate(&file.machine, quick, &spawn, &mut by_step());
    result.map_err(|error| match error {
        ValidateError::NoPartners => anyhow::Error::new(error),
        other => anyhow::Error::new(other).context("the comparison with the simulator failed"),
    })
}

/// The hidden `homenode calibrate-kernel`: a worker of `calibrate --validate`.
///
/// # Errors
/// A CPU or memory that is not available.
pub(crate) fn kernel(args: &KernelArgs) -> anyhow::Result<()> {
    worker::die_with_parent()?;
    let (orders, answers) = (std::io::stdin().lock(), std::io::stdout().lock());
    let node = args.node.map(NodeId);
    worker::serve(args.kernel, &[CpuId(args.cpu)], node, orders, answers)
        .with_context(|| format!("kernel {} on CPU {}", args.kernel, args.cpu))
}

/// Returns a row with median, spread and number of repetitions, in this unit.
fn row(name: String, spread: &Spread, unit: &str, scale: f64) -> Vec<String> {
    let spread = spread.map(|value| value * scale);
    let digits = usize::from(spread.median < 100.0) + usize::from(spread.median < 10.0);
    let show = |value: f64| format!("{value:.digits$}");
    vec![
        name,
        format!("{} {unit}", show(spread.median)),
        show(spread.min),
        show(spread.q1),
        show(spread.q3),
        show(spread.max),
        spread.count.to_string(),
        if spread.noisy() {
            "noisy".to_owned()
        } else {
            String::new()
        },
    ]
}

/// Returns a row for each speed: of one thread, and of each pair of nodes.
fn speeds(c: &Calibration) -> Vec<Vec<String>> {
    let ghz = c.clock_hz.median / 1e9;
    let mut rows = vec![row("core clock".into(), &c.clock_hz, "GHz", 1e-9)];
    for (cache, hit_ns, decimals) in [("L1", &c.l1_ns, 1), ("L2", &c.l2_ns, 1), ("LLC", &c.llc_ns, 0)] {
        let name = format!("{cache} hit ({:.decimals$} cycles)", hit_ns.median * ghz);
        rows.push(row(name, hit_ns, "ns", 1.0));
    }
    for pair in &c.pairs {
        let (from, to) = (pair.memory_node, pair.cpu_node);
        rows.push(row(
            format!("latency, memory {from} from node {to}"),
            &pair.latency_ns,
            "ns",
            1.0,
        ));
        for read in &pair.read {
            let name = format!("reads, memory {from} to {} CPUs of node {to}", read.cpus);
            rows.push(row(name, &read.bytes_per_s, "GB/s", 1e-9));
        }
        if let Some(mixed) = &pair.mixed_bytes_per_s {
            rows.push(row(
                format!("reads and writes, memory {from} and node {to}"),
                mixed,
                "GB/s",
                1e-9,
            ));
        }
    }
    rows.push(row(
        "memory latency in base pages".into(),
        &c.latency_base_pages_ns,
        "ns",
        1.0,
    ));
    rows.push(row(
        "misses in flight, chases".into(),
        &c.misses_in_flight,
        "lines",
        1.0,
    ));
    rows.push(row(
        "misses in flight, one stream".into(),
        &c.stream_in_flight,
        "lines",
        1.0,
    ));
    let optional = [
        (
            "LLC capacity in effect",
            c.llc_effective_bytes,
            "MiB",
            1.0 / f64::from(1 << 20),
        ),
        ("TLB, base pages", c.tlb_entries_base, "entries", 1.0),
        ("TLB, huge pages", c.tlb_entries_huge, "entries", 1.0),
        ("two hyperthreads over one", c.smt_throughput, "times", 1.0),
        ("two cores over one", c.two_cores_throughput, "times", 1.0),
        ("interrupt to another CPU", c.interrupt_ns, "ns", 1.0),
    ];
    rows.extend(
        optional
            .into_iter()
            .filter_map(|(name, spread, unit, scale)| Some(row(name.into(), &spread?, unit, scale))),
    );
    rows
}

/// All figures as tables.
fn figures(c: &Calibration, file: &MachineFile) -> String {
    let rows = speeds(c);
    let header = ["", "median", "min", "q1", "q3", "max", "of", ""];
    let mut text = format!("{}\n", table(&header, rows));
    let stated = c.caches.llc_bytes.map(Bytes);
    text.push_str(&format!(
        "\nLLC size: {} according to the kernel, {} in the machine file.\n",
        or_dash(stated, |bytes| bytes.to_string()),
        or_dash(file.machine.llcs.first(), |llc| llc.size_bytes.to_string())
    ));
    let loads = c.loaded.iter().map(|point| {
        let name = format!(
            "{} of {:.1} GB/s",
            percent(point.load),
            point.bytes_per_s.median / 1e9 / point.load
        );
        row(name, &point.latency_ns, "ns", 1.0)
    });
    if !c.loaded.is_empty() {
        text.push_str(&format!(
            "\nMemory latency under load:\n{}\n",
            table(&header, loads)
        ));
    }
    if let Some(fitted) = &c.load_curve {
        text.push_str(&format!(
            "alpha {:.3}, beta {:.4}{}; mean error {:.1} percent\n",
            fitted.curve.alpha,
            fitted.curve.beta,
            if fitted.beta_fitted { "" } else { " (estimate)" },
            fitted.error_mean * 100.0
        ));
    }
    let curve = c.curve.iter().map(|point| {
        row(
            Bytes(point.bytes as u64).to_string(),
            &point.latency_ns,
            "ns",
            1.0,
        )
    });
    text.push_str(&format!("\nLatency by size:\n{}\n", table(&header, curve)));
    text.push_str(&format!("\nMeasured on {} UTC in {:.0} s.\n", c.date, c.seconds));
    for warning in &c.warnings {
        text.push_str(&format!("warning: {warning}\n"));
    }
    text
}

/// Compares measured with predicted figures.
fn comparison(v: &Validation) -> String {
    let rows = v.cases.iter().flat_map(|case| {
        case.sides.iter().zip(["first", "second"]).map(|(side, which)| {
            vec![
                format!("{}, {which}", case.name),
                format!("{:.1}", side.solo_ns.median),
                format!("{:.1}", side.solo_predicted_ns),
                format!("{:.2}", side.slowdown.median),
                format!("{:.2} to {:.2}", side.slowdown.min, side.slowdown.max),
                format!("{:.2}", side.predicted),
                format!("{:+.0}%", side.error * 100.0),
            ]
        })
    });
    let header = [
        "sizes in LLCs",
        "alone ns/line",
        "predicted",
        "slow-down",
        "min to max",
        "predicted",
        "error",
    ];
    let mut text = format!(
        "\nTwo processes on CPUs {} and {} that share an LLC of {}:\n{}\n",
        v.cpus[0],
        v.cpus[1],
        v.llc_bytes,
        table(&header, rows)
    );
    text.push_str(&format!(
        "mean error {:.0} percent, largest {:.0}; {} of {} predictions are within the measured range\n",
        v.error_mean * 100.0,
        v.error_max * 100.0,
        v.within_spread,
        v.sides
    ));
    let worst = v
        .curves
        .iter()
        .map(|fit| fit.fitted.error_max)
        .fold(0.0, f64::max);
    text.push_str(&format!(
        "the twin's fitted miss-ratio curves differ from the kernels' own by at most {:.0} percentage points\n",
        worst * 100.0
    ));
    if let Some(noise) = v.noise {
        text.push_str(&format!(
            "meanwhile other processes used {} of CPU time, and {} was stolen by a hypervisor\n",
            percent(noise.others_share),
            percent(noise.steal_share)
        ));
    }
    text
}
