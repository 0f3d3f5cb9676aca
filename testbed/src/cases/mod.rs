//! The cases: what real guests on a real NUMA host must show.
//!
//! A case is a function in one of the modules here and a row in [`ALL`]. It runs in a separate process inside the emulated
//! host, must end within its `limit`, and finds no guests of other cases.

mod agent;
mod arrange;
mod attributed;
mod balancing;
mod balloon;
mod basics;
mod bounds;
mod caches;
mod case;
mod conformance;
mod counted;
mod crash;
mod drain;
mod dropin;
mod evidence;
mod group;
mod hostile;
mod live_topology;
mod memory;
mod numad;
mod pages;
mod permits;
mod plain_qemu;
mod programs;
mod runtimes;
mod topology;
mod why;
mod working_set;
mod xen;
mod xen_agent;
mod xen_balloon;
mod xen_devices;
mod xen_lives;
mod xen_moved;
mod xen_peers;
mod xen_permit;
mod xen_unit;
mod xen_waiting;

pub use case::{Case, Run};
use case::{case, plain_case};
pub use group::Group;

/// All cases, in the order in which they run within a group.
pub static ALL: &[Case] = &[
    case(
        "boot",
        Group::Agent,
        60,
        "4 nodes with the distances asked for, cgroup v2 and KVM",
        basics::boot,
    ),
    case(
        "libvirt",
        Group::Agent,
        180,
        "libvirt answers and sees the 4 nodes",
        basics::libvirt,
    ),
    case(
        "plain-qemu",
        Group::Agent,
        420,
        "the host contract on a QEMU that no libvirt manages, in a scope as Proxmox makes",
        plain_qemu::conforming,
    ),
    case(
        "plain-qemu-homes",
        Group::Agent,
        900,
        "two such QEMUs, one in namespaces as a pod has, come home by files and are restored after kill -9",
        plain_qemu::homes,
    ),
    case(
        "plain-qemu-unmovable",
        Group::Agent,
        600,
        "memory locked, pinned by VFIO or in huge pages stays, and the agent says why; huge pages move where the operator lets them",
        plain_qemu::unmovable,
    ),
    case(
        "scattered-memory",
        Group::Record,
        240,
        "a guest's pages are spread over 4 nodes, and all moved to one",
        basics::scattered_memory,
    ),
    case(
        "libvirtd-killed",
        Group::Record,
        240,
        "libvirtd is killed and started again; guests run on and can be pinned",
        basics::libvirtd_killed,
    ),
    case(
        "page-moves",
        Group::Record,
        480,
        "what move_pages does under each numatune mode, and what it costs (record)",
        basics::page_moves,
    ),
    case(
        "busy-guests",
        Group::Record,
        420,
        "three busy guests at once leave the emulated host alive",
        basics::busy_guests,
    ),
    case(
        "numad-order",
        Group::Record,
        420,
        "the prepare hook of a guest runs before libvirt asks numad (record)",
        numad::order,
    ),
    case(
        "numad-three-starts",
        Group::Record,
        420,
        "where the real numad puts three guests started at once (record)",
        numad::three_starts,
    ),
    case(
        "conformance",
        Group::Agent,
        420,
        "the live host passes the conformance suite of the host contract",
        conformance::live_host,
    ),
    case(
        "agent-cpu",
        Group::Record,
        600,
        "what the agent costs beside three guests (record)",
        conformance::agent_cpu,
    ),
    case(
        "bring-home",
        Group::Agent,
        480,
        "a guest's scattered memory comes home, within its budget",
        agent::bring_home,
    ),
    case(
        "lend-and-return",
        Group::Agent,
        600,
        "an overloaded node lends vCPUs to an idle one and takes them back",
        agent::lend_and_return,
    ),
    case(
        "live-topology",
        Group::Agent,
        600,
        "a guest is told where its vCPUs run, takes memory there, and an agent that takes over goes on telling it",
        live_topology::live_topology,
    ),
    case(
        "live-pages",
        Group::Agent,
        600,
        "pages that a balloon took from a guest's virtual nodes come back where the guest was told, or the agent brings them there",
        live_topology::live_pages,
    ),
    case(
        "rehome",
        Group::Agent,
        600,
        "a guest that stays away gets a new home and its memory follows",
        agent::rehome,
    ),
    case(
        "drained",
        Group::Agent,
        600,
        "a guest leaves a node that is drained to its last page, and none comes there, also under the next agent",
        drain::drained,
    ),
    case(
        "cpu-offline",
        Group::Agent,
        600,
        "a guest whose node's CPU goes offline gets another home, its memory follows, and no other program is blamed",
        drain::offline,
    ),
    case(
        "destroyed-in-move",
        Group::Agent,
        480,
        "two guests are placed on different nodes, and one destroyed in mid-move does not disturb the agent",
        agent::destroyed_in_move,
    ),
    case(
        "libvirtd-restarted",
        Group::Agent,
        480,
        "the agent goes on after libvirtd was killed and came back",
        agent::libvirtd_restarted,
    ),
    case(
        "agent-killed",
        Group::Agent,
        600,
        "the agent killed in mid-move leaves no limits, and its successor finishes",
        agent::agent_killed,
    ),
    case(
        "kill-points",
        Group::Agent,
        1500,
        "agent, guard and libvirtd killed, stopped and robbed of their files in ten ways: everything is restored",
        crash::kill_points,
    ),
    case(
        "saved",
        Group::Agent,
        600,
        "a guest that was saved while an agent held it is released once it is restored",
        crash::saved,
    ),
    case(
        "output-not-read",
        Group::Agent,
        480,
        "an agent whose output is not read goes on, and ends in good order when asked to",
        agent::output_not_read,
    ),
    case(
        "quota",
        Group::Agent,
        420,
        "a CPU quota comes into force and the guard of a dead agent lifts it",
        permits::quota,
    ),
    case(
        "balloon",
        Group::Agent,
        600,
        "the agent takes memory that a guest does not use, returns it on need, and its guard returns all",
        balloon::overcommit,
    ),
    case(
        "permit",
        Group::Agent,
        600,
        "a permit set through the agent throttles a thrasher where counters exist, until the agent is killed",
        permits::permit_set,
    ),
    case(
        "memory-policies",
        Group::Agent,
        600,
        "round-4k by migration; released pages are placed again where they are touched; what cannot be is refused",
        memory::policies,
    ),
    case(
        "drift",
        Group::Agent,
        720,
        "memory that a balloon scattered comes home, beside the kernel's automatic balancing",
        memory::drift,
    ),
    case(
        "working-set",
        Group::Agent,
        420,
        "the agent's figure lies around what a guest is known to use: contiguous, scattered, nothing",
        working_set::known_hot_sets,
    ),
    case(
        "dropin-three-starts",
        Group::Agent,
        480,
        "three guests started at once through our numad end on three nodes",
        dropin::three_starts,
    ),
    case(
        "dropin-near-device",
        Group::Agent,
        480,
        "a guest that is given a PCI device is started on the device's node",
        dropin::near_its_device,
    ),
    case(
        "bounds",
        Group::Bounds,
        1800,
        "isolated CPUs, cpusets of slices and domains, bound cells and huge pages hold at every look, and all is as before afterwards",
        bounds::held,
    ),
    case(
        "bounds-names",
        Group::Bounds,
        900,
        "of two VMs of a name, and with a domain's cpuset emptied, nothing is changed, and the reason is said",
        bounds::names,
    ),
    case(
        "permit-held",
        Group::Counted,
        900,
        "a cache thrasher is held to its permit and its neighbour misses less, until the agent is killed",
        counted::permit_held,
    ),
    case(
        "carrefour",
        Group::Counted,
        480,
        "pages come to the node that uses them, others stay, and none of a paused guest moves",
        counted::carrefour,
    ),
    case(
        "why",
        Group::Arrange,
        1500,
        "`homenode why` names what slowed guests down, and whose doing it was: a quota, a move away from its memory, a polluted cache",
        why::causes_named,
    ),
    case(
        "hostile",
        Group::Arrange,
        1200,
        "a tenant that alternates, pollutes in bursts and lies of its memory costs its neighbour under a percent, as counted",
        hostile::neighbour_spared,
    ),
    case(
        "own-misses",
        Group::Arrange,
        1800,
        "a victim beside a thrasher keeps its permit's full CPU by its own misses, and is throttled by all that are counted",
        attributed::own_misses,
    ),
    case(
        "alone-free",
        Group::Arrange,
        600,
        "a guest alone on the host gets no home and no pin for a minute, and misses as without an agent",
        arrange::alone_free,
    ),
    case(
        "polluters-parted",
        Group::Arrange,
        1500,
        "two guests that evict each other from one node's cache end on different nodes and miss less",
        arrange::polluters_parted,
    ),
    case(
        "move-undone",
        Group::Arrange,
        1800,
        "a guest is parted from another on trial, nothing is gained, and it is as before",
        arrange::move_undone,
    ),
    case(
        "caches-parted",
        Group::Caches,
        1800,
        "on a full stock host polluters get caches of their own, and those beside them miss less than under the kernel alone",
        caches::polluters_parted,
    ),
    case(
        "brought-once",
        Group::Caches,
        3000,
        "on a stock host a guest away from its memory is brought together with it once, by the kernel or the agent",
        caches::brought_once,
    ),
    case(
        "evidence",
        Group::Evidence,
        3900,
        "every section of `homenode evidence` is measured or says why not; killed at ten moments, it leaves nothing",
        evidence::whole,
    ),
    case(
        "evidence-permit",
        Group::Arrange,
        2400,
        "`homenode evidence` books a permit for its own VM, which the agent throttles in the VM's own cgroup",
        evidence::permit,
    ),
    case(
        "balancing-one",
        Group::Balancing,
        1800,
        "what the kernel's own balancing does with one VM in three set-ups, kept for the twin (record)",
        balancing::one,
    ),
    case(
        "balancing-two",
        Group::Balancing,
        1200,
        "the same with two VMs, each on the other's memory, and on a full host (record)",
        balancing::two,
    ),
    case(
        "balancing-memory",
        Group::Balancing,
        1200,
        "the same with a VM whose memory is bound, and with one in transparent huge pages (record)",
        balancing::memory,
    ),
    plain_case(
        "page-log",
        Group::Pages,
        300,
        "what the plugin sees of a real guest's pages is what accessed bits show, and PRL is right about known programs",
        pages::log,
    ),
    plain_case(
        "page-log-pml",
        Group::Pages,
        200,
        "PML on a real guest is right about what is written and blind to what is read",
        pages::pml,
    ),
    plain_case(
        "page-log-live",
        Group::Pages,
        200,
        "a log in shared memory is followed while its guest runs, and keeps to its size",
        pages::live,
    ),
    plain_case(
        "page-log-speed",
        Group::Speed,
        900,
        "how much slower a guest is under the plugin, and under QEMU's own design of one (record)",
        pages::speed,
    ),
    plain_case(
        "page-log-programs",
        Group::Programs,
        3600,
        "what PML, PRL and the exact set say of real programs: x264, vips, bzip2, sysbench, Redis, a JVM, HPCC (record)",
        programs::log,
    ),
    plain_case(
        "module-6.1",
        Group::Module,
        420,
        "a guest's CPUs change nodes as the page says, by both methods, and back when the module goes; bad pages change nothing",
        topology::module,
    ),
    plain_case(
        "module-6.12",
        Group::Kernels,
        420,
        "the same on Linux 6.12",
        topology::module_of_fetched_kernel,
    ),
    plain_case(
        "runtimes",
        Group::Module,
        480,
        "an unmodified JVM, jemalloc and TCMalloc in a guest allocate on the node that their vCPU has moved to",
        runtimes::follow,
    ),
    case(
        "damon",
        Group::Damon,
        600,
        "DAMON and invalidation side by side against known hot sets; another owner's DAMON is left alone",
        working_set::trackers,
    ),
    case(
        "move-speed",
        Group::Record,
        480,
        "how fast the agent's way moves pages, beside migrate_pages, and how exactly it keeps a budget (record)",
        memory::move_speed,
    ),
    case(
        "numad-drift",
        Group::Record,
        480,
        "what the real numad does about memory that a balloon scattered (record)",
        numad::drift,
    ),
    case(
        "xen-boots",
        Group::Xen,
        300,
        "Xen sees 4 nodes; PV and PVH domUs of libvirt and of xl live with their memory where they were put",
        xen::boots,
    ),
    case(
        "xen-contract",
        Group::Xen,
        600,
        "the Xen host passes the conformance suite on a PV and a PVH domU, and says of the rest why not",
        xen_agent::contract,
    ),
    case(
        "xen-homes",
        Group::Xen,
        600,
        "vCPUs come to their memory, and run where their operator let them once the agent is killed or stopped",
        xen_agent::homes,
    ),
    case(
        "xen-placed",
        Group::Xen,
        600,
        "domUs created with the lines of 'homenode place --xl' have CPU and memory on a node of their own; xl's placement beside",
        xen_agent::placed,
    ),
    case(
        "xen-caps",
        Group::Xen,
        300,
        "a cap holds, and 'homenode release' gives the operator's back after an agent that died",
        xen_agent::caps,
    ),
    case(
        "xen-balloon",
        Group::Xen,
        600,
        "domUs give memory by their balloons, keep what they wrote, and have it back when the agent is gone, or once they are restored",
        xen_balloon::held,
    ),
    case(
        "xen-moved",
        Group::XenLong,
        1800,
        "memory of a PV and a PVH domU comes to their vCPUs' node, also where agent or mover are killed meanwhile; what cannot move is told why",
        xen_moved::moved,
    ),
    case(
        "xen-devices",
        Group::Xen,
        900,
        "a PV and a PVH domU with a disk and a NIC come to their vCPUs' node: what they wrote is there, and they answer on the bridge",
        xen_devices::moved,
    ),
    case(
        "xen-lives",
        Group::Xen,
        600,
        "paused, renamed, saved, restored, booted again, without xenstored: the agent's cap goes, the operator's is in force",
        xen_lives::lives,
    ),
    case(
        "xen-nodes",
        Group::Xen,
        300,
        "memory that followed the CPUs does so again once it is released, and a domU with explicit nodes keeps them",
        xen_lives::nodes,
    ),
    case(
        "xen-peers",
        Group::XenRecord,
        1200,
        "six domUs started one after the other: xl's own placement, a pool for each node, and ours, by local memory, work and steal",
        xen_peers::compared,
    ),
    case(
        "xen-credit",
        Group::XenLong,
        420,
        "how credit1 shares a CPU by weights and caps, in pools of 4 CPUs and of 1, by the hypervisor's trace",
        xen::credit,
    ),
    case(
        "xen-waiting",
        Group::XenLong,
        420,
        "how long vCPUs wait is what their guests count as steal, and Xen's trace is the operator's again afterwards",
        xen_waiting::waiting,
    ),
    case(
        "xen-unit",
        Group::XenService,
        1200,
        "the agent's unit of systemd with its drop-in for dom0: ready, brings a domU home, releases it when killed and when stopped",
        xen_unit::unit,
    ),
    case(
        "xen-permit",
        Group::XenCounted,
        1200,
        "a thrasher domU is capped by the agent to the misses that it booked, and its neighbour misses less",
        xen_permit::permit_held,
    ),
];

