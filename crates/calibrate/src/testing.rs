//! Fixtures shared by the tests of several modules.

/// A machine with three nodes: one without memory, a complete one, and one without CPUs.
pub(crate) const ODD: &str = r#"
name = "odd"
[[node]]
id = 0
cpus = "0-1"
memory = "0B"
[[node]]
id = 1
cpus = "2-3"
memory = "8GiB"
[[node]]
id = 2
cpus = ""
memory = "64GiB"
"#;
