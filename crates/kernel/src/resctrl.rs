//! `/sys/fs/resctrl/mon_data`: memory traffic per L3 domain, used if no uncore PMU is usable. It is only read: groups belong to
//! the programs that made them.
//!
//! `mbm_total_bytes` counts what the cores of a domain moved to and from any memory; `mbm_local_bytes` counts the part that went
//! to the domain's own node. A node's controllers carry the local traffic of its own cores, and the remote traffic of other
//! nodes' cores. With two nodes the destination of remote traffic is clear. On larger hosts it is unknown, so there is no answer.
//!
//! The root group counts tasks that are in no other group. Other control groups (made by libvirt, containerd or pqos) are read
//! too, so that their traffic is included. When a group vanishes, what it counted so far is kept.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use homenode_machine::Machine;
use homenode_units::{CpuId, NodeId, NodeMap};

use crate::read::{self, ReadError};

const GROUPS_MAX: usize = 1024;
const DIR: &str = "sys/fs/resctrl";

/// Traffic counters of all L3 domains.
#[derive(Debug)]
pub struct Resctrl {
    root: PathBuf,
    /// Node of each L3 domain's cores.
    domains: BTreeMap<u32, NodeId>,
    /// Last values of each group and domain: local bytes, remote bytes.
    last: BTreeMap<(String, u32), (u64, u64)>,
    local: BTreeMap<NodeId, u64>,
    remote: BTreeMap<NodeId, u64>,
    /// Why this host's node traffic is unknown, if it is.
    pub note: Option<String>,
}

impl Resctrl {
    /// Checks whether this host can tell its node traffic; `None` if resctrl is not mounted or does not monitor bandwidth.
    ///
    /// # Errors
    /// If the cache numbering in sysfs is malformed.
    pub fn open(root: &Path, machine: &Machine) -> Result<Option<Resctrl>, ReadError> {
        let root_group = read::names(&root.join(DIR).join("mon_data"), 4096)?;
        let with_bytes = |name: &&String| {
            root.join(DIR)
                .join("mon_data")
                .join(name)
                .join("mbm_local_bytes")
                .exists()
        };
        if !root_group.iter().any(|name| with_bytes(&name)) {
            return Ok(None);
        }
        let mut domains: BTreeMap<u32, NodeId> = BTreeMap::new();
        let mut note = None;
        for cpu in &machine.cpus {
            let Some(domain) = l3_of(root, cpu.id)? else {
                continue;
            };
            if *domains.entry(domain).or_insert(cpu.node) != cpu.node {
                note = Some(format!(
                    "L3 cache {domain} serves several nodes: resctrl cannot tell their memory bandwidth"
                ));
            }
        }
        if machine.memory_nodes().len() > 2 {
            note = Some("resctrl does not say which node remote traffic goes to: with more than two nodes it cannot tell their memory bandwidth".into());
        }
        let (last, local, remote) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Ok(Some(Resctrl {
            root: root.to_owned(),
            domains,
            last,
            local,
            remote,
            note,
        }))
    }

    /// Returns the bytes that each node's memory controllers moved until now; `None` if this host cannot tell.
    ///
    /// # Errors
    /// If a counter is neither a number nor one of the kernel's words for "cannot tell".
    pub fn read(&mut self) -> Result<Option<NodeMap<u64>>, ReadError> {
        if self.note.is_some() || self.domains.is_empty() {
            return Ok(None);
        }
        let base = self.root.join(DIR);
        let mut groups = vec![String::new()];
        for name in read::names(&base, GROUPS_MAX)? {
            if !matches!(name.as_str(), "info" | "mon_data" | "mon_groups")
                && base.join(&name).join("mon_data").is_dir()
            {
                groups.push(name);
            }
        }
        for group in groups {
            for (&domain, &node) in &self.domains {
                let dir = base.join(&group).join(format!("mon_data/mon_L3_{domain:02}"));
                let values = (
                    counter(&dir.join("mbm_total_bytes"))?,
                    counter(&dir.join("mbm_local_bytes"))?,
                );
                let (Some(total), Some(local)) = values else {
                    if group.is_empty() {
                        self.note = Some("resctrl says that its bandwidth counters are unavailable".into());
                        return Ok(None);
                    }
                    continue;
                };
                let now = (local, total.saturating_sub(local));
                let before = self.last.insert((group.clone(), domain), now).unwrap_or(now);
                *self.local.entry(node).or_default() += now.0.saturating_sub(before.0);
                *self.remote.entry(node).or_default() += now.1.saturating_sub(before.1);
            }
        }
        let sent: u64 = self.remote.values().sum();
        let nodes = self
            .local
            .iter()
            .map(|(&node, &local)| (node, local + sent - self.remote.get(&node).copied().unwrap_or(0)));
        Ok(Some(nodes.collect()))
    }
}

