use homenode_host::{Management, Mode, Setting, VmSettings};
use homenode_kernel::fake::Tree;
use homenode_units::Bytes;
use proptest::prelude::*;

use super::*;

const WEB: VmId = VmId(0xabc);
const OTHER: VmId = VmId(0xdef);

fn web() -> Whose<'static> {
    Whose {
        vm: WEB,
        name: "web",
        namesakes: &[],
        keeps_uuid: true,
    }
}

fn path_of(vm: VmId) -> String {
    format!("etc/homenode/vms/{vm}.toml")
}

fn set(tree: &Tree, whose: Whose<'_>, settings: &[Setting]) -> Result<bool, FileError> {
    let holds = &|_: &VmSettings| true;
    change(tree.root(), whose, &Change { settings, holds })
}

fn text(tree: &Tree, path: &str) -> String {
    fs::read_to_string(tree.root().join(path)).unwrap()
}

#[test]
fn what_is_set_is_in_the_file_of_the_uuid_beside_what_the_operator_wrote() {
    let tree = Tree::new(&[]);
    assert_eq!(read(tree.root(), web()), Ok(OperatorSettings::default()));
    let operators = "# Rack 4\nmanage = true\n\n# near the disk\nhome = 1 # not 0\n";
    tree.write("etc/homenode/vms/web.toml", operators);
    let said = read(tree.root(), web()).unwrap();
    let home = said.home.unwrap().to_string();
    assert_eq!((said.management, home.as_str()), (Management::Managed, "1"));
    let permit = Some("250k".parse().unwrap());
    assert_eq!(set(&tree, web(), &[Setting::Permit(permit)]), Ok(true));
    assert_eq!(
        text(&tree, &path_of(WEB)),
        format!("{operators}permit = \"250k\"\n")
    );
    assert!(
        !tree.root().join("etc/homenode/vms/web.toml").exists(),
        "its name would lead to two files"
    );
    let said = read(tree.root(), web()).unwrap();
    assert_eq!(
        (said.permit, said.home.unwrap().to_string()),
        (permit, "1".into())
    );
    assert_eq!(set(&tree, web(), &[Setting::Permit(None)]), Ok(true));
    assert_eq!(text(&tree, &path_of(WEB)), operators);
}

#[test]
fn the_names_up_to_0_2_0_of_affinity_and_anti_affinity_are_read() {
    let settings = |text: &str| {
        let tree = Tree::new(&[("etc/homenode/vms/web.toml", text)]);
        let said = read(tree.root(), web()).unwrap();
        (said.anti_affinity, said.affinity)
    };
    let now = settings("anti_affinity = 'db'\naffinity = 'app'\n");
    assert_eq!(now, (Some("db".to_owned()), Some("app".to_owned())));
    assert_eq!(settings("apart = 'db'\ntogether = 'app'\n"), now);
}

#[test]
fn a_file_keeps_comments_rights_and_links_whatever_is_set() {
    let tree = Tree::new(&[]);
    let path = tree.write(
        "srv/web.toml",
        "# one\npermit = '1k' # two\n# three\nfloor = '1GiB'\n# four\n",
    );
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    fs::create_dir_all(tree.root().join(DIR)).unwrap();
    let link = tree.root().join(path_of(WEB));
    std::os::unix::fs::symlink("../../../srv/web.toml", &link).unwrap();
    let permit = Some("2k".parse().unwrap());
    let settings = [
        Setting::Permit(permit),
        Setting::MemoryFloor(None),
        Setting::Mode(Some(Mode::Observe)),
    ];
    assert_eq!(set(&tree, web(), &settings), Ok(true));
    let expected = "# one\npermit = \"2k\" # two\nmode = \"observe\"\n# three\n# four\n";
    let mut lines: Vec<_> = expected.lines().collect();
    let written = text(&tree, "srv/web.toml");
    let mut found: Vec<_> = written.lines().collect();
    lines.sort_unstable();
    found.sort_unstable();
    assert_eq!(found, lines);
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
    assert!(link.is_symlink());
    // The first line is removed, and the comment above it stays.
    assert_eq!(
        set(&tree, web(), &[Setting::Permit(None), Setting::Mode(None)]),
        Ok(true)
    );
    let left = text(&tree, "srv/web.toml");
    for comment in ["# one", "# three", "# four"] {
        assert!(left.contains(comment), "{left}");
    }
}

#[test]
fn a_setting_that_is_there_already_touches_no_file() {
    let tree = Tree::new(&[("etc/homenode/vms/web.toml", "mode='observe'")]);
    assert_eq!(
        set(
            &tree,
            web(),
            &[Setting::Mode(Some(Mode::Observe)), Setting::Permit(None)]
        ),
        Ok(true)
    );
    assert_eq!(text(&tree, "etc/homenode/vms/web.toml"), "mode='observe'");
    assert!(!tree.root().join(path_of(WEB)).exists());
}

