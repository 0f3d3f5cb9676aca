//! The page on hosts with many VMs, on a phone, under maintenance, and of wrong addresses.

use serde_json::{Value, json};

use super::browser::{Browser, Colours};
use super::{SCENARIO, SCREENS, page, screen};
use crate::common::http::Site;

/// Number of VMs on the crowded host.
const VMS: usize = 150;

/// Returns a scenario of small VMs on eight nodes.
fn many() -> String {
    let vm = |at: usize| {
        format!(
            "[[vm]]\nname = \"vm-{at:03}\"\nvcpus = 1\nmemory = \"1GiB\"\nworkload = \"povray\"\nwork_share = 100000.0\n"
        )
    };
    let vms: String = (0..VMS).map(vm).collect();
    format!("name = \"many\"\nmachine = \"epyc9654-nps4\"\nduration = \"360000s\"\n{vms}")
}

/// Returns a scenario of eight VMs that fill four nodes, so that the arranger's homes pay.
fn crowded() -> String {
    let vm = |at: usize| {
        let kind = if at.is_multiple_of(2) { "sp" } else { "lu" };
        format!(
            "[[vm]]\nname = \"{kind}{at}\"\nvcpus = 4\nmemory = \"4GiB\"\nworkload = \"{kind}.B\"\nwork_share = 100000.0\n"
        )
    };
    let vms: String = (0..8).map(vm).collect();
    format!("name = \"crowded\"\nmachine = \"r910\"\nduration = \"360000s\"\nnuma_balancing = false\n{vms}")
}

/// Runs a test with the page of an agent on this scenario that runs in real time.
fn live(scenario: &str, args: &[&str], test: impl AsyncFnOnce(&Site, &Browser)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.unwrap().block_on(async {
        let site = Site::on(tempfile::tempdir().unwrap(), scenario, args);
        let browser = Browser::open(&site, Colours::Light).await;
        test(&site, &browser).await;
        browser.close().await;
    });
}

/// Returns a recorded time at which all VMs run.
fn settled(site: &Site) -> String {
    site.eventually("all VMs are recorded", |site| {
        let overview = site.json("/v1/overview");
        let recorded = overview["recorded"]["to"].as_str()?.to_owned();
        let past = site.get(&format!("/v1/overview?at={recorded}"));
        let vms = (past.status == 200).then(|| past.json()["vms"].as_array().map(Vec::len))??;
        (vms == VMS).then_some(recorded)
    })
}

