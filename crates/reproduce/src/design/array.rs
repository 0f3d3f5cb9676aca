//! Labelled arrays of numbers and words: the values of an experiment's expressions.
//!
//! An array has axes with labels (`program`: `cg.B`, `lu.B`), and a cell for each combination of labels. Two arrays are
//! combined label by label. If only one array has an axis, the other array is repeated along it. A common axis keeps the
//! labels that both arrays have.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, anyhow, bail};
use homenode_units::Candidates;

use crate::verdict::show;

/// Maximum number of cells of an array. A typo in a file then causes an error message instead of filling the memory.
const CELLS_MAX: usize = 1_000_000;

/// Arrays by name.
pub(crate) type Named = BTreeMap<String, Array>;

/// The labels of a run, then its counts, as pairs of column and cell.
pub type Row = Vec<(String, serde_json::Value)>;

/// The cell for a combination of labels.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Cell {
    /// The run was not made, or the value was not measured.
    Absent,
    /// A number; true is 1, false is 0.
    Number(f64),
    /// A word: a label.
    Text(String),
}

/// An axis of an array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Axis {
    /// The axis's name.
    pub name: String,
    /// The axis's labels, in order.
    pub labels: Vec<String>,
}

/// An array: a cell for each combination of labels; the last axis varies fastest.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Array {
    /// The axes.
    pub axes: Vec<Axis>,
    cells: Vec<Cell>,
}

impl Cell {
    /// Returns the cell's number. A word that can be read as a number counts as one.
    ///
    /// # Errors
    /// A word that cannot be read as a number.
    pub(crate) fn number(&self) -> Result<Option<f64>> {
        match self {
            Cell::Absent => Ok(None),
            Cell::Number(number) => Ok(Some(*number)),
            Cell::Text(text) => text
                .parse()
                .map(Some)
                .map_err(|_| anyhow!("`{text}` is a word, not a number")),
        }
    }

    /// Formats the cell for people.
    pub(crate) fn shown(&self) -> String {
        match self {
            Cell::Absent => "-".to_owned(),
            Cell::Number(number) => show(*number),
            Cell::Text(text) => text.clone(),
        }
    }
}

impl From<Option<f64>> for Cell {
    fn from(number: Option<f64>) -> Cell {
        number.map_or(Cell::Absent, Cell::Number)
    }
}

impl Axis {
    /// Creates an axis with these labels.
    pub(crate) fn new(name: &str, labels: impl IntoIterator<Item = impl Into<String>>) -> Axis {
        Axis {
            name: name.to_owned(),
            labels: labels.into_iter().map(Into::into).collect(),
        }
    }

    fn position(&self, label: &str) -> Option<usize> {
        self.labels.iter().position(|own| own == label)
    }
}

/// Returns the combinations of labels of these axes, as positions; the last axis varies fastest.
pub(crate) fn places(axes: &[Axis]) -> impl Iterator<Item = Vec<usize>> {
    let lengths: Vec<usize> = axes.iter().map(|axis| axis.labels.len()).collect();
    let count = lengths
        .iter()
        .fold(1, |all: usize, length| all.saturating_mul(*length));
    (0..count).map(move |mut rest| {
        let mut place = lengths.clone();
        for at in place.iter_mut().rev() {
            (*at, rest) = (rest % *at, rest / *at);
        }
        place
    })
}

/// Labels, each with the name of its axis.
pub(crate) type Labels = Vec<(String, String)>;

/// Returns the combinations of labels of these axes, in the order of [`places`].
pub(crate) fn labels(axes: &[Axis]) -> impl Iterator<Item = Labels> {
    places(axes).map(|place| {
        let labels = axes.iter().zip(place);
        labels
            .map(|(axis, at)| (axis.name.clone(), axis.labels[at].clone()))
            .collect()
    })
}

impl Array {
    /// Creates an array without axes, which has one cell.
    pub(crate) fn one(cell: Cell) -> Array {
        Array {
            axes: Vec::new(),
            cells: vec![cell],
        }
    }

    /// Returns an array with the labels of an axis as its cells.
    pub(crate) fn of_labels(axis: &Axis) -> Array {
        Array {
            axes: vec![axis.clone()],
            cells: axis.labels.iter().cloned().map(Cell::Text).collect(),
        }
    }

