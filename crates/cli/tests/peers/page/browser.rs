//! Chromium, driven over WebDriver, and the page of an agent in it.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fantoccini::elements::Element;
use fantoccini::{Client, ClientBuilder, Locator};
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::{Value, json};

use crate::common::http::Site;

/// The window size of pictures.
pub const SIZE: (u32, u32) = (1280, 800);
/// How long an element may take to appear.
const PATIENCE: Duration = Duration::from_secs(60);

/// The system's preferred colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colours {
    Light,
    Dark,
}

/// Starts a driver, and returns it with its port, or `None` if it ended at once. A driver takes a free port of IPv4, then the
/// same port of IPv6, which the driver of another test may hold.
fn start_driver() -> Option<(Child, u16)> {
    let mut driver = Command::new("chromedriver")
        .arg("--port=0")
        .env("TZ", "UTC")
        .stdout(Stdio::piped())
        .spawn()
        .expect("chromedriver can be started: scripts/page-setup.sh installs it");
    let said = BufReader::new(driver.stdout.take()?).lines();
    let port = said.map_while(Result::ok).find_map(|line| {
        let (_, port) = line.split_once("started successfully on port ")?;
        port.trim_end_matches('.').parse().ok()
    });
    if port.is_none() {
        driver.wait().expect("a driver that closed its output ends");
    }
    Some((driver, port?))
}

/// A browser with one tab; it and its driver end when the value is dropped.
pub struct Browser {
    driver: Child,
    pub client: Client,
    /// Origin of the agent's page, without a trailing slash.
    pub origin: String,
    /// When the agent's run began, in milliseconds since 1970.
    begun_ms: i64,
}

impl Browser {
    /// Opens a browser for the page of this agent.
    pub async fn open(site: &Site, colours: Colours) -> Browser {
        let started = site.json("/v1/status")["started"].as_str().unwrap().to_owned();
        let begun: chrono::DateTime<chrono::Utc> = started.parse().unwrap();
        let mut browser = Browser::start(colours).await;
        browser.origin = format!("http://{}", site.address);
        browser.begun_ms = begun.timestamp_millis();
        browser
    }

    /// Opens a browser for pages that are files.
    pub async fn start(colours: Colours) -> Browser {
        let (driver, port) = (0..5)
            .find_map(|_| start_driver())
            .expect("chromedriver says its port in one of five starts");
        let mut args = vec![
            "--headless=new".to_owned(),
            "--no-sandbox".into(),
            "--hide-scrollbars".into(),
            "--force-device-scale-factor=1".into(),
            "--force-prefers-reduced-motion".into(),
            format!("--window-size={},{}", SIZE.0, SIZE.1),
        ];
        if colours == Colours::Dark {
            args.push("--blink-settings=preferredColorScheme=0".into());
        }
        let wanted = json!({"goog:chromeOptions": {"args": args}});
        let client = ClientBuilder::new(HttpConnector::new())
            .capabilities(wanted.as_object().unwrap().clone())
            .connect(&format!("http://127.0.0.1:{port}"))
            .await
            .expect("Chromium can be started");
        let browser = Browser {
            driver,
            client,
            origin: "file:".to_owned(),
            begun_ms: 0,
        };
        browser.fit(SIZE).await;
        browser
    }

    /// Resizes the window until its inside has this width and height.
    pub async fn fit(&self, (width, height): (u32, u32)) {
        self.client.set_window_size(width, height).await.unwrap();
        let inside = self.run("return [innerWidth, innerHeight]").await;
        let missing = |at: usize, want: u32| want + want - inside[at].as_u64().unwrap() as u32;
        let (width, height) = (missing(0, width), missing(1, height));
        self.client.set_window_size(width, height).await.unwrap();
    }

    /// Formats the time this many seconds after the run began, as in addresses.
    pub fn at(&self, seconds: i64) -> String {
        let time = chrono::DateTime::from_timestamp_millis(self.begun_ms + 1000 * seconds).unwrap();
        time.to_rfc3339_opts(chrono::SecondsFormat::Millis, true)
    }

    /// Returns the address of a screen that covers the first 480 s and shows the time at this second.
    pub fn address(&self, screen: &str, at: i64) -> String {
        let (from, to, at) = (self.at(0), self.at(480), self.at(at));
        format!("{}/?{screen}&from={from}&to={to}&at={at}", self.origin)
    }

    /// Opens an address, and waits until the screen is drawn.
    pub async fn goto(&self, address: &str, view: &str) {
        self.client.goto(address).await.unwrap();
        self.see(&format!("#screen[data-drawn={view}]")).await;
    }

    /// Waits for an element.
    pub async fn see(&self, css: &str) -> Element {
        let wait = self
            .client
            .wait()
            .at_most(PATIENCE)
            .every(Duration::from_millis(50));
        let found = wait.for_element(Locator::Css(css)).await;
        found.unwrap_or_else(|error| panic!("{css}: {error}"))
    }

    pub async fn click(&self, css: &str) {
        // A screen that follows the agent may redraw the element between finding and clicking it.
        for _ in 0..20 {
            if self.see(css).await.click().await.is_ok() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("{css} cannot be clicked");
    }

    pub async fn text(&self, css: &str) -> String {
        self.see(css).await.text().await.unwrap()
    }

    /// Waits until a script returns true.
    pub async fn until(&self, what: &str, script: &str) {
        let until = Instant::now() + PATIENCE;
        while self.run(script).await != true {
            assert!(Instant::now() < until, "{what}: not within {PATIENCE:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Runs a script and returns its result.
    pub async fn run(&self, script: &str) -> Value {
        let ran = self.client.execute(script, Vec::new()).await;
        ran.unwrap_or_else(|error| panic!("{script:.200}: {error}"))
    }

    /// Presses keys, wherever the focus is.
    pub async fn press(&self, keys: &str) {
        let focus = self.client.active_element().await.unwrap();
        focus.send_keys(keys).await.unwrap();
    }

    /// Returns a decoded parameter of the page's address, or an empty text if it is absent.
    pub async fn asked(&self, name: &str) -> String {
        let script = format!("return new URLSearchParams(location.search).get('{name}') ?? ''");
        self.run(&script).await.as_str().unwrap().to_owned()
    }

    /// Ends the browser; its driver ends when the value is dropped.
    pub async fn close(self) {
        let _ = self.client.clone().close().await;
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}
