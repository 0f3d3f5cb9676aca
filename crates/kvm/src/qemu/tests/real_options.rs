//! Compares how real QEMUs interpret their options with how the agent does.

use super::*;

/// Starts a paused QEMU with these options. Returns the agent's reading of them and the monitor's answers; `None` if QEMU refuses
/// them.
fn asked(options: &[&str], questions: &[&'static str]) -> Option<(Told, Vec<Value>)> {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("asked").display().to_string();
    let monitor = format!("unix:{socket},server=on,wait=off");
    let base = [
        "-S",
        "-display",
        "none",
        "-nodefaults",
        "-accel",
        "tcg",
        "-qmp",
        &monitor,
    ];
    let words: Vec<&str> = base.iter().chain(options).copied().collect();
    let child = Program::new("qemu-system-x86_64")
        .args(&words)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let mut child = child.expect("qemu-system-x86 is installed");
    let pid = child.id().cast_signed();
    let questions: Vec<Command> = questions.iter().map(|name| (*name, json!({}))).collect();
    let mut answers = None;
    let is_over = until(|| {
        answers = ask(pid, &socket, &questions).ok();
        answers.is_some() || matches!(child.try_wait(), Ok(Some(_)))
    });
    let _ = child.kill();
    let _ = child.wait();
    assert!(is_over, "{options:?}");
    Some((command_line::CommandLine::of(words).told(), answers?))
}

/// Returns the guest node of each possible vCPU, and how many vCPUs exist now, as QEMU reports them.
fn vcpus_said(answer: &Value) -> (Vec<u64>, usize) {
    let all = answer.as_array().unwrap();
    let number = |vcpu: &Value, key: &str| vcpu["props"][key].as_u64().unwrap_or(0);
    let place = |vcpu: &Value| ["socket-id", "die-id", "core-id", "thread-id"].map(|key| number(vcpu, key));
    let mut placed: Vec<_> = all
        .iter()
        .map(|vcpu| (place(vcpu), number(vcpu, "node-id")))
        .collect();
    placed.sort_unstable();
    let here = all.iter().filter(|vcpu| vcpu.get("qom-path").is_some());
    (placed.into_iter().map(|(_, node)| node).collect(), here.count())
}

#[test]
fn what_a_real_qemu_makes_of_its_options_is_what_is_read() {
    const TWO: &str = "-m 0.0625G -object memory-backend-ram,id=r0,size=16M,size=32M -object {'qom-type':'memory-backend-ram','id':'r1','size':33554432}";
    let questions = [
        "query-memory-size-summary",
        "query-name",
        "query-uuid",
        "query-hotpluggable-cpus",
        "query-memdev",
    ];
    for options in [
        "-m 0.1G -name a,,b,,=c -name debug-threads=on -smp 2 -smp maxcpus=3",
        "--m size=1.0001M -m maxmem=1G,slots=2 -name x,guest=y -smp 0x2 -uuid 6695eb01-f6a4-8304-79aa-97f2502e193f \
         -smbios type=1,uuid=7795eb01-f6a4-8304-79aa-97f2502e193f",
        "-machine q35,memory.size=96M,smp.cpus=3 -smbios type=1,uuid=7795eb01-f6a4-8304-79aa-97f2502e193f -name -m",
        "-smp 1,sockets=2,cores=2,maxcpus=4 -cpu qemu64 -device qemu64-x86_64-cpu,socket-id=0,core-id=1,thread-id=0 \
         -numa node,nodeid=0,cpus=0,cpus=2,memdev=r0 -numa node,nodeid=1,cpus=1,cpus=3,memdev=r1",
        "-smp 4,sockets=2 -numa node,memdev=r1 -numa node,memdev=r0",
        "-smp 4 -numa node,nodeid=1,cpus=0x1-0x2,memdev=r0 -numa node,nodeid=0,memdev=r1",
        "-smp 8,sockets=2,cores=2,threads=2 -numa node,memdev=r0 -numa node,memdev=r1 -numa cpu,node-id=1,socket-id=0,core-id=1 \
         -numa cpu,node-id=1,socket-id=1,thread-id=0 -numa cpu,node-id=0,socket-id=0,core-id=0 -numa cpu,node-id=0,socket-id=1,thread-id=1",
    ] {
        let more = if options.contains("-numa") { TWO } else { "" };
        let words: Vec<&str> = more
            .split_ascii_whitespace()
            .chain(options.split_ascii_whitespace())
            .collect();
        let (told, said) = asked(&words, &questions).unwrap_or_else(|| panic!("QEMU refuses {words:?}"));
        assert_eq!(Some(told.memory.0), said[0]["base-memory"].as_u64(), "{options}");
        assert_eq!(told.name.as_deref(), said[1]["name"].as_str(), "{options}");
        let none = "00000000-0000-0000-0000-000000000000";
        assert_eq!(
            Some(told.uuid.as_deref().unwrap_or(none)),
            said[2]["UUID"].as_str(),
            "{options}"
        );
        let (nodes, here) = vcpus_said(&said[3]);
        assert_eq!(usize::from(told.vcpus), here, "{options}");
        for (vcpu, node) in nodes.iter().enumerate().filter(|_| !told.cells.is_empty()) {
            let homes = told.cells.iter().enumerate();
            let mut homes = homes.filter(|(_, cell)| cell.vcpus.contains(&(vcpu as u16)));
            assert_eq!(
                homes.next().map(|(node, _)| node as u64),
                Some(*node),
                "vCPU {vcpu}: {options}"
            );
        }
        let mut sizes: Vec<u64> = told.ram_sizes.iter().map(|size| size.0).collect();
        let mut said: Vec<u64> = said[4]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|one| one["size"].as_u64())
            .collect();
        sizes.sort_unstable();
        said.sort_unstable();
        assert_eq!(sizes, said, "{options}");
    }
    for refused in ["-m 1.5", "-m 16MiB", "-m 1e3"] {
        let words: Vec<&str> = refused.split(' ').collect();
        assert!(asked(&words, &[]).is_none(), "{refused}");
    }
}

