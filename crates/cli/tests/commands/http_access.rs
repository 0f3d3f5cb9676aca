//! Access rights over HTTP: of operators, viewers, users of a `web.yml`, and all other clients.

use std::fs::Permissions;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::http::{Answer, Site};
use crate::common::{refused, run};

const SCENARIO: &str = "\
name = \"one\"
machine = \"r420\"
duration = \"360000s\"
[[vm]]
name = \"web\"
vcpus = 2
memory = \"4GiB\"
workload = \"povray\"
work_share = 100000.0
";
const SETTINGS: &str = "/v1/vms/web/settings";
const AS_JSON: &str = "Content-Type: application/json\r\n";
/// bcrypt of `correct horse`, with costs 4 and 10.
const HASH: &str = "$2b$04$K08QjgoDisLXmecYm6C23Ol5IpNA4Oymq6Olsi34gjEulRPJlE/5G";
const HASH_SLOW: &str = "$2b$10$8qxklqdgdwcMGfEnTYBoUOpa7I0lCeRxq/C5xtRDqtU/74olfDHMK";

fn site(args: &[&str]) -> Site {
    let site = Site::on(tempfile::tempdir().unwrap(), SCENARIO, args);
    site.eventually("the VM is there", |site| {
        (site.over_socket("/v1/vms/web").status == 200).then_some(())
    });
    site
}

fn tag(answer: &Answer) -> String {
    let line = answer.head.lines().find_map(|line| line.strip_prefix("etag: "));
    format!("If-Match: {}\r\n", line.expect("a tag"))
}

fn settings(permit: Option<&str>, policy: Option<&str>, floor: Option<u64>) -> String {
    json!({"permit": permit, "memory_policy": policy, "memory_floor_bytes": floor}).to_string()
}

#[test]
fn operators_alone_change_settings_and_nobody_overwrites_anothers() {
    let site = site(&["--period", "200ms"]);
    let (operator, none) = (site.as_operator(), settings(None, None, None));
    let read = site.get(SETTINGS);
    assert_eq!(read.json(), serde_json::from_str::<Value>(&none).unwrap());
    let wanted = settings(Some("250k"), Some("round-4k"), Some(1 << 30));
    let put = |headers: &str, body: &str| site.ask("PUT", SETTINGS, &format!("{AS_JSON}{headers}"), body);

    // Any user of the host may read. Changes need the key.
    let refused = put(&tag(&read), &wanted);
    assert_eq!(
        (refused.status, refused.problem().as_str()),
        (401, "unauthorized")
    );
    assert!(refused.body.contains("http.key") && refused.head.contains("www-authenticate: bearer"));
    let wrong = format!("{}Authorization: Bearer {}\r\n", tag(&read), "0".repeat(64));
    assert_eq!(put(&wrong, &wanted).status, 401);
    assert_eq!(
        site.ask("GET", "/v1/nodes", "Authorization: Bearer x\r\n", "")
            .status,
        401
    );
    assert_eq!(site.get(SETTINGS).json(), read.json());

    let done = put(&format!("{operator}{}", tag(&read)), &wanted);
    assert_eq!(done.status, 200, "{done:?}");
    assert_eq!(done.json(), serde_json::from_str::<Value>(&wanted).unwrap());
    // The change is in force at once, and the earlier tag is stale.
    assert_eq!(tag(&site.get(SETTINGS)), tag(&done));
    let late = put(&format!("{operator}{}", tag(&read)), &none);
    assert_eq!((late.status, late.problem().as_str()), (412, "changed"));
    site.eventually("the host has it", |site| {
        let vm = site.json("/v1/vms/web");
        (vm["permit"]["permit"] == "250k" && vm["memory_policy_chosen"] == "round-4k").then_some(())
    });
    // On the socket the agent's own user is an operator without a key.
    let headers = format!("{AS_JSON}{}", tag(&done));
    let back = site.ask_over_socket("PUT", SETTINGS, &headers, &none);
    assert_eq!((back.status, back.json()), (200, read.json()), "{back:?}");
}