#[test]
fn a_file_of_a_name_that_two_vms_have_applies_to_neither_and_both_are_named() {
    let tree = Tree::new(&[("etc/homenode/vms/web.toml", "manage = 'no'")]);
    let (one, two) = (
        Whose {
            namesakes: &[OTHER],
            ..web()
        },
        Whose {
            vm: OTHER,
            name: "web",
            namesakes: &[WEB],
            keeps_uuid: true,
        },
    );
    for whose in [one, two] {
        let refusals = [
            read(tree.root(), whose).unwrap_err(),
            set(&tree, whose, &[Setting::Mode(None)]).unwrap_err(),
        ];
        for why in refusals.map(|error| error.to_string()) {
            let names_all = [WEB.to_string(), OTHER.to_string(), "web.toml".to_owned()]
                .iter()
                .all(|word| why.contains(word));
            assert!(names_all, "{why}");
        }
    }
    // A file named after the UUID of one of the two VMs applies to it.
    tree.write(&path_of(WEB), "home = 1");
    assert!(read(tree.root(), one).unwrap().home.is_some());
    assert!(read(tree.root(), two).is_err());
    let mode = Some(Mode::Recommend);
    assert_eq!(set(&tree, one, &[Setting::Mode(mode)]), Ok(true));
    assert_eq!(
        text(&tree, "etc/homenode/vms/web.toml"),
        "manage = 'no'",
        "it is not known whose it is"
    );
    fs::remove_file(tree.root().join("etc/homenode/vms/web.toml")).unwrap();
    assert_eq!(set(&tree, two, &[Setting::Mode(Some(Mode::Observe))]), Ok(true));
    let modes = [one, two].map(|whose| read(tree.root(), whose).unwrap().mode);
    assert_eq!(modes, [mode, Some(Mode::Observe)]);
}

#[test]
fn two_files_of_a_vm_that_contradict_each_other_are_refused_and_two_that_agree_become_one() {
    let tree = Tree::new(&[("etc/homenode/vms/web.toml", "manage = 'no'")]);
    tree.write(&path_of(WEB), "permit = '1k'");
    let settings = [Setting::Mode(Some(Mode::Observe))];
    for why in [
        read(tree.root(), web()).unwrap_err(),
        set(&tree, web(), &settings).unwrap_err(),
    ] {
        let why = why.to_string();
        assert!(
            why.contains("web.toml") && why.contains(&WEB.to_string()) && why.contains("manage"),
            "{why}"
        );
    }
    assert_eq!(text(&tree, &path_of(WEB)), "permit = '1k'");
    tree.write("etc/homenode/vms/web.toml", "permit = '1k'");
    assert_eq!(set(&tree, web(), &settings), Ok(true));
    assert!(!tree.root().join("etc/homenode/vms/web.toml").exists());
    // UUIDs as other programs write them.
    let tree = Tree::new(&[]);
    tree.write(
        &format!("etc/homenode/vms/{}.toml", WEB.to_string().to_uppercase()),
        "manage = 'no'",
    );
    assert_eq!(read(tree.root(), web()).unwrap().management, Management::Ignored);
    assert_eq!(set(&tree, web(), &settings), Ok(true));
    assert_eq!(text(&tree, &path_of(WEB)), "manage = 'no'\nmode = \"observe\"\n");
}

#[test]
fn a_name_that_leads_elsewhere_leads_nowhere_and_the_uuid_is_the_file() {
    let long = "n".repeat(300);
    let other = OTHER.to_string();
    let names = [
        "../other",
        "a/b",
        "/etc/passwd",
        "",
        "..",
        "a\0b",
        "a\nmanage = 'no'",
        &long,
        &other,
        &other.replace('-', ""),
    ];
    for name in names {
        let tree = Tree::new(&[("etc/homenode/other.toml", "manage = 'no'")]);
        tree.write(&path_of(OTHER), "manage = 'no'");
        let whose = Whose { name, ..web() };
        assert_eq!(
            read(tree.root(), whose),
            Ok(OperatorSettings::default()),
            "{name:?}"
        );
        assert_eq!(
            set(&tree, whose, &[Setting::Mode(Some(Mode::Act))]),
            Ok(true),
            "{name:?}"
        );
        let said = read(tree.root(), whose).unwrap();
        assert_eq!(
            (said.mode, said.management),
            (Some(Mode::Act), Management::Managed),
            "{name:?}"
        );
        assert_eq!(text(&tree, &path_of(OTHER)), "manage = 'no'");
        assert_eq!(text(&tree, "etc/homenode/other.toml"), "manage = 'no'");
    }
}

