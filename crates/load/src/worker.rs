//! Runs a kernel as a process of its own, or as the only program of a guest: the protocol, and both of its sides.
//!
//! A worker sets up its memory and writes `ready ADDRESS BYTES`, where its first memory is. For each line `run WARM MEASURE TAIL`
//! (milliseconds) of its input, it runs for the total of these times. Then it writes how many cache lines it accessed during
//! MEASURE, and how many nanoseconds of CPU time and of the clock that took; a server of requests also writes the median and the
//! 99th percentile of its requests' times. It ends when its input ends, and the operating system kills it when its parent ends.
//!
//! Each of its lines begins with [`SAYS`]. A guest's kernel writes to the same console.
//!
//! # Trust
//! What a guest writes may be anything. The other side reads lines of at most [`LINE_MAX`] bytes, at most [`LINES_MAX`] of
//! them that are not a worker's, and waits for a limited time.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use homenode_units::{CpuId, NodeId};

use crate::kernel::Kernel;
use crate::kernels::{self, CHAINS, Generators, Places};
use crate::requests::{self, Arrivals};
use crate::sys::{self, LINE_BYTES, LINE_WORDS, Memory, Pages};

/// Number of lines that a stream reads between two clock readings; also the lines of each kind in one turn of a mix.
const BLOCK_LINES: usize = 256;
/// Prefix of every line that a worker writes.
pub const SAYS: &str = "load> ";
/// The longest line that is read.
pub const LINE_MAX: u64 = 4096;
/// Most lines between two answers that the worker has not written.
pub const LINES_MAX: usize = 10_000;
/// How long a process may take to set up its memory, beyond the time that it was asked to run.
const PATIENCE: Duration = Duration::from_secs(120);

/// A kernel with its memory.
struct Load {
    uniform: Option<(Memory, usize)>,
    stream: Option<(Memory, usize)>,
    chase: Option<(Memory, usize)>,
    pages: Option<(Memory, usize)>,
    requests: Option<(usize, Arrivals)>,
    states: Generators,
    next_block: usize,
    times: Vec<u64>,
}

impl Load {
    fn of(kernel: Kernel, node: Option<NodeId>, seed: u64) -> io::Result<Load> {
        let memory = |bytes: usize| -> io::Result<(Memory, usize)> {
            let mut memory = Memory::map(bytes, Pages::Huge, node)?;
            memory.words_mut().fill(0);
            Ok((memory, bytes / LINE_BYTES * LINE_WORDS))
        };
        let mut load = Load {
            uniform: None,
            stream: None,
            chase: None,
            pages: None,
            requests: None,
            states: kernels::generators(seed),
            next_block: 0,
            times: Vec::new(),
        };
        match kernel {
            Kernel::Uniform(bytes) => load.uniform = Some(memory(bytes)?),
            Kernel::Stream(bytes) => load.stream = Some(memory(bytes)?),
            Kernel::Mix(uniform, stream) => {
                (load.uniform, load.stream) = (Some(memory(uniform)?), Some(memory(stream)?));
            }
            Kernel::Chase(bytes) => {
                let (mut memory, words) = memory(bytes)?;
                let first = kernels::lay_chase(memory.words_mut(), words / LINE_WORDS, Places::EachLine);
                load.chase = Some((memory, first));
            }
            Kernel::Requests {
                bytes,
                lines,
                interval_ns,
            } => {
                load.uniform = Some(memory(bytes)?);
                let mean = Duration::from_nanos(interval_ns as u64);
                load.requests = Some((lines, Arrivals::of(mean, seed)));
            }
            Kernel::Pages(hot, all) => {
                let mut memory = Memory::map(all, Pages::Base, node)?;
                let words = all / 8;
                memory.words_mut()[..words].fill(0);
                load.pages = Some((memory, hot / 8));
            }
        }
        Ok(load)
    }

    /// Returns the address of the first thread's memory, and its size in bytes.
    fn place(&self) -> (usize, usize) {
        let memories = [&self.uniform, &self.stream, &self.chase, &self.pages];
        let first = memories.into_iter().flatten().next();
        first.map_or((0, 0), |(memory, _)| (memory.address(), memory.words().len() * 8))
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
        if let Some((memory, at)) = &mut self.chase {
            let mut place = [*at];
            kernels::chase(memory.words(), &mut place, BLOCK_LINES);
            *at = place[0];
            lines += BLOCK_LINES;
        }
        if let Some((memory, words)) = &mut self.pages {
            let page_words = sys::page_bytes() / 8;
            for word in memory.words_mut()[..*words].iter_mut().step_by(page_words) {
                *word = std::hint::black_box(*word).wrapping_add(1);
                lines += 1;
            }
        }
        lines
    }

