//! Compares memory tracking with exact models.

mod blind_spot;
mod shards;
