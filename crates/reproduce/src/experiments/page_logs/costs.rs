//! What tracking costs a guest and a migration, from the costs of exits, faults and walks [PRL, sections 1, 3.3 and 3.4].
//!
//! # Costs, fixed before any experiment was run
//!
//! | | | source |
//! |---|---|---|
//! | exit and entry | 735 ns | 2500 cycles, KVM on AMD (facts 4), at 3.4 GHz |
//! | fault on a protected or invalid page | 1805 ns | an exit, and 1.27 us measured natively (facts 4) less 0.2 of exception |
//! | flag set by a walk that would not have been | 380 ns | accessed bits, measured natively (facts 4) |
//! | entry of PML's log, taken in software | 100 ns | estimate: bitmap, and two walks of four levels to change the page's type |
//! | arming a page again | 40 ns | clear_refs, 10.5 ms per GiB, measured natively (facts 4) |
//!
//! # Choices, made before the experiments were run
//!
//! - Flags and rights are armed anew each second, the period that section 1 names; the alternative is mu, 30 s.
//! - A page counts as written in a period if it is written at least once: of `n` pages with `w` writes, `n (1 - exp(-w / n))`.
//!   Writes are the profile's accesses to the last-level cache times its write share, at its solo speed; regions are its regions.
//! - Migration is Xen 4.7's: all memory, then what was written meanwhile, at most five rounds, 50 pages end it; a network of
//!   1 Gbit/s (the alternative: 10). The guest runs throughout, and writes its array in each round if it writes at all.
//! - Checkpointing suspends the guest, arms tracking as migration does, and writes 1 GiB to memory at 1 GB/s.

use homenode_twin::Workload;
use homenode_twin::workload;

use super::model::{ARRAY, EXIT_NS, FRAMES};
use crate::claims::published;
use crate::experiment::{Decision, Experiment, Table};
use crate::experiments::{shape, table};
use crate::figure::{Figure, PUBLISHED_SERIES, Shape as Drawing};
use crate::verdict::{Measured, show};

/// `pml.wss-overhead`.
pub const WSS: Experiment = Experiment {
    claim: "pml.wss-overhead",
    runs: Vec::new,
    decide: |_| wss(),
};
/// `pml.invalidation-overhead`.
pub const INVALIDATION: Experiment = Experiment {
    claim: "pml.invalidation-overhead",
    runs: Vec::new,
    decide: |_| Ok(invalidation()),
};
/// `pml.live-migration`.
pub const MIGRATION: Experiment = Experiment {
    claim: "pml.live-migration",
    runs: Vec::new,
    decide: |_| Ok(migration()),
};
/// `pml.guest-during-migration`.
pub const GUEST: Experiment = Experiment {
    claim: "pml.guest-during-migration",
    runs: Vec::new,
    decide: |_| Ok(guest()),
};
/// `pml.checkpoint-unchanged`.
pub const CHECKPOINT: Experiment = Experiment {
    claim: "pml.checkpoint-unchanged",
    runs: Vec::new,
    decide: |_| Ok(checkpoint()),
};

pub(super) const FAULT_NS: f64 = EXIT_NS + 1070.0;
const FLAG_NS: f64 = 380.0;
const ENTRY_NS: f64 = 100.0;
const ARM_NS: f64 = 40.0;
const LOG: f64 = 512.0;
const ROUNDS_MAX: u32 = 5;
pub(super) const PAGE_BITS: f64 = 8.0 * 4096.0;
const WRITE_PERCENT: [u32; 4] = [0, 50, 80, 100];

/// How writes are tracked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tracking {
    Protection,
    Pml,
}

impl Tracking {
    /// What so many pages written for the first time cost the guest, nanoseconds.
    fn guest_ns(self, pages: f64) -> f64 {
        match self {
            Tracking::Protection => pages * FAULT_NS,
            Tracking::Pml => pages * (FLAG_NS + ENTRY_NS) + pages / LOG * EXIT_NS,
        }
    }
}

/// Pages of a program, and those of them that it writes in so many seconds.
fn written(program: &Workload, seconds: f64) -> Option<(f64, f64)> {
    let machine = homenode_machine_files::preset("i7_pml").ok()?;
    let program = program.program.as_ref()?;
    let solo_s = program.solo_seconds(&machine, machine.hardware.as_ref()?);
    let instructions = program.instructions_g_per_thread * 1e9;
    let per_second = instructions / solo_s * program.llc_accesses_per_kilo_instruction / 1000.0;
    let writes = per_second * program.write_share * seconds;
    let regions = program.regions.iter().map(|region| {
        let pages = region.size.to_pages().as_f64();
        let here = writes * region.access_share;
        (pages, pages * (1.0 - libm::exp(-here / pages)))
    });
    Some(regions.fold((0.0, 0.0), |sum, region| (sum.0 + region.0, sum.1 + region.1)))
}

