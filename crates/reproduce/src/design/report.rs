//! Presents an experiment's values as results, tests, tables, figures, and texts that contain numbers.

use std::collections::BTreeSet;

use anyhow::{Context as _, Error, Result, anyhow};
use homenode_machine_files::file::FileError;
use homenode_units::file_name;
use serde::Deserialize;

use super::Design;
use super::array::{Array, Axis, Cell, Labels, labels};
use super::expression::{Expression, Template};
use super::functions::holds;
use super::scope::{Scope, at};
use crate::claims;
use crate::experiment::{Decision, Table};
use crate::figure::{Figure, Line, Ranged, Shape as Drawing};
use crate::verdict::{Measured, Shape};
use homenode_units::stats::regret;

/// The test of a shape.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Test {
    /// The subject of the test: a text.
    name: String,
    /// Axes; there is a test for every combination of their labels.
    #[serde(default)]
    each: Vec<String>,
    /// The outcome of the test: a text.
    ours: String,
    /// An expression for whether the test passed; it must be true at every place.
    holds: String,
    /// If the test is about a number of a published table: the published number and ours, as expressions.
    #[serde(default)]
    tabled: Option<(String, String)>,
    /// If the test is about a published choice or ranking: the cost of following it, as an expression.
    #[serde(default)]
    cost: Option<String>,
}

/// A table.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct TableOf {
    title: String,
    /// Axes of the table. There is a row for every combination of their labels.
    over: Vec<String>,
    /// Condition for a row, an expression; by default every combination has a row.
    only: Option<String>,
    /// Expression that sorts the rows, the greatest first.
    order: Option<String>,
    /// First cell of each row, with placeholders for labels; by default the row's labels.
    row: Option<String>,
    /// Head of the first column.
    head: String,
    columns: Vec<Column>,
    /// Fixed rows: first a text, then expressions, each of which adds a cell for every label.
    rows: Vec<Vec<String>>,
}

/// Columns.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(
    untagged,
    expecting = "`[head, expression]`, or `{ each = axis, columns = [[head, expression], …] }`"
)]
pub(super) enum Column {
    /// Head and expression, with a column for each label that a row does not fix.
    Plain(String, String),
    /// One or more columns for each label of an axis.
    Each {
        /// The axis.
        each: String,
        /// Heads and expressions of these columns.
        columns: Vec<(String, String)>,
    },
}

/// A figure.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct FigureOf {
    pub(super) name: String,
    title: String,
    x: String,
    y: String,
    /// Axes; every combination of labels is a group of bars, or a point of each line.
    bars: Vec<String>,
    lines: Vec<String>,
    /// Selects and sorts the groups: those for which `only` holds, the greatest `order` first.
    only: Option<String>,
    order: Option<String>,
    /// Names of groups: a text, or a list.
    groups: Option<Groups>,
    /// Positions of the points; by default the label of the only axis.
    at: Option<String>,
    series: Vec<Series>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
enum Groups {
    Text(String),
    List(Vec<String>),
}

/// Bars or points.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(
    untagged,
    expecting = "`[name, expression]`, `[name, expression, axis]` for means with a whisker, or `{ name = …, points = [[x, y], …] }`"
)]
pub(super) enum Series {
    /// Name and expression; there is a series for each label that does not belong to a group.
    Of(String, String),
    /// Name, expression and axis: means along the axis, with whiskers from the minimum to the maximum.
    Along(String, String, String),
    /// Points that the file states.
    Points {
        /// Name of the series.
        name: String,
        /// The points.
        points: Vec<(f64, f64)>,
    },
}

/// Evaluates a file's results, tests, tables and figures.
///
/// # Errors
/// A message: a run that could not be made, a value that was not measured.
pub(super) fn decision(scope: &Scope<'_>) -> Result<Decision> {
    let file = &scope.design.file;
    let mut measured = Measured {
        inputs: file.inputs.clone(),
        ..Measured::default()
    };
    test(scope, &mut measured)?;
    for (name, expression) in &file.results {
        let cell = scope.value(expression).and_then(|value| value.only().cloned());
        let number = cell
            .and_then(|cell| cell.number())
            .map_err(|error| anyhow!("{error} (result `{name}`)"))?;
        let number = number.with_context(|| format!("`{name}` was not measured"))?;
        measured.numbers.insert(name.clone(), number);
    }
    for (name, expression) in &file.orders {
        let order = scope.value(expression)?.cells().iter().map(Cell::shown).collect();
        measured.orders.insert(name.clone(), order);
    }
    if let Some((names, cost)) = &file.order_cost {
        let (names, costs) = (scope.value(names)?, scope.value(cost)?);
        let cost = |name: &str| {
            let at = names.cells().iter().position(|own| own.shown() == name)?;
            costs.cells().get(at)?.number().ok().flatten()
        };
        let published = claims::named(scope.design.claim());
        for (name, order) in published.iter().flat_map(|claim| &claim.order) {
            measured
                .regrets
                .extend(regret(order, cost).map(|regret| (name.clone(), regret)));
        }
    }
    let texts = |all: &[String]| {
        all.iter()
            .map(|text| scope.text(text, &[]))
            .collect::<Result<Vec<String>>>()
    };
    Ok(Decision {
        measured,
        set_up: texts(&file.set_up)?,
        why: texts(&file.why)?,
        tables: file
            .tables
            .iter()
            .map(|table| table.filled(scope))
            .collect::<Result<_>>()?,
        figures: file
            .figures
            .iter()
            .map(|figure| figure.drawn(scope))
            .collect::<Result<_>>()?,
        measured_here: file.measured_here,
    })
}

