#!/bin/sh
# Installs the requirements of the testbed: an emulated 4-node NUMA host with real libvirt and KVM guests.
#
# Idempotent: what is already there is not touched, so a second run takes a second. It never starts a
# service: libvirtd runs only inside the emulated host. For Debian 12 (and relatives), as root or with sudo.
#
#   scripts/testbed-setup.sh            the requirements of the cases that run by default
#   scripts/testbed-setup.sh --damon    also a kernel with DAMON, for the group `damon`: unpacked, not installed
#   scripts/testbed-setup.sh --programs also the programs that the case `page-log-programs` runs in its guests
set -eu

wanted=${1:-}
case "$wanted" in
    '' | --damon | --programs) ;;
    *) printf 'testbed-setup: %s is not an option: there are --damon and --programs\n' "$wanted" >&2; exit 2 ;;
esac

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
venv="$root/target/testbed/venv"
virtme_version=1.42

. "$root/scripts/lib/packages.sh"

# Package and reason, one per line.
packages="
gcc|compiles and links the Rust crates
libc6-dev|C library, also its static form for the guest's init
pkg-config|finds libvirt for the virt crate
make|runs make testbed
libvirt-dev|headers of libvirt for the virt crate
cpio|virtme-ng packs its initramfs with it
busybox-static|the first program in the emulated host: it mounts this machine's files there
kmod|loads and lists kernel modules
xz-utils|unpacks the guest kernel
python3|runs virtme-ng
python3-venv|keeps virtme-ng apart from the system's Python
qemu-system-x86|emulates the NUMA host, and runs the guests inside it
libvirt-daemon-system|the libvirt daemon that runs inside the emulated host
libvirt-daemon-driver-qemu|its KVM driver
libvirt-clients|virsh, to look into the emulated host by hand
numad|the daemon whose advice libvirt asks for: the peer that is compared with
numactl|numactl -H and migratepages, to look into the emulated host by hand
linux-image-amd64|the stock kernel that the emulated host and the guests boot
"

# Programs in the guests of page-log-programs. None of them has a service: redis-tools has the server's program too.
if [ "$wanted" = --programs ]; then
    packages="$packages
x264|a program of PARSEC
libvips-tools|vips, a program of PARSEC
bzip2|compresses
sysbench|its tests of memory and CPU
redis-tools|the Redis server and its benchmark
openjdk-17-jdk-headless|a JVM, and the compiler of what it runs
hpcc|the HPC Challenge, which has HPL
"
fi

# A stock kernel of any build will do, even if the meta package is not installed.
have_kernel() {
    for image in /boot/vmlinuz-6.1.*-amd64; do
        release=${image#/boot/vmlinuz-}
        if [ -e "$image" ] && [ -e "/lib/modules/$release/kernel" ]; then return 0; fi
    done
    return 1
}

# The one of these that is used.
newest_kernel() {
    for image in /boot/vmlinuz-6.1.*-amd64; do
        release=${image#/boot/vmlinuz-}
        if [ -e "/lib/modules/$release/kernel" ]; then printf '%s\n' "$release"; fi
    done | sort -V | tail -n 1
}

# Packages of daemons would start them. policy-rc.d is Debian's way to prevent that; an existing one is restored.
policy=/usr/sbin/policy-rc.d
policy_saved=
forbid_services() {
    if [ -e "$policy" ]; then
        as_root mv "$policy" "$policy.testbed-saved"
        policy_saved=moved
    else
        policy_saved=absent
    fi
    printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null
    as_root chmod 755 "$policy"
}
restore_services() {
    case "$policy_saved" in
        moved) as_root mv "$policy.testbed-saved" "$policy" ;;
        absent) as_root rm -f "$policy" ;;
    esac
    policy_saved=
}

