//! The life of the agents on one host: they begin, decide in each period, are killed, are followed by a guard, by `homenode
//! release` or by another agent, and end.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use homenode_control::external::{PlanDocument, PlannedAction, Planner, PlannerError, ViewDocument};
use homenode_control::{Config, Control, Mode, PolicySet};
use homenode_host::{Act, CpuQuota, Host, Lever, Limit, WakeSignal};
use homenode_kernel::system::System;
use homenode_kernel::{fault, system};
use homenode_kvm::{KvmHost, Leftovers, Vms};
use homenode_machine::Machine;
use homenode_undo::journal::{self, Journal};
use homenode_undo::{Acting, Heartbeat, Options, RealHost, Undone};
use homenode_units::{Bytes, CpuId, CpuSet, Ns, Pages};

use crate::case::{CPUS, Case, End, Planned};
use crate::library;
use crate::oracles::{HOST_PAGES, VM_PAGES};
use crate::trace::Trace;
use crate::world::{Killed, World};

/// What became of a case.
pub(crate) struct Outcome {
    pub(crate) violations: Vec<String>,
    pub(crate) trace: Trace,
    pub(crate) faults: u32,
}

/// How long a successor has before the guard undoes (`GRACE` of `agent::live`).
const GRACE: Duration = Duration::from_secs(10);
/// How often the guard tries before another of its kind does.
const TRIES: u32 = 4;
/// Periods at the end in which nothing fails.
const CALM_CYCLES: u32 = 14;

/// Runs a case.
pub(crate) fn run(case: &Case) -> Outcome {
    run_with(case, Trace::default())
}

/// Runs a case, and continues this trace.
pub(crate) fn run_with(case: &Case, trace: Trace) -> Outcome {
    let dir = tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .expect("a temporary directory");
    let world = World::new(case, dir.path());
    world.state().trace = trace;
    system::simulate(Some(Rc::<World>::clone(&world)));
    library::answer_from(Some(Rc::clone(&world)));
    let root = dir.path().display().to_string();
    let life = Life {
        world: Rc::clone(&world),
        case: case.clone(),
        machine: machine(case),
        root,
    };
    let ended = catch_unwind(AssertUnwindSafe(|| life.whole()));
    fault::end();
    // The calls that are left hold handles of the library.
    world.catch_up();
    system::simulate(None);
    library::answer_from(None);
    let mut state = world.state();
    if let Err(cause) = ended {
        let cause = cause.downcast_ref::<String>().cloned();
        state.violate(format!(
            "the agent's code panicked: {}",
            cause.unwrap_or_default()
        ));
    }
    Outcome {
        violations: std::mem::take(&mut state.violations),
        trace: std::mem::take(&mut state.trace),
        faults: state.fault_count,
    }
}

/// The machine of a case.
fn machine(case: &Case) -> Machine {
    let node = |node: u16| {
        let first = CPUS * u32::from(node);
        let cpus: CpuSet = (first..first + CPUS).map(CpuId).collect();
        (node / 2, cpus)
    };
    homenode_kernel::fake::machine_of(&(0..case.nodes).map(node).collect::<Vec<_>>())
}

/// An agent that runs.
struct Agent {
    host: KvmHost,
    control: Control,
    wanted: Arc<Mutex<Vec<PlannedAction>>>,
}

/// A planner whose decisions are those of the case.
struct OfCase(Arc<Mutex<Vec<PlannedAction>>>);

impl Planner for OfCase {
    fn name(&self) -> &str {
        "of the case"
    }

    fn plan(&mut self, view: &ViewDocument<'_>) -> Result<PlanDocument, PlannerError> {
        let mut wanted = self.0.lock().expect("a lock");
        Ok(PlanDocument {
            schema: None,
            version: view.version,
            actions: wanted.drain(..).collect(),
        })
    }
}

struct Life {
    world: Rc<World>,
    case: Case,
    machine: Machine,
    root: String,
}

impl Life {
    /// Runs something that may be killed.
    fn mortal<T>(&self, act: impl FnOnce() -> T) -> Result<T, End> {
        let journal = Rc::clone(&self.world);
        fault::plan(move |point| journal.journal(point));
        let done = catch_unwind(AssertUnwindSafe(act));
        fault::end();
        done.map_err(|cause| match cause.downcast::<Killed>() {
            Ok(killed) => killed.0,
            Err(other) => resume_unwind(other),
        })
    }

    fn options(&self) -> Options {
        Options {
            root: self.root.clone().into(),
            state_dir: self.state(),
            topology_socket: format!("{}/run/blocked/topology.sock", self.root).into(),
            acting: Acting::Live,
            wake_signal: WakeSignal::default(),
            heartbeat: Heartbeat::heard_by(library::beat),
            ..Options::new(self.machine.clone())
        }
    }

