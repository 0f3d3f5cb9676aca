//! Questions that the loop answers from what it knows.

use homenode_host::observation::TrackerChoice;
use homenode_host::{CountedBy, HugeMemory, Management, Mode, View};
use homenode_machine::Machine;
use homenode_policy::arrange::what_if::{Forecast, NoForecast, Wanted};
use homenode_policy::arrange::{Beside, Slowed};
use homenode_policy::demand::Demand;
use homenode_policy::permits::suggest::{self, NoSuggestion, Suggestion};
use homenode_policy::placement::{Asked, Crowded, Placement, Reservation, Supply, Unplaceable};
use homenode_policy::{advisor, arrange, memory, permits, placement, trial, working_set};
use homenode_units::{Bytes, BytesPerSec, MemoryPolicy, Migration, NodeSet, Ns, Permit, VmId};
use serde::Serialize;

use crate::cycle::hands_off;
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
    /// The parts of the memory in huge pages, with their sizes; the rest is in ordinary pages.
    pub huge_pages: Vec<HugeMemory>,
}

/// Permits that a VM might book.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// The permit that suits the VM's pollution in the last periods, averaged over each period's slices.
    pub from_behaviour: Result<Suggestion, NoSuggestion>,
    /// The permit that suits the VM's memory; `None` if the host's caches or memory are not known.
    pub from_memory: Option<Permit>,
    /// Memory of the VM.
    pub memory_bytes: Bytes,
    /// Why the VM's pollution is unknown at present, if it is.
    pub unmetered: Option<permits::Unmetered>,
}

/// The nodes reserved for a VM that is about to start.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reserved {
    /// Nodes; never empty.
    pub nodes: NodeSet,
    /// The VM's name, if the hook reported it.
    pub name: Option<String>,
    /// Why the VM got all nodes, if it did.
    pub unplaceable: Option<Unplaceable>,
}

/// What it costs to place a VM on a crowded home, as the predictor sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct Price {
    /// The VM's speed there, over its speed alone on this host where the kernel puts it. It is comparable between homes.
    pub own: f64,
    /// Each VM at work, with its speed with the newcomer over without it.
    pub neighbours: Vec<Slowed>,
}

impl Control {
    /// Returns the objection to a memory policy for a VM, if any. For a VM that does not run, returns `None`.
    pub fn objection(&self, vm: VmId, policy: MemoryPolicy) -> Option<String> {
        let (sample, _) = self.last.as_ref()?;
        let vm = sample.vm(vm)?;
        memory::objection(sample, vm, hands_off(vm, &self.foreign), policy)
    }

    /// Returns sentences that the operator should read before choosing a memory policy that is possible for a VM.
    pub fn cautions(&self, vm: VmId, policy: MemoryPolicy) -> Vec<String> {
        let Some((sample, vm)) = self
            .last
            .as_ref()
            .and_then(|(sample, _)| Some((sample, sample.vm(vm)?)))
        else {
            return Vec::new();
        };
        let is_modelled = policy.migration == Migration::Carrefour && sample.counted_by == CountedBy::Model;
        let modelled = is_modelled.then(|| {
            "which node uses a page is estimated with a model of caches, not measured by hardware".to_owned()
        });
        memory::caution(vm, policy).into_iter().chain(modelled).collect()
    }

    /// Returns the memory policy that the advisor suggests for a VM. Returns `None` if no such VM runs, or it was not examined
    /// yet.
    pub fn memory_advice(&self, vm: VmId) -> Option<&advisor::Advice> {
        self.states.memory.advisor.advice(vm)
    }

    /// Watches a VM's memory use for `wait`, on behalf of a client. Windows have the length that the client names, if it names
    /// one.
    pub fn want_working_set(&mut self, vm: VmId, window: Option<Ns>, wait: Ns) {
        self.inputs.push(Input::WorkingSetWanted { vm, window, wait });
        let until = Ns(self.now().0.saturating_add(wait.0));
        let asked = self.asked.entry(vm).or_default();
        *asked = (*asked).max(until);
        self.states.working_set.want(vm, window, until);
    }

