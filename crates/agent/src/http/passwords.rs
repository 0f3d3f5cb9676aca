//! Checks passwords. A check is slow on purpose. If a client floods the agent with wrong passwords, it keeps one thread busy, and
//! delays only clients whose password has not been checked before.
//!
//! | limit | |
//! |---|---|
//! | checks at a time | one, on a thread that does nothing else |
//! | checks that wait, per address | four; further ones are told to retry |
//! | passwords remembered as right | 64, by a keyed digest of what was sent: these are not checked again |

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ring::hmac;
use tokio::sync::Semaphore;

use super::problem::Failed;
use super::web::User;

/// Most checks that may wait per address.
const WAITING_MAX: usize = 4;
/// Most addresses that may have a waiting check.
const ADDRESSES_MAX: usize = 64;
/// Most right passwords that are remembered, as digests.
const KNOWN_MAX: usize = 64;
/// How long a check waits for its turn.
const PATIENCE: Duration = Duration::from_secs(10);

/// Checks passwords.
#[derive(Debug)]
pub(super) struct Passwords {
    /// A key that is random in each run, so the digests are useless elsewhere.
    key: hmac::Key,
    turn: Arc<Semaphore>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    known: VecDeque<Vec<u8>>,
    waiting: BTreeMap<IpAddr, usize>,
}

/// A place in the queue, released when dropped.
struct Place<'a>(&'a Passwords, IpAddr);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        if let Some(count) = state.waiting.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                state.waiting.remove(&self.1);
            }
        }
    }
}

impl Passwords {
    /// Creates a checker that remembers no password. `random` must be secret.
    pub(super) fn new(random: &[u8]) -> Passwords {
        Passwords {
            key: hmac::Key::new(hmac::HMAC_SHA256, random),
            turn: Arc::new(Semaphore::new(1)),
            state: Mutex::default(),
        }
    }

    /// Returns true if this is a user's password. `from` is the address that sent it. If there is no such user, checks `dummy`
    /// instead, which takes as long, so a client cannot find out which names exist.
    ///
    /// # Errors
    /// If too many passwords wait to be checked.
    pub(super) async fn is_right(
        &self,
        from: IpAddr,
        (name, password): (&str, &str),
        (user, dummy): (Option<&User>, &User),
    ) -> Result<bool, Failed> {
        let hash = user.unwrap_or(dummy).hash.clone();
        let digest = self.digest(&[name, password, &hash]);
        if user.is_some() && self.lock().known.contains(&digest) {
            return Ok(true);
        }
        let place = self.place(from)?;
        let turn = tokio::time::timeout(PATIENCE, Arc::clone(&self.turn).acquire_owned()).await;
        let Ok(Ok(turn)) = turn else {
            return Err(Failed::too_many());
        };
        let password = password.to_owned();
        // The check keeps its turn until it ends, even if the client has gone.
        let checked = tokio::task::spawn_blocking(move || {
            let is_right = bcrypt::verify(password, &hash).unwrap_or(false);
            drop(turn);
            is_right
        });
        let is_right = checked.await.map_err(|_| Failed::gone())? && user.is_some();
        drop(place);
        if is_right {
            let mut state = self.lock();
            state.known.push_back(digest);
            if state.known.len() > KNOWN_MAX {
                state.known.pop_front();
            }
        }
        Ok(is_right)
    }

    fn place(&self, from: IpAddr) -> Result<Place<'_>, Failed> {
        let mut state = self.lock();
        let is_full = state.waiting.len() >= ADDRESSES_MAX && !state.waiting.contains_key(&from);
        let count = state.waiting.entry(from).or_default();
        if is_full || *count >= WAITING_MAX {
            if *count == 0 {
                state.waiting.remove(&from);
            }
            return Err(Failed::too_many());
        }
        *count += 1;
        Ok(Place(self, from))
    }

    /// Digests texts. Each is preceded by its length, so different lists never give the same input.
    fn digest(&self, texts: &[&str]) -> Vec<u8> {
        let mut context = hmac::Context::with_key(&self.key);
        for text in texts {
            context.update(&(text.len() as u64).to_le_bytes());
            context.update(text.as_bytes());
        }
        context.sign().as_ref().to_vec()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
