//! Writes the JSON schemas of scenario and workload files into `data/schema`; `cargo xtask schema` runs it.

fn main() -> std::io::Result<()> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/schema");
    std::fs::create_dir_all(&folder)?;
    homenode_twin::schema::files()
        .into_iter()
        .try_for_each(|(name, text)| std::fs::write(folder.join(name), text))
}
