//! One VM of the model: its process, its threads, its memory, its operator's intent, and the files that the kernel shows of it.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use homenode_kernel::fake::stat;
use homenode_units::{CpuId, CpuSet, NodeSet, Ns, PAGE_BYTES, VmId};

use crate::case::VmSpec;

/// First address of a VM's memory.
pub(crate) const RAM: u64 = 0x7f00_0000_0000;

/// A VM. It may be stopped; then it has no process.
pub(crate) struct Vm {
    pub(crate) spec: VmSpec,
    pub(crate) id: VmId,
    pub(crate) name: String,
    pub(crate) run: Option<Run>,
    /// The operator's settings of the next start.
    pub(crate) settings: String,
    /// Foreign metadata, which must survive.
    pub(crate) foreign: u32,
    pub(crate) last_pid: i32,
    /// Percent of a CPU that each vCPU uses.
    pub(crate) load: u64,
}

/// A run of a VM.
pub(crate) struct Run {
    pub(crate) runtime_id: i32,
    pub(crate) pid: i32,
    pub(crate) start: u64,
    pub(crate) threads: BTreeMap<i32, Thread>,
    pub(crate) vcpu_pins: BTreeMap<u16, CpuSet>,
    pub(crate) emulator_pin: Option<CpuSet>,
    pub(crate) iothread_pins: BTreeMap<u32, CpuSet>,
    /// CPUs of the VM's cgroup that are online.
    pub(crate) cpuset: CpuSet,
    pub(crate) cpuset_since: Ns,
    pub(crate) quota_us: Option<u64>,
    pub(crate) period_us: u64,
    pub(crate) nodes: Option<NodeSet>,
    pub(crate) target_kib: u64,
    pub(crate) current_kib: u64,
    pub(crate) stats_period: i32,
    pub(crate) stamp_s: u64,
    /// Percent of the truth that its guest says.
    pub(crate) lie: u64,
    pub(crate) balloon_follows: bool,
    pub(crate) settings: String,
    pub(crate) settings_since: Ns,
    pub(crate) mark: Option<String>,
    pub(crate) is_paused: bool,
    /// Since when it is paused or leaving, if it is.
    pub(crate) still_since: Ns,
    /// Cycles until it has left for another host.
    pub(crate) leaves_in: Option<u32>,
    /// Node of each base page.
    pub(crate) pages: Vec<u8>,
    pub(crate) truth: Truth,
    /// Sizes of the balloon lately.
    pub(crate) sizes: VecDeque<(Ns, u64)>,
    /// Until when `dumpxml` shows the size of `.1` before: libvirt learns of it by events (`libvirt::fake` lags alike).
    pub(crate) stale: Option<(Ns, Ns)>,
}

/// What role a thread has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Role {
    Emulator,
    Vcpu(u16),
    IoThread(u32),
}

/// A thread.
pub(crate) struct Thread {
    pub(crate) role: Role,
    /// CPUs that were asked for last.
    pub(crate) asked: CpuSet,
    /// CPUs that it may run on.
    pub(crate) affinity: CpuSet,
    pub(crate) ran: Ns,
    pub(crate) waited: Ns,
    pub(crate) cpu: CpuId,
}

/// What the operator wants, and since when: what must be in force when no agent is.
#[derive(Clone, Debug, Default)]
pub(crate) struct Truth {
    pub(crate) affinity: BTreeMap<Role, Wanted>,
    pub(crate) quota: (Option<u64>, Ns),
    /// Quotas that may be restored instead: the operator changed the quota at the same time as the agent.
    pub(crate) quotas: Vec<Option<u64>>,
    pub(crate) memory_kib: (u64, Ns),
    /// Sizes that may be restored instead: the operator changed the size while the agent's was in force.
    pub(crate) memories: Vec<u64>,
    pub(crate) nodes: Option<NodeSet>,
}

/// What a thread may have once no agent changes it.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    /// The CPUs that the operator gave it.
    pub(crate) cpus: CpuSet,
    /// Since when.
    pub(crate) since: Ns,
    /// Whether the operator pinned it, rather than left it wherever the VM may run.
    pub(crate) is_pinned: bool,
    /// CPUs that it had whenever the agent began to change it.
    pub(crate) before: Vec<CpuSet>,
    /// Sets to which the agent has pinned it since.
    pub(crate) agents: Vec<CpuSet>,
    /// Whether operator and agent changed it at the same time, or to the same CPUs.
    pub(crate) is_blurred: bool,
}

