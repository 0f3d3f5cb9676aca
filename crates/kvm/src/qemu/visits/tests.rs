use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;
use crate::qemu::asker::tests::{serve, target};
use crate::qemu::monitor;

/// Visits with real sockets, in a time that the test controls.
struct Host {
    dir: tempfile::TempDir,
    visits: Visits,
    at: Ns,
    opened: BTreeMap<VmId, usize>,
    said: BTreeMap<VmId, Arc<Said>>,
}

impl Host {
    fn new() -> Host {
        Host {
            dir: tempfile::tempdir().unwrap(),
            visits: Visits::new(CONNECTIONS_MAX),
            at: Ns::from_secs(100),
            opened: BTreeMap::new(),
            said: BTreeMap::new(),
        }
    }

    /// Adds a VM whose monitor listens but accepts no connection.
    fn silent(&mut self, vm: u128) -> UnixListener {
        let path = self.dir.path().join(format!("{vm}"));
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        self.visits.watch(VmId(vm), target(&path, true), self.at);
        listener
    }

    fn open(&mut self, opening: &Opening) {
        *self.opened.entry(opening.vm).or_default() += 1;
        let result = monitor::connect(Path::new("/"), opening.pid, &opening.path);
        self.visits.opened((opening.vm, opening.ticket), result, self.at);
    }

    /// Does what is due at this time.
    fn step(&mut self) {
        self.visits.tick(self.at);
        while let Some(opening) = self.visits.outcome.to_open.pop_front() {
            self.open(&opening);
        }
        let is_ready = |conversation: &Conversation| {
            let out = if conversation.wants_to_write() {
                PollFlags::OUT
            } else {
                PollFlags::empty()
            };
            let mut fds = [PollFd::new(conversation, PollFlags::IN | out)];
            poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
        };
        let ready = self
            .visits
            .connections()
            .filter(|(_, _, conversation)| is_ready(conversation));
        let ready: Vec<(VmId, Which)> = ready.map(|(vm, which, _)| (vm, which)).collect();
        for (vm, which) in ready {
            self.visits.ready(vm, which, self.at);
        }
        self.said.extend(self.visits.outcome.said.drain(..));
    }

    /// Lets time pass; only what is due happens.
    fn pass(&mut self, time: Ns) {
        let end = self.at + time;
        while self.at < end {
            self.step();
            let under_way = self.visits.vms.values().filter(|vm| vm.visit.is_some()).count();
            assert!(under_way <= CONNECTIONS_MAX / 3, "{under_way}");
            let next = self.visits.next_event().unwrap_or(end);
            self.at = next.clamp(self.at + Ns(1), end);
        }
        self.step();
    }

