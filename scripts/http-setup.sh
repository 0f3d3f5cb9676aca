#!/bin/sh
# Fetches the external programs of 'make http': Debian's Prometheus, unpacked but not installed, so that no service
# starts, and schemathesis and Perfetto's trace reader in environments of their own. All are below target. What is already
# there is not touched.
#
# For Debian 12 (and relatives), as root or with sudo where python3-venv is missing.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
schemathesis_version=4.32.5
perfetto_version=0.59.1

. "$root/scripts/lib/packages.sh"

if [ ! -x "$target/prometheus/usr/bin/promtool" ]; then
    fetched=$(mktemp -d)
    trap 'rm -rf "$fetched"' EXIT
    say "fetching Debian's prometheus"
    apt_fetch "$fetched" prometheus
    mkdir -p "$target/prometheus"
    dpkg-deb -x "$fetched"/prometheus_*.deb "$target/prometheus"
fi

# A Python package in an environment of its own, and a command that must run there: an interrupted installation leaves a part.
environment() {
    name=$1 version=$2 program=$3
    shift 3
    "$target/$name/bin/$program" "$@" >/dev/null 2>&1 && return
    if ! python3 -c 'import ensurepip' >/dev/null 2>&1; then
        apt_install python3-venv || die "apt-get could not install python3-venv (see above)"
    fi
    say "installing $name $version into $target/$name"
    rm -rf "${target:?}/$name"
    python3 -m venv "$target/$name" || die "python3 cannot make an environment, see above"
    "$target/$name/bin/pip" install --quiet "$name==$version" >&2 || die "pip could not install $name, see above"
}

environment schemathesis "$schemathesis_version" st --version
environment perfetto "$perfetto_version" python3 -c 'import perfetto.protos'
