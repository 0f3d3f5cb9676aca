//! Evaluates operators and functions on arrays.
//!
//! | function | result |
//! |---|---|
//! | `sum` `mean` `min` `max` `geomean` (x, axis, …) | one number for the cells along these axes; without axes, for all cells |
//! | `count`, `rsd` (x, axis, …) | the number of cells that are not 0; the relative standard deviation in percent |
//! | `min` `max` (a, b) | the smaller or larger of the two, label by label |
//! | `abs`(x), `ceil`(x), `floor`(x), `if`(test, a, b), `else`(x, other) | `else` replaces unmeasured cells |
//! | `power`(a, b) | `a` to the power of `b` |
//! | `above`(a, b), `below`(a, b) | how many percent `a` is above or below `b` |
//! | `least` `greatest` (x, axis) | the label with the least or greatest value |
//! | `ranked`(x, axis) | the labels along an axis `rank` from 1, the greatest value first |
//! | `place`(x, axis) | the place of each label in that order |
//! | `tau`(a, b, axis), `r_squared`(y, x, axis) | Kendall's tau; how well a straight line fits |
//! | `regret`(a, cost, axis) | the extra cost of choosing, of two labels, the one with the lower `a`: the mean over all pairs |
//! | `zigzags`(x, low, high, axis) | how many times x falls below `low` and then rises above `high` |
//! | `among`(x, 'one', …) | whether x is one of these words |
//! | `solo_s`, `work_g` (program) | according to its profile: seconds alone on the run's machine; 10^9 instructions |
//! | `footprint_mib`(program, vCPUs), `uses_disk`(program) | the memory that it uses; whether it uses a disk |
//!
//! Reductions skip absent cells. In all other functions, an absent cell makes the result absent.

use anyhow::{Context as _, Error, Result, anyhow, bail, ensure};
use homenode_machine::{Hardware, Machine};
use homenode_machine_files::preset;
use homenode_twin::workload::{self, DeviceKind, Program};
use homenode_units::Candidates;

use super::array::{Array, Axis, Cell};
use super::expression::{Expression, Which};
use homenode_units::stats::{kendall_tau, mean, regret_of, rsd_percent};

/// Resolves names in expressions.
pub(crate) trait Names {
    /// Returns the array of a name.
    ///
    /// # Errors
    /// An unknown name, or an error of its value.
    fn named(&self, name: &str) -> Result<Array>;

    /// Returns the name of the machine, which functions of programs need.
    fn machine(&self) -> &str;
}

const REDUCTIONS: [&str; 7] = ["sum", "mean", "min", "max", "count", "geomean", "rsd"];
const LABELS: [&str; 4] = ["least", "greatest", "ranked", "place"];
/// For a series: counts how many times it falls below one number and then rises above another.
const ZIGZAGS: &str = "zigzags";
const PAIRS: [&str; 3] = ["tau", "r_squared", "regret"];
const PROGRAMS: [&str; 4] = ["solo_s", "footprint_mib", "uses_disk", "work_g"];
const PLAIN: [&str; 9] = [
    "abs", "ceil", "floor", "if", "else", "above", "below", "among", "power",
];

/// Evaluates an expression.
///
/// # Errors
/// A message that says what is wrong.
pub(crate) fn evaluate(expression: &Expression, names: &dyn Names) -> Result<Array> {
    match expression {
        Expression::Number(number) => Ok(Array::one(Cell::Number(*number))),
        Expression::Text(text) => Ok(Array::one(Cell::Text(text.clone()))),
        Expression::Name(name) => names.named(name),
        Expression::Part(of, axis, which) => part(&evaluate(of, names)?, axis, which, names),
        Expression::Call(function, given) => call(function, given, names),
    }
}

fn part(of: &Array, axis: &str, which: &Which, names: &dyn Names) -> Result<Array> {
    match which {
        Which::Some(labels) => of.keep(axis, labels),
        Which::But(labels) => {
            let known = of.axis(axis).map_or(Vec::new(), |(_, axis)| axis.labels.clone());
            let kept: Vec<String> = known
                .into_iter()
                .filter(|label| !labels.contains(label))
                .collect();
            of.keep(axis, &kept)
        }
        Which::One(which) => match evaluate(which, names)? {
            one if one.axes.is_empty() => {
                let label = one.only()?.shown();
                Ok(of.keep(axis, &[label])?.without(axis))
            }
            many => of.picked(axis, &many),
        },
    }
}

