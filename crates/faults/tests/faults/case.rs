//! A case: a small host and everything that happens on it, made from a seed. All chance is here: the same case always runs alike,
//! and stays meaningful when events or VMs are taken out of it.

use homenode_units::{CpuId, CpuSet, NodeSet, SplitMix};
use serde::{Deserialize, Serialize};

/// A host, its VMs and what happens to them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Case {
    /// The seed that it was made from.
    pub(crate) seed: u64,
    /// What went wrong, in words, if this case is kept because it once failed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) found: String,
    /// Number of nodes, each with two CPUs and 1 GiB.
    pub(crate) nodes: u16,
    /// The set of policies that decides, or `planner`: then only [`What::Plan`] decides.
    pub(crate) policies: String,
    /// Number of periods of one second before the end.
    pub(crate) cycles: u32,
    /// How the last agent ends.
    pub(crate) end: End,
    pub(crate) vms: Vec<VmSpec>,
    #[serde(default)]
    pub(crate) events: Vec<Event>,
}

/// How an agent ends, and who undoes its changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum End {
    /// It restores the VMs itself.
    Orderly,
    /// It is killed; its guard undoes.
    Guard,
    /// It is killed and so is its guard; `homenode release` undoes.
    Release,
    /// It is killed, and another agent takes over before the guard undoes.
    Successor,
}

/// A VM as its operator defined it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct VmSpec {
    pub(crate) vcpus: u16,
    pub(crate) vcpus_max: u16,
    pub(crate) iothreads: u32,
    pub(crate) memory_mib: u64,
    /// Mode of `<numatune><memory>`: `none`, `restrictive` or `strict` (on node 0).
    pub(crate) tune: String,
    /// Attributes of the operator's settings for Homenode, such as `floor='64MiB'`.
    pub(crate) settings: String,
    /// CPUs of the VM's cgroup, if not all.
    pub(crate) cpuset: Option<CpuSet>,
    /// CPUs to which vCPU 0 is pinned.
    pub(crate) pinned: Option<CpuSet>,
    /// Quota of each vCPU: microseconds that it may run in each 100,000.
    pub(crate) quota_us: Option<u64>,
    /// Whether its memory is locked.
    pub(crate) locked: bool,
}

/// Something that happens once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Event {
    pub(crate) cycle: u32,
    pub(crate) at: At,
    pub(crate) what: What,
}

/// When in a cycle an event happens; at its end, if the cycle has fewer reads or acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum At {
    /// Before the host is sampled.
    Start,
    /// Before the read of a kernel file with this number.
    Read(u32),
    /// Before the act with this number: a call to libvirt, its answer, a write, a move of pages.
    Act(u32),
}

/// What happens. `vm` is a position in [`Case::vms`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum What {
    // Operators.
    Pin {
        vm: usize,
        vcpu: u16,
        cpus: CpuSet,
    },
    PinEmulator {
        vm: usize,
        cpus: CpuSet,
    },
    Cpuset {
        vm: usize,
        cpus: CpuSet,
    },
    Quota {
        vm: usize,
        run_us: Option<u64>,
    },
    Memory {
        vm: usize,
        percent: u64,
    },
    Settings {
        vm: usize,
        settings: String,
    },
    Hotplug {
        vm: usize,
    },
    Unplug {
        vm: usize,
    },
    Suspend {
        vm: usize,
    },
    Resume {
        vm: usize,
    },
    MigrateOut {
        vm: usize,
        cycles: u32,
    },
    Stop {
        vm: usize,
    },
    /// Starts a VM that does not run; with the process id of the last one that ended, if it reuses that.
    Start {
        vm: usize,
        reuse: bool,
    },
    Offline {
        cpu: u32,
    },
    Online {
        cpu: u32,
    },
    /// Another program writes metadata of its own.
    Metadata {
        vm: usize,
    },
    // Tenants.
    Load {
        vm: usize,
        percent: u64,
    },
    Touch {
        vm: usize,
        node: u16,
        pages: usize,
    },
    /// The balloon no longer follows, or follows again.
    Balloon {
        vm: usize,
        follows: bool,
    },
    /// What the guest says of its memory, in percent of the truth.
    Lie {
        vm: usize,
        percent: u64,
    },
    // Decisions of the planner.
    Plan {
        vm: usize,
        act: Planned,
    },
    // Failures.
    /// Reads return this error.
    ReadFails {
        errno: i32,
        count: u32,
    },
    /// Writes of the journal fail; the disk is full.
    DiskFull {
        count: u32,
    },
    /// Writes of kernel files fail.
    WriteFails {
        errno: i32,
    },
    /// A call is refused.
    Refused {
        count: u32,
    },
    /// A call is carried out, but its answer does not arrive.
    Unanswered {
        count: u32,
    },
    /// A call is carried out this many calls later, and has no answer in time.
    Late {
        after: u32,
    },
    /// libvirtd is away for this many seconds.
    Away {
        seconds: u64,
    },
    /// libvirt shows the balloon's size of this many seconds ago, for as long.
    Stale {
        vm: usize,
        seconds: u64,
    },
    /// The kernel moves only a part of the pages, or none, with this error.
    MoveFails {
        errno: i32,
        count: u32,
    },
    /// The agent is stopped for this long.
    Stopped {
        seconds: u64,
    },
    /// The agent, its guard or `homenode release` is killed.
    Kill {
        then: End,
    },
}

