//! Parses the plugin's options on QEMU's command line.

use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;

use std::time::Duration;

use homenode_meter::overlap::Prefetcher;
use homenode_meter::page_model;
use homenode_meter::profile::Config;
use homenode_tracking::paging::{self, Mode, Start, TablePages};
use homenode_tracking::tlb::{CORES, core};

use crate::complaint::Complaint;
use crate::pages::PagesOptions;

/// The parsed options.
pub(crate) struct Options {
    /// Sizes of the private caches, and how accesses are sampled.
    pub config: Config,
    /// What the plugin does.
    pub what: What,
    /// Whether a profile begins only when the program announces it.
    pub announced: bool,
}

/// The task of the plugin.
pub(crate) enum What {
    /// Write a profile to this file when the program ends.
    Profile(PathBuf),
    /// Count for the emulated machine.
    Pmu(PmuOptions),
    /// Log the pages that the machine uses.
    Pages(PagesOptions),
}

/// What a PMU models besides private caches.
#[derive(Default)]
pub(crate) struct PmuOptions {
    /// File that the counts are written to.
    pub file: PathBuf,
    /// Number of the machine's CPUs.
    pub cpus: u64,
    /// Number of the machine's nodes.
    pub nodes: u64,
    /// Number of its LLCs, to which CPUs are assigned in blocks; by default one LLC per node.
    llcs: Option<u64>,
    /// Number of 4 KiB frames that can be tagged, from address 0 on.
    pub frames: u64,
    /// Size of an LLC.
    pub llc_bytes: u64,
    /// Number of ways of an LLC.
    pub llc_ways: u64,
    /// Memory of each node. The nodes' addresses follow each other from address 0 on.
    pub node_bytes: u64,
}

/// The options parsed so far.
struct Said {
    config: Config,
    log: PathBuf,
    pmu: PmuOptions,
    pages: PagesOptions,
}

impl PmuOptions {
    /// Returns the number of LLCs.
    pub(crate) fn llcs(&self) -> u64 {
        self.llcs.unwrap_or(self.nodes)
    }
}

impl Options {
    /// Parses `argc` strings of the form `key=value`.
    ///
    /// # Safety
    /// There are `argc` strings, and each ends with a zero.
    pub(crate) unsafe fn of(argc: c_int, argv: *const *const c_char) -> Result<Options, Complaint> {
        let mut said = Said {
            config: Config {
                private_bytes: 256 << 10,
                private_ways: 8,
                line_bytes: 64,
                rate_min: 0.01,
                window: 128,
                llc_bytes: 0,
                prefetcher: Prefetcher::L2_STREAMER,
                read: |_| None,
            },
            log: PathBuf::new(),
            pmu: PmuOptions {
                cpus: 1,
                nodes: 1,
                frames: 1 << 20,
                llc_bytes: 8 << 20,
                llc_ways: 16,
                node_bytes: 1 << 30,
                ..PmuOptions::default()
            },
            pages: PagesOptions {
                file: PathBuf::new(),
                config: page_model::Config {
                    core: &CORES[0],
                    mode: Mode::Paml,
                    options: paging::Options::PUBLISHED,
                    entries: 512,
                    flush: false,
                    exact: false,
                    frames: 0,
                },
                window: None,
                control: None,
                announced: false,
                keep_bytes: None,
            },
        };
        for at in 0..usize::try_from(argc).unwrap_or(0) {
            // SAFETY: by this function's contract.
            let text = unsafe { CStr::from_ptr(*argv.add(at)) };
            let text = text.to_str().map_err(|_| "an argument is not UTF-8")?;
            said.take(text)?;
        }
        said.settle()
    }
}

impl Said {
    fn settle(self) -> Result<Options, Complaint> {
        let Said {
            mut config,
            log,
            pmu,
            mut pages,
        } = self;
        config.llc_bytes = pmu.llc_bytes;
        let announced = pages.announced;
        let (private, ways, line) = (config.private_bytes, config.private_ways, config.line_bytes);
        if private < line * ways as u64 {
            return Err(
                format!("private-bytes={private} holds no set of {ways} lines of {line} bytes").into(),
            );
        }
        if pmu.nodes.max(pmu.llcs()) > pmu.cpus || pmu.llc_bytes < line * pmu.llc_ways {
            return Err("each node and each LLC needs a CPU, and each LLC a set".into());
        }
        let given = |path: &PathBuf| !path.as_os_str().is_empty();
        let what = match (given(&log), given(&pmu.file), given(&pages.file)) {
            (true, false, false) => What::Profile(log),
            (false, true, false) => What::Pmu(pmu),
            (false, false, true) => {
                pages.config.frames = pmu.frames;
                if pages.announced && pages.control.is_none() {
                    return Err("begin=announced needs control=FIFO, where that is announced".into());
                }
                if pages.window.is_none() && pages.control.is_none() {
                    return Err(
                        "pages=FILE needs window-ms=TIME or control=FIFO, which close windows".into(),
                    );
                }
                What::Pages(pages)
            }
            _ => {
                return Err(
                    "needs one of log=FILE, where to write a profile, pmu=FILE, where to count, and pages=FILE, where to log pages"
                        .into(),
                );
            }
        };
        Ok(Options {
            config,
            what,
            announced,
        })
    }

