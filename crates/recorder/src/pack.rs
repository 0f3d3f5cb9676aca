//! Writes [`columns`](crate::columns). A minute grows by one period at a time, and no tree is built for a value.
//!
//! ```text
//!   a period ──▶ Document (text and where each value stands) ──▶ Columns (one growing column for each place) ──▶ text of a block
//! ```
//!
//! Most of a period equals the previous one, so most of the cost is comparing. A column begins as the text of its first value,
//! however large, and is split into columns only when a value differs.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::sync::Arc;

use serde_json::Value;

use crate::columns;
use crate::document::{Document, Place, Shape};

/// Deeper nesting is written as plain JSON. Each level here takes two levels of a block, and readers accept 128.
const DEPTH_MAX: usize = 16;

/// Longest text, in bytes, that is stored inline.
const SHORT_MAX: usize = 22;

/// A JSON text. Most texts are a number or a word, which is compared in every period.
#[derive(Debug)]
enum Text {
    Short(u8, [u8; SHORT_MAX]),
    Long(Box<[u8]>),
}

impl From<&[u8]> for Text {
    fn from(text: &[u8]) -> Text {
        let mut short = [0; SHORT_MAX];
        match (short.get_mut(..text.len()), u8::try_from(text.len())) {
            (Some(room), Ok(length)) => {
                room.copy_from_slice(text);
                Text::Short(length, short)
            }
            _ => Text::Long(text.into()),
        }
    }
}

impl std::ops::Deref for Text {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Text::Short(length, text) => text.get(..usize::from(*length)).unwrap_or_default(),
            Text::Long(text) => text,
        }
    }
}

/// JSON texts, each preceded by a comma.
#[derive(Debug, Default)]
struct Texts {
    all: Vec<u8>,
    count: usize,
}

impl Texts {
    fn repeated(text: &[u8], count: usize) -> Texts {
        let mut texts = Texts::default();
        (0..count).for_each(|_| texts.push(text));
        texts
    }

    fn push(&mut self, text: &[u8]) {
        self.all.push(b',');
        self.all.extend_from_slice(text);
        self.count += 1;
    }
}

/// A column that grows by one value at a time.
#[derive(Debug, Default)]
enum Column {
    /// No value yet.
    #[default]
    Empty,
    /// All values have this text. Also has their number.
    Same(Text, usize),
    Whole(Vec<i64>),
    Object(Fields),
    /// Lists of the same length, a column for each position. Also has the number of lists.
    List(Vec<Column>, usize),
    /// Lists of objects, with columns by the objects' ids. Also has the ids of each list, in its order.
    ById(Box<(Fields, Orders)>),
    /// Any other values, as texts.
    Mixed(Texts),
}

/// Columns by key, for objects that need not all have every key.
#[derive(Debug, Default)]
struct Fields {
    fields: Vec<Field>,
    /// Number of objects.
    count: usize,
}

#[derive(Debug)]
struct Field {
    /// The key, as JSON text.
    key: Arc<[u8]>,
    column: Column,
    /// Number of values.
    count: usize,
    /// Indices of the objects that have the key. `None` if all objects had it, up to the last one that did.
    #[allow(clippy::box_collection)] // rarely present, and many fields pay for its size
    which: Option<Box<Vec<usize>>>,
}

/// The ids of each list, in the list's order.
#[derive(Debug)]
enum Orders {
    Same(Vec<Arc<[u8]>>),
    Mixed(Texts),
}

/// Stores each key once, because many objects have the same keys.
#[derive(Debug, Default)]
struct Keys(BTreeSet<Arc<[u8]>>);

impl Keys {
    fn of(&mut self, key: &[u8]) -> Arc<[u8]> {
        if let Some(known) = self.0.get(key) {
            return Arc::clone(known);
        }
        let new: Arc<[u8]> = key.into();
        self.0.insert(Arc::clone(&new));
        new
    }
}

/// Returns the ids of a list of objects, if every object has an id and all ids differ.
fn ids(document: &Document, list: Place) -> Option<Vec<&[u8]>> {
    let ids = document.items(list).map(|item| document.id(item));
    let ids = ids.collect::<Option<Vec<_>>>()?;
    let each: BTreeSet<&[u8]> = ids.iter().copied().collect();
    (each.len() == ids.len()).then_some(ids)
}

/// Returns the objects of a list, each with its id.
fn by_id(document: &Document, list: Place) -> impl Iterator<Item = (&[u8], Place)> {
    let items = document.items(list);
    items.map(|item| (document.id(item).unwrap_or_default(), item))
}

