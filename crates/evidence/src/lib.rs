//! What the agent gains or costs on a host, as a randomised experiment that its operator can repeat.
//!
//! # Problem
//! An operator wants to know whether the agent helps the VMs of this host. A comparison of a week with it and a week without it
//! compares two weeks. VMs differ from hour to hour by more than any agent gains.
//!
//! # Approach
//! A *crossover*: the agent acts and only observes in turn, on the same VMs, in short blocks. Each *pair* of neighbouring blocks
//! has one of each kind, and a fair coin of the seed says which comes first. What drifts slowly is nearly the same in both blocks
//! of a pair. What the coin decided is the only thing that differs systematically, so the test needs no assumption about how VMs
//! behave ([`effect`]).
//!
//! # Terms
//! - *Speed* of a VM: instructions per second of CPU time that it wanted: ran, waited for, or was denied by a limit. A guest with
//!   less work is not slower.
//! - *Washout*: the beginning of a block, which does not count, because homes change and pages move then.
//! - *Effect* on a VM: its speed in blocks in which the agent acts, over its speed in those in which it only observes.
//!
//! # What it cannot see
//! Memory that the agent moved stays where it is in the next block, unless the kernel moves it. So an effect of memory is seen
//! smaller than it is, whether it is good or bad. Memory policies and what guests were told of their topology stay, too, as they
//! are not leased. The first block always only observes, and shows the host before any change.
//!
//! # Properties (tests of the same names)
//! - `a_planted_effect_is_found_with_its_sign_in_20_of_20_runs` (`tests/twin.rs`)
//! - `where_nothing_differs_at_most_one_run_in_20_claims_something` (`tests/twin.rs`)
//! - `whatever_stops_a_run_it_goes_on_where_it_was`
//! - `a_block_in_which_the_agent_did_something_else_does_not_count`
//! - `a_vm_that_is_not_counted_is_not_judged`
//! - `nothing_is_claimed_that_chance_may_have_made_or_before_the_end`
//! - `an_agent_that_did_nothing_is_said_to_have_done_nothing`

pub mod answer;
pub mod crossover;
pub mod effect;
pub mod measure;
pub mod number;
pub mod page;
pub mod read;
pub mod report;
pub mod section;
pub mod share;

pub use crossover::{Acting, Block, Crossover, Look, Subject};
pub use effect::{Effect, Verdict};
pub use report::{Report, Trial};
pub use section::{Bearing, Figure, Outcome, Section, Topic, With};
