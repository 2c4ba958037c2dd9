//! Health of the server: heartbeats, and the recovery when it comes back.
//!
//! `Watch::state` guards the health that was last reported, `callbacks` and `recover` what is called; `Link::state`
//! the state of the connection. `callbacks` may be acquired inside `Watch::state`. No lock is held while a callback
//! runs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvtier_common::sync::{Condvar, Mutex};

use super::chunk::Offer;
use super::{Client, ClientShared};
use crate::error::ClientError;

/// Heartbeats in a row without any reply after which a connection is dropped as lost: it may have died silently.
const SILENT_HEARTBEATS: u32 = 3;

/// State of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Health {
    /// The server answers, and knows this client's worker.
    Healthy,
    /// No connection, or a heartbeat was not answered. Requests may still be submitted and fail in time; an
    /// engine should submit none.
    Degraded,
    /// The server answers again (or for the first time); the client registers again.
    Recovering,
}

impl Health {
    /// Name of the state, in lower case.
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

/// Consumer of each new state, called on the client's heartbeat thread, which it must not block for long.
pub type HealthCallback = Box<dyn Fn(Health) + Send + Sync>;

/// Registers again, on the client's heartbeat thread. Its error is why the server cannot be used ([`Client::obstacle`]);
/// none if it did not answer ([`ClientError::obstacle`]).
pub type RecoverHook = Box<dyn Fn(&Client) -> Result<(), Option<String>> + Send + Sync>;

/// State of the connection. The I/O thread sets it, the heartbeat thread waits for changes.
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
    /// Whether the client has to register again.
    recover: bool,
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
        self.state.lock().recover = true;
        self.changed.notify_all();
    }

    /// Connections made so far.
    pub(super) fn connections(&self) -> u64 {
        self.state.lock().connections
    }

    /// Whether the connection of this number is up.
    fn is_up_on(&self, connection: u64) -> bool {
        let state = self.state.lock();
        state.up && state.connections == connection
    }

    /// Waits until the state differs from `seen`, or for `until`; returns the state then.
    fn wait(&self, seen: LinkState, until: Instant) -> LinkState {
        let mut state = self.state.lock();
        while state.up == seen.up
            && state.connections == seen.connections
            && !state.recover
            && !state.closing
        {
            if self.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        let now = *state;
        state.recover = false;
        now
    }
}

/// The state, and the callbacks for its changes.
pub(super) struct Watch {
    state: Mutex<WatchState>,
    changed: Condvar,
    callbacks: Mutex<Vec<Arc<HealthCallback>>>,
    recover: Mutex<Option<Arc<RecoverHook>>>,
}

#[derive(PartialEq, Eq)]
struct WatchState {
    health: Health,
    /// The connection on which it is healthy.
    connection: u64,
    /// Why the server cannot be used although it answers.
    obstacle: Option<String>,
}

impl WatchState {
    fn seen(&self, link: &Link) -> Health {
        match self.health {
            Health::Healthy if !link.is_up_on(self.connection) => Health::Degraded,
            health => health,
        }
    }
}

impl Default for Watch {
    fn default() -> Self {
        Self {
            state: Mutex::new(WatchState {
                health: Health::Degraded,
                connection: 0,
                obstacle: None,
            }),
            changed: Condvar::new(),
            callbacks: Mutex::default(),
            recover: Mutex::default(),
        }
    }
}

impl Watch {
    /// The state. A lost connection degrades it at once, before the thread that reports states has noticed.
    pub(super) fn state(&self, link: &Link) -> Health {
        self.state.lock().seen(link)
    }

    pub(super) fn obstacle(&self) -> Option<String> {
        self.state.lock().obstacle.clone()
    }

