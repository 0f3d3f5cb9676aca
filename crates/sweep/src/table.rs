//! Results of a sweep: for each point, policy, object and metric the mean over seeds and its confidence interval.

use homenode_table::{Column, Kind, Parquet};
use homenode_units::stats::Estimate;
use serde_json::{Value, json};

use crate::metrics::{Metric, Of, metrics};
use crate::{COMMIT, Plan, Rows, SweepError};

/// Typed columns and rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Names and kinds of the columns.
    pub columns: Vec<Column>,
    /// A value for each column.
    pub rows: Vec<Vec<Value>>,
    /// The plan's digest.
    digest: String,
}

fn object(of: &Of) -> [Value; 2] {
    match of {
        Of::Vm(name) => [json!(name), Value::Null],
        Of::Node(node) => [Value::Null, json!(node)],
        Of::Host => [Value::Null, Value::Null],
    }
}

impl Table {
    /// Returns the means over seeds. The columns are the keys that are set, `policy`, `vm`, `node`, `metric`, `count` of
    /// values, `missing` values, `mean`, `ci95_low`, `ci95_high` and `stddev`. Sizes are in bytes, times in seconds.
    ///
    /// # Errors
    /// If the rows do not cover the plan.
    pub fn means(plan: &Plan, rows: &[Rows]) -> Result<Table, SweepError> {
        let mut rest = vec![Column::new("metric", Kind::Text)];
        rest.extend(["count", "missing"].map(|name| Column::new(name, Kind::Whole)));
        rest.extend(["mean", "ci95_low", "ci95_high", "stddev"].map(|name| Column::new(name, Kind::Figure)));
        let runs = whole(plan, rows)?;
        let chosen = Chosen::of(plan, &runs);
        let mut table = Table::new(plan, &[], rest)?;
        for (at, runs) in runs.chunks(plan.seeds.len()).enumerate() {
            let begin = table.labels(plan, at * plan.seeds.len());
            for (place, of) in runs.first().into_iter().flat_map(|run| run.iter().enumerate()) {
                for metric in chosen.of_object(&of.of) {
                    let values = runs
                        .iter()
                        .map(|run| run.get(place).and_then(|of| metric.find(of)).flatten());
                    let values: Vec<f64> = values.flatten().collect();
                    let estimate = Estimate::of(&values);
                    let end = |sign: f64| {
                        estimate
                            .mean
                            .zip(estimate.half)
                            .map(|(mean, half)| mean + sign * half)
                    };
                    let mut row = begin.clone();
                    row.extend(object(&of.of));
                    row.extend([
                        json!(metric.name),
                        json!(values.len()),
                        json!(runs.len() - values.len()),
                    ]);
                    row.extend(
                        [estimate.mean, end(-1.0), end(1.0), estimate.stddev].map(|figure| json!(figure)),
                    );
                    table.rows.push(row);
                }
            }
        }
        Ok(table)
    }

    /// Returns every run: columns are the keys that are set, `policy`, `seed`, `vm`, `node`, `metric` and `value`.
    ///
    /// # Errors
    /// If the rows do not cover the plan.
    pub fn runs(plan: &Plan, rows: &[Rows]) -> Result<Table, SweepError> {
        let seed = [Column::new("seed", Kind::Whole)];
        let rest = vec![
            Column::new("metric", Kind::Text),
            Column::new("value", Kind::Figure),
        ];
        let runs = whole(plan, rows)?;
        let chosen = Chosen::of(plan, &runs);
        let mut table = Table::new(plan, &seed, rest)?;
        for (at, run) in runs.iter().enumerate() {
            let mut begin = table.labels(plan, at);
            begin.push(json!(plan.seeds[plan.place(at).seed]));
            for of in *run {
                for metric in chosen.of_object(&of.of) {
                    let mut row = begin.clone();
                    row.extend(object(&of.of));
                    row.extend([json!(metric.name), json!(metric.find(of).flatten())]);
                    table.rows.push(row);
                }
            }
        }
        Ok(table)
    }

    fn new(plan: &Plan, more: &[Column], rest: Vec<Column>) -> Result<Table, SweepError> {
        let keys = plan.axes.iter().map(|axis| {
            let is_number = axis.values.iter().all(|value| value.number.is_some());
            Column::new(&axis.key, if is_number { Kind::Figure } else { Kind::Text })
        });
        let mut columns: Vec<Column> = keys.collect();
        columns.push(Column::new("policy", Kind::Text));
        columns.extend_from_slice(more);
        columns.push(Column::new("vm", Kind::Text));
        columns.push(Column::new("node", Kind::Whole));
        columns.extend(rest);
        Ok(Table {
            columns,
            rows: Vec::new(),
            digest: plan.digest()?,
        })
    }

