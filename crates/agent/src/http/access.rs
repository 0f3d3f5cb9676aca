//! Identifies the client of each request and decides its role. No other module does.
//!
//! | request | role | |
//! |---|---|---|
//! | `http.sock` as root or the agent's user | operator | the kernel reports the user |
//! | `http.sock` as a member of `[http] group` | viewer | the kernel reports its groups |
//! | loopback | viewer | any user of the host can connect |
//! | loopback, with the key of this start | operator | only root and the agent's user can read the key |
//! | TCP, as a user of `web.yml` | as `homenode_roles` there says, else viewer | by its password |
//! | TCP, with a certificate that `web.yml` requires, if it has no users | viewer | |
//!
//! If `web.yml` has users, every request over TCP needs a password, and there is no key.
//!
//! A viewer reads everything; an operator also changes settings. Routes that change something are all in one router, behind
//! [`operators_only`]; all others only read.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use homenode_undo::state_dir::StateDir;
use rustix::rand::{GetRandomFlags, getrandom};
use subtle::ConstantTimeEq as _;
use tokio_rustls::rustls::ServerConfig;

use super::origin;
use super::passwords::Passwords;
use super::problem::Failed;
use super::web::{Current, Web};
use crate::feed::Feed;
use crate::role::{OPERATORS, Role, VIEWERS_READ};

#[cfg(test)]
mod tests;

/// Name of the key's file in the state directory.
const KEY_FILE: &str = "http.key";
/// Number of random bytes in a key. The file holds them as hexadecimal digits.
const KEY_BYTES: usize = 32;

/// How a client is connected.
#[derive(Clone, Copy, Debug)]
pub enum Came {
    /// Over the socket in the state directory, with the role of the user that the kernel reports.
    Socket(Role),
    /// Over TCP, from this address.
    Tcp(IpAddr),
}

/// The client's role, stored in each request.
#[derive(Clone, Debug)]
struct Asker {
    role: Role,
    /// The response to a viewer who tries to change something, with the remedy.
    why_not: Failed,
}

/// The roles of clients during one run.
#[derive(Debug)]
pub(super) struct Access {
    /// The TCP address, if any.
    bound: Option<SocketAddr>,
    /// TLS and users, if there is a `web.yml`.
    web: Option<Current>,
    passwords: Passwords,
    /// `Some` only over loopback TCP, and only if there are no users with passwords.
    key: Option<Key>,
}

impl Access {
    /// Reads `web.yml`, and creates a bearer key when loopback TCP is open and no users are configured.
    ///
    /// # Errors
    /// If the state directory cannot hold the key, `web.yml` is wrong, or it does not suffice for the address.
    pub(super) fn new(
        bound: Option<SocketAddr>,
        state: Option<&Path>,
        (web_config, feed): (Option<&Path>, &Feed),
    ) -> anyhow::Result<Access> {
        let web = match (bound, web_config) {
            (Some(bound), Some(path)) => Some(Current::read(path, bound, feed.clone())),
            (Some(bound), None) => {
                Web::default().may_listen(bound)?;
                None
            }
            (None, _) => None,
        };
        let web = web.transpose()?;
        let needs_key = bound.is_some_and(|bound| bound.ip().is_loopback())
            && web.as_ref().is_none_or(|web| web.get().users.is_empty());
        Ok(Access {
            bound,
            web,
            passwords: Passwords::new(&random()?),
            key: needs_key.then(|| Key::make(state)).transpose()?,
        })
    }

    /// Returns the page's URL. Its fragment holds the key that makes the browser an operator. Browsers never send the fragment to
    /// a server by themselves.
    pub(super) fn url(&self) -> Option<String> {
        let bound = self.bound?;
        let scheme = self.tls().map_or("http", |_| "https");
        let fragment = self.key.as_ref();
        let fragment = fragment.map_or_else(String::new, |key| format!("/#key={}", key.text));
        Some(format!("{scheme}://{bound}{fragment}"))
    }

