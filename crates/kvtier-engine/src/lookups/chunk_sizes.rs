//! The chunk sizes of clients that asked a server which was here before.
//!
//! LMCache's adapters ask for the chunk size once, as the first request of their connection, and count hits in chunks of
//! that size for as long as they live. ZeroMQ reconnects them to a restarted server without their knowing, and they
//! would take one chunk of ours for one of theirs: more tokens than they asked for, and the engine dies.
//!
//! A reconnected client is served once no other size is possible. Possible are the sizes that servers of this instance have
//! [announced](ChunkSizes::announce), as the state directory keeps them, or all sizes if it does not. A size is out
//! if it does not divide the end of a lookup, which its client cuts down to whole chunks; if it is shorter than the rest that
//! was cut off; or if it is not a multiple of the blocks of the model's workers. Until then, and again if its lookups
//! stop to fit, a client finds nothing.
//!
//! No client of another size gets wrong KV:
//!
//! | client | why not |
//! | --- | --- |
//! | of this instance, of another announced size | that size is in the file, and has to be out |
//! | of another server, or one that ignores the announced size | it may be served until a lookup does not fit; then every client has to prove its size, and within a second [`FOREIGN`] is in the file |
//! | with a copied state directory | the file names the folder that it belongs to; every client has to prove its size |
//!
//! Such a client of another server counts hits wrongly, and that is all: prompts are hashed and copied in our chunks, by their
//! token ids; a retrieve of anything but whole chunks that its own lookup has found is refused, and the registration of a
//! worker that copies by itself names its chunk size. Clients up to 0.5.4 do neither notice a refused retrieve nor name the
//! size, so the file says nothing of them.
//!
//! The mutex guards the table; no other lock is acquired inside, and none is held while the file is written.

use std::collections::HashMap;
use std::num::NonZeroUsize;

use kvtier_common::state::StateDir;
use kvtier_common::sync::Mutex;

use super::super::instances::gcd;
use super::Caller;
use super::announced::{AnnouncedFile, FOREIGN};

/// Connections known at most. Forgetting them all costs each some lookups.
const MAX_CONNECTIONS: usize = 16_384;

/// Most announced sizes that are kept. With more, every size is possible.
const MAX_SIZES: usize = 64;

/// Lookups after which an unproven chunk size is logged as another one. Of random prompts, all but one client in a
/// million have proved theirs after 32.
const EXPECTED_LOOKUPS: u32 = 32;

#[derive(Debug, Default, Clone, Copy)]
struct Seen {
    /// Greatest common divisor of all ends, in tokens; 0 before the first.
    divisor: u64,
    /// Tokens between an end and its prompt's, the most of all lookups.
    longest_rest: u64,
    lookups: u32,
    is_logged: bool,
}

impl Seen {
    /// Whether the client may have this chunk size, in blocks of `block` tokens. (It may leave out a prompt's last token: its
    /// chunk size is at least the rest.)
    fn fits(&self, size: u64, block: u64) -> bool {
        self.divisor.is_multiple_of(size) && self.longest_rest <= size && size.is_multiple_of(block)
    }

    /// Whether no other size fits: the divisor itself does, and of its proper divisors into whole blocks the largest is
    /// shorter than the rest.
    fn proves(&self, own: u64, block: u64) -> bool {
        let blocks = own / block;
        let next = (2..=blocks).find(|part| blocks.is_multiple_of(*part));
        self.divisor == own && next.is_none_or(|part| self.longest_rest > own / part)
    }
}

/// A lookup of a prompt of `tokens` tokens up to `end`, for workers whose blocks are multiples of `block` tokens.
#[derive(Debug, Clone, Copy)]
pub struct LookupRange {
    pub tokens: u64,
    pub end: u64,
    pub block: u64,
}

#[derive(Default)]
struct ChunkSizeTable {
    by_connection: HashMap<u64, Seen>,
    /// Sizes that this instance has announced.
    announced: Vec<u64>,
    /// Whether they are all.
    is_complete: bool,
    /// Whether [`FOREIGN`] is one of them and not in the file yet.
    is_foreign_new: bool,
}

