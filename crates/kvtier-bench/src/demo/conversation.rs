//! Conversations: a system prompt that all tenants share, then turns, each a question and an answer.

use kvtier_core::random::SplitMix64;

use crate::engine::PromptJob;
use crate::pattern;

/// Tokens of the system prompt: no multiple of a chunk, as in practice.
const SYSTEM_TOKENS: usize = 600;
/// Range of tokens of a question, and of an answer.
const QUESTION: (u64, u64) = (64, 512);
const ANSWER: (u64, u64) = (32, 256);

/// Whole chunks of the longest prompt after this number of turns.
pub(super) fn max_chunks(turns: u32, chunk_tokens: usize) -> usize {
    (SYSTEM_TOKENS + turns as usize * (QUESTION.1 + ANSWER.1) as usize) / chunk_tokens
}

/// Whole chunks of the system prompt, which the conversations of one tenant share.
pub(super) fn shared_chunks(chunk_tokens: usize) -> usize {
    SYSTEM_TOKENS / chunk_tokens
}

/// A conversation, which any tenant may have.
pub(super) struct Conversation {
    tokens: Vec<u32>,
    /// Ends of the prompts, one per turn.
    ends: Vec<usize>,
    /// The next turn.
    pub(super) turn: usize,
}

impl Conversation {
    /// A new conversation. Those of one `seed` have the same system prompt, and differ by their number.
    pub(super) fn new(seed: u64, number: u64, turns: u32) -> Self {
        let mut random = SplitMix64::new(pattern::mix(seed) ^ number);
        let mut end = SYSTEM_TOKENS;
        let mut part = |(least, most): (u64, u64)| {
            end += (least + random.below(most - least + 1)) as usize;
            end
        };
        let turns = (0..turns).map(|_| (part(QUESTION), part(ANSWER)));
        let ends = turns.map(|(question, _)| question).collect();
        let mut tokens = pattern::tokens(pattern::mix(seed), SYSTEM_TOKENS);
        tokens.extend(pattern::tokens(random.next(), end - SYSTEM_TOKENS));
        Self {
            tokens,
            ends,
            turn: 0,
        }
    }

    /// The request of a turn: the whole conversation up to its question. None after the last turn.
    pub(super) fn job(&self, tenant: &str, turn: usize, chunk_tokens: usize) -> Option<PromptJob> {
        let tokens = &self.tokens[..*self.ends.get(turn)?];
        Some(PromptJob::new(tenant, tokens, chunk_tokens))
    }
}
