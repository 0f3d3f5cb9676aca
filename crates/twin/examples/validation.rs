//! Compares the epoch model with the access-level reference model and writes the result.
//!
//! `cargo xtask validate`, or `cargo run -p homenode-twin --example validation [FILE]`. FILE is `docs/VALIDATION.md` by default.

#![allow(clippy::print_stdout)] // an example talks to a person

#[path = "../tests/reference/mod.rs"]
mod reference;

use std::fmt::Write as _;

use homenode_machine_files::preset;
use homenode_twin::models::CLASSES;
use reference::{sharing, traffic};

/// Number of accesses in the warm-up of a pair, and again in its measurement.
const ACCESSES: usize = 400_000;

fn main() -> std::io::Result<()> {
    let path = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "docs/VALIDATION.md".to_owned());
    let mut text = HEAD.to_owned();
    cache_sharing(&mut text).expect("writing to a string");
    transients(&mut text).expect("writing to a string");
    inclusion(&mut text).expect("writing to a string");
    bandwidth(&mut text).expect("writing to a string");
    pages(&mut text).expect("writing to a string");
    std::fs::write(&path, homenode_units::with_reading_time(&text))?;
    println!("wrote {path}");
    Ok(())
}

const HEAD: &str = "# Validation of the twin against single accesses

*For researchers who judge the twin's models.*

How close is the twin to a simulator of single accesses? `cargo xtask validate` writes this page; do not edit it. The same
seeds give the same figures. Tests hold the bounds on a part of the cases (`crates/twin/tests/twin/validation.rs`). The speed
of that simulator is in `crates/tracking/src/lib.rs`.

The twin counts populations: lines held, misses a second. `homenode-tracking` makes every access, one by one: set-associative
caches with the machine's ways and replacement policy, controllers and links that serve line after line, pages on the node that
touched them first. Both get the same generated streams. The twin knows each stream only *alone*, as from a profile; the
comparison is of streams side by side. No figure here is about real hardware.
";

/// Streams named in one line of the text.
const NAMES_PER_LINE: usize = 5;

fn cache_sharing(text: &mut String) -> std::fmt::Result {
    let streams = sharing::streams();
    let names: Vec<&str> = streams.iter().map(|named| named.name).collect();
    let lines: Vec<String> = names
        .chunks(NAMES_PER_LINE)
        .map(|names| names.join(", "))
        .collect();
    writeln!(
        text,
        "\n## Sharing a last-level cache\n\n\
         All {} pairs of {} streams (C is the cache's capacity):\n\
         {}.\n\
         They run at access rates 1:1, 1:4 and 4:1 in a cache of {} lines with the preset's ways and policy. Each stream's\n\
         miss-ratio curve is measured alone, under the same policy. Then both models start empty and get as many accesses; the second\n\
         half counts.\n\n\
         Errors are differences of miss ratios, of both streams of a pair, in points of 0.01. Columns are means by the number of age\n\
         classes; 1 is sharing in proportion to misses. The twin has {CLASSES} for policies that remember use, and 1 for random\n\
         replacement: its means are bold, and the worst case is its own. Bound: mean at most 3.\n\n\
         | cache | 1 | 2 | {CLASSES} | 8 | worst | worst case |\n|---|---|---|---|---|---|---|",
        names.len() * (names.len() - 1) / 2,
        names.len(),
        lines.join(",\n"),
        sharing::LINES,
    )?;
    for machine in ["r910", "e5_1603v3", "amd48", "xeon26x2"] {
        let shape = sharing::shape_of(machine);
        let errors = sharing::compare(shape, &streams, &[1, 2, CLASSES, 8], ACCESSES);
        let name = format!("{machine}: {} ways, {}", shape.ways, shape.replacement.name());
        cache_row(text, &name, &errors, CLASSES)?;
    }
    let mut random = sharing::shape_of("e5_1603v3");
    random.replacement = homenode_machine::Replacement::Random;
    let errors = sharing::compare(random, &streams, &[1, CLASSES], ACCESSES);
    cache_row(text, &format!("{} ways, random", random.ways), &errors, 1)?;
    writeln!(
        text,
        "\nThe worst cases are loops that nearly fit: a few lines decide on which side of a cliff they are. A program that uses its lines\n\
         less often than the cache turns over loses them under any policy: a low miss rate alone does not protect."
    )
}

/// Writes the mean error by number of classes, and the worst case with the simulator's own number of them.
fn cache_row(text: &mut String, cache: &str, errors: &[sharing::Errors], own: usize) -> std::fmt::Result {
    let of = |classes: usize| errors.iter().find(|errors| errors.classes == classes);
    let mean = |classes: usize| match of(classes) {
        Some(errors) if classes == own => format!("**{:.1}**", 100.0 * errors.mean),
        Some(errors) => format!("{:.1}", 100.0 * errors.mean),
        None => "-".to_owned(),
    };
    let means = [1, 2, CLASSES, 8].map(mean).join(" | ");
    let own = of(own).expect("the twin's own number was compared");
    writeln!(
        text,
        "| {cache} | {means} | {:.1} | {} |",
        100.0 * own.worst,
        own.worst_case,
    )
}

