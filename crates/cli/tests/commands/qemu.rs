//! VMs that libvirt does not manage: a real QEMU (without KVM), and Proxmox' hookscript.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::common::{homenode, stderr, stdout};

/// A process that ends when the value is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_qemu_that_nobody_manages_is_watched_and_examined() {
    let dir = tempfile::tempdir().unwrap();
    let name = format!("plain-{}", std::process::id());
    let monitor = format!("unix:{}/qmp,server=on,wait=off", dir.path().display());
    let guest = Command::new("qemu-system-x86_64")
        .args([
            "-M",
            "q35",
            "-accel",
            "tcg,thread=multi",
            "-m",
            "96",
            "-smp",
            "2",
            "-nodefaults",
            "-display",
            "none",
        ])
        .args(["-name", &format!("{name},debug-threads=on"), "-qmp", &monitor])
        .stdin(Stdio::null())
        .spawn();
    let _guest = Running(guest.expect("qemu-system-x86 is installed"));
    let state = dir.path().join("state");
    let run = |args: &[&str]| homenode().args(args).arg("--state").arg(&state).output().unwrap();
    let output = run(&["run", "--host", "qemu", "--dry-run", "--json", "--duration", "5s"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let said = stdout(&output);
    let appeared = said
        .lines()
        .find(|line| line.contains("appeared") && line.contains(&name));
    let appeared = appeared.unwrap_or_else(|| panic!("{said}"));
    let figures = ["\"vcpus\":2", "\"memory_bytes\":100663296"];
    assert!(
        figures.iter().all(|figure| appeared.contains(figure)),
        "{appeared}"
    );
    assert!(!state.exists(), "a dry run leaves nothing");
    let doctor = stdout(&run(&["doctor", "--json"]));
    let doctor: serde_json::Value = serde_json::from_str(&doctor).unwrap();
    let features = doctor["features"].as_array().unwrap();
    let plain = features
        .iter()
        .find(|one| one["feature"] == "plain QEMU")
        .unwrap();
    assert_eq!(plain["has"], true, "{plain}");
}

#[test]
fn proxmox_notes_become_settings_and_nothing_else_is_touched() {
    let dir = tempfile::tempdir().unwrap();
    let vms = dir.path().join("vms");
    let hook = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/proxmox/homenode-hook");
    let started = |notes: &str, name: &str, phase: &str| {
        let qm = dir.path().join("qm");
        std::fs::write(
            &qm,
            format!("#!/bin/sh\ncat <<'END'\ncores: 2\ndescription: {notes}\nname: {name}\nEND\n"),
        )
        .unwrap();
        std::fs::set_permissions(&qm, std::fs::Permissions::from_mode(0o755)).unwrap();
        let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap());
        let mut command = Command::new(&hook);
        command
            .args(["100", phase])
            .env("PATH", path)
            .env("HOMENODE_VMS", &vms);
        assert!(command.status().unwrap().success(), "a VM must start");
    };
    let file = |name: &str| std::fs::read_to_string(vms.join(format!("{name}.toml"))).ok();
    started("A database.%0Ahomenode%3A home=1 permit=250k", "db", "post-start");
    assert_eq!(file("db"), None, "only before it starts");
    started("A database.%0Ahomenode%3A home=1 permit=250k", "db", "pre-start");
    assert_eq!(
        file("db").unwrap(),
        "# From the notes of VM 100, when it was started.\nhome = \"1\"\npermit = \"250k\"\n"
    );
    let uuid = "0f3f8a44-6c2b-4a38-9d0e-5b1f2c3d4e5f";
    let with_uuid = format!("db\nsmbios1: base64=1,uuid={},family=eA==", uuid.to_uppercase());
    started("homenode%3A home=1", &with_uuid, "pre-start");
    assert!(file(uuid).unwrap().contains("home = \"1\""));
    assert_eq!(file("db"), None, "one file says it");
    started("A database.%0Ahomenode%3A home=1 permit=250k", "db", "pre-start");
    started("no word of it", "db", "pre-start");
    assert!(
        file("db").unwrap().contains("250k"),
        "what the operator wrote stays"
    );
    started("homenode%3A home=\"1\"\\", "quoted", "pre-start");
    let table: toml::Table = file("quoted").unwrap().parse().unwrap();
    assert_eq!(table["home"].as_str(), Some("1"));
    started("homenode%3A home=1", "../escaped", "pre-start");
    assert!(!dir.path().join("escaped.toml").exists());
    // If the hookscript gets the lock late, or never, the VM still starts.
    let lock = std::fs::File::open(vms.join(".lock")).unwrap();
    lock.lock().unwrap();
    started("homenode%3A home=0", "db", "pre-start");
    assert!(file("db").unwrap().contains("home = \"0\""));
    // The VM also starts if the settings' directory cannot be written.
    std::fs::remove_dir_all(&vms).unwrap();
    std::fs::write(&vms, "").unwrap();
    started("homenode%3A home=1", "db", "pre-start");
}
