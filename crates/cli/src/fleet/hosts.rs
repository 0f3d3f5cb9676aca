//! Asks the agents of many hosts over HTTP.

use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context as _;
use homenode_api::answer::Overview;
use homenode_api::http::{Problem, WallTime};
use homenode_screens::pictures::{Asked, Host, Picture};
use serde::Deserialize;
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};

use crate::bad_input;

/// The agents' default port.
const PORT: u16 = 9464;
/// How long an agent may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum size of an answer.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// A host's name and its agent's address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    name: String,
    url: String,
}

impl Address {
    /// Returns the host's name: the address as written, without the scheme.
    pub(super) fn name(&self) -> &str {
        &self.name
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        let (scheme, name) = match text.split_once("://") {
            Some((scheme, name)) => (Some(scheme), name.trim_end_matches('/')),
            None => (None, text),
        };
        let authority: ureq::http::uri::Authority = name
            .parse()
            .ok()
            .filter(|of: &ureq::http::uri::Authority| {
                // Refuse passwords on the command line, and bad ports.
                !name.contains('@') && (of.port_u16().is_some() || of.host() == name)
            })
            .ok_or_else(|| {
                format!("`{text}` is not a host: write a name, and its port if that is not {PORT}")
            })?;
        let is_loopback =
            matches!(authority.host(), "localhost" | "[::1]") || authority.host().starts_with("127.");
        let scheme = match scheme {
            Some("http" | "https") => scheme,
            None if is_loopback => Some("http"),
            None => Some("https"),
            Some(other) => {
                return Err(format!(
                    "agents cannot be asked over `{other}`: write http or https"
                ));
            }
        };
        let port = authority.port_u16().unwrap_or(PORT);
        Ok(Address {
            name: name.to_owned(),
            url: format!("{}://{}:{port}", scheme.unwrap_or_default(), authority.host()),
        })
    }
}

/// Credentials for the agents, and the CA that must have signed their certificates.
#[derive(Debug, Default)]
pub(super) struct Login {
    authorities: Vec<Certificate<'static>>,
    authorization: Option<String>,
}

impl Login {
    /// Reads the files named on the command line.
    ///
    /// # Errors
    /// A file that cannot be read, or has the wrong content.
    pub(super) fn read(
        ca: Option<&Path>,
        user: Option<&str>,
        password: Option<&Path>,
    ) -> anyhow::Result<Login> {
        let read =
            |path: &Path| std::fs::read(path).with_context(|| format!("cannot read {}", path.display()));
        let mut login = Login::default();
        if let Some(path) = ca {
            let text = read(path)?;
            let items = parse_pem(&text).filter_map(Result::ok);
            login.authorities = items
                .filter_map(|item| match item {
                    PemItem::Certificate(certificate) => Some(certificate),
                    _ => None,
                })
                .collect();
            if login.authorities.is_empty() {
                return Err(bad_input(format!("{} contains no certificate", path.display())));
            }
        }
        if let (Some(user), Some(path)) = (user, password) {
            let password = String::from_utf8(read(path)?).map_err(bad_input)?;
            let pair = format!("{user}:{}", password.trim_end_matches(['\r', '\n']));
            login.authorization = Some(format!("Basic {}", base64_of(pair.as_bytes())));
        }
        Ok(login)
    }
}

fn base64_of(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

/// The fields of `/v1/overview` that are read.
#[derive(Deserialize)]
struct Seen {
    time: WallTime,
    #[serde(flatten)]
    overview: Overview,
}

/// Asks agents. Clones share connections.
#[derive(Clone)]
pub(super) struct Asker {
    http: ureq::Agent,
    authorization: Option<String>,
}

impl Asker {
    /// Creates an asker with these credentials.
    pub(super) fn new(login: &Login) -> Asker {
        let mut tls = TlsConfig::builder();
        if !login.authorities.is_empty() {
            tls = tls.root_certs(RootCerts::new_with_certs(&login.authorities));
        }
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(PATIENCE))
            .http_status_as_error(false)
            .max_redirects(0)
            // Agents are near, and a proxy must not see the password.
            .proxy(None)
            .tls_config(tls.build());
        Asker {
            http: config.build().into(),
            authorization: login.authorization.clone(),
        }
    }

    /// Asks a host's agent for its picture.
    pub(super) fn ask(&self, address: &Address) -> Asked {
        let mut request = self.http.get(format!("{}/v1/overview", address.url));
        if let Some(authorization) = &self.authorization {
            request = request.header("Authorization", authorization);
        }
        let mut response = request.call().map_err(|error| error.to_string())?;
        let status = response.status();
        let body = response.body_mut().with_config().limit(ANSWER_BYTES_MAX);
        let text = body.read_to_string().map_err(|error| error.to_string())?;
        if !status.is_success() {
            let problem = serde_json::from_str::<Problem>(&text);
            let said = problem.map_or_else(|_| "not an agent's answer".to_owned(), |problem| problem.detail);
            return Err(format!("{}: {said}", status.as_u16()));
        }
        let seen: Seen = serde_json::from_str(&text)
            .map_err(|error| format!("the answer is not that of an agent: {error}"))?;
        Ok(Picture {
            wall_ns: seen.time.0,
            overview: seen.overview,
        })
    }
}

/// Asks all hosts once, at the same time.
///
/// # Errors
/// If a thread cannot start.
pub(super) fn ask_all(asker: &Asker, addresses: &[Address]) -> anyhow::Result<Vec<Host>> {
    std::thread::scope(|scope| {
        let mut asking = Vec::new();
        for address in addresses {
            let asked = std::thread::Builder::new().spawn_scoped(scope, move || {
                let mut host = Host::new(address.name());
                host.heard(asker.ask(address));
                host
            });
            asking.push(asked.context("cannot start a thread for each host")?);
        }
        asking
            .into_iter()
            .map(|asked| {
                asked
                    .join()
                    .map_err(|_| anyhow::anyhow!("a thread that asks a host has failed"))
            })
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_a_name_with_a_port_or_an_address() {
        for (text, url) in [
            ("host1", "https://host1:9464"),
            ("host1:80", "https://host1:80"),
            ("localhost", "http://localhost:9464"),
            ("127.0.0.1:9000", "http://127.0.0.1:9000"),
            ("[::1]:9000", "http://[::1]:9000"),
            ("http://host1", "http://host1:9464"),
            ("https://127.0.0.1:1/", "https://127.0.0.1:1"),
        ] {
            assert_eq!(text.parse::<Address>().unwrap().url, url, "{text}");
        }
        for text in [
            "",
            "ftp://host1",
            "host1/path",
            "host 1",
            "me:secret@host1",
            "host1:99999",
        ] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }
}
