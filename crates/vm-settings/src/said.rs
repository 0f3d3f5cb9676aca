//! An operator's settings for one VM, as names and values. They come from attributes of libvirt's metadata element, or from lines
//! of the VM's own file.

use std::fmt::Display;
use std::str::FromStr;

use homenode_host::{Management, Mode, Setting, VmSettings};
use homenode_units::{Bytes, BytesPerSec, CpuSet, MemoryPolicy, NodeSet, Permit};

/// Most characters in a word for `anti_affinity` or `affinity`.
const WORD_MAX: usize = 64;

/// A mistake in an operator's settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingError {
    /// The text is not TOML.
    #[error("line {line}: {why}")]
    Syntax {
        /// Number of the line, from 1.
        line: usize,
        /// The parser's message.
        why: String,
    },
    /// The value is neither in quotes nor of a kind that may be written without them.
    #[error("`{0}` must be a string; write its value in quotes")]
    NotText(String),
    /// The text names no setting.
    #[error(
        "unknown attribute `{0}`; there are manage, mode, home, anti_affinity, affinity, bandwidth, permit, memory, floor, \
         kernel_footprint, hugepages"
    )]
    Unknown(String),
    /// The value is neither of the two that the setting takes.
    #[error("{name}='{found}' is neither `{}` nor `{}`", .either.0, .either.1)]
    Neither {
        /// The setting.
        name: &'static str,
        /// The value, shortened.
        found: String,
        /// The two values.
        either: (&'static str, &'static str),
    },
    /// The value cannot be parsed.
    #[error("{name}: {why}")]
    Value {
        /// The setting.
        name: &'static str,
        /// The mistake in the value, and what to write.
        why: String,
    },
    /// The home names no node.
    #[error("home='' names no node; leave it out to let Homenode choose")]
    NoNode,
    /// The value is not a valid word for `anti_affinity` or `affinity`.
    #[error(
        "{0} must be a word of up to {WORD_MAX} letters, digits, `-`, `_` and `.` that other VMs name too"
    )]
    Word(&'static str),
    /// The settings name both a home and `anti_affinity` or `affinity`.
    #[error(
        "home already fixes where the VM lives, so anti_affinity and affinity have no effect; leave out either home or them"
    )]
    HomeAndOthers,
}

/// Parses the value of a setting.
fn value<T: FromStr<Err: Display>>(name: &'static str, value: &str) -> Result<T, SettingError> {
    let why = |error: T::Err| SettingError::Value {
        name,
        why: error.to_string(),
    };
    value.parse().map_err(why)
}

/// Whether a VM's huge pages from its nodes' pools (hugetlbfs) may move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PoolPages {
    /// The huge pages stay, because a scheduler counts on each pool's free pages.
    #[default]
    Stay,
    /// The huge pages may move to another node whose pool has enough free pages.
    Move,
}

/// An operator's settings for a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OperatorSettings {
    /// Whether the agent may act on the VM.
    pub management: Management,
    /// The furthest that decisions about the VM may go.
    pub mode: Option<Mode>,
    /// Home nodes that the operator chose.
    pub home: Option<NodeSet>,
    /// VMs with the same word here share no home node.
    pub anti_affinity: Option<String>,
    /// VMs with the same word here have one home.
    pub affinity: Option<String>,
    /// Memory bandwidth that the VM is declared to need.
    pub bandwidth: Option<BytesPerSec>,
    /// The permit that the VM booked.
    pub permit: Option<Permit>,
    /// How the VM's memory is placed and moved.
    pub memory_policy: Option<MemoryPolicy>,
    /// The least memory that the VM must be left with.
    pub memory_floor: Option<Bytes>,
    /// Memory that the guest's kernel takes for itself, as `homenode kernel-footprint` measures it.
    pub kernel_footprint: Option<Bytes>,
    /// Whether the VM's huge pages may move.
    pub pool_pages: PoolPages,
    /// The settings, written as names and values.
    written: Vec<(String, String)>,
}

/// Checks a word for `anti_affinity` or `affinity`.
fn word(name: &'static str, value: &str) -> Result<String, SettingError> {
    let is_word = !value.is_empty()
        && value.len() <= WORD_MAX
        && value
            .chars()
            .all(|sign| sign.is_ascii_alphanumeric() || "-_.".contains(sign));
    if is_word {
        return Ok(value.to_owned());
    }
    Err(SettingError::Word(name))
}

