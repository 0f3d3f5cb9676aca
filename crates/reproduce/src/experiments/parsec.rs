//! `prl.parsec` (Fig 11): for which programs of PARSEC a log of writes shows the whole working set.
//!
//! # Choices, made before the experiment was run
//!
//! - *Programs.* Debian has two of the 13, x264 and vips: they were run under the emulator's plugin ([`crate::measured`]),
//!   with our own input. The others are the twin's profiles. Each row says which applies.
//! - *Accurate*: PML shows at least 95 percent of the pages used, the margin of `prl.accuracy-hpl`. It cannot show a page
//!   that was not used in the same time.
//! - *When.* PML restarts with each interval, since an operator asks in the middle of a run. For a program that was run:
//!   sums over the 12 intervals of its run; the alternative is all pages written in the whole run. For a profile: one
//!   interval of 30 s, the paper's mu, on one vCPU of the paper's machine.
//! - *What a profile states.* How often a thread's accesses leave its core's caches, which regions they hit, and what share
//!   of them writes. In a class of `N` pages with `A` accesses in an interval, `N (1 - exp(-A / N))` are used and `N (1 -
//!   exp(-w A / N))` written, `w` being the write share.

use homenode_twin::workload::{self, Program, RegionProfile};
use homenode_twin::{Scenario, VmSpec};
use homenode_units::{Bytes, Ns};

use crate::experiment::{Decision, Experiment, Table};
use crate::experiments::shape;
use crate::run::Run;
use crate::verdict::{Measured as Judged, show};
use crate::work::Outcomes;
use homenode_formats::measured::{self, Measured};

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    claim: "prl.parsec",
    runs: || {
        let real = real().unwrap_or_default();
        let of_profiles = PROGRAMS
            .iter()
            .filter(|(name, _)| measured_as(&real, name).is_none());
        of_profiles.map(|(name, _)| run(name)).collect()
    },
    decide,
};

/// Programs, and whether PML is accurate for them as published.
const PROGRAMS: [(&str, bool); 13] = [
    ("streamcluster", true),
    ("vips", true),
    ("fluidanimate", true),
    ("blackscholes", true),
    ("bodytrack", true),
    ("dedup", true),
    ("canneal", false),
    ("facesim", false),
    ("ferret", false),
    ("freqmine", false),
    ("raytrace", false),
    ("swaptions", false),
    ("x264", false),
];
/// The paper's interval.
const MU: Ns = Ns::from_secs(30);
const ACCURATE: f64 = 0.95;
const WARM_UP: Ns = Ns::from_secs(5);
const COUNTED: Ns = Ns::from_secs(2);

/// Pages that a program uses, and those that it writes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Pages {
    used: f64,
    written: f64,
}

impl Pages {
    fn share(self) -> f64 {
        self.written / self.used
    }

    fn accurate(self) -> bool {
        self.share() >= ACCURATE
    }
}

/// Returns the programs that were run.
fn real() -> Result<Vec<measured::Program>, String> {
    let measured = Measured::parse(measured::PROGRAMS_FILE, measured::PROGRAMS);
    measured
        .map(|measured| measured.program)
        .map_err(|error| error.to_string())
}

fn measured_as<'a>(real: &'a [measured::Program], name: &str) -> Option<&'a measured::Program> {
    real.iter().find(|program| program.parsec && program.name == name)
}

fn run(program: &'static str) -> Run {
    let vm = VmSpec::new("vm", 1, Bytes::from_gib(3), program).doing(100.0);
    let scenario = Scenario::of(&format!("{program} on one vCPU"), vec![vm]);
    Run::between("i7_pml", scenario, WARM_UP, Ns(WARM_UP.0 + COUNTED.0))
}

/// Returns the pages of a region that a number of accesses to the program's memory use and write.
fn pages(program: &Program, region: &RegionProfile, accesses: f64) -> Pages {
    let heat = region
        .heat
        .iter()
        .map(|class| (class.page_share, class.access_share));
    let mut classes: Vec<(f64, f64)> = heat.collect();
    if classes.is_empty() {
        classes.push((1.0, 1.0));
    }
    let (mut used, mut written) = (0.0, 0.0);
    for (page_share, access_share) in classes {
        let count = region.size.to_pages().0 as f64 * page_share;
        let each = accesses * region.access_share * access_share / count;
        used += count * (1.0 - libm::exp(-each));
        written += count * (1.0 - libm::exp(-program.write_share * each));
    }
    Pages { used, written }
}

/// Returns the pages by a program's profile, and accesses beyond the core's caches to each used page.
fn of_profile(name: &'static str, outcomes: &Outcomes) -> Result<(Pages, f64), String> {
    let window = &outcomes.of(&run(name))?.window;
    let references: u64 = window.vcpus.iter().map(|vcpu| vcpu.llc_references).sum();
    let accesses = references as f64 / window.seconds * MU.as_secs_f64();
    let program = workload::builtin(name).and_then(|workload| workload.program);
    let program = program.ok_or_else(|| format!("there is no profile of {name}"))?;
    let regions = program
        .regions
        .iter()
        .map(|region| pages(&program, region, accesses));
    let all = regions.fold(
        Pages {
            used: 0.0,
            written: 0.0,
        },
        |all, region| Pages {
            used: all.used + region.used,
            written: all.written + region.written,
        },
    );
    Ok((all, accesses / all.used))
}

