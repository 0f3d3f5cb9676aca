//! Many values of one shape, turned into columns: what stays the same is written once, and counters as what they grew by. A
//! general compressor then makes little of it. Nothing is lost but the order of keys.
//!
//! ```text
//!   ["=", value]                     all are this
//!   ["+", first, more, more, …]      whole numbers: the first, then by how much each is above the one before
//!   ["{", {key: column, …}]          objects with the same keys
//!   ["?", [which, …], column]        in those places this column, elsewhere the key is missing
//!   ["[", [column, …]]               lists of the same length
//!   ["@", {id: column, …}, column]   lists of objects with an "id"; then which ids, in which order
//!   ["*", value, value, …]           anything else
//! ```

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{
    Deserialize as _, DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde_json::{Map, Value, json};

/// What a block may weigh, in values: a minute of a thousand VMs is a third of it.
const WEIGHT_MAX: usize = 128 << 20;
/// How many values take as much memory as an object without its fields, and as a field's key.
const OBJECT_WEIGHT: usize = 16;
const KEY_WEIGHT: usize = 2;
/// Bytes of a value.
const VALUE_BYTES: usize = size_of::<Value>();

/// The values of a column that has this number of them; `None` where it is damaged, or longer than any minute of a host.
pub fn unpack(column: &Value, count: usize) -> Option<Vec<Value>> {
    unpack_within(column, count, &mut { WEIGHT_MAX })
}

/// The values of a column that was just packed, however long.
pub(crate) fn unpack_own(column: &Value, count: usize) -> Option<Vec<Value>> {
    unpack_within(column, count, &mut { usize::MAX })
}

/// What of each value is wanted: who asks for little reads little.
#[derive(Clone, Copy, Debug)]
pub enum Pick<'a> {
    /// All of it.
    All,
    /// These keys of an object.
    Keys(&'a [(&'a str, Pick<'a>)]),
    /// Of a list of objects those whose `id` or `name` is this, and of them so much. They come as an object by their ids where
    /// the column has them so, else as the list that they are in.
    Called(&'a str, &'a Pick<'a>),
}

impl Pick<'_> {
    /// What of a key is wanted.
    fn of(&self, key: &str) -> Option<Pick<'_>> {
        match self {
            Pick::All | Pick::Called(..) => Some(Pick::All),
            Pick::Keys(keys) => keys.iter().find(|(name, _)| *name == key).map(|(_, pick)| *pick),
        }
    }

    /// Takes away what is not wanted.
    fn prune(&self, value: &mut Value) {
        match (self, value) {
            (Pick::Keys(_), Value::Object(fields)) => {
                fields.retain(|key, value| self.of(key).map(|pick| pick.prune(value)).is_some());
            }
            (Pick::Called(name, pick), Value::Array(items)) => {
                items.retain(|item| is_called(item, name));
                items.iter_mut().for_each(|item| pick.prune(item));
            }
            _ => {}
        }
    }
}

fn is_called(item: &Value, name: &str) -> bool {
    let is = |key: &str| {
        item[key]
            .as_str()
            .is_some_and(|text| text.eq_ignore_ascii_case(name))
    };
    is("id") || item["name"] == *name
}

/// Reads a column from its text, and passes over what is not wanted.
///
/// # Errors
/// What is no JSON, or no column where some of it is wanted.
pub fn read(text: &[u8], pick: Pick<'_>) -> serde_json::Result<Value> {
    let mut reader = serde_json::Deserializer::from_slice(text);
    let column = Column(pick).deserialize(&mut reader)?;
    reader.end()?;
    Ok(column)
}

/// A column that is read.
#[derive(Clone, Copy)]
struct Column<'a>(Pick<'a>);

impl<'de> DeserializeSeed<'de> for Column<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Value, D::Error> {
        match self.0 {
            Pick::All => Value::deserialize(from),
            Pick::Keys(_) | Pick::Called(..) => from.deserialize_seq(self),
        }
    }
}

