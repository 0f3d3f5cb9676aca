use homenode_host::Setting;
use homenode_kernel::fake::Tree;
use homenode_units::{BytesPerSec, Permit};
use proptest::prelude::*;

use super::*;

/// A running domain as libvirt 9 writes it, shortened.
pub(crate) const LIVE: &str = "<domain type='kvm' id='3'>
  <name>web &amp; co</name>
  <uuid>01234567-89ab-cdef-0011-223344556677</uuid>
  <metadata><other:x xmlns:other='urn:o'/><homenode:vm xmlns:homenode='https://homenode.dev/xmlns/vm/1' manage='yes' home='0-1' bandwidth='2GB/s'/></metadata>
  <memory unit='KiB'>3145729</memory>
  <currentMemory unit='KiB'>1048576</currentMemory>
  <memoryBacking><hugepages><page size='2048' unit='KiB'/></hugepages><locked/></memoryBacking>
  <vcpu placement='static' cpuset='0-7,^3' current='2'>4</vcpu>
  <iothreads>2</iothreads>
  <cputune><vcpupin vcpu='1' cpuset='4-5'/><emulatorpin cpuset='0'/><iothreadpin iothread='1' cpuset='6'/></cputune>
  <numatune><memory mode='restrictive' nodeset='0,2'/></numatune>
  <cpu mode='custom'><numa><cell id='0' cpus='0-3' memory='2097152' unit='KiB'/></numa></cpu>
  <devices>
    <hostdev mode='subsystem' type='pci' managed='yes'><driver name='vfio'/><source><address domain='0x0000' bus='0x3b' slot='0x10' function='0x1'/></source></hostdev>
    <memory model='dimm'><target><size unit='KiB'>1048576</size></target></memory>
  </devices>
</domain>";

#[test]
fn a_live_domain_reads() {
    let domain = Domain::parse(LIVE).unwrap();
    assert_eq!(
        (domain.name.as_str(), domain.runtime_id, domain.vcpus_current),
        ("web & co", Some(3), 2)
    );
    assert_eq!(domain.memory_current_bytes, Bytes::from_gib(1));
    assert_eq!(domain.ram_sizes, [Bytes::from_gib(2), Bytes::from_gib(1)]);
    assert_eq!(domain.cpuset.as_ref().unwrap().to_string(), "0-2,4-7");
    assert_eq!(domain.vcpu_pins[&1].to_string(), "4-5");
    assert_eq!(
        (
            domain.emulator_pin.as_ref().unwrap().to_string(),
            domain.iothread_pins[&1].to_string()
        ),
        ("0".into(), "6".into())
    );
    assert_eq!(domain.iothreads, [1, 2]);
    let tune = domain.numatune.clone().unwrap();
    assert_eq!(
        (tune.mode.as_str(), tune.nodes.unwrap().to_string()),
        ("restrictive", "0,2".into())
    );
    assert_eq!(
        domain.huge_pages,
        Some(HugePages {
            page_bytes: Some(Bytes::from_mib(2))
        })
    );
    assert_eq!(domain.locked, Some(Locked));
    assert_eq!(domain.free_pages, FreePages::Kept);
    for (balloon, expected) in [
        ("model='virtio' freePageReporting='on'", FreePages::Reported),
        ("model='virtio' freePageReporting='off'", FreePages::Kept),
        ("model='none' freePageReporting='on'", FreePages::Kept),
        (
            "model='virtio-non-transitional' freePageReporting='on'",
            FreePages::Reported,
        ),
    ] {
        let xml = LIVE.replace("</devices>", &format!("<memballoon {balloon}/></devices>"));
        assert_eq!(Domain::parse(&xml).unwrap().free_pages, expected, "{balloon}");
    }
    let settings = domain.settings(None, vec![1]);
    assert_eq!(
        (settings.management, settings.home.unwrap().to_string()),
        (Management::Managed, "0-1".into())
    );
    assert_eq!(settings.bandwidth, Some(BytesPerSec(2_000_000_000)));
}

