//! Bytes that may be held at once, and their holders.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A number of bytes that may be held at once, perhaps as a share of a larger one.
pub struct Budget {
    limit: u64,
    held: AtomicU64,
    whole: Option<Arc<Budget>>,
}

impl Budget {
    /// Budget of `limit` bytes.
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self {
            limit,
            held: AtomicU64::new(0),
            whole: None,
        })
    }

    /// What one of several holders may have of this one. What it holds counts in both.
    pub fn share(self: &Arc<Self>, limit: u64) -> Arc<Self> {
        Arc::new(Self {
            limit,
            held: AtomicU64::new(0),
            whole: Some(Arc::clone(self)),
        })
    }

    /// Limit in bytes.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Takes `bytes`, if that many are free.
    pub fn take(self: &Arc<Self>, bytes: u64) -> Option<Charge> {
        self.try_add(bytes).then(|| Charge {
            budget: Arc::clone(self),
            bytes,
        })
    }

    /// Takes bytes that are there already, beyond the limit if need be. To be asked for [`Budget::is_full`] before they are made.
    pub fn take_anyway(self: &Arc<Self>, bytes: u64) -> Charge {
        self.add(bytes);
        Charge {
            budget: Arc::clone(self),
            bytes,
        }
    }

    /// Whether no byte is free.
    pub fn is_full(&self) -> bool {
        self.held.load(Ordering::Relaxed) >= self.limit
            || self.whole.as_ref().is_some_and(|whole| whole.is_full())
    }

    fn try_add(&self, bytes: u64) -> bool {
        // Relaxed, here and below: the numbers guard no other memory.
        let fits = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= self.limit);
        let added = self
            .held
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
            .is_ok();
        if added
            && self
                .whole
                .as_ref()
                .is_some_and(|whole| !whole.try_add(bytes))
        {
            self.held.fetch_sub(bytes, Ordering::Relaxed);
            return false;
        }
        added
    }

    fn add(&self, bytes: u64) {
        self.held.fetch_add(bytes, Ordering::Relaxed);
        if let Some(whole) = &self.whole {
            whole.add(bytes);
        }
    }

    fn sub(&self, bytes: u64) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(whole) = &self.whole {
            whole.sub(bytes);
        }
    }
}

/// Bytes taken from a budget; dropping it gives them back.
pub struct Charge {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.sub(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_is_given_back_once() {
        let budget = Budget::new(100);
        let first = budget.take(60).unwrap();
        assert!(budget.take(41).is_none());
        let second = budget.take(40).unwrap();
        assert!(budget.is_full());
        drop(first);
        assert!(!budget.is_full() && budget.take(61).is_none());
        drop(second);
        assert!(budget.take(u64::MAX).is_none() && budget.take(100).is_some());
    }

    #[test]
    fn shares_are_bounded_by_themselves_and_by_the_whole() {
        let whole = Budget::new(100);
        let shares = [60, 60].map(|limit| whole.share(limit));
        assert!(shares[0].take(61).is_none());
        let first = shares[0].take(60).unwrap();
        assert!(shares[1].take(41).is_none(), "the whole is full");
        let second = shares[1].take(40).unwrap();
        assert!(shares[1].is_full() && whole.is_full());
        drop((first, second));
        // What was refused took nothing.
        assert!(shares[1].take(60).is_some());
    }

    #[test]
    fn what_is_there_already_counts_beyond_the_limit() {
        let whole = Budget::new(100);
        let share = whole.share(50);
        let charge = share.take_anyway(150);
        assert!(share.is_full() && whole.is_full() && whole.take(1).is_none());
        drop(charge);
        assert!(share.take(50).is_some());
    }
}
