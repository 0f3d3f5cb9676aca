use std::collections::BTreeMap;

use homenode_units::{Bytes, Ns};
use proptest::collection::btree_set;
use proptest::prelude::*;

use super::*;
use crate::crossover::{Acting, Crossover};
use crate::report::Hardware;
use crate::section::{Bearing, Topic, With};

/// What must not get out.
#[derive(Clone, Debug)]
struct Secrets {
    vms: Vec<String>,
    detail: String,
    kernel: String,
    /// A word in a sentence of ours, which should not be there.
    word: String,
}

/// Names that are words of a report, HTML, letters of other alphabets, or one letter.
fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        prop::sample::select(vec![
            "agent",
            "a",
            "vm",
            "vm-001",
            "vm-002",
            "evidence",
            "span",
            "homenode",
            "the",
            "1",
            "0",
            "%",
            "speeds",
            "null",
            "gains",
            "<script>alert(1)</script>",
            "\"><img src=x>",
            "&amp;",
            "../../etc/passwd",
            "/srv/alice/vm",
            "日本語",
            "ü\u{202e}x",
            "\u{1b}[31m",
            "7f3c2b6e-1d7f-4a58-9a61-0242ac120002",
            "10.0.0.7",
            "52:54:00:12:34:56",
            "\n",
            "\u{0}",
        ])
        .prop_map(str::to_owned),
        "\\PC{1,40}",
    ]
}

fn secrets(vms: usize) -> impl Strategy<Value = Secrets> {
    let word = prop::sample::select(vec![
        "/srv/alice/images/payroll.qcow2",
        "/sys/fs/cgroup/machine.slice/payroll",
        "~/payroll",
        "qemu:///system",
        "/var/lib/libvirt/payroll.img",
        "7f3c2b6e-1d7f-4a58-9a61-0242ac120002",
        "7f3c2b6e1d7f4a589a610242ac120002",
        "10.11.12.13",
        "10.11.12.13:5900",
        "10.11.12.0/24",
        "fe80::5054:ff:fe12:3456",
        "52:54:00:12:34:56",
        "52-54-00-12-34-56",
        "alice@payroll.example",
    ]);
    let kernel = prop::sample::select(vec!["6.1.0-payroll", "6.1.0-13-amd64", "6.1.0+alice", "6.1.0"]);
    (btree_set(name(), vms..=vms), "\\PC{0,60}", kernel, word)
        .prop_map(|(vms, detail, kernel, word)| Secrets {
            vms: vms.into_iter().collect(),
            detail,
            kernel: kernel.to_owned(),
            word: word.to_owned(),
        })
        .prop_flat_map(|secrets| {
            let vms = Just(secrets.vms.clone()).prop_shuffle();
            vms.prop_map(move |vms| Secrets {
                vms,
                ..secrets.clone()
            })
        })
}

/// Makes a report whose figures depend on a VM's place and whose texts have the secrets.
fn report(secrets: &Secrets, seed: u64) -> Report {
    let plan = Crossover::of(Ns::from_secs(51 * 60), secrets.vms.len().max(1), seed).unwrap();
    let speeds = |at: usize, acting: Acting| -> BTreeMap<String, f64> {
        let of = |(place, vm): (usize, &String)| {
            let gain = if acting == Acting::Acts {
                1.0 + place as f64 / 10.0
            } else {
                1.0
            };
            (vm.clone(), gain * (1000.0 + at as f64 + 7.0 * place as f64))
        };
        secrets.vms.iter().enumerate().map(of).collect()
    };
    let blocks = plan.blocks.iter().enumerate().map(|(at, acting)| Block {
        acting: *acting,
        counted_ns: Ns::from_secs(20),
        in_force: 1,
        speeds: speeds(at, *acting),
    });
    let blocks = blocks.collect();
    let host = HostFacts {
        hardware: Hardware::Silicon,
        cpu_model: Some("AMD EPYC 7763 64-Core Processor".to_owned()),
        nodes: 2,
        cpus: 128,
        memory_bytes: Bytes::from_gib(512),
        kernel: secrets.kernel.clone(),
        vms: secrets.vms.len(),
    };
    let sentence = format!("It is as {} says.", secrets.word);
    let figures = secrets.vms.iter().enumerate().map(|(place, vm)| {
        let figure = Figure::of(&sentence, "ns", &[place as f64; 6]).of_vm(vm);
        figure.predicted(1.0, &sentence)
    });
    let measured = Section::measured(
        Topic::Kyoto,
        With::NamedVms,
        &sentence,
        &sentence,
        Bearing::For,
        figures.collect(),
    );
    let trial = Trial::begun(secrets.vms.iter().cloned().collect(), plan).with_blocks(blocks);
    Report::begun("1", "c", host)
        .with_crossover(trial)
        .with_section(measured)
        .with_section(Section::not_possible(
            Topic::Numad,
            &sentence,
            &sentence,
            Some(secrets.detail.clone()),
        ))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_shared_does_not_depend_on_what_is_left_out(
        (one, other) in (0_usize..6).prop_flat_map(|vms| (secrets(vms), secrets(vms))),
        seed in 0_u64..1000,
    ) {
        let (one, other) = (report(&one, seed), report(&other, seed));
        prop_assert!(archive(&one).unwrap() == archive(&other).unwrap());
    }

    #[test]
    fn what_is_shared_is_read_again_with_the_same_effects(secrets in secrets(5), seed in 0_u64..1000) {
        let report = report(&secrets, seed);
        let shared = unpacked(&archive(&report).unwrap()).unwrap();
        prop_assert_eq!(&shared, &report.to_share());
        let (ours, theirs) = (report.crossover.unwrap().judged, shared.crossover.unwrap().judged);
        // Sums over VMs in another order differ in their last bits.
        let all = |judged: &crate::effect::Judged| judged.all.as_ref().map_or(0.0, |all| all.percent);
        prop_assert!((all(&ours) - all(&theirs)).abs() < 1e-9);
        let effects = |vms: &BTreeMap<String, crate::Effect>| {
            let mut effects: Vec<u64> = vms.values().map(|effect| effect.percent.to_bits()).collect();
            effects.sort_unstable();
            effects
        };
        prop_assert_eq!(effects(&ours.vms), effects(&theirs.vms));
    }

    #[test]
    fn whatever_an_archive_holds_reading_it_ends(
        mut bytes in prop::collection::vec(any::<u8>(), 0..600),
        at in any::<prop::sample::Index>(),
    ) {
        bytes.splice(0..0, [0x1f, 0x8b]);
        prop_assert!(unpacked(&bytes).is_err());
        let mut damaged = packed(&[("homenode-evidence/evidence.json", b"{}")]);
        let at = at.index(damaged.len());
        damaged[at] ^= 1;
        prop_assert!(unpacked(&damaged).is_err());
    }
}

