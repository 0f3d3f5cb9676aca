//! The agent on and off, on the page: effects with their intervals, each block, the method.

use maud::{Markup, html};

use super::chart::{Strip, chart};
use crate::crossover::{Acting, Block, WRONG_MAX};
use crate::effect::{Effect, MATTERS, PAIRS_JUDGED_MIN};
use crate::number::number;
use crate::report::Trial;

/// Width and height of a VM's blocks, and their margin, in pixels.
const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 90.0;
const MARGIN: f64 = 12.0;

/// Writes the trial.
pub(super) fn trial(trial: &Trial) -> Markup {
    let judged = &trial.judged;
    let pairs = trial.plan.blocks.len() / 2;
    let done = trial.pairs_done();
    let named = judged.all.iter().map(|all| ("all VMs together", all));
    let effects: Vec<(&str, &Effect)> = named
        .chain(judged.vms.iter().map(|(vm, effect)| (vm.as_str(), effect)))
        .collect();
    html! {
        h2 id="crossover" { "Are VMs faster while the agent acts?" }
        p { "Verdict: " (judged.verdict.to_string()) "." }
        @if done < pairs {
            p { "Not complete: " (done) " of " (pairs) " pairs of blocks. The same command continues." }
        }
        @if !effects.is_empty() {
            (chart("%", &effects.iter().map(|(name, effect)| strip(name, effect)).collect::<Vec<_>>()))
            (table(&effects))
        }
        @if !judged.not_judged.is_empty() {
            p { "Not judged, as fewer than " (PAIRS_JUDGED_MIN) " pairs have their speed: " (judged.not_judged.join(", ")) "." }
        }
        p.dim {
            "How: the agent acted and only observed in turn, in " (trial.plan.blocks.len()) " blocks of " (trial.plan.block_ns)
            ". A coin of seed " (trial.plan.seed) " chose the order in each pair. The first " (trial.plan.washout_ns)
            " of a block do not count. Speed is instructions per second of CPU time that the VM wanted. Above 0, a VM is faster while "
            "the agent acts. The interval holds the true effect in about 95 of 100 such trials, for each VM by itself. Chance says how "
            "often luck alone gives as much, corrected for the number of VMs. An effect is claimed at a chance of at most "
            (number(100.0 * WRONG_MAX)) " % if it is at least " (number(100.0 * MATTERS)) " %. Memory that was moved stays where it is "
            "in the next block, so effects of memory look smaller than they are; memory policies and told topologies stay, too. The "
            "first block shows the host before any change."
        }
        @if !judged.vms.is_empty() {
            details {
                summary { "Each block" }
                p.dim { "Speed in each block, in its order: filled while the agent acts, hollow while it only observes. The scale begins at 0." }
                @for vm in judged.vms.keys() { (blocks_of(vm, &trial.blocks)) }
            }
        }
        @if !trial.blocks.is_empty() {
            details {
                summary { "Raw numbers" }
                div.scroll tabindex="0" role="region" aria-label="raw numbers: blocks" { (numbers(&trial.blocks)) }
            }
        }
    }
}

fn strip<'a>(name: &str, effect: &Effect) -> Strip<'a> {
    Strip {
        label: name.to_owned(),
        value: format!("{:+.1} %", effect.percent),
        interval: Some((effect.low_percent, effect.high_percent)),
        middle: Some(effect.percent),
        ..Strip::default()
    }
}

fn table(effects: &[(&str, &Effect)]) -> Markup {
    let class = |effect: &Effect| match effect.percent {
        _ if !effect.is_claimed => "",
        percent if percent < 0.0 => "bad",
        _ => "good",
    };
    html! {
        table {
            tr { th { "VM" } th { "Effect" } th { "Chance" } th { "Claimed" } }
            @for (name, effect) in effects {
                tr {
                    td { (name) }
                    td class=(class(effect)) {
                        (format!("{:+.1} %", effect.percent))
                        small { (format!("{:+.1} to {:+.1} %", effect.low_percent, effect.high_percent)) }
                    }
                    td { (format!("{:.3}", effect.chance)) small { (effect.pairs) " pairs" } }
                    td { (if effect.is_claimed { "yes" } else { "no" }) }
                }
            }
        }
    }
}

/// Draws a VM's speed in each block.
fn blocks_of(vm: &str, blocks: &[Block]) -> Markup {
    let most = blocks
        .iter()
        .filter_map(|block| block.speeds.get(vm))
        .fold(0.0_f64, |a, b| a.max(*b));
    let x = |at: usize| MARGIN + (WIDTH - 2.0 * MARGIN) * (at as f64 + 0.5) / blocks.len().max(1) as f64;
    let y =
        |speed: f64| HEIGHT - MARGIN - (HEIGHT - 2.0 * MARGIN) * if most > 0.0 { speed / most } else { 0.0 };
    html! {
        figure {
            figcaption { (vm) ": at most " (number(most / 1e9)) " billion instructions per second" }
            svg.blocks viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-label=(format!("speed of {vm} in each block")) {
                line.zero x1="0" x2=(WIDTH) y1=(y(0.0)) y2=(y(0.0)) {}
                @for (at, block) in blocks.iter().enumerate() {
                    @if let Some(speed) = block.speeds.get(vm) {
                        circle cx=(format!("{:.1}", x(at))) cy=(format!("{:.1}", y(*speed))) r="5"
                            class=(if block.acting == Acting::Acts { "median" } else { "outlined" }) {}
                    }
                }
            }
        }
    }
}

fn numbers(blocks: &[Block]) -> Markup {
    html! {
        table {
            tr { th { "block" } th { "agent" } th { "counted" } th { "VM" } th { "instructions per CPU-second" } }
            @for (at, block) in blocks.iter().enumerate() {
                @for (vm, speed) in &block.speeds {
                    tr {
                        td { (at) }
                        td { (if block.acting == Acting::Acts { "acts" } else { "observes" }) }
                        td { (block.counted_ns) }
                        td { (vm) }
                        td { (format!("{speed:.0}")) }
                    }
                }
            }
        }
    }
}
