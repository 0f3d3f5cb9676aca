//! Valid values of settings. Each `Config` that an operator writes has a table of them, made with [`settings!`](crate::settings).
//! Every setting is checked, because a setting without a row does not compile.

use std::fmt::{self, Display};
use std::ops::RangeInclusive;

/// An invalid setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadSetting {
    /// The setting's key, with the enclosing tables: `overcommit.headroom`.
    pub key: String,
    /// The value that was written.
    pub value: String,
    /// What is wrong with the value.
    pub wrong: Wrong,
}

/// The problem with a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// The setting's value is out of its range.
    Range {
        /// The smallest and the largest valid value.
        from_to: [String; 2],
        /// The default.
        default: String,
    },
    /// The value exceeds another setting, which bounds it.
    MoreThan {
        /// The other setting, with the enclosing tables.
        key: String,
        /// The value of the other setting.
        value: String,
    },
    /// The value names CPUs that the machine does not have.
    NoSuchCpus {
        /// The missing CPUs.
        missing: String,
        /// The machine, and the CPUs that it has.
        there: [Box<str>; 2],
    },
}

impl Display for BadSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "setting `{}` is {}, ", self.key, self.value)?;
        match &self.wrong {
            Wrong::Range {
                from_to: [from, to],
                default,
            } => write!(
                f,
                "but must be from {from} to {to}; change it, or leave it out for its default, {default}"
            ),
            Wrong::MoreThan { key, value } => {
                write!(
                    f,
                    "more than `{key}`, which is {value}; lower the one or raise the other"
                )
            }
            Wrong::NoSuchCpus {
                missing,
                there: [machine, cpus],
            } => write!(
                f,
                "but {machine} has no CPU {missing}; those online are {cpus}: name some of them, or leave it out"
            ),
        }
    }
}

impl std::error::Error for BadSetting {}

impl BadSetting {
    /// Checks that a setting does not exceed another. Each argument is a key with its value.
    ///
    /// # Errors
    /// If the setting exceeds the other.
    pub fn unless_ordered<T: PartialOrd + Display>(
        (key, value): (&str, T),
        (bound_key, bound): (&str, T),
    ) -> Result<(), BadSetting> {
        if value <= bound {
            return Ok(());
        }
        Err(BadSetting {
            key: key.to_owned(),
            value: value.to_string(),
            wrong: Wrong::MoreThan {
                key: bound_key.to_owned(),
                value: bound.to_string(),
            },
        })
    }

    /// Returns the same error with the section's name before its keys.
    #[must_use]
    pub fn of(mut self, section: &str) -> BadSetting {
        let inside = |key: &str| format!("{section}.{key}");
        self.key = inside(&self.key);
        if let Wrong::MoreThan { key, .. } = &mut self.wrong {
            *key = inside(key);
        }
        self
    }

    /// Returns the key from the message of such an error, because readers of files get these errors only as text.
    pub fn key_of(message: &str) -> Option<&str> {
        let rest = message.strip_prefix("setting `")?;
        rest.split_once("` is ").map(|(key, _)| key)
    }
}

/// Settings that an operator writes and that need checks.
pub trait Settings {
    /// Checks all settings.
    ///
    /// # Errors
    /// The first setting that is out of its range, or contradicts another.
    fn check(&self) -> Result<(), BadSetting>;
}

/// The valid values of a setting.
pub trait Allowed<T> {
    /// Checks a setting; `default` is its value if the file omits it.
    ///
    /// # Errors
    /// A setting that is out of its range.
    fn check(&self, key: &str, value: &T, default: &T) -> Result<(), BadSetting>;
}

/// Accepts any value of the type: words, sets, yes or no.
#[derive(Clone, Copy, Debug)]
pub struct Any;

impl<T> Allowed<T> for Any {
    fn check(&self, _: &str, _: &T, _: &T) -> Result<(), BadSetting> {
        Ok(())
    }
}

/// A section that checks its own settings.
#[derive(Clone, Copy, Debug)]
pub struct Section;

impl<T: Settings> Allowed<T> for Section {
    fn check(&self, key: &str, value: &T, _: &T) -> Result<(), BadSetting> {
        value.check().map_err(|bad| bad.of(key))
    }
}

/// Accepts values between both ends, ends included. NaN is in no range.
impl<T: PartialOrd + Display> Allowed<T> for RangeInclusive<T> {
    fn check(&self, key: &str, value: &T, default: &T) -> Result<(), BadSetting> {
        if self.contains(value) {
            return Ok(());
        }
        // TOML writes NaN in lower case.
        let value = value.to_string().replace("NaN", "nan");
        Err(BadSetting {
            key: key.to_owned(),
            value,
            wrong: Wrong::Range {
                from_to: [self.start().to_string(), self.end().to_string()],
                default: default.to_string(),
            },
        })
    }
}

/// Implements [`Settings`](crate::Settings) for a `Config` that has a default. The table has one row `key: valid values` for each
/// setting. A function that checks relations between settings may follow the rows.
#[macro_export]
macro_rules! settings {
    ($config:ty { $($key:ident: $allowed:expr),* $(,)? } $($relations:path)?) => {
        impl $crate::Settings for $config {
            fn check(&self) -> Result<(), $crate::BadSetting> {
                let default = <$config>::default();
                // Lists all fields by name, so a field without a row is a compile error here.
                let Self { $($key),* } = self;
                $($crate::Allowed::check(&$allowed, stringify!($key), $key, &default.$key)?;)*
                $($relations(self)?;)?
                Ok(())
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Bytes, Ns};

    #[derive(Debug)]
    struct Inner {
        share: f64,
        lease: Ns,
    }

    impl Default for Inner {
        fn default() -> Inner {
            Inner {
                share: 0.5,
                lease: Ns::from_secs(10),
            }
        }
    }

    crate::settings! { Inner { share: 0.0..=0.9, lease: Ns::from_millis(100)..=Ns::from_secs(60) } }

    #[derive(Debug, Default)]
    struct Outer {
        inner: Inner,
        least: Bytes,
        most: Bytes,
    }

    crate::settings! {
        Outer { inner: Section, least: Bytes::ZERO..=Bytes::from_gib(1), most: Any } ordered
    }

    fn ordered(outer: &Outer) -> Result<(), BadSetting> {
        BadSetting::unless_ordered(("least", outer.least), ("most", outer.most))
    }

    #[test]
    fn a_setting_out_of_range_is_refused_with_key_value_range_and_default() {
        assert_eq!(Outer::default().check(), Ok(()));
        for share in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.1, 0.91] {
            let inner = Inner {
                share,
                ..Inner::default()
            };
            let outer = Outer {
                inner,
                ..Outer::default()
            };
            assert_eq!(outer.check().expect_err("out of range").key, "inner.share");
        }
        let inner = Inner {
            lease: Ns::ZERO,
            ..Inner::default()
        };
        let said = Outer {
            inner,
            ..Outer::default()
        }
        .check()
        .expect_err("no lease")
        .to_string();
        assert_eq!(
            said,
            "setting `inner.lease` is 0s, but must be from 100ms to 60s; change it, or leave it out for its default, 10s"
        );
        assert_eq!(BadSetting::key_of(&said), Some("inner.lease"));
    }

    #[test]
    fn settings_that_contradict_each_other_are_refused() {
        let outer = Outer {
            least: Bytes(2),
            most: Bytes(1),
            ..Outer::default()
        };
        assert_eq!(
            outer.check().expect_err("a contradiction").to_string(),
            "setting `least` is 2B, more than `most`, which is 1B; lower the one or raise the other"
        );
    }
}
