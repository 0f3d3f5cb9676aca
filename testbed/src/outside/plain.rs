//! Guests of a plain QEMU under the plugin that logs pages, and what this machine's kernel reports of their memory.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use homenode_formats::page_log::Log;
use homenode_testbed_guest::{Behaviour, MARKER_ERROR, Orders};

use super::Interrupt;
use super::emulated::Workshop;
use super::guard::{Guard, end_group};

/// The environment of a case with plain guests.
#[derive(Debug)]
pub struct Outside<'a> {
    /// Kernel, initramfs and programs.
    pub workshop: &'a Workshop,
    /// The case's own directory.
    pub dir: &'a Path,
    /// The case's measurements.
    pub notes: Vec<String>,
    pub(super) guard: &'a mut Guard,
    pub(super) interrupt: &'a Interrupt,
    pub(super) until: Instant,
}

impl Outside<'_> {
    /// Notes a measurement.
    pub fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }

    /// Boots a guest of this much memory, in one memfd. `plugin` is the plugin's path and its arguments; `None` for no plugin.
    ///
    /// # Errors
    /// When QEMU cannot be started.
    pub fn boot(
        &mut self,
        name: &str,
        mib: u32,
        first: Behaviour,
        plugin: Option<(&Path, &str)>,
    ) -> anyhow::Result<PlainGuest> {
        let initramfs = self.workshop.initramfs.clone();
        self.boot_from(&initramfs, name, mib, first, plugin)
    }

    /// Like [`Outside::boot`], but with an initramfs of the case.
    ///
    /// # Errors
    /// When QEMU cannot be started.
    pub fn boot_from(
        &mut self,
        initramfs: &Path,
        name: &str,
        mib: u32,
        first: Behaviour,
        plugin: Option<(&Path, &str)>,
    ) -> anyhow::Result<PlainGuest> {
        let orders = Orders {
            first,
            ..Orders::default()
        };
        let console = self.dir.join(format!("{name}.console"));
        let mut command = Command::new("qemu-system-x86_64");
        command.args([
            "-accel",
            "tcg",
            "-smp",
            "1",
            "-nographic",
            "-net",
            "none",
            "-no-reboot",
            "-m",
        ]);
        command.arg(format!("{mib}M"));
        command.arg("-object");
        command.arg(format!("memory-backend-memfd,id=m,share=on,size={mib}M"));
        command.args(["-machine", "pc,memory-backend=m", "-kernel"]);
        command.arg(&self.workshop.vmlinux).arg("-initrd").arg(initramfs);
        let kernel = "console=ttyS0 quiet panic=-1 transparent_hugepage=never";
        command.args(["-append", &format!("{kernel} {}", orders.to_cmdline())]);
        if let Some((file, arguments)) = plugin {
            command
                .arg("-plugin")
                .arg(format!("{},{arguments}", file.display()));
        }
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(self.dir.join(format!("{name}.stderr")))?)
            .process_group(0)
            .spawn()
            .context("cannot start qemu-system-x86_64: run scripts/testbed-setup.sh")?;
        self.guard.add(process.id())?;
        let (input, output) = (process.stdin.take(), process.stdout.take());
        let mut kept = fs::File::create(&console)?;
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            let mut output = BufReader::new(output?);
            let mut line = Vec::new();
            while output.read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
                // The console must be read even if the file cannot be written, or the guest stops.
                let _ = kept.write_all(&line);
                let text = String::from_utf8_lossy(&line).trim().to_owned();
                line.clear();
                sender.send(text).ok()?;
            }
            Some(())
        });
        Ok(PlainGuest {
            input,
            lines,
            console,
            process,
        })
    }

    /// Waits until the guest's console has a line with this marker.
    ///
    /// # Errors
    /// When the guest reports an error or ends, or the case's time is over.
    pub fn wait_for(&self, guest: &PlainGuest, marker: &str) -> anyhow::Result<String> {
        loop {
            match guest.lines.recv_timeout(Duration::from_millis(200)) {
                // The firmware's output may precede the marker on its line.
                Ok(line) if line.contains(marker) => return Ok(line),
                Ok(line) if line.starts_with(MARKER_ERROR) || line.contains("Kernel panic") => {
                    bail!("the guest reported an error: {line}")
                }
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    bail!(
                        "the guest ended before it printed {marker}: {}",
                        guest.console.display()
                    )
                }
                Err(RecvTimeoutError::Timeout) => {
                    ensure!(
                        !self.interrupt.load(std::sync::atomic::Ordering::Relaxed),
                        "interrupted"
                    );
                    ensure!(
                        Instant::now() < self.until,
                        "the guest did not print {marker} in time"
                    );
                }
            }
        }
    }

    /// Ends a guest as an operator would, so that its log is closed.
    ///
    /// # Errors
    /// When the guard has gone.
    pub fn end(&mut self, mut guest: PlainGuest) -> anyhow::Result<()> {
        end_group(guest.process.id());
        let _ = guest.process.wait();
        self.guard.remove(guest.process.id())
    }
}

