//! The stream that `xl` writes when it saves or migrates a domain: a header with the domain's configuration, records of
//! libxl, and among them libxc's records, which are its memory.
//!
//! ```text
//!   xl       "Xen saved domain, xl format\n \0 \r"   order, flags that must be known, others, bytes   configuration
//!   libxl    "LibxlFmt", version, options            records: type, bytes, body to a multiple of 8 … type 0: the end
//!   libxc      after a record of type 1: 8 bytes of 0xff, "XENF" …, domain, records … type 0: the end
//! ```
//!
//! The header is read in full and written again. The rest is only followed, to know when all of the domain was sent, and to check
//! its form. Anything unknown is an error, after which `xl` lets the domain run on where it is.

use super::configuration::{BYTES_MAX, Configuration};
use super::error::StreamError;

/// Start of the header.
const MAGIC: &[u8; 32] = b"Xen saved domain, xl format\n \0 \r";
/// Number of bytes before the configuration.
pub(super) const HEAD_BYTES: usize = 48;
/// How this machine's byte order is marked.
const ORDER: u32 = 0x0102_0304;
/// Flags: the configuration is JSON, and libxl's records are of version 2.
const MUST: u32 = 3;
const LIBXL: &[u8; 16] = b"LibxlFmt\0\0\0\x02\0\0\0\0";
/// The start of libxc's header, up to its version. After it, the header has flags for the byte order.
const LIBXC: &[u8; 16] = b"\xff\xff\xff\xff\xff\xff\xff\xffXENF\0\0\0\x03";
/// Number of bytes in libxc's header and its description of the domain.
const LIBXC_BYTES: usize = 24 + 16;
const RECORD_BYTES: usize = 8;
const END: u32 = 0;
/// libxl's record type after which libxc's records follow.
const MEMORY: u32 = 1;
/// libxc's record type for pages and their contents.
const PAGES: u32 = 1;
/// libxc's own limit on a record's length.
const RECORD_MAX: u32 = 128 << 20;
const PAGE_BYTES: u32 = 4096;

/// Returns the length of the configuration in bytes, from the first part of the header.
///
/// # Errors
/// If this is not such a header, or its kind is unknown.
pub(super) fn configuration_bytes(head: &[u8; HEAD_BYTES]) -> Result<usize, StreamError> {
    let (magic, words) = head.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(StreamError::NotXl);
    }
    let word = |at: usize| little(words, 4 * at);
    if word(0) != ORDER {
        return Err(StreamError::Order);
    }
    if word(1) != MUST {
        return Err(StreamError::Flags(word(1)));
    }
    let bytes = word(3) as usize;
    match (4..=BYTES_MAX).contains(&bytes) {
        true => Ok(bytes),
        false => Err(StreamError::ConfigurationBytes(bytes)),
    }
}

/// Returns the configuration, from the data that follows the first part of the header.
///
/// # Errors
/// If there is anything else, or the configuration cannot be read.
pub(super) fn configuration(data: &[u8]) -> Result<Configuration, StreamError> {
    let text = data.get(4..).unwrap_or_default();
    if data.len() < 4 || little(data, 0) as usize != text.len() {
        return Err(StreamError::SomethingElse);
    }
    Configuration::read(text).map_err(StreamError::Configuration)
}

/// Returns the header with another configuration.
pub(super) fn header(head: &[u8; HEAD_BYTES], configuration: &Configuration) -> Vec<u8> {
    let mut text = configuration.written();
    text.push(0);
    let bytes = |count: usize| u32::try_from(count).unwrap_or(u32::MAX).to_le_bytes();
    let kept = &head[..HEAD_BYTES - 4];
    [kept, &bytes(text.len() + 4), &bytes(text.len()), &text].concat()
}

fn little(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..at + 4).and_then(|word| word.try_into().ok());
    word.map_or(0, u32::from_le_bytes)
}

