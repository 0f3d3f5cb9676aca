#!/bin/sh
# Installs the requirements of 'make site': mkdocs and its theme, in an environment of their own below target, and
# iframe-worker (MIT, finished), which makes pages searchable without a server. What is already there is not touched.
#
# For Debian 12 (and relatives), as root or with sudo if python3-venv or npm is missing.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
# The theme's releases are the ones that keep mkdocs maintained; the other versions were tested with both.
packages='mkdocs-material==9.8.2 mkdocs==1.6.1 Markdown==3.11.3 pymdown-extensions==13.1.2 Pygments==2.21.0'
iframe_worker_version=1.0.4

. "$root/scripts/lib/packages.sh"

if [ ! -f "$target/iframe-worker/package/shim/index.js" ]; then
    command -v npm >/dev/null 2>&1 || apt_install npm || die "apt-get could not install npm (see above)"
    say "fetching iframe-worker $iframe_worker_version into $target/iframe-worker"
    mkdir -p "$target/iframe-worker"
    (cd "$target/iframe-worker" && npm pack --silent "iframe-worker@$iframe_worker_version" >&2) \
        || die "npm could not fetch iframe-worker, see above"
    tar -xzf "$target/iframe-worker/iframe-worker-$iframe_worker_version.tgz" -C "$target/iframe-worker"
fi

# An interrupted installation, or one of other versions, is made again.
[ "$(cat "$target/mkdocs/homenode-packages" 2>/dev/null || true)" = "$packages" ] && exit 0

if ! python3 -c 'import ensurepip' >/dev/null 2>&1; then
    apt_install python3-venv || die "apt-get could not install python3-venv (see above)"
fi
say "installing mkdocs and its theme into $target/mkdocs"
rm -rf "${target:?}/mkdocs"
mkdir -p "$target"
python3 -m venv "$target/mkdocs" || die "python3 cannot make an environment, see above"
# shellcheck disable=SC2086 # one word per package is meant
"$target/mkdocs/bin/pip" install --quiet --disable-pip-version-check $packages >&2 || die "pip could not install mkdocs, see above"
printf '%s\n' "$packages" > "$target/mkdocs/homenode-packages"
