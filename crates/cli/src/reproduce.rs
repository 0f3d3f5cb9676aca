//! `homenode reproduce`: compares published claims with results of the simulator.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use homenode_reproduce::jobs::{self, Progress};
use homenode_reproduce::{
    Bands, Cache, Figure, Log, Reproduced, claims, headline, published, reproduce, reproduce_with_bands,
    tally, to_json,
};
use homenode_units::file_name;

use crate::bad_input;
use crate::options::{OutDir, OutFile, ShownArgs};
use crate::print::{print, print_json, table};

/// Maximum width of a cell in the table for people; the document has the full text.
const CELL_CHARS_MAX: usize = 48;

/// Options of `reproduce`.
#[derive(Debug, clap::Args)]
pub(crate) struct ReproduceArgs {
    /// Claims to check: `all`, those of a paper (`TAVO`, or `own` for Homenode's own), a family (`tavo`) or a single claim
    /// (`tavo.npb`); default: all
    #[arg(value_name = "CLAIMS")]
    pub claims: Vec<String>,
    /// Draw each figure of a decided claim as SVG and PNG in this directory
    #[arg(long, value_name = "DIR")]
    pub figures: Option<OutDir>,
    /// Write all results as Markdown: the comparison of numbers to FILE, set-ups and reasons to `…-DETAILS.md` next to it
    #[arg(long, value_name = "FILE")]
    pub document: Option<OutFile>,
    /// With --document: report on the runs in this log instead of the log that comes with the program
    #[arg(long, value_name = "FILE", requires = "document")]
    pub log: Option<PathBuf>,
    /// Compute how far values vary with the inputs that the papers leave open, and write these bands to FILE, which keeps its
    /// bands of other claims. Takes four times as many runs
    #[arg(long, value_name = "FILE")]
    pub bands: Option<OutFile>,
    #[command(flatten)]
    pub shown: ShownArgs,
    #[command(flatten)]
    pub runs: RunsArgs,
}

/// How runs of the simulator are made and kept.
#[derive(Debug, clap::Args)]
pub(crate) struct RunsArgs {
    /// Number of runs at a time; default: the number of CPUs. Results do not depend on it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub jobs: Option<u16>,
    /// Repeat every run, without using or storing finished runs
    #[arg(long)]
    pub fresh: bool,
    /// Directory for finished runs; default: `homenode/reproduce` in the user's cache directory
    #[arg(long, value_name = "DIR", conflicts_with = "fresh")]
    pub cache: Option<PathBuf>,
}

impl RunsArgs {
    /// Number of runs at a time.
    pub(crate) fn jobs(&self) -> usize {
        self.jobs.map_or_else(jobs::available, usize::from)
    }

    /// The cache of finished runs, if they are kept.
    pub(crate) fn cache(&self, progress: &Progress) -> Option<Cache> {
        match self.fresh {
            true => None,
            false => open_cache(self.cache.as_deref(), progress),
        }
    }
}

