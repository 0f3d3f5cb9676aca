//! A trial: starts a guest with a given memory size, and watches its serial console until it is done, dead or out of time.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use homenode_units::{Bytes, Ns};
use schemars::JsonSchema;
use serde::{Serialize, Serializer};

use super::FootprintError;

/// Message of the guest's program when it is done.
const DONE: &str = "homenode-epsilon: done";
/// Beginning of the message of a kernel that panics.
const PANIC: &str = "Kernel panic - not syncing: ";
/// Maximum size of the console output that is kept.
const CONSOLE_BYTES_MAX: usize = 1 << 20;
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The mechanism that executes a guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Accelerator {
    /// The processor.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

impl Accelerator {
    fn name(self) -> &'static str {
        match self {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "tcg",
        }
    }
}

impl std::fmt::Display for Accelerator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The guest's memory as the guest itself reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct MemInfo {
    /// Memory managed by the guest's kernel (`MemTotal`).
    pub total_bytes: Bytes,
    /// Memory available to programs (`MemAvailable`).
    pub available_bytes: Bytes,
}

impl MemInfo {
    /// Parses `/proc/meminfo`. Kernels before 3.14 do not report available memory; free memory is used instead.
    fn parse(text: &str) -> Option<MemInfo> {
        let kib = |name: &str| {
            let line = text
                .lines()
                .rev()
                .find_map(|line| line.trim().strip_prefix(name))?;
            let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
            Some(Bytes(kib.checked_mul(1024)?))
        };
        Some(MemInfo {
            total_bytes: kib("MemTotal:")?,
            available_bytes: kib("MemAvailable:").or_else(|| kib("MemFree:"))?,
        })
    }
}

/// Outcome of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub enum Outcome {
    /// The guest booted and ran the program.
    Ran(MemInfo),
    /// The guest's kernel panicked.
    Panic {
        /// The kernel's message.
        text: String,
    },
    /// The guest was reset, or QEMU ended, before the console showed that it ran or panicked.
    Reset {
        /// QEMU's error message, if it printed one.
        complaint: Option<String>,
    },
    /// The guest reached the time limit.
    Hang {
        /// The last line of the guest's console.
        last: Option<String>,
    },
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Outcome::Ran(memory) => write!(f, "ran, {} available to programs", memory.available_bytes),
            Outcome::Panic { text } => write!(f, "panic: {text}"),
            Outcome::Reset { complaint: None } => write!(f, "reset"),
            Outcome::Reset {
                complaint: Some(complaint),
            } => write!(f, "QEMU ended: {complaint}"),
            Outcome::Hang { last: None } => write!(f, "hung without any output"),
            Outcome::Hang { last: Some(last) } => write!(f, "hung after: {last}"),
        }
    }
}

/// The result of a trial with one guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Trial {
    /// Memory of the guest.
    pub memory_bytes: Bytes,
    /// Outcome of the guest.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// Duration of the trial.
    #[serde(rename = "took_s", serialize_with = "seconds")]
    #[schemars(with = "f64")]
    pub took: Ns,
}

fn seconds<S: Serializer>(took: &Ns, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(took.as_secs_f64())
}

/// Settings for starting guests.
#[derive(Clone, Debug)]
pub(super) struct Maker {
    pub qemu: PathBuf,
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
    pub accelerator: Accelerator,
    /// Set when the user cancels.
    pub stop: Arc<AtomicBool>,
}

/// A running QEMU, killed when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // QEMU may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Maker {
    fn command(&self, memory: Bytes) -> Command {
        let mut command = Command::new(&self.qemu);
        command
            .args([
                "-nodefaults",
                "-no-user-config",
                "-no-reboot",
                "-display",
                "none",
                "-monitor",
                "none",
            ])
            .args([
                "-serial",
                "stdio",
                "-smp",
                "1",
                "-machine",
                "pc",
                "-accel",
                self.accelerator.name(),
            ])
            .args(["-m", &format!("{}k", memory.0 / 1024)])
            .arg("-kernel")
            .arg(&self.kernel)
            .arg("-initrd")
            .arg(&self.initramfs)
            .args(["-append", "console=ttyS0 panic=-1 rdinit=/homenode-epsilon"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A terminal's signals must reach only this program, which ends its guest itself.
            .process_group(0);
        die_with_parent(&mut command);
        command
    }

    /// Runs a guest with this much memory, for at most `limit`.
    ///
    /// # Errors
    /// When QEMU cannot be started, or the user cancels.
    pub(super) fn run(&self, memory: Bytes, limit: Duration) -> Result<Trial, FootprintError> {
        let begin = Instant::now();
        let cannot = |what: &str| FootprintError::system(format!("cannot {what} {}", self.qemu.display()));
        let mut child = self.command(memory).spawn().map_err(cannot("start"))?;
        // The command requests pipes for both outputs.
        let console = child.stdout.take().map(gather).unwrap_or_default();
        let complaints = child.stderr.take().map(gather).unwrap_or_default();
        let mut running = Running(child);
        let outcome = loop {
            if self.stop.load(Ordering::Relaxed) {
                return Err(FootprintError::Stopped);
            }
            // Check for QEMU's end before reading its output, because after its end there is no more output.
            let has_ended = running.0.try_wait().map_err(cannot("wait for"))?.is_some();
            if has_ended {
                // The last output may still be in the pipe.
                std::thread::sleep(LOOK_EVERY);
            }
            let text = console.text();
            if let Some(outcome) = verdict(&text) {
                break outcome;
            }
            if has_ended {
                let complaint = last_line(&complaints.text());
                break Outcome::Reset { complaint };
            }
            if begin.elapsed() >= limit {
                break Outcome::Hang {
                    last: last_line(&text),
                };
            }
            std::thread::sleep(LOOK_EVERY);
        };
        Ok(Trial {
            memory_bytes: memory,
            outcome,
            took: Ns(u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX)),
        })
    }
}

