//! The page of an agent, as an operator uses it: in Chromium, with clicks and keys.
//!
//! Not part of `cargo test`: `scripts/page-setup.sh` installs what it needs, and `make page` runs these tests.

mod browser;
mod evidence;
mod hosts;
mod picture;

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::common::http::Site;
use browser::{Browser, Colours};
use picture::Picture;

/// A VM, a neighbour that begins to stream after 400 s, a VM elsewhere that streams all the time, and a VM whose name is markup.
const SCENARIO: &str = r#"
name = "polluted"
machine = "r910"
duration = "360000s"
[[vm]]
name = "web"
vcpus = 2
memory = "4GiB"
workload = "omnetpp"
cpus = "0-1"
memory_nodes = "0"
work_share = 100000.0
[[vm]]
name = "loud"
vcpus = 1
memory = "2GiB"
workload = "lbm"
cpus = "4"
memory_nodes = "1"
work_share = 100000.0
[[vm]]
name = "batch"
vcpus = 2
memory = "4GiB"
workload = "lbm"
cpus = "2-3"
memory_nodes = "1"
work_share = 100000.0
[[vm]]
name = '<img src=x onerror="document.title=1">'
vcpus = 1
memory = "1GiB"
workload = "povray"
work_share = 100000.0
[[event]]
at = "400s"
vm = "batch"
action = "start"
"#;

/// The name of each screen, its address, and the element to wait for.
const SCREENS: [(&str, &str, &str); 5] = [
    ("map", "view=map", ".node"),
    ("vm", "view=vm&vm=web", ".chart path"),
    ("why", "view=vm&vm=web&why=1", "[data-cause]"),
    ("decisions", "view=decisions", "tbody tr"),
    ("proposals", "view=proposals", "h2"),
];

/// Starts an agent and waits until its first 600 s are recorded. No test asks about a later time.
fn site() -> Site {
    let site = Site::on(tempfile::tempdir().unwrap(), SCENARIO, &["--fast"]);
    site.eventually("600 s are recorded", |site| {
        (site.json("/v1/status")["cycle_count"].as_u64()? > 620).then_some(())
    });
    site
}

/// Runs a test with the page of an agent.
fn page(colours: Colours, test: impl AsyncFnOnce(&Browser)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.unwrap().block_on(async {
        let site = site();
        let browser = Browser::open(&site, colours).await;
        test(&browser).await;
        browser.close().await;
    });
}

async fn screen(browser: &Browser, address: &str, there: &str) {
    let view = address.split(['=', '&']).nth(1).unwrap();
    browser.goto(&browser.address(address, 440), view).await;
    browser.see(there).await;
}

#[test]
fn an_operator_finds_by_clicking_who_slowed_a_vm_down() {
    page(Colours::Light, async |browser| {
        // Look at the host some minutes ago, then at the VM with the complaint.
        browser.goto(&browser.address("view=map", 470), "map").await;
        browser.click(".chip[href*='vm=web']").await;
        browser.see("#screen[data-drawn=vm] .chart path").await;
        assert_eq!(browser.asked("vm").await, "web");
        // Click where the VM's misses go up, in the last chart but one.
        let at = browser
            .run(
                "const drawn = document.querySelector(\"[data-key='LLC misses of references'] svg\"); \
                 drawn.scrollIntoView({ block: 'center' }); const chart = drawn.getBoundingClientRect(); \
                 return [chart.left + chart.width * 440 / 480, chart.top + chart.height / 2]",
            )
            .await;
        click_at(browser, at[0].as_f64().unwrap(), at[1].as_f64().unwrap()).await;
        let (wanted, shown) = (browser.at(440), browser.asked("at").await);
        let ms = |text: &str| {
            text.parse::<chrono::DateTime<chrono::Utc>>()
                .unwrap()
                .timestamp_millis()
        };
        assert!((ms(&wanted) - ms(&shown)).abs() < 2000, "{wanted} {shown}");
        // Ask why the VM was slow.
        browser.run("scrollTo(0, 0)").await;
        browser.click("[data-why]").await;
        browser.see("[data-cause='llc-pollution']:first-child").await;
        let answer = browser.text(".why").await;
        for said in [
            "web ran at",
            "of its usual speed from",
            "billion instructions per CPU-second",
            "Usual: since",
            "others filled the last-level cache",
            "By VM batch",
            "before",
            "Decided",
        ] {
            assert!(answer.contains(said), "{said}: {answer}");
        }
        // The address holds the whole state.
        browser.client.refresh().await.unwrap();
        assert!(browser.text(".causes").await.contains("By VM batch"));
        browser.click("[data-culprit]").await;
        browser
            .until(
                "the culprit's page",
                "return document.querySelector('h1')?.textContent === 'VM batch'",
            )
            .await;
        browser.client.back().await.unwrap();
        browser
            .until(
                "back",
                "return document.querySelector('h1')?.textContent === 'VM web'",
            )
            .await;
        // A mark leads to the decision about the VM.
        browser.click(".mark").await;
        assert!(browser.text(".chosen").await.contains("placement"));
    });
}

