//! A case: its name, what it shows, and the function that runs it.

use std::time::Duration;

use super::group::Group;
use crate::inside::Inside;
use crate::outside::plain::Outside;

/// A case of the testbed.
#[derive(Debug)]
pub struct Case {
    /// The case's unique name.
    pub name: &'static str,
    /// The group of cases with which the case shares a boot.
    pub group: Group,
    /// The property that the case shows, in one line.
    pub about: &'static str,
    /// Time limit after which the case has failed.
    pub limit: Duration,
    /// The case itself.
    pub run: Run,
}

/// The function of a case, according to where it runs.
#[derive(Debug, Clone, Copy)]
pub enum Run {
    /// Inside the emulated host.
    Inside(fn(&mut Inside) -> anyhow::Result<()>),
    /// The case runs on this machine, next to plain guests.
    Outside(fn(&mut Outside<'_>) -> anyhow::Result<()>),
}

pub(super) const fn case(
    name: &'static str,
    group: Group,
    limit_s: u64,
    about: &'static str,
    run: fn(&mut Inside) -> anyhow::Result<()>,
) -> Case {
    Case {
        name,
        group,
        about,
        limit: Duration::from_secs(limit_s),
        run: Run::Inside(run),
    }
}

pub(super) const fn plain_case(
    name: &'static str,
    group: Group,
    limit_s: u64,
    about: &'static str,
    run: fn(&mut Outside<'_>) -> anyhow::Result<()>,
) -> Case {
    Case {
        name,
        group,
        about,
        limit: Duration::from_secs(limit_s),
        run: Run::Outside(run),
    }
}