impl Orders {
    /// Adds the ids of another list, after those of `count` lists.
    fn push(&mut self, document: &Document, list: Place, count: usize) {
        let mut text = Vec::new();
        list_of(by_id(document, list).map(|(id, _)| id), &mut text);
        match self {
            Orders::Same(same) => {
                let mut before = Vec::new();
                list_of(same.iter().map(|id| &**id), &mut before);
                let mut orders = Texts::repeated(&before, count);
                orders.push(&text);
                *self = Orders::Mixed(orders);
            }
            Orders::Mixed(orders) => orders.push(&text),
        }
    }

    /// Returns true if a list has the same ids in the same order as all lists before.
    fn is(&self, document: &Document, list: Place) -> bool {
        match self {
            Orders::Same(same) => {
                let ids = document.items(list).map(|item| document.id(item));
                ids.eq(same.iter().map(|id| Some(&**id)))
            }
            Orders::Mixed(_) => false,
        }
    }
}

fn list_of<'a>(texts: impl Iterator<Item = &'a [u8]>, to: &mut Vec<u8>) {
    to.push(b'[');
    for (n, text) in texts.enumerate() {
        to.extend_from_slice(if n > 0 { b"," } else { b"" });
        to.extend_from_slice(text);
    }
    to.push(b']');
}

impl Fields {
    /// Creates the columns of `count` equal objects with these fields.
    fn same<'d>(
        document: &'d Document,
        fields: impl Iterator<Item = (&'d [u8], Place)>,
        count: usize,
        keys: &mut Keys,
    ) -> Fields {
        let mut all = Fields {
            fields: Vec::new(),
            count,
        };
        for (key, at) in fields {
            let column = Column::Same(document.value(at).into(), count);
            // If the object has a key twice, only the first occurrence counts.
            if all.fields.iter().all(|field| *field.key != *key) {
                all.fields.push(Field::new(keys.of(key), column, count));
            }
        }
        all
    }

    /// Adds an object with these fields.
    fn push<'d>(
        &mut self,
        document: &'d Document,
        fields: impl Iterator<Item = (&'d [u8], Place)>,
        depth: usize,
        keys: &mut Keys,
    ) {
        let number = self.count;
        // Usually, keys come in the same order as in the previous object.
        let mut next = 0;
        for (key, at) in fields {
            let is_next = self.fields.get(next).is_some_and(|field| *field.key == *key);
            let found = match is_next {
                true => Some(next),
                false => self.fields.iter().position(|field| *field.key == *key),
            };
            let index = found.unwrap_or_else(|| {
                self.fields.push(Field::new(keys.of(key), Column::Empty, 0));
                self.fields.len() - 1
            });
            self.fields[index].push(document, at, number, depth, keys);
            next = index + 1;
        }
        self.count += 1;
    }
}

impl Field {
    fn new(key: Arc<[u8]>, column: Column, count: usize) -> Field {
        Field {
            key,
            column,
            count,
            which: None,
        }
    }

    /// Adds the value of object `number`. If the object has the key twice, only the first occurrence counts.
    fn push(&mut self, document: &Document, at: Place, number: usize, depth: usize, keys: &mut Keys) {
        let last = self
            .which
            .as_ref()
            .map_or(self.count.checked_sub(1), |which| which.last().copied());
        if last == Some(number) {
            return;
        }
        if self.which.is_none() && self.count < number {
            self.which = Some(Box::new((0..self.count).collect()));
        }
        if let Some(which) = &mut self.which {
            which.push(number);
        }
        self.column.push(document, at, depth + 1, keys);
        self.count += 1;
    }
}

impl Column {
    /// Adds the value at a place of a document.
    fn push(&mut self, document: &Document, at: Place, depth: usize, keys: &mut Keys) {
        let shape = document.shape(at);
        match self {
            Column::Empty => *self = Column::Same(document.value(at).into(), 1),
            Column::Same(text, count) if **text == *document.value(at) => *count += 1,
            Column::Same(text, count) => match Column::parted(text, *count, (shape, depth), keys) {
                Some(column) => {
                    *self = column;
                    self.push(document, at, depth, keys);
                }
                None => self.push_mixed(document.value(at)),
            },
            Column::Whole(all) => match document.whole(at) {
                Some(new) => all.push(new),
                None => self.push_mixed(document.value(at)),
            },
            Column::Object(fields) if shape == Shape::Object => {
                fields.push(document, document.fields(at), depth, keys);
            }
            Column::List(columns, count)
                if shape == Shape::List && document.items(at).count() == columns.len() =>
            {
                for (column, item) in columns.iter_mut().zip(document.items(at)) {
                    column.push(document, item, depth + 1, keys);
                }
                *count += 1;
            }
            Column::ById(lists) if shape == Shape::List => {
                let (fields, orders) = &mut **lists;
                if !orders.is(document, at) {
                    if ids(document, at).is_none() {
                        return self.push_mixed(document.value(at));
                    }
                    orders.push(document, at, fields.count);
                }
                fields.push(document, by_id(document, at), depth, keys);
            }
            _ => self.push_mixed(document.value(at)),
        }
    }

