//! Settings: their file, the command line's overrides, and `homenode config`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Subcommand;
use homenode_agent::reload::Reload;
use homenode_api::http::Listen;
use homenode_control::{Config, Mode, PolicySet};
use homenode_host::WakeSignal;
use homenode_machine::Machine;
use homenode_machine_files::file::{Source, read_text_file, read_toml, read_toml_every};
use homenode_machine_files::sysfs;
use homenode_undo::peer::GroupId;
use homenode_units::{Ns, Settings as _};
use schemars::JsonSchema;
use serde::Serialize;

use crate::bad_input;
use crate::options::ShownArgs;
use crate::print::print_json;

/// The settings file of a run on a real host, unless another is named.
pub(crate) const FILE: &str = "/etc/homenode/homenode.toml";

/// Options of `config`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    pub command: Option<ConfigCommand>,
    #[command(flatten)]
    pub shown: ShownArgs,
}

/// Commands about settings.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Report every error in a settings file; the exit status is 2 if there is any
    Check {
        /// The settings file
        #[arg(value_name = "FILE", default_value = FILE)]
        file: PathBuf,
        #[command(flatten)]
        shown: ShownArgs,
    },
    /// Show all settings that a run on this host gets from a file, in the format of a settings file
    Show {
        /// The settings file [default: /etc/homenode/homenode.toml, if it exists]
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
        /// Show the default settings
        #[arg(long, conflicts_with = "file")]
        defaults: bool,
        #[command(flatten)]
        shown: ShownArgs,
    },
}

/// All settings, and the file that they come from.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Shown {
    /// The file; `null` if all are defaults.
    file: Option<String>,
    /// Every setting, as in a configuration file.
    #[schemars(with = "serde_json::Map<String, serde_json::Value>")]
    config: Config,
}

/// The errors in a file of settings.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Checked {
    /// The file.
    file: String,
    /// Every error, with its place in the file; empty if nothing is wrong.
    errors: Vec<String>,
}

