//! The server of topology pages. It gives each VM's QEMU its own memory through the device `ivshmem-doorbell`, writes the guest's
//! page into it, and interrupts the guest.
//!
//! # Problem
//!
//! A guest learns where its vCPUs and its memory are from a page that its host writes ([`homenode_topology_page`]). The page has
//! to get into the guest without a patch to QEMU, and has to stay in place while the agent restarts. No VM may see another's
//! page. The other end (a guest's root, a QEMU that a guest took over, any local process) must not be able to harm the agent.
//!
//! # Terms
//!
//! *Peer*: a process that connected, usually QEMU. *Region*: the memory that a peer got. *Doorbell*: an eventfd that interrupts
//! the guest.
//!
//! # Algorithm
//!
//! - One socket serves all peers. The kernel says which process connects (`SO_PEERCRED`). A pidfd, taken at once, keeps referring
//!   to that process even if its number is reused. Each process gets one region, however many times it connects, and a doorbell
//!   for each connection. The server speaks QEMU's protocol (`docs/specs/ivshmem-spec`): version 0, the peer's number, -1 with
//!   the memory, the peer's number with its doorbell; words of 64 bits, little-endian.
//! - Every peer's number is 0, since its region has no other peers. Number 0 may own the memory (QEMU's `master=on`,
//!   `hw/misc/ivshmem.c`), which makes the page part of what is saved and migrated; without an owner, QEMU refuses both.
//! - A region is a sealed memfd. QEMU keeps its descriptor, so a new server finds the regions of the previous one under
//!   `/proc/PID/fd` ([`region_of`]). Doorbells cannot be found this way; guests look once a second without them.
//! - Pages are rewritten every [`REWRITE`], with their current sequence. This removes a guest's scribbles. It also replaces the
//!   page of the host that a VM was migrated from, which QEMU loads over this host's page.
//! - A region ends with its process.
//!
//! # Properties
//!
//! - No peer sees what was written for another process.
//! - The server reads no region. It is sealed: no peer can shorten it, which would kill the writing server with SIGBUS.
//! - Nothing that a peer does or fails to do stops the server: sending never blocks, and a separate thread rings doorbells, since
//!   a process that has a doorbell can make the ringing thread wait. In the worst case guests get no interrupts, and look by
//!   themselves.
//! - Regions and connections are bounded, in total and per user: [`REGIONS_MAX`], [`USER_REGIONS_MAX`], [`CONNECTIONS_MAX`]. All
//!   their descriptors together are limited to a share of what the agent may open ([`Part::TopologyPages`]), and one user's to
//!   half of that share. If these descriptors are used up, a process whose page was never written makes room: of the user with
//!   the most of them, first those without a connection, then the oldest. If there is no such process, the new one is refused.
//! - Any local user may connect, because QEMU does not run as the agent's user. A peer gets an empty page; only the caller of
//!   [`TopologyServer::publish`] decides whose page contains facts.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use homenode_topology_page::{BYTES, Facts, Mapping, Publisher, Topology};
use homenode_units::NodeId;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::fs::{
    MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create,
};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::{ClockId, clock_gettime};

use homenode_kernel::files::Part;

/// Most processes with a region.
pub const REGIONS_MAX: usize = 512;
/// Most processes of one user with a region: a user who uses up this number leaves room for others.
pub const USER_REGIONS_MAX: usize = 256;
/// Most connections of one process.
pub const CONNECTIONS_MAX: usize = 4;
/// How often pages are rewritten.
pub const REWRITE: Duration = Duration::from_secs(2);

const NAME: &str = "homenode-topology";
/// Every peer's number.
const PEER: i64 = 0;
/// Most doorbells that wait to be rung; others are dropped, since their guests look by themselves.
const RINGS_MAX: usize = 1024;
/// Pause after a failed accept: usually the descriptors are used up, and a retry would fail at once.
const PAUSE: Duration = Duration::from_millis(100);
/// Descriptors of a region (its process, its memory) and of a connection (its socket, its doorbell).
const REGION_FILES: usize = 2;
const CONNECTION_FILES: usize = 2;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another server listens on the socket.
    #[error("another server already listens on {path}: only one agent per host serves topology pages")]
    Taken {
        /// Path of the socket.
        path: PathBuf,
    },
    /// The path exists, but is not a socket.
    #[error("{path} exists and is not a socket; remove it or choose another path")]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The system refused a call.
    #[error("cannot serve topology pages on {path}: {cause}")]
    System {
        /// Path of the socket.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
}

