//! Writing [`columns`](crate::columns): a minute grows by one period at a time, and no value is kept as a tree of its own.
//!
//! ```text
//!   text of a period ──▶ Tape (flat, its room is used again) ──▶ Columns (one growing column for each place) ──▶ text of a block
//! ```
//!
//! Most of a period is as it was in the one before, so what it costs is to compare it.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, SerializeMap as _, SerializeSeq as _, Serializer};
use serde_json::{Map, Number, Value};

use crate::columns;

/// Deeper nesting is written as it is.
const DEPTH_MAX: usize = 32;

/// Where something begins on a tape.
type Place = usize;

/// What stands at a place of a tape. Lists and objects say where they end; what is in them follows.
#[derive(Clone, Debug, PartialEq)]
enum Token {
    Null,
    Bool(bool),
    Whole(i64),
    /// One that is not whole, or too large.
    Number(Number),
    /// A part of the tape's text.
    Text(Range<usize>),
    List(Place),
    /// In it a text and what it is the key of, in turns.
    Object(Place),
}

/// One value in a row, without an allocation for each of its parts.
#[derive(Debug, Default)]
struct Tape {
    tokens: Vec<Token>,
    text: String,
}

impl Tape {
    fn read(&mut self, json: &[u8]) -> serde_json::Result<()> {
        self.tokens.clear();
        self.text.clear();
        let mut reader = serde_json::Deserializer::from_slice(json);
        Rest(self).deserialize(&mut reader)?;
        reader.end()
    }

    fn text(&self, range: &Range<usize>) -> &str {
        self.text.get(range.clone()).unwrap_or_default()
    }

    fn add_text(&mut self, text: &str) {
        let begin = self.text.len();
        self.text.push_str(text);
        self.tokens.push(Token::Text(begin..self.text.len()));
    }

    /// Where the value at a place ends.
    fn end(&self, at: Place) -> Place {
        match self.tokens[at] {
            Token::List(end) | Token::Object(end) => end,
            _ => at + 1,
        }
    }

    /// The places of a list's items, which go up to `end`.
    fn items(&self, list: Place, end: Place) -> impl Iterator<Item = Place> {
        let next = move |at: Place| (at < end).then_some(at);
        std::iter::successors(next(list + 1), move |at| next(self.end(*at)))
    }

    /// The keys of an object, and the places of what is below them.
    fn fields(&self, object: Place, end: Place) -> impl Iterator<Item = (&str, Place)> {
        let next = move |at: Place| (at < end).then_some(at);
        let keys = std::iter::successors(next(object + 1), move |at| next(self.end(at + 1)));
        keys.map(|at| match &self.tokens[at] {
            Token::Text(key) => (self.text(key), at + 1),
            // An object has a text in front of each value.
            _ => ("", at + 1),
        })
    }

    /// The `id` of an object that has one.
    fn id(&self, at: Place) -> Option<&str> {
        let Token::Object(end) = self.tokens[at] else {
            return None;
        };
        let (_, id) = self.fields(at, end).find(|(key, _)| *key == "id")?;
        match &self.tokens[id] {
            Token::Text(id) => Some(self.text(id)),
            _ => None,
        }
    }

    /// The ids of a list of objects, where each has another.
    fn ids(&self, list: Place, end: Place) -> Option<Vec<&str>> {
        let ids = self.items(list, end).map(|item| self.id(item));
        let ids = ids.collect::<Option<Vec<_>>>()?;
        let each: BTreeSet<&str> = ids.iter().copied().collect();
        (each.len() == ids.len()).then_some(ids)
    }

    /// Whether the scalar at a place is this.
    fn is(&self, at: Place, value: &Value) -> bool {
        match (&self.tokens[at], value) {
            (Token::Null, Value::Null) => true,
            (Token::Bool(one), Value::Bool(other)) => one == other,
            (Token::Whole(one), Value::Number(other)) => other.as_i64() == Some(*one),
            (Token::Number(one), Value::Number(other)) => one == other,
            (Token::Text(one), Value::String(other)) => self.text(one) == other,
            _ => false,
        }
    }

