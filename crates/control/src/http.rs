//! Settings of access over HTTP. The loop's caller answers requests; the loop itself does not know clients.

use homenode_units::Any;
use serde::{Deserialize, Serialize};

/// Which clients have access over HTTP, and how they get it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Group whose members may read on `http.sock`; empty for none.
    pub group: String,
    /// File with TLS and passwords, in the form of Prometheus' exporters (`web.yml`); empty for none.
    pub web_config: String,
}

homenode_units::settings! {
    Config {
        group: Any,
        web_config: Any,
    }
}
