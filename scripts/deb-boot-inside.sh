#!/bin/bash
# The part of scripts/deb-boot.sh that runs in the emulated host: each check is a line, the last line counts them.
# Two guests run throughout. Whenever no agent is installed, they must be in the state they had before the first one.
set -u

passed=0
failed=0
log=/run/tried.log
say() { printf '%s\r\n' "$*"; }
details() { tail -n "$1" | sed 's/^/    /; s/$/\r/'; }
check() {
    local name=$1 begin=$SECONDS
    shift
    if "$@" > "$log" 2>&1; then
        passed=$((passed + 1)); say "ok $name ($((SECONDS - begin)) s)"
    else
        failed=$((failed + 1)); say "FAILED $name ($((SECONDS - begin)) s): $*"
        details 20 < "$log"
        journalctl -u homenode -u 'homenode-guard*' -n 25 --no-pager -o short-monotonic | details 25
    fi
}
# Waits for a command to succeed. Emulated time is slow: the limits are only for commands that never succeed.
within() {
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        [ "$SECONDS" -lt "$end" ] || { echo "not within the time: $*"; return 1; }
        sleep 1
    done
}
not() { ! "$@"; }
has() { grep -q -- "$@"; }

# --- Guests ------------------------------------------------------------------------------------------------------------

guests='one two'
kernel=$(ls /boot/vmlinuz-*)
xml() {
    cat <<XML
<domain type='kvm'><name>$1</name><memory unit='MiB'>160</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='pc'>hvm</type><kernel>$kernel</kernel><initrd>/tried/guest.cpio</initrd>
<cmdline>console=ttyS0 quiet panic=0 rdinit=/init</cmdline></os><features><acpi/></features>
<on_poweroff>destroy</on_poweroff><on_reboot>destroy</on_reboot><on_crash>destroy</on_crash>
<devices><emulator>/usr/bin/qemu-system-x86_64</emulator><controller type='usb' model='none'/>
<serial type='file'><source path='/var/log/libvirt/qemu/$1.console'/><target port='0'/></serial></devices></domain>
XML
}
pid_of() { cat "/run/libvirt/qemu/$1.pid"; }
pids() { for guest in $guests; do pid_of "$guest"; done; }
begin_guest() { xml "$1" > "/run/$1.xml" && virsh create "/run/$1.xml"; }
has_touched() { has touched "/var/log/libvirt/qemu/$1.console"; }
# All state that an agent may change, as reported by libvirt and the kernel.
state() {
    local guest thread
    for guest in $guests; do
        echo "$guest $(pid_of "$guest")"
        virsh "vcpupin $guest; emulatorpin $guest; schedinfo $guest; numatune $guest; dommemstat $guest" | grep -v '^\(rss\|last_update\) '
        echo "marks: $(virsh dumpxml "$guest" | grep -c xmlns/mark)"
        for thread in "/proc/$(pid_of "$guest")/task"/*; do
            case $(cat "$thread/comm") in 'CPU '* | qemu-system*)
                echo "$(cat "$thread/comm") $(grep Cpus_allowed_list "$thread/status") $(cat "/sys/fs/cgroup$(cut -d: -f3 < "$thread/cgroup")/cpu.max")"
                ;;
            esac
        done
    done
}
is_as_before() { state > /run/now && diff /run/before /run/now; }
is_held() { virsh dumpxml "$1" | has xmlns/mark && grep -h Cpus_allowed_list "/proc/$(pid_of "$1")/task"/*/status | has '	[0-3]$'; }
are_held() { for guest in $guests; do is_held "$guest" || return 1; done; }
# Pages of the first guest on each node.
pages() { grep -o 'N[0-3]=[0-9]*' "/proc/$(pid_of one)/numa_maps" | awk -F= '{of[$1] += $2} END {for (node in of) print node, of[node]}' | sort; }
# Its operator's chosen node has the least of its memory, so that there is something to bring home; and the node has room for it.
want_it_elsewhere() {
    local least
    least=$( (pages; printf 'N%s 0\n' 0 1 2 3) | awk '{of[$1] += $2} END {for (node in of) print of[node], node}' | sort -n | sed -n '1s/.*N//p')
    echo 1 > /proc/sys/vm/drop_caches
    virsh metadata one --live --uri https://homenode.dev/xmlns/vm/1 --key homenode --set "<vm home='$least'/>"
}
is_moving() {
    local before
    before=$(pages)
    sleep 3
    echo "$before, then $(pages)"
    [ "$before" != "$(pages)" ]
}

# --- The service -------------------------------------------------------------------------------------------------------

