//! The pages of the reports in `data/evidence`, in a browser.

use std::path::Path;

use serde_json::json;

use super::browser::{Browser, Colours};
use super::{axe, is_accessible};

/// Widths of a desktop's window and of a phone.
const WIDTHS: [u32; 2] = [1280, 400];

#[test]
fn a_report_answers_first_fits_a_phone_and_fetches_nothing() {
    let axe = axe();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.unwrap().block_on(async {
        for colours in [Colours::Light, Colours::Dark] {
            let browser = Browser::start(colours).await;
            for (name, page) in pages() {
                browser.client.goto(&page).await.unwrap();
                for width in WIDTHS {
                    browser.fit((width, 800)).await;
                    let what = format!("{name}, {width} wide, {colours:?}");
                    looks_right(&browser, &what).await;
                    browser
                        .run("document.querySelectorAll('details').forEach((one) => { one.open = true })")
                        .await;
                    looks_right(&browser, &what).await;
                    is_accessible(&browser, &axe, &what).await;
                }
            }
            browser.close().await;
        }
    });
}

/// Returns name and address of each report's page.
fn pages() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/evidence");
    let folders = std::fs::read_dir(folder.canonicalize().unwrap()).unwrap();
    let pages = folders.map(|entry| entry.unwrap().path().join("evidence.html"));
    let pages: Vec<_> = pages
        .filter(|page| page.exists())
        .map(|page| (page.display().to_string(), format!("file://{}", page.display())))
        .collect();
    assert!(!pages.is_empty());
    pages
}

async fn looks_right(browser: &Browser, what: &str) {
    let seen = browser
        .run(
            "const answer = document.querySelector('.verdict').getBoundingClientRect(); scrollTo(0, 0); \
             return [document.documentElement.scrollWidth <= innerWidth, answer.bottom < innerHeight / 2, \
             performance.getEntriesByType('resource').length, \
             [...document.querySelectorAll('svg.strip circle')].every((one) => one.getBoundingClientRect().width > 0)]",
        )
        .await;
    assert_eq!(seen, json!([true, true, 0, true]), "{what}");
}
