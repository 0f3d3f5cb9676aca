//! Amounts with a unit: bytes, 4 KiB pages, nanoseconds, cycles, bytes per second.

use std::fmt;
use std::ops::{Add, AddAssign, Sub, SubAssign};
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Size of a base page in bytes. Homenode counts memory in base pages, whatever page size a mapping uses.
pub const PAGE_BYTES: u64 = 4096;

/// Why a size or a duration could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseQuantityError {
    text: String,
    expected: &'static str,
}

impl fmt::Display for ParseQuantityError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is not {}", self.text, self.expected)
    }
}

impl std::error::Error for ParseQuantityError {}

macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl $name {
            /// An amount of zero.
            pub const ZERO: $name = $name(0);

            /// Returns the difference, or zero if `other` is larger.
            pub fn saturating_sub(self, other: Self) -> Self {
                Self(self.0.saturating_sub(other.0))
            }

            /// Returns the amount as a floating-point number, for ratios.
            pub fn as_f64(self) -> f64 {
                self.0 as f64
            }
        }

        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
        }

        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
        }

        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                self.0 += other.0;
            }
        }

        impl SubAssign for $name {
            fn sub_assign(&mut self, other: Self) {
                self.0 -= other.0;
            }
        }

        impl std::iter::Sum for $name {
            fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
                Self(iter.map(|v| v.0).sum())
            }
        }
    };
}

quantity!(
    /// An amount of memory in bytes. Read and written as `16GiB`, `500MB`.
    Bytes
);
quantity!(
    /// An amount of memory in base pages of 4 KiB.
    Pages
);
quantity!(
    /// A time span, or a point on a monotonic clock, in nanoseconds. Read and written as `900s`, `30ms`.
    Ns
);
quantity!(
    /// Processor cycles.
    Cycles
);
quantity!(
    /// A data rate in bytes per second. Read and written as `17GB/s`.
    BytesPerSec
);

const BINARY: [(&str, u64); 4] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
];
const DECIMAL: [(&str, u64); 5] = [
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
    ("B", 1),
];
/// Short units, which QEMU and virsh also accept.
const SHORT: [(&str, u64); 4] = [("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)];
const TIME: [(&str, u64); 8] = [
    ("ns", 1),
    ("us", 1_000),
    ("ms", 1_000_000),
    ("min", 60_000_000_000),
    ("m", 60_000_000_000),
    ("d", 86_400_000_000_000),
    ("h", 3_600_000_000_000),
    ("s", 1_000_000_000),
];

/// Reads `<number><unit>`: a number with up to nine decimals, and one of `units`.
pub(crate) fn parse(
    text: &str,
    units: &[(&str, u64)],
    expected: &'static str,
) -> Result<u64, ParseQuantityError> {
    let error = || ParseQuantityError {
        text: text.to_owned(),
        expected,
    };
    let trimmed = text.trim();
    let split = trimmed
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .ok_or_else(error)?;
    let (number, unit) = trimmed.split_at(split);
    let (_, factor) = units
        .iter()
        .find(|(name, _)| *name == unit.trim())
        .ok_or_else(error)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if fraction.len() > 9 || (whole.is_empty() && fraction.is_empty()) {
        return Err(error());
    }
    let whole: u128 = if whole.is_empty() {
        0
    } else {
        whole.parse().map_err(|_| error())?
    };
    let scale = 10u128.pow(fraction.len() as u32);
    let fraction: u128 = if fraction.is_empty() {
        0
    } else {
        fraction.parse().map_err(|_| error())?
    };
    let factor = u128::from(*factor);
    let total = whole
        .checked_mul(factor)
        .and_then(|w| w.checked_add(fraction * factor / scale))
        .ok_or_else(error)?;
    u64::try_from(total).map_err(|_| error())
}

/// Reads a size; the case of its unit does not matter, as in virsh and QEMU.
fn parse_size<'a>(
    text: &str,
    units: impl Iterator<Item = &'a (&'a str, u64)>,
    expected: &'static str,
) -> Result<u64, ParseQuantityError> {
    let units: Vec<(String, u64)> = units
        .map(|(name, factor)| (name.to_ascii_lowercase(), *factor))
        .collect();
    let units: Vec<(&str, u64)> = units
        .iter()
        .map(|(name, factor)| (name.as_str(), *factor))
        .collect();
    parse(&text.to_ascii_lowercase(), &units, expected).map_err(|_| ParseQuantityError {
        text: text.to_owned(),
        expected,
    })
}

