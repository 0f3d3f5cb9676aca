//! `homenode memory`: how little memory VMs may be left with, and who has how much.

use homenode_units::Bytes;

use crate::args::{FloorArgs, MemoryCommand, ShowArgs};
use crate::ask::{ask_agent, vms};
use crate::options::Size;
use crate::output::{or_dash, print_json, table};
use crate::printable::OneLine;
use homenode_api::Request;
use homenode_api::answer::FloorSet;

/// `homenode memory`.
///
/// # Errors
/// No agent, no such VM, or a floor that could not be set.
pub fn run(command: &MemoryCommand) -> anyhow::Result<()> {
    match command {
        MemoryCommand::Set(args) => set(args),
        MemoryCommand::Show(args) => show(args),
    }
}

fn set(args: &FloorArgs) -> anyhow::Result<()> {
    let floor = args.floor.into_option().map(|Size(floor)| floor);
    let vm = args.vm.clone();
    let answer: FloorSet = ask_agent(
        args.agent.dir(),
        &Request::FloorSet {
            vm,
            floor_bytes: floor,
        },
    )?;
    if args.agent.json() {
        return print_json("floor-set", &answer);
    }
    match floor {
        Some(floor) => say!("{} may be left with {floor}", OneLine(&args.vm)),
        None => say!("{} keeps all of its memory", OneLine(&args.vm)),
    }
    if let Some(note) = &answer.note {
        say!("note: {}", OneLine(note));
    }
    Ok(())
}

fn show(args: &ShowArgs) -> anyhow::Result<()> {
    let answer = vms(args.agent.dir(), args.vm.as_deref())?;
    if args.agent.json() {
        return print_json("vms", &answer);
    }
    let bytes = |bytes: Option<Bytes>| or_dash(bytes, |bytes| bytes.to_string());
    let rows = answer.vms.iter().map(|vm| {
        let status = &vm.memory;
        vec![
            vm.name.clone(),
            vm.memory_bytes.to_string(),
            bytes(status.limit_bytes),
            bytes(status.maximum_bytes),
            bytes(status.floor_bytes),
            bytes(status.need_bytes),
            bytes(status.usable_bytes),
            status.why.clone().unwrap_or_default(),
        ]
    });
    let header = ["VM", "has", "limit", "of", "floor", "needs", "usable", ""];
    say!("{}", table(&header, rows));
    Ok(())
}
