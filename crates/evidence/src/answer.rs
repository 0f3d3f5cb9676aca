//! Whether to let the agent act on this host: the first line of a report, and what to do next.

use crate::effect::{Effect, Judged, Verdict};
use crate::report::{Hardware, Report, Trial};
use crate::section::{Bearing, Outcome, Section, Topic};

/// The answer of a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Its tone.
    pub tone: Tone,
    /// The answer, in a sentence.
    pub line: String,
    /// What to do next, or why there is no better answer, in a sentence or two.
    pub next: String,
}

/// Whether the answer is good news for the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// The agent helps.
    Good,
    /// The agent harms.
    Bad,
    /// Neither, or not known.
    Neutral,
}

impl Answer {
    /// Answers by the trial of the agent itself if there is one, and else by what the other measurements found.
    pub fn of(report: &Report) -> Answer {
        if report.host.hardware == Hardware::Emulated {
            return Answer::neutral(
                "This report cannot say: the machine is emulated, so its times and speeds mean nothing.",
                "It shows that every step runs, ends and reports. Repeat it on a machine of your own.",
            );
        }
        match &report.crossover {
            Some(trial) => Answer::of_trial(trial),
            None => Answer::of_sections(report),
        }
    }

    fn neutral(line: impl Into<String>, next: impl Into<String>) -> Answer {
        Answer {
            tone: Tone::Neutral,
            line: line.into(),
            next: next.into(),
        }
    }

    fn of_trial(trial: &Trial) -> Answer {
        let judged = &trial.judged;
        let together = judged.all.as_ref().map(in_words);
        let together = together.map_or_else(String::new, |words| format!(" All VMs together: {words}."));
        match &judged.verdict {
            Verdict::Gains { faster } => Answer {
                tone: Tone::Good,
                line: format!(
                    "Yes, switch the agent on: {} {} while it acted.",
                    ran(faster),
                    by(judged, |percent| percent > 0.0)
                ),
                next: format!(
                    "No VM was claimed to be slower.{together} Chance alone gives such a result in at most 5 of 100 trials."
                ),
            },
            Verdict::Harms { slower } => Answer {
                tone: Tone::Bad,
                line: format!(
                    "No, leave the agent off for these VMs: {} {} while it acted.",
                    ran(slower),
                    by(judged, |percent| percent < 0.0)
                ),
                next: format!(
                    "Other VMs may still gain: the table shows each.{together} Please attach to-share.tar.gz to an issue."
                ),
            },
            Verdict::NoDifference => Answer::neutral(
                "It makes no difference: the agent acted, and no VM was measurably faster or slower.",
                format!("There is no reason to switch it on for these VMs, and it did no harm.{together}"),
            ),
            Verdict::NothingDone => Answer::neutral(
                "It makes no difference: the agent found nothing to improve on these VMs.",
                "It had no home and no limit in force when it acted. That is usual on hosts where VMs do not disturb each other.",
            ),
            Verdict::NotComplete => Answer::neutral(
                format!(
                    "Not known yet: {} of {} pairs of blocks are measured.",
                    trial.pairs_done(),
                    trial.plan.blocks.len() / 2
                ),
                "Nothing is claimed before the end. The same command continues.",
            ),
            Verdict::NotMeasured => Answer::neutral(
                "Not known: no VM worked for long enough to be measured.",
                "Repeat the trial while the VMs have work to do.",
            ),
        }
    }

    fn of_sections(report: &Report) -> Answer {
        let of = |wanted: Bearing| -> Vec<&Section> {
            let is_it = |section: &&Section| matches!(section.outcome, Outcome::Measured { bearing, .. } if bearing == wanted);
            report.sections.iter().filter(is_it).collect()
        };
        let (gains, costs, neither) = (of(Bearing::For), of(Bearing::Against), of(Bearing::Neither));
        let measured = gains.len() + costs.len() + neither.len();
        let line = match (measured, gains.len(), costs.len()) {
            (0, _, _) => {
                return Answer::neutral(
                    "Not known: nothing could be measured here.",
                    "The reasons are below.",
                );
            }
            (_, 0, 0) => {
                "Probably not needed: nothing was found here that the agent could improve.".to_owned()
            }
            (_, 0, costs) => format!(
                "Probably not: of {measured} measurements, {costs} spoke against the agent and none for it."
            ),
            (_, gains, 0) => {
                format!(
                    "Worth a trial: {gains} of {measured} measurements found something that the agent can improve."
                )
            }
            (_, gains, costs) => format!(
                "Worth a careful trial: of {measured} measurements, {gains} found something that the agent can improve, and {costs} \
                 spoke against it."
            ),
        };
        let questions = |sections: &[&Section]| -> String {
            let questions: Vec<String> = sections
                .iter()
                .map(|section| format!("“{}”", section.topic.question()))
                .collect();
            questions.join(", ")
        };
        let named = |what: &str, sections: &[&Section]| match sections.len() {
            0 => String::new(),
            1 => format!("{what} speaks the answer to {}. ", questions(sections)),
            _ => format!("{what} speak the answers to {}. ", questions(sections)),
        };
        let next = match costs.iter().any(|section| section.topic == Topic::Counters) {
            true => {
                "The agent itself was not tried on VMs here. A trial needs hardware counters, which do not all work on this host."
            }
            false => {
                "The agent itself was not tried on VMs here. To try it, start it with `homenode run --mode act`; then `homenode evidence \
                 --only crossover -o DIR` switches it on and off by the toss of a coin for an hour, and compares."
            }
        };
        let (gains, costs) = (named("For it", &gains), named("Against it", &costs));
        Answer::neutral(line, format!("{gains}{costs}{next}"))
    }
}

