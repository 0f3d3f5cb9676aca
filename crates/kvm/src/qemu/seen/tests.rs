use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::time::Instant;

use homenode_kernel::fake::Tree;

use super::*;

/// A process whose root is in the tree, with this user and a group.
fn seen_by(user: u32, more: &str) -> (Tree, Eyes) {
    let tree = Tree::new(&[("its/etc/vm.conf", "[name]\nguest = \"x\"\n")]);
    tree.write(
        "proc/50/status",
        &format!("PPid:\t7\nUid:\t{user}\t{user}\t{user}\t{user}\nGid:\t77\t77\t77\t77\n{more}"),
    );
    for dir in ["", "its", "its/etc"] {
        mode(&tree, dir, 0o755);
    }
    mode(&tree, "its/etc/vm.conf", 0o644);
    symlink("../../its", tree.root().join("proc/50/root")).unwrap();
    let eyes = Eyes {
        root: tree.root().to_owned(),
        pid: 50,
        changes_root: false,
    };
    (tree, eyes)
}

fn mode(tree: &Tree, path: &str, mode: u32) {
    std::fs::set_permissions(tree.root().join(path), std::fs::Permissions::from_mode(mode)).unwrap();
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn why(eyes: &Eyes, path: &str) -> String {
    let begun = Instant::now();
    let text = eyes.text_in_time(path, None, 50);
    assert!(begun.elapsed() < Duration::from_secs(5), "{path} is waited for");
    text.expect_err(path).to_string()
}

#[test]
fn nothing_but_a_regular_file_is_read_and_nothing_is_waited_for() {
    let (tree, eyes) = seen_by(rustix::process::geteuid().as_raw(), "");
    assert!(
        eyes.text_in_time("/etc/vm.conf", None, 50)
            .unwrap()
            .contains("guest")
    );
    assert!(
        eyes.text("etc/../../etc/./vm.conf", None, 50).is_ok(),
        "above its root is its root"
    );
    let its = tree.root().join("its");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        its.join("fifo"),
        FileType::Fifo,
        Mode::from(0o666),
        0,
    )
    .unwrap();
    std::os::unix::net::UnixListener::bind(its.join("socket")).unwrap();
    symlink("/fifo", its.join("link")).unwrap();
    symlink("/loop", its.join("loop")).unwrap();
    for (path, word) in [
        ("/fifo", "not a regular file"),
        ("/link", "not a regular file"),
        ("/socket", "not a regular file"),
        ("/etc", "directory"),
        ("/none", "No such file"),
        ("/etc/vm.conf/x", "Not a directory"),
        ("/loop", "symbolic links"),
    ] {
        assert!(why(&eyes, path).contains(word), "{path}: {}", why(&eyes, path));
    }
    let large = "x".repeat(FILE_BYTES_MAX as usize + 1);
    tree.write("its/large", &large);
    assert!(why(&eyes, "/large").contains("larger than"));
    assert!(why(&eyes, &"../".repeat(2 * PARTS_MAX)).contains("too long"));
    // Devices, and the kernel's files as this process itself sees them.
    let own = Eyes {
        root: PathBuf::from("/"),
        pid: std::process::id().cast_signed(),
        changes_root: false,
    };
    for (path, word) in [
        ("/proc/self/status", "file system of the kernel"),
        ("/sys/kernel/notes", "file system of the kernel"),
        ("/dev/null", "not a regular file"),
    ] {
        if Path::new(path).exists() {
            assert!(why(&own, path).contains(word), "{path}: {}", why(&own, path));
        }
    }
}

#[test]
fn a_file_is_read_with_the_rights_of_the_user_that_the_process_runs_as() {
    if !is_root() {
        return; // only root can read what others may not
    }
    let (tree, eyes) = seen_by(107, "Groups:\t78\n");
    let read = || eyes.text("/etc/vm.conf", None, 50);
    let refused = |what: &str| {
        let why = read().expect_err(what).to_string();
        assert!(why.contains("may not read it"), "{what}: {why}");
    };
    assert!(read().is_ok());
    let file = tree.root().join("its/etc/vm.conf");
    let chown = |user: u32, group: u32| std::os::unix::fs::chown(&file, Some(user), Some(group)).unwrap();
    mode(&tree, "its/etc/vm.conf", 0o640);
    refused("root's alone");
    for group in [77, 78] {
        chown(0, group);
        assert!(read().is_ok(), "its group {group} may");
    }
    mode(&tree, "its/etc/vm.conf", 0o604);
    refused("its group may less than others, and it is of the group");
    chown(107, 0);
    mode(&tree, "its/etc/vm.conf", 0o400);
    assert!(read().is_ok(), "its own");
    mode(&tree, "its/etc/vm.conf", 0o044);
    refused("others may, and its owner not");
    // The process may not search a directory on the path, also if the path goes through a link.
    mode(&tree, "its/etc/vm.conf", 0o444);
    mode(&tree, "its/etc", 0o700);
    refused("the directory is root's");
    symlink("etc/vm.conf", tree.root().join("its/link")).unwrap();
    assert!(eyes.text("/link", None, 50).is_err());
    assert!(
        eyes.open("/etc/vm.conf").is_ok(),
        "what is not read is found all the same"
    );
    mode(&tree, "its/etc", 0o711);
    assert!(read().is_ok() && eyes.text("/link", None, 50).is_ok());
    // If a process can become several users, each of them needs permission.
    let status = "Uid:\t107\t0\t0\t0\nGid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\n";
    tree.write("proc/50/status", status);
    chown(0, 0);
    mode(&tree, "its/etc/vm.conf", 0o400);
    refused("one of its users may not");
}

