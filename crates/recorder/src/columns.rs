//! Turns many values of the same shape into columns. Constants are written once, and counters as their increments; a general
//! compressor then makes the columns small. Only the order of keys is lost.
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

use std::fmt;

use serde::de::{
    Deserialize as _, DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde_json::{Map, Value, json};

/// Largest weight of a block, in values. A minute of a thousand VMs has a third of it.
const WEIGHT_MAX: usize = 128 << 20;
/// Weight of an object without its fields, and weight of a field's key, in values.
const OBJECT_WEIGHT: usize = 16;
const KEY_WEIGHT: usize = 2;
/// Size of a value in memory.
const VALUE_BYTES: usize = size_of::<Value>();

/// Unpacks the `count` values of a column. Returns `None` if it is damaged, or larger than a minute of any host.
pub fn unpack(column: &Value, count: usize) -> Option<Vec<Value>> {
    unpack_at(column, count, &all(count))
}

/// Unpacks only the values at these places, which are in ascending order. Fewer places take less work.
pub fn unpack_at(column: &Value, count: usize, places: &[usize]) -> Option<Vec<Value>> {
    unpack_within(column, (count, places), &mut { WEIGHT_MAX })
}

/// Unpacks a column of any size, for one that was just packed.
pub(crate) fn unpack_own(column: &Value, count: usize) -> Option<Vec<Value>> {
    unpack_within(column, (count, &all(count)), &mut { usize::MAX })
}

fn all(count: usize) -> Vec<usize> {
    (0..count).collect()
}

/// Selects the part of each value to read. A smaller part takes less work.
#[derive(Clone, Copy, Debug)]
pub enum Pick<'a> {
    /// The whole value.
    All,
    /// The named keys of an object, and for each key the part of its value to read.
    Keys(&'a [(&'a str, Pick<'a>)]),
    /// From a list of objects: those whose `id` or `name` is this text, and the part of each to read. The result is an object
    /// keyed by id if the column stores the list so, otherwise a list.
    Called(&'a str, &'a Pick<'a>),
}

impl Pick<'_> {
    /// Returns the part that is wanted of the value with this key; `None` if the key is not wanted.
    fn of(&self, key: &str) -> Option<Pick<'_>> {
        match self {
            Pick::All | Pick::Called(..) => Some(Pick::All),
            Pick::Keys(keys) => keys.iter().find(|(name, _)| *name == key).map(|(_, pick)| *pick),
        }
    }

    /// Removes the parts of a value that are not wanted.
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

/// Reads a column from its text, skipping the parts that are not wanted.
///
/// # Errors
/// If the text is not JSON, or a wanted part is not a column.
pub fn read(text: &[u8], pick: Pick<'_>) -> serde_json::Result<Value> {
    let mut reader = serde_json::Deserializer::from_slice(text);
    let column = Column(pick).deserialize(&mut reader)?;
    reader.end()?;
    Ok(column)
}

/// Deserializes a column.
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

/// Deserializes the columns of an object's fields, or of objects by their ids.
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

/// Returns true if one of a column's objects has this name in any of its values.
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

/// Returns true if a part of a column of texts is this name or contains it.
fn says(part: &Value, name: &str) -> bool {
    part == name
        || part
            .as_array()
            .is_some_and(|parts| parts.iter().any(|part| says(part, name)))
}

/// Returns the weight of a value, in units of an empty value.
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

/// Subtracts `count` times this weight from `left`; returns `None` if less is left.
fn take(left: &mut usize, weight: usize, count: usize) -> Option<()> {
    *left = left.checked_sub(weight.checked_mul(count)?)?;
    Some(())
}

/// Unpacks the values at some places of a column of `count` values. `left` limits the weight of the result, because a few bytes
/// can repeat a large value a thousand times.
fn unpack_within(
    column: &Value,
    wanted @ (count, places): (usize, &[usize]),
    left: &mut usize,
) -> Option<Vec<Value>> {
    let parts = column.as_array()?;
    let rest = parts.get(1..)?;
    match (parts.first()?.as_str()?, rest) {
        ("=", [value]) => {
            take(left, weight(value), places.len())?;
            Some(vec![value.clone(); places.len()])
        }
        ("+", steps) if steps.len() == count => sums(steps, places),
        ("{", [columns]) => {
            let objects = fields_of(columns.as_object()?, wanted, left)?;
            Some(objects.into_iter().map(Value::Object).collect())
        }
        ("[", [columns]) => {
            take(left, columns.as_array()?.len() + 1, places.len())?;
            let columns = columns.as_array()?.iter();
            let columns = columns.map(|column| Some(unpack_within(column, wanted, left)?.into_iter()));
            let mut columns: Vec<_> = columns.collect::<Option<_>>()?;
            let list = |_| columns.iter_mut().map(Iterator::next).collect();
            places.iter().map(list).collect()
        }
        ("@", [columns, orders]) => {
            let objects = fields_of(columns.as_object()?, wanted, left)?;
            let list = |(mut object, order): (Map<String, Value>, Value)| {
                let items = order.as_array()?.iter().map(|id| object.remove(id.as_str()?));
                items.collect::<Option<Value>>()
            };
            let lists = objects.into_iter().zip(unpack_within(orders, wanted, left)?);
            lists.map(list).collect()
        }
        ("*", values) if values.len() == count => {
            places.iter().map(|place| values.get(*place).cloned()).collect()
        }
        _ => None,
    }
}

/// Returns the running sums of the steps at some places.
fn sums(steps: &[Value], places: &[usize]) -> Option<Vec<Value>> {
    let mut sum = 0i64;
    let mut next = 0;
    let at = |place: &usize| {
        for step in steps.get(next..=*place)? {
            sum = sum.checked_add(step.as_i64()?)?;
        }
        next = place + 1;
        Some(Value::from(sum))
    };
    places.iter().map(at).collect()
}

/// Builds objects from the columns of their keys.
fn fields_of(
    columns: &Map<String, Value>,
    wanted: (usize, &[usize]),
    left: &mut usize,
) -> Option<Vec<Map<String, Value>>> {
    let objects = wanted.1.len();
    take(left, OBJECT_WEIGHT, objects)?;
    let mut objects = vec![Map::new(); objects];
    for (key, column) in columns {
        let parts = column.as_array()?;
        let values = match (parts.first()?.as_str()?, parts.get(1..)?) {
            ("?", [which, column]) => {
                let which = which.as_array()?;
                let (own, of): (Vec<usize>, Vec<usize>) = met(which, wanted)?.into_iter().unzip();
                let values = unpack_within(column, (which.len(), &own), left)?;
                of.into_iter().zip(values).collect::<Vec<_>>()
            }
            _ => {
                let values = unpack_within(column, wanted, left)?;
                values.into_iter().enumerate().collect()
            }
        };
        take(left, key_weight(key), values.len())?;
        for (object, value) in values {
            objects.get_mut(object)?.insert(key.clone(), value);
        }
    }
    Some(objects)
}

/// Intersects two ascending lists of places. Returns the positions of the common places in each list.
fn met(which: &[Value], (count, places): (usize, &[usize])) -> Option<Vec<(usize, usize)>> {
    let mut met = Vec::new();
    let mut least = 0;
    for (at, place) in which.iter().enumerate() {
        let place = usize::try_from(place.as_u64()?).ok()?;
        if !(least..count).contains(&place) {
            return None;
        }
        least = place + 1;
        met.extend(places.binary_search(&place).ok().map(|of| (at, of)));
    }
    Some(met)
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