    /// Returns what is known of the working sets of VMs.
    pub fn working_set(&self) -> &working_set::State {
        &self.states.working_set
    }

    /// Returns true if the operator opted this VM out.
    pub fn is_opted_out(&self, vm: VmId) -> bool {
        let vm = self.last.as_ref().and_then(|(sample, _)| sample.vm(vm));
        vm.is_some_and(|vm| vm.settings.management == Management::Ignored)
    }

    /// Returns the trackers that can tell which memory VMs use on this host, best first.
    pub fn trackers(&self) -> &[TrackerChoice] {
        self.last.as_ref().map_or(&[], |(sample, _)| &sample.trackers)
    }

    /// Returns the trials of homes: for each, the predicted and the measured outcome.
    pub fn trials(&self) -> &trial::State {
        &self.states.arrange.trials
    }

    /// Predicts how fast VMs would be if the homes in `wanted` were in force; if it is empty, how fast they are.
    ///
    /// # Errors
    /// If a home is not a home node of this host, or too little is known of a VM that would move.
    pub fn what_if(&self, machine: &Machine, wanted: &Wanted) -> Result<Forecast, NoForecast> {
        self.look(machine, |view| {
            arrange::what_if(view, self.config.of_homes(), &self.states.arrange, wanted)
        })
    }

    /// Returns why a permit (a budget of cache misses) would not limit this VM, with the remedy: its LLC misses are not counted,
    /// and every permit is counted in them. `None` if they are counted, or if it is not known yet.
    pub fn permit_unmetered(&self, vm: VmId) -> Option<String> {
        let (sample, _) = self.last.as_ref()?;
        let vm = sample.vm(vm)?;
        let is_missing = !vm.vcpus.is_empty() && vm.vcpus.iter().all(|vcpu| vcpu.counters.is_none());
        let conduct = self.states.permits.conduct(vm.id);
        let why = match is_missing {
            true => permits::Unmetered::Missing,
            false => conduct?
                .unmetered
                .filter(|why| *why == permits::Unmetered::AllZero)?,
        };
        Some(format!(
            "the permit is stored, but VM {} is not held to it: {why}; `homenode doctor` says what is missing",
            vm.name
        ))
    }

    /// Suggests permits for a VM, from its behaviour and from its size. Returns `None` if no such VM runs.
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

    /// Returns the nodes where a VM that does not run yet would be placed.
    ///
    /// # Errors
    /// If it fits nowhere: which resource is short, and where.
    pub fn place(&self, machine: &Machine, request: &Request) -> Result<Placement, Unplaceable> {
        self.place_for(machine, request, None, NodeSet::new()).1
    }

    /// Predicts how fast the requested VM would be on `nodes`, and how fast the running VMs would be next to it.
    pub fn beside(&self, machine: &Machine, request: &Request, nodes: &NodeSet) -> Beside {
        // An agent that changes nothing leaves the placement to the kernel.
        let home = (self.mode == Mode::Act).then_some(nodes);
        let needs = (request.vcpus, request.bandwidth);
        self.look(machine, |view| {
            arrange::beside(view, self.config.of_homes(), &self.states.arrange, needs, home)
        })
    }

    /// Returns the best home for a VM that [`Control::place`] refuses, with its price. Of the homes that have room for its
    /// memory, this is the one with the highest predicted speed of the VM times that of the neighbour that loses most; without
    /// predictions and between equals, the one that is least short. `None` if its memory fits nowhere.
    pub fn place_crowded(&self, machine: &Machine, request: &Request) -> Option<(Crowded, Price)> {
        let demand = self.demand(request, None, NodeSet::new());
        let needs = (request.vcpus, request.bandwidth);
        let priced: Vec<(Crowded, Price)> = self.look(machine, |view| {
            let homes = placement::crowded(&self.supply(view), &demand, None).into_iter();
            // The price is that of the home, whether or not this agent would assign it.
            let priced = homes.map(|home| {
                let of_homes = self.config.of_homes();
                let (own, neighbours) =
                    arrange::each_beside(view, of_homes, &self.states.arrange, needs, Some(&home.nodes));
                (home, Price { own, neighbours })
            });
            priced.collect()
        });
        let value =
            |price: &Price| price.own * price.neighbours.iter().map(|one| one.speed).fold(1.0, f64::min);
        priced.into_iter().min_by(|(home, price), (other, others)| {
            let by_speed = value(others).total_cmp(&value(price));
            by_speed.then(home.lack.total_cmp(&other.lack))
        })
    }

