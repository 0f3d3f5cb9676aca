//! An agent's HTTP, tested with other programs: Prometheus with the rules and the boards of `deploy`, and schemathesis.
//!
//! Not part of `cargo test`: `scripts/http-setup.sh` fetches both programs, and `make http` runs these tests.

use std::io::Write as _;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::common::fetched;
use crate::common::http::{Site, get_from};

/// VMs that move, wait and use links under TAVO.
const SCENARIO: &str = "\
name = \"busy\"
machine = \"r420\"
duration = \"3600000s\"
[[vm]]
name = \"web\"
vcpus = 8
memory = \"6GiB\"
workload = \"cg.B\"
work_share = 1000000.0
[[vm]]
name = \"db\"
vcpus = 8
memory = \"6GiB\"
workload = \"milc\"
work_share = 1000000.0
[[vm]]
name = 'batch \"two\"'
vcpus = 12
memory = \"6GiB\"
workload = \"soplex\"
work_share = 1000000.0
arrival = \"5s\"
";

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy")
}

fn promtool() -> Command {
    Command::new(fetched("prometheus/usr/bin/promtool"))
}

fn succeeds(command: &mut Command) {
    let output = command.output().expect("it can be started");
    let said = [output.stdout, output.stderr].concat();
    assert!(
        output.status.success(),
        "{command:?}:\n{}",
        String::from_utf8_lossy(&said)
    );
}

fn site() -> Site {
    let args = ["--fast", "--policies", "tavo"];
    let site = Site::on(tempfile::tempdir().unwrap(), SCENARIO, &args);
    site.eventually("pages were moved", |site| {
        let text = site.get("/metrics").body;
        text.contains("homenode_vm_pages_moved_bytes_total{")
            .then_some(())
    });
    site
}

/// A Prometheus that scrapes one agent every half second, with the rules of `deploy`.
struct Prometheus {
    child: Child,
    address: SocketAddr,
    _dir: tempfile::TempDir,
}

impl Prometheus {
    fn of(agent: SocketAddr) -> Prometheus {
        Prometheus::with(agent, "")
    }

    /// Starts Prometheus with additional settings of the scrape job.
    fn with(agent: SocketAddr, more: &str) -> Prometheus {
        Prometheus::asking(&format!("{more} static_configs: [{{targets: ['{agent}']}}]"))
    }

    /// Starts Prometheus with these settings of the scrape job.
    fn asking(job: &str) -> Prometheus {
        let dir = tempfile::tempdir().unwrap();
        let rules = deploy().join("prometheus/homenode.rules.yml");
        let config = format!(
            "global: {{scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}}\n\
             rule_files: [{}]\n\
             scrape_configs:\n\
             - {{job_name: homenode, {job}}}\n",
            rules.display()
        );
        std::fs::write(dir.path().join("prometheus.yml"), config).unwrap();
        // This port was free a moment ago.
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let child = Command::new(fetched("prometheus/usr/bin/prometheus"))
            .arg(format!(
                "--config.file={}",
                dir.path().join("prometheus.yml").display()
            ))
            .arg(format!(
                "--storage.tsdb.path={}",
                dir.path().join("data").display()
            ))
            .arg(format!("--web.listen-address={free}"))
            .arg("--enable-feature=exemplar-storage")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("Prometheus starts");
        Prometheus {
            child,
            address: free,
            _dir: dir,
        }
    }

    /// Returns the result of a query, or `None` if Prometheus is not up yet.
    fn query(&self, expression: &str) -> Option<Vec<Value>> {
        self.ask("query", expression)?["result"].as_array().cloned()
    }

    /// Requests a path of Prometheus' API and returns the data of the answer.
    fn ask(&self, path: &str, expression: &str) -> Option<Value> {
        let escaped: String = expression.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let answer = get_from(self.address, &format!("/api/v1/{path}?query={escaped}"))?;
        let mut answer: Value = serde_json::from_str(&answer).ok()?;
        assert_eq!(answer["status"], "success", "{expression}: {answer}");
        Some(answer["data"].take())
    }

