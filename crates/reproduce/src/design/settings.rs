//! Settings of a run. The settings of each label are layered over those of all runs, one after another.
//!
//! In every text of a setting, `{word}` is replaced by the run's label on the axis with that name, or by a word that a
//! setting defines. A text that begins with `=` is an expression, and is replaced by the resulting number.

use std::cell::Cell as Flag;
use std::collections::BTreeMap;

use anyhow::{Context as _, Error, Result, anyhow, bail, ensure};
use homenode_control::Config;
use homenode_twin::Scenario;
use homenode_twin::workload;
use homenode_units::{Candidates, Chance, Ns};
use serde::Deserialize;
use toml::{Table, Value};

use super::array::{Array, Cell, Named};
use super::expression::{Expression, Template};
use super::functions::{Names, evaluate, holds};
use crate::run::Run;
use crate::vary::Change;

/// Key of VMs and events: the number of copies. The word `n` is the number of the copy, from 1.
const COUNT: &str = "count";
/// Key of VMs and events: one copy for each word of a list. The word `it` is the word of the copy.
const EACH: &str = "each";
/// Key of a VM: the settings of every VM do not apply to it.
const APART: &str = "not_every";
/// Key of a workload: the built-in workload from which it is derived.
const LIKE: &str = "like";
/// Key of an event: how long the VM stays before it is sent away, each time.
const STAYS: &str = "stays";

/// Limits for one file. A typo then causes an error message instead of filling the memory.
const COPIES_MAX: i64 = 1_000;
const PINS_MAX: usize = 10_000;
/// Limits for the number of words filled in for a run, for their nesting, and for the length of a text.
const FILLED_MAX: u32 = 10_000;
const WITHIN_MAX: u32 = 20;
const TEXT_MAX: usize = 4_096;

/// Settings of runs. Later settings override earlier ones, key by key; VMs with the same name are the same VM.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Settings {
    /// Other labels whose settings apply first.
    pub is: Vec<String>,
    /// Words for use in braces: numbers, and texts that may refer to other words.
    pub words: BTreeMap<String, Value>,
    /// Preset of the machine.
    pub machine: Option<String>,
    /// When counting begins.
    pub from: Option<String>,
    /// When the run ends, if its programs have not ended before.
    pub until: Option<String>,
    /// Interval at which VMs are sampled from then until the end, for measures over time.
    pub watch: Option<String>,
    /// The policies that act.
    pub policies: Option<String>,
    /// Factors by which inputs of the machine and its workloads change, by the name of the input.
    pub vary: Table,
    /// Seed of all random draws; by default the label of axis `seed`, or 1.
    pub seed: Option<Value>,
    /// The agent's settings, as in its file.
    pub config: Table,
    /// The scenario's keys except VMs, events and workloads.
    pub scenario: Table,
    /// Keys of every VM, including VMs that are defined later.
    pub every_vm: Table,
    /// VMs: a new name defines a VM, and a known name overrides keys of that VM.
    pub vm: Vec<Table>,
    /// Events.
    pub event: Vec<Table>,
    /// The experiment's own workloads. With `like`, the given keys override those of a built-in one.
    pub workload: Vec<Table>,
}

/// Settings under a condition.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct When {
    /// The condition, an expression of words and labels.
    #[serde(rename = "if")]
    pub test: String,
    /// Settings that apply if the condition holds.
    pub set: Settings,
}

/// Merges recursively: tables key by key, other values as a whole.
fn lay(over: &Table, under: &mut Table) {
    for (key, value) in over {
        match (value, under.get_mut(key)) {
            (Value::Table(over), Some(Value::Table(under))) => lay(over, under),
            _ => {
                under.insert(key.clone(), value.clone());
            }
        }
    }
}

fn text<'a>(table: &'a Table, key: &str) -> Option<&'a str> {
    table.get(key).and_then(Value::as_str)
}

impl Settings {
    /// Layers other settings over these.
    pub(super) fn lay(&mut self, over: &Settings) {
        let words = over.words.iter().map(|(name, word)| (name.clone(), word.clone()));
        self.words.extend(words);
        for (own, over) in [
            (&mut self.machine, &over.machine),
            (&mut self.from, &over.from),
            (&mut self.until, &over.until),
            (&mut self.watch, &over.watch),
            (&mut self.policies, &over.policies),
        ] {
            if over.is_some() {
                own.clone_from(over);
            }
        }
        if over.seed.is_some() {
            self.seed.clone_from(&over.seed);
        }
        lay(&over.config, &mut self.config);
        lay(&over.vary, &mut self.vary);
        lay(&over.scenario, &mut self.scenario);
        lay(&over.every_vm, &mut self.every_vm);
        for vm in self.vm.iter_mut().filter(|vm| !vm.contains_key(APART)) {
            lay(&over.every_vm, vm);
        }
        for vm in &over.vm {
            let known = self
                .vm
                .iter_mut()
                .find(|own| text(own, "name") == text(vm, "name"));
            if let Some(known) = known {
                lay(vm, known);
                continue;
            }
            let mut new = if vm.contains_key(APART) {
                Table::new()
            } else {
                self.every_vm.clone()
            };
            lay(vm, &mut new);
            self.vm.push(new);
        }
        self.event.extend(over.event.iter().cloned());
        self.workload.extend(over.workload.iter().cloned());
    }

