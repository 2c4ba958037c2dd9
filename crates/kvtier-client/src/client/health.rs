//! Whether the server can be relied on: heartbeats, and what happens when it comes back.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::{Client, Shared};
use crate::error::ClientError;

/// Heartbeats in a row without any answer behind which a connection is given up as lost: it may have died silently.
const SILENT_HEARTBEATS: u32 = 3;

/// How it stands with the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Health {
    /// It answers, and knows this client's worker.
    Healthy,
    /// There is no connection, or a heartbeat was not answered. Requests may still be submitted and fail in time; an
    /// engine does better without.
    Degraded,
    /// It answers again (or for the first time); the client registers again what the server should know.
    Recovering,
}

impl Health {
    /// Its name, in lower case.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Degraded => "degraded",
            Self::Recovering => "recovering",
        }
    }
}

impl std::fmt::Display for Health {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Called with each new state, on the client's heartbeat thread; must not wait for long.
pub type HealthCallback = Box<dyn Fn(Health) + Send + Sync>;

/// Tells the server again what it has to know, on the client's heartbeat thread. Its error is why the server cannot be
/// used ([`Client::obstacle`]); none where it did not answer ([`ClientError::obstacle`]).
pub type RecoverHook = Box<dyn Fn(&Client) -> Result<(), Option<String>> + Send + Sync>;

/// The connection, as the I/O thread sees it.
#[derive(Debug, Default)]
pub(super) struct Link {
    state: Mutex<LinkState>,
    changed: Condvar,
}

#[derive(Debug, Default, Clone, Copy)]
struct LinkState {
    up: bool,
    /// Connections made so far.
    connections: u64,
    /// The server has to be told again what it should know.
    again: bool,
    closing: bool,
}

impl Link {
    pub(super) fn set(&self, up: bool) {
        let mut state = self.state.lock();
        if up && !state.up {
            state.connections += 1;
        }
        state.up = up;
        drop(state);
        self.changed.notify_all();
    }

    pub(super) fn close(&self) {
        self.state.lock().closing = true;
        self.changed.notify_all();
    }

    pub(super) fn recover_again(&self) {
        self.state.lock().again = true;
        self.changed.notify_all();
    }

    /// Connections made so far.
    pub(super) fn connections(&self) -> u64 {
        self.state.lock().connections
    }

    /// Waits until the connection is not as `seen` any more, or `until` has come; how it is then.
    fn wait(&self, seen: LinkState, until: Instant) -> LinkState {
        let mut state = self.state.lock();
        while state.up == seen.up
            && state.connections == seen.connections
            && !state.again
            && !state.closing
        {
            if self.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        let now = *state;
        state.again = false;
        now
    }
}

/// The state and who wants to know of it.
pub(super) struct Watch {
    state: Mutex<WatchState>,
    changed: Condvar,
    callbacks: Mutex<Vec<Arc<HealthCallback>>>,
    recover: Mutex<Option<Arc<RecoverHook>>>,
}

#[derive(PartialEq, Eq)]
struct WatchState {
    health: Health,
    /// Why a server that answers cannot be used.
    obstacle: Option<String>,
}

impl Default for Watch {
    fn default() -> Self {
        Self {
            state: Mutex::new(WatchState {
                health: Health::Degraded,
                obstacle: None,
            }),
            changed: Condvar::new(),
            callbacks: Mutex::default(),
            recover: Mutex::default(),
        }
    }
}

impl Watch {
    pub(super) fn state(&self) -> Health {
        self.state.lock().health
    }

    pub(super) fn obstacle(&self) -> Option<String> {
        self.state.lock().obstacle.clone()
    }

