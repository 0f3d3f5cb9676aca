//! The logged runs of the claims, and the changes of numbers between them. They are a section of
//! `docs/REPRODUCTION-DETAILS.md`; targets and what misses them are one of `docs/REPRODUCTION.md`.
//!
//! For each run, `data/reproduction/log.toml` has the headline and our value of every number in the claims. So an old run
//! can be judged by the current rules, and changes can be derived from this file alone.

use std::collections::{BTreeMap, BTreeSet};

use homenode_machine_files::file::{FileError, read_toml};
use serde::Deserialize;

use crate::experiment::Reproduced;
use crate::markdown::markdown;
use crate::scoreboard::{Group, Scoreboard, headline};
use crate::verdict::{Part, number, show};

/// The committed log.
const LOG: &str = include_str!("../../../data/reproduction/log.toml");
/// Maximum number of changes shown between two runs.
const MOVED_MOST: usize = 10;
/// A number that changed by less than this, as a logarithm, counts as unchanged.
const MOVED_LEAST: f64 = 0.02;

/// Targets of issue 18, set before the first logged run.
const MEDIAN_MOST: f64 = 0.4;
const WITHIN_2X_LEAST: f64 = 2.0 / 3.0;
const SIGNS_LEAST: f64 = 0.95;
const HELD_LEAST: usize = 18;

const RULES: &str = "\
A constant that is changed after a run of the claims to come nearer to one makes the values that rest on it
`chosen-after-a-run`, and they leave the headline. There is one exception: if the new value comes from a source that is
independent of the claims (a measurement, another paper, a table that the paper gives as an input), is committed before any
claim is run again, and the log says so, the values stay predicted, whichever way they move. Run 2 is such a change.
";

const CAUSES: &str = "\
The causes, by paper; each claim's own reasons are in the details:

- *Memory policies* ([Policies]). Profiles keep measured rates of LLC accesses where a program was measured (10 of 29); time at rest
  meets the published loads of links. The rates of the others are fitted to these loads, which are averages over runs: most
  wait little for memory, and no policy can do much for them. The published imbalance under round-4K asks for hot pages that
  would have to leave the private caches, so it is not met.
- *The host before the measurement* ([TAVO], [XPV]). The papers' default schedulers had scattered VMs and their memory. For [TAVO]
  all memory of the default scheduler's guests lies evenly on all nodes, as its text says; for [XPV] VMs start on idle nodes. The
  papers do not print how full their hosts were, how many VMs ran, or how much memory was scattered.
- *Guests* ([XPV]). How often a guest moves threads between its vCPUs is known from other hosts and programs, and its scheduler
  takes no part in it.
- *Logs of pages* ([PRL]). A migration is bound by its network, and both ways of tracking send the same pages, so neither can be
  faster by a tenth: the paper's figure contradicts its text. Faults, flags and entries are priced by measurements of other
  processors and hypervisors.
- *Caches* ([Kyoto]). Curves of three numbers stand for programs' reuse, and the papers do not print their programs' working
  sets.
";

/// Our numbers by claim and value.
pub type Numbers = BTreeMap<String, BTreeMap<String, f64>>;

/// The runs, the latest last.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Log {
    run: Vec<Logged>,
}

/// A logged run of the claims.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Logged {
    date: String,
    /// Commit of the code and data with which the run was made.
    commit: String,
    /// Changes since the previous run.
    changed: String,
    /// Changes since the previous run in how numbers are judged, if any.
    measure: Option<String>,
    values: usize,
    within_1_25x: usize,
    within_2x: usize,
    within_3x: usize,
    sign_right: usize,
    held: usize,
    median_abs_ln: Option<f64>,
    median_ratio: Option<f64>,
    /// Numbers that counted in the headline at the time of the run, and all other numbers.
    #[serde(default)]
    counted: Numbers,
    #[serde(default)]
    beside: Numbers,
}

impl Log {
    /// Returns the embedded log.
    ///
    /// # Errors
    /// None, as a test parses the file.
    pub fn committed() -> Result<Log, FileError> {
        Log::parse("data/reproduction/log.toml", LOG)
    }