    /// Returns the resources that nodes have left.
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
        let demand = self.demand(request, vm, device_nodes);
        let placed = placement::place(&supply, &demand, None, &self.config.placement);
        (demand, placed)
    }

    fn demand(&self, request: &Request, vm: Option<VmId>, device_nodes: NodeSet) -> Demand {
        let history = &self.states.history;
        let (bandwidth, bandwidth_from) = history.bandwidth(vm, request.vcpus as usize, request.bandwidth);
        Demand {
            cpus: f64::from(request.vcpus),
            memory_bytes: request.memory,
            bandwidth,
            bandwidth_from,
            device_nodes,
            huge_pages: request.huge_pages.clone(),
        }
    }

    /// Reserves nodes for a VM that is about to start. Always returns nodes: a VM that fits nowhere gets all nodes that VMs may
    /// use, without a reservation, and [`Reserved::unplaceable`] says why.
    pub fn reserve(&mut self, machine: &Machine, asked: impl Into<Asked>) -> Reserved {
        let asked = asked.into();
        let shape = asked.shape();
        self.inputs.push(Input::Reserved(asked));
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
        // numad's request has one page size for all of the memory; the hook lists the parts.
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
                Reserved {
                    nodes,
                    name,
                    unplaceable: None,
                }
            }
            Err(unplaceable) => Reserved {
                nodes: self.anywhere(machine),
                name,
                unplaceable: Some(unplaceable),
            },
        }
    }

    /// Returns the nodes that VMs may use, or all nodes with memory if VMs may use none.
    fn anywhere(&self, machine: &Machine) -> NodeSet {
        self.look(machine, |view| match view.homes() {
            homes if homes.is_empty() => machine.memory_nodes(),
            homes => homes,
        })
    }

    /// Returns the open reservations of VMs that do not run yet, the oldest first.
    pub fn reservations(&self) -> Vec<&Reservation> {
        let runs = |vm: VmId| self.sample().is_some_and(|sample| sample.vm(vm).is_some());
        let open = self.states.placement.ledger.open(self.now());
        open.filter(|reservation| !reservation.vm.is_some_and(runs))
            .collect()
    }

    /// Withdraws a reservation and frees its resources. Returns false if no reservation has this number.
    pub fn drop_reservation(&mut self, id: u64) -> bool {
        self.inputs.push(Input::ReservationDropped { id });
        let now = self.now();
        self.states.placement.ledger.drop_reservation(id, now)
    }

    /// Returns the recommendations of this run and their outcomes, by number.
    pub fn recommendations(&self) -> Vec<&Recommendation> {
        self.recommendations.all()
    }

    /// Approves a recommendation on behalf of the operator: it is carried out from the next cycle on.
    ///
    /// # Errors
    /// If there is no such recommendation, or it is not open.
    pub fn approve(&mut self, id: u64) -> Result<Recommendation, NotThat> {
        self.inputs.push(Input::Approved { id });
        let now = self.now();
        self.recommendations
            .approve(id, &self.config.recommendations, now)
    }

    /// Rejects a recommendation on behalf of the operator.
    ///
    /// # Errors
    /// If there is no such recommendation, or it is not open.
    pub fn reject(&mut self, id: u64) -> Result<Recommendation, NotThat> {
        self.inputs.push(Input::Rejected { id });
        let now = self.now();
        self.recommendations.reject(id, &self.config.recommendations, now)
    }
}
