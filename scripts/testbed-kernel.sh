#!/bin/sh
# Fetches Debian's newest 6.12 kernel for Debian 12 (cloud flavour) with its headers into target/testbed/kernel-6.12: for the
# testbed's case 'module-6.12'. Nothing is installed; the packages come from the machine's own apt sources and are unpacked.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
target="$root/target/testbed/kernel-6.12"

say() { printf 'testbed-kernel: %s\n' "$*"; }
die() { printf 'testbed-kernel: %s\n' "$*" >&2; exit 1; }

command -v apt-cache >/dev/null 2>&1 || die "this is not Debian or a relative (no apt-cache)"
version=$(apt-cache search --names-only '^linux-image-6\.12\.[0-9.]*\+deb12-cloud-amd64$' \
    | sed 's/^linux-image-\([^ ]*\)-cloud-amd64 .*/\1/' | sort -V | tail -n 1)
[ -n "$version" ] || die "no linux-image-6.12*+deb12-cloud-amd64 here: is Debian 12's security suite among the apt sources? (apt-get update)"
if [ -e "$target/$version" ]; then
    say "$version: there"
    exit 0
fi

rm -rf "$target"
mkdir -p "$target"
cd "$target"
say "fetching $version"
apt-get -q -q download "linux-image-$version-cloud-amd64" "linux-headers-$version-cloud-amd64" \
    "linux-headers-$version-common" "linux-kbuild-$version" || die "apt-get could not fetch $version (apt-get update?)"
for package in *.deb; do
    dpkg -x "$package" .
    rm -f "$package"
done
# The headers refer to the common part by its path in the system.
sed -i "s|/usr/src/|$target/usr/src/|" "usr/src/linux-headers-$version-cloud-amd64/Makefile"
ln -s "boot/vmlinuz-$version-cloud-amd64" image
ln -s "usr/src/linux-headers-$version-cloud-amd64" headers
touch "$version"
say "ready: $target"
