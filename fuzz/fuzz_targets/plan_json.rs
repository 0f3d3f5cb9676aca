//! Fuzzes the plans of an external policy: one line for each of four cycles of the control loop on a small twin. A line that is
//! not a plan is refused with a message. A refused plan changes nothing. Whatever is carried out, no VM has more pages than
//! memory. Version 0 in a plan stands for the view's version.

#![no_main]

use homenode_control::external::{PlanDocument, Planner, PlannerError, ViewDocument};
use homenode_control::{Config, Control, Event, Mode};
use homenode_host::{Host as _, Version};
use homenode_machine_files::preset;
use homenode_twin::{Scenario, Twin, VmSpec};
use homenode_units::{Bytes, Ns, Pages};
use libfuzzer_sys::fuzz_target;

const CYCLES: usize = 4;

struct Lines(Vec<String>);

impl Planner for Lines {
    fn name(&self) -> &str {
        "lines"
    }

    fn plan(&mut self, view: &ViewDocument<'_>) -> Result<PlanDocument, PlannerError> {
        serde_json::to_vec(view).expect("a view can be written");
        let line = self.0.pop().unwrap_or_default();
        let mut plan = PlanDocument::from_json(line.as_bytes())?;
        let again = serde_json::to_vec(&plan).expect("what was read can be written");
        assert_eq!(PlanDocument::from_json(&again).as_ref(), Ok(&plan));
        if plan.version == Version(0) {
            plan.version = view.version;
        }
        Ok(plan)
    }
}

fuzz_target!(|text: &str| {
    let mut lines: Vec<String> = text.lines().take(CYCLES).map(str::to_owned).collect();
    lines.reverse();
    let machine = preset("amd48").expect("a preset");
    let vms =
        ["cg.B", "povray", "soplex"].map(|program| VmSpec::new(program, 2, Bytes::from_gib(2), program));
    let mut twin = Twin::new(machine, &Scenario::of("fuzz", vms.to_vec()), 1).expect("a possible scenario");
    twin.wait(Ns::from_millis(10));
    let mut control = Control::new(Config::default(), Mode::Act).with_planner(Box::new(Lines(lines)));
    for _ in 0..CYCLES {
        let before = twin.sample().expect("a twin can be read");
        let cycle = control.step(&mut twin).expect("a twin can be read");
        let after = twin.sample().expect("a twin can be read");
        if cycle
            .events
            .iter()
            .any(|event| matches!(event, Event::Refused { .. }))
        {
            assert_eq!(before, after, "what is refused has changed nothing");
        }
        if let Some(failed) = control.failed_planner() {
            assert!(failed.why.len() < text.len() + 1000, "{failed}");
            assert!(
                cycle.status.vms.iter().all(|vm| vm.home.is_none()),
                "nothing is left in force"
            );
            return;
        }
        twin.wait(Ns::from_millis(100));
        for vm in &twin.sample().expect("a twin can be read").vms {
            let there: Pages = vm.pages.iter().flat_map(|pages| pages.values().copied()).sum();
            assert!(there <= vm.memory_bytes.to_pages(), "{} has {there}", vm.name);
        }
    }
});