impl ChunkSizeTable {
    /// Whether the client that was seen so can only have the size `own`.
    fn proves(&self, caller: Caller, seen: &Seen, own: u64, block: u64) -> bool {
        if !self.is_complete || !caller.release.notices_failed_retrieves() {
            return seen.proves(own, block);
        }
        let mut announced = self.announced.iter();
        announced.all(|size| seen.fits(*size, block) == (*size == own))
    }

    /// What is to be noted for a size that is announced, if that is new.
    fn unknown(&self, size: u64) -> Option<u64> {
        let is_known = |size: u64| self.announced.contains(&size);
        let is_kept = is_known(size) || self.announced.len() < MAX_SIZES;
        let noted = if is_kept { size } else { FOREIGN };
        Some(noted).filter(|noted| !is_known(*noted))
    }

    /// Notes a size; returns whether it is new.
    fn insert(&mut self, size: u64) -> bool {
        let is_new = !self.announced.contains(&size);
        if is_new {
            self.announced.push(size);
            self.is_complete &= size != FOREIGN;
        }
        is_new
    }
}

/// What the lookups of reconnected clients show of their chunk sizes.
pub struct ChunkSizes {
    own: u64,
    /// `None` without a state directory.
    file: Option<AnnouncedFile>,
    table: Mutex<ChunkSizeTable>,
}

impl ChunkSizes {
    /// For a server of this chunk size, which it announces, and of the instance in this folder.
    pub fn new(own: NonZeroUsize, state: Option<&StateDir>) -> Self {
        let opened = state.and_then(|state| {
            let opened = AnnouncedFile::open(state);
            opened
                .inspect_err(|error| {
                    tracing::warn!(%error, "announced chunk sizes cannot be kept; after a restart clients have no hits until their lookups prove theirs");
                })
                .ok()
        });
        let (file, kept) = opened.unzip();
        let kept = kept.flatten();
        let sizes = Self {
            own: own.get() as u64,
            file,
            table: Mutex::new(ChunkSizeTable {
                by_connection: HashMap::new(),
                is_complete: kept.as_ref().is_some_and(|kept| !kept.contains(&FOREIGN)),
                announced: kept.unwrap_or_default(),
                is_foreign_new: false,
            }),
        };
        sizes.announce(sizes.own);
        sizes
    }

    /// Notes a chunk size that a client is about to learn from this server. A new one waits for the disk.
    pub fn announce(&self, size: u64) {
        let new = self.table.lock().unknown(size);
        if let Some(new) = new {
            // Known only once it is on disk: another client that learns of it at the same time would not wait.
            self.keep(Some(new));
            self.table.lock().insert(new);
        }
    }

    fn keep(&self, size: Option<u64>) {
        if let (Some(file), Some(size)) = (&self.file, size) {
            file.append(size);
        }
    }

    /// Writes to the file that a client of another server was seen, if that is new.
    pub fn keep_foreign(&self) {
        let is_new = std::mem::take(&mut self.table.lock().is_foreign_new);
        self.keep(is_new.then_some(FOREIGN));
    }

    /// Forgets a connection that has ended. A client that reconnects has another one, and proves its chunk size again.
    pub fn forget(&self, connection: u64) {
        self.table.lock().by_connection.remove(&connection);
    }

    /// Connections that are known.
    #[cfg(any(test, feature = "testing"))]
    pub fn len(&self) -> usize {
        self.table.lock().by_connection.len()
    }

