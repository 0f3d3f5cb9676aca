//! The page on a terminal: all hosts, and each host's own page.

use std::process::ExitCode;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::widgets::Paragraph;

use crate::fleet::hosts::{Address, Asker, Host, Live};
use crate::fleet::screen;
use crate::top::{Choice, Colours, LOOK_EVERY, Page, View, When, Wish, draw, on_terminal};
use crate::wall;

/// What is shown, and how keys change it.
pub struct Shown {
    hosts: Vec<Host>,
    /// The chosen host's number.
    chosen: usize,
    /// The page of the chosen host, if that is open.
    open: Option<View>,
    colours: Colours,
}

/// Shows the page until the user quits, or a signal arrives.
///
/// # Errors
/// No terminal, or one that cannot be used.
pub fn run(asker: &Asker, addresses: &[Address], every: Duration) -> anyhow::Result<ExitCode> {
    let instead = "`homenode fleet top --once` prints one picture as text";
    on_terminal(instead, |terminal, signalled| {
        let live = Live::start(asker, addresses, every)?;
        follow(
            &mut Shown::new(addresses, Colours::of_environment()),
            &live,
            terminal,
            signalled,
        )
    })
}

fn follow(
    shown: &mut Shown,
    live: &Live,
    terminal: &mut DefaultTerminal,
    signalled: &AtomicU8,
) -> anyhow::Result<()> {
    loop {
        terminal.draw(|frame| shown.draw(frame))?;
        let mut is_new = false;
        while !is_new {
            if signalled.load(Ordering::Relaxed) != 0 {
                return Ok(());
            }
            if event::poll(LOOK_EVERY)? {
                match event::read()? {
                    Event::Key(key) if key.kind != KeyEventKind::Release => {
                        if shown.key(key) == Wish::Quit {
                            return Ok(());
                        }
                        is_new = true;
                    }
                    Event::Resize(..) => is_new = true,
                    _ => {}
                }
            }
            for (number, answer) in live.new_answers() {
                shown.heard(number, answer);
                is_new = true;
            }
        }
    }
}

impl Shown {
    /// Hosts that were not asked yet.
    pub fn new(addresses: &[Address], colours: Colours) -> Shown {
        Shown {
            hosts: addresses.iter().map(Host::new).collect(),
            chosen: 0,
            open: None,
            colours,
        }
    }

    /// Takes a host's answer.
    pub fn heard(&mut self, number: usize, answer: Result<crate::top::Picture, String>) {
        self.hosts[number].heard(answer);
        if let Some(view) = self.open.as_mut().filter(|_| number == self.chosen) {
            view.picture.clone_from(&self.hosts[number].picture);
            view.message.clone_from(&self.hosts[number].trouble);
        }
    }

    /// Handles a key.
    pub fn key(&mut self, key: KeyEvent) -> Wish {
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
                view.message = Some("the past is shown by `homenode top` on that host".to_owned());
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

    /// The numbers of hosts in the order of their lines.
    fn order(&self) -> Vec<usize> {
        let number_of = |host: &Host| self.hosts.iter().position(|one| std::ptr::eq(one, host));
        let rows = screen::rows(&self.hosts);
        rows.iter().filter_map(|row| number_of(row.host)).collect()
    }

    /// Chooses the host this number of lines further down.
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
        let mut view = View::new(When::Now, Choice::default(), self.colours, wall::local);
        let host = &self.hosts[self.chosen];
        view.picture.clone_from(&host.picture);
        view.message.clone_from(&host.trouble);
        self.open = Some(view);
    }

    /// Draws the open page.
    pub fn draw(&self, frame: &mut ratatui::Frame<'_>) {
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
