//! The trees of `data/event_source`. A line is a path below `/sys/bus/event_source/devices` and the file's text. `[0-7]` in a
//! path stands for a line for each number, and `16+` for 16 plus the place in that range. `cpuinfo` lists lines of
//! `/proc/cpuinfo`, separated by `|`, and each `node` has its socket and CPUs. No tree was recorded as a whole: each says where
//! its lines are from. Numbers of PMU types and of CPUs are examples.

use homenode_machine::Machine;
use homenode_units::CpuSet;

use crate::fake::{Tree, machine_of};

/// Returns a tree, and its machine.
pub(crate) fn tree(name: &str) -> (Tree, Machine) {
    let path = format!("{}/data/event_source/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let (tree, mut nodes) = (Tree::new(&[]), Vec::new());
    for line in text
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
    {
        let (path, value) = line.split_once(' ').unwrap_or((line, ""));
        match path {
            "cpuinfo" => drop(tree.write("proc/cpuinfo", &format!("{}\n", value.replace(" | ", "\n")))),
            "node" => {
                let (socket, cpus) = value.split_once(' ').expect("a socket and CPUs");
                nodes.push((
                    socket.parse().expect("a socket"),
                    cpus.parse::<CpuSet>().expect("CPUs"),
                ));
            }
            _ => write(&tree, path, value),
        }
    }
    (tree, machine_of(&nodes))
}

fn write(tree: &Tree, path: &str, value: &str) {
    let file = |path: &str, value: &str| {
        tree.write(
            &format!("sys/bus/event_source/devices/{path}"),
            &format!("{value}\n"),
        );
    };
    let Some((before, rest)) = path.split_once('[') else {
        return file(path, value);
    };
    let (range, after) = rest.split_once(']').expect("an end of the range");
    let (first, last) = range.split_once('-').expect("a range");
    let (first, last): (u32, u32) = (first.parse().expect("a number"), last.parse().expect("a number"));
    for number in first..=last {
        let value = match value.strip_suffix('+') {
            Some(base) => (base.parse::<u32>().expect("a number") + number - first).to_string(),
            None => value.to_owned(),
        };
        file(&format!("{before}{number}{after}"), &value);
    }
}