/// An act of the planner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Planned {
    Pin { vcpus: Vec<u16>, cpus: CpuSet },
    Home(NodeSet),
    Move { to: NodeSet, pages: u64 },
    Quota { percent: u64, lease_s: u64 },
    Memory { percent: u64, lease_s: u64 },
    LiftHome,
    LiftQuota,
    LiftMemory,
}

/// Dice of a case.
pub(crate) struct Dice(SplitMix);

impl Dice {
    pub(crate) fn new(seed: u64) -> Dice {
        Dice(SplitMix(homenode_units::mix(seed)))
    }

    /// A number from 0 to `limit - 1`.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0.bits() % limit.max(1)
    }

    /// True once in this many times.
    pub(crate) fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize].clone()
    }

    fn cpus(&mut self, nodes: u16) -> CpuSet {
        let count = 2 * u32::from(nodes);
        let first = self.below(u64::from(count)) as u32;
        let length = self.pick(&[1, 1, 2, 2, 3, count]);
        (first..(first + length).min(count)).map(CpuId).collect()
    }

    fn nodes(&mut self, nodes: u16) -> NodeSet {
        let first = self.below(nodes.into()) as u16;
        let last = self.pick(&[first, first, (first + 1).min(nodes - 1)]);
        (first..=last).map(homenode_units::NodeId).collect()
    }
}

/// CPUs per node.
pub(crate) const CPUS: u32 = 2;

impl Case {
    /// Makes the case of a seed.
    pub(crate) fn of(seed: u64) -> Case {
        let mut dice = Dice::new(seed);
        let nodes = dice.pick(&[2, 2, 3, 4]);
        let vms: Vec<VmSpec> = (0..1 + dice.below(4)).map(|_| vm(&mut dice, nodes)).collect();
        let cycles = 12 + dice.below(20) as u32;
        let policies = dice.pick(&["planner", "planner", "tavo", "homenode", "memory"]);
        let mut events = Vec::new();
        // Some cases are calm, so that what one fault does shows; some have only one kind of trouble.
        let (operators, tenants, faults) =
            dice.pick(&[(10, 4, 2), (4, 2, 6), (2, 2, 1), (12, 6, 0), (0, 2, 8), (6, 6, 6)]);
        let plans = if policies == "planner" { 3 * cycles } else { 4 };
        let vm_count = vms.len();
        let mut add = |dice: &mut Dice, count: u64, what: &dyn Fn(&mut Dice, usize) -> What| {
            for _ in 0..count {
                let vm = dice.below(vm_count as u64) as usize;
                let what = what(dice, vm);
                let at = match (&what, dice.below(5)) {
                    (What::Plan { .. } | What::Load { .. }, _) | (_, 0 | 1) => At::Start,
                    (_, 2) => At::Read(dice.below(120) as u32),
                    _ => At::Act(dice.below(40) as u32),
                };
                let cycle = 1 + dice.below(u64::from(cycles - 1)) as u32;
                events.push(Event { cycle, at, what });
            }
        };
        let count = |dice: &mut Dice, most: u64| if most == 0 { 0 } else { dice.below(most) + 1 };
        let of = count(&mut dice, operators);
        add(&mut dice, of, &|dice, vm| operator(dice, vm, nodes));
        let of = count(&mut dice, tenants);
        add(&mut dice, of, &|dice, vm| tenant(dice, vm, nodes));
        let of = count(&mut dice, faults);
        add(&mut dice, of, &|dice, vm| fault(dice, vm));
        let of = count(&mut dice, plans.into());
        add(&mut dice, of, &|dice, vm| What::Plan {
            vm,
            act: planned(dice, nodes),
        });
        events.sort_by_key(|event| (event.cycle, event.at));
        Case {
            seed,
            found: String::new(),
            nodes,
            policies: policies.to_owned(),
            cycles,
            end: dice.pick(&[End::Orderly, End::Guard, End::Guard, End::Release, End::Successor]),
            vms,
            events,
        }
    }
}

fn vm(dice: &mut Dice, nodes: u16) -> VmSpec {
    let vcpus = 1 + dice.below(3) as u16;
    let memory_mib = dice.pick(&[8, 16, 24, 32]);
    let settings = [
        "",
        "",
        "",
        "floor='4MiB'",
        "floor='4MiB'",
        "manage='no'",
        "mode='observe'",
        "home='0'",
        "permit='2000k'",
    ];
    VmSpec {
        vcpus,
        vcpus_max: vcpus + dice.below(2) as u16,
        iothreads: dice.pick(&[0, 0, 1, 2]),
        memory_mib,
        tune: dice.pick(&["none", "none", "restrictive", "strict"]).to_owned(),
        settings: dice.pick(&settings).to_owned(),
        cpuset: dice.one_in(4).then(|| dice.cpus(nodes)),
        pinned: dice.one_in(4).then(|| dice.cpus(nodes)),
        quota_us: dice.one_in(4).then(|| 10_000 * (1 + dice.below(9))),
        locked: dice.one_in(10),
    }
}

