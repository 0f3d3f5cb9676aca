//! Names the right command for words that are not commands but that people try: other programs' words, and plain ones.

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Commands, each with the words that people type for it.
const MEANT: [(&str, &[&str]); 28] = [
    ("status", &["stats", "stat", "info", "show", "state"]),
    (
        "vm",
        &["ps", "ls", "vms", "guests", "domains", "instances", "list-vms"],
    ),
    (
        "top",
        &["htop", "virt-top", "xentop", "numatop", "watch", "monitor"],
    ),
    ("why", &["explain", "diagnose", "analyze", "analyse", "slow"]),
    ("report", &["summary", "gains", "results"]),
    ("wss", &["working-set", "workingset"]),
    (
        "machine",
        &[
            "numactl", "lstopo", "lscpu", "topo", "hardware", "host", "nodes", "cpus",
        ],
    ),
    ("doctor", &["check", "verify", "preflight", "health", "test"]),
    (
        "release",
        &[
            "undo", "rollback", "revert", "restore", "reset", "unpin", "cleanup", "clean",
        ],
    ),
    ("run --dry-run", &["dry-run", "dryrun", "plan", "observe"]),
    ("run --host twin", &["demo", "try", "twin"]),
    ("run --web", &["web", "page", "ui", "gui", "dashboard", "serve"]),
    ("run", &["agent", "start", "daemon", "exec"]),
    ("recommend apply", &["apply", "approve", "accept"]),
    ("recommend reject", &["reject", "deny", "decline"]),
    ("drain", &["evacuate", "maintenance", "cordon", "empty"]),
    ("drain NODES --end", &["undrain", "uncordon"]),
    ("pause --end", &["resume", "unpause", "continue"]),
    ("pause", &["stop", "suspend", "freeze", "disable"]),
    ("whatif", &["what-if", "predict", "forecast"]),
    ("place", &["placement", "where", "suggest", "numad"]),
    ("permit usage", &["bill", "billing", "usage"]),
    ("memory set", &["balloon", "floor"]),
    (
        "record show",
        &["history", "log", "logs", "events", "journal", "audit"],
    ),
    ("record export", &["export", "dump", "csv"]),
    ("config", &["settings", "configure", "configuration"]),
    ("list scenarios", &["scenarios", "examples"]),
    ("list policies", &["policies"]),
];

/// Returns the command that a word stands for.
fn meant(word: &str) -> Option<&'static str> {
    let word = word.to_lowercase().replace('_', "-");
    MEANT
        .iter()
        .find(|(_, words)| words.contains(&word.as_str()))
        .map(|(command, _)| *command)
}

/// Improves the suggestion in an error about an unknown command. Clap suggests words that are spelt alike, hidden ones too.
pub(crate) fn improve(mut error: clap::Error, all: &clap::Command, args: &[String]) -> clap::Error {
    let word = match (error.kind(), error.get(ContextKind::InvalidSubcommand)) {
        (ErrorKind::InvalidSubcommand, Some(ContextValue::String(word))) => word.clone(),
        // For `homenode list vms`: VMs do not come with the program.
        (ErrorKind::InvalidValue, _) if args.first().is_some_and(|arg| arg == "list") => {
            let word = args.get(1).cloned().unwrap_or_default();
            if meant(&word) == Some("vm") || word == "vm" {
                tip(
                    &mut error,
                    "the VMs of the running agent are listed by 'homenode vm'",
                );
            }
            return error;
        }
        _ => return error,
    };
    if args.first() != Some(&word) {
        return error;
    }
    if let Some(command) = meant(&word) {
        error.remove(ContextKind::SuggestedSubcommand);
        tip(&mut error, &format!("you may want 'homenode {command}'"));
        return error;
    }
    let is_shown = |name: &String| {
        all.get_subcommands()
            .any(|of| of.get_name() == name && !of.is_hide_set())
    };
    if let Some(ContextValue::Strings(names)) = error.remove(ContextKind::SuggestedSubcommand) {
        let names: Vec<String> = names.into_iter().filter(is_shown).collect();
        if !names.is_empty() {
            error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(names));
        }
    }
    error
}

fn tip(error: &mut clap::Error, text: &str) {
    let tips = vec![StyledStr::from(text.to_owned())];
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::args::Args;

    fn said(words: &[&str]) -> String {
        let args: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        let all = Args::described();
        let error = all
            .clone()
            .try_get_matches_from(["homenode"].iter().chain(words))
            .unwrap_err();
        improve(error, &all, &args).render().to_string()
    }

    #[test]
    fn words_of_other_programs_name_the_command_that_does_it() {
        for (words, right) in [
            (&["stats"][..], "tip: you may want 'homenode status'"),
            (&["ps"], "'homenode vm'"),
            (&["PS"], "'homenode vm'"),
            (&["list", "vms"], "listed by 'homenode vm'"),
            (&["list", "vm"], "listed by 'homenode vm'"),
            (&["rollback"], "'homenode release'"),
            (&["undo", "--json"], "'homenode release'"),
            (&["dry-run"], "'homenode run --dry-run'"),
            (&["dry_run"], "'homenode run --dry-run'"),
            (&["whtif"], "'whatif'"),
            (&["simulate"], "'sim'"),
            (&["list", "machinse"], "machines"),
        ] {
            let said = said(words);
            assert!(said.contains(right), "{words:?}: {said}");
            assert_eq!(said.matches("tip:").count(), 1, "{words:?}: {said}");
        }
    }

    #[test]
    fn no_hidden_command_is_suggested_and_words_of_subcommands_are_left_to_them() {
        for words in [&["rebalance"][..], &["epsilom"], &["zzz"], &["record", "undo"]] {
            let said = said(words);
            assert!(
                !said.contains("calibrate-kernel") && !said.contains("epsilon'"),
                "{said}"
            );
            assert!(!said.contains("you may want"), "{said}");
        }
    }

    #[test]
    fn each_word_means_one_command_that_there_is_and_is_none_itself() {
        let all = Args::described();
        let names: BTreeSet<&str> = all.get_subcommands().map(clap::Command::get_name).collect();
        let mut seen = BTreeSet::new();
        for (command, words) in MEANT {
            let parts: Vec<&str> = command.split(' ').collect();
            let of = all.find_subcommand(parts[0]).expect(command);
            for pair in parts.windows(2) {
                let (before, part) = (pair[0], pair[1]);
                let option = |word: &str| {
                    let long = word.strip_prefix("--")?;
                    of.get_arguments().find(|arg| arg.get_long() == Some(long))
                };
                let is_value = |arg: &clap::Arg| {
                    let known = arg.get_possible_values();
                    known.is_empty() || known.iter().any(|value| value.matches(part, false))
                };
                let is_known = match option(before) {
                    Some(option) if option.get_action().takes_values() => is_value(option),
                    _ if part.starts_with("--") => option(part).is_some(),
                    _ if part.chars().all(char::is_uppercase) => of.get_positionals().next().is_some(),
                    _ => {
                        let is_named =
                            |arg: &clap::Arg| !arg.get_possible_values().is_empty() && is_value(arg);
                        of.find_subcommand(part).is_some() || of.get_positionals().any(is_named)
                    }
                };
                assert!(is_known, "{command}");
            }
            for word in words {
                assert!(!names.contains(word), "{word} is a command");
                assert!(seen.insert(*word), "{word} means two commands");
            }
        }
    }
}
