//! Fuzzes the files that describe threads, cgroups, busy CPUs, free memory and memory blocks, with contents from any kernel or
//! QEMU.

#![no_main]

use homenode_fuzz::Tree;
use homenode_kernel::cgroup::Hierarchy;
use homenode_kernel::task::{self, Role};
use homenode_kernel::{meminfo, memory_blocks, proc_stat};
use homenode_units::NodeId;
use libfuzzer_sys::fuzz_target;

const PID: i32 = 40;

fuzz_target!(|text: &str| {
    let tree = Tree::unpack(text);
    let root = tree.root();
    if let Ok(cpus) = proc_stat::read(root) {
        assert!(
            !cpus.is_empty() && cpus.windows(2).all(|pair| pair[0].0 < pair[1].0),
            "{cpus:?}"
        );
    }
    let process = task::process(root, PID);
    if let Ok(Some(process)) = process {
        assert!(task::is_alive(root, process));
    }
    let _ = task::find_qemu(root, "u-u");
    let hierarchy = Hierarchy::read(root);
    if let Ok(threads) = task::threads(root, PID) {
        assert!(threads.windows(2).all(|pair| pair[0].tid < pair[1].tid));
        let mut roles: Vec<Role> = threads.iter().map(|thread| thread.role).collect();
        roles.retain(|role| *role != Role::Other);
        let count = roles.len();
        roles.sort_unstable();
        roles.dedup();
        assert_eq!(roles.len(), count, "two threads are the same: {threads:?}");
        for thread in &threads {
            assert!(thread.tid != PID || thread.role == Role::Emulator);
            if let Ok(Some(affinity)) = task::affinity(root, PID, thread.tid) {
                assert_eq!(affinity, thread.affinity);
            }
            let group = hierarchy
                .as_ref()
                .ok()
                .and_then(|all| all.group_of(PID, thread.tid).ok()?);
            if let Some(group) = group {
                let _ = (
                    group.throttled().map(|time| time.map(|time| time.per_vcpu(2, 1))),
                    group.max(),
                );
            }
        }
    }
    let nodes = "0-1".parse().expect("a list");
    if let Ok(Some(blocks)) = memory_blocks::read(root, &nodes) {
        for frame in [0, 1 << 15, u64::MAX] {
            assert!(blocks.node_of(frame).is_none_or(|node| nodes.contains(node)));
        }
    }
    let _ = meminfo::huge_pages(root, NodeId(0));
});
