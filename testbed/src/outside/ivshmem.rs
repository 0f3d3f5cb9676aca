//! The least server of QEMU's `ivshmem-doorbell`: one region of memory, one guest, one interrupt.
//!
//! On each connection it says what the protocol (QEMU's ivshmem specification) wants: version 0, the guest's number, the
//! memory, and the guest's own interrupt; all numbers are little-endian words of 64 bits.

use std::fs::File;
use std::io::IoSlice;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;

use anyhow::Context as _;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

const GUEST: i64 = 1;

/// The memory, and the guest's interrupt.
#[derive(Debug)]
pub struct Ivshmem {
    /// To be mapped.
    pub memory: File,
    interrupt: OwnedFd,
}

impl Ivshmem {
    /// Memory of so many bytes (a power of two) for whoever connects to this socket.
    ///
    /// # Errors
    /// When the memory or the socket cannot be made.
    pub fn serve(socket: &Path, bytes: u64) -> anyhow::Result<Ivshmem> {
        let memory =
            memfd_create("homenode-topology", MemfdFlags::CLOEXEC).context("cannot make memory to share")?;
        ftruncate(&memory, bytes).context("cannot make memory to share")?;
        let interrupt = eventfd(0, EventfdFlags::CLOEXEC).context("cannot make an eventfd")?;
        let listener =
            UnixListener::bind(socket).with_context(|| format!("cannot listen on {}", socket.display()))?;
        let (shared, ring) = (memory.try_clone()?, interrupt.try_clone()?);
        // Ends with the process: it waits for guests that come again.
        thread::spawn(move || {
            let mut guests = Vec::new();
            for stream in listener.incoming().flatten() {
                // A guest that went away meanwhile is nobody's loss.
                if greet(&stream, shared.as_fd(), ring.as_fd()).is_ok() {
                    guests.push(stream);
                }
            }
        });
        Ok(Ivshmem {
            memory: memory.into(),
            interrupt,
        })
    }

    /// Interrupts the guest.
    ///
    /// # Errors
    /// When the eventfd cannot be written.
    pub fn ring(&self) -> anyhow::Result<()> {
        rustix::io::write(&self.interrupt, &1u64.to_ne_bytes())
            .context("cannot ring the guest's doorbell")?;
        Ok(())
    }
}

fn greet(stream: &UnixStream, memory: BorrowedFd<'_>, interrupt: BorrowedFd<'_>) -> rustix::io::Result<()> {
    send(stream, 0, None)?;
    send(stream, GUEST, None)?;
    send(stream, -1, Some(memory))?;
    send(stream, GUEST, Some(interrupt))
}

fn send(stream: &UnixStream, word: i64, file: Option<BorrowedFd<'_>>) -> rustix::io::Result<()> {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
    if !files.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&files));
    }
    sendmsg(
        stream,
        &[IoSlice::new(&word.to_le_bytes())],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}
