//! Labelled arrays of numbers and words, on which the expressions of an experiment operate.
//!
//! An array has axes with labels (`program`: `cg.B`, `lu.B`), and a cell for each combination. Two arrays are combined label
//! by label: an axis of only one of them is repeated, and a common axis keeps the labels that both have.

use std::collections::BTreeMap;

use crate::verdict::show;

/// Maximum number of cells of an array, so that a typo in a file causes an error message, not a full memory.
const CELLS_MAX: usize = 1_000_000;

/// Arrays by name.
pub type Named = BTreeMap<String, Array>;

/// A row of a run: its labels, then its counts, as columns and cells.
pub type Row = Vec<(String, serde_json::Value)>;

/// The cell for a combination of labels.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    /// Not run, or not measured.
    Absent,
    /// A number; true is 1, false is 0.
    Number(f64),
    /// A word: a label.
    Text(String),
}

/// One axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Axis {
    /// Its name.
    pub name: String,
    /// Its labels, in order.
    pub labels: Vec<String>,
}

/// Cells by labels; the last axis varies fastest.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    /// The axes.
    pub axes: Vec<Axis>,
    cells: Vec<Cell>,
}

impl Cell {
    /// Returns the number; a numeric word counts as one.
    ///
    /// # Errors
    /// A word that is not a number.
    pub fn number(&self) -> Result<Option<f64>, String> {
        match self {
            Cell::Absent => Ok(None),
            Cell::Number(number) => Ok(Some(*number)),
            Cell::Text(text) => text
                .parse()
                .map(Some)
                .map_err(|_| format!("`{text}` is a word, not a number")),
        }
    }

    /// Formats the cell for people.
    pub fn shown(&self) -> String {
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
    pub fn new(name: &str, labels: impl IntoIterator<Item = impl Into<String>>) -> Axis {
        Axis {
            name: name.to_owned(),
            labels: labels.into_iter().map(Into::into).collect(),
        }
    }

    fn position(&self, label: &str) -> Option<usize> {
        self.labels.iter().position(|own| own == label)
    }
}

impl Array {
    /// Creates an array of one cell without axes.
    pub fn one(cell: Cell) -> Array {
        Array {
            axes: Vec::new(),
            cells: vec![cell],
        }
    }

    /// Returns the labels of an axis as an array.
    pub fn of_labels(axis: &Axis) -> Array {
        Array {
            axes: vec![axis.clone()],
            cells: axis.labels.iter().cloned().map(Cell::Text).collect(),
        }
    }

    /// Creates an array of numbers with these axes, in order; missing ones become absent.
    pub fn of_numbers(axes: Vec<Axis>, numbers: Vec<f64>) -> Array {
        let count = axes.iter().map(|axis| axis.labels.len()).product();
        let mut cells: Vec<Cell> = numbers.into_iter().map(Cell::Number).collect();
        cells.resize(count, Cell::Absent);
        Array { axes, cells }
    }

    /// Creates an array whose cells a function computes.
    ///
    /// # Errors
    /// The function's; more than a million cells.
    pub fn build(
        axes: Vec<Axis>,
        mut of: impl FnMut(&[usize]) -> Result<Cell, String>,
    ) -> Result<Array, String> {
        let lengths = axes.iter().map(|axis| axis.labels.len());
        let count = lengths.clone().try_fold(1_usize, usize::checked_mul);
        let count = count.filter(|count| *count <= CELLS_MAX).ok_or_else(|| {
            let lengths: Vec<String> = lengths.map(|length| length.to_string()).collect();
            format!(
                "{} combinations of labels are more than {CELLS_MAX}",
                lengths.join(" x ")
            )
        })?;
        let mut place = vec![0; axes.len()];
        let mut cells = Vec::with_capacity(count);
        for at in 0..count {
            let mut rest = at;
            for (index, axis) in place.iter_mut().zip(&axes).rev() {
                (*index, rest) = (rest % axis.labels.len(), rest / axis.labels.len());
            }
            cells.push(of(&place)?);
        }
        Ok(Array { axes, cells })
    }

    /// Creates an array of cells, in order, with these axes.
    pub fn of(axes: Vec<Axis>, cells: Vec<Cell>) -> Array {
        Array { axes, cells }
    }

    /// Returns all cells, in order.
    pub fn cells(&self) -> &[Cell] {
        &self.cells
    }

