//! The operator's settings, and the sets of policies to choose from.

use std::collections::BTreeMap;

use homenode_host::{LocalMigration, Mode};
use homenode_machine::Machine;
use homenode_policy::{
    arrange, balance, demand, memory, overcommit, pace, permits, placement, predict, repatriate,
    topology_feed, trial, working_set,
};
use homenode_units::{Any, BadSetting, Candidates, Ns, Section, Settings};
use schemars::JsonSchema;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{http, recommendations, record, stages};

/// The shortest time between samples: a sample of a large host takes some milliseconds.
pub const PERIOD_MIN: Ns = Ns::from_millis(10);
/// The longest time between samples: half of the longest time that the ledger of permits regards as watched.
pub const PERIOD_MAX: Ns = Ns(permits::PERIOD_MAX.0 / 2);
/// Least number of periods that a lease must outlast.
const LEASE_PERIODS_MIN: u64 = 3;

/// Which policies act.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PolicySet {
    /// No policies: the host's own scheduler decides, and the agent only watches.
    Default,
    /// First fit, each vCPU pinned to one CPU, memory bound: the baseline of \[TAVO\].
    FfPin,
    /// The behaviour of numad, for comparison: binds large VMs to nodes, and moves all their memory there
    /// ([`homenode_policy::numad`]).
    Numad,
    /// Only memory policies and repatriation: operators choose the homes.
    Memory,
    /// TAVO as published: placement by TAH at arrival, balance and re-homing, repatriation; also permits and memory
    /// policies.
    Tavo,
    /// Arrangements predicted from counters and proven by trials ([`homenode_policy::arrange`]); also permits, lending,
    /// repatriation, memory policies.
    #[default]
    Homenode,
}

impl PolicySet {
    /// All sets of policies.
    pub const ALL: [PolicySet; 6] = [
        PolicySet::Default,
        PolicySet::FfPin,
        PolicySet::Numad,
        PolicySet::Memory,
        PolicySet::Tavo,
        PolicySet::Homenode,
    ];

    /// Returns what the set of policies does, in a line.
    pub fn about(self) -> &'static str {
        match self {
            PolicySet::Default => "none: the host's own scheduler, only observed",
            PolicySet::FfPin => "first fit: each vCPU pinned to a CPU, memory bound to its node",
            PolicySet::Numad => "numad's algorithm, for comparison",
            PolicySet::Memory => "only memory policies and repatriation; operators choose homes",
            PolicySet::Tavo => "TAVO as published: a home at arrival, balancing, repatriation",
            PolicySet::Homenode => "homes predicted from counters and proven by trials (the default)",
        }
    }

    /// Returns the set's name in tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            PolicySet::Default => "default",
            PolicySet::FfPin => "ff-pin",
            PolicySet::Numad => "numad",
            PolicySet::Memory => "memory",
            PolicySet::Tavo => "tavo",
            PolicySet::Homenode => "homenode",
        }
    }
}

/// A name that is neither a set of policies nor a policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnknownPolicy {
    /// The name is not that of a set of policies.
    #[error("no policies are named `{name}`{valid}")]
    Set {
        /// The unknown name.
        name: String,
        /// The valid names.
        valid: Candidates,
    },
    /// The names are not those of policies that decide; a sentence for each.
    #[error("{}", .0.join("; "))]
    Modes(Vec<String>),
}

impl std::str::FromStr for PolicySet {
    type Err = UnknownPolicy;
    fn from_str(text: &str) -> Result<PolicySet, UnknownPolicy> {
        let named = PolicySet::ALL
            .into_iter()
            .find(|policies| policies.name() == text);
        named.ok_or_else(|| UnknownPolicy::Set {
            name: text.to_owned(),
            valid: Candidates::of(text, PolicySet::ALL.map(PolicySet::name)),
        })
    }
}

/// Modes of single policies. A policy that is not named here has the mode of the run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<String, Mode>", into = "BTreeMap<String, Mode>")]
pub struct Modes(BTreeMap<String, Mode>);

