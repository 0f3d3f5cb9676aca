//! How long a page of the documentation takes to read.

/// Words that a reader of technical prose reads in a minute.
const WORDS_PER_MINUTE: usize = 250;

/// Adds the minutes that reading takes to the line of a page that names its readers (`*For operators who …*`). Words count as
/// `wc -w` counts them, tables and examples included.
pub fn with_reading_time(page: &str) -> String {
    let minutes = (page.split_whitespace().count() / WORDS_PER_MINUTE).max(1);
    let is_readers = |line: &str| line.starts_with("*For ") && line.ends_with(".*");
    match page.lines().find(|line| is_readers(line)) {
        Some(line) => page.replacen(line, &format!("{line} {minutes} min."), 1),
        None => page.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_that_names_the_readers_gets_the_minutes() {
        let page = |words: usize| format!("# Title\n\n*For operators.*\n\n{}\n", "word ".repeat(words));
        assert!(with_reading_time(&page(10)).contains("\n*For operators.* 1 min.\n"));
        assert!(with_reading_time(&page(1000)).contains("\n*For operators.* 4 min.\n"));
        assert_eq!(with_reading_time("# Title\n\nText.\n"), "# Title\n\nText.\n");
    }
}
