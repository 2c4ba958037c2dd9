//! Conversations: a system prompt that all tenants share, then turns, each a question and an answer.

use kvtier_client::Prompt;

use crate::pattern::{ChunkSeeds, Random};

/// Tokens of the system prompt: no multiple of a chunk, as in practice.
const SYSTEM_TOKENS: u64 = 600;
/// Range of tokens of a question, and of an answer.
const QUESTION: (u64, u64) = (64, 512);
const ANSWER: (u64, u64) = (32, 256);

/// The system prompt of this seed.
pub(super) fn system_prompt(seed: u64) -> Vec<u32> {
    let mut tokens = Vec::new();
    Random::new(seed).push_tokens(&mut tokens, SYSTEM_TOKENS, SYSTEM_TOKENS);
    tokens
}

/// Whole chunks of the longest prompt after this number of turns.
pub(super) fn max_chunks(turns: u32, chunk_tokens: usize) -> usize {
    let tokens = SYSTEM_TOKENS + u64::from(turns) * (QUESTION.1 + ANSWER.1);
    tokens as usize / chunk_tokens
}

/// Whole chunks of the system prompt, which the conversations of one tenant share.
pub(super) fn shared_chunks(chunk_tokens: usize) -> usize {
    SYSTEM_TOKENS as usize / chunk_tokens
}

/// A tenant's conversation.
#[derive(Debug, Clone)]
pub(super) struct Conversation {
    random: Random,
    tokens: Vec<u32>,
    chunks: ChunkSeeds,
    /// Questions asked so far.
    pub(super) turns: u32,
}

impl Conversation {
    /// A new conversation of `tenant`; `seed` determines its tokens.
    pub(super) fn new(tenant: &str, system: &[u32], seed: u64, chunk_tokens: usize) -> Self {
        Self {
            random: Random::new(seed),
            tokens: system.to_vec(),
            chunks: ChunkSeeds::of_tenant(tenant, chunk_tokens),
            turns: 0,
        }
    }

    /// Adds a question; returns the prompt of the next request.
    pub(super) fn ask(&mut self) -> Prompt {
        self.random
            .push_tokens(&mut self.tokens, QUESTION.0, QUESTION.1);
        self.turns += 1;
        self.chunks.extend(&self.tokens);
        Prompt::new(&self.tokens)
    }

    /// Adds an answer; the next prompt repeats it.
    pub(super) fn answer(&mut self) {
        self.random
            .push_tokens(&mut self.tokens, ANSWER.0, ANSWER.1);
    }

    /// Seeds of the last prompt's whole chunks.
    pub(super) fn chunks(&self) -> &[u64] {
        self.chunks.as_slice()
    }

    /// The last prompt, and the seeds of its chunks for another tenant.
    pub(super) fn as_seen_by(&self, tenant: &str, chunk_tokens: usize) -> (Prompt, ChunkSeeds) {
        let whole = self.chunks().len() * chunk_tokens;
        let mut chunks = ChunkSeeds::of_tenant(tenant, chunk_tokens);
        chunks.extend(&self.tokens[..whole]);
        (Prompt::new(&self.tokens[..whole]), chunks)
    }
}
