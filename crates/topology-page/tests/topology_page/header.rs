//! Checks that the C header and this crate agree on the layout, on the verdict on any page, and on the nodes.

use std::io::Write as _;
use std::mem::{offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

use homenode_topology_page::{
    BYTES, Facts, MAGIC, Publisher, RawPage, ReadError, Reader, Topology, TopologyError, VirtualNode, WORDS,
};
use homenode_units::NodeId;
use proptest::prelude::*;

/// Compiles, once, the program that judges pages with the C header.
fn judge() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("topology-judge");
        let status = Command::new("cc")
            .args([
                "-std=c11",
                "-O2",
                "-Wall",
                "-Wextra",
                "-Wpedantic",
                "-Werror",
                "-I",
            ])
            .arg(manifest.join("../../guest/include"))
            .arg(manifest.join("tests/judge.c"))
            .arg("-o")
            .arg(&program)
            .status()
            .expect("a C compiler: scripts/setup.sh installs it");
        assert!(status.success(), "the header does not compile without a warning");
        program
    })
}

fn judged(arguments: &[&str], pages: &[u8]) -> String {
    let mut child = Command::new(judge())
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the judge starts");
    child
        .stdin
        .take()
        .expect("a pipe")
        .write_all(pages)
        .expect("the judge reads");
    let output = child.wait_with_output().expect("the judge ends");
    assert!(output.status.success(), "the judge died: {}", output.status);
    String::from_utf8(output.stdout).expect("text")
}

/// Returns the number that the judge prints for this result of a reader.
fn verdict(read: &Result<(u64, Topology), ReadError>) -> u32 {
    match read {
        Ok(_) => 0,
        Err(ReadError::Torn) => 1,
        Err(ReadError::Magic(_)) => 2,
        Err(ReadError::Layout(_)) => 3,
        Err(ReadError::Size(_)) => 4,
        Err(ReadError::Topology(error)) => match error {
            TopologyError::Vcpus { .. } => 5,
            TopologyError::VirtualNodes { .. } => 6,
            TopologyError::HostNodes { .. } => 7,
            TopologyError::VcpuNode { .. } => 8,
            TopologyError::VcpuVirtualNode { .. } => 9,
            TopologyError::MemoryNode { .. } => 10,
            TopologyError::Distance { .. } => 11,
            TopologyError::NoMemory => 12,
        },
    }
}

/// Returns this crate's result for a page, in the format that the judge prints.
fn line(words: &[AtomicU64]) -> String {
    let read = Reader::new(words).read();
    let mut line = verdict(&read).to_string();
    if let Ok((_, topology)) = read {
        for vcpu in 0..topology.facts().vcpu_pnode.len() {
            line += &format!(" {}", topology.node(vcpu, VirtualNode(0)).0);
        }
    }
    line
}

fn bytes_of(words: &[AtomicU64]) -> Vec<u8> {
    words
        .iter()
        .flat_map(|word| word.load(std::sync::atomic::Ordering::Relaxed).to_le_bytes())
        .collect()
}

fn words_of(bytes: &[u8]) -> Vec<AtomicU64> {
    let word = |bytes: &[u8]| AtomicU64::new(u64::from_le_bytes(bytes.try_into().expect("eight bytes")));
    bytes.chunks_exact(8).map(word).collect()
}

/// A page as a host publishes it.
fn good(vcpus: Vec<Option<u16>>, vnodes: Vec<Option<u16>>, distances: &[u8]) -> Option<Vec<u8>> {
    let count = 4;
    let rows = (0..count).map(|from| {
        (0..count)
            .map(|to| {
                if from == to {
                    10
                } else {
                    distances[from * count + to]
                }
            })
            .collect()
    });
    let nodes = |list: Vec<Option<u16>>| list.into_iter().map(|node| node.map(NodeId)).collect();
    let facts = Facts {
        vcpu_pnode: nodes(vcpus),
        vnode_pnode: nodes(vnodes),
        distances: rows.collect(),
    };
    let topology = Topology::new(facts).ok()?;
    let words: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
    Publisher::new(&words, 40).publish(&topology);
    Some(bytes_of(&words))
}

fn node() -> impl Strategy<Value = Option<u16>> {
    prop_oneof![1 => Just(None), 6 => (0u16..4).prop_map(Some)]
}

/// Generates valid pages with some bytes overwritten, mostly relevant ones.
fn scribbled() -> impl Strategy<Value = Vec<u8>> {
    let page = (
        prop::collection::vec(node(), 1..12),
        prop::collection::vec(node(), 1..8),
        prop::collection::vec(10u8..40, 16),
    );
    let place = prop_oneof![
        8usize..32,
        64usize..80,
        1088usize..1100,
        2112usize..2120,
        2176usize..2180,
        0..size_of::<RawPage>()
    ];
    let byte = prop_oneof![0u8..12, Just(0xff), any::<u8>()];
    (page, prop::collection::vec((place, byte), 0..3)).prop_filter_map(
        "no virtual node has memory",
        |((vcpus, vnodes, distances), writes)| {
            let mut bytes = good(vcpus, vnodes, &distances)?;
            writes.iter().for_each(|(at, byte)| bytes[*at] = *byte);
            Some(bytes)
        },
    )
}

#[test]
fn both_sides_have_the_same_layout() {
    let expected = [
        ("magic", offset_of!(RawPage, magic)),
        ("layout", offset_of!(RawPage, layout)),
        ("size", offset_of!(RawPage, size)),
        ("sequence", offset_of!(RawPage, sequence)),
        ("vcpu_count", offset_of!(RawPage, vcpu_count)),
        ("vnode_count", offset_of!(RawPage, vnode_count)),
        ("pnode_count", offset_of!(RawPage, pnode_count)),
        ("reserved", offset_of!(RawPage, reserved)),
        ("vcpu_pnode", offset_of!(RawPage, vcpu_pnode)),
        ("vcpu_vnode", offset_of!(RawPage, vcpu_vnode)),
        ("vnode_pnode", offset_of!(RawPage, vnode_pnode)),
        ("distance", offset_of!(RawPage, distance)),
        ("bytes", size_of::<RawPage>()),
        ("mapped", BYTES),
    ];
    let mut text: String = expected
        .iter()
        .map(|(name, value)| format!("{name} {value}\n"))
        .collect();
    text += &format!("magic {MAGIC}\n");
    assert_eq!(judged(&["layout"], &[]), text);
}

#[test]
fn both_sides_judge_every_page_alike() {
    // The judge is started once for all pages, so they are drawn from the strategy here, in advance.
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut draw =
        |strategy: &BoxedStrategy<Vec<u8>>| strategy.new_tree(&mut runner).expect("a page").current();
    let (pages, noise) = (
        scribbled().boxed(),
        prop::collection::vec(any::<u8>(), size_of::<RawPage>()).boxed(),
    );
    let mut all: Vec<Vec<u8>> = (0..2000).map(|_| draw(&pages)).collect();
    all.extend((0..50).map(|_| draw(&noise)));

    let answer = judged(&[], &all.concat());
    let mut seen = std::collections::BTreeSet::new();
    let mut lines = answer.lines();
    for page in &all {
        let words = words_of(page);
        let ours = line(&words);
        assert_eq!(lines.next(), Some(ours.as_str()));
        seen.insert(verdict(&Reader::new(&words).read()));
    }
    // Together, the pages reach every verdict.
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), (0..=12).collect::<Vec<_>>());
}
