//! Policies for placing and moving a VM's pages [Policies, sections 3 and 4.2.1].

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A hypervisor's placement of a VM's pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Placing {
    /// On the node of the CPU that touches the page first; after the guest has released the page, the next touch decides again.
    /// If that node is full, round-robin over the home nodes [Policies, section 3.1].
    #[default]
    FirstTouch,
    /// Single pages, round-robin over the home nodes (section 3.2).
    Round4k,
    /// Pieces of 1 GiB, round-robin over the home nodes, placed when the VM is created (section 3.3). This is Xen's own policy.
    Round1g,
}

/// The mechanism that later moves pages to the nodes that use them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Migration {
    /// No mechanism.
    #[default]
    None,
    /// Carrefour: moves pages according to the nodes that use them and to the load of controllers and links (section 3.4).
    Carrefour,
    /// The host kernel's automatic NUMA balancing, for comparison: it moves a page to a node that touched it twice in a row.
    AutoNuma,
}

/// A NUMA policy for the memory of a VM. Written `first-touch` or `round-4k+carrefour`; `carrefour` is short for the latter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemoryPolicy {
    /// Initial placement of pages.
    pub placing: Placing,
    /// Later moves of pages.
    pub migration: Migration,
}

/// A text that does not name a memory policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPolicyError {
    text: String,
}

impl fmt::Display for MemoryPolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "`{}` is not a memory policy: write `first-touch`, `round-4k` or `round-1g`, followed by `+carrefour` or `+autonuma` \
             if pages are to follow their users",
            self.text.escape_debug()
        )
    }
}

impl std::error::Error for MemoryPolicyError {}

impl Placing {
    /// All placings.
    pub const ALL: [Placing; 3] = [Placing::FirstTouch, Placing::Round4k, Placing::Round1g];

    /// Returns the name that files use.
    pub fn name(self) -> &'static str {
        match self {
            Placing::FirstTouch => "first-touch",
            Placing::Round4k => "round-4k",
            Placing::Round1g => "round-1g",
        }
    }

    /// Returns the placing without later moves.
    pub const fn alone(self) -> MemoryPolicy {
        MemoryPolicy {
            placing: self,
            migration: Migration::None,
        }
    }

    /// Returns the placing with Carrefour.
    pub const fn with_carrefour(self) -> MemoryPolicy {
        MemoryPolicy {
            placing: self,
            migration: Migration::Carrefour,
        }
    }

    /// Returns this placing with the host kernel's AutoNUMA.
    pub const fn with_autonuma(self) -> MemoryPolicy {
        MemoryPolicy {
            placing: self,
            migration: Migration::AutoNuma,
        }
    }
}

impl fmt::Display for MemoryPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.placing.name())?;
        f.write_str(match self.migration {
            Migration::None => "",
            Migration::Carrefour => "+carrefour",
            Migration::AutoNuma => "+autonuma",
        })
    }
}

impl FromStr for MemoryPolicy {
    type Err = MemoryPolicyError;

    fn from_str(text: &str) -> Result<MemoryPolicy, MemoryPolicyError> {
        let unknown = || MemoryPolicyError {
            text: text.to_owned(),
        };
        let migration = |name| match name {
            "carrefour" => Some(Migration::Carrefour),
            "autonuma" => Some(Migration::AutoNuma),
            _ => None,
        };
        let trimmed = text.trim();
        let (placing, on_top) = match trimmed.split_once('+') {
            Some((placing, name)) => (placing, migration(name.trim()).ok_or_else(unknown)?),
            None => match migration(trimmed) {
                Some(migration) => (Placing::Round4k.name(), migration),
                None => (trimmed, Migration::None),
            },
        };
        let named = Placing::ALL
            .into_iter()
            .find(|known| known.name() == placing.trim());
        Ok(MemoryPolicy {
            placing: named.ok_or_else(unknown)?,
            migration: on_top,
        })
    }
}

impl Serialize for MemoryPolicy {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for MemoryPolicy {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<MemoryPolicy, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        for placing in Placing::ALL {
            for migration in [Migration::None, Migration::Carrefour, Migration::AutoNuma] {
                let policy = MemoryPolicy { placing, migration };
                assert_eq!(policy.to_string().parse(), Ok(policy));
            }
        }
        assert_eq!("carrefour".parse(), Ok(Placing::Round4k.with_carrefour()));
        assert_eq!(
            " first-touch + carrefour ".parse(),
            Ok(Placing::FirstTouch.with_carrefour())
        );
    }

    #[test]
    fn what_names_no_policy_is_refused_with_those_that_there_are() {
        for text in [
            "",
            "round",
            "first-touch+",
            "+carrefour",
            "round-4k+carrefour+autonuma",
            "Round-4K",
            "a\nb",
        ] {
            let said = text.parse::<MemoryPolicy>().expect_err(text).to_string();
            assert!(said.contains("round-4k") && !said.contains('\n'), "{said}");
        }
    }
}
