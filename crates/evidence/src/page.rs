//! The report as one page that needs nothing else: verdict, effects with their intervals, each block, the method.

use maud::{DOCTYPE, Markup, html};

use crate::crossover::{Acting, Block, Crossover, WRONG_MAX};
use crate::effect::{Effect, MATTERS, PAIRS_JUDGED_MIN};
use crate::report::{Report, Trial};
use homenode_units::Ns;

const STYLE: &str = "
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
table { border-collapse: collapse; width: 100% } th, td { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere } .verdict { font-size: 1.3rem; font-weight: 600 }
.slower { color: #a2341b } .faster { color: #1b6e36 } .scroll { overflow-x: auto } svg { width: 100%; height: auto }
figure { margin: 1rem 0 } figcaption { overflow-wrap: anywhere }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818 } th, td { border-color: #444 }
.slower { color: #f08a70 } .faster { color: #7ccf95 } }";

/// Width and height of a VM's figure, and its margin, in pixels.
const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 90.0;
const MARGIN: f64 = 12.0;

/// Writes the page.
pub fn page(report: &Report) -> String {
    let none = Trial::begun(
        Default::default(),
        Crossover {
            seed: 0,
            block_ns: Ns::ZERO,
            washout_ns: Ns::ZERO,
            blocks: Vec::new(),
        },
    );
    let trial = report.crossover.as_ref().unwrap_or(&none);
    let judged = &trial.judged;
    let pairs = trial.plan.blocks.len() / 2;
    let done = trial.blocks.len().saturating_sub(1) / 2;
    let title = "Homenode on this host: what it gains or costs";
    let made = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (maud::PreEscaped(STYLE)) }
            }
            body {
                h1 { (title) }
                p.verdict { (capitalised(&judged.verdict.to_string())) "." }
                @if done < pairs {
                    p { "Not complete: " (done) " of " (pairs) " pairs of blocks. The same command goes on with it." }
                }
                p {
                    (report.host.nodes) " nodes, " (report.host.cpus) " CPUs, " (report.host.memory_bytes) ", Linux "
                    (report.host.kernel) ", " (report.host.vms) " VMs. Homenode " (report.version) " (" (report.commit) ")."
                }
                h2 { "Effects" }
                div.scroll { (effects(trial)) }
                p {
                    "Positive: faster while the agent acts. "
                    "The interval holds the true effect in about 95 of 100 such runs, for each VM by itself. Chance: how often luck alone gives as much, corrected "
                    "for the number of VMs. An effect is claimed at a chance of at most " (percent(WRONG_MAX)) " if it is at least "
                    (percent(MATTERS)) "."
                }
                @if !judged.not_judged.is_empty() {
                    p { "Not judged, as fewer than " (PAIRS_JUDGED_MIN) " pairs have their speed: " (judged.not_judged.join(", ")) "." }
                }
                h2 { "Each block" }
                p { "Speed in each block, in its order: filled while the agent acts, hollow while it only observes. The scale begins at 0." }
                @for vm in judged.vms.keys() { (figure(vm, &trial.blocks)) }
                h2 { "Method" }
                p {
                    "The agent acted and only observed in turn, in " (trial.plan.blocks.len()) " blocks of "
                    (trial.plan.block_ns) ". A coin of seed " (trial.plan.seed) " chose the order in each pair. The first "
                    (trial.plan.washout_ns) " of a block do not count. Speed is instructions per second of CPU time that the VM "
                    "wanted. Memory that was moved stays where it is in the next block, so effects of memory look smaller than they "
                    "are; memory policies and told topologies stay, too. The first block shows the host before any change."
                }
                details {
                    summary { "Numbers" }
                    div.scroll { (numbers(&trial.blocks)) }
                }
            }
        }
    };
    made.into_string()
}

fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters
        .next()
        .map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

fn percent(share: f64) -> String {
    format!("{:.0} percent", 100.0 * share)
}

fn effects(trial: &Trial) -> Markup {
    let row = |name: &str, effect: &Effect| {
        let class = match effect.percent {
            _ if !effect.is_claimed => "",
            percent if percent < 0.0 => "slower",
            _ => "faster",
        };
        html! {
            tr {
                td { (name) }
                td class=(class) { (format!("{:+.1} %", effect.percent)) }
                td { (format!("{:+.1} to {:+.1} %", effect.low_percent, effect.high_percent)) }
                td { (format!("{:.3}", effect.chance)) }
                td { (effect.pairs) }
                td { (if effect.is_claimed { "yes" } else { "no" }) }
            }
        }
    };
    html! {
        table {
            tr { th { "VM" } th { "effect" } th { "interval" } th { "chance" } th { "pairs" } th { "claimed" } }
            @if let Some(all) = &trial.judged.all { (row("all together", all)) }
            @for (vm, effect) in &trial.judged.vms { (row(vm, effect)) }
        }
    }
}

/// Draws a VM's speed in each block.
fn figure(vm: &str, blocks: &[Block]) -> Markup {
    let most = blocks
        .iter()
        .filter_map(|block| block.speeds.get(vm))
        .fold(0.0_f64, |a, b| a.max(*b));
    let x = |at: usize| MARGIN + (WIDTH - 2.0 * MARGIN) * (at as f64 + 0.5) / blocks.len().max(1) as f64;
    let y =
        |speed: f64| HEIGHT - MARGIN - (HEIGHT - 2.0 * MARGIN) * if most > 0.0 { speed / most } else { 0.0 };
    html! {
        figure {
            figcaption { (vm) ": at most " (format!("{:.3}", most / 1e9)) " G instructions per second" }
            svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-label=(format!("speed of {vm} in each block")) {
                line x1="0" x2=(WIDTH) y1=(y(0.0)) y2=(y(0.0)) stroke="#888" {}
                @for (at, block) in blocks.iter().enumerate() {
                    @if let Some(speed) = block.speeds.get(vm) {
                        circle cx=(format!("{:.1}", x(at))) cy=(format!("{:.1}", y(*speed))) r="5" stroke="#4477aa" stroke-width="2"
                            fill=(if block.acting == Acting::Acts { "#4477aa" } else { "none" }) {}
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::HostFacts;

    fn report(vm: &str, done: usize) -> Report {
        let plan = Crossover::of(Ns::from_secs(51 * 60), 1, 3).unwrap();
        let block = |acting: &Acting| Block {
            acting: *acting,
            counted_ns: Ns::from_secs(20),
            in_force: 1,
            speeds: [(vm.to_owned(), if *acting == Acting::Acts { 1.2e9 } else { 1e9 })].into(),
        };
        let blocks = plan.blocks.iter().take(done).map(block).collect();
        Report::begun("1", "c", HostFacts::default())
            .with_crossover(Trial::begun([vm.to_owned()].into(), plan).with_blocks(blocks))
    }

    #[test]
    fn a_vms_name_is_text_and_nothing_is_fetched() {
        let text = page(&report("<script>alert(1)</script>\"'&", 17));
        assert!(
            !text.contains("<script") && text.contains("&lt;script&gt;"),
            "{text}"
        );
        assert!(!text.contains("http") && !text.contains("src="), "{text}");
    }

    #[test]
    fn the_verdict_is_said_first_and_what_is_missing_too() {
        let text = page(&report("web", 17));
        let (verdict, table) = (text.find("Gains: faster").unwrap(), text.find("+20.0 %").unwrap());
        assert!(verdict < table && !text.contains("Not complete"), "{text}");
        assert!(page(&report("web", 4)).contains("Not complete: 1 of 8 pairs"));
        for done in 0..3 {
            assert!(page(&report("web", done)).contains("nothing is claimed yet"));
        }
    }
}
