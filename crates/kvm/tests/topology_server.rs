//! Tests the server of topology pages with real processes: this binary plays the test or a peer (QEMU, or a hostile process),
//! depending on its arguments.

use std::fs::File;
use std::io::{BufRead as _, BufReader, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use homenode_kvm::topology_server::{
    CONNECTIONS_MAX, ListenError, NotServed, REWRITE, TopologyServer, region_of,
};
use homenode_topology_page::{Facts, Mapping, Reader, Topology};
use homenode_units::NodeId;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use rustix::fs::{OFlags, fcntl_setfl, ftruncate};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Time limit for what another thread or process must do.
const SOON: Duration = Duration::from_secs(20);

fn main() {
    let args: Vec<String> = std::env::args().collect();
    match args.get(1).map(String::as_str) {
        Some("play-peer") => play_peer(Path::new(&args[2])),
        // `cargo test` may pass filters and flags, which are ignored: all tests run.
        Some("--list") => {}
        _ => {
            no_process_sees_anothers_page();
            a_page_says_nothing_before_anything_was_told();
            a_process_that_connects_again_gets_its_page_and_one_more_doorbell();
            what_is_told_again_keeps_its_sequence();
            a_server_that_starts_finds_the_pages_of_the_one_before();
            what_a_peer_scribbles_goes_by_itself();
            nobody_can_make_the_memory_shorter();
            a_process_without_a_page_is_named();
            a_region_goes_with_its_process();
            peers_without_manners_hurt_nobody_else();
            the_socket_of_a_living_server_is_left_alone();
            what_is_no_socket_is_left_alone();
            pages_are_what_was_told_whatever_happens();
            peers_that_want_all_files_leave_the_agent_its_own_and_the_told_their_pages();
        }
    }
}

fn topology(node: u16) -> Topology {
    let distances = (0..8)
        .map(|from| (0..8).map(|to| if from == to { 10 } else { 20 }).collect())
        .collect();
    Topology::new(Facts {
        vcpu_pnode: vec![Some(NodeId(node))],
        vnode_pnode: vec![Some(NodeId(0))],
        distances,
    })
    .expect("eight nodes")
}

// --- A peer ---

/// What the peer got on one connection.
struct Connection {
    stream: UnixStream,
    memory: File,
    page: Mapping,
    doorbell: OwnedFd,
}

/// Carries out the commands on its standard input, one per line, and prints the results.
#[allow(clippy::print_stdout)] // its answers
fn play_peer(socket: &Path) {
    let mut connections: Vec<Connection> = Vec::new();
    for line in std::io::stdin().lines() {
        let line = line.expect("orders");
        let last = connections.last();
        let answer = match line.as_str() {
            "connect" => match connect(socket) {
                Ok(connection) => {
                    connections.push(connection);
                    "connected".to_owned()
                }
                Err(error) => format!("refused: {error}"),
            },
            "disconnect" => format!("{} closed", std::mem::take(&mut connections).len()),
            "babble" => {
                let mut stream = &last.expect("a connection").stream;
                format!("{:?}", stream.write(&[7; 4096]).map(|_| ()))
            }
            "scribble" => {
                let words = last.expect("a connection").page.words();
                words.iter().for_each(|word| word.store(0x7777, Ordering::SeqCst));
                "scribbled".to_owned()
            }
            "shrink" => format!("{:?}", ftruncate(&last.expect("a connection").memory, 0)),
            "jam" => {
                let doorbell = &last.expect("a connection").doorbell;
                while rustix::io::read(doorbell, &mut [0; 8]).is_ok() {}
                rustix::io::write(doorbell, &(u64::MAX - 1).to_ne_bytes()).expect("room");
                fcntl_setfl(doorbell, OFlags::empty()).expect("flags");
                "jammed".to_owned()
            }
            "read" => match connections
                .first()
                .map(|first| Reader::new(first.page.words()).read())
            {
                Some(Ok((sequence, topology))) => {
                    format!(
                        "{sequence} {:?}",
                        topology.facts().vcpu_pnode[0].map(|node| node.0)
                    )
                }
                Some(Err(error)) => error.to_string(),
                None => "no page".to_owned(),
            },
            // Number of interrupts on each connection since the last `rung`.
            "rung" => {
                let rung = |connection: &Connection| {
                    let mut count = [0; 8];
                    rustix::io::read(&connection.doorbell, &mut count)
                        .map_or(0, |_| u64::from_ne_bytes(count))
                };
                format!("{:?}", connections.iter().map(rung).collect::<Vec<_>>())
            }
            other => panic!("unknown order {other}"),
        };
        println!("{answer}");
    }
}

/// Connects like QEMU when it realises the device.
fn connect(socket: &Path) -> std::io::Result<Connection> {
    let stream = UnixStream::connect(socket)?;
    let expect = |word: i64, (got, file): (i64, Option<OwnedFd>)| {
        assert_eq!(got, word, "the protocol");
        file
    };
    assert!(expect(0, receive(&stream)?).is_none(), "version");
    assert!(expect(0, receive(&stream)?).is_none(), "number");
    let memory: File = expect(-1, receive(&stream)?).expect("memory").into();
    let doorbell = expect(0, receive(&stream)?).expect("a doorbell");
    Ok(Connection {
        stream,
        page: Mapping::new(&memory)?,
        memory,
        doorbell,
    })
}

fn receive(stream: &UnixStream) -> std::io::Result<(i64, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut word = [0; 8];
    let got = recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut word)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    if got.bytes != word.len() {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    let file = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    Ok((i64::from_le_bytes(word), file))
}

/// The test's handle on a peer.
struct Peer {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Peer {
    fn start(socket: &Path) -> Peer {
        let mut child = Command::new(std::env::current_exe().expect("this binary"))
            .arg("play-peer")
            .arg(socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a peer");
        Peer {
            orders: child.stdin.take().expect("a pipe"),
            answers: BufReader::new(child.stdout.take().expect("a pipe")),
            child,
        }
    }

    fn connected(socket: &Path) -> Peer {
        let mut peer = Peer::start(socket);
        assert_eq!(peer.tell("connect"), "connected");
        peer
    }

    fn tell(&mut self, order: &str) -> String {
        writeln!(self.orders, "{order}").expect("the peer lives");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("an answer");
        answer.trim_end().to_owned()
    }

    /// Whether the peer's page has this sequence number and node.
    fn sees(&mut self, sequence: u64, node: u16) -> bool {
        self.tell("read") == format!("{sequence} Some({node})")
    }

    fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    fn end(&mut self) {
        self.child.kill().expect("a process");
        self.child.wait().expect("a process");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn until(what: &str, mut so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !so() {
        assert!(begin.elapsed() < SOON, "not so after a while: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn dir() -> tempfile::TempDir {
    tempfile::tempdir().expect("a directory")
}

// --- Tests ---

fn no_process_sees_anothers_page() {
    let dir = dir();
    let socket = dir.path().join("socket");
    let server = TopologyServer::listen(&socket).expect("a server");
    let (mut a, mut b) = (Peer::connected(&socket), Peer::connected(&socket));
    let of_a = server.publish(a.pid(), &topology(1)).expect("a page");
    let of_b = server.publish(b.pid(), &topology(2)).expect("a page");
    assert!(a.sees(of_a, 1) && b.sees(of_b, 2), "each its own");
    a.tell("scribble");
    assert!(b.sees(of_b, 2), "the other's page is another");
    until("only who is told is interrupted", || a.tell("rung") == "[1]");
    until("only who is told is interrupted", || b.tell("rung") == "[1]");
    server.publish(a.pid(), &topology(3)).expect("a page");
    until("its interrupt", || a.tell("rung") == "[1]");
    assert_eq!(b.tell("rung"), "[0]");
}

fn a_page_says_nothing_before_anything_was_told() {
    let dir = dir();
    let socket = dir.path().join("socket");
    let server = TopologyServer::listen(&socket).expect("a server");
    let mut peer = Peer::connected(&socket);
    let empty = peer.tell("read");
    assert!(empty.ends_with(" None"), "{empty}");
    assert!(server.serves(peer.pid()));
    let first = server.publish(peer.pid(), &topology(1)).expect("a page");
    assert_ne!(empty, format!("{first} None"), "the first version is another one");
}

fn a_process_that_connects_again_gets_its_page_and_one_more_doorbell() {
    let dir = dir();
    let socket = dir.path().join("socket");
    let server = TopologyServer::listen(&socket).expect("a server");
    let mut peer = Peer::connected(&socket);
    server.publish(peer.pid(), &topology(1)).expect("a page");
    until("its interrupt", || peer.tell("rung") == "[1]");
    peer.tell("connect");
    let sequence = server.publish(peer.pid(), &topology(2)).expect("a page");
    assert!(peer.sees(sequence, 2), "the first connection's memory");
    thread::sleep(Duration::from_millis(50));
    assert_eq!(peer.tell("rung"), "[1, 1]");
    // As when a device is unplugged and plugged in again.
    assert_eq!(peer.tell("disconnect"), "2 closed");
    assert_eq!(peer.tell("connect"), "connected");
    assert!(peer.sees(sequence, 2), "the page is kept");
}

fn what_is_told_again_keeps_its_sequence() {
    let dir = dir();
    let socket = dir.path().join("socket");
    let server = TopologyServer::listen(&socket).expect("a server");
    let mut peer = Peer::connected(&socket);
    let first = server.publish(peer.pid(), &topology(1)).expect("a page");
    peer.tell("scribble");
    assert_eq!(server.publish(peer.pid(), &topology(1)), Ok(first));
    assert!(peer.sees(first, 1), "{}", peer.tell("read"));
    assert_eq!(server.publish(peer.pid(), &topology(2)), Ok(first + 2));
}

fn a_server_that_starts_finds_the_pages_of_the_one_before() {
    let dir = dir();
    let socket = dir.path().join("socket");
    let server = TopologyServer::listen(&socket).expect("a server");
    let (mut stays, mut goes) = (Peer::connected(&socket), Peer::connected(&socket));
    let before = server.publish(stays.pid(), &topology(1)).expect("a page");
    drop(server);
    assert!(!socket.exists(), "the socket goes with its server");
    assert!(stays.sees(before, 1), "memory is the peer's");
    goes.end();
    let server = TopologyServer::listen(&socket).expect("a server");
    assert!(server.serves(stays.pid()) && !server.serves(goes.pid()));
    assert!(stays.sees(before, 1), "nothing changes before something is told");
    let after = server.publish(stays.pid(), &topology(1)).expect("a page");
    assert_ne!(
        after, before,
        "who knows the old version sees that there is another"
    );
    assert!(stays.sees(after, 1));
    assert_eq!(stays.tell("connect"), "connected");
    let last = server.publish(stays.pid(), &topology(2)).expect("a page");
    assert!(stays.sees(last, 2), "a new connection changes no memory");
}

fn what_a_peer_scribbles_goes_by_itself() {
    let dir = dir();
    let socket = dir.path().join("socket");
    let server = TopologyServer::listen(&socket).expect("a server");
    let mut peer = Peer::connected(&socket);
    let sequence = server.publish(peer.pid(), &topology(1)).expect("a page");
    peer.tell("scribble");
    assert!(!peer.sees(sequence, 1), "it was not written since");
    until("the page is written again", || peer.sees(sequence, 1));
    assert!(REWRITE < SOON);
}

fn nobody_can_make_the_memory_shorter() {
    let dir = dir();
    let socket = dir.path().join("socket");
    let server = TopologyServer::listen(&socket).expect("a server");
    let mut peer = Peer::connected(&socket);
    assert_eq!(
        peer.tell("shrink"),
        "Err(Os { code: 1, kind: PermissionDenied, message: \"Operation not permitted\" })"
    );
    server.publish(peer.pid(), &topology(1)).expect("a page");
}

fn a_process_without_a_page_is_named() {
    let dir = dir();
    let server = TopologyServer::listen(&dir.path().join("socket")).expect("a server");
    let pid = std::process::id().cast_signed();
    for pid in [pid, 0, -1, i32::MAX] {
        assert!(!server.serves(pid));
        assert_eq!(server.publish(pid, &topology(1)), Err(NotServed { pid }));
    }
    let unconnected = Peer::start(&dir.path().join("socket"));
    assert!(region_of(unconnected.pid()).expect("a process").is_none());
}

fn a_region_goes_with_its_process() {
    let dir = dir();
    let socket = dir.path().join("socket");
    let server = TopologyServer::listen(&socket).expect("a server");
    // The server also holds regions that it found in other programs on this machine, so these are counted first.
    let held = || {
        let links = std::fs::read_dir("/proc/self/fd").expect("descriptors").flatten();
        let names = links.filter_map(|link| std::fs::read_link(link.path()).ok());
        names
            .filter(|name| name.to_string_lossy().starts_with("/memfd:homenode-topology"))
            .count()
    };
    let before = held();
    let mut peer = Peer::connected(&socket);
    let pid = peer.pid();
    assert_eq!(peer.tell("disconnect"), "1 closed");
    assert!(server.serves(pid), "a process that lives may connect again");
    peer.end();
    assert_eq!(server.publish(pid, &topology(1)), Err(NotServed { pid }));
    until("its memory is let go of", || held() <= before);
}

fn peers_without_manners_hurt_nobody_else() {
    let dir = dir();
    let socket = dir.path().join("socket");
    let server = TopologyServer::listen(&socket).expect("a server");
    let mut good = Peer::connected(&socket);
    let mut bad = Peer::start(&socket);
    for _ in 0..CONNECTIONS_MAX {
        assert_eq!(bad.tell("connect"), "connected");
    }
    assert!(
        bad.tell("connect").starts_with("refused"),
        "more than a process may have"
    );
    let refusal = server.take_refusal().expect("a reason");
    assert!(
        refusal.contains(&bad.pid().to_string()) && refusal.contains("connections"),
        "{refusal}"
    );
    assert_eq!(server.take_refusal(), None, "once");
    assert_eq!(bad.tell("babble"), "Ok(())");
    bad.tell("scribble");
    // From now on, ringing this doorbell blocks.
    bad.tell("jam");
    for round in 0..2000u16 {
        let node = round % 8;
        let of_bad = server.publish(bad.pid(), &topology(node)).expect("a page");
        let sequence = server.publish(good.pid(), &topology(node)).expect("a page");
        if round % 500 == 0 {
            assert!(good.sees(sequence, node) && bad.sees(of_bad, node));
        }
    }
    let mut late = Peer::connected(&socket);
    let sequence = server.publish(late.pid(), &topology(5)).expect("a page");
    assert!(late.sees(sequence, 5));
    bad.tell("disconnect");
    until("what it closed is free again", || {
        bad.tell("connect") == "connected"
    });
}

fn the_socket_of_a_living_server_is_left_alone() {
    let dir = dir();
    let socket = dir.path().join("socket");
    let server = TopologyServer::listen(&socket).expect("a server");
    let second = TopologyServer::listen(&socket);
    assert!(matches!(second, Err(ListenError::Taken { path }) if path == socket));
    let peer = Peer::connected(&socket);
    assert!(server.serves(peer.pid()), "the first one still serves");
    drop(server);
    // The socket of a killed agent.
    drop(UnixListener::bind(&socket).expect("a socket"));
    let server = TopologyServer::listen(&socket).expect("a server in place of a dead one");
    let next = Peer::connected(&socket);
    assert!(server.serves(next.pid()));
}

fn what_is_no_socket_is_left_alone() {
    let dir = dir();
    let path = dir.path().join("socket");
    std::fs::write(&path, "precious").expect("a file");
    let error = TopologyServer::listen(&path).expect_err("a file");
    assert!(matches!(error, ListenError::NotASocket { .. }), "{error}");
    assert_eq!(std::fs::read(&path).expect("the file"), b"precious");
    let error = TopologyServer::listen(&dir.path().join("none/socket")).expect_err("no directory");
    assert!(error.to_string().contains("none/socket"), "{error}");
}

/// Under a low limit of open files, as in a service without `LimitNOFILE`.
fn peers_that_want_all_files_leave_the_agent_its_own_and_the_told_their_pages() {
    const LIMIT: u64 = 256;
    let before = getrlimit(Resource::Nofile);
    let limited = |current| Rlimit {
        current,
        maximum: before.maximum,
    };
    setrlimit(Resource::Nofile, limited(Some(LIMIT))).expect("a lower limit");
    {
        let dir = dir();
        let socket = dir.path().join("socket");
        let server = TopologyServer::listen(&socket).expect("a server");
        let mut told = Peer::connected(&socket);
        server.publish(told.pid(), &topology(1)).expect("a page");
        // Each peer has two pipes to this process: more peers would use up all files with their pipes alone.
        let mut flood: Vec<Peer> = Vec::new();
        for _ in 0..24 {
            let mut peer = Peer::start(&socket);
            for _ in 0..CONNECTIONS_MAX {
                assert_eq!(
                    peer.tell("connect"),
                    "connected",
                    "one that was told nothing makes room"
                );
            }
            flood.push(peer);
        }
        let opened: Vec<_> = (0..LIMIT / 4).map(|_| File::open("/proc/self/stat")).collect();
        assert!(opened.iter().all(Result::is_ok), "the agent reads what it needs");
        drop(opened);
        assert!(!server.serves(flood[0].pid()), "it came first");
        let sequence = server.publish(told.pid(), &topology(2)).expect("still its page");
        assert!(told.sees(sequence, 2));
        let last = flood.last_mut().expect("the last one");
        let sequence = server.publish(last.pid(), &topology(3)).expect("a page");
        assert!(last.sees(sequence, 3), "a VM that starts has its page");
        // Once every present peer was told something, the next one is refused with a reason.
        let mut refused = None;
        for _ in 0..24 {
            let mut peer = Peer::start(&socket);
            let answer = peer.tell("connect");
            if answer != "connected" {
                refused = Some(answer);
                break;
            }
            server.publish(peer.pid(), &topology(4)).expect("a page");
            flood.push(peer);
        }
        assert!(refused.is_some_and(|answer| answer.starts_with("refused")));
        let said = server.take_refusal().expect("a reason");
        assert!(said.contains("LimitNOFILE"), "{said}");
        assert!(server.serves(told.pid()));
    }
    setrlimit(Resource::Nofile, before).expect("the limit before");
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Connect,
    Disconnect,
    Scribble,
    Tell(u16),
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => Just(Step::Connect),
        1 => Just(Step::Disconnect),
        2 => Just(Step::Scribble),
        4 => (0..8u16).prop_map(Step::Tell),
        1 => Just(Step::Restart),
    ]
}

/// Three processes take arbitrary steps. Publishing succeeds exactly for those that have connected, and their pages then show it.
fn pages_are_what_was_told_whatever_happens() {
    const PEERS: usize = 3;
    let steps = prop::collection::vec((0..PEERS, step()), 1..30);
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 40,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let outcome = runner.run(&steps, |steps| {
        let dir = dir();
        let socket = dir.path().join("socket");
        let mut server = Some(TopologyServer::listen(&socket).expect("a server"));
        let mut peers: Vec<Peer> = (0..PEERS).map(|_| Peer::start(&socket)).collect();
        let mut connections = [0; PEERS];
        let mut known = [false; PEERS];
        for (at, step) in steps {
            let peer = &mut peers[at];
            match step {
                Step::Connect if connections[at] < CONNECTIONS_MAX => {
                    prop_assert_eq!(peer.tell("connect"), "connected");
                    connections[at] += 1;
                    known[at] = true;
                }
                Step::Disconnect => {
                    peer.tell("disconnect");
                    connections[at] = 0;
                }
                Step::Scribble if connections[at] > 0 => {
                    peer.tell("scribble");
                }
                Step::Tell(node) => {
                    let told = server
                        .as_ref()
                        .expect("a server")
                        .publish(peer.pid(), &topology(node));
                    prop_assert_eq!(told.is_ok(), known[at]);
                    if let Ok(sequence) = told
                        && connections[at] > 0
                    {
                        prop_assert!(peer.sees(sequence, node));
                    }
                }
                Step::Restart => {
                    drop(server.take());
                    server = Some(TopologyServer::listen(&socket).expect("a server"));
                    // A new server cannot find a process that has released its memory.
                    known = std::array::from_fn(|at| known[at] && connections[at] > 0);
                }
                Step::Connect | Step::Scribble => {}
            }
        }
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}