#[test]
fn cells_are_in_order_and_only_our_shmem_device_counts() {
    let cells = "<cpu><numa><cell id='1' cpus='1' memory='1' unit='GiB'/><cell id='0' cpus='0,2-9' memory='2' unit='GiB'/>\
                     <cell id='2' memory='0'/></numa></cpu></domain>";
    let plain = "<domain><name>n</name><uuid>4dea22b3-1d52-d8f3-2516-782e98ab3fa0</uuid><memory>4194304</memory><vcpu>3</vcpu>";
    let shmem = |name: &str| {
        format!(
            "<devices><shmem name='other'/><shmem name='{name}'><server path='/run/x.sock'/></shmem></devices>"
        )
    };
    let with = |name: &str| Domain::parse(&format!("{plain}{}{cells}", shmem(name))).unwrap();
    let domain = with(TOPOLOGY_DEVICE);
    let seen: Vec<_> = domain
        .cells
        .iter()
        .map(|cell| (cell.vcpus.as_slice(), cell.memory_bytes))
        .collect();
    let gib = Bytes::from_gib;
    // vCPUs beyond the VM's count are ignored.
    assert_eq!(seen, [(&[0, 2][..], gib(2)), (&[1], gib(1)), (&[], gib(0))]);
    assert_eq!(domain.ram_sizes, [gib(2), gib(1)]);
    assert_eq!(domain.topology_socket.as_deref(), Some("/run/x.sock"));
    assert_eq!(with("mine").topology_socket, None);
    for bad in ["id='1'", "id='x'", "id='0' cpus='zero'"] {
        let xml = format!("{plain}<cpu><numa><cell {bad}/></numa></cpu></domain>");
        assert!(Domain::parse(&xml).is_err(), "{bad}");
    }
}

#[test]
fn nodes_of_assigned_devices_come_from_sysfs() {
    let domain = Domain::parse(LIVE).unwrap();
    assert_eq!(domain.assigned_devices, ["0000:3b:10.1"]);
    let tree = Tree::new(&[("sys/bus/pci/devices/0000:3b:10.1/numa_node", "2\n")]);
    assert_eq!(domain.device_nodes(tree.root()).to_string(), "2");
    tree.write("sys/bus/pci/devices/0000:3b:10.1/numa_node", "-1\n");
    assert!(domain.device_nodes(tree.root()).is_empty());
}

#[test]
fn a_permit_is_written_beside_the_other_settings() {
    let permit: Permit = "250k".parse().unwrap();
    let said = Domain::parse(LIVE).unwrap().settings.unwrap();
    assert_eq!(said.permit, None);
    let booked = element(&said.with(Setting::Permit(Some(permit)))).unwrap();
    assert_eq!(
        booked,
        "<vm manage='yes' home='0-1' bandwidth='2GB/s' permit='250k'/>"
    );
    let begun = "<homenode:vm xmlns:homenode='https://homenode.dev/xmlns/vm/1' ";
    let live = LIVE.replace(begun, &format!("{begun}permit='250k' "));
    let said = Domain::parse(&live).unwrap().settings.unwrap();
    assert_eq!(said.permit, Some(permit));
    assert_eq!(
        element(&said.with(Setting::Permit(None))).unwrap(),
        "<vm manage='yes' home='0-1' bandwidth='2GB/s'/>"
    );
    let other = "500MB/s".parse().unwrap();
    assert!(
        element(&said.with(Setting::Permit(Some(other))))
            .unwrap()
            .ends_with(" permit='500MB/s'/>")
    );
    let nothing = OperatorSettings::default();
    assert_eq!(element(&nothing.with(Setting::Permit(None))), None);
    assert_eq!(
        element(&nothing.with(Setting::Permit(Some(permit)))).unwrap(),
        "<vm permit='250k'/>"
    );
}