/// Returns the case of this name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Case> {
    ALL.iter().find(|case| case.name == name)
}

/// Returns the cases that the command line selects, by their own name or their group's. Without names, these are all cases
/// except those run by name only.
///
/// # Errors
/// The first name that is neither a case nor a group.
pub fn select(names: &[String]) -> Result<Vec<&'static Case>, &str> {
    if let Some(unknown) = names
        .iter()
        .find(|name| find(name).is_none() && !ALL.iter().any(|case| case.group.name() == name.as_str()))
    {
        return Err(unknown);
    }
    let wanted = |case: &&Case| {
        (names.is_empty() && !case.group.is_by_name())
            || names
                .iter()
                .any(|name| name == case.name || name == case.group.name())
    };
    Ok(ALL.iter().filter(wanted).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_no_group() {
        for (index, case) in ALL.iter().enumerate() {
            let twice = ALL[index + 1..].iter().any(|other| other.name == case.name);
            assert!(!twice, "{} stands twice", case.name);
        }
    }

    #[test]
    fn a_group_selects_its_cases_and_nothing_selects_all_but_those_run_by_name() {
        let all = select(&[]).unwrap_or_default();
        let groups = [
            Group::Arrange,
            Group::Balancing,
            Group::Caches,
            Group::Damon,
            Group::Evidence,
            Group::Kernels,
            Group::Programs,
            Group::Record,
            Group::Speed,
            Group::Xen,
            Group::XenLong,
            Group::XenRecord,
            Group::XenService,
            Group::XenCounted,
        ];
        let by_name = groups.map(|group| {
            let cases = select(&[group.name().to_owned()]).unwrap_or_default();
            assert!(!cases.is_empty() && cases.iter().all(|case| case.group == group));
            cases.len()
        });
        assert_eq!(all.len() + by_name.iter().sum::<usize>(), ALL.len());
        assert_eq!(select(&["bot".to_owned()]).err(), Some("bot"));
    }
}
