//! Draws the page on terminals of several sizes, with few and many VMs, for present and past (`snapshots`).

use chrono::{DateTime, NaiveDateTime};
use homenode_api::answer::{Happened, Overview};
use homenode_control::{Config, Control, Mode, Status};
use homenode_host::{CpuQuota, Host as _};
use homenode_policy::permits::Standing;
use homenode_twin::{Scenario, Twin, VmSpec};
use homenode_units::{Bytes, Ns};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::Color;

use super::*;
use crate::pictures::Picture;
use crate::table::{Colours, width_of};

pub(crate) const NOON_NS: i64 = 1_795_000_000_000_000_000;

pub(crate) fn utc(wall_ns: i64) -> NaiveDateTime {
    DateTime::from_timestamp_nanos(wall_ns).naive_utc()
}

/// Returns the overview that an agent gives of this number of VMs after some seconds on a simulated host. The overview is the
/// same on every machine.
pub(crate) fn overview(vms: usize) -> Overview {
    let workloads = [
        "lbm", "povray", "stream", "idle", "soplex", "cg.B", "lu.B", "ep.B",
    ];
    let spec = |number: usize| {
        let workload = workloads[number % workloads.len()];
        let name = format!("{}-{number}", workload.replace('.', "-").to_lowercase());
        VmSpec::new(
            &name,
            [1, 2, 3][number % 3],
            Bytes::from_gib(1) + Bytes::from_mib(512),
            workload,
        )
    };
    let scenario = Scenario::of("several", (0..vms).map(spec).collect());
    let machine = homenode_machine_files::preset("r910").unwrap();
    let mut twin = Twin::new(machine, &scenario, 1).unwrap();
    let mut control = Control::new(Config::default(), Mode::Act);
    let mut status = Status::default();
    for _ in 0..3 {
        status = control.step(&mut twin).unwrap().status;
        twin.wait(Ns::from_secs(1));
    }
    let events = control.recent().map(|event| Happened {
        at_ns: event.at,
        age_ns: status.at_ns.saturating_sub(event.at),
        kind: event.kind.to_owned(),
        vm: event.name.clone(),
        policy: None,
        outcome: None,
        count: 1,
        text: event.text.clone(),
    });
    Overview {
        events: events.collect(),
        status,
    }
}

/// Like [`overview`], but one VM is past every limit and has every optional figure.
fn troubled(vms: usize) -> Overview {
    let mut overview = overview(vms);
    let vm = &mut overview.status.vms[0];
    vm.permit.permit = Some("250k".parse().unwrap());
    vm.permit.standing = Some(Standing::Over);
    vm.permit.quota = Some(CpuQuota {
        run_ns: Ns::from_millis(40),
        period_ns: Ns::from_millis(100),
    });
    vm.local_access_ratio = Some(0.31);
    vm.instructions_per_cpu_s_usual = Some(1.31e9);
    vm.speed_ratio = Some(0.71);
    vm.time_gained_ns = Some(Ns::from_secs(754));
    vm.time_lost_ns = Some(Ns::from_secs(20));
    vm.left_alone = Some("another agent pinned vCPU 2".to_owned());
    overview.status.links[0].busy = Some(0.93);
    overview.events.push(Happened {
        at_ns: overview.status.at_ns,
        age_ns: Ns::ZERO,
        kind: "found".to_owned(),
        vm: Some(overview.status.vms[0].name.clone()),
        policy: Some("permits".to_owned()),
        outcome: None,
        count: 3,
        text: format!(
            "permits: VM {}: it caused 612k LLC misses per slice and booked 250k, so each of its vCPUs has 40 ms of every 100 ms",
            overview.status.vms[0].name
        ),
    });
    overview
}

fn view(when: When, overview: Overview) -> View {
    let mut view = View::new(when, Choice::default(), Colours::On, utc);
    view.show(Picture {
        wall_ns: NOON_NS,
        overview,
    });
    view
}

fn drawn(view: &View, width: u16, height: u16) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| screen::draw(frame, view)).unwrap();
    terminal
}

/// Compares a page with the committed snapshot of this name.
fn hold(name: &str, terminal: &Terminal<TestBackend>) {
    insta::with_settings!({ prepend_module_to_snapshot => false }, {
        insta::assert_snapshot!(format!("tests__{name}"), terminal.backend());
    });
}

const SIZES: [(u16, u16); 3] = [(80, 24), (120, 40), (200, 50)];

#[test]
fn one_eight_and_forty_vms_fit_every_size() {
    for vms in [1, 8, 40] {
        let view = view(When::Now, troubled(vms));
        for (width, height) in SIZES {
            let name = format!("{vms}-vms-{width}x{height}");
            hold(&name, &drawn(&view, width, height));
        }
    }
}

