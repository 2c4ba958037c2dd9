//! Tokens and bytes that can be made again: from a number, and from the prefix a chunk stands for.

/// Spreads a number over 64 bits (the finalizer of SplitMix64).
pub(crate) fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Size of the vocabulary tokens come from, that of Llama 3: half of them take 5 bytes on the wire, half 3.
const VOCABULARY: u64 = 128_000;

/// Random tokens.
pub(crate) fn tokens(seed: u64, count: usize) -> Vec<u32> {
    (0..count as u64)
        .map(|index| (((mix(seed.wrapping_add(index)) >> 32) * VOCABULARY) >> 32) as u32)
        .collect()
}

/// For each whole chunk of a prompt a number that depends on all tokens up to the chunk's end.
pub(crate) fn chunk_seeds(tokens: &[u32], chunk_tokens: usize) -> Vec<u64> {
    let mut seed = 0;
    tokens
        .chunks_exact(chunk_tokens)
        .map(|chunk| {
            for &token in chunk {
                seed = (seed ^ u64::from(token))
                    .wrapping_mul(0x0000_0100_0000_01b3)
                    .rotate_left(23);
            }
            seed = mix(seed);
            seed
        })
        .collect()
}

/// The bytes of the chunk with that number.
pub(crate) fn chunk(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fill(seed, &mut bytes);
    bytes
}

/// Writes the bytes of the chunk with that number.
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

/// Whether these are the bytes of the chunk with that number.
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
    fn a_chunk_matches_itself_only() {
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
    fn seeds_depend_on_the_whole_prefix() {
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
}