#[test]
fn a_hundred_and_fifty_vms_on_eight_nodes_fit_one_screen() {
    live(&many(), &[], async |site, browser| {
        let at = settled(site);
        browser.goto(&format!("{}/?at={at}", browser.origin), "map").await;
        assert_eq!(browser.text("h1").await, "150 VMs on 8 nodes");
        let fits = "const root = document.documentElement; \
            return root.scrollHeight <= innerHeight && root.scrollWidth <= innerWidth";
        assert_eq!(browser.run(fits).await, true);
        let tops =
            "return [...document.querySelectorAll('.node')].map((node) => node.getBoundingClientRect().top)";
        let tops = browser.run(tops).await;
        let tops = tops.as_array().unwrap();
        assert_eq!(tops.len(), 8);
        assert!(tops[..4].iter().all(|top| *top == tops[0]), "{tops:?}");
        assert!(tops[4..].iter().all(|top| *top == tops[4]), "{tops:?}");
        // A line below the nodes says what the squares mean.
        let legend = browser.text(".map.compact .legend").await;
        for said in ["filled", "dashed", "▲", "◆"] {
            assert!(legend.contains(said), "{said}: {legend}");
        }
        let places = "return ['.legend', '#rows'].map((css) => document.querySelector(css).getBoundingClientRect().top)";
        let places = browser.run(places).await;
        let [below, table] = [0, 1].map(|at| places[at].as_f64());
        assert!(tops[4].as_f64() < below && below < table, "{tops:?} {places}");
        // Every VM is drawn on a node, and few have a row.
        let squares = "return new Set([...document.querySelectorAll('.square')].map((one) => one.getAttribute('href'))).size";
        assert_eq!(browser.run(squares).await, VMS);
        let rows = "return document.querySelectorAll('#rows tbody tr:not(.gap)').length";
        let drawn = browser.run(rows).await.as_u64().unwrap();
        assert!((10..70).contains(&drawn), "{drawn}");
        let count = browser
            .see("#rows table")
            .await
            .attr("aria-rowcount")
            .await
            .unwrap();
        assert_eq!(count, Some((VMS + 1).to_string()));
        // Scrolling draws the last rows.
        browser
            .run("document.querySelector('#rows').scrollTop = 1000000")
            .await;
        browser.see("#rows tr[aria-rowindex='151']").await;
        browser.run("document.querySelector('#rows').scrollTop = 0").await;
        // Tab goes from row to row, in their order, beyond those that were drawn.
        browser.see("#rows tr[aria-rowindex='2']").await;
        browser
            .run("[...document.querySelectorAll('#rows thead button')].at(-1).focus()")
            .await;
        for row in 2..72 {
            browser.press("\u{e004}").await;
            let focus = "const row = document.activeElement.closest('#rows tbody tr')?.getBoundingClientRect(); \
                const box = document.querySelector('#rows').getBoundingClientRect(); \
                const isSeen = row && row.bottom > box.top && row.top < box.bottom; \
                return [document.activeElement.closest('tr')?.getAttribute('aria-rowindex') ?? '', Boolean(isSeen)]";
            assert_eq!(browser.run(focus).await, json!([row.to_string(), true]));
        }
        // The order and the filter work on all rows.
        browser.click(".of-name .sort").await;
        browser
            .until(
                "the first by name, at the top",
                "return document.querySelector('#rows tbody tr:first-child a')?.textContent === 'vm-000'",
            )
            .await;
        browser.run("document.activeElement?.blur()").await;
        browser.press("/").await;
        browser.press("vm-14").await;
        browser
            .until(
                "ten rows",
                "return document.querySelectorAll('#rows tbody tr').length === 10",
            )
            .await;
        assert!(browser.text("#rows tbody").await.contains("vm-149"));
    });
}

/// Returns the agent's recommendations.
fn recommended(site: &Site) -> Value {
    site.json("/v1/recommendations")["recommendations"].clone()
}

/// Waits until the arranger recommends homes for all eight VMs of the crowded host.
fn arranged(site: &Site) {
    site.eventually("an arrangement is recommended", |site| {
        let of_eight = |one: &Value| one["together"].as_array().is_some_and(|others| others.len() == 7);
        recommended(site).as_array()?.iter().any(of_eight).then_some(())
    });
}

#[test]
fn recommendations_of_one_arrangement_are_applied_together() {
    live(&crowded(), &["--mode", "recommend"], async |site, browser| {
        arranged(site);
        let address = format!("{}/?view=proposals#key={}", browser.origin, site.key);
        browser.goto(&address, "proposals").await;
        let shown = browser.run("return location.href").await;
        assert_eq!(shown, json!(format!("{}/?view=proposals", browser.origin)));
        assert!(browser.text("#pulse .mode").await.contains("recommend"));
        assert!(
            browser
                .text(".cards .group")
                .await
                .contains("8 that belong together")
        );
        // A gain has the colour of its sign.
        let gains = "return [...document.querySelectorAll('.cards .predicted b')].map((gain) => [gain.textContent[0], gain.className])";
        let gains = browser.run(gains).await;
        for gain in gains.as_array().unwrap() {
            let wanted = [json!(["+", "gain"]), json!(["−", "loss"]), json!(["0", "quiet"])];
            assert!(wanted.contains(gain), "{gain}");
        }
        // Only the whole arrangement can be applied.
        let buttons = "return document.querySelectorAll('.cards .group button').length";
        assert_eq!(browser.run(buttons).await, 2);
        browser.click(".cards .group button.strong").await;
        browser.click("dialog[open] button[value=yes]").await;
        browser.see(".note.good").await;
        let approved = recommended(site);
        let is_approved = |one: &&Value| one["state"] == "approved" || one["state"] == "applied";
        let count = approved.as_array().unwrap().iter().filter(is_approved).count();
        assert_eq!(count, 8, "{approved}");
    });
}

