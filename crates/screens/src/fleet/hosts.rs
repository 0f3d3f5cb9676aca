//! The hosts, and how keys change which ones are shown.

use std::process::ExitCode;
use std::time::Duration;

use chrono::NaiveDateTime;
use ratatui::Frame;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::widgets::Paragraph;

use crate::fleet::screen;
use crate::pictures::{Asked, Host, Live};
use crate::table::Colours;
use crate::terminal::{self, Next, Screen};
use crate::top::{Choice, Page, View, When, Wish, draw};

/// The hosts that are shown, and how keys change them.
pub(super) struct Shown {
    hosts: Vec<Host>,
    /// Number of the chosen host.
    chosen: usize,
    /// The page of the chosen host, if it is open.
    open: Option<View>,
    colours: Colours,
    /// Converts times to the local zone.
    clock: fn(i64) -> NaiveDateTime,
}

/// Shows the page until the user quits or a signal arrives. A host is a name and a function that asks its agent. `clock` converts
/// times to the local zone.
///
/// # Errors
/// If there is no terminal, or it cannot be used.
pub fn run(
    hosts: Vec<(&str, impl Fn() -> Asked + Send + 'static)>,
    every: Duration,
    clock: fn(i64) -> NaiveDateTime,
) -> anyhow::Result<ExitCode> {
    let instead = "`homenode fleet top --once` prints one picture as text";
    terminal::show(instead, || {
        let (names, askers): (Vec<&str>, Vec<_>) = hosts.into_iter().unzip();
        Ok(Followed {
            shown: Shown::new(&names, Colours::of_environment(), clock),
            live: Live::start(askers, every)?,
        })
    })
}

/// The hosts, which are asked repeatedly while they are shown.
struct Followed {
    shown: Shown,
    live: Live,
}

impl Screen for Followed {
    fn draw(&self, frame: &mut Frame<'_>) {
        self.shown.draw(frame);
    }

    fn key(&mut self, key: KeyEvent) -> Next {
        match self.shown.key(key) {
            Wish::Quit => Next::Quit,
            _ => Next::Look,
        }
    }

    fn tick(&mut self) -> bool {
        let mut is_new = false;
        for (number, answer) in self.live.new_answers() {
            self.shown.heard(number, answer);
            is_new = true;
        }
        is_new
    }
}

impl Shown {
    /// Creates the page, with hosts that have not been asked yet.
    pub(super) fn new(names: &[&str], colours: Colours, clock: fn(i64) -> NaiveDateTime) -> Shown {
        Shown {
            hosts: names.iter().copied().map(Host::new).collect(),
            chosen: 0,
            open: None,
            colours,
            clock,
        }
    }

    /// Records a host's answer.
    pub(super) fn heard(&mut self, number: usize, answer: Asked) {
        self.hosts[number].heard(answer);
        if let Some(view) = self.open.as_mut().filter(|_| number == self.chosen) {
            view.picture.clone_from(&self.hosts[number].picture);
            view.message.clone_from(&self.hosts[number].trouble);
        }
    }

    /// Handles a key.
    pub(super) fn key(&mut self, key: KeyEvent) -> Wish {
        if let Some(view) = &mut self.open {
            let is_back = matches!(key.code, KeyCode::Esc | KeyCode::Backspace)
                && view.page == Page::List
                && view.prompt.is_none()
                && view.choice.filter.is_empty();
            if is_back {
                self.open = None;
                return Wish::Nothing;
            }
            let wish = view.key(key);
            if !matches!(wish, Wish::Nothing | Wish::Quit) {
                view.message = Some("to see the past, run `homenode top` on that host".to_owned());
            }
            return wish;
        }
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Wish::Quit,
            KeyCode::Char('q') => return Wish::Quit,
            KeyCode::Up | KeyCode::Char('k') => self.go(-1),
            KeyCode::Down | KeyCode::Char('j') => self.go(1),
            KeyCode::PageUp => self.go(-10),
            KeyCode::PageDown => self.go(10),
            KeyCode::Enter => self.open(),
            _ => {}
        }
        Wish::Nothing
    }

    /// Returns the numbers of the hosts, in the order of their lines.
    fn order(&self) -> Vec<usize> {
        let number_of = |host: &Host| self.hosts.iter().position(|one| std::ptr::eq(one, host));
        let rows = screen::rows(&self.hosts);
        rows.iter().filter_map(|row| number_of(row.host)).collect()
    }

    /// Chooses the host that is this number of lines further down.
    fn go(&mut self, by: isize) {
        let order = self.order();
        let row = order
            .iter()
            .position(|number| *number == self.chosen)
            .unwrap_or(0);
        let row = row.saturating_add_signed(by).min(order.len().saturating_sub(1));
        self.chosen = order.get(row).copied().unwrap_or(0);
    }

    /// Opens the chosen host's own page.
    fn open(&mut self) {
        let mut view = View::new(When::Now, Choice::default(), self.colours, self.clock);
        let host = &self.hosts[self.chosen];
        view.picture.clone_from(&host.picture);
        view.message.clone_from(&host.trouble);
        self.open = Some(view);
    }

    /// Draws the page, or the open host's page.
    pub(super) fn draw(&self, frame: &mut Frame<'_>) {
        if let Some(view) = &self.open {
            return draw(frame, view);
        }
        let area = frame.area();
        let size = (usize::from(area.width), usize::from(area.height));
        let rows = screen::rows(&self.hosts);
        let chosen = rows
            .iter()
            .position(|row| std::ptr::eq(row.host, &self.hosts[self.chosen]));
        frame.render_widget(
            Paragraph::new(screen::page(&rows, chosen, size, self.colours)),
            area,
        );
    }
}
