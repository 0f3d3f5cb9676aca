//! The behaviour of a testbed guest, as a type that the case and the guest share.
//!
//! A case writes a [`Behaviour`] on the guest's kernel command line (`homenode.do=busy=2,touch=40`), schedules changes
//! (`homenode.at=30:busy=0`), or sends it as a line on the serial console. The guest's init parses the same text. As both
//! sides use one type, a case cannot request what the guest does not know.

use std::fmt;
use std::str::FromStr;

/// Kernel command line key of the guest's behaviour from boot on.
pub const KEY_DO: &str = "homenode.do=";
/// Kernel command line key of a later change: `homenode.at=SECONDS:BEHAVIOUR`. May be repeated.
pub const KEY_AT: &str = "homenode.at=";

/// Printed on the console once the behaviour on the command line is in force.
pub const MARKER_READY: &str = "READY";
/// Printed once a later behaviour is in force.
pub const MARKER_PHASE: &str = "PHASE";
/// Printed in answer to the console command `report`.
pub const MARKER_REPORT: &str = "REPORT";
/// Answers the console command `check`: how many pages are held, and how many of them differ from what was written.
pub const MARKER_CHECKED: &str = "CHECKED";
/// Answers the console command `disk`: how many blocks were written, and how many differ from what was last written to them.
pub const MARKER_DISK: &str = "DISK";
/// Answers the console command `up`: the MAC of the NIC that is up.
pub const MARKER_UP: &str = "UP";
/// Printed once a sweep has made all its passes.
pub const MARKER_SWEPT: &str = "SWEPT";
/// Begins the console command that runs a shell command line. The initramfs must contain `/bin/busybox` and the programs.
pub const COMMAND_RUN: &str = "run ";
/// Printed when the command line has ended, with its exit status.
pub const MARKER_RAN: &str = "RAN";
/// Answers the console command `nodes`: the list of CPUs of each node.
pub const MARKER_NODES: &str = "NODES";
/// Answers the console command `holds`: how many pages of each node belong to this program.
pub const MARKER_HOLDS: &str = "HOLDS";
/// Answers the console command `follow` once the topology page's module is loaded.
pub const MARKER_FOLLOWS: &str = "FOLLOWS";
/// Printed when a command or a module could not be used.
pub const MARKER_ERROR: &str = "ERROR";

/// Stands for any vCPU where a vCPU's number is expected.
const ANY: &str = "any";

/// The work of a guest's vCPUs, and how it uses its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Behaviour {
    /// Number of threads that compute. If `pinned`, thread `i` stays on vCPU `i` modulo the number of vCPUs.
    pub busy: u32,
    /// Share of the time that a busy thread computes, in percent of a period of 20 ms.
    pub duty_percent: u32,
    /// Whether each busy thread stays on its own vCPU.
    pub pinned: bool,
    /// Memory that the guest holds and writes, in MiB.
    pub touch_mib: u32,
    /// The vCPU from which that memory is written first; if absent, the guest's kernel chooses one.
    pub touch_on: Option<u32>,
    /// Pause between two passes that write that memory, in milliseconds; 0 means that it is written only once.
    pub every_ms: u32,
    /// Size of the part of that memory that the passes write, in MiB; 0 means all of it.
    pub hot_mib: u32,
    /// The passes write only every `stride`-th page, from the first on.
    pub stride: u32,
    /// The kind of access that a sweep makes to each page of that memory. A sweep makes its passes without pause.
    pub sweep: Sweep,
    /// Number of passes of a sweep. After the last one, the guest reports, and does nothing more.
    pub passes: u32,
    /// Memory in KiB that one further thread reads repeatedly, one line of 64 bytes at a time.
    pub walk_kib: u32,
    /// Steps of arithmetic that this thread does after each line.
    pub think: u32,
    /// Milliseconds for which this thread reads, and then rests, in turn; 0 means that it never rests.
    pub burst_ms: u32,
    /// Size of the part of its disk that a domU writes repeatedly, in MiB; 0 for none.
    pub disk_mib: u32,
}

/// The access that each pass of a sweep makes to a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sweep {
    /// The guest makes no sweep.
    Off,
    /// Reads the page.
    Read,
    /// Writes the page.
    Write,
    /// Reads the page and then writes it.
    ReadWrite,
}

impl Sweep {
    const NAMES: [(Sweep, &'static str); 4] = [
        (Sweep::Off, "off"),
        (Sweep::Read, "r"),
        (Sweep::Write, "w"),
        (Sweep::ReadWrite, "rw"),
    ];
}

impl fmt::Display for Sweep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Sweep::NAMES.iter().find(|(sweep, _)| sweep == self);
        f.write_str(name.map_or("", |(_, name)| name))
    }
}