/// Programs of Fig 6, by the claim's names.
const FIG_6: [(&str, &str); 4] = [
    ("read", "bigdatabench.read"),
    ("sort", "bigdatabench.sort"),
    ("write", "bigdatabench.write"),
    ("hpl", "hpl"),
];

/// Percent that PML costs a program when all flags are armed so often.
fn wss_percent(program: &str, seconds: f64) -> Result<f64, String> {
    let workload = workload::builtin(program).ok_or_else(|| format!("there is no profile {program}"))?;
    let (_, written) =
        written(&workload, seconds).ok_or_else(|| format!("{program} has no program to run"))?;
    let tracked_ns = Tracking::Pml.guest_ns(written) + FRAMES as f64 * ARM_NS;
    Ok(100.0 * tracked_ns / (seconds * 1e9))
}

fn wss() -> Result<Decision, String> {
    let mut rows = Vec::new();
    let mut measured = Measured::default();
    for (name, program) in FIG_6 {
        let (chosen, rarely) = (wss_percent(program, 1.0)?, wss_percent(program, 30.0)?);
        measured.numbers.insert(name.to_owned(), chosen);
        rows.push((program.to_owned(), vec![chosen, rarely]));
    }
    let ours = rows.iter().map(|(_, numbers)| Some(numbers[0])).collect();
    let theirs = FIG_6
        .iter()
        .map(|(name, _)| published("pml.wss-overhead", name))
        .collect();
    Ok(Decision {
        measured,
        set_up: vec![
            "Profiles of the twin on machine i7_pml at their solo speed. Each second the dirty flags of a VM of 1 GiB are cleared; each page \
             written again costs a flag, an entry and its share of an exit."
                .to_owned(),
        ],
        tables: vec![table(
            "Slowdown, percent, by how often flags are cleared.",
            &["program", "each second", "each 30 s"],
            rows,
        )],
        figures: vec![bars(
            "pml-wss-overhead",
            "Slowdown by PML when it is used for working sets [PRL, figure 6]",
            "percent",
            FIG_6.iter().map(|(name, _)| (*name).to_owned()).collect(),
            vec![("ours", ours), (PUBLISHED_SERIES, theirs)],
        )],
        why: vec![
            "The profiles do not say which pages a program only reads: all its pages are written within a second, so `read` pays as \
             `write` does. A page logged costs half a microsecond here; for HPL to lose a third of its time with 764 MiB of matrix, as \
             published, it would have to cost 1.8 us, which is what a fault costs, not a log entry."
                .to_owned(),
        ],
        ..Decision::default()
    })
}

fn bars(
    name: &str,
    title: &str,
    y_label: &str,
    categories: Vec<String>,
    series: Vec<(&str, Vec<Option<f64>>)>,
) -> Figure {
    Figure {
        name: name.to_owned(),
        title: title.to_owned(),
        x_label: "program".to_owned(),
        y_label: y_label.to_owned(),
        shape: Drawing::Bars(
            categories,
            series
                .into_iter()
                .map(|(name, values)| (name.to_owned(), values))
                .collect(),
        ),
    }
}

/// Percent of its speed that a guest loses that uses so many pages when all are made invalid each second.
fn speed_lost_percent(pages: f64) -> f64 {
    let lost_ns = pages * FAULT_NS + FRAMES as f64 * ARM_NS;
    100.0 * (lost_ns / 1e9).min(1.0)
}

