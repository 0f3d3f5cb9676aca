//! The decisions, as pure functions `plan(&View, &Config, &mut State) -> Plan`: no files, clock, threads or logging.
//!
//! | module | question it answers | source |
//! |---|---|---|
//! | [`demand`] | what does a VM need of a node? | [TAVO, V.B] |
//! | [`predict`] | how fast would each VM be under another arrangement? | see there |
//! | [`arrange`] | which VMs live free, which at home, and where? | DESIGN section 1 |
//! | [`trial`] | did a change pay? | DESIGN section 1 |
//! | [`placement`] | on which node(s) shall a VM live? | [TAVO, V.C] |
//! | [`balance`] | which vCPUs run elsewhere for now, and when must a home change? | [TAVO, V.D] |
//! | [`permits`] | how much may a VM pollute the cache, and has it? | [Kyoto, chapter 3] |
//! | [`memory`] | how do a VM's pages lie on its home nodes, and who moves them? | [Policies, section 3] |
//! | [`advisor`] | which memory policy suits a VM? | [Policies, sections 3.5 and 6] |
//! | [`memory::carrefour`] | which pages belong to their users, and which spread? | [Policies, 3.4] |
//! | [`page_queue`] | which pages has a guest released for good? | [Policies, 4.2.4] |
//! | [`pace`] | how fast may a VM's pages move, given what it does to the VM? | DESIGN section 5 |
//! | [`repatriate`] | which pages lie off home, and how many may move now? | [TAVO, V.D]; [Flip, IV-B] |
//! | [`flip_pool`] | how many of a VM's pages may its I/O exchange with the driver domain? | [Flip, IV-A] |
//! | [`working_set`] | how much memory does a VM really use? | [PRL, section 4.4] |
//! | [`overcommit`] | how much memory shall a VM have? | [PRL, sections 1 and 4.4] |
//! | [`topology_feed`] | what is a guest told of where it is, and when? | [XPV, chapter 4] |
//! | [`numad`] | what would numad do? | numad(8) |
//! | [`levers`] | which of several policies' decisions stands? | DESIGN section 2 |
//!
//! Every module states: problem, terms, algorithm, properties, and where it departs from its source and why.

pub mod advisor;
pub mod arrange;
pub mod balance;
mod bounds;
pub mod demand;
pub mod flip_pool;
pub mod levers;
pub mod memory;
mod near;
pub mod numad;
pub mod overcommit;
pub mod pace;
pub mod page_queue;
pub mod permits;
pub mod placement;
pub mod predict;
pub mod repatriate;
pub mod topology_feed;
pub mod trial;
pub mod working_set;

#[cfg(test)]
mod testing;
