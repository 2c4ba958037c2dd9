//! The chunk sizes of clients that asked a server which was here before.
//!
//! LMCache's adapters ask for the chunk size once, as the first request of their connection, and count hits in chunks of
//! that size for as long as they live. ZeroMQ reconnects them to a restarted server without their knowing, and they
//! would take one chunk of ours for one of theirs: more tokens than they asked for, and the engine dies.
//!
//! A client cuts the end of every lookup down to a multiple of its own chunk size. So that size divides the greatest
//! common divisor of all ends: once that is our chunk size, the client's is no larger, and no answer claims too much.
//! Until then an answer counts in chunks of the divisor, which is never too much either. An end that is no multiple of our
//! chunk size shows another size, to which nothing is served.
//!
//! The mutex guards the table.

use std::collections::HashMap;
use std::num::NonZeroUsize;

use parking_lot::Mutex;

use super::Caller;

/// Connections known at most. Forgetting them all costs each some lookups.
const MAX_CONNECTIONS: usize = 16_384;

/// Lookups after which a divisor that is not our chunk size is taken for the client's. Of random ends, half of these
/// have the chunk size as divisor after two, and all but one in 2^31 after 32.
const EXPECTED_LOOKUPS: u32 = 32;

#[derive(Debug, Default, Clone, Copy)]
struct Seen {
    /// Of all ends, in tokens; 0 before the first.
    divisor: u64,
    lookups: u32,
    /// A retrieve showed chunks of another size.
    is_disproved: bool,
    is_logged: bool,
}

/// What the ends of lookups show of their clients' chunk sizes.
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

    /// Our chunks that the client of a lookup counts as one, at most; nothing if none may be counted.
    pub fn counted_as_one(&self, caller: Caller, end: u64) -> Option<NonZeroUsize> {
        if caller.knows_chunk_size {
            return Some(NonZeroUsize::MIN);
        }
        let seen = self.see(caller.connection, end);
        let is_other = seen.is_disproved && seen.divisor != self.own;
        if is_other || seen.divisor == 0 || !seen.divisor.is_multiple_of(self.own) {
            return None;
        }
        NonZeroUsize::new(usize::try_from(seen.divisor / self.own).ok()?)
    }

    fn see(&self, connection: u64, end: u64) -> Seen {
        let mut by_connection = self.by_connection.lock();
        if by_connection.len() >= MAX_CONNECTIONS && !by_connection.contains_key(&connection) {
            by_connection.clear();
        }
        let seen = by_connection.entry(connection).or_default();
        seen.divisor = gcd(seen.divisor, end);
        seen.lookups = seen.lookups.saturating_add(1);
        if seen.lookups == 1 {
            tracing::info!(
                connection,
                chunk_size = self.own,
                "a client reconnected without asking for the chunk size; its first hits are cut until its lookups prove it"
            );
        }
        let is_other = seen.is_disproved || !seen.divisor.is_multiple_of(self.own);
        let is_unproven = seen.lookups >= EXPECTED_LOOKUPS;
        if seen.divisor != self.own
            && (is_other || is_unproven)
            && !std::mem::replace(&mut seen.is_logged, true)
        {
            tracing::warn!(
                connection,
                chunk_size = self.own,
                ends_are_multiples_of = seen.divisor,
                "a client seems to use the chunk size of an earlier server; it has few hits or none until its engine \
                 is restarted"
            );
        }
        *seen
    }

    /// Whether the `reported` chunks of a lookup are as long as ours, shown by the end of the retrieve that follows.
    ///
    /// A client that retrieves less than was reported is taken for one of another chunk size, until the ends of its
    /// lookups prove ours.
    pub fn is_same(&self, connection: u64, reported: usize, end: u64) -> bool {
        let is_same = end == reported as u64 * self.own;
        if let Some(seen) = self.by_connection.lock().get_mut(&connection) {
            match is_same {
                true => seen.divisor = gcd(seen.divisor, self.own),
                false => seen.is_disproved = true,
            }
        }
        is_same
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
            knows_chunk_size,
        }
    }

    fn counted(sizes: &ChunkSizes, connection: u64, end: u64) -> Option<usize> {
        let counted = sizes.counted_as_one(client(connection, false), end);
        counted.map(NonZeroUsize::get)
    }

    #[test]
    fn client_that_asked_counts_every_chunk() {
        let sizes = ChunkSizes::new(CHUNK);
        for end in [7, 0, 64] {
            let counted = sizes.counted_as_one(client(1, true), end);
            assert_eq!(counted, Some(NonZeroUsize::MIN));
        }
    }

    #[test]
    fn ends_with_our_divisor_prove_the_chunk_size() {
        let sizes = ChunkSizes::new(CHUNK);
        assert_eq!(counted(&sizes, 1, 0), None);
        assert_eq!(counted(&sizes, 1, 64), Some(4));
        assert_eq!(counted(&sizes, 1, 96), Some(2));
        assert_eq!(counted(&sizes, 2, 64), Some(4));
        assert_eq!(counted(&sizes, 1, 80), Some(1));
        assert_eq!(counted(&sizes, 1, 1600), Some(1));
        assert!(sizes.is_same(2, 1, 16));
        assert_eq!(counted(&sizes, 2, 64), Some(1));
    }

    /// Whatever the client's chunk size and prompts, what it makes of an answer is no more than what was found.
    #[test]
    fn no_answer_claims_more_than_found() {
        for theirs in [1u64, 4, 8, 16, 24, 32, 48, 64, 256] {
            let sizes = ChunkSizes::new(CHUNK);
            for len in [5u64, 100, 70, 333, 1024, 512, 97, 640] {
                let end = len / theirs * theirs;
                let found = end / 16;
                let reported = counted(&sizes, theirs, end).map_or(0, |each| found / each as u64);
                assert!(reported * theirs <= found * 16, "{theirs} {len}");
            }
        }
    }

    #[test]
    fn retrieve_of_longer_chunks_ends_the_hits() {
        let sizes = ChunkSizes::new(CHUNK);
        assert_eq!(counted(&sizes, 1, 64), Some(4));
        assert!(!sizes.is_same(1, 1, 32));
        assert_eq!(counted(&sizes, 1, 96), None);
        assert_eq!(counted(&sizes, 1, 80), Some(1));
    }

    #[test]
    fn ends_of_another_chunk_size_are_served_nothing() {
        let sizes = ChunkSizes::new(CHUNK);
        assert_eq!(counted(&sizes, 1, 64), Some(4));
        assert_eq!(counted(&sizes, 1, 72), None);
        assert_eq!(counted(&sizes, 1, 64), None);
    }
}