/// A process has no page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "process {pid} has no topology page: a VM with an ivshmem-doorbell device on this agent's socket has one"
)]
pub struct NotServed {
    /// The process.
    pub pid: i32,
}

/// The server; ends when dropped, and peers keep their memory.
#[derive(Debug)]
pub struct TopologyServer {
    socket: PathBuf,
    regions: Arc<Mutex<Regions>>,
    rings: SyncSender<Arc<OwnedFd>>,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl TopologyServer {
    /// Listens on a socket and finds the regions of a previous server. The socket's directory must exist.
    ///
    /// Replaces the socket of a dead server. Any local user may connect; restrict the directory to prevent that.
    ///
    /// # Errors
    /// When another server listens on the socket, when the path is not a socket, or when the system refuses a call.
    pub fn listen(socket: &Path) -> Result<TopologyServer, ListenError> {
        let system = |cause: io::Error| ListenError::System {
            path: socket.to_owned(),
            cause,
        };
        let listener = bind(socket)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| system(error.into()))?;
        let watch = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| system(error.into()))?;
        let add = |fd: BorrowedFd<'_>, what: Event| {
            epoll::add(&watch, fd, what.data(), epoll::EventFlags::IN).map_err(|error| system(error.into()))
        };
        add(listener.as_fd(), Event::Peer)?;
        add(stop.as_fd(), Event::Stop)?;
        let mut regions = Regions {
            watch: Arc::new(watch),
            by_pid: BTreeMap::new(),
            files_max: Part::TopologyPages.share(usize::MAX),
            refusal: None,
        };
        regions.find_again();
        let regions = Arc::new(Mutex::new(regions));
        let (rings, doorbells) = sync_channel::<Arc<OwnedFd>>(RINGS_MAX);
        // Ringing may block, so this thread is never joined. It ends when the last server that can send to it is dropped.
        let ringing = thread::Builder::new().name("doorbells".into()).spawn(move || {
            for doorbell in doorbells {
                // If the counter is full, the guest is about to look anyway.
                let _ = rustix::io::write(&*doorbell, &1u64.to_ne_bytes());
            }
        });
        ringing.map_err(system)?;
        let shared = Arc::clone(&regions);
        let named = thread::Builder::new().name("topology".into());
        let thread = named.spawn(move || serve(&listener, &shared)).map_err(system)?;
        Ok(TopologyServer {
            socket: socket.to_owned(),
            regions,
            rings,
            stop,
            thread: Some(thread),
        })
    }

    /// Whether this process is alive and has a page.
    pub fn serves(&self, pid: i32) -> bool {
        lock(&self.regions).by_pid.get(&pid).is_some_and(Region::is_alive)
    }

    /// Takes the reason why a process was last refused; returns it once. The VM of that process does not start.
    pub fn take_refusal(&self) -> Option<String> {
        lock(&self.regions).refusal.take()
    }

    /// Writes these facts to the page of a process's guest, and interrupts the guest. Returns the page's sequence number.
    ///
    /// Unchanged facts are rewritten with their current sequence number.
    ///
    /// # Errors
    /// When the process has no page.
    pub fn publish(&self, pid: i32, topology: &Topology) -> Result<u64, NotServed> {
        let mut regions = lock(&self.regions);
        let region = regions.by_pid.get_mut(&pid).filter(|region| region.is_alive());
        let region = region.ok_or(NotServed { pid })?;
        region.tell(topology);
        for connection in &region.connections {
            let _ = self.rings.try_send(Arc::clone(&connection.doorbell));
        }
        Ok(region.sequence)
    }
}

impl Drop for TopologyServer {
    fn drop(&mut self) {
        if rustix::io::write(&self.stop, &1u64.to_ne_bytes()).is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
        let _ = fs::remove_file(&self.socket);
    }
}

fn lock(regions: &Mutex<Regions>) -> MutexGuard<'_, Regions> {
    regions.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Creates a socket at this path. All users may connect to it from the moment it appears there.
