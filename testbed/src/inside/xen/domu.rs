//! DomUs: their descriptions, creation with libvirt or `xl`, state and end.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use homenode_testbed_guest::{Behaviour, MARKER_READY, MARKER_REPORT, Orders};
use virt::domain::Domain;

use super::super::Inside;
use super::super::console::{Console, count};
use super::super::libvirtd::run;
use super::super::wait::{Look, wait_until};
use super::{IMAGE_DIR, LOG_DIR, domains, pages_by_node, xl};

const READY_LIMIT: Duration = Duration::from_secs(120);

/// How a domU is virtualised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Paravirtualised: the hypervisor manages its page tables.
    Pv,
    /// Hardware virtualisation without firmware or a PC's devices.
    Pvh,
}

/// The toolstack that creates a domU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Toolstack {
    /// libvirt's Xen driver.
    Libvirt,
    /// `xl`; libvirt does not know such a domU.
    Xl,
}

/// A domU to be created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DomuSpec {
    /// The domU's name.
    pub name: String,
    /// How the domU is virtualised.
    pub kind: Kind,
    /// Memory in MiB. Below 128 MiB the stock kernel does not boot reliably.
    pub memory_mib: u64,
    /// For each vCPU, the list of CPUs on which it may run. `xl` also tells the hypervisor that the vCPU prefers them, which
    /// decides where the memory is.
    pub cpus: Vec<String>,
    /// The domU's disk, which is a device of dom0, in `xl`'s notation; `None` if it has none.
    pub disk: Option<String>,
    /// The domU's NIC, with its bridge in dom0 and its MAC, in `xl`'s notation; `None` if it has none.
    pub nic: Option<String>,
    /// The pool of CPUs into which `xl` puts the domU; empty for the first pool.
    pub pool: String,
    /// The domU's orders.
    pub orders: Orders,
    /// What happens when the domU reboots, as `xl` calls it.
    pub on_reboot: &'static str,
}

impl DomuSpec {
    /// Describes an idle domU with 128 MiB, and one vCPU that may run on these CPUs.
    #[must_use]
    pub fn new(name: &str, kind: Kind, cpus: &str) -> Self {
        Self {
            name: name.to_owned(),
            kind,
            memory_mib: 128,
            cpus: vec![cpus.to_owned()],
            disk: None,
            nic: None,
            pool: String::new(),
            orders: Orders::default(),
            on_reboot: "destroy",
        }
    }

    /// Describes a domU like [`DomuSpec::new`], whose vCPU may run anywhere: its creator decides where its memory is.
    #[must_use]
    pub fn anywhere(name: &str, kind: Kind) -> Self {
        Self::new(name, kind, "")
    }

    /// Sets the domU's behaviour from the start.
    #[must_use]
    pub fn doing(mut self, behaviour: Behaviour) -> Self {
        self.orders.first = behaviour;
        self
    }

    /// Lets `xl`'s daemon boot the domU again when it is told to reboot.
    #[must_use]
    pub fn that_reboots(mut self) -> Self {
        self.on_reboot = "restart";
        self
    }

    /// Returns the domU's console, as Xen's daemon keeps it.
    #[must_use]
    pub fn console(&self) -> Console {
        Console {
            guest: self.name.clone(),
            log: PathBuf::from(format!("{LOG_DIR}/guest-{}.log", self.name)),
        }
    }

    /// Returns the console of a domU that was moved. Its output is kept under the name that it had during the move.
    #[must_use]
    pub fn console_once_moved(&self) -> Console {
        Console {
            log: PathBuf::from(format!("{LOG_DIR}/guest-{}--incoming.log", self.name)),
            ..self.console()
        }
    }

    fn cmdline(&self) -> String {
        format!("console=hvc0 quiet {}", self.orders.to_cmdline())
    }

