//! Numbers as people read them.

/// Writes a number with three digits or more that matter, and commas between thousands.
pub fn number(value: f64) -> String {
    let size = value.abs();
    match size {
        _ if !value.is_finite() => "unknown".to_owned(),
        0.0 => "0".to_owned(),
        _ if !(1e-4..1e15).contains(&size) => format!("{value:.2e}"),
        _ if size >= 99.95 => with_commas(value.round()),
        _ if size >= 9.995 => trimmed(&format!("{value:.1}")),
        _ if size >= 0.9995 => trimmed(&format!("{value:.2}")),
        _ => trimmed(&format!("{value:.*}", (2.0 - size.log10().floor()) as usize)),
    }
}

/// Takes zeros that say nothing from the end: 2.50 is 2.5.
fn trimmed(text: &str) -> String {
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn with_commas(whole: f64) -> String {
    let digits = format!("{:.0}", whole.abs());
    let groups: Vec<&str> = digits
        .as_bytes()
        .rchunks(3)
        .rev()
        .map(|group| std::str::from_utf8(group).unwrap_or_default())
        .collect();
    format!("{}{}", if whole < 0.0 { "-" } else { "" }, groups.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_keeps_three_digits_that_matter() {
        for (value, text) in [
            (0.0, "0"),
            (0.012_345, "0.0123"),
            (0.5, "0.5"),
            (1.0, "1"),
            (-2.345, "-2.35"),
            (12.34, "12.3"),
            (99.97, "100"),
            (999.7, "1,000"),
            (1_234_567.0, "1,234,567"),
            (-1_234.0, "-1,234"),
            (1e-9, "1.00e-9"),
            (f64::NAN, "unknown"),
        ] {
            assert_eq!(number(value), text);
        }
    }
}
