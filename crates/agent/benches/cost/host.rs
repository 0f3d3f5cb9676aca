//! A fake host in a directory: the files in which Linux shows QEMU processes without libvirt, in realistic amounts.
//!
//! The process ids are above any that a kernel assigns, so no action on them can reach a real process.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use homenode_machine::Machine;

/// Above the largest `kernel.pid_max`.
const FIRST_PID: i32 = 5_000_000;
/// Distance between the process ids of two VMs.
const PID_STEP: i32 = 32;
const VCPUS: usize = 4;
/// Threads of a QEMU that run no vCPU; the first is the process's main thread.
const OTHERS: [&str; 6] = [
    "kvm",
    "call_rcu",
    "IO iothread1",
    "vhost-5000000",
    "vnc_worker",
    "kvm-nx-lpage-re",
];
/// Mappings of a QEMU in addition to the VM's memory: its libraries and heaps.
const MAPPINGS: u64 = 380;
/// Other processes: daemons, and kernel threads.
const PROCESSES: i32 = 400;
/// Number of irrelevant mounts.
const MOUNTS: usize = 30;
/// Share of the CPUs that all VMs use together.
const BUSY: f64 = 0.6;
const RAM_AT: u64 = 0x7e00_0000_0000;
const PAGE_BYTES: u64 = 4096;

/// The directory of the fake host, and the state from which its figures are derived.
pub(crate) struct FakeHost {
    root: PathBuf,
    machine: Machine,
    vms: usize,
    /// Number of past periods.
    periods: u64,
}

