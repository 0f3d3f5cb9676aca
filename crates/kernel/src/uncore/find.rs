//! Finds the events to open: which PMUs there are, which of their events count traffic, and for which node or link.

use std::collections::BTreeSet;
use std::path::Path;

use homenode_machine::Machine;
use homenode_units::{CpuId, CpuSet, NodeId};

use super::{Event, Layout, Purpose};
use crate::perf::Attr;
use crate::pmu::{self, Pmu};
use crate::processor::{Processor, Vendor, Zen};
use crate::read::ReadError;

/// One cache line: a CAS command of DDR4 or DDR5, a request to a memory controller, a beat of Zen 4's links.
const LINE_BYTES: f64 = 64.0;
/// Data flits of UPI carry 64 bytes in nine slots.
const UPI_BYTES_PER_FLIT: f64 = 64.0 / 9.0;
/// Data flits of QPI carry 64 bits each.
const QPI_BYTES_PER_FLIT: f64 = 8.0;
/// Packets of data that the links of Zen to Zen 3 send.
const XGMI_BYTES_PER_PACKET: f64 = 32.0;

/// An event of a PMU, with its name and the bytes that one count stands for.
type Counted = (String, Attr, f64);

/// Determines what this host could count, without opening any event.
///
/// # Errors
/// If a file of a PMU is malformed.
pub fn discover(root: &Path, machine: &Machine) -> Result<Layout, ReadError> {
    let names = pmu::names(root)?;
    let mut finder = Finder {
        root,
        machine,
        processor: Processor::read(root)?,
        layout: Layout::default(),
    };
    let is_numbered = |name: &str, prefix: &str| pmu::number(name, prefix).is_some();
    let is_channel =
        |n: &str| n == "uncore_imc" || is_numbered(n, "uncore_imc_") || is_numbered(n, "amd_umc_");
    let is_free_running =
        |n: &str| n == "uncore_imc_free_running" || is_numbered(n, "uncore_imc_free_running_");
    let is_mesh = |n: &str| is_numbered(n, "arm_cmn_");
    finder.add_memory(&names, is_channel)?;
    let has_umc = names.iter().any(|n| n.starts_with("amd_umc_"));
    let is_fabric = |n: &str| n == "amd_df" && !has_umc;
    for instead in [&is_free_running as &dyn Fn(&str) -> bool, &is_fabric, &is_mesh] {
        if finder.layout.events.is_empty() {
            finder.add_memory(&names, instead)?;
        }
    }
    if finder.sockets().len() > 1 {
        let is_qpi = |n: &str| n == "uncore_qpi" || is_numbered(n, "uncore_qpi_");
        finder.add_links(&names, |n| {
            is_numbered(n, "uncore_upi_") || is_qpi(n) || n == "amd_df"
        })?;
    }
    Ok(finder.layout)
}

struct Finder<'a> {
    root: &'a Path,
    machine: &'a Machine,
    processor: Processor,
    layout: Layout,
}

