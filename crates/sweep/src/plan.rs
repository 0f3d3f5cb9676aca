//! The plan of a sweep. It is read from a file or from options, made self-contained, checked, and identified by a digest.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use homenode_control::Config;
use homenode_machine::Machine;
use homenode_machine_files::file::{FileError, read_text_file, read_toml};
use homenode_search::contender::Contender;
use homenode_twin::named::{self, is_file};
use homenode_twin::{Scenario, Setup, TwinError};
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::SweepError;
use crate::metrics::Metric;
use crate::path::{self, Path};
use crate::values::{self, Setting};

/// Maximum number of runs.
pub const RUNS_MAX: usize = 100_000;
/// Maximum number of runs of a task.
pub const RUNS_PER_TASK_MAX: usize = 64;
/// Approximate number of tasks in a sweep, by default.
const TASKS: usize = 64;

/// A user's request for a sweep, in `PLAN.toml` or on the command line. A self-contained plan has the same form: its `scenario`
/// and `config` are tables, and `machines` contains the text of every machine file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Asked {
    /// Preset or file of the machine; by default the scenario's machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// Policies, each of which is run separately; by default the scenario's policies.
    pub policies: Vec<String>,
    /// Seeds: a number, `1..10`, `1,2,5`, or a list; by default the scenario's seed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seeds: Option<Value>,
    /// Metrics in the table; by default those with which `sim` compares VMs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub metrics: Vec<String>,
    /// Number of runs in a task, at most 64; by default a 64th of all runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runs_per_task: Option<usize>,
    /// The scenario: a built-in's name, a file, or a table.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scenario: Option<Value>,
    /// The agent's settings: a file, or a table.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<Value>,
    /// Keys to set, with their values: `"a,b"`, `"1..9/3"`, or a list.
    pub set: BTreeMap<String, Value>,
    /// Texts of machine files, by the machine's name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub machines: BTreeMap<String, String>,
}

impl Asked {
    /// Returns true if the text is a plan: of the two kinds of file, only a plan names a scenario.
    pub fn is_plan(text: &str) -> bool {
        toml::from_str::<Table>(text)
            .is_ok_and(|table| table.contains_key("scenario") && !table.contains_key("vm"))
    }

    /// Parses a plan's text. Relative paths in it are relative to the plan's folder.
    ///
    /// # Errors
    /// A parse error, with its position.
    pub fn read(path: &str, text: &str) -> Result<Asked, FileError> {
        let mut asked: Asked = read_toml(path, text)?;
        let beside = |name: &mut String| {
            if is_file(name) {
                *name = std::path::Path::new(path)
                    .with_file_name(&*name)
                    .display()
                    .to_string();
            }
        };
        for named in [&mut asked.scenario, &mut asked.config] {
            if let Some(Value::String(name)) = named {
                beside(name);
            }
        }
        if asked.machines.is_empty() {
            asked.machine.iter_mut().for_each(beside);
        }
        Ok(asked)
    }
}

/// A key and its values.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Axis {
    pub key: String,
    path: Path,
    pub values: Vec<Setting>,
}

/// A self-contained, checked plan.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The request, made self-contained: it needs no other file.
    asked: Asked,
    /// Name of the scenario in messages.
    name: String,
    scenario: Table,
    config: Table,
    pub(crate) axes: Vec<Axis>,
    pub(crate) policies: Vec<Contender>,
    pub(crate) seeds: Vec<u64>,
    pub(crate) metrics: Vec<&'static Metric>,
    runs_per_task: usize,
}

/// Position of a run in a plan, as indices of the point, policy and seed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub point: usize,
    pub policy: usize,
    pub seed: usize,
}

#[allow(clippy::needless_pass_by_value, reason = "what map_err hands over")]
fn input(error: impl ToString) -> SweepError {
    SweepError::Input(error.to_string())
}

impl Plan {
    /// Reads a plan or a scenario, given by its file or name. A scenario becomes a plan with one run for each of its
    /// policies.
    ///
    /// # Errors
    /// [`SweepError::Input`] if the text does not parse, or is invalid.
    pub fn open(what: &str) -> Result<Plan, SweepError> {
        Plan::of(Plan::asked_by(what)?)
    }

