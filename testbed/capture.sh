#!/bin/bash
# Saves the files in which Linux describes a host's topology, for emulated hosts that are hard to find as hardware.
#
#   testbed/capture.sh [NAME...]       boots each host (plain QEMU, about 40 s each), writes its tree for the tests of crates/machine-files
#   testbed/capture.sh --save ROOT     prints the tree of the machine it runs on (used inside; also fine on a real host)
#
# A .tree file holds lines `=== path` (relative to /), each followed by that file's contents. A file that exists
# but cannot be read is left out: no reader would get it.
set -u

here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/.." && pwd)
trees=$top/crates/machine-files/tests/trees

# One file, without starting a process: under emulation each process costs tens of milliseconds.
save_file() {
    local lines
    [ -f "$1" ] && [ -r "$1" ] || return 0
    { mapfile lines <"$1"; } 2>/dev/null || return 0
    [ ${#lines[@]} -gt 0 ] || return 0
    printf '=== %s\n' "${1#/}"
    printf '%s' "${lines[@]}"
    [[ ${lines[-1]} == *$'\n' ]] || printf '\n'
}

save_tree() {
    local file
    shopt -s nullglob
    local node=/sys/devices/system/node cpu=/sys/devices/system/cpu
    for file in $node/{online,possible,has_cpu,has_memory,has_normal_memory} \
        $node/node*/{cpulist,cpumap,distance,meminfo} $node/node*/hugepages/*/{nr,free}_hugepages \
        $node/node*/access*/initiators/{read,write}_{bandwidth,latency} \
        $node/node*/memory_side_cache/index*/* \
        $cpu/{online,possible,present,offline,kernel_max} $cpu/cpu[0-9]*/online $cpu/cpu[0-9]*/topology/* \
        $cpu/cpu[0-9]*/cache/index*/{level,type,size,shared_cpu_list,ways_of_associativity,coherency_line_size,number_of_sets,id} \
        /sys/bus/pci/devices/*/{numa_node,class,vendor,device,local_cpulist} \
        /proc/meminfo; do
        save_file "$file"
    done
    # Links, not files: the initiators of a memory node are known only by name.
    for file in $node/node*/access*/initiators/node*; do
        printf '=== %s\n\n' "${file#/}"
    done
    # A subshell would be another process with the same restrictions; `self` here is this shell.
    save_file /proc/self/status
    printf '=== proc/cpuinfo\n'
    while IFS= read -r line; do
        case "$line" in processor* | vendor_id* | 'model name'* | 'cpu MHz'* | 'physical id'* | 'core id'* | '') printf '%s\n' "$line" ;; esac
    done </proc/cpuinfo
}

# Inside the emulated host: what to do before saving, by name.
inside() {
    local name=$1 out=$2
    case "$name" in
        offline-cpus)
            echo 0 >/sys/devices/system/cpu/cpu3/online
            echo 0 >/sys/devices/system/cpu/cpu6/online
            ;;
        testbed)
            # The cpuset of a process is its own property: a second tree of the same host, read by a process in one.
            local group=/sys/fs/cgroup/restricted
            mountpoint -q /sys/fs/cgroup || mount -t cgroup2 none /sys/fs/cgroup
            echo +cpuset >/sys/fs/cgroup/cgroup.subtree_control
            mkdir $group && echo 2-3 >$group/cpuset.cpus && echo 2-3 >$group/cpuset.mems
            (
                echo "$BASHPID" >$group/cgroup.procs
                # `self` must be the process in the cpuset: `exec` keeps this one.
                exec bash "$here/capture.sh" --save >"$out/cpuset-restricted.tree.new"
            )
            ;;
    esac
    bash "$here/capture.sh" --save >"$out/$name.tree.new"
    for file in "$out"/*.tree.new; do mv "$file" "${file%.new}"; done
    sync
}

mem() { printf -- '-object memory-backend-ram,id=m%s,size=%s ' "$1" "$2"; }

# QEMU's options for a host: CPUs, memory, nodes, distances.
options() {
    case "$1" in
        memoryless-node) # node 1 has CPUs and no memory
            total=1024M cpus=4
            echo "-cpu EPYC $(mem 0 1024M) -numa node,nodeid=0,cpus=0-1,memdev=m0 -numa node,nodeid=1,cpus=2-3 -numa dist,src=0,dst=1,val=20" ;;
        cpuless-node) # node 2 has memory and no CPUs, as with memory on a CXL card; with HMAT figures
            total=1536M cpus=4
            local lb="" from to lat bw
            for from in 0 1; do for to in 0 1 2; do
                lat=140 bw=60; [ $from = $to ] && lat=80 bw=120; [ $to = 2 ] && lat=260 bw=24
                lb+=" -numa hmat-lb,initiator=$from,target=$to,hierarchy=memory,data-type=access-latency,latency=$lat"
                lb+=" -numa hmat-lb,initiator=$from,target=$to,hierarchy=memory,data-type=access-bandwidth,bandwidth=${bw}G"
            done; done
            echo "-machine hmat=on -smp 4,sockets=2,cores=2,threads=1 -cpu Skylake-Server $(mem 0 512M) $(mem 1 512M) $(mem 2 512M) \
-numa node,nodeid=0,cpus=0-1,memdev=m0,initiator=0 -numa node,nodeid=1,cpus=2-3,memdev=m1,initiator=1 -numa node,nodeid=2,memdev=m2,initiator=1 \
-numa dist,src=0,dst=1,val=21 -numa dist,src=0,dst=2,val=24 -numa dist,src=1,dst=2,val=14 $lb" ;;
        uneven-nodes) # 1, 4 and 2 CPUs; 512, 768 and 256 MiB
            total=1536M cpus=7
            echo "-smp 7,sockets=7,cores=1,threads=1 -cpu Skylake-Server $(mem 0 512M) $(mem 1 768M) $(mem 2 256M) \
-numa node,nodeid=0,cpus=0,memdev=m0 -numa node,nodeid=1,cpus=1-4,memdev=m1 -numa node,nodeid=2,cpus=5-6,memdev=m2 \
-numa dist,src=0,dst=1,val=16 -numa dist,src=0,dst=2,val=22 -numa dist,src=1,dst=2,val=16" ;;
        hyperthreads) # 4 sockets of 2 cores of 2 threads, one node each
            total=1024M cpus=16
            echo "-smp 16,sockets=4,cores=2,threads=2 -cpu Skylake-Server $(mem 0 256M) $(mem 1 256M) $(mem 2 256M) $(mem 3 256M) \
-numa node,nodeid=0,cpus=0-3,memdev=m0 -numa node,nodeid=1,cpus=4-7,memdev=m1 -numa node,nodeid=2,cpus=8-11,memdev=m2 -numa node,nodeid=3,cpus=12-15,memdev=m3" ;;
        offline-cpus) # two sockets of 2 cores of 2 threads; CPUs 3 and 6 set offline after the boot
            total=1024M cpus=8
            echo "-smp 8,sockets=2,cores=2,threads=2 -cpu Skylake-Server $(mem 0 512M) $(mem 1 512M) \
-numa node,nodeid=0,cpus=0-3,memdev=m0 -numa node,nodeid=1,cpus=4-7,memdev=m1 -numa dist,src=0,dst=1,val=21" ;;
        sub-numa-clusters) # two sockets, each of two nodes that share the socket's last-level cache
            total=1024M cpus=8
            local dist="-numa dist,src=0,dst=1,val=12 -numa dist,src=2,dst=3,val=12" from to
            for from in 0 1; do for to in 2 3; do dist+=" -numa dist,src=$from,dst=$to,val=20"; done; done
            echo "-smp 8,sockets=2,cores=4,threads=1 -cpu Skylake-Server $(mem 0 256M) $(mem 1 256M) $(mem 2 256M) $(mem 3 256M) \
-numa node,nodeid=0,cpus=0-1,memdev=m0 -numa node,nodeid=1,cpus=2-3,memdev=m1 -numa node,nodeid=2,cpus=4-5,memdev=m2 -numa node,nodeid=3,cpus=6-7,memdev=m3 $dist" ;;
        testbed) # the testbed's own host, with a network card on node 2
            total=4096M cpus=4
            local dist="" from to
            for from in 0 1 2; do for to in 1 2 3; do
                [ $from -lt $to ] && { val=16; [ $((to - from)) = 2 ] && val=22; dist+=" -numa dist,src=$from,dst=$to,val=$val"; }
            done; done
            echo "-cpu EPYC,+svm,+npt $(mem 0 1024M) $(mem 1 1024M) $(mem 2 1024M) $(mem 3 1024M) \
-numa node,nodeid=0,cpus=0,memdev=m0 -numa node,nodeid=1,cpus=1,memdev=m1 -numa node,nodeid=2,cpus=2,memdev=m2 -numa node,nodeid=3,cpus=3,memdev=m3 $dist \
-device pxb-pcie,id=pxb2,bus_nr=0x40,bus=pcie.0,numa_node=2 -device pcie-root-port,id=rp2,bus=pxb2,chassis=9,slot=9 -device virtio-net-pci,bus=rp2" ;;
        *) return 1 ;;
    esac
}

boot() {
    local name=$1 total cpus opts kernel
    options "$name" >/dev/null || { echo "capture: no host named '$name'" >&2; return 2; }
    opts=$(options "$name")
    options "$name" >/dev/null
    kernel=$(ls /boot/vmlinuz-6.1.*-amd64 | tail -1)
    local work
    work=$(mktemp -d)
    echo "capture: booting $name"
    timeout 300 vng --verbose -r "$kernel" --disable-kvm --disable-microvm --force-9p --cpus "$cpus" -m "$total" \
        --rwdir="$work=$work" --qemu-opts="$opts" -- "bash $here/capture.sh --inside $name $work" \
        </dev/null >"$work/console" 2>&1
    if ! ls "$work"/*.tree >/dev/null 2>&1; then
        echo "capture: $name did not boot; its console is in $work/console" >&2
        return 1
    fi
    mkdir -p "$trees"
    cp "$work"/*.tree "$trees/"
    rm -rf "$work"
}

case "${1:-}" in
    --save) save_tree ;;
    --inside) inside "$2" "$3" ;;
    *)
        PATH=$top/target/testbed/venv/bin:$PATH
        [ $# -gt 0 ] || set -- memoryless-node cpuless-node uneven-nodes hyperthreads offline-cpus sub-numa-clusters testbed
        status=0
        for name in "$@"; do boot "$name" || status=1; done
        exit $status
        ;;
esac