fn bind(path: &Path) -> Result<UnixListener, ListenError> {
    let system = |cause: io::Error| ListenError::System {
        path: path.to_owned(),
        cause,
    };
    if let Ok(found) = fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return Err(ListenError::NotASocket {
                path: path.to_owned(),
            });
        }
        if UnixStream::connect(path).is_ok() {
            return Err(ListenError::Taken {
                path: path.to_owned(),
            });
        }
    }
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}", std::process::id()));
    let beside = PathBuf::from(beside);
    let _ = fs::remove_file(&beside);
    let listener = UnixListener::bind(&beside).map_err(system)?;
    let ready = listener
        .set_nonblocking(true)
        .and_then(|()| fs::set_permissions(&beside, Permissions::from_mode(0o666)))
        .and_then(|()| fs::rename(&beside, path));
    if let Err(cause) = ready {
        let _ = fs::remove_file(&beside);
        return Err(system(cause));
    }
    Ok(listener)
}

/// Events that the server's thread waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Stop,
    Peer,
    /// A process ended.
    End(i32),
    /// A process closed a connection.
    Close(i32),
}

impl Event {
    fn data(self) -> epoll::EventData {
        let (kind, pid) = match self {
            Event::Stop => (0, 0),
            Event::Peer => (1, 0),
            Event::End(pid) => (2, pid),
            Event::Close(pid) => (3, pid),
        };
        epoll::EventData::new_u64(kind << 32 | u64::from(pid.cast_unsigned()))
    }

    fn of(data: epoll::EventData) -> Event {
        let (kind, pid) = (data.u64() >> 32, (data.u64() as u32).cast_signed());
        match kind {
            0 => Event::Stop,
            1 => Event::Peer,
            2 => Event::End(pid),
            _ => Event::Close(pid),
        }
    }
}

/// Whether a descriptor is now ready for `what`.
fn is_so(fd: &impl AsFd, what: PollFlags) -> bool {
    poll(&mut [PollFd::new(fd, what)], Some(&Timespec::default())).is_ok_and(|count| count > 0)
}

/// Runs the server's thread.
fn serve(listener: &UnixListener, regions: &Mutex<Regions>) {
    let watch = Arc::clone(&lock(regions).watch);
    let mut events = [MaybeUninit::uninit(); 16];
    let mut written = Instant::now();
    loop {
        let wait = REWRITE.saturating_sub(written.elapsed());
        let wait = Timespec {
            tv_sec: wait.as_secs().cast_signed(),
            tv_nsec: wait.subsec_nanos().into(),
        };
        // Only a signal can interrupt the wait; that counts as no events.
        let (happened, _) = epoll::wait(&*watch, &mut events, Some(&wait)).unwrap_or_default();
        for event in happened {
            match Event::of(event.data) {
                Event::Stop => return,
                Event::Peer => match listener.accept() {
                    // A refused peer sees its connection closed.
                    Ok((stream, _)) => lock(regions).meet(stream),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => {
                        lock(regions).refusal =
                            Some(format!("cannot accept a client of topology pages: {error}"));
                        thread::sleep(PAUSE);
                    }
                },
                // The last two events may be about a former process with the same number.
                Event::End(pid) => lock(regions)
                    .by_pid
                    .retain(|other, region| *other != pid || region.is_alive()),
                Event::Close(pid) => {
                    if let Some(region) = lock(regions).by_pid.get_mut(&pid) {
                        region
                            .connections
                            .retain(|connection| !is_so(&connection.stream, PollFlags::RDHUP));
                    }
                }
            }
        }
        if written.elapsed() >= REWRITE {
            lock(regions).by_pid.values_mut().for_each(Region::write_again);
            written = Instant::now();
        }
    }
}

#[derive(Debug)]
struct Regions {
    watch: Arc<OwnedFd>,
    by_pid: BTreeMap<i32, Region>,
    /// Most descriptors that all regions and connections may use.
    files_max: usize,
    refusal: Option<String>,
}

impl Regions {
    /// Adds the regions that living processes got from a previous server.
    fn find_again(&mut self) {
        let Ok(processes) = fs::read_dir("/proc") else {
            return;
        };
        let pids = processes
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        // This process holds the regions that it handed out itself.
        for pid in pids.filter(|pid| *pid != std::process::id().cast_signed()) {
            // The pidfd is opened first: if the number is reused meanwhile, the pidfd shows that its process has ended.
            let Ok(process) = pidfd(pid) else {
                continue;
            };
            if let Ok(Some(memory)) = region_of(pid)
                && let Ok(user) = fs::metadata(format!("/proc/{pid}"))
                && let Ok(region) = Region::new(process, user.uid(), memory)
            {
                let _ = self.add(pid, region);
            }
        }
    }

