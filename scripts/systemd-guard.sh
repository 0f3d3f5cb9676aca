#!/bin/bash
# Shows with a real systemd that the guard outlives what ends all of the agent's unit: boots one in namespaces of its own, runs the
# agent there by the unit of deploy/systemd on libvirt's test driver, and ends it in every way. Needs root and cgroups.
#
#   scripts/systemd-guard.sh PROGRAM
set -euo pipefail

program=$(realpath "${1:?which program: scripts/systemd-guard.sh target/debug/homenode}")
unit=$(realpath "$(dirname "$0")/../deploy/systemd/homenode.service")
name=homenode-systemd-$$

if [[ ${2:-} != inside ]]; then
    [[ $(id -u) == 0 ]] || { echo "systemd is booted by root alone: run this with sudo" >&2; exit 1; }
    [[ -x /lib/systemd/systemd && -x /usr/bin/systemd-run ]] || { echo "there is no systemd (Debian: apt install systemd)" >&2; exit 1; }
    work=$(mktemp -d)
    # Its own cgroup becomes the root of what the new systemd sees.
    own=$(find /sys/fs/cgroup -maxdepth 1 -name systemd)/$name
    mkdir -p "$own"
    sh -c 'echo $$ > "$1/cgroup.procs"; shift; exec "$@"' sh "$own" \
        unshare --pid --mount --ipc --uts --cgroup --fork --kill-child --mount-proc \
        bash "$0" "$program" inside "$work" >"$work/log" 2>&1 &
    outer=$!
    clean() {
        kill -9 "$outer" 2>/dev/null || true
        wait "$outer" 2>/dev/null || true
        sleep 1
        for made in "$own" /sys/fs/cgroup/*/{init.scope,system.slice}; do
            [[ -d $made ]] && find "$made" -depth -type d -exec rmdir {} + 2>/dev/null || true
        done
        rm -rf "$work"
    }
    trap clean EXIT
    for _ in $(seq 100); do
        inner=$(pgrep -P "$outer" || true)
        [[ -n $inner ]] && nsenter -t "$inner" -a systemctl is-system-running >/dev/null 2>&1 && break
        sleep 0.2
    done
    there() { nsenter -t "$inner" -a "$@"; }
    there systemctl is-system-running >/dev/null || { echo "systemd did not boot:"; tail "$work/log"; exit 1; } >&2
else
    work=$3
    mount --make-rprivate /
    mount -t tmpfs tmpfs /run
    mount -t tmpfs tmpfs /var/lib
    mount -t tmpfs tmpfs /sys/fs/cgroup
    mkdir /sys/fs/cgroup/systemd
    mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
    mkdir -p /run/systemd/system /run/lock
    printf '[Unit]\nDefaultDependencies=no\n' >/run/systemd/system/alone.target
    # The unit as it is, but for the program's place and a host that is always there.
    sed "s#^ExecStart=.*#ExecStart=$program run --host libvirt:test:///default --period 200ms#; s#^ProtectHome=.*##" "$unit" \
        >/run/systemd/system/homenode.service
    export container=other
    exec /lib/systemd/systemd --unit=alone.target --log-target=console --show-status=no
fi

fail() { echo "$1" >&2; there systemctl status --no-pager homenode >&2 || true; tail -40 "$work/log" >&2; exit 1; }
guards() { there systemctl list-units --plain --no-legend --state=running 'homenode-guard-*.scope' | awk '{print $1}'; }
agent() { there systemctl show --property MainPID --value homenode; }
eventually() { for _ in $(seq 150); do "$@" && return; sleep 0.2; done; return 1; }
one_guard() { [[ $(guards | wc -l) == 1 ]]; }
no_guard() { [[ -z $(guards) ]]; }
is_said() { there systemctl status --no-pager homenode 2>/dev/null | grep -q "$1"; }

there systemctl start homenode || fail "the agent did not say that it is ready"
one_guard || fail "the guard has no scope of its own"
eventually is_said 'looks after' || fail "systemctl status does not say what the agent does"
echo "ready, and its guard is in $(guards)"

there systemctl reload homenode || fail "the reload did not end"
[[ $(there systemctl is-active homenode) == active ]] || fail "a reload ended the agent"
echo "reloaded"

for how in "systemctl kill --kill-whom=all --signal=KILL homenode" "kill -KILL \$MAIN"; do
    main=$(agent) guard=$(guards)
    # shellcheck disable=SC2086
    there ${how/\$MAIN/$main}
    there systemctl is-active --quiet "$guard" || fail "the guard ended with the agent: $how"
    another() { [[ $(agent) != "$main" && $(agent) != 0 && $(there systemctl is-active homenode) == active ]]; }
    eventually another || fail "no other agent was started after: $how"
    # The new agent has taken over, so the old guard goes, and the new one stays.
    gone() { ! there systemctl is-active --quiet "$guard"; }
    eventually gone || fail "the guard did not go though another agent took over: $how"
    one_guard || fail "the new agent's guard has no scope of its own"
    echo "its guard outlived: $how"
done

there systemctl stop homenode || fail "it could not be stopped"
eventually no_guard || fail "a guard is left though the agent ended in good order"
[[ $(there systemctl show --property Result --value homenode) == success ]] || fail "it did not end well"
echo "stopped, and nothing is left"
