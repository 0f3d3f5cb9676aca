//! Faults planned by tests. Wherever the agent reaches outside itself, it asks here, on its own thread, what should go
//! wrong.

use std::cell::RefCell;

/// Where something can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// Before a call to libvirt.
    Call,
    /// After a call: it was carried out, and there is no answer.
    Answer,
    /// The reported size of a balloon.
    Balloon,
    /// Before a write to the state directory.
    Write,
    /// After a write to it.
    Written,
    /// Reading a file of the kernel's.
    Read,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is not done, and that is reported.
    Refused,
    /// It is not done, and the other side is away.
    Lost,
    /// It is abandoned, and done after this many others.
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

/// Ends the plan: nothing goes wrong any more.
pub fn end() {
    PLAN.set(None);
}

/// Returns what goes wrong here.
pub fn at(point: Point) -> Option<Fault> {
    // Taken out meanwhile: a plan may unwind.
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
