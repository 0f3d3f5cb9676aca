//! `homenode doctor`: what this host has for each feature of the agent, and what it lacks.

use std::path::Path;

use homenode_agent::doctor::text::{Detail, Paragraph};
use homenode_agent::doctor::{Examined, Places, examine};
use homenode_kvm::Vms;
use homenode_screens::table::wrapped;
use homenode_screens::terminal;

use crate::options::AgentArgs;
use crate::print::print_json;

/// The widest output; longer lines are hard to read.
const WIDTH_MAX: usize = 100;

/// Options of `homenode doctor`.
#[derive(Debug, clap::Args)]
pub(crate) struct DoctorArgs {
    /// Also show what was found for each feature, and what this hardware cannot have
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

/// Runs `homenode doctor`. Missing features are not a failure.
///
/// # Errors
/// If the result cannot be printed.
pub(crate) fn run(args: &DoctorArgs) -> anyhow::Result<()> {
    let found = examine(&Places {
        root: Path::new("/").to_owned(),
        state: args.agent.dir().to_owned(),
        libvirt: Vms::of_libvirt(),
    });
    if args.agent.json() {
        return print_json("doctor", &found);
    }
    let width = terminal::size().0.min(WIDTH_MAX);
    let detail = if args.all { Detail::All } else { Detail::Screen };
    for line in lines(&found, detail, width) {
        say!("{line}");
    }
    Ok(())
}

/// Describes a host in lines of at most this width.
fn lines(found: &Examined, detail: Detail, width: usize) -> Vec<String> {
    let all = found.paragraphs(detail).into_iter();
    let of = |Paragraph { text, left, hang }| {
        let lines = wrapped(&text, width - left, hang).into_iter();
        lines.map(move |line| format!("{:left$}{line}", ""))
    };
    all.flat_map(of).collect()
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
            (80, 38, lines(&found, Detail::Screen, 80)),
            (100, 32, lines(&found, Detail::Screen, 100)),
            (80, 60, lines(&found, Detail::All, 80)),
            (100, 50, lines(&found, Detail::All, 100)),
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
