//! Divides a VM's cost by cause: according to the host's counts if there are any, otherwise according to a model of the core.
//!
//! `cycles per instruction = core x (1 + s x siblings) + stall x misses x latency + faults`, the form of `policy::predict`, with
//! `core` and `stall` fitted to the VM's own steps. Only the proportion of the parts counts: their sum is limited to the growth
//! of the cost. If the sum is smaller, the rest is attributed to the guest.

use crate::Code;
use crate::facts::{Facts, Of, OfOther, Step};

/// How much longer a core's own work takes next to a busy hyperthread, as in `policy::predict`.
const SMT_STRETCH: f64 = 1.6;
/// Prior of the cycles per instruction without memory accesses, its standard deviation, and the least value.
const CORE: f64 = 0.4;
const CORE_SD: f64 = 0.4;
const CORE_MIN: f64 = 0.2;
/// Prior of the cycles for which a miss stalls (100 ns at 2 GHz, four misses in flight), and its standard deviation.
const STALL: f64 = 50.0;
const STALL_SD: f64 = 75.0;
/// Relative deviation of steps from the model.
const NOISE: f64 = 0.05;
/// Cycles by which an LLC hit delays the core; most of its latency is hidden.
const HIT: f64 = 6.0;
/// Highest exponent of the miss ratio as a function of the part of a cache that a VM holds (Hartstein: 0.3 to 0.7 are usual).
const SLOPE_MAX: f64 = 1.5;
/// Nanoseconds that a fault waits for the disk: a random read of a fast disk.
const FAULT_NS: f64 = 100_000.0;
/// Nanoseconds that moving a page costs the VM that owns it.
const MOVE_NS: f64 = 2_000.0;
/// Share by which clock frequencies normally vary.
const CLOCK_NOISE: f64 = 0.02;

/// Returns causes, each with the share of speed that it took.
pub(crate) fn parts(facts: &Facts, (base, slow): (&Step, &Step)) -> Vec<(Code, f64)> {
    let grown = slow.cost() / base.cost();
    if grown.is_nan() || grown <= 1.0 {
        return Vec::new();
    }
    // Factors of speed multiply, so the loss is shared in proportion to their logarithms.
    let lost = 1.0 - 1.0 / grown;
    let kept = |step: &Step| (step.get(Of::Ran) / step.get(Of::Wanted)).max(1e-9);
    let stopped = (kept(base) / kept(slow)).ln().max(0.0);
    let share = |of: Of| {
        let of = |step: &Step| step.get(of) / step.get(Of::Wanted);
        (of(slow) - of(base)).max(0.0)
    };
    let (waiting, throttled) = (share(Of::Waited), share(Of::Throttled));
    let mut parts = Vec::new();
    if waiting + throttled > 0.0 {
        parts.push((Code::Waiting, stopped * waiting / (waiting + throttled)));
        parts.push((Code::Quota, stopped * throttled / (waiting + throttled)));
    }
    let longer = grown.ln() - (kept(base) / kept(slow)).ln();
    if slow.get(Of::Instructions) > 0.0 && longer > 0.0 {
        let inside = of_instructions(facts, (base, slow));
        let all: f64 = inside.iter().map(|(_, part)| part).sum();
        if all > 0.0 {
            parts.extend(inside.into_iter().map(|(code, part)| (code, longer * part / all)));
        }
    }
    let all: f64 = parts.iter().map(|(_, part)| part).sum();
    parts
        .iter_mut()
        .for_each(|(_, part)| *part *= lost / all.max(1e-9));
    parts
}

/// Averages per instruction.
struct Met {
    /// Cycles, scaled to the clock of the baseline.
    cycles: f64,
    references: f64,
    miss_ratio: f64,
    latency: f64,
    siblings: f64,
}

impl Met {
    fn of(step: &Step, clock: f64) -> Met {
        let per = |of: Of| step.get(of) / step.get(Of::Instructions).max(1.0);
        Met {
            cycles: per(Of::Ran) * clock,
            references: per(Of::References),
            miss_ratio: step.get(Of::Misses) / step.get(Of::References).max(1.0),
            latency: step.get(Of::Latency) + step.get(Of::ControllerWait) + step.get(Of::LinkWait),
            siblings: step.get(Of::Siblings),
        }
    }

    fn misses(&self) -> f64 {
        self.references * self.miss_ratio
    }
}

