//! Stores on disk which nodes are drained, so upgrading the agent in the middle of a repair does not bring VMs back to them.

use std::path::{Path, PathBuf};

use anyhow::anyhow;
use homenode_undo::state_dir::StateDir;
use homenode_units::NodeSet;

const FILE: &str = "drained";
/// A list of all nodes is shorter than this on any host.
const BYTES_MAX: u64 = 4096;

/// The file of drained nodes.
#[derive(Clone, Debug, Default)]
pub struct DrainFile {
    /// `None` if there is no directory to keep it in: the drain then ends with the agent.
    dir: Option<PathBuf>,
}

impl DrainFile {
    /// Creates a handle for the file in a directory.
    pub fn of(dir: Option<&Path>) -> DrainFile {
        DrainFile {
            dir: dir.map(Path::to_owned),
        }
    }

    /// Reads the nodes that an earlier agent was asked to drain.
    ///
    /// # Errors
    /// A sentence for the operator if the file cannot be read or understood.
    pub fn read(&self) -> anyhow::Result<NodeSet> {
        let Some(dir) = &self.dir else {
            return Ok(NodeSet::new());
        };
        let dir = StateDir::open(dir)?;
        let Some(bytes) = dir.read(FILE, BYTES_MAX)? else {
            return Ok(NodeSet::new());
        };
        let text = String::from_utf8_lossy(&bytes);
        text.trim().parse().map_err(|e| {
            let path = dir.path_of(FILE);
            anyhow!(
                "the list of drained nodes cannot be read: {}: {e}",
                path.display()
            )
        })
    }

    /// Writes the nodes; removes the file if there are none.
    ///
    /// # Errors
    /// A sentence for the operator if the file cannot be written.
    pub fn write(&self, nodes: &NodeSet) -> anyhow::Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let written = StateDir::open(dir).and_then(|dir| match nodes.is_empty() {
            true => dir.remove(FILE),
            false => dir.replace(FILE, format!("{nodes}\n").as_bytes()).map(drop),
        });
        written.map_err(|error| {
            anyhow!(
                "the drain ends with this agent, because the list of drained nodes cannot be saved: {error}"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_drained_outlasts_the_agent_and_what_is_damaged_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let file = DrainFile::of(Some(dir.path()));
        assert_eq!(file.read().unwrap(), NodeSet::new());
        for nodes in ["1,3", "", "2", ""] {
            let nodes: NodeSet = nodes.parse().unwrap();
            file.write(&nodes).unwrap();
            assert_eq!(file.read().unwrap(), nodes);
        }
        std::fs::write(dir.path().join("private/drained"), "\u{0}one").unwrap();
        let said = file.read().unwrap_err().to_string();
        assert!(said.contains("private/drained"), "{said}");
        assert_eq!(DrainFile::default().read().unwrap(), NodeSet::new());
    }
}