    /// Reads a request, given by its file or name, without making it self-contained.
    ///
    /// # Errors
    /// [`SweepError::Input`] if the text does not parse, or is invalid.
    pub fn asked_by(what: &str) -> Result<Asked, SweepError> {
        if is_file(what) {
            let text = read_text_file(what).map_err(input)?;
            if Asked::is_plan(&text) {
                return Asked::read(what, &text).map_err(input);
            }
        }
        Ok(Asked {
            scenario: Some(Value::String(what.to_owned())),
            ..Asked::default()
        })
    }

    /// Parses the text of a plan. `path` is used in messages, and its folder is the base of relative paths.
    ///
    /// # Errors
    /// [`SweepError::Input`] if the text does not parse, or is invalid.
    pub fn parse(path: &str, text: &str) -> Result<Plan, SweepError> {
        Plan::of(Asked::read(path, text).map_err(input)?)
    }

    /// Makes a plan self-contained, and checks every key and value.
    ///
    /// # Errors
    /// [`SweepError::Input`] if the text does not parse, or is invalid.
    pub fn of(mut asked: Asked) -> Result<Plan, SweepError> {
        let (name, scenario) = whole_scenario(asked.scenario.take())?;
        let config = whole_config(asked.config.take())?;
        let read = |name: &String| Metric::named(name).map_err(input);
        let mut plan = Plan {
            name,
            scenario,
            config,
            axes: Vec::new(),
            policies: Vec::new(),
            seeds: Vec::new(),
            metrics: asked.metrics.iter().map(read).collect::<Result<_, _>>()?,
            runs_per_task: 1,
            asked,
        };
        plan.axes = plan.read_axes()?;
        plan.find_machines()?;
        let base = plan.read_scenario(&plan.scenario).map_err(input)?;
        plan.read_policies(&base)?;
        plan.seeds = read_seeds(plan.asked.seeds.as_ref(), base.seed)?;
        plan.count()?;
        plan.settle()?;
        plan.check()?;
        let listed = |axis: &Axis| {
            let values = axis.values.iter().map(|value| value.value.clone());
            (axis.key.clone(), Value::Array(values.collect()))
        };
        plan.asked.set = plan.axes.iter().map(listed).collect();
        plan.asked.policies = plan
            .policies
            .iter()
            .map(|policy| policy.name().to_owned())
            .collect();
        let seed = |seed: &u64| i64::try_from(*seed).map(Value::Integer).map_err(input);
        plan.asked.seeds = Some(Value::Array(
            plan.seeds.iter().map(seed).collect::<Result<_, _>>()?,
        ));
        plan.asked.scenario = Some(Value::Table(plan.scenario.clone()));
        plan.asked.config = Some(Value::Table(plan.config.clone())).filter(|_| !plan.config.is_empty());
        plan.asked.runs_per_task = Some(plan.runs_per_task);
        Ok(plan)
    }

    fn read_axes(&mut self) -> Result<Vec<Axis>, SweepError> {
        let mut axes = Vec::new();
        for (key, values) in std::mem::take(&mut self.asked.set) {
            if matches!(&*key, "policies" | "policy") {
                return Err(input(
                    "the policies are chosen with --policy (`policies` in a plan)",
                ));
            }
            let path = Path::parse(&key).map_err(input)?;
            let values = match &values {
                Value::String(text) => values::parse(text),
                Value::Array(list) => values::listed(list),
                other => Ok(vec![Setting::of(other.clone())]),
            };
            let mut values = values.map_err(|error| input(format!("{key}: {error}")))?;
            if key.ends_with("workload") {
                for value in &mut values {
                    inline(&mut self.scenario, &self.name, &mut value.value)?;
                }
            }
            axes.push(Axis { key, path, values });
        }
        Ok(axes)
    }

    /// Resolves every machine by its name, and copies the text of machine files into the plan.
    fn find_machines(&mut self) -> Result<(), SweepError> {
        if self.asked.machine.is_none() {
            let own = self.scenario.get("machine").and_then(Value::as_str);
            let own = own.map(
                |own| match is_file(own) && !self.asked.machines.contains_key(own) {
                    true => std::path::Path::new(&self.name)
                        .with_file_name(own)
                        .display()
                        .to_string(),
                    false => own.to_owned(),
                },
            );
            self.asked.machine = Some(own.unwrap_or_else(|| named::MACHINE.to_owned()));
        }
        let swept = self.axes.iter().filter(|axis| axis.path == Path::Machine);
        let swept = swept.flat_map(|axis| axis.values.iter().map(Setting::text));
        for name in self
            .asked
            .machine
            .clone()
            .into_iter()
            .chain(swept.collect::<Vec<_>>())
        {
            if is_file(&name) && !self.asked.machines.contains_key(&name) {
                let text = read_text_file(&name).map_err(input)?;
                self.asked.machines.insert(name.clone(), text);
            }
            self.machine(&name)?;
        }
        Ok(())
    }

