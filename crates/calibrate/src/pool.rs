//! Measures how large a static pool of pages for I/O must be [Flip, section IV-A].
//!
//! # Problem
//! A pool that only I/O takes pages from bounds the memory that page flips carry to the driver domain's node. The paper sizes a
//! static pool by "running several I/O applications in a VM and monitoring for each application the number of pages needed for
//! the memory flipping. Then, we can use the highest number of needed pages".
//!
//! # Algorithm
//! For each program a simulated host runs the scenario's VM alone with its driver domain, for at most [`Options::limit`]. The
//! pages that a program needs are the most that were posted in the ring or under way at once, looked at each second, when the
//! simulator settles exchanges. The pool's size is the greatest need.
//!
//! # Properties (tests of the same name)
//! - `a_pool_of_this_size_never_copies_and_a_smaller_one_does`
//! - `another_program_never_makes_the_pool_smaller`
//!
//! # Only on the twin
//! No host that Homenode drives has such a pool, because none exchanges pages. Under KVM, virtio's backends copy into pages that
//! stay the guest's. On Xen, Linux' network backend refuses a guest that does not ask for copies (`request-rx-copy`), and Linux
//! guests refuse a backend that does not offer them. The paper changed both, and the guest's allocator (i-flipping, for Linux
//! 4.14).

use homenode_machine::Machine;
use homenode_twin::{
    Backend, PoolSpec, Scenario, Transfer, Twin, TwinError, VmSpec, Workload, boot_footprint, workload,
};
use homenode_units::{Bytes, Candidates, Ns, PAGE_BYTES, Pages};
use schemars::JsonSchema;
use serde::Serialize;

/// Options of the measurement.
#[derive(Clone, Debug)]
pub struct Options {
    /// Workloads of the scenario or of the simulator; empty for those that the VM runs, and all that come with the simulator and
    /// fit. Workloads that exchange no pages, such as those whose device the machine lacks, are left out.
    pub programs: Vec<String>,
    /// The longest time for which a program runs, in the simulator's time; more than a second.
    pub limit: Ns,
    /// Seed of the simulator's randomness.
    pub seed: u64,
}

/// Why no size was found.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// No VM of the scenario exchanges pages.
    #[error(
        "scenario {0}: no VM exchanges pages with a driver domain; give one `driver_domain = {{ vm = \"NAME\" }}` without \
         transfer = \"copy\""
    )]
    NoVm(String),
    /// None of the programs exchanged pages within the limit.
    #[error(
        "no program exchanged pages within {0}: name others with --program, which use a device of the scenario's machine, or give \
         more --seconds"
    )]
    NoPrograms(Ns),
    /// No program has this name.
    #[error("no workload is named `{name}`{known}")]
    NoProgram {
        /// The requested name.
        name: String,
        /// The nearest known names.
        known: Candidates,
    },
    /// The simulator cannot run a program in this VM.
    #[error(transparent)]
    Twin(#[from] TwinError),
}

/// The pages that one program needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Need {
    /// The workload.
    pub program: String,
    /// The most pages that were posted or under way at once.
    pub pages_max: u64,
    /// Pages that passed between the VM and its driver domain meanwhile.
    pub pages_passed: u64,
}

/// The size of a static pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct PoolFound {
    /// The scenario's VM.
    pub vm: String,
    /// The VM's driver domain.
    pub driver_domain: String,
    /// The need of each program, the greatest first.
    pub programs: Vec<Need>,
    /// Programs of the twin that need more memory than the VM has.
    pub left_out: Vec<String>,
    /// The pool's size.
    pub size_bytes: Bytes,
}

