//! Failing loads by key and position, without randomness.

use blake2::digest::consts::U8;
use blake2::{Blake2b, Digest};
use kvtier_core::object_key::ObjectKey;

/// Resolution of a rate.
const PARTS: u64 = 1_000_000;

/// Pattern of failing loads: the same keys and positions as LMCache 0.5.6's `fault_inject`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Pattern {
    /// Fraction of all keys, from 0 to 1.
    pub rate: f64,
    /// Seed that chooses these keys.
    pub seed: i64,
    /// Positions in a load, from 0.
    pub gap_indices: Vec<i64>,
    /// Positions in a load by their distance from its end, from 0 (the last key) to 1 (the first one).
    pub gap_tail_ratios: Vec<f64>,
}

impl Pattern {
    /// Returns whether each key of a load fails, in order.
    pub fn failing<'a>(&self, keys: impl ExactSizeIterator<Item = &'a ObjectKey>) -> Vec<bool> {
        let mut failing = vec![false; keys.len()];
        let by_index = self
            .gap_indices
            .iter()
            .filter_map(|at| usize::try_from(*at).ok());
        let last = keys.len().saturating_sub(1) as f64;
        let by_ratio = self.gap_tail_ratios.iter();
        // Python's rounding: half to even.
        let by_ratio = by_ratio.map(|ratio| ((1.0 - ratio) * last).round_ties_even() as usize);
        for at in by_index.chain(by_ratio) {
            if let Some(fails) = failing.get_mut(at) {
                *fails = true;
            }
        }
        let below = (self.rate * PARTS as f64) as u64;
        if below > 0 {
            for (fails, key) in failing.iter_mut().zip(keys) {
                *fails |= part(self.seed, key) < below;
            }
        }
        failing
    }
}

/// The part that a key belongs to: the 64-bit BLAKE2b of seed and key as text, modulo [`PARTS`].
fn part(seed: i64, key: &ObjectKey) -> u64 {
    let hash = hex::encode(key.chunk_hash().0);
    let text = format!(
        "{seed}:{hash}:{}:{}:{}:{}",
        key.model_name(),
        key.kv_rank(),
        key.object_group_id(),
        key.cache_salt()
    );
    u64::from_be_bytes(Blake2b::<U8>::digest(text).into()) % PARTS
}

#[cfg(test)]
mod tests {
    use kvtier_core::ChunkHash;

    use super::*;

    fn key(byte: u8, model: &str, rank: u64, group: u32, salt: &str) -> ObjectKey {
        ObjectKey::new(ChunkHash([byte; 32]), model, rank, group, salt).unwrap()
    }

    #[test]
    fn keys_match_the_parts_of_lmcache() {
        // From Python: int.from_bytes(blake2b(text, digest_size=8).digest(), "big") % 1000000
        assert_eq!(
            part(0, &key(0, "org/model", 0x0201_0201, 0, "tenant")),
            612_680
        );
        assert_eq!(part(-7, &key(0xab, "m", 0x0100_0100, 3, "")), 612_832);
    }

    #[test]
    fn key_fails_below_the_rate_not_at_it() {
        let key = key(0, "org/model", 0x0201_0201, 0, "tenant");
        let fails = |rate| {
            let pattern = Pattern {
                rate,
                ..Pattern::default()
            };
            pattern.failing([&key].into_iter())[0]
        };
        assert!(!fails(0.0));
        assert!(!fails(0.612_680));
        assert!(fails(0.612_682));
        assert!(fails(1.0));
    }

    #[test]
    fn positions_are_those_of_lmcache() {
        let key = key(0, "m", 0, 0, "");
        // Ratio, keys of the load, position; from Python: round((1 - ratio) * (n - 1)).
        let cases = [
            (0.5, 2, 0),
            (0.5, 4, 2),
            (0.5, 6, 2),
            (0.0, 5, 4),
            (1.0, 5, 0),
            (0.25, 5, 3),
            (0.5, 1, 0),
        ];
        for (ratio, keys, at) in cases {
            let pattern = Pattern {
                gap_tail_ratios: vec![ratio],
                ..Pattern::default()
            };
            let failing = pattern.failing(vec![&key; keys].into_iter());
            let expected: Vec<_> = (0..keys).map(|other| other == at).collect();
            assert_eq!(failing, expected, "ratio {ratio} of {keys}");
        }
        let pattern = Pattern {
            gap_indices: vec![1, 3, i64::MAX],
            ..Pattern::default()
        };
        let failing = |keys| pattern.failing(vec![&key; keys].into_iter());
        assert_eq!(failing(4), [false, true, false, true]);
        assert_eq!(failing(2), [false, true]);
        let both = Pattern {
            gap_tail_ratios: vec![0.0, 1.0],
            ..pattern.clone()
        };
        assert!(both.failing(std::iter::empty()).is_empty());
    }
}