    /// Returns the run that these settings describe, with words filled in.
    ///
    /// # Errors
    /// A message about a setting that is invalid for the scenario or the agent.
    pub(super) fn run(&self, words: &Words<'_>) -> Result<Run> {
        let one = |text: &Option<String>, otherwise: &str| words.fill(text.as_deref().unwrap_or(otherwise));
        let time = |text: &Option<String>, otherwise: &str| -> Result<Ns> {
            let text = one(text, otherwise)?;
            text.parse().map_err(|error| anyhow!("`{text}`: {error}"))
        };
        let machine = self.machine.as_ref();
        let machine = machine.context("the machine is missing: set `machine` in `run`")?;
        let mut scenario = filled_table(&self.scenario, words)?;
        scenario.insert("name".to_owned(), Value::String(String::new()));
        let workloads = self.workload.iter().map(|own| own_workload(own, words));
        for (key, list) in [
            ("vm", repeated(&self.vm, words)?),
            ("event", self.events(words)?),
            ("workload", workloads.collect::<Result<_>>()?),
        ] {
            scenario.insert(
                key.to_owned(),
                Value::Array(list.into_iter().map(Value::Table).collect()),
            );
        }
        let scenario = Scenario::deserialize(scenario).map_err(|error| in_words("scenario", &error))?;
        let mut config = filled_table(&self.config, words)?;
        let policies = one(&self.policies, "default")?;
        config.insert("policies".to_owned(), Value::String(policies));
        let config = Config::deserialize(config).map_err(|error| in_words("config", &error))?;
        let seed = match &self.seed {
            Some(seed) => filled(seed, words)?.as_integer(),
            None => words.word("seed").map_or(Ok(Some(1)), |word| {
                anyhow::Ok(word?.number()?.map(|seed| seed as i64))
            })?,
        };
        Ok(Run {
            machine: words.fill(machine)?,
            scenario,
            config,
            seed: seed
                .and_then(|seed| u64::try_from(seed).ok())
                .context("a seed must be a whole number, 0 or above")?,
            warm_up: time(&self.from, "0s")?,
            until: time(&self.until, "4000s")?,
            watch: self.watch.as_ref().map(|_| time(&self.watch, "")).transpose()?,
            changes: self.changes(words)?,
        })
    }

    fn changes(&self, words: &Words<'_>) -> Result<Vec<Change>> {
        let change = |(name, factor): (String, Value)| {
            let factor = factor
                .as_float()
                .or(factor.as_integer().map(|whole| whole as f64));
            let factor =
                factor.with_context(|| format!("the factor of `{name}` must be a number (key `vary`)"))?;
            Change::parse(&name, factor).map_err(|error| anyhow!("{error} (key `{name}`)"))
        };
        filled_table(&self.vary, words)?.into_iter().map(change).collect()
    }

    fn events(&self, words: &Words<'_>) -> Result<Vec<Table>> {
        let mut events = Vec::new();
        for event in repeated(&self.event, words)? {
            if event.contains_key(STAYS) {
                events.extend(sent_away(&event)?);
            } else {
                events.push(event);
            }
        }
        Ok(events)
    }
}

/// Returns Serde's message together with the key that it is about.
fn in_words(what: &str, error: &toml::de::Error) -> Error {
    let message = error.message();
    let unknown = message
        .strip_prefix("unknown field `")
        .and_then(|rest| rest.split_once("`, "));
    if let Some((key, valid)) = unknown {
        let known = Candidates::of(key, valid.split('`').skip(1).step_by(2).map(str::to_owned));
        return anyhow!("{what}: unknown key `{key}`{known} (key `{key}`)");
    }
    let text = error.to_string();
    let last = text.trim_end().rsplit('\n').next();
    let key = last.and_then(|last| last.strip_prefix("in `")?.strip_suffix('`'));
    match key {
        Some(key) => anyhow!("{what}: {message} (key `{key}`)"),
        None => anyhow!("{what}: {message}"),
    }
}

