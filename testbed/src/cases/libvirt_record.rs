//! What the real libvirt answers to the calls that the agent makes: with which error, and after how long. It is asked while a
//! guest runs, is paused, is being saved, was saved, restored, shut off or destroyed; while the guest's QEMU does not answer; and
//! while libvirt itself is stopped, and after it was killed. And how long after a change its XML still says what was before.
//!
//! It is for the stand-in of the tests (`crates/linux/src/libvirt/stand_in.rs`), which makes up its answers so far.

use std::fs;
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use homenode_testbed_guest::Behaviour;
use rustix::process::Signal;
use serde::Serialize;
use virt::connect::Connect;
use virt::domain::{Domain, NUMAParameters, SchedBandwidth, SchedulerInfo};
use virt::error::Error;
use virt::sys;

use super::crash::signal;
use crate::inside::guest::{Balloon, Guest, GuestSpec};
use crate::inside::libvirtd::{self, connect_within, run};
use crate::inside::wait::{Look, wait_until};
use crate::inside::{Inside, KEPT_DIR};

/// What is left for the outside.
const FILE: &str = "libvirt.json";
/// Longer than libvirt waits for a domain that is busy (30 s).
const DOMAIN_SILENT: Duration = Duration::from_secs(40);
/// Longer than the agent waits for a call (8 s).
const DAEMON_SILENT: Duration = Duration::from_secs(12);
/// By then every call has ended.
const ENDED: Duration = Duration::from_secs(120);
/// How long a balloon is watched.
const BALLOON: Duration = Duration::from_secs(30);
const LIVE: u32 = sys::VIR_DOMAIN_AFFECT_LIVE;
const NAME: &str = "asked";
const MEMORY_KIB: u64 = 128 << 10;
const LESS_KIB: u64 = 96 << 10;

/// A call as the agent makes it.
type Ask = fn(&Domain) -> Result<(), Error>;

/// All CPUs of the host.
const ALL_CPUS: [u8; 1] = [0b1111];
const ONE_CPU: [u8; 1] = [0b0010];
const NAMESPACE: &str = "https://homenode.dev/xmlns/record/1";

fn bandwidth(domain: &Domain, period: Option<u64>, quota: Option<i64>) -> Result<(), Error> {
    let info = SchedulerInfo {
        vcpu_bw: SchedBandwidth { period, quota },
        ..SchedulerInfo::default()
    };
    domain.set_scheduler_parameters_flags(&info, LIVE).map(drop)
}

fn element(domain: &Domain, element: Option<&str>) -> Result<(), Error> {
    let kind = sys::VIR_DOMAIN_METADATA_ELEMENT.cast_signed();
    domain.set_metadata(kind, element, Some("record"), Some(NAMESPACE), LIVE)
}

fn memory_nodes(domain: &Domain) -> Result<(), Error> {
    let params = NUMAParameters {
        node_set: Some("0-3".to_owned()),
        mode: None,
    };
    domain.set_numa_parameters(params, LIVE)
}

/// The agent's calls, by name. `job` is the older form of the agent's own, which the `virt`
/// crate has: libvirt deals with both alike. Pins of I/O threads are as those of the emulator.
const CALLS: [(&str, Ask); 14] = [
    ("xml", |domain| domain.xml_desc(0).map(drop)),
    ("job", |domain| domain.job_info().map(drop)),
    ("state", |domain| domain.state().map(drop)),
    ("is-active", |domain| domain.is_active().map(drop)),
    ("is-persistent", |domain| domain.is_persistent().map(drop)),
    ("memory-stats", |domain| domain.memory_stats(0).map(drop)),
    ("pin-vcpu", |domain| domain.pin_vcpu_flags(0, &ALL_CPUS, LIVE)),
    ("pin-emulator", |domain| domain.pin_emulator(&ALL_CPUS, LIVE)),
    ("memory-nodes", memory_nodes),
    ("metadata", |domain| element(domain, Some("<record/>"))),
    ("bandwidth", |domain| bandwidth(domain, None, Some(90_000))),
    ("no-quota", |domain| bandwidth(domain, None, Some(-1))),
    ("memory", |domain| {
        domain.set_memory_flags(MEMORY_KIB, LIVE).map(drop)
    }),
    ("stats-period", |domain| {
        domain.set_memory_stats_period(2, LIVE).map(drop)
    }),
];

