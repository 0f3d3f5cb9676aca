//! What operators and tenants do, and what the agent's changes do, to the model; and what must hold of each change of the agent.

use std::collections::{BTreeMap, VecDeque};

use homenode_units::{CpuId, CpuSet, NodeId, NodeSet, Ns};

use crate::case::{CPUS, What};
use crate::vm::{Role, Run, Thread, Truth, Wanted, in_force};
use crate::world::State;

/// Settings under which an agent changes nothing.
pub(crate) fn is_hands_off(settings: &str) -> bool {
    settings.contains("manage='no'")
        || settings.contains("manage='maybe'")
        || settings.contains("mode='observe'")
}

impl State {
    pub(crate) fn all_cpus(&self) -> CpuSet {
        (0..CPUS * u32::from(self.case.nodes)).map(CpuId).collect()
    }

    /// CPUs that the operator's cpuset allows a VM, online or not.
    pub(crate) fn cpuset_of(&self, at: usize) -> CpuSet {
        let own = self.vms[at].spec.cpuset.clone();
        own.unwrap_or_else(|| self.all_cpus())
    }

    /// The part of a cpuset that is online; all that is online if there is none, as cgroup v2 does.
    fn effective(&self, cpuset: &CpuSet) -> CpuSet {
        in_force(cpuset, &self.online)
    }

    /// Starts a VM.
    pub(crate) fn start(&mut self, at: usize, reuse: bool) {
        if self.vms[at].run.is_some() {
            return;
        }
        let cpuset = self.effective(&self.cpuset_of(at));
        let reused = self
            .vms
            .iter()
            .map(|vm| vm.last_pid)
            .find(|pid| reuse && *pid != 0);
        let is_free = |pid: &i32| {
            self.vms
                .iter()
                .all(|vm| vm.run.as_ref().is_none_or(|run| run.pid != *pid))
        };
        let pid = reused.filter(is_free).unwrap_or(self.next.pid);
        self.next.pid += 100;
        let runtime_id = self.next.runtime_id;
        self.next.runtime_id += 1;
        let (nodes, start) = (self.case.nodes, self.time.0 / 10_000_000);
        let vm = &mut self.vms[at];
        let spec = vm.spec.clone();
        let vcpus = (0..spec.vcpus).map(Role::Vcpu);
        let iothreads = (1..=spec.iothreads).map(Role::IoThread);
        let roles = std::iter::once(Role::Emulator).chain(vcpus).chain(iothreads);
        let pinned = spec
            .pinned
            .clone()
            .filter(|cpus| !cpus.intersection(&cpuset).is_empty());
        let mut truth = Truth {
            quota: (spec.quota_us, Ns::ZERO),
            memory_kib: (vm.memory_kib(), Ns::ZERO),
            ..Truth::default()
        };
        let mut threads = BTreeMap::new();
        for (tid, role) in (pid..).zip(roles) {
            let own = pinned.clone().filter(|_| role == Role::Vcpu(0));
            let asked = own.clone().unwrap_or_else(|| cpuset.clone());
            let is_pinned = own.is_some_and(|own| !cpuset.is_subset(&own));
            truth
                .affinity
                .insert(role, Wanted::new(asked.clone(), is_pinned, Ns::ZERO));
            threads.insert(tid, Thread::new(role, asked, &cpuset));
        }
        let on = |mode: &str| spec.tune == mode;
        let tuned = (on("restrictive") || on("strict")).then(|| NodeSet::one(NodeId(0)));
        truth.nodes.clone_from(&tuned);
        let pages = (vm.memory_kib() / 4) as usize;
        let node_of = |page: usize| {
            if tuned.is_some() {
                0
            } else {
                (page * usize::from(nodes) / pages) as u8
            }
        };
        vm.run = Some(Run {
            runtime_id,
            pid,
            start,
            threads,
            vcpu_pins: pinned.into_iter().map(|cpus| (0, cpus)).collect(),
            emulator_pin: None,
            iothread_pins: BTreeMap::new(),
            cpuset,
            cpuset_since: Ns::ZERO,
            quota_us: spec.quota_us,
            period_us: 100_000,
            nodes: tuned.clone(),
            target_kib: vm.memory_kib(),
            current_kib: vm.memory_kib(),
            stats_period: 0,
            stamp_s: 0,
            lie: 100,
            balloon_follows: true,
            settings: vm.settings.clone(),
            settings_since: Ns::ZERO,
            mark: None,
            is_paused: false,
            still_since: self.time,
            leaves_in: None,
            pages: (0..pages).map(node_of).collect(),
            truth,
            sizes: VecDeque::new(),
            stale: None,
        });
        self.trace
            .add(format!("{} starts as process {pid}", self.vms[at].name));
        self.files.begin(&self.vms[at], nodes);
    }

    /// Ends a VM.
    pub(crate) fn stop(&mut self, at: usize) {
        if self.vms[at].run.is_none() {
            return;
        }
        self.files.end(&self.vms[at]);
        let vm = &mut self.vms[at];
        let run = vm.run.take().expect("a running VM");
        vm.last_pid = run.pid;
        let name = vm.name.clone();
        self.trace.add(format!("{name} ends"));
    }

