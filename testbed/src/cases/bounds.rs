//! Hosts that an operator has configured: isolated CPUs, a cpuset on the slice of all domains, bound cells, huge pages, an
//! agent in a separate slice, two VMs of the same name. Each bound must hold at every sample, and everything must be as before
//! once the agent has ended.
//!
//! ```text
//!   node 0: CPU 0 (the agent's slice), CPU 1      node 1: CPU 2, CPU 3 (isolcpus)      machine: cpuset 1-3
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use homenode_testbed_guest::Behaviour;
use rustix::mount::{MountFlags, mount};
use serde_json::Value;

use super::agent::{SOON, start_acting, start_agent_with, stop};
use crate::inside::Inside;
use crate::inside::guest::{Cpus, Guest, GuestSpec, Memory};
use crate::inside::proc::parse_list;
use crate::inside::process::Program;
use crate::inside::wait::{Look, wait_until};
use crate::outside::emulated::ISOLATED_CPU;

const CGROUPS: &str = "/sys/fs/cgroup";
/// The cgroup into which libvirt puts all domains on a host without systemd.
const MACHINE: &str = "machine";
/// The CPUs that the operator leaves to all domains.
const MACHINE_CPUS: &str = "1-3";
/// The CPUs among these on which the kernel schedules ordinary threads.
const ORDINARY: [u32; 2] = [1, 2];
/// How long the agent runs.
const ACTING: Duration = Duration::from_secs(600);
const HUGE_PAGES: &str = "/sys/devices/system/node/node0/hugepages/hugepages-2048kB";

/// Makes a cgroup whose processes run only on these CPUs.
fn cpuset(name: &str, cpus: &str) -> anyhow::Result<()> {
    let group = Path::new(CGROUPS).join(name);
    write(&Path::new(CGROUPS).join("cgroup.subtree_control"), "+cpu +cpuset")?;
    fs::create_dir_all(&group)?;
    write(&group.join("cpuset.cpus"), cpus)
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {text:?} to {}", path.display()))
}

/// A guest, the CPUs that its operator leaves it, and its state before the agent started.
struct Watched {
    guest: Guest,
    allowed: Vec<u32>,
    affinities: BTreeMap<u32, Vec<u32>>,
    definition: String,
    bound: BTreeMap<String, String>,
}

impl Watched {
    fn new(guest: Guest, allowed: &[u32]) -> anyhow::Result<Watched> {
        let mut watched = Watched {
            allowed: allowed.to_vec(),
            affinities: affinities(guest.process.0)?,
            definition: String::new(),
            bound: bound_memory(guest.process.0)?,
            guest,
        };
        watched.definition = watched.definition()?;
        Ok(watched)
    }

    /// Returns what libvirt's definition says about the guest's CPUs and memory. libvirt never forgets a pin, so a pin to all
    /// CPUs of the machine, or of the domain's own `cpuset`, counts as no pin.
    fn definition(&self) -> anyhow::Result<String> {
        let xml = self.guest.domain.xml_desc(0);
        let xml = xml.map_err(|error| anyhow!("{}: {}", self.guest.spec.name, error.message()))?;
        let told = ["<vcpu", "pin ", "<numatune", "<memory ", "<memnode", "quota"];
        let own = xml.lines().find_map(|line| attribute(line, "<vcpu ", "cpuset"));
        let all = own.unwrap_or(MACHINE_CPUS);
        let is_none = |line: &&str| {
            let pin =
                attribute(line, "<vcpupin", "cpuset").or_else(|| attribute(line, "<emulatorpin", "cpuset"));
            pin == Some(all)
        };
        let lines = xml
            .lines()
            .filter(|line| told.iter().any(|word| line.contains(word)) && !is_none(line));
        Ok(lines.collect::<Vec<_>>().join("\n"))
    }

