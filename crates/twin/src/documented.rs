//! Tables that tests write into documents.

/// Checks that a document in `docs` has this table between the comments `<!-- MARK: begin -->` and `<!-- MARK: end -->`. If the
/// environment variable named in `write` is set, writes the table there instead.
pub(crate) fn hold_table(document: &str, mark: &str, write: &str, table: &str) {
    let path = format!("{}/../../docs/{document}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).expect("the document");
    let (begin, end) = (
        format!("<!-- {mark}: begin -->\n"),
        format!("<!-- {mark}: end -->"),
    );
    let (before, rest) = text.split_once(&begin).expect("where the table begins");
    let (written, after) = rest.split_once(&end).expect("where the table ends");
    if std::env::var_os(write).is_some() {
        std::fs::write(path, format!("{before}{begin}{table}{end}{after}")).expect("the document is written");
    } else {
        assert_eq!(written, table, "set {write}=1 to write the table again");
    }
}
