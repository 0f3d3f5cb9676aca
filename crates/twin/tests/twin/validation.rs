//! The epoch model stays near the access-level reference. The whole comparison is `docs/VALIDATION.md`.

use crate::reference::{sharing, traffic};
use homenode_twin::models::CLASSES;

#[test]
fn sharing_a_cache_errs_by_three_points_at_most_on_average() {
    // The R910's cache: every second stream, paired with all others of these.
    let streams: Vec<_> = sharing::streams().into_iter().step_by(2).collect();
    let shape = sharing::shape_of("r910");
    let errors = sharing::compare(shape, &streams, &[CLASSES, 1], 150_000);
    let (ours, random) = (&errors[0], &errors[1]);
    assert!(
        ours.mean <= 0.03,
        "mean {:.4}, worst: {}",
        ours.mean,
        ours.worst_case
    );
    assert!(
        ours.mean < random.mean,
        "{:.4}, with one class {:.4}",
        ours.mean,
        random.mean
    );
}

#[test]
fn lines_held_follow_a_stream_that_sleeps_and_comes_back() {
    let streams = sharing::streams();
    let shape = sharing::shape_of("e5_1603v3");
    let errors = sharing::transient(shape, &streams[5], &streams[0], CLASSES);
    assert!(errors.iter().all(|error| *error < 0.05), "{errors:?}");
}

#[test]
fn bandwidth_is_shared_as_the_reference_shares_it() {
    let machine = traffic::with_measured_curves("amd48");
    for (name, groups) in traffic::cases() {
        let truth = traffic::reference(&machine, &groups, 100.0);
        let ours = traffic::model(&machine, &groups);
        for (at, (truth, ours)) in truth.iter().zip(&ours).enumerate() {
            let error = (ours.0 / truth.0 - 1.0).abs();
            assert!(error < 0.15, "{name}, group {at}: {ours:?}, reference {truth:?}");
        }
    }
}

#[test]
fn pages_and_accesses_fall_on_nodes_as_in_the_reference() {
    for (by_one, shared) in [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (0.3, 0.3)] {
        let [truth, ours] = traffic::accesses_by_node(by_one, shared)
            .map(|counts| homenode_host::imbalance(&counts).expect("memory was accessed"));
        assert!(
            (truth - ours).abs() < 0.05,
            "{ours} with {by_one} by one, {shared} shared; reference {truth}"
        );
    }
}
