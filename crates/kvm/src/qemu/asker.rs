//! The thread that asks monitors on behalf of the agent's loop, and the monitors' last answers.
//!
//! ```text
//!   loop ── VMs to ask, commands ──▶ monitors (poll over all sockets) ── sockets to open ──▶ opener (may hang)
//!    ▲                                     │        ▲                                           │
//!    └──── last answers: Board ◀───────────┘        └──────────────── connections ──────────────┘
//! ```
//!
//! The loop reads the board and waits only for its own commands, for a limited time. The path of a socket may cross a file system
//! that does not answer (FUSE of QEMU's own user, NFS), so another thread opens sockets. If that thread hangs, a new thread takes
//! its place, up to a limit. A VM whose opening hangs is not asked until the hanging thread returns.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use homenode_kernel::files::Part;
use homenode_kernel::now;
use homenode_units::{Ns, VmId};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use serde_json::Value;

use super::monitor::{self, Command, MonitorError, broken};
use super::questions::Wants;
use super::visits::{CONNECTIONS_MAX, Job, Opening, Said, Target, Visits, Which};

/// How long opening a socket may take before another thread opens the next.
const OPEN_MAX: Ns = Ns(250_000_000);
/// Most threads that may hang while opening a socket.
const HUNG_MAX: usize = 8;

/// Function that opens a socket: [`monitor::connect`], except in tests.
type Open = fn(&Path, i32, &str) -> Result<UnixStream, MonitorError>;

/// Messages to the thread that asks.
enum Message {
    Watch(VmId, Target),
    Forget(VmId),
    Want(VmId, Wants),
    AskSoon(VmId),
    Command(VmId, Job),
    Opened(VmId, u64, Result<UnixStream, MonitorError>),
    End,
}

/// The last answers of monitors, by VM.
#[derive(Debug, Default)]
struct Board {
    vms: BTreeMap<VmId, Arc<Said>>,
    notices: Vec<String>,
}

#[derive(Debug, Default)]
struct Shared {
    board: Mutex<Board>,
    changed: Condvar,
}

impl Shared {
    fn board(&self) -> MutexGuard<'_, Board> {
        // The data is intact even if the lock is poisoned: no code that panics holds it.
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why monitors cannot be asked.
#[derive(Debug, thiserror::Error)]
enum NoThread {
    #[error("{0}")]
    Wake(#[from] Errno),
    #[error("no thread could be started {purpose}: {cause}")]
    NotStarted {
        purpose: &'static str,
        cause: std::io::Error,
    },
}

/// Connection to a thread that waits in poll.
#[derive(Clone, Debug)]
struct Line {
    inbox: Sender<Message>,
    wake: Arc<OwnedFd>,
}

impl Line {
    fn send(&self, message: Message) {
        // The thread ends only when told to, and no message follows that.
        if self.inbox.send(message).is_ok() {
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }
}

/// Asks monitors, as the module describes. Its thread starts with the first VM that has a monitor.
#[derive(Debug)]
pub(super) struct Asker {
    root: PathBuf,
    open: Open,
    line: Option<Result<Line, NoThread>>,
    watched: BTreeSet<VmId>,
    shared: Arc<Shared>,
}

impl Asker {
    /// An asker for processes below a root (`/`).
    pub(super) fn new(root: &Path) -> Asker {
        Asker {
            root: root.to_owned(),
            open: monitor::connect,
            line: None,
            watched: BTreeSet::new(),
            shared: Arc::default(),
        }
    }

    fn line(&mut self) -> Result<&Line, &NoThread> {
        let (root, open, shared) = (&self.root, self.open, &self.shared);
        self.line
            .get_or_insert_with(|| begin(root, open, shared))
            .as_ref()
    }

    fn send(&mut self, message: Message) {
        if let Ok(line) = self.line() {
            line.send(message);
        }
    }

    /// Starts asking a VM's monitors.
    pub(super) fn watch(&mut self, vm: VmId, target: Target) {
        self.watched.insert(vm);
        self.send(Message::Watch(vm, target));
        if let Some(Err(cause)) = &self.line {
            let text =
                format!("monitors of VMs are not queried, so the state of balloons is unknown: {cause}");
            self.shared.board().notices.push(text);
        }
    }

    /// Forgets all VMs for which `is_there` returns false.
    pub(super) fn keep_only(&mut self, is_there: impl Fn(VmId) -> bool) {
        let gone: Vec<VmId> = self.watched.iter().copied().filter(|vm| !is_there(*vm)).collect();
        for vm in gone {
            self.watched.remove(&vm);
            self.send(Message::Forget(vm));
        }
    }

