//! Examines the host. Says for each feature of the agent what is present or missing, what its absence costs, and the remedy.
//! Changes nothing. Only libvirt could hang, so its answer may take at most 8 s.

mod resctrl;
pub mod text;

use std::path::{Path, PathBuf};

use homenode_host::KernelSettings;
use homenode_host::observation::Tracker;
use homenode_kernel::ibs;
use homenode_kernel::kernel_settings;
use homenode_kernel::perf::{Perf, Selection};
use homenode_kernel::trackers::{self, Runs};
use homenode_kernel::uncore::{self, Uncore};
use homenode_kvm::{ConnectError, QemuVm, Vms};
use homenode_machine::Machine;
use homenode_machine_files::sysfs;
use homenode_undo::lock::Lock;
use homenode_undo::peer::GroupId;
use homenode_undo::state_dir::StateDir;
use schemars::JsonSchema;
use serde::Serialize;

/// Bits of `CapEff` required to move pages of other processes.
const MOVES_PAGES: [(u32, &str); 2] = [(19, "CAP_SYS_PTRACE"), (23, "CAP_SYS_NICE")];
/// The group whose members may query the agent.
const GROUP: &str = "homenode";
/// Where QEMUs with an ivshmem device connect to the agent.
const TOPOLOGY: &str = homenode_undo::TOPOLOGY_SOCKET;

/// The result of examining a host.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Examined {
    /// The machine's name, if it can be read.
    pub machine: Option<String>,
    /// The kernel's own memory settings, such as AutoNUMA and KSM.
    pub kernel: KernelSettings,
    /// All features, present or not.
    pub features: Vec<Feature>,
}

/// A feature of the agent, or something that the agent uses.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Feature {
    /// The feature's name.
    pub feature: &'static str,
    /// Whether the feature is present.
    pub has: bool,
    /// What was found, or what is missing.
    pub found: String,
    /// What the agent cannot do without the feature.
    pub costs: Option<&'static str>,
    /// The remedy: a command if one suffices.
    pub remedy: Option<String>,
}

impl Feature {
    /// Returns true if the feature is missing and has no remedy, on this hardware or at all.
    pub fn is_out_of_reach(&self) -> bool {
        !self.has
            && self
                .remedy
                .as_ref()
                .is_none_or(|remedy| remedy.starts_with("none"))
    }

    /// Returns true if the feature is a manager of VMs.
    fn is_of_vms(&self) -> bool {
        matches!(self.feature, "libvirt" | "plain QEMU" | "Xen")
    }
}

/// The places to examine.
#[derive(Clone, Debug)]
pub struct Places {
    /// Root of the host's files: `/`, except in tests.
    pub root: PathBuf,
    /// The agent's state directory.
    pub state: PathBuf,
    /// libvirt's address.
    pub libvirt: Vms,
}

/// Why a feature is missing, what that costs, and the remedy.
struct Lack {
    found: String,
    costs: &'static str,
    remedy: String,
}

fn lack(found: impl Into<String>, costs: &'static str, remedy: impl Into<String>) -> Lack {
    Lack {
        found: found.into(),
        costs,
        remedy: remedy.into(),
    }
}

type Found = Result<String, Lack>;

/// Examines this host.
pub fn examine(places: &Places) -> Examined {
    // A dom0 that lacks something is examined as a dom0, so the report shows what it lacks.
    if homenode_xen::is_dom0(&places.root).unwrap_or(true) {
        return examine_dom0(places);
    }
    let Places { root, libvirt, .. } = places;
    let machine = sysfs::read(root);
    let known = machine.as_ref().ok();
    let probed = libvirt.probe();
    let qemu = homenode_kvm::qemu_vms(root);
    let features = [
        ("libvirt", of_libvirt(libvirt, (&probed, &qemu))),
        ("plain QEMU", of_qemu(&qemu, &probed)),
        ("KVM", kvm(root)),
        ("nodes", nodes(machine.as_ref().map_err(ToString::to_string))),
        ("hardware counters", counters(root)),
        ("uncore counters", uncore_counters(root, known)),
        ("page samples", page_samples(root)),
        ("resctrl", resctrl::examine(root, known)),
        ("DAMON", tracker(root, Tracker::Damon)),
        ("page moves", page_moves(root)),
        ("clear_refs", tracker(root, Tracker::Invalidation)),
        ("balloon statistics", balloon(&probed, &qemu)),
        ("topology pages", topology_pages(root)),
        ("numad drop-in", numad(root)),
        ("libvirt hook", hook(root)),
    ];
    Examined {
        machine: known.map(|machine| machine.name.clone()),
        kernel: kernel_settings::read(root, |_| ()),
        features: told(features.into_iter().chain(besides(places))),
    }
}