    /// Runs for this long.
    fn run_for(&mut self, span: Duration) -> Ran {
        if self.requests.is_some() {
            return self.serve_for(span);
        }
        let (begin, from, mut lines) = (Instant::now(), sys::cpu_time(), 0);
        loop {
            lines += self.turn();
            let wall = begin.elapsed();
            if wall >= span {
                return Ran {
                    lines,
                    cpu: sys::cpu_time() - from,
                    wall,
                    request_ns: None,
                };
            }
        }
    }

    fn serve_for(&mut self, span: Duration) -> Ran {
        let begin = Instant::now();
        let (Some((each, arrivals)), Some((memory, words))) = (&mut self.requests, &self.uniform) else {
            return Ran::default();
        };
        let (each, rounds) = (*each, each.div_ceil(CHAINS));
        let (states, words) = (&mut self.states, &memory.words()[..*words]);
        self.times.clear();
        let (served, busy) = requests::serve(arrivals, span, &mut self.times, || {
            kernels::uniform(words, states, rounds);
        });
        let times = &mut self.times;
        Ran {
            lines: served * each,
            cpu: busy,
            wall: begin.elapsed(),
            request_ns: Some([requests::quantile(times, 0.5), requests::quantile(times, 0.99)]),
        }
    }
}

/// What a worker did while it measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ran {
    /// Number of cache lines that the worker accessed.
    pub lines: usize,
    /// The CPU time of the worker's threads, added up. Unlike the clock, it stands still while other processes have the CPU.
    pub cpu: Duration,
    /// The time on the clock that the worker took.
    pub wall: Duration,
    /// Median and 99th percentile of the requests' times in nanoseconds, of a server of requests.
    pub request_ns: Option<[u64; 2]>,
}

impl Ran {
    /// Returns the CPU time per line in nanoseconds; not finite without lines.
    pub fn ns_per_line(&self) -> f64 {
        self.cpu.as_nanos() as f64 / self.lines as f64
    }

    /// Returns the lines per second of the clock.
    pub fn lines_per_s(&self) -> f64 {
        self.lines as f64 / self.wall.as_secs_f64()
    }

    fn and(self, other: Ran) -> Ran {
        Ran {
            lines: self.lines + other.lines,
            cpu: self.cpu + other.cpu,
            wall: self.wall.max(other.wall),
            request_ns: self.request_ns.or(other.request_ns),
        }
    }

    fn written(&self) -> String {
        let Ran { lines, cpu, wall, .. } = self;
        let times = self
            .request_ns
            .map_or_else(String::new, |[p50, p99]| format!(" {p50} {p99}"));
        format!("{lines} {} {}{times}", cpu.as_nanos(), wall.as_nanos())
    }

    fn parse(text: &str) -> Option<Ran> {
        let numbers: Vec<u64> = text
            .split(' ')
            .map(|word| word.parse().ok())
            .collect::<Option<_>>()?;
        let (first, times) = numbers.split_at_checked(3)?;
        let request_ns = match times {
            [] => None,
            [p50, p99] => Some([*p50, *p99]),
            _ => return None,
        };
        let is_some = first.iter().all(|number| *number > 0);
        is_some.then_some(Ran {
            lines: usize::try_from(first[0]).ok()?,
            cpu: Duration::from_nanos(first[1]),
            wall: Duration::from_nanos(first[2]),
            request_ns,
        })
    }
}

/// Runs the worker's side: carries out orders until the input ends. There is one thread of the kernel, with memory of its own, on
/// each of these CPUs.
///
/// # Errors
/// Unavailable memory or CPU, unreadable orders, a closed output.
pub fn serve(
    kernel: Kernel,
    cpus: &[CpuId],
    node: Option<NodeId>,
    orders: impl BufRead,
    mut answers: impl Write,
) -> io::Result<()> {
    let load = |cpu: &CpuId| {
        sys::pin_to(*cpu)?;
        Load::of(kernel, node, u64::from(cpu.0) + 1)
    };
    let mut loads = cpus.iter().map(load).collect::<io::Result<Vec<Load>>>()?;
    let (address, bytes) = loads.first().map_or((0, 0), Load::place);
    writeln!(answers, "{SAYS}ready {address} {bytes}")?;
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
        let ran = all(&mut loads, cpus, [*warm, *measure, *tail])?;
        writeln!(answers, "{SAYS}{}", ran.written())?;
        answers.flush()?;
    }
    Ok(())
}