/// Reads a counter; `None` if the kernel reports it as unavailable, or the group is gone.
fn counter(path: &Path) -> Result<Option<u64>, ReadError> {
    let Some(text) = read::text_if_there(path, read::SMALL_BYTES)? else {
        return Ok(None);
    };
    match text.trim() {
        "Unavailable" | "Unassigned" | "Error" => Ok(None),
        number => number
            .parse()
            .map(Some)
            .map_err(|_| ReadError::malformed(path, "a number of bytes", &text)),
    }
}

/// Returns the kernel's number for a CPU's L3 cache.
fn l3_of(root: &Path, cpu: CpuId) -> Result<Option<u32>, ReadError> {
    let dir = root.join(format!("sys/devices/system/cpu/cpu{cpu}/cache"));
    for index in read::names(&dir, 64)? {
        if read::value_if_there::<u32>(&dir.join(&index).join("level"), "a cache level")? == Some(3) {
            return read::value_if_there(&dir.join(&index).join("id"), "a cache number");
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Tree, machine};

    fn host(nodes: u32) -> Tree {
        let tree = Tree::new(&[]);
        for cpu in 0..nodes {
            let cache = format!("sys/devices/system/cpu/cpu{cpu}/cache");
            tree.write(&format!("{cache}/index0/level"), "1\n");
            tree.write(&format!("{cache}/index3/level"), "3\n");
            tree.write(&format!("{cache}/index3/id"), &format!("{cpu}\n"));
            set(&tree, "", cpu, "100", "60");
        }
        tree
    }

    fn set(tree: &Tree, group: &str, domain: u32, total: &str, local: &str) {
        let dir = format!("{DIR}/{group}/mon_data/mon_L3_{domain:02}");
        tree.write(&format!("{dir}/mbm_total_bytes"), total);
        tree.write(&format!("{dir}/mbm_local_bytes"), local);
    }

    fn values(map: &NodeMap<u64>) -> Vec<u64> {
        map.values().copied().collect()
    }

    #[test]
    fn a_node_carries_its_local_and_the_others_remote_traffic() {
        let tree = host(2);
        let mut resctrl = Resctrl::open(tree.root(), &machine(&[0, 1])).unwrap().unwrap();
        assert_eq!(values(&resctrl.read().unwrap().unwrap()), [0, 0]);
        set(&tree, "", 0, "1100", "860"); // 800 local, 200 to node 1
        set(&tree, "", 1, "110\n", "70"); // 10 local
        set(&tree, "pqos", 1, "5000", "5000"); // a group that appears: its past is not ours
        assert_eq!(values(&resctrl.read().unwrap().unwrap()), [800, 210]);
        set(&tree, "pqos", 1, "5005", "5005");
        assert_eq!(values(&resctrl.read().unwrap().unwrap()), [800, 215]);
        std::fs::remove_dir_all(tree.root().join(DIR).join("pqos")).unwrap();
        assert_eq!(values(&resctrl.read().unwrap().unwrap()), [800, 215]);
    }

    #[test]
    fn absent_unavailable_and_unattributable_are_none() {
        assert!(
            Resctrl::open(Tree::new(&[]).root(), &machine(&[0]))
                .unwrap()
                .is_none()
        );
        let mut four = Resctrl::open(host(4).root(), &machine(&[0, 1, 2, 3]))
            .unwrap()
            .unwrap();
        assert_eq!(four.read(), Ok(None));
        assert!(four.note.unwrap().contains("more than two"));
        let tree = host(2);
        set(&tree, "", 0, "Unavailable\n", "Unavailable\n");
        let mut resctrl = Resctrl::open(tree.root(), &machine(&[0, 1])).unwrap().unwrap();
        assert_eq!(resctrl.read(), Ok(None));
        assert!(resctrl.note.unwrap().contains("unavailable"));
    }

    #[test]
    fn a_malformed_counter_is_an_error_with_the_path() {
        let tree = host(2);
        set(&tree, "", 1, "lots", "5");
        let mut resctrl = Resctrl::open(tree.root(), &machine(&[0, 1])).unwrap().unwrap();
        assert!(
            resctrl
                .read()
                .unwrap_err()
                .to_string()
                .contains("mon_L3_01/mbm_total_bytes")
        );
    }
}
