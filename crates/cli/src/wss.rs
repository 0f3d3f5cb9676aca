//! `homenode wss`: asks the running agent how much memory a VM really uses.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::bail;
use homenode_api::Request;
use homenode_api::answer::{Figure, WorkingSet, WorkingSets};
use homenode_host::observation::TrackerChoice;
use homenode_host::{WINDOW_MAX, WINDOW_MIN};
use homenode_reproduce::jobs::Progress;
use homenode_screens::printable::OneLine;
use homenode_units::{Bytes, Ns};
use schemars::JsonSchema;
use serde::Serialize;

use crate::ask::ask_agent;
use crate::options::AgentArgs;
use crate::page_log::LogArgs;
use crate::print::{or_dash, percent, print_json, say_vms};
use crate::{bad_input, page_log};

/// Options of `wss`.
#[derive(Debug, clap::Args)]
pub(crate) struct WssArgs {
    /// The VM's name; without it, show the latest figures of all VMs
    #[arg(conflicts_with = "log")]
    pub vm: Option<String>,
    /// Read a page log that the emulator's plugin wrote (`pages=FILE`) instead of measuring a VM
    #[arg(long, value_name = "FILE", conflicts_with = "window")]
    pub log: Option<PathBuf>,
    #[command(flatten)]
    pub of_log: LogArgs,
    /// Window of time to measure over [default: the agent's, 30s unless configured]
    #[arg(long, value_name = "TIME")]
    pub window: Option<Ns>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Time between requests that ask the agent whether a window is over.
const POLL: Duration = Duration::from_millis(500);
/// How long the agent may take to begin measuring. Moving pages can keep its loop busy for a while.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long the agent keeps measuring for a client after its last request; each poll renews it.
const WAIT: Ns = Ns::from_secs(15);
/// A sentence on what a working set does not tell; printed with each figure.
const NOT: &str = "not measured: whether the guest needs more memory than it has (one that swaps looks like one that fits), and how \
                   slow it would be with less";

/// `homenode wss`.
///
/// # Errors
/// A file that is not a log of pages; no agent, no such VM, no tracker on this host, a VM that is not measured, an agent in a
/// dry run.
pub(crate) fn run(args: &WssArgs) -> anyhow::Result<()> {
    if let Some(log) = &args.log {
        return page_log::run(log, &args.of_log, args.agent.json());
    }
    if let Some(window) = args
        .window
        .filter(|window| !(WINDOW_MIN..=WINDOW_MAX).contains(window))
    {
        return Err(bad_input(format!(
            "--window {window}: windows last from {WINDOW_MIN} to {WINDOW_MAX}"
        )));
    }
    match &args.vm {
        Some(vm) => one(args, vm),
        None => all(args),
    }
}

fn ask(args: &WssArgs, vm: Option<&str>) -> anyhow::Result<WorkingSets> {
    let request = Request::WorkingSets {
        vm: vm.map(str::to_owned),
        window_ns: args.window,
        wait_ns: WAIT,
    };
    ask_agent(args.agent.dir(), &request)
}

fn all(args: &WssArgs) -> anyhow::Result<()> {
    if args.window.is_some() {
        return Err(bad_input("--window needs the name of a VM"));
    }
    let answer = ask(args, None)?;
    if args.agent.json() {
        return print_json("working-sets", &answer);
    }
    let rows = answer.vms.iter().map(|vm| {
        let figure = vm.working_set.as_ref();
        vec![
            vm.vm.clone(),
            vm.memory_bytes.to_string(),
            or_dash(figure, |figure| in_mib(figure.size_bytes)),
            or_dash(figure, |figure| {
                format!("{} to {}", in_mib(figure.least_bytes), in_mib(figure.most_bytes))
            }),
            or_dash(figure, |figure| figure.window_ns.to_string()),
            or_dash(figure, |figure| figure.tracker.clone()),
            or_dash(figure, |figure| format!("{} ago", seconds(figure.age_ns))),
            vm.why_not.clone().unwrap_or_default(),
        ]
    });
    let header = [
        "VM",
        "memory",
        "working set",
        "interval",
        "window",
        "tracker",
        "",
        "",
    ];
    say_vms(&header, rows);
    Ok(())
}

/// Waits for the VM's next figure.
fn one(args: &WssArgs, name: &str) -> anyhow::Result<()> {
    let (begun, progress) = (Instant::now(), Progress::new(""));
    let mut asked_at = None;
    let mut told = String::new();
    loop {
        let answer = ask(args, Some(name))?;
        let asked_at = *asked_at.get_or_insert(answer.at_ns);
        let Some(vm) = answer.vms.into_iter().next() else {
            bail!("the agent gave no answer about VM {name}");
        };
        let wanted = args.window.unwrap_or(Ns::ZERO);
        // A window already running for another client may be shorter than the one requested.
        let is_fresh = |figure: &&Figure| figure.at_ns > asked_at && 3 * figure.window_ns.0 >= 2 * wanted.0;
        if let Some(figure) = vm.working_set.as_ref().filter(is_fresh) {
            drop(progress);
            return show(args, &vm, figure, &answer.trackers);
        }
        if let Some(why) = &vm.why_not {
            bail!("the working set of VM {name} is unknown: {why}");
        }
        if !vm.is_watched && begun.elapsed() > PATIENCE {
            bail!(
                "the agent has not begun to watch VM {name}: it may be busy moving pages, or its plans may be refused (see its log)"
            );
        }
        let text = format!(
            "watching VM {}: {:.0} s",
            OneLine(name),
            begun.elapsed().as_secs_f64()
        );
        if text != told {
            progress.show(&text);
            told = text;
        }
        std::thread::sleep(POLL);
    }
}

/// The document of `homenode wss VM`.
#[derive(Serialize, JsonSchema)]
pub(crate) struct Answered<'a> {
    vm: &'a str,
    memory_bytes: Bytes,
    #[serde(flatten)]
    figure: &'a Figure,
    /// The trackers that can measure how much memory VMs use on this host.
    trackers: &'a [TrackerChoice],
    /// A sentence on what a working set does not tell.
    not: &'static str,
}

