//! Builds the runtimes' libraries with their Makefile, which guest owners use as well.

use std::path::PathBuf;
use std::process::Command;

fn main() {
    let built = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it")).join("runtime");
    let status = Command::new("make")
        .args(["--directory", "runtime", "--jobs", "2"])
        .arg(format!("O={}", built.display()))
        // A make that runs cargo passes its own flags, which do not apply here.
        .env_remove("MAKEFLAGS")
        .env_remove("MAKELEVEL")
        .status()
        .expect("make: scripts/setup.sh installs it");
    assert!(status.success(), "the guest's libraries do not build, see above");
    println!("cargo:rustc-env=HOMENODE_GUEST_RUNTIME={}", built.display());
    println!("cargo:rerun-if-changed=runtime");
    println!("cargo:rerun-if-changed=include");
}
