#!/bin/sh
# Installs the packages of target/deb on a fresh Debian, upgrades and downgrades them, removes and purges them: with piuparts, and
# like an operator. The fresh Debian is a directory below target/deb, made from apt's sources on this machine.
#
#   scripts/deb-check.sh [bookworm|trixie]
#
# For Debian 12, as root, since it changes its root directory.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
place=$target/deb
suite=${1:-bookworm}
fresh=$place/fresh-$suite

. "$root/scripts/lib/packages.sh"

[ "$(id -u)" -eq 0 ] || die "it changes its root directory: run it as root"
set -- "$place"/homenode_*.deb "$place"/homenode-numad_*.deb "$place"/homenode-guest_*.deb
[ -e "$1" ] || die "no packages in $place: run 'make deb' first"

need <<END
mmdebstrap|makes a fresh Debian
piuparts|tries packages in it
END

apt_options > "$place/apt-options"
if [ ! -f "$fresh.tar.gz" ]; then
    say "making a fresh Debian ($suite)"
    # shellcheck disable=SC2046 # one word per file is meant
    mmdebstrap --quiet --variant=minbase --aptopt="$place/apt-options" "$suite" "$place/new.tar.gz" \
        $(apt_sources "$suite" "$place/sources-$suite") >&2
    mv "$place/new.tar.gz" "$fresh.tar.gz"
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
tar -xz -C "$fresh" -f "$fresh.tar.gz"
trap 'rm -rf "$fresh"' EXIT
mkdir "$fresh/packages" "$fresh/newer"
cp "$@" "$fresh/packages/"
for package in "$@"; do raise_version "$package" "$fresh/newer"; done
within apt-get -q update > "$place/check.log" 2>&1 || die "the fresh Debian's apt-get cannot update: see $place/check.log"
# Dependencies stay, so they are installed beforehand.
check "dependencies are found in Debian" within sh -c 'apt-get install -q -y --no-install-recommends libvirt0 dkms numad systemd xz-utils'
list > "$place/before"
check "install" within sh -c 'apt-get install -q -y --no-install-recommends /packages/*.deb'
check "the command runs" within homenode --version
check "the command has at most 25 MB" sh -c "test \$(stat -c %s '$fresh/usr/bin/homenode') -le 25000000"
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

# The tarball, installed and removed by its INSTALL, without a running systemd.
tarball=$(ls "$target"/homenode-*-"$(uname -m)".tar.xz)
cp "$tarball" "$fresh/packages/tarball.tar.xz"
list > "$place/before"
check "the tarball is unpacked" within tar -xJf /packages/tarball.tar.xz --strip-components=1 -C /usr/local
check "its command runs" within /usr/local/bin/homenode --version
check "its numad answers" within sh -c '/usr/local/bin/numad -V | grep homenode'
check "its twin runs" within /usr/local/bin/homenode sim tavo-mixed --json
check "its unit is right" within systemd-analyze verify --man=no /usr/local/lib/systemd/system/homenode.service
check "its hook lets machines start" within /usr/local/share/homenode/etc/libvirt-hook vm prepare begin -
within sh -c 'cd /usr/local && tar -tJf /packages/tarball.tar.xz | cut -d/ -f2- | grep -v "/$" | xargs rm -f && find . -mindepth 2 -type d -empty -delete'
list > "$place/after"
check "nothing of it is left" sh -c "! diff '$place/before' '$place/after' | grep '^>' | grep -v '/run\|/tmp'"

# piuparts searches dependencies in Debian, which lacks homenode: homenode-numad, which needs it, was tested above.
check "piuparts" piuparts --basetgz="$fresh.tar.gz" --keep-sources-list --distribution="$suite" --no-upgrade-test \
    --warn-on-others --skip-logrotatefiles-test --no-eatmydata --allow-database "$1" "$3"

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
