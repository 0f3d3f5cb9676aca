//! Strips the contents of literals from Rust text.
//!
//! A rule about words or widths must ignore a program's output, so string and character literals are emptied. This module
//! knows only the part of Rust's lexical structure that it needs: comments, strings with escapes, raw strings, and how a
//! character differs from a lifetime.

/// Returns the text with all string and character literals emptied. Comments stay, and so do line ends, even those in strings.
pub(super) fn without_literals(source: &str) -> String {
    let mut kept = String::with_capacity(source.len());
    let mut rest = source;
    while !rest.is_empty() {
        let (piece, length) = next_piece(rest);
        let (text, after) = rest.split_at(length);
        match piece {
            Piece::Code => kept.push_str(text),
            Piece::Literal => {
                kept.push('"');
                kept.extend(text.chars().filter(|&c| c == '\n'));
                kept.push('"');
            }
        }
        rest = after;
    }
    kept
}

enum Piece {
    Code,
    Literal,
}

/// Returns the kind and length in bytes of the first piece of the text.
fn next_piece(text: &str) -> (Piece, usize) {
    if text.starts_with("//") {
        return (Piece::Code, text.find('\n').unwrap_or(text.len()));
    }
    if text.starts_with("/*") {
        return (Piece::Code, block_comment(text));
    }
    if let Some(length) = raw_string(text)
        .or_else(|| string(text))
        .or_else(|| character(text))
    {
        return (Piece::Literal, length);
    }
    let is_word = |c: char| c == '_' || c.is_alphanumeric();
    let word = text.find(|c| !is_word(c)).unwrap_or(text.len());
    let one = text.chars().next().map_or(0, char::len_utf8);
    (Piece::Code, word.max(one))
}

/// Returns the length of a block comment, which may be nested.
fn block_comment(text: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < text.len() {
        let rest = &text.as_bytes()[at..];
        if rest.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    text.len()
}

/// Returns the length of `r"…"`, `r#"…"#` and so on, including byte and C strings.
fn raw_string(text: &str) -> Option<usize> {
    let after_prefix = ["r", "br", "cr"]
        .iter()
        .find_map(|prefix| text.strip_prefix(prefix))?;
    let after_hashes = after_prefix.trim_start_matches('#');
    let hashes = &after_prefix[..after_prefix.len() - after_hashes.len()];
    let body = after_hashes.strip_prefix('"')?;
    let end = format!("\"{hashes}");
    let after = body.split_once(&end).map_or("", |(_, after)| after);
    Some(text.len() - after.len())
}

/// Returns the length of `"…"`. The prefix of a byte or C string counts as code.
fn string(text: &str) -> Option<usize> {
    let body = text.strip_prefix('"')?;
    let mut escaped = false;
    for (at, c) in body.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return Some(at + 2),
            _ => {}
        }
    }
    Some(text.len())
}

/// Returns the length of `'x'` or `'\n'`; `None` for the lifetime `'x`.
fn character(text: &str) -> Option<usize> {
    let body = text.strip_prefix('\'')?;
    let mut chars = body.char_indices();
    let (_, first) = chars.next()?;
    if first == '\\' {
        let (escaped, _) = chars.next()?;
        let close = body[escaped + 1..].find('\'')?;
        return Some(1 + escaped + 1 + close + 1);
    }
    let (second_at, second) = chars.next()?;
    (second == '\'').then_some(second_at + 2)
}

#[cfg(test)]
mod tests {
    use super::without_literals;

    #[test]
    fn literals_are_emptied_and_the_rest_stays() {
        let cases = [
            (r#"f("a \" b", c) // "d""#, r#"f("", c) // "d""#),
            (r##"let x = r#"a "b" c"#; y"##, r#"let x = ""; y"#),
            (r#"b"x" br"y\" z"#, r#"b"" "" z"#),
            (
                r"match c { '\'' | '\\' | '\u{1f}' => 'é' }",
                r#"match c { "" | "" | "" => "" }"#,
            ),
            (
                "fn f<'a>(x: &'a str) {} 'l: loop {}",
                "fn f<'a>(x: &'a str) {} 'l: loop {}",
            ),
            (r#"/* a "b /* c */ d" */ "e""#, r#"/* a "b /* c */ d" */ """#),
            ("\"a\nb\"\nc", "\"\n\"\nc"),
            ("for r#type in \"not closed", "for r#type in \"\""),
            ("don", "don"),
        ];
        for (source, expected) in cases {
            assert_eq!(without_literals(source), expected, "of {source}");
        }
    }
}
