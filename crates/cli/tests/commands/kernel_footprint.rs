//! `homenode kernel-footprint` as a user runs it, with this machine's real kernel under the real QEMU, if both are installed.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn footprint(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_homenode"));
    command.arg("kernel-footprint").args(args).stdin(Stdio::null());
    command.output().expect("homenode runs")
}

fn complaint(args: &[&str]) -> String {
    let output = footprint(args);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn stock_kernel() -> Option<PathBuf> {
    let entries = std::fs::read_dir("/boot").ok()?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths
        .filter(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-"))
        })
        .max()
}

/// docs/OVERCOMMIT.md has a figure measured by hand. The step here is coarse, so that five guests suffice.
#[test]
fn a_stock_kernel_has_a_footprint_or_the_complaint_says_what_to_install() {
    let Some(kernel) = stock_kernel() else {
        let why = complaint(&["--kernel", "/boot/vmlinuz"]);
        assert!(why.contains("/boot/vmlinuz"), "{why}");
        return;
    };
    let kernel = kernel.display().to_string();
    let args = [
        "--kernel", &kernel, "--accel", "tcg", "--start", "512MiB", "--step", "50%", "--json",
    ];
    let output = footprint(&args);
    let errors = String::from_utf8_lossy(&output.stderr);
    if errors.contains("qemu-system-x86_64") {
        assert!(
            output.status.code() == Some(2) && errors.contains("qemu-system-x86"),
            "{errors}"
        );
        return;
    }
    assert!(output.status.success(), "{errors}");
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let bytes = |key: &str| {
        found[key]
            .as_u64()
            .unwrap_or_else(|| panic!("no {key} in {found}"))
    };
    // Kernels of distributions take between 20 and 200 MiB.
    let mib = bytes("footprint_bytes") >> 20;
    assert!((20..=200).contains(&mib), "{found}");
    assert!(
        bytes("dead_bytes") < bytes("footprint_bytes") && bytes("guest_says_bytes") >> 20 >= 20,
        "{found}"
    );
    assert_eq!(found["accelerator"], "tcg");
    let trials = found["trials"].as_array().expect("trials");
    let with = |outcome: &str| trials.iter().filter(|trial| trial["outcome"] == outcome).count();
    assert!(with("ran") >= 2 && with("ran") < trials.len(), "{found}");
}

#[test]
fn what_is_no_kernel_and_what_cannot_be_is_refused() {
    for (args, part) in [
        (&["--kernel", "/etc/passwd"][..], "not an x86 kernel image"),
        (&["--kernel", "/does/not/exist"], "No such file"),
        (&["--kernel", "/etc/passwd", "--step", "80%"], "from 1% to 50%"),
        (
            &["--kernel", "/etc/passwd", "--start", "1MiB"],
            "it must be more than",
        ),
        (
            &["--kernel", "/etc/passwd", "--qemu", "/does/not/exist"],
            "no such file",
        ),
    ] {
        let why = complaint(args);
        assert!(
            why.contains(part) || why.contains("qemu-system-x86"),
            "{args:?}: {why}"
        );
    }
}
