//! Parses the records of a log, one after the other.

use super::{
    END, Header, Marks, PageLogError, Place, RECORD_BYTES, Row, WINDOW, Window, crc32, text, u32_at, u64_at,
};

/// A record.
pub(super) enum Record {
    Window(Window),
    End,
}

/// Parses one record after the other.
#[derive(Debug)]
pub(super) struct Records {
    path: String,
    /// Number of frames, including modelled page tables.
    frames: u64,
    /// Number of the next record.
    pub(super) number: u64,
    last_end_ns: u64,
}

impl Records {
    /// Creates a parser that begins at the first kept record.
    pub(super) fn new(path: &str, header: &Header) -> Records {
        Records {
            path: path.to_owned(),
            frames: header.frames + header.table_frames,
            number: header.kept.number,
            last_end_ns: 0,
        }
    }

    pub(super) fn corrupt(&self, at: usize, what: &'static str) -> PageLogError {
        PageLogError::Corrupt {
            path: self.path.clone(),
            at,
            place: Place::Record(self.number),
            what,
        }
    }

    /// Returns the length of the record that begins with these bytes; `None` if its head is incomplete.
    pub(super) fn length(&self, at: usize, bytes: &[u8]) -> Result<Option<usize>, PageLogError> {
        let Some(head) = bytes.get(..RECORD_BYTES) else {
            return Ok(None);
        };
        if u32_at(head, 92) != crc32(&head[..92]) {
            return Err(self.corrupt(at, "the checksum of its head does not match"));
        }
        Ok(Some(RECORD_BYTES + u32_at(head, 4) as usize * Row::BYTES))
    }

    /// Parses the record that begins with these bytes. Returns it with its length; `None` if it is incomplete.
    pub(super) fn next(&mut self, at: usize, bytes: &[u8]) -> Result<Option<(Record, usize)>, PageLogError> {
        let Some(length) = self.length(at, bytes)? else {
            return Ok(None);
        };
        let (head, found) = (&bytes[..RECORD_BYTES], u64_at(bytes, 8));
        if found != self.number {
            return Err(PageLogError::Reordered {
                path: self.path.clone(),
                expected: self.number,
                found,
            });
        }
        let is_end = head[..4] == *END;
        if !is_end && head[..4] != *WINDOW {
            return Err(self.corrupt(at, "the kind of record is unknown"));
        }
        let Some(rows) = bytes.get(RECORD_BYTES..length) else {
            return Ok(None);
        };
        if u32_at(head, 88) != crc32(rows) {
            return Err(self.corrupt(at, "the checksum of its rows does not match"));
        }
        if is_end {
            return Ok(Some((Record::End, length)));
        }
        let window = window(head, rows, self.frames).map_err(|what| self.corrupt(at, what))?;
        if self.last_end_ns > window.begin_ns {
            return Err(self.corrupt(at, "it begins before the previous one ends"));
        }
        self.number = self.number.saturating_add(1);
        self.last_end_ns = window.end_ns;
        Ok(Some((Record::Window(window), length)))
    }
}

/// Parses the window of a record.
fn window(head: &[u8], rows: &[u8], frames: u64) -> Result<Window, &'static str> {
    let mut least = 0_u64;
    let mut parsed = Vec::with_capacity(rows.len() / Row::BYTES);
    for row in rows.chunks_exact(Row::BYTES) {
        let (frame, word) = (u32_at(row, 0), u32_at(row, 4));
        if u64::from(frame) < least {
            return Err("the window's frames are not in ascending order");
        }
        if u64::from(frame) >= frames {
            return Err("a frame is beyond the guest's last");
        }
        let marks = Marks((word >> 24) as u8);
        if marks.0 & !Marks::ALL != 0 {
            return Err("a frame has an unknown mark");
        }
        least = u64::from(frame) + 1;
        parsed.push(Row {
            frame,
            count: word & Row::COUNT_MAX,
            marks,
        });
    }
    let (begin_ns, end_ns) = (u64_at(head, 16), u64_at(head, 24));
    if begin_ns >= end_ns {
        return Err("the window ends before it begins");
    }
    Ok(Window {
        number: u64_at(head, 8),
        begin_ns,
        end_ns,
        label: text(&head[32..48]).ok_or("the window's label is not text")?,
        walks: u64_at(head, 48),
        logged: u64_at(head, 56),
        lost: u64_at(head, 64),
        filled: u64_at(head, 72),
        outside: u64_at(head, 80),
        rows: parsed,
    })
}
