//! Formats scores as a document and a figure: the scoreboard of decisions. Computes no scores itself.

mod lists;

use std::fmt::Write as _;

use homenode_reproduce::{Figure, Shape};
use homenode_units::stats::mean;
use homenode_units::with_reading_time;

use crate::held_out::HeldOut;
use crate::known::Known;
use crate::score::{CaseScore, MUCH_WORSE, SLOWED, Total};
use crate::sweep::{Cell, Work};

/// The set of policies whose gap to the best known result is shown, and whose slowed VMs are listed.
const OURS: &str = "homenode";
/// Cells of a sweep that do less than this share of `default`'s work are listed.
const WORK_MIN: f64 = 0.98;
/// Maximum number of cells that are listed, the worst first.
const NAMED_MAX: usize = 20;
/// Rows of the load sweep are shown if a cell differs from 1 by more than this.
const WORK_SHOWN: f64 = 0.02;

/// Everything that the document shows.
pub struct Board {
    /// Seeds of all runs.
    pub seeds: Vec<u64>,
    /// Scores of each set of policies, with its name; the scores are in the order of the cases.
    pub policies: Vec<(String, Vec<CaseScore>)>,
    /// The best known decisions, in the order of the cases.
    pub known: Vec<Known>,
    /// The load sweep.
    pub sweep: Vec<(Cell, Vec<Work>)>,
    /// The cells with a single VM.
    pub lone: Vec<(Cell, Vec<Work>)>,
    /// Results of all cases on simulated hosts with wrong parameters.
    pub disturbed: Vec<Disturbed>,
    /// Results of held-out runs.
    pub held_out: HeldOut,
}

/// Results of all cases, and of the load sweep, on simulated hosts that are wrong in one way.
pub struct Disturbed {
    /// Name of the disturbance.
    pub name: &'static str,
    /// Description of the disturbance.
    pub about: String,
    /// The product's score relative to `default` on the same simulated hosts.
    pub ours: Total,
    /// The score, on these simulated hosts, of the decisions that are best on the undisturbed host.
    pub best: Total,
    /// The load sweep on these simulated hosts.
    pub sweep: Vec<(Cell, Vec<Work>)>,
}

fn figure(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"))
}

impl Board {
    /// Returns the document.
    pub fn text(&self) -> String {
        let mut out = String::new();
        self.head(&mut out);
        self.totals(&mut out);
        self.cases(&mut out);
        self.slowed(&mut out);
        self.sweeps(&mut out);
        self.lone(&mut out);
        self.disturbed(&mut out);
        lists::benchmarks(&mut out, &self.held_out);
        lists::operations(&mut out, &self.held_out);
        with_reading_time(&out)
    }

    fn head(&self, out: &mut String) {
        let seeds: Vec<String> = self.seeds.iter().map(u64::to_string).collect();
        // Writing to a String cannot fail, here and below.
        let _ = write!(
            out,
            "# How good decisions are

*For researchers and operators who ask what the agent gains.*

This page shows how much faster VMs become, which VMs become slower, and how far the decisions are from the best known. All
figures are of the twin; [VALIDATION.md](VALIDATION.md) says how far to trust it. They say nothing about a real host or about
cases unlike these. Written by `cargo xtask decisions`; do not edit. Seeds {}.

Each case runs with the same VMs, programs, arrivals and seed under `default`, which is the kernel's scheduler without NUMA
balancing, and under each contender:

- `ff-pin`: first fit, with a CPU for each vCPU
- `autonuma`: the kernel's own balancing, without an agent
- `numad`: the algorithm of that program
- `tavo`: the algorithm of [TAVO] as published
- `homenode`: the product

The words in the tables:

- *Ratio*: the time that a VM's programs took over their time under `default`; below 1 is faster. If a program did not end in
  both runs, it is the ratio of seconds per instruction.
- *Mean*: the mean ratio over a case's VMs, then over seeds, then over cases.
- *Slowed*: said of a VM whose mean time over seeds is over {SLOWED} times its time under `default`.
- *Best known*: the best of all contenders and of a search (`homenode search`) that tries schedules on copies of the twin,
  within the agent's budgets. The search knows the future of its seed, which no policy does, so part of the gap cannot be
  closed. More searching can only widen it.

A good policy has a low mean and slows no VM: an operator who sees one VM twice as slow switches it off.
",
            seeds.join(", ")
        );
    }