impl Wanted {
    pub(crate) fn new(cpus: CpuSet, is_pinned: bool, since: Ns) -> Wanted {
        Wanted {
            cpus,
            since,
            is_pinned,
            before: Vec::new(),
            agents: Vec::new(),
            is_blurred: false,
        }
    }

    /// Whether this is what an operator may expect to have again.
    pub(crate) fn is_before(&self, cpus: &CpuSet, cpuset: &CpuSet) -> bool {
        let now = in_force(cpus, cpuset);
        let mut all = std::iter::once(&self.cpus).chain(&self.before);
        all.any(|set| in_force(set, cpuset) == now) || (!self.is_pinned && cpuset.is_subset(&now))
    }
}

impl Thread {
    pub(crate) fn new(role: Role, asked: CpuSet, cpuset: &CpuSet) -> Thread {
        Thread {
            role,
            affinity: in_force(&asked, cpuset),
            asked,
            ran: Ns::ZERO,
            waited: Ns::ZERO,
            cpu: CpuId(0),
        }
    }
}

/// The kernel applies the part of a set that is within the cpuset, or the whole cpuset
/// (`what_the_kernel_makes_of_a_pin_within_a_cpuset_is_known`; the testbed's case `cpuset` shows it on a real kernel).
pub(crate) fn in_force(asked: &CpuSet, cpuset: &CpuSet) -> CpuSet {
    match asked.intersection(cpuset) {
        none if none.is_empty() => cpuset.clone(),
        within => within,
    }
}

impl Run {
    pub(crate) fn thread(&self, role: Role) -> Option<(i32, &Thread)> {
        self.threads
            .iter()
            .find(|(_, thread)| thread.role == role)
            .map(|(tid, thread)| (*tid, thread))
    }

    pub(crate) fn thread_mut(&mut self, role: Role) -> Option<(i32, &mut Thread)> {
        self.threads
            .iter_mut()
            .find(|(_, thread)| thread.role == role)
            .map(|(tid, thread)| (*tid, thread))
    }

    /// Applies another cpuset to all threads.
    pub(crate) fn confine(&mut self, cpuset: &CpuSet) {
        self.cpuset = cpuset.clone();
        for thread in self.threads.values_mut() {
            thread.affinity = in_force(&thread.asked, cpuset);
        }
    }

    /// Pages on each node.
    pub(crate) fn by_node(&self, nodes: u16) -> Vec<usize> {
        let mut count = vec![0; nodes.into()];
        self.pages.iter().for_each(|node| count[usize::from(*node)] += 1);
        count
    }
}

impl Vm {
    pub(crate) fn new(at: usize, spec: &VmSpec) -> Vm {
        let id = format!("00000000-0000-4000-8000-{at:012}");
        Vm {
            spec: spec.clone(),
            id: VmId::parse(&id).expect("a UUID"),
            name: format!("vm{at}"),
            run: None,
            settings: spec.settings.clone(),
            foreign: 0,
            last_pid: 0,
            load: 50,
        }
    }

    pub(crate) fn memory_kib(&self) -> u64 {
        self.spec.memory_mib << 10
    }

    /// The VM's cgroup, as `/proc/PID/cgroup` names it.
    pub(crate) fn group(&self) -> String {
        let number = self.run.as_ref().map_or(0, |run| run.runtime_id);
        format!("/machine.slice/machine-qemu-{number}-{}.scope/libvirt", self.name)
    }