/// Returns `web and db ran`, or all VMs together.
fn ran(vms: &[String]) -> String {
    match vms {
        [] => "all VMs together ran".to_owned(),
        [vm] => format!("{vm} ran"),
        [vms @ .., last] if vms.len() < 4 => format!("{} and {last} ran", vms.join(", ")),
        vms => format!("{} VMs ran", vms.len()),
    }
}

/// Returns by how much the claimed effects of a sign make VMs faster or slower, or all together if none of a VM is claimed.
fn by(judged: &Judged, is_it: fn(f64) -> bool) -> String {
    let claimed = |effects: Vec<&Effect>| -> Vec<f64> {
        let effects = effects
            .into_iter()
            .filter(|effect| effect.is_claimed && is_it(effect.percent));
        effects.map(|effect| effect.percent).collect()
    };
    let of_vms = claimed(judged.vms.values().collect());
    let percents = match of_vms.is_empty() {
        true => claimed(judged.all.iter().collect()),
        false => of_vms,
    };
    let sizes = percents.iter().map(|percent| percent.abs());
    let (least, most) = sizes.fold((f64::INFINITY, 0.0_f64), |(least, most), size| {
        (least.min(size), most.max(size))
    });
    let direction = if is_it(1.0) { "faster" } else { "slower" };
    let (least, most) = (format!("{least:.1}"), format!("{most:.1}"));
    match least == most {
        true => format!("{most} % {direction}"),
        false => format!("{least} to {most} % {direction}"),
    }
}

fn in_words(effect: &Effect) -> String {
    let direction = if effect.percent < 0.0 { "slower" } else { "faster" };
    format!(
        "{:.1} % {direction} (interval {:+.1} to {:+.1} %)",
        effect.percent.abs(),
        effect.low_percent,
        effect.high_percent
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::HostFacts;
    use crate::section::With;

    fn report(bearings: &[Bearing]) -> Report {
        let sections = Topic::ALL.into_iter().zip(bearings).map(|(topic, bearing)| {
            Section::measured(topic, With::Processes, "How.", "What.", *bearing, Vec::new())
        });
        sections.fold(
            Report::begun("1", "c", HostFacts::default()),
            Report::with_section,
        )
    }

    #[test]
    fn without_a_trial_of_the_agent_nothing_is_promised() {
        use Bearing::{Against, For, Neither};
        for (bearings, begins) in [
            (&[][..], "Not known"),
            (&[Neither, Neither], "Probably not needed"),
            (&[Neither, Against], "Probably not: of 2 measurements, 1"),
            (&[For, Neither, For], "Worth a trial: 2 of 3"),
            (&[For, Against], "Worth a careful trial: of 2 measurements, 1"),
        ] {
            let answer = Answer::of(&report(bearings));
            assert!(answer.line.starts_with(begins), "{answer:?}");
            assert_eq!(answer.tone, Tone::Neutral);
            let is_named = answer
                .next
                .contains("Against it speaks the answer to “Do the hardware counters count correctly?”");
            assert_eq!(is_named, bearings.get(1) == Some(&Against), "{answer:?}");
            assert!(
                is_named || bearings.is_empty() || answer.next.contains("--only crossover"),
                "{answer:?}"
            );
        }
    }

    #[test]
    fn an_emulated_machine_says_nothing_about_speed() {
        let mut report = report(&[Bearing::For]);
        report.host.hardware = Hardware::Emulated;
        assert!(Answer::of(&report).line.contains("mean nothing"));
    }
}
