//! Escapes text from outside before it is shown: VMs' names, workloads, files, libvirt's messages. A terminal obeys control
//! characters, and shows text in another order because of direction marks. Both are shown as escapes such as `\\u{1b}`.

use std::fmt::{self, Display, Write as _};

/// Returns true if a character is visible by itself. Control characters, direction marks, joiners, and characters that no font
/// has are not visible by themselves.
fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return !c.is_ascii_control();
    }
    // Asks the standard library's table, with a letter in front because it counts a lone accent as unprintable.
    let together = format!("a{c}");
    together.escape_debug().eq(together.chars())
}

/// A text shown on one line, with newlines escaped too.
pub struct OneLine<'a>(pub &'a str);

impl Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Escaping { to: f, lines: "" }.write_str(self.0)
    }
}

/// A text of several lines. Newlines are kept, everything else unprintable is escaped.
pub struct Lines<'a>(pub fmt::Arguments<'a>);

impl Display for Lines<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Escaping { to: f, lines: "\n" }.write_fmt(self.0)
    }
}

/// A message that may have several lines. All lines after the first are indented, so that none can pass for another message.
pub struct Sentence<'a>(pub &'a str);

impl Display for Sentence<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Escaping { to: f, lines: "\n  " }.write_str(self.0)
    }
}

/// Writes escaped text. `lines` replaces each newline; if it is empty, newlines are escaped too.
struct Escaping<'a, 'b> {
    to: &'a mut fmt::Formatter<'b>,
    lines: &'static str,
}

impl fmt::Write for Escaping<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.chars().try_for_each(|c| match c {
            '\n' if !self.lines.is_empty() => self.to.write_str(self.lines),
            c if is_printable(c) => self.to.write_char(c),
            c => write!(self.to, "{}", c.escape_default()),
        })
    }
}

/// Escapes unprintable characters in the strings of a JSON text. The result parses to the same value.
pub fn json(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c == '\n' || is_printable(c) {
            out.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            // Writing to a string cannot fail.
            let _ = write!(out, "\\u{unit:04x}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "a\u{1b}[2Jb\u{7}\u{9b}31m\u{85}\u{202e}cod\u{2066}\u{2069}\u{200e}\u{200f}\u{61c}\u{7f}\r\n\te\u{2028}\u{feff}\u{e0001}";

    #[test]
    fn what_is_not_printable_is_shown_as_what_it_is() {
        let all = (0..0x20)
            .chain(0x7f..=0x9f)
            .chain(0x202a..=0x202e)
            .chain(0x2066..=0x2069);
        let all = all.chain([0x200e, 0x200f, 0x61c]).filter_map(char::from_u32);
        for c in all {
            let shown = OneLine(&format!("x{c}y")).to_string();
            assert_eq!(shown, format!("x{}y", c.escape_default()));
        }
        assert!(OneLine(HOSTILE).to_string().is_ascii());
        assert_eq!(Lines(format_args!("a\nb\u{1b}")).to_string(), "a\nb\\u{1b}");
        assert_eq!(Sentence("a\nhomenode: b").to_string(), "a\n  homenode: b");
    }

    #[test]
    fn names_in_any_script_stay_as_they_are() {
        for name in [
            "web-1",
            "päckchen",
            "pa\u{308}ckchen",
            "база",
            "数据库",
            "हिन्दी",
            "it's \"so\" C:\\x",
            "µ…—→",
        ] {
            assert_eq!(OneLine(name).to_string(), name);
            assert_eq!(json(name), name);
        }
    }

    #[test]
    fn json_stays_exact() {
        let text = serde_json::to_string_pretty(&[HOSTILE, "päckchen"]).expect("JSON");
        let shown = json(&text);
        let read: Vec<String> = serde_json::from_str(&shown).expect("still JSON");
        assert_eq!(read, [HOSTILE, "päckchen"]);
        assert!(shown.chars().all(|c| c == '\n' || is_printable(c)), "{shown}");
    }
}
