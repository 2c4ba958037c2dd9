//! Accepting: which connections find a place, and for how long none is accepted.

use std::time::{Duration, Instant};

use kvtier_common::sync::RateLimited;
use rustix::io::Errno;

use super::super::connection::{Closed, Connection};
use super::{Connections, LISTENER, TURN_INTERVAL};

/// Connections accepted before those that are there get their turn.
const MAX_ACCEPTS: usize = 64;

/// How long no connection is accepted after the system had none to give.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Whether new connections are accepted.
#[derive(Debug, Clone, Copy)]
pub(super) enum Accept {
    Now,
    /// Not before this time, nor while there are too many.
    Paused(Instant),
    /// Never again.
    Ended,
}

/// A connection that has not used the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Guest {
    /// Whether it has sent a request, such as a ping.
    pub(super) has_asked: bool,
    pub(super) id: u64,
}

impl Guest {
    pub(super) fn silent(id: u64) -> Self {
        let has_asked = false;
        Self { has_asked, id }
    }

    pub(super) fn asking(id: u64) -> Self {
        let has_asked = true;
        Self { has_asked, id }
    }
}

impl Connections {
    pub(super) fn accept(&mut self) {
        for accepted in 0..MAX_ACCEPTS {
            if accepted > 0 && self.vain.is_exceeded(self.clock.now()) {
                return self.stop_accepting(TURN_INTERVAL);
            }
            let is_full = self.open.len() >= self.bounds.connections;
            let displaced = is_full.then(|| self.guests.first().copied());
            if displaced == Some(None) {
                return self.pause_accepting("all of them use the cache", Duration::ZERO);
            }
            let socket = match self.listener.accept() {
                Ok(socket) => socket,
                Err(Errno::AGAIN) => return,
                // The client has gone meanwhile.
                Err(Errno::CONNABORTED | Errno::INTR) => continue,
                Err(error) => {
                    let error = std::io::Error::from(error).to_string();
                    return self.pause_accepting(&error, ACCEPT_PAUSE);
                }
            };
            if let Some(Some(guest)) = displaced {
                self.close(guest.id, Closed::Displaced);
            }
            let id = self.next_id;
            self.next_id += 1;
            let connection = Connection::new(socket, self.bounds.session, self.clock.now());
            if let Err(error) = self.poller.add(&connection, id) {
                let error = std::io::Error::from(error).to_string();
                return self.pause_accepting(&error, ACCEPT_PAUSE);
            }
            self.ticks.insert((connection.next_tick, id));
            self.open.insert(id, connection);
            self.guests.insert(Guest::silent(id));
            self.metrics.request_connections.set(self.open.len() as i64);
            self.queue(id);
        }
    }

    /// When connections are accepted again, if only time is waited for.
    pub(super) fn accept_pause_end(&self) -> Option<Instant> {
        match self.accept {
            Accept::Paused(until) if self.has_place() => Some(until),
            _ => None,
        }
    }

    /// Watches the listener again if the pause is over and a connection would have a place.
    pub(super) fn end_accept_pause(&mut self, now: Instant) {
        if let Accept::Paused(until) = self.accept
            && now >= until
            && self.has_place()
        {
            match self.poller.add(&*self.listener, LISTENER) {
                Ok(()) => self.accept = Accept::Now,
                Err(_) => self.accept = Accept::Paused(now + ACCEPT_PAUSE),
            }
        }
    }

    /// Whether a new connection would have a place: a free one, or that of a guest.
    fn has_place(&self) -> bool {
        self.open.len() < self.bounds.connections || !self.guests.is_empty()
    }

    fn stop_accepting(&mut self, pause: Duration) {
        if self.poller.remove(&*self.listener).is_ok() {
            self.accept = Accept::Paused(self.clock.now() + pause);
        }
    }

    fn pause_accepting(&mut self, cause: &str, pause: Duration) {
        self.stop_accepting(pause);
        static LOG_LIMIT: RateLimited = RateLimited::new(Duration::from_secs(60));
        if let Some(suppressed_lines) = LOG_LIMIT.permit(Instant::now()) {
            tracing::warn!(
                cause,
                connections = self.open.len(),
                limit = self.bounds.connections,
                suppressed_lines,
                "no further connection is accepted on the request port; new ones wait until others end"
            );
        }
    }

    /// Whether the listener is watched.
    #[cfg(test)]
    pub fn is_accepting(&self) -> bool {
        matches!(self.accept, Accept::Now)
    }

    /// Accepts no connection any more.
    pub fn end_accepting(&mut self) {
        if !matches!(self.accept, Accept::Paused(_)) {
            // Fails only for what is not there.
            let _ = self.poller.remove(&*self.listener);
        }
        self.accept = Accept::Ended;
    }
}
