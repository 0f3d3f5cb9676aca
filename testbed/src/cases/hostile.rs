//! A tenant that tries to harm its neighbour through the agent, on a host whose caches are counted. The tenant changes its
//! behaviour so that the agent moves a VM, pollutes in bursts between two samples, and pretends to need memory.
//!
//! # What is compared
//! Operators chose a node of its own as home for each guest, and the agent runs its own policies. Next to a polluting tenant
//! the neighbour would suffer even without an agent. So its state is compared with that next to an honest tenant of the same
//! average use. The honest tenant reads half of the time, in bursts of [`HONEST_MS`]: samples taken once a second cannot tell
//! these from a steady load.
//!
//! # The measure
//! Time means nothing here, as each CPU is emulated. Instead, the cost of the neighbour's work is counted, in cycles for each
//! line that it reads. These are the arithmetic between two lines, the way to the cache, and, for lines missing from the
//! cache, the way to memory, with the figures that the agent uses for the model. Misses are those of the neighbour's frames,
//! from the model's page. The distance of its memory follows from where its pages are (`numa_maps`), as if it used all of them
//! equally. The neighbour's loss is the share of work per cycle that it lacks compared with its work next to the honest
//! tenant. Waiting for CPUs is not included, as most of it here is the emulator's. So the causes of waiting are checked
//! directly: the neighbour's vCPU must keep the CPUs of its home, and no quota may hold it. No memory may be taken from it at
//! any time.
//!
//! # A permit
//! At last the tenant gets a permit that its average use keeps and its bursts do not. It must have a quota at every look, also
//! while it rests, and its worst moments must be as its permit allows: the most misses in a [`GLANCE`], from the model's page.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use homenode_formats::pmu_region::Page;
use homenode_kernel::attribution::{LLC_CYCLES, MEMORY_CYCLES, REMOTE_CYCLES};
use homenode_testbed_guest::Behaviour;
use homenode_units::Permit;

use super::agent::{SOON, home_of_operator, limits, start_agent_with, stop};
use super::arrange::{decisions, resting_model, wait_counted};
use super::balloon::has_mib;
use super::counted::{counts, tag};
use super::permits::wait_limits;
use crate::inside::Inside;
use crate::inside::guest::{Guest, GuestSpec};
use crate::inside::process::Program;
use crate::inside::wait::{Look, wait_until};
use crate::outside::emulated::LLC_BYTES;

/// How long each behaviour of the tenant is counted.
const WINDOW: Duration = Duration::from_secs(30);
/// How long a behaviour lasts before it is counted.
const SETTLED: Duration = Duration::from_secs(5);
/// The largest share of its work that the neighbour may lose.
const LOSS_MAX: f64 = 0.01;
/// Steps of arithmetic that the neighbour does for each line: it makes ten references to the cache in 1000 instructions, like
/// memory-intensive programs.
const THINK: u32 = 100;
/// CPUs of each guest's node.
const NEIGHBOURS_CPUS: [u32; 2] = [0, 1];
const TENANTS_CPUS: [u32; 2] = [2, 3];
/// Length of bursts: of an honest tenant, of one that changes between two samples, and of one that changes over several samples.
const HONEST_MS: u32 = 10;
const BELOW_PERIOD_MS: u32 = 450;
const PROVOKING_MS: u32 = 5000;
/// Memory of the tenant, its floor, and what it grabs to pretend that it needs more, in MiB. Its kernel uses 81, and what it
/// reads takes 16. By the time it grabs, only its floor is left, so it has some 80 to grab from. Once less than a tenth of its
/// memory is unused, the agent returns some memory to it.
const TENANT_MIB: u64 = 256;
const FLOOR_MIB: u64 = 176;
const GRABBED_MIB: u32 = 68;
/// The tenant's permit, as a part of its misses in a burst. It reads for half of the time.
const PERMIT_PART: f64 = 0.6;
/// Upper limit for the tenant's misses in its worst moment with the permit, as a share of its misses in a burst without one. A
/// quota of 0.6 CPUs lets up to 1.3 times as many through in 30 ms, and fewer in a [`GLANCE`].
const HELD_PART_MAX: f64 = 0.8;
/// For how long misses are counted at a time. A glance is shorter than a burst.
const GLANCE: Duration = Duration::from_millis(200);
/// How long the tenant grabs memory, and how long it then pretends to need none.
const TURN: Duration = Duration::from_secs(10);

