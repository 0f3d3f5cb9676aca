//! Experiments as data: a file defines runs, computation and presentation, and this module executes it.
//!
//! `docs/EXPERIMENTS.md` explains the format, and `data/experiments` has the files. An experiment has grids of runs, with a
//! run for each combination of labels. Runs yield metrics, which are arrays over labels ([`array`]). Values are computed
//! from metrics by expressions ([`expression`], [`functions`]). Results, tests, tables and figures show values ([`report`]).
//!
//! # Properties (tests of the same names)
//!
//! - Every committed file reads, and every name in it stands for something.
//! - An error in a file names the line, and what to write instead.
//! - The same file gives the same runs, whatever the order of its tables.

pub(crate) mod array;
mod expression;
pub(crate) mod functions;
pub(crate) mod measures;
mod report;
mod scope;
mod settings;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use homenode_machine_files::file::{FileError, Source, read_text_file, read_toml};
use homenode_units::Candidates;
use serde::Deserialize;

use crate::bases::base;
use crate::experiment::Decision;
use crate::models::{MODELS, Model, OF_RUNS, OfRun};
use crate::run::Run;
use crate::work::Outcomes;
use array::{Axis, Cell, labels};
use settings::{Nesting, Settings, When, Words};

/// The file of an experiment.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct File {
    /// The claim that the experiment decides.
    claim: Option<String>,
    /// The subject, in a sentence.
    title: String,
    /// File of settings and values that several experiments share. The experiment's own keys override keys of this file; its own
    /// tables and reasons come before those of this file.
    base: Option<String>,
    set_up: Vec<String>,
    why: Vec<String>,
    /// Settings of all runs.
    run: Settings,
    /// Labels of each axis, by the axis' name.
    axes: BTreeMap<String, Labels>,
    /// Settings of each label, by the label.
    labels: BTreeMap<String, Settings>,
    when: Vec<When>,
    /// Grids of runs by name.
    grid: BTreeMap<String, Grid>,
    /// Tables of published figures by name.
    csv: BTreeMap<String, Csv>,
    /// Expressions by name.
    values: BTreeMap<String, String>,
    /// The claim's numbers; without a claim, the numbers that are shown first.
    results: BTreeMap<String, String>,
    /// The claim's rankings: labels, first is highest.
    orders: BTreeMap<String, String>,
    /// The cost of choosing according to a ranking: names along an axis, as in rankings, and the cost of each name.
    order_cost: Option<(String, String)>,
    /// Code that provides further values, which no run of the simulator yields.
    model: Option<String>,
    /// Whether the model measures time on the machine on which the model runs.
    measured_here: bool,
    /// Names of results that are inputs of the model.
    inputs: Vec<String>,
    #[serde(rename = "test")]
    tests: Vec<report::Test>,
    #[serde(rename = "table")]
    tables: Vec<report::TableOf>,
    #[serde(rename = "figure")]
    figures: Vec<report::FigureOf>,
}

/// Labels of an axis.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(
    untagged,
    expecting = "a list of labels, `{ from = 0, to = 9 }`, or the name of a table of `csv`, whose first column has the labels"
)]
enum Labels {
    Listed(Vec<Label>),
    Numbers { from: u32, to: u32 },
    Csv(String),
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
enum Label {
    Word(String),
    Whole(i64),
    Real(f64),
}

impl Label {
    fn text(&self) -> String {
        match self {
            Label::Word(word) => word.clone(),
            Label::Whole(number) => number.to_string(),
            Label::Real(number) => number.to_string(),
        }
    }
}

/// A grid of runs: one for each combination of labels.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Grid {
    /// The axes. Settings of their labels are layered in this order.
    over: Vec<String>,
    /// Settings of the grid's runs, layered over those of `run` and under those of labels.
    set: Settings,
    /// Condition that a combination must meet to be run; by default all are run.
    only: Option<String>,
    /// Additional measure of the grid's runs, beyond the counters and reports that every run has.
    measure: Option<String>,
}

/// A table of published figures: the first column has the labels of an axis.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Csv {
    /// The table's file in `data/published`.
    file: String,
    axis: String,
    /// Replacements for labels that the experiment writes differently.
    #[serde(default)]
    write: BTreeMap<String, String>,
}

