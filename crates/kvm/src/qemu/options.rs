//! The syntax of QEMU's options: words of a command line, option files (`-readconfig`), JSON, sizes and numbers.
//!
//! All of it is parsed as QEMU does (in its `util/qemu-option.c`, `util/cutils.c`, `qapi/opts-visitor.c`). The test
//! `what_a_real_qemu_makes_of_its_options_is_what_is_read` compares both.

use homenode_units::Bytes;
use serde_json::Value;

/// Options that are parsed here, with the name of their group in an option file, and the key that a first parameter without a key
/// has. Each takes the next word, even if that begins with a dash.
const GROUPS: [(&str, &str, Option<&str>); 14] = [
    ("name", "name", Some("guest")),
    ("machine", "machine", Some("type")),
    ("M", "machine", Some("type")),
    ("m", "memory", Some("size")),
    ("smp", "smp-opts", Some("cpus")),
    ("numa", "numa", Some("type")),
    ("object", "object", Some("qom-type")),
    ("device", "device", Some("driver")),
    ("chardev", "chardev", Some("backend")),
    ("mon", "mon", Some("chardev")),
    ("netdev", "netdev", Some("type")),
    ("overcommit", "overcommit", None),
    ("smbios", "smbios", None),
    ("run-with", "run-with", None),
];
/// Options whose word is taken verbatim, or is parsed according to its prefix.
const WORDS: [&str; 11] = [
    "uuid",
    "qmp",
    "qmp-pretty",
    "readconfig",
    "pidfile",
    "chroot",
    "mem-path",
    "set",
    "global",
    "realtime",
    "append",
];
/// Groups on which `-set` has no effect.
const NOT_SET: [&str; 3] = ["object", "machine", "smp-opts"];
/// More numbers than any list of CPUs or nodes has.
const NUMBERS_MAX: usize = 4096;
/// More options, more parameters per option, and longer keys than any VM has. A process can write any line.
const OPTIONS_MAX: usize = 4096;
const PARAMETERS_MAX: usize = 4096;
const KEY_BYTES_MAX: usize = 64;

/// One option with its parameters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct QemuOption {
    /// The name of the option's group: `memory` for `-m`.
    pub name: String,
    /// The word after the option, verbatim.
    pub word: String,
    /// The parameters in order. A key may occur several times.
    parameters: Vec<(String, String)>,
}

impl QemuOption {
    /// Parses the socket of `-qmp unix:…`, where the path comes first.
    pub(super) fn of_socket(word: &str) -> QemuOption {
        QemuOption {
            parameters: parameters(word, Some("path")),
            ..QemuOption::default()
        }
    }

    /// Returns the value of a key, the last one if the key occurs several times.
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        let mut latest = self.parameters.iter().rev();
        latest
            .find(|(found, _)| found == key)
            .map(|(_, value)| value.as_str())
    }

    /// Returns the numbers in a list: `key=0,key=2-3`, a JSON array, or `key.0 = "0"` in an option file.
    pub(super) fn numbers(&self, key: &str) -> Vec<u32> {
        let is_of_list = |found: &str| {
            let rest = found.strip_prefix(key);
            rest.is_some_and(|rest| rest.is_empty() || is_index(rest))
        };
        let of_key = self.parameters.iter().filter(|(found, _)| is_of_list(found));
        of_key
            .flat_map(|(_, value)| range(value).into_iter().flatten())
            .take(NUMBERS_MAX)
            .collect()
    }

    /// Returns a key's value as a number.
    pub(super) fn number(&self, key: &str) -> Option<u32> {
        number(self.get(key)?)
    }

    /// Returns a key's value as a size.
    pub(super) fn size(&self, key: &str) -> Option<Bytes> {
        size(self.get(key)?)
    }

    /// Whether this switch is on.
    pub(super) fn is_on(&self, key: &str) -> bool {
        self.get(key).is_some_and(is_on)
    }
}

