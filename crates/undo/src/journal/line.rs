//! One line of the journal, and how two copies are read together.

use std::collections::BTreeMap;

use homenode_units::VmId;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Entry, RUN, Start};

/// Marks the start of a rewritten file: lines before it do not count.
const RESET: &str = "reset";

/// One line of the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Line {
    /// Ascending, and the same in both copies. A line without a number has the number after the previous line's.
    #[serde(rename = "n", default, skip_serializing_if = "Option::is_none")]
    number: Option<u64>,
    vm: VmId,
    lever: String,
    entry: Option<Value>,
}

impl Line {
    pub(super) fn new(vm: VmId, lever: &str, entry: &impl Serialize) -> Line {
        let entry = serde_json::to_value(entry).expect("entries hold nothing that JSON cannot");
        Line {
            number: None,
            vm,
            lever: lever.to_owned(),
            entry: Some(entry),
        }
    }

    pub(super) fn none(vm: VmId, lever: &str) -> Line {
        Line {
            number: None,
            vm,
            lever: lever.to_owned(),
            entry: None,
        }
    }

    /// Returns a line that strikes out everything in earlier lines.
    pub(super) fn reset() -> Line {
        Line::none(VmId(0), RESET)
    }

    pub(super) fn numbered(self, number: u64) -> Line {
        Line {
            number: Some(number),
            ..self
        }
    }

    pub(super) fn encode(&self) -> String {
        let json = serde_json::to_string(self).expect("lines hold nothing that JSON cannot");
        format!("{:08x} {json}\n", crc32fast::hash(json.as_bytes()))
    }

    pub(super) fn decode(line: &[u8]) -> Option<Line> {
        let line = std::str::from_utf8(line).ok()?;
        let (sum, json) = line.split_once(' ')?;
        let is_whole =
            sum.len() == 8 && u32::from_str_radix(sum, 16).ok()? == crc32fast::hash(json.as_bytes());
        let line: Line = serde_json::from_str(json).ok().filter(|_| is_whole)?;
        // If a run cannot be read, its VM would silently drop out; with another VM's run, the guard would undo on the wrong VM.
        let is_own = |start: Start| start.run.vm == line.vm;
        let starts = |entry: &Value| line.lever != RUN || Start::deserialize(entry).is_ok_and(is_own);
        line.entry.as_ref().is_none_or(starts).then_some(line)
    }

    pub(super) fn apply(self, entries: &mut BTreeMap<VmId, Entry>) {
        match (self.lever.as_str(), self.entry) {
            (RESET, None) => entries.clear(),
            (RUN, None) => {
                entries.remove(&self.vm);
            }
            (RUN, Some(start)) => {
                let Ok(Start { run, before }) = Start::deserialize(start) else {
                    return;
                };
                let levers = entries
                    .remove(&self.vm)
                    .map(|entry| entry.levers)
                    .unwrap_or_default();
                entries.insert(self.vm, Entry { run, before, levers });
            }
            (_, entry) => {
                let Some(of) = entries.get_mut(&self.vm) else {
                    return;
                };
                match entry {
                    Some(entry) => of.levers.insert(self.lever, entry),
                    None => of.levers.remove(&self.lever),
                };
            }
        }
    }
}

/// What the copies of a journal say together.
#[derive(Debug, Default)]
pub(super) struct Replay {
    pub entries: BTreeMap<VmId, Entry>,
    /// Lines with a bad checksum, from all copies.
    pub damaged: Vec<Vec<u8>>,
    /// Number of lines that are in no copy.
    pub lost: u64,
    /// The number of the next line.
    pub next: u64,
}

/// Merges copies of a journal: a line counts if at least one copy has it intact.
pub(super) fn replay(copies: &[&[u8]]) -> Replay {
    let mut replay = Replay::default();
    let mut lines = BTreeMap::new();
    for copy in copies {
        for (number, line) in read(copy, &mut replay.damaged) {
            lines.entry(number).or_insert(line);
        }
    }
    // Lines before the last reset are not counted as lost.
    let reset = lines.iter().rev().find(|(_, line)| line.lever == RESET);
    let begin = reset
        .or_else(|| lines.iter().next())
        .map_or(0, |(number, _)| *number);
    replay.next = lines
        .last_key_value()
        .map_or(0, |(number, _)| number.saturating_add(1));
    let kept = lines.range(begin..).count() as u64;
    // A last line that is damaged in all copies leaves no gap, so it does not count as lost.
    replay.lost = (replay.next - begin) - kept;
    lines
        .into_values()
        .for_each(|line| line.apply(&mut replay.entries));
    replay
}

/// Reads the numbered lines of one copy. Drops a torn last line, which a crash leaves.
fn read(bytes: &[u8], damaged: &mut Vec<Vec<u8>>) -> Vec<(u64, Line)> {
    let mut read = Vec::new();
    let mut next = 0;
    let mut lines = bytes.split_inclusive(|byte| *byte == b'\n').peekable();
    while let Some(line) = lines.next() {
        let is_torn = lines.peek().is_none() && !line.ends_with(b"\n");
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        match Line::decode(line) {
            Some(line) => {
                let number = line.number.unwrap_or(next);
                next = number.saturating_add(1);
                read.push((number, line));
            }
            None if is_torn => {}
            None => damaged.push(line.to_vec()),
        }
    }
    read
}
