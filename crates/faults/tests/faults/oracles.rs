//! What must hold of each change of the agent, and of each VM once no agent changes it any more.

use homenode_units::{CpuSet, NodeId, NodeSet, Ns};

use crate::operators::is_hands_off;
use crate::vm::{Role, in_force};
use crate::world::State;

/// Most pages that the settings of [`crate::life`] let move in a period, of one VM and of all.
pub(crate) const VM_PAGES: u64 = 1024;
pub(crate) const HOST_PAGES: u64 = 2048;

impl State {
    /// Complains about a change of a VM that its operator has kept from the agent since before it looked.
    fn check_hands_off(&mut self, at: usize, what: &str) {
        let run = self.vms[at].run.as_ref().expect("a running VM");
        if is_hands_off(&run.settings) && run.settings_since < self.sampled && self.issued.is_none() {
            let (name, settings) = (&self.vms[at].name, &run.settings);
            self.violate(format!("the agent {what} {name}, whose operator said {settings}"));
        }
    }

    /// The agent pins a thread. Returns an error as libvirt does.
    pub(crate) fn agent_pins(&mut self, at: usize, role: Role, cpus: &CpuSet) -> Result<(), String> {
        let (phase, issued) = (self.phase_since, self.issued);
        let (bound, online) = (self.cpuset_of(at), self.online.clone());
        let name = self.vms[at].name.clone();
        let run = self.vms[at].run.as_mut().expect("a running VM");
        let (cpuset, cpuset_since) = (run.cpuset.clone(), run.cpuset_since);
        let Some((tid, thread)) = run.thread_mut(role) else {
            return Err(format!(
                "invalid argument: {role:?} is out of range of live cpu count"
            ));
        };
        if cpus.intersection(&cpuset).is_empty() {
            return Err(format!(
                "cannot set CPU affinity on process {tid}: Invalid argument"
            ));
        }
        let had = std::mem::replace(&mut thread.affinity, in_force(cpus, &cpuset));
        thread.asked = cpus.clone();
        match role {
            Role::Vcpu(index) => drop(run.vcpu_pins.insert(index, cpus.clone())),
            Role::Emulator => run.emulator_pin = Some(cpus.clone()),
            Role::IoThread(id) => drop(run.iothread_pins.insert(id, cpus.clone())),
        }
        let wanted = run.truth.affinity.get_mut(&role).expect("a known thread");
        // What the operator changes while the agent acts may be overwritten: no call compares and sets.
        let since = issued.unwrap_or(phase);
        wanted.is_blurred |= wanted.since >= since;
        let is_given_back = wanted.is_before(cpus, &cpuset);
        let is_rolled_back = *cpus == had || wanted.agents.contains(cpus);
        let mut bad = None;
        if !is_given_back {
            if wanted.is_before(&had, &cpuset) {
                wanted.before.push(had);
            }
            // A pin to everything that the VM may use limits nothing.
            let is_pinned = wanted.is_pinned && !bound.is_subset(&wanted.cpus);
            // While all CPUs of a cpuset are offline, the kernel lets its threads run anywhere.
            let is_bound = !bound.intersection(&online).is_empty();
            if is_pinned && !wanted.is_blurred && matches!(role, Role::Vcpu(_)) {
                bad = Some(format!("although its operator had pinned it to {}", wanted.cpus));
            } else if is_bound && cpuset_since < since && !is_rolled_back && !cpus.is_subset(&bound) {
                bad = Some(format!("outside its cpuset {bound}"));
            }
            wanted.agents.push(cpus.clone());
        }
        self.trace.add(format!("agent pins {role:?} of {name} to {cpus}"));
        if let Some(why) = bad {
            self.violate(format!("the agent pinned {role:?} of {name} to {cpus}, {why}"));
        }
        if !is_given_back && !is_rolled_back {
            self.check_hands_off(at, "pinned a thread of");
        }
        self.files.status(&self.vms[at], tid);
        Ok(())
    }

    /// The agent sets a quota or its period. The kernel refuses less than a millisecond, and periods beyond a second.
    pub(crate) fn agent_sets_quota(
        &mut self,
        at: usize,
        period: Option<u64>,
        quota: Option<i64>,
    ) -> Result<(), String> {
        let since = self.issued.unwrap_or(self.phase_since);
        let run = self.vms[at].run.as_mut().expect("a running VM");
        let quota = quota.map(|us| u64::try_from(us).ok().filter(|us| *us < 17_592_186_044_415));
        let is_valid = quota.flatten().is_none_or(|us| us >= 1000)
            && period.is_none_or(|us| (1000..=1_000_000).contains(&us));
        if !is_valid {
            return Err("Unable to write to cpu.max: Invalid argument".to_owned());
        }
        if run.truth.quota.1 >= since {
            // The operator's change may be lost, or come back instead of the former quota.
            run.truth.quotas.push(run.quota_us);
        }
        run.quota_us = quota.unwrap_or(run.quota_us);
        run.period_us = period.unwrap_or(run.period_us);
        let (is_own, text) = (
            run.quota_us != run.truth.quota.0,
            format!("{:?}/{}", run.quota_us, run.period_us),
        );
        let name = &self.vms[at].name;
        self.trace
            .add(format!("agent sets the quota of {name} to {text}"));
        if is_own && quota.is_some() {
            self.check_hands_off(at, "limited");
        }
        self.files.quota(&self.vms[at]);
        Ok(())
    }

