//! The table of VMs: one row each, in the chosen order.

use std::cmp::Ordering;

use homenode_control::{Status, VmStatus};
use homenode_policy::permits::Standing;
use homenode_units::Resource;

use crate::figures::{or_none, percent};
use crate::limits::{self, LOCAL, VM_WAITING};
use crate::table::{Align, Cell, Column, Shape, Table};
use crate::top::host::{gib, gigabytes};

/// The order in which VMs are listed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sort {
    /// VMs past the most limits first.
    #[default]
    Worst,
    /// By name.
    Name,
    /// By home.
    Home,
    /// VMs that are slowest, compared with their usual speed, first.
    Speed,
    /// VMs that use the most CPU time first.
    Cpus,
    /// VMs whose vCPUs wait most first.
    Waiting,
    /// VMs with the smallest share of local accesses first.
    Local,
    /// VMs with the highest LLC miss rate first.
    Llc,
    /// VMs with the most traffic to memory controllers first.
    Traffic,
    /// VMs that pollute caches most first.
    Misses,
    /// VMs with the most memory first.
    Memory,
}

impl Sort {
    const ALL: [(Sort, &'static str); 11] = [
        (Sort::Worst, "worst"),
        (Sort::Name, "name"),
        (Sort::Home, "home"),
        (Sort::Speed, "speed"),
        (Sort::Cpus, "cpus"),
        (Sort::Waiting, "wait"),
        (Sort::Local, "local"),
        (Sort::Llc, "llc"),
        (Sort::Traffic, "traffic"),
        (Sort::Misses, "used"),
        (Sort::Memory, "memory"),
    ];

    /// Returns the order's name.
    pub fn name(self) -> &'static str {
        Sort::ALL[self.place()].1
    }

    fn place(self) -> usize {
        Sort::ALL.iter().position(|(sort, _)| *sort == self).unwrap_or(0)
    }

    /// Returns the order that is this number of places further on, around the list.
    pub fn next(self, by: isize) -> Sort {
        let count = Sort::ALL.len();
        Sort::ALL[self.place().saturating_add_signed(count.cast_signed() + by) % count].0
    }

    fn compare(self, a: &VmStatus, b: &VmStatus) -> Ordering {
        // Unknown values come last.
        let most = |of: fn(&VmStatus) -> Option<f64>| of(b).unwrap_or(-1.0).total_cmp(&of(a).unwrap_or(-1.0));
        let order = match self {
            Sort::Worst => limits::trouble(b).cmp(&limits::trouble(a)),
            Sort::Name => Ordering::Equal,
            Sort::Home => {
                let first = |vm: &VmStatus| {
                    vm.home
                        .as_ref()
                        .map_or((true, String::new()), |home| (false, home.to_string()))
                };
                first(a).cmp(&first(b))
            }
            Sort::Speed => {
                let ratio = |vm: &VmStatus| vm.speed_ratio.unwrap_or(f64::INFINITY);
                ratio(a).total_cmp(&ratio(b))
            }
            Sort::Cpus => most(|vm| vm.cpus_used),
            Sort::Waiting => most(|vm| vm.vcpus_waiting),
            Sort::Local => {
                let share = |vm: &VmStatus| vm.local_access_ratio.unwrap_or(2.0);
                share(a).total_cmp(&share(b))
            }
            Sort::Llc => most(|vm| vm.llc_miss_rate),
            Sort::Traffic => b.bandwidth_bytes_per_s.cmp(&a.bandwidth_bytes_per_s),
            Sort::Misses => b.permit.units_per_slice.cmp(&a.permit.units_per_slice),
            Sort::Memory => b.memory_bytes.cmp(&a.memory_bytes),
        };
        order.then_with(|| a.name.cmp(&b.name))
    }
}

impl std::str::FromStr for Sort {
    type Err = String;

