//! Chromium, driven over WebDriver, and the page of an agent in it.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fantoccini::elements::Element;
use fantoccini::{Client, ClientBuilder, Locator};
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::{Value, json};

use crate::common::http::Site;

/// The screen that pictures are made of.
pub const SIZE: (u32, u32) = (1280, 800);
/// How long something may take to be on the screen.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a system prefers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colours {
    Light,
    Dark,
}

/// A browser with one tab; both it and its driver end with the value.
pub struct Browser {
    driver: Child,
    pub client: Client,
    /// Of the agent's page, without a slash at its end.
    pub origin: String,
    /// When the agent's run began, in milliseconds since 1970.
    begun_ms: i64,
}

impl Browser {
    /// Opens one for the page of this agent.
    pub async fn open(site: &Site, colours: Colours) -> Browser {
        let mut driver = Command::new("chromedriver")
            .arg("--port=0")
            .env("TZ", "UTC")
            .stdout(Stdio::piped())
            .spawn()
            .expect("chromedriver can be started: scripts/page-setup.sh installs it");
        let said = BufReader::new(driver.stdout.take().unwrap()).lines();
        let mut ports = said.filter_map(|line| {
            let line = line.ok()?;
            let (_, port) = line.split_once("started successfully on port ")?;
            port.trim_end_matches('.').parse::<u16>().ok()
        });
        let port = ports.next().expect("chromedriver says its port");
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
        let started = site.json("/v1/status")["started"].as_str().unwrap().to_owned();
        let begun: chrono::DateTime<chrono::Utc> = started.parse().unwrap();
        let browser = Browser {
            driver,
            client,
            origin: format!("http://{}", site.address),
            begun_ms: begun.timestamp_millis(),
        };
        browser.fit().await;
        browser
    }

    /// Makes the inside of the window as large as pictures are.
    async fn fit(&self) {
        let inside = self.run("return [innerWidth, innerHeight]").await;
        let missing = |at: usize, want: u32| want + want - inside[at].as_u64().unwrap() as u32;
        let (width, height) = (missing(0, SIZE.0), missing(1, SIZE.1));
        self.client.set_window_size(width, height).await.unwrap();
    }

    /// A time so long after the run began, as addresses have it.
    pub fn at(&self, seconds: i64) -> String {
        let time = chrono::DateTime::from_timestamp_millis(self.begun_ms + 1000 * seconds).unwrap();
        time.to_rfc3339_opts(chrono::SecondsFormat::Millis, true)
    }

    /// The address of a screen over the first 480 s, with the time shown at this second.
    pub fn address(&self, screen: &str, at: i64) -> String {
        let (from, to, at) = (self.at(0), self.at(480), self.at(at));
        format!("{}/?{screen}&from={from}&to={to}&at={at}", self.origin)
    }

    /// Goes there, and waits until the screen is drawn.
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
        // A screen that follows the agent may draw an element anew between the two.
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

    /// What a script returns.
    pub async fn run(&self, script: &str) -> Value {
        let ran = self.client.execute(script, Vec::new()).await;
        ran.unwrap_or_else(|error| panic!("{script:.200}: {error}"))
    }

    /// Presses keys, wherever the focus is.
    pub async fn press(&self, keys: &str) {
        let focus = self.client.active_element().await.unwrap();
        focus.send_keys(keys).await.unwrap();
    }

    /// A part of the address, decoded; empty where it is not there.
    pub async fn asked(&self, name: &str) -> String {
        let script = format!("return new URLSearchParams(location.search).get('{name}') ?? ''");
        self.run(&script).await.as_str().unwrap().to_owned()
    }

    /// Ends the browser; its driver ends with the value.
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
