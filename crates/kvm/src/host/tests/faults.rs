//! An agent is killed at every point of its life, and a host fails, lags, acts late or does not answer. Afterwards, the VM is
//! restored, or reported as not restored.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;

use homenode_kernel::fault::{self, Fault, Point};
use homenode_undo::Undone;
use homenode_units::SplitMix;

use super::balloon::{BALLOON, give};
use super::home::{RESTRICTIVE, lift_home, runs_on, set_home};
use super::*;

/// A host whose VM allows every change that libvirt can make.
fn everything() -> Tree {
    let tree = host(&format!(
        "<currentMemory unit='KiB'>49152</currentMemory>{BALLOON}{RESTRICTIVE}"
    ));
    let xml = std::fs::read_to_string(tree.root().join("node.xml")).unwrap();
    tree.write("node.xml", &xml.replace(">1024</memory>", ">65536</memory>"));
    tree.write("etc/machine-id", "0123456789abcdef0123456789abcdef\n");
    add_groups(&tree, "max 100000");
    tree
}

/// Starts an agent.
fn begin(tree: &Tree) -> KvmHost {
    let mut host = connect_with_quotas(tree);
    host.context.manager.libvirt().fake.threads = Some((tree.root().join(format!("proc/{PID}/task")), PID));
    host
}

/// Does everything that an agent does to a VM, some of it twice, and some of it reverted.
fn live(host: &mut KvmHost) {
    let actions = [
        pin(&[0, 1], "1"),
        set_home(1),
        hold(3, LONG),
        give(32 << 10, LONG),
        hold(6, LONG),
        pin(&[0, 1], "0"),
        set_home(0),
        lift(),
        lift_home(),
        hold(3, Ns(1)),
        pin(&[1], "1"),
        give(40 << 10, LONG),
        hold(9, LONG),
    ];
    for action in actions {
        if let Ok(sample) = host.sample() {
            let _ = host.commit(&plan(sample.version, action));
        }
        host.wait(Ns(1));
    }
}

/// Where the VM runs, its quota and memory, and whether it is marked.
fn state(tree: &Tree, libvirt: &mut dyn Manager) -> String {
    let domain = parsed(libvirt);
    let (threads, limits) = (runs_on(tree), cpu_max(tree));
    format!(
        "{threads:?} {limits:?} {:?} {:?}",
        domain.memory_current_bytes, domain.mark
    )
}

const BEFORE: &str = r#"["0-3", "0-3", "0-3"] ["max 100000", "max 100000"] Bytes(50331648) None"#;

/// Undoes as the guard does.
fn guard(tree: &Tree, libvirt: &mut dyn Manager) -> Undone {
    match Journal::open(&tree.root().join("state")) {
        Ok(mut journal) => leftovers::undo_all(libvirt, tree.root(), &mut journal, &mut false),
        Err(error) => Undone {
            failures: vec![error.to_string()],
            ..Undone::default()
        },
    }
}

struct Killed;

/// Runs an agent that is killed at point `last`. Returns whether it was killed there.
fn killed_at(tree: &Tree, last: u32) -> (Box<dyn Manager>, bool) {
    let mut host = begin(tree);
    let mut passed = 0;
    fault::plan(move |point| {
        if point != Point::Read && point != Point::Balloon {
            if passed == last {
                resume_unwind(Box::new(Killed));
            }
            passed += 1;
        }
        None
    });
    let end = catch_unwind(AssertUnwindSafe(|| {
        live(&mut host);
        host.restore()
    }));
    fault::end();
    let is_killed = match end {
        Ok(undone) => {
            assert_eq!(undone.failures, Vec::<String>::new());
            false
        }
        Err(cause) => {
            assert!(cause.is::<Killed>());
            true
        }
    };
    (ended(host), is_killed)
}

#[test]
fn an_agent_killed_before_or_after_any_write_or_call_is_undone_by_its_guard() {
    let mut points = 0;
    loop {
        let tree = everything();
        let (mut libvirt, is_killed) = killed_at(&tree, points);
        let undone = guard(&tree, libvirt.as_mut());
        assert_eq!(
            (undone.failures, state(&tree, libvirt.as_mut()).as_str()),
            (Vec::new(), BEFORE),
            "point {points}"
        );
        if !is_killed {
            break;
        }
        points += 1;
    }
    assert!(points > 200, "{points} points");
}

#[test]
fn an_agent_killed_anywhere_is_undone_by_the_marks_where_its_files_are_gone() {
    for point in 0.. {
        let tree = everything();
        let (mut libvirt, is_killed) = killed_at(&tree, point);
        let _ = std::fs::remove_dir_all(tree.root().join("state"));
        let undone = guard(&tree, libvirt.as_mut());
        assert_eq!(
            (undone.failures, state(&tree, libvirt.as_mut()).as_str()),
            (Vec::new(), BEFORE),
            "point {point}"
        );
        if !is_killed {
            break;
        }
    }
}

