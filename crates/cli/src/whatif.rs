//! `homenode whatif`: forecasts how fast VMs would be with other homes, from the running agent or on a scenario.

use homenode_api::answer::Forecast;
use homenode_api::{AskError, Homes, Request};
use homenode_reproduce::jobs::Progress;
use homenode_screens::printable::OneLine;
use homenode_search::whatif::{self, WhatIfError};
use homenode_twin::Setup;
use homenode_units::{NodeSet, Ns};

use crate::ask::ask_agent;
use crate::options::AgentArgs;
use crate::print::{or_dash, or_none, percent, print_json, table};
use crate::{bad_input, twin};

/// Options of `whatif`.
#[derive(Debug, clap::Args)]
pub(crate) struct WhatIfArgs {
    /// Home nodes of VMs, such as `web=0 db=1,2 batch=none`; VMs that are not named keep theirs
    #[arg(value_name = "VM=NODES")]
    pub homes: Vec<String>,
    /// Ask about a simulated scenario instead of the running agent: a scenario file, or the name of a built-in scenario
    #[arg(long, value_name = "SCENARIO", conflicts_with = "state")]
    pub scenario: Option<String>,
    /// How long the agent manages the scenario before the question is asked
    #[arg(
        long,
        value_name = "TIME",
        default_value = "15s",
        requires = "scenario",
        conflicts_with = "state"
    )]
    pub at: Ns,
    /// A seed other than the scenario's: same seed, same answer
    #[arg(long, requires = "scenario", conflicts_with = "state")]
    pub seed: Option<u64>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// How to write a home, for every error about a home.
const REMEDY: &str = "write `VM=0` for a node, `VM=0,1` or `VM=0-2` for several, `VM=none` for no home";

/// `homenode whatif`.
///
/// # Errors
/// No agent, a bad question, a scenario that cannot run, or too little data.
pub(crate) fn run(args: &WhatIfArgs) -> anyhow::Result<()> {
    let homes = parse(&args.homes)?;
    let answer = match &args.scenario {
        Some(what) => simulate(args, what, &homes)?,
        None => {
            let homes = homes.clone();
            ask_agent(args.agent.dir(), &Request::WhatIf { homes })?
        }
    };
    if args.agent.json() {
        return print_json("forecast", &answer);
    }
    show(&answer, &homes);
    Ok(())
}

/// Reads `web=0 db=1,2 batch=none`.
fn parse(texts: &[String]) -> anyhow::Result<Homes> {
    let mut homes = Homes::new();
    for word in texts.iter().flat_map(|text| text.split_whitespace()) {
        // A name may contain `=`, a list of nodes cannot.
        let Some((name, home)) = word.rsplit_once('=') else {
            return Err(bad_input(format!("`{word}` names no home; {REMEDY}")));
        };
        if name.is_empty() {
            return Err(bad_input(format!("`{word}` names no VM; {REMEDY}")));
        }
        let nodes = match home {
            // Up to version 0.2.0, `free` was the name of `none`.
            "none" | "free" => None,
            list => match list.parse::<NodeSet>() {
                Ok(nodes) if !nodes.is_empty() => Some(nodes),
                _ => {
                    return Err(bad_input(format!("`{list}` in `{word}` is not a home; {REMEDY}")));
                }
            },
        };
        if homes.insert(name.to_owned(), nodes).is_some() {
            return Err(bad_input(format!(
                "VM {name} is named twice, again in `{word}`; give it one home"
            )));
        }
    }
    Ok(homes)
}

/// Runs the agent on a scenario up to a time, and asks it the question.
fn simulate(args: &WhatIfArgs, what: &str, homes: &Homes) -> anyhow::Result<Forecast> {
    let scenario = twin::scenario(what)?;
    let machine = twin::machine_for(&scenario, what, None)?;
    let seed = args.seed.unwrap_or(scenario.seed);
    let setup = Setup::new(machine, scenario, seed);
    let progress = Progress::new("");
    let answer = whatif::ask(&setup, args.at, homes, |now| {
        let done = now.as_secs_f64() / args.at.as_secs_f64();
        progress.at(
            &format!("{}: {now} of {}", OneLine(&setup.scenario.name), args.at),
            done,
        );
        Ok(())
    });
    drop(progress);
    answer.map_err(|error| match error {
        WhatIfError::Input(_) | WhatIfError::Twin(_) => bad_input(error),
        WhatIfError::Refused(refused) => AskError::Agent(refused).into(),
        WhatIfError::Failed(error) => error,
    })
}

