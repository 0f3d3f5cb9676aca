//! The model of the host: what is true, what happens when, and how the kernel answers. [`crate::library`] answers as libvirt.

use std::cell::{RefCell, RefMut};
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::panic::resume_unwind;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use homenode_kernel::fault::{Fault, Point};
use homenode_kernel::system::System;
use homenode_units::{CpuId, CpuSet, NodeId, NodeSet, Ns, PAGE_BYTES};

use crate::case::{At, CPUS, Case, End, Event, Planned, What};
use crate::trace::Trace;
use crate::vm::{Files, RAM, Vm};

/// How long the agent waits for a call to libvirt (`CALL_MAX` of `kvm::libvirt`).
const CALL_MAX: Ns = Ns::from_secs(8);
/// After this silence the guard kills the agent, whatever it waits for (`SILENCE_MAX` and `THAW` of `undo`).
const SILENCE_MAX: Ns = Ns::from_secs(27);

/// How long after the last failure the agent must succeed again.
const CALM_AFTER: Ns = Ns::from_secs(4);

/// A killed agent or guard: the payload of its unwinding.
pub(crate) struct Killed(pub(crate) End);

/// What the host is doing to the agent, and the other way round.
pub(crate) struct World(RefCell<State>);

/// A call that libvirt has not carried out yet.
struct LateCall {
    after: u32,
    issued: Ns,
    call: Box<dyn FnOnce() + Send>,
}

/// Failures that are due.
#[derive(Default)]
struct Armed {
    reads: Option<(i32, u32)>,
    disk_full: u32,
    write: Option<i32>,
    refused: u32,
    unanswered: u32,
    late: Vec<u32>,
    pub(crate) moves: Option<(i32, u32)>,
    kill: Option<End>,
}

/// The state of the host.
pub(crate) struct State {
    pub(crate) case: Case,
    pub(crate) time: Ns,
    pub(crate) files: Files,
    pub(crate) online: CpuSet,
    pub(crate) vms: Vec<Vm>,
    pub(crate) trace: Trace,
    /// What must never happen, and did.
    pub(crate) violations: Vec<String>,
    events: VecDeque<Event>,
    cycle: u32,
    reads: u32,
    acts: u32,
    armed: Armed,
    late: Vec<LateCall>,
    /// libvirtd is away until then; each of its lives has a number.
    pub(crate) away_until: Ns,
    pub(crate) libvirt_life: u32,
    /// The next call to libvirt is refused.
    pub(crate) refuses: bool,
    /// When the call was made that is being carried out, if late.
    pub(crate) issued: Option<Ns>,
    /// When what the agent does now began: a sample, a commit, an undo.
    pub(crate) phase_since: Ns,
    /// When the last sample began that succeeded.
    pub(crate) sampled: Ns,
    pub(crate) last_beat: Ns,
    /// Pages moved in this cycle, by VM.
    pub(crate) moved: Vec<u64>,
    /// What the planner is to decide in this cycle.
    pub(crate) plans: Vec<(usize, Planned)>,
    pub(crate) next: Numbers,
    pub(crate) busy: Vec<u64>,
    /// When failures ended. The agent may first wait for libvirt (`REST` of `kvm::libvirt`).
    pub(crate) calm_since: Option<Ns>,
    /// How often each failure happened.
    pub(crate) fault_count: u32,
}

/// The next free numbers.
pub(crate) struct Numbers {
    pub(crate) pid: i32,
    pub(crate) runtime_id: i32,
}

impl World {
    pub(crate) fn new(case: &Case, root: &Path) -> Rc<World> {
        let online: CpuSet = (0..CPUS * u32::from(case.nodes)).map(CpuId).collect();
        let mut state = State {
            time: Ns::from_secs(1000),
            files: Files(root.to_owned()),
            online: online.clone(),
            vms: case
                .vms
                .iter()
                .enumerate()
                .map(|(at, spec)| Vm::new(at, spec))
                .collect(),
            trace: Trace::default(),
            violations: Vec::new(),
            events: case.events.iter().cloned().collect(),
            cycle: 0,
            reads: 0,
            acts: 0,
            armed: Armed::default(),
            late: Vec::new(),
            away_until: Ns::ZERO,
            libvirt_life: 0,
            refuses: false,
            issued: None,
            phase_since: Ns::ZERO,
            sampled: Ns::ZERO,
            last_beat: Ns::from_secs(1000),
            moved: vec![0; case.vms.len()],
            plans: Vec::new(),
            next: Numbers {
                pid: 100_000,
                runtime_id: 1,
            },
            busy: vec![0; online.len()],
            calm_since: None,
            fault_count: 0,
            case: case.clone(),
        };
        state.write_host();
        for at in 0..state.vms.len() {
            state.start(at, false);
        }
        Rc::new(World(RefCell::new(state)))
    }

