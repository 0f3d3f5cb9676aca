//! Writes a profile as a workload file, each figure with its source.

use std::path::Path;

use homenode_formats::profile_log::{Flights, Log, Pages, Point};
use homenode_machine::{Machine, Prefetcher};
use homenode_twin::workload::{FittedCurve, MissRatioCurve};
use homenode_units::Bytes;
use homenode_units::stats::mean;
use toml_edit::{Array, ArrayOfTables, DocumentMut, Item, Table, Value, value};

use super::emulator::escaped;
use crate::write::round;

/// First words of every profile.
pub const FIRST_WORDS: &str = "# Measured by homenode profile";

/// Number of ways of a modelled private cache. Machine files do not state it, and most L2 caches have 8.
const PRIVATE_WAYS: u32 = 8;

/// When counting begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// When the program starts.
    AtOnce,
    /// Counting starts when the program announces it.
    Announced,
}

/// A machine whose caches are not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("machine {0} does not state its L2 or has no LLC: use a preset, or a file from 'homenode calibrate'")]
pub struct NoCaches(String);

/// The facts about the machine that are modelled.
pub struct Facts {
    machine: String,
    l2: Bytes,
    line_bytes: u32,
    llc: Bytes,
    llc_share: Bytes,
    /// The machine's prefetcher; `None` for the plugin's own.
    prefetcher: Option<Prefetcher>,
}

impl Facts {
    /// Returns the facts of a machine that has timing figures and an LLC.
    ///
    /// # Errors
    /// The machine lacks either.
    pub fn of(machine: &Machine) -> Result<Facts, NoCaches> {
        let (Some(hardware), Some(llc)) = (&machine.hardware, machine.llcs.first()) else {
            return Err(NoCaches(machine.name.clone()));
        };
        let cores_of_llc = machine.cpus.len() / machine.threads_per_core().max(1) / machine.llcs.len();
        Ok(Facts {
            machine: machine.name.clone(),
            l2: hardware.l2_bytes,
            line_bytes: llc.line_bytes,
            llc: llc.size_bytes,
            llc_share: Bytes(llc.size_bytes.0 / cores_of_llc.max(1) as u64),
            prefetcher: hardware.prefetcher,
        })
    }

    /// Returns the plugin's arguments.
    pub fn plugin_arguments(&self, log: &Path, rate: f64, window: u64, begin: Begin) -> String {
        let begin = match begin {
            Begin::AtOnce => "at-once",
            Begin::Announced => "announced",
        };
        format!(
            "log={},private-bytes={},private-ways={PRIVATE_WAYS},line-bytes={},rate-min={rate},llc-bytes={},window={window},begin={begin}{}",
            escaped(log),
            self.l2.0,
            self.line_bytes,
            self.llc_share.0,
            self.prefetcher.map_or_else(String::new, prefetch_arguments)
        )
    }
}

fn prefetch_arguments(prefetcher: Prefetcher) -> String {
    format!(
        ",prefetch-steps={},prefetch-step-lines={},prefetch-nearest={},prefetch-farthest={}",
        prefetcher.steps, prefetcher.step_lines, prefetcher.nearest, prefetcher.farthest
    )
}

/// Fits the simulator's family of curves to the measured points from the private cache's capacity up. Points for a smaller LLC
/// carry no information.
pub fn fit(log: &Log) -> FittedCurve {
    let points: Vec<(f64, f64)> = log
        .curve
        .iter()
        .filter(|point| point.bytes >= log.private_bytes)
        .map(|point| (point.bytes as f64, point.miss_ratio))
        .collect();
    let ends = (points.first(), points.last());
    let middle = match ends {
        (Some(first), Some(last)) => (first.1 + last.1) / 2.0,
        _ => 0.5,
    };
    let half = points.iter().find(|point| point.1 <= middle);
    FittedCurve::of(&points, half.map_or(1e6, |point| point.0))
}

/// Representation of the miss-ratio curve in a profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CurveAs {
    /// Three fitted numbers.
    Numbers,
    /// The measured points.
    Table,
}

