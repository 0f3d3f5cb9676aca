//! Events that the agent reports. Each gives one line of text for people and one JSON object for programs.

use std::fmt;

use homenode_host::{CpuQuota, Decision, EventRecord, Finding, Outcome, Refusal, Sample};
use homenode_units::{Bytes, CpuSet, Ns, VmId};
use schemars::JsonSchema;
use serde::Serialize;

/// Something that happened in a cycle.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// A VM was seen for the first time.
    Appeared {
        /// The VM.
        vm: VmId,
        /// Its name.
        name: String,
        /// Online vCPUs.
        vcpus: usize,
        /// Memory of the guest.
        memory_bytes: Bytes,
    },
    /// A VM is gone.
    Vanished {
        /// The VM.
        vm: VmId,
        /// Its name.
        name: String,
    },
    /// Another program or the operator changed a vCPU's affinity. From now on the agent leaves the VM's vCPUs alone.
    ChangedByOther {
        /// The VM.
        vm: VmId,
        /// Its name.
        name: String,
        /// The vCPU.
        vcpu: u16,
        /// The affinity that the agent had set.
        expected: CpuSet,
        /// The affinity in force.
        found: CpuSet,
    },
    /// All vCPUs of a VM that was left alone may run anywhere again, so the agent manages the VM again.
    GivenBack {
        /// The VM.
        vm: VmId,
        /// Its name.
        name: String,
    },
    /// Another program or the operator changed the CPU quota that the agent had set. From now on the agent leaves the quota
    /// alone.
    QuotaChangedByOther {
        /// The VM.
        vm: VmId,
        /// Its name.
        name: String,
        /// The quota that the agent had set.
        expected: CpuQuota,
        /// The quota in force.
        found: Option<CpuQuota>,
    },
    /// A quota that the agent left alone was removed, so the agent decides on the VM's quota again.
    QuotaGivenBack {
        /// The VM.
        vm: VmId,
        /// Its name.
        name: String,
    },
    /// A decision and its outcome.
    Decided {
        /// Name of the VM.
        name: String,
        /// The decision and its reason.
        #[serde(flatten)]
        decision: Decision,
        /// The outcome.
        result: Outcome,
    },
    /// A decision that waits for the operator's approval.
    Recommended {
        /// Number of the recommendation.
        id: u64,
        /// Name of the VM.
        name: String,
        /// The decision and its reason.
        #[serde(flatten)]
        decision: Decision,
        /// The decision in words.
        text: String,
        /// Predicted gain, as a share of the VM's speed.
        gain: Option<f64>,
    },
    /// The operator approved a recommendation.
    Approved {
        /// Number of the recommendation.
        id: u64,
        /// The VM.
        vm: VmId,
        /// Its name.
        name: String,
        /// The policy that recommended it.
        policy: &'static str,
        /// The recommendation.
        text: String,
    },
    /// The operator rejected a recommendation.
    Rejected {
        /// Number of the recommendation.
        id: u64,
        /// The VM.
        vm: VmId,
        /// Its name.
        name: String,
        /// The policy that recommended it.
        policy: &'static str,
        /// The recommendation.
        text: String,
    },
    /// A recommendation expired before it was approved, or before it could be carried out.
    Expired {
        /// Number of the recommendation.
        id: u64,
        /// The VM.
        vm: VmId,
        /// Its name.
        name: String,
        /// The policy that recommended it.
        policy: &'static str,
        /// The recommendation.
        text: String,
    },
    /// A finding that leads to no action.
    Found {
        /// Name of the VM, if it concerns one.
        name: Option<String>,
        /// The finding, and what to do about it.
        #[serde(flatten)]
        finding: Finding,
    },
    /// The host refused a whole plan; a new one is made in the next cycle.
    Refused {
        /// Why the host refused it.
        refusal: Refusal,
    },
}

fn name_of(sample: &Sample, vm: VmId) -> String {
    sample.vm(vm).map_or_else(|| vm.to_string(), |vm| vm.name.clone())
}