/// Clicks at a place in the window.
async fn click_at(browser: &Browser, x: f64, y: f64) {
    use fantoccini::actions::{InputSource as _, MouseActions, PointerAction};
    let mouse = MouseActions::new("mouse".into())
        .then(PointerAction::MoveTo { duration: None, x, y })
        .then(PointerAction::Down { button: 0 })
        .then(PointerAction::Up { button: 0 });
    browser.client.perform_actions(mouse).await.unwrap();
}

/// Hides elements with times, which differ in each run.
async fn hide(browser: &Browser, css: &str) {
    let rule = format!("{css} {{ visibility: hidden !important }}");
    let script = format!("document.styleSheets[0].insertRule({})", json!(rule));
    browser.run(&script).await;
}

async fn look(browser: &Browser) -> Picture {
    Picture::of(&browser.client.screenshot().await.unwrap())
}

/// To update the committed pictures, run `HOMENODE_WRITE_SCREENS=1 make page` and look at them.
#[test]
fn screens_look_as_committed_and_an_element_that_is_missing_is_found() {
    let is_written = std::env::var_os("HOMENODE_WRITE_SCREENS").is_some();
    for colours in [Colours::Light, Colours::Dark] {
        page(colours, async |browser| {
            for (name, address, there) in SCREENS {
                screen(browser, address, there).await;
                hide(browser, ".time, .moving, .why select, #trouble").await;
                let name = format!("{name}-{colours:?}").to_lowercase();
                let seen = look(browser).await;
                if is_written {
                    seen.keep(&name);
                }
                let committed = Picture::committed(&name).unwrap_or_else(|| panic!("no picture {name}"));
                let others = seen.others(&committed);
                if !others.is_empty() {
                    let kept = std::env::temp_dir().join(format!("homenode-page-{name}.png"));
                    std::fs::write(&kept, browser.client.screenshot().await.unwrap()).unwrap();
                    panic!(
                        "{name} is another at {others:.1?} (x, y, by): see {}",
                        kept.display()
                    );
                }
            }
            // Check that a missing element would be noticed.
            for (address, there, missing) in [
                ("view=map", ".node", ".chip[href*='vm=web']"),
                ("view=map", ".node", ".link"),
                ("view=map", ".node", "#live"),
                ("view=vm&vm=web", ".chart path", ".mark"),
                ("view=vm&vm=web", ".chart path", "[data-why]"),
                ("view=vm&vm=web", ".chart path", ".chart:nth-of-type(4) .line"),
                ("view=decisions", "tbody tr", "tbody tr:first-child"),
            ] {
                screen(browser, address, there).await;
                hide(browser, ".time, .moving, .why select, #trouble").await;
                let whole = look(browser).await;
                assert_eq!(look(browser).await.others(&whole), []);
                hide(browser, missing).await;
                assert!(
                    !look(browser).await.others(&whole).is_empty(),
                    "{missing} is not missed"
                );
            }
        });
    }
}

/// Returns the source of axe-core, which the setup script puts below target.
fn axe() -> String {
    let target = Path::new(env!("CARGO_BIN_EXE_homenode"))
        .ancestors()
        .nth(2)
        .unwrap();
    let path = target.join("axe/package/axe.min.js");
    std::fs::read_to_string(&path)
        .unwrap_or_else(|_| panic!("{} is missing: run scripts/page-setup.sh", path.display()))
}