    fn value(&self, at: Place) -> Value {
        match &self.tokens[at] {
            Token::Null => Value::Null,
            Token::Bool(value) => (*value).into(),
            Token::Whole(value) => (*value).into(),
            Token::Number(value) => value.clone().into(),
            Token::Text(range) => self.text(range).into(),
            Token::List(end) => self.items(at, *end).map(|item| self.value(item)).collect(),
            Token::Object(end) => {
                let fields = self.fields(at, *end);
                let fields = fields.map(|(key, at)| (key.to_owned(), self.value(at)));
                Value::Object(fields.collect())
            }
        }
    }
}

/// Puts the next value at the end of a tape.
struct Rest<'a>(&'a mut Tape);

impl<'de> DeserializeSeed<'de> for Rest<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Rest<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        self.0.tokens.push(Token::Null);
        Ok(())
    }

    fn visit_bool<E>(self, value: bool) -> Result<(), E> {
        self.0.tokens.push(Token::Bool(value));
        Ok(())
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        self.0.tokens.push(Token::Whole(value));
        Ok(())
    }

    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        let whole = i64::try_from(value).map(Token::Whole);
        self.0
            .tokens
            .push(whole.unwrap_or_else(|_| Token::Number(value.into())));
        Ok(())
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<(), E> {
        let number = Number::from_f64(value).ok_or_else(|| E::custom("a number that is none"))?;
        self.0.tokens.push(Token::Number(number));
        Ok(())
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.0.add_text(text);
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let begin = self.0.tokens.len();
        self.0.tokens.push(Token::Null);
        while items.next_element_seed(Rest(self.0))?.is_some() {}
        self.0.tokens[begin] = Token::List(self.0.tokens.len());
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<(), A::Error> {
        let begin = self.0.tokens.len();
        self.0.tokens.push(Token::Null);
        while fields.next_key_seed(Rest(self.0))?.is_some() {
            fields.next_value_seed(Rest(self.0))?;
        }
        self.0.tokens[begin] = Token::Object(self.0.tokens.len());
        Ok(())
    }
}

/// A column that grows by a value at a time.
#[derive(Clone, Debug, Default)]
enum Column {
    /// There is no value yet.
    #[default]
    Empty,
    /// All are this scalar, so many.
    Same(Value, usize),
    Whole(Vec<i64>),
    Object(Fields),
    /// Lists of one length, so many.
    List(Vec<Column>, usize),
    /// Lists of objects by their ids, and the ids of each list in its order.
    ById(Fields, Orders),
    /// Anything.
    Mixed(Vec<Value>),
}

/// Columns by key of values that need not all have each.
#[derive(Clone, Debug, Default)]
struct Fields {
    fields: Vec<Field>,
    /// How many values there are.
    count: usize,
}

#[derive(Clone, Debug)]
struct Field {
    key: String,
    column: Column,
    /// Of how many values it is.
    count: usize,
    /// Of which; `None` where of all that there were when it was there last.
    which: Option<Vec<usize>>,
}

/// The ids of lists, in order.
#[derive(Clone, Debug)]
enum Orders {
    Same(Vec<String>),
    Mixed(Vec<Value>),
}

impl Orders {
    /// The ids of one more list, of which there were so many.
    fn push(&mut self, ids: &[&str], count: usize) {
        let list = |ids: &[String]| ids.iter().cloned().map(Value::from).collect::<Value>();
        match self {
            Orders::Same(same) if same == ids => {}
            Orders::Same(same) => {
                let mut orders = vec![list(same); count];
                orders.push(ids.iter().copied().map(Value::from).collect());
                *self = Orders::Mixed(orders);
            }
            Orders::Mixed(orders) => orders.push(ids.iter().copied().map(Value::from).collect()),
        }
    }
}

