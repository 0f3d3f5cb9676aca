//! What an operator says of one VM, as names and values: attributes of libvirt's metadata element, or lines of the VM's own file.

use homenode_host::{Management, Mode, Setting, VmSettings};
use homenode_units::{Bytes, BytesPerSec, CpuSet, MemoryPolicy, NodeSet, Permit};

/// Longest word by which VMs know each other.
const WORD_MAX: usize = 64;

/// What becomes of huge pages that a VM has of its nodes' pools (hugetlbfs).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PoolPages {
    /// They stay: a scheduler counts on what is free of each pool.
    #[default]
    Stay,
    /// They may move to where another node's pool has room.
    Move,
}

/// What the operator said of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OperatorSettings {
    /// Whether the agent may act on it.
    pub management: Management,
    /// How far decisions about it go at most.
    pub mode: Option<Mode>,
    /// Home nodes that the operator chose.
    pub home: Option<NodeSet>,
    /// VMs that name the same word here share no home node.
    pub apart: Option<String>,
    /// VMs that name the same word here have one home.
    pub together: Option<String>,
    /// Memory bandwidth that it is declared to need.
    pub bandwidth: Option<BytesPerSec>,
    /// What it booked.
    pub permit: Option<Permit>,
    /// How its memory is placed and moved.
    pub memory_policy: Option<MemoryPolicy>,
    /// How little memory it may be left with.
    pub memory_floor: Option<Bytes>,
    /// What becomes of its huge pages.
    pub pool_pages: PoolPages,
    /// The same as it is written.
    written: Vec<(String, String)>,
}

/// A word by which VMs know each other.
fn word(name: &str, value: &str) -> Result<String, String> {
    let is_word = !value.is_empty()
        && value.len() <= WORD_MAX
        && value
            .chars()
            .all(|sign| sign.is_ascii_alphanumeric() || "-_.".contains(sign));
    if is_word {
        return Ok(value.to_owned());
    }
    Err(format!(
        "{name}: a word of up to {WORD_MAX} letters, digits, `-`, `_` and `.` that other VMs name too is wanted"
    ))
}

impl OperatorSettings {
    /// Those of a VM that is watched and never touched.
    pub fn ignored() -> OperatorSettings {
        OperatorSettings {
            management: Management::Ignored,
            ..OperatorSettings::default()
        }
    }

    /// Reads names with their values. One that is wrong makes all of it wrong: nobody can know what the operator wanted.
    ///
    /// # Errors
    /// A sentence that names what is wrong.
    pub fn of(written: Vec<(String, String)>) -> Result<OperatorSettings, String> {
        let mut settings = OperatorSettings::default();
        for (name, value) in &written {
            let shown: String = value.chars().take(40).collect();
            match name.as_str() {
                "manage" => {
                    settings.management = match value.as_str() {
                        "yes" => Management::Managed,
                        "no" => Management::Ignored,
                        _ => return Err(format!("manage='{shown}' is neither `yes` nor `no`")),
                    }
                }
                "mode" => settings.mode = Some(value.parse().map_err(|e| format!("mode: {e}"))?),
                "home" => {
                    let nodes: NodeSet = value.parse().map_err(|e| format!("home: {e}"))?;
                    if nodes.is_empty() {
                        return Err("home='' names no node; leave it out to let Homenode choose".into());
                    }
                    settings.home = Some(nodes);
                }
                "apart" => settings.apart = Some(word("apart", value)?),
                "together" => settings.together = Some(word("together", value)?),
                "bandwidth" => {
                    settings.bandwidth = Some(value.parse().map_err(|e| format!("bandwidth: {e}"))?);
                }
                "permit" => settings.permit = Some(value.parse().map_err(|e| format!("permit: {e}"))?),
                "memory" => {
                    settings.memory_policy = Some(value.parse().map_err(|e| format!("memory: {e}"))?);
                }
                "floor" => settings.memory_floor = Some(value.parse().map_err(|e| format!("floor: {e}"))?),
                "hugepages" => {
                    settings.pool_pages = match value.as_str() {
                        "stay" => PoolPages::Stay,
                        "move" => PoolPages::Move,
                        _ => return Err(format!("hugepages='{shown}' is neither `stay` nor `move`")),
                    }
                }
                other => {
                    let other: String = other.chars().take(40).collect();
                    return Err(format!(
                        "unknown attribute `{other}`; there are manage, mode, home, apart, together, bandwidth, permit, memory, floor, hugepages"
                    ));
                }
            }
        }
        if settings.home.is_some() && (settings.apart.is_some() || settings.together.is_some()) {
            return Err(
                "home says where it lives, so apart and together have nothing to say; leave one of them out"
                    .into(),
            );
        }
        settings.written = written;
        Ok(settings)
    }

    /// The same as policies see it, given which CPUs he allows and which vCPUs he pinned by hand.
    pub fn of_vm(self, cpus_allowed: Option<CpuSet>, pinned_vcpus: Vec<u16>) -> VmSettings {
        VmSettings {
            management: self.management,
            mode: self.mode,
            home: self.home,
            apart: self.apart,
            together: self.together,
            bandwidth: self.bandwidth,
            permit: self.permit,
            memory_policy: self.memory_policy,
            memory_floor: self.memory_floor,
            cpus_allowed,
            pinned_vcpus,
            ..VmSettings::default()
        }
    }

    /// Names with their values, as they are to be written.
    pub fn written(&self) -> &[(String, String)] {
        &self.written
    }

    /// What it is with something set anew, or taken back, and everything else as it is written.
    pub fn with(&self, setting: Setting) -> OperatorSettings {
        let (key, value) = match setting {
            Setting::Permit(permit) => ("permit", permit.map(|permit| permit.to_string())),
            Setting::MemoryPolicy(policy) => ("memory", policy.map(|policy| policy.to_string())),
            Setting::MemoryFloor(floor) => (
                "floor",
                floor.map(|floor| format!("{}KiB", floor.0.div_ceil(1024))),
            ),
            Setting::Mode(mode) => ("mode", mode.map(|mode| mode.to_string())),
        };
        let new = value.map(|value| (key.to_owned(), value));
        if new.as_ref().is_some_and(|new| self.written.contains(new)) {
            return self.clone();
        }
        let others = self.written.iter().filter(|(name, _)| name != key).cloned();
        let written = others.chain(new).collect();
        OperatorSettings::of(written).expect("settings read back as they are written")
    }
}

/// What an operator wants to be set of a VM, on what is stored of it when that is done.
pub struct Change<'a> {
    /// What is to be set.
    pub settings: &'a [Setting],
    /// Whether what is stored is still what the change is meant for.
    pub holds: &'a dyn Fn(&VmSettings) -> bool,
}

impl std::fmt::Debug for Change<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Change")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

impl Change<'_> {
    /// Whether the change is meant for these settings.
    pub fn holds(&self, stored: &OperatorSettings) -> bool {
        (self.holds)(&stored.clone().of_vm(None, Vec::new()))
    }

    /// These settings with the change.
    pub fn made_on(&self, stored: &OperatorSettings) -> OperatorSettings {
        let settings = self.settings.iter();
        settings.fold(stored.clone(), |said, setting| said.with(*setting))
    }
}
