//! Settings that decide where VMs live.

use std::sync::Arc;

use homenode_host::View;
use homenode_units::{Any, BadSetting, Bytes, Ns};
use serde::{Deserialize, Serialize};

use crate::bounds::{PAUSE, SHARE, SPAN};
use crate::{placement, predict, trial};

/// The operator's settings. A VM's slow-down is the time that its work takes, over the time that it would take without an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Whether a home may consist of some of a node's caches; otherwise it consists of whole nodes.
    pub by_cache: bool,
    /// A host is crowded only if its VMs want at least this share of its cores, 0 to 1000.
    pub crowded_threads: f64,
    /// A host is crowded only if it also has at least this many active VMs per node, or wanted threads per core, 0 to 1000.
    pub crowded_vms: f64,
    /// A host is quiet if its VMs want less than this share of its cores, 0 to 1000; at most [`Config::crowded_threads`].
    pub quiet_threads: f64,
    /// Highest predicted mean slow-down at which homes are assigned, 0 to 10.
    pub mean_max: f64,
    /// Highest predicted mean slow-down at which homes are assigned on a crowded host, 0 to 10.
    pub mean_max_crowded: f64,
    /// Highest predicted slow-down of any single VM at which homes are assigned, 0 to 10.
    pub worst_max: f64,
    /// Highest predicted mean slow-down on a crowded host whose kernel balances (there only polluters get homes), 0 to 10.
    pub mean_max_balanced: f64,
    /// A polluter fetches at least this many times as many cache lines per second and thread as the mean VM, 0 to 1000. On a
    /// crowded host whose kernel balances, only polluters get homes.
    pub polluter_min: f64,
    /// On a quiet host whose kernel balances, a VM's threads and memory are brought together only if that is predicted to
    /// save at least this share of the VM's time, 0 to 1, and if all VMs together save at least as much, in times of one VM.
    pub together_min: f64,
    /// Least gain of a move or exchange, in slow-downs of one VM, 0 to 1000.
    pub move_gain_min: f64,
    /// Least by which a step of the search must lower the cost, in slow-downs of one VM, 0 to 1000.
    pub step_min: f64,
    /// How many times more harm counts than gain, 0 to 1000.
    pub harm_weight: f64,
    /// Share of a predicted gain that is believed, 0 to 1.
    pub belief: f64,
    /// Time within which a move must pay.
    #[serde(with = "homenode_units::text")]
    pub horizon: Ns,
    /// Time within which a move must pay on a host whose kernel balances; longer, as polluters get homes only once.
    #[serde(with = "homenode_units::text")]
    pub horizon_balanced: Ns,
    /// Assumed memory per second that is transferred if one VM moves, for the cost of a move. 1 MiB to 1 TiB.
    #[serde(with = "homenode_units::text")]
    pub moved_per_s: Bytes,
    /// Assumed memory per second that is transferred for all VMs together if many move. 1 MiB to 1 TiB.
    #[serde(with = "homenode_units::text")]
    pub host_moved_per_s: Bytes,
    /// Assumed share of its speed that a VM loses while its memory moves, 0 to 1.
    pub moving_loss: f64,
    /// Least time between two reviews of all VMs' homes.
    #[serde(with = "homenode_units::text")]
    pub rest: Ns,
    /// Least time between two reviews of all VMs' homes if nothing has changed.
    #[serde(with = "homenode_units::text")]
    pub rest_idle: Ns,
    /// Most reviews of all VMs' homes per hour. All of an hour's reviews may come in one burst. 1 to 3600.
    pub looks_per_hour: f64,
    /// A change of a VM's speed by more than this share is a reason for another review, 0 to 10.
    pub news_min: f64,
    /// Number of predictions after which a search stops improving, 1 to 1,000,000.
    pub candidates_max: u32,
    /// Most work of a search; the unit is predicting the speed of one VM on one node. 1 to 10,000,000.
    pub work_max: u32,
}

impl Default for Config {
    /// In random cases homes gained six tenths of what was predicted. Within the work, 40 VMs on 8 nodes all find homes and
    /// use up the predictions; 1000 VMs get some 20 arrangements without homes weighed, or more with homes.
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
        // A search that does the maximal work takes seconds, and the agent's loop waits for it.
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
    /// Returns the slow-down with only the [`Config::belief`] share of its gain.
    pub(super) fn believed(&self, slow: f64) -> f64 {
        if slow < 1.0 {
            1.0 - self.belief * (1.0 - slow)
        } else {
            slow
        }
    }
}

/// All settings that concern homes which are predicted and tried.
#[derive(Clone, Copy, Debug)]
pub struct Settings<'a> {
    /// Settings for choosing nodes and CPUs.
    pub placement: &'a placement::Config,
    /// Settings for predictions.
    pub predict: &'a predict::Config,
    /// Settings for what a change must promise.
    pub arrange: &'a Config,
    /// Settings for how a change is judged.
    pub trial: &'a trial::Config,
}

impl<'a> Settings<'a> {
    /// Returns the settings that trials need.
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
