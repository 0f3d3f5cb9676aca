//! An operator's settings for one VM, as names and values: attributes of libvirt's metadata element, or lines of the VM's
//! own file.

use std::fmt::Display;
use std::str::FromStr;

use homenode_host::{Management, Mode, Setting, VmSettings};
use homenode_units::{Bytes, BytesPerSec, CpuSet, MemoryPolicy, NodeSet, Permit};

/// Longest word for `anti_affinity` and `affinity`.
const WORD_MAX: usize = 64;

/// What is wrong with an operator's settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingError {
    /// The text is no TOML.
    #[error("line {line}: {why}")]
    Syntax {
        /// Number of the line, from 1.
        line: usize,
        /// The parser's message.
        why: String,
    },
    /// The value is neither a text nor what may be written without quotes.
    #[error("`{0}` is not a text; write it in quotes")]
    NotText(String),
    /// There is no such setting.
    #[error(
        "unknown attribute `{0}`; there are manage, mode, home, anti_affinity, affinity, bandwidth, permit, memory, floor, hugepages"
    )]
    Unknown(String),
    /// The value is not one of two.
    #[error("{name}='{found}' is neither `{}` nor `{}`", .either.0, .either.1)]
    Neither {
        /// The setting.
        name: &'static str,
        /// The value, shortened.
        found: String,
        /// The values that there are.
        either: (&'static str, &'static str),
    },
    /// The value cannot be parsed.
    #[error("{name}: {why}")]
    Value {
        /// The setting.
        name: &'static str,
        /// What is wrong with the value, and what to write.
        why: String,
    },
    /// A home without a node.
    #[error("home='' names no node; leave it out to let Homenode choose")]
    NoNode,
    /// A word that no other VM can name too.
    #[error(
        "{0}: a word of up to {WORD_MAX} letters, digits, `-`, `_` and `.` that other VMs name too is wanted"
    )]
    Word(&'static str),
    /// A home, and VMs to share one with or to keep off.
    #[error(
        "home says where it lives, so anti_affinity and affinity have nothing to say; leave one of them out"
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
    pub anti_affinity: Option<String>,
    /// VMs with the same word here have one home.
    pub affinity: Option<String>,
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
    /// The invalid setting.
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
                // `apart` and `together` are their names up to 0.2.0.
                "anti_affinity" | "apart" => {
                    settings.anti_affinity = Some(word("anti_affinity", text)?);
                }
                "affinity" | "together" => settings.affinity = Some(word("affinity", text)?),
                "bandwidth" => settings.bandwidth = Some(value("bandwidth", text)?),
                "permit" => settings.permit = Some(value("permit", text)?),
                "memory" => settings.memory_policy = Some(value("memory", text)?),
                "floor" => settings.memory_floor = Some(value("floor", text)?),
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

    /// The settings as policies see them, given the CPUs that the operator allows and the vCPUs pinned by hand.
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
