//! Our numad at the real one's place.

use std::collections::BTreeSet;

use anyhow::{Context as _, ensure};
use homenode_testbed_guest::Behaviour;

use super::agent::{start_agent, stop};
use super::numad::{NumadReplaced, write_script};
use crate::inside::Inside;
use crate::inside::guest::{Cpus, GuestSpec};

/// Three guests started at once with `placement='auto'` get three nodes, with the agent's ledger behind the answer.
pub fn three_starts(inside: &mut Inside) -> anyhow::Result<()> {
    // The binary answers as numad when it is called by that name.
    let numad = std::path::Path::new("/run/homenode-testbed/numad");
    std::fs::copy(inside.homenode()?, numad).context("cannot copy the homenode binary")?;
    // The hook tells which guest asks; libvirtd looks for hooks when it starts.
    let hook = format!("#!/bin/sh\nexec {} hook \"$@\"\n", inside.homenode()?.display());
    write_script(std::path::Path::new("/etc/libvirt/hooks/qemu.d/homenode"), &hook)?;
    inside.kill_libvirtd()?;
    inside.restart_libvirtd()?;
    let agent = start_agent(inside)?;
    let _replaced = NumadReplaced::with(numad)?;
    let specs: Vec<GuestSpec> = (0..3)
        .map(|number| {
            GuestSpec::new(&format!("auto{number}"))
                .cpus(Cpus::Auto)
                .doing(Behaviour::idle().with_touch(40))
        })
        .collect();
    let guests = inside.create_at_once(&specs)?;
    let mut nodes = Vec::new();
    for guest in &guests {
        // What was decided is in force as soon as the guest is created; whether its kernel then boots is not the question.
        let advice = inside.numad_advice(&guest.spec.name)?;
        inside.note(format!("{}: our numad said {advice:?}", guest.spec.name));
        ensure!(
            advice.len() == 1,
            "expected one node for {}, saw {advice:?}",
            guest.spec.name
        );
        nodes.extend(advice);
    }
    let distinct: BTreeSet<u32> = nodes.iter().copied().collect();
    ensure!(
        distinct.len() == guests.len(),
        "expected three different nodes, saw {nodes:?}"
    );
    stop(agent)
}
