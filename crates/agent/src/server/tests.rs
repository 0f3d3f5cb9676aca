use super::*;
use crate::setting_queue::SettingQueue;
use crate::usage_file::Clock;
use crate::wall_clock::WallClock;
use homenode_api::answer::Vms;
use homenode_api::{AskError, ask};
use homenode_control::{Config, Control, Mode};
use homenode_host::{Setting, WakeSignal};
use homenode_units::VmId;

fn server() -> (tempfile::TempDir, Server) {
    serving(Control::new(Config::default(), Mode::Act))
}

fn serving(control: Control) -> (tempfile::TempDir, Server) {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::open(dir.path(), Readers::default(), handler(control)).unwrap();
    (dir, server)
}

fn handler(control: Control) -> Handler {
    Handler {
        machine: Arc::new(homenode_machine_files::preset("r910").unwrap()),
        control: Arc::new(Mutex::new(control)),
        clock: WallClock::start(Clock::Host),
        drains: crate::drain_file::DrainFile::default(),
        settings: SettingQueue::new(&WakeSignal::default()),
    }
}

fn connect(dir: &tempfile::TempDir) -> net::UnixStream {
    net::UnixStream::connect(socket_path(dir.path())).unwrap()
}

/// Returns true if the agent answers: a new agent answers that it has not sampled the host yet.
fn is_answered(dir: &tempfile::TempDir) -> bool {
    let error = ask::<Vms>(dir.path(), &Request::Vms).unwrap_err();
    matches!(error, AskError::Agent(ApiError::NotYet { .. }))
}

#[test]
fn nobody_at_home_is_not_an_error() {
    let dir = tempfile::tempdir().unwrap();
    assert!(ask::<Vms>(dir.path(), &Request::Vms).unwrap().is_none());
    let (dir, open) = server();
    drop(open);
    assert!(ask::<Vms>(dir.path(), &Request::Vms).unwrap().is_none());
}

#[test]
fn a_misbehaving_client_gets_an_error_and_the_next_is_served() {
    let (dir, _open) = server();
    for bad in [
        "",
        "{",
        "{\"request\":\"reserve\",\"vcpus\":-1,\"memory_mib\":1}\n",
        "{\"request\":\"explode\"}\n",
        "{\"request\":\"permit-set\",\"vm\":\"a\",\"permit\":\"-1\"}\n",
    ] {
        let mut stream = connect(&dir);
        stream.write_all(bad.as_bytes()).unwrap();
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text);
        assert!(text.is_empty() || text.contains("malformed"), "{bad}: {text}");
    }
    assert!(is_answered(&dir));
}

#[test]
fn without_a_group_all_is_the_owners_alone() {
    use std::os::unix::fs::MetadataExt as _;
    let (dir, _open) = server();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!(mode(&socket_path(dir.path())), 0o600);
    assert_eq!(mode(&dir.path().join("private")), 0o700);
}

#[test]
fn a_thousand_clients_that_say_nothing_delay_nobody() {
    let (dir, _open) = server();
    let silent: Vec<net::UnixStream> = (0..1000).map(|_| connect(&dir)).collect();
    assert!(is_answered(&dir));
    // The agent answered while the silent clients waited, not after dropping them: even the last one is still connected.
    let last = silent.last().unwrap();
    last.set_nonblocking(true).unwrap();
    let mut byte = [0];
    let still = (&*last).read(&mut byte).unwrap_err();
    assert_eq!(still.kind(), ErrorKind::WouldBlock);
}

#[test]
fn a_thousand_half_open_connections_that_drip_delay_nobody() {
    let (dir, _open) = server();
    let path = socket_path(dir.path());
    let stopping = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&stopping);
    // Each client sends a request byte by byte, and reconnects when the server drops it.
    let dripping = std::thread::spawn(move || {
        let begin = || {
            let stream = net::UnixStream::connect(&path).unwrap();
            stream.set_nonblocking(true).unwrap();
            stream
        };
        let mut all: Vec<net::UnixStream> = (0..1000).map(|_| begin()).collect();
        let mut dropped_count = 0;
        while !stop.load(Ordering::Relaxed) {
            for stream in &mut all {
                if stream.write(b"{").is_err() {
                    dropped_count += 1;
                    *stream = begin();
                }
            }
        }
        dropped_count
    });
    let began = Instant::now();
    while began.elapsed() < 2 * PATIENCE {
        let asked = Instant::now();
        assert!(is_answered(&dir));
        assert!(asked.elapsed() < Duration::from_secs(10));
    }
    stopping.store(true, Ordering::Relaxed);
    assert!(
        dripping.join().unwrap() > 0,
        "none was dropped: they did not drip"
    );
}

