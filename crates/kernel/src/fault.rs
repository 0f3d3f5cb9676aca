//! Faults that tests plan: where the agent reaches outside itself it asks here, on its own thread, what shall go wrong.

use std::cell::RefCell;

/// Where something can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// Before a call to libvirt.
    Call,
    /// After one: it was carried out, and there is no answer.
    Answer,
    /// The size that a balloon is said to have.
    Balloon,
    /// Before something is written to the state directory.
    Write,
    /// After that.
    Written,
    /// Reading a file of the kernel's.
    Read,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is not done, and that is said.
    Refused,
    /// It is not done, and who should do it is away.
    Lost,
    /// It is given up, and done after so many others.
    Late(u32),
}

type Plan = Box<dyn FnMut(Point) -> Option<Fault>>;

thread_local! {
    static PLAN: RefCell<Option<Plan>> = const { RefCell::new(None) };
}

/// From now on this says what goes wrong on this thread.
pub fn plan(plan: impl FnMut(Point) -> Option<Fault> + 'static) {
    PLAN.set(Some(Box::new(plan)));
}

/// From now on nothing goes wrong.
pub fn end() {
    PLAN.set(None);
}

/// What goes wrong here.
pub fn at(point: Point) -> Option<Fault> {
    // Taken out meanwhile: a plan may unwind.
    let mut plan = PLAN.take()?;
    let fault = plan(point);
    PLAN.set(Some(plan));
    fault
}

/// Nothing, or the error of a full or broken disk.
pub fn of_file(point: Point) -> std::io::Result<()> {
    match at(point) {
        None => Ok(()),
        Some(_) => Err(std::io::ErrorKind::StorageFull.into()),
    }
}
