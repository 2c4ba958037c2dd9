//! What conversations are made of: tokens from a seed, and chunk numbers from the tenant and the whole prefix.

use crate::pattern::mix;

/// Tokens are drawn from a vocabulary of this size, that of Llama 3.
const VOCABULARY: u64 = 128_000;

/// A stream of pseudo-random numbers (SplitMix64): equal seeds, equal streams.
#[derive(Debug, Clone)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    /// A number below `limit`, which must not be 0.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        // The high half is enough for every limit here, and has no bias that could be seen.
        ((mix(self.0) >> 32) * limit) >> 32
    }

    /// Appends between `least` and `most` tokens.
    pub(super) fn say(&mut self, tokens: &mut Vec<u32>, least: u64, most: u64) {
        let count = least + self.below(most - least + 1);
        tokens.extend((0..count).map(|_| self.below(VOCABULARY) as u32));
    }
}

/// Numbers of a conversation's whole chunks, kept up as it grows. A number depends on the tenant and on all tokens up
/// to the chunk's end, so it stands for what the cache calls an object of that tenant.
#[derive(Debug, Clone)]
pub(super) struct ChunkNumbers {
    chunk_tokens: usize,
    state: u64,
    numbers: Vec<u64>,
}

impl ChunkNumbers {
    pub(super) fn new(tenant: &str, chunk_tokens: usize) -> Self {
        let state = tenant.bytes().fold(0x6b76_7469_6572, |state, byte| {
            absorb(state, u64::from(byte))
        });
        Self {
            chunk_tokens,
            state: mix(state),
            numbers: Vec::new(),
        }
    }

    /// Takes in the chunks that have become whole.
    pub(super) fn follow(&mut self, tokens: &[u32]) {
        let known = self.numbers.len() * self.chunk_tokens;
        for chunk in tokens[known..].chunks_exact(self.chunk_tokens) {
            self.state = mix(chunk
                .iter()
                .fold(self.state, |state, token| absorb(state, u64::from(*token))));
            self.numbers.push(self.state);
        }
    }

    pub(super) fn as_slice(&self) -> &[u64] {
        &self.numbers
    }
}

fn absorb(state: u64, value: u64) -> u64 {
    (state ^ value)
        .wrapping_mul(0x0000_0100_0000_01b3)
        .rotate_left(23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_depend_on_the_tenant_and_the_whole_prefix() {
        let mut tokens = Vec::new();
        Random::new(1).say(&mut tokens, 1000, 1000);
        let numbers = |tenant, tokens: &[u32]| {
            let mut numbers = ChunkNumbers::new(tenant, 256);
            numbers.follow(&tokens[..300]);
            numbers.follow(tokens);
            numbers.as_slice().to_vec()
        };
        let ours = numbers("blue", &tokens);
        assert_eq!(ours.len(), 3);
        assert!(
            ours.iter()
                .zip(numbers("green", &tokens))
                .all(|(a, b)| *a != b)
        );
        tokens[0] ^= 1;
        assert!(
            ours.iter()
                .zip(numbers("blue", &tokens))
                .all(|(a, b)| *a != b)
        );
    }
}
