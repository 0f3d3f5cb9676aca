//! The agent's front desk: a Unix socket where `numad`, libvirt's hook, `homenode place`, `vm`, `permit`, `policy`, `memory`,
//! `topology`, `wss`, `whatif` and `report` ask.
//!
//! One request and one answer per connection, each a line of JSON. The desk shares the control loop's state, which the loop
//! does not hold while it acts, so an answer takes a millisecond even while gigabytes of pages move. What is to be done to the
//! host is ordered of the loop ([`Orders`]); whoever ordered it waits beside the desk, not at it.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use homenode_control::{Advice, Control, Line, Promise, Request as Ask, Status, VmStatus};
use homenode_host::Setting;
use homenode_machine::Machine;
use homenode_policy::permits::suggest::{NoSuggestion, SLICES_MIN};
use homenode_policy::placement::{Announcement, Placement, Shape, Unplaceable};
use homenode_units::{Bytes, BytesPerSec, MemoryPolicy, Ns, Permit};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::orders::{Orders, Placed};
use crate::whatif::{self, Complaint, Homes};
use crate::{report, wss};

/// A request or an answer is one line of at most so many bytes.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// A client that says nothing for this long is dropped.
const PATIENCE: Duration = Duration::from_millis(500);
/// How long to wait for what the loop must carry out: longer than the desk does.
const PATIENCE_DONE: Duration = Duration::from_secs(40);

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
    /// Book a permit for a VM, or none.
    PermitSet {
        /// Its name.
        vm: String,
        /// What it books.
        permit: Option<Permit>,
    },
    /// Choose a memory policy for a VM, or leave the choice to the agent.
    PolicySet {
        /// Its name.
        vm: String,
        /// What is chosen.
        policy: Option<MemoryPolicy>,
    },
    /// Say how little memory a VM may be left with, or that it keeps all.
    FloorSet {
        /// Its name.
        vm: String,
        /// How little.
        floor: Option<Bytes>,
    },
    /// Which memory policy would suit a VM.
    PolicyAdvise {
        /// Its name.
        vm: String,
    },
    /// Permits and how they are kept.
    Permits {
        /// Of this VM only.
        vm: Option<String>,
    },
    /// What a VM might book.
    PermitSuggest {
        /// Its name.
        vm: String,
    },
    /// How much memory VMs really use.
    WorkingSets {
        /// This VM, which is watched from now on; without a name all, as they were watched last.
        vm: Option<String>,
        /// In windows of this length.
        window: Option<Ns>,
        /// For so long.
        wait: Ns,
    },
    /// How fast VMs would be with other homes.
    WhatIf {
        /// Of these VMs; the others stay where they are.
        homes: Homes,
    },
    /// What came of changes of homes.
    Report {
        /// Judged within this time up to now.
        since: Option<Ns>,
    },
    /// What was used of what was booked.
    PermitBill {
        /// By this VM only.
        vm: Option<String>,
    },
}

/// Why nothing is thought of a VM's memory policy.
const NOT_WATCHED: &str = "it was not watched yet: the agent has just begun, or runs no memory policies";

/// How an answer begins that says that there is no such VM.
pub const NO_VM: &str = "no VM ";

/// The socket's path below the state directory.
pub fn socket_path(state: &Path) -> PathBuf {
    state.join("agent.sock")
}

/// Asks the running agent; `None` where none runs.
///
/// # Errors
/// When one runs and gives no sensible answer.
pub fn ask(state: &Path, request: &Request) -> anyhow::Result<Option<Value>> {
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
            let what = format!("cannot ask the agent at {}{}", path.display(), remedy(&e));
            return Err(anyhow::Error::new(e).context(what));
        }
    };
    let patience = match request {
        Request::PermitSet { .. } | Request::PolicySet { .. } | Request::FloorSet { .. } => PATIENCE_DONE,
        _ => Duration::from_secs(5),
    };
    stream.set_read_timeout(Some(patience))?;
    stream.write_all(format!("{}\n", serde_json::to_string(request)?).as_bytes())?;
    let mut line = String::new();
    BufReader::new(stream.take(LINE_BYTES_MAX)).read_line(&mut line)?;
    let answer: Value = serde_json::from_str(&line)
        .with_context(|| format!("the agent at {} gave no answer", path.display()))?;
    match answer.get("error").and_then(|e| e.as_str()) {
        Some(error) if answer["is_bad_input"] == true => Err(crate::bad_input(error)),
        Some(error) => anyhow::bail!("{error}"),
        None => Ok(Some(answer)),
    }
}

