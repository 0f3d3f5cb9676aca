//! Writes archives that kernels unpack at boot (`initramfs`), in cpio's "newc" format.

/// An archive under construction.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    fn entry(&mut self, name: &str, mode: u32, contents: &[u8]) {
        self.entries += 1;
        // Magic, then 13 fields of 8 hexadecimal digits: inode, mode, uid, gid, links, time, size, 4 device numbers, length of
        // the name with its final zero, checksum.
        let fields = [
            self.entries,
            mode,
            0,
            0,
            1,
            0,
            contents.len() as u32,
            0,
            0,
            0,
            0,
            name.len() as u32 + 1,
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(contents);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    /// Adds a file of at most 4 GiB. Its directory must have been added before.
    pub fn file(&mut self, name: &str, permissions: u32, contents: &[u8]) {
        self.entry(name, 0o100_000 | permissions, contents);
    }

    /// Adds a directory.
    pub fn directory(&mut self, name: &str) {
        self.entry(name, 0o040_755, &[]);
    }

    /// Returns the finished archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_aligned_and_ends_with_the_trailer() {
        let mut archive = Archive::default();
        archive.file("init", 0o755, b"hello");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        assert_eq!(&bytes[..6], b"070701");
        // Header 110 + "init\0" = 115, padded to 116; then the contents.
        assert_eq!(&bytes[116..121], b"hello");
        assert!(bytes.windows(10).any(|window| window == b"TRAILER!!!"));
    }
}
