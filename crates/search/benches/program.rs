//! Compares the cost per period of an external policy with that of the built-in policy; docs/POLICIES.md has the figures.

#![allow(missing_docs)] // criterion's macros define undocumented functions

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use homenode_control::external::{PlanDocument, Planner, PlannerError, ViewDocument};
use homenode_control::{Config, Control, Mode};
use homenode_host::{Host, Rates, Version};
use homenode_search::program::Program;
use homenode_twin::{Scenario, Twin, VmSpec};
use homenode_units::{Bytes, Ns};

/// A planner in this process that answers as a program that requests nothing. The time that it takes is the time to convert the
/// documents.
struct Nothing;

impl Planner for Nothing {
    fn name(&self) -> &str {
        "nothing"
    }

    fn plan(&mut self, view: &ViewDocument<'_>) -> Result<PlanDocument, PlannerError> {
        let Version(version) = view.version;
        let text = serde_json::to_vec(view)?;
        black_box(text);
        let plan = format!(r#"{{"version":{version},"actions":[]}}"#);
        Ok(PlanDocument::from_json(plan.as_bytes())?)
    }
}

const LEAST: &str = "\
import sys
for line in sys.stdin:
    version = line.split('\"version\":', 1)[1].split(',', 1)[0]
    print('{\"version\":' + version + ',\"actions\":[]}', flush=True)
";

/// Builds 32 one-vCPU VMs that have run for a while, as in the benchmark of the control loop.
fn period(c: &mut Criterion) {
    let near = concat!(
        "exec:python3 ",
        env!("CARGO_MANIFEST_DIR"),
        "/../../data/policies/near.py"
    );
    // The cheapest possible program: it answers each line with the version found in it.
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), LEAST).expect("a file");
    let least = format!("exec:python3 {}", file.path().display());
    let planner = |program: &str| -> Option<Box<dyn Planner>> {
        let program: Program = program.parse().expect("words");
        Some(Box::new(program.start().expect("it is installed")))
    };
    let cases: [(&str, Option<Box<dyn Planner>>); 4] = [
        ("built-in", None),
        ("documents alone", Some(Box::new(Nothing))),
        ("a program that answers at once", planner(&least)),
        ("the example", planner(near)),
    ];
    for (name, planner) in cases {
        let machine = homenode_machine_files::preset("r910").expect("a preset");
        let vm = |n: usize| {
            VmSpec::new(
                &format!("vm{n}"),
                1,
                Bytes::from_gib(1),
                ["soplex", "povray"][n % 2],
            )
        };
        let scenario = Scenario::of("bench", (0..32).map(vm).collect());
        let mut twin = Twin::new(machine.clone(), &scenario, 1).expect("a possible scenario");
        let mut control = Control::new(Config::default(), Mode::Act);
        if let Some(planner) = planner {
            control = control.with_planner(planner);
        }
        for _ in 0..5 {
            control.step(&mut twin).expect("a twin can be read");
            twin.wait(Ns::from_secs(1));
        }
        let before = twin.sample().expect("a twin can be read");
        twin.wait(Ns::from_secs(1));
        let now = twin.sample().expect("a twin can be read");
        c.bench_function(&format!("one period, 32 VMs: {name}"), |b| {
            b.iter(|| {
                let rates = Rates::between(&machine, &before, &now);
                control.observe(&machine, &now, rates.as_ref());
                black_box(control.plan(&machine, &now, rates.as_ref()))
            });
        });
        assert!(
            control.failed_planner().is_none(),
            "{:?}",
            control.failed_planner()
        );
    }
}

criterion_group!(benches, period);
criterion_main!(benches);
