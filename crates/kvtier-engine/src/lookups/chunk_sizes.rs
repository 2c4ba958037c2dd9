//! The chunk sizes of clients that asked a server which was here before.
//!
//! LMCache's adapters ask for the chunk size once, as the first request of their connection, and count hits in chunks of
//! that size for as long as they live. ZeroMQ reconnects them to a restarted server without their knowing, and they
//! would take one chunk of ours for one of theirs: more tokens than they asked for, and the engine dies.
//!
//! A client cuts the end of every lookup down to a multiple of its own chunk size. So that size divides the greatest
//! common divisor of all ends, and it is no smaller than the longest rest that was cut off. A client is served once that
//! leaves our chunk size alone: the divisor is ours, and a rest is longer than half of it. Until then, and again if its
//! ends stop to fit, it finds nothing: a hit in chunks of another size could not be loaded, which some engines do not
//! survive.
//!
//! The mutex guards the table; no other lock is acquired inside.

use std::collections::HashMap;
use std::num::NonZeroUsize;

use kvtier_sync::Mutex;
use serde::{Deserialize, Serialize};

use super::Caller;

/// Connections known at most. Forgetting them all costs each some lookups.
const MAX_CONNECTIONS: usize = 16_384;

/// Lookups after which an unproven chunk size is logged as another one. Of random prompts, all but one client in a
/// million have proved theirs after 32.
const EXPECTED_LOOKUPS: u32 = 32;

/// What the lookups of a connection show, for the next process.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SeenState {
    pub connection: u64,
    pub divisor: u64,
    pub longest_rest: u64,
    pub lookups: u32,
    pub is_logged: bool,
}

#[derive(Debug, Default, Clone, Copy)]
struct Seen {
    /// Of all ends, in tokens; 0 before the first.
    divisor: u64,
    /// Tokens between an end and its prompt's, the most of all lookups.
    longest_rest: u64,
    lookups: u32,
    is_logged: bool,
}

impl Seen {
    /// Whether the chunk size can only be `own`. It divides the divisor, and of the divisors of `own` only `own` itself is
    /// longer than half of it. (A client may leave out a prompt's last token: its chunk size is at least the rest.)
    fn proves(&self, own: u64) -> bool {
        self.divisor == own && 2 * self.longest_rest > own
    }
}

/// What the lookups of reconnected clients show of their chunk sizes.
pub struct ChunkSizes {
    own: u64,
    by_connection: Mutex<HashMap<u64, Seen>>,
}

impl ChunkSizes {
    /// For a server of this chunk size.
    pub fn new(own: NonZeroUsize) -> Self {
        Self {
            own: own.get() as u64,
            by_connection: Mutex::default(),
        }
    }

    /// Forgets a connection that has ended. A client that reconnects has another one, and proves its chunk size again.
    pub fn forget(&self, connection: u64) {
        self.by_connection.lock().remove(&connection);
    }

    /// What is known, for the next process.
    pub fn state(&self) -> Vec<SeenState> {
        let by_connection = self.by_connection.lock();
        let all = by_connection.iter();
        all.map(|(connection, seen)| SeenState {
            connection: *connection,
            divisor: seen.divisor,
            longest_rest: seen.longest_rest,
            lookups: seen.lookups,
            is_logged: seen.is_logged,
        })
        .collect()
    }

    /// Goes on with what the earlier process knew.
    pub fn resume(&self, state: &[SeenState]) {
        let seen = state.iter().map(|of| {
            let seen = Seen {
                divisor: of.divisor,
                longest_rest: of.longest_rest,
                lookups: of.lookups,
                is_logged: of.is_logged,
            };
            (of.connection, seen)
        });
        self.by_connection.lock().extend(seen.take(MAX_CONNECTIONS));
    }

    /// Connections that are known.
    #[cfg(any(test, feature = "testing"))]
    pub fn len(&self) -> usize {
        self.by_connection.lock().len()
    }

    /// Whether the client of a lookup, of a prompt of `tokens` tokens up to `end`, certainly counts in our chunks.
    pub fn is_proven(&self, caller: Caller, tokens: u64, end: u64) -> bool {
        if caller.knows_chunk_size {
            return true;
        }
        let connection = caller.connection;
        let mut by_connection = self.by_connection.lock();
        if by_connection.len() >= MAX_CONNECTIONS && !by_connection.contains_key(&connection) {
            by_connection.clear();
        }
        let seen = by_connection.entry(connection).or_default();
        seen.divisor = gcd(seen.divisor, end);
        seen.longest_rest = seen.longest_rest.max(tokens.saturating_sub(end));
        seen.lookups = seen.lookups.saturating_add(1);
        let is_proven = seen.proves(self.own);
        if seen.lookups == 1 && !is_proven {
            tracing::info!(
                connection,
                chunk_size = self.own,
                "client reconnected without asking for the chunk size; it has no hits until its lookups prove it"
            );
        }
        // An end that is no multiple of ours, or a rest that is longer, shows another size at once.
        let is_other = !seen.divisor.is_multiple_of(self.own) || seen.longest_rest > self.own;
        if !is_proven
            && (is_other || seen.lookups >= EXPECTED_LOOKUPS)
            && !std::mem::replace(&mut seen.is_logged, true)
        {
            tracing::warn!(
                connection,
                chunk_size = self.own,
                ends_are_multiples_of = seen.divisor,
                "client seems to use the chunk size of an earlier server; it has no hits until its engine is restarted"
            );
        }
        is_proven
    }
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use kvtier_proto::generation::Release;

    use super::*;

    const CHUNK: NonZeroUsize = NonZeroUsize::new(16).unwrap();

    fn client(connection: u64, knows_chunk_size: bool) -> Caller {
        Caller {
            connection,
            release: Release::Since0_5_5,
            releases: "0.5.6",
            knows_chunk_size,
            negotiates_chunk_size: false,
            registers_again: Some(true),
            names_workers: true,
        }
    }

    fn is_proven(sizes: &ChunkSizes, tokens: u64, chunk: u64) -> bool {
        sizes.is_proven(client(1, false), tokens, tokens / chunk * chunk)
    }

    #[test]
    fn client_that_asked_is_proven() {
        let sizes = ChunkSizes::new(CHUNK);
        for end in [7, 0, 64] {
            assert!(sizes.is_proven(client(1, true), 64, end));
        }
    }

    #[test]
    fn unlike_prompts_prove_our_chunk_size() {
        let sizes = ChunkSizes::new(CHUNK);
        assert!(!is_proven(&sizes, 0, 16));
        assert!(!is_proven(&sizes, 64, 16));
        assert!(!is_proven(&sizes, 64 + 9, 16));
        assert!(is_proven(&sizes, 48, 16));
        assert!(is_proven(&sizes, 1600, 16));
        assert!(
            !sizes.is_proven(client(2, false), 48, 48),
            "another connection"
        );
    }

    #[test]
    fn other_chunk_sizes_are_never_proven() {
        for theirs in [1, 2, 4, 8, 12, 15, 17, 24, 32, 48, 64, 256] {
            let sizes = ChunkSizes::new(CHUNK);
            for tokens in (0..2000).chain([2048, 16, 32, 31]) {
                assert!(!is_proven(&sizes, tokens, theirs), "{theirs} {tokens}");
            }
        }
    }

    #[test]
    fn end_that_does_not_fit_ends_the_proof() {
        let sizes = ChunkSizes::new(CHUNK);
        assert!(is_proven(&sizes, 16 + 15, 16));
        assert!(!sizes.is_proven(client(1, false), 24, 24));
        assert!(!is_proven(&sizes, 16 + 15, 16));
    }
}