    fn totals(&self, out: &mut String) {
        out.push_str(
            "
## All cases

| policies | mean | worst VM | worst run | VMs slowed | runs over 1.10 | decisions per run | GiB moved per run |
|---|---|---|---|---|---|---|---|
| default | 1.000 | 1.000 | 1.000 | 0 | 0 | 0 | 0 |
",
        );
        for (name, scores) in &self.policies {
            let total = Total::of(scores);
            let _ = writeln!(
                out,
                "| {name} | {} | {} | {} | {} of {} | {} of {} | {:.0} | {:.1} |",
                figure(total.mean),
                figure(total.worst_vm),
                figure(total.worst_run),
                total.slowed.0,
                total.slowed.1,
                total.much_worse.0,
                total.much_worse.1,
                total.decisions,
                total.moved_gib
            );
        }
        self.total_of_best(out);
        let gaps: Vec<f64> = (0..self.known.len())
            .filter_map(|case| self.gap(OURS, case))
            .collect();
        let largest = gaps.iter().copied().reduce(f64::max);
        let percent =
            |gap: Option<f64>| gap.map_or_else(|| "-".to_owned(), |gap| format!("{:.1}", gap * 100.0));
        let _ = writeln!(
            out,
            "\nGap of {OURS} to the best known, over the seeds that were searched: {} percent on average over {} cases, {}\n\
             in the case where it is largest.",
            percent(mean(gaps.iter().copied())),
            gaps.len(),
            percent(largest)
        );
        self.better(out);
    }

    /// Names the contenders whose mean is below the product's.
    fn better(&self, out: &mut String) {
        let means = || {
            let policies = self.policies.iter();
            policies.filter_map(|(name, scores)| Some((name.as_str(), Total::of(scores).mean?)))
        };
        let Some((_, ours)) = means().find(|(name, _)| *name == OURS) else {
            return;
        };
        let better: Vec<&str> = means()
            .filter(|(_, mean)| *mean < ours)
            .map(|(name, _)| name)
            .collect();
        if !better.is_empty() {
            let _ = writeln!(
                out,
                "Contenders with a lower mean than {OURS}: {}.",
                better.join(", ")
            );
        }
    }

    /// Writes the row of the best known decisions if every case was searched. Its mean covers only the searched seeds.
    fn total_of_best(&self, out: &mut String) {
        let best: Option<Vec<f64>> = self.known.iter().map(|known| self.best(known)).collect();
        let Some(best) = best else {
            out.push_str("| best known | - | | | | | | |\n");
            return;
        };
        let of_seeds = |known: &Known| -> Vec<Vec<f64>> {
            let seeds = self.seeds.iter().filter_map(|seed| known.of_seed(*seed));
            seeds.map(|of_seed| of_seed.vms.clone()).collect()
        };
        let (mut vms, mut runs): (Vec<f64>, Vec<f64>) = (Vec::new(), Vec::new());
        for seeds in self.known.iter().map(of_seeds) {
            for at in 0..seeds.first().map_or(0, Vec::len) {
                let ratios = seeds.iter().map(|vms| vms[at]).filter(|ratio| *ratio > 0.0);
                vms.extend(mean(ratios.clone()));
                runs.extend(ratios);
            }
        }
        let over = |ratios: &[f64], bound: f64| {
            let count = ratios.iter().filter(|ratio| **ratio > bound).count();
            format!("{count} of {}", ratios.len())
        };
        let worst = |ratios: &[f64]| figure(ratios.iter().copied().reduce(f64::max));
        let _ = writeln!(
            out,
            "| best known | {} | {} | {} | {} | {} | | |",
            figure(mean(best)),
            worst(&vms),
            worst(&runs),
            over(&vms, SLOWED),
            over(&runs, MUCH_WORSE)
        );
    }

    /// Returns the mean ratio of the best known decisions over those of the board's seeds that were searched.
    fn best(&self, known: &Known) -> Option<f64> {
        let of_seeds = self.seeds.iter().filter_map(|seed| known.of_seed(*seed));
        mean(of_seeds.map(|of_seed| of_seed.mean))
    }