    /// Returns the domain's XML for libvirt. Only the pin of its vCPU decides where the memory is.
    #[must_use]
    pub fn xml(&self) -> String {
        let mut pins = String::new();
        let pinned = self.cpus.iter().enumerate().filter(|(_, cpus)| !cpus.is_empty());
        for (vcpu, cpus) in pinned {
            let _ = write!(pins, "<vcpupin vcpu='{vcpu}' cpuset='{cpus}'/>");
        }
        // Emulated SVM does not decode the instruction that an emulated TSC needs.
        let (os, clock) = match self.kind {
            Kind::Pv => ("machine='xenpv'>linux", ""),
            Kind::Pvh => (
                "machine='xenpvh'>xenpvh",
                "<clock offset='utc' adjustment='reset'><timer name='tsc' mode='native'/></clock>",
            ),
        };
        format!(
            "<domain type='xen'><name>{}</name><memory unit='MiB'>{}</memory><vcpu>{}</vcpu><cputune>{pins}</cputune>\
             <os><type arch='x86_64' {os}</type><kernel>{IMAGE_DIR}/vmlinux</kernel><initrd>{IMAGE_DIR}/initramfs</initrd>\
             <cmdline>{}</cmdline></os>{clock}\
             <on_poweroff>destroy</on_poweroff><on_reboot>destroy</on_reboot><on_crash>destroy</on_crash>\
             <devices><console type='pty'><target type='xen'/></console></devices></domain>",
            self.name,
            self.memory_mib,
            self.cpus.len(),
            self.cmdline()
        )
    }

    /// Returns the domain's configuration for `xl`.
    #[must_use]
    pub fn configuration(&self) -> String {
        let kind = match self.kind {
            Kind::Pv => "type=\"pv\"",
            Kind::Pvh => "type=\"pvh\"\ntsc_mode=\"native\"",
        };
        let lists: Vec<String> = self.cpus.iter().map(|cpus| format!("\"{cpus}\"")).collect();
        let lists = lists.join(",");
        let pins = match self.cpus.iter().all(String::is_empty) {
            true => String::new(),
            false => format!("cpus=[{lists}]\ncpus_soft=[{lists}]\n"),
        };
        let pool = match self.pool.as_str() {
            "" => String::new(),
            pool => format!("pool=\"{pool}\"\n"),
        };
        let listed = |key: &str, device: &Option<String>| {
            let device = device.as_ref().map(|device| format!("{key}=[\"{device}\"]\n"));
            device.unwrap_or_default()
        };
        let devices = listed("disk", &self.disk) + &listed("vif", &self.nic);
        format!(
            "name=\"{}\"\n{kind}\nkernel=\"{IMAGE_DIR}/vmlinux\"\nramdisk=\"{IMAGE_DIR}/initramfs\"\nextra=\"{}\"\n\
             memory={}\nvcpus={}\n{pins}{pool}{devices}\
             on_poweroff=\"destroy\"\non_reboot=\"{}\"\non_crash=\"destroy\"\n",
            self.name,
            self.cmdline(),
            self.memory_mib,
            self.cpus.len(),
            self.on_reboot
        )
    }
}

/// A running domU.
pub struct Domu {
    /// The domU's description.
    pub spec: DomuSpec,
    /// The domU's number in the hypervisor.
    pub id: u32,
    /// libvirt's handle, if libvirt created it. Becomes stale when libvirtd is restarted.
    pub domain: Option<Domain>,
    /// Whether a migration moved the domU here.
    was_moved: bool,
}

/// A vCPU, as `xl vcpu-list` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vcpu {
    /// The CPU on which the vCPU runs or last ran, if any.
    pub cpu: Option<u32>,
    /// The CPUs on which the vCPU may run, as a list in Xen's notation.
    pub hard: String,
    /// The CPUs that the vCPU prefers, in the same notation.
    pub soft: String,
}

impl Domu {
    /// Records that the domU was migrated, and its new number.
    pub fn arrived(&mut self, id: u32) {
        (self.id, self.was_moved) = (id, true);
    }

    fn console(&self) -> Console {
        match self.was_moved {
            true => self.spec.console_once_moved(),
            false => self.spec.console(),
        }
    }

    fn lives(&self) -> bool {
        lives(&self.spec.name)
    }

    /// Waits until the domU's init has begun the ordered behaviour.
    ///
    /// # Errors
    /// When that does not happen in time, or the domU has ended.
    pub fn wait_ready(&self) -> anyhow::Result<()> {
        let console = self.spec.console();
        console.wait(MARKER_READY, READY_LIMIT, || self.lives()).map(drop)
    }