#[test]
fn a_change_that_is_said_wrongly_or_by_another_page_is_refused() {
    let site = site(&["--period", "200ms"]);
    let (operator, none) = (site.as_operator(), settings(None, None, None));
    let any = format!("{operator}If-Match: *\r\n");
    let put = |headers: &str, body: &str| site.ask("PUT", SETTINGS, headers, body);
    for (headers, body, status) in [
        (format!("{any}{AS_JSON}"), none.as_str(), 200),
        (format!("{operator}{AS_JSON}"), &none, 428),
        (format!("{operator}{AS_JSON}If-Match: 12\r\n"), &none, 400),
        (format!("{any}Content-Type: text/plain\r\n"), &none, 415),
        (any.clone(), &none, 415),
        (
            format!("{any}{AS_JSON}Sec-Fetch-Site: cross-site\r\n"),
            &none,
            403,
        ),
        (
            format!("{any}{AS_JSON}Sec-Fetch-Site: same-origin\r\n"),
            &none,
            200,
        ),
        (
            format!("{any}{AS_JSON}Origin: http://evil.example\r\n"),
            &none,
            403,
        ),
        (format!("{any}{AS_JSON}"), "{\"permit\": null}", 422),
        (format!("{any}{AS_JSON}"), "{", 400),
        (
            format!("{any}{AS_JSON}"),
            &settings(Some("lots"), None, None),
            422,
        ),
        (
            format!("{any}{AS_JSON}"),
            &settings(None, Some("worst"), None),
            422,
        ),
    ] {
        let answer = put(&headers, body);
        assert_eq!(answer.status, status, "{headers}{body}: {answer:?}");
    }
    let nobody = site.ask(
        "PUT",
        "/v1/vms/absent/settings",
        &format!("{any}{AS_JSON}"),
        &none,
    );
    assert_eq!((nobody.status, nobody.problem().as_str()), (404, "no-such-vm"));
    assert_eq!(site.ask("DELETE", SETTINGS, &any, "").status, 405);
}

#[test]
fn the_key_is_its_owners_alone_and_goes_with_the_agent() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let mut args = vec![
        "run",
        "--json",
        "--host",
        "twin",
        "--fast",
        "--listen",
        "127.0.0.1:0",
    ];
    let path = state.display().to_string();
    args.extend(["--duration", "1s", "--state", &path]);
    run(&args);
    assert!(!state.join("http.key").exists());
    let site = site(&[]);
    let file = site.dir.path().join("state/http.key");
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(std::fs::read_to_string(file).unwrap().trim(), site.key);
    assert_eq!(site.key.len(), 64);
}

#[test]
fn a_group_that_is_not_there_is_refused_before_anything_is_begun() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    std::fs::write(path("homenode.toml"), "[http]\ngroup = \"no-such-group-here\"\n").unwrap();
    let (config, state) = (path("homenode.toml"), path("state"));
    let (status, said) = refused(&run(&[
        "run",
        "--host",
        "twin",
        "--config",
        &config,
        "--state",
        &state,
        "--duration",
        "1s",
    ]));
    assert_eq!(status, 1);
    assert!(said.contains("http.group") && said.contains("groupadd"), "{said}");
}

