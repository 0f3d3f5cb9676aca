//! Base files shared by several experiments, embedded in the program.

use std::path::PathBuf;

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../../../data/experiments/", $name, ".toml"))),)*]
    };
}

const BASES: &[(&str, &str)] = files!(
    "flip",
    "kyoto",
    "kyoto/colocation",
    "page-logs/costs",
    "policies",
    "policies/advisor",
    "policies/controllers",
    "tavo",
    "tavo/suites",
    "xpv",
);

/// Returns the path and text of an embedded base. Experiments name it without its folder.
pub fn base(name: &str) -> Option<(PathBuf, String)> {
    let is = |path: &str| path.rsplit('/').next() == Some(name);
    let (path, text) = BASES.iter().find(|(path, _)| is(path))?;
    Some((format!("data/experiments/{path}.toml").into(), (*text).to_owned()))
}
