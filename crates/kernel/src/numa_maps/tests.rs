use super::*;
use crate::fake::Tree;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

/// 128 MiB of anonymous guest RAM in two pieces, a guard page, a kernel image and a translation buffer.
const MAPS: &str = "55d000000000-55d000400000 rw-p 00000000 00:00 0                          [heap]\n\
    7f0000000000-7f0002000000 rw-p 00000000 00:00 0 \n\
    7f0002000000-7f0008000000 rw-p 00000000 00:00 0 \n\
    7f0008000000-7f0008001000 ---p 00000000 00:00 0 \n\
    7f1000000000-7f1008000000 rwxp 00000000 00:00 0 \n\
    7f2000000000-7f2003c00000 rw-p 00000000 fe:01 1234 /boot/vmlinux with space\n\
    ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]\n";
const NUMA_MAPS: &str = "55d000000000 default heap anon=3 dirty=3 N0=3 kernelpagesize_kB=4\n\
    7f0000000000 default anon=100 dirty=100 active=0 N0=60 N3=40 kernelpagesize_kB=4\n\
    7f0002000000 prefer (many):0-1 anon=512 dirty=512 N1=512 kernelpagesize_kB=4\n\
    7f2000000000 default file=/boot/vmlinux\\040with\\040space mapped=15360 N0=15360 kernelpagesize_kB=4\n";

fn tree(maps: &str, numa_maps: &str) -> Tree {
    Tree::new(&[("proc/7/maps", maps), ("proc/7/numa_maps", numa_maps)])
}

fn counts(pages: &[NodeMap<Pages>]) -> Vec<(u16, u64)> {
    sum(pages).iter().map(|(node, pages)| (node.0, pages.0)).collect()
}

#[test]
fn anonymous_ram_is_found_by_size_and_nothing_else_is_counted() {
    let tree = tree(MAPS, NUMA_MAPS);
    let ram = guest_ram(tree.root(), 7, &[Bytes(128 * MIB)]).unwrap().unwrap();
    assert_eq!(ram.len(), 1);
    assert_eq!((ram[0].start, ram[0].end), (0x7f00_0000_0000, 0x7f00_0800_0000));
    assert_eq!(
        (ram[0].sharing, ram[0].page_bytes, ram[0].pages()),
        (Sharing::Private, Bytes(4096), Pages(32_768))
    );
    let pages = pages_per_node(tree.root(), 7, &ram).unwrap().unwrap();
    assert_eq!(counts(&pages), [(0, 60), (1, 512), (3, 40)]);
}

#[test]
fn of_objects_as_large_the_first_made_lies_highest() {
    let range = |start: u64, mib: u64| Range {
        start,
        end: start + mib * MIB,
        sharing: Sharing::Private,
        page_bytes: Bytes(4096),
    };
    // The mapping is a little larger than in the XML, because QEMU rounds up.
    let ranges = [
        range(0x1000_0000, 64),
        range(0x2000_0000, 129),
        range(0x3000_0000, 64),
    ];
    let mib = |sizes: &[u64]| sizes.iter().map(|mib| Bytes(mib * MIB)).collect::<Vec<_>>();
    assert_eq!(objects(&ranges, &mib(&[64, 128, 64])), [2, 1, 0]);
    assert_eq!(objects(&ranges, &mib(&[128, 64, 64])), [1, 2, 0]);
    assert!(objects(&[], &[]).is_empty());
}

#[test]
fn memfd_hugetlbfs_and_files_are_ram_too_and_huge_pages_count_as_base_pages() {
    let maps = "7f0000000000-7f0040000000 rw-s 00000000 00:0f 88 /dev/hugepages/libvirt/qemu/1-a/ram-node0 (deleted)\n\
        7f1000000000-7f1020000000 rw-s 00000000 00:01 99 /memfd:ram-node1 (deleted)\n\
        7f2000000000-7f2010000000 rw-s 00000000 fe:01 12 /var/lib/libvirt/qemu/ram/1-a/dimm0\n";
    let numa = "7f0000000000 bind:0 file=/dev/hugepages/x\\040(deleted) huge dirty=512 N0=500 N1=12 kernelpagesize_kB=2048\n\
        7f1000000000 bind=static:0-1 file=/memfd:ram-node1\\040(deleted) dirty=9 N1=9 kernelpagesize_kB=4\n\
        7f2000000000 weighted interleave:0-1 file=/N7=5 dirty=9 N0=9 kernelpagesize_kB=4\n";
    let tree = tree(maps, numa);
    let sizes = [Bytes(256 * MIB), Bytes(1024 * MIB), Bytes(512 * MIB)];
    let ram = guest_ram(tree.root(), 7, &sizes).unwrap().unwrap();
    let seen: Vec<_> = ram
        .iter()
        .map(|r| (r.pages().0, r.page_bytes.0, r.sharing))
        .collect();
    assert_eq!(
        seen,
        [
            (262_144, 2 * MIB, Sharing::Shared),
            (131_072, 4096, Sharing::Shared),
            (65_536, 4096, Sharing::Shared)
        ]
    );
    let pages = pages_per_node(tree.root(), 7, &ram).unwrap().unwrap();
    assert_eq!(counts(&pages), [(0, 500 * 512 + 9), (1, 12 * 512 + 9)]);
    assert_eq!(counts(&pages[1..2]), [(1, 9)]);
    assert_eq!(objects(&ram, &sizes), [2, 0, 1]);
}