/// The next item of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Libxl,
    Libxc,
    /// A record of libxl, or a record of libxc among them.
    Record {
        is_memory: bool,
    },
    /// The rest of a record's body, with its number of bytes.
    Body {
        left: u64,
        is_memory: bool,
    },
    /// The final exchange between the two `xl` programs.
    Talk,
}

/// Follows the part of the stream after the header.
#[derive(Clone, Debug)]
pub(super) struct Follower {
    next: Next,
    /// The part of the next item that was read so far.
    held: Vec<u8>,
    /// Number of pages sent. A page that changed meanwhile counts each time it was sent.
    pub pages: u64,
}

impl Default for Follower {
    fn default() -> Follower {
        Follower {
            next: Next::Libxl,
            held: Vec::new(),
            pages: 0,
        }
    }
}

impl Follower {
    /// Returns true if all of the domain was sent.
    pub(super) fn is_over(&self) -> bool {
        self.next == Next::Talk
    }

    /// Follows the next part of the stream.
    ///
    /// # Errors
    /// If it does not have the expected form.
    pub(super) fn take(&mut self, mut bytes: &[u8]) -> Result<(), StreamError> {
        while !bytes.is_empty() {
            let wanted = match self.next {
                Next::Talk => return Ok(()),
                Next::Body { left, is_memory } => {
                    let some = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                    bytes = &bytes[some..];
                    self.next = match left - some as u64 {
                        0 => Next::Record { is_memory },
                        left => Next::Body { left, is_memory },
                    };
                    continue;
                }
                Next::Libxl => LIBXL.len(),
                Next::Libxc => LIBXC_BYTES,
                Next::Record { .. } => RECORD_BYTES,
            };
            let some = (wanted - self.held.len()).min(bytes.len());
            self.held.extend_from_slice(&bytes[..some]);
            bytes = &bytes[some..];
            if self.held.len() == wanted {
                self.next = self.after()?;
                self.held.clear();
            }
        }
        Ok(())
    }

