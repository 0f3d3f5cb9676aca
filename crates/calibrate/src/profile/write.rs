//! The profile as a workload file, each figure with its source.

use std::path::Path;

use homenode_formats::profile_log::{Log, Point};
use homenode_machine::Machine;
use homenode_twin::workload::FittedCurve;
use homenode_units::Bytes;
use toml_edit::{Array, ArrayOfTables, DocumentMut, Item, Table, Value, value};

use super::emulator::escaped;
use crate::write::round;

/// How each such file begins.
pub const FIRST_WORDS: &str = "# Measured by homenode profile";

/// Ways of a modelled private cache: machine files do not say, and 8 is what most L2 caches have.
const PRIVATE_WAYS: u32 = 8;

/// What of the machine is modelled.
pub struct Facts {
    machine: String,
    l2: Bytes,
    line_bytes: u32,
    llc: Bytes,
}

impl Facts {
    /// Of a machine that has timing figures and an LLC.
    ///
    /// # Errors
    /// A sentence if it has not.
    pub fn of(machine: &Machine) -> Result<Facts, String> {
        let (Some(hardware), Some(llc)) = (&machine.hardware, machine.llcs.first()) else {
            return Err(format!(
                "machine {} says nothing of its L2 or has no LLC: take a preset, or a file of 'homenode calibrate'",
                machine.name
            ));
        };
        Ok(Facts {
            machine: machine.name.clone(),
            l2: hardware.l2_bytes,
            line_bytes: llc.line_bytes,
            llc: llc.size_bytes,
        })
    }

    /// What is said to the plugin.
    pub fn plugin_arguments(&self, log: &Path, rate: f64) -> String {
        format!(
            "log={},private-bytes={},private-ways={PRIVATE_WAYS},line-bytes={},rate-min={rate}",
            escaped(log),
            self.l2.0,
            self.line_bytes
        )
    }
}

/// The curve in the twin's family that is nearest to what was measured, from a capacity of the private cache up: an LLC that
/// is smaller tells nothing.
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

/// How a profile states its miss-ratio curve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CurveAs {
    /// Three numbers, fitted.
    Numbers,
    /// The points that were measured.
    Table,
}

/// The file's text.
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
    program.insert("misses_in_flight", noted(4.0, "estimate"));
    program.insert(
        "hits_in_flight",
        noted(6.0, "estimate: an out-of-order core hides most of a hit"),
    );
    program.insert(
        "write_share",
        noted(
            round(write_share, 4),
            "measured: lines that private caches gave up written, of those that they got",
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
    let mut region = Table::new();
    region.insert("kind", value(if single { "private" } else { "shared" }));
    let used = Bytes(log.footprint_bytes.next_multiple_of(4096).max(4096));
    region.insert("size", noted(size(used), "measured: lines used, to whole pages"));
    region.insert(
        "access_share",
        noted(1.0, "computed: emulation does not tell regions apart"),
    );
    let mut regions = ArrayOfTables::new();
    regions.push(region);
    program.insert("miss_ratio", Item::Table(miss_ratio));
    program.insert("regions", Item::ArrayOfTables(regions));
    document.insert("program", Item::Table(program));
    document.to_string()
}

/// The curve point by point, from a capacity of the private cache up, a line each; of points in a row with one ratio the first
/// and the last.
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

/// What stands above the first key, as comments.
fn head(
    log: &Log,
    (fit, curve): (&FittedCurve, CurveAs),
    facts: &Facts,
    command: &str,
    notes: &[String],
) -> String {
    // A command line can hold anything; a comment ends with its line.
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
         # measured: by the emulator's plugin{fitted}; estimate: emulation cannot tell, put in what you know.\n{notes}",
        size(facts.l2),
        facts.machine,
        log.rate * 100.0,
    )
}

/// A value, and where it comes from.
pub(crate) fn noted(of: impl Into<Value>, source: &str) -> Item {
    let mut of = of.into();
    of.decor_mut().set_suffix(format!(" # {source}"));
    Item::Value(of)
}

/// A size as files state it: in the largest unit that it is a whole number of.
pub(crate) fn size(bytes: Bytes) -> String {
    match bytes.0 {
        0 => "0B".to_owned(),
        b if b % (1 << 30) == 0 => format!("{}GiB", b >> 30),
        b if b % (1 << 20) == 0 => format!("{}MiB", b >> 20),
        b if b % (1 << 10) == 0 => format!("{}KiB", b >> 10),
        b => format!("{b}B"),
    }
}

/// What is in it, for people.
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
            "of these miss {:.1}% with 1MiB, {:.1}% with 4MiB, {:.1}% with {}'s {}; the fitted curve is {:.3} off on average",
            ratio(1 << 20),
            ratio(4 << 20),
            ratio(llc),
            facts.machine,
            size(facts.llc),
            fit.error_mean
        ),
    ]
}
