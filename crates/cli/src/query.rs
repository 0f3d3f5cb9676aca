//! Queries that change nothing: `machine`, `place`, `vm`.

use std::path::{Path, PathBuf};

use homenode_agent::managed::Managed;
use homenode_agent::standalone;
use homenode_api::answer::Placed;
use homenode_api::{Request, ask};
use homenode_control::{Request as Ask, VmStatus};
use homenode_host::HugeMemory;
use homenode_kernel::kernel_settings;
use homenode_kvm::Vms;
use homenode_screens::printable::OneLine;
use homenode_units::{BytesPerSec, PAGE_BYTES};

use crate::ask::vms;
use crate::bad_input;
use crate::options::{AgentArgs, HostArg, ShownArgs, Size};
use crate::print::{counted, or_dash, or_none, percent, print_json, say_vms, span};

/// The preset that `--template` prints by default: two nodes, and nothing unusual.
const TEMPLATE: &str = "r420";

/// Options of `machine`.
#[derive(Debug, clap::Args)]
pub(crate) struct MachineArgs {
    /// Show the machine in this file instead (`homenode calibrate --output` writes one), or one that comes with the program
    /// (`homenode list machines`)
    #[arg(value_name = "FILE|NAME", conflicts_with_all = ["sysfs", "preset"])]
    pub file: Option<PathBuf>,
    /// Directory that has the `sys` and `proc` trees to read
    #[arg(long, value_name = "ROOT", default_value = "/", conflicts_with = "preset")]
    pub sysfs: PathBuf,
    /// Show a machine that comes with the program instead, such as a published experiment's host
    #[arg(long, value_name = "NAME")]
    pub preset: Option<String>,
    /// Print a machine file to start your own from: that of `--preset`, or that of a host with two nodes
    #[arg(long, conflicts_with_all = ["file", "sysfs", "json"])]
    pub template: bool,
    #[command(flatten)]
    pub shown: ShownArgs,
}

/// Options of `place`.
#[derive(Debug, clap::Args)]
pub(crate) struct PlaceArgs {
    /// Number of the VM's vCPUs
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=8192))]
    pub vcpus: u32,
    /// The VM's memory, such as `8GiB` or `8G`; a bare number is MiB
    #[arg(long)]
    pub memory: Size,
    /// The memory bandwidth that the VM needs, such as `2GB/s`
    #[arg(long)]
    pub bandwidth: Option<BytesPerSec>,
    /// Size of the huge pages that hold all of the VM's memory, such as `2MiB` or `1GiB`; only free huge pages count. A bare
    /// number is MiB
    #[arg(long, value_name = "SIZE")]
    pub huge_pages: Option<Size>,
    /// Print two lines, `cpus` and `cpus_soft`, for the VM's xl configuration file: they decide where Xen allocates its memory
    #[arg(long, conflicts_with = "json")]
    pub xl: bool,
    /// Ask about another host: `twin:MACHINE` simulates that machine, idle [default: this host, as the running agent knows it]
    #[arg(long, value_name = "HOST")]
    pub host: Option<HostArg>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Options of `vm`.
