//! Access over HTTP. The caller of the loop answers requests; the loop itself knows no client.

use homenode_units::Any;
use serde::{Deserialize, Serialize};

/// Which clients have access over HTTP, and how.
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
