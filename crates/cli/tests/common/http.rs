//! An HTTP client of the agent that sends exactly the bytes that a test wants, valid or not.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::Value;

/// A running agent on the simulated host that answers HTTP; it is stopped when the value is dropped.
pub(crate) struct Site {
    child: Child,
    pub dir: tempfile::TempDir,
    pub address: SocketAddr,
    /// The operator's key over loopback; empty if there is none.
    pub key: String,
}

impl Site {
    /// Starts an agent on a scenario, with its state and history in `dir`, and waits until it is ready.
    pub(crate) fn on(dir: tempfile::TempDir, scenario: &str, args: &[&str]) -> Site {
        Site::at("127.0.0.1:0", dir, scenario, args)
    }

    /// Like [`Site::on`], but listens at the given address.
    pub(crate) fn at(address: &str, dir: tempfile::TempDir, scenario: &str, args: &[&str]) -> Site {
        let path = |name: &str| dir.path().join(name).display().to_string();
        std::fs::write(path("scenario.toml"), scenario).unwrap();
        let out = std::fs::File::create(path("out")).unwrap();
        let host = format!("twin:{}", path("scenario.toml"));
        let is_said = args.contains(&"--listen");
        let child = super::homenode()
            .args(["run", "--json", "--host", &host])
            .args(["--listen", address].iter().filter(|_| !is_said))
            .args(["--state", &path("state"), "--history", &path("history.sqlite")])
            .args(args)
            .stdin(Stdio::null())
            .stdout(out)
            .spawn()
            .expect("the program can be started");
        let mut site = Site {
            child,
            dir,
            address: ([127, 0, 0, 1], 0).into(),
            key: String::new(),
        };
        (site.address, site.key) = site.eventually("it says where it listens", |site| {
            let said = std::fs::read_to_string(site.dir.path().join("out")).ok()?;
            let lines = said
                .lines()
                .filter_map(|line| serde_json::from_str::<Value>(line).ok());
            let mut urls =
                lines.filter_map(|line| Some(line["url"].as_str()?.split_once("://")?.1.to_owned()));
            let url = urls.next()?;
            let (address, key) = url.split_once("/#key=").unwrap_or((&url, ""));
            let mut address: SocketAddr = address.parse().ok()?;
            if address.ip().is_unspecified() {
                address.set_ip([127, 0, 0, 1].into());
            }
            Some((address, key.to_owned()))
        });
        site.eventually("it is ready", |site| {
            (site.over_socket("/-/ready").status == 200).then_some(())
        });
        site
    }

    /// Returns the header that makes a client an operator.
    pub(crate) fn as_operator(&self) -> String {
        format!("Authorization: Bearer {}\r\n", self.key)
    }

    /// Returns the agent's output so far.
    pub(crate) fn said(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("out")).unwrap_or_default()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn eventually<T>(&self, what: &str, mut look: impl FnMut(&Site) -> Option<T>) -> T {
        for _ in 0..600 {
            if let Some(found) = look(self) {
                return found;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        panic!("{what}: not within a minute");
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream
    }

    /// Sends these bytes, and reads until the connection ends.
    pub(crate) fn say(&self, bytes: &[u8]) -> Answer {
        exchange(self.connect(), bytes)
    }

    /// Sends a valid request with additional headers, which are whole lines with their line ends.
    pub(crate) fn ask(&self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        self.say(request(method, path, &self.address.to_string(), headers, body).as_bytes())
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, "", "")
    }

    /// Returns the JSON of an answer, which must be a success.
    pub(crate) fn json(&self, path: &str) -> Value {
        let answer = self.get(path);
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        answer.json()
    }

    /// Returns the answer from the socket in the state directory.
    pub(crate) fn over_socket(&self, path: &str) -> Answer {
        self.does_over_socket("GET", path)
    }

    /// Like [`Site::over_socket`], with another method.
    pub(crate) fn does_over_socket(&self, method: &str, path: &str) -> Answer {
        self.ask_over_socket(method, path, "", "")
    }

    /// Like [`Site::over_socket`], with any request.
    pub(crate) fn ask_over_socket(&self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        let socket = UnixStream::connect(self.dir.path().join("state/http.sock")).expect("it listens");
        exchange(
            socket,
            request(method, path, "anything", headers, body).as_bytes(),
        )
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the body of another server's answer, or `None` if no server listens there.
pub(crate) fn get_from(address: SocketAddr, path: &str) -> Option<String> {
    let stream = TcpStream::connect(address).ok()?;
    // With HTTP 1.0, an answer comes in one piece.
    let answer = exchange(
        stream,
        format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes(),
    );
    (answer.status == 200).then_some(answer.body)
}

fn request(method: &str, path: &str, host: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
    )
}

fn exchange(mut stream: impl Read + Write, bytes: &[u8]) -> Answer {
    // A server that refuses early may have closed already.
    let _ = stream.write_all(bytes);
    let mut text = Vec::new();
    let _ = stream.read_to_end(&mut text);
    let text = String::from_utf8(text).expect("answers are text");
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Answer {
        status: status.unwrap_or(0),
        head: head.to_ascii_lowercase(),
        body: body.to_owned(),
    }
}

#[derive(Debug)]
pub(crate) struct Answer {
    /// The status, or 0 if there was no answer.
    pub status: u16,
    /// The status line and the headers, in lower case.
    pub head: String,
    pub body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// Returns the kind of a problem document. Panics if a part of the document is missing.
    pub(crate) fn problem(&self) -> String {
        assert!(
            self.head.contains("content-type: application/problem+json"),
            "{self:?}"
        );
        let problem = self.json();
        assert_eq!(problem["status"], self.status, "{self:?}");
        assert!(
            problem["title"].is_string() && problem["detail"].is_string(),
            "{self:?}"
        );
        let kind = problem["type"]
            .as_str()
            .and_then(|kind| kind.strip_prefix("urn:homenode:problem:"));
        kind.expect("a kind of ours").to_owned()
    }
}
