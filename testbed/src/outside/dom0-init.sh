#!/bin/busybox sh
# The first program of the emulated Xen host's dom0, from its initramfs: mounts the disk and the directory of this boot, then runs
# the testbed's inside. The kernel's command line names that directory, whose path is the same inside and out.
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
for module in /modules/*; do
    $b insmod "$module" || echo "dom0-init: $module does not load"
done
for _ in 1 2 3 4 5 6 7 8 9 10; do
    [ -b /dev/vda ] && break
    $b sleep 1
done
$b mount -t ext4 /dev/vda /disk || echo "dom0-init: no disk"
for word in $($b cat /proc/cmdline); do
    case "$word" in homenode.dir=*) dir=${word#homenode.dir=} ;; esac
done
$b mkdir -p "/disk$dir"
$b mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=none boot "/disk$dir" || echo "dom0-init: no shared directory"
for place in proc sys dev; do
    $b mount -o move "/$place" "/disk/$place"
done
$b mount -t tmpfs run /disk/run
# Links that udev would make; Xen's scripts need them.
$b ln -s /proc/self/fd /disk/dev/fd
for stream in 0:stdin 1:stdout 2:stderr; do
    $b ln -s "fd/${stream%:*}" "/disk/dev/${stream#*:}"
done
$b mkdir -p /disk/dev/pts
$b mount -t devpts pts /disk/dev/pts
$b mount -t xenfs xenfs /disk/proc/xen
$b ip link set lo up
# With systemd as the first process the inside is one of its services, and Xen's daemons are those of the Debian package.
if $b grep -q homenode.systemd /disk/proc/cmdline; then
    units=/disk/run/systemd/system
    $b mkdir -p "$units/multi-user.target.wants"
    $b cat > "$units/homenode-testbed.service" <<UNIT
[Unit]
Description=The inside of the testbed
After=xen.service
[Service]
Environment=PATH=/usr/sbin:/usr/bin:/sbin:/bin:/usr/lib/xen-4.17/bin HOME=/root LC_ALL=C
ExecStart=$dir/bin/homenode-testbed inside $dir/exchange
ExecStopPost=/bin/busybox poweroff -f
KillMode=process
UNIT
    $b ln -s ../homenode-testbed.service "$units/multi-user.target.wants/"
    exec $b switch_root /disk /lib/systemd/systemd --unit=multi-user.target
fi
export PATH=/usr/sbin:/usr/bin:/sbin:/bin:/usr/lib/xen-4.17/bin HOME=/root LC_ALL=C
# The shell stays the first process, to reap daemons that end.
# shellcheck disable=SC2016 # the inner shell's arguments are meant
exec $b switch_root /disk /bin/bash -c '"$0" inside "$1"; busybox poweroff -f' "$dir/bin/homenode-testbed" "$dir/exchange"
