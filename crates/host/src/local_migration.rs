//! Moving all memory of a VM by migrating it to the host that it is on: where no page of a VM that runs can be moved (Xen).

use homenode_units::{Any, Ns};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Which VMs may be migrated to where they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Allow {
    /// None.
    #[default]
    Off,
    /// Those that run on until most of their memory was copied.
    Live,
    /// Also those that must stand still for it, for [`LocalMigration::pause_max`] at most.
    Paused,
}

/// What the operator may set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LocalMigration {
    /// Which VMs.
    pub allow: Allow,
    /// How long one may be copied; then it stays where it is.
    #[serde(with = "homenode_units::text")]
    pub time_max: Ns,
    /// How long one may be copied that stands still meanwhile.
    #[serde(with = "homenode_units::text")]
    pub pause_max: Ns,
    /// How long the same VM is left alone afterwards, whether it arrived or not.
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