/// Expands tables that stand for several copies.
fn repeated(tables: &[Table], words: &Words<'_>) -> Result<Vec<Table>> {
    let mut all = Vec::new();
    for table in tables {
        let mut table = table.clone();
        table.remove(APART);
        let count = table
            .remove(COUNT)
            .map(|count| filled(&count, words))
            .transpose()?;
        let each = table.remove(EACH).map(|each| filled(&each, words)).transpose()?;
        let several: Vec<Words<'_>> = match (count, each) {
            (Some(count), _) => {
                let count = count
                    .as_integer()
                    .filter(|count| (0..=COPIES_MAX).contains(count));
                let count = count
                    .with_context(|| format!("`count` must be a whole number from 0 to {COPIES_MAX}"))?;
                (1..=count)
                    .map(|n| words.with("n", Cell::Number(n as f64)))
                    .collect()
            }
            (None, Some(Value::Array(each))) => {
                let each = each.iter().map(|word| word.as_str().unwrap_or_default());
                each.map(|word| words.with("it", Cell::Text(word.to_owned())))
                    .collect()
            }
            _ => vec![words.clone()],
        };
        for mut words in several {
            // The word `workload` is available in other keys of the VM.
            if let Some(workload) = text(&table, "workload") {
                words = words.with("workload", Cell::Text(words.fill(workload)?));
            }
            all.push(filled_table(&table, &words)?);
        }
    }
    Ok(all)
}

fn filled_table(table: &Table, words: &Words<'_>) -> Result<Table> {
    let filled = |(key, value): (&String, &Value)| {
        let value = filled(value, words).map_err(|error| anyhow!("{error} (key `{key}`)"))?;
        Ok((words.fill(key)?, value))
    };
    table.iter().map(filled).collect()
}

fn filled(value: &Value, words: &Words<'_>) -> Result<Value> {
    match value {
        Value::String(text) => match text.strip_prefix('=') {
            Some(expression) => {
                let number = words.value(expression)?.number()?;
                let number = number.with_context(|| format!("`{text}` does not result in a number"))?;
                Ok(match number.fract() == 0.0 && number.abs() < 1e15 {
                    true => Value::Integer(number as i64),
                    false => Value::Float(number),
                })
            }
            None => Ok(Value::String(words.fill(text)?)),
        },
        Value::Table(table) => Ok(Value::Table(filled_table(table, words)?)),
        Value::Array(list) => {
            let list = list.iter().map(|value| filled(value, words));
            Ok(Value::Array(list.collect::<Result<_>>()?))
        }
        other => Ok(other.clone()),
    }
}

/// Returns a workload that the experiment defines.
fn own_workload(table: &Table, words: &Words<'_>) -> Result<Table> {
    let mut own = filled_table(table, words)?;
    let Some(like) = own.remove(LIKE) else {
        return Ok(own);
    };
    let like = like.as_str().unwrap_or_default();
    let Some(known) = workload::builtin(like) else {
        let names = workload::names().map(str::to_owned);
        bail!("there is no workload `{like}`{}", Candidates::of(like, names));
    };
    let mut whole = Table::try_from(known)?;
    lay(&own, &mut whole);
    Ok(whole)
}

/// Returns pins that repeatedly move a VM to other CPUs and back. The VM stays for a fixed time, and is away for a uniformly
/// drawn time.
fn sent_away(event: &Table) -> Result<Vec<Table>> {
    let of = |key: &str| {
        text(event, key).with_context(|| format!("an event with `{STAYS}` must also have `{key}`"))
    };
    let time = |key: &str| -> Result<u64> {
        let time: Ns = of(key)?.parse().map_err(|error| anyhow!("`{key}`: {error}"))?;
        Ok(time.0)
    };
    let (stays, most, until) = (time(STAYS)?, time("away_at_most")?, time("until")?);
    let (mut at, mut chance, mut pins) = (time("at")?, Chance::new(1), Vec::new());
    while at < until {
        let drawn = chance.bits() % most.max(1);
        let away = at.saturating_add(stays);
        let home = away.saturating_add(drawn);
        let few = pins.len() < PINS_MAX;
        ensure!(
            few,
            "the VM would be pinned more than {PINS_MAX} times: let it stay longer (`{STAYS}`)"
        );
        for (at, cpus) in [(away, of("away")?), (home, of("home")?)] {
            let pin = Table::from_iter([("cpus".to_owned(), Value::String(cpus.to_owned()))]);
            let action = Table::from_iter([("pin".to_owned(), Value::Table(pin))]);
            pins.push(Table::from_iter([
                ("at".to_owned(), Value::String(format!("{at}ns"))),
                ("vm".to_owned(), Value::String(of("vm")?.to_owned())),
                ("action".to_owned(), Value::Table(action)),
            ]));
        }
        at = home;
    }
    Ok(pins)
}

