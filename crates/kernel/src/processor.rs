//! `/proc/cpuinfo`: the processor's vendor, family and model, which decide what an event's number means.

use std::path::Path;

use crate::read::{self, ReadError};

/// Most bytes of `/proc/cpuinfo` that are read: a block of 2 KiB for each of 8192 CPUs.
const CPUINFO_BYTES: u64 = 16 << 20;

/// A processor vendor whose events are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Vendor {
    /// Intel.
    Intel,
    /// AMD.
    Amd,
    /// Any other vendor, or an architecture that does not name its vendor.
    #[default]
    Other,
}

/// The processor of this host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Processor {
    /// The processor's vendor.
    pub(crate) vendor: Vendor,
    /// The processor's family; 0 if not known.
    pub(crate) family: u32,
    /// The processor's model; 0 if not known.
    pub(crate) model: u32,
}

/// A generation of AMD's processors, as far as events differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Zen {
    /// Zen and Zen 2.
    OneOrTwo,
    /// Zen 3.
    Three,
    /// Zen 4.
    Four,
    /// Zen 5.
    Five,
}

impl Processor {
    /// Reads the processor of a host.
    pub(crate) fn read(root: &Path) -> Result<Processor, ReadError> {
        let text = read::text_if_there(&root.join("proc/cpuinfo"), CPUINFO_BYTES)?;
        Ok(text.map_or_else(Processor::default, |text| Processor::of(&text)))
    }

    /// Returns the processor in the first block of `/proc/cpuinfo`.
    fn of(cpuinfo: &str) -> Processor {
        let value = |key: &str| {
            let mut fields = cpuinfo.lines().take(32).filter_map(|line| line.split_once(':'));
            let (_, value) = fields.find(|(name, _)| name.trim() == key)?;
            Some(value.trim())
        };
        let number = |key| value(key).and_then(|text| text.parse().ok()).unwrap_or(0);
        Processor {
            vendor: match value("vendor_id") {
                Some("GenuineIntel") => Vendor::Intel,
                Some("AuthenticAMD") => Vendor::Amd,
                _ => Vendor::Other,
            },
            family: number("cpu family"),
            model: number("model"),
        }
    }

    /// Returns the generation of an AMD processor, by the ranges of models in Linux' `arch/x86/kernel/cpu/amd.c`; `None` for
    /// other processors, and for generations whose events are not known.
    pub(crate) fn zen(&self) -> Option<Zen> {
        if self.vendor != Vendor::Amd {
            return None;
        }
        match (self.family, self.model) {
            (0x17, _) => Some(Zen::OneOrTwo),
            (0x19, 0x00..=0x0f | 0x20..=0x5f) => Some(Zen::Three),
            (0x19, 0x10..=0x1f | 0x60..=0xaf) => Some(Zen::Four),
            (0x1a, 0x00..=0x2f | 0x40..=0x4f | 0x60..=0x7f) => Some(Zen::Five),
            _ => None,
        }
    }
}

impl std::fmt::Display for Processor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.vendor {
            Vendor::Intel => write!(f, "Intel family {} model {}", self.family, self.model),
            Vendor::Amd => write!(f, "AMD family {} model {}", self.family, self.model),
            Vendor::Other => f.write_str("this processor"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_is_read_from_the_first_block() {
        let block = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: EPYC\n";
        let processor = Processor::of(block);
        assert_eq!((processor.family, processor.model), (25, 17));
        assert_eq!(processor.zen(), Some(Zen::Four));
        assert_eq!(processor.to_string(), "AMD family 25 model 17");
        let arm = Processor::of("processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\n");
        assert_eq!(arm, Processor::default());
    }

    #[test]
    fn a_generation_is_known_only_where_its_events_are() {
        let amd = |family, model| {
            let vendor = Vendor::Amd;
            Processor {
                vendor,
                family,
                model,
            }
            .zen()
        };
        assert_eq!(amd(0x17, 0x31), Some(Zen::OneOrTwo));
        assert_eq!(amd(0x19, 0x01), Some(Zen::Three));
        assert_eq!(amd(0x19, 0xa0), Some(Zen::Four));
        assert_eq!(amd(0x1a, 0x02), Some(Zen::Five));
        for (family, model) in [
            (0x15, 0x02),
            (0x16, 0x30),
            (0x18, 0x00),
            (0x1a, 0x50),
            (0x1b, 0x00),
        ] {
            assert_eq!(amd(family, model), None, "{family:#x} {model:#x}");
        }
        let hygon = Processor::of("vendor_id\t: HygonGenuine\ncpu family\t: 24\nmodel\t\t: 0\n");
        assert_eq!(hygon.zen(), None);
    }
}