#[test]
fn what_binds_a_mapping_is_read_whichever_way_the_kernel_writes_it() {
    let nodes = |list: &str| list.parse().unwrap();
    for (policy, binds) in [
        ("default", None),
        ("local", None),
        ("prefer:1", None),
        ("prefer=static:1", None),
        ("prefer (many):0-1", None),
        ("bind:1", Some(("bind", "1"))),
        ("bind=static:0,2", Some(("bind", "0,2"))),
        ("bind=static|balancing:0-1", Some(("bind", "0-1"))),
        ("bind=relative:3", Some(("bind", "3"))),
        ("interleave:0-3", Some(("interleave", "0-3"))),
        ("weighted interleave:0-1", Some(("interleave", "0-1"))),
    ] {
        let line = parse_line(&format!("7f0000000000 {policy} anon=9 N0=9 kernelpagesize_kB=4")).unwrap();
        let expected = binds.and_then(|(mode, list)| Binding::of(mode, &nodes(list)));
        assert_eq!((line.pages(), line.binding), (9, expected), "{policy}");
    }
    assert_eq!(parse_line("7f0000000000 bind:x anon=9 N0=9"), None);
    // RAM that consists of several mappings has the bindings of all of them.
    let numa = "7f0000000000 bind:0 anon=9 N0=9 kernelpagesize_kB=4\n7f0002000000 bind:1 anon=5 N1=5 kernelpagesize_kB=4\n";
    let tree = tree(MAPS, numa);
    let ram = guest_ram(tree.root(), 7, &[Bytes(128 * MIB)]).unwrap().unwrap();
    let seen = look(tree.root(), 7, &ram).unwrap().unwrap();
    let binding = seen[0].binding.clone().unwrap();
    assert_eq!((binding.nodes, binding.common), (nodes("0-1"), nodes("")));
}

#[test]
fn memory_right_beside_ram_is_not_ram() {
    let maps = "7effff000000-7f0000000000 rw-p 00000000 00:00 0 \n\
        7f0000000000-7f0008000000 rw-p 00000000 00:00 0 \n\
        7f0008000000-7f0008800000 rw-p 00000000 00:00 0 \n";
    let tree = tree(maps, "");
    let found = guest_ram(tree.root(), 7, &[Bytes::from_mib(128)])
        .unwrap()
        .unwrap();
    let found: Vec<(u64, u64)> = found.iter().map(|range| (range.start, range.end)).collect();
    assert_eq!(found, [(0x7f00_0000_0000, 0x7f00_0800_0000)]);
}

#[test]
fn ram_that_cannot_be_told_is_none() {
    let tree = tree(MAPS, NUMA_MAPS);
    assert_eq!(guest_ram(tree.root(), 7, &[Bytes(64 * MIB)]), Ok(None));
    assert_eq!(
        guest_ram(tree.root(), 7, &[Bytes(128 * MIB), Bytes(128 * MIB)]),
        Ok(None),
        "one mapping, two objects"
    );
    assert!(
        guest_ram(tree.root(), 7, &[Bytes(127 * MIB)]).unwrap().is_some(),
        "rounded up by libvirt"
    );
    assert_eq!(
        guest_ram(tree.root(), 8, &[Bytes(MIB)]),
        Ok(None),
        "no such process"
    );
    assert_eq!(pages_per_node(tree.root(), 8, &[]), Ok(None));
}

#[test]
fn malformed_and_truncated_files_are_errors_with_the_path() {
    for bad in [
        "7f00-",
        "7f0000000000-7f0000001000 rw-p",
        "zz-yy rw-p 0 00:00 0",
        "2000-1000 rw-p 0 00:00 0",
    ] {
        let error = guest_ram(tree(bad, "").root(), 7, &[Bytes(1)]).unwrap_err();
        assert!(error.to_string().contains("proc/7/maps"), "{error}");
    }
    for bad in [
        "xyz default N0=1",
        "7f0000000000",
        "7f00 default N0=x",
        "7f00 default N0=1 kernelpagesize_kB=0",
        "7f00 default kernelpagesize_kB=99999999999999999999",
    ] {
        let all = [Range {
            start: 0,
            end: 1 << 47,
            sharing: Sharing::Private,
            page_bytes: Bytes(PAGE_BYTES),
        }];
        let error = pages_per_node(tree("", bad).root(), 7, &all).unwrap_err();
        assert!(error.to_string().contains("proc/7/numa_maps"), "{error}");
    }
}

