//! The agent as a service: signals, reloaded settings, and its messages to the service manager.

use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::common::http::Site;
use crate::common::{homenode, run, stderr, stdout};

const SCENARIO: &str = "\
name = \"service\"
machine = \"r420\"
duration = \"86400s\"
[[vm]]
name = \"web\"
vcpus = 1
memory = \"1GiB\"
workload = \"stream\"
work_share = 100000.0
";

/// Starts an agent on the simulated host with a settings file. Returns the agent and the file's path.
fn site(settings: &str) -> (Site, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("homenode.toml");
    std::fs::write(&file, settings).unwrap();
    let site = Site::on(dir, SCENARIO, &["--config", file.to_str().unwrap()]);
    (site, file)
}

fn send(site: &Site, signal: Signal) {
    let pid = Pid::from_raw(site.pid().cast_signed()).unwrap();
    kill_process(pid, signal).expect("it runs");
}

/// Returns the number of notices so far that contain `what`.
fn notices(site: &Site, what: &str) -> usize {
    let said = site.said();
    let lines = said.lines().filter(|line| line.contains("\"notice/1\""));
    lines.filter(|line| line.contains(what)).count()
}

#[test]
fn sighup_reads_settings_anew_and_wrong_ones_change_nothing() {
    let (site, file) = site("period = \"300ms\"\n");
    let period = || site.json("/v1/status")["period_ns"].as_u64().unwrap();
    assert_eq!(period(), 300_000_000);
    std::fs::write(&file, "perod = \"200ms\"\n").unwrap();
    send(&site, Signal::HUP);
    site.eventually("the wrong settings are refused", |site| {
        (notices(site, "homenode.toml:1:1: unknown key `perod`") == 1).then_some(())
    });
    assert_eq!((notices(&site, "stay as they are"), period()), (1, 300_000_000));
    std::fs::write(
        &file,
        "period = \"200ms\"\npolicies = \"tavo\"\n[pace]\nslowdown_max = 0.5\n",
    )
    .unwrap();
    send(&site, Signal::HUP);
    site.eventually("the new settings are in force", |_| {
        (period() == 200_000_000).then_some(())
    });
    assert_eq!(
        notices(&site, "changed: pace.slowdown_max, period; "),
        1,
        "{}",
        site.said()
    );
    assert_eq!(notices(&site, "cannot change policies: restart"), 1);
    assert_eq!(site.json("/v1/status")["policies"], "homenode");
}

#[test]
fn operators_have_settings_read_anew_over_http_and_viewers_do_not() {
    let (site, file) = site("period = \"300ms\"\n");
    std::fs::write(&file, "period = \"200ms\"\n[http]\ngroup = \"root\"\n").unwrap();
    let viewer = site.ask("POST", "/-/reload", "", "");
    assert_eq!(viewer.status, 401, "{viewer:?}");
    let done = site.ask("POST", "/-/reload", &site.as_operator(), "");
    assert_eq!(done.status, 200, "{done:?}");
    let expected = serde_json::json!({"changed": ["period"], "at_next_start": ["http"]});
    assert_eq!(done.json(), expected);
    std::fs::write(&file, "period = \"1h\"\n").unwrap();
    let refused = site.does_over_socket("POST", "/-/reload");
    let detail = refused.json()["detail"].as_str().unwrap().to_owned();
    assert!(
        refused.status == 409 && detail.contains("homenode.toml:1:1: setting `period` is 3600s"),
        "{refused:?}"
    );
}

#[test]
fn a_run_without_a_file_of_settings_says_so_when_it_is_to_read_them() {
    let site = Site::on(tempfile::tempdir().unwrap(), SCENARIO, &[]);
    let refused = site.does_over_socket("POST", "/-/reload");
    let detail = refused.json()["detail"].as_str().unwrap().to_owned();
    assert!(
        refused.status == 409 && detail.contains("--config"),
        "{refused:?}"
    );
}