/// Measures the pool of the scenario's first VM that exchanges pages. `told` receives the number of the current program, how many
/// there are, and its name.
///
/// # Errors
/// See [`PoolError`].
pub fn pool(
    machine: &Machine,
    scenario: &Scenario,
    options: &Options,
    told: &mut dyn FnMut(usize, usize, &str),
) -> Result<PoolFound, PoolError> {
    let (vm, backend) = flipped(scenario).ok_or_else(|| PoolError::NoVm(scenario.name.clone()))?;
    let (programs, left_out) = programs(scenario, vm, options)?;
    let mut needs = Vec::new();
    for (at, program) in programs.iter().enumerate() {
        told(at + 1, programs.len(), program);
        needs.push(need(
            machine,
            &alone(scenario, vm, backend, program),
            program,
            options,
        )?);
    }
    needs.retain(|need| need.pages_passed > 0);
    needs.sort_by(|a, b| (b.pages_max, &a.program).cmp(&(a.pages_max, &b.program)));
    let most = needs
        .first()
        .ok_or(PoolError::NoPrograms(options.limit))?
        .pages_max;
    Ok(PoolFound {
        vm: vm.name.clone(),
        driver_domain: backend.vm.clone(),
        programs: needs,
        left_out,
        size_bytes: Pages(most).to_bytes(),
    })
}

/// Returns the first VM that exchanges pages with a driver domain.
fn flipped(scenario: &Scenario) -> Option<(&VmSpec, &Backend)> {
    let mut backends = scenario
        .vms
        .iter()
        .filter_map(|vm| Some((vm, vm.driver_domain.as_ref()?)));
    backends.find(|(_, backend)| backend.transfer == Transfer::Flip)
}

/// Returns the programs to run, and those that the VM is too small for.
fn programs(
    scenario: &Scenario,
    vm: &VmSpec,
    options: &Options,
) -> Result<(Vec<String>, Vec<String>), PoolError> {
    let own = || scenario.workloads.iter().map(|workload| workload.name.clone());
    let known = |name: &str| -> Option<Workload> {
        let own = scenario.workloads.iter().find(|own| own.name == name).cloned();
        own.or_else(|| workload::builtin(name))
    };
    let mut names = options.programs.clone();
    if names.is_empty() {
        let of_vm = std::iter::once(&vm.workload).chain(vm.then.iter().map(|next| &next.workload));
        names = of_vm
            .cloned()
            .chain(workload::names().map(str::to_owned))
            .collect();
    }
    names.sort();
    names.dedup();
    let (mut fit, mut left_out) = (Vec::new(), Vec::new());
    for name in names {
        let Some(found) = known(&name) else {
            let all = own().chain(workload::names().map(str::to_owned));
            let known = Candidates::of(&name, all);
            return Err(PoolError::NoProgram { name, known });
        };
        let Some(program) = found.program.filter(|program| !program.io.is_empty()) else {
            continue;
        };
        let memory = program.footprint(vm.vcpus) + boot_footprint(vm.memory) + Bytes(PAGE_BYTES);
        // The simulator refuses a program that was named and does not fit, and says how much memory it needs.
        match memory > vm.memory && options.programs.is_empty() {
            true => left_out.push(name),
            false => fit.push(name),
        }
    }
    Ok((fit, left_out))
}

/// Returns a scenario in which the VM runs this program, alone with its driver domain. The VM's pool limits no measured figure:
/// data for which the pool has no page is copied, in the same time.
fn alone(scenario: &Scenario, vm: &VmSpec, backend: &Backend, program: &str) -> Scenario {
    let smallest = PoolSpec {
        fixed: true,
        initial: Some(Bytes(PAGE_BYTES)),
        ..PoolSpec::default()
    };
    let measured = VmSpec {
        workload: program.to_owned(),
        then: Vec::new(),
        work_share: 1.0,
        arrival: Ns::ZERO,
        driver_domain: Some(Backend {
            pool: Some(smallest),
            ..backend.clone()
        }),
        ..vm.clone()
    };
    let driver = scenario.vms.iter().find(|other| other.name == backend.vm);
    let driver = driver.cloned().map(|driver| VmSpec {
        arrival: Ns::ZERO,
        ..driver
    });
    Scenario {
        vms: driver.into_iter().chain([measured]).collect(),
        events: Vec::new(),
        // The scenario is made here and has no file, so an error names no place.
        origin: Default::default(),
        ..scenario.clone()
    }
}

