//! Parses keys as paths: `vm.fluid.permit`, `vm.*.memory_policy`, `workload.lbm.program.misses_in_flight`, `config.period`,
//! `duration`.

use homenode_twin::workload;
use homenode_units::Candidates;
use toml::{Table, Value};

/// Matches every VM or workload.
const ALL: &str = "*";

/// Why a key cannot be set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PathError {
    /// The text is not a path.
    #[error(
        "`{0}` is not a key: write a path into the scenario, such as `vm.NAME.permit`, names with dots in quotes"
    )]
    NoKey(String),
    /// The key chooses policies, which have an option of their own.
    #[error("the policies are chosen with --policy (`policies` in a plan)")]
    Policies,
    /// The key chooses the seed; seeds have an option of their own.
    #[error("the seeds are chosen with --seeds (`seeds` in a plan)")]
    Seeds,
    /// The path ends at a table.
    #[error("`{0}` is a table, not a key: continue the path after a dot")]
    Table(String),
    /// No event has this number.
    #[error("there is no event `{number}`: the scenario has {count} events, numbered from 0")]
    NoEvent {
        /// The number, as written.
        number: String,
        /// Number of events.
        count: usize,
    },
    /// No VM or workload has this name.
    #[error("no {what} is named `{name}`{valid}")]
    NoName {
        /// The kind of object that was searched: VM or workload.
        what: &'static str,
        /// The name.
        name: String,
        /// The existing names.
        valid: Candidates,
    },
    /// The path continues after a value.
    #[error("`{key}` is {kind}, not a table")]
    NoTable {
        /// The key that has the value.
        key: String,
        /// The value's type.
        kind: &'static str,
    },
}

/// A parsed key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// The machine, by name.
    Machine,
    /// One of the agent's settings, as the keys that lead to it.
    Config(Vec<String>),
    /// A key of the scenario.
    Scenario(Vec<String>),
}

impl Path {
    /// Parses a path, which consists of parts like a TOML key: `vm."a.b".permit` refers to VM `a.b`.
    ///
    /// # Errors
    /// A text that is not a path, or a key that another option sets.
    pub(crate) fn parse(text: &str) -> Result<Path, PathError> {
        let every = text.replace(".*.", ".\"*\".");
        let keys = toml_edit::Key::parse(&every).map_err(|_| PathError::NoKey(text.to_owned()))?;
        let parts: Vec<String> = keys.iter().map(|key| key.get().to_owned()).collect();
        let words: Vec<&str> = parts.iter().map(String::as_str).collect();
        match words[..] {
            ["machine"] => Ok(Path::Machine),
            ["config", "policies"] => Err(PathError::Policies),
            ["seed"] => Err(PathError::Seeds),
            ["config" | "vm" | "workload" | "event"] | ["vm" | "workload" | "event", _] => {
                Err(PathError::Table(text.to_owned()))
            }
            ["config", ..] => Ok(Path::Config(parts[1..].to_vec())),
            _ => Ok(Path::Scenario(parts)),
        }
    }
}

/// Sets a key of a scenario or of the agent's settings.
///
/// # Errors
/// An unknown VM, workload or event, with the closest match.
pub(crate) fn set(table: &mut Table, path: &[String], value: &Value) -> Result<(), PathError> {
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

/// Copies a built-in workload into the scenario under the same name, unless the scenario has a workload of this name.
fn own(table: &mut Table, name: &str) {
    let list = table
        .entry("workload")
        .or_insert_with(|| Value::Array(Vec::new()));
    let Value::Array(list) = list else { return };
    let is_it = |one: &Value| one.get("name").and_then(Value::as_str) == Some(name);
    let known = workload::builtin(name).filter(|_| !list.iter().any(is_it));
    list.extend(known.and_then(|known| Value::try_from(known).ok()));
}

fn found<'a>(table: &'a mut Table, list: &str, name: &str) -> Result<Vec<&'a mut Table>, PathError> {
    let all = table.get_mut(list).and_then(Value::as_array_mut);
    let all = all.into_iter().flatten().filter_map(Value::as_table_mut);
    let mut all: Vec<&mut Table> = all.collect();
    if list == "event" {
        let count = all.len();
        let at: Option<usize> = name.parse().ok();
        let at = at.filter(|at| *at < count);
        let at = at.ok_or_else(|| PathError::NoEvent {
            number: name.to_owned(),
            count,
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
                "workload",
                names
                    .into_iter()
                    .chain(workload::names().map(str::to_owned))
                    .collect(),
            ),
        };
        return Err(PathError::NoName {
            what,
            name: name.to_owned(),
            valid: Candidates::of(name, names),
        });
    }
    Ok(chosen)
}

fn put(table: &mut Table, path: &[String], value: &Value) -> Result<(), PathError> {
    match path {
        [] => Ok(()),
        [key] => {
            table.insert(key.clone(), value.clone());
            Ok(())
        }
        [key, rest @ ..] => match table.entry(key).or_insert_with(|| Value::Table(Table::new())) {
            Value::Table(inner) => put(inner, rest, value),
            other => Err(PathError::NoTable {
                key: key.clone(),
                kind: other.type_str(),
            }),
        },
    }
}