    /// Panics if a query has no data within 20 seconds.
    fn has_data(&self, expression: &str, what: &str) {
        for _ in 0..100 {
            if self.query(expression).is_some_and(|found| !found.is_empty()) {
                return;
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        panic!("{what} has no data: {expression}");
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the kind, the name and the expression of each rule that Prometheus has loaded.
fn rules(prometheus: &Prometheus) -> Vec<(String, String, String)> {
    let answer = (0..100).find_map(|_| {
        std::thread::sleep(Duration::from_millis(100));
        let answer: Value = serde_json::from_str(&get_from(prometheus.address, "/api/v1/rules")?).ok()?;
        let groups = answer["data"]["groups"].as_array()?.clone();
        (!groups.is_empty()).then_some(groups)
    });
    let groups = answer.expect("Prometheus tells its rules");
    let rules = groups.iter().flat_map(|group| group["rules"].as_array().unwrap());
    let text = |rule: &Value, key: &str| rule[key].as_str().unwrap_or_default().to_owned();
    rules
        .map(|rule| (text(rule, "type"), text(rule, "name"), text(rule, "query")))
        .collect()
}

#[test]
fn every_rule_and_every_panel_has_data_from_an_agent_on_the_twin() {
    let site = site();
    let prometheus = Prometheus::of(site.address);
    prometheus.has_data("up{job=\"homenode\"} == 1", "the agent");
    let rules = rules(&prometheus);
    assert!(rules.len() >= 20, "{rules:?}");
    for (kind, name, expression) in &rules {
        match kind.as_str() {
            "recording" => prometheus.has_data(name, name),
            _ => {
                // The left side of the comparison must have data.
                let ends = [" == ", " > ", " < "]
                    .iter()
                    .filter_map(|mark| expression.rfind(mark));
                let end = ends
                    .max()
                    .unwrap_or_else(|| panic!("{name} compares nothing: {expression}"));
                prometheus.has_data(&expression[..end], name);
            }
        }
    }
    let boards = ["homenode.json", "homenode-fleet.json"].map(|name| {
        let text = std::fs::read_to_string(deploy().join("grafana").join(name)).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()
    });
    let mut count = 0;
    for panel in boards
        .iter()
        .flat_map(|board| board["panels"].as_array().unwrap())
    {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = target["expr"].as_str().unwrap();
            let asked = expression
                .replace("$__rate_interval", "1m")
                .replace("$instance", ".*")
                .replace("$domain", ".*");
            prometheus.has_data(&asked, panel["title"].as_str().unwrap());
            count += 1;
        }
    }
    assert!(count >= 36, "{count} panels");
    // Prometheus asks for OpenMetrics, and has accepted all of it, so the metrics are valid in that format, too.
    let down = prometheus.query("up == 0").unwrap();
    assert!(down.is_empty(), "{down:?}");
}

#[test]
fn a_fleet_stands_in_files_and_a_host_that_is_added_is_asked() {
    let sites = [site(), site()];
    let dir = tempfile::tempdir().unwrap();
    let write = |count: usize| {
        let hosts = sites.iter().take(count).enumerate();
        let hosts = hosts.map(|(rack, site)| {
            format!(
                "- {{targets: ['{}'], labels: {{rack: '{rack}'}}}}\n",
                site.address
            )
        });
        // The file is renamed into place, since Prometheus may read it at any time.
        std::fs::write(dir.path().join("new"), hosts.collect::<String>()).unwrap();
        std::fs::rename(dir.path().join("new"), dir.path().join("hosts.yml")).unwrap();
    };
    write(1);
    let files = dir.path().join("*.yml");
    let prometheus = Prometheus::asking(&format!(
        "file_sd_configs: [{{files: ['{}'], refresh_interval: 1s}}]",
        files.display()
    ));
    prometheus.has_data("homenode_node_headroom_cpus{rack='0'}", "the first host");
    write(2);
    prometheus.has_data("homenode_node_headroom_cpus{rack='1'}", "the second host");
    prometheus.has_data(
        "count(homenode:headroom_memory_bytes:max) == 2",
        "a line for each host",
    );
}

#[test]
fn a_count_of_decisions_leads_to_one_of_them_in_the_history() {
    let args = ["--policies", "tavo", "--period", "100ms"];
    let site = Site::on(tempfile::tempdir().unwrap(), SCENARIO, &args);
    let prometheus = Prometheus::of(site.address);
    let found = (0..150).find_map(|_| {
        std::thread::sleep(Duration::from_millis(200));
        let series = prometheus.ask("query_exemplars", "homenode_decisions_total")?;
        series.as_array()?.first().cloned()
    });
    let series = found.expect("Prometheus keeps exemplars");
    let id = series["exemplars"][0]["labels"]["decision_id"].as_str().unwrap();
    let decision = site.json(&format!("/v1/decisions/{id}"));
    for label in ["policy", "action", "outcome"] {
        assert_eq!(decision[label], series["seriesLabels"][label], "{decision}");
    }
}

#[test]
fn prometheus_asks_over_tls_with_a_password() {
    let tls = tempfile::tempdir().unwrap();
    let path = |name: &str| tls.path().join(name).display().to_string();
    succeeds(Command::new("openssl").current_dir(tls.path()).args([
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=homenode",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        "server.key",
        "-out",
        "server.crt",
    ]));
    // bcrypt of `correct horse`.
    let web = "tls_server_config: {cert_file: server.crt, key_file: server.key}\n\
               basic_auth_users: {prometheus: $2b$04$K08QjgoDisLXmecYm6C23Ol5IpNA4Oymq6Olsi34gjEulRPJlE/5G}\n";
    std::fs::write(path("web.yml"), web).unwrap();
    let args = [
        "--fast",
        "--listen",
        "0.0.0.0:0",
        "--web-config",
        &path("web.yml"),
    ];
    let site = Site::on(tempfile::tempdir().unwrap(), SCENARIO, &args);
    let as_user = |password: &str| {
        format!(
            "scheme: https, basic_auth: {{username: prometheus, password: '{password}'}}, tls_config: {{ca_file: {}}},",
            path("server.crt")
        )
    };
    let prometheus = Prometheus::with(site.address, &as_user("correct horse"));
    prometheus.has_data("up{job=\"homenode\"} == 1", "the agent over TLS");
    prometheus.has_data("homenode_vm_cpus_used", "its metrics");
    let stranger = Prometheus::with(site.address, &as_user("wrong"));
    stranger.has_data("up{job=\"homenode\"} == 0", "a user with a wrong password");
}

#[test]
fn promtool_finds_nothing_in_metrics_and_rules_and_alerts_fire_when_they_should() {
    let site = site();
    let mut check = promtool()
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    check
        .stdin
        .take()
        .unwrap()
        .write_all(site.get("/metrics").body.as_bytes())
        .unwrap();
    let checked = check.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&checked.stderr);
    assert!(checked.status.success() && said.is_empty(), "{said}");
    let folder = deploy().join("prometheus");
    succeeds(
        promtool()
            .current_dir(&folder)
            .args(["check", "rules", "homenode.rules.yml"]),
    );
    succeeds(
        promtool()
            .current_dir(&folder)
            .args(["test", "rules", "homenode.rules.test.yml"]),
    );
    succeeds(
        promtool()
            .current_dir(&folder)
            .args(["check", "config", "prometheus.yml"]),
    );
    // Only the syntax is checked, since the certificates and passwords of this configuration are elsewhere.
    succeeds(promtool().current_dir(&folder).args([
        "check",
        "config",
        "--syntax-only",
        "prometheus-fleet.yml",
    ]));
}

#[test]
fn schemathesis_finds_nothing() {
    let site = site();
    let url = format!("http://{}/v1/openapi.json", site.address);
    let operator = site.as_operator();
    // Valid settings depend on the VM, and a valid tag depends on the current settings, so the description cannot say which are
    // valid.
    let config = "[[operations]]\ninclude-path = \"/v1/vms/{id}/settings\"\nchecks.positive_data_acceptance.expected-statuses = \
                  [\"2xx\", \"401\", \"403\", \"404\", \"412\", \"422\", \"5xx\"]\n";
    std::fs::write(site.dir.path().join("schemathesis.toml"), config).unwrap();
    // A stream does not end, so it is left out here; `http.rs` tests it.
    let what = [
        "run",
        &url,
        "--exclude-path",
        "/v1/events",
        "-H",
        operator.trim(),
        "--seed",
        "1",
        "--max-examples",
        "100",
        "--no-color",
    ];
    let mut command = Command::new(fetched("schemathesis/bin/st"));
    succeeds(command.current_dir(site.dir.path()).args(what));
    assert_eq!(site.get("/-/ready").status, 200);
}
