//! Reproducible tokens and chunk bytes: from a seed, and from the prefix of a chunk.

use kvtier_core::random::SplitMix64;

/// Spreads a number over 64 bits.
pub(crate) fn mix(number: u64) -> u64 {
    SplitMix64::nth(number, 0)
}

/// Size of the vocabulary, that of Llama 3: half of its tokens take 5 bytes on the wire, half 3.
const VOCABULARY: u64 = 128_000;

/// Random tokens.
pub(crate) fn tokens(seed: u64, count: usize) -> Vec<u32> {
    (0..count as u64)
        .map(|index| (((mix(seed.wrapping_add(index)) >> 32) * VOCABULARY) >> 32) as u32)
        .collect()
}

/// Random choices: equal seeds, equal choices.
#[derive(Debug, Clone)]
pub(crate) struct Random(SplitMix64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        let mut numbers = SplitMix64::new(mix(seed));
        numbers.next();
        Self(numbers)
    }

    /// A number below `limit`, which must not be 0.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        // The high half is enough for every limit here, and has no visible bias.
        ((self.0.next() >> 32) * limit) >> 32
    }

    /// Appends between `least` and `most` tokens.
    pub(crate) fn push_tokens(&mut self, tokens: &mut Vec<u32>, least: u64, most: u64) {
        let count = least + self.below(most - least + 1);
        tokens.extend((0..count).map(|_| self.below(VOCABULARY) as u32));
    }
}

/// Seeds of a prompt's whole chunks, extended as the prompt grows. A seed depends on all tokens up to the chunk's end,
/// and on the tenant if there is one, so it identifies what the cache calls an object of that tenant.
#[derive(Debug, Clone)]
pub(crate) struct ChunkSeeds {
    chunk_tokens: usize,
    state: u64,
    seeds: Vec<u64>,
}

impl ChunkSeeds {
    /// Returns seeds that are equal for all tenants.
    pub(crate) fn new(chunk_tokens: usize) -> Self {
        Self {
            chunk_tokens,
            state: 0,
            seeds: Vec::new(),
        }
    }

    /// The seeds of one tenant.
    pub(crate) fn of_tenant(tenant: &str, chunk_tokens: usize) -> Self {
        let state = tenant.bytes().fold(0x6b76_7469_6572, |state, byte| {
            absorb(state, u64::from(byte))
        });
        Self {
            state: mix(state),
            ..Self::new(chunk_tokens)
        }
    }

    /// Adds the chunks that `tokens`, the prompt so far, completes.
    pub(crate) fn extend(&mut self, tokens: &[u32]) {
        let known = self.seeds.len() * self.chunk_tokens;
        for chunk in tokens[known..].chunks_exact(self.chunk_tokens) {
            let state = chunk
                .iter()
                .fold(self.state, |state, token| absorb(state, u64::from(*token)));
            self.state = mix(state);
            self.seeds.push(self.state);
        }
    }

    pub(crate) fn as_slice(&self) -> &[u64] {
        &self.seeds
    }
}

fn absorb(state: u64, value: u64) -> u64 {
    (state ^ value)
        .wrapping_mul(0x0000_0100_0000_01b3)
        .rotate_left(23)
}

/// The seeds of a prompt's whole chunks.
pub(crate) fn chunk_seeds(tokens: &[u32], chunk_tokens: usize) -> Vec<u64> {
    let mut seeds = ChunkSeeds::new(chunk_tokens);
    seeds.extend(tokens);
    seeds.seeds
}

/// The bytes of the chunk with this seed.
pub(crate) fn chunk(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fill(seed, &mut bytes);
    bytes
}

/// Writes the bytes of the chunk with this seed.
pub(crate) fn fill(seed: u64, bytes: &mut [u8]) {
    let mut words = bytes.chunks_exact_mut(8);
    let mut index = 0;
    for word in &mut words {
        word.copy_from_slice(&word_of(seed, index).to_le_bytes());
        index += 1;
    }
    let rest = words.into_remainder();
    let last = word_of(seed, index).to_le_bytes();
    rest.copy_from_slice(&last[..rest.len()]);
}

/// Whether these are the bytes of the chunk with this seed.
pub(crate) fn matches(seed: u64, bytes: &[u8]) -> bool {
    let words = bytes.chunks_exact(8);
    let rest = words.remainder();
    let last = word_of(seed, words.len() as u64).to_le_bytes();
    words
        .zip(0..)
        .all(|(word, index)| word == word_of(seed, index).to_le_bytes())
        && rest == &last[..rest.len()]
}

/// Compares consecutive chunks in `bytes` with their seeds; returns how many chunks are wrong.
pub(crate) fn mismatches(seeds: &[u64], bytes: &[u8]) -> usize {
    let len = bytes.len() / seeds.len().max(1);
    seeds
        .iter()
        .zip(bytes.chunks_exact(len.max(1)))
        .filter(|(seed, bytes)| !matches(**seed, bytes))
        .count()
}

/// Word `index` of a chunk: cheap, and different everywhere, so that swapped pieces do not match.
fn word_of(seed: u64, index: u64) -> u64 {
    let word = seed ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (word ^ (word >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_matches_only_itself() {
        for len in [0, 1, 8, 13, 4096] {
            let bytes = chunk(7, len);
            assert!(matches(7, &bytes));
            assert_eq!(matches(8, &bytes), len == 0);
        }
        let mut bytes = chunk(7, 4096);
        bytes[..2048].rotate_left(1024);
        assert!(!matches(7, &bytes));
    }

    #[test]
    fn seeds_depend_on_whole_prefix() {
        let tokens = tokens(1, 1024);
        let seeds = chunk_seeds(&tokens, 256);
        assert_eq!(seeds.len(), 4);
        let mut other = tokens.clone();
        other[0] ^= 1;
        let changed = chunk_seeds(&other, 256);
        assert!(seeds.iter().zip(&changed).all(|(a, b)| a != b));
        assert_eq!(chunk_seeds(&tokens[..512], 256), seeds[..2]);
        assert!(tokens.iter().all(|token| u64::from(*token) < VOCABULARY));
    }

    #[test]
    fn seeds_depend_on_tenant_and_grow_with_prompt() {
        let mut tokens = Vec::new();
        Random::new(1).push_tokens(&mut tokens, 1000, 1000);
        let seeds = |tenant, tokens: &[u32]| {
            let mut seeds = ChunkSeeds::of_tenant(tenant, 256);
            seeds.extend(&tokens[..300]);
            seeds.extend(tokens);
            seeds.as_slice().to_vec()
        };
        let blue = seeds("blue", &tokens);
        assert_eq!(blue.len(), 3);
        let differs = |other: Vec<u64>| blue.iter().zip(other).all(|(a, b)| *a != b);
        assert!(differs(seeds("green", &tokens)));
        assert!(differs(chunk_seeds(&tokens, 256)));
        tokens[0] ^= 1;
        assert!(differs(seeds("blue", &tokens)));
    }

    #[test]
    fn mismatches_are_counted_by_chunk() {
        let bytes = [chunk(1, 64), chunk(2, 64), chunk(3, 64)].concat();
        assert_eq!(mismatches(&[1, 2, 3], &bytes), 0);
        assert_eq!(mismatches(&[1, 7, 8], &bytes), 2);
    }
}