    /// Returns the TLS configuration, if connections are encrypted.
    pub(super) fn tls(&self) -> Option<Arc<ServerConfig>> {
        self.web.as_ref()?.get().tls.clone()
    }

    /// Identifies the client of a request.
    ///
    /// # Errors
    /// A problem if the client may not send requests at all.
    async fn asker(&self, came: Came, head: &Parts) -> Result<Asker, Failed> {
        let (from, bound) = match (came, self.bound) {
            (Came::Socket(role), _) => {
                let why_not = format!("{VIEWERS_READ}: {OPERATORS}");
                let why_not = Failed::may_not(why_not);
                return Ok(Asker { role, why_not });
            }
            (Came::Tcp(from), bound) => (from, bound.ok_or_else(Failed::gone)?),
        };
        let web = self.web.as_ref().map(Current::get).unwrap_or_default();
        origin::check(head, bound, web.tls.is_some())?;
        if !web.users.is_empty() {
            return self.user(&web, from, &head.headers).await;
        }
        if web.has_verified_clients {
            let why_not = format!(
                "{VIEWERS_READ}: a user of basic_auth_users with the role operator in homenode_roles"
            );
            let (role, why_not) = (Role::Viewer, Failed::may_not(why_not));
            return Ok(Asker { role, why_not });
        }
        let said = head.headers.get(header::AUTHORIZATION);
        let is_key = said.is_some_and(|said| self.is_key(said));
        let role = if is_key { Role::Operator } else { Role::Viewer };
        if said.is_some() && !is_key {
            let detail = format!("wrong key: {}", self.remedy());
            return Err(Failed::unauthorized(detail, CHALLENGE_KEY));
        }
        let why_not = Failed::unauthorized(format!("{VIEWERS_READ}: {}", self.remedy()), CHALLENGE_KEY);
        Ok(Asker { role, why_not })
    }

    /// Identifies the user by name and password.
    async fn user(&self, web: &Web, from: IpAddr, headers: &HeaderMap) -> Result<Asker, Failed> {
        let unknown = |detail| Failed::unauthorized(detail, CHALLENGE_PASSWORD);
        let said = headers.get(header::AUTHORIZATION);
        let said = said.ok_or_else(|| {
            unknown("send the name and the password of a user in web.yml's basic_auth_users")
        })?;
        let said = basic(said).ok_or_else(|| {
            unknown("the header Authorization does not hold a name and a password as in RFC 7617")
        })?;
        let (name, password) = said.split_once(':').unwrap_or((&said, ""));
        let user = web.users.get(name);
        let dummy = web.users.values().next().ok_or_else(Failed::gone)?;
        let is_right = self
            .passwords
            .is_right(from, (name, password), (user, dummy))
            .await?;
        match user.filter(|_| is_right) {
            Some(user) => Ok(Asker {
                role: user.role,
                why_not: Failed::may_not(format!(
                    "{VIEWERS_READ}: add `{name}: operator` to homenode_roles in web.yml"
                )),
            }),
            None => Err(unknown("wrong name or password")),
        }
    }

    fn is_key(&self, said: &HeaderValue) -> bool {
        let said = said.as_bytes().split_at_checked("Bearer ".len());
        let (scheme, said) = said.unwrap_or_default();
        let is_it = |key: &Key| bool::from(key.text.as_bytes().ct_eq(said));
        scheme.eq_ignore_ascii_case(b"Bearer ") && self.key.as_ref().is_some_and(is_it)
    }

    /// Returns the instruction by which a client on loopback becomes an operator.
    fn remedy(&self) -> String {
        let file = self.key.as_ref().and_then(|key| key.file.as_ref());
        let place = file.map_or_else(
            || "the agent printed when it started".to_owned(),
            |(_, path)| format!("{} holds", path.display()),
        );
        format!("send `Authorization: Bearer KEY`, with the key that {place}")
    }
}

