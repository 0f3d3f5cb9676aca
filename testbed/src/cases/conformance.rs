//! The live host under the suite that the twin passes as well, and what the agent itself costs.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use homenode_host::Host as _;
use homenode_host::conformance::CHECKS;
use homenode_linux::{LibvirtHost, Options};
use homenode_testbed_guest::Behaviour;

use super::agent::{start_placing, wait_home};
use crate::inside::Inside;
use crate::inside::guest::GuestSpec;
use crate::inside::process::Ended;
use crate::inside::wait::{Look, wait_until};

/// How long the agent is watched, and with how many guests: as many as the emulated host holds well.
const WATCHED: Duration = Duration::from_secs(30);
const GUESTS: usize = 3;

/// Every check of the host contract, against real libvirt, KVM and `move_pages`.
pub fn live_host(inside: &mut Inside) -> anyhow::Result<()> {
    let spec = GuestSpec::new("conforming").doing(Behaviour::busy(1).with_duty(30).with_touch(40));
    let guest = inside.create(&spec.nodes("restrictive", "0-3"))?;
    guest.wait_ready()?;
    let machine = homenode_machine_files::sysfs::read(Path::new("/"))?;
    let options = Options {
        state_dir: inside.dir().join("state"),
        ..Options::new(machine)
    };
    let mut host = LibvirtHost::connect(LibvirtHost::DEFAULT_URI, options)?;
    let sample = host.sample()?;
    let vm = sample
        .vms
        .iter()
        .find(|vm| vm.name == guest.spec.name)
        .context("the guest is not in the sample")?;
    let vm = vm.id;
    for check in CHECKS {
        (check.run)(&mut host, vm).map_err(|error| anyhow!("{}: {error}", check.name))?;
        inside.note(check.name.to_owned());
    }
    let failures = host.restore();
    ensure!(
        failures.is_empty(),
        "expected everything given back, saw {failures:?}"
    );
    Ok(())
}

/// CPU time of the agent with a few guests (record: every instruction here is emulated).
pub fn agent_cpu(inside: &mut Inside) -> anyhow::Result<()> {
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
