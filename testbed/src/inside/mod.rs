//! The side inside the emulated host: what a case can use.

pub mod acts;
pub mod console;
pub mod device;
pub mod guest;
pub mod kvm;
pub mod libvirtd;
pub mod pages;
pub mod proc;
pub mod process;
pub mod server;
pub mod wait;
pub mod xen;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail, ensure};
use serde_json::Value;
use virt::connect::Connect;

use self::console::GuestVanished;
use self::guest::{Guest, GuestSpec};
use self::proc::Process;
use self::process::Program;
use self::xen::domu::{self, DomuSpec};
use crate::cases;
use crate::exchange::Exchange;

/// The environment of a case. Everything that a case starts through it ends with the case.
pub struct Inside {
    /// The connection to libvirt; renewed by [`Inside::restart_libvirtd`].
    pub connection: Connect,
    dir: PathBuf,
    programs: PathBuf,
    started: Instant,
    /// Guests that the case has not destroyed.
    guests: Mutex<Vec<(GuestSpec, Process)>>,
    /// DomUs that the case has not destroyed.
    domus: Mutex<Vec<DomuSpec>>,
}

impl Inside {
    /// Prints a line that becomes part of the case's report.
    pub fn note(&self, text: impl std::fmt::Display) {
        println!("[{:5.1}] {text}", self.started.elapsed().as_secs_f64());
    }

