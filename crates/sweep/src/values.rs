//! Parses values of a key: lists `a,b,c`, ranges `50k..3M/20`, and TOML lists.

use homenode_units::{Bytes, BytesPerSec, Ns};
use toml::Value;

/// Maximum number of values of a key; a larger number is probably a typo.
const VALUES_MAX: usize = 100_000;

/// A value of a key: in TOML and, if it is numeric, also as a number in bytes, bytes per second, seconds, or without a unit.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Setting {
    /// The value for the scenario.
    pub value: Value,
    /// The number for tables.
    pub number: Option<f64>,
}

impl Setting {
    /// Converts a TOML value.
    pub(crate) fn of(value: Value) -> Setting {
        let number = match &value {
            Value::Integer(whole) => Some(*whole as f64),
            Value::Float(number) => Some(*number),
            Value::String(text) => quantity(text).map(Quantity::shown),
            _ => None,
        };
        Setting { value, number }
    }

    /// Parses an unquoted value: a number or boolean if possible, else text.
    fn bare(text: &str) -> Setting {
        let whole = || text.parse().ok().map(Value::Integer);
        let real = || {
            let number: Option<f64> = text.parse().ok();
            number.filter(|number| number.is_finite()).map(Value::Float)
        };
        let truth = || text.parse().ok().map(Value::Boolean);
        let value = whole().or_else(real).or_else(truth);
        Setting::of(value.unwrap_or_else(|| Value::String(text.to_owned())))
    }

    /// Formats the value for people.
    pub(crate) fn text(&self) -> String {
        match &self.value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Unit {
    None,
    Count,
    Bytes,
    Rate,
    Time,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Quantity {
    amount: f64,
    unit: Unit,
}

impl Quantity {
    fn shown(self) -> f64 {
        match self.unit {
            Unit::Time => self.amount / 1e9,
            _ => self.amount,
        }
    }
}

fn quantity(text: &str) -> Option<Quantity> {
    let text = text.trim();
    let of = |amount, unit| Some(Quantity { amount, unit });
    let number = |text: &str| text.parse::<f64>().ok().filter(|number| number.is_finite());
    if let Some(plain) = number(text) {
        return of(plain, Unit::None);
    }
    let counted = [("k", 1e3), ("M", 1e6), ("G", 1e9)]
        .into_iter()
        .find_map(|(unit, factor)| Some(number(text.strip_suffix(unit)?)? * factor));
    if let Some(count) = counted {
        return of(count, Unit::Count);
    }
    let time = || text.parse().ok().map(|Ns(ns)| (ns, Unit::Time));
    let rate = || text.parse().ok().map(|BytesPerSec(rate)| (rate, Unit::Rate));
    let size = || text.parse().ok().map(|Bytes(size)| (size, Unit::Bytes));
    let (amount, unit) = time().or_else(rate).or_else(size)?;
    of(amount as f64, unit)
}

/// Why a text cannot be read as values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ValuesError {
    /// The list is not valid TOML.
    #[error("`{text}`: {why}")]
    Malformed {
        /// The text.
        text: String,
        /// The parser's message.
        why: String,
    },
    /// The text begins like a list, but is not a TOML list.
    #[error("`{0}` is not a TOML list")]
    NoList(String),
    /// Nothing stands between two commas.
    #[error("`{0}` has an empty value: write `a,b,c`, or a range such as `50k..3M/20`")]
    EmptyValue(String),
    /// The list is empty.
    #[error("the list of values is empty")]
    Empty,
    /// A value occurs twice.
    #[error("value {0} is given twice")]
    Twice(String),
    /// The range is impossible.
    #[error(
        "range `{text}`: {why}; write it as `FROM..TO/COUNT`, such as `50k..3M/20`, or `50k..3M/20/geometric`"
    )]
    Range {
        /// The text.
        text: String,
        /// The reason.
        why: String,
    },
    /// The seeds are impossible.
    #[error("seeds `{text}`: {why}; write `1..10`, or `1,2,5`")]
    Seeds {
        /// The text.
        text: String,
        /// The reason.
        why: String,
    },
}

