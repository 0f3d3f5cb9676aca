//! The agent's server: a Unix socket for `numad`, libvirt's hook, our own commands and other programs.
//!
//! A connection carries one request and one answer, each a line of JSON. One thread waits in epoll for all clients, so a silent
//! client delays no other, and an idle server does nothing. The server shares the control loop's state. The loop does not hold
//! the lock of that state while it acts, so an answer takes a millisecond even while gigabytes of pages move. Changes to the host
//! are queued for the loop; the client waits for the result without blocking the server.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use homenode_api::{Answer, ApiError, REQUEST_BYTES_MAX, Reply, Request, remedy, socket_path};
use homenode_kernel::files::Part;
use homenode_undo::peer::GroupId;
use homenode_undo::state_dir::StateDir;
use mio::net::{UnixListener, UnixStream};
use mio::{Events, Interest, Poll, Token, Waker};

use crate::handler::{Answered, Handler};
use crate::role::{OPERATORS, Readers, Role, VIEWERS_READ};
use crate::setting_queue::NotSet;

/// How long a client may take in total to send its request, and then to read its answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// Extra time for each mebibyte of a long answer.
const PATIENCE_PER_MIB: Duration = Duration::from_millis(100);
/// Most bytes of pending answers; beyond that, the oldest answers are dropped with their clients.
const ANSWERS_BYTES_MAX: usize = 512 << 20;
/// How long a client waits for the loop, which moving pages may keep busy for a while.
const PATIENCE_LOOP: Duration = Duration::from_secs(30);
/// Most clients at one time; beyond that, one is dropped to make room. The limit is lower if the process may open fewer than four
/// times as many files.
const CLIENTS_MAX: usize = 4096;
/// Most clients accepted in one turn, before those already connected are served.
const TURN: usize = 64;
/// How long to wait before accepting again after the process ran out of file descriptors.
const KNOCK_AGAIN: Duration = Duration::from_millis(50);
/// The key of the listening socket in the poll.
const LISTENER: usize = 0;
/// The key of the waker in the poll, which signals that the loop has carried something out, or that the server must close.
const WOKEN: usize = 1;
/// The key of the first client in the poll.
const CLIENTS: usize = 2;
/// Most events taken from one poll.
const EVENTS: usize = 256;
const BUSY: &str = "the agent is busy or stopping; check with `homenode vm` whether the change was made";

/// The open server. Closing it removes the socket.
pub struct Server {
    path: PathBuf,
    closing: Arc<AtomicBool>,
    waker: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Opens the server. Replaces the socket of a dead agent; the caller must hold the agent's lock.
    pub fn open(state: &Path, readers: Readers, handler: Handler) -> anyhow::Result<Server> {
        let path = socket_path(state);
        anyhow::ensure!(
            net::UnixStream::connect(&path).is_err(),
            "an agent is listening at {} already",
            path.display()
        );
        let listener = listen(state, &path, readers)?;
        let mut listener = UnixListener::from_std(listener);
        let poll = Poll::new().context("cannot set up waiting for clients")?;
        let registry = poll.registry();
        let registered = registry.register(&mut listener, Token(LISTENER), Interest::READABLE);
        registered.context("cannot set up waiting for clients")?;
        let waker =
            Arc::new(Waker::new(registry, Token(WOKEN)).context("cannot set up waiting for clients")?);
        let closing = Arc::new(AtomicBool::new(false));
        let serving = Serving {
            readers,
            handler,
            listener,
            poll,
            waker: Arc::clone(&waker),
            clients: BTreeMap::new(),
            clients_max: Part::Clients.share(CLIENTS_MAX),
            accept_at: None,
            next_key: CLIENTS,
            carried_out: Arc::default(),
        };
        let is_closing = Arc::clone(&closing);
        let named = std::thread::Builder::new().name("server".into());
        let thread = named.spawn(move || serving.run(&is_closing));
        let thread = thread.context("cannot start the thread that answers clients")?;
        Ok(Server {
            path,
            closing,
            waker,
            thread: Some(thread),
        })
    }
}