    /// Creates an array with these axes from numbers in order. NaN becomes an absent cell.
    pub(crate) fn of_numbers(axes: Vec<Axis>, numbers: Vec<f64>) -> Array {
        let count = axes.iter().map(|axis| axis.labels.len()).product();
        let mut cells: Vec<Cell> = numbers.into_iter().map(Cell::Number).collect();
        cells.resize(count, Cell::Absent);
        Array { axes, cells }
    }

    /// Creates an array whose cells are computed by a function.
    ///
    /// # Errors
    /// Those of the function; more than a million cells.
    pub(crate) fn build(axes: Vec<Axis>, mut of: impl FnMut(&[usize]) -> Result<Cell>) -> Result<Array> {
        let lengths = axes.iter().map(|axis| axis.labels.len());
        let count = lengths.clone().try_fold(1_usize, usize::checked_mul);
        if count.is_none_or(|count| count > CELLS_MAX) {
            let lengths: Vec<String> = lengths.map(|length| length.to_string()).collect();
            bail!(
                "{} combinations of labels are too many; at most {CELLS_MAX} are allowed",
                lengths.join(" x ")
            );
        }
        let cells = places(&axes).map(|place| of(&place)).collect::<Result<_>>()?;
        Ok(Array { axes, cells })
    }

    /// Creates an array with the same axes, whose cells a function computes from the cells of this one.
    ///
    /// # Errors
    /// Those of the function.
    pub(crate) fn map(&self, of: impl FnMut(&Cell) -> Result<Cell>) -> Result<Array> {
        let cells = self.cells.iter().map(of).collect::<Result<_>>()?;
        Ok(Array::of(self.axes.clone(), cells))
    }

    /// Like [`Array::map`], but the function maps numbers; an absent cell is passed as NaN.
    ///
    /// # Errors
    /// Those of the function; a word.
    pub(crate) fn map_numbers(&self, mut of: impl FnMut(f64) -> Result<f64>) -> Result<Array> {
        self.map(|cell| of(cell.number()?.unwrap_or(f64::NAN)).map(Cell::Number))
    }

    /// Creates an array with these axes from cells in order.
    pub(crate) fn of(axes: Vec<Axis>, cells: Vec<Cell>) -> Array {
        Array { axes, cells }
    }

    /// Returns all cells, in order.
    pub(crate) fn cells(&self) -> &[Cell] {
        &self.cells
    }

    /// Returns the cell at a place.
    pub(crate) fn at(&self, place: &[usize]) -> &Cell {
        let index = self
            .axes
            .iter()
            .zip(place)
            .fold(0, |sum, (axis, at)| sum * axis.labels.len() + at);
        &self.cells[index]
    }

    /// Returns the position of the axis with this name, and the axis.
    pub(crate) fn axis(&self, name: &str) -> Option<(usize, &Axis)> {
        self.axes.iter().enumerate().find(|(_, axis)| axis.name == name)
    }

    /// Returns the cell of an array that has only one.
    ///
    /// # Errors
    /// The array still has axes.
    pub(crate) fn only(&self) -> Result<&Cell> {
        match self.axes.as_slice() {
            [] => Ok(&self.cells[0]),
            axes => {
                let names: Vec<&str> = axes.iter().map(|axis| axis.name.as_str()).collect();
                let names = names.join("` and `");
                bail!("the value still varies along `{names}`: choose a label, or take the mean, max, …")
            }
        }
    }

    /// Returns, for each of this array's axes that is also among `others`, the axis's position there, and for each label there
    /// the position of the label here.
    fn places(&self, others: &[Axis]) -> Vec<(usize, Vec<Option<usize>>)> {
        let of = |axis: &Axis| {
            let at = others.iter().position(|other| other.name == axis.name)?;
            let places = others[at].labels.iter().map(|label| axis.position(label));
            Some((at, places.collect()))
        };
        self.axes.iter().filter_map(of).collect()
    }

    fn through(&self, map: &[(usize, Vec<Option<usize>>)], place: &[usize]) -> &Cell {
        let own: Option<Vec<usize>> = map.iter().map(|(axis, places)| places[place[*axis]]).collect();
        own.map_or(&Cell::Absent, |own| self.at(&own))
    }