fn invalidation() -> Decision {
    let array = speed_lost_percent(ARRAY as f64);
    let whole = speed_lost_percent(FRAMES as f64);
    // The same as runtime gained: what is left of the speed does the same work.
    let gained = |lost: f64| 100.0 * (100.0 / (100.0 - lost) - 1.0);
    let sizes = [25, 100, 200, 400, 600, 800, 1024];
    let points = sizes.map(|mib| (f64::from(mib), speed_lost_percent(f64::from(mib) * 256.0)));
    let needed_us = (published("pml.invalidation-overhead", "speed_lost").unwrap_or(f64::NAN) * 1e7
        - FRAMES as f64 * ARM_NS)
        / FRAMES as f64
        / 1000.0;
    Decision {
        measured: Measured {
            numbers: [
                ("speed_lost".to_owned(), whole),
                ("time_gained".to_owned(), gained(whole)),
            ]
            .into(),
            ..Measured::default()
        },
        set_up: vec![
            "Each second all pages of a VM of 1 GiB are made invalid, and each page used again costs a fault. The claim is \"up to\" for a VM of \
             1 GiB: the array that fills it; the 400 MB that the paper names elsewhere are beside it."
                .to_owned(),
        ],
        tables: vec![table(
            "Percent, by what is meant.",
            &["array", "speed lost", "time gained"],
            [("400 MB", array), ("1 GiB", whole)].map(|(size, lost)| (size.to_owned(), vec![lost, gained(lost)])),
        )],
        figures: vec![Figure {
            name: "pml-invalidation-overhead".to_owned(),
            title: "Speed that a walk over an array loses to present-bit invalidation each second".to_owned(),
            x_label: "array, MiB".to_owned(),
            y_label: "percent".to_owned(),
            shape: Drawing::Lines(vec![("ours".to_owned(), points.to_vec())]),
        }],
        why: vec![format!(
            "A fault costs {} us here. To lose that much of its speed, each of the 262144 pages would have to cost {} us: Xen 4.7's fault path \
             takes a lock for the VM's tables, walks them twice and flushes, which the figure measured on Linux does not contain.",
            show(FAULT_NS / 1000.0),
            show(needed_us)
        )],
        ..Decision::default()
    }
}

/// A migration: its length, and what it takes from the guest, nanoseconds.
fn migrate(tracking: Tracking, write_percent: u32, bits_per_second: f64) -> (f64, f64) {
    let page_ns = PAGE_BITS / bits_per_second * 1e9;
    let (mut send, mut took_ns, mut guest_ns) = (FRAMES as f64, 0.0, 0.0);
    for round in 1..=ROUNDS_MAX {
        // Arming holds the guest's tables, as each fault does; the thread that saves waits for both alike.
        took_ns += FRAMES as f64 * ARM_NS + send * page_ns;
        let written = if write_percent == 0 { 0.0 } else { ARRAY as f64 };
        guest_ns += tracking.guest_ns(written);
        if tracking == Tracking::Pml {
            // What is left in the log is taken by the thread that saves.
            took_ns += EXIT_NS + written % LOG * ENTRY_NS;
        }
        send = written;
        if send < 50.0 || round == ROUNDS_MAX {
            break;
        }
    }
    (took_ns + send * page_ns, guest_ns)
}

const NETWORKS: [(&str, f64); 2] = [("1 Gbit/s", 1e9), ("10 Gbit/s", 10e9)];

/// By how much PML shortens the migration, and how much more of its time it leaves the guest, percent.
fn gains(write_percent: u32, bits_per_second: f64) -> (f64, f64) {
    let (base_ns, base_guest_ns) = migrate(Tracking::Protection, write_percent, bits_per_second);
    let (pml_ns, pml_guest_ns) = migrate(Tracking::Pml, write_percent, bits_per_second);
    let share = |lost_ns: f64, of_ns: f64| 1.0 - lost_ns / of_ns;
    let guest = share(pml_guest_ns, pml_ns) / share(base_guest_ns, base_ns) - 1.0;
    (100.0 * (1.0 - pml_ns / base_ns), 100.0 * guest)
}

fn gain_table(title: &str, of: impl Fn(u32, f64) -> f64) -> Table {
    let rows = WRITE_PERCENT.iter().map(|percent| {
        let numbers = NETWORKS.iter().map(|(_, rate)| of(*percent, *rate));
        (format!("{percent} percent"), numbers.collect())
    });
    table(title, &["writes", NETWORKS[0].0, NETWORKS[1].0], rows)
}