/// A parsed and checked experiment.
#[derive(Debug)]
pub struct Design {
    file: File,
    source: Source,
    axes: BTreeMap<String, Axis>,
    csv: BTreeMap<String, BTreeMap<String, array::Array>>,
}

/// Maximum number of labels of an axis, of runs of a grid, and of layered settings of a run. A typo in a file then causes an
/// error message instead of filling the memory.
const LABELS_MAX: usize = 10_000;
const RUNS_MAX: usize = 20_000;
const LAID_MAX: u32 = 200;

/// Maximum number of bases that are nested.
const BASES_MAX: u32 = 4;

/// Returns the path and text of the base with this name.
type Bases<'a> = &'a dyn Fn(&str) -> Result<(PathBuf, String)>;

/// Returns the entry with this name.
///
/// # Errors
/// There is no such entry: the message begins with `what`, and names the closest match.
fn pick<'a, T>(what: &str, name: &str, all: impl IntoIterator<Item = (&'a str, T)>) -> Result<T> {
    let mut known = Vec::new();
    for (own, value) in all {
        if own == name {
            return Ok(value);
        }
        known.push(own.to_owned());
    }
    bail!("{what} `{name}`{}", Candidates::of(name, known))
}

fn named<T>(all: &BTreeMap<String, T>) -> impl Iterator<Item = (&str, &T)> {
    all.iter().map(|(name, value)| (name.as_str(), value))
}

impl Design {
    /// Reads an experiment. Its base is searched in the same folder, then among the embedded bases.
    ///
    /// # Errors
    /// A parse error or an impossible value, with its line.
    pub fn open(path: &Path) -> Result<Design, FileError> {
        Design::beside(path, &read_text_file(path)?)
    }

    /// Parses the text of an experiment as if it were in the file `path`.
    ///
    /// # Errors
    /// A parse error or an impossible value, with its line.
    pub fn beside(path: &Path, text: &str) -> Result<Design, FileError> {
        Design::parse(path, text, &|name| {
            let file = homenode_units::file_name(name, ".toml")?;
            let folders = path.ancestors().skip(1).take(2);
            let mut places = folders.map(|folder| folder.join(&file));
            if let Some(place) = places.find(|place| place.is_file()) {
                let text = read_text_file(&place)?;
                return Ok((place, text));
            }
            base(name).with_context(|| {
                format!("`{name}.toml` is neither beside this file, nor in the folder above, nor built in")
            })
        })
    }

    /// Parses an experiment that is embedded in the program.
    ///
    /// # Errors
    /// A parse error or an impossible value, with its line.
    pub fn embedded(name: &str, text: &str) -> Result<Design, FileError> {
        let known = |name: &str| base(name).with_context(|| format!("no base is named `{name}`"));
        Design::parse(format!("data/experiments/{name}.toml"), text, &known)
    }

    /// Parses the text of an experiment.
    ///
    /// # Errors
    /// A parse error or an impossible value, with its line.
    pub fn parse(path: impl AsRef<Path>, text: &str, bases: Bases<'_>) -> Result<Design, FileError> {
        let path = path.as_ref();
        let mut file: File = read_toml(path, text)?;
        let source = Source::new(path, text);
        let mut next = file.base.clone();
        for _ in 0..BASES_MAX {
            let Some(name) = next else { break };
            let (path, text) = bases(&name).map_err(|error| source.complaint("base", error.to_string()))?;
            let base: File = read_toml(path, &text)?;
            next = base.base.clone();
            file.over(base);
        }
        let mut design = Design {
            file,
            source,
            axes: BTreeMap::new(),
            csv: BTreeMap::new(),
        };
        design.lay_out()?;
        design.check()?;
        Ok(design)
    }

    #[expect(clippy::needless_pass_by_value, reason = "errors are handed over")]
    fn complaint(&self, key: &str, message: impl ToString) -> FileError {
        self.source.complaint(key, message.to_string())
    }

