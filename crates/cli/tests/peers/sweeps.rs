//! Sweeps on a real scheduler: a separate Slurm on this machine, with its own ports, and its keys and state in a temporary
//! folder.
//!
//! Not part of `cargo test`: `scripts/sweeps-setup.sh` installs what it needs, and `make sweeps` runs these tests.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::{homenode, stderr, stdout, text};

/// A plan of 20 values and 10 seeds, so 200 runs. The seed decides when VMs arrive.
const PLAN: &str = r#"
scenario = "noisy.toml"
seeds = "1..10"
policies = ["default"]
[set]
"vm.fluid.permit" = "50k..3M/20"
"#;

/// Returns a scenario like the built-in `permits`, but longer and with random arrivals.
fn scenario() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/scenarios/permits.toml");
    let text = fs::read_to_string(path).unwrap();
    text.replace(
        "duration = \"30s\"",
        "duration = \"200s\"\narrival_jitter = \"3s\"",
    )
}

/// The programs of a cluster, which end when the value is dropped.
struct Cluster {
    folder: tempfile::TempDir,
    daemons: Vec<Child>,
}

fn free_ports() -> [u16; 2] {
    let held = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
    held.map(|port| port.local_addr().unwrap().port())
}

fn wait(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(
            begin.elapsed() < Duration::from_secs(120),
            "{what} takes too long"
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

impl Cluster {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn daemon(&mut self, program: &str, args: &[&str], log: &str) {
        let log = fs::File::create(self.path(log)).unwrap();
        let mut command = Command::new(program);
        command
            .args(args)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        self.daemons
            .push(command.spawn().expect("`make sweeps` installs it"));
    }

    fn start() -> Cluster {
        let folder = tempfile::tempdir().unwrap();
        let mut cluster = Cluster {
            folder,
            daemons: Vec::new(),
        };
        fs::set_permissions(cluster.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        for name in ["state", "spool"] {
            fs::create_dir(cluster.path(name)).unwrap();
        }
        let path = |name: &str| cluster.path(name).display().to_string();
        let (key, socket) = (path("munge.key"), path("munge.socket"));
        let mut bytes = [0_u8; 256];
        std::io::Read::read_exact(&mut fs::File::open("/dev/urandom").unwrap(), &mut bytes).unwrap();
        fs::write(&key, bytes).unwrap();
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
        let munge = [
            "--foreground".to_owned(),
            "--force".to_owned(),
            format!("--socket={socket}"),
            format!("--key-file={key}"),
            format!("--pid-file={}", path("munge.pid")),
            format!("--seed-file={}", path("munge.seed")),
        ];
        let [controller, node] = free_ports();
        let user = text(&Command::new("id").arg("-un").output().unwrap());
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        let conf = format!(
            "ClusterName=sweeps\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser={user}\nSlurmdUser={user}\n\
             SlurmctldPort={controller}\nSlurmdPort={node}\nAuthType=auth/munge\nAuthInfo=socket={socket}\nCryptoType=crypto/munge\n\
             StateSaveLocation={}\nSlurmdSpoolDir={}\nSlurmctldPidFile={}\nSlurmdPidFile={}\nProctrackType=proctrack/linuxproc\n\
             TaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/none\nSelectType=select/cons_tres\n\
             SelectTypeParameters=CR_CPU\nReturnToService=2\nMpiDefault=none\nSchedulerParameters=sched_interval=2,batch_sched_delay=0\n\
             MinJobAge=300\nKillWait=5\nNodeName=here NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2 Port={node}\n\
             PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=NO\n",
            path("state"),
            path("spool"),
            path("slurmctld.pid"),
            path("slurmd.pid"),
            user = user.trim(),
            host = host.trim(),
        );
        fs::write(cluster.path("slurm.conf"), conf).unwrap();
        let conf = path("slurm.conf");
        let args: Vec<&str> = munge.iter().map(String::as_str).collect();
        cluster.daemon("/usr/sbin/munged", &args, "munged.log");
        wait("munge", || Path::new(&socket).exists());
        cluster.daemon("/usr/sbin/slurmctld", &["-D", "-f", &conf], "slurmctld.log");
        cluster.daemon(
            "/usr/sbin/slurmd",
            &["-D", "-f", &conf, "-N", "here"],
            "slurmd.log",
        );
        let begin = Instant::now();
        while !stdout(&cluster.ask("sinfo", &["-h", "-o", "%T"])).contains("idle") {
            assert!(begin.elapsed() < Duration::from_secs(60), "{}", cluster.logs());
            std::thread::sleep(Duration::from_millis(200));
        }
        cluster
    }

    fn logs(&self) -> String {
        let log = |name: &str| fs::read_to_string(self.path(name)).unwrap_or_default();
        ["munged.log", "slurmctld.log", "slurmd.log"].map(log).join("\n")
    }

    /// Runs one of Slurm's programs.
    fn ask(&self, program: &str, args: &[&str]) -> Output {
        let mut command = Command::new(program);
        command
            .args(args)
            .env("SLURM_CONF", self.path("slurm.conf"))
            .current_dir(self.folder.path());
        command
            .stdin(Stdio::null())
            .output()
            .expect("`make sweeps` installs it")
    }

    /// Waits until `is_so` returns true. If that takes too long, panics with the state of the cluster.
    fn wait(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        let begin = Instant::now();
        while !is_so() {
            let queue = || text(&self.ask("squeue", &["-r", "-o", "%i %T %r %S"]));
            assert!(
                begin.elapsed() < Duration::from_secs(180),
                "{what} takes too long: {}\n{}",
                queue(),
                self.logs()
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn count(&self, state: &str) -> usize {
        text(&self.ask("squeue", &["-h", "-r", "-t", state, "-o", "%i"]))
            .lines()
            .count()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // The node's daemon ends first, and its jobs end with it. Each daemon is an unreaped child of this process, so its number
        // is not reused.
        self.ask(
            "scancel",
            &[
                "--user",
                text(&Command::new("id").arg("-un").output().unwrap()).trim(),
            ],
        );
        for daemon in self.daemons.iter_mut().rev() {
            let id = daemon.id().to_string();
            let _ = Command::new("kill").arg(&id).status();
            let begin = Instant::now();
            while daemon.try_wait().is_ok_and(|ended| ended.is_none())
                && begin.elapsed() < Duration::from_secs(20)
            {
                std::thread::sleep(Duration::from_millis(50));
            }
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

fn sweep(folder: &Path, args: &[&str]) -> Output {
    let mut command = homenode();
    command
        .arg("sweep")
        .args(args)
        .current_dir(folder)
        .stdin(Stdio::null());
    command.output().unwrap()
}

#[test]
fn slurm_gives_the_bytes_of_threads_with_a_part_cancelled_in_the_middle() {
    let cluster = Cluster::start();
    let folder = cluster.folder.path();
    fs::write(folder.join("noisy.toml"), scenario()).unwrap();
    fs::write(folder.join("plan.toml"), PLAN).unwrap();
    let made = |jobs: &str| {
        let file = format!("jobs{jobs}.parquet");
        let made = sweep(folder, &["plan.toml", "--jobs", jobs, "--parquet", &file]);
        assert_eq!((text(&made).as_str(), stderr(&made).as_str()), ("", ""));
        fs::read(folder.join(file)).unwrap()
    };
    let expected = made("2");
    assert!(expected == made("1"), "the number of jobs changes the bytes");

    let args = [
        "plan.toml",
        "--store",
        "store",
        "--slurm",
        "--shards",
        "4",
        "--at-once",
        "2",
        "--parquet",
        "slurm.parquet",
    ];
    let script = sweep(folder, &args);
    fs::write(folder.join("job.sh"), text(&script)).unwrap();
    text(&cluster.ask("sh", &["job.sh"]));
    let tasks = || {
        let files = fs::read_dir(folder.join("store")).unwrap().filter_map(Result::ok);
        files
            .filter(|file| file.file_name().to_string_lossy().ends_with(".json"))
            .count()
    };
    wait("the first task", || tasks() > 0);
    let running = text(&cluster.ask("squeue", &["-h", "-r", "-t", "R", "-o", "%i"]));
    let cancelled = running.lines().next().expect("a part runs").to_owned();
    text(&cluster.ask("scontrol", &["requeue", &cancelled]));
    // Slurm holds a requeued job back for two minutes.
    wait("the requeue", || {
        let now = ["update", &format!("JobId={cancelled}"), "StartTime=now"];
        text(&cluster.ask("squeue", &["-h", "-r", "-t", "PD", "-o", "%i"]))
            .lines()
            .any(|id| id == cancelled)
            && cluster.ask("scontrol", &now).status.success()
    });
    let missing = sweep(folder, &["merge", "store"]);
    assert_eq!(missing.status.code(), Some(1), "{}", stdout(&missing));
    assert!(
        stderr(&missing).contains("of 50 tasks are missing: task "),
        "{}",
        stderr(&missing)
    );
    cluster.wait("the array", || {
        cluster.count("R") + cluster.count("PD") + cluster.count("CG") == 0
            && folder.join("slurm.parquet").exists()
    });
    let restarts = text(&cluster.ask("scontrol", &["show", "job", &cancelled]));
    assert!(restarts.contains("Restarts=1"), "{restarts}");
    assert!(
        fs::read(folder.join("slurm.parquet")).unwrap() == expected,
        "Slurm changes the bytes"
    );

    // A cancelled part stays missing until the next run makes it.
    let script = text(&script)
        .replace("/store", "/other")
        .replace("slurm.parquet", "other.parquet");
    let kept = sweep(folder, &["plan.toml", "--store", "other", "--slurm"]);
    text(&kept);
    fs::write(folder.join("other.sh"), script).unwrap();
    let job = text(&cluster.ask("sbatch", &["--parsable", "other.sh"]));
    let part = format!("{}_1", job.trim());
    let other = || fs::read_dir(folder.join("other")).unwrap().filter_map(Result::ok);
    wait("a task of the second", || {
        other().any(|file| file.file_name().to_string_lossy().ends_with(".json"))
    });
    text(&cluster.ask("scancel", &[&part]));
    wait("the rest of the second", || {
        cluster.count("R") + cluster.count("PD") + cluster.count("CG") == 0
    });
    let missing = sweep(folder, &["merge", "other"]);
    assert_eq!(missing.status.code(), Some(1), "{}", stdout(&missing));
    let resumed = sweep(folder, &["plan.toml", "--store", "other", "--shard", "1/4"]);
    assert_eq!((text(&resumed).as_str(), stderr(&resumed).as_str()), ("", ""));
    text(&sweep(folder, &["merge", "other", "--parquet", "other.parquet"]));
    assert!(
        fs::read(folder.join("other.parquet")).unwrap() == expected,
        "a store that was taken up changes the bytes"
    );
}