impl Fields {
    /// One more value, with what these keys have.
    fn push<'t>(&mut self, tape: &'t Tape, fields: impl Iterator<Item = (&'t str, Place)>, depth: usize) {
        let number = self.count;
        // Keys come in the order of the value before, as a rule.
        let mut next = 0;
        for (key, at) in fields {
            let is_next = self.fields.get(next).is_some_and(|field| field.key == key);
            let found = match is_next {
                true => Some(next),
                false => self.fields.iter().position(|field| field.key == key),
            };
            let index = found.unwrap_or_else(|| {
                self.fields.push(Field {
                    key: key.to_owned(),
                    column: Column::Empty,
                    count: 0,
                    which: None,
                });
                self.fields.len() - 1
            });
            self.fields[index].push(tape, at, number, depth);
            next = index + 1;
        }
        self.count += 1;
    }
}

impl Field {
    /// What it has in the value of this number. A key that comes twice counts once.
    fn push(&mut self, tape: &Tape, at: Place, number: usize, depth: usize) {
        let last = self
            .which
            .as_ref()
            .map_or(self.count.checked_sub(1), |which| which.last().copied());
        if last == Some(number) {
            return;
        }
        if self.which.is_none() && self.count < number {
            self.which = Some((0..self.count).collect());
        }
        if let Some(which) = &mut self.which {
            which.push(number);
        }
        self.column.push(tape, at, depth + 1);
        self.count += 1;
    }
}

impl Column {
    /// The value at a place of a tape comes next.
    fn push(&mut self, tape: &Tape, at: Place, depth: usize) {
        let token = &tape.tokens[at];
        match (&mut *self, token) {
            (Column::Empty, _) => *self = Column::of(tape, at, depth),
            (Column::Same(value, count), _) if tape.is(at, value) => *count += 1,
            (Column::Same(value, count), Token::Whole(new)) if value.is_i64() => {
                let mut all = vec![value.as_i64().unwrap_or_default(); *count];
                all.push(*new);
                *self = Column::Whole(all);
            }
            (Column::Whole(all), Token::Whole(new)) => all.push(*new),
            (Column::Object(fields), Token::Object(end)) => {
                fields.push(tape, tape.fields(at, *end), depth);
            }
            (Column::List(columns, count), Token::List(end))
                if tape.items(at, *end).count() == columns.len() =>
            {
                for (column, item) in columns.iter_mut().zip(tape.items(at, *end)) {
                    column.push(tape, item, depth + 1);
                }
                *count += 1;
            }
            (Column::ById(fields, orders), Token::List(end)) => match tape.ids(at, *end) {
                Some(ids) => {
                    orders.push(&ids, fields.count);
                    fields.push(tape, ids.iter().copied().zip(tape.items(at, *end)), depth);
                }
                None => self.push_mixed(tape.value(at)),
            },
            _ => self.push_mixed(tape.value(at)),
        }
    }

    /// One with its first value.
    fn of(tape: &Tape, at: Place, depth: usize) -> Column {
        match &tape.tokens[at] {
            Token::List(_) | Token::Object(_) if depth >= DEPTH_MAX => Column::Mixed(vec![tape.value(at)]),
            Token::Object(end) => {
                let mut fields = Fields::default();
                fields.push(tape, tape.fields(at, *end), depth);
                Column::Object(fields)
            }
            Token::List(end) => match tape.ids(at, *end) {
                Some(ids) => {
                    let mut fields = Fields::default();
                    fields.push(tape, ids.iter().copied().zip(tape.items(at, *end)), depth);
                    let order = ids.iter().map(|id| (*id).to_owned()).collect();
                    Column::ById(fields, Orders::Same(order))
                }
                None => {
                    let one = |item| {
                        let mut column = Column::Empty;
                        column.push(tape, item, depth + 1);
                        column
                    };
                    Column::List(tape.items(at, *end).map(one).collect(), 1)
                }
            },
            _ => Column::Same(tape.value(at), 1),
        }
    }