#[test]
fn sigusr1_and_sigusr2_do_not_end_the_agent() {
    let (site, _) = site("period = \"100ms\"\n");
    send(&site, Signal::USR1);
    send(&site, Signal::USR2);
    // Pending signals are delivered in order of their numbers, and HUP (1) would overtake USR1 (10) and USR2 (12).
    std::thread::sleep(Duration::from_millis(200));
    send(&site, Signal::HUP);
    site.eventually("it still takes signals", |site| {
        (notices(site, "settings were reloaded") == 1).then_some(())
    });
    assert_eq!(site.over_socket("/-/healthy").status, 200);
}

#[test]
fn sigterm_ends_a_simulation_within_a_second_though_nobody_reads_what_it_says() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("scenario.toml");
    std::fs::write(&file, SCENARIO).unwrap();
    let mut child = homenode()
        .args([
            "run",
            "--json",
            "--fast",
            "--host",
            &format!("twin:{}", file.display()),
        ])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // After this time the pipe is full, and the loop waits.
    std::thread::sleep(Duration::from_secs(2));
    let sent = Instant::now();
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let status = child.wait().unwrap();
    assert!(sent.elapsed() < Duration::from_secs(1), "{:?}", sent.elapsed());
    assert_eq!(status.code(), Some(143));
}

