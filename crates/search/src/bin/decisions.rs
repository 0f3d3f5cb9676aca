//! Scores policies over cases.
#![allow(clippy::print_stdout, missing_docs)]
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use homenode_control::{Config, Policies};
use homenode_search::run::{Run, run, slow_downs};
use homenode_twin::Scenario;

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let mut seeds = 1..=3u64;
    let mut policies = vec![Policies::Default, Policies::Homenode];
    let mut cases = vec![];
    let mut detail = false;
    let mut at = args.iter();
    while let Some(arg) = at.next() {
        match arg.as_str() {
            "--seeds" => {
                let text = at.next().unwrap();
                let (a, b) = text.split_once('-').unwrap_or((text, text));
                seeds = a.parse()?..=b.parse()?;
            }
            "--policy" => policies.push(at.next().unwrap().parse().map_err(anyhow::Error::msg)?),
            "-v" => detail = true,
            path => cases.push(path.to_owned()),
        }
    }
    policies.dedup();
    let scenarios: Vec<(String, Scenario)> = cases
        .iter()
        .map(|path| {
            let text = std::fs::read_to_string(path)?;
            let scenario =
                Scenario::from_toml_with(path, &text, &|_| None).map_err(|e| anyhow::anyhow!("{e}"))?;
            Ok((scenario.name.clone(), scenario))
        })
        .collect::<anyhow::Result<_>>()?;
    let mut jobs = vec![];
    for case in 0..scenarios.len() {
        for seed in seeds.clone() {
            for policy in &policies {
                jobs.push((case, seed, *policy));
            }
        }
    }
    let next = AtomicUsize::new(0);
    let done: Mutex<BTreeMap<(usize, u64, &str), Run>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Some((case, seed, policy)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) else {
                        break;
                    };
                    let scenario = &scenarios[*case].1;
                    let machine = homenode_machine::preset(scenario.machine.as_deref().unwrap_or("r910"))
                        .expect("preset");
                    let config = Config {
                        policies: *policy,
                        ..Config::default()
                    };
                    let run = run(&machine, scenario, *seed, config, |_| ()).expect("runs");
                    done.lock().unwrap().insert((*case, *seed, policy.name()), run);
                }
            });
        }
    });
    let done = done.into_inner().unwrap();
    for policy in policies.iter().filter(|p| **p != Policies::Default) {
        println!("== {}", policy.name());
        let (mut means, mut hurt, mut all, mut over10, mut runs) = (vec![], vec![], 0, 0, 0);
        for (case, (name, scenario)) in scenarios.iter().enumerate() {
            let base: Vec<&Run> = seeds.clone().map(|s| &done[&(case, s, "default")]).collect();
            let other: Vec<&Run> = seeds.clone().map(|s| &done[&(case, s, policy.name())]).collect();
            let per_seed: Vec<Vec<f64>> = base
                .iter()
                .zip(&other)
                .map(|(a, b)| slow_downs(&a.report, &b.report))
                .collect();
            let n = per_seed[0].len();
            let mean = per_seed
                .iter()
                .map(|v| v.iter().sum::<f64>() / v.len() as f64)
                .sum::<f64>()
                / per_seed.len() as f64;
            // A VM's mean time over seeds against default's mean over the same.
            let time = |runs: &[&Run], vm: usize| {
                runs.iter()
                    .map(|r| {
                        let v = &r.report.vms[vm];
                        v.runtime_s.unwrap_or_else(|| 1e6 / v.instructions_g)
                    })
                    .sum::<f64>()
            };
            let per_vm: Vec<f64> = (0..n).map(|vm| time(&other, vm) / time(&base, vm)).collect();
            let worst = per_seed.iter().flatten().copied().fold(0.0, f64::max);
            runs += per_seed.iter().flatten().count();
            over10 += per_seed.iter().flatten().filter(|x| **x > 1.10).count();
            for (vm, x) in per_vm.iter().enumerate() {
                all += 1;
                if *x > 1.03 {
                    hurt.push(format!("{name}/{} {x:.3}", scenario.vms[vm].name));
                }
            }
            let decisions = other.iter().map(|r| r.decisions).sum::<usize>() / other.len();
            println!(
                "{name:14} mean {mean:.3} worst-run {worst:.3} worst-vm {:.3} decisions {decisions}",
                per_vm.iter().copied().fold(0.0, f64::max)
            );
            if detail {
                for (vm, x) in per_vm.iter().enumerate() {
                    let local = |runs: &[&Run]| {
                        runs.iter()
                            .map(|r| r.report.vms[vm].local_access_ratio.unwrap_or(0.0))
                            .sum::<f64>()
                            / runs.len() as f64
                    };
                    let miss = |runs: &[&Run]| {
                        runs.iter()
                            .map(|r| r.report.vms[vm].llc_miss_rate.unwrap_or(0.0))
                            .sum::<f64>()
                            / runs.len() as f64
                    };
                    println!(
                        "    {:14} {:11} {x:.3}  [{}]  local {:.2}->{:.2} miss {:.2}->{:.2} t {:.0}",
                        scenario.vms[vm].name,
                        base[0].report.vms[vm].workload,
                        per_seed
                            .iter()
                            .map(|s| format!("{:.2}", s[vm]))
                            .collect::<Vec<_>>()
                            .join(" "),
                        local(&base),
                        local(&other),
                        miss(&base),
                        miss(&other),
                        base[0].report.vms[vm].runtime_s.unwrap_or(0.0)
                    );
                }
            }
            means.push(mean);
        }
        println!(
            "mean of cases {:.4}; hurt {}/{all}: {}; runs over 1.10: {over10}/{runs}",
            means.iter().sum::<f64>() / means.len() as f64,
            hurt.len(),
            hurt.join(", ")
        );
    }
    Ok(())
}
