//! Xenstore, read by a separate thread. If the daemon hangs or was killed, that thread waits, and the agent does not.

#![allow(unsafe_code)] // calls of a C library

use std::ffi::{CStr, CString, c_char, c_uint};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use crate::error::{CallError, StoreError};
use crate::library::Store;

/// How long xenstored may take to answer a batch. It normally takes milliseconds, and seconds on an emulated host.
const ANSWER_MAX: Duration = Duration::from_secs(3);

/// The values of paths, or why they are unknown. A path that does not exist has `None`. A path that ends in `/` has the names
/// below it, one per line.
pub(crate) type Read = Result<Vec<Option<String>>, StoreError>;

type Reader = dyn Fn(&[String]) -> Read + Send + Sync;

/// A function that reads xenstore, however long it takes.
#[derive(Clone)]
pub(crate) struct Source(Arc<Reader>);

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Source")
    }
}

impl Source {
    /// Makes a source from this function.
    pub(crate) fn new(read: impl Fn(&[String]) -> Read + Send + Sync + 'static) -> Source {
        Source(Arc::new(read))
    }

    /// Makes a source that reads this host's xenstore, through its library.
    pub(crate) fn of(library: Store) -> Source {
        Source::new(move |paths| Connection::open(&library)?.read(paths))
    }
}

/// Reads xenstore with a time limit; see the module.
#[derive(Debug)]
pub(crate) struct Asking {
    questions: Sender<Vec<String>>,
    answers: Receiver<Read>,
    /// Whether an answer that was given up is still to come.
    is_late: bool,
    patience: Duration,
}

impl Asking {
    /// Starts the thread. The thread ends when this value is dropped or, if it hangs, when the program ends.
    pub(crate) fn start(source: Source) -> Asking {
        Asking::with(source, ANSWER_MAX)
    }

    fn with(Source(read): Source, patience: Duration) -> Asking {
        let (questions, asked) = channel::<Vec<String>>();
        let (answer, answers) = channel();
        std::thread::spawn(move || {
            while let Ok(paths) = asked.recv() {
                if answer.send(read(&paths)).is_err() {
                    break;
                }
            }
        });
        Asking {
            questions,
            answers,
            is_late: false,
            patience,
        }
    }

    /// Reads the values of these paths, in the same order.
    ///
    /// # Errors
    /// Returns why they are unknown. While an earlier answer is late, this fails at once.
    pub(crate) fn read(&mut self, paths: Vec<String>) -> Read {
        if self.is_late && self.answers.try_recv().is_err() {
            return Err(StoreError::Silent);
        }
        self.is_late = false;
        self.questions.send(paths).map_err(|_| StoreError::NotAsked)?;
        match self.answers.recv_timeout(self.patience) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => {
                self.is_late = true;
                Err(StoreError::Silent)
            }
            Err(RecvTimeoutError::Disconnected) => Err(StoreError::NotAsked),
        }
    }
}

/// A connection to xenstored.
struct Connection<'a> {
    library: &'a Store,
    handle: NonNull<std::ffi::c_void>,
}

impl Connection<'_> {
    fn open(library: &Store) -> Result<Connection<'_>, CallError> {
        // SAFETY: the handle is closed with the value.
        let handle = NonNull::new(unsafe { (library.xs_open)(0) });
        let handle = handle.ok_or_else(|| CallError::last("xs_open"))?;
        Ok(Connection { library, handle })
    }

    fn read(&self, paths: &[String]) -> Read {
        paths
            .iter()
            .map(|path| self.value(path).map_err(StoreError::from))
            .collect()
    }

    /// Returns the names below a path, one per line.
    fn names(&self, path: &str) -> Result<Option<String>, CallError> {
        let Ok(path) = CString::new(path) else {
            return Ok(None);
        };
        // SAFETY: the connection is open; the result is that many texts, which are freed with their list.
        unsafe {
            let mut count: c_uint = 0;
            let list = (self.library.xs_directory)(self.handle.as_ptr(), 0, path.as_ptr(), &raw mut count);
            let Some(list) = NonNull::new(list) else {
                return none_or("xs_directory");
            };
            let names = std::slice::from_raw_parts(list.as_ptr(), count as usize);
            let text = |name: &*mut c_char| CStr::from_ptr(*name).to_string_lossy().into_owned();
            let names: Vec<String> = names.iter().map(text).collect();
            libc::free(list.as_ptr().cast());
            Ok(Some(names.join("\n")))
        }
    }

    fn value(&self, path: &str) -> Result<Option<String>, CallError> {
        if let Some(path) = path.strip_suffix('/') {
            return self.names(path);
        }
        let Ok(path) = CString::new(path) else {
            return Ok(None);
        };
        // SAFETY: the connection is open; the result is `length` bytes that are ours to free.
        unsafe {
            let mut length: c_uint = 0;
            let read = (self.library.xs_read)(self.handle.as_ptr(), 0, path.as_ptr(), &raw mut length);
            let Some(read) = NonNull::new(read) else {
                return none_or("xs_read");
            };
            let bytes = std::slice::from_raw_parts(read.as_ptr().cast::<u8>(), length as usize);
            let text = String::from_utf8_lossy(bytes).into_owned();
            libc::free(read.as_ptr().cast());
            Ok(Some(text))
        }
    }
}

/// Tells xenstored that a domain resumes after it had announced its end.
///
/// # Errors
/// Returns what failed.
pub(crate) fn resumed(library: &Store, domid: u32) -> Result<(), CallError> {
    let connection = Connection::open(library)?;
    // SAFETY: the connection is open.
    match unsafe { (library.xs_resume_domain)(connection.handle.as_ptr(), domid) } {
        true => Ok(()),
        false => Err(CallError::last("xs_resume_domain")),
    }
}

/// Returns `None` if the path does not exist, or else the call's error.
fn none_or(call: &'static str) -> Result<Option<String>, CallError> {
    let error = std::io::Error::last_os_error();
    match error.kind() {
        std::io::ErrorKind::NotFound => Ok(None),
        _ => Err(CallError {
            call,
            cause: error.to_string(),
        }),
    }
}

impl Drop for Connection<'_> {
    fn drop(&mut self) {
        // SAFETY: opened by `open`, and closed once.
        unsafe { (self.library.xs_close)(self.handle.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn one_that_hangs_is_waited_for_once_and_asked_again_when_it_has_answered() {
        let (go, gate) = channel::<()>();
        let gate = Mutex::new(gate);
        let source = Source::new(move |paths| {
            gate.lock().unwrap().recv().map_err(|_| StoreError::NotAsked)?;
            Ok(paths.iter().map(|path| Some(path.to_uppercase())).collect())
        });
        let mut asking = Asking::with(source, Duration::from_millis(50));
        let of = |path: &str| vec![path.to_owned()];
        go.send(()).unwrap();
        assert_eq!(asking.read(of("a")), Ok(vec![Some("A".into())]));
        assert_eq!(asking.read(of("b")), Err(StoreError::Silent));
        let begun = std::time::Instant::now();
        assert_eq!(asking.read(of("c")), Err(StoreError::Silent));
        assert!(begun.elapsed() < Duration::from_millis(50), "no second wait");
        // The daemon answers again. The late answer belongs to the old question, and is discarded.
        go.send(()).unwrap();
        go.send(()).unwrap();
        let answered = (0..500).find_map(|_| {
            std::thread::sleep(Duration::from_millis(10));
            asking.read(of("d")).ok()
        });
        assert_eq!(answered, Some(vec![Some("D".into())]));
    }
}