/// Writes the amount in the largest unit that it reaches, rounded to two decimals unless it is a whole number.
fn write_scaled(f: &mut fmt::Formatter<'_>, value: u64, units: &[(&str, u64)], suffix: &str) -> fmt::Result {
    let Some((unit, factor)) = units.iter().find(|(_, factor)| value >= *factor) else {
        return write!(f, "{value}B{suffix}");
    };
    if value.is_multiple_of(*factor) {
        return write!(f, "{}{unit}{suffix}", value / factor);
    }
    // Integer arithmetic: floating-point numbers would round the largest amounts up beyond the type's range.
    let factor = u128::from(*factor);
    let rounded = (u128::from(value) * 100 + factor / 2) / factor;
    let most = u128::from(u64::MAX) * 100 / factor;
    let hundredths = rounded.min(most);
    write!(f, "{}.{:02}{unit}{suffix}", hundredths / 100, hundredths % 100)
}

impl Bytes {
    /// Converts whole mebibytes to bytes.
    pub const fn from_mib(mib: u64) -> Bytes {
        Bytes(mib << 20)
    }

    /// Converts whole gibibytes to bytes.
    pub const fn from_gib(gib: u64) -> Bytes {
        Bytes(gib << 30)
    }

    /// Returns the base pages that hold this many bytes, rounded up.
    pub fn to_pages(self) -> Pages {
        Pages(self.0.div_ceil(PAGE_BYTES))
    }
}

impl Pages {
    /// Returns the bytes in these pages.
    pub fn to_bytes(self) -> Bytes {
        Bytes(self.0 * PAGE_BYTES)
    }
}

impl Ns {
    /// Converts whole seconds to nanoseconds.
    pub const fn from_secs(secs: u64) -> Ns {
        Ns(secs * 1_000_000_000)
    }

    /// Converts whole milliseconds to nanoseconds.
    pub const fn from_millis(ms: u64) -> Ns {
        Ns(ms * 1_000_000)
    }

    /// Returns the span in seconds.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }
}

impl FromStr for Bytes {
    type Err = ParseQuantityError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let units = BINARY.iter().chain(&DECIMAL).chain(&SHORT);
        parse_size(text, units, "a size such as `16GiB` or `500MB`").map(Bytes)
    }
}

impl FromStr for BytesPerSec {
    type Err = ParseQuantityError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let expected = "a data rate such as `17GB/s`";
        let error = || ParseQuantityError {
            text: text.to_owned(),
            expected,
        };
        let size = text.trim().strip_suffix("/s").ok_or_else(error)?;
        // Rates of links and cards are stated in bits: `12Gb/s` is an eighth of what a reader of `12GB/s` gets.
        if size.ends_with('b') && size.contains(char::is_uppercase) {
            return Err(ParseQuantityError {
                text: text.to_owned(),
                expected: "a data rate in bytes such as `17GB/s`; a small b stands for bits",
            });
        }
        parse_size(size, BINARY.iter().chain(&DECIMAL), expected)
            .map(BytesPerSec)
            .map_err(|_| error())
    }
}

impl FromStr for Ns {
    type Err = ParseQuantityError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text, &TIME, "a duration such as `900s`, `30ms` or `2m`").map(Ns)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_scaled(f, self.0, &BINARY, "")
    }
}

impl fmt::Display for BytesPerSec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_scaled(f, self.0, &DECIMAL, "/s")
    }
}

impl fmt::Display for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pages", self.0)
    }
}

