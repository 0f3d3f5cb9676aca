//! Builds the only program in the guests that measure a kernel's footprint. Uses the C compiler that also links everything.

use std::process::Command;

/// Builds the program, or an empty file if the target is not x86-64.
fn main() {
    const SOURCE: &str = "src/footprint/init.c";
    println!("cargo:rerun-if-changed={SOURCE}");
    let target = std::env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
    let folder = std::env::var_os("OUT_DIR").expect("cargo names a folder");
    let program = std::path::Path::new(&folder).join("epsilon-init");
    if target != "x86_64" {
        std::fs::write(&program, []).expect("cargo's folder can be written to");
        return;
    }
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let flags = [
        "-Os",
        "-static",
        "-nostdlib",
        "-ffreestanding",
        "-fno-stack-protector",
        "-fno-pie",
        "-no-pie",
        "-s",
    ];
    let built = Command::new(&compiler)
        .args(flags)
        .args(["-Wl,--build-id=none", "-o"])
        .arg(&program)
        .arg(SOURCE)
        .status();
    assert!(
        built.is_ok_and(|status| status.success()),
        "{} could not build {SOURCE}: install gcc, or name a C compiler in CC",
        compiler.display()
    );
}
