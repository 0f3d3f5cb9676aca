//! `homenode recommend walk`: shows open recommendations one after the other, and asks what to do with each.
//!
//! Recommendations whose gain is predicted together are one step: they are applied or rejected together.

use std::collections::BTreeSet;
use std::io::{BufRead, Write as _};

use homenode_api::answer::{Recommendation, Recommendations};
use homenode_api::{AskError, Request};
use homenode_control::recommendations::State;
use homenode_screens::printable::OneLine;

use super::{remembered, until};
use crate::ask::ask_agent;
use crate::options::AgentArgs;
use crate::print::{print, print_done};

/// The text that an operator must read before the first decision.
const INTRODUCTION: &str = "A recommendation is a change that the agent would make to a VM; it waits until you apply or reject it.
gain:   how much faster the VM's work is predicted to run than it does now; - where nothing is predicted
until:  when it lapses, unless its policy still wants it
apply:  the agent makes the change; policy `arrange` then measures the speed, and undoes a home that does not pay
reject: the agent does not propose it again for a day
undo:   `homenode mode VM observe` lifts a VM's home and limits, stopping the agent those of all; moved memory stays";

/// Returns this text if recommendations wait and none was decided on yet.
pub(super) fn introduction(all: &[Recommendation]) -> Option<&'static str> {
    let is_decided =
        |one: &Recommendation| matches!(one.state, State::Approved | State::Applied | State::Rejected);
    let is_open = |one: &Recommendation| one.state == State::Open;
    (all.iter().any(is_open) && !all.iter().any(is_decided)).then_some(INTRODUCTION)
}

/// Returns the open recommendations, by number, with those that were predicted together in one step.
fn steps(all: &[Recommendation]) -> Vec<Vec<&Recommendation>> {
    let mut open: Vec<&Recommendation> = all.iter().filter(|one| one.state == State::Open).collect();
    open.sort_by_key(|one| one.id);
    let mut steps = Vec::new();
    while let Some(first) = open.first() {
        let mut ids: BTreeSet<u64> = first.together.iter().copied().collect();
        ids.insert(first.id);
        let (step, rest) = open.iter().copied().partition(|one| ids.contains(&one.id));
        steps.push(step);
        open = rest;
    }
    steps
}

/// An answer to the question about one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Said {
    Apply,
    Reject,
    Skip,
    Quit,
}

impl Said {
    /// Reads an answer: a word or its first letter. An empty line skips the step.
    fn of(line: &str) -> Option<Said> {
        match line.trim().to_ascii_lowercase().as_str() {
            "a" | "apply" => Some(Said::Apply),
            "r" | "reject" => Some(Said::Reject),
            "" | "s" | "skip" => Some(Said::Skip),
            "q" | "quit" => Some(Said::Quit),
            _ => None,
        }
    }
}

/// Talks with the operator: on standard output, or on standard error if that is for JSON.
struct Talk<I> {
    input: I,
    is_json: bool,
}

impl<I: BufRead> Talk<I> {
    fn line(&self, text: &str) {
        match self.is_json {
            true => complain!("{text}"),
            false => say!("{text}"),
        }
    }

    /// Asks until the answer is one of the known ones. The end of the input means quit.
    fn ask(&mut self) -> anyhow::Result<Said> {
        loop {
            let question = "[a]pply, [r]eject, [s]kip (Enter), [q]uit: ";
            match self.is_json {
                true => eprint!("{question}"),
                false => prompt(question),
            }
            let mut line = String::new();
            if self.input.read_line(&mut line)? == 0 {
                self.line("");
                return Ok(Said::Quit);
            }
            match Said::of(&line) {
                Some(said) => return Ok(said),
                None => self.line(&format!(
                    "`{}` is not an answer; type a, r, s or q, then Enter",
                    OneLine(line.trim())
                )),
            }
        }
    }

    fn show(&self, step: &[&Recommendation]) {
        for one in step {
            let gain = one
                .gain
                .map(|gain| format!(", predicted gain {:+.0} %", 100.0 * gain));
            self.line(&format!(
                "{}: {} ({}{}, until {})\n   {}",
                one.id,
                OneLine(&one.text),
                one.policy,
                gain.unwrap_or_default(),
                until(one.expires),
                OneLine(&one.reason)
            ));
        }
        if step.len() > 1 {
            self.line("   These were predicted together: your answer is for all of them.");
        }
    }
}

/// Prints a question, and leaves the cursor behind it.
fn prompt(text: &str) {
    print(format_args!("{text}"));
    // A terminal that is gone is noticed when the answer is read.
    let _ = std::io::stdout().flush();
}

/// Offers an operator at a terminal to walk through the recommendations that they have just seen listed.
///
/// # Errors
/// As of [`walk`].
pub(super) fn offer(args: &AgentArgs) -> anyhow::Result<()> {
    let mut input = std::io::stdin().lock();
    let mut line = String::new();
    prompt("\nGo through them one after the other (`homenode recommend walk`)? [y/N] ");
    input.read_line(&mut line)?;
    match line.trim() {
        "y" | "Y" | "yes" => {
            let talk = Talk {
                input,
                is_json: false,
            };
            go_through(&remembered(args.dir())?, args, talk)
        }
        _ => Ok(()),
    }
}

