//! A guest's only program: a worker ([`homenode_load::worker`]) whose orders come over the guest's console.
//!
//! The kernel's command line says what to run: `homenode.load=KERNEL`, on all of the guest's CPUs. As the guest's init it never
//! exits, which would panic the guest's kernel; it turns the guest off instead.

use std::fs;
use std::io::{self, BufReader, Write as _};

use homenode_load::{Kernel, worker};
use homenode_units::CpuId;
use rustix::mount::{MountFlags, mount};
use rustix::system::{RebootCommand, reboot};

/// Key of the kernel's command line whose value names the load.
const KEY: &str = "homenode.load=";

fn main() {
    let served = run();
    if let Err(error) = served {
        // The console may be gone.
        let _ = writeln!(io::stdout(), "{}error {error}", worker::SAYS);
    }
    if std::process::id() == 1 {
        let _ = reboot(RebootCommand::PowerOff);
        loop {
            std::thread::park();
        }
    }
}

fn run() -> io::Result<()> {
    if std::process::id() == 1 {
        for (source, target) in [("proc", "/proc"), ("sysfs", "/sys")] {
            mount(source, target, source, MountFlags::empty(), None)?;
        }
    }
    let line = fs::read_to_string("/proc/cmdline")?;
    let text = line
        .split_ascii_whitespace()
        .find_map(|word| word.strip_prefix(KEY));
    let text =
        text.ok_or_else(|| io::Error::other(format!("the kernel's command line has no {KEY}KERNEL")))?;
    let kernel: Kernel = text.parse().map_err(io::Error::other)?;
    let count = std::thread::available_parallelism()?.get();
    let cpus: Vec<CpuId> = (0..count).map(|cpu| CpuId(cpu as u32)).collect();
    let orders = BufReader::new(io::stdin());
    worker::serve(kernel, &cpus, None, orders, io::stdout())
}
