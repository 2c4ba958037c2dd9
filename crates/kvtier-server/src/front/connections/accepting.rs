//! Accepting: whether connections are accepted, and which of them give way.

use std::time::Instant;

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
