//! Times as operators write and read them: by the wall clock, in the host's time zone.

use std::fmt;
use std::str::FromStr;

use chrono::{DateTime, Local, NaiveDate, NaiveDateTime, NaiveTime, SecondsFormat, TimeDelta, TimeZone};
use homenode_units::Ns;

/// A time on the wall clock, in nanoseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Wall(pub i64);

impl fmt::Display for Wall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let local = DateTime::from_timestamp_nanos(self.0).with_timezone(&Local);
        f.write_str(&local.to_rfc3339_opts(SecondsFormat::Millis, true))
    }
}

/// Converts a time to the wall clock in the host's time zone.
pub fn local(wall_ns: i64) -> NaiveDateTime {
    DateTime::from_timestamp_nanos(wall_ns)
        .with_timezone(&Local)
        .naive_local()
}

/// A requested time: absolute, or a duration before now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Time {
    /// A time this long before now.
    Ago(Ns),
    /// A time of day: today, or yesterday if that time is still to come today.
    OfDay(NaiveTime),
    /// A date and time, in the host's time zone.
    Local(NaiveDateTime),
    /// A time in nanoseconds since 1970.
    At(i64),
}

/// A time that does not exist, or is too far away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoSuchTime(Time);

impl std::error::Error for NoSuchTime {}

impl fmt::Display for NoSuchTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Time::Ago(ago) => write!(f, "{ago} ago is too far in the past"),
            Time::OfDay(time) => write!(f, "{time} did not occur in the last two days"),
            Time::Local(at) => write!(
                f,
                "{at} does not exist in this host's time zone: clocks are set forward past it, or it is too far away"
            ),
            Time::At(at) => write!(f, "there is no time {at}"),
        }
    }
}

impl FromStr for Time {
    type Err = String;

    fn from_str(text: &str) -> Result<Time, String> {
        let text = text.trim();
        if let Ok(at) = DateTime::parse_from_rfc3339(text) {
            return at
                .timestamp_nanos_opt()
                .map(Time::At)
                .ok_or_else(|| format!("`{text}` is out of range: times are from 1678 to 2261"));
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
            format!("`{text}` is not a valid time: write 03:12, '2026-11-23 03:12', 2026-11-23T03:12:00+01:00, or how long ago, such as 15m")
        })
    }
}

impl Time {
    /// Returns the time in nanoseconds since 1970, if the time is now `now_ns`.
    ///
    /// # Errors
    /// A time that does not exist, or is too far away.
    pub fn ns(self, now_ns: i64) -> Result<i64, NoSuchTime> {
        self.within(&Local, now_ns).ok_or(NoSuchTime(self))
    }