fn is_index(rest: &str) -> bool {
    let index = rest.strip_prefix('.');
    index.is_some_and(|index| !index.is_empty() && index.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Whether a switch with this value is on.
pub(super) fn is_on(value: &str) -> bool {
    matches!(value, "on" | "yes" | "true" | "y")
}

/// The options of a command line, without the program's name.
pub(super) fn of_words<'a>(words: impl IntoIterator<Item = &'a str>) -> Vec<QemuOption> {
    let mut options = Vec::new();
    let mut words = words.into_iter().peekable();
    while let Some(word) = words.next().filter(|_| options.len() < OPTIONS_MAX) {
        let Some(name) = word.strip_prefix('-').filter(|rest| !rest.is_empty()) else {
            continue; // the image of a first disk
        };
        let name = name.strip_prefix('-').unwrap_or(name);
        if let Some((_, group, implied)) = GROUPS.iter().find(|(short, ..)| *short == name) {
            let word = words.next().unwrap_or_default();
            options.push(QemuOption {
                name: (*group).to_owned(),
                word: word.to_owned(),
                parameters: parameters(word, *implied),
            });
        } else if WORDS.contains(&name) {
            let word = words.next().unwrap_or_default().to_owned();
            let parameters = parameters(&word, None);
            let name = name.to_owned();
            options.push(QemuOption {
                name,
                word,
                parameters,
            });
        } else {
            let name = name.to_owned();
            options.push(QemuOption {
                name,
                ..QemuOption::default()
            });
            let _ = words.next_if(|next| !next.starts_with('-'));
        }
    }
    options
}

/// The options of a file: groups `[option "id"]` with lines `key = "value"`.
pub(super) fn of_file(text: &str) -> Vec<QemuOption> {
    let mut options: Vec<QemuOption> = Vec::new();
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with('#')) {
        if options.len() >= OPTIONS_MAX {
            break;
        }
        if let Some(group) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            let (name, id) = group.split_once(' ').unwrap_or((group, ""));
            let id = id.trim().trim_matches('"');
            let id = (!id.is_empty()).then(|| ("id".to_owned(), id.to_owned()));
            options.push(QemuOption {
                name: name.to_owned(),
                word: String::new(),
                parameters: id.into_iter().collect(),
            });
        } else if let Some((key, value)) = line.split_once('=')
            && let Some(value) = value.trim().strip_prefix('"')
            && let Some(option) = options.last_mut()
            && option.parameters.len() < PARAMETERS_MAX
        {
            let value = value.split('"').next().unwrap_or_default();
            option.parameters.push((key.trim().to_owned(), value.to_owned()));
        }
    }
    options
}

/// Applies `-set group.id.key=value` to the options before it.
pub(super) fn set(options: &mut [QemuOption]) {
    for at in 0..options.len() {
        let (before, rest) = options.split_at_mut(at);
        let Some(option) = rest.first().filter(|option| option.name == "set") else {
            continue;
        };
        let Some((place, value)) = option.word.split_once('=') else {
            continue;
        };
        let mut parts = place.splitn(3, '.');
        let (Some(group), Some(id), Some(key)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let is_meant = |other: &&mut QemuOption| {
            // An option in JSON does not belong to a group.
            other.name == group && other.get("id") == Some(id) && !other.word.starts_with('{')
        };
        if let Some(other) = before
            .iter_mut()
            .find(is_meant)
            .filter(|other| !NOT_SET.contains(&group) && other.parameters.len() < PARAMETERS_MAX)
        {
            other.parameters.push((key.to_owned(), value.to_owned()));
        }
    }
}

/// Parses parameters: `a,b=c`, where `,,` is a comma within a value, or a JSON object. A parameter without a value is a switch,
/// and a leading `no` turns it off.
fn parameters(word: &str, implied: Option<&str>) -> Vec<(String, String)> {
    if word.starts_with('{') {
        return of_json(word);
    }
    let mut parameters = Vec::new();
    let mut rest = word;
    let mut implied = implied;
    while !rest.is_empty() && parameters.len() < PARAMETERS_MAX {
        let end = rest.find(['=', ',']).unwrap_or(rest.len());
        let (name, value) = if let Some(after) = rest[end..].strip_prefix('=') {
            let (value, left) = until_comma(after);
            let name = &rest[..end];
            rest = left;
            (name, value)
        } else if let Some(name) = implied {
            let (value, left) = until_comma(rest);
            rest = left;
            (name, value)
        } else {
            let switch = &rest[..end];
            rest = &rest[end..];
            match switch.strip_prefix("no") {
                Some(name) => (name, "off".to_owned()),
                None => (switch, "on".to_owned()),
            }
        };
        parameters.push((name.to_owned(), value));
        rest = rest.strip_prefix(',').unwrap_or(rest);
        implied = None;
    }
    parameters
}

/// Splits off a value, which ends at the first comma that is not doubled. Returns the value and the rest.
fn until_comma(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(',') {
        value.push_str(&rest[..at]);
        let Some(after) = rest[at..].strip_prefix(",,") else {
            return (value, &rest[at..]);
        };
        value.push(',');
        rest = after;
    }
    value.push_str(rest);
    (value, "")
}

/// Returns the members of a JSON object. An array repeats its key for each element; an inner object's keys follow a dot.
fn of_json(text: &str) -> Vec<(String, String)> {
    fn add(key: String, value: Value, into: &mut Vec<(String, String)>) {
        if into.len() >= PARAMETERS_MAX || key.len() > KEY_BYTES_MAX {
            return;
        }
        match value {
            Value::String(text) => into.push((key, text)),
            Value::Bool(is_on) => into.push((key, if is_on { "on" } else { "off" }.to_owned())),
            Value::Number(number) => into.push((key, number.to_string())),
            Value::Array(all) => all.into_iter().for_each(|value| add(key.clone(), value, into)),
            Value::Object(all) => {
                all.into_iter()
                    .for_each(|(inner, value)| add(format!("{key}.{inner}"), value, into));
            }
            Value::Null => {}
        }
    }
    let mut parameters = Vec::new();
    let read = serde_json::from_str(text).or_else(|_| serde_json::from_str(&double_quoted(text)));
    if let Ok(Value::Object(all)) = read {
        all.into_iter()
            .for_each(|(key, value)| add(key, value, &mut parameters));
    }
    parameters
}

/// Turns QEMU's JSON, where strings may be in single quotes, into standard JSON.
fn double_quoted(text: &str) -> String {
    let mut written = String::with_capacity(text.len());
    let mut within: Option<char> = None;
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match (letter, within) {
            ('\\', Some(_)) => match letters.next() {
                Some('\'') => written.push('\''),
                Some(next) => written.extend(['\\', next]),
                None => written.push('\\'),
            },
            ('"' | '\'', None) => {
                within = Some(letter);
                written.push('"');
            }
            ('"', Some('\'')) => written.push_str("\\\""),
            (_, Some(quote)) if letter == quote => {
                within = None;
                written.push('"');
            }
            _ => written.push(letter),
        }
    }
    written
}

