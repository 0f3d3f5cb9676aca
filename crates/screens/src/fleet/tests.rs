//! Draws the page from pictures of simulated hosts, on terminals of several sizes.

use homenode_units::Bytes;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent};

use super::hosts::Shown;
use super::screen;
use super::summary::Summary;
use crate::pictures::{Host, Picture};
use crate::table::Colours;
use crate::top::Wish;
use crate::top::tests::{NOON_NS, overview, utc};

fn picture(vms: usize) -> Picture {
    Picture {
        wall_ns: NOON_NS,
        overview: overview(vms),
    }
}

/// Two hosts that answer, the second of which has more VMs than CPUs, and a host that does not answer.
fn shown() -> Shown {
    let mut shown = Shown::new(&["calm", "crowded", "gone"], Colours::Off, utc);
    shown.heard(0, Ok(picture(2)));
    shown.heard(1, Ok(picture(40)));
    shown.heard(2, Err("no agent listens".to_owned()));
    shown
}

fn lines(shown: &Shown, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| shown.draw(frame)).unwrap();
    let buffer = terminal.backend().buffer();
    let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..height).map(|y| row(y).trim_end().to_owned()).collect()
}

fn press(shown: &mut Shown, keys: &[KeyCode]) -> Wish {
    keys.iter()
        .map(|code| shown.key(KeyEvent::from(*code)))
        .last()
        .unwrap()
}

#[test]
fn who_is_silent_and_who_is_past_most_limits_come_first() {
    let all = lines(&shown(), 200, 10);
    assert_eq!(all[0], "3 hosts, 42 VMs, 1 not answering");
    let first = |line: &String| line.split_whitespace().next().unwrap_or_default().to_owned();
    let names: Vec<String> = all[2..5].iter().map(first).collect();
    assert_eq!(names, ["gone", "crowded", "calm"], "{all:#?}");
    assert!(all[2].ends_with("no agent listens"), "{all:#?}");
    // The second host has more vCPUs than CPUs, so vCPUs wait, and its line names a VM.
    assert!(all[3].contains("cpus "), "{all:#?}");
}

#[test]
fn a_line_says_what_the_pictures_figures_say() {
    let picture = picture(40);
    let of = Summary::of(&picture);
    let status = &picture.overview.status;
    let rooms: Vec<_> = status.nodes.iter().filter_map(|node| node.headroom).collect();
    assert_eq!(rooms.len(), 4);
    let most = rooms.iter().map(|room| room.memory_bytes).max().unwrap();
    assert_eq!(of.headroom_of_a_node.unwrap().memory_bytes, most);
    assert_eq!(
        of.headroom.unwrap().memory_bytes,
        Bytes(rooms.iter().map(|room| room.memory_bytes.0).sum())
    );
    assert_eq!((of.vms_count, of.cpus), (40, 32));
    let worst = of.worst_vm.unwrap();
    let trouble = |name: &str| {
        let vm = status.vms.iter().find(|vm| vm.name == name).unwrap();
        crate::limits::trouble(vm)
    };
    assert!(
        status
            .vms
            .iter()
            .all(|vm| trouble(&vm.name) <= trouble(&worst.name)),
        "{worst:?}"
    );
}

#[test]
fn no_line_is_wider_than_the_terminal_and_the_chosen_host_stays_in_sight() {
    let names: Vec<String> = (0..100).map(|n| format!("host{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut shown = Shown::new(&names, Colours::Off, utc);
    for number in 0..100 {
        shown.heard(number, Ok(picture(3)));
    }
    press(&mut shown, &[KeyCode::PageDown; 5]);
    for (width, height) in [(40, 10), (80, 24), (200, 60)] {
        let all = lines(&shown, width, height);
        assert!(all.iter().any(|line| line.starts_with("host50 ")), "{all:#?}");
        assert!(all[1].starts_with("host"), "{all:#?}");
    }
}

#[test]
fn a_hosts_own_page_opens_behind_its_line_and_follows_it() {
    let mut shown = shown();
    // At first the chosen host is the one that was named first; here it is in the last line.
    press(&mut shown, &[KeyCode::Up, KeyCode::Enter]);
    let all = lines(&shown, 120, 40);
    assert!(all.iter().any(|line| line.contains("of 40 by worst")), "{all:#?}");
    shown.heard(1, Ok(picture(3)));
    assert!(
        lines(&shown, 120, 40)
            .iter()
            .any(|line| line.contains("3 VMs by worst"))
    );
    shown.heard(1, Err("it has ended".to_owned()));
    assert!(lines(&shown, 120, 40)[1].contains("it has ended"));
    // Esc leads from a VM to its host, and from the host to all hosts.
    press(&mut shown, &[KeyCode::Enter, KeyCode::Esc]);
    assert!(
        lines(&shown, 120, 40)
            .iter()
            .any(|line| line.contains("3 VMs by worst"))
    );
    press(&mut shown, &[KeyCode::Esc]);
    assert!(lines(&shown, 120, 40)[0].starts_with("3 hosts"));
    assert_eq!(press(&mut shown, &[KeyCode::Char('q')]), Wish::Quit);
}

#[test]
fn what_a_terminal_obeys_in_a_trouble_is_shown_as_what_it_is() {
    let mut host = Host::new("a");
    host.heard(Err("\u{1b}[2J".to_owned()));
    let text = screen::plain(&screen::rows(&[host]), None, Colours::Off);
    assert!(text.contains("\\u{1b}[2J"), "{text}");
}