/// Decides the selected claims and shows the results. It succeeds whatever the verdicts are.
///
/// # Errors
/// A selection that selects nothing; files that cannot be written.
pub(crate) fn run(args: &ReproduceArgs) -> anyhow::Result<()> {
    let all = claims::all();
    let whole = all.len();
    let selected = claims::select(all, &args.claims).map_err(bad_input)?;
    if args.document.is_some() && selected.len() < whole {
        return Err(bad_input(
            "--document needs the results of every claim; select `all`",
        ));
    }
    let details = args.document.as_ref();
    let details = details.map(|path| OutFile::further("--document", beside(path, "-DETAILS")));
    let details = details.transpose()?;
    // Read it before hours of runs: a file that does not parse would lose them.
    let log = args
        .document
        .as_ref()
        .map(|path| Ok::<_, anyhow::Error>((path, log(args.log.as_deref())?)));
    let log = log.transpose()?;
    let bands = args
        .bands
        .as_ref()
        .map(|path| Ok::<_, anyhow::Error>((path, known_bands(path)?)));
    let bands = bands.transpose()?;
    let figures = args.figures.as_ref().map(OutDir::create).transpose()?;
    let (jobs, progress) = (args.runs.jobs(), Progress::new(""));
    let cache = args.runs.cache(&progress);
    let results = match bands {
        None => reproduce(selected, jobs, cache.as_ref(), &progress),
        Some((path, known)) => {
            let (results, bands) = reproduce_with_bands(selected, jobs, cache.as_ref(), &progress)?;
            let kept = known.with(bands);
            fs::write(path, kept.to_toml()?).with_context(|| format!("cannot write {}", path.display()))?;
            results
        }
    };
    drop(progress);
    if let Some(directory) = figures {
        let decisions = results.iter().filter_map(|one| one.decision.as_ref());
        let own = decisions.flat_map(|decision| &decision.figures);
        write_figures(directory, own)?;
        write_figures(directory, &homenode_reproduce::scoreboard::figures(&results))?;
    }
    if let (Some((path, log)), Some(details)) = (log, details) {
        let document = homenode_reproduce::render(&results, &log);
        for (path, text) in [(&**path, document.page), (&*details, document.details)] {
            fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    if args.shown.json {
        return print_json("claims", &to_json(&results));
    }
    print(format_args!("{}", picture(&results)));
    Ok(())
}

/// Reads the log in a file, or the log that comes with the program.
fn log(path: Option<&Path>) -> anyhow::Result<Log> {
    let Some(path) = path else {
        return Log::committed().map_err(bad_input);
    };
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    Log::parse(&path.display().to_string(), &text).map_err(bad_input)
}

/// Reads the bands in a file, which may not exist yet. The file must keep the bands of claims that are not selected.
fn known_bands(path: &Path) -> anyhow::Result<Bands> {
    match fs::read_to_string(path) {
        Ok(text) => Bands::parse(&path.display().to_string(), &text).map_err(bad_input),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Bands::default()),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// Returns the path of a sibling file, with `more` inserted before the extension.
fn beside(path: &Path, more: &str) -> PathBuf {
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push(more);
    if let Some(ending) = path.extension() {
        name.push(".");
        name.push(ending);
    }
    path.with_file_name(name)
}

/// Opens the cache, by default in the user's cache directory. Returns `None` if it cannot be opened: no run needs it.
fn open_cache(directory: Option<&Path>, progress: &Progress) -> Option<Cache> {
    let directory = directory.map(Path::to_owned).or_else(cache_home)?;
    let program = std::env::current_exe().and_then(fs::read);
    match program.and_then(|program| Cache::open(&directory, &program)) {
        Ok(cache) => Some(cache),
        Err(error) => {
            progress.note(&format!(
                "cannot keep finished runs in {}: {error}",
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

/// Writes each figure as SVG and PNG.
pub(crate) fn write_figures<'a>(
    directory: &Path,
    figures: impl IntoIterator<Item = &'a Figure>,
) -> anyhow::Result<()> {
    for figure in figures {
        let png = figure.png()?;
        for (ending, bytes) in [(".svg", figure.svg().into_bytes()), (".png", png)] {
            let path = directory.join(file_name(&figure.name, ending).map_err(bad_input)?);
            fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    Ok(())
}

fn picture(results: &[Reproduced]) -> String {
    let rows = results.iter().map(|one| {
        vec![
            one.claim.id.clone(),
            cell(&published(one)),
            cell(&ours(one)),
            one.kind.name(),
            one.judgement.verdict.name(),
        ]
    });
    let table = table(&["claim", "published", "ours", "kind", "verdict"], rows);
    let mut text = format!("{table}\n\n{}\n", tally(results));
    let headline = headline(results);
    if !headline.is_empty() {
        text += &format!("{headline}\n");
    }
    for one in results {
        for paragraph in one.decision.iter().flat_map(|decision| &decision.why) {
            text += &format!("\n{}: {paragraph}\n", one.claim.id);
        }
    }
    text
}

/// Returns our values of a claim. Unlike the document, the table also shows numbers that were measured on this host.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn details_lie_beside_the_page() {
        let details = |path: &str| beside(Path::new(path), "-DETAILS");
        assert_eq!(details("docs/R.md"), Path::new("docs/R-DETAILS.md"));
        assert_eq!(details("R"), Path::new("R-DETAILS"));
    }

    #[test]
    fn bands_that_do_not_read_are_refused_and_none_are_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bands.toml");
        assert_eq!(known_bands(&path).unwrap(), Bands::default());
        fs::write(&path, "[\"tavo.npb\".cg]\nours = 4.0\n").unwrap();
        let said = known_bands(&path).unwrap_err().to_string();
        assert!(said.contains("bands.toml") && said.contains("low"), "{said}");
    }

    #[test]
    fn long_cells_end_in_an_ellipsis() {
        assert_eq!(cell("short"), "short");
        let long = cell(&"ä".repeat(100));
        assert_eq!(long.chars().count(), CELL_CHARS_MAX);
        assert!(long.ends_with('…'));
    }
}