    /// Sets up axes and published tables, whose labels may refer to each other.
    fn lay_out(&mut self) -> Result<(), FileError> {
        for (name, csv) in &self.file.csv {
            let found = measures::published(csv)
                .map_err(|error| self.complaint(&format!("csv.{name}.file"), error))?;
            self.csv.insert(name.clone(), found);
        }
        for (name, labels) in &self.file.axes {
            let labels = match labels {
                Labels::Listed(labels) => labels.iter().map(Label::text).collect(),
                Labels::Numbers { from, to } => {
                    let numbers = (*from..=*to).take(LABELS_MAX + 1);
                    numbers.map(|number| number.to_string()).collect()
                }
                Labels::Csv(table) => {
                    let first = self.csv.get(table).and_then(|columns| columns.values().next());
                    let first = first.ok_or_else(|| {
                        let known = Candidates::of(table, self.csv.keys().cloned());
                        let said = format!("there is no table `{table}` in `csv`{known}");
                        self.complaint(&format!("axes.{name}"), said)
                    })?;
                    first.axes[0].labels.clone()
                }
            };
            if labels.len() > LABELS_MAX {
                let said = format!("an axis may have at most {LABELS_MAX} labels");
                return Err(self.complaint(&format!("axes.{name}"), said));
            }
            self.axes.insert(name.clone(), Axis::new(name, labels));
        }
        for (name, settings) in [("run", &self.file.run)]
            .into_iter()
            .chain(named(&self.file.labels))
        {
            for label in &settings.is {
                self.label(label)
                    .map_err(|error| self.complaint(&format!("labels.{name}"), error))?;
            }
        }
        Ok(())
    }

    fn label(&self, name: &str) -> Result<&Settings> {
        self.file.labels.get(name).with_context(|| {
            let known = Candidates::of(name, self.file.labels.keys().cloned());
            format!("`is` names `{name}`, which no `[labels.…]` describes{known}")
        })
    }

    /// Checks that every combination is a valid run, and every name is defined.
    fn check(&self) -> Result<(), FileError> {
        for name in self.file.grid.keys() {
            for axis in &self.file.grid[name].over {
                self.axis(&format!("grid.{name}.over"), axis)?;
            }
            self.measure(name)
                .map_err(|error| self.complaint(&format!("grid.{name}.measure"), error))?;
            self.cells(name).map_err(|error| {
                let error = error.to_string();
                let key = self.culprit(name, &error);
                // The complaint names the key with its tables, so the error need not repeat it.
                self.complaint(
                    &key,
                    error.rsplit_once(" (key `").map_or(&*error, |(said, _)| said),
                )
            })?;
        }
        self.model().map_err(|error| self.complaint("model", error))?;
        report::check(self)
    }

    /// Returns the axis that `key` names, or an error if there is none.
    fn axis(&self, key: &str, name: &str) -> Result<&Axis, FileError> {
        pick("there is no axis", name, named(&self.axes)).map_err(|error| self.complaint(key, error))
    }

    /// Returns the key in the file that most likely caused a run's error: one with the name that the error mentions.
    fn culprit(&self, grid: &str, error: &str) -> String {
        let key = error
            .rsplit_once("(key `")
            .and_then(|(_, rest)| rest.split_once('`'))
            .map(|(key, _)| key);
        let last = key.and_then(|key| key.rsplit('.').next()).unwrap_or_default();
        let tables = self.file.labels.keys().map(|label| format!("labels.{label}"));
        let tables = ["run".to_owned(), format!("grid.{grid}.set")]
            .into_iter()
            .chain(tables);
        let parts = [
            "vm[0]",
            "every_vm",
            "scenario",
            "event[0]",
            "workload[0]",
            "config",
        ];
        let mut places = tables.flat_map(|table| parts.map(|part| format!("{table}.{part}.{last}")));
        let found = places.find(|place| {
            let complaint = self.complaint(place, "");
            let parent = place.rsplit_once('.').map_or("", |(parent, _)| parent);
            complaint.place != self.complaint(parent, "").place
        });
        found.unwrap_or_else(|| format!("grid.{grid}"))
    }

    /// Returns a grid's axes.
    fn axes_of(&self, grid: &str) -> Vec<Axis> {
        let over = self.file.grid[grid].over.iter();
        over.map(|axis| self.axes[axis].clone()).collect()
    }

