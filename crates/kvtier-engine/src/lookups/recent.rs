//! The latest lookups and their outcomes, for people.
//!
//! The mutex guards the ring; nothing is taken inside.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use kvtier_core::{ChunkHash, Namespace};
use kvtier_sync::Mutex;

/// Lookups that are remembered, of all tenants together.
const REMEMBERED: usize = 1024;

/// Outcome of a lookup.
#[derive(Debug, Clone)]
pub struct RecentLookup {
    /// When it was asked.
    pub at: Duration,
    /// Its model.
    pub model_name: Arc<str>,
    /// Its tenant.
    pub cache_salt: Arc<str>,
    /// Its first chunk.
    pub first: Option<ChunkHash>,
    /// Tokens asked for, in whole chunks.
    pub tokens: u64,
    /// Tokens found.
    pub hit_tokens: u64,
    /// The first chunk that was not found, in the namespace of its first rank and object group.
    pub missing: Option<(Arc<Namespace>, ChunkHash)>,
    /// Why nothing was looked for, as the metrics name it.
    pub refused: Option<&'static str>,
}

/// The latest lookups.
#[derive(Default)]
pub struct RecentLookups(Mutex<VecDeque<RecentLookup>>);

impl RecentLookups {
    /// Adds one; the oldest is forgotten for it.
    pub fn push(&self, lookup: RecentLookup) {
        let mut ring = self.0.lock();
        let forgotten = match ring.len() {
            REMEMBERED => ring.pop_front(),
            _ => None,
        };
        ring.push_back(lookup);
        drop(ring);
        drop(forgotten);
    }

    /// At most `limit` of those that `which` accepts, the latest first.
    pub fn latest(&self, limit: usize, which: impl Fn(&RecentLookup) -> bool) -> Vec<RecentLookup> {
        let ring = self.0.lock();
        let latest = ring.iter().rev().filter(|lookup| which(lookup));
        latest.take(limit).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_lookups_are_forgotten() {
        let recent = RecentLookups::default();
        for tokens in 0..REMEMBERED as u64 + 1 {
            recent.push(RecentLookup {
                at: Duration::ZERO,
                model_name: "m".into(),
                cache_salt: "".into(),
                first: None,
                tokens,
                hit_tokens: 0,
                missing: None,
                refused: None,
            });
        }
        let tokens = |limit| -> Vec<u64> {
            let latest = recent.latest(limit, |lookup| lookup.tokens % 2 == 1);
            latest.iter().map(|lookup| lookup.tokens).collect()
        };
        assert_eq!(tokens(2), [1023, 1021]);
        assert_eq!(tokens(REMEMBERED).last(), Some(&1));
        assert_eq!(recent.latest(usize::MAX, |_| true).len(), REMEMBERED);
    }
}