    fn from_str(text: &str) -> Result<Sort, String> {
        let found = Sort::ALL.iter().find(|(_, name)| *name == text);
        found.map(|(sort, _)| *sort).ok_or_else(|| {
            let names: Vec<&str> = Sort::ALL.iter().map(|(_, name)| *name).collect();
            format!(
                "VMs cannot be sorted by `{text}`; choose one of: {}",
                names.join(", ")
            )
        })
    }
}

/// Which VMs are shown, and their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// The order.
    pub sort: Sort,
    /// Whether the order is reversed.
    pub is_reversed: bool,
    /// Only VMs whose name contains this text are shown, ignoring case.
    pub filter: String,
}

impl Choice {
    /// Returns the VMs to show, in their order.
    pub fn of<'a>(&self, status: &'a Status) -> Vec<&'a VmStatus> {
        let filter = self.filter.to_lowercase();
        let is_wanted = |vm: &&VmStatus| vm.name.to_lowercase().contains(&filter);
        let mut vms: Vec<&VmStatus> = status.vms.iter().filter(is_wanted).collect();
        vms.sort_by(|a, b| self.sort.compare(a, b));
        if self.is_reversed {
            vms.reverse();
        }
        vms
    }
}

/// Returns the number of vCPUs on each node.
pub(super) fn vcpus_on(vm: &VmStatus) -> String {
    let on: Vec<String> = vm
        .vcpus_by_node
        .iter()
        .map(|on| format!("{}:{}", on.node, on.vcpus))
        .collect();
    on.join(" ")
}

/// Returns the share of pages on each node.
pub(super) fn pages_on(vm: &VmStatus) -> Option<String> {
    let on = vm.pages_by_node.as_ref()?;
    let total: u64 = on.iter().map(|on| on.pages.0).sum();
    let shares = on
        .iter()
        .map(|on| (on.node, on.pages.0 as f64 / total.max(1) as f64));
    // Leave out shares that would show as 0%.
    let shares = shares.filter(|(_, share)| *share >= 0.005);
    let shares = shares.map(|(node, share)| format!("{node}:{}", percent(share)));
    Some(shares.collect::<Vec<String>>().join(" "))
}

/// Returns what a VM used, per slice of 30 ms, of the resource that its permit books.
pub(super) fn used_per_slice(vm: &VmStatus) -> Option<String> {
    let units = vm.permit.units_per_slice?;
    let is_bandwidth = vm
        .permit
        .permit
        .is_some_and(|permit| permit.resource() == Resource::Bandwidth);
    let unit = if is_bandwidth { "B" } else { "" };
    Some(match units as f64 {
        units if units >= 1e9 => format!("{:.1}G{unit}", units / 1e9),
        units if units >= 1e6 => format!("{:.1}M{unit}", units / 1e6),
        units if units >= 1e3 => format!("{:.0}k{unit}", units / 1e3),
        units => format!("{units:.0}{unit}"),
    })
}

/// Returns a VM's permit, marked `OVER` if the VM exceeds it.
pub(super) fn permit(vm: &VmStatus) -> Option<String> {
    let booked = vm.permit.permit?;
    Some(match vm.permit.standing {
        Some(Standing::Over) => format!("OVER {booked}"),
        Some(Standing::Under) | None => booked.to_string(),
    })
}

/// Returns the share of a CPU's time that a quota leaves to each vCPU.
pub(super) fn quota(vm: &VmStatus) -> Option<f64> {
    let quota = vm.permit.quota?;
    Some(quota.run_ns.as_secs_f64() / quota.period_ns.as_secs_f64().max(1e-9))
}

/// Returns the VM's memory; if the memory has a limit, also the maximum.
pub(super) fn memory(vm: &VmStatus) -> String {
    let now = gib(vm.memory_bytes);
    let most = vm
        .memory
        .maximum_bytes
        .filter(|_| vm.memory.limit_bytes.is_some());
    most.map_or_else(|| now.clone(), |most| format!("{now}/{}", gib(most)))
}

