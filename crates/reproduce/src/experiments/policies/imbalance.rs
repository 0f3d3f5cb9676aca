//! `policies.imbalance`: how static policies spread the accesses of 29 programs over nodes, and what that puts on links
//! [Policies, table 1]. The table is an input of the profiles, so the claim is calibrated: what is shown is whether
//! profiles and twin together give it back.

use std::collections::{BTreeMap, BTreeSet};

use homenode_twin::workload;
use homenode_units::{MemoryPolicy, Placing};

use super::{System, runs};
use crate::claims::TABLE_1;
use crate::experiment::{Decision, Experiment};
use crate::experiments::table;
use crate::figure::{Figure, PUBLISHED_SERIES, Shape as Drawing};
use crate::verdict::{Measured, Shape, percentage_holds, show};
use crate::work::Outcomes;

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    claim: "policies.imbalance",
    runs: || {
        if !missing().is_empty() {
            return Vec::new();
        }
        runs(System::Linux, &POLICIES)
    },
    decide,
};

const POLICIES: [MemoryPolicy; 2] = [Placing::FirstTouch.alone(), Placing::Round4k.alone()];

/// A row of the published table: imbalance under both policies, then interconnect load under both, percent.
struct Row {
    program: String,
    percent: [f64; 4],
}

const COLUMNS: [&str; 4] = [
    "imbalance, first-touch",
    "imbalance, round-4K",
    "interconnect, first-touch",
    "interconnect, round-4K",
];

fn published() -> Vec<Row> {
    let rows = TABLE_1.lines().filter(|line| !line.starts_with('#')).skip(1);
    rows.map(|line| {
        let mut cells = line.split(',');
        let program = cells.next().unwrap_or_default().to_owned();
        let mut percent = [f64::NAN; 4];
        for (number, cell) in percent.iter_mut().zip(cells) {
            *number = cell.parse().unwrap_or(f64::NAN);
        }
        Row { program, percent }
    })
    .collect()
}

/// Programs without a profile.
fn missing() -> Vec<String> {
    let known: BTreeSet<&str> = workload::names().collect();
    let rows = published().into_iter();
    rows.map(|row| row.program)
        .filter(|program| !known.contains(program.as_str()))
        .collect()
}

fn decide(outcomes: &Outcomes) -> Result<Decision, String> {
    let missing = missing();
    if !missing.is_empty() {
        return Err(format!("there is no profile of {}", missing.join(", ")));
    }
    let rows = published();
    let mut ours: Vec<[f64; 4]> = Vec::new();
    for row in &rows {
        let mut percent = [0.0; 4];
        for (at, policy) in POLICIES.into_iter().enumerate() {
            let outcome = outcomes.of(&System::Linux.run(&row.program, policy))?;
            let window = &outcome.window;
            let measured = window.imbalance_percent.zip(window.interconnect_percent);
            let measured = measured.ok_or_else(|| format!("{} accessed nothing", row.program))?;
            (percent[at], percent[at + 2]) = measured;
        }
        ours.push(percent);
    }
    let (mut shapes, mut tabled) = (Vec::new(), BTreeMap::new());
    for (row, ours) in rows.iter().zip(&ours) {
        for (column, name) in COLUMNS.iter().enumerate() {
            let name = format!("{}: {name}", row.program);
            tabled.insert(name.clone(), (row.percent[column], ours[column]));
            shapes.push(Shape {
                name,
                ours: show(ours[column]),
                holds: percentage_holds(row.percent[column], ours[column]),
            });
        }
    }
    let cells = rows.iter().zip(&ours).map(|(row, ours)| {
        let both = row
            .percent
            .iter()
            .zip(ours)
            .flat_map(|(published, ours)| [*published, *ours]);
        (row.program.clone(), both.collect())
    });
    let header: Vec<String> = ["program".to_owned()]
        .into_iter()
        .chain(
            COLUMNS
                .iter()
                .flat_map(|column| [format!("{column}: published"), "ours".to_owned()]),
        )
        .collect();
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let held = |column: usize| {
        shapes
            .iter()
            .skip(column)
            .step_by(4)
            .filter(|shape| shape.holds)
            .count()
    };
    let held_rows = COLUMNS
        .iter()
        .enumerate()
        .map(|(at, column)| ((*column).to_owned(), vec![held(at) as f64]));
    let tables = vec![
        table("Of 29 programs so many hold.", &["column", "hold"], held_rows),
        table("Percent, published and ours.", &header, cells),
    ];
    let figure = |name: &str, title: &str, columns: [usize; 2]| {
        let series = columns
            .into_iter()
            .zip(["first-touch", "round-4K"])
            .flat_map(|(column, policy)| {
                let own = ours.iter().map(|row| Some(row[column])).collect();
                let theirs = rows.iter().map(|row| Some(row.percent[column])).collect();
                [
                    (policy.to_owned(), own),
                    (format!("{PUBLISHED_SERIES}: {policy}"), theirs),
                ]
            });
        Figure {
            name: name.to_owned(),
            title: title.to_owned(),
            x_label: "program".to_owned(),
            y_label: "percent".to_owned(),
            shape: Drawing::Bars(
                rows.iter().map(|row| row.program.clone()).collect(),
                series.collect(),
            ),
        }
    };
    Ok(Decision {
        figures: vec![
            figure(
                "policies-imbalance",
                "Imbalance of accesses over nodes [Policies, table 1]",
                [0, 1],
            ),
            figure(
                "policies-interconnect",
                "Load of the busiest link [Policies, table 1]",
                [2, 3],
            ),
        ],
        measured: Measured {
            shapes,
            tabled,
            ..Measured::default()
        },
        set_up: vec![SET_UP.to_owned()],
        tables,
        why: vec![WHY.to_owned()],
        ..Decision::default()
    })
}

const SET_UP: &str = "Machine amd48 without a hypervisor, 48 threads, each on a CPU of its own, first-touch and round-4K. After 8 seconds, \
     in which programs set up their memory, 4 are counted. Accesses of a node are those of all threads; the interconnect's load is \
     that of the busiest directed link.";

const WHY: &str = "A profile has one rate of memory accesses, and the table two link loads that both depend on it. For dc.B, ep.D, ft.C, \
     psearchy, streamcluster and the X-Stream programs no rate gives both, and the head of each profile says what it reached. \
     psearchy's imbalance under first-touch is lower than published because its controllers are nearly full: threads near the \
     busiest slow down. Before threads were pinned, as the paper's are (section 5.5), ua.C missed too: its sleepers were woken on \
     other nodes.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_table_has_29_complete_rows() {
        let rows = published();
        assert_eq!(rows.len(), 29);
        assert!(
            rows.iter()
                .all(|row| row.percent.iter().all(|percent| (0.0..=264.6).contains(percent)))
        );
        assert_eq!(rows[0].percent, [135.0, 48.0, 9.0, 8.0]);
    }
}