impl<'de> Visitor<'de> for Column<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a column")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Value, A::Error> {
        let missing = || A::Error::custom("a column ends early");
        let tag: String = parts.next_element()?.ok_or_else(missing)?;
        let column = match (tag.as_str(), self.0) {
            ("{", pick) => {
                let fields = parts.next_element_seed(Fields(pick))?.ok_or_else(missing)?;
                json!(["{", fields])
            }
            ("@", pick @ Pick::Called(..)) => {
                let fields = parts.next_element_seed(Fields(pick))?.ok_or_else(missing)?;
                parts.next_element::<IgnoredAny>()?.ok_or_else(missing)?;
                json!(["{", fields])
            }
            ("?", pick) => {
                let which: Value = parts.next_element()?.ok_or_else(missing)?;
                json!([
                    "?",
                    which,
                    parts.next_element_seed(Column(pick))?.ok_or_else(missing)?
                ])
            }
            (tag, pick) => {
                let mut all = vec![json!(tag)];
                while let Some(mut value) = parts.next_element::<Value>()? {
                    if matches!(tag, "=" | "*") {
                        pick.prune(&mut value);
                    }
                    all.push(value);
                }
                return Ok(all.into());
            }
        };
        match parts.next_element::<IgnoredAny>()? {
            None => Ok(column),
            Some(_) => Err(A::Error::custom("a column goes on after its end")),
        }
    }
}

/// The columns of fields, or of objects by their ids.
struct Fields<'a>(Pick<'a>);

impl<'de> DeserializeSeed<'de> for Fields<'_> {
    type Value = Map<String, Value>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Fields<'_> {
    type Value = Map<String, Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("columns by their keys")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Self::Value, A::Error> {
        let mut columns = Map::new();
        while let Some(key) = from.next_key::<String>()? {
            let column = match self.0 {
                Pick::Called(name, pick) => {
                    let column = from.next_value_seed(Column(*pick))?;
                    let is_wanted = key.eq_ignore_ascii_case(name) || is_ever_called(&column, name);
                    is_wanted.then_some(column)
                }
                pick => match pick.of(&key) {
                    Some(pick) => Some(from.next_value_seed(Column(pick))?),
                    None => {
                        from.next_value::<IgnoredAny>()?;
                        None
                    }
                },
            };
            columns.extend(column.map(|column| (key, column)));
        }
        Ok(columns)
    }
}

/// Whether one of a column's objects has this name.
fn is_ever_called(column: &Value, name: &str) -> bool {
    let Some((tag, rest)) = column.as_array().and_then(|parts| parts.split_first()) else {
        return false;
    };
    match (tag.as_str(), rest) {
        (Some("{"), [columns]) => {
            let names = columns["name"].as_array();
            names.is_some_and(|names| names.iter().any(|part| says(part, name)))
        }
        (Some("?"), [_, column]) => is_ever_called(column, name),
        (_, values) => values.iter().any(|value| value["name"] == *name),
    }
}

/// Whether a part of a column of texts is or holds this.
fn says(part: &Value, name: &str) -> bool {
    part == name
        || part
            .as_array()
            .is_some_and(|parts| parts.iter().any(|part| says(part, name)))
}