    /// Returns the cell at a place.
    pub fn at(&self, place: &[usize]) -> &Cell {
        let index = self
            .axes
            .iter()
            .zip(place)
            .fold(0, |sum, (axis, at)| sum * axis.labels.len() + at);
        &self.cells[index]
    }

    /// Returns the axis of this name, and its position.
    pub fn axis(&self, name: &str) -> Option<(usize, &Axis)> {
        self.axes.iter().enumerate().find(|(_, axis)| axis.name == name)
    }

    /// Returns the only cell.
    ///
    /// # Errors
    /// There are axes left.
    pub fn only(&self) -> Result<&Cell, String> {
        match self.axes.as_slice() {
            [] => Ok(&self.cells[0]),
            axes => {
                let names: Vec<&str> = axes.iter().map(|axis| axis.name.as_str()).collect();
                let names = names.join("` and `");
                Err(format!(
                    "it still varies along `{names}`: choose a label, or take the mean, max, …"
                ))
            }
        }
    }

    /// Returns the labels of a place, axis by axis.
    pub fn labels<'a>(&'a self, place: &'a [usize]) -> impl Iterator<Item = (&'a str, &'a str)> {
        let axes = self.axes.iter().zip(place);
        axes.map(|(axis, at)| (axis.name.as_str(), axis.labels[*at].as_str()))
    }

    /// For each own axis that `others` has too: its position there, and the positions of its labels there.
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

    /// Combines two arrays, label by label.
    ///
    /// # Errors
    /// The function's.
    pub fn zip(
        &self,
        other: &Array,
        of: impl Fn(&Cell, &Cell) -> Result<Cell, String>,
    ) -> Result<Array, String> {
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

    /// Restricts an axis to these labels, in their order.
    ///
    /// # Errors
    /// A label that the axis does not have.
    pub fn keep(&self, name: &str, labels: &[String]) -> Result<Array, String> {
        let (at, axis) = self
            .axis(name)
            .ok_or_else(|| format!("it has no axis `{name}`"))?;
        if let Some(unknown) = labels.iter().find(|label| axis.position(label).is_none()) {
            let known = homenode_units::Candidates::of(unknown, axis.labels.iter().cloned());
            return Err(format!("`{name}` has no label `{unknown}`{known}"));
        }
        let mut axes = self.axes.clone();
        axes[at].labels = labels.to_vec();
        let map = self.places(&axes);
        Array::build(axes, |place| Ok(self.through(&map, place).clone()))
    }

    /// Drops an axis that has one label.
    #[must_use]
    pub fn without(mut self, name: &str) -> Array {
        self.axes.retain(|axis| axis.name != name);
        self
    }

    /// Picks, along an axis, the label named by another array, place by place.
    ///
    /// # Errors
    /// An axis that it does not have.
    pub fn picked(&self, name: &str, which: &Array) -> Result<Array, String> {
        let (at, axis) = self
            .axis(name)
            .ok_or_else(|| format!("it has no axis `{name}`"))?;
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

    /// Reduces several arrays to one without these axes: a function receives the cells along them, place by place, and for
    /// the first array also the labels.
    ///
    /// # Errors
    /// An axis that the first array does not have; the function's.
    pub fn reduce<T>(
        arrays: &[&Array],
        names: &[String],
        of: impl Fn(&[Axis], Vec<Vec<Cell>>) -> Result<T, String>,
    ) -> Result<(Vec<Axis>, Vec<T>), String> {
        let first = arrays[0];
        if let Some(unknown) = names.iter().find(|name| first.axis(name).is_none()) {
            let own = first.axes.iter().map(|axis| axis.name.clone());
            let known = homenode_units::Candidates::of(unknown, own);
            return Err(format!("it has no axis `{unknown}`{known}"));
        }
        let (gone, left): (Vec<Axis>, Vec<Axis>) = first
            .axes
            .iter()
            .cloned()
            .partition(|axis| names.contains(&axis.name));
        let axes = [left.as_slice(), &gone].concat();
        let maps: Vec<_> = arrays.iter().map(|array| array.places(&axes)).collect();
        let mut found = Vec::new();
        Array::build(left.clone(), |outer| {
            let mut all = vec![Vec::new(); arrays.len()];
            Array::build(gone.clone(), |inner| {
                let place = [outer, inner].concat();
                for ((list, array), map) in all.iter_mut().zip(arrays).zip(&maps) {
                    list.push(array.through(map, &place).clone());
                }
                Ok(Cell::Absent)
            })?;
            found.push(of(&gone, all)?);
            Ok(Cell::Absent)
        })?;
        Ok((left, found))
    }
}
