//! `homenode run --web`: chooses the page's address and the history it shows.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;

use anyhow::Context as _;
use homenode_agent::Show as _;
use homenode_api::http::Listen;

use crate::output::Output;
use crate::twin_history::TwinHistory;

/// The default port, which the documentation names.
const PORT: u16 = 9464;

/// The address and the history of a run.
pub(crate) struct Web {
    /// Where to answer HTTP.
    pub listen: Option<Listen>,
    /// The requested history, or a temporary one for this run only.
    pub history: Option<PathBuf>,
    /// A temporary history, removed when the value is dropped.
    own: Option<TwinHistory>,
}

impl Web {
    /// Takes the address and the history that were requested.
    pub(crate) fn new(listen: Option<Listen>, history: Option<PathBuf>) -> Web {
        Web {
            listen,
            history,
            own: None,
        }
    }

    /// Adds the address of the page.
    ///
    /// # Errors
    /// None of the addresses is valid.
    pub(crate) fn with_page(mut self, output: &mut Output) -> anyhow::Result<Web> {
        if self.listen.is_none() {
            self.listen = Some(address(PORT, output)?);
        }
        Ok(self)
    }

    /// Adds a temporary history for the page if none is kept.
    ///
    /// # Errors
    /// Its directory cannot be created.
    pub(crate) fn with_history(self) -> anyhow::Result<Web> {
        if self.history.is_some() {
            return Ok(self);
        }
        let own = TwinHistory::create().or_else(|_| TwinHistory::create_aside());
        let own = own.context("cannot create a temporary history: name a file with --history")?;
        Ok(self.keeping(own))
    }

    /// Adds a temporary history if none is kept and one can be created. Also says why there is none.
    pub(crate) fn with_history_if_possible(self) -> (Web, Option<String>) {
        if self.history.is_some() {
            return (self, None);
        }
        match TwinHistory::create() {
            Ok(own) => (self.keeping(own), None),
            Err(error) => {
                let why =
                    format!("this run keeps no history: {error}; name a file with --history to keep one");
                (self, Some(why))
            }
        }
    }

    fn keeping(mut self, own: TwinHistory) -> Web {
        self.history = Some(own.path());
        self.own = Some(own);
        self
    }

    /// Returns the path of the temporary history, if there is one.
    pub(crate) fn temporary(&self) -> Option<PathBuf> {
        self.own.as_ref().map(TwinHistory::path)
    }
}

/// Returns the usual address, with any free port if another program uses this port.
fn address(port: u16, output: &mut Output) -> anyhow::Result<Listen> {
    let is_taken = TcpListener::bind((Ipv4Addr::LOCALHOST, port))
        .is_err_and(|error| error.kind() == ErrorKind::AddrInUse);
    if is_taken {
        output.line(&format!(
            "another program listens on port {port}: the page uses a free port instead"
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
