use std::time::Instant;

use super::*;

#[test]
fn cpus_become_bits() {
    let map = |list: &str| cpu_map(&list.parse().unwrap());
    assert_eq!(map("0,3"), [0b1001]);
    assert_eq!(map("9,16"), [0, 0b10, 1]);
}

#[test]
fn a_call_that_hangs_is_given_up_and_the_next_is_made_by_another_thread() {
    let mut libvirt = Libvirt::open("test:///default", Path::new("/"), Heartbeat::default()).unwrap();
    let vm = libvirt.list().unwrap().remove(0);
    let (release, hangs) = channel::<()>();
    let begun = Instant::now();
    let hung = libvirt.ask(vm, move |_| {
        let _ = hangs.recv();
        Ok(())
    });
    let busy = CallError::Refused(BUSY.to_owned());
    assert_eq!(hung, Err(busy.clone()));
    assert!(begun.elapsed() < CALL_MAX + Duration::from_secs(5));
    assert!(libvirt.list().is_ok(), "other calls are made");
    // While the abandoned call may still be carried out, this one must not be made before it.
    assert_eq!(libvirt.xml(vm), Err(busy));
    drop(release);
    let is_over = |libvirt: &mut Libvirt| libvirt.xml(vm).is_ok();
    assert!((0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(20));
        is_over(&mut libvirt)
    }));
}

#[test]
fn a_libvirt_that_does_not_answer_is_left_in_peace_for_a_while() {
    let mut libvirt = Libvirt::unconnected("test:///default", Path::new("/"), Heartbeat::default());
    libvirt.rest();
    assert_eq!(libvirt.list().unwrap_err(), CallError::Lost(SILENT.to_owned()));
    std::thread::sleep(Duration::from_nanos(REST.0));
    assert!(libvirt.list().is_ok());
}

#[test]
fn why_libvirt_cannot_be_used_is_a_sentence_with_a_remedy() {
    let seen = connect_error("x", "no connection driver available for x:///");
    assert!(matches!(seen, ConnectError::BadUri { .. }), "{seen:?}");
    let seen = Libvirt::open(
        "qemu+unix:///system?socket=/does/not/exist",
        Path::new("/"),
        Heartbeat::default(),
    )
    .unwrap_err();
    assert!(matches!(seen, ConnectError::NoLibvirt { .. }), "{seen:?}");
    assert!(seen.to_string().contains("install"), "{seen}");
    let seen = connect_error(
        "u",
        "Failed to connect socket to '/run/libvirt-sock': Permission denied",
    );
    assert!(seen.to_string().contains("root"), "{seen}");
}
