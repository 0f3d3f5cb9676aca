//! The reports in `data/evidence`: they can be read, name nothing, and their pages are made of them.

use std::fs;
use std::path::{Path, PathBuf};

use homenode_evidence::page::page;
use homenode_evidence::read::{read, written};

fn folders() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/evidence");
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.is_dir()).collect()
}

/// `scripts/take-evidence.sh` takes over a new report. To write pages again, run
/// `HOMENODE_WRITE_EVIDENCE=1 cargo test -p homenode-evidence --test collected`.
#[test]
fn each_report_names_nothing_and_its_page_is_made_of_it() {
    let folders = folders();
    let index = include_str!("../../../data/evidence/index.toml");
    assert_eq!(folders.len(), index.matches("\nfolder = ").count());
    for folder in folders {
        let (json, html) = (folder.join("evidence.json"), folder.join("evidence.html"));
        let shared = read(&fs::read_to_string(&json).unwrap()).unwrap().to_share();
        if std::env::var_os("HOMENODE_WRITE_EVIDENCE").is_some() {
            fs::write(&json, written(&shared)).unwrap();
            fs::write(&html, page(&shared)).unwrap();
        }
        let is_as =
            |path: &Path, text: &str| fs::read_to_string(path).is_ok_and(|committed| committed == text);
        assert!(
            is_as(&json, &written(&shared)),
            "{}: not as it is shared",
            json.display()
        );
        assert!(
            is_as(&html, &page(&shared)),
            "{}: not of its report",
            html.display()
        );
    }
}
