//! The latest lookups and their outcomes, for people.
//!
//! The mutex guards the ring; nothing is taken inside.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use kvtier_common::sync::Mutex;
use kvtier_core::{ChunkHash, Namespace};

/// Lookups that are remembered, of all tenants together.
const REMEMBERED: usize = 1024;

/// Outcome of a lookup.
#[derive(Debug, Clone)]
pub struct RecentLookup {
    /// When it was asked.
    pub at: Duration,
    /// Model of the lookup.
    pub model_name: Arc<str>,
    /// Tenant of the lookup.
    pub cache_salt: Arc<str>,
    /// First chunk of the lookup.
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
pub struct RecentLookups(Mutex<LookupRing>);

#[derive(Default)]
struct LookupRing {
    lookups: VecDeque<RecentLookup>,
    /// The last ones, whose misses are not counted yet.
    uncounted: usize,
    /// Misses that were forgotten before they were counted.
    forgotten_misses: u64,
}

/// A chunk that a lookup did not find, and when it was asked.
pub struct Miss {
    /// When the lookup was asked.
    pub at: Duration,
    /// See [`RecentLookup::missing`].
    pub chunk: (Arc<Namespace>, ChunkHash),
}

impl RecentLookups {
    /// Adds one; the oldest is forgotten for it.
    pub fn push(&self, lookup: RecentLookup) {
        let mut ring = self.0.lock();
        let forgotten = match ring.lookups.len() {
            REMEMBERED => ring.lookups.pop_front(),
            _ => None,
        };
        if ring.uncounted == REMEMBERED {
            let is_miss = forgotten.as_ref().is_some_and(|it| it.missing.is_some());
            ring.forgotten_misses += u64::from(is_miss);
        } else {
            ring.uncounted += 1;
        }
        ring.lookups.push_back(lookup);
        drop(ring);
        drop(forgotten);
    }

    /// The misses since the last call, and how many more were forgotten.
    pub fn take_uncounted(&self) -> (Vec<Miss>, u64) {
        let mut ring = self.0.lock();
        let uncounted = std::mem::take(&mut ring.uncounted);
        let forgotten = std::mem::take(&mut ring.forgotten_misses);
        let latest = ring.lookups.iter().rev().take(uncounted);
        let misses = latest.filter_map(|lookup| {
            let chunk = lookup.missing.clone()?;
            Some(Miss {
                at: lookup.at,
                chunk,
            })
        });
        (misses.collect(), forgotten)
    }

    /// At most `limit` of those that `which` accepts, the latest first.
    pub fn latest(&self, limit: usize, which: impl Fn(&RecentLookup) -> bool) -> Vec<RecentLookup> {
        let ring = self.0.lock();
        let latest = ring.lookups.iter().rev().filter(|lookup| which(lookup));
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

    #[test]
    fn each_miss_is_taken_once_or_counted_as_forgotten() {
        let recent = RecentLookups::default();
        let namespace = Arc::new(Namespace::new("m", 0, 0, 0, "").expect("good names"));
        let push = |number: usize, misses: bool| {
            recent.push(RecentLookup {
                at: Duration::from_secs(number as u64),
                model_name: "m".into(),
                cache_salt: "".into(),
                first: None,
                tokens: 1,
                hit_tokens: 0,
                missing: misses.then(|| (Arc::clone(&namespace), ChunkHash([0; 32]))),
                refused: None,
            });
        };
        let taken = || {
            let (misses, forgotten) = recent.take_uncounted();
            (misses.len(), forgotten)
        };
        assert_eq!(taken(), (0, 0));
        (0..10).for_each(|number| push(number, number % 2 == 0));
        assert_eq!(taken(), (5, 0));
        assert_eq!(taken(), (0, 0));
        (0..REMEMBERED + 6).for_each(|number| push(number, number % 2 == 0));
        assert_eq!(taken(), (REMEMBERED / 2, 3));
        assert_eq!(taken(), (0, 0));
    }
}