fn decide(outcomes: &Outcomes) -> Result<Decision, String> {
    let real = real()?;
    let mut judged = Judged::default();
    let (mut by_profile, mut by_run) = (Vec::new(), Vec::new());
    let row = |name: &str, pages: Pages, published: bool, rest: f64| {
        let [used, written] = [pages.used, pages.written].map(|pages| show(mb(pages.round() as u64)));
        let [ours, published] =
            [pages.accurate(), published].map(|is| if is { "yes" } else { "no" }.to_owned());
        vec![
            name.to_owned(),
            used,
            written,
            show(100.0 * pages.share()),
            ours,
            published,
            show(rest),
        ]
    };
    for (name, published) in PROGRAMS {
        let (pages, source) = match measured_as(&real, name) {
            Some(program) => {
                let sums = Pages {
                    used: program.intervals_used as f64,
                    written: program.intervals_written as f64,
                };
                let whole = 100.0 * program.written as f64 / program.used as f64;
                by_run.push(row(name, sums, published, whole));
                (sums, "run")
            }
            None => {
                let (pages, accesses) = of_profile(name, outcomes)?;
                by_profile.push(row(name, pages, published, accesses));
                (pages, "profile")
            }
        };
        let expected = if published { "is" } else { "is not" };
        judged.shapes.push(shape(
            &format!("PML {expected} accurate for {name} ({source})"),
            format!("{} percent", show(100.0 * pages.share())),
            pages.accurate() == published,
        ));
    }
    let heads = |last: &str| {
        let heads = [
            "program",
            "used",
            "written",
            "percent",
            "accurate",
            "as published",
            last,
        ];
        heads.map(str::to_owned).to_vec()
    };
    Ok(Decision {
        measured: judged,
        set_up: vec![SET_UP.to_owned()],
        tables: vec![
            Table {
                title: "Programs that were run: pages used and written, each summed over 12 intervals, MB; percent written in the run as a whole.".to_owned(),
                header: heads("in the whole run"),
                rows: by_run,
            },
            Table {
                title: "Profiles: pages used and written in 30 s, MB; accesses beyond the core's caches to each page used.".to_owned(),
                header: heads("accesses"),
                rows: by_profile,
            },
        ],
        why: WHY.map(str::to_owned).to_vec(),
        ..Decision::default()
    })
}

const SET_UP: &str = "Two of the 13 are the real programs, as Debian has them: x264 and vips in a Linux guest under the emulator's plugin, with input of ours \
     that is emulated in a minute or two (`data/measured/page-log-programs.toml`, made by the testbed's case page-log-programs). The other 11 are \
     the twin's profiles on one vCPU. Pages are those of the program's data; the kernel's and those that are only executed are apart.";
const WHY: [&str; 2] = [
    "Profiles know one share of writes for all pages of a program, and within 30 s a page is accessed so often that any share \
     above a few percent writes it: so PML is accurate for all that are profiles. Which pages a program only reads is in none of them, and \
     the paper does not print it either.",
    "Of the programs that were run, what x264 only reads in an interval, frames and tables, PML does not show, as published. vips too \
     reads much that it does not write: the image that it is given and the one that the stage before left, both mapped from files. In \
     PARSEC the stages are one program without files between them; and the paper's interval of 30 s is longer than a stage here.",
];

/// Returns megabytes, as the paper counts: 256 pages of 4 KiB each.
fn mb(pages: u64) -> f64 {
    pages as f64 / 256.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_that_is_never_written_is_used_all_the_same() {
        let mut program = workload::builtin("vips")
            .and_then(|workload| workload.program)
            .expect("it is built in");
        program.write_share = 0.0;
        let region = program.regions[0].clone();
        let many = pages(&program, &region, 1e12);
        assert_eq!((many.used, many.written), (region.size.to_pages().0 as f64, 0.0));
        assert!(!many.accurate());
    }

    #[test]
    fn a_page_accessed_once_is_written_by_the_share_of_writes() {
        let program = workload::builtin("vips")
            .and_then(|workload| workload.program)
            .expect("it is built in");
        let few = pages(&program, &program.regions[0], 10.0);
        assert!((few.share() - program.write_share).abs() < 1e-3, "{few:?}");
    }

    #[test]
    fn what_was_run_needs_no_run_of_the_twin() {
        let real = real().expect("it is committed");
        let names: Vec<&str> = real
            .iter()
            .filter(|program| program.parsec)
            .map(|program| program.name.as_str())
            .collect();
        assert_eq!(names, ["x264", "vips"]);
        assert_eq!((EXPERIMENT.runs)().len(), PROGRAMS.len() - names.len());
    }
}