    /// Sends a command, and waits for its answer: a new line with this text.
    ///
    /// # Errors
    /// When it does not answer in time.
    pub fn command(&self, command: &str, answer: &str) -> anyhow::Result<String> {
        let send = |line: &str| {
            let key = format!("/local/domain/{}/console/tty", self.id);
            let path = run("xenstore-read", &[&key])?;
            let path = path.trim();
            // The console must not become this process's controlling terminal.
            let mut options = fs::OpenOptions::new();
            options.write(true).custom_flags(libc::O_NOCTTY);
            let mut console = options
                .open(path)
                .with_context(|| format!("cannot open {path}"))?;
            console
                .write_all(format!("{line}\n").as_bytes())
                .with_context(|| format!("cannot write to {path}"))?;
            Ok(console)
        };
        let console = self.console();
        console.answer(command, answer, send, || self.lives())
    }

    /// Switches the domU to another behaviour, and waits until that is in force.
    ///
    /// # Errors
    /// When the domU does not answer in time.
    pub fn switch_to(&self, behaviour: Behaviour) -> anyhow::Result<()> {
        let order = behaviour.to_string();
        self.command(&order, &format!("PHASE {order}")).map(drop)
    }

    /// Returns the loops computed so far, and the vCPUs' steal as the domU's own kernel counts it.
    ///
    /// # Errors
    /// When the domU does not answer in time.
    pub fn progress(&self) -> anyhow::Result<(u64, Duration)> {
        let line = self.command("report", MARKER_REPORT)?;
        let steal = Duration::from_millis(count(&line, "steal_ms=")?);
        Ok((count(&line, "loops=")?, steal))
    }

    /// Returns the domU's vCPUs in order.
    ///
    /// # Errors
    /// When the toolstack does not know the domU.
    pub fn vcpus(&self) -> anyhow::Result<Vec<Vcpu>> {
        let text = xl(&["vcpu-list", &self.spec.name])?;
        text.lines()
            .skip(1)
            .map(|line| vcpu(line).with_context(|| format!("xl vcpu-list: not a vCPU: {line}")))
            .collect()
    }

    /// Returns how many of the domU's pages are on each node.
    ///
    /// # Errors
    /// When the hypervisor does not count them.
    pub fn pages_by_node(&self) -> anyhow::Result<Vec<u64>> {
        let all = pages_by_node()?;
        let pages = all
            .get(&self.id)
            .with_context(|| format!("no pages of domain {}", self.id))?;
        Ok(pages.values().copied().collect())
    }

    /// Sets the domU's weight, and its cap in percent of a CPU; a cap of 0 means none.
    ///
    /// # Errors
    /// When the hypervisor refuses them.
    pub fn set_credit(&self, weight: u32, cap_percent: u32) -> anyhow::Result<()> {
        let (weight, cap) = (weight.to_string(), cap_percent.to_string());
        let name = self.spec.name.as_str();
        xl(&["sched-credit", "-d", name, "-w", &weight, "-c", &cap]).map(drop)
    }

    /// Returns the domU's cap in percent of a CPU; 0 for none.
    ///
    /// # Errors
    /// When the toolstack does not know the domU.
    pub fn cap(&self) -> anyhow::Result<u32> {
        let text = xl(&["sched-credit", "-d", &self.spec.name])?;
        let last = text
            .lines()
            .last()
            .and_then(|line| line.split_whitespace().last());
        let cap = last.and_then(|word| word.parse().ok());
        cap.with_context(|| format!("xl sched-credit: no cap in {text}"))
    }

    /// Confines one of the domU's vCPUs to these CPUs.
    ///
    /// # Errors
    /// When the hypervisor refuses it.
    pub fn pin(&self, vcpu: u32, cpus: &str) -> anyhow::Result<()> {
        xl(&["vcpu-pin", &self.spec.name, &vcpu.to_string(), cpus]).map(drop)
    }

    /// Puts the domU into another pool of CPUs.
    ///
    /// # Errors
    /// When there is no such pool.
    pub fn move_to_pool(&self, pool: &str) -> anyhow::Result<()> {
        xl(&["cpupool-migrate", &self.spec.name, pool]).map(drop)
    }
}

/// Whether a domU of this name is running.
pub(in super::super) fn lives(name: &str) -> bool {
    // `xl list` may fail while another domain comes or goes, which does not mean that this one has gone.
    domains().map_or(true, |domains| domains.iter().any(|(_, other)| other == name))
}

