#!/bin/sh
# Fetches what asks an agent over HTTP in 'make http': Debian's Prometheus, unpacked and not installed, so that no service
# starts, and schemathesis in an environment of its own. Both lie below target. What is there already is not touched.
#
# For Debian 12 (and relatives); python3-venv must be installed, and nothing is done as root.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
schemathesis_version=4.32.5

say() { printf 'http-setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

if [ ! -x "$target/prometheus/usr/bin/promtool" ]; then
    command -v apt-get >/dev/null 2>&1 || die "no apt-get here: put prometheus and promtool into $target/prometheus/usr/bin"
    fetched=$(mktemp -d)
    trap 'rm -rf "$fetched"' EXIT
    say "fetching Debian's prometheus"
    (cd "$fetched" && apt-get -q download prometheus) >&2 \
        || die "apt-get could not fetch prometheus: run 'apt-get update' as root first"
    mkdir -p "$target/prometheus"
    dpkg-deb -x "$fetched"/prometheus_*.deb "$target/prometheus"
fi

# It must run: an installation that was cut short leaves the program and not what it needs.
if ! "$target/schemathesis/bin/st" --version >/dev/null 2>&1; then
    rm -rf "$target/schemathesis"
    say "installing schemathesis $schemathesis_version into $target/schemathesis"
    python3 -m venv "$target/schemathesis" || die "python3 cannot make an environment: install python3-venv"
    "$target/schemathesis/bin/pip" install --quiet "schemathesis==$schemathesis_version" >&2 \
        || die "pip could not install schemathesis, see above"
fi
