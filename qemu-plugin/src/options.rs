//! What is said after the plugin's name on QEMU's command line.

use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;

use homenode_meter::profile::Config;

/// What to do.
pub struct Options {
    /// What to model.
    pub config: Config,
    /// Where to write what was measured.
    pub log: PathBuf,
}

impl Options {
    /// Reads `argc` strings of the form `key=value`.
    ///
    /// # Safety
    /// There are as many strings, each ending with a zero.
    pub unsafe fn of(argc: c_int, argv: *const *const c_char) -> Result<Options, String> {
        let mut options = Options {
            config: Config {
                private_bytes: 256 << 10,
                private_ways: 8,
                line_bytes: 64,
                rate_min: 0.01,
            },
            log: PathBuf::new(),
        };
        for at in 0..usize::try_from(argc).unwrap_or(0) {
            // SAFETY: as this function's contract says.
            let text = unsafe { CStr::from_ptr(*argv.add(at)) };
            let text = text.to_str().map_err(|_| "an argument is not UTF-8".to_owned())?;
            options.take(text)?;
        }
        if options.log.as_os_str().is_empty() {
            return Err("needs log=FILE, where to write what was measured".to_owned());
        }
        let Config {
            private_bytes,
            private_ways,
            line_bytes,
            ..
        } = options.config;
        if private_bytes < line_bytes * private_ways as u64 {
            return Err(format!(
                "private-bytes={private_bytes} holds no set of {private_ways} lines of {line_bytes} bytes"
            ));
        }
        Ok(options)
    }

    fn take(&mut self, text: &str) -> Result<(), String> {
        let (key, value) = text.split_once('=').unwrap_or((text, ""));
        let number = |least: u64, most: u64| match value.parse::<u64>() {
            Ok(number) if (least..=most).contains(&number) => Ok(number),
            _ => Err(format!(
                "{key} is `{value}`; it must be a whole number from {least} to {most}"
            )),
        };
        match key {
            "log" => self.log = value.into(),
            "private-bytes" => self.config.private_bytes = number(64, 1 << 30)?,
            "private-ways" => self.config.private_ways = number(1, 64)? as usize,
            "line-bytes" => match number(16, 4096)? {
                bytes if bytes.is_power_of_two() => self.config.line_bytes = bytes,
                bytes => return Err(format!("line-bytes is {bytes}; it must be a power of two")),
            },
            "rate-min" => match value.parse() {
                Ok(rate) if rate > 0.0 && rate <= 1.0 => self.config.rate_min = rate,
                _ => {
                    return Err(format!(
                        "rate-min is `{value}`; it must lie above 0 and not above 1"
                    ));
                }
            },
            _ => {
                return Err(format!(
                    "`{key}` is no argument: log, private-bytes, private-ways, line-bytes, rate-min"
                ));
            }
        }
        Ok(())
    }
}