    /// Returns by how much the policies' mean exceeds the best known one in a case, over the searched seeds.
    fn gap(&self, name: &str, case: usize) -> Option<f64> {
        let (_, scores) = self.policies.iter().find(|(of, _)| *of == name)?;
        let (score, known) = (scores.get(case)?, self.known.get(case)?);
        let gaps = self.seeds.iter().zip(&score.ratios).filter_map(|(seed, vms)| {
            let ours = mean(vms.iter().flatten().copied())?;
            Some(ours / known.of_seed(*seed)?.mean - 1.0)
        });
        mean(gaps)
    }

    fn cases(&self, out: &mut String) {
        let names: Vec<&str> = self.policies.iter().map(|(name, _)| name.as_str()).collect();
        let _ = write!(
            out,
            "
## Case by case

Cells show mean / worst VM. The cases are in `data/decisions/cases`. The best known decisions are in `data/decisions/known`,
which no policy may read (a house rule).

| case | {} | best known | evaluations | gap of {OURS} |
|---|{}---|---|---|
",
            names.join(" | "),
            "---|".repeat(names.len())
        );
        for (case, known) in self.known.iter().enumerate() {
            let of_policies = self.policies.iter().filter_map(|(_, scores)| scores.get(case));
            let cells: Vec<String> = of_policies
                .map(|score| format!("{} / {}", figure(score.mean()), figure(score.worst_vm())))
                .collect();
            let evaluations: usize = known.seeds.iter().map(|of_seed| of_seed.evaluations).sum();
            let gap = self.gap(OURS, case);
            let _ = writeln!(
                out,
                "| {} | {} | {} | {evaluations} for {} seeds | {} |",
                known.case,
                cells.join(" | "),
                figure(self.best(known)),
                known.seeds.len(),
                gap.map_or_else(|| "-".to_owned(), |gap| format!("{:.1} %", gap * 100.0))
            );
        }
    }

    fn slowed(&self, out: &mut String) {
        for (name, scores) in self.policies.iter().filter(|(name, _)| *name == OURS) {
            let slowed: Vec<String> = scores
                .iter()
                .flat_map(|case| {
                    case.slowed()
                        .map(|vm| format!("{} in {} {}", vm.name, case.case, figure(vm.ratio)))
                })
                .collect();
            let list = if slowed.is_empty() {
                "none".to_owned()
            } else {
                slowed.join(", ")
            };
            let _ = writeln!(out, "\nVMs slowed by {name}: {list}.");
        }
    }

    fn sweeps(&self, out: &mut String) {
        let counts = self.counts();
        let heads: Vec<String> = counts.iter().map(usize::to_string).collect();
        let _ = write!(
            out,
            "
## One program, from one VM to a full host

VMs of 4 vCPUs that all run the same program, on each preset with several nodes. *Work* relative to `default` is the mean over
VMs of default's time over theirs; above 1 is more.

![Work beside default by number of VMs](load-sweep.svg)

Work under `{OURS}` by number of VMs, without rows in which every cell is within {WORK_SHOWN} of 1:

| machine | program | {} |
|---|---|{}
",
            heads.join(" | "),
            "---|".repeat(counts.len())
        );
        let mut rows: Vec<(&str, &str)> = Vec::new();
        for (cell, _) in &self.sweep {
            let row = (cell.machine.name.as_str(), cell.program.as_str());
            if !rows.contains(&row) {
                rows.push(row);
            }
        }
        for (machine, program) in rows {
            let at = |count: &usize| {
                let is_it = |cell: &Cell| {
                    cell.machine.name == machine && cell.program == program && cell.vms == *count
                };
                let (_, works) = self.sweep.iter().find(|(cell, _)| is_it(cell))?;
                work_of(works, OURS)
            };
            let works: Vec<Option<f64>> = counts.iter().map(at).collect();
            if !is_shown(&works) {
                continue;
            }
            let cells: Vec<String> = works
                .iter()
                .map(|work| work.map_or_else(String::new, |work| format!("{work:.3}")))
                .collect();
            let _ = writeln!(out, "| {machine} | {program} | {} |", cells.join(" | "));
        }
        out.push_str("\nOver all cells:\n\n");
        for name in self.swept() {
            let _ = writeln!(out, "- {}", summary(name, &self.sweep));
        }
    }

    fn counts(&self) -> Vec<usize> {
        let mut counts: Vec<usize> = self.sweep.iter().map(|(cell, _)| cell.vms).collect();
        counts.sort_unstable();
        counts.dedup();
        counts
    }

