//! Why a VM cannot have its last-level cache to itself.

use homenode_host::{HandsOff, Mode};
use homenode_units::VmId;

/// Why a VM cannot be isolated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// A VM that disturbs this one was sent off a cache lately.
    Resting,
    /// A change of homes is on trial, or a window has just ended.
    Unsettled,
    /// All CPUs that VMs may use share its caches.
    NoOtherCache,
    /// Acts of this policy are not carried out now.
    NotActing,
    /// No policy may move this disturbing VM.
    HandsOff(VmId, HandsOff),
    /// The mode of this disturbing VM forbids to move it.
    Mode(VmId, Mode),
    /// This disturbing VM may not use any CPU outside the caches.
    NoCpu(VmId),
    /// The CPUs outside the caches are too busy, or reserved.
    NoRoom,
    /// The disturbing VMs did not leave, or the VM ran too little to fill a window.
    GaveUp,
}

impl Obstacle {
    /// Returns true if the obstacle passes by itself.
    pub fn passes(self) -> bool {
        matches!(self, Obstacle::Resting | Obstacle::Unsettled)
    }

    /// Returns the reason in words. `name` returns a VM's name.
    pub fn in_words<'a>(self, name: impl Fn(VmId) -> Option<&'a str>) -> String {
        let of = |vm| name(vm).unwrap_or("beside it");
        match self {
            Obstacle::Resting => "a VM beside it was sent away lately".to_owned(),
            Obstacle::Unsettled => "a change of homes or CPUs is under way".to_owned(),
            Obstacle::NoOtherCache => "the host has no other last-level cache for VMs".to_owned(),
            Obstacle::NotActing => {
                "no VM is sent away while the agent is paused, or attribution is not in mode act".to_owned()
            }
            Obstacle::HandsOff(vm, why) => format!("VM {} cannot leave its cache: {why}", of(vm)),
            Obstacle::Mode(vm, mode) => {
                format!(
                    "VM {} cannot leave its cache: mode {mode} is in force for it",
                    of(vm)
                )
            }
            Obstacle::NoCpu(vm) => {
                format!("VM {} cannot leave its cache: it may use no other CPU", of(vm))
            }
            Obstacle::NoRoom => "the CPUs of other caches have no time left for the VMs beside it".to_owned(),
            Obstacle::GaveUp => "it did not get its cache to itself for long enough".to_owned(),
        }
    }
}