/// Parses values of the command line: `a,b,c`, `FROM..TO/COUNT`, `FROM..TO/COUNT/geometric`, or a TOML list.
///
/// # Errors
/// Text in none of these forms.
pub(crate) fn parse(text: &str) -> Result<Vec<Setting>, ValuesError> {
    let text = text.trim();
    if text.starts_with('[') {
        let malformed = |error: toml::de::Error| ValuesError::Malformed {
            text: text.to_owned(),
            why: error.message().to_owned(),
        };
        let table: toml::Table = toml::from_str(&format!("v = {text}")).map_err(malformed)?;
        return match table.get("v") {
            Some(Value::Array(list)) => listed(list),
            _ => Err(ValuesError::NoList(text.to_owned())),
        };
    }
    let values: Vec<Setting> = match text.contains("..") {
        true => range(text)?,
        false => text.split(',').map(str::trim).map(Setting::bare).collect(),
    };
    if values.iter().any(|value| value.text().is_empty()) {
        return Err(ValuesError::EmptyValue(text.to_owned()));
    }
    distinct(values)
}

/// Converts the values of a TOML list.
///
/// # Errors
/// An empty list, or duplicate values.
pub(crate) fn listed(list: &[Value]) -> Result<Vec<Setting>, ValuesError> {
    if list.is_empty() {
        return Err(ValuesError::Empty);
    }
    distinct(list.iter().cloned().map(Setting::of).collect())
}

fn distinct(values: Vec<Setting>) -> Result<Vec<Setting>, ValuesError> {
    let mut seen: Vec<String> = values.iter().map(|value| value.value.to_string()).collect();
    seen.sort_unstable();
    match seen.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(ValuesError::Twice(pair[0].clone())),
        None => Ok(values),
    }
}

fn range(text: &str) -> Result<Vec<Setting>, ValuesError> {
    let bad = |why: &str| ValuesError::Range {
        text: text.to_owned(),
        why: why.to_owned(),
    };
    let (from, rest) = text.split_once("..").ok_or_else(|| bad("it has no `..`"))?;
    let mut parts = rest.split('/').map(str::trim).collect::<Vec<_>>();
    let is_geometric = parts.len() > 1 && parts.last() == Some(&"geometric");
    if is_geometric {
        parts.pop();
    }
    let whole = |text: &str| text.trim().parse::<i64>().ok();
    // Rates contain a slash themselves: `1GB/s..4GB/s/4`.
    let counted = parts.len() > 1 && parts.last() != Some(&"s");
    let count = if counted { parts.pop() } else { None };
    let to = parts.join("/");
    let ends = quantity(from).zip(quantity(&to));
    let (first, last) = ends.ok_or_else(|| bad("its ends are not numbers, sizes, rates or times"))?;
    if first.unit != last.unit
        && ![first.unit, last.unit]
            .iter()
            .all(|unit| matches!(unit, Unit::None | Unit::Count))
    {
        return Err(bad("its ends have different units"));
    }
    if first.amount > last.amount {
        return Err(bad("its beginning is above its end"));
    }
    let count = match count {
        Some(count) => count
            .parse::<usize>()
            .map_err(|_| bad(&format!("`{count}` is not a number of values")))?,
        None => match whole(from).zip(whole(&to)) {
            Some((from, to)) => usize::try_from(to.saturating_sub(from))
                .unwrap_or(usize::MAX)
                .saturating_add(1),
            None => return Err(bad("the number of values is missing")),
        },
    };
    match count {
        0 => return Err(bad("it must have at least one value")),
        1 if first.amount < last.amount => return Err(bad("a single value cannot be both ends")),
        2.. if first.amount == last.amount => return Err(bad("its ends are the same")),
        count if count > VALUES_MAX => return Err(bad(&format!("it has more than {VALUES_MAX} values"))),
        _ => {}
    }
    if is_geometric && first.amount <= 0.0 {
        return Err(bad("a geometric range must begin above 0"));
    }
    let unit = match (first.unit, last.unit) {
        (Unit::None, Unit::Count) => Unit::Count,
        (unit, _) => unit,
    };
    let is_whole = whole(from).is_some() && whole(&to).is_some();
    let at = |at: usize| {
        let (at, steps) = (at as f64, (count.max(2) - 1) as f64);
        match at {
            0.0 => first.amount,
            _ if at == steps => last.amount,
            _ if is_geometric => first.amount * libm::pow(last.amount / first.amount, at / steps),
            // With the operations in this order, whole numbers stay whole.
            _ => first.amount + (last.amount - first.amount) * at / steps,
        }
    };
    distinct((0..count).map(|step| made(at(step), unit, is_whole)).collect())
}

fn made(amount: f64, unit: Unit, is_whole: bool) -> Setting {
    let whole = amount.round() as i64;
    let value = match unit {
        Unit::None if is_whole && amount.fract() == 0.0 => Value::Integer(whole),
        Unit::None => Value::Float(amount),
        Unit::Count => Value::Integer(whole),
        Unit::Bytes => Value::String(format!("{whole}B")),
        Unit::Rate => Value::String(format!("{whole}B/s")),
        Unit::Time => Value::String(format!("{whole}ns")),
    };
    Setting::of(value)
}

