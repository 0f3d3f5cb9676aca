//! Debian's programs under the plugin: what PML and PRL would log of them, compared with all memory that they use.
//!
//! # Choices, made before any program was run
//!
//! - *Input* is generated here, always the same, and small enough to be emulated in a minute or two. It is not PARSEC's.
//! - *Time.* A program is watched from its start to its end, in [`INTERVALS`] intervals (mu) of the same length. PRL's other
//!   parameters are the paper's, tau 50 and omega four intervals.
//! - *PML* shows the pages that were written, by any writer: the kernel, too, writes when it copies a file into a page that a
//!   program uses. PML starts again in each interval, since a client that asks for a VM's need does so in mid-run: a page that
//!   was written once, long ago, and only read since would not be logged. Both sums are over all intervals. The alternative,
//!   all pages written from the program's start to its end, is recorded as well.
//! - *What a processor would do in minutes* takes hours here: a run corresponds to about a second. A tau of 50 is therefore
//!   hard to reach, so everything that PRL logged is recorded next to its estimate.
//! - *Pages* are those of a program's data (marks of the lower half of addresses). Pages that it only executes, and the
//!   kernel's pages, are counted separately.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use homenode_formats::measured::{self, Measured, PROGRAMS_FILE, Prl};
use homenode_formats::page_log::{Marks, Window};
use homenode_testbed_guest::{Behaviour, COMMAND_RUN, MARKER_RAN};
use homenode_units::Ns;
use serde_json::Value;

use super::pages::{Logged, estimates, of};
use crate::outside::plain::{Outside, whole_log};
use crate::outside::program_image::{INPUT, Image};

/// Number of intervals, as in claim `prl.accuracy-hpl`.
const INTERVALS: u64 = 12;

/// A program, its input and its command line.
struct Program {
    name: &'static str,
    /// Whether the program is part of PARSEC.
    parsec: bool,
    /// The Debian package that has it.
    package: &'static str,
    /// Files of this machine, and their names in the guest.
    files: &'static [(&'static str, &'static str)],
    input: fn(&mut Image, &Path) -> anyhow::Result<()>,
    /// The shell command line that runs it.
    command: &'static str,
}

const PROGRAMS: [Program; 8] = [
    Program {
        name: "x264",
        parsec: true,
        package: "x264",
        files: &[("/usr/bin/x264", "/usr/bin/x264")],
        input: |image, _| {
            image.add("/input/video.y4m", video(640, 360, 24));
            Ok(())
        },
        // The options are PARSEC's own, as far as this version of x264 still has them.
        command: "x264 --quiet --qp 20 --partitions b8x8,i4x4 --ref 5 --direct auto --b-pyramid normal --weightb --no-fast-pskip \
                  --me umh --subme 7 --threads 1 -o /tmp/video.264 video.y4m",
    },
    Program {
        name: "vips",
        parsec: true,
        package: "libvips-tools",
        files: &[("/usr/bin/vips", "/usr/bin/vips")],
        input: |image, _| {
            image.add("/input/picture.ppm", picture(2336, 2336));
            Ok(())
        },
        // The picture has the size of PARSEC's medium input. Each stage of PARSEC's pipeline is a command: crop, shrink,
        // adjust, sharpen.
        command: "vips crop picture.ppm /tmp/1.v 100 100 2136 2136 && vips affine /tmp/1.v /tmp/2.v '0.9 0 0 0.9' \
                  && vips colourspace /tmp/2.v /tmp/3.v lab && vips linear /tmp/3.v /tmp/4.v '1.05 1 1' '2 0 0' \
                  && vips sharpen /tmp/4.v /tmp/5.v",
    },
    Program {
        name: "bzip2",
        parsec: false,
        package: "bzip2",
        files: &[("/bin/bzip2", "/usr/bin/bzip2")],
        input: |image, _| {
            image.add("/input/text", text(12 << 20));
            Ok(())
        },
        command: "bzip2 -9 -c text >/tmp/text.bz2 && bzip2 -d -c /tmp/text.bz2 >/dev/null",
    },
    Program {
        name: "sysbench-read",
        parsec: false,
        package: "sysbench",
        files: &[("/usr/bin/sysbench", "/usr/bin/sysbench")],
        input: |_, _| Ok(()),
        command: "sysbench memory --memory-block-size=32M --memory-total-size=40G --memory-oper=read --time=0 run",
    },
    Program {
        name: "sysbench-write",
        parsec: false,
        package: "sysbench",
        files: &[("/usr/bin/sysbench", "/usr/bin/sysbench")],
        input: |_, _| Ok(()),
        command: "sysbench memory --memory-block-size=32M --memory-total-size=40G --memory-oper=write --time=0 run",
    },
    Program {
        name: "redis",
        parsec: false,
        package: "redis-tools",
        // `redis-check-rdb` and the server are one program, which behaves according to the name that it is called by.
        files: &[
            ("/usr/bin/redis-check-rdb", "/usr/bin/redis-server"),
            ("/usr/bin/redis-benchmark", "/usr/bin/redis-benchmark"),
            ("/usr/bin/redis-cli", "/usr/bin/redis-cli"),
        ],
        input: |_, _| Ok(()),
        command: "redis-server --port 0 --unixsocket /tmp/redis --save '' --daemonize yes >/dev/null && busybox sleep 3 \
                  && redis-benchmark -s /tmp/redis -t set,get -n 30000 -r 20000 -d 1024 -q && redis-cli -s /tmp/redis shutdown nosave",
    },
    Program {
        name: "jvm",
        parsec: false,
        package: "openjdk-17-jre-headless",
        files: &[(
            "/usr/lib/jvm/java-17-openjdk-amd64/bin/java",
            "/usr/lib/jvm/java-17-openjdk-amd64/bin/java",
        )],
        input: java,
        command: "/usr/lib/jvm/java-17-openjdk-amd64/bin/java -XX:+UseSerialGC -Xmx128m -cp /input Sessions",
    },
    Program {
        name: "hpcc",
        parsec: false,
        package: "hpcc",
        files: &[("/usr/bin/hpcc", "/usr/bin/hpcc")],
        input: hpcc,
        // These variables let the program start without a launcher and without a network.
        command: "cd /tmp && busybox cp /input/hpccinf.txt . && OMPI_MCA_ess_singleton_isolated=1 OMPI_MCA_pmix=isolated OMPI_MCA_btl=self \
                  OMPI_MCA_pml=ob1 hpcc && busybox grep -q '1 tests completed and passed' hpccoutf.txt",
    },
];

