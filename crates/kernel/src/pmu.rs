//! `/sys/bus/event_source/devices`: what a PMU is called, on which CPUs it counts, and how its events are encoded.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use homenode_units::{Bytes, CpuSet};

use crate::perf::Attr;
use crate::read::{self, ReadError};

const PMUS_MAX: usize = 4096;

fn devices(root: &Path) -> PathBuf {
    root.join("sys/bus/event_source/devices")
}

/// Returns the names of all PMUs, sorted.
pub(crate) fn names(root: &Path) -> Result<Vec<String>, ReadError> {
    read::names(&devices(root), PMUS_MAX)
}

/// Returns whether a PMU is that of some cores, which `cpus` lists.
pub(crate) fn is_of_cores(root: &Path, name: &str) -> Result<bool, ReadError> {
    let cpus = devices(root).join(name).join("cpus");
    Ok(read::text_if_there(&cpus, read::SMALL_BYTES)?.is_some())
}

/// Returns the number at the end of a name such as `uncore_imc_3`, if the rest is `prefix`.
pub(crate) fn number(name: &str, prefix: &str) -> Option<usize> {
    let digits = name.strip_prefix(prefix)?;
    let is_number = digits.bytes().all(|b| b.is_ascii_digit());
    digits.parse().ok().filter(|_| is_number)
}

/// The bits of a configuration word that a term fills: `config:0-7,32`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Format {
    word: usize,
    bits: Vec<(u32, u32)>,
}

/// Parses a format; `None` if it is malformed. A word that no event here needs, such as `config3`, has no format.
fn parse_format(text: &str) -> Option<Option<Format>> {
    let (word, ranges) = text.trim().split_once(':')?;
    let word = match word {
        "config" => Some(0),
        "config1" => Some(1),
        "config2" => Some(2),
        _ => word.strip_prefix("config").map(|_| None)?,
    };
    let mut bits = Vec::new();
    for range in ranges.split(',') {
        let (low, high) = range.split_once('-').unwrap_or((range, range));
        let (low, high) = (low.parse().ok()?, high.parse().ok()?);
        if low > high || high > 63 {
            return None;
        }
        bits.push((low, high));
    }
    Some(word.map(|word| Format { word, bits }))
}

impl Format {
    /// Puts a value into these bits, lowest first; `None` if it does not fit.
    fn encode(&self, value: u64, words: &mut [u64; 3]) -> Option<()> {
        let mut rest = value;
        for &(low, high) in &self.bits {
            let width = high - low + 1;
            let mask = if width == 64 { u64::MAX } else { (1 << width) - 1 };
            words[self.word] |= (rest & mask) << low;
            rest = if width == 64 { 0 } else { rest >> width };
        }
        (rest == 0).then_some(())
    }
}

/// One PMU, as sysfs describes it.
#[derive(Clone, Debug)]
pub(crate) struct Pmu {
    /// The PMU's name.
    pub(crate) name: String,
    /// The PMU's number in `perf_event_attr`.
    pub(crate) kind: u32,
    /// `cpumask`: the CPUs through which its counters are read, one for each copy of the PMU. `None` for a PMU of cores.
    pub(crate) read_on: Option<CpuSet>,
    formats: BTreeMap<String, Format>,
    /// Terms and bytes per count of each event, by name.
    events: BTreeMap<String, (String, Option<f64>)>,
}

