//! Reads a log while it is written, record by record.
//!
//! A log grows by whole records and never changes earlier ones, so a reader needs only the file; on `/dev/shm` the file is memory
//! that writer and reader share. If records are dropped before a slow reader has read them, they are counted, and reading
//! continues with the first kept record.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::records::{Record, Records};
use super::{Header, Kept, PageLogError, RECORD_BYTES, Window};

/// How many times a header is read again if the writer may be changing it.
const TRIES: u32 = 100;

/// The next item of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Followed {
    /// Nothing new yet.
    Nothing,
    /// A window.
    Window(Window),
    /// The log was closed.
    End,
}

/// A reader of a growing log.
#[derive(Debug)]
pub struct Follower {
    path: String,
    file: File,
    reading: Option<Reading>,
    given_up: u64,
}

/// The state of a log that has begun.
#[derive(Debug)]
struct Reading {
    header: Header,
    records: Records,
    /// Offset of the next record in the file.
    at: u64,
}

impl Follower {
    /// Opens a log at the first kept record.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub fn open(path: &Path) -> Result<Follower, PageLogError> {
        let name = path.display().to_string();
        match File::open(path) {
            Ok(file) => Ok(Follower {
                path: name,
                file,
                reading: None,
                given_up: 0,
            }),
            Err(error) => Err(PageLogError::Io { path: name, error }),
        }
    }

    /// Returns the log's header; `None` if the writer has not written it yet.
    pub fn header(&self) -> Option<&Header> {
        self.reading.as_ref().map(|reading| &reading.header)
    }

    /// Returns the number of windows that were dropped before they could be read.
    pub fn given_up(&self) -> u64 {
        self.given_up
    }

    /// Returns the next item, without waiting.
    ///
    /// # Errors
    /// [`PageLogError`]; permanent if the file is not a log or is corrupt.
    pub fn advance(&mut self) -> Result<Followed, PageLogError> {
        if self.reading.is_none() {
            let Some(header) = self.read_header()? else {
                return Ok(Followed::Nothing);
            };
            self.given_up = header.kept.number;
            self.reading = Some(Reading {
                records: Records::new(&self.path, &header),
                at: header.kept.at,
                header,
            });
        }
        loop {
            let before = self.reading.as_ref().map_or(0, |reading| reading.records.number);
            let complaint = match self.read_record() {
                Err(error @ (PageLogError::Corrupt { .. } | PageLogError::Reordered { .. })) => error,
                other => return other,
            };
            // The record may have been dropped during the read. The writer updates the header first, so the header tells.
            let kept = self.read_header()?.map_or(Kept::ALL, |header| header.kept);
            let Some(reading) = self.reading.as_mut().filter(|_| kept.number > before) else {
                return Err(complaint);
            };
            self.given_up += kept.number - before;
            (reading.records.number, reading.at) = (kept.number, kept.at);
        }
    }

    fn read_record(&mut self) -> Result<Followed, PageLogError> {
        let complain = |error| PageLogError::Io {
            path: self.path.clone(),
            error,
        };
        let Some(reading) = self.reading.as_mut() else {
            return Ok(Followed::Nothing);
        };
        let length = self.file.metadata().map_err(complain)?.len();
        if length < reading.at {
            return Err(PageLogError::Anew(self.path.clone()));
        }
        let place = reading.at as usize;
        let there = (length - reading.at) as usize;
        let mut bytes = vec![0; there.min(RECORD_BYTES)];
        self.file
            .read_exact_at(&mut bytes, reading.at)
            .map_err(complain)?;
        // Allocates only for data that is present, whatever size a record claims.
        let Some(whole) = reading
            .records
            .length(place, &bytes)?
            .filter(|whole| *whole <= there)
        else {
            return Ok(Followed::Nothing);
        };
        bytes.resize(whole, 0);
        self.file
            .read_exact_at(&mut bytes, reading.at)
            .map_err(complain)?;
        Ok(match reading.records.next(place, &bytes)? {
            None => Followed::Nothing,
            Some((Record::End, _)) => Followed::End,
            Some((Record::Window(window), length)) => {
                reading.at += length as u64;
                Followed::Window(window)
            }
        })
    }

    /// Returns the current header; `None` while it is incomplete.
    fn read_header(&self) -> Result<Option<Header>, PageLogError> {
        let mut tries = 0;
        loop {
            let mut bytes = [0; Header::BYTES];
            match self.file.read_exact_at(&mut bytes, 0) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
                Err(error) => {
                    return Err(PageLogError::Io {
                        path: self.path.clone(),
                        error,
                    });
                }
            }
            tries += 1;
            match Header::parse(&self.path, &bytes) {
                // The writer may have changed the header during the read.
                Err(PageLogError::Corrupt { .. }) if tries < TRIES => std::thread::yield_now(),
                parsed => return parsed.map(Some),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use proptest::prelude::*;
    use tempfile::NamedTempFile;

    use super::super::tests::{bytes, header, windows};
    use super::super::{Log, Row, WINDOW, Window, record, seal};
    use super::*;

    fn file(contents: &[u8]) -> NamedTempFile {
        let mut file = NamedTempFile::new().expect("a directory for temporary files");
        file.write_all(contents).expect("room");
        file
    }

    /// Reads everything available. Returns the windows, and true if the log was closed.
    fn read(follower: &mut Follower) -> (Vec<Window>, bool) {
        let mut all = Vec::new();
        loop {
            match follower.advance().expect("a good log") {
                Followed::Window(window) => all.push(window),
                other => return (all, other == Followed::End),
            }
        }
    }

    /// Returns a log of four windows after those before `number` were dropped.
    fn kept_from(number: u64) -> Vec<u8> {
        let mut log = bytes(&windows(4));
        let before: usize = windows(number).iter().map(|window| window.to_bytes().len()).sum();
        let at = Header::BYTES + before;
        log[Header::BYTES..at].fill(0);
        let kept = Kept {
            at: at as u64,
            number,
        };
        log[..Header::BYTES].copy_from_slice(&Header { kept, ..header() }.to_bytes());
        log
    }

    #[test]
    fn what_was_given_up_is_counted_and_reading_goes_on() {
        let file = file(&bytes(&windows(4)));
        let mut slow = Follower::open(file.path()).expect("it is there");
        assert_eq!(
            slow.advance().expect("good"),
            Followed::Window(windows(1).remove(0))
        );
        fs::write(file.path(), kept_from(3)).expect("room");
        let last = windows(4).split_off(3);
        assert_eq!((read(&mut slow), slow.given_up()), ((last.clone(), true), 2));
        let mut late = Follower::open(file.path()).expect("it is there");
        assert_eq!((read(&mut late), late.given_up()), ((last.clone(), true), 3));
        assert_eq!(Log::read(file.path()).expect("good").windows, last);
    }

    #[test]
    fn a_log_that_is_begun_anew_is_not_taken_for_the_same() {
        let file = file(&bytes(&windows(4)));
        let mut follower = Follower::open(file.path()).expect("it is there");
        assert!(matches!(follower.advance(), Ok(Followed::Window(_))));
        assert!(matches!(follower.advance(), Ok(Followed::Window(_))));
        fs::write(file.path(), header().to_bytes()).expect("room");
        assert!(matches!(follower.advance(), Err(PageLogError::Anew(_))));
    }

    #[test]
    fn rows_that_are_not_there_are_waited_for_without_room_for_them() {
        let mut head = record(WINDOW, &windows(1)[0]);
        head[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        let log = [&header().to_bytes()[..], &seal(head)].concat();
        let mut follower = Follower::open(file(&log).path()).expect("it is there");
        assert_eq!(
            follower.advance().expect("nothing is wrong yet"),
            Followed::Nothing
        );
    }

    proptest! {
        #[test]
        fn whoever_follows_gets_what_a_reader_of_the_whole_gets(mut cuts in prop::collection::vec(0_usize..2000, 0..8)) {
            let whole = bytes(&windows(4));
            cuts.push(whole.len());
            cuts.sort_unstable();
            let mut file = file(b"");
            let mut follower = Follower::open(file.path()).expect("it is there");
            let (mut all, mut ended, mut written) = (Vec::new(), false, 0);
            for cut in cuts.into_iter().filter(|cut| *cut <= whole.len()) {
                file.write_all(&whole[written..cut]).expect("room");
                written = cut;
                let (windows, end) = read(&mut follower);
                all.extend(windows);
                ended = end;
            }
            prop_assert_eq!((all, ended, follower.given_up()), (windows(4), true, 0));
        }

        #[test]
        fn no_bytes_do_any_harm_to_whoever_follows(
            junk in prop::collection::vec(any::<u8>(), 0..400), after in 0_u64..4, at in 0_u64..4000, number: u64,
        ) {
            let kept = Kept { at, number };
            let begin = if after == 0 { vec![] } else { Header { kept, ..header() }.to_bytes().to_vec() };
            let windows: Vec<u8> = windows(after).iter().flat_map(Window::to_bytes).collect();
            let file = file(&[begin, windows, junk].concat());
            let mut follower = Follower::open(file.path()).expect("it is there");
            // The loop ends, because each window is another record.
            while let Ok(Followed::Window(window)) = follower.advance() {
                prop_assert!(window.rows.iter().all(|row| row.count <= Row::COUNT_MAX));
            }
        }
    }
}
