//! `homenode policy`: which memory policy a VM has, and how its pages lie.

use homenode_units::NodeSet;
use serde_json::Value;

use crate::args::{PolicyCommand, PolicySetArgs, ShowArgs, SuggestArgs};
use crate::desk::Request;
use crate::output::{counted, or_dash, or_free, percent, print_json, table};
use crate::query::{ask_agent, vms};

/// `homenode policy`.
///
/// # Errors
/// No agent, no such VM, or a policy that the VM cannot have.
pub fn run(command: &PolicyCommand) -> anyhow::Result<()> {
    match command {
        PolicyCommand::Set(args) => set(args),
        PolicyCommand::Show(args) => show(args),
        PolicyCommand::Advise(args) => advise(args),
    }
}

fn set(args: &PolicySetArgs) -> anyhow::Result<()> {
    let policy = args.policy.into_option();
    let vm = args.vm.clone();
    let answer = ask_agent(&args.state, &Request::PolicySet { vm, policy })?;
    if args.json {
        return print_json(&answer);
    }
    match policy {
        Some(policy) => say!("{} has memory policy {policy}", args.vm),
        None => say!("the memory policy of {} is the agent's choice", args.vm),
    }
    let notes = answer["notes"].as_array().into_iter().flatten();
    notes
        .filter_map(Value::as_str)
        .for_each(|note| say!("note: {note}"));
    Ok(())
}

fn advise(args: &SuggestArgs) -> anyhow::Result<()> {
    let vm = args.vm.clone();
    let answer = ask_agent(&args.state, &Request::PolicyAdvise { vm })?;
    if args.json {
        return print_json(&answer);
    }
    let text = |key: &str| answer[key].as_str().unwrap_or_default();
    match answer["policy"].as_str() {
        None => say!("no advice: {}", text("why")),
        Some(policy) if policy == text("memory_policy") => say!("{policy}, as it has: {}", text("why")),
        Some(policy) => {
            say!("{policy}: {}", text("why"));
            say!("\nchoose it with: homenode policy set {} {policy}", args.vm);
        }
    }
    Ok(())
}

fn show(args: &ShowArgs) -> anyhow::Result<()> {
    let vms = vms(&args.state, args.vm.as_deref())?;
    let layouts: Vec<Value> = vms.iter().map(layout).collect();
    if args.json {
        return print_json(&layouts);
    }
    let rows = layouts.iter().map(|vm| {
        let text = |key: &str| vm[key].as_str().map(str::to_owned);
        let home = serde_json::from_value::<NodeSet>(vm["home"].clone()).ok();
        let sampled_by = serde_json::from_value(vm["pages_sampled_by"].clone()).ok();
        vec![
            text("name").unwrap_or_default(),
            counted(text("memory_policy").unwrap_or_default(), sampled_by),
            or_dash(text("memory_policy_chosen"), |chosen| chosen),
            or_free(home.as_ref()),
            or_dash(vm["pages_on"].as_array(), |on| pages(on)),
            or_dash(vm["local_access_ratio"].as_f64(), percent),
        ]
    });
    let header = ["VM", "policy", "chosen", "home", "MiB on nodes", "local"];
    say!("{}", table(&header, rows));
    for vm in &layouts {
        let name = vm["name"].as_str().unwrap_or_default();
        if let Some(caution) = vm["memory_policy_caution"].as_str() {
            say!("{name}: {caution}");
        }
        if let Some(why) = vm["memory_fixed"].as_str() {
            say!("{name}: its pages cannot move: {why}");
        }
    }
    Ok(())
}

/// Of what is known of a VM, what concerns the layout of its memory.
fn layout(vm: &Value) -> Value {
    let keys = [
        "name",
        "id",
        "memory_policy",
        "memory_policy_chosen",
        "pages_sampled_by",
        "memory_policy_caution",
        "memory_fixed",
        "home",
        "pages_on",
        "local_access_ratio",
    ];
    keys.into_iter()
        .map(|key| (key.to_owned(), vm[key].clone()))
        .collect()
}

/// `0: 120  3: 8`: MiB on each node that has any.
fn pages(on: &[Value]) -> String {
    const PAGES_PER_MIB: u64 = 256;
    let node = |pair: &Value| Some((pair[0].as_u64()?, pair[1].as_u64()? / PAGES_PER_MIB));
    let some = on.iter().filter_map(node).filter(|(_, mib)| *mib > 0);
    let each: Vec<String> = some.map(|(node, mib)| format!("{node}: {mib}")).collect();
    each.join("  ")
}
