//! Memory tracking against exact models.

mod blind_spot;
mod shards;