    fn state(&self) -> std::path::PathBuf {
        format!("{}/state", self.root).into()
    }

    fn vms(&self) -> Vms {
        Vms::Libvirt("qemu:///system".to_owned())
    }

    fn config(&self) -> Config {
        let mut config = Config {
            policies: self.case.policies.parse().unwrap_or(PolicySet::Default),
            ..Config::default()
        };
        config.repatriate.vm_pages_per_cycle = Pages(VM_PAGES);
        config.repatriate.host_pages_per_cycle = Pages(HOST_PAGES);
        config
    }

    /// Starts an agent; `None` if it cannot begin now.
    fn begin(&self) -> Option<Agent> {
        self.say("an agent begins");
        {
            let mut state = self.world.state();
            state.last_beat = state.time;
            state.begin_phase();
        }
        let host = match KvmHost::connect(&self.vms(), self.options()) {
            Ok(host) => host,
            Err(error) => {
                self.say(&format!("it cannot: {error}"));
                let mut state = self.world.state();
                if state.is_calm() {
                    state.violate(format!("an agent cannot begin with nothing in its way: {error}"));
                }
                return None;
            }
        };
        let wanted = Arc::default();
        let mut control = Control::new(self.config(), Mode::Act);
        if self.case.policies == "planner" {
            control = control.with_planner(Box::new(OfCase(Arc::clone(&wanted))));
        }
        for vm in host.carried_over() {
            control.adopt(vm.vm, vm.home);
        }
        Some(Agent {
            host,
            control,
            wanted,
        })
    }

    /// Adds a line to the story, without the paths of this run.
    fn say(&self, line: &str) {
        let line = line.replace(&self.root, "");
        self.world.state().trace.add(line);
    }

    /// One period of an agent.
    fn cycle(&self, agent: &mut Agent) {
        self.want(agent);
        let begun = {
            let mut state = self.world.state();
            state.begin_phase();
            state.phase_since
        };
        let sampled = agent.host.sample();
        match sampled {
            Ok(sample) => {
                self.check_sampled(sample.vms.len());
                {
                    let mut state = self.world.state();
                    state.sampled = begun;
                    state.begin_phase();
                }
                let begun = agent.control.begin(&self.machine, sample);
                let answer = begun.commit(&mut agent.host);
                if let Err(refusal) = &answer {
                    self.say(&format!("refused: {refusal}"));
                }
                if let Ok(receipt) = &answer {
                    let outcomes = serde_json::to_string(&receipt.outcomes).expect("JSON");
                    self.world
                        .state()
                        .trace
                        .hash(outcomes.replace(&self.root, "").as_bytes());
                }
                let cycle = agent.control.finish(&self.machine, begun, answer);
                let events = serde_json::to_string(&cycle.events).expect("JSON");
                self.world
                    .state()
                    .trace
                    .hash(events.replace(&self.root, "").as_bytes());
            }
            Err(error) => {
                self.say(&format!("the host cannot be sampled: {error}"));
                let mut state = self.world.state();
                if state.is_calm() {
                    state.violate(format!(
                        "the host cannot be sampled with nothing in the way: {error}"
                    ));
                }
            }
        }
        for notice in agent.host.take_notices() {
            self.say(&format!("notice: {notice}"));
        }
        self.world.state().check_budgets();
        self.world.state().begin_phase();
        agent.host.wait(Ns::from_secs(1));
    }

    /// Once nothing fails, an agent sees all VMs that run.
    fn check_sampled(&self, seen: usize) {
        let mut state = self.world.state();
        let here = state.vms.iter().filter_map(|vm| vm.run.as_ref());
        let here = here.filter(|run| run.leaves_in.is_none()).count();
        if state.is_calm() && seen < here {
            state.violate(format!(
                "the agent sees {seen} of {here} VMs, with nothing in the way"
            ));
        }
    }

    /// Hands the decisions of this cycle to the planner.
    fn want(&self, agent: &mut Agent) {
        let mut state = self.world.state();
        let plans = std::mem::take(&mut state.plans);
        let mut wanted = agent.wanted.lock().expect("a lock");
        for (at, act) in plans {
            let vm = &state.vms[at];
            let act = act_of(&act, vm.memory_kib(), &self.machine);
            wanted.push(PlannedAction {
                action: act.on(vm.id),
                why: "the case says so".to_owned(),
            });
        }
    }

    /// What a guard or `homenode release` does: tries until all is undone, or gives up.
    fn undo(&self, who: &str, tries: u32) -> Undone {
        let mut leftovers = Leftovers::new(&self.vms(), self.root.as_ref());
        let mut last = Undone::default();
        for attempt in 0..tries {
            self.world.state().begin_phase();
            last = match Journal::open(&self.state()) {
                Ok(mut journal) => leftovers.undo(&mut journal),
                Err(error) => Undone {
                    failures: vec![error.to_string()],
                    ..Undone::default()
                },
            };
            self.say(&format!(
                "{who} undoes: {} left, {:?}",
                last.failures.len(),
                last.failures
            ));
            self.world.state().check_undone(&last.failures, who);
            if last.failures.is_empty() {
                break;
            }
            self.world.wait(Duration::from_secs(1 << attempt));
        }
        last
    }