/// Parses a number as in C: decimal, hexadecimal after `0x`, or octal after `0`.
pub(super) fn number(text: &str) -> Option<u32> {
    u32::try_from(integer(text)?).ok()
}

fn integer(text: &str) -> Option<u64> {
    let (digits, radix) = match text.as_bytes() {
        [b'0', b'x' | b'X', ..] => (&text[2..], 16),
        [b'0', _, ..] => (&text[1..], 8),
        _ => (text, 10),
    };
    let is_plain = !digits.starts_with(['+', '-']);
    u64::from_str_radix(digits, radix).ok().filter(|_| is_plain)
}

/// Parses `3` or `0-3`.
fn range(text: &str) -> Option<std::ops::RangeInclusive<u32>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (number(first)?, number(last)?);
    (first <= last).then_some(first..=last)
}

/// Parses a size in bytes: `512M`, `0.5G`, `0x4000`.
pub(super) fn size(text: &str) -> Option<Bytes> {
    let is_hex = text.starts_with("0x") || text.starts_with("0X");
    let start = if is_hex { 2 } else { 0 };
    let is_digit = |c: char| {
        if is_hex {
            c.is_ascii_hexdigit()
        } else {
            c.is_ascii_digit() || c == '.'
        }
    };
    let end = text[start..]
        .find(|c| !is_digit(c))
        .map_or(text.len(), |at| at + start);
    let unit = match text[end..].to_ascii_uppercase().as_str() {
        "" | "B" => 1,
        "K" => 1u64 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        "T" => 1 << 40,
        "P" => 1 << 50,
        "E" => 1 << 60,
        _ => return None,
    };
    let (whole, part) = text[..end].split_once('.').unwrap_or((&text[..end], ""));
    let whole = if is_hex {
        integer(whole)?
    } else {
        whole.parse::<u64>().ok()?
    };
    let fraction = match part.trim_end_matches('0') {
        "" => 0.0,
        digits => format!("0.{digits}").parse::<f64>().ok()?,
    };
    // A byte has no fractions.
    if fraction > 0.0 && unit == 1 {
        return None;
    }
    let part = (fraction * unit as f64 + 0.5) as u64;
    whole.checked_mul(unit)?.checked_add(part).map(Bytes)
}