#[test]
fn an_agent_killed_anywhere_is_followed_by_one_that_knows_what_is_its_own() {
    for point in 0.. {
        let tree = everything();
        let (libvirt, is_killed) = killed_at(&tree, point);
        let mut next = begin(&tree);
        let fake = std::mem::take(&mut next.context.manager.libvirt().fake);
        next.context.manager = libvirt;
        next.context.manager.libvirt().fake = fake;
        let seen = next.sample().unwrap();
        assert_eq!(
            seen.vms[0].settings.pinned_vcpus,
            Vec::<u16>::new(),
            "point {point}"
        );
        assert_eq!(seen.vms[0].settings.quota, None, "point {point}");
        let notices = next.take_notices();
        assert!(
            !notices.iter().any(|n| n.contains("another program")),
            "point {point}: {notices:?}"
        );
        assert_eq!(next.restore().failures, Vec::<String>::new(), "point {point}");
        assert_eq!(
            state(&tree, next.context.manager.as_mut()),
            BEFORE,
            "point {point}"
        );
        if !is_killed {
            break;
        }
    }
}

#[test]
fn a_libvirt_that_is_killed_before_or_after_any_call_is_waited_for() {
    for last in (0..).step_by(3) {
        let tree = everything();
        let mut host = begin(&tree);
        let calls = Rc::new(Cell::new(0));
        let made = Rc::clone(&calls);
        fault::plan(move |point| {
            if point == Point::Call || point == Point::Answer {
                made.set(made.get() + 1);
                return (made.get() > last).then_some(Fault::Lost);
            }
            None
        });
        live(&mut host);
        let undone = host.restore();
        let mut libvirt = ended(host);
        // The guard does not report success either.
        let guarded = guard(&tree, libvirt.as_mut());
        fault::end();
        let is_undone = state(&tree, libvirt.as_mut()) == BEFORE;
        assert!(
            is_undone || !undone.failures.is_empty(),
            "call {last}: {undone:?}"
        );
        assert!(
            is_undone || !guarded.failures.is_empty(),
            "call {last}: {guarded:?}"
        );
        assert_eq!(
            guard(&tree, libvirt.as_mut()).failures,
            Vec::<String>::new(),
            "call {last}"
        );
        assert_eq!(state(&tree, libvirt.as_mut()), BEFORE, "call {last}");
        if calls.get() <= last {
            break;
        }
    }
}

#[test]
fn what_was_carried_out_without_an_answer_is_undone_though_taking_it_back_had_none_either() {
    let lost_in_a_row = [1, 2, 3, 5];
    let lives = lost_in_a_row
        .into_iter()
        .flat_map(|in_a_row| (0..200).map(move |first| (in_a_row, first)));
    for (in_a_row, first) in lives {
        let tree = everything();
        let mut host = begin(&tree);
        let answers = Rc::new(Cell::new(0));
        let made = Rc::clone(&answers);
        fault::plan(move |point| {
            if point != Point::Answer {
                return None;
            }
            made.set(made.get() + 1);
            (first..first + in_a_row)
                .contains(&(made.get() - 1))
                .then_some(Fault::Lost)
        });
        live(&mut host);
        fault::end();
        let undone = host.restore();
        let mut libvirt = ended(host);
        let guarded = guard(&tree, libvirt.as_mut());
        assert_eq!(
            (
                undone.failures,
                guarded.failures,
                state(&tree, libvirt.as_mut()).as_str()
            ),
            (Vec::new(), Vec::new(), BEFORE),
            "{in_a_row} answers from {first} on"
        );
    }
}

/// From now on, one operation in many fails.
fn lies(seed: u64) {
    let mut dice = SplitMix(seed);
    let mut below = move |limit| dice.bits() % limit;
    let one_in = [4, 10, 30, 100][below(4) as usize];
    fault::plan(move |point| {
        // Files are read by the hundred, so reads fail more rarely.
        let rarer = if point == Point::Read { 10 } else { 1 };
        if below(one_in * rarer) != 0 {
            return None;
        }
        Some(match below(3) {
            0 => Fault::Refused,
            1 => Fault::Lost,
            _ => Fault::Late(below(5) as u32),
        })
    });
}

/// Runs an agent's life on a failing host. Returns how many times a VM was reported not restored.
fn lied_to(seed: u64) -> usize {
    let tree = everything();
    let mut host = begin(&tree);
    lies(seed);
    live(&mut host);
    let mut said = vec![host.restore()];
    let mut libvirt = ended(host);
    for _ in 0..3 {
        // Checks without faults whether the last report is true. Nothing may change the VM later.
        fault::end();
        if said.last().is_some_and(|undone| undone.failures.is_empty()) {
            libvirt.libvirt().fake.catch_up();
            assert_eq!(
                state(&tree, libvirt.as_mut()),
                BEFORE,
                "seed {seed}: said to be restored by try {}",
                said.len()
            );
            return said.len() - 1;
        }
        lies(seed.wrapping_mul(31).wrapping_add(said.len() as u64));
        said.push(guard(&tree, libvirt.as_mut()));
    }
    fault::end();
    libvirt.libvirt().fake.catch_up();
    let undone = guard(&tree, libvirt.as_mut());
    assert_eq!(undone.failures, Vec::<String>::new(), "seed {seed}");
    assert_eq!(state(&tree, libvirt.as_mut()), BEFORE, "seed {seed}");
    said.len()
}

#[test]
fn on_a_host_that_lies_a_vm_is_as_before_or_said_not_to_be() {
    let seeds = std::env::var("HOMENODE_SEEDS")
        .ok()
        .and_then(|seeds| seeds.parse().ok());
    let seeds: u64 = seeds.unwrap_or(3000);
    let not_restored = (0..seeds).map(lied_to).filter(|times| *times > 0).count();
    assert!(not_restored > 0, "nothing went wrong in {seeds} lives");
}