/// Runs all loads at the same time, each on its CPU.
fn all(loads: &mut [Load], cpus: &[CpuId], spans: [u64; 3]) -> io::Result<Ran> {
    let one = |load: &mut Load, cpu: CpuId| {
        sys::pin_to(cpu)?;
        let [warm, measure, tail] = spans.map(|ms| Duration::from_millis(ms.min(60_000)));
        load.run_for(warm);
        let ran = load.run_for(measure);
        load.run_for(tail);
        Ok::<Ran, io::Error>(ran)
    };
    if let ([load], [cpu]) = (&mut *loads, cpus) {
        return one(load, *cpu);
    }
    thread::scope(|scope| {
        let threads: Vec<_> = loads
            .iter_mut()
            .zip(cpus)
            .map(|(load, cpu)| scope.spawn(move || one(load, *cpu)))
            .collect();
        threads.into_iter().try_fold(Ran::default(), |sum, thread| {
            let ended = thread
                .join()
                .unwrap_or_else(|_| Err(io::Error::other("a thread panicked")));
            Ok(sum.and(ended?))
        })
    })
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

impl Spans {
    fn total(&self) -> Duration {
        Duration::from_millis(self.warm + self.measure + self.tail)
    }
}

/// The parent's side of a worker; killed when dropped.
#[derive(Debug)]
pub struct Worker {
    child: Child,
    orders: Box<dyn Orders>,
    answers: Receiver<String>,
    address: usize,
    bytes: usize,
    patience: Duration,
    /// How long the current run takes.
    run: Duration,
}

/// Where orders are sent.
trait Orders: Write + Send + std::fmt::Debug {}
impl<T: Write + Send + std::fmt::Debug> Orders for T {}

impl Worker {
    /// Starts a worker with this command, and waits until its memory is set up.
    ///
    /// # Errors
    /// A command that cannot be started, or a worker that ends at once; its message is on standard error.
    pub fn start(mut command: Command) -> io::Result<Worker> {
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        Worker::of(child, PATIENCE)
    }

    /// Takes over a process whose standard input and output are a worker's, or the console of a guest with one. Waits until it
    /// is ready, for at most `patience`.
    ///
    /// # Errors
    /// A process that ends or is silent.
    pub fn of(mut child: Child, patience: Duration) -> io::Result<Worker> {
        let pipes = child.stdin.take().zip(child.stdout.take());
        let Some((orders, answers)) = pipes else {
            let _ = child.kill();
            return Err(io::Error::other("a worker without pipes"));
        };
        let mut worker = Worker {
            child,
            orders: Box::new(orders),
            answers: lines_of(answers),
            address: 0,
            bytes: 0,
            patience,
            run: Duration::ZERO,
        };
        let answer = worker.answer()?;
        let place = answer
            .strip_prefix("ready ")
            .and_then(|rest| rest.split_once(' '))
            .and_then(|(address, bytes)| Some((address.parse().ok()?, bytes.parse().ok()?)));
        let other = || io::Error::other(format!("a worker said `{answer}` instead of `ready`"));
        (worker.address, worker.bytes) = place.ok_or_else(other)?;
        Ok(worker)
    }

    /// Returns the process's id.
    pub fn pid(&self) -> i32 {
        // Process ids of Linux are below 2^22.
        i32::try_from(self.child.id()).unwrap_or(i32::MAX)
    }

    /// Returns the address of the memory of the worker's first thread, in the worker's own address space, and the size in bytes.
    pub fn place(&self) -> (usize, usize) {
        (self.address, self.bytes)
    }

    /// Begins a run.
    ///
    /// # Errors
    /// A worker that has ended.
    pub fn run(&mut self, spans: Spans) -> io::Result<()> {
        self.run = spans.total();
        writeln!(self.orders, "run {} {} {}", spans.warm, spans.measure, spans.tail)?;
        self.orders.flush()
    }

    /// Waits for the end of the current run.
    ///
    /// # Errors
    /// A worker that has ended, or an invalid answer.
    pub fn ran(&mut self) -> io::Result<Ran> {
        let answer = self.answer()?;
        let other = || {
            io::Error::other(format!(
                "a worker said `{answer}` instead of lines and nanoseconds"
            ))
        };
        Ran::parse(&answer).ok_or_else(other)
    }

    /// Waits for the end of the current run, and returns the nanoseconds per line.
    ///
    /// # Errors
    /// A worker that has ended, or an invalid answer.
    pub fn ns_per_line(&mut self) -> io::Result<f64> {
        Ok(self.ran()?.ns_per_line())
    }

    fn answer(&mut self) -> io::Result<String> {
        // A guest that is emulated takes longer.
        let until = Instant::now() + self.patience + 3 * self.run;
        for _ in 0..LINES_MAX {
            let left = until.saturating_duration_since(Instant::now());
            match self.answers.recv_timeout(left) {
                Ok(line) => {
                    if let Some((_, answer)) = line.split_once(SAYS) {
                        return Ok(answer.trim_end().to_owned());
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(io::Error::other("a worker process ended early"));
                }
                Err(RecvTimeoutError::Timeout) => {
                    return Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        "a worker did not answer in time",
                    ));
                }
            }
        }
        Err(io::Error::other(format!(
            "a worker wrote more than {LINES_MAX} lines and no answer"
        )))
    }
}