fn migration() -> Decision {
    let names = WRITE_PERCENT.map(|percent| format!("w{percent}"));
    let ours = WRITE_PERCENT.map(|percent| gains(percent, NETWORKS[0].1).0);
    let theirs = names
        .iter()
        .map(|name| published("pml.live-migration", name))
        .collect();
    Decision {
        measured: Measured {
            numbers: names.iter().cloned().zip(ours).collect(),
            ..Measured::default()
        },
        set_up: vec![MIGRATION_SET_UP.to_owned()],
        tables: vec![gain_table("Shorter by, percent, by network.", |percent, rate| gains(percent, rate).0)],
        figures: vec![bars(
            "pml-live-migration",
            "By how much PML shortens saving memory [PRL, figure 5]",
            "percent",
            names.to_vec(),
            vec![("ours", ours.map(Some).to_vec()), (PUBLISHED_SERIES, theirs)],
        )],
        why: vec![
            "Saving is bound by what is sent, and both ways of tracking send the same pages. Where nothing is written neither faults nor \
             logs anything, so nothing here could make PML a tenth faster at 0 percent writes, where the publication gains most."
                .to_owned(),
        ],
        ..Decision::default()
    }
}

fn guest() -> Decision {
    let ours = WRITE_PERCENT.map(|percent| gains(percent, NETWORKS[0].1).1);
    let names = WRITE_PERCENT.map(|percent| format!("w{percent}"));
    let theirs = names.iter().zip(WRITE_PERCENT).filter_map(|(name, percent)| {
        Some((f64::from(percent), published("pml.guest-during-migration", name)?))
    });
    let points = WRITE_PERCENT
        .iter()
        .zip(ours)
        .map(|(percent, gain)| (f64::from(*percent), gain));
    Decision {
        measured: Measured {
            numbers: names.iter().cloned().zip(ours).collect(),
            shapes: vec![shape(
                "strictly more with more writes",
                ours.map(show).join(", "),
                ours.is_sorted_by(|less, more| less < more),
            )],
            ..Measured::default()
        },
        set_up: vec![MIGRATION_SET_UP.to_owned()],
        tables: vec![gain_table(
            "The guest runs faster by, percent, by network.",
            |percent, rate| gains(percent, rate).1,
        )],
        figures: vec![Figure {
            name: "pml-guest-during-migration".to_owned(),
            title: "How much faster the guest runs with PML while it migrates [PRL, figure 4]".to_owned(),
            x_label: "operations that write, percent".to_owned(),
            y_label: "percent".to_owned(),
            shape: Drawing::Lines(vec![
                ("ours".to_owned(), points.collect()),
                (PUBLISHED_SERIES.to_owned(), theirs.collect()),
            ]),
        }],
        why: vec![
            "The guest writes its whole array in every round as soon as it writes at all, so 50 percent of writes cost it what 100 do. \
             What PML saves it is a fault less a logged flag for each page, three times what is published."
                .to_owned(),
        ],
        ..Decision::default()
    }
}

fn checkpoint() -> Decision {
    // The guest is suspended before tracking is armed: it writes nothing, whatever would track it.
    let copy_ns = FRAMES as f64 * 4096.0;
    let took_ns = |tracking: Tracking| FRAMES as f64 * ARM_NS + copy_ns + tracking.guest_ns(0.0);
    let (base, pml) = (took_ns(Tracking::Protection), took_ns(Tracking::Pml));
    let gain = 100.0 * (1.0 - pml / base);
    let arming = 100.0 * FRAMES as f64 * ARM_NS / base;
    Decision {
        measured: Measured {
            shapes: vec![shape(
                "saving differs by less than 1 percent",
                format!("{} percent; arming takes {} percent of it", show(gain), show(arming)),
                gain.abs() < 1.0,
            )],
            ..Measured::default()
        },
        set_up: vec![
            "A suspended guest of 1 GiB, written to memory. Nothing is written meanwhile, so nothing is tracked: what could differ is \
             arming alone, for which the same cost is taken. The model cannot disagree."
                .to_owned(),
        ],
        tables: vec![table(
            "Saving, ms.",
            &["tracking", "takes"],
            [
                ("write protection".to_owned(), vec![base / 1e6]),
                ("PML".to_owned(), vec![pml / 1e6]),
            ],
        )],
        figures: vec![bars(
            "pml-checkpoint-unchanged",
            "Saving a suspended VM of 1 GiB [PRL, section 3.3]",
            "ms",
            vec!["write protection".to_owned(), "PML".to_owned()],
            vec![("ours", vec![Some(base / 1e6), Some(pml / 1e6)])],
        )],
        why: vec![],
        ..Decision::default()
    }
}

const MIGRATION_SET_UP: &str = "A VM of 1 GiB whose program walks an array of 400 MB and writes each page in every round, unless it writes \
     none. All memory is sent, then what was written meanwhile, up to five rounds and the last. Write protection costs the guest a fault \
     per page and round, PML a flag, an entry and a 512th of an exit; arming all pages costs both 40 ns each.";
