//! `homenode permit`: books permits, shows how well VMs keep to them, suggests permits, and shows what VMs used.

use chrono::DateTime;
use clap::Subcommand;
use homenode_api::Request;
use homenode_api::answer::{PermitSet, PermitUsage, Permits, Suggestion, VmPermit};
use homenode_control::PermitStatus;
use homenode_host::CpuQuota;
use homenode_policy::permits::Standing;
use homenode_screens::printable::OneLine;
use homenode_units::{Ns, Permit, Resource};

use crate::ask::ask_agent;
use crate::options::{AgentArgs, OrNone, ShowArgs, SuggestArgs};
use crate::print::{counted, or_dash, percent, print_json, say_vms, table};

/// Options of `permit`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct PermitArgs {
    #[command(subcommand)]
    pub command: Option<PermitCommand>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Commands about permits.
#[derive(Debug, Subcommand)]
pub(crate) enum PermitCommand {
    /// Book a permit (a budget of cache misses or memory bandwidth) for a VM, or remove it
    #[command(
        after_help = "Examples:\n  homenode permit set web 250k\n  homenode permit set web 500MB/s\n  homenode permit set web none"
    )]
    Set(SetArgs),
    /// Show permits and how well VMs keep to them
    Show(ShowArgs),
    /// Suggest a permit for a VM, from its recorded behaviour and its memory
    Suggest(SuggestArgs),
    /// Show how much of each booking was used, per VM and hour
    #[command(alias = "bill")]
    Usage(UsageArgs),
}