/// Returns the text of the workload file.
pub fn profile(
    log: &Log,
    (fit, curve): (&FittedCurve, CurveAs),
    facts: &Facts,
    name: &str,
    command: &str,
    notes: &[String],
) -> String {
    let threads = log.vcpus.max(1);
    let single = threads == 1;
    let kilo = |count: u64| count as f64 / log.instructions as f64 * 1000.0;
    let write_share = log.written_back as f64 / log.llc_accesses.max(1) as f64;
    let of_threads = if single { "thread" } else { "threads" };
    let mut document = DocumentMut::new();
    document.insert("name", value(name));
    document.insert("about", value(format!("{name}, measured under emulation")));
    let head = head(log, (fit, curve), facts, command, notes);
    if let Some(mut first) = document.key_mut("name") {
        first.leaf_decor_mut().set_prefix(head);
    }
    let mut program = Table::new();
    program.insert(
        "threads",
        value(if single {
            "one-copy-per-vcpu"
        } else {
            "one-per-vcpu"
        }),
    );
    program.insert(
        "instructions_g_per_thread",
        noted(
            round((log.instructions as f64 / threads as f64 / 1e9).max(1e-9), 9),
            &format!(
                "measured: {} instructions of {threads} {of_threads}",
                log.instructions
            ),
        ),
    );
    program.insert("cpi_core", noted(0.8, "estimate"));
    program.insert(
        "llc_accesses_per_kilo_instruction",
        noted(
            round(kilo(log.llc_accesses), 6),
            &format!(
                "measured: {} accesses, of {:.1} loads and {:.1} stores per thousand instructions",
                log.llc_accesses,
                kilo(log.reads),
                kilo(log.writes)
            ),
        ),
    );
    program.insert("misses_in_flight", in_flight(&log.misses, log.window));
    program.insert("hits_in_flight", in_flight(&log.hits, log.window));
    program.insert(
        "write_share",
        noted(
            round(write_share, 4),
            "measured: lines that private caches wrote back, of all lines that they fetched",
        ),
    );
    let mut miss_ratio = Table::new();
    match curve {
        CurveAs::Numbers => {
            miss_ratio.insert("m_inf", noted(round(fit.curve.m_inf, 6), "fitted"));
            miss_ratio.insert("c0", noted(size(fit.curve.c0), "fitted"));
            miss_ratio.insert("k", noted(round(fit.curve.k, 4), "fitted"));
        }
        CurveAs::Table => {
            miss_ratio.insert("table", noted(points(log), "measured"));
        }
    }
    program.insert("miss_ratio", Item::Table(miss_ratio));
    if let Some(translation) = translation(log) {
        program.insert("translation", Item::Table(translation));
    }
    program.insert("regions", Item::ArrayOfTables(regions(log)));
    document.insert("program", Item::Table(program));
    document.to_string()
}

/// Returns the curve's points from the private cache's capacity up, one per line. Of several equal ratios in a row, only the
/// first and last are kept.
fn points(log: &Log) -> Array {
    let told: Vec<_> = log
        .curve
        .iter()
        .filter(|point| point.bytes >= log.private_bytes)
        .collect();
    let mut table = Array::new();
    for (at, point) in told.iter().enumerate() {
        let same = |other: Option<&&Point>| other.is_some_and(|other| other.miss_ratio == point.miss_ratio);
        if at > 0 && same(told.get(at - 1)) && same(told.get(at + 1)) {
            continue;
        }
        let pair: Array = [
            Value::from(size(Bytes(point.bytes))),
            Value::from(point.miss_ratio),
        ]
        .into_iter()
        .collect();
        let mut pair = Value::Array(pair);
        pair.decor_mut().set_prefix("\n    ");
        table.push_formatted(pair);
    }
    table.set_trailing_comma(true);
    table.set_trailing("\n");
    table
}

/// With fewer accesses than this, the number in flight is unknown.
const FLIGHTS_MIN: u64 = 1000;

/// Returns the number of accesses in flight according to the rule of docs/PROFILE.md, with its bounds in the comment.
fn in_flight(flights: &Flights, window: u64) -> Item {
    if flights.accesses < FLIGHTS_MIN {
        return noted(
            4.0,
            &format!("estimate: {} accesses are too few to tell", flights.accesses),
        );
    }
    let foreseen = flights.foreseen_percent();
    let source = format!(
        "by the rule of docs/PROFILE.md: window {window}, {:.1} to {:.1} depending on what it cannot see; {foreseen:.0}% of {} foreseen",
        flights.least(),
        flights.most(),
        flights.accesses
    );
    noted(round(flights.rule(), 2), &source)
}

/// TLB reaches used for the fit of address translation: from a second-level TLB of older cores to 32 huge pages.
const REACHES: std::ops::RangeInclusive<u64> = 512 << 10..=64 << 20;
/// The TLB reach at which the fit is exact: 512 pages of 4 KiB, as in the second level of most machines here.
const REACH_EXACT: u64 = 2 << 20;