/// Walks through the open recommendations with an operator whose answers are the lines of `input`.
///
/// # Errors
/// No agent, or input that cannot be read.
pub(super) fn walk(args: &AgentArgs, input: impl BufRead) -> anyhow::Result<()> {
    let all = remembered(args.dir())?;
    let talk = Talk {
        input,
        is_json: args.json(),
    };
    if let Some(introduction) = introduction(&all) {
        talk.line(&format!("{introduction}\n"));
    }
    go_through(&all, args, talk)
}

fn go_through(all: &[Recommendation], args: &AgentArgs, mut talk: Talk<impl BufRead>) -> anyhow::Result<()> {
    let is_json = talk.is_json;
    let steps = steps(all);
    if steps.is_empty() {
        talk.line("no recommendation waits; `homenode recommend --all` lists closed ones");
    }
    let count = steps.iter().flatten().count();
    let mut decided: Vec<Recommendation> = Vec::new();
    let ask = |request: &Request| ask_agent::<Recommendation>(args.dir(), request);
    let done = decide(&steps, &mut talk, ask, &mut decided);
    if is_json {
        let recommendations = decided;
        return print_done("recommendations", &Recommendations { recommendations }, done);
    }
    if count > 0 {
        let rejected = decided.iter().filter(|one| one.state == State::Rejected).count();
        let left = count - decided.len();
        say!(
            "applied {}, rejected {rejected}, left {left} as they were",
            decided.len() - rejected
        );
    }
    done
}

/// Asks about each step and has the agent do what is answered, until the operator quits. `decided` gets the agent's answers.
///
/// # Errors
/// The agent does not answer, or input cannot be read: the steps that follow are left as they are.
fn decide(
    steps: &[Vec<&Recommendation>],
    talk: &mut Talk<impl BufRead>,
    ask: impl Fn(&Request) -> anyhow::Result<Recommendation>,
    decided: &mut Vec<Recommendation>,
) -> anyhow::Result<()> {
    for step in steps {
        talk.show(step);
        let request = match talk.ask()? {
            Said::Apply => |id| Request::RecommendationApply { id },
            Said::Reject => |id| Request::RecommendationReject { id },
            Said::Skip => continue,
            Said::Quit => break,
        };
        for one in step {
            match ask(&request(one.id)) {
                Ok(answer) => decided.push(answer),
                // The recommendation expired, or another operator decided on it, while this operator was reading.
                Err(error) if matches!(error.downcast_ref(), Some(AskError::Agent(_))) => {
                    talk.line(&format!("{}: {error:#}", one.id));
                }
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use homenode_api::http::WallTime;
    use homenode_host::Act;
    use homenode_units::{NodeId, VmId};

    use super::*;

    pub(crate) fn recommendation(id: u64, state: State, together: &[u64]) -> Recommendation {
        Recommendation {
            id,
            time: WallTime(0),
            vm: "web".into(),
            vm_id: VmId(1),
            policy: "arrange".into(),
            action: Act::SetHome {
                nodes: [1].into_iter().map(NodeId).collect(),
            },
            text: "give VM web a home on node 1".into(),
            reason: "its memory is there".into(),
            gain: None,
            together: together.to_vec(),
            expires: WallTime(0),
            state,
        }
    }

    #[test]
    fn the_introduction_is_for_the_first_decision_only_and_has_six_lines_at_most() {
        let open = || recommendation(1, State::Open, &[]);
        let with = |state| introduction(&[open(), recommendation(2, state, &[])]).is_some();
        assert!(with(State::Open) && with(State::Expired));
        assert!(
            ![State::Approved, State::Applied, State::Rejected]
                .into_iter()
                .any(with)
        );
        assert!(introduction(&[recommendation(1, State::Expired, &[])]).is_none());
        assert!(INTRODUCTION.lines().count() <= 6);
    }

    #[test]
    fn each_open_recommendation_is_in_one_step_and_those_predicted_together_share_theirs() {
        let all = [
            recommendation(4, State::Open, &[2, 3]),
            recommendation(1, State::Open, &[]),
            recommendation(2, State::Open, &[4, 3]),
            // One recommendation of the step was decided on meanwhile; its partners are still one step.
            recommendation(3, State::Rejected, &[2, 4]),
        ];
        let ids: Vec<Vec<u64>> = steps(&all)
            .iter()
            .map(|step| step.iter().map(|one| one.id).collect())
            .collect();
        assert_eq!(ids, [vec![1], vec![2, 4]]);
    }

    #[test]
    fn an_answer_is_a_word_or_its_first_letter_and_enter_skips() {
        for (line, said) in [
            ("a\n", Some(Said::Apply)),
            (" Reject \n", Some(Said::Reject)),
            ("\n", Some(Said::Skip)),
            ("q", Some(Said::Quit)),
            ("yes\n", None),
        ] {
            assert_eq!(Said::of(line), said, "{line:?}");
        }
    }
}