/// Returns the outcome that the console output shows; `None` if it shows none yet.
fn verdict(console: &str) -> Option<Outcome> {
    if let Some((said, _)) = console.split_once(DONE) {
        return Some(match MemInfo::parse(said) {
            Some(memory) => Outcome::Ran(memory),
            None => Outcome::Panic {
                text: "its program could not read /proc/meminfo".into(),
            },
        });
    }
    let (_, rest) = console.split_once(PANIC)?;
    let (line, _) = rest.split_once('\n')?;
    Some(Outcome::Panic {
        text: shown(line.trim()),
    })
}

/// Removes control characters from a guest's output, and shortens it, to make it safe to show on a terminal.
fn shown(line: &str) -> String {
    line.chars().filter(|c| !c.is_control()).take(160).collect()
}

fn last_line(text: &str) -> Option<String> {
    let line = text.lines().map(shown).rfind(|line| !line.trim().is_empty());
    line.map(|line| line.trim().to_owned())
}

/// The bytes read from a pipe so far.
#[derive(Default)]
struct Gathered(Arc<Mutex<Vec<u8>>>);

impl Gathered {
    fn text(&self) -> String {
        let bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// Reads a pipe to its end, so that the writer never blocks. Keeps only the beginning of the output.
fn gather(mut pipe: impl Read + Send + 'static) -> Gathered {
    let kept = Arc::new(Mutex::new(Vec::new()));
    let keep = Arc::clone(&kept);
    std::thread::spawn(move || {
        let mut part = [0; 4096];
        while let Ok(count @ 1..) = pipe.read(&mut part) {
            let mut keep = keep.lock().unwrap_or_else(PoisonError::into_inner);
            let room = CONSOLE_BYTES_MAX - keep.len();
            keep.extend_from_slice(&part[..count.min(room)]);
        }
    });
    Gathered(kept)
}

/// Makes the kernel kill a guest when this program ends for any reason.
#[allow(unsafe_code)] // what a child does between fork and exec
fn die_with_parent(command: &mut Command) {
    // SAFETY: one system call, which neither allocates nor takes locks.
    unsafe {
        command.pre_exec(|| {
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
                .map_err(std::io::Error::from)
        });
    }
}

/// Returns the full-system emulator: the requested one, else the one in `PATH`.
///
/// # Errors
/// A message that says what to install.
pub(super) fn find_qemu(asked: Option<&Path>) -> Result<PathBuf, FootprintError> {
    const NAME: &str = "qemu-system-x86_64";
    match asked {
        Some(path) if path.is_file() => Ok(path.to_owned()),
        Some(path) => Err(FootprintError::given(path, "there is no such file")),
        None => which::which(NAME).map_err(|_| {
            let remedy = "install Debian's package qemu-system-x86, or name one with --qemu";
            FootprintError::Given(format!("needs {NAME}: {remedy}"))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_console_ends_with_the_program_or_with_a_panic() {
        let ran = "boot\nhomenode-epsilon: running\nMemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\nhomenode-epsilon: done\n";
        let expected = MemInfo {
            total_bytes: Bytes(1000 << 10),
            available_bytes: Bytes(400 << 10),
        };
        assert_eq!(verdict(ran), Some(Outcome::Ran(expected)));
        assert_eq!(verdict(&ran[..ran.len() - 8]), None, "it is still talking");
        let died = "[ 1.0] Kernel panic - not syncing: System is deadlocked on memory\r\n";
        let text = "System is deadlocked on memory".to_owned();
        assert_eq!(verdict(died), Some(Outcome::Panic { text }));
        let nothing = "homenode-epsilon: running\nhomenode-epsilon: done\n";
        assert!(matches!(verdict(nothing), Some(Outcome::Panic { .. })));
    }

    #[test]
    fn what_a_guest_writes_does_nothing_to_the_terminal() {
        assert_eq!(last_line("a\n\x1b[2Jb\x07\r\n \n"), Some("[2Jb".to_owned()));
        assert_eq!(last_line("\n\n"), None);
    }
}
