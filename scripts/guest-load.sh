#!/bin/sh
# Builds the only program of the VMs that 'homenode evidence' starts, linked statically, and puts it next to homenode.
#
#   scripts/guest-load.sh debug         for target/debug/homenode; also: release, dist
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
triple=x86_64-unknown-linux-gnu

if [ "$(uname -m)" != x86_64 ]; then
    echo "scripts/guest-load.sh: no VMs are measured on $(uname -m): nothing to build" >&2
    exit 0
fi
cd "$root"
# Its flags concern only what is built for a named target, so nothing else is built again.
RUSTFLAGS='-C target-feature=+crt-static' CARGO_TARGET_DIR=$target \
    cargo build --quiet --release --package homenode-load --target $triple --config 'profile.release.strip="symbols"'
mkdir -p "$target/$1"
cp "$target/$triple/release/homenode-guest-load" "$target/$1/homenode-guest-load-static"