    /// Checks that every thread runs where it ran before, or within the CPUs that the operator leaves, and that bound memory
    /// has not moved.
    fn holds(&self) -> anyhow::Result<()> {
        let name = &self.guest.spec.name;
        for (thread, cpus) in affinities(self.guest.process.0)? {
            let is_as_before = self.affinities.get(&thread) == Some(&cpus);
            ensure!(
                is_as_before || cpus.iter().all(|cpu| self.allowed.contains(cpu)),
                "thread {thread} of {name} may run on {cpus:?}: its operator leaves it {:?}; it had {:?}",
                self.allowed,
                self.affinities.get(&thread)
            );
        }
        self.keeps_bound_memory()
    }

    fn keeps_bound_memory(&self) -> anyhow::Result<()> {
        let name = &self.guest.spec.name;
        let bound = bound_memory(self.guest.process.0)?;
        ensure!(
            bound == self.bound,
            "bound memory of {name} moved: it was {:?}, now {bound:?}",
            self.bound
        );
        Ok(())
    }

    /// Whether the agent has confined one of the guest's threads to fewer CPUs than it had before.
    fn is_placed(&self) -> anyhow::Result<bool> {
        let now = affinities(self.guest.process.0)?;
        Ok(now.iter().any(|(thread, cpus)| {
            self.affinities
                .get(thread)
                .is_some_and(|before| cpus.len() < before.len())
        }))
    }

    fn as_before(&self) -> anyhow::Result<Look<()>> {
        let now = affinities(self.guest.process.0)?;
        let vcpus = self.guest.process.vcpu_threads()?;
        let is_vcpu = |thread: &u32| vcpus.values().any(|vcpu| vcpu == thread);
        // libvirt pins its emulator through a cpuset. The kernel then gives a thread that had fewer CPUs from its start all
        // CPUs of that cpuset, isolated ones included; so the thread has what the emulator's other threads had before.
        let same = self.affinities.iter().all(|(thread, before)| {
            let is_wider = |now: &Vec<u32>| !is_vcpu(thread) && before.iter().all(|cpu| now.contains(cpu));
            now.get(thread).is_none_or(|now| now == before || is_wider(now))
        });
        let definition = self.definition()?;
        Ok(match same && definition == self.definition {
            true => Look::Done(()),
            false => Look::NotYet(format!(
                "{}: threads {now:?}, before {:?}; {definition}, before {}",
                self.guest.spec.name, self.affinities, self.definition
            )),
        })
    }
}

/// Returns the value of an attribute on a line with this element.
fn attribute<'a>(line: &'a str, element: &str, name: &str) -> Option<&'a str> {
    let (_, rest) = line.split_once(element)?.1.split_once(&format!("{name}='"))?;
    Some(rest.split_once('\'')?.0)
}

/// Returns the CPUs that each thread of a process may run on.
fn affinities(pid: u32) -> anyhow::Result<BTreeMap<u32, Vec<u32>>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{pid}/task"))?.flatten() {
        let status = fs::read_to_string(entry.path().join("status")).unwrap_or_default();
        let allowed = status
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        let thread = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if let (Some(thread), Some(allowed)) = (thread, allowed) {
            all.insert(thread, parse_list(allowed.trim())?);
        }
    }
    Ok(all)
}

/// Returns the nodes of each large mapping that is bound to nodes, or that is in huge pages.
fn bound_memory(pid: u32) -> anyhow::Result<BTreeMap<String, String>> {
    let text = fs::read_to_string(format!("/proc/{pid}/numa_maps"))?;
    let is_large = |line: &&str| line.contains("kernelpagesize_kB=2048") || line.contains("anon=");
    let bound = text
        .lines()
        .filter(|line| line.contains(" bind:") || line.contains(" huge "))
        .filter(is_large)
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let nodes: Vec<&str> = line
                .split_whitespace()
                .filter(|word| {
                    word.strip_prefix('N')
                        .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
                })
                .collect();
            // Only the nodes are compared, as the number of pages may grow.
            let nodes: Vec<&str> = nodes.iter().filter_map(|word| word.split('=').next()).collect();
            Some((words.next()?.to_owned(), nodes.join(" ")))
        });
    Ok(bound.collect())
}