/// Returns a pseudorandom number that is the same in every run.
fn mixed(of: u64) -> u64 {
    let mut x = of.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl FakeHost {
    /// Writes a host with `vms` VMs of four vCPUs below `root`.
    pub(crate) fn write(root: &Path, machine: &Machine, vms: usize) -> FakeHost {
        let host = FakeHost {
            root: root.to_owned(),
            machine: machine.clone(),
            vms,
            periods: 0,
        };
        let mut mounts: String = (0..MOUNTS)
            .map(|n| format!("{} 1 0:{n} / /mnt/volume-{n} rw,nosuid,relatime shared:{n} - ext4 /dev/mapper/vg-volume--{n} rw,errors=remount-ro\n", n + 30))
            .collect();
        mounts += "24 23 0:21 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        host.put("proc/self/mountinfo", &mounts);
        for n in 0..PROCESSES {
            let pid = FIRST_PID - 1 - n;
            // Kernel threads have no command line.
            let words = if n % 4 == 0 {
                "/usr/sbin/daemon\0--config\0/etc/daemon.conf\0"
            } else {
                ""
            };
            host.put(&format!("proc/{pid}/cmdline"), words);
            host.put(&format!("proc/{pid}/stat"), &stat(pid, "daemon", 7, 0));
        }
        for vm in 0..vms {
            host.begin(vm);
        }
        host.figures();
        host
    }

    /// Advances the figures by one period.
    pub(crate) fn go_on(&mut self) {
        self.periods += 1;
        self.figures();
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.root.join(path);
        if let Some(dir) = path.parent().filter(|dir| !dir.exists()) {
            fs::create_dir_all(dir).expect("a directory");
        }
        fs::write(path, text).expect("a file");
    }

    /// Writes the files of a VM that do not change.
    fn begin(&self, vm: usize) {
        let pid = pid_of(vm);
        let mib = self.ram_bytes() >> 20;
        let uuid = format!("{:08x}-4000-4000-8000-{:012x}", mixed(vm as u64) as u32, vm);
        let words = [
            "/usr/bin/kvm",
            "-id",
            &vm.to_string(),
            "-name",
            &format!("vm{vm},debug-threads=on"),
            "-no-shutdown",
            "-pidfile",
            &format!("/run/qemu-server/{vm}.pid"),
            "-daemonize",
            "-smbios",
            &format!("type=1,uuid={uuid}"),
            "-uuid",
            &uuid,
            "-smp",
            &format!("{VCPUS},sockets=1,cores={VCPUS},maxcpus={VCPUS}"),
            "-nodefaults",
            "-cpu",
            "host",
            "-m",
            &mib.to_string(),
            "-object",
            "iothread,id=iothread1",
            "-device",
            "virtio-scsi-pci,id=scsihw0,bus=pci.0,addr=0x5,iothread=iothread1",
            "-device",
            "virtio-net-pci,mac=BC:24:11:00:00:01,netdev=net0,bus=pci.0,addr=0x12,id=net0",
            "-machine",
            "type=pc+pve0",
        ];
        self.put(&format!("proc/{pid}/cmdline"), &(words.join("\0") + "\0"));
        self.put(
            &format!("proc/{pid}/stat"),
            &stat(pid, "kvm", 4711 + vm as u64, 0),
        );
        let all = self.machine.cpu_set().to_string();
        let nodes = self.machine.node_set().to_string();
        self.put(
            &format!("proc/{pid}/status"),
            &status(pid, pid, "kvm", &all, &nodes),
        );
        for (at, tid) in tids(vm).enumerate() {
            let dir = format!("proc/{pid}/task/{tid}");
            let vcpu = at.checked_sub(OTHERS.len());
            let comm = vcpu.map_or_else(|| OTHERS[at].to_owned(), |vcpu| format!("CPU {vcpu}/KVM"));
            self.put(&format!("{dir}/comm"), &format!("{comm}\n"));
            self.put(&format!("{dir}/cgroup"), &format!("0::/qemu.slice/{vm}.scope\n"));
            self.put(&format!("{dir}/status"), &status(pid, tid, &comm, &all, &nodes));
            self.put(&format!("{dir}/stat"), &stat(tid, &comm, 4711 + vm as u64, 0));
            self.put(&format!("{dir}/schedstat"), "123456789012 1234567890 123456\n");
        }
        let group = format!("sys/fs/cgroup/qemu.slice/{vm}.scope");
        self.put(&format!("{group}/cpu.max"), "max 100000\n");
        self.put(&format!("{group}/cpuset.cpus.effective"), &format!("{all}\n"));
        self.put(&format!("{group}/cgroup.procs"), &format!("{pid}\n"));
        let ram = self.ram_bytes();
        let mut maps = format!("{RAM_AT:x}-{:x} rw-p 00000000 00:00 0 \n", RAM_AT + ram);
        for at in 0..MAPPINGS {
            let start = library_at(at);
            let _ = writeln!(
                maps,
                "{start:x}-{:x} r--p 0000{at:04x} fe:01 {} /usr/lib/x86_64-linux-gnu/libexample-{}.so.1.{at}",
                start + 4 * PAGE_BYTES,
                1000 + at,
                at / 4
            );
        }
        self.put(&format!("proc/{pid}/maps"), &maps);
    }

    /// Returns the memory of a VM. All VMs together have at most four fifths of the host's memory, and no VM has more than 4 GiB.
    fn ram_bytes(&self) -> u64 {
        let all: u64 = self.machine.nodes.values().map(|node| node.memory_bytes.0).sum();
        let mib = (all / 5 * 4 / self.vms as u64).min(4 << 30) >> 20;
        mib.max(2) << 20
    }

    /// Writes the files that change every period, which are most of what the agent reads.
    fn figures(&self) {
        let cpus = self.machine.cpus.len() as u64;
        let mut text = String::from("cpu  1 2 3 4 5 6 7 8 9 0\n");
        for cpu in 0..cpus {
            let busy = self.periods * 60 + 1_000_000;
            let _ = writeln!(text, "cpu{cpu} {busy} 12 345678 9876543 4321 0 2345 0 {busy} 0");
        }
        text += "intr 1234567890";
        text += &" 0".repeat(1000);
        text += "\nctxt 987654321\nbtime 1700000000\nprocesses 123456\nprocs_running 9\nprocs_blocked 0\n";
        self.put("proc/stat", &text);
        for (node, of) in self.machine.nodes.iter() {
            let kib = of.memory_bytes.0 >> 10;
            let free = kib / 8 + mixed(self.periods) % 4096;
            self.put(
                &format!("sys/devices/system/node/node{node}/meminfo"),
                &meminfo(node.0, kib, free),
            );
        }
        for vm in 0..self.vms {
            self.figures_of(vm);
        }
    }

    fn figures_of(&self, vm: usize) {
        let pid = pid_of(vm);
        let share = self.load(vm);
        for (at, tid) in tids(vm).enumerate().skip(OTHERS.len()) {
            let seed = (vm * 64 + at) as u64;
            let ran = 123_456_789_012
                + (self.periods as f64 * share * 1e9) as u64
                + mixed(seed + self.periods) % 100_000;
            let waited = 1_234_567_890 + self.periods * 1_000_000 + mixed(seed) % 1000;
            // Changes now and then, as when the kernel balances load.
            let cpu = mixed(seed + self.periods / 7) % self.machine.cpus.len() as u64;
            let dir = format!("proc/{pid}/task/{tid}");
            self.put(
                &format!("{dir}/schedstat"),
                &format!("{ran} {waited} {}\n", 123_456 + self.periods * 50),
            );
            let comm = format!("CPU {}/KVM", at - OTHERS.len());
            self.put(&format!("{dir}/stat"), &stat(tid, &comm, 4711 + vm as u64, cpu));
        }
        let usec = 1_234_567_890 + self.periods * 1_000_000;
        self.put(
            &format!("sys/fs/cgroup/qemu.slice/{vm}.scope/cpu.stat"),
            &format!(
                "usage_usec {usec}\nuser_usec {usec}\nsystem_usec {}\nnice_usec 0\ncore_sched.force_idle_usec 0\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\nnr_bursts 0\nburst_usec 0\n",
                usec / 9
            ),
        );
        self.put(&format!("proc/{pid}/numa_maps"), &self.numa_maps(vm));
    }

    /// Returns the share of a CPU that each vCPU of a VM uses.
    fn load(&self, vm: usize) -> f64 {
        const LOADS: [f64; 4] = [0.01, 0.1, 0.5, 0.95];
        let all = LOADS.iter().sum::<f64>() / LOADS.len() as f64 * (self.vms * VCPUS) as f64;
        let most = BUSY * self.machine.cpus.len() as f64;
        LOADS[vm % LOADS.len()] * (most / all).min(1.0)
    }

    fn numa_maps(&self, vm: usize) -> String {
        let pages = self.ram_bytes() / PAGE_BYTES;
        let nodes = self.machine.nodes.keys().count() as u64;
        let mut text = format!("{RAM_AT:x} default anon={pages} dirty={pages} active=0");
        // Most of the memory is on one node; a little moves around.
        let home = vm as u64 % nodes;
        let strayed = pages / 16 + mixed(vm as u64 + self.periods) % 64;
        for node in 0..nodes {
            let there = if node == home {
                pages - strayed * (nodes - 1)
            } else {
                strayed
            };
            let _ = write!(text, " N{node}={there}");
        }
        text += " kernelpagesize_kB=4\n";
        for at in 0..MAPPINGS {
            let start = library_at(at);
            let library = at / 4;
            let _ = match at % 3 {
                0 => writeln!(text, "{start:x} default"),
                1 => writeln!(
                    text,
                    "{start:x} default anon=4 dirty=4 active=0 N{home}=4 kernelpagesize_kB=4"
                ),
                _ => writeln!(
                    text,
                    "{start:x} default file=/usr/lib/x86_64-linux-gnu/libexample-{library}.so.1.{at} mapped=4 mapmax=32 active=0 N0=4 kernelpagesize_kB=4"
                ),
            };
        }
        text
    }
}

fn library_at(at: u64) -> u64 {
    0x7f00_0000_0000 + at * 16 * PAGE_BYTES
}

fn pid_of(vm: usize) -> i32 {
    FIRST_PID + i32::try_from(vm).expect("some thousand VMs") * PID_STEP
}

fn tids(vm: usize) -> impl Iterator<Item = i32> {
    (pid_of(vm)..).take(OTHERS.len() + VCPUS)
}

fn stat(tid: i32, comm: &str, start: u64, cpu: u64) -> String {
    format!(
        "{tid} ({comm}) S 1 5000000 5000000 0 -1 138428736 123456 0 12 0 712345 30123 0 0 20 0 10 0 {start} 5368709120 1048576 \
         18446744073709551615 93982673944576 93982673964457 140732837751760 0 0 0 268444224 4096 1073742344 0 0 0 -1 {cpu} 0 0 0 0 0 \
         93982673980464 93982673982080 93982723084288 140732837755392 140732837755412 140732837755412 140732837756907 0\n"
    )
}

fn status(pid: i32, tid: i32, comm: &str, cpus: &str, nodes: &str) -> String {
    let zeros = ["00000000"; 32].join(",");
    format!(
        "Name:\t{comm}\nUmask:\t0027\nState:\tS (sleeping)\nTgid:\t{pid}\nNgid:\t0\nPid:\t{tid}\nPPid:\t1\nTracerPid:\t0\n\
         Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nFDSize:\t128\nGroups:\t \nNStgid:\t{pid}\nNSpid:\t{tid}\nNSpgid:\t{pid}\nNSsid:\t{pid}\n\
         Kthread:\t0\nVmPeak:\t 5368709 kB\nVmSize:\t 5242880 kB\nVmLck:\t       0 kB\nVmPin:\t       0 kB\nVmHWM:\t 4194304 kB\n\
         VmRSS:\t 4194304 kB\nRssAnon:\t 4177920 kB\nRssFile:\t   16384 kB\nRssShmem:\t       0 kB\nVmData:\t 4718592 kB\nVmStk:\t     132 kB\n\
         VmExe:\t    6144 kB\nVmLib:\t   65536 kB\nVmPTE:\t    8704 kB\nVmSwap:\t       0 kB\nHugetlbPages:\t       0 kB\nCoreDumping:\t0\n\
         THP_enabled:\t1\nuntag_mask:\t0xffffffffffffffff\nThreads:\t10\nSigQ:\t0/96365\nSigPnd:\t0000000000000000\n\
         ShdPnd:\t0000000000000000\nSigBlk:\t0000000010002240\nSigIgn:\t0000000000001000\nSigCgt:\t0000000180004243\n\
         CapInh:\t0000000000000000\nCapPrm:\t000001ffffffffff\nCapEff:\t000001ffffffffff\nCapBnd:\t000001ffffffffff\n\
         CapAmb:\t0000000000000000\nNoNewPrivs:\t0\nSeccomp:\t0\nSeccomp_filters:\t0\nSpeculation_Store_Bypass:\tthread vulnerable\n\
         SpeculationIndirectBranch:\tconditional enabled\nCpus_allowed:\tffffffff\nCpus_allowed_list:\t{cpus}\n\
         Mems_allowed:\t{zeros}\nMems_allowed_list:\t{nodes}\nvoluntary_ctxt_switches:\t123456\nnonvoluntary_ctxt_switches:\t1234\n"
    )
}

fn meminfo(node: u16, kib: u64, free: u64) -> String {
    const REST: [&str; 25] = [
        "Unevictable:",
        "Mlocked:",
        "Dirty:",
        "Writeback:",
        "FilePages:",
        "Mapped:",
        "AnonPages:",
        "Shmem:",
        "KernelStack:",
        "PageTables:",
        "SecPageTables:",
        "NFS_Unstable:",
        "Bounce:",
        "WritebackTmp:",
        "KReclaimable:",
        "Slab:",
        "SReclaimable:",
        "SUnreclaim:",
        "AnonHugePages:",
        "ShmemHugePages:",
        "ShmemPmdMapped:",
        "FileHugePages:",
        "FilePmdMapped:",
        "Unaccepted:",
        "Zswap:",
    ];
    let first = [
        ("MemTotal:", kib),
        ("MemFree:", free),
        ("MemUsed:", kib - free),
        ("SwapCached:", 0),
        ("Active:", kib / 2),
        ("Inactive:", kib / 8),
        ("Active(anon):", kib / 2),
        ("Inactive(anon):", kib / 16),
        ("Active(file):", kib / 64),
        ("Inactive(file):", kib / 32),
    ];
    let lines = first.into_iter().chain(REST.map(|key| (key, 1234)));
    lines
        .map(|(key, kib)| format!("Node {node} {key:<16} {kib:>8} kB\n"))
        .collect()
}