    /// Makes room for this many more descriptors of a process. Drops other processes whose pages were never written.
    fn make_room(&mut self, (pid, user): (i32, u32), files: usize) -> io::Result<()> {
        let user_max = self.files_max / 2;
        loop {
            let (mut all, mut untold) = (BTreeMap::<u32, usize>::new(), BTreeMap::<u32, usize>::new());
            for (other, region) in &self.by_pid {
                *all.entry(region.user).or_default() += region.files();
                if region.told.is_none() && *other != pid {
                    *untold.entry(region.user).or_default() += region.files();
                }
            }
            let of_user = all.get(&user).copied().unwrap_or_default();
            let total: usize = all.values().sum();
            let from = if of_user + files > user_max {
                Some(user)
            } else if total + files > self.files_max {
                untold
                    .into_iter()
                    .max_by_key(|(_, files)| *files)
                    .map(|(user, _)| user)
            } else {
                return Ok(());
            };
            let makes_room = |(other, region): &(&i32, &Region)| {
                **other != pid && region.told.is_none() && Some(region.user) == from
            };
            let candidates = self.by_pid.iter().filter(makes_room);
            let first = candidates.min_by_key(|(_, region)| (!region.connections.is_empty(), region.since));
            let Some(first) = first.map(|(other, _)| *other) else {
                return Err(io::Error::other(format!(
                    "{total} files are open for topology pages, {of_user} of them for its user (at most {} and {user_max}; raise \
                     LimitNOFILE in the service)",
                    self.files_max
                )));
            };
            self.by_pid.remove(&first);
        }
    }

    fn add(&mut self, pid: i32, region: Region) -> io::Result<()> {
        self.make_room((pid, region.user), region.files())?;
        let of_user = self
            .by_pid
            .values()
            .filter(|other| other.user == region.user)
            .count();
        if self.by_pid.len() >= REGIONS_MAX || of_user >= USER_REGIONS_MAX {
            return Err(io::Error::other(format!(
                "{} processes already have one, {of_user} of them of its user (at most {REGIONS_MAX} and {USER_REGIONS_MAX})",
                self.by_pid.len()
            )));
        }
        epoll::add(
            &*self.watch,
            &region.process,
            Event::End(pid).data(),
            epoll::EventFlags::IN,
        )?;
        self.by_pid.insert(pid, region);
        Ok(())
    }

    /// Admits a new peer, or notes why not and closes its connection.
    fn meet(&mut self, stream: UnixStream) {
        let outcome = credentials(&stream).map_err(|error| (0, error));
        let outcome = outcome.and_then(|peer| self.admit(stream, &peer).map_err(|error| (peer.pid, error)));
        if let Err((pid, error)) = outcome {
            self.refusal = Some(format!("process {pid} gets no topology page: {error}"));
        }
    }

    /// Gives a connected process its region and a doorbell.
    fn admit(&mut self, stream: UnixStream, peer: &libc::ucred) -> io::Result<()> {
        // A former process may have had this number, and its end may not have been noticed yet.
        if self
            .by_pid
            .get(&peer.pid)
            .is_some_and(|region| !region.is_alive())
        {
            self.by_pid.remove(&peer.pid);
        }
        let files = match self.by_pid.contains_key(&peer.pid) {
            true => CONNECTION_FILES,
            false => REGION_FILES + CONNECTION_FILES,
        };
        self.make_room((peer.pid, peer.uid), files)?;
        if !self.by_pid.contains_key(&peer.pid) {
            let mut region = Region::new(pidfd(peer.pid)?, peer.uid, new_memory()?)?;
            // This page is not rewritten, since a page that QEMU may load over it says more.
            region.sequence = region.publisher(region.sequence).publish(&nothing_known()?);
            self.add(peer.pid, region)?;
        }
        let Some(region) = self.by_pid.get_mut(&peer.pid) else {
            return Ok(());
        };
        if region.connections.len() >= CONNECTIONS_MAX {
            return Err(io::Error::other(format!(
                "it already has {CONNECTIONS_MAX} connections"
            )));
        }
        let doorbell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        send(&stream, 0, None)?;
        send(&stream, PEER, None)?;
        send(&stream, -1, Some(region.memory.as_fd()))?;
        send(&stream, PEER, Some(doorbell.as_fd()))?;
        // This event is not sent when the peer writes something, which is never read.
        let closed = epoll::EventFlags::RDHUP;
        epoll::add(&*self.watch, &stream, Event::Close(peer.pid).data(), closed)?;
        let doorbell = Arc::new(doorbell);
        region.connections.push(Connection { stream, doorbell });
        Ok(())
    }
}

