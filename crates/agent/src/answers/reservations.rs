//! Answers about reservations for VMs that do not run yet.

use homenode_api::ApiError;
use homenode_api::answer::{OpenReservation, ReservationDropped, Reservations};
use homenode_control::Control;
use homenode_policy::placement::Reservation;
use homenode_units::{Bytes, Ns};

use crate::wall_clock::WallClock;

/// Lists the open reservations.
pub(crate) fn reservations<'a>(
    open: impl IntoIterator<Item = &'a Reservation>,
    clock: WallClock,
    now: Ns,
) -> Reservations {
    let told = |reservation: &Reservation| OpenReservation {
        id: reservation.id,
        vm: reservation.name.clone(),
        nodes: reservation.nodes.to_string(),
        vcpus: reservation.shape.vcpus,
        memory_bytes: Bytes::from_mib(reservation.shape.memory_mib),
        made: clock.of(reservation.made_at, now),
        expires: clock.of(reservation.expires_at(), now),
    };
    Reservations {
        reservations: open.into_iter().map(told).collect(),
    }
}

/// Drops a reservation.
///
/// # Errors
/// If there is no reservation with this number.
pub(crate) fn dropped(control: &mut Control, id: u64) -> Result<ReservationDropped, ApiError> {
    let known: Vec<u64> = control
        .reservations()
        .iter()
        .map(|reservation| reservation.id)
        .collect();
    match control.drop_reservation(id) {
        true => Ok(ReservationDropped { id }),
        false => Err(no_such(id, known)),
    }
}

/// Returns the error that no reservation has this number. The error lists the numbers that exist.
pub(crate) fn no_such(id: u64, known: Vec<u64>) -> ApiError {
    let what = "open reservation".to_owned();
    ApiError::NoSuchId { what, id, known }
}