fn transients(text: &mut String) -> std::fmt::Result {
    writeln!(
        text,
        "\n## Coming and going\n\n\
         A stream fills the empty cache, sleeps while a second one runs, then runs beside it. Errors are of the lines held by each, in\n\
         points of 0.01 of the cache, mean over each phase; in brackets with one age class.\n\n\
         | cache | first, second | alone | asleep | together |\n|---|---|---|---|---|"
    )?;
    let streams = sharing::streams();
    for machine in ["r910", "e5_1603v3", "amd48"] {
        let shape = sharing::shape_of(machine);
        for (first, second) in [(5, 0), (1, 0), (3, 2)] {
            let errors = |classes| sharing::transient(shape, &streams[first], &streams[second], classes);
            let both = errors(CLASSES).into_iter().zip(errors(1));
            let cells: Vec<String> = both
                .map(|(ours, one)| format!("{:.1} ({:.1})", 100.0 * ours, 100.0 * one))
                .collect();
            writeln!(
                text,
                "| {machine} | {}, {} | {} |",
                streams[first].name,
                streams[second].name,
                cells.join(" | "),
            )?;
        }
    }
    Ok(())
}

fn inclusion(text: &mut String) -> std::fmt::Result {
    let [inclusive, other] = sharing::back_invalidation("r910");
    writeln!(
        text,
        "\n## What the twin leaves out: back-invalidation\n\n\
         A program that fits its second-level cache runs beside three sequential streams at the same access rate, on a cache like the\n\
         R910's. If the LLC is inclusive, {inclusive:.3} of its accesses go to memory, else {other:.3}. This is the extreme: it uses none of its\n\
         lines in the LLC, so the LLC forgets them. The twin has no term for it."
    )
}

fn bandwidth(text: &mut String) -> std::fmt::Result {
    let machine = traffic::with_measured_curves("amd48");
    let hardware = machine.hardware.as_ref().expect("presets have figures");
    writeln!(
        text,
        "\n## Sharing controllers and links\n\n\
         With amd48's capacities and idle latencies. The reference's controllers and links are queues with a fixed time per line. The\n\
         twin's curves are fitted to the reference's own latency under load, with one kind of thread on one resource, as a machine's\n\
         are measured (controller alpha {:.2}, beta {:.3}; link {:.2}, {:.3}). *Threads* are their number, their node\n\
         and their memory's. Rates are misses per microsecond and thread.\n\n\
         | case | threads | work ns | in flight | rate, twin/reference | error % | latency ns, twin/reference |\n\
         |---|---|---|---|---|---|---|",
        hardware.memory_curve.alpha,
        hardware.memory_curve.beta,
        hardware.link.curve.alpha,
        hardware.link.curve.beta,
    )?;
    let (mut sum, mut count) = (0.0, 0.0);
    for (name, groups) in traffic::cases() {
        let truth = traffic::reference(&machine, &groups, 400.0);
        let ours = traffic::model(&machine, &groups);
        let groups = groups.iter().zip(&truth).zip(&ours);
        for (at, ((group, truth), ours)) in groups.enumerate() {
            // Only the first row of a case has the case's name.
            let case = if at == 0 {
                format!("{name} ")
            } else {
                String::new()
            };
            let error = 100.0 * (ours.0 / truth.0 - 1.0);
            sum += error.abs();
            count += 1.0;
            writeln!(
                text,
                "| {case}| {}, {} to {} | {} | {} | {:.2}/{:.2} | {error:+.1} | {:.0}/{:.0} |",
                group.threads,
                group.node,
                group.memory,
                group.ns_between,
                group.in_flight,
                1000.0 * ours.0,
                1000.0 * truth.0,
                ours.1,
                truth.1,
            )?;
        }
    }
    writeln!(text, "\nMean error of a rate: {:.1} percent.", sum / count)
}

fn pages(text: &mut String) -> std::fmt::Result {
    let nodes = preset("amd48").expect("a preset").nodes.len();
    writeln!(
        text,
        "\n## First touch\n\n\
         48 threads on amd48's {nodes} nodes. A share of their accesses goes to memory that one thread touched first, a share to memory\n\
         that all touched, the rest to their own. Imbalance is the standard deviation over the mean of accesses by node.\n\n\
         | by one | shared | imbalance, twin | reference | most loaded node's share, twin | reference |\n|---|---|---|---|---|---|"
    )?;
    for (by_one, shared) in [
        (0.0, 0.0),
        (0.0, 1.0),
        (0.3, 0.3),
        (0.5, 0.0),
        (0.5, 0.5),
        (1.0, 0.0),
    ] {
        let [truth, ours] = traffic::accesses_by_node(by_one, shared);
        let imbalance = |counts: &[f64]| homenode_host::imbalance(counts).unwrap_or_default();
        let most = |counts: &[f64]| counts.iter().copied().fold(0.0, f64::max) / counts.iter().sum::<f64>();
        writeln!(
            text,
            "| {by_one} | {shared} | {:.2} | {:.2} | {:.3} | {:.3} |",
            imbalance(&ours),
            imbalance(&truth),
            most(&ours),
            most(&truth),
        )?;
    }
    Ok(())
}