/// A guest of a plain QEMU.
#[derive(Debug)]
pub struct PlainGuest {
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    console: PathBuf,
    process: Child,
}

impl PlainGuest {
    /// Returns the path of the file with the guest's output.
    #[must_use]
    pub fn console(&self) -> &Path {
        &self.console
    }

    /// Sends a line to the guest's console.
    ///
    /// # Errors
    /// When the guest has ended.
    pub fn say(&mut self, line: &str) -> anyhow::Result<()> {
        let input = self.input.as_mut().context("the guest has no console")?;
        writeln!(input, "{line}").context("the guest has ended")
    }

    /// Makes the kernel forget which of the guest's pages were used.
    ///
    /// # Errors
    /// When QEMU has ended.
    pub fn clear_accessed(&self) -> anyhow::Result<()> {
        let path = format!("/proc/{}/clear_refs", self.process.id());
        fs::write(&path, "1").with_context(|| format!("cannot write {path}"))
    }

    /// Returns the KiB of the guest's memory that the kernel has seen used since [`PlainGuest::clear_accessed`].
    ///
    /// # Errors
    /// When QEMU has ended, or has no such memory.
    pub fn accessed_kib(&self) -> anyhow::Result<u64> {
        let path = format!("/proc/{}/smaps", self.process.id());
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        let mut lines = text
            .lines()
            .skip_while(|line| !line.contains("/memfd:memory-backend"));
        let line = lines
            .find_map(|line| line.strip_prefix("Referenced:"))
            .context("QEMU maps no memfd")?;
        let kib = line.split_whitespace().next().and_then(|text| text.parse().ok());
        kib.with_context(|| format!("{path}: Referenced is '{line}'"))
    }
}

/// Closes a log's window, names the next one, and waits until the closed window is in the file.
///
/// # Errors
/// When the log does not grow.
pub fn next_window(control: &Path, log: &Path, label: &str) -> anyhow::Result<()> {
    let length = || fs::metadata(log).map_or(0, |meta| meta.len());
    let before = length();
    let mut orders = fs::OpenOptions::new()
        .write(true)
        .open(control)
        .with_context(|| format!("cannot open {}", control.display()))?;
    orders.write_all(format!("{label}\n").as_bytes())?;
    let begin = Instant::now();
    while length() == before {
        ensure!(
            begin.elapsed() < Duration::from_secs(30),
            "{} does not grow",
            log.display()
        );
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Reads a log that must be complete.
///
/// # Errors
/// When the log is not complete.
pub fn whole_log(path: &Path) -> anyhow::Result<Log> {
    let log = Log::read(path)?;
    match log.missing {
        None => Ok(log),
        Some(missing) => bail!("{}: {missing}", path.display()),
    }
}