/// Runs `homenode config`.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn run(args: &ConfigArgs) -> anyhow::Result<ExitCode> {
    match &args.command {
        None => show(None, false, &args.shown)?,
        Some(ConfigCommand::Check { file, shown }) => return check(file, shown),
        Some(ConfigCommand::Show {
            file,
            defaults,
            shown,
        }) => show(file.clone(), *defaults, shown)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Shows the settings in a file, in the usual file, or the defaults.
fn show(file: Option<PathBuf>, defaults: bool, shown: &ShownArgs) -> anyhow::Result<()> {
    let usual = Some(PathBuf::from(FILE)).filter(|file| !defaults && may_exist(file));
    let file = file.or(usual);
    let config = read(file.as_deref(), MODE_OF_HOST, |file, text| {
        read_toml(file, text).map_err(bad_input)
    })?;
    let file = file.map(|file| file.display().to_string());
    let all = Shown { file, config };
    if shown.json {
        return print_json("config", &all);
    }
    let text = toml::to_string(&all.config).context("settings cannot be written as TOML")?;
    say!("{}", text.trim_end());
    Ok(())
}

/// The mode of a run on a real host that neither the command line nor the settings name: as in the package's settings, the agent
/// changes nothing before its operator has seen what it would do.
pub(crate) const MODE_OF_HOST: Mode = Mode::Recommend;

/// Returns false if there is no such file. If this user may not look for the file, it counts as existing, and reading it then
/// gives the reason.
fn may_exist(file: &Path) -> bool {
    file.try_exists().unwrap_or(true)
}

/// Returns the settings in a file, or the defaults, with this mode unless the file names one.
fn read(
    file: Option<&Path>,
    mode_unless_named: Mode,
    parse: impl FnOnce(&Path, &str) -> anyhow::Result<Config>,
) -> anyhow::Result<Config> {
    let (mut config, is_named) = match file {
        Some(file) => {
            let text = read_text_file(file).map_err(bad_input)?;
            (parse(file, &text)?, names_mode(&text))
        }
        None => (Config::default(), false),
    };
    if !is_named {
        config.mode = mode_unless_named;
    }
    Ok(config)
}

/// Returns whether this file of settings, which was read without an error, names a mode.
fn names_mode(text: &str) -> bool {
    toml::from_str::<toml::Table>(text).is_ok_and(|settings| settings.contains_key("mode"))
}

/// Reads the settings in a file, for a run on this machine.
///
/// # Errors
/// A bad file, with the place of the error.
pub(crate) fn of_file(file: &Path, machine: &Machine) -> anyhow::Result<Config> {
    let text = read_text_file(file).map_err(bad_input)?;
    of_text(file, &text, machine)
}

fn of_text(file: &Path, text: &str, machine: &Machine) -> anyhow::Result<Config> {
    homenode_search::settings::from_toml(file, text, machine).map_err(bad_input)
}

fn check(file: &Path, shown: &ShownArgs) -> anyhow::Result<ExitCode> {
    let text = read_text_file(file).map_err(bad_input)?;
    let complaints = match read_toml_every::<Config>(file, &text) {
        Ok(config) => of_this_host(&config, &Source::new(file, &text)),
        Err(complaints) => complaints.iter().map(ToString::to_string).collect(),
    };
    let is_wrong = !complaints.is_empty();
    if shown.json {
        let file = file.display().to_string();
        let errors = complaints;
        print_json("config-check", &Checked { file, errors })?;
    } else {
        for complaint in &complaints {
            complain!("homenode: {complaint}");
        }
        if !is_wrong {
            say!("{}: nothing is wrong", file.display());
        }
    }
    Ok(ExitCode::from(if is_wrong { 2 } else { 0 }))
}

/// Returns the errors in settings that depend on this host.
fn of_this_host(config: &Config, source: &Source) -> Vec<String> {
    let machine = sysfs::read(Path::new("/"));
    let on_machine = machine.ok().and_then(|machine| config.check_on(&machine).err());
    let mut wrong: Vec<String> = on_machine
        .map(|bad| source.bad_setting(&bad).to_string())
        .into_iter()
        .collect();
    let group = Some(config.http.group.as_str()).filter(|name| !name.is_empty());
    if let Some(Err(error)) = group.map(GroupId::of) {
        wrong.push(source.complaint("http.group", error.to_string()).to_string());
    }
    let loopback = "127.0.0.1:0".parse().ok();
    if let Err(error) = homenode_agent::http::check(loopback, &config.http) {
        wrong.push(source.complaint("http.web_config", error.to_string()).to_string());
    }
    wrong
}

/// Sources of a run's settings: a file, and the command line.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wanted {
    /// The file that was named.
    pub file: Option<PathBuf>,
    /// The default file, read if it exists and no file was named. `None` for a simulated host, which reads only a named file.
    pub usual: Option<PathBuf>,
    /// Overrides the file's period.
    pub period: Option<Ns>,
    /// Overrides the file's policies.
    pub policies: Option<PolicySet>,
    /// Overrides the file's mode.
    pub mode: Option<Mode>,
    /// The mode if neither the command line nor the file names one.
    pub mode_unless_named: Mode,
    /// Overrides the file's web configuration.
    pub web_config: Option<String>,
    /// Where to answer HTTP. `web_config` must be good enough for this address.
    pub listen: Option<Listen>,
}

impl Wanted {
    /// Returns the file to read, if any.
    pub(crate) fn file(&self) -> Option<&Path> {
        let usual = self.usual.as_deref().filter(|file| may_exist(file));
        self.file.as_deref().or(usual)
    }

