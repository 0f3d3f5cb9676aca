//! External planners on the simulated host: plans carried out and refused, reports to the planner, and the state left behind.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use homenode_control::external::{NoPlan, PlanDocument, PlannedAction, Planner, PlannerError, ViewDocument};
use homenode_control::{Config, Control, Cycle, Event, Mode};
use homenode_host::{
    Act, CpuQuota, FrameMove, GuestTopology, Host, Lever, Limit, Outcome, Percent, Refusal, Setting, Version,
};
use homenode_twin::{Scenario, Twin, VmSpec};
use homenode_units::{Bytes, CpuId, CpuSet, NodeId, NodeSet, Ns, Pages, VmId};
use proptest::prelude::*;
use serde_json::Value;

/// Views in the form in which programs get them.
type Seen = Arc<Mutex<Vec<Value>>>;

/// A planner that answers with a function, and keeps the views that it got.
struct Told<F> {
    answer: F,
    seen: Seen,
}

impl<F: FnMut(&Value) -> Result<PlanDocument, PlannerError> + Send> Planner for Told<F> {
    fn name(&self) -> &str {
        "told"
    }

    fn plan(&mut self, view: &ViewDocument<'_>) -> Result<PlanDocument, PlannerError> {
        let view = serde_json::to_value(view).expect("views can be written");
        let plan = (self.answer)(&view);
        self.seen.lock().unwrap().push(view);
        plan
    }
}

/// Starts a small host on which a planner decides, while these nodes are being drained.
fn start_drained(
    drained: NodeSet,
    answer: impl FnMut(&Value) -> Result<PlanDocument, PlannerError> + Send + 'static,
) -> (Twin, Control, Seen) {
    let machine = homenode_machine_files::preset("amd48").unwrap();
    let vm = |program| VmSpec::new(program, 2, Bytes::from_gib(2), program);
    let scenario = Scenario::of("small", ["cg.B", "povray", "soplex"].map(vm).to_vec());
    let mut twin = Twin::new(machine, &scenario, 1).unwrap();
    twin.wait(Ns::from_secs(1));
    let seen = Seen::default();
    let planner = Told {
        answer,
        seen: Arc::clone(&seen),
    };
    let mut control = Control::new(Config::default(), Mode::Act);
    control.drain(twin.machine(), drained).unwrap();
    (twin, control.with_planner(Box::new(planner)), seen)
}

fn start(
    answer: impl FnMut(&Value) -> Result<PlanDocument, PlannerError> + Send + 'static,
) -> (Twin, Control, Seen) {
    start_drained(NodeSet::new(), answer)
}

fn step(twin: &mut Twin, control: &mut Control) -> Cycle {
    let cycle = control.step(twin).expect("the twin always answers");
    twin.wait(Ns::from_secs(1));
    cycle
}

/// Returns a plan made from this view. `acts` names VMs by their place in the view.
fn plan(view: &Value, acts: Vec<(usize, Act)>) -> PlanDocument {
    let id = |at: usize| -> VmId { serde_json::from_value(view["vms"][at]["id"].clone()).unwrap() };
    let action = |(at, act): (usize, Act)| PlannedAction {
        action: act.on(id(at)),
        why: "a test wants it".to_owned(),
    };
    PlanDocument {
        version: Version(view["version"].as_u64().unwrap()),
        actions: acts.into_iter().map(action).collect(),
        ..PlanDocument::default()
    }
}

fn home(node: u16) -> Act {
    Act::SetHome {
        nodes: NodeSet::one(NodeId(node)),
    }
}

fn pin(cpu: u32) -> Act {
    Act::PinVcpus {
        vcpus: vec![0],
        cpus: CpuSet::one(CpuId(cpu)),
    }
}

fn quota() -> Act {
    Act::Limit {
        limit: Limit::CpuQuota(CpuQuota::of(0.5, Ns::from_millis(30))),
        lease_ns: Ns::from_secs(60),
    }
}

fn refusal(cycle: &Cycle) -> Option<&Refusal> {
    cycle.events.iter().find_map(|event| match event {
        Event::Refused { refusal } => Some(refusal),
        _ => None,
    })
}

