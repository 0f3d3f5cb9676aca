//! `policies.release-hypercall`: what it costs that a guest tells its hypervisor of every page that it releases
//! [Policies, sections 4.2.3 and 4.2.4].

use homenode_twin::ReleaseCalls;
use homenode_units::Placing;

use super::{System, time_of};
use crate::experiment::{Decision, Experiment};
use crate::experiments::table;
use crate::run::Run;
use crate::verdict::Measured;
use crate::work::Outcomes;

/// Section 4.2.
pub const EXPERIMENT: Experiment = Experiment {
    claim: "policies.release-hypercall",
    runs: || CALLS.map(|(_, calls)| run(calls)).to_vec(),
    decide,
};

const PROGRAM: &str = "wrmem";
const CALLS: [(&str, ReleaseCalls); 4] = [
    ("none", ReleaseCalls::None),
    ("empty, one per page", ReleaseCalls::Empty),
    ("one per page", ReleaseCalls::Each),
    ("queues of four partitions", ReleaseCalls::Batched),
];

fn run(calls: ReleaseCalls) -> Run {
    let mut run = System::XenPlus.run(PROGRAM, Placing::FirstTouch.alone());
    run.scenario.vms[0].release_calls = calls;
    run
}

fn decide(outcomes: &Outcomes) -> Result<Decision, String> {
    let base = time_of(outcomes, &run(ReleaseCalls::None), 0)?;
    let mut measured = Measured::default();
    let mut rows = Vec::new();
    for (name, calls) in CALLS {
        let run = run(calls);
        let factor = time_of(outcomes, &run, 0)? / base;
        let share = outcomes.of(&run)?.vms[0]
            .releases
            .and_then(|releases| releases.invalidating_share())
            .map(|share| 100.0 * share);
        match calls {
            ReleaseCalls::Empty => {
                measured.numbers.insert("slowdown_factor".to_owned(), factor);
            }
            ReleaseCalls::Batched => {
                let share = share.ok_or("no queue was sent")?;
                measured.numbers.insert("invalidation_pct".to_owned(), share);
            }
            ReleaseCalls::None | ReleaseCalls::Each => {}
        }
        rows.push((name.to_owned(), vec![factor, share.unwrap_or(0.0)]));
    }
    let header = [
        "calls",
        "time over that without",
        "invalidating, % of the time of calls",
    ];
    Ok(Decision {
        measured,
        set_up: vec![SET_UP.to_owned()],
        tables: vec![table(
            "wrmem on 48 vCPUs under first-touch in the hypervisor.",
            &header,
            rows,
        )],
        why: vec![WHY.to_owned()],
        ..Decision::default()
    })
}

const SET_UP: &str = "wrmem releases a page every 15 us, which is read as: each of its threads. Costs of an exit and of an invalidation \
     are estimates that stand in the twin (`engine/releases.rs`); waiting for a lock counts for neither part of a call.";

const WHY: &str = "By itself a call of 0.7 us every 15 costs a twentieth. The factor comes from the lock under which a guest puts a page on its \
     list of free ones: 48 threads hold it for an exit each, one after the other. Exits cost 1000 to 2000 cycles, and the upper end \
     would give the published factor; the twin has the middle, and was not moved. That the lock is held during the call is the \
     paper's for queues, and our reading for single calls.";