fn call(function: &str, given: &[Expression], names: &dyn Names) -> Result<Array> {
    let expects = |count: usize, what: &str| {
        ensure!(given.len() >= count, "{function} takes {what}");
        Ok(())
    };
    let array = |at: usize| evaluate(&given[at], names);
    if REDUCTIONS.contains(&function) {
        expects(1, "a value, and axes unless all are meant")?;
        let first = array(0)?;
        return match axes(&given[1..], &first) {
            Some(axes) => reduced(function, &first, &axes),
            None if given.len() == 2 && matches!(function, "min" | "max") => {
                binary(function, &first, &array(1)?)
            }
            None => bail!("{function} takes a value and axes of that value"),
        };
    }
    if LABELS.contains(&function) {
        expects(2, "a value and an axis")?;
        let first = array(0)?;
        let axes =
            axes(&given[1..], &first).with_context(|| format!("{function} takes an axis of its value"))?;
        return labels(function, &first, &axes);
    }
    if PAIRS.contains(&function) {
        expects(3, "two values and an axis")?;
        let (first, second) = (array(0)?, array(1)?);
        let axes =
            axes(&given[2..], &first).with_context(|| format!("{function} takes an axis of its values"))?;
        return pairs(function, &first, &second, &axes);
    }
    if function == ZIGZAGS {
        expects(4, "a value, two numbers and an axis")?;
        let number = |at: usize| anyhow::Ok(array(at)?.only()?.number()?.unwrap_or(f64::NAN));
        let (first, below, above) = (array(0)?, number(1)?, number(2)?);
        let axes = axes(&given[3..], &first).context("zigzags takes an axis of its value")?;
        let (axes, cells) = Array::reduce(&[&first], &axes, |_, lists| {
            Ok(Cell::Number(zigzags(&numbers(&lists[0])?, below, above) as f64))
        })?;
        return Ok(Array::of(axes, cells));
    }
    if PROGRAMS.contains(&function) {
        expects(1, "a program")?;
        let vcpus = match given.len() {
            1 => 1.0,
            _ => array(1)?.only()?.number()?.unwrap_or(1.0),
        };
        return array(0)?.map(|program| of_program(names.machine(), function, &program.shown(), vcpus));
    }
    match (function, given) {
        ("among", [what, words @ ..]) => {
            let words: Vec<Cell> = words
                .iter()
                .map(|word| Ok(evaluate(word, names)?.only()?.clone()))
                .collect::<Result<_>>()?;
            evaluate(what, names)?.map(|cell| Ok(truth(words.contains(cell))))
        }
        ("if", [test, yes, no]) => {
            let (test, yes, no) = (
                evaluate(test, names)?,
                evaluate(yes, names)?,
                evaluate(no, names)?,
            );
            let chosen = test.zip(&yes, |test, yes| {
                Ok(if holds(test)? { yes.clone() } else { Cell::Absent })
            })?;
            let other = test.zip(&no, |test, no| {
                Ok(if holds(test)? { Cell::Absent } else { no.clone() })
            })?;
            binary("else", &chosen, &other)
        }
        ("abs" | "ceil" | "floor" | "minus" | "not", [of]) => {
            let one = |number: f64| match function {
                "abs" => number.abs(),
                "ceil" => number.ceil(),
                "floor" => number.floor(),
                "minus" => -number,
                _ => f64::from(number == 0.0),
            };
            evaluate(of, names)?.map(|cell| Ok(cell.number()?.map(one).into()))
        }
        (_, [left, right]) => binary(function, &evaluate(left, names)?, &evaluate(right, names)?),
        _ => Err(unknown(function)),
    }
}

/// Returns the profile of the program with this name.
///
/// # Errors
/// There is no such profile.
pub(crate) fn profile(name: &str) -> Result<Program> {
    let found = workload::builtin(name).and_then(|workload| workload.program);
    found.with_context(|| format!("there is no profile of {name}"))
}

/// Returns a machine's timing figures.
///
/// # Errors
///
/// The machine has no timing figures.
pub(crate) fn hardware(machine: &Machine) -> Result<&Hardware> {
    machine
        .hardware
        .as_ref()
        .context("the machine has no timing figures")
}