/// What came of a call.
#[derive(Debug, Serialize)]
struct Answer {
    situation: &'static str,
    call: &'static str,
    took_ms: u64,
    /// libvirt's number of the error and its text; `None` where it was done.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<(u32, String)>,
}

/// How a change shows in the XML that is read again and again after it.
#[derive(Debug, Serialize)]
struct Shown {
    change: &'static str,
    /// When the XML was read, since the change was answered, and what it said, each time that it said something else.
    said: Vec<(u64, String)>,
}

/// All of it.
#[derive(Debug, Serialize)]
struct Record {
    about: String,
    libvirt: String,
    qemu: String,
    answers: Vec<Answer>,
    shown: Vec<Shown>,
}

fn ms(begin: Instant) -> u64 {
    u64::try_from(begin.elapsed().as_millis()).unwrap_or(u64::MAX)
}

fn answer(situation: &'static str, call: &'static str, begin: Instant, result: Result<(), Error>) -> Answer {
    Answer {
        situation,
        call,
        took_ms: ms(begin),
        error: result
            .err()
            .map(|error| (error.code().to_raw(), error.message().to_owned())),
    }
}

/// Makes all calls, one after the other.
fn in_turn(situation: &'static str, domain: &Domain) -> Vec<Answer> {
    let made = CALLS.iter().map(|(call, ask)| {
        let begin = Instant::now();
        answer(situation, call, begin, ask(domain))
    });
    made.collect()
}

/// Calls that are under way.
struct UnderWay(Vec<Receiver<Answer>>);

/// Makes all calls at once, each over a connection of its own: one that hangs keeps no other.
fn at_once(situation: &'static str, domains: Vec<Domain>) -> UnderWay {
    let made = CALLS.iter().zip(domains).map(|((call, ask), domain)| {
        let (sender, receiver) = channel();
        thread::spawn(move || {
            let begin = Instant::now();
            // Nobody waits for it where the case has failed.
            let _ = sender.send(answer(situation, call, begin, ask(&domain)));
        });
        receiver
    });
    UnderWay(made.collect())
}

impl UnderWay {
    fn ended(self) -> anyhow::Result<Vec<Answer>> {
        let until = Instant::now() + ENDED;
        let left = || until.saturating_duration_since(Instant::now());
        let answers = self.0.into_iter().map(|call| call.recv_timeout(left()));
        answers
            .collect::<Result<_, _>>()
            .context("a call did not end within two minutes")
    }
}

fn failed(error: &Error) -> anyhow::Error {
    anyhow!("{}", error.message())
}

fn found(connection: &Connect) -> anyhow::Result<Domain> {
    connection
        .lookup_domain_by_name(NAME)
        .map_err(|error| failed(&error))
}

/// The domain over as many connections as there are calls.
fn handles() -> anyhow::Result<Vec<Domain>> {
    let each = CALLS.iter().map(|_| found(&connect_within(ENDED)?));
    each.collect()
}

/// What an element of the XML is now, as far as the text goes from `begin` to `end`.
fn part(domain: &Domain, begin: &str, end: &str) -> anyhow::Result<String> {
    let xml = domain.xml_desc(0).map_err(|error| failed(&error))?;
    let part = xml.split_once(begin).and_then(|(_, rest)| rest.split_once(end));
    Ok(part.map_or_else(|| "none".to_owned(), |(part, _)| part.trim().to_owned()))
}

