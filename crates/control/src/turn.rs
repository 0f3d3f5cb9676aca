//! The inputs of a cycle other than its sample, and the decisions of the cycle. Together with the samples, they are enough to
//! repeat a run ([`crate::replay`]).

use homenode_host::{Action, Decision, Outcome, Receipt, Refusal};
use homenode_policy::placement::{Announcement, Asked};
use homenode_units::{NodeSet, Ns, VmId};
use serde::{Deserialize, Serialize};

use crate::Config;

/// Most inputs kept between two cycles: if a host cannot be read for days, clients still send requests. Bounds memory, and is not
/// a setting.
const INPUTS_MAX: usize = 4096;

/// An input to the loop other than a sample.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "input", rename_all = "kebab-case")]
pub enum Input {
    /// An earlier agent had given a VM this home ([`crate::Control::adopt`]).
    Adopted {
        /// The VM.
        vm: VmId,
        /// The VM's home.
        home: Option<NodeSet>,
    },
    /// The operator set a permit, which the next sample contains ([`crate::Control::was_set`]).
    PermitSet {
        /// The VM.
        vm: VmId,
    },
    /// A VM is about to start ([`crate::Control::announce`]).
    Announced(Announcement),
    /// libvirt requested nodes ([`crate::Control::reserve`]).
    #[serde(alias = "promised")]
    Reserved(Asked),
    /// The operator withdrew a reservation ([`crate::Control::drop_reservation`]).
    #[serde(alias = "promise-dropped")]
    ReservationDropped {
        /// Number of the reservation.
        id: u64,
    },
    /// The operator approved a recommendation ([`crate::Control::approve`]).
    Approved {
        /// Number of the recommendation.
        id: u64,
    },
    /// The operator rejected a recommendation ([`crate::Control::reject`]).
    Rejected {
        /// Number of the recommendation.
        id: u64,
    },
    /// The operator's settings were reloaded ([`crate::Control::take_over`]).
    Configured {
        /// All settings in force from then on.
        config: Box<Config>,
    },
    /// The operator chose the nodes to drain ([`crate::Control::drain`]).
    Drained {
        /// All nodes to be drained.
        nodes: NodeSet,
    },
    /// The operator paused all changes for this long ([`crate::Control::pause`]); zero ends a pause.
    Paused {
        /// Length of the pause.
        span: Ns,
    },
    /// The operator wants a VM only observed for this long ([`crate::Control::observe_for`]); zero ends it.
    Observing {
        /// The VM.
        vm: VmId,
        /// How long.
        span: Ns,
    },
    /// A client asked how much memory a VM uses ([`crate::Control::want_working_set`]).
    WorkingSetWanted {
        /// The VM.
        vm: VmId,
        /// Length of observation windows, if the client named one.
        window: Option<Ns>,
        /// How long the client waits.
        wait: Ns,
    },
}

/// Inputs in order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Inputs {
    /// The inputs, the oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub list: Vec<Input>,
    /// Number of further inputs that could not be kept.
    #[serde(skip_serializing_if = "is_zero")]
    pub missed_count: u64,
}

/// A decision in recorded form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decided {
    /// Policy that decided.
    pub policy: String,
    /// The action.
    #[serde(flatten)]
    pub action: Action,
    /// The reason.
    pub reason: String,
}

/// A cycle without its sample.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Turn {
    /// Number of earlier cycles in this run, by which a missing cycle is noticed.
    pub number: u64,
    /// Inputs before this cycle, since the previous one.
    #[serde(skip_serializing_if = "Inputs::is_empty")]
    pub before: Inputs,
    /// The plan, in the order in which it was to be carried out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub decided: Vec<Decided>,
    /// Inputs while the plan was carried out.
    #[serde(skip_serializing_if = "Inputs::is_empty")]
    pub during: Inputs,
    /// Outcome of each decision; empty if the plan was refused.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub outcomes: Vec<Outcome>,
    /// Why the plan was refused, if it was.
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

    /// Returns true if there were no inputs, kept or not.
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
    use homenode_host::{Act, CpuQuota, FrameMove, GuestTopology, Lever, Limit, Percent, VmSettings};
    use homenode_units::{Bytes, NodeId, Pages};

    use super::*;

    #[test]
    fn inputs_that_were_recorded_under_their_names_up_to_0_2_0_are_read() {
        let asked = Asked {
            vcpus: 2,
            memory_mib: 64,
            huge_page_bytes: None,
        };
        for (text, input) in [
            (
                r#"{"input":"promised","vcpus":2,"memory_mib":64}"#,
                Input::Reserved(asked),
            ),
            (
                r#"{"input":"promise-dropped","id":3}"#,
                Input::ReservationDropped { id: 3 },
            ),
        ] {
            assert_eq!(serde_json::from_str::<Input>(text).unwrap(), input);
        }
    }

    #[test]
    fn settings_of_vms_that_were_recorded_up_to_0_2_0_are_read() {
        let settings = VmSettings {
            anti_affinity: Some("db".to_owned()),
            affinity: Some("app".to_owned()),
            ..VmSettings::default()
        };
        let now = serde_json::to_string(&settings).unwrap();
        let before = now
            .replace("anti_affinity", "apart")
            .replace("affinity", "together");
        assert_eq!(serde_json::from_str::<VmSettings>(&before).unwrap(), settings);
    }

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
                policy: "external".into(),
                action: act.on(VmId(3)),
                reason: "why".into(),
            };
            let text = serde_json::to_string(&decided).unwrap();
            assert_eq!(serde_json::from_str::<Decided>(&text).unwrap(), decided, "{text}");
        }
    }
}
