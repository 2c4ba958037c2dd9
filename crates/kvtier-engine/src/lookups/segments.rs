//! Segments: chunks of other prompts that stand in the middle of one, leased with its lookup.

use std::sync::Arc;

use kvtier_core::cache::{Counted, Lookup};
use kvtier_core::segments::{SegmentMatch, SegmentScope};
use kvtier_core::window::ChunkBitmap;
use kvtier_store::l1::L1Allocator;
use kvtier_store::tiers::{L2, Located};

use super::super::blend::Blend;
use super::find::ObjectFind;
use super::held::FoundSegments;

/// The segments of a lookup, before it is known which of them are resident.
pub(super) struct SegmentFind {
    /// Finds their objects.
    pub find: ObjectFind,
    pub blend: Arc<Blend>,
    pub scope: SegmentScope,
    pub matches: Vec<SegmentMatch>,
    /// Serial of the lookup.
    pub serial: u64,
    /// Lives while the segments are looked for.
    pub _alive: Arc<()>,
}

impl SegmentFind {
    /// Finds what L1 has. If it lacks some and there are tiers, a task asks them, and nothing is returned.
    pub(super) fn run(self) -> Option<Arc<FoundSegments>> {
        let (found, lookup) = self.find.in_l1(None);
        let l2 = self.find.context.l2.as_ref();
        let lacks_some = lookup.hit_chunks < self.matches.len();
        let Some(l2) = l2.filter(|_| lacks_some).cloned() else {
            if lacks_some {
                let absent = self.absent_from_l1(&found);
                absent.iter().for_each(|it| self.blend.segments.remove(it));
            }
            return Some(self.finish(&found, lookup));
        };
        let handle = l2.handle().clone();
        handle.spawn(async move { self.ask_tiers(&l2, lookup.counted).await });
        None
    }

    async fn ask_tiers(self, l2: &Arc<L2>, counted: Counted) {
        let request = self.find.prefetch_request(counted);
        let (_, holds) = l2.fetch(&request).await;
        let (found, lookup) = self.find.in_l1(Some(counted));
        let absent = self.absent_from_l1(&found);
        self.finish(&found, lookup);
        drop(holds);
        let rows = Arc::from(&self.find.rows[..1]);
        for segment in &absent {
            let located = Located::find(l2, &rows, &[segment.hash], &[vec![false]]).await;
            // A tier that does not answer may have the others too.
            if !located.failed.is_empty() {
                return;
            }
            if located.tiers[0][0].is_none() {
                self.blend.segments.remove(segment);
            }
        }
    }

    /// Segments that were not found and whose object of the first rank L1 lacks: other ranks may store theirs later.
    fn absent_from_l1(&self, found: &ChunkBitmap) -> Vec<SegmentMatch> {
        let matches = self.matches.iter().enumerate();
        let missing = matches.filter(|(position, _)| !found.get(*position));
        let mut missing: Vec<_> = missing.map(|(_, segment)| segment.clone()).collect();
        let hashes: Vec<_> = missing.iter().map(|segment| segment.hash).collect();
        let (cache, first) = (&self.find.context.l1.cache, &self.find.rows[0].namespace);
        let mut resident = cache.contains(first, &hashes).into_iter();
        missing.retain(|_| resident.next() == Some(false));
        missing
    }

    /// Keeps what was found for the lookup.
    fn finish(&self, found: &ChunkBitmap, lookup: Lookup<L1Allocator>) -> Arc<FoundSegments> {
        let matches = self.matches.iter().enumerate();
        let matches = matches.filter(|(position, _)| found.get(*position));
        let matches: Vec<_> = matches.map(|(_, segment)| segment.clone()).collect();
        let tokens = (matches.len() * self.find.chunk_size) as u64;
        let leased = self.blend.count_leased(lookup.lease.held());
        let found = match leased {
            // Beyond the limit a prompt has its prefix alone.
            None => Arc::default(),
            Some(leased) => {
                let metrics = &self.find.context.metrics;
                metrics.blend_matched_tokens.inc_by(tokens);
                Arc::new(FoundSegments {
                    scope: Some(self.scope),
                    matches,
                    lease: Some((lookup.lease, leased)),
                })
            }
        };
        let (held, request_id) = (&self.find.held, &self.find.request_id);
        held.set_segments(request_id, self.serial, Arc::clone(&found));
        found
    }
}
