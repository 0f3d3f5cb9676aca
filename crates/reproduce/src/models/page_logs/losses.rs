//! Measures the frames that PRL loses, and what PRL costs.

use anyhow::Result;
use homenode_tracking::paging::{Buffers, Mode, Options};
use homenode_tracking::tlb::Access;

use super::array::{GEM5_NS, NATIVE_NS, PASSES, PROGRAMS, Program, pass};
use super::guest::{FRAMES, Model};
use super::hpl;
use crate::design::array::{Array, Axis, Named};
use crate::models::{Values, named};

/// Numbers of entries of a buffer.
const ENTRIES: [u16; 2] = [512, 1024];
/// A write to the local APIC, nanoseconds: 100 cycles, estimated.
const SEND_NS: f64 = 100.0 / 3.4;
/// Nanoseconds to age and count a page at the end of an interval.
const PAGE_NS: f64 = 1.0;

/// Full buffers, logged frames, and frames lost while the handler was running.
struct Counted {
    events: u64,
    logged: u64,
    lost: u64,
}

impl Counted {
    fn of(model: &Model, buffers: Buffers) -> Counted {
        let (logged, events) = model.logged();
        // With one buffer, each event also loses the frame that found the buffer full.
        let found_full = if buffers == Buffers::One { events } else { 0 };
        Counted {
            events,
            logged,
            lost: model.lost().saturating_sub(found_full),
        }
    }
}

/// Runs a program with the same number of passes in each half.
fn array(program: &Program, entries: u16, buffers: Buffers, page_ns: f64) -> Counted {
    let options = Options {
        buffers,
        ..Options::PUBLISHED
    };
    let mut model = Model::new(super::guest::ARRAY, Mode::Paml, entries, options);
    for half in program.1 {
        (0..PASSES).for_each(|_| pass(&mut model, half, page_ns));
    }
    Counted::of(&model, buffers)
}

/// Returns, by program and `entries`: `full`, the number of full buffers; `logged`, the number of logged frames; and `lost`,
/// the number of frames lost while the handler ran.
pub(crate) fn missed(_: Values<'_>) -> Result<Named> {
    let rrww = &PROGRAMS[1];
    let array = |buffers, page_ns| ENTRIES.map(|entries| array(rrww, entries, buffers, page_ns));
    let hpl = ENTRIES.map(|entries| Counted::of(&hpl::third_of_a_run(entries), Buffers::One));
    let programs = [
        ("RRWW", array(Buffers::One, GEM5_NS)),
        ("HPL", hpl),
        ("RRWW at the machine's speed", array(Buffers::One, NATIVE_NS)),
        ("the same, two buffers", array(Buffers::Two, NATIVE_NS)),
    ];
    let axes = vec![
        Axis::new("program", programs.iter().map(|(name, _)| *name)),
        Axis::new("entries", ENTRIES.map(|entries| entries.to_string())),
    ];
    let all = |of: fn(&Counted) -> u64| {
        let counted = programs.iter().flat_map(|(_, counted)| counted);
        Array::of_numbers(axes.clone(), counted.map(|counted| of(counted) as f64).collect())
    };
    Ok(named([
        ("full", all(|counted| counted.events)),
        ("logged", all(|counted| counted.logged)),
        ("lost", all(|counted| counted.lost)),
    ]))
}

/// Returns, by `speed` of a program that writes the whole array: the VM's `slowdown`, and the share of a core that the
/// `estimator` takes, both in percent.
pub(crate) fn costs(_: Values<'_>) -> Result<Named> {
    let costs = |page_ns: f64| {
        let mut model = Model::new(super::guest::ARRAY, Mode::Paml, 512, Options::PUBLISHED);
        for _ in 0..2 * PASSES {
            pass(&mut model, &[Access::Write], page_ns);
        }
        let (handler_ns, ran_ns) = model.times_ns();
        let (_, events) = model.logged();
        let intervals = ran_ns / 30e9;
        let slowdown = 100.0 * events as f64 * SEND_NS / ran_ns;
        let estimator = 100.0 * (handler_ns + intervals * FRAMES as f64 * PAGE_NS) / ran_ns;
        (slowdown, estimator)
    };
    let (chosen, fast) = (costs(GEM5_NS), costs(NATIVE_NS));
    let axis = Axis::new("speed", ["17.2 us a page", "the machine's speed"]);
    let by_speed = |numbers: [f64; 2]| Array::of_numbers(vec![axis.clone()], numbers.to_vec());
    Ok(named([
        ("slowdown", by_speed([chosen.0, fast.0])),
        ("estimator", by_speed([chosen.1, fast.1])),
    ]))
}
