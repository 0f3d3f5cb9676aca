use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;

use serde_json::json;

use super::*;

/// Answers like a QEMU, to one client after the other, for as long as clients connect.
pub(in crate::qemu) fn serve(listener: UnixListener) {
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            answer(&stream);
        }
    });
}

fn answer(stream: &UnixStream) -> Option<()> {
    let mut out = stream;
    out.write_all(b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\r\n")
        .ok()?;
    for line in BufReader::new(stream).lines() {
        let request: Value = serde_json::from_str(&line.ok()?).ok()?;
        let id = &request["id"];
        let said = match request["execute"].as_str()? {
            "query-status" => json!({"status": "paused"}),
            "query-balloon" => json!({"actual": 48 << 20}),
            "no-such-command" => {
                let refusal = json!({"error": {"desc": "not here"}, "id": id});
                out.write_all(format!("{refusal}\r\n").as_bytes()).ok()?;
                continue;
            }
            _ => json!({}),
        };
        // An event between two answers.
        let event = json!({"event": "RESUME", "id": 1_000_000});
        let said = json!({"return": said, "id": id});
        out.write_all(format!("{event}\r\n{said}\r\n").as_bytes()).ok()?;
    }
    Some(())
}

pub(in crate::qemu) fn target(path: &Path, is_asked: bool) -> Target {
    Target {
        name: "it".to_owned(),
        pid: std::process::id().cast_signed(),
        monitors: vec![path.display().to_string()],
        is_asked,
    }
}

/// Held by a test while a file system does not answer.
static GATE: Mutex<()> = Mutex::new(());

fn open_past_gate(root: &Path, pid: i32, path: &str) -> Result<UnixStream, MonitorError> {
    if path.contains("hangs") {
        drop(GATE.lock());
    }
    monitor::connect(root, pid, path)
}

#[test]
fn a_socket_that_hangs_when_it_is_opened_keeps_no_other_from_being_asked() {
    let dir = tempfile::tempdir().unwrap();
    let closed = GATE.lock().unwrap();
    let mut asker = Asker::new(Path::new("/"));
    asker.open = open_past_gate;
    let good = dir.path().join("good");
    serve(UnixListener::bind(&good).unwrap());
    for vm in 0..4 {
        let path = dir.path().join(format!("hangs-{vm}"));
        serve(UnixListener::bind(&path).unwrap());
        asker.watch(VmId(vm), target(&path, true));
    }
    asker.watch(VmId(9), target(&good, true));
    let all: Vec<VmId> = (0..4).chain([9]).map(VmId).collect();
    let own = std::process::id().cast_signed();
    asker.wait_for(&all, Duration::from_secs(60));
    for vm in 0..4 {
        let said = asker.said(VmId(vm), own).unwrap();
        let (error, _) = said.trouble.clone().expect("it hangs");
        assert!(error.to_string().contains("file system"), "{error}");
    }
    let said = asker.said(VmId(9), own).unwrap();
    assert!(
        said.trouble.is_none() && said.heard.standstill.is_some(),
        "{said:?}"
    );
    drop(closed);
}

#[test]
fn commands_are_answered_or_refused_and_one_that_has_no_time_is_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let (good, silent) = (dir.path().join("good"), dir.path().join("silent"));
    serve(UnixListener::bind(&good).unwrap());
    let never_accepts = UnixListener::bind(&silent).unwrap();
    let mut asker = Asker::new(Path::new("/"));
    asker.watch(VmId(1), target(&good, false));
    asker.watch(VmId(2), target(&silent, false));
    let long = Ns::from_secs(60);
    let ask =
        |asker: &mut Asker, vm, command, most| asker.command(VmId(vm), vec![(command, json!({}))], most);
    let said = ask(&mut asker, 1, "query-balloon", long).unwrap();
    assert_eq!(said[0]["actual"], 48 << 20);
    let refused = ask(&mut asker, 1, "no-such-command", long).unwrap_err();
    assert!(matches!(refused, MonitorError::Refused { .. }), "{refused}");
    let late = ask(&mut asker, 2, "query-balloon", Ns(1_000_000)).unwrap_err();
    assert!(matches!(late, MonitorError::NoTime(_)), "{late}");
    let gone = ask(&mut asker, 3, "query-balloon", long).unwrap_err();
    assert!(matches!(gone, MonitorError::NoTime(_)), "{gone}");
    drop(never_accepts);
}