    /// Parses a log.
    ///
    /// # Errors
    /// A parse error, with its line.
    pub fn parse(path: &str, text: &str) -> Result<Log, FileError> {
        read_toml(path, text)
    }

    /// Returns the page's section on targets, and on what misses them.
    pub fn missed(&self, all: &[Reproduced]) -> String {
        let mut text = "## What is missed, and why\n\n".to_owned();
        text += &targets(all);
        text += &format!("\n{}\n{CAUSES}", self.verdict(all));
        text += &off(all);
        text
    }

    /// Returns the section on the logged runs, with the claims' current results.
    pub fn section(&self, all: &[Reproduced]) -> String {
        let mut text = "## Logged runs\n\n".to_owned();
        text += "From `data/reproduction/log.toml`. The measure was mended before the first of these runs; nothing of the twin was. The last \
                 columns\njudge the same run by the kinds and rules of today, over the values that are in today's headline.\n\n";
        text += &self.table(all);
        text += "\n";
        for (at, run) in self.run.iter().enumerate() {
            text += &format!(
                "{}. What was changed: {}.\n",
                at + 1,
                run.changed.trim_end_matches('.')
            );
        }
        text += &format!("\n{RULES}");
        text += &self.measures();
        text += &self.moved(all);
        text
    }

    fn table(&self, all: &[Reproduced]) -> String {
        let counts = |of: [usize; 5]| of.map(|count| count.to_string());
        let rows = self.run.iter().enumerate().map(|(at, run)| {
            let now = run.today(all);
            let mut row = vec![(at + 1).to_string(), run.date.clone(), run.commit.clone()];
            let ratio = run.median_ratio.map_or("-".to_owned(), show);
            row.extend([run.values.to_string(), ln(run.median_abs_ln), ratio]);
            let Logged {
                within_1_25x,
                within_2x,
                within_3x,
                sign_right,
                held,
                ..
            } = *run;
            row.extend(counts([within_1_25x, within_2x, within_3x, sign_right, held]));
            row.extend([now.values.to_string(), ln(now.median_abs_ln)]);
            row.extend(counts(now.counts()));
            row
        });
        let each = ["median |ln|", "within 1.25x", "2x", "3x", "signs", "hold"];
        let mut header = ["run", "date", "commit", "values"].map(str::to_owned).to_vec();
        header.extend(each.map(str::to_owned));
        header.insert(5, "ours/published".to_owned());
        header.push("values of today".to_owned());
        header.extend(each.map(|name| format!("{name}, today's rules")));
        markdown(header, rows)
    }

    /// Returns a sentence on whether the changes since the first run improved the model.
    fn verdict(&self, all: &[Reproduced]) -> String {
        let [first, .., last] = &self.run[..] else {
            return String::new();
        };
        let [before, after] = [first, last].map(|run| run.today(all).median_abs_ln);
        let [Some(old), Some(new)] = [before, after] else {
            return String::new();
        };
        let word = if new > old {
            "further off"
        } else {
            "no further off"
        };
        format!(
            "**By today's rules, the model of the last logged run is {word} than that of the first**: on the same {} values\nthe median |ln| \
             went from {} to {}.\n",
            last.today(all).values,
            ln(before),
            ln(after),
        )
    }

    /// Returns the changes in the measure, with the values that entered or left the headline because of them.
    fn measures(&self) -> String {
        let mut text = String::new();
        for (at, pair) in self.run.windows(2).enumerate() {
            let [before, after] = pair else { continue };
            let (old, new) = (before.names(), after.names());
            let listed = |names: BTreeSet<&(String, String)>| {
                let names: Vec<String> = names
                    .iter()
                    .map(|(claim, value)| format!("`{claim}` {value}"))
                    .collect();
                if names.is_empty() {
                    "none".to_owned()
                } else {
                    names.join(", ")
                }
            };
            let Some(measure) = &after.measure else { continue };
            text += &format!(
                "\n### What was changed in the measure between runs {} and {}\n\n{measure} Values that left the headline: {}. Values that came \
                 into it: {}.\n",
                at + 1,
                at + 2,
                listed(old.difference(&new).collect()),
                listed(new.difference(&old).collect()),
            );
        }
        text
    }

