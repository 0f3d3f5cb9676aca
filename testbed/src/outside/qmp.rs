//! QEMU's monitor for programs: each command gets one answer.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

/// Time limit for QEMU to start, and for each answer.
const LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);

/// A connection to a QEMU's monitor.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects to the socket of a QEMU that may still be starting.
    ///
    /// # Errors
    /// When QEMU does not accept a connection in time.
    pub fn connect(socket: &Path) -> anyhow::Result<Qmp> {
        let begin = Instant::now();
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(_) if begin.elapsed() < LIMIT => thread::sleep(POLL),
                Err(error) => bail!("cannot reach QEMU's monitor {}: {error}", socket.display()),
            }
        };
        stream.set_read_timeout(Some(LIMIT))?;
        let mut qmp = Qmp {
            stream: BufReader::new(stream),
        };
        qmp.line()?;
        qmp.run("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Runs a command.
    ///
    /// # Errors
    /// When QEMU answers with an error, or does not answer.
    pub fn run(&mut self, command: &str, arguments: &Value) -> anyhow::Result<Value> {
        let order = json!({"execute": command, "arguments": arguments});
        writeln!(self.stream.get_mut(), "{order}").context("QEMU's monitor closed its socket")?;
        // Events may arrive before the answer.
        loop {
            let mut answer = self.line()?;
            if let Some(error) = answer.get("error") {
                bail!("QEMU refuses {order}: {error}");
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
        }
    }

    fn line(&mut self) -> anyhow::Result<Value> {
        let mut line = String::new();
        self.stream
            .read_line(&mut line)
            .context("QEMU's monitor does not answer")?;
        serde_json::from_str(&line)
            .with_context(|| format!("QEMU's monitor sent an invalid answer: {line:?}"))
    }
}

/// Moves a running guest to another QEMU, which waits for it on this socket.
///
/// # Errors
/// When QEMU reports a failure, or the move takes too long.
pub fn migrate(from: &mut Qmp, to: &Path) -> anyhow::Result<()> {
    from.run("migrate", &json!({"uri": format!("unix:{}", to.display())}))?;
    let begin = Instant::now();
    while begin.elapsed() < LIMIT {
        let state = from.run("query-migrate", &json!({}))?;
        match state["status"].as_str() {
            Some("completed") => return Ok(()),
            Some("failed" | "cancelled") => bail!("the migration failed: {state}"),
            _ => thread::sleep(POLL),
        }
    }
    bail!("the migration takes longer than {LIMIT:?}")
}