impl OperatorSettings {
    /// Returns the settings of a VM that the agent watches but never touches.
    pub fn ignored() -> OperatorSettings {
        OperatorSettings {
            management: Management::Ignored,
            ..OperatorSettings::default()
        }
    }

    /// Parses names and their values. One invalid setting makes all of them invalid, because the operator's intent is then
    /// unknown.
    ///
    /// # Errors
    /// Returns the invalid setting.
    pub fn of(written: Vec<(String, String)>) -> Result<OperatorSettings, SettingError> {
        let mut settings = OperatorSettings::default();
        for (name, text) in &written {
            let neither = |name, either| SettingError::Neither {
                name,
                found: text.chars().take(40).collect(),
                either,
            };
            match name.as_str() {
                "manage" => {
                    settings.management = match text.as_str() {
                        "yes" => Management::Managed,
                        "no" => Management::Ignored,
                        _ => return Err(neither("manage", ("yes", "no"))),
                    }
                }
                "mode" => settings.mode = Some(value("mode", text)?),
                "home" => {
                    let nodes: NodeSet = value("home", text)?;
                    if nodes.is_empty() {
                        return Err(SettingError::NoNode);
                    }
                    settings.home = Some(nodes);
                }
                // `apart` and `together` were the names up to 0.2.0.
                "anti_affinity" | "apart" => {
                    settings.anti_affinity = Some(word("anti_affinity", text)?);
                }
                "affinity" | "together" => settings.affinity = Some(word("affinity", text)?),
                "bandwidth" => settings.bandwidth = Some(value("bandwidth", text)?),
                "permit" => settings.permit = Some(value("permit", text)?),
                "memory" => settings.memory_policy = Some(value("memory", text)?),
                "floor" => settings.memory_floor = Some(value("floor", text)?),
                "kernel_footprint" => settings.kernel_footprint = Some(value("kernel_footprint", text)?),
                "hugepages" => {
                    settings.pool_pages = match text.as_str() {
                        "stay" => PoolPages::Stay,
                        "move" => PoolPages::Move,
                        _ => return Err(neither("hugepages", ("stay", "move"))),
                    }
                }
                other => return Err(SettingError::Unknown(other.chars().take(40).collect())),
            }
        }
        if settings.home.is_some() && (settings.anti_affinity.is_some() || settings.affinity.is_some()) {
            return Err(SettingError::HomeAndOthers);
        }
        settings.written = written;
        Ok(settings)
    }

    /// Returns the settings as policies see them, with the CPUs that the operator allows and the vCPUs pinned by hand.
    pub fn of_vm(self, cpus_allowed: Option<CpuSet>, pinned_vcpus: Vec<u16>) -> VmSettings {
        VmSettings {
            management: self.management,
            mode: self.mode,
            home: self.home,
            anti_affinity: self.anti_affinity,
            affinity: self.affinity,
            bandwidth: self.bandwidth,
            permit: self.permit,
            memory_policy: self.memory_policy,
            memory_floor: self.memory_floor,
            kernel_footprint: self.kernel_footprint,
            cpus_allowed,
            pinned_vcpus,
            ..VmSettings::default()
        }
    }

    /// Returns the names and values, as they are to be written.
    pub fn written(&self) -> &[(String, String)] {
        &self.written
    }

    /// Returns these settings with one of them set or removed. The others keep their written form.
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

/// An operator's change. It is made to the settings that are stored at that time.
pub struct Change<'a> {
    /// The settings to change.
    pub settings: &'a [Setting],
    /// Returns true if the change still applies to the stored settings.
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
    /// Returns true if the change applies to these settings.
    pub fn holds(&self, stored: &OperatorSettings) -> bool {
        (self.holds)(&stored.clone().of_vm(None, Vec::new()))
    }

    /// Returns these settings with the change made.
    pub fn made_on(&self, stored: &OperatorSettings) -> OperatorSettings {
        let settings = self.settings.iter();
        settings.fold(stored.clone(), |said, setting| said.with(*setting))
    }
}
