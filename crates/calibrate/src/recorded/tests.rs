use homenode_host::{Counters, Sample, VcpuSample, VmSample};
use homenode_machine_files::preset;
use homenode_units::{Bytes, CpuId, VmId};
use proptest::prelude::*;

use super::load::curve_through;
use super::*;

/// Ten samples, one second apart, of VMs with one vCPU each on the first CPU, and with these counts per second.
fn seen(machine: &Machine, names: &[String], each: &[Counters]) -> Seen {
    let mut seen = Seen::new(machine);
    for second in 0..10_u64 {
        let vms = names.iter().zip(1..).map(|(name, id)| {
            let mut vm = VmSample::new(VmId(id), name.clone());
            vm.memory_bytes = Bytes::from_gib(1);
            let of = &each[id as usize % each.len()];
            vm.vcpus = vec![VcpuSample {
                running_ns: Ns::from_millis(500 * second),
                cpu: Some(CpuId(0)),
                counters: Some(Counters {
                    instructions: of.instructions * second,
                    cycles: of.cycles * second,
                    llc_references: of.llc_references.map(|count| count * second),
                    llc_misses: of.llc_misses.map(|count| count * second),
                }),
                ..VcpuSample::default()
            }];
            vm
        });
        let vms = vms.collect();
        seen.take(Sample {
            at: Ns::from_secs(second),
            vms,
            ..Sample::default()
        });
    }
    seen
}

fn about() -> About {
    About {
        title: "a host".to_owned(),
        machine: "r910".to_owned(),
        policies: vec!["default".to_owned()],
        ..About::default()
    }
}

#[test]
fn the_curve_has_the_miss_ratio_that_was_seen_and_falls_as_a_third_root() {
    for m in [0.0, 0.001, 0.02, 0.1, 0.4, 0.7, 0.9, 0.999] {
        let curve = curve_through(2e6, m);
        assert!(
            (curve.at(2e6) - m).abs() < 2e-3,
            "{m}: {curve:?} {}",
            curve.at(2e6)
        );
        assert!((0.0..=1.0).contains(&curve.m_inf));
        if (0.02..=0.6).contains(&m) {
            let power = (curve.at(2.02e6) / curve.at(2e6)).ln() / 1.01_f64.ln();
            assert!((power + 1.0 / 3.0).abs() < 0.02, "{m}: {power}");
        }
    }
}

#[test]
fn what_was_counted_is_what_the_program_does() {
    let machine = preset("r910").unwrap();
    let of = Counters {
        instructions: 1_000_000_000,
        cycles: 900_000_000,
        llc_references: Some(10_000_000),
        llc_misses: Some(4_000_000),
    };
    let recorded = Recorded::of(&machine, &seen(&machine, &["web".to_owned()], &[of])).unwrap();
    let load = recorded.vms[0].load.as_ref().unwrap();
    assert!(
        (load.instructions - 9e9).abs() < 1e6 && (load.llc_accesses - 10.0).abs() < 1e-6,
        "{load:?}"
    );
    // The program rested half of the time, so a rest is as long as the work before it.
    let (instructions, ns) = load.rest.unwrap();
    assert!(
        (ns - 50e6).abs() < 1e6 && (instructions - 1e8).abs() < 1e6,
        "{load:?}"
    );
    assert!(
        load.assumed.iter().any(|note| note.contains("not known")),
        "{load:?}"
    );
}

#[test]
fn a_machine_without_figures_and_a_time_without_vms_are_refused() {
    let machine = preset("r910").unwrap();
    let without_vms = seen(&machine, &[], &[Counters::default()]);
    assert_eq!(
        Recorded::of(&machine, &without_vms).unwrap_err(),
        RecordedError::NoVms
    );
    assert_eq!(
        Recorded::of(&machine, &Seen::new(&machine)).unwrap_err(),
        RecordedError::TooShort
    );
    let bare = Machine {
        hardware: None,
        ..machine.clone()
    };
    assert!(matches!(
        Recorded::of(&bare, &without_vms),
        Err(RecordedError::NoHardware(_))
    ));
}

proptest! {
    #[test]
    fn whatever_a_vm_is_called_the_file_reads(
        names in prop::collection::vec("\\PC*|.*|web", 1..5),
        counts in prop::collection::vec((0_u64..4_000_000_000, 0_u64..60_000_000, 0.0..1.0), 1..4),
    ) {
        let machine = preset("r910").unwrap();
        let each: Vec<Counters> = counts
            .iter()
            .map(|(instructions, references, missed)| Counters {
                instructions: *instructions,
                cycles: *instructions,
                llc_references: Some(*references),
                llc_misses: Some((*references as f64 * missed) as u64),
            })
            .collect();
        let recorded = Recorded::of(&machine, &seen(&machine, &names, &each)).unwrap();
        for purpose in [Purpose::File, Purpose::Fit] {
            let text = recorded.text(&about(), purpose);
            let scenario = Scenario::from_toml("made.toml", &text);
            prop_assert!(scenario.is_ok(), "{:?}\n{}", scenario.unwrap_err().to_string(), text);
            let scenario = scenario.unwrap();
            prop_assert_eq!(scenario.vms.len(), names.len());
            prop_assert!(scenario.vms.iter().zip(&names).all(|(vm, name)| vm.name.starts_with(name.as_str())));
        }
    }
}
