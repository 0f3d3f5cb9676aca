//! What came of it: the same VMs and seed under the default scheduler, first-fit pinning and Homenode.

use homenode_control::{Config, Control, Mode, Policies};
use homenode_host::Host;
use homenode_twin::TwinReport;
use homenode_units::Ns;
use serde::Serialize;

use crate::output::{Output, Style, or_dash, percent, table};
use crate::twin::TwinSpec;

/// One policy's run to the end of every program.
#[derive(Debug, Serialize)]
struct Outcome {
    policy: &'static str,
    /// Mean over the VMs that ended of runtime here over runtime under `default`.
    relative_runtime_mean: Option<f64>,
    decisions: usize,
    #[serde(flatten)]
    report: TwinReport,
}

#[derive(Debug, Serialize)]
struct Summary {
    policies: Vec<Outcome>,
}

/// Runs the scenario to its end under each set of policies and shows the runtimes side by side.
///
/// # Errors
/// When the twin cannot start.
pub fn compare(spec: &TwinSpec, config: &Config, output: &mut Output) -> anyhow::Result<()> {
    output.line("\nThe same VMs and seed, each program run to its end, under:");
    let mut policies: Vec<Outcome> = Vec::new();
    for set in [Policies::Default, Policies::FfPin, Policies::Homenode] {
        if output.style() == Style::Terminal {
            output.line(&format!("  … {}", set.name()));
        }
        let (report, decisions) = run_to_end(
            spec,
            Config {
                policies: set,
                ..config.clone()
            },
        )?;
        let relative = policies
            .first()
            .and_then(|default| relative_runtime(&default.report, &report));
        let relative = if set == Policies::Default {
            Some(1.0)
        } else {
            relative
        };
        policies.push(Outcome {
            policy: set.name(),
            relative_runtime_mean: relative,
            decisions,
            report,
        });
    }
    let rows = policies[0].report.vms.iter().enumerate().map(|(at, vm)| {
        let mut row = vec![vm.name.clone(), vm.workload.clone()];
        row.extend(
            policies
                .iter()
                .map(|p| or_dash(p.report.vms[at].runtime_s, |s| format!("{s:.1}s"))),
        );
        row.extend(
            policies
                .iter()
                .map(|p| or_dash(p.report.vms[at].local_access_ratio, percent)),
        );
        row
    });
    let header = [
        "VM",
        "workload",
        "default",
        "ff-pin",
        "homenode",
        "local: default",
        "ff-pin",
        "homenode",
    ];
    output.line(&table(&header, rows).to_string());
    for outcome in &policies[1..] {
        if let Some(mean) = outcome.relative_runtime_mean {
            let change = (1.0 - mean) * 100.0;
            let word = if change >= 0.0 { "shorter" } else { "longer" };
            output.line(&format!(
                "{}: programs run {:.1} percent {word} than under default, on average",
                outcome.policy,
                change.abs()
            ));
        }
    }
    output.object("summary", &Summary { policies });
    Ok(())
}

fn run_to_end(spec: &TwinSpec, config: Config) -> anyhow::Result<(TwinReport, usize)> {
    let mut twin = spec.start()?;
    let period = config.period;
    let mut control = Control::new(config, Mode::Act);
    let mut decisions = 0;
    while !twin.finished() && twin.now() < spec.scenario.duration.max(Ns::from_secs(1)) {
        let epoch = control.step(&mut twin)?;
        decisions += epoch
            .events
            .iter()
            .filter(|e| matches!(e, homenode_control::Event::Decided { .. }))
            .count();
        twin.wait(period);
    }
    Ok((twin.report(), decisions))
}

fn relative_runtime(base: &TwinReport, other: &TwinReport) -> Option<f64> {
    let ratios: Vec<f64> = base
        .vms
        .iter()
        .zip(&other.vms)
        .filter_map(|(a, b)| Some(b.runtime_s? / a.runtime_s?))
        .collect();
    (!ratios.is_empty()).then(|| ratios.iter().sum::<f64>() / ratios.len() as f64)
}