/// Checks that texts have contrast and controls have names, by the rules of axe-core.
async fn is_accessible(browser: &Browser, axe: &str, what: &str) {
    browser.run(axe).await;
    let script = "const done = arguments[0]; \
        axe.run(document, { runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice'] }).then((found) => done([ \
          found.violations.flatMap((one) => one.nodes.map((node) => `${one.id}: ${node.html} ${node.failureSummary}`)), \
          found.passes.filter((one) => one.id === 'color-contrast').flatMap((one) => one.nodes).length]))";
    let found = browser.client.execute_async(script, Vec::new()).await.unwrap();
    assert_eq!(found[0], json!([]), "{what}");
    assert!(found[1].as_u64() > Some(10), "{what}: nothing was measured");
}

#[test]
fn texts_have_contrast_and_controls_have_names_in_light_and_dark() {
    let axe = axe();
    for colours in [Colours::Light, Colours::Dark] {
        page(colours, async |browser| {
            let check = async |what: &str| is_accessible(browser, &axe, &format!("{what} {colours:?}")).await;
            for (name, address, there) in SCREENS {
                screen(browser, address, there).await;
                check(name).await;
            }
            browser.press("?").await;
            browser.see("dialog[open]").await;
            check("keys").await;
            // The problem screen, for a VM that does not exist.
            browser
                .goto(&browser.address("view=vm&vm=absent", 440), "problem")
                .await;
            check("absent").await;
        });
    }
}

/// All focusable elements in document order, and the focused element after each Tab from the start.
const TABS: &str = "const all = [...document.querySelectorAll('a[href], button, input, select, summary')] \
    .filter((one) => !one.disabled && one.getClientRects().length > 0 && getComputedStyle(one).visibility !== 'hidden'); \
    all.forEach((one, index) => { one.place = String(index); }); return all.length";

#[test]
fn everything_is_reached_and_done_without_a_mouse() {
    page(Colours::Light, async |browser| {
        for (_, address, there) in SCREENS {
            screen(browser, address, there).await;
            // The screen shows a past time, so the page does not change meanwhile.
            browser
                .run("document.activeElement?.blur(); window.scrollTo(0, 0)")
                .await;
            let count = browser.run(TABS).await.as_u64().unwrap();
            let mut reached = Vec::new();
            for _ in 0..count {
                browser.press("\u{e004}").await;
                let focus = browser
                    .run(
                        "const one = document.activeElement, look = getComputedStyle(one); \
                         return [one.place ?? one.outerHTML.slice(0, 200), look.outlineStyle !== 'none' && parseFloat(look.outlineWidth) >= 2]",
                    )
                    .await;
                assert_eq!(focus[1], true, "{address}: no focus is seen on {}", focus[0]);
                reached.push(focus[0].as_str().unwrap_or_default().to_owned());
            }
            let wanted: Vec<String> = (0..count).map(|index| index.to_string()).collect();
            assert_eq!(reached, wanted, "{address}");
        }
        // Find the planted cause with the keyboard.
        screen(browser, "view=map", ".node").await;
        browser.press("/").await;
        browser.press("web\u{e00c}").await;
        browser
            .until(
                "one row",
                "return document.querySelectorAll('tbody tr').length === 1",
            )
            .await;
        assert_eq!(browser.asked("filter").await, "web");
        browser
            .see("tbody tr a")
            .await
            .send_keys("\u{e007}")
            .await
            .unwrap();
        browser.see("#screen[data-drawn=vm] .chart path").await;
        let before = browser.asked("at").await;
        browser.run("document.activeElement?.blur()").await;
        browser.press("\u{e012}").await;
        let earlier = browser.asked("at").await;
        assert!(earlier < before, "{earlier} {before}");
        browser.press("\u{e014}").await;
        assert_eq!(browser.asked("at").await, before);
        browser.see("#at").await.send_keys("\u{e012}").await.unwrap();
        assert_eq!(browser.asked("at").await, earlier);
        browser.run("document.activeElement?.blur()").await;
        browser.press("w").await;
        browser
            .see("[data-culprit]")
            .await
            .send_keys("\u{e007}")
            .await
            .unwrap();
        browser
            .until(
                "the culprit's page",
                "return document.querySelector('h1')?.textContent === 'VM batch'",
            )
            .await;
        // The keys `d` and others open the screens that are named after them.
        browser.run("document.activeElement?.blur()").await;
        for (key, then) in [
            (
                "d",
                "return document.querySelector('#screen').dataset.drawn === 'decisions'",
            ),
            (
                "r",
                "return document.querySelector('#screen').dataset.drawn === 'proposals'",
            ),
            (
                "h",
                "return document.querySelector('#screen').dataset.drawn === 'map'",
            ),
            ("t", "return document.documentElement.dataset.theme === 'light'"),
            ("t", "return document.documentElement.dataset.theme === 'dark'"),
            ("?", "return document.querySelector('dialog[open]') !== null"),
            ("\u{e00c}", "return document.querySelector('dialog') === null"),
            ("[", "return new URLSearchParams(location.search).has('from')"),
            (
                "p",
                "return document.querySelector('#play').getAttribute('aria-pressed') === 'true'",
            ),
            (
                "p",
                "return document.querySelector('#play').getAttribute('aria-pressed') === 'false'",
            ),
            (
                "l",
                "return document.querySelector('#live').getAttribute('aria-pressed') === 'true' && !location.search.includes('from')",
            ),
        ] {
            browser.press(key).await;
            browser.until(key, then).await;
        }
        // Type a time.
        let from = browser.see("#from").await;
        from.clear().await.unwrap();
        from.send_keys("nonsense\u{e007}").await.unwrap();
        browser.see("#from[aria-invalid=true]").await;
    });
}

