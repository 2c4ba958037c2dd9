//! Reproducible pseudo-random numbers.

/// SplitMix64 (Steele, Lea and Flood, 2014): the same seed gives the same sequence everywhere. Not for secrets.
#[derive(Debug, Clone)]
pub struct SplitMix64(u64);

/// Increment of the state per number.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

impl SplitMix64 {
    /// Returns the generator of a seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns number `index` of the sequence of `seed`.
    #[must_use]
    pub const fn nth(seed: u64, index: u64) -> u64 {
        let state = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(GAMMA));
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns the next number.
    pub const fn next(&mut self) -> u64 {
        let number = Self::nth(self.0, 0);
        self.0 = self.0.wrapping_add(GAMMA);
        number
    }

    /// Returns the next number modulo `limit`, which is nearly uniform for limits far below 2^64.
    ///
    /// # Panics
    /// If `limit` is 0.
    pub const fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Returns the next `len` random bytes.
    #[must_use]
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len.next_multiple_of(8)];
        for word in bytes.chunks_exact_mut(8) {
            word.copy_from_slice(&self.next().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }

    /// Returns a random one of `items`.
    ///
    /// # Panics
    /// If there are none.
    pub fn choose<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len() as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_is_that_of_the_reference() {
        // The first numbers of seed 0 by splitmix64.c (Vigna, public domain).
        let expected = [
            0xe220_a839_7b1d_cdaf,
            0x6e78_9e6a_a1b9_65f4,
            0x06c4_5d18_8009_454f,
        ];
        let mut random = SplitMix64::new(0);
        for (index, number) in (0..).zip(expected) {
            assert_eq!(random.next(), number);
            assert_eq!(SplitMix64::nth(0, index), number);
        }
    }
}