/// Runs each program, and records its figures.
pub(super) fn log(outside: &mut Outside<'_>) -> anyhow::Result<()> {
    let mut programs = Vec::new();
    for program in &PROGRAMS {
        let measured = run(outside, program).with_context(|| program.name)?;
        outside.note(line(&measured));
        programs.push(measured);
    }
    let measured = Measured::new(
        package("qemu-system-x86")?,
        outside.workshop.release().to_owned(),
        "i7_pml".to_owned(),
        INTERVALS,
        programs,
    );
    // The log is outside the case's own directory, which is removed when the case passes.
    let file = outside
        .workshop
        .dir
        .join(Path::new(PROGRAMS_FILE).file_name().unwrap_or_default());
    fs::write(&file, measured.to_toml()).with_context(|| format!("cannot write {}", file.display()))?;
    outside.note(format!("{}: copy it to {PROGRAMS_FILE}", file.display()));
    Ok(())
}

fn run(outside: &mut Outside<'_>, program: &Program) -> anyhow::Result<measured::Program> {
    let mut image = Image::with_shell()?;
    for (file, name) in program.files {
        image.add_program(Path::new(file), Path::new(name))?;
    }
    (program.input)(&mut image, outside.dir)?;
    let initramfs = outside.dir.join(format!("{}.initramfs", program.name));
    image.write_behind(&outside.workshop.initramfs, &initramfs)?;
    let how = "logs=walks,exact=yes,window-ms=250";
    let mut logged = Logged::boot_from(outside, &initramfs, program.name, Behaviour::idle(), how)?;
    logged.next(program.name)?;
    let command = program.command;
    logged.guest.say(&format!("{COMMAND_RUN}cd {INPUT}; {command}"))?;
    let ran = outside.wait_for(&logged.guest, MARKER_RAN)?;
    logged.next("between")?;
    ensure!(
        ran.ends_with("status=0"),
        "the program in the guest failed ({ran}): {}",
        logged.guest.console().display()
    );
    let path = logged.log.clone();
    outside.end(logged.guest)?;
    fs::remove_file(initramfs)?;

    let log = whole_log(&path)?;
    let windows: Vec<&Window> = log
        .windows
        .iter()
        .filter(|window| window.label == program.name)
        .collect();
    let (first, last) = windows
        .first()
        .zip(windows.last())
        .context("the page log has no complete window")?;
    let took = Ns(last.end_ns - first.begin_ns);
    let mu = Ns(took.0.div_ceil(INTERVALS));
    let said = estimates(outside, &path, program.name, Duration::from_nanos(mu.0))?;
    let whole = Pages::of(&windows);
    let interval = |window: &&Window| (window.begin_ns - first.begin_ns) / mu.0;
    let intervals: Vec<Pages> = windows
        .chunk_by(|one, next| interval(one) == interval(next))
        .map(Pages::of)
        .collect();
    Ok(measured::Program {
        name: program.name.to_owned(),
        parsec: program.parsec,
        package: package(program.package)?,
        command: command.to_owned(),
        seconds: took.as_secs_f64(),
        used: whole.used,
        written: whole.written,
        logged: whole.logged,
        code: whole.code,
        kernel: whole.kernel,
        intervals_used: intervals.iter().map(|pages| pages.used).sum(),
        intervals_written: intervals.iter().map(|pages| pages.written).sum(),
        intervals_logged: intervals.iter().map(|pages| pages.logged).sum(),
        prl: prl(&said, "prl", mu)?,
        prl_repaired: prl(&said, "prl-repaired", mu)?,
    })
}

