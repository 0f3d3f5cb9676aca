//! A queue through which the servers' threads pass work to the loop.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use homenode_host::WakeSignal;

/// Work that waits for the loop, in the order of its arrival. All clones share it. It is closed once the loop has ended, since
/// the servers may go on answering.
pub(crate) struct LoopQueue<T> {
    wake_signal: WakeSignal,
    state: Arc<Mutex<State<T>>>,
}

struct State<T> {
    waiting: Vec<T>,
    is_closed: bool,
}

impl<T> Clone for LoopQueue<T> {
    fn clone(&self) -> Self {
        LoopQueue {
            wake_signal: self.wake_signal.clone(),
            state: Arc::clone(&self.state),
        }
    }
}

impl<T> LoopQueue<T> {
    /// Creates an empty queue; `wake_signal` wakes the loop.
    pub(crate) fn new(wake_signal: &WakeSignal) -> LoopQueue<T> {
        let state = State {
            waiting: Vec::new(),
            is_closed: false,
        };
        LoopQueue {
            wake_signal: wake_signal.clone(),
            state: Arc::new(Mutex::new(state)),
        }
    }

    /// Adds work and wakes the loop; returns the work if the queue is closed.
    pub(crate) fn push(&self, work: T) -> Result<(), T> {
        let mut state = self.lock();
        if state.is_closed {
            return Err(work);
        }
        state.waiting.push(work);
        drop(state);
        self.wake_signal.wake();
        Ok(())
    }

    /// Returns the work that waits now.
    pub(crate) fn take(&self) -> Vec<T> {
        std::mem::take(&mut self.lock().waiting)
    }

    /// Closes the queue, and returns the work that waited.
    pub(crate) fn close(&self) -> Vec<T> {
        let mut state = self.lock();
        state.is_closed = true;
        std::mem::take(&mut state.waiting)
    }

    /// Returns whether no work waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().waiting.is_empty()
    }

    /// Returns whether the loop has ended, so that it does no more work.
    pub(crate) fn is_closed(&self) -> bool {
        self.lock().is_closed
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
