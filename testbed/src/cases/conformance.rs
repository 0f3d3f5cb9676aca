//! Runs the suite of checks that the simulator passes as well on the live host, and measures the agent's own cost.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use homenode_host::Host;
use homenode_host::conformance::{CHECKS, Check, Verdict};
use homenode_kvm::{KvmHost, Vms};
use homenode_testbed_guest::Behaviour;
use homenode_undo::Options;
use homenode_undo::RealHost as _;
use homenode_units::VmId;

use super::agent::{start_placing, wait_home};
use crate::inside::Inside;
use crate::inside::guest::GuestSpec;
use crate::inside::process::Ended;
use crate::inside::wait::{Look, wait_until};

/// How long the agent is watched, and with how many guests: the most that the emulated host can handle.
const WATCHED: Duration = Duration::from_secs(30);
const GUESTS: usize = 3;

/// The check that both guests skip on an emulated host, because the host has no resctrl.
const NOT_HERE: [&str; 1] =
    ["a part of caches or bandwidth is seen, can be renewed and lifted, and ends with its lease"];

/// Runs every check of the host contract against real libvirt, KVM and `move_pages`. A check that one of the two guests skips
/// must pass on the other.
pub(super) fn live_host(inside: &mut Inside) -> anyhow::Result<()> {
    let machine = homenode_machine_files::sysfs::read(Path::new("/"))?;
    let options = Options {
        state_dir: inside.dir().join("state"),
        ..Options::new(machine)
    };
    // The host serves topology pages, which a guest looks for when it starts, so it connects before the guests start.
    let mut host = KvmHost::connect(&Vms::of_libvirt(), options)?;
    let spec = GuestSpec::new("conforming").doing(Behaviour::busy(1).with_duty(30).with_touch(40));
    let skipped = run(inside, &mut host, &spec.nodes("restrictive", "0-3"), CHECKS)?;
    let mut spec = GuestSpec::new("told").vcpus(2).virtual_nodes(&[0, 1]);
    spec.memory_mib = 256;
    let skipped = run(inside, &mut host, &spec, &skipped)?;
    let skipped: Vec<&str> = skipped.iter().map(|check| check.name).collect();
    ensure!(
        skipped == NOT_HERE,
        "expected these checks to be skipped: {NOT_HERE:?}, saw {skipped:?}"
    );
    let failures = host.restore().failures;
    ensure!(
        failures.is_empty(),
        "expected every VM restored, saw {failures:?}"
    );
    Ok(())
}

/// Runs checks on a guest created for them; returns the skipped ones.
fn run(
    inside: &Inside,
    host: &mut KvmHost,
    spec: &GuestSpec,
    checks: &[&'static Check],
) -> anyhow::Result<Vec<&'static Check>> {
    let guest = inside.create(spec)?;
    check(inside, host, &guest.spec.name, checks)
}

/// Runs checks on the guest of this name; returns the skipped ones, each with its reason.
pub(super) fn check(
    inside: &Inside,
    host: &mut dyn Host,
    guest: &str,
    checks: &[&'static Check],
) -> anyhow::Result<Vec<&'static Check>> {
    let vm = vm_named(host, guest)?;
    let mut skipped = Vec::new();
    for check in checks {
        let verdict = (check.run)(host, vm).map_err(|error| anyhow!("{}: {error}", check.name))?;
        match verdict {
            Verdict::Passed => inside.note(check.name),
            Verdict::Skipped(why) => {
                inside.note(format!("skipped: {}: {why}", check.name));
                skipped.push(*check);
            }
        }
    }
    Ok(skipped)
}

fn vm_named(host: &mut dyn Host, name: &str) -> anyhow::Result<VmId> {
    let sample = host.sample()?;
    let vm = sample.vms.iter().find(|vm| vm.name == name);
    Ok(vm.context("the guest is not in the sample")?.id)
}

/// Records the CPU time of the agent with a few guests; it is not judged, because every instruction here is emulated.
pub(super) fn agent_cpu(inside: &mut Inside) -> anyhow::Result<()> {
    let mut agent = start_placing(inside, &[])?;
    for number in 0..GUESTS {
        let guest = inside
            .create(&GuestSpec::new(&format!("idle{number}")).doing(Behaviour::idle().with_touch(40)))?;
        wait_home(inside, &guest, Duration::from_secs(150))?;
    }
    let begin = Instant::now();
    agent.wait_json("its first minute", WATCHED * 3, |_| begin.elapsed() >= WATCHED)?;
    let ended = agent.stop(Duration::from_secs(60))?;
    ensure!(
        ended == Ended::Status(0),
        "expected the agent to end with status 0, saw {ended:?}"
    );
    let cpu_s = wait_until("the agent's last line", WATCHED, || {
        let cpu_s = agent.json().iter().find_map(|line| line["agent_cpu_s"].as_f64());
        Ok(cpu_s.map_or_else(|| Look::NotYet("no line with agent_cpu_s".to_owned()), Look::Done))
    })?;
    inside.note(format!(
        "{cpu_s:.2} s of emulated CPU time in all, {WATCHED:?} of it beside {GUESTS} guests, period 1 s"
    ));
    Ok(())
}