fn decided(cycle: &Cycle) -> usize {
    let is_decision = |event: &&Event| matches!(event, Event::Decided { .. });
    cycle.events.iter().filter(is_decision).count()
}

/// Returns the simulator's state that a plan may change: versions, affinities, quotas, nodes of pages, memory policies.
fn state(twin: &mut Twin) -> Value {
    serde_json::to_value(twin.sample().unwrap()).unwrap()
}

#[test]
fn a_plan_is_carried_out_whole_or_refused_whole() {
    // The bad action comes last, so earlier ones would be carried out if the whole plan were not refused.
    let wrong: [(usize, Act, &str); 6] = [
        (1, home(99), "must be one or more of the host's nodes"),
        (1, pin(9999), "must be one or more of the CPUs"),
        (
            1,
            Act::Limit {
                limit: Limit::CacheWays(Percent(0)),
                lease_ns: Ns(1),
            },
            "0 percent",
        ),
        (1, Act::Lift { lever: Lever::Pages }, "nothing to lift"),
        (
            1,
            Act::MoveVirtualNode {
                virtual_node: 0,
                to: NodeId(0),
                pages_max: Pages(1),
            },
            "no virtual node 0",
        ),
        (
            1,
            Act::PublishTopology {
                topology: GuestTopology::default(),
            },
            "cannot be told",
        ),
    ];
    for (at, act, why) in wrong {
        let (mut twin, mut control, _) = start(move |view| {
            Ok(plan(
                view,
                vec![(0, home(1)), (0, pin(1)), (0, quota()), (at, act.clone())],
            ))
        });
        let before = state(&mut twin);
        let cycle = control.step(&mut twin).unwrap();
        let said = refusal(&cycle).expect("it is refused").to_string();
        assert!(said.contains(why), "{said}");
        assert_eq!((state(&mut twin), decided(&cycle)), (before, 0));
        assert!(control.failed_planner().is_none());
    }
    let (mut twin, mut control, _) =
        start(|view| Ok(plan(view, vec![(0, home(1)), (0, pin(1)), (0, quota())])));
    let cycle = step(&mut twin, &mut control);
    assert_eq!((refusal(&cycle), decided(&cycle)), (None, 3));
    assert_eq!(cycle.status.vms.iter().filter(|vm| vm.home.is_some()).count(), 1);
}

#[test]
fn a_stale_plan_and_one_for_a_vm_that_is_not_there_are_refused() {
    let (mut twin, mut control, seen) = start(|view| {
        let mut plan = plan(view, vec![(0, home(1))]);
        plan.version.0 += 1;
        Ok(plan)
    });
    let cycle = step(&mut twin, &mut control);
    assert!(
        matches!(refusal(&cycle), Some(Refusal::Stale { .. })),
        "{:?}",
        cycle.events
    );
    step(&mut twin, &mut control);
    let last = seen.lock().unwrap()[1]["last"].clone();
    assert_eq!(
        (last["result"].as_str(), last["refusal"].as_str()),
        (Some("refused"), Some("stale")),
        "{last}"
    );
    assert!(
        last["message"]
            .as_str()
            .unwrap()
            .contains("plan was made from version")
    );
    let (mut twin, mut control, _) = start(|view| {
        let mut plan = plan(view, vec![(0, home(1))]);
        plan.actions[0].action.vm = VmId(77);
        Ok(plan)
    });
    let cycle = step(&mut twin, &mut control);
    assert_eq!(refusal(&cycle), Some(&Refusal::UnknownVm { vm: VmId(77) }));
}

