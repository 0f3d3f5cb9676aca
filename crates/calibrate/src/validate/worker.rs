//! Runs memory kernels as separate processes. Defines the kernels, the protocol, and how workers end.
//!
//! A worker sets up its memory and writes `ready`. For each line `run WARM MEASURE TAIL` (milliseconds) on its standard
//! input, it runs for the total of these times. Then it writes how many cache lines it accessed during MEASURE, and how many
//! nanoseconds of CPU time that took. It ends when its input ends, and the operating system kills it when its parent ends.

use std::fmt;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use homenode_units::{CpuId, NodeId};
use serde::{Serialize, Serializer};

use crate::kernels::{self, CHAINS, Generators};
use crate::sys::{self, LINE_BYTES, LINE_WORDS, Memory, Pages};

/// Number of lines that a stream reads between two clock readings; also the lines of each kind in one turn of a mix.
const BLOCK_LINES: usize = 256;

/// The kernel of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kernel {
    /// Reads lines drawn uniformly from this many bytes.
    Uniform(usize),
    /// Reads all lines of this many bytes in order, repeatedly.
    Stream(usize),
    /// Reads as many lines of the first kind (first number) as of the second kind, in short turns.
    Mix(usize, usize),
}

impl Kernel {
    /// Returns the number of bytes that the kernel touches.
    pub fn footprint(self) -> usize {
        match self {
            Kernel::Uniform(bytes) | Kernel::Stream(bytes) => bytes,
            Kernel::Mix(uniform, stream) => uniform + stream,
        }
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kernel::Uniform(bytes) => write!(f, "uniform:{bytes}"),
            Kernel::Stream(bytes) => write!(f, "stream:{bytes}"),
            Kernel::Mix(uniform, stream) => write!(f, "mix:{uniform}:{stream}"),
        }
    }
}

impl Serialize for Kernel {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

/// A text that is not a kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a kernel such as `uniform:1048576`, `stream:1048576` or `mix:1048576:1048576`")]
pub struct NoKernel(String);

impl FromStr for Kernel {
    type Err = NoKernel;

    fn from_str(text: &str) -> Result<Kernel, NoKernel> {
        let parts: Vec<&str> = text.split(':').collect();
        // No host has more memory than 2^40 bytes, and sums cannot overflow below that.
        let bytes = |text: &str| {
            text.parse::<usize>()
                .ok()
                .filter(|bytes| (LINE_BYTES..=1 << 40).contains(bytes))
        };
        let kernel = match parts.as_slice() {
            ["uniform", a] => bytes(a).map(Kernel::Uniform),
            ["stream", a] => bytes(a).map(Kernel::Stream),
            ["mix", a, b] => bytes(a).zip(bytes(b)).map(|(a, b)| Kernel::Mix(a, b)),
            _ => None,
        };
        kernel.ok_or_else(|| NoKernel(text.to_owned()))
    }
}

/// A kernel with its memory.
struct Load {
    uniform: Option<(Memory, usize)>,
    stream: Option<(Memory, usize)>,
    states: Generators,
    next_block: usize,
}

impl Load {
    fn of(kernel: Kernel, node: Option<NodeId>, seed: u64) -> io::Result<Load> {
        let memory = |bytes: usize| -> io::Result<(Memory, usize)> {
            let mut memory = Memory::map(bytes, Pages::Huge, node)?;
            memory.words_mut().fill(0);
            Ok((memory, bytes / LINE_BYTES * LINE_WORDS))
        };
        let (uniform, stream) = match kernel {
            Kernel::Uniform(bytes) => (Some(bytes), None),
            Kernel::Stream(bytes) => (None, Some(bytes)),
            Kernel::Mix(uniform, stream) => (Some(uniform), Some(stream)),
        };
        Ok(Load {
            uniform: uniform.map(memory).transpose()?,
            stream: stream.map(memory).transpose()?,
            states: kernels::generators(seed),
            next_block: 0,
        })
    }

    /// Runs a short turn; returns the number of lines accessed.
    fn turn(&mut self) -> usize {
        let mut lines = 0;
        if let Some((memory, words)) = &self.uniform {
            kernels::uniform(&memory.words()[..*words], &mut self.states, BLOCK_LINES / CHAINS);
            lines += BLOCK_LINES;
        }
        if let Some((memory, words)) = &self.stream {
            let block_words = (BLOCK_LINES * LINE_WORDS).min(*words);
            let blocks = words / block_words;
            let from = self.next_block % blocks * block_words;
            kernels::read(&memory.words()[from..from + block_words]);
            self.next_block = (self.next_block + 1) % blocks;
            lines += block_words / LINE_WORDS;
        }
        lines
    }

