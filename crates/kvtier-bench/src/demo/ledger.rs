//! Bounds of what the cache holds: chunks it may have, and chunks it must have.

use std::collections::HashSet;
use std::sync::Mutex;

/// Seeds of the chunks whose store was started, and of those whose store was answered.
///
/// A hit beyond the started ones is another tenant's data, or none; while nothing is evicted, a hit short of the answered
/// ones is lost data. Each mutex guards its set.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    started: Mutex<HashSet<u64>>,
    stored: Mutex<HashSet<u64>>,
}

impl Ledger {
    /// A store of these chunks is about to be sent.
    pub(super) fn start(&self, chunks: &[u64]) {
        add(&self.started, chunks);
    }

    /// Notes that a store was answered: from now on it can be retrieved.
    pub(super) fn stored(&self, chunks: &[u64]) {
        add(&self.stored, chunks);
    }

    /// The longest prefix that a lookup which was answered by now may find.
    pub(super) fn most(&self, chunks: &[u64]) -> usize {
        prefix(&self.started, chunks)
    }

    /// The shortest prefix that a lookup which is sent from now on must find, while nothing is evicted.
    pub(super) fn least(&self, chunks: &[u64]) -> usize {
        prefix(&self.stored, chunks)
    }

    /// The cache was cleared.
    pub(super) fn clear(&self) {
        lock(&self.started).clear();
        lock(&self.stored).clear();
    }
}

fn lock(set: &Mutex<HashSet<u64>>) -> std::sync::MutexGuard<'_, HashSet<u64>> {
    // A panic elsewhere fails the demo anyway; a set is never half changed.
    set.lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn add(set: &Mutex<HashSet<u64>>, chunks: &[u64]) {
    lock(set).extend(chunks);
}

fn prefix(set: &Mutex<HashSet<u64>>, chunks: &[u64]) -> usize {
    let set = lock(set);
    chunks
        .iter()
        .take_while(|chunk| set.contains(chunk))
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_prefixes() {
        let ledger = Ledger::default();
        ledger.start(&[1, 2, 4]);
        ledger.stored(&[1, 4]);
        assert_eq!(
            (ledger.most(&[1, 2, 3, 4]), ledger.least(&[1, 2, 3, 4])),
            (2, 1)
        );
        ledger.clear();
        assert_eq!((ledger.most(&[1]), ledger.least(&[1])), (0, 0));
    }
}