impl Event {
    pub(crate) fn decided(decision: Decision, result: Outcome, sample: &Sample) -> Event {
        Event::Decided {
            name: name_of(sample, decision.action.vm),
            decision,
            result,
        }
    }

    pub(crate) fn found(finding: Finding, sample: &Sample) -> Event {
        Event::Found {
            name: finding.vm.map(|vm| name_of(sample, vm)),
            finding,
        }
    }

    /// Returns the event in the form in which it is stored and searched. `at` is its time by the host's clock.
    pub fn record(&self, at: Ns) -> EventRecord {
        let (kind, vm, name) = match self {
            Event::Appeared { vm, name, .. } => ("appeared", Some(*vm), Some(name)),
            Event::Vanished { vm, name } => ("vanished", Some(*vm), Some(name)),
            Event::ChangedByOther { vm, name, .. } => ("changed-by-other", Some(*vm), Some(name)),
            Event::GivenBack { vm, name } => ("given-back", Some(*vm), Some(name)),
            Event::QuotaChangedByOther { vm, name, .. } => ("quota-changed-by-other", Some(*vm), Some(name)),
            Event::QuotaGivenBack { vm, name } => ("quota-given-back", Some(*vm), Some(name)),
            Event::Decided { name, decision, .. } => {
                (EventRecord::DECIDED, Some(decision.action.vm), Some(name))
            }
            Event::Recommended { name, decision, .. } => {
                ("recommended", Some(decision.action.vm), Some(name))
            }
            Event::Approved { vm, name, .. } => ("approved", Some(*vm), Some(name)),
            Event::Rejected { vm, name, .. } => ("rejected", Some(*vm), Some(name)),
            Event::Expired { vm, name, .. } => ("expired", Some(*vm), Some(name)),
            Event::Found { name, finding } => ("found", finding.vm, name.as_ref()),
            Event::Refused { .. } => ("refused", None, None),
        };
        let (policy, action, outcome) = match self {
            Event::Decided { decision, result, .. } => (
                Some(decision.policy),
                Some(decision.action.act.kind()),
                Some(result.kind()),
            ),
            Event::Recommended { decision, .. } => {
                (Some(decision.policy), Some(decision.action.act.kind()), None)
            }
            Event::Approved { policy, .. }
            | Event::Rejected { policy, .. }
            | Event::Expired { policy, .. } => (Some(*policy), None, None),
            Event::Found { finding, .. } => (Some(finding.policy), None, None),
            _ => (None, None, None),
        };
        EventRecord {
            at,
            kind: kind.to_owned(),
            vm,
            name: name.cloned(),
            policy: policy.map(str::to_owned),
            action: action.map(str::to_owned),
            outcome: outcome.map(str::to_owned),
            text: self.to_string(),
        }
    }
}

fn recommended(
    f: &mut fmt::Formatter<'_>,
    id: u64,
    decision: &Decision,
    text: &str,
    gain: Option<f64>,
) -> fmt::Result {
    let Decision { policy, reason, .. } = decision;
    write!(f, "{policy}: recommendation {id}: {text}")?;
    if let Some(gain) = gain {
        write!(f, ", {:+.0} percent of its speed", 100.0 * gain)?;
    }
    write!(f, " ({reason})")
}

