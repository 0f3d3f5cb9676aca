//! TLS and passwords, configured with the file that Prometheus exporters use (`web.yml` of the exporter-toolkit), and one key of
//! our own, `homenode_roles`.
//!
//! For every connection and request, the agent checks whether the files have changed, and if so reads them again: renewed
//! certificates and removed users need no restart. An error in the files is reported once, and the previous configuration stays
//! in force, because a typo must not make an agent open or unreachable. Changes that would widen access take a restart, and are
//! reported too ([`bounds`]).

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read as _;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::str::FromStr as _;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::anyhow;
use bcrypt::HashParts;
use rustix::fs::OFlags;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, TrustAnchor};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::version::{TLS12, TLS13};
use tokio_rustls::rustls::{RootCertStore, ServerConfig, SupportedProtocolVersion};

use crate::feed::Feed;
use crate::role::Role;

mod bounds;

use bounds::Bounds;

/// Most bytes of a file: four times the size of a store of all public authorities.
const BYTES_MAX: u64 = 1 << 20;
/// Accepted bcrypt costs: a lower cost protects nothing, and a higher one takes seconds.
const COST: std::ops::RangeInclusive<u32> = 4..=15;

/// `web.yml` as written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    tls_server_config: Option<TlsWritten>,
    #[serde(default, deserialize_with = "named_once")]
    basic_auth_users: BTreeMap<String, String>,
    #[serde(default, deserialize_with = "named_once")]
    homenode_roles: BTreeMap<String, Role>,
}

/// Refuses duplicate names. Otherwise a file that is cut short would apply the first value, and the whole file the second.
fn named_once<'de, D, T>(deserializer: D) -> Result<BTreeMap<String, T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct Names<T>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Names<T> {
        type Value = BTreeMap<String, T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a value for each name")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut values = BTreeMap::new();
            while let Some((name, value)) = map.next_entry::<String, T>()? {
                if values.contains_key(&name) {
                    return Err(A::Error::custom(format!("`{name}` is listed twice: remove one")));
                }
                values.insert(name, value);
            }
            Ok(values)
        }
    }

    deserializer.deserialize_map(Names(PhantomData))
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TlsWritten {
    cert_file: PathBuf,
    key_file: PathBuf,
    #[serde(default)]
    client_auth_type: ClientAuth,
    client_ca_file: Option<PathBuf>,
    #[serde(default)]
    min_version: Version,
}

/// What is required of client certificates, weakest first. Two kinds of the toolkit are left out: they accept any certificate,
/// and so prove nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
enum ClientAuth {
    #[default]
    NoClientCert,
    VerifyClientCertIfGiven,
    RequireAndVerifyClientCert,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
enum Version {
    #[default]
    #[serde(rename = "TLS12")]
    Tls12,
    #[serde(rename = "TLS13")]
    Tls13,
}

impl Version {
    /// Returns the version as written in `web.yml`.
    fn name(self) -> &'static str {
        match self {
            Version::Tls12 => "TLS12",
            Version::Tls13 => "TLS13",
        }
    }
}

/// A user with a password.
#[derive(Clone, Debug)]
pub(super) struct User {
    /// The bcrypt hash.
    pub hash: String,
    pub role: Role,
}

/// The parsed `web.yml`.
#[derive(Clone, Debug, Default)]
pub(super) struct Web {
    /// `None` means plain connections.
    pub tls: Option<Arc<ServerConfig>>,
    /// If empty, no password is required.
    pub users: BTreeMap<String, User>,
    /// Whether every client needs a verified certificate.
    pub has_verified_clients: bool,
    bounds: Bounds,
    read: Vec<(PathBuf, Option<Stamp>)>,
}

/// Identifies a version of a file, to detect changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    device_inode: (u64, u64),
    size: u64,
    changed: (i64, i64),
}