/// Resolves the names in a run's settings.
#[derive(Clone)]
pub(super) struct Words<'a> {
    machine: &'a str,
    given: &'a BTreeMap<String, Value>,
    /// Published tables.
    csv: &'a BTreeMap<String, Named>,
    labels: BTreeMap<String, Cell>,
    nesting: &'a Nesting,
}

/// Nesting depth of the words that are being filled in, and the number filled in so far.
#[derive(Default)]
pub(super) struct Nesting {
    depth: Flag<u32>,
    filled: Flag<u32>,
}

impl<'a> Words<'a> {
    /// Creates the words of a run from the run's settings, published tables, and labels by axis.
    pub(super) fn new(
        settings: &'a Settings,
        csv: &'a BTreeMap<String, Named>,
        labels: BTreeMap<String, Cell>,
        nesting: &'a Nesting,
    ) -> Words<'a> {
        Words {
            machine: settings.machine.as_deref().unwrap_or_default(),
            given: &settings.words,
            csv,
            labels,
            nesting,
        }
    }

    fn with(&self, name: &str, cell: Cell) -> Words<'a> {
        let mut more = self.clone();
        more.labels.insert(name.to_owned(), cell);
        more
    }

    fn word(&self, name: &str) -> Option<Result<Cell>> {
        if let Some(cell) = self.labels.get(name) {
            return Some(Ok(cell.clone()));
        }
        let value = self.given.get(name)?;
        let Nesting { depth, filled: all } = self.nesting;
        depth.set(depth.get() + 1);
        all.set(all.get() + 1);
        let found = if depth.get() > WITHIN_MAX {
            Err(anyhow!("word `{name}` refers to itself"))
        } else if all.get() > FILLED_MAX {
            Err(anyhow!(
                "one run would have more than {FILLED_MAX} words filled in"
            ))
        } else {
            filled(value, self).and_then(|value| match value {
                Value::String(text) => Ok(Cell::Text(text)),
                Value::Integer(number) => Ok(Cell::Number(number as f64)),
                Value::Float(number) => Ok(Cell::Number(number)),
                Value::Boolean(is) => Ok(Cell::Number(f64::from(is))),
                _ => bail!("word `{name}` is neither a text nor a number"),
            })
        };
        depth.set(depth.get() - 1);
        Some(found)
    }

    fn fill(&self, text: &str) -> Result<String> {
        if !text.contains('{') {
            return Ok(text.to_owned());
        }
        let whole = Template::parse(text)?.filled(|expression, digits| {
            match evaluate(expression, self)?.only()? {
                // Machines read the text, so no digit is dropped.
                Cell::Number(number) => {
                    Ok(digits.map_or(number.to_string(), |digits| format!("{number:.digits$}")))
                }
                other => Ok(other.shown()),
            }
        })?;
        ensure!(
            whole.len() <= TEXT_MAX,
            "a text would become longer than {TEXT_MAX} bytes"
        );
        Ok(whole)
    }

    /// Returns true if a condition holds; false if it names something that this run does not have.
    ///
    /// # Errors
    /// An expression that cannot be evaluated.
    pub(super) fn applies(&self, test: &str) -> Result<bool> {
        let names = Expression::parse(test)?;
        let known = |name: &&str| {
            let table = name.split_once('.').map_or("", |(table, _)| table);
            self.labels.contains_key(*name) || self.given.contains_key(*name) || self.csv.contains_key(table)
        };
        Ok(names.names().iter().all(known) && self.hold(test)?)
    }

    /// Returns true if a condition holds.
    ///
    /// # Errors
    /// An expression that cannot be evaluated.
    pub(super) fn hold(&self, test: &str) -> Result<bool> {
        holds(&self.value(test)?)
    }

    fn value(&self, text: &str) -> Result<Cell> {
        Ok(evaluate(&Expression::parse(text)?, self)?.only()?.clone())
    }
}

impl Names for Words<'_> {
    fn named(&self, name: &str) -> Result<Array> {
        let column = || {
            let (table, column) = name.split_once('.')?;
            self.csv.get(table)?.get(column)
        };
        match (self.word(name), column()) {
            (Some(cell), _) => cell.map(Array::one),
            (None, Some(column)) => Ok(column.clone()),
            (None, None) => {
                let known = self.labels.keys().chain(self.given.keys()).cloned();
                Err(anyhow!(
                    "no axis or word is named `{name}`{}",
                    Candidates::of(name, known)
                ))
            }
        }
    }

    fn machine(&self) -> &str {
        self.machine
    }
}
