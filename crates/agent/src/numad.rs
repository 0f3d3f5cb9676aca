//! `numad -w NCPUS[:MB]`, the question that libvirt asks for `<vcpu placement='auto'>`, and the hook that tells who asks.
//!
//! libvirt fails the VM's start on an empty answer or a non-zero status, so every request that can be parsed gets a node list
//! and status 0, whether an agent runs or not.
//!
//! What libvirt 9 does (seen in the testbed, case `numad-order`): a domain's prepare hook has ended before numad is called for
//! it. Of domains that start at once the calls are interleaved, and nothing in a call says whose it is: requests are
//! matched to announced domains by vCPUs and memory. Domains that are alike in both are interchangeable, unless their
//! metadata differs.

use std::path::Path;

use homenode_api::answer::{Noted, Promised};
use homenode_api::{Request, ask};
use homenode_linux::numad_hook::Starting;
use homenode_policy::placement::{Announcement, Shape};
use homenode_units::NodeSet;

use crate::standalone;

/// What is asked for by `NCPUS[:MB]`; the original takes two decimals for CPUs.
pub fn parse(request: &str) -> Option<Shape> {
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

/// Nodes for a VM of this shape, promised to it: by the agent, or by a look at the host, with what went wrong then.
pub fn nodes_for(state: &Path, shape: Shape) -> (NodeSet, Option<anyhow::Error>) {
    let promised = ask::<Promised>(state, &Request::Promise(shape)).ok().flatten();
    match promised.filter(|promised| !promised.nodes.is_empty()) {
        Some(promised) => (promised.nodes, None),
        None => standalone::promise(state, shape),
    }
}

/// Tells the agent, or whoever answers without one, which domain is about to start. `xml` is what libvirt gives its hooks.
///
/// # Errors
/// When it is no domain, or cannot be noted. The VM starts all the same.
pub fn starting(state: &Path, xml: &str) -> anyhow::Result<()> {
    let starting = Starting::parse(xml, Path::new("/"))?;
    let announcement = Announcement {
        vm: starting.id,
        shape: Shape {
            vcpus: u32::from(starting.vcpus),
            memory_mib: starting.memory_mib,
        },
        name: starting.name,
        bandwidth: starting.bandwidth,
        home: starting.home,
        device_nodes: starting.device_nodes,
    };
    match ask::<Noted>(state, &Request::Announce(announcement.clone())) {
        Ok(Some(_)) => Ok(()),
        Ok(None) | Err(_) => standalone::announce(state, announcement),
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