    pub(crate) fn state(&self) -> RefMut<'_, State> {
        self.0.borrow_mut()
    }

    /// Lets what is due at this point happen, and kills the acting agent or guard if that is due.
    fn pass(&self, kind: fn(u32) -> At) {
        let killed = self.state().pass(kind);
        if let Some(then) = killed {
            resume_unwind(Box::new(Killed(then)));
        }
    }

    /// Carries out the calls of an agent that has ended: libvirtd had accepted them.
    pub(crate) fn catch_up(&self) {
        let late = std::mem::take(&mut self.state().late);
        for late in late {
            self.carry_out(late);
        }
    }

    fn carry_out(&self, late: LateCall) {
        self.state().issued = Some(late.issued);
        (late.call)();
        self.state().issued = None;
    }

    /// What the journal's files answer.
    pub(crate) fn journal(&self, point: Point) -> Option<Fault> {
        if matches!(point, Point::Write | Point::Written) {
            self.pass(At::Act);
            let mut state = self.state();
            if state.armed.disk_full > 0 && point == Point::Write {
                state.armed.disk_full -= 1;
                state.failed("the disk is full");
                return Some(Fault::Refused);
            }
        }
        None
    }
}

impl System for World {
    fn now(&self) -> Ns {
        self.state().time
    }

    fn wait(&self, time: Duration) {
        self.state().time += Ns(time.as_nanos() as u64);
    }

    fn read(&self, path: &Path) -> io::Result<()> {
        // What lies elsewhere is about this process, such as its own identity for the lock.
        let Ok(path) = path.strip_prefix(&self.state().files.0).map(Path::to_owned) else {
            return Ok(());
        };
        self.pass(At::Read);
        let mut state = self.state();
        state.time += Ns(2_000);
        state.trace.hash(path.as_os_str().as_encoded_bytes());
        match &mut state.armed.reads {
            Some((_, 0)) | None => Ok(()),
            Some((errno, count)) => {
                *count -= 1;
                let errno = *errno;
                state.failed(&format!("error {errno} reading {}", path.display()));
                Err(io::Error::from_raw_os_error(errno))
            }
        }
    }

    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        self.pass(At::Act);
        let mut state = self.state();
        let shown = path
            .strip_prefix(&state.files.0)
            .unwrap_or(path)
            .display()
            .to_string();
        state.trace.add(format!("agent writes {text} to {shown}"));
        match state.armed.write.take() {
            Some(errno) => {
                state.failed(&format!("error {errno} writing {shown}"));
                Err(io::Error::from_raw_os_error(errno))
            }
            None => Ok(()),
        }
    }

    fn call(&self, call: Box<dyn FnOnce() + Send>) -> bool {
        self.pass(At::Act);
        self.state().time += Ns(100_000);
        let due: Vec<LateCall> = self.state().due_calls();
        due.into_iter().for_each(|late| self.carry_out(late));
        let late = self.state().armed.late.pop();
        if let Some(after) = late {
            let mut state = self.state();
            state.failed(&format!(
                "no answer to a call, which is carried out {after} calls later"
            ));
            let issued = state.time;
            state.time += CALL_MAX;
            state.late.push(LateCall { after, issued, call });
            return false;
        }
        {
            let mut state = self.state();
            state.refuses = state.armed.refused > 0;
            if state.refuses {
                state.armed.refused -= 1;
                state.failed("libvirt refuses a call");
            }
        }
        call();
        let mut state = self.state();
        state.refuses = false;
        let is_answered = state.armed.unanswered == 0;
        if !is_answered {
            state.armed.unanswered -= 1;
            state.time += CALL_MAX;
            state.failed("no answer to a call that was carried out");
        }
        drop(state);
        self.pass(At::Act);
        is_answered
    }

    fn pages(
        &self,
        pid: i32,
        addresses: &[usize],
        to: Option<NodeId>,
        status: &mut [i32],
    ) -> Result<(), i32> {
        if to.is_some() {
            self.pass(At::Act);
        }
        let mut state = self.state();
        state.time += Ns(10_000 + 300 * addresses.len() as u64);
        let running = |vm: &Vm| vm.run.as_ref().is_some_and(|run| run.pid == pid);
        let Some(at) = state.vms.iter().position(running) else {
            return Err(libc::ESRCH);
        };
        let page = |address: usize| (address as u64 - RAM) / PAGE_BYTES;
        let Some(to) = to else {
            let run = state.vms[at].run.as_ref().expect("a running VM");
            for (address, status) in addresses.iter().zip(status) {
                let node = run.pages.get(page(*address) as usize);
                *status = node.map_or(-libc::ENOENT, |node| i32::from(*node));
            }
            return Ok(());
        };
        let fault = match &mut state.armed.moves {
            Some((errno, count)) if *count > 0 => {
                *count -= 1;
                Some(*errno)
            }
            _ => None,
        };
        if let Some(errno) = fault {
            state.failed(&format!("error {errno} moving pages"));
            if [libc::EACCES, libc::EPERM, libc::EINVAL].contains(&errno) {
                return Err(errno);
            }
        }
        state.agent_moves(at, to);
        let run = state.vms[at].run.as_mut().expect("a running VM");
        let mut moved = 0;
        for (number, (address, status)) in addresses.iter().zip(status).enumerate() {
            // With an error of single pages, every second one stays.
            if let Some(errno) = fault.filter(|_| number % 2 == 0) {
                *status = -errno;
                continue;
            }
            match run.pages.get_mut(page(*address) as usize) {
                Some(node) => {
                    moved += u64::from(*node != to.0 as u8);
                    *node = to.0 as u8;
                    *status = i32::from(to.0);
                }
                None => *status = -libc::ENOENT,
            }
        }
        state.moved[at] += moved;
        let name = state.vms[at].name.clone();
        state
            .trace
            .add(format!("agent moves {moved} pages of {name} to node {to}"));
        let State { files, vms, case, .. } = &*state;
        files.memory(&vms[at], case.nodes);
        Ok(())
    }

    fn set_affinity(&self, _tid: i32, _cpus: &CpuSet) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EPERM))
    }
}