/// The behaviour of a tenant that reads more than the cache holds, in bursts of this length.
fn reading(burst_ms: u32) -> Behaviour {
    Behaviour::walking(((8 * LLC_BYTES) >> 10) as u32, 0).with_bursts(burst_ms)
}

/// The cost of the neighbour's work in a window.
#[derive(Clone, Copy)]
struct Cost {
    /// Number of lines requested from the cache.
    references: u64,
    /// Number of these lines that the cache did not have.
    misses: u64,
    /// Largest share of the neighbour's memory that was away from its node at any time.
    remote: f64,
}

impl Cost {
    /// Returns the cycles per line.
    fn cycles(self) -> f64 {
        let missed = self.misses as f64 / self.references.max(1) as f64;
        let memory = (1.0 - self.remote) * MEMORY_CYCLES + self.remote * REMOTE_CYCLES;
        f64::from(THINK) + LLC_CYCLES + missed * memory
    }
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} references missed, {:.2} percent of its memory away: {:.2} cycles for a line",
            self.misses,
            self.references,
            100.0 * self.remote,
            self.cycles()
        )
    }
}

/// The two guests, and the page in which the neighbour's misses are counted.
struct Scene<'a> {
    inside: &'a Inside,
    page: Page<'static>,
    neighbour: &'a Guest,
    tenant: &'a Guest,
    neighbours_mib: u64,
}

impl Scene<'_> {
    /// Whether each vCPU may run on these CPUs only.
    fn is_home(guest: &Guest, cpus: [u32; 2]) -> anyhow::Result<bool> {
        let affinity = guest.process.vcpu_affinity()?;
        Ok(affinity
            .values()
            .all(|on| on.iter().all(|cpu| cpus.contains(cpu))))
    }

    /// Returns the share of the neighbour's pages that are not on its node.
    fn remote(&self) -> anyhow::Result<f64> {
        let pages = self.neighbour.pages_per_node()?;
        let all: u64 = pages.values().sum();
        let home = pages.get(&0).copied().unwrap_or(0);
        Ok((all - home) as f64 / all.max(1) as f64)
    }

    /// Measures the neighbour's cost for a window, while `in_turn` may change the tenant's behaviour every [`TURN`]. Fails if
    /// the neighbour loses CPUs or memory.
    fn watch(&self, mut in_turn: impl FnMut(u32) -> anyhow::Result<()>) -> anyhow::Result<Cost> {
        std::thread::sleep(SETTLED);
        let tag = tag(self.page, self.neighbour)?.context("no frame of the neighbour has a tag")?;
        let (before, begin) = (counts(self.page, tag), Instant::now());
        let (mut remote, mut turn) = (self.remote()?, 0);
        while begin.elapsed() < WINDOW {
            if begin.elapsed() >= TURN * turn {
                in_turn(turn)?;
                turn += 1;
            }
            remote = f64::max(remote, self.remote()?);
            ensure!(
                Scene::is_home(self.neighbour, NEIGHBOURS_CPUS)?,
                "expected the neighbour to run at home, saw {:?}",
                self.neighbour.process.vcpu_affinity()?
            );
            let (held, has) = (limits(self.neighbour)?, has_mib(self.neighbour)?);
            ensure!(
                held.is_empty(),
                "expected the neighbour to have no quota, saw {held:?}"
            );
            ensure!(
                has == self.neighbours_mib,
                "expected the neighbour to keep {} MiB, saw {has}",
                self.neighbours_mib
            );
            std::thread::sleep(Duration::from_secs(2));
        }
        let after = counts(self.page, tag);
        Ok(Cost {
            references: after.references.wrapping_sub(before.references),
            misses: after.misses.wrapping_sub(before.misses),
            remote,
        })
    }

    /// Measures the neighbour's cost next to a tenant with this steady behaviour.
    fn beside(&self, what: &str, behaviour: Behaviour) -> anyhow::Result<Cost> {
        self.tenant.switch_to(behaviour)?;
        let cost = self.watch(|_| Ok(()))?;
        self.inside.note(format!("beside a tenant that {what}: {cost}"));
        Ok(cost)
    }

    /// Measures the neighbour's cost next to a tenant that grabs and releases memory in turn, and reads like the honest
    /// tenant.
    fn beside_liar(&self) -> anyhow::Result<Cost> {
        let cost = self.watch(|turn| {
            let touched = if turn % 2 == 0 { GRABBED_MIB } else { 0 };
            self.tenant.switch_to(reading(HONEST_MS).with_touch(touched))
        })?;
        self.inside.note(format!(
            "beside a tenant that grabs {GRABBED_MIB} MiB in turns, and has {} MiB: {cost}",
            has_mib(self.tenant)?
        ));
        Ok(cost)
    }
}

