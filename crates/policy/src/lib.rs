//! The decisions, as pure functions `plan(&View, &Config, &mut State) -> Plan` without files, clock, threads or logging.
//!
//! | module | question it answers | source |
//! |---|---|---|
//! | [`demand`] | what does a VM need from a node? | [TAVO, V.B] |
//! | [`predict`] | how fast would each VM be under another arrangement? | see there |
//! | [`arrange`] | which VMs stay unplaced, which get a home, and where? | see there |
//! | [`trial`] | did a change pay? | see there |
//! | [`speed`] | how fast is a VM compared with its usual speed? | see there |
//! | [`placement`] | on which node(s) should a VM live? | [TAVO, V.C] |
//! | [`balance`] | which vCPUs run elsewhere for now, and when must a home change? | [TAVO, V.D] |
//! | [`permits`] | how much may a VM pollute the cache, and has it exceeded that? | [Kyoto, chapter 3] |
//! | [`permits::attribution`] | which of a VM's misses are its own? | [Kyoto, section 3.2.3] |
//! | [`memory`] | how are a VM's pages laid out over its home nodes, and which policy moves them? | [Policies, section 3] |
//! | [`advisor`] | which memory policy suits a VM? | [Policies, sections 3.5 and 6] |
//! | [`memory::carrefour`] | which pages move to their users, and which spread? | [Policies, 3.4] |
//! | [`pace`] | how fast may a VM's pages move, given what it does to the VM? | see there |
//! | [`repatriate`] | which pages are away from home, and how many may move now? | [TAVO, V.D]; [Flip, IV-B] |
//! | [`working_set`] | how much memory does a VM really use? | [PRL, section 4.4] |
//! | [`overcommit`] | how much memory should a VM have? | [PRL, sections 1 and 4.4] |
//! | [`topology_feed`] | which topology does a guest see, and when is it updated? | [XPV, chapter 4] |
//! | [`numad`] | what would numad do? | numad(8) |
//! | [`levers`] | which policy's decision wins? | see there |
//!
//! Every module states: problem, terms, algorithm, properties, and how it departs from its source and why.

pub mod advisor;
pub mod arrange;
pub mod balance;
mod bounds;
pub mod demand;
pub mod levers;
pub mod memory;
mod near;
pub mod numad;
pub mod overcommit;
pub mod pace;
pub mod permits;
pub mod placement;
pub mod predict;
pub mod repatriate;
pub mod speed;
pub mod topology_feed;
pub mod trial;
pub mod working_set;

#[cfg(test)]
mod testing;