#[test]
fn roots_process_reads_what_root_may_unless_it_gave_that_up() {
    if !is_root() {
        return; // only root can read what others may not
    }
    for (capabilities, may_read) in [
        ("000001ffffffffff", true),
        ("0000000000000004", true),
        ("0000000000800000", false),
    ] {
        let (tree, eyes) = seen_by(0, &format!("CapEff:\t{capabilities}\n"));
        std::os::unix::fs::chown(tree.root().join("its/etc/vm.conf"), Some(1000), Some(1000)).unwrap();
        mode(&tree, "its/etc/vm.conf", 0o600);
        assert_eq!(
            eyes.text("/etc/vm.conf", None, 50).is_ok(),
            may_read,
            "{capabilities}"
        );
    }
}

/// As in Incus, whose QEMUs give up root's rights once they have read their options.
#[test]
fn what_root_put_beside_the_pid_file_of_the_process_is_read_after_it_gave_up_its_rights() {
    if !is_root() {
        return; // only root can read what others may not
    }
    let (tree, eyes) = seen_by(65534, "");
    tree.write("its/run/v1/qemu.conf", "[name]\nguest = \"v1\"\n");
    tree.write("its/run/v1/qemu.pid", "50\n");
    let read = |own: i32| eyes.text("/run/v1/qemu.conf", Some("/run/v1/qemu.pid"), own);
    mode(&tree, "its/run/v1", 0o700);
    mode(&tree, "its/run/v1/qemu.conf", 0o640);
    mode(&tree, "its/run/v1/qemu.pid", 0o600);
    assert!(read(50).unwrap().contains("v1"));
    assert!(read(51).is_err(), "the pid file is another process's");
    assert!(eyes.text("/run/v1/qemu.conf", None, 50).is_err());
    assert!(
        eyes.text("/run/v1/qemu.conf", Some("/run/v1/qemu.conf"), 50)
            .is_err()
    );
    for (path, wrong, right) in [
        ("its/run/v1", 0o777, 0o700),
        ("its/run/v1/qemu.conf", 0o660, 0o640),
        ("its/run/v1/qemu.pid", 0o622, 0o600),
    ] {
        mode(&tree, path, wrong);
        assert!(read(50).is_err(), "{path} is not root's alone to write");
        mode(&tree, path, right);
        assert!(read(50).is_ok());
    }
    let pid_file = tree.root().join("its/run/v1/qemu.pid");
    std::os::unix::fs::chown(&pid_file, Some(65534), None).unwrap();
    assert!(read(50).is_err(), "the process wrote it itself");
    std::fs::remove_file(&pid_file).unwrap();
    tree.write("its/mine.pid", "50\n");
    symlink("../../mine.pid", &pid_file).unwrap();
    assert!(read(50).is_err(), "a link is no pid file of QEMU's");
}

#[test]
fn a_process_that_changed_its_root_opened_its_files_before() {
    let (tree, mut eyes) = seen_by(rustix::process::geteuid().as_raw(), "");
    eyes.changes_root = true;
    let link = |pid: &str, target: &str, name: &str| {
        std::fs::create_dir_all(tree.root().join(format!("proc/{pid}/ns"))).unwrap();
        symlink(target, tree.root().join(format!("proc/{pid}/{name}"))).unwrap();
    };
    link("50", "mnt:[1]", "ns/mnt");
    assert!(
        eyes.text("/etc/vm.conf", None, 50).is_ok(),
        "it lies below the new root, too"
    );
    // The parent is in the same mount namespace and has the former root; the grandparent has another root.
    tree.write("proc/7/status", "PPid:\t1\n");
    link("7", "mnt:[1]", "ns/mnt");
    link("7", "../../outside", "root");
    tree.write("proc/1/status", "PPid:\t0\n");
    link("1", "mnt:[2]", "ns/mnt");
    link("1", "../../other", "root");
    tree.write("outside/run/vm.conf", "[name]\nguest = \"outside\"\n");
    tree.write("other/run/other.conf", "[name]\nguest = \"other\"\n");
    for dir in ["outside", "outside/run"] {
        mode(&tree, dir, 0o755);
    }
    assert!(eyes.text("/run/vm.conf", None, 50).unwrap().contains("outside"));
    let why = why(&eyes, "/run/other.conf");
    assert!(why.contains("-chroot") && why.contains("No such file"), "{why}");
}
