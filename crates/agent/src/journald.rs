//! Writes events as entries of systemd's journal, with fields to search by (`journalctl HOMENODE_VM=web`), if standard output is
//! connected to the journal. All other output is plain lines, as on a terminal.
//!
//! | field | holds |
//! |---|---|
//! | `MESSAGE_ID` | the id of the event's kind ([`MESSAGE_IDS`]) |
//! | `PRIORITY` | 4 for failed actions and refused plans, 5 for findings, 6 for all other events |
//! | `HOMENODE_EVENT` | the kind, as `homenode run --json` names it |
//! | `HOMENODE_VM`, `HOMENODE_VM_UUID` | the VM, if the event is about one |
//! | `HOMENODE_POLICY` | the policy that decided or found it |
//! | `HOMENODE_DECISION`, `HOMENODE_OUTCOME` | the kind of action, and of its outcome |

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use homenode_control::Event;
use homenode_host::Outcome;
use serde_json::Value;

/// journald's socket.
const SOCKET: &str = "/run/systemd/journal/socket";

/// Kinds of events and their message ids in the journal. An id never changes.
pub const MESSAGE_IDS: &[(&str, &str)] = &[
    ("appeared", "f3c95789ace14954ac5d6baed2eac902"),
    ("vanished", "cbf27734ac1045258b66402800e03d2c"),
    ("changed-by-other", "e0a3a91f23464c13bc27ed12b10877a9"),
    ("given-back", "f1260ebc7d564b56b714dc919b27dbdf"),
    ("quota-changed-by-other", "6caf76a5703548ae8280ad3729a6f2e7"),
    ("quota-given-back", "3f0c9931918c40bf9670c342c6cce996"),
    ("decided", "004498f4b98747c18c9c26a813678d7a"),
    ("recommended", "0ecaf828e2f745538fcc69d79561a0d1"),
    ("approved", "73f80e52a36948b5a4414c46f147ecf9"),
    ("rejected", "c1af446506f142fca1010f154a9f2968"),
    ("expired", "b459071afb8a4f9ebf72c46dca8fbe35"),
    ("found", "5a3c1fbdf9da4bf3a81696a68afe2312"),
    ("refused", "135d63cf1293424c802a2e8f96fc5ce8"),
];

/// A connection to journald.
pub struct Journal {
    socket: UnixDatagram,
}

impl Journal {
    /// Connects to the journal if standard output is connected to it.
    pub fn of_output() -> Option<Journal> {
        let stream = std::env::var("JOURNAL_STREAM").ok()?;
        is_stream(&stream, rustix::stdio::stdout())
            .then(|| Journal::at(Path::new(SOCKET)).ok())
            .flatten()
    }

    fn at(path: &Path) -> io::Result<Journal> {
        let socket = UnixDatagram::unbound()?;
        socket.connect(path)?;
        // A hanging journal must not hold up the loop.
        socket.set_nonblocking(true)?;
        Ok(Journal { socket })
    }

    /// Writes an entry; returns true if the journal took it.
    pub fn takes(&self, text: &str, event: Option<&Event>) -> bool {
        let mut entry = Vec::new();
        put(&mut entry, "MESSAGE", text);
        put(&mut entry, "SYSLOG_IDENTIFIER", "homenode");
        for (field, value) in event.map(fields).unwrap_or_default() {
            put(&mut entry, field, &value);
        }
        self.socket.send(&entry).is_ok()
    }
}

/// Returns true if `descriptor` is the stream that `JOURNAL_STREAM` names. Another program may have redirected it since.
fn is_stream(named: &str, descriptor: impl AsFd) -> bool {
    rustix::fs::fstat(descriptor).is_ok_and(|stat| named == format!("{}:{}", stat.st_dev, stat.st_ino))
}

/// Appends a field in the journal's format, in which a value of several lines is preceded by its length.
fn put(entry: &mut Vec<u8>, field: &str, value: &str) {
    entry.extend(field.as_bytes());
    if value.contains('\n') {
        entry.push(b'\n');
        entry.extend((value.len() as u64).to_le_bytes());
    } else {
        entry.push(b'=');
    }
    entry.extend(value.as_bytes());
    entry.push(b'\n');
}