#[test]
fn what_is_wrong_is_said_with_the_file_and_stays_as_it_is() {
    for (wrong, word) in [
        ("homes = '1'", "homes"),
        ("home = [1]", "quotes"),
        ("\nhome", "line 2"),
        ("mode = 'loud'", "mode"),
        ("permit = '1k'\npermit = '2k'", "line 2"),
        ("[permit]\nunits = 1", "permit"),
    ] {
        for path in ["etc/homenode/vms/web.toml", &path_of(WEB)] {
            let tree = Tree::new(&[(path, wrong)]);
            let refusals = [
                read(tree.root(), web()).unwrap_err(),
                set(&tree, web(), &[Setting::Mode(None)]).unwrap_err(),
            ];
            for why in refusals.map(|error| error.to_string()) {
                let file = path.rsplit('/').next().unwrap();
                assert!(why.contains(file) && why.contains(word), "{wrong}: {why}");
            }
            assert_eq!(text(&tree, path), wrong);
        }
    }
}

#[test]
fn what_is_not_any_more_as_it_was_read_is_not_overwritten() {
    let tree = Tree::new(&[]);
    tree.write(&path_of(WEB), "permit = '2k'");
    let holds = |stored: &VmSettings| stored.permit == Some("1k".parse().unwrap());
    let settings = &[Setting::MemoryFloor(Some(Bytes::from_gib(1)))];
    let changed = change(
        tree.root(),
        web(),
        &Change {
            settings,
            holds: &holds,
        },
    );
    assert_eq!(
        (changed, text(&tree, &path_of(WEB))),
        (Ok(false), "permit = '2k'".into())
    );
    tree.write(&path_of(WEB), "permit = '1k'");
    let changed = change(
        tree.root(),
        web(),
        &Change {
            settings,
            holds: &holds,
        },
    );
    assert_eq!(
        (changed, read(tree.root(), web()).unwrap().memory_floor),
        (Ok(true), Some(Bytes::from_gib(1)))
    );
}

/// The condition is checked between reading and writing the file, so the test saves from within it.
#[test]
fn what_an_editor_saves_in_between_is_kept() {
    for saved in [path_of(WEB), "etc/homenode/vms/web.toml".to_owned()] {
        for before in [None, Some("permit = '1k'\n")] {
            let tree = Tree::new(&[]);
            if let Some(before) = before {
                tree.write(&saved, before);
            }
            let is_first = std::cell::Cell::new(true);
            let holds = |_: &VmSettings| {
                if is_first.replace(false) {
                    // Save as an editor does: a new file replaces the old one.
                    let new = tree.write("etc/homenode/vms/web.toml~", "home = '1' # mine\n");
                    fs::rename(new, tree.root().join(&saved)).unwrap();
                }
                true
            };
            let settings = &[Setting::Mode(Some(Mode::Observe))];
            let changed = change(
                tree.root(),
                web(),
                &Change {
                    settings,
                    holds: &holds,
                },
            );
            let said = read(tree.root(), web());
            if before.is_none() && saved.ends_with("web.toml") {
                // The editor made a second file, so two files exist, and reading reports that.
                assert!(said.unwrap_err().to_string().contains("web.toml"));
                continue;
            }
            let said = said.unwrap();
            assert_eq!(changed, Ok(true));
            assert_eq!(
                (said.mode, said.home.map(|home| home.to_string())),
                (Some(Mode::Observe), Some("1".into()))
            );
            assert!(text(&tree, &path_of(WEB)).contains("# mine"));
        }
    }
}

#[test]
fn writers_side_by_side_lose_nothing() {
    let tree = Tree::new(&[("etc/homenode/vms/web.toml", "home = '1' # mine\n")]);
    let settings = [
        Setting::Mode(Some(Mode::Recommend)),
        Setting::Permit(Some("7k".parse().unwrap())),
        Setting::MemoryFloor(Some(Bytes::from_gib(2))),
        Setting::MemoryPolicy(Some("round-4k".parse().unwrap())),
    ];
    // Each thread opens the lock file separately, as a process would.
    std::thread::scope(|scope| {
        for setting in settings {
            let tree = &tree;
            scope.spawn(move || {
                for _ in 0..20 {
                    let cleared = match setting {
                        Setting::Mode(_) => Setting::Mode(None),
                        Setting::Permit(_) => Setting::Permit(None),
                        Setting::MemoryFloor(_) => Setting::MemoryFloor(None),
                        Setting::MemoryPolicy(_) => Setting::MemoryPolicy(None),
                    };
                    assert_eq!(set(tree, web(), &[cleared]), Ok(true));
                    assert_eq!(set(tree, web(), &[setting]), Ok(true));
                    let said = read(tree.root(), web()).unwrap().of_vm(None, vec![]);
                    assert!(said.has(setting), "another writer took it back");
                }
            });
        }
    });
    let said = read(tree.root(), web()).unwrap();
    assert!(said.home.is_some());
    let said = said.of_vm(None, vec![]);
    assert!(settings.iter().all(|setting| said.has(*setting)), "{said:?}");
    assert!(text(&tree, &path_of(WEB)).contains("# mine"));
}

