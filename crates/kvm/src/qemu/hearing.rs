//! Answers of the monitors of a host's QEMUs, and questions and commands to them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use homenode_kernel::now;
use homenode_kernel::task::{self, Thread};
use homenode_undo::journal::VcpuThread;
use homenode_units::{Bytes, Ns, VmId};
use serde_json::{Value, json};

use super::monitor::Command;
use super::questions::{self, Wants};
use super::visits::{MONITORS_MAX, Said, Target, VISIT_MAX};
use super::{Qemu, Vm};
use crate::manager::CallError;

/// How often to check that the vCPU threads that a monitor reported still exist.
const CHECK_EVERY: Ns = Ns::from_secs(10);
const NO_MONITOR: &str =
    "it was started without a monitor; start it with `-qmp unix:/run/…,server=on,wait=off`";

/// Last answers of a VM's monitor.
#[derive(Debug, Default)]
pub(super) struct Heard {
    pub(super) said: Arc<Said>,
    /// Whether the asker watches the VM.
    pub(super) is_watched: bool,
    pub(super) wants: Wants,
    /// Threads that run vCPUs but have no names that say so, by their numbers on this host.
    pub(super) vcpus: BTreeMap<i32, (VcpuThread, u16)>,
    /// When the monitor reported these threads, and when to check again that they still exist.
    pub(super) vcpus_at: Option<Ns>,
    pub(super) next_check: Ns,
}

impl Vm {
    /// Why the VM's monitor cannot be used now; `None` if it can.
    pub(super) fn no_monitor(&self) -> Option<String> {
        let said = &self.heard.said;
        match &said.trouble {
            _ if self.told.monitors.is_empty() => Some(NO_MONITOR.to_owned()),
            Some((error, _)) => Some(error.to_string()),
            None if said.visits_count == 0 => Some("the VM's monitor has not answered yet".to_owned()),
            None => None,
        }
    }

    /// Returns the memory that the balloon leaves the VM, if its monitor reported that.
    pub(super) fn balloon(&self) -> Option<Bytes> {
        let said = self.heard.said.heard.balloon;
        said.filter(|bytes| bytes.0 > 0 && *bytes <= self.told.memory)
    }

    /// Whether the VM's description shows the balloon's current size.
    pub(super) fn is_as_described(&self) -> bool {
        let balloon = self.balloon();
        self.described.balloon == self.told.balloon.filter(|_| balloon.is_some())
            && self.described.memory_current_bytes == balloon.unwrap_or(self.told.memory)
    }
}

impl Qemu {
    /// Makes the asker watch a VM.
    pub(super) fn watch(&mut self, vm: VmId) {
        let is_asked = self.is_asking;
        let Some(known) = self.vms.get_mut(&vm).filter(|known| !known.heard.is_watched) else {
            return;
        };
        known.heard.is_watched = true;
        let monitors = each_once(&known.told.monitors);
        if monitors.is_empty() {
            return;
        }
        if monitors.len() > MONITORS_MAX {
            self.notices.push(format!(
                "VM {} has {} monitors: the agent tries only the first {MONITORS_MAX}, and one that answers is enough",
                known.name,
                monitors.len()
            ));
        }
        let target = Target {
            name: known.name.clone(),
            pid: known.process.pid,
            monitors,
            is_asked,
        };
        known.heard.wants = Wants {
            balloon: known.told.balloon.is_some(),
            ..Wants::default()
        };
        let wants = known.heard.wants;
        self.asker.watch(vm, target);
        self.asker.want(vm, wants);
    }

    /// Adds to what a VM's monitor is asked from now on.
    pub(super) fn want(&mut self, vm: VmId, more: impl FnOnce(&mut Wants)) {
        let Some(known) = self.vms.get_mut(&vm) else {
            return;
        };
        let before = known.heard.wants;
        more(&mut known.heard.wants);
        if known.heard.wants != before {
            self.asker.want(vm, known.heard.wants);
            self.asker.ask_soon(vm);
        }
    }

    /// Sends a command to a VM's monitor. Waits at most the time left for commands. If the monitor did not answer last time,
    /// returns without waiting.
    pub(super) fn command(&mut self, vm: VmId, command: Command) -> Result<Value, CallError> {
        self.vm(vm)?;
        self.watch(vm);
        self.hear(vm);
        let known = self.vm(vm)?;
        let said = &known.heard.said;
        let is_resting = match &said.trouble {
            Some((_, until)) => self.is_asking || now() < *until,
            None => self.is_asking && said.visits_count == 0,
        };
        let no_monitor = known
            .no_monitor()
            .filter(|_| is_resting || known.told.monitors.is_empty());
        if let Some(cause) = no_monitor {
            return Err(CallError::Refused(cause));
        }
        let most = self.time_left.min(VISIT_MAX);
        if most == Ns::ZERO {
            // The result tells the next call whether this monitor answers.
            self.asker.ask_soon(vm);
            return Err(CallError::Refused(
                "monitors of other VMs have used up the time for this; retrying".to_owned(),
            ));
        }
        let begun = now();
        let answers = self.asker.command(vm, vec![command], most);
        self.time_left = self.time_left.saturating_sub(now().saturating_sub(begun));
        let answers = answers.map_err(|e| CallError::Refused(e.to_string()))?;
        Ok(answers.into_iter().next().unwrap_or(Value::Null))
    }

