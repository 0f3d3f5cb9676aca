//! Sharing of a last-level cache: pairs of streams in the steady state, and streams that come and go.

use homenode_machine::Replacement;
use homenode_machine_files::preset;
use homenode_tracking::cache::{Cache, Shape};
use homenode_tracking::hierarchy::{Hierarchy, Inclusion};
use homenode_tracking::mrc::Curve;
use homenode_tracking::stream::{Pattern, Stream};
use homenode_twin::models::{Llc, Sharer};

/// Lines of the caches in these tests: enough sets that their number does not matter, few enough that the cache fills many times.
pub(crate) const LINES: usize = 16_384;
/// Number of points of a solo curve.
const POINTS: usize = 24;

/// A stream and its name.
pub(crate) struct Named {
    pub name: &'static str,
    pub pattern: Pattern,
}

fn named(name: &'static str, pattern: Pattern) -> Named {
    Named { name, pattern }
}

/// Returns streams of every kind. Sizes are shares of the cache. Three streams have the curve of a workload on an 18 MiB cache.
pub(crate) fn streams() -> Vec<Named> {
    let lines = |share: f64| (share * LINES as f64) as u64;
    let profile = |m_inf, share, k| Pattern::StackDistance {
        m_inf,
        c0_lines: share * LINES as f64,
        k,
        lines_max: 4 * LINES,
    };
    let uniform = |share| Pattern::Uniform { lines: lines(share) };
    let zipf = Pattern::Zipf {
        lines: lines(4.0) as u32,
        exponent: 0.9,
    };
    let loop_ = Pattern::Cyclic { lines: lines(0.7) };
    let mix = Pattern::Mix(vec![(0.3, Pattern::Sequential), (0.7, uniform(0.3))]);
    vec![
        named("sequential", Pattern::Sequential),
        named("uniform 0.5 C", uniform(0.5)),
        named("uniform 2 C", uniform(2.0)),
        named("zipf 0.9 of 4 C", zipf),
        named("loop of 0.7 C", loop_),
        named("as soplex", profile(0.1, 6.0 / 18.0, 1.0)),
        named("as sphinx3", profile(0.02, 10.0 / 18.0, 2.0)),
        named("as povray", profile(0.02, 1.0 / 18.0, 1.0)),
        named("sequential and uniform 0.3 C", mix),
    ]
}

/// Returns a cache of `LINES` lines with the ways and the policy of a preset.
pub(crate) fn shape_of(machine: &str) -> Shape {
    let machine = preset(machine).expect("a preset");
    let llc = &machine.llcs[0];
    let ways = llc.ways.expect("presets state ways") as usize;
    Shape::of_lines(LINES, ways, llc.replacement.unwrap_or_default())
}

/// Returns a stream's miss ratio when it runs alone, by size of a cache with this shape.
pub(crate) fn solo_curve(pattern: &Pattern, shape: Shape, accesses: usize) -> Curve {
    let mut ratios = vec![1.0];
    for point in 1..=POINTS {
        let smaller = Shape::of_lines(LINES * point / POINTS, shape.ways, shape.replacement);
        let (mut cache, mut stream) = (Cache::new(smaller, 1, 5), Stream::new(pattern, 0, 9));
        (0..accesses).for_each(|_| drop_outcome(&mut cache, 0, &mut stream));
        let before = cache.counts(0);
        (0..accesses).for_each(|_| drop_outcome(&mut cache, 0, &mut stream));
        ratios.push(cache.counts(0).since(&before).miss_ratio());
    }
    Curve {
        step: LINES as f64 / POINTS as f64,
        ratios,
    }
}

fn drop_outcome(cache: &mut Cache, at: usize, stream: &mut Stream) {
    let _ = cache.access(at, stream.next_line());
}

/// Returns what the simulator knows of a stream. A measured curve levels off where more lines are of no use, so no footprint has
/// to be stated. Stating it would count conflict misses of a cache of exactly that size.
pub(crate) fn sharer(curve: &Curve) -> Sharer {
    Sharer::new(LINES as f64, f64::INFINITY, |lines| curve.at(lines))
}

/// Returns the miss ratios of two streams side by side in the reference.
pub(crate) fn reference(pair: [&Pattern; 2], rates: [usize; 2], shape: Shape, accesses: usize) -> [f64; 2] {
    let mut cache = Cache::new(shape, 2, 5);
    let mut streams = [Stream::new(pair[0], 0, 9), Stream::new(pair[1], 1 << 50, 10)];
    let mut run = |cache: &mut Cache| {
        for _ in 0..accesses / (rates[0] + rates[1]) {
            for at in 0..2 {
                (0..rates[at]).for_each(|_| drop_outcome(cache, at, &mut streams[at]));
            }
        }
    };
    run(&mut cache);
    let before = [cache.counts(0), cache.counts(1)];
    run(&mut cache);
    [0, 1].map(|at| cache.counts(at).since(&before[at]).miss_ratio())
}

/// Returns the miss ratios of two streams side by side in the epoch model with this number of age classes. Both run over as many
/// accesses as in the reference, on a cache that is empty at first.
pub(crate) fn model(
    sharers: &[Sharer; 2],
    curves: [&Curve; 2],
    rates: [usize; 2],
    classes: usize,
    accesses: usize,
) -> [f64; 2] {
    let step = 0.1 * LINES as f64;
    let steps = (accesses as f64 / step) as usize;
    let mut llc = Llc::with_classes(LINES as f64, classes, 2);
    let mut misses = [0.0; 2];
    for at_step in 0..2 * steps {
        for at in 0..2 {
            let accesses = rates[at] as f64 / (rates[0] + rates[1]) as f64 * step;
            let ratio = curves[at].at(llc.held(at));
            llc.access(at, accesses, accesses * ratio);
            if at_step >= steps {
                misses[at] += ratio;
            }
        }
        llc.step(sharers);
    }
    misses.map(|sum| sum / steps as f64)
}

