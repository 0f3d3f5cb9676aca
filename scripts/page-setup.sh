#!/bin/sh
# Fetches the browser for 'make page': Debian's Chromium with its WebDriver, and axe-core, which measures contrast and finds
# problems for users of screen readers. axe-core (MPL 2.0) is put below target and is not part of Homenode. What is already there
# is not touched.
#
# For Debian 12 (and relatives), as root or with sudo where a package is missing.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
axe_version=4.10.3

. "$root/scripts/lib/packages.sh"

# Program, package and reason, one per line. The committed pictures have DejaVu's letters.
missing=''
while IFS='|' read -r there package reason; do
    [ -e "$there" ] && continue
    say "needs $package: $reason"
    missing="$missing $package"
done <<END
/usr/bin/chromium|chromium|the browser that opens the page
/usr/bin/chromedriver|chromium-driver|clicks in it
/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf|fonts-dejavu-core|the letters of the committed pictures
/usr/bin/npm|npm|fetches axe-core
END
if [ -n "$missing" ]; then
    # shellcheck disable=SC2086 # one word per package is meant
    apt_install $missing || die "apt-get could not install$missing (see above)"
fi

if [ ! -f "$target/axe/package/axe.min.js" ]; then
    say "fetching axe-core $axe_version into $target/axe"
    mkdir -p "$target/axe"
    (cd "$target/axe" && npm pack --silent "axe-core@$axe_version" >&2) || die "npm could not fetch axe-core, see above"
    tar -xzf "$target/axe/axe-core-$axe_version.tgz" -C "$target/axe"
fi