#[test]
#[allow(clippy::print_stderr)] // why nothing was looked at
fn members_of_the_group_read_on_the_sockets_and_change_nothing() {
    // This test runs commands as another user and group of the host, which only root can do.
    let id = Command::new("id").arg("-u").output().unwrap();
    if id.stdout.trim_ascii() != b"0" || Command::new("setpriv").arg("--version").output().is_err() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let config = dir.path().join("homenode.toml");
    std::fs::write(&config, "[http]\ngroup = \"games\"\n").unwrap();
    let config = config.display().to_string();
    let site = Site::on(dir, SCENARIO, &["--config", &config]);
    site.eventually("the VM is there", |site| {
        (site.over_socket("/v1/vms/web").status == 200).then_some(())
    });
    let socket = site.dir.path().join("state/http.sock");
    assert_eq!(socket.metadata().unwrap().permissions().mode() & 0o777, 0o660);
    let ask = |groups: &str, more: &[&str]| {
        let mut curl = Command::new("setpriv");
        curl.args([
            "--reuid=65534",
            "--regid=65534",
            groups,
            "curl",
            "-s",
            "-w",
            "%{http_code}",
            "-o",
        ]);
        curl.args(["/dev/null", "--unix-socket"]).arg(&socket).args(more);
        let output = curl.output().expect("it can be started");
        String::from_utf8(output.stdout).unwrap()
    };
    let url = format!("http://localhost{SETTINGS}");
    assert_eq!(ask("--groups=60", &[&url]), "200");
    let change = [
        "-X",
        "PUT",
        "-H",
        "If-Match: *",
        "-H",
        "Content-Type: application/json",
        "-d",
    ];
    let none = settings(None, None, None);
    assert_eq!(ask("--groups=60", &[&change[..], &[&none, &url]].concat()), "403");
    assert_eq!(ask("--clear-groups", &[&url]), "000");

    // A copy of the program, where those users may run it.
    let program = site.dir.path().join("homenode");
    std::fs::copy(env!("CARGO_BIN_EXE_homenode"), &program).unwrap();
    let state = site.dir.path().join("state").display().to_string();
    let command = |groups: &str, args: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", groups]);
        command.arg(&program).args(args).args(["--state", &state]);
        let output = command.output().expect("it can be started");
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(said).unwrap())
    };
    let member = |args: &[&str]| command("--groups=60", args);
    for reads in [
        &["vm"][..],
        &["top", "--once"],
        &["permit", "show"],
        &["recommend"],
    ] {
        let (is_told, said) = member(reads);
        assert!(is_told, "{reads:?}: {said}");
    }
    for changes in [
        &["permit", "set", "web", "250k"][..],
        &["pause", "--for", "10min"],
        &["wss", "web"],
    ] {
        let (is_done, said) = member(changes);
        assert!(
            !is_done && said.contains("only an operator may change anything"),
            "{changes:?}: {said}"
        );
    }
    let (is_told, said) = command("--clear-groups", &["vm"]);
    assert!(!is_told && said.contains("`[http] group`"), "{said}");
}

/// Certificates that openssl made, with their own certificate authorities.
struct Tls {
    dir: tempfile::TempDir,
}

impl Tls {
    fn new() -> Tls {
        let tls = Tls {
            dir: tempfile::tempdir().unwrap(),
        };
        tls.certify("server");
        tls
    }