/// Numbers of distinct pages.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Pages {
    used: u64,
    written: u64,
    logged: u64,
    code: u64,
    kernel: u64,
}

impl Pages {
    /// Counts the pages of these windows, with all marks of a page combined, by the rules of `homenode wss --log`.
    fn of(windows: &[&Window]) -> Pages {
        // For each frame its marks, and whether it was logged.
        let mut frames: BTreeMap<u32, (u8, bool)> = BTreeMap::new();
        for row in windows.iter().flat_map(|window| &window.rows) {
            let (marks, logged) = frames.entry(row.frame).or_default();
            *marks |= row.marks.0;
            *logged |= row.count > 0;
        }
        let count = |holds: fn(Marks, bool) -> bool| {
            let frames = frames
                .values()
                .filter(|(marks, logged)| holds(Marks(*marks), *logged));
            frames.count() as u64
        };
        Pages {
            used: count(|marks, _| marks.0 & Marks::USED != 0),
            written: count(|marks, _| marks.0 & Marks::USED != 0 && marks.written()),
            logged: count(|marks, logged| logged && marks.0 & Marks::USED != 0),
            code: count(|marks, _| marks.0 & Marks::PROGRAM == Marks::FETCHED),
            kernel: count(|marks, _| marks.0 & Marks::PROGRAM == 0 && marks.used()),
        }
    }
}

/// Returns PRL's estimate from the output of `homenode wss`.
fn prl(said: &Value, estimator: &str, mu: Ns) -> anyhow::Result<Prl> {
    let said = of(said, estimator)?;
    let number = |name: &str| {
        let number = said[name].as_f64();
        number.with_context(|| format!("{estimator}: {name} is {}", said[name]))
    };
    let pages = |name: &str| number(name).map(|bytes| (bytes / 4096.0) as u64);
    Ok(Prl {
        settled: said["settled"] == "yes",
        after: number("window_s")? / mu.as_secs_f64(),
        hot: pages("program_bytes")?,
        used: pages("truth_program_bytes")?,
        kernel: pages("kernel_bytes")?,
    })
}

fn line(program: &measured::Program) -> String {
    let mb = |pages: u64| pages as f64 / 256.0;
    let percent = |part: u64, whole: u64| 100.0 * part as f64 / whole.max(1) as f64;
    let measured::Program {
        name,
        seconds,
        used,
        written,
        logged,
        code,
        kernel,
        intervals_used,
        intervals_written,
        intervals_logged,
        prl,
        prl_repaired,
        ..
    } = program;
    format!(
        "{name}: {seconds:.0} s; used {:.1} MB, written {:.1} MB ({:.1} %, in intervals {:.1} %), logged by PRL {:.1} % (in intervals {:.1} %); \
         code {:.1} MB, kernel {:.1} MB; PRL {:.1} of {:.1} MB \
         (settled: {}, after {:.1} intervals), repaired {:.1} of {:.1} MB",
        mb(*used),
        mb(*written),
        percent(*written, *used),
        percent(*intervals_written, *intervals_used),
        percent(*logged, *used),
        percent(*intervals_logged, *intervals_used),
        mb(*code),
        mb(*kernel),
        mb(prl.hot),
        mb(prl.used),
        prl.settled,
        prl.after,
        mb(prl_repaired.hot),
        mb(prl_repaired.used),
    )
}