impl fmt::Display for Ns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => write!(f, "0s"),
            ns if ns % 1_000_000_000 == 0 => write!(f, "{}s", ns / 1_000_000_000),
            ns if ns >= 1_000_000_000 => write!(f, "{:.1}s", ns as f64 / 1e9),
            ns if ns % 1_000_000 == 0 => write!(f, "{}ms", ns / 1_000_000),
            ns if ns % 1_000 == 0 => write!(f, "{}us", ns / 1_000),
            ns => write!(f, "{ns}ns"),
        }
    }
}

/// Serde for quantities in the form that people write (`"16GiB"`), used as `#[serde(with = "homenode_units::text")]`. JSON for
/// programs carries plain numbers instead, with the unit in the field's name.
pub mod text {
    use super::{Bytes, BytesPerSec, Ns};
    use serde::{Deserialize, Deserializer, Serializer};
    use std::fmt::Display;
    use std::str::FromStr;

    /// A quantity that is written with its unit in files and flags.
    pub trait Text: FromStr<Err = super::ParseQuantityError> + Display + PartialEq {
        /// Returns the quantity in its smallest unit.
        fn exact(&self) -> String;
    }
    impl Text for Bytes {
        fn exact(&self) -> String {
            format!("{}B", self.0)
        }
    }
    impl Text for BytesPerSec {
        fn exact(&self) -> String {
            format!("{}B/s", self.0)
        }
    }
    impl Text for Ns {
        fn exact(&self) -> String {
            format!("{}ns", self.0)
        }
    }

    /// Writes the form for people, or the smallest unit if a larger one would round, so that the output reads back exactly.
    pub fn serialize<T: Text, S: Serializer>(value: &T, s: S) -> Result<S::Ok, S::Error> {
        let shown = value.to_string();
        let is_exact = shown.parse().is_ok_and(|read: T| read == *value);
        s.serialize_str(&if is_exact { shown } else { value.exact() })
    }