    /// Everything that follows an end.
    fn after(&self, end: End) {
        let mut end = end;
        loop {
            self.say(&format!("the agent is killed; next: {end:?}"));
            let done = match end {
                End::Successor => return,
                End::Release => self.mortal(|| self.undo("release", 1)),
                End::Orderly | End::Guard => {
                    self.world.wait(GRACE);
                    self.mortal(|| self.undo("the guard", TRIES))
                }
            };
            match done {
                Ok(_) => return,
                Err(killed) => end = killed,
            }
        }
    }

    fn whole(&self) {
        let mut agent = None;
        let last = self.case.cycles + CALM_CYCLES;
        for cycle in 1..=last {
            {
                let mut state = self.world.state();
                state.begin_cycle(cycle);
                if cycle == self.case.cycles {
                    self.say_calm(&mut state);
                }
            }
            if cycle == self.case.cycles {
                self.world.catch_up();
            }
            let lived = self.mortal(|| {
                if agent.is_none() {
                    agent = self.begin();
                }
                match &mut agent {
                    Some(agent) => self.cycle(agent),
                    None => self.world.wait(Duration::from_secs(1)),
                }
            });
            if let Err(end) = lived {
                drop(agent.take());
                self.after(end);
            }
            self.world.state().tick();
        }
        self.end(agent);
    }

    fn say_calm(&self, state: &mut crate::world::State) {
        state.calm();
        state.trace.add("nothing fails any more".to_owned());
    }

    /// The end of the last agent, after which each VM is as before.
    fn end(&self, agent: Option<Agent>) {
        self.world.state().begin_phase();
        match (self.case.end, agent) {
            (End::Orderly, Some(mut agent)) => {
                let undone = agent.host.restore();
                self.say(&format!("the agent ends: {:?}", undone.failures));
                self.world
                    .state()
                    .check_undone(&undone.failures, "an orderly end");
            }
            (end, agent) => {
                drop(agent);
                self.after(end);
            }
        }
        if self.case.end == End::Successor
            && let Some(mut agent) = self.begin()
        {
            self.cycle(&mut agent);
            let undone = agent.host.restore();
            self.world
                .state()
                .check_undone(&undone.failures, "the end of a successor");
        }
        let undone = self.undo("the last guard", 1);
        let mut state = self.world.state();
        let left = journal::peek(&self.state());
        let running: Vec<_> = state.running().into_iter().map(|at| state.vms[at].id).collect();
        let is_in_force = homenode_undo::journal::Entry::is_in_force;
        // The line that strikes out a VM that ended may be owed when the agent is killed; then the entry has nothing in force.
        let gone = left
            .iter()
            .filter(|(vm, entry)| !running.contains(vm) && is_in_force(entry));
        let gone = gone.count();
        if undone.failures.is_empty() && left.values().any(is_in_force) {
            state.violate("the journal still lists something in force".to_owned());
        }
        if gone > 0 {
            state.violate(format!("the journal still lists {gone} VMs that ended"));
        }
    }
}

/// The act that a case plans.
fn act_of(planned: &Planned, memory_kib: u64, machine: &Machine) -> Act {
    let lease = |seconds: u64| Ns::from_secs(seconds);
    match planned {
        Planned::Pin { vcpus, cpus } => Act::PinVcpus {
            vcpus: vcpus.clone(),
            cpus: cpus.clone(),
        },
        Planned::Home(nodes) => Act::SetHome { nodes: nodes.clone() },
        Planned::Move { to, pages } => Act::MovePages {
            from: machine.home_nodes().difference(to),
            to: to.clone(),
            pages_max: Pages(*pages),
        },
        Planned::Quota { percent, lease_s } => Act::Limit {
            limit: Limit::CpuQuota(CpuQuota {
                run_ns: Ns::from_millis(*percent),
                period_ns: Ns::from_millis(100),
            }),
            lease_ns: lease(*lease_s),
        },
        Planned::Memory { percent, lease_s } => Act::Limit {
            limit: Limit::Memory(Bytes(memory_kib * 1024 / 100 * percent / 4096 * 4096)),
            lease_ns: lease(*lease_s),
        },
        Planned::LiftHome => Act::Lift { lever: Lever::Home },
        Planned::LiftQuota => Act::Lift {
            lever: Lever::CpuQuota,
        },
        Planned::LiftMemory => Act::Lift { lever: Lever::Memory },
    }
}
