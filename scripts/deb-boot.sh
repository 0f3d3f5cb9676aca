#!/bin/sh
# Runs the packages of target/deb under a real systemd: boots a Debian 12 with libvirt and KVM on an emulated host of four nodes, in
# which scripts/deb-boot-inside.sh installs, starts, kills, upgrades, downgrades and purges them while guests run.
#
# The host's output is in target/deb-boot/console.log, the results of checks in results.log in the same folder.
# For Debian 12, as root, since it makes a root directory.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
debs=$target/deb
place=$target/deb-boot
minutes=30

. "$root/scripts/lib/packages.sh"

[ "$(id -u)" -eq 0 ] || die "it makes a root directory: run it as root"
set -- "$debs"/homenode_*.deb "$debs"/homenode-numad_*.deb
[ -e "$1" ] || die "no packages in $debs: run 'make deb' first"

need <<LIST
mmdebstrap|makes a Debian
qemu-system-x86|emulates the host
seabios|is its firmware
e2fsprogs|makes its disk
cpio|packs what its guests run
LIST

mkdir -p "$place"
apt_options > "$place/apt-options"
# The host's packages, in addition to the tested ones.
packages=systemd-sysv,dbus,udev,kmod,procps,polkitd,numactl,numad,busybox-static,initramfs-tools,linux-image-amd64
packages=$packages,libvirt-daemon-system,libvirt-daemon-driver-qemu,libvirt-clients,qemu-system-x86,seabios
if [ ! -f "$place/host.tar" ]; then
    say "making a Debian 12 with libvirt"
    # shellcheck disable=SC2016,SC2046 # the hooks' variables are mmdebstrap's; one word per file is meant
    mmdebstrap --quiet --variant=minbase --aptopt="$place/apt-options" --include="$packages" \
        --essential-hook='mkdir -p "$1/etc/initramfs-tools/conf.d"; echo MODULES=list > "$1/etc/initramfs-tools/conf.d/list"' \
        --essential-hook='printf "virtio_pci\nvirtio_blk\next4\n" > "$1/etc/initramfs-tools/modules"' \
        bookworm "$place/new.tar" $(apt_sources bookworm "$place/sources") >&2
    mv "$place/new.tar" "$place/host.tar"
fi

say "making its disk"
host=$place/host
guest=$place/guest
trap 'rm -rf "$host" "$guest" "$place/disk"' EXIT
rm -rf "$host" "$guest" "$place/disk"
mkdir -p "$host" "$guest/bin" "$guest/proc" "$guest/dev"
tar -x -C "$host" -f "$place/host.tar"
cp "$host"/boot/vmlinuz-* "$place/vmlinuz"
cp "$host"/boot/initrd.img-* "$place/initrd"
mkdir -p "$host/tried/packages" "$host/tried/newer"
cp "$@" "$host/tried/packages/"
for package in "$@"; do raise_version "$package" "$host/tried/newer"; done
install "$root/scripts/deb-boot-inside.sh" "$host/tried/inside"

# The guest: a kernel and a shell that has touched some memory, and works part of the time.
cp "$host/usr/bin/busybox" "$guest/bin/busybox"
cat > "$guest/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox dd if=/dev/zero of=/touched bs=65536 count=400
echo touched
while :; do
    i=0
    while [ "$i" -lt 3000 ]; do i=$((i + 1)); done
    /bin/busybox sleep .2
done
INIT
chmod 755 "$guest/init"
(cd "$guest" && find . | cpio --quiet -o -H newc > "$host/tried/guest.cpio")

cat > "$host/etc/systemd/system/tried.service" <<'UNIT'
[Unit]
Description=Tries the packages
After=multi-user.target libvirtd.socket
[Service]
Type=oneshot
StandardOutput=file:/dev/ttyS1
StandardError=inherit
ExecStart=/tried/inside
ExecStopPost=/bin/systemctl --no-block poweroff --force
TimeoutStartSec=infinity
UNIT
mkdir -p "$host/etc/systemd/system/multi-user.target.wants"
ln -s ../tried.service "$host/etc/systemd/system/multi-user.target.wants/tried.service"
truncate -s 4G "$place/disk"
/sbin/mkfs.ext4 -q -d "$host" "$place/disk"
rm -rf "$host" "$guest"

say "booting it, for $minutes minutes at most"
set -- -accel tcg,thread=multi -cpu EPYC,+svm,+npt -smp 4 -m 4096
for node in 0 1 2 3; do
    set -- "$@" -object "memory-backend-ram,id=m$node,size=1G" -numa "node,nodeid=$node,cpus=$node,memdev=m$node"
done
for far in 0,1:16 0,2:16 0,3:22 1,2:22 1,3:16 2,3:16; do
    pair=${far%:*}
    set -- "$@" -numa "dist,src=${pair%,*},dst=${pair#*,},val=${far#*:}"
done
: > "$place/results.log"
timeout "${minutes}m" qemu-system-x86_64 "$@" -display none -monitor none -net none -no-reboot \
    -serial "file:$place/console.log" -serial "file:$place/results.log" \
    -drive "file=$place/disk,if=virtio,format=raw,cache=unsafe" -kernel "$place/vmlinuz" -initrd "$place/initrd" \
    -append "root=/dev/vda rw console=ttyS0 transparent_hugepage=never numa_balancing=disable oops=panic panic=5" 2> "$place/qemu.log" &
emulator=$!
tail -n +1 -f --pid="$emulator" "$place/results.log"
wait "$emulator" || say "the emulated host ended with status $?"
case $(tail -n 1 "$place/results.log" | tr -d '\r') in
    *' passed, 0 failed') ;;
    *' failed') exit 1 ;;
    *) tail -n 20 "$place/console.log" >&2; die "the host ended before all was checked" ;;
esac
