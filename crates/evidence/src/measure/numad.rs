//! The drop-in for numad beside numad itself.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::{Bench, REPETITIONS, Why};
use crate::section::{Bearing, Figure, Section, Topic, With};

pub(super) const METHOD: &str = "Both programs are asked, as libvirt does, where a VM of one vCPU and 64 MiB should go, and \
     where one of half of a node should. numad runs in a mount namespace with empty /run and /var/log, so that it answers by \
     itself and leaves no file; ours has an empty state directory, so that it reserves nothing with a running agent.";

/// Where numad is; with our package in its place, the second.
const PLACES: [&str; 3] = ["/usr/bin/numad.distrib", "/usr/bin/numad", "/usr/sbin/numad"];
/// Mounts empty directories, then runs the arguments.
const INSIDE: &str = "mount -t tmpfs none /run && mount -t tmpfs none /var/log && exec \"$@\"";
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(30);

pub(super) fn measure(bench: &mut Bench<'_>) -> Result<Section, Why> {
    let numad = find().ok_or_else(|| Why::of("numad is not installed; install it to compare"))?;
    let state = tempfile::tempdir_in(&bench.dir)
        .map_err(|error| Why::said("no temporary directory can be made")(&error))?;
    let questions = questions(bench);
    let mut times = [Vec::new(), Vec::new()];
    let mut same = Vec::new();
    for at in 0..REPETITIONS {
        let mut equal = 0;
        for (number, question) in questions.iter().enumerate() {
            let done = (at * questions.len() + number) as f64 / (REPETITIONS * questions.len()) as f64;
            (bench.told)("a question to both", done);
            let mut theirs = Command::new("unshare");
            theirs.args(["--mount", "sh", "-c", INSIDE, "sh"]);
            theirs.arg(&numad).args(["-w", question]);
            let mut ours = Command::new(&bench.program);
            ours.arg0("numad").args(["-w", question]);
            ours.env("HOMENODE_STATE", state.path());
            let (their_nodes, their_ms) = asked(theirs)?;
            let (our_nodes, our_ms) = asked(ours)?;
            if number == 0 {
                times[0].push(their_ms);
                times[1].push(our_ms);
            }
            equal += usize::from(their_nodes == our_nodes);
        }
        same.push(100.0 * equal as f64 / questions.len() as f64);
    }
    let figures = vec![
        Figure::of("answer of numad", "ms", &times[0]),
        Figure::of("answer of Homenode's replacement", "ms", &times[1]),
        Figure::of("answers that name the same nodes", "percent", &same),
    ];
    let median = |at: usize| figures[at].median.unwrap_or(f64::NAN);
    let (theirs, ours, same) = (median(0), median(1), median(2));
    let nodes = match bench.machine.home_nodes().len() {
        0 | 1 => "With one node there is only one possible answer.".to_owned(),
        _ => format!("{same:.0} percent of the answers name the same nodes."),
    };
    let means =
        format!("numad takes {theirs:.0} ms to answer, Homenode's replacement for it {ours:.0} ms. {nodes}");
    Ok(Section::measured(
        Topic::Numad,
        With::Processes,
        METHOD,
        means,
        Bearing::Neither,
        figures,
    ))
}

/// Returns numad's file, if it is not ours.
fn find() -> Option<PathBuf> {
    let is_ours = |path: &Path| {
        fs::canonicalize(path).is_ok_and(|real| real.file_name().is_some_and(|name| name == "homenode"))
    };
    let mut there = PLACES
        .into_iter()
        .map(PathBuf::from)
        .filter(|path| path.is_file());
    there.find(|path| !is_ours(path))
}

fn questions(bench: &Bench<'_>) -> Vec<String> {
    let nodes = bench.machine.nodes.iter();
    let cpus = nodes
        .map(|(_, node)| node.cpus.len())
        .filter(|cpus| *cpus > 0)
        .min()
        .unwrap_or(1);
    let memory = bench
        .machine
        .nodes
        .iter()
        .map(|(_, node)| node.memory_bytes.0 >> 20)
        .filter(|mib| *mib > 0)
        .min();
    let half = memory.unwrap_or(128) * 4 / 10;
    vec!["1:64".to_owned(), format!("{}:{half}", cpus.div_ceil(2))]
}

/// Returns the nodes of an answer, and the milliseconds that it took.
fn asked(mut command: Command) -> Result<(String, f64), Why> {
    let failed = || "numad or its drop-in could not be asked";
    let begin = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| Why::said(failed())(&error))?;
    loop {
        match child.try_wait() {
            Ok(Some(_)) => break,
            Ok(None) if begin.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(1)),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(Why::of("numad or its drop-in did not answer within 30 seconds"));
            }
        }
    }
    let took = begin.elapsed().as_secs_f64() * 1e3;
    let output = child
        .wait_with_output()
        .map_err(|error| Why::said(failed())(&error))?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if !output.status.success() || text.is_empty() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(Why::said(failed())(&said));
    }
    Ok((text, took))
}
