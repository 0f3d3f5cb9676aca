//! Bases shared by several experiments: files of `data/experiments`.

use std::path::PathBuf;

const BASES: &[(&str, &str)] = files! {
    "": "flip", "kyoto", "policies", "tavo", "xpv";
    "kyoto/": "colocation";
    "page-logs/": "costs";
    "policies/": "advisor", "controllers";
    "tavo/": "suites";
};

/// Returns the path and text of a base. Experiments name it without its folder.
pub(crate) fn base(name: &str) -> Option<(PathBuf, String)> {
    let is = |path: &str| path.rsplit('/').next() == Some(name);
    let (path, text) = BASES.iter().find(|(path, _)| is(path))?;
    Some((format!("data/experiments/{path}.toml").into(), (*text).to_owned()))
}