impl Modes {
    /// Returns the mode of a policy, by its name in decisions; `None` if the policy has the mode of the run.
    pub fn of(&self, policy: &str) -> Option<Mode> {
        self.0.get(policy).copied()
    }
}

impl TryFrom<BTreeMap<String, Mode>> for Modes {
    type Error = UnknownPolicy;

    fn try_from(modes: BTreeMap<String, Mode>) -> Result<Modes, UnknownPolicy> {
        let known = stages::deciding_policies();
        let unknown = modes.keys().filter(|policy| !known.contains(&policy.as_str()));
        let said = unknown.map(|unknown| {
            let shown: String = unknown.chars().take(40).collect();
            let valid = Candidates::of(&shown, known.iter().copied());
            format!("no policy is named `{shown}`{valid}")
        });
        let said: Vec<String> = said.collect();
        match said.is_empty() {
            true => Ok(Modes(modes)),
            false => Err(UnknownPolicy::Modes(said)),
        }
    }
}

impl From<Modes> for BTreeMap<String, Mode> {
    fn from(modes: Modes) -> BTreeMap<String, Mode> {
        modes.0
    }
}

/// The operator's settings, in one file.
///
/// Deserializing also checks them with [`Config::check`](Settings::check).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", deny_unknown_fields, default)]
pub struct Config {
    /// Time between samples, from [`PERIOD_MIN`] to [`PERIOD_MAX`].
    #[serde(with = "homenode_units::text")]
    pub period: Ns,
    /// Which policies act.
    pub policies: PolicySet,
    /// How far decisions go in this run.
    pub mode: Mode,
    /// Modes of single policies.
    pub modes: Modes,
    /// How long recommendations stay open or approved.
    pub recommendations: recommendations::Config,
    /// Placement and limits of CPUs, memory and links.
    pub placement: placement::Config,
    /// When a VM's measured use counts instead of its size.
    pub demand: demand::Config,
    /// What gain homes must promise, and how often they are reviewed.
    pub arrange: arrange::Config,
    /// What predictions assume, and how fast they learn.
    pub predict: predict::Config,
    /// How changes of homes are judged.
    pub trial: trial::Config,
    /// Which vCPUs are lent to other nodes, and when a home that was assigned at arrival changes.
    pub balance: balance::Config,
    /// Budgets for moving pages home.
    pub repatriate: repatriate::Config,
    /// Whether memory may be moved by migrating a VM to its own host.
    pub local_migration: LocalMigration,
    /// How memory policies are carried out.
    pub memory: memory::Config,
    /// When moves of pages slow down.
    pub pace: pace::Config,
    /// How VMs are held to their permits.
    pub permits: permits::Config,
    /// Which VMs' memory is watched, and how.
    pub working_set: working_set::Config,
    /// How memory is taken from VMs that have a floor.
    pub overcommit: overcommit::Config,
    /// How soon and how often guests are notified of where they are.
    pub topology_feed: topology_feed::Config,
    /// How much is recorded on disk.
    pub record: record::Config,
    /// Access over HTTP.
    pub http: http::Config,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            period: Ns::from_secs(1),
            policies: PolicySet::Homenode,
            mode: Mode::Act,
            modes: Modes::default(),
            recommendations: recommendations::Config::default(),
            placement: placement::Config::default(),
            demand: demand::Config::default(),
            arrange: arrange::Config::default(),
            predict: predict::Config::default(),
            trial: trial::Config::default(),
            balance: balance::Config::default(),
            repatriate: repatriate::Config::default(),
            local_migration: LocalMigration::default(),
            memory: memory::Config::default(),
            pace: pace::Config::default(),
            permits: permits::Config::default(),
            working_set: working_set::Config::default(),
            overcommit: overcommit::Config::default(),
            topology_feed: topology_feed::Config::default(),
            record: record::Config::default(),
            http: http::Config::default(),
        }
    }
}

