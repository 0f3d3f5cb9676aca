//! `homenode doctor`: what this host has for each thing that the agent can do, and what it lacks.

use std::path::Path;

use homenode_agent::doctor::{Examined, Feature, Places, examine};
use homenode_linux::Vms;

use crate::options::AgentArgs;
use crate::output::print_json;
use crate::top::wrapped;

/// Wider than this is hard to read.
const WIDTH_MAX: usize = 100;
/// Where what was found begins.
const INDENT: usize = 19;
/// Where a remedy begins; terminals are taken to be 20 columns wide at least.
const REMEDY_AT: usize = 4;

/// Carries out `homenode doctor`. What it finds is no failure.
///
/// # Errors
/// When it cannot be said.
pub fn run(args: &AgentArgs) -> anyhow::Result<()> {
    let found = examine(&Places {
        root: Path::new("/").to_owned(),
        state: args.dir().to_owned(),
        libvirt: Vms::of_libvirt(),
    });
    if args.json() {
        return print_json("doctor", &found);
    }
    for line in lines(&found, crate::top::terminal_size().0.min(WIDTH_MAX)) {
        say!("{line}");
    }
    Ok(())
}

/// Lines of at most this width: what is there, then what is missing, each with its remedy below it.
fn lines(found: &Examined, width: usize) -> Vec<String> {
    let (there, missing): (Vec<&Feature>, Vec<&Feature>) = found.features.iter().partition(|one| one.has);
    let machine = found.machine.as_deref().unwrap_or("a host that cannot be read");
    let count = found.features.len();
    let mut lines = wrapped(
        &format!("{machine}: {} of {count} features are there", there.len()),
        width,
        2,
    );
    for one in there {
        let text = format!("{:<18} {}", one.feature, one.found);
        lines.extend(wrapped(&text, width, INDENT));
    }
    if !missing.is_empty() {
        lines.push("missing, with what that costs, and how to get it:".to_owned());
    }
    for one in missing {
        let costs = one.costs.unwrap_or_default();
        let text = format!("{:<18} {}; {costs}", one.feature, one.found);
        lines.extend(wrapped(&text, width, INDENT));
        if let Some(remedy) = &one.remedy {
            let remedy = wrapped(&format!("-> {remedy}"), width - REMEDY_AT, "-> ".len());
            lines.extend(remedy.iter().map(|line| format!("{:REMEDY_AT$}{line}", "")));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_lacks_all_is_described_in_few_lines_that_fit_the_terminal() {
        let root = tempfile::tempdir().unwrap();
        let found = examine(&Places {
            root: root.path().to_owned(),
            state: root.path().join("state"),
            libvirt: Vms::Libvirt("qemu+unix:///system?socket=/does/not/exist".to_owned()),
        });
        for (width, most) in [(80, 56), (100, 46)] {
            let lines = lines(&found, width);
            let whole = lines.join("\n");
            assert!(lines.len() <= most, "{} of {most}:\n{whole}", lines.len());
            assert!(
                lines.iter().all(|line| line.chars().count() <= width),
                "{width}:\n{whole}"
            );
            for one in &found.features {
                let remedy = one.remedy.as_deref().unwrap_or_default();
                let word = remedy.split(' ').next_back().unwrap_or_default();
                assert!(
                    whole.contains(one.feature) && whole.contains(word),
                    "{one:?}:\n{whole}"
                );
            }
        }
    }
}