/// Misses of the tenant per slice of 30 ms, counted for a [`GLANCE`] at a time.
struct Bursts {
    /// The median of the busier half of all glances, because the tenant rests for half of the time.
    usual: f64,
    /// The most.
    worst: f64,
}

/// Watches a tenant with this behaviour. Fails if the tenant lacks a quota at a time when it should have one, or has one when it
/// should not.
fn bursts(scene: &Scene<'_>, behaviour: Behaviour, is_held: bool) -> anyhow::Result<Bursts> {
    scene.tenant.switch_to(behaviour)?;
    std::thread::sleep(SETTLED);
    let tag = tag(scene.page, scene.tenant)?.context("no frame of the tenant has a tag")?;
    let begin = Instant::now();
    let mut before = (counts(scene.page, tag).misses, begin);
    let mut glances = Vec::new();
    while begin.elapsed() < WINDOW {
        std::thread::sleep(GLANCE);
        let now = (counts(scene.page, tag).misses, Instant::now());
        let slices = (now.1 - before.1).as_nanos() as f64 / Permit::SLICE.as_f64();
        glances.push(now.0.wrapping_sub(before.0) as f64 / slices);
        before = now;
        let held = limits(scene.tenant)?;
        ensure!(
            held.is_empty() != is_held,
            "expected {} quota of the tenant, saw {held:?}",
            if is_held { "a" } else { "no" }
        );
    }
    glances.sort_by(f64::total_cmp);
    Ok(Bursts {
        usual: glances[glances.len() * 3 / 4],
        worst: glances[glances.len() - 1],
    })
}

/// Checks that a permit that the tenant keeps on average also limits its bursts, whether a burst ends within a second or takes
/// several.
fn bursts_held(scene: &Scene<'_>) -> anyhow::Result<()> {
    let inside = scene.inside;
    let free = bursts(scene, reading(BELOW_PERIOD_MS), false)?;
    let booked = (PERMIT_PART * free.usual) as u64;
    inside.told("permit", &["set", "tenant", &booked.to_string()])?;
    let found = wait_limits(scene.tenant, "the tenant to be held", |found| !found.is_empty())?;
    inside.note(format!("a permit of {booked}: {found:?}"));
    for burst_ms in [BELOW_PERIOD_MS, PROVOKING_MS] {
        let held = bursts(scene, reading(burst_ms), true)?;
        inside.note(format!(
            "in bursts of {burst_ms} ms the tenant missed {:.0} per slice, {:.0} at worst; without a permit {:.0}, {:.0}",
            held.usual, held.worst, free.usual, free.worst
        ));
        ensure!(
            held.worst < HELD_PART_MAX * free.worst,
            "expected bursts of {burst_ms} ms to stay within a permit of {booked} per slice, saw {:.0}",
            held.worst
        );
    }
    inside.told("permit", &["set", "tenant", "none"])?;
    Ok(())
}