impl Default for Behaviour {
    fn default() -> Self {
        Self {
            busy: 0,
            duty_percent: 100,
            pinned: true,
            touch_mib: 0,
            touch_on: None,
            every_ms: 0,
            hot_mib: 0,
            stride: 1,
            sweep: Sweep::Off,
            passes: 0,
            walk_kib: 0,
            think: 0,
            burst_ms: 0,
            disk_mib: 0,
        }
    }
}

impl Behaviour {
    /// Returns the behaviour of a guest that only waits.
    #[must_use]
    pub fn idle() -> Self {
        Self::default()
    }

    /// Returns the behaviour of a guest with this many threads that compute all the time.
    #[must_use]
    pub fn busy(threads: u32) -> Self {
        Self {
            busy: threads,
            ..Self::default()
        }
    }

    /// Makes the threads compute only this share of the time.
    #[must_use]
    pub fn with_duty(self, percent: u32) -> Self {
        Self {
            duty_percent: percent,
            ..self
        }
    }

    /// Adds memory that is written once.
    #[must_use]
    pub fn with_touch(self, mib: u32) -> Self {
        Self {
            touch_mib: mib,
            ..self
        }
    }

    /// Writes the guest's memory first from this vCPU.
    #[must_use]
    pub fn with_touch_on(self, vcpu: u32) -> Self {
        Self {
            touch_on: Some(vcpu),
            ..self
        }
    }

    /// Returns the behaviour of a guest that reads this much memory repeatedly, with this many steps of arithmetic after each
    /// line.
    #[must_use]
    pub fn walking(kib: u32, think: u32) -> Self {
        Self {
            walk_kib: kib,
            think,
            ..Self::default()
        }
    }

    /// Makes the guest read that memory in bursts of `ms` milliseconds, with rests of the same length between them.
    #[must_use]
    pub fn with_bursts(self, ms: u32) -> Self {
        Self { burst_ms: ms, ..self }
    }

    /// Restricts repeated writing to this much of the memory: every `stride`-th page.
    #[must_use]
    pub fn with_hot(self, mib: u32, stride: u32) -> Self {
        Self {
            hot_mib: mib,
            stride,
            ..self
        }
    }

    /// Returns the behaviour of a guest that holds this much memory and makes this many passes over it.
    #[must_use]
    pub fn sweeping(mib: u32, sweep: Sweep, passes: u32) -> Self {
        Self {
            touch_mib: mib,
            sweep,
            passes,
            ..Self::default()
        }
    }

    /// Writes this much of the guest's disk repeatedly.
    #[must_use]
    pub fn with_disk(self, mib: u32) -> Self {
        Self {
            disk_mib: mib,
            ..self
        }
    }

    /// Writes the memory repeatedly with this pause between passes.
    #[must_use]
    pub fn with_every(self, ms: u32) -> Self {
        Self { every_ms: ms, ..self }
    }
}

impl fmt::Display for Behaviour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "busy={},duty={},pin={},touch={},on={},every={},hot={},stride={},sweep={},passes={},walk={},think={},burst={},disk={}",
            self.busy,
            self.duty_percent,
            u8::from(self.pinned),
            self.touch_mib,
            self.touch_on
                .map_or_else(|| ANY.to_owned(), |vcpu| vcpu.to_string()),
            self.every_ms,
            self.hot_mib,
            self.stride,
            self.sweep,
            self.passes,
            self.walk_kib,
            self.think,
            self.burst_ms,
            self.disk_mib
        )
    }
}

/// Why a behaviour could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BehaviourError {
    /// The text has a key unknown to guests.
    #[error(
        "unknown key '{0}' in a guest behaviour: use busy, duty, pin, touch, on, every, hot, stride, sweep, passes, walk, think, burst, disk"
    )]
    UnknownKey(String),
    /// A value is not a number in range.
    #[error("'{value}' is not a valid value of '{key}' in a guest behaviour")]
    BadValue {
        /// The key of that value.
        key: String,
        /// The value found.
        value: String,
    },
}

impl FromStr for Behaviour {
    type Err = BehaviourError;

