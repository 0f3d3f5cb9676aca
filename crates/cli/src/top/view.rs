//! What the page shows, and what keys change of that. Nothing here asks, reads or draws.

use chrono::NaiveDateTime;
use homenode_api::answer::Overview;
use homenode_control::VmStatus;
use homenode_units::VmId;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use crate::top::table::Colours;
use crate::top::vms::Choice;

/// The host at one time.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    /// When, in nanoseconds since 1970.
    pub wall_ns: i64,
    /// What was, and what had happened.
    pub overview: Overview,
}

/// Which time is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// What the agent says.
    Now,
    /// What the history has.
    Then {
        /// The first and the last period, in nanoseconds since 1970.
        span: (i64, i64),
        /// Whether time goes on.
        is_playing: bool,
    },
}

/// Which page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Page {
    /// All VMs.
    #[default]
    List,
    /// The chosen one.
    Vm,
    /// Keys and limits.
    Help,
}

/// What is being typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// A filter, with the one before.
    Filter(String),
    /// A time to go to.
    Jump(String),
}

/// What a key asks for that the view cannot do itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Nothing.
    Nothing,
    /// The end.
    Quit,
    /// So many periods on, or back.
    Step(isize),
    /// So many minutes on, or back.
    Minutes(i64),
    /// The first period.
    First,
    /// The last period.
    Last,
    /// What is now.
    Now,
    /// Time goes on, or stands.
    Play,
    /// The time that was written.
    Jump(String),
}

/// All that the page is drawn from.
#[derive(Clone, Debug)]
pub struct View {
    /// What is shown.
    pub picture: Option<Picture>,
    /// Of which time.
    pub when: When,
    /// What is wrong, or cannot be done.
    pub message: Option<String>,
    /// Which page.
    pub page: Page,
    /// Lines of it above the first that is shown.
    pub scroll: usize,
    /// Which VMs, in which order.
    pub choice: Choice,
    /// The chosen VM, and its name for when it is gone.
    pub chosen: Option<(VmId, String)>,
    /// What is being typed.
    pub prompt: Option<Prompt>,
    /// Whether there is colour.
    pub colours: Colours,
    /// How times are told: by the host's zone.
    pub clock: fn(i64) -> NaiveDateTime,
}

impl View {
    /// A page that shows nothing yet.
    pub fn new(when: When, choice: Choice, colours: Colours, clock: fn(i64) -> NaiveDateTime) -> View {
        View {
            picture: None,
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

    /// The VMs that are shown, in their order.
    pub fn vms(&self) -> Vec<&VmStatus> {
        let picture = self.picture.as_ref();
        picture.map_or_else(Vec::new, |picture| self.choice.of(&picture.overview.status))
    }

    /// Where the chosen VM is among them.
    pub fn chosen_row(&self, vms: &[&VmStatus]) -> Option<usize> {
        let (id, _) = self.chosen.as_ref()?;
        vms.iter().position(|vm| vm.id == *id)
    }

    /// What a key does.
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

    /// Has time stand: what is said of a time must stay to be read.
    pub fn pause(&mut self) {
        if let When::Then { is_playing, .. } = &mut self.when {
            *is_playing = false;
        }
    }

    fn turn_to(&mut self, page: Page) {
        self.page = if self.page == page { Page::List } else { page };
        self.scroll = 0;
    }

    /// Opens the page of the chosen VM, or of the first.
    fn open(&mut self) {
        if self.chosen_row(&self.vms()).is_none() {
            self.go(0);
        }
        if self.chosen.is_some() {
            self.turn_to(Page::Vm);
        }
    }

    /// Chooses the VM this number of rows further down, or scrolls.
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
                // It holds while it is written.
                self.choice.filter = edited(std::mem::take(&mut self.choice.filter));
                self.prompt = Some(Prompt::Filter(before));
            }
            (Prompt::Jump(text), KeyCode::Enter) => return Wish::Jump(text),
            (Prompt::Jump(text), _) => self.prompt = Some(Prompt::Jump(edited(text))),
        }
        Wish::Nothing
    }
}
