#!/bin/sh
# Makes what `homenode-testbed xen` boots in addition to what scripts/testbed-setup.sh installs: Xen and the disk of its dom0.
#
# dom0 is a small Debian 12 with Xen's tools and libvirt's driver for them, made by mmdebstrap from this machine's own package
# sources. Nothing of it is installed here, and nothing is started. Everything is in target/testbed/xen (1 GB at most, 370 MB
# of it used), and is made again only if this script has changed. As root or with sudo; takes three minutes.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
. "$root/scripts/lib/packages.sh"

place=$root/target/testbed/xen
made=$(sha256sum "$0" | cut -d' ' -f1)
if [ "$(cat "$place/made" 2>/dev/null || true)" = "$made" ] && [ -s "$place/dom0.img" ] && [ -s "$place/xen" ]; then
    say "Xen and its dom0: there"
    exit 0
fi

need <<LIST
mmdebstrap|makes dom0's Debian
e2fsprogs|makes dom0's disk
LIST

# The hypervisor, its tools, libvirt's driver for them, and tools for inspecting it.
packages=xen-hypervisor-4.17-amd64,xen-utils-4.17,xen-utils-common,libvirt-daemon,libvirt-daemon-driver-xen,libvirt-clients
packages=$packages,kmod,procps,iproute2,busybox-static
# With systemd for the group xen-service; for all others the testbed's own program is init.
packages=$packages,systemd-sysv,dbus

work=$(mktemp -d)
trap 'as_root rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
mkdir -p "$place"
rm -f "$place/made"
apt_options > "$work/apt-options"
say "making a Debian 12 with Xen's tools and libvirt (two minutes)"
# shellcheck disable=SC2046 # one word per file is meant
as_root mmdebstrap --quiet --variant=minbase --format=directory \
    --aptopt='APT::Install-Recommends "false"' --aptopt="$work/apt-options" \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' --include="$packages" \
    bookworm "$work/dom0" $(apt_sources bookworm "$work/sources") >&2

# An emulated CPU has no VME, and Xen hides SEP from dom0 on AMD, so that none of libvirt's CPU models fits and its Xen driver
# does not start. Without VME in it the oldest model fits.
as_root sed -i "/'vme'/d" "$work/dom0/usr/share/libvirt/cpu_map/x86_486.xml"
# Other drivers have nothing to manage, and take time to find that out.
drivers=$work/dom0/usr/lib/x86_64-linux-gnu/libvirt/connection-driver
for driver in "$drivers"/libvirt_driver_*.so; do
    case "$driver" in
        *_libxl.so) ;;
        *) as_root rm "$driver" ;;
    esac
done

say "unpacking the hypervisor, and making dom0's disk"
as_root sh -c "gzip -dc '$work'/dom0/boot/xen-4.17-amd64.gz" > "$place/xen"
as_root rm -rf "$work/dom0/boot" "$work/dom0/var/cache/apt/archives" "$work/dom0/var/lib/apt/lists"
as_root mkdir -p "$work/dom0/boot" "$work/dom0/var/cache/apt/archives/partial" "$work/dom0/var/lib/apt/lists/partial"
rm -f "$place/dom0.img"
as_root mke2fs -q -t ext4 -m 0 -d "$work/dom0" "$place/dom0.img" 1G
as_root chown "$(id -u):$(id -g)" "$place/dom0.img"
printf '%s\n' "$made" > "$place/made"
say "ready: run 'cargo run -p homenode-testbed -- xen'"