#[test]
fn a_planner_reads_what_became_of_its_plan() {
    let moves = vec![FrameMove {
        frame: 1 << 40,
        pages: Pages(1),
        from: NodeId(0),
        to: NodeId(1),
    }];
    let (mut twin, mut control, seen) = start(move |view| {
        let all = NodeSet::one(NodeId(1));
        let pages = Act::MovePages {
            from: NodeSet::one(NodeId(0)),
            to: all,
            pages_max: Pages(10),
        };
        let ways = Act::Limit {
            limit: Limit::CacheWays(Percent(20)),
            lease_ns: Ns::from_secs(5),
        };
        Ok(plan(
            view,
            vec![
                (0, home(1)),
                (1, ways),
                (2, pages),
                (2, Act::MoveFrames { moves: moves.clone() }),
            ],
        ))
    });
    step(&mut twin, &mut control);
    step(&mut twin, &mut control);
    let seen = seen.lock().unwrap();
    assert_eq!(seen[0]["last"], Value::Null);
    let last = &seen[1]["last"];
    assert_eq!(
        (last["result"].as_str(), &last["version"]),
        (Some("carried-out"), &seen[0]["version"]),
        "{last}"
    );
    let outcomes = last["outcomes"].as_array().unwrap();
    let kinds: Vec<&str> = outcomes
        .iter()
        .map(|outcome| outcome["outcome"].as_str().unwrap())
        .collect();
    assert_eq!(kinds[..3], ["done", "failed", "moved"], "{last}");
    assert_eq!(seen[1]["vms"][0]["home"], serde_json::json!([1]));
}

#[test]
fn a_planner_that_fails_leaves_nothing_in_force() {
    let policy = "round-4k".parse().unwrap();
    let (mut twin, mut control, seen) = start(move |view| {
        let memory = Act::SetMemoryPolicy { policy };
        match &view["last"] {
            Value::Null => Ok(plan(
                view,
                vec![(0, home(1)), (0, pin(9)), (1, pin(3)), (2, quota()), (2, memory)],
            )),
            _ => Err("it is tired".into()),
        }
    });
    let all = |twin: &mut Twin| -> Vec<(CpuSet, Option<CpuQuota>, String)> {
        let sample = twin.sample().unwrap();
        let vms = sample.vms.iter();
        vms.map(|vm| {
            let first = &vm.vcpus[0];
            (first.affinity.clone(), first.quota, vm.memory_policy.to_string())
        })
        .collect()
    };
    let before = all(&mut twin);
    step(&mut twin, &mut control);
    let during = all(&mut twin);
    assert!(
        during.iter().zip(&before).all(|(now, then)| now != then),
        "{during:?}"
    );
    let cycle = step(&mut twin, &mut control);
    assert_eq!(
        control.failed_planner().unwrap().to_string(),
        "policy told: it is tired"
    );
    assert_eq!(all(&mut twin), before);
    assert!(cycle.status.vms.iter().all(|vm| vm.home.is_none()));
    assert_eq!(
        decided(&cycle),
        4,
        "a home, a pin, a quota, a memory policy: {:?}",
        cycle.events
    );
    // The planner gets no more requests, and nothing is lifted twice.
    assert_eq!(decided(&step(&mut twin, &mut control)), 0);
    assert_eq!(seen.lock().unwrap().len(), 2);
}

#[test]
fn what_operators_said_holds_for_planners_from_outside() {
    let memory = |gib| Act::Limit {
        limit: Limit::Memory(Bytes::from_gib(gib)),
        lease_ns: Ns::from_secs(9),
    };
    let chosen = Setting::MemoryPolicy(Some("first-touch".parse().unwrap()));
    let floor = Setting::MemoryFloor(Some(Bytes::from_gib(2)));
    let other = Act::SetMemoryPolicy {
        policy: "round-4k".parse().unwrap(),
    };
    let gather = Act::MovePages {
        from: NodeSet::one(NodeId(0)),
        to: NodeSet::one(NodeId(7)),
        pages_max: Pages(1),
    };
    let cases: [(Option<Setting>, Act, &str); 6] = [
        (
            Some(chosen),
            other,
            "its operator chose memory policy first-touch",
        ),
        (
            Some(floor),
            memory(1),
            "less than its operator's memory floor, 2GiB",
        ),
        (None, memory(1), "its operator set no memory floor"),
        (None, home(7), "cannot all be its home"),
        (None, pin(42), "its vCPUs cannot run on 42"),
        (None, gather, "pages may not move to node 7"),
    ];
    for (setting, act, why) in cases {
        let (mut twin, mut control, _) = start_drained(NodeSet::one(NodeId(7)), move |view| {
            Ok(plan(view, vec![(1, home(1)), (0, act.clone())]))
        });
        let vm = twin.sample().unwrap().vms[0].id;
        if let Some(setting) = setting {
            twin.set(vm, setting).unwrap();
        }
        let cycle = control.step(&mut twin).unwrap();
        let said = refusal(&cycle).map(ToString::to_string);
        assert!(
            said.as_ref().is_some_and(|said| said.contains(why)),
            "{why}: {said:?}"
        );
    }
    let (mut twin, mut control, _) = start(|view| Ok(plan(view, vec![(0, home(1)), (0, quota())])));
    control.pause(Ns::from_secs(100));
    let before = state(&mut twin);
    let cycle = control.step(&mut twin).unwrap();
    assert!(
        cycle.events.iter().all(|event| match event {
            Event::Decided { result, .. } => *result == Outcome::DryRun,
            _ => true,
        }),
        "{:?}",
        cycle.events
    );
    assert_eq!(state(&mut twin), before);
}

