//! Writes the scenario as a file: each figure with its source, as in `data/workloads`.

use homenode_twin::workload::MissRatioCurve;
use homenode_units::{Bytes, MemoryPolicy, Migration, Ns, Placing};
use toml_edit::{ArrayOfTables, DocumentMut, InlineTable, Item, Table, Value, value};

use super::load::Load;
use super::{About, Recorded, Vm};
use crate::profile::{noted, size};
use crate::write::round;

/// Purpose of the scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The file is for people: programs end after the counted work.
    File,
    /// The file is for comparison with the counts: programs do not end before the stretch does.
    Fit,
}

/// Multiple of the counted work that is given to a program that must not end.
const WITHOUT_END: f64 = 3.0;
/// Multiple of the stretch that is simulated, so that programs which are slower than recorded can end.
const LONGER: u64 = 2;

/// Returns the scenario's text.
pub(super) fn scenario(recorded: &Recorded, about: &About, purpose: Purpose) -> String {
    let mut document = DocumentMut::new();
    document.insert("name", value("recorded"));
    document.insert("about", value(plain(&about.title)));
    document.insert("machine", value(&about.machine));
    let lasted = Ns(recorded.lead.0 + recorded.lasted.0);
    let duration = match purpose {
        Purpose::File => Ns(recorded.lead.0 + LONGER * recorded.lasted.0),
        Purpose::Fit => lasted,
    };
    document.insert("duration", value(time(duration)));
    document.insert("numa_balancing", value(recorded.is_balanced));
    if recorded.lead > Ns::ZERO {
        let source = "VMs that were running before the stretch start here, and get their memory and homes in this time";
        document.insert("warm_up", noted(time(recorded.lead), source));
    }
    document.insert(
        "policies",
        value(Value::from_iter(about.policies.iter().map(String::as_str))),
    );
    if let Some(mut first) = document.key_mut("name") {
        first.leaf_decor_mut().set_prefix(head(recorded, about));
    }
    document.insert("vm", Item::ArrayOfTables(recorded.vms.iter().map(vm).collect()));
    let loads = recorded.vms.iter().filter_map(|vm| Some((vm, vm.load.as_ref()?)));
    let loads: ArrayOfTables = loads.map(|(vm, load)| workload(vm, load, purpose)).collect();
    if !loads.is_empty() {
        document.insert("workload", Item::ArrayOfTables(loads));
    }
    let events: ArrayOfTables = recorded
        .vms
        .iter()
        .flat_map(|vm| events(recorded, vm, purpose))
        .collect();
    if !events.is_empty() {
        document.insert("event", Item::ArrayOfTables(events));
    }
    document.to_string()
}

/// Returns the comments above the first key.
fn head(recorded: &Recorded, about: &About) -> String {
    let mut lines = vec![
        format!("{} {}", super::FIRST_WORDS, about.source),
        "counted: from the samples; fitted: so that the twin counts the same; assumed: the samples do not tell.".to_owned(),
    ];
    lines.extend(about.notes.iter().map(|note| format!("Assumed: {note}.")));
    let of_vms = recorded.assumed();
    lines.extend(
        of_vms
            .iter()
            .map(|(note, vms)| format!("Assumed of {}: {note}.", vms.join(", "))),
    );
    lines.iter().map(|line| format!("# {}\n", plain(line))).collect()
}