    /// Returns the runs of a grid in the order of its axes; `None` for a combination that is not run.
    fn cells(&self, name: &str) -> Result<Vec<Option<Run>>> {
        let axes = self.axes_of(name);
        let lengths = axes.iter().map(|axis| axis.labels.len());
        let count = lengths.fold(1_usize, usize::saturating_mul);
        ensure!(
            count <= RUNS_MAX,
            "{count} combinations of labels make too many runs; at most {RUNS_MAX} are allowed"
        );
        let run = |labels: array::Labels| {
            self.run(&self.file.grid[name], &labels).map_err(|error| {
                let labels: Vec<&str> = labels.iter().map(|(_, label)| label.as_str()).collect();
                match labels.is_empty() {
                    true => error,
                    false => anyhow!("for {}: {error}", labels.join(", ")),
                }
            })
        };
        labels(&axes).map(run).collect()
    }

    fn run(&self, grid: &Grid, labels: &[(String, String)]) -> Result<Option<Run>> {
        let mut settings = Settings::default();
        self.lay(&mut settings, &self.file.run, &mut 0)?;
        self.lay(&mut settings, &grid.set, &mut 0)?;
        for (_, label) in labels {
            if let Some(own) = self.file.labels.get(label) {
                self.lay(&mut settings, own, &mut 0)?;
            }
        }
        let nesting = Nesting::default();
        let cells = labels
            .iter()
            .map(|(axis, label)| (axis.clone(), Cell::Text(label.clone())));
        let cells: BTreeMap<String, Cell> = cells.collect();
        for when in &self.file.when {
            if Words::new(&settings.clone(), &self.csv, cells.clone(), &nesting).applies(&when.test)? {
                self.lay(&mut settings, &when.set, &mut 0)?;
            }
        }
        let words = Words::new(&settings, &self.csv, cells, &nesting);
        if let Some(only) = &grid.only
            && !words.hold(only)?
        {
            return Ok(None);
        }
        settings.run(&words).map(Some)
    }

    /// Layers settings over others; first layers the settings that `is` refers to.
    fn lay(&self, under: &mut Settings, over: &Settings, laid: &mut u32) -> Result<()> {
        *laid += 1;
        ensure!(
            *laid <= LAID_MAX,
            "labels refer to each other in a circle with `is`"
        );
        for name in &over.is {
            self.lay(under, self.label(name)?, laid)?;
        }
        under.lay(over);
        Ok(())
    }

    /// Returns the grid to which metrics refer by default: the only grid, or `main`.
    fn main_grid(&self) -> String {
        let grids = &self.file.grid;
        let only = grids.keys().next().filter(|_| grids.len() == 1);
        only.map_or("main", String::as_str).to_owned()
    }

    /// Returns the model, if the file names one.
    fn model(&self) -> Result<Option<Model>> {
        let find = |name: &String| {
            pick(
                "there is no model",
                name,
                MODELS.iter().map(|model| (model.0, *model)),
            )
        };
        self.file.model.as_ref().map(find).transpose()
    }

    /// Returns the additional measure of a grid's runs.
    fn measure(&self, grid: &str) -> Result<Option<OfRun>> {
        let find = |name: &String| {
            pick(
                "there is no measure",
                name,
                OF_RUNS.iter().map(|(name, _, of)| (*name, *of)),
            )
        };
        let grid = self.file.grid.get(grid);
        grid.and_then(|grid| grid.measure.as_ref()).map(find).transpose()
    }

    /// Checks that a name is defined.
    fn knows(&self, name: &str) -> Result<()> {
        let (first, rest) = name.split_once('.').unwrap_or((name, ""));
        if self.file.grid.contains_key(first) && !rest.is_empty() {
            return self.knows(rest);
        }
        let mut known: Vec<String> = self.axes.keys().chain(self.file.values.keys()).cloned().collect();
        known.extend(self.csv.keys().cloned());
        known.extend(["published", "machine", "absent", "vm", "programs", "rank"].map(str::to_owned));
        let of_model = self.model()?.map_or(&[][..], |(_, gives, _)| gives);
        known.extend(of_model.iter().map(|name| (*name).to_owned()));
        known.extend(measures::names());
        known.extend(
            OF_RUNS
                .iter()
                .flat_map(|(_, gives, _)| *gives)
                .map(|name| (*name).to_owned()),
        );
        if known.iter().any(|own| own == first) {
            return Ok(());
        }
        bail!("nothing is named `{name}`{}", Candidates::of(first, known))
    }

