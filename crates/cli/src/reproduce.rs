//! `homenode reproduce`: published claims against what the twin gives.

use std::fs;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::Context;
use homenode_api::document::document;
use homenode_reproduce::{Cache, Reproduced, Watch, claims, published, reproduce, tally, to_json};

use crate::bad_input;
use crate::options::ShownArgs;
use crate::output::table;

/// Longest cell of the table for people; the document has all.
const CELL_CHARS_MAX: usize = 48;

/// Options of `reproduce`.
#[derive(Debug, clap::Args)]
pub struct ReproduceArgs {
    /// `all`, a paper (`TAVO`; `own` for ours), a family (`tavo`) or a claim (`tavo.npb`); default: all
    #[arg(value_name = "CLAIMS")]
    pub claims: Vec<String>,
    /// Draw each figure of a decided claim as SVG in this directory
    #[arg(long, value_name = "DIR")]
    pub figures: Option<PathBuf>,
    /// Write all of it as Markdown, set-ups and reasons included
    #[arg(long, value_name = "FILE")]
    pub document: Option<PathBuf>,
    #[command(flatten)]
    pub shown: ShownArgs,
    /// Runs at a time; default: as many as there are CPUs. Results do not depend on it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub jobs: Option<u16>,
    /// Make every run anew, and keep none
    #[arg(long)]
    pub fresh: bool,
    /// Where finished runs are kept; default: `homenode/reproduce` in the user's cache directory
    #[arg(long, value_name = "DIR", conflicts_with = "fresh")]
    pub cache: Option<PathBuf>,
}

/// Decides the selected claims and shows what came of them. Whatever the verdicts, it has then succeeded.
///
/// # Errors
/// A selection that selects nothing; files that cannot be written.
pub fn run(args: &ReproduceArgs) -> anyhow::Result<()> {
    let all = claims::all();
    let whole = all.len();
    let selected = claims::select(all, &args.claims).map_err(bad_input)?;
    if args.document.is_some() && selected.len() < whole {
        return Err(bad_input("--document holds every claim; select `all` with it"));
    }
    if let Some(directory) = &args.figures {
        fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
    }
    let jobs = args.jobs.map_or_else(available, usize::from);
    let watch = Terminal::default();
    let cache = if args.fresh {
        None
    } else {
        open_cache(args.cache.as_deref(), &watch)
    };
    let results = reproduce(selected, jobs, cache.as_ref(), &watch);
    watch.erase();
    if let Some(directory) = &args.figures {
        write_figures(directory, &results)?;
    }
    if let Some(path) = &args.document {
        let text = homenode_reproduce::render(&results);
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let text = if args.shown.json {
        format!(
            "{:#}\n",
            document("claims", serde_json::to_value(to_json(&results))?)
        )
    } else {
        picture(&results)
    };
    // Whoever closes the pipe (`| head`) has seen enough.
    crate::output::print(format_args!("{text}"));
    Ok(())
}

fn available() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The cache, by default where the user keeps such; without one the runs are made all the same.
fn open_cache(directory: Option<&Path>, watch: &Terminal) -> Option<Cache> {
    let directory = directory.map(Path::to_owned).or_else(cache_home)?;
    let program = std::env::current_exe().and_then(fs::read);
    match program.and_then(|program| Cache::open(&directory, &program)) {
        Ok(cache) => Some(cache),
        Err(error) => {
            watch.note(&format!(
                "finished runs are not kept in {}: {error}",
                directory.display()
            ));
            None
        }
    }
}

fn cache_home() -> Option<PathBuf> {
    let absolute = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let home = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))?;
    Some(home.join("homenode/reproduce"))
}

fn write_figures(directory: &Path, results: &[Reproduced]) -> anyhow::Result<()> {
    for figure in results
        .iter()
        .filter_map(|one| one.decision.as_ref())
        .flat_map(|decision| &decision.figures)
    {
        let path = directory.join(format!("{}.svg", figure.name));
        fs::write(&path, figure.svg()).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn picture(results: &[Reproduced]) -> String {
    let rows = results.iter().map(|one| {
        vec![
            one.claim.id.clone(),
            cell(&published(one)),
            cell(&ours(one)),
            one.kind.name().to_owned(),
            one.judgement.verdict.name().to_owned(),
        ]
    });
    let table = table(&["claim", "published", "ours", "kind", "verdict"], rows);
    let mut text = format!("{table}\n\n{}\n", tally(results));
    for one in results {
        for paragraph in one.decision.iter().flat_map(|decision| &decision.why) {
            text += &format!("\n{}: {paragraph}\n", one.claim.id);
        }
    }
    text
}

/// Measured numbers are shown here, unlike in the document.
fn ours(one: &Reproduced) -> String {
    let parts = one.judgement.parts.iter().filter(|part| !part.input);
    match &one.decision {
        Some(decision) if decision.measured_here => {
            let cells: Vec<String> = parts.map(|part| format!("{} {}", part.name, part.ours)).collect();
            cells.join(", ")
        }
        _ => homenode_reproduce::ours(one),
    }
}

fn cell(text: &str) -> String {
    if text.chars().count() <= CELL_CHARS_MAX {
        return text.to_owned();
    }
    let kept: String = text.chars().take(CELL_CHARS_MAX - 1).collect();
    format!("{kept}…")
}

/// Progress on a terminal, nothing in a pipe; notes always, on standard error.
#[derive(Default)]
struct Terminal {
    /// Whether a line of progress stands there now.
    drawn: Mutex<bool>,
}

impl Terminal {
    fn write(&self, text: &str, drawn: bool) {
        let mut was = self
            .drawn
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let erase = if std::mem::replace(&mut *was, drawn) {
            "\r\x1b[K"
        } else {
            ""
        };
        write!(std::io::stderr(), "{erase}{text}").ok();
    }

    fn erase(&self) {
        self.write("", false);
    }
}

impl Watch for Terminal {
    fn progress(&self, done: usize, all: usize) {
        if std::io::stderr().is_terminal() {
            self.write(&format!("{done} of {all} runs"), true);
        }
    }

    fn note(&self, text: &str) {
        self.write(&format!("homenode: {text}\n"), false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_cells_end_in_an_ellipsis() {
        assert_eq!(cell("short"), "short");
        let long = cell(&"ä".repeat(100));
        assert_eq!(long.chars().count(), CELL_CHARS_MAX);
        assert!(long.ends_with('…'));
    }
}
