//! What an epoch took in beside its sample, and what was decided in it. With the samples that is all from which a run can be
//! repeated ([`crate::replay`]).

use homenode_host::{Action, Decision, Outcome, Receipt, Refusal};
use homenode_policy::placement::{Announcement, Asked};
use homenode_units::{NodeSet, Ns, VmId};
use serde::{Deserialize, Serialize};

use crate::Config;

/// Inputs that are kept between two epochs: a host may not be readable for days, and clients ask meanwhile. It
/// bounds memory, and is no setting.
const INPUTS_MAX: usize = 4096;

/// Something that the loop was told beside samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "input", rename_all = "kebab-case")]
pub enum Input {
    /// A VM whose home an earlier agent chose ([`crate::Control::adopt`]).
    Adopted {
        /// Which.
        vm: VmId,
        /// That home.
        home: Option<NodeSet>,
    },
    /// The operator set a permit; which is in the next sample ([`crate::Control::was_set`]).
    PermitSet {
        /// Whose.
        vm: VmId,
    },
    /// A VM is about to start ([`crate::Control::announce`]).
    Announced(Announcement),
    /// libvirt asked for nodes ([`crate::Control::promise`]).
    Promised(Asked),
    /// The operator took back a promise ([`crate::Control::drop_promise`]).
    PromiseDropped {
        /// Its number.
        id: u64,
    },
    /// The operator agreed to a recommendation ([`crate::Control::approve`]).
    Approved {
        /// Its number.
        id: u64,
    },
    /// The operator does not want what was recommended ([`crate::Control::reject`]).
    Rejected {
        /// Its number.
        id: u64,
    },
    /// The operator's settings were read anew ([`crate::Control::take_over`]).
    Configured {
        /// All that are in force from then on.
        config: Box<Config>,
    },
    /// The operator said which nodes are to be emptied ([`crate::Control::drain`]).
    Drained {
        /// All of them.
        nodes: NodeSet,
    },
    /// The operator wants nothing changed for so long ([`crate::Control::pause`]); zero ends a pause.
    Paused {
        /// How long.
        span: Ns,
    },
    /// A client asked how much memory a VM uses ([`crate::Control::want_working_set`]).
    WorkingSetWanted {
        /// Of which VM.
        vm: VmId,
        /// Length of windows, where it named one.
        window: Option<Ns>,
        /// How long it waits.
        wait: Ns,
    },
}

/// Inputs in order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Inputs {
    /// What came, the first first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub list: Vec<Input>,
    /// How many more came than are kept.
    #[serde(skip_serializing_if = "is_zero")]
    pub missed_count: u64,
}

/// A decision as it is recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decided {
    /// Policy that decided.
    pub policy: String,
    /// What to do.
    #[serde(flatten)]
    pub action: Action,
    /// Why.
    pub reason: String,
}

/// An epoch but for its sample.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Turn {
    /// How many epochs of this run were before it: one that is missing shows.
    pub number: u64,
    /// What came before it, since the epoch before.
    #[serde(skip_serializing_if = "Inputs::is_empty")]
    pub before: Inputs,
    /// The plan, in the order in which it was to be carried out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub decided: Vec<Decided>,
    /// What came while it was carried out.
    #[serde(skip_serializing_if = "Inputs::is_empty")]
    pub during: Inputs,
    /// What became of each decision; of none where all were refused.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub outcomes: Vec<Outcome>,
    /// Why all were, if they were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<Refusal>,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl Inputs {
    pub(crate) fn push(&mut self, input: Input) {
        if self.list.len() < INPUTS_MAX {
            self.list.push(input);
        } else {
            self.missed_count += 1;
        }
    }

    /// Whether there were none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty() && self.missed_count == 0
    }
}

impl From<&Decision> for Decided {
    fn from(decision: &Decision) -> Decided {
        Decided {
            policy: decision.policy.to_owned(),
            action: decision.action.clone(),
            reason: decision.reason.clone(),
        }
    }
}

impl Turn {
    pub(crate) fn answered(&mut self, answer: &Result<Receipt, Refusal>) {
        match answer {
            Ok(receipt) => self.outcomes.clone_from(&receipt.outcomes),
            Err(refusal) => self.refused = Some(refusal.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use homenode_host::{Act, CpuQuota, FrameMove, GuestTopology, Lever, Limit, Percent};
    use homenode_units::{Bytes, NodeId, Pages};

    use super::*;

    #[test]
    fn each_act_that_is_decided_reads_back() {
        let (node, lease_ns, pages_max) = (NodeId(1), Ns(5), Pages(7));
        let nodes = NodeSet::one(node);
        let limits = [
            Limit::CpuQuota(CpuQuota::of(0.5, Ns::from_millis(30))),
            Limit::CacheWays(Percent(20)),
            Limit::MemoryBandwidth(Percent(30)),
            Limit::Memory(Bytes::from_gib(1)),
        ];
        let mut acts = vec![
            Act::PinVcpus {
                vcpus: vec![0, 2],
                cpus: "1-3".parse().unwrap(),
            },
            Act::SetHome { nodes: nodes.clone() },
            Act::MovePages {
                from: NodeSet::new(),
                to: nodes,
                pages_max,
            },
            Act::MoveVirtualNode {
                virtual_node: 1,
                to: node,
                pages_max,
            },
            Act::MoveFrames {
                moves: vec![FrameMove {
                    frame: 9,
                    pages: Pages(1),
                    from: node,
                    to: NodeId(0),
                }],
            },
            Act::SetMemoryPolicy {
                policy: "round-4k+carrefour".parse().unwrap(),
            },
            Act::Watch {
                window_ns: Ns(3),
                lease_ns,
            },
            Act::PublishTopology {
                topology: GuestTopology {
                    vcpus: vec![Some(node), None],
                    memory: vec![None],
                },
            },
            Act::Lift { lever: Lever::Home },
        ];
        acts.extend(limits.map(|limit| Act::Limit { limit, lease_ns }));
        for act in acts {
            let decided = Decided {
                policy: "somebody".into(),
                action: act.on(VmId(3)),
                reason: "why".into(),
            };
            let text = serde_json::to_string(&decided).unwrap();
            assert_eq!(serde_json::from_str::<Decided>(&text).unwrap(), decided, "{text}");
        }
    }
}
