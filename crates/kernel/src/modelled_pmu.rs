//! The modelled PMU of an emulated host: the memory of an ivshmem device (PCI 1af4:1110) into which the emulator's plugin counts.
//!
//! Real hosts have no such device. Its counts come from a model of caches, and are labelled so wherever they are shown.
//! `homenode_formats::pmu_region` defines the page's format. The program that reads the page tags the frames of each VM, so that
//! the model counts separately for each VM.
//!
//! # Trust
//!
//! The device is found by its PCI numbers, which other uses of ivshmem share. Memory that does not begin like the page belongs to
//! another use, and is not touched. Memory that does, but then has impossible contents, is an error.

use std::fs::OpenOptions;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::ptr;
use std::slice;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use homenode_formats::pmu_region::{HEADER_WORDS, Layout, Page, PageError};
use rustix::mm::{MapFlags, ProtFlags, mmap};

use crate::read::{ReadError, SMALL_BYTES, below, names, text};

/// More PCI devices than a host has.
const DEVICES_MAX: usize = 65_536;

/// Finds and maps the modelled PMU below `root`; `None` if the host has none. The mapping lasts as long as the process.
///
/// # Errors
/// If the device cannot be read or mapped, or if its page has another version or impossible contents.
pub fn find(root: &Path) -> Result<Option<Page<'static>>, ReadError> {
    let devices = below(root, "sys/bus/pci/devices");
    if !devices.is_dir() {
        return Ok(None);
    }
    for name in names(&devices, DEVICES_MAX)? {
        let device = devices.join(name);
        if !is_ivshmem(&device)? {
            continue;
        }
        if let Some(page) = map(&device.join("resource2"))? {
            return Ok(Some(page));
        }
    }
    Ok(None)
}

fn is_ivshmem(device: &Path) -> Result<bool, ReadError> {
    let vendor = text(&device.join("vendor"), SMALL_BYTES)?;
    Ok(vendor.trim() == "0x1af4" && text(&device.join("device"), SMALL_BYTES)?.trim() == "0x1110")
}

#[allow(unsafe_code)] // memory that others write to at the same time
fn map(path: &PathBuf) -> Result<Option<Page<'static>>, ReadError> {
    let failed = |error: std::io::Error| ReadError::Io {
        path: path.display().to_string(),
        cause: error.to_string(),
    };
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    let Some(length) = usize::try_from(bytes)
        .ok()
        .filter(|length| *length >= 8 * HEADER_WORDS)
    else {
        return Ok(None);
    };
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping of all of the file, which this process uses only through the atomics below.
    let start = unsafe { mmap(ptr::null_mut(), length, access, MapFlags::SHARED, file.as_fd(), 0) };
    let start = start.map_err(|error| failed(error.into()))?;
    // SAFETY: the mapping begins at a page, is at least a header long, and is never undone.
    let header = unsafe { slice::from_raw_parts(start.cast::<AtomicU64>(), HEADER_WORDS) };
    // Read the header only once, so that the values checked are the values used.
    let header = std::array::from_fn(|at| header[at].load(Ordering::Acquire));
    let layout = match Layout::parse(header, bytes) {
        Ok(layout) => layout,
        Err(PageError::Magic(_)) => return Ok(None),
        Err(error) => {
            return Err(ReadError::Io {
                path: path.display().to_string(),
                cause: error.to_string(),
            });
        }
    };
    let tags_at = layout.tags_at() as usize;
    // SAFETY: `Layout::parse` has checked that both parts are within the mapping; tags begin after whole words.
    unsafe {
        let words = slice::from_raw_parts(start.cast::<AtomicU64>(), tags_at / 8);
        let tags = slice::from_raw_parts(start.byte_add(tags_at).cast::<AtomicU8>(), layout.frames as usize);
        Ok(Some(Page::new(layout, words, tags)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const LAYOUT: Layout = Layout {
        cpus: 2,
        tags: 4,
        frames: 512,
        line_bytes: 64,
        samples: 4,
    };

    /// A tree with one device.
    fn tree(vendor: &str, device: &str, memory: &[u8]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        let path = root.path().join("sys/bus/pci/devices/0000:00:04.0");
        fs::create_dir_all(&path).expect("made");
        fs::write(path.join("vendor"), format!("{vendor}\n")).expect("written");
        fs::write(path.join("device"), format!("{device}\n")).expect("written");
        fs::write(path.join("resource2"), memory).expect("written");
        root
    }

    fn memory(header: [u64; HEADER_WORDS]) -> Vec<u8> {
        let mut memory: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
        memory.resize(LAYOUT.bytes().next_power_of_two() as usize, 0);
        memory
    }

    #[test]
    fn counts_are_read_and_frames_tagged_through_the_device() {
        let root = tree("0x1af4", "0x1110", &memory(LAYOUT.header()));
        let page = find(root.path()).expect("readable").expect("there");
        assert_eq!(page.layout(), LAYOUT);
        page.set_tag(7, 3);
        page.referenced(1, 3, true);
        let written = fs::read(root.path().join("sys/bus/pci/devices/0000:00:04.0/resource2")).expect("read");
        assert_eq!(written[LAYOUT.tags_at() as usize + 7], 3);
        assert_eq!(page.counts(1, 3).map(|counts| counts.misses), Some(1));
    }

    #[test]
    fn what_is_no_modelled_pmu_is_left_alone() {
        let nothing = tempfile::tempdir().expect("a folder");
        assert!(find(nothing.path()).expect("readable").is_none());
        for (vendor, device, memory) in [
            ("0x8086", "0x1110", memory(LAYOUT.header())),
            ("0x1af4", "0x1000", memory(LAYOUT.header())),
            ("0x1af4", "0x1110", memory([0; HEADER_WORDS])),
            ("0x1af4", "0x1110", vec![1; 9]),
            ("0x1af4", "0x1110", Vec::new()),
        ] {
            assert!(
                find(tree(vendor, device, &memory).path())
                    .expect("readable")
                    .is_none()
            );
        }
    }

    #[test]
    fn a_page_that_states_what_cannot_be_is_refused() {
        for (at, value, part) in [
            (1, 1, "has version 1"),
            (3, 1 << 50, "CPUs"),
            (5, 1 << 20, "bytes; it must be"),
        ] {
            let mut header = LAYOUT.header();
            header[at] = value;
            let root = tree("0x1af4", "0x1110", &memory(header));
            let complaint = find(root.path()).expect_err("refused").to_string();
            assert!(complaint.contains("resource2"), "{complaint}");
            assert!(complaint.contains(part), "{complaint}");
        }
    }
}
