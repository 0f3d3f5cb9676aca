//! The loop as a whole, on the simulated host.

mod attribution;
mod defaults;
mod drain;
mod external;
mod homes;
mod hostile;
mod memory_policy;
mod modes;
mod replay;
mod settings;
mod swarm;
mod twin;