/// Fits `exp(-(c / c0)^k)` to the miss ratios of TLBs, which are too small for the fit used for caches. The curve goes
/// through the measurement at 2 MiB of reach. Its slope is that of a least-squares line through `ln(-ln m)` over `ln c`. If
/// the ratios hardly fall (streams), `c0` is one byte and `k` fits the measured point. `None` if a TLB of that reach holds
/// all pages.
fn translation_fit(log: &Log) -> Option<MissRatioCurve> {
    let transformed = |point: &Point| ((point.bytes as f64).ln(), (-point.miss_ratio.ln()).ln());
    let told: Vec<&Point> = log
        .translation
        .iter()
        .filter(|point| REACHES.contains(&point.bytes) && point.miss_ratio > 0.0 && point.miss_ratio < 1.0)
        .collect();
    let exact = transformed(told.iter().find(|point| point.bytes == REACH_EXACT)?);
    let points: Vec<(f64, f64)> = told.into_iter().map(transformed).collect();
    let x = mean(points.iter().map(|point| point.0))?;
    let y = mean(points.iter().map(|point| point.1))?;
    let above: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    let below: f64 = points.iter().map(|point| (point.0 - x) * (point.0 - x)).sum();
    // A c0 below one byte could not be written.
    let flattest = exact.1 / exact.0;
    let k = (above / below).max(flattest);
    let c0 = Bytes((exact.0 - exact.1 / k).exp().max(1.0) as u64);
    Some(MissRatioCurve::family(0.0, c0, k))
}

fn translation(log: &Log) -> Option<Table> {
    let curve = translation_fit(log)?;
    let mut table = Table::new();
    let per_kilo = (log.reads + log.writes) as f64 / log.instructions as f64 * 1000.0;
    table.insert(
        "accesses_per_kilo_instruction",
        noted(round(per_kilo, 4), "measured: loads and stores"),
    );
    let mut ratio = Table::new();
    let at = log.translation.iter().find(|point| point.bytes == REACH_EXACT);
    let measured = at.map_or(0.0, |point| point.miss_ratio * 1e6);
    let source = format!("fitted: {measured:.0} misses per million accesses measured at 2 MiB of reach");
    ratio.insert("m_inf", noted(0.0, &source));
    ratio.insert("c0", noted(size(curve.c0), &source));
    ratio.insert("k", noted(round(curve.k, 3), &source));
    table.insert("miss_ratio", Item::Table(ratio));
    Some(table)
}

/// Heat classes: shares of the hottest pages, the next, and the rest.
const CLASSES: [f64; 3] = [0.1, 0.2, 0.7];

fn regions(log: &Log) -> ArrayOfTables {
    let (threads, pages) = (log.vcpus.max(1), &log.pages);
    let mut regions = ArrayOfTables::new();
    let mut push = |kind: &str, bytes: u64, share: f64, source: &str| {
        let mut region = Table::new();
        region.insert("kind", value(kind));
        let bytes = Bytes(bytes.next_multiple_of(4096).max(4096));
        region.insert("size", noted(size(bytes), source));
        region.insert(
            "access_share",
            noted(round(share, 4), "measured: of accesses to the LLC"),
        );
        if let Some(heat) = heat(pages) {
            region.insert("heat", Item::ArrayOfTables(heat));
        }
        regions.push(region);
    };
    if threads == 1 {
        push(
            "private",
            log.footprint_bytes,
            1.0,
            "measured: lines used, to whole pages",
        );
        return regions;
    }
    let bytes = (pages.used * 4096) as f64;
    if pages.shared_accesses < 1.0 {
        let own = (bytes * (1.0 - pages.shared)) as u64 / threads;
        let source = "measured: pages that one thread used, over threads";
        push("private", own, 1.0 - pages.shared_accesses, source);
    }
    if pages.shared_accesses > 0.0 {
        let source = "measured: pages that several threads used";
        push(
            "shared",
            (bytes * pages.shared) as u64,
            pages.shared_accesses,
            source,
        );
    }
    regions
}

/// Returns the heat classes; `None` if all pages are about equally hot.
fn heat(pages: &Pages) -> Option<ArrayOfTables> {
    let (first, second) = (pages.of_hottest(CLASSES[0])?, pages.of_hottest(0.3)?);
    if first < 1.5 * CLASSES[0] {
        return None;
    }
    let (first, second) = (round(first, 4), round(second, 4));
    let mut classes = ArrayOfTables::new();
    for (part, share) in CLASSES.into_iter().zip([first, second - first, 1.0 - second]) {
        let mut class = Table::new();
        class.insert("page_share", value(part));
        class.insert("access_share", noted(round(share, 4), "measured, pages by heat"));
        classes.push(class);
    }
    Some(classes)
}