/// Makes a change, and reads a part of the XML until it has been the same for as long as `quiet`.
fn shown(
    change: &'static str,
    domain: &Domain,
    (begin, end): (&str, &str),
    quiet: Duration,
    make: Ask,
) -> anyhow::Result<Shown> {
    let mut said = vec![(0, part(domain, begin, end)?)];
    make(domain).map_err(|error| failed(&error))?;
    let (made, mut last) = (Instant::now(), Instant::now());
    while last.elapsed() < quiet {
        let now = (ms(made), part(domain, begin, end)?);
        if said.last().is_none_or(|(_, before)| *before != now.1) {
            said.push(now);
            last = Instant::now();
        }
        thread::sleep(Duration::from_millis(50));
    }
    Ok(Shown { change, said })
}

/// How soon each change shows. A balloon goes where the guest takes it, or where there is no driver nowhere.
fn all_shown(domain: &Domain, undriven: &Domain) -> anyhow::Result<Vec<Shown>> {
    let soon = Duration::from_secs(2);
    let memory = ("<currentMemory unit='KiB'>", "<");
    let take: Ask = |domain| domain.set_memory_flags(LESS_KIB, LIVE).map(drop);
    let give: Ask = |domain| domain.set_memory_flags(MEMORY_KIB, LIVE).map(drop);
    let pin: Ask = |domain| domain.pin_vcpu_flags(0, &ONE_CPU, LIVE);
    let hold: Ask = |domain| bandwidth(domain, None, Some(50_000));
    let mark: Ask = |domain| element(domain, Some("<record/>"));
    Ok(vec![
        shown("pin-vcpu", domain, ("<vcpupin vcpu='0' cpuset='", "'"), soon, pin)?,
        shown("bandwidth", domain, ("<quota>", "<"), soon, hold)?,
        shown("metadata", domain, ("<record:record", ">"), soon, mark)?,
        shown("memory-nodes", domain, ("nodeset='", "'"), soon, memory_nodes)?,
        shown("memory-taken", domain, memory, BALLOON, take)?,
        shown("memory-given", domain, memory, BALLOON, give)?,
        shown("memory-taken-undriven", undriven, memory, BALLOON, take)?,
    ])
}

/// While it is saved, which takes some seconds, and afterwards.
fn around_a_save(inside: &Inside, domain: &Domain) -> anyhow::Result<Vec<Answer>> {
    let file = inside.dir().join("saved").display().to_string();
    let handles = handles()?;
    let to = file.clone();
    let save = thread::spawn(move || run("virsh", &["save", NAME, &to]));
    wait_until("the domain to be saved", ENDED, || {
        let job = domain.job_info().map_err(|error| failed(&error))?;
        Ok(match job.r#type.cast_unsigned() == sys::VIR_DOMAIN_JOB_NONE {
            true => Look::NotYet("no job".to_owned()),
            false => Look::Done(()),
        })
    })?;
    let mut answers = at_once("saving", handles).ended()?;
    let outcome = save
        .join()
        .map_err(|_| anyhow!("the thread that saved panicked"))?;
    outcome?;
    answers.extend(in_turn("saved", domain));
    let restored = inside.connection.restore_domain(&file);
    restored.map_err(|error| failed(&error))?;
    fs::remove_file(&file)?;
    answers.extend(in_turn("restored", domain));
    Ok(answers)
}

/// Its QEMU does not answer: whoever asks it first holds the domain, and the others wait for that.
fn silent(guest: &Guest, domain: &Domain) -> anyhow::Result<Vec<Answer>> {
    let handles = handles()?;
    let guest = Guest::of(&guest.spec, domain.clone())?;
    signal(guest.process, Signal::STOP)?;
    let under_way = at_once("silent", handles);
    thread::sleep(DOMAIN_SILENT);
    signal(guest.process, Signal::CONT)?;
    under_way.ended()
}

/// libvirt itself does not answer, and goes on.
fn daemon_stopped() -> anyhow::Result<Vec<Answer>> {
    let handles = handles()?;
    let daemon = libvirtd::daemon().context("libvirtd is not running")?;
    signal(daemon, Signal::STOP)?;
    let under_way = at_once("libvirt-stopped", handles);
    thread::sleep(DAEMON_SILENT);
    signal(daemon, Signal::CONT)?;
    under_way.ended()
}