    /// Returns the number of lines accessed, and the CPU time they took: when other processes have the CPU, memory is not
    /// slow.
    fn run_for(&mut self, span: Duration) -> (usize, Duration) {
        let (begin, from, mut lines) = (Instant::now(), sys::cpu_time(), 0);
        loop {
            lines += self.turn();
            if begin.elapsed() >= span {
                return (lines, sys::cpu_time() - from);
            }
        }
    }
}

/// Runs the worker's side: carries out orders until the input ends.
///
/// # Errors
/// Unavailable memory or CPU, unreadable orders, a closed output.
pub fn serve(
    kernel: Kernel,
    cpu: CpuId,
    node: Option<NodeId>,
    orders: impl BufRead,
    mut answers: impl Write,
) -> io::Result<()> {
    sys::pin_to(cpu)?;
    let mut load = Load::of(kernel, node, u64::from(cpu.0) + 1)?;
    writeln!(answers, "ready")?;
    answers.flush()?;
    for order in orders.lines() {
        let order = order?;
        let spans: Vec<u64> = order
            .split_ascii_whitespace()
            .skip(1)
            .map_while(|word| word.parse().ok())
            .collect();
        let (true, [warm, measure, tail]) = (order.starts_with("run "), spans.as_slice()) else {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("`{order}` is not `run WARM MEASURE TAIL`"),
            ));
        };
        let ms = |ms: &u64| Duration::from_millis((*ms).min(60_000));
        load.run_for(ms(warm));
        let (lines, took) = load.run_for(ms(measure));
        load.run_for(ms(tail));
        writeln!(answers, "{lines} {}", took.as_nanos())?;
        answers.flush()?;
    }
    Ok(())
}

/// Makes the kernel kill this process when its parent ends.
///
/// # Errors
/// A kernel that refuses, which never happens in practice.
pub fn die_with_parent() -> io::Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(Some(
        rustix::process::Signal::KILL,
    ))?)
}

/// Durations of a run's parts in milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct Spans {
    /// Before counting.
    pub warm: u64,
    /// Time of counting.
    pub measure: u64,
    /// Time after counting, so that the other worker does not run alone before it has finished counting, too.
    pub tail: u64,
}

/// The parent's side of a worker; killed when dropped.
#[derive(Debug)]
pub struct Worker {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts a worker with this command, and waits until its memory is set up.
    ///
    /// # Errors
    /// A command that cannot be started, or a worker that ends at once; its message is on standard error.
    pub fn start(mut command: Command) -> io::Result<Worker> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (orders, answers) = pipes.ok_or_else(|| io::Error::other("a worker without pipes"))?;
        let mut worker = Worker {
            child,
            orders,
            answers: BufReader::new(answers),
        };
        match worker.answer()?.as_str() {
            "ready" => Ok(worker),
            other => Err(io::Error::other(format!(
                "a worker said `{other}` instead of `ready`"
            ))),
        }
    }

    /// Begins a run.
    ///
    /// # Errors
    /// A worker that has ended.
    pub fn run(&mut self, spans: Spans) -> io::Result<()> {
        writeln!(self.orders, "run {} {} {}", spans.warm, spans.measure, spans.tail)
    }

    /// Waits for the end of the current run, and returns the nanoseconds per line.
    ///
    /// # Errors
    /// A worker that has ended, or an invalid answer.
    pub fn ns_per_line(&mut self) -> io::Result<f64> {
        let answer = self.answer()?;
        let (lines, ns) = answer.split_once(' ').unwrap_or_default();
        match (lines.parse::<f64>(), ns.parse::<f64>()) {
            (Ok(lines), Ok(ns)) if lines > 0.0 => Ok(ns / lines),
            _ => Err(io::Error::other(format!(
                "a worker said `{answer}` instead of lines and nanoseconds"
            ))),
        }
    }

    fn answer(&mut self) -> io::Result<String> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            return Err(io::Error::other("a worker process ended early"));
        }
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The worker may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_read_as_they_are_written_and_nonsense_is_refused() {
        for kernel in [
            Kernel::Uniform(4096),
            Kernel::Stream(64),
            Kernel::Mix(1 << 20, 1 << 30),
        ] {
            assert_eq!(kernel.to_string().parse(), Ok(kernel));
        }
        for bad in [
            "",
            "uniform",
            "uniform:0",
            "uniform:-1",
            "stream:1:2",
            "mix:4096",
            "uniform:99999999999999999999",
        ] {
            assert!(bad.parse::<Kernel>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_worker_answers_each_order_and_ends_with_its_input() {
        let mask = rustix::thread::sched_getaffinity(None).unwrap();
        let cpu = CpuId((0..1024).find(|cpu| mask.is_set(*cpu as usize)).unwrap());
        for kernel in [
            Kernel::Uniform(1 << 16),
            Kernel::Stream(64),
            Kernel::Mix(1 << 16, 1 << 17),
        ] {
            let mut answers = Vec::new();
            serve(kernel, cpu, None, &b"run 0 1 0\nrun 1 2 1\n"[..], &mut answers).unwrap();
            let text = String::from_utf8(answers).unwrap();
            let lines: Vec<&str> = text.lines().collect();
            assert_eq!((lines.len(), lines[0]), (3, "ready"), "{text}");
            assert!(lines[1..].iter().all(|line| !line.starts_with("0 ")), "{text}");
            assert!(serve(kernel, cpu, None, &b"dance\n"[..], &mut Vec::new()).is_err());
        }
    }

    #[test]
    fn turns_walk_through_all_of_a_stream() {
        let mut load = Load::of(Kernel::Stream(BLOCK_LINES * LINE_BYTES * 3), None, 1).unwrap();
        let lines: Vec<usize> = (0..4).map(|_| load.turn()).collect();
        assert_eq!((lines, load.next_block), (vec![BLOCK_LINES; 4], 1));
    }
}