#[derive(Debug, clap::Args)]
pub(crate) struct VmArgs {
    /// Show only this VM
    pub name: Option<String>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Returns true if this is the name of a machine and not a file's.
fn is_name(text: &str) -> bool {
    let path = Path::new(text);
    path.extension().is_none() && path.components().count() == 1 && !path.exists()
}

/// `homenode machine`.
///
/// # Errors
/// An unknown preset, or a tree that cannot be read.
pub(crate) fn machine(args: &MachineArgs) -> anyhow::Result<()> {
    if args.template {
        let name = args.preset.as_deref().unwrap_or(TEMPLATE);
        let (_, text) = homenode_machine_files::preset_file(name).map_err(bad_input)?;
        crate::print::print(format_args!("{text}"));
        return Ok(());
    }
    let machine = match (&args.file, &args.preset) {
        (Some(path), _) => match path.to_str().filter(|name| is_name(name)) {
            Some(name) => homenode_machine_files::preset(name).map_err(bad_input)?,
            None => homenode_machine_files::from_toml_file(path).map_err(bad_input)?,
        },
        (None, Some(name)) => homenode_machine_files::preset(name).map_err(bad_input)?,
        (None, None) if args.sysfs == Path::new("/") => homenode_agent::managed::machine_here()?,
        (None, None) => homenode_machine_files::sysfs::read(&args.sysfs)?,
    };
    if args.shown.json {
        return print_json("machine", &machine);
    }
    crate::print::print(format_args!("{}", homenode_machine_files::render_text(&machine)));
    if args.file.is_none() && args.preset.is_none() {
        let kernel = kernel_settings::read(&args.sysfs, |error| complain!("{error}"));
        if !kernel.is_unknown() {
            say!("kernel: {kernel}");
        }
    }
    Ok(())
}

/// `homenode place`: asks the running agent, or looks at the host itself if there is no agent.
///
/// # Errors
/// Bad input; a VM that fits nowhere, with what the host is short of.
pub(crate) fn place(args: &PlaceArgs) -> anyhow::Result<()> {
    let huge_page_bytes = args.huge_pages.map(|size| size.0);
    if let Some(page) = huge_page_bytes.filter(|page| page.0 <= PAGE_BYTES) {
        return Err(bad_input(format!(
            "--huge-pages must be the size of a huge page, such as 2MiB or 1GiB; {page} is not larger than an ordinary page"
        )));
    }
    let all = |page_bytes| HugeMemory {
        page_bytes,
        memory_bytes: args.memory.0,
    };
    let asked = Ask {
        vcpus: args.vcpus,
        memory: args.memory.0,
        bandwidth: args.bandwidth,
        huge_pages: huge_page_bytes.map(all).into_iter().collect(),
    };
    let answer: Placed = match &args.host {
        Some(HostArg::Twin(what)) => {
            let machine = crate::twin::spec(what.as_deref(), None)?.machine;
            homenode_agent::twin::place(machine, &asked)?
        }
        Some(HostArg::Live(Managed::Kvm(Vms::Libvirt(uri)))) if *uri != homenode_kvm::DEFAULT_URI => {
            return Err(bad_input(format!(
                "`place` asks about this host or a twin, not about {uri}; run it on that host"
            )));
        }
        _ => {
            let Ask {
                vcpus,
                memory: memory_bytes,
                bandwidth,
                ..
            } = asked;
            match ask(
                args.agent.dir(),
                &Request::Place {
                    vcpus,
                    memory_bytes,
                    bandwidth_bytes_per_s: bandwidth,
                    huge_page_bytes,
                },
            )? {
                Some(answer) => answer,
                None => standalone::place(args.agent.dir(), &asked)?,
            }
        }
    };
    show_place(args, answer)
}

/// Prints the place of a VM.
///
/// # Errors
/// The VM fits nowhere.
fn show_place(args: &PlaceArgs, answer: Placed) -> anyhow::Result<()> {
    if args.agent.json() {
        print_json("placed", &answer)?;
    }
    let Placed {
        nodes,
        reasons,
        crowded,
        ..
    } = answer;
    if let Some(home) = crowded.filter(|_| !args.agent.json() && !args.xl) {
        home.sentences()
            .iter()
            .for_each(|sentence| say!("{}", OneLine(sentence)));
    }
    match nodes {
        Some(_) if args.agent.json() => Ok(()),
        Some(nodes) if args.xl => {
            let machine = match &args.host {
                Some(HostArg::Twin(what)) => crate::twin::spec(what.as_deref(), None)?.machine,
                _ => homenode_agent::managed::machine_here()?,
            };
            let cpus = machine.cpus_of(&nodes);
            // Xen allocates memory according to the preferred CPUs (`cpus_soft`); pins alone do not decide that.
            say!("cpus = \"{cpus}\"");
            say!("cpus_soft = \"{cpus}\"");
            Ok(())
        }
        Some(nodes) => {
            say!("node {nodes}");
            reasons.iter().for_each(|reason| say!("  {reason}"));
            Ok(())
        }
        None => anyhow::bail!(
            "a VM of {} vCPUs and {} {}",
            args.vcpus,
            args.memory.0,
            reasons.join("; ")
        ),
    }
}

/// Formats a guest's memory, with its maximum if the agent limits it.
fn memory(vm: &VmStatus) -> String {
    let now = vm.memory_bytes;
    let maximum = vm
        .memory
        .maximum_bytes
        .filter(|_| vm.memory.limit_bytes.is_some());
    maximum.map_or_else(|| now.to_string(), |maximum| format!("{now} of {maximum}"))
}

/// `homenode vm`.
///
/// # Errors
/// No agent, or no such VM.
pub(crate) fn vm(args: &VmArgs) -> anyhow::Result<()> {
    let answer = vms(args.agent.dir(), args.name.as_deref())?;
    if args.agent.json() {
        return print_json("vms", &answer);
    }
    let rows = answer.vms.iter().map(|vm| {
        vec![
            vm.name.clone(),
            or_none(vm.home.as_ref()),
            memory(vm),
            or_dash(vm.cpus_used, |used| format!("{used:.1}")),
            or_dash(vm.speed_ratio, |ratio| counted(percent(ratio), vm.counted_by)),
            or_dash(vm.cycles_per_instruction, |cpi| {
                counted(format!("{cpi:.2}"), vm.counted_by)
            }),
            or_dash(vm.llc_miss_rate, |rate| counted(percent(rate), vm.counted_by)),
            or_dash(vm.local_access_ratio, percent),
            or_dash(vm.bandwidth_bytes_per_s, |rate| {
                counted(rate.to_string(), vm.counted_by)
            }),
            or_dash(vm.time_gained_ns.zip(vm.time_lost_ns), |(gained, lost)| {
                format!("+{} -{}", span(gained), span(lost))
            }),
            vm.left_alone.clone().unwrap_or_default(),
        ]
    });
    let header = [
        "VM", "home", "memory", "CPUs", "speed", "CPI", "LLC miss", "local", "traffic", "time", "",
    ];
    say_vms(&header, rows);
    if answer.vms.is_empty() {
        return Ok(());
    }
    say!(
        "\nspeed: of the VM's usual speed; time: CPU time that changes of its home gained and lost (`homenode report`)"
    );
    Ok(())
}