    /// Reads the form for people.
    pub fn deserialize<'de, T: Text, D: Deserializer<'de>>(d: D) -> Result<T, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }

    /// The same for an optional value.
    pub mod option {
        use super::{Deserialize, Deserializer, Serializer, Text};

        /// Writes the form for people, or null.
        pub fn serialize<T: Text, S: Serializer>(value: &Option<T>, s: S) -> Result<S::Ok, S::Error> {
            match value {
                Some(value) => super::serialize(value, s),
                None => s.serialize_none(),
            }
        }

        /// Reads the form for people, or null.
        pub fn deserialize<'de, T: Text, D: Deserializer<'de>>(d: D) -> Result<Option<T>, D::Error> {
            Option::<String>::deserialize(d)?
                .map(|text| text.parse().map_err(serde::de::Error::custom))
                .transpose()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_durations_read_as_people_write_them() {
        assert_eq!("16GiB".parse(), Ok(Bytes::from_gib(16)));
        assert_eq!("500MB".parse(), Ok(Bytes(500_000_000)));
        assert_eq!("1.5 GiB".parse(), Ok(Bytes(3 << 29)));
        for gib in ["2G", "2g", "2gib", "2GIB", "2048M", "2048mib"] {
            assert_eq!(gib.parse(), Ok(Bytes::from_gib(2)), "{gib}");
        }
        assert_eq!("500mb".parse(), Ok(Bytes(500_000_000)));
        assert_eq!("2gb/s".parse(), Ok(BytesPerSec(2_000_000_000)));
        assert_eq!("900s".parse(), Ok(Ns::from_secs(900)));
        assert_eq!("2min".parse(), Ok(Ns::from_secs(120)));
        assert_eq!("2m".parse(), Ok(Ns::from_secs(120)));
        assert_eq!("1d".parse(), Ok(Ns::from_secs(86400)));
        assert_eq!("17.1GB/s".parse(), Ok(BytesPerSec(17_100_000_000)));
    }

    #[test]
    fn what_files_are_written_with_reads_back_exactly() {
        #[derive(serde::Serialize)]
        struct Row<T: text::Text>(#[serde(with = "text")] T);
        fn back<T: text::Text>(value: T) -> (String, T) {
            let text: String = serde_json::from_value(serde_json::json!(Row(value))).unwrap();
            let read = text.parse().unwrap();
            (text, read)
        }
        for ns in [
            0,
            1,
            1_000,
            1_500_000,
            1_250_000_001,
            90_000_000_000,
            1_250_000_000,
            u64::MAX,
        ] {
            assert_eq!(back(Ns(ns)).1, Ns(ns));
        }
        for bytes in [0, 1, 1023, 4097, 3 << 29, (1 << 30) + 1, u64::MAX] {
            assert_eq!(back(Bytes(bytes)).1, Bytes(bytes));
            assert_eq!(back(BytesPerSec(bytes)).1, BytesPerSec(bytes));
        }
        assert_eq!(back(Ns::from_secs(5)).0, "5s");
        assert_eq!(back(Ns::from_millis(1250)).0, "1250000000ns");
        assert_eq!(back(Bytes::from_gib(16)).0, "16GiB");
    }

    #[test]
    fn a_size_without_a_unit_or_out_of_range_is_refused() {
        for bad in [
            "16",
            "",
            "GiB",
            "-1GiB",
            "1e3MB",
            "99999999999TiB",
            "1.2.3GiB",
            "1XB",
            "0.1234567890s",
        ] {
            assert!(bad.parse::<Bytes>().is_err(), "{bad}");
            assert!(bad.parse::<Ns>().is_err(), "{bad}");
        }
        assert!("17GB".parse::<BytesPerSec>().is_err());
        let bits = "12Gb/s".parse::<BytesPerSec>().unwrap_err().to_string();
        assert!(bits.contains("a small b stands for bits"), "{bits}");
        assert_eq!(
            "12q".parse::<Bytes>().unwrap_err().to_string(),
            "`12q` is not a size such as `16GiB` or `500MB`"
        );
    }

    /// Checks that the written amount reads back as the same value, or differs by less than its last digit.
    fn reads_back<T: FromStr + fmt::Display>(
        value: u64,
        wrap: fn(u64) -> T,
        bare: fn(&T) -> u64,
        units: &[(&str, u64)],
    ) {
        let text = wrap(value).to_string();
        let read = text
            .parse::<T>()
            .unwrap_or_else(|_| panic!("{value} is written as {text}, which nothing reads"));
        let unit = units
            .iter()
            .find(|(_, factor)| value >= *factor)
            .map_or(1, |(_, factor)| *factor);
        let off = bare(&read).abs_diff(value);
        assert!(
            off == 0 || off <= unit / 100,
            "{value} is written as {text}, which is {off} off"
        );
        if value.is_multiple_of(unit) {
            assert_eq!(off, 0, "{text}");
        }
    }

    fn all_read_back(value: u64) {
        reads_back(value, Bytes, |bytes| bytes.0, &BINARY);
        reads_back(value, BytesPerSec, |rate| rate.0, &DECIMAL);
        // Long times are written to a tenth of a second.
        let ns = Ns(value).to_string().parse::<Ns>().expect("reads back");
        assert!(ns.0.abs_diff(value) <= if value >= 1_000_000_000 { 100_000_000 } else { 0 });
    }

    #[test]
    fn the_largest_amounts_read_back() {
        for power in 0..64 {
            for near in [-1_i64, 0, 1] {
                all_read_back((1_u64 << power).wrapping_add_signed(near));
            }
        }
        for from_most in [0, 1, 511, 1 << 20, 1 << 32, 1 << 40, 5 << 39] {
            all_read_back(u64::MAX - from_most);
        }
    }

    proptest::proptest! {
        #[test]
        fn any_amount_reads_back(value: u64, shift in 0_u32..64) {
            all_read_back(value >> shift);
        }
    }

    #[test]
    fn what_is_written_reads_back() {
        for bytes in [0, 1, 1023, 1 << 10, 8 << 30, 1 << 45] {
            assert_eq!(Bytes(bytes).to_string().parse(), Ok(Bytes(bytes)));
        }
        for ns in [1, 1_000, 30_000_000, 900_000_000_000] {
            assert_eq!(Ns(ns).to_string().parse(), Ok(Ns(ns)));
        }
    }
}
