//! The state of the page, and how keys change it. This module asks no agent, reads no history and draws nothing.

use chrono::NaiveDateTime;
use homenode_control::VmStatus;
use homenode_units::VmId;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use crate::pictures::Picture;
use crate::table::Colours;
use crate::top::trail::Trail;
use crate::top::vms::Choice;

/// The time that the page shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// The present, as the agent reports it.
    Now,
    /// A time in the past, read from the history.
    Then {
        /// The times of the first and the last period, in nanoseconds since 1970.
        span: (i64, i64),
        /// Whether the replay is running.
        is_playing: bool,
    },
}

/// The page that is shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Page {
    /// All VMs.
    #[default]
    List,
    /// The page of the chosen VM.
    Vm,
    /// Keys and limits.
    Help,
}

/// An input line that is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// For a filter; holds the previous filter.
    Filter(String),
    /// For a time to go to; holds the text typed so far.
    Jump(String),
}

/// A key's request that the view cannot carry out itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wish {
    /// The key requests nothing more.
    Nothing,
    /// Quit.
    Quit,
    /// Move by this number of periods.
    Step(isize),
    /// Move by this number of minutes.
    Minutes(i64),
    /// Go to the first period.
    First,
    /// Go to the last period.
    Last,
    /// Go to the present.
    Now,
    /// Start or pause the replay.
    Play,
    /// Go to the time that was typed, which is not parsed yet.
    Jump(String),
}

/// Everything that the page is drawn from.
#[derive(Clone, Debug)]
pub struct View {
    /// The picture that is shown.
    pub picture: Option<Picture>,
    /// Speeds of VMs in the pictures shown so far.
    pub trail: Trail,
    /// The time that is shown.
    pub when: When,
    /// An error or a notice for the user.
    pub message: Option<String>,
    /// The page that is shown.
    pub page: Page,
    /// Number of lines that the page is scrolled down.
    pub scroll: usize,
    /// Which VMs to show, and in which order.
    pub choice: Choice,
    /// The chosen VM, with its name in case the VM is gone.
    pub chosen: Option<(VmId, String)>,
    /// The open input line.
    pub prompt: Option<Prompt>,
    /// Whether to use colour.
    pub colours: Colours,
    /// Converts times to the host's time zone.
    pub clock: fn(i64) -> NaiveDateTime,
}

impl View {
    /// Creates a view that has no picture yet.
    pub fn new(when: When, choice: Choice, colours: Colours, clock: fn(i64) -> NaiveDateTime) -> View {
        View {
            picture: None,
            trail: Trail::default(),
            when,
            message: None,
            page: Page::List,
            scroll: 0,
            choice,
            chosen: None,
            prompt: None,
            colours,
            clock,
        }
    }

    /// Shows a picture.
    pub fn show(&mut self, picture: Picture) {
        self.trail.add(&picture);
        self.picture = Some(picture);
    }

    /// Returns the VMs to show, in their order.
    pub fn vms(&self) -> Vec<&VmStatus> {
        let picture = self.picture.as_ref();
        picture.map_or_else(Vec::new, |picture| self.choice.of(&picture.overview.status))
    }

    /// Returns the row of the chosen VM among these.
    pub fn chosen_row(&self, vms: &[&VmStatus]) -> Option<usize> {
        let (id, _) = self.chosen.as_ref()?;
        vms.iter().position(|vm| vm.id == *id)
    }

    /// Handles a key.
    pub fn key(&mut self, key: KeyEvent) -> Wish {
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        if is_control && key.code == KeyCode::Char('c') {
            return Wish::Quit;
        }
        if let Some(prompt) = self.prompt.take() {
            return self.typed(prompt, key);
        }
        match key.code {
            KeyCode::Char('q') => return Wish::Quit,
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.turn_to(Page::Help),
            KeyCode::Esc | KeyCode::Backspace if self.page != Page::List => self.turn_to(Page::List),
            KeyCode::Esc => self.choice.filter.clear(),
            KeyCode::Enter if self.page == Page::List => self.open(),
            KeyCode::Up | KeyCode::Char('k') => self.go(-1),
            KeyCode::Down | KeyCode::Char('j') => self.go(1),
            KeyCode::PageUp => self.go(-10),
            KeyCode::PageDown => self.go(10),
            KeyCode::Char('/') => {
                self.turn_to(Page::List);
                self.prompt = Some(Prompt::Filter(self.choice.filter.clone()));
            }
            KeyCode::Char('<') => self.choice.sort = self.choice.sort.next(-1),
            KeyCode::Char('>' | 's') => self.choice.sort = self.choice.sort.next(1),
            KeyCode::Char('r') => self.choice.is_reversed = !self.choice.is_reversed,
            KeyCode::Left => return Wish::Step(-1),
            KeyCode::Right => return Wish::Step(1),
            KeyCode::Char('[') => return Wish::Minutes(-1),
            KeyCode::Char(']') => return Wish::Minutes(1),
            KeyCode::Home => return Wish::First,
            KeyCode::End => return Wish::Last,
            KeyCode::Char(' ') => return Wish::Play,
            KeyCode::Char('n') => return Wish::Now,
            KeyCode::Char('g') => {
                self.pause();
                self.prompt = Some(Prompt::Jump(String::new()));
            }
            _ => {}
        }
        Wish::Nothing
    }

    /// Pauses the replay, so that a message about a time stays readable.
    pub fn pause(&mut self) {
        if let When::Then { is_playing, .. } = &mut self.when {
            *is_playing = false;
        }
    }

    fn turn_to(&mut self, page: Page) {
        self.page = if self.page == page { Page::List } else { page };
        self.scroll = 0;
    }

    /// Opens the page of the chosen VM, or of the first VM if none is chosen.
    fn open(&mut self) {
        if self.chosen_row(&self.vms()).is_none() {
            self.go(0);
        }
        if self.chosen.is_some() {
            self.turn_to(Page::Vm);
        }
    }

    /// Chooses the VM that is this number of rows further down; on other pages, scrolls.
    fn go(&mut self, by: isize) {
        if self.page != Page::List {
            self.scroll = self.scroll.saturating_add_signed(by);
            return;
        }
        let vms = self.vms();
        let row = match self.chosen_row(&vms) {
            Some(row) => row.saturating_add_signed(by).min(vms.len().saturating_sub(1)),
            None => 0,
        };
        self.chosen = vms.get(row).map(|vm| (vm.id, vm.name.clone()));
    }

    fn typed(&mut self, prompt: Prompt, key: KeyEvent) -> Wish {
        let edited = |mut text: String| match key.code {
            KeyCode::Char(c) => {
                text.push(c);
                text
            }
            KeyCode::Backspace => {
                text.pop();
                text
            }
            _ => text,
        };
        match (prompt, key.code) {
            (Prompt::Filter(before), KeyCode::Esc) => self.choice.filter = before,
            (Prompt::Filter(_), KeyCode::Enter) | (Prompt::Jump(_), KeyCode::Esc) => {}
            (Prompt::Filter(before), _) => {
                // The filter applies while it is being typed.
                self.choice.filter = edited(std::mem::take(&mut self.choice.filter));
                self.prompt = Some(Prompt::Filter(before));
            }
            (Prompt::Jump(text), KeyCode::Enter) => return Wish::Jump(text),
            (Prompt::Jump(text), _) => self.prompt = Some(Prompt::Jump(edited(text))),
        }
        Wish::Nothing
    }
}