    /// Sets what to ask a VM's monitor besides whether the VM runs.
    pub(super) fn want(&mut self, vm: VmId, wants: Wants) {
        self.send(Message::Want(vm, wants));
    }

    /// Asks a VM's monitor soon, unless the VM rests.
    pub(super) fn ask_soon(&mut self, vm: VmId) {
        self.send(Message::AskSoon(vm));
    }

    /// Returns the last answers of a VM's monitors if this process runs the VM; `None` before the first visit has ended.
    pub(super) fn said(&self, vm: VmId, pid: i32) -> Option<Arc<Said>> {
        let board = self.shared.board();
        board.vms.get(&vm).filter(|said| said.pid == pid).cloned()
    }

    /// Carries out commands one after the other, and waits at most `most`.
    ///
    /// # Errors
    /// When not all commands were carried out; the first ones may have been.
    pub(super) fn command(
        &mut self,
        vm: VmId,
        commands: Vec<Command>,
        most: Ns,
    ) -> Result<Vec<Value>, MonitorError> {
        let line = self.line().map_err(|cause| broken("(none)", cause))?;
        let (reply, answer) = sync_channel(1);
        let until = now() + most;
        line.send(Message::Command(
            vm,
            Job {
                commands,
                until,
                reply,
            },
        ));
        let answer = answer.recv_timeout(Duration::from_nanos(most.0));
        answer.unwrap_or(Err(MonitorError::NoTime(
            "the VM's monitor did not answer in time",
        )))
    }

    /// Waits until each of these VMs was visited, for at most `most`.
    pub(super) fn wait_for(&self, vms: &[VmId], most: Duration) {
        let is_missing = |board: &mut Board| vms.iter().any(|vm| !board.vms.contains_key(vm));
        // A poisoned lock ends the wait; the known answers stay.
        drop(
            self.shared
                .changed
                .wait_timeout_while(self.shared.board(), most, is_missing),
        );
    }

    pub(super) fn take_notices(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.board().notices)
    }
}

impl Drop for Asker {
    fn drop(&mut self) {
        if let Some(Ok(line)) = &self.line {
            line.send(Message::End);
        }
    }
}

/// Starts the thread that asks monitors.
fn begin(root: &Path, open: Open, shared: &Arc<Shared>) -> Result<Line, NoThread> {
    let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let (inbox, received) = channel();
    let line = Line {
        inbox,
        wake: Arc::new(wake),
    };
    let mut asking = Asking {
        visits: Visits::new(Part::Monitors.share(CONNECTIONS_MAX)),
        openers: Openers {
            root: root.to_owned(),
            open,
            line: line.clone(),
            idle: None,
            busy: None,
            hung: BTreeSet::new(),
        },
        received,
        shared: Arc::clone(shared),
    };
    let named = std::thread::Builder::new().name("monitors".into());
    let begun = named.spawn(move || while asking.go_on() {});
    begun.map_err(|cause| NoThread::NotStarted {
        purpose: "for that",
        cause,
    })?;
    Ok(line)
}

/// State of the thread that asks monitors.
struct Asking {
    visits: Visits,
    openers: Openers,
    received: Receiver<Message>,
    shared: Arc<Shared>,
}

impl Asking {
    /// Waits until there is something to do, and does it. Returns whether to go on.
    fn go_on(&mut self) -> bool {
        self.wait();
        let mut messages = Vec::new();
        messages.extend(self.received.try_iter());
        for message in messages {
            if !self.take_in(message) {
                return false;
            }
        }
        let at = now();
        if let Some(hung) = self.openers.take_hung(at) {
            self.visits.hangs(hung, at);
        }
        self.visits.tick(at);
        while let Some(opening) = self.visits.outcome.to_open.pop_front() {
            match self.openers.hand_over(opening, at) {
                Handed::Over => {}
                Handed::Back(opening) => {
                    self.visits.outcome.to_open.push_front(opening);
                    break;
                }
                Handed::Refused(opening, cause) => {
                    let error = broken(&opening.path, &cause);
                    self.visits.opened((opening.vm, opening.ticket), Err(error), at);
                }
            }
        }
        self.publish();
        true
    }

    fn take_in(&mut self, message: Message) -> bool {
        let at = now();
        match message {
            Message::Watch(vm, target) => self.visits.watch(vm, target, at),
            Message::Forget(vm) => {
                self.visits.forget(vm);
                self.shared.board().vms.remove(&vm);
            }
            Message::Want(vm, wants) => self.visits.want(vm, wants),
            Message::AskSoon(vm) => self.visits.ask_soon(vm, at),
            Message::Command(vm, job) => self.visits.command(vm, job, at),
            Message::Opened(vm, ticket, result) => {
                self.openers.came_back(ticket);
                self.visits.opened((vm, ticket), result, at);
            }
            Message::End => return false,
        }
        true
    }