    pub(super) fn wait_healthy(&self, link: &Link, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        let mut state = self.state.lock();
        while state.seen(link) != Health::Healthy {
            if self.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        state.seen(link) == Health::Healthy
    }

    pub(super) fn add_callback(&self, callback: HealthCallback) {
        self.callbacks.lock().push(Arc::new(callback));
    }

    pub(super) fn set_recover(&self, hook: RecoverHook) {
        *self.recover.lock() = Some(Arc::new(hook));
    }

    /// Drops the callbacks, which may own a handle of the client.
    pub(super) fn clear(&self) {
        self.callbacks.lock().clear();
        *self.recover.lock() = None;
    }

    pub(super) fn set_healthy(&self, connection: u64) {
        self.change(Health::Healthy, connection, None);
    }

    /// Sets the state; returns the previous one.
    fn change(&self, health: Health, connection: u64, obstacle: Option<String>) -> Health {
        let mut state = self.state.lock();
        let before = state.health;
        let next = WatchState {
            health,
            connection,
            obstacle,
        };
        if *state == next {
            return before;
        }
        let is_reported = (health, &next.obstacle) != (before, &state.obstacle);
        *state = next;
        // Taken with the state: a callback that is added later gets later states only.
        let callbacks = self.callbacks.lock().clone();
        drop(state);
        self.changed.notify_all();
        for callback in callbacks.into_iter().filter(|_| is_reported) {
            // A panic is the callback's, and printed; the heartbeats go on.
            let _ = catch_unwind(AssertUnwindSafe(|| callback(health)));
        }
        before
    }
}

/// Sets the state of a server that does not answer, or cannot be used.
fn degrade(shared: &ClientShared, obstacle: Option<String>) {
    if shared.watch.change(Health::Degraded, 0, obstacle) != Health::Degraded {
        shared.fail_in_flight();
    }
}

/// The obstacle of a server that has answered a heartbeat, but not an operation in time.
fn unanswered(error: &ClientError) -> Option<String> {
    matches!(error, ClientError::Timeout { .. }).then(|| {
        format!(
            "{error}, although the server answers pings: it is busy, or of another protocol; LMCache's servers before 0.5.5 cannot \
             be used"
        )
    })
}

/// Agrees on the chunk size with the server of a connection. The error is why it cannot be used, if it has answered.
fn agree(shared: &ClientShared, client: &Client, connection: u64) -> Result<(), Option<String>> {
    let (chunk_tokens, features) = (client.get_chunk_size(), client.get_experimental());
    let chunk_tokens = chunk_tokens
        .join()
        .map_err(|error| unanswered(&error).or_else(|| error.obstacle()))?;
    // A server that answers with an error has none.
    let features = features.join().or_else(|error| match error.obstacle() {
        Some(_) => Ok(Vec::new()),
        None => Err(unanswered(&error)),
    })?;
    if shared.link.connections() != connection {
        // One of the answers may be another server's.
        return Err(None);
    }
    let offer = Offer {
        endpoint: client.endpoint(),
        connection,
        chunk_tokens: chunk_tokens as u64,
        features: &features,
    };
    let accepted = shared.agreement.accept(&offer);
    accepted.map_err(|refusal| Some(refusal.to_string()))
}

/// Agrees with the server of a connection and registers again. The error is why it cannot be used, if it has answered.
fn recover(shared: &ClientShared, client: &Client, connection: u64) -> Result<(), Option<String>> {
    if shared.agreement.is_wanted() {
        agree(shared, client, connection)?;
    }
    shared.watch.change(Health::Recovering, 0, None);
    let hook = shared.watch.recover.lock().clone();
    let Some(hook) = hook else { return Ok(()) };
    // A panic is the hook's, and printed.
    catch_unwind(AssertUnwindSafe(|| hook(client))).unwrap_or(Err(None))
}

/// Runs until the client is closed: a heartbeat at once on each new connection and then every `interval`.
pub(super) fn run(shared: &Arc<ClientShared>, interval: Duration) {
    let client = Client::internal(Arc::clone(shared));
    let mut seen = LinkState::default();
    let mut next = Instant::now() + interval;
    // The connection on which the client has registered.
    let mut registered_on = None;
    // Heartbeats without a reply since the connection was made, or since any reply on it.
    let mut silent = 0;
    loop {
        let link = shared.link.wait(seen, next);
        if link.closing {
            degrade(shared, None);
            return;
        }
        let is_new = link.connections != seen.connections || link.recover;
        if link.recover {
            registered_on = None;
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
        let timeout = interval.min(shared.timeout());
        let received = shared.received.load(Ordering::Relaxed);
        let heartbeat = client.heartbeat(timeout);
        let is_silent = matches!(heartbeat, Err(ClientError::Timeout { .. }))
            && received == shared.received.load(Ordering::Relaxed);
        silent = if is_silent { silent + 1 } else { 0 };
        match heartbeat {
            Ok(true) if registered_on == Some(link.connections) => {
                shared.watch.set_healthy(link.connections)
            }
            // A server on a new connection may be another one. One that answers no does not know the worker (any more).
            Ok(_) => match recover(shared, &client, link.connections) {
                Ok(()) => {
                    registered_on = Some(link.connections);
                    shared.watch.set_healthy(link.connections);
                }
                Err(obstacle) => {
                    registered_on = None;
                    degrade(shared, obstacle);
                }
            },
            Err(_) => degrade(shared, None),
        }
        if silent >= SILENT_HEARTBEATS {
            silent = 0;
            shared.drop_connection(link.connections);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_connection_degrades_before_it_is_reported() {
        let (link, watch) = (Link::default(), Watch::default());
        link.set(true);
        watch.set_healthy(1);
        assert_eq!(watch.state(&link), Health::Healthy);
        link.set(false);
        assert_eq!(watch.state(&link), Health::Degraded);
        // The next connection may be to another server.
        link.set(true);
        assert_eq!(watch.state(&link), Health::Degraded);
        assert!(!watch.wait_healthy(&link, Duration::ZERO));
        watch.set_healthy(2);
        assert!(watch.wait_healthy(&link, Duration::ZERO));
    }

    #[test]
    fn requested_recovery_is_reported_once() {
        let link = Link::default();
        link.recover_again();
        let state = || link.wait(LinkState::default(), Instant::now());
        assert!(state().recover);
        assert!(!state().recover);
    }
}