fn show(answer: &Forecast, homes: &Homes) {
    if let Some(of) = &answer.simulated {
        say!(
            "{} on {}, seed {}, at {}\n",
            OneLine(&of.scenario),
            OneLine(&of.machine),
            of.seed,
            answer.at_ns
        );
    }
    let time = |slow_down: Option<f64>| or_dash(slow_down, |time| format!("{time:.2}"));
    let rows = answer.vms.iter().map(|vm| {
        let (name, home) = (vm.name.clone(), or_none(vm.home.as_ref()));
        if homes.is_empty() {
            return vec![name, home, time(vm.slow_down)];
        }
        let then = or_none(vm.home_then.as_ref());
        vec![name, home, then, time(vm.slow_down), time(vm.slow_down_then)]
    });
    let header: &[&str] = if homes.is_empty() {
        &["VM", "home", "time"]
    } else {
        &["VM", "home now", "home then", "time now", "time then"]
    };
    say!("{}\n", table(header, rows));
    for vm in &answer.vms {
        let said = [&vm.why_unknown, &vm.obstacle];
        for why in said.into_iter().flatten() {
            say!("{}: {}", OneLine(&vm.name), OneLine(why));
        }
    }
    say!("time: predicted runtime relative to running without an agent (1.00 is the same, less is faster)");
    match (answer.error_median, answer.trials_count) {
        (Some(error), 1) => say!("prediction error of the only trial so far: {}", percent(error)),
        (Some(error), trials) => say!("median prediction error over {trials} trials: {}", percent(error)),
        (None, _) => say!("no trial yet: how far predictions are off on this host is unknown"),
    }
    answer
        .notes
        .iter()
        .for_each(|note| say!("note: {}", OneLine(note)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> anyhow::Result<Homes> {
        parse(&[text.to_owned()])
    }

    #[test]
    fn homes_are_read_word_by_word_up_to_the_last_equals_sign() {
        let homes = read("web=0  db=1,2\tbatch=free\nké-1=a:b=0-2").unwrap();
        let text = |home: &Option<NodeSet>| or_none(home.as_ref());
        let read_back: Vec<(&str, String)> =
            homes.iter().map(|(vm, home)| (vm.as_str(), text(home))).collect();
        let expected = [
            ("batch", "none"),
            ("db", "1-2"),
            ("ké-1=a:b", "0-2"),
            ("web", "0"),
        ];
        assert_eq!(read_back, expected.map(|(vm, home)| (vm, home.to_owned())));
        assert_eq!(read(" \t ").unwrap(), Homes::new());
        let words = ["web=0", "db=1"].map(str::to_owned);
        assert_eq!(parse(&words).unwrap().len(), 2);
    }

    #[test]
    fn what_is_no_home_is_refused_with_its_word_and_what_to_write() {
        for (text, said) in [
            ("web", "`web` names no home; write `VM=0`"),
            ("a=0 web = 0", "`web` names no home"),
            ("=0", "`=0` names no VM"),
            ("web=", "`` in `web=` is not a home"),
            ("web=,", "`,` in `web=,` is not a home"),
            ("web=x", "`x` in `web=x` is not a home; write `VM=0`"),
            ("web=-1", "`-1` in `web=-1` is not a home"),
            ("web=2-1", "`2-1` in `web=2-1` is not a home"),
            ("web=99999999999", "is not a home"),
            ("web=0 db=1 web=1", "VM web is named twice, again in `web=1`"),
        ] {
            let refused = read(text).unwrap_err();
            assert!(refused.is::<crate::BadInput>(), "{text}");
            assert!(refused.to_string().contains(said), "{text}: {refused}");
        }
    }
}