/// The side of the service manager in a conversation with the agent.
struct Manager {
    socket: UnixDatagram,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Manager {
    fn new() -> Manager {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        Manager {
            socket,
            path,
            _dir: dir,
        }
    }

    /// Returns the next message, or `None` if no message arrives in time.
    fn hears(&self, within: Duration) -> Option<String> {
        self.socket.set_read_timeout(Some(within)).unwrap();
        let mut bytes = [0; 4096];
        let length = self.socket.recv(&mut bytes).ok()?;
        Some(String::from_utf8(bytes[..length].to_vec()).unwrap())
    }

    /// Returns the first message from now on that contains `what`.
    fn waits_for(&self, what: &str) -> String {
        loop {
            let heard = self.hears(Duration::from_secs(60));
            let heard = heard.unwrap_or_else(|| panic!("no {what} within a minute"));
            if heard.contains(what) {
                return heard;
            }
        }
    }

    fn starts(&self, args: &[&str], dir: &tempfile::TempDir) -> Command {
        let file = dir.path().join("scenario.toml");
        std::fs::write(&file, SCENARIO).unwrap();
        let mut command = homenode();
        command
            .args(["run", "--json", "--host", &format!("twin:{}", file.display())])
            .args(args)
            .env("NOTIFY_SOCKET", &self.path)
            .env("WATCHDOG_USEC", "2000000")
            .env_remove("WATCHDOG_PID")
            .stdin(Stdio::null());
        command
    }
}

#[test]
fn the_service_manager_is_told_of_every_stage_of_the_agents_life() {
    let (manager, dir) = (Manager::new(), tempfile::tempdir().unwrap());
    let mut child = manager
        .starts(&["--period", "200ms"], &dir)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let first = manager.waits_for("STATUS=");
    assert!(
        first.contains("looks after") && first.contains("nodes"),
        "{first}"
    );
    manager.waits_for("READY=1");
    manager.waits_for("WATCHDOG=1");
    kill_process(Pid::from_child(&child), Signal::HUP).unwrap();
    let reloading = manager.waits_for("RELOADING=1");
    let at = reloading
        .lines()
        .find_map(|line| line.strip_prefix("MONOTONIC_USEC="));
    assert!(at.is_some_and(|at| at.parse::<u64>().is_ok()), "{reloading}");
    manager.waits_for("READY=1");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    manager.waits_for("STOPPING=1");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_loop_that_stands_still_feeds_no_watchdog_though_the_process_lives() {
    let (manager, dir) = (Manager::new(), tempfile::tempdir().unwrap());
    let mut child = manager
        .starts(&["--fast"], &dir)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    manager.waits_for("WATCHDOG=1");
    // No reader takes the output, so the pipe fills up and the simulation's loop waits. A keep-alive is due twice a second.
    let still = (0..60).any(|_| {
        let quiet_for = Duration::from_secs(3);
        manager.hears(quiet_for).is_none()
    });
    let is_alive = child.try_wait().unwrap().is_none();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(still && is_alive);
}

#[test]
fn another_hosts_libvirt_is_refused_with_what_to_do() {
    let output = run(&["run", "--host", "libvirt:qemu+ssh://root@far.example/system"]);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.contains("`far.example`") && said.contains("Run it there"),
        "{said}"
    );
}

#[test]
fn libvirts_test_driver_runs_as_far_as_it_can_whatever_this_host_is() {
    let test = ["run", "--host", "libvirt:test:///default", "--dry-run"];
    let output = run(&[&test[..], &["--duration", "1s", "--period", "200ms"]].concat());
    let said = stdout(&output);
    assert!(output.status.success(), "{said}{}", stderr(&output));
    assert!(said.contains("test driver has no processes"), "{said}");
    let nodes = homenode_machine_files::sysfs::read(std::path::Path::new("/")).unwrap();
    let is_single = nodes.memory_nodes().len() == 1;
    assert_eq!(said.contains("one NUMA node: "), is_single, "{said}");
}

/// Runs an agent for a second, as systemd starts it.
fn as_a_service() -> Command {
    let mut command = homenode();
    command
        .args(["run", "--dry-run", "--duration", "1s"])
        .env("INVOCATION_ID", "0123")
        .env_remove("SYSTEMD_EXEC_PID")
        .stdin(Stdio::null());
    command
}

#[test]
fn a_service_is_never_a_simulation_that_nobody_asked_for() {
    let output = as_a_service().output().unwrap();
    let (said, complaint) = (stdout(&output), stderr(&output));
    // If libvirt answers on this host or a QEMU runs, the agent manages the real host, but changes nothing.
    let is_real = said.contains("qemu:///system") || said.contains(" at qemu");
    let is_refused = output.status.code() == Some(1)
        && complaint.contains("As a service, homenode simulates a host only on request, with `--host twin`");
    assert!(
        is_real != is_refused && !said.contains("twin"),
        "{said}{complaint}"
    );
}

#[test]
fn a_service_waits_for_the_first_vm_where_libvirt_is_not_installed() {
    let dir = tempfile::tempdir().unwrap();
    // This file hides libvirt's library from the loader, if libvirt is installed on this host.
    std::fs::write(dir.path().join("libvirt.so.0"), "no library").unwrap();
    let output = as_a_service()
        .env("LD_LIBRARY_PATH", dir.path())
        .output()
        .unwrap();
    let (said, complaint) = (stdout(&output), stderr(&output));
    assert!(output.status.success(), "{said}{complaint}");
    assert!(said.contains(" at qemu"), "{said}{complaint}");
}

/// Writes the unit file with a program that exists, since the packaged one may not be installed on this host.
fn unit(dir: &tempfile::TempDir) -> String {
    let unit = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../deploy/systemd/homenode.service"
    );
    let text = std::fs::read_to_string(unit).unwrap();
    let path = dir.path().join("homenode.service");
    std::fs::write(&path, text.replace("/usr/bin/homenode", "/bin/true")).unwrap();
    path.display().to_string()
}

fn analyze(args: &[&str]) {
    let output = Command::new("systemd-analyze")
        .args(args)
        .env("SYSTEMD_PAGER", "")
        .output();
    let output = output.expect("systemd-analyze (Debian: systemd) is there");
    assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
    assert!(stderr(&output).is_empty(), "{}", stderr(&output));
}

#[test]
fn systemd_finds_nothing_wrong_with_the_unit() {
    let dir = tempfile::tempdir().unwrap();
    analyze(&["verify", "--man=no", &unit(&dir)]);
}

#[test]
fn the_unit_is_exposed_to_3_0_of_10_at_most() {
    let dir = tempfile::tempdir().unwrap();
    analyze(&[
        "security",
        "--offline=true",
        "--threshold=30",
        "--no-pager",
        &unit(&dir),
    ]);
}
