//! Journals of agents up to 0.1.0: read once, and rewritten by the opening that read them.

use std::collections::BTreeMap;

use homenode_host::Limit;
use homenode_units::{CpuSet, NodeSet, VmId};
use serde::Deserialize;

use super::{Before, Entry, Line, RUN, Run, Start, Written};
use crate::levers::{Confined, Home, MemoryNodes, Moving, Pins, Quotas, Shrink, StatsPeriod, Watched};

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Record {
    First { run: Run, before: Before },
    Pinned { vm: VmId, vcpus: Vec<u16>, cpus: CpuSet },
    Home { vm: VmId, nodes: NodeSet },
    Nodes { vm: VmId, nodes: NodeSet },
    Moving { vm: VmId, to: NodeSet },
    Moved { vm: VmId },
    Held { vm: VmId, quotas: Quotas },
    Lifted { vm: VmId },
    Confined { vm: VmId, limit: Limit },
    Freed { vm: VmId },
    Watched { vm: VmId },
    Unwatched { vm: VmId },
    Shrunk { vm: VmId, shrink: Shrink },
    GivenBack { vm: VmId },
    Asked { vm: VmId, before: u32 },
    NotAsked { vm: VmId },
    HomeLifted { vm: VmId },
    Restored { vm: VmId },
    Forgotten { vm: VmId },
}

/// FNV-1a, 64 bits.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// What a line of such a journal says after all lines before it; `None` where it is none, or damaged.
pub(super) fn lines(line: &[u8], entries: &BTreeMap<VmId, Entry>) -> Option<Vec<Line>> {
    let line = std::str::from_utf8(line).ok()?;
    let (sum, json) = line.split_once(' ')?;
    if sum.len() != 16 || u64::from_str_radix(sum, 16).ok()? != checksum(json.as_bytes()) {
        return None;
    }
    let none = |vm: VmId, is_meant: &dyn Fn(&str) -> bool| {
        let of = entries.get(&vm);
        of.map(|entry| entry.none(is_meant)).unwrap_or_default()
    };
    Some(match serde_json::from_str(json).ok()? {
        Record::First { run, before } => {
            let vm = run.vm;
            let same = entries.get(&vm).is_some_and(|entry| entry.run == run);
            let mut lines = none(vm, &|_| !same);
            lines.push(Line::new(vm, RUN, &Start { run, before }));
            lines
        }
        Record::Pinned { vm, vcpus, cpus } => {
            let mut pins: Pins = entries.get(&vm).and_then(Entry::get).unwrap_or_default();
            pins.0
                .extend(vcpus.into_iter().map(|index| (index, vec![cpus.clone()])));
            vec![Line::new(vm, Pins::KEY, &pins)]
        }
        Record::Home { vm, nodes } => vec![Line::new(vm, Home::KEY, &nodes)],
        Record::Nodes { vm, nodes } => vec![Line::new(vm, MemoryNodes::KEY, &nodes)],
        Record::Moving { vm, to } => vec![Line::new(vm, Moving::KEY, &to)],
        Record::Moved { vm } => vec![Line::none(vm, Moving::KEY)],
        Record::Held { vm, quotas } => vec![Line::new(vm, Quotas::KEY, &quotas)],
        Record::Lifted { vm } => vec![Line::none(vm, Quotas::KEY)],
        Record::Confined { vm, limit } => vec![Line::new(vm, Confined::KEY, &limit)],
        Record::Freed { vm } => vec![Line::none(vm, Confined::KEY)],
        Record::Watched { vm } => vec![Line::new(vm, Watched::KEY, &Watched {})],
        Record::Unwatched { vm } => vec![Line::none(vm, Watched::KEY)],
        Record::Shrunk { vm, shrink } => vec![Line::new(vm, Shrink::KEY, &shrink)],
        Record::GivenBack { vm } => vec![Line::none(vm, Shrink::KEY)],
        Record::Asked { vm, before } => {
            vec![Line::new(vm, StatsPeriod::KEY, &StatsPeriod { before_s: before })]
        }
        Record::NotAsked { vm } => vec![Line::none(vm, StatsPeriod::KEY)],
        Record::HomeLifted { vm } => none(vm, &|key| {
            [Pins::KEY, Home::KEY, MemoryNodes::KEY, Moving::KEY].contains(&key)
        }),
        Record::Restored { vm } => none(vm, &|_| true),
        Record::Forgotten { vm } => vec![Line::none(vm, RUN)],
    })
}
