//! `numad -w NCPUS[:MB]` and libvirt's hook; `homenode_agent::numad` computes the answers.

use std::io::Read;
use std::path::Path;
use std::process::ExitCode;

use homenode_agent::numad::{nodes_for, page_size, parse, starting};
use homenode_policy::placement::Asked;

use crate::options::StateArgs;

/// The arguments that libvirt passes to a hook, and the agent's directory.
#[derive(Debug, clap::Args)]
pub(crate) struct HookArgs {
    /// Name of the domain
    pub guest: String,
    /// The operation (`prepare`, `start`, …)
    pub operation: String,
    /// The step of the operation (`begin`, `end`)
    pub part: Option<String>,
    /// A further argument from libvirt, or `-`
    pub extra: Option<String>,
    #[command(flatten)]
    pub state: StateArgs,
}

const USAGE: &str = "Usage: numad -w NCPUS[:MB] [-H HUGEPAGESIZE]
Homenode's answer to libvirt's placement='auto': prints the nodes on which a VM of NCPUS vCPUs and MB megabytes of memory
should run, and reserves them for it; with -H (in KiB, such as 2048) all of the memory is in free huge pages of that size. Asks
the running agent; without one, looks at the host itself.
numad's own daemon options are not served: run `homenode run` instead.";

/// Names under which other programs call `homenode`. SUSE's numa-preplace replaces numad and takes the same arguments.
pub(crate) const NAMES: [&str; 2] = ["numad", "numa-preplace"];

/// Entry point under one of [`NAMES`].
pub(crate) fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let mut args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut huge_page_bytes = None;
    if let Some(at) = args
        .iter()
        .position(|arg| *arg == "-H")
        .filter(|at| at + 1 < args.len())
    {
        let Some(size) = page_size(args[at + 1]) else {
            complain!(
                "Can't parse arg value(s): -H {}; it takes the size of huge pages in KiB, such as 2048",
                args[at + 1]
            );
            return ExitCode::FAILURE;
        };
        huge_page_bytes = size;
        args.drain(at..at + 2);
    }
    let request = match args.as_slice() {
        ["-w", request] => (*request).to_owned(),
        [joined] if joined.starts_with("-w") && joined.len() > 2 => joined[2..].to_owned(),
        ["-V"] => {
            say!("numad (homenode) {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::FAILURE;
        }
    };
    match parse(&request) {
        None => {
            complain!("Can't parse arg value(s): {request}");
            ExitCode::FAILURE
        }
        Some(shape) => {
            // libvirt passes no arguments besides `-w`, so the environment gives the directory of an agent with another --state.
            let state = std::env::var_os("HOMENODE_STATE");
            let state = state.unwrap_or_else(|| homenode_undo::state_dir::STATE_DIR.into());
            let (nodes, trouble) = nodes_for(
                Path::new(&state),
                Asked {
                    huge_page_bytes,
                    ..shape.into()
                },
            );
            if let Some(trouble) = trouble {
                complain!("homenode: {trouble:#}");
            }
            say!("{nodes}");
            ExitCode::SUCCESS
        }
    }
}

/// `homenode hook GUEST OPERATION …`: never fails, since a failing hook keeps the VM from starting.
pub(crate) fn hook(args: &HookArgs) {
    if (args.operation.as_str(), args.part.as_deref()) != ("prepare", Some("begin")) {
        return;
    }
    let mut xml = String::new();
    let read = std::io::stdin().take(16 << 20).read_to_string(&mut xml);
    let noted = read
        .map_err(anyhow::Error::from)
        .and_then(|_| starting(&args.state.dir, &xml));
    if let Err(error) = noted {
        complain!(
            "homenode: hook for {}: {error:#}; the VM starts anyway",
            args.guest
        );
    }
}