/// Binds a socket that `readers` may write to. The socket gets its permissions before it appears at `path`, where it replaces any
/// other.
pub(crate) fn listen(state: &Path, path: &Path, readers: Readers) -> anyhow::Result<net::UnixListener> {
    bind(state, path, readers.of_socket()).map_err(|e| {
        let remedy = e.downcast_ref::<std::io::Error>().map_or("", remedy);
        e.context(format!("cannot listen at {}{remedy}", path.display()))
    })
}

fn bind(
    state: &Path,
    path: &Path,
    (group, mode): (Option<GroupId>, u32),
) -> anyhow::Result<net::UnixListener> {
    let name = path
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    let hidden = StateDir::open(state)?.path_of(name);
    let _ = std::fs::remove_file(&hidden);
    let bound = net::UnixListener::bind(&hidden);
    let listener = bound.with_context(|| format!("cannot create the socket {}", hidden.display()))?;
    if let Some(group) = group {
        std::os::unix::fs::lchown(&hidden, None, Some(group.number())).with_context(|| {
            format!(
                "cannot give it the group with number {}: a service outside that group needs it in its unit \
                 (systemctl edit homenode, SupplementaryGroups=)",
                group.number()
            )
        })?;
    }
    std::fs::set_permissions(&hidden, Permissions::from_mode(mode))?;
    std::fs::rename(&hidden, path)
        .with_context(|| format!("cannot move the new socket to {}", path.display()))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

impl Drop for Server {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::Relaxed);
        let woken = self.waker.wake();
        if let (Ok(()), Some(thread)) = (woken, self.thread.take()) {
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Results of carried-out settings, each with the key of the client that requested it.
type CarriedOut = Arc<Mutex<Vec<(usize, Result<(), NotSet>)>>>;

/// The server's thread.
struct Serving {
    readers: Readers,
    handler: Handler,
    listener: UnixListener,
    poll: Poll,
    waker: Arc<Waker>,
    /// Clients by key, so the oldest comes first.
    clients: BTreeMap<usize, Client>,
    clients_max: usize,
    /// When to accept again, if clients may still wait: the kernel reports each new client only once.
    accept_at: Option<Instant>,
    next_key: usize,
    carried_out: CarriedOut,
}

/// One connection.
struct Client {
    stream: UnixStream,
    role: Role,
    /// When the client is dropped, or gets the answer that the loop is busy.
    until: Instant,
    at: Stage,
}

/// State of a connection.
enum Stage {
    /// Reading the request; holds the bytes read up to now.
    Asking(Vec<u8>),
    /// Waiting for the loop to carry out a setting; holds the answer to send if the loop succeeds.
    Waiting(Box<Answer>),
    /// Writing the answer.
    Answered(Left),
}

/// An answer that is being written.
struct Left {
    bytes: Vec<u8>,
    /// Bytes already written.
    written_count: usize,
}

impl Left {
    /// Returns how long a client may take to read the answer.
    fn patience(&self) -> Duration {
        PATIENCE + PATIENCE_PER_MIB * (self.bytes.len() >> 20) as u32
    }
}

/// Whether a connection stays open.
#[derive(PartialEq, Eq)]
enum Goes {
    On,
    Away,
}

impl Serving {
    fn run(mut self, is_closing: &AtomicBool) {
        let mut events = Events::with_capacity(EVENTS);
        while !is_closing.load(Ordering::Relaxed) {
            let ends = self.clients.values().map(|client| client.until);
            let next = ends.chain(self.accept_at).min();
            let timeout = next.map(|until| until.saturating_duration_since(Instant::now()));
            match self.poll.poll(&mut events, timeout) {
                Ok(()) => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                // Polling failed; wait, since retrying at once would use up a CPU.
                Err(_) => std::thread::sleep(PATIENCE),
            }
            for event in &events {
                match event.token() {
                    Token(LISTENER) => self.accept_at = Some(Instant::now()),
                    Token(WOKEN) => {}
                    Token(key) => self.go_on(key),
                }
            }
            if self.accept_at.is_some_and(|at| at <= Instant::now()) {
                self.accept_at = self.accept();
            }
            self.answer_carried_out();
            self.end_patience();
        }
    }

    /// Accepts waiting clients. Returns when to try again if more may be waiting.
    fn accept(&mut self) -> Option<Instant> {
        for _ in 0..TURN {
            match self.listener.accept() {
                Ok((stream, _)) => self.take_in(stream),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return None,
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                // The process can open no more files: drop a client to make room for the next one.
                Err(_) if !self.clients.is_empty() => self.make_room(),
                Err(_) => return Some(Instant::now() + KNOCK_AGAIN),
            }
        }
        Some(Instant::now())
    }

    fn take_in(&mut self, mut stream: UnixStream) {
        if self.clients.len() >= self.clients_max {
            self.make_room();
        }
        let Some(role) = self.readers.role(&stream) else {
            return;
        };
        let key = self.next_key;
        self.next_key += 1;
        let interest = Interest::READABLE | Interest::WRITABLE;
        let registered = self.poll.registry().register(&mut stream, Token(key), interest);
        if registered.is_err() {
            return;
        }
        let client = Client {
            stream,
            role,
            until: Instant::now() + PATIENCE,
            at: Stage::Asking(Vec::new()),
        };
        self.clients.insert(key, client);
        // The request may have arrived before the registration, so no event would report it.
        self.go_on(key);
    }

    /// Drops the oldest client that has not sent its request. If there is none, drops the oldest client.
    fn make_room(&mut self) {
        let is_asking = |client: &Client| matches!(client.at, Stage::Asking(_));
        let mut silent = self.clients.iter().filter(|(_, client)| is_asking(client));
        let oldest = silent.next().or_else(|| self.clients.first_key_value());
        if let Some(key) = oldest.map(|(key, _)| *key) {
            self.clients.remove(&key);
        }
    }

    /// Reads from and writes to a client as far as that does not block. Drops a client that misbehaves.
    fn go_on(&mut self, key: usize) {
        let Some(client) = self.clients.get_mut(&key) else {
            return;
        };
        if let Stage::Asking(read) = &mut client.at {
            match read_line(&mut client.stream, read) {
                Ok(Some(line)) => self.ask(key, &line),
                Ok(None) => return,
                Err(_) => drop(self.clients.remove(&key)),
            }
        }
        if let Some(client) = self.clients.get_mut(&key)
            && let Stage::Answered(left) = &mut client.at
            && !matches!(write_some(&mut client.stream, left), Ok(Goes::On))
        {
            self.clients.remove(&key);
        }
    }

    fn ask(&mut self, key: usize, line: &[u8]) {
        let request = serde_json::from_slice::<Request>(line);
        let request = request.map_err(|malformed| ApiError::Malformed {
            why: malformed.to_string(),
        });
        let may = self.clients.get(&key).map(|client| client.role);
        let request = request.and_then(
            |request| match request.only_reads() || may == Some(Role::Operator) {
                true => Ok(request),
                false => Err(ApiError::MayNot {
                    why: format!("{VIEWERS_READ}: {OPERATORS}"),
                }),
            },
        );
        let (at, patience) = match request.and_then(|request| self.handler.answer(request)) {
            Err(error) => return self.send(key, Err(error)),
            Ok(Answered::Now(answer)) => return self.send(key, Ok(answer)),
            Ok(Answered::Once(vm, setting, answer)) => {
                let carried_out = Arc::clone(&self.carried_out);
                let waker = Arc::clone(&self.waker);
                self.handler.settings.set(vm, setting, move |done| {
                    let mut all = carried_out.lock().unwrap_or_else(PoisonError::into_inner);
                    all.push((key, done));
                    // Waking fails only if the server has closed, and then no client waits.
                    let _ = waker.wake();
                });
                (Stage::Waiting(Box::new(answer)), PATIENCE_LOOP)
            }
        };
        if let Some(client) = self.clients.get_mut(&key) {
            (client.at, client.until) = (at, Instant::now() + patience);
        }
    }

    /// Starts sending a client its answer.
    fn send(&mut self, key: usize, result: Result<Answer, ApiError>) {
        let left = written(result);
        self.make_room_for(left.bytes.len());
        if let Some(client) = self.clients.get_mut(&key) {
            client.until = Instant::now() + left.patience();
            client.at = Stage::Answered(left);
        }
    }

    /// Drops clients that do not read their answers, oldest first, until `count` more bytes fit.
    fn make_room_for(&mut self, count: usize) {
        let on_its_way = |client: &Client| match &client.at {
            Stage::Answered(left) => left.bytes.len(),
            Stage::Asking(_) | Stage::Waiting(_) => 0,
        };
        let mut all: usize = self.clients.values().map(on_its_way).sum();
        while all + count > ANSWERS_BYTES_MAX
            && let Some((key, bytes)) = self
                .clients
                .iter()
                .map(|(key, client)| (*key, on_its_way(client)))
                .find(|(_, bytes)| *bytes > 0)
        {
            self.clients.remove(&key);
            all -= bytes;
        }
    }

    /// Answers the clients whose settings the loop has carried out.
    fn answer_carried_out(&mut self) {
        let carried_out =
            std::mem::take(&mut *self.carried_out.lock().unwrap_or_else(PoisonError::into_inner));
        for (key, done) in carried_out {
            // The client may have gone.
            let Some(client) = self.clients.get_mut(&key) else {
                continue;
            };
            if let Stage::Waiting(answer) = &client.at {
                let answer = Answer::clone(answer);
                let reply = done
                    .map(|()| answer)
                    .map_err(|error| ApiError::refused(error.to_string()));
                self.send(key, reply);
                self.go_on(key);
            }
        }
    }

    /// Drops clients whose time is up; those that wait for the loop get an answer first.
    fn end_patience(&mut self) {
        let now = Instant::now();
        let over = self.clients.iter().filter(|(_, client)| client.until <= now);
        let over: Vec<usize> = over.map(|(key, _)| *key).collect();
        for key in over {
            match self.clients.get_mut(&key) {
                Some(client) if matches!(client.at, Stage::Waiting(_)) => {
                    self.send(key, Err(ApiError::refused(BUSY)));
                    self.go_on(key);
                }
                _ => drop(self.clients.remove(&key)),
            }
        }
    }
}

/// Serializes a reply.
fn written(result: Result<Answer, ApiError>) -> Left {
    let text = serde_json::to_string(&Reply::from(result)).expect("replies hold nothing that JSON cannot");
    Left {
        bytes: (text + "\n").into_bytes(),
        written_count: 0,
    }
}

/// Reads more of a request. Returns the request once its line is complete or the client has closed its end.
fn read_line(stream: &mut UnixStream, read: &mut Vec<u8>) -> std::io::Result<Option<Vec<u8>>> {
    let mut part = [0; 4096];
    loop {
        match stream.read(&mut part) {
            Ok(0) if read.is_empty() => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(0) => return Ok(Some(std::mem::take(read))),
            Ok(count) => {
                read.extend_from_slice(&part[..count]);
                if let Some(end) = read.iter().position(|byte| *byte == b'\n') {
                    read.truncate(end);
                    return Ok(Some(std::mem::take(read)));
                }
                if read.len() as u64 > REQUEST_BYTES_MAX {
                    return Err(ErrorKind::FileTooLarge.into());
                }
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// Writes until all is written or the socket is full.
fn write_some(stream: &mut UnixStream, left: &mut Left) -> std::io::Result<Goes> {
    while let rest = &left.bytes[left.written_count..]
        && !rest.is_empty()
    {
        match stream.write(rest) {
            Ok(count) => left.written_count += count,
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(Goes::On),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(Goes::Away)
}

#[cfg(test)]
mod tests;