/// Reduces untrusted text, such as VM names, to one line.
fn plain(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

fn vm(vm: &Vm) -> Table {
    let settings = &vm.life.last.settings;
    let mut table = Table::new();
    table.insert("name", value(&vm.name));
    table.insert("vcpus", noted(i64::from(vm.life.vcpus.max(1)), "counted"));
    table.insert("memory", noted(size(vm.life.memory), "counted"));
    table.insert("workload", value(&vm.workload));
    table.insert("arrival", noted(time(vm.arrival), "counted"));
    if !vm.stays && vm.load.is_some() {
        table.insert("after", noted("leave", "it left before the stretch ended"));
    }
    let mut set = |key: &str, text: Option<String>| {
        if let Some(text) = text {
            table.insert(key, noted(text, "its operator's setting"));
        }
    };
    set("cpus", settings.cpus_allowed.as_ref().map(ToString::to_string));
    set("memory_nodes", settings.home.as_ref().map(ToString::to_string));
    set("permit", settings.permit.map(|permit| permit.to_string()));
    set("memory_floor", settings.memory_floor.map(size));
    set("kernel_footprint", settings.kernel_footprint.map(size));
    let policy = MemoryPolicy {
        placing: vm.life.last.memory_policy.placing,
        migration: settings
            .memory_policy
            .map_or(Migration::None, |policy| policy.migration),
    };
    if policy != MemoryPolicy::default() {
        set("memory_policy", Some(policy.to_string()));
    }
    if let Some(quota) = settings.quota {
        let percent = 100.0 * quota.run_ns.as_f64() / quota.period_ns.as_f64() * f64::from(vm.life.vcpus);
        table.insert(
            "cap_percent",
            noted(
                (percent as i64).max(1),
                "its operator's CPU quota, of all vCPUs together",
            ),
        );
    }
    if vm.life.last.virtual_nodes.len() > 1 && policy.placing == Placing::FirstTouch {
        let is_told = vm.life.last.published.is_some();
        table.insert(
            "vnuma",
            noted(
                if is_told { "live" } else { "static" },
                "counted: its guest sees nodes",
            ),
        );
    }
    table
}

fn workload(vm: &Vm, load: &Load, purpose: Purpose) -> Table {
    let mut workload = Table::new();
    workload.insert("name", value(&vm.workload));
    workload.insert("about", value(format!("What VM {} did", plain(&vm.name))));
    workload.insert("program", Item::Table(program(vm, load, purpose)));
    workload
}

fn program(vm: &Vm, load: &Load, purpose: Purpose) -> Table {
    let mut program = Table::new();
    let mut put = |key: &str, of: Value, source: &str| {
        program.insert(key, noted(of, source));
    };
    let threads = if load.is_single && vm.life.vcpus > 1 {
        "single"
    } else {
        "one-per-vcpu"
    };
    let work = match purpose {
        Purpose::File => 1.0,
        Purpose::Fit => WITHOUT_END,
    };
    let work = (work * load.instructions / 1e9).max(1e-6);
    let (counted, in_llc) = match vm.is_counted() {
        true => ("counted", "counted, corrected by the twin"),
        false => ("assumed: one per cycle that it ran", "assumed"),
    };
    put("threads", threads.into(), "counted: on how many vCPUs it ran");
    put("instructions_g_per_thread", digits(work), counted);
    put(
        "cpi_core",
        digits(load.cpi_core),
        if vm.is_counted() { "fitted" } else { "assumed" },
    );
    put(
        "llc_accesses_per_kilo_instruction",
        digits(load.llc_accesses),
        in_llc,
    );
    put("misses_in_flight", digits(load.misses_in_flight), "assumed");
    put("hits_in_flight", digits(load.hits_in_flight), "assumed");
    put(
        "write_share",
        digits(load.write_share),
        "computed: traffic of all controllers over misses of all VMs",
    );
    let MissRatioCurve { m_inf, c0, k, .. } = load.curve;
    let mut curve = Table::new();
    curve.insert("m_inf", noted(digits(m_inf), "fitted"));
    curve.insert("c0", noted(size(c0), "fitted"));
    curve.insert("k", noted(digits(k), "assumed"));
    program.insert("miss_ratio", Item::Table(curve));
    if let Some((instructions, ns)) = load.rest {
        let mut rest = Table::new();
        rest.insert(
            "interval_m_instructions",
            noted(
                digits(instructions / 1e6),
                "assumed: a tenth of a second, rest included",
            ),
        );
        rest.insert(
            "mean",
            noted(time(Ns((ns as u64).max(1))), "fitted to its CPU time"),
        );
        program.insert("rest", Item::Table(rest));
    }
    program.insert("regions", Item::ArrayOfTables(regions(vm, load)));
    let phases: ArrayOfTables = phases(load, purpose).collect();
    if !phases.is_empty() {
        program.insert("phases", Item::ArrayOfTables(phases));
    }
    program
}

fn regions(vm: &Vm, load: &Load) -> ArrayOfTables {
    let threads = if load.is_single {
        1
    } else {
        u64::from(vm.life.vcpus.max(1))
    };
    let whole = |bytes: f64| Bytes((bytes as u64 / 4096 * 4096).max(4096));
    let own = whole(load.memory.as_f64() * load.own_share / threads as f64);
    let others = whole(load.memory.as_f64() * (1.0 - load.own_share));
    let region = |kind: &str, bytes: Bytes, share: f64| {
        let mut region = Table::new();
        region.insert("kind", noted(kind, "fitted to its local share"));
        region.insert(
            "size",
            noted(size(bytes), "counted: memory that its guest touched"),
        );
        region.insert("access_share", digits_item(share));
        region
    };
    let own_share = round(load.own_share, 4);
    let mut regions = ArrayOfTables::new();
    if own_share > 0.0 {
        regions.push(region("private", own, own_share));
    }
    if own_share < 1.0 {
        regions.push(region("shared", others, round(1.0 - own_share, 4)));
    }
    regions
}

/// Returns the phases. Their shares add up to 1 after rounding.
fn phases(load: &Load, purpose: Purpose) -> impl Iterator<Item = Table> {
    let count = load.phases.len();
    let whole = if purpose == Purpose::Fit { WITHOUT_END } else { 1.0 };
    let mut left = 1.0;
    load.phases.iter().enumerate().map(move |(at, phase)| {
        let share = if at + 1 == count {
            left
        } else {
            round(phase.share / whole, 9).max(1e-9)
        };
        left -= share;
        let mut table = Table::new();
        table.insert("share", noted(round(share, 9).max(1e-9), "counted"));
        table.insert("llc_access_factor", noted(digits(phase.llc_accesses), "counted"));
        table.insert("cpi_factor", noted(1.0, "assumed"));
        table.insert("rest_factor", noted(digits(phase.rest), "counted"));
        table
    })
}

/// Returns the events of a VM: its memory is moved to where it was before the stretch, and the VM leaves when it left.
fn events(recorded: &Recorded, vm: &Vm, purpose: Purpose) -> Vec<Table> {
    let event = |at: Ns, action: Value| {
        let mut event = Table::new();
        event.insert("at", value(time(at)));
        event.insert("vm", value(&vm.name));
        event.insert("action", value(action));
        event
    };
    let mut events = Vec::new();
    if let Some(nodes) = vm.life.lay_on.as_ref().filter(|_| recorded.lead > Ns::ZERO) {
        let nodes: InlineTable = [("nodes", nodes.to_string())].into_iter().collect();
        let migrate: InlineTable = [("migrate", nodes)].into_iter().collect();
        events.push(event(Ns(recorded.lead.0 / 2), migrate.into()));
    }
    if !vm.stays && (purpose == Purpose::Fit || vm.load.is_none()) {
        events.push(event(vm.left, "stop".into()));
    }
    events
}

/// Rounds a figure to six digits.
fn digits(figure: f64) -> Value {
    if figure == 0.0 || !figure.is_finite() {
        return 0.0.into();
    }
    let places = 5 - figure.abs().log10().floor() as i32;
    round(figure, places.clamp(0, 15)).into()
}

fn digits_item(figure: f64) -> Item {
    Item::Value(digits(figure))
}

/// Formats a time in the largest unit that divides it.
fn time(ns: Ns) -> String {
    match ns.0 {
        0 => "0s".to_owned(),
        ns if ns % 1_000_000_000 == 0 => format!("{}s", ns / 1_000_000_000),
        ns if ns % 1_000_000 == 0 => format!("{}ms", ns / 1_000_000),
        ns if ns % 1_000 == 0 => format!("{}us", ns / 1_000),
        ns => format!("{ns}ns"),
    }
}