    /// Returns a table of the values that changed most between two runs, according to the current rules.
    fn moved(&self, all: &[Reproduced]) -> String {
        let mut rows = Vec::new();
        let mut quiet = Vec::new();
        for (at, pair) in self.run.windows(2).enumerate() {
            let [before, after] = pair else { continue };
            let mut moved: Vec<(f64, Vec<String>)> = Vec::new();
            for (claim, part, _) in headline(all) {
                let of = |run: &Logged| number(claim, &part.name, run.ours(&claim.id, &part.name)?)?.score;
                let (Some(old), Some(new)) = (of(before), of(after)) else {
                    continue;
                };
                let by = match (old.ln_ratio, new.ln_ratio) {
                    (Some(old), Some(new)) => (new - old).abs(),
                    (None, None) => 0.0,
                    _ => f64::INFINITY,
                };
                let which = if new.error() < old.error() {
                    "nearer"
                } else {
                    "further off"
                };
                let cells = [claim.id.clone(), part.name.clone()];
                let numbers = [old.published, old.ours, new.ours].map(show);
                let logs = [old, new].map(|score| score.ln_ratio.map_or("-".to_owned(), show));
                let run = format!("{} to {}", at + 1, at + 2);
                moved.push((
                    by,
                    [&[run][..], &cells, &numbers, &logs, &[which.to_owned()]].concat(),
                ));
            }
            moved.retain(|(by, _)| *by >= MOVED_LEAST);
            moved.sort_by(|a, b| b.0.total_cmp(&a.0));
            if moved.is_empty() {
                quiet.push(format!("{} and {}", at + 1, at + 2));
            }
            rows.extend(moved.into_iter().take(MOVED_MOST).map(|(_, row)| row));
        }
        let header = "runs; claim; value; published; before; after; ln before; ln after; it is";
        let still = match &quiet[..] {
            [] => String::new(),
            some => format!(
                " Between runs {} none moved by as much as 2 percent.",
                some.join(", ")
            ),
        };
        format!(
            "\n### What moved most\n\nOf today's headline, by the rules of today, the {MOVED_MOST} that moved most between two runs; without a \
             logarithm is what has another sign.{still} Runs 1 to 3 are logged to three digits, as the page had them.\n\n{}",
            markdown(header.split("; "), rows)
        )
    }
}

impl Logged {
    fn ours(&self, claim: &str, value: &str) -> Option<f64> {
        let of = |numbers: &Numbers| numbers.get(claim)?.get(value).copied();
        of(&self.counted).or_else(|| of(&self.beside))
    }

    /// Returns the names of the values that counted in the headline of this run.
    fn names(&self) -> BTreeSet<(String, String)> {
        let names = self
            .counted
            .iter()
            .flat_map(|(claim, values)| values.keys().map(move |value| (claim.clone(), value.clone())));
        names.collect()
    }

    /// Returns the statistics of this run according to the current kinds and rules.
    fn today(&self, all: &[Reproduced]) -> Group {
        let parts: Vec<Part> = headline(all)
            .filter_map(|(claim, part, _)| number(claim, &part.name, self.ours(&claim.id, &part.name)?))
            .collect();
        Group::of(parts.iter().filter_map(|part| Some((part, part.score.as_ref()?))))
    }
}

fn ln(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.3}"))
}

/// Returns a table that compares the result with the targets set before the first run.
fn targets(all: &[Reproduced]) -> String {
    let group = Scoreboard::of(all).headline;
    let share = |count: usize| count as f64 / group.values.max(1) as f64;
    let row = |what: &str, aim: String, got: String, met: bool| {
        vec![
            what.to_owned(),
            aim,
            got,
            if met { "met" } else { "missed" }.to_owned(),
        ]
    };
    let of = |count: usize| {
        format!(
            "{count} of {} ({:.0} percent)",
            group.values,
            100.0 * share(count)
        )
    };
    let rows = [
        row(
            "median |ln|",
            format!("at most {MEDIAN_MOST}"),
            ln(group.median_abs_ln),
            group.median_abs_ln.is_some_and(|median| median <= MEDIAN_MOST),
        ),
        row(
            "within 2x",
            "two thirds".to_owned(),
            of(group.within_2x),
            share(group.within_2x) >= WITHIN_2X_LEAST,
        ),
        row(
            "sign right",
            format!("{:.0} percent", 100.0 * SIGNS_LEAST),
            of(group.sign_right),
            share(group.sign_right) >= SIGNS_LEAST,
        ),
        row(
            "hold, and no effect anywhere would not",
            format!("at least {HELD_LEAST}"),
            group.held.to_string(),
            group.held >= HELD_LEAST,
        ),
    ];
    let header = ["target", "aim", "now", ""];
    format!(
        "The targets were set before the first run, to be reached by better inputs and not by fitting:\n\n{}",
        markdown(header, rows)
    )
}

