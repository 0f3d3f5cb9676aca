//! `homenode run --web`: where the page is served, and what it draws the past from.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;

use anyhow::Context as _;
use homenode_agent::Show as _;
use homenode_api::http::Listen;
use tempfile::TempDir;

use crate::args::RunArgs;
use crate::output::Output;

/// The port that the documents name.
const PORT: u16 = 9464;

/// What a run needs beside its other options.
pub struct Web {
    /// Where HTTP is answered.
    pub listen: Option<Listen>,
    /// Where the history lies that was asked for, or one for this run alone.
    pub history: Option<PathBuf>,
    /// Removed with the value.
    _own: Option<TempDir>,
}

impl Web {
    /// As the options have it. `is_kept`: a history is kept also where none is named.
    ///
    /// # Errors
    /// Where there is no room for a history.
    pub fn of(args: &RunArgs, is_kept: bool, output: &mut Output) -> anyhow::Result<Web> {
        let mut web = Web {
            listen: args.listen,
            history: args.history.clone(),
            _own: None,
        };
        if !args.web {
            return Ok(web);
        }
        if web.listen.is_none() {
            web.listen = Some(address(PORT, output)?);
        }
        if web.history.is_none() && !is_kept {
            let own = tempfile::Builder::new().prefix("homenode-").tempdir();
            let own =
                own.context("cannot make a directory for the page's history: name a file with --history")?;
            web.history = Some(own.path().join("history.sqlite"));
            web._own = Some(own);
        }
        Ok(web)
    }
}

/// The usual address; where another program has its port, one that is free.
fn address(port: u16, output: &mut Output) -> anyhow::Result<Listen> {
    let is_taken = TcpListener::bind((Ipv4Addr::LOCALHOST, port))
        .is_err_and(|error| error.kind() == ErrorKind::AddrInUse);
    if is_taken {
        output.line(&format!(
            "another program listens at port {port}: the page is at a port that is free"
        ));
    }
    let port = if is_taken { 0 } else { port };
    let address = format!("{}:{port}", Ipv4Addr::LOCALHOST).parse();
    address.map_err(anyhow::Error::msg)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_another_program_has_is_left_to_it() {
        let mut output = Output::new(true);
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = taken.local_addr().unwrap().port();
        assert_eq!(address(port, &mut output).unwrap().address().port(), 0);
        drop(taken);
        assert_eq!(address(port, &mut output).unwrap().address().port(), port);
    }
}