    /// Waits for a message, a monitor, or the next due time; advances the conversations that are ready.
    fn wait(&mut self) {
        let at = now();
        let next = self
            .visits
            .next_event()
            .into_iter()
            .chain(self.openers.next_event())
            .min();
        let left = next.map(|next| Duration::from_nanos(next.saturating_sub(at).0));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut of: Vec<(VmId, Which)> = Vec::new();
        let mut polled = vec![PollFd::new(&self.openers.line.wake, PollFlags::IN)];
        for (vm, which, conversation) in self.visits.connections() {
            let out = if conversation.wants_to_write() {
                PollFlags::OUT
            } else {
                PollFlags::empty()
            };
            of.push((vm, which));
            polled.push(PollFd::new(conversation, PollFlags::IN | out));
        }
        // An interruption counts as nothing being ready.
        let _ = poll(&mut polled, left.as_ref());
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let is_woken = is_ready(&polled[0]);
        let ready: Vec<(VmId, Which)> = of
            .into_iter()
            .zip(&polled[1..])
            .filter(|(_, fd)| is_ready(fd))
            .map(|(of, _)| of)
            .collect();
        drop(polled);
        if is_woken {
            let _ = rustix::io::read(&self.openers.line.wake, &mut [0u8; 8]);
        }
        let at = now();
        for (vm, which) in ready {
            self.visits.ready(vm, which, at);
        }
    }

    fn publish(&mut self) {
        let outcome = &mut self.visits.outcome;
        if outcome.said.is_empty() && outcome.notices.is_empty() {
            return;
        }
        let mut board = self.shared.board();
        board.vms.extend(outcome.said.drain(..));
        board.notices.append(&mut outcome.notices);
        self.shared.changed.notify_all();
    }
}

/// Threads that open sockets, one socket at a time. A thread that hangs is abandoned.
struct Openers {
    root: PathBuf,
    open: Open,
    line: Line,
    /// Sends work to the thread that does not hang.
    idle: Option<Sender<Opening>>,
    /// The VM and ticket being opened, and since when.
    busy: Option<(VmId, u64, Ns)>,
    hung: BTreeSet<u64>,
}

/// Result of handing over a socket to open.
enum Handed {
    Over,
    /// The opening must wait until the thread is free.
    Back(Opening),
    Refused(Opening, String),
}

impl Openers {
    fn hand_over(&mut self, opening: Opening, at: Ns) -> Handed {
        if self.busy.is_some() {
            return Handed::Back(opening);
        }
        if self.hung.len() >= HUNG_MAX {
            let cause = format!("opening {HUNG_MAX} other monitors hangs already, so no more are opened");
            return Handed::Refused(opening, cause);
        }
        let of = (opening.vm, opening.ticket, at);
        let idle = match self.idle.take().map_or_else(|| self.begin(), Ok) {
            Ok(idle) => idle,
            Err(cause) => return Handed::Refused(opening, cause.to_string()),
        };
        if let Err(unsent) = idle.send(opening) {
            return Handed::Refused(unsent.0, "the thread that opens it has ended".to_owned());
        }
        (self.idle, self.busy) = (Some(idle), Some(of));
        Handed::Over
    }

    fn begin(&self) -> Result<Sender<Opening>, NoThread> {
        let (to_open, received) = channel::<Opening>();
        let (root, open, line) = (self.root.clone(), self.open, self.line.clone());
        let named = std::thread::Builder::new().name("monitor-open".into());
        let begun = named.spawn(move || {
            for Opening {
                ticket,
                vm,
                pid,
                path,
            } in received
            {
                let result = open(&root, pid, &path);
                line.send(Message::Opened(vm, ticket, result));
            }
        });
        begun.map_err(|cause| NoThread::NotStarted {
            purpose: "to open it",
            cause,
        })?;
        Ok(to_open)
    }

    fn next_event(&self) -> Option<Ns> {
        self.busy.map(|(_, _, since)| since + OPEN_MAX)
    }

    /// Returns the current opening if it hangs by now. Another thread then opens the next.
    fn take_hung(&mut self, at: Ns) -> Option<(VmId, u64)> {
        let (vm, ticket, _) = self.busy.take_if(|(_, _, since)| *since + OPEN_MAX <= at)?;
        self.hung.insert(ticket);
        self.idle = None;
        Some((vm, ticket))
    }

    fn came_back(&mut self, ticket: u64) {
        self.busy.take_if(|(_, its, _)| *its == ticket);
        self.hung.remove(&ticket);
    }
}

#[cfg(test)]
pub(super) mod tests;
