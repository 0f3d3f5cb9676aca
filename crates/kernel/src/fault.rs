//! Faults that tests plan. Wherever the agent reaches outside itself, it asks this module which fault the test planned on the
//! current thread.

use std::cell::RefCell;

/// A place where something can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// Before a call to libvirt.
    Call,
    /// After a call to libvirt: it was carried out, but no answer arrives.
    Answer,
    /// The reported size of a balloon.
    Balloon,
    /// Before a write to the state directory.
    Write,
    /// After a write to the state directory.
    Written,
    /// Reading a kernel file.
    Read,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The operation is not done, and this is reported.
    Refused,
    /// The operation is not done, and the other side is gone.
    Lost,
    /// The caller gives up on the operation, but it is done after this many later operations.
    Late(u32),
}

type Plan = Box<dyn FnMut(Point) -> Option<Fault>>;

thread_local! {
    static PLAN: RefCell<Option<Plan>> = const { RefCell::new(None) };
}

/// Sets the plan of faults on this thread.
pub fn plan(plan: impl FnMut(Point) -> Option<Fault> + 'static) {
    PLAN.set(Some(Box::new(plan)));
}

/// Ends the plan. Nothing goes wrong after this.
pub fn end() {
    PLAN.set(None);
}

/// Returns the fault that is planned for this point.
pub fn at(point: Point) -> Option<Fault> {
    // Take the plan out while it runs, because it may unwind.
    let mut plan = PLAN.take()?;
    let fault = plan(point);
    PLAN.set(Some(plan));
    fault
}

/// Returns the error of a full or broken disk if a fault is planned here.
pub fn of_file(point: Point) -> std::io::Result<()> {
    match at(point) {
        None => Ok(()),
        Some(_) => Err(std::io::ErrorKind::StorageFull.into()),
    }
}