fn busy(name: &str) -> GuestSpec {
    GuestSpec::new(name).doing(Behaviour::busy(1).with_duty(30).with_touch(40))
}

/// Reserves huge pages on node 0, and makes libvirt notice them.
fn huge_pages(inside: &mut Inside, count: u32) -> anyhow::Result<()> {
    write(&Path::new(HUGE_PAGES).join("nr_hugepages"), &count.to_string())?;
    if count > 0 {
        fs::create_dir_all("/dev/hugepages")?;
        mount(
            "hugetlbfs",
            "/dev/hugepages",
            "hugetlbfs",
            MountFlags::empty(),
            None,
        )
        .context("cannot mount /dev/hugepages")?;
        // libvirtd looks for mounts when it starts.
        inside.kill_libvirtd()?;
        inside.restart_libvirtd()?;
    }
    Ok(())
}

/// Starts an agent in a slice that its operator confined to CPU 0.
fn confined_agent(inside: &Inside) -> anyhow::Result<Program> {
    cpuset("agent.slice", "0")?;
    let homenode = inside.homenode()?;
    let script = format!(
        "echo $$ > {CGROUPS}/agent.slice/cgroup.procs && exec {} run --host libvirt --mode act --policies tavo --json",
        homenode.display()
    );
    let mut agent = Program::start("homenode", Path::new("/bin/sh"), &["-c", &script], inside.dir())?;
    agent.wait_json("anything", SOON, |_| true)?;
    Ok(agent)
}

/// Checks that an agent that places guests for ten minutes keeps within every kind of bound.
pub(super) fn held(inside: &mut Inside) -> anyhow::Result<()> {
    cpuset(MACHINE, MACHINE_CPUS)?;
    huge_pages(inside, 64)?;
    let with_isolated = [ORDINARY[1], ISOLATED_CPU];
    let mut both = ORDINARY.to_vec();
    both.dedup();
    let guests = [
        (
            busy("cells").vcpus(2).memory(Memory::BoundCells(vec![0, 1])),
            both.clone(),
        ),
        (
            busy("huge").memory(Memory::HugePages {
                nodeset: "0".to_owned(),
            }),
            both.clone(),
        ),
        (
            busy("own").cpus(Cpus::Set("2-3".to_owned())),
            with_isolated.to_vec(),
        ),
        (busy("free-a"), both.clone()),
        (busy("free-b"), both),
    ];
    let mut watched = Vec::new();
    for (spec, allowed) in guests {
        let guest = inside.create(&spec)?;
        watched.push(Watched::new(guest, &allowed)?);
    }
    // The memory of the free guests is scattered, so that the agent has something to bring home.
    for free in &watched[3..] {
        free.guest.scatter(&[0, 1])?;
    }
    let groups_before = cpusets()?;
    let mut agent = confined_agent(inside)?;
    let begin = Instant::now();
    let (mut looks, mut placed) = (0, false);
    while begin.elapsed() < ACTING {
        agent.expect_running()?;
        for guest in &watched {
            guest.holds()?;
        }
        placed |= watched[3].is_placed()? || watched[4].is_placed()?;
        looks += 1;
        thread::sleep(Duration::from_millis(300));
    }
    ensure!(placed, "the agent placed no guest, so this run shows nothing");
    inside.note(format!(
        "{looks} looks in {} s, nothing outside",
        ACTING.as_secs()
    ));
    stop(agent)?;
    for guest in &watched {
        wait_until("the guests to be as before", SOON, || guest.as_before())?;
        guest.keeps_bound_memory()?;
    }
    let groups = cpusets()?;
    ensure!(
        groups == groups_before,
        "cpusets changed: {groups:?}, before {groups_before:?}"
    );
    drop(watched);
    Ok(())
}

