#!/bin/sh
# Makes the environment for the tests of the Python package, below target: pinned versions, from PyPI. What is already there
# is not touched. For Debian 12 (and relatives), as root or with sudo if python3-venv is missing.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
wanted=$root/python/tests/requirements.txt
here=$target/python/venv

. "$root/scripts/lib/packages.sh"

# The list it was installed from, stored with it: an interrupted installation lacks it.
if cmp -s "$wanted" "$here/requirements.txt"; then
    exit 0
fi
if ! python3 -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    apt_install python3-venv || die "apt-get could not install python3-venv (see above)"
fi
say "installing what tests of the Python package need into $here"
rm -rf "${here:?}"
python3 -m venv "$here" || die "python3 cannot make an environment, see above"
"$here/bin/pip" install --quiet --disable-pip-version-check --requirement "$wanted" >&2 \
    || die "pip could not install $wanted, see above"
cp "$wanted" "$here/requirements.txt"
