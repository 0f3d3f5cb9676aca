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
    text.push_str(TAIL);
    std::fs::write(&path, text)?;
    println!("wrote {path}");
    Ok(())
}

const HEAD: &str = "# Validation of the twin against single accesses

Written by `cargo xtask validate`; do not edit. The same seeds give the same figures. Tests hold the bounds on a part of the
cases (`crates/twin/tests/twin/validation.rs`).

The twin counts populations: lines held, misses a second. `homenode-tracking` makes every access, one by one: set-associative
caches with the machine's ways and replacement policy, controllers and links that serve line after line, pages that lie where
they were touched. Both are driven by the same generated streams. What the twin is given is what a profile would hold: each
stream *alone*. What happens side by side is compared. No figure here is about real hardware.
";

const TAIL: &str = "
## Speed of the reference

`cargo bench -p homenode-tracking`; the module text of `crates/tracking/src/lib.rs` has figures.
";

fn cache_sharing(text: &mut String) -> std::fmt::Result {
    let streams = sharing::streams();
    let names: Vec<&str> = streams.iter().map(|named| named.name).collect();
    writeln!(
        text,
        "\n## Sharing a last-level cache\n\nAll {} pairs of {} streams ({}), at access rates 1:1, 1:4 and 4:1, in a cache of \
         {} lines with the preset's ways and policy. Each stream's miss-ratio curve is measured alone, under the same \
         policy; then both models start empty and see the same number of accesses, of which the second half counts. Error: difference of miss ratios, both streams of a pair, in points of 0.01. The twin's model of a cache has \
         {CLASSES} age classes for policies that remember use and 1 for random replacement; 1 is sharing in \
         proportion to misses. Bound: mean at most 3.\n",
        names.len() * (names.len() - 1) / 2,
        names.len(),
        names.join(", "),
        sharing::LINES,
    )?;
    writeln!(
        text,
        "| cache | age classes | mean | worst | worst case |\n|---|---|---|---|---|"
    )?;
    for machine in ["r910", "e5_1603v3", "amd48", "xeon26x2"] {
        let shape = sharing::shape_of(machine);
        let policy = shape.replacement.name();
        for errors in sharing::compare(shape, &streams, &[1, 2, CLASSES, 8], ACCESSES) {
            let ours = if errors.classes == CLASSES { "**" } else { "" };
            writeln!(
                text,
                "| {machine}: {} ways, {policy} | {ours}{}{ours} | {ours}{:.1}{ours} | {:.1} | {} |",
                shape.ways,
                errors.classes,
                100.0 * errors.mean,
                100.0 * errors.worst,
                errors.worst_case,
            )?;
        }
    }
    let mut random = sharing::shape_of("e5_1603v3");
    random.replacement = homenode_machine::Replacement::Random;
    for errors in sharing::compare(random, &streams, &[1, CLASSES], ACCESSES) {
        let ours = if errors.classes == 1 { "**" } else { "" };
        writeln!(
            text,
            "| {} ways, random | {ours}{}{ours} | {ours}{:.1}{ours} | {:.1} | {} |",
            random.ways,
            errors.classes,
            100.0 * errors.mean,
            100.0 * errors.worst,
            errors.worst_case,
        )?;
    }
    writeln!(
        text,
        "\nThe worst cases are loops that nearly fit: their curve is a cliff, and which side of it they are on is decided by a \
         few lines. A program that uses its lines less often than the cache turns over loses them under any policy: a low miss \
         rate alone does not protect."
    )
}

fn transients(text: &mut String) -> std::fmt::Result {
    writeln!(
        text,
        "\n## Coming and going\n\nA stream fills the empty cache, sleeps while a second one runs, then runs beside it. Error: lines held \
         by each, in points of 0.01 of the cache, mean over each phase.\n\n\
         | cache | first, second | age classes | alone | asleep | together |\n|---|---|---|---|---|---|"
    )?;
    let streams = sharing::streams();
    for machine in ["r910", "e5_1603v3", "amd48"] {
        for (first, second) in [(5, 0), (1, 0), (3, 2)] {
            for classes in [1, CLASSES] {
                let shape = sharing::shape_of(machine);
                let [alone, asleep, together] =
                    sharing::transient(shape, &streams[first], &streams[second], classes)
                        .map(|error| 100.0 * error);
                writeln!(
                    text,
                    "| {machine} | {}, {} | {classes} | {alone:.1} | {asleep:.1} | {together:.1} |",
                    streams[first].name, streams[second].name,
                )?;
            }
        }
    }
    Ok(())
}

fn inclusion(text: &mut String) -> std::fmt::Result {
    let [inclusive, other] = sharing::back_invalidation("r910");
    writeln!(
        text,
        "\n## What the twin leaves out: back-invalidation\n\nA program that lives in its second-level cache, beside three sequential \
         streams at the same access rate, on a cache like the R910's: {inclusive:.3} of its accesses go to memory if the LLC is \
         inclusive, {other:.3} if not. This is the extreme: nothing of it is used in the LLC, so the LLC forgets it. The \
         twin has no term for it."
    )
}

fn bandwidth(text: &mut String) -> std::fmt::Result {
    let machine = traffic::with_measured_curves("amd48");
    let hardware = machine.hardware.as_ref().expect("presets have figures");
    writeln!(
        text,
        "\n## Sharing controllers and links\n\namd48's capacities and idle latencies. The reference's controllers and links are queues \
         with a fixed time per line; the twin's curves are fitted to the reference's own latency under load, with one kind \
         of thread on one resource (controller alpha {:.2}, beta {:.3}; link {:.2}, {:.3}), as a machine's are measured. Nodes: \
         of the CPUs and of the memory. Rates in misses per microsecond and thread.\n\n\
         | case | nodes | work ns | in flight | rate, twin | reference | error % | latency ns, twin | reference |\n\
         |---|---|---|---|---|---|---|---|---|",
        hardware.memory_curve.alpha,
        hardware.memory_curve.beta,
        hardware.link.curve.alpha,
        hardware.link.curve.beta,
    )?;
    let (mut sum, mut count) = (0.0, 0.0);
    for (name, groups) in traffic::cases() {
        let truth = traffic::reference(&machine, &groups, 400.0);
        let ours = traffic::model(&machine, &groups);
        for ((group, truth), ours) in groups.iter().zip(&truth).zip(&ours) {
            let error = 100.0 * (ours.0 / truth.0 - 1.0);
            sum += error.abs();
            count += 1.0;
            writeln!(
                text,
                "| {name} | {} x {} to {} | {} | {} | {:.2} | {:.2} | {error:+.1} | {:.0} | {:.0} |",
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
        "\n## First touch\n\n48 threads on amd48's {nodes} nodes; shares of their accesses go to memory that one thread touched first and to \
         memory that all touched, the rest to their own. Imbalance: standard deviation over mean of accesses by node.\n\n\
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
