use super::*;
use homenode_units::Bytes;
use proptest::prelude::*;
use serde::Deserialize;

#[derive(Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
struct Sample {
    name: String,
    vcpus: u16,
    #[serde(default, with = "homenode_units::text::option")]
    memory: Option<Bytes>,
    #[serde(default)]
    policy: Policy,
    #[serde(default)]
    regions: Vec<Region>,
    limits: Option<Limits>,
}

#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case")]
enum Policy {
    #[default]
    FirstTouch,
    Interleave,
    #[serde(rename = "round-4k")]
    Round4k,
    Custom {
        weight: u32,
    },
}

#[derive(Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
struct Region {
    heat: f64,
    private: Option<bool>,
}

#[derive(Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
struct Limits {
    max_pages: u64,
}

const GOOD: &str = "name = \"web\"\nvcpus = 4\nmemory = \"8GiB\"\npolicy = \"round-4k\"\n\n[[regions]]\nheat = 0.5\nprivate = true\n\n[limits]\nmax_pages = 7\n";

fn error(text: &str) -> FileError {
    read_toml::<Sample>("vm.toml", text).expect_err("must be refused")
}

fn said(text: &str) -> String {
    error(text).to_string()
}

#[test]
fn a_good_file_reads() {
    let sample: Sample = read_toml("vm.toml", GOOD).unwrap();
    assert_eq!(sample.memory, Some(Bytes::from_gib(8)));
    assert_eq!(sample.policy, Policy::Round4k);
}

#[test]
fn a_misspelt_key_names_its_place_and_the_nearest_valid_one() {
    let text = GOOD.replace("vcpus", "vcpu");
    assert_eq!(
        said(&text),
        "vm.toml:2:1: unknown key `vcpu`; did you mean `vcpus`?"
    );
    let Problem::UnknownKey { key, valid } = *error(&text).problem else {
        panic!("{:?}", error(&text))
    };
    assert_eq!(
        (key.as_str(), valid.names[0].as_str(), valid.near),
        ("vcpu", "vcpus", true)
    );
}

#[test]
fn a_misspelt_key_in_a_table_names_the_table() {
    assert_eq!(
        said(&GOOD.replace("max_pages", "max-page")),
        "vm.toml:11:1: unknown key `max-page`; did you mean `max_pages`? (in `limits`)"
    );
    assert_eq!(
        error(&GOOD.replace("max_pages", "max-page")).key,
        "limits.max-page"
    );
    assert_eq!(
        said(&GOOD.replace("heat", "hate")),
        "vm.toml:7:1: unknown key `hate`; did you mean `heat`? (in `regions`)"
    );
}

#[test]
fn a_key_like_no_other_gets_all_valid_ones() {
    assert_eq!(
        said(&GOOD.replace("vcpus", "zebra")),
        "vm.toml:2:1: unknown key `zebra`; valid, nearest first: `memory`, `name`, `vcpus`, `limits`, `policy`, `regions`"
    );
}

#[test]
fn a_wrong_type_says_what_is_expected_and_what_was_found() {
    assert_eq!(
        said(&GOOD.replace("vcpus = 4", "vcpus = \"four\"")),
        "vm.toml:2:9: a whole number from 0 to 65535 is expected, not the text \"four\" (key `vcpus`)"
    );
    assert_eq!(
        said(&GOOD.replace("vcpus = 4", "vcpus = -4")),
        "vm.toml:2:9: a whole number from 0 to 65535 is expected, not the number -4 (key `vcpus`)"
    );
    assert_eq!(
        said(&GOOD.replace("\"web\"", "[1]")),
        "vm.toml:1:8: a text in quotes is expected, not a list (key `name`)"
    );
    assert_eq!(
        said(&GOOD.replace("heat = 0.5", "heat = true")),
        "vm.toml:7:8: a number is expected, not true (key `regions.heat`)"
    );
    assert_eq!(
        said(&GOOD.replace("private = true", "private = 1")),
        "vm.toml:8:11: true or false is expected, not the number 1 (key `regions.private`)"
    );
    assert_eq!(
        said("name = \"a\"\nvcpus = 1\nlimits = 3\n"),
        "vm.toml:3:10: a table is expected, not the number 3 (key `limits`)"
    );
}

#[test]
fn a_missing_key_names_the_table_it_should_be_in() {
    let missing = said(&GOOD.replace("max_pages = 7\n", ""));
    assert_eq!(missing, "vm.toml:10:1: key `max_pages` is missing (in `limits`)");
    assert_eq!(error(&GOOD.replace("vcpus = 4\n", "")).key, "vcpus");
    assert!(said("").ends_with("key `name` is missing"), "{}", said(""));
}

#[test]
fn an_unknown_word_names_the_nearest_valid_one() {
    assert_eq!(
        said(&GOOD.replace("round-4k", "round-4K")),
        "vm.toml:4:10: unknown value `round-4K`; did you mean `round-4k`? (key `policy`)"
    );
    assert_eq!(
        said(&GOOD.replace("round-4k", "first-tuoch")),
        "vm.toml:4:10: unknown value `first-tuoch`; did you mean `first-touch`? (key `policy`)"
    );
}