    fn machine(&self, name: &str) -> Result<Machine, SweepError> {
        match self.asked.machines.get(name) {
            Some(text) => homenode_machine_files::from_toml(name, text).map_err(input),
            None => named::machine(name).map_err(input),
        }
    }

    fn read_policies(&mut self, base: &Scenario) -> Result<(), SweepError> {
        let mut names = match self.asked.policies.is_empty() {
            true => base.policies.clone(),
            false => self.asked.policies.clone(),
        };
        if names.is_empty() {
            names.push(Contender::DEFAULT.name().to_owned());
        }
        let read = names.iter().map(|name| name.parse::<Contender>().map_err(input));
        self.policies = read.collect::<Result<_, _>>()?;
        names.sort_unstable();
        match names.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(input(format!("policy `{}` is given twice", pair[0]))),
            None => Ok(()),
        }
    }

    fn count(&mut self) -> Result<(), SweepError> {
        let parts = self.axes.iter().map(|axis| axis.values.len());
        let parts = parts.chain([self.policies.len(), self.seeds.len()]);
        let runs = parts.fold(1_usize, usize::saturating_mul);
        if runs > RUNS_MAX {
            return Err(input(format!(
                "this sweep would have {runs} runs; at most {RUNS_MAX} are allowed: give fewer values or seeds, or make several sweeps"
            )));
        }
        let usual = runs.div_ceil(TASKS).clamp(1, RUNS_PER_TASK_MAX);
        self.runs_per_task = self.asked.runs_per_task.unwrap_or(usual);
        match self.runs_per_task {
            1..=RUNS_PER_TASK_MAX => Ok(()),
            other => Err(input(format!(
                "a task must have 1 to {RUNS_PER_TASK_MAX} runs, got {other}"
            ))),
        }
    }

    /// Replaces numbers with texts for keys that take only texts: `permit = "250000"`, `cpus = "4"`.
    fn settle(&mut self) -> Result<(), SweepError> {
        for at in 0..self.axes.len() {
            for value in 0..self.axes[at].values.len() {
                let axis = &self.axes[at];
                let one = &axis.values[value];
                let Err(error) = self.alone(axis, &one.value) else {
                    continue;
                };
                let text = Value::String(one.text());
                let as_text = match one.value.is_str() {
                    true => Err(error.clone()),
                    false => self.alone(axis, &text),
                };
                if let Err(of_text) = as_text {
                    // An error about the value is more useful than one about its type.
                    let error = if error.to_string().contains("a text in quotes is expected") {
                        of_text
                    } else {
                        error
                    };
                    return Err(input(format!("{} = {}: {error}", axis.key, one.text())));
                }
                self.axes[at].values[value].value = text;
            }
        }
        Ok(())
    }

    /// Checks that the scenario or the settings parse with this value and all other keys unchanged.
    fn alone(&self, axis: &Axis, value: &Value) -> Result<(), SweepError> {
        match &axis.path {
            Path::Machine => Ok(()),
            Path::Config(key) => {
                let mut config = self.config.clone();
                path::set(&mut config, key, value).map_err(input)?;
                read_config(&config).map(drop)
            }
            Path::Scenario(key) => {
                let mut scenario = self.scenario.clone();
                path::set(&mut scenario, key, value).map_err(input)?;
                // The value may contradict another key that is also set. All keys are checked together later.
                let text = toml::to_string(&scenario).map_err(input)?;
                let read = read_toml::<Scenario>(&self.name, &text);
                read.map(drop).map_err(|error| input(without_place(error)))
            }
        }
    }

    /// Checks that the machine can run every point.
    fn check(&self) -> Result<(), SweepError> {
        for point in 0..self.points() {
            let setup = self.setup(point, 0);
            let (setup, config) = setup.map_err(|error| input(self.at(point, &error.to_string())))?;
            let fits = setup.scenario.check_on(&setup.machine);
            fits.map_err(|error| input(self.at(point, &placeless(error))))?;
            let fits = config.check_on(&setup.machine);
            fits.map_err(|bad| input(self.at(point, &bad.to_string())))?;
        }
        Ok(())
    }

    fn at(&self, point: usize, error: &str) -> String {
        let said = self.said(point);
        if said.is_empty() {
            error.to_owned()
        } else {
            format!("{said}: {error}")
        }
    }

    /// Returns the values of a point, in words.
    pub(crate) fn said(&self, point: usize) -> String {
        let values = self.axes.iter().zip(self.values(point));
        let values = values.map(|(axis, value)| format!("{} = {}", axis.key, value.text()));
        values.collect::<Vec<_>>().join(", ")
    }

    /// Returns the values of a point, one for each axis.
    pub(crate) fn values(&self, point: usize) -> Vec<&Setting> {
        let (mut rest, mut values) = (point, Vec::new());
        for axis in self.axes.iter().rev() {
            values.push(&axis.values[rest % axis.values.len()]);
            rest /= axis.values.len();
        }
        values.reverse();
        values
    }

    /// Returns the set-up of a point with a seed, and the agent's settings except the policies.
    pub(crate) fn setup(&self, point: usize, seed: u64) -> Result<(Setup, Config), SweepError> {
        let (mut scenario, mut config) = (self.scenario.clone(), self.config.clone());
        let mut machine = self.asked.machine.clone().unwrap_or_default();
        for (axis, value) in self.axes.iter().zip(self.values(point)) {
            match &axis.path {
                Path::Machine => machine = value.text(),
                Path::Config(key) => path::set(&mut config, key, &value.value).map_err(input)?,
                Path::Scenario(key) => path::set(&mut scenario, key, &value.value).map_err(input)?,
            }
        }
        let machine = self.machine(&machine)?;
        let scenario = self.read_scenario(&scenario)?;
        Ok((Setup::new(machine, scenario, seed), read_config(&config)?))
    }

    fn read_scenario(&self, table: &Table) -> Result<Scenario, SweepError> {
        let text = toml::to_string(table).map_err(input)?;
        Scenario::from_toml(&self.name, &text).map_err(|error| input(placeless(error)))
    }

    pub(crate) fn points(&self) -> usize {
        self.axes.iter().map(|axis| axis.values.len()).product()
    }

    /// Returns the number of runs.
    pub fn runs(&self) -> usize {
        self.points() * self.policies.len() * self.seeds.len()
    }

    /// Returns the number of tasks.
    pub fn tasks(&self) -> usize {
        self.runs().div_ceil(self.runs_per_task)
    }

    /// Returns the numbers of the runs in a task.
    pub fn runs_of(&self, task: usize) -> std::ops::Range<usize> {
        let begin = task.saturating_mul(self.runs_per_task).min(self.runs());
        begin..begin.saturating_add(self.runs_per_task).min(self.runs())
    }

    pub(crate) fn place(&self, run: usize) -> Place {
        let (seeds, policies) = (self.seeds.len(), self.policies.len());
        Place {
            point: run / seeds / policies,
            policy: run / seeds % policies,
            seed: run % seeds,
        }
    }

    /// Returns a description of a run.
    pub fn name_of(&self, run: usize) -> String {
        let place = self.place(run);
        let (policy, seed) = (&self.policies[place.policy], self.seeds[place.seed]);
        let said = self.said(place.point);
        let comma = if said.is_empty() { "" } else { ", " };
        format!("{said}{comma}{policy}, seed {seed}")
    }

    /// Returns the same plan, and so the same runs, with other metrics.
    ///
    /// # Errors
    /// An unknown metric.
    pub fn with_metrics(mut self, names: &[String]) -> Result<Plan, SweepError> {
        let read = |name: &String| Metric::named(name).map_err(input);
        self.metrics = names.iter().map(read).collect::<Result<_, _>>()?;
        self.asked.metrics = names.to_vec();
        Ok(self)
    }

    /// Formats the plan as a self-contained file.
    ///
    /// # Errors
    /// [`SweepError::Failed`] if TOML cannot express the plan.
    pub fn to_toml(&self) -> Result<String, SweepError> {
        toml::to_string(&self.asked).map_err(|error| SweepError::Failed(error.to_string()))
    }

    /// Returns the SHA-256, in hexadecimal digits, of everything that determines the results of the runs, except the program
    /// that makes them.
    ///
    /// # Errors
    /// [`SweepError::Failed`] if TOML cannot express the plan.
    pub fn digest(&self) -> Result<String, SweepError> {
        let deciding = Asked {
            metrics: Vec::new(),
            runs_per_task: None,
            ..self.asked.clone()
        };
        let text = toml::to_string(&deciding).map_err(|error| SweepError::Failed(error.to_string()))?;
        let hash = ring::digest::digest(&ring::digest::SHA256, text.as_bytes());
        Ok(hash.as_ref().iter().fold(String::new(), |mut digits, byte| {
            // Writing to a string does not fail.
            let _ = write!(digits, "{byte:02x}");
            digits
        }))
    }
}