/// As LXD did, and as Incus still does.
#[test]
fn a_qemu_that_changed_its_root_or_its_user_is_found_and_asked() {
    if !rustix::process::geteuid().is_root() {
        return; // only root can change its root
    }
    for (at, more) in [
        &["-chroot", "DIR/empty"][..],
        &["-runas", "nobody"],
        &["-chroot", "DIR/empty", "-runas", "nobody"],
    ]
    .into_iter()
    .enumerate()
    {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().display().to_string();
        std::fs::create_dir(dir.path().join("empty")).unwrap();
        let config = format!(
            "[machine]\ntype = \"q35\"\n[memory]\nsize = \"64M\"\n[smp-opts]\ncpus = \"1\"\n\
             [object \"mem0\"]\nqom-type = \"memory-backend-memfd\"\nsize = \"64M\"\nshare = \"on\"\n\
             [numa]\ntype = \"node\"\nnodeid = \"0\"\nmemdev = \"mem0\"\n\
             [chardev \"monitor\"]\nbackend = \"socket\"\npath = \"{place}/qmp\"\nserver = \"on\"\nwait = \"off\"\n\
             [mon]\nchardev = \"monitor\"\nmode = \"control\"\n"
        );
        std::fs::write(dir.path().join("qemu.conf"), config).unwrap();
        let id = VmId((0xfeed << 64) + (u128::from(std::process::id()) << 8) + 0x20 + at as u128);
        let child = Program::new("qemu-system-x86_64")
            .args([
                "-S",
                "-name",
                &format!("real-jail-{at}"),
                "-uuid",
                &id.to_string(),
            ])
            .args(["-accel", "tcg", "-display", "none", "-nodefaults"])
            .args([
                "-readconfig",
                &format!("{place}/qemu.conf"),
                "-pidfile",
                &format!("{place}/qemu.pid"),
            ])
            .args(more.iter().map(|word| word.replace("DIR", &place)))
            .stdin(Stdio::null())
            .spawn();
        let guest = Guest {
            child: child.expect("qemu-system-x86 is installed"),
            dir,
            id,
        };
        assert!(until(|| Path::new(&guest.socket()).exists()), "{more:?}");
        let mut qemu = Qemu::new(Path::new("/"));
        let found = until(|| {
            qemu.scan(true).unwrap();
            qemu.vms.contains_key(&id)
        });
        assert!(found, "{more:?}: {:?}", qemu.take_notices());
        assert_eq!(qemu.describe(id).unwrap().ram_sizes, [Bytes(64 << 20)]);
        done(&mut qemu, |qemu| {
            qemu.watch(id);
            qemu.command(id, ("query-status", json!({})))
        });
    }
}
