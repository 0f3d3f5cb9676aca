//! The agent's front desk: a Unix socket where `numad`, libvirt's hook, `homenode place` and `homenode vm` ask.
//!
//! One request and one answer per connection, each a line of JSON. The desk shares the control loop's state, which the loop
//! does not hold while it acts, so an answer takes a millisecond even while gigabytes of pages move.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use homenode_control::{Control, Promise, Request as Ask};
use homenode_machine::Machine;
use homenode_policy::placement::{Announcement, Placement, Shape, Unplaceable};
use homenode_units::{Bytes, BytesPerSec};
use serde::{Deserialize, Serialize};

/// A request or an answer is one line of at most so many bytes.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// A client that says nothing for this long is dropped.
const PATIENCE: Duration = Duration::from_millis(500);

/// What can be asked.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// A VM is about to start: which, and what libvirt will ask for.
    Announce(Announcement),
    /// Nodes for a VM that is about to start; promised to it.
    Promise(Shape),
    /// Where a VM would go, and why; nothing is promised.
    Place {
        /// Its vCPUs.
        vcpus: u32,
        /// Its memory.
        memory_bytes: Bytes,
        /// The bandwidth it needs.
        bandwidth: Option<BytesPerSec>,
    },
    /// What the agent manages.
    Vms,
}

/// The socket's path below the state directory.
pub fn socket_path(state: &Path) -> PathBuf {
    state.join("agent.sock")
}

/// Asks the running agent; `None` where none runs.
///
/// # Errors
/// When one runs and gives no sensible answer.
pub fn ask(state: &Path, request: &Request) -> anyhow::Result<Option<serde_json::Value>> {
    let path = socket_path(state);
    let mut stream = match UnixStream::connect(&path) {
        Ok(stream) => stream,
        Err(e)
            if matches!(
                e.kind(),
                std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused
            ) =>
        {
            return Ok(None);
        }
        Err(e) => {
            return Err(e)
                .with_context(|| format!("cannot ask the agent at {}; run as root", path.display()));
        }
    };
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(format!("{}\n", serde_json::to_string(request)?).as_bytes())?;
    let mut line = String::new();
    BufReader::new(stream.take(LINE_BYTES_MAX)).read_line(&mut line)?;
    let answer: serde_json::Value = serde_json::from_str(&line)
        .with_context(|| format!("the agent at {} gave no answer", path.display()))?;
    match answer.get("error").and_then(|e| e.as_str()) {
        Some(error) => anyhow::bail!("{error}"),
        None => Ok(Some(answer)),
    }
}

/// The open desk. Closing it removes the socket.
pub struct Desk {
    path: PathBuf,
    closing: Arc<AtomicBool>,
    clerk: Option<JoinHandle<()>>,
}

impl Desk {
    /// Opens the desk. A socket that a dead agent left is replaced; the caller holds the agent's lock.
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub fn open(state: &Path, machine: Arc<Machine>, control: Arc<Mutex<Control>>) -> anyhow::Result<Desk> {
        let path = socket_path(state);
        anyhow::ensure!(
            UnixStream::connect(&path).is_err(),
            "an agent is listening at {} already",
            path.display()
        );
        std::fs::create_dir_all(state).with_context(|| format!("cannot create {}", state.display()))?;
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).with_context(|| {
            format!(
                "cannot listen at {}; run as root, or choose --state",
                path.display()
            )
        })?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o660))?;
        listener.set_nonblocking(true)?;
        let closing = Arc::new(AtomicBool::new(false));
        let closing_there = Arc::clone(&closing);
        let clerk = std::thread::spawn(move || {
            while !closing_there.load(Ordering::Relaxed) {
                match listener.accept() {
                    // A client that misbehaves is its own problem; the next one is served.
                    Ok((stream, _)) => drop(serve(&stream, &machine, &control)),
                    Err(_) => std::thread::sleep(Duration::from_millis(5)),
                }
            }
        });
        Ok(Desk {
            path,
            closing,
            clerk: Some(clerk),
        })
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::Relaxed);
        if let Some(clerk) = self.clerk.take() {
            let _ = clerk.join();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

fn serve(stream: &UnixStream, machine: &Machine, control: &Mutex<Control>) -> anyhow::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut line = String::new();
    BufReader::new(stream.take(LINE_BYTES_MAX)).read_line(&mut line)?;
    let answer = match serde_json::from_str::<Request>(&line) {
        Ok(request) => answer(request, machine, control),
        Err(error) => serde_json::json!({ "error": format!("not a request: {error}") }),
    };
    let mut out = stream;
    out.write_all(format!("{answer}\n").as_bytes())?;
    Ok(())
}

