//! Compares runs of a scenario under several sets of policies, for people.

use comfy_table::Table;
use homenode_search::program::NotStarted;
use homenode_search::trial::Trial;
use homenode_twin::{TwinError, VmReport};

use crate::bad_input;
use crate::print::{millis, or_dash, percent, table};

/// Turns the simulator's refusals and bad policy programs into bad input; every other error stays a failure.
pub(crate) fn about_input(error: anyhow::Error) -> anyhow::Error {
    if error.is::<TwinError>() || error.is::<NotStarted>() {
        bad_input(error)
    } else {
        error
    }
}

/// Formats the mean time of a VM's requests. Without requests, formats the program's runtime, or the number of executed
/// instructions if the program did not end.
fn runtime(vm: &VmReport) -> String {
    if let Some(requests) = vm.requests {
        return millis(requests.mean_ms);
    }
    match vm.runtime_s {
        Some(seconds) => format!("{seconds:.1}s"),
        None if vm.instructions_g > 0.0 => format!("{:.0}G instr.", vm.instructions_g),
        None => "-".to_owned(),
    }
}

/// Returns every VM's runtimes and local access shares, side by side; for VMs that serve requests, their mean and 99th
/// percentile times.
pub(crate) fn side_by_side(trials: &[Trial]) -> Table {
    let names = |first: &str| {
        let headed = |(at, trial): (usize, &Trial)| match at {
            0 => format!("{first}{}", trial.policy),
            _ => trial.policy.clone(),
        };
        trials.iter().enumerate().map(headed).collect::<Vec<_>>()
    };
    let mut header = vec!["VM".to_owned(), "workload".to_owned()];
    header.extend(names("runtime: "));
    let serve = trials.iter().any(|trial| trial.serving_count > 0);
    if serve {
        header.extend(names("p99: "));
    }
    header.extend(names("local: "));
    let vms = trials.first().map_or(&[][..], |trial| &trial.report.vms);
    let rows = vms.iter().enumerate().map(|(at, vm)| {
        let of_all = trials.iter().map(|trial| &trial.report.vms[at]);
        let mut row = vec![vm.name.clone(), vm.workload.clone()];
        row.extend(of_all.clone().map(runtime));
        if serve {
            let p99 = |vm: &VmReport| or_dash(vm.requests.map(|requests| requests.p99_ms), millis);
            row.extend(of_all.clone().map(p99));
        }
        row.extend(of_all.map(|vm| or_dash(vm.local_access_ratio, percent)));
        row
    });
    table(&header.iter().map(String::as_str).collect::<Vec<_>>(), rows)
}

#[cfg(test)]
mod tests {
    use homenode_control::{Config, PolicySet};
    use homenode_machine_files::preset;
    use homenode_search::contender::Contender;
    use homenode_search::trial::{run_all, sentences};
    use homenode_twin::{Scenario, Setup};

    use super::*;

    /// A program that ends, one that does not, and an idle VM. The policy decides whether they share CPUs.
    const CASE: &str = r#"
name = "case"
duration = "20s"
[[vm]]
name = "ends"
vcpus = 2
memory = "2GiB"
workload = "povray"
work_share = 0.005
[[vm]]
name = "does not"
vcpus = 2
memory = "2GiB"
workload = "soplex"
[[vm]]
name = "idle"
vcpus = 1
memory = "1GiB"
workload = "idle"
"#;

    fn trials(text: &str) -> Vec<Trial> {
        let setup = Setup::new(
            preset("r420").unwrap(),
            Scenario::from_toml("case.toml", text).unwrap(),
            1,
        );
        let sets = [PolicySet::Default, PolicySet::FfPin].map(Contender::PolicySet);
        run_all(&setup, &Config::default(), &sets, |_, _, _| ())
            .collect::<Result<_, _>>()
            .unwrap()
    }

    #[test]
    fn servers_are_compared_by_their_requests() {
        let rest = "rest = { interval_m_instructions = 50.0, mean = \"50ms\" }\n";
        let both = trials(&CASE.replace(
            "workload = \"soplex\"\n",
            &format!("workload = \"soplex\"\n{rest}"),
        ));
        assert_eq!(
            (
                both[1].ended_count,
                both[1].not_ended_count,
                both[1].serving_count
            ),
            (1, 0, 1)
        );
        let mean = |trial: &Trial| trial.report.vms[1].requests.unwrap().mean_ms;
        let ratio = mean(&both[1]) / mean(&both[0]);
        assert!((both[1].relative_request_time_mean.unwrap() - ratio).abs() < 1e-9);
        let said = sentences(&both);
        assert!(
            said.len() == 2 && said[1].contains("on average over 1 of 3 VMs"),
            "{said:?}"
        );
        assert!(side_by_side(&both).to_string().contains("p99: default"));
    }

    #[test]
    fn a_program_that_does_not_end_is_compared_by_its_instructions_and_it_is_said_of_how_many_vms_a_mean_is()
    {
        let both = trials(CASE);
        let [first, second] = both.as_slice() else {
            panic!("two sets")
        };
        assert_eq!((second.ended_count, second.not_ended_count), (1, 1));
        let executed = |trial: &Trial| trial.report.vms[1].instructions_g;
        let ratio = executed(second) / executed(first);
        let told = second.relative_instructions_mean.unwrap();
        assert!((told - ratio).abs() < 0.01 * ratio, "{told} {ratio}");
        let said = sentences(&both);
        assert!(
            said.len() == 1 && said[0].contains("on average over 1 of 3 VMs; 1 did not end and execute "),
            "{said:?}"
        );
        let table = side_by_side(&both).to_string();
        assert_eq!(table.matches("G instr.").count(), 2, "{table}");

        let endless = trials(&CASE.replace("work_share = 0.005", ""));
        assert_eq!(endless[1].relative_runtime_mean, None);
        let said = sentences(&endless);
        assert!(
            said[0].ends_with("on average over 2 of 3 VMs; none ended"),
            "{said:?}"
        );
    }
}