impl Finder<'_> {
    fn note(&mut self, text: String) {
        if !self.layout.notes.contains(&text) {
            self.layout.notes.push(text);
        }
    }

    /// Reads the chosen PMUs that have a copy for each socket or node, ascending by name.
    fn pmus(&self, names: &[String], is_chosen: impl Fn(&str) -> bool) -> Result<Vec<Pmu>, ReadError> {
        let mut pmus = Vec::new();
        for name in names.iter().filter(|name| is_chosen(name)) {
            pmus.extend(Pmu::read(self.root, name)?.filter(|pmu| pmu.read_on.is_some()));
        }
        Ok(pmus)
    }

    fn add_memory(&mut self, names: &[String], is_chosen: impl Fn(&str) -> bool) -> Result<(), ReadError> {
        let pmus = self.pmus(names, is_chosen)?;
        for pmu in &pmus {
            let events = match self.memory_events(pmu) {
                Ok(events) => events,
                Err(why) => {
                    self.note(why);
                    continue;
                }
            };
            for cpu in pmu.read_on.iter().flat_map(CpuSet::iter) {
                match self.node_behind(pmu, cpu, &pmus) {
                    Ok(node) => self.add(pmu, cpu, &events, Purpose::Memory(node)),
                    Err(why) => self.note(why),
                }
            }
        }
        Ok(())
    }

    fn add_links(&mut self, names: &[String], is_chosen: impl Fn(&str) -> bool) -> Result<(), ReadError> {
        for pmu in self.pmus(names, is_chosen)? {
            let Some(events) = self.link_events(&pmu) else {
                self.note(format!(
                    "{}: no public table names the events of {}'s links: traffic between nodes is not known",
                    pmu.name, self.processor
                ));
                continue;
            };
            for cpu in pmu.read_on.iter().flat_map(CpuSet::iter) {
                match self.ends(&pmu, cpu)? {
                    Ok((from, to)) if from != to => self.add(&pmu, cpu, &events, Purpose::Link(from, to)),
                    Ok(_) => {}
                    Err(why) => self.note(why),
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, pmu: &Pmu, cpu: CpuId, events: &[Counted], purpose: Purpose) {
        let event = |(name, attr, bytes): &Counted| Event {
            pmu: pmu.name.clone(),
            name: name.clone(),
            cpu,
            bytes_per_count: *bytes,
            purpose,
            attr: *attr,
        };
        self.layout.events.extend(events.iter().map(event));
    }

    /// Returns events that together count all traffic of the memory channels behind a PMU, or why there are none.
    fn memory_events(&self, pmu: &Pmu) -> Result<Vec<Counted>, String> {
        let name = pmu.name.as_str();
        let none = || format!("{name} has no event that counts memory traffic in bytes");
        if name.starts_with("amd_umc_") {
            // Without `rdwrmask`, both reads and writes count.
            return each(pmu, "cas_cmd", &[("event=0x0a", LINE_BYTES)]).ok_or_else(none);
        }
        if name.starts_with("arm_cmn_") {
            let event = |name: &&str| Some(((*name).to_owned(), pmu.event(name)?, LINE_BYTES));
            let found = ["hnf_mc_reqs", "hns_mc_reqs_local_all"].iter().find_map(event);
            return found.map(|event| vec![event]).ok_or_else(none);
        }
        if name == "amd_df" {
            return self.fabric_channels(pmu);
        }
        // Try the new names first: if both sets are there, the old names count only one of two sub-channels.
        let sets: [&[&str]; 5] = [
            &[
                "cas_count_read_sch0",
                "cas_count_read_sch1",
                "cas_count_write_sch0",
                "cas_count_write_sch1",
            ],
            &["cas_count_read", "cas_count_write"],
            &["data_reads", "data_writes"],
            &["data_read", "data_write"],
            &["read", "write"],
        ];
        let event = |name: &&str| {
            let (attr, bytes) = pmu.event_in_bytes(name)?;
            Some(((*name).to_owned(), attr, bytes))
        };
        let found = sets.iter().find_map(|set| set.iter().map(event).collect());
        found.ok_or_else(none)
    }

    /// Returns the events of `amd_df` for the channels of an EPYC. Other models of a family may number them otherwise, and sysfs
    /// names none of them.
    fn fabric_channels(&self, pmu: &Pmu) -> Result<Vec<Counted>, String> {
        let is_known = matches!(
            (self.processor.zen(), self.processor.model),
            (Some(Zen::OneOrTwo), 0x01 | 0x31) | (Some(Zen::Three), 0x01)
        );
        if !is_known {
            let has_channels = matches!(self.processor.zen(), Some(Zen::Four | Zen::Five));
            let why = match has_channels {
                true => {
                    "amd_umc counts memory traffic on this processor, from Linux 6.8 on; this kernel has none"
                        .to_owned()
                }
                false => format!(
                    "amd_df: no public table names the events of {}'s memory channels",
                    self.processor
                ),
            };
            return Err(format!("{why}: the bandwidth of nodes is not known"));
        }
        let channels = (0..8).map(|at| (format!("event={:#x},umask=0x38", 0x07 + 0x40 * at), LINE_BYTES));
        let none = || "amd_df: this kernel's format does not fit the events of memory channels".to_owned();
        each(pmu, "dram_channel_data_controller", &channels.collect::<Vec<_>>()).ok_or_else(none)
    }

    /// Returns the events that count the data which a PMU's links send.
    fn link_events(&self, pmu: &Pmu) -> Option<Vec<Counted>> {
        if pmu.name.starts_with("uncore_upi_") {
            if let Some((attr, bytes)) = pmu.event_in_bytes("txl_flits_all_data") {
                return Some(vec![("txl_flits_all_data".to_owned(), attr, bytes)]);
            }
            return each(
                pmu,
                "txl_flits.all_data",
                &[("event=0x02,umask=0x0f", UPI_BYTES_PER_FLIT)],
            );
        }
        if pmu.name.starts_with("uncore_qpi") {
            return each(
                pmu,
                "txl_flits_g0.data",
                &[("event=0x00,umask=0x02", QPI_BYTES_PER_FLIT)],
            );
        }
        let (name, first, links, umask, bytes) = match self.processor.zen()? {
            Zen::OneOrTwo | Zen::Three => (
                "remote_outbound_data_controller",
                0x7c7,
                4,
                0x02,
                XGMI_BYTES_PER_PACKET,
            ),
            Zen::Four => (
                "local_socket_outbound_data_beats_link",
                0xb5f,
                8,
                0xf3e,
                LINE_BYTES,
            ),
            Zen::Five => (
                "local_socket_outbound_data_beats_link",
                0xd5f,
                6,
                0xf3e,
                LINE_BYTES,
            ),
        };
        let link = |at| (format!("event={:#x},umask={umask:#x}", first + 0x40 * at), bytes);
        each(pmu, name, &(0..links).map(link).collect::<Vec<_>>())
    }

    fn sockets(&self) -> BTreeSet<u16> {
        let of_nodes = self.machine.nodes.values().filter_map(|node| node.socket);
        self.machine
            .cpus
            .iter()
            .map(|cpu| cpu.socket)
            .chain(of_nodes)
            .collect()
    }

    /// Returns the nodes whose CPUs are on a socket.
    fn nodes_of(&self, socket: u16) -> BTreeSet<NodeId> {
        let on = self.machine.cpus.iter().filter(|cpu| cpu.socket == socket);
        on.map(|cpu| cpu.node).collect()
    }

    fn socket_of(&self, pmu: &Pmu, cpu: CpuId) -> Result<u16, String> {
        let found = self.machine.cpu(cpu).map(|found| found.socket);
        found.ok_or_else(|| format!("{} is read on CPU {cpu}, which is not usable here", pmu.name))
    }

    /// Returns the node whose memory traffic a PMU's copy counts, or why it is not known. `like` are all PMUs of its kind.
    fn node_behind(&self, pmu: &Pmu, cpu: CpuId, like: &[Pmu]) -> Result<NodeId, String> {
        let socket = self.socket_of(pmu, cpu)?;
        if pmu.name.starts_with("arm_cmn_") {
            self.check_meshes(like)?;
        }
        let nodes = self.nodes_of(socket);
        if let (Some(only), 1) = (nodes.first(), nodes.len()) {
            return Ok(*only);
        }
        let has_copy = |node: &NodeId| {
            let copies = pmu.read_on.iter().flat_map(CpuSet::iter);
            copies
                .filter_map(|cpu| self.machine.node_of(cpu))
                .any(|on| on == *node)
        };
        let own = self.machine.node_of(cpu).filter(|_| nodes.iter().all(has_copy));
        let by_cluster = || {
            let map = self.clusters(nodes.len())?;
            let channel = pmu::number(&pmu.name, "uncore_imc_")?;
            nodes.iter().nth(map[channel % map.len()]).copied()
        };
        own.or_else(by_cluster).ok_or_else(|| {
            format!(
                "socket {socket} has {} nodes, and nothing public says which counters of {} belong to which: the bandwidth of its nodes is not known",
                nodes.len(),
                kind(pmu),
            )
        })
    }

    /// Returns the sub-NUMA cluster of each `uncore_imc_N`, by N modulo the number of entries. Cluster K is the Kth node.
    fn clusters(&self, count: usize) -> Option<&'static [usize]> {
        let Processor {
            vendor: Vendor::Intel,
            family: 6,
            model,
        } = self.processor
        else {
            return None;
        };
        match (model, count) {
            (0x8f | 0xcf, 2) => Some(&[0, 0, 1, 1]), // Sapphire Rapids, Emerald Rapids
            (0xad | 0xae, 2) => Some(&[1, 1, 0, 0]), // Granite Rapids
            (0xad | 0xae, 3) => Some(&[1, 1, 0, 0, 2, 2]), // Granite Rapids
            _ => None,
        }
    }

    /// Checks that each socket has its own mesh. The kernel reads a mesh of unknown place through any CPU.
    fn check_meshes(&self, meshes: &[Pmu]) -> Result<(), String> {
        let read_on = meshes
            .iter()
            .filter_map(|mesh| mesh.read_on.as_ref()?.iter().next());
        let read_on: BTreeSet<u16> = read_on
            .filter_map(|cpu| Some(self.machine.cpu(cpu)?.socket))
            .collect();
        let sockets = self.sockets();
        if meshes.len() == sockets.len() && read_on == sockets {
            return Ok(());
        }
        Err(format!(
            "this host has {} sockets and {} meshes (arm_cmn), and the kernel does not say on which socket each is: the bandwidth of nodes is not known",
            sockets.len(),
            meshes.len()
        ))
    }

    /// Returns the nodes that links connect, or why they are not known.
    fn ends(&self, pmu: &Pmu, cpu: CpuId) -> Result<Result<(NodeId, NodeId), String>, ReadError> {
        let socket = match self.socket_of(pmu, cpu) {
            Ok(socket) => socket,
            Err(why) => return Ok(Err(why)),
        };
        let Some(peer) = self.peer(pmu, socket)? else {
            return Ok(Err(format!(
                "this kernel does not say where the links of {} lead (for UPI, Linux 5.18 and later do), and this host has more than two sockets: traffic between nodes is not known",
                kind(pmu),
            )));
        };
        let node = |socket| {
            let nodes = self.nodes_of(socket);
            let only = nodes.first().copied().filter(|_| nodes.len() == 1);
            only.ok_or_else(|| {
                format!(
                    "socket {socket} has {} nodes that share its links: traffic between nodes is not known",
                    nodes.len()
                )
            })
        };
        Ok(node(socket).and_then(|from| Ok((from, node(peer)?))))
    }

    /// Returns the socket that links of a socket lead to: as sysfs says, else the other one of two.
    fn peer(&self, pmu: &Pmu, socket: u16) -> Result<Option<u16>, ReadError> {
        let (path, text) = pmu.text(self.root, &format!("die{socket}"))?;
        if let Some(text) = text {
            let peer = text
                .trim()
                .split_once(",die_")
                .and_then(|(_, die)| die.parse().ok());
            return peer
                .map(Some)
                .ok_or_else(|| ReadError::malformed(&path, "`upi_N,die_N`", &text));
        }
        let mut others = self.sockets();
        others.remove(&socket);
        Ok(others.first().copied().filter(|_| others.len() == 1))
    }
}

/// Returns a PMU's name without its number.
fn kind(pmu: &Pmu) -> &str {
    pmu.name
        .trim_end_matches(|c: char| c.is_ascii_digit())
        .trim_end_matches('_')
}

/// Encodes events of one name, which are numbered if there are several; `None` unless the PMU's format has room for all.
fn each(pmu: &Pmu, name: &str, all: &[(impl AsRef<str>, f64)]) -> Option<Vec<Counted>> {
    let named = |at| {
        if all.len() == 1 {
            name.to_owned()
        } else {
            format!("{name}_{at}")
        }
    };
    let events = all.iter().enumerate();
    events
        .map(|(at, (terms, bytes))| Some((named(at), pmu.encode(terms.as_ref())?, *bytes)))
        .collect()
}