    /// Returns what comes after the item that is held.
    fn after(&mut self) -> Result<Next, StreamError> {
        let begins = |with: &[u8], whose: &'static str| match self.held.starts_with(with) {
            true => Ok(()),
            false => Err(StreamError::Begins(whose)),
        };
        let is_memory = match self.next {
            Next::Libxl => {
                begins(LIBXL, "libxl's part")?;
                return Ok(Next::Record { is_memory: false });
            }
            Next::Libxc => {
                begins(LIBXC, "libxc's part")?;
                return Ok(Next::Record { is_memory: true });
            }
            Next::Record { is_memory } => is_memory,
            Next::Body { .. } | Next::Talk => return Ok(self.next),
        };
        let (kind, bytes) = (little(&self.held, 0), little(&self.held, 4));
        if bytes > RECORD_MAX {
            return Err(StreamError::RecordBytes(bytes));
        }
        if is_memory && kind == PAGES {
            self.pages += u64::from(bytes / PAGE_BYTES);
        }
        Ok(match (is_memory, kind) {
            (false, END) => Next::Talk,
            (false, MEMORY) => Next::Libxc,
            (true, END) => Next::Record { is_memory: false },
            _ if bytes == 0 => Next::Record { is_memory },
            _ => Next::Body {
                left: u64::from(bytes).next_multiple_of(8),
                is_memory,
            },
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::configuration::tests::KEPT;
    use super::*;

    pub(crate) fn head(bytes: u32) -> [u8; HEAD_BYTES] {
        let words = [ORDER, MUST, 0, bytes].map(u32::to_le_bytes).concat();
        [MAGIC.as_slice(), &words].concat().try_into().unwrap()
    }

    fn record(kind: u32, body: &[u8]) -> Vec<u8> {
        let head = [kind, body.len() as u32].map(u32::to_le_bytes).concat();
        let padding = vec![0; body.len().next_multiple_of(8) - body.len()];
        [head, body.to_vec(), padding].concat()
    }

    /// Returns a domain as Xen 4.17.7 sends it: two pages, another record, libxl's data, and the end.
    pub(crate) fn sent() -> Vec<u8> {
        let domain = [1u32, 12, 4, 17].map(u32::to_le_bytes).concat();
        let pages = vec![7; 8 + 2 * 8 + 2 * 4096];
        [
            LIBXL.to_vec(),
            record(MEMORY, &[]),
            [LIBXC.as_slice(), &[0; 8], &domain].concat(),
            record(PAGES, &pages),
            record(0x11, &[5; 13]),
            record(END, &[]),
            record(2, b"abc"),
            record(END, &[]),
        ]
        .concat()
    }

    #[test]
    fn the_header_is_written_anew() {
        let text = [KEPT.as_bytes(), &[0]].concat();
        let data = [&(text.len() as u32).to_le_bytes()[..], &text].concat();
        let head = head(data.len() as u32);
        assert_eq!(configuration_bytes(&head), Ok(data.len()));
        let mut of = configuration(&data).unwrap();
        of.set_nodemap(Some(serde_json::json!([2])));
        let new = header(&head, &of);
        let (first, rest) = new.split_at(HEAD_BYTES);
        assert_eq!(configuration_bytes(first.try_into().unwrap()), Ok(rest.len()));
        assert_eq!(configuration(rest), Ok(of));
    }

    #[test]
    fn what_is_no_header_or_an_unknown_one_is_refused() {
        let refused = |at: usize, byte: u8| {
            let mut head = head(100);
            head[at] = byte;
            configuration_bytes(&head).unwrap_err().to_string()
        };
        assert!(refused(5, b'x').contains("not a stream from xl"));
        assert!(refused(32, 1).contains("order"));
        assert!(refused(36, 7).contains("flags"));
        assert!(refused(47, 0x7f).contains("bytes"));
        assert!(configuration_bytes(&head(3)).is_err());
        assert!(
            configuration(&[9, 0, 0, 0, b'{', b'}'])
                .unwrap_err()
                .to_string()
                .contains("something else")
        );
        assert!(configuration(&[1]).is_err());
    }

    proptest::proptest! {
        #[test]
        fn the_end_is_seen_however_it_comes(parts in proptest::collection::vec(1usize..3000, 1..40), more in 0usize..30) {
            let all = sent();
            let whole = [all.clone(), vec![0xee; more]].concat();
            let (mut follower, mut rest) = (Follower::default(), whole.as_slice());
            for part in parts.into_iter().cycle() {
                let (some, left) = rest.split_at(part.min(rest.len()));
                let before = whole.len() - rest.len();
                proptest::prop_assert_eq!(follower.is_over(), before >= all.len());
                follower.take(some).unwrap();
                rest = left;
                if rest.is_empty() {
                    break;
                }
            }
            proptest::prop_assert!(follower.is_over());
            proptest::prop_assert_eq!(follower.pages, 2);
        }

        #[test]
        fn no_bytes_are_too_bad(
            at in 0usize..8300,
            byte: u8,
            bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200),
        ) {
            let mut follower = Follower::default();
            let _ = follower.take(&bytes);
            let mut all = sent();
            let at = at % all.len();
            all[at] = byte;
            let mut follower = Follower::default();
            let _ = follower.take(&all);
            let _ = configuration(&bytes);
        }
    }

    #[test]
    fn another_beginning_or_too_long_a_record_is_refused() {
        let refused = |at: usize| {
            let mut all = sent();
            all[at] ^= 0xff;
            Follower::default().take(&all).unwrap_err().to_string()
        };
        assert!(refused(0).contains("libxl"));
        assert!(refused(LIBXL.len() + RECORD_BYTES).contains("libxc"));
        assert!(refused(LIBXL.len() + RECORD_BYTES + LIBXC_BYTES + 7).contains("record"));
    }
}
