//! Formats Markdown tables.

/// Returns a table with this header.
pub(crate) fn markdown(header: &[String], rows: impl Iterator<Item = Vec<String>>) -> String {
    let line = |cells: &[String]| {
        let cells: Vec<String> = cells
            .iter()
            .map(|cell| cell.replace('|', "\\|").replace('\n', " "))
            .collect();
        format!("| {} |\n", cells.join(" | "))
    };
    let rule = vec!["---".to_owned(); header.len()];
    let rows: String = rows.map(|row| line(&row)).collect();
    format!("{}{}{rows}", line(header), line(&rule))
}