/// Returns what made an instruction take longer, with the cycles that each cause added.
fn of_instructions(facts: &Facts, (base, slow): (&Step, &Step)) -> Vec<(Code, f64)> {
    let clock = |step: &Step| step.get(Of::Cycles) / step.get(Of::Ran).max(1e-9);
    let has_clock = base.get(Of::Cycles) > 0.0;
    let usual = if has_clock { clock(base) } else { 2e9 };
    let (was, is) = (Met::of(base, usual), Met::of(slow, usual));
    let (core, stall) = fit(facts, usual);
    let grown = is.cycles - was.cycles;

    let far = |of: Of| stall * is.misses() * (slow.get(of) - base.get(of));
    let (by_others, by_itself) = missed_more(facts, (base, slow), (&was, &is));
    let miss = stall * was.latency;
    let swapped = |step: &Step| step.get(Of::Faults) / step.get(Of::Instructions).max(1.0);
    let moved = |step: &Step| step.get(Of::Moved) / step.get(Of::Instructions).max(1.0);
    let slower_clock = usual / clock(slow).max(1.0) - 1.0;
    let own = (is.references - was.references) * (miss * was.miss_ratio + HIT) + miss * by_itself;
    let mut parts = vec![
        (Code::RemoteMemory, far(Of::Latency)),
        (Code::Controller, far(Of::ControllerWait)),
        (Code::Link, far(Of::LinkWait)),
        (Code::LlcPollution, miss * by_others),
        (
            Code::SmtSibling,
            core * (SMT_STRETCH - 1.0) * (is.siblings - was.siblings),
        ),
        (
            Code::Balloon,
            (swapped(slow) - swapped(base)) * FAULT_NS * usual / 1e9,
        ),
        (
            Code::PageMoves,
            (moved(slow) - moved(base)) * MOVE_NS * usual / 1e9,
        ),
        (Code::OwnPhase, own),
    ];
    if has_clock && slower_clock > CLOCK_NOISE {
        parts.push((Code::Clock, is.cycles * (1.0 - 1.0 / (1.0 + slower_clock))));
    }
    parts.iter_mut().for_each(|(_, part)| *part = part.max(0.0));
    let told: f64 = parts.iter().map(|(_, part)| part).sum();
    if told < grown {
        let own = parts.iter_mut().find(|(code, _)| *code == Code::OwnPhase);
        own.into_iter().for_each(|(_, part)| *part += grown - told);
    }
    parts
}

/// Splits the additional misses per instruction that a higher miss ratio causes: those explained by others' growing part of the
/// cache, and the rest.
fn missed_more(facts: &Facts, (base, slow): (&Step, &Step), (was, is): (&Met, &Met)) -> (f64, f64) {
    let more = is.references * (is.miss_ratio - was.miss_ratio);
    if more <= 0.0 || was.miss_ratio <= 0.0 {
        return (0.0, more.max(0.0));
    }
    let of_others = |step: &Step, of: &dyn Fn(usize) -> f64| {
        let all = 0..facts.others.len();
        all.map(|other| step.of_other(other, OfOther::References) * of(other))
            .sum::<f64>()
    };
    // Growth is taken from the baseline's figures of the VM: a slowed VM accesses less and misses more, and these are effects.
    let grown = |own: f64, of: &dyn Fn(usize) -> f64| {
        (own + of_others(slow, of)).max(1.0) / (own + of_others(base, of)).max(1.0)
    };
    // A VM that hits keeps its own lines in the cache. A VM that misses evicts others' lines, even if it makes few accesses in
    // comparison.
    let kept_back = grown(base.get(Of::References), &|_| 1.0);
    let pushed_out = grown(base.get(Of::Misses), &|other| slow.miss_ratio_of(other));
    let squeezed = SLOPE_MAX * kept_back.max(pushed_out).ln().max(0.0);
    let all = (is.miss_ratio / was.miss_ratio).ln();
    let by_others = more * (squeezed / all).clamp(0.0, 1.0);
    (by_others, more - by_others)
}

/// Fits the cycles per instruction of the core itself, and the cycles for which a miss stalls per unit of latency. The fit is
/// least squares over all steps, with priors.
fn fit(facts: &Facts, clock: f64) -> (f64, f64) {
    let (mut a, mut b, mut c) = (1.0 / (CORE_SD * CORE_SD), 0.0, 1.0 / (STALL_SD * STALL_SD));
    let (mut p, mut q) = (CORE * a, STALL * c);
    for step in facts.steps.iter().filter(|step| step.get(Of::Instructions) > 0.0) {
        let met = Met::of(step, clock);
        let (x, y) = (
            1.0 + (SMT_STRETCH - 1.0) * met.siblings,
            met.misses() * met.latency,
        );
        let weight = 1.0 / (NOISE * met.cycles).powi(2).max(1e-9) / 10.0;
        a += weight * x * x;
        b += weight * x * y;
        c += weight * y * y;
        p += weight * x * met.cycles;
        q += weight * y * met.cycles;
    }
    let determinant = a * c - b * b;
    if determinant <= 0.0 {
        return (CORE, STALL);
    }
    let (core, stall) = ((c * p - b * q) / determinant, (a * q - b * p) / determinant);
    (core.max(CORE_MIN), stall.max(0.0))
}
