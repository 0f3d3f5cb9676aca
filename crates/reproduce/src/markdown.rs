//! Formats Markdown tables.

/// Returns a table with this header.
pub(crate) fn markdown(
    header: impl IntoIterator<Item = impl Into<String>>,
    rows: impl IntoIterator<Item = Vec<String>>,
) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let escaped = |row: Vec<String>| {
        let cells = row.iter().map(|cell| cell.replace('|', "\\|").replace('\n', " "));
        cells.collect::<Vec<String>>()
    };
    let header = escaped(header.into_iter().map(Into::into).collect());
    let rows: String = rows.into_iter().map(|row| line(&escaped(row))).collect();
    format!(
        "{}{}{rows}",
        line(&header),
        line(&vec!["---".to_owned(); header.len()])
    )
}
