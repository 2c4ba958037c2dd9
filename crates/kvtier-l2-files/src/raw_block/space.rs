//! Free space of a device: which pieces no object has.

use std::collections::{BTreeMap, BTreeSet};

/// Free pieces, by place and by length.
#[derive(Debug, Default)]
pub(super) struct Space {
    by_place: BTreeMap<u64, u64>,
    by_len: BTreeSet<(u64, u64)>,
    free: u64,
}

impl Space {
    /// Returns space of `bytes` bytes, all free.
    pub(super) fn new(bytes: u64) -> Self {
        let mut space = Self::default();
        space.insert(0, bytes);
        space
    }

    /// Free bytes.
    pub(super) fn free(&self) -> u64 {
        self.free
    }

    /// Takes a piece: of the smallest that are large enough, the first.
    pub(super) fn take(&mut self, len: u64) -> Option<u64> {
        let (whole, at) = *self.by_len.range((len, 0)..).next()?;
        self.remove(at, whole);
        self.insert(at + len, whole - len);
        Some(at)
    }

    /// Takes this piece. Returns `false` if not all of it is free.
    pub(super) fn take_at(&mut self, at: u64, len: u64) -> bool {
        let Some((&start, &whole)) = self.by_place.range(..=at).next_back() else {
            return false;
        };
        let (before, Some(after)) = (at - start, (start + whole).checked_sub(at + len)) else {
            return false;
        };
        self.remove(start, whole);
        self.insert(start, before);
        self.insert(at + len, after);
        true
    }

    /// Frees a piece.
    pub(super) fn put(&mut self, mut at: u64, mut len: u64) {
        if let Some((&before, &its)) = self.by_place.range(..at).next_back()
            && before + its == at
        {
            self.remove(before, its);
            (at, len) = (before, its + len);
        }
        if let Some(&its) = self.by_place.get(&(at + len)) {
            self.remove(at + len, its);
            len += its;
        }
        self.insert(at, len);
    }

    fn insert(&mut self, at: u64, len: u64) {
        if len > 0 {
            self.by_place.insert(at, len);
            self.by_len.insert((len, at));
            self.free += len;
        }
    }

    fn remove(&mut self, at: u64, len: u64) {
        self.by_place.remove(&at);
        self.by_len.remove(&(len, at));
        self.free -= len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn pieces_never_overlap_and_none_is_lost(
            steps in proptest::collection::vec((0..3_u8, 0..64_u64, 1..12_u64), 1..200)
        ) {
            let mut space = Space::new(64);
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (step, at, len) in steps {
                let is_free = |at: u64, len: u64| {
                    at + len <= 64 && taken.iter().all(|(start, its)| at + len <= *start || start + its <= at)
                };
                match step {
                    0 => {
                        let place = space.take(len);
                        let fits = (0..64).any(|at| is_free(at, len));
                        proptest::prop_assert_eq!(place.is_some(), fits);
                        if let Some(place) = place {
                            proptest::prop_assert!(is_free(place, len));
                            taken.push((place, len));
                        }
                    }
                    1 => {
                        let expected = is_free(at, len);
                        proptest::prop_assert_eq!(space.take_at(at, len), expected);
                        if expected {
                            taken.push((at, len));
                        }
                    }
                    _ if !taken.is_empty() => {
                        let (at, len) = taken.swap_remove(at as usize % taken.len());
                        space.put(at, len);
                    }
                    _ => {}
                }
                proptest::prop_assert_eq!(space.free(), 64 - taken.iter().map(|(_, len)| len).sum::<u64>());
            }
        }
    }
}