#[test]
fn a_lock_that_another_process_keeps_refuses_the_change_and_only_its_owner_can_take_it() {
    let tree = Tree::new(&[("etc/homenode/vms/web.toml", "home = '1'")]);
    let dir = tree.root().join(DIR);
    let held = lock(&dir).unwrap();
    assert_eq!(fs::metadata(dir.join(LOCK)).unwrap().mode() & 0o7777, 0o600);
    let why = set(&tree, web(), &[Setting::Mode(Some(Mode::Act))]).unwrap_err();
    let why = why.to_string();
    assert!(why.contains(".lock") && why.contains("another process"), "{why}");
    drop(held);
    assert_eq!(text(&tree, "etc/homenode/vms/web.toml"), "home = '1'");
    assert_eq!(set(&tree, web(), &[Setting::Mode(Some(Mode::Act))]), Ok(true));
}

fn setting() -> impl Strategy<Value = Setting> {
    let modes = prop_oneof![Just(Mode::Observe), Just(Mode::Recommend), Just(Mode::Act)];
    prop_oneof![
        prop::option::of(modes).prop_map(Setting::Mode),
        prop::option::of((1u64..1000).prop_map(|units| format!("{units}k").parse().unwrap()))
            .prop_map(Setting::Permit),
        prop::option::of((1u64..1000).prop_map(|kib| Bytes(kib * 1024))).prop_map(Setting::MemoryFloor),
        prop::option::of(Just("round-4k".parse().unwrap())).prop_map(Setting::MemoryPolicy),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn of_any_settings_in_a_row_the_last_of_each_is_stored(
        row in prop::collection::vec(setting(), 1..12),
        is_named in any::<bool>(),
    ) {
        let tree = Tree::new(&[]);
        let operators = "# of the operator\nmanage = \"yes\" # so\nhome = 1\n";
        let file = if is_named { "etc/homenode/vms/web.toml".to_owned() } else { path_of(WEB) };
        tree.write(&file, operators);
        let mut expected = VmSettings::default();
        for setting in row {
            prop_assert_eq!(set(&tree, web(), &[setting]), Ok(true));
            expected.set(setting);
        }
        let said = read(tree.root(), web()).unwrap();
        prop_assert_eq!(said.home.as_ref().map(ToString::to_string), Some("1".to_owned()));
        let said = said.of_vm(None, vec![]);
        let all = [
            Setting::Mode(expected.mode),
            Setting::Permit(expected.permit),
            Setting::MemoryFloor(expected.memory_floor),
            Setting::MemoryPolicy(expected.memory_policy),
        ];
        for setting in all {
            prop_assert!(said.has(setting), "{:?} of {:?}", setting, said);
        }
        let written = fs::read_to_string(tree.root().join(&file));
        let written = written.or_else(|_| fs::read_to_string(tree.root().join(path_of(WEB)))).unwrap();
        prop_assert!(written.contains("# of the operator") && written.contains("# so"));
    }
}

#[test]
fn the_file_of_a_vm_that_has_another_uuid_at_each_start_keeps_its_name() {
    let tree = Tree::new(&[("etc/homenode/vms/web.toml", "manage = 'no' # the operator's\n")]);
    let xen = Whose {
        keeps_uuid: false,
        ..web()
    };
    set(&tree, xen, &[Setting::Mode(Some(homenode_host::Mode::Observe))]).unwrap();
    assert!(!tree.root().join(path_of(WEB)).exists());
    let next = Whose { vm: OTHER, ..xen };
    assert_eq!(
        read(tree.root(), next).unwrap().mode,
        Some(homenode_host::Mode::Observe)
    );
    assert!(text(&tree, "etc/homenode/vms/web.toml").contains("manage = 'no' # the operator's"));
    // Threads also lose nothing for a VM that has no file yet.
    let tree = Tree::new(&[]);
    set(&tree, xen, &[Setting::Mode(Some(homenode_host::Mode::Observe))]).unwrap();
    assert_eq!(
        read(tree.root(), next).unwrap().mode,
        Some(homenode_host::Mode::Observe)
    );
}
