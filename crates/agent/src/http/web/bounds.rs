//! Limits on what a run of the agent may let in. Reading `web.yml` again can narrow access; only a restart widens it.
//!
//! An editor, a copy or a full disk can leave a file cut short at any byte. What remains is often a valid file that requires
//! less: no TLS, no passwords, no client certificates. So these bounds apply to a file that is read again:
//!
//! | the file | takes effect |
//! |---|---|
//! | renews a certificate, changes a password | at once |
//! | removes some of the users, makes an operator a viewer, asks more of clients | at once |
//! | names users again that this run has let in before, at most with the same role | at once |
//! | has no TLS, no users, an older TLS version, a weaker `client_auth_type` | after a restart; the previous ones stay in force |
//! | has a new user, an operator who was a viewer, a new authority of clients | after a restart; these are refused until then |

use std::collections::BTreeMap;

use tokio_rustls::rustls::RootCertStore;
use tokio_rustls::rustls::pki_types::TrustAnchor;

use super::{TlsWritten, User};
use crate::role::Role;

/// The bounds of one run.
#[derive(Clone, Debug, Default)]
pub(super) struct Bounds {
    /// The TLS requirements, from the time when connections have TLS.
    tls: Option<TlsWritten>,
    /// The accepted authorities of clients, from the time when client certificates are requested.
    authorities: Vec<TrustAnchor<'static>>,
    /// The users and the strongest role of each, from the time when passwords are required.
    roles: BTreeMap<String, Role>,
}

impl Bounds {
    /// Returns the bounds after a file was read within these bounds.
    pub(super) fn after(
        &self,
        tls: Option<TlsWritten>,
        authorities: Vec<TrustAnchor<'static>>,
        users: &BTreeMap<String, User>,
    ) -> Bounds {
        let roles = || users.iter().map(|(name, user)| (name.clone(), user.role));
        Bounds {
            tls,
            authorities: match self.authorities.is_empty() {
                true => authorities,
                false => self.authorities.clone(),
            },
            roles: match self.roles.is_empty() {
                true => roles().collect(),
                false => self.roles.clone(),
            },
        }
    }

    /// Narrows a file's TLS settings. For each change that takes a restart, adds a sentence to `kept`.
    pub(super) fn narrow_tls(&self, tls: Option<TlsWritten>, kept: &mut Vec<String>) -> Option<TlsWritten> {
        let Some(before) = &self.tls else { return tls };
        let Some(mut tls) = tls else {
            kept.push("it has no tls_server_config: TLS stays in force".into());
            return Some(before.clone());
        };
        if tls.min_version < before.min_version {
            kept.push(format!(
                "min_version is {}: {} stays in force",
                tls.min_version.name(),
                before.min_version.name()
            ));
            tls.min_version = before.min_version;
        }
        if tls.client_auth_type < before.client_auth_type {
            kept.push(format!(
                "client_auth_type is {:?}: {:?} stays in force",
                tls.client_auth_type, before.client_auth_type
            ));
            tls.client_auth_type = before.client_auth_type;
            let authorities = tls.client_ca_file.take();
            tls.client_ca_file = authorities.or_else(|| before.client_ca_file.clone());
        }
        Some(tls)
    }

    /// Removes the authorities that this run has not accepted before.
    ///
    /// # Errors
    /// If no authority is left.
    pub(super) fn narrow_authorities(
        &self,
        roots: &mut RootCertStore,
        kept: &mut Vec<String>,
    ) -> anyhow::Result<()> {
        if self.authorities.is_empty() {
            return Ok(());
        }
        let count = roots.len();
        roots
            .roots
            .retain(|authority| self.authorities.contains(authority));
        if roots.is_empty() {
            anyhow::bail!("all authorities in the file are new; restart the agent to accept them");
        }
        let new = count - roots.len();
        if new > 0 {
            kept.push(format!(
                "client_ca_file has {new} new authorities: their clients are refused"
            ));
        }
        Ok(())
    }

    /// Narrows the users of a file. `before` are the users in force.
    pub(super) fn narrow_users(
        &self,
        mut users: BTreeMap<String, User>,
        before: &BTreeMap<String, User>,
        kept: &mut Vec<String>,
    ) -> BTreeMap<String, User> {
        users.retain(|name, user| {
            // As long as users needed no password, all of them were viewers.
            let most = match self.roles.is_empty() {
                true => Some(Role::Viewer),
                false => self.roles.get(name).copied(),
            };
            match most {
                None => kept.push(format!("user `{name}` is new: refused")),
                Some(most) if user.role > most => {
                    kept.push(format!("user `{name}` is a new operator: stays a viewer"));
                    user.role = most;
                }
                Some(_) => {}
            }
            most.is_some()
        });
        if !users.is_empty() || before.is_empty() {
            return users;
        }
        let names: Vec<&str> = before.keys().map(String::as_str).collect();
        kept.push(format!(
            "basic_auth_users has none of the current users: passwords stay in force, those of {}",
            names.join(", ")
        ));
        before.clone()
    }
}

/// Returns the notice that the file was read again.
pub(super) fn notice(path: &std::path::Path, kept: &[String]) -> String {
    let path = path.display();
    match kept.is_empty() {
        true => format!("{path} was read again"),
        false => format!(
            "{path} was read again. It would give more access than before, which takes a restart of the agent. Until then: {}",
            kept.join("; ")
        ),
    }
}
