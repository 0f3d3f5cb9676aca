//! The report as one page that needs nothing else: the answer first, then a section for each measurement.

use maud::{DOCTYPE, Markup, html};

use crate::answer::{Answer, Tone};
use crate::report::{Hardware, HostFacts, Report};
use crate::section::Outcome;

mod chart;
mod section;
mod trial;

const STYLE: &str = include_str!("style.css");

/// Writes the page.
pub fn page(report: &Report) -> String {
    let answer = Answer::of(report);
    let title = "Should Homenode's agent run on this host?";
    let tone = match answer.tone {
        Tone::Good => "verdict good",
        Tone::Bad => "verdict bad",
        Tone::Neutral => "verdict",
    };
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
                main {
                    h1 { (title) }
                    p class=(tone) { (answer.line) }
                    p { (with_code(&answer.next)) }
                    @if let Some(caveat) = caveat(&report.host) { p.caveat { (caveat) } }
                    p.dim {
                        "The agent keeps VMs fast on hosts where memory is near some CPUs and far from others: it brings a VM's vCPUs and "
                        "memory together, and limits a VM that disturbs its neighbours. This page shows what was measured on one host."
                    }
                    p.dim { (host(&report.host)) " Homenode " (report.version) " (" (report.commit) ")." }
                    (overview(report))
                    @if let Some(crossover) = &report.crossover { (trial::trial(crossover)) }
                    (how_to_read(report))
                    @for one in &report.sections { (section::section(one)) }
                    (not_measured(report))
                    (left_out(report))
                }
            }
        }
    };
    // A number stays beside its sign.
    made.into_string().replace(" %", "&nbsp;%")
}

/// Writes what is between backquotes as code.
fn with_code(text: &str) -> Markup {
    let parts = text.split('`').enumerate();
    html! {
        @for (at, part) in parts {
            @if at % 2 == 1 { code { (part) } } @else { (part) }
        }
    }
}

/// Says what limits all figures of a host.
fn caveat(host: &HostFacts) -> Option<&'static str> {
    match host.hardware {
        Hardware::Guest => Some(
            "This machine is itself a VM: other VMs of its provider use the same caches and memory, so its figures vary with them.",
        ),
        Hardware::Unknown => Some("Whether this machine is real, a VM or emulated is not known."),
        Hardware::Silicon | Hardware::Emulated => None,
    }
}

fn host(host: &HostFacts) -> String {
    let counted = |count: usize, name: &str| format!("{count} {name}{}", if count == 1 { "" } else { "s" });
    let model = host.cpu_model.as_deref().unwrap_or("unknown CPU");
    let vms = match host.vms {
        0 => String::new(),
        vms => format!(", {}", counted(vms, "VM")),
    };
    let near = match host.nodes {
        1 => ": all memory is equally near, so only shared caches and memory bandwidth can matter",
        _ => "",
    };
    format!(
        "The host: {model}, {}, {}, Linux {}{vms}, {}{near}.",
        counted(host.cpus, "CPU"),
        host.memory_bytes,
        host.kernel,
        counted(host.nodes, "NUMA node"),
    )
}

fn is_measured(section: &crate::Section) -> bool {
    matches!(section.outcome, Outcome::Measured { .. })
}

/// Lists what was measured, and what each says about the agent.
fn overview(report: &Report) -> Markup {
    if report.sections.is_empty() {
        return html! {};
    }
    html! {
        h2 { "What was measured" }
        ul.overview {
            @if report.crossover.is_some() {
                li { a href="#crossover" { "Are VMs faster while the agent acts?" } span.dim { "the agent itself, on and off" } }
            }
            @for section in &report.sections {
                li {
                    a href=(format!("#{}", if is_measured(section) { section.topic.name() } else { "not-measured" })) {
                        (section.topic.question())
                    }
                    span.dim { (section::tag(section)) }
                }
            }
        }
    }
}

/// Lists what could not be measured, and why.
fn not_measured(report: &Report) -> Markup {
    if report.sections.iter().all(is_measured) {
        return html! {};
    }
    html! {
        h2 id="not-measured" { "What could not be measured here" }
        @for section in &report.sections {
            @if let Outcome::NotPossible { why, detail } = &section.outcome {
                p {
                    strong { (section.topic.question()) } " Not measured: " (with_code(why.trim_end_matches('.'))) "."
                    @if let Some(detail) = detail { small { (detail) } }
                }
            }
        }
    }
}

/// Says how figures came about.
fn how_to_read(report: &Report) -> Markup {
    if !report.sections.iter().any(is_measured) {
        return html! {};
    }
    html! {
        h2 { "How to read the figures" }
        p {
            "Each measurement is repeated, and its value is the median. The interval holds the true median in at least 95 of 100 such "
            "measurements; it comes from the order of the repetitions alone (the sign test), and assumes nothing about how they are "
            "distributed. A prediction was made without measuring: by the twin, which is Homenode's simulator of a host, or by a preset, "
            "which describes a machine like this one. One outside the interval is an error of the prediction, not of the host."
        }
        (chart::key())
    }
}

/// Says what was left out.
fn left_out(report: &Report) -> Markup {
    if report.left_out.is_empty() {
        return html! {};
    }
    html! {
        h2 { "Left out" }
        p { "This report is made to be shown to others. It does not have:" }
        ul { @for what in &report.left_out { li { (what) } } }
    }
}

#[cfg(test)]
mod tests;