#[test]
fn nothing_is_asked_of_others_and_nothing_else_may_run() {
    page(Colours::Light, async |browser| {
        for (_, address, there) in SCREENS {
            screen(browser, address, there).await;
            let asked = browser
                .run("return performance.getEntriesByType('resource').map((one) => one.name)")
                .await;
            let asked = asked.as_array().unwrap();
            assert!(asked.len() > 20, "{asked:?}");
            for one in asked {
                assert!(one.as_str().unwrap().starts_with(&browser.origin), "{one}");
            }
        }
        let refused = browser
            .client
            .execute_async(
                "const done = arguments[0], refused = []; \
                 document.addEventListener('securitypolicyviolation', (event) => refused.push(event.effectiveDirective)); \
                 const script = document.createElement('script'); \
                 try { script.textContent = 'document.title = 1'; document.head.append(script); } catch { refused.push('script'); } \
                 try { document.body.innerHTML = '<b>1</b>'; } catch { refused.push('markup'); } \
                 document.body.append(Object.assign(new Image(), { src: 'http://127.0.0.1:1/x.png' })); \
                 fetch('http://127.0.0.1:1/').catch(() => setTimeout(() => done(refused), 300))",
                Vec::new(),
            )
            .await
            .unwrap();
        let refused: Vec<&str> = refused
            .as_array()
            .unwrap()
            .iter()
            .filter_map(Value::as_str)
            .collect();
        for directive in ["markup", "img-src", "connect-src", "require-trusted-types-for"] {
            assert!(refused.contains(&directive), "{directive}: {refused:?}");
        }
        assert_ne!(browser.client.title().await.unwrap(), "1");
    });
}

#[test]
fn a_name_that_is_markup_is_shown_as_text() {
    const NAME: &str = "<img src=x onerror=\"document.title=1\">";
    page(Colours::Light, async |browser| {
        let is_text = async |css: &str| {
            let shown = browser.see(css).await.prop("textContent").await.unwrap().unwrap();
            assert!(shown.contains(NAME), "{css}: {shown}");
            let images = browser
                .run("return document.querySelectorAll('main img').length")
                .await;
            assert_eq!(images, 0, "{css}");
            assert_ne!(browser.client.title().await.unwrap(), "1");
        };
        screen(browser, "view=map", ".node").await;
        is_text(".map").await;
        is_text("tbody").await;
        is_text(".events").await;
        browser.click(".chip[href*='img']").await;
        browser.see("#screen[data-drawn=vm] .chart path").await;
        is_text("h1").await;
        browser.click("[data-why]").await;
        browser.see(".why .answer, .why .problem").await;
        browser.click("a[href*='view=decisions'][href*='vm=']").await;
        browser.see("#screen[data-drawn=decisions]").await;
        assert_eq!(
            browser
                .see("input[name=vm]")
                .await
                .prop("value")
                .await
                .unwrap()
                .unwrap(),
            NAME
        );
    });
}