    /// Parses `key=value` pairs, separated by commas. An absent key has its default, so a line describes a complete behaviour.
    fn from_str(text: &str) -> Result<Self, BehaviourError> {
        let mut behaviour = Self::default();
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let bad = || BehaviourError::BadValue {
                key: key.to_owned(),
                value: value.to_owned(),
            };
            let number = || value.parse::<u32>().map_err(|_| bad());
            match key {
                "busy" => behaviour.busy = number()?,
                "duty" => {
                    behaviour.duty_percent = number()?;
                    if !(1..=100).contains(&behaviour.duty_percent) {
                        return Err(bad());
                    }
                }
                "pin" => behaviour.pinned = number()? != 0,
                "touch" => behaviour.touch_mib = number()?,
                "on" => behaviour.touch_on = if value == ANY { None } else { Some(number()?) },
                "every" => behaviour.every_ms = number()?,
                "hot" => behaviour.hot_mib = number()?,
                "stride" => {
                    behaviour.stride = number()?;
                    if behaviour.stride == 0 {
                        return Err(bad());
                    }
                }
                "sweep" => {
                    let named = Sweep::NAMES.iter().find(|(_, name)| *name == value);
                    behaviour.sweep = named.map(|(sweep, _)| *sweep).ok_or_else(bad)?;
                }
                "passes" => behaviour.passes = number()?,
                "walk" => behaviour.walk_kib = number()?,
                "think" => behaviour.think = number()?,
                "burst" => behaviour.burst_ms = number()?,
                "disk" => behaviour.disk_mib = number()?,
                _ => return Err(BehaviourError::UnknownKey(key.to_owned())),
            }
        }
        Ok(behaviour)
    }
}

/// A behaviour that begins some seconds after the guest is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Phase {
    /// Seconds after the guest printed READY.
    pub at_s: u32,
    /// The guest's behaviour from then on.
    pub behaviour: Behaviour,
}

/// The behaviours that a kernel command line orders.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Orders {
    /// The behaviour from boot on.
    pub first: Behaviour,
    /// Later changes, in order of time.
    pub phases: Vec<Phase>,
}

impl Orders {
    /// Parses the orders on a kernel command line, and ignores all other arguments.
    ///
    /// # Errors
    /// When one of our arguments is malformed.
    pub fn from_cmdline(cmdline: &str) -> Result<Self, BehaviourError> {
        let mut orders = Self::default();
        for word in cmdline.split_whitespace() {
            if let Some(text) = word.strip_prefix(KEY_DO) {
                orders.first = text.parse()?;
            } else if let Some(text) = word.strip_prefix(KEY_AT) {
                let (at, behaviour) = text.split_once(':').unwrap_or((text, ""));
                let at_s = at.parse().map_err(|_| BehaviourError::BadValue {
                    key: "at".to_owned(),
                    value: at.to_owned(),
                })?;
                orders.phases.push(Phase {
                    at_s,
                    behaviour: behaviour.parse()?,
                });
            }
        }
        orders.phases.sort_by_key(|phase| phase.at_s);
        Ok(orders)
    }

    /// Formats the orders as kernel command line arguments.
    #[must_use]
    pub fn to_cmdline(&self) -> String {
        let mut text = format!("{KEY_DO}{}", self.first);
        for phase in &self.phases {
            text.push_str(&format!(" {KEY_AT}{}:{}", phase.at_s, phase.behaviour));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_survive_the_command_line() {
        let orders = Orders {
            first: Behaviour::busy(2)
                .with_touch(40)
                .with_touch_on(1)
                .with_every(500)
                .with_hot(10, 4)
                .with_disk(3)
                .with_duty(60),
            phases: vec![Phase {
                at_s: 30,
                behaviour: Behaviour {
                    passes: 3,
                    sweep: Sweep::ReadWrite,
                    ..Behaviour::walking(512, 20).with_bursts(450).with_touch(8)
                },
            }],
        };
        let line = format!("console=ttyS0 quiet {} panic=-1", orders.to_cmdline());
        assert_eq!(Orders::from_cmdline(&line), Ok(orders));
    }

    #[test]
    fn a_misspelt_key_is_refused_by_name() {
        assert_eq!(
            "bussy=1".parse::<Behaviour>(),
            Err(BehaviourError::UnknownKey("bussy".to_owned()))
        );
        assert!(matches!(
            "duty=0".parse::<Behaviour>(),
            Err(BehaviourError::BadValue { .. })
        ));
        assert!(matches!(
            "busy=x".parse::<Behaviour>(),
            Err(BehaviourError::BadValue { .. })
        ));
    }

    #[test]
    fn an_empty_line_is_idle() {
        assert_eq!("".parse::<Behaviour>(), Ok(Behaviour::idle()));
    }
}
