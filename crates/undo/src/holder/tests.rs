use std::process::{Child, Command, Stdio};

use rustix::fs::FlockOperation;

use super::*;

/// A process with the given arguments that holds a lock through an inherited descriptor; killed when dropped.
struct Other(Child);

impl Other {
    /// `cat guard -` waits forever on a pipe, and its first argument is that of a guard.
    fn waits(arguments: &[&str], lock: &File) -> Other {
        let mut command = Command::new("cat");
        command.args(arguments).current_dir("/");
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::from(lock.try_clone().unwrap()));
        Other(command.stderr(Stdio::null()).spawn().unwrap()).begun()
    }

    /// `yes guard` runs without end.
    fn runs(lock: &File) -> Other {
        let mut command = Command::new("yes");
        command.arg(GUARD).stdin(Stdio::from(lock.try_clone().unwrap()));
        Other(command.stdout(Stdio::null()).spawn().unwrap()).begun()
    }

    /// Waits until the process has its arguments: its parent may continue before that.
    fn begun(self) -> Other {
        let cmdline = format!("/proc/{}/cmdline", self.0.id());
        while fs::read(&cmdline).unwrap().is_empty() {
            std::thread::yield_now();
        }
        self
    }

    /// The process's record, as the guard of a dead agent.
    fn as_guard(&self, state: &Path) -> Holder {
        let pid = self.0.id().cast_signed();
        let process = task::process(Path::new("/"), pid).unwrap().unwrap();
        let program = FileId::at(&PathBuf::from(format!("/proc/{pid}/exe")));
        Holder {
            pid,
            start_ticks: process.start_ticks,
            role: Role::Guard {
                agent: Some(dead()),
                program,
            },
            ..Holder::own(state)
        }
    }

    fn is_alive(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A dead process, whose number another process has now.
fn dead() -> Process {
    Process {
        pid: std::process::id().cast_signed(),
        start_ticks: 1,
    }
}

/// A locked file; children inherit and share the lock.
fn locked(dir: &Path) -> File {
    let lock = File::create_new(dir.join(format!("{:?}", Instant::now()))).unwrap();
    rustix::fs::flock(&lock, FlockOperation::NonBlockingLockShared).unwrap();
    lock
}

#[test]
fn a_silent_guard_of_a_dead_agent_is_ended_and_no_other_process() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path();
    let lock = locked(state);
    let mut guard = Other::waits(&[GUARD, "-"], &lock);
    let mut bystander = Other::waits(&["-", GUARD], &lock);
    let genuine = guard.as_guard(state);
    let of = |agent, program| Role::Guard { agent, program };
    let own = Holder::own(state).process();
    let Role::Guard { program, .. } = genuine.role.clone() else {
        panic!("a guard");
    };
    let unlike = |change: &dyn Fn(&mut Holder)| {
        let mut holder = genuine.clone();
        change(&mut holder);
        holder
    };
    let own_program = FileId::at(Path::new("/proc/self/exe"));
    for (why, holder) in [
        ("its number is another's now", unlike(&|it| it.start_ticks += 1)),
        (
            "another program",
            unlike(&|it| it.role = of(Some(dead()), own_program)),
        ),
        ("no program", unlike(&|it| it.role = of(Some(dead()), None))),
        ("its agent lives", unlike(&|it| it.role = of(Some(own), program))),
        ("its agent is unknown", unlike(&|it| it.role = of(None, program))),
        ("an agent", unlike(&|it| it.role = Role::Agent)),
        (
            "another state directory",
            unlike(&|it| it.state = "/elsewhere".into()),
        ),
        ("no guard by its arguments", bystander.as_guard(state)),
    ] {
        let mut watch = Watch::new(&lock, state, Duration::ZERO);
        assert!(!watch.look([holder]), "{why}");
        assert!(guard.is_alive() && bystander.is_alive(), "{why}");
        assert_eq!((watch.ended.len(), watch.stuck), (0, None), "{why}");
    }
    // This guard holds a lock other than the wanted one.
    let another = locked(state);
    let mut watch = Watch::new(&another, state, Duration::ZERO);
    watch.look([genuine.clone()]);
    assert!(guard.is_alive() && watch.ended.is_empty());
    // The guard is watched first, so that it has a chance to show that it is alive.
    let mut watch = Watch::new(&lock, state, Duration::from_secs(3600));
    watch.look([genuine.clone()]);
    assert!(guard.is_alive() && watch.ended.is_empty());
    let mut watch = Watch::new(&lock, state, Duration::ZERO);
    watch.look([genuine.clone()]);
    assert!(!guard.is_alive());
    assert!(
        watch.ended[0].contains(&genuine.pid.to_string()),
        "{:?}",
        watch.ended
    );
    watch.look([genuine]);
    assert_eq!(watch.ended.len(), 1, "once");
}

#[test]
fn a_guard_that_runs_shows_it_and_one_that_is_stopped_is_ended_soon() {
    let dir = tempfile::tempdir().unwrap();
    let lock = locked(dir.path());
    let mut guard = Other::runs(&lock);
    let holder = guard.as_guard(dir.path());
    let first = Signs::of(holder.pid).unwrap();
    while Signs::of(holder.pid).unwrap() == first {
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut watch = Watch::new(&lock, dir.path(), Duration::from_secs(3600));
    assert!(!watch.look([holder.clone()]), "nothing speaks for waiting on");
    rustix::process::kill_process(Pid::from_child(&guard.0), Signal::STOP).unwrap();
    while !Signs::of(holder.pid).unwrap().is_stopped {
        std::thread::sleep(Duration::from_millis(5));
    }
    while watch.look([holder.clone()]) {
        assert!(guard.is_alive() || !watch.ended.is_empty());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(!guard.is_alive());
    assert!(watch.ended[0].contains("stopped"), "{:?}", watch.ended);
}

#[test]
fn a_record_that_is_not_ours_or_says_nothing_names_no_guard() {
    let dir = tempfile::tempdir().unwrap();
    let own = Holder::own_guard(dir.path(), Some(dead()));
    let open = || StateDir::open(dir.path()).unwrap();
    let record = Record::begin(open(), &own);
    assert_eq!(guards(&open()), std::slice::from_ref(&own));
    let _ = open().replace("guard.2", b"{").unwrap();
    let forged = open();
    let _ = forged.replace("guard.3", own.text().as_bytes()).unwrap();
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(forged.path_of("guard.3"), Some(12345), None).unwrap();
    } else {
        fs::hard_link(forged.path_of("guard.3"), forged.path_of("other")).unwrap();
    }
    assert_eq!(guards(&open()), [own]);
    drop(record);
    assert_eq!(guards(&open()), []);
    forget_guards(&open());
    assert!(open().names(RECORD).is_empty());
}

#[test]
fn a_holder_that_an_older_agent_wrote_is_an_agent() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = File::create_new(dir.path().join("lock")).unwrap();
    file.write_all(br#"{"pid": 7, "start_ticks": 8, "state": "/run/homenode"}"#)
        .unwrap();
    let mut file = File::open(dir.path().join("lock")).unwrap();
    let holder = Holder::read(&mut file).unwrap();
    assert_eq!(
        (holder.pid, holder.role, holder.journal),
        (7, Role::Agent, JournalWas::Over)
    );
}