/// Returns the comments above the first key.
fn head(
    log: &Log,
    (fit, curve): (&FittedCurve, CurveAs),
    facts: &Facts,
    command: &str,
    notes: &[String],
) -> String {
    // A command line may contain line breaks, at which a comment would end.
    let printable = |c: char| if c.is_control() { ' ' } else { c };
    let command: String = command.chars().map(printable).collect();
    let notes: String = notes.iter().map(|note| format!("# Note: {note}.\n")).collect();
    let fitted = match curve {
        CurveAs::Numbers => format!(
            "; fitted: the nearest curve of the twin's family, {:.3} off on average from {} to 256 MiB,\n# {:.3} at most",
            fit.error_mean,
            size(facts.l2),
            fit.error_max
        ),
        CurveAs::Table => String::new(),
    };
    format!(
        "{FIRST_WORDS}: {command}\n\
         # Modelled: a private cache of {} ({PRIVATE_WAYS} ways, L1 within it) for each thread, as machine {} has; {:.2} percent of the lines\n\
         # that got past it were followed. Not modelled: instruction fetches, prefetches, address translation.\n\
         # measured: by the emulator's plugin{fitted}; estimate: emulation cannot tell, enter what you know.\n\
         # {:.0} percent of pages were only read in the second half of the run.\n{notes}",
        size(facts.l2),
        facts.machine,
        log.rate * 100.0,
        log.pages.only_read * 100.0,
    )
}

/// Returns a value with its source as a comment.
pub(crate) fn noted(of: impl Into<Value>, source: &str) -> Item {
    let mut of = of.into();
    of.decor_mut().set_suffix(format!(" # {source}"));
    Item::Value(of)
}

/// Formats a size in the largest unit that divides it.
pub(crate) fn size(bytes: Bytes) -> String {
    match bytes.0 {
        0 => "0B".to_owned(),
        b if b % (1 << 30) == 0 => format!("{}GiB", b >> 30),
        b if b % (1 << 20) == 0 => format!("{}MiB", b >> 20),
        b if b % (1 << 10) == 0 => format!("{}KiB", b >> 10),
        b => format!("{b}B"),
    }
}