    /// Like [`Time::ns`], in a given zone. Returns `None` if there is no such time.
    fn within<Z: TimeZone>(self, zone: &Z, now_ns: i64) -> Option<i64> {
        match self {
            Time::Ago(ago) => now_ns.checked_sub(i64::try_from(ago.0).ok()?),
            Time::At(at) => Some(at),
            // If clocks are set back, an hour occurs twice; take the first.
            Time::Local(at) => zone.from_local_datetime(&at).earliest()?.timestamp_nanos_opt(),
            Time::OfDay(time) => {
                let now = DateTime::from_timestamp_nanos(now_ns).with_timezone(zone);
                let today = now.date_naive();
                // If clocks are set forward, the time may not exist on that day. If they are set back, it may occur twice.
                let days = (0..=2).filter_map(|days| today.checked_sub_signed(TimeDelta::days(days)));
                let times = days.flat_map(|day| {
                    let on_day = zone.from_local_datetime(&day.and_time(time));
                    [on_day.clone().latest(), on_day.earliest()]
                });
                let mut times = times.flatten().filter_map(|at| at.timestamp_nanos_opt());
                times.find(|at| *at <= now_ns)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use chrono::{FixedOffset, MappedLocalTime};

    use super::*;

    /// A zone whose clocks are one hour ahead of UTC, and two hours in summer.
    #[derive(Clone, Copy, Debug)]
    struct Berlin;

    fn hours(count: i32) -> FixedOffset {
        FixedOffset::east_opt(3600 * count).unwrap()
    }

    impl TimeZone for Berlin {
        type Offset = FixedOffset;

        fn from_offset(_: &FixedOffset) -> Berlin {
            Berlin
        }

        fn offset_from_local_date(&self, day: &NaiveDate) -> MappedLocalTime<FixedOffset> {
            self.offset_from_local_datetime(&day.and_time(NaiveTime::MIN))
        }

        fn offset_from_local_datetime(&self, at: &NaiveDateTime) -> MappedLocalTime<FixedOffset> {
            let is_it = |offset: &FixedOffset| self.offset_from_utc_datetime(&(*at - *offset)) == *offset;
            match [hours(2), hours(1)].map(|offset| Some(offset).filter(is_it)) {
                [Some(summer), Some(winter)] => MappedLocalTime::Ambiguous(summer, winter),
                [None, None] => MappedLocalTime::None,
                [summer, winter] => summer
                    .or(winter)
                    .map_or(MappedLocalTime::None, MappedLocalTime::Single),
            }
        }

        fn offset_from_utc_date(&self, day: &NaiveDate) -> FixedOffset {
            self.offset_from_utc_datetime(&day.and_time(NaiveTime::MIN))
        }

        fn offset_from_utc_datetime(&self, at: &NaiveDateTime) -> FixedOffset {
            let change = |month, day| {
                let day = NaiveDate::from_ymd_opt(2026, month, day).unwrap();
                day.and_hms_opt(1, 0, 0).unwrap()
            };
            hours(if (change(3, 29)..change(10, 25)).contains(at) {
                2
            } else {
                1
            })
        }
    }

    fn ns(text: &str) -> i64 {
        match text.parse().unwrap() {
            Time::At(at) => at,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_time_of_the_day_is_the_last_one_that_was_also_where_clocks_are_set() {
        for (now, time, then) in [
            // Clocks are set forward at two, so there is no half past two on that day. The last one was on the day before.
            ("2026-03-29T12:00:00+02:00", "02:30", "2026-03-28T02:30:00+01:00"),
            ("2026-03-29T01:00:00+01:00", "02:30", "2026-03-28T02:30:00+01:00"),
            ("2026-03-30T12:00:00+02:00", "02:30", "2026-03-30T02:30:00+02:00"),
            // Clocks are set back at three, so half past two occurs twice.
            ("2026-10-25T02:45:00+02:00", "02:30", "2026-10-25T02:30:00+02:00"),
            ("2026-10-25T02:15:00+01:00", "02:30", "2026-10-25T02:30:00+02:00"),
            ("2026-10-25T02:45:00+01:00", "02:30", "2026-10-25T02:30:00+01:00"),
            ("2026-10-25T12:00:00+01:00", "02:30", "2026-10-25T02:30:00+01:00"),
            ("2026-11-24T12:00:00+01:00", "12:00", "2026-11-24T12:00:00+01:00"),
            ("2026-11-24T12:00:00+01:00", "12:01", "2026-11-23T12:01:00+01:00"),
        ] {
            let of_day: Time = time.parse().unwrap();
            assert_eq!(of_day.within(&Berlin, ns(now)), Some(ns(then)), "{time} at {now}");
        }
    }

    #[test]
    fn a_time_that_there_is_not_is_said_to_be_none() {
        let skipped: Time = "2026-03-29 02:30".parse().unwrap();
        assert_eq!(skipped.within(&Berlin, 0), None);
        let twice: Time = "2026-10-25 02:30".parse().unwrap();
        assert_eq!(twice.within(&Berlin, 0), Some(ns("2026-10-25T02:30:00+02:00")));
        let far: Time = "2500-01-01 00:00".parse().unwrap();
        let said = far.ns(0).unwrap_err().to_string();
        assert!(said.contains("2500-01-01 00:00:00"), "{said}");
        assert!("2500-01-01T00:00:00Z".parse::<Time>().is_err());
    }

    #[test]
    fn times_are_read_as_operators_write_them() {
        let now = "2026-11-23T12:00:00Z".parse::<Time>().unwrap();
        let Time::At(now) = now else { panic!("{now:?}") };
        let at = |text: &str| text.parse::<Time>().unwrap().ns(now).unwrap();
        assert_eq!(at("15m"), now - 900_000_000_000);
        assert_eq!(at("2026-11-23T13:00:00+01:00"), now);
        // A time of day is taken as its last occurrence before now.
        for text in ["03:12", "23:59:59", "12:00"] {
            let passed = now - at(text);
            assert!(
                (0..86_400_000_000_000 + 3_600_000_000_000).contains(&passed),
                "{text}: {passed}"
            );
        }
        // A time in the format that is shown is accepted as input.
        let shown = Wall(now).to_string();
        assert_eq!(at(&shown), now, "{shown}");
        assert!("yesterday".parse::<Time>().unwrap_err().contains("03:12"));
        assert!("25:00".parse::<Time>().is_err());
    }
}
