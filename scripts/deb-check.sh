#!/bin/sh
# Installs the packages of target/deb on a fresh Debian 12, upgrades and downgrades them, removes and purges them: by piuparts, and
# by what an operator does. The fresh Debian is a directory below target/deb, made from the sources that apt has here.
#
# For Debian 12, as root, since it changes its root directory.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
place=$target/deb
fresh=$place/fresh

say() { printf 'deb-check: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

[ "$(id -u)" -eq 0 ] || die "it changes its root directory: run it as root"
set -- "$place"/homenode_*.deb "$place"/homenode-numad_*.deb "$place"/homenode-guest_*.deb
[ -e "$1" ] || die "no packages in $place: run 'make deb' first"

missing=''
for package in mmdebstrap piuparts; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)" = installed ] || missing="$missing $package"
done
if [ -n "$missing" ]; then
    say "installing$missing: a fresh Debian, and what tries packages in it"
    # shellcheck disable=SC2086
    env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing >&2 || die "apt-get could not install$missing"
fi

# What apt is told here of how to fetch, the fresh one is told as well.
apt-config dump | grep '^Acquire::Check' > "$place/apt-options" || true
if [ ! -f "$place/fresh.tar.gz" ]; then
    say "making a fresh Debian 12"
    sources=$(ls /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list /etc/apt/sources.list 2>/dev/null || true)
    # shellcheck disable=SC2086
    mmdebstrap --quiet --variant=minbase --aptopt="$place/apt-options" bookworm "$place/new.tar.gz" $sources >&2
    mv "$place/new.tar.gz" "$place/fresh.tar.gz"
fi

passed=0
failed=0
check() {
    name=$1
    shift
    if "$@" > "$place/check.log" 2>&1; then
        passed=$((passed + 1)); say "ok $name"
    else
        failed=$((failed + 1)); say "FAILED $name"; tail -n 40 "$place/check.log" >&2
    fi
}

within() { chroot "$fresh" env DEBIAN_FRONTEND=noninteractive PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"; }
same_as_before() { diff "$place/before" "$place/after"; }
# Files outside of what package managers and logs keep for themselves.
list() {
    (cd "$fresh" && find . -xdev \( -path ./var/lib/dpkg -o -path ./var/lib/apt -o -path ./var/cache -o -path ./var/log -o -path ./packages \
        -o -path ./proc -o -path ./dev -o -path ./sys \) -prune -o -print | sort)
}

rm -rf "$fresh"
mkdir -p "$fresh"
tar -xz -C "$fresh" -f "$place/fresh.tar.gz"
trap 'rm -rf "$fresh"' EXIT
mkdir "$fresh/packages" "$fresh/newer"
cp "$@" "$fresh/packages/"
# The same with a version that is higher.
for package in "$@"; do
    rm -rf "$place/unpacked"
    dpkg-deb -R "$package" "$place/unpacked"
    sed -i 's/^Version: .*/&+newer/; s/(= \([^)]*\))/(= \1+newer)/' "$place/unpacked/DEBIAN/control"
    dpkg-deb --root-owner-group -b "$place/unpacked" "$fresh/newer/" >/dev/null
    rm -rf "$place/unpacked"
done
within apt-get -q update > "$place/check.log" 2>&1 || die "the fresh Debian's apt-get cannot update: see $place/check.log"
# What they depend on stays, and is there before.
check "dependencies are found in Debian" within sh -c 'apt-get install -q -y --no-install-recommends libvirt0 dkms numad systemd'
list > "$place/before"
check "install" within sh -c 'apt-get install -q -y --no-install-recommends /packages/*.deb'
check "the command runs" within homenode --version
check "the twin runs" within homenode sim tavo-mixed --json
check "numad is ours" within sh -c 'test "$(readlink /usr/bin/numad)" = homenode && test -e /usr/bin/numad.distrib'
check "its group is there" within getent group homenode
check "its manual is there" test -e "$fresh/usr/share/man/man1/homenode-run.1.gz"
check "upgrade" within sh -c 'dpkg -i /newer/*.deb'
check "downgrade" within sh -c 'dpkg -i /packages/*.deb'
check "remove" within apt-get remove -q -y homenode homenode-numad homenode-guest
check "numad is Debian's again" within sh -c 'test ! -L /usr/bin/numad && test ! -e /usr/bin/numad.distrib'
check "the hook that stays lets machines start" within sh -c 'test ! -e /etc/libvirt/hooks/qemu.d/homenode || /etc/libvirt/hooks/qemu.d/homenode vm prepare begin -'
check "purge" within dpkg --purge homenode homenode-numad homenode-guest
list > "$place/after"
check "nothing is left" same_as_before

# It looks for what packages depend on in Debian, where homenode is not: homenode-numad, which needs it, was tried above.
check "piuparts" piuparts --basetgz="$place/fresh.tar.gz" --keep-sources-list --distribution=bookworm --no-upgrade-test \
    --warn-on-others --skip-logrotatefiles-test --no-eatmydata --allow-database "$1" "$3"

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
