//! Checks which VMs can have memory that their past life has scattered.

use homenode_units::Placing;

use super::{Hypervisor, ReleaseCalls, VmSpec, Vnuma};
use crate::TwinError;

impl VmSpec {
    /// Checks `memory_scattered`: pages that were used before must be pages that stay on their nodes.
    pub(super) fn check_scattered(&self, hypervisor: Hypervisor) -> Result<(), (&'static str, TwinError)> {
        let share = self.memory_scattered;
        if !(0.0..=1.0).contains(&share) {
            let error = TwinError::Figure {
                vm: self.name.clone(),
                what: "memory_scattered",
                value: share.to_string(),
                expected: "it must lie between 0 and 1",
            };
            return Err(("memory_scattered", error));
        }
        let refused = [
            (
                hypervisor == Hypervisor::Native,
                "contradicts hypervisor = \"native\", whose kernel takes back the memory that a program frees",
            ),
            (
                self.vnuma != Vnuma::None,
                "contradicts vnuma, with which the guest knows where its pages are",
            ),
            (
                self.memory_policy.placing != Placing::FirstTouch,
                "contradicts memory_policy = \"round-...\", which places all pages when the VM is created",
            ),
            (
                self.release_calls != ReleaseCalls::None,
                "contradicts release_calls, which make the hypervisor place released pages again",
            ),
        ];
        match refused.into_iter().find(|(refused, _)| share > 0.0 && *refused) {
            Some((_, why)) => self.refuse("memory_scattered", "memory_scattered", why, "leave it out"),
            None => Ok(()),
        }
    }
}
