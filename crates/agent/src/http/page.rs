//! Serves the page for people, from the files in `web`, which are compiled into the program.
//!
//! The page is a client like any other: it gets its data from below `/v1`. Its content security policy allows it to load from and
//! connect to this server only, to run no scripts except these files, and to create no elements from text.

use axum::Router;
use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use axum::http::{HeaderName, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::Site;
use super::problem::Failed;

/// The page's content security policy: <https://www.w3.org/TR/CSP3/>. Trusted types keep names of VMs from becoming
/// elements.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// A file of the page, with its name.
macro_rules! file {
    ($name:literal) => {
        (
            $name,
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../web/", $name)),
        )
    };
}

const INDEX: (&str, &str) = file!("index.html");
/// Files served below `/assets`.
const FILES: [(&str, &str); 23] = [
    file!("api.js"),
    file!("ask.js"),
    file!("bar.js"),
    file!("chart.js"),
    file!("decisions.js"),
    file!("dom.js"),
    file!("events.js"),
    file!("format.js"),
    file!("icon.svg"),
    file!("keyboard.js"),
    file!("limits.js"),
    file!("links.js"),
    file!("live.js"),
    file!("main.js"),
    file!("map.js"),
    file!("proposals.js"),
    file!("router.js"),
    file!("style.css"),
    file!("theme.js"),
    file!("time.js"),
    file!("vm.js"),
    file!("vms.js"),
    file!("why.js"),
];

/// Builds the page's routes.
pub(super) fn routes() -> Router<Site> {
    Router::new()
        .route("/", get(async || served(INDEX)))
        .route("/assets/{name}", get(asset))
}

async fn asset(name: Result<Path<String>, PathRejection>) -> Result<Response, Failed> {
    let Path(name) = name?;
    let found = FILES.iter().find(|(file, _)| *file == name);
    found.map(|file| served(*file)).ok_or_else(Failed::no_such_path)
}

fn served((name, text): (&'static str, &'static str)) -> Response {
    let kind = match name.rsplit('.').next() {
        Some("html") => "text/html; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("svg") => "image/svg+xml",
        _ => "text/javascript; charset=utf-8",
    };
    let headers = [
        (header::CONTENT_TYPE, kind),
        // Browsers ask the server again each time, since another version of the agent has other files.
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (
            HeaderName::from_static("cross-origin-opener-policy"),
            "same-origin",
        ),
        (
            HeaderName::from_static("cross-origin-resource-policy"),
            "same-origin",
        ),
    ];
    (headers, text).into_response()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_file_of_the_page_is_served_and_every_import_leads_to_one() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../web");
        let there: BTreeSet<String> = std::fs::read_dir(folder)
            .expect("the folder is there")
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != "README.md" && name != INDEX.0)
            .collect();
        let served: BTreeSet<String> = FILES.iter().map(|(name, _)| (*name).to_owned()).collect();
        assert_eq!(there, served);
        let imported = |text: &'static str| text.split("from \"./").skip(1);
        for (name, text) in FILES {
            for import in imported(text) {
                let import = import.split('"').next().unwrap_or_default();
                assert!(served.contains(import), "{name} imports {import}");
            }
        }
        let named = INDEX.1.split("\"/assets/").skip(1);
        for asset in named.map(|rest| rest.split('"').next().unwrap_or_default()) {
            assert!(served.contains(asset), "index.html names {asset}");
        }
    }

    #[test]
    fn causes_are_told_as_the_document_has_them() {
        let document = include_str!("../../../../docs/WHY.md");
        let (_, why) = FILES.iter().find(|(name, _)| *name == "why.js").unwrap();
        let rows = document.lines().filter_map(|line| line.strip_prefix("| `"));
        let rows: Vec<Vec<&str>> = rows.map(|row| row.split('|').map(str::trim).collect()).collect();
        assert!(rows.len() >= 12);
        for row in rows {
            let said = format!("\"{}\": \"{}\",", row[0].trim_end_matches('`'), row[1]);
            assert!(why.contains(&said), "{said}");
        }
    }

    #[test]
    fn no_file_names_another_server_or_makes_elements_out_of_text() {
        for (name, text) in FILES.iter().chain([&INDEX]) {
            // A namespace only looks like an address: it is never requested.
            let text = text.replace("http://www.w3.org/2000/svg", "");
            for wrong in [
                "http://",
                "https://",
                "innerHTML",
                "insertAdjacentHTML",
                "eval(",
                "style=\"",
            ] {
                assert!(!text.contains(wrong), "{name}: {wrong}");
            }
        }
    }
}
