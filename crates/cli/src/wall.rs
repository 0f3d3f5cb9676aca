//! Times as operators write and read them: by the wall clock, in the host's own zone.

use std::fmt;
use std::str::FromStr;

use chrono::{DateTime, Local, NaiveDate, NaiveDateTime, NaiveTime, SecondsFormat, TimeDelta, TimeZone};
use homenode_units::Ns;

use crate::bad_input;
use crate::record::now_ns;

/// Nanoseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Wall(pub i64);

impl fmt::Display for Wall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let local = DateTime::from_timestamp_nanos(self.0).with_timezone(&Local);
        f.write_str(&local.to_rfc3339_opts(SecondsFormat::Millis, true))
    }
}

/// A time of the wall clock in the host's own zone.
pub fn local(wall_ns: i64) -> NaiveDateTime {
    DateTime::from_timestamp_nanos(wall_ns)
        .with_timezone(&Local)
        .naive_local()
}

/// A time that was asked for: absolute, or a duration before now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Time {
    /// That long before now.
    Ago(Ns),
    /// At this time of this day; of the day before where that is still to come.
    OfDay(NaiveTime),
    /// Then, in the host's zone.
    Local(NaiveDateTime),
    /// Then.
    At(i64),
}

impl FromStr for Time {
    type Err = String;

    fn from_str(text: &str) -> Result<Time, String> {
        let text = text.trim();
        if let Ok(at) = DateTime::parse_from_rfc3339(text) {
            return at
                .timestamp_nanos_opt()
                .map(Time::At)
                .ok_or_else(|| format!("`{text}` is too far away"));
        }
        for form in [
            "%Y-%m-%d %H:%M:%S%.f",
            "%Y-%m-%d %H:%M",
            "%Y-%m-%dT%H:%M:%S%.f",
            "%Y-%m-%dT%H:%M",
        ] {
            if let Ok(at) = NaiveDateTime::parse_from_str(text, form) {
                return Ok(Time::Local(at));
            }
        }
        if let Ok(day) = NaiveDate::parse_from_str(text, "%Y-%m-%d") {
            return Ok(Time::Local(day.and_time(NaiveTime::MIN)));
        }
        for form in ["%H:%M:%S%.f", "%H:%M"] {
            if let Ok(at) = NaiveTime::parse_from_str(text, form) {
                return Ok(Time::OfDay(at));
            }
        }
        text.parse().map(Time::Ago).map_err(|_| {
            format!("`{text}` is no time: write 03:12, '2026-11-23 03:12', 2026-11-23T03:12:00+01:00, or how long ago, such as 15m")
        })
    }
}

impl Time {
    /// In nanoseconds since 1970, where it is now `now_ns`.
    pub fn ns(self, now_ns: i64) -> Option<i64> {
        let now = DateTime::from_timestamp_nanos(now_ns).with_timezone(&Local);
        // Where clocks are set back an hour is there twice: the first.
        let local = |at: NaiveDateTime| Local.from_local_datetime(&at).earliest()?.timestamp_nanos_opt();
        match self {
            Time::Ago(ago) => now_ns.checked_sub(i64::try_from(ago.0).ok()?),
            Time::At(at) => Some(at),
            Time::Local(at) => local(at),
            Time::OfDay(time) => {
                let today = now.date_naive().and_time(time);
                let at = local(today)?;
                if at <= now_ns {
                    Some(at)
                } else {
                    local(today.checked_sub_signed(TimeDelta::days(1))?)
                }
            }
        }
    }
}

/// Two times in nanoseconds since 1970, where they are given.
///
/// # Errors
/// A time that is none, or two in the wrong order.
pub fn range(from: Option<&Time>, to: Option<&Time>) -> anyhow::Result<(Option<i64>, Option<i64>)> {
    let now = now_ns();
    let of = |time: &Time| {
        time.ns(now)
            .ok_or_else(|| bad_input(format!("there is no such time here: {time:?}")))
    };
    let (from, to) = (from.map(of).transpose()?, to.map(of).transpose()?);
    if let (Some(from), Some(to)) = (from, to)
        && from > to
    {
        return Err(bad_input(format!(
            "--from ({}) is after --to ({})",
            Wall(from),
            Wall(to)
        )));
    }
    Ok((from, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_operators_write_them() {
        let now = "2026-11-23T12:00:00Z".parse::<Time>().unwrap();
        let Time::At(now) = now else { panic!("{now:?}") };
        let at = |text: &str| text.parse::<Time>().unwrap().ns(now).unwrap();
        assert_eq!(at("15m"), now - 900_000_000_000);
        assert_eq!(at("2026-11-23T13:00:00+01:00"), now);
        // A time of the day is the last one that was.
        for text in ["03:12", "23:59:59", "12:00"] {
            let passed = now - at(text);
            assert!(
                (0..86_400_000_000_000 + 3_600_000_000_000).contains(&passed),
                "{text}: {passed}"
            );
        }
        // What is shown can be asked for.
        let shown = Wall(now).to_string();
        assert_eq!(at(&shown), now, "{shown}");
        assert!("yesterday".parse::<Time>().unwrap_err().contains("03:12"));
        assert!("25:00".parse::<Time>().is_err());
    }
}
