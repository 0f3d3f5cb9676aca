//! Checks that libvirt's library is loaded only when it is needed.

use crate::common::{homenode, stderr, stdout};

#[test]
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn the_program_starts_without_libvirts_library() {
    // The loader lists what it would load, without running the program.
    let output = homenode().env("LD_TRACE_LOADED_OBJECTS", "1").output().unwrap();
    let libraries = stdout(&output);
    assert!(
        libraries.contains("libc.so") && !libraries.contains("libvirt"),
        "{libraries}"
    );
}

#[test]
fn a_library_that_cannot_be_loaded_is_said_to_be_and_a_simulation_does_without() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("libvirt.so.0"), "no library").unwrap();
    let run = |args: &[&str]| {
        let mut command = homenode();
        let output = command.args(args).env("LD_LIBRARY_PATH", dir.path()).output();
        output.unwrap()
    };
    let output = run(&[
        "run",
        "--host",
        "libvirt:test:///default",
        "--dry-run",
        "--duration",
        "1s",
    ]);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("no libvirt at test:///default: libvirt's library cannot be used")
            && said.contains("libvirt.so.0"),
        "{said}"
    );
    let output = run(&["sim", "churn", "--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
}