    /// One that fits nothing that was there before.
    fn push_mixed(&mut self, value: Value) {
        if !matches!(self, Column::Mixed(_)) {
            *self = Column::Mixed(std::mem::take(self).values());
        }
        if let Column::Mixed(values) = self {
            values.push(value);
        }
    }

    fn count(&self) -> usize {
        match self {
            Column::Empty => 0,
            Column::Same(_, count) | Column::List(_, count) => *count,
            Column::Whole(all) => all.len(),
            Column::Object(fields) | Column::ById(fields, _) => fields.count,
            Column::Mixed(values) => values.len(),
        }
    }

    /// All of its values.
    fn values(self) -> Vec<Value> {
        let count = self.count();
        let packed = serde_json::to_value(&self).unwrap_or_default();
        let values = columns::unpack_own(&packed, count);
        debug_assert!(values.is_some(), "what is packed comes back");
        values.unwrap_or_else(|| vec![Value::Null; count])
    }

    /// What all of its values are, where they are the same.
    fn same(&self) -> Option<Value> {
        match self {
            Column::Same(value, _) => Some(value.clone()),
            Column::Object(fields) => fields.same().map(Value::Object),
            Column::List(columns, _) => columns.iter().map(Column::same).collect(),
            Column::ById(fields, Orders::Same(order)) => {
                let mut items = fields.same()?;
                order.iter().map(|id| items.remove(id)).collect()
            }
            Column::Mixed(values) => match values.as_slice() {
                [value] => Some(value.clone()),
                _ => None,
            },
            Column::Empty | Column::Whole(_) | Column::ById(_, Orders::Mixed(_)) => None,
        }
    }
}

impl Fields {
    fn same(&self) -> Option<Map<String, Value>> {
        let same = |field: &Field| {
            let is_whole = field.which.is_none() && field.count == self.count;
            is_whole.then(|| Some((field.key.clone(), field.column.same()?)))?
        };
        self.fields.iter().map(same).collect()
    }
}

impl Serialize for Column {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        if let Some(value) = self.same() {
            return ("=", value).serialize(to);
        }
        match self {
            Column::Object(fields) => ("{", fields).serialize(to),
            Column::List(columns, _) => ("[", columns).serialize(to),
            Column::ById(fields, Orders::Same(order)) => ("@", fields, ("=", order)).serialize(to),
            Column::ById(fields, Orders::Mixed(orders)) => ("@", fields, Tagged("*", orders)).serialize(to),
            Column::Mixed(values) => Tagged("*", values).serialize(to),
            Column::Whole(all) => whole(all, to),
            // A column of a value that is the same, or of none.
            Column::Same(..) | Column::Empty => Tagged::<Value>("*", &[]).serialize(to),
        }
    }
}

/// A tag and what follows it, in one list.
struct Tagged<'a, T>(&'static str, &'a [T]);

impl<T: Serialize> Serialize for Tagged<'_, T> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut list = to.serialize_seq(Some(self.1.len() + 1))?;
        list.serialize_element(self.0)?;
        self.1.iter().try_for_each(|item| list.serialize_element(item))?;
        list.end()
    }
}

/// The first, then by how much each is above the one before; as they are where one is too far from the next.
fn whole<S: Serializer>(all: &[i64], to: S) -> Result<S::Ok, S::Error> {
    let more = all.windows(2).map(|pair| pair[1].checked_sub(pair[0]));
    match more.collect::<Option<Vec<i64>>>() {
        Some(more) => {
            let mut list = to.serialize_seq(Some(all.len() + 1))?;
            list.serialize_element("+")?;
            let mut numbers = all.iter().take(1).chain(&more);
            numbers.try_for_each(|number| list.serialize_element(number))?;
            list.end()
        }
        None => Tagged("*", all).serialize(to),
    }
}