#[test]
fn words_of_ours_are_kept() {
    for kept in [
        "Memory of node 0 from CPU 3: 12.5 GB/s, 3:1, and/or 95 % of 6.1.0; see AC/DC.",
        "/dev/kvm is missing: load kvm_amd, or run as root.",
        "deadbeef and cafe-1234 are not IDs; a-b-c-d-e neither. Time 12:30:59.",
    ] {
        assert_eq!(without_names(kept), kept);
    }
}

#[test]
fn marks_around_a_word_do_not_hide_it() {
    for (text, left) in [
        ("(/var/lib/payroll.img), so", "([left out]), so"),
        ("\"10.0.0.7:5900\".", "\"[left out]\"."),
        (
            "see\n/srv/alice\tor <alice@payroll>",
            "see\n[left out]\tor <[left out]>",
        ),
    ] {
        assert_eq!(without_names(text), left);
    }
}

#[test]
fn what_was_left_out_is_said_in_each_file() {
    let secrets = Secrets {
        vms: vec!["payroll".to_owned(), "web".to_owned()],
        detail: String::new(),
        kernel: "6.1.0".to_owned(),
        word: "it".to_owned(),
    };
    let packed = archive(&report(&secrets, 1)).unwrap();
    let mut archive = tar::Archive::new(GzDecoder::new(&packed[..]));
    let mut names = Vec::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        names.push(entry.path().unwrap().display().to_string());
        let mut text = String::new();
        entry.read_to_string(&mut text).unwrap();
        assert!(
            text.contains("names and UUIDs of 2 VMs") && text.contains("serial numbers"),
            "{text}"
        );
        assert!(!text.contains("payroll"), "{text}");
    }
    let expected = ["README.txt", "evidence.html", "evidence.json"].map(|name| format!("{FOLDER}/{name}"));
    assert_eq!(names, expected);
}

fn packed(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut archive = tar::Builder::new(GzBuilder::new().write(Vec::new(), Compression::fast()));
    for (name, content) in files {
        let mut header = tar::Header::new_ustar();
        // Not through the library, which refuses such names.
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.set_size(content.len() as u64);
        header.set_cksum();
        archive.append(&header, *content).unwrap();
    }
    archive.into_inner().unwrap().finish().unwrap()
}

#[test]
fn a_hostile_archive_is_refused() {
    let absent: [&[(&str, &[u8])]; 4] = [
        &[],
        &[("../homenode-evidence/evidence.json", b"{}")],
        &[("/homenode-evidence/evidence.json", b"{}")],
        &[("evidence.json", b"{}")],
    ];
    for files in absent {
        assert!(
            matches!(unpacked(&packed(files)), Err(UnpackError::Absent)),
            "{files:?}"
        );
    }
    let many = vec![("x", &b""[..]); FILES_MAX + 1];
    assert!(matches!(unpacked(&packed(&many)), Err(UnpackError::TooLarge)));
    let wrong = packed(&[("homenode-evidence/evidence.json", b"{}")]);
    assert!(matches!(unpacked(&wrong), Err(UnpackError::Read(_))));
    let claims = |size| {
        let mut bomb = tar::Builder::new(GzBuilder::new().write(Vec::new(), Compression::fast()));
        let mut header = tar::Header::new_ustar();
        header.set_path("homenode-evidence/evidence.json").unwrap();
        header.set_size(size);
        header.set_cksum();
        bomb.append(&header, io::repeat(b' ').take(1 << 20)).unwrap();
        bomb.into_inner().unwrap().finish().unwrap()
    };
    assert!(matches!(unpacked(&claims(1 << 40)), Err(UnpackError::TooLarge)));
    // It claims more than there is.
    assert!(matches!(
        unpacked(&claims(32 << 20)),
        Err(UnpackError::Damaged(_) | UnpackError::Read(_))
    ));
}