    /// Returns how to read the settings again during the run.
    pub(crate) fn reload(&self, wake_signal: &WakeSignal, machine: Machine) -> Reload {
        let wanted = self.clone();
        Reload::new(wake_signal, move || {
            if wanted.file().is_none() {
                return Err(match &wanted.usual {
                    Some(usual) => format!("the settings file {} does not exist", usual.display()),
                    None => "this run was started without a settings file; name one with --config".to_owned(),
                });
            }
            wanted.read(&machine).map_err(|error| format!("{error:#}"))
        })
    }

    /// Reads the settings, for a run on this machine.
    ///
    /// # Errors
    /// A bad file, with the place of the error; bad settings on the command line.
    pub(crate) fn read(&self, machine: &Machine) -> anyhow::Result<Config> {
        let of_machine = |file: &Path, text: &str| of_text(file, text, machine);
        let mut config = read(self.file(), self.mode_unless_named, of_machine)?;
        config.period = self.period.unwrap_or(config.period);
        config.policies = self.policies.unwrap_or(config.policies);
        config.mode = self.mode.unwrap_or(config.mode);
        if let Some(web_config) = &self.web_config {
            config.http.web_config.clone_from(web_config);
        }
        homenode_agent::http::check(self.listen, &config.http).map_err(bad_input)?;
        // The file's settings were checked when they were read, so an error comes from the command line.
        config
            .check()
            .map_err(|bad| bad_input(format!("--{}: {bad}", bad.key)))?;
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_real_host_reads_the_usual_file_where_it_is_there_and_no_other_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let machine = crate::twin::machine("r910").unwrap();
        let (usual, other) = (dir.path().join("homenode.toml"), dir.path().join("other.toml"));
        std::fs::write(&other, "period = \"3s\"\n").unwrap();
        let period = |wanted: Wanted| wanted.read(&machine).unwrap().period;
        let of_host = || Wanted {
            usual: Some(usual.clone()),
            ..Wanted::default()
        };
        assert_eq!(period(of_host()), Ns::from_secs(1));
        std::fs::write(&usual, "period = \"2s\"\n").unwrap();
        assert_eq!(period(of_host()), Ns::from_secs(2));
        assert_eq!(period(Wanted::default()), Ns::from_secs(1));
        let named = Wanted {
            file: Some(other),
            ..of_host()
        };
        assert_eq!(period(named), Ns::from_secs(3));
        let said = Wanted {
            period: Some(Ns::from_secs(4)),
            ..of_host()
        };
        assert_eq!(period(said), Ns::from_secs(4));
    }

    #[test]
    fn a_real_host_recommends_unless_its_file_or_the_command_line_names_a_mode_and_the_twin_acts() {
        let dir = tempfile::tempdir().unwrap();
        let machine = crate::twin::machine("r910").unwrap();
        let file = dir.path().join("homenode.toml");
        let mode = |wanted: Wanted| wanted.read(&machine).unwrap().mode;
        let of_host = || Wanted {
            usual: Some(file.clone()),
            mode_unless_named: MODE_OF_HOST,
            ..Wanted::default()
        };
        assert_eq!(
            (mode(of_host()), mode(Wanted::default())),
            (Mode::Recommend, Mode::Act)
        );
        std::fs::write(&file, "period = \"2s\"\n[modes]\narrange = \"act\"\n").unwrap();
        assert_eq!(mode(of_host()), Mode::Recommend);
        for (line, named) in [
            ("mode = \"act\"", Mode::Act),
            ("\"mode\" = \"observe\"", Mode::Observe),
        ] {
            std::fs::write(&file, line).unwrap();
            assert_eq!(mode(of_host()), named);
        }
        let said = Wanted {
            mode: Some(Mode::Act),
            ..of_host()
        };
        assert_eq!(mode(said), Mode::Act);
    }

    #[test]
    fn all_settings_as_toml_read_back_as_they_are() {
        let default = Config::default();
        let text = toml::to_string(&default).unwrap();
        assert_eq!(read_toml::<Config>("all", &text).unwrap(), default, "{text}");
    }
}
