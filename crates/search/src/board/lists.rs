//! Formats the lists of held-out runs.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::figure;
use crate::held_out::{DrawnAs, HeldOut, HeldOutPolicy, HeldOutRun};
use crate::score::MUCH_WORSE;

const BENCHMARKS: &str = "
## Held out

Cases drawn by a generator (machines × sizes × mixes × arrivals × loads). Their seeds follow from the id of the last commit that
touched the policies, so that commit cannot have been tuned to them. Every run is listed, oldest first.

| date | commit | cases × seeds | policies | mean | worst VM | VMs slowed | runs over 1.10 |
|---|---|---|---|---|---|---|---|
";

const OPERATIONS: &str = "
## As in operation

VMs with sizes, CPU use and lifetimes as in a public trace, for half an hour (`crates/search/src/operations.rs` has the sources
and the estimates). The hosts are those of today and those of the published experiments. A *light*, *half-full*, *full* or
*overcommitted* host has a quarter of a vCPU, a half, one or two for each CPU. The seeds are drawn as above.

Here `default` is the stock kernel, which balances NUMA memory; `no-autonuma` is the same without balancing, and `fixed-per-l3`
is the usual advice for pinning by hand. `each-alone` has each VM alone on its host, which is about the most that can be gained.
A VM that serves requests is judged by their mean time. *p99* is the time within which 99 of 100 requests are done, relative to
`default`.

Cells show mean / p99 / worst VM. If VMs were slowed or runs were over 1.10, their numbers follow. The second of two runs of one
commit has the same cases on a twin whose kernel balancing was mended. A dash marks a figure that an error in the score, since
mended, had made infinite.
";

const UNDERFILLED: &str = "
Until 2026-11-28 VMs were left out if they did not fit into the memory of the preset's example, so that most hosts had about a
quarter of a vCPU for each CPU. Such runs, whose classes are only in `data/decisions/held-out.toml`:

";

/// Writes the section of the runs on benchmarks.
pub(super) fn benchmarks(out: &mut String, list: &HeldOut) {
    out.push_str(BENCHMARKS);
    for run in list.drawn_as(DrawnAs::Benchmarks) {
        for of in &run.policies {
            let _ = writeln!(
                out,
                "| {} | {} | {} × {} | {} | {} | {} | {} of {} | {} of {} |",
                run.date,
                run.commit,
                run.cases,
                run.seeds,
                of.name,
                figure(of.mean),
                figure(of.worst_vm),
                of.slowed,
                of.vms,
                of.much_worse,
                of.runs
            );
        }
    }
}

/// Writes the section of the runs as in operation.
pub(super) fn operations(out: &mut String, list: &HeldOut) {
    out.push_str(OPERATIONS);
    for run in list.drawn_as(DrawnAs::Operations) {
        by_class(out, run);
    }
    let mut underfilled = list.drawn_as(DrawnAs::OperationsUnderfilled).peekable();
    if underfilled.peek().is_some() {
        out.push_str(UNDERFILLED);
    }
    for run in underfilled {
        for of in run.policies.iter().filter(|of| of.class.is_none()) {
            let _ = writeln!(
                out,
                "- {}: {} {}, {} VMs",
                identity(run),
                of.name,
                ratios(of),
                of.vms
            );
        }
    }
}

/// Writes the table of a run: a row for each class of hosts, and a column for each contender.
fn by_class(out: &mut String, run: &HeldOutRun) {
    let mut names: Vec<&str> = Vec::new();
    for of in &run.policies {
        if !names.contains(&of.name.as_str()) {
            names.push(&of.name);
        }
    }
    let classes: BTreeSet<Option<&str>> = run.policies.iter().map(|of| of.class.as_deref()).collect();
    let _ = write!(
        out,
        "\n{}:\n\n| hosts | VMs | {} |\n|---|---|{}\n",
        identity(run),
        names.join(" | "),
        "---|".repeat(names.len())
    );
    for class in classes {
        let of_class = || run.policies.iter().filter(move |of| of.class.as_deref() == class);
        let cell = |name: &&str| {
            let of = of_class().find(|of| of.name == **name);
            of.map_or_else(|| "-".to_owned(), ratios)
        };
        let cells: Vec<String> = names.iter().map(cell).collect();
        let _ = writeln!(
            out,
            "| {} | {} | {} |",
            class.unwrap_or("all"),
            of_class().map(|of| of.vms).max().unwrap_or_default(),
            cells.join(" | ")
        );
    }
}

/// Returns the words that identify a held-out run.
fn identity(run: &HeldOutRun) -> String {
    let HeldOutRun {
        date,
        commit,
        cases,
        seeds,
        ..
    } = run;
    format!("{date}, commit {commit}, {cases} cases × {seeds} seeds")
}

/// Returns mean, 99th percentile and worst VM, and how many VMs and runs were too slow, if any.
fn ratios(of: &HeldOutPolicy) -> String {
    let mut text = [of.mean, of.p99, of.worst_vm].map(figure).join(" / ");
    if of.slowed > 0 {
        text += &format!(", {} slowed", of.slowed);
    }
    if of.much_worse > 0 {
        text += &format!(", {} over {MUCH_WORSE:.2}", of.much_worse);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::score::Total;

    #[test]
    fn runs_as_in_operation_are_listed_by_class() {
        let of = |class: Option<&str>, name: &str, slowed: usize| HeldOutPolicy {
            class: class.map(str::to_owned),
            mean: Some(0.95),
            vms: 2,
            slowed,
            much_worse: 2 * slowed,
            ..HeldOutPolicy::of(name, &Total::of(&[]))
        };
        let run = |drawn_as| HeldOutRun {
            date: "2026-11-27".to_owned(),
            commit: "abc".to_owned(),
            cases: 1,
            seeds: 2,
            drawn_as,
            policies: vec![
                of(Some("today, full"), "each-alone", 0),
                of(None, "homenode", 0),
                of(Some("today, full"), "homenode", 1),
            ],
        };
        let list = HeldOut {
            runs: vec![run(DrawnAs::Operations), run(DrawnAs::OperationsUnderfilled)],
        };
        let (mut before, mut text) = (String::new(), String::new());
        benchmarks(&mut before, &list);
        assert!(!before.contains("2026-11-27"), "{before}");
        operations(&mut text, &list);
        let (text, underfilled) = text.split_once("Until 2026-11-28").unwrap();
        let line = "- 2026-11-27, commit abc, 1 cases × 2 seeds: homenode 0.950 / - / -, 2 VMs\n";
        assert!(underfilled.ends_with(line), "{underfilled}");
        for line in [
            "2026-11-27, commit abc, 1 cases × 2 seeds:",
            "| hosts | VMs | each-alone | homenode |",
            "| all | 2 | - | 0.950 / - / - |",
            "| today, full | 2 | 0.950 / - / - | 0.950 / - / -, 1 slowed, 2 over 1.10 |",
        ] {
            assert!(
                text.lines().any(|known| known == line),
                "{line} is not in\n{text}"
            );
        }
    }
}