/// What to do about a socket that cannot be used; the error itself follows.
fn remedy(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::PermissionDenied => "; run as root, or choose another --state",
        _ => "",
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
    pub fn open(state: &Path, clerk: Clerk) -> anyhow::Result<Desk> {
        let path = socket_path(state);
        anyhow::ensure!(
            UnixStream::connect(&path).is_err(),
            "an agent is listening at {} already",
            path.display()
        );
        std::fs::create_dir_all(state).with_context(|| format!("cannot create {}", state.display()))?;
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).map_err(|e| {
            let what = format!("cannot listen at {}{}", path.display(), remedy(&e));
            anyhow::Error::new(e).context(what)
        })?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o660))?;
        listener.set_nonblocking(true)?;
        let closing = Arc::new(AtomicBool::new(false));
        let closing_there = Arc::clone(&closing);
        let clerk = std::thread::spawn(move || {
            while !closing_there.load(Ordering::Relaxed) {
                match listener.accept() {
                    // A client that misbehaves is its own problem; the next one is served.
                    Ok((stream, _)) => drop(clerk.serve(stream)),
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

/// Who answers: with what the loop knows, and by ordering of it.
#[derive(Clone, Debug)]
pub struct Clerk {
    /// What the host is.
    pub machine: Arc<Machine>,
    /// State of the loop.
    pub control: Arc<Mutex<Control>>,
    /// What the loop is to carry out.
    pub orders: Orders,
}

/// An answer, or one that must be waited for.
enum Answer {
    Now(Value),
    Later(Placed, Value),
}

fn error(text: impl std::fmt::Display) -> Value {
    json!({ "error": text.to_string() })
}

fn bad_input(text: impl std::fmt::Display) -> Value {
    json!({ "error": text.to_string(), "is_bad_input": true })
}

impl Clerk {
    fn serve(&self, stream: UnixStream) -> anyhow::Result<()> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut line = String::new();
        BufReader::new((&stream).take(LINE_BYTES_MAX)).read_line(&mut line)?;
        let answer = match serde_json::from_str::<Request>(&line) {
            Ok(request) => self
                .answer(request)
                .unwrap_or_else(|no_vm| Answer::Now(error(no_vm))),
            Err(malformed) => Answer::Now(error(format!("not a request: {malformed}"))),
        };
        let say = |mut stream: UnixStream, answer: &Value| stream.write_all(format!("{answer}\n").as_bytes());
        match answer {
            Answer::Now(answer) => say(stream, &answer)?,
            Answer::Later(placed, answer) => drop(std::thread::spawn(move || {
                let answer = placed.wait().map_or_else(error, |()| answer);
                say(stream, &answer)
            })),
        }
        Ok(())
    }

    /// The answer; or that there is no such VM.
    fn answer(&self, request: Request) -> Result<Answer, String> {
        let machine = &self.machine;
        // A panic in the loop leaves the state as it was between two statements of a policy; answering from it is still right.
        let mut control = self
            .control
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if !control.has_looked() {
            // Whoever asks then looks at the host by itself.
            let text = "the agent has not looked at the host yet; ask again in a moment";
            return Ok(Answer::Now(error(text)));
        }
        Ok(Answer::Now(match request {
            Request::Announce(announcement) => {
                control.announce(announcement);
                json!({ "noted": true })
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
            Request::Vms => json!({ "vms": control.status(machine).vms, "feed_idle": control.feed_idle() }),
            Request::PermitSet { vm, permit } => {
                let id = named(&control.status(machine), &vm)?.id;
                let done = json!({ "vm": vm, "permit": permit, "note": control.permits_idle() });
                return Ok(Answer::Later(self.orders.set(id, Setting::Permit(permit)), done));
            }
            Request::PolicySet { vm, policy } => {
                let id = named(&control.status(machine), &vm)?.id;
                if let Some((policy, why)) = policy.and_then(|p| Some((p, control.objection(id, p)?))) {
                    return Ok(Answer::Now(error(format!(
                        "VM {vm} cannot have memory policy {policy}: {why}"
                    ))));
                }
                let idle = control.memory_policies_idle().map(str::to_owned);
                let cautions = policy.map(|policy| control.cautions(id, policy));
                let notes: Vec<String> = idle.into_iter().chain(cautions.unwrap_or_default()).collect();
                let done = json!({ "vm": vm, "policy": policy, "notes": notes });
                let setting = Setting::MemoryPolicy(policy);
                return Ok(Answer::Later(self.orders.set(id, setting), done));
            }
            Request::FloorSet { vm, floor } => {
                let status = control.status(machine);
                let found = named(&status, &vm)?;
                let note = match (floor, found.memory.maximum_bytes) {
                    (None, _) => None,
                    (Some(_), None) => Some("it has no balloon, so nothing can be taken from it"),
                    (Some(floor), Some(most)) if floor >= most => {
                        Some("that is all it has, so nothing is taken from it")
                    }
                    (Some(_), Some(_)) => control.memory_floors_idle(),
                };
                let done = json!({ "vm": vm, "floor_bytes": floor, "note": note });
                let setting = Setting::MemoryFloor(floor);
                return Ok(Answer::Later(self.orders.set(found.id, setting), done));
            }
            Request::PolicyAdvise { vm } => {
                let status = control.status(machine);
                let found = named(&status, &vm)?;
                let mut answer = match control.memory_advice(found.id) {
                    Some(advice) => json!(advice),
                    None => json!({ "policy": null, "why": NOT_WATCHED }),
                };
                answer["vm"] = json!(vm);
                answer["memory_policy"] = json!(found.memory_policy);
                answer
            }
            Request::Permits { vm } => {
                let status = control.status(machine);
                let chosen = match &vm {
                    Some(name) => vec![named(&status, name)?],
                    None => status.vms.iter().collect(),
                };
                json!({ "vms": chosen.into_iter().map(permit_json).collect::<Vec<_>>() })
            }
            Request::PermitSuggest { vm } => {
                let id = named(&control.status(machine), &vm)?.id;
                let advice = control
                    .suggest(machine, id)
                    .ok_or_else(|| format!("{NO_VM}`{vm}` runs here"))?;
                advice_json(&vm, &advice, control.config().period)
            }
            Request::WorkingSets { vm, window, wait } => {
                let status = control.status(machine);
                let chosen = match &vm {
                    Some(name) => {
                        let found = named(&status, name)?;
                        if let Err(why) = wss::can_be_watched(&control, found) {
                            return Ok(Answer::Now(error(why)));
                        }
                        control.want_working_set(found.id, window, wait);
                        vec![found]
                    }
                    None => status.vms.iter().collect(),
                };
                json!(wss::Answer::of(&control, status.at_ns, &chosen))
            }
            Request::WhatIf { homes } => match whatif::Answer::of(&control, machine, &homes) {
                Ok(answer) => json!(answer),
                Err(Complaint::Input(why)) => bad_input(why),
                Err(Complaint::Unable(why)) => error(why),
                Err(Complaint::TooSoon(why)) => error(format!("{why}; ask again in a moment")),
            },
            Request::Report { since } => {
                report::Answer::of(&control, machine, since).map_or_else(error, |answer| json!(answer))
            }
            Request::PermitBill { vm } => {
                let lines: Vec<Line> = control.bill().lines().collect();
                let of = |line: &Line| vm.as_ref().is_none_or(|name| line.name == *name);
                let chosen: Vec<&Line> = lines.iter().filter(|line| of(line)).collect();
                if let Some(name) = vm.as_ref().filter(|_| chosen.is_empty()) {
                    named(&control.status(machine), name)?;
                }
                json!({ "lines": chosen })
            }
        }))
    }
}

/// The VM of a name.
///
/// # Errors
/// That there is none, and which there are.
pub fn named<'a>(status: &'a Status, name: &str) -> Result<&'a VmStatus, String> {
    status.vms.iter().find(|vm| vm.name == name).ok_or_else(|| {
        let names: Vec<&str> = status.vms.iter().map(|vm| vm.name.as_str()).collect();
        format!("{NO_VM}`{name}` runs here; there are: {}", names.join(", "))
    })
}

/// A VM's permit as JSON: its name and id with [`homenode_control::PermitStatus`].
fn permit_json(vm: &VmStatus) -> Value {
    let mut object = json!(vm.permit);
    object["name"] = json!(vm.name);
    object["id"] = json!(vm.id);
    object["counted_by"] = json!(vm.counted_by);
    object
}

/// What a VM might book as JSON: two permits, either of which may be null, and why.
fn advice_json(name: &str, advice: &Advice, period: Ns) -> Value {
    let (permit, why) = match &advice.from_behaviour {
        Ok(found) => {
            let (count, beyond) = (found.slices_count, found.beyond_count);
            let percent = found.percentile * 100.0;
            let why = format!(
                "by what it did: {percent:.0} percent of the last {count} periods of {period} stayed within it, {beyond} did not"
            );
            (Some(found.permit), why)
        }
        Err(NoSuggestion::TooShort { slices_count }) => {
            let least = Ns(period.0.saturating_mul(SLICES_MIN as u64));
            let why = match advice.unmetered {
                Some(unmetered) => format!("by what it does: unknown, {unmetered}"),
                None => format!(
                    "by what it does: it was watched for {slices_count} periods of {period}, too short; ask again after {least}"
                ),
            };
            (None, why)
        }
        Err(other) => (None, format!("by what it does: {other}")),
    };
    let memory = match advice.from_memory {
        Some(_) => format!(
            "by its memory, {}: its part of what the host's caches can hold",
            advice.memory_bytes
        ),
        None => "by its memory: the host's caches or memory are not known".to_owned(),
    };
    json!({
        "vm": name,
        "from_behaviour": permit,
        "behaviour": why,
        "from_memory": advice.from_memory,
        "memory": memory,
    })
}

/// A placement as JSON: `nodes` and `reasons`; `nodes` is null where the VM fits nowhere.
pub fn placement_json(placed: &Result<Placement, Unplaceable>) -> Value {
    match placed {
        Ok(placement) => json!({
            "nodes": placement.nodes,
            "reasons": placement.reasons(),
            "matched": placement.matched,
            "requirement": placement.requirement,
            "capacity": placement.capacity,
            "bandwidth_from": placement.bandwidth_from,
        }),
        Err(unplaceable) => json!({
            "nodes": null,
            "reasons": [unplaceable.to_string()],
            "shortages": unplaceable.shortages,
        }),
    }
}

/// A promise as JSON.
pub fn promise_json(promise: &Promise) -> Value {
    let unplaceable = promise.unplaceable.as_ref().map(ToString::to_string);
    json!({ "nodes": promise.nodes, "name": promise.name, "unplaceable": unplaceable })
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_control::{Config, Mode};

    fn desk() -> (tempfile::TempDir, Desk) {
        let dir = tempfile::tempdir().unwrap();
        let machine = Arc::new(homenode_machine::preset("r910").unwrap());
        let control = Arc::new(Mutex::new(Control::new(Config::default(), Mode::Act)));
        let orders = Orders::default();
        let clerk = Clerk {
            machine,
            control,
            orders,
        };
        let desk = Desk::open(dir.path(), clerk).unwrap();
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
            "{\"request\":\"permit-set\",\"vm\":\"a\",\"permit\":\"-1\"}\n",
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