main() { systemctl show -P MainPID homenode; }
restarts() { systemctl show -P NRestarts homenode; }
is_active() { systemctl is-active --quiet homenode; }
is_another() { is_active && [ "$(main)" != "$1" ] && [ "$(main)" != 0 ]; }
scopes() { systemctl list-units --no-legend --plain --type=scope 'homenode-guard-*' | cut -d' ' -f1; }
guard() { for scope in $(scopes); do cat "/sys/fs/cgroup/system.slice/$scope/cgroup.procs"; done; }
has_guard() { [ -n "$(guard)" ]; }
has_no_guard() { [ -z "$(scopes)" ]; }
told() { journalctl -u homenode --no-pager -o cat | has "$1"; }
settings() { printf '%s\n' "$@" > /etc/homenode/homenode.toml; }
acting() {
    settings 'mode = "act"' 'policies = "tavo"' '[http]' 'group = "homenode"' '[repatriate]' 'vm_pages_per_cycle = 256' 'host_pages_per_cycle = 512'
}
# Whether systemd starts it again when it dies.
restart() {
    mkdir -p /run/systemd/system/homenode.service.d
    printf '[Service]\nRestart=%s\n' "$1" > /run/systemd/system/homenode.service.d/tried.conf
    systemctl daemon-reload
}
starts() { systemctl start homenode && within 60 is_active && within 120 are_held; }
is_given_back() { within 90 is_as_before && within 60 has_no_guard; }
stops() { systemctl stop homenode && is_given_back; }
install() { DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends --allow-downgrades "$@"; }
version() { dpkg-query -W -f='${Version}' homenode; }
# Agents that have written to the history.
runs() { homenode record show --json | grep -c '"version": '; }
goes_on() { [ "$(runs)" -gt "$1" ]; }

# --- Checks ------------------------------------------------------------------------------------------------------------

begin=$SECONDS
say "systemd $(systemctl --version | sed -n '1s/systemd \([0-9]*\).*/\1/p'), $(uname -r), up for $(cut -d. -f1 /proc/uptime) s"
check "KVM is there" within 60 test -e /dev/kvm
check "four nodes are there" test -d /sys/devices/system/node/node3
check "libvirt answers" within 120 virsh list
check "a guest starts" begin_guest one
check "another starts" begin_guest two
check "the first has booted" within 180 has_touched one
check "the second has booted" within 180 has_touched two
state > /run/before

check "apt-get install ./homenode_*.deb" install /tried/packages/homenode_*.deb
check "it does not run by itself" not is_active
check "homenode doctor" sh -c 'homenode doctor | tee /dev/stderr | grep -q "features are present"'
check "systemctl start: active once it says so" systemctl start homenode
check "it is of type notify and has told its status" sh -c '[ "$(systemctl show -P Type homenode)" = notify ] && systemctl show -P StatusText homenode | grep .'
check "homenode top --once shows both guests" within 30 sh -c 'homenode top --once | tee /dev/stderr | grep -q two'
check "as it comes it changes nothing" is_as_before
check "systemctl stop" stops

acting
check "told to act it gives both guests a home" starts
check "the guard has a scope of its own" has_guard
check "the journal has VM, decision and message id" within 30 sh -c \
    'journalctl -u homenode -o json HOMENODE_VM=one | grep HOMENODE_DECISION | grep MESSAGE_ID | grep -q HOMENODE_POLICY'
agent=$(main)
settings 'mode = "walk"'
systemctl reload homenode
check "wrong settings are refused and said" within 30 told 'walk'
check "the agent runs on with the old ones" test "$(main)" = "$agent"
check "so do its guests" are_held
acting
systemctl reload homenode
check "right settings are reloaded" within 30 told 'settings were reloaded'

kill -9 "$agent"
check "killed, it is started again by systemd" within 60 is_another "$agent"
check "and takes up both guests" within 120 are_held
check "systemctl stop restores all" stops

restart no
check "it starts" starts
kill -9 "$(main)"
check "killed for good, the guard restores all" is_given_back
check "it starts again" starts
systemctl kill --signal=KILL homenode
check "the guard survives systemctl kill" has_guard
check "and restores all" is_given_back
check "it starts once more" starts
guard=$(guard)
kill -STOP "$(main)"
check "stopped, it is ended by its guard" within 90 not is_active
check "which restores all" is_given_back
restart on-failure

check "it starts for the watchdog" starts
agent=$(main)
before=$(restarts)
kill -STOP "$agent"
kill -9 $(guard)
check "without a guard systemd's watchdog ends it and starts another" within 240 is_another "$agent"
check "the watchdog said so" sh -c 'journalctl -u homenode --no-pager | grep -i "watchdog timeout"'
check "the next agent takes up both guests" within 120 are_held
check "nothing is left when it stops" stops

