//! Resolves the names in an experiment's expressions.

use std::cell::{Cell as Flag, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use homenode_units::Candidates;

use super::Design;
use super::array::{Array, Axis, Cell, Named};
use super::expression::{Expression, Template};
use super::functions::{Names, evaluate};
use super::measures;
use crate::claims;
use crate::work::Outcomes;

/// Metrics of a grid's runs, one for each combination; `None` if it is not run.
type Measured = Rc<Vec<Option<measures::Counted>>>;

/// An experiment and the outcomes of its runs.
pub struct Scope<'a> {
    pub(super) design: &'a Design,
    outcomes: &'a Outcomes,
    measured: RefCell<BTreeMap<String, Measured>>,
    modelled: RefCell<Option<Named>>,
    known: RefCell<BTreeMap<(String, String), Array>>,
    /// Nesting depth of values being computed.
    depth: Flag<u32>,
}

/// A scope in which a name without a grid refers to this grid.
struct Within<'a> {
    scope: &'a Scope<'a>,
    grid: String,
}

impl<'a> Scope<'a> {
    /// Creates a scope from a design and the outcomes of its runs.
    pub fn new(design: &'a Design, outcomes: &'a Outcomes) -> Scope<'a> {
        Scope {
            design,
            outcomes,
            measured: RefCell::default(),
            modelled: RefCell::default(),
            known: RefCell::default(),
            depth: Flag::new(0),
        }
    }

    /// Evaluates an expression.
    ///
    /// # Errors
    /// A message.
    pub fn value(&self, text: &str) -> Result<Array, String> {
        self.evaluated(&Expression::parse(text)?)
    }

    fn evaluated(&self, expression: &Expression) -> Result<Array, String> {
        let within = Within {
            scope: self,
            grid: self.design.main_grid(),
        };
        evaluate(expression, &within)
    }

    /// Returns a text with its expressions filled in, at labels; axes that still vary there are listed.
    ///
    /// # Errors
    /// A message.
    pub fn text(&self, text: &str, labels: &[(&str, &str)]) -> Result<String, String> {
        Template::parse(text)?.filled(|expression, digits| {
            let own = at(self.evaluated(expression)?, labels)?;
            let shown = |cell: &Cell| match (cell, digits) {
                (Cell::Number(number), Some(digits)) => format!("{number:.digits$}"),
                _ => cell.shown(),
            };
            let all: Vec<String> = own
                .cells()
                .iter()
                .filter(|cell| **cell != Cell::Absent)
                .map(shown)
                .collect();
            Ok(all.join(", "))
        })
    }

    /// Returns the metrics of a grid.
    fn measured(&self, grid: &str) -> Result<Measured, String> {
        if let Some(known) = self.measured.borrow().get(grid) {
            return Ok(known.clone());
        }
        let more = self.design.measure(grid)?;
        let of_run = |run| match run {
            Some(run) => measures::of_run(&run, self.outcomes.of(&run)?, more).map(Some),
            None => Ok(None),
        };
        let runs = self.design.cells(grid)?.into_iter().map(of_run);
        let measured: Measured = Rc::new(runs.collect::<Result<_, String>>()?);
        self.measured
            .borrow_mut()
            .insert(grid.to_owned(), measured.clone());
        Ok(measured)
    }

    /// Returns the array of this name from the experiment's model, if it has one.
    fn of_model(&self, name: &str) -> Result<Option<Array>, String> {
        let Some(model) = self
            .design
            .model()?
            .filter(|model| model.names().iter().any(|own| own == name))
        else {
            return Ok(None);
        };
        if self.modelled.borrow().is_none() {
            let found = model.run(&|text| self.value(text))?;
            *self.modelled.borrow_mut() = Some(found);
        }
        Ok(self
            .modelled
            .borrow()
            .as_ref()
            .and_then(|found| found.get(name))
            .cloned())
    }

    fn metric(&self, grid: &str, name: &str) -> Result<Array, String> {
        let measured = self.measured(grid)?;
        let own: Vec<Axis> = self.design.file.grid[grid]
            .over
            .iter()
            .map(|axis| self.design.axes[axis].clone())
            .collect();
        let found: Vec<_> = measured
            .iter()
            .map(|run| run.as_ref().map(|run| measures::metric(run, name)))
            .collect();
        // Further axes and their labels, in the order of the runs.
        let mut more: Vec<Axis> = Vec::new();
        for (axis, label) in found.iter().flatten().flatten().flat_map(|(labels, _)| labels) {
            match more.iter_mut().find(|known| known.name == *axis) {
                Some(known) if !known.labels.contains(label) => known.labels.push(label.clone()),
                Some(_) => {}
                None => more.push(Axis::new(axis, [label.clone()])),
            }
        }
        self.design.knows(name)?;
        let count = own.len();
        let all = Array::build([own, more.clone()].concat(), |place| {
            let index = self.design.file.grid[grid]
                .over
                .iter()
                .zip(place)
                .fold(0, |sum, (axis, at)| {
                    sum * self.design.axes[axis].labels.len() + at
                });
            let Some(cells) = &found[index] else {
                return Ok(Cell::Absent);
            };
            let is = |labels: &[(String, String)]| {
                more.iter().zip(&place[count..]).all(|(axis, at)| {
                    labels
                        .iter()
                        .any(|(name, label)| *name == axis.name && *label == axis.labels[*at])
                })
            };
            let own = cells.iter().find(|(labels, _)| is(labels));
            Ok(own.map_or(Cell::Absent, |(_, cell)| cell.clone()))
        })?;
        // With a single VM, an expression need not name it.
        let single: Vec<String> = more
            .iter()
            .filter(|axis| axis.labels.len() == 1)
            .map(|axis| axis.name.clone())
            .collect();
        Ok(single.iter().fold(all, |all, axis| all.without(axis)))
    }

    fn named(&self, grid: &str, name: &str) -> Result<Array, String> {
        let key = (grid.to_owned(), name.to_owned());
        if let Some(known) = self.known.borrow().get(&key) {
            return Ok(known.clone());
        }
        self.depth.set(self.depth.get() + 1);
        let found = match self.depth.get() {
            0..50 => self.found(grid, name),
            _ => Err(format!("value `{name}` is made of itself")),
        };
        self.depth.set(self.depth.get() - 1);
        let found = found?;
        self.known.borrow_mut().insert(key, found.clone());
        Ok(found)
    }

    fn found(&self, grid: &str, name: &str) -> Result<Array, String> {
        let file = &self.design.file;
        if name == "absent" {
            return Ok(Array::one(Cell::Absent));
        }
        if let Some(found) = self.of_model(name)? {
            return Ok(found);
        }
        if let Some(axis) = self.design.axes.get(name) {
            return Ok(Array::of_labels(axis));
        }
        if let Some(value) = file.values.get(name) {
            let within = Within {
                scope: self,
                grid: grid.to_owned(),
            };
            let found = evaluate(&Expression::parse(value)?, &within)
                .map_err(|error| format!("{error} (value `{name}`)"))?;
            return match self.outcomes.factor(name) {
                None => Ok(found),
                Some(factor) => found.zip(&Array::one(Cell::Number(factor)), |own, factor| {
                    let both = own.number()?.zip(factor.number()?);
                    Ok(both.map(|(own, factor)| own * factor).into())
                }),
            };
        }
        if let Some((first, rest)) = name.split_once('.') {
            if file.grid.contains_key(first) {
                return self.named(first, rest);
            }
            if let Some(axis) = self.design.axes.get(first) {
                return self.design.words(axis, rest);
            }
            if first == "machine" {
                return self.design.of_machine(rest);
            }
            if let Some(columns) = self.design.csv.get(first) {
                let unknown = || {
                    format!(
                        "table `{first}` has no column `{rest}`{}",
                        Candidates::of(rest, columns.keys().cloned())
                    )
                };
                return columns.get(rest).cloned().ok_or_else(unknown);
            }
            if first == "published" {
                let claim = file.claim.as_deref().unwrap_or_default();
                let number = claims::published(claim, rest);
                return number
                    .map(|number| Array::one(Cell::Number(number)))
                    .ok_or_else(|| format!("claim `{claim}` publishes no `{rest}`"));
            }
        }
        if file.grid.contains_key(grid) {
            return self.metric(grid, name);
        }
        Err(format!("nothing is named `{name}`"))
    }
}

impl Names for Within<'_> {
    fn named(&self, name: &str) -> Result<Array, String> {
        self.scope.named(&self.grid, name)
    }

    fn machine(&self) -> &str {
        self.scope.design.file.run.machine.as_deref().unwrap_or_default()
    }
}

/// Returns an array at labels of some of its axes; labels of other axes are ignored.
///
/// # Errors
/// None for labels of the array's own axes.
pub fn at(mut array: Array, labels: &[(&str, &str)]) -> Result<Array, String> {
    for (axis, label) in labels {
        if let Some((_, own)) = array.axis(axis) {
            array = match own.labels.iter().any(|own| own == label) {
                true => array.keep(axis, &[(*label).to_owned()])?.without(axis),
                false => Array::one(Cell::Absent),
            };
        }
    }
    Ok(array)
}