/// Returns the name of a package with its version.
fn package(name: &str) -> anyhow::Result<String> {
    let output = Command::new("dpkg-query")
        .args(["--show", "--showformat", "${Package} ${Version}", name])
        .output()
        .context("cannot start dpkg-query")?;
    ensure!(
        output.status.success(),
        "{name} is not installed: run scripts/testbed-setup.sh --programs"
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A reproducible sequence of random numbers.
struct Noise(u64);

impl Noise {
    fn next(&mut self, below: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        ((self.0 >> 33) % u64::from(below)) as u32
    }
}

/// Returns a pixel of an image that resembles a photograph: slopes, edges and grain, moved `shift` pixels to the right.
fn grey(noise: &mut Noise, x: usize, y: usize, shift: usize) -> u8 {
    let x = x + shift;
    let slope = (x / 4 + y / 3) % 160;
    let edge = if (x / 48 + y / 40).is_multiple_of(3) {
        60
    } else {
        0
    };
    (slope + edge + noise.next(16) as usize) as u8
}

/// Returns a video in YUV4MPEG2 whose image moves to the right by three pixels a frame.
fn video(width: usize, height: usize, frames: usize) -> Vec<u8> {
    let mut noise = Noise(1);
    let mut bytes = format!("YUV4MPEG2 W{width} H{height} F25:1 Ip A1:1 C420jpeg\n").into_bytes();
    for frame in 0..frames {
        bytes.extend_from_slice(b"FRAME\n");
        for (width, height) in [(width, height), (width / 2, height / 2), (width / 2, height / 2)] {
            let pixels = (0..width * height).map(|at| grey(&mut noise, at % width, at / width, 3 * frame));
            bytes.extend(pixels);
        }
    }
    bytes
}

/// Returns a picture in PPM.
fn picture(width: usize, height: usize) -> Vec<u8> {
    let mut noise = Noise(2);
    let mut bytes = format!("P6\n{width} {height}\n255\n").into_bytes();
    bytes.extend(
        (0..3 * width * height).map(|at| grey(&mut noise, at / 3 % width, at / 3 / width, 40 * (at % 3))),
    );
    bytes
}

/// Returns a text of words, some of which are much more frequent than others.
fn text(length: usize) -> Vec<u8> {
    let mut noise = Noise(3);
    let words: Vec<Vec<u8>> = (0..5000)
        .map(|_| {
            let letters = 2 + noise.next(9);
            (0..letters).map(|_| b'a' + noise.next(26) as u8).collect()
        })
        .collect();
    let mut bytes = Vec::with_capacity(length + 16);
    while bytes.len() < length {
        let up_to = 1 + noise.next(words.len() as u32);
        bytes.extend_from_slice(&words[noise.next(up_to) as usize]);
        bytes.push(if noise.next(12) == 0 { b'\n' } else { b' ' });
    }
    bytes.truncate(length);
    bytes
}

/// Adds a JVM, and a program that it runs.
fn java(image: &mut Image, dir: &Path) -> anyhow::Result<()> {
    let source = dir.join("Sessions.java");
    fs::write(&source, include_str!("../../programs/Sessions.java"))?;
    let status = Command::new("javac").arg("-d").arg(dir).arg(&source).status();
    let status = status.context("cannot start javac: run scripts/testbed-setup.sh --programs")?;
    ensure!(status.success(), "javac: {status}");
    image.add("/input/Sessions.class", fs::read(dir.join("Sessions.class"))?);
    let home = Path::new("/usr/lib/jvm/java-17-openjdk-amd64");
    image.add_program(
        &home.join("lib/server/libjvm.so"),
        &home.join("lib/server/libjvm.so"),
    )?;
    image.add_tree(&home.join("lib"), &["ct.sym", "src.zip"])?;
    image.add_tree(&home.join("conf"), &[])
}

/// Adds HPCC's parameters, and the files that Open MPI loads when it runs.
fn hpcc(image: &mut Image, _: &Path) -> anyhow::Result<()> {
    image.add(
        "/input/hpccinf.txt",
        include_bytes!("../../programs/hpccinf.txt").to_vec(),
    );
    image.add_tree(Path::new("/etc/openmpi"), &[])?;
    image.add_tree(Path::new("/usr/lib/x86_64-linux-gnu/openmpi/lib/openmpi3"), &[])
}
