//! Migration of a VM to its own host, which moves all of its memory where no page of a running VM can be moved (Xen).

use homenode_units::{Any, Ns};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Which VMs may be migrated to their own host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Allow {
    /// No VM.
    #[default]
    Off,
    /// VMs that keep running until most of their memory is copied.
    Live,
    /// VMs that keep running, and also those that must pause for the copy, for at most [`LocalMigration::pause_max`].
    Paused,
}

/// The operator's settings for migrating VMs to their own host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LocalMigration {
    /// Which VMs may be migrated.
    pub allow: Allow,
    /// Longest time of a copy. If it takes longer, the VM stays in place.
    #[serde(with = "homenode_units::text")]
    pub time_max: Ns,
    /// Longest time that the VM may be paused for a copy.
    #[serde(with = "homenode_units::text")]
    pub pause_max: Ns,
    /// Time before the same VM is tried again, whether or not the last try succeeded.
    #[serde(with = "homenode_units::text")]
    pub interval: Ns,
}

impl Default for LocalMigration {
    /// Off, because migration turns the VM into a new domain; then ten minutes, ten seconds, an hour.
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