impl State {
    /// Writes the files that are about the whole host.
    fn write_host(&mut self) {
        self.files.write(
            "proc/self/mountinfo",
            "24 23 0:21 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        );
        self.files
            .write("etc/machine-id", "0123456789abcdef0123456789abcdef\n");
        self.files.write(
            "proc/sys/kernel/random/boot_id",
            "0a8fcb40-28a8-4b3f-a8b6-5e1f1f5f7f0b\n",
        );
        self.files.write("proc/sys/kernel/numa_balancing", "0\n");
        // Not a directory: guests are not told where they are.
        self.files.write("run/blocked", "");
        let nodes: NodeSet = (0..self.case.nodes).map(NodeId).collect();
        self.files
            .write("sys/fs/cgroup/cpuset.mems.effective", &format!("{nodes}\n"));
        self.write_cpus();
        for node in 0..self.case.nodes {
            let text = format!(
                "Node {node} MemTotal: 1048576 kB\nNode {node} MemFree: 524288 kB\nNode {node} Active(file): 1 kB\nNode {node} Inactive(file): 1 kB\n"
            );
            self.files
                .write(&format!("sys/devices/system/node/node{node}/meminfo"), &text);
        }
    }

    pub(crate) fn write_cpus(&mut self) {
        let line = |cpu: CpuId| {
            let busy = self.busy[cpu.0 as usize] / 10_000_000;
            format!("cpu{cpu} {busy} 0 0 1 0 0 0 0\n")
        };
        let text: String = self.online.iter().map(line).collect();
        self.files.write("proc/stat", &text);
        self.files
            .write("sys/devices/system/cpu/online", &format!("{}\n", self.online));
        self.files.write(
            "sys/fs/cgroup/cpuset.cpus.effective",
            &format!("{}\n", self.online),
        );
    }

    /// Something failed as planned.
    pub(crate) fn failed(&mut self, what: &str) {
        self.fault_count += 1;
        self.trace.add(format!("FAULT {what}"));
    }

    /// Begins a cycle: what is left of the last one happens now.
    pub(crate) fn begin_cycle(&mut self, cycle: u32) {
        while self.events.front().is_some_and(|event| event.cycle < cycle) {
            self.next_event();
        }
        (self.cycle, self.reads, self.acts) = (cycle, 0, 0);
        self.moved.iter_mut().for_each(|moved| *moved = 0);
        self.trace.cycle = cycle;
        while self
            .events
            .front()
            .is_some_and(|event| event.cycle == cycle && event.at == At::Start)
        {
            self.next_event();
        }
    }

    fn next_event(&mut self) {
        if let Some(event) = self.events.pop_front() {
            self.happen(&event.what);
        }
    }

    /// Ends all failures.
    pub(crate) fn calm(&mut self) {
        self.events.clear();
        self.armed = Armed::default();
        self.away_until = Ns::ZERO;
        self.calm_since = Some(self.time);
        for run in self.vms.iter_mut().filter_map(|vm| vm.run.as_mut()) {
            run.stale = None;
            run.balloon_follows = true;
        }
    }

    /// Counts a read or an act, and lets what is due happen. Returns how the one that acts is killed, if it is.
    fn pass(&mut self, kind: fn(u32) -> At) -> Option<End> {
        let count = match kind(0) {
            At::Read(_) => &mut self.reads,
            _ => &mut self.acts,
        };
        *count += 1;
        let (reads, acts) = (self.reads, self.acts);
        let is_due = |event: &Event, cycle: u32| {
            event.cycle == cycle
                && match event.at {
                    At::Start => true,
                    At::Read(number) => number < reads,
                    At::Act(number) => number < acts,
                }
        };
        // Events wait for those of other kinds that come before them in the case only if both are due.
        let due: Vec<usize> = (0..self.events.len())
            .filter(|at| is_due(&self.events[*at], self.cycle))
            .collect();
        for at in due.into_iter().rev() {
            let event = self.events.remove(at).expect("an event that was found");
            self.happen(&event.what);
        }
        self.armed.kill.take()
    }

    /// Calls that libvirt carries out before the next one.
    fn due_calls(&mut self) -> Vec<LateCall> {
        let (due, mut rest): (Vec<LateCall>, Vec<LateCall>) = std::mem::take(&mut self.late)
            .into_iter()
            .partition(|late| late.after == 0);
        rest.iter_mut().for_each(|late| late.after -= 1);
        self.late = rest;
        due
    }

    /// Whether libvirtd answers.
    pub(crate) fn is_away(&self) -> bool {
        self.time < self.away_until
    }

    fn happen(&mut self, what: &What) {
        match what {
            What::ReadFails { errno, count } => self.armed.reads = Some((*errno, *count)),
            What::DiskFull { count } => self.armed.disk_full = *count,
            What::WriteFails { errno } => self.armed.write = Some(*errno),
            What::Refused { count } => self.armed.refused = *count,
            What::Unanswered { count } => self.armed.unanswered = *count,
            What::Late { after } => self.armed.late.push(*after),
            What::MoveFails { errno, count } => self.armed.moves = Some((*errno, *count)),
            What::Kill { then } => self.armed.kill = Some(*then),
            What::Away { seconds } => {
                self.libvirt_life += 1;
                self.away_until = self.time + Ns::from_secs(*seconds);
                self.failed(&format!("libvirtd is away for {seconds} s"));
            }
            What::Stopped { seconds } => {
                self.time += Ns::from_secs(*seconds);
                self.last_beat = self.time;
                self.failed(&format!("the agent is stopped for {seconds} s"));
                if Ns::from_secs(*seconds) > SILENCE_MAX {
                    self.armed.kill = Some(End::Guard);
                }
            }
            other => self.operate(other),
        }
    }

    /// Whether nothing has failed for a while: then everything must succeed.
    pub(crate) fn is_calm(&self) -> bool {
        self.calm_since
            .is_some_and(|since| self.time > since + CALM_AFTER)
    }

    /// The agent's sign of life.
    pub(crate) fn beat(&mut self) {
        let silence = self.time.saturating_sub(self.last_beat);
        if silence > SILENCE_MAX {
            self.violate(format!(
                "the agent was silent for {silence}, so its guard would have killed it"
            ));
        }
        self.last_beat = self.time;
    }

    pub(crate) fn violate(&mut self, what: String) {
        self.trace.add(format!("VIOLATION {what}"));
        if self.violations.len() < 8 {
            self.violations.push(what);
        }
    }

    /// VMs that run.
    pub(crate) fn running(&self) -> BTreeSet<usize> {
        (0..self.vms.len())
            .filter(|at| self.vms[*at].run.is_some())
            .collect()
    }
}