/// Parses a line `NAME ID VCPU CPU STATE TIME HARD / SOFT`.
fn vcpu(line: &str) -> Option<Vcpu> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let slash = words.iter().position(|word| *word == "/")?;
    Some(Vcpu {
        cpu: words.get(3)?.parse().ok(),
        hard: (*words.get(slash - 1)?).to_owned(),
        soft: (*words.get(slash + 1)?).to_owned(),
    })
}

impl Inside {
    /// Creates a domU and waits until it is ready.
    ///
    /// # Errors
    /// When the toolstack refuses the domU, or its init does not come up.
    pub fn create_domu(&self, spec: &DomuSpec, by: Toolstack) -> anyhow::Result<Domu> {
        let begin = Instant::now();
        let name = spec.name.as_str();
        // An earlier domU may have had the same name, and Xen's daemon appends to its output.
        for console in [spec.console(), spec.console_once_moved()] {
            let _ = fs::remove_file(console.log);
        }
        let domain = match by {
            Toolstack::Libvirt => {
                let created = self.connection.create_domain_xml(&spec.xml(), 0);
                Some(created.map_err(|error| anyhow!("libvirt did not start {name}: {}", error.message()))?)
            }
            Toolstack::Xl => {
                let path = self.dir().join(format!("{name}.cfg"));
                fs::write(&path, spec.configuration())
                    .with_context(|| format!("cannot write {}", path.display()))?;
                xl(&["create", &path.display().to_string()])?;
                None
            }
        };
        self.domus().push(spec.clone());
        let created_s = begin.elapsed().as_secs_f64();
        let id = wait_until("the domU to be listed", READY_LIMIT, || {
            let found = domains()?.into_iter().find(|(_, other)| other == name);
            Ok(found.map_or_else(|| Look::NotYet("it is not".to_owned()), |(id, _)| Look::Done(id)))
        })?;
        let domu = Domu {
            spec: spec.clone(),
            id,
            domain,
            was_moved: false,
        };
        domu.wait_ready()?;
        let ready_s = begin.elapsed().as_secs_f64();
        self.note(format!(
            "domU {name} ({:?}, by {by:?}) created in {created_s:.1} s, ready after {ready_s:.1} s",
            spec.kind
        ));
        Ok(domu)
    }

    /// Destroys a domU, like pulling its plug.
    ///
    /// # Errors
    /// When the toolstack cannot destroy it.
    pub fn destroy_domu(&self, domu: &Domu) -> anyhow::Result<()> {
        self.domus().retain(|spec| *spec != domu.spec);
        match &domu.domain {
            Some(domain) => domain
                .destroy()
                .map_err(|error| anyhow!("libvirt did not destroy {}: {}", domu.spec.name, error.message())),
            None => xl(&["destroy", &domu.spec.name]).map(drop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_toolstacks_are_told_the_same() {
        let mut spec = DomuSpec::new("d", Kind::Pvh, "3").doing(Behaviour::busy(2));
        spec.cpus.push("1".to_owned());
        let (xml, configuration) = (spec.xml(), spec.configuration());
        assert!(
            xml.contains(
                "<vcpu>2</vcpu><cputune><vcpupin vcpu='0' cpuset='3'/><vcpupin vcpu='1' cpuset='1'/>"
            )
        );
        assert!(xml.contains("<timer name='tsc' mode='native'/>"), "{xml}");
        assert!(configuration.contains("vcpus=2\ncpus=[\"3\",\"1\"]\ncpus_soft=[\"3\",\"1\"]\n"));
        assert!(configuration.contains("tsc_mode=\"native\"\n"), "{configuration}");
        let orders = spec.orders.to_cmdline();
        assert!(xml.contains(&orders) && configuration.contains(&orders));
    }

    #[test]
    fn a_line_of_vcpus_is_read() {
        let line = "pv1                                  1     0    3   r--      10.7  3 / all";
        let (cpu, hard, soft) = (Some(3), "3".to_owned(), "all".to_owned());
        assert_eq!(vcpu(line), Some(Vcpu { cpu, hard, soft }));
        let line = "pv1                                  1     0    -   --p       0.0  all / all";
        assert_eq!(vcpu(line).map(|vcpu| vcpu.cpu), Some(None));
    }
}
