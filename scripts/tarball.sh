#!/bin/sh
# Packs the built programs for distributions without a package, to be unpacked into /usr/local: see INSTALL, which this writes into it.
set -eu

target=$1
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
version=$("$target/dist/homenode" --version | sed 's/homenode \([^ ]*\).*/\1/')
name=homenode-$version-$(uname -m)
place=$target/tarball/$name
prefix=/usr/local

rm -rf "$target/tarball"
install -D -t "$place/bin" "$target/dist/homenode"
ln -s homenode "$place/bin/numad"
install -D -m 644 -t "$place/lib/homenode" "$target/dist/libhomenode_plugin.so"
if [ -f "$target/dist/homenode-guest-load-static" ]; then
    install -D "$target/dist/homenode-guest-load-static" "$place/lib/homenode/guest-load"
fi
"$target/dist/homenode" man --to "$place/share/man/man1"
mkdir -p "$place/share/bash-completion/completions" "$place/share/zsh/site-functions" "$place/share/fish/vendor_completions.d"
"$target/dist/homenode" completions bash > "$place/share/bash-completion/completions/homenode"
"$target/dist/homenode" completions zsh > "$place/share/zsh/site-functions/_homenode"
"$target/dist/homenode" completions fish > "$place/share/fish/vendor_completions.d/homenode.fish"
mkdir -p "$place/lib/systemd/system" "$place/share/homenode/etc"
sed "s,/usr/bin/homenode,$prefix/bin/homenode," "$root/deploy/systemd/homenode.service" > "$place/lib/systemd/system/homenode.service"
install -m 644 "$root/debian/homenode.toml" "$root/debian/homenode.sysusers" "$place/share/homenode/etc/"
sed "s,/usr/bin/homenode,$prefix/bin/homenode," "$root/debian/libvirt-hook" > "$place/share/homenode/etc/libvirt-hook"
chmod 755 "$place/share/homenode/etc/libvirt-hook"
for folder in grafana incus kubernetes nova prometheus proxmox shims; do
    git -C "$root" ls-files -z "deploy/$folder" | (cd "$root" && xargs -0 cp --parents -t "$place/share/homenode")
done
install -m 644 -t "$place/share/homenode" "$root/README.md" "$root/LICENSE" "$root/CHANGELOG.md"

cat > "$place/share/homenode/INSTALL" <<END
Homenode $version for $(uname -m), built with glibc $(ldd --version | sed -n '1s/.* //p'). As root:

    tar -xJf $name.tar.xz --strip-components=1 -C $prefix
    groupadd --system homenode                        whose members may read what the agent knows
    mkdir -p /etc/homenode/vms
    cp -n $prefix/share/homenode/etc/homenode.toml /etc/homenode/
    systemctl daemon-reload
    systemctl start homenode                          as it comes it recommends, and changes nothing
    homenode doctor                                   what this host has, what it lacks, and how to get it

Where libvirt runs, its hook tells the agent of VMs that start:

    install -D $prefix/share/homenode/etc/libvirt-hook /etc/libvirt/hooks/qemu.d/homenode

bin/numad answers in numad's place for who has $prefix/bin before /usr/bin; remove it where the real one is wanted.

To remove it: systemctl stop homenode; homenode release; then the files that 'tar -tJf $name.tar.xz' lists, /etc/homenode,
/etc/libvirt/hooks/qemu.d/homenode, /var/lib/homenode and /run/homenode.
END
tar -C "$target/tarball" --owner=0 --group=0 --sort=name -cJf "$target/$name.tar.xz" "$name"
rm -rf "$target/tarball"
echo "$target/$name.tar.xz"