fn test(scope: &Scope<'_>, measured: &mut Measured) -> Result<()> {
    // Consecutive tests over the same axes are interleaved, label by label.
    for group in scope.design.file.tests.chunk_by(|a, b| a.each == b.each) {
        for labels in places(scope, &group[0].each, None, None)? {
            for test in group {
                let wrong = |error: Error| anyhow!("{error} (test `{}`)", test.name);
                let own = at(scope.value(&test.holds).map_err(wrong)?, &labels)?;
                let passed = own.cells().iter().map(holds).collect::<Result<Vec<bool>>>();
                let name = scope.text(&test.name, &labels)?;
                if let Some((published, ours)) = &test.tabled {
                    let number = |text| at(scope.value(text)?, &labels)?.only()?.number();
                    let both = number(published).and_then(|published| Ok(published.zip(number(ours)?)));
                    let both = both
                        .and_then(|both| both.context("the value was not measured"))
                        .map_err(wrong)?;
                    measured.tabled.insert(name.clone(), both);
                }
                if let Some(cost) = &test.cost {
                    let cost = at(scope.value(cost).map_err(wrong)?, &labels)?;
                    let cost = cost.only().and_then(Cell::number).map_err(wrong)?;
                    measured.regrets.extend(cost.map(|cost| (name.clone(), cost)));
                }
                measured.shapes.push(Shape {
                    name,
                    ours: scope.text(&test.ours, &labels).map_err(wrong)?,
                    holds: passed.map_err(wrong)?.iter().all(|passed| *passed),
                });
            }
        }
    }
    Ok(())
}

/// Returns the combinations of labels of these axes for which `only` holds, sorted by `order`, the greatest first.
fn places(
    scope: &Scope<'_>,
    over: &[String],
    only: Option<&str>,
    order: Option<&str>,
) -> Result<Vec<Labels>> {
    let axes: Vec<Axis> = over.iter().map(|axis| scope.design.axes[axis].clone()).collect();
    let (only, order) = (
        only.map(|only| scope.value(only)).transpose()?,
        order.map(|order| scope.value(order)).transpose()?,
    );
    // Fail if there are too many combinations.
    Array::build(axes.clone(), |_| Ok(Cell::Absent))?;
    let mut found = Vec::new();
    for labels in labels(&axes) {
        let own = |array: &Option<Array>| {
            array
                .clone()
                .map(|array| at(array, &labels)?.only().cloned())
                .transpose()
        };
        if own(&only)?.map_or(Ok(true), |cell| holds(&cell))? {
            let by = own(&order)?.map_or(Ok(None), |cell| cell.number())?;
            found.push((by.unwrap_or(0.0), labels));
        }
    }
    found.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    Ok(found.into_iter().map(|(_, labels)| labels).collect())
}

/// Returns the combinations of an array's labels along all axes that are not fixed.
fn spread(array: &Array, fixed: &[String]) -> Vec<Labels> {
    let free = array.axes.iter().filter(|axis| !fixed.contains(&axis.name));
    labels(&free.cloned().collect::<Vec<_>>()).collect()
}

fn joined(labels: &Labels) -> String {
    labels
        .iter()
        .map(|(_, label)| label.as_str())
        .collect::<Vec<_>>()
        .join(", ")
}

impl TableOf {
    fn filled(&self, scope: &Scope<'_>) -> Result<Table> {
        let wrong = |error: Error| anyhow!("{error} (table `{}`)", self.title);
        let columns = self.columns(scope).map_err(wrong)?;
        let mut header = vec![self.head.clone()];
        header.extend(columns.iter().map(|(head, ..)| head.clone()));
        let mut rows = Vec::new();
        for labels in places(scope, &self.over, self.only.as_deref(), self.order.as_deref()).map_err(wrong)? {
            if self.over.is_empty() {
                break;
            }
            let mut row = vec![match &self.row {
                Some(text) => scope.text(text, &labels)?,
                None => joined(&labels),
            }];
            for (_, value, own) in &columns {
                row.push(value.shown(scope, &[&labels[..], own].concat()).map_err(wrong)?);
            }
            rows.push(row);
        }
        for own in &self.rows {
            let mut row = Vec::new();
            for (at, text) in own.iter().enumerate() {
                if at == 0 || text.contains('{') {
                    row.push(scope.text(text, &[])?);
                } else {
                    row.extend(scope.value(text).map_err(wrong)?.cells().iter().map(Cell::shown));
                }
            }
            rows.push(row);
        }
        Ok(Table {
            title: scope.text(&self.title, &[])?,
            header,
            rows,
        })
    }

