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

fn absorb(state: u64, value: u64) -> u64 {
    (state ^ value)
        .wrapping_mul(0x0000_0100_0000_01b3)
        .rotate_left(23)
}

/// Seeds of a prompt's whole chunks. A seed depends on all tokens up to the chunk's end, and on the tenant if it has a name, so
/// it identifies what the cache calls an object of that tenant.
pub(crate) fn chunk_seeds(tenant: &str, tokens: &[u32], chunk_tokens: usize) -> Vec<u64> {
    let mut state = tenant
        .bytes()
        .fold(0, |state, byte| mix(absorb(state, u64::from(byte))));
    let seeds = tokens.chunks_exact(chunk_tokens).map(|chunk| {
        let tokens = chunk.iter().map(|token| u64::from(*token));
        state = mix(tokens.fold(state, absorb));
        state
    });
    seeds.collect()
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
    fn seeds_depend_on_whole_prefix_and_tenant() {
        let tokens = tokens(1, 1024);
        let seeds = chunk_seeds("", &tokens, 256);
        assert_eq!(seeds.len(), 4);
        let mut other = tokens.clone();
        other[0] ^= 1;
        let changed = chunk_seeds("", &other, 256);
        assert!(seeds.iter().zip(&changed).all(|(a, b)| a != b));
        assert_eq!(chunk_seeds("", &tokens[..600], 256), seeds[..2]);
        let blue = chunk_seeds("blue", &tokens, 256);
        for other in [&seeds, &chunk_seeds("green", &tokens, 256)] {
            assert!(blue.iter().zip(other).all(|(a, b)| a != b));
        }
        assert!(tokens.iter().all(|token| u64::from(*token) < VOCABULARY));
    }
}
