//! Keys as they were called up to version 0.1, kept beside their successors in version 0.2. This file goes with 0.3.

use serde_json::{Map, Value};

/// How a key's value was written.
enum Was {
    /// As it is now.
    Same,
    /// Objects were lists of their values, in this order.
    Lists(&'static [&'static str]),
    /// A list of objects was one of lists.
    Pairs(&'static [&'static str]),
    /// A list of objects was one of pairs: what this key holds, and the rest.
    Keyed(&'static str),
}

/// Kind of document (all, where empty), key, what it was called, and how it was written.
const KEYS: &[(&str, &str, &str, Was)] = &[
    ("", "pages_by_node", "pages_on", Was::Pairs(&["node", "pages"])),
    ("", "vcpus_by_node", "vcpus_on", Was::Pairs(&["node", "vcpus"])),
    (
        "placed",
        "needs",
        "requirement",
        Was::Lists(&["cpu_share", "memory_share", "bandwidth_share"]),
    ),
    (
        "placed",
        "left",
        "capacity",
        Was::Lists(&["cpu_share", "memory_share", "bandwidth_share"]),
    ),
    (
        "machine",
        "bandwidth_bytes_per_s",
        "bandwidth_bytes_per_sec",
        Was::Same,
    ),
    (
        "machine",
        "memory_bandwidth_bytes_per_s",
        "memory_bandwidth_bytes_per_sec",
        Was::Same,
    ),
    (
        "",
        "node_accesses",
        "accesses_by_node",
        Was::Pairs(&["node", "accesses"]),
    ),
    ("", "node_loads", "nodes", Was::Keyed("node")),
    ("", "tracker", "carrier", Was::Same),
    ("", "tracker_merit", "carrier_merit", Was::Same),
    ("", "trackers", "carriers", Was::Same),
];

/// Adds what the keys of a document were called before.
pub fn keep(kind: &str, value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(|item| keep(kind, item)),
        Value::Object(map) => {
            map.values_mut().for_each(|value| keep(kind, value));
            let of_kind = KEYS.iter().filter(|(of, ..)| of.is_empty() || *of == kind);
            for (_, now, before, was) in of_kind {
                if let Some(value) = map.get(*now) {
                    let value = as_it_was(value, was);
                    map.entry(*before).or_insert(value);
                }
            }
        }
        _ => {}
    }
}

fn as_it_was(value: &Value, was: &Was) -> Value {
    let list = |map: &Map<String, Value>, keys: &[&str]| -> Value {
        keys.iter()
            .map(|key| map.get(*key).cloned().unwrap_or_default())
            .collect()
    };
    match (was, value) {
        (Was::Lists(keys), Value::Object(map)) => list(map, keys),
        (Was::Pairs(keys), Value::Array(items)) => items
            .iter()
            .filter_map(Value::as_object)
            .map(|map| list(map, keys))
            .collect(),
        (Was::Keyed(key), Value::Array(items)) => {
            let items = items.iter().filter_map(Value::as_object);
            let pair = |map: &Map<String, Value>| -> Value {
                let mut rest = map.clone();
                let first = rest.remove(*key).unwrap_or_default();
                vec![first, rest.into()].into()
            };
            items.map(pair).collect()
        }
        _ => value.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn former_keys_stand_beside_their_successors_at_any_depth() {
        let mut value =
            json!({ "vms": [{ "pages_by_node": [{ "node": 0, "pages": 7 }, { "node": 2, "pages": 1 }] }] });
        keep("vms", &mut value);
        assert_eq!(value["vms"][0]["pages_on"], json!([[0, 7], [2, 1]]));
        assert!(value["vms"][0]["pages_by_node"].is_array());
    }

    #[test]
    fn a_key_of_one_kind_is_no_key_of_another() {
        let object = json!({ "bandwidth_bytes_per_s": 5, "needs": { "cpu_share": 0.5 } });
        let kept = |kind| {
            let mut value = object.clone();
            keep(kind, &mut value);
            value
        };
        assert_eq!(kept("machine")["bandwidth_bytes_per_sec"], 5);
        assert_eq!(kept("placed")["requirement"], json!([0.5, null, null]));
        assert_eq!(kept("vms"), object);
    }

    #[test]
    fn what_was_not_known_was_null_before_too() {
        let mut value = json!({ "pages_by_node": null });
        keep("", &mut value);
        assert_eq!(value["pages_on"], Value::Null);
    }
}