    /// What an operator or tenant does.
    pub(crate) fn operate(&mut self, what: &What) {
        match what {
            What::Start { vm, reuse } => return self.start(*vm, *reuse),
            What::Stop { vm } => return self.stop(*vm),
            What::Offline { cpu } | What::Online { cpu } => {
                let is_on = matches!(what, What::Online { .. });
                // The kernel keeps the last one.
                if is_on || self.online.len() > 1 {
                    self.online.set(CpuId(*cpu), is_on);
                    self.trace.add(format!(
                        "CPU {cpu} goes {}",
                        if is_on { "online" } else { "offline" }
                    ));
                    self.write_cpus();
                    (0..self.vms.len()).for_each(|at| self.confine(at));
                }
                return;
            }
            _ => {}
        }
        let Some(at) = self.subject(what) else { return };
        let time = self.time;
        let name = self.vms[at].name.clone();
        self.trace.add(format!("{name}: {what:?}"));
        match what {
            What::Pin { vcpu, cpus, .. } => self.operator_pins(at, Role::Vcpu(*vcpu), cpus),
            What::PinEmulator { cpus, .. } => self.operator_pins(at, Role::Emulator, cpus),
            What::Cpuset { cpus, .. } => {
                self.vms[at].spec.cpuset = Some(cpus.clone());
                self.confine(at);
                let run = self.vms[at].run.as_mut().expect("a running VM");
                run.cpuset_since = time;
            }
            What::Plan { act, .. } => self.plans.push((at, act.clone())),
            What::Hotplug { .. } => self.hotplug(at),
            What::Unplug { .. } => self.unplug(at),
            _ => self.operate_on(at, what),
        }
        let State { files, vms, case, .. } = &*self;
        let vm = &vms[at];
        if vm.run.is_some() {
            files.memory(vm, case.nodes);
            files.quota(vm);
        }
    }

    /// The VM that this is about, if it runs.
    fn subject(&self, what: &What) -> Option<usize> {
        let at = match what {
            What::Pin { vm, .. }
            | What::PinEmulator { vm, .. }
            | What::Cpuset { vm, .. }
            | What::Quota { vm, .. }
            | What::Memory { vm, .. }
            | What::Settings { vm, .. }
            | What::Hotplug { vm }
            | What::Unplug { vm }
            | What::Suspend { vm }
            | What::Resume { vm }
            | What::MigrateOut { vm, .. }
            | What::Metadata { vm }
            | What::Load { vm, .. }
            | What::Touch { vm, .. }
            | What::Balloon { vm, .. }
            | What::Lie { vm, .. }
            | What::Plan { vm, .. }
            | What::Stale { vm, .. } => *vm,
            _ => return None,
        };
        self.vms.get(at)?.run.as_ref().map(|_| at)
    }

    /// The simpler changes of one VM.
    fn operate_on(&mut self, at: usize, what: &What) {
        let time = self.time;
        let vm = &mut self.vms[at];
        let all_kib = vm.memory_kib();
        let run = vm.run.as_mut().expect("a running VM");
        match what {
            What::Quota { run_us, .. } => {
                // A quota that the agent had set too cannot be told from the agent's.
                let is_alike = run.quota_us == *run_us;
                let before = run.truth.quota.0;
                (run.quota_us, run.period_us) = (*run_us, 100_000);
                run.truth.quota = (*run_us, time);
                run.truth.quotas.clear();
                run.truth.quotas.extend(is_alike.then_some(before));
            }
            What::Memory { percent, .. } => {
                let kib = all_kib * percent / 100;
                let before = std::mem::replace(&mut run.truth.memory_kib, (kib, time)).0;
                run.truth.memories.push(before);
                run.target_kib = kib;
            }
            What::Settings { settings, .. } => {
                run.settings.clone_from(settings);
                run.settings_since = time;
                vm.settings.clone_from(settings);
            }
            What::Suspend { .. } => (run.is_paused, run.still_since) = (true, time),
            What::Resume { .. } => run.is_paused = false,
            What::MigrateOut { cycles, .. } => {
                if run.leaves_in.is_none() {
                    run.still_since = time;
                }
                run.leaves_in = Some(*cycles);
            }
            What::Metadata { .. } => vm.foreign += 1,
            What::Load { percent, .. } => vm.load = *percent,
            What::Touch { node, pages, .. } => {
                let from = run.pages.len().saturating_sub(*pages);
                // Bound memory comes from its nodes only.
                let node = run
                    .nodes
                    .as_ref()
                    .and_then(NodeSet::first)
                    .map_or(*node, |first| first.0);
                run.pages[from..].iter_mut().for_each(|page| *page = node as u8);
            }
            What::Balloon { follows, .. } => run.balloon_follows = *follows,
            What::Lie { percent, .. } => run.lie = *percent,
            What::Stale { seconds, .. } => {
                let span = Ns::from_secs(*seconds);
                run.stale = Some((time + span, span));
            }
            _ => {}
        }
    }