#[test]
fn the_key_is_taken_out_of_the_address_and_kept_for_the_tab() {
    page(Colours::Light, async |browser| {
        browser
            .goto(&format!("{}/#key=Ab-9_x", browser.origin), "map")
            .await;
        assert_eq!(
            browser.run("return location.href").await,
            json!(format!("{}/", browser.origin))
        );
        let sent = "return sessionStorage.getItem('homenode.key')";
        assert_eq!(browser.run(sent).await, "Ab-9_x");
        browser.client.refresh().await.unwrap();
        browser.see("#screen[data-drawn]").await;
        assert_eq!(browser.run(sent).await, "Ab-9_x");
    });
}

#[test]
fn a_stretch_is_dragged_over_while_the_page_follows_the_agent() {
    use fantoccini::actions::{InputSource as _, MouseActions, PointerAction};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.unwrap().block_on(async {
        let site = Site::on(tempfile::tempdir().unwrap(), SCENARIO, &["--period", "200ms"]);
        let browser = Browser::open(&site, Colours::Light).await;
        browser.goto(&format!("{}/?view=vm&vm=web", browser.origin), "vm").await;
        browser.see(".charts path").await;
        let script = "const { left, top, width } = document.querySelector('.charts').getBoundingClientRect(); return [left, top, width]";
        let place = browser.run(script).await;
        let [left, top, width] = [0, 1, 2].map(|at| place[at].as_f64().unwrap());
        let to = |share: f64| PointerAction::MoveTo {
            duration: None,
            x: left + share * width,
            y: top + 40.0,
        };
        // The charts are redrawn each second during the drag.
        let drag = MouseActions::new("mouse".into())
            .then(to(0.3))
            .then(PointerAction::Down { button: 0 })
            .then(PointerAction::Pause {
                duration: Duration::from_millis(2500),
            })
            .then(to(0.7))
            .then(PointerAction::Up { button: 0 });
        browser.client.perform_actions(drag).await.unwrap();
        let is_dragged = "const of = (name) => Date.parse(new URLSearchParams(location.search).get(name)); \
            return Math.abs((of('to') - of('from')) / 60000 - 0.4 * 15) < 0.2";
        browser.until("the stretch is shown", is_dragged).await;
        browser.close().await;
    });
}

#[test]
fn what_an_address_says_wrongly_is_left_out() {
    page(Colours::Light, async |browser| {
        for (address, view) in [
            ("view=map&sort=constructor", "map"),
            ("view=vm&vm=web&why=1&window=constructor", "vm"),
            ("view=vm&vm=web&why=1&window=toString", "vm"),
        ] {
            browser.goto(&browser.address(address, 440), view).await;
        }
    });
}

#[test]
fn the_page_follows_the_agent_says_when_it_is_gone_and_goes_on_when_it_is_back() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.unwrap().block_on(async {
        let site = Site::on(tempfile::tempdir().unwrap(), SCENARIO, &["--period", "200ms"]);
        let address = site.address.to_string();
        let browser = Browser::open(&site, Colours::Light).await;
        browser.goto(&format!("{}/", browser.origin), "map").await;
        browser.see("#pulse .live").await;
        let shown = browser.text("#now").await;
        browser
            .until(
                "it follows",
                &format!("return document.querySelector('#now').textContent > '{shown}'"),
            )
            .await;
        drop(site);
        browser.see("#pulse .gone").await;
        browser.see("#trouble:not([hidden])").await;
        let _site = Site::at(
            &address,
            tempfile::tempdir().unwrap(),
            SCENARIO,
            &["--period", "200ms"],
        );
        browser.see("#pulse .live").await;
        browser
            .until(
                "nothing is wrong",
                "return document.querySelector('#trouble').hidden",
            )
            .await;
        tokio::time::sleep(Duration::from_millis(10)).await;
        browser.close().await;
    });
}
