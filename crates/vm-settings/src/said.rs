//! An operator's settings for one VM, as names and values: attributes of libvirt's metadata element, or lines of the VM's
//! own file.

use homenode_host::{Management, Mode, Setting, VmSettings};
use homenode_units::{Bytes, BytesPerSec, CpuSet, MemoryPolicy, NodeSet, Permit};

/// Longest word for `apart` and `together`.
const WORD_MAX: usize = 64;

/// What may happen to a VM's huge pages from its nodes' pools (hugetlbfs).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PoolPages {
    /// They stay: a scheduler counts on the free pages of each pool.
    #[default]
    Stay,
    /// They may move to another node whose pool has room.
    Move,
}

/// An operator's settings for a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OperatorSettings {
    /// Whether the agent may act on it.
    pub management: Management,
    /// How far decisions about it may go at most.
    pub mode: Option<Mode>,
    /// Home nodes that the operator chose.
    pub home: Option<NodeSet>,
    /// VMs with the same word here share no home node.
    pub apart: Option<String>,
    /// VMs with the same word here have one home.
    pub together: Option<String>,
    /// Memory bandwidth that it is declared to need.
    pub bandwidth: Option<BytesPerSec>,
    /// Its booked permit.
    pub permit: Option<Permit>,
    /// How its memory is placed and moved.
    pub memory_policy: Option<MemoryPolicy>,
    /// Least memory that it may be left with.
    pub memory_floor: Option<Bytes>,
    /// What may happen to its huge pages.
    pub pool_pages: PoolPages,
    /// The settings as they are written.
    written: Vec<(String, String)>,
}

/// Checks a word for `apart` or `together`.
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
    /// Settings of a VM that is watched and never touched.
    pub fn ignored() -> OperatorSettings {
        OperatorSettings {
            management: Management::Ignored,
            ..OperatorSettings::default()
        }
    }

    /// Parses names with their values. A single invalid one makes all of it invalid: the operator's intent is unknown.
    ///
    /// # Errors
    /// A sentence that names the invalid part.
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

    /// The settings as policies see them, given the CPUs that the operator allows and the vCPUs pinned by hand.
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

    /// These settings with one of them set or removed, and everything else as it is written.
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

/// An operator's change to the settings that are stored when it is made.
pub struct Change<'a> {
    /// The settings to change.
    pub settings: &'a [Setting],
    /// Whether the change still applies to what is stored.
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
    /// Whether the change applies to these settings.
    pub fn holds(&self, stored: &OperatorSettings) -> bool {
        (self.holds)(&stored.clone().of_vm(None, Vec::new()))
    }

    /// These settings with the change.
    pub fn made_on(&self, stored: &OperatorSettings) -> OperatorSettings {
        let settings = self.settings.iter();
        settings.fold(stored.clone(), |said, setting| said.with(*setting))
    }
}