/// Returns the search fields of an event.
fn fields(event: &Event) -> Vec<(&'static str, String)> {
    let all = serde_json::to_value(event).unwrap_or_default();
    let text = |key: &str| all[key].as_str().map(str::to_owned);
    let kind = text("event").unwrap_or_default();
    let id = MESSAGE_IDS.iter().find(|(of, _)| *of == kind);
    let decision = match event {
        Event::Decided { decision, .. } | Event::Recommended { decision, .. } => {
            Some(decision.action.act.kind().to_owned())
        }
        _ => None,
    };
    let (outcome, priority) = match event {
        Event::Decided {
            result: result @ Outcome::Failed(_),
            ..
        } => (Some(result.kind().to_owned()), "4"),
        Event::Decided { result, .. } => (Some(result.kind().to_owned()), "6"),
        Event::Refused { .. } => (None, "4"),
        Event::Found { .. } => (None, "5"),
        _ => (None, "6"),
    };
    let uuid = match &all["vm"] {
        Value::Null => None,
        vm => Some(vm.as_str().map_or_else(|| vm.to_string(), str::to_owned)),
    };
    let found = [
        ("MESSAGE_ID", id.map(|(_, id)| (*id).to_owned())),
        ("PRIORITY", Some(priority.to_owned())),
        ("HOMENODE_EVENT", Some(kind)),
        ("HOMENODE_VM", text("name")),
        ("HOMENODE_VM_UUID", uuid),
        ("HOMENODE_POLICY", text("policy")),
        ("HOMENODE_DECISION", decision),
        ("HOMENODE_OUTCOME", outcome),
    ];
    let found = found.into_iter();
    found.filter_map(|(field, value)| Some((field, value?))).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use homenode_host::{Act, Action, Decision, Failure};
    use homenode_units::{NodeSet, VmId};

    use super::*;

    fn decided(result: Outcome) -> Event {
        let decision = Decision {
            policy: "arrange",
            action: Action {
                vm: VmId(7),
                act: Act::SetHome {
                    nodes: NodeSet::default(),
                },
            },
            reason: "it fits".to_owned(),
        };
        Event::Decided {
            name: "web".to_owned(),
            decision,
            result,
        }
    }

    #[test]
    fn an_event_is_an_entry_that_is_found_by_its_vm_and_its_decision() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let journald = UnixDatagram::bind(&path).unwrap();
        let journal = Journal::at(&path).unwrap();
        let event = decided(Outcome::Done);
        assert!(journal.takes("arrange: VM web: it fits", Some(&event)));
        let mut bytes = [0; 4096];
        let length = journald.recv(&mut bytes).unwrap();
        let entry = String::from_utf8(bytes[..length].to_vec()).unwrap();
        let fields: BTreeSet<&str> = entry.lines().collect();
        let id = MESSAGE_IDS.iter().find(|(kind, _)| *kind == "decided").unwrap().1;
        for field in [
            "MESSAGE=arrange: VM web: it fits",
            "PRIORITY=6",
            "HOMENODE_EVENT=decided",
            "HOMENODE_VM=web",
            "HOMENODE_POLICY=arrange",
            "HOMENODE_DECISION=set-home",
            "HOMENODE_OUTCOME=done",
            &format!("MESSAGE_ID={id}"),
        ] {
            assert!(fields.contains(field), "{field}: {entry}");
        }
        drop(journald);
        assert!(!journal.takes("a journal that is gone", None));
    }

    #[test]
    fn what_failed_is_a_warning() {
        let failed = Failure::VmGone.on("web");
        let fields = fields(&decided(Outcome::Failed(failed)));
        assert!(fields.contains(&("PRIORITY", "4".to_owned())), "{fields:?}");
    }

    #[test]
    fn a_value_of_several_lines_says_how_long_it_is() {
        let mut entry = Vec::new();
        put(&mut entry, "MESSAGE", "a\nb");
        assert_eq!(entry, b"MESSAGE\n\x03\0\0\0\0\0\0\0a\nb\n");
    }

    #[test]
    fn a_descriptor_is_the_journals_where_device_and_inode_are_those_that_it_names() {
        let file = tempfile::tempfile().unwrap();
        let stat = rustix::fs::fstat(&file).unwrap();
        assert!(is_stream(&format!("{}:{}", stat.st_dev, stat.st_ino), &file));
        assert!(!is_stream(&format!("{}:{}", stat.st_dev, stat.st_ino + 1), &file));
        assert!(!is_stream("", &file));
    }

    #[test]
    fn every_kind_of_event_has_an_id_of_its_own() {
        let schema = schemars::schema_for!(Event).to_value();
        let kinds = schema["oneOf"].as_array().unwrap().iter();
        let kinds: BTreeSet<&str> = kinds
            .map(|one| one["properties"]["event"]["const"].as_str().unwrap())
            .collect();
        let known: BTreeSet<&str> = MESSAGE_IDS.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds, known);
        let ids: BTreeSet<&str> = MESSAGE_IDS.iter().map(|(_, id)| *id).collect();
        assert!(
            ids.len() == known.len() && ids.iter().all(|id| id.len() == 32),
            "{ids:?}"
        );
    }
}
