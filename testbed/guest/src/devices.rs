//! The devices of a domU: a disk that is written and checked, and a NIC that is brought up. Their drivers are loaded only when
//! a device is first used, because other guests have no such devices.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

use crate::load_module;

/// The drivers' paths in the initramfs.
const DISK_MODULE: &str = "/devices/xen-blkfront.ko";
const NIC_MODULE: &str = "/devices/xen-netfront.ko";
const DISK: &str = "/dev/xvda";
const NIC: &str = "/sys/class/net/eth0";
/// `IFF_UP`, with the flags that such an interface has: `IFF_BROADCAST` and `IFF_MULTICAST`.
const UP: &str = "0x1003";
/// How long a device may take to appear.
const APPEARS_WITHIN: Duration = Duration::from_secs(30);
const BLOCK_BYTES: usize = 4096;
/// Pause between two blocks, which keeps the disk from occupying the host.
const PAUSE: Duration = Duration::from_millis(5);

/// A block aligned for direct I/O, which bypasses the kernel's cache.
#[repr(align(4096))]
struct Block([u8; BLOCK_BYTES]);

/// A disk whose blocks are written one after the other, in rounds. Each block holds its number and its round.
pub(crate) struct Disk {
    file: File,
    blocks: u64,
    next: u64,
    round: u64,
}

fn appears(path: &str) -> io::Result<()> {
    let begun = Instant::now();
    while !Path::new(path).exists() {
        if begun.elapsed() > APPEARS_WITHIN {
            return Err(io::Error::other(format!("{path} did not appear in time")));
        }
        thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

impl Disk {
    /// Opens the guest's disk, of which the first `mib` MiB will be written.
    ///
    /// # Errors
    /// When there is no such disk.
    pub(crate) fn open(mib: u32) -> io::Result<Disk> {
        load_module(Path::new(DISK_MODULE))?;
        appears(DISK)?;
        let flags = (OFlags::DIRECT | OFlags::DSYNC).bits().cast_signed();
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(flags)
            .open(DISK)?;
        Ok(Disk {
            file,
            blocks: u64::from(mib) << 20 >> BLOCK_BYTES.trailing_zeros(),
            next: 0,
            round: 1,
        })
    }

    fn write(&mut self) -> io::Result<()> {
        let mut block = Block([0; BLOCK_BYTES]);
        block.0[..8].copy_from_slice(&self.next.to_le_bytes());
        block.0[8..16].copy_from_slice(&self.round.to_le_bytes());
        self.file.write_all_at(&block.0, self.next * BLOCK_BYTES as u64)?;
        self.next += 1;
        if self.next == self.blocks {
            (self.next, self.round) = (0, self.round + 1);
        }
        Ok(())
    }

    /// Returns the number of blocks written in all, and how many blocks on the disk differ from what was last written to them.
    ///
    /// # Errors
    /// When the disk cannot be read.
    pub(crate) fn check(&self) -> io::Result<(u64, u64)> {
        let mut wrong = 0;
        let mut block = Block([0; BLOCK_BYTES]);
        for number in 0..self.blocks {
            let round = self.round - u64::from(number >= self.next);
            if round == 0 {
                continue;
            }
            self.file
                .read_exact_at(&mut block.0, number * BLOCK_BYTES as u64)?;
            let is_so = block.0[..8] == number.to_le_bytes() && block.0[8..16] == round.to_le_bytes();
            wrong += u64::from(!is_so);
        }
        Ok(((self.round - 1) * self.blocks + self.next, wrong))
    }
}

/// Writes to a disk until told to stop, or until a write fails.
///
/// # Errors
/// When the disk cannot be opened or written.
pub(crate) fn write_disk(disk: &Mutex<Option<Disk>>, mib: u32, stop: &AtomicBool) -> io::Result<()> {
    let held = || disk.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    *held() = Some(Disk::open(mib)?);
    while !stop.load(Ordering::Relaxed) {
        if let Some(disk) = held().as_mut() {
            disk.write()?;
        }
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// Brings the NIC up with an address derived from its MAC; returns the MAC.
///
/// # Errors
/// When there is no NIC.
pub(crate) fn bring_up() -> io::Result<String> {
    load_module(Path::new(NIC_MODULE))?;
    appears(NIC)?;
    fs::write(Path::new(NIC).join("flags"), UP)?;
    let mac = fs::read_to_string(Path::new(NIC).join("address"))?;
    Ok(mac.trim().to_owned())
}
