//! What the loop is asked, and answers from what it knows.

use homenode_host::observation::TrackerChoice;
use homenode_host::{CountedBy, HugeMemory, Management, Mode, View};
use homenode_machine::Machine;
use homenode_policy::arrange::Beside;
use homenode_policy::arrange::what_if::{Forecast, NoForecast, Wanted};
use homenode_policy::demand::Demand;
use homenode_policy::permits::suggest::{self, NoSuggestion, Suggestion};
use homenode_policy::placement::{Asked, Placement, Reservation, Supply, Unplaceable};
use homenode_policy::{advisor, arrange, memory, permits, placement, trial, working_set};
use homenode_units::{Bytes, BytesPerSec, MemoryPolicy, Migration, NodeSet, Ns, Permit, VmId};
use serde::Serialize;

use crate::epoch::hands_off;
use crate::{Control, Input, NotThat, Recommendation};

/// A question about a VM that does not run yet.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// vCPUs online at start.
    pub vcpus: u32,
    /// Memory.
    pub memory: Bytes,
    /// Declared memory bandwidth.
    pub bandwidth: Option<BytesPerSec>,
    /// What of the memory lies in huge pages, by their size; the rest lies in ordinary ones.
    pub huge_pages: Vec<HugeMemory>,
}

/// What a VM might book.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// By what it polluted in each of the last periods, on average over the period's slices.
    pub from_behaviour: Result<Suggestion, NoSuggestion>,
    /// By its memory; `None` where the host's caches or memory are not known.
    pub from_memory: Option<Permit>,
    /// Its memory.
    pub memory_bytes: Bytes,
    /// Why its pollution is not known now, if it is not.
    pub unmetered: Option<permits::Unmetered>,
}

/// The answer to a VM that is about to start.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Promise {
    /// Nodes; never empty.
    pub nodes: NodeSet,
    /// The VM's name, where the hook told it.
    pub name: Option<String>,
    /// Why it was given all nodes, if it was.
    pub unplaceable: Option<Unplaceable>,
}

impl Control {
    /// What speaks against a memory policy for a VM, if anything does; `None` too for a VM that does not run.
    pub fn objection(&self, vm: VmId, policy: MemoryPolicy) -> Option<String> {
        let (sample, _) = self.last.as_ref()?;
        let vm = sample.vm(vm)?;
        memory::objection(sample, vm, hands_off(vm, &self.foreign), policy)
    }

    /// What the operator should know of a memory policy that a VM can have, each a sentence.
    pub fn cautions(&self, vm: VmId, policy: MemoryPolicy) -> Vec<String> {
        let Some((sample, vm)) = self
            .last
            .as_ref()
            .and_then(|(sample, _)| Some((sample, sample.vm(vm)?)))
        else {
            return Vec::new();
        };
        let is_modelled = policy.migration == Migration::Carrefour && sample.counted_by == CountedBy::Model;
        let modelled = is_modelled
            .then(|| "which node uses a page is sampled by a model of caches, not by hardware".to_owned());
        memory::caution(vm, policy).into_iter().chain(modelled).collect()
    }

    /// Which memory policy is thought to suit a VM; `None` where no such VM runs, or it was not looked at yet.
    pub fn memory_advice(&self, vm: VmId) -> Option<&advisor::Advice> {
        self.states.memory.advisor.advice(vm)
    }

    /// A client asks how much memory a VM uses: it is watched for `wait`, in windows of this length if the client names one.
    pub fn want_working_set(&mut self, vm: VmId, window: Option<Ns>, wait: Ns) {
        self.inputs.push(Input::WorkingSetWanted { vm, window, wait });
        let until = Ns(self.now().0.saturating_add(wait.0));
        let asked = self.asked.entry(vm).or_default();
        *asked = (*asked).max(until);
        self.states.working_set.want(vm, window, until);
    }

