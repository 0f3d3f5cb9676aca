//! Answers `numad -w NCPUS[:MB]`, which libvirt runs for `<vcpu placement='auto'>`, and libvirt's hook, which announces each
//! domain.
//!
//! libvirt does not start the VM if the answer is empty or the status is not zero. So every request that can be parsed gets a
//! node list and status 0, whether an agent runs or not.
//!
//! libvirt 9 calls numad for a domain after the domain's prepare hook has ended (seen in the testbed, case `numad-order`). If
//! several domains start at once, their calls interleave, and no call of numad names its domain. Requests are therefore matched
//! to announced domains by vCPUs and memory. Domains with equal vCPUs and memory are interchangeable, unless their metadata
//! differs.

use std::path::Path;

use homenode_api::answer::{Noted, Reserved};
use homenode_api::{Request, ask};
use homenode_kvm::numad_hook::Starting;
use homenode_policy::placement::{Announcement, Asked, Shape};
use homenode_units::{Bytes, NodeSet, PAGE_BYTES};

use crate::standalone;

/// Parses `NCPUS[:MB]`. CPUs may have decimals, as in the original numad, which accepts two.
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

/// Reserves nodes for a VM of this shape, and returns them with the error, if any. Asks the agent, or samples the host itself.
///
/// A VM that fits nowhere gets all nodes. If it wants huge pages, the error says what is short, because the VM will not start
/// there.
pub fn nodes_for(state: &Path, asked: Asked) -> (NodeSet, Option<anyhow::Error>) {
    let reserved = ask::<Reserved>(state, &Request::Reserve(asked)).ok().flatten();
    match reserved.filter(|reserved| !reserved.nodes.is_empty()) {
        Some(reserved) => {
            let why = reserved.unplaceable.filter(|_| asked.huge_page_bytes.is_some());
            (reserved.nodes, why.map(anyhow::Error::msg))
        }
        None => standalone::reserve(state, asked),
    }
}

/// Parses a huge page size in the format of `-H`: a number in KiB, as in the kernel's pool names, or a size with a unit, such as
/// `2MiB`. Returns `Some(None)` for pages no larger than ordinary ones, and `None` if the text is not a size.
pub fn page_size(text: &str) -> Option<Option<Bytes>> {
    let bytes = match text.parse::<u64>() {
        Ok(kib) => Bytes(kib.checked_mul(1024)?),
        Err(_) => text.parse::<Bytes>().ok()?,
    };
    Some((bytes.0 > PAGE_BYTES).then_some(bytes))
}

/// Announces to the agent, or in the ledger if no agent runs, that a domain is about to start. `xml` is the description that
/// libvirt passes to its hooks.
///
/// # Errors
/// If `xml` does not describe a domain, or the announcement cannot be stored. The VM starts all the same.
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
        huge_pages: starting.huge_pages,
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
    fn sizes_of_huge_pages_are_kib_unless_they_say_otherwise() {
        let mib = |mib| Some(Some(Bytes::from_mib(mib)));
        assert_eq!(
            [page_size("2048"), page_size("1048576"), page_size("2MiB")],
            [mib(2), mib(1024), mib(2)]
        );
        assert_eq!([page_size("4"), page_size("0")], [Some(None), Some(None)]);
        for bad in [
            "",
            "x",
            "-2048",
            "2048 x",
            "99999999999999999999",
            "18014398509481984",
        ] {
            assert_eq!(page_size(bad), None, "{bad}");
        }
    }

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