#[test]
fn what_was_applied_before_a_refusal_is_told() {
    live(&crowded(), &["--mode", "recommend"], async |site, browser| {
        arranged(site);
        let address = format!("{}/?view=proposals#key={}", browser.origin, site.key);
        browser.goto(&address, "proposals").await;
        browser.click(".cards .group button.strong").await;
        browser.see("dialog[open]").await;
        // Another operator rejects one of the eight before this one confirms. The page applies the newest first.
        let open = recommended(site);
        let mut open: Vec<&Value> = open
            .as_array()
            .unwrap()
            .iter()
            .filter(|one| one["state"] == "open")
            .collect();
        open.sort_by_key(|one| std::cmp::Reverse(one["id"].as_u64()));
        assert_eq!(open.len(), 8, "{open:?}");
        let path = format!("/v1/recommendations/{}/reject", open[3]["id"]);
        let rejected = site.ask("POST", &path, &site.as_operator(), "");
        assert_eq!(rejected.status, 200, "{rejected:?}");
        browser.click("dialog[open] button[value=yes]").await;
        let said = browser.text(".note.bad p").await;
        assert!(said.contains("already rejected"), "{said}");
        let lists = "return [...document.querySelectorAll('.note.bad li')].map((one) => one.textContent)";
        let texts = |some: &[&Value]| {
            let texts: Vec<&str> = some.iter().filter_map(|one| one["text"].as_str()).collect();
            texts.join("; ")
        };
        let wanted = [
            format!("Applied: {}", texts(&open[..3])),
            format!("Refused: {}", texts(&open[3..4])),
            format!("Not tried: {}", texts(&open[4..])),
        ];
        assert_eq!(browser.run(lists).await, json!(wanted));
        let after = recommended(site);
        let is_approved = |one: &&Value| one["state"] == "approved" || one["state"] == "applied";
        let count = after.as_array().unwrap().iter().filter(is_approved).count();
        assert_eq!(count, 3, "{after}");
    });
}

#[test]
fn a_short_history_is_told_and_a_steady_vm_has_no_drop_of_speed() {
    page(Colours::Light, async |browser| {
        // The first eight seconds have too few samples.
        let (from, to) = (browser.at(0), browser.at(6));
        let address = format!(
            "{}/?view=vm&vm=web&why=1&window=shown&from={from}&to={to}&at={to}",
            browser.origin
        );
        browser.goto(&address, "vm").await;
        browser.see(".why .present").await;
        let answer = browser.text(".why").await;
        for said in [
            "Too little is recorded to tell whether it was slow",
            "web ran at",
            "are too few",
            "Without a comparison",
        ] {
            assert!(answer.contains(said), "{said}: {answer}");
        }
        assert!(!answer.contains("no drop"), "{answer}");
        // Long before the neighbour starts, the VM's speed is steady.
        let steady = browser.address("view=vm&vm=web&why=1&window=60s", 300);
        browser.goto(&steady, "vm").await;
        browser.see(".why .answer b").await;
        let answer = browser.text(".why").await;
        assert!(answer.contains("web had no drop of speed; it ran at"), "{answer}");
        let more = browser
            .run("return document.querySelector('.why .present, [data-cause]')")
            .await;
        assert_eq!(more, Value::Null);
    });
}

#[test]
fn why_is_asked_once_while_the_page_follows_the_agent() {
    live(SCENARIO, &["--period", "200ms"], async |site, browser| {
        site.eventually("some samples are recorded", |site| {
            (site.json("/v1/status")["cycle_count"].as_u64()? > 20).then_some(())
        });
        let address = format!("{}/?view=vm&vm=web&why=1", browser.origin);
        browser.goto(&address, "vm").await;
        browser.see(".why .answer:not(.quiet)").await;
        let shown = browser.text("#now").await;
        let is_later = format!("return document.querySelector('#now').textContent > '{shown}'");
        browser.until("it follows", &is_later).await;
        browser.see(".why .answer:not(.quiet)").await;
        // The agent was asked once.
        let asked = "return performance.getEntriesByType('resource').filter((one) => one.name.includes('/why?')).length";
        assert_eq!(browser.run(asked).await, 1);
    });
}