#[test]
fn of_what_is_not_ram_nothing_but_its_place_is_read() {
    let maps = "7f0000000000-7f0008000000 rw-p 00000000 00:00 0 \n";
    let line = "7f0000000000 default anon=9 N0=5 N1=4 kernelpagesize_kB=4\n";
    let tree_with = |other: &str| tree(maps, &format!("{line}{other}\n"));
    let pages = |other: &str| {
        let tree = tree_with(other);
        let ram = guest_ram(tree.root(), 7, &[Bytes(128 * MIB)]).unwrap().unwrap();
        pages_per_node(tree.root(), 7, &ram)
    };
    let read = pages("7f1000000000 default file=/a\\040b N0=many")
        .unwrap()
        .unwrap();
    assert_eq!(counts(&read), [(0, 5), (1, 4)]);
    for bad in ["7f1000000000", "where default N0=1", "7e0000000000 default N0=1"] {
        assert!(pages(bad).is_err(), "{bad}");
    }
}

/// Returns `maps` with RAM of one page per mapping, all of which join, and a matching `numa_maps`.
fn shredded(mappings: u64) -> (String, String) {
    let start = |at: u64| 0x7f00_0000_0000 + at * PAGE_BYTES;
    let maps = |at| format!("{:x}-{:x} rw-p 00000000 00:00 0 \n", start(at), start(at + 1));
    let numa = |at| {
        format!(
            "{:x} default anon=1 N{}=1 kernelpagesize_kB=4\n",
            start(at),
            at % 2
        )
    };
    (
        (0..mappings).map(maps).collect(),
        (0..mappings).map(numa).collect(),
    )
}

/// Returns the CPU time of this thread, which does not depend on what else the machine does.
fn spent() -> homenode_units::Ns {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    homenode_units::Ns(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

#[test]
fn time_grows_no_faster_than_mappings() {
    let time_of = |mappings: u64| {
        let (maps, numa) = shredded(mappings);
        let tree = tree(&maps, &numa);
        let size = Bytes(mappings * PAGE_BYTES);
        let look = || {
            let begun = spent();
            let ram = guest_ram(tree.root(), 7, &[size]).unwrap().unwrap();
            let pages = pages_per_node(tree.root(), 7, &ram).unwrap().unwrap();
            assert_eq!(counts(&pages), [(0, mappings / 2), (1, mappings / 2)]);
            spent() - begun
        };
        (0..3).map(|_| look()).min().unwrap()
    };
    let (few, many) = (time_of(4000), time_of(64_000));
    // With quadratic growth it would be 256 times.
    assert!(many.0 < 96 * few.0, "16 times the mappings took {few} and {many}");
}

#[test]
fn a_range_never_has_more_pages_than_lie_in_it() {
    let maps = "7f0000000000-7f0008000000 rw-p 00000000 00:00 0 \n";
    for bad in [
        // More pages than the range has, on one node or on several.
        "7f0000000000 default anon=32769 N0=32769 kernelpagesize_kB=4\n",
        "7f0000000000 default anon=9 N0=20000 N1=20000 kernelpagesize_kB=4\n",
        "7f0000000000 default anon=9 N0=18446744073709551615 N1=1 kernelpagesize_kB=4\n",
        "7f0000000000 default huge N0=65 kernelpagesize_kB=2048\n",
        // More pages than fit before the next mapping.
        "7f0000000000 default anon=2 N0=2 kernelpagesize_kB=4\n7f0000001000 default N0=1 kernelpagesize_kB=4\n",
        // The mapping appears twice, as if mappings changed while they were read.
        "7f0000000000 default anon=1 N0=1 kernelpagesize_kB=4\n7f0000000000 default N0=1 kernelpagesize_kB=4\n",
        "7f0000001000 default anon=1 N0=1 kernelpagesize_kB=4\n7f0000000000 default N0=1 kernelpagesize_kB=4\n",
    ] {
        let tree = tree(maps, bad);
        let ram = guest_ram(tree.root(), 7, &[Bytes(128 * MIB)]).unwrap().unwrap();
        let error = pages_per_node(tree.root(), 7, &ram).expect_err(bad);
        assert!(error.to_string().contains("proc/7/numa_maps"), "{error}");
    }
}

#[test]
fn mappings_that_overlap_or_split_pages_are_refused() {
    for bad in [
        "7f0000000000-7f0008000000 rw-p 00000000 00:00 0 \n7f0004000000-7f000c000000 rw-p 00000000 00:00 0 \n",
        "7f0010000000-7f0018000000 rw-p 00000000 00:00 0 \n7f0000000000-7f0008000000 rw-p 00000000 00:00 0 \n",
        "7f0000000001-7f0008000001 rw-p 00000000 00:00 0 \n",
    ] {
        let error = guest_ram(tree(bad, "").root(), 7, &[Bytes(128 * MIB)]).expect_err(bad);
        assert!(error.to_string().contains("proc/7/maps"), "{error}");
    }
}

proptest! {
    #[test]
    fn any_line_is_read_or_refused(line in "[0-9a-fN= :-]{0,40}|\\PC{0,30}") {
        let _ = (parse_line(&line), parse_mapping(&line));
    }
}

#[test]
fn this_process_reads() {
    let pid = i32::try_from(std::process::id()).unwrap();
    assert_eq!(guest_ram(Path::new("/"), pid, &[Bytes(1 << 50)]), Ok(None));
    pages_per_node(Path::new("/"), pid, &[]).unwrap();
}
