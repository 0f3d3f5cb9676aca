#!/bin/sh
# Installs the requirements for building Homenode, checking its code and profiling programs, then runs a command with them.
#
#   scripts/setup.sh                    install what is missing
#   scripts/setup.sh cargo build        the same, then run 'cargo build' with the toolchain it found
#
# Idempotent: what is already there is not touched, so a second run takes a second. For Debian 12 (and relatives),
# as root or with sudo; neither is needed if nothing is missing. Requirements of only the testbed are
# installed by scripts/testbed-setup.sh.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
rust_version=$(sed -n 's/^rust-version *= *"\([0-9.]*\)".*/\1/p' "$root/Cargo.toml")
HOME=${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}
cargo_home=${CARGO_HOME:-$HOME/.cargo}
export HOME

. "$root/scripts/lib/packages.sh"

# --- Debian packages -------------------------------------------------------------------------------------------------

# Package and reason, one per line.
packages="
gcc|compiles and links the Rust crates
libc6-dev|C library to link with
make|runs the Makefile
pkg-config|finds libvirt for the virt crate
libvirt-dev|libvirt's headers and library, through which the agent manages VMs
qemu-user|runs the programs that homenode profile measures
qemu-system-x86|runs the VMs that tests find without libvirt
openjdk-17-jre-headless|the JVM that the guest's libraries are tried with
libjemalloc2|an allocator that they are tried with
libgoogle-perftools4|TCMalloc, another one
libnuma1|the library that they are tried before
systemd|systemd-analyze, which checks the agent's unit
ca-certificates|lets cargo and rustup check whom they talk to
"

# On other distributions the compiler reports what is missing.
install_packages() {
    if ! command -v dpkg-query >/dev/null 2>&1; then
        say "this is not Debian or a relative: have a C compiler, make, pkg-config and libvirt's headers installed"
        return 0
    fi
    need <<END
$packages
END
}

# --- Rust ------------------------------------------------------------------------------------------------------------

# Whether version $1 is at least version $2.
at_least() {
    [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]
}

# The version of a cargo in the workspace, or nothing if it does not run.
version_of() {
    (cd "$root" && "$1" --version 2>/dev/null) | sed -n 's/^cargo \([0-9.]*\).*/\1/p'
}

new_enough() {
    version=$(version_of "$1")
    [ -n "$version" ] && at_least "$version" "$rust_version"
}

prefer() { PATH="$1:$PATH"; export PATH; }

# The first cargo that is new enough; later steps find it through PATH.
use_installed_rust() {
    if new_enough cargo; then return 0; fi
    new_enough "$cargo_home/bin/cargo" || return 1
    prefer "$cargo_home/bin"
}

find_rustup() {
    command -v rustup || { [ -x "$cargo_home/bin/rustup" ] && printf '%s\n' "$cargo_home/bin/rustup"; }
}

# The directory of rustup's own stable toolchain comes first, so that neither an older cargo of the distribution nor another
# default toolchain is in the way.
use_rustup_stable() {
    cargo_path=$("$1" which --toolchain stable cargo 2>/dev/null) || return 1
    new_enough "$cargo_path" || return 1
    prefer "$(dirname "$cargo_path")"
}

debian_has_rustup() {
    command -v apt-cache >/dev/null 2>&1 || return 1
    update_once
    apt-cache policy rustup | grep -q 'Candidate: [0-9]'
}

install_rustup() {
    if debian_has_rustup && apt_install rustup; then return 0; fi
    say "Debian has no rustup here: running its own installer for this user (into $cargo_home)"
    if ! command -v curl >/dev/null 2>&1; then
        say "needs curl: fetches rustup's installer"
        apt_install curl || die "apt-get could not install curl (see above)"
    fi
    installer=$(mktemp)
    trap 'rm -f "$installer"' EXIT
    curl --proto '=https' --tlsv1.2 --silent --show-error --fail --retry 3 https://sh.rustup.rs -o "$installer" \
        || die "cannot fetch rustup's installer: is there a network? Otherwise install Rust $rust_version or newer yourself"
    sh "$installer" -y -q --profile minimal --default-toolchain none --no-modify-path >&2 \
        || die "rustup's installer failed, see above"
    rm -f "$installer"
    trap - EXIT
    say "to use rustup outside of make, add $cargo_home/bin to PATH"
}

install_rust() {
    version=$(version_of cargo)
    say "needs Rust $rust_version or newer, found ${version:-none}"
    rustup=$(find_rustup) || { install_rustup; rustup=$(find_rustup); } || die "rustup was installed, but is not found"
    if use_rustup_stable "$rustup"; then
        say "using the stable toolchain that rustup has"
        return 0
    fi
    say "rustup toolchain install stable (about 1 GB on disk)"
    "$rustup" toolchain install stable --profile minimal -c rustfmt,clippy >&2 || die "rustup failed, see above"
    use_rustup_stable "$rustup" || die "Rust $rust_version or newer is needed, and rustup's stable toolchain is older"
}

has_components() {
    (cd "$root" && cargo fmt --version && cargo clippy --version) >/dev/null 2>&1
}

# Building works without them, so their absence is not an error here.
install_components() {
    if has_components; then return 0; fi
    say "needs rustfmt and clippy: 'cargo xtask check' runs them"
    if rustup=$(find_rustup); then
        toolchain=$(basename "$(cd "$root" && rustc --print sysroot)")
        "$rustup" component add --toolchain "$toolchain" rustfmt clippy >&2 || true
    elif command -v apt-get >/dev/null 2>&1; then
        apt_install rustfmt rust-clippy || true
    fi
    has_components || say "no rustfmt or clippy for $(command -v cargo): 'make run' works, 'make test' will not pass"
}

# ---------------------------------------------------------------------------------------------------------------------

install_packages
use_installed_rust || install_rust
install_components

if [ $# -gt 0 ]; then exec "$@"; fi
say "ready: $(cargo --version), in $(dirname "$(command -v cargo)")"