fn read_config(table: &Table) -> Result<Config, SweepError> {
    let text = toml::to_string(table).map_err(input)?;
    read_toml("config", &text).map_err(|error| input(without_place(error)))
}

/// Removes the position from an error about generated text, where it would mislead.
fn without_place(error: FileError) -> FileError {
    FileError { place: None, ..error }
}

fn placeless(error: TwinError) -> String {
    match error {
        TwinError::File(error) => without_place(error).to_string(),
        other => other.to_string(),
    }
}

fn read_seeds(asked: Option<&Value>, own: u64) -> Result<Vec<u64>, SweepError> {
    let text = match asked {
        None => own.to_string(),
        Some(Value::Array(list)) => list.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    };
    values::seeds(&text).map_err(input)
}

/// Returns the scenario's name or path, and its table, in which references to files are resolved.
fn whole_scenario(asked: Option<Value>) -> Result<(String, Table), SweepError> {
    let what = match asked {
        Some(Value::Table(table)) => {
            let name = table.get("name").and_then(Value::as_str).unwrap_or("scenario");
            return Ok((name.to_owned(), table));
        }
        Some(Value::String(what)) => what,
        _ => {
            return Err(input(
                "the plan names no scenario: add `scenario = \"FILE.toml\"`, or a built-in's name",
            ));
        }
    };
    // Parsed for its error message, which has the position.
    named::scenario(&what).map_err(input)?;
    let (path, text) = named::scenario_text(&what).map_err(input)?;
    if named::is_workload(&text) {
        return Err(input(format!(
            "{what} is a workload: write a scenario with a VM that runs it"
        )));
    }
    let mut table: Table = toml::from_str(&text).map_err(|error| input(error.message()))?;
    let mut found = Vec::new();
    if let Some(Value::Array(vms)) = table.get_mut("vm") {
        for vm in vms.iter_mut().filter_map(Value::as_table_mut) {
            found.push(vm.get("workload").cloned());
        }
    }
    for (at, workload) in found.into_iter().enumerate() {
        let Some(mut workload) = workload else { continue };
        inline(&mut table, &path, &mut workload)?;
        let vm = table.get_mut("vm").and_then(|vms| vms.get_mut(at));
        if let Some(Value::Table(vm)) = vm {
            vm.insert("workload".to_owned(), workload);
        }
    }
    Ok((path, table))
}

