//! dom0 of a Xen host: its daemons, and queries to the hypervisor.

pub mod domu;
pub mod runstates;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::libvirtd::{self, run};
use super::wait::{Look, wait_until};

/// Directory of the logs of Xen's daemons and the output of domUs.
pub const LOG_DIR: &str = "/var/log/xen";
/// Directory of the domUs' kernel and initramfs. It is on dom0's own disk, as the toolstack reads both files in full for each
/// domU.
pub const IMAGE_DIR: &str = "/var/lib/homenode-testbed";
/// The pool that initially has all CPUs.
const POOL: &str = "Pool-0";

/// Directories that Xen's daemons need.
const STATE_DIRS: [&str; 8] = [
    "/run/lock",
    "/run/xen",
    "/run/xenstored",
    "/run/libvirt",
    "/var/lib/xen/dump",
    "/var/lib/xenstored",
    "/var/log/libvirt/libxl",
    LOG_DIR,
];

/// How long the hypervisor and its daemons may take to answer. The emulated host may pause for a while.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Whether this program runs in a dom0.
#[must_use]
pub fn is_dom0() -> bool {
    fs::read_to_string("/proc/xen/capabilities").is_ok_and(|text| text.contains("control_d"))
}

/// Whether dom0's first process is systemd.
#[must_use]
pub fn has_systemd() -> bool {
    Path::new("/run/systemd/system/homenode-testbed.service").exists()
}

/// Starts Xen's daemons; once per boot.
///
/// # Errors
/// When a daemon does not start, or the toolstack does not answer.
pub fn prepare(images_from: &Path) -> anyhow::Result<()> {
    for dir in STATE_DIRS.iter().chain(&[IMAGE_DIR]) {
        fs::create_dir_all(dir).with_context(|| format!("cannot create {dir}"))?;
    }
    for name in ["vmlinux", "initramfs"] {
        let (from, to) = (images_from.join(name), Path::new(IMAGE_DIR).join(name));
        fs::copy(&from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
    }
    if has_systemd() {
        // Debian's script has started the daemons. They keep the output of domUs only on request.
        wait_until(
            "Debian's script to have started Xen's daemons",
            ANSWER_LIMIT,
            || {
                Ok(match run("systemctl", &["is-active", "xen.service"]) {
                    Ok(_) => Look::Done(()),
                    Err(error) => Look::NotYet(format!("{error:#}")),
                })
            },
        )?;
        run("pkill", &["-x", "xenconsoled"])?;
    } else {
        run("xenstored", &["--pid-file", "/run/xenstored.pid"])?;
        run("xen-init-dom0", &[])?;
    }
    let log_dir = format!("--log-dir={LOG_DIR}");
    run(
        "xenconsoled",
        &["--pid-file=/run/xenconsoled.pid", "--log=all", &log_dir],
    )?;
    wait_until("xl to answer", ANSWER_LIMIT, || {
        Ok(match xl(&["list"]) {
            Ok(_) => Look::Done(()),
            Err(error) => Look::NotYet(format!("{error:#}")),
        })
    })?;
    run("virtlogd", &["-d"]).map(drop)
}

/// Destroys domains that libvirt does not know, and returns all CPUs to the first pool.
///
/// # Errors
/// When the toolstack does not answer.
pub fn clean_up() -> anyhow::Result<()> {
    for (id, _) in domains()? {
        if id != 0 {
            let _ = xl(&["destroy", &id.to_string()]);
        }
    }
    let pools = xl(&["cpupool-list"])?;
    let mut names = pools
        .lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().next());
    // `xl cpupool-numa-split` renames the first pool.
    if let Some(first) = names.next().filter(|name| *name != POOL) {
        xl(&["cpupool-rename", first, POOL])?;
    }
    for name in names {
        remove_pool(name)?;
    }
    Ok(())
}

/// Makes a pool of CPUs with its own credit scheduler.
///
/// # Errors
/// When the CPUs are not in the first pool, or a domain is confined to them.
pub fn create_pool(name: &str, cpu: u32) -> anyhow::Result<()> {
    xl(&["cpupool-cpu-remove", POOL, &cpu.to_string()])?;
    let name = format!("name=\"{name}\"");
    xl(&[
        "cpupool-create",
        &name,
        "sched=\"credit\"",
        &format!("cpus=[\"{cpu}\"]"),
    ])
    .map(drop)
}

