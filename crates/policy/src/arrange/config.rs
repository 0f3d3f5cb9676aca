//! Settings that decide where VMs live.

use std::sync::Arc;

use homenode_host::View;
use homenode_units::{Any, BadSetting, Bytes, Ns};
use serde::{Deserialize, Serialize};

use crate::bounds::{PAUSE, SHARE, SPAN};
use crate::{placement, predict, trial};

/// The operator's settings. A slow-down is a VM's time over its time without an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Whether a home may be some of a node's caches, and not only whole nodes.
    pub by_cache: bool,
    /// Share of the host's cores that its VMs must want for it to be crowded, 0 to 1000.
    pub crowded_threads: f64,
    /// VMs per node, or threads per core, that make a host crowded, 0 to 1000.
    pub crowded_vms: f64,
    /// A host is quiet if its VMs want less than this share of its cores, 0 to 1000; at most [`Config::crowded_threads`].
    pub quiet_threads: f64,
    /// Highest predicted mean slow-down at which homes are assigned, 0 to 10,
    pub mean_max: f64,
    /// on a crowded host, if they also keep local accesses local, at most this,
    pub mean_max_crowded: f64,
    /// and for no VM above this.
    pub worst_max: f64,
    /// Highest mean on a crowded host whose kernel balances, where only polluters get homes, 0 to 10.
    pub mean_max_balanced: f64,
    /// Cache lines per second that a polluter fetches, relative to the mean VM, per thread, 0 to 1000. On a crowded host
    /// whose kernel balances, only polluters get homes.
    pub polluter_min: f64,
    /// On a quiet host whose kernel balances: least share of its time that a VM must be predicted to save when its threads
    /// and memory are brought together, 0 to 1, and the least that all VMs must save with it, in times of one VM.
    pub together_min: f64,
    /// Least gain of a move or exchange, in slow-downs of one VM, 0 to 1000.
    pub move_gain_min: f64,
    /// Least that a step of the search must lower the cost, in slow-downs of one VM, 0 to 1000.
    pub step_min: f64,
    /// How much more harm counts than gain, 0 to 1000.
    pub harm_weight: f64,
    /// Share of a promised gain that is believed, 0 to 1.
    pub belief: f64,
    /// Time over which a move must pay.
    #[serde(with = "homenode_units::text")]
    pub horizon: Ns,
    /// Time over which a move must pay on a host whose kernel balances: polluters get their homes only once.
    #[serde(with = "homenode_units::text")]
    pub horizon_balanced: Ns,
    /// Assumed memory per second that one VM's move transfers, when a move is costed. 1 MiB to 1 TiB.
    #[serde(with = "homenode_units::text")]
    pub moved_per_s: Bytes,
    /// Assumed memory per second of all VMs together, while many move. 1 MiB to 1 TiB.
    #[serde(with = "homenode_units::text")]
    pub host_moved_per_s: Bytes,
    /// Assumed share of its speed that a VM loses while its memory moves, 0 to 1.
    pub moving_loss: f64,
    /// Least time between two looks at the whole arrangement.
    #[serde(with = "homenode_units::text")]
    pub rest: Ns,
    /// Least time between two looks without news.
    #[serde(with = "homenode_units::text")]
    pub rest_idle: Ns,
    /// Looks at the whole arrangement per hour, which may follow each other in one burst. 1 to 3600.
    pub looks_per_hour: f64,
    /// A speed change below this share is no news, 0 to 10.
    pub news_min: f64,
    /// Predictions after which a search stops improving, 1 to 1,000,000.
    pub candidates_max: u32,
    /// Most work of a search, in predicted speeds of one VM on one node, 1 to 10,000,000.
    pub work_max: u32,
}

impl Default for Config {
    /// On random cases homes gained six tenths of what was predicted. 40 VMs on 8 nodes find homes and use up all
    /// predictions within the work; for 1000 VMs this allows some 20 arrangements without homes, or more with homes.
    fn default() -> Config {
        Config {
            by_cache: true,
            crowded_threads: 0.8,
            crowded_vms: 1.25,
            quiet_threads: 0.6,
            mean_max: 0.95,
            mean_max_crowded: 0.98,
            worst_max: 1.08,
            mean_max_balanced: 0.995,
            polluter_min: 1.5,
            together_min: 0.02,
            move_gain_min: 0.15,
            step_min: 0.01,
            harm_weight: 6.0,
            belief: 0.6,
            horizon: Ns::from_secs(60),
            horizon_balanced: Ns::from_secs(600),
            moved_per_s: Bytes::from_mib(512),
            host_moved_per_s: Bytes::from_gib(1),
            moving_loss: 0.3,
            rest: Ns::from_secs(5),
            rest_idle: Ns::from_secs(120),
            looks_per_hour: 30.0,
            news_min: 0.1,
            candidates_max: 10_000,
            work_max: 170_000,
        }
    }
}

homenode_units::settings! {
    Config {
        by_cache: Any,
        crowded_threads: 0.0..=1000.0,
        crowded_vms: 0.0..=1000.0,
        quiet_threads: 0.0..=1000.0,
        mean_max: 0.0..=10.0,
        mean_max_crowded: 0.0..=10.0,
        worst_max: 0.0..=10.0,
        mean_max_balanced: 0.0..=10.0,
        polluter_min: 0.0..=1000.0,
        together_min: SHARE,
        move_gain_min: 0.0..=1000.0,
        step_min: 0.0..=1000.0,
        harm_weight: 0.0..=1000.0,
        belief: SHARE,
        horizon: SPAN,
        horizon_balanced: SPAN,
        moved_per_s: Bytes::from_mib(1)..=Bytes::from_gib(1024),
        host_moved_per_s: Bytes::from_mib(1)..=Bytes::from_gib(1024),
        moving_loss: SHARE,
        rest: PAUSE,
        rest_idle: PAUSE,
        looks_per_hour: 1.0..=3600.0,
        news_min: 0.0..=10.0,
        candidates_max: 1..=1_000_000,
        // A search with the maximum takes seconds; the loop waits for it.
        work_max: 1..=10_000_000,
    } ordered
}

fn ordered(config: &Config) -> Result<(), BadSetting> {
    BadSetting::unless_ordered(
        ("quiet_threads", config.quiet_threads),
        ("crowded_threads", config.crowded_threads),
    )?;
    BadSetting::unless_ordered(("rest", config.rest), ("rest_idle", config.rest_idle))
}

impl Config {
    /// Returns the slow-down with its gain discounted by the share that came true so far.
    pub(super) fn believed(&self, slow: f64) -> f64 {
        if slow < 1.0 {
            1.0 - self.belief * (1.0 - slow)
        } else {
            slow
        }
    }
}

/// All settings for homes that are predicted and tried.
#[derive(Clone, Copy, Debug)]
pub struct Settings<'a> {
    /// For nodes and CPUs.
    pub placement: &'a placement::Config,
    /// For predictions.
    pub predict: &'a predict::Config,
    /// For the promise that a change must make.
    pub arrange: &'a Config,
    /// For how a change is judged.
    pub trial: &'a trial::Config,
}

impl<'a> Settings<'a> {
    /// Returns the part that trials need.
    pub(super) fn of_trials(&self) -> trial::Settings<'a> {
        trial::Settings {
            placement: self.placement,
            predict: self.predict,
            trial: self.trial,
        }
    }

    /// Returns the predictor's view of the machine.
    pub(super) fn shape_of(&self, view: &View<'_>) -> Arc<predict::Shape> {
        Arc::new(predict::Shape::of(view.machine, &view.cpus, self.predict))
    }
}