#[test]
fn what_was_looks_like_what_is() {
    let span = (NOON_NS - 86_400_000_000_000, NOON_NS);
    let then = When::Then {
        span,
        is_playing: false,
    };
    let view = view(then, troubled(8));
    hold("replay-80x24", &drawn(&view, 80, 24));
    let now = self::view(When::Now, troubled(8));
    let body = |view: &View| {
        let text = drawn(view, 120, 40).backend().to_string();
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines[1..lines.len() - 1].to_vec()
    };
    assert_eq!(body(&view), body(&now));
}

#[test]
fn pages_of_a_vm_and_of_help_fit_a_small_terminal() {
    let mut view = view(When::Now, troubled(8));
    assert_eq!(view.key(KeyCode::Enter.into()), Wish::Nothing);
    assert_eq!(view.page, Page::Vm);
    hold("vm-80x24", &drawn(&view, 80, 24));
    assert_eq!(view.key(KeyCode::Char('?').into()), Wish::Nothing);
    hold("help-80x24", &drawn(&view, 80, 24));
    assert!(screen::help().lines().all(|line| width_of(line) <= 80));
}

/// At 80x24, what matters is not cut: the figures past a limit, and the reason of the last decision.
#[test]
fn at_80_columns_nothing_that_matters_is_cut() {
    for vms in [1, 8, 40] {
        let text = drawn(&view(When::Now, troubled(vms)), 80, 24)
            .backend()
            .to_string();
        for part in ["OVER 250k", "40%", "31%", "71%", "93%", "(3 times)", "q quit"] {
            assert!(text.contains(part), "{part} of {vms} VMs:\n{text}");
        }
    }
}

#[test]
fn colour_is_only_where_a_limit_is_crossed_and_none_with_no_color() {
    let mut all = view(When::Now, troubled(1));
    let coloured = |view: &View| {
        let terminal = drawn(view, 120, 40);
        let cells = terminal.backend().buffer().content().iter();
        cells
            .filter(|cell| cell.fg != Color::Reset)
            .map(ratatui::buffer::Cell::symbol)
            .collect::<String>()
    };
    // From top to bottom: the link, the local share, the permit and the quota.
    assert_eq!(coloured(&all), "93%31%OVER 250k40%");
    all.colours = Colours::Off;
    assert_eq!(coloured(&all), "");
    let mut fine = view(When::Now, overview(1));
    fine.picture.as_mut().unwrap().overview.status.vms[0].local_access_ratio = Some(0.8);
    assert_eq!(coloured(&fine), "");
}

#[test]
fn no_size_panics_or_overflows_and_one_that_is_too_small_says_so() {
    let mut view = view(When::Now, troubled(40));
    view.message = Some("no answer for 3 s, asking again: no agent runs here".to_owned());
    for (width, height) in [(1, 1), (20, 5), (39, 24), (40, 10), (60, 12), (80, 3), (500, 200)] {
        for page in [Page::List, Page::Vm, Page::Help] {
            view.page = page;
            let text = drawn(&view, width, height).backend().to_string();
            let is_small = width < screen::SMALLEST.0 || height < screen::SMALLEST.1;
            assert!(!is_small || width < 20 || text.contains("too small"), "{text}");
        }
    }
    view.page = Page::List;
    for width in 40..220 {
        for line in screen::page(&view, width, 24) {
            assert!(line.width() <= width, "{width}: {line}");
        }
    }
}

#[test]
fn columns_are_left_out_in_the_order_that_the_help_says() {
    let view = view(When::Now, troubled(8));
    let shown = |width: usize| vms::table(&view.vms(), width).header().to_string();
    let order = vms::dropped_in_order();
    let order: Vec<&str> = order.split(", ").collect();
    let mut left_out = 0;
    for width in (30..200).rev() {
        let header = shown(width);
        // A heading may be part of another one, so it must match as a whole.
        let is_there = |head: &&&str| {
            header.split("  ").any(|part| part.trim() == **head)
                || header.contains(&format!(" {head} "))
                || header.ends_with(&format!(" {head}"))
        };
        let there: Vec<bool> = order.iter().map(|head| is_there(&head)).collect();
        let count = there.iter().take_while(|there| !**there).count();
        assert!(there[count..].iter().all(|there| *there), "{width}: {header}");
        assert!(count >= left_out, "{width}: {header}");
        left_out = count;
    }
    assert!(left_out > 5, "{left_out}");
}

