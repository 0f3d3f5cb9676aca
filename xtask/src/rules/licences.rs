//! The rule on licences and sources of the packages that the workspace is built with: `deny.toml` says which are allowed.
//!
//! cargo-deny reads the same file, but compiling cargo-deny here would take longer than all other rules. spdx, which
//! cargo-deny uses as well, parses the licence expressions.

use std::collections::BTreeMap;

use serde::Deserialize;
use spdx::{Expression, LicenseReq, Licensee, ParseMode};

use super::Finding;
use super::tree::Workspace;
use crate::cargo::Licensed;

/// The part of `deny.toml` that is read here.
#[derive(Debug, Deserialize)]
struct Deny {
    licenses: Licenses,
}

#[derive(Debug, Deserialize)]
struct Licenses {
    allow: Vec<String>,
    #[serde(default)]
    exceptions: Vec<Exception>,
}

#[derive(Debug, Deserialize)]
struct Exception {
    name: String,
    allow: Vec<String>,
}

const FILE: &str = "deny.toml";
const REGISTRY: &str = "registry+";

/// Finds packages whose licence or source is not allowed.
pub(super) fn licences(workspace: &Workspace) -> Vec<Finding> {
    let finding = |message| Finding {
        place: FILE.to_owned(),
        message,
    };
    let text = workspace.file(FILE).map_or("", |file| &file.text);
    let deny: Deny = match toml::from_str(text) {
        Ok(deny) => deny,
        Err(error) => return vec![finding(format!("it cannot be read: {error}"))],
    };
    let exceptions: BTreeMap<&str, &[String]> = deny
        .licenses
        .exceptions
        .iter()
        .map(|e| (&*e.name, &*e.allow))
        .collect();
    let problem = |package: &Licensed| {
        let name = &package.name;
        let source = package.source.as_deref().unwrap_or_default();
        if !source.starts_with(REGISTRY) {
            return Some(format!("{name} comes from {source}, not from the registry"));
        }
        let Some(license) = &package.license else {
            return Some(format!("{name} says no licence"));
        };
        let extra = exceptions.get(&**name).copied().unwrap_or_default();
        let allowed: Vec<&String> = deny.licenses.allow.iter().chain(extra).collect();
        match is_allowed(license, &allowed) {
            Ok(true) => None,
            Ok(false) => Some(format!(
                "{name} is under {license}: do without it, or allow that licence"
            )),
            Err(error) => Some(format!("{name}: its licence {license} cannot be read: {error}")),
        }
    };
    workspace
        .packages
        .iter()
        .filter_map(problem)
        .map(finding)
        .collect()
}

/// Whether allowed licences alone satisfy a licence expression.
fn is_allowed(license: &str, allowed: &[&String]) -> anyhow::Result<bool> {
    let allowed = allowed
        .iter()
        .map(|one| Licensee::parse_mode(one, ParseMode::LAX))
        .collect::<Result<Vec<_>, _>>()?;
    let expression = Expression::parse_mode(license, ParseMode::LAX)?;
    Ok(expression.evaluate(|wanted: &LicenseReq| allowed.iter().any(|one| one.satisfies(wanted))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::tree::SourceFile;

    fn found(packages: &[(&str, Option<&str>, &str)]) -> Vec<String> {
        let package = |(name, license, source): &(&str, Option<&str>, &str)| Licensed {
            name: (*name).to_owned(),
            license: license.map(str::to_owned),
            source: Some((*source).to_owned()),
        };
        let deny = "[licenses]\nallow = [\"MIT\", \"Apache-2.0\"]\nexceptions = [{ name = \"virt\", allow = [\"LGPL-2.1\"] }]\n";
        let workspace = Workspace {
            files: vec![SourceFile::new(FILE, deny)],
            packages: packages.iter().map(package).collect(),
            ..Workspace::default()
        };
        licences(&workspace)
            .into_iter()
            .map(|finding| finding.message)
            .collect()
    }

    #[test]
    fn only_allowed_licences_and_the_registry_pass() {
        let fine = [
            ("both", Some("MIT AND Apache-2.0"), REGISTRY),
            ("old", Some("Apache-2.0/MIT"), REGISTRY),
            ("choice", Some("GPL-2.0 OR MIT"), REGISTRY),
            ("virt", Some("LGPL-2.1"), REGISTRY),
        ];
        assert_eq!(found(&fine), Vec::<String>::new());
        let wrong = [
            ("copyleft", Some("GPL-3.0 AND MIT"), REGISTRY),
            ("other", Some("LGPL-2.1"), REGISTRY),
            ("silent", None, REGISTRY),
            ("odd", Some("Beerware-ish!"), REGISTRY),
            ("git", Some("MIT"), "git+https://example.org/x"),
        ];
        assert_eq!(found(&wrong).len(), wrong.len(), "{:?}", found(&wrong));
    }
}
