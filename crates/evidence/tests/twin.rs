//! Whether the experiment finds what is there, and nothing where nothing is, on the twin.

use homenode_control::{Config, Control, Mode, PolicySet};
use homenode_evidence::crossover::{Acting, Crossover, Look, Subject, run_block};
use homenode_evidence::{Trial, Verdict};
use homenode_host::{Host as _, HostError, Setting};
use homenode_twin::{Scenario, Twin, VmSpec};
use homenode_units::{Bytes, Ns, VmId};

/// The twin with its agent.
struct Simulated {
    twin: Twin,
    control: Control,
    vms: Vec<VmId>,
}

impl Simulated {
    fn of(policies: PolicySet, seed: u64) -> Simulated {
        let machine = homenode_machine_files::preset("e5_1603v3").unwrap();
        let vm = |name: &str, workload: &str| VmSpec::new(name, 1, Bytes::from_gib(4), workload).doing(100.0);
        let specs = vec![vm("web", "webserving"), vm("gcc", "gcc"), vm("noisy", "lbm")];
        let twin = Twin::new(machine, &Scenario::of("crossover", specs), seed).unwrap();
        let vms = ["web", "gcc", "noisy"]
            .map(|name| twin.vm_id(name).unwrap())
            .to_vec();
        let config = Config {
            policies,
            ..Config::default()
        };
        Simulated {
            twin,
            control: Control::new(config, Mode::Act),
            vms,
        }
    }
}

impl Subject for Simulated {
    type Error = HostError;

    fn set(&mut self, acting: Acting, span: Ns) -> Result<(), HostError> {
        let span = if acting == Acting::Acts { Ns::ZERO } else { span };
        self.vms.iter().for_each(|vm| self.control.observe_for(*vm, span));
        Ok(())
    }

    fn look(&mut self) -> Result<Look, HostError> {
        let passed = self.twin.wait(Ns::from_secs(1));
        self.control.step(&mut self.twin)?;
        let status = self.control.status(self.twin.machine());
        Ok(Look::of(passed, &status, |vm| Some(vm.name.clone())))
    }
}

fn run(mut subject: Simulated, seed: u64) -> Trial {
    let plan = Crossover::of(Ns::from_secs(51 * 60), 3, seed).unwrap();
    let blocks = plan
        .blocks
        .iter()
        .map(|acting| run_block(&mut subject, &plan, *acting).unwrap().unwrap())
        .collect();
    Trial::begun(Default::default(), plan).with_blocks(blocks)
}

#[test]
fn a_planted_effect_is_found_with_its_sign_in_20_of_20_runs() {
    for seed in 0..20 {
        let mut subject = Simulated::of(PolicySet::Homenode, seed);
        // A permit that holds the VM back while the agent acts.
        subject.twin.wait(Ns::from_secs(1));
        let noisy = subject.twin.vm_id("noisy").unwrap();
        subject
            .twin
            .set(noisy, Setting::Permit(Some("500k".parse().unwrap())))
            .unwrap();
        let report = run(subject, seed);
        let effect = &report.judged.vms["noisy"];
        assert!(
            effect.is_claimed && effect.high_percent < 0.0,
            "{seed}: {effect:?}"
        );
        assert!(effect.low_percent <= effect.percent && effect.percent <= effect.high_percent);
        assert!(
            matches!(&report.judged.verdict, Verdict::Harms { slower } if slower.iter().any(|vm| vm == "noisy")),
            "{seed}: {:?}",
            report.judged.verdict
        );
    }
}

#[test]
fn where_nothing_differs_at_most_one_run_in_20_claims_something() {
    let claims = |seed: &u64| {
        let judged = run(Simulated::of(PolicySet::Default, *seed), *seed).judged;
        assert_eq!((judged.vms.len(), judged.not_judged.len()), (3, 0), "{judged:#?}");
        !matches!(judged.verdict, Verdict::NoDifference | Verdict::NothingDone)
    };
    let wrong: Vec<u64> = (0..20).filter(claims).collect();
    assert!(wrong.len() <= 1, "{wrong:?}");
}