    /// Returns a directory for the case's files, which is kept if the case fails.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Runs `homenode COMMAND ARGUMENTS --json`; returns its JSON, or its exit status and error message.
    ///
    /// # Errors
    /// When the command cannot be run, or its output is not JSON.
    pub fn ask(&self, command: &str, arguments: &[&str]) -> anyhow::Result<Result<Value, (i32, String)>> {
        let output = Command::new(self.homenode()?)
            .arg(command)
            .args(arguments)
            .arg("--json")
            .output()?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Ok(Err((output.status.code().unwrap_or(-1), said)));
        }
        let value = serde_json::from_slice(&output.stdout);
        Ok(Ok(
            value.with_context(|| format!("homenode {command} {arguments:?}"))?
        ))
    }

    /// Like [`Inside::ask`], for a command that must succeed.
    ///
    /// # Errors
    /// As [`Inside::ask`], and when the command fails.
    pub fn told(&self, command: &str, arguments: &[&str]) -> anyhow::Result<Value> {
        self.ask(command, arguments)?
            .map_err(|(_, said)| anyhow!("homenode {command} {arguments:?}: {said}"))
    }

    /// Returns the path of the `homenode` binary under test.
    ///
    /// # Errors
    /// When it was not built before the host booted.
    pub fn homenode(&self) -> anyhow::Result<PathBuf> {
        // During work by hand, a newer pair of programs may be next to the pair with which the host booted.
        let mine = std::env::current_exe()
            .context("cannot find this program's own file")?
            .with_extension("homenode");
        let path = if mine.exists() {
            mine
        } else {
            self.programs.join("homenode")
        };
        ensure!(
            path.exists(),
            "this case needs the homenode binary: build it (cargo build -p homenode-cli), or name it with --homenode"
        );
        Ok(path)
    }

    /// Starts `homenode` with these arguments.
    ///
    /// # Errors
    /// When it is missing or cannot be started.
    pub fn start_homenode(&self, arguments: &[&str]) -> anyhow::Result<Program> {
        Program::start("homenode", &self.homenode()?, arguments, &self.dir)
    }

    /// Creates a guest and waits until it is ready.
    ///
    /// # Errors
    /// When libvirt refuses the guest, or its init does not come up.
    pub fn create(&self, spec: &GuestSpec) -> anyhow::Result<Guest> {
        let guest = self.create_unready(spec)?;
        guest.wait_ready()?;
        Ok(guest)
    }

    /// Creates a guest without waiting until it is ready.
    ///
    /// # Errors
    /// When libvirt refuses the guest.
    pub fn create_unready(&self, spec: &GuestSpec) -> anyhow::Result<Guest> {
        let begin = Instant::now();
        let domain = self
            .connection
            .create_domain_xml(&spec.xml(), 0)
            .map_err(|error| anyhow!("libvirt did not start guest {}: {}", spec.name, error.message()))?;
        self.note(format!(
            "guest {} created in {:.1} s",
            spec.name,
            begin.elapsed().as_secs_f64()
        ));
        let guest = Guest::of(spec, domain)?;
        self.guests().push((spec.clone(), guest.process));
        Ok(guest)
    }

    fn guests(&self) -> MutexGuard<'_, Vec<(GuestSpec, Process)>> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn domus(&self) -> MutexGuard<'_, Vec<DomuSpec>> {
        self.domus.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the first guest that has vanished: it ended without being destroyed, and its kernel printed no reason, or its
    /// kernel took a double fault. A PVH
    /// domU counts as well if the emulation ended it, which happens to one in some fifty. A domU whose memory was moved never
    /// counts, because the move may be the reason.
    fn vanished(&self) -> Option<GuestVanished> {
        self.guests()
            .iter()
            .find_map(|(spec, process)| {
                let console = spec.console();
                let vanished = || console.vanished().filter(|_| !process.alive());
                console.double_fault().or_else(vanished)
            })
            .or_else(|| {
                let domus = self.domus();
                let mut unmoved = domus
                    .iter()
                    .filter(|spec| !spec.console_once_moved().log.exists());
                unmoved.find_map(|spec| {
                    let console = spec.console();
                    // A domU whose init died is still listed while Xen takes it down.
                    let lost = console.lost_init().filter(|_| spec.kind == domu::Kind::Pvh);
                    let vanished = || console.vanished().filter(|_| !domu::lives(&spec.name));
                    lost.or_else(vanished)
                })
            })
    }

    /// Creates guests at the same time, each in its own thread, without waiting until they are ready.
    ///
    /// # Errors
    /// When libvirt refuses one of them.
    pub fn create_at_once(&self, specs: &[GuestSpec]) -> anyhow::Result<Vec<Guest>> {
        thread::scope(|scope| {
            let starts: Vec<_> = specs
                .iter()
                .map(|spec| scope.spawn(|| self.create_unready(spec)))
                .collect();
            starts
                .into_iter()
                .map(|start| {
                    start
                        .join()
                        .unwrap_or_else(|_| bail!("a thread that created a guest panicked"))
                })
                .collect()
        })
    }

    /// Destroys a guest, like pulling its plug.
    ///
    /// # Errors
    /// When libvirt cannot destroy it.
    pub fn destroy(&self, guest: &Guest) -> anyhow::Result<()> {
        self.guests().retain(|(_, process)| *process != guest.process);
        guest.domain.destroy().map_err(|error| {
            anyhow!(
                "libvirt did not destroy guest {}: {}",
                guest.spec.name,
                error.message()
            )
        })
    }

    /// Kills libvirtd, as a crash would. Afterwards, handles of guests are stale.
    ///
    /// # Errors
    /// When it is not running.
    pub fn kill_libvirtd(&self) -> anyhow::Result<()> {
        libvirtd::kill()
    }

    /// Starts libvirtd again and connects to it; returns how long it took to answer.
    ///
    /// # Errors
    /// When it does not answer in time.
    pub fn restart_libvirtd(&mut self) -> anyhow::Result<Duration> {
        let (connection, took) = libvirtd::start()?;
        self.connection = connection;
        Ok(took)
    }

    /// Renews a guest's handle after libvirtd was restarted.
    ///
    /// # Errors
    /// When libvirt does not know the guest any more.
    pub fn refresh(&self, guest: &mut Guest) -> anyhow::Result<()> {
        guest.domain = self
            .connection
            .lookup_domain_by_name(&guest.spec.name)
            .map_err(|error| anyhow!("libvirt lost guest {}: {}", guest.spec.name, error.message()))?;
        Ok(())
    }

    /// Returns the node list that numad advised for a guest, from libvirt's own record.
    ///
    /// # Errors
    /// When libvirt has no record of the guest, or the record holds no advice.
    pub fn numad_advice(&self, name: &str) -> anyhow::Result<Vec<u32>> {
        let path = format!("/run/libvirt/qemu/{name}.xml");
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        let after = text
            .split("<numad nodeset='")
            .nth(1)
            .with_context(|| format!("{path} holds no numad advice"))?;
        proc::parse_list(after.split('\'').next().unwrap_or(""))
    }
}

/// Runs one case in this process.
///
/// # Errors
/// The case's error.
pub fn run_case(root: &Path, name: &str) -> anyhow::Result<()> {
    let case = cases::find(name).with_context(|| format!("no case is called '{name}'"))?;
    let dir = Exchange::at(root).case_dir(name);
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let programs = std::env::current_exe()?
        .parent()
        .map(Path::to_owned)
        .context("the path of this program has no directory")?;
    let connection = libvirtd::connect_within(Duration::from_secs(60))?;
    let mut inside = Inside {
        connection,
        dir,
        programs,
        started: Instant::now(),
        guests: Mutex::default(),
        domus: Mutex::default(),
    };
    let cases::Run::Inside(run) = case.run else {
        bail!("{name} runs outside of the emulated host");
    };
    let outcome = run(&mut inside);
    match (outcome, inside.vanished()) {
        (Err(error), Some(vanished)) => Err(anyhow::Error::new(vanished).context(format!("{error:#}"))),
        // Removes a `GuestVanished` from the error: a domU whose memory was moved is not excused.
        (Err(error), None) if !inside.domus().is_empty() => Err(anyhow!("{error:#}")),
        (outcome, _) => outcome,
    }
}