/// Returns a summary for people.
pub fn summary(log: &Log, fit: &FittedCurve, facts: &Facts, seconds: f64) -> Vec<String> {
    let accesses = log.reads + log.writes;
    let at = |bytes: u64| log.curve.iter().rev().find(|point| point.bytes <= bytes);
    let ratio = |bytes: u64| at(bytes).map_or(1.0, |point| point.miss_ratio) * 100.0;
    let llc = facts.llc.0;
    vec![
        format!(
            "{:.3}G instructions and {:.3}G loads and stores of {} thread(s) in {seconds:.1}s",
            log.instructions as f64 / 1e9,
            accesses as f64 / 1e9,
            log.vcpus
        ),
        format!(
            "{:.2} LLC accesses per thousand instructions beyond {} of L2; {} used; {:.1}% of the lines followed",
            log.llc_accesses as f64 / log.instructions as f64 * 1000.0,
            size(facts.l2),
            size(Bytes(log.footprint_bytes)),
            log.rate * 100.0
        ),
        format!(
            "of these, the share that misses is {:.1}% with 1MiB, {:.1}% with 4MiB, {:.1}% with {}'s {}; the fitted curve is {:.3} off on average",
            ratio(1 << 20),
            ratio(4 << 20),
            ratio(llc),
            facts.machine,
            size(facts.llc),
            fit.error_mean
        ),
        format!(
            "in flight by the rule: {:.1} misses ({:.1} to {:.1}, {:.0}% foreseen), {:.1} hits ({:.1} to {:.1}); window {}",
            log.misses.rule(),
            log.misses.least(),
            log.misses.most(),
            log.misses.foreseen_percent(),
            log.hits.rule(),
            log.hits.least(),
            log.hits.most(),
            log.window
        ),
        format!(
            "the hottest tenth of {} pages gets {:.0}% of LLC accesses; {:.0}% of pages are only read in the second half of the run",
            log.pages.used,
            log.pages.of_hottest(0.1).unwrap_or(0.0) * 100.0,
            log.pages.only_read * 100.0
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_twin::Workload;

    /// A log of a program whose TLB miss ratio is this function of the reach.
    fn log(vcpus: u64, translation: impl Fn(f64) -> f64) -> Log {
        let flights = Flights {
            accesses: 30_000,
            foreseen: 15_000,
            latencies_least: 10_000.0,
            latencies_rule: 6_000.0,
            latencies_most: 3_000.0,
        };
        Log {
            version: Log::VERSION,
            private_bytes: 256 << 10,
            line_bytes: 64,
            rate: 1.0,
            vcpus,
            instructions: 1_000_000,
            reads: 300_000,
            writes: 100_000,
            llc_accesses: 60_000,
            written_back: 15_000,
            footprint_bytes: 64 << 20,
            forks: 0,
            execs: 0,
            window: 128,
            llc_bytes: 4 << 20,
            hits: flights,
            misses: flights,
            pages: Pages {
                used: 16_384,
                heat: vec![0.05, 0.1, 0.2, 0.4, 0.5, 0.6, 0.8, 0.9, 1.0],
                shared: 0.25,
                shared_accesses: 0.5,
                only_read: 0.1,
            },
            curve: Log::capacities()
                .map(|bytes| Point {
                    bytes,
                    miss_ratio: 0.5,
                })
                .collect(),
            translation: Log::reaches()
                .map(|bytes| Point {
                    bytes,
                    miss_ratio: translation(bytes as f64),
                })
                .collect(),
        }
    }

    fn written(log: &Log) -> (String, homenode_twin::Program) {
        let facts = Facts {
            machine: "m".into(),
            l2: Bytes(256 << 10),
            line_bytes: 64,
            llc: Bytes(18 << 20),
            llc_share: Bytes(4 << 20),
            prefetcher: None,
        };
        let text = profile(log, (&fit(log), CurveAs::Numbers), &facts, "x", "x", &[]);
        let read = Workload::from_toml("x.toml", &text).expect("it reads");
        (text, read.program.expect("a program"))
    }

    #[test]
    fn a_machine_with_a_prefetcher_of_its_own_tells_the_plugin() {
        let arguments = |machine| {
            let machine = homenode_machine_files::preset(machine).expect("a preset");
            let facts = Facts::of(&machine).expect("caches");
            facts.plugin_arguments(Path::new("x"), 0.01, 72, Begin::AtOnce)
        };
        let own = ",prefetch-steps=1,prefetch-step-lines=1,prefetch-nearest=2,prefetch-farthest=2";
        assert!(arguments("amd48").ends_with(own), "{}", arguments("amd48"));
        assert!(!arguments("r910").contains("prefetch"), "{}", arguments("r910"));
    }

    #[test]
    fn translation_is_exact_at_two_mib_and_falls_as_measured() {
        let wanted = MissRatioCurve::family(0.0, Bytes(2048), 0.25);
        let found = translation_fit(&log(1, |bytes| wanted.at(bytes))).expect("a curve");
        assert!(
            (found.k - 0.25).abs() < 1e-6 && found.c0.0.abs_diff(2048) <= 1,
            "{found:?}"
        );
        // A stream has the same miss ratio at every reach.
        let flat = translation_fit(&log(1, |_| 0.001)).expect("a curve");
        assert!((flat.at(2.0 * 1048576.0) - 0.001).abs() < 1e-6, "{flat:?}");
        assert_eq!(flat.c0, Bytes(1));
        // A program of a few pages has no TLB misses.
        assert_eq!(
            translation_fit(&log(1, |bytes| if bytes > 1e6 { 0.0 } else { 0.1 })),
            None
        );
    }

    #[test]
    fn what_is_in_flight_and_hot_is_written_with_its_bounds() {
        let (text, program) = written(&log(1, |_| 0.001));
        assert_eq!((program.misses_in_flight, program.hits_in_flight), (5.0, 5.0));
        assert!(
            text.contains("window 128, 3.0 to 10.0 depending on what it cannot see; 50% of 30000 foreseen"),
            "{text}"
        );
        let heat: Vec<f64> = program.regions[0]
            .heat
            .iter()
            .map(|class| class.access_share)
            .collect();
        assert_eq!(heat, [0.4, 0.2, 0.4]);
        assert_eq!(program.regions[0].size, Bytes(64 << 20));
    }

    #[test]
    fn threads_have_own_and_shared_memory_as_measured() {
        let (_, program) = written(&log(4, |_| 0.001));
        let regions: Vec<_> = program
            .regions
            .iter()
            .map(|region| (region.size.0 >> 20, region.access_share))
            .collect();
        assert_eq!(regions, [(12, 0.5), (16, 0.5)]);
    }

    #[test]
    fn too_few_accesses_leave_an_estimate() {
        let mut few = log(1, |_| 0.0);
        few.hits = Flights::default();
        let (text, program) = written(&few);
        assert!(
            text.contains("hits_in_flight = 4.0 # estimate: 0 accesses are too few to tell"),
            "{text}"
        );
        assert!(program.translation.is_none());
    }
}