fn operator(dice: &mut Dice, vm: usize, nodes: u16) -> What {
    let settings = [
        "",
        "floor='4MiB'",
        "manage='no'",
        "manage='yes'",
        "manage='maybe'",
        "mode='observe'",
        "home='1'",
    ];
    match dice.below(18) {
        0..3 => What::Pin {
            vm,
            vcpu: dice.below(3) as u16,
            cpus: dice.cpus(nodes),
        },
        3 => What::PinEmulator {
            vm,
            cpus: dice.cpus(nodes),
        },
        4 | 5 => What::Cpuset {
            vm,
            cpus: dice.cpus(nodes),
        },
        6 => What::Quota {
            vm,
            run_us: (!dice.one_in(3)).then(|| 10_000 * (1 + dice.below(9))),
        },
        7 => What::Memory {
            vm,
            percent: 40 + dice.below(61),
        },
        8 | 9 => What::Settings {
            vm,
            settings: dice.pick(&settings).to_owned(),
        },
        10 => What::Hotplug { vm },
        11 => What::Unplug { vm },
        12 => What::Suspend { vm },
        13 => What::Resume { vm },
        14 => What::MigrateOut {
            vm,
            cycles: 1 + dice.below(4) as u32,
        },
        15 => What::Stop { vm },
        16 => What::Start {
            vm,
            reuse: dice.one_in(2),
        },
        _ => match dice.below(3) {
            0 => What::Offline {
                cpu: dice.below(2 * u64::from(nodes)) as u32,
            },
            1 => What::Online {
                cpu: dice.below(2 * u64::from(nodes)) as u32,
            },
            _ => What::Metadata { vm },
        },
    }
}

fn tenant(dice: &mut Dice, vm: usize, nodes: u16) -> What {
    match dice.below(6) {
        0..3 => What::Load {
            vm,
            percent: dice.pick(&[0, 5, 50, 100]),
        },
        3 => What::Touch {
            vm,
            node: dice.below(nodes.into()) as u16,
            pages: 1 + dice.below(4000) as usize,
        },
        4 => What::Balloon {
            vm,
            follows: dice.one_in(2),
        },
        _ => What::Lie {
            vm,
            percent: dice.pick(&[0, 10, 100, 400]),
        },
    }
}

fn fault(dice: &mut Dice, vm: usize) -> What {
    let ends = [
        End::Guard,
        End::Guard,
        End::Release,
        End::Successor,
        End::Successor,
    ];
    match dice.below(16) {
        0 | 1 => What::ReadFails {
            errno: dice.pick(&[libc::EIO, libc::EMFILE, libc::ENOENT, libc::EACCES]),
            count: 1 + dice.below(4) as u32,
        },
        2 => What::DiskFull {
            count: 1 + dice.below(12) as u32,
        },
        3 => What::WriteFails {
            errno: dice.pick(&[libc::EINVAL, libc::EBUSY]),
        },
        4 | 5 => What::Refused {
            count: 1 + dice.below(3) as u32,
        },
        6 | 7 => What::Unanswered {
            count: 1 + dice.below(3) as u32,
        },
        8 | 9 => What::Late {
            after: dice.below(12) as u32,
        },
        10 => What::Away {
            seconds: 1 + dice.below(30),
        },
        11 => What::Stale {
            vm,
            seconds: 1 + dice.below(4),
        },
        12 => What::MoveFails {
            errno: dice.pick(&[libc::EBUSY, libc::ENOMEM, libc::EACCES, libc::EPERM, libc::EINVAL]),
            count: 1 + dice.below(4) as u32,
        },
        13 => What::Stopped {
            seconds: 1 + dice.below(60),
        },
        _ => What::Kill {
            then: dice.pick(&ends),
        },
    }
}

fn planned(dice: &mut Dice, nodes: u16) -> Planned {
    let lease_s = 1 + dice.below(8);
    match dice.below(10) {
        0..2 => Planned::Pin {
            vcpus: dice.pick(&[vec![0], vec![0, 1], vec![1], vec![2, 0]]),
            cpus: dice.cpus(nodes),
        },
        2 | 3 => Planned::Home(dice.nodes(nodes)),
        4 => Planned::Move {
            to: dice.nodes(nodes),
            pages: 1 + dice.below(6000),
        },
        5 | 6 => Planned::Quota {
            percent: 10 + dice.below(90),
            lease_s,
        },
        7 => Planned::Memory {
            percent: 30 + dice.below(70),
            lease_s,
        },
        8 => Planned::LiftHome,
        _ => dice.pick(&[Planned::LiftQuota, Planned::LiftMemory]),
    }
}
