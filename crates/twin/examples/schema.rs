//! Writes the JSON schemas of the files that people write, and docs/FORMATS.md from them; `cargo xtask schema` runs it.

fn main() -> std::io::Result<()> {
    let project = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    homenode_twin::schema::files()
        .into_iter()
        .try_for_each(|(path, text)| std::fs::write(project.join(path), text))
}