#[test]
fn a_request_that_trickles_in_is_answered_or_dropped_in_the_end() {
    let (dir, _open) = server();
    let mut stream = connect(&dir);
    for part in ["{\"reque", "st\":\"v", "ms\"}\n"] {
        stream.write_all(part.as_bytes()).unwrap();
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.contains("not-yet"), "{text}");
    let mut endless = connect(&dir);
    // No single byte is late, but the request as a whole takes too long.
    while endless.write_all(b"x").is_ok() {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(is_answered(&dir));
}

#[test]
fn more_than_a_line_of_a_request_is_not_kept() {
    let (dir, _open) = server();
    let mut stream = connect(&dir);
    let flood = vec![b'x'; REQUEST_BYTES_MAX as usize + (1 << 20)];
    assert!(stream.write_all(&flood).is_err());
    assert!(is_answered(&dir));
}

#[test]
fn whoever_asks_for_a_setting_waits_for_the_loop_and_keeps_nobody() {
    let settings = SettingQueue::new(&WakeSignal::default());
    let poll = Poll::new().unwrap();
    let waker = Arc::new(Waker::new(poll.registry(), Token(WOKEN)).unwrap());
    let carried_out = CarriedOut::default();
    let there = Arc::clone(&carried_out);
    settings.set(VmId(1), Setting::Permit(None), move |done| {
        there.lock().unwrap().push((CLIENTS, done));
        let _ = waker.wake();
    });
    assert!(carried_out.lock().unwrap().is_empty());
    let machine = homenode_machine_files::preset("r910").unwrap();
    let scenario = homenode_twin::Scenario::tavo_mixed();
    let mut twin = homenode_twin::Twin::new(machine, &scenario, 1).unwrap();
    let control = Mutex::new(Control::new(Config::default(), Mode::Act));
    settings.carry_out(&mut twin, &control, None);
    let told = std::mem::take(&mut *carried_out.lock().unwrap());
    assert!(
        matches!(told.as_slice(), [(CLIENTS, Err(_))]),
        "no such VM: {told:?}"
    );
}

#[test]
fn after_the_end_of_the_run_changes_are_refused_and_questions_answered() {
    let machine = homenode_machine_files::preset("r910").unwrap();
    let scenario = homenode_twin::Scenario::tavo_mixed();
    let mut twin = homenode_twin::Twin::new(machine.clone(), &scenario, 1).unwrap();
    let mut control = Control::new(Config::default(), Mode::Act);
    control.begin(&machine, homenode_host::Host::sample(&mut twin).unwrap());
    let handler = handler(control);
    let ended = ApiError::refused(NotSet::Ended.to_string());
    for is_ended in [false, true] {
        if is_ended {
            handler.settings.close();
        }
        for change in [
            Request::RecommendationApply { id: 1 },
            Request::RecommendationReject { id: 1 },
            Request::ReservationDrop { id: 1 },
            Request::Drain {
                nodes: "1".parse().unwrap(),
                is_on: true,
            },
            Request::Pause {
                span_ns: homenode_units::Ns::from_secs(60),
            },
        ] {
            let named = format!("{change:?}");
            let is_refused = handler.answer(change).err().as_ref() == Some(&ended);
            assert_eq!(is_refused, is_ended, "{named}");
        }
        assert!(matches!(handler.answer(Request::Vms), Ok(Answered::Now(_))));
    }
}

#[test]
fn ten_thousand_vms_are_one_answer_and_a_client_that_takes_none_of_it_delays_nobody() {
    let machine = homenode_machine_files::preset("r910").unwrap();
    let scenario = homenode_twin::Scenario::tavo_mixed();
    let mut twin = homenode_twin::Twin::new(machine.clone(), &scenario, 1).unwrap();
    homenode_host::Host::wait(&mut twin, homenode_units::Ns::from_secs(2));
    let mut sample = homenode_host::Host::sample(&mut twin).unwrap();
    let model = sample.vms.remove(0);
    sample.vms = (0..10_000)
        .map(|number| homenode_host::VmSample {
            id: VmId(number),
            // The name is as long as the longest names used in practice.
            name: format!("a-project-of-a-tenant/a-machine-with-a-long-name-{number}"),
            ..model.clone()
        })
        .collect();
    // How long arranging that many VMs takes is not tested here.
    let config = Config {
        policies: homenode_control::PolicySet::Default,
        ..Config::default()
    };
    let mut control = Control::new(config, Mode::Act);
    control.begin(&machine, sample);
    let (dir, _open) = serving(control);
    let mut idle = connect(&dir);
    idle.write_all(b"{\"request\":\"vms\"}\n").unwrap();
    for _ in 0..2 {
        let answer = ask::<Vms>(dir.path(), &Request::Vms).unwrap().expect("an agent");
        assert_eq!(answer.vms.len(), 10_000);
        assert!(answer.vms[9_999].name.ends_with("-9999"));
    }
}
