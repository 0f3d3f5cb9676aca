#!/bin/sh
# Packs what was built for distributions without a package: to be unpacked into /usr/local, say.
set -eu

target=$1
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
version=$("$target/release/homenode" --version | sed 's/homenode \([^ ]*\).*/\1/')
name=homenode-$version-$(uname -m)
place=$target/tarball/$name

rm -rf "$place"
install -D -t "$place/bin" "$target/release/homenode"
install -D -m 644 -t "$place/lib/homenode" "$target/release/libhomenode_plugin.so"
"$target/release/homenode" man --to "$place/share/man/man1"
for shell in bash zsh fish; do
    mkdir -p "$place/share/homenode/completions"
    "$target/release/homenode" completions "$shell" > "$place/share/homenode/completions/homenode.$shell"
done
cp -r "$root/deploy" "$place/share/homenode/"
install -m 644 -t "$place" "$root/README.md" "$root/LICENSE" "$root/CHANGELOG.md"
tar -C "$target/tarball" --owner=0 --group=0 --sort=name -cJf "$target/$name.tar.xz" "$name"
rm -rf "$target/tarball"
echo "$target/$name.tar.xz"