    fn swept(&self) -> Vec<&str> {
        let works = self.sweep.first().map_or(&[][..], |(_, works)| works);
        works.iter().map(|work| work.contender.name()).collect()
    }

    fn lone(&self, out: &mut String) {
        let Some((_, works)) = self.lone.first() else {
            return;
        };
        out.push_str(
            "\n## One VM alone\n\nAny workload in a VM of 4 or 8 vCPUs, alone on each of these presets.\n\n",
        );
        for name in works.iter().map(|work| work.contender.name()) {
            let _ = writeln!(out, "- {}", summary(name, &self.lone));
            let mut under: Vec<(f64, String)> = self
                .lone
                .iter()
                .filter_map(|(cell, works)| Some((work_of(works, name)?, cell)))
                .filter(|(work, _)| *work < WORK_MIN)
                .map(|(work, cell)| {
                    (
                        work,
                        format!(
                            "{} of {} vCPUs on {} {work:.3}",
                            cell.program, cell.vcpus, cell.machine.name
                        ),
                    )
                })
                .collect();
            under.sort_by(|a, b| a.0.total_cmp(&b.0));
            let named: Vec<String> = under.into_iter().take(NAMED_MAX).map(|(_, text)| text).collect();
            if !named.is_empty() {
                let _ = writeln!(out, "  The worst: {}.", named.join(", "));
            }
        }
    }

    fn disturbed(&self, out: &mut String) {
        let _ = write!(
            out,
            "
## On twins that are wrong

All cases again, and the load sweep with the first seed, on twins that differ from their machine files or from what the agent is
told. `default` runs on the same twin. The best known decisions are those found on the undisturbed twin.

| disturbance | mean | worst VM | VMs slowed | runs over 1.10 | mean of the best known | least work of the sweep | under {WORK_MIN} |
|---|---|---|---|---|---|---|---|
"
        );
        for of in &self.disturbed {
            let works: Vec<f64> = of
                .sweep
                .iter()
                .filter_map(|(_, works)| work_of(works, OURS))
                .collect();
            let _ = writeln!(
                out,
                "| {}: {} | {} | {} | {} of {} | {} of {} | {} | {} | {} of {} |",
                of.name,
                of.about,
                figure(of.ours.mean),
                figure(of.ours.worst_vm),
                of.ours.slowed.0,
                of.ours.slowed.1,
                of.ours.much_worse.0,
                of.ours.much_worse.1,
                figure(of.best.mean),
                figure(works.iter().copied().reduce(f64::min)),
                works.iter().filter(|work| **work < WORK_MIN).count(),
                works.len()
            );
        }
    }

    /// Returns a figure of the work by number of VMs, as the mean over machines and programs.
    pub fn figure(&self) -> Figure {
        let line = |name: &str| {
            let at = |count: &usize| {
                let works = self.sweep.iter().filter(|(cell, _)| cell.vms == *count);
                let work = mean(works.filter_map(|(_, works)| work_of(works, name)))?;
                Some((*count as f64, work.into()))
            };
            (name.to_owned(), self.counts().iter().filter_map(at).collect())
        };
        let counts = self.counts();
        let default = |count: &usize| (*count as f64, 1.0.into());
        let mut lines = vec![("default".to_owned(), counts.iter().map(default).collect())];
        lines.extend(self.swept().into_iter().map(line));
        Figure {
            name: "load-sweep".to_owned(),
            title: "One program, from one VM to a full host".to_owned(),
            x_label: "VMs of 4 vCPUs".to_owned(),
            y_label: "work beside default, mean over machines and programs".to_owned(),
            shape: Shape::Lines(lines),
            marks: Vec::new(),
        }
    }
}

fn work_of(works: &[Work], name: &str) -> Option<f64> {
    works
        .iter()
        .find(|work| work.contender.name() == name)
        .map(|work| work.of_default)
}

/// Returns true if a row of the load sweep has a cell that differs from 1 by more than [`WORK_SHOWN`].
fn is_shown(row: &[Option<f64>]) -> bool {
    row.iter().flatten().any(|work| (work - 1.0).abs() > WORK_SHOWN)
}