#[test]
fn a_mode_reads_back_as_it_was_written_beside_the_other_settings() {
    let begun = "<homenode:vm xmlns:homenode='https://homenode.dev/xmlns/vm/1' ";
    for mode in Mode::ALL {
        let said = Domain::parse(LIVE).unwrap().settings.unwrap();
        assert_eq!(said.mode, None);
        let written = element(&said.with(Setting::Mode(Some(mode)))).unwrap();
        assert_eq!(
            written,
            format!("<vm manage='yes' home='0-1' bandwidth='2GB/s' mode='{mode}'/>")
        );
        let live = LIVE.replace(begun, &format!("{begun}mode='{mode}' "));
        let domain = Domain::parse(&live).unwrap();
        assert_eq!(domain.settings(None, vec![]).mode, Some(mode));
        let taken_back = element(&domain.settings.unwrap().with(Setting::Mode(None))).unwrap();
        assert_eq!(taken_back, "<vm manage='yes' home='0-1' bandwidth='2GB/s'/>");
    }
}

#[test]
fn of_a_vm_that_is_only_observed_not_even_reports_are_asked_for() {
    let with = |said: &str| {
        let begun = "<homenode:vm xmlns:homenode='https://homenode.dev/xmlns/vm/1' ";
        Domain::parse(&LIVE.replace(begun, &format!("{begun}{said} "))).unwrap()
    };
    assert!(with("floor='1GiB' mode='recommend'").may_be_shrunk());
    assert!(!with("floor='1GiB' mode='observe'").may_be_shrunk());
}

#[test]
fn malformed_metadata_means_watch_only() {
    for (good, bad) in [
        ("manage='yes'", "manage='perhaps'"),
        ("home='0-1'", "home='one'"),
        ("home='0-1'", "home=''"),
        ("bandwidth='2GB/s'", "bandwidth='fast'"),
        ("bandwidth=", "bandwith="),
        ("bandwidth='2GB/s'", "permit='0'"),
        ("bandwidth='2GB/s'", "mode='careful'"),
        ("bandwidth='2GB/s'", "mode='Act'"),
        ("bandwidth='2GB/s'", "mode=''"),
        ("bandwidth='2GB/s'", "mode='act recommend'"),
        ("bandwidth='2GB/s'", "modes='recommend'"),
    ] {
        let domain = Domain::parse(&LIVE.replace(good, bad)).unwrap();
        let why = domain.settings.clone().unwrap_err();
        assert!(!why.to_string().is_empty());
        let settings = domain.settings(None, vec![]);
        assert_eq!(
            (settings.management, settings.home),
            (Management::Ignored, None),
            "{why}"
        );
    }
    let elsewhere = Domain::parse(&LIVE.replace("xmlns/vm/1", "xmlns/vm/9")).unwrap();
    assert_eq!(
        elsewhere.settings,
        Ok(OperatorSettings::default()),
        "another version's element is not ours"
    );
}

#[test]
fn what_every_domain_has_must_be_there() {
    for (good, bad) in [
        ("<name>web &amp; co</name>", ""),
        ("web &amp; co", "../x"),
        ("01234567", "x1234567"),
        ("3145729", "-1"),
        ("3145729", "99999999999999999999"),
        (">4</vcpu>", ">0</vcpu>"),
        ("current='2'", "current='9'"),
        ("cpuset='4-5'", "cpuset='5-4'"),
        ("nodeset='0,2'", "nodeset='x'"),
        ("</domain>", ""),
    ] {
        assert!(Domain::parse(&LIVE.replacen(good, bad, 1)).is_err(), "{bad}");
    }
    for cut in [0, 10, 100, 500, 1000] {
        assert!(Domain::parse(&LIVE[..cut]).is_err());
    }
}

proptest! {
    #[test]
    fn any_damage_is_read_or_refused(at in 0usize..1500, what in "\\PC{0,4}") {
        let mut text = LIVE.to_owned();
        if at < text.len() && text.is_char_boundary(at) {
            text.insert_str(at, &what);
        }
        let _ = Domain::parse(&text);
    }
}

