#!/bin/sh
# Fetches the external programs of 'make integrations', which test the shims of deploy: Nova and placement in a Python environment,
# Kubernetes' client of scheduler extenders with Incus' interpreter as a compiled test, and Incus in a Debian of its own. All is below
# target, except mmdebstrap, which makes that Debian; what is already there, in these versions, is not touched.
#
# For Debian 12 (and relatives), as root, as Incus' daemons are: Python 3.10 or newer with venv, Go 1.24 or newer.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}/integrations
tests=$root/deploy/shims/tests

. "$root/scripts/lib/packages.sh"

mkdir -p "$target"
if ! cmp -s "$tests/requirements.txt" "$target/requirements.txt"; then
    python3 -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
        || die "there is no python3 of 3.10 or newer with venv: install python3-venv"
    say "installing Nova into $target/python"
    rm -rf "$target/python" "$target/requirements.txt"
    python3 -m venv "$target/python" || die "python3 cannot make an environment, see above"
    "$target/python/bin/pip" install --quiet --no-deps --requirement "$tests/requirements.txt" >&2 \
        || die "pip could not install Nova, see above"
    # Nova looks for its api-paste.ini next to its modules.
    ln -sfn "$target/python/etc" "$(echo "$target"/python/lib/python3*/site-packages)/etc"
    cp "$tests/requirements.txt" "$target/requirements.txt"
fi

# As operators install them. From a copy: setuptools builds in the source folder.
rm -rf "$target/shims"
mkdir "$target/shims"
cp -R "$root/deploy/shims/pyproject.toml" "$root/deploy/shims/homenode_shims" "$target/shims"
"$target/python/bin/pip" install --quiet --no-deps --no-build-isolation --force-reinstall "$target/shims" >&2 \
    || die "pip could not install the shims, see above"

command -v go >/dev/null 2>&1 || die "there is no go: install Go 1.24 or newer"
say "compiling what asks the extender (2 minutes on 2 cores, the first time)"
(cd "$tests/go" && GOFLAGS=-mod=readonly go test -vet=off -c -o "$target/shims.test" .) >&2 || die "go could not compile it, see above"

# Debian 13 is the first with Incus.
made=$(sha256sum "$0" | cut -d' ' -f1)
if [ "$(cat "$target/incus.made" 2>/dev/null || true)" != "$made" ]; then
    need <<LIST
mmdebstrap|makes a Debian with Incus in it
LIST
    say "making a Debian 13 with Incus (a minute and a half, 250 MB)"
    apt_options > "$target/apt-options"
    [ "$(id -u)" -eq 0 ] || die "Incus' daemons run as root: run this as root"
    rm -rf "$target/incus"
    # shellcheck disable=SC2046 # one word per file is meant
    mmdebstrap --quiet --variant=minbase --format=directory --aptopt='APT::Install-Recommends "false"' \
        --aptopt="$target/apt-options" --include=incus-base,incus-client,iproute2 \
        trixie "$target/incus" $(apt_sources trixie "$target/sources") >&2
    echo "$made" > "$target/incus.made"
fi