    /// Waits for what other threads do, while the visits' time stands still.
    fn until(&mut self, mut is_so: impl FnMut(&Host) -> bool) {
        for _ in 0..6000 {
            self.step();
            if is_so(self) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        panic!("it did not come to that: {:?}", self.said);
    }

    fn said(&self, vm: u128) -> &Said {
        &self.said[&VmId(vm)]
    }
}

#[test]
fn monitors_that_never_answer_are_asked_later_and_later_and_their_queues_are_not_filled() {
    let mut host = Host::new();
    let listeners: Vec<UnixListener> = (0..200).map(|vm| host.silent(vm)).collect();
    host.pass(Ns::from_secs(3600));
    // The pauses are 5 s, 10 s, … 320 s, and then always 320 s: 18 visits in an hour.
    for vm in 0..200 {
        let said = host.said(vm);
        assert!(
            (10..=19).contains(&said.visits_count),
            "{vm}: {}",
            said.visits_count
        );
        assert!(
            matches!(said.trouble, Some((MonitorError::Busy { .. }, _))),
            "{said:?}"
        );
    }
    let once = host.opened.values().filter(|count| **count == 1).count();
    assert_eq!(once, CONNECTIONS_MAX / 3 * 2, "{:?}", host.opened);
    let notices = &host.visits.outcome.notices;
    assert_eq!(notices.len(), 200, "each is said once");
    drop(listeners);
}

#[test]
fn a_monitor_that_answers_again_is_asked_as_before() {
    let mut host = Host::new();
    let listener = host.silent(1);
    host.pass(Ns::from_secs(1000));
    assert!(host.said(1).trouble.is_some());
    let before = host.said(1).visits_count;
    // The QEMU runs again, and accepts the client that has waited.
    listener.set_nonblocking(false).unwrap();
    serve(listener);
    host.until(|host| host.said(1).trouble.is_none());
    assert_eq!(host.opened[&VmId(1)], 1, "over the connection that was queued");
    assert!(host.said(1).heard.standstill.is_some());
    assert_eq!(host.said(1).visits_count, before + 1);
    host.at += ASK_EVERY;
    host.until(|host| host.said(1).visits_count == before + 2);
    assert!(host.said(1).trouble.is_none());
}

#[test]
fn a_monitor_that_drips_or_never_ends_its_answer_is_left() {
    for said in [
        "{\"QM",
        "{\"QMP\": {}}\n",
        "{\"QMP\": {}}\n{\"return\": {}, \"id\": 1}\n{\"event\": 1}\n{",
    ] {
        let mut host = Host::new();
        let listener = host.silent(1);
        host.step();
        let (mut client, _) = listener.accept().unwrap();
        client.write_all(said.as_bytes()).unwrap();
        host.step();
        for _ in 0..4 {
            host.pass(Ns(VISIT_MAX.0 / 3));
            // The connection may have been closed by then.
            let _ = client.write_all(b" ");
        }
        let error = host.said(1).trouble.clone().expect("it gave no answer").0;
        assert!(matches!(error, MonitorError::Broken { .. }), "{said}: {error}");
        assert_eq!(host.visits.connections().count(), 0, "{said}: it is left");
        let mut heard = String::new();
        // If the connection is closed with unread data, the kernel reports a reset.
        let _ = client.read_to_string(&mut heard);
        assert!(
            !heard.contains("query-status") || said.contains("return"),
            "{heard}"
        );
    }
}

#[test]
fn a_monitor_that_closes_or_talks_nonsense_or_is_another_processs_is_asked_later_and_later() {
    for said in ["", "HTTP/1.1 400\r\n", "{\"hello\": 1}\n"] {
        let mut host = Host::new();
        let listener = host.silent(1);
        let mut accepted = 0;
        for _ in 0..1200 {
            host.step();
            while let Ok((mut client, _)) = listener.accept() {
                accepted += 1;
                let _ = client.write_all(said.as_bytes());
            }
            host.step();
            host.at += Ns::from_secs(1);
        }
        assert!((7..=10).contains(&accepted), "{said:?}: {accepted}");
    }
    let mut host = Host::new();
    let listener = host.silent(1);
    let path = host.dir.path().join("1");
    host.visits.watch(
        VmId(1),
        Target {
            pid: 1,
            ..target(&path, true)
        },
        host.at,
    );
    // If the test does not run as root, the other process's files cannot be examined either.
    host.pass(Ns::from_secs(900));
    assert!(host.opened[&VmId(1)] <= 9, "{:?}", host.opened);
    drop(listener);
}

#[test]
fn the_second_monitor_of_a_vm_is_asked_where_the_first_is_in_use() {
    let mut host = Host::new();
    let taken = host.silent(1);
    let path = host.dir.path().join("free");
    serve(UnixListener::bind(&path).unwrap());
    let mut both = target(&host.dir.path().join("1"), true);
    both.monitors.push(path.display().to_string());
    host.visits.watch(VmId(1), both, host.at);
    host.step();
    host.at += VISIT_MAX;
    host.until(|host| host.said.get(&VmId(1)).is_some_and(|said| said.trouble.is_none()));
    assert_eq!(
        host.visits.connections().count(),
        0,
        "the queue of the first is left"
    );
    let before = host.opened[&VmId(1)];
    host.at += ASK_EVERY;
    host.until(|host| host.said(1).visits_count == 2);
    assert_eq!(
        host.opened[&VmId(1)],
        before + 1,
        "the one that answers is asked first"
    );
    drop(taken);
}

#[test]
fn a_vm_of_which_an_opening_hangs_is_left_until_that_comes_back() {
    let mut host = Host::new();
    let listener = host.silent(1);
    host.visits.tick(host.at);
    let hanging = host.visits.outcome.to_open.pop_front().unwrap();
    host.visits.hangs((VmId(1), hanging.ticket), host.at);
    host.pass(Ns::from_secs(900));
    assert_eq!(host.opened.get(&VmId(1)), None, "nothing more of it is opened");
    host.open(&hanging);
    host.pass(Ns::from_secs(640));
    assert_eq!(host.opened[&VmId(1)], 2);
    drop(listener);
}
