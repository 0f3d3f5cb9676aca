//! The file itself: its owner, what may be in its place, and the space that it returns.

use super::*;

#[test]
fn one_run_at_a_time_is_written_to_a_history() {
    let (_dir, path) = place();
    let first = Recorder::begin(&path, &begin(), plenty(), WhenFull::LeaveOut).unwrap();
    let refused = Recorder::begin(&path, &begin(), plenty(), WhenFull::LeaveOut).unwrap_err();
    assert!(refused.to_string().contains("another agent"), "{refused}");
    // Only SQLite may lock the database itself, because on NFS and 9p all locks of a file conflict.
    let database = std::fs::File::open(&path).unwrap();
    database.try_lock().unwrap();
    drop((first, database));
    record(&path, (0..3).map(|second| period(second, 0)));
}

#[test]
fn other_programs_and_newer_versions_files_are_left_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    let refused = |path: &Path| Recorder::begin(path, &begin(), plenty(), WhenFull::LeaveOut).unwrap_err();
    std::fs::write(
        &path,
        "precious words, more than a hundred bytes of them, ".repeat(100),
    )
    .unwrap();
    assert!(matches!(refused(&path), RecordError::Foreign { .. }));
    assert!(std::fs::read_to_string(&path).unwrap().starts_with("precious"));
    let path = dir.path().join("b");
    rusqlite::Connection::open(&path)
        .unwrap()
        .execute_batch("CREATE TABLE theirs (x)")
        .unwrap();
    assert!(matches!(refused(&path), RecordError::Foreign { .. }));
    let path = dir.path().join("c");
    record(&path, (0..3).map(|second| period(second, 0)));
    rusqlite::Connection::open(&path)
        .unwrap()
        .pragma_update(None, "user_version", 2)
        .unwrap();
    let error = refused(&path);
    assert!(matches!(error, RecordError::Newer { format: 2, .. }), "{error}");
    assert!(matches!(Archive::open(&path), Err(RecordError::Newer { .. })));
    assert!(matches!(
        Archive::open(&dir.path().join("none")),
        Err(RecordError::Missing { .. })
    ));
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(dir.path().join("b"), &link).unwrap();
    assert!(matches!(refused(&link), RecordError::Database { .. }));
}

#[test]
fn all_room_of_what_is_pruned_is_given_back_at_once() {
    let (_dir, path) = place();
    record(&path, (0..3).map(|second| period(second, 0)));
    let database = rusqlite::Connection::open(&path).unwrap();
    let old =
        "INSERT INTO block (run, kind, first_at_ns, last_at_ns, first_wall_ns, last_wall_ns, count, frames)
               VALUES (1, 0, 0, 0, ?1, ?1, 1, zeroblob(30000000))";
    database.execute(old, [NOON - 86400 * SECOND]).unwrap();
    drop(database);
    let size = || std::fs::metadata(&path).unwrap().len();
    assert!(size() > 30_000_000, "{}", size());
    prune(&path, None, Some(Bytes(1 << 20))).unwrap();
    assert!(size() < 1 << 20, "{}", size());
}

#[test]
fn what_is_no_file_is_no_history_and_is_not_waited_for() {
    let (dir, _) = place();
    let pipe = dir.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for path in [dir.path(), &pipe, Path::new("/dev/null")] {
        let refused = Archive::open(path).unwrap_err();
        assert!(matches!(refused, RecordError::Foreign { .. }), "{refused}");
        let refused = Recorder::begin(path, &begin(), plenty(), WhenFull::LeaveOut).unwrap_err();
        assert!(matches!(refused, RecordError::Foreign { .. }), "{refused}");
        let refused = prune(path, None, None).unwrap_err();
        assert!(matches!(refused, RecordError::Foreign { .. }), "{refused}");
    }
}

#[test]
fn its_directory_may_be_reached_by_a_link() {
    let (dir, _) = place();
    let (real, link) = (dir.path().join("other-disk"), dir.path().join("link"));
    std::fs::create_dir(&real).unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    record(
        &link.join("history.sqlite"),
        (0..3).map(|second| period(second, 0)),
    );
    assert_eq!(frames(&real.join("history.sqlite"), Kind::Status).len(), 3);
    prune(&link.join("history.sqlite"), Some(Ns::from_secs(1)), None).unwrap();
}

#[test]
fn only_its_owner_may_read_it() {
    use std::os::unix::fs::PermissionsExt as _;
    let (_dir, path) = place();
    let mut recorder = Recorder::begin(&path, &begin(), plenty(), WhenFull::LeaveOut).unwrap();
    keep(&mut recorder, period(0, 0));
    keep(&mut recorder, period(1, 0));
    for file in std::fs::read_dir(path.parent().unwrap()).unwrap().flatten() {
        let mode = file.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{:?}", file.path());
    }
    assert_eq!(
        std::fs::metadata(path.parent().unwrap())
            .unwrap()
            .permissions()
            .mode()
            & 0o777,
        0o700
    );
}
