//! Puts the commit into the binary: seed and commit together say what a run was. And builds the one program of the guests of
//! `homenode epsilon`, with the C compiler that links everything else.

use std::process::Command;

fn main() {
    let git = |args: &[&str]| {
        Command::new("git")
            .args(args)
            .output()
            .ok()
            .filter(|out| out.status.success())
    };
    let commit = git(&["describe", "--always", "--dirty", "--abbrev=12"])
        .and_then(|out| String::from_utf8(out.stdout).ok())
        .map_or_else(|| "unknown".to_owned(), |text| text.trim().to_owned());
    println!("cargo:rustc-env=HOMENODE_COMMIT={commit}");
    println!("cargo:rerun-if-changed=../../.git/HEAD");
    println!("cargo:rerun-if-changed=../../.git/index");
    build_init();
}

/// Empty for other processors than x86-64.
fn build_init() {
    const SOURCE: &str = "src/epsilon/init.c";
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
