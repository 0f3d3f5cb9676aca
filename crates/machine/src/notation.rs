//! How files write numbers with a unit and lists, for the schemas of those files.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

/// Numbers with a unit, and lists, which files write as text.
macro_rules! written {
    ($(#[$doc:meta])* $name:ident, $pattern:literal, $example:literal) => {
        $(#[$doc])*
        pub struct $name;

        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({ "type": "string", "pattern": $pattern, "examples": [$example] })
            }
        }
    };
}

written!(
    /// An amount of memory.
    Size,
    r"^\s*(\d+\.?\d{0,9}|\.\d{1,9})\s*(TiB|GiB|MiB|KiB|TB|GB|MB|kB|B)\s*$",
    "8GiB"
);
written!(
    /// A time span.
    Time,
    r"^\s*(\d+\.?\d{0,9}|\.\d{1,9})\s*(ns|us|ms|s|min|m|h|d)\s*$",
    "1500ms"
);
written!(
    /// How a VM's pages are placed, and what moves them later.
    MemoryPolicy,
    r"^\s*((first-touch|round-4k|round-1g)(\s*\+\s*(carrefour|autonuma))?|carrefour|autonuma)\s*$",
    "first-touch+carrefour"
);
written!(
    /// A VM's booked permit.
    Permit,
    r"^\s*(\d+|(\d+\.?\d{0,9}|\.\d{1,9})\s*(k|M|G|(TiB|GiB|MiB|KiB|TB|GB|MB|kB|B)/s))\s*$",
    "250k"
);
written!(
    /// A set of CPUs or nodes, as the kernel writes it.
    List,
    r"^\s*(\d+(-\d+)?(\s*,\s*\d+(-\d+)?)*)?\s*$",
    "0-3,8"
);
written!(
    /// Bytes per second.
    Rate,
    r"^\s*(\d+\.?\d{0,9}|\.\d{1,9})\s*(TiB|GiB|MiB|KiB|TB|GB|MB|kB|B)/s\s*$",
    "25.6GB/s"
);
written!(
    /// A clock's frequency.
    Clock,
    r"^[0-9.]+\s*(GHz|MHz)$",
    "2.45GHz"
);