/// If a VM's workload is a file, copies it into the scenario, and makes the VM refer to it by name.
fn inline(scenario: &mut Table, path: &str, named: &mut Value) -> Result<(), SweepError> {
    let Some(found) = named.as_str().and_then(|name| named::workload_beside(path, name)) else {
        return Ok(());
    };
    let found = found.map_err(input)?;
    let name = Value::String(found.name.clone());
    let found = Value::try_from(found).map_err(input)?;
    let own = scenario
        .entry("workload")
        .or_insert_with(|| Value::Array(Vec::new()));
    if let Value::Array(own) = own
        && !own.contains(&found)
    {
        own.push(found);
    }
    *named = name;
    Ok(())
}

fn whole_config(asked: Option<Value>) -> Result<Table, SweepError> {
    match asked {
        None => Ok(Table::new()),
        Some(Value::Table(table)) => {
            read_config(&table)?;
            Ok(table)
        }
        Some(Value::String(file)) => {
            let text = read_text_file(&file).map_err(input)?;
            read_toml::<Config>(&file, &text).map_err(input)?;
            toml::from_str(&text).map_err(|error| input(error.message()))
        }
        Some(other) => Err(input(format!(
            "`config` must be a file's name or a table, got {}",
            other.type_str()
        ))),
    }
}
