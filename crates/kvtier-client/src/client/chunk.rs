//! The chunk size on which a client and its servers agree.
//!
//! Lengths are sent in chunks, so the same numbers mean other lengths to a server with another chunk size. A server that
//! reads a named size ([`CHUNK_TOKENS_FEATURE`]) serves any; another one serves its own.

use std::sync::atomic::{AtomicU64, Ordering};

use kvtier_common::error::{Error, Result};
use kvtier_proto::chunk::{self, CHUNK_TOKENS_FEATURE, MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS};

/// Fewest tokens of a chunk that an engine asks for by itself, which is also the servers' usual default.
const MIN_OWN_TOKENS: u64 = 256;

/// Chunk sizes that an engine can work with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkTerms {
    /// Tokens per block of the engine; a chunk is a multiple of it.
    pub block_tokens: u64,
    /// Tokens per chunk. None: the default of the first usable server if it is a multiple of the block, else the smallest
    /// multiple of at least 256 tokens.
    pub chunk_tokens: Option<u64>,
}

/// The answers of a server on which an agreement depends.
#[derive(Debug)]
pub(super) struct Offer<'a> {
    pub endpoint: &'a str,
    /// Number of the connection on which it answered.
    pub connection: u64,
    /// The server's default.
    pub chunk_tokens: u64,
    /// Names of its optional features.
    pub features: &'a [String],
}

impl Offer<'_> {
    fn has(&self, feature: &str) -> bool {
        self.features.iter().any(|known| known == feature)
    }
}

/// The chunk size in use.
#[derive(Debug)]
pub(super) struct Agreement {
    terms: Option<ChunkTerms>,
    /// 0 while unknown.
    chunk_tokens: AtomicU64,
    /// Number of the last connection to a server that reads a named size; 0 for none.
    read_on: AtomicU64,
}

impl Agreement {
    pub(super) fn new(terms: Option<ChunkTerms>) -> Self {
        let chunk_tokens = terms.and_then(|terms| terms.chunk_tokens).unwrap_or(0);
        Self {
            terms,
            chunk_tokens: AtomicU64::new(chunk_tokens),
            read_on: AtomicU64::new(0),
        }
    }

    /// Whether a server is asked for its chunk size before it is used.
    pub(super) fn is_wanted(&self) -> bool {
        self.terms.is_some()
    }

    pub(super) fn chunk_tokens(&self) -> Option<u64> {
        Some(self.chunk_tokens.load(Ordering::Relaxed)).filter(|tokens| *tokens > 0)
    }

    /// The size that is named to the server of this connection; none if that server was not asked, or has only its own.
    pub(super) fn named_chunk_tokens(&self, connection: u64) -> Option<u32> {
        let is_read = self.read_on.load(Ordering::Relaxed) == connection;
        self.chunk_tokens()
            .filter(|_| is_read && connection > 0)
            .and_then(chunk::allowed)
    }

