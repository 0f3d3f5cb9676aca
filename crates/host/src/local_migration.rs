//! Moves all memory of a VM by migrating it to its own host, if no page of a running VM can be moved (Xen).

use homenode_units::{Any, Ns};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// VMs that may be migrated to their own host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Allow {
    /// None.
    #[default]
    Off,
    /// Those that keep running until most of their memory was copied.
    Live,
    /// Also those that must pause for it, for at most [`LocalMigration::pause_max`].
    Paused,
}

/// The operator's settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LocalMigration {
    /// The VMs.
    pub allow: Allow,
    /// Longest time of a copy; after that the VM stays in place.
    #[serde(with = "homenode_units::text")]
    pub time_max: Ns,
    /// Longest time of a copy while the VM is paused.
    #[serde(with = "homenode_units::text")]
    pub pause_max: Ns,
    /// Time before the same VM is tried again, whether it arrived or not.
    #[serde(with = "homenode_units::text")]
    pub interval: Ns,
}

impl Default for LocalMigration {
    /// Off, since the VM becomes another domain; ten minutes, ten seconds, an hour.
    fn default() -> Self {
        LocalMigration {
            allow: Allow::Off,
            time_max: Ns::from_secs(600),
            pause_max: Ns::from_secs(10),
            interval: Ns::from_secs(3600),
        }
    }
}

homenode_units::settings! {
    LocalMigration {
        allow: Any,
        time_max: Ns::from_secs(1)..=Ns::from_secs(86_400),
        pause_max: Ns::from_secs(1)..=Ns::from_secs(3600),
        interval: Ns::ZERO..=Ns::from_secs(604_800),
    }
}
