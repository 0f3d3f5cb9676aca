//! Answers about promises to VMs that do not run yet.

use homenode_api::ApiError;
use homenode_api::answer::{OpenPromise, PromiseDropped, Promises};
use homenode_control::Control;
use homenode_policy::placement::Reservation;
use homenode_units::{Bytes, Ns};

use crate::wall_clock::WallClock;

/// Lists the open promises.
pub fn promises<'a>(open: impl IntoIterator<Item = &'a Reservation>, clock: WallClock, now: Ns) -> Promises {
    let told = |promise: &Reservation| OpenPromise {
        id: promise.id,
        vm: promise.name.clone(),
        nodes: promise.nodes.to_string(),
        vcpus: promise.shape.vcpus,
        memory_bytes: Bytes::from_mib(promise.shape.memory_mib),
        made: clock.of(promise.made_at, now),
        expires: clock.of(promise.expires_at(), now),
    };
    Promises {
        promises: open.into_iter().map(told).collect(),
    }
}

/// Drops a promise.
///
/// # Errors
/// If there is no promise with this number.
pub fn dropped(control: &mut Control, id: u64) -> Result<PromiseDropped, ApiError> {
    let known: Vec<u64> = control.promises().iter().map(|promise| promise.id).collect();
    match control.drop_promise(id) {
        true => Ok(PromiseDropped { id }),
        false => Err(no_such(id, known)),
    }
}

/// The error that there is no promise with this number; it lists those there are.
pub(crate) fn no_such(id: u64, known: Vec<u64>) -> ApiError {
    let what = "open promise".to_owned();
    ApiError::NoSuchId { what, id, known }
}