/// libvirt is killed, and what was connected to it knows nothing of that yet.
fn daemon_killed(inside: &mut Inside) -> anyhow::Result<Vec<Answer>> {
    let handles = handles()?;
    inside.kill_libvirtd()?;
    let answers = at_once("libvirt-killed", handles).ended()?;
    inside.restart_libvirtd()?;
    Ok(answers)
}

/// Asks in every situation, and leaves the record for the outside.
pub fn record(inside: &mut Inside) -> anyhow::Result<()> {
    let undriven = GuestSpec {
        balloon: Balloon::Undriven,
        ..GuestSpec::new("undriven")
    };
    let idle = GuestSpec::new(NAME).doing(Behaviour::idle());
    let guest = inside.create(&idle)?;
    let undriven = inside.create(&undriven)?;
    let domain = found(&inside.connection)?;

    let mut answers = in_turn("running", &domain);
    inside.note("asked while it runs");
    let shown = all_shown(&domain, &undriven.domain)?;
    inside.destroy(&undriven)?;
    inside.note(format!("shown: {shown:?}"));
    domain.suspend().map_err(|error| failed(&error))?;
    answers.extend(in_turn("paused", &domain));
    domain.resume().map_err(|error| failed(&error))?;
    answers.extend(around_a_save(inside, &domain)?);
    inside.note("saved and restored");
    answers.extend(silent(&guest, &domain)?);
    inside.note("its QEMU was silent");
    answers.extend(daemon_stopped()?);
    answers.extend(daemon_killed(inside)?);
    inside.note("libvirt was stopped, and killed");
    let domain = found(&inside.connection)?;
    domain.destroy().map_err(|error| failed(&error))?;
    answers.extend(in_turn("destroyed", &domain));
    let defined = inside.connection.define_domain_xml(&idle.xml());
    let defined = defined.map_err(|error| failed(&error))?;
    answers.extend(in_turn("shut-off", &defined));

    let of = |version: u64| {
        format!(
            "{}.{}.{}",
            version / 1_000_000,
            version / 1000 % 1000,
            version % 1000
        )
    };
    let (libvirt, qemu) = (
        inside.connection.lib_version().map_err(|error| failed(&error))?,
        inside.connection.hyp_version().map_err(|error| failed(&error))?,
    );
    let record = Record {
        about: "What libvirt answered to the agent's calls, by situation, and how soon changes showed in its XML. Made by the testbed's \
                case record-libvirt (make testbed CASE=record-libvirt), which says what the situations are; times are those of an \
                emulated host. A QEMU that was silent went on after 40 s, a libvirt that was stopped after 12 s."
            .to_owned(),
        libvirt: of(u64::from(libvirt)),
        qemu: of(u64::from(qemu)),
        answers,
        shown,
    };
    ensure!(
        record.answers.iter().any(|answer| answer.error.is_some()),
        "expected some call to fail"
    );
    let kept = inside.dir().join(KEPT_DIR);
    fs::create_dir_all(&kept)?;
    write(&kept.join(FILE), &record)
}

/// One answer a line, so that two records can be compared.
fn write(path: &Path, record: &Record) -> anyhow::Result<()> {
    fn lines<T: Serialize>(all: &[T]) -> anyhow::Result<String> {
        let lines = all.iter().map(serde_json::to_string);
        Ok(lines.collect::<Result<Vec<_>, _>>()?.join(",\n    "))
    }
    let text = format!(
        "{{\n  \"about\": {},\n  \"libvirt\": {},\n  \"qemu\": {},\n  \"answers\": [\n    {}\n  ],\n  \"shown\": [\n    {}\n  ]\n}}\n",
        serde_json::to_string(&record.about)?,
        serde_json::to_string(&record.libvirt)?,
        serde_json::to_string(&record.qemu)?,
        lines(&record.answers)?,
        lines(&record.shown)?
    );
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