    pub(super) fn wait_healthy(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let mut state = self.state.lock();
        while state.health != Health::Healthy {
            if self.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        state.health == Health::Healthy
    }

    pub(super) fn add_callback(&self, callback: HealthCallback) {
        self.callbacks.lock().push(Arc::new(callback));
    }

    pub(super) fn set_recover(&self, hook: RecoverHook) {
        *self.recover.lock() = Some(Arc::new(hook));
    }

    /// Forgets who wants to know: callbacks may hold what holds the client.
    pub(super) fn clear(&self) {
        self.callbacks.lock().clear();
        *self.recover.lock() = None;
    }

    pub(super) fn set(&self, health: Health) {
        self.change(health, None);
    }

    /// The state before.
    fn change(&self, health: Health, obstacle: Option<String>) -> Health {
        let mut state = self.state.lock();
        let before = state.health;
        let next = WatchState { health, obstacle };
        if *state == next {
            return before;
        }
        *state = next;
        // Taken with the state: who asks to be told later is told what comes later.
        let callbacks = self.callbacks.lock().clone();
        drop(state);
        self.changed.notify_all();
        for callback in callbacks {
            // A panic is its owner's, and printed; the heartbeats go on.
            let _ = catch_unwind(AssertUnwindSafe(|| callback(health)));
        }
        before
    }
}

/// The server does not answer, or cannot be used.
fn degrade(shared: &Shared, obstacle: Option<String>) {
    if shared.watch.change(Health::Degraded, obstacle) != Health::Degraded {
        shared.fail_in_flight();
    }
}

/// Prepares the server of a new connection for use; the error is why it cannot be used, if it has answered.
fn recover(shared: &Shared, client: &Client) -> Result<(), Option<String>> {
    if shared.agreement.is_wanted() {
        let told = client.get_chunk_size().join();
        let told = told.map_err(|error| error.obstacle())? as u64;
        shared.agreement.accept(client.endpoint(), told)?;
    }
    shared.watch.set(Health::Recovering);
    let hook = shared.watch.recover.lock().clone();
    let Some(hook) = hook else { return Ok(()) };
    // A panic is its owner's, and printed.
    catch_unwind(AssertUnwindSafe(|| hook(client))).unwrap_or(Err(None))
}

/// Runs until the client is closed: a heartbeat at once on each new connection and then every `interval`.
pub(super) fn run(shared: &Arc<Shared>, interval: Duration) {
    let client = Client::internal(Arc::clone(shared));
    let mut seen = LinkState::default();
    let mut next = Instant::now() + interval;
    // The connection whose server knows all it has to know.
    let mut known_to = None;
    // Heartbeats without an answer since the connection was made, or since there was any answer on it.
    let mut silent = 0;
    loop {
        let link = shared.link.wait(seen, next);
        if link.closing {
            degrade(shared, None);
            return;
        }
        let is_new = link.connections != seen.connections || link.again;
        if link.again {
            known_to = None;
        }
        if link.connections != seen.connections {
            silent = 0;
        }
        seen = link;
        if !link.up {
            degrade(shared, None);
            next = Instant::now() + interval;
            continue;
        }
        if !is_new && Instant::now() < next {
            continue;
        }
        next = Instant::now() + interval;
        let patience = interval.min(shared.timeout());
        let heard = shared.heard.load(Ordering::Relaxed);
        let beat = client.beat(patience);
        let is_silent = matches!(beat, Err(ClientError::Timeout { .. }))
            && heard == shared.heard.load(Ordering::Relaxed);
        silent = if is_silent { silent + 1 } else { 0 };
        match beat {
            Ok(true) if known_to == Some(link.connections) => shared.watch.set(Health::Healthy),
            // A server on a new connection may be another one. One that says no does not know the worker, or no more.
            Ok(_) => match recover(shared, &client) {
                Ok(()) => {
                    known_to = Some(link.connections);
                    shared.watch.set(Health::Healthy);
                }
                Err(obstacle) => {
                    known_to = None;
                    degrade(shared, obstacle);
                }
            },
            Err(_) => degrade(shared, None),
        }
        if silent >= SILENT_HEARTBEATS {
            silent = 0;
            shared.give_up_connection(link.connections);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_to_tell_the_server_again_is_told_so_once() {
        let link = Link::default();
        link.recover_again();
        let at_once = || link.wait(LinkState::default(), Instant::now());
        assert!(at_once().again);
        assert!(!at_once().again);
    }
}
