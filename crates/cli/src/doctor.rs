//! `homenode doctor`: what this host has for each feature of the agent, and what it lacks.

use std::path::Path;

use homenode_agent::doctor::{Examined, Feature, Places, examine};
use homenode_kvm::Vms;

use crate::options::AgentArgs;
use crate::print::print_json;
use crate::top::wrapped;

/// The widest output; longer lines are hard to read.
const WIDTH_MAX: usize = 100;
/// Column where findings begin.
const INDENT: usize = 19;
/// Column where a remedy begins; terminals are assumed to be at least 20 columns wide.
const REMEDY_AT: usize = 4;

/// Options of `homenode doctor`.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// Say more: the finding for each feature, and what this hardware lacks
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

/// Runs `homenode doctor`. Missing features are not a failure.
///
/// # Errors
/// If the result cannot be printed.
pub fn run(args: &DoctorArgs) -> anyhow::Result<()> {
    let found = examine(&Places {
        root: Path::new("/").to_owned(),
        state: args.agent.dir().to_owned(),
        libvirt: Vms::of_libvirt(),
    });
    if args.agent.json() {
        return print_json("doctor", &found);
    }
    let width = crate::top::terminal_size().0.min(WIDTH_MAX);
    let lines = match args.all {
        true => all_lines(&found, width),
        false => lines(&found, width),
    };
    for line in lines {
        say!("{line}");
    }
    Ok(())
}

/// One screen: features that are there, those to get and how, and those out of reach.
fn lines(found: &Examined, width: usize) -> Vec<String> {
    let (there, missing): (Vec<&Feature>, Vec<&Feature>) = found.features.iter().partition(|one| one.has);
    let (lost, to_get): (Vec<&Feature>, Vec<&Feature>) =
        missing.iter().partition(|one| one.is_out_of_reach());
    let machine = found.machine.as_deref().unwrap_or("a host that cannot be read");
    let mut lines = wrapped(
        &format!(
            "{machine}: {} of {} features are there; 'homenode doctor --all' says more of each",
            there.len(),
            found.features.len()
        ),
        width,
        2,
    );
    let names = |of: &[&Feature]| of.iter().map(|one| one.feature).collect::<Vec<_>>().join(", ");
    let mut paragraph =
        |name: &str, text: &str| lines.extend(wrapped(&format!("{name:<18} {text}"), width, INDENT));
    if !found.kernel.is_unknown() {
        paragraph("kernel", &found.kernel.to_string());
    }
    // What runs VMs here deserves more than a name.
    let (vms, others): (Vec<&Feature>, Vec<&Feature>) = there.iter().partition(|one| one.is_of_vms());
    for one in vms {
        paragraph(one.feature, &one.found);
    }
    if !others.is_empty() {
        paragraph("there", &names(&others));
    }
    if !lost.is_empty() {
        paragraph("not on this host", &names(&lost));
    }
    for one in to_get {
        let (costs, remedy) = (
            one.costs.unwrap_or_default(),
            one.remedy.as_deref().unwrap_or_default(),
        );
        paragraph(one.feature, &format!("{costs} -> {remedy}"));
    }
    lines
}

/// Lines of at most this width: features that are there, then missing ones, each with its remedy below it.
fn all_lines(found: &Examined, width: usize) -> Vec<String> {
    let (there, missing): (Vec<&Feature>, Vec<&Feature>) = found.features.iter().partition(|one| one.has);
    let machine = found.machine.as_deref().unwrap_or("a host that cannot be read");
    let count = found.features.len();
    let mut lines = wrapped(
        &format!("{machine}: {} of {count} features are there", there.len()),
        width,
        2,
    );
    if !found.kernel.is_unknown() {
        lines.extend(wrapped(
            &format!("{:<18} {}", "kernel", found.kernel),
            width,
            INDENT,
        ));
    }
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
        for (width, most, lines) in [
            (80, 38, lines(&found, 80)),
            (100, 32, lines(&found, 100)),
            (80, 56, all_lines(&found, 80)),
            (100, 46, all_lines(&found, 100)),
        ] {
            let whole = lines.join("\n");
            assert!(lines.len() <= most, "{} of {most}:\n{whole}", lines.len());
            assert!(
                lines.iter().all(|line| line.chars().count() <= width),
                "{width}:\n{whole}"
            );
            for one in &found.features {
                let remedy = one.remedy.as_deref().unwrap_or_default();
                let remedy = if most < 40 && one.is_out_of_reach() {
                    ""
                } else {
                    remedy
                };
                let word = remedy.split(' ').next_back().unwrap_or_default();
                assert!(
                    whole.contains(one.feature) && whole.contains(word),
                    "{one:?}:\n{whole}"
                );
            }
        }
    }
}