    /// Converts `count` equal values to a column to which different values of the same shape can be added. Returns `None` if only
    /// a mixed column can hold them.
    fn parted(text: &[u8], count: usize, (shape, depth): (Shape, usize), keys: &mut Keys) -> Option<Column> {
        match shape {
            Shape::Whole => {
                let whole = std::str::from_utf8(text).ok()?.parse().ok()?;
                Some(Column::Whole(vec![whole; count]))
            }
            Shape::Text | Shape::Other => None,
            Shape::List | Shape::Object => {
                let mut was = Document::default();
                was.read(text).ok()?;
                if was.shape(0) != shape || depth >= DEPTH_MAX {
                    return None;
                }
                if shape == Shape::Object {
                    return Some(Column::Object(Fields::same(&was, was.fields(0), count, keys)));
                }
                let Some(ids) = ids(&was, 0) else {
                    let same = |item| Column::Same(was.value(item).into(), count);
                    return Some(Column::List(was.items(0).map(same).collect(), count));
                };
                let orders = Orders::Same(ids.into_iter().map(|id| keys.of(id)).collect());
                let fields = Fields::same(&was, by_id(&was, 0), count, keys);
                Some(Column::ById(Box::new((fields, orders))))
            }
        }
    }

    /// Adds a value that does not fit the column's kind, so the column becomes a mixed one.
    fn push_mixed(&mut self, text: &[u8]) {
        if !matches!(self, Column::Mixed(_)) {
            *self = Column::Mixed(std::mem::take(self).texts());
        }
        if let Column::Mixed(texts) = self {
            texts.push(text);
        }
    }

    fn count(&self) -> usize {
        match self {
            Column::Empty => 0,
            Column::Same(_, count) | Column::List(_, count) => *count,
            Column::Whole(all) => all.len(),
            Column::Object(fields) => fields.count,
            Column::ById(lists) => lists.0.count,
            Column::Mixed(texts) => texts.count,
        }
    }

    /// Converts the column to the texts of its values.
    fn texts(self) -> Texts {
        let count = self.count();
        if let Column::Same(text, count) = self {
            return Texts::repeated(&text, count);
        }
        let mut text = Vec::new();
        let written = self.write(&mut text).ok();
        let packed = written.and_then(|()| serde_json::from_slice(&text).ok());
        let values = packed.and_then(|packed: Value| columns::unpack_own(&packed, count));
        debug_assert!(values.is_some(), "what is packed comes back");
        let mut texts = Texts::default();
        for value in values.unwrap_or_else(|| vec![Value::Null; count]) {
            texts.push(value.to_string().as_bytes());
        }
        texts
    }