    /// Returns the first cells of a run's rows: the values of its point, and its policy.
    fn labels(&self, plan: &Plan, run: usize) -> Vec<Value> {
        let place = plan.place(run);
        let values = plan.values(place.point);
        let value = |(value, column): (&&crate::values::Setting, &Column)| match column.kind {
            Kind::Figure => json!(value.number),
            _ => json!(value.text()),
        };
        let mut row: Vec<Value> = values.iter().zip(&self.columns).map(value).collect();
        row.push(json!(plan.policies[place.policy].name()));
        row
    }

    /// Returns the digest that identifies the plan.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Returns the table as CSV.
    pub fn csv(&self) -> String {
        homenode_table::csv(&self.columns, &self.rows)
    }

    /// Returns the table as Parquet, with the plan's digest, version and commit, but no timestamp.
    ///
    /// # Errors
    /// [`SweepError::Failed`] if the library fails.
    pub fn parquet(&self) -> Result<Vec<u8>, SweepError> {
        let failed = |error: homenode_table::ParquetError| SweepError::Failed(error.to_string());
        let about = [
            ("homenode.plan", self.digest.clone()),
            ("homenode.version", env!("CARGO_PKG_VERSION").to_owned()),
            ("homenode.commit", COMMIT.to_owned()),
        ];
        let mut file = Vec::new();
        let mut parquet = Parquet::new(&mut file, "sweep", &self.columns, &about).map_err(failed)?;
        for row in &self.rows {
            parquet.row(row).map_err(failed)?;
        }
        parquet.finish().map_err(failed)?;
        Ok(file)
    }
}

type Run<'a> = &'a [crate::metrics::Figures];

/// Returns all runs in order, and checks that each is there once.
fn whole<'a>(plan: &Plan, rows: &'a [Rows]) -> Result<Vec<Run<'a>>, SweepError> {
    let mut sorted: Vec<&Rows> = rows.iter().collect();
    sorted.sort_by_key(|rows| rows.first);
    let mut runs: Vec<Run<'a>> = Vec::new();
    for rows in sorted {
        if rows.first != runs.len() {
            break;
        }
        runs.extend(rows.runs.iter().map(Vec::as_slice));
    }
    match runs.len() == plan.runs() {
        true => Ok(runs),
        false => Err(SweepError::Failed(format!(
            "rows do not match the plan: run {} is missing or duplicate",
            runs.len()
        ))),
    }
}

/// The metrics in the table: those requested, or else, for each VM, the one with which `sim` compares it.
struct Chosen {
    asked: Vec<&'static Metric>,
    /// VMs with a program that did not end in some run.
    endless: Vec<String>,
    /// VMs that did nothing in any run.
    idle: Vec<String>,
}

impl Chosen {
    fn of(plan: &Plan, runs: &[Run<'_>]) -> Chosen {
        let [runtime, speed, ..] = metrics() else {
            unreachable!("there are two and more")
        };
        let mut names: Vec<&String> = Vec::new();
        let (mut endless, mut idle) = (Vec::new(), Vec::new());
        if plan.metrics.is_empty() {
            let vms = || runs.iter().flat_map(|run| run.iter());
            for of in vms() {
                if let Of::Vm(name) = &of.of
                    && !names.contains(&name)
                {
                    names.push(name);
                }
            }
            for name in names {
                let own = || vms().filter(|of| matches!(&of.of, Of::Vm(other) if other == name));
                if own().any(|of| runtime.find(of).flatten().is_none()) {
                    endless.push(name.clone());
                }
                if own().all(|of| speed.find(of).flatten().is_none() && runtime.find(of).flatten().is_none())
                {
                    idle.push(name.clone());
                }
            }
        }
        Chosen {
            asked: plan.metrics.clone(),
            endless,
            idle,
        }
    }

    fn of_object(&self, of: &Of) -> Vec<&'static Metric> {
        if !self.asked.is_empty() {
            let fits = |metric: &&&'static Metric| metric.fits(of);
            return self.asked.iter().filter(fits).copied().collect();
        }
        match of {
            Of::Vm(name) if !self.idle.contains(name) => {
                vec![&metrics()[usize::from(self.endless.contains(name))]]
            }
            _ => Vec::new(),
        }
    }
}