/// Removes a pool without domains; its CPUs go to the first pool.
///
/// # Errors
/// When a domain is in it.
pub fn remove_pool(name: &str) -> anyhow::Result<()> {
    let cpus = xl(&["cpupool-list", "-c", name])?;
    let cpus = cpus
        .lines()
        .nth(1)
        .and_then(|line| line.split_whitespace().nth(1));
    let cpus = cpus
        .with_context(|| format!("pool {name} has no CPUs"))?
        .to_owned();
    xl(&["cpupool-destroy", name])?;
    xl(&["cpupool-cpu-add", POOL, &cpus]).map(drop)
}

/// Runs `xl` and returns its output.
///
/// # Errors
/// When it fails; the error contains its message.
pub fn xl(arguments: &[&str]) -> anyhow::Result<String> {
    run("xl", arguments)
}

/// Returns number and name of all domains, including dom0.
///
/// # Errors
/// When the toolstack does not answer.
pub fn domains() -> anyhow::Result<Vec<(u32, String)>> {
    let text = xl(&["list"])?;
    let read = |line: &str| {
        let mut words = line.split_whitespace();
        let name = words.next()?.to_owned();
        Some((words.next()?.parse().ok()?, name))
    };
    text.lines()
        .skip(1)
        .map(|line| read(line).with_context(|| format!("xl list: not a domain: {line}")))
        .collect()
}

/// Returns the nodes that a domain's memory comes from, as `xl` writes them.
///
/// # Errors
/// When the toolstack does not know the domain.
pub fn node_affinity(name: &str) -> anyhow::Result<String> {
    let text = xl(&["list", "--numa", name])?;
    let last = text
        .lines()
        .last()
        .and_then(|line| line.split_whitespace().last());
    last.map(str::to_owned).context("xl list --numa shows no nodes")
}

/// A stopped daemon, which continues when this value is dropped.
pub struct Stopped(Pid);

impl Stopped {
    /// Stops xenstored.
    ///
    /// # Errors
    /// When it does not run.
    pub fn xenstored() -> anyhow::Result<Self> {
        let pid = fs::read_to_string("/run/xenstored.pid").context("cannot find xenstored")?;
        let pid = Pid::from_raw(pid.trim().parse()?).context("xenstored has no process number")?;
        kill_process(pid, Signal::STOP)?;
        Ok(Self(pid))
    }

    /// Lets the daemon continue.
    ///
    /// # Errors
    /// When it has ended.
    pub fn goes_on(self) -> anyhow::Result<()> {
        Ok(kill_process(self.0, Signal::CONT)?)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

/// Returns a figure of `xl info`.
///
/// # Errors
/// When `xl info` has no such figure.
pub fn info(key: &str) -> anyhow::Result<String> {
    let text = xl(&["info"])?;
    let found = text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == key).then(|| value.trim().to_owned())
    });
    found.with_context(|| format!("xl info has no {key}"))
}

/// Returns the size of each node in MiB, and its distances.
///
/// # Errors
/// When `xl info` has no such table.
pub fn nodes() -> anyhow::Result<Vec<(u64, Vec<u32>)>> {
    let text = xl(&["info", "--numa"])?;
    let rows = text.lines().skip_while(|line| !line.starts_with("numa_info"));
    let rows = rows.skip(2).take_while(|line| line.starts_with(' '));
    let read = |line: &str| {
        let (_, figures) = line.split_once(':')?;
        let mut figures = figures.split_whitespace();
        let size = figures.next()?.parse().ok()?;
        let distances = figures.nth(1)?.split(',').map(str::parse);
        Some((size, distances.collect::<Result<_, _>>().ok()?))
    };
    let nodes: Vec<_> = rows
        .map(|line| read(line).with_context(|| format!("xl info: not a node: {line}")))
        .collect::<Result<_, _>>()?;
    ensure!(!nodes.is_empty(), "xl info shows no nodes");
    Ok(nodes)
}