homenode_units::settings! {
    Config {
        period: PERIOD_MIN..=PERIOD_MAX,
        policies: Any,
        mode: Any,
        modes: Any,
        recommendations: Section,
        placement: Section,
        demand: Section,
        arrange: Section,
        predict: Section,
        trial: Section,
        balance: Section,
        repatriate: Section,
        local_migration: Section,
        memory: Section,
        pace: Section,
        permits: Section,
        working_set: Section,
        overcommit: Section,
        topology_feed: Section,
        record: Section,
        http: Section,
    }
}

impl<'de> Deserialize<'de> for Config {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Config, D::Error> {
        // Uses the derived deserializer, which does not check.
        let config = Config::deserialize(d)?;
        config.check().map_err(D::Error::custom)?;
        Ok(config)
    }
}

impl Serialize for Config {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        Config::serialize(self, s)
    }
}

impl Config {
    /// Checks what depends on a machine.
    ///
    /// # Errors
    /// If a setting names something that the machine does not have.
    pub fn check_on(&self, machine: &Machine) -> Result<(), BadSetting> {
        self.placement
            .check_on(machine)
            .map_err(|bad| bad.of("placement"))
    }

    /// Returns the settings in force after a running agent takes over `newer`, and the changed keys that it does not take over.
    /// These keys take effect at the next start, because the agent's state was made from their old values.
    pub fn taken_over(&self, newer: Config) -> (Config, Vec<&'static str>) {
        fn keep<T: Clone + PartialEq>(
            kept: &mut Vec<&'static str>,
            key: &'static str,
            (newer, own): (&mut T, &T),
        ) {
            if newer != own {
                kept.push(key);
                newer.clone_from(own);
            }
        }
        let (mut taken, mut kept) = (newer, Vec::new());
        let placement = (&mut taken.placement.reserved_cpus, &self.placement.reserved_cpus);
        keep(&mut kept, "policies", (&mut taken.policies, &self.policies));
        keep(&mut kept, "mode", (&mut taken.mode, &self.mode));
        keep(&mut kept, "placement.reserved_cpus", placement);
        keep(
            &mut kept,
            "permits.terms",
            (&mut taken.permits.terms, &self.permits.terms),
        );
        let local_migration = (&mut taken.local_migration, &self.local_migration);
        keep(&mut kept, "local_migration", local_migration);
        keep(&mut kept, "record", (&mut taken.record, &self.record));
        keep(&mut kept, "http", (&mut taken.http, &self.http));
        (taken.completed(), kept)
    }

    /// Returns the settings that concern predicted homes and their trials.
    pub(crate) fn of_homes(&self) -> arrange::Settings<'_> {
        arrange::Settings {
            placement: &self.placement,
            predict: &self.predict,
            arrange: &self.arrange,
            trial: &self.trial,
        }
    }

    /// Returns the settings that concern lent vCPUs.
    pub(crate) fn of_balance(&self) -> balance::Settings<'_> {
        balance::Settings {
            placement: &self.placement,
            balance: &self.balance,
        }
    }

    /// Completes the settings: first fit if the set of policies needs it, and leases that outlast several periods.
    pub(crate) fn completed(mut self) -> Config {
        if self.policies == PolicySet::FfPin {
            self.placement.algorithm = placement::Algorithm::FirstFit;
        }
        // A leased limit or watch must not end before the next cycle can renew it.
        let lease_min = Ns(self.period.0.saturating_mul(LEASE_PERIODS_MIN));
        self.permits.lease = self.permits.lease.max(lease_min);
        self.working_set.lease = self.working_set.lease.max(lease_min);
        // VMs leave in one cycle, and are counted over the next ones.
        let window_most = &mut self.permits.attribution.window_most;
        *window_most = (*window_most).max(lease_min);
        self.overcommit.lease = self.overcommit.lease.max(lease_min);
        self
    }
}