# A VM without libvirt, as Proxmox starts them: the same unit has the required rights.
begin_plain() {
    systemd-run --scope --slice=qemu --unit=plain -p CPUWeight=100 qemu-system-x86_64 -name plain,debug-threads=on \
        -uuid 6695eb01-f6a4-8304-79aa-97f2502e193f -machine pc,accel=kvm -cpu host -m 160 -smp 1 -nodefaults -display none -no-reboot \
        -qmp unix:/run/plain.qmp,server=on,wait=off -device virtio-balloon-pci,id=balloon0 -kernel "$kernel" -initrd /tried/guest.cpio \
        -append "console=ttyS0 quiet panic=0 rdinit=/init" -serial file:/run/plain.console -daemonize -pidfile /run/plain.pid
}
plain_allowed() { grep -h Cpus_allowed_list "/proc/$(cat /run/plain.pid)/task"/*/status | sort -u; }
plain_is_held() { plain_allowed | has '	[0-3]$'; }
plain_is_free() { [ "$(plain_allowed | wc -l)" = 1 ] && plain_allowed | has '	0-3$'; }
mkdir -p /run/systemd/system/homenode.service.d
printf '[Service]\nExecStart=\nExecStart=/usr/bin/homenode run --host qemu\n' > /run/systemd/system/homenode.service.d/qemu.conf
systemctl daemon-reload
check "an agent of QEMUs without a manager starts without any" systemctl start homenode
check "a plain QEMU starts in a scope of its own" begin_plain
check "it is found and given a home" within 120 plain_is_held
check "libvirt's guests are left alone" is_as_before
check "what is asked of the agent for it is kept" sh -c 'homenode permit set plain 250k && grep 250k /etc/homenode/vms/plain.toml'
check "the agent may write its quota" nsenter -t "$(main)" -m sh -c 'echo max > /sys/fs/cgroup/qemu.slice/plain.scope/cpu.max'
check "and no other file of the host's" not nsenter -t "$(main)" -m touch /usr/tried /etc/tried /sys/kernel/tried
check "members of the group read without root" setpriv --reuid=65534 --regid=65534 --groups="$(getent group homenode | cut -d: -f3)" homenode top --once
check "and change nothing" not setpriv --reuid=65534 --regid=65534 --groups="$(getent group homenode | cut -d: -f3)" homenode permit set plain none
check "its home is released" sh -c 'systemctl stop homenode'
check "nothing of it is left" within 90 plain_is_free
kill "$(cat /run/plain.pid)"
rm -f /run/systemd/system/homenode.service.d/qemu.conf /etc/homenode/vms/plain.toml
systemctl daemon-reload

# numad is queried throughout.
check "apt-get install ./homenode-numad_*.deb" install /tried/packages/homenode-numad_*.deb
check "numad answers without an agent" sh -c 'numad -w 1:128 | grep "[0-3]"'
check "its operator wants the first elsewhere" want_it_elsewhere
check "it starts for the upgrade" starts
check "pages move" is_moving
guests_before=$(pids)
count=$(runs)
( while :; do numad -w 1:128 || echo "status $?"; sleep .2; done > /run/numad.answers 2> /run/numad.errors ) & asking=$!
check "upgrade while guests move" install /tried/newer/*.deb
check "the newer version is there" test "$(version | grep -c newer)" = 1
check "it runs" within 60 is_active
check "it takes up both guests" within 120 are_held
check "the newer agent goes on with the history" within 60 goes_on "$count"
count=$(runs)
check "and elsewhere again" want_it_elsewhere
check "pages move again" within 30 is_moving
check "downgrade while guests move" install /tried/packages/*.deb
check "the older version is there" test "$(version | grep -c newer)" = 0
check "it runs too" within 60 is_active
check "it goes on with the history too" within 60 goes_on "$count"
check "it takes up both guests too" within 120 are_held
kill "$asking"
virsh metadata one --live --uri https://homenode.dev/xmlns/vm/1 --key homenode --remove
check "numad answered all the while" sh -c '[ "$(wc -l < /run/numad.answers)" -gt 5 ] && ! grep -v "^[0-3]\(-[0-3]\)\?$" /run/numad.answers'
say "    $(wc -l < /run/numad.answers) answers of numad"
check "no guest was restarted" test "$(pids)" = "$guests_before"

check "remove restores all" sh -c 'DEBIAN_FRONTEND=noninteractive apt-get remove -q -y homenode homenode-numad'
check "nothing is left in force" is_given_back
check "numad is Debian's again" sh -c 'numad -V 2>&1 | grep -v homenode && [ ! -L /usr/bin/numad ]'
check "it can be installed again" install /tried/packages/homenode_*.deb
acting
restart no
check "and starts" starts
kill -STOP "$(main)"
kill -9 $(guard)
kill -9 "$(main)"
check "agent and guard are gone, and guests still held" are_held
check "remove restores what they left" sh -c 'DEBIAN_FRONTEND=noninteractive apt-get remove -q -y homenode'
check "nothing of theirs is left in force" is_given_back
check "purge" dpkg --purge homenode homenode-numad
check "nothing is left on disk" sh -c '! ls -d /var/lib/homenode /run/homenode /etc/homenode /usr/lib/homenode /usr/share/homenode /usr/bin/homenode \
    /lib/systemd/system/homenode.service /etc/libvirt/hooks/qemu.d/homenode 2>/dev/null'
check "the guests run as before" is_as_before

say "in $((SECONDS - begin)) s"
say "$passed passed, $failed failed"
