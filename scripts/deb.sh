#!/bin/sh
# Builds Debian packages from the committed sources into target/deb, and has lintian judge them.
#
# For Debian 12 and 13, as root or with sudo where a package is missing.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
place=$target/deb

. "$root/scripts/lib/packages.sh"

need <<END
debhelper|makes packages
dh-dkms|makes of the module what DKMS builds
lintian|judges packages by Debian's policy
END

version=$(sed -n '1s/.*(\(.*\)).*/\1/p' "$root/debian/changelog")
built=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n 1)
[ "$version" = "$built" ] || die "debian/changelog says $version and Cargo.toml $built: make them the same"

rm -rf "$place"
mkdir -p "$place/homenode-$version"
git -C "$root" archive HEAD | tar -x -C "$place/homenode-$version"
# An archive lacks the commit that 'homenode --version' names.
HOMENODE_COMMIT=$(git -C "$root" rev-parse --short=12 HEAD)
export HOMENODE_COMMIT
(cd "$place/homenode-$version" && CARGO_TARGET_DIR=$target dpkg-buildpackage --build=binary --no-sign >&2)
rm -rf "$place/homenode-$version"
lintian --fail-on error --allow-root "$place"/*.changes
ls -1 "$place"/*.deb
