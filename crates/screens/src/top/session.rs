//! Runs the page on a terminal: gets its pictures, and moves through time.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ratatui::Frame;
use ratatui::crossterm::event::KeyEvent;

use crate::pictures::{Asked, Live, Picture};
use crate::terminal::{self, Next, Screen};
use crate::top::screen;
use crate::top::view::{View, When, Wish};
use crate::wall::Time;

/// A history, and a place in it.
pub trait History {
    /// Returns the times of the first and the last period, in nanoseconds since 1970.
    ///
    /// # Errors
    /// If the history cannot be read.
    fn span(&self) -> anyhow::Result<(i64, i64)>;
    /// Returns the picture of the current period.
    ///
    /// # Errors
    /// If another version wrote the period, with something that this version does not know.
    fn picture(&self) -> anyhow::Result<Picture>;
    /// Moves by this number of periods. Returns false if the history ends before that.
    ///
    /// # Errors
    /// If the history cannot be read.
    fn step(&mut self, by: isize) -> anyhow::Result<bool>;
    /// Moves by this number of minutes, but not beyond the first or the last period.
    ///
    /// # Errors
    /// If the history cannot be read.
    fn minutes(&mut self, by: i64) -> anyhow::Result<()>;
    /// Goes to the first period.
    ///
    /// # Errors
    /// If the history cannot be read.
    fn first(&mut self) -> anyhow::Result<()>;
    /// Goes to the last period.
    ///
    /// # Errors
    /// If the history cannot be read.
    fn last(&mut self) -> anyhow::Result<()>;
    /// Goes to the last period at or before a time. Returns a message if nothing was recorded at that time.
    ///
    /// # Errors
    /// If the time is outside the span; and as for [`History::span`].
    fn go_to_time(&mut self, time: &Time) -> anyhow::Result<Option<String>>;
}

/// The state of the page, and the sources of its pictures.
pub struct Session<H> {
    /// The view that is drawn.
    pub view: View,
    /// Asks the agent for a picture.
    pub ask: Arc<dyn Fn() -> Asked + Send + Sync>,
    /// Opens the history at its last period.
    pub open: Box<dyn Fn() -> anyhow::Result<H>>,
    /// Interval between pictures.
    pub every: Duration,
    /// The current place in the history; `None` if the present is shown.
    pub past: Option<H>,
}

impl<H> Session<H> {
    fn live(&self) -> anyhow::Result<Live> {
        let ask = Arc::clone(&self.ask);
        Live::start([move || ask()], self.every)
    }
}

/// Shows the page until the user quits or a signal arrives.
///
/// # Errors
/// If there is no terminal, or it cannot be used.
pub fn run<H: History>(session: Session<H>) -> anyhow::Result<ExitCode> {
    let instead = "`homenode top --once` prints one picture as text, `--batch N` several";
    terminal::show(instead, || Running::new(session))
}

struct Running<H> {
    session: Session<H>,
    live: Option<Live>,
    /// When the next period of a replay is due.
    next_at: Instant,
    /// Since when the agent has not answered; `None` if it answers.
    silent_since: Option<Instant>,
}

impl<H: History> Running<H> {
    fn new(session: Session<H>) -> anyhow::Result<Running<H>> {
        let live = match session.past {
            None => Some(session.live()?),
            Some(_) => None,
        };
        let mut running = Running {
            session,
            live,
            next_at: Instant::now(),
            silent_since: None,
        };
        let message = running.session.view.message.take();
        running.show_past();
        running.session.view.message = message.or(running.session.view.message.take());
        Ok(running)
    }

    /// Carries out what a key requests; an error is shown on the page.
    fn grant(&mut self, wish: Wish) {
        if wish == Wish::Nothing {
            return;
        }
        match self.go(wish) {
            Ok(message) => {
                self.show_past();
                if self.session.past.is_some() {
                    self.session.view.message = message.or(self.session.view.message.take());
                }
            }
            Err(error) => self.session.view.message = Some(format!("{error:#}")),
        }
    }

    /// Goes to another time. Returns a message for the user, if there is one.
    fn go(&mut self, wish: Wish) -> anyhow::Result<Option<String>> {
        self.session.view.message = None;
        if wish == Wish::Now {
            self.live = Some(self.session.live()?);
            self.session.past = None;
            self.session.view.when = When::Now;
            // Removes the past picture. It must not be shown as the present, even if no agent answers.
            self.session.view.picture = None;
            return Ok(None);
        }
        let was_now = self.session.past.is_none();
        // Nothing follows the present.
        if was_now && matches!(wish, Wish::Play | Wish::Step(1..) | Wish::Minutes(1..)) {
            return Ok(None);
        }
        let past = match &mut self.session.past {
            Some(past) => past,
            none => none.insert((self.session.open)()?),
        };
        // From now on the history is shown, so the agent is not asked.
        self.live = None;
        match wish {
            Wish::Step(_) | Wish::Minutes(_) if was_now => {}
            Wish::Step(by) if !past.step(by)? => {
                let end = if by > 0 { "last" } else { "first" };
                return Ok(Some(format!("this is the {end} recorded period")));
            }
            Wish::Minutes(by) => past.minutes(by)?,
            Wish::First => past.first()?,
            Wish::Last => past.last()?,
            Wish::Jump(text) => return past.go_to_time(&text.parse().map_err(anyhow::Error::msg)?),
            Wish::Play => {
                if let When::Then { is_playing, .. } = &mut self.session.view.when {
                    *is_playing = !*is_playing;
                }
            }
            Wish::Step(_) | Wish::Nothing | Wish::Quit | Wish::Now => {}
        }
        Ok(None)
    }

    /// If the history is shown, shows its current period on the page.
    fn show_past(&mut self) {
        let Some(past) = &self.session.past else { return };
        let view = &mut self.session.view;
        let was_playing = matches!(view.when, When::Then { is_playing: true, .. });
        let shown = past.span().and_then(|span| Ok((span, past.picture()?)));
        match shown {
            Ok((span, picture)) => {
                view.when = When::Then {
                    span,
                    is_playing: was_playing,
                };
                view.show(picture);
            }
            Err(error) => view.message = Some(format!("{error:#}")),
        }
    }
}

impl<H: History> Screen for Running<H> {
    fn draw(&self, frame: &mut Frame<'_>) {
        screen::draw(frame, &self.session.view);
    }

    fn key(&mut self, key: KeyEvent) -> Next {
        let wish = self.session.view.key(key);
        if wish == Wish::Quit {
            return Next::Quit;
        }
        self.grant(wish);
        Next::Look
    }

    fn tick(&mut self) -> bool {
        let view = &mut self.session.view;
        if let Some((_, asked)) = self.live.as_ref().and_then(|live| live.new_answers().last()) {
            match asked {
                Ok(picture) => {
                    view.show(picture);
                    view.message = None;
                    self.silent_since = None;
                }
                Err(error) => {
                    let since = self
                        .silent_since
                        .get_or_insert_with(Instant::now)
                        .elapsed()
                        .as_secs();
                    view.message = Some(format!("no answer for {since} s, asking again: {error}"));
                }
            }
            return true;
        }
        let is_playing = matches!(view.when, When::Then { is_playing: true, .. });
        if is_playing && Instant::now() >= self.next_at {
            self.next_at = Instant::now() + self.session.every;
            self.grant(Wish::Step(1));
            if self.session.view.message.is_some() {
                self.session.view.pause();
            }
            return true;
        }
        false
    }
}