/// A domain with this memory tuning, these cells and these devices.
fn bound(numatune: &str, cells: &str, devices: &str) -> Option<(String, String)> {
    let text = format!(
        "<domain type='qemu'><name>cells</name><uuid>01234567-89ab-cdef-0011-223344556677</uuid><memory unit='MiB'>192</memory><vcpu>2</vcpu>
         <numatune>{numatune}</numatune><cpu><numa>{cells}</numa></cpu><devices>{devices}</devices></domain>"
    );
    let binding = Domain::parse(&text).unwrap().binding?;
    Some((binding.nodes.to_string(), binding.common.to_string()))
}

#[test]
fn memory_is_bound_cell_by_cell_and_dimm_by_dimm() {
    let two = "<cell id='0' cpus='0' memory='96' unit='MiB'/><cell id='1' cpus='1' memory='96' unit='MiB'/>";
    let memory = |mode: &str, nodes: &str| format!("<memory mode='{mode}' nodeset='{nodes}'/>");
    let memnode = |cell: u32, mode: &str, nodes: &str| {
        format!("<memnode cellid='{cell}' mode='{mode}' nodeset='{nodes}'/>")
    };
    let on_each = |mode: &str| memnode(0, mode, "0") + &memnode(1, mode, "1");
    let dimm = |source: &str, cell: u32| {
        format!(
            "<memory model='dimm'><source>{source}</source><target><size unit='MiB'>64</size><node>{cell}</node></target></memory>"
        )
    };
    let is = |nodes: &str, common: &str| Some((nodes.to_owned(), common.to_owned()));
    // As Nova and KubeVirt write it, and without `<memory>`.
    assert_eq!(
        bound(&(memory("strict", "0-1") + &on_each("strict")), two, ""),
        is("0-1", "")
    );
    assert_eq!(bound(&on_each("strict"), two, ""), is("0-1", ""));
    assert_eq!(
        bound("<memnode cellid='1' nodeset='1'/>", two, ""),
        is("1", "1"),
        "strict by default"
    );
    // A cell without a `<memnode>` uses `<memory>`; if no cell has a `<memnode>`, all cells use it.
    assert_eq!(
        bound(&(memory("strict", "0,2") + &memnode(1, "strict", "2")), two, ""),
        is("0,2", "2")
    );
    assert_eq!(bound(&memory("strict", "0-1,^0"), two, ""), is("1", "1"));
    assert_eq!(bound("<memory nodeset='1'/>", "", ""), is("1", "1"));
    // These modes bind nothing, except `interleave`, which binds each page.
    assert_eq!(
        bound(&(memory("restrictive", "0-1") + &on_each("restrictive")), two, ""),
        None
    );
    assert_eq!(bound(&on_each("preferred"), two, ""), None);
    assert_eq!(
        bound("<memory mode='strict' placement='auto'/>", two, ""),
        None,
        "numa_maps tells"
    );
    assert_eq!(bound(&memory("interleave", "0-1"), "", ""), is("0-1", ""));
    assert_eq!(bound("", two, ""), None);
    // A DIMM uses its own mask, or else its cell's.
    assert_eq!(bound("", two, &dimm("<nodemask>1</nodemask>", 0)), is("1", "1"));
    assert_eq!(bound(&memnode(1, "strict", "3"), two, &dimm("", 1)), is("3", "3"));
    assert_eq!(
        bound(&memory("preferred", "0"), two, &dimm("<nodemask>1</nodemask>", 0)),
        None
    );
    assert_eq!(
        bound(&on_each("strict"), two, &dimm("<nodemask>2</nodemask>", 0)),
        is("0-2", "")
    );
    for bad in [
        "<memnode cellid='x' nodeset='0'/>",
        "<memnode cellid='0' nodeset='a'/>",
    ] {
        let text = LIVE.replace("<numatune>", &format!("<numatune>{bad}"));
        assert!(
            Domain::parse(&text).unwrap_err().to_string().contains("memnode"),
            "{bad}"
        );
    }
}
