//! Questions that change nothing: `machine`, `place`, `vm`.

use std::path::Path;

use anyhow::Context;
use homenode_control::{Config, Control, Mode, Request as Ask};
use homenode_host::{Host, Sample};
use homenode_machine::Machine;
use homenode_policy::placement::{Placement, Unplaceable};
use homenode_twin::{Scenario, Twin};
use serde_json::Value;

use crate::args::{HostArg, MachineArgs, PlaceArgs, VmArgs};
use crate::bad_input;
use crate::desk::{self, Request};
use crate::output::{counted, or_dash, or_free, percent, print_json, table};

/// `homenode machine`.
///
/// # Errors
/// An unknown preset, or a tree that cannot be read.
pub fn machine(args: &MachineArgs) -> anyhow::Result<()> {
    let machine = match (&args.file, &args.preset) {
        (Some(path), _) => Machine::from_toml_file(path).map_err(bad_input)?,
        (None, Some(name)) => homenode_machine::preset(name).map_err(bad_input)?,
        (None, None) => homenode_machine::sysfs::read(&args.sysfs)?,
    };
    if args.json {
        say!("{}", serde_json::to_string_pretty(&machine)?);
    } else {
        crate::output::print(format_args!("{}", homenode_machine::render_text(&machine)));
    }
    Ok(())
}

/// `homenode place`: asks the running agent; without one, looks at the host itself.
///
/// # Errors
/// Bad input; a VM that fits nowhere is a failure that says what is short.
pub fn place(args: &PlaceArgs) -> anyhow::Result<()> {
    let ask = Ask {
        vcpus: args.vcpus,
        memory: args.memory,
        bandwidth: args.bandwidth,
    };
    let answer = match &args.host {
        Some(HostArg::Twin(what)) => desk::placement_json(&place_on_twin(what.as_deref(), &ask)?),
        Some(HostArg::Libvirt(Some(uri))) => {
            return Err(bad_input(format!(
                "`place` asks about this host or a twin, not about {uri}; run it on that host"
            )));
        }
        _ => {
            let Ask {
                vcpus,
                memory: memory_bytes,
                bandwidth,
            } = ask;
            match desk::ask(
                &args.state,
                &Request::Place {
                    vcpus,
                    memory_bytes,
                    bandwidth,
                },
            )? {
                Some(answer) => answer,
                None => desk::placement_json(&crate::standalone::place(&args.state, &ask)?),
            }
        }
    };
    if args.json {
        say!("{}", serde_json::to_string_pretty(&answer)?);
    }
    let reasons: Vec<&str> = answer["reasons"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|r| r.as_str())
        .collect();
    match answer["nodes"].as_array() {
        Some(_) if args.json => Ok(()),
        Some(nodes) => {
            let nodes: homenode_units::NodeSet = serde_json::from_value(nodes.clone().into())?;
            say!("node {nodes}");
            reasons.iter().for_each(|reason| say!("  {reason}"));
            Ok(())
        }
        None => anyhow::bail!(
            "a VM of {} vCPUs and {} {}",
            args.vcpus,
            args.memory,
            reasons.join("; ")
        ),
    }
}

/// The idle machine of the twin: what a first VM would get.
fn place_on_twin(what: Option<&str>, ask: &Ask) -> anyhow::Result<Result<Placement, Unplaceable>> {
    let spec = crate::twin::spec(what, None)?;
    let mut idle = Scenario::of(
        "idle",
        vec![homenode_twin::VmSpec::new(
            "none",
            1,
            homenode_units::Bytes::from_gib(1),
            "idle",
        )],
    );
    // Its one VM arrives long after the question is answered.
    idle.vms[0].arrival = homenode_units::Ns::from_secs(3600);
    let mut twin = Twin::new(spec.machine, &idle, 1).map_err(bad_input)?;
    let sample = twin.sample()?;
    Ok(place_on(twin.machine(), sample, ask))
}

/// Where a VM would go on a host that was sampled once.
pub fn place_on(machine: &Machine, sample: Sample, ask: &Ask) -> Result<Placement, Unplaceable> {
    let mut control = Control::new(Config::default(), Mode::DryRun);
    control.begin(machine, sample);
    control.place(machine, ask)
}

/// Asks the agent. What it does not want of what the user wrote is the user's mistake.
///
/// # Errors
/// No agent, or its complaint.
pub fn ask_agent(state: &Path, request: &Request) -> anyhow::Result<Value> {
    let answer = desk::ask(state, request).map_err(|error| {
        let is_about_input = error.to_string().starts_with(desk::NO_VM);
        if is_about_input { bad_input(error) } else { error }
    })?;
    answer.with_context(|| {
        format!(
            "no agent runs here (nothing at {}); start one with `homenode run`",
            state.display()
        )
    })
}

/// What the agent says of its VMs, or of one.
///
/// # Errors
/// No agent, or no such VM.
pub fn vms(state: &Path, name: Option<&str>) -> anyhow::Result<Vec<Value>> {
    let answer = ask_agent(state, &Request::Vms)?;
    let mut vms: Vec<Value> = answer["vms"].as_array().cloned().unwrap_or_default();
    let Some(name) = name else { return Ok(vms) };
    let known = |vm: &Value| vm["name"].as_str().map(str::to_owned);
    let names: Vec<String> = vms.iter().filter_map(known).collect();
    vms.retain(|vm| vm["name"] == name);
    if vms.is_empty() {
        let names = names.join(", ");
        return Err(bad_input(format!("no VM `{name}` runs here; there are: {names}")));
    }
    Ok(vms)
}

/// What a VM's guest has of the memory that it could have.
fn memory(vm: &Value) -> String {
    let bytes = |value: &Value| value.as_u64().map(homenode_units::Bytes);
    let now = bytes(&vm["memory_bytes"]).unwrap_or_default();
    match bytes(&vm["memory"]["maximum_bytes"]).filter(|_| !vm["memory"]["limit_bytes"].is_null()) {
        Some(maximum) => format!("{now} of {maximum}"),
        None => now.to_string(),
    }
}

/// `homenode vm`.
///
/// # Errors
/// No agent, or no such VM.
pub fn vm(args: &VmArgs) -> anyhow::Result<()> {
    let vms = vms(&args.state, args.name.as_deref())?;
    if args.json {
        return print_json(&vms);
    }
    let rows = vms.iter().map(|vm| {
        let home = serde_json::from_value::<homenode_units::NodeSet>(vm["home"].clone()).ok();
        vec![
            vm["name"].as_str().unwrap_or("-").to_owned(),
            or_free(home.as_ref()),
            memory(vm),
            or_dash(vm["cpus_used"].as_f64(), |used| format!("{used:.1}")),
            or_dash(vm["llc_miss_rate"].as_f64(), |rate| {
                counted(
                    percent(rate),
                    serde_json::from_value(vm["counted_by"].clone()).ok(),
                )
            }),
            or_dash(vm["local_access_ratio"].as_f64(), percent),
            vm["left_alone"].as_str().unwrap_or_default().to_owned(),
        ]
    });
    say!(
        "{}",
        table(&["VM", "home", "memory", "CPUs", "LLC miss", "local", ""], rows)
    );
    Ok(())
}