    /// What is known of the working sets of VMs.
    pub fn working_set(&self) -> &working_set::State {
        &self.states.working_set
    }

    /// Whether the operator wants this VM left alone.
    pub fn is_opted_out(&self, vm: VmId) -> bool {
        let vm = self.last.as_ref().and_then(|(sample, _)| sample.vm(vm));
        vm.is_some_and(|vm| vm.settings.management == Management::Ignored)
    }

    /// Who can tell which memory VMs use on this host, best first.
    pub fn trackers(&self) -> &[TrackerChoice] {
        self.last.as_ref().map_or(&[], |(sample, _)| &sample.trackers)
    }

    /// What came of changes, predicted against seen.
    pub fn trials(&self) -> &trial::State {
        &self.states.arrange.trials
    }

    /// How fast VMs are predicted to be if some had other homes; of an empty question, as they are.
    ///
    /// # Errors
    /// A home that is none on this host; a VM to move of which too little is known.
    pub fn what_if(&self, machine: &Machine, wanted: &Wanted) -> Result<Forecast, NoForecast> {
        self.look(machine, |view| {
            arrange::what_if(view, self.config.of_homes(), &self.states.arrange, wanted)
        })
    }

    /// What a VM might book, by what it did and by how large it is; `None` where no such VM runs.
    pub fn suggest(&self, machine: &Machine, vm: VmId) -> Option<Advice> {
        let (sample, _) = self.last.as_ref()?;
        let memory = sample.vm(vm)?.memory_bytes;
        let conduct = self.states.permits.conduct(vm);
        let recent: Vec<u64> = conduct
            .map(|conduct| conduct.recent().collect())
            .unwrap_or_default();
        Some(Advice {
            from_behaviour: suggest::from_behaviour(&recent, &self.config.permits.suggest),
            from_memory: suggest::from_memory(memory, machine),
            memory_bytes: memory,
            unmetered: conduct.and_then(|conduct| conduct.unmetered),
        })
    }

    /// Where a VM that does not run yet would go.
    ///
    /// # Errors
    /// What is short where.
    pub fn place(&self, machine: &Machine, request: &Request) -> Result<Placement, Unplaceable> {
        self.place_for(machine, request, None, NodeSet::new()).1
    }

    /// How fast it is predicted to be there beside the VMs that run, and they beside it.
    pub fn beside(&self, machine: &Machine, request: &Request, nodes: &NodeSet) -> Beside {
        // An agent that changes nothing leaves it to the kernel.
        let home = (self.mode == Mode::Act).then_some(nodes);
        let needs = (request.vcpus, request.bandwidth);
        self.look(machine, |view| {
            arrange::beside(view, self.config.of_homes(), &self.states.arrange, needs, home)
        })
    }