#[test]
fn modes_pauses_and_drains_are_shown() {
    live(SCENARIO, &["--mode", "recommend"], async |site, browser| {
        let headers = format!("{}Content-Type: application/json\r\n", site.as_operator());
        let drained = site.ask("PUT", "/v1/maintenance/drains/1", &headers, "");
        assert_eq!(drained.status, 200, "{drained:?}");
        let paused = site.ask(
            "PUT",
            "/v1/maintenance/pause",
            &headers,
            "{\"span_ns\": 3600000000000}",
        );
        assert_eq!(paused.status, 200, "{paused:?}");
        browser.goto(&format!("{}/", browser.origin), "map").await;
        browser.see("[data-key=paused]").await;
        browser.see("[data-key=drained-1]").await;
        assert!(browser.text("#pulse").await.contains("recommend"));
        browser
            .until(
                "the pause in the head",
                "return document.querySelector('#pulse').textContent.includes('paused')",
            )
            .await;
        assert!(browser.text("[data-key=node-1] h2").await.contains("drained"));
        browser
            .until(
                "who is left on the node",
                "return document.querySelector('[data-key=drained-1]').textContent.includes('loud')",
            )
            .await;
    });
}

#[test]
fn a_wrong_time_or_link_is_answered_with_a_message() {
    page(Colours::Light, async |browser| {
        for (query, view, said) in [
            ("at=yesterday", "map", "“at=yesterday” is not a time"),
            ("at=2026-02-31 10:00", "map", "is not a time"),
            ("at=2020-01-01T00:00:00Z", "problem", "the history covers"),
            (
                "from=2026-11-24T04:00:00Z&to=2026-11-24T03:00:00Z",
                "map",
                "before it begins",
            ),
            ("from=2026-11-24T04:00:00Z", "map", "both from and to"),
            (
                "view=decisions&from=2020-01-01T00:00:00Z&to=2026-01-01T00:00:00Z",
                "decisions",
                "six hours",
            ),
            ("last=7m", "map", "“last=7m” is none of the lengths"),
            ("view=nothing", "map", "no screen “nothing”"),
            ("view=vm", "problem", "names no VM"),
            ("view=vm&vm=absent", "problem", "no VM `absent` runs here"),
            ("sort=constructor", "map", "no column “constructor”"),
            (
                "view=vm&vm=web&why=1&window=toString",
                "vm",
                "“window=toString” is not a stretch",
            ),
            ("view=vm&vm=web&decision=none", "vm", "Decision “none”"),
            ("vms=web", "map", "does not know “vms”"),
        ] {
            browser.goto(&format!("{}/?{query}", browser.origin), view).await;
            let message = browser.text(".note.wrong, .problem").await;
            assert!(message.contains(said), "{query}: {message}");
        }
        browser.goto(&browser.address("view=map", 440), "map").await;
        let wrong = browser.run("return document.querySelector('.note.wrong')").await;
        assert_eq!(wrong, Value::Null);
        browser.see("#from").await;
        browser
            .run("const from = document.querySelector('#from'); from.focus(); from.select()")
            .await;
        browser.press("nonsense\u{e007}").await;
        assert!(browser.text("#wrong").await.contains("“nonsense” is not a time"));
        // A key that is pasted into the address of an open page is taken, too.
        browser
            .run("location.hash = 'key=Ab-9_y'; window.isSame = true")
            .await;
        browser
            .until(
                "the key is taken",
                "return window.isSame && location.hash === '' && sessionStorage.getItem('homenode.key') === 'Ab-9_y'",
            )
            .await;
    });
}

#[test]
fn no_screen_is_wider_than_a_phone() {
    page(Colours::Light, async |browser| {
        browser.client.set_window_size(400, 900).await.unwrap();
        for (name, address, there) in SCREENS {
            screen(browser, address, there).await;
            let widths = browser
                .run("return [innerWidth, document.documentElement.scrollWidth]")
                .await;
            assert_eq!(widths, json!([400, 400]), "{name}");
        }
        // The table comes before the nodes.
        screen(browser, "view=map", ".node").await;
        let order =
            "return ['#rows', '.map'].map((css) => document.querySelector(css).getBoundingClientRect().top)";
        let order = browser.run(order).await;
        assert!(order[0].as_f64() < order[1].as_f64(), "{order}");
    });
}