    /// The live XML, as libvirt 9 writes it (`domain::tests::LIVE`).
    pub(crate) fn xml(&self, current_kib: u64) -> String {
        let run = self.run.as_ref().expect("a running VM");
        let mut xml = format!(
            "<domain type='kvm' id='{}'><name>{}</name><uuid>{}</uuid><metadata>",
            run.runtime_id, self.name, self.id
        );
        if self.foreign > 0 {
            let _ = write!(xml, "<o:x xmlns:o='urn:o' n='{}'/>", self.foreign);
        }
        if !run.settings.is_empty() {
            let _ = write!(
                xml,
                "<homenode:vm xmlns:homenode='https://homenode.dev/xmlns/vm/1' {}/>",
                run.settings
            );
        }
        xml += run.mark.as_deref().unwrap_or_default();
        let vcpus = run
            .threads
            .values()
            .filter(|thread| matches!(thread.role, Role::Vcpu(_)))
            .count();
        let _ = write!(
            xml,
            "</metadata><memory unit='KiB'>{}</memory><currentMemory unit='KiB'>{}</currentMemory>",
            self.memory_kib(),
            current_kib
        );
        if self.spec.locked {
            xml += "<memoryBacking><locked/></memoryBacking>";
        }
        let _ = write!(
            xml,
            "<vcpu placement='static' current='{vcpus}'>{}</vcpu><iothreads>{}</iothreads><cputune>",
            self.spec.vcpus_max, self.spec.iothreads
        );
        if let Some(quota) = run.quota_us {
            let _ = write!(xml, "<period>{}</period><quota>{quota}</quota>", run.period_us);
        }
        for (vcpu, cpus) in &run.vcpu_pins {
            let _ = write!(xml, "<vcpupin vcpu='{vcpu}' cpuset='{cpus}'/>");
        }
        if let Some(cpus) = &run.emulator_pin {
            let _ = write!(xml, "<emulatorpin cpuset='{cpus}'/>");
        }
        for (id, cpus) in &run.iothread_pins {
            let _ = write!(xml, "<iothreadpin iothread='{id}' cpuset='{cpus}'/>");
        }
        xml += "</cputune>";
        if let Some(nodes) = &run.nodes {
            let _ = write!(
                xml,
                "<numatune><memory mode='{}' nodeset='{nodes}'/></numatune>",
                self.spec.tune
            );
        }
        let _ = write!(
            xml,
            "<devices><memballoon model='virtio'><stats period='{}'/></memballoon></devices></domain>",
            run.stats_period
        );
        xml
    }

    /// The XML of the next start.
    pub(crate) fn xml_inactive(&self) -> String {
        let settings = match self.settings.is_empty() {
            true => String::new(),
            false => format!(
                "<homenode:vm xmlns:homenode='https://homenode.dev/xmlns/vm/1' {}/>",
                self.settings
            ),
        };
        format!(
            "<domain type='kvm'><name>{}</name><uuid>{}</uuid><metadata>{settings}</metadata><memory unit='KiB'>{}</memory><vcpu>{}</vcpu></domain>",
            self.name,
            self.id,
            self.memory_kib(),
            self.spec.vcpus_max
        )
    }
}

/// Writes files below the root. A kernel file is replaced in place, because the agent keeps it open.
pub(crate) struct Files(pub(crate) PathBuf);

impl Files {
    pub(crate) fn write(&self, path: &str, text: &str) {
        let full = self.0.join(path.trim_start_matches('/'));
        if std::fs::write(&full, text).is_err() {
            std::fs::create_dir_all(full.parent().expect("a file lies in a directory")).expect("directories");
            std::fs::write(&full, text).expect("a file");
        }
    }

    pub(crate) fn remove(&self, path: &str) {
        let full: &Path = &self.0.join(path.trim_start_matches('/'));
        let _ = std::fs::remove_dir_all(full);
    }

    /// Writes everything about a VM that has just started.
    pub(crate) fn begin(&self, vm: &Vm, nodes: u16) {
        let run = vm.run.as_ref().expect("a running VM");
        let pid = run.pid;
        self.write(&format!("run/libvirt/qemu/{}.pid", vm.name), &format!("{pid}\n"));
        self.write(
            &format!("proc/{pid}/cmdline"),
            &format!("qemu-system-x86_64\0-uuid\0{}\0", vm.id),
        );
        let end = RAM + run.pages.len() as u64 * PAGE_BYTES;
        self.write(
            &format!("proc/{pid}/maps"),
            &format!("{RAM:x}-{end:x} rw-p 00000000 00:00 0 \n"),
        );
        self.cgroup(vm);
        self.memory(vm, nodes);
        for tid in run.threads.keys() {
            self.thread(vm, *tid);
        }
        self.quota(vm);
        self.process(vm);
    }

    /// `stat` of the process, which has the number of its threads.
    pub(crate) fn process(&self, vm: &Vm) {
        let Some(run) = &vm.run else { return };
        let text = stat(run.pid, "qemu", 'S', run.start, 0);
        let count = run.threads.len();
        // Field 20 of proc(5) is the number of threads; `fake::stat` has 9 there.
        let text = text.replacen(" 20 0 9 0 ", &format!(" 20 0 {count} 0 "), 1);
        self.write(&format!("proc/{}/stat", run.pid), &text);
        self.write(
            &format!("proc/{}/status", run.pid),
            "Name:\tqemu\nUid:\t64055\t64055\t64055\t64055\n",
        );
    }