fn in_words(vcpus: usize) -> String {
    format!("{vcpus} vCPU{}", if vcpus == 1 { "" } else { "s" })
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Appeared {
                name,
                vcpus,
                memory_bytes,
                ..
            } => write!(f, "VM {name} appeared: {}, {memory_bytes}", in_words(*vcpus)),
            Event::Vanished { name, .. } => write!(f, "VM {name} is gone"),
            Event::ChangedByOther {
                name,
                vcpu,
                expected,
                found,
                ..
            } => write!(
                f,
                "VM {name}: another program changed the CPUs of vCPU {vcpu} from {expected}, set by the agent, to {found}; the agent leaves the VM's vCPUs alone"
            ),
            Event::GivenBack { name, .. } => write!(
                f,
                "VM {name}: its vCPUs may run anywhere again, so the agent manages it again"
            ),
            Event::QuotaChangedByOther {
                name,
                expected,
                found,
                ..
            } => {
                let found = found.map_or("none".to_owned(), |found| found.to_string());
                write!(
                    f,
                    "VM {name}: another program changed its CPU quota from {expected}, set by the agent, to {found}; the agent leaves it alone until it is removed or the VM's permit is set again"
                )
            }
            Event::QuotaGivenBack { name, .. } => write!(
                f,
                "VM {name}: its CPU quota was removed, so the agent manages it again"
            ),
            Event::Decided {
                name,
                decision,
                result,
            } => {
                write!(f, "{}: VM {name}: {}", decision.policy, decision.reason)?;
                match result {
                    Outcome::Done => Ok(()),
                    Outcome::Renewed => write!(f, " (renewed)"),
                    Outcome::DryRun => write!(f, " (dry run)"),
                    Outcome::Moved { moved, left, busy } => {
                        write!(f, " ({} moved, {} left", moved.to_bytes(), left.to_bytes())?;
                        if busy.0 > 0 {
                            write!(f, ", {} busy)", busy.to_bytes())
                        } else {
                            write!(f, ")")
                        }
                    }
                    Outcome::Failed(error) => write!(f, " — failed: {error}"),
                }
            }
            Event::Recommended {
                id,
                decision,
                text,
                gain,
                ..
            } => recommended(f, *id, decision, text, *gain),
            Event::Approved { id, policy, text, .. } => {
                write!(f, "{policy}: recommendation {id} is approved: {text}")
            }
            Event::Rejected { id, policy, text, .. } => {
                write!(f, "{policy}: recommendation {id} is rejected: {text}")
            }
            Event::Expired { id, policy, text, .. } => {
                write!(f, "{policy}: recommendation {id} has expired: {text}")
            }
            Event::Found { finding, .. } => write!(f, "{}: {}", finding.policy, finding.message),
            Event::Refused { refusal } => write!(f, "plan refused: {refusal}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use homenode_host::{Act, Lever};
    use serde_json::json;

    use super::*;

    #[test]
    fn a_record_has_the_words_of_the_json() {
        let (vm, name, policy) = (VmId(1), "web".to_owned(), "arrange");
        let lever = Lever::Home;
        let decision = Decision {
            policy,
            action: Act::Lift { lever }.on(vm),
            reason: "why".into(),
        };
        let finding = Finding {
            policy,
            vm: Some(vm),
            message: "what".into(),
        };
        let refusal = Refusal::UnknownVm { vm };
        let text = "lift".to_owned();
        let events = [
            Event::Vanished {
                vm,
                name: name.clone(),
            },
            Event::QuotaGivenBack {
                vm,
                name: name.clone(),
            },
            Event::Approved {
                id: 1,
                vm,
                name: name.clone(),
                policy,
                text: text.clone(),
            },
            Event::Recommended {
                id: 1,
                name: name.clone(),
                decision: decision.clone(),
                text,
                gain: None,
            },
            Event::Decided {
                name: name.clone(),
                decision,
                result: Outcome::DryRun,
            },
            Event::Found {
                name: Some(name),
                finding,
            },
            Event::Refused { refusal },
        ];
        for event in events {
            let (record, json) = (event.record(Ns(7)), json!(event));
            let words = [&record.name, &record.policy, &record.action, &record.outcome];
            let there = [
                &json["name"],
                &json["policy"],
                &json["action"],
                &json["result"]["outcome"],
            ];
            assert_eq!(json!(words), json!(there), "{json}");
            assert_eq!(
                (json!(record.kind), json!(record.vm)),
                (json["event"].clone(), json["vm"].clone())
            );
        }
    }
}