/// Returns the effective cpuset of each cgroup below the domains' cgroup. An empty cpuset has its parent's CPUs. libvirt does
/// not restore an empty one, but leaves it at all CPUs that the domain may use.
fn cpusets() -> anyhow::Result<BTreeMap<String, String>> {
    let mut all = BTreeMap::new();
    let mut open = vec![Path::new(CGROUPS).join(MACHINE)];
    while let Some(group) = open.pop() {
        let cpus = fs::read_to_string(group.join("cpuset.cpus.effective")).unwrap_or_default();
        all.insert(group.display().to_string(), cpus);
        let inner = fs::read_dir(&group)?.flatten();
        open.extend(inner.map(|entry| entry.path()).filter(|path| path.is_dir()));
    }
    Ok(all)
}

/// A QEMU process that runs no guest and that libvirt does not know; it ends when dropped.
struct Plain(Child);

impl Plain {
    fn start(name: &str, uuid: &str) -> anyhow::Result<Plain> {
        let child = Command::new("qemu-system-x86_64")
            .args(["-S", "-name", &format!("{name},debug-threads=on"), "-uuid", uuid])
            .args(["-m", "128", "-display", "none", "-nodefaults", "-accel", "tcg"])
            .stdin(Stdio::null())
            .spawn()?;
        Ok(Plain(child))
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until the agent says why it leaves a VM alone; returns the reason.
fn left_alone(inside: &Inside, vm: &str) -> anyhow::Result<String> {
    wait_until(&format!("{vm} to be left alone, with the reason"), SOON, || {
        let said = inside.ask("vm", &[vm])?;
        let why = |said: &Value| Some(said["vms"][0]["left_alone"].as_str()?.to_owned());
        Ok(match said.as_ref().ok().and_then(why) {
            Some(why) => Look::Done(why),
            None => Look::NotYet(format!("{said:?}")),
        })
    })
}

/// Checks that the agent leaves a domain alone if its cpuset contains only reserved CPUs, and that it tells two VMs of the same
/// name apart.
pub(super) fn names(inside: &mut Inside) -> anyhow::Result<()> {
    let settings = inside.dir().join("reserved.toml");
    write(
        &settings,
        &format!("[placement]\nreserved_cpus = [{ISOLATED_CPU}]\n"),
    )?;
    cpuset(MACHINE, MACHINE_CPUS)?;
    let spec = busy("only").cpus(Cpus::Set(ISOLATED_CPU.to_string()));
    let only = Watched::new(inside.create(&spec)?, &[ISOLATED_CPU])?;
    let config = settings.display().to_string();
    let agent = start_agent_with(inside, &["--policies", "tavo", "--config", &config])?;
    inside.note(left_alone(inside, "only")?);
    only.holds()?;
    stop(agent)?;
    wait_until("the guest to be as before", SOON, || only.as_before())?;

    let uuids = [
        "3fa2b9a0-0001-4000-8000-000000000001",
        "3fa2b9a0-0002-4000-8000-000000000002",
    ];
    let twins = uuids.map(|uuid| Plain::start("twin", uuid));
    let _twins = twins.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    let agent = start_acting(inside, "qemu", &["--policies", "tavo"])?;
    let said = wait_until("both to be seen, and their name to be refused", SOON, || {
        Ok(match inside.ask("mode", &["twin", "observe"])? {
            Err((_, said)) if uuids.iter().all(|uuid| said.contains(uuid)) => Look::Done(said),
            other => Look::NotYet(format!("{other:?}")),
        })
    })?;
    inside.note(said);
    inside.told("mode", &[uuids[1], "observe"])?;
    wait_until("one of them to be observed, and the other not", SOON, || {
        let modes = uuids.map(|uuid| {
            let told = inside.ask("vm", &[uuid]).ok()?.ok()?;
            told["vms"][0]["mode"].as_str().map(str::to_owned)
        });
        Ok(match modes.each_ref().map(Option::as_deref) {
            [Some("act"), Some("observe")] => Look::Done(()),
            _ => Look::NotYet(format!("{modes:?}")),
        })
    })?;
    stop(agent)?;
    let _ = fs::remove_dir_all("/etc/homenode/vms");
    Ok(())
}