    /// Returns the head and value of each column, and the labels that belong to the column.
    fn columns(&self, scope: &Scope<'_>) -> Result<Vec<(String, Value, Labels)>> {
        let mut all = Vec::new();
        let mut plain = |head: &str, value: &str, own: &Labels| -> Result<()> {
            let value = Value::of(scope, value)?;
            let fixed = self.over.iter().chain(own.iter().map(|(axis, _)| axis));
            let fixed: Vec<String> = fixed.cloned().collect();
            let free = match &value {
                Value::Array(array) => spread(array, &fixed),
                Value::Text(_) => vec![Vec::new()],
            };
            for more in free {
                let labels = [own.clone(), more].concat();
                all.push((scope.text(head, &labels)?, value.clone(), labels));
            }
            Ok(())
        };
        for column in &self.columns {
            match column {
                Column::Plain(head, value) => plain(head, value, &Vec::new())?,
                Column::Each { each, columns } => {
                    for labels in places(scope, std::slice::from_ref(each), None, None)? {
                        for (head, value) in columns {
                            plain(head, value, &labels)?;
                        }
                    }
                }
            }
        }
        Ok(all)
    }
}

/// The content of a cell: an expression's array, or a text with expressions in braces.
#[derive(Clone)]
enum Value {
    Array(Array),
    Text(String),
}

impl Value {
    fn of(scope: &Scope<'_>, text: &str) -> Result<Value> {
        match text.contains('{') {
            true => Ok(Value::Text(text.to_owned())),
            false => scope.value(text).map(Value::Array),
        }
    }

    fn shown(&self, scope: &Scope<'_>, labels: &[(String, String)]) -> Result<String> {
        match self {
            Value::Array(array) => Ok(at(array.clone(), labels)?.only()?.shown()),
            Value::Text(text) => scope.text(text, labels),
        }
    }
}

/// The values of a series, and for means the minimum and maximum.
struct Drawn {
    value: Array,
    range: Option<(Array, Array)>,
}

impl Drawn {
    fn at(&self, labels: &[(String, String)]) -> Result<Option<Ranged>> {
        let number = |array: &Array| at(array.clone(), labels)?.only()?.number();
        let range = match &self.range {
            Some((low, high)) => number(low)?.zip(number(high)?),
            None => None,
        };
        Ok(number(&self.value)?.map(|value| Ranged { value, range }))
    }
}

impl Series {
    /// Returns the name and values of a series; `None` if the file states its points.
    fn values(&self, scope: &Scope<'_>) -> Result<Option<(&String, Drawn)>> {
        let of = |name: &str, value: &str, along: &str| scope.value(&format!("{name}({value}, {along})"));
        Ok(match self {
            Series::Of(name, value) => {
                let value = scope.value(value)?;
                Some((name, Drawn { value, range: None }))
            }
            Series::Along(name, value, axis) => {
                let range = Some((of("min", value, axis)?, of("max", value, axis)?));
                let value = of("mean", value, axis)?;
                Some((name, Drawn { value, range }))
            }
            Series::Points { .. } => None,
        })
    }
}

impl FigureOf {
    fn drawn(&self, scope: &Scope<'_>) -> Result<Figure> {
        let shape = if self.lines.is_empty() {
            self.bars(scope)
        } else {
            self.lines(scope)
        };
        Ok(Figure {
            name: self.name.clone(),
            title: self.title.clone(),
            x_label: self.x.clone(),
            y_label: self.y.clone(),
            shape: shape.map_err(|error| anyhow!("{error} (figure `{}`)", self.name))?,
            marks: Vec::new(),
        })
    }

    fn bars(&self, scope: &Scope<'_>) -> Result<Drawing> {
        let groups = places(scope, &self.bars, self.only.as_deref(), self.order.as_deref())?;
        let name = |labels: &Labels| match &self.groups {
            Some(Groups::Text(text)) => scope.text(text, labels),
            _ => Ok(joined(labels)),
        };
        let names = match &self.groups {
            Some(Groups::List(names)) => names.clone(),
            _ => groups.iter().map(name).collect::<Result<_>>()?,
        };
        let mut series = Vec::new();
        for own in &self.series {
            let Some((name, value)) = own.values(scope)? else {
                continue;
            };
            for more in spread(&value.value, &self.bars) {
                let of_group = |labels: &Labels| value.at(&[&labels[..], &more].concat());
                let bars: Vec<Option<Ranged>> = groups.iter().map(of_group).collect::<Result<_>>()?;
                series.push((scope.text(name, &more)?, bars));
            }
        }
        Ok(Drawing::Bars(names, series))
    }

