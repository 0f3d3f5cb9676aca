//! Tests on which node a kernel that balances memory runs tasks.

use super::*;

/// Runs tasks of one VM that never sleep on two nodes of 16 CPUs for five seconds. Returns the node of each, and the number of
/// times that they changed nodes.
fn nodes_of(tasks: usize, balances: bool) -> (Vec<usize>, u64) {
    let mut driver = Driver::on(Hypervisor::Kvm, &topology(2, 8), balances, 1);
    let tasks = driver.vm(256, None, &hogs(tasks));
    driver.run_for(5000);
    let tasks: Vec<_> = tasks
        .iter()
        .map(|task| &driver.scheduler.queues.tasks[*task])
        .collect();
    let changes = tasks.iter().map(|task| task.node_changes).sum();
    (tasks.iter().map(|task| task.cpu.0 / 16).collect(), changes)
}

#[test]
fn two_vcpus_stay_together_under_a_kernel_that_balances_and_are_spread_by_another() {
    let (nodes, changes) = nodes_of(2, true);
    assert_eq!((nodes[0], changes), (nodes[1], 0));
    let (nodes, _) = nodes_of(2, false);
    assert_ne!(nodes[0], nodes[1]);
}

#[test]
fn four_vcpus_are_spread_by_either() {
    for balances in [false, true] {
        let (mut nodes, _) = nodes_of(4, balances);
        nodes.sort_unstable();
        assert_eq!(nodes, [0, 0, 1, 1], "balances: {balances}");
    }
}

/// Runs a task that never sleeps on a CPU where another task disturbs it briefly now and then. All other CPUs of its node are
/// taken, and one CPU of the other node is free. Returns how many times the task is seen on the other node, over all looks and
/// seeds.
fn away(prefers: Option<usize>) -> usize {
    let brief = Habit {
        run_ns: 1_500_000.0,
        sleep_ns: 12_000_000.0,
    };
    let of_seed = |seed| {
        let mut driver = Driver::on(Hypervisor::Kvm, &topology(2, 2), true, seed);
        let task = driver.vm(256, None, &hogs_on(1, &[0]))[0];
        let others = [1, 2, 3, 4, 5, 6].map(|cpu| (HOG, vec![CpuIx(cpu)]));
        driver.vm(256, None, &others);
        driver.vm(256, None, &[(brief, vec![CpuIx(0)])]);
        driver
            .scheduler
            .set_affinity(task, first(8).collect(), driver.now);
        driver.scheduler.queues.tasks[task].prefers = prefers;
        driver.look();
        let look = |_| {
            driver.run_for(100);
            usize::from(driver.scheduler.queues.tasks[task].cpu.0 >= 4)
        };
        (0..20).map(look).sum::<usize>()
    };
    (0..20).map(of_seed).sum()
}

#[test]
fn a_vcpu_is_less_often_away_from_its_memory_on_a_cpu_that_is_free_for_a_moment() {
    let (anywhere, near) = (away(None), away(Some(0)));
    assert!(10 * near < anywhere, "{near} of {anywhere} looks");
}

#[test]
fn where_all_of_a_cpu_have_their_memory_there_those_that_wait_go_to_idle_cpus_elsewhere() {
    let mut driver = Driver::on(Hypervisor::Kvm, &topology(2, 2), true, 1);
    let tasks = driver.vm(256, None, &hogs_on(6, &[0, 1, 2, 3]));
    for task in &tasks {
        driver
            .scheduler
            .set_affinity(*task, first(8).collect(), driver.now);
        driver.scheduler.queues.tasks[*task].prefers = Some(0);
        driver.look();
    }
    driver.run_for(2000);
    let before = driver.running_ns(&tasks);
    driver.run_for(1000);
    assert_within(
        "CPUs used",
        (driver.running_ns(&tasks) - before) as f64 / 1e9,
        6.0,
        0.01,
    );
}
