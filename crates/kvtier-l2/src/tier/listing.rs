//! What is kept of a backend's listing: the most recently used objects, as many as the index can have.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::adapter::Listed;

/// Objects in the index of a backend without a capacity that others change too: some 150 MiB.
pub(super) const MAX_INDEXED: u64 = 1 << 20;

/// Objects read of one listing, and calls of the adapter with some of them: beyond those a listing is considered endless.
const MAX_LISTED: u64 = 1 << 28;
const MAX_PAGES: u64 = 1 << 22;

/// Bytes of a small object. A capacity of these is a bound of the index, whatever sizes the backend lists.
const SMALL_OBJECT: u64 = 64 << 10;

/// Capacity by which the index of a tier without one is bounded.
const ASSUMED_CAPACITY: u64 = 1 << 40;

/// Bounds of a listing.
#[derive(Debug, Clone, Copy)]
pub(super) struct ListingBounds {
    /// Objects that are kept.
    pub(super) kept: usize,
    /// Objects that are read.
    pub(super) listed: u64,
    /// Pages that are read.
    pub(super) pages: u64,
}

impl ListingBounds {
    /// Returns the bounds of a tier's listings; `is_open` if others change a backend that has no bound here.
    pub(super) fn of(capacity_bytes: Option<u64>, is_open: bool) -> Self {
        let assumed = if is_open { 0 } else { ASSUMED_CAPACITY };
        let kept = MAX_INDEXED.max(capacity_bytes.unwrap_or(assumed) / SMALL_OBJECT);
        Self {
            kept: usize::try_from(kept).unwrap_or(usize::MAX),
            listed: MAX_LISTED.max(kept),
            pages: MAX_PAGES,
        }
    }
}

/// The most recently used objects of a listing.
pub(super) struct BackendListing {
    bounds: ListingBounds,
    /// The least recently used one is on top.
    kept: BinaryHeap<Reverse<Listed>>,
    listed: u64,
    pages: u64,
}

impl BackendListing {
    pub(super) fn new(bounds: ListingBounds) -> Self {
        Self {
            bounds,
            kept: BinaryHeap::new(),
            listed: 0,
            pages: 0,
        }
    }

    /// Adds a page. Returns whether another one is wanted.
    pub(super) fn add(&mut self, objects: Vec<Listed>) -> bool {
        self.pages += 1;
        self.listed += objects.len() as u64;
        for object in objects {
            self.kept.push(Reverse(object));
            if self.kept.len() > self.bounds.kept {
                self.kept.pop();
            }
        }
        !self.is_endless()
    }

    fn is_endless(&self) -> bool {
        self.listed >= self.bounds.listed || self.pages >= self.bounds.pages
    }

    /// Logs what of the backend is not in the index.
    pub(super) fn log(&self, tier: &str) {
        let (objects, pages, kept) = (self.listed, self.pages, self.kept.len());
        if self.is_endless() {
            tracing::warn!(
                tier,
                objects,
                pages,
                kept,
                "the listing of what was stored did not end; it is read no further"
            );
        } else if objects > kept as u64 {
            tracing::warn!(
                tier,
                objects,
                kept,
                "more is stored than the index can have; the least recently used objects stay there and are not counted"
            );
        }
    }

    /// The objects that were kept, in no particular order.
    pub(super) fn into_objects(self) -> Vec<Listed> {
        let kept = self.kept.into_iter();
        kept.map(|Reverse(object)| object).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TestAdapter;

    #[test]
    fn listing_keeps_the_most_recently_used() {
        let bounds = ListingBounds {
            kept: 10,
            listed: 1000,
            pages: 100,
        };
        let mut listing = BackendListing::new(bounds);
        // In an order that is not the one of their use.
        let mut objects = (0..999).map(|number| TestAdapter::endless_object(number * 7 % 999));
        loop {
            let page: Vec<_> = objects.by_ref().take(50).collect();
            if page.is_empty() {
                break;
            }
            assert!(listing.add(page));
            assert_eq!(listing.kept.len(), 10);
        }
        let mut kept: Vec<_> = listing.into_objects();
        kept.sort_unstable();
        let youngest: Vec<_> = (989..999).map(TestAdapter::endless_object).collect();
        assert_eq!(kept, youngest);
    }

    #[test]
    fn listing_of_too_many_pages_ends() {
        let bounds = ListingBounds {
            kept: 10,
            listed: 1000,
            pages: 3,
        };
        let mut listing = BackendListing::new(bounds);
        assert!(listing.add(Vec::new()) && listing.add(Vec::new()));
        assert!(!listing.add(Vec::new()));
    }
}