# Not starting them now is not enough: on a machine with systemd they must not start at the next boot either.
units="libvirtd.service libvirtd.socket libvirtd-ro.socket libvirtd-admin.socket libvirt-guests.service
virtlogd.service virtlogd.socket virtlogd-admin.socket virtlockd.service virtlockd.socket virtlockd-admin.socket
numad.service"
disable_units() {
    command -v systemctl >/dev/null 2>&1 || return 0
    for unit in $units; do
        as_root systemctl disable "$unit" >/dev/null 2>&1 || true
    done
}

install_packages() {
    [ -n "$missing" ] || { say "packages: all there"; return 0; }
    command -v apt-get >/dev/null 2>&1 || die "no apt-get here: install these by hand:$missing"
    had_libvirt=no
    if installed libvirt-daemon-system; then had_libvirt=yes; fi
    update_once
    trap restore_services EXIT
    trap 'exit 130' INT TERM
    forbid_services
    say "apt-get install$missing (no service is started)"
    # shellcheck disable=SC2086 # one word per package is meant
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install $missing
    restore_services
    trap - EXIT INT TERM
    # A libvirt that was installed before belongs to the machine's owner.
    if [ "$had_libvirt" = no ]; then disable_units; fi
}

# Requirements for building the guest's kernel module. The archive only keeps headers of its newest kernels: if it has none for the
# installed one, both are installed again.
install_headers() {
    release=$(newest_kernel)
    if installed "linux-headers-$release"; then return 0; fi
    update_once
    headers="linux-headers-$release"
    if ! apt-cache show "$headers" >/dev/null 2>&1; then headers="linux-image-amd64 linux-headers-amd64"; fi
    say "needs $headers: builds the guest's kernel module"
    # shellcheck disable=SC2086 # one word per package is meant
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install $headers
}

install_virtme() {
    if [ -x "$venv/bin/vng" ] && "$venv/bin/vng" --version 2>/dev/null | grep -qF "$virtme_version"; then
        say "virtme-ng $virtme_version: there"
        return 0
    fi
    say "virtme-ng $virtme_version (boots the emulated host over this machine's own files) into $venv"
    rm -rf "$venv"
    mkdir -p "$(dirname "$venv")"
    /usr/bin/python3 -m venv "$venv" || die "cannot create a Python environment in $venv: is python3-venv installed?"
    "$venv/bin/pip" install --quiet "virtme-ng==$virtme_version" \
        || die "pip could not install virtme-ng $virtme_version into $venv: is a package index reachable?"
}

# Debian's security suite has a newer kernel in addition to the stock one, which is built with DAMON.
unpack_damon_kernel() {
    target="$root/target/testbed/kernel-damon"
    if ls "$target"/boot/vmlinuz-* >/dev/null 2>&1; then
        say "kernel with DAMON: there"
        return 0
    fi
    as_root apt-get -q -q update
    package=$(apt-cache search --names-only '^linux-image-6\.12\.[0-9]+\+deb12-amd64$' | cut -d' ' -f1 | sort -V | tail -n 1)
    [ -n "$package" ] || die "no package linux-image-6.12.*+deb12-amd64: is bookworm-security among the apt sources?"
    say "$package into $target (about 110 MB to download)"
    work=$(mktemp -d)
    (cd "$work" && apt-get -q -q download "$package") || die "cannot download $package"
    mkdir -p "$target"
    dpkg-deb -x "$work"/*.deb "$target"
    rm -rf "$work"
    # virtme-ng looks for modules next to boot, and modprobe for their index.
    for modules in "$target"/lib/modules/*; do
        /sbin/depmod -b "$target" "${modules##*/}"
    done
}

command -v dpkg-query >/dev/null 2>&1 || die "this is not Debian or a relative (no dpkg): see the package list in $0"
missing=$(printf '%s' "$packages" | if have_kernel; then grep -v '^linux-image-amd64|'; else cat; fi | lacking)
install_packages
have_kernel || die "no stock 6.1 kernel with its modules in /boot and /lib/modules: install linux-image-amd64 of Debian 12"
install_headers
install_virtme
if [ "$wanted" = --damon ]; then unpack_damon_kernel; fi
say "ready: run 'make testbed', or 'cargo run -p homenode-testbed -- --list'"
