//! Which machine frames are a PV domain's.
//!
//! Xen has no call that lists them. It says of frames that it is asked about what they are to a PV domain, which names frames by
//! their numbers: of those that are another's that they are none of its. Nothing of that is the guest's to say. Of a PVH domain
//! it tells so of the guest's own numbers, which say nothing about frames.

#![allow(unsafe_code)] // a call of a C library, with a buffer of the size that it is told

use super::{CallError, Hypervisor};

/// As many as Xen answers for at once.
const BATCH: usize = 1024;
/// `XEN_DOMCTL_PFINFO_LTAB_MASK`.
const KIND: u64 = 0xf << 28;
/// `XEN_DOMCTL_PFINFO_XTAB`, `…_XALLOC`: it is none of the domain's.
const NOT_ITS: [u64; 2] = [0xf << 28, 0xe << 28];

impl Hypervisor {
    /// Frames of the machine, from 0 on.
    ///
    /// # Errors
    /// When it cannot be asked.
    pub fn frame_count(&self) -> Result<u64, CallError> {
        let mut last = 0;
        // SAFETY: one number has room.
        match unsafe { (self.control.xc_maximum_ram_page)(self.at(), &raw mut last) } {
            0 => Ok(last + 1),
            _ => Err(CallError::last("xc_maximum_ram_page")),
        }
    }

    /// Which of these frames are a PV domain's, in their order.
    ///
    /// # Errors
    /// When it cannot be asked, as of a domain that has ended.
    pub fn frames(&self, domid: u32, all: &[u64]) -> Result<Vec<u64>, CallError> {
        let mut its = Vec::new();
        for batch in all.chunks(BATCH) {
            let mut kinds = batch.to_vec();
            // SAFETY: as many are read and written as it is told.
            let done = unsafe {
                let (count, kinds) = (batch.len() as u32, kinds.as_mut_ptr());
                (self.control.xc_get_pfn_type_batch)(self.at(), domid, count, kinds)
            };
            if done != 0 {
                return Err(CallError::last("xc_get_pfn_type_batch"));
            }
            let of = batch.iter().zip(&kinds);
            its.extend(
                of.filter(|(_, kind)| !NOT_ITS.contains(&(*kind & KIND)))
                    .map(|(frame, _)| *frame),
            );
        }
        Ok(its)
    }
}
