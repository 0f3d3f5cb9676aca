//! `numad -w NCPUS[:MB]`, the question that libvirt asks for `<vcpu placement='auto'>`, and the hook that tells who asks.
//!
//! libvirt fails the VM's start on an empty answer or a non-zero status, so every request that can be parsed gets a node list
//! and status 0, whether an agent runs or not.
//!
//! What libvirt 9 does (seen in the testbed, case `numad-order`): a domain's prepare hook has ended before numad is called for
//! it. Of domains that start at once the calls are interleaved, and nothing in a call says whose it is: requests are
//! matched to announced domains by vCPUs and memory. Domains that are alike in both are interchangeable, unless their
//! metadata differs.

use std::io::Read;
use std::path::Path;
use std::process::ExitCode;

use homenode_linux::numad_hook::Starting;
use homenode_policy::placement::{Announcement, Shape};
use homenode_units::NodeSet;

use crate::args::HookArgs;
use crate::desk::{self, Request};

const USAGE: &str = "Usage: numad -w NCPUS[:MB]
Homenode's answer to libvirt's placement='auto': prints the nodes on which a VM of so many vCPUs and so much memory
should run, and promises them to it. The running agent is asked; without one the host is looked at directly.
numad's own daemon options are not served: run `homenode run` instead.";

/// Entry under the name `numad`.
pub fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let request = match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
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
            eprintln!("Can't parse arg value(s): {request}");
            ExitCode::FAILURE
        }
        Some(shape) => {
            say!("{}", nodes_for(shape));
            ExitCode::SUCCESS
        }
    }
}

/// `NCPUS[:MB]`; the original takes two decimals for CPUs.
fn parse(request: &str) -> Option<Shape> {
    let (cpus, memory) = request.split_once(':').unwrap_or((request, "0"));
    let plain = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    let cpus = plain(cpus)
        .then(|| cpus.parse::<f64>().ok())
        .flatten()
        .filter(|cpus| *cpus <= 1e6)?;
    let memory_mib = plain(memory).then(|| memory.parse::<u64>().ok()).flatten()?;
    Some(Shape {
        vcpus: cpus.ceil() as u32,
        memory_mib: memory_mib.min(1 << 40),
    })
}

fn nodes_for(shape: Shape) -> NodeSet {
    // libvirt gives no more arguments than `-w`; an agent with another --state is found through the environment.
    let state =
        std::env::var_os("HOMENODE_STATE").unwrap_or_else(|| homenode_linux::journal::STATE_DIR.into());
    let state = Path::new(&state);
    let from_agent = desk::ask(state, &Request::Promise(shape))
        .ok()
        .flatten()
        .and_then(|answer| serde_json::from_value::<NodeSet>(answer["nodes"].clone()).ok())
        .filter(|nodes| !nodes.is_empty());
    from_agent.unwrap_or_else(|| crate::standalone::promise(state, shape))
}

/// `homenode hook GUEST OPERATION …`: never fails, since a failing hook keeps the VM from starting.
pub fn hook(args: &HookArgs) {
    if (args.operation.as_str(), args.part.as_deref()) != ("prepare", Some("begin")) {
        return;
    }
    let mut xml = String::new();
    let read = std::io::stdin().take(16 << 20).read_to_string(&mut xml);
    let starting = match read
        .map_err(|e| e.to_string())
        .and_then(|_| Starting::parse(&xml).map_err(|e| e.to_string()))
    {
        Ok(starting) => starting,
        Err(error) => {
            return eprintln!(
                "homenode: hook for {}: {error}; the VM starts all the same",
                args.guest
            );
        }
    };
    let announcement = Announcement {
        vm: starting.id,
        shape: Shape {
            vcpus: u32::from(starting.vcpus),
            memory_mib: starting.memory_mib,
        },
        name: starting.name,
        bandwidth: starting.bandwidth,
        home: starting.home,
    };
    match desk::ask(&args.state, &Request::Announce(announcement.clone())) {
        Ok(Some(_)) => {}
        Ok(None) | Err(_) => crate::standalone::announce(&args.state, announcement),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_as_numad_reads_them() {
        assert_eq!(
            parse("2:1024"),
            Some(Shape {
                vcpus: 2,
                memory_mib: 1024
            })
        );
        assert_eq!(
            parse("2"),
            Some(Shape {
                vcpus: 2,
                memory_mib: 0
            })
        );
        assert_eq!(
            parse("0.5:100"),
            Some(Shape {
                vcpus: 1,
                memory_mib: 100
            })
        );
        assert_eq!(
            parse("0:0"),
            Some(Shape {
                vcpus: 0,
                memory_mib: 0
            })
        );
        for bad in [
            "abc", "2:abc", "-1:5", "", ":", "2:", "1e3", "inf", "nan", "1:2:3", "2:1.5",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