fn summary(name: &str, cells: &[(Cell, Vec<Work>)]) -> String {
    let works: Vec<f64> = cells
        .iter()
        .filter_map(|(_, works)| work_of(works, name))
        .collect();
    format!(
        "{name}: mean {}, least {}, under {WORK_MIN} in {} of {}",
        figure(mean(works.iter().copied())),
        figure(works.iter().copied().reduce(f64::min)),
        works.iter().filter(|work| **work < WORK_MIN).count(),
        works.len()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::known::OfSeed;
    use crate::score::VmScore;

    fn score(ratios: [f64; 2]) -> CaseScore {
        let vm = |(at, ratio): (usize, f64)| VmScore {
            name: format!("vm{at}"),
            workload: "cg.B".to_owned(),
            ratio: Some(ratio),
            p99: None,
            base_s: None,
        };
        CaseScore {
            case: "one".to_owned(),
            ratios: vec![ratios.map(Some).to_vec(); 2],
            vms: ratios.into_iter().enumerate().map(vm).collect(),
            decisions: 7.0,
            moved_gib: 0.5,
        }
    }

    #[test]
    fn tables_say_what_was_scored() {
        let known = OfSeed {
            seed: 2,
            mean: 0.8,
            found_by: "search".to_owned(),
            evaluations: 300,
            commit: String::new(),
            vms: vec![0.55, 1.05],
            decisions: Vec::new(),
        };
        let board = Board {
            seeds: vec![1, 2],
            policies: vec![
                ("ff-pin".to_owned(), vec![score([0.9, 1.0])]),
                ("homenode".to_owned(), vec![score([0.6, 1.2])]),
            ],
            known: vec![Known {
                case: "one".to_owned(),
                seeds: vec![known],
            }],
            sweep: Vec::new(),
            lone: Vec::new(),
            disturbed: vec![Disturbed {
                name: "noise",
                about: "10 percent of noise".to_owned(),
                ours: Total::of(&[score([0.8, 1.2])]),
                best: Total::of(&[]),
                sweep: Vec::new(),
            }],
            held_out: HeldOut::default(),
        };
        let text = board.text();
        for line in [
            "| ff-pin | 0.950 | 1.000 | 1.000 | 0 of 2 | 0 of 4 | 7 | 0.5 |",
            "| homenode | 0.900 | 1.200 | 1.200 | 1 of 2 | 2 of 4 | 7 | 0.5 |",
            "| best known | 0.800 | 1.050 | 1.050 | 1 of 2 | 0 of 2 | | |",
            "| one | 0.950 / 1.000 | 0.900 / 1.200 | 0.800 | 300 for 1 seeds | 12.5 % |",
            "VMs slowed by homenode: vm1 in one 1.200.",
            "| noise: 10 percent of noise | 1.000 | 1.200 | 1 of 2 | 2 of 4 | - | - | 0 of 0 |",
        ] {
            assert!(
                text.lines().any(|known| known == line),
                "{line} is not in\n{text}"
            );
        }
        assert!(text.contains("12.5 percent on average over 1 cases, 12.5\nin the case where it is largest"));
        assert!(!text.contains("a lower mean"), "{text}");
    }

    #[test]
    fn rows_of_the_sweep_are_shown_if_work_differs() {
        assert!(!is_shown(&[Some(1.0), Some(1.019), None]));
        assert!(is_shown(&[Some(1.0), None, Some(0.97)]));
    }

    #[test]
    fn without_a_search_there_is_no_gap() {
        let board = Board {
            seeds: vec![1],
            policies: vec![
                ("homenode".to_owned(), vec![score([0.6, 1.2])]),
                ("tavo".to_owned(), vec![score([0.6, 1.0])]),
            ],
            known: vec![Known::default()],
            sweep: Vec::new(),
            lone: Vec::new(),
            disturbed: vec![Disturbed {
                name: "noise",
                about: "10 percent of noise".to_owned(),
                ours: Total::of(&[score([0.8, 1.2])]),
                best: Total::of(&[]),
                sweep: Vec::new(),
            }],
            held_out: HeldOut::default(),
        };
        let text = board.text();
        assert!(text.contains("| best known | - | | | | | | |"), "{text}");
        assert!(text.contains("- percent on average over 0 cases"), "{text}");
        assert!(text.contains("a lower mean than homenode: tavo."), "{text}");
    }
}