    /// The agent sets a VM's memory.
    pub(crate) fn agent_sets_memory(&mut self, at: usize, kib: u64) {
        let run = self.vms[at].run.as_mut().expect("a running VM");
        run.target_kib = kib;
        let truth = &run.truth;
        let is_given_back = kib == truth.memory_kib.0 || truth.memories.contains(&kib);
        let (has_floor, since) = (run.settings.contains("floor="), run.settings_since);
        let name = self.vms[at].name.clone();
        self.trace
            .add(format!("agent sets the memory of {name} to {kib} KiB"));
        if !is_given_back {
            self.check_hands_off(at, "took memory from");
            if !has_floor && since < self.sampled && self.issued.is_none() {
                self.violate(format!(
                    "the agent took memory from {name}, whose operator set no floor"
                ));
            }
        }
    }

    /// The agent sets the nodes of a restrictive VM.
    pub(crate) fn agent_sets_nodes(&mut self, at: usize, nodes: &NodeSet) -> Result<(), String> {
        let tune = self.vms[at].spec.tune.clone();
        if tune != "restrictive" {
            return Err(
                "change of nodeset for running domain requires strict or restrictive numa mode".to_owned(),
            );
        }
        let run = self.vms[at].run.as_mut().expect("a running VM");
        run.nodes = Some(nodes.clone());
        let name = &self.vms[at].name;
        self.trace
            .add(format!("agent sets the memory nodes of {name} to {nodes}"));
        Ok(())
    }

    /// The agent moves pages of a VM.
    pub(crate) fn agent_moves(&mut self, at: usize, to: NodeId) {
        self.check_hands_off(at, "moved pages of");
        let (sampled, spec) = (self.sampled, self.vms[at].spec.clone());
        let run = self.vms[at].run.as_ref().expect("a running VM");
        let is_still = (run.is_paused || run.leaves_in.is_some()) && run.still_since < sampled;
        let is_bound = spec.tune == "strict" && run.nodes.as_ref().is_some_and(|nodes| !nodes.contains(to));
        let name = &self.vms[at].name;
        let why = match () {
            () if spec.locked => "whose memory is locked",
            () if is_bound => "whose memory is bound elsewhere",
            () if is_still => "which was paused or between two hosts",
            () => return,
        };
        self.violate(format!("the agent moved pages of {name}, {why}"));
    }

    /// After a cycle: the budgets of page moves.
    pub(crate) fn check_budgets(&mut self) {
        let all: u64 = self.moved.iter().sum();
        let most = self.moved.iter().copied().max().unwrap_or(0);
        if self.case.policies != "planner" && (most * 10 > VM_PAGES * 11 || all * 10 > HOST_PAGES * 11) {
            self.violate(format!(
                "{all} pages moved in a period, {most} of one VM: more than the budget"
            ));
        }
    }

    /// After an end that `failures` tell of: each VM is as before, or is said not to be.
    pub(crate) fn check_undone(&mut self, failures: &[String], after: &str) {
        for at in self.running() {
            let differences = self.differences(at);
            let name = self.vms[at].name.clone();
            let id = self.vms[at].id.to_string();
            let is_said = |failure: &String| {
                failure.contains(&format!("VM {name} "))
                    || failure.contains(&id)
                    || failure.contains("cannot tell")
            };
            if !differences.is_empty() && !failures.iter().any(is_said) {
                let what = differences.join(", ");
                self.violate(format!(
                    "after {after}, {name} is not as before ({what}), and no message says so: {failures:?}"
                ));
            }
        }
        if self.is_calm() && !failures.is_empty() {
            self.violate(format!("after {after}, with nothing in the way: {failures:?}"));
        }
    }

    /// How a VM differs from what its operator wants.
    fn differences(&self, at: usize) -> Vec<String> {
        let vm = &self.vms[at];
        let run = vm.run.as_ref().expect("a running VM");
        let mut all = Vec::new();
        for thread in run.threads.values() {
            let wanted = &run.truth.affinity[&thread.role];
            if !wanted.is_blurred && !wanted.is_before(&thread.affinity, &run.cpuset) {
                let (role, now, before) = (thread.role, &thread.affinity, &wanted.cpus);
                all.push(format!("{role:?} runs on {now} instead of {before}"));
            }
        }
        let truth = &run.truth;
        if run.quota_us != truth.quota.0 && !truth.quotas.contains(&run.quota_us) {
            all.push(format!(
                "its quota is {:?} instead of {:?}",
                run.quota_us, truth.quota.0
            ));
        }
        if run.period_us != 100_000 {
            all.push(format!("the period of its quota is {}", run.period_us));
        }
        if run.target_kib != truth.memory_kib.0 && !truth.memories.contains(&run.target_kib) {
            all.push(format!(
                "its memory is {} KiB instead of {}",
                run.target_kib, truth.memory_kib.0
            ));
        }
        let has_nodes = match (&run.nodes, &truth.nodes) {
            (Some(now), Some(before)) => before.is_subset(now),
            (now, before) => now == before,
        };
        if !has_nodes {
            all.push(format!(
                "its memory nodes are {:?} instead of {:?}",
                run.nodes, truth.nodes
            ));
        }
        if run.stats_period != 0 {
            all.push(format!("its guest is asked every {} s", run.stats_period));
        }
        if run.mark.is_some() {
            all.push("it still carries a mark".to_owned());
        }
        all
    }

    /// The start of a phase of the agent: what an operator changed before counts; what is changed meanwhile may be overwritten.
    pub(crate) fn begin_phase(&mut self) {
        self.phase_since = self.time;
        self.time += Ns(1);
    }
}