    /// The errors that the function returns.
    pub(crate) fn zip(&self, other: &Array, of: impl Fn(&Cell, &Cell) -> Result<Cell>) -> Result<Array> {
        let mut axes = self.axes.clone();
        for axis in &other.axes {
            match axes.iter_mut().find(|own| own.name == axis.name) {
                Some(own) => own.labels.retain(|label| axis.position(label).is_some()),
                None => axes.push(axis.clone()),
            }
        }
        let (own, others) = (self.places(&axes), other.places(&axes));
        Array::build(axes, |place| {
            of(self.through(&own, place), other.through(&others, place))
        })
    }

    /// Restricts an axis to these labels, and puts them in this order.
    ///
    /// # Errors
    /// A label that the axis does not have.
    pub(crate) fn keep(&self, name: &str, labels: &[String]) -> Result<Array> {
        let (at, axis) = self
            .axis(name)
            .with_context(|| format!("the value has no axis `{name}`"))?;
        if let Some(unknown) = labels.iter().find(|label| axis.position(label).is_none()) {
            let known = Candidates::of(unknown, axis.labels.iter().cloned());
            bail!("`{name}` has no label `{unknown}`{known}");
        }
        let mut axes = self.axes.clone();
        axes[at].labels = labels.to_vec();
        let map = self.places(&axes);
        Array::build(axes, |place| Ok(self.through(&map, place).clone()))
    }

    /// Drops an axis that has only one label.
    #[must_use]
    pub(crate) fn without(mut self, name: &str) -> Array {
        self.axes.retain(|axis| axis.name != name);
        self
    }

    /// Drops an axis: for each cell, takes the label of the axis that another array names.
    ///
    /// # Errors
    /// An axis that this array does not have.
    pub(crate) fn picked(&self, name: &str, which: &Array) -> Result<Array> {
        let (at, axis) = self
            .axis(name)
            .with_context(|| format!("the value has no axis `{name}`"))?;
        let rest: Vec<Axis> = self
            .axes
            .iter()
            .filter(|axis| axis.name != name)
            .cloned()
            .collect();
        let shape = Array::build(rest, |_| Ok(Cell::Absent))?;
        let axes = shape.zip(which, |_, _| Ok(Cell::Absent))?.axes;
        let (own, which_places) = (shape.places(&axes), which.places(&axes));
        Array::build(axes, |place| {
            let Cell::Text(label) = which.through(&which_places, place) else {
                return Ok(Cell::Absent);
            };
            let rest: Option<Vec<usize>> = own.iter().map(|(axis, places)| places[place[*axis]]).collect();
            let (Some(mut found), Some(label)) = (rest, axis.position(label)) else {
                return Ok(Cell::Absent);
            };
            found.insert(at, label);
            Ok(self.at(&found).clone())
        })
    }

    /// Reduces several arrays to one without these axes. For each remaining place, a function receives the cells along the
    /// dropped axes, and the dropped axes themselves.
    ///
    /// # Errors
    /// An axis that the first array does not have; those of the function.
    pub(crate) fn reduce<T>(
        arrays: &[&Array],
        names: &[String],
        of: impl Fn(&[Axis], Vec<Vec<Cell>>) -> Result<T>,
    ) -> Result<(Vec<Axis>, Vec<T>)> {
        let first = arrays[0];
        if let Some(unknown) = names.iter().find(|name| first.axis(name).is_none()) {
            let own = first.axes.iter().map(|axis| axis.name.clone());
            let known = Candidates::of(unknown, own);
            bail!("the value has no axis `{unknown}`{known}");
        }
        let (gone, left): (Vec<Axis>, Vec<Axis>) = first
            .axes
            .iter()
            .cloned()
            .partition(|axis| names.contains(&axis.name));
        let axes = [left.as_slice(), &gone].concat();
        let maps: Vec<_> = arrays.iter().map(|array| array.places(&axes)).collect();
        let reduced = places(&left).map(|outer| {
            let mut all = vec![Vec::new(); arrays.len()];
            for inner in places(&gone) {
                let place = [&outer[..], &inner].concat();
                for ((list, array), map) in all.iter_mut().zip(arrays).zip(&maps) {
                    list.push(array.through(map, &place).clone());
                }
            }
            of(&gone, all)
        });
        let reduced = reduced.collect::<Result<_>>()?;
        Ok((left, reduced))
    }
}