/// Errors of one number of classes over many cases.
pub(crate) struct Errors {
    pub classes: usize,
    pub mean: f64,
    pub worst: f64,
    pub worst_case: String,
    pub cases: usize,
}

/// Compares the epoch model with the reference for all pairs of the given streams, at rates of 1:1, 1:4 and 4:1.
pub(crate) fn compare(shape: Shape, streams: &[Named], classes: &[usize], accesses: usize) -> Vec<Errors> {
    let curves: Vec<Curve> = streams
        .iter()
        .map(|named| solo_curve(&named.pattern, shape, accesses / 3))
        .collect();
    let mut errors: Vec<Errors> = classes
        .iter()
        .map(|classes| Errors {
            classes: *classes,
            mean: 0.0,
            worst: 0.0,
            worst_case: String::new(),
            cases: 0,
        })
        .collect();
    for (a, first) in streams.iter().enumerate() {
        for (b, second) in streams.iter().enumerate().skip(a + 1) {
            let sharers = [sharer(&curves[a]), sharer(&curves[b])];
            for rates in [[1, 1], [1, 4], [4, 1]] {
                let truth = reference([&first.pattern, &second.pattern], rates, shape, accesses);
                for errors in &mut errors {
                    let ours = model(
                        &sharers,
                        [&curves[a], &curves[b]],
                        rates,
                        errors.classes,
                        accesses,
                    );
                    for at in 0..2 {
                        let error = (ours[at] - truth[at]).abs();
                        errors.mean += error;
                        errors.cases += 1;
                        if error > errors.worst {
                            let names = [first.name, second.name];
                            errors.worst = error;
                            errors.worst_case = format!(
                                "{} beside {} at {}:{}: {:.3}, reference {:.3}",
                                names[at],
                                names[1 - at],
                                rates[at],
                                rates[1 - at],
                                ours[at],
                                truth[at]
                            );
                        }
                    }
                }
            }
        }
    }
    for errors in &mut errors {
        errors.mean /= errors.cases as f64;
    }
    errors
}

/// Runs a stream alone, lets it sleep while another runs, then runs both. Returns for each phase the mean error in lines held, as
/// a share of the cache's lines.
pub(crate) fn transient(shape: Shape, first: &Named, second: &Named, classes: usize) -> [f64; 3] {
    const STEP: f64 = 0.05;
    let phases: [([f64; 2], usize); 3] = [([1.0, 0.0], 100), ([0.0, 1.0], 30), ([1.0, 1.0], 60)];
    let curves = [first, second].map(|named| solo_curve(&named.pattern, shape, 100_000));
    let sharers = [sharer(&curves[0]), sharer(&curves[1])];
    let mut llc = Llc::with_classes(LINES as f64, classes, 2);
    let mut cache = Cache::new(shape, 2, 5);
    let mut streams = [
        Stream::new(&first.pattern, 0, 9),
        Stream::new(&second.pattern, 1 << 50, 10),
    ];
    phases.map(|(rates, steps)| {
        let mut error = 0.0;
        for _ in 0..steps {
            let accesses = (STEP * LINES as f64) as usize;
            for _ in 0..accesses {
                for at in 0..2 {
                    if rates[at] > 0.0 {
                        drop_outcome(&mut cache, at, &mut streams[at]);
                    }
                }
            }
            for at in 0..2 {
                let accesses = rates[at] * accesses as f64;
                llc.access(at, accesses, accesses * curves[at].at(llc.held(at)));
            }
            llc.step(&sharers);
            let off = |at: usize| (llc.held(at) - cache.held(at) as f64).abs() / LINES as f64;
            error += (off(0) + off(1)) / 2.0;
        }
        error / steps as f64
    })
}

/// Returns memory accesses per access of a program whose data fits its private cache, next to streams: for an inclusive LLC, then
/// for a non-inclusive one.
pub(crate) fn back_invalidation(machine: &str) -> [f64; 2] {
    let whole = preset(machine).expect("a preset");
    let l2 = whole
        .hardware
        .as_ref()
        .expect("presets have figures")
        .l2_bytes
        .as_f64();
    let lines = LINES as f64 * l2 / whole.llcs[0].size_bytes.as_f64();
    let private = Shape::of_lines(lines as usize, 8, Replacement::PseudoLru);
    let hot = Pattern::Uniform {
        lines: (0.75 * lines) as u64,
    };
    [Inclusion::Inclusive, Inclusion::NonInclusive].map(|inclusion| {
        let mut caches = Hierarchy::new(4, private, shape_of(machine), inclusion, 1);
        let mut streams: Vec<Stream> = (0..4)
            .map(|core| {
                let pattern = if core == 0 { &hot } else { &Pattern::Sequential };
                Stream::new(pattern, core << 50, core)
            })
            .collect();
        let mut run = |caches: &mut Hierarchy, rounds: usize| {
            for _ in 0..rounds {
                for (core, stream) in streams.iter_mut().enumerate() {
                    let _ = caches.access(core, stream.next_line());
                }
            }
        };
        run(&mut caches, 100_000);
        let before = caches.shared(0).misses;
        run(&mut caches, 200_000);
        (caches.shared(0).misses - before) as f64 / 200_000.0
    })
}