impl Serialize for Fields {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(Some(self.fields.len()))?;
        for field in &self.fields {
            match &field.which {
                Some(which) => map.serialize_entry(&field.key, &("?", which, &field.column))?,
                None if field.count < self.count => {
                    let which: Vec<usize> = (0..field.count).collect();
                    map.serialize_entry(&field.key, &("?", which, &field.column))?;
                }
                None => map.serialize_entry(&field.key, &field.column)?,
            }
        }
        map.end()
    }
}

/// The periods of a block, as they come.
#[derive(Debug, Default)]
pub(crate) struct Columns {
    at_ns: Vec<i64>,
    wall_ns: Vec<i64>,
    frames: Column,
    tape: Tape,
}

impl Columns {
    /// Adds a period, a JSON text of any shape.
    ///
    /// # Errors
    /// What is no JSON; it is not there then.
    pub fn push(&mut self, at_ns: i64, wall_ns: i64, frame: &[u8]) -> serde_json::Result<()> {
        self.tape.read(frame)?;
        self.frames.push(&self.tape, 0, 1);
        self.at_ns.push(at_ns);
        self.wall_ns.push(wall_ns);
        Ok(())
    }

    /// How many periods there are.
    pub fn len(&self) -> usize {
        self.at_ns.len()
    }

    /// The times of the first and of the last; `None` where there is none.
    pub fn span(&self) -> Option<[(i64, i64); 2]> {
        let time = |index: usize| Some((*self.at_ns.get(index)?, *self.wall_ns.get(index)?));
        Some([time(0)?, time(self.len().checked_sub(1)?)?])
    }
}

impl Serialize for Columns {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        struct Times<'a>(&'a [i64]);
        impl Serialize for Times<'_> {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                whole(self.0, to)
            }
        }
        struct All<'a>(&'a Columns);
        impl Serialize for All<'_> {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                let Columns {
                    at_ns,
                    wall_ns,
                    frames,
                    ..
                } = self.0;
                let mut map = to.serialize_map(Some(3))?;
                map.serialize_entry("at_ns", &Times(at_ns))?;
                map.serialize_entry("wall_ns", &Times(wall_ns))?;
                map.serialize_entry("frame", frames)?;
                map.end()
            }
        }
        ("{", All(self)).serialize(to)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::columns::Pick;

    /// The column of these values, as a block has it.
    fn pack(values: &[Value]) -> Value {
        let (mut tape, mut column) = (Tape::default(), Column::Empty);
        for value in values {
            tape.read(value.to_string().as_bytes()).unwrap();
            column.push(&tape, 0, 0);
        }
        serde_json::to_value(column).unwrap()
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
        let mut columns = Columns::default();
        columns.push(1, 10, br#"{"n": 1}"#).unwrap();
        for broken in ["", "{", "[1 2]", "{} {}", "\"\\ud800\""] {
            assert!(columns.push(2, 20, broken.as_bytes()).is_err(), "{broken}");
        }
        columns.push(3, 30, br#"{"n": 1, "n": 2}"#).unwrap();
        assert_eq!((columns.len(), columns.span()), (2, Some([(1, 10), (3, 30)])));
        let packed = serde_json::to_value(&columns).unwrap();
        let frame = |at: u64| json!({"at_ns": at, "wall_ns": 10 * at, "frame": {"n": 1}});
        assert_eq!(columns::unpack(&packed, 2), Some(vec![frame(1), frame(3)]));
    }

    #[test]
    fn who_asks_for_one_of_a_list_gets_what_all_would_have_given() {
        let vm = |id: &str, name: &str, n: u64| json!({"id": id, "name": name, "n": n, "more": [n, n]});
        let values = [
            json!({"at": 1, "vms": [vm("a", "web", 1), vm("b", "db", 2)], "rest": [1, 2]}),
            json!({"at": 2, "vms": [vm("b", "db", 3)], "rest": [3]}),
            // It comes again in another place, and is called otherwise then.
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
        // Where nothing changes, or nothing has an id, the list stays one.
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
    }
}