    /// An operator pins a thread with virsh. libvirt refuses what the kernel refuses.
    fn operator_pins(&mut self, at: usize, role: Role, cpus: &CpuSet) {
        let time = self.time;
        let run = self.vms[at].run.as_mut().expect("a running VM");
        let cpuset = run.cpuset.clone();
        let Some((tid, thread)) = run.thread_mut(role) else {
            return;
        };
        if cpus.intersection(&cpuset).is_empty() {
            return;
        }
        thread.asked = cpus.clone();
        thread.affinity = in_force(cpus, &cpuset);
        match role {
            Role::Vcpu(index) => drop(run.vcpu_pins.insert(index, cpus.clone())),
            Role::Emulator => run.emulator_pin = Some(cpus.clone()),
            Role::IoThread(id) => drop(run.iothread_pins.insert(id, cpus.clone())),
        }
        let wanted = run.truth.affinity.get_mut(&role).expect("a known thread");
        let is_pinned = !cpuset.is_subset(cpus);
        let agents = std::mem::take(&mut wanted.agents);
        // A pin that the agent had made too cannot be told from the agent's: either may be restored.
        let is_alike = agents
            .iter()
            .any(|own| in_force(own, &cpuset) == in_force(cpus, &cpuset));
        let before = if is_alike {
            std::mem::take(&mut wanted.before)
        } else {
            Vec::new()
        };
        *wanted = Wanted {
            before,
            is_blurred: is_alike,
            ..Wanted::new(cpus.clone(), is_pinned, time)
        };
        self.files.status(&self.vms[at], tid);
    }

    /// Applies the VM's cpuset and the CPUs that are online.
    fn confine(&mut self, at: usize) {
        let cpuset = self.effective(&self.cpuset_of(at));
        let Some(run) = self.vms[at].run.as_mut() else {
            return;
        };
        run.confine(&cpuset);
        let tids: Vec<i32> = run.threads.keys().copied().collect();
        self.files.cgroup(&self.vms[at]);
        for tid in tids {
            self.files.status(&self.vms[at], tid);
        }
    }

    /// Plugs a vCPU. libvirt gives it the VM's own CPUs, not those of the thread that starts it (the testbed's case `hotplug`).
    fn hotplug(&mut self, at: usize) {
        let time = self.time;
        let most = self.vms[at].spec.vcpus_max;
        let run = self.vms[at].run.as_mut().expect("a running VM");
        let Some(index) = (0..most).find(|index| run.thread(Role::Vcpu(*index)).is_none()) else {
            return;
        };
        let tid = run.threads.keys().next_back().map_or(run.pid, |last| last + 1);
        let (role, cpuset) = (Role::Vcpu(index), run.cpuset.clone());
        let asked = run
            .vcpu_pins
            .get(&index)
            .cloned()
            .unwrap_or_else(|| cpuset.clone());
        run.truth
            .affinity
            .insert(role, Wanted::new(cpuset.clone(), false, time));
        run.threads.insert(tid, Thread::new(role, asked, &cpuset));
        self.files.thread(&self.vms[at], tid);
        self.files.process(&self.vms[at]);
    }

    fn unplug(&mut self, at: usize) {
        let run = self.vms[at].run.as_mut().expect("a running VM");
        let mut vcpus = run
            .threads
            .iter()
            .filter(|(_, thread)| matches!(thread.role, Role::Vcpu(1..)));
        let Some((&tid, thread)) = vcpus.next_back() else {
            return;
        };
        let (pid, role) = (run.pid, thread.role);
        run.threads.remove(&tid);
        run.truth.affinity.remove(&role);
        if let Role::Vcpu(index) = role {
            run.vcpu_pins.remove(&index);
        }
        self.files.remove(&format!("proc/{pid}/task/{tid}"));
        self.files.process(&self.vms[at]);
    }

    /// Lets a second pass: VMs run, balloons follow, guests report, migrations end.
    pub(crate) fn tick(&mut self) {
        for at in 0..self.vms.len() {
            let (time, load) = (self.time, self.vms[at].load);
            let Some(run) = self.vms[at].run.as_mut() else {
                continue;
            };
            if run.balloon_follows {
                run.current_kib = run.target_kib;
            }
            if run.stats_period > 0 {
                run.stamp_s = time.0 / 1_000_000_000;
            }
            let is_running = !run.is_paused;
            let mut ran = Vec::new();
            for (tid, thread) in &mut run.threads {
                if let (Role::Vcpu(_), true) = (thread.role, is_running) {
                    thread.ran += Ns(load * 10_000_000);
                    thread.waited += Ns(load * 100_000);
                    thread.cpu = thread.affinity.first().unwrap_or(CpuId(0));
                    self.busy[thread.cpu.0 as usize] += load * 10_000_000;
                    ran.push(*tid);
                }
            }
            let has_left = run.leaves_in.as_mut().is_some_and(|cycles| {
                *cycles = cycles.saturating_sub(1);
                *cycles == 0
            });
            for tid in ran {
                self.files.counters(&self.vms[at], tid);
            }
            if has_left {
                self.stop(at);
            }
        }
        self.write_cpus();
    }
}
