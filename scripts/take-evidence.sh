#!/bin/sh
# Takes a report of `homenode evidence` over into data/evidence, and says in docs/EVIDENCE.md and the README what it measured.
#
#   scripts/take-evidence.sh to-share.tar.gz NAME 'what the machine is, in words'
set -eu
if [ $# -ne 3 ]; then
    echo "usage: $0 to-share.tar.gz NAME 'what the machine is, in words'" >&2
    exit 2
fi
archive=$(realpath "$1")
cd "$(dirname "$0")/.."
case $2 in
'' | *[!a-z0-9-]*)
    echo "$0: the name '$2' must have small letters, digits and hyphens only" >&2
    exit 2
    ;;
esac
case $3 in
*[\"\\\|]*)
    echo "$0: the words must have no quote, backslash or bar" >&2
    exit 2
    ;;
esac
index=data/evidence/index.toml
mkdir -p "data/evidence/$2"
# Only these two files, by name, and their content alone.
for file in evidence.json evidence.html; do
    tar -xzOf "$archive" "homenode-evidence/$file" >"data/evidence/$2/$file"
done
sed -i '/^report = \[\]$/d' "$index"
if ! grep -qx "folder = \"$2\"" "$index"; then
    printf '\n[[report]]\nfolder = "%s"\nwhat = "%s"\n' "$2" "$3" >>"$index"
fi
export HOMENODE_WRITE_EVIDENCE=1
cargo test -q -p homenode-evidence --test collected
cargo xtask rules