/// Runs the simulator under a planner that does something else in each cycle.
fn run(seed: u64) -> (Vec<Value>, Value) {
    let (mut twin, mut control, seen) = start(move |view| {
        let turn = view["at_ns"].as_u64().unwrap() / 1_000_000_000 + seed;
        let node = u16::try_from(turn % 8).unwrap();
        let vm = usize::try_from(turn % 3).unwrap();
        Ok(plan(view, vec![(vm, home(node)), (vm, pin(u32::from(node) * 6))]))
    });
    for _ in 0..6 {
        step(&mut twin, &mut control);
    }
    let seen = seen.lock().unwrap().clone();
    (seen, serde_json::to_value(twin.report()).unwrap())
}

#[test]
fn the_same_planner_and_seed_give_the_same_bytes() {
    assert_eq!(run(1), run(1));
    assert_ne!(run(1).1, run(2).1);
}

fn nodes() -> impl Strategy<Value = NodeSet> {
    prop::collection::vec(0u16..10, 0..3).prop_map(|nodes| nodes.into_iter().map(NodeId).collect())
}

fn any_act() -> impl Strategy<Value = Act> {
    let levers = [
        Lever::Home,
        Lever::CpuQuota,
        Lever::Memory,
        Lever::Watching,
        Lever::Resctrl,
        Lever::Pages,
    ];
    let policies = ["first-touch", "round-4k+carrefour", "round-1g"];
    let (pages, lease) = (any::<u64>().prop_map(Pages), any::<u64>().prop_map(Ns));
    let limit = prop_oneof![
        (any::<u64>(), any::<u64>()).prop_map(|(run, period)| Limit::CpuQuota(CpuQuota {
            run_ns: Ns(run),
            period_ns: Ns(period)
        })),
        (0.0..2.0f64).prop_map(|share| Limit::CpuQuota(CpuQuota::of(share, Ns::from_millis(30)))),
        any::<u64>().prop_map(|bytes| Limit::Memory(Bytes(bytes))),
        any::<u8>().prop_map(|percent| Limit::CacheWays(Percent(percent))),
    ];
    let cpus = prop::collection::vec(0u32..60, 0..4).prop_map(|cpus| cpus.into_iter().map(CpuId).collect());
    let frames =
        (any::<u64>(), 0u64..1 << 22, 0u16..9, 0u16..9).prop_map(|(frame, pages, from, to)| FrameMove {
            frame,
            pages: Pages(pages),
            from: NodeId(from),
            to: NodeId(to),
        });
    prop_oneof![
        nodes().prop_map(|nodes| Act::SetHome { nodes }),
        (prop::collection::vec(0u16..4, 0..4), cpus).prop_map(|(vcpus, cpus)| Act::PinVcpus { vcpus, cpus }),
        (nodes(), nodes(), pages).prop_map(|(from, to, pages_max)| Act::MovePages { from, to, pages_max }),
        prop::collection::vec(frames, 0..4).prop_map(|moves| Act::MoveFrames { moves }),
        prop::sample::select(policies.to_vec()).prop_map(|policy| Act::SetMemoryPolicy {
            policy: policy.parse().unwrap()
        }),
        (limit, lease.clone()).prop_map(|(limit, lease_ns)| Act::Limit { limit, lease_ns }),
        (any::<u64>().prop_map(Ns), lease)
            .prop_map(|(window_ns, lease_ns)| Act::Watch { window_ns, lease_ns }),
        prop::sample::select(levers.to_vec()).prop_map(|lever| Act::Lift { lever }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever is planned, the host stays consistent, and a refused plan changes nothing at all.
    #[test]
    fn whatever_is_planned_nothing_is_half_done(
        turns in prop::collection::vec(prop::collection::vec((0usize..3, any_act()), 0..4), 1..4)
    ) {
        let mut left = turns.into_iter();
        let (mut twin, mut control, seen) = start(move |view| Ok(plan(view, left.next().unwrap_or_default())));
        for _ in 0..4 {
            let before = state(&mut twin);
            let cycle = control.step(&mut twin).unwrap();
            if refusal(&cycle).is_some() {
                prop_assert_eq!(state(&mut twin), before);
                prop_assert_eq!(decided(&cycle), 0);
            }
            twin.wait(Ns::from_millis(50));
            let pages: BTreeMap<VmId, Pages> = twin.sample().unwrap().vms.iter()
                .map(|vm| (vm.id, vm.pages.iter().flat_map(|pages| pages.values().copied()).sum()))
                .collect();
            for vm in &twin.sample().unwrap().vms {
                prop_assert!(pages[&vm.id] <= vm.memory_bytes.to_pages());
            }
        }
        prop_assert!(control.failed_planner().is_none());
        prop_assert_eq!(seen.lock().unwrap().len(), 4);
    }

    /// Input is bounded, and a plan that is written can be read again.
    #[test]
    fn plans_read_back_and_garbage_is_refused_with_a_sentence(
        acts in prop::collection::vec(any_act(), 0..5),
        garbage in prop::collection::vec(any::<u8>(), 0..60)
    ) {
        let action = |act: Act| PlannedAction { action: act.on(VmId(3)), why: "why".to_owned() };
        let plan = PlanDocument { actions: acts.into_iter().map(action).collect(), ..PlanDocument::default() };
        let text = serde_json::to_vec(&plan).unwrap();
        prop_assert_eq!(PlanDocument::from_json(&text), Ok(plan));
        if let Err(why) = PlanDocument::from_json(&garbage) {
            let why = why.to_string();
            prop_assert!(why.starts_with("the planner's answer is not a plan: ") && why.len() < 400, "{}", why);
        }
    }
}

#[test]
fn plans_that_are_too_large_are_not_read() {
    let action = r#"{"vm":"00000000-0000-0000-0000-000000000001","action":"lift","lever":"home","why":""}"#;
    let many = vec![action; 5000].join(",");
    let why =
        PlanDocument::from_json(format!(r#"{{"version":1,"actions":[{many}]}}"#).as_bytes()).unwrap_err();
    assert_eq!(why, NoPlan::TooMany(5000));
    let why = PlanDocument::from_json(&vec![b' '; 2 << 20]).unwrap_err();
    assert_eq!(why, NoPlan::TooLarge);
    for (text, why) in [
        (r#"{"version":1}"#, "missing field `actions`"),
        (r#"{"version":1,"actions":[],"more":1}"#, "unknown field `more`"),
        (
            r#"{"schema":"plan/2","version":1,"actions":[]}"#,
            "unknown variant `plan/2`, expected `plan/1`",
        ),
        (
            &format!(
                r#"{{"version":1,"actions":[{}]}}"#,
                action.replace("\"why\"", "\"reason\"")
            ),
            "missing field `why`",
        ),
        (
            &format!(r#"{{"version":1,"actions":[{}]}}"#, action.replace("lift", "lft")),
            "unknown variant `lft`",
        ),
    ] {
        let said = PlanDocument::from_json(text.as_bytes()).unwrap_err().to_string();
        assert!(said.contains(why), "{said}");
    }
}