    /// Returns the values of a word that the labels of an axis define.
    fn words(&self, axis: &Axis, word: &str) -> Result<array::Array> {
        let of = |label: &String| match self
            .file
            .labels
            .get(label)
            .and_then(|label| label.words.get(word))
        {
            None => Cell::Absent,
            Some(toml::Value::String(text)) => Cell::Text(text.clone()),
            Some(other) => Cell::Text(other.to_string()),
        };
        let cells: Vec<Cell> = axis.labels.iter().map(of).collect();
        let known = cells.iter().any(|cell| *cell != Cell::Absent);
        ensure!(known, "no label of axis `{}` has a word `{word}`", axis.name);
        Ok(array::Array::of(vec![axis.clone()], cells))
    }

    /// Returns a figure of the machine's file.
    fn of_machine(&self, path: &str) -> Result<array::Array> {
        let name = self.file.run.machine.as_deref().unwrap_or_default();
        let machine = homenode_machine_files::preset(name)?;
        let machine = serde_json::json!(machine);
        let found = machine.pointer(&format!("/{}", path.replace('.', "/")));
        let number = found.and_then(serde_json::Value::as_f64);
        let number =
            number.with_context(|| format!("the file of machine `{name}` has no number `{path}`"))?;
        Ok(array::Array::one(Cell::Number(number)))
    }

    /// Checks that the file has a value with this name.
    ///
    /// # Errors
    /// There is no such value; the message names the closest match.
    pub fn has_value(&self, name: &str) -> Result<()> {
        pick("the file has no value", name, named(&self.file.values)).map(drop)
    }

    /// Returns the title.
    pub fn title(&self) -> &str {
        &self.file.title
    }

    /// Returns a row for each VM of each run: its grid and labels, then its metrics.
    ///
    /// # Errors
    /// A run that was not made.
    pub fn rows(&self, outcomes: &Outcomes) -> Result<Vec<array::Row>> {
        let mut rows = Vec::new();
        for name in self.file.grid.keys() {
            for (run, labels) in self.cells(name)?.iter().zip(labels(&self.axes_of(name))) {
                let Some(run) = run else { continue };
                let counted = measures::of_run(run, outcomes.of(run)?, None)?;
                let first = [("grid".to_owned(), name.clone())].into_iter().chain(labels);
                rows.extend(counted.rows(&first.map(|(column, cell)| (column, cell.into())).collect()));
            }
        }
        Ok(rows)
    }

    /// Returns all runs of all grids.
    ///
    /// # Errors
    /// None after [`Design::parse`].
    pub fn all_runs(&self) -> Result<Vec<Run>> {
        let all = self.file.grid.keys().map(|name| self.cells(name));
        let all: Vec<Vec<Option<Run>>> = all.collect::<Result<_>>()?;
        Ok(all.into_iter().flatten().flatten().collect())
    }

    /// Returns the id of the claim that the experiment decides; empty if there is none.
    pub fn claim(&self) -> &str {
        self.file.claim.as_deref().unwrap_or_default()
    }

    /// Returns all runs of all grids, which [`Design::parse`] has checked.
    pub fn runs(&self) -> Vec<Run> {
        self.all_runs().unwrap_or_default()
    }

    /// Derives the decision from the outcomes of the runs.
    ///
    /// # Errors
    /// A message that says what is missing.
    pub fn decide(&self, outcomes: &Outcomes) -> Result<Decision> {
        report::decision(&scope::Scope::new(self, outcomes))
    }
}

impl File {
    /// Adds everything from the base that this file does not define itself.
    fn over(&mut self, base: File) {
        fn fill<T>(own: &mut BTreeMap<String, T>, base: BTreeMap<String, T>) {
            for (name, value) in base {
                own.entry(name).or_insert(value);
            }
        }
        let mut run = base.run;
        run.lay(&self.run);
        run.is.extend(self.run.is.iter().cloned());
        self.run = run;
        self.when.splice(0..0, base.when);
        fill(&mut self.axes, base.axes);
        fill(&mut self.labels, base.labels);
        fill(&mut self.grid, base.grid);
        fill(&mut self.csv, base.csv);
        fill(&mut self.values, base.values);
        self.why.extend(base.why);
        self.tables.extend(base.tables);
    }
}