/// Returns a figure of a program's profile.
fn of_program(machine: &str, function: &str, program: &str, vcpus: f64) -> Result<Cell> {
    let found = profile(program)?;
    Ok(match function {
        "footprint_mib" => Cell::Number(found.footprint(vcpus as u16).as_f64() / f64::from(1 << 20)),
        "uses_disk" => truth(found.io.iter().any(|io| io.device == DeviceKind::Disk)),
        "work_g" => Cell::Number(found.instructions_g_per_thread),
        _ => {
            let machine = preset(machine)?;
            Cell::Number(found.solo_seconds(&machine, hardware(&machine)?))
        }
    })
}

fn unknown(function: &str) -> Error {
    if PLAIN.contains(&function) {
        return anyhow!("{function} has the wrong number of arguments");
    }
    let all = [&REDUCTIONS[..], &LABELS, &PAIRS, &PROGRAMS, &PLAIN, &[ZIGZAGS]].concat();
    let known = Candidates::of(function, all.into_iter().map(str::to_owned));
    anyhow!("there is no function `{function}`{known}")
}

/// Returns the axes that a function's arguments name, or all axes of the array if there are no arguments.
fn axes(given: &[Expression], of: &Array) -> Option<Vec<String>> {
    if given.is_empty() {
        return Some(of.axes.iter().map(|axis| axis.name.clone()).collect());
    }
    let name = |expression: &Expression| match expression {
        Expression::Name(name) if of.axis(name).is_some() => Some(name.clone()),
        _ => None,
    };
    given.iter().map(name).collect()
}

fn truth(is: bool) -> Cell {
    Cell::Number(f64::from(is))
}

/// Returns true if the result of a test is a number other than 0.
///
/// # Errors
/// The cell is a word.
pub(crate) fn holds(cell: &Cell) -> Result<bool> {
    Ok(cell.number()?.is_some_and(|number| number != 0.0))
}

fn binary(function: &str, left: &Array, right: &Array) -> Result<Array> {
    left.zip(right, |a, b| {
        match (function, a, b) {
            ("else", Cell::Absent, other) => return Ok(other.clone()),
            ("else", own, _) => return Ok(own.clone()),
            (_, Cell::Absent, _) | (_, _, Cell::Absent) => return Ok(Cell::Absent),
            ("==", Cell::Text(a), Cell::Text(b)) => return Ok(truth(a == b)),
            ("!=", Cell::Text(a), Cell::Text(b)) => return Ok(truth(a != b)),
            _ => {}
        }
        let (Some(a), Some(b)) = (a.number()?, b.number()?) else {
            return Ok(Cell::Absent);
        };
        Ok(match function {
            "+" => Cell::Number(a + b),
            "-" => Cell::Number(a - b),
            "*" => Cell::Number(a * b),
            "/" => Cell::Number(a / b),
            "%" => Cell::Number(a % b),
            "power" => Cell::Number(libm::pow(a, b)),
            "min" => Cell::Number(a.min(b)),
            "max" => Cell::Number(a.max(b)),
            "above" => Cell::Number(100.0 * (a / b - 1.0)),
            "below" => Cell::Number(100.0 * (1.0 - a / b)),
            "<" => truth(a < b),
            "<=" => truth(a <= b),
            ">" => truth(a > b),
            ">=" => truth(a >= b),
            "==" => truth(a == b),
            "!=" => truth(a != b),
            "and" => truth(a != 0.0 && b != 0.0),
            "or" => truth(a != 0.0 || b != 0.0),
            _ => return Err(unknown(function)),
        })
    })
}

/// Returns the numbers of the cells that are not absent.
fn numbers(cells: &[Cell]) -> Result<Vec<f64>> {
    cells
        .iter()
        .filter_map(|cell| cell.number().transpose())
        .collect()
}

