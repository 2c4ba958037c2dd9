//! The chunk size on which a client and its servers agree.
//!
//! Lengths are sent in chunks, so the same numbers mean other lengths to a server with another chunk size.

use std::sync::atomic::{AtomicU64, Ordering};

/// Chunk sizes that an engine can work with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkTerms {
    /// Tokens per block of the engine; a chunk is a multiple of it.
    pub block_tokens: u64,
    /// Tokens per chunk. None: the chunk size of the first usable server.
    pub chunk_tokens: Option<u64>,
}

/// The chunk size in use.
#[derive(Debug)]
pub(super) struct Agreement {
    terms: Option<ChunkTerms>,
    /// 0 while unknown.
    chunk_tokens: AtomicU64,
}

impl Agreement {
    pub(super) fn new(terms: Option<ChunkTerms>) -> Self {
        let chunk_tokens = terms.and_then(|terms| terms.chunk_tokens).unwrap_or(0);
        Self {
            terms,
            chunk_tokens: AtomicU64::new(chunk_tokens),
        }
    }

    /// Whether a server is asked for its chunk size before it is used.
    pub(super) fn is_wanted(&self) -> bool {
        self.terms.is_some()
    }

    pub(super) fn chunk_tokens(&self) -> Option<u64> {
        Some(self.chunk_tokens.load(Ordering::Relaxed)).filter(|tokens| *tokens > 0)
    }

    /// Accepts a server's chunk size, or returns why it cannot be used. The first one accepted stays.
    ///
    /// # Errors
    /// Why a server with this chunk size cannot be used, and what to do.
    pub(super) fn accept(&self, endpoint: &str, offered: u64) -> Result<(), String> {
        let block = self.terms.map_or(1, |terms| terms.block_tokens.max(1));
        match self.chunk_tokens() {
            Some(agreed) if agreed != offered => Err(format!(
                "the server at {endpoint} has chunks of {offered} tokens and this engine works with chunks of {agreed}: start the \
                 server with --chunk-size {agreed}, or restart the engine"
            )),
            _ if !offered.is_multiple_of(block) => Err(format!(
                "the engine's block of {block} tokens does not divide the server's chunk of {offered} tokens: start the server with \
                 --chunk-size set to a multiple of the block size, or the engine with another --block-size"
            )),
            _ => {
                self.chunk_tokens.store(offered, Ordering::Relaxed);
                Ok(())
            }
        }
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

    #[test]
    fn first_chunk_size_is_kept_and_others_refused() {
        let agreement = agreement(16, None);
        assert_eq!(agreement.chunk_tokens(), None);
        assert!(agreement.accept("a", 24).is_err());
        assert_eq!(agreement.chunk_tokens(), None);
        assert_eq!(agreement.accept("a", 256), Ok(()));
        let error = agreement.accept("b", 128).unwrap_err();
        assert!(error.contains("chunks of 128 tokens and this engine works with chunks of 256"));
        assert_eq!(agreement.accept("b", 256), Ok(()));
        assert_eq!(agreement.chunk_tokens(), Some(256));
    }

    #[test]
    fn required_chunk_size_is_known_before_any_server() {
        let agreement = agreement(16, Some(64));
        assert_eq!(agreement.chunk_tokens(), Some(64));
        assert!(agreement.accept("a", 128).is_err());
    }
}
