//! `homenode report`: what VMs gained and lost through the agent's changes, as measured by its trials.

use homenode_api::Request;
use homenode_api::answer::{Report, Sum};
use homenode_units::{Ns, Pages};

use crate::ask::ask_agent;
use crate::options::AgentArgs;
use crate::print::{or_dash, percent, print_json, span, table};

/// Options of `report`.
#[derive(Debug, clap::Args)]
pub(crate) struct ReportArgs {
    /// Show only trials (measured changes of a VM's home) that were judged at most this long ago, such as `1h`
    #[arg(long, value_name = "TIME")]
    pub since: Option<Ns>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// `homenode report`.
///
/// # Errors
/// No agent, or an agent that makes no trials.
pub(crate) fn run(args: &ReportArgs) -> anyhow::Result<()> {
    let since_ns = args.since;
    let answer: Report = ask_agent(args.agent.dir(), &Request::Report { since_ns })?;
    if args.agent.json() {
        return print_json("report", &answer);
    }
    show(&answer);
    Ok(())
}

fn show(answer: &Report) {
    let within = answer.since_ns.map(|since| format!(" within {}", span(since)));
    let within = within.unwrap_or_default();
    let running = match answer.running_count {
        0 => String::new(),
        1 => "; 1 is on trial now".to_owned(),
        count => format!("; {count} are on trial now"),
    };
    if answer.trials.is_empty() {
        say!("no change was judged{within}{running}");
        return;
    }
    let memory = |pages: Option<Pages>| or_dash(pages, |pages| pages.to_bytes().to_string());
    let rows = answer.trials.iter().map(|trial| {
        vec![
            trial.name.clone(),
            format!("{} ago", span(trial.age_ns)),
            format!("{:.2}", trial.predicted),
            format!("{:.2}", trial.seen),
            if trial.undone { "undone" } else { "kept" }.to_owned(),
        ]
    });
    say!("{}\n", table(&["VM", "judged", "predicted", "seen", ""], rows));
    if answer.unlisted_count > 0 {
        say!("{} older trials are not listed\n", answer.unlisted_count);
    }
    let sum = |name: String, sum: &Sum, note: &str| {
        vec![
            name,
            sum.trials_count.to_string(),
            sum.undone_count.to_string(),
            format!("{:.2}", sum.gain),
            memory(sum.pages_moved),
            or_dash(sum.error_median, percent),
            note.to_owned(),
        ]
    };
    let mut rows: Vec<Vec<String>> = answer
        .vms
        .iter()
        .map(|vm| sum(vm.name.clone(), &vm.sum, if vm.is_gone { "gone" } else { "" }))
        .collect();
    rows.push(sum(format!("{} VMs", answer.vms.len()), &answer.total, ""));
    let header = ["VM", "trials", "undone", "gain", "moved", "off by", ""];
    say!("{}\n", table(&header, rows));
    say!(
        "predicted and seen: speed over that before the change (above 1 is faster); gain: that of all kept changes (of VMs, the mean);"
    );
    say!("moved: memory moved to the home; off by: median difference between seen and predicted{running}");
}
