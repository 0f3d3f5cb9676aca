# Functions shared by the scripts: messages, and installing Debian packages. To be sourced; 'root' is the folder of the sources.
# Sourcing installs nothing.
me=$(basename -- "$0" .sh)

# To standard error: standard output is for a script's result.
say() { printf '%s: %s\n' "$me" "$*" >&2; }
die() { say "$*"; exit 1; }

installed() {
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null || true)" = installed ]
}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null 2>&1; then
        sudo "$@"
    else
        die "cannot run '$1' as root: become root, or install and set up sudo, and run this script again"
    fi
}

updated=no
update_once() {
    [ "$updated" = no ] || return 0
    command -v apt-get >/dev/null 2>&1 || die "no apt-get here"
    say "apt-get update"
    as_root apt-get -q -q update >&2 || die "apt-get update failed, see above"
    updated=yes
}

# Never removes a package to make room for another.
apt_install() {
    command -v apt-get >/dev/null 2>&1 || die "no apt-get here: install these by hand: $*"
    update_once
    say "apt-get install $*"
    as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get -q -y --no-remove --no-install-recommends install "$@" >&2
}

# Fetches packages into a directory, without installing them.
apt_fetch() {
    into=$1
    shift
    command -v apt-get >/dev/null 2>&1 || die "no apt-get here: fetch these by hand into $into: $*"
    (cd "$into" && apt-get -q -q download "$@" >&2) || die "apt-get could not fetch $*: run 'apt-get update' as root first"
}

# Those packages on standard input that are not installed; each is on a line with its reason, as in 'make|runs the Makefile'.
lacking() {
    while IFS='|' read -r package reason; do
        if [ -z "$package" ] || installed "$package"; then continue; fi
        say "needs $package: $reason"
        printf ' %s' "$package"
    done
}

# Installs those.
need() {
    lacks=$(lacking)
    [ -n "$lacks" ] || return 0
    # shellcheck disable=SC2086 # one word per package is meant
    apt_install $lacks || die "apt-get could not install$lacks (see above)"
}

# mmdebstrap's arguments for a fresh Debian: apt's sources of this machine, as the files that name them. For a suite other than
# the machine's own they are rewritten into the directory $2.
apt_sources() {
    suite=$1 into=$2
    own=$(. /etc/os-release && printf '%s' "$VERSION_CODENAME")
    mkdir -p "$into"
    for file in /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list /etc/apt/sources.list; do
        if [ ! -s "$file" ]; then continue; fi
        sed "s/\\b$own\\b/$suite/g" "$file" > "$into/${file##*/}"
        printf '%s\n' "$into/${file##*/}"
    done
}

# apt's fetch settings of this machine apply to a fresh Debian as well.
apt_options() { apt-config dump | grep '^Acquire::Check' || true; }

# The same package with a version that is higher, put into a directory.
raise_version() {
    unpacked=$(mktemp -d)
    dpkg-deb -R "$1" "$unpacked"
    sed -i 's/^Version: .*/&+newer/; s/(= \([^)]*\))/(= \1+newer)/' "$unpacked/DEBIAN/control"
    dpkg-deb --root-owner-group -b "$unpacked" "$2/" >/dev/null
    rm -rf "$unpacked"
}