/// Parses the size of `-m`, which is in MiB if it ends with a digit. Rounds it up as QEMU does.
pub(super) fn memory_size(text: &str) -> Option<Bytes> {
    const ROUNDED_TO: u64 = 8192;
    let size = match text.ends_with(|c: char| c.is_ascii_digit()) {
        true => size(&format!("{text}M")),
        false => size(text),
    };
    let size = size.filter(|size| size.0 > 0)?;
    size.0.checked_next_multiple_of(ROUNDED_TO).map(Bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(line: &str) -> QemuOption {
        of_words(line.split(' ')).remove(0)
    }

    #[test]
    fn a_key_that_stands_twice_has_its_last_value_or_is_a_list() {
        let option =
            first("-object memory-backend-ram,size=1G,size=2G,host-nodes=0,host-nodes=2-3,host-nodes=0x5");
        assert_eq!(option.get("qom-type"), Some("memory-backend-ram"));
        assert_eq!(option.size("size"), Some(Bytes(2 << 30)));
        assert_eq!(option.numbers("host-nodes"), [0, 2, 3, 5]);
        let json =
            first(r#"-object {"qom-type":"memory-backend-ram","host-nodes":[1,3],"size":4096,"share":true}"#);
        assert_eq!(
            (json.numbers("host-nodes"), json.size("size"), json.is_on("share")),
            (vec![1, 3], Some(Bytes(4096)), true)
        );
        let file =
            of_file("[object \"m\"]\nhost-nodes.0 = \"2\"\nhost-nodes.1 = \"4\"\nhost-nodesx = \"9\"\n");
        assert_eq!(file[0].numbers("host-nodes"), [2, 4]);
        assert_eq!(file[0].get("id"), Some("m"));
        // Invalid numbers are left out, and lists are limited in length.
        assert_eq!(
            first("-numa node,cpus=a,cpus=3-1,cpus=-1,cpus=2").numbers("cpus"),
            [2]
        );
        assert_eq!(
            first("-numa node,cpus=0-4294967295").numbers("cpus").len(),
            NUMBERS_MAX
        );
    }

    #[test]
    fn sizes_are_read_with_fractions_and_units() {
        for (text, bytes) in [
            ("0.5G", Some(1 << 29)),
            ("1.7k", Some(1741)),
            ("2.T", Some(2 << 40)),
            ("0.25P", Some(1 << 48)),
            ("1E", Some(1 << 60)),
            ("0x40", Some(64)),
            ("0x40M", Some(64 << 20)),
            ("17b", Some(17)),
            ("1.5", None),
            ("1.5B", None),
            (".5G", None),
            ("1.2.3G", None),
            ("1e3", None),
            ("16MiB", None),
            ("-1G", None),
            ("99999999999999999999T", None),
            ("16E", None),
            ("", None),
        ] {
            assert_eq!(size(text), bytes.map(Bytes), "{text}");
        }
        for (text, bytes) in [
            ("64", Some(64 << 20)),
            ("0.3G", Some(322_125_824)),
            ("512k", Some(512 << 10)),
            ("0x40", Some(64 << 20)),
            ("0", None),
        ] {
            assert_eq!(memory_size(text), bytes.map(Bytes), "-m {text}");
        }
    }

    #[test]
    fn switches_words_and_doubled_commas_are_read() {
        let chardev = first("--chardev socket,id=c,path=/a,,b,server,nowait");
        assert_eq!(
            ["backend", "path", "server", "wait"].map(|key| chardev.get(key)),
            [Some("socket"), Some("/a,b"), Some("on"), Some("off")]
        );
        assert_eq!(first("-name x,,,process=z").get("guest"), Some("x,"));
        let words = [
            "-name",
            "-m",
            "-append",
            "-m",
            "-S",
            "disk.img",
            "-readconfig",
            "a,b",
        ];
        let options = of_words(words);
        assert_eq!(options[0].get("guest"), Some("-m"));
        assert_eq!(
            (options[3].name.as_str(), options[3].word.as_str()),
            ("readconfig", "a,b")
        );
    }

    #[test]
    fn json_may_stand_in_single_quotes() {
        let option = first(r#"-device {'driver':'virtio-balloon-pci','id':'it\'s"one"','x':{'y':1}}"#);
        assert_eq!(option.get("id"), Some("it's\"one\""));
        assert_eq!(
            (option.get("driver"), option.number("x.y")),
            (Some("virtio-balloon-pci"), Some(1))
        );
        assert_eq!(first("-device {'driver':").get("driver"), None);
    }

    #[test]
    fn what_is_set_later_counts_and_some_groups_cannot_be_set() {
        let line = "-device a,id=d,x=1 -set device.d.x=2 -object o,id=d,x=1 -set object.d.x=2 -set device.none.x=3 -set x";
        let mut options = of_words(line.split(' '));
        set(&mut options);
        assert_eq!((options[0].get("x"), options[2].get("x")), (Some("2"), Some("1")));
    }

    #[test]
    fn no_line_makes_more_of_itself_than_it_is() {
        // 30,000 elements under a key of 60,000 letters would be 1.8 GB.
        let key = "k".repeat(60_000);
        let zeros = vec!["0"; 30_000].join(",");
        let of = |word: &str| of_words(["-object", word]).pop().expect("an option").parameters;
        assert_eq!(of(&format!("{{\"{key}\":[{zeros}]}}")), []);
        assert_eq!(of(&format!("{{\"cpus\":[{zeros}]}}")).len(), PARAMETERS_MAX);
        assert_eq!(of(&vec!["a=b"; 30_000].join(",")).len(), PARAMETERS_MAX);
        let words = vec!["-S"; 30_000];
        assert_eq!(of_words(words).len(), OPTIONS_MAX);
        let file = "[device]\n".repeat(30_000) + &"a = \"b\"\n".repeat(30_000);
        let options = of_file(&file);
        assert!(
            options.len() <= OPTIONS_MAX
                && options
                    .iter()
                    .all(|option| option.parameters.len() <= PARAMETERS_MAX)
        );
    }
}
