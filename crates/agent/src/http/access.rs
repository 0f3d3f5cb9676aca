//! Who asks, and what they may do: the one place that decides it.
//!
//! | came in | is | |
//! |---|---|---|
//! | `http.sock` as root or the agent's user | operator | the kernel says who it is |
//! | `http.sock` as a member of `[http] group` | viewer | the kernel says which groups it is in |
//! | loopback | viewer | any user of the host can connect |
//! | loopback, with the key of this start | operator | root and the agent's user alone can read the key |
//! | TCP, as a user of `web.yml` | as `homenode_roles` there says, else viewer | by its password |
//! | TCP, with a certificate that `web.yml` wants, where it has no users | viewer | |
//!
//! Where `web.yml` has users, nobody comes in over TCP without a password, and there is no key.
//!
//! A viewer reads everything; an operator also changes. Routes that change something are all in one router, behind
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

/// The file of the key, in the state directory.
const KEY_FILE: &str = "http.key";
/// Random bytes of a key, in the file as twice as many digits.
const KEY_BYTES: usize = 32;

/// How somebody came in.
#[derive(Clone, Copy, Debug)]
pub enum Came {
    /// Over the socket in the state directory, where the kernel says who it is.
    Socket(Role),
    /// Over TCP, from there.
    Tcp(IpAddr),
}

/// Who asks, as far as it is known; in each request.
#[derive(Clone, Debug)]
struct Asker {
    role: Role,
    /// Why a viewer may not change anything, and what to do about it.
    why_not: Failed,
}

/// Who may do what, in one run.
#[derive(Debug)]
pub(super) struct Access {
    /// Where TCP is listened on, if it is.
    bound: Option<SocketAddr>,
    /// TLS and users, where there is a `web.yml`.
    web: Option<Current>,
    passwords: Passwords,
    /// Where nobody has a password.
    key: Option<Key>,
}

impl Access {
    /// With a key of its own where anybody could come in over TCP.
    ///
    /// # Errors
    /// A state directory that cannot hold the key, a `web.yml` that is wrong, and an address that it does not suffice for.
    pub(super) fn new(
        bound: Option<SocketAddr>,
        state: Option<&Path>,
        (web_config, feed): (Option<&Path>, &Feed),
    ) -> anyhow::Result<Access> {
        let web = match (bound, web_config) {
            (Some(bound), Some(path)) => Some(Current::read(path, bound, feed.clone())),
            (Some(bound), None) => {
                Web::default().may_listen(bound).map_err(anyhow::Error::msg)?;
                None
            }
            (None, _) => None,
        };
        let web = web.transpose().map_err(anyhow::Error::msg)?;
        let needs_key = bound.is_some_and(|bound| bound.ip().is_loopback())
            && web.as_ref().is_none_or(|web| web.get().users.is_empty());
        Ok(Access {
            bound,
            web,
            passwords: Passwords::new(&random()?),
            key: needs_key.then(|| Key::make(state)).transpose()?,
        })
    }

    /// Where its page is, with what makes an operator of who opens it: browsers never send that by themselves.
    pub(super) fn url(&self) -> Option<String> {
        let bound = self.bound?;
        let scheme = self.tls().map_or("http", |_| "https");
        let fragment = self.key.as_ref();
        let fragment = fragment.map_or_else(String::new, |key| format!("/#key={}", key.text));
        Some(format!("{scheme}://{bound}{fragment}"))
    }

    /// How connections are hidden from others, if they are.
    pub(super) fn tls(&self) -> Option<Arc<ServerConfig>> {
        self.web.as_ref()?.get().tls.clone()
    }

