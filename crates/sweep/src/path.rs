//! Parses keys as paths: `vm.fluid.permit`, `vm.*.memory_policy`, `workload.lbm.program.misses_in_flight`, `config.period`,
//! `duration`.

use homenode_twin::workload;
use homenode_units::Candidates;
use toml::{Table, Value};

/// Matches every VM or workload.
const ALL: &str = "*";

/// A parsed key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Path {
    /// The machine, by its name.
    Machine,
    /// One of the agent's settings.
    Config(Vec<String>),
    /// A key of the scenario.
    Scenario(Vec<String>),
}

impl Path {
    /// Parses a path, whose parts are those of a TOML key: `vm."a.b".permit` refers to VM `a.b`.
    ///
    /// # Errors
    /// A message: not a path, or set by another option.
    pub fn parse(text: &str) -> Result<Path, String> {
        let every = text.replace(".*.", ".\"*\".");
        let keys = toml_edit::Key::parse(&every).map_err(|_| {
            format!("`{text}` is no key: write a path into the scenario such as `vm.NAME.permit`, names with dots in quotes")
        })?;
        let parts: Vec<String> = keys.iter().map(|key| key.get().to_owned()).collect();
        let words: Vec<&str> = parts.iter().map(String::as_str).collect();
        match words[..] {
            ["machine"] => Ok(Path::Machine),
            ["config", "policies"] => {
                Err("the policies are chosen with --policy (`policies` in a plan)".to_owned())
            }
            ["seed"] => Err("the seeds are chosen with --seeds (`seeds` in a plan)".to_owned()),
            ["config"] | ["vm"] | ["workload"] | ["event"] => {
                Err(format!("`{text}` is a table, not a key: go on with a dot"))
            }
            ["config", ..] => Ok(Path::Config(parts[1..].to_vec())),
            ["vm" | "workload" | "event", _] => {
                Err(format!("`{text}` is a table, not a key: go on with a dot"))
            }
            _ => Ok(Path::Scenario(parts)),
        }
    }
}

/// Sets a key of a scenario or of settings.
///
/// # Errors
/// A message: an unknown VM, workload or event, with the closest match.
pub fn set(table: &mut Table, path: &[String], value: &Value) -> Result<(), String> {
    match path {
        [list, name, rest @ ..] if !rest.is_empty() && matches!(&**list, "vm" | "workload" | "event") => {
            if list == "workload" {
                own(table, name);
            }
            for one in found(table, list, name)? {
                put(one, rest, value)?;
            }
            Ok(())
        }
        _ => put(table, path, value),
    }
}

/// Copies a built-in workload into the scenario, under the same name.
fn own(table: &mut Table, name: &str) {
    let list = table
        .entry("workload")
        .or_insert_with(|| Value::Array(Vec::new()));
    let Value::Array(list) = list else { return };
    let is_it = |one: &Value| one.get("name").and_then(Value::as_str) == Some(name);
    let known = workload::builtin(name).filter(|_| !list.iter().any(is_it));
    list.extend(known.and_then(|known| Value::try_from(known).ok()));
}

fn found<'a>(table: &'a mut Table, list: &str, name: &str) -> Result<Vec<&'a mut Table>, String> {
    let all = table.get_mut(list).and_then(Value::as_array_mut);
    let all = all.into_iter().flatten().filter_map(Value::as_table_mut);
    let mut all: Vec<&mut Table> = all.collect();
    if list == "event" {
        let count = all.len();
        let at: Option<usize> = name.parse().ok();
        let at = at.filter(|at| *at < count);
        let at = at.ok_or_else(|| {
            format!("events are numbered from 0, and there are {count}; `{name}` is none of them")
        })?;
        return Ok(vec![all.swap_remove(at)]);
    }
    let name_of = |one: &Table| {
        one.get("name")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    let names: Vec<String> = all.iter().map(|one| name_of(one)).collect();
    let chosen: Vec<&mut Table> = all
        .into_iter()
        .filter(|one| name == ALL || name_of(one) == name)
        .collect();
    if chosen.is_empty() {
        let (what, names) = match list {
            "vm" => ("VM", names),
            _ => (
                list,
                names
                    .into_iter()
                    .chain(workload::names().map(str::to_owned))
                    .collect(),
            ),
        };
        return Err(format!(
            "no {what} is named `{name}`{}",
            Candidates::of(name, names)
        ));
    }
    Ok(chosen)
}

fn put(table: &mut Table, path: &[String], value: &Value) -> Result<(), String> {
    match path {
        [] => Ok(()),
        [key] => {
            table.insert(key.clone(), value.clone());
            Ok(())
        }
        [key, rest @ ..] => match table.entry(key).or_insert_with(|| Value::Table(Table::new())) {
            Value::Table(inner) => put(inner, rest, value),
            other => Err(format!("`{key}` is {}, not a table", other.type_str())),
        },
    }
}