    /// Whether the client of a lookup certainly counts in our chunks.
    pub fn is_proven(&self, caller: Caller, lookup: LookupRange) -> bool {
        if caller.knows_chunk_size {
            return true;
        }
        let LookupRange { tokens, end, block } = lookup;
        let (own, connection) = (self.own, caller.connection);
        let mut table = self.table.lock();
        let connections = &mut table.by_connection;
        if connections.len() >= MAX_CONNECTIONS && !connections.contains_key(&connection) {
            connections.clear();
        }
        let seen = connections.entry(connection).or_default();
        seen.divisor = gcd(seen.divisor, end);
        seen.longest_rest = seen.longest_rest.max(tokens.saturating_sub(end));
        seen.lookups = seen.lookups.saturating_add(1);
        let is_other = !seen.fits(own, block);
        let is_suspect = is_other || seen.lookups >= EXPECTED_LOOKUPS;
        let was_logged = seen.is_logged;
        let seen = *seen;
        let is_proven = table.proves(caller, &seen, own, block);
        if let Some(seen) = table.by_connection.get_mut(&connection) {
            seen.is_logged |= is_suspect && !is_proven;
        }
        let is_foreign = is_other && !table.announced.iter().any(|size| seen.fits(*size, block));
        if is_foreign && table.insert(FOREIGN) {
            // This may be the thread that serves all connections: it does not wait for the disk.
            table.is_foreign_new = true;
        }
        drop(table);
        if seen.lookups == 1 && !is_proven {
            tracing::info!(
                connection,
                chunk_size = own,
                "client reconnected without asking for the chunk size; it has no hits until its lookups prove it"
            );
        }
        if is_suspect && !is_proven && !was_logged {
            tracing::warn!(
                connection,
                chunk_size = own,
                ends_are_multiples_of = seen.divisor,
                "client seems to use the chunk size of an earlier server; it has no hits until its engine is restarted"
            );
        }
        is_proven
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

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
        is_proven_of(sizes, client(1, false), tokens, chunk)
    }

    fn is_proven_of(sizes: &ChunkSizes, caller: Caller, tokens: u64, chunk: u64) -> bool {
        let end = tokens / chunk * chunk;
        let block = 1;
        sizes.is_proven(caller, LookupRange { tokens, end, block })
    }

    /// A server of this chunk size, without a state directory.
    fn alone() -> ChunkSizes {
        ChunkSizes::new(CHUNK, None)
    }

    /// The server of an instance, once it has announced these sizes too; then it ends.
    fn announce(base: &Path, sizes: &[u64]) {
        let server = next(base);
        sizes.iter().for_each(|size| server.announce(*size));
    }

    /// The next server of that instance.
    fn next(base: &Path) -> ChunkSizes {
        ChunkSizes::new(CHUNK, Some(&StateDir::open(base, "a").unwrap()))
    }

    #[test]
    fn client_that_asked_is_proven() {
        for end in [7, 0, 64] {
            let range = LookupRange {
                tokens: 64,
                end,
                block: 1,
            };
            assert!(alone().is_proven(client(1, true), range));
        }
    }

    // proves: docs/clients.md#the-server-is-restarted-with-another-chunk-size
    #[test]
    fn unlike_prompts_prove_our_chunk_size() {
        let sizes = alone();
        assert!(!is_proven(&sizes, 0, 16));
        assert!(!is_proven(&sizes, 64, 16));
        assert!(!is_proven(&sizes, 64 + 9, 16));
        assert!(is_proven(&sizes, 48, 16));
        assert!(is_proven(&sizes, 1600, 16));
        let other = client(2, false);
        assert!(!is_proven_of(&sizes, other, 48, 16), "another connection");
    }

    // proves: docs/clients.md#the-server-is-restarted-with-another-chunk-size
    #[test]
    fn other_chunk_sizes_are_never_proven() {
        for theirs in [1, 2, 4, 8, 12, 15, 17, 24, 32, 48, 64, 256] {
            let sizes = alone();
            for tokens in (0..2000).chain([2048, 16, 32, 31]) {
                assert!(!is_proven(&sizes, tokens, theirs), "{theirs} {tokens}");
            }
        }
    }

    // proves: docs/clients.md#the-server-is-restarted-with-another-chunk-size
    #[test]
    fn end_that_does_not_fit_ends_the_proof() {
        let sizes = alone();
        assert!(is_proven(&sizes, 16 + 15, 16));
        assert!(!is_proven(&sizes, 24, 24));
        assert!(!is_proven(&sizes, 16 + 15, 16));
    }

    // proves: docs/clients.md#the-server-is-restarted-with-another-chunk-size
    #[test]
    fn blocks_of_workers_exclude_smaller_sizes() {
        // The sizes below 16 that divide 16 are 8, 4, 2 and 1.
        for (block, tokens, proves) in [
            (16, 16, true),
            (8, 24, false),
            (8, 25, true),
            (1, 24, false),
        ] {
            let range = LookupRange {
                tokens,
                end: 16,
                block,
            };
            let is_proven = alone().is_proven(client(1, false), range);
            assert_eq!(is_proven, proves, "{range:?}");
        }
    }