#[test]
fn a_hostile_name_is_shown_as_what_it_is_and_takes_no_more_than_its_column() {
    let mut overview = troubled(8);
    overview.status.vms[0].name = format!("a\u{1b}[2J{}", "x".repeat(300));
    overview.events.last_mut().unwrap().text = "evil\u{1b}]0;title\u{7}".to_owned();
    let mut view = view(When::Now, overview);
    let row = &view.vms()[0];
    assert!(row.name.starts_with('a'), "what is worst comes first");
    view.key(KeyCode::Down.into());
    for page in [Page::List, Page::Vm] {
        view.page = page;
        let text = drawn(&view, 80, 24).backend().to_string();
        assert!(!text.contains('\u{1b}') && text.contains(r"a\u{1b}"), "{text}");
    }
}

#[test]
fn the_chosen_vm_stays_chosen_and_on_the_page_however_vms_are_sorted_and_filtered() {
    let mut view = view(When::Now, overview(40));
    for _ in 0..25 {
        view.key(KeyCode::Down.into());
    }
    let (id, name) = view.chosen.clone().unwrap();
    for _ in 0..11 {
        view.key(KeyCode::Char('>').into());
        assert_eq!(view.chosen.as_ref().unwrap().0, id);
        let text = drawn(&view, 80, 24).backend().to_string();
        assert!(text.contains(&format!("\"{name} ")), "{name}:\n{text}");
    }
    assert_eq!(view.choice.sort, Sort::Worst, "eleven columns, and round");
    for key in ['/', 'L', 'B', 'm'] {
        view.key(KeyCode::Char(key).into());
    }
    assert!(view.vms().iter().all(|vm| vm.name.contains("lbm")) && !view.vms().is_empty());
    view.key(KeyCode::Enter.into());
    assert_eq!(view.choice.filter, "LBm");
    view.key(KeyCode::Esc.into());
    assert_eq!(view.vms().len(), 40);
}

#[test]
fn time_stands_while_another_is_asked_for() {
    let then = When::Then {
        span: (0, NOON_NS),
        is_playing: true,
    };
    let mut view = view(then, overview(1));
    view.key(KeyCode::Char('g').into());
    assert!(matches!(
        view.when,
        When::Then {
            is_playing: false,
            ..
        }
    ));
}

#[test]
fn keys_ask_for_times() {
    let mut view = view(When::Now, overview(1));
    let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    for (key, wish) in [
        (KeyCode::Left, Wish::Step(-1)),
        (KeyCode::Right, Wish::Step(1)),
        (KeyCode::Char('['), Wish::Minutes(-1)),
        (KeyCode::Home, Wish::First),
        (KeyCode::End, Wish::Last),
        (KeyCode::Char(' '), Wish::Play),
        (KeyCode::Char('n'), Wish::Now),
        (KeyCode::Char('q'), Wish::Quit),
    ] {
        assert_eq!(view.key(key.into()), wish);
    }
    for key in "g03:12".chars() {
        assert_eq!(view.key(KeyCode::Char(key).into()), Wish::Nothing);
    }
    assert_eq!(view.key(KeyCode::Enter.into()), Wish::Jump("03:12".to_owned()));
    view.key(KeyCode::Char('/').into());
    assert_eq!(view.key(control_c), Wish::Quit, "also while something is typed");
}

/// The picture that `homenode run` redraws must fit, otherwise copies of it would remain on the terminal.
#[test]
fn the_picture_of_a_run_fits_its_terminal() {
    for vms in [1, 8, 40] {
        let status = overview(vms).status;
        for (width, height) in [(80, 24), (40, 10), (200, 50)] {
            let text = screen::glance(&status, width, height);
            let lines: Vec<&str> = text.lines().collect();
            assert!(
                lines.len() < height && lines.iter().all(|line| width_of(line) <= width),
                "{text}"
            );
            let is_shown = |name: &str| lines.iter().any(|line| line.starts_with(name));
            assert!(status.vms.iter().any(|vm| is_shown(&vm.name)), "{text}");
        }
        let all = screen::glance(&status, 80, 100);
        assert!(status.vms.iter().all(|vm| all.contains(&vm.name)), "{all}");
    }
}

#[test]
fn the_page_of_a_vm_says_how_fast_it_is_against_itself_and_what_it_gained() {
    let mut view = view(When::Now, troubled(8));
    let mut picture = view.picture.clone().unwrap();
    picture.wall_ns += 1_000_000_000;
    picture.overview.status.vms[0].speed_ratio = Some(1.0);
    view.show(picture);
    view.key(KeyCode::Enter.into());
    let text = drawn(&view, 80, 24).backend().to_string();
    for part in [
        "100% of usual: ",
        "usually 1.31",
        "▃▄| usual: ▄",
        "13min of CPU time",
        "lost 20s",
    ] {
        assert!(text.contains(part), "{part}:\n{text}");
    }
}