#[test]
fn what_a_file_says_cannot_break_the_line_of_a_message() {
    let said = said(&GOOD.replace("round-4k", "round\\n\\u001b[2J-4k"));
    assert!(
        said.starts_with("vm.toml:4:10: unknown value `round\\n\\u{1b}[2J-4k`;"),
        "{said}"
    );
}

#[test]
fn a_misspelt_key_inside_an_enum_variant_is_found() {
    let text = GOOD.replace("\"round-4k\"", "{ custom = { wieght = 3 } }");
    assert_eq!(
        said(&text),
        "vm.toml:4:23: unknown key `wieght`; did you mean `weight`? (in `policy`)"
    );
}

#[test]
fn a_value_that_its_type_refuses_is_quoted() {
    assert_eq!(
        said(&GOOD.replace("8GiB", "-8GiB")),
        "vm.toml:3:10: `-8GiB` is not a size such as `16GiB` or `500MB` (key `memory`)"
    );
}

#[test]
fn what_is_not_toml_names_its_place() {
    for (text, line) in [
        ("name = ", 1),
        ("name = \"a\nvcpus = 1", 1),
        ("[limits\n", 1),
        ("name = 1\nname = 2\n", 2),
    ] {
        let error = error(text);
        assert!(matches!(*error.problem, Problem::Syntax(_)), "{error}");
        assert_eq!(error.place.map(|place| place.line), Some(line), "{error}");
    }
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let problem = |path: &Path| {
        let error = read_toml_file::<Sample>(path).expect_err("must be refused");
        assert_eq!(error.path, path);
        *error.problem
    };
    assert_eq!(
        problem(&dir.path().join("none.toml")),
        Problem::Unreadable(io::ErrorKind::NotFound)
    );
    assert_eq!(
        problem(dir.path()),
        Problem::Unreadable(io::ErrorKind::InvalidInput)
    );
    let large = dir.path().join("large.toml");
    std::fs::write(&large, vec![b'#'; FILE_BYTES_MAX as usize + 1]).unwrap();
    assert_eq!(problem(&large), Problem::TooLarge);
    let binary = dir.path().join("binary.toml");
    std::fs::write(&binary, [0xff, 0xfe]).unwrap();
    assert_eq!(problem(&binary), Problem::NotText);
    let good = dir.path().join("good.toml");
    std::fs::write(&good, GOOD).unwrap();
    assert!(read_toml_file::<Sample>(&good).is_ok());
}

/// Checks that an error about a file names the file, in one line.
fn is_a_sentence(error: &FileError) {
    let text = error.to_string();
    assert!(
        text.starts_with("vm.toml") && !text.contains(char::is_control),
        "{text:?}"
    );
}

proptest! {
    #[test]
    fn no_truncation_panics(length in 0usize..GOOD.len()) {
        if let Err(error) = read_toml::<Sample>("vm.toml", &GOOD[..length]) {
            is_a_sentence(&error);
        }
    }

    #[test]
    fn no_text_panics(text in "[a-z=\"\\[\\]{}.#\\n 0-9éß`,'-]{0,60}") {
        if let Err(error) = read_toml::<Sample>("vm.toml", &text) {
            is_a_sentence(&error);
        }
    }

    #[test]
    fn no_garbled_byte_panics(at in 0usize..GOOD.len(), with in prop::char::any()) {
        let text = format!("{}{with}{}", &GOOD[..at], &GOOD[at + 1..]);
        if let Err(error) = read_toml::<Sample>("vm.toml", &text) {
            is_a_sentence(&error);
        }
    }
}

#[test]
fn what_is_found_wrong_later_has_its_place() {
    let text = format!(
        "{GOOD}[[vm]]\nname = \"a\"\n[[vm]]\nname = \"b\"\nheat = [1,\n  2]\naction.phase = {{ cpi = 2 }}\n"
    );
    let source = Source::new("vm.toml", &text);
    let said = |key: &str| source.complaint(key, "is wrong").to_string();
    assert_eq!(said("vcpus"), "vm.toml:2:1: is wrong (key `vcpus`)");
    assert_eq!(
        said("regions[0].heat"),
        "vm.toml:7:1: is wrong (key `regions.heat`)"
    );
    assert_eq!(said("vm[1].name"), "vm.toml:15:1: is wrong (key `vm.name`)");
    assert_eq!(said("vm[1].heat[1]"), "vm.toml:17:3: is wrong (key `vm.heat`)");
    assert_eq!(
        said("vm[1].action.phase.cpi"),
        "vm.toml:18:18: is wrong (key `vm.action.phase.cpi`)"
    );
    // If a key is omitted, the place is the table that would contain it.
    assert_eq!(said("vm[1].weight"), "vm.toml:14:1: is wrong (key `vm.weight`)");
    assert_eq!(said("nothing"), "vm.toml: is wrong (key `nothing`)");
}