fn reduced(function: &str, of: &Array, axes: &[String]) -> Result<Array> {
    let (axes, cells) = Array::reduce(&[of], axes, |_, lists| {
        let all = numbers(&lists[0])?;
        let folded = |start: f64, by: fn(f64, f64) -> f64| {
            (!all.is_empty()).then(|| all.iter().copied().fold(start, by))
        };
        let one: Option<f64> = match function {
            "count" => Some(all.iter().filter(|number| **number != 0.0).count() as f64),
            "sum" => folded(0.0, |sum, own| sum + own),
            "mean" => mean(all),
            "min" => folded(f64::INFINITY, f64::min),
            "max" => folded(f64::NEG_INFINITY, f64::max),
            "rsd" => rsd_percent(&all),
            _ => {
                folded(1.0, |product, own| product * own).map(|product| product.powf(1.0 / all.len() as f64))
            }
        };
        Ok(one.into())
    })?;
    Ok(Array::of(axes, cells))
}

fn labels(function: &str, of: &Array, axes: &[String]) -> Result<Array> {
    let (left, mut lists) = Array::reduce(&[of], axes, |gone, lists| {
        let labels = &gone[0].labels;
        let mut known: Vec<(f64, &String)> = Vec::new();
        for (cell, label) in lists[0].iter().zip(labels) {
            known.extend(cell.number()?.map(|number| (number, label)));
        }
        let sign = if function == "least" { 1.0 } else { -1.0 };
        known.sort_by(|a, b| (sign * a.0).total_cmp(&(sign * b.0)));
        Ok(known
            .into_iter()
            .map(|(_, label)| Cell::Text(label.clone()))
            .collect::<Vec<Cell>>())
    })?;
    if function == "place" {
        let axis = of.axes.iter().find(|axis| axes.contains(&axis.name)).cloned();
        let axis = axis.context("the function `place` takes an axis")?;
        let place = |list: &Vec<Cell>, label: &String| {
            let at = list.iter().position(|own| *own == Cell::Text(label.clone()));
            Cell::from(at.map(|at| 1.0 + at as f64))
        };
        let cells = lists
            .iter()
            .flat_map(|list| axis.labels.iter().map(|label| place(list, label)));
        let cells = cells.collect();
        return Ok(Array::of([left, vec![axis]].concat(), cells));
    }
    if function != "ranked" {
        let first = |list: &Vec<Cell>| list.first().cloned().unwrap_or(Cell::Absent);
        return Ok(Array::of(left, lists.iter().map(first).collect()));
    }
    let longest = lists.iter().map(Vec::len).max().unwrap_or(0);
    lists
        .iter_mut()
        .for_each(|list| list.resize(longest, Cell::Absent));
    let rank = Axis::new("rank", (1..=longest).map(|rank| rank.to_string()));
    Ok(Array::of([left, vec![rank]].concat(), lists.concat()))
}

fn pairs(function: &str, first: &Array, second: &Array, axes: &[String]) -> Result<Array> {
    let (left, cells) = Array::reduce(&[first, second], axes, |_, lists| {
        let mut both = (Vec::new(), Vec::new());
        for (a, b) in lists[0].iter().zip(&lists[1]) {
            if let (Some(a), Some(b)) = (a.number()?, b.number()?) {
                both.0.push(a);
                both.1.push(b);
            }
        }
        let one = match function {
            "tau" => kendall_tau(&both.0, &both.1),
            "regret" => regret_of(&both.0, &both.1),
            _ => r_squared(&both.0, &both.1),
        };
        Ok(one.into())
    })?;
    Ok(Array::of(left, cells))
}

/// Counts how many times a series falls below the first bound and then rises above the second.
pub(crate) fn zigzags(series: &[f64], below: f64, above: f64) -> usize {
    let (mut low, mut count) = (false, 0);
    for value in series {
        if *value < below {
            low = true;
        } else if low && *value > above {
            low = false;
            count += 1;
        }
    }
    count
}

/// Returns the coefficient of determination of the least-squares line.
pub(crate) fn r_squared(ys: &[f64], xs: &[f64]) -> Option<f64> {
    let (x, y) = (mean(xs.iter().copied())?, mean(ys.iter().copied())?);
    let sum = |of: &dyn Fn(f64, f64) -> f64| xs.iter().zip(ys).map(|(a, b)| of(*a, *b)).sum::<f64>();
    let xy = sum(&|a, b| (a - x) * (b - y));
    Some(xy * xy / (sum(&|a, _| (a - x) * (a - x)) * sum(&|_, b| (b - y) * (b - y))))
}