fn need(machine: &Machine, scenario: &Scenario, program: &str, options: &Options) -> Result<Need, TwinError> {
    let mut twin = Twin::new(machine.clone(), scenario, options.seed)?;
    twin.run_to_end(options.limit);
    let report = twin.report();
    let channels = report.vms.iter().filter_map(|vm| vm.driver_domain);
    // Only the VM has a driver domain.
    let (pages_max, passed) = channels.fold((0, 0), |(most, passed), channel| {
        let both = channel.pages_flipped + channel.pages_copied;
        (most.max(channel.pages_used_max), passed + both)
    });
    Ok(Need {
        program: program.to_owned(),
        pages_max,
        pages_passed: passed,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_machine_files::preset;
    use homenode_twin::FlipReport;

    fn flip() -> (Machine, Scenario) {
        let scenario = Scenario::builtin("flip").unwrap();
        (preset("xeon26x2").unwrap(), scenario)
    }

    fn options(programs: &[&str]) -> Options {
        Options {
            programs: programs.iter().map(|&name| name.to_owned()).collect(),
            limit: Ns::from_secs(5),
            seed: 1,
        }
    }

    fn found(programs: &[&str]) -> Result<PoolFound, PoolError> {
        let (machine, scenario) = flip();
        pool(&machine, &scenario, &options(programs), &mut |_, _, _| {})
    }

    /// Runs a web server behind a fixed pool of this size.
    fn with_pool(pages: u64) -> FlipReport {
        let (machine, scenario) = flip();
        let (vm, backend) = flipped(&scenario).unwrap();
        let mut scenario = alone(&scenario, vm, backend, "webserving");
        let pool = scenario.vms[1].driver_domain.as_mut().unwrap().pool.as_mut();
        pool.unwrap().initial = Some(Pages(pages).to_bytes());
        let mut twin = Twin::new(machine, &scenario, 1).unwrap();
        twin.run_to_end(Ns::from_secs(5));
        twin.report().vms[1].driver_domain.unwrap()
    }

    #[test]
    fn a_pool_of_this_size_never_copies_and_a_smaller_one_does() {
        let found = found(&["webserving", "stream", "psearchy"]).unwrap();
        let [need] = &found.programs[..] else {
            panic!("STREAM has no I/O, and Psearchy's disk is not there: {found:?}")
        };
        // The ring holds 256 pages, and more are under way.
        assert!(need.pages_max > 256 && need.pages_passed > 10_000, "{need:?}");
        let enough = with_pool(need.pages_max);
        assert_eq!((enough.pages_copied, enough.pool_pages), (0, need.pages_max));
        assert!(enough.pages_flipped > 10_000 && enough.pages_away <= need.pages_max);
        assert!(with_pool(need.pages_max - 1).pages_copied > 0);
    }

    #[test]
    fn another_program_never_makes_the_pool_smaller() {
        let (one, both) = (
            found(&["bigbench"]).unwrap(),
            found(&["linkbench", "bigbench"]).unwrap(),
        );
        assert!(both.programs.contains(&one.programs[0]) && both.programs.len() == 2);
        let most = both.programs.iter().map(|need| need.pages_max).max().unwrap();
        assert_eq!(both.size_bytes, Pages(most).to_bytes());
        assert!(both.size_bytes >= one.size_bytes);
    }

    #[test]
    fn the_scenarios_static_pool_has_the_measured_size() {
        let (machine, scenario) = flip();
        let options = Options {
            limit: Ns::from_secs(60),
            ..options(&[])
        };
        let found = pool(&machine, &scenario, &options, &mut |_, _, _| {}).unwrap();
        let pools = scenario
            .vms
            .iter()
            .filter_map(|vm| vm.driver_domain.as_ref()?.pool.as_ref());
        let sizes: Vec<_> = pools.map(|pool| (pool.fixed, pool.initial)).collect();
        assert_eq!(sizes, [(true, Some(found.size_bytes))]);
    }

    #[test]
    fn what_cannot_be_measured_is_refused_with_a_remedy() {
        let message = |programs: &[&str]| found(programs).unwrap_err().to_string();
        assert!(message(&["stream"]).contains("more --seconds"));
        assert!(message(&["bigbanch"]).contains("bigbench"));
        let (machine, mut scenario) = flip();
        for vm in &mut scenario.vms {
            vm.driver_domain = None;
        }
        let none = pool(&machine, &scenario, &options(&[]), &mut |_, _, _| {}).unwrap_err();
        assert!(none.to_string().contains("driver_domain = { vm ="), "{none}");
    }
}
