//! A fake of what a real libvirt does but the in-process test driver does not: threads run where they are pinned, quotas reach
//! cgroups, balloons lag. A call may fail, be carried out late, or be carried out without an answer.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use homenode_kernel::fault::{self, Fault, Point};
use homenode_units::{CpuSet, VmId};
use virt::domain::Domain;
use virt::error::Error;

use super::{CallError, QUOTA_MAX_US, SILENT};

/// The fake libvirt, as the module describes.
#[derive(Default)]
pub(crate) struct FakeLibvirt {
    /// Folder of handmade threads that run where they are pinned, and the main thread's number; the vCPUs' numbers follow it.
    pub threads: Option<(PathBuf, i32)>,
    /// CPUs of the cpuset to which the kernel confines these threads.
    pub cpuset: Option<CpuSet>,
    /// The vCPUs' cgroups.
    pub groups: Vec<PathBuf>,
    /// Abandoned calls, each with the number of other calls that are made before it is carried out.
    late: Vec<LateCall>,
    /// Memory in each domain's last XML.
    memory: BTreeMap<VmId, String>,
}

impl std::fmt::Debug for FakeLibvirt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {:?} {} late", self.threads, self.groups, self.late.len())
    }
}

type LateCall = (u32, Box<dyn FnOnce() + Send>);

/// How a call is made.
pub(crate) enum Call<C> {
    Now(C),
    Later(Receiver<()>),
}

impl FakeLibvirt {
    /// Returns a closure that runs a thread on these CPUs, as far as its cpuset has them.
    pub(crate) fn pin(
        &self,
        thread: i32,
        cpus: &CpuSet,
    ) -> Result<impl FnOnce() + Send + 'static, CallError> {
        let within = self.cpuset.as_ref().map(|cpuset| cpus.intersection(cpuset));
        let cpus = within.unwrap_or_else(|| cpus.clone());
        if cpus.is_empty() {
            let cause = format!("cannot set CPU affinity on process {thread}: Invalid argument");
            return Err(CallError::Refused(cause));
        }
        let status = format!("Cpus_allowed_list:\t{cpus}\nMems_allowed_list:\t0-1\n");
        let file = self
            .threads
            .as_ref()
            .map(|(task, main)| task.join(format!("{}/status", main + thread)));
        Ok(move || {
            if let Some(file) = file {
                // The VM may have ended.
                let _ = std::fs::write(file, status);
            }
        })
    }

    /// Returns a closure that sets the quota in the vCPUs' cgroups, if there are any.
    pub(crate) fn bandwidth(
        &self,
        period: Option<u64>,
        quota: Option<i64>,
    ) -> Option<impl FnOnce() + Send + 'static> {
        let groups = self.groups.clone();
        (!groups.is_empty()).then_some(move || {
            for group in &groups {
                write_cpu_max(group, period, quota);
            }
        })
    }

    /// A domain's XML, possibly with an outdated memory size.
    pub(crate) fn lag(&mut self, vm: VmId, xml: String) -> String {
        let of = |xml: &str| {
            Some(
                xml.split_once("<currentMemory")?
                    .1
                    .split_once("</currentMemory>")?
                    .0
                    .to_owned(),
            )
        };
        let Some(now) = of(&xml) else { return xml };
        let shown = match self.memory.get(&vm) {
            Some(was) if fault::at(Point::Balloon).is_some() => was.clone(),
            _ => now.clone(),
        };
        let lagging = xml.replacen(&now, &shown, 1);
        self.memory.insert(vm, shown);
        lagging
    }

    /// Decides before a call whether it fails, is made now, or is made later.
    pub(crate) fn before<T, C: FnOnce(&Domain) -> Result<T, Error> + Send + 'static>(
        &mut self,
        domain: &Domain,
        call: C,
    ) -> Result<Call<C>, CallError> {
        let (due, mut rest): (Vec<LateCall>, Vec<LateCall>) = std::mem::take(&mut self.late)
            .into_iter()
            .partition(|(after, _)| *after == 0);
        rest.iter_mut().for_each(|(after, _)| *after -= 1);
        self.late = rest;
        due.into_iter().for_each(|(_, call)| call());
        match fault::at(Point::Call) {
            None => Ok(Call::Now(call)),
            Some(Fault::Refused) => Err(CallError::Refused("it refuses".into())),
            Some(Fault::Lost) => Err(CallError::Lost(SILENT.to_owned())),
            Some(Fault::Late(after)) => {
                let (over, is_over) = sync_channel(1);
                let domain = domain.clone();
                let made = move || {
                    let _ = call(&domain);
                    drop::<SyncSender<()>>(over);
                };
                self.late.push((after, Box::new(made)));
                Ok(Call::Later(is_over))
            }
        }
    }

    /// Carries out all late calls.
    pub(crate) fn catch_up(&mut self) {
        std::mem::take(&mut self.late)
            .into_iter()
            .for_each(|(_, call)| call());
    }
}

/// Writes `cpu.max` like libvirt on cgroup v2.
fn write_cpu_max(group: &Path, period: Option<u64>, quota: Option<i64>) {
    let path = group.join("cpu.max");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|_| "max 100000".into());
    let (run, of) = text.trim().split_once(' ').expect("two numbers");
    let run = quota.map_or(run.to_owned(), |us| {
        if us < 0 || us == QUOTA_MAX_US {
            "max".into()
        } else {
            us.to_string()
        }
    });
    let of = period.map_or(of.to_owned(), |us| us.to_string());
    std::fs::write(&path, format!("{run} {of}\n")).expect("a file");
}