/// A column of VMs: heading, rank (the highest is left out first), alignment, whether it is shown even if empty, and the function
/// that makes its cells.
type VmColumn = (&'static str, u8, Align, bool, fn(&VmStatus) -> Cell);

const RIGHT: Align = Align::Right;

/// All columns, from left to right.
const COLUMNS: [VmColumn; 17] = [
    ("VM", 0, Align::Left, true, |vm| Cell::plain(&vm.name)),
    ("home", 5, RIGHT, true, |vm| {
        Cell::plain(or_none(vm.home.as_ref()))
    }),
    ("vCPUs on", 13, RIGHT, true, |vm| Cell::plain(vcpus_on(vm))),
    ("speed", 3, RIGHT, true, |vm| {
        Cell::or_dash(vm.speed_ratio, |ratio| Cell::plain(percent(ratio)))
    }),
    ("CPUs", 4, RIGHT, true, |vm| {
        Cell::or_dash(vm.cpus_used, |used| Cell::plain(format!("{used:.1}")))
    }),
    ("wait", 2, RIGHT, true, |vm| {
        let level = limits::waiting_share(vm).map_or_else(Default::default, |share| VM_WAITING.level(share));
        Cell::or_dash(vm.vcpus_waiting, |waiting| {
            Cell::new(format!("{waiting:.1}"), level)
        })
    }),
    ("local", 1, RIGHT, true, |vm| {
        Cell::or_dash(vm.local_access_ratio, |share| {
            Cell::new(percent(share), LOCAL.level(share))
        })
    }),
    ("CPI", 11, RIGHT, true, |vm| {
        Cell::or_dash(vm.cycles_per_instruction, |cpi| Cell::plain(format!("{cpi:.2}")))
    }),
    ("LLC", 10, RIGHT, true, |vm| {
        Cell::or_dash(vm.llc_miss_rate, |rate| Cell::plain(percent(rate)))
    }),
    ("GB/s", 12, RIGHT, true, |vm| {
        Cell::or_dash(vm.bandwidth_bytes_per_s, |rate| Cell::plain(gigabytes(rate)))
    }),
    ("used/slice", 14, RIGHT, false, |vm| {
        Cell::or_dash(used_per_slice(vm), Cell::plain)
    }),
    ("permit", 6, RIGHT, false, |vm| {
        Cell::or_dash(permit(vm), |text| Cell::new(text, limits::permit(vm)))
    }),
    ("quota", 7, RIGHT, false, |vm| {
        Cell::or_dash(quota(vm), |share| Cell::new(percent(share), limits::permit(vm)))
    }),
    ("memory", 9, RIGHT, true, |vm| {
        Cell::new(memory(vm), limits::memory(vm))
    }),
    ("pages on", 15, RIGHT, false, |vm| {
        Cell::or_dash(pages_on(vm), Cell::plain)
    }),
    ("memory policy", 16, RIGHT, true, |vm| {
        Cell::plain(vm.memory_policy.to_string())
    }),
    ("left alone", 8, Align::Left, false, |vm| {
        Cell::plain(vm.left_alone.as_deref().unwrap_or_default())
    }),
];

/// Returns the order in which columns are left out, for the help.
pub(super) fn dropped_in_order() -> String {
    let mut columns: Vec<&VmColumn> = COLUMNS.iter().filter(|column| column.1 > 0).collect();
    columns.sort_by_key(|column| std::cmp::Reverse(column.1));
    columns
        .iter()
        .map(|column| column.0)
        .collect::<Vec<&str>>()
        .join(", ")
}

/// Returns a table of these VMs, with the columns that fit into a width.
pub(super) fn table(vms: &[&VmStatus], width: usize) -> Table {
    let columns = COLUMNS
        .iter()
        .map(|(head, rank, align, is_shown_empty, of)| Column {
            head: (*head).to_owned(),
            shape: Shape {
                rank: *rank,
                align: *align,
                is_shown_empty: *is_shown_empty,
            },
            cells: vms.iter().map(|vm| of(vm)).collect(),
        });
    Table::new(columns.collect(), width)
}