    /// Who asks.
    ///
    /// # Errors
    /// A problem for who may not ask at all.
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
            let why_not =
                format!("{VIEWERS_READ}: a user of basic_auth_users whom homenode_roles says to be one");
            let (role, why_not) = (Role::Viewer, Failed::may_not(why_not));
            return Ok(Asker { role, why_not });
        }
        let said = head.headers.get(header::AUTHORIZATION);
        let is_key = said.is_some_and(|said| self.is_key(said));
        let role = if is_key { Role::Operator } else { Role::Viewer };
        if said.is_some() && !is_key {
            let detail = format!("that is not the key: {}", self.remedy());
            return Err(Failed::unauthorized(detail, CHALLENGE_KEY));
        }
        let why_not = Failed::unauthorized(format!("{VIEWERS_READ}: {}", self.remedy()), CHALLENGE_KEY);
        Ok(Asker { role, why_not })
    }

    /// The user who asks.
    async fn user(&self, web: &Web, from: IpAddr, headers: &HeaderMap) -> Result<Asker, Failed> {
        let unknown = |detail| Failed::unauthorized(detail, CHALLENGE_PASSWORD);
        let said = headers.get(header::AUTHORIZATION);
        let said = said.ok_or_else(|| unknown("say a name and a password of web.yml's basic_auth_users"))?;
        let said =
            basic(said).ok_or_else(|| unknown("that is no name and password, as RFC 7617 has them"))?;
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
                    "{VIEWERS_READ}: have homenode_roles of web.yml say `{name}: operator`"
                )),
            }),
            None => Err(unknown("there is no user of that name and password")),
        }
    }

    fn is_key(&self, said: &HeaderValue) -> bool {
        let said = said.as_bytes().split_at_checked("Bearer ".len());
        let (scheme, said) = said.unwrap_or_default();
        let is_it = |key: &Key| bool::from(key.text.as_bytes().ct_eq(said));
        scheme.eq_ignore_ascii_case(b"Bearer ") && self.key.as_ref().is_some_and(is_it)
    }

    /// What makes an operator of who asks over loopback.
    fn remedy(&self) -> String {
        let file = self.key.as_ref().and_then(|key| key.file.as_ref());
        let place = file.map_or_else(
            || "the agent said when it started".to_owned(),
            |(_, path)| format!("{} holds", path.display()),
        );
        format!("send `Authorization: Bearer KEY`, with the key that {place}")
    }
}

/// Name and password.
fn basic(said: &HeaderValue) -> Option<String> {
    let (scheme, said) = said.as_bytes().split_at_checked("Basic ".len())?;
    let said = scheme
        .eq_ignore_ascii_case(b"Basic ")
        .then(|| BASE64_STANDARD.decode(said.trim_ascii()))?;
    String::from_utf8(said.ok()?).ok()
}

/// How to become known.
const CHALLENGE_KEY: &str = "Bearer realm=\"homenode\"";
const CHALLENGE_PASSWORD: &str = "Basic realm=\"homenode\", charset=\"UTF-8\"";

/// Lets in who may ask, and notes who it is.
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

/// Lets operators through to what changes something, and nothing that a page of another site had a browser send.
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
    // Browsers say so of their own accord, and pages cannot change it.
    let site = headers.get("sec-fetch-site").map(HeaderValue::as_bytes);
    if !matches!(site, None | Some(b"same-origin" | b"none")) {
        return Err(Failed::forbidden(
            "a page of another site may not change anything here",
        ));
    }
    let length = headers.get(header::CONTENT_LENGTH).map(HeaderValue::as_bytes);
    let has_body =
        headers.contains_key(header::TRANSFER_ENCODING) || !matches!(length, None | Some(b"0" | b""));
    // A form of another site can be sent as text, as a form or as files, and as nothing else.
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

/// Bytes that nobody can guess.
fn random() -> anyhow::Result<[u8; KEY_BYTES]> {
    let mut bytes = [0_u8; KEY_BYTES];
    // So few come in one piece, or not at all.
    let got = getrandom(&mut bytes, GetRandomFlags::empty()).context("the kernel gives no random key")?;
    anyhow::ensure!(got == KEY_BYTES, "the kernel gives no random key");
    Ok(bytes)
}

/// What makes an operator of whoever can read it, for one run of the agent.
struct Key {
    text: String,
    /// Where it lies; removed with the value.
    file: Option<(StateDir, PathBuf)>,
}

/// It must not get into a log by accident.
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
