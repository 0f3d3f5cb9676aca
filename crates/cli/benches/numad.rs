//! Compares Homenode's answer to `numad -w`, with and without an agent, with that of the real numad, if it is installed or the
//! variable `NUMAD` has its path. Measures wall time and CPU time of whole processes, on one machine in one run. As root, also
//! measures the real numad while its daemon runs, in namespaces in which the daemon finds no process to move.

#![allow(clippy::print_stdout)] // a benchmark prints its figures

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const REAL: &str = "/usr/bin/numad";
const REQUEST: [&str; 2] = ["-w", "2:128"];
/// The argument that this program gets inside the daemon's namespaces.
const BESIDE: &str = "--beside-daemon";
/// Script that starts a numad daemon with its own directories and process table, then runs the other arguments.
const ALONE: &str =
    "mount -t tmpfs none /run && mount -t tmpfs none /var/log && \"$1\" && sleep 4 && shift && exec \"$@\"";

struct Timing {
    wall: Duration,
    cpu: Duration,
}

/// Returns the mean wall and CPU time of a run.
fn time(runs: u32, program: &Path, state: &Path) -> Timing {
    let (cpu, begin) = (children_cpu(), Instant::now());
    for _ in 0..runs {
        let output = Command::new(program)
            .args(REQUEST)
            .env("HOMENODE_STATE", state)
            .output()
            .expect("numad starts");
        assert!(
            output.status.success() && !output.stdout.is_empty(),
            "numad answers"
        );
    }
    Timing {
        wall: begin.elapsed() / runs,
        cpu: (children_cpu() - cpu) / runs,
    }
}

/// Returns the CPU time of children that have ended. It counts ticks of 10 ms; means over many runs are finer.
fn children_cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux");
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let ticks: u64 = fields[13..15]
        .iter()
        .map(|f| f.parse::<u64>().expect("a count"))
        .sum();
    Duration::from_millis(ticks * 10)
}

fn agent(state: &Path) -> Child {
    let child = Command::new(env!("CARGO_BIN_EXE_homenode"))
        .args(["run", "--host", "twin:r910", "--json", "--state"])
        .arg(state)
        .stdout(Stdio::null())
        .spawn()
        .expect("the agent starts");
    while !state.join("agent.sock").exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(Duration::from_millis(500));
    child
}

/// Measures the real numad while its daemon runs and answers it. Returns true if that was possible.
fn beside_daemon(real: &Path) -> bool {
    let this = std::env::current_exe().expect("it has a file");
    let namespaces = [
        "--mount",
        "--ipc",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ];
    let mut command = Command::new("unshare");
    command.args(namespaces).args(["sh", "-c", ALONE, "sh"]).arg(real);
    command.arg(this).arg(BESIDE).arg(real);
    command.status().is_ok_and(|status| status.success())
}

fn show(name: &str, ours: &Timing, real: Option<&Timing>) {
    let ratio = real.map_or(String::new(), |real| {
        format!(
            "  (1/{:.0} of the real one's wall time)",
            real.wall.as_secs_f64() / ours.wall.as_secs_f64()
        )
    });
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    println!(
        "{name:<30}{:>10.2} ms wall{:>10.2} ms CPU{ratio}",
        ms(ours.wall),
        ms(ours.cpu)
    );
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if let [_, beside, real] = args.as_slice()
        && beside == BESIDE
    {
        let dir = tempfile::tempdir().expect("a directory");
        show(
            "the real numad beside its own",
            &time(3, Path::new(real), dir.path()),
            None,
        );
        return;
    }
    // Under `cargo test --benches` the benchmark only has to run, not to measure well.
    let quick = !std::env::args().any(|arg| arg == "--bench");
    let runs = if quick { 1 } else { 100 };
    let dir = tempfile::tempdir().expect("a directory for state");
    let numad = dir.path().join("numad");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_homenode"), &numad).expect("a link");
    let program = std::env::var_os("NUMAD").unwrap_or_else(|| REAL.into());
    let program = Path::new(&program);
    let real = (program.exists() && !quick).then(|| time(3, program, dir.path()));
    match &real {
        Some(real) => {
            show("the real numad", real, None);
            if !beside_daemon(program) {
                println!("the real numad beside its daemon is not measured (run this as root)");
            }
        }
        None => println!("the real numad is not measured (install Debian's numad for it)"),
    }
    show(
        "homenode without an agent",
        &time(runs.min(20), &numad, dir.path()),
        real.as_ref(),
    );
    let mut agent = agent(dir.path());
    show(
        "homenode asking its agent",
        &time(runs, &numad, dir.path()),
        real.as_ref(),
    );
    let _ = agent.kill();
    let _ = agent.wait();
}
