//! Options that several commands have, and how their values are written.

use std::path::{Path, PathBuf};

use clap::builder::BoolishValueParser;
use homenode_twin::Scenario;
use homenode_units::Bytes;

/// How a command answers.
#[derive(Debug, clap::Args)]
pub struct ShownArgs {
    /// JSON for programs instead of text (docs/JSON.md)
    #[arg(long)]
    pub json: bool,
}

/// What the twin's kernel does with memory by itself.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct TwinKernelArgs {
    /// Whether the twin's kernel balances NUMA memory (`kernel.numa_balancing`), whatever the scenario says
    #[arg(long, value_name = "on|off", value_parser = BoolishValueParser::new())]
    pub numa_balancing: Option<bool>,
}

impl TwinKernelArgs {
    /// The scenario on such a kernel.
    pub fn of(self, scenario: Scenario) -> Scenario {
        match self.numa_balancing {
            Some(is_on) => scenario.with_numa_balancing(is_on),
            None => scenario,
        }
    }
}

/// Where the agent keeps its files.
#[derive(Debug, clap::Args)]
pub struct StateArgs {
    /// The agent's directory: its journal and its socket
    #[arg(id = "state", long, value_name = "DIR", default_value = homenode_undo::state_dir::STATE_DIR)]
    pub dir: PathBuf,
}

/// Of commands that ask the running agent.
#[derive(Debug, clap::Args)]
pub struct AgentArgs {
    #[command(flatten)]
    pub shown: ShownArgs,
    #[command(flatten)]
    pub state: StateArgs,
}

impl AgentArgs {
    /// Whether the answer is for programs.
    pub fn json(&self) -> bool {
        self.shown.json
    }

    /// Where the agent's socket is.
    pub fn dir(&self) -> &Path {
        &self.state.dir
    }
}

/// Something that is set, or taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OrNone<T> {
    /// Set this.
    Some(T),
    /// Take back what was set.
    None,
}

/// A size on the command line: as everywhere, or a number alone in MiB, as QEMU and numad take it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub Bytes);

impl std::str::FromStr for Size {
    type Err = <Bytes as std::str::FromStr>::Err;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        match is_number {
            true => format!("{text}MiB").parse().map(Size),
            false => text.parse().map(Size),
        }
    }
}

impl<T> OrNone<T> {
    /// The same as an option.
    pub fn into_option(self) -> Option<T> {
        match self {
            OrNone::Some(value) => Some(value),
            OrNone::None => None,
        }
    }
}

impl<T: std::str::FromStr> std::str::FromStr for OrNone<T> {
    type Err = T::Err;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "none" => Ok(OrNone::None),
            value => value.parse().map(OrNone::Some),
        }
    }
}