/// Parses seeds: `1..10`, which includes both ends, `1,2,5`, or `7`.
///
/// # Errors
/// A text that is not a list of seeds.
pub fn seeds(text: &str) -> Result<Vec<u64>, ValuesError> {
    let bad = |why: &str| ValuesError::Seeds {
        text: text.to_owned(),
        why: why.to_owned(),
    };
    let number = |text: &str| {
        text.trim()
            .parse::<u64>()
            .map_err(|_| bad("a seed must be a whole number, 0 or above"))
    };
    if let Some((from, to)) = text.split_once("..") {
        let (from, to) = (number(from)?, number(to)?);
        return match to.checked_sub(from) {
            None => Err(bad("their beginning is above their end")),
            Some(more) if more >= VALUES_MAX as u64 => Err(bad(&format!("there are more than {VALUES_MAX}"))),
            Some(_) => Ok((from..=to).collect()),
        };
    }
    let seeds: Vec<u64> = text.split(',').map(number).collect::<Result<_, _>>()?;
    let mut sorted = seeds.clone();
    sorted.sort_unstable();
    if sorted.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(bad("a seed is given twice"));
    }
    Ok(seeds)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn texts(text: &str) -> Vec<String> {
        parse(text).unwrap().iter().map(Setting::text).collect()
    }

    #[test]
    fn ranges_by_hand() {
        assert_eq!(texts("50k..3M/3"), ["50000", "1525000", "3000000"]);
        assert_eq!(texts("1..4"), ["1", "2", "3", "4"]);
        assert_eq!(texts("1..4/3"), ["1", "2.5", "4"]);
        assert_eq!(texts("1..100/3/geometric"), ["1", "10", "100"]);
        assert_eq!(
            texts("1GiB..3GiB/3"),
            ["1073741824B", "2147483648B", "3221225472B"]
        );
        assert_eq!(texts("1GB/s..2GB/s/2"), ["1000000000B/s", "2000000000B/s"]);
        assert_eq!(parse("1s..2s/3").unwrap()[1].number, Some(1.5));
        assert_eq!(texts("a, b,2"), ["a", "b", "2"]);
        assert_eq!(texts("[\"4\", 5]"), ["4", "5"]);
        assert_eq!(parse("[\"250k\"]").unwrap()[0].number, Some(250e3));
    }

    #[test]
    fn what_is_no_values_is_said() {
        for (text, said) in [
            ("3M..50k/20", "beginning is above its end"),
            ("50k..3M/0", "it must have at least one value"),
            ("50k..3M", "the number of values is missing"),
            ("50k..3M/1", "a single value cannot be both ends"),
            ("50k..50k/3", "its ends are the same"),
            ("50k..3M/x", "`x` is not a number of values"),
            ("1..1000000000", "more than 100000 values"),
            ("1s..3GiB/3", "different units"),
            ("a..b/3", "its ends are not numbers"),
            ("0..3/3/geometric", "begin above 0"),
            ("a,,b", "has an empty value"),
            ("1,1", "value 1 is given twice"),
            ("[]", "empty"),
            ("[1", "`[1`"),
            ("", "has an empty value"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(said), "{text}: {error}");
        }
    }

    #[test]
    fn seeds_by_hand() {
        assert_eq!(seeds("1..3"), Ok(vec![1, 2, 3]));
        assert_eq!(seeds("7, 2"), Ok(vec![7, 2]));
        for (text, said) in [
            ("3..1", "above"),
            ("1,1", "twice"),
            ("-1", "0 or above"),
            ("0..9999999", "more"),
        ] {
            let error = seeds(text).unwrap_err().to_string();
            assert!(error.contains(said), "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_range_has_its_ends_and_ascends(from in -1e6..1e6f64, more in 1e-3..1e6f64, count in 2..50usize) {
            let values = parse(&format!("{from}..{}/{count}", from + more)).unwrap();
            let numbers: Vec<f64> = values.iter().filter_map(|value| value.number).collect();
            prop_assert_eq!(numbers.len(), count);
            prop_assert_eq!((numbers[0], numbers[count - 1]), (from, from + more));
            prop_assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]));
        }

        #[test]
        fn no_text_panics(text in ".{0,20}") {
            let _ = (parse(&text), seeds(&text));
        }
    }
}
