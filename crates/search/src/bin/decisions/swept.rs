//! `decisions sweep` and `decisions lone`.

use anyhow::bail;
use clap::Args;
use homenode_machine::Machine;
use homenode_machine_files::preset;
use homenode_search::contender::Contender;
use homenode_search::generate;
use homenode_search::sweep::{self, Cell, Work};
use homenode_units::stats::mean;

use crate::{Common, show};

#[derive(Debug, Args)]
pub(crate) struct Swept {
    /// Programs [default: a few of different kinds, or all for `lone`]
    #[arg(long, value_delimiter = ',')]
    programs: Vec<String>,
    /// Presets [default: all with several nodes]
    #[arg(long, value_delimiter = ',')]
    machines: Vec<String>,
    #[command(flatten)]
    common: Common,
    /// Seconds that the program takes alone; a run ends after five times as long
    #[arg(long, default_value_t = sweep::SOLO_S)]
    solo: f64,
    /// Show only cells in which a policy does less than this share of default's work
    #[arg(long)]
    below: Option<f64>,
}

pub(crate) fn sweep(args: &Swept) -> anyhow::Result<()> {
    print(args, sweep::PROGRAMS.map(str::to_owned).to_vec(), sweep::sweep)
}

pub(crate) fn lone(args: &Swept) -> anyhow::Result<()> {
    print(args, all_programs(), sweep::lone)
}

/// Returns the names of all workloads with a program.
pub(crate) fn all_programs() -> Vec<String> {
    generate::programs()
        .into_iter()
        .map(|(name, _)| name.to_owned())
        .collect()
}

/// Runs the cells, and returns each with its result.
pub(crate) fn run(
    cells: Vec<Cell>,
    contenders: &[Contender],
    seeds: &[u64],
    jobs: usize,
) -> anyhow::Result<Vec<(Cell, Vec<Work>)>> {
    let works = sweep::run_all(&cells, contenders, seeds, jobs)?;
    Ok(cells.into_iter().zip(works).collect())
}

fn print(
    args: &Swept,
    usual: Vec<String>,
    cells: fn(&Machine, &[String], f64) -> Vec<Cell>,
) -> anyhow::Result<()> {
    let programs = if args.programs.is_empty() {
        usual
    } else {
        args.programs.clone()
    };
    let machines = match args.machines.as_slice() {
        [] => generate::machines(),
        named => named.iter().map(|name| preset(name)).collect::<Result<_, _>>()?,
    };
    let of_machine = |machine| cells(machine, &programs, args.solo);
    let mut cells: Vec<Cell> = machines.iter().flat_map(of_machine).collect();
    for cell in &mut cells {
        cell.disturbance = args.common.disturbance();
    }
    if cells.is_empty() {
        bail!("no program fits on any of these machines; name other programs or machines");
    }
    let seeds: Vec<u64> = args.common.seeds.clone().collect();
    let contenders = args.common.contenders();
    let swept = run(cells, &contenders, &seeds, args.common.jobs)?;
    println!("work relative to default, mean over VMs and seeds (decisions, GiB moved)");
    for (cell, works) in &swept {
        if args
            .below
            .is_none_or(|below| works.iter().any(|work| work.of_default < below))
        {
            print_cell(cell, works);
        }
    }
    for (at, contender) in contenders.iter().enumerate() {
        let works = || swept.iter().map(|(_, works)| works[at].of_default);
        println!(
            "{}: mean {}, least {}, under .98 in {} of {}",
            contender.name(),
            show(mean(works())),
            show(works().reduce(f64::min)),
            works().filter(|work| *work < 0.98).count(),
            swept.len()
        );
    }
    Ok(())
}

fn print_cell(cell: &Cell, works: &[Work]) {
    let word = |work: &Work| {
        let (name, score) = (work.contender.name(), &work.score);
        format!(
            "{name} {:.3} ({:.0}, {:.1})",
            work.of_default, score.decisions, score.moved_gib
        )
    };
    let words: Vec<String> = works.iter().map(word).collect();
    let base_s = works.first().and_then(|work| work.score.vms.first()?.base_s);
    println!(
        "{:11} {:15} {:2} VMs of {} vCPUs, default {} s  {}",
        cell.machine.name,
        cell.program,
        cell.vms,
        cell.vcpus,
        base_s.map_or_else(|| "-".to_owned(), |s| format!("{s:.0}")),
        words.join("  ")
    );
}
