//! Texts of causes, which the command, the page and the document share.

use homenode_why::Code;

#[test]
fn causes_are_told_as_the_document_has_them() {
    let document = include_str!("../../../../docs/WHY.md");
    let all = [
        Code::Waiting,
        Code::Quota,
        Code::Permit,
        Code::RemoteMemory,
        Code::LlcPollution,
        Code::Controller,
        Code::Link,
        Code::SmtSibling,
        Code::PageMoves,
        Code::Balloon,
        Code::Clock,
        Code::OwnPhase,
    ];
    for code in all {
        let name = serde_json::json!(code);
        let row = format!("| `{}` | {} | ", name.as_str().unwrap(), code.text());
        assert!(document.contains(&row), "docs/WHY.md lacks: {row}");
    }
    assert_eq!(document.matches("\n| `").count(), all.len());
}