    /// Creates or renews a self-signed certificate.
    fn certify(&self, name: &str) {
        let key = format!("{name}.key");
        let certificate = format!("{name}.crt");
        let mut openssl = Command::new("openssl");
        openssl
            .current_dir(self.dir.path())
            .args(["req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"]);
        openssl.args([
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-subj",
            "/CN=homenode",
        ]);
        openssl.args(["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]);
        openssl.args(["-keyout", &key, "-out", &certificate]);
        let made = openssl.output().expect("openssl is there");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        std::fs::set_permissions(self.dir.path().join(key), Permissions::from_mode(0o600)).unwrap();
    }

    /// Creates a client certificate, signed with a certificate from `certify`.
    fn sign(&self, name: &str, authority: &str) {
        let openssl = |args: String| {
            let mut openssl = Command::new("openssl");
            let made = openssl
                .current_dir(self.dir.path())
                .args(args.split(' '))
                .output()
                .unwrap();
            assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        };
        openssl(format!(
            "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN={name} -keyout {name}.key -out {name}.csr"
        ));
        std::fs::write(
            self.dir.path().join("client.ext"),
            "extendedKeyUsage=clientAuth\n",
        )
        .unwrap();
        openssl(format!(
            "x509 -req -in {name}.csr -CA {authority}.crt -CAkey {authority}.key -CAcreateserial -days 2 \
             -extfile client.ext -out {name}.crt"
        ));
    }

    fn write(&self, users: &str, roles: &str, more: &str) -> String {
        let path = self.dir.path().join("web.yml");
        let text = format!(
            "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n{more}\
             basic_auth_users: {{{users}}}\nhomenode_roles: {{{roles}}}\n"
        );
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    }

    /// Requests a path with curl. Returns the status (000 if curl could not connect) and the body.
    fn curl(&self, site: &Site, path: &str, more: &[&str]) -> (String, String) {
        let url = format!("https://{}{path}", site.address);
        let ca = self.dir.path().join("server.crt");
        let mut curl = Command::new("curl");
        curl.current_dir(self.dir.path())
            .args(["-s", "-w", "\n%{http_code}", "--cacert"])
            .arg(ca);
        let said = curl.args(more).arg(url).output().expect("curl is there");
        let said = String::from_utf8(said.stdout).unwrap();
        let (body, status) = said.rsplit_once('\n').unwrap();
        (status.to_owned(), body.to_owned())
    }
}

fn users() -> String {
    format!("alice: \"{HASH}\", bob: \"{HASH}\"")
}

#[test]
fn elsewhere_is_listened_on_with_tls_and_passwords_and_users_have_their_roles() {
    let tls = Tls::new();
    let web = tls.write(&users(), "alice: operator", "");
    let site = site(&["--listen", "0.0.0.0:0", "--web-config", &web]);
    assert!(
        site.key.is_empty() && site.said().contains("https://0.0.0.0"),
        "{}",
        site.said()
    );
    let ask = |more: &[&str]| tls.curl(&site, SETTINGS, more).0;
    assert_eq!(ask(&[]), "401");
    assert_eq!(ask(&["-u", "alice:wrong"]), "401");
    assert_eq!(ask(&["-u", "carol:correct horse"]), "401");
    assert_eq!(ask(&["-u", "bob:correct horse"]), "200");
    assert_eq!(ask(&["-H", "Authorization: Basic %%%"]), "401");
    let none = settings(None, None, None);
    let change = [
        "-X",
        "PUT",
        "-H",
        "If-Match: *",
        "-H",
        "Content-Type: application/json",
        "-d",
        &none,
    ];
    let (status, said) = tls.curl(
        &site,
        SETTINGS,
        &[&change[..], &["-u", "bob:correct horse"]].concat(),
    );
    assert!(
        status == "403" && said.contains("bob: operator"),
        "{status} {said}"
    );
    let as_alice = [&change[..], &["-u", "alice:correct horse"]].concat();
    assert_eq!(ask(&as_alice), "200");
    // A page of another site sends a request through alice's browser.
    assert_eq!(
        ask(&[&as_alice[..], &["-H", "Origin: https://evil.example"]].concat()),
        "403"
    );
    assert_eq!(
        ask(&[
            &as_alice[..],
            &["-H", &format!("Origin: https://{}", site.address)]
        ]
        .concat()),
        "200"
    );
    // The agent answers neither in clear text nor over a TLS version that is too old.
    assert!(matches!(site.get("/v1/nodes").status, 0 | 400));
    assert_eq!(ask(&["-u", "bob:correct horse", "--tls-max", "1.1"]), "000");
}

#[test]
fn files_are_read_again_when_they_change_and_a_slip_changes_nothing() {
    let tls = Tls::new();
    let web = tls.write(&users(), "", "");
    let site = site(&["--listen", "127.0.0.1:0", "--web-config", &web]);
    let ask = |user: &str| tls.curl(&site, "/v1/nodes", &["-u", user]).0;
    assert_eq!(ask("bob:correct horse"), "200");
    // The certificate is renewed, and curl accepts only the new one.
    tls.certify("server");
    assert_eq!(ask("bob:correct horse"), "200");
    let notices = |what: &'static str| site.eventually(what, |site| site.said().contains(what).then_some(()));
    notices("was read again");
    // A user was removed.
    tls.write(&format!("alice: \"{HASH}\""), "", "");
    assert_eq!(
        (ask("bob:correct horse"), ask("alice:correct horse")),
        ("401".into(), "200".into())
    );
    std::fs::write(&web, "basic_auth_usres: {}\n").unwrap();
    assert_eq!(
        (ask("bob:correct horse"), ask("alice:correct horse")),
        ("401".into(), "200".into())
    );
    notices("stays in force");
    assert!(site.said().contains("basic_auth_usres") && site.said().contains("expected one of"));
}

#[test]
fn clients_show_certificates_where_they_are_wanted() {
    let tls = Tls::new();
    tls.certify("authority");
    tls.certify("other");
    tls.sign("client", "authority");
    tls.sign("stranger", "other");
    let more = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: authority.crt\n  min_version: TLS13\n";
    let web = tls.write("", "", more);
    let site = site(&["--listen", "0.0.0.0:0", "--web-config", &web]);
    let ask = |more: &[&str]| tls.curl(&site, "/v1/nodes", more).0;
    assert_eq!(ask(&["--cert", "client.crt", "--key", "client.key"]), "200");
    assert_eq!(ask(&["--cert", "stranger.crt", "--key", "stranger.key"]), "000");
    assert_eq!(ask(&[]), "000");
    assert_eq!(
        ask(&["--cert", "client.crt", "--key", "client.key", "--tls-max", "1.2"]),
        "000"
    );
}

#[test]
fn a_web_yml_that_is_wrong_is_refused_with_the_place_and_the_remedy() {
    let tls = Tls::new();
    let folder = tls.dir.path();
    let web = folder.join("web.yml").display().to_string();
    let good = "tls_server_config: {cert_file: server.crt, key_file: server.key}\n";
    let refused_with = |text: &str, listen: &str| {
        std::fs::write(&web, text).unwrap();
        let args = [
            "run",
            "--host",
            "twin",
            "--duration",
            "1s",
            "--listen",
            listen,
            "--web-config",
            &web,
        ];
        refused(&run(&args))
    };
    for (text, listen, said) in [
        ("", "127.0.0.1:0", "it is empty"),
        ("tls_server_config: [", "127.0.0.1:0", "line 1"),
        ("basic_auth_usres: {}\n", "127.0.0.1:0", "`basic_auth_users`"),
        (
            "tls_server_config: {cert_file: server.crt}\n",
            "127.0.0.1:0",
            "key_file",
        ),
        (
            "tls_server_config: {cert_file: gone.crt, key_file: server.key}\n",
            "127.0.0.1:0",
            "gone.crt",
        ),
        (
            "tls_server_config: {cert_file: server.key, key_file: server.key}\n",
            "127.0.0.1:0",
            "no certificate",
        ),
        ("basic_auth_users: {alice: secret}\n", "127.0.0.1:0", "htpasswd"),
        (
            "homenode_roles: {alice: operator}\n",
            "127.0.0.1:0",
            "not in basic_auth_users",
        ),
        (good, "0.0.0.0:0", "basic_auth_users"),
        (
            &format!("basic_auth_users: {{a: \"{HASH}\"}}\n"),
            "0.0.0.0:0",
            "tls_server_config",
        ),
        (
            "tls_server_config: {cert_file: server.crt, key_file: server.key, client_auth_type: RequireAnyClientCert}\n",
            "127.0.0.1:0",
            "RequireAndVerifyClientCert",
        ),
        (
            "tls_server_config: {cert_file: server.crt, key_file: server.key, client_auth_type: VerifyClientCertIfGiven}\n",
            "127.0.0.1:0",
            "client_ca_file",
        ),
    ] {
        let (status, complaint) = refused_with(text, listen);
        assert!(
            status == 2 && complaint.contains(said),
            "{text}: {status} {complaint}"
        );
        assert!(!complaint.contains("secret"), "{complaint}");
    }
    let key = folder.join("server.key");
    std::fs::set_permissions(&key, Permissions::from_mode(0o644)).unwrap();
    let (status, complaint) = refused_with(good, "127.0.0.1:0");
    assert!(status == 2 && complaint.contains("chmod o="), "{complaint}");
    assert!(complaint.contains(&key.display().to_string()), "{complaint}");
}

/// Returns the number of the agent's cycles so far.
fn cycles(site: &Site) -> u64 {
    site.over_socket("/v1/status").json()["cycle_count"]
        .as_u64()
        .unwrap()
}

fn pace(site: &Site, duration: Duration) -> f64 {
    let (begun, first) = (Instant::now(), cycles(site));
    std::thread::sleep(duration);
    (cycles(site) - first) as f64 / begun.elapsed().as_secs_f64()
}

#[test]
fn a_flood_of_wrong_passwords_delays_neither_known_users_nor_the_loop() {
    let dir = tempfile::tempdir().unwrap();
    let web = dir.path().join("web.yml");
    std::fs::write(&web, format!("basic_auth_users: {{bob: \"{HASH_SLOW}\"}}\n")).unwrap();
    let site = site(&["--period", "100ms", "--web-config", web.to_str().unwrap()]);
    // bob:correct horse
    let bob = "Authorization: Basic Ym9iOmNvcnJlY3QgaG9yc2U=\r\n";
    let ask = || site.ask("GET", "/v1/nodes", bob, "").status;
    assert_eq!(ask(), 200);
    let alone = pace(&site, Duration::from_secs(2));
    let stop = AtomicBool::new(false);
    let (beside, slowest, refused) = std::thread::scope(|scope| {
        let flood = || {
            let mut refused = 0;
            while !stop.load(Ordering::Relaxed) {
                let wrong = "Authorization: Basic Ym9iOndyb25n\r\n";
                let status = site.ask("GET", "/v1/nodes", wrong, "").status;
                assert!(matches!(status, 401 | 429), "{status}");
                refused += usize::from(status == 429);
                std::thread::sleep(Duration::from_millis(5));
            }
            refused
        };
        let floods: Vec<_> = (0..12).map(|_| scope.spawn(flood)).collect();
        let asker = scope.spawn(|| {
            let mut slowest = Duration::ZERO;
            while !stop.load(Ordering::Relaxed) {
                let asked = Instant::now();
                assert_eq!(ask(), 200);
                slowest = slowest.max(asked.elapsed());
                std::thread::sleep(Duration::from_millis(100));
            }
            slowest
        });
        let beside = pace(&site, Duration::from_secs(5));
        stop.store(true, Ordering::Relaxed);
        let refused: usize = floods.into_iter().map(|flood| flood.join().unwrap()).sum();
        (beside, asker.join().unwrap(), refused)
    });
    assert!(refused > 0, "no client was told to come again");
    assert!(
        beside > 0.8 * alone,
        "{alone:.1} cycles a second alone, {beside:.1} beside the flood"
    );
    assert!(
        slowest < Duration::from_secs(2),
        "a known user waited {slowest:?}"
    );
}

#[test]
fn handshakes_that_never_end_keep_nobody_out() {
    let tls = Tls::new();
    let web = tls.write(&users(), "", "");
    let site = site(&["--listen", "127.0.0.1:0", "--web-config", &web]);
    let silent: Vec<TcpStream> = (0..300).map(|_| site.connect()).collect();
    assert_eq!(
        tls.curl(&site, "/v1/nodes", &["-u", "bob:correct horse"]).0,
        "200"
    );
    // The agent drops each silent connection after ten seconds.
    silent[0].set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let begun = Instant::now();
    let end = std::io::Read::read(&mut &silent[0], &mut [0; 64]);
    assert!(
        matches!(end, Ok(0) | Err(_)) && begun.elapsed() < Duration::from_secs(19),
        "{end:?}"
    );
}