/// What a value takes, in values without anything in them.
fn weight(value: &Value) -> usize {
    match value {
        Value::String(text) => 1 + text.len() / VALUE_BYTES,
        Value::Array(all) => 1 + all.iter().map(weight).sum::<usize>(),
        Value::Object(fields) => {
            OBJECT_WEIGHT
                + fields
                    .iter()
                    .map(|(key, of)| key_weight(key) + weight(of))
                    .sum::<usize>()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => 1,
    }
}

fn key_weight(key: &str) -> usize {
    KEY_WEIGHT + key.len() / VALUE_BYTES
}

/// Takes off what so many of this weight take; `None` where there is not so much left.
fn take(left: &mut usize, weight: usize, count: usize) -> Option<()> {
    *left = left.checked_sub(weight.checked_mul(count)?)?;
    Some(())
}

/// A few bytes can say that something large is there a thousand times: `left` is what may still be made of them.
fn unpack_within(column: &Value, count: usize, left: &mut usize) -> Option<Vec<Value>> {
    let parts = column.as_array()?;
    let rest = parts.get(1..)?;
    let values = match (parts.first()?.as_str()?, rest) {
        ("=", [value]) => {
            take(left, weight(value), count)?;
            vec![value.clone(); count]
        }
        ("+", rest) => {
            let mut sum = 0i64;
            let add = |more: &Value| {
                sum = sum.checked_add(more.as_i64()?)?;
                Some(Value::from(sum))
            };
            rest.iter().map(add).collect::<Option<_>>()?
        }
        ("{", [columns]) => fields_of(columns.as_object()?, count, left)?
            .into_iter()
            .map(Value::Object)
            .collect(),
        ("[", [columns]) => {
            take(left, columns.as_array()?.len() + 1, count)?;
            let columns = columns.as_array()?.iter();
            let columns = columns.map(|column| unpack_within(column, count, left));
            let columns: Vec<Vec<Value>> = columns.collect::<Option<_>>()?;
            let list = |at: usize| columns.iter().map(|column| column[at].clone()).collect();
            (0..count).map(list).collect()
        }
        ("@", [columns, orders]) => {
            let objects = fields_of(columns.as_object()?, count, left)?;
            let list = |(mut object, order): (Map<String, Value>, Value)| {
                let items = order.as_array()?.iter().map(|id| object.remove(id.as_str()?));
                items.collect::<Option<Value>>()
            };
            objects
                .into_iter()
                .zip(unpack_within(orders, count, left)?)
                .map(list)
                .collect::<Option<_>>()?
        }
        ("*", rest) => rest.to_vec(),
        _ => return None,
    };
    (values.len() == count).then_some(values)
}

/// As many objects, from a column for each of their keys.
fn fields_of(
    columns: &Map<String, Value>,
    count: usize,
    left: &mut usize,
) -> Option<Vec<Map<String, Value>>> {
    take(left, OBJECT_WEIGHT, count)?;
    let mut objects = vec![Map::new(); count];
    for (key, column) in columns {
        let parts = column.as_array()?;
        let (which, column) = match (parts.first()?.as_str()?, parts.get(1..)?) {
            ("?", [which, column]) => {
                let which = which
                    .as_array()?
                    .iter()
                    .map(|at| usize::try_from(at.as_u64()?).ok());
                (which.collect::<Option<Vec<usize>>>()?, column)
            }
            _ => ((0..count).collect(), column),
        };
        take(left, key_weight(key), which.len())?;
        // Places are ascending, so there are no more of them than objects.
        let places: BTreeMap<usize, Value> = which
            .iter()
            .copied()
            .zip(unpack_within(column, which.len().min(count), left)?)
            .collect();
        for (at, value) in places {
            objects.get_mut(at)?.insert(key.clone(), value);
        }
    }
    Some(objects)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_small_column_does_not_become_a_large_one() {
        let large = json!(["=", "x".repeat(1 << 20)]);
        assert!(unpack(&large, 2).is_some());
        assert_eq!(unpack(&large, 1 << 16), None);
        let wide = json!(["[", vec![json!(["=", 0]); 1 << 16]]);
        assert_eq!(unpack(&wide, 1 << 16), None);
        let with_long_key = json!(["{", {"k".repeat(1 << 20): ["=", 0]}]);
        assert!(unpack(&with_long_key, 2).is_some());
        assert_eq!(unpack(&with_long_key, 1 << 16), None);
        let deep = (0..120).fold(json!(["=", 0]), |inner, _| json!(["{", {"k": inner}]));
        assert!(unpack(&deep, 2).is_some());
        assert_eq!(unpack(&deep, 1 << 16), None);
    }

    pub(crate) fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            (0..9i64).prop_map(Value::from),
            (-1e9..1e9f64).prop_map(Value::from),
            "[a-c=+?@*]{0,2}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 40, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map("[a-b]|id", inner.clone(), 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
                prop::collection::vec(("[a-c]", inner), 0..3).prop_map(|items| {
                    let item = |(id, n): (String, Value)| json!({"id": id, "n": n});
                    items.into_iter().map(item).collect()
                }),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_is_no_column_is_refused_and_never_a_panic(text in ".{0,80}", column in value()) {
            let pick = Pick::Keys(&[("a", Pick::Called("b", &Pick::All))]);
            let _ = read(text.as_bytes(), pick);
            if let Ok(column) = read(column.to_string().as_bytes(), pick) {
                let _ = unpack(&column, 3);
            }
        }

        #[test]
        fn any_value_is_a_column_or_none(column in value(), count in 0..4usize) {
            if let Some(values) = unpack(&column, count) {
                prop_assert_eq!(values.len(), count);
            }
        }
    }
}