/// Starts an agent that takes memory from any VM whose floor allows it.
fn start(inside: &Inside) -> anyhow::Result<Program> {
    let path = inside.dir().join("hostile.toml");
    std::fs::write(
        &path,
        "[working_set]\nwindow = \"4s\"\ncpu_share_max = 1.0\n[overcommit]\nwhen = \"always\"\nreserve_min = \"24MiB\"\n\
         step = 0.2\nstep_wait = \"4s\"\n",
    )?;
    start_agent_with(inside, &["--config", &path.display().to_string()])
}

/// Checks that each hostile behaviour costs the neighbour less than a percent of its work, and that a permit limits bursts.
pub(super) fn neighbour_spared(inside: &mut Inside) -> anyhow::Result<()> {
    let page = resting_model()?;
    let quarter = ((LLC_BYTES / 4) >> 10) as u32;
    let mut neighbour = GuestSpec::new("neighbour").doing(Behaviour::walking(quarter, THINK));
    neighbour.extra_xml = home_of_operator("0");
    let mut tenant = GuestSpec::new("tenant").vcpus(2).doing(reading(HONEST_MS));
    tenant.extra_xml = home_of_operator("1");
    tenant.memory_mib = TENANT_MIB;
    let guests = inside.create_at_once(&[neighbour, tenant])?;
    let [neighbour, tenant] = guests.as_slice() else {
        anyhow::bail!("expected two guests, saw {}", guests.len());
    };
    neighbour.wait_ready()?;
    tenant.wait_ready()?;
    neighbour.move_to(0)?;
    tenant.move_to(1)?;
    let agent = start(inside)?;
    wait_counted(inside, &[neighbour, tenant])?;
    wait_until("both to run at home", SOON, || {
        let is_home = Scene::is_home(neighbour, NEIGHBOURS_CPUS)? && Scene::is_home(tenant, TENANTS_CPUS)?;
        Ok(match is_home {
            true => Look::Done(()),
            false => Look::NotYet(format!(
                "{:?}, {:?}",
                neighbour.process.vcpu_affinity()?,
                tenant.process.vcpu_affinity()?
            )),
        })
    })?;
    inside.told("memory", &["set", "tenant", &format!("{FLOOR_MIB}MiB")])?;
    let scene = Scene {
        inside,
        page,
        neighbour,
        tenant,
        neighbours_mib: has_mib(neighbour)?,
    };
    let honest = scene.beside("reads half of the time", reading(HONEST_MS))?;
    let hostile = [
        ("alternates", scene.beside("alternates", reading(PROVOKING_MS))?),
        (
            "pollutes in bursts",
            scene.beside("pollutes in bursts", reading(BELOW_PERIOD_MS))?,
        ),
        ("lies", scene.beside_liar()?),
    ];
    let again = scene.beside("reads half of the time again", reading(HONEST_MS))?;
    for guest in [neighbour, tenant] {
        for [policy, action, reason] in decisions(&agent, guest) {
            inside.note(format!("{}: {policy} {action}: {reason}", guest.spec.name));
        }
    }
    // The difference between two honest stretches is measurement noise.
    let own = (1.0 - honest.cycles() / again.cycles()).abs();
    inside.note(format!(
        "two honest stretches differ by {:.3} percent",
        100.0 * own
    ));
    ensure!(
        own < LOSS_MAX,
        "expected the same figures in both honest stretches: {honest}; {again}"
    );
    for (what, cost) in hostile {
        let loss = 1.0 - honest.cycles() / cost.cycles();
        inside.note(format!(
            "a tenant that {what} costs its neighbour {:.3} percent",
            100.0 * loss
        ));
        ensure!(
            loss < LOSS_MAX,
            "expected a loss under a percent beside a tenant that {what}: {cost}; honest: {honest}"
        );
    }
    bursts_held(&scene)?;
    stop(agent)
}