    /// What nodes have left.
    pub(crate) fn supply<'a>(&'a self, view: &View<'a>) -> Supply {
        let (history, ledger) = (&self.states.history, &self.states.placement.ledger);
        Supply::new(view, history, ledger, &self.config.placement, &[])
    }

    fn place_for(
        &self,
        machine: &Machine,
        request: &Request,
        vm: Option<VmId>,
        device_nodes: NodeSet,
    ) -> (Demand, Result<Placement, Unplaceable>) {
        let supply = self.look(machine, |view| self.supply(view));
        let (bandwidth, bandwidth_from) =
            self.states
                .history
                .bandwidth(vm, request.vcpus as usize, request.bandwidth);
        let demand = Demand {
            cpus: f64::from(request.vcpus),
            memory_bytes: request.memory,
            bandwidth,
            bandwidth_from,
            device_nodes,
            huge_pages: request.huge_pages.clone(),
        };
        let placed = placement::place(&supply, &demand, None, &self.config.placement);
        (demand, placed)
    }

    /// Where a VM that is about to start goes, promised to it. There is always an answer: a VM that fits nowhere gets all
    /// nodes, and the second part says why.
    pub fn promise(&mut self, machine: &Machine, asked: impl Into<Asked>) -> Promise {
        let asked = asked.into();
        let shape = asked.shape();
        self.inputs.push(Input::Promised(asked));
        let now = self.now();
        let announced = self.states.placement.ledger.announced(shape, now);
        let vm = announced.as_ref().map(|a| a.vm);
        let devices = announced.as_ref().map(|a| a.device_nodes.clone());
        let bandwidth = announced.as_ref().and_then(|a| a.bandwidth);
        let chosen = announced
            .as_ref()
            .and_then(|a| a.home.clone())
            .filter(|home| home.is_subset(&machine.memory_nodes()));
        let memory = Bytes::from_mib(shape.memory_mib);
        let told = announced.as_ref().map(|a| a.huge_pages.clone());
        // Who asks knows the size for all of it; the hook knows each part.
        let all = |page_bytes| HugeMemory {
            page_bytes,
            memory_bytes: memory,
        };
        let huge_pages = told
            .filter(|told| !told.is_empty())
            .unwrap_or_else(|| asked.huge_page_bytes.map(all).into_iter().collect());
        let request = Request {
            vcpus: shape.vcpus,
            memory,
            bandwidth,
            huge_pages,
        };
        let (demand, placed) = self.place_for(machine, &request, vm, devices.unwrap_or_default());
        let nodes = chosen.map_or_else(|| placed.map(|placement| placement.nodes), Ok);
        let name = announced.map(|a| a.name);
        match nodes {
            Ok(nodes) => {
                let reservation = Reservation {
                    id: 0,
                    vm,
                    name: name.clone(),
                    shape,
                    demand,
                    nodes: nodes.clone(),
                    made_at: now,
                };
                self.states.placement.ledger.reserve(reservation);
                Promise {
                    nodes,
                    name,
                    unplaceable: None,
                }
            }
            Err(unplaceable) => Promise {
                nodes: self.anywhere(machine),
                name,
                unplaceable: Some(unplaceable),
            },
        }
    }

    /// Nodes that VMs may live on; all with memory where those are none.
    fn anywhere(&self, machine: &Machine) -> NodeSet {
        self.look(machine, |view| match view.homes() {
            homes if homes.is_empty() => machine.memory_nodes(),
            homes => homes,
        })
    }

    /// Nodes that are promised to VMs which do not run yet, the oldest promise first.
    pub fn promises(&self) -> Vec<&Reservation> {
        let runs = |vm: VmId| self.sample().is_some_and(|sample| sample.vm(vm).is_some());
        let open = self.states.placement.ledger.open(self.now());
        open.filter(|promise| !promise.vm.is_some_and(runs)).collect()
    }

    /// Takes back a promise: what it held is free from now on. Whether there was one of this number.
    pub fn drop_promise(&mut self, id: u64) -> bool {
        self.inputs.push(Input::PromiseDropped { id });
        let now = self.now();
        self.states.placement.ledger.drop_promise(id, now)
    }

    /// What was recommended in this run, and what came of it, by number.
    pub fn recommendations(&self) -> Vec<&Recommendation> {
        self.recommendations.all()
    }

    /// The operator agrees to a recommendation: from the next epoch on it is carried out.
    ///
    /// # Errors
    /// There is no such one, or it is not open.
    pub fn approve(&mut self, id: u64) -> Result<Recommendation, NotThat> {
        self.inputs.push(Input::Approved { id });
        let now = self.now();
        self.recommendations
            .approve(id, &self.config.recommendations, now)
    }

    /// The operator does not want what is recommended.
    ///
    /// # Errors
    /// There is no such one, or it is not open.
    pub fn reject(&mut self, id: u64) -> Result<Recommendation, NotThat> {
        self.inputs.push(Input::Rejected { id });
        let now = self.now();
        self.recommendations.reject(id, &self.config.recommendations, now)
    }
}
