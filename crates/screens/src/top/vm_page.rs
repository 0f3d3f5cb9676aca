//! The page of one VM, with everything that is known about it.

use homenode_control::{Migrations, VmStatus};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span};

use crate::figures::{or_none, percent, span};
use crate::limits::{self, LOCAL, Level, VM_WAITING};
use crate::pictures::Picture;
use crate::printable::OneLine;
use crate::table::wrapped;
use crate::top::events::last_events;
use crate::top::view::View;
use crate::top::vms;

/// Column at which values begin.
const VALUES_AT: usize = 16;
/// Most events of a VM that are shown.
const EVENTS_MAX: usize = 200;

/// Label, value and level of one line.
type Said = (&'static str, String, Level);

/// Returns the page of the chosen VM as lines.
pub(super) fn lines(view: &View, picture: &Picture, width: usize) -> Vec<Line<'static>> {
    let Some((id, name)) = &view.chosen else {
        return vec![Line::raw("no VM is chosen")];
    };
    let found = picture.overview.status.vms.iter().find(|vm| vm.id == *id);
    let title = format!("VM {}", OneLine(name));
    let mut lines = vec![Line::styled(title, Style::new().add_modifier(Modifier::BOLD))];
    match found {
        None => lines.push(Line::raw("it is not running at this time")),
        Some(vm) => {
            for (label, text, level) in said(vm, &view.trail.bars(*id)) {
                let style = view.colours.style(level);
                let texts = wrapped(&text, width.saturating_sub(VALUES_AT).max(1), 0);
                for (at, text) in texts.into_iter().enumerate() {
                    let label = if at == 0 { label } else { "" };
                    let label = Span::raw(format!("{label:VALUES_AT$}"));
                    lines.push(Line::from(vec![label, Span::styled(text, style)]));
                }
            }
        }
    }
    lines.push(Line::default());
    let events: Vec<_> = picture
        .overview
        .events
        .iter()
        .filter(|event| event.vm.as_deref() == Some(name))
        .collect();
    let heading = if events.is_empty() {
        "no recent events"
    } else {
        "recent events:"
    };
    lines.push(Line::raw(heading));
    lines.extend(last_events(
        view,
        picture.wall_ns,
        events.into_iter(),
        (width, EVENTS_MAX),
    ));
    lines
}

fn said(vm: &VmStatus, bars: &str) -> Vec<Said> {
    let mut all = Vec::new();
    place(vm, &mut all);
    speed(vm, bars, &mut all);
    load(vm, &mut all);
    permit(vm, &mut all);
    memory(vm, &mut all);
    topology(vm, &mut all);
    all.retain(|(_, text, _)| !text.is_empty());
    all
}

fn or_unknown<T>(value: Option<T>, of: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| "not known".to_owned(), of)
}

fn place(vm: &VmStatus, all: &mut Vec<Said>) {
    all.push(("UUID", vm.id.to_string(), Level::Fine));
    all.push(("home", or_none(vm.home.as_ref()), Level::Fine));
    all.push((
        "left alone",
        vm.left_alone.clone().unwrap_or_default(),
        Level::Fine,
    ));
    all.push(("vCPUs on", vms::vcpus_on(vm), Level::Fine));
}

/// Adds how fast the VM is compared with its usual speed, over the pictures shown so far, and what changes of its home gained.
fn speed(vm: &VmStatus, bars: &str, all: &mut Vec<Said>) {
    let billion = |rate: f64| format!("{:.2}", rate / 1e9);
    let usual = vm.instructions_per_cpu_s_usual;
    let ratio = vm
        .speed_ratio
        .map(|ratio| format!("{} of usual: ", percent(ratio)));
    let now = vm
        .instructions_per_cpu_s
        .map_or_else(|| "not known now".to_owned(), billion);
    let usual = usual.map_or_else(|| "not known yet".to_owned(), billion);
    let is_counted = vm.instructions_per_s.is_some();
    let text = match is_counted {
        true => format!(
            "{}{now} G instructions per CPU-second, usually {usual}",
            ratio.unwrap_or_default()
        ),
        false => "not known: instructions are not counted".to_owned(),
    };
    all.push(("speed", text, Level::Fine));
    all.push(("", bars.to_owned(), Level::Fine));
    let time = vm.time_gained_ns.zip(vm.time_lost_ns);
    let time = time.map(|(gained, lost)| {
        let (gained, lost) = (span(gained), span(lost));
        format!("{gained} of CPU time through changes of its home; lost {lost}")
    });
    let none = || "not known: no change of its home was measured".to_owned();
    all.push(("gained", time.unwrap_or_else(none), Level::Fine));
}

