//! Keys: a prompt, a scope, and a range of tokens.

use std::ops::Range;
use std::sync::Arc;

use kvtier_proto::chunk::CHUNK_TOKENS_FEATURE;
use kvtier_proto::key::{CacheKey, EncodedTokens, OBJECT_KEY_BYTES};
use kvtier_proto::key_settings::KeySettings;
use kvtier_proto::wire;

use crate::{ClientError, Connection};

/// A key over a [`Prompt`].
pub type Key<'a> = CacheKey<'a, EncodedTokens<'a>>;

/// A prompt, or objects by their keys, encoded once: requests only copy bytes. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Prompt {
    encoded: Arc<[u8]>,
    tokens: usize,
}

impl Prompt {
    /// Encodes a prompt.
    #[must_use]
    pub fn new(tokens: &[u32]) -> Self {
        let mut encoded = Vec::new();
        wire::write_tokens(&mut encoded, tokens);
        Self {
            encoded: encoded.into(),
            tokens: tokens.len(),
        }
    }

    /// Objects by their keys in place of a prompt, for servers with [`OBJECTS_FEATURE`](kvtier_proto::key::OBJECTS_FEATURE). Each
    /// stands for `chunk_tokens` tokens, which the scope has to name too.
    #[must_use]
    pub fn of_object_keys(keys: &[[u8; OBJECT_KEY_BYTES]], chunk_tokens: usize) -> Self {
        let mut encoded = Vec::new();
        wire::write_bin(&mut encoded, keys.as_flattened());
        Self {
            encoded: encoded.into(),
            tokens: keys.len() * chunk_tokens,
        }
    }

    /// The prompt followed by another one, both of token ids; nothing is encoded again.
    #[must_use]
    pub fn extended(&self, more: &Self) -> Self {
        let tokens = self.tokens + more.tokens;
        let mut encoded = Vec::with_capacity(self.encoded.len() + more.encoded.len());
        wire::write_array_len(&mut encoded, tokens);
        for part in [self, more] {
            let mut head = Vec::new();
            wire::write_array_len(&mut head, part.tokens);
            encoded.extend_from_slice(&part.encoded[head.len()..]);
        }
        Self {
            encoded: encoded.into(),
            tokens,
        }
    }

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens
    }

    /// Whether there is no token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    /// Tokens of the prompt, encoded for keys.
    #[must_use]
    pub fn encoded(&self) -> EncodedTokens<'_> {
        EncodedTokens(&self.encoded)
    }

    /// The range of the prompt's whole chunks, which a scheduler looks up.
    ///
    /// # Panics
    /// If `chunk_tokens` is 0.
    #[must_use]
    pub fn whole_chunks(&self, chunk_tokens: usize) -> Range<u64> {
        0..(self.tokens / chunk_tokens * chunk_tokens) as u64
    }
}

impl From<&[u32]> for Prompt {
    fn from(tokens: &[u32]) -> Self {
        Self::new(tokens)
    }
}

/// The part of keys that is the same for all requests of an engine: model, world, tenant and chunk size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scope {
    /// Model name; must not contain `@`.
    pub model_name: String,
    /// Number of workers that share the model's KV.
    pub world_size: u32,
    /// The tenant; empty for none. At most 128 characters, without `@`, `/`, `\` and NUL.
    pub cache_salt: String,
    /// Number of workers that read each object: 1, or several for MLA with tensor parallelism.
    pub num_kv_readers: i64,
    /// Tokens per chunk; none for the server's default. Only for servers with [`CHUNK_TOKENS_FEATURE`]: others skip the field,
    /// and would keep chunks of one size under hashes of another. Workers register only with those.
    pub chunk_tokens: Option<u32>,
    /// Settings in each key ([`KeySettings::encode`]).
    pub settings: Option<Arc<[u8]>>,
}

impl Scope {
    /// One worker, one reader, no tenant.
    #[must_use]
    pub fn new(model_name: impl Into<String>) -> Self {
        Self {
            model_name: model_name.into(),
            world_size: 1,
            cache_salt: String::new(),
            num_kv_readers: 1,
            chunk_tokens: None,
            settings: None,
        }
    }

    /// Returns the scope with this tenant.
    #[must_use]
    pub fn with_salt(mut self, salt: impl Into<String>) -> Self {
        self.cache_salt = salt.into();
        self
    }

    /// Returns the scope with these settings in each key.
    #[must_use]
    pub fn with_settings(mut self, settings: KeySettings<'_>) -> Self {
        self.settings = settings.encode().map(Arc::from);
        self
    }

    /// Tokens per chunk, with a server that has them.
    pub(crate) fn agree(&self, connection: &mut Connection) -> Result<usize, ClientError> {
        let Some(named) = self.chunk_tokens else {
            return connection.get_chunk_size();
        };
        let features = connection.get_experimental()?;
        if !features.iter().any(|known| known == CHUNK_TOKENS_FEATURE) {
            return Err(ClientError::Argument {
                field: "chunk_tokens",
                message: format!(
                    "{named}; this server has chunks of one size, none is to be named"
                ),
            });
        }
        Ok(named as usize)
    }

    /// A scheduler's key, which means all workers. `range` is in tokens from the prompt's start.
    #[must_use]
    pub fn scheduler_key<'a>(
        &'a self,
        prompt: &'a Prompt,
        range: Range<u64>,
        request_id: &'a str,
    ) -> Key<'a> {
        self.key(None, prompt, range, request_id)
    }

    /// The key of one worker. `range` is in tokens from the prompt's start.
    #[must_use]
    pub fn worker_key<'a>(
        &'a self,
        worker_id: u32,
        prompt: &'a Prompt,
        range: Range<u64>,
        request_id: &'a str,
    ) -> Key<'a> {
        self.key(Some(worker_id), prompt, range, request_id)
    }

    fn key<'a>(
        &'a self,
        worker_id: Option<u32>,
        prompt: &'a Prompt,
        range: Range<u64>,
        request_id: &'a str,
    ) -> Key<'a> {
        CacheKey {
            model_name: &self.model_name,
            world_size: self.world_size,
            worker_id,
            chunk_tokens: self.chunk_tokens,
            tokens: prompt.encoded(),
            start: range.start,
            end: range.end,
            request_id,
            cache_salt: &self.cache_salt,
            request_configs: self.settings.as_deref(),
            num_kv_readers: Some(self.num_kv_readers),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extended_prompt_equals_whole_prompt() {
        let tokens: Vec<u32> = (0..70_000).map(|token| token * 3).collect();
        for at in [0, 7, 15, 16, 65_535, 65_536, 70_000] {
            for end in [at, at + 1, at + 9, 70_000].map(|end| end.min(tokens.len())) {
                let extended = Prompt::new(&tokens[..at]).extended(&Prompt::new(&tokens[at..end]));
                let whole = Prompt::new(&tokens[..end]);
                assert_eq!(extended.len(), end);
                assert!(extended.encoded == whole.encoded, "{at} to {end}");
            }
        }
    }
}