/// Reads lines in a thread, which ends with the pipe or the receiver. A longer line is cut.
fn lines_of(pipe: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, lines) = sync_channel(64);
    thread::spawn(move || {
        let mut pipe = BufReader::new(pipe);
        let mut line = Vec::new();
        while (&mut pipe)
            .take(LINE_MAX)
            .read_until(b'\n', &mut line)
            .is_ok_and(|count| count > 0)
        {
            let text = String::from_utf8_lossy(&line).into_owned();
            line.clear();
            if sender.send(text).is_err() {
                break;
            }
        }
    });
    lines
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

    fn first_cpu() -> CpuId {
        let mask = rustix::thread::sched_getaffinity(None).unwrap();
        CpuId((0..1024).find(|cpu| mask.is_set(*cpu as usize)).unwrap())
    }

    const KERNELS: [Kernel; 6] = [
        Kernel::Uniform(1 << 16),
        Kernel::Stream(64),
        Kernel::Mix(1 << 16, 1 << 17),
        Kernel::Chase(1 << 16),
        Kernel::Requests {
            bytes: 1 << 16,
            lines: 10,
            interval_ns: 100_000,
        },
        Kernel::Pages(1 << 16, 1 << 17),
    ];

    #[test]
    fn a_worker_answers_each_order_and_ends_with_its_input() {
        for kernel in KERNELS {
            for cpus in [vec![first_cpu()], vec![first_cpu(); 2]] {
                let mut answers = Vec::new();
                let orders = &b"run 0 5 0\nrun 1 6 1\n"[..];
                serve(kernel, &cpus, None, orders, &mut answers).unwrap();
                let text = String::from_utf8(answers).unwrap();
                let lines: Vec<&str> = text
                    .lines()
                    .map(|line| line.strip_prefix(SAYS).unwrap())
                    .collect();
                assert_eq!(lines.len(), 3, "{text}");
                assert!(lines[0].starts_with("ready "), "{text}");
                let is_server = matches!(kernel, Kernel::Requests { .. });
                for line in &lines[1..] {
                    let ran = Ran::parse(line).unwrap_or_else(|| panic!("{kernel}: {text}"));
                    assert_eq!(ran.request_ns.is_some(), is_server, "{kernel}: {text}");
                    assert_eq!(ran.written(), *line);
                }
                assert!(serve(kernel, &cpus, None, &b"dance\n"[..], &mut Vec::new()).is_err());
            }
        }
    }

    #[test]
    fn turns_walk_through_all_of_a_stream() {
        let mut load = Load::of(Kernel::Stream(BLOCK_LINES * LINE_BYTES * 3), None, 1).unwrap();
        let lines: Vec<usize> = (0..4).map(|_| load.turn()).collect();
        assert_eq!((lines, load.next_block), (vec![BLOCK_LINES; 4], 1));
    }

    #[test]
    fn only_the_hot_pages_are_written_again() {
        let page = sys::page_bytes();
        let mut load = Load::of(Kernel::Pages(3 * page, 8 * page), None, 1).unwrap();
        assert_eq!(load.turn() + load.turn(), 6);
        let (memory, _) = load.pages.unwrap();
        let written: Vec<u64> = memory
            .words()
            .chunks(page / 8)
            .map(|page| page[0])
            .take(8)
            .collect();
        assert_eq!(written, [2, 2, 2, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn whatever_a_guest_writes_is_read_in_bounds_and_refused() {
        let said = |script: &str| {
            let mut command = Command::new("sh");
            command
                .args(["-c", script])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped());
            Worker::of(command.spawn().unwrap(), Duration::from_secs(10))
        };
        let boots = "echo booting; printf '\\377\\033[2J'; echo 'noise load> ready 4096 64'; read order; echo 'load> 5 6 7'";
        let mut worker = said(boots).unwrap();
        assert_eq!(worker.place(), (4096, 64));
        let spans = Spans {
            warm: 0,
            measure: 1,
            tail: 0,
        };
        worker.run(spans).unwrap();
        assert_eq!(worker.ran().unwrap().lines, 5);
        for bad in [
            "echo 'load> ready'",
            "echo 'load> ready -1 99999999999999999999999'",
            "yes",
            "head -c 100000000 /dev/zero",
            "true",
        ] {
            assert!(said(bad).is_err(), "{bad}");
        }
        for bad in [
            "",
            "1 2",
            "0 1 1",
            "1 1 1 1",
            "1 1 1 1 1 1",
            "x 1 1",
            "1 -1 1",
            "99999999999999999999 1 1",
        ] {
            assert_eq!(Ran::parse(bad), None, "{bad}");
        }
    }
}
