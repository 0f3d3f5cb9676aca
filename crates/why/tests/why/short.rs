//! Short histories, as of an agent that has just started.

use homenode_host::{Host as _, Sample};
use homenode_twin::{Scenario, Twin, VmSpec};
use homenode_units::{Bytes, Ns, VmId};
use homenode_why::{Explanation, Measure, WhyError, explain, within};

/// Returns the samples of this many seconds on a host with one VM.
fn seconds(workload: &str, seconds: u64) -> (Twin, VmId, Vec<Sample>) {
    let vm = VmSpec::new("web", 2, Bytes::from_gib(1), workload);
    let machine = homenode_machine_files::preset("r910").unwrap();
    let mut twin = Twin::new(machine, &Scenario::of("one", vec![vm]), 1).unwrap();
    twin.wait(Ns::from_secs(1));
    let mut samples = vec![twin.sample().unwrap()];
    for _ in 0..seconds {
        twin.wait(Ns::from_secs(1));
        samples.push(twin.sample().unwrap());
    }
    let id = twin.vm_id("web").unwrap();
    (twin, id, samples)
}

/// Explains the last five minutes of these samples, as far as they reach.
fn explained(twin: &Twin, id: VmId, samples: &[Sample]) -> Result<Explanation, WhyError> {
    let end = samples.last().unwrap().at;
    let asked = (end.saturating_sub(Ns::from_secs(300)), end);
    let window = within(samples[0].at, None, asked);
    explain(twin.machine(), samples, id, window, &[])
}

#[test]
fn of_a_minute_the_last_fifth_is_compared_with_the_rest() {
    let (twin, id, samples) = seconds("povray", 60);
    let told = explained(&twin, id, &samples).unwrap();
    assert_eq!(told.history_ns, Ns::from_secs(60));
    assert_eq!((told.from_ns, told.to_ns), (Ns::from_secs(49), Ns::from_secs(61)));
    assert_eq!(
        (told.speed.measure, told.lost),
        (Measure::InstructionsPerCpuS, 0.0)
    );
    let ratio = told.speed.ratio.unwrap();
    assert!((0.97..1.03).contains(&ratio), "{ratio}");
    assert_eq!(told.speed.then / told.speed.usual.unwrap(), ratio);
}

#[test]
fn of_a_few_seconds_the_speed_is_told_and_that_it_cannot_be_compared() {
    let (twin, id, samples) = seconds("povray", 3);
    let told = explained(&twin, id, &samples).unwrap();
    assert_eq!((told.speed.usual, told.speed.ratio, told.lost), (None, None, 0.0));
    assert!(told.speed.then > 1e8, "{told:?}");
    assert!(
        told.notes.iter().any(|note| note.contains("too few to tell")),
        "{told:?}"
    );
}

#[test]
fn a_vm_that_wanted_no_cpu_time_is_refused_with_the_reason() {
    let (twin, id, samples) = seconds("idle", 60);
    let refused = explained(&twin, id, &samples).unwrap_err();
    assert_eq!(refused, WhyError::Idle { name: "web".into() });
    let (twin, id, samples) = seconds("povray", 0);
    let refused = explained(&twin, id, &samples).unwrap_err();
    assert!(refused.to_string().contains("--at"), "{refused}");
}

#[test]
fn without_counters_the_share_of_cpu_time_is_compared() {
    let (twin, id, mut samples) = seconds("povray", 60);
    let vcpus = samples.iter_mut().flat_map(|sample| &mut sample.vms);
    let vcpus = vcpus.flat_map(|vm| &mut vm.vcpus);
    vcpus.for_each(|vcpu| vcpu.counters = None);
    let told = explained(&twin, id, &samples).unwrap();
    assert_eq!(told.speed.measure, Measure::ShareRan);
    assert!((0.9..=1.0).contains(&told.speed.then), "{told:?}");
}

#[test]
fn a_window_is_shortened_only_if_nothing_is_before_it_and_holds_the_time_asked_about() {
    let at = Ns::from_secs;
    let asked = (at(1000), at(1300));
    // Fifty seconds before the window are five steps of it, which are enough.
    assert_eq!(within(at(950), None, asked), asked);
    assert_eq!(within(at(1100), None, asked), (at(1260), at(1300)));
    assert_eq!(within(at(1100), Some(at(1150)), asked), (at(1150), at(1300)));
    assert_eq!(within(at(1200), Some(at(1150)), asked), (at(1200), at(1300)));
}
