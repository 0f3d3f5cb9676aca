//! Tests of access over TCP while `web.yml`, and the files that it names, change.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::Permissions;
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use crate::usage_file::Clock;
use crate::wall_clock::WallClock;
use axum::body::Body;
use tokio::runtime::{Builder, Runtime};
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::version::{TLS12, TLS13};
use tokio_rustls::rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, Error, ServerConnection, SignatureScheme,
};

use super::*;

/// bcrypt hash of `correct horse`, with the lowest cost.
const HASH: &str = "$2b$04$K08QjgoDisLXmecYm6C23Ol5IpNA4Oymq6Olsi34gjEulRPJlE/5G";
const PASSWORD: &str = "correct horse";
const TLS: &str = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n";
const CLIENTS: &str =
    "  client_ca_file: authority.crt\n  client_auth_type: RequireAndVerifyClientCert\n  min_version: TLS13\n";

fn users() -> String {
    format!("basic_auth_users:\n  alice: {HASH}\n  bob: {HASH}\nhomenode_roles:\n  alice: operator\n")
}

/// Accepts every server's certificate: no test here checks the server's identity.
#[derive(Debug)]
struct AnyServer(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(
            message,
            certificate,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(
            message,
            certificate,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// What clients may do: which connections succeed, and which role each set of credentials gets.
#[derive(Clone, Debug, PartialEq, Eq)]
struct LetIn {
    connected: BTreeSet<String>,
    roles: BTreeMap<String, Option<Role>>,
}

impl LetIn {
    /// Returns true if `other` accepts every request that `self` accepts.
    fn is_within(&self, other: &LetIn) -> bool {
        self.connected.is_subset(&other.connected)
            && self.roles.iter().all(|(who, role)| *role <= other.roles[who])
    }
}

/// An agent's access with a `web.yml` in a directory of certificates.
struct Site {
    dir: tempfile::TempDir,
    feed: Feed,
    access: Option<Access>,
    runtime: Runtime,
    clients: Vec<(String, Arc<ClientConfig>)>,
    /// Results for earlier TLS configurations and users, cached because passwords are slow to check.
    connected: Vec<(Option<Arc<ServerConfig>>, BTreeSet<String>)>,
    roles: BTreeMap<String, BTreeMap<String, Option<Role>>>,
}

impl Site {
    fn new() -> Site {
        let mut site = Site {
            dir: tempfile::tempdir().unwrap(),
            feed: Feed::new(WallClock::start(Clock::Host)),
            access: None,
            runtime: Builder::new_current_thread().enable_all().build().unwrap(),
            clients: Vec::new(),
            connected: Vec::new(),
            roles: BTreeMap::new(),
        };
        for name in ["server", "authority", "other"] {
            site.certify(name);
        }
        site.sign("client", "authority");
        site.sign("stranger", "other");
        for (version, name) in [(&TLS12, "1.2"), (&TLS13, "1.3")] {
            let provider = Arc::new(ring::default_provider());
            for client in ["no", "client", "stranger"] {
                let config = ClientConfig::builder_with_provider(Arc::clone(&provider));
                let config = config.with_protocol_versions(&[version]).unwrap();
                let config = config
                    .dangerous()
                    .with_custom_certificate_verifier(Arc::new(AnyServer(Arc::clone(&provider))));
                let config = match client {
                    "no" => config.with_no_client_auth(),
                    name => {
                        let file =
                            |ending: &str| std::fs::read(site.path(&format!("{name}.{ending}"))).unwrap();
                        let certificate = CertificateDer::from_pem_slice(&file("crt")).unwrap();
                        let key = PrivateKeyDer::from_pem_slice(&file("key")).unwrap();
                        config.with_client_auth_cert(vec![certificate], key).unwrap()
                    }
                };
                let what = format!("TLS {name}, {client} certificate");
                site.clients.push((what, Arc::new(config)));
            }
        }
        site
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn openssl(&self, args: &str) {
        let mut openssl = Command::new("openssl");
        let made = openssl
            .current_dir(self.dir.path())
            .args(args.split(' '))
            .output();
        let made = made.expect("openssl is there");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    }

    /// Makes, or renews, a self-signed certificate.
    fn certify(&self, name: &str) {
        self.openssl(&format!(
            "req -x509 -newkey ec -nodes -days 2 -pkeyopt ec_paramgen_curve:prime256v1 -subj /CN={name} -keyout {name}.key -out {name}.crt"
        ));
        std::fs::set_permissions(self.path(&format!("{name}.key")), Permissions::from_mode(0o600)).unwrap();
    }

    /// Makes a client certificate signed by an authority.
    fn sign(&self, name: &str, authority: &str) {
        self.openssl(&format!(
            "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN={name} -keyout {name}.key -out {name}.csr"
        ));
        std::fs::write(self.path("client.ext"), "extendedKeyUsage=clientAuth\n").unwrap();
        self.openssl(&format!(
            "x509 -req -in {name}.csr -CA {authority}.crt -CAkey {authority}.key -CAcreateserial -days 2 \
             -extfile client.ext -out {name}.crt"
        ));
    }

    fn write(&self, text: &str) {
        std::fs::write(self.path("web.yml"), text).unwrap();
    }

    /// Starts access control with this text as `web.yml`.
    fn start(&mut self, text: &str) -> anyhow::Result<LetIn> {
        self.write(text);
        let bound = SocketAddr::from((Ipv4Addr::LOCALHOST, 443));
        let path = self.path("web.yml");
        let access = Access::new(Some(bound), None, (Some(&path), &self.feed));
        self.access = Some(access?);
        self.feed.take_notices();
        self.roles.clear();
        Ok(self.let_in())
    }

    /// Changes the file while it is in force. Returns what is let in from then on, and the notices.
    fn change(&mut self, text: &str) -> (LetIn, String) {
        self.write(text);
        let let_in = self.let_in();
        (let_in, self.feed.take_notices().join("\n"))
    }

    /// Tries every kind of connection and credentials.
    fn let_in(&mut self) -> LetIn {
        let access = self.access.as_ref().unwrap();
        let web = access.web.as_ref().unwrap().get();
        let same = |known: &Option<Arc<ServerConfig>>| match (known, &web.tls) {
            (Some(known), Some(tls)) => Arc::ptr_eq(known, tls),
            (known, tls) => known.is_none() && tls.is_none(),
        };
        let connected = match self.connected.iter().find(|(known, _)| same(known)) {
            Some((_, connected)) => connected.clone(),
            None => {
                let connected = match &web.tls {
                    None => BTreeSet::from(["plain".to_owned()]),
                    Some(tls) => {
                        let agreed = self
                            .clients
                            .iter()
                            .filter(|(_, client)| agree(tls, client).is_some());
                        agreed.map(|(what, _)| what.clone()).collect()
                    }
                };
                self.connected.push((web.tls.clone(), connected.clone()));
                connected
            }
        };
        let state = format!(
            "{:?} {} {}",
            web.users,
            web.has_verified_clients,
            web.tls.is_some()
        );
        if !self.roles.contains_key(&state) {
            let key = access.key.as_ref().map(|key| format!("Bearer {}", key.text));
            let said = [
                ("nothing", None),
                ("the key", Some(key.unwrap_or_else(|| "Bearer 00".into()))),
                ("alice", Some(basic_of("alice", PASSWORD))),
                ("bob", Some(basic_of("bob", PASSWORD))),
                ("mallory", Some(basic_of("mallory", PASSWORD))),
                ("alice's other", Some(basic_of("alice", "battery staple"))),
            ];
            let roles = said.map(|(who, said)| (who.to_owned(), self.role(said.as_deref())));
            self.roles.insert(state.clone(), roles.into());
        }
        let roles = self.roles[&state].clone();
        LetIn { connected, roles }
    }

    fn role(&self, said: Option<&str>) -> Option<Role> {
        let mut request = Request::builder()
            .uri("/v1/nodes")
            .header(header::HOST, "localhost");
        if let Some(said) = said {
            request = request.header(header::AUTHORIZATION, said);
        }
        let (head, _) = request.body(Body::empty()).unwrap().into_parts();
        let came = Came::Tcp(Ipv4Addr::LOCALHOST.into());
        let asker = self.access.as_ref().unwrap().asker(came, &head);
        self.runtime.block_on(asker).ok().map(|asker| asker.role)
    }

    /// Returns the certificate that the server shows.
    fn certificate(&self) -> Vec<u8> {
        let tls = self.access.as_ref().unwrap().tls().unwrap();
        let client = |what: &str| &self.clients.iter().find(|(name, _)| name == what).unwrap().1;
        agree(&tls, client("TLS 1.3, client certificate")).unwrap()
    }
}

fn basic_of(name: &str, password: &str) -> String {
    format!("Basic {}", BASE64_STANDARD.encode(format!("{name}:{password}")))
}

/// Performs a TLS handshake in memory; returns the server's certificate if it succeeds.
fn agree(server: &Arc<ServerConfig>, client: &Arc<ClientConfig>) -> Option<Vec<u8>> {
    let mut server = ServerConnection::new(Arc::clone(server)).unwrap();
    let mut client = ClientConnection::new(Arc::clone(client), "localhost".try_into().unwrap()).unwrap();
    loop {
        let (mut to_server, mut to_client) = (Vec::new(), Vec::new());
        while client.wants_write() {
            client.write_tls(&mut to_server).unwrap();
        }
        let mut left = &to_server[..];
        while !left.is_empty() {
            server.read_tls(&mut left).unwrap();
            server.process_new_packets().ok()?;
        }
        while server.wants_write() {
            server.write_tls(&mut to_client).unwrap();
        }
        let mut left = &to_client[..];
        while !left.is_empty() {
            client.read_tls(&mut left).unwrap();
            client.process_new_packets().ok()?;
        }
        if to_server.is_empty() && to_client.is_empty() {
            let is_done = !server.is_handshaking() && !client.is_handshaking();
            return is_done.then(|| client.peer_certificates().unwrap()[0].to_vec());
        }
    }
}

/// Returns whole files; a test cuts them at every byte.
fn whole() -> Vec<String> {
    let users = users();
    vec![
        format!("{TLS}{users}"),
        format!("{users}{TLS}"),
        format!("{TLS}{CLIENTS}{users}"),
        format!("{users}{TLS}{CLIENTS}"),
        format!("{TLS}{CLIENTS}"),
        format!("{TLS}  client_ca_file: authority.crt\n  client_auth_type: VerifyClientCertIfGiven\n{users}"),
        users.clone(),
        format!(
            "homenode_roles: {{alice: operator, bob: viewer}}\nbasic_auth_users: {{alice: {HASH}, bob: {HASH}}}\n"
        ),
        TLS.to_owned(),
    ]
}

#[test]
fn a_file_cut_at_any_byte_lets_in_no_request_that_was_refused_and_heals_when_it_is_whole() {
    let mut site = Site::new();
    for text in whole() {
        let before = site.start(&text).unwrap();
        let cuts = (0..text.len()).rev().chain(0..=text.len());
        for cut in cuts {
            let (now, said) = site.change(&text[..cut]);
            let shown = &text[..cut];
            assert!(now.is_within(&before), "{shown}\n{said}\n{now:?}\n{before:?}");
        }
        assert_eq!(site.let_in(), before, "{text}");
    }
}

#[test]
fn a_file_that_is_written_over_byte_by_byte_lets_in_no_request_that_was_refused() {
    let mut site = Site::new();
    let all = whole();
    for (text, next) in all.iter().zip(all.iter().skip(1)) {
        let before = site.start(text).unwrap();
        for cut in 0..=next.len() {
            let mixed = format!("{}{}", &next[..cut], text.get(cut..).unwrap_or_default());
            let (now, said) = site.change(&mixed);
            assert!(now.is_within(&before), "{mixed}\n{said}\n{now:?}\n{before:?}");
        }
    }
}

#[test]
fn what_would_let_more_in_takes_a_restart_and_is_said_with_what_stays_in_force() {
    let mut site = Site::new();
    let (with_clients, users) = (format!("{TLS}{CLIENTS}"), users());
    let all = format!("{with_clients}{users}");
    let new_user = all.replace("  bob:", &format!("  mallory: {HASH}\n  bob:"));
    let operators = all.replace("alice: operator", "alice: operator\n  bob: operator");
    let certificates = |names: [&str; 2]| names.map(|name| std::fs::read_to_string(site.path(name)).unwrap());
    std::fs::write(
        site.path("both.crt"),
        certificates(["authority.crt", "other.crt"]).concat(),
    )
    .unwrap();
    for (text, said) in [
        (users.clone(), "TLS stays in force"),
        (
            with_clients.clone(),
            "passwords stay in force, those of alice, bob",
        ),
        (
            format!("{with_clients}basic_auth_users: {{}}\n"),
            "passwords stay in force",
        ),
        (
            format!("{TLS}{users}"),
            "RequireAndVerifyClientCert stays in force",
        ),
        (
            all.replace("RequireAndVerify", "Verify")
                .replace("ClientCert\n", "ClientCertIfGiven\n"),
            "stays in force",
        ),
        (all.replace("TLS13", "TLS12"), "TLS13 stays in force"),
        (new_user, "`mallory` is new: refused"),
        (operators, "`bob` is a new operator: stays a viewer"),
        (all.replace("authority.crt", "both.crt"), "1 new authorities"),
        (
            all.replace("authority.crt", "other.crt"),
            "restart the agent to accept them",
        ),
    ] {
        let before = site.start(&all).unwrap();
        let (now, notice) = site.change(&text);
        assert_eq!(now, before, "{text}\n{notice}");
        assert!(
            notice.contains(said) && notice.contains("restart"),
            "{text}\n{notice}"
        );
        let restarted = site.start(&text).unwrap();
        assert!(!restarted.is_within(&before), "{text}\n{restarted:?}");
    }
}

#[test]
fn users_that_are_new_where_nobody_needed_a_password_are_viewers_until_a_restart() {
    let mut site = Site::new();
    let before = site.start(TLS).unwrap();
    assert_eq!(before.roles["the key"], Some(Role::Operator));
    let (now, said) = site.change(&format!("{TLS}{}", users()));
    assert_eq!((now.roles["nothing"], now.roles["the key"]), (None, None));
    assert_eq!(
        (now.roles["alice"], now.roles["bob"]),
        (Some(Role::Viewer), Some(Role::Viewer))
    );
    assert!(said.contains("`alice` is a new operator"), "{said}");
    // From now on a password is required.
    let (again, said) = site.change(TLS);
    assert_eq!(again, now, "{said}");
}

#[test]
fn what_lets_fewer_in_is_in_force_at_once_and_users_of_this_run_come_back() {
    let mut site = Site::new();
    let all = format!("{TLS}{}", users());
    let before = site.start(&all).unwrap();
    let without_bob = all.replace(&format!("  bob: {HASH}\n"), "");
    let (now, said) = site.change(&without_bob.replace("alice: operator", "alice: viewer"));
    assert_eq!(
        (now.roles["alice"], now.roles["bob"]),
        (Some(Role::Viewer), None),
        "{said}"
    );
    // One user is removed and another added.
    let (now, said) = site.change(&without_bob.replace("  alice:", &format!("  mallory: {HASH}\n  alice:")));
    assert_eq!((now.roles["mallory"], now.roles["bob"]), (None, None), "{said}");
    assert_eq!(site.change(&all).0, before);
    let other = bcrypt::hash("battery staple", 4).unwrap();
    let (now, said) = site.change(&all.replacen(HASH, &other, 1));
    assert_eq!(
        (now.roles["alice"], now.roles["alice's other"]),
        (None, Some(Role::Operator)),
        "{said}"
    );
}

#[test]
fn renewed_certificates_are_shown_at_once_also_while_something_takes_a_restart() {
    let mut site = Site::new();
    let all = format!("{TLS}{CLIENTS}{}", users());
    for text in [all.clone(), all.replace(CLIENTS, ""), users()] {
        site.start(&all).unwrap();
        site.change(&text);
        let first = site.certificate();
        site.certify("server");
        let let_in = site.let_in();
        assert_ne!(site.certificate(), first, "{text}");
        assert!(!let_in.connected.contains("plain"));
        // The authority's certificate is renewed with the same key: clients that it signed are still let in.
        site.openssl("req -x509 -key authority.key -days 3 -subj /CN=authority -out authority.crt");
        assert_eq!(site.let_in(), let_in, "{text}");
    }
}

#[test]
fn a_file_that_is_no_regular_file_of_the_owners_blocks_no_request_and_changes_nothing() {
    let mut site = Site::new();
    let all = format!("{TLS}{CLIENTS}{}", users());
    for name in ["web.yml", "server.crt", "server.key", "authority.crt"] {
        for kind in ["pipe", "directory", "gone", "others may write", "empty", "device"] {
            let before = site.start(&all).unwrap();
            let (path, aside) = (site.path(name), site.path("aside"));
            std::fs::rename(&path, &aside).unwrap();
            match kind {
                "pipe" => {
                    let made = Command::new("mkfifo").arg(&path).status().unwrap();
                    assert!(made.success());
                }
                "directory" => std::fs::create_dir(&path).unwrap(),
                "others may write" => {
                    std::fs::copy(&aside, &path).unwrap();
                    std::fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
                }
                "empty" => {
                    std::fs::write(&path, "").unwrap();
                    std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
                }
                "device" => std::os::unix::fs::symlink("/dev/zero", &path).unwrap(),
                _ => {}
            }
            // A request that blocks on a pipe without a writer would never end.
            let (done, ended) = mpsc::channel();
            let thread = std::thread::spawn(move || {
                let let_in = site.let_in();
                done.send(()).unwrap();
                (site, let_in)
            });
            let ended = ended.recv_timeout(Duration::from_secs(120));
            assert!(ended.is_ok(), "{name} as {kind} blocks a request");
            let now;
            (site, now) = thread.join().unwrap();
            let said = site.feed.take_notices().join("\n");
            assert_eq!(now, before, "{name}, {kind}");
            assert!(
                said.contains(name) && said.contains("stays in force"),
                "{name}, {kind}: {said}"
            );
            if kind == "directory" {
                std::fs::remove_dir(&path).unwrap();
            }
            std::fs::rename(&aside, &path).unwrap();
            assert_eq!(site.let_in(), before);
        }
    }
}

#[test]
fn a_name_that_is_there_twice_is_refused() {
    let mut site = Site::new();
    let twice = format!("basic_auth_users:\n  alice: {HASH}\n  alice: {HASH}\n");
    let said = site.start(&twice).unwrap_err().to_string();
    assert!(said.contains("`alice` is listed twice"), "{said}");
    let roles = format!("{}  alice: viewer\n", users());
    let said = site.start(&roles).unwrap_err().to_string();
    assert!(said.contains("`alice` is listed twice"), "{said}");
}