    // proves: docs/clients.md#the-server-is-restarted-with-another-chunk-size
    #[test]
    fn only_announced_size_needs_no_proof() {
        let base = tempfile::tempdir().unwrap();
        // Earlier servers may have announced any.
        assert!(!is_proven(&next(base.path()), 64, 16));
        let sizes = next(base.path());
        for _ in 0..3 {
            assert!(is_proven(&sizes, 64, 16));
        }
        // Of an older release nothing is known but what it proves.
        let older = Caller {
            release: Release::Before0_5_5,
            ..client(2, false)
        };
        assert!(!is_proven_of(&sizes, older, 64, 16));
    }

    // proves: docs/clients.md#the-server-is-restarted-with-another-chunk-size
    #[test]
    fn every_other_announced_size_has_to_be_excluded() {
        let base = tempfile::tempdir().unwrap();
        announce(base.path(), &[32, 24]);
        let sizes = next(base.path());
        assert!(!is_proven(&sizes, 96, 16), "16, 24 or 32");
        assert!(!is_proven(&sizes, 64, 16), "16 or 32");
        assert!(is_proven(&sizes, 80, 16));
        // They may be all excluded at once.
        assert!(is_proven_of(&sizes, client(2, false), 80, 16));
        // A client of another announced size is none of another server.
        assert!(!is_proven_of(&sizes, client(3, false), 24, 24));
        assert!(is_proven_of(&next(base.path()), client(2, false), 80, 16));
    }

    // proves: docs/clients.md#the-server-is-restarted-with-another-chunk-size
    #[test]
    fn client_of_another_server_ends_the_trust_in_the_file() {
        for (tokens, theirs) in [(40, 40), (31, 32)] {
            let base = tempfile::tempdir().unwrap();
            announce(base.path(), &[]);
            let sizes = next(base.path());
            assert!(is_proven(&sizes, 64, 16));
            assert!(!is_proven_of(&sizes, client(2, false), tokens, theirs));
            assert!(!is_proven(&sizes, 64, 16), "{theirs}");
            let file = base.path().join("a/chunk-sizes");
            let before = std::fs::read(&file).unwrap();
            assert!(!before.ends_with(b"\n0"), "a lookup writes nothing");
            sizes.keep_foreign();
            sizes.keep_foreign();
            assert_eq!(
                std::fs::read(&file).unwrap(),
                [&before[..], b"\n0"].concat()
            );
            let sizes = next(base.path());
            assert!(!is_proven(&sizes, 64, 16), "{theirs}");
            assert!(is_proven(&sizes, 31, 16), "by its lookups: {theirs}");
        }
    }

    // proves: docs/clients.md#the-server-is-restarted-with-another-chunk-size
    #[test]
    fn file_of_another_folder_or_damaged_says_nothing() {
        let [base, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let file = |base: &Path| base.join("a/chunk-sizes");
        for base in [base.path(), other.path()] {
            announce(base, &[]);
        }
        let content = std::fs::read(file(base.path())).unwrap();
        let long = [&content[..], &b"\n16".repeat(4096)].concat();
        let damaged = [&content[..9], &[&content[..], b"\nx"].concat(), &[], &long];
        let damaged = damaged.map(|content| (base.path(), content));
        for (base, found) in [(other.path(), &content[..])].iter().chain(&damaged) {
            std::fs::write(file(base), found).unwrap();
            for start in 1..=3 {
                assert!(!is_proven(&next(base), 64, 16), "{found:?}, {start}");
            }
        }
        // A line that a crash has cut off is a size more.
        std::fs::write(file(base.path()), [&content[..], b"\n3"].concat()).unwrap();
        announce(base.path(), &[32]);
        let sizes = next(base.path());
        assert!(!is_proven(&sizes, 96, 16));
        assert!(is_proven(&sizes, 80, 16));
    }

    #[test]
    fn more_announced_sizes_than_are_kept_exclude_none() {
        let base = tempfile::tempdir().unwrap();
        let all: Vec<_> = (1..=MAX_SIZES as u64).map(|size| size * 48).collect();
        announce(base.path(), &all);
        let sizes = next(base.path());
        assert!(!is_proven(&sizes, 64, 16));
        assert!(is_proven(&sizes, 31, 16));
        assert_eq!(sizes.table.lock().announced.len(), MAX_SIZES + 1);
    }
}