    /// Describes a VM again next time, since it was just changed.
    pub(super) fn look_soon(&mut self, vm: VmId) {
        if let Some(known) = self.vms.get_mut(&vm) {
            known.next_look = Ns::ZERO;
            self.asker.ask_soon(vm);
        }
    }

    /// Takes over new answers of a VM's monitor.
    pub(super) fn hear(&mut self, id: VmId) {
        if let Some(vm) = self.vms.get_mut(&id)
            && let Some(said) = self.asker.said(id, vm.process.pid)
        {
            vm.heard.said = said;
        }
    }

    /// Stores which threads run vCPUs, as a monitor reported it. The monitor's thread numbers are those of its own namespace.
    pub(super) fn take_in_vcpus(&mut self, vm: VmId, threads: &[Thread], told: &BTreeMap<i32, u16>) {
        let Some(known) = self.vms.get_mut(&vm) else {
            return;
        };
        let pid = known.process.pid;
        let vcpu = |thread: &Thread| {
            let index = *told.get(&task::innermost_id(&self.root, pid, thread.tid)?)?;
            let start_ticks = task::thread_start(&self.root, pid, thread.tid)?;
            let vcpu = VcpuThread {
                tid: thread.tid,
                start_ticks,
            };
            Some((thread.tid, (vcpu, index)))
        };
        let vcpus = threads.iter().filter(|thread| thread.tid != pid).filter_map(vcpu);
        known.heard.vcpus = vcpus.collect();
    }

    /// Forgets vCPU threads from the monitor or the journal that have ended; their numbers may belong to other threads now.
    pub(super) fn check_vcpus(&mut self, vm: VmId) {
        let at = now();
        if let Some(known) = self.vms.get_mut(&vm).filter(|vm| at >= vm.heard.next_check) {
            known.heard.next_check = at + CHECK_EVERY;
            let pid = known.process.pid;
            let is_same =
                |vcpu: &VcpuThread| task::thread_start(&self.root, pid, vcpu.tid) == Some(vcpu.start_ticks);
            known.heard.vcpus.retain(|_, (vcpu, _)| is_same(vcpu));
        }
    }

    /// Sets the roles of threads without names, from the monitor or from the journal of an earlier agent.
    pub(super) fn roles_told(&mut self, vm: VmId, threads: &[Thread]) {
        self.hear(vm);
        let Some(known) = self.vms.get(&vm) else { return };
        let heard = &known.heard;
        let asked_at = heard.said.heard.vcpus_at;
        if asked_at.is_some() && asked_at != heard.vcpus_at {
            let told = Arc::clone(&heard.said);
            self.take_in_vcpus(vm, threads, &told.heard.vcpus);
            if let Some(known) = self.vms.get_mut(&vm) {
                (known.heard.vcpus_at, known.heard.next_check) = (asked_at, now() + CHECK_EVERY);
            }
        } else {
            self.check_vcpus(vm);
        }
        let Some(known) = self.vms.get(&vm) else { return };
        if self.is_asking {
            if known.heard.vcpus.is_empty()
                && let Some(cause) = known
                    .no_monitor()
                    .filter(|_| known.heard.said.visits_count > 0 || known.told.monitors.is_empty())
            {
                let name = &known.name;
                self.notices.push(format!(
                    "VM {name} is left alone: the agent cannot tell which of its threads run vCPUs. They have no names \
                     (start it with `-name {name},debug-threads=on`), and {cause}"
                ));
            }
            self.want(vm, |wants| wants.vcpus = true);
        } else if known.heard.vcpus.is_empty()
            && let Ok(said) = self.command(vm, ("query-cpus-fast", json!({})))
        {
            self.take_in_vcpus(vm, threads, &questions::vcpus(&said));
        }
    }

    /// Returns the path of the VM's balloon among QEMU's objects.
    pub(super) fn balloon_path(&mut self, vm: VmId) -> Result<String, CallError> {
        self.hear(vm);
        if let Some(path) = self.vm(vm)?.heard.said.heard.balloon_path.clone() {
            return Ok(path);
        }
        for folder in questions::FOLDERS {
            let listed = self.command(vm, ("qom-list", json!({"path": folder})))?;
            if let Some(path) = questions::balloon_in(folder, &listed) {
                return Ok(path);
            }
        }
        Err(CallError::Refused("the VM has no balloon".to_owned()))
    }
}

/// Returns the paths of monitors without repetitions, even if they are spelled differently.
fn each_once(paths: &[String]) -> Vec<String> {
    let mut seen = BTreeSet::new();
    let plain = |path: &&String| {
        let parts = path.split('/').filter(|part| !matches!(*part, "" | "."));
        parts.collect::<Vec<_>>().join("/")
    };
    paths
        .iter()
        .filter(|path| seen.insert(plain(path)))
        .cloned()
        .collect()
}
