use super::*;
use crate::crossover::{Acting, Block, Crossover};
use crate::report::Trial;
use crate::section::{Bearing, Figure, Section, Topic, With};
use homenode_units::Ns;

fn report(vm: &str, done: usize) -> Report {
    trial_of(vm, done, 1.2e9)
}

/// Makes a report of a trial in which a VM has this speed while the agent acts, and 1e9 else.
fn trial_of(vm: &str, done: usize, speed: f64) -> Report {
    let plan = Crossover::of(Ns::from_secs(51 * 60), 1, 3).unwrap();
    let block = |acting: &Acting| Block {
        acting: *acting,
        counted_ns: Ns::from_secs(20),
        in_force: 1,
        speeds: [(vm.to_owned(), if *acting == Acting::Acts { speed } else { 1e9 })].into(),
    };
    let blocks = plan.blocks.iter().take(done).map(block).collect();
    let trial = Trial::begun([vm.to_owned()].into(), plan).with_blocks(blocks);
    Report::begun("1", "c", HostFacts::default()).with_crossover(trial)
}

const HOSTILE: &str = "<script>alert(1)</script>\"'&";

/// Returns the page with ordinary spaces.
fn text_of(report: &Report) -> String {
    page(report).replace("&nbsp;", " ")
}

/// A report all of whose texts are hostile.
fn hostile() -> Report {
    let figure = Figure::of(HOSTILE, HOSTILE, &[1.0, 2.0, 3.0]).predicted(2.0, HOSTILE);
    let figures = vec![figure.of_vm(HOSTILE)];
    let detail = Some(HOSTILE.to_owned());
    report(HOSTILE, 17)
        .with_section(Section::measured(
            Topic::Contention,
            With::Processes,
            HOSTILE,
            HOSTILE,
            Bearing::For,
            figures,
        ))
        .with_section(Section::not_possible(Topic::Numad, HOSTILE, HOSTILE, detail))
}

#[test]
fn every_text_is_text_and_nothing_is_fetched() {
    let text = page(&hostile());
    assert!(
        !text.contains("<script") && text.contains("&lt;script&gt;"),
        "{text}"
    );
    assert!(!text.contains("http") && !text.contains("src="), "{text}");
}

#[test]
fn the_answer_is_said_first_and_what_is_missing_too() {
    let text = text_of(&report("web", 17));
    let (answer, table) = (
        text.find("Yes, switch the agent on: web ran 20.0 % faster")
            .unwrap(),
        text.find("+20.0 %").unwrap(),
    );
    assert!(answer < table && !text.contains("Not complete"), "{text}");
    let harmed = text_of(&trial_of("web", 17, 0.8e9));
    assert!(
        harmed.contains("No, leave the agent off for these VMs: web ran 20.0 % slower"),
        "{harmed}"
    );
    let same = text_of(&trial_of("web", 17, 1e9));
    assert!(same.contains("It makes no difference: the agent acted"), "{same}");
    assert!(text_of(&report("web", 4)).contains("Not complete: 1 of 8 pairs"));
    for done in 0..3 {
        assert!(text_of(&report("web", done)).contains("Nothing is claimed before the end"));
    }
}

#[test]
fn a_section_has_its_meaning_figures_prediction_and_raw_numbers_and_a_reason_if_it_has_none() {
    let figure = Figure::of(
        "victim beside a thrasher",
        "percent",
        &[10.0, 11.0, 12.0, 13.0, 14.0, 15.0],
    );
    let figures = vec![figure.predicted(20.0, "the twin")];
    let text = text_of(
        &Report::begun("1", "c", HostFacts::default())
            .with_section(Section::measured(
                Topic::Contention,
                With::Processes,
                "By hand.",
                "A neighbour costs an eighth.",
                Bearing::For,
                figures,
            ))
            .with_section(Section::not_possible(
                Topic::Numad,
                "",
                "Not measured: numad is not installed.",
                None,
            )),
    );
    for wanted in [
        "Worth a trial: 1 of 1",
        "A neighbour costs an eighth.",
        "speaks for the agent",
        "12.5 %",
        "10 to 15, 6 repetitions",
        "by the twin: outside the interval, 60 % too high",
        "By hand.",
        "10, 11, 12, 13, 14, 15",
        "Not measured: numad is not installed.",
    ] {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
}