#[derive(Debug)]
struct Connection {
    stream: UnixStream,
    doorbell: Arc<OwnedFd>,
}

#[derive(Debug)]
struct Region {
    process: OwnedFd,
    user: u32,
    memory: File,
    page: Mapping,
    /// The last sequence number written; before the first, a number that the page has not had yet.
    sequence: u64,
    told: Option<Topology>,
    connections: Vec<Connection>,
    /// When the region was created, or found again.
    since: Instant,
}

impl Region {
    fn new(process: OwnedFd, user: u32, memory: File) -> io::Result<Region> {
        let now = clock_gettime(ClockId::Realtime);
        let now_ns = now.tv_sec.wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec);
        Ok(Region {
            process,
            user,
            page: Mapping::new(&memory)?,
            memory,
            sequence: now_ns.cast_unsigned() & !1,
            told: None,
            connections: Vec::new(),
            since: Instant::now(),
        })
    }

    /// Number of the region's descriptors.
    fn files(&self) -> usize {
        REGION_FILES + CONNECTION_FILES * self.connections.len()
    }

    fn is_alive(&self) -> bool {
        !is_so(&self.process, PollFlags::IN)
    }

    fn publisher(&self, before: u64) -> Publisher<'_> {
        Publisher::new(self.page.words(), before)
    }

    fn tell(&mut self, topology: &Topology) {
        if self.told.as_ref() == Some(topology) {
            self.write_again();
            return;
        }
        self.sequence = self.publisher(self.sequence).publish(topology);
        self.told = Some(topology.clone());
    }

    fn write_again(&mut self) {
        if let Some(topology) = &self.told {
            self.publisher(self.sequence.wrapping_sub(2)).publish(topology);
        }
    }
}

/// Returns the contents of a new page: no vCPU's node is known.
fn nothing_known() -> io::Result<Topology> {
    let facts = Facts {
        vcpu_pnode: vec![None],
        vnode_pnode: vec![Some(NodeId(0))],
        distances: vec![vec![homenode_topology_page::LOCAL_DISTANCE]],
    };
    Topology::new(facts).map_err(io::Error::other)
}

fn new_memory() -> io::Result<File> {
    let memory = memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&memory, BYTES as u64)?;
    fcntl_add_seals(&memory, SEALS | SealFlags::SEAL)?;
    Ok(memory.into())
}

/// Returns the memory that a process got from a server of topology pages; `None` if it has none.
///
/// # Errors
/// When the process has ended, or belongs to another user.
pub fn region_of(pid: i32) -> io::Result<Option<File>> {
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        // `O_PATH` opens a file without any effect on it, in case it is something else.
        let Ok(held) = rustix::fs::open(entry?.path(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) else {
            continue;
        };
        let held_path = format!("/proc/self/fd/{}", held.as_raw_fd());
        let name = fs::read_link(&held_path)?;
        if !name.to_string_lossy().starts_with(&format!("/memfd:{NAME} ")) {
            continue;
        }
        let memory = File::options().read(true).write(true).open(&held_path)?;
        // Any process may have created it: what matters is that it cannot be shortened, and has pages of the usual size.
        let usual = rustix::fs::fstatfs(&memory)?.f_type == libc::TMPFS_MAGIC;
        if usual && fcntl_get_seals(&memory)?.contains(SEALS) && memory.metadata()?.len() == BYTES as u64 {
            return Ok(Some(memory));
        }
    }
    Ok(None)
}

fn pidfd(pid: i32) -> io::Result<OwnedFd> {
    // The number is 0 if the peer is in another namespace, and so has no number here.
    let pid = Pid::from_raw(pid).ok_or_else(|| io::Error::other("a process without a number"))?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

/// Returns the credentials of the process that connected.
#[allow(unsafe_code)] // the safe wrapper takes every number for a process's, and 0 is none
fn credentials(stream: &UnixStream) -> io::Result<libc::ucred> {
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `bytes` bytes of numbers to `peer`.
    let status = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut bytes,
        )
    };
    if status == 0 {
        Ok(peer)
    } else {
        Err(io::Error::last_os_error())
    }
}

fn send(stream: &UnixStream, word: i64, file: Option<BorrowedFd<'_>>) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
    if !files.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&files));
    }
    let word = word.to_le_bytes();
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(stream, &[io::IoSlice::new(&word)], &mut ancillary, flags)?;
    Ok(())
}