/// Decodes the name and password of HTTP basic authentication.
fn basic(said: &HeaderValue) -> Option<String> {
    let (scheme, said) = said.as_bytes().split_at_checked("Basic ".len())?;
    let said = scheme
        .eq_ignore_ascii_case(b"Basic ")
        .then(|| BASE64_STANDARD.decode(said.trim_ascii()))?;
    String::from_utf8(said.ok()?).ok()
}

/// `WWW-Authenticate` challenges.
const CHALLENGE_KEY: &str = "Bearer realm=\"homenode\"";
const CHALLENGE_PASSWORD: &str = "Basic realm=\"homenode\", charset=\"UTF-8\"";

/// Lets in clients that may send requests, and stores their role in the request.
pub(super) async fn known(State(access): State<Arc<Access>>, request: Request, next: Next) -> Response {
    let (mut head, body) = request.into_parts();
    let came = head.extensions.get::<Came>().copied();
    let asker = match came {
        Some(came) => access.asker(came, &head).await,
        None => Err(Failed::gone()),
    };
    match asker {
        Ok(asker) => {
            head.extensions.insert(asker);
            next.run(Request::from_parts(head, body)).await
        }
        Err(failed) => failed.into_response(),
    }
}

/// Lets only operators through to routes that change something, and rejects requests that a page of another site made a browser
/// send.
pub(super) async fn operators_only(request: Request, next: Next) -> Response {
    match may_change(&request) {
        Ok(()) => next.run(request).await,
        Err(failed) => failed.into_response(),
    }
}

fn may_change(request: &Request) -> Result<(), Failed> {
    let asker = request.extensions().get::<Asker>().ok_or_else(Failed::gone)?;
    if asker.role < Role::Operator {
        return Err(asker.why_not.clone());
    }
    let headers = request.headers();
    // Browsers set this header themselves, and pages cannot change it.
    let site = headers.get("sec-fetch-site").map(HeaderValue::as_bytes);
    if !matches!(site, None | Some(b"same-origin" | b"none")) {
        return Err(Failed::forbidden(
            "a page of another site may not change anything here",
        ));
    }
    let length = headers.get(header::CONTENT_LENGTH).map(HeaderValue::as_bytes);
    let has_body =
        headers.contains_key(header::TRANSFER_ENCODING) || !matches!(length, None | Some(b"0" | b""));
    // A form on another site's page cannot send JSON, only text, form data or files.
    if has_body && !is_json(headers) {
        return Err(Failed::not_json());
    }
    Ok(())
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers
        .get(header::CONTENT_TYPE)
        .and_then(|kind| kind.to_str().ok());
    let kind = kind.and_then(|kind| kind.split(';').next());
    kind.is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}

/// Returns unpredictable bytes.
fn random() -> anyhow::Result<[u8; KEY_BYTES]> {
    let mut bytes = [0_u8; KEY_BYTES];
    // For so few bytes, the kernel returns all of them or fails.
    let got = getrandom(&mut bytes, GetRandomFlags::empty())
        .context("the kernel returned no random bytes for a key")?;
    anyhow::ensure!(got == KEY_BYTES, "the kernel returned no random bytes for a key");
    Ok(bytes)
}

/// The bearer key of one run of the agent: any user who can read its file is an operator.
struct Key {
    text: String,
    /// The key's file. It is removed when the `Key` is dropped.
    file: Option<(StateDir, PathBuf)>,
}

/// Keeps the key out of logs.
impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key")
    }
}

impl Key {
    fn make(state: Option<&Path>) -> anyhow::Result<Key> {
        let text: String = random()?.iter().map(|byte| format!("{byte:02x}")).collect();
        let write = |state: &Path| {
            let dir = StateDir::open_public(state)?;
            dir.replace(KEY_FILE, format!("{text}\n").as_bytes())?;
            anyhow::Ok((dir, state.join(KEY_FILE)))
        };
        let file = state.map(write).transpose()?;
        Ok(Key { text, file })
    }
}

impl Drop for Key {
    fn drop(&mut self) {
        if let Some((dir, _)) = &self.file {
            let _ = dir.remove(KEY_FILE);
        }
    }
}
