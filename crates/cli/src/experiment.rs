//! `homenode experiment`: runs an experiment that a file describes, on the simulated host.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use homenode_reproduce::jobs::Progress;
use homenode_reproduce::vary::End;
use homenode_reproduce::{Design, Made, Row, experiment, experiment_to_json};
use homenode_table::{Column, Kind, Parquet, csv};
use serde_json::Value;

use crate::bad_input;
use crate::options::{OutDir, OutFile, ShownArgs};
use crate::print::{print, print_json, table};
use crate::reproduce::{RunsArgs, write_figures};

/// Options of `experiment`.
#[derive(Debug, clap::Args)]
pub(crate) struct ExperimentArgs {
    /// The experiment's file (docs/EXPERIMENTS.md explains the format, data/experiments has examples)
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Repeat the experiment with an input (`machine.controllers=0.5,2`) or a value in the file (`values.exit_ns=0.5,2`)
    /// multiplied by each factor. May be given several times
    #[arg(long, value_name = "INPUT=FACTOR,...", value_parser = changes)]
    pub vary: Vec<Changes>,
    /// Print CSV instead of results: a row for each VM of each run, with all of its counters
    #[arg(long, conflicts_with = "json")]
    pub csv: bool,
    /// Write the rows that `--csv` prints as Parquet
    #[arg(long, value_name = "FILE")]
    pub parquet: Option<OutFile>,
    /// Draw the experiment's figures as SVG and PNG in this directory
    #[arg(long, value_name = "DIR")]
    pub figures: Option<OutDir>,
    #[command(flatten)]
    pub runs: RunsArgs,
    #[command(flatten)]
    pub shown: ShownArgs,
}

/// An input and its factors.
#[derive(Clone, Debug)]
pub(crate) struct Changes(Vec<End>);

fn changes(text: &str) -> anyhow::Result<Changes> {
    let (input, factors) = text
        .split_once('=')
        .context("write the input, `=` and factors: `machine.controllers=0.5,2`")?;
    let change = |factor: &str| {
        let number = factor.trim().parse();
        let number = number.map_err(|_| anyhow!("`{factor}` is not a number"))?;
        End::parse(input.trim(), number)
    };
    factors
        .split(',')
        .map(change)
        .collect::<Result<_, _>>()
        .map(Changes)
}

/// Runs the experiment and shows its results. It succeeds whatever the results are.
///
/// # Errors
/// A file that is not an experiment; a run that fails; files that cannot be written.
pub(crate) fn run(args: &ExperimentArgs) -> anyhow::Result<()> {
    let design = Design::open(&args.file).map_err(bad_input)?;
    let changes: Vec<End> = args.vary.iter().flat_map(|changes| changes.0.clone()).collect();
    let figures = args.figures.as_ref().map(OutDir::create).transpose()?;
    let progress = Progress::new("");
    let cache = args.runs.cache(&progress);
    let made = experiment(&design, &changes, args.runs.jobs(), cache.as_ref(), &progress);
    drop(progress);
    let made = made.map_err(|error| anyhow::anyhow!("{}: {error}", args.file.display()))?;
    if let Some(directory) = figures {
        let drawn = made.first().map_or(&[][..], |made| &made.decision.figures);
        write_figures(directory, drawn)?;
    }
    let (columns, rows) = rows(&made);
    if let Some(path) = &args.parquet {
        write_parquet(path, &columns, &rows).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if args.shown.json {
        return print_json("experiment", &experiment_to_json(&design, &made));
    }
    let text = if args.csv {
        let columns: Vec<Column> = columns.iter().map(|name| Column::new(name, Kind::Text)).collect();
        csv(&columns, &rows)
    } else {
        picture(&design, &made)
    };
    print(format_args!("{text}"));
    Ok(())
}

/// Describes the changed input in words.
fn name(made: &Made) -> String {
    let change = made.change.as_ref();
    change.map_or("as it is".to_owned(), End::to_string)
}

fn picture(design: &Design, made: &[Made]) -> String {
    let mut text = format!("{}\n", design.title());
    let Some(first) = made.first() else { return text };
    let names = || made.iter().map(name);
    let numbers = first.decision.measured.numbers.keys().map(|result| {
        let of = |made: &Made| made.decision.measured.numbers.get(result).copied();
        let cells = made
            .iter()
            .map(|made| of(made).map_or("-".to_owned(), homenode_reproduce::verdict::show));
        std::iter::once(result.clone()).chain(cells).collect()
    });
    let header: Vec<String> = std::iter::once("result".to_owned()).chain(names()).collect();
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    if !first.decision.measured.numbers.is_empty() {
        text += &format!("\n{}\n", table(&header, numbers));
    }
    for made in made {
        let title = if made.change.is_some() {
            format!("\n{}\n", name(made))
        } else {
            String::new()
        };
        text += &title;
        let tests = made.decision.measured.shapes.iter().map(|test| {
            let passed = if test.holds { "yes" } else { "no" };
            vec![test.name.clone(), test.ours.clone(), passed.to_owned()]
        });
        if !made.decision.measured.shapes.is_empty() {
            text += &format!("\n{}\n", table(&["test", "what came out", "passed"], tests));
        }
        for homenode_reproduce::Table { title, header, rows } in &made.decision.tables {
            let header: Vec<&str> = header.iter().map(String::as_str).collect();
            text += &format!("\n{title}\n{}\n", table(&header, rows.iter().cloned()));
        }
    }
    if let Some(one) = &first.reproduced {
        text += &format!("\n{}: {}\n", one.claim.id, one.judgement.verdict.name());
    }
    text
}

/// Returns the names of all columns, and all rows with a cell for each column.
fn rows(made: &[Made]) -> (Vec<String>, Vec<Vec<Value>>) {
    let mut columns = vec!["vary".to_owned()];
    let all = || {
        made.iter()
            .flat_map(|made| made.rows.iter().map(move |row| (made, row)))
    };
    for (column, _) in all().flat_map(|(_, row)| row) {
        if !columns.contains(column) {
            columns.push(column.clone());
        }
    }
    let cell = |row: &Row, column: &String| {
        row.iter()
            .find(|(own, _)| own == column)
            .map_or(Value::Null, |(_, value)| value.clone())
    };
    let rows = all().map(|(made, row)| {
        let change = made.change.as_ref();
        let vary = change.map_or(Value::Null, |change| change.to_string().into());
        let rest = columns.iter().skip(1).map(|column| cell(row, column));
        std::iter::once(vary).chain(rest).collect()
    });
    let rows = rows.collect();
    (columns, rows)
}

/// Writes the rows as Parquet. A column has numbers if all of its cells are numbers, else text; missing cells are null.
fn write_parquet(path: &Path, columns: &[String], rows: &[Vec<Value>]) -> anyhow::Result<()> {
    let column = |(at, name): (usize, &String)| {
        let mut cells = rows.iter().map(|row| &row[at]);
        let kind = match cells.all(|cell| cell.is_number() || cell.is_null()) {
            true => Kind::Figure,
            false => Kind::Text,
        };
        let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
        Column::new(name.chars().map(plain).collect::<String>(), kind)
    };
    let columns: Vec<Column> = columns.iter().enumerate().map(column).collect();
    let mut parquet = Parquet::new(File::create(path)?, "runs", &columns, &[])?;
    for row in rows {
        parquet.row(row)?;
    }
    Ok(parquet.finish()?)
}