    /// Accepts a server, or returns why it cannot be used. The first chunk size that is agreed on stays.
    ///
    /// # Errors
    /// Why the server cannot be used, and what to do.
    pub(super) fn accept(&self, offer: &Offer<'_>) -> Result<()> {
        let block = self.terms.map_or(1, |terms| terms.block_tokens.max(1));
        let (endpoint, default) = (offer.endpoint, offer.chunk_tokens);
        let is_read = offer.has(CHUNK_TOKENS_FEATURE);
        let chunk_tokens = match self.chunk_tokens() {
            Some(agreed) => agreed,
            None if default.is_multiple_of(block) || !is_read => default,
            None => block.saturating_mul(MIN_OWN_TOKENS.div_ceil(block)),
        };
        if !chunk_tokens.is_multiple_of(block) {
            return Err(Error::refused(format_args!(
                "the engine's block of {block} tokens does not divide the server's chunk of {chunk_tokens} tokens: start the \
                 server at {endpoint} with --chunk-size set to a multiple of the block size, or the engine with another --block-size"
            )));
        }
        if chunk_tokens != default && !is_read {
            return Err(Error::refused(format_args!(
                "the server at {endpoint} has chunks of {default} tokens and this engine works with chunks of {chunk_tokens}: \
                 start the server with --chunk-size {chunk_tokens}, use one that has {CHUNK_TOKENS_FEATURE}, or restart the engine"
            )));
        }
        if chunk_tokens != default && chunk::allowed(chunk_tokens).is_none() {
            return Err(Error::refused(format_args!(
                "this engine works with chunks of {chunk_tokens} tokens, its block has {block}; a server serves {MIN_CHUNK_TOKENS} \
                 to {MAX_CHUNK_TOKENS}: start the engine with another --block-size"
            )));
        }
        self.chunk_tokens.store(chunk_tokens, Ordering::Relaxed);
        let read_on = if is_read { offer.connection } else { 0 };
        self.read_on.store(read_on, Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agreement(block_tokens: u64, chunk_tokens: Option<u64>) -> Agreement {
        Agreement::new(Some(ChunkTerms {
            block_tokens,
            chunk_tokens,
        }))
    }

    /// An answer on the connection of this number.
    fn offered(
        agreement: &Agreement,
        connection: u64,
        default: u64,
        features: &[&str],
    ) -> Result<()> {
        let features: Vec<_> = features.iter().map(|&name| name.to_owned()).collect();
        agreement.accept(&Offer {
            endpoint: "a",
            connection,
            chunk_tokens: default,
            features: &features,
        })
    }

    const OLD: &[&str] = &["kvtier.held_blocks.1"];
    const NEW: &[&str] = &["kvtier.held_blocks.1", CHUNK_TOKENS_FEATURE];

    #[test]
    fn first_chunk_size_is_kept_and_others_refused() {
        let agreement = agreement(16, None);
        assert_eq!(agreement.chunk_tokens(), None);
        let error = offered(&agreement, 1, 24, OLD).unwrap_err().to_string();
        assert!(error.contains("block of 16 tokens does not divide the server's chunk of 24"));
        assert_eq!(agreement.chunk_tokens(), None);
        assert_eq!(offered(&agreement, 2, 256, OLD), Ok(()));
        let error = offered(&agreement, 3, 128, OLD).unwrap_err().to_string();
        assert!(error.contains("chunks of 128 tokens and this engine works with chunks of 256"));
        assert_eq!(offered(&agreement, 4, 256, OLD), Ok(()));
        assert_eq!(agreement.chunk_tokens(), Some(256));
        assert_eq!(agreement.named_chunk_tokens(4), None);
    }

    #[test]
    fn required_chunk_size_is_known_before_any_server() {
        let agreement = agreement(16, Some(64));
        assert_eq!(agreement.chunk_tokens(), Some(64));
        assert!(offered(&agreement, 1, 128, OLD).is_err());
        assert_eq!(offered(&agreement, 2, 128, NEW), Ok(()));
        assert_eq!(agreement.named_chunk_tokens(2), Some(64));
    }

    #[test]
    fn size_is_named_only_on_connection_to_server_that_reads_it() {
        let agreement = agreement(16, None);
        assert_eq!(agreement.named_chunk_tokens(0), None);
        assert_eq!(offered(&agreement, 1, 256, NEW), Ok(()));
        assert_eq!(agreement.named_chunk_tokens(1), Some(256));
        assert_eq!(agreement.named_chunk_tokens(2), None, "not asked yet");
        assert_eq!(offered(&agreement, 2, 512, NEW), Ok(()));
        assert_eq!(agreement.named_chunk_tokens(2), Some(256));
        assert!(offered(&agreement, 3, 512, OLD).is_err());
        assert_eq!(agreement.named_chunk_tokens(3), None);
        assert_eq!(offered(&agreement, 4, 256, OLD), Ok(()));
        assert_eq!(agreement.named_chunk_tokens(4), None);
    }

    #[test]
    fn engine_asks_for_multiple_of_its_block() {
        for (block, default, expected) in [
            (16, 256, 256),
            (16, 24, 256),
            (12, 16, 264),
            (96, 256, 288),
            (1568, 256, 1568),
            (65_536, 256, 65_536),
            // What a server has it may offer, too small to be named.
            (4, 8, 8),
        ] {
            let agreement = agreement(block, None);
            assert_eq!(offered(&agreement, 1, default, NEW), Ok(()), "{block}");
            assert_eq!(agreement.chunk_tokens(), Some(expected), "{block}");
            let named = (expected >= 16).then_some(expected as u32);
            assert_eq!(agreement.named_chunk_tokens(1), named, "{block}");
        }
    }

    #[test]
    fn sizes_that_no_server_takes_are_refused_with_bounds() {
        for terms in [agreement(70_000, None), agreement(4, Some(8))] {
            let error = offered(&terms, 1, 256, NEW).unwrap_err().to_string();
            assert!(error.contains("16 to 65536"), "{error}");
            assert_eq!(terms.named_chunk_tokens(1), None);
        }
    }
}
