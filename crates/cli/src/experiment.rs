//! `homenode experiment`: an experiment that a file describes, on the twin.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::Context;
use homenode_reproduce::vary::Change;
use homenode_reproduce::{Design, Made, Row, experiment, experiment_to_json};
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, DoubleType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::Value;

use crate::bad_input;
use crate::options::ShownArgs;
use crate::output::{csv_cell, print, print_json, table};
use crate::reproduce::{RunsArgs, Terminal, write_figures};

/// Options of `experiment`.
#[derive(Debug, clap::Args)]
pub struct ExperimentArgs {
    /// The experiment: docs/EXPERIMENTS.md explains the format, data/experiments has many
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Make it once more for each factor of an input: `machine.controllers=0.5,2`. May be given several times
    #[arg(long, value_name = "INPUT=FACTOR,...", value_parser = changes)]
    pub vary: Vec<Changes>,
    /// Print a row for each VM of each run, with all that was counted, instead of results
    #[arg(long, conflicts_with = "json")]
    pub csv: bool,
    /// Write those rows as Parquet
    #[arg(long, value_name = "FILE")]
    pub parquet: Option<PathBuf>,
    /// Draw its figures as SVG and PNG in this directory
    #[arg(long, value_name = "DIR")]
    pub figures: Option<PathBuf>,
    #[command(flatten)]
    pub runs: RunsArgs,
    #[command(flatten)]
    pub shown: ShownArgs,
}

/// One input and its factors.
#[derive(Clone, Debug)]
pub struct Changes(Vec<Change>);

fn changes(text: &str) -> Result<Changes, String> {
    let (input, factors) = text
        .split_once('=')
        .ok_or("write the input, `=` and factors: `machine.controllers=0.5,2`")?;
    let change = |factor: &str| {
        let factor: f64 = factor
            .trim()
            .parse()
            .map_err(|_| format!("`{factor}` is no number"))?;
        Change::parse(input.trim(), factor)
    };
    factors
        .split(',')
        .map(change)
        .collect::<Result<_, _>>()
        .map(Changes)
}

/// Makes the experiment and shows what came of it. Whatever that is, it has then succeeded.
///
/// # Errors
/// A file that is no experiment; a run that cannot be made; files that cannot be written.
pub fn run(args: &ExperimentArgs) -> anyhow::Result<()> {
    let design = Design::open(&args.file).map_err(bad_input)?;
    if let Some(directory) = &args.figures {
        fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
    }
    let changes: Vec<Change> = args.vary.iter().flat_map(|changes| changes.0.clone()).collect();
    let watch = Terminal::default();
    let cache = args.runs.cache(&watch);
    let made = experiment(&design, &changes, args.runs.jobs(), cache.as_ref(), &watch);
    watch.erase();
    let made = made.map_err(|error| anyhow::anyhow!("{}: {error}", args.file.display()))?;
    if let Some(directory) = &args.figures {
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
        csv(&columns, &rows)
    } else {
        picture(&design, &made)
    };
    print(format_args!("{text}"));
    Ok(())
}

/// What changed, in words.
fn name(made: &Made) -> String {
    made.change
        .map_or("as it is".to_owned(), |change| change.to_string())
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

/// Columns in the order in which rows have them, and rows with a cell for each.
fn rows(made: &[Made]) -> (Vec<String>, Vec<Vec<Option<Value>>>) {
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
            .map(|(_, value)| value.clone())
    };
    let rows = all().map(|(made, row)| {
        let vary = made.change.map(|change| Value::String(change.to_string()));
        let rest = columns.iter().skip(1).map(|column| cell(row, column));
        std::iter::once(vary).chain(rest).collect()
    });
    let rows = rows.collect();
    (columns, rows)
}

fn csv(columns: &[String], rows: &[Vec<Option<Value>>]) -> String {
    let head: Vec<String> = columns
        .iter()
        .map(|column| csv_cell(&Value::String(column.clone())))
        .collect();
    let cell = |value: &Option<Value>| value.as_ref().map_or_else(String::new, csv_cell);
    let lines = rows
        .iter()
        .map(|row| row.iter().map(cell).collect::<Vec<String>>().join(","));
    std::iter::once(head.join(","))
        .chain(lines)
        .map(|line| line + "\n")
        .collect()
}

/// A column of numbers where every cell is one, else of words; cells that are missing are null.
fn write_parquet(path: &Path, columns: &[String], rows: &[Vec<Option<Value>>]) -> anyhow::Result<()> {
    let column = |at: usize| rows.iter().map(move |row| row[at].as_ref());
    let is_number = |at: usize| column(at).flatten().all(Value::is_number);
    let fields = columns.iter().enumerate().map(|(at, name)| {
        let name: String = name
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
            .collect();
        match is_number(at) {
            true => format!("optional double {name};"),
            false => format!("optional binary {name} (utf8);"),
        }
    });
    let schema = parse_message_type(&format!("message runs {{ {} }}", fields.collect::<String>()))?;
    let compressed = Compression::ZSTD(Default::default());
    let properties = WriterProperties::builder().set_compression(compressed).build();
    let mut writer = SerializedFileWriter::new(File::create(path)?, schema.into(), properties.into())?;
    let mut group = writer.next_row_group()?;
    for at in 0..columns.len() {
        let levels: Vec<i16> = column(at).map(|cell| i16::from(cell.is_some())).collect();
        let Some(mut to) = group.next_column()? else { break };
        if is_number(at) {
            let numbers: Vec<f64> = column(at).flatten().filter_map(Value::as_f64).collect();
            to.typed::<DoubleType>()
                .write_batch(&numbers, Some(&levels), None)?;
        } else {
            let words = column(at)
                .flatten()
                .map(|cell| cell.as_str().map_or_else(|| cell.to_string(), str::to_owned));
            let words: Vec<ByteArray> = words.map(|word| ByteArray::from(word.into_bytes())).collect();
            to.typed::<ByteArrayType>()
                .write_batch(&words, Some(&levels), None)?;
        }
        to.close()?;
    }
    group.close()?;
    writer.close()?;
    Ok(())
}