fn answer(request: Request, machine: &Machine, control: &Mutex<Control>) -> serde_json::Value {
    // A panic in the loop leaves the state as it was between two statements of a policy; answering from it is still right.
    let mut control = control.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if !control.has_looked() {
        // Whoever asks then looks at the host by itself.
        return serde_json::json!({ "error": "the agent has not looked at the host yet; ask again in a moment" });
    }
    match request {
        Request::Announce(announcement) => {
            control.announce(announcement);
            serde_json::json!({ "noted": true })
        }
        Request::Promise(shape) => promise_json(&control.promise(machine, shape)),
        Request::Place {
            vcpus,
            memory_bytes,
            bandwidth,
        } => {
            let ask = Ask {
                vcpus,
                memory: memory_bytes,
                bandwidth,
            };
            placement_json(&control.place(machine, &ask))
        }
        Request::Vms => serde_json::json!({ "vms": control.status(machine).vms }),
    }
}

/// A placement as JSON: `nodes` and `reasons`; `nodes` is null where the VM fits nowhere.
pub fn placement_json(placed: &Result<Placement, Unplaceable>) -> serde_json::Value {
    match placed {
        Ok(placement) => serde_json::json!({
            "nodes": placement.nodes,
            "reasons": placement.reasons(),
            "matched": placement.matched,
            "requirement": placement.requirement,
            "capacity": placement.capacity,
            "bandwidth_from": placement.bandwidth_from,
        }),
        Err(unplaceable) => serde_json::json!({
            "nodes": null,
            "reasons": [unplaceable.to_string()],
            "shortages": unplaceable.shortages,
        }),
    }
}

/// A promise as JSON.
pub fn promise_json(promise: &Promise) -> serde_json::Value {
    let unplaceable = promise.unplaceable.as_ref().map(ToString::to_string);
    serde_json::json!({ "nodes": promise.nodes, "name": promise.name, "unplaceable": unplaceable })
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_control::{Config, Mode};

    fn desk() -> (tempfile::TempDir, Desk) {
        let dir = tempfile::tempdir().unwrap();
        let machine = Arc::new(homenode_machine::preset("r910").unwrap());
        let control = Arc::new(Mutex::new(Control::new(Config::default(), Mode::Act)));
        let desk = Desk::open(dir.path(), machine, control).unwrap();
        (dir, desk)
    }

    #[test]
    fn nobody_at_home_is_not_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert!(ask(dir.path(), &Request::Vms).unwrap().is_none());
        let (dir, open) = desk();
        drop(open);
        assert!(ask(dir.path(), &Request::Vms).unwrap().is_none());
    }

    #[test]
    fn a_misbehaving_client_gets_an_error_and_the_next_is_served() {
        let (dir, _open) = desk();
        for bad in [
            "",
            "{",
            "{\"request\":\"promise\",\"vcpus\":-1,\"memory_mib\":1}\n",
            "{\"request\":\"explode\"}\n",
        ] {
            let mut stream = UnixStream::connect(socket_path(dir.path())).unwrap();
            stream.write_all(bad.as_bytes()).unwrap();
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let mut text = String::new();
            let _ = stream.read_to_string(&mut text);
            assert!(text.is_empty() || text.contains("not a request"), "{bad}: {text}");
        }
        let answer = ask(dir.path(), &Request::Vms).unwrap_err();
        assert!(answer.to_string().contains("has not looked"), "{answer}");
    }
}