    fn write(&self, to: &mut impl Write) -> io::Result<()> {
        match self {
            Column::Empty => to.write_all(br#"["*"]"#),
            Column::Same(text, _) => {
                to.write_all(br#"["=","#)?;
                to.write_all(text)?;
                to.write_all(b"]")
            }
            Column::Whole(all) => write_whole(all, to),
            Column::Object(fields) => {
                to.write_all(br#"["{","#)?;
                fields.write(to)?;
                to.write_all(b"]")
            }
            Column::List(columns, _) => {
                to.write_all(br#"["[",["#)?;
                for (n, column) in columns.iter().enumerate() {
                    to.write_all(if n > 0 { b"," } else { b"" })?;
                    column.write(to)?;
                }
                to.write_all(b"]]")
            }
            Column::ById(lists) => {
                let (fields, orders) = &**lists;
                to.write_all(br#"["@","#)?;
                fields.write(to)?;
                to.write_all(b",")?;
                orders.write(to)?;
                to.write_all(b"]")
            }
            Column::Mixed(texts) => texts.write(to),
        }
    }
}

impl Texts {
    fn write(&self, to: &mut impl Write) -> io::Result<()> {
        to.write_all(br#"["*""#)?;
        to.write_all(&self.all)?;
        to.write_all(b"]")
    }
}

impl Orders {
    fn write(&self, to: &mut impl Write) -> io::Result<()> {
        match self {
            Orders::Same(order) => {
                let mut text = Vec::new();
                list_of(order.iter().map(|id| &**id), &mut text);
                Column::Same(text.as_slice().into(), 0).write(to)
            }
            Orders::Mixed(texts) => texts.write(to),
        }
    }
}

impl Fields {
    fn write(&self, to: &mut impl Write) -> io::Result<()> {
        to.write_all(b"{")?;
        for (n, field) in self.fields.iter().enumerate() {
            to.write_all(if n > 0 { b"," } else { b"" })?;
            to.write_all(&field.key)?;
            to.write_all(b":")?;
            let some: Vec<usize>;
            let which = match &field.which {
                Some(which) => which,
                None if field.count < self.count => {
                    some = (0..field.count).collect();
                    &some
                }
                None => {
                    field.column.write(to)?;
                    continue;
                }
            };
            to.write_all(br#"["?","#)?;
            serde_json::to_writer(&mut *to, which)?;
            to.write_all(b",")?;
            field.column.write(to)?;
            to.write_all(b"]")?;
        }
        to.write_all(b"}")
    }
}

/// Writes the first number, then the difference of each to the previous one; or all numbers, if a difference overflows.
fn write_whole(all: &[i64], to: &mut impl Write) -> io::Result<()> {
    let is_near = all.windows(2).all(|pair| pair[1].checked_sub(pair[0]).is_some());
    to.write_all(if is_near { br#"["+""# } else { br#"["*""# })?;
    let mut last = 0;
    for number in all {
        to.write_all(b",")?;
        serde_json::to_writer(&mut *to, &(number - last))?;
        last = if is_near { *number } else { 0 };
    }
    to.write_all(b"]")
}

/// The periods of a block that is being built.
#[derive(Debug, Default)]
pub(crate) struct Columns {
    at_ns: Vec<i64>,
    wall_ns: Vec<i64>,
    frames: Column,
    keys: Keys,
}

impl Columns {
    /// Adds a period.
    pub(crate) fn push(&mut self, at_ns: i64, wall_ns: i64, frame: &Document) {
        self.frames.push(frame, 0, 1, &mut self.keys);
        self.at_ns.push(at_ns);
        self.wall_ns.push(wall_ns);
    }

    /// Returns the number of periods.
    pub(crate) fn len(&self) -> usize {
        self.at_ns.len()
    }

    /// Returns the two times of the first and of the last period; `None` if there are no periods.
    pub(crate) fn span(&self) -> Option<[(i64, i64); 2]> {
        let time = |index: usize| Some((*self.at_ns.get(index)?, *self.wall_ns.get(index)?));
        Some([time(0)?, time(self.len().checked_sub(1)?)?])
    }

    /// Writes the text of a block.
    pub(crate) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        to.write_all(br#"["{",{"at_ns":"#)?;
        write_whole(&self.at_ns, to)?;
        to.write_all(br#","wall_ns":"#)?;
        write_whole(&self.wall_ns, to)?;
        to.write_all(br#","frame":"#)?;
        self.frames.write(to)?;
        to.write_all(b"}]")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::columns::Pick;
    use crate::document::Figures;

    fn read(columns: &Columns) -> Value {
        let mut text = Vec::new();
        columns.write(&mut text).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    /// Returns the column of these values, in the form that a block has.
    fn pack(values: &[Value]) -> Value {
        let (mut document, mut columns) = (Document::default(), Columns::default());
        for value in values {
            document.write(value, Figures::Whole).unwrap();
            columns.push(0, 0, &document);
        }
        read(&columns)[1]["frame"].take()
    }

    #[test]
    fn what_stays_is_written_once_and_counters_as_what_they_grew_by() {
        let at = |n: u64| json!({"at": 1000 + 10 * n, "name": "a", "vms": [{"id": "x", "ran": n}, {"id": "y", "ran": 7}]});
        let values: Vec<Value> = (0..3).map(at).collect();
        let packed = pack(&values);
        assert_eq!(
            packed,
            json!(["{", {
                "at": ["+", 1000, 10, 10],
                "name": ["=", "a"],
                "vms": ["@", {"x": ["{", {"id": ["=", "x"], "ran": ["+", 0, 1, 1]}], "y": ["=", {"id": "y", "ran": 7}]}, ["=", ["x", "y"]]]
            }])
        );
        assert_eq!(columns::unpack(&packed, 3), Some(values));
    }

    #[test]
    fn vms_come_and_go() {
        let values = [
            json!([{"id": "a", "n": 1}]),
            json!([{"id": "b", "n": 1}, {"id": "a", "n": 2}]),
            json!([{"id": "b"}]),
            json!([]),
        ];
        assert_eq!(columns::unpack(&pack(&values), 4).as_deref(), Some(&values[..]));
    }

    #[test]
    fn what_is_nested_deeply_comes_back() {
        let deep = |n: u64| (0..100).fold(json!(n), |inner, _| json!([inner]));
        let values = [deep(1), deep(2), json!(3)];
        assert_eq!(columns::unpack(&pack(&values), 3).as_deref(), Some(&values[..]));
    }

    #[test]
    fn what_is_no_json_is_refused_and_leaves_what_was_there() {
        let (mut columns, mut document) = (Columns::default(), Document::default());
        document.read(br#"{"n": 1}"#).unwrap();
        columns.push(1, 10, &document);
        for broken in ["", "{", "[1 2]", "{} {}", "\"\\ud800\""] {
            assert!(
                document.read(broken.as_bytes()).is_err() && document.is_empty(),
                "{broken}"
            );
        }
        document.read(br#"{"n": 1, "n": 2}"#).unwrap();
        columns.push(3, 30, &document);
        assert_eq!((columns.len(), columns.span()), (2, Some([(1, 10), (3, 30)])));
        let packed = read(&columns);
        let frame = |at: u64| json!({"at_ns": at, "wall_ns": 10 * at, "frame": {"n": 1}});
        assert_eq!(columns::unpack(&packed, 2), Some(vec![frame(1), frame(3)]));
    }

    #[test]
    fn who_asks_for_one_of_a_list_gets_what_all_would_have_given() {
        let vm = |id: &str, name: &str, n: u64| json!({"id": id, "name": name, "n": n, "more": [n, n]});
        let values = [
            json!({"at": 1, "vms": [vm("a", "web", 1), vm("b", "db", 2)], "rest": [1, 2]}),
            json!({"at": 2, "vms": [vm("b", "db", 3)], "rest": [3]}),
            // Changes the previous object's place and name.
            json!({"at": 3, "vms": [vm("b", "db", 4), vm("a", "shop", 5)], "rest": []}),
        ];
        let text = serde_json::to_vec(&pack(&values)).unwrap();
        let of_vm = Pick::Keys(&[("id", Pick::All), ("name", Pick::All), ("n", Pick::All)]);
        for (name, seen) in [
            ("web", vec![1, 5]),
            ("A", vec![1, 5]),
            ("db", vec![2, 3, 4]),
            ("x", vec![]),
        ] {
            let keys = [("at", Pick::All), ("vms", Pick::Called(name, &of_vm))];
            let picked = columns::unpack(&columns::read(&text, Pick::Keys(&keys)).unwrap(), 3).unwrap();
            let found: Vec<u64> = picked
                .iter()
                .filter_map(|value| value["vms"].as_object()?.values().next()?["n"].as_u64())
                .collect();
            assert_eq!(found, seen, "{name}");
            assert!(picked.iter().all(|value| value.get("rest").is_none()));
            assert!(!format!("{picked:?}").contains("more"));
        }
        assert_eq!(
            columns::unpack(&columns::read(&text, Pick::All).unwrap(), 3).as_deref(),
            Some(&values[..])
        );
        // If nothing changes, or no object has an id, the list stays one column.
        let same = [values[0].clone(), values[0].clone()];
        let text = serde_json::to_vec(&pack(&same)).unwrap();
        let keys = [("vms", Pick::Called("db", &of_vm))];
        let picked = columns::unpack(&columns::read(&text, Pick::Keys(&keys)).unwrap(), 2).unwrap();
        assert_eq!(picked[1], json!({"vms": [{"id": "b", "name": "db", "n": 2}]}));
    }

    proptest! {
        #[test]
        fn what_is_packed_comes_back(values in prop::collection::vec(columns::tests::value(), 0..6)) {
            prop_assert_eq!(columns::unpack(&pack(&values), values.len()), Some(values));
        }

        #[test]
        fn who_asks_for_some_of_many_gets_what_all_would_have_given(
            values in prop::collection::vec((columns::tests::value(), any::<bool>()), 0..9)
        ) {
            let (values, wanted): (Vec<Value>, Vec<bool>) = values.into_iter().unzip();
            let places: Vec<usize> = (0..values.len()).filter(|place| wanted[*place]).collect();
            let some = places.iter().map(|place| values[*place].clone()).collect();
            prop_assert_eq!(columns::unpack_at(&pack(&values), values.len(), &places), Some(some));
        }
    }
}