    fn take(&mut self, text: &str) -> Result<(), Complaint> {
        let (key, value) = text.split_once('=').unwrap_or((text, ""));
        let number = |least: u64, most: u64| -> Result<u64, Complaint> {
            match value.parse::<u64>() {
                Ok(number) if (least..=most).contains(&number) => Ok(number),
                _ => Err(
                    format!("{key} is `{value}`; it must be a whole number from {least} to {most}").into(),
                ),
            }
        };
        match key {
            "log" => self.log = value.into(),
            "pmu" => self.pmu.file = value.into(),
            "cpus" => self.pmu.cpus = number(1, 4096)?,
            "nodes" => self.pmu.nodes = number(1, 4096)?,
            "llcs" => self.pmu.llcs = Some(number(1, 4096)?),
            "frames" => self.pmu.frames = number(1, 1 << 32)?,
            "llc-bytes" => self.pmu.llc_bytes = number(64, 1 << 32)?,
            "llc-ways" => self.pmu.llc_ways = number(1, 64)?,
            "node-mib" => self.pmu.node_bytes = number(1, 1 << 30)? << 20,
            "private-bytes" => self.config.private_bytes = number(64, 1 << 30)?,
            "window" => self.config.window = number(1, 1 << 20)?,
            "private-ways" => self.config.private_ways = number(1, 64)? as usize,
            "prefetch-steps" => self.config.prefetcher.steps = number(1, 63)? as u32,
            "prefetch-step-lines" => self.config.prefetcher.step_lines = number(1, 63)?,
            "prefetch-nearest" => self.config.prefetcher.nearest = number(1, 63)?.cast_signed(),
            "prefetch-farthest" => self.config.prefetcher.farthest = number(1, 63)?.cast_signed(),
            "line-bytes" => match number(16, 4096)? {
                bytes if bytes.is_power_of_two() => self.config.line_bytes = bytes,
                bytes => return Err(format!("line-bytes is {bytes}; it must be a power of two").into()),
            },
            "rate-min" => match value.parse() {
                Ok(rate) if rate > 0.0 && rate <= 1.0 => self.config.rate_min = rate,
                _ => {
                    return Err(format!("rate-min is `{value}`; it must lie above 0 and not above 1").into());
                }
            },
            "pages" => self.pages.file = value.into(),
            "control" => self.pages.control = Some(value.into()),
            "window-ms" => self.pages.window = Some(Duration::from_millis(number(1, 1 << 40)?)),
            "keep-mib" => self.pages.keep_bytes = Some(number(1, 1 << 30)? << 20),
            "buffer" => self.pages.config.entries = number(2, (1 << 15) - 1)? as u16,
            "core" => {
                let names = || CORES.map(|core| core.name).join(", ");
                self.pages.config.core =
                    core(value).ok_or_else(|| format!("core is `{value}`; it must be one of {}", names()))?;
            }
            "logs" => {
                let modes = [
                    ("nothing", Mode::Off),
                    ("writes", Mode::Pml),
                    ("walks", Mode::Paml),
                ];
                self.pages.config.mode = one_of(key, value, &modes)?;
            }
            "tables" => {
                let each = [
                    ("silent", TablePages::Silent),
                    ("walked", TablePages::Walked),
                    ("each", TablePages::Each),
                ];
                self.pages.config.options.tables = one_of(key, value, &each)?;
            }
            "start" => {
                let starts = [("last", Start::Last), ("past-last", Start::PastLast)];
                self.pages.config.options.start = one_of(key, value, &starts)?;
            }
            "flush" => {
                self.pages.config.flush = one_of(key, value, &[("never", false), ("each-window", true)])?;
            }
            "exact" => self.pages.config.exact = one_of(key, value, &[("no", false), ("yes", true)])?,
            "begin" => self.pages.announced = one_of(key, value, &[("at-once", false), ("announced", true)])?,
            _ => {
                let known = "log, private-bytes, private-ways, line-bytes, rate-min, window, prefetch-steps, prefetch-step-lines, \
                     prefetch-nearest, prefetch-farthest, pmu, cpus, nodes, llcs, frames, llc-bytes, llc-ways, node-mib, pages, control, window-ms, keep-mib, buffer, core, logs, tables, start, flush, exact, begin";
                return Err(format!("`{key}` is no argument: {known}").into());
            }
        }
        Ok(())
    }
}

/// Returns the choice that a word names.
fn one_of<T: Copy>(key: &str, value: &str, choices: &[(&str, T)]) -> Result<T, Complaint> {
    let found = choices.iter().find(|(name, _)| *name == value);
    found.map(|(_, choice)| *choice).ok_or_else(|| {
        let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        format!("{key} is `{value}`; it must be one of {}", names.join(", ")).into()
    })
}
