//! Times in the format of RFC 3339.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use chrono::{DateTime, SecondsFormat, Utc};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A wall-clock time in nanoseconds since 1970. It covers the years 1678 to 2261; other times are clamped to this range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct WallTime(pub i64);

impl fmt::Display for WallTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time: DateTime<Utc> = DateTime::from_timestamp_nanos(self.0);
        f.write_str(&time.to_rfc3339_opts(SecondsFormat::Millis, true))
    }
}

/// A text that is not a time.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a time: write `2026-11-24T03:12:00Z`, and `%2B` for a `+` before a zone")]
pub struct NoTime(String);

impl FromStr for WallTime {
    type Err = NoTime;

    fn from_str(text: &str) -> Result<WallTime, NoTime> {
        let time = DateTime::parse_from_rfc3339(text);
        let time = time.map_err(|_| NoTime(text.to_owned()))?;
        let beyond = if time.timestamp() < 0 { i64::MIN } else { i64::MAX };
        Ok(WallTime(time.timestamp_nanos_opt().unwrap_or(beyond)))
    }
}

impl Serialize for WallTime {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for WallTime {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<WallTime, D::Error> {
        let text = String::deserialize(d)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

impl JsonSchema for WallTime {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "WallTime".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "format": "date-time" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_reads_back_to_the_millisecond() {
        let text = "2026-11-24T03:12:00.250Z";
        let time: WallTime = text.parse().unwrap();
        assert_eq!(time.to_string(), text);
        assert_eq!("2026-11-24T04:12:00.250+01:00".parse(), Ok(time));
        for bad in [
            "",
            "03:12",
            "2026-11-24",
            "2026-11-24T03:12:00",
            "2026-11-24T03:12:00 01:00",
        ] {
            let error = bad.parse::<WallTime>().unwrap_err().to_string();
            assert!(error.contains("%2B"), "{bad}");
        }
    }

    #[test]
    fn a_time_beyond_what_can_be_held_is_the_nearest_that_can() {
        assert_eq!("9999-01-01T00:00:00Z".parse(), Ok(WallTime(i64::MAX)));
        assert_eq!("0001-01-01T00:00:00Z".parse(), Ok(WallTime(i64::MIN)));
        assert!(WallTime(i64::MIN).to_string().starts_with("1677"));
    }
}