impl Pmu {
    /// Reads a PMU; `None` if it is not there.
    pub(crate) fn read(root: &Path, name: &str) -> Result<Option<Pmu>, ReadError> {
        let dir = devices(root).join(name);
        let Some(kind) = read::value_if_there(&dir.join("type"), "the number of a PMU type")? else {
            return Ok(None);
        };
        let mut formats = BTreeMap::new();
        for term in read::names(&dir.join("format"), 256)? {
            let path = dir.join("format").join(&term);
            let text = read::text(&path, read::SMALL_BYTES)?;
            let format =
                parse_format(&text).ok_or_else(|| ReadError::malformed(&path, "`config:LOW-HIGH`", &text))?;
            formats.extend(format.map(|format| (term, format)));
        }
        let mut events = BTreeMap::new();
        for event in read::names(&dir.join("events"), 4096)? {
            if event.contains('.') {
                continue; // `.scale`, `.unit`, `.snapshot`, …
            }
            let terms = read::text(&dir.join("events").join(&event), read::SMALL_BYTES)?;
            let scale: Option<f64> =
                read::value_if_there(&dir.join(format!("events/{event}.scale")), "a number")?;
            let unit = read::text_if_there(&dir.join(format!("events/{event}.unit")), read::SMALL_BYTES)?;
            let bytes = unit
                .as_deref()
                .and_then(unit_bytes)
                .zip(scale)
                .map(|(unit, scale)| unit * scale);
            let bytes = bytes.filter(|b| b.is_finite() && *b > 0.0);
            events.insert(event, (terms.trim().to_owned(), bytes));
        }
        Ok(Some(Pmu {
            name: name.to_owned(),
            kind,
            read_on: read::value_if_there(&dir.join("cpumask"), "a list of CPUs")?,
            formats,
            events,
        }))
    }

    /// Encodes terms such as `event=0x04,umask=0x03`; `None` if a term is unknown or does not fit.
    pub(crate) fn encode(&self, terms: &str) -> Option<Attr> {
        let mut words = [0; 3];
        for term in terms.split(',').filter(|t| !t.is_empty()) {
            let (name, value) = term.split_once('=').unwrap_or((term, "1"));
            let value = match value.strip_prefix("0x") {
                Some(hex) => u64::from_str_radix(hex, 16).ok()?,
                None => value.parse().ok()?,
            };
            self.formats.get(name.trim())?.encode(value, &mut words)?;
        }
        let mut attr = Attr::counting(self.kind, words[0]);
        (attr.config1, attr.config2) = (words[1], words[2]);
        Some(attr)
    }

    /// Returns an event that sysfs names.
    pub(crate) fn event(&self, name: &str) -> Option<Attr> {
        self.encode(&self.events.get(name)?.0)
    }

    /// Returns an event that sysfs names, with the bytes that one count stands for by its scale and unit.
    pub(crate) fn event_in_bytes(&self, name: &str) -> Option<(Attr, f64)> {
        Some((self.event(name)?, self.events.get(name)?.1?))
    }

    /// Returns the contents of another file of this PMU.
    pub(crate) fn text(&self, root: &Path, file: &str) -> Result<(PathBuf, Option<String>), ReadError> {
        let path = devices(root).join(&self.name).join(file);
        let text = read::text_if_there(&path, read::SMALL_BYTES)?;
        Ok((path, text))
    }
}

fn unit_bytes(unit: &str) -> Option<f64> {
    match unit.trim() {
        "MiB" => Some(Bytes::from_mib(1).as_f64()),
        "Bytes" | "bytes" | "B" => Some(1.0),
        "KiB" => Some(1024.0),
        "MB" => Some(1e6),
        _ => None,
    }
}

#[cfg(test)]
pub(crate) mod trees;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_laid_into_split_bits() {
        let format = parse_format("config1:0-3,8,60-63").unwrap().unwrap();
        let mut words = [0; 3];
        format.encode(0x1ff, &mut words).unwrap();
        assert_eq!(words, [0, 0xf000_0000_0000_010f, 0]);
        assert_eq!(format.encode(0x200, &mut [0; 3]), None);
    }

    #[test]
    fn a_word_that_nothing_needs_is_left_out() {
        assert_eq!(parse_format("config3:0-63\n"), Some(None));
        for bad in ["config", "config:9-3", "config:0-64", "bits:0-1", ""] {
            assert_eq!(parse_format(bad), None, "{bad}");
        }
    }

    #[test]
    fn numbers_at_the_end_of_names() {
        assert_eq!(number("uncore_imc_12", "uncore_imc_"), Some(12));
        for other in [
            "uncore_imc_",
            "uncore_imc_free_running_0",
            "uncore_m2m_0",
            "uncore_imc_+1",
        ] {
            assert_eq!(number(other, "uncore_imc_"), None, "{other}");
        }
    }
}
