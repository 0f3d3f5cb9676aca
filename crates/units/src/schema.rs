//! JSON schemas of quantities, ids and sets.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

use crate::permit::Permit;
use crate::set::{Id, IdSet};
use crate::{MemoryPolicy, VmId};

macro_rules! text {
    ($name:ident, $about:literal, $pattern:literal) => {
        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({ "type": "string", "description": $about, "pattern": $pattern })
            }
        }
    };
}

text!(
    VmId,
    "A VM's UUID.",
    "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
);
text!(
    Permit,
    "LLC misses per slice of 30 ms (`250k`), or memory bandwidth (`500MB/s`).",
    r"^[0-9.]+[kMGT]?(B/s)?$"
);
text!(
    MemoryPolicy,
    "How a VM's pages are placed, and whether they are moved later.",
    r"^(first-touch|round-4k|round-1g)(\+(carrefour|autonuma))?$"
);

impl<T: Id> JsonSchema for IdSet<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "IdSet".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "array", "items": { "type": "integer", "minimum": 0 }, "uniqueItems": true })
    }
}
