//! Fuzzes workload files: the footprint and the miss ratios of an accepted workload are possible at every size.

#![no_main]

use homenode_twin::Workload;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(workload) = Workload::from_toml("workload.toml", text) else {
        return;
    };
    workload.check().expect("it was checked");
    let Some(program) = &workload.program else { return };
    assert!(program.footprint(1) <= program.footprint(8));
    let ratios = [0.0, 64.0, 1e6, 1e12].map(|bytes| program.miss_ratio.at(bytes));
    assert!(
        ratios.iter().all(|ratio| (0.0..=1.0).contains(ratio)),
        "{ratios:?}"
    );
    assert!(ratios.is_sorted_by(|less, more| less >= more), "{ratios:?}");
});