fn show(args: &WssArgs, vm: &WorkingSet, figure: &Figure, trackers: &[TrackerChoice]) -> anyhow::Result<()> {
    if args.agent.json() {
        return print_json(
            "working-set",
            &Answered {
                vm: &vm.vm,
                memory_bytes: vm.memory_bytes,
                figure,
                trackers,
                not: NOT,
            },
        );
    }
    let share = figure.size_bytes.as_f64() / vm.memory_bytes.as_f64().max(1.0);
    say!(
        "{} uses {} of {} ({}), within {}",
        vm.vm,
        in_mib(figure.size_bytes),
        vm.memory_bytes,
        percent(share),
        figure.window_ns
    );
    let kernel = match figure.kernel_bytes {
        Bytes::ZERO => "the guest's kernel is included and cannot be separated".to_owned(),
        kernel => format!("of which at least {} is its kernel", in_mib(kernel)),
    };
    let settled = if figure.is_settled {
        "settled"
    } else {
        "may still change: ask again"
    };
    let lines = [
        (
            "interval",
            format!(
                "{} to {}: {}",
                in_mib(figure.least_bytes),
                in_mib(figure.most_bytes),
                figure.certainty_means
            ),
        ),
        (
            "hot",
            format!(
                "{}, and {} warm; {kernel}",
                in_mib(figure.hot_bytes),
                in_mib(figure.warm_bytes)
            ),
        ),
        ("settled", settled.to_owned()),
        ("tracker", format!("{}: {}", figure.tracker, figure.tracker_merit)),
        (
            "blind to",
            format!("{}; at most {}", figure.blind_spot, in_mib(figure.blind_bytes)),
        ),
        (
            "cost",
            format!(
                "{} of CPU time per window on the host",
                milliseconds(figure.cost_ns)
            ),
        ),
        ("", NOT.to_owned()),
    ];
    for (what, text) in lines {
        say!("  {what:<9} {text}");
    }
    let others = trackers
        .iter()
        .filter(|choice| choice.tracker.name() != figure.tracker);
    for choice in others {
        let why = choice.why_not.as_deref().unwrap_or("available, but less exact");
        say!("  {:<9} {}: {why}", "not", choice.tracker.name());
    }
    Ok(())
}

fn in_mib(bytes: Bytes) -> String {
    format!("{:.1} MiB", bytes.as_f64() / (1 << 20) as f64)
}

fn seconds(ns: Ns) -> String {
    format!("{:.0} s", ns.as_secs_f64())
}

fn milliseconds(ns: Ns) -> String {
    format!("{:.1} ms", ns.as_f64() / 1e6)
}