    fn lines(&self, scope: &Scope<'_>) -> Result<Drawing> {
        let places = places(scope, &self.lines, self.only.as_deref(), None)?;
        let at_x = scope.value(self.at.as_deref().unwrap_or(&self.lines[0]))?;
        let mut series: Vec<Line> = Vec::new();
        for own in &self.series {
            let (name, value) = match (own, own.values(scope)?) {
                (_, Some(found)) => found,
                (Series::Points { name, points }, None) => {
                    let points = points.iter().map(|(x, y)| (*x, Ranged::from(*y)));
                    series.push((name.clone(), points.collect()));
                    continue;
                }
                (_, None) => continue,
            };
            for more in spread(&value.value, &self.lines) {
                let mut points = Vec::new();
                for labels in &places {
                    let labels = [&labels[..], &more].concat();
                    let x = at(at_x.clone(), &labels)?.only()?.number()?;
                    points.extend(x.zip(value.at(&labels)?));
                }
                series.push((scope.text(name, &more)?, points));
            }
        }
        Ok(Drawing::Lines(series))
    }
}

/// Checks that all expressions and texts parse, that their names and axes are defined, and that names of figures are valid.
pub(super) fn check(design: &Design) -> Result<(), FileError> {
    let file = &design.file;
    names_of_figures(design)?;
    let mut all: Vec<(String, &str, bool)> = Vec::new();
    let mut axes: Vec<(String, &[String])> = Vec::new();
    for (table, values) in [
        ("values", &file.values),
        ("results", &file.results),
        ("orders", &file.orders),
    ] {
        let values = values.iter();
        all.extend(values.map(|(name, value)| (format!("{table}.{name}"), value.as_str(), false)));
    }
    for (key, texts) in [("set_up", &file.set_up), ("why", &file.why)] {
        all.extend(texts.iter().map(|text| (key.to_owned(), text.as_str(), true)));
    }
    for (at, test) in file.tests.iter().enumerate() {
        let key = |name: &str| format!("test[{at}].{name}");
        all.extend([
            (key("name"), test.name.as_str(), true),
            (key("ours"), &test.ours, true),
        ]);
        all.push((key("holds"), &test.holds, false));
        all.extend(test.cost.iter().map(|cost| (key("cost"), cost.as_str(), false)));
        axes.push((key("each"), &test.each));
    }
    for (at, table) in file.tables.iter().enumerate() {
        let mut add = |value| all.push((format!("table[{at}].columns"), value, value.contains('{')));
        for column in &table.columns {
            match column {
                Column::Plain(_, value) => add(value),
                Column::Each { columns, .. } => columns.iter().for_each(|(_, value)| add(value)),
            }
        }
        axes.push((format!("table[{at}].over"), &table.over));
    }
    for (at, figure) in file.figures.iter().enumerate() {
        for series in &figure.series {
            if let Series::Of(_, value) | Series::Along(_, value, _) = series {
                all.push((format!("figure[{at}].series"), value, false));
            }
        }
        axes.push((format!("figure[{at}].bars"), &figure.bars));
    }
    for (key, text, is_text) in all {
        let known = |names: Vec<&str>| names.into_iter().try_for_each(|name| design.knows(name));
        let checked = match is_text {
            true => Template::parse(text).and_then(|text| known(text.names())),
            false => Expression::parse(text).and_then(|own| known(own.names())),
        };
        checked.map_err(|error| design.complaint(&key, error))?;
    }
    for (key, axes) in axes {
        axes.iter()
            .try_for_each(|axis| design.axis(&key, axis).map(drop))?;
    }
    Ok(())
}

/// Checks that each figure's name is a valid file name, and that no two figures have the same name.
fn names_of_figures(design: &Design) -> Result<(), FileError> {
    let mut taken = BTreeSet::new();
    for (at, FigureOf { name, .. }) in design.file.figures.iter().enumerate() {
        let valid = match file_name(name, "") {
            Err(error) => Err(error.to_string()),
            Ok(_) if name.starts_with('.') => Err(format!(
                "`{name}` begins with a dot, which hides its file; rename it"
            )),
            Ok(_) if !taken.insert(name) => Err(format!(
                "two figures have the name `{name}` and would have the same file; rename one"
            )),
            Ok(_) => Ok(()),
        };
        valid.map_err(|said| design.complaint(&format!("figure[{at}].name"), said))?;
    }
    Ok(())
}
