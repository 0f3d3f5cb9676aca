//! `/proc/PID/pagemap`: the machine frames of another process's pages.
//!
//! The file has eight bytes per page. Bit 63 means that the page is in memory, bits 0 to 54 are its frame, and bit 56 means that
//! no other process maps that frame. The kernel shows frame numbers only to processes with `CAP_SYS_ADMIN`, and zeroes to all
//! others. A process never has a page in frame 0, so a page there means that numbers are hidden. Reading walks the page tables,
//! which takes milliseconds per GiB.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use homenode_units::PAGE_BYTES;

use crate::read::{ReadError, is_absence};

const PRESENT: u64 = 1 << 63;
const EXCLUSIVE: u64 = 1 << 56;
const FRAME_MASK: u64 = (1 << 55) - 1;
const ENTRY_BYTES: usize = 8;

/// Where a page of a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Not in memory.
    Nowhere,
    /// In this frame, which no other process maps.
    Own(u64),
    /// In this frame, which other processes map too: a page of zeroes, a page that KSM merged, shared memory.
    Shared(u64),
}

/// Returns the places of at most `pages` pages from address `start` on; `None` if the process is gone, or ends meanwhile.
///
/// # Errors
/// If the file may not be read, or hides frame numbers.
pub fn read(root: &Path, pid: i32, start: u64, pages: usize) -> Result<Option<Vec<Place>>, ReadError> {
    let path = root.join(format!("proc/{pid}/pagemap"));
    let io = |cause: String| ReadError::Io {
        path: path.display().to_string(),
        cause,
    };
    let mut bytes = vec![0; pages * ENTRY_BYTES];
    let offset = start / PAGE_BYTES * ENTRY_BYTES as u64;
    let result = File::open(&path).and_then(|file| file.read_exact_at(&mut bytes, offset));
    match result {
        Ok(()) => {}
        // A process that has released its memory has an empty file.
        Err(error) if is_absence(&error) || error.kind() == std::io::ErrorKind::UnexpectedEof => {
            return Ok(None);
        }
        Err(error) => return Err(io(error.to_string())),
    }
    let entries = bytes
        .chunks_exact(ENTRY_BYTES)
        .map(|entry| u64::from_le_bytes(entry.try_into().expect("eight bytes")));
    let place = |entry: u64| match (entry & PRESENT != 0, entry & FRAME_MASK) {
        (false, _) => Ok(Place::Nowhere),
        (true, 0) => Err(io(
            "the kernel hides frame numbers; run as root or with CAP_SYS_ADMIN".into(),
        )),
        (true, frame) if entry & EXCLUSIVE != 0 => Ok(Place::Own(frame)),
        (true, frame) => Ok(Place::Shared(frame)),
    };
    entries.map(place).collect::<Result<_, _>>().map(Some)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::fake::Tree;
    use std::fs::OpenOptions;

    /// Returns the entry that the kernel would write for a page.
    pub(crate) fn entry(place: Place) -> u64 {
        match place {
            Place::Nowhere => 0,
            Place::Own(frame) => PRESENT | EXCLUSIVE | frame,
            Place::Shared(frame) => PRESENT | frame,
        }
    }

    /// Writes the `pagemap` of a process. From address `start` on, its pages are at these places.
    pub(crate) fn write(tree: &Tree, pid: i32, start: u64, places: &[Place]) {
        let entries: Vec<u64> = places.iter().map(|place| entry(*place)).collect();
        write_entries(tree, pid, start, &entries);
    }

    fn write_entries(tree: &Tree, pid: i32, start: u64, entries: &[u64]) {
        let path = tree.write(&format!("proc/{pid}/pagemap"), "");
        let file = OpenOptions::new().write(true).open(path).expect("written before");
        let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
        file.write_all_at(&bytes, start / PAGE_BYTES * 8)
            .expect("a sparse file");
    }

    #[test]
    fn frames_read_and_a_process_that_ends_has_none() {
        let tree = Tree::new(&[]);
        let places = [Place::Own(7), Place::Nowhere, Place::Shared(9)];
        write(&tree, 5, 1 << 20, &places);
        assert_eq!(read(tree.root(), 5, 1 << 20, 3), Ok(Some(places.to_vec())));
        assert_eq!(
            read(tree.root(), 5, (1 << 20) + PAGE_BYTES, 3),
            Ok(None),
            "cut off"
        );
        assert_eq!(read(tree.root(), 6, 1 << 20, 3), Ok(None));
    }

    #[test]
    fn hidden_frames_are_refused_with_the_remedy() {
        let tree = Tree::new(&[]);
        write_entries(&tree, 5, 0, &[0, PRESENT | EXCLUSIVE]);
        let complaint = read(tree.root(), 5, 0, 2).expect_err("refused").to_string();
        assert!(
            complaint.contains("/proc/5/pagemap: the kernel hides frame numbers"),
            "{complaint}"
        );
        assert!(complaint.contains("CAP_SYS_ADMIN"), "{complaint}");
    }

    #[test]
    fn the_kernels_own_file_reads() {
        let memory = vec![1_u8; 3 * PAGE_BYTES as usize];
        let start = memory.as_ptr().addr() as u64 & !(PAGE_BYTES - 1);
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        match read(Path::new("/"), pid, start, 2) {
            Ok(places) => {
                let places = places.expect("this process is alive");
                assert!(places.iter().all(|place| *place != Place::Nowhere), "{places:?}");
            }
            Err(error) => assert!(error.to_string().contains("CAP_SYS_ADMIN"), "{error}"),
        }
    }
}
