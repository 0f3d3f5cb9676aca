//! Tests that options are interpreted as QEMU interprets them.

use super::*;

fn told(line: &str) -> Told {
    CommandLine::of(line.split_ascii_whitespace()).told()
}

/// Lists in pieces, as Proxmox writes them, with vCPUs that are plugged in at start.
#[test]
fn lists_of_cpus_and_nodes_may_stand_in_pieces_and_reach_up_to_the_most_vcpus() {
    let plug = "-smp 1,sockets=2,cores=2,maxcpus=4 -device kvm64-x86_64-cpu,id=cpu2,socket-id=0,core-id=1,thread-id=0";
    let cells = |line: &str| {
        told(line)
            .cells
            .into_iter()
            .map(|cell| cell.vcpus)
            .collect::<Vec<_>>()
    };
    let line = format!(
        "{plug} -object memory-backend-ram,id=r0,size=512M,host-nodes=0,host-nodes=2-3,policy=bind -numa node,nodeid=0,cpus=0,cpus=2,memdev=r0 \
         -object memory-backend-ram,id=r1,size=512M -numa node,nodeid=1,cpus=1,cpus=3,memdev=r1"
    );
    assert_eq!(cells(&line), [[0, 2], [1, 3]]);
    let told = told(&line);
    assert_eq!((told.vcpus, told.memory), (2, Bytes(1 << 30)));
    assert_eq!(
        told.binding,
        homenode_kernel::binding::Binding::of("bind", &"0,2-3".parse().unwrap())
    );
    // Nodes are ordered by their numbers, in whichever order the options name them.
    assert_eq!(
        cells("-smp 4 -numa node,nodeid=1,cpus=0-1 -numa node,nodeid=0,cpus=2-3"),
        [[2, 3], [0, 1]]
    );
    // By position, as in Incus, or as QEMU assigns them by default.
    let nodes = "-smp 4,sockets=2,cores=2 -numa node -numa node";
    let by_place = format!("{nodes} -numa cpu,node-id=1,socket-id=0 -numa cpu,node-id=0,socket-id=1");
    assert_eq!(cells(&by_place), [[2, 3], [0, 1]]);
    assert_eq!(cells(nodes), [[0, 1], [2, 3]]);
    let by_core = "-smp 1,cores=2,threads=2,maxcpus=4 -numa node -numa node -numa cpu,node-id=0,core-id=1 -numa cpu,node-id=1,core-id=0,thread-id=1";
    assert_eq!(
        cells(by_core),
        [vec![0, 2, 3], vec![1]],
        "what is not told of is in the first"
    );
}

#[test]
fn vcpus_are_those_at_start_however_they_are_written() {
    for (line, vcpus) in [
        ("", 1),
        ("-smp 0x2", 2),
        ("-smp cpus=2,sockets=2", 2),
        ("-smp cores=3", 3),
        ("-smp maxcpus=4", 4),
        ("-smp sockets=2,maxcpus=4", 4),
        ("-smp 2 -smp maxcpus=4", 2),
        ("-smp 2 -smp 3", 3),
        ("-machine q35,smp.cpus=3", 3),
        (
            "-smp 1,maxcpus=2 -device host-x86_64-cpu -device host-x86_64-cpu",
            2,
        ),
        (
            r#"-smp 1,maxcpus=4 -device {"driver":"host-arm-cpu","id":"c"}"#,
            2,
        ),
    ] {
        assert_eq!(told(line).vcpus, vcpus, "{line}");
    }
}

#[test]
fn a_monitor_is_a_socket_that_it_listens_on() {
    for (line, monitor) in [
        ("-qmp unix:/a,,b,server,nowait", Some("/a,b")),
        ("-qmp-pretty unix:/a,server=on,wait=off", Some("/a")),
        ("-qmp unix:path=/a,server=yes", Some("/a")),
        ("-qmp unix:/a", None),
        ("-qmp unix:/a,server=off", None),
        ("-qmp unix:/a,noserver", None),
        ("-qmp unix:a,server", None),
        ("-qmp tcp:localhost:4444,server", None),
        ("-monitor unix:/a,server,nowait", None),
        (
            "-chardev socket,id=c,path=/a,server=on -mon c,mode=control",
            Some("/a"),
        ),
        (
            "-chardev socket,id=c,path=/a,server=on -qmp chardev:c",
            Some("/a"),
        ),
        (
            "-chardev socket,id=c,path=/a,server=on -mon chardev=c,mode=readline",
            None,
        ),
        ("-chardev socket,id=c,path=/a,server=on -mon chardev=c", None),
        ("-chardev socket,id=c,path=/a -mon chardev=c,mode=control", None),
        (
            "-chardev socket,id=c,path=/a,server=on,server=off -mon chardev=c,mode=control",
            None,
        ),
        (
            "-chardev socket,id=c,path=/a,server=on,abstract=on -mon chardev=c,mode=control",
            None,
        ),
        (
            "-chardev pipe,id=c,path=/a,server=on -mon chardev=c,mode=control",
            None,
        ),
        (
            "-chardev socket,id=c,path=/a,reconnect=5 -mon chardev=c,mode=control",
            None,
        ),
        (
            r#"-chardev {"backend":"socket","id":"c","path":"/a","server":true} --mon chardev=c,mode=control"#,
            Some("/a"),
        ),
    ] {
        let monitors = told(line).monitors;
        assert_eq!(monitors.first().map(String::as_str), monitor, "{line}");
        assert!(monitors.len() < 2, "{line}");
    }
}

#[test]
fn what_is_said_last_counts() {
    let uuids = [
        "6695eb01-f6a4-8304-79aa-97f2502e193f",
        "7795eb01-f6a4-8304-79aa-97f2502e193f",
    ];
    let [a, b] = uuids;
    let told_by = |line: String| told(&line);
    assert_eq!(
        told_by(format!("-uuid {a} -smbios type=1,uuid={b}"))
            .uuid
            .as_deref(),
        Some(b)
    );
    assert_eq!(
        told_by(format!("-smbios type=1,uuid={b} -uuid {a}"))
            .uuid
            .as_deref(),
        Some(a)
    );
    for (line, name) in [
        ("-name a -name b,debug-threads=on", "b"),
        ("-name a -name debug-threads=on", "a"),
        ("-name a,guest=b", "b"),
        ("-name guest=a,guest=b", "b"),
    ] {
        assert_eq!(told(line).name.as_deref(), Some(name), "{line}");
    }
    let reports = |line: &str| told(line).free_pages == FreePages::Reported;
    assert!(!reports(
        "-device virtio-balloon-pci,free-page-reporting=on,free-page-reporting=off"
    ));
    assert!(reports(
        "-device virtio-balloon-pci,id=b -set device.b.free-page-reporting=on"
    ));
    assert!(reports(
        "-global virtio-balloon-pci.free-page-reporting=on -device virtio-balloon-pci"
    ));
    assert!(reports(
        "-device {'driver':'virtio-balloon','free-page-reporting':true}"
    ));
    assert!(!told("-M none -machine q35").has_no_machine);
    assert_eq!(
        told("-overcommit mem-lock=on -overcommit cpu-pm=on").locked,
        Some(Locked)
    );
}