/// Examines dom0 of a Xen host: what stock Xen allows, and what else the agent needs.
fn examine_dom0(places: &Places) -> Examined {
    let (machine, of_xen) = homenode_xen::features(&places.root);
    let nodes_of = machine
        .as_ref()
        .ok_or_else(|| "the hypervisor does not report its NUMA nodes".to_owned());
    let of_xen = of_xen.into_iter().map(|(feature, found)| {
        let found = found.map_err(|(found, costs, remedy)| lack(found, costs, remedy));
        (feature, found)
    });
    Examined {
        machine: machine.as_ref().map(|machine| machine.name.clone()),
        // The kernel of dom0 does not place domains' memory.
        kernel: KernelSettings::default(),
        features: told(of_xen.chain([("nodes", nodes(nodes_of))]).chain(besides(places))),
    }
}

/// Returns the features that the agent needs on every host, whichever software manages the VMs.
fn besides(places: &Places) -> [(&'static str, Found); 5] {
    let Places { root, state, .. } = places;
    [
        ("history", history(root, state)),
        ("state directory", state_directory(state)),
        ("group", group()),
        ("guard", guard(state)),
        ("systemd", systemd(root)),
    ]
}

fn told(features: impl IntoIterator<Item = (&'static str, Found)>) -> Vec<Feature> {
    let features = features.into_iter().map(|(feature, found)| match found {
        Ok(found) => Feature {
            feature,
            has: true,
            found,
            costs: None,
            remedy: None,
        },
        Err(lack) => Feature {
            feature,
            has: false,
            found: lack.found,
            costs: Some(lack.costs),
            remedy: Some(lack.remedy),
        },
    });
    features.collect()
}

fn of_libvirt(libvirt: &Vms, (probed, qemu): (&Result<(), ConnectError>, &[QemuVm])) -> Found {
    let (found, remedy) = match probed {
        Ok(()) => return Ok(format!("{libvirt} answers")),
        Err(_) if !qemu.is_empty() => {
            let costs = "nothing: libvirt manages no VM here";
            return Err(lack("it does not answer", costs, "none needed; `--host qemu`"));
        }
        Err(ConnectError::NoLibvirt { cause, .. }) => (
            cause.clone(),
            "systemctl start libvirtd, or first apt install libvirt-daemon-system",
        ),
        Err(ConnectError::NotPermitted { cause, .. }) => {
            (cause.clone(), "run as root, or join the group `libvirt`")
        }
        Err(error) => (error.to_string(), "correct the cause shown"),
    };
    Err(lack(found, "no VM is seen or managed", remedy))
}

/// Reports how far the agent can change VMs that libvirt does not manage: that depends on who owns their cgroups and monitors.
fn of_qemu(vms: &[QemuVm], libvirt: &Result<(), ConnectError>) -> Found {
    if vms.is_empty() {
        return Err(lack(
            "none runs here",
            match libvirt {
                Ok(()) => "nothing, if libvirt manages all VMs",
                Err(_) => "no VM is seen or managed",
            },
            "start one; the agent finds it within seconds",
        ));
    }
    let without = |why: fn(&QemuVm) -> Option<&String>| {
        let mut lacking = vms.iter().filter_map(|vm| Some((vm, why(vm)?)));
        let first = lacking
            .next()
            .map(|(vm, why)| format!(", but not of {} ({why})", vm.name));
        (
            vms.len() - first.iter().len() - lacking.count(),
            first.unwrap_or_default(),
        )
    };
    let (held, not_held) = without(|vm| vm.no_quota.as_ref());
    let (asked, not_asked) = without(|vm| vm.no_monitor.as_ref());
    let count = match vms.len() {
        1 => "one VM".to_owned(),
        count => format!("{count} VMs"),
    };
    Ok(format!(
        "{count}: can control pins of all, quotas of {held}{not_held}; balloon and state of {asked}{not_asked}"
    ))
}

fn kvm(root: &Path) -> Found {
    match root.join("dev/kvm").exists() {
        true => Ok("/dev/kvm exists".to_owned()),
        false => Err(lack(
            "there is no /dev/kvm",
            "VMs are emulated, and slow",
            "modprobe kvm_intel, or kvm_amd, with virtualisation on in the firmware",
        )),
    }
}

fn nodes(machine: Result<&Machine, String>) -> Found {
    let unread = |why| {
        lack(
            why,
            "the agent does not start",
            "mount /sys, or correct the cause shown",
        )
    };
    let machine = machine.map_err(unread)?;
    let isolated = match machine.isolated.is_empty() {
        true => String::new(),
        false => format!(
            "; CPUs {} are isolated: only VMs that name them use them",
            machine.isolated
        ),
    };
    match machine.home_nodes().len() {
        0 | 1 => Err(lack(
            "this host has one node",
            "no VM is placed or moved; everything else works",
            "none if it has one socket; otherwise turn off node interleaving in the firmware",
        )),
        count => Ok(format!("{count} nodes with CPUs and memory{isolated}")),
    }
}

fn counters(root: &Path) -> Found {
    const COSTS: &str = "decisions are based on CPU and memory alone";
    let selection = Selection::discover(root)
        .map_err(|error| lack(error.to_string(), COSTS, "report it with the file's contents"))?;
    let mut perf = Perf::new(selection);
    let tid = rustix::thread::gettid().as_raw_nonzero().get();
    let counted = perf.counters(tid);
    match (perf.absence(), counted) {
        (None, Some(counters)) => {
            let note = perf
                .note()
                .unwrap_or("LLC misses of threads are counted")
                .to_owned();
            match counters.llc_misses {
                Some(_) => Ok(note),
                None => Err(lack(note, COSTS, "none on this processor")),
            }
        }
        (why, _) => Err(lack(
            why.unwrap_or("a counter could not be opened"),
            COSTS,
            "run as root, or sysctl kernel.perf_event_paranoid=0; a VM needs a PMU",
        )),
    }
}

fn uncore_counters(root: &Path, machine: Option<&Machine>) -> Found {
    let missing = |why: String| {
        lack(
            why,
            "traffic of links and memory is not counted",
            "modprobe intel_uncore or amd_uncore, and run as root; VMs have none",
        )
    };
    let machine = machine.ok_or_else(|| missing("the machine cannot be read".to_owned()))?;
    let layout = uncore::discover(root, machine).map_err(|error| missing(error.to_string()))?;
    let uncore = Uncore::open(layout);
    let (count, notes) = (uncore.count(), &uncore.notes);
    let said = notes.join("; ");
    match (count, notes.is_empty()) {
        (0, true) => Err(missing("the kernel exposes none".to_owned())),
        (0, false) => Err(missing(said)),
        (_, true) => Ok(format!("{count} counters of controllers and links")),
        (_, false) => Ok(format!("{count} counters of controllers and links; {said}")),
    }
}

fn page_samples(root: &Path) -> Found {
    match ibs::Device::find(root) {
        Ok(_) => Ok("IBS samples which node uses a page".to_owned()),
        Err(why) => Err(lack(
            why.to_string(),
            "the memory policy +carrefour is refused",
            match why {
                ibs::NotSampled::NoIbs(_) => "none: only AMD's IBS shows it",
                ibs::NotSampled::Unreadable(_) | ibs::NotSampled::Refused(_) => "run as root",
            },
        )),
    }
}

fn tracker(root: &Path, wanted: Tracker) -> Found {
    let choices = trackers::choices(root, Runs::Kvm);
    let choice = choices.into_iter().find(|choice| choice.tracker == wanted);
    match choice.map(|choice| choice.why_not) {
        Some(None) => Ok("it can watch working sets".to_owned()),
        Some(Some(why)) => Err(lack(
            why,
            "working sets are watched by other means",
            match wanted {
                Tracker::Damon => "run as root, with CONFIG_DAMON_SYSFS and no other user of DAMON",
                _ => "run the agent as root",
            },
        )),
        None => Err(lack(
            "it is not known here",
            "working sets are watched by other means",
            "none",
        )),
    }
}

fn page_moves(root: &Path) -> Found {
    let costs = "memory stays where it is";
    let vmstat = std::fs::read_to_string(root.join("proc/vmstat")).unwrap_or_default();
    if !vmstat.contains("pgmigrate_success") {
        let remedy = "use a kernel with CONFIG_MIGRATION and CONFIG_NUMA";
        return Err(lack("the kernel cannot move pages", costs, remedy));
    }
    let status = std::fs::read_to_string(root.join("proc/self/status")).unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    let effective = effective.unwrap_or_default();
    let missing = MOVES_PAGES.iter().filter(|(bit, _)| effective & (1 << bit) == 0);
    let missing: Vec<&str> = missing.map(|(_, name)| *name).collect();
    match missing.is_empty() {
        true => Ok("pages of other processes can be moved".to_owned()),
        false => Err(lack(
            format!("this process lacks {}", missing.join(" and ")),
            costs,
            "run the agent as root",
        )),
    }
}

fn balloon(libvirt: &Result<(), ConnectError>, qemu: &[QemuVm]) -> Found {
    match libvirt {
        _ if qemu.iter().any(|vm| vm.no_monitor.is_none()) => Ok("read from each VM's monitor".to_owned()),
        Ok(()) => Ok("each VM is asked; `homenode memory show` shows which ones answer".to_owned()),
        Err(_) => Err(lack(
            "libvirt does not answer",
            "no memory is taken from VMs",
            "see libvirt; each VM also needs a virtio balloon and its driver",
        )),
    }
}

fn topology_pages(root: &Path) -> Found {
    let socket = root.join(TOPOLOGY.trim_start_matches('/'));
    match socket.exists() {
        true => Ok(format!("served at {TOPOLOGY}")),
        false => Err(lack(
            "nothing serves them",
            "guests are not told where they run",
            "start the agent; a VM needs an ivshmem-doorbell device (docs/TOPOLOGY.md)",
        )),
    }
}

fn numad(root: &Path) -> Found {
    let path = root.join("usr/bin/numad");
    let target = std::fs::canonicalize(&path).ok();
    let is_ours = target
        .as_deref()
        .and_then(Path::file_name)
        .is_some_and(|name| name == "homenode");
    match (is_ours, target.is_some()) {
        (true, _) => Ok("numad is homenode".to_owned()),
        (false, is_there) => Err(lack(
            match is_there {
                true => "numad is another program",
                false => "there is no numad",
            },
            "placement='auto' does not ask the agent",
            "apt install homenode-numad, or the two commands in docs/USE.md",
        )),
    }
}

fn hook(root: &Path) -> Found {
    let hooks = root.join("etc/libvirt/hooks");
    let mut files = vec![hooks.join("qemu")];
    let more = std::fs::read_dir(hooks.join("qemu.d"));
    files.extend(more.into_iter().flatten().flatten().map(|entry| entry.path()));
    let is_ours =
        |file: &PathBuf| std::fs::read_to_string(file).is_ok_and(|text| text.contains("homenode hook"));
    match files.iter().find(|file| is_ours(file)) {
        Some(file) => Ok(format!("in {}", file.display())),
        None => Err(lack(
            "no hook calls homenode",
            "a VM's settings are not applied when it starts",
            "the two commands in `homenode hook --help`",
        )),
    }
}

fn history(root: &Path, state: &Path) -> Found {
    let file = crate::history::beside(state);
    let file = root.join(file.strip_prefix("/").unwrap_or(&file));
    match file.parent().map(|directory| (directory, directory.is_dir())) {
        Some((directory, true)) => Ok(directory.display().to_string()),
        _ => Err(lack(
            format!("no directory for {}", file.display()),
            "nothing is recorded yet",
            "run the agent as root: it creates the directory",
        )),
    }
}

fn state_directory(state: &Path) -> Found {
    let costs = "no agent has acted since the host started";
    match StateDir::open_existing(state) {
        Ok(Some(_)) => Ok(state.display().to_string()),
        Ok(None) => Err(lack(
            format!("there is no {}", state.display()),
            costs,
            "systemctl start homenode, or `homenode run` as root: the agent creates it",
        )),
        Err(error) => Err(lack(
            error.to_string(),
            "no agent can act",
            "correct the cause shown",
        )),
    }
}

fn group() -> Found {
    match GroupId::of(GROUP) {
        Ok(_) => Ok(format!("members of `{GROUP}` may read")),
        Err(why) => Err(lack(
            why.to_string(),
            "only root can query the agent",
            format!("groupadd --system {GROUP}; in the settings: [http] group = \"{GROUP}\""),
        )),
    }
}

fn guard(state: &Path) -> Found {
    let costs = "if the agent dies, its changes stay in force";
    match Lock::owner(state) {
        Ok(Some(owner)) if owner.is_guarded => Ok("an agent runs, and its guard watches it".to_owned()),
        Ok(Some(_)) => Err(lack(
            "an agent runs without a guard",
            costs,
            "systemctl restart homenode",
        )),
        Ok(None) => Err(lack(
            "no agent runs",
            "no VM is changed",
            "systemctl start homenode",
        )),
        Err(error) => Err(lack(error.to_string(), costs, "run this as root")),
    }
}

fn systemd(root: &Path) -> Found {
    let costs = "an agent that dies is not restarted";
    if !root.join("run/systemd/system").is_dir() {
        return Err(lack(
            "this host does not run systemd",
            costs,
            "have this host's service manager start `homenode run`",
        ));
    }
    let units = [
        "etc/systemd/system",
        "lib/systemd/system",
        "usr/lib/systemd/system",
    ];
    let unit = units.map(|directory| root.join(directory).join("homenode.service"));
    match unit.iter().find(|unit| unit.exists()) {
        Some(unit) => Ok(unit.display().to_string()),
        None => Err(lack(
            "homenode.service is not installed",
            costs,
            "cp deploy/systemd/homenode.service /etc/systemd/system/ && systemctl daemon-reload",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Examines a host made of files below `root`.
    fn examined(root: &Path) -> Examined {
        examine(&Places {
            root: root.to_owned(),
            state: root.join("state"),
            libvirt: Vms::Libvirt("qemu+unix:///system?socket=/does/not/exist".to_owned()),
        })
    }

    fn has(examined: &Examined, feature: &str) -> bool {
        let found = examined.features.iter().find(|one| one.feature == feature);
        found.unwrap_or_else(|| panic!("{feature}")).has
    }

    #[test]
    fn what_a_host_lacks_is_said_with_what_that_costs_and_how_to_get_it() {
        let root = tempfile::tempdir().unwrap();
        let bare = examined(root.path());
        assert_eq!(bare.machine, None);
        for feature in bare.features.iter().filter(|feature| !feature.has) {
            assert!(
                !feature.found.is_empty() && feature.costs.is_some(),
                "{feature:?}"
            );
            assert!(
                feature.remedy.as_ref().is_some_and(|remedy| !remedy.is_empty()),
                "{feature:?}"
            );
        }
        let of_files = [
            "KVM",
            "libvirt",
            "nodes",
            "page moves",
            "libvirt hook",
            "numad drop-in",
            "systemd",
            "guard",
        ];
        assert!(of_files.iter().all(|feature| !has(&bare, feature)), "{bare:#?}");
        std::fs::create_dir(root.path().join("proc")).unwrap();
        std::fs::write(root.path().join("proc/cpuinfo"), "vendor_id\t: GenuineIntel\n").unwrap();
        let intel = examined(root.path());
        let samples = intel.features.iter().find(|one| one.feature == "page samples");
        let samples = samples.expect("examined");
        assert!(
            samples.is_out_of_reach() && samples.found.contains("PEBS"),
            "{samples:?}"
        );
    }

    #[test]
    fn a_dom0_without_xenfs_is_told_to_mount_it() {
        let root = tempfile::tempdir().unwrap();
        let properties = root.path().join("sys/hypervisor/properties");
        std::fs::create_dir_all(&properties).unwrap();
        std::fs::write(properties.with_file_name("type"), "xen\n").unwrap();
        std::fs::write(properties.join("features"), "00002a05\n").unwrap();
        let dom0 = examined(root.path());
        let xen = dom0.features.iter().find(|feature| feature.feature == "Xen");
        let xen = xen.expect("what a Xen host has");
        assert!(!xen.has && xen.found.contains("mount -t xenfs"), "{xen:?}");
    }

    #[test]
    fn what_a_host_has_is_found() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("dev/kvm", "");
        write("usr/bin/homenode", "");
        std::os::unix::fs::symlink("homenode", root.path().join("usr/bin/numad")).unwrap();
        write(
            "etc/libvirt/hooks/qemu.d/homenode",
            "#!/bin/sh\nexec homenode hook \"$@\"\n",
        );
        write("proc/vmstat", "pgmigrate_success 1\n");
        write("proc/self/status", "CapEff:\t00000000008c0000\n");
        write("run/systemd/system/x", "");
        write("etc/systemd/system/homenode.service", "");
        write("run/homenode/topology.sock", "");
        let rich = examined(root.path());
        for feature in [
            "KVM",
            "numad drop-in",
            "libvirt hook",
            "page moves",
            "systemd",
            "topology pages",
        ] {
            assert!(has(&rich, feature), "{feature}: {rich:#?}");
        }
        write("proc/self/status", "CapEff:\t0000000000000000\n");
        assert!(!has(&examined(root.path()), "page moves"));
    }
}