    /// The VM's cpuset.
    pub(crate) fn cgroup(&self, vm: &Vm) {
        let Some(run) = &vm.run else { return };
        let group = format!("sys/fs/cgroup{}", vm.group());
        self.write(
            &format!("{group}/cpuset.cpus.effective"),
            &format!("{}\n", run.cpuset),
        );
    }

    pub(crate) fn memory(&self, vm: &Vm, nodes: u16) {
        let Some(run) = &vm.run else { return };
        let counts = run.by_node(nodes).into_iter().enumerate();
        let counts: String = counts
            .filter(|(_, count)| *count > 0)
            .map(|(node, count)| format!(" N{node}={count}"))
            .collect();
        let policy = match (vm.spec.tune.as_str(), &run.nodes) {
            ("strict", Some(nodes)) => format!("bind:{nodes}"),
            _ => "default".to_owned(),
        };
        let text = format!(
            "{RAM:x} {policy} anon={}{counts} kernelpagesize_kB=4\n",
            run.pages.len()
        );
        self.write(&format!("proc/{}/numa_maps", run.pid), &text);
    }

    pub(crate) fn thread(&self, vm: &Vm, tid: i32) {
        let run = vm.run.as_ref().expect("a running VM");
        let thread = &run.threads[&tid];
        let dir = format!("proc/{}/task/{tid}", run.pid);
        let (comm, group) = match thread.role {
            Role::Emulator => ("qemu-system-x86".to_owned(), "emulator".to_owned()),
            Role::Vcpu(index) => (format!("CPU {index}/KVM"), format!("vcpu{index}")),
            Role::IoThread(id) => (format!("IO iothread{id}"), format!("iothread{id}")),
        };
        let group = format!("{}/{group}", vm.group());
        self.write(&format!("{dir}/comm"), &format!("{comm}\n"));
        self.write(&format!("{dir}/cgroup"), &format!("0::{group}\n"));
        self.write(
            &format!("sys/fs/cgroup{group}/cpu.stat"),
            "usage_usec 1\nthrottled_usec 0\n",
        );
        self.status(vm, tid);
        self.counters(vm, tid);
    }

    pub(crate) fn status(&self, vm: &Vm, tid: i32) {
        let run = vm.run.as_ref().expect("a running VM");
        let text = format!(
            "Name:\tx\nCpus_allowed_list:\t{}\nMems_allowed_list:\t0-7\n",
            run.threads[&tid].affinity
        );
        self.write(&format!("proc/{}/task/{tid}/status", run.pid), &text);
    }

    pub(crate) fn counters(&self, vm: &Vm, tid: i32) {
        let run = vm.run.as_ref().expect("a running VM");
        let thread = &run.threads[&tid];
        let dir = format!("proc/{}/task/{tid}", run.pid);
        self.write(
            &format!("{dir}/schedstat"),
            &format!("{} {} 3\n", thread.ran.0, thread.waited.0),
        );
        self.write(
            &format!("{dir}/stat"),
            &stat(tid, "x", 'S', run.start + 1, thread.cpu.0),
        );
    }

    /// `cpu.max` of each vCPU, as libvirt writes it on cgroup v2.
    pub(crate) fn quota(&self, vm: &Vm) {
        let Some(run) = &vm.run else { return };
        let quota = run.quota_us.map_or("max".to_owned(), |us| us.to_string());
        for thread in run.threads.values() {
            if let Role::Vcpu(index) = thread.role {
                let path = format!("sys/fs/cgroup{}/vcpu{index}/cpu.max", vm.group());
                self.write(&path, &format!("{quota} {}\n", run.period_us));
            }
        }
    }

    pub(crate) fn end(&self, vm: &Vm) {
        let run = vm.run.as_ref().expect("a running VM");
        self.remove(&format!("proc/{}", run.pid));
        self.remove(&format!("sys/fs/cgroup{}", vm.group()));
        let _ = std::fs::remove_file(self.0.join(format!("run/libvirt/qemu/{}.pid", vm.name)));
    }
}