/// Returns the names of the files that the toolstack keeps for a domain.
///
/// # Errors
/// When its directory cannot be read.
pub fn userdata(domain: u32) -> anyhow::Result<Vec<String>> {
    let entries = fs::read_dir("/var/lib/xen").context("cannot read /var/lib/xen")?;
    let begin = format!("userdata-d.{domain}.");
    let is_its = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with(&begin);
    let files = entries.flatten().filter(is_its);
    files
        .map(|entry| fs::read_to_string(entry.path()).context("cannot read a domain's notes"))
        .collect()
}

/// Number of pages, by domain and node.
pub type PagesByNode = BTreeMap<u32, BTreeMap<u32, u64>>;

/// Returns how many pages of each domain are on each node, as the hypervisor counts them. A key on its console requests the
/// count, and it prints the answer there.
///
/// # Errors
/// When no answer comes.
pub fn pages_by_node() -> anyhow::Result<PagesByNode> {
    let before = placement(&xl(&["dmesg"])?).map(|(stamp, _)| stamp.to_owned());
    xl(&["debug-keys", "u"])?;
    let domains = domains()?.len();
    wait_until("the hypervisor to count pages", ANSWER_LIMIT, || {
        let text = xl(&["dmesg"])?;
        let Some((stamp, pages)) = placement(&text) else {
            return Ok(Look::NotYet("no count".to_owned()));
        };
        let whole = pages.len() >= domains && pages.values().all(|nodes| nodes.len() == pages[&0].len());
        Ok(if before.as_deref() != Some(stamp) && whole {
            Look::Done(pages)
        } else {
            Look::NotYet(format!("{stamp}: {pages:?}"))
        })
    })
}

/// Returns the last count in the hypervisor's messages: when it was made, and the pages by domain and node.
fn placement(messages: &str) -> Option<(&str, PagesByNode)> {
    let (_, last) = messages.rsplit_once("dumping numa info (now = ")?;
    let (stamp, rest) = last.split_once(')')?;
    let mut pages = PagesByNode::new();
    let mut domain = None;
    let (_, table) = rest.split_once("Memory location of each domain")?;
    for line in table.lines() {
        let line = line.trim_start_matches("(XEN)").trim();
        if let Some(rest) = line.strip_prefix("Domain ") {
            domain = rest.split_whitespace().next().and_then(|id| id.parse().ok());
        } else if let (Some(domain), Some(rest)) = (domain, line.strip_prefix("Node "))
            && let Some((node, count)) = rest.split_once(':')
            && let (Ok(node), Ok(count)) = (node.trim().parse(), count.trim().parse())
        {
            pages.entry(domain).or_default().insert(node, count);
        }
    }
    (!pages.is_empty()).then_some((stamp, pages))
}

/// Copies the logs of Xen and its daemons to a place where the outside can read them.
///
/// # Errors
/// When a file cannot be copied.
pub fn keep_logs(dir: &Path) -> anyhow::Result<()> {
    for from in [LOG_DIR, "/var/log/libvirt/libxl"] {
        for entry in fs::read_dir(from).into_iter().flatten().flatten() {
            fs::copy(entry.path(), dir.join(entry.file_name()))?;
        }
    }
    fs::write(dir.join("xl-dmesg"), libvirtd::run("xl", &["dmesg"])?)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_count_of_pages_is_read() {
        let count = |stamp: u32, third: u32| {
            format!(
                "(XEN) 'u' pressed -> dumping numa info (now = {stamp})\n(XEN) NODE0 start->0 size->262144 free->97757\n\
                 (XEN) CPU0 -> NODE0\n(XEN) Memory location of each domain:\n(XEN) Domain 0 (total: 163840):\n\
                 (XEN)     Node 0: 163334\n(XEN)     Node 1: 506\n(XEN) Domain 3 (total: 32768):\n\
                 (XEN)     Node 0: 0\n(XEN)     Node 1: {third}\n"
            )
        };
        let text = count(1, 5) + &count(2, 32768);
        let (stamp, pages) = placement(&text).unwrap_or_default();
        assert_eq!(stamp, "2");
        assert_eq!(pages[&3], BTreeMap::from([(0, 0), (1, 32768)]));
        assert_eq!(pages[&0][&1], 506);
        assert_eq!(placement("(XEN) Freed 656kB init memory"), None);
    }
}