fn load(vm: &VmStatus, all: &mut Vec<Said>) {
    let waiting = limits::waiting_share(vm);
    let level = waiting.map_or(Level::Fine, |share| VM_WAITING.level(share));
    all.push((
        "CPUs used",
        or_unknown(vm.cpus_used, |used| format!("{used:.2}")),
        Level::Fine,
    ));
    let of_all = or_unknown(vm.vcpus_waiting.zip(waiting), |(waiting, share)| {
        format!("{waiting:.2} vCPUs, {} of all", percent(share))
    });
    all.push(("wait", of_all, level));
    let level = vm
        .local_access_ratio
        .map_or(Level::Fine, |share| LOCAL.level(share));
    all.push((
        "local",
        or_unknown(vm.local_access_ratio, |share| {
            format!("{} of accesses", percent(share))
        }),
        level,
    ));
    let by = match vm.counted_by {
        Some(homenode_host::CountedBy::Model) => ", counted by a model",
        _ => "",
    };
    let speed = or_unknown(vm.instructions_per_s, |rate| {
        let cpi = vm.cycles_per_instruction;
        let cpi = cpi.map_or_else(String::new, |cpi| format!(", {cpi:.2} cycles for each"));
        format!("{:.2} G instructions/s{cpi}{by}", rate / 1e9)
    });
    all.push(("instructions", speed, Level::Fine));
    let misses = or_unknown(vm.llc_miss_rate, |rate| {
        format!("{} of LLC references miss{by}", percent(rate))
    });
    all.push(("LLC", misses, Level::Fine));
    let on: Vec<String> = vm
        .traffic_by_node
        .iter()
        .flatten()
        .map(|on| format!("{} on node {}", on.bytes_per_s, on.node))
        .collect();
    let on = if on.is_empty() {
        String::new()
    } else {
        format!(": {}", on.join(", "))
    };
    let traffic = or_unknown(vm.bandwidth_bytes_per_s, |all| format!("{all}{on}{by}"));
    all.push(("traffic", traffic, Level::Fine));
}

fn permit(vm: &VmStatus, all: &mut Vec<Said>) {
    let level = limits::permit(vm);
    let used = vms::used_per_slice(vm).map_or_else(String::new, |used| format!("{used} per slice of 30 ms"));
    all.push(("used", used, Level::Fine));
    let balance = vm
        .permit
        .balance_units
        .map_or_else(String::new, |units| format!(", balance {units}"));
    let kept = |booked: String| {
        let times = vm.permit.punished_count;
        format!("{booked}{balance}, went OVER {times} times")
    };
    all.push(("permit", vms::permit(vm).map_or_else(String::new, kept), level));
    let quota = vm.permit.quota.zip(vms::quota(vm));
    let quota = quota.map(|(quota, share)| format!("{} of a CPU for each vCPU ({quota})", percent(share)));
    all.push(("quota", quota.unwrap_or_default(), level));
    all.push((
        "not metered",
        vm.permit.unmetered.clone().unwrap_or_default(),
        Level::Fine,
    ));
    all.push((
        "charged",
        vm.permit.charged.clone().unwrap_or_default(),
        Level::Fine,
    ));
}

fn memory(vm: &VmStatus, all: &mut Vec<Said>) {
    let of = &vm.memory;
    let sizes = [
        ("at most", of.maximum_bytes),
        ("limited to", of.limit_bytes),
        ("floor", of.floor_bytes),
        ("needs", of.need_bytes),
        ("can spare", of.usable_bytes),
    ];
    let sizes = sizes
        .iter()
        .filter_map(|(what, size)| Some(format!(", {what} {}", (*size)?)));
    let text = format!("{}{}", vm.memory_bytes, sizes.collect::<String>());
    all.push(("memory", text, limits::memory(vm)));
    all.push(("", of.why.clone().unwrap_or_default(), Level::Fine));
    all.push(("pages on", or_unknown(vms::pages_on(vm), |on| on), Level::Fine));
    let Migrations {
        home_changes_count,
        moved_bytes,
        vcpu_moves_count,
    } = vm.migrations;
    let text = format!(
        "home {home_changes_count} times, vCPUs {vcpu_moves_count} times, {moved_bytes} of its memory"
    );
    all.push(("moved", text, Level::Fine));
    let chosen = match vm.memory_policy_chosen {
        Some(chosen) if chosen == vm.memory_policy => ", chosen by the operator".to_owned(),
        Some(chosen) => format!(", the operator chose {chosen}"),
        None => String::new(),
    };
    all.push((
        "memory policy",
        format!("{}{chosen}", vm.memory_policy),
        Level::Fine,
    ));
    all.push((
        "",
        vm.memory_policy_caution.clone().unwrap_or_default(),
        Level::Fine,
    ));
    all.push((
        "memory stays",
        vm.memory_fixed.clone().unwrap_or_default(),
        Level::Fine,
    ));
}

fn topology(vm: &VmStatus, all: &mut Vec<Said>) {
    let seen: Vec<String> = vm
        .topology
        .virtual_nodes
        .iter()
        .enumerate()
        .map(|(number, node)| {
            let home = node
                .home
                .map_or_else(String::new, |home| format!(" on node {home}"));
            format!(
                "{number}: {} vCPUs, {}{home}",
                node.vcpus.len(),
                node.memory_bytes
            )
        })
        .collect();
    all.push(("guest's nodes", seen.join("; "), Level::Fine));
    let told = vm
        .topology
        .published_age_ns
        .map(|age| format!("its topology, {age} ago"));
    all.push(("told", told.unwrap_or_default(), Level::Fine));
    all.push((
        "told nothing",
        vm.topology.why_not.clone().unwrap_or_default(),
        Level::Fine,
    ));
}