impl Stamp {
    fn of(metadata: &std::fs::Metadata) -> Stamp {
        Stamp {
            device_inode: (metadata.dev(), metadata.ino()),
            size: metadata.len(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// State of one reading of the files.
#[derive(Debug, Default)]
struct Reading {
    /// Whether an earlier version of the files is in force, and its bounds apply.
    is_again: bool,
    /// Files that were read, or tried.
    files: Vec<(PathBuf, Option<Stamp>)>,
    /// Changes that would widen access, and what stays in force instead.
    kept: Vec<String>,
}

/// What other users may do with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Others {
    /// Other users may read the file, because its content is public.
    MayRead,
    MayDoNothing,
}

impl Web {
    /// Reads the file and the files it names.
    ///
    /// # Errors
    /// Names the file and the remedy.
    pub(super) fn read(path: &Path) -> anyhow::Result<Web> {
        Web::default().read_again(path, &mut Reading::default())
    }

    /// Reads `path` and the files it names, within the bounds of `self`. `reading` lists the files that were tried, even after an
    /// error.
    fn read_again(&self, path: &Path, reading: &mut Reading) -> anyhow::Result<Web> {
        let wrong = |what: &dyn fmt::Display| anyhow!("{}: {what}", path.display());
        let text = text_of(path, Others::MayRead, reading)?;
        let text = String::from_utf8(text).map_err(|_| wrong(&"this is not text"))?;
        let written: Option<Written> = yaml_serde::from_str(&text).map_err(|e| wrong(&e))?;
        let Some(written) = written else {
            return Err(wrong(
                &"it is empty: it may have tls_server_config, basic_auth_users and homenode_roles",
            ));
        };
        let mut users = users(&written).map_err(|e| wrong(&e))?;
        let mut tls = written.tls_server_config;
        if reading.is_again {
            users = self.bounds.narrow_users(users, &self.users, &mut reading.kept);
            tls = self.bounds.narrow_tls(tls, &mut reading.kept);
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        let made = tls
            .as_ref()
            .map(|tls| tls_config(tls, folder, &self.bounds, reading));
        let (config, authorities) = made.transpose().map_err(|e| wrong(&e))?.unzip();
        Ok(Web {
            has_verified_clients: tls
                .as_ref()
                .is_some_and(|tls| tls.client_auth_type == ClientAuth::RequireAndVerifyClientCert),
            bounds: self.bounds.after(tls, authorities.unwrap_or_default(), &users),
            users,
            tls: config.map(Arc::new),
            read: reading.files.clone(),
        })
    }

    /// Returns true if connections are encrypted and every client must authenticate.
    pub(super) fn is_closed(&self) -> bool {
        self.tls.is_some() && (!self.users.is_empty() || self.has_verified_clients)
    }

    /// Checks that this configuration is strict enough to listen at an address.
    ///
    /// # Errors
    /// If it is not: names what is missing.
    pub(super) fn may_listen(&self, address: SocketAddr) -> anyhow::Result<()> {
        if address.ip().is_loopback() || self.is_closed() {
            return Ok(());
        }
        let missing = match self.tls {
            None => "TLS (`tls_server_config`)",
            Some(_) => "passwords (`basic_auth_users`, or `client_auth_type: RequireAndVerifyClientCert`)",
        };
        Err(anyhow!(
            "{} can be reached from other hosts, which requires both TLS and passwords; missing: {missing}; listen on \
             127.0.0.1, or name a web.yml that has both with --web-config",
            address.ip()
        ))
    }
}

fn users(written: &Written) -> anyhow::Result<BTreeMap<String, User>> {
    if let Some(name) = written
        .homenode_roles
        .keys()
        .find(|name| !written.basic_auth_users.contains_key(*name))
    {
        return Err(anyhow!(
            "homenode_roles: `{name}` is not in basic_auth_users: add it there with a password, or remove it here"
        ));
    }
    let user = |(name, hash): (&String, &String)| {
        let cost = HashParts::from_str(hash).ok().map(|parts| parts.get_cost());
        if name.contains(':') || name.is_empty() {
            return Err(anyhow!(
                "basic_auth_users: `{name}` is not a valid name: it must not be empty or contain a `:`"
            ));
        }
        // The message omits the hash: it may be a password, written there by mistake.
        match cost {
            None => Err(anyhow!(
                "basic_auth_users: the value of `{name}` is not a bcrypt hash: make one with `htpasswd -nBC 10 {name}`"
            )),
            Some(cost) if !COST.contains(&cost) => Err(anyhow!(
                "basic_auth_users: the hash of `{name}` has cost {cost}, which must be {} to {}: make one with \
                 `htpasswd -nBC 10 {name}`",
                COST.start(),
                COST.end()
            )),
            Some(_) => {
                let role = written.homenode_roles.get(name).copied().unwrap_or(Role::Viewer);
                let hash = hash.clone();
                Ok((name.clone(), User { hash, role }))
            }
        }
    };
    written.basic_auth_users.iter().map(user).collect()
}

/// Returns the TLS configuration and the accepted authorities of clients.
fn tls_config(
    tls: &TlsWritten,
    folder: &Path,
    bounds: &Bounds,
    reading: &mut Reading,
) -> anyhow::Result<(ServerConfig, Vec<TrustAnchor<'static>>)> {
    let (cert_file, key_file) = (folder.join(&tls.cert_file), folder.join(&tls.key_file));
    let certificates = certificates(&cert_file, reading)?;
    let key = text_of(&key_file, Others::MayDoNothing, reading)?;
    let key = PrivateKeyDer::from_pem_slice(&key)
        .map_err(|e| anyhow!("{} has no private key in PEM: {e}", key_file.display()))?;
    let versions: &[&SupportedProtocolVersion] = match tls.min_version {
        Version::Tls12 => &[&TLS13, &TLS12],
        Version::Tls13 => &[&TLS13],
    };
    let provider = Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
    let builder = builder.with_protocol_versions(versions)?;
    let mut accepted = Vec::new();
    let builder = match (tls.client_auth_type, &tls.client_ca_file) {
        (ClientAuth::NoClientCert, None) => builder.with_no_client_auth(),
        (ClientAuth::NoClientCert, Some(_)) => {
            return Err(anyhow!(
                "client_ca_file needs a client_auth_type that verifies certificates: \
                        RequireAndVerifyClientCert or VerifyClientCertIfGiven"
            ));
        }
        (kind, None) => {
            return Err(anyhow!(
                "client_auth_type {kind:?} needs client_ca_file, with the authorities of accepted certificates"
            ));
        }
        (kind, Some(authorities)) => {
            let path = folder.join(authorities);
            let mut roots = RootCertStore::empty();
            for certificate in self::certificates(&path, reading)? {
                let added = roots.add(certificate);
                added.map_err(|e| anyhow!("{} cannot be used: {e}", path.display()))?;
            }
            let narrowed = bounds.narrow_authorities(&mut roots, &mut reading.kept);
            narrowed.map_err(|e| anyhow!("{}: {e}", path.display()))?;
            accepted.clone_from(&roots.roots);
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            let verifier = match kind {
                ClientAuth::RequireAndVerifyClientCert => verifier,
                _ => verifier.allow_unauthenticated(),
            };
            let verifier = verifier.build();
            builder.with_client_cert_verifier(verifier.map_err(|e| anyhow!("{}: {e}", path.display()))?)
        }
    };
    let mut config = builder.with_single_cert(certificates, key).map_err(|e| {
        anyhow!(
            "{} and {} do not belong together, or cannot be used: {e}",
            cert_file.display(),
            key_file.display()
        )
    })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok((config, accepted))
}

fn certificates(path: &Path, reading: &mut Reading) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let text = text_of(path, Others::MayRead, reading)?;
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let all = all.map_err(|e| anyhow!("{} has no certificate in PEM: {e}", path.display()))?;
    match all.is_empty() {
        true => Err(anyhow!("{} has no certificate in PEM", path.display())),
        false => Ok(all),
    }
}

fn text_of(path: &Path, others: Others, reading: &mut Reading) -> anyhow::Result<Vec<u8>> {
    let failed =
        |e: std::io::Error| anyhow!("cannot read {}: {e}{}", path.display(), homenode_api::remedy(&e));
    reading.files.push((path.to_owned(), stamp(path)));
    // Only a regular file is opened: opening a device may have effects, and opening a pipe would wait for a writer.
    let no_file = || anyhow!("{} is not a regular file: put one in its place", path.display());
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(no_file());
    }
    let no_wait = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
    let file = std::fs::File::options()
        .read(true)
        .custom_flags(no_wait)
        .open(path)
        .map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    let mode = metadata.mode() & 0o777;
    let (forbidden, what) = match others {
        Others::MayRead => (0o002, "be written to"),
        Others::MayDoNothing => (0o006, "be read or written to"),
    };
    if !metadata.is_file() {
        return Err(no_file());
    }
    if mode & forbidden != 0 {
        return Err(anyhow!(
            "{} may {what} by every user of this host (mode {mode:o}): run `chmod o= {}`",
            path.display(),
            path.display()
        ));
    }
    let mut bytes = Vec::new();
    file.take(BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    match bytes.len() as u64 > BYTES_MAX {
        true => Err(anyhow!("{} has more than {BYTES_MAX} bytes", path.display())),
        false => Ok(bytes),
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    std::fs::metadata(path).ok().as_ref().map(Stamp::of)
}

/// The configuration in force, read from a file that may change.
#[derive(Debug)]
pub(super) struct Current {
    path: PathBuf,
    bound: SocketAddr,
    feed: Feed,
    now: Mutex<Arc<Web>>,
}

impl Current {
    /// Reads the file for a server at an address.
    ///
    /// # Errors
    /// As [`Web::read`] and [`Web::may_listen`].
    pub(super) fn read(path: &Path, bound: SocketAddr, feed: Feed) -> anyhow::Result<Current> {
        let web = Web::read(path)?;
        web.may_listen(bound)?;
        Ok(Current {
            path: path.to_owned(),
            bound,
            feed,
            now: Mutex::new(Arc::new(web)),
        })
    }

    /// Returns the configuration in force. If a file has changed, reads the files again first.
    pub(super) fn get(&self) -> Arc<Web> {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        if now.read.iter().all(|(path, was)| stamp(path) == *was) {
            return Arc::clone(&now);
        }
        let mut reading = Reading {
            is_again: true,
            ..Reading::default()
        };
        let again = now.read_again(&self.path, &mut reading);
        // The new configuration is at least as strict as the old one, so this cannot fail.
        let again = again.and_then(|web| web.may_listen(self.bound).map(|()| web));
        let web = match again {
            Ok(web) => {
                self.feed.notice(bounds::notice(&self.path, &reading.kept));
                web
            }
            Err(error) => {
                self.feed
                    .notice(format!("{error}; the version read before stays in force"));
                // Remember these versions, so the files are read again only after another change.
                Web {
                    read: reading.files,
                    ..Web::clone(&now)
                }
            }
        };
        *now = Arc::new(web);
        Arc::clone(&now)
    }
}