/// Returns the values that have the wrong sign, and how much the bands explain.
fn off(all: &[Reproduced]) -> String {
    let group = Scoreboard::of(all).headline;
    let wrong = headline(all).filter(|(_, _, score)| !score.sign_right);
    let named = wrong.map(|(claim, part, score)| {
        let (ours, published) = (show(score.ours), show(score.published));
        format!("- `{}` {} ({ours} against {published})\n", claim.id, part.name)
    });
    let named: String = named.collect();
    let bands = group.in_band;
    let explained = if 2 * bands.held < bands.all {
        "so most misses are not explained by the guessed inputs that were varied"
    } else {
        "so guessed inputs may explain most misses"
    };
    format!(
        "\nWithout an effect, or on the other side of no effect than published:\n\n{named}\nOf {} bands {} hold the published value, {explained}.\n",
        bands.all, bands.held
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scoreboard::tests::measured;

    fn run(counted: &str) -> String {
        format!(
            "[[run]]\ndate = \"2026-11-25\"\ncommit = \"0123456789\"\nchanged = \"this\"\nvalues = 1\nwithin_1_25x = 0\nwithin_2x = 0\n\
             within_3x = 0\nsign_right = 1\nheld = 0\nmedian_abs_ln = 1.5\n{counted}\n"
        )
    }

    #[test]
    fn an_old_run_is_judged_by_the_rules_of_today() {
        let text = run("[run.counted.\"pml.wss-overhead\"]\nhpl = 17.45\nsort = 4.8");
        let log = Log::parse("log", &text).unwrap();
        let group = log.run[0].today(&measured(|_, _, published| published));
        // sort is trivial, so it counts in no headline.
        assert_eq!((group.values, group.within_2x, group.held), (1, 1, 0));
        assert!((group.median_abs_ln.unwrap() - libm::log(2.0)).abs() < 1e-9);
    }

    #[test]
    fn what_moved_and_what_left_the_headline_is_told() {
        let first = run(
            "[run.counted.\"pml.wss-overhead\"]\nhpl = 20.0\n[run.counted.\"flip.cost\"]\nstream_pct = 2.0",
        );
        let second = run("measure = \"Kinds were changed.\"\n[run.counted.\"pml.wss-overhead\"]\nhpl = 5.0");
        let log = Log::parse("log", &format!("{first}{second}")).unwrap();
        let all = measured(|_, name, published| if name == "hpl" { -1.0 } else { published });
        let text = log.section(&all);
        assert!(
            text.contains("| 1 to 2 | pml.wss-overhead | hpl | 34.9 | 20 | 5 |"),
            "{text}"
        );
        assert!(
            text.contains("left the headline: `flip.cost` stream_pct."),
            "{text}"
        );
        let text = log.missed(&all);
        assert!(text.contains("further off than that of the first"), "{text}");
        assert!(
            text.contains("`pml.wss-overhead` hpl (-1 against 34.9)"),
            "{text}"
        );
    }

    #[test]
    fn targets_are_met_by_what_is_published_and_missed_by_no_effect() {
        let met = targets(&measured(|_, _, published| published));
        assert_eq!(
            (met.matches("| met |").count(), met.matches("missed").count()),
            (4, 0)
        );
        let missed = targets(&measured(|_, _, _| 0.0));
        assert_eq!(missed.matches("missed").count(), 4);
    }

    #[test]
    fn the_committed_log_has_the_values_of_each_run() {
        let log = Log::committed().unwrap();
        for run in &log.run {
            assert_eq!(run.names().len(), run.values, "{}", run.commit);
        }
    }
}