/// Options of `permit set`.
#[derive(Debug, clap::Args)]
pub(crate) struct SetArgs {
    /// The VM's name
    pub vm: String,
    /// The permit: LLC misses per slice of 30 ms (`250k`) or memory bandwidth (`500MB/s`); `none` removes it
    #[arg(allow_hyphen_values = true)]
    pub permit: OrNone<Permit>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Options of `permit usage`.
#[derive(Debug, clap::Args)]
pub(crate) struct UsageArgs {
    /// Show only this VM, which may have ended
    pub vm: Option<String>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// `homenode permit`.
///
/// # Errors
/// No agent, no such VM, or a permit that could not be set.
pub(crate) fn run(args: &PermitArgs) -> anyhow::Result<()> {
    match &args.command {
        None => show(None, &args.agent),
        Some(PermitCommand::Show(args)) => show(args.vm.as_deref(), &args.agent),
        Some(PermitCommand::Set(args)) => set(args),
        Some(PermitCommand::Suggest(args)) => suggest(args),
        Some(PermitCommand::Usage(args)) => usage(args),
    }
}

fn set(args: &SetArgs) -> anyhow::Result<()> {
    let permit = args.permit.into_option();
    let vm = args.vm.clone();
    let answer: PermitSet = ask_agent(args.agent.dir(), &Request::PermitSet { vm, permit })?;
    if args.agent.json() {
        return print_json("permit-set", &answer);
    }
    match permit {
        Some(permit) => say!("{} has a permit of {}", OneLine(&args.vm), in_words(permit)),
        None => say!("{} has no permit", OneLine(&args.vm)),
    }
    if let Some(note) = &answer.note {
        say!("{}", OneLine(note));
    }
    Ok(())
}

fn in_words(permit: Permit) -> String {
    match permit.resource() {
        Resource::Pollution => format!("{permit} LLC misses per slice of 30 ms"),
        Resource::Bandwidth => permit.to_string(),
    }
}

fn show(vm: Option<&str>, agent: &AgentArgs) -> anyhow::Result<()> {
    let vm = vm.map(str::to_owned);
    let permits: Permits = ask_agent(agent.dir(), &Request::Permits { vm })?;
    if agent.json() {
        return print_json("permits", &permits);
    }
    let rows = permits.vms.iter().map(|vm| {
        let VmPermit {
            name,
            counted_by,
            permit: status,
            ..
        } = vm;
        let resource = status.permit.map_or(Resource::Pollution, Permit::resource);
        vec![
            name.clone(),
            or_dash(status.permit, |permit| permit.to_string()),
            or_dash(status.units_per_slice, |units| {
                counted(amount(resource, units as f64), *counted_by)
            }),
            or_dash(status.standing, |standing| standing_name(standing).to_owned()),
            or_dash(status.quota, |quota: CpuQuota| percent(quota.share())),
            status.punished_count.to_string(),
            note(status),
        ]
    });
    say_vms(&["VM", "permit", "now", "", "CPU each", "times OVER", ""], rows);
    Ok(())
}

/// Returns further remarks on a VM's permit, and on what the VM does for the permits of others.
fn note(status: &PermitStatus) -> String {
    let charged = || {
        status
            .charged
            .as_ref()
            .map(|charged| format!("charged: {charged}"))
    };
    let away = match status.away_ns {
        Ns::ZERO => String::new(),
        away => format!("left a cache to others for {:.0} s", away.as_secs_f64()),
    };
    let said = status.unmetered.clone().or_else(charged);
    let said: Vec<String> = said
        .into_iter()
        .chain([away])
        .filter(|said| !said.is_empty())
        .collect();
    said.join("; ")
}

fn standing_name(standing: Standing) -> &'static str {
    match standing {
        Standing::Under => "UNDER",
        Standing::Over => "OVER",
    }
}

/// Formats units per slice, as misses or as traffic per second.
fn amount(resource: Resource, units_per_slice: f64) -> String {
    let (value, suffix) = match resource {
        Resource::Pollution => (units_per_slice, ""),
        Resource::Bandwidth => (units_per_slice * 1e9 / Permit::SLICE.as_f64(), "B/s"),
    };
    let (scaled, unit) = match value {
        v if v >= 1e9 => (v / 1e9, "G"),
        v if v >= 1e6 => (v / 1e6, "M"),
        v if v >= 1e3 => (v / 1e3, "k"),
        v => (v, ""),
    };
    let decimals = usize::from(scaled < 10.0 && !unit.is_empty());
    format!("{scaled:.decimals$}{unit}{suffix}")
}

fn suggest(args: &SuggestArgs) -> anyhow::Result<()> {
    let vm = args.vm.clone();
    let answer: Suggestion = ask_agent(args.agent.dir(), &Request::PermitSuggest { vm })?;
    if args.agent.json() {
        return print_json("suggestion", &answer);
    }
    let lines = [
        (answer.from_behaviour, &answer.behaviour),
        (answer.from_memory, &answer.memory),
    ];
    for (permit, why) in lines {
        say!("{:<8} {why}", or_dash(permit, |permit| permit.to_string()));
    }
    if let Some(permit) = answer.from_behaviour.or(answer.from_memory) {
        say!(
            "\nbook it with: homenode permit set {} {permit}",
            OneLine(&args.vm)
        );
    }
    Ok(())
}

fn usage(args: &UsageArgs) -> anyhow::Result<()> {
    let vm = args.vm.clone();
    let usage: PermitUsage = ask_agent(args.agent.dir(), &Request::PermitUsage { vm })?;
    if args.agent.json() {
        return print_json("permit-usage", &usage);
    }
    if usage.lines.is_empty() {
        say!("no usage is recorded; it is counted while a VM has a permit");
        return Ok(());
    }
    let rows = usage.lines.iter().map(|line| {
        let slices = line.usage.time_ns.as_f64() / Permit::SLICE.as_f64();
        let booked = (slices > 0.0).then(|| line.usage.booked_units as f64 / slices);
        vec![
            line.name.clone(),
            hour_text(line.hour.0),
            or_dash(booked, |booked| amount(line.resource, booked)),
            or_dash(line.used_per_slice(), |used| amount(line.resource, used)),
            or_dash(line.used_share(), percent),
            format!("{:.0}min", line.usage.time_ns.as_secs_f64() / 60.0),
            if line.usage.unmetered_ns.0 > 0 {
                format!(
                    "{:.0}min not measured",
                    line.usage.unmetered_ns.as_secs_f64() / 60.0
                )
            } else {
                String::new()
            },
        ]
    });
    let header = ["VM", "hour", "booked", "used", "of it", "over", ""];
    say!("{}", table(&header, rows));
    Ok(())
}

/// Formats an hour since 1970 as a date in UTC, or, on the simulated host, whose clock starts at 0, as a number.
fn hour_text(hour: u64) -> String {
    // An hour before 1980 comes from a simulation.
    if hour < 3652 * 24 {
        return format!("hour {hour}");
    }
    let start = i64::try_from(hour.saturating_mul(3600))
        .ok()
        .and_then(|s| DateTime::from_timestamp(s, 0));
    start.map_or_else(
        || format!("hour {hour}"),
        |start| start.format("%Y-%m-%d %Hh UTC").to_string(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hours_are_dates() {
        assert_eq!(hour_text(0), "hour 0");
        // 2024-02-29 13:00 UTC is 1709211600.
        assert_eq!(hour_text(1_709_211_600 / 3600), "2024-02-29 13h UTC");
        // 2026-12-31 23:00 UTC is 1798758000.
        assert_eq!(hour_text(1_798_758_000 / 3600), "2026-12-31 23h UTC");
    }

    #[test]
    fn amounts_are_short() {
        let misses = |units| amount(Resource::Pollution, units);
        assert_eq!(
            [misses(7.0), misses(1_234.0), misses(250_000.0)],
            ["7", "1.2k", "250k"]
        );
        assert_eq!(amount(Resource::Bandwidth, 48_000_000.0), "1.6GB/s");
    }
}
