//! Resolves the names in an experiment's expressions.

use std::cell::{Cell as Flag, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use anyhow::{Context as _, Result, anyhow, bail};

use super::array::{Array, Axis, Cell, Named};
use super::expression::{Expression, Template};
use super::functions::{Names, evaluate};
use super::measures;
use super::{Design, named, pick};
use crate::claims;
use crate::work::Outcomes;

/// Metrics of a grid's runs, one for each combination; `None` for a combination that is not run.
type Measured = Rc<Vec<Option<measures::Counted>>>;

/// An experiment and the outcomes of its runs.
pub(super) struct Scope<'a> {
    pub(super) design: &'a Design,
    outcomes: &'a Outcomes,
    measured: RefCell<BTreeMap<String, Measured>>,
    modelled: RefCell<Option<Named>>,
    known: RefCell<BTreeMap<(String, String), Array>>,
    /// Nesting depth of values being computed.
    depth: Flag<u32>,
}

/// A scope with a default grid, to which a name without a grid refers.
struct Within<'a> {
    scope: &'a Scope<'a>,
    grid: String,
}

impl<'a> Scope<'a> {
    /// Creates a scope from a design and the outcomes of its runs.
    pub(super) fn new(design: &'a Design, outcomes: &'a Outcomes) -> Scope<'a> {
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
    /// A message that says what is wrong.
    pub(super) fn value(&self, text: &str) -> Result<Array> {
        self.evaluated(&Expression::parse(text)?)
    }

    fn evaluated(&self, expression: &Expression) -> Result<Array> {
        let within = Within {
            scope: self,
            grid: self.design.main_grid(),
        };
        evaluate(expression, &within)
    }

    /// Returns a text in which the expressions are replaced by their values at these labels. If an expression has several
    /// values there, they are listed.
    ///
    /// # Errors
    /// A message that says what is wrong.
    pub(super) fn text(&self, text: &str, labels: &[(String, String)]) -> Result<String> {
        Template::parse(text)?.filled(|expression, digits| {
            let own = at(self.evaluated(expression)?, labels)?;
            let shown = |cell: &Cell| match (cell, digits) {
                (Cell::Number(number), Some(digits)) => format!("{number:.digits$}"),
                _ => cell.shown(),
            };
            let cells = own.cells().iter().filter(|cell| **cell != Cell::Absent);
            Ok(cells.map(shown).collect::<Vec<String>>().join(", "))
        })
    }

    /// Returns the metrics of a grid.
    fn measured(&self, grid: &str) -> Result<Measured> {
        if let Some(known) = self.measured.borrow().get(grid) {
            return Ok(known.clone());
        }
        let more = self.design.measure(grid)?;
        let of_run = |run| match run {
            Some(run) => measures::of_run(&run, self.outcomes.of(&run)?, more).map(Some),
            None => Ok(None),
        };
        let runs = self.design.cells(grid)?.into_iter().map(of_run);
        let measured: Measured = Rc::new(runs.collect::<Result<_>>()?);
        self.measured
            .borrow_mut()
            .insert(grid.to_owned(), measured.clone());
        Ok(measured)
    }

    /// Returns the array with this name from the experiment's model; `None` if the model does not provide it.
    fn of_model(&self, name: &str) -> Result<Option<Array>> {
        let Some((_, _, run)) = self.design.model()?.filter(|(_, gives, _)| gives.contains(&name)) else {
            return Ok(None);
        };
        if self.modelled.borrow().is_none() {
            let found = run(&|text| self.value(text))?;
            *self.modelled.borrow_mut() = Some(found);
        }
        let modelled = self.modelled.borrow();
        Ok(modelled.as_ref().and_then(|found| found.get(name)).cloned())
    }

    fn metric(&self, grid: &str, name: &str) -> Result<Array> {
        let measured = self.measured(grid)?;
        let own = self.design.axes_of(grid);
        let found = measured
            .iter()
            .map(|run| run.as_ref().map(|run| measures::metric(run, name)));
        let found: Vec<_> = found.collect();
        // The metric's own axes and labels, in the order of the runs.
        let mut more: Vec<Axis> = Vec::new();
        for (axis, label) in found.iter().flatten().flatten().flat_map(|(labels, _)| labels) {
            match more.iter_mut().find(|known| known.name == *axis) {
                Some(known) if !known.labels.contains(label) => known.labels.push(label.clone()),
                Some(_) => {}
                None => more.push(Axis::new(axis, [label.clone()])),
            }
        }
        self.design.knows(name)?;
        let (count, each) = (
            own.len(),
            more.iter().map(|axis| axis.labels.len()).product::<usize>(),
        );
        let mut runs = found.iter().flat_map(|run| std::iter::repeat_n(run, each));
        let all = Array::build([own, more.clone()].concat(), |place| {
            let is = |labels: &[(String, String)]| {
                let mut places = more.iter().zip(&place[count..]);
                places.all(|(axis, at)| labels.contains(&(axis.name.clone(), axis.labels[*at].clone())))
            };
            let mut cells = runs.next().into_iter().flatten().flatten();
            let own = cells.find(|(labels, _)| is(labels));
            Ok(own.map_or(Cell::Absent, |(_, cell)| cell.clone()))
        })?;
        // If there is a single VM, expressions need not name it.
        let single = more.iter().filter(|axis| axis.labels.len() == 1);
        Ok(single.fold(all, |all, axis| all.without(&axis.name)))
    }

    fn named(&self, grid: &str, name: &str) -> Result<Array> {
        let key = (grid.to_owned(), name.to_owned());
        if let Some(known) = self.known.borrow().get(&key) {
            return Ok(known.clone());
        }
        self.depth.set(self.depth.get() + 1);
        let found = match self.depth.get() {
            0..50 => self.found(grid, name),
            _ => Err(anyhow!("value `{name}` refers to itself")),
        };
        self.depth.set(self.depth.get() - 1);
        let found = found?;
        self.known.borrow_mut().insert(key, found.clone());
        Ok(found)
    }

    fn found(&self, grid: &str, name: &str) -> Result<Array> {
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
                .map_err(|error| anyhow!("{error} (value `{name}`)"))?;
            return match self.outcomes.factor(name) {
                None => Ok(found),
                Some(factor) => found.map(|own| Ok(own.number()?.map(|own| own * factor).into())),
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
                return pick(&format!("table `{first}` has no column"), rest, named(columns)).cloned();
            }
            if first == "published" {
                let claim = self.design.claim();
                let number = claims::published(claim, rest);
                let number = number.with_context(|| format!("claim `{claim}` publishes no `{rest}`"))?;
                return Ok(Array::one(Cell::Number(number)));
            }
        }
        if file.grid.contains_key(grid) {
            return self.metric(grid, name);
        }
        bail!("nothing is named `{name}`")
    }
}

impl Names for Within<'_> {
    fn named(&self, name: &str) -> Result<Array> {
        self.scope.named(&self.grid, name)
    }

    fn machine(&self) -> &str {
        self.scope.design.file.run.machine.as_deref().unwrap_or_default()
    }
}

/// Returns an array at these labels of its axes. Labels of other axes are ignored.
///
/// # Errors
/// None for labels of the array's own axes.
pub(super) fn at(mut array: Array, labels: &[(String, String)]) -> Result<Array> {
    for (axis, label) in labels {
        if let Some((_, own)) = array.axis(axis) {
            array = match own.labels.contains(label) {
                true => array.keep(axis, std::slice::from_ref(label))?.without(axis),
                false => Array::one(Cell::Absent),
            };
        }
    }
    Ok(array)
}
