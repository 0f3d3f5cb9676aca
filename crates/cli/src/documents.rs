//! The schemas of all `--json` documents, compared with those committed in `data/schema/json`.

use std::path::PathBuf;

use homenode_api::document::{read_schema, schema};
use homenode_api::{Reply, Request, answer};
use homenode_control::external::{PlanDocument, ViewDocument};

use crate::complaint::Complaint;

/// Kind and schema of every document.
fn schemas() -> Vec<(&'static str, String)> {
    macro_rules! of {
        ($($kind:literal: $type:ty,)*) => {
            vec![$(($kind, schema::<$type>($kind)),)* ("plan", read_schema::<PlanDocument>("plan"))]
        };
    }
    of! {
        // Answers of the agent.
        "permit-usage": answer::PermitUsage,
        "floor-set": answer::FloorSet,
        "forecast": answer::Forecast,
        "maintenance": answer::Maintenance,
        "mode-set": answer::ModeSet,
        "permit-set": answer::PermitSet,
        "permits": answer::Permits,
        "placed": answer::Placed,
        "policy-advice": answer::PolicyAdvice,
        "policy-set": answer::PolicySet,
        "reservations": answer::Reservations,
        "reservations-dropped": crate::recommend::Dropped,
        "recommendations": answer::Recommendations,
        "report": answer::Report,
        "suggestion": answer::Suggestion,
        "vms": answer::Vms,
        "working-set": crate::wss::Answered<'_>,
        "working-sets": answer::WorkingSets,
        // Output of `run`, one object per line.
        "listening": homenode_agent::Listening,
        "start": homenode_agent::Start<'_>,
        "cycle": homenode_control::Cycle,
        "notice": homenode_agent::Notice<'_>,
        "trouble": homenode_agent::Notice<'_>,
        "live-summary": homenode_agent::live::Summary,
        "summary": crate::summary::Summary,
        // Answers of commands that need no agent.
        "calibration": crate::calibrate::Calibrated<'_>,
        "doctor": homenode_agent::doctor::Examined,
        "config": crate::settings::Shown,
        "config-check": crate::settings::Checked,
        "released": homenode_agent::live::Released,
        "claims": homenode_reproduce::Claims<'_>,
        "evidence": homenode_evidence::Report,
        "experiment": homenode_reproduce::Experiment<'_>,
        "footprint": homenode_calibrate::footprint::Found,
        "log-estimate": homenode_calibrate::page_log::Known,
        "log-estimates": homenode_calibrate::page_log::Report,
        "machine": homenode_machine::Machine,
        "pool": homenode_calibrate::pool::PoolFound,
        "profile": crate::profile::Profiled<'_>,
        "list": crate::list::Listed,
        "status": crate::status::Shown,
        "scenarios": crate::sim::Scenarios,
        "search": homenode_search::outcome::Search<'_>,
        "simulation": homenode_search::trial::Simulation<'_>,
        "sweep": crate::sweep::Swept<'_>,
        "record": crate::record::RecordShow,
        "record-scenario": crate::record::scenario::RecordScenario,
        "replay": homenode_agent::replay::Report,
        "why": homenode_api::why::Answer,
        "overview": crate::top::Shown<'_>,
        "fleet": crate::fleet::Fleet,
        "error": Complaint<'_>,
        // The input of an external policy; its answer is `plan`.
        "view": ViewDocument<'_>,
        // The agent's socket: one line each way.
        "request": Request,
        "reply": Reply,
    }
}

/// To update the committed schemas, run `HOMENODE_WRITE_SCHEMAS=1 cargo test -p homenode-cli schemas` and review the diff.
#[test]
fn schemas_are_as_committed() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../data/schema/json");
    let file = |kind: &str| folder.join(format!("{kind}.schema.json"));
    let schemas = schemas();
    if std::env::var_os("HOMENODE_WRITE_SCHEMAS").is_some() {
        for (kind, text) in &schemas {
            std::fs::write(file(kind), text).unwrap();
        }
    }
    for (kind, text) in &schemas {
        let committed = std::fs::read_to_string(file(kind)).unwrap_or_default();
        assert!(
            committed == *text,
            "{kind}: the schema is another than the committed one"
        );
    }
    let files = std::fs::read_dir(&folder).unwrap().count();
    assert_eq!(
        files,
        schemas.len(),
        "a committed schema describes nothing any more"
    );
}
